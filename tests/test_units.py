"""What is a value and what is a vendor's way to say that there is none; and PCI addresses in one spelling."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter import units
from exporter.inventory import pci_sort_key

ALL_ONES = (2**32 - 1, 2**64 - 1)


@pytest.mark.parametrize("value", [0.5, 1, 30, 47, 100, 129, 149.9])
def test_degrees(value: float) -> None:
    """What a chip can have is passed on."""
    assert units.celsius(value) == value


@pytest.mark.parametrize("value", [255, 510, 0, -1, -273, 150, 1000, *ALL_ONES, math.nan, math.inf, -math.inf])
def test_no_degrees(value: float) -> None:
    """A removed sensor (255), a sleeping card (510), an unfilled register (0) and an error (-1) give no temperature."""
    assert units.celsius(value) is None


@pytest.mark.parametrize("value", [0, 1, 50.5, 100])
def test_percent(value: float) -> None:
    """A share from 0 to 100 is passed on; 0 is a value, an idle card's."""
    assert units.percent(value) == value


@pytest.mark.parametrize("value", [-1, 101, 255, 65535, *ALL_ONES, math.nan, math.inf])
def test_no_percent(value: float) -> None:
    """What is no share is absent."""
    assert units.percent(value) is None


@pytest.mark.parametrize("value", [0, 1, 2**31, 2**32 - 2, 2**32, 80 * 2**30, 2**60 - 1])
def test_byte_count(value: int) -> None:
    """A number of bytes is passed on; 0 is a value, of free memory for example."""
    assert units.byte_count(value) == value


@pytest.mark.parametrize("value", [-1, -(2**63), 2**60, 2**64 - 2, 2**64, 10**30, *ALL_ONES])
def test_no_byte_count(value: int) -> None:
    """All-ones of 32 or 64 bits, negative numbers, and more than any host has are no size."""
    assert units.byte_count(value) is None
    assert units.memory_size(value) is None


def test_a_total_of_nothing_is_not_known() -> None:
    """Boards with unified memory answer a total of 0."""
    assert units.memory_size(0) is None
    assert units.memory_size(80 * 2**30) == 80 * 2**30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0000:17:00.0", "0000:17:00.0"),
        ("00000000:17:00.0", "0000:17:00.0"),
        ("17:00.0", "0000:17:00.0"),
        ("0000:AF:1F.7", "0000:af:1f.7"),
        ("000f:01:00.0", "000f:01:00.0"),
        ("0000000F:01:00.0", "000f:01:00.0"),
        ("10000:e1:00.0", "10000:e1:00.0"),
        ("00010000:E1:00.0", "10000:e1:00.0"),
        ("ffffffff:ff:1f.7", "ffffffff:ff:1f.7"),
        (" 0000:17:00.0\n", "0000:17:00.0"),
    ],
)
def test_pci_address(text: str, expected: str) -> None:
    """An address in any tool's spelling has lower case and a domain of at least four digits."""
    assert units.pci_bus_id(text) == expected
    assert units.pci_bus_id(expected) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "N/A", "GPU-17", "0", "17", "17:00", "0000:17:00", "0000:17:00.8", "0000:17:00.", "0000:17:0.0"),
        *("000:17:00.0", "000000000:17:00.0", "0000:17:00.0/xcp1", "0000:17:00.0 0", "x0000:17:00.0", "0000-17-00.0"),
        *("0000:1g:00.0", "\uff10000:17:00.0", "0000:\u0661\u0667:00.0", "0000:17:00.\u0661", "+000:17:00.0"),
        *("0000:17:00.0\n0000:18:00.0", "0000:17:00.0\x00", "\ud800", "[N/A]", "ffffffff", "/t0"),
    ],
)
def test_no_pci_address(text: str) -> None:
    """Anything else, other scripts' digits among it, is no address."""
    assert units.pci_bus_id(text) is None


addresses = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 255), st.integers(0, 31), st.integers(0, 7))


def spelled(address: tuple[int, int, int, int]) -> str:
    """The one spelling of an address, whatever the width of its domain and its case."""
    forms = ("{:04x}:{:02x}:{:02x}.{}", "{:08x}:{:02x}:{:02x}.{}", "{:08X}:{:02X}:{:02X}.{}")
    (spelling,) = {units.pci_bus_id(form.format(*address)) for form in forms}
    assert spelling
    return spelling


@given(addresses, addresses)
def test_addresses_sort_as_numbers(one: tuple[int, int, int, int], other: tuple[int, int, int, int]) -> None:
    """An address has one spelling, and two compare as their domains, buses, devices and functions do."""
    keys = [pci_sort_key(spelled(address)) for address in (one, other)]
    assert (keys[0] < keys[1]) == (one < other)
    assert (spelled(one) == spelled(other)) == (one == other)


@given(st.text())
def test_any_text_is_an_address_or_none(text: str) -> None:
    """No text raises, and what comes back is an address that is its own spelling."""
    address = units.pci_bus_id(text)
    assert address is None or units.pci_bus_id(address) == address


@pytest.mark.parametrize(
    ("value", "degrees"), [(51000, 51.0), (47500, 47.5), (0, None), (-273150, None), (255000, None), (150000, None)]
)
def test_thousandths_of_a_degree(value: int, degrees: float | None) -> None:
    """What hwmon files have, with the sentinels of whole degrees."""
    assert units.millidegrees(value) == degrees


VECTORS = [
    (units.milliwatts, 71_250, 71.25),
    (units.milliwatts, 0, 0.0),
    (units.milliwatts, 2**32 - 1, None),
    (units.milliwatts, -1, None),
    (units.microwatts, 303_000_000, 303.0),
    (units.microwatts, 20_000_000_000, None),  # F79: a card that counts in another unit would have 20,000 W
    (units.millijoules, 1_234_567, 1234.567),
    (units.millijoules, 2**64 - 1, None),
    (units.microjoules, 5_000_000, 5.0),
    (units.microjoules, -5, None),
    (units.megahertz, 2520, 2.52e9),
    (units.megahertz, 0, 0.0),
    (units.megahertz, 2**32 - 1, None),
    (units.megahertz, -1.0, None),
    (units.hertz, 1_249_000_000, 1.249e9),
    (units.hertz, 2**64 - 1, None),
    (units.rpm, 1500, 1500.0),
    (units.rpm, 0, 0.0),
    (units.rpm, 65535, None),
    (units.rpm, -1, None),
    (units.millivolts, 850, 0.85),
    (units.millivolts, 0, None),
    (units.millivolts, 65535, None),
    (units.nanoseconds, 1_500_000_000, 1.5),
    (units.nanoseconds, 2**64 - 1, None),
    (units.kilobytes, 3, 3000.0),
    (units.kilobytes, 2**32 - 1, None),
    (units.kibibytes, 3, 3072.0),
    (units.kibibytes, 2**64 - 1, None),
    (units.ratio_of_percent, 30, 0.3),
    (units.ratio_of_percent, 255, None),
    (units.ratio, 0.5, 0.5),
    (units.ratio, 1.5, None),
    (units.count, 12, 12.0),
    (units.count, -1, None),
    (units.count, 2**32 - 1, None),
    (units.flag, 1, 1.0),
    (units.flag, 2, None),
]


@pytest.mark.parametrize(
    ("convert", "value", "expected"), VECTORS, ids=[f"{row[0].__name__}-{row[1]}" for row in VECTORS]
)
def test_each_unit(convert: Callable[[float], float | None], value: float, expected: float | None) -> None:
    """A vendor's unit becomes the base unit, and what no card has is absent; NaN and infinities are no value."""
    assert convert(value) == expected
    assert [convert(odd) for odd in (math.nan, math.inf, -math.inf)] == [None] * 3


@pytest.mark.parametrize(
    ("ticks", "size", "joules"),
    [(65628, 15.3, 1.0041084), (10, 15.3, 0.000153), (2**64 - 1, 15.3, None), (65628, 0.0, None), (-1, 15.3, None)],
)
def test_f89_ticks_of_energy(ticks: int, size: float, joules: float | None) -> None:
    """F89: AMD's counter has ticks of 15.3 microjoules; the value is passed on as it is, also after a reset."""
    assert units.microjoule_ticks(ticks, size) == pytest.approx(joules)
    assert units.microjoule_ticks(ticks, math.nan) is None
