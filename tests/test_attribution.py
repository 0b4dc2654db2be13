"""From samples and masks to a snapshot: who is bound to what, when, and for how long."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

from exporter.attribution import attribute
from exporter.binding import Bound, Known, bind, driver_branch
from exporter.inventory import Inventory
from exporter.model import (
    EVIDENCE,
    STATES,
    BackendStatus,
    Device,
    DeviceKey,
    DeviceState,
    Evidence,
    Fault,
    Fleet,
    FleetMapping,
    Inversion,
    Reading,
    Refusal,
    Snapshot,
    State,
    VendorOutcome,
    VendorSample,
)
from tests.strategies import PCI_ORDER, asleep, board, card, cards

CHAT = Fleet(name="chat", runtimes=("cuda",), env=PCI_ORDER | {"CUDA_VISIBLE_DEVICES": "2,1"})
HOST = Fleet(name="host", runtimes=("host",))


def up(
    devices: Sequence[Device],
    *,
    vendor: str = "nvidia",
    whole: bool = True,
    states: Mapping[str, State] | None = None,
    driver: str = "575.57.08",
) -> VendorOutcome:
    """A cycle in which every device has a utilisation of its PCI bus number; ``states`` are by letter, else ok."""
    held = {card(letter).key: state for letter, state in (states or {}).items()}
    sample = VendorSample(
        vendor=vendor,
        driver_version=driver,
        whole=whole,
        devices=tuple(devices),
        states=tuple(DeviceState(device.key, held.get(device.key, "ok")) for device in devices),
        readings=tuple(
            Reading("utilization", device.key, float(int(device.pci_bus_id[5:7], 16))) for device in devices
        ),
    )
    return VendorOutcome(vendor=vendor, sample=sample, duration_seconds=0.01)


DOWN = VendorOutcome(vendor="nvidia", fault=Fault("crashed", "the worker ended with signal 11"), duration_seconds=0.01)


class Watch:
    """Cycles one after the other with the same fleets; what is bound goes from one to the next."""

    def __init__(self, *fleets: Fleet, accept: Collection[Evidence] = EVIDENCE) -> None:
        self.fleets, self.accept = fleets, accept
        self.bound = Bound()
        self.snapshot: Snapshot

    def see(self, *outcomes: VendorOutcome) -> Watch:
        """One cycle."""
        mappings, self.bound, _ = bind(self.fleets, outcomes, self.bound, Known(self.accept))
        statuses = tuple(
            BackendStatus(
                vendor=each.vendor, up=not each.fault, duration_seconds=0.0, fault=each.fault, faults_total={}
            )
            for each in outcomes
        )
        self.snapshot = attribute(outcomes, mappings, statuses)
        return self

    def who(self, fleet: str = "chat") -> dict[int, str]:
        """The letters of the bound cards by fleet index, or the addresses of those without a UUID."""
        found = [binding for binding in self.snapshot.bindings if binding.fleet == fleet]
        return {each.fleet_index: each.device.uuid[4:5] or each.device.pci_bus_id for each in found}

    def readings(self, fleet: str = "chat") -> dict[int, float]:
        """Utilisation by fleet index."""
        found = [binding for binding in self.snapshot.bindings if binding.fleet == fleet]
        values = {each.fleet_index: self.snapshot.readings.get(each.device.key, {}) for each in found}
        return {index: value["utilization"][()] for index, value in values.items() if value}

    def refusal(self, fleet: str = "chat") -> str:
        """The code of the fleet's refusal; empty when it is inverted."""
        outcome = next(mapping.outcome for mapping in self.snapshot.mappings if mapping.fleet == fleet)
        return outcome.code if isinstance(outcome, Refusal) else ""


def masked(mask: str | None = None, **changes: Any) -> Fleet:
    """The fleet ``chat`` with that mask in PCI order."""
    env = PCI_ORDER | ({} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})
    return Fleet(**{"name": "chat", "runtimes": ("cuda",), "env": env} | changes)


# --- a cycle


def test_a_fleets_values_are_its_cards_own() -> None:
    """Each fleet index has the values of the card behind the mask, and cards outside of it are only listed."""
    watch = Watch(CHAT).see(up(cards("abcd")))
    assert watch.who() == {0: "c", 1: "b"}
    assert watch.readings() == {0: 0x61, 1: 0x41}
    assert watch.snapshot.devices == cards("abcd")
    assert watch.snapshot.driver_versions == {"nvidia": "575.57.08"}
    assert {binding.runtime for binding in watch.snapshot.bindings} == {"cuda"}
    assert {binding.evidence for binding in watch.snapshot.bindings} == {"proven"}


@pytest.mark.parametrize("state", [state for state in STATES if state != "ok"])
def test_a_device_that_is_not_ok_has_no_readings(state: State) -> None:
    """Values that a worker sends of a card that is lost, hung or asleep are dropped; its row and its state stay."""
    watch = Watch(CHAT, HOST).see(up(cards("abcd"), states={"c": state}))
    assert watch.who() == {0: "c", 1: "b"}
    assert watch.readings() == {1: 0x41}
    assert watch.readings("host") == {0: 0x21, 1: 0x41, 3: 0x81}
    assert watch.snapshot.states[card("c").key] == state


def test_a_reading_of_an_unknown_device_is_dropped() -> None:
    """A value under a key that has no state in this cycle is nobody's."""
    stray = VendorSample(
        vendor="nvidia",
        driver_version="575",
        whole=True,
        devices=cards("a"),
        states=(DeviceState(card("a").key, "ok"),),
        readings=(Reading("utilization", card("b").key, 5.0), Reading("utilization", card("a").key, 0.0)),
    )
    watch = Watch(HOST).see(VendorOutcome(vendor="nvidia", sample=stray, duration_seconds=0.01))
    assert watch.snapshot.readings == {card("a").key: {"utilization": {(): 0.0}}}


def test_two_fleets_on_one_card() -> None:
    """A card that two fleets share is bound in each, under each one's number, with the same value."""
    other = Fleet(name="embed", runtimes=("cuda",), env={"CUDA_VISIBLE_DEVICES": card("c").uuid})
    watch = Watch(CHAT, other, HOST).see(up(cards("abcd")))
    assert (watch.who("chat")[0], watch.who("embed")[0], watch.who("host")[2]) == ("c", "c", "c")
    assert watch.readings("chat")[0] == watch.readings("embed")[0] == watch.readings("host")[2] == 0x61


def test_an_empty_mask_is_inverted_to_nothing() -> None:
    """A fleet that hides every card has a mapping and no binding."""
    watch = Watch(masked("")).see(up(cards("ab")))
    assert watch.snapshot.mappings[0].outcome == Inversion((), watch.snapshot.mappings[0].outcome.layers)
    assert watch.snapshot.bindings == ()


# --- index spaces hold still


@pytest.mark.parametrize("state", STATES)
def test_a_card_that_fails_keeps_its_place(state: State) -> None:
    """After binding, a card that is lost, hung or asleep changes no fleet index."""
    watch = Watch(CHAT, HOST).see(up(cards("abcd"))).see(up(cards("abcd"), states={"a": state, "c": state}))
    assert watch.who() == {0: "c", 1: "b"}
    assert watch.who("host") == {0: "a", 1: "b", 2: "c", 3: "d"}


def test_a_card_that_is_gone_leaves_a_hole() -> None:
    """A card that leaves takes its own fleet index with it; the others keep theirs, and it may come back."""
    watch = Watch(CHAT).see(up(cards("abcd"))).see(up(cards("abd")))
    assert watch.who() == {1: "b"}
    assert watch.refusal() == ""
    assert watch.see(up(cards("bcd"))).who() == {0: "c", 1: "b"}
    assert watch.see(up(cards("ad"))).who() == {}
    assert watch.see(up(cards("abcd"))).who() == {0: "c", 1: "b"}


def test_a_card_that_is_added_moves_nobody() -> None:
    """A card in front of all others takes no running fleet's place; only binding anew counts it."""
    watch = Watch(CHAT).see(up(cards("bcd")))
    assert watch.who() == {0: "d", 1: "c"}
    assert watch.see(up(cards("abcd"))).who() == {0: "d", 1: "c"}
    assert Watch(CHAT).see(up(cards("abcd"))).who() == {0: "c", 1: "b"}


def test_the_physical_index_follows_the_host() -> None:
    """A binding's device is as it is in this cycle: under the number that the vendor's tool gives it now."""
    watch = Watch(CHAT).see(up(cards("abcd")))
    moved = up((card("b", physical_index=0), card("c", physical_index=1)))
    assert [each.device.physical_index for each in watch.see(moved).snapshot.bindings] == [1, 0]


@pytest.mark.parametrize("letters", ["abcd", "dcba", "cadb"])
def test_the_order_of_discovery_changes_nothing(letters: str) -> None:
    """Cards may be listed in any order."""
    assert Watch(CHAT).see(up(cards(letters))).who() == {0: "c", 1: "b"}


def test_binding_does_not_change_what_was_given() -> None:
    """What was bound before is left as it was, and comes back unchanged when nothing is new."""
    before = Bound()
    _, after, _ = bind([CHAT], [up(cards("abcd"))], before, Known(EVIDENCE))
    assert before == Bound()
    assert after.kept.keys() == {("chat", "", "cuda", "nvidia")}
    assert bind([CHAT], [up(cards("bcd"))], after, Known(EVIDENCE)).bound.kept == after.kept


# --- when the inventory is whole


def test_numbers_wait_until_the_inventory_is_whole() -> None:
    """While a card cannot be identified, masks of numbers are refused; once it is, they are bound and stay so."""
    watch = Watch(CHAT).see(up(cards("abd"), whole=False))
    assert (watch.who(), watch.refusal()) == ({}, "inventory-incomplete")
    assert watch.see(up(cards("abcd"))).who() == {0: "c", 1: "b"}
    assert watch.see(up(cards("abd"), whole=False)).who() == {1: "b"}
    assert watch.refusal() == ""


def test_uuids_do_not_wait() -> None:
    """A mask of full UUIDs is bound at once, for good; an empty one is too."""
    watch = Watch(masked(card("d").uuid)).see(up(cards("abd"), whole=False))
    assert watch.who() == {0: "d"}
    assert watch.see(up(cards("abcd"))).who() == {0: "d"}
    assert Watch(masked("")).see(up(cards("a"), whole=False)).refusal() == ""


def test_a_refusal_is_not_forgotten() -> None:
    """A mask that is refused over a whole inventory stays refused, whatever card comes or goes."""
    watch = Watch(masked("0", env={"CUDA_VISIBLE_DEVICES": "0"})).see(up((card("a"), card("b", name="NVIDIA A100"))))
    assert watch.refusal() == "order-unknown"
    assert watch.see(up(cards("a"))).refusal() == "order-unknown"


def test_a_refusal_over_part_of_the_cards_is_tried_again() -> None:
    """What is refused while a card is unknown is inverted anew in the next cycle."""
    watch = Watch(masked(None, reach=(card("b").uuid,))).see(up(cards("a"), whole=False))
    assert watch.refusal() == "reach-unknown"
    assert watch.see(up(cards("ab"))).who() == {0: "b"}


# --- sleeping cards


def test_a_sleeping_card_wakes_up_in_its_place() -> None:
    """A card bound by its address while it slept is the same fleet index under its UUID once it has told it."""
    watch = Watch(CHAT).see(up((card("a"), card("b"), asleep(card("c")), card("d"))))
    assert watch.who() == {0: card("c").pci_bus_id, 1: "b"}
    assert watch.see(up(cards("abcd"))).who() == {0: "c", 1: "b"}
    assert watch.readings() == {0: 0x61, 1: 0x41}


def test_a_uuid_waits_for_the_sleeping_card_it_may_be() -> None:
    """The UUID of no card that is known may be a sleeping card's: refused until that is awake."""
    watch = Watch(masked(card("b").uuid)).see(up((card("a"), asleep(card("b")))))
    assert watch.refusal() == "inventory-incomplete"
    assert watch.see(up(cards("ab"))).who() == {0: "b"}


def test_a_reach_waits_for_the_sleeping_card_it_may_name() -> None:
    """A UUID in ``reach`` may be a sleeping card's: once that is awake, the fleet is inverted."""
    watch = Watch(masked("0", reach=(card("b").uuid,))).see(up((card("a"), asleep(card("b")))))
    assert watch.who() == {}
    assert watch.see(up(cards("ab"))).who() == {0: "b"}


def test_an_order_waits_for_the_sleeping_cards_model() -> None:
    """Whether cards are of one model is not known while one sleeps whose model is not: once it is, it counts."""
    fleet = masked(env={"CUDA_VISIBLE_DEVICES": "0"})
    watch = Watch(fleet).see(up((card("a"), asleep(card("b", name="")))))
    assert watch.refusal() != ""
    assert watch.see(up(cards("ab"))).who() == {0: "a"}


# --- reach


@pytest.mark.parametrize(
    "entry",
    [card("c").uuid, "0000:61:00.0", "61:00.0", "00000000:61:00.0"],
    ids=["uuid", "address", "short-address", "long-address"],
)
def test_reach_names_cards(entry: str) -> None:
    """A reach of UUIDs and PCI addresses in any spelling narrows what the fleet's numbers count."""
    assert Watch(masked(None, reach=(entry,))).see(up(cards("abcd"))).who() == {0: "c"}
    assert Watch(masked("1,0", reach=(card("b").uuid, entry))).see(up(cards("abcd"))).who() == {0: "c", 1: "b"}
    assert Watch(masked("GPU-b", reach=(entry,))).see(up(cards("abcd"))).who() == {}


def test_a_reach_that_names_no_card() -> None:
    """An entry that this host does not have makes the reach unknown, and the refusal names it."""
    watch = Watch(masked("0", reach=(card("a").uuid, "0000:ff:00.0", "GPU-nobody"))).see(up(cards("ab")))
    (mapping,) = watch.snapshot.mappings
    assert isinstance(mapping.outcome, Refusal)
    assert mapping.outcome.code == "reach-unknown"
    assert "0000:ff:00.0, GPU-nobody" in mapping.outcome.detail
    assert card("a").uuid not in mapping.outcome.detail


def test_a_reach_of_instances() -> None:
    """A board in the reach brings its instances; an instance brings nothing but itself."""
    devices = board("a", (1, 0), (2, 0))
    everything = Inventory(devices)
    first, second = everything.parts(card("a").key)
    fleet = masked(f"{second.uuid},{first.uuid}", reach=(card("a").uuid,))
    assert [each.device.key for each in Watch(fleet).see(up(devices)).snapshot.bindings] == [second.key, first.key]
    assert [each.device.key for each in Watch(masked(reach=(second.uuid,))).see(up(devices)).snapshot.bindings] == [
        second.key
    ]


# --- evidence


def test_a_grade_that_is_not_accepted() -> None:
    """A grade that the settings do not list is refused with the grade's name, and costs proven answers nothing."""
    fleet = Fleet(name="other", runtimes=("cuda",), env={"CUDA_VISIBLE_DEVICES": "1"})
    watch = Watch(fleet, CHAT, accept=("proven", "probed")).see(up(cards("abc")))
    assumed, proven = (mapping.outcome for mapping in watch.snapshot.mappings)
    assert isinstance(assumed, Refusal)
    assert assumed.code == "evidence-not-accepted"
    assert "assumed" in assumed.detail
    assert assumed.layers
    assert isinstance(proven, Inversion)
    assert Watch(fleet).see(up(cards("abc"))).who("other") == {0: "b"}


def test_an_answer_without_devices_needs_no_grade() -> None:
    """An empty answer rests on nothing that could be refused."""
    assert Watch(masked("")).see(up(cards("ab"))).refusal() == ""
    assert Watch(masked(""), accept=()).see(up(cards("ab"))).refusal() == ""


# --- backends that are down


def test_a_backend_down_and_back() -> None:
    """While the backend is down the fleet is refused with its reason; when it is back, the same cards are bound."""
    watch = Watch(CHAT).see(up(cards("bcd")))
    assert watch.who() == {0: "d", 1: "c"}
    watch.see(DOWN)
    (mapping,) = watch.snapshot.mappings
    assert isinstance(mapping.outcome, Refusal)
    assert mapping.outcome.code == "backend-down"
    assert "crashed" in mapping.outcome.detail
    assert (watch.snapshot.devices, watch.snapshot.bindings, watch.snapshot.readings) == ((), (), {})
    assert watch.see(up(cards("abcd"))).who() == {0: "d", 1: "c"}


def test_a_backend_that_was_never_up() -> None:
    """A fleet is bound at the first cycle that has an inventory."""
    watch = Watch(CHAT).see(DOWN).see(DOWN)
    assert watch.bound == Bound()
    assert watch.see(up(cards("abcd"))).who() == {0: "c", 1: "b"}


def test_no_answer_at_all() -> None:
    """A vendor without a sample and without a fault counts as down."""
    assert Watch(CHAT).see(VendorOutcome(vendor="nvidia", duration_seconds=0.01)).refusal() == "backend-down"


@pytest.mark.parametrize("fleet", [Fleet(name="chat", runtimes=("cuda",)), Fleet(name="chat", runtimes=("host",))])
def test_no_vendor_is_present(fleet: Fleet) -> None:
    """Where no vendor of its runtimes is present, a fleet is still listed, as refused."""
    watch = Watch(fleet).see()
    assert watch.snapshot.mappings == (
        FleetMapping(
            "chat", fleet.runtimes[0], Refusal("backend-down", "no backend for this runtime is present on this host")
        ),
    )
    assert watch.snapshot.bindings == ()


def test_another_vendor_only() -> None:
    """A CUDA fleet on a host of another vendor has no card of it."""
    device = Device(key=DeviceKey("amd", "0000:03:00.0"), physical_index=0, pci_bus_id="0000:03:00.0")
    watch = Watch(CHAT, HOST).see(up((device,), vendor="amd"))
    assert watch.refusal("chat") == "backend-down"
    assert watch.readings("host") == {0: 3}


def test_runtimes_of_absent_vendors_have_no_row() -> None:
    """Of several runtimes only those are listed whose vendor is present."""
    fleet = Fleet(name="chat", runtimes=("cuda", "host"), vendors=("amd",))
    device = Device(key=DeviceKey("amd", "0000:03:00.0"), physical_index=0, pci_bus_id="0000:03:00.0")
    watch = Watch(fleet).see(up(cards("a")), up((device,), vendor="amd"))
    assert [mapping.runtime for mapping in watch.snapshot.mappings] == ["host"]
    assert [binding.device.key for binding in watch.snapshot.bindings] == [device.key]


# --- the runtime host


def test_host_follows_the_host() -> None:
    """A fleet of runtime host has every device of each cycle under its physical index, and is never refused."""
    watch = Watch(HOST).see(up(cards("ab"), whole=False))
    assert watch.who("host") == {0: "a", 1: "b"}
    assert watch.see(up(cards("abcd"))).who("host") == {0: "a", 1: "b", 2: "c", 3: "d"}
    assert watch.see(up((card("d", physical_index=0),))).who("host") == {0: "d"}


def test_host_has_boards_and_their_instances() -> None:
    """A board in MIG mode and its instances are all bound, under the board's physical index."""
    devices = (*board("b", (1, 0), (2, 1)), card("c"))
    watch = Watch(HOST).see(up(devices))
    assert [(each.fleet_index, each.device.partition) for each in watch.snapshot.bindings] == [
        *((1, ""), (1, "1/0"), (1, "2/1"), (2, "")),
    ]


def test_host_leaves_out_what_has_no_number() -> None:
    """A card asleep since the start has no physical index yet: it is listed and not bound."""
    watch = Watch(HOST).see(up((card("a"), asleep(card("b")))))
    assert watch.who("host") == {0: "a"}
    assert len(watch.snapshot.devices) == 2


def test_host_has_every_vendor() -> None:
    """Devices of several vendors stand side by side, also when one backend is down."""
    device = Device(key=DeviceKey("amd", "0000:03:00.0"), physical_index=0, pci_bus_id="0000:03:00.0")
    amd = up((device,), vendor="amd")
    watch = Watch(HOST).see(up(cards("a")), amd)
    assert [binding.device.key.vendor for binding in watch.snapshot.bindings] == ["nvidia", "amd"]
    assert watch.see(DOWN, amd).refusal("host") == ""
    assert [binding.device.key.vendor for binding in watch.snapshot.bindings] == ["amd"]


# --- driver branches


@pytest.mark.parametrize(
    ("version", "branch"),
    [
        *(("575.57.08", 575), ("535.104.05", 535), ("390.157", 390), ("1000.1", 1000), ("570.86.15-grid", 570)),
        *(("", None), ("simulated", None), ("575", None), ("v575.1", None), ("5.1", None), (" 575.1", None)),
        *(("\u0665\u0667\u0665.1", None), ("9" * 5000 + ".1", None)),
    ],
    ids=lambda value: ascii(value)[:16],
)
def test_driver_branch(version: str, branch: int | None) -> None:
    """The branch is the number before the first dot; other texts give none."""
    assert driver_branch(version) == branch


@pytest.mark.parametrize(("driver", "visible"), [("535.104.05", 1), ("575.57.08", 2), ("unknown", 0)])
def test_the_driver_of_the_sample_decides(driver: str, visible: int) -> None:
    """How many MIG instances a fleet has follows from the driver version that the backend read."""
    devices = board("a", (1, 0), (2, 0))
    mask = ",".join(device.uuid for device in devices[1:])
    assert len(Watch(masked(mask)).see(up(devices, driver=driver)).snapshot.bindings) == visible
