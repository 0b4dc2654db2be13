"""What is said of a metric family beside its values."""

from __future__ import annotations

from typing import Literal, NamedTuple

DEVICE_LABELS = ("vendor", "physical_index", "pci_bus_id", "uuid", "gpu_partition")
ATTRIBUTED_LABELS = ("fleet", "fleet_index", "physical_index", "vendor", "pci_bus_id", "uuid", "gpu_partition")

VENDOR_NAMES = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel"}


class Family(NamedTuple):
    """One metric family. A label whose value is empty is left out of the series.

    Of a reading's family ``own`` are the labels beside those that say whose it is, the last of ``labels``; ``sources``
    says for each vendor which call or file gives it, and since which hardware or driver; ``costly`` ones are not read
    unless the settings name them; of those that add up, several parts of a card have the sum.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...]
    own: tuple[str, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()
    costly: bool = False
    adds_up: bool = False


def reading(
    name: str,
    meaning: str,
    *,
    own: tuple[str, ...] = (),
    costly: bool = False,
    adds_up: bool = False,
    **sources: str,
) -> Family:
    """A reading's family: a counter where the name ends so. The help is the meaning and where each vendor's is from."""
    told = "".join(f" {VENDOR_NAMES[vendor]}: {source}." for vendor, source in sources.items())
    return Family(
        name,
        "counter" if name.endswith("_total") else "gauge",
        f"{meaning}{told}",
        (*ATTRIBUTED_LABELS, *own),
        own=own,
        sources=tuple(sources.items()),
        costly=costly,
        adds_up=adds_up,
    )
