"""Fleets and inventories -> mappings. Pure: what was bound before comes in, what is bound now goes out.

An index space holds still: a fleet is bound once, against the first inventory that is known to be whole, and keeps its
identities whatever cards come, go, sleep or get lost afterwards. Only the runtime ``host`` follows the inventory.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from exporter.inventory import Inventory
from exporter.masks import RUNTIMES, invert
from exporter.model import (
    Context,
    DeviceKey,
    Evidence,
    Fleet,
    FleetMapping,
    Inversion,
    Refusal,
    VendorOutcome,
    VendorSample,
)

Outcome = Inversion | Refusal
BindingKey = tuple[str, str, str]
"""Fleet name, runtime, vendor (or several, joined by ``+``)."""


class Kept(NamedTuple):
    """What a fleet is bound to, and the devices that there were then."""

    outcome: Outcome
    uuids: Mapping[DeviceKey, str]


Bound = Mapping[BindingKey, Kept]


def bind(
    fleets: Iterable[Fleet], outcomes: Sequence[VendorOutcome], bound: Bound, accept: Collection[Evidence]
) -> tuple[tuple[FleetMapping, ...], Bound]:
    """One mapping for each fleet and runtime, and what is bound from now on."""
    kept = dict(bound)
    by_vendor = {outcome.vendor: outcome for outcome in outcomes}
    everyone = Inventory(tuple(device for outcome in outcomes if outcome.sample for device in outcome.sample.devices))
    mappings = []
    for fleet in fleets:
        if fleet.vendors is not None and not by_vendor.keys() & set(fleet.vendors):
            continue  # made for vendors of which this host has none
        for runtime in _runtimes(fleet, by_vendor):
            groups = _groups(fleet, runtime, by_vendor)
            found = [_outcome(fleet, runtime, group, everyone, kept) for group in groups]
            mappings.append(FleetMapping(fleet.name, runtime, _accepted(_united(found), accept)))
    return tuple(mappings), kept


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


def _outcome(
    fleet: Fleet,
    runtime: str,
    group: Sequence[VendorOutcome],
    everyone: Inventory,
    kept: dict[BindingKey, Kept],
) -> Outcome:
    """What is bound already, else a new inversion; while a backend is down its mask counts as refused.

    A refusal is tried again while the devices are those of then: what was not known of them may be by now. Later it
    stands, since an answer would be one over other devices.
    """
    samples = [outcome.sample for outcome in group if outcome.sample is not None]
    if len(samples) < len(group):
        down = next(outcome for outcome in group if outcome.sample is None)
        reason = down.fault.reason if down.fault else "no answer"
        return Refusal("backend-down", f"the {down.vendor} backend is down: {reason}")
    place = (fleet.name, runtime, "+".join(sorted(outcome.vendor for outcome in group)))
    uuids, before = {device.key: device.uuid for sample in samples for device in sample.devices}, kept.get(place)
    if before is not None and (isinstance(before.outcome, Inversion) or not _are_those(uuids, before.uuids)):
        return before.outcome
    outcome = _with_uuids(invert_fleet(fleet, runtime, samples, everyone), everyone)
    if not RUNTIMES[runtime].moving and _settled(outcome, samples):
        kept[place] = Kept(outcome, uuids)
    return outcome


def _are_those(now: Mapping[DeviceKey, str], then: Mapping[DeviceKey, str]) -> bool:
    """The devices are the same, though the UUID of one may have become known."""
    return now.keys() == then.keys() and all(not then[key] or then[key] == uuid for key, uuid in now.items())


def _with_uuids(outcome: Outcome, everyone: Inventory) -> Outcome:
    """The devices with the UUIDs that they have now."""
    if isinstance(outcome, Refusal):
        return outcome
    found = [(resolved, everyone.find(resolved.key)) for resolved in outcome.devices]
    devices = (msgspec.structs.replace(each, uuid=device.uuid) if device else each for each, device in found)
    return Inversion(tuple(devices), outcome.layers)


def _settled(outcome: Outcome, samples: Sequence[VendorSample]) -> bool:
    """Whether the answer holds from now on: it names no mere placeholder of a sleeping card, which has no index yet;
    and a refusal, not while any card is one, or is missing.
    """
    unknown = {device.key for sample in samples for device in sample.devices if device.physical_index is None}
    if isinstance(outcome, Inversion):
        return not any(resolved.key in unknown for resolved in outcome.devices)
    return all(sample.whole for sample in samples) and not unknown


def invert_fleet(fleet: Fleet, runtime: str, samples: Sequence[VendorSample], everyone: Inventory) -> Outcome:
    """The fleet's masks undone over the devices of one vendor's sample, or of several in a joint runtime.

    A reach may name other vendors' cards too: ``everyone`` has all that are known.
    """
    devices = tuple(device for sample in samples for device in sample.devices)
    inventory = Inventory(devices, all(sample.whole for sample in samples))
    reach = _reach(fleet, inventory, everyone)
    if isinstance(reach, Refusal):
        return reach
    versions = {sample.vendor: sample.driver_version for sample in samples}
    context = msgspec.structs.replace(context_of(reach, versions), **fleet.known)
    return invert(runtime, fleet.env, inventory, context)


def context_of(reach: frozenset[DeviceKey], driver_versions: Mapping[str, str]) -> Context:
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


def _reach(fleet: Fleet, inventory: Inventory, everyone: Inventory) -> frozenset[DeviceKey] | Refusal:
    if fleet.reach is None:
        return frozenset(device.key for device in inventory.devices)
    found = {text: inventory.named(text) for text in fleet.reach}
    missing = [text for text, devices in found.items() if not devices and not everyone.named(text)]
    if missing:
        return Refusal("reach-unknown", f"reach names {', '.join(missing)}, which this host does not have")
    return frozenset(device.key for devices in found.values() for device in devices)


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
    return Inversion(devices, tuple(layer for outcome in inverted for layer in outcome.layers))


def _accepted(outcome: Outcome, accept: Collection[Evidence]) -> Outcome:
    if isinstance(outcome, Refusal):
        return outcome
    refused = sorted({device.evidence for device in outcome.devices if device.evidence not in accept})
    if not refused:
        return outcome
    detail = f"the answer is {', '.join(refused)}, and mapping.accept lists {', '.join(accept)}"
    return Refusal("evidence-not-accepted", detail, outcome.layers)
