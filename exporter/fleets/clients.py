"""Which cards compute for a process, as Intel's DRM drivers tell of its open device files.

An open file alone says nothing, since a runtime opens every card and then uses those that its mask leaves; nor does
work of a video or render engine, which no mask of a compute runtime hides. Source: ``/proc/PID/fdinfo``, the kernel's
``drm-usage-stats``: ``drm-engine-compute`` in nanoseconds (i915), ``drm-cycles-ccs`` (xe).
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from contextlib import suppress

from exporter.fleets.processes import text
from exporter.units import pci_bus_id

_LINE = re.compile(rb"^(drm-[\w-]+):[ \t]*(\S+)", re.MULTILINE)
_WORK = (b"drm-engine-compute", b"drm-cycles-ccs")
_MOST_FILES = 4096


def computing(procfs: str, pid: int) -> frozenset[str]:
    """The PCI addresses of the Intel cards that have computed something for the process; empty where none is seen."""
    return frozenset(filter(None, (_worked(info) for info in _infos(f"{procfs}/{pid}/fdinfo"))))


def _infos(folder: str) -> Iterator[bytes]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in itertools.islice(entries, _MOST_FILES):
            with suppress(OSError):
                yield text(entry.path)


def _worked(info: bytes) -> str | None:
    values = dict(_LINE.findall(info))
    if values.get(b"drm-driver") not in (b"i915", b"xe"):
        return None
    done = any(values.get(name, b"0").isdigit() and int(values.get(name, b"0")) for name in _WORK)
    return pci_bus_id(values.get(b"drm-pdev", b"").decode("ascii", "replace")) if done else None
