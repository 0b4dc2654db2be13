"""What a card did for its clients, and what they hold: every process's open DRM file says it.

Source: ``/proc/PID/fdinfo``, the kernel's ``drm-usage-stats``: ``drm-engine-*`` in nanoseconds (i915, since Linux
5.19), or ``drm-cycles-*`` over ``drm-total-cycles-*`` (xe, since 6.11), and ``drm-resident-local*`` (i915, since 6.8)
or ``drm-resident-vram*`` (xe) for the card's own memory.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from exporter.backends.base import Use
from exporter.backends.intel.clients import NO_RIGHT, OLD_KERNEL, Scan
from exporter.backends.meter import share
from exporter.errors import DeviceFault
from exporter.model import Does, Hint

_LINE = re.compile(r"^(drm-[\w-]+):[ \t]*(\S+)(?:[ \t]+(\S+))?", re.MULTILINE)
_NUMBER = re.compile(r"[0-9]{1,20}", re.ASCII)  # of 64 bits
_MOST_BYTES = 65536

# The card's own memory: i915 calls it local, with what the firmware took of it apart, and xe vram.
_MEMORY = re.compile(r"drm-resident-(?:local|stolen-local|vram)[0-9]+")
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

# The classes of engines, in i915's words and in xe's.
CLASSES = {
    "render": "render",
    "rcs": "render",
    "compute": "compute",
    "ccs": "compute",
    "copy": "copy",
    "bcs": "copy",
    "video": "video",
    "vcs": "video",
    "video-enhance": "video-enhance",
    "vecs": "video-enhance",
}
_COMPUTE = ("compute", "ccs")


class _Counters(NamedTuple):
    """A client's engines by class: how long they were busy, and, where the driver has a clock of its own, that.

    ``memory`` is what it holds of the card's own, in bytes; None where the driver does not tell.
    """

    client: int
    busy: Mapping[str, int]
    clock: Mapping[str, int]
    engines: Mapping[str, int]
    memory: int | None


class _Moment(NamedTuple):
    """What was read of a card's clients, and when; ``pids`` are the processes that have each of them open."""

    clients: Mapping[int, Mapping[str, int]]
    clock: Mapping[str, int]
    at_nanoseconds: int
    newest: int
    counted: Sequence[_Counters]
    pids: Mapping[int, frozenset[int]]


class Looked(NamedTuple):
    """What a card's clients did since the scan before: the busiest class's percent, and the share of each class.

    None and empty where that is not known.
    """

    percent: float | None = None
    engines: Mapping[str, float] | None = None


class ClientMeter:
    """One card's clients, over the time between two scans."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._before: _Moment | None = None
        self._last: _Moment | None = None
        self._scan = -1
        self._fresh = False
        self._classes: set[str] = set()
        self.hint: Hint | None = None

    def look(self, seen: Scan) -> Looked:
        """Nothing at first, for a scan that was used before or did not look for this card, where a client has ended
        since the scan before, and while something is hidden; then ``hint`` says what.
        """
        self._fresh = seen.number != self._scan
        if not self._fresh:
            return Looked()
        self._scan, self._fresh, files = seen.number, False, seen.files.get(self._address)
        self.hint = None if files is None else seen.hidden
        pids: dict[int, set[int]] = {}
        counted = [] if self.hint else list(self._read(files or (), pids))
        if self.hint or files is None:
            self._last = None
            return Looked()
        self._before, self._last, self._fresh = self._last, _moment(counted, pids, self._last), True
        self._classes |= {CLASSES[name] for entry in counted for name in entry.busy if name in CLASSES}
        before = self._before
        if before is None or before.clients.keys() - self._last.clients.keys():  # what the ended ones did is not known
            return Looked()
        shares = _shares(before, self._last, self._last.clients)
        if shares is None:
            return Looked()
        percent = max(shares.values(), default=None if self._last.clients else 0.0)
        return Looked(percent, self._engines(shares))

    def percent(self, seen: Scan) -> float | None:
        """The busiest class's share of the time since the scan before, as :meth:`look` has it."""
        return self.look(seen).percent

    def processes(self) -> int | None:
        """How many have done something on the card, or hold memory of its own; None where not all are seen.

        Source: the last scan, if it was looked at just now. Several that share a client count as one.
        """
        if not self._fresh or self._last is None:
            return None
        owners = {min(self._last.pids[each.client]) for each in self._last.counted if _is_active(each)}
        return len(owners)

    def uses(self) -> Collection[Use] | None:
        """Every process that has the card open; None where not all are seen, as :meth:`processes`."""
        if not self._fresh or self._last is None:
            return None
        own: dict[int, list[_Counters]] = {}
        for entry in self._last.counted:
            for pid in self._last.pids[entry.client]:
                own.setdefault(pid, []).append(entry)
        return [self._use(pid, entries, self._before, self._last) for pid, entries in sorted(own.items())]

    def forget(self) -> None:
        """The next reading is the first."""
        self._before, self._last, self._fresh = None, None, False

    def _engines(self, shares: Mapping[str, float]) -> Mapping[str, float]:
        """By class. While nobody has the card open, no class does anything."""
        if self._last is not None and not self._last.clients:
            return dict.fromkeys(sorted(self._classes), 0.0)
        return {CLASSES[name]: percent / 100 for name, percent in shares.items() if name in CLASSES}

    def _use(self, pid: int, entries: Sequence[_Counters], before: _Moment | None, now: _Moment) -> Use:
        """Which of the processes that share a client uses it is not known."""
        active = [entry for entry in entries if _is_active(entry)]
        if any(len(now.pids[entry.client]) > 1 for entry in active):
            return Use(pid, does=None)
        memory = [entry.memory for entry in entries if entry.memory is not None]
        return Use(
            pid, sum(memory) if len(memory) == len(entries) else None, _share(pid, entries, before, now), _does(active)
        )

    def _read(self, files: Sequence[str], pids: dict[int, set[int]]) -> Iterator[_Counters]:
        """Each client once; a duplicated descriptor shows the same one. A driver counts for all clients or for none."""
        uncounted = False
        for path in files:
            values = self._values(path)
            if values is None:
                continue
            counters = _counters(values)
            if counters is None:
                uncounted = True
                continue
            known = counters.client in pids
            pids.setdefault(counters.client, set()).add(_pid_of(path))
            if not known:
                yield counters
        if uncounted and not pids:
            self.hint = OLD_KERNEL

    def _values(self, path: str) -> Mapping[str, tuple[str, str]] | None:
        """The file's lines, with their units; None for one that is no client of the card any more."""
        try:
            with open(path, "rb", buffering=0) as file:  # noqa: PTH123
                found = file.read(_MOST_BYTES)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                self.hint = NO_RIGHT
            elif error.errno not in (errno.ENOENT, errno.ESRCH):
                raise DeviceFault("driver-error", f"{path}: {error.strerror}") from error
            return None
        if found is None:  # how Python's plain files tell EAGAIN
            raise DeviceFault("driver-error", f"{path}: {os.strerror(errno.EAGAIN)}")
        lines = _LINE.findall(found.decode("ascii", "replace"))
        values = {name: (value, unit) for name, value, unit in lines}
        return values if values.get("drm-pdev", (self._address,))[0] == self._address else None


def _pid_of(path: str) -> int:
    """Of ``/proc/PID/fdinfo/FD``."""
    pid = path.split("/")[-3]
    return int(pid) if pid.isdecimal() else 0


def _counters(values: Mapping[str, tuple[str, str]]) -> _Counters | None:
    """None where the driver does not count."""
    capacities = _numbers(values, "drm-engine-capacity-")
    clock = _numbers(values, "drm-total-cycles-")
    busy = _numbers(values, "drm-cycles-") or {
        name: value for name, value in _numbers(values, "drm-engine-").items() if not name.startswith("capacity-")
    }
    client = values.get("drm-client-id", ("",))[0]
    if not _NUMBER.fullmatch(client) or not busy:
        return None
    return _Counters(int(client), busy, clock, capacities, _memory(values))


def _numbers(values: Mapping[str, tuple[str, str]], prefix: str) -> dict[str, int]:
    found = ((name.removeprefix(prefix), value) for name, (value, _) in values.items() if name.startswith(prefix))
    return {name: int(value) for name, value in found if _NUMBER.fullmatch(value)}


def _memory(values: Mapping[str, tuple[str, str]]) -> int | None:
    """Over all of the card's own regions; None where there is none, or one is told in a way that is not known."""
    sizes = [size for name, size in values.items() if _MEMORY.fullmatch(name)]
    if not sizes or any(not _NUMBER.fullmatch(size) or unit not in _UNITS for size, unit in sizes):
        return None
    return sum(int(size) * _UNITS[unit] for size, unit in sizes)


def _is_active(entry: _Counters) -> bool:
    """It has done something, or holds memory: a runtime opens every card, and then uses some."""
    return any(entry.busy.values()) or bool(entry.memory)


def _does(active: Iterable[_Counters]) -> Does:
    """What a class other than that for computing has done, no mask of a compute runtime hides."""
    does: Does = "nothing"
    for entry in active:
        if any(entry.busy.get(name, 0) for name in _COMPUTE):
            return "computes"
        if any(entry.busy.values()):
            does = "draws"
    return does


def _share(pid: int, entries: Iterable[_Counters], before: _Moment | None, now: _Moment) -> float | None:
    """The share of the busiest class that a process took, from 0 to 1; None where one of its clients has ended."""
    own = {entry.client for entry in entries}
    if before is None or any(pid in pids and client not in own for client, pids in before.pids.items()):
        return None
    shares = _shares(before, now, own)
    return max(shares.values()) / 100 if shares else None


def _moment(counted: Sequence[_Counters], pids: Mapping[int, set[int]], before: _Moment | None) -> _Moment:
    """The kernel lets a counter go back for a moment, and asks that the larger value be kept."""
    known = before.clients if before else {}
    clients, clock = {}, dict[str, int]()
    for entry in counted:
        last = known.get(entry.client, {})
        clients[entry.client] = {name: max(value, last.get(name, 0)) for name, value in entry.busy.items()}
        for name, value in entry.clock.items():
            clock[name] = max(value, clock.get(name, 0))
    newest = max((*clients, before.newest if before else 0), default=0)
    owners = {client: frozenset(found) for client, found in pids.items()}
    return _Moment(clients, clock, time.monotonic_ns(), newest, counted, owners)


def _shares(before: _Moment, now: _Moment, clients: Collection[int]) -> dict[str, float] | None:
    """What each class did for some of the clients, in percent; a class with several engines is busy when all of them
    are. An idle class whose clock stands tells nothing. None where what any class did is not known.
    """
    engines = {name: count for entry in now.counted for name, count in entry.engines.items() if count > 0}
    names = sorted({name for entry in now.counted for name in entry.busy})
    shares: dict[str, float] = {}
    for name in names:
        spent = [_since(before, client, now.clients[client].get(name, 0), name) for client in clients]
        if None in spent:
            return None
        busy = sum(each for each in spent if each)
        if not busy:
            stands = name in before.clock and now.clock.get(name, 0) <= before.clock[name]
            shares |= {} if stands else {name: 0.0}
            continue
        elapsed = _elapsed(before, now, name)
        part = None if elapsed is None else share(busy, elapsed * engines.get(name, 1))
        if part is None:
            return None
        shares[name] = part
    return shares


def _elapsed(before: _Moment, now: _Moment, name: str) -> int | None:
    """By the class's own clock, where it has one; None where that has no earlier reading."""
    if not any(name in entry.clock for entry in now.counted):
        return now.at_nanoseconds - before.at_nanoseconds
    return now.clock[name] - before.clock[name] if name in before.clock else None


def _since(before: _Moment, client: int, value: int, name: str) -> int | None:
    """What a client did since then. Numbers of clients only rise, so one that is newer than all did everything since;
    of an older one that was not seen it is not known.
    """
    if client in before.clients:
        return value - before.clients[client].get(name, 0)
    return value if client > before.newest else None
