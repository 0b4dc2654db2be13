"""What a driver's answer does to masks that are undone: fills in what is not known, agrees, or contradicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from exporter.binding import Bound, Known, bind
from exporter.inventory import Inventory
from exporter.model import EVIDENCE, Device, DeviceState, Fleet, Inversion, Refusal, VendorOutcome, VendorSample
from exporter.probing import Answers, Question, questions
from exporter.wire import DriverAnswer, DriverDevice
from tests.strategies import PCI_ORDER, card, cards

EQUAL = cards("abcd")
MIXED = (*cards("abc"), card("d", name="NVIDIA A2"))
LETTERS = {device.key.identity: letter for letter, device in zip("abcd", EQUAL, strict=True)}


def up(devices: Sequence[Device]) -> VendorOutcome:
    """A cycle that found these, all well."""
    sample = VendorSample(
        vendor="nvidia",
        driver_version="575.57.08",
        whole=True,
        devices=tuple(devices),
        states=tuple(DeviceState(device.key, "ok") for device in devices),
        readings=(),
    )
    return VendorOutcome(vendor="nvidia", sample=sample, duration_seconds=0.01)


def shows(letters: str) -> DriverAnswer:
    """A driver that has these cards, in this order."""
    found = (DriverDevice(pci_bus_id=card(letter).pci_bus_id, uuid=card(letter).uuid) for letter in letters)
    return DriverAnswer(file="libcuda.so.1", version="12.8", devices=tuple(found))


def fleet(mask: str | None, *, ordered: bool = False) -> Fleet:
    env = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    return Fleet(name="chat", runtimes=("cuda",), env=env | (PCI_ORDER if ordered else {}))


def asked(workload: Fleet, devices: Sequence[Device]) -> tuple[Question, ...]:
    """What a driver is to be asked of the workload: under its masks, and under none."""
    reach = frozenset(device.key for device in devices)
    return questions("cuda", workload.env, Inventory(tuple(devices)), reach, ("nvidia 575.57.08",))


class Cycles:
    """Cycles over the same devices, whose bindings go from one to the next."""

    def __init__(self, workload: Fleet, devices: Sequence[Device]) -> None:
        self._workload, self._devices, self._bound = workload, devices, Bound()
        self.questions: frozenset[Question] = frozenset()

    def see(self, answers: Answers | None, accept: Sequence[str] = EVIDENCE) -> Inversion | Refusal:
        """The fleet's outcome in one more cycle, with these answers (None: nobody may be asked)."""
        known = Known([grade for grade in EVIDENCE if grade in accept], 0.0, answers)
        made = bind([self._workload], [up(self._devices)], self._bound, known)
        self._bound, self.questions = made.bound, made.questions
        (mapping,) = made.mappings
        return mapping.outcome

    def answered(self, masked: str, free: str) -> Mapping[Question, DriverAnswer]:
        """The driver's answers under the masks and under none."""
        return dict(zip(asked(self._workload, self._devices), (shows(masked), shows(free)), strict=True))


def words(outcome: Inversion | Refusal) -> str:
    """The cards' letters and their evidence, or the refusal's code."""
    if isinstance(outcome, Refusal):
        return outcome.code
    letters = "".join(LETTERS[device.key.identity] for device in outcome.devices)
    return f"{letters} {'/'.join(sorted({device.evidence for device in outcome.devices}))}"


def test_an_order_that_is_not_known_is_asked_for_and_then_probed() -> None:
    """Both questions are asked until they are answered, one answer alone is none, and what was answered stays."""
    cycles = Cycles(fleet("0,3"), MIXED)
    assert words(cycles.see({})) == "order-unknown"
    assert cycles.questions == frozenset(asked(fleet("0,3"), MIXED))
    answers = cycles.answered("db", "dabc")
    for question in answers:
        assert words(cycles.see({question: answers[question]})) == "order-unknown"
    assert words(cycles.see(answers)) == "db probed"
    assert cycles.questions == frozenset()
    assert words(cycles.see({})) == "db probed"


def test_what_is_assumed_of_equal_cards_gives_way_to_the_driver() -> None:
    """Equal cards may be in another order than that of their addresses; the driver says so."""
    cycles = Cycles(fleet("0"), EQUAL)
    assert words(cycles.see({})) == "a assumed"
    assert words(cycles.see(cycles.answered("c", "cabd"))) == "c probed"


def test_a_proven_answer_that_the_driver_has_too_stays_proven() -> None:
    """What follows from the masks is worth more than what was asked; it is said that it was."""
    cycles = Cycles(fleet("1", ordered=True), EQUAL)
    assert words(cycles.see({})) == "b proven"
    assert cycles.questions == frozenset()
    outcome = cycles.see(cycles.answered("b", "abcd"))
    assert words(outcome) == "b proven"
    assert isinstance(outcome, Inversion)
    assert outcome.told == (
        "asked libcuda.so.1 12.8 under CUDA_DEVICE_ORDER='PCI_BUS_ID', CUDA_VISIBLE_DEVICES='1': it shows 1 devices",
    )


@pytest.mark.parametrize("early", [True, False])
def test_a_driver_that_has_other_cards_than_a_proven_answer_refuses_both(early: bool) -> None:
    """Whether the driver had been asked before the masks were first undone or after: neither answer is shown, for good,
    and the refusal has both.
    """
    cycles = Cycles(fleet("1", ordered=True), EQUAL)
    if not early:
        assert words(cycles.see({})) == "b proven"
    outcome = cycles.see(cycles.answered("c", "abcd"))
    assert words(outcome) == "contradicted"
    assert isinstance(outcome, Refusal)
    assert outcome.detail == f"the masks say {card('b').uuid}; the driver says {card('c').uuid}"
    for answers in ({}, None, cycles.answered("b", "abcd")):
        assert words(cycles.see(answers)) == "contradicted"


def test_a_driver_that_hides_what_the_masks_leave_contradicts_them() -> None:
    """No device is an answer, and not that of the masks."""
    cycles = Cycles(fleet("0,1", ordered=True), EQUAL)
    outcome = cycles.see(cycles.answered("", "abcd"))
    assert isinstance(outcome, Refusal)
    assert outcome.detail.endswith("the driver says no device")


@pytest.mark.parametrize("free", ["", "abc", "aabc"])
def test_a_driver_that_lacks_a_card_without_a_mask_is_not_believed(free: str) -> None:
    """It does not see what the workload sees: it neither fills in nor contradicts."""
    unknown, proven = Cycles(fleet("0"), MIXED), Cycles(fleet("1", ordered=True), EQUAL)
    assert words(unknown.see(unknown.answered("b", free))) == "order-unknown"
    assert words(proven.see(proven.answered("c", free))) == "b proven"


def test_an_answer_with_a_fault_or_a_card_of_no_ones_is_none() -> None:
    """A driver that failed, or names what the host does not have, leaves what there was."""
    cycles = Cycles(fleet("0"), MIXED)
    masked, free = asked(fleet("0"), MIXED)
    strange = DriverAnswer(devices=(DriverDevice(pci_bus_id="0000:ff:00.0", uuid="GPU-ff"),))
    for wrong in (strange, DriverAnswer(fault="cuInit answered 999"), DriverAnswer(devices=(DriverDevice(),))):
        assert words(cycles.see({masked: wrong, free: shows("abcd")})) == "order-unknown"
        assert words(cycles.see({masked: shows("a"), free: wrong})) == "order-unknown"


def test_nobody_asks_where_it_is_switched_off() -> None:
    """Without answers to be had there is no question either."""
    cycles = Cycles(fleet("0"), MIXED)
    assert words(cycles.see(None)) == "order-unknown"
    assert cycles.questions == frozenset()


def test_a_probed_answer_has_to_be_accepted() -> None:
    """Where mapping.accept lacks the grade, the answer is refused by that name."""
    cycles = Cycles(fleet("0"), MIXED)
    assert words(cycles.see(cycles.answered("d", "dabc"), accept=("proven",))) == "evidence-not-accepted"
