"""The card's PCIe link, as the kernel tells it of every vendor's cards: generation, lanes and errors.

A card with a switch of its own (AMD's and Intel's discrete ones) has its link at the switch: what its GPU says of the
link behind that is made up, 2.5 GT/s and one lane of Intel's Arc for example.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from exporter.backends import kernel_files
from exporter.backends.kernel_files import device_folder
from exporter.errors import DeviceFault, DeviceLost
from exporter.model import DeviceKey, Fault, Reading
from exporter.units import pci_bus_id

_GENERATIONS = {
    "2.5": 1,
    "5.0": 2,
    "5": 2,
    "8.0": 3,
    "8": 3,
    "16.0": 4,
    "16": 4,
    "32.0": 5,
    "32": 5,
    "64.0": 6,
    "64": 6,
}
_MOST_LANES = 32
_MOST_BRIDGES = 2
_SEVERITIES = {"correctable": "TOTAL_ERR_COR", "nonfatal": "TOTAL_ERR_NONFATAL", "fatal": "TOTAL_ERR_FATAL"}


class Found(NamedTuple):
    """What the files gave, and what could not be read."""

    readings: tuple[Reading, ...]
    faults: tuple[Fault, ...]


NOTHING = Found((), ())


def _generation(text: str) -> float | None:
    """Of ``16.0 GT/s PCIe``; "Unknown" is none."""
    return _GENERATIONS.get(text.split(" ", maxsplit=1)[0])


def _lanes(text: str) -> float | None:
    """Of a card that has gone all bits are ones, and 0 is no link."""
    return int(text) if text.isdecimal() and 0 < int(text) <= _MOST_LANES else None


_LINK: dict[str, tuple[str, Callable[[str], float | None]]] = {
    "pcie_generation": ("current_link_speed", _generation),
    "pcie_generation_maximum": ("max_link_speed", _generation),
    "pcie_width": ("current_link_width", _lanes),
    "pcie_width_maximum": ("max_link_width", _lanes),
}


def read(sysfs: str, address: str, key: DeviceKey, wanted: frozenset[str]) -> Found:
    """What is wanted of the link of a card that is awake."""
    readings: list[Reading] = []
    faults: list[Fault] = []
    for metric, path, convert, labels in _files(sysfs, address, wanted):
        try:
            found = kernel_files.text(path)
        except DeviceLost:  # what else is read of the card says so
            continue
        except DeviceFault as fault:
            faults.append(Fault(fault.reason, f"{metric}: {fault.detail}", key))
            continue
        value = None if found is None else convert(found)
        if value is not None:
            readings.append(Reading(metric, key, float(value), labels))
    return Found(tuple(readings), tuple(faults))


_File = tuple[str, str, Callable[[str], float | None], tuple[str, ...]]


def _files(sysfs: str, address: str, wanted: frozenset[str]) -> Iterator[_File]:
    folder = device_folder(sysfs, address)
    if not wanted.isdisjoint(_LINK):
        link = _link_folder(folder)
        yield from (
            (metric, f"{link}/{name}", convert, ()) for metric, (name, convert) in _LINK.items() if metric in wanted
        )
    if "pcie_errors" in wanted:
        for severity, total in _SEVERITIES.items():
            yield "pcie_errors", f"{folder}/aer_dev_{severity}", _total_of(total), (severity,)


def _total_of(total: str) -> Callable[[str], float | None]:
    pattern = re.compile(rf"^{total} ([0-9]{{1,20}})$", re.MULTILINE)

    def convert(text: str) -> float | None:
        found = pattern.search(text)
        return None if found is None else float(found[1])

    return convert


def _link_folder(folder: str) -> str:
    """The folder of the outermost bridge of the card's own switch, or the card's where it has none.

    A bridge of the card's vendor is its own unless it is a root port, which hangs on the host bridge and on no device.
    """
    real = os.path.realpath(folder)
    vendor = _vendor(real)
    for _ in range(_MOST_BRIDGES):
        parent = os.path.dirname(real)  # noqa: PTH120
        above = os.path.basename(os.path.dirname(parent))  # noqa: PTH119, PTH120
        if not vendor or not pci_bus_id(os.path.basename(parent)) or not pci_bus_id(above) or _vendor(parent) != vendor:  # noqa: PTH119
            break
        real = parent
    return real


def _vendor(folder: str) -> str:
    try:
        return kernel_files.text(f"{folder}/vendor") or ""
    except (DeviceFault, DeviceLost):
        return ""
