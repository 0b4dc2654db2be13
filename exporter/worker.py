"""The child process of one vendor: ``python -m exporter.worker VENDOR``, with the parent's socket as standard input.

Every call into the vendor's library runs in a daemon thread, in a lane of its slot's name, or of the library's for
starting and counting (:mod:`exporter.lanes`). A call that does not return leaves its lane busy, costs that card its
readings, and is not waited for again, unless a much shorter cycle left it so. What comes after its cycle's deadline is
thrown away. The process leaves with ``os._exit``: a hung lane cannot be joined.
"""

from __future__ import annotations

import argparse
import functools
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from exporter import __version__, backends
from exporter.backends.base import Backend, Places
from exporter.catalog import DEFAULT
from exporter.errors import BackendAbsent, DeviceAsleep
from exporter.gathered import CardReport, Page, Result, Sleeping
from exporter.lanes import PATIENCE_SECONDS, Batch, Job, Lanes
from exporter.model import Device, Fault, User, VendorSample
from exporter.parent import asks, end_unless_of_version, end_with_the_parent
from exporter.wire import Answer, Ask, frame

LIBRARY = "library"
# A driver without persistence takes seconds to start; after this long its start counts as a hang.
_STARTING_SECONDS = 10.0
# How much of a cycle may go into counting the cards when it is known from before which there were.
_COUNTING_SHARE = 0.25
# How often it is looked whether counting has become reading, which may then have to be hastened.
_LOOK_SECONDS = 0.05
# A lane that has been busy for less than this share of a cycle is waited for: a shorter cycle left it so.
_YOUNG_SHARE = 0.5


_Event = Batch | Ask


class Turn:
    """One cycle: its ask, and the slots that are read in it, chosen once, by whoever comes first. ``fresh``: they were
    counted since the cycle before. While there are none the library is still starting. ``until`` is when it ends.
    """

    def __init__(self, ask: Ask) -> None:
        self.ask, self.until = ask, ask.until
        self.patience = _YOUNG_SHARE * (ask.until - time.monotonic())
        self.slots: Sequence[str] = ()
        self.fresh = False
        self._begun = False
        self._lock = threading.Lock()

    def begin(self, slots: Sequence[str], fresh: bool) -> bool:
        """Read these slots; False where others are being read already."""
        with self._lock:
            if self._begun:
                return False
            self._begun, self.slots, self.fresh = True, slots, fresh
            return True


class Known:
    """The devices that were last seen in each slot; ``half`` are the slots whose card has told its name and no more.
    When the slots change there is a new one: a call that began before writes into the old one, where nobody reads it.
    """

    def __init__(self) -> None:
        self.devices: dict[str, tuple[Device, ...]] = {}
        self.half: set[str] = set()

    def note(self, slot: str, device: Device) -> None:
        """A card's identity, before anything else of it: kept unless the same card is known better."""
        if not any(before.key == device.key for before in self.devices.get(slot, ())):
            self.devices[slot] = (device,)
            self.half.add(slot)

    def take(self, slot: str, devices: tuple[Device, ...]) -> None:
        """All that is in a slot."""
        self.devices[slot] = devices
        self.half.discard(slot)

    def keep(self, slots: Sequence[str]) -> None:
        """Forget the other slots."""
        for gone in self.devices.keys() - set(slots):
            del self.devices[gone]


class Worker:
    """Answers the parent's asks, one after the other, with the readings of the ``wanted`` metrics."""

    def __init__(self, backend: Backend, wanted: frozenset[str] = DEFAULT) -> None:
        self.events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._backend, self._wanted = backend, wanted
        self._library_since = 0.0
        self._opened = False
        self._slots: Sequence[str] = ()
        self._counted = False
        self._lanes = Lanes()
        self._known = Known()

    def answer(self, ask: Ask) -> Answer:
        """One cycle; returns by ``ask.until``, or earlier where the ask is repeated, whatever the library does."""
        try:
            turn = Turn(ask)
            results = self._cycle(turn)
            if not turn.slots:
                return Answer(ask.cycle, fault=self._not_started())
            sample = self._compile(turn.slots, results, turn.fresh)
            if not sample.devices and sample.faults:  # no card has told who it is: there is nothing to show
                return Answer(ask.cycle, fault=sample.faults[0])
        except BackendAbsent as absent:
            return Answer(ask.cycle, fault=Fault(absent.reason, absent.detail), final=True)
        return Answer(ask.cycle, sample=sample)

    def _cycle(self, turn: Turn) -> dict[str, Result]:
        """Count the slots and read what is in them, all in the library's lane while nothing holds it up. Where counting
        takes too long, slots that were counted before are read.
        """
        batch = Batch({}, self.events.put)
        if not self._lanes.busy(LIBRARY):
            self._library_since = time.monotonic()
        if self._may_end(LIBRARY, turn):
            batch.add({LIBRARY: functools.partial(self._open_count_and_read, turn, batch)})
            self._wait(turn, batch)
        if turn.begin(self._slots, self._counted):
            self._counted = False
            _raise_failed(batch.close().get(LIBRARY))
            batch = Batch(self._jobs(turn), self.events.put)
        self._wait(turn, batch)
        results = batch.close()
        _raise_failed(results.pop(LIBRARY, None))
        return results

    def _open_count_and_read(self, turn: Turn, batch: Batch) -> None:
        """Runs in the library's lane. A count that comes too late for its cycle serves the next."""
        if not self._opened:
            self._backend.open()
            self._opened = True
        slots = self._backend.slots()
        if slots != self._slots:  # what was in a slot says nothing any more of what is there
            self._known = Known()
        self._slots = slots
        begun = turn.begin(slots, True)
        self._counted = not begun
        if begun:
            batch.add(self._jobs(turn))
            if time.monotonic() - self._library_since > PATIENCE_SECONDS:  # else it is looked at soon enough
                self.events.put(batch)

    def _not_started(self) -> Fault:
        waited = time.monotonic() - self._library_since
        reason = "starting" if waited < _STARTING_SECONDS else "hung"
        return Fault(reason, f"the library has been starting for {waited:.0f} s")

    def _jobs(self, turn: Turn) -> dict[str, Job]:
        idle = (slot for slot in turn.slots if self._may_end(slot, turn))
        return {slot: functools.partial(self._read_slot, slot, turn.ask.users, self._known) for slot in idle}

    def _may_end(self, lane: str, turn: Turn) -> bool:
        """Whether a lane is idle, or has not yet been busy for so long that it is taken to be stuck."""
        patience = turn.patience * (_COUNTING_SHARE if lane == LIBRARY and self._slots else 1.0)
        return not self._lanes.busy(lane) or self._lanes.busy_seconds(lane) < patience

    def _read_slot(self, slot: str, with_users: bool, known: Known) -> Result:
        """Runs in the slot's lane. Who is there is noted first, so that a card that hangs while it is read is known."""
        try:
            devices = self._backend.identify(slot, lambda device: known.note(slot, device))
            known.take(slot, devices)
            sampled = [self._backend.sample(device) for device in devices]
            used = {device.key: self._backend.users(device) for device in devices if with_users}
        except DeviceAsleep:
            known.half.discard(slot)
            return Sleeping(self._backend.asleep(slot))
        found = (reading for entry in sampled for reading in entry.readings)
        readings = tuple(reading for reading in found if reading.metric in self._wanted)
        faults = tuple(fault for entry in sampled for fault in entry.faults)
        hints = tuple(hint for entry in sampled for hint in entry.hints)
        users = tuple(User(key, *use) for key, uses in used.items() for use in uses or ())
        users_of = tuple(key for key, uses in used.items() if uses is not None)
        return CardReport(devices, readings, faults, hints, any(entry.pending for entry in sampled), users, users_of)

    def _wait(self, turn: Turn, batch: Batch) -> None:
        """Until the batch has ended, or the cycle's time is over, of which counting has a share where slots are known
        from before. Ends of earlier batches mean nothing any more.
        """
        started = now = time.monotonic()
        if not batch.done and not batch.threads:
            self._lanes.start(batch)
        while not batch.done:
            share = _COUNTING_SHARE if self._slots and not turn.slots else 1.0
            left = started + share * (turn.until - started) - now
            if left <= 0:
                break
            try:
                event = self.events.get(timeout=min(left, PATIENCE_SECONDS if batch.waiting else _LOOK_SECONDS))
            except queue.Empty:
                self._lanes.hasten(batch)
            else:
                if isinstance(event, Ask) and event.cycle == turn.ask.cycle:
                    turn.until = min(turn.until, event.until)
            now = time.monotonic()

    def _compile(self, slots: Sequence[str], results: Mapping[str, Result], fresh: bool) -> VendorSample:
        known = self._known
        known.keep(slots)
        page = Page(narrowed=not self._wanted >= DEFAULT)
        absent = [result for result in results.values() if isinstance(result, BackendAbsent)]
        if absent:
            raise absent[0]
        # Cards that were read come first: a card that moved to another slot is known there, not where it was.
        for slot in sorted(slots, key=lambda slot: not isinstance(results.get(slot), CardReport)):
            result = results.get(slot)
            if isinstance(result, CardReport | Sleeping):
                known.devices[slot] = result.devices
            page.add(slot, result, known.devices.get(slot, ()))
        page.whole = page.whole and not known.half & set(slots)
        if page.failed == len(slots):
            raise BackendAbsent(page.faults[0].reason, f"no card can be read: {page.faults[0].detail}")
        return page.sample(self._backend.vendor, self._backend.driver_version, whole=fresh and page.whole)


def _raise_failed(result: Result) -> None:
    """Raises ``BackendAbsent`` where starting or counting has failed."""
    if isinstance(result, BackendAbsent):
        raise result
    if isinstance(result, BaseException):
        raise BackendAbsent("internal-error", f"{type(result).__name__}: {result}")


def listen(parent: socket.socket, events: queue.SimpleQueue[_Event]) -> NoReturn:
    """Put the parent's asks among the events; leave at once when the parent is gone, whatever is being waited for."""
    for ask in asks(parent):
        events.put(ask)
    os._exit(0)


def _framed(answer: Answer) -> bytes:
    """The answer, or that it cannot be told: a backend's number of more than 64 bits."""
    try:
        return frame(answer)
    except OverflowError as error:
        return frame(Answer(answer.cycle, fault=Fault("internal-error", f"an answer cannot be told: {error}")))


def serve(backend: Backend, wanted: frozenset[str], parent: socket.socket) -> None:
    """Answer asks until an answer is final."""
    worker = Worker(backend, wanted)
    threading.Thread(target=listen, args=(parent, worker.events), name="parent", daemon=True).start()
    answered = 0
    final = False
    while not final:
        event = worker.events.get()
        if isinstance(event, Ask) and event.cycle > answered:
            answer = worker.answer(event)
            parent.sendall(_framed(answer))
            answered, final = event.cycle, answer.final


def main(arguments: Sequence[str]) -> NoReturn:
    """The process: never returns, since lanes may hang."""
    parser = argparse.ArgumentParser(prog="exporter.worker")
    parser.add_argument("vendor", choices=sorted(backends.BACKENDS))
    parser.add_argument("--path.sysfs", dest="sysfs", default="/sys")
    parser.add_argument("--path.procfs", dest="procfs", default="/proc")
    parser.add_argument("--library", dest="shared_object", metavar="FILE")
    parser.add_argument("--cautious", action="store_true")
    parser.add_argument("--metrics", metavar="KEY,...", help="what to read; without it, all that is not costly")
    parser.add_argument("--daemon-version", default=__version__)
    options = parser.parse_args(arguments)
    end_unless_of_version(options.daemon_version)
    end_with_the_parent()
    # Control-C at a terminal reaches the whole process group; the parent decides when a worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = 0
    try:
        with socket.socket(fileno=os.dup(0)) as parent:
            wanted = DEFAULT if options.metrics is None else frozenset(filter(None, options.metrics.split(",")))
            places = Places(
                options.sysfs, options.procfs, options.shared_object, cautious=options.cautious, wanted=wanted
            )
            serve(backends.create(options.vendor, places), wanted, parent)
    except OSError:  # the parent went away while being answered
        status = 1
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
