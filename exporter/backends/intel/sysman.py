"""Intel's Level Zero Sysman through ``pyzes``, where its loader and a driver are installed.

The binding asks for one path that is written into its source; the loader is looked for where the settings say, else by
its name, as the system's dynamic loader finds it. ``zesInit`` opens every card, so it waits until none sleeps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

from exporter import units
from exporter.backends.base import Places
from exporter.backends.meter import Meter
from exporter.backends.vendor_library import LibraryAbsentError, Starting, load
from exporter.errors import DeviceAsleep, DeviceFault, DeviceLost

PACKAGE, EXTRA, STEM, LOADER = "pyzes", "gpu-fleet-exporter[intel]", "ze_loader", "libze_loader.so.1"

_LOST = (0x70000001, 0x70000006)  # device lost, device requires reset
_ASLEEP = 0x70000007
_NO_PERMISSION = 0x70010000
# Not available, unsupported version or feature; and no permission, for which a hint speaks.
_NOT_OFFERED = (0x70010001, 0x70020000, 0x78000002, 0x78000003, _NO_PERMISSION)

# The sensor of the GPU itself, else the hottest of all.
_TEMPERATURES = ((1, "gpu"), (0, "global"))
_ALL_ENGINES = 0
_ON_DEVICE = 1

WHOLE = None
"""In place of a tile's number: the whole card."""


class _Part(NamedTuple):
    """A handle of a card's engine group, memory module or sensor; ``tile`` is None where it is the whole card's."""

    kind: int
    tile: int | None
    handle: Any
    size: int = 0


class _Card(NamedTuple):
    """What Sysman has of a card, found once."""

    engines: tuple[_Part, ...]
    memories: tuple[_Part, ...]
    sensors: tuple[_Part, ...]


class Sysman:
    """Sysman, started where it can be. Every method answers None for what it does not know."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._zes: ModuleType
        self._handles: dict[str, Any] = {}
        self._cards: dict[str, _Card] = {}
        self._meters: dict[tuple[str, int | None, int], Meter] = {}
        self._starting = Starting("sysman", self._load)
        self.used = False

    def start(self) -> None:
        """Load it and open every card, which would wake one that sleeps; only the first call does anything."""
        self._starting.begin()

    @property
    def serves(self) -> bool:
        """It has started."""
        return self._starting.done

    @property
    def absent(self) -> str:
        """Why it cannot be loaded; empty while it serves or has not been tried."""
        return self._starting.absent

    def utilization(self, address: str, tile: int | None = WHOLE) -> float | None:
        """The busy share of all engines since the reading before; of a card of several tiles their mean, as xpu-smi has
        it. Source: ``zesEngineGetActivity`` of the group of all engines, which not every driver has.
        """
        shares = [
            None if counters is None else self._meters.setdefault((address, tile, place), Meter()).percent(*counters)
            for place, part in enumerate(self._card(address).engines)
            if tile is WHOLE or part.tile == tile
            for counters in (self._activity(part),)
        ]
        known = [value for value in shares if value is not None]
        return sum(known) / len(known) if known and len(known) == len(shares) else None

    def memory(self, address: str, tile: int | None = WHOLE) -> tuple[int | None, int | None, int | None]:
        """Free, used and total bytes of the modules on the card; total is unknown where the driver says 0.

        Source: ``zesMemoryGetState``: its size is what can be allocated, and what is not free of it is used. A driver
        that may not count says that all is free, which no card is.
        """
        modules = [part for part in self._card(address).memories if tile is WHOLE or part.tile == tile]
        states = [self._memory_state(part) for part in modules]
        if not states or None in states:
            return None, None, None
        free = sum(state[0] for state in states if state)
        size = sum(state[1] for state in states if state)
        total = sum(part.size for part in modules) if all(part.size for part in modules) else None
        return (free, size - free, total) if free < size else (None, None, total)

    def temperature(self, address: str, tile: int | None = WHOLE) -> float | None:
        """Of :meth:`sensor`, in degrees; of a card of several tiles the hottest."""
        values = []
        for part in self._temperatures(address, tile):
            value = ctypes.c_double()
            answered = self._ask(self._zes.zesTemperatureGetState, part.handle, ctypes.byref(value))
            values.append(units.celsius(value.value) if answered else None)
        known = [value for value in values if value is not None]
        return max(known, default=None) if len(known) == len(values) else None

    def sensor(self, address: str) -> str:
        """Which temperature the card has: ``gpu``, ``global``, or none."""
        kinds = {part.kind for part in self._temperatures(address, WHOLE)}
        return next((name for kind, name in _TEMPERATURES if kind in kinds), "")

    def total_bytes(self, address: str) -> int | None:
        """The card's memory, as far as the driver tells."""
        sizes = [part.size for part in self._card(address).memories]
        return sum(sizes) if sizes and all(sizes) else None

    def counts(self, address: str) -> bool:
        """The card was looked up, and has counters of its engines."""
        return address in self._cards and bool(self._cards[address].engines)

    def has_memory(self, address: str) -> bool:
        """The card was looked up, and has memory of its own that Sysman knows of."""
        return address in self._cards and bool(self._cards[address].memories)

    def _temperatures(self, address: str, tile: int | None) -> list[_Part]:
        sensors = [part for part in self._card(address).sensors if tile is WHOLE or part.tile == tile]
        found = ([part for part in sensors if part.kind == kind] for kind, _ in _TEMPERATURES)
        return next((parts for parts in found if parts), [])

    def _activity(self, part: _Part) -> tuple[int, int] | None:
        stats = self._zes.zes_engine_stats_t()
        answered = self._ask(self._zes.zesEngineGetActivity, part.handle, ctypes.byref(stats))
        return (stats.activeTime, stats.timestamp) if answered else None

    def _memory_state(self, part: _Part) -> tuple[int, int] | None:
        state = self._zes.zes_mem_state_t()
        state.stype = self._zes.ZES_STRUCTURE_TYPE_MEM_STATE
        if not self._ask(self._zes.zesMemoryGetState, part.handle, ctypes.byref(state)):
            return None
        free, size = units.byte_count(state.free), units.memory_size(state.size)
        return None if free is None or size is None or free > size else (free, size)

    def _card(self, address: str) -> _Card:
        """The card's handles, looked up in its own lane: a card that hangs holds up no other."""
        if not self.serves or address not in self._handles:
            return _Card((), (), ())
        self.used = True
        if address not in self._cards:
            self._cards[address] = self._look_up(self._handles[address])
        return self._cards[address]

    def _look_up(self, device: Any) -> _Card:
        zes = self._zes
        engines = [
            _Part(found.type, _tile(found), handle)
            for handle, found in self._parts(
                device,
                zes.zesDeviceEnumEngineGroups,
                zes.zesEngineGetProperties,
                (zes.zes_engine_handle_t, zes.zes_engine_properties_t, zes.ZES_STRUCTURE_TYPE_ENGINE_PROPERTIES),
            )
            if found.type == _ALL_ENGINES
        ]
        memories = [
            _Part(found.location, _tile(found), handle, units.memory_size(found.physicalSize) or 0)
            for handle, found in self._parts(
                device,
                zes.zesDeviceEnumMemoryModules,
                zes.zesMemoryGetProperties,
                (zes.zes_mem_handle_t, zes.zes_mem_properties_t, zes.ZES_STRUCTURE_TYPE_MEM_PROPERTIES),
            )
            if found.location == _ON_DEVICE
        ]
        sensors = [
            _Part(found.type, _tile(found), handle)
            for handle, found in self._parts(
                device,
                zes.zesDeviceEnumTemperatureSensors,
                zes.zesTemperatureGetProperties,
                (zes.zes_temp_handle_t, zes.zes_temp_properties_t, zes.ZES_STRUCTURE_TYPE_TEMP_PROPERTIES),
            )
        ]
        return _Card(tuple(engines), tuple(memories), tuple(sensors))

    def _parts(
        self, device: Any, enumerate_: Callable[..., int], describe: Callable[..., int], types: tuple[Any, Any, int]
    ) -> Iterator[tuple[Any, Any]]:
        """Each handle with its properties; none where the driver offers no such parts."""
        handle_type, struct, kind = types
        for handle in self._listed(handle_type, enumerate_, device):
            properties = struct()
            properties.stype = kind
            if self._ask(describe, handle, ctypes.byref(properties)):
                yield handle, properties

    def _listed(self, handle_type: Any, enumerate_: Callable[..., int], *owner: Any) -> list[Any]:
        """Level Zero tells how many there are, then fills an array of as many."""
        count = ctypes.c_uint32(0)
        if not self._ask(enumerate_, *owner, ctypes.byref(count), None) or not count.value:
            return []
        array = (handle_type * count.value)()
        if not self._ask(enumerate_, *owner, ctypes.byref(count), array):
            return []
        return [handle_type(array[place].value) for place in range(count.value)]

    def _ask(self, call: Callable[..., int], *arguments: Any) -> bool:
        """Whether the call has answered; False where the card has no such thing, or this user may not ask.

        Raises ``DeviceLost``, ``DeviceAsleep`` and ``DeviceFault``.
        """
        result = call(*arguments)
        what = f"{call.__name__}: {result:#x}"
        if result in _LOST:
            raise DeviceLost(what)
        if result == _ASLEEP:
            raise DeviceAsleep(what)
        if result and result not in _NOT_OFFERED:
            raise DeviceFault("driver-error", what)
        return result == 0

    # --- the start, in a thread of its own

    def _load(self) -> None:
        self._zes = zes = load(PACKAGE, EXTRA, STEM, self._places.library or LOADER)
        try:
            self._ask(zes.zesInit, 0)
            for driver in self._listed(zes.zes_driver_handle_t, zes.zesDriverGet):
                for device in self._listed(zes.zes_device_handle_t, zes.zesDeviceGet, driver):
                    self._handles[self._address(device)] = device
        except AttributeError as error:
            raise LibraryAbsentError(f"the Level Zero loader is older than Sysman's own start: {error}") from error
        except (DeviceFault, DeviceLost, DeviceAsleep) as error:
            raise LibraryAbsentError(f"Level Zero Sysman does not start: {error.detail}") from error

    def _address(self, device: Any) -> str:
        properties = self._zes.zes_pci_properties_t()
        properties.stype = self._zes.ZES_STRUCTURE_TYPE_PCI_PROPERTIES
        self._ask(self._zes.zesDevicePciGetProperties, device, ctypes.byref(properties))
        place = properties.address
        return f"{place.domain:04x}:{place.bus:02x}:{place.device:02x}.{place.function:x}"


def _tile(properties: Any) -> int | None:
    return int(properties.subdeviceId) if properties.onSubdevice else None
