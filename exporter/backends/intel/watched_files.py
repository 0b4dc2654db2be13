"""Reads what a card's driver publishes for operators in hwmon and sysfs: power, clocks, fans and the like.

A file that cannot be read costs its own reading. One of them may say that there is no such device while all others are
read: xe answers so where the firmware does not know what it is asked. So none of them says that the card is gone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from exporter import units
from exporter.backends.intel.layout import Layout, Looking, Throttle
from exporter.backends.intel.taking import Given, Taking
from exporter.backends.kernel_files import device_folder, number
from exporter.errors import DeviceFault, DeviceLost
from exporter.model import Device

CONSTANT = frozenset({"clock_maximum"})
"""What a driver has noted when it took the card, and tells whether the card answers or not."""

# Drivers add their files one after the other, so what was found is looked at again soon, and later now and then.
_SOON_LOOKS, _AGAIN_AFTER_SECONDS = 3, 60.0


class EnergyMeter:
    """A counter of energy, and the power that it shows over the time between two readings."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._fallen = False

    def given(self, microjoules: int, seconds: float) -> tuple[Given, Given]:
        """The energy and the power. A counter that has gone back tells neither until the next reading says that it
        stays there: some drivers' counters dive for one reading (intel/compute-runtime#938). No power is known at
        first, and while the counter stands, as no card that is awake draws nothing.
        """
        before = self._last
        self._fallen = before is not None and microjoules < before[0] and not self._fallen
        if self._fallen:
            return Given("energy", None), Given("power", None)
        self._last, watts = (microjoules, seconds), None
        if before is not None and microjoules > before[0] and seconds > before[1]:
            watts = units.microwatts((microjoules - before[0]) / (seconds - before[1]))
        return Given("energy", units.microjoules(microjoules)), Given("power", watts)


class _Card:
    """What is kept of a card: where its files are, and its counters as last read, by tile."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation, self.looks, self.looked_at = incarnation, 0, 0.0
        self.layout = Layout()
        self.meters: dict[int | None, EnergyMeter] = {}


class WatchedFiles:
    """Keeps each card's layout, and its energy from one cycle to the next."""

    def __init__(self, sysfs: str) -> None:
        self._sysfs = sysfs
        self._cards: dict[str, _Card] = {}

    def look(self, device: Device, incarnation: int) -> None:
        """Find the card's files, where they are not known, or were looked for long ago."""
        address = device.pci_bus_id
        card = self._cards.get(address)
        if card is None or card.incarnation != incarnation:
            card = self._cards[address] = _Card(incarnation)
        now = time.monotonic()
        soon = card.looks < _SOON_LOOKS or not card.layout.whole
        if soon or now - card.looked_at > _AGAIN_AFTER_SECONDS:
            card.layout = Looking(device_folder(self._sysfs, address), device.tiles).layout()
            card.looks, card.looked_at = card.looks + 1, now

    def take(self, taking: Taking, address: str) -> None:
        """What changes, as far as it is wanted."""
        card = self._cards[address]
        self._numbers(taking, card.layout, constant=False)
        if taking.wants("energy", "power"):
            self._energy(taking, card)
        if taking.wants("throttled"):
            throttles = [each for each in card.layout.throttles if taking.tile is None or each.tile == taking.tile]
            taking.attempt(("throttled",), lambda: _throttled(throttles))

    def take_constants(self, taking: Taking, address: str) -> None:
        """What does not change."""
        self._numbers(taking, self._cards[address].layout, constant=True)

    def forget(self, address: str) -> None:
        """The next reading of the card's energy is the first."""
        card = self._cards.get(address)
        if card is not None:
            card.meters.clear()

    def _numbers(self, taking: Taking, layout: Layout, *, constant: bool) -> None:
        for file in layout.files:
            if file.tile != taking.tile or (file.metric in CONSTANT) != constant or not taking.wants(file.metric):
                continue
            value = taking.number(file.metric, file.path)
            taking.given.append(Given(file.metric, None if value is None else file.convert(value), file.labels))

    def _energy(self, taking: Taking, card: _Card) -> None:
        """A counter of 0 is one that does not count. The time is that of the clock beside it."""
        energy = next((each for each in card.layout.energies if each.tile == taking.tile), None)
        value = None if energy is None else taking.number("energy, power", energy.path)
        if value is None or value <= 0:
            return
        meter = card.meters.setdefault(taking.tile, EnergyMeter())
        taking.given += meter.given(value, time.monotonic())


def _throttled(throttles: list[Throttle]) -> Iterator[Given]:
    """Whether any of the GTs is held down, by reason. While one is not, which its one file says, no other is read."""
    found: dict[str, bool] = {}
    for throttle in throttles:
        held = not throttle.status or _flag(throttle.status)
        if held is None:
            continue
        flags = {path: _flag(path) if held else False for _, path in throttle.reasons}
        if len(flags) > 1 and all(flags.values()):  # a card that has gone answers with nothing but ones
            continue
        for word, path in throttle.reasons:
            value = flags[path]
            if value is not None:
                found[word] = found.get(word, False) or value
    for word, is_held in found.items():
        yield Given("throttled", float(is_held), (word,))


def _flag(path: str) -> bool | None:
    """Raises ``DeviceFault``."""
    try:
        value = number(path)
    except DeviceLost:
        return None
    if value is not None and value not in (0, 1):
        raise DeviceFault("driver-error", f"{path}: found {value}, expected 0 or 1")
    return None if value is None else bool(value)
