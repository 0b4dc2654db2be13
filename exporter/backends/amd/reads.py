"""What is read of a card and of a partition: tables of metrics and files, and of the library's calls where no file is.

Source: amdgpu's files in sysfs and hwmon, in the units that the kernel documents for them. A virtual function lacks
most of them, and an APU some; a file that is there and that the driver does not serve says so by its error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from exporter import units
from exporter.backends.amd import ras, throttling
from exporter.backends.amd.cards import Facts
from exporter.backends.amd.given import Asked, Given
from exporter.backends.amd.smi import Library, Values, free_used_total
from exporter.backends.base import Sampled, Use
from exporter.backends.kernel_files import Sensor, number, text
from exporter.errors import DeviceFault
from exporter.model import Device, Fault, Hint, Reading

Kernel = Callable[[Asked], Iterable[Given] | None]
Convert = Callable[[float], float | None]


class Read(NamedTuple):
    """Metrics that one look at the kernel's files gives; ``fallback`` gives them, in this order, where the kernel does
    not offer any, which is None.
    """

    metrics: tuple[str, ...]
    kernel: Kernel
    fallback: Callable[[Library, str, int | None], Values] | None = None


class Taking:
    """What one device gives in one cycle."""

    def __init__(self, device: Device, facts: Facts, uses: Callable[[Device], Collection[Use] | None]) -> None:
        self.device, self.facts, self._uses = device, facts, uses
        self.readings: list[Reading] = []
        self.faults: list[Fault] = []

    def asked(self, folder: str) -> Asked:
        """What a read may look at; the card's files are in ``folder``."""
        return Asked(folder, self.facts, self.device, self._uses, [])

    def take(self, given: Iterable[Given], wanted: frozenset[str]) -> None:
        """What is a value and wanted."""
        values = ((each, each.value) for each in given if each.metric in wanted)
        key = self.device.key
        self.readings += (Reading(each.metric, key, value, each.labels) for each, value in values if value is not None)

    def fail(self, row: Read, faults: Iterable[DeviceFault]) -> None:
        """A read has failed, or parts of it."""
        what, key = ", ".join(row.metrics), self.device.key
        self.faults += (Fault(fault.reason, f"{what}: {fault.detail}", key) for fault in faults)

    def sampled(self, hints: tuple[Hint, ...] = ()) -> Sampled:
        """All of it."""
        return Sampled(tuple(self.readings), tuple(self.faults), hints)


# --- one file, one value


def _file(metric: str, name: str, convert: Convert, *labels: str) -> Read:
    """A number in the card's folder."""

    def kernel(asked: Asked) -> Iterable[Given] | None:
        return _given(metric, number(f"{asked.folder}/{name}"), convert, labels)

    return Read((metric,), kernel)


def _monitored(metric: str, name: str, convert: Convert, *labels: str) -> Read:
    """A number in the folder of the card's hwmon."""

    def kernel(asked: Asked) -> Iterable[Given] | None:
        folder = asked.monitor()
        return _given(metric, number(f"{folder}/{name}") if folder else None, convert, labels)

    return Read((metric,), kernel)


def _given(metric: str, value: int | None, convert: Convert, labels: tuple[str, ...]) -> Iterable[Given] | None:
    return None if value is None else (Given(metric, convert(value), labels),)


# --- what needs more than one file, or more than a number


def _utilization(asked: Asked) -> Iterable[Given] | None:
    return _given("utilization", number(f"{asked.folder}/gpu_busy_percent"), units.percent, ())


_MEMORY = ("memory_free", "memory_used", "memory_total")


def _memory(asked: Asked) -> Iterable[Given] | None:
    """Free, used and total; amdgpu counts what is used, and what is free is the rest."""
    total, used = number(f"{asked.folder}/mem_info_vram_total"), None
    try:
        used = number(f"{asked.folder}/mem_info_vram_used")
    except DeviceFault as fault:
        asked.failed.append(fault)
    return None if total is None and used is None else map(Given, _MEMORY, free_used_total(total, used))


def _degrees(metric: str, sensor: Sensor | None) -> Iterable[Given] | None:
    return None if sensor is None else _given(metric, number(sensor.path), units.millidegrees, ())


def _temperature(asked: Asked) -> Iterable[Given] | None:
    return _degrees("temperature", asked.facts.temperature())


def _sensor(metric: str, label: str) -> Read:
    """The temperature that the driver labels so."""
    return Read((metric,), lambda asked: _degrees(metric, asked.sensor(label)))


_THRESHOLD = ("temperature_threshold",)
_SENSORS = {"edge": "gpu", "junction": "junction", "mem": "memory"}
_THRESHOLDS = {"crit": "slowdown", "emergency": "shutdown"}
_CRITICAL = "critical"  # what the driver has no limit beside: before Vega 10 it is where the card is switched off


def _threshold(label: str, what: str) -> Read:
    """Of a sensor whose label could not be read the sensor's own row says so."""

    def kernel(asked: Asked) -> Iterable[Given] | None:
        sensor = asked.facts.sensors.by_label.get(label)
        value = None if sensor is None else number(sensor.beside(what))
        if sensor is None or value is None:
            return None
        alone = what == "crit" and number(sensor.beside("emergency")) is None
        named = _CRITICAL if alone else _THRESHOLDS[what]
        return _given(*_THRESHOLD, value, units.millidegrees, (_SENSORS[label], named))

    return Read(_THRESHOLD, kernel)


# No card may draw as much: firmware that counts in another unit than the kernel takes it to gives a thousandfold.
_MOST_WATTS = 2_500


def _watts(microwatts: float) -> float | None:
    """0 is what the second chip of a board of two says, whose power is counted at the first: it is not known."""
    watts = units.microwatts(microwatts)
    return watts if watts and watts <= _MOST_WATTS else None


def _power(asked: Asked) -> Iterable[Given] | None:
    """Averaged by the firmware; chips that tell no average have the power of now."""
    folder = asked.monitor()
    for name in ("power1_average", "power1_input") if folder else ():
        value = number(f"{folder}/{name}")
        if value is not None:
            return _given("power", value, _watts, ())
    return None


def _fan_speed(asked: Asked) -> Iterable[Given] | None:
    folder = asked.monitor()
    if not folder:
        return None
    most, told = number(f"{folder}/pwm1_max"), number(f"{folder}/pwm1")
    return None if told is None or not most else (Given("fan_speed", units.ratio(told / most), ("0",)),)


_LEVEL = re.compile(r"^[0-9]+: *([0-9]{1,6})mhz", re.MULTILINE | re.IGNORECASE | re.ASCII)


def _clock_maximum(file: str, clock: str) -> Read:
    """The highest level; each is a line such as ``1: 2482Mhz *``."""

    def kernel(asked: Asked) -> Iterable[Given] | None:
        levels = [int(level) for level in _LEVEL.findall(text(f"{asked.folder}/{file}") or "")]
        return _given("clock_maximum", max(levels, default=0) or None, units.megahertz, (clock,))

    return Read(("clock_maximum",), kernel)


_RATES = ("pcie_receive_rate", "pcie_transmit_rate")
_MESSAGES = re.compile(r"([0-9]{1,20}) ([0-9]{1,20}) ([0-9]{1,5})", re.ASCII)


def _pcie_rates(asked: Asked) -> Iterable[Given] | None:
    """The driver counts messages for a second, and tells the largest payload that one may have."""
    found = text(f"{asked.folder}/pcie_bw")
    if found is None:
        return None
    counted = _MESSAGES.fullmatch(found)
    if counted is None:
        raise DeviceFault("driver-error", f"{asked.folder}/pcie_bw: found {found[:40]!r}, expected three numbers")
    payload = int(counted[3])
    return [Given(metric, units.byte_count(int(counted[1 + place]) * payload)) for place, metric in enumerate(_RATES)]


_MODE = re.compile(r"[A-Z0-9]{1,16}", re.ASCII)


def _partition_mode(asked: Asked) -> Iterable[Given] | None:
    modes = tuple(_mode(f"{asked.folder}/current_{kind}_partition") for kind in ("compute", "memory"))
    return (Given("partition_mode", 1.0, modes),) if any(modes) else None


def _mode(path: str) -> str:
    """Empty where the card has none, or the driver does not know it."""
    found = text(path) or ""
    return found.lower() if _MODE.fullmatch(found) and found != "UNKNOWN" else ""


def _processes(asked: Asked) -> Iterable[Given] | None:
    """None where there is a process of which it cannot be told what it does."""
    uses = asked.uses(asked.device)
    if uses is None or any(use.does is None for use in uses):
        return None
    return (Given("processes", float(sum(use.does == "computes" for use in uses))),)


def _part_memory(asked: Asked) -> Iterable[Given]:
    """The size that the KFD gives the partition. What the library says is in use repeats the whole card's."""
    return (Given("memory_total", asked.device.memory_total_bytes),)


READS: tuple[Read, ...] = (
    Read(("utilization",), _utilization, Library.utilization),
    Read(_MEMORY, _memory, Library.memory),
    Read(("temperature",), _temperature, Library.temperature),
    _sensor("junction_temperature", "junction"),
    _sensor("memory_temperature", "mem"),
    _file("memory_controller", "mem_busy_percent", units.ratio_of_percent),
    _file("engine", "vcn_busy_percent", units.ratio_of_percent, "video"),
    Read(("power",), _power),
    _monitored("clock", "freq1_input", units.hertz, "graphics"),
    _monitored("clock", "freq2_input", units.hertz, "memory"),
    Read(("fan_speed",), _fan_speed),
    _monitored("fan_rotation", "fan1_input", units.rpm, "0"),
    _monitored("voltage", "in0_input", units.millivolts),
    Read(throttling.METRICS, throttling.read),
    _file("pcie_replays", "pcie_replay_count", units.count),
    Read(_RATES, _pcie_rates),
)
"""What the card answers itself."""

KEPT: tuple[Read, ...] = (
    Read(("energy",), _monitored("energy", "energy1_input", units.microjoules).kernel, Library.energy),
    *(_threshold(label, what) for label in _SENSORS for what in _THRESHOLDS),
    _monitored("power_limit", "power1_cap", _watts),
    _monitored("power_limit_default", "power1_cap_default", _watts),
    _monitored("power_limit_maximum", "power1_cap_max", _watts),
    _clock_maximum("pp_dpm_sclk", "graphics"),
    _clock_maximum("pp_dpm_mclk", "memory"),
    Read(("ecc_enabled",), ras.enabled),
    Read(ras.ERRORS, ras.errors),
    Read(ras.PAGES, ras.pages),
    Read(("partition_mode",), _partition_mode),
    Read(("processes",), _processes),
)
"""What the driver may have kept from before: a card that gives nothing else is not asked for it."""

PARTS: tuple[Read, ...] = (
    Read(("utilization",), lambda asked: None, Library.utilization),
    Read(("memory_total",), _part_memory),
    Read(("processes",), _processes),
)
"""What is a partition's own: sensors, clocks, errors and the link are the card's."""
