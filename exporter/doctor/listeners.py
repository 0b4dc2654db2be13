"""Which process listens on a port or a path, as far as this user may see that. Source: proc_net(5), proc_pid_fd(5)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_UNIX_TABLE = "/proc/net/unix"
_LISTENS = "0A"
_UNIX_LISTENS = 0x10000  # __SO_ACCEPTCON
_SOCKET = re.compile(r"socket:\[([0-9]+)\]")


def of_port(port: int) -> list[str]:
    """Who listens on the port, on whatever address."""
    return _processes(set(_inodes_of_port(port)))


def of_path(path: str) -> list[str]:
    """Who listens on the path, or on the abstract name, which begins with ``@``."""
    return _processes(set(_inodes_of_path(path)))


def _inodes_of_port(port: int) -> Iterator[str]:
    for table in _TABLES:
        for line in _lines(table):
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _inodes_of_path(path: str) -> Iterator[str]:
    for line in _lines(_UNIX_TABLE):
        fields = line.split(maxsplit=7)
        if len(fields) == 8 and fields[7] == path and int(fields[3], 16) & _UNIX_LISTENS:
            yield fields[6]


def _lines(table: str) -> list[str]:
    """Without the heading."""
    try:
        return Path(table).read_text(encoding="utf-8", errors="surrogateescape").splitlines()[1:]
    except OSError:
        return []


def _processes(inodes: set[str]) -> list[str]:
    """Their names, without arguments, which may have secrets in them, and their numbers."""
    pids = [name for name in os.listdir("/proc") if name.isdecimal()] if inodes else []  # noqa: PTH208
    return [f"{_name(pid)} (process {pid})" for pid in sorted(pids, key=int) if not inodes.isdisjoint(_sockets(pid))]


def _sockets(pid: str) -> Iterator[str]:
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            found = _SOCKET.fullmatch(os.readlink(entry.path))  # noqa: PTH115  (every open file of the host)
            if found:
                yield found[1]
    except OSError:  # another user's, or it has ended
        return


def _name(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return "a process that has ended"
