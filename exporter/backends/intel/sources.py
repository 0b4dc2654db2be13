"""Where an Intel card's readings come from, the first that knows: the kernel's files, Sysman, and for the utilization
the card's clients and ``intel_gpu_top``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from exporter import units
from exporter.backends.base import Places, Use
from exporter.backends.intel import clients, regions
from exporter.backends.intel.client_meter import ClientMeter, Looked
from exporter.backends.intel.clients import Scan
from exporter.backends.intel.gpu_top import GpuTop
from exporter.backends.intel.sysman import WHOLE, Sysman
from exporter.backends.kernel_files import number
from exporter.errors import DeviceFault
from exporter.model import Device, Hint

Values = Sequence[float | None]

# In a row, of Sysman's counters of a card, before it is asked for them no more for a while.
_MOST_FAULTS, _AGAIN_AFTER_SECONDS = 3, 300.0
_NO_SYSMAN = "install-level-zero"
_HOW = "install Intel's Level Zero loader and GPU driver, and the extra gpu-fleet-exporter[intel]"
_ELSE_SYSMAN = "memory: this kernel's driver does not tell it; Level Zero Sysman would"
NO_MEMORY_RIGHT = Hint(
    "grant-cap-perfmon",
    "memory: the driver counts what is used only for who has CAP_PERFMON (under systemd the drop-in intel-pmu.conf)",
)
NO_DEVICE_FILE = Hint(
    "join-group-render",
    "memory: the daemon may not open the card's device file in /dev/dri; let it be in the group render, and give it "
    "CAP_PERFMON (under systemd the drop-in intel-pmu.conf), without which the driver does not count what is used",
)


class Sources:
    """All of them, with what each keeps from one cycle to the next."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self.sysman = Sysman(places)
        self._scan = self._wider = Scan(0, {}, None)
        self._nodes: Mapping[str, str] = {}
        self._widening = threading.Lock()
        self._looked: dict[str, Looked] = {}
        self._meters: dict[str, ClientMeter] = {}
        self._tops: dict[str, GpuTop] = {}
        self._sized: set[str] = set()
        self._failing: dict[str, float] = {}
        self._faults: dict[str, int] = {}

    def look_at_clients(self, nodes: Mapping[str, str]) -> None:
        """Once a cycle: which processes have which card open. ``nodes`` has the card of each DRM node.

        That reads the names of all files that all processes have open, so it is done for cards that nothing else tells
        of, and for all where their processes are to be counted.
        """
        wanted, number_ = self._places.wanted, self._wider.number + 1
        counted = "processes" in wanted
        by_clients = counted or not wanted.isdisjoint(("utilization", "engine"))
        looked_for = {
            node: address for node, address in nodes.items() if counted or (by_clients and not self._counted(address))
        }
        scan = clients.scan(number_, self._places.procfs, looked_for) if looked_for else Scan(number_, {}, None)
        self._nodes, self._scan, self._wider = nodes, scan, Scan(number_, {}, None)

    def begin(self, address: str) -> None:
        """A card is to be read: what its clients did until now is of the reading before."""
        self._looked.pop(address, None)

    def engines(self, address: str) -> Mapping[str, float]:
        """The share of each class of engines, by the card's clients, else by the kernel's performance counters."""
        if self._counted(address):
            return {}
        found = self._look(address).engines
        top = self._tops.get(address)
        return found if found is not None else top.engines() if top is not None else {}

    def processes(self, address: str) -> int | None:
        """How many use the card."""
        self._look(address)
        return self._meter(address).processes()

    def users(self, address: str) -> Collection[Use] | None:
        """All processes that have the card open; None where some may be hidden. Raises ``DeviceFault``."""
        if address in self._scan.files:
            self._look(address)
        else:
            self._meter(address).look(self._widened())
        return self._meter(address).uses()

    def _widened(self) -> Scan:
        """Of the cards that the cycle's scan did not look for, once a cycle, and only when somebody asks."""
        with self._widening:
            if self._wider.number == self._scan.number:
                others = {node: each for node, each in self._nodes.items() if each not in self._scan.files}
                self._wider = clients.scan(self._scan.number + 1, self._places.procfs, others)
            return self._wider

    def _look(self, address: str) -> Looked:
        """Once a reading of the card. Raises ``DeviceFault``, and then knows nothing."""
        if address not in self._looked:
            self._looked[address] = Looked()
            self._looked[address] = self._meter(address).look(self._scan)
        return self._looked[address]

    def utilization(self, device: Device, driver: str) -> Values:
        """By Sysman where it counts, else by the card's clients, else by the kernel's performance counters."""
        address = device.pci_bus_id
        if device.parent is not None:
            return (self.sysman.utilization(address, _tile(device)),)
        try:
            value = None if self._fails(address) else self.sysman.utilization(address, WHOLE)
            self._faults.pop(address, None)
        except DeviceFault:
            self._faults[address] = self._faults.get(address, 0) + 1
            if self._faults[address] >= _MOST_FAULTS:  # from the next cycle on its clients are counted
                self._failing[address] = time.monotonic()
            raise
        if self._counted(address):
            self._stop_top(address)
            return (value,)
        meter = self._meter(address)
        shown = self._look(address).percent
        if meter.hint is None:
            self._stop_top(address)
        elif driver == "i915":
            shown = self._tops.setdefault(address, GpuTop(address)).percent()
        return (shown if value is None else value,)

    def memory(self, device: Device, driver: str) -> Values:
        """Free, used and total: of a card as its driver counts them, else as Sysman does, which alone knows tiles."""
        address = device.pci_bus_id
        counted = None if device.parent is not None or device.integrated else self._regions(device.minor_number, driver)
        if counted is not None and counted.used is not None:
            return counted.total - counted.used, counted.used, counted.total
        free, used, total = self.sysman.memory(address, _tile(device))
        if total is None and counted is not None:
            total = counted.total
        if total is not None:
            self._sized.add(address)
        return free, used, total

    def total_bytes(self, device: Device, driver: str, minor_number: int | None) -> int | None:
        """A card's own memory. Raises ``DeviceFault`` and ``DeviceLost``."""
        counted = None if device.integrated else self._regions(minor_number, driver)
        return self.sysman.total_bytes(device.pci_bus_id) if counted is None else counted.total

    def _regions(self, minor_number: int | None, driver: str) -> regions.Memory | None:
        node = self._device_file(minor_number)
        return None if node is None else regions.of_card(node, driver)

    def _device_file(self, minor_number: int | None) -> str | None:
        """None where the sysfs is not this system's own, so that a device file of that number may be another card's."""
        own = Path(self._places.root, "sys") == Path(self._places.sysfs)
        return str(Path(self._places.root, f"dev/dri/renderD{minor_number}")) if own and minor_number else None

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
        if "utilization" not in given and not self._counted(address):
            top = self._tops.get(address)
            yield from (hint for hint in (self._meter(address).hint, top and top.hint) if hint)
        if "memory_free" not in given and device.integrated is False:
            node = self._device_file(device.minor_number)
            if address in self._sized or self.sysman.has_memory(address):
                yield NO_MEMORY_RIGHT
            elif node is not None and Path(node).exists() and not os.access(node, os.R_OK | os.W_OK):
                yield NO_DEVICE_FILE
            else:
                yield self._no_sysman(address)

    def pending(self, device: Device, given: set[str]) -> bool:
        """Whether a counter of the card was read, of which a share needs another reading."""
        address = device.pci_bus_id
        counted = self._counted(address) or self._meter(address).hint is None
        return device.parent is None and "utilization" not in given and counted

    def forget(self, address: str) -> None:
        """What the card has done so far says nothing of what it does next: it sleeps, or is another card."""
        self.sysman.forget(address)
        self._failing.pop(address, None)
        self._faults.pop(address, None)
        self._stop_top(address)
        if address in self._meters:
            self._meters[address].forget()

    def _counted(self, address: str) -> bool:
        """Sysman has counters of the card's engines, and tells them."""
        return self.sysman.counts(address) and not self._fails(address)

    def _fails(self, address: str) -> bool:
        """Sysman has failed to tell them several times in a row, not long ago."""
        since = self._failing.get(address)
        return since is not None and time.monotonic() - since < _AGAIN_AFTER_SECONDS

    def _no_sysman(self, address: str) -> Hint:
        if self.sysman.absent:
            return Hint(_NO_SYSMAN, f"{_ELSE_SYSMAN}, and {self.sysman.absent}; {_HOW}")
        if not self.sysman.serves:
            return Hint(_NO_SYSMAN, f"{_ELSE_SYSMAN}, which is still starting, or waits until no Intel card sleeps")
        return Hint(_NO_SYSMAN, f"{_ELSE_SYSMAN}, which knows none of {address}; {_HOW}, newer than the card")

    def _stop_top(self, address: str) -> None:
        top = self._tops.pop(address, None)
        if top is not None:
            top.stop()

    def _meter(self, address: str) -> ClientMeter:
        return self._meters.setdefault(address, ClientMeter(address))


def _tile(device: Device) -> int | None:
    return WHOLE if device.parent is None else int(device.partition)
