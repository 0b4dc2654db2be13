"""What the kernel's DRM drivers publish in sysfs: small files, one value each, with the errors that they answer.

A file that is not there, or that the driver says it does not serve for this card, is absence. Anything else that is not
a value is a fault: what cannot be read must not pass for what does not exist, nor for 0.
"""

from __future__ import annotations

import errno
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from exporter import pci
from exporter.errors import BackendAbsent, DeviceFault, DeviceLost
from exporter.model import DeviceKey, Fault
from exporter.units import pci_bus_id

# What drivers answer where a card has no such value: hwmon's "no data", and "not supported" in two spellings.
_NOT_OFFERED = (errno.ENOENT, errno.ENOTDIR, errno.EOPNOTSUPP, errno.ENODATA, errno.EINVAL)
_GONE = (errno.ENODEV, errno.ENXIO)
# Of 64 bits: no driver has a larger one, and no message can carry it.
_NUMBERS = {10: re.compile(r"-?[0-9]{1,20}", re.ASCII), 16: re.compile(r"(?:0x)?[0-9a-fA-F]{1,16}", re.ASCII)}
_MOST_BYTES = 4096  # a sysfs file of text has at most a page, and a read of any gives no more


def text(path: str) -> str | None:
    """The file's text without the line's end; None where the card has no such value.

    Raises ``DeviceLost`` where the driver says that the device is gone, and ``DeviceFault`` for every other error.
    """
    found = data(path)
    return None if found is None else found.decode("utf-8", "replace").strip()


def data(path: str, pages: int = 1) -> bytes | None:
    """The file's bytes, as far as so many reads go; None where the card has no such value. Raises as :func:`text`."""
    found = b""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            for _ in range(pages):
                page = file.read(_MOST_BYTES)
                if page is None:  # how Python's plain files tell this one error
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                found += page
                if not page:
                    break
    except OSError as error:
        _raise_unless_absent(error, path)
        return None
    return found


def _raise_unless_absent(error: OSError, path: str) -> None:
    if error.errno in _GONE:
        raise DeviceLost(f"{path}: {error.strerror}") from error
    if error.errno not in _NOT_OFFERED:
        reason = "no-permission" if error.errno == errno.EACCES else "driver-error"
        raise DeviceFault(reason, f"{path}: {error.strerror}") from error


def number(path: str, base: int = 10) -> int | None:
    """The file's number; None where the card has no such value. Raises as :func:`text`, also for what is no number."""
    found = text(path)
    if found is None:
        return None
    if not _NUMBERS[base].fullmatch(found):
        raise DeviceFault("driver-error", f"{path}: found {found[:40]!r}, expected a number of 64 bits")
    return int(found, base)


def probe(path: str) -> bool:
    """Whether a file is there, which is read for its error alone. Raises as :func:`text`, also for an empty one."""
    found = text(path)
    if found == "":
        raise DeviceFault("driver-error", f"{path}: found nothing, expected data")
    return found is not None


def names(folder: str) -> list[str]:
    """What is in a folder, in order; empty where there is none, or none that can be read."""
    try:
        return listed(folder)
    except (DeviceFault, DeviceLost):
        return []


def names_or_none(folder: str) -> list[str] | None:
    """As :func:`names`; None where there is no folder, or none that can be read."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208  (names are all that is wanted)
    except OSError:
        return None


def listed(folder: str) -> list[str]:
    """As :func:`names`, but raises as :func:`text`."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208  (names are all that is wanted)
    except OSError as error:
        _raise_unless_absent(error, folder)
        return []


def device_folder(sysfs: str, address: str) -> str:
    """Where the files of a PCI device are."""
    return f"{sysfs}/bus/pci/devices/{address}"


def power_faults(sysfs: str, address: str, key: DeviceKey) -> tuple[Fault, ...]:
    """What stands for the faults of files that say of a card without power management that it has no such value."""
    if not pci.power_has_failed(sysfs, address):
        return ()
    return (Fault("driver-error", f"{address}: power/runtime_status is 'error': what it must be awake for fails", key),)


def incarnation(sysfs: str, address: str) -> int:
    """Another number when the card was taken from its driver and given back, and its files have other names; 0 where it
    has no DRM device.
    """
    try:
        return os.stat(f"{device_folder(sysfs, address)}/drm").st_ino  # noqa: PTH116  (once a card and cycle)
    except OSError:
        return 0


class Sensor(NamedTuple):
    """A temperature of a card: the driver's label, and the file with the value in thousandths of a degree."""

    label: str
    path: str

    def beside(self, what: str) -> str:
        """The file of the same sensor with something else of it: ``crit`` for ``temp2_crit``."""
        return f"{self.path.removesuffix('input')}{what}"


class Sensors(NamedTuple):
    """The temperatures of a card by label, and why a label could not be read."""

    by_label: Mapping[str, Sensor] = MappingProxyType({})
    trouble: DeviceFault | None = None

    def of(self, label: str) -> Sensor | None:
        """None where the card has no such sensor. Raises ``DeviceFault`` where it may have one whose label could not be
        read.
        """
        if self.trouble is not None and label not in self.by_label:
            raise self.trouble
        return self.by_label.get(label)


def temperature_sensors(folder: str) -> Sensors:
    """What a card's driver publishes through hwmon. Raises as :func:`text` where its sensors cannot be listed."""
    found: dict[str, Sensor] = {}
    trouble: DeviceFault | None = None
    for path in _labels(folder):
        try:
            label = text(path)
        except DeviceFault as fault:
            trouble = fault
            continue
        if label:
            found.setdefault(label, Sensor(label, path.removesuffix("label") + "input"))
    return Sensors(found, trouble)


def temperature_sensor(folder: str, labels: Sequence[str]) -> Sensor | None:
    """The first of these temperatures, by label, that a card's driver publishes through hwmon.

    Raises as :func:`text` where a label could not be read, and may be one that comes before what was found.
    """
    return first_of(temperature_sensors(folder), labels)


def first_of(sensors: Sensors, labels: Sequence[str]) -> Sensor | None:
    """The first of these temperatures; raises as :func:`temperature_sensor`."""
    known = (sensors.by_label.get(label) for label in labels)
    return sensors.of(labels[0]) or next((sensor for sensor in known if sensor is not None), None)


def monitors(folder: str) -> list[str]:
    """The hwmon folders of a device. Raises as :func:`text` where they cannot be listed."""
    return [f"{folder}/hwmon/{name}" for name in listed(f"{folder}/hwmon")]


def _labels(folder: str) -> Iterator[str]:
    for monitor in monitors(folder):
        for name in listed(monitor):
            if re.fullmatch(r"temp[0-9]+_label", name):
                yield f"{monitor}/{name}"


def minor_number(folder: str) -> int | None:
    """The number of the card's DRM render node (``renderD128``), which is its device file's minor number."""
    found = (re.fullmatch(r"renderD([0-9]+)", name) for name in names(f"{folder}/drm"))
    return next((int(match[1]) for match in found if match), None)


def driver_version(sysfs: str, driver: str) -> str:
    """The version of a driver that is not the kernel's own, else the kernel's, whose driver it is then."""
    try:
        return text(f"{sysfs}/module/{driver}/version") or os.uname().release
    except (DeviceFault, DeviceLost):
        return os.uname().release


ARRIVING = ""
"""In place of a driver's name: no driver has taken the card yet, and one may."""

# Drivers take a host's cards one after the other while it boots, and a card that is plugged in within a moment.
_BOOTING_SECONDS = 300.0
_PLUGGED_SECONDS = 60.0


def _since_boot(procfs: str) -> float:
    """Seconds; endless where nobody says."""
    try:
        with open(f"{procfs}/uptime", "rb", buffering=0) as file:  # noqa: PTH123
            return float(file.read(64).split()[0])
    except (OSError, ValueError, IndexError):
        return math.inf


class Bus:
    """A vendor's GPUs on the PCI bus, in the order of their addresses.

    What kind of device an address has is read once, while the address stays; the driver is read each time.
    """

    def __init__(self, sysfs: str, procfs: str, vendor: str) -> None:
        self._sysfs, self._procfs, self._vendor = sysfs, procfs, vendor
        self._kinds: dict[str, bool] = {}
        self._since: dict[str, float] | None = None
        self._taken: set[str] = set()

    def drivers(self) -> dict[str, str]:
        """The address and the driver of each GPU that a driver of the host serves, or may be about to, by address.

        A card that no driver has taken for a while, or that is handed to a virtual machine, is not this host's to use.
        Raises ``BackendAbsent`` where the bus cannot be read, which says nothing of what is on it.
        """
        there = self._addresses()
        for gone in self._kinds.keys() - set(there):
            del self._kinds[gone]
        for address in there:
            if address not in self._kinds and pci.is_known(self._sysfs, address):
                self._kinds[address] = pci.is_gpu(self._sysfs, address, self._vendor)
        cards = [address for address in there if self._kinds.get(address)]
        found = {address: pci.driver_of(self._sysfs, address) for address in cards}
        self._taken = {address for address in cards if found[address] is not None or address in self._taken}
        arriving = self._arriving([address for address in cards if address not in self._taken])
        kept = {address: driver or ARRIVING for address, driver in found.items() if driver or address in arriving}
        return dict(sorted(kept.items(), key=_by_address))

    def _addresses(self) -> list[str]:
        try:
            found = map(pci_bus_id, listed(f"{self._sysfs}/bus/pci/devices"))
        except DeviceFault as fault:
            raise BackendAbsent(fault.reason, fault.detail) from fault
        return [address for address in found if address]

    def _arriving(self, without: Sequence[str]) -> set[str]:
        """Those that no driver has taken so far, and one may: while the host boots all, later those plugged in."""
        now, known = time.monotonic(), self._since
        if known is None:  # the first look: what is there was there before
            known = dict.fromkeys(without, now - _PLUGGED_SECONDS)
        self._since = {address: known.get(address, now) for address in without}
        booting = bool(without) and _since_boot(self._procfs) < _BOOTING_SECONDS
        return {address for address, since in self._since.items() if booting or now - since < _PLUGGED_SECONDS}


def _by_address(item: tuple[str, str]) -> tuple[int, str]:
    """Domains have four digits or more, so the longer is the larger."""
    return len(item[0]), item[0]
