"""``intel_gpu_top -J``, the last resort for the utilization of cards of the i915 driver: the counters of the kernel's
performance monitoring, which need CAP_PERFMON and count every client.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from exporter import units
from exporter.model import Hint

PROGRAM = "intel_gpu_top"
_PERIOD_MILLISECONDS = 1000
_FRESH_SECONDS = 2.5  # a value is of the last period, or it is not shown
_AGAIN_AFTER_SECONDS = 60.0
_MOST_CHARACTERS = 1 << 22  # a sample has some hundred for each client
_PIECE_BYTES = 1 << 16
_MOST_SAMPLES = 10
_CLASSES = {
    "Render/3D": "render",
    "Compute": "compute",
    "Blitter": "copy",
    "Video": "video",
    "VideoEnhance": "video-enhance",
}
_REFUSED = ("ermission denied", "not permitted")

NOT_INSTALLED = Hint("install-intel-gpu-tools", "utilization: the package intel-gpu-tools, with CAP_PERFMON, gives it")
NO_RIGHT = Hint(
    "grant-cap-perfmon",
    "utilization: intel_gpu_top may not read the performance counters; give the daemon CAP_PERFMON (under systemd the "
    "drop-in intel-pmu.conf), or set kernel.perf_event_paranoid to 0",
)


class GpuTop:
    """The program, running beside for one card; it ends with this process, when its output has no reader any more."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._process: subprocess.Popen[bytes] | None = None
        self._latest: tuple[float, Mapping[str, float]] | None = None
        self._not_before = 0.0
        self.hint: Hint | None = None

    def percent(self) -> float | None:
        """The busiest class's share of the last second; None while there is none. The first call starts the tool."""
        now = time.monotonic()
        if self._process is None and now >= self._not_before:
            self._begin()
        return max(self._shares(now).values(), default=None)

    def engines(self) -> Mapping[str, float]:
        """The share of each class in the last second, from 0 to 1; empty while there is none."""
        shares = self._shares(time.monotonic())
        return {_CLASSES[name]: percent / 100 for name, percent in shares.items() if name in _CLASSES}

    def _shares(self, now: float) -> Mapping[str, float]:
        latest = self._latest
        return latest[1] if latest is not None and now - latest[0] < _FRESH_SECONDS else {}

    def stop(self) -> None:
        """End the tool, whose counters are of a card that sleeps, or is not the one that was there any more."""
        process, self._latest = self._process, None
        if process is not None:
            process.kill()

    def _begin(self) -> None:
        self._not_before = time.monotonic() + _AGAIN_AFTER_SECONDS
        path = shutil.which(PROGRAM)
        if path is None:
            self.hint = NOT_INSTALLED
            return
        command = [*_ending_with_us(), path, "-J", "-s", str(_PERIOD_MILLISECONDS), "-d", f"pci:slot={self._address}"]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "LC_ALL": "C"},  # the numbers are JSON's
            )
        except OSError:
            self.hint = NOT_INSTALLED
            return
        threading.Thread(target=self._follow, args=(self._process,), name=PROGRAM, daemon=True).start()

    def _follow(self, process: subprocess.Popen[bytes]) -> None:
        """Take each sample as it comes. It ends at once where the counters may not be read, and says so."""
        with process:
            started = time.monotonic()
            for place, sample in enumerate(_samples(process.stdout.fileno() if process.stdout else -1)):
                if place > _MOST_SAMPLES + 2 * (time.monotonic() - started):
                    break  # it does not keep to its period, and would keep us busy
                busy = _by_class(sample)
                if busy:
                    self._latest, self.hint = (time.monotonic(), busy), None
            process.kill()  # where it has not ended, what it writes is no sample
            said = process.stderr.read(_PIECE_BYTES).decode("utf-8", "replace") if process.stderr else ""
        if any(words in said for words in _REFUSED):
            self.hint = NO_RIGHT
        self._process = None


def _ending_with_us() -> list[str]:
    """A command that ends what it starts together with us, so that a tool which hangs is not left behind."""
    setpriv = shutil.which("setpriv")
    command = [setpriv or "", "--pdeathsig", "KILL"]
    try:  # older ones have no such option
        tried = subprocess.run([*command, "true"], capture_output=True, timeout=2, check=False) if setpriv else None
    except (OSError, subprocess.TimeoutExpired):
        tried = None
    return command if tried is not None and tried.returncode == 0 else []


def _samples(stream: int) -> Iterator[Mapping[str, Any]]:
    """The objects of the array that the program writes, which it never closes, each as soon as it is there: the line of
    its last brace ends only when the next one comes. Names of clients stand in it as they are, and may break it.
    """
    text, searched = "", 0
    while len(text) < _MOST_CHARACTERS and (piece := os.read(stream, _PIECE_BYTES)):
        text += piece.decode("ascii", "replace")
        while (end := text.find("\n}", searched)) >= 0:
            sample, text, searched = text[text.find("{") : end + 2], text[end + 2 :], 0
            with contextlib.suppress(ValueError, RecursionError):
                yield json.loads(sample, strict=False)
        searched = max(0, len(text) - 1)


def _by_class(sample: Mapping[str, Any]) -> Mapping[str, float]:
    """The share of each class of engines, in percent: older versions list each engine, ``Video/0``.

    None for the first sample, which is of the moment since the start, and where any share is none.
    """
    period, engines = sample.get("period"), sample.get("engines")
    lasted = period.get("duration") if isinstance(period, dict) else None
    if not isinstance(engines, dict) or not isinstance(lasted, int | float) or lasted < _PERIOD_MILLISECONDS / 2:
        return {}
    classes: dict[str, list[float]] = {}
    for name, engine in engines.items():
        busy = engine.get("busy") if isinstance(engine, dict) else None
        if not isinstance(busy, int | float) or isinstance(busy, bool):
            return {}
        classes.setdefault(re.sub(r"/[0-9]+$", "", name), []).append(busy)
    shares = {name: units.percent(min(sum(each) / len(each), 100.0)) for name, each in classes.items()}
    known = {name: share for name, share in shares.items() if share is not None}
    return known if len(known) == len(shares) else {}
