"""The saved form of a host's devices: one row a card, in YAML or JSON, as ``inventory --format yaml`` prints it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import yaml

from exporter.errors import InventoryFileError
from exporter.files import read_regular
from exporter.inventory import Inventory, narrowed
from exporter.model import VULKAN_KINDS, Device, DeviceKey, VulkanDevice
from exporter.units import pci_bus_id
from exporter.vendors import VENDORS

_MAX_BYTES = 16 * 1024 * 1024
_MOST_TILES = 64


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
    kfd_listed: bool | None = None
    xcp: Annotated[int, msgspec.Meta(ge=0, le=_MOST_TILES)] | None = None
    hsa_isa_ok: bool | None = None
    hip_ok: bool | None = None
    tiles: Annotated[int, msgspec.Meta(ge=1, le=_MOST_TILES)] | None = None
    hpc: bool | None = None
    integrated: bool | None = None
    product_family_rank: int | None = None
    driver_library: str | None = None
    driver_sorts: bool | None = None
    vk_type: str | None = None
    driver: str | None = None
    fp16_storage: bool | None = None


def to_rows(inventory: Inventory) -> list[dict[str, Any]]:
    """The inventory as plain data, one mapping a card or AMD partition; :func:`from_rows` reads it back."""
    boards = inventory.boards()
    known = {board.key for board in boards}
    partitions = [device for device in inventory.devices if _is_xcp(device) or device.parent not in (None, *known)]
    rows = [_row_of(card, inventory.parts(card.key)) for card in (*boards, *partitions)]
    plain = [msgspec.to_builtins(row) for row in (*rows, *map(_vulkan_row_of, inventory.vulkan or ()))]
    return [row | {"mig": row.pop("mig", [])} for row in plain]  # last, where a person looks for it


_FACTS = (
    *("kfd_node", "kfd_listed", "hsa_isa_ok", "hip_ok", "tiles", "hpc", "integrated"),
    *("product_family_rank", "driver_library", "driver_sorts"),
)


def _is_xcp(device: Device) -> bool:
    return device.parent is not None and device.key.identity.endswith(f"/xcp{device.partition}")


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
        xcp=int(card.partition) if _is_xcp(card) else None,
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

    ``vendor`` is whose cards the rows are where they do not say. A row of the Vulkan enumeration is no card.
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
    raw = [_vulkan_of(row, row.vendor or vendor) for row in rows if row.vk_type is not None]
    vulkan = tuple(sorted(raw, key=lambda entry: entry.raw_position)) or None
    flagged = any(row.accessible is not None for row in cards)
    return Inventory(tuple(devices), vulkan=vulkan), frozenset(reach) if flagged else None


def _family_of(row: Row, vendor: str) -> list[Device]:
    """The row's card, then its MIG devices or tiles."""
    card = _device_of(row, vendor)
    tiles = range(row.tiles or 0) if vendor == "intel" and row.tiles != 1 else ()
    return [card, *(_part_of(part, card) for part in row.mig), *(narrowed(card, [tile]) for tile in tiles)]


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


def _keyed_by_uuid(vendor: str) -> bool:
    """False of vendors that are not read here, whose cards a Vulkan enumeration may have."""
    return vendor in VENDORS and VENDORS[vendor].keyed_by_uuid


def _identity(row: Row, vendor: str, address: str) -> str:
    if row.uuid and (_keyed_by_uuid(vendor) or not address):
        return row.uuid if row.xcp is None else f"{row.uuid}/xcp{row.xcp}"
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
    seen: dict[str, int] = {}
    for number, row in enumerate(rows):
        if not (row.uuid or row.pci):
            raise InventoryFileError(f"{path}: card {number} has neither uuid nor pci: expected one of them")
        if row.pci and pci_bus_id(row.pci) is None:
            raise InventoryFileError(f"{path}: card {number}: pci is '{row.pci}', expected such as 0000:17:00.0")
        if row.vendor is not None and not re.fullmatch(r"[a-z]+", row.vendor):
            raise InventoryFileError(f"{path}: card {number}: vendor is '{row.vendor}', expected such as nvidia or amd")
        if row.vk_type is None:  # in a Vulkan enumeration one card may stand behind several drivers
            _check_repeat(path, number, row, seen)
    _check_positions(path, [row for row in rows if row.vk_type is not None])


def _check_repeat(path: str, number: int, row: Row, seen: dict[str, int]) -> None:
    part = "" if row.xcp is None else f"/xcp{row.xcp}"
    names = [name + part for name in (row.uuid, pci_bus_id(row.pci or "")) if name]
    for name in (*names, *(instance.uuid for instance in row.mig)):
        first = seen.setdefault(name, number)
        if first != number:
            raise InventoryFileError(f"{path}: card {number} repeats card {first} ({name})")
    if len({instance.uuid for instance in row.mig}) < len(row.mig):
        raise InventoryFileError(f"{path}: card {number} has a MIG device twice")


def _check_positions(path: str, raw: Sequence[Row]) -> None:
    """The raw positions of a Vulkan enumeration, and the words that a default selection rests on."""
    positions = sorted(-1 if row.index is None else row.index for row in raw)
    if positions != list(range(len(raw))):
        found = ", ".join(map(str, positions[:20]))
        expected = f"0 to {len(raw) - 1} once each"
        raise InventoryFileError(f"{path}: rows with vk_type: found index {found}, expected {expected}")
    for row in raw:
        if row.vk_type not in VULKAN_KINDS:
            expected = ", ".join(VULKAN_KINDS)
            raise InventoryFileError(f"{path}: vk_type is '{row.vk_type}', expected one of {expected}")
