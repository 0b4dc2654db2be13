"""The GPU device files in a process's /dev, and whom their modes let open them.

Nothing is opened that is a device: ``O_PATH`` names a file without asking its driver, and so wakes no card. A process
may have put anything where its /dev is, so no link is followed in there, and folders are gone into one by one.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

READ, WRITE, SEARCH = 4, 2, 1

_SUBFOLDERS = ("dri", "nvidia-caps")
_MOST_ENTRIES = 16384
# What a link of such a name leads to may well be a GPU's file.
_GPU_NAME = re.compile(r"(?:nvidia[0-9]+|renderD[0-9]+|kfd)$")
_INSIDE = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# include/uapi/linux/capability.h
_CAP_DAC_OVERRIDE, _CAP_DAC_READ_SEARCH = 1, 2
# include/uapi/linux/posix_acl.h, posix_acl_xattr.h
_ACL_ATTRIBUTE, _ACL_VERSION = "system.posix_acl_access", 2
_ACL_USER, _ACL_GROUP_OBJ, _ACL_GROUP, _ACL_MASK = 2, 4, 8, 16


class Guard(NamedTuple):
    """Who may use a file or search a folder. ``acl`` is as the kernel gives it: empty where there is none, None where
    it could not be read.
    """

    owner: int
    group: int
    mode: int
    acl: bytes | None


class DeviceFile(NamedTuple):
    """A device's numbers, and the guards on the way to it: those of its folders, then its own."""

    number: int
    guards: tuple[Guard, ...]


class Listing(NamedTuple):
    """A /dev: which folder it is, by device and inode (None: there is none), and the files that can be opened in it."""

    folder: tuple[int, int] | None
    files: tuple[DeviceFile, ...]


class Subject(NamedTuple):
    """A process as modes see it: the user and the groups that it uses files with, and what it may do regardless."""

    user: int
    groups: frozenset[int]
    override: bool
    search: bool


def subject(status: bytes, *, capable: bool) -> Subject | None:
    """From a process's ``status``. Its capabilities say nothing unless it is ``capable``: in another user namespace
    they are not for the host's device files. None where something is missing.
    """
    found = dict(re.findall(rb"^(\w+):\t?(.*)$", status, re.MULTILINE))
    try:
        users, groups = found[b"Uid"].split(), found[b"Gid"].split()
        others, capabilities = found[b"Groups"].split(), int(found[b"CapEff"], 16)
        # The fourth is the one that files are used with (fsuid, fsgid).
        return Subject(
            int(users[3]),
            frozenset((int(groups[3]), *map(int, others))),
            capable and bool(capabilities >> _CAP_DAC_OVERRIDE & 1),
            capable and bool(capabilities >> _CAP_DAC_READ_SEARCH & 1),
        )
    except (KeyError, IndexError, ValueError):
        return None


def may_open(who: Subject, file: DeviceFile, wanted: int) -> bool | None:
    """Whether modes let a process open a file for ``wanted``, :data:`READ` and :data:`WRITE`; None where an access
    list that cannot be read decides.
    """
    *folders, own = file.guards
    answers = [_permits(who, folder, SEARCH) for folder in folders] + [_permits(who, own, wanted)]
    return False if False in answers else None if None in answers else True


def _permits(who: Subject, guard: Guard, wanted: int) -> bool | None:
    """As the kernel's ``generic_permission``."""
    if who.override or (who.search and (wanted == READ or stat.S_ISDIR(guard.mode))):
        return True
    if who.user == guard.owner:
        return _has(guard.mode >> 6, wanted)
    if guard.acl != b"" and guard.mode & stat.S_IRWXG:  # which is the list's mask; an empty one puts the list aside
        return _acl_permits(who, guard, wanted)
    return _has(guard.mode >> 3 if guard.group in who.groups else guard.mode, wanted)


def _acl_permits(who: Subject, guard: Guard, wanted: int) -> bool | None:
    """As the kernel's ``posix_acl_permission``, of which logind's ``uaccess`` makes use."""
    acl = guard.acl
    if acl is None or len(acl) % 8 != 4 or int.from_bytes(acl[:4], "little") != _ACL_VERSION:
        return None
    entries: list[tuple[int, int, int]] = list(struct.iter_unpack("<HHI", acl[4:]))
    mask = next((rights for tag, rights, _ in entries if tag == _ACL_MASK), 7)
    for tag, rights, user in entries:
        if tag == _ACL_USER and user == who.user:
            return _has(rights & mask, wanted)
    groups = [
        (rights, guard.group if tag == _ACL_GROUP_OBJ else group)
        for tag, rights, group in entries
        if tag in (_ACL_GROUP, _ACL_GROUP_OBJ)
    ]
    mine = [rights for rights, group in groups if group in who.groups]
    return any(_has(rights & mask, wanted) for rights in mine) if mine else _has(guard.mode, wanted)


def _has(rights: int, wanted: int) -> bool:
    return rights & wanted == wanted


def listing(root: str, is_wanted: Callable[[int], bool]) -> Listing:
    """The device files with wanted numbers below the ``dev`` of a process's root.

    Raises ``OSError`` where the root or something in it cannot be read, is a link, or has too many entries.
    """
    with _opened(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC) as top:
        try:
            with _opened("dev", _INSIDE, top) as folder:
                there = os.fstat(folder)
                return Listing((there.st_dev, there.st_ino), tuple(_all_files(folder, is_wanted)))
        except FileNotFoundError:
            return Listing(None, ())


def _all_files(folder: int, is_wanted: Callable[[int], bool]) -> Iterator[DeviceFile]:
    outer = (_guard(folder),)
    yield from _files(folder, outer, is_wanted)
    for name in _SUBFOLDERS:
        with contextlib.suppress(FileNotFoundError), _opened(name, _INSIDE, folder) as inner:
            yield from _files(inner, (*outer, _guard(inner)), is_wanted)


def _files(folder: int, outer: tuple[Guard, ...], is_wanted: Callable[[int], bool]) -> Iterator[DeviceFile]:
    """Of one folder. What the folder calls a plain file is looked at too: a device may be mounted on it."""
    with os.scandir(folder) as entries:
        for place, entry in enumerate(itertools.islice(entries, _MOST_ENTRIES + 1)):
            if place == _MOST_ENTRIES:
                raise OSError(errno.E2BIG, f"more than {_MOST_ENTRIES} entries")
            if entry.is_symlink() and _GPU_NAME.match(entry.name):
                raise OSError(errno.ELOOP, f"{entry.name} is a link, which is not followed")
            if entry.is_symlink() or entry.is_dir(follow_symlinks=False):
                continue
            with contextlib.suppress(FileNotFoundError):
                seen = entry.stat(follow_symlinks=False)
                if stat.S_ISCHR(seen.st_mode) and is_wanted(seen.st_rdev):
                    yield from _file(entry.name, folder, outer, seen.st_rdev)


def _file(name: str, folder: int, outer: tuple[Guard, ...], number: int) -> Iterator[DeviceFile]:
    """Nothing where the file system lets nobody open devices, or where another file has taken its place meanwhile."""
    with _opened(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, folder) as file:
        seen = os.fstat(file)
        same = stat.S_ISCHR(seen.st_mode) and seen.st_rdev == number
        if same and not os.fstatvfs(file).f_flag & os.ST_NODEV:
            yield DeviceFile(number, (*outer, _guard(file)))


def _guard(file: int) -> Guard:
    seen = os.fstat(file)
    return Guard(seen.st_uid, seen.st_gid, seen.st_mode, _acl(file))


def _acl(file: int) -> bytes | None:
    try:
        return os.getxattr(f"/proc/self/fd/{file}", _ACL_ATTRIBUTE)
    except OSError as error:
        return b"" if error.errno in (errno.ENODATA, errno.EOPNOTSUPP) else None


@contextlib.contextmanager
def _opened(path: str, flags: int, folder: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, flags, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
