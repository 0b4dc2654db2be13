"""The arithmetic and the pretend drivers, written from one specification by different hands, name the same devices."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from exporter.inventory import Inventory
from exporter.masks import invert
from exporter.model import Refusal
from exporter.probing import answer_of, questions
from exporter.wire import DriverAnswer
from tests.driver_cases import Case, drawn, worked
from tests.driver_hosts import computed, raw_places, shown
from tests.driver_twin import Question, Said, Twin, question

pytestmark = pytest.mark.e2e

RUNTIMES = ("cuda", "rocm", "level_zero", "vulkan")


class Judged(NamedTuple):
    """What became of some cases, counted, and a sentence for each that is contradicted.

    The arithmetic and the driver ``agreed`` on some devices, or on ``none``, which may be the driver's failure; or the
    arithmetic ``refused``. Besides, what probing made of the driver's answers is what the process has (``probed``), or
    it made nothing of them (``not probed``).
    """

    counts: Counter[str]
    wrong: list[str]


_NOTHING_WRONG = ("agreed", "none", "refused", "probed", "not probed")


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Twin]:
    """Each runtime's pretend driver, built once."""
    twins: dict[str, Twin] = {}

    def made(runtime: str) -> Twin:
        if runtime not in twins:
            twins[runtime] = Twin(runtime, tmp_path_factory.mktemp(runtime))
        return twins[runtime]

    return made


def judged(twin: Twin, cases: Sequence[Case]) -> Judged:
    """Every case asked and compared."""
    said = twin.ask(asked for case in cases for asked in (_own(twin, case), *_probes(twin, case)))
    counts: Counter[str] = Counter()
    wrong = []
    for case in cases:
        own = said[_own(twin, case)]
        verdicts = _directly(case, own), _by_probing(twin, case, own, said)
        counts.update(text for text in verdicts if text in _NOTHING_WRONG)
        wrong += [f"{case.name} {dict(case.env)}: {text}" for text in verdicts if text not in _NOTHING_WRONG]
    return Judged(counts, wrong)


def _own(twin: Twin, case: Case) -> Question:
    """The process itself."""
    return question(twin.state(case.host), {**case.env, **case.hidden})


def _probes(twin: Twin, case: Case) -> list[Question]:
    """What the exporter would ask."""
    asked = questions(case.runtime, case.env, case.known, case.context.reach)
    return [question(twin.state(case.host), {**dict(each.env), **case.hidden}) for each in asked]


def _known(case: Case, said: Said) -> Inventory:
    """What the exporter knows: of Vulkan an enumeration too, which a worked mask's host has already."""
    if case.runtime != "vulkan" or case.host.raw_order:
        return case.known
    return replace(case.known, vulkan=said.answer.vulkan if said.answer else None)


def _shown(case: Case, said: Said) -> list[str] | None:
    """The places that the process has by ordinal, for Vulkan those that ggml has; None where its driver fails."""
    if said.answer is None or said.answer.fault:
        return None
    if case.runtime == "vulkan":
        return None if said.ggml is None else raw_places(said.ggml, said.answer.vulkan)
    return shown(case.runtime, said.answer.devices, case.host)


def _directly(case: Case, said: Said) -> str:
    known = _known(case, said)
    outcome = invert(case.runtime, case.env, known, case.context)
    if isinstance(outcome, Refusal):
        return "refused"
    named = computed(case.runtime, outcome.devices, known, case.host)
    there = _shown(case, said)
    if not named and not there:
        return "none"
    return "agreed" if named == there else f"the arithmetic names {named}, the driver {there or said}"


def _by_probing(twin: Twin, case: Case, own: Said, said: Mapping[Question, Said]) -> str:
    asked = questions(case.runtime, case.env, case.known, case.context.reach)
    said_to = zip(asked, (said[each].answer for each in _probes(twin, case)), strict=True)
    answers = {each: answer for each, answer in said_to if answer is not None}
    probed = answer_of(asked, answers, case.env, case.known, case.context) if asked else None
    if probed is None:
        return "not probed"
    named, there = computed(case.runtime, probed.devices, _known(case, own), case.host), _shown(case, own) or []
    return "probed" if named == there else f"probing names {named}, the driver {there}"


# How many there are at least, of what a test of that name could otherwise do without. Random ones vary with hypothesis.
WORKED = {"cuda": 200, "rocm": 130, "level_zero": 160, "vulkan": 200}
DRAWN = {"cuda": 180, "rocm": 100, "level_zero": 170, "vulkan": 240}
PROBED = {"cuda": 240, "rocm": 70, "level_zero": 170, "vulkan": 280}
LIES = {"cuda": 8, "rocm": 100, "level_zero": 120, "vulkan": 200}

LEFT_OUT = {
    "cuda": {"a front end over the driver": 2, "reach not known": 1},
    "rocm": {"not HIP": 303, "no Linux": 2, "reach not known": 1},
    "level_zero": {"no enumeration": 1, "an old driver, of no certain order": 1},
    "vulkan": {"no enumeration under its environment": 5},
}
"""Of the worked masks those that no driver here can be asked about, by reason."""


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_worked_masks(runtime: str, twin: Callable[[str], Twin]) -> None:
    """Every worked mask that a driver can be asked about is read alike by the arithmetic, probing and the driver."""
    pairs, left_out = worked(runtime)
    found = judged(twin(runtime), [case for _, case in pairs])
    assert not found.wrong
    assert left_out == LEFT_OUT[runtime]
    assert found.counts["agreed"] >= WORKED[runtime], found.counts


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_random_masks(runtime: str, twin: Callable[[str], Twin]) -> None:
    """So is every random mask on random hosts, of half of which not everything is known."""
    cases = drawn(runtime)
    found = judged(twin(runtime), cases)
    assert not found.wrong
    assert len(cases) > 450
    assert found.counts["agreed"] >= DRAWN[runtime], found.counts
    assert found.counts["probed"] >= PROBED[runtime], found.counts


@pytest.mark.parametrize("runtime", ["rocm", "level_zero", "vulkan"])
def test_the_drivers_are_as_the_real_parsers(runtime: str, twin: Callable[[str], Twin]) -> None:
    """To every mask whose answer by the runtime's own parser is known the pretend driver answers the same."""
    pairs = [(vector.accepted[0], case) for vector, case in worked(runtime)[0] if vector.from_parser]
    made = twin(runtime)
    said = made.ask(_own(made, case) for _, case in pairs)
    assert len(pairs) == 300
    for (_, identities, positions), case in pairs:
        real = identities if positions is None else raw_places(positions, case.known.vulkan)
        assert (_shown(case, said[_own(made, case)]) or []) == (real or []), f"{case.name} {dict(case.env)}"


def test_a_library_that_ends_the_process_costs_one_answer(twin: Callable[[str], Twin]) -> None:
    """A mask at which the driver aborts is answered by the signal, and those before and behind it by devices."""
    made = twin("level_zero")
    case = next(case for _, case in worked("level_zero")[0])
    asked = [question(made.state(case.host), {"ZE_AFFINITY_MASK": mask}) for mask in ("0", "none", "1")]
    said = made.ask(asked)
    assert said[asked[1]] == Said(-signal.SIGABRT, None, None)
    assert all(isinstance(said[each].answer, DriverAnswer) for each in (asked[0], asked[2]))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_wrong_order_is_seen(runtime: str, twin: Callable[[str], Twin]) -> None:
    """Where the driver has its cards the other way round the masks of numbers are contradicted.

    CUDA's own order counts where ``CUDA_DEVICE_ORDER`` is not set: no worked mask of numbers rests on that.
    """
    cases = drawn(runtime) if runtime == "cuda" else [case for _, case in worked(runtime)[0]]
    lies = [case._replace(host=case.host._replace(reverse=True)) for case in cases]
    found = judged(twin(runtime), lies)
    assert len(found.wrong) >= LIES[runtime], found.counts
