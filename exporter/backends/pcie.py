"""The card's PCIe link, as the kernel tells it of every vendor's cards: generation, lanes and errors.

A card with a switch of its own (AMD's and Intel's discrete ones) has its link at the switch: what its GPU says of the
link behind that is made up, 2.5 GT/s and one lane of Intel's Arc for example. A virtual machine that was given such a
card does not see its switch, and so nothing of its link.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from exporter import pci
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
_RED_HAT = "0x1b36"  # the vendor of QEMU's root ports
_AMD, _INTEL = "0x1002", "0x8086"
_MADE_UP = ("2.5 GT/s PCIe", "1")
_DISPLAY = "0x03"  # of classes; AMD's cards that only compute have another, and no switch
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
    try:
        rows = _files(sysfs, address, wanted, pci.appearance(sysfs, address))
    except DeviceLost:  # what else is read of the card says so
        return NOTHING
    except DeviceFault as fault:
        return Found((), (Fault(fault.reason, f"PCIe: {fault.detail}", key),))
    for metric, paths, convert, labels in rows:
        try:
            values = [convert(found) for path in paths if (found := kernel_files.text(path)) is not None]
        except DeviceLost:  # what else is read of the card says so
            continue
        except DeviceFault as fault:
            faults.append(Fault(fault.reason, f"{metric}: {fault.detail}", key))
            continue
        known = [value for value in values if value is not None]
        if known and len(known) == len(values):
            readings.append(Reading(metric, key, float(sum(known)), labels))
    return Found(tuple(readings), tuple(faults))


_Files = tuple[str, tuple[str, ...], Callable[[str], float | None], tuple[str, ...]]
_MOST_CARDS = 256


@functools.lru_cache(_MOST_CARDS)
def _files(sysfs: str, address: str, wanted: frozenset[str], appearance: int) -> tuple[_Files, ...]:
    """Metrics with the files whose values they are the sum of. Where these are is looked up once for an ``appearance``
    of the card. Raises ``DeviceLost`` and ``DeviceFault``, and is asked again then.
    """
    del appearance
    if wanted.isdisjoint((*_LINK, "pcie_errors")):
        return ()
    own = os.path.realpath(device_folder(sysfs, address))
    link = _link_folder(own)
    return (*_of_link(link, own, wanted), *_of_errors(tuple(dict.fromkeys((own, link))), wanted))


def _of_link(link: str, own: str, wanted: frozenset[str]) -> Iterator[_Files]:
    if link != own or not _is_made_up(own):
        yield from (
            (metric, (f"{link}/{name}",), convert, ()) for metric, (name, convert) in _LINK.items() if metric in wanted
        )


def _of_errors(ports: tuple[str, ...], wanted: frozenset[str]) -> Iterator[_Files]:
    if "pcie_errors" in wanted:
        for severity, total in _SEVERITIES.items():
            yield "pcie_errors", tuple(f"{port}/aer_dev_{severity}" for port in ports), _total_of(total), (severity,)


def _total_of(total: str) -> Callable[[str], float | None]:
    pattern = re.compile(rf"^{total} ([0-9]{{1,20}})$", re.MULTILINE)

    def convert(text: str) -> float | None:
        found = pattern.search(text)
        return None if found is None else float(found[1])

    return convert


def _link_folder(real: str) -> str:
    """The folder of the outermost bridge of the card's own switch, or the card's where it has none.

    A bridge of the card's vendor is its own unless it is a root port, which hangs on the host bridge and on no device.
    """
    vendor = _vendor(real)
    for _ in range(_MOST_BRIDGES):
        parent = os.path.dirname(real)  # noqa: PTH120
        above = os.path.basename(os.path.dirname(parent))  # noqa: PTH119, PTH120
        if not vendor or not pci_bus_id(os.path.basename(parent)) or not pci_bus_id(above) or _vendor(parent) != vendor:  # noqa: PTH119
            break
        real = parent
    return real


def _is_made_up(real: str) -> bool:
    """Of a card without a switch that is seen: it is Intel's, of which none has so slow a link, or AMD's for a display
    and below a port that a virtual machine has, where the card's own switch is not.
    """
    if _vendor(real) == _INTEL:
        return (_said(f"{real}/max_link_speed"), _said(f"{real}/max_link_width")) == _MADE_UP
    port = os.path.dirname(real)  # noqa: PTH120
    return _said(f"{real}/class").startswith(_DISPLAY) and _vendor(port) == _RED_HAT and _vendor(real) == _AMD


def _vendor(folder: str) -> str:
    return _said(f"{folder}/vendor")


def _said(path: str) -> str:
    return kernel_files.text(path) or ""
