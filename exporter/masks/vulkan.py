"""Vulkan as ggml numbers it: ``GGML_VK_VISIBLE_DEVICES`` over the raw ``vkEnumeratePhysicalDevices``.

The raw order is made by the loader and its layers, and is not the PCI order: only an enumeration tells it. The masks of
CUDA, HIP and Level Zero do nothing here. Source: llama.cpp's ``ggml-vulkan.cpp``, the Vulkan loader's
``loader_linux.c``, Mesa's device-select layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from exporter.inventory import Inventory
from exporter.masks.base import MOST_DEVICES, RefusedError, Runtime
from exporter.model import Context, DeviceKey, Inversion, Layer, Refusal, Resolved, VulkanDevice

MASK = "GGML_VK_VISIBLE_DEVICES"
REORDERING = (
    *("VK_LOADER_DEVICE_SELECT", "VK_LOADER_DISABLE_SELECT", "MESA_VK_DEVICE_SELECT", "DRI_PRIME"),
    *("MESA_VK_DEVICE_SELECT_FORCE_DEFAULT_DEVICE", "NODEVICE_SELECT", "DISPLAY", "WAYLAND_DISPLAY"),
    *("VK_DRIVER_FILES", "VK_ADD_DRIVER_FILES", "VK_ICD_FILENAMES"),
    *("VK_LOADER_DRIVERS_SELECT", "VK_LOADER_DRIVERS_DISABLE", "VK_LOADER_LAYERS_ENABLE", "VK_LOADER_LAYERS_DISABLE"),
    *("VK_LOADER_DEVICE_ID_FILTER", "VK_LOADER_VENDOR_ID_FILTER", "VK_LOADER_DRIVER_ID_FILTER", "VK_INSTANCE_LAYERS"),
)
"""Variables by which the loader or a layer reorders or shortens the raw list."""
# Those of them that name no file, no layer and no display server: a driver may be asked under them.
_HARMLESS = (
    *("VK_LOADER_DEVICE_SELECT", "VK_LOADER_DISABLE_SELECT", "MESA_VK_DEVICE_SELECT", "DRI_PRIME"),
    *("MESA_VK_DEVICE_SELECT_FORCE_DEFAULT_DEVICE", "NODEVICE_SELECT"),
    *("VK_LOADER_DRIVERS_SELECT", "VK_LOADER_DRIVERS_DISABLE"),
    *("VK_LOADER_DEVICE_ID_FILTER", "VK_LOADER_VENDOR_ID_FILTER", "VK_LOADER_DRIVER_ID_FILTER"),
)

_NUMBER = re.compile(r"[ \t\n\v\f\r]*([+-]?)([0-9]+)")
_PAST_64_BITS = 1 << 64
# More raw devices than any host has: a number from here on is past the end without knowing how many there are.
_MOST_RAW_DEVICES = 1024

# The drivers that ggml knows for a vendor's cards, the preferred one first.
_DRIVERS = {
    "amd": ("radv", "amdvlk", "amdgpu_pro"),
    "intel": ("anv", "intel_windows"),
    "nvidia": ("nvidia", "nvk"),
    "qualcomm": ("qualcomm", "turnip"),
}
_DOZEN_RANK, _UNKNOWN_RANK = 100, 1000


def invert(env: Mapping[str, str], inventory: Inventory, context: Context) -> Inversion | Refusal:
    """The devices that a ggml process with this environment numbers 0..n-1, in one list over all vendors."""
    mask = env.get(MASK)
    numbers, stopped = (None, "") if mask is None else _numbers(mask)
    try:
        chosen = _chosen(numbers, env, inventory, context)
    except RefusedError as refusal:
        return Refusal(refusal.code, refusal.detail, (Layer(MASK, mask, None, stopped),))
    if numbers and not chosen:
        stopped = f"there is no device {max(numbers)}: ggml loses the whole Vulkan backend"
    cards = _addresses(inventory)
    resolved = (Resolved(_key(entry, cards), "proven", index, entry.raw_position) for index, entry in enumerate(chosen))
    return Inversion(tuple(resolved), (Layer(MASK, mask, len(chosen), stopped),))


def _chosen(
    numbers: Sequence[int] | None, env: Mapping[str, str], inventory: Inventory, context: Context
) -> Sequence[VulkanDevice]:
    """The chosen entries of the raw list; a number past its end leaves none."""
    if numbers is not None and (not numbers or max(numbers) >= _MOST_RAW_DEVICES):
        return []
    if numbers is not None and len(numbers) > MOST_DEVICES:
        raise RefusedError("over-the-cap", f"the mask names {len(numbers)} devices, and {MOST_DEVICES} are the most")
    raw = _enumeration(env, inventory, context, numbers)
    if numbers is None:
        return list(_by_default(raw))
    return [raw[number] for number in numbers] if max(numbers) < len(raw) else []


def _numbers(mask: str) -> tuple[list[int], str]:
    """What C++ reads as unsigned 64-bit numbers, one after the other, with commas as blanks; a sign wraps."""
    text, place = mask.replace(",", " "), 0
    numbers: list[int] = []
    while match := _NUMBER.match(text, place):
        digits = match[2].lstrip("0") or "0"
        if len(digits) > 20 or int(digits) >= _PAST_64_BITS:
            return numbers, f"`{mask[match.start() : match.end()].strip()}` is past 64 bits: reading stops"
        numbers.append((-int(digits) if match[1] == "-" else int(digits)) % _PAST_64_BITS)
        place = match.end()
    rest = text[place:].strip()
    return numbers, f"`{rest}` is not a number: reading stops" if rest else ""


def _enumeration(
    env: Mapping[str, str], inventory: Inventory, context: Context, numbers: Sequence[int] | None
) -> Sequence[VulkanDevice]:
    """The raw list as the process sees it. Raises :class:`RefusedError` where that cannot be known."""
    if not inventory.whole:
        raise RefusedError("inventory-incomplete", "a card of this host could not be identified")
    if context.reach is None:
        raise RefusedError("reach-unknown", "which cards the process can open is not known")
    set_here = next((name for name in REORDERING if name in env), None)
    if context.probe == "pci_only":
        return [_the_one_card(inventory, context.reach, set_here, numbers)]
    if inventory.vulkan is None:
        raise RefusedError("raw-order-unknown", "the Vulkan devices were not enumerated")
    if context.probe is None:
        raise RefusedError(
            "raw-order-unknown", "how the Vulkan devices were enumerated is not known (explain: --known)"
        )
    if context.probe == "clean_env" and set_here:
        raise RefusedError("layer-reorder", f"{set_here} is set, and was not where the devices were enumerated")
    closed = {address for address, key in _addresses(inventory).items() if key not in context.reach}
    return [entry for entry in inventory.vulkan if entry.pci_bus_id not in closed]


def _addresses(inventory: Inventory) -> dict[str, DeviceKey]:
    return {card.pci_bus_id: card.key for card in inventory.boards()}


def _the_one_card(
    inventory: Inventory, reach: frozenset[DeviceKey], set_here: str | None, numbers: Sequence[int] | None
) -> VulkanDevice:
    """Where all PCI devices are known and nothing else, the one card that there is."""
    cards = _addresses(inventory)
    known = {entry.pci_bus_id: _key(entry, cards) for entry in inventory.vulkan or () if entry.pci_bus_id} | cards
    known = {address: key for address, key in known.items() if key in reach or address not in cards}
    if len(known) != 1 or "" in known or set_here:
        found = f"{set_here} is set" if set_here else f"there are {len(known)} cards"
        raise RefusedError("raw-order-unknown", f"the Vulkan devices were not enumerated, and {found}")
    if numbers is not None and max(numbers) > 0:
        raise RefusedError("raw-order-unknown", "how many drivers show the card was not enumerated")
    ((address, key),) = known.items()
    return VulkanDevice(raw_position=0, kind="discrete", driver="", vendor=key.vendor, pci_bus_id=address)


def _key(entry: VulkanDevice, cards: Mapping[str, DeviceKey]) -> DeviceKey:
    """The card at the entry's address; software has none, and a key that no card has."""
    if not entry.pci_bus_id:
        return DeviceKey("vulkan", f"raw:{entry.raw_position}")
    return cards.get(entry.pci_bus_id, DeviceKey(entry.vendor, entry.pci_bus_id))


def _by_default(raw: Sequence[VulkanDevice]) -> Iterator[VulkanDevice]:
    """Without a mask: every GPU once, by the preferred of its drivers, which stands at the end if it replaced one."""
    kept: list[VulkanDevice] = []
    for entry in raw:
        if entry.kind not in ("discrete", "integrated") or not entry.fp16_storage:
            continue
        twin = next((other for other in kept if _is_same(other, entry)), None)
        if twin is None:
            kept.append(entry)
        elif _rank(entry) < _rank(twin):
            kept.remove(twin)
            kept.append(entry)
    yield from kept or [entry for entry in raw if entry.kind != "cpu"][:1]


def _is_same(first: VulkanDevice, second: VulkanDevice) -> bool:
    """One GPU behind two drivers, by its UUID; two of MoltenVK are never taken for one."""
    if first.driver == second.driver == "moltenvk":
        return False
    if not first.uuid or not second.uuid:
        if first.pci_bus_id == second.pci_bus_id:
            raise RefusedError("raw-order-unknown", "whether two Vulkan devices are one GPU is not known")
        return False
    return first.uuid == second.uuid


def _rank(entry: VulkanDevice) -> int:
    if entry.driver == "dozen":
        return _DOZEN_RANK
    drivers = _DRIVERS.get(entry.vendor, ())
    return drivers.index(entry.driver) if entry.driver in drivers else _UNKNOWN_RANK


RUNTIME = Runtime(
    name="vulkan",
    vendors=(),
    masks=(MASK,),
    variables=(MASK, *REORDERING),
    default=False,
    moving=False,
    invert=invert,
    joint=True,
    choosing=(MASK,),
    told_to_drivers=(MASK, *_HARMLESS),
)
