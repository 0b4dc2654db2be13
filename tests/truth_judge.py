"""Judges a page by what was true while it was asked for: whose each reading is, of when, and whose number is whose."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from tests.harness import Sample, Scrape
from tests.truth_cards import READINGS, UTILIZATION, Pretend

STATES = ("asleep", "hung", "lost", "ok")
HOST = "host"
FOREIGN = frozenset(("instance", "job", "hostname", "pod", "namespace"))
FAULTS = "gpu_exporter_backend_faults_total"
VENDOR_OF = {"cuda": "nvidia", "rocm": "amd", "level_zero": "intel", "sycl": "intel"}
"""Whose cards a runtime numbers; others number those of all."""

Who = tuple[str, str, str, str]
History = list[tuple[int, tuple[Pretend, ...]]]
"""From which tick on the host had which cards, in the order of the ticks."""
Fleets = Mapping[str, Mapping[str, Sequence[Pretend]]]
"""By fleet and vendor the cards in the fleet's own order, ``host`` left out."""


def devices_of(cards: Sequence[Pretend]) -> Iterator[tuple[Pretend, Pretend]]:
    """Each card, and each part that programs can have, with its card."""
    for card in cards:
        yield card, card
        yield from ((part, card) for part in card.parts if card.mig or card.vendor == "amd")


def indices_of(cards: Sequence[Pretend]) -> dict[Who, int]:
    """What the vendor's tool numbers them: NVML's index, amd-smi's by address and partition, xpu-smi's by address."""
    found: dict[Who, int] = {}
    for vendor in ("nvidia", "amd", "intel"):
        mine = [card for card in cards if card.vendor == vendor]
        index = 0
        for card in mine if vendor == "nvidia" else sorted(mine, key=lambda card: card.pci):
            own = index if card.index is None else card.index
            found[card.labels] = own
            for place, part in enumerate(card.parts):
                found[part.labels] = own + (place if vendor == "amd" else 0)
            index += max(1, len(card.parts)) if vendor == "amd" else 1
    return found


def who(labels: Mapping[str, str]) -> Who:
    """Whom a series is about, by all that names it."""
    return labels["vendor"], labels.get("pci_bus_id", ""), labels.get("uuid", ""), labels.get("gpu_partition", "")


class Judge:
    """One page's judge. ``ticks`` were in force while the page was asked for."""

    def __init__(self, page: Scrape, history: History, fleets: Fleets, ticks: range) -> None:
        self._page, self._fleets, self._ticks = page, fleets, ticks
        before = [entry for entry in history if entry[0] < ticks.start]
        within = [entry for entry in history if entry[0] in ticks]
        # Of a card that was there before this page, and cannot be asked, what was known of it last is shown.
        self._ever = [cards for _, cards in (*before, *within)]
        begun = before[-1:] if not within or within[0][0] > ticks.start else []
        self._now = [cards for _, cards in (*begun, *within)]
        self._here = {device.labels: device for cards in self._now for device, _ in devices_of(cards)}
        self._known = {device.labels: device for cards in self._ever for device, _ in devices_of(cards)}
        # The driver does not say who a card is that has slept ever since.
        sleeping = (card for cards in self._ever for card in cards if card.power != "active")
        self._known |= {(card.vendor, card.pci, "", ""): card for card in sleeping}
        self._states = {who(sample.labels): sample for sample in page.of("gpu_exporter_device_state") if sample.value}

    def complaints(self) -> list[str]:
        """All of them, one line each."""
        checks = (self._values(), self._readings(), self._rows(), self._numbers(), self._backends(), self._masks())
        return [f"ticks {self._ticks.start}..{self._ticks.stop - 1}: {line}" for check in checks for line in check]

    def _samples(self, *names: str) -> Iterator[tuple[str, Sample]]:
        for name in names:
            yield from ((name, sample) for sample in self._page.of(name))

    # --- values

    def _values(self) -> Iterator[str]:
        for name, samples in self._page.samples.items():
            for sample in samples:
                if not math.isfinite(sample.value) or sample.value < 0:
                    yield f"{name}{sample.labels} is {sample.value}"
                if FOREIGN & sample.labels.keys() or "" in sample.labels.values():
                    yield f"{name}{sample.labels} has a label that is not its own, or an empty one"

    def _readings(self) -> Iterator[str]:
        for name, sample in self._samples(*READINGS):
            device, state = self._here.get(who(sample.labels)), self._states.get(who(sample.labels))
            if device is None:
                yield f"{name}{sample.labels}: no such card"
                continue
            if state is None or state.labels["state"] != "ok":
                yield f"{name}{sample.labels}: of a card that is {state and state.labels['state']}"
            if name not in device.given:
                yield f"{name}{sample.labels}: nobody tells that of such a card"
            elif not self._is_of(device, name, sample.value):
                yield f"{name}{sample.labels} is {sample.value:.0f}: {self._whose(name, sample.value)}"

    def _is_of(self, device: Pretend, name: str, value: float) -> bool:
        if device.vendor == "intel" and name == UTILIZATION:  # rounded to whole microseconds, of a very short time
            return abs(value - device.value(name, 0)) <= 1.5
        return any(device.value(name, tick) == value for tick in self._ticks)

    def _whose(self, name: str, value: float) -> str:
        """Who had that value, and when last."""
        for tick in range(self._ticks.stop + 2, 0, -1):
            for device in self._known.values():
                if device.value(name, tick) == value:
                    return f"that was card {device.number} at tick {tick}"
        return "no card had that at any tick"

    # --- rows

    def _rows(self) -> Iterator[str]:
        for name, sample in self._samples("gpu_info", "gpu_exporter_device_state", "gpu_fleet_device_info"):
            if who(sample.labels) not in self._known:
                yield f"{name}{sample.labels}: no such card"
        infos = Counter(who(sample.labels) for sample in self._page.of("gpu_info"))
        rows = Counter(who(sample.labels) for sample in self._page.of("gpu_exporter_device_state"))
        if rows != {device: len(STATES) for device in infos} or any(count > 1 for count in infos.values()):
            yield f"gpu_info has {sorted(infos)}, the states {sorted(rows)}"
        for key, sample in self._states.items():
            if sample.labels["state"] == "ok" and key not in self._here:
                yield f"{sample.labels}: no such card now"
        if self._states.keys() != infos.keys():
            yield f"not one state each: {sorted(self._states)}"
        for sample in self._page.of("gpu_info"):
            device, name = self._known.get(who(sample.labels)), sample.labels.get("name", "")
            if device is not None and "Pretend" in name and name.rpartition(" ")[2] not in self._numbers_of(device):
                yield f"gpu_info{sample.labels}: that is another card's name"

    def _numbers_of(self, device: Pretend) -> set[str]:
        """Its own; a partition of AMD's is called as its card."""
        boards = {card.number for cards in self._ever for part, card in devices_of(cards) if part == device}
        return {str(number) for number in {device.number, *(boards if device.vendor == "amd" else ())}}

    def _numbers(self) -> Iterator[str]:
        """Both numbers of each row: the vendor's, and the fleet's."""
        indices = [indices_of(cards) for cards in self._now]
        for name, sample in self._samples("gpu_info", "gpu_fleet_device_info", *READINGS):
            labels, device = sample.labels, who(sample.labels)
            told = labels.get("physical_index")
            right = {str(each[device]) for each in indices if device in each}
            if told is not None and device in self._here and told not in right:
                yield f"{name}{labels}: its physical index is {sorted(right)}"
            if "fleet" in labels and not self._is_members(labels):
                yield f"{name}{labels}: the fleet's mask says another card"

    def _is_members(self, labels: Mapping[str, str]) -> bool:
        if labels["fleet"] == HOST:
            return labels["fleet_index"] == labels.get("physical_index")
        members = self._fleets.get(labels["fleet"], {}).get(labels["vendor"], ())
        index, device = int(labels["fleet_index"]), self._known.get(who(labels))
        return index < len(members) and device is not None and members[index].number == device.number

    # --- health

    def _backends(self) -> Iterator[str]:
        ups = {sample.labels["vendor"]: sample.value for sample in self._page.of("gpu_exporter_backend_up")}
        faults = Counter(sample.labels["vendor"] for sample in self._page.of("gpu_exporter_backend_fault_info"))
        for vendor, up in ups.items():
            if up not in (0, 1) or faults[vendor] != 1 - up:
                yield f"the {vendor} backend is {up}, with {faults[vendor]} reasons"
            if not self._page.of(FAULTS, vendor=vendor):
                yield f"{vendor} has no counts of faults"
        for name, sample in self._samples("gpu_info", "gpu_fleet_device_info", *READINGS):
            if ups.get(sample.labels["vendor"]) != 1:
                yield f"{name}{sample.labels}: its backend is not up"

    def _masks(self) -> Iterator[str]:
        """A refused fleet has one reason and no rows, any other none."""
        reasons = Counter(_mask(sample) for sample in self._page.of("gpu_fleet_mask_refusal_info"))
        for sample in self._page.of("gpu_fleet_mask_inverted"):
            if sample.value not in (0, 1) or reasons.pop(_mask(sample), 0) != 1 - sample.value:
                yield f"{_mask(sample)} is inverted: {sample.value}, and has another number of reasons"
            if sample.labels["fleet"] not in (HOST, *self._fleets):
                yield f"no such fleet: {sample.labels}"
            vendor = VENDOR_OF.get(sample.labels["runtime"])
            rows = [labels for _, labels in self._rows_of(sample.labels["fleet"]) if vendor in (None, labels["vendor"])]
            if not sample.value and rows:
                yield f"{_mask(sample)} is refused, and has {rows}"
        if reasons:
            yield f"refused without being a fleet: {sorted(reasons)}"

    def _rows_of(self, fleet: str) -> Iterator[tuple[str, Mapping[str, str]]]:
        for name in ("gpu_fleet_device_info", *READINGS):
            yield from ((name, sample.labels) for sample in self._page.of(name, fleet=fleet))


def _mask(sample: Sample) -> tuple[str, str]:
    return sample.labels["fleet"], sample.labels["runtime"]
