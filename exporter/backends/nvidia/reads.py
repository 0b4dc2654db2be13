"""The calls that tell what a board or a MIG device does: a table of metrics and calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

from exporter import units
from exporter.backends.nvidia.codes import NOT_OFFERED
from exporter.backends.nvidia.fields import Given

Call = Callable[[ModuleType, Any], Iterable[Given]]


class Read(NamedTuple):
    """One call: which metrics it gives, and of what. A call that is ``instead`` is made only where the fields of
    :mod:`exporter.backends.nvidia.fields` have not told the metric.
    """

    metrics: tuple[str, ...]
    call: Call
    boards: bool = True
    parts: bool = False
    instead: bool = False


# Bits of nvmlClocksEventReasons, and what holds the clocks down.
THROTTLE_REASONS = {
    0x1: "idle",
    0x2: "application-clocks",
    0x4: "power-cap",
    0x8: "hardware-slowdown",
    0x10: "sync-boost",
    0x20: "software-thermal",
    0x40: "hardware-thermal",
    0x80: "power-brake",
    0x100: "display-clocks",
    0x200: "board-limit",
    0x400: "reliability",
}
_ALL_REASONS = (1 << 32) - 1  # more is no mask of reasons
_REASONS_OF_OLD = 0x1FF  # those that every driver knows
_UNKNOWN_STATE = 32  # NVML_PSTATE_UNKNOWN
_MOST_FANS = 16


def _utilization(nvml: ModuleType, handle: Any) -> Iterable[Given]:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    return (
        Given("utilization", units.percent(rates.gpu)),
        Given("memory_controller", units.ratio_of_percent(rates.memory)),
    )


def _memory(nvml: ModuleType, handle: Any) -> Iterable[Given]:
    """Version 1 counts the driver's reserve as used, so it gives no ``used``."""
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        used, reserved = units.byte_count(info.used), units.byte_count(info.reserved)
    except nvml.NVMLError as error:
        if error.value not in (*NOT_OFFERED, nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH):
            raise
        info, used, reserved = nvml.nvmlDeviceGetMemoryInfo(handle), None, None
    total, free = units.memory_size(info.total), units.byte_count(info.free)
    if total is None or (free is not None and free > total):
        return (Given("memory_total", total),)
    return (
        Given("memory_free", free),
        Given("memory_used", used),
        Given("memory_total", total),
        Given("memory_reserved", reserved),
    )


def _temperature(nvml: ModuleType, handle: Any) -> Iterable[Given]:
    sensor = nvml.NVML_TEMPERATURE_GPU
    try:
        value = nvml.nvmlDeviceGetTemperatureV(handle, sensor)
    except nvml.NVMLError as error:
        if error.value not in (*NOT_OFFERED, nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH):
            raise
        value = nvml.nvmlDeviceGetTemperature(handle, sensor)
    return (Given("temperature", units.celsius(value)),)


def _reasons(which: str, nvml: ModuleType, handle: Any) -> int:
    """A mask, 0 of what is none; NVML had another name for the calls before driver 535."""
    try:
        mask: int = getattr(nvml, f"nvmlDeviceGet{which}ClocksEventReasons")(handle)
    except nvml.NVMLError as error:
        if error.value not in NOT_OFFERED:
            raise
        mask = getattr(nvml, f"nvmlDeviceGet{which}ClocksThrottleReasons")(handle)
    return mask if 0 <= mask < _ALL_REASONS else -1


def supported_reasons(nvml: ModuleType, handle: Any) -> int | None:
    """The mask of reasons that the board can tell; None where it does not say. Raises ``NVMLError``."""
    mask = _reasons("Supported", nvml, handle)
    return mask if mask > 0 else None


def _throttled(supported: int, nvml: ModuleType, handle: Any) -> Iterable[Given]:
    """A series for each reason that can be told, or holds all the same."""
    reasons = _reasons("Current", nvml, handle)
    told = 0 if reasons < 0 else (supported or _REASONS_OF_OLD) | reasons
    return [
        Given("throttled", float(bool(reasons & bit)), (name,)) for bit, name in THROTTLE_REASONS.items() if told & bit
    ]


def _clock(which: str, nvml: ModuleType, handle: Any) -> Iterable[Given]:
    value = nvml.nvmlDeviceGetClockInfo(handle, _CLOCKS[which])
    return (Given("clock", units.megahertz(value), (which,)),)


_CLOCKS = {"sm": 1, "memory": 2}


def _engine(which: str, nvml: ModuleType, handle: Any) -> Iterable[Given]:
    call = {"encoder": nvml.nvmlDeviceGetEncoderUtilization, "decoder": nvml.nvmlDeviceGetDecoderUtilization}[which]
    return (Given("engine", units.ratio_of_percent(call(handle)[0]), (which,)),)


def _fan(fan: int, nvml: ModuleType, handle: Any) -> Iterable[Given]:
    """What the fan is told. A card whose fan is driven beyond its nominal speed says more than 100."""
    speed = nvml.nvmlDeviceGetFanSpeed_v2(handle, fan)
    return (Given("fan_speed", units.ratio_of_percent(min(speed, 100) if speed <= 200 else speed), (str(fan),)),)


def _performance_state(nvml: ModuleType, handle: Any) -> Iterable[Given]:
    state = nvml.nvmlDeviceGetPerformanceState(handle)
    return (Given("performance_state", float(state) if 0 <= state < _UNKNOWN_STATE else None),)


def _processes(nvml: ModuleType, handle: Any) -> Iterable[Given]:
    found = {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)}
    return (Given("processes", float(len(found))),)


def _power(nvml: ModuleType, handle: Any) -> Iterable[Given]:
    return (Given("power", units.milliwatts(nvml.nvmlDeviceGetPowerUsage(handle))),)


def _power_limit(nvml: ModuleType, handle: Any) -> Iterable[Given]:
    return (Given("power_limit", units.milliwatts(nvml.nvmlDeviceGetEnforcedPowerLimit(handle))),)


def _power_limit_default(nvml: ModuleType, handle: Any) -> Iterable[Given]:
    value = nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)
    return (Given("power_limit_default", units.milliwatts(value)),)


def _power_limit_maximum(nvml: ModuleType, handle: Any) -> Iterable[Given]:
    _, most = nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
    return (Given("power_limit_maximum", units.milliwatts(most)),)


def fan_count(nvml: ModuleType, handle: Any) -> int | None:
    """How many fans the board has; None where the number is none."""
    fans: int = nvml.nvmlDeviceGetNumFans(handle)
    return fans if fans <= _MOST_FANS else None


def _pcie_rate(metric: str, counter: int, nvml: ModuleType, handle: Any) -> Iterable[Given]:
    return (Given(metric, units.kilobytes(nvml.nvmlDeviceGetPcieThroughput(handle, counter))),)


READS: tuple[Read, ...] = (
    Read(("utilization", "memory_controller"), _utilization, parts=True),
    Read(("memory_free", "memory_used", "memory_total", "memory_reserved"), _memory, parts=True),
    # The sensor is the board's; the library answers "invalid argument" for an instance.
    Read(("temperature",), _temperature),
    Read(("power",), _power, instead=True),
    Read(("power_limit",), _power_limit, instead=True),
    Read(("power_limit_default",), _power_limit_default, instead=True),
    Read(("power_limit_maximum",), _power_limit_maximum, instead=True),
    Read(("clock",), partial(_clock, "sm")),
    Read(("clock",), partial(_clock, "memory")),
    Read(("engine",), partial(_engine, "encoder")),
    Read(("engine",), partial(_engine, "decoder")),
    Read(("performance_state",), _performance_state),
    Read(("processes",), _processes, parts=True),
    Read(("pcie_transmit_rate",), partial(_pcie_rate, "pcie_transmit_rate", 0)),
    Read(("pcie_receive_rate",), partial(_pcie_rate, "pcie_receive_rate", 1)),
)


def of_board(fans: int, reasons: int) -> tuple[Read, ...]:
    """The calls for a board with so many fans, and with a mask of the reasons that it can tell, 0 if unknown."""
    of_fans = (Read(("fan_speed",), partial(_fan, fan)) for fan in range(fans))
    return (*READS, Read(("throttled",), partial(_throttled, reasons)), *of_fans)


# What stays as it is while a card is there: thresholds by sensor, and the highest clocks.
_THRESHOLDS = {0: ("gpu", "shutdown"), 1: ("gpu", "slowdown"), 2: ("memory", "maximum"), 3: ("gpu", "maximum")}


def _threshold(number: int, nvml: ModuleType, handle: Any) -> Iterable[Given]:
    value = units.celsius(nvml.nvmlDeviceGetTemperatureThreshold(handle, number))
    return (Given("temperature_threshold", value, _THRESHOLDS[number]),)


def _clock_maximum(which: str, nvml: ModuleType, handle: Any) -> Iterable[Given]:
    value = nvml.nvmlDeviceGetMaxClockInfo(handle, _CLOCKS[which])
    return (Given("clock_maximum", units.megahertz(value) or None, (which,)),)


CONSTANTS: tuple[Read, ...] = (
    *(Read(("temperature_threshold",), partial(_threshold, number)) for number in _THRESHOLDS),
    *(Read(("clock_maximum",), partial(_clock_maximum, which)) for which in _CLOCKS),
)
