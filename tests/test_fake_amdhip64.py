"""The pretend HIP runtime does what it says, seen through plain ``ctypes`` in a process of its own."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fakes import amdhip64
from tests.fakes.amdhip64 import CALLS, FORBIDDEN, MASKS, FakeHip, Gpu, build, build_or_skip
from tests.fakes.checks import Child, check_crash, check_missing, check_nonsense, check_slow, check_writer, starting

pytestmark = pytest.mark.e2e

INVALID_VALUE, NO_DEVICE, INVALID_DEVICE, NOT_SUPPORTED = 1, 100, 101, 801

CHILD = """
import ctypes, os

hip = ctypes.CDLL("libamdhip64.so")
hip.hipGetErrorName.restype = ctypes.c_char_p

class REFUSAL(Exception): pass
def refusal(refused): return refused.args
def plain(value): return value.decode() if isinstance(value, bytes) else value

def ask(call, *arguments):
    code = call(*arguments)
    if code:
        raise REFUSAL(code)

def number(call, *rest):
    out = ctypes.c_int(-7)
    ask(call, ctypes.byref(out), *rest)
    return out.value

def text(call, device, size=64):
    out = ctypes.create_string_buffer(64)
    ask(call, out, size, device)
    return out.value.decode()

def bus(device): return text(hip.hipDeviceGetPCIBusId, device)
def name(device): return text(hip.hipDeviceGetName, device)
def uuid(device):
    out = (ctypes.c_char * 17)(*b"?" * 17)
    ask(hip.hipDeviceGetUuid, out, device)
    return out.raw

def seen():
    out = ctypes.c_int(-7)
    code = hip.hipGetDeviceCount(ctypes.byref(out))
    if code != (0 if out.value else 100):
        raise REFUSAL(code)
    return "".join(bus(device)[5] for device in range(out.value))

def seen_with(masks):
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.environ.update(masks)
        os.write(writer, seen().encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    with open(reader) as answer:
        return answer.read()
"""
CARDS = (
    Gpu(node=4, bdf="0000:c3:00.0", unique_id=0xC3AB00000000000C, name="AMD Instinct MI300X"),
    Gpu(node=2, bdf="0000:a3:00.0", unique_id=0x00AB00000000000A, name="AMD Instinct MI210"),
    Gpu(node=3, bdf="0001:b3:00.0", name="AMD Radeon Graphics"),
    Gpu(node=5, bdf="0000:d3:00.0", unique_id=0xC3AB00000000000D),
)
"""By node, and so without a mask, their buses begin with a, b, c and d; b has no UUID."""

ROCR = """
3, 0\t,1, > dab / > / 0x1,+0,-0 > ba / 02,08 > c / 2,0b1,0 > c / 1,2,1gpu2 > bc / 2,4,0 > c / 2,-1,0 > c / "0" >
1,0,1,2 > ba / 2,4294967296 > ca / 0,,1 > / , > / 0,0,, > a / 0,1,2,3,,x > abcd / 1,9223372036854775808,0 > b
3,gpu-c3AB00000000000c,GPU-0,2 > dca / 0,GPU-C3AB > a / 0,GPU- > a / 0,GPU-XX > a / 1,GPU-00AB00000000000A0 > b
"""
HIP = """
2 > c / > / 0, 1 > a / 1,00 > b / 1,+0 > b / 1,,0 > b / , > / 0,1, > ab / 2,2,0,2,1 > cab / 2,4,0 > c / 2,-1 > c
"3,0" > da / "3 > / "3","0" > / "" > abcd / GPU-c3ab,GPU-XX,GPU- > cba / GPU-C3AB > / 1,xGPU-,0 > b
"""


class Refused(NamedTuple):
    """The result of a call that was no success."""

    code: int


class HipChild(Child):
    """A process that has loaded the library, with the masks that are named and no others."""

    def __init__(self, fake: FakeHip, **masks: str) -> None:
        bare = {name: value for name, value in os.environ.items() if name not in MASKS}
        super().__init__(CHILD, {**bare, **fake.environment(), **masks}, Refused)


Start = Callable[..., HipChild]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_or_skip(tmp_path_factory.mktemp("amdhip64"))


@pytest.fixture
def fake(tmp_path: Path, library: Path) -> FakeHip:
    return FakeHip(tmp_path, library)


@pytest.fixture
def start() -> Iterator[Start]:
    with starting(HipChild, "ask(hip.hipInit, 0)") as start_child:
        yield start_child


def masked(rocr: str | None = None, hip: str | None = None, cuda: str | None = None) -> dict[str, str]:
    return {name: mask for name, mask in zip(MASKS, (rocr, hip, cuda), strict=True) if mask is not None}


def check_seen(hip: HipChild, cases: Sequence[tuple[Mapping[str, str], str]]) -> None:
    """With those masks a process sees those cards."""
    assert [(masks, hip.ask(f"seen_with({masks!r})")) for masks, _ in cases] == [*cases]


def test_what_a_device_is(fake: FakeHip, start: Start) -> None:
    """Devices are in the order of their nodes; one without a UUID has two X and zeros.

    No such device comes before nowhere to write to, a bus id that does not fit is a refusal, and flags must be 0.
    """
    fake.write(CARDS, version=70012345)
    hip = start(fake)
    assert hip.ask("[number(hip.hipRuntimeGetVersion), number(hip.hipDriverGetVersion)]") == [70012345] * 2
    assert hip.ask("[seen(), bus(1), bus(2)]") == ["abcd", "0001:b3:00.0", "0000:c3:00.0"]
    assert hip.ask("[name(1), name(2), name(3)]") == ["AMD Radeon Graphics", "AMD Instinct MI300X", ""]
    assert hip.ask("[plain(uuid(0)), plain(uuid(1))]") == ["00ab00000000000a?", "XX" + 14 * "\0" + "?"]
    assert hip.ask("[number(hip.hipDeviceGet, 3), text(hip.hipDeviceGetName, 2, 4)]") == [3, "AMD"]
    assert hip.ask("[plain(hip.hipGetErrorName(c)) for c in (100, 4)]") == ["hipErrorNoDevice", "hipErrorUnknown"]
    for call in ("hipDeviceGetName(None, 0, 4)", "hipDeviceGetPCIBusId(None, 0, -1)", "hipDeviceGetUuid(None, 4)"):
        assert hip.ask(f"hip.{call}") == INVALID_DEVICE, call
    for call in ("hipGetDeviceCount(None)", "hipDeviceGetName(None, 9, 0)", "hipDeviceGetUuid(None, 0)", "hipInit(1)"):
        assert hip.ask(f"hip.{call}") == INVALID_VALUE, call
    assert hip.ask("text(hip.hipDeviceGetPCIBusId, 0, 12)") == Refused(INVALID_VALUE)
    assert hip.ask("text(hip.hipDeviceGetPCIBusId, 0, 13)") == "0000:a3:00.0"


def test_partitions_differ_in_the_function(fake: FakeHip, start: Start) -> None:
    """Partitions are devices of their own and, with one UUID for all, HIP's mask takes the first and ROCr's none."""
    parts = [Gpu(node=2 + i, bdf=f"0000:c3:00.{i}", unique_id=0xC3) for i in range(3)]
    fake.write(parts)
    hip = start(fake, HIP_VISIBLE_DEVICES="2,GPU-00000000000000c3")
    assert hip.ask("[bus(0), bus(1)]") == ["0000:c3:00.2", "0000:c3:00.0"]
    fake.write(parts, function_0=True)
    assert hip.ask("[bus(0), bus(1)]") == ["0000:c3:00.0", "0000:c3:00.0"]
    check_seen(start(fake, init=False), [(masked(rocr="1,GPU-00000000000000c3"), "c")])


@pytest.mark.parametrize(("name", "table"), [(MASKS[0], ROCR), (MASKS[1], HIP), (MASKS[2], HIP)])
def test_one_mask(fake: FakeHip, start: Start, name: str, table: str) -> None:
    """Each mask in the table picks and orders the cards behind its arrow."""
    cases = [case.rpartition(">") for line in table.strip().splitlines() for case in f" {line} ".split("/")]
    fake.write(CARDS)
    check_seen(start(fake, init=False), [({name: mask[1:-1]}, cards.strip()) for mask, _, cards in cases])


def test_masks_together(fake: FakeHip, start: Start) -> None:
    """ROCr's mask comes before HIP's, which if set hides CUDA's; no others are read."""
    cases = [
        (masked(), "abcd"),
        (masked(rocr=" "), ""),
        (masked(hip=' "3,0" '), "da"),
        (masked(hip="", cuda="1"), ""),
        (masked(hip='""', cuda="1"), "b"),
        (masked(rocr="2,1", hip="1,0"), "bc"),
        (masked(rocr="1,2", hip="0,2,1"), "b"),
        (masked(rocr="2,3", cuda="2,3"), ""),
        ({"GPU_DEVICE_ORDINAL": "1", "HSA_OVERRIDE_GFX_VERSION": "9.0.0"}, "abcd"),
    ]
    fake.write(CARDS)
    check_seen(start(fake, init=False), cases)


def test_cards_that_drop_out(fake: FakeHip, start: Start) -> None:
    """A node that cannot be opened has no number; one that ROCr or HIP cannot use has one for that mask only."""
    c, a, b, d = CARDS
    hip = start(fake, init=False)
    fake.write([dataclasses.replace(b, accessible=False), a, c, d])
    check_seen(hip, [(masked(), "acd"), (masked(rocr="1,2,3,0"), "cd"), (masked(rocr="2,1,0,"), "dca")])
    fake.write([a, dataclasses.replace(b, accessible=True, isa_ok=False), c, d])
    check_seen(hip, [(masked(), "acd"), (masked(rocr="3,1,2", hip="1"), "c"), (masked(hip="1"), "c")])
    fake.write([a, c, d, dataclasses.replace(b, isa_ok=True, hip_ok=False)])
    check_seen(hip, [(masked(), "acd"), (masked(rocr="3,1,2", hip="1,2"), "c"), (masked(hip="1"), "")])


def test_no_state_file_and_masks_that_come_late(fake: FakeHip, start: Start) -> None:
    """Without the file there is a version but no device; masks count up to the first call but hipGetErrorName."""
    hip = start(fake, init=False, HIP_VISIBLE_DEVICES="1")
    hip.do("hip.hipGetErrorName(0); os.environ['HIP_VISIBLE_DEVICES'] = '3,0'")
    for call in ("hipInit(0)", "hipDeviceGet(None, 0)", "hipDeviceGetUuid(None, 0)", "hipSetDevice(0)"):
        assert hip.ask(f"hip.{call}") == NO_DEVICE, call
    assert hip.ask("[number(hip.hipDriverGetVersion), seen()]") == [60342134, ""]
    hip.do("os.environ['HIP_VISIBLE_DEVICES'] = '2'")
    fake.write(CARDS)
    assert hip.ask("seen()") == "da"


def test_forbidden_calls_fail_and_every_call_is_recorded(fake: FakeHip, start: Start) -> None:
    """What would make a context or take memory says no, and the record has it and all other calls in order."""
    calls = ["hipCtxCreate", "hipMalloc", "hipSetDevice", "hipStreamCreate"]
    fake.write(CARDS)
    hip = start(fake)
    assert [hip.ask(f"hip.{call}(None)") for call in calls] == [NOT_SUPPORTED] * 4
    assert [hip.ask("bus(7)"), hip.ask("plain(hip.hipGetErrorName(0))")] == [Refused(INVALID_DEVICE), "hipSuccess"]
    assert fake.record() == ["hipInit", *calls, "hipDeviceGetPCIBusId", "hipGetErrorName"]
    assert sorted(FORBIDDEN) == calls


def test_rules_hit_their_call_on_their_card(fake: FakeHip, start: Start) -> None:
    """A rule's place is that of the card's line, whatever its ordinal; a fault, a wait and a crash hit only there."""
    rules = ("fault hipDeviceGetName 0 999", "slow hipDeviceGetUuid 1 300", "fault hipInit 3", "crash hipDeviceGet 1")
    fake.write(CARDS, lines=rules)
    hip = start(fake, init=False, HIP_VISIBLE_DEVICES="2,0")
    assert hip.ask("ask(hip.hipInit, 0)") == Refused(3)
    assert [hip.ask("name(0)"), hip.ask("name(1)")] == [Refused(999), "AMD Instinct MI210"]
    check_slow(hip, quick="uuid(0)", slow="uuid(1)", seconds=0.3)
    assert hip.ask("number(hip.hipDeviceGet, 0)") == 0
    check_crash(hip, "number(hip.hipDeviceGet, 1)")


def test_nonsense_is_refused(fake: FakeHip, start: Start) -> None:
    """A line that makes no sense ends the process, and what would never match or cannot be written is not written."""
    check_writer(fake, "hipDeviceGetNames", dataclasses.replace(CARDS[0], name='a "b"'))
    check_nonsense(fake, start, "hip.hipInit(0)", "gpu 1", "a GPU without: bdf")
    check_nonsense(fake, start, "hip.hipInit(0)", "gpu 1 unique_id=xyz", "not a hexadecimal number: xyz")


def test_symbols_and_names_of_the_library(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library has all symbols but those it is built without, and two names; without a compiler there is none."""
    whole, less = ctypes.CDLL(str(library)), ctypes.CDLL(str(build(tmp_path, ["hipDeviceGetUuid", "hipMalloc"])))
    assert {call for call in CALLS if not hasattr(whole, call)} == set()
    assert {call for call in CALLS if not hasattr(less, call)} == {"hipDeviceGetUuid", "hipMalloc"}
    assert (library.name, (library.parent / amdhip64.LINK).resolve()) == (amdhip64.SONAME, library)
    monkeypatch.setenv("PATH", str(tmp_path))
    check_missing(monkeypatch, lambda: build_or_skip(tmp_path), "no C compiler 'cc'", amdhip64.CompilerMissingError)
