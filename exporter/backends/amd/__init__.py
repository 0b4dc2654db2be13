"""AMD: the files that the kernel publishes, and ``amdsmi`` for what they do not say.

Two sources behind one contract. amdgpu's own sysfs and hwmon and the KFD's topology serve every card that amdgpu
drives, consumer Radeon cards and APUs too, with no ROCm installed; they answer a failing read with an error, where
AMD's library answers 0 or the last value and success. So a value that the kernel publishes is taken from there, and
the library is asked only for one whose file does not exist: a partition's activity, or a virtual function's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from exporter import pci, units
from exporter.backends import kernel_files
from exporter.backends.amd import topology
from exporter.backends.amd.library import Library
from exporter.backends.base import Note, Places, Sampled
from exporter.backends.kernel_files import Bus, Sensor, device_folder, number, text
from exporter.backends.pci_names import name_of
from exporter.errors import BackendAbsent, DeviceAsleep, DeviceFault
from exporter.model import Device, DeviceKey, Fault, Hint, Reading

VENDOR = "amd"
DRIVER = "amdgpu"

# The first that a card has is its temperature; gpu_info says which it is.
_SENSORS = ("edge", "junction")

NO_LIBRARY = Hint(
    "install-amd-smi",
    "utilization of partitions: the kernel publishes a whole card's alone; ROCm's amd-smi library and the extra "
    "gpu-fleet-exporter[amd] tell each partition's",
)

Values = Sequence[float | None]


class Card(NamedTuple):
    """A card that a driver of the host serves, with amd-smi's number of it, or of its first partition."""

    address: str
    driver: str
    physical_index: int
    nodes: tuple[topology.Node, ...]

    @property
    def key(self) -> DeviceKey:
        """The card's own."""
        return DeviceKey(VENDOR, self.address)

    @property
    def parted(self) -> bool:
        """The card is shown to programs as its partitions."""
        return any(node.partition is not None for node in self.nodes)


class _View(NamedTuple):
    """The host's cards in one cycle, by address, and why a compute node may be missing."""

    cards: Mapping[str, Card]
    trouble: str = ""


class _Facts(NamedTuple):
    """What does not change while a card is there."""

    name: str
    unique_id: int
    minor_number: int | None
    memory_total_bytes: int | None
    sensor: Sensor | None
    sensor_label: str = ""


class Read(NamedTuple):
    """Metrics that one look at the kernel's files gives, in the order of its values; ``library`` gives them where the
    kernel does not offer any.
    """

    metrics: tuple[str, ...]
    kernel: Callable[[str, _Facts], Values]
    library: Callable[[Library, str, int | None], Values]


def _utilization(folder: str, facts: _Facts) -> Values:
    del facts
    busy = number(f"{folder}/gpu_busy_percent")
    return (None if busy is None else units.percent(busy),)


def _memory(folder: str, facts: _Facts) -> Values:
    """Free, used and total; amdgpu counts what is used, and what is free is the rest."""
    del facts
    total, used = number(f"{folder}/mem_info_vram_total"), number(f"{folder}/mem_info_vram_used")
    return free_used_total(total, used)


def free_used_total(total: int | None, used: int | None) -> Values:
    """The rest is free; more in use than there is makes both unknown."""
    total = None if total is None else units.memory_size(total)
    used = None if used is None else units.byte_count(used)
    if total is None or used is None or used > total:
        return None, None, total
    return total - used, used, total


def _temperature(folder: str, facts: _Facts) -> Values:
    del folder
    value = None if facts.sensor is None else number(facts.sensor.path)
    return (None if value is None else units.millidegrees(value),)


READS: tuple[Read, ...] = (
    Read(("utilization",), _utilization, Library.utilization),
    Read(("memory_free", "memory_used", "memory_total"), _memory, Library.memory),
    Read(("temperature",), _temperature, Library.temperature),
)


class AmdBackend:
    """A slot is a card's PCI address."""

    vendor = VENDOR

    def __init__(self, places: Places) -> None:
        self._places = places
        self._bus = Bus(places.sysfs, VENDOR)
        self._library = Library(places)
        self._view = _View({})
        self._read: tuple[str, tuple[str, ...]] = ("", ())
        self._topology = topology.Topology({})
        self._facts: dict[str, _Facts] = {}
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
            self._library.start()
            raise BackendAbsent(*self._why_none())
        if not any(pci.is_asleep(sysfs, address) for address in drivers):
            self._library.start()  # it opens every card, and would wake one that sleeps
        self._look_at_nodes(tuple(address for address, driver in drivers.items() if driver == DRIVER))
        self._view = _View(_numbered(drivers, self._topology.nodes), self._topology.trouble)
        for gone in self._facts.keys() - drivers.keys():
            del self._facts[gone]
        return list(drivers)

    def _look_at_nodes(self, served: tuple[str, ...]) -> None:
        """Read the topology where it may have changed. The library finds cards by names that the kernel gives anew when
        cards come and go, and looks only once: from then on another process must ask it.
        """
        now = (topology.generation(self._places.sysfs), served)
        if now == self._read and not self._topology.trouble:
            return
        if now != self._read and self._library.used:
            raise BackendAbsent("driver-mismatch", "the cards are not those that AMD's library was started with")
        self._topology, self._read = topology.read(self._places.sysfs, served), now

    def _why_none(self) -> tuple[str, str]:
        if any(True for _ in pci.cards(self._places.sysfs, VENDOR)):
            return "driver-not-loaded", f"no driver of this host serves an AMD card; {DRIVER} is the one that is read"
        if self._library.absent:
            return "library-missing", f"no AMD card is on the PCI bus, and {self._library.absent}"
        return "no-devices", "no AMD card is on the PCI bus"

    def identify(self, slot: str, note: Note) -> tuple[Device, ...]:
        """The card and its partitions."""
        card = self._view.cards.get(slot)
        if card is None:
            return ()
        if pci.is_asleep(self._places.sysfs, slot):
            raise DeviceAsleep(slot)
        if card.driver != DRIVER:
            return (Device(key=card.key, physical_index=card.physical_index, pci_bus_id=slot, name=self._name(slot)),)
        note(Device(key=card.key, physical_index=card.physical_index, pci_bus_id=slot))
        if not card.nodes and self._view.trouble:
            raise DeviceFault("driver-error", self._view.trouble)
        facts = self._facts.get(slot)
        if facts is None:
            facts = self._facts[slot] = self._look_up(card)
        board = _board(card, facts)
        return (board, *_partitions(card, board))

    def sample(self, device: Device) -> Sampled:
        """Every row of the table that the device can give."""
        card = self._view.cards[device.pci_bus_id]
        if card.driver != DRIVER:
            detail = f"{device.pci_bus_id}: the driver {card.driver} is not read, {DRIVER} is"
            return Sampled((), (Fault("unsupported", detail, device.key),))
        if device.parent is not None:
            return self._sample_partition(device)
        readings: list[Reading] = []
        faults: list[Fault] = []
        for row in READS:
            try:
                values = self._values(row, device)
            except DeviceFault as fault:
                if pci.is_asleep(self._places.sysfs, device.pci_bus_id):  # since it was looked at
                    raise DeviceAsleep(device.pci_bus_id) from fault
                faults.append(Fault(fault.reason, f"{', '.join(row.metrics)}: {fault.detail}", device.key))
                continue
            readings += _readings(row.metrics, device.key, values)
        return Sampled(tuple(readings), tuple(faults))

    def _values(self, row: Read, device: Device) -> Values:
        address = device.pci_bus_id
        values = row.kernel(device_folder(self._places.sysfs, address), self._facts[address])
        if any(value is not None for value in values):
            return values
        return row.library(self._library, address, device.kfd_node)

    def _sample_partition(self, device: Device) -> Sampled:
        """What is a partition's own: the temperature is the card's, and so is memory that repeats the card's."""
        address, node = device.pci_bus_id, device.kfd_node
        (busy,) = self._library.utilization(address, node)
        free, used, total = self._library.memory(address, node)
        board = self._facts[address].memory_total_bytes
        if total == board or device.memory_total_bytes is None:
            free, used, total = None, None, device.memory_total_bytes
        metrics = ("utilization", "memory_free", "memory_used", "memory_total")
        readings = _readings(metrics, device.key, (busy, free, used, total))
        return Sampled(tuple(readings), hints=() if self._library.serves else (NO_LIBRARY,))

    def asleep(self, slot: str) -> tuple[Device, ...]:
        """The card as last read, or what the PCI bus and the KFD know of it without touching it."""
        card = self._view.cards[slot]
        facts = self._facts.get(slot) or _Facts(self._name(slot), 0, None, None, None)
        board = _board(card, facts)
        return (board, *_partitions(card, board))

    def _name(self, address: str) -> str:
        return name_of(self._places, address)

    def _look_up(self, card: Card) -> _Facts:
        folder = device_folder(self._places.sysfs, card.address)
        sensors = kernel_files.temperature_sensors(folder)
        total = number(f"{folder}/mem_info_vram_total")
        sensor = next((sensors[label] for label in _SENSORS if label in sensors), None)
        return _Facts(
            text(f"{folder}/product_name") or self._library.name(card.address) or self._name(card.address),
            number(f"{folder}/unique_id", 16) or 0,
            kernel_files.minor_number(folder),
            None if total is None else units.memory_size(total),
            sensor,
            sensor.label if sensor else Library.sensor * self._library.serves,
        )


def _numbered(drivers: Mapping[str, str], nodes: Mapping[str, tuple[topology.Node, ...]]) -> dict[str, Card]:
    """The cards with amd-smi's numbers: it counts those that the KFD has, and each partition, in the order of PCI
    addresses (``RocmSMI::Initialize``). The others, which amd-smi does not list, are numbered behind.
    """
    known = [address for address in drivers if nodes.get(address)]
    cards, index = {}, 0
    for address in (*known, *(address for address in drivers if address not in known)):
        cards[address] = Card(address, drivers[address], index, nodes.get(address, ()))
        index += max(1, len(nodes.get(address, ())))
    return cards


def _board(card: Card, facts: _Facts) -> Device:
    whole = card.nodes[0] if card.nodes and not card.parted else None
    return Device(
        key=card.key,
        physical_index=card.physical_index,
        pci_bus_id=card.address,
        uuid=_uuid(whole.unique_id if whole else facts.unique_id),
        name=facts.name,
        memory_total_bytes=facts.memory_total_bytes,
        minor_number=facts.minor_number,
        temperature_sensor=facts.sensor_label,
        kfd_node=whole.number if whole else None,
    )


def _partitions(card: Card, board: Device) -> tuple[Device, ...]:
    """The partitions; in a card whose memory is not divided each node shows all of it, which is no partition's own."""
    if not card.parted:
        return ()
    whole = board.memory_total_bytes
    return tuple(
        Device(
            key=DeviceKey(VENDOR, f"{card.address}/xcp{node.partition}"),
            physical_index=card.physical_index + place,
            pci_bus_id=card.address,
            uuid=_uuid(node.unique_id),
            name=board.name,
            memory_total_bytes=node.memory_bytes if whole and 0 < node.memory_bytes < whole else None,
            partition=str(node.partition),
            parent=board.key,
            kfd_node=node.number,
        )
        for place, node in enumerate(card.nodes)
    )


def _uuid(unique_id: int) -> str:
    """What ROCr and HIP call the card: older cards and many APUs have 0, which is no identity."""
    return f"GPU-{unique_id:016x}" if 0 < unique_id < 2**64 - 1 else ""


def _readings(metrics: Sequence[str], key: DeviceKey, values: Values) -> list[Reading]:
    pairs = zip(metrics, values, strict=True)
    return [Reading(metric, key, value) for metric, value in pairs if value is not None]
