"""The one table of all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from tests.faults import codes, crashes, devices, hangs, libraries, partitions, processes
from tests.truth import Libraries


@runtime_checkable
class Scenario(Protocol):
    """A row: its name, and what was wrong when it was played."""

    @property
    def name(self) -> str:
        """As in the test's id."""

    def play(self, built: Libraries, directory: Path) -> list[str]:
        """As above; ``directory`` is its own."""


_SUBJECTS = (codes, devices, partitions, hangs, crashes, libraries, processes)
ROWS: tuple[Scenario, ...] = tuple(row for subject in _SUBJECTS for row in subject.ROWS)
