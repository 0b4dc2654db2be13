"""Readings put on the devices and the fleets that they belong to: samples and mappings -> Snapshot. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from exporter.catalog import ADDS_UP
from exporter.inventory import Inventory, tiles_key
from exporter.model import (
    BackendStatus,
    Binding,
    Device,
    DeviceKey,
    FleetMapping,
    Inversion,
    Readings,
    Resolved,
    Snapshot,
    VendorOutcome,
)


def attribute(
    outcomes: Iterable[VendorOutcome], mappings: tuple[FleetMapping, ...], backends: tuple[BackendStatus, ...]
) -> Snapshot:
    """One cycle's values put on the devices and the fleets that they belong to."""
    answered = [(outcome.sample, outcome.asked) for outcome in outcomes if outcome.sample is not None]
    samples = [sample for sample, _ in answered]
    inventory = Inventory(tuple(device for sample in samples for device in sample.devices))
    states = {entry.key: entry.state for sample in samples for entry in sample.states}
    readings: dict[DeviceKey, dict[str, dict[tuple[str, ...], float]]] = {}
    for sample in samples:
        for reading in sample.readings:
            if states.get(reading.key) == "ok":
                of_device = readings.setdefault(reading.key, {})
                of_device.setdefault(reading.metric, {})[reading.labels] = reading.value
    bindings = tuple(_bindings(mappings, inventory))
    bound = {binding.device.key: binding.device for binding in bindings}.values()
    narrowed = {each.key: _of_narrowed(each, inventory, readings) for each in bound if each.key not in inventory.by_key}
    return Snapshot(
        backends=backends,
        devices=inventory.devices,
        states=states,
        readings=readings | narrowed,
        driver_versions={sample.vendor: sample.driver_version for sample in samples},
        incomplete=tuple(sample.vendor for sample in samples if not sample.whole),
        pending=tuple(sample.vendor for sample in samples if sample.pending),
        mappings=mappings,
        bindings=bindings,
        asked=min((asked for _, asked in answered), default=0.0),
    )


def _of_narrowed(device: Device, inventory: Inventory, readings: Mapping[DeviceKey, Readings]) -> Readings:
    """What holds for a card of which a program sees some tiles: the card's readings if it sees all of them, else the
    sums of its tiles' where every one of them has the reading, and parts make up a sum of it.
    """
    card = inventory.by_key.get(device.parent) if device.parent else None
    if card is None:
        return {}
    if inventory.all_of(device) is not None:
        return readings.get(card.key, {})
    tiles = [int(tile) for tile in device.partition.split("+")]
    found = [readings.get(tiles_key(card, [tile]), {}) for tile in tiles]
    shared = [metric for metric in ADDS_UP if all(metric in each for each in found)]
    return {metric: {(): sum(each[metric][()] for each in found)} for metric in shared}


def _bindings(mappings: Iterable[FleetMapping], inventory: Inventory) -> Iterable[Binding]:
    for mapping in mappings:
        if isinstance(mapping.outcome, Inversion):
            yield from _bindings_of(mapping, mapping.outcome.devices, inventory)


def _bindings_of(mapping: FleetMapping, devices: Iterable[Resolved], inventory: Inventory) -> Iterable[Binding]:
    for resolved in devices:
        device = device_of(resolved, inventory)
        if device is not None:
            yield Binding(mapping.fleet, mapping.runtime, resolved.fleet_index, resolved.evidence, device)


def device_of(resolved: Resolved, inventory: Inventory) -> Device | None:
    """The device that an ordinal was bound to, as it is now; None where the host does not have it any more."""
    device = inventory.find(resolved.key)
    if device is not None and resolved.uuid and device.uuid and resolved.uuid != device.uuid:
        return None
    return device
