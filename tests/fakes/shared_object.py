"""What the pretend libraries' Python halves do alike: build the C half, and write the file that drives it.

``state.h`` is the same for the C halves. A fake's own module says which calls and which devices there are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RULES = frozenset({"fault", "hang", "slow", "crash"})
"""The words of ``state.h`` for rules, each of which has a CALL behind it."""


class BuildError(RuntimeError):
    """A pretend library could not be built; the message names what is missing or what the compiler said.

    BuildError
    └── MissingError
        └── CompilerMissingError
    """


class MissingError(BuildError):
    """There is no C compiler, or no binding to build a library for."""


class CompilerMissingError(MissingError):
    """There is no C compiler."""


def compiler() -> str:
    """The C compiler, or :class:`CompilerMissingError`."""
    found = shutil.which("cc")
    if found is None:
        raise CompilerMissingError("no C compiler 'cc' on PATH (Debian: apt-get install gcc libc6-dev)")
    return found


def compiled(cc: str, source: Path, target: Path, switches: Sequence[str]) -> Path:
    """``target``, now what the compiler ``cc`` makes of ``source``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    made = target.with_name(f"{target.name}.new")
    command = [cc, "-O1", "-Wall", "-Werror", "-pthread", *switches, "-o", str(made), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{cc} cannot build {source.name}:\n{result.stderr}")
    made.replace(target)  # writing into a library that a process has mapped would crash it
    return target


def shared(soname: str) -> list[str]:
    """The switches that make it a shared object of that name."""
    return ["-shared", "-fPIC", f"-Wl,-soname,{soname}"]


def check_known(library: str, without: Collection[str], known: Collection[str]) -> None:
    """Symbols that do not exist cannot be left out: such a variant would be no variant."""
    if unknown := sorted(set(without) - set(known)):
        raise ValueError(f"the {library} has no {', '.join(unknown)} to leave out")


def built_or_skipped(library: str, build: Callable[[], Path]) -> Path:
    """What ``build`` makes; if something is missing the test is skipped with the reason, or fails if ``CI=true``."""
    try:
        return build()
    except MissingError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"no {library}: {error}")


def search_path(folder: Path) -> str:
    """A value of LD_LIBRARY_PATH by which what is in the folder is found before all else."""
    inherited = os.environ.get("LD_LIBRARY_PATH")
    return f"{folder}:{inherited}" if inherited else str(folder)


def fail_in_ci_else_skip(reason: str) -> NoReturn:
    """Ends the test: where ``CI=true`` nothing may go untested."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


class StateFile:
    """The file at ``state_path``, which a pretend library looks at on every call."""

    def __init__(self, state_path: Path) -> None:
        self.state_path = state_path
        self._last_written = 0

    def put(self, lines: Iterable[str]) -> None:
        """Makes these its lines, all at once: running programs see them at their next call, and in a hanging one."""
        new = self.state_path.with_suffix(".new")
        new.write_text("\n".join([*lines, ""]), encoding="utf-8", errors="surrogateescape")
        # Clocks of file systems tick in milliseconds, and a freed inode comes back: only this tells two writes apart.
        self._last_written = max(time.time_ns(), self._last_written + 1)
        os.utime(new, ns=(self._last_written, self._last_written))
        new.replace(self.state_path)

    def remove(self) -> None:
        """Takes the driver away; a library's C half says what its calls answer then."""
        self.state_path.unlink(missing_ok=True)


class RecordedState(StateFile):
    """A state file, and beside it the record that the library makes of its calls."""

    def __init__(self, state_path: Path) -> None:
        super().__init__(state_path)
        self.record_path = state_path.with_suffix(".record")

    def record(self) -> list[str]:
        """The symbol of every call there was, in order; of all programs that had this environment."""
        return self.record_path.read_text().splitlines() if self.record_path.exists() else []


def device_line(*words: str | int, device: DataclassInstance, without: Collection[str]) -> str:
    """``words`` and what the device's fields say, but those in ``without`` and those that are None."""
    values = {field.name: getattr(device, field.name) for field in fields(device) if field.name not in without}
    pairs = (f"{key}={quoted(value)}" for key, value in values.items() if value is not None)
    return " ".join([*map(str, words), *pairs])


def quoted(value: str | float) -> str:
    """One word of the state file."""
    text = str(int(value) if isinstance(value, bool) else value)
    if '"' in text or "\n" in text:
        raise ValueError(f"the state file cannot hold a quote or a line break: {text!r}")
    return f'"{text}"'


def checked(library: str, lines: Iterable[str], calls: Collection[str], rules: Collection[str] = RULES) -> list[str]:
    """``lines``, unless one is a rule for a call that does not exist, which would silently never match."""
    kept = list(lines)
    for line in kept:
        kind, call = ([*line.split(), "", ""])[:2]
        if kind in rules and call != "*" and call not in calls:
            raise ValueError(f"the {library} has no call {call!r}: {line}")
    return kept
