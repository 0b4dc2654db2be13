"""A row that goes through many small faults with one daemon: each for one page, and healed for the next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.faults.expectation import WELL, Expect, differences
from tests.faults.matrix import SAMPLING, Act, Row, Scene, mend, nothing, started, stopped
from tests.truth import FLEETS, SETTINGS, Host, Libraries
from tests.truth_judge import Fleets

_ENOUGH = 40


class Step(NamedTuple):
    """One fault, and what the page over it must show. With ``first`` there is a page with that fault before."""

    what: str
    inflict: Act
    expect: Expect
    first: Act = nothing


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Steps on one daemon. The vendor's worker lives through all of them."""

    name: str
    vendor: str
    steps: Callable[[], Sequence[Step]]
    host: Host = field(default_factory=Host)
    fleets: Fleets = field(default_factory=lambda: FLEETS)
    settings: str = SETTINGS

    def play(self, built: Libraries, directory: Path) -> list[str]:
        """What was wrong, of as many steps as it takes to see it."""
        base = Row(
            name=self.name,
            inflict=nothing,
            host=self.host,
            fleets=self.fleets,
            settings=self.settings,
            sampling=SAMPLING,
        )
        with contextlib.ExitStack() as cleanup:
            scene = Scene(base, built, directory, cleanup)
            started(scene, cleanup, WELL)
            worker = scene.worker(self.vendor)
            for step in self.steps():
                if len(scene.problems) > _ENOUGH:
                    break
                self._play(scene, step)
            scene.stage = "at the end"
            if scene.daemon.workers(self.vendor) != [worker]:
                scene.wrong(f"the worker {worker} has not lived through it:\n{scene.daemon.log[-2000:]}")
            stopped(scene)
            return scene.problems

    @staticmethod
    def _play(scene: Scene, step: Step) -> None:
        scene.stage = step.what
        if step.first is not nothing:
            step.first(scene)
            scene.look(whole=False, step=False)
        step.inflict(scene)
        page = scene.look(whole=False, step=False)
        scene.wrong(*differences(page, scene.truth, step.expect))
        mend(scene)
        scene.stage = f"after {step.what}"
        scene.wrong(*differences(scene.look(whole=False, step=False), scene.truth, WELL))
