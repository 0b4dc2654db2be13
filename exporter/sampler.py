"""One cycle over all workers: shared by concurrent scrapes, served again for a moment, never waited for too long."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Mapping as MappingOf
from typing import NamedTuple, Protocol

import msgspec

from exporter import pci
from exporter.attribution import attribute
from exporter.backends import LENT_CAPABILITIES
from exporter.binding import Bound, Known, bind
from exporter.catalog import DEFAULT, USAGE, selection
from exporter.config import Mapping, Sampling, Settings
from exporter.model import FAULT_REASONS, BackendStatus, Fault, Fleet, Snapshot, VendorOutcome, VendorSample
from exporter.probing import Answers, Question
from exporter.supervisor import Backoff, Supervisor
from exporter.usage import usage_of

# A vendor that neither the bus nor the settings name is looked for ever more rarely: each look starts a process.
_UNEXPECTED = Backoff(first=30.0, most=600.0)
_LOOK_EVERY_SECONDS = 15.0
_FIRST_LOOK_SECONDS = 0.2  # else a vendor's first page would lack its row
# A page in the background is kept for so many intervals. The next cycle begins one after the last has ended, and has to
# end before that: one hung card would make all of them stale.
_BACKGROUND_KEEPS, _BACKGROUND_LASTS = 2.5, 1.25


class Source:
    """One vendor's worker, and whether the vendor is sure to be on this host: named, or seen on the PCI bus."""

    def __init__(
        self, vendor: str, sysfs: str, procfs: str, library: str | None = None, wanted: frozenset[str] = DEFAULT
    ) -> None:
        """``wanted`` are the metrics that its worker reads."""
        self.vendor, self.shared_object, self.wanted = vendor, library, wanted
        self.named = False
        self._sysfs = sysfs
        self._on_bus = False
        self._looked = -math.inf
        self._look: threading.Thread | None = None
        arguments = (f"--path.sysfs={sysfs}", f"--path.procfs={procfs}")
        named = () if library is None else (f"--library={library}",)
        metrics = () if wanted == DEFAULT else (f"--metrics={','.join(sorted(wanted))}",)
        lent = vendor in LENT_CAPABILITIES
        self.supervisor = Supervisor(vendor, (*arguments, *named, *metrics), lent=lent, backoff=self._backoff)

    def expected(self) -> bool:
        """Named by the settings, or seen on the bus.

        Looking reads a file a device, so it is done now and then, and in a thread: a file that hangs holds up nobody.
        """
        now = time.monotonic()
        looking = self._look is not None and self._look.is_alive()
        if not self._on_bus and not self.named and not looking and now - self._looked > _LOOK_EVERY_SECONDS:
            first, self._looked = self._look is None, now
            look = threading.Thread(target=self._look_at_bus, name=f"bus-{self.vendor}", daemon=True)
            with contextlib.suppress(RuntimeError):  # as many threads as this process may have: the next look is soon
                look.start()
                look.join(_FIRST_LOOK_SECONDS if first else 0.0)
                self._look = look
        return self.named or self._on_bus

    def _look_at_bus(self) -> None:
        self._on_bus = any(True for _ in pci.cards(self._sysfs, self.vendor))

    def _backoff(self) -> Backoff:
        return Backoff() if self.expected() or self.supervisor.served else _UNEXPECTED


class FaultCounts:
    """Faults by vendor and reason since the daemon's start; every reason has a count from the start."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}

    def add(self, outcome: VendorOutcome) -> None:
        """Count one cycle's faults: the backend's own, or each of its devices'."""
        counts = self._counts.setdefault(outcome.vendor, Counter())
        if outcome.fault is not None:
            counts[outcome.fault.reason] += 1
        elif outcome.sample is not None:
            counts.update(fault.reason for fault in outcome.sample.faults)

    def of(self, vendor: str) -> dict[str, int]:
        """The vendor's counts by reason."""
        counts = self._counts.get(vendor, Counter())
        return {reason: counts[reason] for reason in FAULT_REASONS}


def _found(sample: VendorSample | None) -> int:
    """Whole cards that answered, or sleep."""
    if sample is None:
        return 0
    states = {entry.key: entry.state for entry in sample.states}
    return sum(device.parent is None and states.get(device.key) in ("ok", "asleep") for device in sample.devices)


def status_of(outcome: VendorOutcome, counts: FaultCounts, expected: MappingOf[str, int]) -> BackendStatus:
    """The backend's row for one cycle."""
    return BackendStatus(
        cards_found=_found(outcome.sample),
        cards_expected=expected.get(outcome.vendor),
        vendor=outcome.vendor,
        up=outcome.sample is not None,
        duration_seconds=outcome.duration_seconds,
        fault=outcome.fault,
        faults_total=counts.of(outcome.vendor),
        driver_version=outcome.sample.driver_version if outcome.sample else "",
        hints=outcome.sample.hints if outcome.sample else (),
    )


def _to_nobody(_snapshot: Snapshot, _outcomes: Sequence[VendorOutcome]) -> None:
    """Hears nothing."""


def _using(outcomes: Iterable[VendorOutcome]) -> dict[int, float]:
    """The processes that compute on any device, each with the earliest time at which that was asked."""
    found: dict[int, float] = {}
    for outcome in outcomes:
        for user in outcome.sample.users if outcome.sample is not None else ():
            found[user.pid] = min(found.get(user.pid, outcome.asked), outcome.asked)
    return found


class _Flight:
    """A cycle in progress: one task a vendor."""

    def __init__(self, tasks: dict[str, asyncio.Task[VendorOutcome]], within_seconds: float, generation: int) -> None:
        self.tasks = tasks
        self.within_seconds = within_seconds
        self.generation = generation
        self.started = time.monotonic()
        self.snapshot: Snapshot | None = None

    @property
    def done(self) -> bool:
        return all(task.done() for task in self.tasks.values())


class Watched(Protocol):
    """The fleets. ``left_out`` is how many there are beyond those that :meth:`now` gives."""

    @property
    def left_out(self) -> int:
        """As above."""

    def live_on(self, vendor: str) -> bool:
        """Whether any that consist of processes may have devices of the vendor."""

    def now(self, using: dict[int, float]) -> tuple[Fleet, ...]:
        """Those that live at this moment, with those of their processes that are among ``using``: process numbers, and
        when each was asked for.
        """

    def stop(self) -> None:
        """Look for no more."""


class Asker(Protocol):
    """Who asks drivers."""

    @property
    def answers(self) -> Answers:
        """What they have answered so far."""

    def want(self, questions: Iterable[Question]) -> None:
        """Ask them these, some time."""


class _Finished(NamedTuple):
    """A finished cycle: what it found, and the fleets and the number of answers that it was assembled with."""

    outcomes: Sequence[VendorOutcome]
    fleets: tuple[Fleet, ...]
    answers: int


class Sampler:
    """Makes snapshots. Sampling happens when one is asked for, or, where the settings say so, at an interval."""

    def __init__(self, observe: Callable[[Snapshot, Sequence[VendorOutcome]], None], asker: Asker) -> None:
        """``observe`` is told of each finished cycle, once."""
        self._observe, self._asker = observe, asker
        self._watched: Watched
        self._mapping = Mapping()
        self._finished = _Finished((), (), 0)
        self._sources: dict[str, Source] = {}
        self._present: set[str] = set()
        self._tried: set[str] = set()
        self._searches: dict[str, asyncio.Task[VendorOutcome]] = {}
        self._sampling = Sampling()
        self._expected: MappingOf[str, int] = {}
        self._usage = frozenset(USAGE)
        self._bound = Bound()
        self._counts = FaultCounts()
        self._flight: _Flight | None = None
        self._last: Snapshot | None = None
        self._last_began = self._last_finished = 0.0
        self._last_within = 0.0
        self._generation = 0
        self._background: asyncio.Task[None] | None = None

    def configure(self, sources: Sequence[Source], watched: Watched, settings: Settings) -> tuple[Source, ...]:
        """Take these settings from now on, all at once; workers of sources that stay go on running.

        Fleets are bound anew. Returns the sources that are no longer used, to be stopped.
        """
        kept = {source.vendor: source for source in sources}
        dropped = tuple(source for vendor, source in self._sources.items() if kept.get(vendor) is not source)
        self._tried &= kept.keys() - {source.vendor for source in dropped}
        self._searches = {vendor: search for vendor, search in self._searches.items() if vendor in self._tried}
        self._sources = kept
        self._present = {vendor for vendor in kept if vendor in self._present or kept[vendor].expected()}
        self._watched, self._mapping, self._sampling = watched, settings.mapping, settings.sampling
        self._expected = settings.expected_devices
        self._usage = selection(settings.metrics.include, settings.metrics.exclude).usage
        self._bound, self._last = Bound(epochs=self._bound.epochs), None
        self._generation += 1
        for source in sources:
            source.supervisor.hang_seconds = settings.sampling.hang_seconds
            # Asked for as evidence, whatever the settings leave of what is shown of them.
            source.supervisor.users = watched.live_on(source.vendor)
        if self._background is not None:
            self._background.cancel()
            self._background = None
        if settings.sampling.interval_seconds is not None:
            self._background = asyncio.create_task(self._sample_at(settings.sampling.interval_seconds))
        return dropped

    async def stop(self, within_seconds: float = 1.0) -> None:
        """End every worker."""
        if self._background is not None:
            self._background.cancel()
        self._watched.stop()
        await asyncio.gather(*(source.supervisor.stop(within_seconds) for source in self._sources.values()))

    def hurry(self, within_seconds: float) -> None:
        """Somebody with less time waits for the running cycle too, if there is one."""
        if self._flight is not None:
            self._flight.within_seconds = min(self._flight.within_seconds, within_seconds)
            for source in self._sources.values():
                source.supervisor.hurry(within_seconds)

    def cut_short(self, within_seconds: float) -> None:
        """The running cycle ends within that time, if there is one, and nobody is told of it or of a later one."""
        self._observe = _to_nobody
        for source in self._sources.values():
            source.supervisor.cut_short(within_seconds)

    def kill(self) -> None:
        """End every worker without waiting."""
        for source in self._sources.values():
            source.supervisor.kill()

    async def snapshot(self, within_seconds: float) -> Snapshot:
        """The state of the host now; what has not answered in time is missing from it, with the reason."""
        if self._background is not None and self._last is not None:
            return self._from_background(self._last)
        if self._last is not None and self._serves_again(self._last, within_seconds):
            return self._with_fleets_of_now(self._last)
        return await self._cycle(within_seconds)

    def _serves_again(self, last: Snapshot, within_seconds: float) -> bool:
        """A cycle serves for a moment from its start on; not one that was cut short, to who has more time than it."""
        missing = "hung" in last.states.values() or not all(backend.up for backend in last.backends)
        cut_short = missing and within_seconds > self._last_within
        return not cut_short and time.monotonic() - self._last_began < self._sampling.reuse_seconds

    def _with_fleets_of_now(self, last: Snapshot) -> Snapshot:
        """A snapshot that serves again, over the same readings, but with the fleets that there are by now."""
        now = (self._watched.now(_using(self._finished.outcomes)), len(self._asker.answers))
        if now != self._finished[1:]:
            last = self._last = self._assemble(self._finished.outcomes, now[0])
            self._finished = _Finished(self._finished.outcomes, *now)
        return last

    async def _cycle(self, within_seconds: float) -> Snapshot:
        flight = self._flight
        if flight is None:
            flight = self._take_off(within_seconds)
        else:
            self.hurry(within_seconds)
        if flight.tasks:
            await asyncio.wait(flight.tasks.values(), timeout=within_seconds)
        return self._land(flight) if flight.done else self._so_far(flight)

    def _take_off(self, within_seconds: float) -> _Flight:
        tasks = {vendor: task for vendor in self._sources if (task := self._ask(vendor, within_seconds))}
        flight = self._flight = _Flight(tasks, within_seconds, self._generation)
        for task in flight.tasks.values():
            # Landed when it ends, also where nobody waits any more: found later, it would pass for fresh.
            task.add_done_callback(lambda _: self._land(flight) if flight.done else None)
        return flight

    def _ask(self, vendor: str, within_seconds: float) -> asyncio.Task[VendorOutcome] | None:
        """A vendor's part of a cycle. Once it was not found, it is looked for again beside the cycles, since each look
        starts a process that nobody shall wait for.
        """
        search, supervisor = self._searches.get(vendor), self._sources[vendor].supervisor
        if search is not None and search.done():
            search = None
        if supervisor.rests and self._sources[vendor].expected():  # its card has come to the bus meanwhile
            self._present.add(vendor)
        if vendor in self._present or vendor not in self._tried:
            return search or asyncio.create_task(supervisor.ask(within_seconds))
        if search is None and not supervisor.rests:
            self._searches[vendor] = begun = asyncio.create_task(supervisor.ask(within_seconds))
            begun.add_done_callback(self._found)
        return None

    def _found(self, search: asyncio.Task[VendorOutcome]) -> None:
        """What a look for a vendor has found."""
        if not search.cancelled() and search.result().vendor not in self._present:
            self._counts.add(search.result())
            self._notice(search.result())

    def _land(self, flight: _Flight) -> Snapshot:
        """The finished cycle's snapshot, made once."""
        if flight.snapshot is None:
            self._flight = None
            outcomes = [task.result() for task in flight.tasks.values()]
            self._tried.update(flight.tasks)
            for outcome in outcomes:
                self._counts.add(outcome)
                self._notice(outcome)
            shown = [outcome for outcome in outcomes if outcome.vendor in self._present]
            flight.snapshot = self._assemble(shown)
            if flight.generation == self._generation:  # else it asked the backends of settings that are gone
                self._last, self._last_within = flight.snapshot, flight.within_seconds
                self._finished = _Finished(shown, flight.snapshot.fleets, len(self._asker.answers))
                self._last_began, self._last_finished = flight.started, time.monotonic()
            self._observe(flight.snapshot, shown)
        return flight.snapshot

    def _notice(self, outcome: VendorOutcome) -> None:
        """A vendor that nobody named is present once it has served, or once a card is seen on the bus."""
        vendor = outcome.vendor
        if vendor in self._present or vendor not in self._sources:
            return
        if outcome.sample is not None or self._sources[vendor].expected():
            self._present.add(vendor)

    def _so_far(self, flight: _Flight) -> Snapshot:
        """A page for one whose deadline is shorter than the cycle's: what has answered, and who has not."""
        late = Fault("hung", "no answer by the scrape's deadline")
        waited = time.monotonic() - flight.started
        return self._assemble(
            [
                task.result() if task.done() else VendorOutcome(vendor=vendor, fault=late, duration_seconds=waited)
                for vendor, task in flight.tasks.items()
                if vendor in self._present
            ]
        )

    def _from_background(self, last: Snapshot) -> Snapshot:
        age = time.monotonic() - self._last_finished
        if age <= _BACKGROUND_KEEPS * (self._sampling.interval_seconds or 0.0):
            return self._with_fleets_of_now(last)
        stale = Fault("stale", f"the last background cycle ended {age:.1f} s ago")
        return self._assemble(
            [VendorOutcome(vendor=vendor, fault=stale, duration_seconds=age) for vendor in sorted(self._present)]
        )

    def _assemble(self, outcomes: Sequence[VendorOutcome], fleets: tuple[Fleet, ...] | None = None) -> Snapshot:
        """The snapshot of these outcomes; fleets are asked for after them, so that whoever has ended is in neither."""
        fleets = self._watched.now(_using(outcomes)) if fleets is None else fleets
        may_ask = self._mapping.probe != "never" and "probed" in self._mapping.accept
        answers = self._asker.answers if may_ask else None
        known = Known(self._mapping.accept, time.clock_gettime(time.CLOCK_BOOTTIME), answers)
        mappings, self._bound, questions = bind(fleets, outcomes, self._bound, known)
        self._asker.want(questions)
        backends = tuple(status_of(outcome, self._counts, self._expected) for outcome in outcomes)
        snapshot = attribute(outcomes, mappings, backends)
        samples = (outcome.sample for outcome in outcomes if outcome.sample is not None)
        usage = usage_of(snapshot, samples, fleets, self._usage)
        return msgspec.structs.replace(snapshot, fleets=fleets, left_out=self._watched.left_out, usage=usage)

    async def _sample_at(self, interval_seconds: float) -> None:
        while True:
            started = time.monotonic()
            await self._cycle(min(self._sampling.deadline_seconds, _BACKGROUND_LASTS * interval_seconds))
            await asyncio.sleep(max(0.0, started + interval_seconds - time.monotonic()))
