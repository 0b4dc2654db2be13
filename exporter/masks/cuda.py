"""CUDA: ``CUDA_VISIBLE_DEVICES`` over ``CUDA_DEVICE_ORDER``.

A mask of UUIDs needs no order. A mask of numbers, or none, counts the reachable cards in the driver's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from exporter.inventory import Inventory
from exporter.masks import front_end
from exporter.masks.base import RefusedError, Runtime
from exporter.masks.cuda_readings import MASK, Host, Target, targets
from exporter.model import Context, Device, DeviceKey, Evidence, Inversion, Layer, Refusal, Resolved

ORDER, MPS = "CUDA_DEVICE_ORDER", "CUDA_MPS_PIPE_DIRECTORY"

_MANY_INSTANCES_SINCE_BRANCH = 570
_MOST_INSTANCES = 64
_MEMORY_TOLERANCE = 0.05


def _reachable(inventory: Inventory, reach: frozenset[DeviceKey] | None) -> Host:
    boards, everything = inventory.boards(), inventory.devices
    parts = tuple(device for device in everything if device.parent is not None)
    if reach is not None:
        parts = tuple(part for part in parts if part.key in reach or part.parent in reach)
        seen = reach | {part.parent for part in parts}
        boards = tuple(board for board in boards if board.key in seen)
    named = {device.key.identity: device for device in (*boards, *parts)}
    return Host(boards, parts, named, len(boards), inventory.whole, reach is not None)


def invert(env: Mapping[str, str], inventory: Inventory, context: Context) -> Inversion | Refusal:
    """The devices that a CUDA process with this environment numbers 0..n-1, over one vendor's inventory."""
    host = _reachable(inventory, context.reach)
    mask = env.get(MASK)
    layer = Layer(MASK, mask, None)
    try:
        chosen, stopped = targets(mask, host)
        layer = Layer(MASK, mask, len(chosen), stopped)
        evidence = _evidence(env, host, chosen)
        devices = _instances([_device(target, host) for target in chosen], host, context.driver_branch)
        keys = front_end.virtual(env, [device.key for device in devices], context.frontend)
    except RefusedError as refusal:
        return Refusal(refusal.code, refusal.detail, (layer,))
    return Inversion(tuple(Resolved(key, evidence, index) for index, key in enumerate(keys)), (layer,))


def _device(target: Target, host: Host) -> Device:
    if isinstance(target, int):
        return host.cards[target]
    return host.named[target.identity]


def _evidence(env: Mapping[str, str], host: Host, chosen: Sequence[Target]) -> Evidence:
    """How surely numbers count cards in PCI order; a mask of identities, and a single card, need no order."""
    if not chosen or not isinstance(chosen[0], int):
        return "proven"
    if env.get(MPS) and (MASK in env or len(host.cards) > 1):
        raise RefusedError("mps", f"{MPS} is set: the mask's numbers are the MPS server's")
    if len(host.cards) < 2:
        return "proven"
    order = env.get(ORDER) or None
    if not all(card.pci_bus_id for card in host.cards):
        raise RefusedError("inventory-incomplete", "a card's PCI address is not known, so neither is its place")
    if order == "PCI_BUS_ID":
        return "proven"
    if order is None and _alike(host.cards):
        return "assumed"
    names = sorted({card.name or "unnamed" for card in host.cards})
    said = f"is {order!r}" if order else "is not set"
    kinds = ", ".join(names) if len(names) > 1 or order else f"{names[0]}, not known to be alike"
    raise RefusedError("order-unknown", f"{ORDER} {said} and the process can open {len(host.cards)} cards: {kinds}")


def _alike(cards: Sequence[Device]) -> bool:
    """Nothing that could sort the cards tells them apart: same model, same memory, same MIG mode, and all awake."""
    sizes = [card.memory_total_bytes for card in cards if card.memory_total_bytes]
    return (
        all(card.physical_index is not None for card in cards)
        and len({card.name for card in cards}) == 1
        and bool(cards[0].name)
        and len({bool(card.mig_mode) for card in cards}) == 1
        and (not sizes or max(sizes) - min(sizes) <= _MEMORY_TOLERANCE * max(sizes))
    )


def _instances(devices: Sequence[Device], host: Host, driver_branch: int | None) -> Sequence[Device]:
    """A card in MIG mode stands for its one instance; how many instances are visible depends on the driver branch."""
    resolved = [_stand_in(device, host) for device in devices]
    instances = [device for device in resolved if device.parent is not None]
    if instances and len(instances) < len(resolved):
        raise RefusedError("mig-mixed", "whole GPUs and MIG instances would be visible together")
    if len(instances) < 2:
        return resolved
    if driver_branch is None:
        raise RefusedError("mig-driver-unknown", f"{len(instances)} MIG instances, and the driver branch is not known")
    if driver_branch < _MANY_INSTANCES_SINCE_BRANCH:
        return instances[:1]
    if len({(part.parent, part.gpu_instance) for part in instances}) < len(instances):
        raise RefusedError("mig-multiplicity", "two compute instances of one GPU instance: CUDA shows one of them")
    if len(instances) > _MOST_INSTANCES:
        raise RefusedError("mig-multiplicity", f"{len(instances)} MIG instances: CUDA shows {_MOST_INSTANCES} of them")
    return instances


def _stand_in(device: Device, host: Host) -> Device:
    instances = host.instances(device)
    if device.parent is not None or not (device.mig_mode or instances):
        return device
    if len(instances) == 1:
        return instances[0]
    raise RefusedError("mig-multiplicity", f"{device.uuid} is in MIG mode with {len(instances)} instances")


RUNTIME = Runtime(
    name="cuda",
    vendors=("nvidia", "simulated"),
    masks=(MASK, ORDER),
    variables=(MASK, ORDER, MPS, front_end.VIRTUAL),
    default=True,
    moving=False,
    invert=invert,
    choosing=(MASK,),
    told_to_drivers=(MASK, ORDER),
)
