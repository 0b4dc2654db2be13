"""Four cards of two models, one of which hangs now and then: for demonstrations, and only when the settings name it."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from exporter.backends.base import Note, Places, Sampled, Use
from exporter.errors import BackendAbsent
from exporter.model import Device, DeviceKey, Reading

VENDOR = "simulated"

_GIB = 2**30


class _Model(NamedTuple):
    """What is the same for all cards of a model."""

    name: str
    gib: int
    idle_watts: float
    limit_watts: float
    clock_megahertz: int
    memory_megahertz: int
    generation: int
    fans: int


_L40S = _Model("Simulated L40S", 48, 35, 350, 2520, 9001, 4, 0)
_RTX_6000 = _Model("Simulated RTX 6000", 96, 55, 600, 2617, 14001, 5, 1)
_MODELS = (_L40S, _L40S, _RTX_6000, _RTX_6000)
_PERIOD_SECONDS = 120.0
# The card that hangs, when it does so first after the start, for how long, and how often.
_HANGS, _FIRST_SECONDS, _HANG_SECONDS, _EVERY_SECONDS = 1, 60.0, 30.0, 240.0
# How busy a card is: around a level of its own, so far up and down. The last one reaches its power limit at its peak.
_LEAST, _STEP, _SWING, _MOST = 0.2, 0.15, 0.15, 0.8
_IDLE_BELOW, _CAPPED_ABOVE = 0.08, 0.72
# The card whose driver has told of an error, and which one: a workload's access to memory that it does not have.
_FAULTED, _XID = 2, 31
_REASONS = (
    "idle",
    "application-clocks",
    "power-cap",
    "hardware-slowdown",
    "sync-boost",
    "software-thermal",
    "hardware-thermal",
    "power-brake",
    "display-clocks",
)

_Value = tuple[str, float] | tuple[str, float, str]
"""A metric's value, and that of the metric's own label where it has one."""


def _device(index: int) -> Device:
    uuid = f"GPU-{index:x}{index:x}{index:x}{index:x}51ed-0000-4000-8000-{index:012x}"
    model = _MODELS[index]
    return Device(
        key=DeviceKey(VENDOR, uuid),
        physical_index=index,
        pci_bus_id=f"0000:{0x21 + 0x20 * index:02x}:00.0",
        uuid=uuid,
        name=model.name,
        memory_total_bytes=model.gib * _GIB,
        minor_number=index,
        temperature_sensor="gpu",
    )


class _Load:
    """What a card of that index does now, so many seconds after the exporter began."""

    def __init__(self, index: int, began: float, seconds: float) -> None:
        self.index, self.model, self.began, self.seconds = index, _MODELS[index], began, seconds
        self._first, self._per_second = index * math.tau / len(_MODELS), math.tau / _PERIOD_SECONDS
        self._level = _LEAST + _STEP * index
        self.share = self._level + _SWING * math.sin(self._phase(seconds))

    def _phase(self, seconds: float) -> float:
        return (self.began + seconds) * self._per_second + self._first

    @property
    def busy_seconds(self) -> float:
        """The share's integral since the beginning, which only rises."""
        swings = math.cos(self._phase(0)) - math.cos(self._phase(self.seconds))
        return self._level * self.seconds + _SWING * swings / self._per_second


def _use(load: _Load) -> Iterator[_Value]:
    total, reserved = load.model.gib * _GIB, _GIB // 2
    used = int((total - reserved) * load.share)
    yield "utilization", float(round(100 * load.share))
    yield "memory_free", total - reserved - used
    yield "memory_used", used
    yield "memory_total", total
    yield "memory_reserved", reserved
    yield "memory_controller", round(0.7 * load.share, 2)
    yield "engine", round(0.3 * load.share, 2), "encoder"
    yield "engine", round(0.5 * load.share, 2), "decoder"
    yield "processes", 1.0 + int(4 * load.share)


def _electricity(load: _Load) -> Iterator[_Value]:
    model = load.model
    per_share = (model.limit_watts - model.idle_watts) / _MOST
    yield "temperature", float(round(35 + 45 * load.share))
    yield "power", round(model.idle_watts + per_share * load.share, 3)
    yield "power_limit", model.limit_watts
    yield "power_limit_default", model.limit_watts
    yield "power_limit_maximum", model.limit_watts
    yield "energy", round(model.idle_watts * load.seconds + per_share * load.busy_seconds, 3)
    for fan in range(model.fans):
        yield "fan_speed", round(0.3 + 0.6 * load.share, 2), str(fan)


def _clocks(load: _Load) -> Iterator[_Value]:
    model = load.model
    yield "clock", round(model.clock_megahertz * (0.3 + 0.7 * load.share)) * 1e6, "sm"
    yield "clock", model.memory_megahertz * 1e6, "memory"
    yield "clock_maximum", model.clock_megahertz * 1e6, "sm"
    yield "clock_maximum", model.memory_megahertz * 1e6, "memory"
    holds = {"idle": load.share < _IDLE_BELOW, "power-cap": load.share > _CAPPED_ABOVE}
    for reason in _REASONS:
        yield "throttled", float(holds.get(reason, False)), reason


def _links(load: _Load) -> Iterator[_Value]:
    """A packet is sent again every five minutes, more often on later cards."""
    yield "pcie_generation", load.model.generation
    yield "pcie_generation_maximum", load.model.generation
    yield "pcie_width", 16
    yield "pcie_width_maximum", 16
    yield "pcie_replays", load.index + load.seconds * (1 + load.index) // 300
    for severity in ("correctable", "nonfatal", "fatal"):
        yield "pcie_errors", 0, severity


def _errors(load: _Load) -> Iterator[_Value]:
    """One card's memory has had errors corrected, and its driver has told of an error when the exporter began."""
    faulted = load.index == _FAULTED
    yield "ecc_enabled", 1
    yield "ecc_errors", 3.0 * faulted, "corrected"
    yield "ecc_errors", 0, "uncorrected"
    yield "xid_errors", float(faulted)
    if faulted:
        yield "xid_last_code", _XID
        yield "xid_last_time", load.began


class SimulatedBackend:
    """Values follow a sine of the wall clock, each card in its own phase, around a level of its own.

    One card does not answer for half a minute of every four, from a minute after the start on, as one does whose driver
    hangs in the kernel.
    """

    vendor = VENDOR
    driver_version = "simulated"

    def __init__(self, places: Places) -> None:
        self._wanted = places.wanted
        self._devices = tuple(_device(index) for index in range(len(_MODELS)))
        self._started, self._began = time.monotonic(), time.time()

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
        load = _Load(index, self._began, time.monotonic() - self._started)
        found = (*_use(load), *_electricity(load), *_clocks(load), *_links(load), *_errors(load))
        return Sampled(
            tuple(
                Reading(metric, device.key, value, tuple(own))
                for metric, value, *own in found
                if metric in self._wanted
            )
        )

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
