"""Which GPU device files a live process can open, seen from outside: its /dev, their modes, its device filter, and what
it has open.

No device is opened and nothing of the process's memory is read. What is another user's takes root, or CAP_SYS_PTRACE.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Collection

from msgspec.structs import replace

from exporter.files import read_regular
from exporter.fleets.device_files import READ, WRITE, Listing, Subject, listing, may_open, subject
from exporter.fleets.device_filter import Filter, Filters
from exporter.fleets.device_numbers import Numbers, instances
from exporter.model import Opens

_MOST_BYTES = 65536
_MOST_DESCRIPTORS = 8192
# Only what may be a GPU's is looked at by its number: to look at a file of a server that is gone would wait for it.
_MAYBE_DEVICE = re.compile(r"/dev/|.*/(?:nvidia|renderD|kfd)[^/]*$", re.DOTALL)

_Identity = tuple[int, int]


class Access:
    """What processes can open. To be refreshed before each round; within one, equal questions are asked once."""

    def __init__(self, procfs: str, sysfs: str) -> None:
        self._procfs, self._sysfs = procfs, sysfs
        self._filters = Filters(procfs, sysfs)
        self._listings: dict[tuple[_Identity | None, ...], Listing] = {}
        self.refresh()

    def refresh(self) -> None:
        """Drivers may have been loaded, and files made, since."""
        self._numbers = Numbers(self._procfs, self._sysfs)
        self._filters.refresh()
        self._listings.clear()
        self._own_users = _identity(f"{self._procfs}/self/ns/user", follow=True)
        self._own_dev, first_dev = _identity("/dev"), _identity(_dev_of(f"{self._procfs}/1/root"))
        self._systems_of_host = {found[0] for found in (self._own_dev, first_dev) if found}

    def of(self, pid: int) -> Opens:
        """What a process can open; ``may`` is None where that cannot be seen, or the process has ended meanwhile."""
        place, numbers = f"{self._procfs}/{pid}", self._numbers_held(pid)
        held = instances({name for name in map(self._numbers.name, numbers or ()) if name})
        last = f"{place}/fd cannot be read" if numbers is None else f"{place}/fd has {_listed(held)} open"
        opens = self._seen(pid, place)
        holds = any(map(self._is_gpus, numbers or ()))
        return replace(opens, held=held, holds=holds, told=(*opens.told, last))

    def _seen(self, pid: int, place: str) -> Opens:
        """What its /dev says, whatever it has open."""
        try:
            there, who = self._listing(f"{place}/root", f"{place}/ns/mnt"), self._subject(place)
        except OSError as error:
            return Opens(may=None, told=(f"/dev under {place}/root: {error.strerror}",))
        here = there.folder is not None and there.folder == self._own_dev
        if who is None:
            return Opens(may=None, here=here, told=(f"{place}/status does not say who the process is",))
        return replace(self._judged(place, there, who, self._filters.of(pid)), here=here)

    def _judged(self, place: str, there: Listing, who: Subject, kept: Filter) -> Opens:
        """What modes and the device filter leave of a /dev."""
        answers = self._answers(there, who, kept)
        may = instances({name for name, answer in answers.items() if answer})
        unsure = instances({name for name, answer in answers.items() if answer is not False}) - may
        denied = instances(answers) - may - unsure
        told = [f"/dev under {place}/root has {_listed(instances(answers))}", *kept.told]
        if denied:
            told.append(f"file modes or the list of its device filter deny it {_listed(denied)}")
        filtered = kept.filtered
        if filtered is not False and self._is_of_runtime(there, kept):
            # Container runtimes put into a /dev that they make what the filter that they make lets through.
            filtered = False
            told.append(f"/dev under {place}/root is a container's own: it has no more than its device filter allows")
        return Opens(may=may, unsure=unsure, filtered=filtered, told=tuple(told))

    def _answers(self, there: Listing, who: Subject, kept: Filter) -> dict[str, bool | None]:
        """By name, capabilities included, which need to be read only. One of several files is enough."""
        answers: dict[str, bool | None] = {}
        for file in there.files:
            name = self._numbers.name(file.number)
            wanted, access = (READ, "r") if "/" in name else (READ | WRITE, "rw")
            answer = may_open(who, file, wanted) if kept.lets(file.number, access) else False
            answers[name] = max(answers.get(name, False), answer, key=(False, None, True).index)
        return answers

    def _is_of_runtime(self, there: Listing, kept: Filter) -> bool:
        """Whether a container runtime has made this /dev. A batch system's filter comes on top of a container's."""
        if self._own_dev is None or there.folder is None or kept.of_job or not kept.of_runtime:
            return False
        return there.folder[0] not in self._systems_of_host

    def _listing(self, root: str, namespace: str) -> Listing:
        """The same for all processes that see the same."""
        key = (_identity(namespace, follow=True), _identity(root, follow=True), _identity(_dev_of(root)))
        if key not in self._listings:
            self._listings[key] = listing(root, lambda number: bool(self._numbers.name(number)))
        return self._listings[key]

    def _subject(self, place: str) -> Subject | None:
        users = _identity(f"{place}/ns/user", follow=True)
        capable = users is not None and users == self._own_users
        return subject(read_regular(f"{place}/status", _MOST_BYTES), capable=capable)

    def _is_gpus(self, number: int) -> bool:
        return self._numbers.is_control(number) or bool(self._numbers.name(number))

    def _numbers_held(self, pid: int) -> set[int] | None:
        try:
            with os.scandir(f"{self._procfs}/{pid}/fd") as entries:
                first = itertools.islice(entries, _MOST_DESCRIPTORS)
                return {number for entry in first if (number := _device_number(entry.path))}
        except OSError:
            return None


def _dev_of(root: str) -> str:
    return os.path.join(root, "dev")  # noqa: PTH118


def _device_number(link: str) -> int:
    """Of the character device that a descriptor is, 0 for anything else. Raises ``PermissionError``."""
    try:
        if not _MAYBE_DEVICE.match(os.readlink(link)):  # noqa: PTH115  (tens of thousands a round)
            return 0
        seen = os.stat(link)  # noqa: PTH116  (goes to the open file by itself, whatever is at its path now)
    except PermissionError:
        raise
    except OSError:  # closed meanwhile, or of a file system in trouble
        return 0
    return seen.st_rdev if stat.S_ISCHR(seen.st_mode) else 0


def _identity(path: str, *, follow: bool = False) -> _Identity | None:
    """Device and inode; None where there is nothing, or nothing that may be seen."""
    try:
        seen = os.stat(path, follow_symlinks=follow)  # noqa: PTH116
    except OSError:
        return None
    return seen.st_dev, seen.st_ino


def _listed(names: Collection[str]) -> str:
    """In the order of their numbers."""
    parts = {name: [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name)] for name in names}
    return ", ".join(sorted(names, key=parts.__getitem__)) or "no GPU file"
