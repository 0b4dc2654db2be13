"""Fleets of live processes bound: what they can open, the inventory of their start, what they use, what drivers say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.binding import Bound, Known, bind
from exporter.model import (
    EVIDENCE,
    Device,
    Does,
    Fleet,
    Inversion,
    Live,
    Opens,
    Refusal,
    State,
    User,
    VendorOutcome,
)
from exporter.probing import Answers, Question
from exporter.wire import DriverAnswer, DriverDevice
from tests.strategies import PCI_ORDER, board, card, cards
from tests.test_attribution import up

ALL = frozenset({"nvidia0", "nvidia1", "nvidia2", "nvidia3"})
WHOLE = Opens(may=ALL, here=True, filtered=False)


def filed(devices: Sequence[Device]) -> tuple[Device, ...]:
    """The cards with the device files of their indices; instances with their capability too."""
    found = []
    for device in devices:
        capability = () if device.parent is None else (f"nvidia{device.physical_index}/gi{device.gpu_instance}/ci0",)
        opened_by = (f"nvidia{device.physical_index}", *capability)
        found.append(replace(device, minor_number=device.physical_index, opened_by=opened_by))
    return tuple(found)


FOUR = filed(cards("abcd"))
MIXED = filed((card("a", name="NVIDIA A10"), *cards("bcd")))


def live(mask: str | None = None, *, order: bool = True, **changes: Any) -> Fleet:
    """A fleet of one process with that mask, which can open everything."""
    env = (PCI_ORDER if order else {}) | ({} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})
    started = changes.pop("started", 85.0)
    spans = frozenset({(started, changes.pop("seen", started))})
    seen: dict[str, Any] = {"incarnation": "7:1", "spans": spans, "pids": frozenset({7}), "opens": WHOLE}
    return Fleet(name="chat", runtimes=("cuda",), env=env, live=Live(**seen | changes))


class Binding:
    """Cycles one after the other; time goes on by ten seconds with each."""

    def __init__(self, answers: Answers | None = None) -> None:
        self.bound, self.now, self.answers = Bound(), 90.0, answers
        self.questions: frozenset[Question] = frozenset()
        self.outcome: Inversion | Refusal

    def see(self, fleet: Fleet | None, *outcomes: VendorOutcome) -> Binding:
        """A cycle with that fleet, or none."""
        known = Known(EVIDENCE, self.now, self.answers)
        mappings, self.bound, self.questions = bind([fleet] if fleet else [], outcomes, self.bound, known)
        if fleet:
            self.outcome = mappings[0].outcome
        self.now += 10.0
        return self

    @property
    def letters(self) -> str:
        """The cards by fleet index, or the code of the refusal."""
        if isinstance(self.outcome, Refusal):
            return self.outcome.code
        return "".join(device.key.identity[4] for device in self.outcome.devices)

    @property
    def evidence(self) -> set[str]:
        """The grades of the devices."""
        assert isinstance(self.outcome, Inversion)
        return {device.evidence for device in self.outcome.devices}


def bound(fleet: Fleet, devices: Sequence[Device] = FOUR) -> str:
    """What one cycle binds."""
    return Binding().see(fleet, up(devices)).letters


# --- reach


@pytest.mark.parametrize(
    ("opens", "mask", "expected"),
    [
        (WHOLE, "1", "b"),
        (Opens(may=frozenset({"nvidia1", "nvidia3"}), filtered=False), "1", "d"),
        (Opens(may=frozenset({"nvidia1", "nvidia3"}), filtered=False), None, "bd"),
        (Opens(may=frozenset(), filtered=False), None, ""),
        (Opens(may=ALL, here=True, filtered=None), "1", "reach-unknown"),
        (Opens(may=ALL, here=True, filtered=True), None, "reach-unknown"),
        (Opens(may=ALL, here=True, filtered=True, held=ALL), "1", "b"),
        (Opens(may=ALL - {"nvidia0"}, unsure=frozenset({"nvidia0"}), filtered=False), "1", "reach-unknown"),
        (Opens(may=ALL - {"nvidia0"}, unsure=frozenset({"nvidia0"}), held=ALL, filtered=False), "1", "b"),
        (Opens(may=None), "0", "reach-unknown"),
        (None, "0", "reach-unknown"),
        (Opens(may=None), FOUR[2].uuid, "c"),
        (Opens(may=None), "", ""),
    ],
)
def test_what_a_process_can_open(opens: Opens | None, mask: str | None, expected: str) -> None:
    """Numbers count the cards whose files it can open; where that is not known, only identities are answered."""
    assert bound(live(mask, opens=opens)) == expected


def test_a_reach_of_the_settings_stands_above_what_was_seen() -> None:
    """It is stated by who knows."""
    fleet = replace(live("1", opens=Opens(may=None)), reach=(FOUR[0].uuid, FOUR[3].uuid))
    assert bound(fleet) == "d"


@pytest.mark.parametrize("here", [True, False])
def test_cards_without_files(here: bool) -> None:
    """Where no file stands for a card, as in WSL, it is open to whoever sees the exporter's own files."""
    opens = Opens(may=frozenset(), here=here, filtered=False)
    assert bound(live("1", opens=opens), cards("abcd")) == ("b" if here else "reach-unknown")


def test_an_instance_needs_its_capability() -> None:
    """A container with a card's file and one instance's capability has that instance, and not the card."""
    devices = filed(board("a", (1, 0), (2, 0)))
    for capabilities, expected in [({"nvidia0/gi2/ci0"}, [devices[2]]), ({"nvidia0/gi1/ci0"}, [devices[1]])]:
        opens = Opens(may=frozenset({"nvidia0", *capabilities}), filtered=False)
        outcome = Binding().see(live(None, opens=opens), up(devices)).outcome
        assert isinstance(outcome, Inversion)
        assert [device.key for device in outcome.devices] == [device.key for device in expected]


@pytest.mark.parametrize(
    ("slurm", "mask", "filtered", "expected"),
    [
        ("2,3", "0,1", True, "cd"),  # Slurm numbers a constrained job's cards from 0
        ("2,3", "0,1", None, "reach-unknown"),  # or the job chose these from all
        ("2,3", "2,3", None, "reach-unknown"),
        ("0,1", "0,1", None, "ab"),  # which are the same here, whichever it is
        ("0,1", "1,0", None, "ba"),
        ("2,3", "1", None, "reach-unknown"),  # the job changed its mask: card 3 if constrained, else card 1
        ("2,3", "1", True, "d"),
        ("2,3", "0,1", False, "ab"),
        ("130,131", "0,1", True, "cd"),  # some distributions number render nodes
        ("2,9", "0,1", None, "reach-unknown"),
        ("2-3", "0,1", None, "reach-unknown"),
        (None, "0,1", None, "reach-unknown"),
    ],
)
def test_slurms_jobs(slurm: str | None, mask: str, filtered: bool | None, expected: str) -> None:
    """What Slurm gave counts where a device filter cannot be read; an answer is one where all that may be agree."""
    opens = Opens(may=ALL, here=True, filtered=filtered)
    assert bound(live(mask, opens=opens, slurm=slurm)) == expected


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        (("0,1", "0,1", "0,1"), "cd"),  # numbered from 0: the job is constrained
        (("2,3", "2,3", "2,3"), "cd"),  # the host's numbers: it is not
        (("0,1", "2,3", "2,3"), "reach-unknown"),  # the job changed its own mask
        (("1", "0,1", "0,1"), "reach-unknown"),
    ],
)
def test_slurm_writes_one_list_into_all_masks(lists: Sequence[str], expected: str) -> None:
    """Where all of them agree nobody has changed one, and they tell whether the job is held to its cards."""
    fleet = live(opens=Opens(may=ALL, here=True, filtered=None), slurm="2,3")
    names = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
    assert bound(replace(fleet, env=PCI_ORDER | dict(zip(names, lists, strict=True)))) == expected


def test_slurms_numbers_where_index_and_file_differ() -> None:
    """Sites number by either, so nothing is known."""
    crossed = tuple(
        replace(device, minor_number=3 - (device.physical_index or 0), opened_by=(f"nvidia{3 - index}",))
        for index, device in enumerate(FOUR)
    )
    opens = Opens(may=ALL, here=True, filtered=True)
    assert bound(live("0,1", opens=opens, slurm="2,3"), crossed) == "reach-unknown"


# --- the inventory of the start


def test_a_process_keeps_the_cards_of_its_start() -> None:
    """A card that comes later moves nothing for it, and is there for a process that is started after it came."""
    binding = Binding().see(live(), up(FOUR[1:]))
    assert binding.letters == "bcd"
    assert binding.see(live(), up(FOUR)).letters == "bcd"
    assert binding.see(live(started=105.0, incarnation="8:2"), up(FOUR)).letters == "abcd"


def test_a_process_that_is_seen_late_has_the_cards_of_its_start() -> None:
    """It was started while there were three, and is seen first when there are four."""
    binding = Binding().see(None, up(FOUR[1:])).see(None, up(FOUR[1:])).see(None, up(FOUR))
    assert binding.see(live(started=95.0), up(FOUR)).letters == "bcd"
    assert binding.see(live(started=111.0, incarnation="8:2"), up(FOUR)).letters == "abcd"


def test_nobody_looked_when_it_was_started() -> None:
    """Between two looks that differ the inventory is not known to be whole: identities alone are answered."""
    binding = Binding().see(None, up(FOUR[1:])).see(None, up(FOUR))
    assert binding.see(live(started=95.0), up(FOUR)).letters == "inventory-incomplete"
    assert binding.see(live(FOUR[0].uuid, started=95.0, incarnation="8:2"), up(FOUR)).letters == "a"


def test_a_program_that_was_started_while_cards_came() -> None:
    """When exactly a process came to run it is not known: numbers are refused, identities are not."""
    for mask, expected in [(None, "inventory-incomplete"), (FOUR[0].uuid, "a")]:
        fleet = live(mask, seen=125.0)
        binding = Binding().see(None, up(FOUR[1:])).see(None, up(FOUR)).see(None, up(FOUR))
        assert binding.see(fleet, up(FOUR)).letters == expected


def test_a_program_that_joins_after_a_card_came() -> None:
    """Its numbers are others than those of the programs with the same masks before it."""
    binding = Binding().see(live(), up(FOUR[1:]))
    assert binding.letters == "bcd"
    binding.see(live(), up(FOUR))
    both = live(spans=frozenset({(85.0, 85.0), (105.0, 110.0)}))
    assert binding.see(both, up(FOUR)).letters == "inventory-incomplete"
    assert binding.see(live(started=105.0, seen=115.0, incarnation="8:1"), up(FOUR)).letters == "abcd"


def test_cards_that_left_and_came_back_between_two_starts() -> None:
    """Both programs number the same devices, whatever there was in between."""
    binding = Binding().see(live(), up(FOUR)).see(live(), up(FOUR[1:])).see(live(), up(FOUR))
    both = live(spans=frozenset({(85.0, 85.0), (112.0, 115.0)}))
    assert binding.see(both, up(FOUR)).letters == "abcd"
    across = live(spans=frozenset({(85.0, 85.0), (95.0, 115.0)}), incarnation="9:1")
    assert binding.see(across, up(FOUR)).letters == "inventory-incomplete"


def test_very_many_changes() -> None:
    """What was long ago is forgotten, and then not known to be whole; what is now is."""
    binding = Binding()
    for _ in range(80):
        binding.see(None, up(FOUR[1:])).see(None, up(FOUR))
    now = binding.now - 10.0
    assert binding.see(live(started=now), up(FOUR)).letters == "abcd"
    assert binding.see(live(incarnation="8:1"), up(FOUR)).letters == "inventory-incomplete"


def test_a_process_older_than_the_exporter() -> None:
    """What was there before the first look is taken for what that saw."""
    assert Binding().see(live(started=1.0), up(FOUR)).see(live(started=1.0), up(FOUR)).letters == "abcd"


def test_another_incarnation_is_bound_anew() -> None:
    """A restart with another mask, and a process number that came back, have nothing of what was bound before."""
    binding = Binding().see(live("0"), up(FOUR)).see(live("3", incarnation="7:2", started=105.0), up(FOUR))
    assert binding.letters == "d"
    assert len(binding.bound.kept) == 1


@pytest.mark.parametrize("code", ["no-permission", "process-gone", "environment-overwritten"])
def test_masks_that_cannot_be_told(code: str) -> None:
    """Whatever else is known, the fleet is refused with the reason, also while its backend is down."""
    fleet = live("0", refusal=Refusal(code, "x"))
    assert bound(fleet) == code


# --- what it uses


def using(devices: Sequence[Device], *letters: str, pid: int = 7) -> VendorOutcome:
    """A cycle in which the process computes on these cards."""
    outcome = up(devices)
    assert outcome.sample is not None
    users = tuple(User(card(letter).key, pid) for letter in letters)
    return replace(outcome, sample=replace(outcome.sample, users=users))


def test_a_card_in_use_that_the_masks_hide() -> None:
    """The mask is not what counts any more: refused, also when the card is no longer in use."""
    binding = Binding().see(live("1"), using(FOUR, "b"))
    assert binding.letters == "b"
    assert binding.see(live("1"), using(FOUR, "b", "c")).letters == "contradicted"
    assert binding.see(live("1"), up(FOUR)).letters == "contradicted"
    assert binding.see(live("1", incarnation="9:1"), up(FOUR)).letters == "b"


def test_another_processs_cards_mean_nothing() -> None:
    """Nor do those of a fleet that is no process's."""
    assert Binding().see(live("1"), using(FOUR, "c", pid=8)).letters == "b"
    assert Binding().see(replace(live("1"), live=None), using(FOUR, "c")).letters == "b"


def test_use_proves_the_only_card_alone() -> None:
    """Where only the order is unknown and the mask leaves one card, it is the one in use; never with two."""
    one = Binding().see(live("2", order=False), using(MIXED, "b"))
    assert (one.letters, one.evidence) == ("b", {"proven"})
    assert one.see(live("2", order=False), up(MIXED)).letters == "b"
    assert Binding().see(live("2,1", order=False), using(MIXED, "b")).letters == "order-unknown"
    assert Binding().see(live("2", order=False), using(MIXED, "b", "c")).letters == "order-unknown"


@pytest.mark.parametrize("does", ["draws", "nothing", None])
def test_a_card_on_which_it_does_not_compute_is_no_evidence(does: Does | None) -> None:
    """Masks of compute runtimes do not keep a program from drawing, and who opens all cards has something on each."""
    outcome = up(MIXED)
    assert outcome.sample is not None
    seen = replace(outcome, sample=replace(outcome.sample, users=(User(card("c").key, 7, 1000, None, does),)))
    assert Binding().see(live("1"), seen).letters == "b"
    assert Binding().see(live("2", order=False), seen).letters == "order-unknown"


def test_parts_and_wholes_do_not_contradict() -> None:
    """A process on an instance uses its card, and the other way round."""
    devices = filed(board("a", (1, 0), (2, 0)))
    outcome = up(devices)
    assert outcome.sample is not None
    fleet = live(devices[1].uuid, opens=Opens(may=frozenset({"nvidia0", "nvidia0/gi1/ci0", "nvidia0/gi2/ci0"})))
    for used, expected in [(0, ""), (1, ""), (2, "contradicted")]:
        users = (User(devices[used].key, 7),)
        seen = Binding().see(fleet, replace(outcome, sample=replace(outcome.sample, users=users))).outcome
        assert (seen.code if isinstance(seen, Refusal) else "") == expected


# --- what the driver says


def answers_for(
    questions: frozenset[Question], orders: Mapping[bool, str], fault: str = ""
) -> dict[Question, DriverAnswer]:
    """The cards' letters by whether the question has a mask."""
    return {
        question: DriverAnswer(
            file="libcuda.so.1",
            version="12080",
            devices=tuple(
                DriverDevice(pci_bus_id=card(letter).pci_bus_id, uuid=card(letter).uuid)
                for letter in orders["CUDA_VISIBLE_DEVICES" in dict(question.env)]
            ),
            fault=fault,
        )
        for question in questions
    }


def asked(fleet: Fleet, devices: Sequence[Device] = MIXED) -> Binding:
    """A cycle after which the questions are known."""
    return Binding({}).see(fleet, up(devices))


def test_a_driver_is_asked_where_masks_do_not_prove() -> None:
    """Under the masks and under none; its answer is in its own order, and stays when nobody gives it any more."""
    fleet = live("0,2", order=False)
    binding = asked(fleet)
    assert binding.letters == "order-unknown"
    assert {question.env for question in binding.questions} == {(("CUDA_VISIBLE_DEVICES", "0,2"),), ()}
    binding.answers = answers_for(binding.questions, {True: "da", False: "dabc"})
    binding.see(fleet, up(MIXED))
    assert (binding.letters, binding.evidence, binding.questions) == ("da", {"probed"}, frozenset())
    binding.answers = {}
    assert binding.see(fleet, up(MIXED)).letters == "da"


SERVER = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_MPS_PIPE_DIRECTORY": "/x"}


@pytest.mark.parametrize(
    ("fleet", "states"),
    [
        (live("0,2"), {}),
        (live(MIXED[0].uuid, order=False), {}),
        (live("0", order=False, opens=Opens(may=frozenset({"nvidia1", "nvidia2"}), filtered=False)), {}),
        (live("0", order=False, opens=Opens(may=None)), {}),
        (live("0", order=False, opens=Opens(may=ALL, filtered=False)), {}),
        (replace(live("0", order=False), env=SERVER), {}),
        (live("0", order=False), {"d": "asleep"}),
    ],
    ids=["proven", "identity", "restricted", "unknown reach", "container", "a server's", "asleep"],
)
def test_where_a_driver_is_not_asked(fleet: Fleet, states: Mapping[str, State]) -> None:
    """Where the masks prove the answer, the workload sees other cards, it has a server, or asking would wake a card."""
    assert Binding({}).see(fleet, up(MIXED, states=states)).questions == frozenset()


@pytest.mark.parametrize(
    "orders", [{True: "da", False: "dab"}, {True: "dz", False: "dabc"}], ids=["not all", "an unknown card"]
)
def test_an_answer_that_is_not_the_workloads(orders: Mapping[bool, str]) -> None:
    """The driver must show every card where no mask is set, and none that the inventory has not."""
    fleet = live("0,2", order=False)
    binding = asked(fleet)
    binding.answers = answers_for(binding.questions, orders)
    assert binding.see(fleet, up(MIXED)).letters == "order-unknown"


def test_a_fault_is_no_answer() -> None:
    """The refusal that stood stands."""
    fleet = live("0,2", order=False)
    binding = asked(fleet)
    binding.answers = answers_for(binding.questions, {True: "", False: ""}, fault="cuInit answers 999")
    assert binding.see(fleet, up(MIXED)).letters == "order-unknown"


def test_the_driver_decides_what_is_only_assumed() -> None:
    """Equal cards without an order are assumed to be in the bus's; the driver says whether they are."""
    fleet = live("0,1", order=False)
    for order, expected in [("ab", "ab"), ("ba", "ba")]:
        binding = asked(fleet, FOUR)
        assert (binding.letters, binding.evidence) == ("ab", {"assumed"})
        binding.answers = answers_for(binding.questions, {True: order, False: "abcd"})
        binding.see(fleet, up(FOUR))
        assert (binding.letters, binding.evidence) == (expected, {"probed"})


def test_a_driver_that_contradicts_what_is_proven() -> None:
    """Neither is shown, and it stays so; one that agrees changes nothing."""
    fleet = live("0,1")
    env = tuple(sorted(fleet.env.items()))
    devices = frozenset((device.key, device.uuid) for device in FOUR)
    order = (("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),)
    questions = frozenset(Question("cuda", each, devices, ("nvidia 575.57.08",)) for each in (env, order))
    for told, expected in [("ab", "ab"), ("ba", "contradicted")]:
        binding = Binding({}).see(fleet, up(FOUR))
        assert (binding.letters, binding.questions) == ("ab", frozenset())
        binding.answers = answers_for(questions, {True: told, False: "abcd"})
        assert binding.see(fleet, up(FOUR)).letters == expected
        binding.answers = {}
        assert binding.see(fleet, up(FOUR)).letters == expected


def test_an_answer_of_no_use_is_asked_for_again() -> None:
    """A driver that only starts shows fewer cards: both questions are wanted again, and one that is missing alone."""
    fleet = live("0,2", order=False)
    binding = asked(fleet)
    questions = binding.questions
    binding.answers = answers_for(questions, {True: "da", False: "dab"})
    assert binding.see(fleet, up(MIXED)).questions == questions
    (masked,) = (question for question in questions if dict(question.env))
    binding.answers = answers_for(frozenset({masked}), {True: "da", False: ""})
    assert binding.see(fleet, up(MIXED)).questions == questions - {masked}


def test_another_version_of_the_driver_is_another_question() -> None:
    """What it answers may be in another order."""
    fleet = live("0,2", order=False)
    other = Binding({}).see(fleet, up(MIXED, driver="580.1"))
    assert not other.questions & asked(fleet).questions


def test_no_driver_is_asked_where_it_may_not() -> None:
    """Without answers to look into, nothing is asked."""
    assert Binding(None).see(live("0,2", order=False), up(MIXED)).questions == frozenset()
