"""What a read of a card may look at, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from exporter.backends.amd.cards import Facts
from exporter.backends.base import Use
from exporter.backends.kernel_files import Sensor
from exporter.errors import DeviceFault
from exporter.model import Device


class Given(NamedTuple):
    """A value of a metric, None where there is none, and of the metric's own labels."""

    metric: str
    value: float | None
    labels: tuple[str, ...] = ()


class Asked(NamedTuple):
    """The card's folder in sysfs, what is known of the card, and who is on the device; a read that gives something all
    the same puts into ``failed`` what it could not read.
    """

    folder: str
    facts: Facts
    device: Device
    uses: Callable[[Device], Collection[Use] | None]
    failed: list[DeviceFault]

    def monitor(self) -> str:
        """The folder of the card's hwmon, empty where it has none. Raises ``DeviceFault`` where that is not known."""
        if not self.facts.monitor and self.facts.fault is not None:
            raise self.facts.fault
        return self.facts.monitor

    def sensor(self, label: str) -> Sensor | None:
        """The temperature with that label. Raises ``DeviceFault`` where it is not known whether the card has it."""
        if self.facts.fault is not None:
            raise self.facts.fault
        return self.facts.sensors.of(label)
