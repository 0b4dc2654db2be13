"""How busy a card is by its clients: every process's open DRM file says what the engines did for it.

Source: ``/proc/PID/fdinfo``, the kernel's ``drm-usage-stats``: ``drm-engine-*`` in nanoseconds (i915, since Linux
5.19), or ``drm-cycles-*`` over ``drm-total-cycles-*`` (xe, since 6.11). A sum is the card's only if no client is left
out, so every process of the host must be visible.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from exporter.backends.kernel_files import names
from exporter.backends.meter import share
from exporter.errors import DeviceFault
from exporter.model import Hint

_NODES = "/dev/dri/"
_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # the kernel's PROC_PID_INIT_INO
_LINE = re.compile(r"^(drm-[\w-]+):[ \t]*(\S+)", re.MULTILINE)
_NUMBER = re.compile(r"[0-9]{1,20}", re.ASCII)  # of 64 bits
_MOST_BYTES = 65536
_DRM_MAJOR, _FIRST_RENDER, _LAST_NUMBERED = 226, 128, 191  # later minors were given out as cards came

NO_RIGHT = Hint(
    "grant-cap-sys-ptrace",
    "utilization: what other users' processes do on the card cannot be read; under systemd enable the drop-in "
    "process-fleets.conf, else run the daemon as root, or give it CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH (with "
    "intel-gpu-tools CAP_PERFMON is enough: the drop-in intel-pmu.conf)",
)
NOT_THE_HOST = Hint(
    "host-pid-namespace",
    "utilization: only processes of this container can be seen; share the host's process ids with it, as in "
    "docker run --pid=host",
)
OLD_KERNEL = Hint(
    "newer-kernel",
    "utilization: this kernel's driver does not count what clients do; i915 does since Linux 5.19, xe since 6.11",
)


class Scan(NamedTuple):
    """The open DRM files of one moment: fdinfo files by card, for each card that was looked for, and what hides some,
    if anything does.
    """

    number: int
    files: Mapping[str, tuple[str, ...]]
    hidden: Hint | None


def scan(number: int, procfs: str, nodes: Mapping[str, str]) -> Scan:
    """Look at every process's open files. ``nodes`` has the card of each DRM node: ``renderD128``, ``card0``.

    No driver is asked for anything: a link is read for each open file, and the node's number for those of DRM.
    """
    found: dict[str, list[str]] = {address: [] for address in nodes.values()}
    hidden = _hidden(procfs)
    for pid in names(procfs):
        if not pid.isdecimal():
            continue
        try:
            for descriptor, node in _drm_files(f"{procfs}/{pid}/fd"):
                if node in nodes:
                    found[nodes[node]].append(f"{procfs}/{pid}/fdinfo/{descriptor}")
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                hidden = hidden or NO_RIGHT
    return Scan(number, {card: tuple(files) for card, files in found.items()}, hidden)


def _hidden(procfs: str) -> Hint | None:
    """Whether the file system shows the host's processes: those of the first namespace, in which the kernel started.

    A right is missing too where it is that namespace's and shows the daemon its own processes alone (``hidepid``).
    """
    try:
        return None if _namespace(procfs, "1") == _FIRST_PID_NAMESPACE else NOT_THE_HOST
    except PermissionError:
        return NO_RIGHT
    except OSError:  # it is not shown
        with contextlib.suppress(OSError):
            return NO_RIGHT if _namespace(procfs, "self") == _FIRST_PID_NAMESPACE else NOT_THE_HOST
    return NOT_THE_HOST


def _namespace(procfs: str, process: str) -> str:
    """Of process numbers, as a link names it."""
    return str(Path(f"{procfs}/{process}/ns/pid").readlink())


def _drm_files(folder: str) -> Iterator[tuple[str, str]]:
    """Descriptor and node of each DRM file in a process's folder of open files."""
    for entry in os.listdir(folder):  # noqa: PTH208  (names are all that is wanted)
        try:
            target = os.readlink(f"{folder}/{entry}")  # noqa: PTH115  (tens of thousands a cycle)
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith(_NODES):
            yield entry, _numbered(f"{folder}/{entry}") or target.removeprefix(_NODES)


def _numbered(path: str) -> str:
    """The node by its number, whatever a container calls it; empty where the number says nothing."""
    try:
        device = os.stat(path).st_rdev  # noqa: PTH116  (once a DRM file and cycle)
    except OSError:
        return ""
    minor = os.minor(device)
    if os.major(device) != _DRM_MAJOR or minor > _LAST_NUMBERED:
        return ""
    return f"renderD{minor}" if minor >= _FIRST_RENDER else f"card{minor}"


class _Counters(NamedTuple):
    """A client's engines by class: how long they were busy, and, where the driver has a clock of its own, that."""

    client: int
    busy: Mapping[str, int]
    clock: Mapping[str, int]
    engines: Mapping[str, int]


class _Moment(NamedTuple):
    """What was read of a card's clients, and when."""

    clients: Mapping[int, Mapping[str, int]]
    clock: Mapping[str, int]
    at_nanoseconds: int
    newest: int


class ClientMeter:
    """One card's utilization, over the time between two scans: its busiest class of engines."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._last: _Moment | None = None
        self._scan = -1
        self.hint: Hint | None = None

    def percent(self, seen: Scan) -> float | None:
        """None at first, for a scan that was used before or did not look for this card, where a client has ended since
        the scan before, and while something is hidden; then ``hint`` says what.
        """
        if seen.number == self._scan:
            return None
        self._scan, files = seen.number, seen.files.get(self._address)
        self.hint = None if files is None else seen.hidden
        counted = [] if self.hint else list(self._read(files or ()))
        if self.hint or files is None:
            self._last = None
            return None
        before, self._last = self._last, _moment(counted, self._last)
        if before is None or before.clients.keys() - self._last.clients.keys():  # what the ended ones did is not known
            return None
        return _busiest(before, self._last, counted)

    def forget(self) -> None:
        """The next reading is the first."""
        self._last = None

    def _read(self, files: Sequence[str]) -> Iterator[_Counters]:
        """Each client once; a duplicated descriptor shows the same one. A driver counts for all clients or for none."""
        clients: set[int] = set()
        uncounted = False
        for path in files:
            values = self._values(path)
            if values is None:
                continue
            counters = _counters(values)
            if counters is None:
                uncounted = True
            elif counters.client not in clients:
                clients.add(counters.client)
                yield counters
        if uncounted and not clients:
            self.hint = OLD_KERNEL

    def _values(self, path: str) -> Mapping[str, str] | None:
        """The file's lines; None for one that is no client of the card any more."""
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
        values = dict(_LINE.findall(found.decode("ascii", "replace")))
        return values if values.get("drm-pdev", self._address) == self._address else None


def _counters(values: Mapping[str, str]) -> _Counters | None:
    """None where the driver does not count."""
    capacities = _numbers(values, "drm-engine-capacity-")
    clock = _numbers(values, "drm-total-cycles-")
    busy = _numbers(values, "drm-cycles-") or {
        name: value for name, value in _numbers(values, "drm-engine-").items() if not name.startswith("capacity-")
    }
    client = values.get("drm-client-id", "")
    if not _NUMBER.fullmatch(client) or not busy:
        return None
    return _Counters(int(client), busy, clock, capacities)


def _numbers(values: Mapping[str, str], prefix: str) -> dict[str, int]:
    found = ((name.removeprefix(prefix), value) for name, value in values.items() if name.startswith(prefix))
    return {name: int(value) for name, value in found if _NUMBER.fullmatch(value)}


def _moment(counted: Iterable[_Counters], before: _Moment | None) -> _Moment:
    """The kernel lets a counter go back for a moment, and asks that the larger value be kept."""
    known = before.clients if before else {}
    clients, clock = {}, dict[str, int]()
    for entry in counted:
        last = known.get(entry.client, {})
        clients[entry.client] = {name: max(value, last.get(name, 0)) for name, value in entry.busy.items()}
        for name, value in entry.clock.items():
            clock[name] = max(value, clock.get(name, 0))
    newest = max((*clients, before.newest if before else 0), default=0)
    return _Moment(clients, clock, time.monotonic_ns(), newest)


def _busiest(before: _Moment, now: _Moment, counted: Sequence[_Counters]) -> float | None:
    """The largest share of any class; a class with several engines is busy when all of them are. An idle class whose
    clock stands tells nothing.
    """
    engines = {name: count for entry in counted for name, count in entry.engines.items() if count > 0}
    clocked = {name for entry in counted for name in entry.clock}
    names = {name for entry in counted for name in entry.busy}
    shares = [] if names else [0.0]
    for name in sorted(names):
        spent = [_since(before, client, values.get(name, 0), name) for client, values in now.clients.items()]
        if None in spent:
            return None
        busy = sum(each for each in spent if each)
        if not busy:
            stands = name in before.clock and now.clock.get(name, 0) <= before.clock[name]
            shares += [] if stands else [0.0]
            continue
        if name not in clocked:
            elapsed = now.at_nanoseconds - before.at_nanoseconds
        elif name in before.clock:
            elapsed = now.clock[name] - before.clock[name]
        else:  # the first client's clock has no earlier reading
            return None
        part = share(busy, elapsed * engines.get(name, 1))
        if part is None:
            return None
        shares.append(part)
    return max(shares, default=None)


def _since(before: _Moment, client: int, value: int, name: str) -> int | None:
    """What a client did since then. Numbers of clients only rise, so one that is newer than all did everything since;
    of an older one that was not seen it is not known.
    """
    if client in before.clients:
        return value - before.clients[client].get(name, 0)
    return value if client > before.newest else None
