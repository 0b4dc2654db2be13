"""Which processes are on a board or a MIG device, and what they hold and do there."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from exporter import units
from exporter.backends.base import Use
from exporter.backends.nvidia.codes import NO_PERMISSION, NONE_HERE, NOT_FOUND, raise_if_lost
from exporter.catalog import SHARES
from exporter.model import DeviceKey, Does

_AHEAD_MICROSECONDS = 1_000_000  # a sample may be of a moment after the clock was read
_SAMPLED_WITHIN_MICROSECONDS = 2_000_000  # nvml.h: samples are up to a second apart
_WHOLE = 100


class Processes:
    """Keeps when each board was last asked what its processes did."""

    def __init__(self, nvml: ModuleType, wanted: frozenset[str]) -> None:
        self._nvml, self._shared = nvml, SHARES in wanted
        self._since: dict[DeviceKey, int] = {}

    def on(self, key: DeviceKey, handle: Any, *, part: bool) -> list[Use]:
        """Those that compute there or draw. Raises ``NVMLError``, also where one of the lists is kept from this user.

        The versioned calls: where an older driver lacks them, pynvml's others raise what is no ``NVMLError``.
        """
        nvml = self._nvml
        lists: tuple[tuple[Does, Iterable[Any]], ...] = (
            ("computes", nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)),
            ("computes", self._others(handle, "nvmlDeviceGetMPSComputeRunningProcesses_v3")),
            ("draws", self._others(handle, "nvmlDeviceGetGraphicsRunningProcesses_v3")),
        )
        # A process that does both is in both lists, with the same memory.
        held: dict[int, tuple[int | None, Does]] = {}
        for does, listed in lists:
            for process in listed:
                memory, is_known = process.usedGpuMemory, held.get(process.pid)
                if process.pid and (is_known is None or is_known[0] is None):
                    held[process.pid] = (memory, does if is_known is None else is_known[1])
        shares = self._shares(key, handle) if self._shared and not part else None
        return [
            Use(pid, None if memory is None else units.byte_count(memory), _share(shares, pid), does)
            for pid, (memory, does) in sorted(held.items())
        ]

    def _others(self, handle: Any, call: str) -> Iterable[Any]:
        """Nobody where the card has no such list: one that cannot draw, or an older driver."""
        try:
            found: Iterable[Any] = getattr(self._nvml, call)(handle)
        except self._nvml.NVMLError as error:
            if error.value not in NONE_HERE or error.value == NO_PERMISSION:
                raise
            return ()
        return found

    def _shares(self, key: DeviceKey, handle: Any) -> dict[int, float | None] | None:
        """Each process's share of the time since the cycle before, as the mean of the driver's samples of that time,
        None where they tell no share. It has samples of who did something, and "not found" is what it says of nobody.
        None at first, and where the driver has never had a sample, as one that cannot tell has none either.

        The samples' times are the wall clock's, which may be set back: then all begins anew. Drivers were seen to give
        rows of garbage (Syllo/nvtop#110), whose times count for nothing.
        """
        now, since = time.time_ns() // 1000, self._since.get(key)
        if since is not None and since > now + _AHEAD_MICROSECONDS:
            del self._since[key]
            since = None
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(handle, since or 0)
        except self._nvml.NVMLError as error:
            raise_if_lost(error, key.identity)
            if error.value == NOT_FOUND:
                self._since.setdefault(key, 0)
            # There is no new sample: of nobody, or none yet.
            due = since and now - since > _SAMPLED_WITHIN_MICROSECONDS
            return {} if due and error.value == NOT_FOUND else None
        given = bool(samples)
        samples = [sample for sample in samples if sample.timeStamp <= now + _AHEAD_MICROSECONDS]
        if given and not any(sample.smUtil <= _WHOLE for sample in samples):
            return None
        times = [sample.timeStamp for sample in samples]
        self._since[key] = max([since or 0, *times])
        if since is None:
            return None
        fresh = [sample for sample in samples if sample.timeStamp > since]
        found: dict[int, list[float | None]] = defaultdict(list)
        for sample in fresh:
            found[sample.pid].append(units.ratio_of_percent(sample.smUtil))
        return {pid: _mean(shares) for pid, shares in found.items()}


def _mean(shares: Sequence[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None


def _share(shares: Mapping[int, float | None] | None, pid: int) -> float | None:
    """A process without a sample has done nothing, where samples are told."""
    return None if shares is None else shares.get(pid, 0.0)
