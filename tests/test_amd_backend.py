"""AMD's cards as the kernel's files show them: who each is, what is read, and what is refused."""

from __future__ import annotations

import random
import re
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from exporter.backends.amd import AmdBackend
from exporter.backends.base import Places
from exporter.model import DeviceKey, VendorSample
from exporter.wire import Ask
from exporter.worker import Worker
from tests.backend_host import BackendHost, devices, state, values
from tests.fakes.sysfs import AMD_ANSWERS, GIB, AmdCard, FakeSys, IntelCard, KfdNode, OtherCard, mounted
from tests.harness import PROGRAM, Daemon, Scrape, Start, clean_environment, parse
from tests.test_fake_sysfs import rocm_smi

FRESH = "backends: [amd]\nsampling: {reuse_seconds: 0}\n"
EVERYTHING = {"utilization", "memory_free", "memory_used", "memory_total", "temperature"}
READINGS = (
    "gpu_utilization_percent",
    "gpu_memory_free_bytes",
    "gpu_memory_used_bytes",
    "gpu_memory_total_bytes",
    "gpu_temperature_celsius",
)
NODES = "class/kfd/kfd/topology/nodes"
NOBODYS = "/proc/sys/vm/compact_memory"  # a file that nobody may read, root neither

A = AmdCard(pci="0000:03:00.0", minor=1, busy=11, kfd_nodes=(KfdNode(node=2, unique_id=0xA1),))
B = AmdCard(
    pci="0000:83:00.0",
    minor=0,
    busy=77,
    vram_total=16 * GIB,
    vram_used=5 * GIB,
    temperatures={"edge": 40, "junction": 41, "mem": 43},
    kfd_nodes=(KfdNode(node=1, unique_id=0xB2),),
)
CPX = AmdCard(
    pci="0000:c1:00.0",
    minor=4,
    busy=55,
    pci_class="0x120000",
    vram_total=192 * GIB,
    compute_partition="CPX",
    memory_partition="NPS1",
    temperatures={"junction": 66, "mem": 50},
    kfd_nodes=tuple(KfdNode(node=3 + part, partition=part, unique_id=0xC0 + part) for part in range(4)),
)
RADEON = AmdCard(pci="0000:05:00.0", minor=7, driver="radeon")


class Host(BackendHost):
    """The backend on the fake trees."""

    def __init__(self, fake: FakeSys, root: str = "/nonexistent") -> None:
        super().__init__(AmdBackend(Places(str(fake.sys), str(fake.proc), root=root)))


def indices(sample: VendorSample) -> dict[str, int | None]:
    return {device.key.identity: device.physical_index for device in sample.devices}


def leads_to(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def place(fake: FakeSys, path: str, text: str) -> None:
    """Another text for a file below ``/sys``, put there at once."""
    new = fake.sys / ".text"
    new.write_text(text)
    new.replace(fake.sys / path)


# --- who a card is


def test_a_card_is_its_address_with_the_kfds_unique_id(fake: FakeSys) -> None:
    """The key is the PCI address, the UUID is what ROCr calls the card, in 16 digits, and not what sysfs has."""
    fake.write([replace(A, unique_id=0x77)])
    (device,) = Host(fake).read().devices
    assert device.key == DeviceKey("amd", "0000:03:00.0")
    assert device.pci_bus_id == "0000:03:00.0"
    assert device.uuid == "GPU-00000000000000a1"
    assert (device.kfd_node, device.minor_number, device.partition, device.parent) == (2, 129, "", None)
    assert device.memory_total_bytes == 24 * GIB


@pytest.mark.parametrize("unique_id", [0, 2**64 - 1])
def test_an_id_of_zeros_or_ones_is_none_f42(fake: FakeSys, unique_id: int) -> None:
    """F42: it says nothing, so two cards that have it stay two, by their addresses, whatever sysfs says."""
    cards = [replace(card, kfd_nodes=(KfdNode(node=node, unique_id=unique_id),)) for node, card in ((1, A), (2, B))]
    fake.write([replace(card, unique_id=unique_id) for card in cards])
    devices = Host(fake).read().devices
    assert [(device.key.identity, device.uuid) for device in devices] == [(A.pci, ""), (B.pci, "")]


@pytest.mark.parametrize(
    ("unique_id", "uuid"), [(0x12AB, "GPU-00000000000012ab"), (0, ""), (2**64 - 1, ""), (None, "")]
)
def test_a_card_without_a_compute_node_has_the_id_that_the_driver_says(
    fake: FakeSys, unique_id: int | None, uuid: str
) -> None:
    """Where the KFD has no such card, amdgpu's own file is what there is."""
    fake.write([replace(A, unique_id=unique_id, kfd_nodes=())])
    (device,) = Host(fake).read().devices
    assert (device.uuid, device.kfd_node) == (uuid, None)


def test_names_are_the_drivers_or_the_databases_or_the_ids(fake: FakeSys, tmp_path: Path) -> None:
    """A product name goes before the PCI database, and without either the ids are the name."""
    database = tmp_path / "root/usr/share/misc/pci.ids"
    database.parent.mkdir(parents=True)
    database.write_text("1002  AMD\n\t744c  Navi 31\n")
    fake.write([replace(A, product_name="Radeon Pro W7900"), B, replace(CPX, device_id="0x74a1")])
    named = devices(Host(fake, str(tmp_path / "root")).read())
    assert [named[card.pci].name for card in (A, B, CPX)] == ["Radeon Pro W7900", "Navi 31", "1002:74a1"]


# --- amd-smi's number


def test_amd_smis_numbers_go_by_address_not_by_kfd_node(fake: FakeSys) -> None:
    """A's node is behind B's, and A is amd-smi's card 0 all the same."""
    fake.write([A, B])
    sample = Host(fake).read()
    assert indices(sample) == {A.pci: 0, B.pci: 1}
    assert [device.kfd_node for device in sample.devices] == [2, 1]
    assert sample.whole


def test_cards_that_the_kfd_does_not_have_are_numbered_behind(fake: FakeSys) -> None:
    """amd-smi does not list them, so they take no number from those that it lists."""
    fake.write([replace(A, kfd_nodes=()), B, RADEON])
    assert indices(Host(fake).read()) == {B.pci: 0, A.pci: 1, RADEON.pci: 2}


def test_each_partition_takes_a_number(fake: FakeSys) -> None:
    """The card behind a card of four partitions has number five, after the one in front."""
    behind = replace(B, pci="0001:02:00.0", kfd_nodes=(KfdNode(node=9),))
    fake.write([A, CPX, behind])
    found = indices(Host(fake).read())
    assert found == {
        A.pci: 0,
        CPX.pci: 1,
        **{f"{CPX.pci}/xcp{part}": 1 + part for part in range(4)},
        behind.pci: 5,
    }


# --- the KFD's nodes


def test_nodes_keep_the_kfds_numbers_f44(fake: FakeSys) -> None:
    """F44: nodes 0 and 1 are CPUs; a card's node is the KFD's number, and CPUs are no devices."""
    igpu = replace(B, pci="0000:0f:00.0", kfd_nodes=(KfdNode(node=3, simd_count=4),))
    fake.write([A, igpu], cpus=2)
    assert [(device.pci_bus_id, device.kfd_node) for device in Host(fake).read().devices] == [
        (A.pci, 2),
        (igpu.pci, 3),
    ]


def test_a_node_that_may_not_be_read_is_no_node_of_ours(fake: FakeSys) -> None:
    """A device cgroup hides it; the card is there with its readings, and the inventory is known."""
    fake.write([A, B])
    leads_to(fake.sys / NODES / "1/properties", NOBODYS)
    sample = Host(fake).read()
    assert sample.whole
    assert devices(sample)[B.pci].kfd_node is None
    assert values(sample, B.pci).keys() == EVERYTHING
    assert indices(sample) == {A.pci: 0, B.pci: 1}


@pytest.mark.parametrize("broken", ["eio", "text", "location"])
def test_a_node_that_cannot_be_read_freezes_nothing(fake: FakeSys, broken: str) -> None:
    """Its card is not identified now, the inventory is not whole, no card from there on has a number; it heals."""
    fake.write([A, B])
    path = f"{NODES}/1/properties"
    good = (fake.sys / path).read_text()
    if broken == "eio":
        leads_to(fake.sys / path, "/proc/self/mem")
    else:
        place(fake, path, "nothing 1\n" if broken == "text" else re.sub("location_id .*", "", good))
    host = Host(fake)
    for number in (None, 0):  # whether a card is divided is not known before it was looked at
        sample = host.read()
        assert not sample.whole
        assert state(sample, B.pci) == "lost"
        assert values(sample, B.pci) == {}
        assert values(sample, A.pci)["utilization"] == 11
        assert indices(sample) == {A.pci: number, B.pci: None}
        assert any("nodes/1" in fault.detail for fault in sample.faults)
    place(fake, path, good)
    healed = host.read()
    assert healed.whole
    assert indices(healed) == {A.pci: 0, B.pci: 1}
    assert values(healed, B.pci)["utilization"] == 77


def test_a_node_of_a_processor_that_cannot_be_read_costs_nothing(fake: FakeSys) -> None:
    """Every card has its node, so none can be missing: all have their numbers, and their readings."""
    fake.write([A, B])
    leads_to(fake.sys / NODES / "0/properties", "/proc/self/mem")
    host = Host(fake)
    host.read()  # which of them are divided is not known before they were looked at
    sample = host.read()
    assert sample.whole
    assert indices(sample) == {A.pci: 0, B.pci: 1}
    assert values(sample, B.pci)["utilization"] == 77


def test_numbers_that_no_message_can_carry_are_no_values(fake: FakeSys) -> None:
    """A file with more than 64 bits costs its reading, and no other card's."""
    fake.write([A, B])
    for name, text in (("mem_info_vram_total", str(2**64)), ("gpu_busy_percent", "3_1"), ("unique_id", "f" * 17)):
        fake.set(A.pci, name, text)
    sample = Host(fake).read()
    assert values(sample, A.pci) == {"temperature": 51}
    assert values(sample, B.pci).keys() == EVERYTHING
    msgspec.msgpack.encode(sample)


def test_a_card_whose_driver_is_on_its_way_is_missed(fake: FakeSys) -> None:
    """While the host boots an inventory without it would bind masks to other cards; later it is nobody's."""
    fake.write([A, replace(B, driver="")])
    (fake.proc / "uptime").write_text("30.25 12.00\n")
    host = Host(fake)
    assert not host.read().whole
    (fake.proc / "uptime").write_text("900.25 12.00\n")
    settled = Host(fake).read()
    assert settled.whole
    assert [device.pci_bus_id for device in settled.devices] == [A.pci]
    fake.write([A, B])
    assert len(host.read().devices) == 2


def test_a_card_that_is_plugged_in_is_missed_until_it_has_its_driver(fake: FakeSys) -> None:
    fake.write([A])
    host = Host(fake)
    assert host.read().whole
    fake.write([A, replace(B, driver="")])
    assert not host.read().whole
    fake.write([A, B])
    assert host.read().whole


def test_a_card_that_may_lack_a_partition_is_not_identified(fake: FakeSys) -> None:
    """One node of two cannot be read: what is left looks like a whole card, and the card says that it is divided."""
    fake.write([A, replace(CPX, compute_partition="DPX", kfd_nodes=CPX.kfd_nodes[:2])])
    leads_to(fake.sys / NODES / "4/properties", "/proc/self/mem")
    sample = Host(fake).read()
    assert not sample.whole
    assert devices(sample)[CPX.pci].kfd_node is None
    assert values(sample, CPX.pci) == {}
    assert values(sample, A.pci)["utilization"] == 11


@pytest.mark.parametrize("seen", [0, 2])
def test_a_partition_whose_others_are_hidden_is_no_whole_card(fake: FakeSys, seen: int) -> None:
    """In a container that may open one partition, that partition is a part of the card."""
    fake.write([CPX])
    for part in set(range(4)) - {seen}:
        leads_to(fake.sys / NODES / f"{3 + part}/properties", NOBODYS)
    found = devices(Host(fake).read())
    assert found[f"{CPX.pci}/xcp{seen}"].kfd_node == 3 + seen
    assert found[CPX.pci].kfd_node is None
    assert len(found) == 2


@pytest.mark.parametrize("location", ["high-bits", "function"])
def test_partitions_are_told_by_either_spelling(fake: FakeSys, location: str) -> None:
    """Newer kernels put the partition above the location, older ones where the PCI function stands."""
    nodes = tuple(replace(node, location=location) for node in CPX.kfd_nodes)  # type: ignore[arg-type]
    fake.write([replace(CPX, kfd_nodes=nodes)])
    devices = Host(fake).read().devices
    board, *parts = devices
    assert (board.key.identity, board.kfd_node, board.partition) == (CPX.pci, None, "")
    assert [(part.key.identity, part.partition, part.kfd_node) for part in parts] == [
        (f"{CPX.pci}/xcp{number}", str(number), 3 + number) for number in range(4)
    ]
    assert [part.uuid for part in parts] == [f"GPU-{0xC0 + number:016x}" for number in range(4)]
    assert {part.parent for part in parts} == {board.key}


def test_nodes_that_do_not_say_which_partition_they_are_are_refused(fake: FakeSys) -> None:
    """Two nodes in one place: no identity, no device, and no index space; the numbers behind them are known."""
    nodes = (KfdNode(node=3), KfdNode(node=4))
    behind = replace(B, pci="0001:02:00.0", kfd_nodes=(KfdNode(node=9),))
    fake.write([A, replace(CPX, kfd_nodes=nodes), behind])
    sample = Host(fake).read()
    assert not sample.whole
    assert state(sample, CPX.pci) == "lost"
    assert indices(sample) == {A.pci: 0, CPX.pci: 1, behind.pci: 3}


def test_a_domain_tells_two_cards_of_one_bus_number_apart_f28(fake: FakeSys) -> None:
    """F28: the whole address counts."""
    there = replace(B, pci="0001:03:00.0")
    fake.write([A, there])
    sample = Host(fake).read()
    assert [(d.pci_bus_id, d.kfd_node, d.uuid) for d in sample.devices] == [
        (A.pci, 2, "GPU-00000000000000a1"),
        (there.pci, 1, "GPU-00000000000000b2"),
    ]
    assert values(sample, A.pci)["utilization"] == 11
    assert values(sample, there.pci)["utilization"] == 77


def test_virtual_functions_are_cards_of_their_own(fake: FakeSys) -> None:
    """Functions 0 and 1 of one device are two cards where the bus has both, each with its own node."""
    functions = [replace(A, pci=f"0000:03:02.{n}", minor=n, busy=n, kfd_nodes=(KfdNode(node=1 + n),)) for n in (0, 1)]
    fake.write(functions, cpus=1)
    sample = Host(fake).read()
    assert [(d.key.identity, d.kfd_node, d.partition) for d in sample.devices] == [
        ("0000:03:02.0", 1, ""),
        ("0000:03:02.1", 2, ""),
    ]
    assert values(sample, "0000:03:02.1")["utilization"] == 1


def test_other_vendors_cards_are_none_of_ours(fake: FakeSys) -> None:
    fake.write([A, IntelCard(pci="0000:4d:00.0", minor=2), OtherCard(pci="0000:17:00.0")])
    assert indices(Host(fake).read()) == {A.pci: 0}


def test_a_new_division_of_a_card_is_seen(fake: FakeSys) -> None:
    """The KFD counts its generations: nodes are read again when it changes, and old partitions are gone."""
    fake.write([CPX, A], cpus=1)
    host = Host(fake)
    assert len(host.read().devices) == 6
    fake.write([replace(CPX, compute_partition="SPX", kfd_nodes=(KfdNode(node=3, unique_id=0xC0),)), A])
    sample = host.read()
    assert indices(sample) == {A.pci: 0, CPX.pci: 1}
    assert devices(sample)[CPX.pci].kfd_node == 3


# --- readings


def test_every_reading_is_the_cards_own(fake: FakeSys) -> None:
    fake.write([A, B])
    sample = Host(fake).read()
    assert values(sample, A.pci) == {
        "utilization": 11,
        "memory_free": 22 * GIB,
        "memory_used": 2 * GIB,
        "memory_total": 24 * GIB,
        "temperature": 51,
    }
    assert values(sample, B.pci) == {
        "utilization": 77,
        "memory_free": 11 * GIB,
        "memory_used": 5 * GIB,
        "memory_total": 16 * GIB,
        "temperature": 40,
    }
    assert sample.faults == ()
    assert sample.driver_version == "6.12.12"


@pytest.mark.parametrize(
    ("temperatures", "sensor", "expected"),
    [
        ({"edge": 51, "junction": 60}, "edge", 51),
        ({"junction": 60, "mem": 64}, "junction", 60),
        ({"mem": 64}, "", None),
        ({}, "", None),
    ],
)
def test_the_temperature_is_the_edges_or_the_junctions_and_says_so_f79(
    fake: FakeSys, temperatures: dict[str, int], sensor: str, expected: int | None
) -> None:
    """F79: MI300 has no edge sensor; the memory's is never the chip's."""
    fake.write([replace(A, temperatures=temperatures)])
    sample = Host(fake).read()
    assert devices(sample)[A.pci].temperature_sensor == sensor
    assert values(sample, A.pci).get("temperature") == expected
    assert sample.faults == ()


def test_a_sensor_without_a_label_is_not_guessed_at(fake: FakeSys) -> None:
    """Nobody says what it measures."""
    fake.write([A])
    fake.fault(A.pci, "hwmon/*/temp*_label", "missing")
    sample = Host(fake).read()
    assert values(sample, A.pci).keys() == EVERYTHING - {"temperature"}
    assert devices(sample)[A.pci].temperature_sensor == ""


def test_a_busy_share_outside_of_0_to_100_is_none(fake: FakeSys) -> None:
    fake.write([A])
    host = Host(fake)
    for text in ("65535", "101", "-1", "4294967295"):
        fake.set(A.pci, "gpu_busy_percent", f"{text}\n")
        sample = host.read()
        assert values(sample, A.pci).keys() == EVERYTHING - {"utilization"}, text
        assert sample.faults == ()


@pytest.mark.parametrize("busy", [0, 100])
def test_an_idle_and_a_busy_card_are_readings(fake: FakeSys, busy: int) -> None:
    """0 is a value."""
    fake.write([replace(A, busy=busy, vram_used=0)])
    found = values(Host(fake).read(), A.pci)
    assert (found["utilization"], found["memory_used"], found["memory_free"]) == (busy, 0, 24 * GIB)


def test_no_chip_has_that_temperature_f71(fake: FakeSys) -> None:
    """F71: removed, unfilled and broken sensors say 0, negative numbers, 255 or 510 degrees."""
    fake.write([A])
    host = Host(fake)
    for millidegrees in (0, -1000, -1, 255000, 510000, 65535000, 150000):
        fake.set(A.pci, "hwmon/*/temp1_input", f"{millidegrees}\n")
        sample = host.read()
        assert values(sample, A.pci).keys() == EVERYTHING - {"temperature"}, millidegrees
        assert sample.faults == ()


MEMORIES = [
    (24 * GIB, 25 * GIB, {"memory_total": 24.0 * GIB}),
    (24 * GIB, 2**64 - 1, {"memory_total": 24.0 * GIB}),
    (24 * GIB, None, {"memory_total": 24.0 * GIB}),
    (24 * GIB, 24 * GIB, {"memory_total": 24.0 * GIB, "memory_used": 24.0 * GIB, "memory_free": 0.0}),
    (0, 0, {}),
    (-1, 2 * GIB, {}),
    (2**64 - 1, 2 * GIB, {}),
    (None, 2 * GIB, {}),
    (None, None, {}),
]


def test_memory_that_cannot_be_is_none(fake: FakeSys) -> None:
    """More used than there is makes what is used and free unknown; no total makes all so."""
    for total, used, expected in MEMORIES:
        fake.write([replace(A, vram_total=total, vram_used=used)])
        sample = Host(fake).read()
        found = {metric: value for metric, value in values(sample, A.pci).items() if "memory" in metric}
        assert found == expected, (total, used)
        assert sample.faults == ()


# --- faults

FILES = {
    "gpu_busy_percent": {"utilization"},
    "mem_info_vram_total": {"memory_free", "memory_used", "memory_total"},
    "mem_info_vram_used": {"memory_free", "memory_used"},
    "hwmon/*/temp1_input": {"temperature"},
    "hwmon/*/temp1_label": {"temperature"},
}


def broken(fake: FakeSys, name: str, how: str) -> None:
    if how == "denied":
        for path in fake.device(A.pci).glob(name):
            leads_to(path, NOBODYS)
    elif how == "not a number":
        fake.set(A.pci, name, "N/A\n")
    else:
        fake.fault(A.pci, name, "eio" if how == "eio" else "empty")


def costs_only(sample: VendorSample, name: str, reason: str) -> None:
    assert values(sample, A.pci).keys() == EVERYTHING - FILES[name]
    assert state(sample, A.pci) == "ok"
    assert values(sample, B.pci).keys() == EVERYTHING
    (fault,) = sample.faults
    assert name.rpartition("/")[2] in fault.detail
    assert (fault.reason, fault.key) == (reason, DeviceKey("amd", A.pci))


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_fails_costs_its_reading_and_is_named(fake: FakeSys, name: str) -> None:
    """The card's other readings stand, the fault says which file, another card sees nothing, and it heals."""
    ways = ("eio", "denied") if name.endswith("label") else ("eio", "denied", "empty", "not a number")
    for how in ways:
        fake.write([A, B])
        broken(fake, name, how)
        host = Host(fake)
        costs_only(host.read(), name, "no-permission" if how == "denied" else "driver-error")
        fake.write([A, B])
        healed = host.read()
        assert values(healed, A.pci).keys() == EVERYTHING
        assert healed.faults == ()
        assert devices(healed)[A.pci].temperature_sensor == "edge"


def test_a_file_that_begins_to_fail_costs_its_reading_at_once(fake: FakeSys) -> None:
    """The last value is not shown again."""
    fake.write([A, B])
    host = Host(fake)
    host.read()
    for name in ("gpu_busy_percent", "mem_info_vram_used", "hwmon/*/temp1_input"):
        broken(fake, name, "eio")
        costs_only(host.read(), name, "driver-error")
        fake.write([A, B])


@pytest.mark.parametrize("name", ["unique_id", "product_name", "current_compute_partition"])
def test_a_detail_that_cannot_be_read_costs_no_reading(fake: FakeSys, name: str) -> None:
    """It is left out, and found once it can be read."""
    card = replace(A, product_name="Radeon", compute_partition="SPX", kfd_nodes=())
    fake.write([card])
    host = Host(fake)
    fake.fault(A.pci, name, "eio")
    assert values(host.read(), A.pci).keys() == EVERYTHING
    fake.write([card])
    (device,) = host.read().devices
    assert (device.name, device.uuid) == ("Radeon", "GPU-1a2b3c4d00000300")


@pytest.mark.parametrize("name", ["gpu_busy_percent", "mem_info_vram_*", "hwmon/*/temp1_input"])
def test_a_file_that_is_not_there_is_no_fault(fake: FakeSys, name: str) -> None:
    fake.write([A])
    fake.fault(A.pci, name, "missing")
    sample = Host(fake).read()
    lost = {"gpu": "utilization", "mem": "memory_", "hwm": "temperature"}[name[:3]]
    assert values(sample, A.pci).keys() == {metric for metric in EVERYTHING if not metric.startswith(lost)}
    assert sample.faults == ()


def test_a_card_that_gives_no_reading_is_lost(fake: FakeSys) -> None:
    fake.write([A, B])
    for name in AMD_ANSWERS:
        fake.fault(B.pci, name, "eio")
    sample = Host(fake).read()
    assert (state(sample, A.pci), state(sample, B.pci)) == ("ok", "lost")


def test_a_card_whose_driver_is_still_taking_it_is_not_identified(fake: FakeSys) -> None:
    """The driver makes the DRM device last: until then files and nodes may be missing, and nothing is frozen."""
    fake.write([A, replace(B, kfd_nodes=())])
    gone = fake.device(B.pci) / "drm"
    kept = gone.rename(fake.device(B.pci) / "kept")
    host = Host(fake)
    sample = host.read()
    assert not sample.whole
    assert [fault.reason for fault in sample.faults] == ["starting"]
    kept.rename(gone)
    assert host.read().whole


def test_a_card_that_starts_anew_is_looked_up_anew(fake: FakeSys) -> None:
    """Between two cycles a card was unbound and bound: its sensors have other names, and another card may be there."""
    card = replace(A, kfd_nodes=())
    fake.write([card])
    host = Host(fake)
    host.read()
    (fake.device(A.pci) / "drm").rename(fake.sys.parent / "kept")  # so that no other file is given its inode
    fake.remove(A.pci)
    fake.write([replace(card, minor=5, unique_id=0x55, vram_total=8 * GIB, temperatures={"junction": 70})])
    sample = host.read()
    (device,) = sample.devices
    assert (device.minor_number, device.uuid, device.memory_total_bytes) == (133, "GPU-0000000000000055", 8 * GIB)
    assert values(sample, A.pci)["temperature"] == 70
    assert device.temperature_sensor == "junction"


# --- drivers


@pytest.mark.parametrize("driver", ["vfio-pci", ""])
def test_a_card_of_a_guest_or_of_nobody_is_no_device_f95(fake: FakeSys, driver: str) -> None:
    """F95: it leaves and comes back with the same labels, and the other card never moves."""
    fake.write([A, B])
    host = Host(fake)
    before = host.read()
    fake.write([A, replace(B, driver=driver)])
    without = host.read()
    assert without.devices == before.devices[:1]
    assert without.faults == ()
    assert without.whole
    fake.write([A, B])
    after = host.read()
    assert after.devices == before.devices
    assert after.readings == before.readings


def test_a_card_of_radeon_is_known_and_not_read(fake: FakeSys) -> None:
    """It has its info row, and the reason why nothing is read, alone or beside others."""
    fake.write([RADEON])
    assert [hint.code for hint in Host(fake).read().hints] == ["unsupported-driver"]
    fake.write([A, RADEON])
    sample = Host(fake).read()
    assert devices(sample)[RADEON.pci].name == "1002:744c"
    assert values(sample, RADEON.pci) == {}
    assert sample.faults == ()  # a host with such a card is healthy
    (hint,) = sample.hints
    assert hint.code == "unsupported-driver"
    assert f"{RADEON.pci}: the driver radeon" in hint.text


@pytest.mark.parametrize(
    ("cards", "reason"),
    [
        ([], "no-devices"),
        ([IntelCard(pci="0000:4d:00.0", minor=2)], "no-devices"),
        ([replace(A, driver="")], "driver-not-loaded"),
        ([replace(A, driver="vfio-pci")], "driver-not-loaded"),
    ],
)
def test_a_host_without_a_card_that_can_be_read_says_why(
    fake: FakeSys, cards: Sequence[AmdCard | IntelCard], reason: str
) -> None:
    fake.write(cards)
    assert Host(fake).fault() == reason


# --- sleep


def awake_only(fake: FakeSys, card: AmdCard) -> None:
    """Every file of the card that its driver answers, and every link to the driver's folders, hangs who opens it."""
    core = {"vendor", "device", "class", "revision", "uevent", "enable", "numa_node"}
    device = fake.device(card.pci)
    for path in sorted(device.rglob("*")):
        name = str(path.relative_to(device))
        if path.is_file() and not path.is_symlink() and name not in core and not name.startswith("power/"):
            fake.fault(card.pci, name, "fifo")


def test_a_sleeping_card_is_not_touched_f91(fake: FakeSys) -> None:
    """F91: nothing of it is opened but what the PCI core answers, at the start and later: else it would hang here."""
    asleep = replace(B, runtime_status="suspended")
    fake.write([A, asleep])
    awake_only(fake, asleep)
    host = Host(fake)
    for _ in range(3):
        sample = host.read()
        assert state(sample, B.pci) == "asleep"
        assert values(sample, B.pci) == {}
        assert values(sample, A.pci).keys() == EVERYTHING
        assert sample.faults == ()
        assert sample.whole
        assert indices(sample) == {A.pci: 0, B.pci: 1}
    fake.write([A, B])
    woken = host.read()
    assert values(woken, B.pci).keys() == EVERYTHING
    (before, after) = (devices(each)[B.pci] for each in (sample, woken))
    assert (after.key, after.physical_index, after.uuid) == (before.key, before.physical_index, before.uuid)


def test_a_card_that_falls_asleep_is_as_it_was_f91(fake: FakeSys) -> None:
    fake.write([A, B])
    host = Host(fake)
    before = host.read()
    fake.write([A, replace(B, runtime_status="suspending")])
    awake_only(fake, B)
    asleep = host.read()
    assert asleep.devices == before.devices
    assert state(asleep, B.pci) == "asleep"
    fake.write([A, B])
    assert host.read() == before


@pytest.mark.parametrize("known", [True, False])
def test_falling_asleep_while_being_read_is_no_fault(fake: FakeSys, known: bool) -> None:
    """It was awake when it was looked at, and refuses to be read since: the driver wakes no card for a monitor."""
    fake.write([A, B])
    backend = AmdBackend(Places(str(fake.sys), str(fake.proc)))
    worker = Worker(backend)
    if known:
        assert worker.answer(Ask(1, time.monotonic() + 5)).sample
    for name in (*AMD_ANSWERS, "hwmon/*/temp1_label", "unique_id"):
        fake.fault(B.pci, name, "eio")
    # The first look finds it awake; the FIFO holds the second back until it sleeps.
    status = fake.device(B.pci) / "power/runtime_status"
    fake.fault(B.pci, "gpu_busy_percent" if known else "unique_id", "fifo")

    def sleep() -> None:
        time.sleep(0.2)
        assert status.read_text() == "active\n"
        fake.set(B.pci, "power/runtime_status", "suspended\n")
        fake.fault(B.pci, "gpu_busy_percent" if known else "unique_id", "eio")

    falling = threading.Thread(target=sleep)
    falling.start()
    sample = worker.answer(Ask(2, time.monotonic() + 5)).sample
    falling.join()
    assert sample is not None
    assert state(sample, B.pci) == "asleep"
    assert values(sample, B.pci) == {}
    assert sample.faults == ()
    assert sample.whole


# --- the whole daemon


def flags(fake: FakeSys) -> list[str]:
    return [f"--path.sysfs={fake.sys}", f"--path.procfs={fake.proc}"]


def readings(scrape: Scrape, card: AmdCard) -> int:
    return sum(len(scrape.of(name, pci_bus_id=card.pci, vendor="amd")) for name in READINGS)


def started(fake: FakeSys, start: Start, config: str = FRESH + "fleets: [{name: host, runtime: host}]") -> Daemon:
    return start({}, config, flags(fake))


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["gpu_busy_percent", "hwmon/*/temp1_label"])
def test_a_card_that_hangs_costs_only_its_own_readings_f60(fake: FakeSys, start: Start, name: str) -> None:
    """F60: the page comes by the deadline with the other card's values; the card is `hung`, and heals."""
    fake.write([A, B])
    fake.fault(A.pci, name, "fifo")
    daemon = started(fake, start)
    first = daemon.scrape(timeout=2)
    assert first.seconds < 2
    again = daemon.scrape(timeout=2)
    assert again.seconds < 0.5
    for scrape in (first, again):
        assert scrape.state(pci_bus_id=A.pci) == "hung"
        assert readings(scrape, A) == 0
        assert readings(scrape, B) == len(READINGS)
    fake.write([A, B])
    healed = daemon.scrape_until(lambda scrape: scrape.state(pci_bus_id=A.pci) == "ok")
    assert readings(healed, A) == len(READINGS)


@pytest.mark.e2e
def test_a_removed_cards_series_go_with_it_f85_f95(fake: FakeSys, start: Start) -> None:
    """F85, F95: no series of it is left in the next page, and all return under equal labels with it."""
    fake.write([A, B])
    daemon = started(fake, start)
    before = daemon.scrape()
    fake.write([A, replace(B, driver="vfio-pci")])
    without = daemon.scrape()
    assert [
        name for name, samples in without.samples.items() for s in samples if s.labels.get("pci_bus_id") == B.pci
    ] == []
    assert readings(without, A) == len(READINGS)
    fake.remove(B.pci)
    assert readings(daemon.scrape(), A) == len(READINGS)
    fake.write([A, B])
    after = daemon.scrape()
    for name in (*READINGS, "gpu_info", "gpu_exporter_device_state"):
        assert after.of(name) == before.of(name)


@pytest.mark.e2e
def test_a_host_without_an_amd_card_has_a_row_only_where_it_is_named(fake: FakeSys, start: Start) -> None:
    fake.write([OtherCard(pci="0000:17:00.0")])
    named = started(fake, start).scrape()
    assert named.value("gpu_exporter_backend_fault_info", vendor="amd") == 1
    unnamed = start({}, "sampling: {reuse_seconds: 0}\n", flags(fake)).scrape()
    assert unnamed.of("gpu_exporter_backend_up", vendor="amd") == []


# --- a witness: another program on the same tree


def some_host(seed: int) -> list[AmdCard]:
    """A few cards in no order, each number of which is its own, and some files of which are missing."""
    draw = random.Random(seed)
    buses = draw.sample(range(1, 0xF0), draw.randint(1, 6))
    minors = draw.sample(range(len(buses)), len(buses))
    nodes = draw.sample(range(2, 2 + len(buses)), len(buses))
    return [
        AmdCard(
            pci=f"{draw.choice((0, 0, 1)):04x}:{bus:02x}:00.0",
            minor=minor,
            busy=draw.randint(0, 100),
            vram_total=draw.randint(1, 192) * GIB,
            vram_used=draw.randint(1, GIB),
            temperatures={label: draw.randint(20, 99) for label in ("edge", "junction", "mem")},
            kfd_nodes=(KfdNode(node=node, unique_id=draw.getrandbits(63)),),
        )
        for bus, minor, node in zip(buses, minors, nodes, strict=True)
    ]


def once(fake: FakeSys) -> Scrape:
    """One page of ours in the mount namespace that rocm-smi is given."""
    command = mounted(fake.sys, [*PROGRAM, "once"])
    done = subprocess.run(command, env=clean_environment({}), capture_output=True, text=True, check=True, timeout=60)
    return parse(done.stdout)


@pytest.mark.e2e
@pytest.mark.parametrize("seed", range(5))
def test_rocm_smi_says_the_same_of_every_card(fake: FakeSys, seed: int) -> None:
    """Debian's rocm-smi on the same tree: equal utilization, memory and temperature at each address."""
    cards = some_host(seed)
    fake.write(cards)
    theirs = {card["PCI Bus"].lower(): card for card in rocm_smi(fake).values()}
    scrape = once(fake)
    assert {s.labels["pci_bus_id"] for s in scrape.of("gpu_info", vendor="amd")} == theirs.keys()
    for address, card in theirs.items():
        where = {"pci_bus_id": address, "vendor": "amd"}
        used, total = int(card["VRAM Total Used Memory (B)"]), int(card["VRAM Total Memory (B)"])
        assert scrape.value("gpu_utilization_percent", **where) == float(card["GPU use (%)"])
        assert scrape.value("gpu_memory_total_bytes", **where) == total
        assert scrape.value("gpu_memory_used_bytes", **where) == used
        assert scrape.value("gpu_memory_free_bytes", **where) == total - used
        assert scrape.value("gpu_temperature_celsius", **where) == float(card["Temperature (Sensor edge) (C)"])
