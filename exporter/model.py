"""The frozen values that travel between the floors. No behaviour beyond naming themselves, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

Evidence = Literal["proven", "probed", "assumed"]
State = Literal["ok", "lost", "hung", "asleep"]
Does = Literal["computes", "draws", "nothing"]

EVIDENCE: tuple[Evidence, ...] = ("proven", "probed", "assumed")
STATES: tuple[State, ...] = ("ok", "lost", "hung", "asleep")
VULKAN_KINDS: tuple[str, ...] = ("discrete", "integrated", "virtual", "cpu", "other")

FAULT_REASONS: tuple[str, ...] = (
    "crashed",
    "device-lost",
    "driver-error",
    "driver-mismatch",
    "driver-not-loaded",
    "driver-too-old",
    "hung",
    "internal-error",
    "library-missing",
    "no-devices",
    "no-permission",
    "stale",
    "starting",
    "unsupported",
)
"""Every ``reason`` that a backend fault may carry: a closed list, so that the series of each exist from the start."""


class DeviceKey(msgspec.Struct, frozen=True, order=True):
    """Who a device is; the only thing anything is ever joined on. Never made from an index.

    ``identity`` is the vendor's UUID (NVIDIA GPU and MIG), else the PCI address with ``/xcpN`` (AMD partition) or
    ``/tN`` (Intel tile; ``/t0+t3`` for a card narrowed to some) appended where the device is not the whole card.
    """

    vendor: str
    identity: str


class Device(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One device of the host: a whole card, or a part of one that a runtime can hand out by itself.

    ``physical_index`` is what the vendor's tool prints now; a MIG device or a tile carries its board's. None where the
    library does not say, for example while the card is asleep. ``uuid`` is what the vendor's masks call it: NVIDIA's
    UUID, or AMD's ``GPU-`` and the 16 hex digits of the KFD unique id. ``minor_number`` is N of /dev/nvidiaN or
    /dev/dri/renderDN by which a process opens it; a tile or MIG device, which is opened by its board's, has None.
    ``partition`` is ``"<GPU instance>/<compute instance>"`` for MIG, ``"3"`` for an AMD partition, ``"0"`` or ``"0+3"``
    for Intel tiles, and empty for a whole card. ``mig_mode`` is None where the vendor or the card has no such mode.

    ``opened_by`` are the device files that a process needs to use it, as :class:`Opens` spells them; none where no file
    stands for the device.

    The rest is what a runtime's base order rests on, None where it is not known: the KFD node, whether the KFD has the
    card at all, ROCr knows its ISA, and HIP can initialise it; how many tiles a card has, whether it is a Data Center
    GPU Max (``hpc``) or integrated, a number that rises with its product family's age (the newest family has the
    highest), which of Level Zero's driver libraries serves the family, and whether every driver that knows it sorts its
    cards.
    """

    key: DeviceKey
    physical_index: int | None
    pci_bus_id: str
    uuid: str = ""
    name: str = ""
    memory_total_bytes: int | None = None
    minor_number: int | None = None
    opened_by: tuple[str, ...] = ()
    partition: str = ""
    parent: DeviceKey | None = None
    temperature_sensor: str = ""
    mig_mode: bool | None = None
    mig_index: int | None = None
    gpu_instance: int | None = None
    compute_instance: int | None = None
    kfd_node: int | None = None
    kfd_listed: bool | None = None
    hsa_isa_ok: bool | None = None
    hip_ok: bool | None = None
    tiles: int | None = None
    hpc: bool | None = None
    integrated: bool | None = None
    product_family_rank: int | None = None
    driver_library: str | None = None
    driver_sorts: bool | None = None


class VulkanDevice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of ``vkEnumeratePhysicalDevices``: a card as one of its drivers shows it, or software.

    ``kind`` is ``discrete``, ``integrated``, ``virtual``, ``cpu`` or ``other``; ``driver`` a short name (``radv``,
    ``anv``, ``nvidia``, ...). Entries of one card share ``uuid``. ``pci_bus_id`` is empty for what is no PCI device.
    """

    raw_position: int
    kind: str
    driver: str
    vendor: str
    uuid: str = ""
    pci_bus_id: str = ""
    name: str = ""
    fp16_storage: bool = True


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """One value, in base units. ``metric`` is a key of :data:`exporter.catalog.READINGS`, and ``labels`` are the values
    of its family's own labels, in their order.
    """

    metric: str
    key: DeviceKey
    value: float
    labels: tuple[str, ...] = ()


Readings = Mapping[str, Mapping[tuple[str, ...], float]]
"""A device's values in one cycle, by metric and by the values of the family's own labels: ``()`` where it has none."""


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that failed: ``reason`` from :data:`FAULT_REASONS`, ``key`` None when it is the whole backend's."""

    reason: str
    detail: str
    key: DeviceKey | None = None


class Hint(msgspec.Struct, frozen=True, array_like=True, order=True):
    """What would bring readings that a vendor's devices lack here: ``code`` is hyphenated, ``text`` a sentence."""

    code: str
    text: str


class DeviceState(msgspec.Struct, frozen=True, array_like=True):
    """The one state that holds for a device in this cycle."""

    key: DeviceKey
    state: State


class User(msgspec.Struct, frozen=True, array_like=True):
    """A process on a device, by the number that the host knows it by.

    ``memory_bytes`` is what it holds of the device's memory, ``utilization`` its share of the device's time since the
    cycle before, from 0 to 1; None where the library does not say. What it ``does`` there: it computes, which masks of
    compute runtimes can forbid; it draws, or decodes, without computing; or nothing, where all that it holds is what
    every process has that can open the device. None: whether it is there at all cannot be told.
    """

    key: DeviceKey
    pid: int
    memory_bytes: int | None = None
    utilization: float | None = None
    does: Does | None = "computes"


class VendorSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one vendor's worker found in one cycle.

    ``whole`` is False while the library counts a card that could not be identified, so that no index may be trusted.
    ``devices`` holds cards that are lost, hung or asleep as they were last known; only ``ok`` ones have readings.
    ``pending``: a counter was read that gives a value from the next cycle on. ``users`` is empty where nobody asked;
    ``users_of`` are the devices of which all users were told: of another it is not known that it has none.
    """

    vendor: str
    driver_version: str
    whole: bool
    devices: tuple[Device, ...]
    states: tuple[DeviceState, ...]
    readings: tuple[Reading, ...]
    faults: tuple[Fault, ...] = ()
    hints: tuple[Hint, ...] = ()
    pending: bool = False
    users: tuple[User, ...] = ()
    users_of: tuple[DeviceKey, ...] = ()


class VendorOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One backend in one cycle: a sample, or the fault that explains why there is none. ``asked`` is when it was asked,
    in seconds of CLOCK_BOOTTIME.
    """

    vendor: str
    sample: VendorSample | None = None
    fault: Fault | None = None
    duration_seconds: float
    asked: float = 0.0


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the workload and its host beside the environment; None always means *not known*.

    ``reach`` holds the keys of the devices that the process can open; a board in it brings its parts. ``driver`` is
    Intel's, ``"current"`` or ``"old"`` (before it sorted its devices). ``frontend`` is ``"none"`` where the ordinals
    are known to be the runtime's own, or ``"llama.cpp"``. ``api`` is ``"hip"``, ``"hsa"`` or ``"opencl"`` for ROCm,
    ``backend`` is ``"level_zero"``, ``"cuda"``, ``"hip"`` or ``"opencl"`` for SYCL. ``space`` is ``"enumeration"``, or
    ``"mask_index"`` to ask what ``ZE_AFFINITY_MASK`` counts. ``probe`` is how the Vulkan devices were enumerated:
    ``"same_env"``, ``"clean_env"`` or ``"pci_only"``. ``opencl`` is whether an OpenCL platform can show Intel's cards.
    """

    reach: frozenset[DeviceKey] | None = None
    driver_branch: int | None = None
    driver: str | None = None
    frontend: str | None = None
    api: str | None = None
    os: str | None = None
    backend: str | None = None
    space: str | None = None
    probe: str | None = None
    container: bool | None = None
    multi_driver_library: bool | None = None
    opencl: bool | None = None


class Layer(msgspec.Struct, frozen=True):
    """What one mask variable did: ``text`` as set (None: unset), how many devices it left (None: the mask is refused
    here), where it stopped and why.
    """

    variable: str
    text: str | None
    left: int | None
    stopped: str = ""


class Resolved(msgspec.Struct, frozen=True):
    """One ordinal's device and how it is known; ``raw_position`` is its place in the raw Vulkan enumeration. ``uuid``
    is the device's when it was bound: another card at the same address is not what the mask named.
    """

    key: DeviceKey
    evidence: Evidence
    fleet_index: int
    raw_position: int | None = None
    uuid: str = ""


class Inversion(msgspec.Struct, frozen=True):
    """A mask inverted: the devices by fleet index (none, when the mask hides all), and what each layer did.

    ``told`` are sentences on what else than the masks it rests on.
    """

    devices: tuple[Resolved, ...]
    layers: tuple[Layer, ...] = ()
    told: tuple[str, ...] = ()


class Refusal(msgspec.Struct, frozen=True):
    """A mask that cannot be inverted: ``code`` is one of :data:`exporter.refusals.REFUSALS`."""

    code: str
    detail: str
    layers: tuple[Layer, ...] = ()


class Opens(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the host's GPU device files a process can open, as far as that shows from outside.

    A file goes by what its numbers mean, wherever it lies: ``nvidia0`` is /dev/nvidia0, ``renderD128`` is
    /dev/dri/renderD128, ``kfd`` is /dev/kfd, and ``nvidia0/gi1/ci0`` are the capabilities of a MIG instance of the card
    with minor number 0. ``may`` has those that are in the process's /dev and that no file mode or listed device filter
    denies it; None where its /dev cannot be read. Of those in ``unsure`` the mode does not decide. ``held`` are open,
    and ``holds`` says that one is, or /dev/nvidiactl. ``here`` says that its /dev is the exporter's own. ``filtered``
    says whether a device filter of its control group denies it some that are in ``may``: False where there is none or
    its list was read, None where that is not known. ``told`` are sentences that say where all this was seen.
    """

    may: frozenset[str] | None
    unsure: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()
    holds: bool = False
    here: bool = False
    filtered: bool | None = None
    told: tuple[str, ...] = ()


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of a fleet's processes, all of which have the same masks.

    ``incarnation`` names the oldest of them as it runs now: another program in it, or another process of its number,
    has another. ``spans`` are between which times each of them was started, in seconds of CLOCK_BOOTTIME; a process may
    have run another program before. ``pids`` are those of them that count where it is told which processes compute on a
    device. ``slurm`` has the cards' numbers that Slurm gave the job, over all of the host's. ``used`` are the PCI
    addresses of cards that compute for them, as DRM clients tell. ``refusal`` says why their masks cannot be told.
    ``told`` are sentences on where all this was seen.

    Of the processes that use any device, ``own`` are all of the fleet's, also those whose masks do not count, and of
    ``unclear`` it is not known whether they are. None where the devices' process numbers are not those that are seen.
    """

    incarnation: str
    spans: frozenset[tuple[float, float]]
    pids: frozenset[int]
    opens: Opens | None = None
    slurm: str | None = None
    used: frozenset[str] = frozenset()
    refusal: Refusal | None = None
    told: tuple[str, ...] = ()
    own: frozenset[int] | None = None
    unclear: frozenset[int] = frozenset()


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """A named workload with an environment.

    ``runtimes`` are tried each for its own vendors; ``vendors`` narrows them to some (None: all). ``reach`` lists
    UUIDs and PCI addresses; None states that the workload can open every device of the host. ``known`` has values for
    fields of :class:`Context` that the settings state. ``live`` is what was seen of its processes, None for a fleet of
    the settings.
    """

    name: str
    runtimes: tuple[str, ...]
    env: Mapping[str, str] = msgspec.field(default_factory=dict)
    reach: tuple[str, ...] | None = None
    vendors: tuple[str, ...] | None = None
    known: Mapping[str, str | bool] = msgspec.field(default_factory=dict)
    live: Live | None = None


class FleetMapping(msgspec.Struct, frozen=True):
    """One fleet under one runtime, inverted or refused."""

    fleet: str
    runtime: str
    outcome: Inversion | Refusal


class BackendStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One backend's row: up, how long its cycle took, the fault that holds, and its faults so far by reason.

    ``cards_found`` are the whole cards that answered, or sleep; ``cards_expected`` is None where the settings expect
    nothing.
    """

    vendor: str
    up: bool
    duration_seconds: float
    fault: Fault | None
    faults_total: Mapping[str, int]
    driver_version: str = ""
    hints: tuple[Hint, ...] = ()
    cards_found: int = 0
    cards_expected: int | None = None


class Binding(msgspec.Struct, frozen=True):
    """One inverted ordinal: the fleet's number and the device behind it, as the device is in this cycle."""

    fleet: str
    runtime: str
    fleet_index: int
    evidence: Evidence
    device: Device


UsageKey = tuple[str, str, DeviceKey]
"""A fleet's name, the runtime that numbers the device for it, and the device."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One cycle, complete: data and health side by side. Everything on a page comes from here.

    ``incomplete`` names the vendors whose inventory is known to lack a card, ``pending`` those whose counters give
    values from the next cycle on. ``fleets`` are those of the cycle, ``left_out`` is how many there are beyond them.
    ``asked`` is when the first of its backends that answered was asked, as :class:`VendorOutcome` has it; 0 where none
    did. ``usage`` is what fleets' own processes do on their devices, by the keys of :data:`exporter.catalog.USAGE`.
    """

    backends: tuple[BackendStatus, ...]
    devices: tuple[Device, ...]
    states: Mapping[DeviceKey, State]
    readings: Mapping[DeviceKey, Readings]
    driver_versions: Mapping[str, str]
    incomplete: tuple[str, ...] = ()
    pending: tuple[str, ...] = ()
    mappings: tuple[FleetMapping, ...]
    bindings: tuple[Binding, ...]
    fleets: tuple[Fleet, ...] = ()
    left_out: int = 0
    asked: float = 0.0
    usage: Mapping[UsageKey, Mapping[str, float]] = msgspec.field(default_factory=dict)
