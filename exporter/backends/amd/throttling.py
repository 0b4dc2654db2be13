"""What holds a card's clocks down, from the driver's binary table ``gpu_metrics``.

Source: the structs and the bits that the kernel's headers give for the status that is the same for every chip. Of the
table's layouts only those that have it are read: 1.3 of cards, 2.2 to 2.4 of APUs. The tables of the MI300 series (1.4
and later) and of newer APUs (3.0) tell for how long clocks were held down, in ticks whose length nobody says.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from exporter.backends.amd.given import Asked, Given
from exporter.backends.kernel_files import data, number
from exporter.errors import DeviceFault

METRICS = ("throttled",)


class _Layout(NamedTuple):
    """The size of a table, and where in it the status of 64 bits is."""

    size: int
    status: int


_HEADER = struct.Struct("<HBB")  # the table's size, and its format and content revision
_STATUS = struct.Struct("<Q")
_TEMPERATURE = struct.Struct("<H")
_LAYOUTS = {(1, 3): _Layout(120, 112), (2, 2): _Layout(128, 120), (2, 3): _Layout(152, 120), (2, 4): _Layout(168, 120)}
_UNKNOWN = 2**64 - 1
_NO_TEMPERATURE = (0, 0xFFFF)


def _bits(*numbers: int) -> int:
    return sum(1 << number for number in numbers)


REASONS = {
    "power-cap": _bits(*range(8)),
    "current": _bits(*range(16, 24)),
    "thermal": _bits(*range(32, 38), 42, 43),
    "regulator-thermal": _bits(*range(38, 42), 44, 45),
    "processor-hot": _bits(46, 47),
    "reliability": _bits(57),
}
_OTHER = _UNKNOWN & ~sum(REASONS.values())
_HOTTEST_SPOT = 1 << 36
# PCI device ids of RDNA 3 and RDNA 4: their firmware sets that bit nearly always, also in a cool card that idles
# (ROCm/rocm-systems#11781, Umio-Yasuno/libdrm-amdgpu-sys-rs#7).
_ALWAYS_SET = (range(0x7440, 0x74A0), range(0x7550, 0x75A0))


def read(asked: Asked) -> Iterable[Given] | None:
    """A series for each reason that the table tells of; None where it tells of none."""
    path = f"{asked.folder}/gpu_metrics"
    table = data(path)
    if table is None:
        return None
    if len(table) < _HEADER.size:
        raise DeviceFault("driver-error", f"{path}: found {len(table)} bytes, expected a table")
    size, *revision = _HEADER.unpack_from(table)
    layout = _LAYOUTS.get((revision[0], revision[1]))
    if layout is None or size != layout.size or len(table) < layout.size or _is_silent(table, revision):
        return None
    (status,) = _STATUS.unpack_from(table, layout.status)
    if status == _UNKNOWN:
        return None
    reasons = {**REASONS, "other": _OTHER}
    if status & REASONS["thermal"] == _HOTTEST_SPOT and _sets_it_always(asked.folder):
        del reasons["thermal"]
    return [Given("throttled", float(bool(status & bits)), (reason,)) for reason, bits in reasons.items()]


def _sets_it_always(folder: str) -> bool:
    """The card's firmware; what cannot be told apart from it is taken for one that does."""
    device = number(f"{folder}/device", 16)
    return device is None or any(device in ids for ids in _ALWAYS_SET)


def _is_silent(table: bytes, revision: list[int]) -> bool:
    """Older drivers of the MI300 series, which has no edge sensor, fill in 0 for a status that they do not know."""
    return revision == [1, 3] and _TEMPERATURE.unpack_from(table, _HEADER.size)[0] in _NO_TEMPERATURE
