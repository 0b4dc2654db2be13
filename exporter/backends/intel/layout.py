"""Where the files of an Intel card are that tell what operators watch: i915's and xe's hwmon, and a folder for each GT.

A GT is a set of engines with a clock of its own: xe's are ``tileN/gtM``, of which ``gtidle/name`` ends in ``-rc`` for
the engines of graphics and compute, and in ``-mc`` for those of media. I915 numbers them below the DRM device: one for
each tile of a card that can have several, and of any other card ``gt0`` for graphics and ``gt1`` for media.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from exporter import units
from exporter.backends.kernel_files import names, text
from exporter.errors import DeviceFault, DeviceLost

# The drivers' words for what holds a GT's clocks down. PL1 is the sustained power limit, which gpu_power_limit_watts
# shows, PL2 that of a burst, PL4 that of a peak; RATL is the running average of the temperature.
REASONS = {
    "pl1": "power-cap",
    "pl2": "power-burst",
    "pl4": "power-peak",
    "thermal": "hardware-thermal",
    "prochot": "processor-hot",
    "ratl": "average-thermal",
    "vr_thermalert": "regulator-thermal",
    "vr_tdc": "regulator-current",
    "soc_thermal": "chip-thermal",
    "soc_avg_thermal": "chip-average-thermal",
    "mem_thermal": "memory-thermal",
    "vr_thermal": "regulator-thermal",
    "iccmax": "current-peak",
    "fastvmode": "voltage-droop",
    "psys_pl1": "platform-power-cap",
    "psys_pl2": "platform-power-burst",
    "psys_crit": "platform-power-critical",
    "p0_freq": "clock-maximum",
}

_SENSORS = {"pkg": "gpu", "": "gpu", "vram": "memory"}
_THRESHOLDS = {"crit": "critical", "emergency": "shutdown", "max": "maximum"}
_CHANNELS = ("card", "", "pkg")  # what has no label is the card's
_ATTRIBUTE = re.compile(r"(energy|fan|in|power|temp)([0-9]+)_(\w+)", re.ASCII)
_OF_GT = re.compile(r"i915_gt([0-9]+)")


class File(NamedTuple):
    """A metric's number in one file, of the card or of its ``tile``; ``labels`` are those of the metric's own."""

    metric: str
    path: str
    convert: Callable[[int], float | None]
    labels: tuple[str, ...] = ()
    tile: int | None = None


class Throttle(NamedTuple):
    """What holds a GT's clocks down: a file that says whether anything does, and one for each reason, by its name."""

    status: str
    reasons: tuple[tuple[str, str], ...]
    tile: int | None


class Energy(NamedTuple):
    """A counter of microjoules."""

    path: str
    tile: int | None = None


class Layout(NamedTuple):
    """All of a card's files. ``whole``: nothing was missed because it could not be read."""

    files: tuple[File, ...] = ()
    energies: tuple[Energy, ...] = ()
    throttles: tuple[Throttle, ...] = ()
    whole: bool = False


def above_zero(convert: Callable[[float], float | None]) -> Callable[[float], float | None]:
    """As ``convert``, of numbers where 0 says that there is none, as of a power limit that is switched off."""

    def converted(value: float) -> float | None:
        return convert(value) if value > 0 else None

    return converted


class Looking:
    """One look at the folder of a card with so many tiles, None where that is not known."""

    def __init__(self, folder: str, tiles: int | None) -> None:
        self._folder, self._tiles = folder, tiles
        self._whole = True

    def layout(self) -> Layout:
        """What there is."""
        files: list[File] = []
        energies: list[Energy] = []
        for monitor in names(f"{self._folder}/hwmon"):
            path = f"{self._folder}/hwmon/{monitor}"
            of_gt = _OF_GT.fullmatch(self._text(f"{path}/name"))
            found = _Monitor(path, self)
            if of_gt is not None:
                energies += found.energies(int(of_gt[1]))
                continue
            energies += found.energies(None)
            files += found.files()
        gts = list(self._gts())
        files += [file for gt in gts for file in gt.files]
        return Layout(tuple(files), tuple(energies), tuple(each for gt in gts for each in gt.throttles), self._whole)

    def _text(self, path: str) -> str:
        """Empty where there is no such file."""
        try:
            return text(path) or ""
        except (DeviceFault, DeviceLost):
            self._whole = False
            return ""

    label = _text

    def _gts(self) -> Iterator[_Gt]:
        yield from self._of_xe()
        for card in _numbered(self._folder + "/drm", "card"):
            found = _numbered(f"{self._folder}/drm/card{card}/gt", "gt")
            yield from (self._of_i915(f"{self._folder}/drm/card{card}/gt/gt{number}", number) for number in found)

    def _of_xe(self) -> Iterator[_Gt]:
        for tile in _numbered(self._folder, "tile"):
            for number in _numbered(f"{self._folder}/tile{tile}", "gt"):
                folder = f"{self._folder}/tile{tile}/gt{number}"
                kind = {"rc": "graphics", "mc": "media"}.get(self._text(f"{folder}/gtidle/name").rpartition("-")[2], "")
                clocks = (f"{folder}/freq0/act_freq", f"{folder}/freq0/rp0_freq")
                yield _gt(kind, self._tile(tile), clocks, f"{folder}/freq0/throttle", ("reason_", "status"))

    def _of_i915(self, folder: str, number: int) -> _Gt:
        several = self._tiles is not None and self._tiles > 1
        kind = "graphics" if number == 0 or several else "media" if self._tiles is not None else ""
        clocks = (f"{folder}/rps_act_freq_mhz", f"{folder}/rps_RP0_freq_mhz")
        return _gt(kind, self._tile(number), clocks, folder, ("throttle_reason_", "throttle_reason_status"))

    def _tile(self, number: int) -> int | None:
        return number if self._tiles is not None and self._tiles > 1 else None


class _Gt(NamedTuple):
    files: tuple[File, ...]
    throttles: tuple[Throttle, ...]


def _gt(kind: str, tile: int | None, clocks: tuple[str, str], folder: str, spelling: tuple[str, str]) -> _Gt:
    """The clocks of what is neither known as graphics nor as media are nobody's; what holds them down is the card's.

    ``spelling`` is how the names of the reasons' files begin, and the name of that of all of them.
    """
    prefix, status = spelling
    there = set(names(folder))
    reasons = tuple((word, f"{folder}/{prefix}{key}") for key, word in REASONS.items() if f"{prefix}{key}" in there)
    actual, highest = clocks
    files = (
        File("clock", actual, units.megahertz, (kind,), tile),
        File("clock_maximum", highest, above_zero(units.megahertz), (kind,), tile),
    )
    throttle = Throttle(f"{folder}/{status}" if status in there else "", reasons, tile)
    return _Gt(files if kind else (), (throttle,) if reasons else ())


def _numbered(folder: str, word: str) -> list[int]:
    """The numbers behind a word in a folder's names."""
    found = (re.fullmatch(rf"{word}([0-9]{{1,4}})", name) for name in names(folder))
    return sorted(int(match[1]) for match in found if match)


class _Monitor:
    """One folder of hwmon: for each kind of sensor and its number, the attributes that there are."""

    def __init__(self, path: str, looking: Looking) -> None:
        self._path, self._looking = path, looking
        self._found: dict[tuple[str, int], set[str]] = {}
        for name in names(path):
            match = _ATTRIBUTE.fullmatch(name)
            if match is not None:
                self._found.setdefault((match[1], int(match[2])), set()).add(match[3])

    def energies(self, tile: int | None) -> list[Energy]:
        """The card's counter, else its package's."""
        number = self._channel("energy", ("input",))
        return [] if number is None else [Energy(f"{self._path}/energy{number}_input", tile)]

    def files(self) -> Iterator[File]:
        """All but the energy."""
        yield from self._power()
        yield from self._temperatures()
        for kind, number in sorted(self._found):
            if kind == "fan" and "input" in self._found[kind, number]:
                yield File("fan_rotation", f"{self._path}/fan{number}_input", units.rpm, (str(number - 1),))
        voltages = [
            number for kind, number in sorted(self._found) if kind == "in" and "input" in self._found[kind, number]
        ]
        if voltages:  # i915 has it as the first, xe as the package's
            yield File("voltage", f"{self._path}/in{voltages[0]}_input", units.millivolts)

    def _power(self) -> Iterator[File]:
        """The limits are of that of which the energy is, so that they can be held against what it draws."""
        number = self._channel("energy", ("input",))
        if number is None:
            number = self._channel("power", ("max", "rated_max"))
        there: Mapping[str, str] = {"max": "power_limit", "rated_max": "power_limit_default"}
        for attribute, metric in there.items():
            if number is not None and attribute in self._found.get(("power", number), ()):
                yield File(metric, f"{self._path}/power{number}_{attribute}", above_zero(units.microwatts))

    def _temperatures(self) -> Iterator[File]:
        for kind, number in sorted(self._found):
            sensor = _SENSORS.get(self._label(kind, number)) if kind == "temp" else None
            if sensor is None:
                continue
            prefix, there = f"{self._path}/temp{number}_", self._found[kind, number]
            if sensor == "memory" and "input" in there:
                yield File("memory_temperature", f"{prefix}input", units.millidegrees)
            for attribute, threshold in _THRESHOLDS.items():
                if attribute in there:
                    path = f"{prefix}{attribute}"
                    yield File("temperature_threshold", path, units.millidegrees, (sensor, threshold))

    def _channel(self, kind: str, attributes: Sequence[str]) -> int | None:
        """The number of the card's own sensor, else of its package's."""
        having = [number for each, number in sorted(self._found) if each == kind]
        fitting = [number for number in having if not self._found[kind, number].isdisjoint(attributes)]
        labels = {number: self._label(kind, number) for number in fitting}
        ranked = [(label, number) for label in _CHANNELS for number in fitting if labels[number] == label]
        return ranked[0][1] if ranked else None

    def _label(self, kind: str, number: int) -> str:
        """Empty where the driver gives none; what cannot be read fits nothing."""
        if "label" not in self._found[kind, number]:
            return ""
        return self._looking.label(f"{self._path}/{kind}{number}_label") or "?"
