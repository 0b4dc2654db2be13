"""What a fleet's processes are seen to compute on, held against its inverted masks. Pure.

A card in use that the masks hide is a contradiction. A card in use that they name proves nothing about its number,
unless the process sees one device alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from exporter.inventory import Inventory
from exporter.masks import RUNTIMES
from exporter.model import Device, DeviceKey, Fleet, Inversion, Live, Refusal, Resolved, VendorSample

_ORDER_ONLY = ("order-unknown", "driver-order-unknown", "kfd-order-unknown", "multiple-driver-libraries")
"""Refusals of masks of which only the order of the devices is not known."""


def corroborated(
    fleet: Fleet, runtime: str, outcome: Inversion | Refusal, samples: Sequence[VendorSample]
) -> Inversion | Refusal:
    """The outcome; a refusal where a card in use contradicts it, an inversion where one proves it."""
    rules = RUNTIMES[runtime]
    if fleet.live is None or rules.joint or rules.moving:  # graphics and compute of Vulkan cannot be told apart
        return outcome
    inventory = Inventory(tuple(device for sample in samples for device in sample.devices))
    used = _used(fleet.live, samples, inventory)
    if not used:
        return outcome
    if isinstance(outcome, Refusal):
        one = len(used) == 1 and outcome.code in _ORDER_ONLY and bool(outcome.layers) and outcome.layers[-1].left == 1
        told = f"the masks leave one device, and the process computes on {used[0].key.identity}"
        return Inversion((Resolved(used[0].key, "proven", 0),), outcome.layers, (told,)) if one else outcome
    hidden = [device for device in used if not _is_among(device, outcome, inventory)]
    if not hidden:
        return outcome
    seen = ", ".join(resolved.key.identity for resolved in outcome.devices) or "no device"
    names = ", ".join(device.key.identity for device in hidden)
    return Refusal("contradicted", f"the process computes on {names}; its masks leave {seen}", outcome.layers)


def _used(live: Live, samples: Sequence[VendorSample], inventory: Inventory) -> list[Device]:
    """The devices that compute for the fleet's processes."""
    found = (user for sample in samples for user in sample.users if user.does == "computes")
    keys = {user.key for user in found if user.pid in live.pids}
    return [
        device
        for device in inventory.devices
        if device.key in keys or (device.parent is None and device.pci_bus_id in live.used)
    ]


def _is_among(device: Device, outcome: Inversion, inventory: Inventory) -> bool:
    """The masks leave the device, or a part of it, or the whole of which it is a part."""
    left = {resolved.key for resolved in outcome.devices}
    wholes: set[DeviceKey] = {found.parent for key in left if (found := inventory.find(key)) and found.parent}
    return device.key in left or device.key in wholes or device.parent in left
