"""What a page must show, and how it differs from that."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from tests.harness import Scrape
from tests.truth import Page, Truth
from tests.truth_cards import FREE, READINGS, UTILIZATION, Pretend
from tests.truth_judge import devices_of


@dataclass(frozen=True, kw_only=True)
class Expect:
    """How a page differs from that of a host that is well. Alternatives stand in one text: ``"lost|hung"``.

    ``states`` has cards, or parts, that are not ok; ``gone`` is one without rows. ``without`` has readings that a card
    lacks; those of ``maybe`` it may lack. ``down`` has the reason of a backend that is down, or ``up``. ``refused`` has
    fleets and the reason; those of a backend that is down are refused anyhow. ``counted`` are counts of faults, by
    vendor and reason, that must have risen since the fault. The page takes at most ``within`` seconds.
    """

    states: Mapping[Pretend, str] = field(default_factory=dict)
    without: Mapping[Pretend, Collection[str]] = field(default_factory=dict)
    maybe: Mapping[Pretend, Collection[str]] = field(default_factory=dict)
    down: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    counted: Collection[tuple[str, str]] = ()
    within: float = 5.0


WELL = Expect()
"""All is well."""


def differences(
    page: Page,
    truth: Truth,
    expect: Expect,
    *,
    settled: bool = False,
    only: Collection[Pretend] | None = None,
) -> list[str]:
    """How the page differs from what is expected; with ``only``, as to these cards alone.

    Where it is not ``settled`` counters may still be without a value, which takes two readings.
    """
    check = _Check(page.scrape, truth, expect, settled)
    cards = truth.host.cards if only is None else tuple(card for card in truth.host.cards if card in only)
    found = [*check.devices(cards)]
    if only is None:
        found += [*check.backends(), *check.fleets()]
    return found


class _Check:
    def __init__(self, page: Scrape, truth: Truth, expect: Expect, settled: bool) -> None:
        self._page, self._truth, self._expect, self._settled = page, truth, expect, settled
        self._wanted = {card.number: state for card, state in expect.states.items()}
        self._without = {card.number: set(names) for card, names in expect.without.items()}
        self._maybe = {card.number: set(names) for card, names in expect.maybe.items()}
        rows = page.of("gpu_exporter_device_state")
        self._states = {_place(row.labels): row.labels["state"] for row in rows if row.value == 1}
        self._ups = {row.labels["vendor"]: row.value for row in page.of("gpu_exporter_backend_up")}
        self._given: dict[tuple[str, str, str], set[str]] = {}
        for name in READINGS:
            for sample in page.of(name, fleet="host"):
                self._given.setdefault(_place(sample.labels), set()).add(name)

    def backends(self) -> Iterator[str]:
        for vendor in sorted({card.vendor for card in self._truth.host.cards} | self._expect.down.keys()):
            rows = self._page.of("gpu_exporter_backend_fault_info", vendor=vendor)
            found = "up" if self._ups.get(vendor) == 1 else " ".join(row.labels["reason"] for row in rows) or "unknown"
            wanted = self._expect.down.get(vendor, "up")
            if found not in wanted.split("|"):
                yield f"the {vendor} backend is {found}, expected {wanted}"

    def devices(self, cards: Collection[Pretend]) -> Iterator[str]:
        here = [(part, board) for part, board in devices_of(tuple(cards))]
        known = {part.number for part, _ in here}
        others = [(card, card) for card in self._expect.states if card.number not in known]
        for device, board in (*here, *others):
            if self._is_down(device.vendor):
                continue
            wanted = self._wanted.get(device.number, self._wanted.get(board.number, "ok"))
            state = self._states.get(_place_of(device), "gone")
            if state not in wanted.split("|"):
                yield f"card {device.number} ({device.vendor}) is {state}, expected {wanted}"
            elif state == "ok":
                yield from self._readings(device)

    def _readings(self, device: Pretend) -> Iterator[str]:
        given = self._given.get(_place_of(device), set())
        without, maybe = self._without.get(device.number, set()), self._maybe.get(device.number, set())
        if device.vendor == "intel" and not self._settled:
            maybe = maybe | {UTILIZATION}
        if lacking := device.given - without - maybe - given:
            yield f"card {device.number} ({device.vendor}) lacks {', '.join(sorted(lacking))}"
        if given & without:
            yield f"card {device.number} ({device.vendor}) has {', '.join(sorted(given & without))}"

    def fleets(self) -> Iterator[str]:
        for fleet, members in self._truth.fleets.items():
            reasons = [row.labels["reason"] for row in self._page.of("gpu_fleet_mask_refusal_info", fleet=fleet)]
            down = all(self._is_down(vendor) for vendor in members)
            wanted = "backend-down" if down and members else self._expect.refused.get(fleet, "inverted")
            found = " ".join(reasons) or "inverted"
            if found not in wanted.split("|"):
                yield f"the fleet {fleet} is {found}, expected {wanted}"
            for vendor, cards in members.items() if found == "inverted" else ():
                yield from self._members(fleet, vendor, cards)

    def _members(self, fleet: str, vendor: str, cards: Collection[Pretend]) -> Iterator[str]:
        """Each member that has a row has its place in the fleet, and there what it gives."""
        here = {device.labels for device, _ in devices_of(self._truth.host.cards)}
        for index, card in enumerate(cards):
            gone = card.labels not in here or _place_of(card) not in self._states
            labels = {"fleet": fleet, "vendor": vendor, "fleet_index": str(index)}
            if self._is_down(vendor) or gone:
                continue
            if not self._page.of("gpu_fleet_device_info", **labels):
                yield f"the fleet {fleet} has no row of card {card.number}, its number {index}"
            gives = FREE in self._given.get(_place_of(card), ())
            if gives != bool(self._page.of(FREE, **labels)):
                yield f"the fleet {fleet} has free memory of its number {index}: {not gives}"

    def _is_down(self, vendor: str) -> bool:
        return vendor in self._expect.down and self._ups.get(vendor) != 1


def _place_of(card: Pretend) -> tuple[str, str, str]:
    return card.vendor, card.pci, card.partition


def _place(labels: Mapping[str, str]) -> tuple[str, str, str]:
    """A card that sleeps may not tell its UUID: whether it is right is the judge's to say."""
    return labels["vendor"], labels["pci_bus_id"], labels.get("gpu_partition", "")
