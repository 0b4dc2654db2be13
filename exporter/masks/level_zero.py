"""Level Zero: ``ZE_AFFINITY_MASK`` under ``ZE_FLAT_DEVICE_HIERARCHY`` and ``ZE_ENABLE_PCI_ID_DEVICE_ORDER``.

The mask selects and never reorders. Its numbers count the driver's own list, discrete cards first; what a program then
enumerates is what is left of it, grouped into one driver handle a product family. Source: Intel's compute-runtime,
``device_factory.cpp`` and ``device.cpp``, and the Level Zero loader's README.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from exporter.inventory import Inventory, pci_sort_key
from exporter.masks.affinity_mask import MASK, Visible, select
from exporter.masks.base import MISSING_AT_MOST, RefusedError, Runtime
from exporter.model import Context, Device, DeviceKey, Inversion, Layer, Refusal, Resolved

HIERARCHY, PCI_ORDER = "ZE_FLAT_DEVICE_HIERARCHY", "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
LOADER_ORDER = "ZEL_DRIVERS_ORDER"
_PREFIXES = ("NEO_L0_", "NEO_")
_PREFIXED = tuple(prefix + name for name in (MASK, HIERARCHY, PCI_ORDER) for prefix in _PREFIXES)

_FLAG = re.compile(r"[ \t\n\v\f\r]*(?:\+|(-))?([0-9]+)")
_LONGEST = 4096  # bytes: from there on the driver takes a variable for unset

_TILE_COUNTS = (1, 2, 4)  # how many tiles a card may have that does not tell


class _Reading(NamedTuple):
    """One way to take what is not certain: the variables' values, and the tiles of cards that do not tell theirs."""

    mask: str | None
    composite: bool
    by_address: bool
    unknown_tiles: int


_DOUBTS = {
    "mask": ("token-dialect", f"whether a NEO_ spelling of {MASK} is read"),
    "composite": ("hierarchy-unknown", "whether a card or each of its tiles is one device"),
    "by_address": ("driver-order-unknown", f"whether a NEO_ spelling of {PCI_ORDER} is read"),
    "unknown_tiles": ("hierarchy-unknown", "how many tiles a card has"),
}


def invert(env: Mapping[str, str], inventory: Inventory, context: Context) -> Inversion | Refusal:
    """The devices that a Level Zero process with this environment enumerates, drivers first and devices in them."""
    layers: list[Layer] = []
    try:
        devices = visible(env, inventory, context, layers)
    except RefusedError as refusal:
        return Refusal(refusal.code, refusal.detail, tuple(layers))
    resolved = (Resolved(device.key, "proven", index) for index, device in enumerate(devices))
    return Inversion(tuple(resolved), tuple(layers))


def visible(
    env: Mapping[str, str], inventory: Inventory, context: Context, layers: list[Layer], in_parts: bool = False
) -> Sequence[Visible]:
    """As :func:`invert`: adds its layers to ``layers``, and raises :class:`RefusedError` where that would refuse.

    With ``in_parts`` it is also refused where the tiles of a device are not known.
    """
    cards = _reachable(inventory, context.reach)
    readings = _readings(env, cards, inventory.whole)
    if context.reach is None or not inventory.whole:
        return _none_at_all(readings, cards, inventory.whole)
    answers = []
    for reading in readings:
        listed = _ordered(reading, cards)
        told = layers if reading is readings[0] else []
        told.append(Layer(HIERARCHY, env.get(HIERARCHY), len(select(None, listed, reading.composite)[0])))
        selected = _masked(reading, listed, env, told)
        if len(cards) > 1 and (selected or _could_select(reading, cards, len(cards))):
            _check_order(reading, cards, context)
        answers.append(_grouped(reading, selected, env, context))
    for reading, answer in zip(readings[1:], answers[1:], strict=True):
        if _told(answer, in_parts) != _told(answers[0], in_parts):
            raise _disagreement(readings[0], reading)
    return answers[0]


def _masked(
    reading: _Reading, cards: Sequence[Device], env: Mapping[str, str], layers: list[Layer]
) -> Sequence[Visible]:
    """What the mask leaves of the cards; its layer is added under the name that the text stands under."""
    names = (prefix + MASK for prefix in _PREFIXES)
    name = next((name for name in names if name in env and env[name] == reading.mask), MASK)
    text = env.get(MASK) if reading.mask is None else reading.mask
    try:
        selected, stopped = select(reading.mask, cards, reading.composite)
    except RefusedError:
        layers.append(Layer(name, text, None))
        raise
    layers.append(Layer(name, text, len(selected), stopped))
    return selected


def _told(answer: Sequence[Visible], in_parts: bool) -> list[tuple[DeviceKey, tuple[int, ...]]]:
    return [(device.key, device.tiles if in_parts and device.parts else ()) for device in answer]


def _reachable(inventory: Inventory, reach: frozenset[DeviceKey] | None) -> list[Device]:
    if reach is None:
        return list(inventory.boards())
    seen = reach | {device.parent for device in inventory.devices if device.key in reach}
    return [card for card in inventory.boards() if card.key in seen]


# --- what the variables may mean


def _readings(env: Mapping[str, str], cards: Sequence[Device], whole: bool) -> list[_Reading]:
    """Every combination of what is not certain, the likeliest first; one where all is certain."""
    masks = [None if text in (None, "", "default") else text for text in _spellings(env, MASK)]
    hierarchies = [choice for text in _spellings(env, HIERARCHY) for choice in _hierarchies(text, cards, whole)]
    orders = [_is_on(text) for text in _spellings(env, PCI_ORDER)]
    counts = _TILE_COUNTS if any(card.tiles is None for card in cards) else (1,)
    choices = itertools.product(*map(dict.fromkeys, (masks, hierarchies, orders, counts)))
    return list(itertools.starmap(_Reading, choices))


def _spellings(env: Mapping[str, str], name: str) -> list[str | None]:
    """The value under the driver's own spellings of the name, which beat the plain one where they are read."""
    prefixed = [_read(env, prefix + name) for prefix in _PREFIXES]
    return [*[text for text in prefixed if text is not None][:1], _read(env, name)]


def _read(env: Mapping[str, str], name: str) -> str | None:
    """The variable's text, unless it is too long for the driver, which takes that for unset."""
    text = env.get(name, "")
    if text.isascii():
        return env.get(name) if len(text) < _LONGEST else None
    undecoded = sum("\udc80" <= character <= "\udcff" for character in text)  # bytes that were no UTF-8
    size = len(text.encode(errors="surrogatepass")) - 2 * undecoded
    return env.get(name) if size < _LONGEST else None


def _hierarchies(text: str | None, cards: Sequence[Device], whole: bool) -> list[bool]:
    """Whether a card is one device, by the variable in exactly this spelling, else by the product of the first card,
    which may be any: a Data Center GPU Max is one device a tile, the others are one device a card.
    """
    if text in ("COMPOSITE", "FLAT", "COMBINED"):
        return [text == "COMPOSITE"]
    known = [not card.hpc for card in cards if card.hpc is not None or card.integrated]
    return known if known and whole and len(known) == len(cards) else [*known, True, False]


def _is_on(text: str | None) -> bool:
    """As C's atoll, which clamps, cut to 32 bits: any number but 0."""
    match = _FLAG.match(text or "")
    if match is None:
        return False
    digits = match[2].lstrip("0")
    number = int(digits or "0") if len(digits) < 20 else 1 << 63
    return (-min(number, 1 << 63) if match[1] else min(number, (1 << 63) - 1)) % (1 << 32) != 0


def _disagreement(first: _Reading, other: _Reading) -> RefusedError:
    differing = (name for name in reversed(_Reading._fields) if getattr(first, name) != getattr(other, name))
    code, what = _DOUBTS[next(differing)]
    return RefusedError(code, f"{what} is not known, and makes a difference")


def _none_at_all(readings: Iterable[_Reading], cards: Sequence[Device], whole: bool) -> Sequence[Visible]:
    """Without the number of cards an answer is known only where the mask names none whatever there is."""
    most = len(cards) if whole else len(cards) + MISSING_AT_MOST
    if most and any(_could_select(reading, cards, most) for reading in readings):
        if not whole:
            raise RefusedError("inventory-incomplete", "a card of this host could not be identified")
        raise RefusedError("reach-unknown", "which cards the process can open is not known")
    return []


def _could_select(reading: _Reading, cards: Sequence[Device], count: int) -> bool:
    """The mask selects something of that many cards with as many tiles as any has, so in any order of the cards."""
    unknown = _TILE_COUNTS if count > len(cards) else ()
    tiles = max((*(card.tiles or reading.unknown_tiles for card in cards), *unknown), default=1)
    card = Device(key=DeviceKey("intel", ""), physical_index=None, pci_bus_id="", tiles=tiles)
    try:
        return bool(select(reading.mask, [card] * count, reading.composite)[0])
    except RefusedError:
        return True


# --- the order


def _ordered(reading: _Reading, cards: Sequence[Device]) -> list[Device]:
    """The driver's list: by PCI address; unless it is told to keep to that, with the integrated cards behind."""
    told = [card if card.tiles else replace(card, tiles=reading.unknown_tiles) for card in cards]
    return sorted(told, key=lambda card: (bool(card.integrated) > reading.by_address, pci_sort_key(card.pci_bus_id)))


def _alike(cards: Sequence[Device]) -> bool:
    """The cards are of one model, and nothing that is known of them says otherwise."""
    names, ranks = {card.name for card in cards}, {card.product_family_rank for card in cards}
    return len(names) == 1 and bool(cards[0].name) and len(ranks) == 1 and len({card.integrated for card in cards}) == 1


def _one_library(cards: Sequence[Device]) -> bool:
    """One driver library serves all these cards, however many are installed."""
    libraries = {card.driver_library for card in cards}
    return _alike(cards) or (len(libraries) == 1 and None not in libraries)


def _check_order(reading: _Reading, cards: Sequence[Device], context: Context) -> None:
    """Raises unless the driver's list of these cards, more than one, is known."""
    if not all(card.pci_bus_id for card in cards):
        raise RefusedError("inventory-incomplete", "a card's PCI address is not known, so neither is its place")
    if context.driver == "old":
        raise RefusedError("driver-order-unknown", "the driver is older than its sorting of the cards")
    if context.driver is None and not reading.by_address and not any(card.driver_sorts for card in cards):
        raise RefusedError("driver-order-unknown", f"which driver it is is not known, and {PCI_ORDER} is not on")
    if context.multi_driver_library or (context.multi_driver_library is None and not _one_library(cards)):
        how = "are" if context.multi_driver_library else "may be"
        raise RefusedError(
            "multiple-driver-libraries", f"{len(cards)} cards, and several driver libraries {how} installed"
        )
    if not reading.by_address and any(card.integrated is None for card in cards):
        raise RefusedError("driver-order-unknown", "whether a card is integrated is not known")


def _grouped(
    reading: _Reading, devices: Sequence[Visible], env: Mapping[str, str], context: Context
) -> Sequence[Visible]:
    """The devices as a program enumerates them: by driver handle, which is by product family, the newest first."""
    cards = list({device.card.key: device.card for device in devices}.values())
    ranks = {card.product_family_rank for card in cards}
    if context.space == "mask_index" or len(cards) < 2 or _alike(cards) or (len(ranks) == 1 and None not in ranks):
        return devices
    if reading.by_address or env.get(LOADER_ORDER):
        cause = PCI_ORDER if reading.by_address else LOADER_ORDER
        raise RefusedError("driver-order-unknown", f"cards of several product families, and {cause} is set")
    if None not in ranks:
        return _by_family(devices)
    if all(_alike([card for card in cards if bool(card.integrated) is kind] or cards[:1]) for kind in (False, True)):
        return devices
    raise RefusedError("driver-order-unknown", "cards of several models, whose product families are not known")


def _by_family(devices: Sequence[Visible]) -> Sequence[Visible]:
    """Families with a discrete card first, then the newest first; in a family as in the driver's list."""
    discrete = {device.card.product_family_rank for device in devices if not device.card.integrated}

    def place(device: Visible) -> tuple[bool, int]:
        rank = device.card.product_family_rank
        return rank not in discrete, -(rank or 0)

    return sorted(devices, key=place)


RUNTIME = Runtime(
    name="level_zero",
    vendors=("intel",),
    masks=(MASK, HIERARCHY, PCI_ORDER),
    variables=(MASK, HIERARCHY, PCI_ORDER, LOADER_ORDER, *_PREFIXED),
    default=True,
    moving=False,
    invert=invert,
    choosing=(MASK, *(prefix + MASK for prefix in _PREFIXES)),
    told_to_drivers=(MASK, HIERARCHY, PCI_ORDER, LOADER_ORDER, *_PREFIXED),
)
