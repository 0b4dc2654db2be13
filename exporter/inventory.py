"""A host's devices and how to find one: by key, UUID prefix or PCI address. And the saved form of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import yaml

from exporter.errors import InventoryFileError
from exporter.files import read_regular
from exporter.model import Device, DeviceKey, VulkanDevice
from exporter.units import pci_bus_id

_MAX_BYTES = 16 * 1024 * 1024
_MOST_TILES = 64
_UUID_VENDORS = ("nvidia", "simulated")


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

    @property
    def by_key(self) -> Mapping[DeviceKey, Device]:
        """Devices by key, built once."""
        cached: Mapping[DeviceKey, Device] | None = self.__dict__.get("by_key")
        if cached is None:
            cached = self.__dict__["by_key"] = {device.key: device for device in self.devices}
        return cached

    def of(self, vendor: str) -> Inventory:
        """The same inventory narrowed to one vendor."""
        chosen = tuple(device for device in self.devices if device.key.vendor == vendor)
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


class MigRow(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A MIG device in a saved inventory; ``index`` is NVML's, with holes."""

    index: int
    uuid: str
    gi: int
    ci: int
    name: str = ""
    memory_total_bytes: int | None = None


class Row(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A card in a saved inventory: the vendor tool's index, the identities, and what a runtime's order may need.

    A row with ``xcp`` is one AMD partition of the card at ``pci``. A row with ``vk_type`` is an entry of the raw Vulkan
    enumeration, ``index`` its position there and ``uuid`` Vulkan's.
    """

    index: int | None
    uuid: str | None
    pci: str | None
    mig: list[MigRow] = []
    name: str = ""
    vendor: str | None = None
    mig_mode: bool | None = None
    memory_total_bytes: int | None = None
    minor: int | None = None
    accessible: bool | None = None
    kfd_node: int | None = None
    xcp: int | None = None
    hsa_isa_ok: bool | None = None
    hip_ok: bool | None = None
    tiles: Annotated[int, msgspec.Meta(ge=1, le=_MOST_TILES)] | None = None
    hpc: bool | None = None
    integrated: bool | None = None
    product_family_rank: int | None = None
    vk_type: str | None = None
    driver: str | None = None
    fp16_storage: bool | None = None


def to_rows(inventory: Inventory) -> list[dict[str, Any]]:
    """The inventory as plain data, one mapping a card or AMD partition; :func:`from_rows` reads it back."""
    boards = inventory.boards()
    known = {board.key for board in boards}
    partitions = [device for device in inventory.devices if device.parent is not None and device.parent not in known]
    rows = [_row_of(card, inventory.parts(card.key)) for card in (*boards, *partitions)]
    plain = [msgspec.to_builtins(row) for row in (*rows, *map(_vulkan_row_of, inventory.vulkan or ()))]
    return [row | {"mig": row.pop("mig", [])} for row in plain]  # last, where a person looks for it


_FACTS = ("kfd_node", "hsa_isa_ok", "hip_ok", "tiles", "hpc", "integrated", "product_family_rank")


def _row_of(card: Device, parts: Sequence[Device]) -> Row:
    return Row(
        index=card.physical_index,
        uuid=card.uuid or None,
        pci=card.pci_bus_id or None,
        mig=[_mig_row_of(part) for part in parts if part.gpu_instance is not None],
        name=card.name,
        vendor=card.key.vendor,
        mig_mode=card.mig_mode,
        memory_total_bytes=card.memory_total_bytes,
        minor=card.minor_number,
        xcp=int(card.partition) if card.partition.isdecimal() else None,
        **{fact: getattr(card, fact) for fact in _FACTS},
    )


def _vulkan_row_of(entry: VulkanDevice) -> Row:
    return Row(
        index=entry.raw_position,
        uuid=entry.uuid or None,
        pci=entry.pci_bus_id or None,
        name=entry.name,
        vendor=entry.vendor,
        vk_type=entry.kind,
        driver=entry.driver,
        fp16_storage=entry.fp16_storage,
    )


def _mig_row_of(part: Device) -> MigRow:
    return MigRow(
        index=part.mig_index or 0,
        uuid=part.uuid,
        gi=part.gpu_instance or 0,
        ci=part.compute_instance or 0,
        name=part.name,
        memory_total_bytes=part.memory_total_bytes,
    )


def from_rows(rows: Iterable[Row], vendor: str) -> tuple[Inventory, frozenset[DeviceKey] | None]:
    """The inventory that the rows describe, and the reach that their ``accessible`` flags state (None: no flags).

    ``vendor`` is whose cards the rows are where they do not say. A card that only the Vulkan enumeration has becomes a
    device under its PCI address, without a physical index.
    """
    rows = list(rows)
    cards = [row for row in rows if row.vk_type is None]
    devices: list[Device] = []
    reach: set[DeviceKey] = set()
    for row in cards:
        family = _family_of(row, row.vendor or vendor)
        devices += family
        if row.accessible is not False:
            reach.add(family[0].key)
    vulkan = tuple(_vulkan_of(row, row.vendor or vendor) for row in rows if row.vk_type is not None)
    shown = tuple(_shown_by_vulkan(vulkan, {device.pci_bus_id for device in devices}))
    reach |= {device.key for device in shown}
    flagged = any(row.accessible is not None for row in cards)
    return Inventory((*devices, *shown), vulkan=vulkan or None), frozenset(reach) if flagged else None


def _family_of(row: Row, vendor: str) -> list[Device]:
    """The row's card, then its MIG devices or tiles."""
    card = _device_of(row, vendor)
    tiles = [narrowed(card, [number]) for number in range(row.tiles or 0)] if row.tiles != 1 else []
    return [card, *(_part_of(part, card) for part in row.mig), *tiles]


def _vulkan_of(row: Row, vendor: str) -> VulkanDevice:
    return VulkanDevice(
        raw_position=row.index or 0,
        kind=row.vk_type or "",
        driver=row.driver or "",
        vendor=vendor,
        uuid=row.uuid or "",
        pci_bus_id=pci_bus_id(row.pci or "") or "",
        name=row.name,
        fp16_storage=row.fp16_storage is not False,
    )


def _shown_by_vulkan(entries: Iterable[VulkanDevice], known: set[str]) -> Iterator[Device]:
    for entry in entries:
        if entry.pci_bus_id and entry.pci_bus_id not in known:
            known.add(entry.pci_bus_id)
            key = DeviceKey(entry.vendor, entry.pci_bus_id)
            yield Device(key=key, physical_index=None, pci_bus_id=entry.pci_bus_id, name=entry.name)


def _device_of(row: Row, vendor: str) -> Device:
    address = pci_bus_id(row.pci or "") or ""
    return Device(
        key=DeviceKey(vendor, _identity(row, vendor, address)),
        physical_index=row.index,
        pci_bus_id=address,
        uuid=row.uuid or "",
        name=row.name,
        memory_total_bytes=row.memory_total_bytes,
        minor_number=row.minor,
        mig_mode=True if row.mig and row.mig_mode is None else row.mig_mode,
        partition="" if row.xcp is None else str(row.xcp),
        parent=None if row.xcp is None else DeviceKey(vendor, address),
        **{fact: getattr(row, fact) for fact in _FACTS},
    )


def _identity(row: Row, vendor: str, address: str) -> str:
    if row.uuid and vendor in _UUID_VENDORS:
        return row.uuid
    return address if row.xcp is None else f"{address}/xcp{row.xcp}"


def _part_of(row: MigRow, card: Device) -> Device:
    return Device(
        key=DeviceKey(card.key.vendor, row.uuid),
        physical_index=card.physical_index,
        pci_bus_id=card.pci_bus_id,
        uuid=row.uuid,
        name=row.name,
        memory_total_bytes=row.memory_total_bytes,
        partition=f"{row.gi}/{row.ci}",
        parent=card.key,
        mig_index=row.index,
        gpu_instance=row.gi,
        compute_instance=row.ci,
    )


def read_rows(path: str) -> list[Row]:
    """The rows of a saved inventory file, YAML or JSON: a list of cards, or a mapping whose ``devices`` is one.

    Raises :class:`InventoryFileError` naming the file and the row.
    """
    data = _read_yaml(path)
    if isinstance(data, dict) and "devices" in data:
        data = data["devices"]
    if not isinstance(data, list):
        raise InventoryFileError(f"{path}: expected a list of cards, as `inventory --format yaml` prints it")
    try:
        rows = msgspec.convert(data, list[Row], strict=False)
    except msgspec.ValidationError as error:
        raise InventoryFileError(f"{path}: {str(error).replace('`', chr(39))}") from error
    _check_rows(path, rows)
    return rows


class _TextLoader(yaml.BaseLoader):
    """Every scalar is its own text, but null: YAML 1.1 takes ``0000:21:00.0`` for a number to the base of sixty."""


_TextLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_TextLoader.add_constructor("tag:yaml.org,2002:null", lambda _loader, _node: None)


def _read_yaml(path: str) -> Any:
    try:
        text = read_regular(path, _MAX_BYTES).decode()
        return yaml.load(text, Loader=_TextLoader)  # noqa: S506  (makes text only)
    except OSError as error:
        raise InventoryFileError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise InventoryFileError(f"{path}: not YAML: {' '.join(str(error).split())}") from error


def _check_rows(path: str, rows: Sequence[Row]) -> None:
    seen: dict[tuple[str, int | None], int] = {}
    for number, row in enumerate(rows):
        identity = row.uuid or row.pci
        if not identity:
            raise InventoryFileError(f"{path}: card {number} has neither uuid nor pci: expected one of them")
        if row.pci and pci_bus_id(row.pci) is None:
            raise InventoryFileError(f"{path}: card {number}: pci is '{row.pci}', expected such as 0000:17:00.0")
        if row.vk_type is None:  # in a Vulkan enumeration one card may stand behind several drivers
            _check_repeat(path, number, row, seen)


def _check_repeat(path: str, number: int, row: Row, seen: dict[tuple[str, int | None], int]) -> None:
    for name in filter(None, (row.uuid, pci_bus_id(row.pci or ""))):
        first = seen.setdefault((name, row.xcp), number)
        if first != number:
            raise InventoryFileError(f"{path}: card {number} repeats card {first} ({name})")
