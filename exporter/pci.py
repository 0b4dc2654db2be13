"""What sysfs says of the host's display and accelerator devices, without waking any."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from exporter.units import pci_bus_id

VENDOR_IDS = {"nvidia": "0x10de", "amd": "0x1002", "intel": "0x8086"}

_DISPLAY, _ACCELERATOR = "0x03", "0x12"


def cards(sysfs: str, vendor: str) -> Iterator[str]:
    """PCI addresses of the vendor's display controllers and processing accelerators, in no promised order.

    Nothing is yielded where sysfs has no PCI bus (some containers and virtual machines).
    """
    wanted = VENDOR_IDS.get(vendor)
    for folder in _folders(Path(sysfs, "bus/pci/devices")):
        address = pci_bus_id(folder.name)
        if address is None or _read(folder / "vendor") != wanted:
            continue
        if _read(folder / "class").startswith((_DISPLAY, _ACCELERATOR)):
            yield address


def driver_of(sysfs: str, address: str) -> str:
    """The kernel driver that the device is bound to; empty when none is."""
    try:
        return Path(sysfs, "bus/pci/devices", address, "driver").readlink().name
    except OSError:
        return ""


def is_asleep(sysfs: str, address: str) -> bool:
    """The device is suspended by runtime power management, so that any call to its driver would wake it.

    Source: ``power/runtime_status``, which reads without touching the device. An unreadable file means awake.
    """
    return _read(Path(sysfs, "bus/pci/devices", address, "power/runtime_status")) in ("suspended", "suspending")


def _folders(parent: Path) -> list[Path]:
    try:
        return list(parent.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
