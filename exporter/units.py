"""Vendor spellings and sentinels -> base units, or None: the one place that decides what is not a value."""

from __future__ import annotations

import re

_BUS_ID = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")

_ALL_ONES = (2**32 - 1, 2**64 - 1)
_MOST_BYTES = 2**60  # an exbibyte: a larger number is a counter's garbage
# Absolute zero of what a chip can report: sensors that were removed or never filled answer 0, -1, 255 or 510.
_HOTTEST_CELSIUS = 150


def pci_bus_id(text: str) -> str | None:
    """The address as sysfs spells it, ``0000:17:00.0``, whatever width the domain came in; None if it is none.

    NVML prints eight hexadecimal digits of domain, tools print four or none.
    """
    match = _BUS_ID.fullmatch(text.strip())
    if match is None:
        return None
    domain, bus, device, function = (int(part or "0", 16) for part in match.groups())
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


def percent(value: float) -> float | None:
    """A busy share from 0 to 100; anything outside is a sentinel."""
    return float(value) if 0 <= value <= 100 else None


def celsius(value: float) -> float | None:
    """A chip's temperature: above 0 and below 150 degrees, and never 255 or the like."""
    return float(value) if 0 < value < _HOTTEST_CELSIUS else None


def millidegrees(value: int) -> float | None:
    """As :func:`celsius`, from thousandths of a degree, as hwmon files have it."""
    return celsius(value / 1000)


def byte_count(value: int) -> int | None:
    """A number of bytes; negative numbers and all-ones of 32 or 64 bits mean *not available*."""
    return None if value < 0 or value in _ALL_ONES or value >= _MOST_BYTES else value


def memory_size(value: int) -> int | None:
    """A total: as :func:`byte_count`, and 0 means *not known* (unified-memory boards answer it)."""
    return byte_count(value) or None
