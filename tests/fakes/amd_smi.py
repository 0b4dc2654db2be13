"""The pretend AMD SMI's other half: builds ``libamd_smi.so`` from ``amd_smi.c`` and writes the file that drives it.

``amd_smi.c`` says what a line of that file means. A program sees the pretend GPUs when it is started with
:meth:`FakeAmdSmi.environment` in its environment, and imports ``amdsmi`` then: the binding loads the library and looks
up each of its symbols while it is imported. The symbols that ``amd_smi.c`` does not have are found in the binding's
source, and are built as calls that are not supported.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.fakes import shared_object
from tests.fakes.shared_object import BuildError, MissingError

__all__ = [
    "CALLS",
    "GIB",
    "LAYOUT",
    "SONAME",
    "SOURCE",
    "BuildError",
    "FakeAmdSmi",
    "Gpu",
    "MissingError",
    "Version",
    "build",
    "build_or_skip",
    "symbols",
]

NAME = "pretend AMD SMI"
SONAME = "libamd_smi.so"
SOURCE = Path(__file__).with_name("amd_smi.c")
CALLS = frozenset(re.findall(r"^(?:MEMORY_)?CALL\((amdsmi_\w+)", SOURCE.read_text(), re.MULTILINE))
"""Every symbol that ``amd_smi.c`` answers itself."""

LAYOUT = "fake_amd_smi_layout"
GIB = 1 << 30


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
    shared_object.check_known(NAME, without, symbols())
    cc = shared_object.compiler()
    with tempfile.TemporaryDirectory() as scratch:
        switches = [*shared_object.shared(SONAME), *_linked(Path(scratch), symbols() - set(without))]
        return shared_object.compiled(cc, SOURCE, directory / "lib" / SONAME, switches)


def build_or_skip(directory: Path, without: Sequence[str] = ()) -> Path:
    """As :func:`build`; without a C compiler or ``amdsmi`` the test is skipped, saying so, or fails if ``CI=true``."""
    return shared_object.built_or_skipped(NAME, lambda: build(directory, without))


def _linked(scratch: Path, exported: frozenset[str]) -> list[str]:
    """The switches that build in all stubs, from a file in ``scratch``, and show only what is ``exported``."""
    stubs = "".join(f"STUB({symbol})\n" for symbol in sorted(symbols() - CALLS))
    (scratch / "amd_smi_stubs.h").write_text(stubs)
    script = scratch / "exported.map"
    script.write_text(f"{{ global: {'; '.join(sorted(exported | {LAYOUT}))}; local: *; }};\n")
    return [f"-I{scratch}", f"-Wl,--version-script={script}"]


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
    bytes, ``edge``, ``hotspot`` and ``vram_temp`` are degrees, ``power`` is watts, ``energy`` is ticks.
    ``umc`` is the activity of the memory, ``mm`` that of the video engines; 65535 is how the library says that it does
    not know them. GPUs with the same ``socket`` share it; one without has its own.
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
    energy: int | None = None


class FakeAmdSmi(shared_object.RecordedState):
    """The state file and the record in ``directory``, for the ``library`` that :func:`build` made.

    Once the file is removed every call but shutdown and those about the library answers DRIVER_NOT_LOADED.
    """

    def __init__(self, directory: Path, library: Path) -> None:
        super().__init__(directory / "amd_smi.state")
        self.root = library.parent.parent

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
        rules = shared_object.checked(NAME, lines, symbols(), shared_object.RULES | {"lie"})
        self.put([*_head(driver, version), *_gpus(gpus), *rules])


def _head(driver: str | None, version: Version | None) -> Iterator[str]:
    if version is not None:
        yield f"version {version.major} {version.minor} {version.release} {shared_object.quoted(version.build)}"
    if driver is not None:
        yield f"driver {shared_object.quoted(driver)}"


def _gpus(gpus: Sequence[Gpu]) -> Iterator[str]:
    for position, gpu in enumerate(gpus):
        index = position if gpu.index is None else gpu.index
        yield shared_object.device_line("gpu", index, device=gpu, without={"index"})
