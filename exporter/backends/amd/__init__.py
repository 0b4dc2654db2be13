"""AMD: the files that the kernel publishes, and ``amdsmi`` for what they do not say.

Two sources behind one contract. amdgpu's own sysfs and hwmon and the KFD's topology serve every card that amdgpu
drives, consumer Radeon cards and APUs too, with no ROCm installed; they answer a failing read with an error, where
AMD's library answers 0 or the last value and success. So a value that the kernel publishes is taken from there, and
the library is asked only for one whose file does not exist: a partition's activity, a virtual function's values, and
the energy of most cards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from exporter import pci, units
from exporter.backends import kernel_files, pcie
from exporter.backends.amd import cards, reads, topology, users
from exporter.backends.amd.cards import DRIVER, VENDOR, Card, Facts
from exporter.backends.amd.given import Asked, Given
from exporter.backends.amd.reads import Read, Taking
from exporter.backends.amd.smi import Library
from exporter.backends.base import Note, Places, Sampled, Use
from exporter.backends.kernel_files import Bus, Sensors, device_folder, number, text
from exporter.backends.pci_names import name_of
from exporter.errors import BackendAbsent, DeviceAsleep, DeviceFault, DeviceLost
from exporter.model import Device, Fault, Hint

_Found = TypeVar("_Found")

NO_LIBRARY = Hint(
    "install-amd-smi",
    "utilization of partitions: the kernel publishes a whole card's alone; ROCm's amd-smi library and the extra "
    "gpu-fleet-exporter[amd] tell each partition's",
)


class _View(NamedTuple):
    """The host's cards in one cycle, by address, and why a compute node may be missing."""

    cards: Mapping[str, Card]
    trouble: str = ""


class AmdBackend:
    """A slot is a card's PCI address."""

    vendor = VENDOR

    def __init__(self, places: Places) -> None:
        self._places = places
        self._bus = Bus(places.sysfs, places.procfs, VENDOR)
        self._library = Library(places)
        self._view = _View({})
        self._read: tuple[str, tuple[str, ...]] = ("", ())
        self._topology = topology.Topology({})
        self._facts: dict[str, Facts] = {}
        self.driver_version = ""

    def open(self) -> None:
        """There is nothing that must be loaded; the library starts where it can, beside."""
        self.driver_version = kernel_files.driver_version(self._places.sysfs, DRIVER)

    def close(self) -> None:
        """Nothing is held open."""

    def slots(self) -> Sequence[str]:
        """The addresses of the cards that a driver serves. Raises ``BackendAbsent`` where there is none."""
        sysfs = self._places.sysfs
        drivers = self._bus.drivers()
        if not drivers:
            raise BackendAbsent(*self._why_none())
        served = tuple(address for address, driver in drivers.items() if driver == DRIVER)
        self._look_at_nodes(served)
        if not any(driver and pci.is_asleep(sysfs, address) for address, driver in drivers.items()):
            self._library.start()  # it opens every card, and would wake one that sleeps
        self._look_at_nodes(served)  # a card may have come meanwhile
        self._view = _View(cards.numbered(drivers, self._topology, self._is_divided), self._topology.trouble)
        for gone in self._facts.keys() - drivers.keys():
            del self._facts[gone]
        return list(drivers)

    def _look_at_nodes(self, served: tuple[str, ...]) -> None:
        """Read the topology where it may have changed, before the library is started on these cards."""
        now = (topology.generation(self._places.sysfs), served)
        if now == self._read and not self._topology.trouble:
            return
        if now != self._read:
            self._library.outdate()
        self._topology, self._read = topology.read(self._places.sysfs, served), now
        if topology.generation(self._places.sysfs) != now[0]:
            self._topology = self._topology._replace(
                trouble="the KFD's nodes changed while they were read", whole=False
            )

    def _is_divided(self, address: str) -> bool:
        """The card may have more than one compute node: it said so, or has not been looked at."""
        facts = self._facts.get(address)
        return facts is None or facts.divided

    def _why_none(self) -> tuple[str, str]:
        if any(True for _ in pci.cards(self._places.sysfs, VENDOR)):
            return "driver-not-loaded", f"no driver of this host serves an AMD card; {DRIVER} is the one that is read"
        return "no-devices", "no AMD card is on the PCI bus"

    def identify(self, slot: str, note: Note) -> tuple[Device, ...]:
        """The card and its partitions."""
        card, trouble = self._view.cards.get(slot), self._view.trouble
        if card is None:
            return ()
        if card.driver == kernel_files.ARRIVING:
            raise DeviceFault("starting", f"{slot}: no driver has taken the card yet")
        if pci.is_asleep(self._places.sysfs, slot):
            raise DeviceAsleep(slot)
        if card.driver != DRIVER:
            return self._devices(card, Facts(self._name(slot)))
        note(Device(key=card.key, physical_index=card.physical_index, pci_bus_id=slot))
        facts = self._facts_of(card)
        if not card.nodes and topology.generation(self._places.sysfs) != self._read[0]:
            raise DeviceFault("starting", f"{slot}: the KFD has other nodes by now")
        if trouble and (facts.divided or not card.nodes):
            raise DeviceFault("driver-error", trouble)
        if len(card.nodes) > 1 and not card.parted:
            raise DeviceFault("unsupported", f"{slot}: the KFD does not say which of its nodes is which partition")
        return self._devices(card, facts)

    def _devices(self, card: Card, facts: Facts) -> tuple[Device, ...]:
        if facts.divided and card.whole:  # the first of several partitions, and the only one that we may see
            card = card._replace(nodes=(card.whole._replace(partition=0),))
        sensor = facts.temperature_label
        if not sensor and card.whole and self._library.knows(card.address, card.whole.number):
            sensor = Library.sensor
        board = cards.board(card, facts, sensor)
        return (board, *cards.partitions(card, board))

    def sample(self, device: Device) -> Sampled:
        """Every row of the tables that the device can give."""
        address = device.pci_bus_id
        card, facts = self._view.cards.get(address), self._facts.get(address)
        if card is not None and card.driver != DRIVER:
            detail = f"{address}: the driver {card.driver} is not read, {DRIVER} is"
            return Sampled((), hints=(Hint("unsupported-driver", detail),))
        if card is None or facts is None:
            raise DeviceLost(f"{address}: no driver serves it any more")
        taking = Taking(device, facts, self.users)
        if device.parent is not None:
            self._take(taking, reads.PARTS)
            wanted = "utilization" in self._places.wanted
            silent = wanted and not self._library.knows(address, device.kfd_node)
            return taking.sampled((self._no_library(),) if silent else ())
        if card.physical_index is None:
            taking.faults.append(Fault("driver-error", f"physical index: {self._view.trouble}", device.key))
        self._take_card(taking)
        return taking.sampled()

    def _take_card(self, taking: Taking) -> None:
        """What the card does first: the driver's and the bus's own memory say nothing of whether it answers."""
        failed = len(taking.faults)
        self._take(taking, reads.READS)
        device = taking.device
        taking.faults += kernel_files.power_faults(self._places.sysfs, device.pci_bus_id, device.key)
        if not taking.readings and len(taking.faults) > failed:
            return
        self._take(taking, reads.KEPT)
        link = pcie.read(self._places.sysfs, device.pci_bus_id, device.key, self._places.wanted)
        taking.readings += link.readings
        taking.faults += link.faults

    def _take(self, taking: Taking, rows: Sequence[Read]) -> None:
        device, wanted = taking.device, self._places.wanted
        asked = taking.asked(device_folder(self._places.sysfs, device.pci_bus_id))
        for row in rows:
            if wanted.isdisjoint(row.metrics):
                continue
            try:
                taking.take(self._given(row, asked), wanted)
            except DeviceFault as fault:
                asked.failed.append(fault)
            if asked.failed:
                self._raise_if_asleep(device.pci_bus_id)
                taking.fail(row, asked.failed)
                asked.failed.clear()

    def _given(self, row: Read, asked: Asked) -> Iterable[Given]:
        """The kernel's. The library is asked for a whole card or a partition: it has no processor that is both."""
        given = row.kernel(asked)
        if given is None and row.fallback is not None:
            values = row.fallback(self._library, asked.device.pci_bus_id, asked.device.kfd_node)
            given = map(Given, row.metrics, values)
        return given or ()

    def _no_library(self) -> Hint:
        why = self._library.absent
        return replace(NO_LIBRARY, text=f"{NO_LIBRARY.text} ({why})") if why else NO_LIBRARY

    def _raise_if_asleep(self, address: str) -> None:
        """A card that has fallen asleep since it was looked at refuses to be read, which is no fault."""
        if pci.is_asleep(self._places.sysfs, address):
            raise DeviceAsleep(address)

    def users(self, device: Device) -> Collection[Use] | None:
        """Those of its compute node. Of a card whose partitions are devices they are not told."""
        return users.of_node(self._places.sysfs, self._topology.nodes.get(device.pci_bus_id, ()), device.kfd_node)

    def asleep(self, slot: str) -> tuple[Device, ...]:
        """The card as last read, or what the PCI bus and the KFD know of it without touching it."""
        card = self._view.cards.get(slot)
        return () if card is None else self._devices(card, self._facts.get(slot) or Facts(self._name(slot)))

    def _name(self, address: str) -> str:
        return name_of(self._places, address)

    def _facts_of(self, card: Card) -> Facts:
        """Looked up again once the card has another driver, or the KFD other nodes. Raises ``DeviceFault`` while the
        driver is still taking the card: it makes the DRM device last.
        """
        folder = device_folder(self._places.sysfs, card.address)
        since = (self._read[0], kernel_files.incarnation(self._places.sysfs, card.address))
        if not since[1]:
            raise DeviceFault("starting", f"{folder}: there is no DRM device yet")
        facts = self._facts.get(card.address)
        if facts is None or facts.since != since or not facts.complete:
            found = self._look_up(card.address, folder)
            if not found.complete:
                self._raise_if_asleep(card.address)
            facts = self._facts[card.address] = found._replace(since=since)
        return facts

    def _look_up(self, address: str, folder: str) -> Facts:
        """What cannot be read is left out, and read again in the next cycle."""
        faults: list[DeviceFault] = []
        sensors = _tried(faults, lambda: kernel_files.temperature_sensors(folder))
        monitors = _tried(faults, lambda: kernel_files.monitors(folder))
        fault = faults[0] if faults else None
        name = _tried(faults, lambda: text(f"{folder}/product_name"))
        unique_id = _tried(faults, lambda: number(f"{folder}/unique_id", 16))
        total = _tried(faults, lambda: number(f"{folder}/mem_info_vram_total"))
        mode = _tried(faults, lambda: text(f"{folder}/current_compute_partition"))
        return Facts(
            name=name or self._library.name(address) or self._name(address),
            complete=not faults and (sensors is None or sensors.trouble is None),
            unique_id=unique_id or 0,
            minor_number=kernel_files.minor_number(folder),
            memory_total_bytes=None if total is None else units.memory_size(total),
            divided=mode in cards.DIVIDED,
            sensors=sensors or Sensors(),
            monitor=monitors[0] if monitors else "",
            fault=fault,
        )


def _tried(faults: list[DeviceFault], read: Callable[[], _Found]) -> _Found | None:
    try:
        return read()
    except DeviceFault as fault:
        faults.append(fault)
        return None
