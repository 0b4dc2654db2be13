"""How the text of ``CUDA_VISIBLE_DEVICES`` may be read, and what all readings agree on.

NVIDIA's text leaves much of the grammar open, so every plausible reading of a mask is evaluated, and an answer is given
only where all agree: PyTorch's parser, nvitop's rules, C's number syntax, a 32-bit cut, and UUIDs in any case.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from exporter.masks.base import MISSING_AT_MOST, RefusedError
from exporter.model import Device, DeviceKey

MASK = "CUDA_VISIBLE_DEVICES"

_C_BLANKS = " \t\n\v\f\r"
_DECIMAL = re.compile(r"[0-9]+")
_C_NUMBER = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)")
_LEGACY_MIG = re.compile(r"MIG-(GPU-[0-9a-f-]+)/([0-9]{1,4})/([0-9]{1,4})", re.IGNORECASE)

Entry = TypeVar("Entry", int, str)

Target = int | DeviceKey
"""What an entry names: a position in the base order, or an identity."""


class _Unreadable(Exception):
    """This reading of the mask fails on a token."""


class Host(NamedTuple):
    """The reachable devices, also by identity. ``size`` is how many cards the process numbers; a trial may vary it."""

    cards: tuple[Device, ...]
    parts: tuple[Device, ...]
    named: Mapping[str, Device]
    size: int
    whole: bool
    reach_known: bool

    @property
    def unnamed(self) -> bool:
        """Some card, or whether it has MIG devices, is not known, so that a UUID without a match proves nothing."""
        return not self.whole or any(not card.uuid or card.physical_index is None for card in self.cards)

    def instances(self, card: Device) -> tuple[Device, ...]:
        """The reachable MIG devices of a card."""
        return tuple(part for part in self.parts if part.parent == card.key)


def targets(mask: str | None, host: Host) -> tuple[list[Target], str]:
    """What the mask (None: unset) selects, in order, and where its list ended. Raises :class:`RefusedError`."""
    if mask is not None and _names_identities(mask):
        return _agreed(mask, host)
    if host.whole and host.reach_known:
        return _agreed(mask, host)
    return _empty_whatever_the_count(mask, host)


def _names_identities(mask: str) -> bool:
    return mask.lstrip().casefold().startswith(("gpu-", "mig-"))


def _empty_whatever_the_count(mask: str | None, host: Host) -> tuple[list[Target], str]:
    """A mask of numbers over an unknown count of cards is known only if it hides every card for each count."""
    most = host.size if host.whole else host.size + MISSING_AT_MOST
    stopped = ""
    for size in range(most + 1):
        targets, stopped = _agreed(mask, host._replace(size=size))
        if targets and not host.whole:
            raise RefusedError("inventory-incomplete", "a card of this host could not be identified")
        if targets:
            raise RefusedError("reach-unknown", "which cards the process can open is not known")
    return [], stopped


def _agreed(mask: str | None, host: Host) -> tuple[list[Target], str]:
    """What every plausible reading of the mask selects, and where the list ended."""
    if mask is None:
        return list(range(host.size)), ""
    try:
        targets, stopped = _scan(mask, host, _decimal)
        others = [_pytorch(mask, host), _scan(mask, host, _c_number, blanks=_C_BLANKS)[0]]
        others.append(_scan(mask, host, _decimal, fold=True)[0])
        cut = _scan(mask, host, _cut_to_32_bits)[0]
    except _Unreadable as reason:
        raise RefusedError("token-dialect", f"{MASK}={mask!r}: {reason}") from None
    if any(other != targets for other in others):
        mixed = {str(target.identity[:4]) for target in targets if isinstance(target, DeviceKey)}
        code = "mig-mixed" if len(mixed) > 1 else "token-dialect"
        raise RefusedError(code, f"{MASK}={mask!r} is read in more than one way")
    if cut != targets:
        raise RefusedError("integer-wrap", f"{MASK}={mask!r}: a number overflows 32 bits")
    return targets, stopped


def _scan(
    mask: str, host: Host, number: Callable[[str], int | None], blanks: str | None = None, fold: bool = False
) -> tuple[list[Target], str]:
    """Left to right: the first invalid entry, or a change from numbers to UUIDs or back, ends the list; a card named
    twice leaves none.
    """
    chosen: dict[Target, None] = {}
    kind: type | None = None
    for position, text in enumerate(mask.split(","), start=1):
        token = text.strip(blanks)
        if _is_identity(token, fold):
            target: Target | None = _match(token, host, fold)
        else:
            target = number(token)
        if isinstance(target, int) and not 0 <= target < host.size:
            return list(chosen), f"entry {position} is `{token}`, and there are {host.size} cards: the list ends"
        if target is None:
            return list(chosen), f"entry {position} is `{token}`, which names no card: the list ends"
        if kind not in (None, type(target)):
            return list(chosen), f"entry {position} is `{token}`, a change between numbers and UUIDs: the list ends"
        if target in chosen:
            return [], f"entry {position} is `{token}`, a card named before: no device is left"
        chosen[target], kind = None, type(target)
    return list(chosen), ""


def _is_identity(token: str, fold: bool) -> bool:
    return (token.casefold() if fold else token).startswith(("gpu-", "mig-") if fold else ("GPU-", "MIG-"))


def _decimal(token: str) -> int | None:
    """The leading decimal digits: ``1gpu2`` is 1. Without one the token is no number."""
    match = _DECIMAL.match(token)
    return None if match is None else int(match[0][-20:]) if len(match[0].lstrip("0")) <= 20 else 10**20


def _c_number(token: str) -> int | None:
    """As C's strtol with base 0: a sign, ``0x10`` and ``010`` count."""
    match = _C_NUMBER.match(token)
    if match is None or len(match[0]) > 1000:
        return None if match is None else 10**20
    sign, digits = (-1, match[0][1:]) if match[0][0] == "-" else (1, match[0].lstrip("+"))
    octal = len(digits) > 1 and digits[0] == "0" and digits[1] in "01234567"
    return sign * int(digits, 8 if octal else 0)


def _cut_to_32_bits(token: str) -> int | None:
    number = _decimal(token)
    return number if number is None or number >= 10**20 else (number + 2**31) % 2**32 - 2**31


def _pytorch(mask: str, host: Host) -> list[Target]:
    """As PyTorch's parser: UUID entries are not stripped, a spelling that comes twice leaves no device wherever it
    stands, and numbers are compared before they are found to be out of range.
    """
    kind = mask[:4]
    tokens = mask.split(",")
    if kind in ("GPU-", "MIG-"):
        names = _until_invalid(tokens, lambda name: name.startswith(kind))
        return _until_unknown(names, lambda name: _match(name, host, fold=False))
    numbers = _until_invalid((_pytorch_number(token.strip()) for token in tokens), lambda number: number >= 0)
    return _until_unknown(numbers, lambda number: number if number < host.size else None)


def _until_invalid(entries: Iterable[Entry], valid: Callable[[Entry], bool]) -> list[Entry]:
    named: dict[Entry, None] = {}
    for entry in entries:
        if entry in named:
            return []
        if not valid(entry):
            break
        named[entry] = None
    return list(named)


def _until_unknown(entries: Iterable[Entry], find: Callable[[Entry], Target | None]) -> list[Target]:
    chosen: dict[Target, None] = {}
    for entry in entries:
        target = find(entry)
        if target is None:
            break
        if target in chosen:
            return []
        chosen[target] = None
    return list(chosen)


def _pytorch_number(token: str) -> int:
    """Leading digits, of any script, after at most one sign; -1 without any."""
    if token.isascii() and token.isdigit() and len(token) < 1000:
        return int(token)
    length = 0
    while length < len(token) and (token[length].isdigit() or (length == 0 and token[0] in "+-")):
        length += 1
    try:
        return int(token[:length]) if length else -1
    except ValueError:
        raise _Unreadable(f"`{token[:40]}` is not established as a number") from None


def _match(token: str, host: Host, fold: bool) -> DeviceKey | None:
    """The one reachable device whose UUID begins with the token; None if there is none, or more than one."""
    if len(token) == len("GPU-") or token.casefold() == "mig-gpu-":
        raise _Unreadable(f"`{token}` is a prefix without any digit")
    if token.casefold().startswith("mig-gpu-"):
        return _match_legacy(token, host, fold)
    if token in host.named:
        return host.named[token].key
    pool = host.parts if token.casefold().startswith("mig-") else host.cards
    wanted = token.casefold() if fold else token
    found = [device for device in pool if (device.uuid.casefold() if fold else device.uuid).startswith(wanted)]
    if len(found) > 1 and not host.reach_known:
        raise RefusedError("reach-unknown", f"`{token}` begins more than one card's UUID")
    if host.unnamed:
        raise RefusedError("inventory-incomplete", f"`{token}` may name a card whose UUID is not known")
    return found[0].key if len(found) == 1 else None


def _match_legacy(token: str, host: Host, fold: bool) -> DeviceKey | None:
    """``MIG-GPU-<UUID>/<GPU instance>/<compute instance>``, the spelling before R470."""
    match = _LEGACY_MIG.fullmatch(token)
    if match is None or (match[0][:8] != "MIG-GPU-" and not fold):
        return None
    wanted = match[1].casefold() if fold else match[1]
    begun = [card for card in host.cards if (card.uuid.casefold() if fold else card.uuid).startswith(wanted)]
    parents = [card.key for card in begun if len(card.uuid) == len(wanted)]
    if begun and not parents:
        raise _Unreadable(f"`{token}` shortens its card's UUID")
    if host.unnamed and not parents:
        raise RefusedError("inventory-incomplete", f"`{token}` may name a card whose UUID is not known")
    place = (int(match[2]), int(match[3]))
    for part in host.parts:
        if part.parent in parents and (part.gpu_instance, part.compute_instance) == place:
            return part.key
    return None
