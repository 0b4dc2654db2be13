"""What one card or tile gives in one cycle, beside utilization, memory and temperature."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from exporter.backends.kernel_files import number
from exporter.errors import DeviceFault, DeviceLost
from exporter.model import Device, Fault, Reading


class Given(NamedTuple):
    """A value of a metric, None where there is none, and of the metric's own labels."""

    metric: str
    value: float | None
    labels: tuple[str, ...] = ()


class Taking:
    """The values so far, and what has failed. ``tile`` is None for the whole card. ``pending``: a counter was read that
    gives a value from the next cycle on.
    """

    def __init__(self, device: Device, wanted: frozenset[str]) -> None:
        self.key, self.tile = device.key, None if device.parent is None else int(device.partition)
        self._wanted = wanted
        self.given: list[Given] = []
        self.faults: list[Fault] = []
        self.pending = False

    def wants(self, *metrics: str) -> bool:
        """The settings leave any of these."""
        return not self._wanted.isdisjoint(metrics)

    def gave(self, *metrics: str) -> bool:
        """Any of these has a value already."""
        return any(each.value is not None and each.metric in metrics for each in self.given)

    def attempt(self, metrics: Iterable[str], call: Callable[[], Iterable[Given]]) -> None:
        """What a call gives; where it fails, a fault. Raises ``DeviceLost`` and ``DeviceAsleep``."""
        try:
            self.given += list(call())
        except DeviceFault as fault:
            self.faults.append(Fault(fault.reason, f"{', '.join(metrics)}: {fault.detail}", self.key))

    def number(self, metric: str, path: str) -> int | None:
        """A file's number; None where it cannot be read, which is a fault unless there is no such thing."""
        try:
            return number(path)
        except DeviceLost:
            return None
        except DeviceFault as fault:
            self.faults.append(Fault(fault.reason, f"{metric}: {fault.detail}", self.key))
            return None

    def readings(self) -> tuple[Reading, ...]:
        """What has a value and is wanted."""
        values = ((each, each.value) for each in self.given if each.metric in self._wanted)
        return tuple(Reading(each.metric, self.key, value, each.labels) for each, value in values if value is not None)
