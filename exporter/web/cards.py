"""Rows of the page's tables of devices: who each is, its state in words, and its readings as numbers and bars."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from xml.etree.ElementTree import Element

from msgspec import UNSET

from exporter.catalog import READINGS
from exporter.reports import shortened
from exporter.web.elements import Node, el
from exporter.web.report import BoundCard, Card, HostCard

STATE_MEANINGS = {
    "lost": "the driver says that it is no longer there",
    "hung": "it did not answer in time",
    "asleep": "powered down, and not woken to be read",
    "gone": "not among this host's devices now",
}

_GIB = 2**30
# Where the temperature's bar ends. No card is meant to be as hot.
_HOTTEST_CELSIUS = 110
_NAMES = {metric: family.name for metric, family in READINGS.items()}


def table(caption: str, first: str, rows: Iterable[Element]) -> Element:
    """A table of devices; its first column's head is ``first``."""
    heads = (first, "Card", "Utilization", "Memory", "Temperature, power")
    return el(
        "table",
        el("caption", caption, class_="unseen"),
        el("thead", el("tr", *(el("th", head, scope="col") for head in heads))),
        el("tbody", *rows),
        class_="cards",
    )


def bound_row(card: BoundCard) -> Element:
    """A fleet's index and the card behind it."""
    number = "" if card.physical_index is UNSET else f"GPU {card.physical_index}"
    who = el(
        "td",
        el("b", number or card.identity or "number unknown"),
        *_part(card),
        _line(shortened(card.name), card.pci_bus_id),
        class_="who",
    )
    return el(
        "tr",
        el("th", str(card.fleet_index), scope="row"),
        who,
        *_readings(card.readings, "" if card.state is UNSET else card.state),
    )


def host_row(card: HostCard, links: Mapping[str, str]) -> Element:
    """A device of the host under its own number; ``links`` lead to the fleets that have it."""
    number = "unknown" if card.physical_index is UNSET else str(card.physical_index)
    who = el(
        "td",
        el("b", shortened(card.name) or card.vendor),
        *_part(card),
        _line(card.pci_bus_id, card.uuid),
        _uses(card, links),
        class_="who",
    )
    return el(
        "tr",
        el("th", number, scope="row"),
        who,
        *_readings(card.readings, "" if card.state is UNSET else card.state),
    )


def _part(card: Card) -> Iterator[Node]:
    if card.gpu_partition:
        yield f" part {card.gpu_partition}"


def _line(*texts: str) -> Node:
    """The texts beside each other, none of them broken where it fits in a line of its own."""
    parts = [part for text in texts if text for part in (" ", el("span", text))]
    return el("small", *parts[1:]) if parts else None


def _uses(card: HostCard, links: Mapping[str, str]) -> Node:
    if not links:
        return None
    if not card.used_by:
        return el("small", "in no fleet")
    uses = (
        part
        for use in card.used_by
        for part in (", ", el("a", f"{shortened(use.fleet)} {use.fleet_index}", href=links.get(use.fleet)))
    )
    next(uses)
    return el("small", "in ", *uses)


def _readings(given: Mapping[str, float], state: str) -> Iterator[Element]:
    if state in STATE_MEANINGS:
        badge = el("span", state, class_=f"badge {state}")
        yield el("td", badge, f" {STATE_MEANINGS[state]}: no readings", colspan="3", class_="state")
        return
    known = {metric: given[name] for metric, name in _NAMES.items() if name in given}
    yield _cell("utilization", *_bar(known.get("utilization"), 100, "%"))
    memory = list(_memory(known))
    yield _cell("memory", *([el("div", *memory)] if memory else ()))
    yield _cell("temperature", *_bar(known.get("temperature"), _HOTTEST_CELSIUS, "°C"), *_power(known))


def _cell(kind: str, *inside: Node) -> Element:
    return el("td", *(inside or (el("span", "no reading", class_="quiet"),)), class_=kind)


def _bar(value: float | None, most: float, unit: str) -> Iterator[Node]:
    if value is not None:
        yield f"{value:g} {unit}"
        yield _meter(value, most)


def _meter(value: float, most: float) -> Element:
    # The number stands beside it, for whoever does not see it.
    return el("meter", min="0", max=f"{most:.17g}", value=f"{value:.17g}", aria_hidden="true")


def _power(known: Mapping[str, float]) -> Iterator[Node]:
    """What is drawn, of what may be drawn where that is known."""
    power, limit = known.get("power"), known.get("power_limit")
    if power is not None:
        yield el("small", f"{power:.0f} W" if limit is None else f"{power:.0f} of {limit:.0f} W")


def _memory(known: Mapping[str, float]) -> Iterator[Node]:
    """Used of total where that is known; else what is free, which is not all that is unused everywhere."""
    used, free, total = (known.get(f"memory_{part}") for part in ("used", "free", "total"))
    if used is not None:
        yield _gib(used) if total is None else f"{_gib(used, unit='')} of {_gib(total)}"
        if total:
            yield _meter(used, total)
    if free is not None:
        yield el("small", f"{_gib(free)} free")


def _gib(value: float, unit: str = " GiB") -> str:
    return f"{value / _GIB:.1f}{unit}"
