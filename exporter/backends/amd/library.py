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
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from exporter import units
from exporter.backends import kernel_files
from exporter.backends.base import Places
from exporter.backends.vendor_library import LibraryAbsentError, Starting, load
from exporter.errors import DeviceFault

PACKAGE, EXTRA, STEM = "amdsmi", "gpu-fleet-exporter[amd]", "libamd_smi.so"
# The library of each ROCm release, by its first two numbers; seen in the releases' own headers.
_LIBRARY_OF_RELEASE = {(7, 0): (26, 0), (7, 1): (26, 1), (7, 2): (26, 2)}
_NOT_SUPPORTED, _NOT_YET, _NO_DATA = 2, 3, 40
_NOT_OFFERED = (_NOT_SUPPORTED, _NOT_YET, _NO_DATA)
_PERMISSION = 10

Values = Sequence[float | None]


class _Handle(NamedTuple):
    """A processor of the library: the PCI address without its function, which may be a partition's number."""

    slot: str
    node: int | None
    handle: Any


class Library:
    """AMD's library, started where it can be. Every method answers None for what it does not know."""

    sensor = "edge"

    def __init__(self, places: Places) -> None:
        self._places = places
        self._amdsmi: ModuleType
        self._handles: dict[tuple[str, int | None], Any] = {}
        self._fits = False
        self._starting = Starting("amdsmi", self._load)
        self.used = False

    def start(self) -> None:
        """Load it and open every card, which would wake one that sleeps; only the first call does anything."""
        self._starting.begin()

    @property
    def serves(self) -> bool:
        """It has started."""
        return self._starting.done

    @property
    def absent(self) -> str:
        """Why it cannot be loaded; empty while it serves or has not been tried."""
        return self._starting.absent

    def utilization(self, address: str, node: int | None) -> Values:
        """As amd-smi shows it. Where ``gpu_metrics`` fails the library repeats its last answer, so it is read too."""
        handle = self._handle(address, node)
        if handle is None:
            return (None,)
        kernel_files.probe(f"{kernel_files.device_folder(self._places.sysfs, address)}/gpu_metrics")
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
        total = units.memory_size(total) if isinstance(total, int) else None
        used = units.memory_size(used) if isinstance(used, int) else None
        if total is None or used is None or used > total:
            return None, None, total
        return total - used, used, total

    def temperature(self, address: str, node: int | None) -> Values:
        """The edge sensor's."""
        handle = self._handle(address, node)
        if handle is None:
            return (None,)
        smi = self._amdsmi
        sensor, current = smi.AmdSmiTemperatureType.EDGE, smi.AmdSmiTemperatureMetric.CURRENT
        value = self._ask(smi.amdsmi_get_temp_metric, handle, sensor, current)
        return (units.celsius(value) if isinstance(value, int) else None,)

    def name(self, address: str) -> str:
        """The card's market name, where the binding fits the library: the struct has grown more than once."""
        handle = next((found for (slot, _), found in self._handles.items() if slot == _slot(address)), None)
        if handle is None or not self._fits:
            return ""
        try:
            name = self._ask(self._amdsmi.amdsmi_get_gpu_asic_info, handle)["market_name"]
        except (DeviceFault, TypeError, KeyError, ValueError):
            return ""
        return name if isinstance(name, str) and name not in ("", "N/A") else ""

    def _handle(self, address: str, node: int | None) -> Any:
        """The processor at the address that is that compute node: joined by both, and used where they agree."""
        if not self.serves:
            return None
        handle = self._handles.get((_slot(address), node))
        self.used = self.used or handle is not None
        return handle

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The call's answer; None where the card has no such thing. Raises ``DeviceFault``."""
        try:
            return call(*arguments)
        except self._amdsmi.AmdSmiLibraryException as error:
            if error.get_error_code() in _NOT_OFFERED:
                return None
            reason = "no-permission" if error.get_error_code() == _PERMISSION else "driver-error"
            raise DeviceFault(reason, f"{call.__name__}: {error.get_error_info()}") from error

    # --- the start, in a thread of its own

    def _load(self) -> None:
        shipped = self._prefer_rocms_own()
        self._amdsmi = load(PACKAGE, EXTRA, STEM, self._places.library)
        try:
            version = self._amdsmi.amdsmi_get_lib_version()
            self._amdsmi.amdsmi_init()
            self._fits = shipped or _fits(version)
            handles = [self._identify(handle) for handle in self._amdsmi.amdsmi_get_processor_handles()]
        except self._amdsmi.AmdSmiException as error:
            raise LibraryAbsentError(f"amdsmi_init: {' '.join(str(error).split())}") from error
        self._handles = {(found.slot, found.node): found.handle for found in handles}

    def _prefer_rocms_own(self) -> bool:
        """Put the binding that the installed ROCm ships before any other; whether there is one."""
        roots = [os.environ.get("ROCM_HOME"), os.environ.get("ROCM_PATH"), "/opt/rocm"]
        if self._places.library is not None:
            roots = [str(Path(self._places.library).parents[1])]
        for root in roots:
            folder = Path(root or "/nonexistent", "share/amd_smi")
            if (folder / PACKAGE / "__init__.py").is_file():
                sys.path.insert(0, str(folder))
                return True
        return False

    def _identify(self, handle: Any) -> _Handle:
        smi = self._amdsmi
        address = units.pci_bus_id(smi.amdsmi_get_gpu_device_bdf(handle)) or ""
        try:
            node = smi.amdsmi_get_gpu_kfd_info(handle).get("node_id")
        except smi.AmdSmiLibraryException:
            node = None
        return _Handle(_slot(address), node if isinstance(node, int) else None, handle)


def _slot(address: str) -> str:
    return address[:-2]


def _fits(version: dict[str, Any]) -> bool:
    """Whether the library is of the release that the binding is from. A library that is older or newer has other
    structs; before ROCm 6.4 the first number was the year.
    """
    try:
        release = re.match(r"(\d+)\.(\d+)", metadata.version(PACKAGE))
    except metadata.PackageNotFoundError:
        return False
    wanted = _LIBRARY_OF_RELEASE.get((int(release[1]), int(release[2]))) if release else None
    return wanted == (version.get("major"), version.get("minor"))
