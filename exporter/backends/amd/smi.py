"""AMD's library through ``amdsmi``: what a partition or a virtual function does, of which the kernel publishes nothing.

The binding that the installed ROCm ships fits its library; one from PyPI fits that of its own release alone, and a
struct that has grown since would be written past its end. So only calls are used whose structs have kept their size,
and ``gpu_metrics_info`` never.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from exporter import units
from exporter.backends import kernel_files
from exporter.backends.amd.turns import Turns
from exporter.backends.base import Places
from exporter.backends.vendor_library import LibraryAbsentError, Starting, load
from exporter.errors import BackendAbsent, DeviceFault

PACKAGE, EXTRA, STEM = "amdsmi", "gpu-fleet-exporter[amd]", "libamd_smi.so"
_BINDING = f"share/amd_smi/{PACKAGE}/__init__.py"
# The library of a ROCm release, by their first two numbers: ROCm 7.0.2 documents AMD SMI 26.0.2. Of others it is not
# known, and then the binding does not count as fitting.
_LIBRARY_OF_RELEASE = {(7, 0): (26, 0)}
_NOT_SUPPORTED, _NOT_YET, _NO_DATA = 2, 3, 40
_NOT_OFFERED = (_NOT_SUPPORTED, _NOT_YET, _NO_DATA)
_PERMISSION = 10
# Without these a binding is of no use; older ones lack `amdsmi_get_gpu_kfd_info`, and are used for whole cards.
_NEEDED = (
    *("amdsmi_init", "amdsmi_get_processor_handles", "amdsmi_get_gpu_device_bdf", "amdsmi_get_gpu_activity"),
    *("amdsmi_get_gpu_memory_total", "amdsmi_get_gpu_memory_usage", "amdsmi_get_temp_metric", "AmdSmiMemoryType"),
    *("AmdSmiTemperatureType", "AmdSmiTemperatureMetric", "AmdSmiException", "AmdSmiLibraryException"),
)

Values = Sequence[float | None]


class _Processor(NamedTuple):
    """A card of the library, or a partition, whose number may stand where the PCI function is; ``node`` is its KFD
    node, None where the library does not say.
    """

    address: str
    node: int | None
    handle: Any


def free_used_total(total: int | None, used: int | None) -> Values:
    """The rest is free; more in use than there is makes both unknown."""
    total = None if total is None else units.memory_size(total)
    used = None if used is None else units.byte_count(used)
    if total is None or used is None or used > total:
        return None, None, total
    return total - used, used, total


class Library:
    """AMD's library, started where it can be. Every method answers None for what it does not know."""

    sensor = "edge"

    def __init__(self, places: Places) -> None:
        self._places = places
        self._amdsmi: ModuleType
        self._processors: tuple[_Processor, ...] = ()
        self._fits = False
        self._starting = Starting("amdsmi", self._load, cautious=places.cautious)
        self._begun = self._outdated = False
        self._turns = Turns()

    def start(self) -> None:
        """Load it and open every card, which would wake one that sleeps; only the first call does anything."""
        self._begun = True
        self._starting.begin()

    def outdate(self) -> None:
        """The cards have changed. The library finds them by names that the kernel gives anew when cards come and go,
        and looks only once: one that has begun before may take one card for another.
        """
        self._outdated = self._begun

    @property
    def serves(self) -> bool:
        """It has started."""
        return self._starting.done

    @property
    def absent(self) -> str:
        """Why it cannot be loaded; empty while it serves or has not been tried."""
        return self._starting.absent

    def knows(self, address: str, node: int | None) -> bool:
        """It has a processor that is this card, or this partition."""
        return self.serves and not self._outdated and self._found(address, node) is not None

    def utilization(self, address: str, node: int | None) -> Values:
        """As amd-smi shows it. Where ``gpu_metrics`` fails the library repeats its last answer, so it is read too."""
        handle = self._handle(address, node)
        if handle is None or not self._has_metrics(address):
            return (None,)
        activity = self._ask(self._amdsmi.amdsmi_get_gpu_activity, handle)
        busy = activity.get("gfx_activity") if isinstance(activity, dict) else None
        return (units.percent(busy) if isinstance(busy, int) else None,)

    def memory(self, address: str, node: int | None) -> Values:
        """Free, used and total. The library says 0 and success for a file that it cannot read, and no card uses 0."""
        handle = self._handle(address, node)
        if handle is None:
            return None, None, None
        kind = self._amdsmi.AmdSmiMemoryType.VRAM
        total = self._ask(self._amdsmi.amdsmi_get_gpu_memory_total, handle, kind)
        used = self._ask(self._amdsmi.amdsmi_get_gpu_memory_usage, handle, kind)
        return free_used_total(
            total if isinstance(total, int) else None, used if used and isinstance(used, int) else None
        )

    def temperature(self, address: str, node: int | None) -> Values:
        """The edge sensor's."""
        handle = self._handle(address, node)
        if handle is None:
            return (None,)
        smi = self._amdsmi
        sensor, current = smi.AmdSmiTemperatureType.EDGE, smi.AmdSmiTemperatureMetric.CURRENT
        value = self._ask(smi.amdsmi_get_temp_metric, handle, sensor, current)
        return (units.celsius(value) if isinstance(value, int) else None,)

    def energy(self, address: str, node: int | None) -> Values:
        """Joules, from a count of ticks whose size the library tells. Where ``gpu_metrics`` fails it may repeat its
        last answer, so it is read too; and 0 is what it says of a chip whose energy is counted at another. A library
        that may take one card for another is not asked, and no process ends for that: the kernel tells all else.
        """
        handle = None if not self.serves or self._outdated else self._found(address, node)
        count = getattr(self._amdsmi, "amdsmi_get_energy_count", None) if handle is not None else None
        if count is None or not self._has_metrics(address):
            return (None,)
        found = self._ask(count, handle)
        told = found if isinstance(found, dict) else {}
        ticks, size = told.get("energy_accumulator"), told.get("counter_resolution")
        if not isinstance(ticks, int) or not isinstance(size, float):
            return (None,)
        return (units.microjoule_ticks(ticks, size) or None,)

    def name(self, address: str) -> str:
        """The card's market name, where the binding fits the library: the struct has grown more than once."""
        if not self.serves or self._outdated or not self._fits:
            return ""
        handle = next((found.handle for found in self._processors if _slot(found.address) == _slot(address)), None)
        if handle is None:
            return ""
        try:
            name = self._ask(self._amdsmi.amdsmi_get_gpu_asic_info, handle)["market_name"]
        except (DeviceFault, AttributeError, TypeError, KeyError, ValueError):
            return ""
        return name if isinstance(name, str) and name not in ("", "N/A") else ""

    def _has_metrics(self, address: str) -> bool:
        """Raises ``DeviceFault`` where the table is there and cannot be read."""
        return kernel_files.probe(f"{kernel_files.device_folder(self._places.sysfs, address)}/gpu_metrics")

    def _handle(self, address: str, node: int | None) -> Any:
        """The processor to ask. Raises ``BackendAbsent`` where the cards have changed since the library was started:
        another process must ask it.
        """
        if not self.serves:
            return None
        if self._outdated:
            raise BackendAbsent("driver-mismatch", "the cards are not those that AMD's library was started with")
        return self._found(address, node)

    def _found(self, address: str, node: int | None) -> Any:
        """The one processor that is at the address and is that compute node, or, where the library tells no node, the
        one at exactly that address. None where there are two, or a partition is asked for that may be another.
        """
        here = [found for found in self._processors if _slot(found.address) == _slot(address)]
        there = [found for found in here if found.node is not None and found.node == node]
        if not there and not any(found.node is not None for found in here):
            there = [found for found in here if found.address == address] if len(here) == 1 else []
        return there[0].handle if node is not None and len(there) == 1 else None

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The call's answer; None where the card has no such thing. Raises ``DeviceFault``."""
        try:
            with self._turns.alone():
                return call(*arguments)
        except self._amdsmi.AmdSmiLibraryException as error:
            if error.get_error_code() in _NOT_OFFERED:
                return None
            reason = "no-permission" if error.get_error_code() == _PERMISSION else "driver-error"
            raise DeviceFault(reason, f"{call.__name__}: {error.get_error_info()}") from error

    # --- the start, in a thread of its own

    def _load(self) -> None:
        root = self._rocm_with_binding()
        path = self._places.shared_object
        if root is not None:
            sys.path.insert(0, f"{root}/share/amd_smi")
            own = f"{root}/lib/{STEM}"
            path = path or (own if Path(own).is_file() else None)
        self._amdsmi = load(PACKAGE, EXTRA, STEM, path)
        lacking = [name for name in _NEEDED if not hasattr(self._amdsmi, name)]
        if lacking:
            raise LibraryAbsentError(f"the package {PACKAGE} has no {', '.join(lacking)}")
        try:
            self._amdsmi.amdsmi_init()
            handles = self._amdsmi.amdsmi_get_processor_handles()
        except self._amdsmi.AmdSmiException as error:
            raise LibraryAbsentError(f"amdsmi_init: {' '.join(str(error).split())}") from error
        self._fits = root is not None or self._is_of_the_bindings_release()
        found = [self._identified(handle) for handle in handles]
        self._processors = tuple(processor for processor in found if processor is not None)

    def _rocm_with_binding(self) -> str | None:
        """The folder of an installed ROCm that ships a binding: it fits the library there, as no other does."""
        roots = [os.environ.get("ROCM_HOME"), os.environ.get("ROCM_PATH"), "/opt/rocm"]
        if self._places.shared_object is not None:
            roots = [str(Path(self._places.shared_object).absolute().parent.parent)]
        return next((root for root in roots if root and Path(root, _BINDING).is_file()), None)

    def _is_of_the_bindings_release(self) -> bool:
        """A library that is older or newer than the binding may have other structs."""
        try:
            release = re.match(r"(\d+)\.(\d+)", _release())
            version = self._amdsmi.amdsmi_get_lib_version()
        except (ImportError, AttributeError, ValueError, self._amdsmi.AmdSmiException):
            return False
        wanted = _LIBRARY_OF_RELEASE.get((int(release[1]), int(release[2]))) if release else None
        return wanted == (version.get("major"), version.get("minor"))

    def _identified(self, handle: Any) -> _Processor | None:
        """None for a processor that does not say where it is; that costs no other's values."""
        smi = self._amdsmi
        try:
            address = units.pci_bus_id(smi.amdsmi_get_gpu_device_bdf(handle))
        except smi.AmdSmiException:
            return None
        return None if address is None else _Processor(address, self._node(handle), handle)

    def _node(self, handle: Any) -> int | None:
        try:
            node = self._amdsmi.amdsmi_get_gpu_kfd_info(handle).get("node_id")
        except (AttributeError, self._amdsmi.AmdSmiException):
            return None
        return node if isinstance(node, int) else None


def _release() -> str:
    """The binding's. Python's packages know it too, but to ask them takes two MiB. Raises ``ImportError``."""
    try:
        return str(import_module(f"{PACKAGE}._version").__version__)
    except (ImportError, AttributeError):
        from importlib import metadata

        return metadata.version(PACKAGE)


def _slot(address: str) -> str:
    """The address without its function, which may be a partition's number."""
    return address[:-2]
