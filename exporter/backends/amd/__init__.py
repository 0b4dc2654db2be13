"""AMD: the files that the kernel publishes, and ``amdsmi`` for what they do not say.

Two sources behind one contract. amdgpu's own sysfs and hwmon and the KFD's topology serve every card that amdgpu
drives, consumer Radeon cards and APUs too, with no ROCm installed; they answer a failing read with an error, where
AMD's library answers 0 or the last value and success. So a value that the kernel publishes is taken from there, and
the library is asked only for one whose file does not exist: a partition's activity, or a virtual function's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from exporter import pci, units
from exporter.backends import kernel_files
from exporter.backends.amd import topology, users
from exporter.backends.amd.smi import Library, Values, free_used_total
from exporter.backends.base import Note, Places, Sampled, Use
from exporter.backends.kernel_files import Bus, Sensor, device_folder, number, text
from exporter.backends.pci_names import name_of
from exporter.errors import BackendAbsent, DeviceAsleep, DeviceFault, DeviceLost
from exporter.model import Device, DeviceKey, Fault, Hint, Reading

VENDOR, DRIVER = "amd", "amdgpu"

# The first that a card has is its temperature; gpu_info says which it is.
_SENSORS = ("edge", "junction")
_Found = TypeVar("_Found")
_DIVIDED = ("DPX", "TPX", "QPX", "CPX")

NO_LIBRARY = Hint(
    "install-amd-smi",
    "utilization of partitions: the kernel publishes a whole card's alone; ROCm's amd-smi library and the extra "
    "gpu-fleet-exporter[amd] tell each partition's",
)

_UTILIZATION, _MEMORY, _TEMPERATURE = ("utilization",), ("memory_free", "memory_used", "memory_total"), ("temperature",)


class Card(NamedTuple):
    """A card that a driver of the host serves, with amd-smi's number of it, or of its first partition; None while it
    is not known which cards the KFD has. ``listed`` is False where the KFD is known not to have this one.
    """

    address: str
    driver: str
    physical_index: int | None
    nodes: tuple[topology.Node, ...]
    listed: bool = True

    @property
    def key(self) -> DeviceKey:
        """The card's own."""
        return DeviceKey(VENDOR, self.address)

    @property
    def parted(self) -> bool:
        """The card is shown to programs as its partitions."""
        return any(node.partition is not None for node in self.nodes)

    @property
    def whole(self) -> topology.Node | None:
        """The compute node that is all of the card."""
        return self.nodes[0] if len(self.nodes) == 1 and not self.parted else None


class _View(NamedTuple):
    """The host's cards in one cycle, by address, and why a compute node may be missing."""

    cards: Mapping[str, Card]
    trouble: str = ""


class _Facts(NamedTuple):
    """What does not change until ``since`` does, as far as it could be read: ``fault`` is why the sensors could not."""

    name: str
    since: tuple[str, int] = ("", 0)
    complete: bool = False
    unique_id: int = 0
    minor_number: int | None = None
    memory_total_bytes: int | None = None
    divided: bool = False
    sensor: Sensor | None = None
    fault: DeviceFault | None = None


class Read(NamedTuple):
    """Metrics that one look at the kernel's files gives, in the order of its values; ``fallback`` gives them where the
    kernel does not offer any, which is None.
    """

    metrics: tuple[str, ...]
    kernel: Callable[[str, _Facts], Values | None]
    fallback: Callable[[Library, str, int | None], Values]


def _utilization(folder: str, facts: _Facts) -> Values | None:
    del facts
    busy = number(f"{folder}/gpu_busy_percent")
    return None if busy is None else (units.percent(busy),)


def _memory(folder: str, facts: _Facts) -> Values | None:
    """Free, used and total; amdgpu counts what is used, and what is free is the rest."""
    del facts
    total, used = number(f"{folder}/mem_info_vram_total"), number(f"{folder}/mem_info_vram_used")
    return None if total is None and used is None else free_used_total(total, used)


def _temperature(folder: str, facts: _Facts) -> Values | None:
    del folder
    if facts.fault is not None:
        raise facts.fault
    if facts.sensor is None:
        return None
    value = number(facts.sensor.path)
    return (None if value is None else units.millidegrees(value),)


READS: tuple[Read, ...] = (
    Read(_UTILIZATION, _utilization, Library.utilization),
    Read(_MEMORY, _memory, Library.memory),
    Read(_TEMPERATURE, _temperature, Library.temperature),
)


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
            raise BackendAbsent(*self._why_none())
        served = tuple(address for address, driver in drivers.items() if driver == DRIVER)
        self._look_at_nodes(served)
        if not any(driver and pci.is_asleep(sysfs, address) for address, driver in drivers.items()):
            self._library.start()  # it opens every card, and would wake one that sleeps
        self._look_at_nodes(served)  # a card may have come meanwhile
        self._view = _View(_numbered(drivers, self._topology, self._is_divided), self._topology.trouble)
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
            return self._devices(card, _Facts(self._name(slot)))
        note(Device(key=card.key, physical_index=card.physical_index, pci_bus_id=slot))
        facts = self._facts_of(card)
        if not card.nodes and topology.generation(self._places.sysfs) != self._read[0]:
            raise DeviceFault("starting", f"{slot}: the KFD has other nodes by now")
        if trouble and (facts.divided or not card.nodes):
            raise DeviceFault("driver-error", trouble)
        if len(card.nodes) > 1 and not card.parted:
            raise DeviceFault("unsupported", f"{slot}: the KFD does not say which of its nodes is which partition")
        return self._devices(card, facts)

    def _devices(self, card: Card, facts: _Facts) -> tuple[Device, ...]:
        if facts.divided and card.whole:  # the first of several partitions, and the only one that we may see
            card = card._replace(nodes=(card.whole._replace(partition=0),))
        from_library = facts.sensor is None and card.whole and self._library.knows(card.address, card.whole.number)
        board = _board(card, facts, Library.sensor if from_library else facts.sensor.label if facts.sensor else "")
        return (board, *_partitions(card, board))

    def sample(self, device: Device) -> Sampled:
        """Every row of the table that the device can give."""
        address, wanted = device.pci_bus_id, self._places.wanted
        card, facts = self._view.cards.get(address), self._facts.get(address)
        if card is not None and card.driver != DRIVER:
            detail = f"{address}: the driver {card.driver} is not read, {DRIVER} is"
            return Sampled((), hints=(Hint("unsupported-driver", detail),))
        if card is None or facts is None:
            raise DeviceLost(f"{address}: no driver serves it any more")
        readings: list[Reading] = []
        faults: list[Fault] = []
        if card.physical_index is None and device.parent is None:
            faults.append(Fault("driver-error", f"physical index: {self._view.trouble}", device.key))
        for metrics, read in self._of_card(device, facts) if device.parent is None else self._of_part(device):
            if wanted.isdisjoint(metrics):
                continue
            try:
                readings += _readings(metrics, device.key, read())
            except DeviceFault as fault:
                self._raise_if_asleep(address)
                faults.append(Fault(fault.reason, f"{', '.join(metrics)}: {fault.detail}", device.key))
        silent = device.parent and "utilization" in wanted and not self._library.knows(address, device.kfd_node)
        return Sampled(tuple(readings), tuple(faults), (self._no_library(),) if silent else ())

    def _no_library(self) -> Hint:
        why = self._library.absent
        return replace(NO_LIBRARY, text=f"{NO_LIBRARY.text} ({why})") if why else NO_LIBRARY

    def _raise_if_asleep(self, address: str) -> None:
        """A card that has fallen asleep since it was looked at refuses to be read, which is no fault."""
        if pci.is_asleep(self._places.sysfs, address):
            raise DeviceAsleep(address)

    def _of_card(self, device: Device, facts: _Facts) -> Iterator[tuple[tuple[str, ...], Callable[[], Values]]]:
        for row in READS:
            yield row.metrics, partial(self._values, row, device, facts)

    def _values(self, row: Read, device: Device, facts: _Facts) -> Values:
        """The kernel's. The library is asked for a whole card alone: it has no processor that is all the partitions."""
        values = row.kernel(device_folder(self._places.sysfs, device.pci_bus_id), facts)
        if values is not None:
            return values
        return row.fallback(self._library, device.pci_bus_id, device.kfd_node)

    def _of_part(self, device: Device) -> Iterator[tuple[tuple[str, ...], Callable[[], Values]]]:
        """What is a partition's own: the temperature is the card's."""
        yield _UTILIZATION, partial(self._library.utilization, device.pci_bus_id, device.kfd_node)
        yield _MEMORY, partial(self._part_memory, device)

    @staticmethod
    def _part_memory(device: Device) -> Values:
        """The size that the KFD gives the partition. What the library says is in use repeats the whole card's."""
        return None, None, device.memory_total_bytes

    def users(self, device: Device) -> Collection[Use] | None:
        """Those of its compute node. Of a card whose partitions are devices they are not told."""
        return users.of_node(self._places.sysfs, self._topology.nodes.get(device.pci_bus_id, ()), device.kfd_node)

    def asleep(self, slot: str) -> tuple[Device, ...]:
        """The card as last read, or what the PCI bus and the KFD know of it without touching it."""
        card = self._view.cards.get(slot)
        return () if card is None else self._devices(card, self._facts.get(slot) or _Facts(self._name(slot)))

    def _name(self, address: str) -> str:
        return name_of(self._places, address)

    def _facts_of(self, card: Card) -> _Facts:
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

    def _look_up(self, address: str, folder: str) -> _Facts:
        """What cannot be read is left out, and read again in the next cycle."""
        faults: list[DeviceFault] = []
        sensor = _tried(faults, lambda: kernel_files.temperature_sensor(folder, _SENSORS))
        fault = faults[0] if faults else None
        name = _tried(faults, lambda: text(f"{folder}/product_name"))
        unique_id = _tried(faults, lambda: number(f"{folder}/unique_id", 16))
        total = _tried(faults, lambda: number(f"{folder}/mem_info_vram_total"))
        mode = _tried(faults, lambda: text(f"{folder}/current_compute_partition"))
        return _Facts(
            name=name or self._library.name(address) or self._name(address),
            complete=not faults,
            unique_id=unique_id or 0,
            minor_number=kernel_files.minor_number(folder),
            memory_total_bytes=None if total is None else units.memory_size(total),
            divided=mode in _DIVIDED,
            sensor=sensor,
            fault=fault,
        )


def _tried(faults: list[DeviceFault], read: Callable[[], _Found]) -> _Found | None:
    try:
        return read()
    except DeviceFault as fault:
        faults.append(fault)
        return None


def _numbered(
    drivers: Mapping[str, str], found: topology.Topology, is_divided: Callable[[str], bool]
) -> dict[str, Card]:
    """The cards with amd-smi's numbers: it counts those that the KFD has, and each partition, in the order of PCI
    addresses (``RocmSMI::Initialize``). The others, which amd-smi does not list, are numbered behind. While a node may
    be missing, a card has a number only if it cannot be of this card or one before.
    """
    nodes = found.nodes
    known = [address for address in drivers if nodes.get(address)]
    cards, index, certain = {}, 0, True
    for address in drivers if found.trouble else (*known, *(address for address in drivers if address not in known)):
        mine = nodes.get(address, ())
        certain = certain and not (found.trouble and (not mine or is_divided(address)))
        number_of_card = index if certain else None
        cards[address] = Card(address, drivers[address], number_of_card, mine, bool(mine) or not found.whole)
        index += max(1, len(mine))
    return cards


def _board(card: Card, facts: _Facts, sensor: str) -> Device:
    return Device(
        key=card.key,
        physical_index=card.physical_index,
        pci_bus_id=card.address,
        uuid=_uuid(card.whole.unique_id if card.whole else facts.unique_id),
        name=facts.name,
        memory_total_bytes=facts.memory_total_bytes,
        minor_number=facts.minor_number,
        opened_by=_opened_by(facts.minor_number),
        temperature_sensor=sensor,
        kfd_node=card.whole.number if card.whole else None,
        kfd_listed=None if card.listed else False,
    )


def _partitions(card: Card, board: Device) -> tuple[Device, ...]:
    """The partitions; in a card whose memory is not divided each node shows all of it, which is no partition's own."""
    if not card.parted:
        return ()
    whole = board.memory_total_bytes
    return tuple(
        Device(
            key=DeviceKey(VENDOR, f"{card.address}/xcp{node.partition}"),
            physical_index=None if card.physical_index is None else card.physical_index + place,
            pci_bus_id=card.address,
            uuid=_uuid(node.unique_id),
            name=board.name,
            memory_total_bytes=node.memory_bytes if whole and 0 < node.memory_bytes < whole else None,
            partition=str(node.partition),
            parent=board.key,
            minor_number=node.render_minor,
            opened_by=_opened_by(node.render_minor),
            kfd_node=node.number,
        )
        for place, node in enumerate(card.nodes)
    )


def _opened_by(render_minor: int | None) -> tuple[str, ...]:
    """ROCm opens the KFD, and a render node for each node of its topology."""
    return () if render_minor is None else ("kfd", f"renderD{render_minor}")


def _uuid(unique_id: int) -> str:
    """What ROCr and HIP call the card: older cards and many APUs have 0, which is no identity."""
    return f"GPU-{unique_id:016x}" if 0 < unique_id < 2**64 - 1 else ""


def _readings(metrics: Sequence[str], key: DeviceKey, values: Values) -> list[Reading]:
    return [Reading(metric, key, value) for metric, value in zip(metrics, values, strict=True) if value is not None]
