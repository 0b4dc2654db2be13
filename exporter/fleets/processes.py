"""The host's processes as the kernel shows them: which there are, and whether one is still what it was.

A process number comes back, and a process may run another program; an :class:`Incarnation` tells these apart. Looking
at ten thousand processes in every scan is spared by what the kernel's file system shows of itself: as long as the
folder ``/proc/PID`` is the same one, it is the same process.
"""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

_FIRST_NAMESPACE = "pid:[4026531836]"  # the kernel's PROC_PID_INIT_INO
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_MOST_BYTES = 4096  # of a command line, and of the list of control groups, that patterns see
# A young process may be about to run another program, or be moved to its control group: it is looked at in each scan.
_YOUNG_SCANS, _YOUNG_SECONDS = 12, 60.0
# The others in turns, so that what changes late is seen too.
_TURNS = 12


def is_due(scans: int, pid: int, scan: int) -> bool:
    """Whether a process that was there in so many scans is looked at in this one."""
    return scans <= _YOUNG_SCANS or (pid + scan) % _TURNS == 0


class Incarnation(NamedTuple):
    """A process while it runs one program.

    ``started`` is in clock ticks since boot. ``stack`` and ``environment`` are addresses that differ from one program
    to the next; 0 where the process may not be looked into. Source: ``/proc/PID/stat``, proc_pid_stat(5).
    """

    pid: int
    started: int
    stack: int
    environment: int

    @property
    def started_seconds(self) -> float:
        """Seconds of CLOCK_BOOTTIME."""
        return self.started / _TICKS_PER_SECOND

    def __str__(self) -> str:
        """All that tells it apart from others."""
        return f"{self.pid}:{self.started}:{self.stack:x}:{self.environment:x}"


class Stat(NamedTuple):
    """A process that has not ended, the name that it has at the moment, its parent's number, and the sizes of the
    arguments and of the environment that it was started with; 0 where the process may not be looked into.
    """

    incarnation: Incarnation
    name: str
    parent: int
    argument_bytes: int
    environment_bytes: int


def text(path: str, most: int = _MOST_BYTES) -> bytes:
    """The beginning of a file of the kernel's; raises ``OSError``."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, most)
    finally:
        os.close(file)


def stat(procfs: str, pid: int) -> Stat | None:
    """The process of that number now; None where there is none, or only what is left of one that has ended."""
    try:
        head, _, tail = text(f"{procfs}/{pid}/stat").rpartition(b")")
        fields = tail.split()
        if fields[0] in (b"Z", b"X", b"x"):
            return None
        name = head.partition(b"(")[2].decode("utf-8", "replace")
        # Without the right to look, the kernel shows 0 for an address.
        arguments, arguments_end, environment, end = map(int, fields[45:49])
        incarnation = Incarnation(pid, int(fields[19]), int(fields[25]), environment)
        return Stat(incarnation, name, int(fields[1]), arguments_end - arguments, end - environment)
    except (OSError, IndexError, ValueError):
        return None


def hidden(procfs: str) -> bool:
    """Whether processes of other users are not shown: the first one always runs, and what everybody may read of it
    cannot be read. Source: the mount option ``hidepid`` of proc(5), ``ProtectProc=`` of systemd.exec(5).
    """
    return stat(procfs, 1) is None and os.access(f"{procfs}/self/stat", os.R_OK)


def are_the_hosts(procfs: str) -> bool:
    """Whether process numbers are those by which drivers know processes: of the first namespace, in which the kernel
    started. In another one, as a container has, a driver tells its numbers, or leaves processes out.
    """
    try:
        return str(Path(f"{procfs}/self/ns/pid").readlink()) == _FIRST_NAMESPACE
    except OSError:
        return False


def runs(procfs: str, incarnation: Incarnation) -> bool:
    """Whether the process still runs the same program."""
    now = stat(procfs, incarnation.pid)
    return now is not None and now.incarnation == incarnation


def command(procfs: str, pid: int) -> str:
    """The command line, its arguments joined by blanks; empty where it cannot be read."""
    return _shown(f"{procfs}/{pid}/cmdline").replace("\0", " ").rstrip()


def control_groups(procfs: str, pid: int) -> str:
    """The lines ``N:controllers:path`` of the process's control groups; empty where they cannot be read."""
    return _shown(f"{procfs}/{pid}/cgroup")


def _shown(path: str) -> str:
    try:
        return text(path).decode("utf-8", "replace")
    except OSError:
        return ""


def user(procfs: str, pid: int) -> str:
    """The name of the process's user, or its number where it has none; empty where it cannot be told."""
    for line in _shown(f"{procfs}/{pid}/status").splitlines():
        if line.startswith("Uid:"):
            return _user_name(line.split()[1])
    return ""


def _user_name(number: str) -> str:
    try:
        return pwd.getpwuid(int(number)).pw_name
    except (KeyError, ValueError, OverflowError):
        return number


T = TypeVar("T")


class _Seen(Generic[T]):
    """A process, and what was found in it when it was looked at last."""

    __slots__ = ("found", "inode", "scans")

    def __init__(self, inode: int) -> None:
        self.inode = inode
        self.scans = 0
        self.found: Sequence[T] = ()


class Table(Generic[T]):
    """All processes of the host, and what ``look`` finds in each."""

    def __init__(self, procfs: str, look: Callable[[int], Sequence[T]]) -> None:
        self._procfs, self._look = procfs, look
        self._seen: dict[int, _Seen[T]] = {}
        self._scan = 0

    def scan(self, hanging: Container[int] = ()) -> Iterator[tuple[int, Sequence[T]]]:
        """The processes in which something was found, each with that. In these it is looked for in each scan, but in
        those that hang.

        Raises ``OSError`` where there is no list of processes.
        """
        self._scan += 1
        before, now = self._seen, dict[int, _Seen[T]]()
        for pid, inode in _folders(self._procfs):
            seen = before.get(pid)
            if seen is None or seen.inode != inode:
                seen = _Seen(inode)
            now[pid] = seen
            seen.scans += 1
            if (seen.found or is_due(seen.scans, pid, self._scan)) and pid not in hanging:
                seen.found = self._look(pid)
            if self._scan == 1 and _is_old(self._procfs, pid):
                seen.scans = _YOUNG_SCANS
            if seen.found:
                yield pid, seen.found
        self._seen = now


def _is_old(procfs: str, pid: int) -> bool:
    found = stat(procfs, pid)
    return found is None or time.clock_gettime(time.CLOCK_BOOTTIME) - found.incarnation.started_seconds > _YOUNG_SECONDS


def numbers(procfs: str) -> list[int]:
    """The numbers of all processes; raises ``OSError`` where there is no list of them."""
    return sorted(pid for pid, _ in _folders(procfs))


def _folders(procfs: str) -> Iterator[tuple[int, int]]:
    """Number and inode of each process's folder."""
    with os.scandir(procfs) as entries:
        for entry in entries:
            if entry.name.isdecimal() and entry.name.isascii():
                yield int(entry.name), entry.inode()
