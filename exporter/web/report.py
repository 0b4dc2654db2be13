"""A snapshot as facts for tools and for the page: what ``/api/v1/fleets`` answers, in the words of its schema.

What is not known is not there: no field is ever null. A text that is no UTF-8, as masks of live processes may be, has a
backslash and ``udcff`` where the byte 0xff was.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec

from exporter import __version__
from exporter.attribution import device_of
from exporter.catalog import READINGS, USAGE
from exporter.collectors import ReloadStatus
from exporter.inventory import Inventory
from exporter.lines import Labels
from exporter.model import (
    BackendStatus,
    Device,
    DeviceKey,
    Evidence,
    Fleet,
    FleetMapping,
    Layer,
    Refusal,
    Resolved,
    Snapshot,
    State,
)
from exporter.refusals import REFUSALS
from exporter.reports import seen_of


def _told(text: str) -> Any:
    return msgspec.Meta(description=text)


Shown = Annotated[
    State | Literal["gone"],
    _told(
        "The one state that holds in this cycle: ok; lost (the driver says that the card is no longer there); hung (it "
        "did not answer in time); asleep (powered down by the system, and not woken to be read); gone (the fleet has "
        "this index, and the device is not among those that are read on this host now)."
    ),
]
Readings = Annotated[
    Mapping[str, float],
    _told(
        "Values of this cycle in base units, by the name of their metric family, with the family's own labels behind "
        'it where it has any, as in gpu_clock_hertz{clock="memory"}. A reading that was not given has no key, and only '
        "a device that is ok has any. "
        f"Families: {', '.join(family.name for family in READINGS.values())}."
    ),
]


class Card(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who a device is: a whole card or a part of one, with the labels of the metrics."""

    vendor: Annotated[str, _told("Whose device it is, as in the label vendor.")]
    physical_index: Annotated[
        int | msgspec.UnsetType,
        _told("The number by which the vendor's tool calls the card now; a part has its card's."),
    ] = msgspec.UNSET
    pci_bus_id: Annotated[str, _told("PCI address, lower case, with its domain.")] = ""
    uuid: Annotated[str, _told("What the vendor's masks call the device.")] = ""
    gpu_partition: Annotated[
        str,
        _told(
            "For a part of a card: MIG's GPU instance and compute instance (1/0), AMD's partition (3), Intel's tiles "
            "(0+3)."
        ),
    ] = ""
    name: Annotated[str, _told("The model, as the vendor's library calls it.")] = ""


class Numbered(msgspec.Struct, frozen=True, kw_only=True):
    """A number by which a workload calls a device."""

    fleet: Annotated[str, _told("The fleet's name.")]
    runtime: Annotated[str, _told("Whose numbering it is.")]
    fleet_index: Annotated[int, _told("The workload's number.")]


class BoundCard(Card, frozen=True, kw_only=True, omit_defaults=True):
    """The device behind one index of a fleet."""

    fleet_index: Annotated[int, _told("The workload's number: N of its cuda:N.")]
    evidence: Annotated[
        Evidence,
        _told(
            "proven: follows from the masks and the inventory alone. probed: what the driver itself answered, in a "
            "process with the workload's masks. assumed: documentation leaves it open, and every report agrees."
        ),
    ]
    state: Annotated[
        Shown | msgspec.UnsetType, _told("Left out for a card of which the workload has some of its tiles.")
    ] = msgspec.UNSET
    identity: Annotated[str, _told("Where the state is gone: what the index was bound to, an address or a UUID.")] = ""
    readings: Readings = msgspec.field(default_factory=dict)
    usage: Annotated[
        Mapping[str, float],
        _told(
            "What the own processes of a fleet of live processes hold and do on the device, by the name of the metric "
            "family; what is not known of all of them has no key. "
            f"Families: {', '.join(family.name for family in USAGE.values())}."
        ),
    ] = msgspec.field(default_factory=dict)


class MaskLayer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one variable did."""

    variable: Annotated[str, _told("The variable's name.")]
    text: Annotated[str | msgspec.UnsetType, _told("What it is set to; left out where it is not set.")] = msgspec.UNSET
    left: Annotated[
        int | msgspec.UnsetType, _told("How many devices it left; left out where the masks are refused here.")
    ] = msgspec.UNSET
    stopped: Annotated[str, _told("Why reading it stopped before its end.")] = ""


class RefusedMask(msgspec.Struct, frozen=True, kw_only=True):
    """Why the masks are not inverted, and what to do about it."""

    code: Annotated[str, _told("The reason, as in the label reason of gpu_fleet_mask_refusal_info.")]
    meaning: Annotated[str, _told("Completes: refused because ...")]
    detail: Annotated[str, _told("What was found here.")]
    check: Annotated[str, _told("What to look at on the host; commands stand between backticks.")]
    advice: Annotated[str, _told("What to do.")]


class RuntimeReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A fleet as one runtime numbers it: inverted, with its devices, or refused, with the reason and without any."""

    runtime: Annotated[str, _told("Whose numbering it is: cuda, rocm, level_zero, sycl, vulkan or host.")]
    inverted: Annotated[bool, _told("Whether the masks were inverted; masks that hide everything invert to no device.")]
    devices: Annotated[tuple[BoundCard, ...], _told("By fleet_index.")]
    masks: Annotated[tuple[MaskLayer, ...], _told("The variables that decide, in the order in which they do.")]
    rests_on: Annotated[tuple[str, ...], _told("Sentences on what else than masks the answer rests on.")]
    refusal: Annotated[RefusedMask | msgspec.UnsetType, _told("Present where the masks are refused.")] = msgspec.UNSET


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """A workload with its masks."""

    name: Annotated[str, _told("As in the label fleet.")]
    seen: Annotated[tuple[str, ...], _told("Sentences on where what is known of it comes from.")]
    runtimes: Annotated[tuple[RuntimeReport, ...], _told("One for each runtime that it may use here.")]


class HostCard(Card, frozen=True, kw_only=True, omit_defaults=True):
    """A device of the host, in a fleet or in none."""

    state: Annotated[State | msgspec.UnsetType, _told("The one state that holds for it in this cycle.")] = msgspec.UNSET
    readings: Readings = msgspec.field(default_factory=dict)
    used_by: Annotated[tuple[Numbered, ...], _told("Every number that a fleet has for it.")]


class BackendFault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What keeps a backend from answering."""

    reason: Annotated[str, _told("One of the reasons of gpu_exporter_backend_fault_info.")]
    detail: Annotated[str, _told("What was found here.")] = ""


class BackendHint(msgspec.Struct, frozen=True, kw_only=True):
    """What would bring readings that a vendor's devices lack here."""

    code: Annotated[str, _told("As in the label hint of gpu_exporter_hint_info.")]
    text: Annotated[str, _told("A sentence.")]


class BackendReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What reads one vendor's devices."""

    vendor: Annotated[str, _told("As in the label vendor.")]
    up: Annotated[bool, _told("Whether it answered in this cycle.")]
    whole: Annotated[
        bool,
        _told("Whether every card that the vendor's library counts could be identified; false of one that is down."),
    ]
    faults_total: Annotated[
        Mapping[str, int], _told("Faults so far by reason; reasons that never occurred are left out.")
    ]
    fault: Annotated[BackendFault | msgspec.UnsetType, _told("The fault that holds.")] = msgspec.UNSET
    driver_version: Annotated[str, _told("The driver's version, as it spells it.")] = ""
    cards_found: Annotated[int, _told("Whole cards that answered in this cycle, or sleep.")] = 0
    cards_expected: Annotated[
        int | msgspec.UnsetType, _told("How many of them the settings expect; left out where they expect none.")
    ] = msgspec.UNSET
    hints: Annotated[tuple[BackendHint, ...], _told("What would bring readings that are missing.")] = ()


class SettingsReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The settings in force."""

    last_reload_successful: Annotated[bool, _told("False: the last attempt failed, and the earlier settings hold.")]
    loaded_timestamp_seconds: Annotated[
        float | msgspec.UnsetType, _told("Unix time at which the settings in force were loaded.")
    ] = msgspec.UNSET


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One cycle of gpu-fleet-exporter, the same that /metrics shows."""

    version: Annotated[str, _told("The exporter's version.")]
    asked_timestamp_seconds: Annotated[
        float | msgspec.UnsetType,
        _told("Unix time at which the devices were asked for what is here; left out where no backend answers."),
    ] = msgspec.UNSET
    settings: SettingsReport
    fleets: Annotated[tuple[FleetReport, ...], _told("In the order of the settings, live ones as they were found.")]
    fleets_left_out: Annotated[int, _told("Fleets of live processes that were found and are not shown.")]
    devices: Annotated[tuple[HostCard, ...], _told("Every device of the host.")]
    backends: Annotated[tuple[BackendReport, ...], _told("Those that this host has, or the settings name.")]


def report(snapshot: Snapshot, reload: ReloadStatus) -> Report:
    """The facts of a snapshot."""
    timestamp = reload.success_timestamp_seconds
    return Report(
        version=__version__,
        asked_timestamp_seconds=_unix_time(snapshot.asked) if snapshot.asked else msgspec.UNSET,
        settings=SettingsReport(
            last_reload_successful=reload.successful, loaded_timestamp_seconds=timestamp or msgspec.UNSET
        ),
        fleets=tuple(_fleets(snapshot)),
        fleets_left_out=snapshot.left_out,
        devices=tuple(_devices(snapshot)),
        backends=tuple(_backend(status, snapshot) for status in snapshot.backends),
    )


def _unix_time(asked: float) -> float:
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - asked)


def as_json(facts: Report) -> bytes:
    """The answer of ``/api/v1/fleets``."""
    return msgspec.json.encode(facts)


def schema() -> dict[str, Any]:
    """The JSON Schema of :func:`as_json`."""
    heading = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "GET /api/v1/fleets"}
    return heading | msgspec.json.schema(Report)


def _text(text: str) -> str:
    """What UTF-8 can say of a text."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _texts(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(_text, texts))


def _identity(device: Device) -> dict[str, Any]:
    return {
        "vendor": _text(device.key.vendor),
        "physical_index": msgspec.UNSET if device.physical_index is None else device.physical_index,
        "pci_bus_id": _text(device.pci_bus_id),
        "uuid": _text(device.uuid),
        "gpu_partition": _text(device.partition),
        "name": _text(device.name),
    }


def _readings(snapshot: Snapshot, key: DeviceKey) -> dict[str, float]:
    given = snapshot.readings.get(key, {})
    return {
        f"{family.name}{Labels(dict(zip(family.own, own, strict=True))).text}": float(value)
        for metric, family in READINGS.items()
        if metric in given
        for own, value in given[metric].items()
    }


def _fleets(snapshot: Snapshot) -> Iterator[FleetReport]:
    inventory = Inventory(snapshot.devices)
    known = {fleet.name: fleet for fleet in snapshot.fleets}
    mappings: dict[str, list[FleetMapping]] = {}
    for mapping in snapshot.mappings:
        mappings.setdefault(mapping.fleet, []).append(mapping)
    for name, of_fleet in mappings.items():
        yield FleetReport(
            name=_text(name),
            seen=_seen(known.get(name)),
            runtimes=tuple(_runtime(mapping, snapshot, inventory) for mapping in of_fleet),
        )


def _seen(fleet: Fleet | None) -> tuple[str, ...]:
    return () if fleet is None else _texts(seen_of(fleet))


def _runtime(mapping: FleetMapping, snapshot: Snapshot, inventory: Inventory) -> RuntimeReport:
    outcome = mapping.outcome
    masks = tuple(map(_layer, outcome.layers))
    if isinstance(outcome, Refusal):
        return RuntimeReport(
            runtime=mapping.runtime, inverted=False, devices=(), masks=masks, rests_on=(), refusal=_refusal(outcome)
        )
    devices = tuple(_bound(mapping, resolved, device_of(resolved, inventory), snapshot) for resolved in outcome.devices)
    return RuntimeReport(
        runtime=mapping.runtime, inverted=True, devices=devices, masks=masks, rests_on=_texts(outcome.told)
    )


def _layer(layer: Layer) -> MaskLayer:
    return MaskLayer(
        variable=_text(layer.variable),
        text=msgspec.UNSET if layer.text is None else _text(layer.text),
        left=msgspec.UNSET if layer.left is None else layer.left,
        stopped=_text(layer.stopped),
    )


def _refusal(refusal: Refusal) -> RefusedMask:
    code = REFUSALS[refusal.code]
    return RefusedMask(
        code=refusal.code, meaning=code.meaning, detail=_text(refusal.detail), check=code.check, advice=code.advice
    )


def _bound(mapping: FleetMapping, resolved: Resolved, device: Device | None, snapshot: Snapshot) -> BoundCard:
    known: dict[str, Any] = {"fleet_index": resolved.fleet_index, "evidence": resolved.evidence}
    if device is None:
        key = resolved.key
        return BoundCard(vendor=_text(key.vendor), identity=_text(key.identity), state="gone", **known)
    state = snapshot.states.get(device.key, msgspec.UNSET)
    used = snapshot.usage.get((mapping.fleet, mapping.runtime, device.key), {})
    return BoundCard(
        **_identity(device),
        state=state,
        readings=_readings(snapshot, device.key),
        usage={USAGE[metric].name: float(value) for metric, value in used.items()},
        **known,
    )


def _devices(snapshot: Snapshot) -> Iterator[HostCard]:
    users: dict[DeviceKey, list[Numbered]] = {}
    for each in snapshot.bindings:
        number = Numbered(fleet=_text(each.fleet), runtime=each.runtime, fleet_index=each.fleet_index)
        users.setdefault(_on_host(each.device, snapshot), []).append(number)
    for device in snapshot.devices:
        yield HostCard(
            **_identity(device),
            state=snapshot.states.get(device.key, msgspec.UNSET),
            readings=_readings(snapshot, device.key),
            used_by=tuple(users.get(device.key, ())),
        )


def _on_host(device: Device, snapshot: Snapshot) -> DeviceKey:
    """The device that the host has; a card of which a workload has some tiles is none."""
    return device.key if device.key in snapshot.states or device.parent is None else device.parent


def _backend(status: BackendStatus, snapshot: Snapshot) -> BackendReport:
    fault = status.fault
    return BackendReport(
        vendor=_text(status.vendor),
        up=status.up,
        whole=status.up and status.vendor not in snapshot.incomplete,
        faults_total={reason: count for reason, count in status.faults_total.items() if count},
        fault=msgspec.UNSET if fault is None else BackendFault(reason=fault.reason, detail=_text(fault.detail)),
        cards_found=status.cards_found,
        cards_expected=msgspec.UNSET if status.cards_expected is None else status.cards_expected,
        driver_version=_text(status.driver_version or snapshot.driver_versions.get(status.vendor, "")),
        hints=tuple(BackendHint(code=_text(hint.code), text=_text(hint.text)) for hint in status.hints),
    )
