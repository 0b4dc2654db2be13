"""Everything of a card or a tile that operators watch, beside utilization, memory and temperature.

The driver's files come first, Sysman where they say nothing, and for engines the card's clients last.
"""

from __future__ import annotations

from collections.abc import Iterator

from exporter.backends import pcie
from exporter.backends.base import Places
from exporter.backends.intel.sources import Sources
from exporter.backends.intel.taking import Given, Taking
from exporter.backends.intel.watched_files import WatchedFiles
from exporter.backends.intel.watched_sysman import ROWS, WatchedSysman
from exporter.model import Device, DeviceKey, Fault, Reading


class Watched:
    """Keeps what each source keeps of each card."""

    def __init__(self, places: Places, sources: Sources) -> None:
        self._places, self._sources = places, sources
        self._files = WatchedFiles(places.sysfs)
        self._sysman = WatchedSysman(sources.sysman)
        self._metered: set[DeviceKey] = set()

    def take(self, device: Device, incarnation: int) -> Taking:
        """What tells that the device answers. Raises ``DeviceLost`` and ``DeviceAsleep``."""
        taking, address = Taking(device, self._places.wanted), device.pci_bus_id
        if device.parent is None:
            self._files.look(device, incarnation)
        self._files.take(taking, address)
        self._ask_sysman(taking, address, constant=False)
        if device.parent is None and taking.wants("engine") and not taking.gave("engine"):
            taking.attempt(("engine",), lambda: self._engines(address))
        if device.parent is None and taking.wants("processes"):
            taking.attempt(("processes",), lambda: self._processes(address))
        if taking.wants("power") and taking.gave("energy") and device.key not in self._metered:
            self._metered.add(device.key)
            taking.pending = not taking.gave("power")
        return taking

    def beside(self, device: Device) -> tuple[tuple[Reading, ...], tuple[Fault, ...]]:
        """What is there also of a card that does not answer: what its driver has noted, and the bus."""
        taking, address = Taking(device, self._places.wanted), device.pci_bus_id
        self._files.take_constants(taking, address)
        self._ask_sysman(taking, address, constant=True)
        found = pcie.NOTHING
        if device.parent is None:
            found = pcie.read(self._places.sysfs, address, device.key, self._places.wanted)
        return (*taking.readings(), *found.readings), (*taking.faults, *found.faults)

    def forget(self, address: str) -> None:
        """What the card has done so far says nothing of what it does next."""
        self._files.forget(address)
        self._sysman.forget(address)
        self._metered = {key for key in self._metered if key.identity.partition("/")[0] != address}

    def _ask_sysman(self, taking: Taking, address: str, *, constant: bool) -> None:
        for row in ROWS:
            if row.constant != constant or not taking.wants(*row.metrics) or taking.gave(*row.metrics):
                continue
            taking.attempt(row.metrics, lambda: row.call(self._sysman, address, taking.tile))  # noqa: B023  (called at once)

    def _engines(self, address: str) -> Iterator[Given]:
        for name, busy in self._sources.engines(address).items():
            yield Given("engine", busy, (name,))

    def _processes(self, address: str) -> Iterator[Given]:
        number = self._sources.processes(address)
        yield Given("processes", None if number is None else float(number))
