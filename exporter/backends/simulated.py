"""Four cards of two models, one of which hangs now and then: for demonstrations, and only when the settings name it."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence

from exporter.backends.base import Note, Places, Sampled, Use
from exporter.errors import BackendAbsent
from exporter.model import Device, DeviceKey, Reading

VENDOR = "simulated"

_GIB = 2**30
_MODELS = (("Simulated L40S", 48), ("Simulated L40S", 48), ("Simulated RTX 6000", 96), ("Simulated RTX 6000", 96))
_PERIOD_SECONDS = 120.0
# The card that hangs, when it does so first after the start, for how long, and how often.
_HANGS, _FIRST_SECONDS, _HANG_SECONDS, _EVERY_SECONDS = 1, 60.0, 30.0, 240.0


def _device(index: int) -> Device:
    uuid = f"GPU-{index:x}{index:x}{index:x}{index:x}51ed-0000-4000-8000-{index:012x}"
    name, gib = _MODELS[index]
    return Device(
        key=DeviceKey(VENDOR, uuid),
        physical_index=index,
        pci_bus_id=f"0000:{0x21 + 0x20 * index:02x}:00.0",
        uuid=uuid,
        name=name,
        memory_total_bytes=gib * _GIB,
        minor_number=index,
        temperature_sensor="gpu",
    )


class SimulatedBackend:
    """Values follow a sine of the wall clock, each card in its own phase, around a level of its own.

    One card does not answer for half a minute of every four, from a minute after the start on, as one does whose driver
    hangs in the kernel.
    """

    vendor = VENDOR
    driver_version = "simulated"

    def __init__(self, places: Places) -> None:
        del places
        self._devices = tuple(_device(index) for index in range(len(_MODELS)))
        self._started = time.monotonic()

    def open(self) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """Nothing to let go."""

    def slots(self) -> Sequence[str]:
        """The four indices."""
        if not self._devices:
            raise BackendAbsent("no-devices", "no simulated card")
        return [str(index) for index in range(len(self._devices))]

    def identify(self, slot: str, note: Note) -> tuple[Device, ...]:
        """The card of that index."""
        del note
        return (self._devices[int(slot)],)

    def sample(self, device: Device) -> Sampled:
        """The card's values now; where it hangs, those of when it comes back."""
        index = self._devices.index(device)
        if index == _HANGS:
            time.sleep(self._hang_left())
        phase = time.time() / _PERIOD_SECONDS * math.tau + index * math.tau / len(_MODELS)
        share = 0.2 + 0.15 * index + 0.15 * math.sin(phase)
        total = device.memory_total_bytes or 0
        used = int(total * share)
        values = {
            "utilization": float(round(100 * share)),
            "memory_free": total - used,
            "memory_used": used,
            "memory_total": total,
            "temperature": float(round(35 + 45 * share)),
        }
        return Sampled(tuple(Reading(metric, device.key, value) for metric, value in values.items()))

    def _hang_left(self) -> float:
        """Seconds until the card answers again; 0 while it answers."""
        since = time.monotonic() - self._started - _FIRST_SECONDS
        return max(0.0, _HANG_SECONDS - since % _EVERY_SECONDS) if since >= 0 else 0.0

    def users(self, device: Device) -> Collection[Use]:
        """Nobody."""
        del device
        return ()

    def asleep(self, slot: str) -> tuple[Device, ...]:
        """Simulated cards never sleep."""
        return (self._devices[int(slot)],)
