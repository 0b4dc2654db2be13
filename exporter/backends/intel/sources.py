"""Where an Intel card's readings come from, the first that knows: the kernel's files, Sysman, and for the utilization
the card's clients and ``intel_gpu_top``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from exporter import units
from exporter.backends.base import Places
from exporter.backends.intel import clients
from exporter.backends.intel.clients import ClientMeter, Scan
from exporter.backends.intel.gpu_top import GpuTop
from exporter.backends.intel.sysman import WHOLE, Sysman
from exporter.backends.kernel_files import number
from exporter.model import Device, Hint

Values = Sequence[float | None]

NO_SYSMAN = Hint(
    "install-level-zero",
    "memory: the kernel tells it to Level Zero Sysman alone; install Intel's Level Zero loader and GPU driver, and the "
    "extra gpu-fleet-exporter[intel]",
)
NO_MEMORY_RIGHT = Hint("grant-cap-perfmon", "memory: the driver counts what is used only for who has CAP_PERFMON")


class Sources:
    """All of them, with what each keeps from one cycle to the next."""

    def __init__(self, places: Places) -> None:
        self._procfs = places.procfs
        self.sysman = Sysman(places)
        self._scan = Scan(0, {}, None)
        self._meters: dict[str, ClientMeter] = {}
        self._tops: dict[str, GpuTop] = {}

    def look_at_clients(self, nodes: Mapping[str, str]) -> None:
        """Once a cycle: which processes have which card open. ``nodes`` has the card of each DRM node."""
        uncounted = {node: address for node, address in nodes.items() if not self.sysman.counts(address)}
        number_ = self._scan.number + 1
        self._scan = clients.scan(number_, self._procfs, uncounted) if uncounted else Scan(number_, {}, None)

    def utilization(self, device: Device, driver: str) -> Values:
        """By Sysman where it counts, else by the card's clients, else by the kernel's performance counters."""
        address = device.pci_bus_id
        value = self.sysman.utilization(address, _tile(device))
        if device.parent is not None or self.sysman.counts(address):
            return (value,)
        meter = self._meter(address)
        value = meter.percent(self._scan)
        if value is None and meter.hint is not None and driver == "i915":
            value = self._tops.setdefault(address, GpuTop(address)).percent()
        return (value,)

    def memory(self, device: Device) -> Values:
        """Free, used and total, which Sysman alone knows."""
        return self.sysman.memory(device.pci_bus_id, _tile(device))

    def temperature(self, device: Device, path: str) -> Values:
        """By the kernel's file where there is one for the card, else by Sysman."""
        if not path or device.parent is not None:
            return (self.sysman.temperature(device.pci_bus_id, _tile(device)),)
        value = number(path)
        return (None if value is None else units.millidegrees(value),)

    def hints(self, device: Device, given: set[str]) -> Iterator[Hint]:
        """What would bring the readings that a card of this kind could have, and has not."""
        address = device.pci_bus_id
        if device.parent is not None:
            return
        if "utilization" not in given and not self.sysman.counts(address):
            top = self._tops.get(address)
            yield from (hint for hint in (self._meter(address).hint, top and top.hint) if hint)
        if "memory_free" not in given and device.integrated is False:
            yield NO_MEMORY_RIGHT if self.sysman.has_memory(address) else NO_SYSMAN

    def _meter(self, address: str) -> ClientMeter:
        return self._meters.setdefault(address, ClientMeter(address))


def _tile(device: Device) -> int | None:
    return WHOLE if device.parent is None else int(device.partition)
