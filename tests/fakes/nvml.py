"""The pretend NVML's other half: builds ``libnvidia-ml.so.1`` from ``nvml.c`` and writes the file that drives it.

``nvml.c`` says what a line of that file means. A program sees the pretend cards when it is started with
:meth:`FakeNvml.environment` in its environment; the dynamic loader reads ``LD_LIBRARY_PATH`` only then, so setting it
inside a running process does nothing.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.fakes import shared_object
from tests.fakes.shared_object import BuildError, CompilerMissingError

__all__ = [
    "CALLS",
    "GIB",
    "MIB",
    "MOST_EQUAL_CARDS",
    "SONAME",
    "SOURCE",
    "BuildError",
    "CompilerMissingError",
    "FakeNvml",
    "Gpu",
    "Mig",
    "build",
    "build_or_skip",
    "equal_cards",
]

NAME = "pretend NVML"
SONAME = "libnvidia-ml.so.1"
SOURCE = Path(__file__).with_name("nvml.c")
CALLS = frozenset(re.findall(r"^(?:[A-Z]+_)?(?:CALL|EXPORTED)\((nvml\w+)", SOURCE.read_text(), re.MULTILINE))
"""Every symbol that the library exports, and so every CALL that a rule may name beside ``*``."""

GIB = 1 << 30
MIB = 1 << 20
MOST_EQUAL_CARDS = 37


def build(directory: Path, without: Sequence[str] = ()) -> Path:
    """``directory``, which now holds the library without the symbols ``without``: what an older driver lacks."""
    shared_object.check_known(NAME, without, CALLS)
    cc = shared_object.compiler()
    switches = [
        *shared_object.shared(SONAME),
        f"-I{_header_directory()}",
        *(f"-DWITHOUT_{symbol}" for symbol in without),
    ]
    return shared_object.compiled(cc, SOURCE, directory / SONAME, switches).parent


def build_or_skip(directory: Path, without: Sequence[str] = ()) -> Path:
    """As :func:`build`; where there is no C compiler the test is skipped with the reason, but fails if ``CI=true``."""
    return shared_object.built_or_skipped(NAME, lambda: build(directory, without))


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


class FakeNvml(shared_object.StateFile):
    """The state file in ``directory``, for the library that :func:`build` put there, or else in ``library``.

    Once it is removed every call but ``nvmlShutdown`` answers DRIVER_NOT_LOADED.
    """

    def __init__(self, directory: Path, library: Path | None = None) -> None:
        super().__init__(directory / "nvml.state")
        self.folder = library or directory

    def environment(self) -> dict[str, str]:
        """What a program's environment needs at its start, to be laid over ``os.environ``."""
        return {"LD_LIBRARY_PATH": shared_object.search_path(self.folder), "FAKE_NVML_STATE": str(self.state_path)}

    def write(
        self,
        gpus: Sequence[Gpu],
        *,
        driver: str | None = "550.54.15",
        count: int | None = None,
        lines: Sequence[str] = (),
    ) -> None:
        """Makes this the state, all at once: running programs see it at their next call, and in a hanging one."""
        self.put([*_head(driver, count), *_cards(gpus), *shared_object.checked(NAME, lines, CALLS)])


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
        yield f"driver {shared_object.quoted(driver)}"
    if count is not None:
        yield f"count {count}"


def _cards(gpus: Sequence[Gpu]) -> Iterator[str]:
    for position, gpu in enumerate(gpus):
        index = position if gpu.index is None else gpu.index
        yield shared_object.device_line("gpu", index, device=gpu, without={"index", "instances"})
        for part in gpu.instances:
            yield shared_object.device_line("mig", index, part.index, device=part, without={"index"})
