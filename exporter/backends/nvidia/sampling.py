"""Reads a board or a MIG device: what the tables of this folder say, as far as it is wanted and offered."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from exporter.backends import pcie
from exporter.backends.base import Sampled
from exporter.backends.nvidia import fields, reads
from exporter.backends.nvidia.codes import NOT_OFFERED, raise_if_lost, reason_of
from exporter.backends.nvidia.events import Events
from exporter.backends.nvidia.fields import Given
from exporter.backends.nvidia.gpm import Monitoring
from exporter.backends.nvidia.missed import Missed
from exporter.backends.nvidia.reads import Read
from exporter.errors import DeviceFault
from exporter.model import Device, DeviceKey, Fault, Reading

_PROFILE = re.compile(r"MIG ([0-9]+[cg]\.[0-9a-z.+-]+)$")


class _Parts(NamedTuple):
    """What a board in one mode has; 0 of what it has not told yet."""

    mig_mode: bool | None
    fans: int
    links: int
    monitored: int
    reasons: int


class _Board(NamedTuple):
    """The calls for a board that has such parts."""

    parts: _Parts
    rows: tuple[Read, ...]
    questions: fields.Questions


class _Kept:
    """What is known of a device from before: its board's facts, its constants, which fields have answered, and which
    calls have found nothing.
    """

    def __init__(self) -> None:
        self.board: _Board | None = None
        self.chosen: fields.Chosen = {}
        self.numbers: dict[tuple[bool | None, str], int] = {}
        self.constants: dict[Read, tuple[Given, ...]] = {}
        self.missed: dict[tuple[bool | None, Read | str], Missed] = {}


class _Taking:
    """What one device gives in one cycle."""

    def __init__(self, device: Device, kept: _Kept) -> None:
        self.key, self.kept = device.key, kept
        self.slot = device.uuid
        self.given: list[Given] = []
        self.faults: list[Fault] = []

    def gave(self, metrics: Iterable[str]) -> bool:
        """Any of these has a value already."""
        return any(each.value is not None and each.metric in metrics for each in self.given)

    def readings(self) -> tuple[Reading, ...]:
        """What has a value."""
        values = ((each, each.value) for each in self.given)
        return tuple(Reading(each.metric, self.key, value, each.labels) for each, value in values if value is not None)


class Sampling:
    """Keeps what is constant of each device, and what it does not offer."""

    def __init__(self, nvml: ModuleType, sysfs: str, wanted: frozenset[str]) -> None:
        self._nvml, self._sysfs, self._wanted = nvml, sysfs, wanted
        self.driver: fields.Release = (0, 0)
        self.events = Events(nvml, wanted)
        self._monitoring = Monitoring(nvml, wanted)
        self._kept: dict[DeviceKey, _Kept] = {}

    def keep(self, there: set[str]) -> None:
        """All but these devices, by UUID, have left: what is constant of one may be another when it comes back."""
        known = dict(self._kept)  # copied: late lanes may add to it
        self._kept = {key: kept for key, kept in known.items() if key.identity in there}
        self._monitoring.forget(known.keys() - self._kept.keys())

    def sample(self, device: Device, handle: Any, board_handle: Any) -> Sampled:
        """Raises ``DeviceLost`` and ``BackendAbsent``."""
        kept = self._kept.setdefault(device.key, _Kept())
        taking = _Taking(device, kept)
        if device.parent is None:
            board = self._board(device, kept, handle)
            self._fields(taking, device, board, handle)
            self._rows(taking, device, board.rows, handle)
        else:
            self._rows(taking, device, [row for row in reads.READS if row.parts], handle)
        pending = self._monitored(taking, device, board_handle)
        answers = bool(taking.readings()) or not taking.faults  # else the card says who it is, and nothing else
        if answers:
            self._beside(taking, device, handle)
        found = pcie.NOTHING
        if answers and device.parent is None:
            found = pcie.read(self._sysfs, device.pci_bus_id, device.key, self._wanted)
        return Sampled((*taking.readings(), *found.readings), (*taking.faults, *found.faults), pending=pending)

    def _board(self, device: Device, kept: _Kept, handle: Any) -> _Board:
        """Made when the board is first read, and again when it tells of more."""
        nvml, monitoring = self._nvml, self._monitoring
        fans = links = monitored = reasons = 0
        if self._wants("fan_speed"):
            fans = self._number(device, kept, "fans", lambda: reads.fan_count(nvml, handle))
        if self._wants("link_up", "link_transmitted", "link_received", "link_errors"):
            links = self._number(device, kept, "links", lambda: fields.link_count(nvml, handle))
        if monitoring.metrics(device) or (device.mig_mode and self._wants("utilization")):
            monitored = self._number(device, kept, "gpm", lambda: monitoring.supports(handle))
        if self._wants("throttled"):
            reasons = self._number(device, kept, "reasons", lambda: reads.supported_reasons(nvml, handle))
        parts = _Parts(device.mig_mode, fans, links, monitored, reasons)
        if kept.board is None or kept.board.parts != parts:
            rows = (row for row in reads.of_board(fans, reasons) if row.boards and self._wants(*row.metrics))
            asked = fields.questions(self._wanted, links, self.driver)
            kept.board = _Board(parts, tuple(rows), fields.Questions(asked, kept.chosen))
        return kept.board

    def _wants(self, *metrics: str) -> bool:
        return not self._wanted.isdisjoint(metrics)

    def _number(self, device: Device, kept: _Kept, name: str, call: Callable[[], int | None]) -> int:
        """What a board tells of itself, asked for until it is known; 0 until then."""
        about = (device.mig_mode, name)
        missed = kept.missed.setdefault(about, Missed())
        if about not in kept.numbers and not missed.rests():
            try:
                number = call()
            except self._nvml.NVMLError as error:
                raise_if_lost(error, device.uuid)
                number = None
            missed.note(number is not None)
            if number is not None:
                kept.numbers[about] = number
        return kept.numbers.get(about, 0)

    def _fields(self, taking: _Taking, device: Device, board: _Board, handle: Any) -> None:
        try:
            taking.given += board.questions.ask(self._nvml, handle)
        except DeviceFault as fault:
            taking.faults.append(Fault(fault.reason, fault.detail, device.key))
        except self._nvml.NVMLError as error:
            raise_if_lost(error, device.uuid)
            if error.value not in NOT_OFFERED:
                taking.faults.append(Fault(reason_of(error.value), f"nvmlDeviceGetFieldValues: {error}", device.key))

    def _rows(self, taking: _Taking, device: Device, rows: Sequence[Read], handle: Any) -> None:
        for row in rows:
            missed = taking.kept.missed.setdefault((device.mig_mode, row), Missed())
            if not self._wants(*row.metrics) or missed.rests() or (row.instead and taking.gave(row.metrics)):
                continue
            found = self._call(taking, row, handle)
            if found is not None:
                missed.note(bool(found))
                taking.given += found

    def _call(self, taking: _Taking, row: Read, handle: Any) -> tuple[Given, ...] | None:
        """What a call gives, nothing where the device does not offer it, and None where it has failed."""
        try:
            return tuple(row.call(self._nvml, handle))
        except self._nvml.NVMLError as error:
            raise_if_lost(error, taking.slot)
            if error.value in NOT_OFFERED:
                return ()
            taking.faults.append(Fault(reason_of(error.value), f"{', '.join(row.metrics)}: {error}", taking.key))
            return None

    def _monitored(self, taking: _Taking, device: Device, board_handle: Any) -> bool:
        """Whether GPM needs another cycle. It knows GPU instances: parts of one have no shares of their own."""
        of_board = self._kept.get(device.parent or device.key)
        board = None if of_board is None else of_board.board
        if (
            board is None
            or not board.parts.monitored
            or not self._monitoring.metrics(device)
            or _shares_its_instance(device)
        ):
            return False
        try:
            found = self._monitoring.read(device, board_handle)
        except self._nvml.NVMLError as error:
            raise_if_lost(error, device.uuid)
            if error.value not in NOT_OFFERED:
                taking.faults.append(Fault(reason_of(error.value), f"GPM: {error}", device.key))
            return False
        taking.given += found or ()
        return found is None

    def _beside(self, taking: _Taking, device: Device, handle: Any) -> None:
        """What says nothing of whether the card answers: constants, and what the driver has told by itself."""
        if device.parent is None:
            for row in reads.CONSTANTS:
                if self._wants(*row.metrics):
                    taking.given += self._constant(taking, row, handle)
            taking.given += self.events.of(device.key)
            return
        taking.given += _profile(device)
        if self._wants("multiprocessors"):
            taking.given += self._constant(taking, _MULTIPROCESSORS, handle)

    def _constant(self, taking: _Taking, row: Read, handle: Any) -> tuple[Given, ...]:
        """Asked for until it is known; what fails here is no fault of the cycle."""
        missed = taking.kept.missed.setdefault((None, row), Missed())
        if row not in taking.kept.constants and not missed.rests():
            try:
                given = tuple(each for each in row.call(self._nvml, handle) if each.value is not None)
            except self._nvml.NVMLError as error:
                raise_if_lost(error, taking.slot)
                given = ()
            missed.note(bool(given))
            if given:
                taking.kept.constants[row] = given
        return taking.kept.constants.get(row, ())


def _profile_of(device: Device) -> str:
    """The library puts the profile's name at the end of an instance's; empty where it does not."""
    found = _PROFILE.search(device.name)
    return "" if found is None else found[1]


def _profile(device: Device) -> Iterator[Given]:
    name = _profile_of(device)
    if name:
        yield Given("mig_instance", 1.0, (name,))


def _shares_its_instance(device: Device) -> bool:
    """A compute instance that is less than its GPU instance has a profile such as ``1c.3g.20gb``."""
    return device.parent is not None and not re.match(r"[0-9]+g\.", _profile_of(device))


def _multiprocessors(nvml: ModuleType, handle: Any) -> Iterable[Given]:
    return (Given("multiprocessors", float(nvml.nvmlDeviceGetAttributes(handle).multiprocessorCount)),)


_MULTIPROCESSORS = Read(("multiprocessors",), _multiprocessors)
