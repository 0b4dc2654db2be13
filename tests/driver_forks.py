"""Asks one runtime's driver library under many environments: a fork for each, as a library reads its own only once.

``python -P -X utf8 driver_forks.py RUNTIME`` reads a line for each question, a JSON mapping of variables to be laid
over its own, and prints a line for each, a JSON mapping: ``status`` is how the fork ended (negative: by that signal),
``answer`` the driver's answer as :func:`exporter.wire.driver_line` has it, empty where the fork ended without one. For
the pretend Vulkan ``ggml`` has what ``fake_ggml_vk_devices`` says: raw positions, or null where the backend is lost.

Lone surrogates in the text stand for bytes that are no UTF-8, as ``os.environ`` has it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from importlib import import_module

from exporter.drivers import DRIVERS, ask
from exporter.drivers.calls import Refused
from exporter.wire import DriverAnswer, driver_line

SECONDS = 20
"""Whoever takes longer has hung, and ends by SIGALRM."""
MOST_DEVICES = 4096


def main(runtime: str) -> None:
    """One runtime's questions from stdin, until it ends."""
    import_module(DRIVERS[runtime].partition(":")[0])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # some libraries abort, as the real ones do
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # and say so
    for line in sys.stdin:
        print(json.dumps(_in_a_fork(runtime, json.loads(line))), flush=True)


def _in_a_fork(runtime: str, variables: Mapping[str, str]) -> dict[str, object]:
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        os.close(reader)
        _say(runtime, variables, writer)
    os.close(writer)
    with open(reader, encoding="utf-8") as said:  # noqa: PTH123
        lines = [*said.read().split("\n"), "", ""]
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return {"status": status, "answer": lines[0], "ggml": json.loads(lines[1] or "null")}


def _say(runtime: str, variables: Mapping[str, str], writer: int) -> None:
    """Never returns, nor runs what a library left to be run at the end."""
    status = 1
    try:
        signal.alarm(SECONDS)
        os.environ.update(variables)
        with open(writer, "wb") as out:
            out.write(driver_line(_answer(runtime)))
            out.write(json.dumps(_ggml() if runtime == "vulkan" else None).encode())
        status = 0
    finally:
        os._exit(status)


def _answer(runtime: str) -> DriverAnswer:
    try:
        return ask(runtime)
    except Refused as refused:
        return DriverAnswer(fault=str(refused))


def _ggml() -> list[int] | None:
    found = (ctypes.c_uint32 * MOST_DEVICES)()
    count = ctypes.CDLL("libvulkan.so.1").fake_ggml_vk_devices(found, MOST_DEVICES)
    return None if count < 0 else list(found[:count])


if __name__ == "__main__":
    main(sys.argv[1])
