"""The daemon's capabilities and its children: none has them but one that is lent them. Source: capabilities(7).

A daemon that is no root has capabilities because a service manager put them into its ambient set, which every program
that it starts would inherit: vendors' libraries among them, which have no use for the memory of other users' processes.
A daemon that is root has no such set, and what is here changes nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path

_PR_CAP_AMBIENT, _RAISE, _CLEAR_ALL = 47, 2, 4  # linux/prctl.h


def withhold() -> None:
    """Whatever this thread, or one that it starts, starts from now on has no capability."""
    _ambient(_CLEAR_ALL, 0)


@contextlib.contextmanager
def lent() -> Iterator[None]:
    """What this thread starts meanwhile has all that the daemon has."""
    for number in _own():
        _ambient(_RAISE, number)
    try:
        yield
    finally:
        withhold()


def _own() -> list[int]:
    """Those that may be put into the ambient set: they are in both of the others."""
    sets = {}
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/thread-self/status").read_text(encoding="ascii", errors="replace").splitlines():
            name, _, text = line.partition(":")
            if name in ("CapInh", "CapPrm"):
                sets[name] = int(text, 16)
    both = sets.get("CapInh", 0) & sets.get("CapPrm", 0)
    return [number for number in range(both.bit_length()) if both >> number & 1]


def _ambient(what: int, number: int) -> None:
    """Changes this thread's ambient set; a kernel that has none has nothing to hand on either."""
    zero = ctypes.c_ulong(0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_CAP_AMBIENT, ctypes.c_ulong(what), ctypes.c_ulong(number), zero, zero)
