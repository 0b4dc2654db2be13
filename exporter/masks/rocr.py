"""ROCr: the cards that a process can open, in the KFD's order, and ``ROCR_VISIBLE_DEVICES`` over them.

Source: ROCr's ``amd_filter_device.cpp`` and ``amd_topology.cpp``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from exporter.inventory import Inventory
from exporter.masks.base import RefusedError
from exporter.model import Device, DeviceKey

MASK = "ROCR_VISIBLE_DEVICES"

WHOLE_UUID = 20  # characters of GPU- and 16 digits
_SHORTEST_UUID = 5

_BLANKS = " \t\n\v\f\r"
UPPER = str.maketrans("abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_NUMBER = re.compile(r"([+-]?)(?:0X([0-9A-F]+)|(0[0-7]*)|([1-9][0-9]*))")
_BINARY = re.compile(r"([+-]?)0B([01]+)")
_LONGEST_NUMBER = 80  # digits after the zeros in front: more are past 64 bits to any base
_HUGE = 1 << _LONGEST_NUMBER

Target = DeviceKey | int
"""A device, or a place in ROCr's order while it is not known which device has that place."""


class Host(NamedTuple):
    """The reachable devices. Where ``ordered``, they stand in KFD order, and there are ``size`` of them.

    ``uuids`` are in capitals, as ROCr compares them.
    """

    cards: tuple[Device, ...]
    named: Mapping[DeviceKey, Device]
    uuids: Mapping[DeviceKey, str]
    ordered: bool
    size: int
    whole: bool
    reach_known: bool

    @property
    def counted(self) -> bool:
        """How many cards the process numbers is known."""
        return self.whole and self.reach_known

    def everything(self) -> list[Target]:
        """What ROCr lists without a mask."""
        places = range(self.size)
        return [card.key for card in self.cards] if self.counted and self.ordered else list(places)

    def unordered(self, why: str) -> RefusedError:
        """The refusal of what depends on which card has which place."""
        if not self.whole:
            return RefusedError("inventory-incomplete", "a card of this host could not be identified")
        if not self.reach_known:
            return RefusedError("reach-unknown", "which cards the process can open is not known")
        return RefusedError("kfd-order-unknown", f"{why} depends on the KFD's order of the cards, which is not known")

    def named_before(self, target: Target, chosen: Mapping[Target, None]) -> bool:
        """The target is one of the chosen. They are all devices or all places, since the two cannot be compared."""
        if chosen and isinstance(next(iter(chosen)), int) != isinstance(target, int):
            raise self.unordered("whether a number and a UUID name one card")
        return target in chosen

    def check_named(self, token: str, found: Sequence[DeviceKey]) -> None:
        """A card whose UUID is not known may match as well. A whole UUID is one card's, but may be many partitions'."""
        whole = len(token) == WHOLE_UUID and len(found) == 1 and self.named[found[0]].parent is None
        if not whole and (not self.whole or any(not card.uuid and card.kfd_node is None for card in self.cards)):
            raise RefusedError("inventory-incomplete", f"`{token}` may name a card whose UUID is not known")


def reachable(inventory: Inventory, reach: frozenset[DeviceKey] | None) -> Host:
    """The cards and partitions that the KFD shows the process; a card with partitions is only its parts."""
    parents = {device.parent for device in inventory.devices}
    cards = [device for device in inventory.devices if device.key not in parents and device.kfd_listed is not False]
    if reach is not None:
        cards = [card for card in cards if card.key in reach or card.parent in reach]
    nodes = {card.kfd_node for card in cards if card.kfd_node is not None}
    known = len(cards) < 2 or len(nodes) == len(cards)
    cards.sort(key=lambda card: (card.kfd_node or 0, card.key))
    named = {card.key: card for card in cards}
    uuids = {card.key: card.uuid.translate(UPPER) for card in cards}
    return Host(tuple(cards), named, uuids, known, len(cards), inventory.whole, reach is not None)


def chosen_by(mask: str | None, host: Host) -> tuple[list[Target], str]:
    """ROCr's list, and where it ended. Raises :class:`RefusedError` where known ways to read a number disagree."""
    if mask is None:
        return host.everything(), ""
    tokens = _tokens(mask)
    looked_at = [token.translate(UPPER).strip(_BLANKS) for token in tokens[: host.size]]
    targets, stopped = _scan(looked_at, tokens, host, _number)
    for code, other, why in _DIALECTS:
        differ = any(other(token) != _number(token) for token in looked_at)
        if differ and _scan(looked_at, tokens, host, other)[0] != targets:
            raise RefusedError(code, f"{MASK}={mask!r}: {why}")
    unread = len(tokens) - host.size
    if not stopped and unread > 0:
        stopped = f"only as many entries are read as there are cards, {host.size}: {unread} more are not"
    return targets, stopped


def _tokens(mask: str) -> list[str]:
    tokens = mask.split(",")
    return tokens if tokens[-1] else tokens[:-1]


def _scan(
    looked_at: Sequence[str], tokens: Sequence[str], host: Host, number: Callable[[str], int | None]
) -> tuple[list[Target], str]:
    """Left to right over as many entries as there are cards; the first invalid one, or a repeat, ends the list."""
    chosen: dict[Target, None] = {}
    for position, token in enumerate(looked_at, start=1):
        if not token:
            raise RefusedError("runtime-init-fails", f"{MASK}: entry {position} is empty, which makes hsa_init fail")
        target = _by_uuid(token, host) if token[0] == "G" else _place(number(token), host)
        if target is None:
            return list(
                chosen
            ), f"entry {position} is `{tokens[position - 1]}`, which names no card: the list ends here"
        if host.named_before(target, chosen):
            return list(
                chosen
            ), f"entry {position} is `{tokens[position - 1]}`, a card named before: the list ends here"
        chosen[target] = None
    return list(chosen), ""


def _place(number: int | None, host: Host) -> Target | None:
    if number is None or not 0 <= number < host.size:
        return None
    return host.cards[number].key if host.counted and host.ordered else number


def _by_uuid(token: str, host: Host) -> Target | None:
    """The one card whose UUID begins with the token, in any case; None for none or more than one."""
    if not _SHORTEST_UUID <= len(token) <= WHOLE_UUID:
        return None
    found = [key for key, uuid in host.uuids.items() if uuid.startswith(token)]
    if len(found) > 1 and not host.reach_known:
        raise host.unordered("")
    host.check_named(token, found)
    return found[0] if len(found) == 1 else None


def _signed(sign: str, digits: str, base: int) -> int:
    value = int(digits, base) if len(digits.lstrip("0")) <= _LONGEST_NUMBER else _HUGE
    return -value if sign == "-" else value


def _number(token: str) -> int | None:
    """As C's strtol with base 0, where nothing may follow the digits."""
    match = _NUMBER.fullmatch(token)
    if match is None:
        return None
    sign, hexadecimal, octal, decimal = match.groups()
    return _signed(sign, hexadecimal or octal or decimal, 16 if hexadecimal else 8 if octal else 10)


def _number_since_c23(token: str) -> int | None:
    """As above by the newer C standard, which knows ``0b1``."""
    match = _BINARY.fullmatch(token)
    return _number(token) if match is None else _signed(match[1], match[2], 2)


def _cut_to_32_bits(token: str) -> int | None:
    """What is left in 32 bits of a 64-bit number, which strtol clamps to."""
    value = _number(token)
    if value is None:
        return None
    clamped = max(-(1 << 63), min((1 << 63) - 1, value))
    return (clamped + (1 << 31)) % (1 << 32) - (1 << 31)


_DIALECTS = (
    ("token-dialect", _number_since_c23, "whether 0b begins a number depends on the C library"),
    ("integer-wrap", _cut_to_32_bits, "a number overflows 32 bits"),
)
