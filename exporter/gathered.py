"""What a vendor's slots gave in one cycle, and the sample that is made of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from exporter.catalog import READINGS
from exporter.errors import BackendError, DeviceFault, DeviceLost
from exporter.model import Device, DeviceKey, DeviceState, Fault, Hint, Reading, State, User, VendorSample


class CardReport(NamedTuple):
    """A slot that was identified and read: the card and its parts, and all that they gave."""

    devices: tuple[Device, ...]
    readings: tuple[Reading, ...] = ()
    faults: tuple[Fault, ...] = ()
    hints: tuple[Hint, ...] = ()
    pending: bool = False
    users: tuple[User, ...] = ()
    users_of: tuple[DeviceKey, ...] = ()


class Sleeping(NamedTuple):
    """A slot whose card sleeps, and what is known of it."""

    devices: tuple[Device, ...]


Result = CardReport | Sleeping | BaseException | None


class Page:
    """A vendor's sample in the making. ``narrowed``: the settings leave less than all, so that one call that fails may
    be the only one that was made, and says nothing of its card.
    """

    def __init__(self, *, narrowed: bool = False) -> None:
        self._narrowed = narrowed
        self.devices: dict[DeviceKey, Device] = {}
        self.states: dict[DeviceKey, State] = {}
        self.readings: list[Reading] = []
        self.faults: list[Fault] = []
        self.hints: set[Hint] = set()
        self.users: list[User] = []
        self.users_of: list[DeviceKey] = []
        self.pending = False
        self.whole = True
        self.failed = 0

    def add(self, slot: str, result: Result | None, devices: tuple[Device, ...]) -> None:
        """One slot's result (None: its lane did not answer), with the devices that are, or were last, there."""
        state: State = "ok"
        if isinstance(result, CardReport):
            # Only cards that were read in this cycle have been added before.
            devices = self._unseen(slot, devices)
            known = {device.key for device in devices}
            self.readings += (reading for reading in result.readings if reading.key in known and _fits(reading))
            self.faults += (*result.faults, *_misfits(slot, result.readings))
            self.hints.update(result.hints)
            self.users += (user for user in result.users if user.key in known)
            self.users_of += (key for key in result.users_of if key in known)
            self.pending = self.pending or result.pending
            silent = len(result.faults) > self._narrowed and not result.readings
            if silent and not result.pending:  # it says who it is, and nothing else
                state = "lost"
                self.failed += 1
        elif isinstance(result, Sleeping):
            state = "asleep"
        else:
            state = "hung" if result is None else "lost"
            self.faults.append(_fault_of(slot, result, devices[0].key if devices else None))
            self.failed += result is not None and not isinstance(result, DeviceLost)
            # What was in the slot may have been read in another by now: who is here is not known then.
            self.whole = self.whole and any(device.key not in self.devices for device in devices)
        for device in devices:
            if device.key not in self.devices:
                self.devices[device.key] = device
                self.states[device.key] = state

    def _unseen(self, slot: str, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        """Without devices that another slot has given too: whose values would they be? Neither slot's are shown."""
        for device in devices:
            if device.key in self.devices:
                self.whole = False  # there is a card more than there are names
                self.states[device.key] = "lost"
                self.readings = [reading for reading in self.readings if reading.key != device.key]
                self.faults.append(Fault("driver-error", f"{slot}: {device.uuid} is in another slot too", device.key))
        return tuple(device for device in devices if device.key not in self.devices)

    def sample(self, vendor: str, driver_version: str, *, whole: bool) -> VendorSample:
        """What was gathered, in the order of physical indices."""
        order = sorted(self.devices.values(), key=_place)
        return VendorSample(
            vendor=vendor,
            driver_version=driver_version,
            whole=whole,
            devices=tuple(order),
            states=tuple(DeviceState(key, state) for key, state in self.states.items()),
            readings=tuple(self.readings),
            faults=tuple(self.faults),
            hints=tuple(sorted(self.hints)),
            pending=self.pending,
            users=tuple(self.users),
            users_of=tuple(self.users_of),
        )


def _fits(reading: Reading) -> bool:
    """The catalog has the metric, with so many labels of its own."""
    family = READINGS.get(reading.metric)
    return family is not None and len(family.own) == len(reading.labels)


def _misfits(slot: str, readings: Iterable[Reading]) -> Iterator[Fault]:
    """A backend's mistake costs the one reading, and no page."""
    for reading in readings:
        if not _fits(reading):
            detail = f"{slot}: the catalog has no {reading.metric} with {len(reading.labels)} labels"
            yield Fault("internal-error", detail, reading.key)


def _place(device: Device) -> tuple[int, str, int]:
    index = -1 if device.mig_index is None else device.mig_index
    return (2**31 if device.physical_index is None else device.physical_index), device.pci_bus_id, index


def _fault_of(slot: str, result: Result | None, key: DeviceKey | None) -> Fault:
    if result is None:
        return Fault("hung", f"{slot}: a call has not returned", key)
    if isinstance(result, DeviceFault | DeviceLost | BackendError):
        return Fault(result.reason, result.detail, key)
    return Fault("internal-error", f"{slot}: {type(result).__name__}: {result}", key)
