"""NVIDIA: NVML through ``pynvml`` (the module of the package ``nvidia-ml-py``)."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from exporter import pci, units
from exporter.backends.base import Note, Places, Sampled, Use
from exporter.backends.nvidia import fields
from exporter.backends.nvidia.codes import (
    INVALID_ARGUMENT,
    NONE_HERE,
    NOT_FOUND,
    NOT_SUPPORTED,
    card_error,
    raise_if_lost,
    reason_of,
)
from exporter.backends.nvidia.missed import Missed
from exporter.backends.nvidia.processes import Processes
from exporter.backends.nvidia.sampling import Sampling
from exporter.errors import BackendAbsent, DeviceAsleep, DeviceFault
from exporter.model import Device, DeviceKey

VENDOR = "nvidia"

Bus = tuple[tuple[str, int], ...]
"""The addresses of the driver's cards, each with a number that is another when the card was away meanwhile."""


class _Facts(NamedTuple):
    """What does not change while a card is at an address, and in every cycle identified there. ``bus`` is what sysfs
    listed of the driver's cards when the card was asked for its address.
    """

    bus: Bus
    pci_bus_id: str
    name: str
    minor_number: int | None
    memory_total_bytes: int | None


class NvidiaBackend:
    """NVML, initialised without attaching to any card, so that none is woken.

    A slot is NVML's index; while a card of the driver is asleep, slots are PCI addresses instead, since asking NVML by
    index would attach to, and wake, whichever card has it.
    """

    vendor = VENDOR

    def __init__(self, places: Places) -> None:
        self._sysfs, self._procfs, self._library = places.sysfs, places.procfs, places.shared_object
        self._wanted = places.wanted
        self._nvml: ModuleType
        self.driver_version = ""
        self._facts: dict[str, _Facts] = {}
        self._identified: set[str] = set()
        self._handles: dict[DeviceKey, Any] = {}
        self._known: dict[str, tuple[Device, ...]] = {}
        self._bus: Bus = ()
        self._without_mig: dict[str, Missed] = {}
        self._sampling: Sampling
        self._processes: Processes

    def open(self) -> None:
        """Load and start NVML; raises ``BackendAbsent``."""
        try:
            import pynvml
        except ImportError as error:
            raise BackendAbsent("library-missing", f"the package nvidia-ml-py cannot be imported: {error}") from error
        self._nvml = pynvml
        self._sampling = Sampling(pynvml, self._sysfs, self._wanted)
        self._processes = Processes(pynvml, self._wanted)
        self._preload()
        try:
            pynvml.nvmlInitWithFlags(pynvml.NVML_INIT_FLAG_NO_ATTACH)
        except pynvml.NVMLError as error:
            raise BackendAbsent(reason_of(error.value), f"nvmlInitWithFlags: {error}") from error
        with contextlib.suppress(pynvml.NVMLError, UnicodeDecodeError):
            self.driver_version = pynvml.nvmlSystemGetDriverVersion()
        self._sampling.driver = fields.release(self.driver_version)

    def _preload(self) -> None:
        """Load the settings' library: pynvml asks for ``libnvidia-ml.so.1``, and gets what is loaded by that name."""
        if self._library is None:
            return
        try:
            ctypes.CDLL(self._library, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise BackendAbsent("library-missing", f"libraries.nvidia: {error}") from error

    def close(self) -> None:
        """Let NVML go."""
        self._nvml.nvmlShutdown()

    def slots(self) -> Sequence[str]:
        """NVML's indices, or PCI addresses while a card sleeps."""
        # A card that was away meanwhile may have another minor number. Copied first: late lanes may add to it.
        known, identified = dict(self._facts), self._identified
        self._facts, self._identified = {uuid: known[uuid] for uuid in known if uuid in identified}, set()
        self._sampling.keep(identified)
        self._without_mig = {uuid: self._without_mig[uuid] for uuid in dict(self._without_mig) if uuid in identified}
        bound = pci.bound_to(self._sysfs, VENDOR)
        self._bus = tuple((address, pci.appearance(self._sysfs, address)) for address in bound)
        gone = {uuid for uuid, facts in known.items() if bound and facts.pci_bus_id not in bound}
        self._sampling.events.forget(gone)
        self._sampling.events.drain()
        if any(pci.is_asleep(self._sysfs, card) for card in bound):
            return bound
        try:
            count = self._nvml.nvmlDeviceGetCount()
        except self._nvml.NVMLError as error:
            raise BackendAbsent(reason_of(error.value), f"nvmlDeviceGetCount: {error}") from error
        if count == 0:
            raise BackendAbsent("no-devices", "the driver is loaded and reports no GPU")
        return [str(index) for index in range(count)]

    def identify(self, slot: str, note: Note) -> tuple[Device, ...]:
        """The board in a slot and its MIG devices."""
        if units.pci_bus_id(slot) and pci.is_asleep(self._sysfs, slot):
            raise DeviceAsleep(slot)
        try:
            handle, index = self._handle(slot)
            if handle is None:
                return ()
            board = self._board(handle, index, note)
            parts = list(self._parts(handle, board))
        except self._nvml.NVMLError as error:
            raise card_error(error, slot) from error
        self._identified |= {part.uuid for part, _ in parts}
        self._handles |= {device.key: found for device, found in ((board, handle), *parts)}
        self._known[board.pci_bus_id] = devices = (board, *(part for part, _ in parts))
        return devices

    def sample(self, device: Device) -> Sampled:
        """Every row of the tables that the device can give."""
        handle = self._handles[device.key]
        return self._sampling.sample(device, handle, self._handles[device.parent or device.key])

    def users(self, device: Device) -> Collection[Use] | None:
        """The processes that compute or draw there; not of a board in MIG mode, whose MIG devices have their own."""
        if device.mig_mode:
            return None
        try:
            return self._processes.on(device.key, self._handles[device.key], part=device.parent is not None)
        except self._nvml.NVMLError as error:
            raise_if_lost(error, device.uuid)
            return None

    def asleep(self, slot: str) -> tuple[Device, ...]:
        """The card as last read; where another is there by now, or none was read, what the driver's own ``/proc`` file
        says without touching the card.
        """
        told = _placeholder(slot, _information(self._procfs, slot))
        known = self._known.get(slot)
        return known if known and told.uuid in ("", known[0].uuid) else (told,)

    def _handle(self, slot: str) -> tuple[Any, int]:
        nvml = self._nvml
        if units.pci_bus_id(slot) is None:
            return nvml.nvmlDeviceGetHandleByIndex(int(slot)), int(slot)
        try:
            handle = nvml.nvmlDeviceGetHandleByPciBusId(slot)
        except nvml.NVMLError as error:
            if error.value == NOT_FOUND:  # a card of the host that is not this container's
                return None, -1
            raise
        return handle, nvml.nvmlDeviceGetIndex(handle)

    def _board(self, handle: Any, index: int, note: Note) -> Device:
        uuid = self._uuid(handle)
        key, facts = DeviceKey(VENDOR, uuid), self._facts.get(uuid)
        address = facts.pci_bus_id if facts is not None and self._stays(facts) else self._address(handle)
        note(Device(key=key, physical_index=index, pci_bus_id=address, uuid=uuid))
        # One that was away between two looks may have another minor number, whatever its address is.
        came_back = facts is not None and dict(facts.bus).get(address) != dict(self._bus).get(address)
        if facts is None or facts.pci_bus_id != address or came_back:
            facts = self._facts[uuid] = self._look_up(handle, address)
        elif facts.bus != self._bus:
            self._facts[uuid] = facts._replace(bus=self._bus)
        self._identified.add(uuid)
        self._sampling.events.register(key, handle, dict(self._bus).get(address, 0))
        return Device(
            key=key,
            physical_index=index,
            pci_bus_id=address,
            uuid=uuid,
            name=facts.name,
            memory_total_bytes=facts.memory_total_bytes,
            minor_number=facts.minor_number,
            opened_by=_opened_by(facts.minor_number),
            temperature_sensor="gpu",
            mig_mode=self._mig_mode(uuid, handle),
        )

    def _uuid(self, handle: Any) -> str:
        """The identity; without one there is no device (an integrated board whose driver supports no query)."""
        uuid = self._nvml.nvmlDeviceGetUUID(handle)
        if not isinstance(uuid, str) or not uuid.startswith(("GPU-", "MIG-")):
            raise DeviceFault("unsupported", f"the driver gives {uuid!r} for a UUID")
        return uuid

    def _address(self, handle: Any) -> str:
        """Asked again when the bus has changed: a card that was plugged into another slot keeps its UUID."""
        address = units.pci_bus_id(_text(self._nvml.nvmlDeviceGetPciInfo(handle).busId))
        if address is None:
            raise DeviceFault("unsupported", "the driver gives no PCI address")
        return address

    def _stays(self, facts: _Facts) -> bool:
        """Sysfs lists the driver's cards as when the card was asked for its address, and this address among them."""
        return facts.bus == self._bus and any(address == facts.pci_bus_id for address, _ in self._bus)

    def _look_up(self, handle: Any, address: str) -> _Facts:
        nvml = self._nvml
        return _Facts(
            self._bus,
            address,
            self._optional(nvml.nvmlDeviceGetName, handle) or "",
            self._optional(nvml.nvmlDeviceGetMinorNumber, handle),
            self._memory_total(handle),
        )

    def _memory_total(self, handle: Any) -> int | None:
        info = self._optional(self._nvml.nvmlDeviceGetMemoryInfo, handle)
        return None if info is None else units.memory_size(info.total)

    def _mig_mode(self, uuid: str, handle: Any) -> bool | None:
        """None of a card without such a mode, which is asked for it rarely."""
        missed = self._without_mig.setdefault(uuid, Missed())
        if missed.rests():
            return None
        modes = self._optional(self._nvml.nvmlDeviceGetMigMode, handle)
        missed.note(modes is not None)
        return None if modes is None else modes[0] == self._nvml.NVML_DEVICE_MIG_ENABLE

    def _optional(self, call: Callable[[Any], Any], handle: Any) -> Any:
        """The call's answer; None where this card, driver or user has no such thing.

        Any other error is raised: what is not known for a moment must not pass for what is not there.
        """
        try:
            return call(handle)
        except UnicodeDecodeError:  # a text that is none costs that text alone
            return None
        except self._nvml.NVMLError as error:
            if error.value not in NONE_HERE:
                raise
            return None

    def _parts(self, handle: Any, board: Device) -> Iterator[tuple[Device, Any]]:
        """The MIG devices of a board. Their indices have holes, so every one is tried."""
        if not board.mig_mode:
            return
        nvml = self._nvml
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            try:
                part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
                yield self._part(part, index, board), part
            except nvml.NVMLError as error:
                if error.value not in (NOT_FOUND, NOT_SUPPORTED, INVALID_ARGUMENT):
                    raise

    def _part(self, handle: Any, index: int, board: Device) -> Device:
        nvml = self._nvml
        gpu_instance = nvml.nvmlDeviceGetGpuInstanceId(handle)
        compute_instance = nvml.nvmlDeviceGetComputeInstanceId(handle)
        uuid = self._uuid(handle)
        return Device(
            key=DeviceKey(VENDOR, uuid),
            physical_index=board.physical_index,
            pci_bus_id=board.pci_bus_id,
            uuid=uuid,
            name=self._optional(nvml.nvmlDeviceGetName, handle) or "",
            memory_total_bytes=self._memory_total(handle),
            partition=f"{gpu_instance}/{compute_instance}",
            parent=board.key,
            opened_by=_opened_by(board.minor_number, f"/gi{gpu_instance}/ci{compute_instance}"),
            mig_index=index,
            gpu_instance=gpu_instance,
            compute_instance=compute_instance,
        )


def _opened_by(minor: int | None, capability: str = "") -> tuple[str, ...]:
    """/dev/nvidiaN; for a MIG instance its capability too."""
    card = f"nvidia{minor}"
    return () if minor is None else (card, card + capability) if capability else (card,)


def _text(value: str | bytes) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def _information(procfs: str, address: str) -> dict[str, str]:
    """``/proc/driver/nvidia/gpus/<address>/information``: lines of ``Name:  value``; empty when it cannot be read."""
    try:
        text = Path(procfs, "driver/nvidia/gpus", address, "information").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _placeholder(address: str, information: dict[str, str]) -> Device:
    """A card that was asleep from the start. Until the card was used once, the driver prints its UUID as ``????``."""
    uuid = information.get("GPU UUID", "")
    uuid = uuid if uuid.startswith("GPU-") and "?" not in uuid else ""
    minor_text = information.get("Device Minor", "")
    minor = int(minor_text) if minor_text.isdecimal() else None
    return Device(
        key=DeviceKey(VENDOR, uuid or address),
        physical_index=None,
        pci_bus_id=address,
        uuid=uuid,
        name=information.get("Model", ""),
        minor_number=minor,
        opened_by=_opened_by(minor),
        temperature_sensor="gpu",
    )
