"""Asking in processes of their own: what may hang in the kernel, or crash, hangs and crashes there."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

_PIECE_BYTES = 65536


class Told(NamedTuple):
    """The lines that a script printed, and whether it ended by itself in time."""

    lines: tuple[str, ...]
    ended: bool


class Script:
    """A Python script that has been started, without anything but the standard library."""

    def __init__(self, source: str, arguments: Sequence[str]) -> None:
        """Raises ``OSError`` where no process can be started."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", source, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def told(self, until: float) -> Told:
        """All that it prints until it ends, or until then on the monotonic clock, when it is killed.

        What hangs in the kernel cannot be killed, so its end is not waited for.
        """
        assert self._process.stdout is not None  # noqa: S101
        with self._process.stdout as stream:
            said, ended = _read(stream.fileno(), until)
        if not ended:
            self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)
        lines = said.decode("utf-8", "surrogateescape").splitlines()
        return Told(tuple(lines), ended)


def _read(descriptor: int, until: float) -> tuple[bytes, bool]:
    said = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while selector.select(max(0.0, until - time.monotonic())):  # what is there by now is read though it is late
            piece = os.read(descriptor, _PIECE_BYTES)
            if not piece:
                return said, True
            said += piece
    return said, False
