"""A card of which a program sees some tiles: whose readings it has, and what a fleet's settings say of its driver."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from exporter.attribution import attribute
from exporter.binding import Bound, Known, bind
from exporter.inventory import narrowed, tiles_key
from exporter.model import (
    EVIDENCE,
    Device,
    DeviceKey,
    DeviceState,
    Fleet,
    Reading,
    Refusal,
    Snapshot,
    VendorOutcome,
    VendorSample,
)

CARD = Device(
    key=DeviceKey("intel", "0000:3a:00.0"),
    physical_index=0,
    pci_bus_id="0000:3a:00.0",
    name="Intel Data Center GPU Max",
    tiles=4,
    hpc=True,
    integrated=False,
)
TILES = tuple(narrowed(CARD, [tile]) for tile in range(4))
BOARD = {"utilization": 55.0, "memory_free": 1000.0, "memory_total": 4000.0, "temperature": 60.0}


def seen(mask: str, values: Mapping[DeviceKey, Mapping[str, float]], **known: str | bool) -> Snapshot:
    """What a program on a host with this card has, under COMPOSITE and the mask."""
    env = {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE", "ZE_AFFINITY_MASK": mask}
    devices = (CARD, *TILES)
    sample = VendorSample(
        vendor="intel",
        driver_version="6.12.12",
        whole=True,
        devices=devices,
        states=tuple(DeviceState(device.key, "ok") for device in devices),
        readings=tuple(Reading(metric, key, value) for key, each in values.items() for metric, value in each.items()),
    )
    outcome = VendorOutcome(vendor="intel", sample=sample, duration_seconds=0.1)
    fleet = Fleet(name="chat", runtimes=("level_zero",), env=env, known=known)
    mappings, _, _ = bind([fleet], [outcome], Bound(), Known(EVIDENCE))
    return attribute([outcome], mappings, ())


def readings(snapshot: Snapshot) -> dict[str, Mapping[str, float]]:
    of = {each.device.partition: snapshot.readings.get(each.device.key, {}) for each in snapshot.bindings}
    return {part: {metric: value[()] for metric, value in given.items()} for part, given in of.items()}


def tile_values(free: float, **more: float) -> dict[str, float]:
    return {"utilization": 10.0, "memory_free": free, "memory_total": 1000.0} | more


def test_some_tiles_have_the_sums_of_what_adds_up() -> None:
    """Memory adds up; a share of the time and a temperature do not, and are left out."""
    values = {tiles_key(CARD, [tile]): tile_values(100.0 * tile) for tile in range(4)} | {CARD.key: BOARD}
    assert readings(seen("0.0,0.3", values)) == {"0+3": {"memory_free": 300.0, "memory_total": 2000.0}}
    assert readings(seen("0.2", values)) == {"2": tile_values(200.0)}


def test_a_sum_needs_every_tile() -> None:
    """A tile without the reading leaves the sum unknown; the others of the card do not matter."""
    values = {tiles_key(CARD, [0]): tile_values(100.0), tiles_key(CARD, [3]): {"memory_total": 1000.0}}
    assert readings(seen("0.0,0.3", values)) == {"0+3": {"memory_total": 2000.0}}
    assert readings(seen("0.1,0.2", values)) == {"1+2": {}}


def test_all_tiles_are_the_card() -> None:
    """A program that names every tile has the whole card, and its readings (field case F50)."""
    snapshot = seen("0.0,0.1,0.2,0.3", {CARD.key: BOARD})
    (value,) = readings(snapshot).values()
    assert value == BOARD
    assert {each.device.pci_bus_id for each in snapshot.bindings} == {CARD.pci_bus_id}


@pytest.mark.parametrize(("known", "refused"), [({}, True), ({"driver": "current"}, False)])
def test_what_the_settings_state_of_a_workload_counts(known: Mapping[str, str], refused: bool) -> None:
    """Two cards whose order depends on the driver are refused, unless a fleet's settings say which it is."""
    cards = tuple(
        Device(
            key=DeviceKey("intel", address),
            physical_index=index,
            pci_bus_id=address,
            name="Intel Arc A770",
            tiles=1,
            hpc=False,
            integrated=False,
        )
        for index, address in enumerate(("0000:03:00.0", "0000:07:00.0"))
    )
    sample = VendorSample(
        vendor="intel", driver_version="", whole=True, devices=cards, states=(), readings=(), faults=()
    )
    fleet = Fleet(name="chat", runtimes=("level_zero",), env={"ZE_AFFINITY_MASK": "1"}, known=known)
    outcome = VendorOutcome(vendor="intel", sample=sample, duration_seconds=0.1)
    (mapping,), _, _ = bind([fleet], [outcome], Bound(), Known(EVIDENCE))
    assert isinstance(mapping.outcome, Refusal) is refused
    if not isinstance(mapping.outcome, Refusal):
        assert [device.key.identity for device in mapping.outcome.devices] == ["0000:07:00.0"]
