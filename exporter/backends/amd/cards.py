"""Who AMD's cards and their partitions are, by what the driver and the KFD say, with amd-smi's numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from exporter.backends.amd import topology
from exporter.backends.kernel_files import Sensor, Sensors, first_of
from exporter.errors import DeviceFault
from exporter.model import Device, DeviceKey

VENDOR, DRIVER = "amd", "amdgpu"
# The first that a card has is its temperature; gpu_info says which it is.
_TEMPERATURE = ("edge", "junction")
DIVIDED = ("DPX", "TPX", "QPX", "CPX")


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


class Facts(NamedTuple):
    """What does not change until ``since`` does, as far as it could be read: ``monitor`` is the folder of the driver's
    hwmon, empty where there is none, and ``fault`` why that could not be read.
    """

    name: str
    since: tuple[str, int] = ("", 0)
    complete: bool = False
    unique_id: int = 0
    minor_number: int | None = None
    memory_total_bytes: int | None = None
    divided: bool = False
    sensors: Sensors = Sensors()
    monitor: str = ""
    fault: DeviceFault | None = None

    def temperature(self) -> Sensor | None:
        """The sensor whose value is the card's temperature. Raises ``DeviceFault`` where that is not known."""
        if self.fault is not None:
            raise self.fault
        return first_of(self.sensors, _TEMPERATURE)

    @property
    def temperature_label(self) -> str:
        """What the driver calls that sensor; empty where there is none, or it is not known."""
        try:
            sensor = self.temperature()
        except DeviceFault:
            return ""
        return "" if sensor is None else sensor.label


def numbered(
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


def board(card: Card, facts: Facts, sensor: str) -> Device:
    """The card itself; ``sensor`` is what its temperature is of."""
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


def partitions(card: Card, card_device: Device) -> tuple[Device, ...]:
    """The partitions; in a card whose memory is not divided each node shows all of it, which is no partition's own."""
    if not card.parted:
        return ()
    whole = card_device.memory_total_bytes
    return tuple(
        Device(
            key=DeviceKey(VENDOR, f"{card.address}/xcp{node.partition}"),
            physical_index=None if card.physical_index is None else card.physical_index + place,
            pci_bus_id=card.address,
            uuid=_uuid(node.unique_id),
            name=card_device.name,
            memory_total_bytes=node.memory_bytes if whole and 0 < node.memory_bytes < whole else None,
            partition=str(node.partition),
            parent=card.key,
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
