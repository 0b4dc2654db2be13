"""SYCL's selector undone over each backend, and what is refused rather than guessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from exporter.inventory import Inventory
from exporter.masks import DEFAULT_RUNTIMES, RUNTIMES, invert
from exporter.model import Context, Device, Inversion, Layer, Refusal
from tests import strategies
from tests.answers import in_words
from tests.test_level_zero_masks import A770, B580, COMPOSITE, FLAT, MAX, UHD, cards, short
from tests.test_rocm_masks import FOUR as FOUR_AMD

SELECTOR, AFFINITY = "ONEAPI_DEVICE_SELECTOR", "ZE_AFFINITY_MASK"
FOUR = cards("abcd")
TWO_MAX = cards("ab", tiles=2, **MAX)


def ask(env: Mapping[str, str], devices: Sequence[Device], **known: Any) -> Inversion | Refusal:
    """The inversion of a SYCL program's devices under Level Zero, without OpenCL, unless ``known`` says otherwise."""
    whole = known.pop("whole", True)
    facts: dict[str, Any] = {"reach": frozenset(device.key for device in devices), "driver": "current"}
    facts |= {"multi_driver_library": False, "backend": "level_zero", "opencl": False, "frontend": "none", "api": "hip"}
    return invert("sycl", env, Inventory(tuple(devices), whole), Context(**facts | known))


def read(
    selector: str | None, devices: Sequence[Device] = FOUR, env: Mapping[str, str] | None = None, **known: Any
) -> str:
    """Cards as their letters, tiles behind them; or the refusal's code."""
    outcome = ask({**(env or {}), **({} if selector is None else {SELECTOR: selector})}, devices, **known)
    return in_words(outcome, short)


def test_the_registry() -> None:
    """SYCL is asked for by name, over Intel's cards."""
    assert "sycl" not in DEFAULT_RUNTIMES
    assert RUNTIMES["sycl"].vendors == ("intel",)


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        *((None, "a b c d"), ("level_zero:*", "a b c d"), ("*:*", "a b c d"), ("level_zero:gpu", "a b c d")),
        *(("LEVEL_ZERO:GPU", "a b c d"), ("level_zero:3,1", "b d"), ("level_zero:1,1", "b"), ("level_zero:9", "")),
        *(("*:0", "a"), ("*:0,*", "a b c d"), ("*:4321", ""), ("level_zero:0;level_zero:2", "a c"), (";", "")),
        *(("cuda:*", ""), ("hip:0;level_zero:1", "b"), ("opencl:cpu", ""), ("native_cpu:*", ""), ("offload:0", "")),
        *(("level_zero:cpu", ""), ("level_zero:fpga", ""), ("level_zero:host", ""), ("level_zero:-1", "")),
        # numbers as C++ reads them, empty entries dropped
        *(("level_zero:01", "b"), ("level_zero: 1", "b"), ("level_zero:+1", "b"), ("level_zero:1x", "b")),
        *(("level_zero:0x1", "a"), ("level_zero:0,,2", "a c"), ("level_zero:0,", "a"), ("level_zero:0;", "a")),
        *(
            ("level_zero:" + "0" * 5000, "a"),
            ("level_zero:" + "0" * 5000 + "1", "b"),
            ("level_zero:-" + "0" * 5000, "a"),
        ),
        *(("level_zero:,", ""), (";;level_zero:0;;", "a"), ("level_zero:2147483647", ""), ("level_zero:1 ", "b")),
        # what discards comes last, wins, and alone means everything else
        *(("!level_zero:1", "a c d"), ("!level_zero:1,2", "a d"), ("*:*;!level_zero:0", "b c d"), ("*:*;!*:*", "")),
        *(("*:0;!*:*", ""), ("!opencl:*", "a b c d"), ("!*:gpu", ""), ("level_zero:0,1;!level_zero:1", "a")),
        *(("!level_zero:0;!level_zero:3", "b c"), ("!level_zero:cpu", "a b c d"), ("!cuda:*", "a b c d")),
        # a card of one tile has no tiles to ask for, and a discarded one is the card
        *(("level_zero:0.0", ""), ("level_zero:*.*", ""), ("level_zero:0.*,1", "b"), ("!level_zero:0.0", "b c d")),
        *(("*:*;!level_zero:0.7", "b c d"), ("!level_zero:*.*", "")),
    ],
)
def test_cards(selector: str | None, expected: str) -> None:
    """The selector filters the cards in the order in which they are enumerated."""
    assert read(selector) == expected


@pytest.mark.parametrize(
    "selector",
    [
        *("", ":", "*", "level_zero", "level_zero:", ":0", ":garbage", "garbage:0", "level_zero:.", "level_zero:.1"),
        *(
            "level_zero:0..0",
            "level_zero:0.",
            "level_zero:macaroni_gpu",
            "level_zero:gpu.0",
            "gpu.0",
            "*:*.0",
            "*:0.*.0",
        ),
        *(
            "*:0.1.2.3",
            "*:*.*.0",
            " level_zero:0",
            "level_zero :0",
            "level_zero::0",
            "level_zero:0:1",
            "level_zero:0.x",
        ),
        *("!level_zero:1;level_zero:*", "!!level_zero:0", "!:0", "host:*", "level_zero:2147483648", "level_zero:*x"),
        *(
            "level_zero:0;;cuda",
            "level_zero:acc",
            "level_zero:\uff11",
            "level_zero:-",
            "level_zero:99999999999",
            "cpu:0",
        ),
    ],
)
def test_what_does_not_parse_is_refused(selector: str) -> None:
    """A program throws at it, or releases differ."""
    assert read(selector) == "selector-invalid"


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        *(("level_zero:*", "a b"), ("level_zero:0.0", "a0"), ("level_zero:0.*", "a0 a1"), ("level_zero:0.9", "")),
        *(("level_zero:*.*", "a0 a1 b0 b1"), ("level_zero:1.1,0.0", "a0 b1"), ("level_zero:0.0,0.0", "a0 a0")),
        *(("level_zero:0,0.0", "a a0"), ("level_zero:0.1,0,0", "a1 a"), ("level_zero:0.1,0.0", "a1 a0")),
        *(("level_zero:0.*;level_zero:*.*", "a0 a1 a0 a1 b0 b1"), ("level_zero:0.0.0", ""), ("level_zero:*.*.*", "")),
        *(("level_zero:*.*x", "a0 a1 b0 b1"), ("*:*.*;!level_zero:0.0", "b0 b1"), ("level_zero:0.-1", "")),
    ],
)
def test_tiles(selector: str, expected: str) -> None:
    """A path with two parts makes tiles into devices, in the order of the terms, as often as they are asked for."""
    assert read(selector, TWO_MAX, COMPOSITE) == expected


def test_tiles_under_flat_have_no_parts() -> None:
    """There each tile is a device with a number."""
    assert read("level_zero:2", TWO_MAX, FLAT) == read("level_zero:2", TWO_MAX) == "b0"
    assert read("level_zero:0.*", TWO_MAX, FLAT) == ""
    assert read("level_zero:*", TWO_MAX) == "a0 a1 b0 b1"


def test_an_unknown_count_of_tiles() -> None:
    """It matters where a path asks for tiles, and only there."""
    unknown = cards("a", tiles=None)
    for selector in ("level_zero:0.0", "level_zero:0.*", "level_zero:*.*,0", "level_zero:0.9"):
        assert read(selector, unknown, COMPOSITE) == "hierarchy-unknown"
    assert read("level_zero:0", unknown, COMPOSITE) == read(None, unknown, COMPOSITE) == "a"


def test_the_affinity_mask_works_underneath() -> None:
    """The selector counts what it leaves, tiles among them."""
    assert read("level_zero:0", env={AFFINITY: "1"}) == "b"
    assert read("level_zero:1", env={AFFINITY: "1"}) == ""
    assert read("level_zero:0.*", TWO_MAX, COMPOSITE | {AFFINITY: "1"}) == "b0 b1"
    four = cards("ab", tiles=4, **MAX)
    assert read("level_zero:0.1", four, COMPOSITE | {AFFINITY: "1.1,1.3"}) == "b3"
    assert read("level_zero:0.0", four, COMPOSITE | {AFFINITY: "1.3"}) == ""
    assert read("level_zero:0", env={AFFINITY: "x"}) == "runtime-init-fails"
    assert read("cuda:0", env={AFFINITY: "x"}) == ""


def test_numbers_count_what_is_enumerated() -> None:
    """Not what the affinity mask counts, where families differ."""
    assert read("level_zero:0", (A770, B580)) == "c"
    assert read("level_zero:0", (A770, B580), {AFFINITY: "0"}) == "b"
    assert read("level_zero:1", (UHD, B580)) == "a"
    assert read("level_zero:0", (UHD, B580), driver=None) == "driver-order-unknown"


def test_many_terms_with_tiles_have_no_certain_order() -> None:
    """The sort of libsycl keeps up to 16 terms in their order; more are answered where it makes no difference."""
    fifteen = ",".join(["9"] * 14)
    assert read(f"level_zero:{fifteen},0.1,0.0", TWO_MAX, COMPOSITE) == "a1 a0"
    assert read(f"level_zero:9,{fifteen},0.1,0.0", TWO_MAX, COMPOSITE) == "token-dialect"
    assert read(f"level_zero:9,{fifteen},0.1,0.1", TWO_MAX, COMPOSITE) == "a1 a1"
    assert read(f"level_zero:9,{fifteen},0.*", TWO_MAX, COMPOSITE) == "a0 a1"
    assert read(f"level_zero:9,{fifteen},1,0,1") == "a b"


def test_a_selector_that_repeats_tiles_without_end() -> None:
    """More than a thousand devices of one fleet are refused, quickly."""
    assert read("level_zero:" + "*.*," * 100_000, TWO_MAX, COMPOSITE) == "over-the-cap"
    assert read("level_zero:" + "*.*," * 100_000, TWO_MAX, FLAT) == ""
    assert read("level_zero:" + "*," * 100_000) == "a b c d"


# --- other backends


def test_the_cuda_backend() -> None:
    """CUDA's mask works underneath, with its grade of evidence."""
    devices = strategies.cards("abcd")
    env = {"CUDA_VISIBLE_DEVICES": "2,1", SELECTOR: "cuda:1"}
    outcome = ask(env, devices, backend="cuda")
    assert isinstance(outcome, Inversion)
    assert [(device.key, device.evidence) for device in outcome.devices] == [(devices[1].key, "assumed")]
    assert [layer.variable for layer in outcome.layers] == ["CUDA_VISIBLE_DEVICES", SELECTOR]
    assert read("level_zero:*", devices, backend="cuda") == ""
    assert read("cuda:*", devices, {"CUDA_DEVICE_ORDER": "x"}, backend="cuda") == "order-unknown"


def test_the_hip_backend() -> None:
    """HIP's masks work underneath."""
    assert read("hip:0", FOUR_AMD, {"HIP_VISIBLE_DEVICES": "1,0"}, backend="hip") == "c"


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        *(("opencl:gpu", "!"), ("opencl:*", "!"), ("OpEnCl:0", "!"), ("opencl:cpu", ""), ("opencl:9", "")),
        *(("opencl:*;!opencl:*", ""), ("opencl:0;!*:*", ""), ("opencl:0;level_zero:1", "b"), ("!level_zero:*", "")),
        *(("opencl:0.0", ""), ("*:0.0", ""), ("*:9", "")),
    ],
)
def test_cards_through_opencl_only(selector: str, expected: str) -> None:
    """They are visible, in an order that is not known, unless there is no OpenCL at all or its mask leaves none."""
    assert read(selector, opencl=None) == read(selector, opencl=True) == expected.replace("!", "opencl-order-unknown")
    assert read(selector) == expected.replace("!", "")
    assert read(selector, env={AFFINITY: "9"}, opencl=None) == ""


def test_the_opencl_backend() -> None:
    """Its order is not established; what it does not show has none."""
    assert read("opencl:gpu", backend="opencl") == read(None, backend="opencl") == "opencl-order-unknown"
    assert read("level_zero:gpu", backend="opencl") == ""


# --- what else decides


@pytest.mark.parametrize("variable", ["SYCL_DEVICE_FILTER", "SYCL_DEVICE_ALLOWLIST", "SYCL_CONFIG_FILE_NAME"])
def test_legacy_selectors_are_refused(variable: str) -> None:
    """Their effect depends on the release."""
    assert read("level_zero:0", env={variable: ""}) == "legacy-selector"


def test_llama_cpp_sorts_its_devices() -> None:
    """Its order is not derivable, whether it is known to be the front end or one of its variables is set."""
    assert (
        read(None, frontend="llama.cpp") == read(None, env={"GGML_SYCL_DEBUG": "1"}, frontend=None) == "frontend-order"
    )
    assert read("level_zero:1", frontend="llama.cpp") == "b"
    assert read(None, env={"GGML_SYCL_DEBUG": "1"}) == "a b c d"


def test_the_layers() -> None:
    """The affinity mask's, then the selector's."""
    outcome = ask({SELECTOR: "level_zero:0", AFFINITY: "2,1"}, FOUR)
    assert outcome.layers == (
        Layer("ZE_FLAT_DEVICE_HIERARCHY", None, 4),
        Layer(AFFINITY, "2,1", 2),
        Layer(SELECTOR, "level_zero:0", 1),
    )
    assert ask({SELECTOR: "level_zero:1,7"}, FOUR).layers[-1].stopped == "there is no device 7 among 4: ignored"
    assert (
        ask({SELECTOR: "level_zero:1.0"}, FOUR).layers[-1].stopped == "device 1 has no such tile as asked for: ignored"
    )
    assert ask({SELECTOR: "cuda:0"}, FOUR).layers == (
        Layer(SELECTOR, "cuda:0", 0, "no term accepts devices of level_zero"),
    )
    refused = ask({SELECTOR: "level_zero:0..1"}, FOUR)
    assert isinstance(refused, Refusal)
    assert refused.layers == (Layer(SELECTOR, "level_zero:0..1", None),)
    assert "`level_zero:0..1`" in refused.detail


def test_unknown_counts_are_refused_but_for_nothing() -> None:
    """As by the backend."""
    assert read("level_zero:0", reach=None) == "reach-unknown"
    assert read("level_zero:0", whole=False) == "inventory-incomplete"
    assert read("cuda:*", whole=False, reach=None) == ""
    assert read("opencl:0", (), whole=False, opencl=None) == "opencl-order-unknown"
    assert read("opencl:7", whole=False, opencl=None) == "opencl-order-unknown"
