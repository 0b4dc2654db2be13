"""Intel: the files that the kernel publishes, Level Zero Sysman where it is installed, and ``intel_gpu_top`` last.

xe and i915 say in sysfs and hwmon who a card is and how hot; what it does is told by its clients, or by Sysman, which
alone knows the memory. A value that the kernel publishes is taken from there; each further source is asked where those
before it say nothing, and where all are silent a hint says what would bring the value.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from exporter import pci
from exporter.backends import kernel_files
from exporter.backends.base import Note, Places, Sampled, Use
from exporter.backends.intel.families import Family, family_of
from exporter.backends.intel.sources import Sources, Values
from exporter.backends.intel.watched import Watched
from exporter.backends.kernel_files import Bus, device_folder, names, number
from exporter.backends.pci_names import name_of
from exporter.catalog import DEFAULT
from exporter.errors import BackendAbsent, DeviceAsleep, DeviceFault, DeviceLost
from exporter.inventory import narrowed
from exporter.model import Device, DeviceKey, Fault, Hint, Reading

VENDOR = "intel"
DRIVERS = ("xe", "i915")

_FIRST_INTEGRATED = "0000:00:02.0"  # reserved for it on Intel's processors
_PACKAGE = "pkg"
_PATIENCE_SECONDS = 60.0


class Card(NamedTuple):
    """A card that a driver of the host serves. ``incarnation`` is another one when it was away meanwhile."""

    address: str
    driver: str
    physical_index: int
    incarnation: int

    @property
    def who(self) -> tuple[str, str, int]:
        """The card without its number, which changes when another leaves."""
        return self.address, self.driver, self.incarnation


class _Facts(NamedTuple):
    """What does not change while a card is there, except that Sysman and a driver's sensors may come later."""

    card: Card
    name: str
    minor_number: int | None
    memory_total_bytes: int | None = None
    temperature_path: str = ""
    temperature_sensor: str = ""
    tile_sensor: str = ""
    unread: DeviceFault | None = None


class Read(NamedTuple):
    """Metrics in the order of the values that one look at a card or a tile gives."""

    metrics: tuple[str, ...]
    call: Callable[[Sources, Device, _Facts], Values]


def _temperature(sources: Sources, device: Device, facts: _Facts) -> Values:
    if facts.unread and device.parent is None:
        raise facts.unread
    return sources.temperature(device, facts.temperature_path)


READS: tuple[Read, ...] = (
    Read(("utilization",), lambda sources, device, facts: sources.utilization(device, facts.card.driver)),
    Read(
        ("memory_free", "memory_used", "memory_total"),
        lambda sources, device, facts: sources.memory(device, facts.card.driver),
    ),
    Read(("temperature",), _temperature),
)


class IntelBackend:
    """A slot is a card's PCI address."""

    vendor = VENDOR

    def __init__(self, places: Places) -> None:
        self._places = places
        self._bus = Bus(places.sysfs, places.procfs, VENDOR)
        self._sources = Sources(places)
        self._watched = Watched(places, self._sources)
        self._cards: Mapping[str, Card] = {}
        self._facts: dict[str, _Facts] = {}
        self._without: dict[str, float] = {}
        self.driver_version = ""

    def open(self) -> None:
        """There is nothing that must be loaded; Sysman starts where it can, beside."""

    def close(self) -> None:
        """Nothing is held open."""

    def slots(self) -> Sequence[str]:
        """The addresses of the cards that a driver serves. Raises ``BackendAbsent`` where there is none."""
        sysfs, sysman = self._places.sysfs, self._sources.sysman
        cards = {
            address: Card(address, driver, place, kernel_files.incarnation(sysfs, address))
            for place, (address, driver) in enumerate(self._with_drm(self._bus.drivers()))
        }
        if not cards:
            raise BackendAbsent(*self._why_none())
        stayed = {card.who for card in self._cards.values()} & {card.who for card in cards.values()}
        if sysman.used and len(stayed) < len(cards):
            raise BackendAbsent("driver-mismatch", "a card has come that Level Zero was started without")
        asleep = {address for address, card in cards.items() if card.driver and pci.is_asleep(sysfs, address)}
        if not asleep:
            sysman.start()  # it opens every card, and would wake one that sleeps
        for gone in (card.address for card in self._cards.values() if card.who not in stayed):
            self._forget(gone)
            sysman.lose(gone)
        if cards != self._cards:
            self.driver_version = self._version(card.driver for card in cards.values())
        self._cards = cards
        self._sources.look_at_clients(dict(self._nodes(cards.keys() - asleep)))
        return list(cards)

    def _with_drm(self, drivers: Mapping[str, str]) -> list[tuple[str, str]]:
        """Without cards whose driver has not made a DRM device for a minute: it cannot use them, and no runtime lists
        them.
        """
        now, sysfs = time.monotonic(), self._places.sysfs
        without = [
            each for each, name in drivers.items() if name in DRIVERS and not kernel_files.incarnation(sysfs, each)
        ]
        self._without = {address: self._without.get(address, now) for address in without}
        given_up = {address for address, since in self._without.items() if now - since > _PATIENCE_SECONDS}
        return [(address, driver) for address, driver in drivers.items() if address not in given_up]

    def _why_none(self) -> tuple[str, str]:
        if any(True for _ in pci.cards(self._places.sysfs, VENDOR)):
            return "driver-not-loaded", f"no driver of this host serves an Intel card; {' and '.join(DRIVERS)} are read"
        return "no-devices", "no Intel card is on the PCI bus"

    def _version(self, drivers: Iterable[str]) -> str:
        served = sorted({driver for driver in drivers if driver in DRIVERS})
        return ", ".join(dict.fromkeys(kernel_files.driver_version(self._places.sysfs, name) for name in served))

    def _nodes(self, awake: Iterable[str]) -> Iterator[tuple[str, str]]:
        """DRM nodes with their card. A sleeping card has none: to ask what its clients did would wake it."""
        for address in awake:
            for name in names(f"{device_folder(self._places.sysfs, address)}/drm"):
                if re.fullmatch(r"(?:card|renderD)[0-9]+", name):
                    yield name, address

    def identify(self, slot: str, note: Note) -> tuple[Device, ...]:
        """The card and its tiles."""
        card = self._cards.get(slot)
        if card is None:
            return ()
        if card.driver == kernel_files.ARRIVING or (card.driver in DRIVERS and not card.incarnation):
            raise DeviceFault("starting", f"{slot}: its driver has not made a DRM device yet")
        if pci.is_asleep(self._places.sysfs, slot):
            raise DeviceAsleep(slot)
        board = self._board(card)
        note(board)
        facts = self._facts.get(slot)
        if facts is None or facts.card != card:
            facts = _Facts(card, name_of(self._places, slot), kernel_files.minor_number(self._folder(slot)))
        facts = self._facts[slot] = self._with_sensors(facts, board)
        return tuple(_with_tiles(_with_facts(board, facts), facts.tile_sensor))

    def sample(self, device: Device) -> Sampled:
        """Every row of the table that the device can give."""
        address, facts = device.pci_bus_id, self._facts[device.pci_bus_id]
        if facts.card.driver not in DRIVERS:
            detail = f"{address}: the driver {facts.card.driver} is not read, {' and '.join(DRIVERS)} are"
            return Sampled((), hints=(Hint("unsupported-driver", detail),))
        if device.parent is None:
            self._sources.begin(address)
        readings, faults = self._core(device, facts)
        taken = self._watched.take(device, facts.card.incarnation)
        trouble = kernel_files.power_faults(self._places.sysfs, address, device.key)
        readings, faults = [*readings, *taken.readings()], [*faults, *taken.faults, *trouble]
        if faults and pci.is_asleep(self._places.sysfs, address):  # since it was looked at
            raise DeviceAsleep(address)
        # What nobody wants is not missed.
        given = {reading.metric for reading in readings} | (DEFAULT - self._places.wanted)
        hints = self._sources.hints(device, given)
        pending = self._sources.pending(device, given) or taken.pending
        if readings or not faults:  # else the card says who it is, and nothing else
            more, failed = self._watched.beside(device)
            readings, faults = [*readings, *more], [*faults, *failed]
        return Sampled(tuple(readings), tuple(faults), tuple(hints), pending)

    def _core(self, device: Device, facts: _Facts) -> tuple[list[Reading], list[Fault]]:
        """What every vendor's card has."""
        readings: list[Reading] = []
        faults: list[Fault] = []
        for row in READS:
            if self._places.wanted.isdisjoint(row.metrics):
                continue
            try:
                values = row.call(self._sources, device, facts)
            except DeviceFault as fault:
                faults.append(Fault(fault.reason, f"{', '.join(row.metrics)}: {fault.detail}", device.key))
                continue
            pairs = zip(row.metrics, values, strict=True)
            readings += [Reading(metric, device.key, value) for metric, value in pairs if value is not None]
        return readings, faults

    def users(self, device: Device) -> Collection[Use] | None:
        """Those that have the card open, by their clients; which tile a client is on the drivers do not tell.

        None where some may be hidden.
        """
        facts = self._facts[device.pci_bus_id]
        if device.parent is not None or facts.card.driver not in DRIVERS:
            return None
        try:
            return self._sources.users(device.pci_bus_id)
        except DeviceFault:  # of a process's file: the others are not all
            return None

    def asleep(self, slot: str) -> tuple[Device, ...]:
        """The card as last read, or what the PCI bus knows of it without touching it."""
        card, facts = self._cards[slot], self._facts.get(slot)
        self._forget(slot)
        board = self._board(card)
        if facts is None or facts.card != card:
            minor = kernel_files.minor_number(self._folder(slot))  # a folder's name, which wakes no card
            return tuple(_with_tiles(_with_node(replace(board, name=name_of(self._places, slot)), minor)))
        return tuple(_with_tiles(_with_facts(board, facts), facts.tile_sensor))

    def _forget(self, address: str) -> None:
        """What the card has done so far says nothing of what it does next: it sleeps, or is another card."""
        self._sources.forget(address)
        self._watched.forget(address)

    # --- who a card is

    def _board(self, card: Card) -> Device:
        """What the PCI bus and the product's family say. xpu-smi numbers cards by PCI address."""
        device_id = number(f"{device_folder(self._places.sysfs, card.address)}/device", 16)
        if device_id is None:
            raise DeviceLost(f"{card.address}: it has left the bus")
        family = family_of(device_id)
        return Device(
            key=DeviceKey(VENDOR, card.address),
            physical_index=card.physical_index,
            pci_bus_id=card.address,
            tiles=self._tiles(card.address, family),
            hpc=family.hpc if family else None,
            integrated=family.integrated if family else _is_integrated(card.address),
            product_family_rank=family.rank if family else None,
            driver_library=family.driver_library if family else None,
            driver_sorts=family.sorted if family else None,
        )

    def _tiles(self, address: str, family: Family | None) -> int | None:
        """Xe has a folder for each tile; with i915 a card of a family with tiles has a GT for each."""
        folder = device_folder(self._places.sysfs, address)
        found = sum(re.fullmatch(r"tile[0-9]+", name) is not None for name in names(folder))
        if found or family is None:
            return found or None
        if not family.multi_tile:
            return 1
        cards = (name for name in names(f"{folder}/drm") if re.fullmatch(r"card[0-9]+", name))
        gts = (name for card in cards for name in names(f"{folder}/drm/{card}/gt"))
        return sum(re.fullmatch(r"gt[0-9]+", name) is not None for name in gts) or None

    def _with_sensors(self, facts: _Facts, board: Device) -> _Facts:
        """Looked for in each cycle until found. A source that fails here fails again, and says so, when it is read."""
        address, sysman = facts.card.address, self._sources.sysman
        if facts.card.driver not in DRIVERS:
            return facts
        path, unread = facts.temperature_path, None
        try:
            path = path or _temperature_path(self._folder(address))
        except DeviceFault as fault:
            unread = fault
        if facts.memory_total_bytes is None:
            with contextlib.suppress(DeviceFault):
                total = self._sources.total_bytes(board, facts.card.driver, facts.minor_number)
                facts = facts._replace(memory_total_bytes=total)
        with contextlib.suppress(DeviceFault):
            facts = facts._replace(tile_sensor=sysman.sensor(address))
        sensor = _PACKAGE if path else facts.tile_sensor
        return facts._replace(temperature_path=path, temperature_sensor=sensor, unread=unread)

    def _folder(self, address: str) -> str:
        return device_folder(self._places.sysfs, address)


def _is_integrated(address: str) -> bool | None:
    """A discrete card is behind a bridge, so never on the first bus; a virtual machine's cards may all be there."""
    if address == _FIRST_INTEGRATED:
        return True
    return None if address.startswith("0000:00:") else False


def _temperature_path(folder: str) -> str:
    """Xe labels the package's temperature; i915 has one without a label, since Linux 6.12 or so."""
    sensor = kernel_files.temperature_sensor(folder, (_PACKAGE,))
    if sensor is not None:
        return sensor.path
    monitors = (f"{folder}/hwmon/{name}" for name in names(f"{folder}/hwmon"))
    plain = (path for path in monitors if "temp1_input" in names(path) and "temp1_label" not in names(path))
    return next((f"{path}/temp1_input" for path in plain), "")


def _with_node(board: Device, minor: int | None) -> Device:
    return replace(board, minor_number=minor, opened_by=() if minor is None else (f"renderD{minor}",))


def _with_facts(board: Device, facts: _Facts) -> Device:
    return replace(
        _with_node(board, facts.minor_number),
        name=facts.name,
        memory_total_bytes=facts.memory_total_bytes,
        temperature_sensor=facts.temperature_sensor,
    )


def _with_tiles(board: Device, sensor: str = "") -> Iterator[Device]:
    """The card, and each of its tiles where it has several, with the sensor that each tile has."""
    yield board
    if board.tiles is not None and board.tiles > 1:
        for tile in range(board.tiles):
            yield replace(narrowed(board, [tile]), temperature_sensor=sensor, opened_by=board.opened_by)
