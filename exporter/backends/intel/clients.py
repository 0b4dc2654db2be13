"""Which processes have which card open, and what hides some of them: the open DRM files of all processes.

What a client did and holds is in its file's ``fdinfo``, which :mod:`exporter.backends.intel.client_meter` reads. A sum
over clients is the card's only if no client is left out, so every process of the host must be visible.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from exporter.backends.kernel_files import names
from exporter.model import Hint

_NODES = "/dev/dri/"
_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # the kernel's PROC_PID_INIT_INO
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
