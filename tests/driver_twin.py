"""The pretend drivers as twins of masked processes: built, and asked under one environment after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec

from exporter.wire import DriverAnswer, decode_driver_line
from tests.driver_hosts import WRITE, Host
from tests.fakes import amdhip64, cuda, shared_object, vulkan, ze_driver
from tests.harness import MASK_VARIABLES

DEADLINE_SECONDS = 300
HELPER = Path(__file__).with_name("driver_forks.py")


class Said(NamedTuple):
    """What came of a question: None for an answer where the library ended the process, or it ended by itself."""

    status: int
    answer: DriverAnswer | None
    ggml: list[int] | None


Question = tuple[Path, tuple[tuple[str, str], ...]]
"""Where a state is, and the variables to ask under."""


def question(state: Path, env: Mapping[str, str]) -> Question:
    """The same for the same."""
    return state, tuple(sorted(env.items()))


class Twin:
    """One runtime's pretend driver, built in ``directory``, with a state for each host."""

    def __init__(self, runtime: str, directory: Path) -> None:
        self.runtime, self._directory = runtime, directory
        self._library = _BUILD[runtime](directory)
        self._states: dict[bytes, Path] = {}
        self._said: dict[Question, Said] = {}

    def state(self, host: Host) -> Path:
        """The file that makes the driver show this host."""
        known = msgspec.msgpack.encode([host.truth, sorted(host.reach), *host[2:]])
        if known not in self._states:
            folder = self._directory / str(len(self._states))
            folder.mkdir()
            self._states[known] = WRITE[self.runtime](host, folder, self._library)
        return self._states[known]

    def ask(self, questions: Iterable[Question]) -> Mapping[Question, Said]:
        """What each question that there was so far comes to. New ones are asked in a program for each processor."""
        new = [each for each in dict.fromkeys(questions) if each not in self._said]
        parts = [new[first :: os.cpu_count() or 1] for first in range(os.cpu_count() or 1)]
        with ThreadPoolExecutor() as pool:
            for part, answered in zip(parts, pool.map(self._ask, parts), strict=True):
                self._said.update(zip(part, answered, strict=True))
        return self._said

    def _ask(self, questions: Sequence[Question]) -> list[Said]:
        variable = _STATE[self.runtime]
        lines = [json.dumps({**dict(env), variable: str(state)}) for state, env in questions]
        inherited = {name: text for name, text in os.environ.items() if not _would_choose(name)}
        ended = subprocess.run(
            [sys.executable, "-P", "-X", "utf8", str(HELPER), self.runtime],
            env={**inherited, "LD_LIBRARY_PATH": str(self._library.parent)},
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            text=True,
            check=True,
            timeout=DEADLINE_SECONDS,
        )
        return [_said(line) for line in ended.stdout.splitlines()]


def _would_choose(name: str) -> bool:
    return name in MASK_VARIABLES or name.startswith(("FAKE_", "VK_", "MESA_", "ZE_", "NEO_", "GGML_", "HSA_"))


def _said(line: str) -> Said:
    said = json.loads(line)
    answer = decode_driver_line(said["answer"].encode()) if said["answer"] and not said["status"] else None
    return Said(said["status"], answer, said["ggml"])


# --- the libraries

_STATE = {
    "cuda": "FAKE_CUDA_STATE",
    "rocm": "FAKE_HIP_STATE",
    "level_zero": "FAKE_ZE_DRIVER_STATE",
    "vulkan": "FAKE_VULKAN_STATE",
}


def _with_rocr(directory: Path) -> Path:
    """HIP's, and beside it a ROCr that has started."""
    library = amdhip64.build_or_skip(directory)
    source = directory / "hsa.c"
    source.write_text("int hsa_init(void) { return 0; }\n")
    rocr = "libhsa-runtime64.so.1"
    shared_object.compiled(shared_object.compiler(), source, directory / rocr, shared_object.shared(rocr))
    return library


_BUILD: dict[str, Callable[[Path], Path]] = {
    "cuda": lambda directory: cuda.build_or_skip(directory) / cuda.SONAME,
    "rocm": _with_rocr,
    "level_zero": ze_driver.build_or_skip,
    "vulkan": lambda directory: vulkan.build_or_skip(directory) / vulkan.SONAME,
}
