"""The pretend Level Zero driver's other half: builds ``libze_loader.so.1`` and writes the file that drives it.

``ze_driver.c`` says what a line of that file means, and plays the core calls (``ze*``); ``ze_loader.c`` plays the
others, Sysman's. :func:`build` makes a library of the one or of both. A program that loads it by its name finds it when
it is started with :meth:`FakeZeDriver.environment` in its environment, where masks are read too, at its first init.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fakes import shared_object, ze_loader
from tests.fakes.shared_object import BuildError, CompilerMissingError
from tests.fakes.ze_loader import SONAME

__all__ = [
    "CALLS",
    "REFUSED_CALLS",
    "SONAME",
    "SOURCE",
    "BuildError",
    "CompilerMissingError",
    "FakeZeDriver",
    "Gpu",
    "build",
    "build_or_skip",
]

NAME = "pretend Level Zero driver"
SOURCE = Path(__file__).with_name("ze_driver.c")
CALLS = frozenset(re.findall(r"^(?:[A-Z]+_)?CALL\((ze[A-Z]\w+)", SOURCE.read_text(), re.MULTILINE))
"""Every symbol that the library exports, and so every CALL that a rule may name beside ``*``."""

REFUSED_CALLS = frozenset(re.findall(r"^REFUSED_CALL\((ze\w+)", SOURCE.read_text(), re.MULTILINE))
"""Those of :data:`CALLS` that would make a context, a queue or memory, and that nothing here should ever call."""


def build(directory: Path, without: Sequence[str] = (), *, sysman: bool = False) -> Path:
    """The library, now in ``directory``, without the symbols ``without``; with ``sysman`` also of ``ze_loader.c``."""
    shared_object.check_known(NAME, without, CALLS | ze_loader.CALLS if sysman else CALLS)
    switches = [*shared_object.shared(SONAME), *(f"-DWITHOUT_{symbol}" for symbol in without)]
    if sysman:
        switches.append(str(ze_loader.SOURCE))  # each file's names are its own, but for the calls
    return shared_object.compiled(shared_object.compiler(), SOURCE, directory / SONAME, switches)


def build_or_skip(directory: Path, without: Sequence[str] = (), *, sysman: bool = False) -> Path:
    """As :func:`build`; without a C compiler the test is skipped with the reason, but fails if ``CI=true``."""
    return shared_object.built_or_skipped(NAME, lambda: build(directory, without, sysman=sysman))


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A card. What is None is left out, and ``ze_driver.c`` says what it is then.

    ``hpc`` is a Data Center GPU Max; a higher ``rank`` is a newer product family; ``library`` is the driver library
    that serves the card, and one that is not ``accessible`` cannot be opened by the process.
    """

    bdf: str
    name: str | None = None
    device_id: int | None = None
    uuid: str | None = None
    tiles: int | None = None
    hpc: bool | None = None
    integrated: bool | None = None
    rank: int | None = None
    accessible: bool | None = None
    library: int | None = None


class FakeZeDriver(shared_object.RecordedState):
    """The state file and the record in ``directory``, for the file ``library`` that :func:`build` made.

    Without the state file init answers UNINITIALIZED, and once it is removed every call does.
    """

    def __init__(self, directory: Path, library: Path) -> None:
        super().__init__(directory / "ze_driver.state")
        self.shared_object = library

    def environment(self) -> dict[str, str]:
        """What a program's environment needs at its start, to be laid over ``os.environ``."""
        return {
            "LD_LIBRARY_PATH": shared_object.search_path(self.shared_object.parent),
            "FAKE_ZE_DRIVER_STATE": str(self.state_path),
            "FAKE_ZE_DRIVER_RECORD": str(self.record_path),
        }

    def write(
        self,
        gpus: Sequence[Gpu],
        *,
        api: str = "1.13",
        unsorted: Sequence[int] | None = None,
        narrowed: str | None = None,
        lines: Sequence[str] = (),
    ) -> None:
        """Makes this the state, all at once. Of a running program only rules reach what has called init already."""
        self.put(
            [
                f"api {api}",
                *(shared_object.device_line("gpu", index, device=gpu, without=()) for index, gpu in enumerate(gpus)),
                *([] if unsorted is None else [f"unsorted {' '.join(map(str, unsorted))}"]),
                *([] if narrowed is None else [f"narrowed {narrowed}"]),
                *shared_object.checked(NAME, lines, CALLS),
            ]
        )
