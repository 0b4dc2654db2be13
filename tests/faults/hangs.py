"""Cards, libraries and workers that do not answer, and answers that come too late."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import NamedTuple

from tests.faults.expectation import WELL, Expect
from tests.faults.matrix import Act, Row, Scene, each_vendor, is_stuck, mend, nothing, signal_worker
from tests.truth_cards import A0, A1, I0, I1, MEMORY, N0, N1, N2, UTILIZATION, Pretend

CARDS = {"nvidia": (N0, N1, N2), "amd": (A0, A1), "intel": (I0, I1)}
_IMPATIENT = "reuse_seconds: 0, deadline_seconds: 4, hang_seconds: 2"


class Hang(NamedTuple):
    """What hangs, which cards with it, and how."""

    what: str
    cards: tuple[Pretend, ...]
    inflict: Act


def _rule(vendor: str, *lines: str) -> Act:
    return lambda scene: scene.truth.rules(vendor, *lines)


def _file(name: str, *cards: Pretend) -> Act:
    return lambda scene: [scene.truth.break_file(card, name, "fifo") for card in cards]


ONE = (
    Hang("nvidia", (N1,), _rule("nvidia", "hang nvmlDeviceGetTemperatureV 1")),
    Hang("amd", (A0,), _file("gpu_busy_percent", A0)),
    Hang("intel, in a file", (I1,), _file("hwmon/*/temp2_input", I1)),
    Hang("intel, in its library", (I0,), _rule("intel", "hang zesMemoryGetState 0")),
)
ALL = (
    Hang("nvidia", (N0, N1, N2), _rule("nvidia", "hang * *")),
    Hang("amd", (A0, A1), _file("gpu_busy_percent", A0, A1)),
    Hang("intel", (I0, I1), _rule("intel", "hang * *")),
)
# A worker that hung as a whole does without its library from then on, where it can, until the settings are reloaded.
CAUTIOUS = {"nvidia": WELL, "amd": WELL, "intel": Expect(without=dict.fromkeys((I0, I1), MEMORY))}
SLOW = {
    "nvidia": ("slow nvmlDeviceGetMemoryInfo_v2 * 1000",),
    "intel": ("slow zesMemoryGetState 1000",),
}


def _hung(cards: tuple[Pretend, ...]) -> Expect:
    return Expect(states=dict.fromkeys(cards, "hung"), counted=[(cards[0].vendor, "hung")])


def _down(vendor: str, reasons: str = "hung") -> Expect:
    return Expect(down={vendor: reasons}, counted=[(vendor, "hung")])


def _stop(vendor: str) -> Act:
    """The worker does not run, so that it takes no notice of SIGTERM either."""

    def act(scene: Scene) -> None:
        scene.notes["stopped"] = scene.worker(vendor)
        signal_worker(vendor, signal.SIGSTOP)(scene)

    return act


def _after_healing(check: Callable[[Scene], bool], problem: str) -> Act:
    def act(scene: Scene) -> None:
        if scene.stage == "healed" and not check(scene):
            scene.wrong(problem)

    return act


def _same_worker(vendor: str) -> Act:
    return _after_healing(
        lambda scene: scene.daemon.workers(vendor) == [scene.notes["stopped"]], "the worker has been ended"
    )


STUCK = {"nvidia": (N1, "power/runtime_status"), "amd": (A0, "gpu_busy_percent"), "intel": (I1, "hwmon/*/temp2_input")}


def _unkillable(vendor: str) -> Act:
    """A thread of the worker is in the kernel and no signal ends it; the others do not run."""
    card, name = STUCK[vendor]

    def act(scene: Scene) -> None:
        scene.truth.break_file(card, name, scene.sick.link("stuck"))
        scene.look(timeout=1)
        _stop(vendor)(scene)

    return act


def _no_second_worker(vendor: str) -> Act:
    """What cannot be ended is waited for: two would both hang in the end."""

    def act(scene: Scene) -> None:
        stopped = scene.notes["stopped"]
        if scene.stage == "later" and not is_stuck(stopped):
            scene.wrong("the worker could be ended after all: this row tests nothing")
        if scene.stage == "later" and set(scene.daemon.workers(vendor)) - {stopped}:
            scene.wrong(f"there is a second worker beside {stopped}: {scene.daemon.workers(vendor)}")

    return act


def _late_text(scene: Scene) -> None:
    """The file's text is of when it was opened first, and so of no later page."""
    scene.sick.text = f"{A1.value(UTILIZATION, scene.truth.tick)}\n".encode()
    scene.truth.break_file(A1, "gpu_busy_percent", scene.sick.link("late-1300"))


LATE = (
    Hang("nvidia", (N1,), _rule("nvidia", "slow nvmlDeviceGetMemoryInfo_v2 1 1300")),
    Hang("amd", (A1,), _late_text),
    Hang("intel", (I1,), _rule("intel", "slow zesMemoryGetState 1 1300")),
)

ROWS = [
    *(
        Row(name=f"one card hangs: {h.what}", inflict=h.inflict, at_once=_hung(h.cards), later=_hung(h.cards))
        for h in ONE
    ),
    *(
        Row(
            name=f"one card hangs from the start: {h.what}",
            when="start",
            inflict=h.inflict,
            at_once=_hung(h.cards),
            later=_hung(h.cards),
        )
        for h in ONE
        if "file" not in h.what
    ),
    *(
        Row(
            name=f"one card hangs while a scrape waits: {h.what}",
            when="waiting",
            hold=SLOW if h.what != "amd" else {"amd": (), "nvidia": SLOW["nvidia"]},
            inflict=h.inflict,
            at_once=_hung(h.cards),
            later=_hung(h.cards),
        )
        for h in ONE[:3]
    ),
    *(
        Row(name=f"all cards hang: {h.what}", inflict=h.inflict, at_once=_hung(h.cards), later=_hung(h.cards))
        for h in ALL
    ),
    Row(
        name="all calls hang from the start: nvidia",
        when="start",
        inflict=_rule("nvidia", "hang * *"),
        at_once=_down("nvidia", "starting|hung"),
        later=_down("nvidia"),
        again=ALL[0].inflict,
    ),
    Row(name="all calls hang from the start: amd", when="start", inflict=_rule("amd", "hang * *"), heal=mend),
    Row(
        name="all calls hang from the start: intel",
        when="start",
        inflict=_rule("intel", "hang * *"),
        at_once=Expect(without=dict.fromkeys((I0, I1), MEMORY)),
        later=Expect(without=dict.fromkeys((I0, I1), MEMORY)),
    ),
    *each_vendor(
        lambda vendor: Row(
            name=f"the worker does not run for a while: {vendor}",
            inflict=_stop(vendor),
            heal=signal_worker(vendor, signal.SIGCONT),
            at_once=_down(vendor),
            later=_down(vendor),
            also=_same_worker(vendor),
        )
    ),
    *each_vendor(
        lambda vendor: Row(
            name=f"the worker does not run any more: {vendor}",
            sampling=_IMPATIENT,
            inflict=_stop(vendor),
            heal=nothing,
            at_once=_down(vendor),
            later=Expect(down={vendor: "hung|up"}, maybe=dict.fromkeys(CARDS[vendor], (UTILIZATION, *MEMORY))),
            healed=CAUTIOUS[vendor],
            also=_after_healing(
                lambda scene: scene.notes["stopped"] not in scene.daemon.workers(), "the stopped worker is still there"
            ),
        )
    ),
    *each_vendor(
        lambda vendor: Row(
            name=f"nothing ends the worker for a while: {vendor}",
            sampling=_IMPATIENT,
            inflict=_unkillable(vendor),
            at_once=_down(vendor),
            later=_down(vendor),
            healed=CAUTIOUS[vendor],
            also=_no_second_worker(vendor),
        )
    ),
    *(
        Row(
            name=f"answers come late: {h.what}",
            timeout=1,
            inflict=h.inflict,
            at_once=_hung(h.cards),
            later=_hung(h.cards),
        )
        for h in LATE
    ),
]
