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
from exporter.backends.kernel_files import data
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


def read(asked: Asked) -> Iterable[Given] | None:
    """A series for each reason, None where the table does not tell."""
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
    return [Given("throttled", float(bool(status & bits)), (reason,)) for reason, bits in reasons.items()]


def _is_silent(table: bytes, revision: list[int]) -> bool:
    """Older drivers of the MI300 series, which has no edge sensor, fill in 0 for a status that they do not know."""
    return revision == [1, 3] and _TEMPERATURE.unpack_from(table, _HEADER.size)[0] in _NO_TEMPERATURE
