"""Hosts as the states of the pretend drivers, and what is said of their devices as places, in one spelling.

A place is one device of the host: a UUID for NVIDIA, an address for AMD and Intel with ``/xcp3`` or ``/t0+t3`` behind
it for a part, and for Vulkan the number in the raw enumeration and what stands there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from exporter.inventory import Inventory, pci_sort_key
from exporter.model import Device, DeviceKey, Resolved, VulkanDevice
from exporter.wire import DriverDevice
from tests.fakes import amdhip64, cuda, vulkan, ze_driver

AS_GIVEN = {"VK_LOADER_DISABLE_SELECT": "1"}
"""Makes the pretend Vulkan without its layer keep to the order of its state."""

_VK_VENDORS = {"nvidia": 0x10DE, "amd": 0x1002, "intel": 0x8086, "qualcomm": 0x5143, "mesa": 0x10005}
_VK_DRIVERS = frozenset(
    (
        *("radv", "amdvlk", "amdgpu_pro", "anv", "intel_windows", "nvidia", "nvk", "qualcomm", "turnip"),
        *("dozen", "llvmpipe", "moltenvk"),
    )
)
_DEFAULT_BRANCH = 570


class Host(NamedTuple):
    """A host as it is, which the pretend driver plays, and the keys of what the process can open.

    ``branch`` is NVIDIA's driver branch. ``raw_order``: Vulkan's devices are enumerated as they stand in the inventory,
    by no loader's or layer's rules. ``reverse`` is a lie: all orders that the driver knows are the other way round.
    """

    truth: Inventory
    reach: frozenset[DeviceKey]
    branch: int | None = None
    raw_order: bool = False
    reverse: bool = False


# --- a host as a state


def _cuda(host: Host, folder: Path, library: Path) -> Path:
    boards = host.truth.boards()
    fake = cuda.FakeCuda(folder, library.parent)
    order = sorted(range(len(boards)), key=lambda at: _sorted_by(boards[at]), reverse=True)  # stable, so by address
    if order == sorted(order):
        order.sort(key=lambda at: _sorted_by(boards[at]))
    gpus = [_nvidia(board, host) for board in boards]
    fake.write(gpus, branch=host.branch or _DEFAULT_BRANCH, order=order[::-1] if host.reverse else order)
    return fake.state_path


def _sorted_by(board: Device) -> tuple[str, int, bool]:
    """What a driver might sort cards by, so that only those that are alike are sure to be in the order of the bus."""
    return board.name, board.memory_total_bytes or 0, bool(board.mig_mode)


def _nvidia(board: Device, host: Host) -> cuda.Gpu:
    parts = host.truth.parts(board.key)
    return cuda.Gpu(
        uuid=board.uuid,
        pci=board.pci_bus_id,
        name=board.name,
        mig=bool(board.mig_mode),
        accessible=not host.reach.isdisjoint({board.key, *(part.key for part in parts)}),
        instances=tuple(_instance(part) for part in parts),
    )


def _instance(part: Device) -> cuda.Mig:
    index, place = part.mig_index or 0, (part.gpu_instance or 0, part.compute_instance or 0)
    return cuda.Mig(index=index, gi=place[0], ci=place[1], uuid=part.uuid, name=part.name)


def _rocm(host: Host, folder: Path, library: Path) -> Path:
    """Cards whose nodes the inventory does not have get them the other way round than it lists the cards."""
    split = {device.parent for device in host.truth.devices}
    listed = [each for each in host.truth.devices if each.key not in split and each.kfd_listed is not False]
    nodes = [each.kfd_node for each in listed if each.kfd_node is not None]
    nodes = nodes if len(nodes) == len(listed) else list(range(len(listed)))[::-1]
    if host.reverse:
        nodes = [max(nodes) - node for node in nodes]
    fake = amdhip64.FakeHip(folder, library)
    fake.write([_amd(each, node, host) for each, node in zip(listed, nodes, strict=True)])
    return fake.state_path


def _amd(device: Device, node: int, host: Host) -> amdhip64.Gpu:
    bus = device.pci_bus_id.rpartition(".")[0]
    return amdhip64.Gpu(
        node=node,
        bdf=f"{bus}.{device.partition}" if device.parent else device.pci_bus_id,
        unique_id=int(device.uuid.removeprefix("GPU-") or "0", 16),
        name=device.name,
        accessible=device.key in host.reach or device.parent in host.reach,
        isa_ok=device.hsa_isa_ok,
        hip_ok=device.hip_ok,
    )


def _level_zero(host: Host, folder: Path, library: Path) -> Path:
    """Cards are discovered in another order than that of the bus; those whose family is not told are as their name."""
    boards = sorted(host.truth.boards(), key=lambda board: hashlib.sha256(board.pci_bus_id.encode()).digest())
    names = sorted({board.name for board in boards})
    fake = ze_driver.FakeZeDriver(folder, library)
    gpus = [_intel(board, host, names.index(board.name)) for board in boards]
    by_bus = sorted(range(len(boards)), key=lambda at: pci_sort_key(boards[at].pci_bus_id), reverse=True)
    fake.write(gpus, unsorted=by_bus if host.reverse else None)
    return fake.state_path


def _intel(board: Device, host: Host, name: int) -> ze_driver.Gpu:
    keys = {board.key, *(part.key for part in host.truth.parts(board.key))}
    rank = name + 1 if board.product_family_rank is None else board.product_family_rank
    return ze_driver.Gpu(
        bdf=board.pci_bus_id,
        name=board.name,
        tiles=board.tiles,
        hpc=board.hpc,
        integrated=board.integrated,
        rank=rank,
        accessible=not host.reach.isdisjoint(keys),
    )


def _vulkan(host: Host, folder: Path, library: Path) -> Path:
    devices = list(host.truth.vulkan or ())
    fake = vulkan.FakeVulkan(folder, library.parent)
    cards = {board.pci_bus_id: board.key for board in host.truth.boards()}
    closed = {address for address, key in cards.items() if key not in host.reach}
    places = sorted({device.pci_bus_id for device in devices})
    gpus = [_khronos(device, places.index(device.pci_bus_id), closed) for device in devices]
    fake.write(gpus[::-1] if host.reverse else gpus, layer=not host.raw_order)
    return fake.state_path


def _khronos(device: VulkanDevice, place: int, closed: set[str]) -> vulkan.Gpu:
    """A driver that is none of Khronos's list is played by one that ggml does not know."""
    told: dict[str, Any] = {"type": device.kind, "name": device.name, "fp16": device.fp16_storage}
    return vulkan.Gpu(
        driver=device.driver if device.driver in _VK_DRIVERS else "imagination",
        pci=device.pci_bus_id or None,
        vendor_id=_VK_VENDORS[device.vendor],
        device_id=0x1000 + place % 7,
        uuid=hashlib.md5((device.uuid or device.pci_bus_id).encode(), usedforsecurity=False).hexdigest(),
        accessible=device.pci_bus_id not in closed,
        boot_vga=bool(device.pci_bus_id) and place % 3 == 1,
        **told,
    )


WRITE: dict[str, Callable[[Host, Path, Path], Path]] = {
    "cuda": _cuda,
    "rocm": _rocm,
    "level_zero": _level_zero,
    "vulkan": _vulkan,
}


# --- answers as places


def shown(runtime: str, devices: Sequence[DriverDevice], host: Host) -> list[str]:
    """The places of the devices that a driver named, by ordinal. Vulkan names none."""
    return [_SHOWN[runtime](device, host.truth) for device in devices]


def _nvidia_place(told: DriverDevice, truth: Inventory) -> str:
    device = next(each for each in truth.devices if each.uuid == told.uuid)
    assert device.pci_bus_id == told.pci_bus_id, told
    return told.uuid


def _amd_place(told: DriverDevice, truth: Inventory) -> str:
    bus, _, function = told.pci_bus_id.rpartition(".")
    there = [each for each in truth.devices if each.pci_bus_id.rpartition(".")[0] == bus and each.parent]
    part = next((each for each in there if each.partition == function), None)
    device = part or next(each for each in truth.devices if each.pci_bus_id == told.pci_bus_id)
    assert device.uuid.lower() == told.uuid.lower(), told
    return device.key.identity


def _intel_place(told: DriverDevice, truth: Inventory) -> str:
    """A card with tiles that shows neither those it has nor which one it is has the tile 0 alone."""
    card = next(each for each in truth.boards() if each.pci_bus_id == told.pci_bus_id)
    count = card.tiles or 1
    tiles = told.tiles or ((told.tile or 0,) if count > 1 else (0,))
    return told.pci_bus_id if len(tiles) == count else f"{told.pci_bus_id}/t" + "+t".join(map(str, tiles))


_SHOWN: dict[str, Callable[[DriverDevice, Inventory], str]] = {
    "cuda": _nvidia_place,
    "rocm": _amd_place,
    "level_zero": _intel_place,
}


def raw_places(positions: Sequence[int], raw: Sequence[VulkanDevice] | None) -> list[str]:
    """The places of the entries of an enumeration."""
    entries = raw or ()
    return [f"{at} {entries[at].pci_bus_id} {entries[at].name} {entries[at].kind}" for at in positions]


def computed(runtime: str, devices: Sequence[Resolved], known: Inventory, host: Host) -> list[str]:
    """The places of the devices that the arithmetic names, which it may know by less than there is to know."""
    if runtime == "vulkan":
        return raw_places([device.raw_position or 0 for device in devices], known.vulkan)
    if runtime != "cuda":
        return [device.key.identity for device in devices]
    uuids = {board.pci_bus_id: board.uuid for board in host.truth.boards()}
    found = [known.find(device.key) for device in devices]
    return [device.uuid or uuids[device.pci_bus_id] for device in found if device is not None]
