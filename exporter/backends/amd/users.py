"""Which processes compute on an AMD card, or on a partition of one: those that hold memory of its compute node.

Source: ``/sys/class/kfd/kfd/proc``, since Linux 5.9. Each process that opened ``/dev/kfd`` has a folder there, by the
host's number for it, with a file ``vram_<gpu_id>`` of bytes for each node that the process may use, whether it does or
not. The kernel counts them in memory: reading them wakes no card.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from exporter.backends.amd.topology import Node, readable_number
from exporter.backends.base import Use
from exporter.backends.kernel_files import names

# What the driver itself puts on every card that a process opens is less, and says nothing.
_LEAST_BYTES = 32 << 20
_PROCESS = re.compile(r"[1-9][0-9]{0,9}", re.ASCII)


def of_node(sysfs: str, nodes: Sequence[Node], number: int | None) -> Collection[Use]:
    """The processes on the node of that number among a card's; none where the card has no such node."""
    gpu_id = next((node.gpu_id for node in nodes if node.number == number), None)
    if gpu_id is None:
        return ()
    folder = f"{sysfs}/class/kfd/kfd/proc"
    processes = (name for name in names(folder) if _PROCESS.fullmatch(name))
    return [Use(int(name)) for name in processes if _holds_memory(f"{folder}/{name}/vram_{gpu_id}")]


def _holds_memory(path: str) -> bool:
    """Not where the process has ended meanwhile, or its file cannot be read."""
    held = readable_number(path)
    return held is not None and held >= _LEAST_BYTES
