"""Snapshot -> metric families -> a page. Families are built fresh for each page; nothing here asks a device."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from exporter import __version__, catalog
from exporter.catalog import Family
from exporter.model import STATES, BackendStatus, Binding, Device, Refusal, Snapshot

Labels = dict[str, str]
Row = tuple[Labels, float]


class ReloadStatus(NamedTuple):
    """How the last attempt to load the settings ended, and when (Unix time) those in force were loaded."""

    successful: bool
    success_timestamp_seconds: float


def _metric(family: Family, rows: Iterable[Row]) -> Metric:
    """The family with its samples; a label whose value is empty is left out, which means the same to Prometheus."""
    metric = _empty(family)
    for labels, value in rows:
        metric.add_sample(family.name, labels, value)
    return metric


def _empty(family: Family) -> Metric:
    """A counter's family is named without the ``_total`` of its samples."""
    name = family.name.removesuffix("_total") if family.kind == "counter" else family.name
    return Metric(name, family.help, family.kind)


def _present(**labels: str) -> Labels:
    return {name: value for name, value in labels.items() if value}


def _device_labels(device: Device) -> Labels:
    return _present(
        vendor=device.key.vendor,
        physical_index="" if device.physical_index is None else str(device.physical_index),
        pci_bus_id=device.pci_bus_id,
        uuid=device.uuid,
        gpu_partition=device.partition,
    )


def _binding_labels(binding: Binding) -> Labels:
    return {"fleet": binding.fleet, "fleet_index": str(binding.fleet_index)} | _device_labels(binding.device)


class DeviceCollector(Collector):
    """Every device of the host: who it is and which state holds."""

    families = (catalog.GPU_INFO, catalog.DEVICE_STATE)

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._labels = [(device, _device_labels(device)) for device in snapshot.devices]

    def describe(self) -> Iterable[Metric]:
        """The families without samples, for registration."""
        return map(_empty, self.families)

    def collect(self) -> Iterator[Metric]:
        """The families of this snapshot."""
        yield _metric(catalog.GPU_INFO, self._infos())
        yield _metric(catalog.DEVICE_STATE, self._states())

    def _infos(self) -> Iterator[Row]:
        for device, labels in self._labels:
            yield (
                labels
                | _present(
                    name=device.name,
                    driver_version=self._snapshot.driver_versions.get(device.key.vendor, ""),
                    temperature_sensor=device.temperature_sensor,
                ),
                1,
            )

    def _states(self) -> Iterator[Row]:
        for device, labels in self._labels:
            held = self._snapshot.states.get(device.key)
            for state in STATES:
                yield labels | {"state": state}, float(state == held)


class FleetCollector(Collector):
    """Every fleet: its masks inverted or refused, and its devices' readings under both numbers."""

    families = (
        *catalog.READINGS.values(),
        catalog.FLEET_DEVICE_INFO,
        catalog.MASK_INVERTED,
        catalog.MASK_REFUSAL_INFO,
    )

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._bound = [(binding, _binding_labels(binding)) for binding in snapshot.bindings]

    def describe(self) -> Iterable[Metric]:
        """The families without samples, for registration."""
        return map(_empty, self.families)

    def collect(self) -> Iterator[Metric]:
        """The families of this snapshot; a reading that nobody gave has a family without samples."""
        for metric, family in catalog.READINGS.items():
            yield _metric(family, self._readings(metric))
        yield _metric(
            catalog.FLEET_DEVICE_INFO,
            (
                (labels | {"runtime": binding.runtime, "evidence": binding.evidence}, 1.0)
                for binding, labels in self._bound
            ),
        )
        mappings = self._snapshot.mappings
        yield _metric(
            catalog.MASK_INVERTED,
            (
                ({"fleet": mapping.fleet, "runtime": mapping.runtime}, float(not isinstance(mapping.outcome, Refusal)))
                for mapping in mappings
            ),
        )
        yield _metric(
            catalog.MASK_REFUSAL_INFO,
            (
                ({"fleet": mapping.fleet, "runtime": mapping.runtime, "reason": mapping.outcome.code}, 1.0)
                for mapping in mappings
                if isinstance(mapping.outcome, Refusal)
            ),
        )

    def _readings(self, metric: str) -> Iterator[Row]:
        for binding, labels in self._bound:
            value = self._snapshot.readings.get(binding.device.key, {}).get(metric)
            if value is not None:
                yield labels, value


class ExporterCollector(Collector):
    """The exporter itself: its backends, its build, its settings."""

    families = (
        catalog.BACKEND_UP,
        catalog.BACKEND_DURATION,
        catalog.BACKEND_FAULTS,
        catalog.BACKEND_FAULT_INFO,
        catalog.HINT_INFO,
        catalog.FLEETS_LEFT_OUT,
        catalog.BUILD_INFO,
        catalog.RELOAD_SUCCESSFUL,
        catalog.RELOAD_TIMESTAMP,
    )

    def __init__(self, backends: Sequence[BackendStatus], left_out: int, reload: ReloadStatus) -> None:
        self._backends, self._left_out, self._reload = backends, left_out, reload

    def describe(self) -> Iterable[Metric]:
        """The families without samples, for registration."""
        return map(_empty, self.families)

    def collect(self) -> Iterator[Metric]:
        """The families of this snapshot."""
        backends = self._backends
        yield _metric(catalog.BACKEND_UP, (({"vendor": row.vendor}, float(row.up)) for row in backends))
        yield _metric(catalog.BACKEND_DURATION, (({"vendor": row.vendor}, row.duration_seconds) for row in backends))
        yield _metric(catalog.BACKEND_FAULTS, (row for backend in backends for row in _fault_counts(backend)))
        faults = ((row.vendor, row.fault) for row in backends if not row.up)
        yield _metric(
            catalog.BACKEND_FAULT_INFO,
            (({"vendor": vendor, "reason": fault.reason}, 1.0) for vendor, fault in faults if fault is not None),
        )
        yield _metric(
            catalog.HINT_INFO,
            (
                ({"vendor": row.vendor, "hint": code}, 1.0)
                for row in backends
                for code in sorted({hint.code for hint in row.hints})
            ),
        )
        yield _metric(catalog.FLEETS_LEFT_OUT, [({}, float(self._left_out))])
        build = {"version": __version__, "python_version": platform.python_version()}
        yield _metric(catalog.BUILD_INFO, [(build, 1.0)])
        yield _metric(catalog.RELOAD_SUCCESSFUL, [({}, float(self._reload.successful))])
        yield _metric(catalog.RELOAD_TIMESTAMP, [({}, self._reload.success_timestamp_seconds)])


def _fault_counts(backend: BackendStatus) -> Iterator[Row]:
    for reason, count in backend.faults_total.items():
        yield {"vendor": backend.vendor, "reason": reason}, count


class _Process(ProcessCollector):
    """The parent's own ``process_*`` families; described, so that ``name[]`` finds them."""

    def __init__(self) -> None:
        super().__init__(registry=None)
        self._described = tuple(Metric(family.name, family.documentation, family.type) for family in self.collect())

    def describe(self) -> Iterable[Metric]:
        """The families without samples, for registration."""
        return self._described


# One for the life of the process: each new one reads the kernel's boot time again.
_PROCESS = _Process()


def collectors_of(snapshot: Snapshot, reload: ReloadStatus, *, process: bool = True) -> tuple[Collector, ...]:
    """The collectors that show this snapshot; ``process`` adds the parent's own ``process_*`` families."""
    shown = (FleetCollector(snapshot), DeviceCollector(snapshot), _exporter(snapshot, reload))
    return (*shown, _PROCESS) if process else shown


def _exporter(snapshot: Snapshot, reload: ReloadStatus) -> ExporterCollector:
    return ExporterCollector(snapshot.backends, snapshot.left_out, reload)


def registry_of(snapshot: Snapshot, reload: ReloadStatus, *, process: bool = True) -> CollectorRegistry:
    """A registry of :func:`collectors_of`, which refuses a family that two of them give."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors_of(snapshot, reload, process=process):
        registry.register(collector)
    return registry


Encoder = Callable[[Collector], bytes]

_PLAIN = "text/plain;version=0.0.4"
_SPOKEN = {
    ("application/openmetrics-text", ""): "application/openmetrics-text;version=1.0.0",
    ("application/openmetrics-text", "1.0.0"): "application/openmetrics-text;version=1.0.0",
    ("text/plain", "1.0.0"): "text/plain;version=1.0.0",
    ("text/plain", "0.0.4"): _PLAIN,
    ("text/plain", ""): _PLAIN,
    ("text/*", ""): _PLAIN,
    ("*/*", ""): _PLAIN,
}


def encoder_for(accept: str) -> tuple[Encoder, str]:
    """The page format that an ``Accept`` header asks for, and its content type; the plain text format when in doubt.

    Only versions that are spoken here reach the client library, which stops at any other text.
    """
    wanted = sorted((_preference(item) for item in accept.split(",")), key=lambda pair: -pair[0])
    spoken = [_SPOKEN[kind] for quality, kind in wanted if quality > 0 and kind in _SPOKEN]
    encoder, content_type = choose_encoder(spoken[0] if spoken else _PLAIN)
    return encoder, content_type


def _preference(item: str) -> tuple[float, tuple[str, str]]:
    media, *parameters = (part.strip().lower() for part in item.split(";"))
    values = dict(parameter.split("=", 1) for parameter in parameters if "=" in parameter)
    try:
        quality = float(values.get("q", "1"))
    except ValueError:
        quality = 0.0
    return quality, (media, values.get("version", ""))


class _Single(Collector):
    """One family, or none, as the client library's encoders take it."""

    def __init__(self, *families: Metric) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """The family as it is."""
        return self._families


def family_text(family: Metric, encoder: Encoder) -> bytes:
    """A family's part of a page, without what ends a page."""
    return encoder(_Single(family)).removesuffix(end_of_page(encoder))


def end_of_page(encoder: Encoder) -> bytes:
    """What ends a page: ``# EOF`` in OpenMetrics, nothing in the other formats."""
    return encoder(_Single())


def render(registry: CollectorRegistry, encoder: Encoder, names: Sequence[str] = ()) -> bytes:
    """The page of a registry; ``names`` (sample names) narrows it."""
    return encoder(registry.restricted_registry(names) if names else registry)
