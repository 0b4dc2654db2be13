"""What is said of a metric family beside its values."""

from __future__ import annotations

from typing import Literal, NamedTuple

from exporter.vendors import VENDORS

DEVICE_LABELS = ("vendor", "physical_index", "pci_bus_id", "uuid", "gpu_partition")
ATTRIBUTED_LABELS = ("fleet", "fleet_index", "physical_index", "vendor", "pci_bus_id", "uuid", "gpu_partition")


class Family(NamedTuple):
    """One metric family. A label whose value is empty is left out of the series.

    Of a reading's family ``own`` are the labels beside those that say whose it is, the last of ``labels``; ``sources``
    says for each vendor which call or file gives it, and since which hardware or driver; ``costly`` says what reading
    it costs, where it is not read unless the settings name it; of those that add up, several parts of a card have the
    sum.
    """

    name: str
    kind: Literal["gauge", "counter"]
    meaning: str
    labels: tuple[str, ...]
    own: tuple[str, ...] = ()
    sources: tuple[tuple[str, str], ...] = ()
    costly: str = ""
    adds_up: bool = False

    @property
    def help(self) -> str:
        """What a page says of it: the meaning, what it costs, and where each vendor's is from."""
        cost = f" Read on request: {self.costly}." if self.costly else ""
        told = "".join(f" {VENDORS[vendor].title}: {source}." for vendor, source in self.sources)
        return f"{self.meaning}{cost}{told}"


def reading(
    name: str,
    meaning: str,
    *,
    own: tuple[str, ...] = (),
    costly: str = "",
    adds_up: bool = False,
    **sources: str,
) -> Family:
    """A reading's family: a counter where the name ends so. ``sources`` are by vendor."""
    return Family(
        name,
        "counter" if name.endswith("_total") else "gauge",
        meaning,
        (*ATTRIBUTED_LABELS, *own),
        own=own,
        sources=tuple(sources.items()),
        costly=costly,
        adds_up=adds_up,
    )
