"""The pretend AMD SMI's other half: builds ``libamd_smi.so`` from ``amd_smi.c`` and writes the file that drives it.

``amd_smi.c`` says what a line of that file means. A program sees the pretend GPUs when it is started with
:meth:`FakeAmdSmi.environment` in its environment, and imports ``amdsmi`` then: the binding loads the library and looks
up each of its symbols while it is imported. The symbols that ``amd_smi.c`` does not have are found in the binding's
source, and are built as calls that are not supported.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import pytest

SONAME = "libamd_smi.so"
SOURCE = Path(__file__).with_name("amd_smi.c")
CALLS = frozenset(re.findall(r"^(?:MEMORY_)?CALL\((amdsmi_\w+)", SOURCE.read_text(), re.MULTILINE))
"""Every symbol that ``amd_smi.c`` answers itself."""

LAYOUT = "fake_amd_smi_layout"
GIB = 1 << 30


class BuildError(RuntimeError):
    """The pretend library could not be built; the message names what is missing or what the compiler said.

    BuildError
    └── MissingError
    """


class MissingError(BuildError):
    """There is no C compiler, or no ``amdsmi``."""


@functools.cache
def symbols() -> frozenset[str]:
    """Every symbol that the library exports: what ``amdsmi`` looks up, and :data:`CALLS`."""
    spec = importlib.util.find_spec("amdsmi")  # does not import it, which would load a library
    if spec is None or spec.origin is None:
        raise MissingError("no amdsmi: pip install amdsmi")
    wrapper = Path(spec.origin).with_name("amdsmi_wrapper.py").read_text(encoding="utf-8")
    bound = re.findall(r"""_libraries\['libamd_smi\.so'\]\.(\w+)""", wrapper)
    if not bound:
        raise BuildError("amdsmi_wrapper.py looks up no symbol in a way that is known here")
    return CALLS.union(bound)


def build(directory: Path, without: Sequence[str] = ()) -> Path:
    """``directory/lib/libamd_smi.so``, now there without the symbols ``without``: what an older library lacks."""
    if unknown := sorted(set(without) - symbols()):
        raise ValueError(f"the pretend AMD SMI has no {', '.join(unknown)} to leave out")
    target = directory / "lib" / SONAME
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.with_suffix(".new")
    with tempfile.TemporaryDirectory() as scratch:
        _compile(made, Path(scratch), symbols() - set(without))
    made.replace(target)  # writing into a library that a process has mapped would crash it
    return target


def build_or_skip(directory: Path, without: Sequence[str] = ()) -> Path:
    """As :func:`build`; without a C compiler or ``amdsmi`` the test is skipped, saying so, or fails if ``CI=true``."""
    try:
        return build(directory, without)
    except MissingError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"no pretend AMD SMI: {error}")


def _compile(target: Path, scratch: Path, exported: frozenset[str]) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        raise MissingError("no C compiler 'cc' on PATH (Debian: apt-get install gcc libc6-dev)")
    stubs = "".join(f"STUB({symbol})\n" for symbol in sorted(symbols() - CALLS))
    (scratch / "amd_smi_stubs.h").write_text(stubs)
    script = scratch / "exported.map"
    script.write_text(f"{{ global: {'; '.join(sorted(exported | {LAYOUT}))}; local: *; }};\n")
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread", f"-I{scratch}"]
    linking = [f"-Wl,-soname,{SONAME}", f"-Wl,--version-script={script}"]
    command = [compiler, *flags, *linking, "-o", str(target), str(SOURCE)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{compiler} cannot build {SOURCE.name}:\n{result.stderr}")


class Version(NamedTuple):
    """What the library says its version is. What :class:`FakeAmdSmi` writes unasked is that of ROCm 7.0.2."""

    major: int
    minor: int
    release: int
    build: str


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU or a part of one; its ``index`` in rules is its position in the list unless given.

    What is None is left out, and the calls that need it answer NOT_SUPPORTED. ``vram_total`` and ``vram_used`` are
    bytes, ``edge``, ``hotspot`` and ``vram_temp`` are degrees, ``power`` is watts. ``umc`` is the activity of the
    memory, ``mm`` that of the video engines; 65535 is how the library says that it does not know them. GPUs with the
    same ``socket`` share it; one without has its own.
    """

    index: int | None = None
    bdf: str | None = None
    socket: str | None = None
    uuid: str | None = None
    name: str | None = None
    vendor_id: int | None = None
    device_id: int | None = None
    kfd_id: int | None = None
    node_id: int | None = None
    partition_id: int | None = None
    hip_id: int | None = None
    hsa_id: int | None = None
    hip_uuid: str | None = None
    drm_card: int | None = None
    drm_render: int | None = None
    gfx: int | None = None
    umc: int | None = None
    mm: int | None = None
    vram_total: int | None = None
    vram_used: int | None = None
    edge: int | None = None
    hotspot: int | None = None
    vram_temp: int | None = None
    power: int | None = None


class FakeAmdSmi:
    """The state file and the record in ``directory``, for the ``library`` that :func:`build` made."""

    def __init__(self, directory: Path, library: Path) -> None:
        self.root = library.parent.parent
        self.state_path = directory / "amd_smi.state"
        self.record_path = directory / "amd_smi.record"
        self._last_written = 0

    def environment(self) -> dict[str, str]:
        """What a program's environment needs at its start, to be laid over ``os.environ``.

        ROCM_HOME goes before ROCM_PATH, even when it is empty, so both are set.
        """
        return {
            "ROCM_HOME": str(self.root),
            "ROCM_PATH": str(self.root),
            "FAKE_AMD_SMI_STATE": str(self.state_path),
            "FAKE_AMD_SMI_RECORD": str(self.record_path),
        }

    def write(
        self,
        gpus: Sequence[Gpu],
        *,
        driver: str | None = "6.14.14",
        version: Version | None = None,
        lines: Sequence[str] = (),
    ) -> None:
        """Makes this the state, all at once: running programs see it at their next call, and in a hanging one."""
        text = [*_head(driver, version), *_gpus(gpus), *(_checked(line) for line in lines), ""]
        new = self.state_path.with_suffix(".new")
        new.write_text("\n".join(text), encoding="utf-8", errors="surrogateescape")
        # Clocks of file systems tick in milliseconds, and a freed inode comes back: only this tells two writes apart.
        self._last_written = max(time.time_ns(), self._last_written + 1)
        os.utime(new, ns=(self._last_written, self._last_written))
        new.replace(self.state_path)

    def remove(self) -> None:
        """Takes the driver away: every call but shutdown and those about the library answers DRIVER_NOT_LOADED."""
        self.state_path.unlink(missing_ok=True)

    def record(self) -> list[str]:
        """The symbol of every call there was, in order; of all programs that had this environment."""
        return self.record_path.read_text().splitlines() if self.record_path.exists() else []


def _head(driver: str | None, version: Version | None) -> Iterator[str]:
    if version is not None:
        yield f"version {version.major} {version.minor} {version.release} {_quoted(version.build)}"
    if driver is not None:
        yield f"driver {_quoted(driver)}"


def _gpus(gpus: Sequence[Gpu]) -> Iterator[str]:
    for position, gpu in enumerate(gpus):
        values = {field.name: getattr(gpu, field.name) for field in fields(gpu) if field.name != "index"}
        pairs = (f"{key}={_quoted(str(value))}" for key, value in values.items() if value is not None)
        yield " ".join(["gpu", str(position if gpu.index is None else gpu.index), *pairs])


def _quoted(text: str) -> str:
    if '"' in text or "\n" in text:
        raise ValueError(f"the state file cannot hold a quote or a line break: {text!r}")
    return f'"{text}"'


def _checked(line: str) -> str:
    """``line``, unless it is a rule for a call that does not exist, which would silently never match."""
    kind, call = ([*line.split(), "", ""])[:2]
    if kind in {"fault", "lie", "hang", "slow", "crash"} and call not in symbols() | {"*"}:
        raise ValueError(f"the pretend AMD SMI has no call {call!r}: {line}")
    return line
