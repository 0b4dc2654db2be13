"""The pretend CUDA driver's other half: builds ``libcuda.so.1`` from ``cuda.c`` and writes the file that drives it.

``cuda.c`` says what a line of that file means, and how it reads ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER``. A
program sees the pretend cards when it is started with :meth:`FakeCuda.environment` in its environment; the dynamic
loader reads ``LD_LIBRARY_PATH`` only then, so setting it inside a running process does nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fakes import shared_object
from tests.fakes.shared_object import BuildError, CompilerMissingError

__all__ = [
    "CALLS",
    "FORBIDDEN",
    "SONAME",
    "SOURCE",
    "BuildError",
    "CompilerMissingError",
    "FakeCuda",
    "Gpu",
    "Mig",
    "build",
    "build_or_skip",
]

NAME = "pretend CUDA driver"
SONAME = "libcuda.so.1"
SOURCE = Path(__file__).with_name("cuda.c")
CALLS = frozenset(re.findall(r"^(?:[A-Z]+_)?CALL\((cu\w+)", SOURCE.read_text(), re.MULTILINE))
"""Every symbol that the library exports, and so every CALL that a rule may name beside ``*``."""

FORBIDDEN = frozenset({"cuCtxCreate_v2", "cuDevicePrimaryCtxRetain", "cuMemAlloc_v2"})
"""Those that make contexts or take memory, which never succeed: no record of a program that only looks has them."""


def build(directory: Path, without: Sequence[str] = ()) -> Path:
    """``directory``, which now holds the library without the symbols ``without``: what an older driver lacks."""
    shared_object.check_known(NAME, without, CALLS)
    switches = [*shared_object.shared(SONAME), *(f"-DWITHOUT_{symbol}" for symbol in without)]
    return shared_object.compiled(shared_object.compiler(), SOURCE, directory / SONAME, switches).parent


def build_or_skip(directory: Path, without: Sequence[str] = ()) -> Path:
    """As :func:`build`; where there is no C compiler the test is skipped with the reason, but fails if ``CI=true``."""
    return shared_object.built_or_skipped(NAME, lambda: build(directory, without))


@dataclass(frozen=True, kw_only=True)
class Mig:
    """An instance on a card in MIG mode. What is None is left out, and the call that needs it answers NOT_SUPPORTED."""

    index: int
    gi: int
    ci: int = 0
    uuid: str | None = None
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A card; its ``index`` is its position in the list unless given. What is None is left out, as in :class:`Mig`."""

    index: int | None = None
    uuid: str | None = None
    pci: str | None = None
    name: str | None = None
    mig: bool | None = None
    accessible: bool | None = None
    instances: tuple[Mig, ...] = ()


class FakeCuda(shared_object.RecordedState):
    """The state file and the record in ``directory``, for the library that :func:`build` put there, or in ``library``.

    Without the file there is no driver to load: ``cuInit`` answers NO_DEVICE.
    """

    def __init__(self, directory: Path, library: Path | None = None) -> None:
        super().__init__(directory / "cuda.state")
        self.folder = library or directory

    def environment(self) -> dict[str, str]:
        """What a program's environment needs at its start, to be laid over ``os.environ``; it has no mask."""
        state = {"FAKE_CUDA_STATE": str(self.state_path), "FAKE_CUDA_RECORD": str(self.record_path)}
        return {"LD_LIBRARY_PATH": shared_object.search_path(self.folder), **state}

    def write(
        self,
        gpus: Sequence[Gpu],
        *,
        driver: int = 12080,
        branch: int | None = None,
        order: Sequence[int] = (),
        lines: Sequence[str] = (),
    ) -> None:
        """Makes this the state, all at once: running programs see it at their next call, and in a hanging one."""
        head = _head(driver, branch, order)
        self.put([*head, *_cards(gpus), *shared_object.checked(NAME, lines, CALLS)])


def _head(driver: int, branch: int | None, order: Sequence[int]) -> Iterator[str]:
    yield f"driver {driver}"
    if branch is not None:
        yield f"branch {branch}"
    if order:
        yield " ".join(["order", *map(str, order)])


def _cards(gpus: Sequence[Gpu]) -> Iterator[str]:
    for position, gpu in enumerate(gpus):
        index = position if gpu.index is None else gpu.index
        yield shared_object.device_line("gpu", index, device=gpu, without={"index", "instances"})
        for part in gpu.instances:
            yield shared_object.device_line("mig", index, part.index, device=part, without={"index"})
