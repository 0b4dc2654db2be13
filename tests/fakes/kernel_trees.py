"""What Linux 6.x shows in ``/sys`` of AMD's, Intel's and other PCI cards: which files there are, with which text."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tests.fakes import intel_trees
from tests.fakes.mirror import Tree

GIB = 1 << 30
FROM_PCI = -1
AMD_ANSWERS = (
    *("gpu_busy_percent", "mem_busy_percent", "vcn_busy_percent", "mem_info_vram_total", "gpu_metrics", "pcie_bw"),
    *("pcie_replay_count", "hwmon/*/*_input", "hwmon/*/power1_average", "hwmon/*/pwm1"),
)
"""The files of an AMD card that the card itself must answer, and not its driver alone."""
KFD = "devices/virtual/kfd/kfd"
NODES = f"{KFD}/topology/nodes"
GPU_IDS = 40000
"""The KFD's own number of a card's node is this and the node's."""


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
class Bridge:
    """A PCI bridge between a card and the host: a root port, which is the host's, or a port of a switch."""

    pci: str
    vendor: str = "0x1002"
    speed: str = "16.0 GT/s PCIe"
    width: int = 16


@dataclass(frozen=True, kw_only=True)
class AmdCard:
    """An AMD card. A file whose field is None is not there; only ``driver="amdgpu"`` brings KFD nodes.

    ``driver`` may be ``""``: no driver has taken the card. ``busy`` as text is the file's text, byte by byte. The first
    of ``kfd_nodes`` is the card's own; each further one is a partition with a DRM device on the platform bus.
    ``number`` is added to what the sensors of all cards say otherwise, ``throttled`` is the status in the driver's
    table, and ``bridges`` are those above the card, the host's first.
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
    number: int = 0
    throttled: int = 0
    ras: bool = False
    bridges: tuple[Bridge, ...] = ()


@dataclass(frozen=True, kw_only=True)
class IntelCard:
    """An Intel card, with ``driver`` as in :class:`AmdCard`. Only xe shows temperatures and tiles; i915 shows GTs.

    ``watched`` is added to what it shows beside that (:func:`tests.fakes.intel_trees.monitor` and ``gt``), so that
    cards are told apart. With ``media`` it has a GT for media beside that for graphics, ``held`` are the drivers' words
    for what holds its clocks down, and ``hwmon`` says whether there is such a folder: integrated cards have none.
    """

    pci: str
    device_id: str = "0x56a0"
    revision: str = "0x08"
    pci_class: str = "0x030000"
    driver: str = "xe"
    minor: int = 0
    tiles: int = 1
    temperatures: Mapping[str, int] = field(default_factory=lambda: {"pkg": 48, "vram": 52})
    watched: int = 0
    media: bool = False
    held: tuple[str, ...] = ()
    hwmon: bool = True
    runtime_status: str | None = "active"
    bridges: tuple[Bridge, ...] = ()


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
    bridges: tuple[Bridge, ...] = ()


Card = AmdCard | IntelCard | OtherCard


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


def device_folder(pci: str, bridges: Sequence[Bridge] = ()) -> str:
    above = [f"pci{pci.partition(':')[0]}:00", *(bridge.pci for bridge in bridges)]
    return f"devices/{'/'.join(above)}/{pci}"


def _vendor(card: Card) -> str:
    match card:
        case AmdCard():
            return "0x1002"
        case IntelCard():
            return "0x8086"
        case OtherCard():
            return card.vendor


def drm_minor(card: Card) -> int | None:
    """The DRM minor, of a card whose driver makes DRM devices."""
    if isinstance(card, OtherCard) or card.driver not in {"amdgpu", "radeon", "xe", "i915"}:
        return None
    return card.minor


def _kfd_nodes(card: Card) -> tuple[KfdNode, ...]:
    return card.kfd_nodes if isinstance(card, AmdCard) and card.driver == "amdgpu" else ()


def _partitions(cards: Sequence[Card]) -> dict[int, _Partition]:
    """By KFD node, with the render device that the node names, or else the next one after the highest."""
    further = [(card.pci, node) for card in cards for node in _kfd_nodes(card)[1:]]
    minors = [minor for card in cards if (minor := drm_minor(card)) is not None]
    minors += [node.render_minor - 128 for _, node in further if node.render_minor is not None]
    found: dict[int, _Partition] = {}
    for number, (pci, node) in enumerate(further):
        minor = max(minors) + 1 if node.render_minor is None else node.render_minor - 128
        minors.append(minor)
        found[node.node] = _Partition(number, minor, pci)
    return found


def sys_tree(cards: Sequence[Card], *, cpus: int, kfd: bool) -> Tree:
    tree = Tree()
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


def _add_card(tree: Tree, card: Card) -> None:
    device = device_folder(card.pci, card.bridges)
    _add_bridges(tree, card.bridges)
    tree.owned[card.pci] = [device]
    tree.files(device, _pci_files(card))
    if card.runtime_status is not None:
        tree.files(f"{device}/power", {"runtime_status": card.runtime_status, "control": "auto"})
    tree.link(f"{device}/subsystem", "bus/pci")
    tree.link(f"bus/pci/devices/{card.pci}", device)
    if card.driver:
        tree.link(f"{device}/driver", f"bus/pci/drivers/{card.driver}")
        tree.link(f"bus/pci/drivers/{card.driver}/{card.pci}", device)
    minor = drm_minor(card)
    if minor is None:
        return
    _add_drm(tree, device, minor)
    if card.pci_class.startswith("0x0300"):
        _add_connector(tree, device, minor)
    if isinstance(card, AmdCard):
        _add_amd(tree, card)
    elif isinstance(card, IntelCard):
        _add_intel(tree, card)


def _add_bridges(tree: Tree, bridges: Sequence[Bridge]) -> None:
    """Those that no other card has brought."""
    for place, bridge in enumerate(bridges):
        folder = device_folder(bridge.pci, bridges[:place])
        if folder not in tree.folders:
            tree.files(folder, {"vendor": bridge.vendor, "class": "0x060400", **_link(bridge.speed, bridge.width)})


def _link(speed: str, width: int) -> dict[str, object]:
    names = {"current_link_speed": speed, "current_link_width": width}
    return {**names, "max_link_speed": speed, "max_link_width": width}


def _errors(kind: str, total: str, counts: Sequence[tuple[str, int]]) -> dict[str, object]:
    """The PCI core's counters of one severity, with their sum at the end."""
    lines = [f"{name} {count}" for name, count in counts]
    return {f"aer_dev_{kind}": "\n".join([*lines, f"{total} {sum(count for _, count in counts)}"])}


def _pci_files(card: Card) -> dict[str, object]:
    vendor, device, subsystem = _vendor(card)[2:].upper(), card.device_id[2:].upper(), "0E3B"
    number = card.number if isinstance(card, AmdCard) else 0
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
        **_link("16.0 GT/s PCIe", 16),
        **_errors("correctable", "TOTAL_ERR_COR", [("RxErr", 4), ("BadTLP", 0), ("Timeout", number)]),
        **_errors("nonfatal", "TOTAL_ERR_NONFATAL", [("Undefined", 0), ("DLP", 1), ("TLP", number)]),
        **_errors("fatal", "TOTAL_ERR_FATAL", [("Undefined", 0), ("DLP", number)]),
    }


def _add_driver(tree: Tree, driver: str) -> None:
    version = "6.12.12" if driver == "amdgpu" else None
    tree.files(f"module/{driver}", {"initstate": "live", "refcnt": 12, "version": version})
    tree.link(f"bus/pci/drivers/{driver}/module", f"module/{driver}")


def _add_drm(tree: Tree, device: str, minor: int) -> None:
    for name, number in ((f"card{minor}", minor), (f"renderD{128 + minor}", 128 + minor)):
        folder = f"{device}/drm/{name}"
        uevent = f"MAJOR=226\nMINOR={number}\nDEVNAME=dri/{name}\nDEVTYPE=drm_minor"
        tree.files(folder, {"dev": f"226:{number}", "uevent": uevent})
        tree.link(f"{folder}/device", device)
        tree.link(f"{folder}/subsystem", "class/drm")
        tree.link(f"class/drm/{name}", folder)
        tree.link(f"dev/char/226:{number}", folder)


def _add_connector(tree: Tree, device: str, minor: int) -> None:
    """The socket for a display, which stands among the cards in ``class/drm``."""
    name = f"card{minor}-DP-1"
    folder = f"{device}/drm/card{minor}/{name}"
    tree.files(folder, {"status": "disconnected", "enabled": "disabled"})
    tree.link(f"{folder}/device", f"{device}/drm/card{minor}")
    tree.link(f"class/drm/{name}", folder)


def _add_hwmon(tree: Tree, card: AmdCard | IntelCard, values: Mapping[str, object]) -> None:
    device, name = device_folder(card.pci, card.bridges), f"hwmon{card.minor + 2}"
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


def _amd_temperatures(card: AmdCard) -> dict[str, object]:
    """With limits that are another for each sensor."""
    files = _temperatures(dict(enumerate(card.temperatures.items(), 1)))
    for sensor in range(1, len(card.temperatures) + 1):
        files[f"temp{sensor}_crit"] = 110000 + 1000 * (card.number - sensor)
        files[f"temp{sensor}_emergency"] = 115000 + 1000 * (card.number - sensor)
    return files


def _add_amd(tree: Tree, card: AmdCard) -> None:
    temperatures = _amd_temperatures(card)
    if card.driver == "radeon":
        _add_hwmon(tree, card, {name: value for name, value in temperatures.items() if "label" not in name})
        return
    device = device_folder(card.pci, card.bridges)
    tree.files(device, _amd_files(card))
    if card.ras:
        tree.files(f"{device}/ras", _ras_files(card.number))
    _add_hwmon(tree, card, {**temperatures, **_amd_sensors(card.number)})


def _amd_sensors(number: int) -> dict[str, object]:
    watts = {"average": 187, "cap": 303, "cap_default": 299, "cap_max": 348, "cap_min": 0}
    return {
        **{f"power1_{name}": (value + number) * 1000000 for name, value in watts.items()},
        "power1_label": "PPT",
        "fan1_input": 1450 + number,
        "pwm1": 51 + number,
        "pwm1_max": 255,
        "in0_input": 850 + number,
        "in0_label": "vddgfx",
        "freq1_input": (2105 + number) * 1000000,
        "freq1_label": "sclk",
        "freq2_input": (1249 + number) * 1000000,
        "freq2_label": "mclk",
    }


RAS_BLOCKS = ("umc", "sdma", "gfx", "mmhub", "pcie_bif", "xgmi_wafl")


def _ras_files(number: int) -> dict[str, object]:
    """Each block has other counts; of the bad pages one more than the number is out of use, and one waits for it."""
    pages = [f"0x{0x1000 + page:08x} : 0x00001000 : {'P' if page > number else 'R'}" for page in range(number + 2)]
    counts = {
        f"{block}_err_count": f"ue: {place + number}\nce: {10 * place + number}"
        for place, block in enumerate(RAS_BLOCKS)
    }
    bad = "\n".join([*pages, "0x0000ffff : 0x00001000 : F"])
    return {"features": "feature mask: 0x5ff", "gpu_vram_bad_pages": bad, **counts}


def _amd_files(card: AmdCard) -> dict[str, object]:
    domain, place = _address(card.pci)
    unique = 0x1A2B3C4D00000000 + (domain << 16 | place) if card.unique_id == FROM_PCI else card.unique_id
    return {
        "unique_id": None if unique is None else f"{unique:016x}",
        "gpu_busy_percent": card.busy.encode() if isinstance(card.busy, str) else card.busy,
        "mem_busy_percent": 7 + card.number,
        "vcn_busy_percent": 17 + card.number,
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
        "pcie_bw": f"{1000 + card.number} {2000 + card.number} 256",
        "pcie_replay_count": 3 + card.number,
        "pp_dpm_sclk": f"0: 500Mhz\n1: 2105Mhz *\n2: {2482 + card.number}Mhz",
        "pp_dpm_mclk": f"0: 96Mhz\n1: 456Mhz\n2: {1249 + card.number}Mhz *",
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
    return head + middle + struct.pack("<4HQ4HQ", 55, 56, 57, 58, 5555, 900, 850, 1250, 0, card.throttled)


def _add_intel(tree: Tree, card: IntelCard) -> None:
    device = device_folder(card.pci, card.bridges)
    graphics = [(number, False) for number in range(card.tiles)]
    for number, (tile, media) in enumerate([*graphics, *([(0, True)] if card.media else [])]):
        place = f"tile{tile}/gt{number}" if card.driver == "xe" else f"drm/card{card.minor}/gt/gt{number}"
        files = intel_trees.gt(card.driver, number, card.watched + 10 * tile, media=media, held=card.held)
        for folder, texts in files.items():
            tree.files(f"{device}/{place}{folder}", texts)
    if not card.hwmon:
        return
    others = iter(range(4, 99))
    places = {"pkg": 2, "vram": 3}
    sensors = {places.get(label) or next(others): (label, value) for label, value in card.temperatures.items()}
    temperatures = _temperatures(sensors) if card.driver == "xe" else {}
    _add_hwmon(tree, card, {**temperatures, **intel_trees.monitor(card.driver, card.watched, sensors)})


def _add_partition(tree: Tree, partition: _Partition) -> None:
    tree.owned[partition.pci].append(partition.folder)
    tree.file(f"{partition.folder}/uevent", "MODALIAS=platform:amdgpu_xcp")
    tree.link(f"{partition.folder}/subsystem", "bus/platform")
    _add_drm(tree, partition.folder, partition.minor)


def _add_kfd(tree: Tree, cards: Sequence[Card], cpus: int, partitions: Mapping[int, _Partition]) -> None:
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


def _add_node(tree: Tree, number: int, *, gpu: KfdNode | None = None, properties: Mapping[str, int]) -> None:
    folder = f"{NODES}/{number}"
    known = {"mem_banks_count": 1, "io_links_count": 1, **properties}
    memory = {"heap_type": 1 if gpu else 0, "size_in_bytes": gpu.memory if gpu else 64 * GIB}
    link = {"type": 2, "node_from": number, "node_to": 0 if gpu else 1, "weight": 20, "max_bandwidth": 16000}
    tree.files(folder, {"gpu_id": GPU_IDS + number if gpu else 0, "name": gpu.gfx if gpu else ""})
    tree.file(f"{folder}/properties", _keys({key: known.get(key, 0) for key in PROPERTIES}))
    tree.file(f"{folder}/mem_banks/0/properties", _keys({**memory, "flags": 0, "width": 384, "mem_clk_max": 1249}))
    tree.file(f"{folder}/io_links/0/properties", _keys({**link, "flags": 1}))
    tree.folder(f"{folder}/caches")


def _keys(values: Mapping[str, int]) -> str:
    return "\n".join(f"{key} {value}" for key, value in values.items())
