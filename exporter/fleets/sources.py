"""Which processes a fleet of the settings stands for: by systemd unit, control group, command line, user, pid file."""

from __future__ import annotations

import fnmatch
import functools
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from exporter.config import FleetSettings
from exporter.files import read_regular
from exporter.fleet_names import placeholders
from exporter.fleets import processes
from exporter.patterns import Pattern, pattern

_UNIT_SUFFIXES = (".service", ".scope", ".slice", ".socket", ".mount", ".swap")
_LONGEST_PID_FILE = 64
_MANY = 4096  # of control groups: thousands of processes are in the same
# How much the wall clock may have been set, or run fast, since a pid file was written.
_CLOCKS_SECONDS, _CLOCKS_SHARE = 2.0, 0.01
_TICK_SECONDS = 0.05  # of the clocks that processes' starts and files' times are read from

Values = dict[str, str]


class Looked:
    """A process, of which each thing is read when a source asks for it first."""

    def __init__(self, procfs: str, pid: int) -> None:
        self.pid, self._procfs = pid, procfs
        self._command: str | None = None
        self._groups: tuple[str, ...] | None = None
        self._user: str | None = None

    @property
    def command(self) -> str:
        """The command line."""
        if self._command is None:
            self._command = processes.command(self._procfs, self.pid)
        return self._command

    @property
    def control_groups(self) -> tuple[str, ...]:
        """The paths of its control groups."""
        if self._groups is None:
            self._groups = _paths(processes.control_groups(self._procfs, self.pid))
        return self._groups

    @property
    def user(self) -> str:
        """The user's name."""
        if self._user is None:
            self._user = processes.user(self._procfs, self.pid)
        return self._user


@functools.lru_cache(maxsize=_MANY)
def _paths(lines: str) -> tuple[str, ...]:
    return tuple(line.split(":", 2)[2] for line in lines.splitlines() if line.count(":") >= 2)


Match = Callable[[Looked], Values | None]


class Source(NamedTuple):
    """A fleet of the settings and how its processes are told from others: what they fill into its name, or None."""

    entry: FleetSettings
    match: Match

    def look(self, process: Looked) -> Values | None:
        """The values for the placeholders of the fleet's name, if the process is one of the fleet's."""
        values = self.match(process)
        if values is None:
            return None
        wanted = placeholders(self.entry.name)
        values = values | ({"pid": str(process.pid)} if "pid" in wanted else {})
        return values | ({"user": process.user} if "user" in wanted else {})


def source_of(entry: FleetSettings) -> Source | None:
    """How an entry's processes are found in the list of all; None for one that has no such source."""
    if entry.systemd_unit is not None:
        return Source(entry, _in_unit(entry.systemd_unit))
    if entry.cgroup is not None:
        return Source(entry, _in_group(pattern(entry.cgroup)))
    if entry.process is not None:
        user = None if entry.process.user is None else pattern(entry.process.user)
        return Source(entry, _runs(pattern(entry.process.command or ""), user))
    return None


def _in_unit(pattern: str) -> Match:
    """In the control group of a unit: systemd names it after the unit, with ``_`` before what would mean something."""
    named = pattern if pattern.endswith((*_UNIT_SUFFIXES, "*")) else f"{pattern}.service"
    matches = re.compile(fnmatch.translate(named)).match

    @functools.lru_cache(maxsize=_MANY)
    def unit(paths: tuple[str, ...]) -> str | None:
        parts = (part.removeprefix("_") for path in paths for part in reversed(path.split("/")))
        return next((part for part in parts if part.endswith(_UNIT_SUFFIXES) and matches(part)), None)

    def match(process: Looked) -> Values | None:
        found = unit(process.control_groups)
        return None if found is None else {"unit": found}

    return match


def _in_group(group: Pattern) -> Match:
    @functools.lru_cache(maxsize=_MANY)
    def groups(paths: tuple[str, ...]) -> Values | None:
        return next((found for path in paths if (found := group.search(path)) is not None), None)

    return lambda process: groups(process.control_groups)


def _runs(command: Pattern, user: Pattern | None) -> Match:
    def match(process: Looked) -> Values | None:
        found = command.search(process.command) if process.command else None  # the kernel's own threads have none
        return None if user is not None and found is not None and user.fullmatch(process.user) is None else found

    return match


class PidFileError(Exception):
    """A pid file names no process that is running; the message says why.

    ``unseen``: it names one that is not among those that the exporter sees. ``forbidden``: it may not be read.
    """

    def __init__(self, message: str, *, unseen: bool = False, forbidden: bool = False) -> None:
        super().__init__(message)
        self.unseen, self.forbidden = unseen, forbidden


class _Version(NamedTuple):
    """A pid file as it was written once: inode and time of writing, and the latest that this can have been, in seconds
    of CLOCK_BOOTTIME.
    """

    inode: int
    modified: int
    latest: float


class PidFiles:
    """Pid files over several looks. When one was written is known by the kernel's own clock where that was between two
    looks. Before the first it is known by the wall clock, which may have been set meanwhile, and so with some leeway.
    """

    def __init__(self, procfs: str) -> None:
        self._procfs = procfs
        self._seen: dict[str, _Version | None] = {}
        self._looked: dict[str, float] = {}

    def process(self, path: str) -> int:
        """The process that a file names, which was started before the file was written.

        Another process may have got the number since. Raises :class:`PidFileError`.
        """
        try:
            version = self._version(path)
            words = read_regular(path, _LONGEST_PID_FILE).split()
        except OSError as error:
            self._seen[path] = None
            forbidden = isinstance(error, PermissionError)
            raise PidFileError(f"{path}: cannot be read: {error.strerror}", forbidden=forbidden) from error
        self._seen[path] = version
        if not words or not words[0].isdigit() or int(words[0]) == 0:
            raise PidFileError(f"{path}: expected the number of a process")
        pid = int(words[0])
        found = processes.stat(self._procfs, pid)
        if found is None:
            raise PidFileError(f"{path} names the process {pid}, which is not running", unseen=True)
        late = found.incarnation.started_seconds - version.latest
        if late > 0:
            raise PidFileError(f"{path} names the process {pid}, which was started after the file was written")
        return pid

    def _version(self, path: str) -> _Version:
        """What stands there now; taken before the file is read: no number passes for one of a later writing."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        looked, self._looked[path] = self._looked.get(path), now
        status, before = Path(path).stat(), self._seen.get(path)
        if before is not None and before[:2] == (status.st_ino, status.st_mtime_ns):
            return before
        age = max(0.0, time.time() - status.st_mtime)
        if looked is not None and age > (now - looked) * (1 + _CLOCKS_SHARE) + _TICK_SECONDS:
            age = 0.0  # the wall clock was set
        leeway = _CLOCKS_SECONDS + _CLOCKS_SHARE * age if looked is None else _TICK_SECONDS
        return _Version(status.st_ino, status.st_mtime_ns, now - age + leeway)
