"""Writes fake ``/sys`` and ``/proc`` trees of AMD, Intel and other PCI cards, also while programs read them.

A program sees the trees where it takes their roots as settings, or under :func:`mounted`, which binds them over the
real ones. What stands here is what Linux 6.x shows. There is one writer at a time.
"""

from __future__ import annotations

import os
import shutil
import stat
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

GIB = 1 << 30
FROM_PCI = -1
KFD = "devices/virtual/kfd/kfd"
NODES = f"{KFD}/topology/nodes"
INITIAL_PID_NAMESPACE = 4026531836

Fault = Literal["eio", "empty", "fifo", "missing", "denied"]


@dataclass(frozen=True, kw_only=True)
class KfdNode:
    """A GPU node of the KFD topology: a whole card, or one ``partition`` of it.

    ``location`` is where the partition stands in ``location_id``: above it (newer kernels) or as its PCI function.
    Without ``render_minor`` the node has the render device that its card or its partition got.
    """

    node: int
    unique_id: int = 0
    simd_count: int = 192
    partition: int | None = None
    memory: int = 24 * GIB
    gfx: str = "gfx1100"
    gfx_target_version: int = 110000
    render_minor: int | None = None
    location: Literal["function", "high-bits"] = "high-bits"


@dataclass(frozen=True, kw_only=True)
class AmdCard:
    """An AMD card. A file whose field is None is not there; only ``driver="amdgpu"`` brings KFD nodes.

    ``driver`` may be ``""``: no driver has taken the card. ``busy`` as text is the file's text, byte by byte. The first
    of ``kfd_nodes`` is the card's own; each further one is a partition with a DRM device on the platform bus.
    """

    pci: str
    device_id: str = "0x744c"
    revision: str = "0xc8"
    pci_class: str = "0x030000"
    driver: str = "amdgpu"
    minor: int = 0
    unique_id: int | None = FROM_PCI
    kfd_nodes: tuple[KfdNode, ...] = ()
    busy: int | str | None = 42
    vram_total: int | None = 24 * GIB
    vram_used: int | None = 2 * GIB
    temperatures: Mapping[str, int] = field(default_factory=lambda: {"edge": 51, "junction": 60, "mem": 64})
    product_name: str | None = None
    compute_partition: str | None = None
    memory_partition: str | None = None
    runtime_status: str | None = "active"
    metrics: bool = True


@dataclass(frozen=True, kw_only=True)
class IntelCard:
    """An Intel card, with ``driver`` as in :class:`AmdCard`. Only xe shows temperatures and tiles; i915 shows GTs."""

    pci: str
    device_id: str = "0x56a0"
    revision: str = "0x08"
    pci_class: str = "0x030000"
    driver: str = "xe"
    minor: int = 0
    tiles: int = 1
    temperatures: Mapping[str, int] = field(default_factory=lambda: {"pkg": 48, "vram": 52})
    runtime_status: str | None = "active"


@dataclass(frozen=True, kw_only=True)
class OtherCard:
    """A card of which only the PCI bus knows: no DRM device, no sensors."""

    pci: str
    vendor: str = "0x10de"
    device_id: str = "0x2330"
    revision: str = "0xa1"
    pci_class: str = "0x030200"
    driver: str = "nvidia"
    runtime_status: str | None = "active"


Card = AmdCard | IntelCard | OtherCard


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

    Without ``readable`` the folders of its files have mode 0, and belong to whoever wrote the tree.
    """

    pid: int
    readable: bool = True


class FakeSys:
    """The trees in ``root``: ``root/sys`` and ``root/proc``."""

    def __init__(self, root: Path) -> None:
        self.sys = root / "sys"
        self.proc = root / "proc"
        self._owned: dict[str, list[str]] = {}
        self._topology: dict[str, bytes | _Link] = {}
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
        tree = _sys_tree(cards, cpus=cpus, kfd=kfd)
        topology = {path: entry for path, entry in tree.entries.items() if path.startswith(KFD)}
        if topology:
            self._generation += topology != self._topology
            tree.file(f"{KFD}/topology/generation_id", self._generation)
        self._topology, self._owned = topology, tree.owned
        _sync(self.sys, tree)
        namespace = INITIAL_PID_NAMESPACE if initial_pid_namespace else INITIAL_PID_NAMESPACE + 741
        _sync(self.proc, _proc_tree(cards, clients, processes, namespace, capabilities))

    def device(self, pci: str) -> Path:
        """The folder of the PCI device, to which all links lead."""
        return self.sys / _device(pci)

    def set(self, pci: str, name: str, text: str) -> None:
        """Makes ``text``, as it is, that of one file below the device's folder; ``name`` may be a glob."""
        for path in self._places(pci, name):
            _place(self.sys, path, text.encode())

    def fault(self, pci: str, name: str, how: Fault) -> None:
        """Breaks a file, or all that the glob ``name`` finds, until it is set or the tree written again.

        ``eio``: a read answers EIO. ``fifo``: an open hangs, and finds an empty file once the fault is gone.
        ``denied``: mode 0, which stops everyone but root.
        """
        for path in self._places(pci, name):
            _break(self.sys, path, how)

    def remove(self, pci: str) -> None:
        """The card leaves the bus: first every link to it, then its folders and its KFD nodes, each all at once."""
        gone = [self.sys / path for path in self._owned.pop(pci)]
        for link in _links(self.sys):
            target = Path(os.path.realpath(link))
            if any(target.is_relative_to(folder.resolve()) for folder in gone):
                link.unlink()
        for folder in gone:
            _clear(folder.rename(self.sys / ".gone"))
        if any(path.is_relative_to(self.sys / NODES) for path in gone):
            self._generation += 1
            self._topology = {}
            _place(self.sys, self.sys / KFD / "topology/generation_id", _bytes(self._generation))

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
    if os.geteuid() == 0:
        tried = subprocess.run(mounted(Path("/sys"), ["true"]), capture_output=True, text=True, check=False)
        reason = f"root may not mount here: {tried.stderr.strip()}" if tried.returncode else None
    else:
        reason = "binding a tree over /sys needs root"
    if reason is None:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@dataclass(frozen=True)
class _Link:
    target: str


class _Tree:
    """What is to stand below a root, by path; ``owned`` are the folders that leave together with a card."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes | _Link] = {}
        self.folders: dict[str, int] = {}
        self.owned: dict[str, list[str]] = {}

    def file(self, path: str, value: object) -> None:
        self._add(path, _bytes(value))

    def files(self, folder: str, values: Mapping[str, object]) -> None:
        """The files of a folder without those whose value is None."""
        for name, value in values.items():
            if value is not None:
                self.file(f"{folder}/{name}", value)

    def link(self, path: str, target: str) -> None:
        """A link to ``target``, a path below the same root."""
        self._add(path, _Link(os.path.relpath(target, os.path.dirname(path))))  # noqa: PTH120

    def outside(self, path: str, target: str) -> None:
        """A link with exactly this text."""
        self._add(path, _Link(target))

    def folder(self, path: str, mode: int = 0o755) -> None:
        self.folders[path] = mode
        for parent in list(Path(path).parents)[:-1]:
            self.folders.setdefault(str(parent), 0o755)

    def _add(self, path: str, entry: bytes | _Link) -> None:
        if path in self.entries:
            raise ValueError(f"two cards or programs claim {path}")
        parent = str(Path(path).parent)
        self.folder(parent, self.folders.get(parent, 0o755))
        self.entries[path] = entry


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else f"{value}\n".encode()


def _sync(root: Path, tree: _Tree) -> None:
    """Links come last and go first: whoever follows one finds a folder that is complete."""
    root.mkdir(parents=True, exist_ok=True)
    for name, mode in sorted(tree.folders.items()):
        _place_folder(root / name, mode)
    for name, entry in sorted(tree.entries.items(), key=lambda item: isinstance(item[1], _Link)):
        if not _stands(root / name, entry):
            _place(root, root / name, entry)
    found = {str(path.relative_to(root)): path for path in _below(root)}
    others = [path for name, path in found.items() if name not in tree.entries and name not in tree.folders]
    for path in sorted(others, key=lambda path: not path.is_symlink()):
        _clear(path)


def _below(root: Path) -> Iterator[Path]:
    """All that stands below ``root``, what is in a folder before the folder."""
    for folder, folders, files in os.walk(root, topdown=False):
        yield from (Path(folder, name) for name in (*files, *folders))


def _links(root: Path) -> list[Path]:
    return [path for path in _below(root) if path.is_symlink()]


def _stands(path: Path, entry: bytes | _Link) -> bool:
    """Whether ``path`` is already this, with nothing broken."""
    if not os.path.lexists(path):
        return False
    if isinstance(entry, _Link):
        return path.is_symlink() and str(path.readlink()) == entry.target
    return path.lstat().st_mode == stat.S_IFREG | 0o444 and path.read_bytes() == entry


def _place_folder(path: Path, mode: int) -> None:
    if path.is_symlink() or not path.is_dir():
        _clear(path)
        path.mkdir()
    if stat.S_IMODE(path.stat().st_mode) != mode:
        path.chmod(mode)


def _place(root: Path, path: Path, entry: bytes | _Link, mode: int = 0o444) -> None:
    """Puts the file or link at ``path`` by renaming, from the top of the root: nobody lists that for devices."""
    new = root / ".new"
    if isinstance(entry, _Link):
        new.symlink_to(entry.target)
    else:
        new.write_bytes(entry)
        new.chmod(mode)
    if path.is_dir() and not path.is_symlink():
        _clear(path)
    with _released(path):
        new.replace(path)


def _break(root: Path, path: Path, how: Fault) -> None:
    if how == "eio":
        _place(root, path, _Link("/proc/self/mem"))
    elif how == "empty":
        _place(root, path, b"")
    elif how == "denied" and path.is_dir():
        path.chmod(0)
    elif how == "denied":
        _place(root, path, path.read_bytes() if path.is_file() and not path.is_symlink() else b"", mode=0)
    else:
        _clear(path)
        if how == "fifo":
            os.mkfifo(path)
            path.chmod(0o644)


def _clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for fifo in [below for below in _below(path) if below.is_fifo()]:
            _clear(fifo)
        shutil.rmtree(path)
        return
    with _released(path):
        path.unlink(missing_ok=True)


@contextmanager
def _released(path: Path) -> Iterator[None]:
    """Programs that hang in opening ``path``, where it is a FIFO, go on once it is no longer there."""
    held = os.open(path, os.O_RDWR) if path.is_fifo() else None
    try:
        yield
    finally:
        if held is not None:
            os.close(held)


@dataclass(frozen=True)
class _Partition:
    """A DRM device beside the card's own, for a further partition of it."""

    number: int
    minor: int
    pci: str

    @property
    def folder(self) -> str:
        return f"devices/platform/amdgpu_xcp_{self.number}"


def _address(pci: str) -> tuple[int, int]:
    """The PCI domain, and bus, device and function as 16 bits."""
    domain, bus, rest = pci.split(":")
    device, function = rest.split(".")
    return int(domain, 16), int(bus, 16) << 8 | int(device, 16) << 3 | int(function, 16)


def _device(pci: str) -> str:
    return f"devices/pci{pci.partition(':')[0]}:00/{pci}"


def _vendor(card: Card) -> str:
    match card:
        case AmdCard():
            return "0x1002"
        case IntelCard():
            return "0x8086"
        case OtherCard():
            return card.vendor


def _drm_minor(card: Card) -> int | None:
    """The DRM minor, of a card whose driver makes DRM devices."""
    if isinstance(card, OtherCard) or card.driver not in {"amdgpu", "radeon", "xe", "i915"}:
        return None
    return card.minor


def _kfd_nodes(card: Card) -> tuple[KfdNode, ...]:
    return card.kfd_nodes if isinstance(card, AmdCard) and card.driver == "amdgpu" else ()


def _partitions(cards: Sequence[Card]) -> dict[int, _Partition]:
    """By KFD node, with the render device that the node names, or else the next one after the highest."""
    further = [(card.pci, node) for card in cards for node in _kfd_nodes(card)[1:]]
    minors = [minor for card in cards if (minor := _drm_minor(card)) is not None]
    minors += [node.render_minor - 128 for _, node in further if node.render_minor is not None]
    found: dict[int, _Partition] = {}
    for number, (pci, node) in enumerate(further):
        minor = max(minors) + 1 if node.render_minor is None else node.render_minor - 128
        minors.append(minor)
        found[node.node] = _Partition(number, minor, pci)
    return found


def _sys_tree(cards: Sequence[Card], *, cpus: int, kfd: bool) -> _Tree:
    tree = _Tree()
    for folder in ("bus/pci/devices", "bus/pci/drivers", "bus/platform", "class/hwmon"):
        tree.folder(folder)
    tree.file("class/drm/version", "drm 1.1.0 20060810")
    for card in cards:
        _add_card(tree, card)
    for driver in sorted({card.driver for card in cards} - {""}):
        _add_driver(tree, driver)
    partitions = _partitions(cards)
    for partition in partitions.values():
        _add_partition(tree, partition)
    if kfd and any(isinstance(card, AmdCard) and card.driver == "amdgpu" for card in cards):
        _add_kfd(tree, cards, cpus, partitions)
    return tree


def _add_card(tree: _Tree, card: Card) -> None:
    device = _device(card.pci)
    tree.owned[card.pci] = [device]
    tree.files(device, _pci_files(card))
    if card.runtime_status is not None:
        tree.files(f"{device}/power", {"runtime_status": card.runtime_status, "control": "auto"})
    tree.link(f"{device}/subsystem", "bus/pci")
    tree.link(f"bus/pci/devices/{card.pci}", device)
    if card.driver:
        tree.link(f"{device}/driver", f"bus/pci/drivers/{card.driver}")
        tree.link(f"bus/pci/drivers/{card.driver}/{card.pci}", device)
    minor = _drm_minor(card)
    if minor is None:
        return
    _add_drm(tree, device, minor)
    if card.pci_class.startswith("0x0300"):
        _add_connector(tree, device, minor)
    if isinstance(card, AmdCard):
        _add_amd(tree, card)
    elif isinstance(card, IntelCard):
        _add_intel(tree, card)


def _pci_files(card: Card) -> dict[str, object]:
    vendor, device, subsystem = _vendor(card)[2:].upper(), card.device_id[2:].upper(), "0E3B"
    kind = card.pci_class[2:].upper()
    uevent = [
        *([f"DRIVER={card.driver}"] if card.driver else []),
        f"PCI_CLASS={int(kind, 16):X}",
        f"PCI_ID={vendor}:{device}",
        f"PCI_SUBSYS_ID={vendor}:{subsystem}",
        f"PCI_SLOT_NAME={card.pci}",
        f"MODALIAS=pci:v0000{vendor}d0000{device}sv0000{vendor}sd0000{subsystem}bc{kind[:2]}sc{kind[2:4]}i{kind[4:]}",
    ]
    return {
        "vendor": _vendor(card),
        "device": card.device_id,
        "class": card.pci_class,
        "revision": card.revision,
        "subsystem_vendor": _vendor(card),
        "subsystem_device": f"0x{subsystem.lower()}",
        "uevent": "\n".join(uevent),
        "enable": 1 if card.driver else 0,
        "numa_node": -1,
        "local_cpulist": "0-1",
        "current_link_speed": "16.0 GT/s PCIe",
        "current_link_width": 16,
        "max_link_speed": "16.0 GT/s PCIe",
        "max_link_width": 16,
    }


def _add_driver(tree: _Tree, driver: str) -> None:
    version = "6.12.12" if driver == "amdgpu" else None
    tree.files(f"module/{driver}", {"initstate": "live", "refcnt": 12, "version": version})
    tree.link(f"bus/pci/drivers/{driver}/module", f"module/{driver}")


def _add_drm(tree: _Tree, device: str, minor: int) -> None:
    for name, number in ((f"card{minor}", minor), (f"renderD{128 + minor}", 128 + minor)):
        folder = f"{device}/drm/{name}"
        uevent = f"MAJOR=226\nMINOR={number}\nDEVNAME=dri/{name}\nDEVTYPE=drm_minor"
        tree.files(folder, {"dev": f"226:{number}", "uevent": uevent})
        tree.link(f"{folder}/device", device)
        tree.link(f"{folder}/subsystem", "class/drm")
        tree.link(f"class/drm/{name}", folder)
        tree.link(f"dev/char/226:{number}", folder)


def _add_connector(tree: _Tree, device: str, minor: int) -> None:
    """The socket for a display, which stands among the cards in ``class/drm``."""
    name = f"card{minor}-DP-1"
    folder = f"{device}/drm/card{minor}/{name}"
    tree.files(folder, {"status": "disconnected", "enabled": "disabled"})
    tree.link(f"{folder}/device", f"{device}/drm/card{minor}")
    tree.link(f"class/drm/{name}", folder)


def _add_hwmon(tree: _Tree, card: AmdCard | IntelCard, values: Mapping[str, object]) -> None:
    device, name = _device(card.pci), f"hwmon{card.minor + 2}"
    tree.files(f"{device}/hwmon/{name}", {"name": card.driver, **values})
    tree.link(f"{device}/hwmon/{name}/device", device)
    tree.link(f"class/hwmon/{name}", f"{device}/hwmon/{name}")


def _temperatures(degrees: Mapping[int, tuple[str, int]]) -> dict[str, object]:
    """The files of numbered sensors, in thousandths of a degree."""
    files: dict[str, object] = {}
    for number, (label, value) in degrees.items():
        files[f"temp{number}_input"] = value * 1000
        files[f"temp{number}_label"] = label
        files[f"temp{number}_crit"] = 110000
    return files


def _add_amd(tree: _Tree, card: AmdCard) -> None:
    temperatures = _temperatures(dict(enumerate(card.temperatures.items(), 1)))
    if card.driver == "radeon":
        _add_hwmon(tree, card, {name: value for name, value in temperatures.items() if "label" not in name})
        return
    tree.files(_device(card.pci), _amd_files(card))
    power = {"power1_average": 187000000, "power1_cap": 303000000, "power1_label": "PPT", "fan1_input": 1450}
    clocks = {"in0_input": 850, "in0_label": "vddgfx", "freq1_input": 2105000000, "freq1_label": "sclk"}
    _add_hwmon(tree, card, {**temperatures, **power, **clocks})


def _amd_files(card: AmdCard) -> dict[str, object]:
    domain, place = _address(card.pci)
    unique = 0x1A2B3C4D00000000 + (domain << 16 | place) if card.unique_id == FROM_PCI else card.unique_id
    return {
        "unique_id": None if unique is None else f"{unique:016x}",
        "gpu_busy_percent": card.busy.encode() if isinstance(card.busy, str) else card.busy,
        "mem_busy_percent": 7,
        "mem_info_vram_total": card.vram_total,
        "mem_info_vram_used": card.vram_used,
        "mem_info_vis_vram_total": card.vram_total,
        "mem_info_vis_vram_used": card.vram_used,
        "mem_info_gtt_total": 16 * GIB,
        "mem_info_gtt_used": 33554432,
        "mem_info_vram_vendor": "samsung",
        "product_name": card.product_name,
        "current_compute_partition": card.compute_partition,
        "current_memory_partition": card.memory_partition,
        "gpu_metrics": _metrics(card) if card.metrics else None,
        "vbios_version": "113-EXT81095-001",
        "power_dpm_force_performance_level": "auto",
        "power_dpm_state": "performance",
        "pcie_replay_count": 0,
        "pp_dpm_sclk": "0: 500Mhz\n1: 2105Mhz *\n2: 2482Mhz",
        "pp_dpm_mclk": "0: 96Mhz\n1: 456Mhz\n2: 1249Mhz *",
        "pp_dpm_pcie": "0: 2.5GT/s, x1\n1: 16.0GT/s, x16 *",
    }


def _metrics(card: AmdCard) -> bytes:
    """The driver's binary table in version 1.3; what the card does not say is 0xffff there."""
    said = card.temperatures
    temperatures = (said.get("edge", 0xFFFF), said.get("junction", 0xFFFF), said.get("mem", 0xFFFF), 50, 49, 48)
    busy = card.busy if isinstance(card.busy, int) else 0xFFFF
    clocks = (2100, 1200, 1124, 0, 0, 0, 0, 2105, 1201, 1249, 0, 0, 0, 0)
    energy_and_time = (123456789, 987654321)
    fan_and_link = (1450, 16, 160, 0)
    head = struct.pack("<HBB6H3HH", 120, 1, 3, *temperatures, busy, 7, 0, 187)
    middle = struct.pack("<2Q14HI4H2I", *energy_and_time, *clocks, 0, *fan_and_link, 1000, 200)
    return head + middle + struct.pack("<4HQ4HQ", 55, 56, 57, 58, 5555, 900, 850, 1250, 0, 0)


def _add_intel(tree: _Tree, card: IntelCard) -> None:
    device = _device(card.pci)
    for number in range(card.tiles):
        if card.driver == "xe":
            gt = f"{device}/tile{number}/gt{number}"
            tree.files(f"{gt}/gtidle", {"name": f"gt{number}-rc", "idle_status": "gt-c6", "idle_residency_ms": 1000})
            tree.files(f"{gt}/freq0", {"act_freq": 0, "cur_freq": 2400, "max_freq": 2400, "min_freq": 300})
        else:
            gt = f"{device}/drm/card{card.minor}/gt/gt{number}"
            tree.files(gt, {"id": number, "rc6_enable": 1, "rc6_residency_ms": 1000, "rps_act_freq_mhz": 0})
    others = iter(range(4, 99))
    places = {"pkg": 2, "vram": 3}
    sensors = {places.get(label) or next(others): (label, value) for label, value in card.temperatures.items()}
    _add_hwmon(tree, card, {"energy1_input": 5000000, **(_temperatures(sensors) if card.driver == "xe" else {})})


def _add_partition(tree: _Tree, partition: _Partition) -> None:
    tree.owned[partition.pci].append(partition.folder)
    tree.file(f"{partition.folder}/uevent", "MODALIAS=platform:amdgpu_xcp")
    tree.link(f"{partition.folder}/subsystem", "bus/platform")
    _add_drm(tree, partition.folder, partition.minor)


def _add_kfd(tree: _Tree, cards: Sequence[Card], cpus: int, partitions: Mapping[int, _Partition]) -> None:
    tree.link("class/kfd/kfd", KFD)
    tree.folder(f"{KFD}/proc")
    tree.file(f"{KFD}/topology/system_properties", "platform_oem 0\nplatform_id 0\nplatform_rev 0")
    gpus = [(card, node) for card in cards if isinstance(card, AmdCard) for node in _kfd_nodes(card)]
    free = [number for number in range(cpus + len(gpus)) if number not in {node.node for _, node in gpus}]
    for number in free[:cpus]:
        _add_node(tree, number, properties={"cpu_cores_count": 16})
    for card, node in gpus:
        minor = partitions[node.node].minor if node.node in partitions else card.minor
        _add_node(tree, node.node, gpu=node, properties=_gpu_properties(card, node, minor))
        tree.owned[card.pci].append(f"{NODES}/{node.node}")


def _gpu_properties(card: AmdCard, node: KfdNode, minor: int) -> dict[str, int]:
    domain, location = _address(card.pci)
    return {
        "simd_count": node.simd_count,
        "simd_per_cu": 2,
        "max_waves_per_simd": 16,
        "wave_front_size": 32,
        "array_count": 12,
        "gfx_target_version": node.gfx_target_version,
        "vendor_id": 4098,
        "device_id": int(card.device_id, 16),
        "location_id": location | (node.partition or 0) << (28 if node.location == "high-bits" else 0),
        "domain": domain,
        "drm_render_minor": 128 + minor if node.render_minor is None else node.render_minor,
        "max_engine_clk_fcompute": 2482,
        "unique_id": node.unique_id,
        "num_xcc": 1,
    }


PROPERTIES = (
    *("cpu_cores_count", "simd_count", "mem_banks_count", "caches_count", "io_links_count", "p2p_links_count"),
    *("cpu_core_id_base", "simd_id_base", "max_waves_per_simd", "lds_size_in_kb", "gds_size_in_kb", "num_gws"),
    *("wave_front_size", "array_count", "simd_arrays_per_engine", "cu_per_simd_array", "simd_per_cu"),
    *("max_slots_scratch_cu", "gfx_target_version", "vendor_id", "device_id", "location_id", "domain"),
    *("drm_render_minor", "hive_id", "num_sdma_engines", "num_sdma_xgmi_engines", "num_sdma_queues_per_engine"),
    *("num_cp_queues", "max_engine_clk_fcompute", "local_mem_size", "fw_version", "capability", "debug_prop"),
    *("sdma_fw_version", "unique_id", "num_xcc", "max_engine_clk_ccompute"),
)
"""The keys of a KFD node, in the kernel's order."""


def _add_node(tree: _Tree, number: int, *, gpu: KfdNode | None = None, properties: Mapping[str, int]) -> None:
    folder = f"{NODES}/{number}"
    known = {"mem_banks_count": 1, "io_links_count": 1, **properties}
    memory = {"heap_type": 1 if gpu else 0, "size_in_bytes": gpu.memory if gpu else 64 * GIB}
    link = {"type": 2, "node_from": number, "node_to": 0 if gpu else 1, "weight": 20, "max_bandwidth": 16000}
    tree.files(folder, {"gpu_id": 40000 + number if gpu else 0, "name": gpu.gfx if gpu else ""})
    tree.file(f"{folder}/properties", _keys({key: known.get(key, 0) for key in PROPERTIES}))
    tree.file(f"{folder}/mem_banks/0/properties", _keys({**memory, "flags": 0, "width": 384, "mem_clk_max": 1249}))
    tree.file(f"{folder}/io_links/0/properties", _keys({**link, "flags": 1}))
    tree.folder(f"{folder}/caches")


def _keys(values: Mapping[str, int]) -> str:
    return "\n".join(f"{key} {value}" for key, value in values.items())


def _proc_tree(
    cards: Sequence[Card], clients: Sequence[Client], processes: Sequence[Process], namespace: int, capabilities: int
) -> _Tree:
    tree = _Tree()
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


def _add_process(tree: _Tree, pid: int, mode: int) -> None:
    """A process that has ``/dev/null`` open, unless its folders have mode 0 and hide that."""
    tree.folder(f"{pid}/fd", mode)
    tree.folder(f"{pid}/fdinfo", mode)
    tree.files(
        str(pid), {"comm": "program", "stat": f"{pid} (program) S 1 {pid} {pid} 0 -1 {'0 ' * 13}{1000 + pid} 0 0"}
    )
    if mode:
        tree.outside(f"{pid}/fd/0", "/dev/null")
        tree.file(f"{pid}/fdinfo/0", _open_file())


def _open_file() -> str:
    return "pos:\t0\nflags:\t02100002\nmnt_id:\t26\nino:\t1043"


def _add_client(tree: _Tree, client: Client, card: Card) -> None:
    minor = _drm_minor(card)
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
