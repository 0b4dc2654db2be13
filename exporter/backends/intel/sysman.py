"""Intel's Level Zero Sysman through ``pyzes``, where its loader and a driver are installed.

The binding asks for one path that is written into its source; the loader is looked for where the settings say, else by
its name, as the system's dynamic loader finds it. ``zesInit`` opens every card, so it waits until none sleeps.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from exporter import units
from exporter.backends.base import Places
from exporter.backends.intel.sysman_calls import Calls
from exporter.backends.meter import Meter
from exporter.backends.vendor_library import LibraryAbsentError, Starting, load
from exporter.errors import DeviceAsleep, DeviceFault, DeviceLost

PACKAGE, EXTRA, STEM, LOADER = "pyzes", "gpu-fleet-exporter[intel]", "ze_loader", "libze_loader.so.1"

_LOST = (0x70000001, 0x70000006)  # device lost, device requires reset
_ASLEEP = 0x70000007
_NO_PERMISSION = 0x70010000
_NOT_NOW = 0x70010001  # not available: also of what another program has for itself
# Dependency unavailable, unsupported version or feature; and no permission, for which a hint speaks.
_NOT_OFFERED = (_NOT_NOW, 0x70020000, 0x78000002, 0x78000003, _NO_PERMISSION)

# The sensor of the GPU itself, else the hottest of all.
_TEMPERATURES = ((1, "gpu"), (0, "global"))
_ALL_ENGINES = 0
_ON_DEVICE = 1

WHOLE = None
"""In place of a tile's number: the whole card."""


class Part(NamedTuple):
    """A handle of a card's engine group, memory module, sensor or the like; ``tile`` is None where it is the whole
    card's. ``most`` is what its properties say of a limit, in Sysman's unit.
    """

    kind: int
    tile: int | None
    handle: Any
    size: int = 0
    most: float = 0.0


def tile_of(properties: Any) -> int | None:
    """The number of the tile that a part is of; None where it is the card's."""
    return int(properties.subdeviceId) if properties.onSubdevice else None


class Kind(NamedTuple):
    """How the parts of one kind are found: Level Zero's names, and what the properties say of a part.

    ``extension`` is the struct that is filled beside the properties, and its type, for drivers that know it.
    """

    enumerate: str
    describe: str
    handle: str
    properties: str
    stype: str
    part: Callable[..., Part | None]
    extension: tuple[str, str] | None = None


def _engine(found: Any, handle: Any) -> Part | None:
    return Part(found.type, tile_of(found), handle) if found.type == _ALL_ENGINES else None


def _memory(found: Any, handle: Any) -> Part | None:
    size = units.memory_size(found.physicalSize) or 0
    return Part(found.location, tile_of(found), handle, size) if found.location == _ON_DEVICE else None


def _sensor(found: Any, handle: Any) -> Part | None:
    return Part(found.type, tile_of(found), handle)


_ENGINES = Kind(
    "zesDeviceEnumEngineGroups",
    "zesEngineGetProperties",
    "zes_engine_handle_t",
    "zes_engine_properties_t",
    "ZES_STRUCTURE_TYPE_ENGINE_PROPERTIES",
    _engine,
)
MEMORIES = Kind(
    "zesDeviceEnumMemoryModules",
    "zesMemoryGetProperties",
    "zes_mem_handle_t",
    "zes_mem_properties_t",
    "ZES_STRUCTURE_TYPE_MEM_PROPERTIES",
    _memory,
)
SENSORS = Kind(
    "zesDeviceEnumTemperatureSensors",
    "zesTemperatureGetProperties",
    "zes_temp_handle_t",
    "zes_temp_properties_t",
    "ZES_STRUCTURE_TYPE_TEMP_PROPERTIES",
    _sensor,
)


class Sysman:
    """Sysman, started where it can be. Every method answers None for what it does not know."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self.zes: Calls
        self._handles: dict[str, Any] = {}
        self._nameless: list[Any] = []
        self._parts: dict[tuple[str, Kind], tuple[Part, ...]] = {}
        self._meters: dict[str, dict[tuple[int | None, int], Meter]] = {}
        self._silent: set[str] = set()
        self._lane = threading.local()
        self._starting = Starting("sysman", self._load, cautious=places.cautious)
        self._begun = self._knows = False

    def start(self) -> None:
        """Load it and open every card, which would wake one that sleeps; only the first call does anything."""
        self._begun = True
        self._starting.begin()

    @property
    def used(self) -> bool:
        """It holds cards as they were when it was started, or is about to; one that comes later it does not find."""
        return self._begun and not self.absent and (self._knows or not self.serves)

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
        meters = self._meters.setdefault(address, {})
        counters = [self._activity(part) for part in self.parts(address, _ENGINES, tile)]
        if tile is WHOLE:
            (self._silent.add if None in counters else self._silent.discard)(address)
        shares = [
            pair and meters.setdefault((tile, place), Meter()).percent(*pair) for place, pair in enumerate(counters)
        ]
        known = [value for value in shares if value is not None]
        return sum(known) / len(known) if known and len(known) == len(shares) else None

    def memory(self, address: str, tile: int | None = WHOLE) -> tuple[int | None, int | None, int | None]:
        """Free, used and total bytes of the modules on the card; total is unknown where the driver says 0.

        Source: ``zesMemoryGetState``: its size is what can be allocated, and what is not free of it is used. A driver
        that may not count says that all is free, which no card is.
        """
        modules = self.parts(address, MEMORIES, tile)
        states = [state for state in map(self._memory_state, modules) if state]
        total = sum(part.size for part in modules) if all(part.size for part in modules) else None
        if not modules:
            return None, None, None
        if len(states) < len(modules) or any(free == size for free, size in states):
            return None, None, total
        free = sum(free for free, _ in states)
        return free, sum(size for _, size in states) - free, total

    def temperature(self, address: str, tile: int | None = WHOLE) -> float | None:
        """Of :meth:`sensor`, in degrees; of a card of several tiles the hottest."""
        values = []
        for part in self._temperatures(address, tile):
            value = ctypes.c_double()
            answered = self.ask(self.zes.zesTemperatureGetState, part.handle, ctypes.byref(value))
            values.append(units.celsius(value.value) if answered else None)
        known = [value for value in values if value is not None]
        return max(known, default=None) if len(known) == len(values) else None

    def sensor(self, address: str) -> str:
        """Which temperature the card has: ``gpu``, ``global``, or none."""
        kinds = {part.kind for part in self._temperatures(address, WHOLE)}
        return next((name for kind, name in _TEMPERATURES if kind in kinds), "")

    def total_bytes(self, address: str) -> int | None:
        """The card's memory, as far as the driver tells."""
        sizes = [part.size for part in self.parts(address, MEMORIES, WHOLE)]
        return sum(sizes) if sizes and all(sizes) else None

    def counts(self, address: str) -> bool:
        """The card was looked up, has counters of its engines, and tells them."""
        return bool(self._parts.get((address, _ENGINES))) and address not in self._silent

    def has_memory(self, address: str) -> bool:
        """The card was looked up, and has memory of its own that Sysman knows of."""
        return bool(self._parts.get((address, MEMORIES)))

    def forget(self, address: str) -> None:
        """The next reading of the card's counters is the first."""
        self._meters.pop(address, None)

    def lose(self, address: str) -> None:
        """The card has left: its handles are no other card's. Those of the others hold."""
        self._handles.pop(address, None)

    def _temperatures(self, address: str, tile: int | None) -> list[Part]:
        sensors = self.parts(address, SENSORS, tile)
        found = ([part for part in sensors if part.kind == kind] for kind, _ in _TEMPERATURES)
        return next((parts for parts in found if parts), [])

    def _activity(self, part: Part) -> tuple[int, int] | None:
        stats = self.zes.zes_engine_stats_t()
        answered = self.ask(self.zes.zesEngineGetActivity, part.handle, ctypes.byref(stats))
        return (stats.activeTime, stats.timestamp) if answered else None

    def _memory_state(self, part: Part) -> tuple[int, int] | None:
        state = self.zes.zes_mem_state_t()
        state.stype = self.zes.ZES_STRUCTURE_TYPE_MEM_STATE
        if not self.ask(self.zes.zesMemoryGetState, part.handle, ctypes.byref(state)):
            return None
        free, size = units.byte_count(state.free), units.memory_size(state.size)
        return None if free is None or size is None or free > size else (free, size)

    def parts(self, address: str, kind: Kind, tile: int | None) -> Sequence[Part]:
        """The parts of the card, or of one of its tiles; those of its tiles where the whole card has none."""
        found = self.all_parts(address, kind)
        return [part for part in found if part.tile == tile] or (found if tile is WHOLE else ())

    def all_parts(self, address: str, kind: Kind) -> Sequence[Part]:
        """The card's and its tiles'. They are looked up in the card's own lane: one that hangs holds up no other.

        What is not to be had now is asked for again in the next cycle; else they stay as they are.
        """
        if not self.serves:
            return ()
        if address not in self._handles:
            self._ask_nameless()
        if address not in self._handles:
            return ()
        if (address, kind) not in self._parts:
            self._lane.not_now = False
            try:
                found = tuple(self._look_up(self._handles[address], kind))
            except AttributeError:  # the loader is older than these calls
                found = ()
            if self._lane.not_now:  # what there is of them may not be all
                return ()
            self._parts[address, kind] = found
        return self._parts[address, kind]

    def _look_up(self, device: Any, kind: Kind) -> Iterator[Part]:
        """None where the driver offers no such parts."""
        name = functools.partial(getattr, self.zes)
        for handle in self.listed(name(kind.handle), name(kind.enumerate), device):
            properties = name(kind.properties)()
            properties.stype = name(kind.stype)
            more = () if kind.extension is None else (self._extended(properties, *kind.extension),)
            if self.ask(name(kind.describe), handle, ctypes.byref(properties)):
                part = kind.part(properties, handle, *more)
                if part is not None:
                    yield part

    def _extended(self, properties: Any, struct: str, stype: str) -> Any:
        extension = getattr(self.zes, struct)()
        extension.stype = getattr(self.zes, stype)
        properties.pNext = ctypes.cast(ctypes.byref(extension), ctypes.c_void_p)
        return extension

    def listed(self, handle_type: Any, enumerate_: Callable[..., int], *owner: Any) -> list[Any]:
        """Level Zero tells how many there are, then fills an array of as many."""
        count = ctypes.c_uint32(0)
        if not self.ask(enumerate_, *owner, ctypes.byref(count), None) or not count.value:
            return []
        array = (handle_type * count.value)()
        if not self.ask(enumerate_, *owner, ctypes.byref(count), array):
            return []
        return [handle_type(array[place].value) for place in range(count.value)]

    def ask(self, call: Callable[..., int], *arguments: Any) -> bool:
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
        if result == _NOT_NOW:
            self._lane.not_now = True
        return result == 0

    # --- the start, in a thread of its own

    def _load(self) -> None:
        self.zes = zes = Calls(load(PACKAGE, EXTRA, STEM, self._places.shared_object or LOADER))
        try:
            self.ask(zes.zesInit, 0)
            drivers = self.listed(zes.zes_driver_handle_t, zes.zesDriverGet)
        except AttributeError as error:
            raise LibraryAbsentError(f"the Level Zero loader is older than Sysman's own start: {error}") from error
        except (DeviceFault, DeviceLost, DeviceAsleep) as error:
            raise LibraryAbsentError(f"Level Zero Sysman does not start: {error.detail}") from error
        for driver in drivers:
            with contextlib.suppress(DeviceFault, DeviceLost, DeviceAsleep):  # its cards are not known, others are
                self._take(self.listed(zes.zes_device_handle_t, zes.zesDeviceGet, driver))

    def _take(self, devices: Iterable[Any]) -> None:
        for device in devices:
            self._knows = True
            try:
                self._handles[self._address(device)] = device
            except (DeviceFault, DeviceLost, DeviceAsleep):
                self._nameless.append(device)

    def _ask_nameless(self) -> None:
        """Those that did not say where they are do so once their fault has passed. Beside the lanes: they may hang."""
        devices, self._nameless = self._nameless, []
        try:
            if devices:
                threading.Thread(target=self._take, args=(devices,), name="sysman-again", daemon=True).start()
        except RuntimeError:  # as many threads as this process may have: another time
            self._nameless += devices

    def _address(self, device: Any) -> str:
        properties = self.zes.zes_pci_properties_t()
        properties.stype = self.zes.ZES_STRUCTURE_TYPE_PCI_PROPERTIES
        if not self.ask(self.zes.zesDevicePciGetProperties, device, ctypes.byref(properties)):
            raise DeviceLost("it does not say where it is")
        place = properties.address
        return f"{place.domain:04x}:{place.bus:02x}:{place.device:02x}.{place.function:x}"
