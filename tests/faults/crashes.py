"""Workers that die: of a vendor's library, or of a signal from elsewhere; once, again and again, and at their end."""

from __future__ import annotations

import os
import signal

from tests.faults.expectation import WELL, Expect
from tests.faults.matrix import Act, Row, Scene, each_vendor, mend, signal_worker
from tests.truth_cards import I0, I1, MEMORY, UTILIZATION

DEBUG = ("--log.level=debug",)
_MOST_STARTS = 8  # of one vendor in a row's time: at once, and after 1, 2, 4, 8 and 15 seconds


def _crashed(vendor: str, reasons: str = "crashed") -> Expect:
    return Expect(down={vendor: reasons}, counted=[(vendor, "crashed")])


def _rule(vendor: str, *lines: str) -> Act:
    return lambda scene: scene.truth.rules(vendor, *lines)


def _once(scene: Scene) -> None:
    """The page in whose cycle it crashed says so; the one after it is whole."""
    scene.truth.rules("nvidia", "crash nvmlDeviceGetTemperatureV 2")
    rows = scene.look().scrape.of("gpu_exporter_backend_fault_info", vendor="nvidia")
    if [row.labels["reason"] for row in rows] != ["crashed"]:
        scene.wrong(f"the crash is told as {rows}")
    scene.truth.mend()


def _always(vendor: str) -> Act:
    """Every worker of the vendor is killed as soon as it is seen."""
    kill = signal_worker(vendor, signal.SIGSEGV)

    def act(scene: Scene) -> None:
        begun, scene.notes["killing"] = "killing" in scene.notes, 1
        if not begun:
            scene.background(lambda: scene.notes["killing"] and kill(scene))
        kill(scene)

    return act


def _spare(scene: Scene) -> None:
    scene.notes["killing"] = 0


def _few_starts(scene: Scene) -> None:
    """A worker that dies at once is not started for every page."""
    if scene.stage == "later" and (starts := scene.daemon.log.count("worker started vendor=nvidia")) > _MOST_STARTS:
        scene.wrong(f"{starts} workers were started")


def _reload(scene: Scene) -> None:
    """The runbook: a reload tries a library again that was left out."""
    mend(scene)
    os.kill(scene.daemon.process.pid, signal.SIGHUP)


WITHOUT_SYSMAN = Expect(without=dict.fromkeys((I0, I1), MEMORY))

ROWS = [
    Row(name="the library crashes once: nvidia", inflict=_once, touches=("nvidia",)),
    *each_vendor(
        lambda vendor: Row(
            name=f"the worker dies once: {vendor}",
            inflict=signal_worker(vendor, signal.SIGSEGV),
            at_once=Expect(down={vendor: "crashed|up"}),
        )
    ),
    Row(
        name="the library crashes again and again: nvidia",
        inflict=_rule("nvidia", "crash nvmlDeviceGetTemperatureV *"),
        at_once=_crashed("nvidia"),
        later=_crashed("nvidia"),
        flags=DEBUG,
        also=_few_starts,
    ),
    Row(
        name="the library crashes as it starts: nvidia",
        when="start",
        inflict=_rule("nvidia", "crash nvmlInitWithFlags *"),
        at_once=_crashed("nvidia"),
        later=_crashed("nvidia"),
        flags=DEBUG,
        also=_few_starts,
        again=_rule("nvidia", "crash * *"),
    ),
    Row(
        name="the library crashes as it starts: amd",
        when="start",
        inflict=_rule("amd", "crash amdsmi_init *"),
        at_once=Expect(down={"amd": "crashed|up"}),
    ),
    Row(
        name="the library crashes again and again: intel",
        inflict=_rule("intel", "crash zesMemoryGetState"),
        heal=_reload,
        lag=4.5,  # a reload begins a cycle, which may take so long, and pages join it
        at_once=_crashed("intel"),
        later=Expect(without=WITHOUT_SYSMAN.without, maybe=dict.fromkeys((I0, I1), (UTILIZATION,))),
    ),
    *(
        Row(
            name=f"the worker dies again and again: {vendor}",
            inflict=_always(vendor),
            heal=_spare,
            at_once=_crashed(vendor),
            later=_crashed(vendor),
            healed=WELL if vendor == "amd" else WITHOUT_SYSMAN,
        )
        for vendor in ("amd", "intel")
    ),
    Row(name="the library crashes at the end: nvidia", inflict=_rule("nvidia", "crash nvmlShutdown *")),
    Row(
        name="the library crashes while a scrape waits: nvidia",
        when="waiting",
        hold={"nvidia": ("slow nvmlDeviceGetTemperatureV * 1000",)},
        inflict=_rule("nvidia", "crash nvmlDeviceGetTemperatureV *"),
        at_once=_crashed("nvidia"),
        later=_crashed("nvidia"),
    ),
]
