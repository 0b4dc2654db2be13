"""XID errors: what NVIDIA's driver numbers and tells, to those who have asked, when it happens.

One event set for all boards, emptied once a cycle without waiting. What happens while a board is not registered is not
told, so its count starts with its registration.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from exporter.backends.nvidia.codes import TIMEOUT
from exporter.backends.nvidia.fields import Given
from exporter.model import DeviceKey

METRICS = ("xid_errors", "xid_last_code", "xid_last_time")

_MOST_AT_ONCE = 256  # a storm goes on in the next cycle


class _Count:
    """A board's errors since it was registered, under which handle it was, and the last one."""

    def __init__(self, address: int) -> None:
        self.address, self.errors, self.code, self.seconds = address, 0, 0, 0.0


class Events:
    """The errors of each board that can be registered."""

    def __init__(self, nvml: ModuleType, wanted: frozenset[str]) -> None:
        self._nvml = nvml
        self._wanted = not wanted.isdisjoint(METRICS)
        self._set: Any = None
        self._counts: dict[DeviceKey, _Count] = {}
        self._refused: set[tuple[DeviceKey, int]] = set()

    def register(self, key: DeviceKey, handle: Any) -> None:
        """From now on the board's errors are told; again where it has come back under another handle."""
        address = _address(handle)
        known = self._counts.get(key)
        same = known is not None and known.address == address
        if self._set is None or same or address is None or (key, address) in self._refused:
            return
        nvml = self._nvml
        try:
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._set)
        except nvml.NVMLError:  # not every card and not every user may; then there is no count
            self._refused.add((key, address))
            return
        if known is None:
            self._counts[key] = _Count(address)
        else:
            known.address = address

    def drain(self) -> None:
        """Count what has happened since the last time. The first call makes the set; no two calls at a time."""
        if self._wanted and self._set is None:
            self._wanted = False  # tried once: a driver without events stays so
            with contextlib.suppress(self._nvml.NVMLError):
                self._set = self._nvml.nvmlEventSetCreate()
        for _ in range(_MOST_AT_ONCE if self._counts else 0):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._set, 0)
            except self._nvml.NVMLError as error:
                if error.value != TIMEOUT:  # what has happened meanwhile is not known, so neither is any count
                    self._set, self._counts = None, {}
                return
            self._take(event)

    def _take(self, event: Any) -> None:
        address = _address(event.device)
        counts = list(self._counts.values())  # copied: lanes may add to them
        of_board = next((count for count in counts if count.address == address), None)
        if of_board is not None and event.eventType == self._nvml.nvmlEventTypeXidCriticalError:
            of_board.errors += 1
            of_board.code, of_board.seconds = int(event.eventData), time.time()

    def of(self, key: DeviceKey) -> Iterable[Given]:
        """The board's count, and its last error where there was one."""
        count = self._counts.get(key)
        if count is None:
            return ()
        values: Mapping[str, float] = {"xid_errors": count.errors}
        last = {"xid_last_code": count.code, "xid_last_time": count.seconds} if count.errors else {}
        return [Given(metric, float(value)) for metric, value in {**values, **last}.items()]


def _address(handle: Any) -> int | None:
    """Where a handle points: two of them that do so alike are one board's."""
    return ctypes.cast(handle, ctypes.c_void_p).value
