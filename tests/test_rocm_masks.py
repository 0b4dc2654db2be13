"""ROCm's masks undone: ROCr's filter, HIP's over it, and what is refused rather than guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from exporter.inventory import Inventory
from exporter.masks import DEFAULT_RUNTIMES, RUNTIMES, invert
from exporter.model import Context, Device, DeviceKey, Inversion, Layer, Refusal
from tests.answers import in_words

ROCR, HIP, CUDA, OPENCL = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"


def card(letter: str, **changes: Any) -> Device:
    """The card of that letter, from ``a``: its UUID's digits are the letter, its address rises with it, and the KFD has
    the cards the other way round.
    """
    number = ord(letter) - ord("a")
    address = f"0000:{number + 1}0:00.0"
    facts: dict[str, Any] = {
        "key": DeviceKey("amd", address),
        "physical_index": number,
        "pci_bus_id": address,
        "uuid": f"GPU-{letter * 16}",
        "name": "AMD Instinct MI210",
        "kfd_node": 20 - number,
    }
    return Device(**facts | changes)


def partitions(letter: str, *uuids: str) -> tuple[Device, ...]:
    """A card's partitions, each with its UUID and a KFD node of its own."""
    board = card(letter)
    return tuple(
        card(
            letter,
            key=DeviceKey("amd", f"{board.pci_bus_id}/xcp{number}"),
            uuid=uuid,
            partition=str(number),
            parent=board.key,
            kfd_node=1 + number,
        )
        for number, uuid in enumerate(uuids)
    )


FOUR = tuple(map(card, "abcd"))
NO_KFD = tuple(card(letter, kfd_node=None) for letter in "abcd")


def ask(env: Mapping[str, str], devices: Sequence[Device] = FOUR, **known: Any) -> Inversion | Refusal:
    """The inversion for a HIP program that can open every device, unless ``known`` says otherwise."""
    whole = known.pop("whole", True)
    facts = {"reach": frozenset(device.key for device in devices), "api": "hip", "frontend": "none"}
    return invert("rocm", env, Inventory(tuple(devices), whole), Context(**facts | known))


def read(env: Mapping[str, str], devices: Sequence[Device] = FOUR, **known: Any) -> str:
    """Cards as their letters, partitions with their number; or the refusal's code."""
    outcome = ask(env, devices, **known)
    return in_words(outcome, _short)


def _short(identity: str) -> str:
    letter = "_abcdefghi"[int(identity[5])]
    return letter + identity.partition("/xcp")[2]


def test_the_registry() -> None:
    """ROCm is the default of AMD's cards, and of nobody else's; it is bound once."""
    assert "rocm" in DEFAULT_RUNTIMES
    assert RUNTIMES["rocm"].vendors == ("amd",)
    assert not RUNTIMES["rocm"].moving


# --- ROCr


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        # KFD order is d c b a
        *((None, "d c b a"), ("", ""), ("0", "d"), ("3,0", "a d"), ("4", ""), ("0,9,1", "d")),
        # numbers as C reads them, and nothing behind them
        *(("0x1", "c"), ("0X1", "c"), ("01", "c"), ("010", ""), ("+1", "c"), ("-0", "d"), ("-1", ""), ("08", "")),
        *(("1.0", ""), ("0,1gpu", "d"), ("1 0", ""), ("0;1", ""), ("0x", ""), ("+", ""), ("--1", ""), ("\uff11", "")),
        # blanks of C, and no others
        *((" 1 ,\t0\n", "c d"), ("\v1\f,\r0", "c d"), ("\u00a01", ""), ("0,\u20031", "d")),
        # empty entries fail only where they are looked at
        *(("0,", "d"), ("0,,1", "runtime-init-fails"), (",", "runtime-init-fails"), (" ", "runtime-init-fails")),
        *(("0,1,2,3,,", "d c b a"), ("9,,", ""), ("0,0,,", "d"), ("0,1,2,3,x,9", "d c b a")),
        # repeats end the list
        *(("1,1,2", "c"), ("1,0x1", "c"), ("1,GPU-CC", "c"), ("GPU-CC,1", "c")),
        # numbers past 32 bits
        *(("4294967296", "integer-wrap"), ("4294967299", "integer-wrap"), ("4294967300", ""), ("2147483648", "")),
        *(("-4294967295", "integer-wrap"), ("18446744073709551616", ""), ("-9223372036854775808", "integer-wrap")),
        *(("9" * 5000, ""), ("0x" + "f" * 5000, ""), ("-" + "9" * 5000, "integer-wrap"), ("0" * 5000 + "1", "c")),
        # what a newer C library reads as a number
        *(("0b1", "token-dialect"), ("0,0B1", "token-dialect"), ("0b9", ""), ("9,0b1", ""), ("0b100", "")),
        # UUIDs: 5 to 20 characters, any case, the one card that it begins
        *(("GPU-aaaaaaaaaaaaaaaa", "a"), ("gpu-AAAA", "a"), ("GPU-B,gpu-a", "b a"), ("GPU-", ""), ("G", "")),
        *(("GPU-aaaaaaaaaaaaaaaa0", ""), ("0,GPU-e", "d"), ("GPU", ""), ("xGPU-a", ""), (' "0"', ""), ("GPU-XX", "")),
    ],
)
def test_rocr(mask: str | None, expected: str) -> None:
    """ROCr's list, in the KFD's order, which HIP numbers as it is."""
    env = {} if mask is None else {ROCR: mask}
    assert read(env) == read(env, api="hsa") == expected


def test_rocr_ends_at_a_uuid_of_two_cards() -> None:
    """A UUID's start that two cards have ends the list; a UUID that a card does not have is nobody's."""
    devices = (card("a", uuid="GPU-abba000000000001"), card("b", uuid="GPU-abba000000000002"), card("c", uuid=""))
    assert read({ROCR: "0,GPU-ABBA,1"}, devices) == "c"
    assert read({ROCR: "GPU-abba000000000002,GPU-abba000000000001"}, devices) == "b a"
    assert read({ROCR: "GPU-XX"}, devices) == ""


# --- HIP


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        *((None, "d c b a"), ("", ""), ("0", "d"), ("3,0", "a d"), ("4", ""), ("0,9,1", "d"), ("0,-1,1", "d")),
        # exactly as a number is printed
        *(("01", ""), ("+1", ""), ("0x1", ""), (" 1", ""), ("1 ", ""), ("0, 1", "d"), ("0,1\t", "d"), ("1.0", "")),
        *(("4294967296", ""), ("9" * 5000, ""), ("\uff11", ""), ("0b1", "")),
        # a repeat is skipped, an empty entry ends the list, but for one behind the last comma
        *(("0,0,1", "d c"), ("1,GPU-cc,0", "c d"), ("0,", "d"), (",", ""), (",0", ""), ("0,,1", "d"), ("0,1,,", "d c")),
        # quotes around the whole value, blanks around the quotes
        *(('"1,0"', "c d"), ('  "1"  ', "c"), ('"1",0', ""), ('"', ""), ('""', "d c b a"), ('" 1"', ""), ('\t"1"', "")),
        *(('"1"\t', ""), ('"1" "0"', ""), ('"1', ""), ('1"', "")),
        # UUIDs: lower case, the first device whose text has the entry in it
        *(
            ("GPU-aaaaaaaaaaaaaaaa", "a"),
            ("GPU-b,GPU-a", "b a"),
            ("GPU-A", ""),
            ("gpu-a", ""),
            ("GPU-aaaaaaaaaaaaaaaa0", ""),
        ),
        *(("GPU-", "d"), ("xGPU-a", ""), (" GPU-a", ""), ("GPU-a ", ""), ("0,GPU-e,1", "d"), ("GPU-XX", "")),
    ],
)
def test_hip(mask: str | None, expected: str) -> None:
    """HIP's list over all of ROCr's, whichever of its variables has the mask."""
    assert read({} if mask is None else {HIP: mask}) == expected
    assert read({} if mask is None else {CUDA: mask}) == expected
    assert read({} if mask is None else {OPENCL: mask}, api="opencl") == expected


def test_hip_names_cards_without_a_uuid() -> None:
    """``GPU-XX`` is the first device without one, and ``GPU-`` the first of all."""
    devices = (card("a", uuid=""), card("b", uuid=""), card("c"))
    assert read({HIP: "GPU-XX"}, devices) == "b"
    assert read({HIP: "GPU-X,GPU-,0"}, devices) == "b c"
    assert read({ROCR: "2,1", HIP: "GPU-XX"}, devices) == "a"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({HIP: "0", CUDA: "1"}, "d"),
        ({HIP: "", CUDA: "1"}, ""),
        ({HIP: '""', CUDA: "1"}, "c"),
        ({HIP: '""', CUDA: '""'}, "d c b a"),
        ({CUDA: "GPU-9942190a-aa31-4ff1-4aa9-c388d80f85f1"}, ""),
        ({ROCR: "1,2", HIP: "0"}, "c"),
        ({ROCR: "2,1", HIP: "1,0"}, "c b"),
        ({ROCR: "2,3", CUDA: "2,3"}, ""),
        ({ROCR: "", HIP: "0"}, ""),
        ({ROCR: "0,1", HIP: "2"}, ""),
        ({ROCR: "GPU-A,GPU-B", HIP: "GPU-b"}, "b"),
        ({ROCR: "0,1", HIP: "GPU-a"}, ""),
        (
            {
                ROCR: "0,1",
                HIP: "0",
                "HIP_VISIBLE_DEVICE": "1",
                "NVIDIA_VISIBLE_DEVICES": "1",
                "AMD_VISIBLE_DEVICES": "2",
            },
            "d",
        ),
    ],
)
def test_masks_are_stacked(env: Mapping[str, str], expected: str) -> None:
    """HIP counts what ROCr leaves; its own variable, also an empty one, hides CUDA's."""
    assert read(env) == expected


def test_opencl_and_hsa_do_not_read_hips_mask() -> None:
    """OpenCL has its own variable, HSA has none."""
    assert read({ROCR: "0,1", HIP: "1", OPENCL: "0"}, api="opencl") == "d"
    assert read({ROCR: "0,1", HIP: "1", CUDA: "1"}, api="opencl") == "d c"
    assert read({ROCR: "0,1", HIP: "1", OPENCL: "0"}, api="hsa") == "d c"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({OPENCL: "1"}, "doc-conflict"),
        ({OPENCL: "0,1,2,3"}, "d c b a"),
        ({HIP: "1", OPENCL: "0"}, "c"),
        ({HIP: "1,2", OPENCL: "0"}, "doc-conflict"),
        ({ROCR: "0,1", CUDA: "0,1", OPENCL: "0,1"}, "d c"),
        ({HIP: "", OPENCL: "0"}, ""),
    ],
)
def test_the_manual_has_hip_read_opencls_mask(env: Mapping[str, str], expected: str) -> None:
    """Where that would make a difference the mask is refused; Slurm sets all variables alike, which makes none."""
    assert read(env) == expected


def test_an_unknown_api_is_answered_where_all_agree() -> None:
    """HIP, HSA and OpenCL each have their masks."""
    assert read({ROCR: "1"}, api=None) == "c"
    assert read({ROCR: "1", HIP: "0", OPENCL: "0"}, api=None) == "c"
    assert read({HIP: "0"}, api=None) == "doc-conflict"


# --- partitions, and cards that do not initialise


def test_partitions_are_cards() -> None:
    """A card in partitions is not there itself: each partition has a place, and its own UUID where it has one."""
    own = partitions("b", "GPU-0001", "GPU-0002", "GPU-0003")
    assert read({}, (*own, card("a"))) == "b0 b1 b2 a"
    assert read({ROCR: "2,GPU-0001", HIP: "1,0"}, own) == "b0 b2"
    with_board = (card("b", kfd_node=None), *own)
    assert read({HIP: "1"}, with_board) == "b1"
    assert read({HIP: "0"}, with_board, reach=frozenset({card("b").key})) == "b0"
    assert read({HIP: "0"}, with_board, reach=frozenset({own[2].key})) == "b2"


def test_partitions_that_share_a_uuid() -> None:
    """By it ROCr finds none, and HIP the first."""
    shared = partitions("b", *["GPU-5555555555555555"] * 4)
    assert read({ROCR: "GPU-5555555555555555"}, shared) == ""
    assert read({HIP: "GPU-5555555555555555"}, shared) == "b0"
    assert read({ROCR: "3,1", HIP: "GPU-5555555555555555"}, shared) == "b3"


def test_cards_that_fail_to_initialise_move_later_ones_up() -> None:
    """ROCr counts a card whose ISA it does not know, HIP does not; HIP counts a card that then fails, and drops it."""
    devices = (card("a"), card("b"), card("c", hsa_isa_ok=False), card("d", hip_ok=False))
    assert read({}, devices) == "b a"
    assert read({ROCR: "1,2"}, devices) == "b"
    assert read({HIP: "0,1"}, devices) == "b"
    assert read({HIP: "0"}, devices) == ""
    assert read({}, devices, api="hsa") == "d b a"
    assert read({"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}, devices) == "isa-drop"
    assert read({"HSA_OVERRIDE_GFX_VERSION": "10.3.0", ROCR: "0,2"}, devices) == "b"
    assert read({"HSA_OVERRIDE_GFX_VERSION": "10.3.0", HIP: "1"}) == "c"
    neither = (card("a"), card("d", hsa_isa_ok=False, hip_ok=False))
    assert read({"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}, neither) == "a"
    assert read({"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}, neither, api="hsa") == "isa-drop"
    assert read({"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}, neither, api=None) == "isa-drop"


# --- what is not known


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        *(({}, "kfd-order-unknown"), ({HIP: "0"}, "kfd-order-unknown"), ({ROCR: "3"}, "kfd-order-unknown")),
        *(({ROCR: ""}, ""), ({HIP: ""}, ""), ({HIP: "4"}, ""), ({ROCR: "0", HIP: "1"}, ""), ({ROCR: "x,0"}, "")),
        *(({ROCR: "GPU-b,GPU-A"}, "b a"), ({HIP: "GPU-b,GPU-a"}, "b a"), ({ROCR: "GPU-b,GPU-a", HIP: "1"}, "a")),
        ({HIP: "GPU-"}, "kfd-order-unknown"),
        ({ROCR: "0,GPU-a"}, "kfd-order-unknown"),
        ({ROCR: "0,1", HIP: "GPU-a"}, "kfd-order-unknown"),
        ({HIP: "0,GPU-a"}, "kfd-order-unknown"),
        ({ROCR: "0,0,GPU-a"}, "kfd-order-unknown"),
    ],
)
def test_an_unknown_order(env: Mapping[str, str], expected: str) -> None:
    """Without the KFD's order a mask of UUIDs is answered, and one that leaves none."""
    assert read(env, NO_KFD) == expected
    assert read(env, (*NO_KFD[:3], card("d"))) == expected


def test_one_card_needs_no_order() -> None:
    """A host, or a reach, of one card."""
    assert read({}, NO_KFD[:1]) == "a"
    assert read({HIP: "0"}, NO_KFD, reach=frozenset({NO_KFD[2].key})) == "c"


def test_two_cards_on_one_node_have_no_order() -> None:
    """Nodes that are not different tell nothing."""
    assert read({}, (card("a", kfd_node=1), card("b", kfd_node=1))) == "kfd-order-unknown"


def test_a_dropped_card_whose_number_is_not_known() -> None:
    """Which numbers move up depends on the order."""
    devices = (card("a", kfd_node=None, hsa_isa_ok=False), *NO_KFD[1:])
    assert read({ROCR: "1"}, devices) == "kfd-order-unknown"
    assert read({ROCR: "GPU-a,GPU-b"}, devices) == "b"


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        *(({}, "?"), ({HIP: "0"}, "?"), ({ROCR: "0"}, "?"), ({ROCR: ""}, ""), ({HIP: "x"}, ""), ({ROCR: "99"}, "")),
        *(({ROCR: "GPU-aaaaaaaaaaaaaaaa"}, "a"), ({HIP: "GPU-aaaaaaaaaaaaaaaa"}, "a")),
        ({ROCR: "GPU-bbbbbbbbbbbbbbbb,GPU-aaaaaaaaaaaaaaaa", HIP: "1"}, "a"),
        ({ROCR: "0,GPU-aaaaaaaaaaaaaaaa"}, "?"),
        ({ROCR: "GPU-aaaaaaaaaaaaaaaa,0"}, "?"),
    ],
)
def test_an_unknown_count(env: Mapping[str, str], expected: str) -> None:
    """Where the reach is not known, or a card is missing, only whole UUIDs and what leaves none are answered."""
    assert read(env, reach=None) == expected.replace("?", "reach-unknown")
    assert read(env, whole=False) == expected.replace("?", "inventory-incomplete")


def test_a_shortened_uuid_may_be_a_missing_cards() -> None:
    """With a card missing, or one that has not told its UUID, a start names nobody for certain."""
    assert read({ROCR: "GPU-a"}, whole=False) == "inventory-incomplete"
    silent = (*FOUR[:3], card("d", uuid="", kfd_node=None))
    assert read({ROCR: "GPU-a"}, silent) == "inventory-incomplete"
    assert read({HIP: "GPU-a"}, silent) == "inventory-incomplete"
    assert read({ROCR: "GPU-aaaaaaaaaaaaaaaa"}, silent) == "a"
    shared = partitions("b", "GPU-5555555555555555")
    assert read({ROCR: "GPU-5555555555555555"}, shared, whole=False) == "inventory-incomplete"
    for variable in (ROCR, HIP, CUDA):
        assert read({variable: "GPU-aaaaaaaaaaaaaaaa"}, (), whole=False) == "inventory-incomplete"
        assert read({variable: "GPU-aaaaaaaaaaaaaaaa"}, (), whole=False, reach=None) == "inventory-incomplete"
        assert read({variable: "GPU-aaaaaaaaaaaaaaaa"}, ()) == ""


def test_other_systems_and_front_ends() -> None:
    """Windows is not modelled; llama.cpp's virtual devices are on card i mod n."""
    assert read({HIP: "0"}, os="windows") == "windows-order"
    assert read({HIP: "0,1", "GGML_CUDA_DEVICES": "3"}, frontend="llama.cpp") == "d c d"
    assert read({HIP: "0,1", "GGML_CUDA_DEVICES": "3"}, frontend=None) == "frontend-order"
    assert read({HIP: "0,1", "GGML_CUDA_DEVICES": "3"}) == "d c"


# --- the layers


def layers(env: Mapping[str, str]) -> tuple[Layer, ...]:
    outcome = ask(env)
    return outcome.layers


def test_the_layers_tell_what_each_mask_left() -> None:
    """Each variable's text, how many devices it left, and where and why it stopped."""
    assert layers({ROCR: "2,0,9", HIP: "0, 1"}) == (
        Layer(ROCR, "2,0,9", 2, "entry 3 is `9`, which names no card: the list ends here"),
        Layer(HIP, "0, 1", 1, "entry 2 is ` 1`, HIP does not trim, the list ends here"),
    )
    assert layers({CUDA: "0,0,7"})[1] == Layer(
        CUDA, "0,0,7", 1, "entry 3 is `7`, and there are 4 devices to choose from, the list ends here"
    )
    assert (
        layers({HIP: "0x1"})[1].stopped == "entry 1 is `0x1`, HIP takes plain decimal numbers only, the list ends here"
    )
    assert layers({HIP: "1,1"})[1].stopped == "entry 2 is `1`, a card named before: skipped"
    assert (
        layers({ROCR: "0,1,2,3,4,5"})[0].stopped
        == "only as many entries are read as there are cards, 4: 2 more are not"
    )
    assert layers({}) == (Layer(ROCR, None, 4), Layer(HIP, None, 4))


def test_the_layers_tell_where_a_mask_is_refused() -> None:
    """The variable that is refused has no number of devices; those before it have theirs."""
    assert layers({ROCR: "0,,1", HIP: "0"}) == (Layer(ROCR, "0,,1", None),)
    assert layers({ROCR: "0b1"}) == (Layer(ROCR, "0b1", None),)
    assert layers({ROCR: "0,1", OPENCL: "1"}) == (Layer(ROCR, "0,1", 2), Layer(HIP, None, 2))
