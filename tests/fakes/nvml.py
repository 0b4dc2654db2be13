"""The pretend NVML's other half: builds ``libnvidia-ml.so.1`` from ``nvml.c`` and writes the file that drives it.

``nvml.c`` says what a line of that file means. A program sees the pretend cards when it is started with
:meth:`FakeNvml.environment` in its environment; the dynamic loader reads ``LD_LIBRARY_PATH`` only then, so setting it
inside a running process does nothing.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import pytest

SONAME = "libnvidia-ml.so.1"
SOURCE = Path(__file__).with_name("nvml.c")
CALLS = frozenset(re.findall(r"^(?:[A-Z]+_)?(?:CALL|EXPORTED)\((nvml\w+)", SOURCE.read_text(), re.MULTILINE))
"""Every symbol that the library exports, and so every CALL that a rule may name beside ``*``."""

GIB = 1 << 30
MIB = 1 << 20
MOST_EQUAL_CARDS = 37


class BuildError(RuntimeError):
    """The pretend library could not be built; the message names what is missing or what the compiler said.

    BuildError
    └── CompilerMissingError
    """


class CompilerMissingError(BuildError):
    """There is no C compiler."""


def build(directory: Path, without: Sequence[str] = ()) -> Path:
    """``directory``, which now holds the library without the symbols ``without``: what an older driver lacks."""
    if unknown := sorted(set(without) - CALLS):
        raise ValueError(f"the pretend NVML has no {', '.join(unknown)} to leave out")
    directory.mkdir(parents=True, exist_ok=True)
    made = directory / f"{SONAME}.new"
    _compile(made, [f"-DWITHOUT_{symbol}" for symbol in without])
    made.replace(directory / SONAME)  # writing into a library that a process has mapped would crash it
    return directory


def build_or_skip(directory: Path, without: Sequence[str] = ()) -> Path:
    """As :func:`build`; where there is no C compiler the test is skipped with the reason, but fails if ``CI=true``."""
    try:
        return build(directory, without)
    except CompilerMissingError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"no pretend NVML: {error}")


def _compile(target: Path, switches: Sequence[str]) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        raise CompilerMissingError("no C compiler 'cc' on PATH (Debian: apt-get install gcc libc6-dev)")
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread", f"-Wl,-soname,{SONAME}"]
    command = [compiler, *flags, *switches, f"-I{_header_directory()}", "-o", str(target), str(SOURCE)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{compiler} cannot build {SOURCE.name}:\n{result.stderr}")


def _header_directory() -> Path:
    """Where NVIDIA's ``nvml.h`` is: the folder has the CUDA version in its name, so the newest of them."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec is not None else None
    headers = sorted(header for root in roots or () for header in Path(root).glob("*/include/nvml.h"))
    if not headers:
        raise BuildError("no nvml.h: pip install nvidia-nvml-dev")
    return headers[-1].parent


@dataclass(frozen=True, kw_only=True)
class Mig:
    """A part of a card in MIG mode. What is None is left out, and the call that needs it answers NOT_SUPPORTED."""

    index: int
    uuid: str | None = None
    gi: int | None = None
    ci: int | None = None
    name: str | None = None
    total: int | None = None
    free: int | None = None
    used: int | None = None
    util: int | None = None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A card; its ``index`` is its position in the list unless given. What is None is left out, as in :class:`Mig`.

    ``used`` is without ``reserved``, as NVML's second version counts; the first version's answer is their sum.
    """

    index: int | None = None
    uuid: str | None = None
    pci: str | None = None
    name: str | None = None
    minor: int | None = None
    total: int | None = None
    free: int | None = None
    used: int | None = None
    reserved: int | None = None
    util: int | None = None
    temp: int | None = None
    mig: Literal[0, 1, "none"] | None = None
    instances: tuple[Mig, ...] = ()


class FakeNvml:
    """The state file in ``directory``, for the library that :func:`build` put there, or else in ``library``."""

    def __init__(self, directory: Path, library: Path | None = None) -> None:
        self.folder = library or directory
        self.state_path = directory / "nvml.state"
        self._last_written = 0

    def environment(self) -> dict[str, str]:
        """What a program's environment needs at its start, to be laid over ``os.environ``."""
        inherited = os.environ.get("LD_LIBRARY_PATH")
        paths = f"{self.folder}:{inherited}" if inherited else str(self.folder)
        return {"LD_LIBRARY_PATH": paths, "FAKE_NVML_STATE": str(self.state_path)}

    def write(
        self,
        gpus: Sequence[Gpu],
        *,
        driver: str | None = "550.54.15",
        count: int | None = None,
        lines: Sequence[str] = (),
    ) -> None:
        """Makes this the state, all at once: running programs see it at their next call, and in a hanging one."""
        text = [*_head(driver, count), *_cards(gpus), *(_checked(line) for line in lines), ""]
        new = self.state_path.with_suffix(".new")
        new.write_text("\n".join(text), encoding="utf-8", errors="surrogateescape")
        # Clocks of file systems tick in milliseconds, and a freed inode comes back: only this tells two writes apart.
        self._last_written = max(time.time_ns(), self._last_written + 1)
        os.utime(new, ns=(self._last_written, self._last_written))
        new.replace(self.state_path)

    def remove(self) -> None:
        """Takes the driver away: every call but ``nvmlShutdown`` answers DRIVER_NOT_LOADED."""
        self.state_path.unlink(missing_ok=True)


def equal_cards(count: int) -> tuple[Gpu, ...]:
    """L40S cards that differ only in what tells which one they are: every number of a card encodes its index."""
    if count > MOST_EQUAL_CARDS:
        raise ValueError(f"free memory can tell {MOST_EQUAL_CARDS} cards apart, not {count}")
    return tuple(_equal_card(index, count) for index in range(count))


def _equal_card(index: int, count: int) -> Gpu:
    total, free, reserved = 48 * GIB, (10 + index) * GIB, 512 * MIB
    return Gpu(
        uuid=f"GPU-{'abcdef0123456789'[index % 16] * 8}-0000-4000-8000-{index:012x}",
        pci=f"{index // 7:08x}:{0x21 + 0x20 * (index % 7):02x}:00.0",
        name="NVIDIA L40S",
        minor=count - 1 - index,
        total=total,
        free=free,
        used=total - free - reserved,
        reserved=reserved,
        util=10 * (index % 10 + 1),
        temp=40 + index,
        mig="none",
    )


def _head(driver: str | None, count: int | None) -> Iterator[str]:
    if driver is not None:
        yield f"driver {_quoted(driver)}"
    if count is not None:
        yield f"count {count}"


def _cards(gpus: Sequence[Gpu]) -> Iterator[str]:
    for position, gpu in enumerate(gpus):
        index = position if gpu.index is None else gpu.index
        yield f"gpu {index} {_pairs(gpu)}"
        for part in gpu.instances:
            yield f"mig {index} {part.index} {_pairs(part)}"


def _pairs(device: Gpu | Mig) -> str:
    keys = [field.name for field in fields(device) if field.name not in {"index", "instances"}]
    values = {key: getattr(device, key) for key in keys}
    return " ".join(f"{key}={_quoted(str(value))}" for key, value in values.items() if value is not None)


def _quoted(text: str) -> str:
    if '"' in text or "\n" in text:
        raise ValueError(f"the state file cannot hold a quote or a line break: {text!r}")
    return f'"{text}"'


def _checked(line: str) -> str:
    """``line``, unless it is a rule for a call that does not exist, which would silently never match."""
    kind, call = ([*line.split(), "", ""])[:2]
    if kind in {"fault", "hang", "slow", "crash"} and call not in CALLS | {"*"}:
        raise ValueError(f"the pretend NVML has no call {call!r}: {line}")
    return line
