"""The device filter on a process's control groups: whether there is one, and what it lets through where that shows.

The first version's controller ``devices`` has a list in a file. The second version has BPF programs: the kernel tells
whoever may ask how many there are, and nobody what they do; else systemd knows of its own. Where both versions are
mounted, both filter.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import struct
from collections.abc import Sequence
from typing import NamedTuple

from exporter.files import read_regular
from exporter.fleets.unit_policy import UnitPolicies

_FIRST_NAMESPACE = "cgroup:[4026531835]"  # the kernel's PROC_CGROUP_INIT_INO
_MOST_BYTES = 65536
# Names of what makes containers, in the paths of their control groups. Others may combine a /dev and a filter freely.
_RUNTIME = re.compile(r"(?:docker|libpod|nerdctl|crio|containerd)[-/][0-9a-f]{12}|kubepods|/[0-9a-f]{64}(?:/|$)")
_SLURM_JOB = re.compile(r"/slurm[^/]*/uid_[0-9]+/job_[0-9]+")
_RULE = re.compile(rb"(?:a|c) (\*|[0-9]{1,7}):(\*|[0-9]{1,7}) ([rwm]{1,3})")
# include/uapi/linux/bpf.h
_BPF_PROG_QUERY, _BPF_CGROUP_DEVICE, _BPF_F_QUERY_EFFECTIVE = 16, 6, 1
_BPF_CALL = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361, "s390x": 351}
_QUERY = struct.Struct("=IIIIQIIQQQ")  # target, type, flags, attached, programs, count, ...
# include/uapi/linux/capability.h: without one of these the kernel refuses the query
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21


class Rule(NamedTuple):
    """What is let through; None is any number. ``access`` is of ``r``, ``w`` and ``m``."""

    major: int | None
    minor: int | None
    access: str


class Filter(NamedTuple):
    """What there is between a process and the devices that it has files of.

    ``filtered``: whether a filter with unknown contents denies it some; None where that is not known. ``rules`` are of
    a filter that is known: nothing else passes; None where there is none. ``of_job``: a batch system's control group.
    ``of_runtime``: one that a container runtime has made, which makes /dev and filter from one list.
    """

    filtered: bool | None
    rules: tuple[Rule, ...] | None = None
    told: tuple[str, ...] = ()
    of_job: bool = False
    of_runtime: bool = False

    def lets(self, number: int, access: str) -> bool:
        """Whether the rules let a character device with these numbers be opened for ``access``."""
        major, minor = os.major(number), os.minor(number)
        return self.rules is None or any(
            rule.major in (None, major) and rule.minor in (None, minor) and set(access) <= set(rule.access)
            for rule in self.rules
        )


class Filters:
    """Filters by control group, looked at once between two calls of ``refresh``."""

    def __init__(self, procfs: str, sysfs: str) -> None:
        self._procfs, self._folder = procfs, f"{sysfs}/fs/cgroup"
        self._units = UnitPolicies()
        self._known: dict[tuple[str | None, str | None], Filter] = {}
        self._of_host = True
        self._may_query = False

    def refresh(self) -> None:
        """Control groups may have changed."""
        self._known.clear()
        self._units.refresh()
        self._of_host = _sees_the_host(self._procfs)
        self._may_query = _may_query(self._procfs)

    def of(self, pid: int) -> Filter:
        """The filter on a process; unknown where its control groups cannot be read."""
        path = f"{self._procfs}/{pid}/cgroup"
        try:
            text = read_regular(path, _MOST_BYTES)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not os.path.lexists(f"{self._procfs}/self/cgroup"):
                return Filter(False, told=("no device filter (this kernel has no control groups)",))
            return Filter(None, told=(f"device filter not known: {path}: {error.strerror}",))
        groups = _groups(text)
        if groups not in self._known:
            self._known[groups] = self._looked_up(*groups)
        return self._known[groups]

    def _looked_up(self, listed: str | None, unified: str | None) -> Filter:
        paths = [path for path in (listed, unified) if path is not None]
        if not paths:
            return Filter(False, told=("no device filter (no control group could have one)",))
        of_job = any("slurm" in path for path in paths)
        of_runtime = any(_RUNTIME.search(path) for path in paths)
        if not self._of_host or any(path.startswith("/..") or "\0" in path for path in paths):
            elsewhere = ("device filter not known: control groups are not seen from the host's",)
            return Filter(None, None, elsewhere, of_job, of_runtime)
        found = [self._listed(listed)] if listed is not None else []
        found += [self._unified(unified)] if unified is not None else []
        each_filtered = [each.filtered for each in found]
        rules = next((each.rules for each in found if each.rules is not None), None)
        told = tuple(dict.fromkeys(sentence for each in found for sentence in each.told))
        return Filter(_all_of(each_filtered), rules, told, of_job, of_runtime)

    def _listed(self, path: str) -> Filter:
        """The first version's."""
        folder = f"{self._folder}/devices{path}"
        rules = _rules(f"{folder}/devices.list")
        if rules is not None:
            return Filter(False, rules, (f"device filter: devices.list of {_shown(path)}",))
        # A list that lets all through does not show what was taken from it, so it tells nothing.
        if _SLURM_JOB.search(path):  # it has groups of this controller only where it constrains jobs to their devices
            return Filter(True, told=(f"a device filter (Slurm's) on {_shown(path)}",))
        return self._by_systemd(path, folder)

    def _unified(self, path: str) -> Filter:
        """The second version's."""
        folder = self._folder + ("/unified" if os.path.isdir(f"{self._folder}/unified") else "") + path  # noqa: PTH112
        count = _programs(folder) if self._may_query else None
        if count is not None:
            some = f"a device filter (bpf, {count} programs) on {_shown(path)}"
            return Filter(count > 0, told=(some if count else "no device filter (bpf)",))
        return self._by_systemd(path, folder)

    def _by_systemd(self, path: str, folder: str) -> Filter:
        if path == "/":
            return Filter(False, told=("no device filter (the root control group)",))
        unknown = Filter(None, told=(f"device filter of {_shown(path)} not known",))
        if "slurm" in path:  # Slurm puts filters of its own on what it had systemd make
            return unknown
        try:
            inode = os.stat(folder).st_ino  # noqa: PTH116
        except OSError:
            return unknown
        answer = self._units.has_filter(path, inode)
        if answer is None:
            return unknown
        return Filter(answer, told=(f"{'a' if answer else 'no'} device filter (systemd) on {_shown(path)}",))


def _all_of(answers: Sequence[bool | None]) -> bool | None:
    """No filter only where none of them is one."""
    if True in answers:
        return True
    return None if None in answers else False


def _groups(text: bytes) -> tuple[str | None, str | None]:
    """The paths in the hierarchy with the controller ``devices``, and in the second version's."""
    listed = unified = None
    for line in text.split(b"\n"):
        number, _, rest = line.partition(b":")
        controllers, _, path = rest.partition(b":")
        if not path.startswith(b"/"):
            continue
        if b"devices" in controllers.split(b","):
            listed = os.fsdecode(path)
        elif number == b"0" and not controllers:
            unified = os.fsdecode(path)
    return listed, unified


def _rules(path: str) -> tuple[Rule, ...] | None:
    """None where the list cannot be read, is not whole, or lets all through."""
    try:
        text = read_regular(path, _MOST_BYTES)
    except OSError:
        return None
    lines = [line for line in text.split(b"\n") if line and not line.startswith(b"b ")]
    matches = [_RULE.fullmatch(line) for line in lines]
    if len(text) == _MOST_BYTES or not all(matches) or any(line.startswith(b"a") for line in lines):
        return None
    return tuple(Rule(_number(match[1]), _number(match[2]), match[3].decode()) for match in matches if match)


def _number(text: bytes) -> int | None:
    return None if text == b"*" else int(text)


def _sees_the_host(procfs: str) -> bool:
    """Whether paths of control groups are the host's. A kernel without such namespaces has one view for all."""
    try:
        return os.readlink(f"{procfs}/self/ns/cgroup") == _FIRST_NAMESPACE  # noqa: PTH115
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _may_query(procfs: str) -> bool:
    """Looked at before the call is made: a unit's ``SystemCallFilter`` may end a program that makes it in vain."""
    with contextlib.suppress(OSError, ValueError):
        match = re.search(rb"^CapEff:\t([0-9a-f]{1,16})$", read_regular(f"{procfs}/self/status", 65536), re.MULTILINE)
        capabilities = int(match[1], 16) if match else 0
        return bool((capabilities >> _CAP_NET_ADMIN | capabilities >> _CAP_SYS_ADMIN) & 1)
    return False


def _programs(folder: str) -> int | None:
    """How many programs filter devices for a control group, its parents' included; None where nobody says."""
    call = _BPF_CALL.get(platform.machine())
    if call is None:
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        query = bytearray(_QUERY.pack(descriptor, _BPF_CGROUP_DEVICE, _BPF_F_QUERY_EFFECTIVE, *[0] * 7))
        given = (ctypes.c_char * len(query)).from_buffer(query)
        failed = ctypes.CDLL(None, use_errno=True).syscall(call, _BPF_PROG_QUERY, given, len(query))
        count: int = _QUERY.unpack(query)[5]
    finally:
        os.close(descriptor)
    return None if failed else count


def _shown(path: str) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")
