"""GPU performance monitoring (GPM), since Hopper: shares of the time between two samples, also of MIG's instances.

A sample is a buffer of the library's; two of them give metrics. Each device keeps its last one and another to fill,
also when it is gone: a call that hangs may still write there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from types import ModuleType
from typing import Any

from exporter import units
from exporter.backends.nvidia.fields import Given
from exporter.model import Device, DeviceKey

# Numbers of nvmlGpmMetricId_t; all are percentages.
_METRICS: dict[str, tuple[int, Callable[[float], float | None]]] = {
    "utilization": (1, units.percent),
    "sm_active": (2, units.ratio_of_percent),
    "tensor_active": (5, units.ratio_of_percent),
    "memory_active": (10, units.ratio_of_percent),
}
ON_BOARDS = ("sm_active", "tensor_active", "memory_active")
ON_PARTS = ("utilization", *ON_BOARDS)


class _Samples:
    """A device's two buffers; ``filled``: the first has a sample."""

    def __init__(self, last: Any, other: Any) -> None:
        self.last, self.other, self.filled = last, other, False


class Monitoring:
    """Reads what is wanted of it, of devices whose board can tell."""

    def __init__(self, nvml: ModuleType, wanted: frozenset[str]) -> None:
        self._nvml, self._wanted = nvml, wanted
        self._samples: dict[DeviceKey, _Samples] = {}

    def supports(self, handle: Any) -> bool:
        """Whether the board can tell. Raises ``NVMLError``."""
        return bool(self._nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)

    def metrics(self, device: Device) -> tuple[str, ...]:
        """What is wanted of the device."""
        return tuple(each for each in (ON_PARTS if device.parent else ON_BOARDS) if each in self._wanted)

    def forget(self, keys: Collection[DeviceKey]) -> None:
        """These have been away: their last samples are of before. The buffers stay, as a late call may write there."""
        for key in keys:
            if key in self._samples:
                self._samples[key].filled = False

    def read(self, device: Device, board: Any) -> Iterable[Given] | None:
        """What is so since the cycle before; None where this is the first. Raises ``NVMLError``."""
        nvml = self._nvml
        samples = self._samples.get(device.key)
        if samples is None:
            samples = self._samples[device.key] = _Samples(nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc())
        if device.parent:
            nvml.nvmlGpmMigSampleGet(board, device.gpu_instance, samples.other)
        else:
            nvml.nvmlGpmSampleGet(board, samples.other)
        samples.last, samples.other = samples.other, samples.last
        if not samples.filled:
            samples.filled = True
            return None
        return list(self._compared(device, samples))

    def _compared(self, device: Device, samples: _Samples) -> Iterator[Given]:
        nvml, metrics = self._nvml, self.metrics(device)
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(metrics)
        asked.sample1, asked.sample2 = samples.other, samples.last
        for place, metric in enumerate(metrics):
            asked.metrics[place].metricId = _METRICS[metric][0]
        nvml.nvmlGpmMetricsGet(asked)
        for place, metric in enumerate(metrics):
            if asked.metrics[place].nvmlReturn == 0:
                yield Given(metric, _METRICS[metric][1](asked.metrics[place].value))
