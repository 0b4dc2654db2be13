"""The card's PCIe link: of the card's own switch where it has one, and never made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from exporter.backends import pcie
from exporter.model import DeviceKey
from tests.fakes.sysfs import AmdCard, Bridge, FakeSys, IntelCard, OtherCard

LINK = frozenset({"pcie_generation", "pcie_generation_maximum", "pcie_width", "pcie_width_maximum"})
ALL = LINK | {"pcie_errors"}
ROOT = Bridge(pci="0000:00:01.0", vendor="0x8086", speed="32.0 GT/s PCIe", width=8)
UP = Bridge(pci="0000:01:00.0", speed="8.0 GT/s PCIe", width=4)
DOWN = Bridge(pci="0000:02:00.0", speed="2.5 GT/s PCIe", width=1)
CARD = AmdCard(pci="0000:03:00.0", number=6, bridges=(ROOT, UP, DOWN))
KEY = DeviceKey("amd", CARD.pci)


def read(fake: FakeSys, pci: str, wanted: frozenset[str] = ALL) -> dict[str, float]:
    """The link's readings, and no fault; those of errors by their severity."""
    found = pcie.read(str(fake.sys), pci, KEY, wanted)
    assert found.faults == ()
    assert {reading.key for reading in found.readings} <= {KEY}
    return {" ".join((reading.metric, *reading.labels)): reading.value for reading in found.readings}


def link(generation: int, width: int) -> dict[str, float]:
    return {
        **dict.fromkeys(("pcie_generation", "pcie_generation_maximum"), generation),
        **dict.fromkeys(("pcie_width", "pcie_width_maximum"), width),
    }


def test_a_card_with_a_switch_has_the_link_above_it(fake: FakeSys) -> None:
    """AMD's and Intel's discrete cards: what the GPU and the switch's lower port say of the link between is made up."""
    fake.write([CARD])
    assert read(fake, CARD.pci, LINK) == link(3, 4)
    arc = IntelCard(pci="0000:03:00.0", bridges=(ROOT, *(replace(port, vendor="0x8086") for port in (UP, DOWN))))
    fake.write([arc])
    assert read(fake, arc.pci, LINK) == link(3, 4)


@pytest.mark.parametrize(
    ("bridges", "expected"),
    [
        ((), (4, 16)),
        ((ROOT,), (4, 16)),
        ((replace(ROOT, vendor="0x1002"),), (4, 16)),  # a root port of an AMD processor
        ((replace(ROOT, vendor="0x1002"), UP, DOWN), (3, 4)),
        ((ROOT, replace(UP, vendor="0x10b5"), replace(DOWN, vendor="0x10b5")), (4, 16)),  # the mainboard's switch
        (
            (ROOT, Bridge(pci="0000:08:00.0", vendor="0x10b5"), Bridge(pci="0000:09:00.0", vendor="0x10b5"), UP, DOWN),
            (3, 4),
        ),
        ((ROOT, Bridge(pci="0000:08:00.0", width=2), UP, DOWN), (3, 4)),  # a card has two at most
    ],
)
def test_only_the_cards_own_switch_counts(
    fake: FakeSys, bridges: tuple[Bridge, ...], expected: tuple[int, int]
) -> None:
    """A bridge of another vendor and a root port are the host's."""
    fake.write([replace(CARD, bridges=bridges)])
    assert read(fake, CARD.pci, LINK) == link(*expected)


@pytest.mark.parametrize("bridges", [(), (ROOT,), (replace(ROOT, vendor="0x1b36"),)])
def test_a_card_whose_switch_is_not_seen_has_no_link(fake: FakeSys, bridges: tuple[Bridge, ...]) -> None:
    """As in a virtual machine: 2.5 GT/s and one lane is no link of any Intel card."""
    arc, other = IntelCard(pci="0000:03:00.0", bridges=bridges), IntelCard(pci="0000:04:00.0", minor=1, bridges=bridges)
    fake.write([arc, other])
    for name in ("current", "max"):
        fake.set(arc.pci, f"{name}_link_speed", "2.5 GT/s PCIe\n")
        fake.set(arc.pci, f"{name}_link_width", "1\n")
    assert read(fake, arc.pci, LINK) == {}
    assert read(fake, other.pci, LINK) == link(4, 16)


@pytest.mark.parametrize(("pci_class", "expected"), [("0x030000", {}), ("0x038000", {}), ("0x120000", link(4, 16))])
def test_an_amd_card_of_a_virtual_machine(fake: FakeSys, pci_class: str, expected: dict[str, float]) -> None:
    """Those for a display have a switch, which stays with the host; accelerators have none."""
    fake.write([replace(CARD, pci_class=pci_class, bridges=(replace(ROOT, vendor="0x1b36"),))])
    assert read(fake, CARD.pci, LINK) == expected


def test_errors_are_those_of_the_cards_own_function(fake: FakeSys) -> None:
    """The last line has their sum."""
    fake.write([CARD])
    assert read(fake, CARD.pci, frozenset({"pcie_errors"})) == {
        "pcie_errors correctable": 10,
        "pcie_errors nonfatal": 7,
        "pcie_errors fatal": 6,
    }


def test_errors_of_the_cards_own_switch_count_too(fake: FakeSys) -> None:
    """The link is between its upper port and the host, and so are the errors of the link."""
    fake.write([CARD])
    upper = fake.device(CARD.pci).resolve().parent.parent
    assert upper.name == UP.pci
    (upper / "aer_dev_correctable").write_text("RxErr 400\nBadTLP 100\nTOTAL_ERR_COR 500\n")
    assert read(fake, CARD.pci, frozenset({"pcie_errors"}))["pcie_errors correctable"] == 510


@pytest.mark.parametrize(
    ("text", "generation"),
    [
        *(("2.5 GT/s PCIe", 1), ("5.0 GT/s PCIe", 2), ("8.0 GT/s PCIe", 3), ("16.0 GT/s PCIe", 4)),
        *(("32.0 GT/s PCIe", 5), ("64.0 GT/s PCIe", 6), ("5 GT/s", 2), ("8 GT/s", 3)),
        *(("Unknown", None), ("Unknown speed", None), ("", None)),
    ],
)
def test_speeds_are_generations(fake: FakeSys, text: str, generation: int | None) -> None:
    fake.write([AmdCard(pci=CARD.pci)])
    fake.set(CARD.pci, "current_link_speed", f"{text}\n")
    assert read(fake, CARD.pci).get("pcie_generation") == generation


@pytest.mark.parametrize("text", ["0", "63", "255", "-1", "Unknown"])
def test_a_width_that_no_link_has_is_none(fake: FakeSys, text: str) -> None:
    """A card that has left the bus answers ones."""
    fake.write([AmdCard(pci=CARD.pci)])
    fake.set(CARD.pci, "current_link_width", f"{text}\n")
    assert read(fake, CARD.pci, LINK) == {name: value for name, value in link(4, 16).items() if name != "pcie_width"}


@pytest.mark.parametrize("card", [OtherCard(pci="0000:17:00.0"), IntelCard(pci="0000:4d:00.0")])
def test_what_is_not_there_is_absent(fake: FakeSys, card: OtherCard | IntelCard) -> None:
    """Kernels without AER have no such files, and virtual functions no link."""
    fake.write([card])
    for name in ("aer_dev_*", "max_link_*"):
        fake.fault(card.pci, name, "missing")
    assert read(fake, card.pci) == {"pcie_generation": 4, "pcie_width": 16}
    assert read(fake, card.pci, frozenset({"power"})) == {}
    assert read(fake, "0000:99:00.0") == {}


def test_a_bridge_that_cannot_be_read_for_a_moment_is_asked_again(fake: FakeSys) -> None:
    """Whose it is decides which link is the card's, and stays so while the card is there."""
    fake.write([CARD])
    upper = fake.device(CARD.pci).resolve().parent
    vendor = upper / "vendor"
    kept = vendor.read_bytes()
    vendor.unlink()
    vendor.symlink_to("/proc/self/mem")
    found = pcie.read(str(fake.sys), CARD.pci, KEY, ALL)
    assert found.readings == ()
    assert [(fault.reason, fault.key) for fault in found.faults] == [("driver-error", KEY)]
    vendor.unlink()
    vendor.write_bytes(kept)
    assert read(fake, CARD.pci, LINK) == link(3, 4)


def test_a_file_that_fails_costs_its_reading_and_is_named(fake: FakeSys) -> None:
    fake.write([CARD])
    fake.fault(CARD.pci, "aer_dev_fatal", "eio")
    found = pcie.read(str(fake.sys), CARD.pci, KEY, ALL)
    assert {reading.labels for reading in found.readings if reading.metric == "pcie_errors"} == {
        ("correctable",),
        ("nonfatal",),
    }
    (fault,) = found.faults
    assert (fault.reason, fault.key) == ("driver-error", KEY)
    assert "aer_dev_fatal" in fault.detail
