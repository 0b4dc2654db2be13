"""Readings put on the devices and the fleets that they belong to: samples and mappings -> Snapshot. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from exporter.inventory import Inventory
from exporter.model import (
    BackendStatus,
    Binding,
    DeviceKey,
    FleetMapping,
    Inversion,
    Resolved,
    Snapshot,
    VendorOutcome,
)


def attribute(
    outcomes: Iterable[VendorOutcome], mappings: tuple[FleetMapping, ...], backends: tuple[BackendStatus, ...]
) -> Snapshot:
    """One cycle's values put on the devices and the fleets that they belong to."""
    samples = [outcome.sample for outcome in outcomes if outcome.sample is not None]
    inventory = Inventory(tuple(device for sample in samples for device in sample.devices))
    states = {entry.key: entry.state for sample in samples for entry in sample.states}
    readings: dict[DeviceKey, dict[str, float]] = {}
    for sample in samples:
        for reading in sample.readings:
            if states.get(reading.key) == "ok":
                readings.setdefault(reading.key, {})[reading.metric] = reading.value
    return Snapshot(
        backends=backends,
        devices=inventory.devices,
        states=states,
        readings=readings,
        driver_versions={sample.vendor: sample.driver_version for sample in samples},
        incomplete=tuple(sample.vendor for sample in samples if not sample.whole),
        mappings=mappings,
        bindings=tuple(_bindings(mappings, inventory)),
    )


def _bindings(mappings: Iterable[FleetMapping], inventory: Inventory) -> Iterable[Binding]:
    for mapping in mappings:
        if isinstance(mapping.outcome, Inversion):
            yield from _bindings_of(mapping, mapping.outcome.devices, inventory)


def _bindings_of(mapping: FleetMapping, devices: Iterable[Resolved], inventory: Inventory) -> Iterable[Binding]:
    for resolved in devices:
        device = inventory.find(resolved.key)
        if device is not None:
            yield Binding(mapping.fleet, mapping.runtime, resolved.fleet_index, resolved.evidence, device)
