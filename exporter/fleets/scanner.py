"""One look at the host's processes: which fleets live, and what is known of each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from exporter.config import FleetSettings
from exporter.facts import FACTS
from exporter.fleet_names import digest, filled, placeholders
from exporter.fleets import processes, sources
from exporter.fleets.access import Access
from exporter.fleets.clients import computing
from exporter.fleets.members import Group, Member, Registry, Started, counted, groups, others
from exporter.fleets.processes import Incarnation, Table
from exporter.fleets.sources import Looked, PidFileError, PidFiles, Values
from exporter.fleets.users import Kin, Lives, Survey
from exporter.masks import DEFAULT_RUNTIMES
from exporter.model import Fleet, Live, Opens, Refusal

_MOST_TOLD = 5
# So many members are looked at in each scan, a third of a millisecond each; more in turns, once they are not young.
_FEW = 300
# A process may have hung for a moment, as when it fills a large piece of memory.
_FORGIVEN_SCANS = 60
_HANGS = Started({}, Refusal("process-hangs", "the kernel does not answer what is asked of its memory"))

Pids = Mapping[str, Sequence[int]]
"""Process numbers by the name of the fleet that they make up."""


class _Observed(NamedTuple):
    """What was seen of a program, and in how many scans; ``used`` are PCI addresses of cards that compute for it."""

    scans: int
    opens: Opens
    used: frozenset[str] = frozenset()


_UNSEEN = _Observed(0, Opens(may=None))


class Scanner:
    """Looks again and again, a look at a time.

    ``busy`` is told of each process before the kernel is asked of its memory, and of None at the end: a process may
    hang in the kernel, and then whoever asks does too. Those in ``hanging`` are not asked of again.
    """

    def __init__(
        self,
        entries: Sequence[FleetSettings],
        procfs: str,
        sysfs: str,
        most: int,
        *,
        busy: Callable[[int | None], None] = lambda pid: None,
        registry: Registry | None = None,
    ) -> None:
        """``registry`` is what is known of programs already."""
        self.hanging: set[int] = set()
        self._entries, self._procfs, self._most, self._busy = tuple(entries), procfs, most, busy
        self._sources = {place: found for place, each in enumerate(entries) if (found := sources.source_of(each))}
        self._table = Table(procfs, self._look)
        self.registry = registry or Registry(procfs)
        self._pid_files = PidFiles(procfs)
        self._access = Access(procfs, sysfs)
        self._observed: dict[Incarnation, _Observed] = {}
        self._scan, self._few = 0, True

    @property
    def runtimes(self) -> frozenset[str]:
        """Those of all entries."""
        return frozenset(runtime for entry in self._entries for runtime in runtimes_of(entry))

    def scan(self) -> Survey:
        """One look at all processes. Raises ``OSError`` where the host's processes cannot be listed."""
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._scan += 1
        if self._scan % _FORGIVEN_SCANS == 0:
            self.hanging.clear()
        self._access.refresh()
        listed = self._listed() if self._sources else {}
        members: dict[int, Member | None] = {}
        lives: list[Lives] = []
        for place, entry in enumerate(self._entries):
            lives += self._lives_of(entry, listed.get(place, {}), members)
        programs = {member.incarnation for member in members.values() if member is not None}
        self.registry.keep(programs)
        self._few = len(programs) <= _FEW
        self._observed = {program: seen for program, seen in self._observed.items() if program in programs}
        self._busy(None)
        return _within(lives, self._most)._replace(
            began=began,
            hidden=processes.hidden(self._procfs),
            hanging=frozenset(self.hanging),
            comparable=processes.are_the_hosts(self._procfs),
        )

    def of_process(self, entry: FleetSettings, pid: int) -> Fleet | None:
        """One process as a fleet of its own; None where there is none of that number."""
        self._access.refresh()
        member = self._member(pid)
        if member is None:
            return None
        ((_, group),) = groups([member], runtimes_of(entry)).items()
        return self._fleet(entry, entry.name, group)

    def at_work(self, runtimes: Sequence[str]) -> Iterator[int]:
        """The processes of the host that have a GPU open, or a mask that chooses devices."""
        self._access.refresh()
        for pid in processes.numbers(self._procfs):
            member = self._member(pid)
            if member is None or member.started.refusal or not counted([member], runtimes, one_workload=False):
                continue
            if "exporter.worker" not in processes.command(self._procfs, pid):  # a daemon's, which has all cards open
                yield pid

    def _listed(self) -> dict[int, dict[str, list[int]]]:
        """Process numbers by the place of the entry in the settings, and by the fleet's name."""
        listed: dict[int, dict[str, list[int]]] = {}
        for pid, found in self._table.scan(self.hanging):
            for place, values in found:
                name = filled(self._entries[place].name, values)
                listed.setdefault(place, {}).setdefault(name, []).append(pid)
        return listed

    def _look(self, pid: int) -> Sequence[tuple[int, Values]]:
        self._busy(pid)
        process = Looked(self._procfs, pid)
        found = ((place, source.look(process)) for place, source in self._sources.items())
        return [(place, values) for place, values in found if values is not None]

    def _lives_of(self, entry: FleetSettings, pids: Pids, members: dict[int, Member | None]) -> Iterator[Lives]:
        gone, unseen, forbidden = f"no process of the {_source_words(entry)}", True, False
        if entry.pid_file is not None:
            try:
                pids = {entry.name: [self._pid_files.process(entry.pid_file)]}
            except PidFileError as error:
                gone, unseen, forbidden = str(error), error.unseen, error.forbidden
        one_workload, runtimes = not placeholders(entry.name), runtimes_of(entry)
        parents = _parents(entry, pids)
        found = False
        for name, numbers in sorted(pids.items()):
            there = [member for pid in numbers if (member := self._known_member(pid, members))]
            parts = groups(counted(there, runtimes, one_workload=one_workload), runtimes)
            rest = others(there, parts, runtimes)
            untold = set(numbers) - {member.incarnation.pid for member in there}
            for ending, group in sorted(parts.items()):
                found = True
                unsure = frozenset((*untold, *(member.incarnation.pid for member in rest.unsure)))
                named = entry.pid_file is not None
                kin = Kin(_programs(rest.of.get(ending, ())), unsure, parents, named=named)
                yield Lives(self._fleet(entry, name + ending, group), _programs(group.members), kin)
        if forbidden:
            yield _none(entry, Refusal("no-permission", gone))
        elif not found and unseen and processes.hidden(self._procfs):
            detail = f"{self._procfs} does not show the processes of other users; of those that are shown: {gone}"
            yield _none(entry, Refusal("no-permission", detail))
        elif one_workload and not found:
            yield _none(entry, Refusal("process-gone", gone))

    def unseen(self, why: str) -> Survey:
        """What there is where processes cannot be listed."""
        gone = Refusal("process-gone", why)
        return Survey(tuple(_none(entry, gone) for entry in self._entries if not placeholders(entry.name)))

    def _known_member(self, pid: int, members: dict[int, Member | None]) -> Member | None:
        """Each process is looked at once in a scan, whichever fleets it is in."""
        if pid not in members:
            members[pid] = self._member(pid)
        return members[pid]

    def _member(self, pid: int) -> Member | None:
        found = processes.stat(self._procfs, pid)
        if found is None or os.getpid() in (pid, found.parent):
            return None
        hangs = pid in self.hanging
        if not hangs:
            self._busy(pid)
        before = self._observed.get(found.incarnation)
        again = before is None or self._few or processes.is_due(before.scans, pid, self._scan)
        program = self.registry.of(found, _HANGS if hangs else None, again=again)
        if program is None:
            return None
        seen = _UNSEEN if hangs else before if before is not None and not again else self._observe(found.incarnation)
        return Member(found.incarnation, found.name, *program, seen.opens, seen.used)

    def _observe(self, program: Incarnation) -> _Observed:
        """What a program can use, and does."""
        pid, before = program.pid, self._observed.get(program)
        opens = self._access.of(pid)
        used = computing(self._procfs, pid) if any(name.startswith("render") for name in opens.held) else frozenset()
        seen = self._observed[program] = _Observed(before.scans + 1 if before else 1, opens, used)
        return seen

    def _fleet(self, entry: FleetSettings, name: str, group: Group) -> Fleet:
        oldest, members = group.oldest, group.members
        live = Live(
            incarnation=f"{oldest.incarnation}:{digest(repr(sorted(group.env.items())))}",
            spans=frozenset((member.span.earliest, member.span.latest) for member in members),
            pids=frozenset(member.incarnation.pid for member in members),
            opens=group.opens,
            slurm=oldest.started.slurm,
            used=frozenset(address for member in members for address in member.used),
            refusal=oldest.started.refusal,
            told=tuple(_told(self._procfs, group)),
        )
        return _fleet(entry, name, group.env, live)


def _programs(members: Iterable[Member]) -> tuple[tuple[Incarnation, float], ...]:
    programs = ((member.incarnation, member.span.latest) for member in members)
    return tuple(sorted(programs, key=lambda program: (program[0].started, program[0].pid)))


def _parents(entry: FleetSettings, pids: Pids) -> frozenset[int] | None:
    """Whose children are of the entry too. A control group has what its processes start, unless somebody puts that
    elsewhere on purpose; a pattern of command lines, or a pid file, has not.
    """
    if entry.pid_file is None and entry.process is None:
        return None
    return frozenset(pid for numbers in pids.values() for pid in numbers)


def _fleet(entry: FleetSettings, name: str, env: Mapping[str, str], live: Live) -> Fleet:
    known = {fact: FACTS[fact][value] for fact, value in entry.known.items()}
    return Fleet(name=name, runtimes=runtimes_of(entry), env=env, reach=entry.reach, known=known, live=live)


def runtimes_of(entry: FleetSettings) -> tuple[str, ...]:
    """The runtimes of an entry: its own, or each vendor's default."""
    return DEFAULT_RUNTIMES if entry.runtime is None else (entry.runtime,)


def _none(entry: FleetSettings, why: Refusal) -> Lives:
    """An entry of which no process was found, under the name that it has in the settings."""
    live = Live(incarnation="", spans=frozenset(), pids=frozenset(), refusal=why)
    return Lives(_fleet(entry, entry.name, {}, live))


def _source_words(entry: FleetSettings) -> str:
    if entry.systemd_unit is not None:
        return f"systemd unit {entry.systemd_unit} is running"
    if entry.cgroup is not None:
        return f"control group '{entry.cgroup}' is running"
    if entry.process is not None:
        words = {"command": entry.process.command, "user": entry.process.user}
        return " and ".join(f"{name} '{value}'" for name, value in words.items() if value) + " is running"
    return f"pid file {entry.pid_file} is running"


def _told(procfs: str, group: Group) -> Iterator[str]:
    """Where all this was seen, without anything that the processes could have made up but their names."""
    members = sorted(group.members, key=lambda member: member.incarnation)
    for member in members[:_MOST_TOLD]:
        pid = member.incarnation.pid
        has = ", has a GPU open" if member.opens.holds else ""
        yield f"process {pid} ({member.name}){has}: environment from {procfs}/{pid}/environ"
    if len(members) > _MOST_TOLD:
        yield f"and {len(members) - _MOST_TOLD} processes more with the same masks"
    if group.oldest.started.slurm is not None:
        yield f"Slurm gave it the cards {group.oldest.started.slurm}"
    yield from group.oldest.opens.told


def _within(lives: Iterable[Lives], most: int) -> Survey:
    """As many fleets as there may be, the older before the younger, beside those of which nothing runs. Of two with the
    same name the one whose entry comes first in the settings is shown.
    """
    by_name: dict[str, Lives] = {}
    count = 0
    for life in lives:
        count += 1
        by_name.setdefault(life.fleet.name, life)
    ordered = sorted((life for life in by_name.values() if life.programs), key=_age)
    shown = {life.fleet.name for life in ordered[:most]}
    kept = tuple(life for life in by_name.values() if life.fleet.name in shown or not life.programs)
    return Survey(kept, count - len(kept))


def _age(life: Lives) -> tuple[int, str]:
    return (min((program.started for program, _ in life.programs), default=0), life.fleet.name)
