"""Which of the processes that use the host's devices are a fleet's own.

The kernel is asked who runs and who was started by whom, which needs no look at the memory of a process.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from exporter.fleets import processes
from exporter.fleets.processes import Incarnation, Stat
from exporter.model import Fleet

_TICK_SECONDS = 0.01  # of the clock that a process's start is told by
_MOST_ANCESTORS = 64


class Kin(NamedTuple):
    """What an entry finds beside the programs of one of its fleets that count for the masks.

    ``programs`` are the fleet's own all the same, ``unsure`` numbers are of it or of another fleet of the entry. What
    the processes ``parents``, all that the entry finds, have started is of the same fleet as they; None where an entry
    says otherwise which processes it means. Those of a ``named`` entry are known without looking at all processes.
    """

    programs: tuple[tuple[Incarnation, float], ...] = ()
    unsure: frozenset[int] = frozenset()
    parents: frozenset[int] | None = None
    named: bool = False


class Lives(NamedTuple):
    """A fleet of processes, and the programs that it consists of, the oldest first, each with the time at which it was
    seen first (CLOCK_BOOTTIME); it ends with the last of them.
    """

    fleet: Fleet
    programs: tuple[tuple[Incarnation, float], ...] = ()
    kin: Kin = Kin()


class Survey(NamedTuple):
    """What one look found, and how many fleets there are beyond those that are shown.

    It began at that time (CLOCK_BOOTTIME). ``hidden``: processes of other users are not shown; into the ``hanging``
    ones it could not look. ``comparable``: drivers know processes by the same numbers.
    """

    lives: tuple[Lives, ...] = ()
    left_out: int = 0
    began: float = 0.0
    hidden: bool = False
    hanging: frozenset[int] = frozenset()
    comparable: bool = False


class Own(NamedTuple):
    """Users that are a fleet's: those that count for its masks, all, and those of which it is not known. None where
    drivers have other numbers.
    """

    counted: frozenset[int]
    own: frozenset[int] | None = None
    unclear: frozenset[int] = frozenset()


class Users:
    """Those of one moment: process numbers, and when each was seen to use a device (CLOCK_BOOTTIME)."""

    def __init__(self, procfs: str, survey: Survey, using: Mapping[int, float]) -> None:
        self._procfs, self._survey = procfs, survey
        self._stats: dict[int, Stat | None] = {}
        self._heirs: dict[frozenset[int], defaultdict[int, set[int]]] = {}
        self._using = {pid: asked for pid, asked in using.items() if self._was_there(pid, asked)}
        there = self._using if survey.comparable else {}
        self.late = frozenset(filter(self._is_late, there))
        """Those that were started too late for the look to see them: another look does."""
        self._unseen = self.late | frozenset(filter(self._is_unseen, there))

    def of(self, life: Lives) -> Own:
        """Those that are the fleet's own. A number of a program that has ended may be somebody else's by now, and was
        another's before.
        """
        counted = self._running(life.programs)
        if not self._survey.comparable:
            return Own(counted)
        programs = {program.pid: program for program, _ in (*life.programs, *life.kin.programs)}
        own = counted | self._running(life.kin.programs)
        unclear = {pid for pid in (programs.keys() & self._using.keys()) - own if self._stat(pid)}
        unclear |= life.kin.unsure & self._using.keys()
        if life.kin.parents is not None:
            for parent, started in self._started_by(life.kin.parents).items():
                if parent in programs and self._runs(programs[parent]):
                    own |= started
                elif parent in programs or parent in life.kin.unsure:
                    unclear |= started
        if not life.kin.named:
            unclear |= self._unseen
        return Own(counted, own, frozenset(unclear - own))

    def _running(self, programs: tuple[tuple[Incarnation, float], ...]) -> frozenset[int]:
        there = (program for program, seen in programs if self._using.get(program.pid, 0.0) >= seen)
        return frozenset(program.pid for program in there if self._runs(program))

    def _runs(self, program: Incarnation) -> bool:
        now = self._stat(program.pid)
        return now is not None and now.incarnation == program

    def _stat(self, pid: int) -> Stat | None:
        if pid not in self._stats:
            self._stats[pid] = processes.stat(self._procfs, pid)
        return self._stats[pid]

    def _was_there(self, pid: int, asked: float) -> bool:
        """A process that was started later has only the number of one that was seen; and what the exporter's own
        workers open is no use.
        """
        found = self._stat(pid)
        return found is None or (found.incarnation.started_seconds <= asked and found.parent != os.getpid())

    def _is_late(self, pid: int) -> bool:
        found = self._stat(pid)
        return found is not None and found.incarnation.started_seconds + _TICK_SECONDS > self._survey.began

    def _is_unseen(self, pid: int) -> bool:
        """Where processes are hidden, a number without one may be of one that has not ended."""
        return pid in self._survey.hanging or (self._survey.hidden and self._stat(pid) is None)

    def _started_by(self, parents: frozenset[int]) -> Mapping[int, set[int]]:
        """Users by which of these has started them, or who did, and so on; the first that is found so."""
        if parents not in self._heirs:
            heirs = self._heirs[parents] = defaultdict(set)
            for pid in self._using.keys() - parents:
                nearest = next((each for each in self._ancestors(pid) if each in parents), None)
                if nearest is not None:
                    heirs[nearest].add(pid)
        return self._heirs[parents]

    def _ancestors(self, pid: int) -> Iterator[int]:
        for _ in range(_MOST_ANCESTORS):
            found = self._stat(pid)
            if found is None or found.parent <= 1:
                return
            pid = found.parent
            yield pid
