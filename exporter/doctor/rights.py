"""What this user may do, where the settings or the cards want more than reading GPUs takes."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from exporter.doctor.findings import Finding, passed, warned
from exporter.doctor.front_door import encrypts
from exporter.doctor.seen import Seen
from exporter.fleets import is_live
from exporter.fleets.processes import hidden
from exporter.web.doors import MAX_CONNECTIONS, MAX_TLS_CONNECTIONS, places

# include/uapi/linux/capability.h
_CAPABILITIES = {"CAP_DAC_READ_SEARCH": 2, "CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21, "CAP_PERFMON": 38}
_LOOKING = ("CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH")
_COUNTING = ("CAP_PERFMON", "CAP_SYS_ADMIN")
_DROP_IN = (
    "Under systemd put the drop-in {name} in: docs/installation.md, What the service may do. Else {otherwise}, or run "
    "it as root."
)
_PARANOID = "/proc/sys/kernel/perf_event_paranoid"


def check_user(seen: Seen) -> Iterator[Finding]:
    """Whose rights all of this was seen with."""
    del seen
    if os.geteuid() != 0:
        yield passed("user", str(os.geteuid()), "what follows is what this user may do")
        return
    user = "--reuid=gpu-fleet-exporter --regid=gpu-fleet-exporter --groups=video,render"
    command = f"sudo setpriv {user} gpu-fleet-exporter doctor"
    found = f"root may do more than the service: `{command}`, with the same flags, looks with its user's rights"
    yield passed("user", "root", found)


def check_processes(seen: Seen) -> Iterator[Finding]:
    """Where fleets are of live processes: whether those of other users are shown, and may be looked into. That is no
    failure by itself: the fleets may be this user's own, and one that is not is refused.
    """
    names = [entry.name for entry in seen.settings.fleets if is_live(entry)]
    if not names:
        return
    subject = f"fleets of processes ({', '.join(names)})"
    fix = _DROP_IN.format(name="process-fleets.conf", otherwise="give it CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH")
    lacking = [name for name in _LOOKING if name not in _held()]
    if hidden(seen.procfs):
        found = f"{seen.procfs} does not show the processes of other users (hidepid, or ProtectProc= of a unit)"
        again = f"{fix} Without systemd mount it without hidepid: `sudo mount -o remount,hidepid=0 /proc`."
        yield warned("rights", subject, found, again)
    elif lacking:
        found = f"other users' processes cannot be looked into without {' and '.join(lacking)}; one's own can"
        yield warned("rights", subject, found, fix)
    else:
        yield passed("rights", subject, "every process can be looked into")


def check_counters(seen: Seen) -> Iterator[Finding]:
    """Where there is an Intel card: whether the kernel's performance counters may be read."""
    if not any(device.key.vendor == "intel" for device in seen.whole_cards):
        return
    level = _paranoid()
    if any(name in _held() for name in _COUNTING):
        yield passed("rights", "performance counters", "CAP_PERFMON, or more, is there")
    elif level is not None and level <= 0:
        yield passed("rights", "performance counters", f"perf_event_paranoid is {level}, so everybody may read them")
    elif not _lacks_readings(seen):
        yield passed("rights", "performance counters", "they may not be read, and no reading is missing for it")
    else:
        fix = _DROP_IN.format(name="intel-pmu.conf", otherwise="give it CAP_PERFMON")
        found = (
            f"without CAP_PERFMON they may not be read (perf_event_paranoid is {'unknown' if level is None else level})"
        )
        yield warned("rights", "performance counters", found, fix)


def _lacks_readings(seen: Seen) -> bool:
    """Whether an Intel card lacks what the counters would bring. One that counts from the next cycle on does not."""
    for device in seen.whole_cards:
        given = seen.snapshot.readings.get(device.key, {})
        if device.key.vendor != "intel" or seen.state(device.key) != "ok":
            continue
        if "utilization" not in given and "intel" not in seen.snapshot.pending:
            return True
        if "memory_free" not in given and device.integrated is False:
            return True
    return False


def _paranoid() -> int | None:
    try:
        return int(Path(_PARANOID).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _held() -> frozenset[str]:
    """The capabilities that are in force here."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        held = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    except (OSError, ValueError, StopIteration):
        return frozenset()
    return frozenset(name for name, number in _CAPABILITIES.items() if held >> number & 1)


def check_open_files(seen: Seen) -> Iterator[Finding]:
    """Half of what the process may open is for connections."""
    tls = encrypts(seen)
    most = MAX_TLS_CONNECTIONS if tls else MAX_CONNECTIONS
    limit, room = resource.getrlimit(resource.RLIMIT_NOFILE)[0], places(tls=tls)
    text = "no limit" if limit == resource.RLIM_INFINITY else f"{limit} open files"
    if room < most:
        fix = f"`ulimit -n {2 * most}` before it is started, or `LimitNOFILE={2 * most}` in a drop-in of the unit."
        yield warned("limits", text, f"so {room} connections at once, instead of {most}", fix)
    else:
        yield passed("limits", text, f"enough for {room} connections at once")
