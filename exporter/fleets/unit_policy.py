"""What systemd says of the device filters that it puts on its units' control groups.

Asked through ``systemctl``, which needs no right. A unit has a filter when its ``DevicePolicy`` is not ``auto`` or its
``DeviceAllow`` is not empty (systemd.resource-control(5)), and all of its slices' filters hold for it too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence

_PROPERTIES = "Id,LoadState,ControlGroup,DevicePolicy,DeviceAllow"
_UNIT = re.compile(r"[\w:.\\@-]{1,255}\.(?:slice|service|scope)", re.ASCII)
_MANAGER = re.compile(r"user@[0-9]+\.service", re.ASCII)
_ROOT_SLICE = "-.slice"
_PATIENCE_SECONDS = 2.0
_KEPT_SECONDS = 60.0


class UnitPolicies:
    """Answers by control group, kept for a minute. Where systemd gives none, it is not asked again for as long."""

    def __init__(self) -> None:
        self._answers: dict[tuple[str, int], tuple[float, bool | None]] = {}
        self._silent_until = 0.0

    def refresh(self) -> None:
        """Forgets answers that are old."""
        now = time.monotonic()
        self._answers = {key: answer for key, answer in self._answers.items() if now - answer[0] < _KEPT_SECONDS}

    def has_filter(self, path: str, inode: int) -> bool | None:
        """Whether a unit or slice on the way to this control group has a filter.

        ``inode`` is the folder's, another one when a unit was started anew. None where the path is not of systemd's
        units alone, or nobody answers.
        """
        units, group = units_of(path)
        if not units:
            return None
        key = (group, inode)
        if key not in self._answers and time.monotonic() >= self._silent_until:
            self._answers[key] = (time.monotonic(), self._asked(units, group))
        return self._answers[key][1] if key in self._answers else None

    def _asked(self, units: Sequence[str], group: str) -> bool | None:
        text = _shown(units)
        if text is None:
            self._silent_until = time.monotonic() + _KEPT_SECONDS
            return None
        blocks = [_values(block) for block in text.split("\n\n") if block.strip()]
        if [block.get("Id") for block in blocks] != list(units) or blocks[-1].get("ControlGroup") != group:
            return None  # another manager's unit, or one that has been reached by another name
        if any(block.get("LoadState") != "loaded" for block in blocks):
            return None
        return any(block.get("DevicePolicy") != "auto" or block.get("DeviceAllow") for block in blocks)


def units_of(path: str) -> tuple[tuple[str, ...], str]:
    """The units on the way to a control group, and the last one's own control group; none where something else may
    have made a control group below them. Below a user's manager nothing can have a filter: it has no right to.
    """
    units, group = [_ROOT_SLICE], ""
    parts = path.split("/")[1:]
    for place, part in enumerate(parts):
        unit = part.removeprefix("_")  # systemd's escape for names that the kernel could want
        if not _UNIT.fullmatch(unit):
            return (), ""
        units.append(unit)
        group += f"/{part}"
        if not unit.endswith(".slice"):
            last = place == len(parts) - 1 or _MANAGER.fullmatch(unit)
            return (tuple(units), group) if last else ((), "")
    return tuple(units), group


def _shown(units: Sequence[str]) -> str | None:
    """None where systemd is not there or does not answer in time."""
    program = shutil.which("systemctl")
    if program is None:
        return None
    try:
        result = subprocess.run(
            [program, "show", f"--property={_PROPERTIES}", "--", *units],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE_SECONDS,
            check=False,
            env={**os.environ, "LC_ALL": "C", "SYSTEMD_COLORS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.decode("utf-8", "replace") if result.returncode == 0 else None


def _values(block: str) -> Mapping[str, str]:
    """A property with several values has a line for each, any of which is enough."""
    values: dict[str, str] = {}
    for line in block.splitlines():
        name, _, value = line.partition("=")
        values[name] = values.get(name) or value
    return values
