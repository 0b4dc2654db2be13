"""Which readings are wanted: globs over the names of their families."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from exporter.catalog.family import Family
from exporter.catalog.readings import READINGS
from exporter.catalog.usage import USAGE

NAMES = tuple(family.name for family in (*READINGS.values(), *USAGE.values()))
"""What a glob can choose from: mapping, health and the exporter itself are always there."""


class Selection(NamedTuple):
    """Keys of :data:`READINGS` that are read, and of :data:`USAGE` that are shown."""

    readings: frozenset[str]
    usage: frozenset[str]


def matches(pattern: str, names: Iterable[str] = NAMES) -> list[str]:
    """The families that a pattern means."""
    return [name for name in names if fnmatchcase(name, pattern)]


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
