"""The child process of one vendor: ``python -m exporter.worker VENDOR``, with the parent's socket as standard input.

Every call into the vendor's library runs in a daemon thread, in a lane of its slot's name, or of the library's for
starting and counting (:mod:`exporter.lanes`). A call that does not return leaves its lane busy, costs that card its
readings, and is not waited for again. What comes after its cycle's deadline is thrown away. The process leaves with
``os._exit``: a hung lane cannot be joined.
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
from typing import NamedTuple, NoReturn

from exporter import __version__, backends
from exporter.backends.base import Backend, Places
from exporter.errors import BackendAbsent, BackendError, DeviceAsleep, DeviceFault, DeviceLost
from exporter.lanes import PATIENCE_SECONDS, Batch, Job, Lanes
from exporter.model import Device, DeviceKey, DeviceState, Fault, Hint, Reading, State, User, VendorSample
from exporter.parent import asks, end_unless_of_version, end_with_the_parent
from exporter.wire import Answer, Ask, frame

LIBRARY = "library"
# A driver without persistence takes seconds to start; after this long its start counts as a hang.
_STARTING_SECONDS = 10.0
# How much of a cycle may go into counting the cards when it is known from before which there were.
_COUNTING_SHARE = 0.25
# How often it is looked whether counting has become reading, which may then have to be hastened.
_LOOK_SECONDS = 0.05


class CardReport(NamedTuple):
    """A slot that was identified and read: the card and its parts, and all that they gave."""

    devices: tuple[Device, ...]
    readings: tuple[Reading, ...] = ()
    faults: tuple[Fault, ...] = ()
    hints: tuple[Hint, ...] = ()
    pending: bool = False
    users: tuple[User, ...] = ()


class Sleeping(NamedTuple):
    """A slot whose card sleeps, and what is known of it."""

    devices: tuple[Device, ...]


Result = CardReport | Sleeping | BaseException | None

_Event = Batch | Ask


class Turn:
    """One cycle: its ask, and the slots that are read in it, chosen once, by whoever comes first. ``fresh``: they were
    counted since the cycle before. While there are none the library is still starting.
    """

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
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


class Worker:
    """Answers the parent's asks, one after the other."""

    def __init__(self, backend: Backend) -> None:
        self.events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._backend = backend
        self._until = 0.0
        self._library_since = 0.0
        self._opened = False
        self._slots: Sequence[str] = ()
        self._counted = False
        self._half_known: set[str] = set()
        self._lanes = Lanes()
        self._known: dict[str, tuple[Device, ...]] = {}

    def answer(self, ask: Ask) -> Answer:
        """One cycle; returns by ``ask.until``, or earlier where the ask is repeated, whatever the library does."""
        self._until = ask.until
        try:
            turn, results = self._cycle(ask)
            if not turn.slots:
                return Answer(ask.cycle, fault=self._not_started())
            sample = self._compile(turn.slots, results, turn.fresh)
            if not sample.devices and sample.faults:  # no card has told who it is: there is nothing to show
                return Answer(ask.cycle, fault=sample.faults[0])
        except BackendAbsent as absent:
            return Answer(ask.cycle, fault=Fault(absent.reason, absent.detail), final=True)
        return Answer(ask.cycle, sample=sample)

    def _cycle(self, ask: Ask) -> tuple[Turn, dict[str, Result]]:
        """Count the slots and read what is in them, all in the library's lane while nothing holds it up. Where counting
        takes too long, slots that were counted before are read.
        """
        turn = Turn(ask)
        batch = Batch({}, self.events.put)
        if not self._lanes.busy(LIBRARY):
            self._library_since = time.monotonic()
            batch.add({LIBRARY: functools.partial(self._open_count_and_read, turn, batch)})
            self._wait(turn, batch)
        if turn.begin(self._slots, self._counted):
            self._counted = False
            _raise_failed(batch.close().get(LIBRARY))
            batch = Batch(self._jobs(turn), self.events.put)
        self._wait(turn, batch)
        results = batch.close()
        _raise_failed(results.pop(LIBRARY, None))
        return turn, results

    def _open_count_and_read(self, turn: Turn, batch: Batch) -> None:
        """Runs in the library's lane. A count that comes too late for its cycle serves the next."""
        if not self._opened:
            self._backend.open()
            self._opened = True
        slots = self._backend.slots()
        if slots != self._slots:  # what was in a slot says nothing any more of what is there
            self._known = {}
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
        idle = (slot for slot in turn.slots if not self._lanes.busy(slot))
        return {slot: functools.partial(self._read_slot, slot, turn.ask.users) for slot in idle}

    def _read_slot(self, slot: str, with_users: bool) -> Result:
        """Runs in the slot's lane. Who is there is noted first, so that a card that hangs while it is read is known."""
        try:
            devices = self._backend.identify(slot, lambda device: self._note(slot, device))
            self._known[slot] = devices
            self._half_known.discard(slot)
            sampled = [self._backend.sample(device) for device in devices]
            pairs = ((device.key, pid) for device in devices if with_users for pid in self._backend.users(device))
            users = tuple(User(key, pid) for key, pid in pairs)
        except DeviceAsleep:
            self._half_known.discard(slot)
            return Sleeping(self._backend.asleep(slot))
        readings = tuple(reading for entry in sampled for reading in entry.readings)
        faults = tuple(fault for entry in sampled for fault in entry.faults)
        hints = tuple(hint for entry in sampled for hint in entry.hints)
        return CardReport(devices, readings, faults, hints, any(entry.pending for entry in sampled), users)

    def _note(self, slot: str, device: Device) -> None:
        """A card's identity, before anything else of it: kept unless the same card is known better."""
        known = self._known.get(slot, ())
        if not any(before.key == device.key for before in known):
            self._known[slot] = (device,)
            self._half_known.add(slot)

    def _wait(self, turn: Turn, batch: Batch) -> None:
        """Until the batch has ended, or the cycle's time is over, of which counting has a share where slots are known
        from before. Ends of earlier batches mean nothing any more.
        """
        started = now = time.monotonic()
        if not batch.done and not batch.threads:
            self._lanes.start(batch)
        while not batch.done:
            share = _COUNTING_SHARE if self._slots and not turn.slots else 1.0
            left = started + share * (self._until - started) - now
            if left <= 0:
                break
            try:
                event = self.events.get(timeout=min(left, PATIENCE_SECONDS if batch.waiting else _LOOK_SECONDS))
            except queue.Empty:
                self._lanes.hasten(batch)
            else:
                if isinstance(event, Ask) and event.cycle == turn.ask.cycle:
                    self._until = min(self._until, event.until)
            now = time.monotonic()

    def _compile(self, slots: Sequence[str], results: Mapping[str, Result], fresh: bool) -> VendorSample:
        for gone in self._known.keys() - set(slots):
            self._known.pop(gone, None)  # a late count may have emptied it meanwhile
        page = _Page()
        absent = [result for result in results.values() if isinstance(result, BackendAbsent)]
        if absent:
            raise absent[0]
        # Cards that were read come first: a card that moved to another slot is known there, not where it was.
        for slot in sorted(slots, key=lambda slot: not isinstance(results.get(slot), CardReport)):
            result = results.get(slot)
            if isinstance(result, CardReport | Sleeping):
                self._known[slot] = result.devices
            page.add(slot, result, self._known.get(slot, ()))
        page.whole = page.whole and not self._half_known & set(slots)
        if page.failed == len(slots):
            raise BackendAbsent(page.faults[0].reason, f"no card can be read: {page.faults[0].detail}")
        return page.sample(self._backend, whole=fresh and page.whole)


class _Page:
    """A sample in the making."""

    def __init__(self) -> None:
        self.devices: dict[DeviceKey, Device] = {}
        self.states: dict[DeviceKey, State] = {}
        self.readings: list[Reading] = []
        self.faults: list[Fault] = []
        self.hints: set[Hint] = set()
        self.users: list[User] = []
        self.pending = False
        self.whole = True
        self.failed = 0

    def add(self, slot: str, result: Result | None, devices: tuple[Device, ...]) -> None:
        """One slot's result (None: its lane did not answer), with the devices that are, or were last, there."""
        state: State = "ok"
        if isinstance(result, CardReport):
            # Only cards that were read in this cycle have been added before.
            devices = self._unseen(slot, devices)
            known = {device.key for device in devices}
            self.readings += (reading for reading in result.readings if reading.key in known)
            self.faults += result.faults
            self.hints.update(result.hints)
            self.users += (user for user in result.users if user.key in known)
            self.pending = self.pending or result.pending
            if result.faults and not result.readings and not result.pending:  # it says who it is, and nothing else
                state = "lost"
                self.failed += 1
        elif isinstance(result, Sleeping):
            state = "asleep"
        else:
            state = "hung" if result is None else "lost"
            self.faults.append(_fault_of(slot, result, devices[0].key if devices else None))
            self.failed += result is not None and not isinstance(result, DeviceLost)
            # What was in the slot may have been read in another by now: who is here is not known then.
            self.whole = self.whole and any(device.key not in self.devices for device in devices)
        for device in devices:
            if device.key not in self.devices:
                self.devices[device.key] = device
                self.states[device.key] = state

    def _unseen(self, slot: str, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        """Without devices that another slot has given too: whose values would they be? Neither slot's are shown."""
        for device in devices:
            if device.key in self.devices:
                self.whole = False  # there is a card more than there are names
                self.states[device.key] = "lost"
                self.readings = [reading for reading in self.readings if reading.key != device.key]
                self.faults.append(Fault("driver-error", f"{slot}: {device.uuid} is in another slot too", device.key))
        return tuple(device for device in devices if device.key not in self.devices)

    def sample(self, backend: Backend, *, whole: bool) -> VendorSample:
        """What was gathered, in the order of physical indices."""
        order = sorted(self.devices.values(), key=_place)
        return VendorSample(
            vendor=backend.vendor,
            driver_version=backend.driver_version,
            whole=whole,
            devices=tuple(order),
            states=tuple(DeviceState(key, state) for key, state in self.states.items()),
            readings=tuple(self.readings),
            faults=tuple(self.faults),
            hints=tuple(sorted(self.hints)),
            pending=self.pending,
            users=tuple(self.users),
        )


def _place(device: Device) -> tuple[int, str, int]:
    index = -1 if device.mig_index is None else device.mig_index
    return (2**31 if device.physical_index is None else device.physical_index), device.pci_bus_id, index


def _raise_failed(result: Result) -> None:
    """Raises ``BackendAbsent`` where starting or counting has failed."""
    if isinstance(result, BackendAbsent):
        raise result
    if isinstance(result, BaseException):
        raise BackendAbsent("internal-error", f"{type(result).__name__}: {result}")


def _fault_of(slot: str, result: Result | None, key: DeviceKey | None) -> Fault:
    if result is None:
        return Fault("hung", f"{slot}: a call has not returned", key)
    if isinstance(result, DeviceFault | DeviceLost | BackendError):
        return Fault(result.reason, result.detail, key)
    return Fault("internal-error", f"{slot}: {type(result).__name__}: {result}", key)


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


def serve(backend: Backend, parent: socket.socket) -> None:
    """Answer asks until an answer is final."""
    worker = Worker(backend)
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
    parser.add_argument("--daemon-version", default=__version__)
    options = parser.parse_args(arguments)
    end_unless_of_version(options.daemon_version)
    end_with_the_parent()
    # Control-C at a terminal reaches the whole process group; the parent decides when a worker ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    status = 0
    try:
        with socket.socket(fileno=os.dup(0)) as parent:
            places = Places(options.sysfs, options.procfs, options.shared_object, cautious=options.cautious)
            serve(backends.create(options.vendor, places), parent)
    except OSError:  # the parent went away while being answered
        status = 1
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
