"""A host's devices and how to find one: by key, UUID or PCI address."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

import msgspec

from exporter.model import Device, DeviceKey, VulkanDevice
from exporter.units import pci_bus_id


class Inventory(msgspec.Struct, frozen=True, dict=True):
    """Devices of one or more vendors. ``whole`` is False while a card of the host is known to be missing from it.

    ``vulkan`` is the raw Vulkan enumeration, in its order; None where none was taken.
    """

    devices: tuple[Device, ...] = ()
    whole: bool = True
    vulkan: tuple[VulkanDevice, ...] | None = None

    def boards(self) -> tuple[Device, ...]:
        """Whole cards in ascending PCI address, which is also the order of NVIDIA's index."""
        whole_cards = (device for device in self.devices if device.parent is None)
        return tuple(sorted(whole_cards, key=lambda device: pci_sort_key(device.pci_bus_id)))

    def parts(self, board: DeviceKey) -> tuple[Device, ...]:
        """The devices that are parts of the given card, in the library's order."""
        return tuple(device for device in self.devices if device.parent == board)

    def find(self, key: DeviceKey) -> Device | None:
        """The device of that key; a key that is a PCI address finds the card that has since told its UUID.

        A key with tiles (``/t0+t3``) finds its card narrowed to these, which is no device of the library.
        """
        found = self.by_key.get(key)
        if found is not None:
            return found
        address, _, part = key.identity.partition("/")
        if not _is_address(address) or (part and not _TILES.fullmatch(part)):
            return None
        for card in self.devices:
            if card.parent is None and (card.key.vendor, card.pci_bus_id) == (key.vendor, address):
                return _part_of_card(card, part) if part else card
        return None

    @functools.cached_property
    def by_key(self) -> Mapping[DeviceKey, Device]:
        """Devices by key."""
        return {device.key: device for device in self.devices}

    def all_of(self, device: Device) -> Device | None:
        """The card that a device is which is none of the library's and has every one of the card's tiles."""
        card = self.by_key.get(device.parent) if device.parent else None
        if card is None or device.key in self.by_key:
            return None
        return card if len(set(device.partition.split("+"))) == card.tiles else None

    def of(self, *vendors: str) -> Inventory:
        """The same inventory narrowed to some vendors' devices."""
        chosen = tuple(device for device in self.devices if device.key.vendor in vendors)
        return Inventory(chosen, self.whole, self.vulkan)

    def named(self, text: str) -> tuple[Device, ...]:
        """The devices that a full UUID or a PCI address names: the card at the address, else its partitions."""
        address = pci_bus_id(text)
        if address is None:
            return tuple(device for device in self.devices if text and device.uuid == text)
        there = [device for device in self.devices if device.pci_bus_id == address]
        return tuple(device for device in there if device.parent is None) or tuple(there)


_TILES = re.compile(r"t[0-9]{1,3}(?:\+t[0-9]{1,3})*")


def _is_address(text: str) -> bool:
    return pci_bus_id(text) == text


def _part_of_card(card: Device, part: str) -> Device | None:
    tiles = [int(tile[1:]) for tile in part.split("+")]
    return narrowed(card, tiles) if max(tiles) < (card.tiles or 0) else None


def tiles_key(card: Device, tiles: Sequence[int]) -> DeviceKey:
    """The key of a card of which only these tiles are visible, ``<address>/t0+t3``."""
    return DeviceKey(card.key.vendor, f"{card.pci_bus_id}/t" + "+t".join(map(str, tiles)))


def narrowed(card: Device, tiles: Sequence[int]) -> Device:
    """A card of which only some tiles are visible: a device of its own, with the card as its parent.

    The memory is left out, since the card's is not the tiles'.
    """
    return Device(
        key=tiles_key(card, tiles),
        physical_index=card.physical_index,
        pci_bus_id=card.pci_bus_id,
        uuid=card.uuid,
        name=card.name,
        partition="+".join(map(str, tiles)),
        parent=card.key,
    )


def pci_sort_key(address: str) -> tuple[bool, int, str]:
    """Sorts addresses as numbers; unknown ones last. Domains have four digits or more, so the longer is the larger."""
    return not address, len(address), address
