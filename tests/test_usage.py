"""What fleets' own processes hold and do on each device: from the users of a cycle to the series, and what has none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.attribution import attribute
from exporter.binding import Bound, Known, bind
from exporter.collectors import ReloadStatus, registry_of
from exporter.inventory import narrowed
from exporter.model import (
    EVIDENCE,
    STATES,
    Binding,
    Device,
    DeviceKey,
    Fleet,
    Live,
    Opens,
    Snapshot,
    State,
    User,
    VendorOutcome,
)
from exporter.usage import usage_of
from exporter.web.report import as_json, report
from tests.strategies import PCI_ORDER, board, card
from tests.test_attribution import up
from tests.test_live_binding import FOUR, WHOLE, filed

GIB = 2**30
LOADED = ReloadStatus(True, 1.0)


def fleet(name: str, mask: str, *own: int, unclear: Sequence[int] = (), **changes: Any) -> Fleet:
    """One of processes with that mask, of which these use devices."""
    seen: dict[str, Any] = {"incarnation": f"{name}:1", "spans": frozenset(), "opens": WHOLE, "pids": frozenset(own)}
    live = Live(**seen | {"own": frozenset(own), "unclear": frozenset(unclear)} | changes)
    return Fleet(name=name, runtimes=("cuda",), env=PCI_ORDER | {"CUDA_VISIBLE_DEVICES": mask}, live=live)


def used(outcome: VendorOutcome, users: Sequence[User], *told: DeviceKey) -> VendorOutcome:
    """The cycle with these users, and with all users of these devices told; of all without any."""
    assert outcome.sample is not None
    users_of = told or tuple(device.key for device in outcome.sample.devices)
    return replace(outcome, sample=replace(outcome.sample, users=tuple(users), users_of=users_of))


def snapshot(outcome: VendorOutcome, *fleets: Fleet) -> Snapshot:
    """One cycle."""
    assert outcome.sample is not None
    mappings, _, _ = bind(fleets, [outcome], Bound(), Known(EVIDENCE))
    found = attribute([outcome], mappings, ())
    return replace(found, usage=usage_of(found, [outcome.sample], fleets))


def usage(outcome: VendorOutcome, *fleets: Fleet) -> dict[str, Mapping[str, float]]:
    """What there is by fleet and index."""
    found = snapshot(outcome, *fleets)
    values = ((each, found.usage.get((each.fleet, each.runtime, each.device.key))) for each in found.bindings)
    return {f"{each.fleet} {each.fleet_index}": dict(given) for each, given in values if given}


def on(letter: str, pid: int, memory: int | None = None, share: float | None = None, **changes: Any) -> User:
    """A process on a card."""
    return User(card(letter).key, pid, memory, share, **changes)


def series(found: Snapshot) -> list[tuple[str, dict[str, str], float]]:
    """The rows of the three families, and with them the whole page as the client library has it."""
    families = list(registry_of(found, LOADED, process=False).collect())
    own = ("gpu_fleet_memory_used_bytes", "gpu_fleet_utilization_ratio", "gpu_fleet_processes")
    rows = [(each.name, dict(each.labels), each.value) for family in families for each in family.samples]
    assert all(family.samples for family in families if family.name in own)
    return [row for row in rows if row[0] in own]


def test_two_fleets_on_one_card_are_told_apart() -> None:
    """Each has what its own processes hold, under its own number; the stranger's is nobody's."""
    users = [
        *(on("b", 7, 10 * GIB, 0.25), on("b", 8, GIB, 0.125), on("b", 9, 3 * GIB, 0.5), on("b", 99, GIB, 0.125)),
        on("c", 7, 2 * GIB, 0.0),
    ]
    found = snapshot(used(up(FOUR), users), fleet("chat", "2,1", 7, 8), fleet("rank", "1", 9))
    rows = {(name, labels["fleet"], labels["fleet_index"]): value for name, labels, value in series(found)}
    assert rows == {
        ("gpu_fleet_memory_used_bytes", "chat", "0"): 2 * GIB,
        ("gpu_fleet_memory_used_bytes", "chat", "1"): 11 * GIB,
        ("gpu_fleet_memory_used_bytes", "rank", "0"): 3 * GIB,
        ("gpu_fleet_utilization_ratio", "chat", "0"): 0.0,
        ("gpu_fleet_utilization_ratio", "chat", "1"): 0.375,
        ("gpu_fleet_utilization_ratio", "rank", "0"): 0.5,
        ("gpu_fleet_processes", "chat", "0"): 1,
        ("gpu_fleet_processes", "chat", "1"): 2,
        ("gpu_fleet_processes", "rank", "0"): 1,
    }
    (row,) = [labels for name, labels, _ in series(found) if (name, labels["fleet"]) == ("gpu_fleet_processes", "rank")]
    assert row == {
        "fleet": "rank",
        "fleet_index": "0",
        "physical_index": "1",
        "vendor": "nvidia",
        "pci_bus_id": FOUR[1].pci_bus_id,
        "uuid": FOUR[1].uuid,
    }


def test_the_answer_has_what_the_metrics_have() -> None:
    """For each card of a fleet, and no field where there is nothing."""
    found = snapshot(used(up(FOUR), [on("b", 7, GIB)]), fleet("chat", "1", 7), replace(fleet("set", "1"), live=None))
    facts = report(found, LOADED)
    live, stated = (each.runtimes[0].devices[0] for each in facts.fleets)
    assert live.usage == {"gpu_fleet_memory_used_bytes": GIB, "gpu_fleet_processes": 1}
    assert stated.usage == {}
    assert as_json(facts).count(b'"usage"') == 1


def test_what_the_settings_leave_out_is_left_out() -> None:
    """The other values are as they were."""
    outcome, chat = used(up(FOUR), [on("b", 7, GIB, 0.5)]), fleet("chat", "1", 7)
    found = snapshot(outcome, chat)
    assert outcome.sample is not None
    for wanted, expected in [(["memory"], [{"memory": GIB}]), ([], [])]:
        assert list(usage_of(found, [outcome.sample], [chat], wanted).values()) == expected


def test_a_process_of_two_fleets_is_in_both() -> None:
    """Each says what its own processes hold."""
    found = usage(used(up(FOUR), [on("b", 7, GIB)]), fleet("chat", "1", 7), fleet("rank", "1", 7))
    assert found == {key: {"memory": GIB, "processes": 1} for key in ("chat 0", "rank 0")}


def test_a_card_that_no_process_of_the_fleet_uses() -> None:
    """It holds nothing there, which is a fact once all users of the card were told; its share is nothing where others'
    are told, and unknown where nobody's is.
    """
    outcome = used(up(FOUR), [on("b", 99, GIB, 0.5), on("c", 98, GIB)])
    assert usage(outcome, fleet("chat", "1,2")) == {
        "chat 0": {"memory": 0, "processes": 0, "utilization": 0},
        "chat 1": {"memory": 0, "processes": 0},
    }


@pytest.mark.parametrize("users", [[], [on("b", 7, GIB, 0.5)]])
def test_users_that_were_not_all_told_are_no_use(users: list[User]) -> None:
    """Nobody asked, the call is not supported, or this user may not make it: that is not 0."""
    other = FOUR[2].key
    assert usage(used(up(FOUR), users, other), fleet("chat", "1", 7)) == {}
    assert usage(used(up(FOUR), users, other), fleet("chat", "1,2", 7)).keys() == {"chat 1"}


@pytest.mark.parametrize("state", [state for state in STATES if state != "ok"])
def test_a_card_that_is_not_ok_has_no_use(state: State) -> None:
    """What was told of it before it was lost is not of this cycle."""
    assert usage(used(up(FOUR, states={"b": state}), [on("b", 7, GIB)]), fleet("chat", "1", 7)) == {}


def test_one_process_that_does_not_tell_leaves_no_sum() -> None:
    """Of the others' memory or share; which processes there are is known all the same."""
    chat = fleet("chat", "1", 7, 8)
    assert usage(used(up(FOUR), [on("b", 7, GIB, 0.5), on("b", 8, None, 0.25)]), chat) == {
        "chat 0": {"utilization": 0.75, "processes": 2}
    }
    assert usage(used(up(FOUR), [on("b", 7, GIB, 0.5), on("b", 8, GIB, None)]), chat) == {
        "chat 0": {"memory": 2 * GIB, "processes": 2}
    }
    assert usage(used(up(FOUR), [on("b", 7, GIB, 0.5), on("b", 8, does=None)]), chat) == {}


def test_who_may_be_the_fleets_leaves_nothing_where_it_is() -> None:
    """A stranger that does not tell, or a process that is nobody's, costs nothing."""
    users = [on("b", 7, GIB), on("c", 7, GIB), on("c", 9, GIB), on("b", 99, does=None)]
    assert usage(used(up(FOUR), users), fleet("chat", "1,2", 7, unclear=[9])) == {
        "chat 0": {"memory": GIB, "processes": 1}
    }


def test_what_draws_counts_and_what_only_has_the_card_open_does_not() -> None:
    """What either holds is in the sum."""
    users = [on("b", 7, GIB, does="draws"), on("b", 8, 1000, does="nothing")]
    assert usage(used(up(FOUR), users), fleet("chat", "1", 7, 8)) == {"chat 0": {"memory": GIB + 1000, "processes": 1}}


@pytest.mark.parametrize(("shares", "expected"), [((0.5, 0.5), 1.0), ((0.9, 0.15), 1.0), ((1.0, 1.0), None)])
def test_shares_that_are_more_than_the_whole(shares: Sequence[float], expected: float | None) -> None:
    """A little is rounding; much is no sum of parts of one time."""
    users = [on("b", 7 + place, GIB, share) for place, share in enumerate(shares)]
    assert usage(used(up(FOUR), users), fleet("chat", "1", 7, 8))["chat 0"].get("utilization") == expected


def test_fleets_that_are_no_processes_have_no_use() -> None:
    """Nor does one whose processes have other numbers than the driver tells, nor the host as it is."""
    outcome = used(up(FOUR), [on("b", 7, GIB)])
    assert usage(outcome, replace(fleet("chat", "1", 7), live=None)) == {}
    assert usage(outcome, fleet("chat", "1", 7, own=None)) == {}
    assert usage(outcome, replace(fleet("chat", "1", 7), runtimes=("host",))) == {}


def test_parts_have_their_own_users_alone() -> None:
    """A MIG device has those of itself; the board's, if they were told, are not its."""
    devices = filed(board("a", (1, 0), (2, 0)))
    opens = Opens(may=frozenset({"nvidia0", "nvidia0/gi1/ci0", "nvidia0/gi2/ci0"}))
    users = [User(devices[0].key, 7, 5 * GIB), User(devices[1].key, 7, GIB), User(devices[2].key, 8, GIB)]
    chat = fleet("chat", devices[1].uuid, 7, opens=opens)
    assert usage(used(up(devices), users), chat) == {"chat 0": {"memory": GIB, "processes": 1}}
    assert usage(used(up(devices), users, devices[0].key), chat) == {}


INTEL = Device(key=DeviceKey("intel", "0000:3a:00.0"), physical_index=0, pci_bus_id="0000:3a:00.0", tiles=2, hpc=True)
TILES = tuple(narrowed(INTEL, [tile]) for tile in range(2))


@pytest.mark.parametrize(
    ("mask", "told", "expected"),
    [
        ("0.0,0.1", INTEL, {"chat 0": {"memory": GIB, "processes": 1}}),
        ("0", INTEL, {"chat 0": {"memory": GIB, "processes": 1}}),
        ("0.1", INTEL, {}),
        ("0.1", TILES[1], {"chat 0": {"memory": GIB, "processes": 1}}),
        ("0.0,0.1", TILES[1], {}),
    ],
)
def test_tiles_have_the_cards_users_where_they_are_all(
    mask: str, told: Device, expected: Mapping[str, Mapping[str, float]]
) -> None:
    """What a process holds on a card is on which of its tiles nobody says."""
    env = {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE", "ZE_AFFINITY_MASK": mask}
    reach = (INTEL.pci_bus_id,)
    chat = replace(fleet("chat", "", 7), runtimes=("level_zero",), env=env, reach=reach)
    outcome = used(up((INTEL, *TILES), vendor="intel"), [User(told.key, 7, GIB)], told.key)
    assert usage(outcome, chat) == expected


def test_the_kfd_knows_nothing_of_vulkan() -> None:
    """A Vulkan program on AMD's cards is in no list of the KFD's, and the list is complete without it."""
    amd = Device(key=DeviceKey("amd", "0000:03:00.0"), physical_index=0, pci_bus_id="0000:03:00.0")
    outcome = used(up((amd,), vendor="amd"), [User(amd.key, 7, GIB)])
    found = snapshot(outcome)
    assert outcome.sample is not None
    for runtime, expected in (("rocm", True), ("vulkan", False)):
        shown = replace(found, bindings=(Binding("chat", runtime, 0, "proven", amd),))
        assert bool(usage_of(shown, [outcome.sample], [fleet("chat", "", 7)])) == expected


def test_f15_a_process_is_on_the_card_that_nvml_names() -> None:
    """NVML lists processes by card in bus order, and CUDA numbers the faster card first: the process that computes on
    the second card is on that one, whatever its index, and not on the first (field case F15).
    """
    cases = filed((card("a", name="GTX 745", memory_total_bytes=4 * GIB), card("b", name="GTX 1080 Ti")))
    opens = Opens(may=frozenset({"nvidia0", "nvidia1"}), here=True, filtered=False)
    fast = replace(fleet("fast", "0", 100, opens=opens), env={"CUDA_VISIBLE_DEVICES": "0"})
    both = replace(fleet("both", "0,1", 100, opens=opens), env=PCI_ORDER)
    found = snapshot(used(up(cases), [on("b", 100, 437 << 20)]), fast, both)
    memory = [(labels, value) for name, labels, value in series(found) if name == "gpu_fleet_memory_used_bytes"]
    rows = [(labels["fleet"], labels["fleet_index"], labels["uuid"], value) for labels, value in memory]
    assert rows == [
        ("fast", "0", cases[1].uuid, 437 << 20),
        ("both", "0", cases[0].uuid, 0),
        ("both", "1", cases[1].uuid, 437 << 20),
    ]
