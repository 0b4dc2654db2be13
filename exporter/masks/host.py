"""The runtime ``host``: no mask at all; a device's fleet index is its physical index."""

from __future__ import annotations

from collections.abc import Mapping

from exporter.inventory import Inventory
from exporter.masks.base import Runtime
from exporter.model import Context, Inversion, Resolved


def invert(env: Mapping[str, str], inventory: Inventory, context: Context) -> Inversion:
    """Every device that has a physical index, boards and their parts; it cannot be refused.

    A device whose index the library does not tell (a card asleep since the start) is left out until it does.
    """
    del env, context
    return Inversion(
        tuple(
            Resolved(device.key, "proven", device.physical_index)
            for device in inventory.devices
            if device.physical_index is not None
        )
    )


RUNTIME = Runtime(name="host", vendors=(), masks=(), variables=(), default=False, moving=True, invert=invert)
