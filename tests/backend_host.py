"""A vendor backend in a worker, as the parent asks it, a cycle at a time and in this process; and what it answers."""

from __future__ import annotations

import time

from exporter.backends.base import Backend
from exporter.catalog import DEFAULT
from exporter.model import Device, Fault, VendorSample
from exporter.wire import Ask
from exporter.worker import Worker


class BackendHost:
    """The worker of a backend; ``wanted`` are the metrics that are taken from it."""

    def __init__(self, backend: Backend, wanted: frozenset[str] = DEFAULT) -> None:
        self.worker, self._cycle = Worker(backend, wanted), 0

    def ask(self, within: float = 5.0, *, users: bool = False) -> VendorSample | Fault:
        """A cycle's sample, or why there is none; with who computes on what where ``users`` are asked for."""
        self._cycle += 1
        answer = self.worker.answer(Ask(self._cycle, time.monotonic() + within, users))
        found = answer.sample or answer.fault
        assert found is not None
        return found

    def read(self, within: float = 5.0, *, users: bool = False) -> VendorSample:
        """A cycle's sample."""
        found = self.ask(within, users=users)
        assert isinstance(found, VendorSample), found
        return found

    def fault(self) -> str:
        """Why the backend does not serve."""
        found = self.ask()
        assert isinstance(found, Fault), found
        return found.reason


def devices(sample: VendorSample) -> dict[str, Device]:
    """By identity: a PCI address, with a partition or a tile behind it."""
    return {device.key.identity: device for device in sample.devices}


CORE = ("utilization", "memory_free", "memory_used", "memory_total", "temperature")
"""The readings that a card of any vendor may have."""


def values(sample: VendorSample, identity: str) -> dict[str, float]:
    """Those of a device."""
    return {metric: value for (metric, own), value in everything(sample, identity).items() if metric in CORE}


def everything(sample: VendorSample, identity: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """All readings of a device, by metric and by the values of the family's own labels."""
    found = (reading for reading in sample.readings if reading.key.identity == identity)
    return {(reading.metric, reading.labels): reading.value for reading in found}


def state(sample: VendorSample, identity: str) -> str:
    """The state that holds for a device."""
    return {entry.key.identity: entry.state for entry in sample.states}[identity]


def hints(sample: VendorSample) -> set[str]:
    """The codes of the hints."""
    return {hint.code for hint in sample.hints}
