"""A fleet's processes: what each was started with, which of them count, and which belong together. Pure but for its
reading of environments.

Of a fleet's processes those count that have a GPU's device file open. While none has, those do whose environment has a
mask that chooses devices; and where none has that either, all of a fleet that stands for one workload, and none of one
that stands for many. A shell that only started the workload counts in no case but the last.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from exporter.fleet_names import digest
from exporter.fleets import environment, processes
from exporter.fleets.environment import SLURM, OverwrittenError
from exporter.fleets.processes import Incarnation, Stat
from exporter.masks import RUNTIMES
from exporter.model import Opens, Refusal

# A process may be missing from a look: its pid file is just being written, or a file of it cannot be read.
_REMEMBERED_SECONDS = 60.0


class Started(NamedTuple):
    """What a program was started with: its masks and Slurm's variables, or why they cannot be told."""

    env: Mapping[str, str]
    refusal: Refusal | None = None

    @property
    def slurm(self) -> str | None:
        """The numbers of the cards that Slurm gave it."""
        return next((self.env[name] for name in SLURM if name in self.env), None)


class Span(NamedTuple):
    """When a program was started, in seconds of CLOCK_BOOTTIME: a process may have run another one for a while."""

    earliest: float
    latest: float


class Member(NamedTuple):
    """One process of a fleet."""

    incarnation: Incarnation
    name: str
    started: Started
    span: Span
    opens: Opens
    used: frozenset[str] = frozenset()


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def started(procfs: str, process: Stat) -> Started:
    """The environment of a process now; raises ``ProcessLookupError`` where there is no such process."""
    pid = process.incarnation.pid
    try:
        return Started(environment.read(procfs, process))
    except PermissionError:
        return Started({}, Refusal("no-permission", f"{procfs}/{pid}/environ: permission denied"))
    except (FileNotFoundError, ProcessLookupError) as error:
        raise ProcessLookupError(pid) from error
    except OSError as error:
        return Started({}, Refusal("process-hangs", f"{procfs}/{pid}/environ: {error.strerror}"))
    except OverwrittenError as error:
        return Started({}, Refusal("environment-overwritten", f"{procfs}/{pid}/environ: {error}"))


class Registry:
    """The environments of programs, each read when the program is seen first.

    It is read again now and then: where addresses are not random, a program that runs itself anew in its process
    cannot be told from the one before but by that. What a program has written over by then stays as it was.
    """

    def __init__(self, procfs: str) -> None:
        self._procfs = procfs
        self._known: dict[Incarnation, tuple[Started, Span]] = {}
        self._last: dict[int, tuple[Incarnation, float]] = {}

    def copy(self) -> Registry:
        """One that goes on from here, in another thread."""
        other = Registry(self._procfs)
        other._known, other._last = dict(self._known), dict(self._last)
        return other

    def of(
        self, process: Stat, otherwise: Started | None = None, *, again: bool = False
    ) -> tuple[Started, Span] | None:
        """What the program was started with, and when; None where it has ended, or another runs by now.

        With ``otherwise`` it is not read: that is the answer where it is not known already. With ``again`` it is read
        though it is known.
        """
        known = self._known.get(process.incarnation)
        if otherwise is not None:
            return known or (otherwise, Span(process.incarnation.started_seconds, _now()))
        if known is None or again:
            found = self._read(process)
            if found is not None and (known is None or (found.refusal is None and found != known[0])):
                could_not = known is not None and known[0].refusal is not None
                span = known[1] if known is not None and could_not else self._span(process.incarnation)
                known = self._known[process.incarnation] = (found, span)
        if known is not None:
            self._last[process.incarnation.pid] = (process.incarnation, _now())
        return known

    def _span(self, incarnation: Incarnation) -> Span:
        """From when it may have been started: since the process was, or since it was last seen to run another. One that
        could not be looked into may have been this one.
        """
        before, last = self._last.get(incarnation.pid, (incarnation, 0.0))
        is_next = before.started == incarnation.started and before.environment and last
        return Span(last if is_next else incarnation.started_seconds, _now())

    def _read(self, process: Stat) -> Started | None:
        incarnation = process.incarnation
        try:
            found = started(self._procfs, process)
        except ProcessLookupError:
            return None
        now = processes.stat(self._procfs, incarnation.pid)
        if now is None or now.incarnation != incarnation:
            return None
        if not incarnation.environment and (found.refusal is None or found.refusal.code != "no-permission"):
            return None  # about to run another program, which the kernel has not given its environment yet
        return found

    def keep(self, incarnations: Iterable[Incarnation]) -> None:
        """Forget all others, but those that were there a while ago and run still."""
        wanted, since = set(incarnations), _now() - _REMEMBERED_SECONDS
        last = {
            pid: (program, seen)
            for pid, (program, seen) in list(self._last.items())
            if program in wanted or (seen > since and processes.runs(self._procfs, program))
        }
        recent = wanted | {incarnation for incarnation, _ in last.values()}
        self._known = {each: found for each, found in list(self._known.items()) if each in recent}
        self._last = last


def counted(members: Sequence[Member], runtimes: Sequence[str], *, one_workload: bool) -> list[Member]:
    """The members that count, by the rule above. Where none of those that can be told counts, the others do."""
    told = [member for member in members if member.started.refusal is None]
    holding = [member for member in told if member.opens.holds]
    masked = [member for member in told if any(name in member.started.env for name in _choosing(runtimes))]
    hidden = [member for member in members if member.started.refusal is not None]
    return holding or masked or hidden or (told if one_workload else [])


def _choosing(runtimes: Iterable[str]) -> set[str]:
    return {name for runtime in runtimes for name in RUNTIMES[runtime].choosing}


class Group(NamedTuple):
    """Members with the same masks, which can open the same devices: what a fleet, or a part of one, consists of."""

    env: Mapping[str, str]
    members: tuple[Member, ...]

    @property
    def oldest(self) -> Member:
        """The member that was started first."""
        return min(self.members, key=lambda member: (member.incarnation.started, member.incarnation.pid))

    @property
    def opens(self) -> Opens:
        """What each of them can open; what one has open proves nothing for another."""
        held = frozenset.intersection(*(member.opens.held for member in self.members))
        return replace(self.oldest.opens, held=held)


def groups(members: Iterable[Member], runtimes: Sequence[str]) -> dict[str, Group]:
    """The groups of members by the ending of their fleet's name: none where there is one group, else ``/`` and eight
    digits that stand for the masks, Slurm's cards and the reach; they are the same on every host and after a restart.
    """
    by_masks: dict[str, list[Member]] = {}
    for member in members:
        by_masks.setdefault(_ending(member, runtimes), []).append(member)
    found = {ending: Group(_masks(same[0], runtimes), tuple(same)) for ending, same in by_masks.items()}
    return dict(zip([""], found.values(), strict=True)) if len(found) == 1 else found


class Others(NamedTuple):
    """Members that do not count, by the ending of the fleet that they are of, and those of which that is not known."""

    of: Mapping[str, Sequence[Member]]
    unsure: Sequence[Member]


def others(members: Iterable[Member], parts: Mapping[str, Group], runtimes: Sequence[str]) -> Others:
    """What does not count for masks is a part of the workload nevertheless: where there is one group it is of that,
    whatever its environment; else of the one with the same masks.
    """
    counting = {member.incarnation for group in parts.values() for member in group.members}
    of: dict[str, list[Member]] = {}
    unsure: list[Member] = []
    for member in members:
        if member.incarnation in counting:
            continue
        ending = next(iter(parts), "") if len(parts) == 1 else _ending(member, runtimes)
        of.setdefault(ending, []).append(member) if ending in parts else unsure.append(member)
    return Others(of, unsure)


def _masks(member: Member, runtimes: Iterable[str]) -> dict[str, str]:
    return {name: value for name, value in sorted(member.started.env.items()) if _reads(runtimes, name)}


def _ending(member: Member, runtimes: Sequence[str]) -> str:
    return f"/{digest(_told_apart_by(_masks(member, runtimes), member))}"


def _reads(runtimes: Iterable[str], name: str) -> bool:
    return any(RUNTIMES[runtime].reads(name) for runtime in runtimes)


def _told_apart_by(env: Mapping[str, str], member: Member) -> str:
    opens, refusal = member.opens, member.started.refusal
    files = None if opens.may is None else sorted(opens.may)
    code = "" if refusal is None else refusal.code
    told = (member.started.slurm, files, sorted(opens.unsure), opens.filtered, opens.here, code)
    return repr((sorted(env.items()), *told))
