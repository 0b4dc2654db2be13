"""An index space holds still under every runtime: what happens to a card moves no other card's number."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from msgspec.structs import replace

from exporter.model import Device, DeviceKey, Fleet, State
from tests import strategies, test_level_zero_masks, test_rocm_masks
from tests.test_attribution import DOWN, Watch, up

AMD = tuple(map(test_rocm_masks.card, "abcd"))
INTEL = test_level_zero_masks.cards("abcd")
TILED = test_level_zero_masks.cards("ab", tiles=2, **test_level_zero_masks.MAX)
PCI_ORDER = {"ZE_ENABLE_PCI_ID_DEVICE_ORDER": "1"}
VULKAN_MASK = "GGML_VK_VISIBLE_DEVICES"
COMPOSITE = PCI_ORDER | {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}


class Space(NamedTuple):
    """A fleet of one runtime on a host, and the identities behind its indices."""

    runtime: str
    env: dict[str, str]
    devices: tuple[Device, ...]
    expected: list[str]

    def watch(self) -> Watch:
        """The fleet, before the first cycle."""
        return Watch(Fleet(name="chat", runtimes=(self.runtime,), env=self.env))

    @property
    def vendor(self) -> str:
        """Whose cards these are."""
        return self.devices[0].key.vendor


def addresses(letters: str) -> list[str]:
    """PCI addresses of AMD's and Intel's cards by letter."""
    return [f"0000:{ord(letter) - ord('a') + 1}0:00.0" for letter in letters]


SPACES = {
    "cuda": Space(
        "cuda", strategies.PCI_ORDER, strategies.cards("abcd"), [strategies.card(each).uuid for each in "abcd"]
    ),
    "rocr": Space("rocm", {"ROCR_VISIBLE_DEVICES": "3,1"}, AMD, addresses("ac")),
    "hip": Space("rocm", {"ROCR_VISIBLE_DEVICES": "2,1,0", "HIP_VISIBLE_DEVICES": "2,0"}, AMD, addresses("db")),
    "unmasked rocm": Space("rocm", {}, AMD, addresses("dcba")),
    "level_zero": Space("level_zero", PCI_ORDER | {"ZE_AFFINITY_MASK": "3,1"}, INTEL, addresses("bd")),
    "unmasked level_zero": Space("level_zero", PCI_ORDER, INTEL, addresses("abcd")),
    "tiles": Space("level_zero", COMPOSITE | {"ZE_AFFINITY_MASK": "1.1,0"}, TILED, ["0000:10:00.0", "0000:20:00.0/t1"]),
    "sycl": Space("sycl", PCI_ORDER | {"ONEAPI_DEVICE_SELECTOR": "!level_zero:1"}, INTEL, addresses("acd")),
}
spaces = pytest.mark.parametrize("space", SPACES.values(), ids=list(SPACES))


def bound(watch: Watch) -> list[str]:
    """Identities by fleet index, from 0 on."""
    found = {each.fleet_index: each.device.key.identity for each in watch.snapshot.bindings}
    assert sorted(found) == list(range(len(found))), watch.snapshot.mappings
    return [found[index] for index in sorted(found)]


@spaces
@pytest.mark.parametrize("state", ["lost", "hung", "asleep"])
def test_a_card_that_fails_keeps_its_place(space: Space, state: State) -> None:
    """From the start or afterwards, whichever card it is, it and all others keep their numbers; it has no reading."""
    healthy = space.watch().see(up(space.devices, vendor=space.vendor))
    assert bound(healthy) == space.expected
    for device in space.devices:
        cycle = up(space.devices, vendor=space.vendor)
        assert cycle.sample
        states = tuple(replace(each, state=state) if each.key == device.key else each for each in cycle.sample.states)
        failing = replace(cycle, sample=replace(cycle.sample, states=states))
        for watch in (space.watch(), space.watch().see(up(space.devices, vendor=space.vendor))):
            assert bound(watch.see(failing)) == space.expected
            read = {each.device.key for each in watch.snapshot.bindings if watch.snapshot.readings.get(each.device.key)}
            assert device.key not in read
            assert bound(watch.see(up(space.devices, vendor=space.vendor))) == space.expected


@spaces
def test_a_card_that_leaves_moves_nobody(space: Space) -> None:
    """The others keep their numbers, and it has its own again when it is back."""
    watch = space.watch().see(up(space.devices, vendor=space.vendor))
    for device in space.devices:
        rest = tuple(each for each in space.devices if each.key != device.key)
        watch.see(up(rest, vendor=space.vendor))
        kept = {each.fleet_index: each.device.key.identity for each in watch.snapshot.bindings}
        expected = dict(enumerate(space.expected))
        gone = {index for index, identity in expected.items() if identity.partition("/")[0] == device.key.identity}
        assert kept == {index: identity for index, identity in expected.items() if index not in gone}
        assert bound(watch.see(up(space.devices, vendor=space.vendor))) == space.expected


@spaces
def test_a_card_that_is_added_moves_nobody(space: Space) -> None:
    """Also one that would be the first of all."""
    first = replace(
        space.devices[0],
        key=DeviceKey(space.vendor, "0000:01:00.0"),
        pci_bus_id="0000:01:00.0",
        physical_index=9,
        uuid="GPU-0123456789abcdef",
        kfd_node=0 if space.vendor == "amd" else None,
    )
    watch = space.watch().see(up(space.devices, vendor=space.vendor))
    assert bound(watch.see(up((first, *space.devices), vendor=space.vendor))) == space.expected


@spaces
def test_a_backend_that_was_down_changes_nothing(space: Space) -> None:
    """While it is down the fleet counts as refused, and has the same binding afterwards."""
    watch = space.watch().see(up(space.devices, vendor=space.vendor))
    watch.see(replace(DOWN, vendor=space.vendor))
    assert watch.refusal() == "backend-down"
    assert bound(watch.see(up(space.devices[::-1], vendor=space.vendor))) == space.expected


@spaces
def test_an_inventory_that_is_not_whole_is_not_counted(space: Space) -> None:
    """Numbers wait for the missing card; once bound they do not depend on it."""
    watch = space.watch().see(up(space.devices, vendor=space.vendor, whole=False))
    assert watch.refusal() == "inventory-incomplete"
    assert bound(watch.see(up(space.devices, vendor=space.vendor))) == space.expected
    assert bound(watch.see(up(space.devices, vendor=space.vendor, whole=False))) == space.expected


# --- vendors beside each other


def test_each_runtime_numbers_its_own_vendors_cards() -> None:
    """A fleet that names no runtime has CUDA's, ROCm's and Level Zero's numbers, each from 0, and no card twice."""
    env = strategies.PCI_ORDER | PCI_ORDER | {"CUDA_VISIBLE_DEVICES": "1", "ZE_AFFINITY_MASK": "2"}
    watch = Watch(Fleet(name="chat", runtimes=("cuda", "rocm", "level_zero"), env=env))
    watch.see(up(strategies.cards("abcd")), up(AMD, vendor="amd"), up(INTEL, vendor="intel"))
    found = {(each.runtime, each.fleet_index): each.device.key.identity for each in watch.snapshot.bindings}
    assert found == {
        ("cuda", 0): strategies.card("b").uuid,
        ("rocm", 0): "0000:30:00.0",
        ("level_zero", 0): "0000:30:00.0",
    }
    watch.see(up(strategies.cards("abcd")), replace(DOWN, vendor="amd"), up(INTEL, vendor="intel"))
    assert {each.runtime for each in watch.snapshot.bindings} == {"cuda", "level_zero"}


def test_a_reach_may_name_several_vendors_cards() -> None:
    """Each runtime counts those of its vendor; an entry that nobody has refuses all."""
    reach = (strategies.card("c").uuid, "0000:20:00.0")
    fleet = Fleet(name="chat", runtimes=("cuda", "rocm"), env=strategies.PCI_ORDER, reach=reach)
    watch = Watch(fleet).see(up(strategies.cards("abcd")), up(AMD, vendor="amd"))
    found = [(each.runtime, each.fleet_index, each.device.key.identity) for each in watch.snapshot.bindings]
    assert found == [("cuda", 0, strategies.card("c").uuid), ("rocm", 0, "0000:20:00.0")]
    wrong = Watch(replace(fleet, reach=(*reach, "0000:99:00.0")))
    wrong.see(up(strategies.cards("abcd")), up(AMD, vendor="amd"))
    assert wrong.refusal() == "reach-unknown"
    assert wrong.snapshot.bindings == ()


def test_a_reach_of_an_address_is_all_partitions_there() -> None:
    """Where the card itself is not among the devices."""
    parts = test_rocm_masks.partitions("b", "GPU-0001", "GPU-0002")
    fleet = Fleet(name="chat", runtimes=("rocm",), reach=("0000:20:00.0",))
    watch = Watch(fleet).see(up((*parts, *AMD[2:]), vendor="amd"))
    assert bound(watch) == ["0000:20:00.0/xcp0", "0000:20:00.0/xcp1"]


def test_vulkan_is_one_list_over_all_vendors() -> None:
    """One outcome for all; its raw order is not known without an enumeration, however few cards are known."""
    fleets = (Fleet(name="chat", runtimes=("vulkan",)), Fleet(name="none", runtimes=("vulkan",), env={VULKAN_MASK: ""}))
    for cycle in ((up(AMD[:1], vendor="amd"),), (up(AMD[:1], vendor="amd"), up(INTEL[1:2], vendor="intel"))):
        watch = Watch(*fleets).see(*cycle)
        assert [mapping.runtime for mapping in watch.snapshot.mappings] == ["vulkan", "vulkan"]
        assert (watch.refusal(), watch.refusal("none")) == ("raw-order-unknown", "")
    watch = Watch(*fleets).see(up(AMD[:1], vendor="amd"), replace(DOWN, vendor="intel"))
    assert watch.refusal("none") == "backend-down"
