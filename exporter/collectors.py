"""Snapshot -> metric families -> a page. Families are built fresh for each page; nothing here asks a device."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from exporter import __version__, catalog
from exporter.catalog import Family
from exporter.lines import Labels, Memo, Row
from exporter.model import FAULT_REASONS, STATES, Binding, Device, Readings, Refusal, Snapshot


class ReloadStatus(NamedTuple):
    """How the last attempt to load the settings ended, and when (Unix time) those in force were loaded."""

    successful: bool
    success_timestamp_seconds: float


_OwnLabels = tuple[tuple[str, ...], tuple[str, ...]]


class BindingLabels(NamedTuple):
    """A binding's labels: of its readings, and of the row that tells how it was bound; ``more`` has those of readings
    whose families have labels of their own, by these labels' names and values.
    """

    reading: Labels
    info: Labels
    more: dict[_OwnLabels, Labels]

    def of(self, family: Family, values: tuple[str, ...]) -> Labels:
        """A reading's, whose family's own labels have these values."""
        if not values:
            return self.reading
        own = (family.own, values)
        labels = self.more.get(own)
        if labels is None:
            labels = self.more[own] = self.reading.plus(**dict(zip(*own, strict=True)))
        return labels


class DeviceLabels(NamedTuple):
    """A device's labels: of the row that tells who it is, and of each state's."""

    info: Labels
    states: tuple[tuple[str, Labels], ...]


class VendorLabels(NamedTuple):
    """A backend's labels: of its rows, and of the count of each fault."""

    one: Labels
    faults: tuple[tuple[str, Labels], ...]


def _identity(device: Device) -> dict[str, str]:
    return {
        "vendor": device.key.vendor,
        "physical_index": "" if device.physical_index is None else str(device.physical_index),
        "pci_bus_id": device.pci_bus_id,
        "uuid": device.uuid,
        "gpu_partition": device.partition,
    }


def _of_binding(binding: Binding) -> BindingLabels:
    bound = Labels(_identity(binding.device) | {"fleet": binding.fleet, "fleet_index": str(binding.fleet_index)})
    return BindingLabels(bound, bound.plus(runtime=binding.runtime, evidence=binding.evidence), {})


def _of_device(known: tuple[Device, str]) -> DeviceLabels:
    device, driver_version = known
    labels = Labels(_identity(device))
    sensor = device.temperature_sensor
    info = labels.plus(name=device.name, driver_version=driver_version, temperature_sensor=sensor)
    return DeviceLabels(info, tuple((state, labels.plus(state=state)) for state in STATES))


def _of_vendor(vendor: str) -> VendorLabels:
    labels = Labels({"vendor": vendor})
    return VendorLabels(labels, tuple((reason, labels.plus(reason=reason)) for reason in FAULT_REASONS))


class LabelSets:
    """Every label set of a page, by what it is made of. Those that the page before had too are not made again."""

    def __init__(self) -> None:
        self.binding = Memo(_of_binding)
        self.device = Memo(_of_device)
        self.vendor = Memo(_of_vendor)
        self._others: Memo[tuple[tuple[str, str], ...], Labels] = Memo(lambda pairs: Labels(dict(pairs)))

    def begin(self) -> None:
        """Another page."""
        for memo in (self.binding, self.device, self.vendor, self._others):
            memo.begin()

    def of(self, **pairs: str) -> Labels:
        """These labels."""
        return self._others(tuple(pairs.items()))


class RowCollector(Collector):
    """Families given as rows of label sets and values, of which a page is made with or without the client library."""

    families: Sequence[Family]
    prefix = ""
    """What is put in front of every family's name."""

    def rows(self) -> Iterator[tuple[Family, Iterable[Row]]]:
        """The rows of each family."""
        raise NotImplementedError

    def describe(self) -> Iterable[Metric]:
        """The families without samples, for registration."""
        return (empty(prefixed(family, self.prefix)) for family in self.families)

    def named_rows(self) -> Iterator[tuple[Family, Iterable[Row]]]:
        """The rows of each family, under the name that it has on the page."""
        return ((prefixed(family, self.prefix), rows) for family, rows in self.rows())

    def collect(self) -> Iterator[Metric]:
        """The families of this snapshot; a reading that nobody gave has none."""
        for family, rows in self.named_rows():
            metric = empty(family)
            for labels, value in rows:
                metric.add_sample(family.name, labels.pairs, value)
            yield metric


def prefixed(family: Family, prefix: str) -> Family:
    """The family under its name on the page."""
    return _with(prefix)[family.name] if prefix else family


@functools.lru_cache(maxsize=2)
def _with(prefix: str) -> Mapping[str, Family]:
    """Every family under its name with the prefix, by its own: made once, and not for each page."""
    return {family.name: family._replace(name=prefix + family.name) for family in catalog.FAMILIES}


def empty(family: Family) -> Metric:
    """The family without samples. A counter's is named without the ``_total`` of its samples."""
    name = family.name.removesuffix("_total") if family.kind == "counter" else family.name
    return Metric(name, family.help, family.kind)


class DeviceCollector(RowCollector):
    """Every device of the host: who it is and which state holds."""

    families = (catalog.GPU_INFO, catalog.DEVICE_STATE)

    def __init__(self, snapshot: Snapshot, sets: LabelSets) -> None:
        versions = snapshot.driver_versions
        devices = [(device, sets.device((device, versions.get(device.key.vendor, "")))) for device in snapshot.devices]
        self._devices = [(labels, snapshot.states.get(device.key)) for device, labels in devices]

    def rows(self) -> Iterator[tuple[Family, Iterable[Row]]]:
        """Of each device one row of who it is, and one of each state."""
        yield catalog.GPU_INFO, ((labels.info, 1.0) for labels, _ in self._devices)
        yield (
            catalog.DEVICE_STATE,
            ((labels, float(state == held)) for device, held in self._devices for state, labels in device.states),
        )


class FleetCollector(RowCollector):
    """Every fleet: its masks inverted or refused, and its devices' readings under both numbers."""

    families = (
        *catalog.READINGS.values(),
        *catalog.USAGE.values(),
        catalog.FLEET_DEVICE_INFO,
        catalog.MASK_INVERTED,
        catalog.MASK_REFUSAL_INFO,
    )

    def __init__(self, snapshot: Snapshot, sets: LabelSets) -> None:
        self._mappings, self._sets = snapshot.mappings, sets
        none: Readings = {}
        self._bound = [
            (sets.binding(binding), snapshot.readings.get(binding.device.key, none)) for binding in snapshot.bindings
        ]
        used = (
            (binding, snapshot.usage.get((binding.fleet, binding.runtime, binding.device.key)))
            for binding in snapshot.bindings
        )
        self._used = [(sets.binding(binding).reading, values) for binding, values in used if values]

    def rows(self) -> Iterator[tuple[Family, Iterable[Row]]]:
        """Of each binding one row a reading, what the fleet's own processes do there, and one of how it was bound; of
        each fleet how its masks were read.
        """
        for metric, family in catalog.READINGS.items():
            rows = [
                (labels.of(family, own), value)
                for labels, given in self._bound
                if metric in given
                for own, value in given[metric].items()
            ]
            if rows:
                yield family, rows
        for metric, family in catalog.USAGE.items():
            used = [(labels, values[metric]) for labels, values in self._used if metric in values]
            if used:
                yield family, used
        yield catalog.FLEET_DEVICE_INFO, ((labels.info, 1.0) for labels, _ in self._bound)
        of, mappings = self._sets.of, self._mappings
        yield (
            catalog.MASK_INVERTED,
            (
                (of(fleet=mapping.fleet, runtime=mapping.runtime), float(not isinstance(mapping.outcome, Refusal)))
                for mapping in mappings
            ),
        )
        yield (
            catalog.MASK_REFUSAL_INFO,
            (
                (of(fleet=mapping.fleet, runtime=mapping.runtime, reason=mapping.outcome.code), 1.0)
                for mapping in mappings
                if isinstance(mapping.outcome, Refusal)
            ),
        )


class ExporterCollector(RowCollector):
    """The exporter itself: its backends, its build, its settings."""

    families = (
        catalog.BACKEND_UP,
        catalog.BACKEND_DURATION,
        catalog.BACKEND_FAULTS,
        catalog.BACKEND_FAULT_INFO,
        catalog.HINT_INFO,
        catalog.DEVICES_EXPECTED,
        catalog.DEVICES_FOUND,
        catalog.FLEETS_LEFT_OUT,
        catalog.BUILD_INFO,
        catalog.RELOAD_SUCCESSFUL,
        catalog.RELOAD_TIMESTAMP,
    )

    def __init__(self, snapshot: Snapshot, reload: ReloadStatus, sets: LabelSets) -> None:
        self._backends, self._left_out = snapshot.backends, snapshot.left_out
        self._reload, self._sets = reload, sets

    def rows(self) -> Iterator[tuple[Family, Iterable[Row]]]:
        """Of each backend its health; the rest is one row each."""
        of, backends = self._sets.of, self._backends
        labelled = [(self._sets.vendor(row.vendor), row) for row in backends]
        yield catalog.BACKEND_UP, ((labels.one, float(row.up)) for labels, row in labelled)
        yield catalog.BACKEND_DURATION, ((labels.one, row.duration_seconds) for labels, row in labelled)
        yield (
            catalog.BACKEND_FAULTS,
            (
                (faulty, float(row.faults_total[reason]))
                for labels, row in labelled
                for reason, faulty in labels.faults
                if reason in row.faults_total
            ),
        )
        faults = ((row.vendor, row.fault) for row in backends if not row.up)
        yield (
            catalog.BACKEND_FAULT_INFO,
            ((of(vendor=vendor, reason=fault.reason), 1.0) for vendor, fault in faults if fault is not None),
        )
        hints = ((row.vendor, code) for row in backends for code in sorted({hint.code for hint in row.hints}))
        yield catalog.HINT_INFO, ((of(vendor=vendor, hint=code), 1.0) for vendor, code in hints)
        expected = [(labels.one, row.cards_expected) for labels, row in labelled]
        yield catalog.DEVICES_EXPECTED, ((labels, float(count)) for labels, count in expected if count is not None)
        yield catalog.DEVICES_FOUND, ((labels.one, float(row.cards_found)) for labels, row in labelled)
        yield catalog.FLEETS_LEFT_OUT, [(of(), float(self._left_out))]
        yield catalog.BUILD_INFO, [(of(version=__version__, python_version=platform.python_version()), 1.0)]
        yield catalog.RELOAD_SUCCESSFUL, [(of(), float(self._reload.successful))]
        yield catalog.RELOAD_TIMESTAMP, [(of(), self._reload.success_timestamp_seconds)]


class _Process(ProcessCollector):
    """The parent's own ``process_*`` families; described, so that ``name[]`` finds them."""

    def __init__(self) -> None:
        super().__init__(registry=None)
        self._described = tuple(Metric(family.name, family.documentation, family.type) for family in self.collect())

    def describe(self) -> Iterable[Metric]:
        """The families without samples, for registration."""
        return self._described


# One for the life of the process: each new one reads the kernel's boot time again.
PROCESS = _Process()


def collectors_of(
    snapshot: Snapshot, reload: ReloadStatus, sets: LabelSets | None = None, *, prefix: str = ""
) -> tuple[RowCollector, ...]:
    """The collectors that show this snapshot; ``sets`` are those of the page before."""
    sets = LabelSets() if sets is None else sets
    sets.begin()
    made = (FleetCollector(snapshot, sets), DeviceCollector(snapshot, sets), ExporterCollector(snapshot, reload, sets))
    for collector in made:
        collector.prefix = prefix
    return made


def registry_of(
    snapshot: Snapshot, reload: ReloadStatus, *, process: bool = True, prefix: str = ""
) -> CollectorRegistry:
    """A registry of :func:`collectors_of`, which refuses a family that two of them give; ``process`` adds the parent's
    own ``process_*`` families.
    """
    registry = CollectorRegistry(auto_describe=False)
    shown = collectors_of(snapshot, reload, prefix=prefix)
    for collector in (*shown, PROCESS) if process else shown:
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


def head_of(family: Metric, encoder: Encoder) -> str:
    """What stands before the samples of a family: its help and type."""
    return encoder(_Single(family)).removesuffix(encoder(_Single())).decode()


def end_of_page(encoder: Encoder) -> str:
    """What ends a page: ``# EOF`` in OpenMetrics, nothing in the other formats."""
    return encoder(_Single()).decode()


def render(registry: CollectorRegistry, encoder: Encoder, names: Sequence[str] = ()) -> bytes:
    """The page of a registry; ``names`` (sample names) narrows it."""
    return encoder(registry.restricted_registry(names) if names else registry)
