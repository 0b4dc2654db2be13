"""Fleets and inventories -> mappings. Pure: what was bound before comes in, what is bound now goes out.

An index space holds still: a fleet is bound once, against the inventory as of its start, and keeps its identities
whatever cards come, go, sleep or get lost afterwards. A fleet of the settings starts with the first inventory that is
known to be whole; one of live processes did when the oldest of them was started. Only the runtime ``host`` follows the
inventory.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from exporter.corroboration import corroborated
from exporter.epochs import Epochs, as_of, seen_at
from exporter.inventory import Inventory
from exporter.masks import RUNTIMES, invert
from exporter.model import (
    Context,
    DeviceKey,
    Evidence,
    Fleet,
    FleetMapping,
    Inversion,
    Layer,
    Refusal,
    VendorOutcome,
    VendorSample,
)
from exporter.probing import Answers, Question, answer_of, questions, unanswered
from exporter.reach import Reach, reaches

Outcome = Inversion | Refusal
BindingKey = tuple[str, str, str, str]
"""Fleet name, incarnation, runtime, vendor (or several, joined by ``+``)."""


class Kept(NamedTuple):
    """What a fleet is bound to, and the devices that there were then. ``final``: nothing can change it any more."""

    outcome: Outcome
    uuids: Mapping[DeviceKey, str]
    final: bool = False


class Bound(NamedTuple):
    """What is bound, and which devices there were when."""

    kept: Mapping[BindingKey, Kept] = MappingProxyType({})
    epochs: Epochs = MappingProxyType({})


class Known(NamedTuple):
    """What the fleets are bound with, beside the cycle itself: which evidence counts, the time (CLOCK_BOOTTIME), and
    what drivers have answered; None where they are not to be asked.
    """

    accept: Collection[Evidence]
    now: float = 0.0
    answers: Answers | None = None


class Mappings(NamedTuple):
    """One mapping for each fleet and runtime, what is bound from now on, and what drivers are to be asked."""

    mappings: tuple[FleetMapping, ...]
    bound: Bound
    questions: frozenset[Question]


def bind(fleets: Sequence[Fleet], outcomes: Sequence[VendorOutcome], bound: Bound, known: Known) -> Mappings:
    """Every fleet's masks undone over this cycle's devices."""
    binder = _Binder(fleets, outcomes, bound, known)
    mappings = tuple(mapping for fleet in fleets for mapping in binder.mappings(fleet))
    return Mappings(mappings, Bound(binder.kept, binder.epochs), frozenset(binder.questions))


class _Binder:
    """One cycle's work; what is bound and what is to be asked gathers in it."""

    def __init__(self, fleets: Sequence[Fleet], outcomes: Sequence[VendorOutcome], bound: Bound, known: Known) -> None:
        alive = {(fleet.name, _incarnation(fleet)) for fleet in fleets}
        self.kept = {place: kept for place, kept in bound.kept.items() if place[:2] in alive}
        self.epochs = seen_at(known.now, outcomes, bound.epochs)
        self.questions: set[Question] = set()
        self._known = known
        self._by_vendor = {outcome.vendor: outcome for outcome in outcomes}
        samples = [outcome.sample for outcome in outcomes if outcome.sample is not None]
        self._everyone = Inventory(tuple(device for sample in samples for device in sample.devices))
        self._sleeping = any(entry.state == "asleep" for sample in samples for entry in sample.states)

    def mappings(self, fleet: Fleet) -> Iterable[FleetMapping]:
        """The fleet under each of its runtimes."""
        if fleet.vendors is not None and not self._by_vendor.keys() & set(fleet.vendors):
            return  # made for vendors of which this host has none
        for runtime in _runtimes(fleet, self._by_vendor):
            found = [self._outcome(fleet, runtime, group) for group in _groups(fleet, runtime, self._by_vendor)]
            yield FleetMapping(fleet.name, runtime, _accepted(_united(found), self._known.accept))

    def _outcome(self, fleet: Fleet, runtime: str, group: Sequence[VendorOutcome]) -> Outcome:
        """What is bound already, else a new inversion; while a backend is down its mask counts as refused."""
        down = next((outcome for outcome in group if outcome.sample is None), None)
        if fleet.live is not None and fleet.live.refusal is not None:
            return fleet.live.refusal
        if down is not None:
            reason = down.fault.reason if down.fault else "no answer"
            return Refusal("backend-down", f"the {down.vendor} backend is down: {reason}")
        now = [outcome.sample for outcome in group if outcome.sample is not None]
        place = (fleet.name, _incarnation(fleet), runtime, "+".join(sorted(outcome.vendor for outcome in group)))
        kept = self._bound(fleet, runtime, now, self.kept.get(place))
        outcome = corroborated(fleet, runtime, kept.outcome, now)
        if outcome is not kept.outcome:
            kept = Kept(outcome, kept.uuids, final=True)
        if not RUNTIMES[runtime].moving and (kept.final or _settled(outcome, now)):
            self.kept[place] = kept
        return outcome

    def _bound(self, fleet: Fleet, runtime: str, now: Sequence[VendorSample], before: Kept | None) -> Kept:
        """What was bound, or a new inversion.

        A refusal is tried again while the devices are those of then: what was not known of them may be by now. Later it
        stands, since an answer would be one over other devices. So is an answer that is only assumed; and one that
        follows from the masks is held against the driver's once that is known.
        """
        live = fleet.live
        samples = now if live is None else [as_of(live.spans, sample, self.epochs) for sample in now]
        uuids = {device.key: device.uuid for sample in samples for device in sample.devices}
        same = before is not None and _are_those(uuids, before.uuids)
        if live is not None and before is not None and uuids.keys() != before.uuids.keys():
            before = None  # a program has joined the fleet that numbers other devices
        if before is not None and (before.final or not same):
            return before
        if before is not None and _is_certain(before.outcome) and not self._known.answers:
            return before
        outcome, answered = self._fresh(fleet, runtime, samples)
        if before is not None and _is_certain(before.outcome) and not answered:
            return before
        return Kept(_with_uuids(outcome, self._everyone), uuids, answered)

    def _fresh(self, fleet: Fleet, runtime: str, samples: Sequence[VendorSample]) -> tuple[Outcome, bool]:
        """The masks undone by what is known of them, and whether the driver's answer is in it, which is asked for where
        that does not prove one.
        """
        inventory = _inventory(samples)
        found = reaches(fleet, inventory, self._everyone)
        if isinstance(found, Refusal):
            return found, False
        outcome = _agreed(fleet, runtime, samples, found)
        if self._known.answers is None or len(found) > 1 or not _has_our_libraries(fleet):
            return outcome, False
        drivers = tuple(f"{sample.vendor} {sample.driver_version}" for sample in samples)
        asked = questions(runtime, fleet.env, inventory, found[0], drivers)
        context = _context(fleet, samples, found[0])
        answer = answer_of(asked, self._known.answers, fleet.env, inventory, context)
        if answer is not None:
            return _combined(outcome, answer), True
        if not _is_certain(outcome) and not self._sleeping:
            self.questions.update(unanswered(asked, self._known.answers, inventory))
        return outcome, False


def _runtimes(fleet: Fleet, present: Collection[str]) -> Sequence[str]:
    """The fleet's runtimes whose vendor is on this host; all of them when none is, so that the absence has a row."""
    served = [runtime for runtime in fleet.runtimes if _vendors(fleet, runtime, present)]
    return served or fleet.runtimes


def _vendors(fleet: Fleet, runtime: str, present: Collection[str]) -> list[str]:
    numbered = RUNTIMES[runtime].vendors
    return [
        vendor
        for vendor in present
        if (not numbered or vendor in numbered) and (fleet.vendors is None or vendor in fleet.vendors)
    ]


def _groups(fleet: Fleet, runtime: str, by_vendor: Mapping[str, VendorOutcome]) -> Sequence[tuple[VendorOutcome, ...]]:
    """What is inverted together: one vendor's outcome, or all of them in a joint runtime."""
    found = tuple(by_vendor[vendor] for vendor in _vendors(fleet, runtime, by_vendor))
    return [found] if found and RUNTIMES[runtime].joint else [(outcome,) for outcome in found]


def _are_those(now: Mapping[DeviceKey, str], then: Mapping[DeviceKey, str]) -> bool:
    """The devices are the same, though the UUID of one may have become known."""
    return now.keys() == then.keys() and all(not then[key] or then[key] == uuid for key, uuid in now.items())


def _with_uuids(outcome: Outcome, everyone: Inventory) -> Outcome:
    """The devices with the UUIDs that they have now."""
    if isinstance(outcome, Refusal):
        return outcome
    found = [(resolved, everyone.find(resolved.key)) for resolved in outcome.devices]
    devices = (msgspec.structs.replace(each, uuid=device.uuid) if device else each for each, device in found)
    return Inversion(tuple(devices), outcome.layers, outcome.told)


def _settled(outcome: Outcome, samples: Sequence[VendorSample]) -> bool:
    """Whether the answer holds from now on: it names no mere placeholder of a sleeping card, which has no index yet;
    and a refusal, not while any card is one, or is missing.
    """
    unknown = {device.key for sample in samples for device in sample.devices if device.physical_index is None}
    if isinstance(outcome, Inversion):
        return not any(resolved.key in unknown for resolved in outcome.devices)
    return all(sample.whole for sample in samples) and not unknown


def _has_our_libraries(fleet: Fleet) -> bool:
    """A process with a /dev of its own, as in a container, may well have driver libraries of its own too."""
    return fleet.live is None or (fleet.live.opens is not None and fleet.live.opens.here)


def _incarnation(fleet: Fleet) -> str:
    return "" if fleet.live is None else fleet.live.incarnation


def _inventory(samples: Sequence[VendorSample]) -> Inventory:
    devices = tuple(device for sample in samples for device in sample.devices)
    return Inventory(devices, all(sample.whole for sample in samples))


def _context(fleet: Fleet, samples: Sequence[VendorSample], reach: Reach | None) -> Context:
    versions = {sample.vendor: sample.driver_version for sample in samples}
    return msgspec.structs.replace(context_of(reach, versions), **fleet.known)


def _agreed(fleet: Fleet, runtime: str, samples: Sequence[VendorSample], found: Sequence[Reach | None]) -> Outcome:
    """The masks undone over each reach that may be: an answer is one only where all agree."""
    inventory = _inventory(samples)
    outcomes = [invert(runtime, fleet.env, inventory, _context(fleet, samples, reach)) for reach in found]
    keys = [[each.key for each in outcome.devices] if isinstance(outcome, Inversion) else None for outcome in outcomes]
    if all(key == keys[0] for key in keys):
        return outcomes[0]
    refused = next((outcome for outcome in outcomes if isinstance(outcome, Refusal)), None)
    detail = "whether a device filter holds the process to the cards that Slurm gave it cannot be seen"
    return refused or Refusal("reach-unknown", detail, outcomes[0].layers)


def _is_certain(outcome: Outcome) -> bool:
    return isinstance(outcome, Inversion) and all(device.evidence != "assumed" for device in outcome.devices)


def _combined(outcome: Outcome, answer: Inversion) -> Outcome:
    """What the masks say, and what the driver does: where one proves its answer and the other has another, neither."""
    if not _is_certain(outcome) or isinstance(outcome, Refusal):
        return Inversion(answer.devices, answer.layers or _layers_of(outcome), answer.told)
    ours, theirs = ([each.key for each in found.devices] for found in (outcome, answer))
    if ours == theirs:
        return Inversion(outcome.devices, outcome.layers, answer.told)
    names = [", ".join(key.identity for key in keys) or "no device" for keys in (ours, theirs)]
    return Refusal("contradicted", f"the masks say {names[0]}; the driver says {names[1]}", outcome.layers)


def _layers_of(outcome: Outcome) -> tuple[Layer, ...]:
    """What each mask did, where that is known in spite of all."""
    return tuple(layer for layer in outcome.layers if layer.left is not None)


def context_of(reach: Reach | None, driver_versions: Mapping[str, str]) -> Context:
    """What is known of a workload beside its environment: a fleet of runtime rocm is a HIP program, one of runtime sycl
    counts Level Zero's devices, and its indices are what the runtime enumerates. The rest is not known.
    """
    return Context(
        reach=reach,
        driver_branch=driver_branch(driver_versions.get("nvidia", driver_versions.get("simulated", ""))),
        os="linux",
        api="hip",
        backend="level_zero",
        space="enumeration",
    )


def driver_branch(version: str) -> int | None:
    """The branch of an NVIDIA driver: 550 for ``550.54.15``; None when the text does not begin so."""
    match = re.match(r"([0-9]{2,5})\.", version)
    return int(match[1]) if match else None


def _united(found: Sequence[Outcome]) -> Outcome:
    """Several vendors' outcomes as one: what is inverted counts, and only if nothing is, the first refusal."""
    inverted = [outcome for outcome in found if isinstance(outcome, Inversion)]
    refused = [outcome for outcome in found if isinstance(outcome, Refusal)]
    if not inverted:
        return refused[0] if refused else Refusal("backend-down", "no backend for this runtime is present on this host")
    devices = tuple(device for outcome in inverted for device in outcome.devices)
    layers = tuple(layer for outcome in inverted for layer in outcome.layers)
    return Inversion(devices, layers, tuple(line for outcome in inverted for line in outcome.told))


def _accepted(outcome: Outcome, accept: Collection[Evidence]) -> Outcome:
    if isinstance(outcome, Refusal):
        return outcome
    refused = sorted({device.evidence for device in outcome.devices if device.evidence not in accept})
    if not refused:
        return outcome
    detail = f"the answer is {', '.join(refused)}, and mapping.accept lists {', '.join(accept)}"
    return Refusal("evidence-not-accepted", detail, outcome.layers)
