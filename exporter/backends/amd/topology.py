"""The KFD's topology: which compute node is which card, or which partition of one.

Source: ``/sys/class/kfd/kfd/topology``, which the kernel publishes wherever amdgpu runs, with no ROCm installed, and
keeps in memory: reading it wakes no card. Nodes without SIMDs are CPUs.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from exporter.backends.kernel_files import names, number
from exporter.errors import DeviceFault, DeviceLost

# Local memory: heaps 1 and 2 are the card's own, visible to the CPU or not.
_LOCAL_HEAPS = ("1", "2")
_PROPERTY = re.compile(r"^(\w+) ([0-9]{1,20})$", re.MULTILINE)


class Node(NamedTuple):
    """A compute node. ``partition`` is None for a whole card, and where a card has several nodes of which is not said
    which is which; ``unique_id`` is 0 where the card tells none. ``render_minor`` is the number of its DRM render node,
    None where it has none; ``gpu_id`` what the KFD calls it beside processes, None where that cannot be read.
    """

    number: int
    partition: int | None
    unique_id: int
    memory_bytes: int
    render_minor: int | None
    gpu_id: int | None


class _Raw(NamedTuple):
    """A node as the kernel writes it: ``address`` in the location's low bits, ``high`` in its highest four."""

    number: int
    address: str
    high: int
    unique_id: int
    memory_bytes: int
    render_minor: int | None
    gpu_id: int | None

    def node(self, partition: int | None) -> Node:
        """The node as that partition of its card, or as the whole card."""
        return Node(self.number, partition, self.unique_id, self.memory_bytes, self.render_minor, self.gpu_id)


class Topology(NamedTuple):
    """Nodes by the PCI address of their card, in the KFD's order; ``trouble`` says why a node may be missing.
    ``whole``: there is a KFD, and these are all of its nodes, so that ROCr lists no other card.
    """

    nodes: Mapping[str, tuple[Node, ...]]
    trouble: str = ""
    whole: bool = False


def generation(sysfs: str) -> str:
    """Changes whenever the topology does; empty without a KFD. A driver that is loaded anew counts from the start, in
    another file of the same name.
    """
    try:
        with Path(f"{sysfs}/class/kfd/kfd/topology/generation_id").open(encoding="ascii", errors="replace") as file:
            return f"{file.read().strip()} {os.fstat(file.fileno()).st_ino}"
    except OSError:
        return ""


def read(sysfs: str, cards: Collection[str]) -> Topology:
    """The nodes of these cards. A node that this process may not read (a device cgroup) is no node of ours."""
    folder = f"{sysfs}/class/kfd/kfd/topology/nodes"
    found, trouble, hidden = [], "", False
    listed = names(folder)
    for name in listed:
        try:
            raw = _node(f"{folder}/{name}", int(name)) if re.fullmatch(r"[0-9]{1,9}", name) else None
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EACCES):
                hidden = True
            else:
                trouble = f"{folder}/{name}: {error.strerror}"
            continue
        except ValueError as error:
            trouble = f"{folder}/{name}: {error}"
            continue
        if raw is not None:
            found.append(raw)
    return Topology(_by_card(sorted(found), cards), trouble, bool(listed) and not trouble and not hidden)


def readable_number(path: str) -> int | None:
    """The file's number; None where there is none, or none that can be read."""
    try:
        return number(path)
    except (DeviceFault, DeviceLost):
        return None


def _node(folder: str, place: int) -> _Raw | None:
    """None for a node without SIMDs."""
    values = _properties(f"{folder}/properties")
    if "simd_count" not in values or (values["simd_count"] and "location_id" not in values):
        raise ValueError("properties has no simd_count, or no location_id")
    if not values["simd_count"]:
        return None
    location, domain = values["location_id"], values.get("domain", 0)
    address = f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7:x}"
    memory = sum(map(_local_memory, (f"{folder}/mem_banks/{bank}" for bank in names(f"{folder}/mem_banks"))))
    render = values.get("drm_render_minor") or None  # 0: no render node
    gpu_id = readable_number(f"{folder}/gpu_id")
    return _Raw(place, address, location >> 28, values.get("unique_id", 0), memory, render, gpu_id)


def _properties(path: str) -> dict[str, int]:
    text = Path(path).read_text(encoding="ascii", errors="replace")
    return {name: int(value) for name, value in _PROPERTY.findall(text)}


def _local_memory(bank: str) -> int:
    values = _properties(f"{bank}/properties")
    return values.get("size_in_bytes", 0) if str(values.get("heap_type")) in _LOCAL_HEAPS else 0


def _by_card(nodes: list[_Raw], cards: Collection[str]) -> dict[str, tuple[Node, ...]]:
    """Nodes of one card share its bus and device; a partition's number stands in the location's highest bits, or, with
    older kernels, where a PCI function would be that the bus does not have.
    """
    grouped: dict[str, list[_Raw]] = {}
    for node in nodes:
        card = node.address if node.address in cards else f"{node.address[:-1]}0"
        grouped.setdefault(card, []).append(node)
    return {card: _numbered(card, group) for card, group in grouped.items()}


def _numbered(card: str, group: list[_Raw]) -> tuple[Node, ...]:
    """One node that stands where the card stands is all of it; a partition alone is one whose others we may not see."""
    if len(group) == 1 and not group[0].high and group[0].address == card:
        return (group[0].node(None),)
    for partitions in ([node.high for node in group], [int(node.address[-1], 16) for node in group]):
        if any(partitions) and len(set(partitions)) == len(group):
            return tuple(node.node(partition) for node, partition in zip(group, partitions, strict=True))
    return tuple(node.node(None) for node in group)
