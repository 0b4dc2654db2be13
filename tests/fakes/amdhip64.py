"""The pretend HIP runtime's other half: builds ``libamdhip64.so`` and writes the file that drives it.

``amdhip64.c`` says what a line of that file means, and which masks of the environment it applies. A program sees the
pretend GPUs when it is started with :meth:`FakeHip.environment` in its environment.
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
    "LINK",
    "MASKS",
    "SONAME",
    "SOURCE",
    "BuildError",
    "CompilerMissingError",
    "FakeHip",
    "Gpu",
    "build",
    "build_or_skip",
]

NAME = "pretend HIP runtime"
SONAME = "libamdhip64.so.6"
LINK = "libamdhip64.so"
SOURCE = Path(__file__).with_name("amdhip64.c")
CALLS = frozenset(re.findall(r"^(?:[A-Z]+_)?(?:CALL|EXPORTED)\((hip\w+)", SOURCE.read_text(), re.MULTILINE))
"""Every symbol that the library exports, and so every CALL that a rule may name beside ``*``."""
FORBIDDEN = frozenset(re.findall(r"^FORBIDDEN_CALL\((hip\w+)", SOURCE.read_text(), re.MULTILINE))
"""Those that would make a context or take memory, and here only say no."""
MASKS = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""The variables that the library applies, the outermost first; the last counts only without the one before it."""


def build(directory: Path, without: Sequence[str] = ()) -> Path:
    """The library, now in ``directory`` under both its names, without the symbols ``without``."""
    shared_object.check_known(NAME, without, CALLS)
    switches = [*shared_object.shared(SONAME), *(f"-DWITHOUT_{symbol}" for symbol in without)]
    library = shared_object.compiled(shared_object.compiler(), SOURCE, directory / SONAME, switches)
    link = directory / LINK
    link.unlink(missing_ok=True)
    link.symlink_to(SONAME)
    return library


def build_or_skip(directory: Path, without: Sequence[str] = ()) -> Path:
    """As :func:`build`; where there is no C compiler the test is skipped with the reason, but fails if ``CI=true``."""
    return shared_object.built_or_skipped(NAME, lambda: build(directory, without))


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A KFD node that is a GPU. A ``unique_id`` of 0 is a card without a UUID; what is None is left out.

    ``accessible``: its render device can be opened. ``isa_ok``: ROCr knows its ISA. ``hip_ok``: HIP can initialise it.
    """

    node: int
    bdf: str
    unique_id: int = 0
    name: str | None = None
    accessible: bool | None = None
    isa_ok: bool | None = None
    hip_ok: bool | None = None


class FakeHip(shared_object.RecordedState):
    """The state file and the record in ``directory``, for the file ``library`` that :func:`build` made.

    Once the file is removed there is no device.
    """

    def __init__(self, directory: Path, library: Path) -> None:
        super().__init__(directory / "amdhip64.state")
        self.shared_object = library

    def environment(self) -> dict[str, str]:
        """What a program's environment needs at its start, to be laid over ``os.environ``. It holds no mask."""
        return {
            "LD_LIBRARY_PATH": shared_object.search_path(self.shared_object.parent),
            "FAKE_HIP_STATE": str(self.state_path),
            "FAKE_HIP_RECORD": str(self.record_path),
        }

    def write(
        self,
        gpus: Sequence[Gpu],
        *,
        version: int = 60342134,
        function_0: bool = False,
        lines: Sequence[str] = (),
    ) -> None:
        """Makes this the state, all at once: running programs see it at their next call, and in a hanging one.

        With ``function_0`` a bus id ends in .0, as it did in older releases.
        """
        head = [f"version {version}", *(["function 0"] if function_0 else [])]
        self.put([*head, *_devices(gpus), *shared_object.checked(NAME, lines, CALLS)])


def _devices(gpus: Sequence[Gpu]) -> Iterator[str]:
    for gpu in gpus:
        line = shared_object.device_line("gpu", gpu.node, device=gpu, without={"node", "unique_id"})
        yield f"{line} unique_id={gpu.unique_id:x}"
