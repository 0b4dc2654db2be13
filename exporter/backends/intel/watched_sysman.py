"""What Sysman tells operators that the kernel's files do not: engines by class, hardware errors, the bandwidth of the
memory, and whatever else a driver has no file for.

Every call only asks. A call that the loader is too old for is as one that the driver does not offer.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from exporter import units
from exporter.backends.intel.sysman import MEMORIES, SENSORS, WHOLE, Kind, Part, Sysman, tile_of
from exporter.backends.intel.taking import Given
from exporter.backends.intel.watched_files import EnergyMeter
from exporter.backends.meter import Meter, share
from exporter.errors import DeviceFault

# Engine groups by class, the one that is told before those behind it: of all engines of the class, else each engine.
# The engines that decode and encode are often one, which comes as both; of those of media no driver has a sum.
_CLASSES: dict[str, tuple[int, ...]] = {
    "render": (12, 5),
    "compute": (1, 4),
    "copy": (3, 8),
    "video": (14, 6, 7),
    "video-enhance": (9,),
}
_MEDIA_ALL = 2
_GROUPS = {group for groups in _CLASSES.values() for group in groups} | {_MEDIA_ALL}

_CLOCKS = {0: "graphics", 1: "memory", 2: "media"}
_DOMAINS = (1, 0, 2)  # the card's; what a driver that knows no domains has; the package's
_SUSTAINED, _OF_POWER, _MOST_LIMITS = 1, 2, 16
_MEMORY_SENSOR, _RPM, _MICROSECONDS = 2, 0, 1e6
_CORRECTIONS = ("corrected", "uncorrected")
_BLOCKS = (
    "reset",
    "programming",
    "driver",
    "compute",
    "non-compute",
    "cache",
    "display",
    "memory",
    "scale",
    "l3-fabric",
)
_MEMORY_ERRORS, _UNTOLD = 7, 0x7FFFFFFF
_RAS_SECONDS = 2.0


def _group(found: Any, handle: Any) -> Part | None:
    return Part(found.type, tile_of(found), handle) if found.type in _GROUPS else None


def _clock(found: Any, handle: Any) -> Part | None:
    return Part(found.type, tile_of(found), handle, most=found.max) if found.type in _CLOCKS else None


def _power(found: Any, handle: Any, more: Any) -> Part | None:
    return Part(more.domain, tile_of(found), handle, most=found.defaultLimit)


def _any(found: Any, handle: Any) -> Part | None:
    return Part(getattr(found, "type", 0), tile_of(found), handle)


_ENGINES = Kind(
    "zesDeviceEnumEngineGroups",
    "zesEngineGetProperties",
    "zes_engine_handle_t",
    "zes_engine_properties_t",
    "ZES_STRUCTURE_TYPE_ENGINE_PROPERTIES",
    _group,
)
_FREQUENCIES = Kind(
    "zesDeviceEnumFrequencyDomains",
    "zesFrequencyGetProperties",
    "zes_freq_handle_t",
    "zes_freq_properties_t",
    "ZES_STRUCTURE_TYPE_FREQ_PROPERTIES",
    _clock,
)
_POWERS = Kind(
    "zesDeviceEnumPowerDomains",
    "zesPowerGetProperties",
    "zes_pwr_handle_t",
    "zes_power_properties_t",
    "ZES_STRUCTURE_TYPE_POWER_PROPERTIES",
    _power,
    ("zes_power_ext_properties_t", "ZES_STRUCTURE_TYPE_POWER_EXT_PROPERTIES"),
)
_FANS = Kind(
    "zesDeviceEnumFans",
    "zesFanGetProperties",
    "zes_fan_handle_t",
    "zes_fan_properties_t",
    "ZES_STRUCTURE_TYPE_FAN_PROPERTIES",
    _any,
)
_ERRORS = Kind(
    "zesDeviceEnumRasErrorSets",
    "zesRasGetProperties",
    "zes_ras_handle_t",
    "zes_ras_properties_t",
    "ZES_STRUCTURE_TYPE_RAS_PROPERTIES",
    _any,
)


class WatchedSysman:
    """Keeps the counters of each card from one cycle to the next."""

    def __init__(self, sysman: Sysman) -> None:
        self._sysman = sysman
        self._meters: dict[str, defaultdict[tuple[int | None, int, int], Meter]] = {}
        self._energies: dict[str, defaultdict[int | None, EnergyMeter]] = {}
        self._bandwidths: dict[str, dict[int | None, list[tuple[int, int]]]] = {}
        # Drivers were seen to mix up memory when two cards' errors are asked for at once.
        self._ras = threading.Lock()

    def engines(self, address: str, tile: int | None) -> Iterator[Given]:
        """The share of each class since the reading before; of several engines, and of several tiles, their mean."""
        parts = self._sysman.all_parts(address, _ENGINES)
        for name, groups in _CLASSES.items():
            found = next((found for group in groups if (found := _of_kind(parts, group, tile))), [])
            yield Given("engine", self._share(address, tile, found), (name,))
        if not any(_of_kind(parts, group, tile) for name in ("video", "video-enhance") for group in _CLASSES[name]):
            yield Given("engine", self._share(address, tile, _of_kind(parts, _MEDIA_ALL, tile)), ("media",))

    def clocks(self, address: str, tile: int | None) -> Iterator[Given]:
        """The clock of each domain now; -1 is not known."""
        for part in self._own(address, _FREQUENCIES, tile):
            state = self._new("zes_freq_state_t", "ZES_STRUCTURE_TYPE_FREQ_STATE")
            if self._ask("zesFrequencyGetState", part.handle, ctypes.byref(state)):
                yield Given("clock", units.megahertz(state.actual), (_CLOCKS[part.kind],))

    def highest_clocks(self, address: str, tile: int | None) -> Iterator[Given]:
        """The highest that each domain can have."""
        for part in self._own(address, _FREQUENCIES, tile):
            yield Given("clock_maximum", units.megahertz(part.most) or None, (_CLOCKS[part.kind],))

    def energy(self, address: str, tile: int | None) -> Iterator[Given]:
        """The counter, and the power that it shows by its own clock. A counter of 0 is one that does not count."""
        for part in self._power_domain(address, tile):
            counter = self._new("zes_power_energy_counter_t")
            if self._ask("zesPowerGetEnergyCounter", part.handle, ctypes.byref(counter)) and counter.energy:
                meter = self._energies.setdefault(address, defaultdict(EnergyMeter))[tile]
                yield from meter.given(counter.energy, counter.timestamp / _MICROSECONDS)

    def power_limit(self, address: str, tile: int | None) -> Iterator[Given]:
        """The sustained limit, where it is switched on."""
        for part in self._power_domain(address, tile):
            count = ctypes.c_uint32(0)
            name = "zesPowerGetLimitsExt"
            if not self._ask(name, part.handle, ctypes.byref(count), None) or not 0 < count.value <= _MOST_LIMITS:
                return
            limits = (self._sysman.zes.zes_power_limit_ext_desc_t * count.value)()
            for each in limits:
                each.stype = self._sysman.zes.ZES_STRUCTURE_TYPE_POWER_LIMIT_EXT_DESC
            if self._ask(name, part.handle, ctypes.byref(count), limits):
                yield from (
                    Given("power_limit", units.milliwatts(each.limit))
                    for each in limits[: count.value]
                    if each.level == _SUSTAINED and each.limitUnit == _OF_POWER and each.enabled and each.limit > 0
                )

    def default_limit(self, address: str, tile: int | None) -> Iterator[Given]:
        """The limit that the card came with; -1 is not known."""
        for part in self._power_domain(address, tile):
            yield Given("power_limit_default", units.milliwatts(part.most) or None)

    def fans(self, address: str, tile: int | None) -> Iterator[Given]:
        """Revolutions per minute; -1 is not known."""
        for place, part in enumerate(self._own(address, _FANS, tile)):
            speed = ctypes.c_int32(-1)
            if self._ask("zesFanGetState", part.handle, _RPM, ctypes.byref(speed)):
                yield Given("fan_rotation", units.rpm(speed.value), (str(place),))

    def memory_temperature(self, address: str, tile: int | None) -> Iterator[Given]:
        """The hottest of the memory's sensors."""
        parts = _of_kind(self._sysman.all_parts(address, SENSORS), _MEMORY_SENSOR, tile)
        values = []
        for part in parts:
            value = ctypes.c_double()
            answered = self._ask("zesTemperatureGetState", part.handle, ctypes.byref(value))
            values.append(units.celsius(value.value) if answered else None)
        known = [value for value in values if value is not None]
        if known and len(known) == len(values):
            yield Given("memory_temperature", max(known))

    def bandwidth(self, address: str, tile: int | None) -> Iterator[Given]:
        """What was read and written since the reading before, of the most that could have been."""
        counters = [self._moved(part) for part in self._sysman.parts(address, MEMORIES, tile)]
        known = [each for each in counters if each is not None]
        kept = self._bandwidths.setdefault(address, {})
        before = kept.pop(tile, None)
        if not known or len(known) < len(counters):
            return
        kept[tile] = [(moved, stamp) for moved, _, stamp in known]
        if before is None or len(before) != len(known):
            return
        pairs = list(zip(before, known, strict=True))
        spent = [now[0] - then[0] for then, now in pairs]
        most = [now[1] * (now[2] - then[1]) / _MICROSECONDS for then, now in pairs]
        if min(spent) >= 0 and min(most) > 0:
            percent = share(sum(spent), int(sum(most)))
            yield Given("memory_active", None if percent is None else percent / 100)

    def errors(self, address: str, tile: int | None) -> Iterator[Given]:
        """How often hardware failed, by category; of a card whose tiles are counted alone, the sum of theirs."""
        parts = self._sysman.parts(address, _ERRORS, tile)
        if not parts:
            return
        if not self._ras.acquire(timeout=_RAS_SECONDS):
            raise DeviceFault("hung", "zesRasGetStateExp: it has not returned for another card")
        try:
            told = [(part.kind, dict(self._counted(part))) for part in parts]
        finally:
            self._ras.release()
        for kind, name in enumerate(_CORRECTIONS):
            sets = [counts for of_kind, counts in told if of_kind == kind]
            for category in sorted(set.intersection(*(set(counts) for counts in sets))) if sets else ():
                value = float(sum(counts[category] for counts in sets))
                yield Given("ras_errors", value, (_BLOCKS[category], name))
                if category == _MEMORY_ERRORS:
                    yield Given("ecc_errors", value, (name,))

    def forget(self, address: str) -> None:
        """The next reading of the card's counters is the first."""
        for kept in (self._meters, self._energies, self._bandwidths):
            kept.pop(address, None)

    def _share(self, address: str, tile: int | None, parts: Sequence[Part]) -> float | None:
        """The mean of the parts' shares, where all are known."""
        meters = self._meters.setdefault(address, defaultdict(Meter))
        shares = []
        for place, part in enumerate(parts):
            stats = self._new("zes_engine_stats_t")
            answered = self._ask("zesEngineGetActivity", part.handle, ctypes.byref(stats))
            meter = meters[tile, part.kind, place]
            shares.append(meter.percent(stats.activeTime, stats.timestamp) if answered else None)
        known = [value for value in shares if value is not None]
        return sum(known) / len(known) / 100 if known and len(known) == len(shares) else None

    def _moved(self, part: Part) -> tuple[int, int, int] | None:
        """Bytes that were read and written, the most in a second, and the time; None where the driver does not say."""
        counters = self._new("zes_mem_bandwidth_t")
        if not self._ask("zesMemoryGetBandwidth", part.handle, ctypes.byref(counters)) or not counters.maxBandwidth:
            return None
        read, written = units.count(counters.readCounter), units.count(counters.writeCounter)
        most = units.count(counters.maxBandwidth)
        known = read is not None and written is not None and most is not None
        return (
            (counters.readCounter + counters.writeCounter, counters.maxBandwidth, counters.timestamp) if known else None
        )

    def _counted(self, part: Part) -> Iterator[tuple[int, int]]:
        """Categories and how often. What a driver has not filled in is as it was."""
        count, name = ctypes.c_uint32(0), "zesRasGetStateExp"
        if not self._ask(name, part.handle, ctypes.byref(count), None) or not count.value:
            return
        states = (self._sysman.zes.zes_ras_state_exp_t * min(count.value, len(_BLOCKS)))()
        count = ctypes.c_uint32(len(states))
        for state in states:
            state.category = _UNTOLD
        if self._ask(name, part.handle, ctypes.byref(count), states):
            for state in states:
                if 0 <= state.category < len(_BLOCKS) and units.count(state.errorCounter) is not None:
                    yield state.category, state.errorCounter

    def _power_domain(self, address: str, tile: int | None) -> Iterable[Part]:
        """The one that is the card's, or the tile's; none where several could be."""
        parts = self._own(address, _POWERS, tile)
        found = ([part for part in parts if part.kind == domain] for domain in _DOMAINS)
        first = next((each for each in found if each), [])
        return first if len(first) == 1 else ()

    def _own(self, address: str, kind: Kind, tile: int | None) -> list[Part]:
        """Parts of the card itself, or of the tile, and never a tile's for its card's."""
        return [part for part in self._sysman.all_parts(address, kind) if part.tile == tile]

    def _new(self, struct: str, stype: str = "") -> Any:
        made = getattr(self._sysman.zes, struct)()
        if stype:
            made.stype = getattr(self._sysman.zes, stype)
        return made

    def _ask(self, name: str, *arguments: Any) -> bool:
        try:
            return self._sysman.ask(getattr(self._sysman.zes, name), *arguments)
        except AttributeError:  # the loader is older than the call
            return False


def _of_kind(parts: Iterable[Part], kind: int, tile: int | None) -> list[Part]:
    """Those of the card or the tile; of a card that has none itself, those of its tiles."""
    fitting = [part for part in parts if part.kind == kind]
    own = [part for part in fitting if part.tile == tile]
    return own or (fitting if tile is WHOLE else [])


class Row(NamedTuple):
    """A call, and what it gives; it is made only where none of that has been given before."""

    metrics: tuple[str, ...]
    call: Callable[[WatchedSysman, str, int | None], Iterable[Given]]
    constant: bool = False


ROWS = (
    Row(("engine",), WatchedSysman.engines),
    Row(("clock",), WatchedSysman.clocks),
    Row(("clock_maximum",), WatchedSysman.highest_clocks, constant=True),
    Row(("energy", "power"), WatchedSysman.energy),
    Row(("power_limit",), WatchedSysman.power_limit),
    Row(("power_limit_default",), WatchedSysman.default_limit, constant=True),
    Row(("fan_rotation",), WatchedSysman.fans),
    Row(("memory_temperature",), WatchedSysman.memory_temperature),
    Row(("memory_active",), WatchedSysman.bandwidth),
    Row(("ras_errors", "ecc_errors"), WatchedSysman.errors),
)
