"""Reads a board or a MIG device: what the tables of this folder say, as far as it is wanted and offered."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from exporter.backends import pcie
from exporter.backends.base import Sampled
from exporter.backends.nvidia import fields, reads
from exporter.backends.nvidia.codes import NONE_HERE, NOT_OFFERED, raise_if_lost, reason_of
from exporter.backends.nvidia.events import Events
from exporter.backends.nvidia.fields import Given
from exporter.backends.nvidia.gpm import Monitoring
from exporter.backends.nvidia.reads import Read
from exporter.errors import DeviceFault
from exporter.model import Device, DeviceKey, Fault, Reading

# What a card has never given it is asked for so many times in a row, and then so much more rarely. What it has given
# once it is asked for in every cycle: an answer of "not supported" may pass.
_ASKED_AT_FIRST, _AGAIN_AFTER_SECONDS = 3, 30.0
_PROFILE = re.compile(r"MIG (\S+)$")


class _Board(NamedTuple):
    """What does not change while a board is there in one mode: the calls for it, and whether GPM tells of it."""

    mig_mode: bool | None
    rows: tuple[Read, ...]
    asked: tuple[fields.Asked, ...]
    monitored: bool


class _Missed:
    """How often a call has found nothing, and when last; ``given``: it has found something before."""

    def __init__(self) -> None:
        self.times, self.last, self.given = 0, 0.0, False

    def rests(self) -> bool:
        """It need not be tried now."""
        tried = self.times >= _ASKED_AT_FIRST and not self.given
        return tried and time.monotonic() - self.last < _AGAIN_AFTER_SECONDS

    def note(self, found: bool) -> None:
        """It was tried."""
        self.given = self.given or found
        self.times, self.last = (0 if found else self.times + 1), time.monotonic()


class _Kept:
    """What is known of a device from before: its board's facts, its constants, and which calls have found nothing."""

    def __init__(self, board_uuid: str) -> None:
        self.board_uuid = board_uuid
        self.board: _Board | None = None
        self.constants: dict[Read, tuple[Given, ...]] = {}
        self.missed: dict[tuple[bool | None, Read], _Missed] = {}


class _Taking:
    """What one device gives in one cycle."""

    def __init__(self, device: Device, kept: _Kept) -> None:
        self.key, self.kept = device.key, kept
        self.slot = device.uuid
        self.given: list[Given] = []
        self.faults: list[Fault] = []

    def gave(self, metrics: Iterable[str]) -> bool:
        """Any of these has a value already."""
        return any(each.value is not None and each.metric in metrics for each in self.given)

    def readings(self) -> tuple[Reading, ...]:
        """What has a value."""
        values = ((each, each.value) for each in self.given)
        return tuple(Reading(each.metric, self.key, value, each.labels) for each, value in values if value is not None)


class Sampling:
    """Keeps what is constant of each device, and what it does not offer."""

    def __init__(self, nvml: ModuleType, sysfs: str, wanted: frozenset[str]) -> None:
        self._nvml, self._sysfs, self._wanted = nvml, sysfs, wanted
        self.events = Events(nvml, wanted)
        self._monitoring = Monitoring(nvml, wanted)
        self._kept: dict[DeviceKey, _Kept] = {}

    def keep(self, boards: set[str]) -> None:
        """All but these boards, by UUID, have left: what is constant of a card may be another when it comes back."""
        known = dict(self._kept)  # copied: late lanes may add to it
        self._kept = {key: kept for key, kept in known.items() if kept.board_uuid in boards}

    def sample(self, device: Device, handle: Any, board_handle: Any) -> Sampled:
        """Raises ``DeviceLost`` and ``BackendAbsent``."""
        kept = self._kept.setdefault(device.key, _Kept((device.parent or device.key).identity))
        taking = _Taking(device, kept)
        if device.parent is None:
            board = self._board(device, kept, handle)
            self._fields(taking, device, board, handle)
            self._rows(taking, device, board.rows, handle)
        else:
            self._rows(taking, device, [row for row in reads.READS if row.parts], handle)
        pending = self._monitored(taking, device, board_handle)
        answers = bool(taking.readings()) or not taking.faults  # else the card says who it is, and nothing else
        if answers:
            self._beside(taking, device, handle)
        found = pcie.NOTHING
        if answers and device.parent is None:
            found = pcie.read(self._sysfs, device.pci_bus_id, device.key, self._wanted)
        return Sampled((*taking.readings(), *found.readings), (*taking.faults, *found.faults), pending=pending)

    def _board(self, device: Device, kept: _Kept, handle: Any) -> _Board:
        """Looked up when the board is first read."""
        known = kept.board
        if known is None or known.mig_mode != device.mig_mode:
            nvml = self._nvml
            fans = self._number(lambda: nvml.nvmlDeviceGetNumFans(handle), device) if self._wants("fan_speed") else 0
            with_links = self._wants("link_up", "link_transmitted", "link_received", "link_errors")
            links = self._number(lambda: fields.link_count(nvml, handle), device) if with_links else 0
            wants_gpm = bool(self._monitoring.metrics(device)) or (device.mig_mode and self._wants("utilization"))
            monitored = self._number(lambda: self._monitoring.supports(handle), device) if wants_gpm else 0
            rows = tuple(
                row for row in (*reads.READS, *reads.of_fans(fans)) if row.boards and self._wants(*row.metrics)
            )
            known = _Board(device.mig_mode, rows, fields.questions(self._wanted, links), bool(monitored))
            kept.board = known
        return known

    def _wants(self, *metrics: str) -> bool:
        return not self._wanted.isdisjoint(metrics)

    def _number(self, call: Callable[[], int], device: Device) -> int:
        """0 where the board does not say."""
        try:
            return call()
        except self._nvml.NVMLError as error:
            raise_if_lost(error, device.uuid)
            return 0

    def _fields(self, taking: _Taking, device: Device, board: _Board, handle: Any) -> None:
        if not board.asked:
            return
        try:
            taking.given += fields.read(self._nvml, handle, board.asked)
        except DeviceFault as fault:
            taking.faults.append(Fault(fault.reason, fault.detail, device.key))
        except self._nvml.NVMLError as error:
            raise_if_lost(error, device.uuid)
            if error.value not in NOT_OFFERED:
                taking.faults.append(Fault(reason_of(error.value), f"nvmlDeviceGetFieldValues: {error}", device.key))

    def _rows(self, taking: _Taking, device: Device, rows: Sequence[Read], handle: Any) -> None:
        for row in rows:
            missed = taking.kept.missed.setdefault((device.mig_mode, row), _Missed())
            if not self._wants(*row.metrics) or missed.rests() or (row.instead and taking.gave(row.metrics)):
                continue
            found = self._call(taking, row, handle)
            if found is not None:
                missed.note(bool(found))
                taking.given += found

    def _call(self, taking: _Taking, row: Read, handle: Any) -> tuple[Given, ...] | None:
        """What a call gives, nothing where the device does not offer it, and None where it has failed."""
        try:
            return tuple(row.call(self._nvml, handle))
        except self._nvml.NVMLError as error:
            raise_if_lost(error, taking.slot)
            if error.value in NOT_OFFERED:
                return ()
            taking.faults.append(Fault(reason_of(error.value), f"{', '.join(row.metrics)}: {error}", taking.key))
            return None

    def _monitored(self, taking: _Taking, device: Device, board_handle: Any) -> bool:
        """Whether GPM needs another cycle. It knows GPU instances: parts of one have no shares of their own."""
        of_board = self._kept.get(device.parent or device.key)
        board = None if of_board is None else of_board.board
        if board is None or not board.monitored or not self._monitoring.metrics(device) or _shares_its_instance(device):
            return False
        try:
            found = self._monitoring.read(device, board_handle)
        except self._nvml.NVMLError as error:
            raise_if_lost(error, device.uuid)
            return False
        taking.given += found or ()
        return found is None

    def _beside(self, taking: _Taking, device: Device, handle: Any) -> None:
        """What says nothing of whether the card answers: constants, and what the driver has told by itself."""
        if device.parent is None:
            for row in reads.CONSTANTS:
                if self._wants(*row.metrics):
                    taking.given += self._constant(taking, row, handle)
            taking.given += self.events.of(device.key)
            return
        taking.given += _profile(device)
        if self._wants("multiprocessors"):
            taking.given += self._constant(taking, _MULTIPROCESSORS, handle)

    def _constant(self, taking: _Taking, row: Read, handle: Any) -> tuple[Given, ...]:
        """Asked for until it is known, or known not to be offered; what fails here is no fault of the cycle."""
        known = taking.kept.constants.get(row)
        if known is None:
            try:
                known = tuple(row.call(self._nvml, handle))
            except self._nvml.NVMLError as error:
                raise_if_lost(error, taking.slot)
                if error.value not in NONE_HERE:
                    return ()
                known = ()
            taking.kept.constants[row] = known
        return known


def _profile_of(device: Device) -> str:
    """The library puts the profile's name at the end of an instance's; empty where it does not."""
    found = _PROFILE.search(device.name)
    return "" if found is None else found[1]


def _profile(device: Device) -> Iterator[Given]:
    name = _profile_of(device)
    if name:
        yield Given("mig_instance", 1.0, (name,))


def _shares_its_instance(device: Device) -> bool:
    """A compute instance that is less than its GPU instance has a profile such as ``1c.3g.20gb``."""
    return device.parent is not None and not re.match(r"[0-9]+g\.", _profile_of(device))


def _multiprocessors(nvml: ModuleType, handle: Any) -> Iterable[Given]:
    return (Given("multiprocessors", float(nvml.nvmlDeviceGetAttributes(handle).multiprocessorCount)),)


_MULTIPROCESSORS = Read(("multiprocessors",), _multiprocessors)
