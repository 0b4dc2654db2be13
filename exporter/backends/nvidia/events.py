"""XID errors: what NVIDIA's driver numbers and tells, to those who have asked, when it happens.

One event set for all boards, emptied once a cycle without waiting. What happens while a board is not registered is not
told, so its count starts at 0 with its registration.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from exporter.backends.nvidia.codes import TIMEOUT
from exporter.backends.nvidia.fields import Given
from exporter.backends.nvidia.missed import AGAIN_AFTER_SECONDS, Missed
from exporter.model import DeviceKey

METRICS = ("xid_errors", "xid_last_code", "xid_last_time")

_MOST_AT_ONCE = 256  # a storm goes on in the next cycle


class _Where(NamedTuple):
    """Under which handle a board is registered, and its number on the bus, which is another once it has been away: its
    registration has ended then.
    """

    handle: int
    appearance: int


class _Count:
    """A board's errors since it was registered, and the last one."""

    def __init__(self, where: _Where) -> None:
        self.where, self.errors, self.code, self.seconds = where, 0, 0, 0.0


class Events:
    """The errors of each board that can be registered."""

    def __init__(self, nvml: ModuleType, wanted: frozenset[str]) -> None:
        self._nvml = nvml
        self._wanted = not wanted.isdisjoint(METRICS)
        self._set: Any = None
        self._counts: dict[DeviceKey, _Count] = {}
        self._refused: dict[DeviceKey, Missed] = {}
        self._failures, self._failed_at = 0, 0.0
        self._draining = False
        # Held while a board is registered and while a set is let go, which must not be the same one.
        self._lock = threading.Lock()

    def register(self, key: DeviceKey, handle: Any, appearance: int) -> None:
        """From now on the board's errors are told; again where it was away, or is under another handle.

        Where another lane is at it, which may hang, that is left to the next cycle.
        """
        address = _address(handle)
        known = self._counts.get(key)
        if address is None or (known is not None and known.where == _Where(address, appearance)):
            return
        if self._set is None or not self._lock.acquire(blocking=False):
            return
        try:
            self._register(key, handle, _Where(address, appearance))
        finally:
            self._lock.release()

    def _register(self, key: DeviceKey, handle: Any, where: _Where) -> None:
        nvml, missed = self._nvml, self._refused.setdefault(key, Missed())
        self._counts.pop(key, None)  # what it counted ended when the board went
        if missed.rests():
            return
        try:
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._set)
        except nvml.NVMLError:  # not every card and not every user may; then there is no count
            missed.note(found=False)
            return
        missed.note(found=True)
        for other, count in list(self._counts.items()):
            if count.where.handle == where.handle:  # the handle is this board's now
                del self._counts[other]
        self._counts[key] = _Count(where)

    def forget(self, boards: Collection[str]) -> None:
        """These boards, by UUID, have left the bus, which has ended their registration."""
        for key in list(self._counts):  # copied: lanes may add to it
            if key.identity in boards:
                self._counts.pop(key, None)

    def drain(self) -> None:
        """Count what has happened since the last time. The first call makes the set; no two calls at a time."""
        self._draining = True
        self._drain()
        self._draining = False

    def _drain(self) -> None:
        if self._set is None:
            self._make()
        for _ in range(_MOST_AT_ONCE if self._counts else 0):
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._set, 0)
            except self._nvml.NVMLError as error:
                if error.value == TIMEOUT:
                    self._failures = 0
                else:
                    self._let_go()
                return
            self._take(event)

    def _make(self) -> None:
        """A driver without events stays so for the most part, and one whose events fail twice in a row may go on so."""
        rests = self._failures > 1 and time.monotonic() - self._failed_at < AGAIN_AFTER_SECONDS
        if self._wanted and not rests:
            try:
                self._set = self._nvml.nvmlEventSetCreate()
            except self._nvml.NVMLError:
                self._fail()

    def _fail(self) -> None:
        self._failures, self._failed_at = self._failures + 1, time.monotonic()

    def _let_go(self) -> None:
        """One lost card may fail the set for all. What has happened meanwhile is not known, so neither is any count
        until all are registered with another set.
        """
        self._fail()
        self._counts = {}
        if not self._lock.acquire(blocking=False):
            return  # a lane registers a board with this set
        try:
            old, self._set, self._counts = self._set, None, {}  # a lane may have come between
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlEventSetFree(old)
        finally:
            self._lock.release()

    def _take(self, event: Any) -> None:
        address = _address(event.device)
        counts = list(self._counts.values())  # copied: lanes may add to them
        of_board = next((count for count in counts if count.where.handle == address), None)
        if of_board is not None and event.eventType == self._nvml.nvmlEventTypeXidCriticalError:
            of_board.errors += 1
            of_board.code, of_board.seconds = int(event.eventData), time.time()

    def of(self, key: DeviceKey) -> Iterable[Given]:
        """The board's count, and its last error where there was one; nothing while the driver does not say whether more
        have happened.
        """
        count = None if self._draining else self._counts.get(key)
        if count is None:
            return ()
        values: Mapping[str, float] = {"xid_errors": count.errors}
        last = {"xid_last_code": count.code, "xid_last_time": count.seconds} if count.errors else {}
        return [Given(metric, float(value)) for metric, value in {**values, **last}.items()]


def _address(handle: Any) -> int | None:
    """Where a handle points: two of them that do so alike are one board's."""
    return ctypes.cast(handle, ctypes.c_void_p).value
