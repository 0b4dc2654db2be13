"""The process that asks a runtime's driver library which devices it shows: ``python -P -m exporter.asking RUNTIME``.

It asks under the environment that it was started with, prints one line, :class:`exporter.wire.DriverAnswer` as JSON,
and ends with status 0. A library may print, hang, or end the process at any point: whoever started it has to tell that
by the line that is missing, and by the signal or the time.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
from collections.abc import Sequence
from typing import NoReturn

from exporter import __version__
from exporter.drivers import DRIVERS, ask
from exporter.drivers.calls import Refused
from exporter.parent import end_unless_of_version, end_with_the_parent
from exporter.wire import DriverAnswer, driver_line


def main(arguments: Sequence[str]) -> NoReturn:
    """The process: never returns, as what libraries leave to be run at the end may hang."""
    parser = argparse.ArgumentParser(prog="exporter.asking")
    parser.add_argument("runtime", choices=sorted(DRIVERS))
    parser.add_argument("--daemon-version", default=__version__)
    options = parser.parse_args(arguments)
    end_unless_of_version(options.daemon_version)
    runtime: str = options.runtime
    status = 1
    try:
        end_with_the_parent()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is foreseen here
        answers = _silenced()
        with open(answers, "wb") as out:  # noqa: PTH123
            out.write(driver_line(_answer(runtime)))
        status = 0
    finally:
        os._exit(status)


def _silenced() -> int:
    """Where stdout went, as a new descriptor. From now on what is printed or complained of by anyone goes nowhere."""
    answers = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    return answers


def _answer(runtime: str) -> DriverAnswer:
    try:
        return ask(runtime)
    except Refused as refused:
        return DriverAnswer(fault=str(refused))


if __name__ == "__main__":
    main(sys.argv[1:])
