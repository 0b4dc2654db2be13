"""Whether device files can be opened, by opening them: groups and modes do not tell all of it (device filters of
control groups, access lists, drivers that are gone).
"""

from __future__ import annotations

import errno
import grp
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from exporter.doctor.apart import Script, Told
from exporter.doctor.seen import in_seconds

_SECONDS = 3.0
_HANGS, _DIED = -1, -2
# What the file is is looked at first: that may hang as well, and says whose it is where it cannot be opened.
_OPEN = """
import os, stat, sys
for path in sys.argv[1:]:
    try:
        seen = os.stat(path)
        os.write(1, b"%%d %%d " %% (seen.st_gid, stat.S_IMODE(seen.st_mode)))
        if not stat.S_ISCHR(seen.st_mode):
            raise OSError(%d, "")
        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        os.write(1, b"0\\n")
    except OSError as error:
        os.write(1, b"%%d\\n" %% error.errno)
"""
_NO_DEVICE = errno.ENOTTY


class Opened(NamedTuple):
    """``error`` is 0 where the file can be opened, else the kernel's number. ``group`` owns the file, by name or,
    without one, by number; empty where even that cannot be seen.
    """

    error: int
    group: str = ""
    mode: int = 0

    @property
    def hangs(self) -> bool:
        """It has not come to an end, or was behind one in the same list that has not."""
        return self.error == _HANGS

    @property
    def said(self) -> str:
        """Why it cannot be opened."""
        if self.hangs:
            return f"opening it has not come to an end in {_SECONDS:g} seconds"
        if self.error == _DIED:
            return "the process that opens it died"
        return "it is no device file" if self.error == _NO_DEVICE else os.strerror(self.error)


def look(lists: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Opened]]:
    """Open each list's files one after the other, to read and to write, and close each at once; the lists beside each
    other, in a process each, of which one that hangs is left behind.
    """
    scripts = {name: Script(_OPEN % _NO_DEVICE, paths) for name, paths in lists.items()}
    until = in_seconds(_SECONDS)
    return {name: _opened(lists[name], script.told(until)) for name, script in scripts.items()}


def _opened(paths: Sequence[str], told: Told) -> dict[str, Opened]:
    found: dict[str, Opened] = {}
    for path, line in zip(paths, told.lines, strict=False):
        *seen, error = map(int, line.split())
        # A line that was begun and not ended has what was seen of the file, and no answer.
        unfinished = len(seen) == 1
        group, mode = (seen if len(seen) == 2 else (seen[0], error)) if seen else (None, 0)
        found[path] = Opened(_end(told) if unfinished else error, _group(group), mode)
    return {path: found.get(path, Opened(_end(told))) for path in paths}


def _end(told: Told) -> int:
    return _DIED if told.ended else _HANGS


def _group(number: int | None) -> str:
    if number is None:
        return ""
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
