"""Which readings are wanted: globs over the names of their families."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from exporter.catalog.family import Family
from exporter.catalog.readings import READINGS
from exporter.catalog.usage import USAGE

NAMES = tuple(family.name for family in (*READINGS.values(), *USAGE.values()))
"""What a glob can choose from: mapping, health and the exporter itself are always there."""


SHARES = "process_utilization"
"""Stands beside keys of :data:`READINGS` for what each process does, which is asked for a fleet's utilization alone."""


class Selection(NamedTuple):
    """Keys of :data:`READINGS` that are read, and of :data:`USAGE` that are shown."""

    readings: frozenset[str]
    usage: frozenset[str]

    @property
    def asked(self) -> frozenset[str]:
        """What a backend is to ask its vendor's driver for."""
        return self.readings | ({SHARES} if "utilization" in self.usage else set())


def matches(pattern: str, names: Iterable[str] = NAMES) -> list[str]:
    """The families that a pattern means."""
    return [name for name in names if fnmatchcase(name, pattern)]


def meant(pattern: str) -> str:
    """What a pattern that no family matches was probably to be; empty where nothing is near."""
    import difflib  # of a setting that is wrong; no worker needs it

    close = difflib.get_close_matches(pattern, list(_candidates(pattern)), n=1)
    return close[0] if close else ""


def _candidates(pattern: str) -> Iterator[str]:
    """The names, and for a pattern that stands for several what begins or ends as they do."""
    yield from NAMES
    if any(mark in pattern for mark in "*?["):
        for words in (name.split("_") for name in NAMES):
            for count in range(1, len(words) - 1):
                yield f"{'_'.join(words[: count + 1])}_*"
                yield f"*_{'_'.join(words[-count:])}"


def selection(include: Sequence[str] = ("*",), exclude: Sequence[str] = ()) -> Selection:
    """What is included and not excluded. A costly family has to be meant: a pattern of nothing but stars means none."""

    def chosen(families: Mapping[str, Family]) -> frozenset[str]:
        return frozenset(key for key, family in families.items() if _is_wanted(family, include, exclude))

    return Selection(chosen(READINGS), chosen(USAGE))


def _is_wanted(family: Family, include: Sequence[str], exclude: Sequence[str]) -> bool:
    meant = [pattern for pattern in include if pattern.strip("*") or not family.costly]
    return any(fnmatchcase(family.name, each) for each in meant) and not any(
        fnmatchcase(family.name, each) for each in exclude
    )
