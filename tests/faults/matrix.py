"""A row of the matrix, and its scenario from start to end."""

from __future__ import annotations

import contextlib
import http.client
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.faults.expectation import WELL, Expect, differences
from tests.faults.sick_files import SickFiles, sick_files
from tests.harness import Daemon
from tests.truth import FLEETS, SETTINGS, Host, Libraries, Page, Truth
from tests.truth_cards import VENDORS, Pretend
from tests.truth_judge import Fleets

SAMPLING = "reuse_seconds: 0, deadline_seconds: 4"
_STARTS_WITHIN, _POLL_SECONDS, _LATER_SECONDS, _PAGE_EVERY = 30.0, 0.3, 10.0, 1.5
_ENDS_WITHIN = 8.0  # it takes less than two seconds where the machine is not busy
_GONE_WITHIN = 5.0
_STARTING = threading.BoundedSemaphore(6)
"""Not all rows start their daemons at once: each of these takes a second of a processor."""


class Scene:
    """A row while it is played: the host, the daemon on it, and what was wrong so far."""

    def __init__(self, row: Row, libraries: Libraries, directory: Path, cleanup: contextlib.ExitStack) -> None:
        self.row, self.directory, self.libraries = row, directory, row.libraries(libraries, directory)
        self.truth = Truth(directory, self.libraries, row.host, row.fleets)
        self.problems: list[str] = []
        self.stage = "before the start"
        self.daemon: Daemon
        self.notes: dict[str, int] = {}
        self._ticks: list[tuple[float, int]] = []
        self._cleanup = cleanup
        self._sick: SickFiles | None = None

    @property
    def sick(self) -> SickFiles:
        """Files that are ill, for links in the tree."""
        if self._sick is None:
            self._sick = self._cleanup.enter_context(sick_files(self.directory / "sick"))
        return self._sick

    def heal_sick_files(self) -> None:
        """Whoever waits for one has an answer; those that are stuck from now on are others."""
        if self._sick is not None:
            self._sick.release()
            self._sick = self._cleanup.enter_context(sick_files(self.directory / f"sick{self.truth.tick}"))

    def worker(self, vendor: str) -> int:
        """The process that reads the vendor's cards."""
        (pid,) = self.daemon.workers(vendor)
        return pid

    def background(self, work: Callable[[], object]) -> None:
        """Does that in a thread, again and again, until the row's end."""
        ended = threading.Event()
        thread = threading.Thread(target=lambda: [work() for _ in iter(lambda: ended.wait(0.02), True)], daemon=True)
        thread.start()
        self._cleanup.callback(thread.join)
        self._cleanup.callback(ended.set)

    def wrong(self, *problems: str) -> None:
        """These are problems of the row, in this stage."""
        self.problems += (f"{self.stage}: {problem}" for problem in problems)

    def oldest(self) -> int:
        """The tick from which on a page may have readings that is asked for now."""
        if not self.row.lag:
            return self.truth.tick
        until = time.monotonic() - self.row.lag
        return max((tick for at, tick in self._ticks if at <= until), default=1)

    def look(self, *, timeout: float | None = None, whole: bool = True, step: bool = True) -> Page:
        """A page, judged; with ``whole``, all that the row does not name has to be well on it. It is over a new tick;
        without ``step`` there has just been one.
        """
        self._ticks.append((time.monotonic(), self.truth.step() if step else self.truth.tick))
        page = self.truth.look(self.daemon, self.row.timeout if timeout is None else timeout, self.oldest())
        self.wrong(*page.complaints)
        if whole:
            self.wrong(*differences(page, self.truth, WELL, only=self.row.untouched(self.truth)))
        return page

    def look_until(self, expect: Expect, within: float, *, whole: bool = True) -> Page:
        """The first page that is as expected; where none is in time the last one's differences are problems."""
        until = time.monotonic() + within
        while True:
            page = self.look(whole=whole)
            differing = differences(page, self.truth, expect, settled=True)
            if not differing or time.monotonic() > until:
                self.wrong(*differing)
                return page
            time.sleep(_POLL_SECONDS)


Act = Callable[[Scene], object]


def mend(scene: Scene) -> None:
    """All libraries and files are well."""
    scene.heal_sick_files()
    scene.truth.mend()


def nothing(scene: Scene) -> None:
    """Nothing is to be done."""


def as_built(built: Libraries, directory: Path) -> Libraries:
    """The pretend libraries as they are."""
    del directory
    return built


@dataclass(frozen=True, kw_only=True)
class Row:
    """A fault and what is promi of the page while it lasts.

    ``hold`` are rules of pretend libraries by vendor, which let a scrape wait. ``also`` looks at what no page shows,
    in each stage. ``again`` inflicts it on a daemon that runs, where ``inflict`` cannot. ``touches`` are vendors whose
    cards may be missing between the stages, beside those that an expectation names. Where the settings let a cycle
    serve for longer than one page, readings may be ``lag`` seconds old.
    """

    name: str
    inflict: Act
    heal: Act = mend
    when: Literal["start", "running", "waiting"] = "running"
    at_once: Expect = WELL
    later: Expect = WELL
    healed: Expect = WELL
    heals_within: float = 25.0
    again: Act | None = None
    also: Act = nothing
    host: Host = field(default_factory=Host)
    fleets: Fleets = field(default_factory=lambda: FLEETS)
    settings: str = SETTINGS
    sampling: str = SAMPLING
    flags: tuple[str, ...] = ()
    environment: Callable[[Scene], Mapping[str, str]] = lambda _: {}
    libraries: Callable[[Libraries, Path], Libraries] = as_built
    hold: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    touches: tuple[str, ...] = ()
    lag: float = 0.0
    timeout: float = 3.0
    later_after: float = _LATER_SECONDS

    def untouched(self, truth: Truth) -> Collection[Pretend]:
        """The cards that the row does not name in any stage."""
        stages = (self.at_once, self.later, self.healed)
        vendors = {*self.touches, *(vendor for stage in stages for vendor in stage.down)}
        named = {card for stage in stages for card in (*stage.states, *stage.without)}
        numbers = {card.number for card in named}
        return {card for card in truth.host.cards if card.vendor not in vendors and card.number not in numbers}

    def play(self, built: Libraries, directory: Path) -> list[str]:
        """What was wrong."""
        with contextlib.ExitStack() as cleanup:
            scene = Scene(self, built, directory, cleanup)
            if self.when == "start":
                self.inflict(scene)
            started(scene, cleanup, self.at_once if self.when == "start" else WELL)
            before = _counts(scene)
            if self.when == "waiting":
                self._wait(scene)
            elif self.when == "running":
                self.inflict(scene)
            self._at_once(scene)
            self._last(scene, before)
            self._heal(scene)
            self._end(scene)
            return scene.problems

    def _wait(self, scene: Scene) -> None:
        scene.truth.change(lines=dict(self.hold))
        scene.stage = "while a scrape waits"
        with _scraping(scene):
            time.sleep(0.3)
            self.inflict(scene)

    def _at_once(self, scene: Scene) -> None:
        scene.stage = "at once"
        page = scene.look()
        scene.wrong(*differences(page, scene.truth, self.at_once))
        if page.scrape.seconds > self.at_once.within:
            scene.wrong(f"the page took {page.scrape.seconds:.1f} s")
        self.also(scene)

    def _last(self, scene: Scene, before: Mapping[tuple[str, str], float]) -> None:
        scene.stage = "meanwhile"
        until = time.monotonic() + self.later_after
        while time.monotonic() < until:
            time.sleep(_PAGE_EVERY)
            page = scene.look()
        scene.stage = "later"
        scene.wrong(*differences(page, scene.truth, self.later, settled=True))
        counts = _counts(scene)
        for vendor, reason in (*self.at_once.counted, *self.later.counted):
            if counts.get((vendor, reason), 0) <= before.get((vendor, reason), 0):
                scene.wrong(f"no {reason} of {vendor} was counted")
        self.also(scene)

    def _heal(self, scene: Scene) -> None:
        scene.stage = "healing"
        self.heal(scene)
        scene.look_until(self.healed, self.heals_within)
        scene.stage = "healed"
        self.also(scene)

    def _end(self, scene: Scene) -> None:
        """SIGTERM in the middle of the fault."""
        scene.stage = "at the end"
        (self.again or self.inflict)(scene)
        stopped(scene)


def started(scene: Scene, cleanup: contextlib.ExitStack, expect: Expect) -> None:
    """Starts the daemon, and waits for the first page that is as expected."""
    with _STARTING:
        _start(scene, cleanup)
        until = time.monotonic() + _STARTS_WITHIN
        while scene.daemon.request("/-/ready").status != 200 and time.monotonic() < until:
            time.sleep(0.05)  # the first cycle began with the daemon, and a page would join it
        scene.stage = "after the start"
        scene.look_until(expect, _STARTS_WITHIN, whole=False)


def stopped(scene: Scene) -> None:
    """Ends the daemon while a scrape waits: with status 0, in time, and no child of its own is left."""
    children = scene.daemon.workers()
    with _scraping(scene, tolerant=True):
        time.sleep(0.2)
        status, seconds = scene.daemon.stop()
    if status != 0 or seconds > _ENDS_WITHIN:
        scene.wrong(f"the daemon ended with status {status} after {seconds:.1f} s:\n{scene.daemon.log[-2000:]}")
    scene.heal_sick_files()
    until = time.monotonic() + _GONE_WITHIN
    while left := [pid for pid in children if Path(f"/proc/{pid}").exists()]:
        if time.monotonic() > until:
            scene.wrong(f"children are left: {left}")
            break
        time.sleep(0.05)


def _start(scene: Scene, cleanup: contextlib.ExitStack) -> None:
    """Starts the daemon."""
    row, directory = scene.row, scene.directory / "daemon"
    directory.mkdir()
    # Compiled once for all rows, also where Python is told to keep nothing: it is half of what a start costs.
    kept = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(scene.directory.parent / "bytecode")}
    environment = scene.truth.environment() | kept | dict(row.environment(scene))
    config = scene.truth.config(row.sampling, row.settings)
    flags = [*scene.truth.flags(), *row.flags]
    scene.daemon = cleanup.enter_context(Daemon(directory, environment, config, flags))


def _counts(scene: Scene) -> dict[tuple[str, str], float]:
    """Faults so far, by vendor and reason."""
    rows = scene.look(whole=False).scrape.of("gpu_exporter_backend_faults_total")
    return {(each.labels["vendor"], each.labels["reason"]): each.value for each in rows}


@contextlib.contextmanager
def _scraping(scene: Scene, *, tolerant: bool = False) -> Iterator[None]:
    """Meanwhile a scrape goes on, whose page is judged as every other; a ``tolerant`` one may get none."""
    first = scene.oldest()

    def scrape() -> None:
        try:
            page = scene.truth.look(scene.daemon, scene.row.timeout, first)
            scene.wrong(*page.complaints)
        except (OSError, http.client.HTTPException) as error:
            if not tolerant:
                scene.wrong(f"the scrape that waited has no page: {error}")

    thread = threading.Thread(target=scrape, name="scrape", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(30)


def is_stuck(pid: int) -> bool:
    """Whether a thread of the process is in the kernel, where no signal reaches it."""
    states = (path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat"))
    return "D" in states


def each_vendor(make: Callable[[str], Row]) -> list[Row]:
    """A row for each vendor."""
    return [make(vendor) for vendor in VENDORS]


def signal_worker(vendor: str, number: int) -> Act:
    """Sends the signal to the vendor's workers."""

    def act(scene: Scene) -> None:
        with contextlib.suppress(OSError):  # it is gone, or the daemon is
            for pid in scene.daemon.workers(vendor):
                os.kill(pid, number)

    return act
