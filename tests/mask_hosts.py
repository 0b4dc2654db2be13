"""AMD and Intel hosts and Vulkan enumerations to try masks on, with what could be set there and be known of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from random import Random
from typing import Any, NamedTuple

from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from exporter.inventory import Inventory, narrowed, pci_sort_key
from exporter.masks.vulkan import REORDERING
from exporter.model import Context, Device, DeviceKey, Inversion, Refusal, VulkanDevice
from exporter.refusals import REFUSALS
from tests.mask_vectors import implied_context
from tests.strategies import TRICKY
from tests.test_cuda_properties import keys_of


class Host(NamedTuple):
    """A host as it is: its inventory in the order of discovery, and what its runtime numbers, in the driver's order."""

    inventory: Inventory
    cards: tuple[Device, ...]

    def __repr__(self) -> str:
        """Short: a failing example is read by people."""
        return "\n  ".join(("Host:", *_described(self.inventory)))

    @property
    def everything(self) -> frozenset[DeviceKey]:
        """The reach of a workload that can open every device."""
        return frozenset(device.key for device in self.inventory.devices)

    def keep(self, kept: Sequence[Device]) -> Inventory:
        """The inventory while all but these cards and their parts are missing from it."""
        keys = {device.key for device in kept} | {device.parent for device in kept} - {None}
        devices = (device for device in self.inventory.devices if device.key in keys or device.parent in keys)
        return Inventory(tuple(devices), whole=False)


class Case(NamedTuple):
    """A host, an environment, and what is known of both; and some of its devices, none twice, in any order.

    ``known`` is the host's inventory less some facts. ``seed`` is for a test's own choices.
    """

    host: Host
    known: Inventory
    env: dict[str, str]
    context: Context
    chosen: tuple[Device, ...]
    seed: int

    def __repr__(self) -> str:
        """Short: a failing example is read by people."""
        known = ("known of it:", *_described(self.known))
        return "\n  ".join((repr(self.host), *known, f"{self.env}", f"{self.context}", f"seed {self.seed}"))

    def shuffled(self) -> Inventory:
        """What is known, discovered in another order."""
        devices = list(self.known.devices)
        Random(self.seed).shuffle(devices)
        return replace(self.known, devices=tuple(devices))


def _described(inventory: Inventory) -> Iterator[str]:
    for device in (*inventory.devices, *(inventory.vulkan or ())):
        yield ", ".join(f"{name}={value}" for name, value in asdict(device).items() if value not in (None, ""))


def usual(inventory: Inventory, reach: frozenset[DeviceKey] | None = None, **known: Any) -> Context:
    """The context that a worked mask implies, over the whole host unless a reach is given."""
    return implied_context(known, inventory, reach)


def told(outcome: Inversion | Refusal) -> list[DeviceKey] | str:
    """What an outcome comes to: its keys, or why there are none."""
    return outcome.code if isinstance(outcome, Refusal) else keys_of(outcome)


def card_of(key: DeviceKey) -> DeviceKey:
    """The card of a device whose key is made from a PCI address."""
    return DeviceKey(key.vendor, key.identity.partition("/")[0])


def is_subsequence(part: Sequence[DeviceKey], whole: Sequence[DeviceKey]) -> bool:
    """The part can be made from the whole by leaving out some."""
    rest = iter(whole)
    return all(key in rest for key in part)


def assert_sound(outcome: Inversion | Refusal, inventory: Inventory, reach: frozenset[DeviceKey] | None) -> None:
    """A refusal has a listed code and says why; an answer names devices of the inventory that are within reach.

    A part is within reach with its card, and an Intel card with one of its tiles. Vulkan's software is no device.
    """
    if isinstance(outcome, Refusal):
        assert outcome.code in REFUSALS
        assert outcome.detail
        return
    for key in keys_of(outcome):
        if key.vendor != "vulkan":
            found = inventory.find(key)
            assert found is not None
            tiles = inventory.parts(card_of(key)) if key.vendor == "intel" else ()
            assert reach is None or {found.key, found.parent, *(tile.key for tile in tiles)} & reach


# --- texts

Entry = str | tuple[str, int, int]
"""An entry of a mask: its text, or what to make it of."""

any_text = st.one_of(st.sampled_from(TRICKY), st.text(st.characters(), max_size=8))
"""Also lone surrogates, and all else that no sane environment has."""

_NUMBERS = tuple(map(str, (*range(4), *range(4), *range(18))))
_TILES = tuple(f"{card}.{tile}" for card in range(5) for tile in range(5))
_NAMES: tuple[Entry, ...] = tuple(product(("whole", "whole", "upper", "prefix"), range(16), (4, 5, 6, 7, 19)))
_large = st.integers(-(2**33), 2**65).map(str)
_amd_entry = st.one_of(
    st.sampled_from((*_NUMBERS, *_NAMES)), st.sampled_from(("GPU-XX", " 1", "0b1", "1 ", *TRICKY)), _large, any_text
)
_intel_entry = st.one_of(
    st.sampled_from((*_NUMBERS, *_TILES)), st.sampled_from(("0b1", "0.0.0", "0.1.2.3", *TRICKY)), _large, any_text
)
_quoted = st.sampled_from(('""', ' "" ', '"0"', '"1,0"', '"'))


def _listed(entry: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(entry, max_size=5)


def _text(host: Host, value: str | Sequence[Entry]) -> str:
    return value if isinstance(value, str) else ",".join(_spelled(entry, host.cards) for entry in value)


def _spelled(entry: Entry, cards: Sequence[Device]) -> str:
    if isinstance(entry, str):
        return entry
    kind, number, length = entry
    uuid = cards[number % len(cards)].uuid
    return {"whole": uuid, "upper": uuid.upper(), "prefix": uuid[:length]}[kind]


_amd_mask = st.one_of(_listed(st.sampled_from((*_NUMBERS, *_NAMES))), _listed(_amd_entry), any_text, _quoted)
_intel_mask = st.one_of(
    _listed(st.sampled_from((*_NUMBERS, *_TILES))),
    _listed(_intel_entry),
    any_text,
    st.sampled_from(("default", "0," * 2048)),
)
_virtual = st.one_of(st.integers(0, 20).map(str), any_text)
_AMD_VARIABLES = {
    "ROCR_VISIBLE_DEVICES": _amd_mask,
    "HIP_VISIBLE_DEVICES": _amd_mask,
    "CUDA_VISIBLE_DEVICES": _amd_mask,
    "GPU_DEVICE_ORDINAL": _amd_mask,
    "GGML_CUDA_DEVICES": _virtual,
}

_hierarchy = st.one_of(st.sampled_from(("COMPOSITE", "FLAT", "COMBINED", "flat")), any_text)
_switch = st.one_of(st.sampled_from(("0", "1", "true", "4294967296")), any_text)
_LEVEL_ZERO_VARIABLES = {
    "ZE_AFFINITY_MASK": _intel_mask,
    "ZE_FLAT_DEVICE_HIERARCHY": _hierarchy,
    "ZE_ENABLE_PCI_ID_DEVICE_ORDER": _switch,
}
_PREFIXES = ("NEO_", "NEO_L0_")
_LEVEL_ZERO_SELDOM = ("ZEL_DRIVERS_ORDER", *(prefix + name for name in _LEVEL_ZERO_VARIABLES for prefix in _PREFIXES))
_SYCL_SELDOM = (*_LEVEL_ZERO_SELDOM, "SYCL_DEVICE_FILTER", "SYCL_DEVICE_ALLOWLIST", "GGML_SYCL_DEVICE")

_BACKENDS = ("level_zero", "level_zero", "LEVEL_ZERO", "*", "opencl", "opencl", "hip")
_NUMBER_LISTS = ("0", "0", "1", "2", "3", "5", "9", "1,0", "2,0,2", "*", "gpu", "cpu")
_PATHS = ("0.0", "0.1", "1.1,0.0", "1.*", "*.*", "0.*", "0,0.0", "0.0.0", "GPU", "0,,")


def _terms(backends: Sequence[str], devices: st.SearchStrategy[str], least: int = 0) -> st.SearchStrategy[str]:
    term = st.builds("{}:{}".format, st.sampled_from(backends), devices)
    return st.lists(term, min_size=least, max_size=3).map(";".join)


_paths = st.sampled_from((*_NUMBER_LISTS, *_PATHS))
_accepting = _terms(_BACKENDS, _paths)
_united = st.builds("{};{}".format, _accepting, _terms([f"!{backend}" for backend in _BACKENDS], _paths))
selectors = st.one_of(
    _accepting, _accepting, _united, _united, _terms(_BACKENDS, st.one_of(_paths, any_text)), any_text
)
"""Texts of a SYCL selector, the more part of them valid."""

plain_selectors = _terms(("level_zero", "*", "opencl"), st.sampled_from(_NUMBER_LISTS), 1)
"""Selectors of accepting terms, without paths to sub-devices."""

_SYCL_VARIABLES = {"ONEAPI_DEVICE_SELECTOR": selectors, **_LEVEL_ZERO_VARIABLES}

_vulkan_mask = st.one_of(_listed(st.one_of(st.sampled_from(_NUMBERS), _large, any_text)), any_text)
_VULKAN_VARIABLES = {"GGML_VK_VISIBLE_DEVICES": _vulkan_mask}


def _environments(
    variables: dict[str, st.SearchStrategy[Any]], seldom: Sequence[str] = ()
) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the variables, and at times one or two of those that are seldom set."""
    usually = st.fixed_dictionaries({}, optional=variables)
    at_times = st.dictionaries(
        st.sampled_from(seldom or ("",)), st.one_of(st.sampled_from(_NUMBERS), any_text), max_size=2
    )
    return st.builds(dict.__or__, usually, st.one_of(st.just({}), st.just({}), at_times)) if seldom else usually


# --- what is known

_FACTS: dict[str, tuple[Any, ...]] = {
    "driver": (None, "current", "current", "old"),
    "frontend": (None, "none", "none", "llama.cpp"),
    "api": (None, "hip", "hip", "hsa", "opencl"),
    "os": (None, "linux", "linux", "windows"),
    "backend": (None, "level_zero", "level_zero", "opencl"),
    "space": (None, "enumeration", "mask_index"),
    "probe": (None, "same_env", "clean_env", "pci_only"),
    "multi_driver_library": (None, False, False, True),
    "opencl": (None, False, True),
}
_kinds = st.sampled_from(list(product(("usual", "usual", "unknown", "any"), ("whole", "whole", "some", "unknown"))))


def _drawn_context(chance: Random, host: Host, known: Inventory, kind: str, reach_kind: str) -> Context:
    reach = _reach(chance, host, reach_kind)
    if kind == "usual":
        return replace(usual(known), reach=reach)
    facts = {name: chance.choice(values) for name, values in _FACTS.items()} if kind == "any" else {}
    return Context(reach=reach, **facts)


def _reach(chance: Random, host: Host, kind: str) -> frozenset[DeviceKey] | None:
    keys = sorted(host.everything)
    some = frozenset(chance.sample(keys, chance.randint(0, len(keys))))
    return {"unknown": None, "whole": host.everything, "some": some}[kind]


def _forgotten(chance: Random, inventory: Inventory, facts: Sequence[Mapping[str, Any]]) -> Inventory:
    """The inventory less one of these facts, of some devices or of all; the tiles of untold number are no devices."""
    lost, share = chance.choice(facts), chance.choice((0, 0.2, 1))
    devices = [replace(device, **lost) if chance.random() < share else device for device in inventory.devices]
    untold = {device.key for device in devices if device.key.vendor == "intel" and device.tiles is None}
    return replace(inventory, devices=tuple(device for device in devices if device.parent not in untold))


# --- hosts

_seeds = st.integers(0, 2**32 - 1)

Make = Callable[[Random, int], Host]


@st.composite
def _cases(
    draw: st.DrawFn, make: Make, most: int, env: st.SearchStrategy[Any], facts: Sequence[Mapping[str, Any]]
) -> Case:
    """Anything at all on a host of so many cards, whose hardware comes from one drawn seed to shrink quickly."""
    seed = draw(_seeds)
    chance = Random(seed)
    host = make(chance, draw(st.integers(1, most)))
    known = _forgotten(chance, host.inventory, facts)
    texts = {name: _text(host, value) for name, value in draw(env).items()}
    context = _drawn_context(chance, host, known, *draw(_kinds))
    chosen = chance.sample(host.cards, chance.randint(0, len(host.cards)))
    return Case(host, known, texts, context, tuple(chosen), seed)


def _addresses(chance: Random, count: int) -> list[str]:
    places = chance.sample(range(1 << 13), count)
    return [f"{chance.choice((0, 0, 1, 0x10000)):04x}:{place >> 5:02x}:{place & 31:02x}.0" for place in places]


def _card(vendor: str, address: str, **facts: Any) -> Device:
    known: dict[str, Any] = {"key": DeviceKey(vendor, address), "physical_index": 0, "pci_bus_id": address}
    return Device(**known | facts)


def _amd_host(chance: Random, count: int) -> Host:
    """Cards and partitions whose KFD nodes come in any order."""
    identities = chance.sample(range(1 << 20), 4 * count)
    devices: list[Device] = []
    for place, address in enumerate(_addresses(chance, count)):
        devices += _amd_card(chance, address, [_amd_uuid(number) for number in identities[4 * place :][:4]])
    split = {device.parent for device in devices}
    nodes = iter(chance.sample(range(2 * len(devices)), len(devices)))
    devices = [device if device.key in split else replace(device, kfd_node=next(nodes)) for device in devices]
    cards = (device for device in devices if device.kfd_node is not None)
    return Host(Inventory(tuple(devices)), tuple(sorted(cards, key=lambda card: card.kfd_node or 0)))


def _amd_uuid(identity: int) -> str:
    """UUIDs have few beginnings, so that prefixes meet."""
    return f"GPU-{'abe1'[identity & 3]}{'ab'[identity >> 2 & 1]}{identity >> 3 & 3:04x}{identity >> 5:010x}"


def _amd_card(chance: Random, address: str, uuids: Sequence[str]) -> list[Device]:
    """A card; or its partitions, with the card or without, whose UUIDs are one or several."""
    count, shared, listed = chance.choice((0, 0, 0, 2, 3)), chance.random() < 0.5, chance.random() < 0.5
    works = (None, True, True, True, True, False)
    uuid = uuids[0] if chance.random() < 0.8 else ""
    card = _card("amd", address, uuid=uuid, hsa_isa_ok=chance.choice(works), hip_ok=chance.choice(works))
    parts = [
        replace(
            card,
            key=DeviceKey("amd", f"{address}/xcp{number}"),
            uuid=uuid and uuids[0 if shared else number],
            partition=str(number),
            parent=card.key,
        )
        for number in range(count)
    ]
    return [card, *parts] if listed or not parts else parts


class _Model(NamedTuple):
    name: str
    integrated: bool
    hpc: bool
    tiles: int
    product_family_rank: int


_INTEL_MODELS = (
    _Model("Old Graphics", True, False, 1, 1),
    _Model("Four Tiles", False, False, 4, 2),
    _Model("Arc A", False, False, 1, 3),
    _Model("Flex A", False, False, 1, 3),
    _Model("Max 1", False, True, 1, 4),
    _Model("Max 2", False, True, 2, 4),
    _Model("Arc B", False, False, 1, 5),
    _Model("New Graphics", True, False, 1, 6),
)


def _intel_host(chance: Random, count: int) -> Host:
    """Cards of one to three models, with their tiles or without."""
    models = chance.sample(_INTEL_MODELS, chance.randint(1, 3))
    cards = [_card("intel", address, **chance.choice(models)._asdict()) for address in _addresses(chance, count)]
    listed = chance.random() < 0.5
    tiles = [narrowed(card, [tile]) for card in cards if listed and card.tiles != 1 for tile in range(card.tiles or 0)]
    cards.sort(key=lambda card: (bool(card.integrated), pci_sort_key(card.pci_bus_id)))
    return Host(Inventory(tuple(chance.sample([*cards, *tiles], len(cards) + len(tiles)))), tuple(cards))


_DRIVERS = {
    "amd": ("radv", "amdvlk", "amdgpu_pro", "dozen"),
    "intel": ("anv", "intel_windows", "dozen"),
    "nvidia": ("nvidia", "nvk", "dozen"),
}
_KINDS = ("discrete", "integrated", "virtual", "other", "cpu")
"""In the order in which the Vulkan loader sorts them."""


def _vulkan_host(chance: Random, count: int) -> Host:
    """Cards of several vendors, each behind one driver or more, and perhaps software; enumerated in any order."""
    cards = [_vulkan_card(chance, address) for address in _addresses(chance, count)]
    entries = [entry for card in cards for entry in _vulkan_entries(chance, card)]
    software = VulkanDevice(raw_position=0, kind="cpu", driver="llvmpipe", vendor="mesa")
    entries += [replace(software, uuid=f"cpu{number}") for number in range(chance.randint(0, 2))]
    chance.shuffle(entries)
    return Host(Inventory(tuple(cards), vulkan=_in_raw_order(entries)), tuple(cards))


def _in_raw_order(entries: Sequence[VulkanDevice]) -> tuple[VulkanDevice, ...]:
    return tuple(replace(entry, raw_position=place) for place, entry in enumerate(entries))


def _vulkan_card(chance: Random, address: str) -> Device:
    vendor = chance.choice(tuple(_DRIVERS))
    identity = f"GPU-{address}" if vendor == "nvidia" else address
    return _card(vendor, address, key=DeviceKey(vendor, identity))


def _vulkan_entries(chance: Random, card: Device) -> list[VulkanDevice]:
    """A card as its drivers show it, who at times tell no UUID."""
    vendor, address = card.key.vendor, card.pci_bus_id
    kind = chance.choice(("discrete", "discrete", "integrated", "virtual", "other"))
    uuid = f"vk-{address}" if chance.random() < 0.8 else ""
    known: dict[str, Any] = {"kind": kind, "vendor": vendor, "uuid": uuid, "pci_bus_id": address}
    drivers = chance.sample(_DRIVERS[vendor], chance.randint(1, 3))
    return [
        VulkanDevice(raw_position=0, driver=driver, fp16_storage=chance.random() < 0.8, **known) for driver in drivers
    ]


def sorted_by_the_loader(host: Host) -> Inventory:
    """The inventory as the Vulkan loader alone enumerates it, where every driver tells the card's UUID."""
    named = (replace(entry, uuid=entry.uuid or entry.pci_bus_id) for entry in host.inventory.vulkan or ())
    return replace(host.inventory, vulkan=_in_raw_order(sorted(named, key=lambda entry: _KINDS.index(entry.kind))))


_AMD_FACTS = ({"kfd_node": None}, {"kfd_node": None, "uuid": ""})
_INTEL_FACTS = (
    *(
        {"tiles": None},
        {"tiles": None},
        {"hpc": None},
        {"integrated": None},
        {"product_family_rank": None},
        {"name": ""},
    ),
    {"name": "", "product_family_rank": None},
)

_unset: st.SearchStrategy[dict[str, Any]] = st.just({})

amd_hosts = _cases(_amd_host, 16, _unset, _AMD_FACTS)
"""One to sixteen AMD cards, in the order of their KFD nodes, and no variable set."""

amd_cases = _cases(_amd_host, 16, _environments(_AMD_VARIABLES, ("HSA_OVERRIDE_GFX_VERSION",)), _AMD_FACTS)
"""The same with what ROCm reads."""

intel_hosts = _cases(_intel_host, 8, _unset, _INTEL_FACTS)
"""One to eight Intel cards, discrete ones first and by address, and no variable set."""

intel_cases = _cases(_intel_host, 8, _environments(_LEVEL_ZERO_VARIABLES, _LEVEL_ZERO_SELDOM), _INTEL_FACTS)
"""The same with what Level Zero reads."""

sycl_cases = _cases(_intel_host, 8, _environments(_SYCL_VARIABLES, _SYCL_SELDOM), _INTEL_FACTS)
"""The same with what SYCL reads."""

vulkan_cases = _cases(_vulkan_host, 4, _environments(_VULKAN_VARIABLES, REORDERING), ({},))
"""One to four cards of any vendor and their Vulkan enumeration."""
