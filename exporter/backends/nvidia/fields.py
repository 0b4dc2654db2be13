"""What one ``nvmlDeviceGetFieldValues`` tells of a board: each field has an error and a type of its own.

Field numbers and units are those of ``nvml.h``. A driver answers "not supported" for a field that it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from exporter import units
from exporter.backends.nvidia.codes import GPU_IS_LOST, NONE_HERE, reason_of
from exporter.backends.nvidia.missed import Missed
from exporter.errors import DeviceFault, DeviceLost

_LINK_COUNT, _MOST_LINKS = 91, 64
_TYPES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
# 999, "unknown error", is what drivers say of fields that a card has no hardware for.
_NONE = (*NONE_HERE, 999)


_LINK_STATES: dict[float, float] = {0: 0.0, 1: 1.0, 2: 1.0, 3: 0.0}


class Given(NamedTuple):
    """A value of a metric, None where there is none, and of the metric's own labels."""

    metric: str
    value: float | None
    labels: tuple[str, ...] = ()


Release = tuple[int, int]
_FIRST, _LAST = (0, 0), (10_000, 0)


class Field(NamedTuple):
    """A field of NVML's and what it is a value of, by drivers from ``since`` on and before ``until``. Of two for the
    same the first that answers holds, for as long as the card is there.
    """

    number: int
    metric: str
    convert: Callable[[float], float | None]
    labels: tuple[str, ...] = ()
    since: Release = _FIRST
    until: Release = _LAST


def _link_state(value: float) -> float | None:
    """Active (1), asleep for want of traffic (2), active and of no use (3), inactive (0)."""
    return _LINK_STATES.get(value)


_RECOVERY = 230
_OF_ALL = ("gpu-reset", "node-reboot", "drain-peers", "drain-and-reset")
# What the numbers from 5 on mean has changed: nvml.h and nvidia-ml-py of the releases 580, 590, 595 and 610.
_RECOVERIES: tuple[tuple[Release, Release, tuple[str, ...]], ...] = (
    (_FIRST, (580, 0), _OF_ALL),
    ((580, 0), (590, 0), (*_OF_ALL, "bus-reset")),
    ((590, 0), (600, 0), _OF_ALL),
    ((600, 0), _LAST, (*_OF_ALL, "recover-imex-domain", "bus-reset", "system-reboot")),
)
# Clock event reasons have had other numbers first, of which the later ones are of something else.
_MOVED: Release = (580, 82)


def _is_action(place: int, known: int) -> Callable[[float], float | None]:
    """Of an action that is not known nothing is told: that it is none of the others would say that all is well."""
    return lambda value: float(value == place) if value in range(known + 1) else None


FIELDS: tuple[Field, ...] = (
    Field(186, "power", units.milliwatts),  # now
    Field(185, "power", units.milliwatts),  # averaged over a second, on cards that tell no other
    Field(190, "power_limit", units.milliwatts),
    Field(189, "power_limit_default", units.milliwatts),
    Field(188, "power_limit_maximum", units.milliwatts),
    Field(83, "energy", units.millijoules),
    Field(82, "memory_temperature", units.celsius),
    Field(94, "pcie_replays", units.count),
    Field(197, "pcie_transmitted", units.count),
    Field(198, "pcie_received", units.count),
    Field(1, "ecc_enabled", units.flag),
    Field(3, "ecc_errors", units.count, ("corrected",)),
    Field(4, "ecc_errors", units.count, ("uncorrected",)),
    Field(5, "ecc_lifetime_errors", units.count, ("corrected",)),
    Field(6, "ecc_lifetime_errors", units.count, ("uncorrected",)),
    Field(29, "retired_pages", units.count, ("corrected",)),
    Field(30, "retired_pages", units.count, ("uncorrected",)),
    Field(31, "retired_pages_pending", units.flag),
    Field(142, "remapped_rows", units.count, ("corrected",)),
    Field(143, "remapped_rows", units.count, ("uncorrected",)),
    Field(144, "row_remapping_pending", units.flag),
    Field(145, "row_remapping_failed", units.flag),
    Field(74, "throttled_seconds", units.nanoseconds, ("power-cap",)),
    Field(76, "throttled_seconds", units.nanoseconds, ("sync-boost",)),
    Field(77, "throttled_seconds", units.nanoseconds, ("board-limit",)),
    Field(79, "throttled_seconds", units.nanoseconds, ("reliability",)),
    Field(251, "throttled_seconds", units.nanoseconds, ("software-thermal",), (575, 0), _MOVED),
    Field(252, "throttled_seconds", units.nanoseconds, ("hardware-thermal",), (575, 0), _MOVED),
    Field(253, "throttled_seconds", units.nanoseconds, ("power-brake",), (575, 0), _MOVED),
    Field(269, "throttled_seconds", units.nanoseconds, ("software-thermal",), _MOVED),
    Field(270, "throttled_seconds", units.nanoseconds, ("hardware-thermal",), _MOVED),
    Field(271, "throttled_seconds", units.nanoseconds, ("power-brake",), _MOVED),
    Field(75, "throttled_seconds", units.nanoseconds, ("software-thermal",)),  # nvml.h's word for it before those
    *(
        Field(_RECOVERY, "recovery_needed", _is_action(place, len(actions)), (action,), since, until)
        for since, until, actions in _RECOVERIES
        for place, action in enumerate(actions, 1)
    ),
)

LINK_FIELDS: tuple[Field, ...] = (
    Field(165, "link_up", _link_state),
    Field(138, "link_transmitted", units.kibibytes),
    Field(139, "link_received", units.kibibytes),
    Field(202, "link_transmitted", units.count),  # bytes, of NVLink 5, which lacks the two above
    Field(204, "link_received", units.count),
    Field(161, "link_errors", units.count, ("replay",)),
    Field(162, "link_errors", units.count, ("recovery",)),
    Field(163, "link_errors", units.count, ("crc",)),
)
"""Asked for each link that the board has, whose number is the scope."""


Scope = tuple[int, int]
Chosen = dict[tuple[str, tuple[str, ...]], int]
_VERSION = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})", re.ASCII)


class Asked(NamedTuple):
    """A field of a board, or of one of its links."""

    field: Field
    link: int | None

    @property
    def scope(self) -> Scope:
        """What the library is asked with."""
        return self.field.number, self.link or 0

    @property
    def labels(self) -> tuple[str, ...]:
        """Of the value: the link comes first."""
        return self.field.labels if self.link is None else (str(self.link), *self.field.labels)


def release(version: str) -> Release:
    """The first two numbers of a driver's version; of one that is no version, of before all that has changed."""
    found = _VERSION.match(version)
    return _FIRST if found is None else (int(found[1]), int(found[2]))


def questions(wanted: frozenset[str], links: int, driver: Release) -> tuple[Asked, ...]:
    """What there is to ask of a board with so many links, by a driver of that release."""
    board = [Asked(field, None) for field in FIELDS if field.since <= driver < field.until]
    of_links = [Asked(field, link) for link in range(links) for field in LINK_FIELDS]
    return tuple(asked for asked in (*board, *of_links) if asked.field.metric in wanted)


def link_count(nvml: ModuleType, handle: Any) -> int | None:
    """How many NVLinks the board has; None where it does not say. Raises ``NVMLError``."""
    (answer,) = nvml.nvmlDeviceGetFieldValues(handle, [_LINK_COUNT])
    number = _number(answer)
    return int(number) if answer.nvmlReturn == 0 and 0 <= number <= _MOST_LINKS else None


class Questions:
    """What is asked of a board, in one call: all at first and now and then, in between what has answered before."""

    def __init__(self, asked: Sequence[Asked], chosen: Chosen) -> None:
        """``chosen`` keeps which field has answered for what: another, which counts from elsewhere, is no stand-in."""
        self._all, self._chosen = tuple(asked), chosen
        self._known: tuple[Asked, ...] = ()
        self._heard: set[Scope] = set()
        self._missed = Missed()

    def ask(self, nvml: ModuleType, handle: Any) -> Iterator[Given]:
        """The values that the board gives. Raises ``NVMLError``, ``DeviceLost``, and ``DeviceFault`` where no field has
        answered and one of them has failed.
        """
        rests = self._missed.rests()
        asked = self._known if rests else self._all
        if not asked:
            return
        # The library counts a field twice where two values are made of it; each is asked for once.
        scopes = list(dict.fromkeys(each.scope for each in asked))
        answers = dict(zip(scopes, nvml.nvmlDeviceGetFieldValues(handle, scopes), strict=True))
        codes = {scope: answer.nvmlReturn for scope, answer in answers.items()}
        _raise_failed(codes.values())
        if not rests:
            self._heard |= {scope for scope, code in codes.items() if code not in _NONE}
            self._known = tuple(each for each in asked if each.scope in self._heard)
            self._missed.note(found=False)
        yield from self._given(asked, answers)

    def _given(self, asked: Iterable[Asked], answers: Mapping[Scope, Any]) -> Iterator[Given]:
        failed = set()
        for each in asked:
            answer, of = answers[each.scope], (each.field.metric, each.labels)
            if answer.nvmlReturn not in (0, *_NONE):
                failed.add(of)
            if answer.nvmlReturn or of in failed or self._chosen.get(of, each.field.number) != each.field.number:
                continue
            value = each.field.convert(_number(answer))
            if value is not None:
                self._chosen[of] = each.field.number
                yield Given(each.field.metric, value, each.labels)


def _raise_failed(codes: Iterable[int]) -> None:
    found = set(codes)
    if GPU_IS_LOST in found:
        raise DeviceLost("nvmlDeviceGetFieldValues: GPU is lost")
    failed = sorted(found - {0, *_NONE})
    if failed and 0 not in found:
        raise DeviceFault(reason_of(failed[0]), f"nvmlDeviceGetFieldValues: every field failed, with {failed}")


def _number(answer: Any) -> float:
    """A type that is newer than this is no number."""
    kind = answer.valueType
    return float("nan") if not 0 <= kind < len(_TYPES) else getattr(answer.value, _TYPES[kind])
