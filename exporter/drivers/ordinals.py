"""What CUDA and HIP ask alike: HIP's calls take after CUDA's, and two of the codes are the same numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

from exporter import units
from exporter.drivers.calls import MOST_ENTRIES, Library, Refused, text
from exporter.wire import DriverDevice

NO_DEVICE = 100
NOT_SUPPORTED = 801
_TEXT_BYTES = 256


def counted(library: Library, count: int, device: Callable[[Library, int], DriverDevice]) -> Iterator[DriverDevice]:
    """The devices of the ordinals from 0 on. Raises :class:`Refused` where one cannot be told, with its ordinal."""
    if not 0 <= count <= MOST_ENTRIES:
        raise Refused(f"{library.name} answered that there are {count} devices")
    for ordinal in range(count):
        try:
            found = device(library, ordinal)
        except Refused as refused:
            raise Refused(f"device {ordinal}: {refused}") from refused
        if not found.pci_bus_id and not found.uuid:
            raise Refused(f"device {ordinal}: {library.name} tells neither its PCI address nor its UUID")
        yield found


def told(library: Library, symbol: str, *arguments: Any) -> bool:
    """Whether a call did what it is for: not where the library has no such call, or says that it is not supported.

    Raises :class:`Refused` for every other answer: that device may be gone, and the next call would not say so.
    """
    if not library.has(symbol):
        return False
    code = library.call(symbol, *arguments)
    if code not in (0, NOT_SUPPORTED):
        raise library.refused(symbol, code)
    return not code


def told_text(library: Library, symbol: str, device: int) -> str:
    """What ``symbol(char *, int, device)`` writes; empty where it is not :func:`told`."""
    out = ctypes.create_string_buffer(_TEXT_BYTES)
    return text(out.raw) if told(library, symbol, out, _TEXT_BYTES, device) else ""


def told_address(library: Library, symbol: str, device: int) -> str:
    """As :func:`told_text`, a PCI address; empty for what is none."""
    return units.pci_bus_id(told_text(library, symbol, device)) or ""


def told_bytes(library: Library, symbol: str, device: int) -> bytes | None:
    """The 16 bytes that ``symbol(bytes *, device)`` writes; None where it is not :func:`told`, or writes zeros."""
    out = (ctypes.c_ubyte * 16)()
    return bytes(out) if told(library, symbol, out, device) and any(out) else None


def told_number(library: Library, symbol: str) -> int | None:
    """The ``int`` that ``symbol(int *)`` writes; None where the call is not there or does not succeed."""
    out = ctypes.c_int()
    return out.value if library.has(symbol) and not library.call(symbol, ctypes.byref(out)) else None
