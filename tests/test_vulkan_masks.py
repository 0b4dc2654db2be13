"""ggml's Vulkan devices over a raw enumeration, and what is refused without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from exporter.inventory import Inventory
from exporter.masks import DEFAULT_RUNTIMES, RUNTIMES, invert
from exporter.masks.vulkan import REORDERING
from exporter.model import Context, Device, DeviceKey, Inversion, Layer, Refusal, VulkanDevice
from tests.answers import in_words

MASK = "GGML_VK_VISIBLE_DEVICES"


def entry(letter: str, driver: str = "nvidia", vendor: str = "nvidia", **changes: Any) -> VulkanDevice:
    """The card of that letter as a driver shows it; its place in the raw list is given when it is enumerated."""
    facts: dict[str, Any] = {"raw_position": 0, "kind": "discrete", "driver": driver, "vendor": vendor, "uuid": letter}
    return VulkanDevice(**facts | {"pci_bus_id": f"0000:0{letter}:00.0"} | changes)


SOFTWARE = entry("s", "llvmpipe", "mesa", kind="cpu", pci_bus_id="")
AMDVLK, RADV = entry("b", "amdvlk", "amd"), entry("b", "radv", "amd")


def enumerated(*entries: VulkanDevice) -> Inventory:
    """A host with these entries in this order, and a card behind each address."""
    raw = [
        VulkanDevice(**{name: getattr(each, name) for name in each.__struct_fields__} | {"raw_position": place})
        for place, each in enumerate(entries)
    ]
    addresses = dict.fromkeys(each.pci_bus_id for each in entries if each.pci_bus_id)
    devices = tuple(
        Device(key=DeviceKey("any", f"card {address[6]}"), physical_index=0, pci_bus_id=address)
        for address in addresses
    )
    return Inventory(devices, vulkan=tuple(raw))


FOUR = enumerated(*map(entry, "abcd"))


def ask(env: Mapping[str, str], inventory: Inventory, **known: Any) -> Inversion | Refusal:
    """The inversion with an enumeration under the same environment, unless ``known`` says otherwise."""
    facts = {"reach": frozenset(device.key for device in inventory.devices), "probe": "same_env"}
    return invert("vulkan", env, inventory, Context(**facts | known))


def read(mask: str | None, inventory: Inventory = FOUR, env: Mapping[str, str] | None = None, **known: Any) -> str:
    """Cards as their letters, what is none by its key; or the refusal's code."""
    outcome = ask({**(env or {}), **({} if mask is None else {MASK: mask})}, inventory, **known)
    return in_words(outcome, lambda identity: identity.removeprefix("card "))


def test_the_registry() -> None:
    """Vulkan is asked for by name, and numbers all vendors' cards in one list."""
    assert "vulkan" not in DEFAULT_RUNTIMES
    assert RUNTIMES["vulkan"].vendors == ()
    assert RUNTIMES["vulkan"].joint


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        *((None, "a b c d"), ("", ""), (" ", ""), (",", ""), ("3,1", "d b"), ("0,0", "a a"), ("1 2", "b c")),
        *((",1", "b"), ("1,", "b"), ("0,,1", "a b"), ("\t1\n2\v3\f0\r", "b c d a"), ("01", "b"), ("+1", "b")),
        # reading stops at what is no number
        *(("0,foo,1", "a"), ("foo", ""), ("0;1", "a"), ("1.5", "b"), ("1e1", "b"), ("0x1", "a"), ("1_0", "b")),
        *(("--1", ""), ("+", ""), ("0,-", "a"), ("1x,2", "b"), ("\u00a01", ""), ("\uff11", ""), ("0\u20031", "a")),
        # a sign begins the next number, and wraps
        *(("1+2", "b c"), ("-0", "a"), ("-18446744073709551615", "b"), ("1-18446744073709551614", "b c")),
        # a number past the end loses everything
        *(("9", ""), ("0,4", ""), ("-1", ""), ("0,-1", ""), ("1-2", ""), ("18446744073709551615", ""), ("0,9999", "")),
        # one past 64 bits stops the reading
        *(("18446744073709551616", ""), ("0,18446744073709551616,9", "a"), ("0,-18446744073709551616", "a")),
        *(("1," + "9" * 5000, "b"), ("0" * 5000 + "2", "c")),
    ],
)
def test_numbers(mask: str | None, expected: str) -> None:
    """Raw positions as C++ reads them, repeats kept."""
    assert read(mask) == expected


def test_raw_positions_are_told() -> None:
    """Numbers choose raw entries, also software and both drivers of one card; what is no card has a key of its own."""
    host = enumerated(SOFTWARE, entry("a"), AMDVLK, RADV)
    outcome = ask({MASK: "0,3,2,1"}, host)
    assert isinstance(outcome, Inversion)
    assert [device.raw_position for device in outcome.devices] == [0, 3, 2, 1]
    assert read("0,3,2,1", host) == "raw:0 b b a"
    assert host.find(outcome.devices[0].key) is None


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ((AMDVLK, RADV), "b"),
        ((RADV, AMDVLK), "b"),
        ((AMDVLK, entry("a"), RADV), "a b"),
        ((RADV, entry("a"), AMDVLK), "b a"),
        ((SOFTWARE, entry("a"), entry("c", "venus", "mesa", kind="virtual")), "a"),
        ((SOFTWARE,), ""),
        ((SOFTWARE, entry("c", "venus", "mesa", kind="virtual")), "c"),
        ((entry("a", fp16_storage=False), entry("b")), "b"),
        ((entry("a", fp16_storage=False), SOFTWARE), "a"),
        ((entry("a", "anv", "intel", kind="integrated"), entry("b")), "a b"),
        ((entry("a", "moltenvk", uuid="same"), entry("b", "moltenvk", uuid="same")), "a b"),
        ((entry("a", "dozen", "amd"), entry("b"), entry("a", "other", "amd")), "a b"),
        ((entry("a", "other", "amd"), entry("b"), entry("a", "dozen", "amd")), "b a"),
        ((entry("a", "nvk"), entry("b", "anv", "intel"), entry("a")), "b a"),
        ((entry("a", "radv", "nvidia"), entry("b"), entry("a", "nvk")), "b a"),
        ((entry("a", uuid=""), entry("b", uuid="")), "a b"),
        ((entry("a", uuid=""), entry("a", "nvk", uuid="")), "raw-order-unknown"),
    ],
)
def test_without_a_mask(entries: Sequence[VulkanDevice], expected: str) -> None:
    """Every discrete and integrated GPU once, by its preferred driver, which stands last if it came later."""
    assert read(None, enumerated(*entries)) == expected


def test_other_runtimes_masks_do_nothing() -> None:
    """Vulkan reads neither CUDA's, nor HIP's, nor Level Zero's."""
    env = dict.fromkeys(
        ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"), "1"
    )
    assert read("0", env=env) == "a"
    assert read(None, env=env) == "a b c d"


# --- how the devices were enumerated


@pytest.mark.parametrize("variable", REORDERING)
def test_a_variable_that_reorders(variable: str) -> None:
    """It must have been set where the devices were enumerated."""
    env = {variable: "1"}
    assert read("0", env=env) == "a"
    assert read("0", env=env, probe="clean_env") == read(None, env=env, probe="clean_env") == "layer-reorder"
    assert read("0", probe="clean_env") == "a"
    assert read("", env=env, probe="clean_env") == read("-1", env=env, probe="clean_env") == ""


@pytest.mark.parametrize("probe", ["pci_only", None])
def test_without_an_enumeration(probe: str | None) -> None:
    """Only what leaves none is answered."""
    assert read("0", probe=probe) == read(None, probe=probe) == read("9", probe=probe) == "raw-order-unknown"
    assert (
        read("", probe=probe) == read("x", probe=probe) == read("-1", probe=probe) == read("0,1024", probe=probe) == ""
    )
    assert read("0", Inventory(FOUR.devices), probe="same_env") == "raw-order-unknown"


def test_the_one_card_of_a_host() -> None:
    """It is answered where all PCI devices are known, and not only those that some backend reads."""
    one = enumerated(entry("a"))
    for inventory in (one, Inventory(one.devices), Inventory(vulkan=one.vulkan)):
        found = "a" if inventory.devices else "0000:0a:00.0"
        assert read("0", inventory, probe="pci_only") == read(None, inventory, probe="pci_only") == found
        assert read("0,0", inventory, probe="pci_only") == f"{found} {found}"
        assert read("1", inventory, probe="pci_only") == "raw-order-unknown"
        assert read("0", inventory, {"DRI_PRIME": "1"}, probe="pci_only") == "raw-order-unknown"
        assert read("0", inventory, probe=None) == "raw-order-unknown"
    assert read("0", enumerated(), probe="pci_only") == "raw-order-unknown"


def test_what_happens_to_a_card_changes_no_number() -> None:
    """One that sleeps without an index, or is not among the devices, keeps its place in the enumeration."""
    asleep = tuple(Device(key=each.key, physical_index=None, pci_bus_id=each.pci_bus_id) for each in FOUR.devices)
    assert read("3,1", Inventory(asleep, vulkan=FOUR.vulkan)) == "d b"
    assert read("3,1", Inventory(FOUR.devices[2:], vulkan=FOUR.vulkan)) == "d 0000:0b:00.0"


def test_too_many_repeats() -> None:
    """More than a thousand devices of one fleet are refused."""
    assert read("0," * 1024).split() == ["a"] * 1024
    assert read("0," * 1025) == "over-the-cap"


def test_reach() -> None:
    """A card that the process cannot open is not enumerated, and the rest move up."""
    reach = frozenset(device.key for device in FOUR.devices[1:3])
    assert read("0", reach=reach) == "b"
    assert read("2", reach=reach) == ""
    assert read("0", reach=None) == "reach-unknown"
    assert read("", reach=None) == ""
    assert read("0", Inventory(FOUR.devices, False, FOUR.vulkan)) == "inventory-incomplete"


def test_the_layers() -> None:
    """What was left, and where the reading stopped or why all is lost."""
    assert ask({MASK: "0,x,1"}, FOUR).layers == (Layer(MASK, "0,x,1", 1, "`x 1` is not a number: reading stops"),)
    assert ask({MASK: "0,7"}, FOUR).layers == (
        Layer(MASK, "0,7", 0, "there is no device 7: ggml loses the whole Vulkan backend"),
    )
    assert ask({MASK: "0"}, FOUR, probe=None).layers == (Layer(MASK, "0", None),)
    assert ask({MASK: "99999999999999999999"}, FOUR).layers[0].stopped == (
        "`99999999999999999999` is past 64 bits: reading stops"
    )
