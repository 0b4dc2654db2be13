"""Asks drivers which devices they show, each in a process of its own that has the workload's masks and nothing else of
it. Never on the way of a scrape: an answer is there for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from exporter import __version__
from exporter.masks import RUNTIMES
from exporter.probing import Question
from exporter.wire import DriverAnswer, decode_driver_line

log = logging.getLogger("exporter.probe")

# A driver without persistence takes seconds to start.
DEADLINE_SECONDS = 30.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 30.0, 3600.0
_MOST_BYTES = 1 << 20
_MOST_ANSWERS = 1024
# What else of the exporter's own environment would make a driver show other devices, or other code answer.
_DRIVER_PREFIXES = (
    *("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "HSA_", "GPU_", "AMD_", "GGML_", "ZE_", "ZEL_", "ZES_", "ZET_", "NEO_"),
    *("SYCL_", "ONEAPI_", "UR_", "VK_", "MESA_", "DRI_", "DISPLAY", "WAYLAND_", "NODEVICE_"),
)
_VARIABLES = frozenset(name for runtime in RUNTIMES.values() for name in runtime.variables)


class _Failed(NamedTuple):
    """How often a question found no answer, and when it may be asked again (monotonic)."""

    times: int
    not_before: float


class Prober:
    """Asks one question after the other; what a question's answer was is kept, and given again without asking."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.answers: dict[Question, DriverAnswer] = {}
        self._environ = {name: value for name, value in environ.items() if not _is_drivers(name)}
        self._failed: dict[Question, _Failed] = {}
        self._wanted: dict[Question, None] = {}
        self._task: asyncio.Task[None] | None = None
        self._said: set[tuple[str, str]] = set()

    def want(self, questions: Iterable[Question]) -> None:
        """Have these answered, as soon as that can be; those asked for earlier and not now are dropped.

        One that was answered was so to no use: a driver that just starts shows fewer cards. It is asked again later.
        """
        now = time.monotonic()
        for question in questions:
            if self.answers.pop(question, None) is not None:
                self._note_failure(question, "its answer does not name every card")
        self._wanted = {question: None for question in sorted(questions, key=repr) if self._may_ask(question, now)}
        if self._wanted and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._ask_all())

    def _may_ask(self, question: Question, now: float) -> bool:
        failed = self._failed.get(question)
        return question not in self.answers and (failed is None or now >= failed.not_before)

    async def answered(self, within_seconds: float) -> None:
        """Wait until nothing is left to be asked."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=within_seconds)

    async def stop(self, within_seconds: float) -> None:
        """End what is being asked; what SIGKILL cannot end is left behind."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=within_seconds)

    async def _ask_all(self) -> None:
        while self._wanted:
            question = next(iter(self._wanted))
            answer = await self._ask(question)
            self._wanted.pop(question, None)
            if answer.fault:
                self._note_failure(question, answer.fault)
            else:
                self._note_answer(question, answer)

    def _note_answer(self, question: Question, answer: DriverAnswer) -> None:
        for oldest in list(self.answers)[: max(0, len(self.answers) - _MOST_ANSWERS + 1)]:
            del self.answers[oldest]
        self.answers[question] = answer
        shown = len(answer.devices if answer.vulkan is None else answer.vulkan)
        fields = {"runtime": question.runtime, "library": answer.file, "version": answer.version, "devices": shown}
        log.info("driver asked", extra={"fields": fields | dict(question.env)})

    def _note_failure(self, question: Question, fault: str) -> None:
        times = self._failed.get(question, _Failed(0, 0.0)).times + 1
        pause = min(_FIRST_PAUSE_SECONDS * 2.0 ** min(times - 1, 16), _LONGEST_PAUSE_SECONDS)
        for oldest in list(self._failed)[: max(0, len(self._failed) - _MOST_ANSWERS + 1)]:
            del self._failed[oldest]
        self._failed[question] = _Failed(times, time.monotonic() + pause)
        if (question.runtime, fault) not in self._said:
            self._said.add((question.runtime, fault))
            log.info("driver gives no answer", extra={"fields": {"runtime": question.runtime, "detail": fault}})

    async def _ask(self, question: Question) -> DriverAnswer:
        """One answer; what prevents one is its fault."""
        command = (sys.executable, "-P", "-m", "exporter.asking", question.runtime, f"--daemon-version={__version__}")
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=self._environ | {"PYTHONPATH": _package_path(self._environ)} | dict(question.env),
                cwd="/",
                start_new_session=True,
                limit=_MOST_BYTES,
            )
        except (OSError, ValueError) as error:
            return DriverAnswer(fault=f"the process that asks cannot be started: {error}")
        try:
            return await asyncio.wait_for(_answer_of(process, process.stdout), DEADLINE_SECONDS)
        except TimeoutError:
            return DriverAnswer(fault=f"no answer within {DEADLINE_SECONDS:.0f} s")
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # it may have forked
            # One that hangs in the kernel is waited for: a second would hang beside it.
            await process.wait()


async def _answer_of(process: asyncio.subprocess.Process, answers: asyncio.StreamReader | None) -> DriverAnswer:
    data = bytearray()
    while answers is not None and len(data) <= _MOST_BYTES and (piece := await answers.read(_MOST_BYTES)):
        data += piece
    status = 0 if len(data) > _MOST_BYTES else await process.wait()
    if status:
        ending = f"by signal {-status}" if status < 0 else f"with status {status}"
        return DriverAnswer(fault=f"the process that asks ended {ending}")
    try:
        return decode_driver_line(bytes(data))
    except msgspec.DecodeError as error:
        return DriverAnswer(fault=f"the process that asks gave no answer: {error}")


def _is_drivers(name: str) -> bool:
    return name in _VARIABLES or name.startswith(_DRIVER_PREFIXES)


def _package_path(environ: Mapping[str, str]) -> str:
    """Where to find this package also when it is not installed."""
    places = (str(Path(__file__).resolve().parents[1]), environ.get("PYTHONPATH", ""))
    return os.pathsep.join(filter(None, places))
