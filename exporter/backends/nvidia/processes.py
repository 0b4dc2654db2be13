"""Which processes are on a board or a MIG device, and what they hold and do there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from exporter import units
from exporter.backends.base import Use
from exporter.backends.nvidia.codes import NO_PERMISSION, NONE_HERE
from exporter.model import DeviceKey, Does


class Processes:
    """Keeps when each board was last asked what its processes did."""

    def __init__(self, nvml: ModuleType) -> None:
        self._nvml = nvml
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
                if process.pid:
                    held.setdefault(process.pid, (process.usedGpuMemory, does))
        shares = {} if part else self._shares(key, handle)
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

    def _shares(self, key: DeviceKey, handle: Any) -> dict[int, float] | None:
        """Each process's share of the time since the cycle before, as the mean of the driver's samples of that time;
        None at first, and where the driver has none.
        """
        since = self._since.get(key)
        try:
            samples = self._nvml.nvmlDeviceGetProcessUtilization(handle, since or 0)
        except self._nvml.NVMLError as error:
            if error.value not in NONE_HERE:
                raise
            return None
        times = [sample.timeStamp for sample in samples]
        self._since[key] = max([since or 0, *times])
        fresh = [sample for sample in samples if since is not None and sample.timeStamp > since]
        if not fresh:
            return None
        found: dict[int, list[float]] = defaultdict(list)
        for sample in fresh:
            share = units.ratio_of_percent(sample.smUtil)
            if share is not None:
                found[sample.pid].append(share)
        return {pid: sum(shares) / len(shares) for pid, shares in found.items()}


def _share(shares: dict[int, float] | None, pid: int) -> float | None:
    """A process without a sample has done nothing, where others have some."""
    return None if not shares else shares.get(pid, 0.0)
