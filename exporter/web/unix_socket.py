"""Sockets that clients of this host reach by a path, ``unix:/PATH``, or by an abstract name, ``unix:@NAME``.

Who may connect is said by the file's mode, and by the folders above it: its owner and its group. An abstract name has
no mode, so every process in the same network namespace may. Source: unix(7).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from exporter.errors import CouldNot, InputError

MODE = 0o660
"""Of the file: connecting takes the right to write."""

_PREFIX = "unix:"
_MOST_BYTES = 107  # sun_path has 108, and a zero at the end
_LOCK_SECONDS, _LOCK_AGAIN_SECONDS = 1.0, 0.01


def is_unix(text: str) -> bool:
    """Whether an address is of this kind; ``unix:9100`` is a port of a host of that name."""
    return text.startswith((f"{_PREFIX}/", f"{_PREFIX}@"))


def parse_path(text: str) -> bytes:
    """What the socket is bound to. Raises :class:`InputError`."""
    name = os.fsencode(text.removeprefix(_PREFIX))
    if len(name) > _MOST_BYTES:
        raise InputError(
            f"--web.listen-address: found '{text}', whose path has {len(name)} bytes: "
            f"expected {_MOST_BYTES} at most, which is all that a socket's address has room for"
        )
    if name in (b"/", b"@") or b"\0" in name:
        raise InputError(f"--web.listen-address: found '{text}', expected unix:/PATH or unix:@NAME")
    return b"\0" + name[1:] if name.startswith(b"@") else name


class PathSocket(socket.socket):
    """A listening socket whose file goes when it is closed, if the file is still the one that it made."""

    _path = b""
    _file = -1  # held open, so that no other file gets its inode number

    def bind_to(self, path: bytes) -> None:
        """Make the file, with :data:`MODE` and never more."""
        os.fchmod(self.fileno(), MODE)  # which the file is made with, less the umask
        self.bind(path)
        self._path = path
        self._file = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        Path(f"/proc/self/fd/{self._file}").chmod(MODE)  # what the umask took away

    def close(self) -> None:
        """Remove the file, while the socket still listens and so nobody else puts one there; and close."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                if _same(os.lstat(self._path), os.fstat(self._file)):
                    os.unlink(self._path)  # noqa: PTH108  (a name of bytes)
            os.close(self._file)
            self._file = -1
        super().close()


def listening(text: str, backlog: int) -> socket.socket:
    """A socket that listens there. The file of one where nobody listens any more is replaced.

    Raises :class:`InputError`, ``OSError``, and :class:`CouldNot` where somebody listens, or something else is there.
    """
    path = parse_path(text)
    bound = PathSocket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.startswith(b"\0"):
            bound.bind(path)
            bound.listen(backlog)
        else:
            with _alone_in(os.path.dirname(path)):  # noqa: PTH120  (a name of bytes)
                _make_way(text, path)
                bound.bind_to(path)
                bound.listen(backlog)
        bound.setblocking(False)
    except (OSError, CouldNot):
        bound.close()
        raise
    return bound


@contextlib.contextmanager
def _alone_in(folder: bytes) -> Iterator[None]:
    """Other daemons that start now wait: one that is bound and does not listen yet would look dead to them.

    Whoever may read the folder can hold the lock, so it is not waited for for long.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    until = time.monotonic() + _LOCK_SECONDS
    try:
        while time.monotonic() < until:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(_LOCK_AGAIN_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _make_way(text: str, path: bytes) -> None:
    """Remove the file of a socket where nobody listens."""
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(there.st_mode):
        raise CouldNot(f"cannot listen on {text}: there is something that is no socket, which is left as it is")
    if is_answered(path):
        raise CouldNot(f"cannot listen on {text}: another program listens there")
    if _same(there, os.lstat(path)):
        os.unlink(path)  # noqa: PTH108  (a name of bytes)


def is_answered(path: bytes) -> bool:
    """Whether somebody listens there, or may do so. Raises ``OSError`` where that may not be asked."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(path)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                raise
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return True


def _same(one: os.stat_result, other: os.stat_result) -> bool:
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)
