"""Follows the fleets of live processes in a thread of its own, and says at any time which of them live now."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from msgspec.structs import replace

from exporter.config import SOURCES, FleetSettings
from exporter.fleets import processes
from exporter.fleets.members import Registry
from exporter.fleets.scanner import Scanner
from exporter.fleets.users import Lives, Own, Survey, Users
from exporter.model import Fleet

log = logging.getLogger("exporter.fleets")

# What the kernel says of a process takes microseconds; one that hangs in it holds up whoever asks of its memory.
_HANGS_AFTER_SECONDS = 3.0
_FIRST_SCAN_SECONDS = 5.0
# Each leaves a thread behind. With more the fleets stay as they are, and still end with their programs.
_MOST_HANGING = 32


def is_live(entry: FleetSettings) -> bool:
    """Whether the entry's environment is that of processes."""
    return any(getattr(entry, name) is not None for name in SOURCES)


def _used_by(life: Lives, found: Own) -> Fleet:
    if life.fleet.live is None:
        return life.fleet
    own, unclear = found.own, found.unclear
    return replace(life.fleet, live=replace(life.fleet.live, pids=found.counted, own=own, unclear=unclear))


class _SupersededError(Exception):
    """Another thread looks by now."""


class Watch:
    """Looks every ``scan_seconds`` until it is stopped. What :meth:`fleets` does takes some microseconds a fleet."""

    def __init__(
        self,
        entries: Sequence[FleetSettings],
        *,
        procfs: str,
        sysfs: str,
        most: int,
        scan_seconds: float,
        before: Watch | None = None,
    ) -> None:
        """``before`` is the watch of earlier settings: when it saw a program first is when that was seen first."""
        self._procfs, self._scan_seconds = procfs, scan_seconds
        registry = None if before is None else before.registry.copy()
        self._scanner = Scanner(entries, procfs, sysfs, most, busy=self._busy, registry=registry)
        self._left_behind = 0
        self._survey = Survey()
        self._lock = threading.Lock()
        self._wake, self._first, self._stopped = threading.Event(), threading.Event(), threading.Event()
        self._busy_with: tuple[int, float] | None = None
        self._thread: threading.Thread | None = None
        self._begun = 0.0
        self._late_for = 0.0
        self._failed = ""

    def start(self) -> None:
        """Look for the first time, and from now on; waits for the first look, though not for ever."""
        self._look_in_a_thread()
        until = time.monotonic() + _FIRST_SCAN_SECONDS
        while not self._stopped.is_set() and not self._first.wait(0.05) and time.monotonic() < until:
            self._see_to_the_thread()

    @property
    def runtimes(self) -> frozenset[str]:
        """Those of all entries."""
        return self._scanner.runtimes

    @property
    def registry(self) -> Registry:
        """What is known of programs."""
        return self._scanner.registry

    def stop(self) -> None:
        """Look no more; what the thread is at is not waited for."""
        self._stopped.set()
        self._wake.set()

    def fleets(self, using: Mapping[int, float] = MappingProxyType({})) -> tuple[Fleet, ...]:
        """The fleets that live now. One whose programs have all ended since the last look is not among them, and the
        next look is at once, as it is where an unknown process uses a device. Of a fleet's process numbers those are
        given that are among ``using``, which has when each was seen to use a device, where that was the program that is
        there now.
        """
        self._see_to_the_thread()
        survey = self._survey
        users = Users(self._procfs, survey, using)
        if users.late and survey.began != self._late_for:
            self._late_for = survey.began
            self._wake.set()
        return tuple(_used_by(life, users.of(life)) for life in survey.lives if self._lives(life))

    @property
    def left_out(self) -> int:
        """How many fleets were found beyond those that are shown."""
        return self._survey.left_out

    def _lives(self, life: Lives) -> bool:
        """Whether a program of it still runs. Where the oldest does not, the others are looked at anew, at once: what
        they are bound to is the inventory of the time when the oldest was started.
        """
        for place, (program, _) in enumerate(life.programs):
            if processes.runs(self._procfs, program):
                return True
            if place == 0:
                self._wake.set()
        return not life.programs

    def _look_in_a_thread(self) -> None:
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="fleets", daemon=True)
        self._thread.start()

    def _see_to_the_thread(self) -> None:
        """Where the thread hangs with a process, another goes on without that process; so does one where it died."""
        with self._lock:
            busy, now = self._busy_with, time.monotonic()
            hangs = busy is not None and now - busy[1] > _HANGS_AFTER_SECONDS
            died = self._thread is not None and not self._thread.is_alive() and now - self._begun > _HANGS_AFTER_SECONDS
            if self._stopped.is_set() or not (hangs or died) or self._left_behind >= _MOST_HANGING:
                return
            if busy is not None:
                self._scanner.hanging.add(busy[0])
                self._left_behind += 1
            self._busy_with = None
            self._look_in_a_thread()
        log.warning("process hangs" if hangs else "look failed", extra={"fields": {"pid": busy[0] if busy else None}})

    def _busy(self, pid: int | None) -> None:
        with self._lock:
            if threading.current_thread() is not self._thread:
                raise _SupersededError
            self._busy_with = None if pid is None else (pid, time.monotonic())

    def _run(self) -> None:
        try:
            for _ in self._ticks():
                self._look()
        except _SupersededError:
            return

    def _ticks(self) -> Iterator[None]:
        while not self._stopped.is_set():
            yield
            self._wake.wait(self._scan_seconds)
            self._wake.clear()

    def _look(self) -> None:
        try:
            survey, failed = self._scanner.scan(), ""
        except OSError as error:
            failed = f"{self._procfs}: {error.strerror}"
            survey = self._scanner.unseen(failed)
        if failed and failed != self._failed:
            log.warning("processes cannot be listed", extra={"fields": {"detail": failed}})
        self._failed = failed
        self._say_left_out(survey.left_out)
        self._survey = survey
        self._first.set()

    def _say_left_out(self, count: int) -> None:
        if count != self._survey.left_out:
            level = logging.WARNING if count > self._survey.left_out else logging.INFO
            log.log(level, "fleets left out", extra={"fields": {"count": count}})
