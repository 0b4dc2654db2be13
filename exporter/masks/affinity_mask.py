"""``ZE_AFFINITY_MASK``: its text, and what it leaves of the cards in the driver's order.

Source: Intel's compute-runtime, ``execution_environment.cpp`` and ``string_helpers.h``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from exporter.inventory import tiles_key
from exporter.masks.base import RefusedError
from exporter.model import Device, DeviceKey

MASK = "ZE_AFFINITY_MASK"

_NUMBER = re.compile(r"[ \t\n\v\f\r]*([+-]?)(?:0[xX]([0-9a-fA-F]+)|(0[0-7]*)|([1-9][0-9]*))")
_BINARY = re.compile(r"[ \t\n\v\f\r]*([+-]?)0[bB]([01]+)")
_LONGEST_NUMBER = 64  # digits after the zeros in front: more are past 64 bits to any base


class Visible(NamedTuple):
    """A card, or some tiles of one, that is one device; ``parts`` says whether a program can have its tiles singly."""

    card: Device
    tiles: tuple[int, ...]
    parts: bool

    @property
    def key(self) -> DeviceKey:
        """The card's, where all its tiles are there, else that of the tiles."""
        whole = len(self.tiles) == (self.card.tiles or 1)
        return self.card.key if whole else tiles_key(self.card, self.tiles)


class _Entry(NamedTuple):
    """An entry of the mask where it stands first; each number is None where reading it throws."""

    position: int
    text: str
    numbers: tuple[int | None, ...]


def select(mask: str | None, cards: Sequence[Device], composite: bool) -> tuple[list[Visible], str]:
    """What the mask (None: unset) leaves of the cards, in their order, and the first entry that it skipped.

    Raises :class:`RefusedError` where the driver would throw, and where known ways to read a number disagree.
    """
    everything = _everything(cards, composite)
    if mask is None:
        return everything, ""
    entries = _entries(mask, _number)
    selected, stopped = _chosen(entries, everything, composite)
    for code, number, suspect, why in _DIALECTS:
        if suspect.search(mask) and _chosen(_entries(mask, number), everything, composite)[0] != selected:
            raise RefusedError(code, f"{MASK}={mask!r}: {why}")
    return selected, stopped


def _entries(mask: str, number: Callable[[str], int | None]) -> list[_Entry]:
    """The entries without repeats, which are harmless, as is their order."""
    first: dict[str, int] = {}
    for position, token in enumerate(_split(mask, ","), start=1):
        first.setdefault(token, position)
    return [_Entry(position, token, _numbers(token, number)) for token, position in first.items()]


def _numbers(token: str, number: Callable[[str], int | None]) -> tuple[int | None, ...]:
    if token.isascii() and token.isdigit() and token[0] != "0" and len(token) < 10:
        return (int(token),)  # what nearly every mask has
    return tuple(map(number, _split(token, ".")))


def _split(text: str, separator: str) -> list[str]:
    """Nothing behind a last separator is no part."""
    parts = text.split(separator)
    return parts if parts[-1] else parts[:-1]


def _everything(cards: Sequence[Device], composite: bool) -> list[Visible]:
    whole = [Visible(card, tuple(range(card.tiles or 1)), (card.tiles or 1) > 1) for card in cards]
    return whole if composite else [Visible(card, (tile,), False) for card, tiles, _ in whole for tile in tiles]


def _chosen(entries: Sequence[_Entry], everything: Sequence[Visible], composite: bool) -> tuple[list[Visible], str]:
    chosen: dict[int, set[int]] = {}
    skipped = ""
    for entry in entries:
        place = _readable(entry, 0)
        dotted = len(entry.numbers) > 1 and not composite
        if dotted or not 0 <= place < len(everything):
            why = "has a dot, which counts under COMPOSITE only" if dotted else f"is none of the {len(everything)}"
            skipped = skipped or f"entry {entry.position} is `{entry.text}`, which {why}: skipped"
        else:
            chosen.setdefault(place, set()).update(_tiles(entry, everything[place].tiles))
    return [_narrowed(everything[place], tiles) for place, tiles in sorted(chosen.items()) if tiles], skipped


def _tiles(entry: _Entry, tiles: tuple[int, ...]) -> Iterable[int]:
    """The tiles that the entry adds: all for a card, one for a tile, none for three parts; four make it abort."""
    if len(entry.numbers) == 1:
        return tiles
    tile = _readable(entry, 1)
    if tile not in tiles or (len(entry.numbers) == 3 and _readable(entry, 2) >= 0):
        return ()
    if len(entry.numbers) > 3:
        raise RefusedError("runtime-init-fails", f"{MASK}: `{entry.text}` has more than three parts, which aborts")
    return (tile,)


def _readable(entry: _Entry, part: int) -> int:
    """The number, where a negative one is past every card as it is in the driver."""
    number = entry.numbers[part] if part < len(entry.numbers) else None
    if number is None:
        raise RefusedError("runtime-init-fails", f"{MASK}: `{entry.text}` is not a number, which ends the process")
    return number if number >= 0 else 1 << 64


def _narrowed(device: Visible, tiles: set[int]) -> Visible:
    return Visible(device.card, tuple(sorted(tiles)), device.parts and len(tiles) > 1)


def _signed(sign: str, digits: str, base: int) -> int | None:
    value = int(digits, base) if len(digits.lstrip("0")) <= _LONGEST_NUMBER else 1 << 64
    return None if value >= 1 << 64 else -value if sign == "-" else value


def _number(text: str) -> int | None:
    """As C++'s stoul with base 0: what follows the digits does not matter; None where it throws."""
    match = _NUMBER.match(text)
    if match is None:
        return None
    sign, hexadecimal, octal, decimal = match.groups()
    return _signed(sign, hexadecimal or octal or decimal, 16 if hexadecimal else 8 if octal else 10)


def _number_since_c23(text: str) -> int | None:
    """As above by the newer C standard, which knows ``0b1``."""
    match = _BINARY.match(text)
    return _number(text) if match is None else _signed(match[1], match[2], 2)


def _cut_to_32_bits(text: str) -> int | None:
    number = _number(text)
    return None if number is None else number % (1 << 32)


_DIALECTS = (
    ("token-dialect", _number_since_c23, re.compile("0[bB]"), "whether 0b begins a number depends on the C library"),
    ("integer-wrap", _cut_to_32_bits, re.compile("-|[0-9a-fA-F]{8}"), "a number overflows 32 bits"),
)
