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


def millidegrees(value: float) -> float | None:
    """As :func:`celsius`, from thousandths of a degree, as hwmon files have it."""
    return celsius(value / 1000)


def byte_count(value: int) -> int | None:
    """A number of bytes; negative numbers and all-ones of 32 or 64 bits mean *not available*."""
    return None if value < 0 or value in _ALL_ONES or value >= _MOST_BYTES else value


def memory_size(value: int) -> int | None:
    """A total: as :func:`byte_count`, and 0 means *not known* (unified-memory boards answer it)."""
    return byte_count(value) or None


# The largest that any card has is a fraction of these; firmware that counts in another unit gives a thousandfold.
_MOST_WATTS, _MOST_HERTZ, _MOST_RPM, _MOST_VOLTS = 10_000, 20e9, 50_000, 5
_MOST_COUNT = 2**63


def _within(value: float, most: float) -> float | None:
    return float(value) if 0 <= value <= most else None


def count(value: float) -> float | None:
    """How often something happened: not negative, and not all ones of 32 or 64 bits."""
    return None if value in _ALL_ONES else _within(value, _MOST_COUNT)


def flag(value: float) -> float | None:
    """0 or 1; any other number is none."""
    return float(value) if value in (0, 1) else None


def ratio(value: float) -> float | None:
    """A share from 0 to 1."""
    return _within(value, 1)


def ratio_of_percent(value: float) -> float | None:
    """A share from 0 to 1, from one of 0 to 100."""
    return None if percent(value) is None else value / 100


def milliwatts(value: float) -> float | None:
    """Watts, from thousandths, as NVML has them."""
    return _within(value / 1e3, _MOST_WATTS)


def microwatts(value: float) -> float | None:
    """Watts, from millionths, as hwmon files have them."""
    return _within(value / 1e6, _MOST_WATTS)


def millijoules(value: float) -> float | None:
    """Joules, from thousandths, as NVML has them."""
    known = count(value)
    return None if known is None else known / 1e3


def microjoules(value: float) -> float | None:
    """Joules, from millionths, as hwmon files and Level Zero have them."""
    known = count(value)
    return None if known is None else known / 1e6


def microjoule_ticks(value: float, size: float) -> float | None:
    """Joules, from a count of ticks of so many millionths each, as AMD's library has them."""
    known = count(value)
    return None if known is None or not 0 < size < 1e6 else known * size / 1e6


def megahertz(value: float) -> float | None:
    """Hertz, from millions, as NVML and the drivers' files have them."""
    return _within(value * 1e6, _MOST_HERTZ)


def hertz(value: float) -> float | None:
    """A clock in hertz, as hwmon files have it."""
    return _within(value, _MOST_HERTZ)


def rpm(value: float) -> float | None:
    """Revolutions per minute; a fan that stands has 0."""
    return _within(value, _MOST_RPM)


def millivolts(value: float) -> float | None:
    """Volts, from thousandths, as hwmon files have them; a core without voltage would not answer, so 0 is none."""
    return _within(value / 1e3, _MOST_VOLTS) or None


def nanoseconds(value: float) -> float | None:
    """Seconds, from thousandths of a millionth."""
    known = count(value)
    return None if known is None else known / 1e9


def kilobytes(value: float) -> float | None:
    """Bytes, from thousands, as NVML has them for rates."""
    known = count(value)
    return None if known is None else known * 1000


def kibibytes(value: float) -> float | None:
    """Bytes that were moved, from KiB, as NVML counts them."""
    known = count(value)
    return None if known is None else known * 1024
