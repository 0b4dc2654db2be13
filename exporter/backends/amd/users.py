"""Which processes are on an AMD card, or on a partition of one, and what they hold of the memory of its compute node.

Source: ``/sys/class/kfd/kfd/proc``, since Linux 5.9. Each process that opened ``/dev/kfd`` has a folder there, by the
host's number for it, with a file ``vram_<gpu_id>`` of bytes for each node that the process may use, whether it does or
not. The kernel counts them in memory: reading them wakes no card. What processes do without the KFD, as Vulkan's and
OpenGL's, is not there, nor how long a process kept a card busy.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from exporter.backends.amd.topology import Node
from exporter.backends.base import Use
from exporter.backends.kernel_files import names_or_none, number
from exporter.errors import DeviceFault, DeviceLost

# What the driver itself puts on every card that a process opens is less, and says nothing.
_LEAST_BYTES = 32 << 20
_PROCESS = re.compile(r"[1-9][0-9]{0,9}", re.ASCII)


def of_node(sysfs: str, nodes: Sequence[Node], node: int | None) -> Collection[Use] | None:
    """The processes on the node of that number among a card's; None where the card has no such node, or the kernel no
    list of processes that can be read.
    """
    gpu_id = next((each.gpu_id for each in nodes if each.number == node), None)
    folder = f"{sysfs}/class/kfd/kfd/proc"
    listed = None if gpu_id is None else names_or_none(folder)
    if listed is None:
        return None
    found = (_use(int(name), f"{folder}/{name}", f"vram_{gpu_id}") for name in listed if _PROCESS.fullmatch(name))
    return [use for use in found if use is not None]


def _use(pid: int, folder: str, file: str) -> Use | None:
    """None of a process that has nothing there, or has ended meanwhile."""
    try:
        held = number(f"{folder}/{file}")
    except (DeviceFault, DeviceLost):
        held = -1
    if held is None:
        held = 0 if _is_counted(folder) else -1
    if held < 0:
        return Use(pid, does=None)
    return Use(pid, held, does="computes" if held >= _LEAST_BYTES else "nothing") if held else None


def _is_counted(folder: str) -> bool:
    """Whether the kernel counts a process's memory at all, or the process has ended."""
    listed = names_or_none(folder)
    return not listed or any(name.startswith("vram_") for name in listed)
