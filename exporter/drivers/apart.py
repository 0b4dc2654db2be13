"""Asking in a process of its own: a library that keeps what it found first cannot be asked twice in one process."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from exporter.drivers.calls import Refused
from exporter.parent import end_with_the_parent
from exporter.wire import DriverAnswer, decode_driver_line, driver_line


def apart(question: Callable[[], DriverAnswer]) -> DriverAnswer:
    """What ``question`` answers in a fork of this process, which ends with this one.

    If the fork ends by a signal so does this process: it is the library's crash. Raises :class:`Refused` if it ends
    without an answer in another way.
    """
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        _print(question, writer)
    os.close(writer)
    with open(reader, "rb") as said:  # noqa: PTH123
        line = said.read()
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if status < 0:
        os.kill(os.getpid(), -status)
    try:
        return decode_driver_line(line)
    except msgspec.DecodeError as error:
        raise Refused(f"a process that asked ended with status {status} and without an answer") from error


def _print(question: Callable[[], DriverAnswer], writer: int) -> None:
    """Never returns, nor runs what a library left to be run at the end."""
    status = 1
    try:
        end_with_the_parent()
        with open(writer, "wb") as out:
            out.write(driver_line(question()))
        status = 0
    finally:
        os._exit(status)
