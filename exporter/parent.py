"""A worker's ties to the process that started it: its asks, and its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Iterator

from exporter import __version__
from exporter.wire import HEADER, MAX_FRAME_BYTES, Ask, decode_ask

OTHER_VERSION = 78
"""The exit status of a child that is not of the daemon's version."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def asks(parent: socket.socket) -> Iterator[Ask]:
    """The parent's asks as they come, until it is gone."""
    while header := _receive(parent, HEADER.size):
        (length,) = HEADER.unpack(header)
        body = _receive(parent, length) if length <= MAX_FRAME_BYTES else b""
        if not body:
            return
        yield decode_ask(body)


def _receive(parent: socket.socket, length: int) -> bytes:
    """Exactly that many bytes; empty when the parent is gone."""
    data = bytearray()
    while len(data) < length:
        piece = parent.recv(length - len(data))
        if not piece:
            return b""
        data += piece
    return bytes(data)


def end_unless_of_version(daemon: str) -> None:
    """A daemon that was upgraded and not restarted starts children of the new program: what they would tell it may mean
    something else by now.
    """
    if daemon != __version__:
        os._exit(OTHER_VERSION)


def end_with_the_parent() -> None:
    """SIGKILL when the daemon is gone, whatever hangs: a library that is being loaded keeps every thread waiting."""
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
