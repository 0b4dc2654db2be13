"""``intel_gpu_top -J``, the last resort for the utilization of cards of the i915 driver: the counters of the kernel's
performance monitoring, which need CAP_PERFMON and count every client.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from typing import IO, Any

from exporter import units
from exporter.model import Hint

PROGRAM = "intel_gpu_top"
_PERIOD_MILLISECONDS = 1000
_FRESH_SECONDS = 2.5  # a value is of the last period, or it is not shown
_AGAIN_AFTER_SECONDS = 60.0
_MOST_CHARACTERS = 1 << 16

NOT_INSTALLED = Hint("install-intel-gpu-tools", "utilization: the package intel-gpu-tools, with CAP_PERFMON, gives it")
NO_RIGHT = Hint(
    "grant-cap-perfmon",
    "utilization: intel_gpu_top may not read the performance counters; give the daemon CAP_PERFMON, or set "
    "kernel.perf_event_paranoid to 0",
)


class GpuTop:
    """The program, running beside for one card; it ends with this process, when its output has no reader any more."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._process: subprocess.Popen[str] | None = None
        self._latest: tuple[float, float] | None = None
        self._not_before = 0.0
        self.hint: Hint | None = None

    def percent(self) -> float | None:
        """The busiest engine's share of the last second; None while there is none. The first call starts the tool."""
        now = time.monotonic()
        if self._process is None and now >= self._not_before:
            self._begin()
        latest = self._latest
        return latest[1] if latest is not None and now - latest[0] < _FRESH_SECONDS else None

    def _begin(self) -> None:
        self._not_before = time.monotonic() + _AGAIN_AFTER_SECONDS
        path = shutil.which(PROGRAM)
        if path is None:
            self.hint = NOT_INSTALLED
            return
        command = [path, "-J", "-s", str(_PERIOD_MILLISECONDS), "-d", f"pci:slot={self._address}"]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        except OSError:
            self.hint = NOT_INSTALLED
            return
        threading.Thread(target=self._follow, args=(self._process,), name=PROGRAM, daemon=True).start()

    def _follow(self, process: subprocess.Popen[str]) -> None:
        """Take each sample as it comes. It ends at once where the counters may not be read, and says so."""
        for sample in _samples(process.stdout):
            busy = _busiest(sample)
            if busy is not None:
                self._latest, self.hint = (time.monotonic(), busy), None
        said = process.stderr.read(_MOST_CHARACTERS) if process.stderr else ""
        process.wait()
        if "ermission" in said or "PMU" in said:
            self.hint = NO_RIGHT
        self._process = None


def _samples(stream: IO[str] | None) -> Iterator[Mapping[str, Any]]:
    """The objects of the array that the program writes, which it never closes."""
    text, depth = "", 0
    for line in stream or ():
        depth += line.count("{") - line.count("}")
        text += line
        if len(text) > _MOST_CHARACTERS:
            return
        if depth == 0 and "}" in line:
            try:
                sample = json.loads(text.strip().strip("[],\n\t "))
            except ValueError:
                sample = None
            text = ""
            if isinstance(sample, dict):
                yield sample


def _busiest(sample: Mapping[str, Any]) -> float | None:
    """The largest ``busy`` of the sample's engines, in percent."""
    engines = sample.get("engines")
    values = [engine.get("busy") for engine in engines.values()] if isinstance(engines, dict) else []
    shares = [units.percent(min(value, 100.0)) for value in values if isinstance(value, int | float)]
    return max((value for value in shares if value is not None), default=None)
