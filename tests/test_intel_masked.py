"""Fleets under ``ZE_AFFINITY_MASK`` on hosts of Intel cards: the right card by PCI address, in each reading."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.sysfs import FakeSys, IntelCard
from tests.fakes.ze_loader import Engine, FakeZeLoader, Gpu, Memory, Temperature
from tests.harness import Daemon, Scrape, Start

pytestmark = pytest.mark.e2e

GIB = 1 << 30
READINGS = ("gpu_utilization_percent", "gpu_memory_free_bytes", "gpu_memory_used_bytes", "gpu_temperature_celsius")
DISCRETE = READINGS[1:]  # what every card has on its first page

IGPU = IntelCard(pci="0000:00:02.0", device_id="0x4680", driver="i915", minor=1)
ARC_B = IntelCard(pci="0000:03:00.0", device_id="0xe20b", minor=0, temperatures={"pkg": 41})
IRIS = IntelCard(pci="0000:00:02.0", device_id="0x9a49", driver="i915", minor=0)
A770M = IntelCard(pci="0000:03:00.0", device_id="0x5690", driver="i915", minor=1)
B60 = tuple(
    IntelCard(pci=pci, device_id="0xe211", minor=3 - place, temperatures={"pkg": 50 + place})
    for place, pci in enumerate(("0000:18:00.0", "0000:2c:00.0", "0000:98:00.0", "0000:ac:00.0"))
)
MAX = IntelCard(pci="0000:29:00.0", device_id="0x0bd5", minor=0, tiles=2, temperatures={"pkg": 61})


class Machine:
    """A host with these cards; each card's free memory is a number of GiB that no other has."""

    def __init__(self, directory: Path, library: Path, start: Start) -> None:
        self.fake, self.ze, self._start = FakeSys(directory), FakeZeLoader(directory, library), start

    def write(self, cards: Sequence[IntelCard], lines: Sequence[str] = ()) -> None:
        """Makes these the cards; Sysman lists them the other way round."""
        self.fake.write(cards)
        served = [card for card in cards if card.driver in ("xe", "i915")]
        self.ze.write([of_sysman(card) for card in reversed(served)], lines=lines)

    def start(self, fleets: Mapping[str, Mapping[str, str]], **settings: Mapping[str, str]) -> Daemon:
        """The daemon with fleets of these environments; ``settings`` are further keys of each."""
        entries = [{"name": name, "runtime": "level_zero", "env": env, **settings} for name, env in fleets.items()]
        config = {
            "backends": ["intel"],
            "libraries": {"intel": str(self.ze.shared_object)},
            "sampling": {"reuse_seconds": 0},
            "fleets": [*entries, {"name": "host", "runtime": "host"}],
        }
        flags = [f"--path.sysfs={self.fake.sys}", f"--path.procfs={self.fake.proc}"]
        return self._start(self.ze.environment(), json.dumps(config), flags)


@pytest.fixture
def machine(tmp_path: Path, ze_library: Path, start: Start) -> Machine:
    return Machine(tmp_path, ze_library, start)


def free_of(card: IntelCard, tile: int = 0) -> int:
    """Its free memory in bytes, which is its bus, and a tile's number."""
    return (1 + int(card.pci.split(":")[1], 16) + tile) * (GIB >> 4)


def of_sysman(card: IntelCard) -> Gpu:
    """With tiles, each has an engine, memory and a temperature of its own; an integrated card has no memory."""
    subs = range(card.tiles) if card.tiles > 1 else [-1]
    memory = (Memory(sub=sub, physical=64 * GIB, size=60 * GIB, free=free_of(card, max(sub, 0))) for sub in subs)
    return Gpu(
        bdf=card.pci,
        engines=tuple(Engine(sub=sub, rate=0.25 * (1 + max(sub, 0))) for sub in subs),
        memory=() if card.pci == IGPU.pci else tuple(memory),
        temperatures=tuple(Temperature(sub=sub, celsius=70 + max(sub, 0)) for sub in subs),
    )


def seen(page: Scrape, fleet: str, name: str = "gpu_fleet_device_info") -> dict[str, str]:
    """PCI address, and tiles, by fleet index."""
    rows = [each.labels for each in page.of(name, fleet=fleet)]
    return {
        row["fleet_index"]: row["pci_bus_id"] + (f"/{row['gpu_partition']}" if row.get("gpu_partition") else "")
        for row in rows
    }


def check(page: Scrape, fleet: str, expected: Sequence[str], names: Sequence[str] = DISCRETE) -> None:
    """The fleet has these cards, in the mask's rows and in each of the readings, with each card's own values."""
    wanted = {str(place): card for place, card in enumerate(expected)}
    assert seen(page, fleet) == wanted
    for name in names:
        assert seen(page, fleet, name) == wanted, name
    assert page.value("gpu_fleet_mask_inverted", fleet=fleet) == 1


def own_values(page: Scrape, fleet: str, cards: Sequence[IntelCard]) -> None:
    """Each reading of an index is its card's."""
    for place, card in enumerate(cards):
        row = {"fleet": fleet, "fleet_index": str(place), "pci_bus_id": card.pci}
        assert page.value("gpu_memory_free_bytes", **row) == free_of(card)
        assert page.value("gpu_temperature_celsius", **row) == card.temperatures["pkg"]


def refused(page: Scrape, fleet: str) -> str:
    """Why the fleet has no rows."""
    assert all(not page.of(name, fleet=fleet) for name in (*READINGS, "gpu_fleet_device_info"))
    (row,) = page.of("gpu_fleet_mask_refusal_info", fleet=fleet)
    return row.labels["reason"]


# --- who is who


@pytest.mark.parametrize(("mask", "place"), [("0", 0), ("1", 1), ("2", 2), ("3", 3)])
def test_equal_cards_are_numbered_by_address_f46_f48(machine: Machine, mask: str, place: int) -> None:
    """F46 and F48: whatever order Sysman has, and it never obeys the mask: the host's rows stay complete."""
    machine.write(B60)
    daemon = machine.start({"chat": {"ZE_AFFINITY_MASK": mask}, "all": {}})
    daemon.scrape()
    page = daemon.scrape()
    check(page, "chat", [B60[place].pci], READINGS)
    own_values(page, "chat", [B60[place]])
    check(page, "all", [card.pci for card in B60], READINGS)
    own_values(page, "all", B60)
    assert seen(page, "host", "gpu_memory_free_bytes") == {str(n): card.pci for n, card in enumerate(B60)}


def test_a_mask_selects_and_never_reorders_f48(machine: Machine) -> None:
    """F48: the fleet's indices are by address, and the physical ones are the host's."""
    machine.write(B60)
    page = machine.start({"chat": {"ZE_AFFINITY_MASK": "3,1"}}).scrape()
    check(page, "chat", [B60[1].pci, B60[3].pci])
    own_values(page, "chat", [B60[1], B60[3]])
    assert [each.labels["physical_index"] for each in page.of("gpu_fleet_device_info", fleet="chat")] == ["1", "3"]


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, [ARC_B, IGPU]),
        ({"ZE_AFFINITY_MASK": "0"}, [ARC_B]),
        ({"ZE_AFFINITY_MASK": "1"}, [IGPU]),
        ({"ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1", "ZE_AFFINITY_MASK": "0"}, [IGPU]),
        ({"ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1", "ZE_AFFINITY_MASK": "1"}, [ARC_B]),
    ],
)
def test_the_discrete_card_is_the_first_f50(
    machine: Machine, env: Mapping[str, str], expected: list[IntelCard]
) -> None:
    """F50: an Arc B580 at 03:00.0 before the processor's UHD at 00:02.0, which numbers by address alone undo."""
    machine.write([IGPU, ARC_B])
    page = machine.start({"chat": env}).scrape()
    check(page, "chat", [card.pci for card in expected], ["gpu_temperature_celsius"])
    numbers = {IGPU.pci: "0", ARC_B.pci: "1"}
    for each in page.of("gpu_fleet_device_info", fleet="chat"):
        assert each.labels["physical_index"] == numbers[each.labels["pci_bus_id"]]


@pytest.mark.parametrize(
    ("hierarchy", "mask", "expected"),
    [
        ("COMPOSITE", "0.0,0.1", [""]),
        ("COMPOSITE", "0", [""]),
        ("COMPOSITE", "0.1", ["/1"]),
        ("FLAT", "0", ["/0"]),
        ("FLAT", "1", ["/1"]),
        ("FLAT", None, ["/0", "/1"]),
        (None, "1", ["/1"]),
        ("COMBINED", "0,1", ["/0", "/1"]),
    ],
)
def test_tiles_are_devices_or_parts_of_one_f50(
    machine: Machine, hierarchy: str | None, mask: str | None, expected: list[str]
) -> None:
    """F50: under COMPOSITE both tiles of a Max are the card; else each is a device with its own values."""
    machine.write([MAX])
    named = {"ZE_FLAT_DEVICE_HIERARCHY": hierarchy, "ZE_AFFINITY_MASK": mask}
    page = machine.start({"chat": {name: text for name, text in named.items() if text is not None}}).scrape()
    check(page, "chat", [MAX.pci + tile for tile in expected], ["gpu_memory_free_bytes", "gpu_temperature_celsius"])
    for place, tile in enumerate(expected):
        row = {"fleet": "chat", "fleet_index": str(place)}
        number = int(tile[1:] or 0)
        free = free_of(MAX, number) if tile else free_of(MAX, 0) + free_of(MAX, 1)
        assert page.value("gpu_memory_free_bytes", **row) == free
        assert page.value("gpu_temperature_celsius", **row) == (70 + number if tile else 61)


def test_who_is_zero_beside_an_older_discrete_card_f51(machine: Machine) -> None:
    """F51: an A770M and an Iris Xe may have a driver from before it sorted, unless the settings say that it does."""
    machine.write([IRIS, A770M])
    fleets = {"first": {"ZE_AFFINITY_MASK": "0"}, "second": {"ZE_AFFINITY_MASK": "1"}}
    page = machine.start(fleets).scrape()
    assert [refused(page, name) for name in fleets] == ["driver-order-unknown"] * 2
    assert len(page.of("gpu_info")) == 2
    page = machine.start(fleets, known={"driver": "current"}).scrape()
    check(page, "first", [A770M.pci], ["gpu_memory_free_bytes"])
    check(page, "second", [IRIS.pci], ["gpu_temperature_celsius"])
    assert page.value("gpu_memory_free_bytes", fleet="first") == free_of(A770M)
    assert page.of("gpu_memory_free_bytes", fleet="second") == []


# --- index spaces hold still

FLEETS = {"chat": {"ZE_AFFINITY_MASK": "1,2"}, "last": {"ZE_AFFINITY_MASK": "3"}}


def test_a_card_that_sleeps_keeps_its_place_f91(machine: Machine) -> None:
    """F91: it has its row under its index and no reading; the others keep theirs."""
    machine.write(B60)
    daemon = machine.start(FLEETS)
    daemon.scrape()
    machine.write([B60[0], replace(B60[1], runtime_status="suspended"), *B60[2:]])
    page = daemon.scrape()
    assert page.state(pci_bus_id=B60[1].pci) == "asleep"
    assert seen(page, "chat") == {"0": B60[1].pci, "1": B60[2].pci}
    for name in READINGS:
        assert seen(page, "chat", name) == {"1": B60[2].pci}
        assert seen(page, "last", name) == {"0": B60[3].pci}


def test_a_card_that_sleeps_at_the_start_has_its_place_f91(machine: Machine) -> None:
    """F91: its family and its number are known without it being asked."""
    machine.write([B60[0], replace(B60[1], runtime_status="suspended"), *B60[2:]])
    page = machine.start(FLEETS).scrape()
    assert seen(page, "chat") == {"0": B60[1].pci, "1": B60[2].pci}
    assert seen(page, "chat", "gpu_temperature_celsius") == {"1": B60[2].pci}
    assert machine.ze.record() == []


def test_a_card_that_is_lost_keeps_its_place(machine: Machine) -> None:
    """Sysman says that it is gone, while it is still on the bus."""
    machine.write(B60)
    daemon = machine.start(FLEETS)
    daemon.scrape()
    machine.write(B60, lines=["fault * 2 0x70000001"])  # the second by address
    page = daemon.scrape()
    assert page.state(pci_bus_id=B60[1].pci) == "lost"
    assert seen(page, "chat") == {"0": B60[1].pci, "1": B60[2].pci}
    for name in READINGS:
        assert seen(page, "chat", name) == {"1": B60[2].pci}
    machine.write(B60)
    check(daemon.scrape(), "chat", [B60[1].pci, B60[2].pci])


@pytest.mark.parametrize("away", [0, 1])
def test_a_card_that_leaves_moves_no_other_f85_f95(machine: Machine, away: int) -> None:
    """F85 and F95: the fleet's indices stay while the physical ones move, and all is as before when it is back."""
    machine.write(B60)
    daemon = machine.start(FLEETS)
    before = daemon.scrape()
    machine.write([replace(card, driver="vfio-pci" if place == away else "xe") for place, card in enumerate(B60)])
    page = daemon.scrape()
    left = {str(place - 1): B60[place].pci for place in (1, 2) if place != away}
    for name in READINGS:
        assert seen(page, "chat", name) == left
        assert seen(page, "last", name) == {"0": B60[3].pci}
    assert page.value("gpu_memory_free_bytes", fleet="last", physical_index="2") == free_of(B60[3])
    assert page.of("gpu_info", pci_bus_id=B60[away].pci) == []
    machine.write(B60)
    after = daemon.scrape_until(lambda page: len(page.of("gpu_memory_free_bytes", fleet="chat")) == 2)
    for name in ("gpu_info", "gpu_fleet_device_info", *DISCRETE):
        assert after.of(name) == before.of(name)


def test_a_card_that_comes_changes_no_fleet(machine: Machine) -> None:
    """A fifth equal card, before all others by address, is in the host's rows alone."""
    machine.write(B60)
    daemon = machine.start(FLEETS)
    daemon.scrape()
    fifth = replace(B60[0], pci="0000:05:00.0", minor=9)
    machine.write([fifth, *B60])
    page = daemon.scrape_until(lambda page: len(page.of("gpu_memory_free_bytes", fleet="host")) == 5)
    check(page, "chat", [B60[1].pci, B60[2].pci])
    own_values(page, "chat", [B60[1], B60[2]])
    assert seen(page, "last") == {"0": B60[3].pci}
