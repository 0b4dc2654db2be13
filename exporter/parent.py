"""A worker's ties to the process that started it: its asks, and its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Iterator

import msgspec

from exporter import __version__
from exporter.wire import Ask, decode_ask, frames

OTHER_VERSION = 78
"""The exit status of a child that is not of the daemon's version."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PIECE_BYTES = 4096


def asks(parent: socket.socket) -> Iterator[Ask]:
    """The parent's asks as they come, until it is gone, or says what is none."""
    received = bytearray()
    with contextlib.suppress(msgspec.DecodeError):
        while data := parent.recv(_PIECE_BYTES):
            received += data
            yield from map(decode_ask, frames(received))


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
