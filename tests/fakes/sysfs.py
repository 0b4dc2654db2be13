"""Writes fake ``/sys`` and ``/proc`` trees of AMD, Intel and other PCI cards, also while programs read them.

A program sees the trees where it takes their roots as settings, or under :func:`mounted`, which binds them over the
real ones. What stands here is what Linux 6.x shows. There is one writer at a time.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.fakes.kernel_trees import (
    AMD_ANSWERS,
    FROM_PCI,
    GIB,
    GPU_IDS,
    KFD,
    NODES,
    PROPERTIES,
    AmdCard,
    Bridge,
    Card,
    IntelCard,
    KfdNode,
    OtherCard,
    device_folder,
    drm_minor,
    sys_tree,
)
from tests.fakes.mirror import Fault, Link, Tree, clear, damage, links, place, sync, text_of
from tests.fakes.shared_object import fail_in_ci_else_skip

__all__ = [
    "AMD_ANSWERS",
    "FROM_PCI",
    "GIB",
    "INITIAL_PID_NAMESPACE",
    "KFD",
    "NODES",
    "PROPERTIES",
    "AmdCard",
    "Bridge",
    "Card",
    "Client",
    "FakeSys",
    "Fault",
    "IntelCard",
    "KfdNode",
    "OtherCard",
    "Process",
    "mounted",
    "needs_root",
]

INITIAL_PID_NAMESPACE = 4026531836


@dataclass(frozen=True, kw_only=True)
class Client:
    """A DRM file that a process has open. ``fds`` are duplicates of one another and show the same text.

    ``engines`` are nanoseconds, ``cycles`` busy and total ones, ``memory`` bytes. Without ``keys`` the kernel is too
    old to say any of it. ``driver`` is the card's unless given.
    """

    pid: int
    pci: str
    client_id: int
    fds: tuple[int, ...] = (5,)
    driver: str | None = None
    node: Literal["render", "card"] = "render"
    engines: Mapping[str, int] = field(default_factory=dict)
    cycles: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    capacities: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)
    keys: bool = True


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process without a DRM file, or what is to be said beside the :class:`Client` of the same ``pid``.

    Without ``readable`` the folders of its files have mode 0, and belong to whoever wrote the tree. ``vram`` is what it
    holds of the card's memory by KFD node, in bytes; a process that has the KFD open has some of every card's.
    """

    pid: int
    readable: bool = True
    vram: Mapping[int, int] = field(default_factory=dict)


class FakeSys:
    """The trees in ``root``: ``root/sys`` and ``root/proc``."""

    def __init__(self, root: Path) -> None:
        self.sys = root / "sys"
        self.proc = root / "proc"
        self._owned: dict[str, list[str]] = {}
        self._folders: dict[str, str] = {}
        self._topology: dict[str, bytes | Link] = {}
        self._generation = 1

    def write(
        self,
        cards: Sequence[Card],
        clients: Sequence[Client] = (),
        processes: Sequence[Process] = (),
        *,
        cpus: int = 2,
        kfd: bool = True,
        initial_pid_namespace: bool = True,
        capabilities: int = 0x1FFFFFFFFFF,
    ) -> None:
        """Makes the trees exactly this, faults undone. A running program finds each file as it was or as it is."""
        tree = sys_tree(cards, cpus=cpus, kfd=kfd)
        self._folders = {card.pci: device_folder(card.pci, card.bridges) for card in cards}
        topology = {path: entry for path, entry in tree.entries.items() if path.startswith(KFD)}
        if topology:
            self._generation += topology != self._topology
            tree.file(f"{KFD}/topology/generation_id", self._generation)
            tree.folder(f"{KFD}/proc")
        self._topology, self._owned = topology, tree.owned
        for process in processes:
            _add_kfd_process(tree, process)
        sync(self.sys, tree)
        namespace = INITIAL_PID_NAMESPACE if initial_pid_namespace else INITIAL_PID_NAMESPACE + 741
        sync(self.proc, _proc_tree(cards, clients, processes, namespace, capabilities))

    def device(self, pci: str) -> Path:
        """The folder of the PCI device, to which all links lead."""
        return self.sys / self._folders.get(pci, device_folder(pci))

    def set(self, pci: str, name: str, text: str) -> None:
        """Makes ``text``, as it is, that of one file below the device's folder; ``name`` may be a glob."""
        for path in self._places(pci, name):
            place(self.sys, path, text.encode())

    def fault(self, pci: str, name: str, how: Fault) -> None:
        """Breaks a file, or all that the glob ``name`` finds, until it is set or the tree written again.

        ``eio``: a read answers EIO. ``fifo``: an open hangs, and finds an empty file once the fault is gone.
        ``denied``: mode 0, which stops everyone but root.
        """
        for path in self._places(pci, name):
            damage(self.sys, path, how)

    def remove(self, pci: str) -> None:
        """The card leaves the bus: first every link to it, then its folders and its KFD nodes, each all at once."""
        gone = [self.sys / path for path in self._owned.pop(pci)]
        for link in links(self.sys):
            target = Path(os.path.realpath(link))
            if any(target.is_relative_to(folder.resolve()) for folder in gone):
                link.unlink()
        for folder in gone:
            clear(folder.rename(self.sys / ".gone"))
        if any(path.is_relative_to(self.sys / NODES) for path in gone):
            self._generation += 1
            self._topology = {}
            place(self.sys, self.sys / KFD / "topology/generation_id", text_of(self._generation))

    def _places(self, pci: str, name: str) -> list[Path]:
        folder, _, file = name.rpartition("/")
        device = self.device(pci)
        parents = sorted(device.glob(folder)) if folder else [device]
        found = [path for parent in parents for path in (parent.glob(file) if "*" in file else [parent / file])]
        if not found or not device.is_dir():
            raise FileNotFoundError(f"no {name} below {device}")
        return found


def mounted(root_sys: Path, command: Sequence[str], proc: Path | None = None) -> list[str]:
    """The command line that runs ``command`` with ``root_sys`` as its ``/sys``, and ``proc``, if given, as ``/proc``.

    It needs root, and nothing outside the command sees the mounts. A file with the fault ``eio`` leads through
    ``/proc/self/mem``, which is therefore that of the command's first process also in the fake ``/proc``.
    """
    script = 'mount --bind "$0" /sys && shift && exec "$@"'
    if proc is not None:
        over = 'mount --bind "/proc/$$/mem" "$1/self/mem" && mount --rbind "$1" /proc'
        script = f'mount --bind "$0" /sys && {over} && shift && exec "$@"'
    return ["unshare", "-m", "--propagation", "private", "sh", "-c", script, str(root_sys), str(proc or ""), *command]


def needs_root() -> None:
    """Skips the test with the reason where :func:`mounted` cannot work, but fails it if ``CI=true``."""
    if os.geteuid() != 0:
        fail_in_ci_else_skip("binding a tree over /sys needs root")
    tried = subprocess.run(mounted(Path("/sys"), ["true"]), capture_output=True, text=True, check=False)
    if tried.returncode:
        fail_in_ci_else_skip(f"root may not mount here: {tried.stderr.strip()}")


def _proc_tree(
    cards: Sequence[Card], clients: Sequence[Client], processes: Sequence[Process], namespace: int, capabilities: int
) -> Tree:
    tree = Tree()
    hidden = {process.pid for process in processes if not process.readable}
    for pid in sorted({1, *(process.pid for process in processes), *(client.pid for client in clients)}):
        _add_process(tree, pid, 0 if pid in hidden else 0o755)
    for client in clients:
        _add_client(tree, client, next(card for card in cards if card.pci == client.pci))
    for folder in ("1", "self"):
        tree.outside(f"{folder}/ns/pid", f"pid:[{namespace}]")
    sets = "\n".join(f"Cap{name}:\t{capabilities:016x}" for name in ("Prm", "Eff", "Bnd"))
    tree.file("self/status", f"Name:\tprogram\nPid:\t1\nCapInh:\t{0:016x}\n{sets}\nCapAmb:\t{0:016x}")
    tree.file("self/mem", b"")
    return tree


def _add_process(tree: Tree, pid: int, mode: int) -> None:
    """A process that has ``/dev/null`` open, unless its folders have mode 0 and hide that."""
    tree.folder(f"{pid}/fd", mode)
    tree.folder(f"{pid}/fdinfo", mode)
    tree.files(
        str(pid), {"comm": "program", "stat": f"{pid} (program) S 1 {pid} {pid} 0 -1 {'0 ' * 13}{1000 + pid} 0 0"}
    )
    if mode:
        tree.outside(f"{pid}/fd/0", "/dev/null")
        tree.file(f"{pid}/fdinfo/0", _open_file())


def _add_kfd_process(tree: Tree, process: Process) -> None:
    """What the KFD shows of a process that has it open: its nodes' files have their ``gpu_id`` in the name."""
    folder = f"{KFD}/proc/{process.pid}"
    for node, held in process.vram.items():
        if f"{NODES}/{node}/gpu_id" not in tree.entries:
            raise ValueError(f"the KFD has no node {node}")
        tree.files(folder, {f"vram_{GPU_IDS + node}": held, f"sdma_{GPU_IDS + node}": 0})
    if process.vram:
        tree.file(f"{folder}/pasid", 0x8000 + process.pid)
        tree.folder(f"{folder}/queues")


def _open_file() -> str:
    return "pos:\t0\nflags:\t02100002\nmnt_id:\t26\nino:\t1043"


def _add_client(tree: Tree, client: Client, card: Card) -> None:
    minor = drm_minor(card)
    if minor is None:
        raise ValueError(f"{card.pci} has no DRM file to open")
    name = f"renderD{128 + minor}" if client.node == "render" else f"card{minor}"
    lines = [_open_file(), *(_client_keys(client, card) if client.keys else [])]
    for fd in client.fds:
        tree.outside(f"{client.pid}/fd/{fd}", f"/dev/dri/{name}")
        tree.file(f"{client.pid}/fdinfo/{fd}", "\n".join(lines))


def _client_keys(client: Client, card: Card) -> Iterator[str]:
    yield f"drm-driver:\t{client.driver or card.driver}"
    yield f"drm-client-id:\t{client.client_id}"
    yield f"drm-pdev:\t{client.pci}"
    yield from (f"drm-{key}:\t{_size(size)}" for key, size in client.memory.items())
    yield from (f"drm-engine-{key}:\t{spent} ns" for key, spent in client.engines.items())
    for key, (busy, total) in client.cycles.items():
        yield f"drm-cycles-{key}:\t{busy}"
        yield f"drm-total-cycles-{key}:\t{total}"
    yield from (f"drm-engine-capacity-{key}:\t{count}" for key, count in client.capacities.items())


def _size(size: int) -> str:
    """As the kernel writes it: in the largest unit, up to MiB, that leaves no remainder."""
    for unit, word in ((1 << 20, " MiB"), (1 << 10, " KiB")):
        if size and size % unit == 0:
            return f"{size // unit}{word}"
    return str(size)
