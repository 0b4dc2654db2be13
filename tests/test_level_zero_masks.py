"""Level Zero's masks undone: hierarchies, order, tiles, and what is refused rather than guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from exporter.inventory import Inventory, narrowed
from exporter.masks import DEFAULT_RUNTIMES, RUNTIMES, invert
from exporter.model import Context, Device, DeviceKey, Inversion, Layer, Refusal
from tests.answers import in_words

MASK, HIERARCHY, PCI_ORDER = "ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY", "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
COMPOSITE, FLAT = {HIERARCHY: "COMPOSITE"}, {HIERARCHY: "FLAT"}


def card(letter: str, **changes: Any) -> Device:
    """The card of that letter, from ``a``: its address rises with it; discrete, of one tile, and not a Max."""
    number = ord(letter) - ord("a")
    address = f"0000:{number + 1}0:00.0"
    facts: dict[str, Any] = {
        "key": DeviceKey("intel", address),
        "physical_index": number,
        "pci_bus_id": address,
        "name": "Intel Arc Pro B60",
        "tiles": 1,
        "hpc": False,
        "integrated": False,
        "product_family_rank": 3,
    }
    return Device(**facts | changes)


def cards(letters: str, **changes: Any) -> tuple[Device, ...]:
    """Equal cards, one a letter."""
    return tuple(card(letter, **changes) for letter in letters)


MAX = {"name": "Intel Data Center GPU Max", "hpc": True, "product_family_rank": 2}
TWO_MAX = cards("ab", tiles=4, **MAX)
UHD = card("a", name="Intel UHD Graphics 770", integrated=True, product_family_rank=1)
A770 = card("b", name="Intel Arc A770", product_family_rank=2)
B580 = card("c", name="Intel Arc B580", product_family_rank=3)


def ask(env: Mapping[str, str], devices: Sequence[Device], **known: Any) -> Inversion | Refusal:
    """The inversion on a host with a current driver in one library, unless ``known`` says otherwise."""
    whole = known.pop("whole", True)
    facts: dict[str, Any] = {"reach": frozenset(device.key for device in devices), "driver": "current"}
    facts |= {"multi_driver_library": False, "space": "enumeration"}
    return invert("level_zero", env, Inventory(tuple(devices), whole), Context(**facts | known))


def read(env: Mapping[str, str], devices: Sequence[Device], **known: Any) -> str:
    """Cards as their letters, tiles behind them; or the refusal's code."""
    outcome = ask(env, devices, **known)
    return in_words(outcome, short)


def short(identity: str) -> str:
    """The letter of the card, and its tiles."""
    return "_abcdefghi"[int(identity[5])] + identity.partition("/")[2].replace("t", "")


def test_the_registry() -> None:
    """Level Zero is the default of Intel's cards, and of nobody else's; it is bound once."""
    assert "level_zero" in DEFAULT_RUNTIMES
    assert RUNTIMES["level_zero"].vendors == ("intel",)
    assert not RUNTIMES["level_zero"].moving


# --- the mask


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        # no mask, and what is taken for none
        *((None, "a b"), ("", "a b"), ("default", "a b"), ("0" * 4096, "a b"), ("0" * 4095, "a")),
        *(("é" * 2048, "a b"), ("0" + "\udcff" * 1400, "a"), ("0" + "\ud800" * 1400, "a b")),
        # cards, never reordered, repeats and what is out of range are harmless
        *(("0", "a"), ("1", "b"), ("1,0", "a b"), ("0,0", "a"), ("0,9,1", "a b"), ("2", ""), ("0,-1,1", "a b")),
        # tiles: some, all, one outside
        *(("0.0", "a0"), ("1.3,1.1", "b1+3"), ("0.3,1", "a3 b"), ("0.1,0", "a"), ("0,0.1", "a"), ("0.4", "")),
        *(("1.0,1.1,1.2,1.3", "b"), ("0.-1", ""), ("2.0", ""), ("2.x", "")),
        # numbers as C++ reads them
        *(("0x1", "b"), ("01", "b"), ("08", "a"), ("+1", "b"), (" 1", "b"), ("\v\t1", "b"), ("1abc", "b"), ("0x", "a")),
        *(("1 ", "b"), ("1.1x", "b1"), ("1. 1", "b1"), ("010", ""), ("1e1", "b"), ("0,1,", "a b"), ("1.", "b")),
        # what the driver throws at
        *(("foo", "!"), ("0,,1", "!"), ("*", "!"), (",", "!"), (",0", "!"), ("0.foo", "!"), ("0..1", "!"), (".1", "!")),
        *((" ", "!"), ("default,", "!"), ("0,1,x", "!"), ("18446744073709551616", "!"), ("-18446744073709551616", "!")),
        *(("\uff11", "!"), ("9" * 4000, "!"), ("1.1.1.1", "!"), ("0x" + "f" * 17, "!"), ("0.0.x", "!")),
        # three parts are ignored, and more where the tile is out of range
        *(("1.1.1", ""), ("0,1.1.1", "a"), ("0.9.1.1", ""), ("9.1.1.1", ""), ("0.1.x", "!"), ("9.1.x", "")),
        # numbers past 32 bits
        *(("4294967296", "integer-wrap"), ("4294967297", "integer-wrap"), ("4294967298", ""), ("2147483648", "")),
        *(("-4294967295", "integer-wrap"), ("0.4294967296", "integer-wrap"), ("-18446744073709551615", "integer-wrap")),
        ("0,4294967296", "a"),
        # what a newer C library reads as a number
        *(("0b1", "token-dialect"), ("0,0b0", "a"), ("0b11", "token-dialect"), ("0,1,0b1", "a b")),
    ],
)
def test_cards_and_tiles(mask: str | None, expected: str) -> None:
    """A card is one device, and narrowed to the tiles that the mask names."""
    env = COMPOSITE if mask is None else COMPOSITE | {MASK: mask}
    assert read(env, TWO_MAX) == expected.replace("!", "runtime-init-fails")


@pytest.mark.parametrize("hierarchy", [FLAT, {HIERARCHY: "COMBINED"}, {HIERARCHY: "flat"}, {HIERARCHY: ""}, {}])
@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        *(
            ("default", "a0 a1 a2 a3 b0 b1 b2 b3"),
            ("0", "a0"),
            ("1", "a1"),
            ("4,0", "a0 b0"),
            ("7,8", "b3"),
            ("-1", ""),
        ),
        *(("0.0", ""), ("0,1.1,2", "a0 a2"), ("0.x", ""), ("1.2.3.4", ""), ("3.", "a3"), ("x.0", "runtime-init-fails")),
        *(("0..1", ""), (".1", "runtime-init-fails"), ("0,,1", "runtime-init-fails"), ("4294967296", "integer-wrap")),
    ],
)
def test_flat(hierarchy: Mapping[str, str], mask: str, expected: str) -> None:
    """Each tile is a device, counted over the cards; it is also the default of a Data Center GPU Max."""
    assert read({**hierarchy, MASK: mask}, TWO_MAX) == expected


def test_a_card_of_one_tile_is_the_same_under_each_hierarchy() -> None:
    """Its tile 0 is the card, but where a dot is ignored."""
    for hierarchy in (COMPOSITE, FLAT, {}):
        assert read({**hierarchy, MASK: "1"}, cards("abc")) == "b"
    assert read({MASK: "1.0"}, cards("abc")) == read(COMPOSITE | {MASK: "1.0"}, cards("abc")) == "b"
    assert read(FLAT | {MASK: "1.0"}, cards("abc")) == ""


def test_a_card_of_some_tiles_is_a_device_of_its_own() -> None:
    """Its key finds it on the card, with the tiles as its partition and the card as its parent."""
    inventory = Inventory(TWO_MAX)
    outcome = ask(COMPOSITE | {MASK: "1.3,1.0"}, TWO_MAX)
    assert isinstance(outcome, Inversion)
    (resolved,) = outcome.devices
    found = inventory.find(resolved.key)
    assert found == narrowed(TWO_MAX[1], (0, 3))
    assert (found.partition, found.parent, found.physical_index) == ("0+3", TWO_MAX[1].key, 1)
    assert found.memory_total_bytes is None


# --- the hierarchy


def test_the_default_hierarchy_is_the_first_cards() -> None:
    """Where the products differ, or are not known, only what is the same under both is answered."""
    mixed = (card("a"), *cards("b", tiles=2, **MAX))
    assert read({MASK: "1"}, mixed) == "hierarchy-unknown"
    assert read({MASK: "0"}, mixed) == "a"
    assert read({MASK: "9"}, mixed) == ""
    assert read(FLAT | {MASK: "1"}, mixed) == "b0"
    unknown = cards("ab", hpc=None)
    assert read({MASK: "1"}, unknown) == "b"
    assert read({MASK: "1.0"}, unknown) == "hierarchy-unknown"
    assert read({MASK: "0.0"}, (card("a", hpc=None, integrated=True),)) == "a"


def test_an_unknown_count_of_tiles() -> None:
    """Only what no count of tiles changes is answered."""
    unknown = cards("ab", tiles=None)
    assert read(COMPOSITE | {MASK: "1"}, unknown) == "b"
    assert read(COMPOSITE | {MASK: "1.0"}, unknown) == "hierarchy-unknown"
    assert read(FLAT | {MASK: "1"}, unknown) == "hierarchy-unknown"
    assert read(FLAT | {MASK: "8"}, unknown) == ""


# --- the order


def test_one_name_does_not_make_one_family() -> None:
    """Where the families of equally named cards are known to differ, or one's is not known, they are not alike."""
    older = card("a", product_family_rank=1)
    assert read({}, (older, card("b"))) == "b a"
    assert read({PCI_ORDER: "1"}, (older, card("b"))) == "driver-order-unknown"
    assert read({}, (older, card("b")), multi_driver_library=None) == "multiple-driver-libraries"
    assert read({}, (card("a", product_family_rank=None), card("b"))) == "driver-order-unknown"


@pytest.mark.parametrize(
    "flag",
    [
        *("", "0", "true", "yes", "0x1", "+", "4294967296", " 0", "--1", "-", "-0", "0" * 5000, "1" * 4096, None),
        *("-9223372036854775808", "-9223372036854775809", "-" + "9" * 4000),
    ],
)
def test_integrated_cards_come_last(flag: str | None) -> None:
    """Without the PCI flag, which is a number, the mask counts discrete cards first."""
    env = {} if flag is None else {PCI_ORDER: flag}
    assert read(env | {MASK: "0"}, (UHD, B580)) == "c"
    assert read(env | {MASK: "1"}, (UHD, B580)) == "a"
    assert read(env, (UHD, B580)) == "c a"


@pytest.mark.parametrize(
    "flag",
    [
        *("1", "2", "-1", " 1", "1x", "01", "+1", "0" * 20 + "1", "4294967297", "18446744073709551616", "9" * 4000),
        *("9223372036854775807", "-9223372036854775807"),
    ],
)
def test_with_the_flag_the_mask_counts_addresses(flag: str) -> None:
    """Then an integrated card at a low address is 0; the order of several families is not known."""
    assert read({PCI_ORDER: flag, MASK: "0"}, (UHD, B580)) == "a"
    assert read({PCI_ORDER: flag}, (UHD, B580)) == "driver-order-unknown"
    assert read({PCI_ORDER: flag}, (UHD, B580), space="mask_index") == "a c"
    assert read({PCI_ORDER: flag}, cards("dbca")) == "a b c d"


def test_families_are_drivers() -> None:
    """A program enumerates the newest family first, and those with a discrete card before others."""
    assert read({}, (A770, B580)) == "c b"
    assert read({MASK: "0"}, (A770, B580)) == "b"
    assert read({MASK: "0"}, (A770, B580), space="mask_index") == "b"
    assert read({}, (A770, B580), space="mask_index") == "b c"
    twin = card("d", name="Intel Arc A750", product_family_rank=2)
    assert read({}, (UHD, A770, B580, twin)) == "c b d a"
    assert read({MASK: "0,2"}, (UHD, A770, B580, twin)) == "b d"
    assert read({"ZEL_DRIVERS_ORDER": "x"}, (A770, B580)) == "driver-order-unknown"
    assert read({"ZEL_DRIVERS_ORDER": "x", MASK: "0"}, (A770, B580)) == "b"
    beside = card("d", name="integrated, of the family", integrated=True, product_family_rank=2)
    assert read({}, (A770, B580, beside)) == "c b d"


def test_unknown_families() -> None:
    """Two models whose families are not known have no order, unless one is integrated and the other is not."""
    uhd, a770, b580 = (replace(device, product_family_rank=None) for device in (UHD, A770, B580))
    assert read({}, (a770, b580)) == "driver-order-unknown"
    assert read({}, (uhd, b580)) == "c a"
    assert read({MASK: "0"}, (a770, b580)) == "b"


@pytest.mark.parametrize(
    ("env", "expected"), [({}, "a b"), ({MASK: "0"}, "a"), ({MASK: "1,0"}, "a b"), (COMPOSITE, "a b")]
)
def test_an_unknown_or_old_driver(env: Mapping[str, str], expected: str) -> None:
    """An unknown driver is taken by its word only with the PCI flag, an old one not at all; one card needs no order."""
    assert read(env, cards("ab"), driver=None) == "driver-order-unknown"
    assert read(env, cards("ab"), driver="old") == "driver-order-unknown"
    assert read({**env, PCI_ORDER: "1"}, cards("ab"), driver="old") == "driver-order-unknown"
    assert read({**env, PCI_ORDER: "1"}, cards("ab"), driver=None) == expected
    assert read(env, cards("a"), driver=None) == "a"
    assert read(env, cards("ab"), driver=None, reach=frozenset({card("b").key})) == "b"


def test_a_card_that_only_sorting_drivers_know_tells_the_driver() -> None:
    """Whatever other cards there are; a driver that is stated to be old is refused all the same."""
    older, newer = replace(UHD, driver_sorts=False), replace(B580, driver_sorts=True)
    assert read({MASK: "0"}, (older, newer), driver=None) == "c"
    assert read({}, (older, newer), driver=None) == "c a"
    assert read({MASK: "0"}, (older, A770), driver=None) == "driver-order-unknown"
    assert read({MASK: "0"}, (older, newer), driver="old") == "driver-order-unknown"
    assert read({MASK: "0"}, (older, newer, A770), driver=None, reach=frozenset({older.key, A770.key})) == (
        "driver-order-unknown"
    )


def test_cards_of_one_library_have_one() -> None:
    """However many are installed: the legacy one has no device of a family that the current one serves."""
    uhd, b580 = (replace(device, driver_library="current") for device in (UHD, B580))
    assert read({MASK: "0"}, (uhd, b580), multi_driver_library=None) == "c"
    assert read({MASK: "0"}, (uhd, b580), multi_driver_library=True) == "multiple-driver-libraries"
    for other in ("legacy1", None):
        mixed = (replace(uhd, driver_library=other), b580)
        assert read({MASK: "0"}, mixed, multi_driver_library=None) == "multiple-driver-libraries"


def test_what_leaves_none_needs_no_order() -> None:
    """In any order of any driver."""
    assert read({MASK: "7"}, cards("ab"), driver="old", multi_driver_library=True) == ""
    tiled = (card("a", tiles=1), card("b", tiles=4))
    assert read(COMPOSITE | {MASK: "0.1.1.1.1"}, tiled) == ""
    assert read(COMPOSITE | {MASK: "0.3"}, tiled) == ""
    assert read(COMPOSITE | {MASK: "0.3"}, tiled, driver="old") == "driver-order-unknown"


def test_several_driver_libraries() -> None:
    """Each would apply the mask to its own cards; cards of one model are all of one library."""
    assert read({MASK: "0"}, cards("ab"), multi_driver_library=True) == "multiple-driver-libraries"
    assert read({MASK: "0"}, cards("ab"), multi_driver_library=None) == "a"
    assert read({MASK: "0"}, (A770, B580), multi_driver_library=None) == "multiple-driver-libraries"
    assert read({MASK: "0"}, cards("a"), multi_driver_library=True) == "a"


def test_facts_that_are_missing() -> None:
    """Whether a card is integrated decides its place, and so does its address."""
    doubtful = (card("a", integrated=None, name="A"), card("b", name="B"))
    assert read({MASK: "0"}, doubtful) == "driver-order-unknown"
    assert read({MASK: "0", PCI_ORDER: "1"}, doubtful) == "a"
    assert read({MASK: "0"}, cards("ab", integrated=None)) == "driver-order-unknown"
    assert read({MASK: "0"}, (card("a"), card("b", integrated=None))) == "driver-order-unknown"
    nowhere = (card("a"), card("b", pci_bus_id=""))
    assert read({MASK: "0"}, nowhere) == "inventory-incomplete"


# --- the driver's own spellings


def test_the_drivers_own_spellings_must_make_no_difference() -> None:
    """Where one would, the mask is refused: releases differ in which they read."""
    assert read({MASK: "0", "NEO_L0_ZE_AFFINITY_MASK": "0"}, cards("ab")) == "a"
    assert read({MASK: "0", "NEO_ZE_AFFINITY_MASK": "1"}, cards("ab")) == "token-dialect"
    assert read({f"NEO_{HIERARCHY}": "FLAT", MASK: "1"}, cards("ab", tiles=2)) == "hierarchy-unknown"
    assert read({f"NEO_L0_{PCI_ORDER}": "1", MASK: "0"}, (UHD, B580)) == "driver-order-unknown"
    assert read({f"NEO_L0_{PCI_ORDER}": "1", MASK: "0"}, cards("ab")) == "a"
    overlong = {"NEO_L0_ZE_AFFINITY_MASK": "0" * 4096}
    assert read(overlong | {"NEO_ZE_AFFINITY_MASK": "1", MASK: "1"}, cards("ab")) == "b"
    assert read(overlong | {"NEO_ZE_AFFINITY_MASK": "1"}, cards("ab")) == "token-dialect"


# --- the count


@pytest.mark.parametrize("mask", [None, "", "0", "3", "7"])
def test_an_unknown_count(mask: str | None) -> None:
    """Where the reach is not known, or a card is missing, a mask that may select something is refused."""
    env = {} if mask is None else {MASK: mask}
    assert read(env, TWO_MAX, reach=None) == "reach-unknown"
    assert read(env, TWO_MAX, whole=False) == "inventory-incomplete"
    assert read(env, TWO_MAX, whole=False, reach=None) == "inventory-incomplete"


@pytest.mark.parametrize("mask", ["-1", "9999", "-1,4294967295"])
def test_what_leaves_none_needs_no_count(mask: str) -> None:
    """However many cards there are."""
    assert read({MASK: mask}, TWO_MAX, reach=None) == read({MASK: mask}, TWO_MAX, whole=False) == ""


def test_a_missing_card_may_be_the_first() -> None:
    """Then the hierarchy is that of its product, and a dot counts."""
    assert read({MASK: "1.0"}, TWO_MAX, whole=False) == "inventory-incomplete"
    assert read(FLAT | {MASK: "1.0"}, TWO_MAX, whole=False) == ""
    assert read({MASK: "8"}, TWO_MAX, reach=None) == ""
    assert read({MASK: "0"}, (), whole=False) == "inventory-incomplete"
    assert read({MASK: "0"}, ()) == read({}, (), reach=None) == ""


def test_reach_counts_before_the_mask() -> None:
    """A card that the process cannot open has no number."""
    assert read({MASK: "0"}, cards("abc"), reach=frozenset({card("b").key, card("c").key})) == "b"
    tile = narrowed(TWO_MAX[1], (0,))
    assert read(COMPOSITE, (*TWO_MAX, tile), reach=frozenset({tile.key})) == "b"


# --- the layers


def test_the_layers_tell_what_is_counted_and_what_is_left() -> None:
    """The devices under the hierarchy, then the mask with the first entry that it skipped."""
    outcome = ask(FLAT | {MASK: "0,9,1"}, TWO_MAX)
    assert outcome.layers == (
        Layer(HIERARCHY, "FLAT", 8),
        Layer(MASK, "0,9,1", 2, "entry 2 is `9`, which is none of the 8: skipped"),
    )
    dotted = ask(FLAT | {MASK: "0.1,1"}, TWO_MAX)
    assert dotted.layers[1].stopped == "entry 1 is `0.1`, which has a dot, which counts under COMPOSITE only: skipped"
    own = ask({"NEO_ZE_AFFINITY_MASK": "1", MASK: "0"}, cards("ab"))
    assert own.layers[1:] == (Layer("NEO_ZE_AFFINITY_MASK", "1", 1),)
    refused = ask({MASK: "0,x"}, cards("ab"))
    assert isinstance(refused, Refusal)
    assert refused.layers == (Layer(HIERARCHY, None, 2), Layer(MASK, "0,x", None))
    assert "`x` is not a number" in refused.detail
