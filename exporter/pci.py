"""What sysfs says of the host's display and accelerator devices, without waking any."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from exporter.units import pci_bus_id
from exporter.vendors import VENDORS

# Drivers that hold a card for a virtual machine, or for nobody.
_HANDED_AWAY = ("vfio-pci", "pci-stub", "pciback", "xen-pciback")


def cards(sysfs: str, vendor: str) -> Iterator[str]:
    """PCI addresses of the vendor's GPUs, display controllers and processing accelerators, in no promised order.

    Nothing is yielded where sysfs has no PCI bus (some containers and virtual machines). A file is read for each device
    of the bus, which takes milliseconds on a large one.
    """
    return (address for address in addresses(sysfs) if is_gpu(sysfs, address, vendor))


def addresses(sysfs: str) -> list[str]:
    """Every device of the PCI bus, in no promised order."""
    found = (pci_bus_id(name) for name in _names(f"{sysfs}/bus/pci/devices"))
    return [address for address in found if address]


def is_gpu(sysfs: str, address: str, vendor: str) -> bool:
    """Whether the device at an address is the vendor's, and of a class that its GPUs have."""
    folder, known = f"{sysfs}/bus/pci/devices/{address}", VENDORS[vendor]
    return _read(f"{folder}/vendor") == known.pci_id and _read(f"{folder}/class").startswith(known.classes)


def is_known(sysfs: str, address: str) -> bool:
    """Whether sysfs says what is at an address: not yet, while the device is only just appearing."""
    folder = f"{sysfs}/bus/pci/devices/{address}"
    return bool(_read(f"{folder}/vendor") and _read(f"{folder}/class"))


def driver_of(sysfs: str, address: str) -> str | None:
    """The kernel driver that serves the device on this host; None where none does, empty where it is handed away."""
    try:
        name = Path(f"{sysfs}/bus/pci/devices/{address}/driver").readlink().name
    except OSError:
        return None
    return "" if name in _HANDED_AWAY else name


def bound_to(sysfs: str, driver: str) -> list[str]:
    """PCI addresses of the devices that a kernel driver serves, in order: one folder read, however large the bus is."""
    addresses = (pci_bus_id(name) for name in _names(f"{sysfs}/bus/pci/drivers/{driver}"))
    return sorted(address for address in addresses if address)


def is_asleep(sysfs: str, address: str) -> bool:
    """The device is suspended by runtime power management, so that any call to its driver would wake it.

    Source: ``power/runtime_status``, which reads without touching the device. An unreadable file means awake.
    """
    return _power(sysfs, address) in ("suspended", "suspending")


def power_has_failed(sysfs: str, address: str) -> bool:
    """The device could not be suspended or woken once, and since then the kernel refuses whatever needs it awake: its
    driver's files then answer what they also answer for a value that the device has not (EINVAL).

    Source: ``error`` in ``power/runtime_status``.
    """
    return _power(sysfs, address) == "error"


def _power(sysfs: str, address: str) -> str:
    return _read(f"{sysfs}/bus/pci/devices/{address}/power/runtime_status")


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208  (names are all that is wanted)
    except OSError:
        return []


def _read(path: str) -> str:
    """A small file's text; empty when it cannot be read. Unbuffered: this runs for each card in each cycle."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            return (file.read(256) or b"").decode("ascii", "replace").strip()  # None: try again
    except OSError:
        return ""


def appearance(sysfs: str, address: str) -> int:
    """Another number when the device has left the bus and come back; 0 where it is not listed."""
    try:
        return os.stat(f"{sysfs}/bus/pci/devices/{address}/vendor").st_ino  # noqa: PTH116  (once a card and cycle)
    except OSError:
        return 0
