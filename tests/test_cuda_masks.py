"""CUDA's masks undone: how text is read, the grades of evidence, and what is refused rather than guessed."""

from __future__ import annotations

import string
import sys
from collections.abc import Mapping

import pytest

from exporter.inventory import Inventory
from exporter.masks import DEFAULT_RUNTIMES, RUNTIMES, invert
from exporter.model import Context, Device, DeviceKey, Inversion, Layer, Refusal
from exporter.refusals import REFUSALS
from tests.strategies import GIB, PCI_ORDER, asleep, board, card, cards, part

FOUR = Inventory(cards("abcd"))
MASK, ORDER, MPS, VIRTUAL = RUNTIMES["cuda"].variables


def ask(
    env: Mapping[str, str],
    inventory: Inventory = FOUR,
    reach: tuple[Device, ...] | None = (),
    branch: int | None = None,
    frontend: str | None = "none",
) -> Inversion | Refusal:
    """The inversion; an empty ``reach`` stands for every device, None for not known."""
    keys = None if reach is None else frozenset(device.key for device in reach or inventory.devices)
    return invert("cuda", env, inventory, Context(reach=keys, driver_branch=branch, frontend=frontend))


def short(outcome: Inversion | Refusal) -> str:
    """Cards as their letters, MIG instances with their place, placeholders as addresses; or the refusal's code."""
    if isinstance(outcome, Refusal):
        assert outcome.code in REFUSALS
        return outcome.code
    assert [device.fleet_index for device in outcome.devices] == list(range(len(outcome.devices)))
    return " ".join(_letter(device.key) for device in outcome.devices)


def _letter(key: DeviceKey) -> str:
    if key.identity.startswith("GPU-"):
        return key.identity[4]
    return f"{key.identity[4]}{int(key.identity[13:17], 16)}" if key.identity.startswith("MIG-") else key.identity


def read(mask: str, inventory: Inventory = FOUR, reach: tuple[Device, ...] | None = ()) -> str:
    """What a mask in PCI order means."""
    return short(ask({MASK: mask} | PCI_ORDER, inventory, reach))


def evidence(outcome: Inversion | Refusal) -> set[str]:
    assert isinstance(outcome, Inversion), outcome
    return {device.evidence for device in outcome.devices}


def named(text: str) -> str:
    """A test's name; some of the texts are long."""
    return ascii(text[:16])[1:-1] or "empty"


def test_the_registry() -> None:
    """CUDA is a default runtime of NVIDIA's cards and is bound once; host is asked for by name and follows the host."""
    assert "cuda" in DEFAULT_RUNTIMES
    assert "host" not in DEFAULT_RUNTIMES
    assert (RUNTIMES["cuda"].moving, RUNTIMES["host"].moving) == (False, True)
    assert "nvidia" in RUNTIMES["cuda"].vendors
    assert RUNTIMES["cuda"].masks == (MASK, ORDER)


# --- how text is read


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        *(("0", "a"), ("3,1", "d b"), ("3,2,1,0", "d c b a"), ("", ""), ("4", ""), ("0,9,1", "a"), ("1,0,9", "b a")),
        # signs
        *(("-1", ""), ("0,-1,1", "a"), ("0,-1,0", "a"), ("-1,+1", ""), ("-0", "token-dialect")),
        *(("+1", "token-dialect"), ("1,+2", "token-dialect"), ("-", "token-dialect"), ("+", "token-dialect")),
        *(("--1", "token-dialect"), ("+-1", "token-dialect"), ("- 1", "token-dialect"), ("1-2", "b"), ("1+2", "b")),
        # other bases
        *(("0x1", "token-dialect"), ("0x9", "token-dialect"), ("0x0", "a"), ("1x0", "b"), ("08", "token-dialect")),
        *(("010", ""), ("01", "b"), ("00", "a"), ("0,00", ""), ("1,01", "")),
        # what follows the digits
        *(("1.5", "b"), ("1e1", "b"), ("1;2", "b"), ("1 2", "b"), ("1_0", "b"), ("1gpu2,2ampere", "b c")),
        # digits of other scripts, superscripts and enclosed numbers
        *(("\uff11", "token-dialect"), ("\u0661", "token-dialect"), ("\u00b2", "token-dialect")),
        *(("1\u00b2", "token-dialect"), ("1\u0661", "token-dialect"), ("\u2460", "token-dialect"), ("\u4e00", "")),
        # large numbers
        *(("4294967295", ""), ("2147483648", ""), ("4294967296", "integer-wrap"), ("4294967297", "integer-wrap")),
        *(
            ("1,4294967297", "integer-wrap"),
            ("8589934595", "integer-wrap"),
            ("1" * 30, ""),
            ("9" * 5000, "token-dialect"),
        ),
        *(("0" * 30 + "2", "c"), ("0" * 5000 + "2", "token-dialect"), ("x" * 100_000, "")),
        # commas
        *((",", ""), (",1", ""), ("1,", "b"), ("1,,2", "b"), (",,,", ""), ("0" + "," * 5000, "a")),
        # repeats
        *(("0,0", ""), ("0,1,0", ""), ("9,9", ""), ("0,9,0", "token-dialect"), ("0,9,9", "token-dialect")),
        # words
        *(("none", ""), ("all", ""), ("void", ""), ("NoDevFiles", ""), ("???", ""), ("0,all", "a"), ("inf", "")),
        # what no environment can carry but a program could be given
        *(("\x00", ""), ("\x001", ""), ("1\x00", "b"), ("\ud800", ""), ("1\udcff", "b"), ("\udcff,1", "")),
    ],
    ids=named,
)
def test_numbers(mask: str, expected: str) -> None:
    """A mask of numbers is answered where every known reader agrees, and refused where two differ."""
    assert read(mask) == expected


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        *((card("c").uuid, "c"), (f"{card('c').uuid},{card('a').uuid}", "c a"), ("GPU-cc,GPU-a", "c a")),
        *(("GPU-ccccccccx", ""), (f"{card('a').uuid}0", ""), ("GPU-a,GPU-e,GPU-b", "a"), ("GPU-\ud800", "")),
        *(("GPU-a,0", "a"), ("0,GPU-b", "a"), ("GPU-a,none", "a"), ("GPU-a,", "a"), ("GPU-a,,GPU-b", "a")),
        *(("GPU-a,GPU-a", ""), ("GPU-a,GPU-b,GPU-aa", ""), ("GPU-a,GPU-e,GPU-a", "token-dialect")),
        *(
            ("GPU-", "token-dialect"),
            ("GPU-a,GPU-", "token-dialect"),
            ("gpu-", "token-dialect"),
            ("GPU", ""),
            ("GPUa", ""),
        ),
        *(("gpu-aaaaaaaa", "token-dialect"), ("Gpu-aaaaaaaa", "token-dialect"), ("GPU-AAAAAAAA", "token-dialect")),
        *((" GPU-a", "token-dialect"), ("GPU-a ", "token-dialect"), ("GPU-a, GPU-b", "token-dialect")),
        *(("\u00a0GPU-a", "token-dialect"), ("\tGPU-a", "token-dialect"), ("GPU-a,\u3000GPU-b", "token-dialect")),
        *(("aaaaaaaa", ""), ("GPU-e", ""), ("GPU-E", ""), ("MIG-aaaaaaaa", ""), ("UUID-aaaaaaaa", "")),
    ],
    ids=named,
)
def test_uuids(mask: str, expected: str) -> None:
    """UUIDs and their unique starts name cards; another case or a blank before them is refused."""
    assert read(mask) == expected


@pytest.mark.parametrize("mask", ["010", "0x8", "08,8"])
def test_numbers_in_another_base_that_name_a_card_are_refused(mask: str) -> None:
    """On nine cards C's octal ``010`` is the ninth, where decimal has none; so with the others."""
    assert read(mask, Inventory(cards("abcdefghi"))) == "token-dialect"


def test_an_ambiguous_prefix_ends_the_list() -> None:
    """A start that two UUIDs share names no card and ends the list."""
    twins = (card("a"), card("b", key=DeviceKey("nvidia", "GPU-ab"), uuid="GPU-ab"), card("c"))
    assert read("GPU-c,GPU-a,GPU-ab", Inventory(twins)) == "c"
    assert read("GPU-a", Inventory(twins)) == ""
    assert read("GPU-aa", Inventory(twins)) == "a"


C_BLANKS = " \t\n\v\f\r"
PYTHON_BLANKS = "".join(character for character in map(chr, range(sys.maxunicode)) if character.isspace())


@pytest.mark.parametrize("blank", PYTHON_BLANKS, ids=lambda blank: f"U+{ord(blank):04X}")
def test_blanks(blank: str) -> None:
    """C's blanks around a number count for nothing; other blanks, which not every reader skips, are refused."""
    assert set(C_BLANKS) < set(PYTHON_BLANKS)
    expected = "b a" if blank in C_BLANKS else "token-dialect"
    assert read(f"{blank}1{blank},{blank}{blank}0") == expected
    assert read(f"1{blank}") == "b"
    assert read(blank) == ""


@pytest.mark.parametrize("invisible", ["\ufeff", "\u200b", "\u2060", "\u00ad", "\x00", "\x7f", "\x1b"])
def test_invisible_characters_are_no_blanks(invisible: str) -> None:
    """A mark that no reader skips makes an entry invalid."""
    assert read(f"{invisible}1") == ""
    assert read(f"2,{invisible}1") == "c"


@pytest.mark.parametrize("entry", ["GPU-", "MIG-", "MIG-GPU-"])
def test_what_only_a_wrapped_number_leads_to_is_refused(entry: str) -> None:
    """A bare prefix behind a number past 32 bits, which only a reader that cuts numbers comes to, raises nothing."""
    assert read(f"4294967296,{entry}") in ("integer-wrap", "token-dialect")


def test_other_runtimes_variables_mean_nothing() -> None:
    """Masks of HIP, ROCr, Level Zero, Vulkan and of container tools leave CUDA's devices alone."""
    names = (
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "ZE_AFFINITY_MASK",
        "NVIDIA_VISIBLE_DEVICES",
        "GPU_DEVICE_ORDINAL",
    )
    assert short(ask(dict.fromkeys(names, "1") | PCI_ORDER)) == "a b c d"


def test_the_exporters_own_environment_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the given environment counts."""
    monkeypatch.setenv(MASK, "0")
    monkeypatch.setenv(ORDER, "FASTEST_FIRST")
    assert read("2") == "c"
    assert short(ask(PCI_ORDER)) == "a b c d"


# --- evidence


@pytest.mark.parametrize("mask", [{}, {MASK: "2,0"}], ids=["unset", "indices"])
def test_pci_order_is_proven(mask: dict[str, str]) -> None:
    """With CUDA_DEVICE_ORDER=PCI_BUS_ID numbers are proven, on unequal cards too."""
    unequal = Inventory(
        (card("a"), card("b", name="NVIDIA A100"), card("c", memory_total_bytes=GIB), card("d", name=""))
    )
    for inventory in (FOUR, unequal):
        assert evidence(ask(mask | PCI_ORDER, inventory)) == {"proven"}


@pytest.mark.parametrize("mask", [{}, {MASK: "2,0"}, {MASK: "1"}], ids=["unset", "indices", "one"])
@pytest.mark.parametrize("order", [{}, {ORDER: ""}], ids=["unset", "empty"])
def test_numbers_over_equal_cards_are_assumed(mask: dict[str, str], order: dict[str, str]) -> None:
    """Without a stated order, numbers over several equal cards follow PCI order as far as anybody saw."""
    outcome = ask(mask | order)
    assert evidence(outcome) == {"assumed"}
    assert short(outcome) == {"": "a b c d", "2,0": "c a", "1": "b"}[mask.get(MASK, "")]


@pytest.mark.parametrize(
    "odd",
    [
        card("c", name="NVIDIA L40"),
        card("c", name=""),
        card("c", memory_total_bytes=24 * GIB),
        card("c", mig_mode=True),
        board("c", (1, 0))[0],
    ],
    ids=["other-name", "no-name", "other-memory", "mig-mode", "other-model"],
)
@pytest.mark.parametrize("mask", [{}, {MASK: "0"}], ids=["unset", "indices"])
def test_numbers_over_unequal_cards_are_refused(odd: Device, mask: dict[str, str]) -> None:
    """Without a stated order, one reachable card of another name, memory or MIG mode makes the order unknown."""
    inventory = Inventory((card("a"), card("b"), odd, card("d")))
    assert short(ask(mask, inventory)) == "order-unknown"
    assert short(ask(mask | {ORDER: ""}, inventory)) == "order-unknown"
    within = tuple(device for device in inventory.devices if device is not odd)
    assert evidence(ask(mask, inventory, within)) == {"assumed"}


def test_cards_without_a_name_are_not_equal() -> None:
    """Cards whose names are all unknown cannot be told to be of one model."""
    assert short(ask({MASK: "0"}, Inventory(cards("ab", name="")))) == "order-unknown"


def test_little_differences_of_memory_do_not_count() -> None:
    """Equal cards may report slightly different totals, or none, or answer for MIG mode only in part."""
    nearly = (
        card("a"),
        card("b", memory_total_bytes=47 * GIB),
        card("c", memory_total_bytes=None),
        card("d", mig_mode=False),
    )
    assert evidence(ask({MASK: "0"}, Inventory(nearly))) == {"assumed"}


@pytest.mark.parametrize(
    "order", ["FASTEST_FIRST", "pci_bus_id", " PCI_BUS_ID", "PCI_BUS_ID ", "PCI_BUS_ID\n", "1", "\ud800"]
)
@pytest.mark.parametrize("mask", [{}, {MASK: "0"}], ids=["unset", "indices"])
def test_any_other_order_is_refused(order: str, mask: dict[str, str]) -> None:
    """Any spelling but PCI_BUS_ID leaves the order of several cards unknown, equal or not."""
    assert short(ask(mask | {ORDER: order})) == "order-unknown"


@pytest.mark.parametrize(
    "order", [{}, {ORDER: "FASTEST_FIRST"}, {ORDER: "?"}, PCI_ORDER], ids=lambda env: env.get(ORDER, "unset")
)
def test_what_needs_no_order_is_proven(order: dict[str, str]) -> None:
    """UUIDs, a single reachable card and masks that leave no device are proven whatever the order."""
    unequal = Inventory((card("a"), card("b", name="NVIDIA A100")))
    assert evidence(ask({MASK: "GPU-b,GPU-a"} | order, unequal)) == {"proven"}
    assert evidence(ask({MASK: "0"} | order, unequal, (card("b"),))) == {"proven"}
    assert evidence(ask(order, Inventory(cards("a")))) == {"proven"}
    for mask in ("", "-1", "7", "0,0", "none"):
        assert short(ask({MASK: mask} | order, unequal)) == ""


def test_the_index_space_is_in_pci_order() -> None:
    """Positions count addresses as numbers, wide domains last, whatever the library's index or the order of rows."""
    scattered = Inventory(
        (
            card("c", pci_bus_id="10000:01:00.0", physical_index=0),
            card("b", pci_bus_id="ffff:01:00.0", physical_index=1),
            card("a", pci_bus_id="0000:9f:00.0", physical_index=2),
            card("d", pci_bus_id="0000:0a:00.0", physical_index=3),
        )
    )
    assert short(ask(PCI_ORDER, scattered)) == "d a b c"


def test_a_card_without_an_address_has_no_place_in_pci_order() -> None:
    """Where a saved inventory gives no PCI address for one of several cards, numbers prove nothing."""
    assert not read("0", Inventory((card("a", pci_bus_id=""), card("b")))).startswith(("a", "b"))
    assert read("GPU-a", Inventory((card("a", pci_bus_id=""), card("b")))) == "a"


# --- reach


def test_numbers_count_what_can_be_reached() -> None:
    """A number is a position among the reachable cards, and an unreachable card cannot be named."""
    within = (card("d"), card("b"))
    assert read("1,0", FOUR, within) == "d b"
    assert read("2", FOUR, within) == ""
    assert read("GPU-c", FOUR, within) == ""
    assert read("GPU-d", FOUR, within) == "d"
    assert short(ask(PCI_ORDER, FOUR, within)) == "b d"


def test_a_prefix_need_only_be_unique_within_reach() -> None:
    """A start of two UUIDs is unique when only one of the cards can be reached."""
    twins = (card("a"), card("b", key=DeviceKey("nvidia", "GPU-ab"), uuid="GPU-ab"))
    assert read("GPU-a", Inventory(twins), twins[:1]) == "a"


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        *(("0", "reach-unknown"), ("3,1", "reach-unknown"), (None, "reach-unknown"), ("0,none", "reach-unknown")),
        *((card("c").uuid, "c"), ("GPU-c", "c"), ("GPU-c,GPU-a", "c a"), ("GPU-e", ""), ("GPU-c,0", "c")),
        *(("", ""), ("-1", ""), ("none", ""), ("4", ""), ("99", ""), ("0,0", ""), ("1,1", ""), (" ", "")),
    ],
)
def test_unknown_reach(mask: str | None, expected: str) -> None:
    """Without the reach, identities and masks that leave no device for any count of cards are answered, others not."""
    assert short(ask(PCI_ORDER | ({} if mask is None else {MASK: mask}), FOUR, None)) == expected


def test_a_shared_prefix_needs_the_reach() -> None:
    """A start of two UUIDs may be unique among the reachable cards: without the reach this is not known."""
    twins = Inventory((card("a"), card("b", key=DeviceKey("nvidia", "GPU-ab"), uuid="GPU-ab")))
    assert read("GPU-a", twins, None) == "reach-unknown"
    assert read("GPU-ab", twins, None) == "a"


# --- an inventory that is not whole, and sleeping cards


@pytest.mark.parametrize("reach", [(), None], ids=["reach-whole", "reach-unknown"])
@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        *(("0", "inventory-incomplete"), ("3", "inventory-incomplete"), (None, "inventory-incomplete")),
        *(("4", "inventory-incomplete"), ("9,1", "inventory-incomplete"), ("0,GPU-a", "inventory-incomplete")),
        *((card("c").uuid, "c"), (f"{card('c').uuid},{card('a').uuid}", "c a"), (f"{card('c').uuid},0", "c")),
        *(("GPU-c", "inventory-incomplete"), (card("e").uuid, "inventory-incomplete")),
        *((f"{card('c').uuid},{card('e').uuid}", "inventory-incomplete"), (f"{card('a').uuid},{card('a').uuid}", "")),
        *(("", ""), ("-1", ""), ("none", ""), ("0,0", ""), ("99999", ""), ("MIG-a", "inventory-incomplete")),
    ],
)
def test_an_inventory_that_is_not_whole(mask: str | None, expected: str, reach: tuple[Device, ...] | None) -> None:
    """While a card of the host is unknown, only full UUIDs and masks that leave no device are answered."""
    inventory = Inventory(FOUR.devices, whole=False)
    assert short(ask(PCI_ORDER | ({} if mask is None else {MASK: mask}), inventory, reach)) == expected


DROWSY = Inventory((card("a"), asleep(card("b")), card("c")))
B_ADDRESS = card("b").pci_bus_id


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        *(
            ("2", "c"),
            ("0", "a"),
            ("1", B_ADDRESS),
            ("2,1,0", f"c {B_ADDRESS} a"),
            (None, f"a {B_ADDRESS} c"),
            ("3", ""),
        ),
        *((card("c").uuid, "c"), ("GPU-c", "inventory-incomplete"), ("GPU-b", "inventory-incomplete")),
        *((card("b").uuid, "inventory-incomplete"), (card("e").uuid, "inventory-incomplete"), ("", ""), ("0,0", "")),
    ],
)
def test_a_sleeping_card_keeps_its_place(mask: str | None, expected: str) -> None:
    """A card whose UUID is not known yet takes part in counting by its address, and any shortened UUID might be its."""
    outcome = ask(PCI_ORDER | ({} if mask is None else {MASK: mask}), DROWSY)
    assert short(outcome) == expected


def test_a_sleeping_card_out_of_reach_blocks_nothing() -> None:
    """A card that the workload cannot open is none that a shortened UUID could name."""
    assert read("GPU-c", DROWSY, (card("a"), card("c"))) == "c"
    assert read("1", DROWSY, (card("a"), card("c"))) == "c"


def test_a_sleeping_card_is_not_known_to_be_alike() -> None:
    """Without a stated order a sleeping card counts as unlike: its memory and MIG mode are not known."""
    outcome = ask({MASK: "2"}, DROWSY)
    assert short(outcome) == "order-unknown"
    assert isinstance(outcome, Refusal)
    assert "not known to be alike" in outcome.detail
    assert evidence(ask({MASK: "1"}, DROWSY, (card("a"), card("c")))) == {"assumed"}


# --- MIG


MIG = Inventory((*board("a", (1, 0), (2, 0), (2, 1)), *board("b", (7, 0)), card("c")))
A1, A2, A3 = MIG.parts(card("a").key)
(B1,) = MIG.parts(card("b").key)


@pytest.mark.parametrize(
    ("branch", "mask", "expected"),
    [
        *((branch, A2.uuid, "a2") for branch in (None, 450, 535, 570, 999)),
        *((branch, f"{B1.uuid},{A1.uuid}", "b1") for branch in (450, 535, 565, 569)),
        *((branch, f"{B1.uuid},{A1.uuid}", "b1 a1") for branch in (570, 575, 580)),
        (None, f"{B1.uuid},{A1.uuid}", "mig-driver-unknown"),
        (570, f"{A1.uuid},{A2.uuid}", "a1 a2"),
        (570, f"{A2.uuid},{A3.uuid}", "mig-multiplicity"),
        (535, f"{A2.uuid},{A3.uuid}", "a2"),
        (570, f"{A1.uuid},{A1.uuid}", ""),
    ],
)
def test_how_many_instances_are_visible(branch: int | None, mask: str, expected: str) -> None:
    """Before branch 570 a process has one instance, from then on one of each GPU instance."""
    assert short(ask({MASK: mask}, MIG, branch=branch)) == expected


@pytest.mark.parametrize("branch", [None, 535, 570])
@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        *(("0", "mig-multiplicity"), ("1", "b1"), ("2", "c"), ("GPU-a", "mig-multiplicity"), ("GPU-b", "b1")),
        *((None, "mig-multiplicity"), ("1,2", "mig-mixed"), (f"{B1.uuid},2", "b1"), (f"{B1.uuid},GPU-c", "mig-mixed")),
        *(
            (f"GPU-c,{B1.uuid}", "mig-mixed"),
            ("GPU-c,GPU-b", "mig-mixed"),
            ("MIG-cccccccc", ""),
            ("MIG-", "token-dialect"),
        ),
        *(
            (B1.uuid[:12], "b1"),
            ("MIG-aaaaaaaa", ""),
            (B1.uuid.lower(), "token-dialect"),
            (f" {B1.uuid}", "token-dialect"),
        ),
    ],
)
def test_boards_in_mig_mode(mask: str | None, expected: str, branch: int | None) -> None:
    """A board takes a place in the index space and stands for its one instance; with more it is refused."""
    env = PCI_ORDER | ({} if mask is None else {MASK: mask})
    assert short(ask(env, MIG, branch=branch)) == expected


def test_a_board_without_instances_stands_for_nothing() -> None:
    """A card in MIG mode without an instance keeps its place, and is refused where it would be visible."""
    inventory = Inventory((*board("a"), card("b")))
    assert read("0", inventory) == "mig-multiplicity"
    assert read("1", inventory) == "b"


def test_reach_of_one_instance() -> None:
    """A workload that can open one instance of a board has that instance as its index 0, and cannot name others."""
    assert short(ask({}, MIG, (A2,))) == "a2"
    assert short(ask({MASK: "0"}, MIG, (A2,))) == "a2"
    assert short(ask({MASK: A1.uuid}, MIG, (A2,))) == ""
    assert short(ask({MASK: "0,1"} | PCI_ORDER, MIG, (A2, B1), branch=570)) == "a2 b1"
    assert short(ask({MASK: f"{A1.uuid},{A2.uuid}"}, MIG, (card("a"),), branch=570)) == "a1 a2"


def test_at_most_64_instances() -> None:
    """CUDA shows 64 instances; which of more is not established."""
    boards = [board(letter, *((place, 0) for place in range(1, 8))) for letter in string.ascii_lowercase[:10]]
    inventory = Inventory(tuple(device for group in boards for device in group))
    uuids = [device.uuid for device in inventory.devices if device.parent]
    assert len(short(ask({MASK: ",".join(uuids[:64])}, inventory, branch=570)).split()) == 64
    assert short(ask({MASK: ",".join(uuids[:65])}, inventory, branch=570)) == "mig-multiplicity"


LEGACY = f"MIG-{card('a').uuid}"


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        *((f"{LEGACY}/1/0", "a1"), (f"{LEGACY}/2/1", "a3"), (f"{LEGACY}/9/0", ""), (f"{LEGACY}/1", ""), (LEGACY, "")),
        *((f"{LEGACY}/1/0/0", ""), (f"{LEGACY}/01/0", "a1"), (f"{LEGACY}/+1/0", ""), (f"{LEGACY}/1/0,0", "a1")),
        *((f"{LEGACY}/1/0,{LEGACY}/1/0", ""), (f"{LEGACY}/1/0,{A1.uuid}", ""), ("MIG-GPU-", "token-dialect")),
        *(("MIG-GPU-aaaaaaaa/1/0", "token-dialect"), ("MIG-GPU-eeeeeeee/1/0", ""), (f"MIG-{card('c').uuid}/1/0", "")),
    ],
    ids=lambda text: text[-24:] or "empty",
)
def test_the_legacy_spelling(mask: str, expected: str) -> None:
    """``MIG-GPU-<UUID>/<GPU instance>/<compute instance>`` names an instance by its board's full UUID."""
    assert short(ask({MASK: mask}, MIG, branch=570)) == expected


@pytest.mark.parametrize(
    "spelling", [f"mig-{card('a').uuid}", f"MIG-gpu-{card('a').uuid[4:]}", f"MIG-GPU-{card('a').uuid[4:].upper()}"]
)
def test_the_legacy_spelling_in_another_case_is_refused(spelling: str) -> None:
    """As for other UUIDs, no text says whether another case is the same name."""
    assert short(ask({MASK: f"{spelling}/1/0"}, MIG)) == "token-dialect"


@pytest.mark.parametrize(
    "inventory", [Inventory(cards("bc"), whole=False), Inventory((asleep(card("a")), *cards("bc")))]
)
def test_the_legacy_spelling_of_an_unknown_board_is_refused(inventory: Inventory) -> None:
    """An instance of a board whose UUID is not known yet may be meant: not to find it proves nothing."""
    assert short(ask({MASK: f"{LEGACY}/1/0"}, inventory)) == "inventory-incomplete"


# --- MPS and virtual devices


def test_mps_on_a_single_card() -> None:
    """Under an MPS server a number is refused also on one card; without a mask there is only that card."""
    one = Inventory((card("a"),))
    assert short(ask({MASK: "0", MPS: "/run/mps"}, one)) == "mps"
    assert short(ask({MPS: "/run/mps"}, one)) == "a"


def test_mps() -> None:
    """Under an MPS server numbers may be the server's, also those of an unset mask; UUIDs and no device are safe."""
    server = PCI_ORDER | {MPS: "/run/nvidia-mps"}
    assert short(ask({MASK: "0"} | server)) == "mps"
    assert short(ask(server)) == "mps"
    assert short(ask({MASK: "GPU-b"} | server)) == "b"
    assert short(ask({MASK: ""} | server)) == ""
    assert short(ask({MASK: "1"} | PCI_ORDER | {MPS: ""})) == "b"


@pytest.mark.parametrize(
    ("frontend", "mask", "number", "expected"),
    [
        *(("none", None, number, "a b c d") for number in ("0", "2", "16", "", "x")),
        *(("llama.cpp", "1,3", number, "b d") for number in ("2", "0", "-1", "x", "", " ", "+2", " 2", "2x")),
        *(("llama.cpp", "1,3", "1", "b"), ("llama.cpp", "1,3", "5", "b d b d b"), ("llama.cpp", "", "4", "")),
        *(("llama.cpp", "2", "99", " ".join("c" * 16)), ("llama.cpp", "2", "9" * 5000, " ".join("c" * 16))),
        *((None, "1,3", number, "b d") for number in ("2", "0", "-1", "x", "")),
        *((None, "1,3", number, "frontend-order") for number in ("1", "3", "4", "99")),
        *((None, "", "4", ""), (None, "GPU-b", "1", "b"), (None, "GPU-b", "2", "frontend-order")),
    ],
)
def test_virtual_devices(frontend: str | None, mask: str | None, number: str, expected: str) -> None:
    """llama.cpp's device i is on card i mod n; where the front end is not known, this is refused if it matters."""
    env = PCI_ORDER | {VIRTUAL: number} | ({} if mask is None else {MASK: mask})
    assert short(ask(env, frontend=frontend)) == expected


# --- what is told of the way


@pytest.mark.parametrize(
    ("mask", "left", "stopped"),
    [
        *(
            (None, 4, ""),
            ("2,3", 2, ""),
            ("", 0, "entry 1 is ``"),
            ("0,9,1", 1, "entry 2 is `9`, and there are 4 cards"),
        ),
        *(("0,x", 1, "entry 2 is `x`, which names no card"), ("GPU-a,GPU-e", 1, "entry 2 is `GPU-e`")),
        *(
            ("0,GPU-b", 1, "entry 2 is `GPU-b`, a change between numbers and UUIDs"),
            ("1,1", 0, "entry 2 is `1`, a card"),
        ),
    ],
)
def test_an_answer_tells_where_the_list_ended(mask: str | None, left: int, stopped: str) -> None:
    """The layer has the mask as it was set, how many devices it left, and the entry that ended it."""
    outcome = ask(PCI_ORDER | ({} if mask is None else {MASK: mask}))
    (layer,) = outcome.layers
    assert (layer.variable, layer.text, layer.left) == (MASK, mask, left)
    assert layer.stopped.startswith(stopped)
    assert bool(layer.stopped) == bool(stopped)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({MASK: "+1"}, ["CUDA_VISIBLE_DEVICES='+1'", "more than one way"]),
        ({MASK: "4294967297"}, ["32 bits"]),
        ({MASK: "0", ORDER: "FASTEST_FIRST"}, ["CUDA_DEVICE_ORDER is 'FASTEST_FIRST'", "4 cards", "NVIDIA L40S"]),
        ({MASK: "0", MPS: "/run/mps"} | PCI_ORDER, ["CUDA_MPS_PIPE_DIRECTORY"]),
        ({MASK: "GPU-"}, ["`GPU-`"]),
    ],
    ids=["token", "wrap", "order", "mps", "prefix"],
)
def test_a_refusal_names_what_was_found(env: dict[str, str], words: list[str]) -> None:
    """The detail of a refusal names the variable, its value or the cards, and the layer shows the mask."""
    outcome = ask(env)
    assert isinstance(outcome, Refusal)
    assert all(word in outcome.detail for word in words)
    (layer,) = outcome.layers
    assert layer == Layer(MASK, env[MASK], layer.left, layer.stopped)


def test_a_part_is_an_instance_of_its_board() -> None:
    """The hand-made instances of these tests have the place and the identity that they are read by."""
    assert (A3.partition, A3.gpu_instance, A3.compute_instance, A3.parent) == ("2/1", 2, 1, card("a").key)
    assert part(card("a"), 2, (2, 1)).uuid == A3.uuid
