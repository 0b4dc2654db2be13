"""The pretend CUDA driver does what it says, seen through plain ctypes in processes of their own."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.checks import Child, check_abort, check_crash, check_writer, starting
from tests.fakes.cuda import CALLS, FORBIDDEN, SONAME, FakeCuda, Gpu, Mig, build, build_or_skip

pytestmark = pytest.mark.e2e

INVALID_VALUE, NOT_INITIALIZED, NO_DEVICE, INVALID_DEVICE = 1, 3, 100, 101
NOT_PERMITTED, NOT_SUPPORTED, UNKNOWN = 800, 801, 999

CHILD = """
import os
from ctypes import CDLL, byref, c_char_p, c_int, create_string_buffer

cuda = CDLL("libcuda.so.1")
REFUSAL = OSError
refusal = lambda error: error.args
plain = lambda value: value

def told(out, call, *arguments):
    code = getattr(cuda, call)(*arguments)
    if code:
        raise OSError(code)
    return out

def number(call, *arguments):
    return told(out := c_int(-1), call, byref(out), *arguments).value

def text(call, device, length=64):
    return told(out := create_string_buffer(64), call, out, length, device).value.decode()

def uuid(device, call="cuDeviceGetUuid_v2"):
    return told(out := create_string_buffer(16), call, out, device).raw.hex()

def devices():
    return [number("cuDeviceGet", i) for i in range(number("cuDeviceGetCount"))]

def behind(masks):
    # Each in a process that forks off before cuInit, as the driver reads its environment once in a process.
    reader, writer = os.pipe()
    for mask in masks:
        if not os.fork():
            os.environ["CUDA_VISIBLE_DEVICES"] = mask
            seen = cuda.cuInit(0) or "".join(u[-1] if u[-1] != "9" else u[0] for u in map(uuid, devices()))
            os.write(writer, json.dumps(seen).encode())
            os._exit(0)
        os.wait()
        yield json.loads(os.read(reader, 1000))
"""

TAIL = "-0000-4000-8000-00000000000"
L40S = "NVIDIA L40S"
UUIDS = FIRST, SECOND, THIRD = f"GPU-9e8d35e3{TAIL}0", f"GPU-9e8d0000{TAIL}1", f"GPU-47000000{TAIL}2"
PCI = ("0000:C1:00.0", "0000:17:00.0", "00010000:00:1f.0")
CARDS = tuple(Gpu(uuid=uuid, pci=pci, name=L40S) for uuid, pci in zip(UUIDS, PCI, strict=True))
PARTS = tuple(f"MIG-{digit * 8}{TAIL}9" for digit in "abcd")
INSTANCES = (
    Mig(index=4, gi=9, uuid=PARTS[2], name="A100 MIG 2g.10gb"),
    Mig(index=0, gi=7, uuid=PARTS[0]),
    Mig(index=1, gi=7, ci=1, uuid=PARTS[1]),
)
SPLIT = Gpu(uuid=SECOND, pci="0000:17:00.0", name="NVIDIA A100", mig=True, instances=INSTANCES)

Start = Callable[..., Child]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_or_skip(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def fake(tmp_path: Path, library: Path) -> FakeCuda:
    return FakeCuda(tmp_path, library)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes without a mask that have loaded the library by its name; a refusal there is the bare code."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    with starting(lambda fake: Child(CHILD, {**clean, **fake.environment()}, int), "told(None, 'cuInit', 0)") as new:
        yield new


def check_seen(child: Child, expected: dict[str, str], order: str = "") -> None:
    """Which devices are seen behind masks, as a character each: the UUID's last, or its first where the last is 9."""
    child.do(f"os.environ['CUDA_DEVICE_ORDER'] = {order!r}")
    found = child.ask(f"list(behind({list(expected)!r}))")
    assert isinstance(found, list)
    assert {mask: "" if seen == NO_DEVICE else seen for mask, seen in zip(expected, found, strict=True)} == expected


def test_reads_what_a_device_is(fake: FakeCuda, start: Start) -> None:
    """Name, UUID and PCI address come through, and an address that needs a longer domain has one."""
    fake.write(CARDS, driver=12040)
    cuda = start(fake)
    assert cuda.ask("[number('cuDriverGetVersion'), devices()]") == [12040, [0, 1, 2]]
    bare = [identity.removeprefix("GPU-").replace("-", "") for identity in UUIDS]
    assert cuda.ask("[[uuid(i), uuid(i, 'cuDeviceGetUuid')] for i in range(3)]") == [[one, one] for one in bare]
    assert cuda.ask("[text('cuDeviceGetPCIBusId', i) for i in range(3)]") == [pci.upper() for pci in PCI]
    assert cuda.ask("text('cuDeviceGetPCIBusId', 0, 12)") == INVALID_VALUE
    assert cuda.ask("[text('cuDeviceGetName', 0), text('cuDeviceGetName', 0, 7)]") == [L40S, "NVIDIA"]
    for call in ("uuid(3)", "uuid(-1)", "number('cuDeviceGet', 3)"):
        assert cuda.ask(call) == INVALID_DEVICE, call
    assert cuda.ask("[cuda.cuDeviceGetCount(None), cuda.cuDeviceGetUuid(None, 0)]") == [INVALID_VALUE, INVALID_VALUE]


def test_order_is_the_drivers_own_unless_by_address(fake: FakeCuda, start: Start) -> None:
    """Indices count in the order of the state, or by address for one exact value, and only what is accessible."""
    cuda = start(fake, init=False)
    fake.write(CARDS, order=(2, 0, 1))
    for order in ("", "pci_bus_id", "PCI_BUS_ID ", "FASTEST_FIRST"):
        check_seen(cuda, {"0": "2", "1,2": "01", "2,1,0": "102"}, order)
    check_seen(cuda, {"0": "1", "1,2": "02", THIRD: "2"}, "PCI_BUS_ID")
    fake.write([CARDS[0], Gpu(uuid=SECOND, accessible=False), CARDS[2]])
    check_seen(cuda, {"0,1": "02", "0,2": "0", SECOND: "", "GPU-9e8": "0"})


def test_mask_of_cards(fake: FakeCuda, start: Start) -> None:
    """Lists end at what is invalid, a repeat leaves nothing, leading digits count, and prefixes must be unique."""
    cuda = start(fake, init=False)
    fake.write(CARDS)
    check_seen(cuda, dict.fromkeys(["", " ", "-1", "none", "all", "NoDevFiles", "+1", ",0", "3", "9" * 40, "x1"], ""))
    check_seen(cuda, {"2,0": "20", "0,-1,1": "0", "0,3,1": "0", "0,,1": "0", "1,": "1", " 2 , 1\t": "21", "01": "1"})
    check_seen(cuda, {"0,0": "", "0,1,00": "", "0,-1,0": "0", "0,9,0": "0", "2gpu2,1.5": "21", "0;1": "0", "0x1": "0"})
    check_seen(cuda, {"1c20e77d": "1", THIRD: "2", f"{THIRD},{FIRST}": "20", "GPU-4,GPU-9e8d3": "20", f"{THIRD}0": ""})
    check_seen(cuda, {"GPU-9e8": "", "GPU-": "", "GPU-47,GPU-9e8,GPU-9e8d0": "2", "GPU-9e8d35e3,GPU-47,GPU-9e8d3": ""})
    check_seen(cuda, {"gpu-47": "", " GPU-47": "", "GPU-47, GPU-9e8d0": "2", "GPU-9E8D3": "", "MIG-47": ""})
    check_seen(cuda, {"0,GPU-47": "0", "GPU-47,0": "2", "GPU-47,MIG-47": "2", "GPU-47,GPU-zz,GPU-47": "2"})


def test_instances_of_an_old_driver(fake: FakeCuda, start: Start) -> None:
    """Before 570 a process has one instance, and cards only without one; a card in MIG mode takes its place."""
    cuda = start(fake, init=False)
    fake.write([CARDS[0], SPLIT, CARDS[2]], branch=565)
    check_seen(cuda, {"0": "0", "1": "a", "0,1,2": "a", "0,2": "02", "2,3": "2", SECOND: "a", "GPU-47,GPU-9e8d0": "a"})
    check_seen(cuda, {PARTS[2]: "c", f"{PARTS[1]},{PARTS[2]}": "b", "MIG-c,MIG-cc": "", "MIG-e": "", "MIG-": ""})
    check_seen(cuda, {f"GPU-47,{PARTS[0]}": "2", f"{PARTS[2]},GPU-47": "c", f"0,{PARTS[2]}": "0"})
    assert start(fake).ask("[uuid(i)[0] for i in devices()]") == ["a"]
    fake.write([CARDS[0], Gpu(mig=True), CARDS[2]], branch=565)
    check_seen(cuda, {"0,1,2": "02", "1": "", "2": "2"})


def test_instances_of_a_new_driver(fake: FakeCuda, start: Start) -> None:
    """From 570 on there are cards and instances together, one of each GPU instance."""
    cuda = start(fake, init=False)
    fake.write([CARDS[0], SPLIT, CARDS[2]])
    check_seen(cuda, {"0,1,2": "0ac2", "2,1": "2ac", "1": "ac", "GPU-9e8d0": "ac"})
    check_seen(cuda, {f"MIG-c,{PARTS[1]},{PARTS[0]}": "cb", f"GPU-47,{PARTS[1]},{FIRST}": "2b0", "MIG-b,MIG-bb": ""})
    check_seen(cuda, {f"MIG-{SECOND}/9/0": "c", f"MIG-{SECOND}/7/1,MIG-cc": "bc", f"MIG-{SECOND}/7/1,MIG-bb": ""})
    check_seen(cuda, {f"MIG-{SECOND}/7": "", f"MIG-{SECOND}/9/1": "", f"MIG-{FIRST}/9/0": "", "MIG-GPU-9e8d0/9/0": ""})
    cuda = start(fake)
    assert cuda.ask("[uuid(i)[:8] for i in devices()]") == ["9e8d35e3", "aaaaaaaa", "cccccccc", "47000000"]
    assert cuda.ask("[uuid(2, 'cuDeviceGetUuid')[:8], text('cuDeviceGetName', 2)]") == ["9e8d0000", "A100 MIG 2g.10gb"]
    assert cuda.ask("text('cuDeviceGetPCIBusId', 2)") == "0000:17:00.0"
    crowd = [Gpu(mig=True, instances=tuple(Mig(index=i, gi=i) for i in range(7))) for _ in range(10)]
    fake.write([*crowd, CARDS[0]])
    cuda = start(fake)
    assert cuda.ask("len(devices())") == 65
    assert cuda.ask("[uuid(64)[-1], text('cuDeviceGetName', 64)]") == ["0", L40S]
    for call in ("uuid(0)", "text('cuDeviceGetPCIBusId', 0)", "text('cuDeviceGetName', 0)"):
        assert cuda.ask(call) == NOT_SUPPORTED, call


def test_nothing_answers_before_init_which_settles_the_devices(fake: FakeCuda, start: Start) -> None:
    """Without a file init finds no device; the first one with a file counts, and the environment no more after it."""
    cuda = start(fake, init=False)
    cuda.do("name = c_char_p()")
    assert cuda.ask("[cuda.cuInit(0), cuda.cuGetErrorName(100, byref(name))]") == [NO_DEVICE, 0]
    assert cuda.ask("name.value.decode()") == "CUDA_ERROR_NO_DEVICE"
    assert cuda.ask("[cuda.cuGetErrorName(12345, byref(name)), name.value]") == [INVALID_VALUE, None]
    fake.write(CARDS)
    for call in ("number('cuDeviceGetCount')", "number('cuDriverGetVersion')", "cuda.cuMemAlloc_v2(None, 0)"):
        assert cuda.ask(call) == NOT_INITIALIZED, call
    cuda.do("os.environ['CUDA_VISIBLE_DEVICES'] = '2,1'")
    assert cuda.ask("[cuda.cuInit(1), cuda.cuInit(0), len(devices())]") == [INVALID_VALUE, 0, 2]
    assert cuda.ask("[os.environ.pop('CUDA_VISIBLE_DEVICES'), cuda.cuInit(0), uuid(0)[-1]]") == ["2,1", 0, "2"]
    fake.write(CARDS[:2])
    assert cuda.ask("uuid(1)[-1]") == "1"
    assert cuda.ask("uuid(0)") == UNKNOWN
    masked = start(fake, init=False)
    masked.do("os.environ['CUDA_VISIBLE_DEVICES'] = 'none'; first = cuda.cuInit(0)")
    masked.do("del os.environ['CUDA_VISIBLE_DEVICES']")
    assert masked.ask("[first, cuda.cuInit(0), cuda.cuDeviceGetCount(None)]") == [NO_DEVICE, NO_DEVICE, NOT_INITIALIZED]


def test_forbidden_calls_are_recorded_and_refused(fake: FakeCuda, start: Start) -> None:
    """Every call is one line of the record, refused ones too, and those that take something succeed by no rule."""
    fake.write(CARDS, lines=["fault cuMemAlloc_v2 0"])
    cuda = start(fake)
    for call in ("cuCtxCreate_v2(out, 0, 0)", "cuDevicePrimaryCtxRetain(out, 2)", "cuMemAlloc_v2(out, 1)"):
        assert cuda.ask(f"[out := create_string_buffer(8), cuda.{call}, out.raw.hex()][1:]") == [
            NOT_PERMITTED,
            "0" * 16,
        ]
    assert fake.record() == ["cuInit", *sorted(FORBIDDEN)]


def test_rules_hit_their_call_on_their_card(fake: FakeCuda, start: Start) -> None:
    """WHERE is a card's index in the state, whatever its ordinal, and holds for its instances too."""
    cards = [CARDS[0], SPLIT, CARDS[2]]
    fake.write(cards, order=(2, 1, 0), lines=["fault cuDeviceGetName 0 46", "fault cuDeviceGetUuid_v2 1 999"])
    cuda = start(fake)
    assert cuda.ask("text('cuDeviceGetName', 3)") == 46
    assert cuda.ask("[text('cuDeviceGetName', 0), uuid(3)[-1], uuid(1, 'cuDeviceGetUuid')[-1]]") == [L40S, "0", "1"]
    assert cuda.ask("uuid(2)") == 999
    fake.write(cards, lines=["crash cuDeviceGetPCIBusId 2"])
    assert cuda.ask("text('cuDeviceGetPCIBusId', 3)") == "0000:C1:00.0"
    check_crash(cuda, "text('cuDeviceGetPCIBusId', 0)")


def test_library_and_state_know_their_calls(library: Path, tmp_path: Path) -> None:
    """Everything in CALLS is there unless it was left out, and what is not can neither be left out nor have a rule."""
    older = build_or_skip(tmp_path, ["cuDeviceGetUuid_v2"])
    whole, lesser = (ctypes.CDLL(str(folder / SONAME)) for folder in (library, older))
    assert len(CALLS) == 12
    assert [call for call in CALLS if not hasattr(whole, call)] == []
    assert [call for call in CALLS if not hasattr(lesser, call)] == ["cuDeviceGetUuid_v2"]
    with pytest.raises(ValueError, match="cuLaunchKernel"):
        build(tmp_path, ["cuLaunchKernel"])
    check_writer(FakeCuda(tmp_path), "cuLaunchKernel", Gpu(name='a "b"'))


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ("gpu 0 gi=3", "unknown word: gi"),
        (f"gpu 0 uuid={PARTS[0]}", "not a UUID: MIG-"),
        ("mig 0 0 gi=1", "no gi or no ci for an instance on card: 0"),
        ("gpu 0\nmig 0 0 gi=1 ci=0", "an instance on no card in MIG mode"),
        ("gpu 0\ngpu 0", "two lines about the same"),
        ("gpu 0\ngpu 1\norder 0 0", "not one of all cards"),
    ],
)
def test_nonsense_in_the_state_aborts(fake: FakeCuda, start: Start, lines: str, complaint: str) -> None:
    """A line that makes no sense, or does not fit the others, ends the process with what is wrong."""
    fake.write([], lines=lines.splitlines())
    check_abort(start(fake, init=False), "cuda.cuInit(0)", complaint)
