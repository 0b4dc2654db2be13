"""The pretend NVML does what it says, seen through the real ``pynvml`` in a process of its own."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fakes.checks import (
    Child,
    check_crash,
    check_exit,
    check_hang,
    check_missing,
    check_nonsense,
    check_slow,
    check_whole_states,
    check_writer,
    check_writes,
    starting,
)
from tests.fakes.nvml import (
    CALLS,
    GIB,
    MOST_EQUAL_CARDS,
    SONAME,
    BuildError,
    CompilerMissingError,
    FakeNvml,
    Gpu,
    Mig,
    build,
    build_or_skip,
    equal_cards,
)

pytestmark = pytest.mark.e2e

UNINITIALIZED, INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND, INSUFFICIENT_SIZE = 1, 2, 3, 6, 7
DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND, IS_LOST, VERSION_MISMATCH, UNKNOWN = 9, 13, 15, 25, 999

CHILD = """
import ctypes
from pynvml import *
import pynvml

REFUSAL = NVMLError

def refusal(error):
    return [error.value]

def plain(value):
    return value

def all_fields(struct):
    return {name: getattr(struct, name) for name, _ in struct._fields_}
"""

A100 = Gpu(
    uuid="GPU-a100a100-0000-4000-8000-000000000000",
    pci="00000000:01:00.0",
    name="NVIDIA A100-SXM4-40GB",
    minor=0,
    total=40 * GIB,
    free=30 * GIB,
    used=9 * GIB,
    reserved=GIB,
    util=70,
    temp=50,
    mig=1,
    instances=(
        Mig(index=0, uuid="MIG-0", gi=7, ci=0, name="A100 MIG 1g.5gb", total=5 * GIB, free=4 * GIB, used=GIB),
        Mig(index=3, uuid="MIG-3", gi=11, ci=1, name="A100 MIG 2g.10gb", total=10, free=8, used=2, util=33),
    ),
)


class Refused(NamedTuple):
    """The code of an NVMLError."""

    code: int


Start = Callable[..., Child]


def child_on(fake: FakeNvml) -> Child:
    """A process in which ``from pynvml import *`` has been done."""
    return Child(CHILD, {**os.environ, **fake.environment()}, Refused)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_or_skip(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def fake(tmp_path: Path, library: Path) -> FakeNvml:
    return FakeNvml(tmp_path, library)


@pytest.fixture
def start() -> Iterator[Start]:
    with starting(child_on, "nvmlInit()") as start_child:
        yield start_child


def test_pynvml_reads_every_value_of_every_card(fake: FakeNvml, start: Start) -> None:
    """What was written for a card is what pynvml says about it, and the PCI address comes in NVIDIA's spelling."""
    cards = equal_cards(4)
    fake.write(cards)
    nvml = start(fake)
    assert nvml.ask("[nvmlDeviceGetCount(), nvmlSystemGetDriverVersion(), nvmlSystemGetNVMLVersion()]") == [
        4,
        "580.95.05",
        "12.580.95.05",
    ]
    for index, card in enumerate(cards):
        nvml.do(f"h = nvmlDeviceGetHandleByIndex({index})")
        assert nvml.ask("[nvmlDeviceGetIndex(h), nvmlDeviceGetMinorNumber(h)]") == [index, card.minor]
        assert nvml.ask("[nvmlDeviceGetUUID(h), nvmlDeviceGetName(h)]") == [card.uuid, card.name]
        assert nvml.ask("all_fields(nvmlDeviceGetUtilizationRates(h))") == {
            "gpu": 10 * (index + 1),
            "memory": 10 * (index + 1) + 1,
        }
        assert nvml.ask("[nvmlDeviceGetTemperature(h, 0), nvmlDeviceGetTemperatureV(h, 0)]") == [card.temp, card.temp]
        bus = 0x21 + 0x20 * index
        assert nvml.ask("all_fields(nvmlDeviceGetPciInfo(h))") == {
            "busIdLegacy": f"0000:{bus:02X}:00.0",
            "domain": 0,
            "bus": bus,
            "device": 0,
            "pciDeviceId": 0,
            "pciSubSystemId": 0,
            "busId": f"00000000:{bus:02X}:00.0",
        }


def test_first_memory_version_counts_reserved_as_used(fake: FakeNvml, start: Start) -> None:
    """Version 1 says used plus reserved, version 2 says them apart, and any other version is a mismatch."""
    fake.write([Gpu(total=100, free=60, used=30, reserved=10)])
    nvml = start(fake)
    nvml.do("h = nvmlDeviceGetHandleByIndex(0)")
    assert nvml.ask("all_fields(nvmlDeviceGetMemoryInfo(h))") == {"total": 100, "free": 60, "used": 40}
    assert nvml.ask("all_fields(nvmlDeviceGetMemoryInfo(h, nvmlMemory_v2))") == {
        "version": 0x02000028,
        "total": 100,
        "reserved": 10,
        "free": 60,
        "used": 30,
    }
    assert nvml.ask("nvmlDeviceGetMemoryInfo(h, 0x01000028)") == Refused(VERSION_MISMATCH)


def test_temperature_version_is_checked(fake: FakeNvml, start: Start) -> None:
    """TemperatureV refuses a struct of another version, and both temperature calls refuse another sensor."""
    fake.write(equal_cards(1))
    nvml = start(fake)
    nvml.do("h = nvmlDeviceGetHandleByIndex(0); t = c_nvmlTemperature_v1_t(version=0x0200000C)")
    assert nvml.ask("pynvml.nvmlLib.nvmlDeviceGetTemperatureV(h, byref(t))") == VERSION_MISMATCH
    assert nvml.ask("nvmlDeviceGetTemperatureV(h, 1)") == Refused(INVALID_ARGUMENT)
    assert nvml.ask("nvmlDeviceGetTemperature(h, 1)") == Refused(INVALID_ARGUMENT)


def test_left_out_keys_are_not_supported(fake: FakeNvml, start: Start) -> None:
    """A card without keys, and even without a UUID, has a handle, and every call about it is not supported."""
    fake.write([Gpu()], driver=None)
    nvml = start(fake)
    nvml.do("h = nvmlDeviceGetHandleByIndex(0)")
    for call in (
        "nvmlSystemGetDriverVersion()",
        "nvmlDeviceGetUUID(h)",
        "nvmlDeviceGetName(h)",
        "nvmlDeviceGetPciInfo(h)",
        "nvmlDeviceGetMinorNumber(h)",
        "nvmlDeviceGetMigMode(h)",
        "nvmlDeviceGetMemoryInfo(h)",
        "nvmlDeviceGetMemoryInfo(h, nvmlMemory_v2)",
        "nvmlDeviceGetTemperature(h, 0)",
        "nvmlDeviceGetTemperatureV(h, 0)",
        "nvmlDeviceGetUtilizationRates(h)",
    ):
        assert nvml.ask(call) == Refused(NOT_SUPPORTED), call
    assert nvml.ask("[nvmlDeviceGetIndex(h), nvmlDeviceGetMaxMigDeviceCount(h)]") == [0, 0]


def test_numbers_may_be_any(fake: FakeNvml, start: Start) -> None:
    """Sentinels pass through whole: 64 bits of memory, a negative temperature, an impossible utilization."""
    most = 2**64 - 1
    fake.write([Gpu(total=most, free=most - 1, used=most - 2, reserved=0, temp=-5, util=2**32 - 1), Gpu(temp=255)])
    nvml = start(fake)
    nvml.do("h = nvmlDeviceGetHandleByIndex(0)")
    assert nvml.ask("all_fields(nvmlDeviceGetMemoryInfo(h))") == {"total": most, "free": most - 1, "used": most - 2}
    assert nvml.ask("nvmlDeviceGetUtilizationRates(h).gpu") == 2**32 - 1
    assert nvml.ask("[nvmlDeviceGetTemperature(h, 0), nvmlDeviceGetTemperatureV(h, 0)]") == [2**32 - 5, -5]
    assert nvml.ask("nvmlDeviceGetTemperatureV(nvmlDeviceGetHandleByIndex(1), 0)") == 255


def test_old_driver_lacks_what_was_left_out(tmp_path: Path, start: Start) -> None:
    """Symbols that were left out are not found, and the ones of the same age still work."""
    newer = ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetTemperatureV", "nvmlInitWithFlags")
    fake = FakeNvml(build_or_skip(tmp_path, newer))
    fake.write(equal_cards(1))
    nvml = start(fake, init=False)
    assert nvml.ask("nvmlInit()") == Refused(FUNCTION_NOT_FOUND)
    assert nvml.ask("pynvml.nvmlLib.nvmlInit_v2()") == 0
    nvml.do("h = nvmlDeviceGetHandleByIndex(0)")
    assert nvml.ask("nvmlDeviceGetMemoryInfo(h, nvmlMemory_v2)") == Refused(FUNCTION_NOT_FOUND)
    assert nvml.ask("nvmlDeviceGetTemperatureV(h, 0)") == Refused(FUNCTION_NOT_FOUND)
    assert nvml.ask("[nvmlDeviceGetMemoryInfo(h).free, nvmlDeviceGetTemperature(h, 0)]") == [10 * GIB, 40]


def test_every_symbol_is_there_and_can_be_left_out(library: Path, tmp_path: Path) -> None:
    """The library exports all its calls, and none of them when all are left out."""
    full, empty = (ctypes.CDLL(str(path / SONAME)) for path in (library, build_or_skip(tmp_path, sorted(CALLS))))
    assert len(CALLS) == 61
    assert all(hasattr(full, symbol) for symbol in CALLS)
    assert not any(hasattr(empty, symbol) for symbol in CALLS)


def test_unknown_symbol_cannot_be_left_out(tmp_path: Path) -> None:
    """Leaving out what does not exist is an error, since the variant would be no variant."""
    with pytest.raises(ValueError, match="nvmlDeviceGetMemoryInfo_v3"):
        build(tmp_path, ["nvmlDeviceGetMemoryInfo_v3"])


def test_handles_come_by_index_uuid_and_address(fake: FakeNvml, start: Start) -> None:
    """Three ways lead to the same handle; PCI addresses are compared as numbers in each of nvml.h's three forms."""
    cards = equal_cards(9)
    fake.write(cards)
    nvml = start(fake)
    nvml.do("def same(a, b): return ctypes.addressof(a.contents) == ctypes.addressof(b.contents)")
    nvml.do("h = nvmlDeviceGetHandleByIndex(6); far = nvmlDeviceGetHandleByIndex(7)")
    assert nvml.ask(f"same(h, nvmlDeviceGetHandleByUUID('{cards[6].uuid}'))") is True
    for address in ("00000000:E1:00.0", "0:e1:0.0", "0000:e1:00", "e1:00.0"):
        assert nvml.ask(f"same(h, nvmlDeviceGetHandleByPciBusId('{address}'))") is True, address
    assert nvml.ask("same(far, nvmlDeviceGetHandleByPciBusId('1:21:0.0'))") is True
    assert nvml.ask("nvmlDeviceGetHandleByUUID('GPU-nobody')") == Refused(NOT_FOUND)
    assert nvml.ask("nvmlDeviceGetHandleByPciBusId('0:ff:0.0')") == Refused(NOT_FOUND)
    assert nvml.ask("nvmlDeviceGetHandleByPciBusId('e1')") == Refused(INVALID_ARGUMENT)
    assert nvml.ask("nvmlDeviceGetHandleByPciBusId('0:e1:0.0z')") == Refused(INVALID_ARGUMENT)
    assert nvml.ask("nvmlDeviceGetName(c_nvmlDevice_t())") == Refused(INVALID_ARGUMENT)


def test_counted_card_without_a_line_is_unknown(fake: FakeNvml, start: Start) -> None:
    """An index that is counted but has no card is an unknown error; one at or above the count is invalid."""
    fake.write(equal_cards(2), count=3)
    nvml = start(fake)
    assert nvml.ask("nvmlDeviceGetCount()") == 3
    assert nvml.ask("nvmlDeviceGetHandleByIndex(2)") == Refused(UNKNOWN)
    assert nvml.ask("nvmlDeviceGetHandleByIndex(3)") == Refused(INVALID_ARGUMENT)


def test_no_state_file_is_no_driver(fake: FakeNvml, start: Start) -> None:
    """Without the file init fails with driver not loaded; a file that goes away takes the driver with it."""
    nvml = start(fake, init=False)
    assert nvml.ask("nvmlInit()") == Refused(DRIVER_NOT_LOADED)
    fake.write(equal_cards(1))
    nvml.do("nvmlInit()")
    fake.remove()
    assert nvml.ask("nvmlDeviceGetCount()") == Refused(DRIVER_NOT_LOADED)
    nvml.do("nvmlShutdown()")


def test_calls_before_init_and_after_shutdown_are_uninitialized(fake: FakeNvml, start: Start) -> None:
    """Inits are counted: only after as many shutdowns do calls, and one more shutdown, answer uninitialized."""
    fake.write(equal_cards(1))
    nvml = start(fake, init=False)
    nvml.do("pynvml._LoadNvmlLibrary()")
    assert nvml.ask("nvmlDeviceGetCount()") == Refused(UNINITIALIZED)
    nvml.do("nvmlInit(); nvmlInit(); nvmlShutdown()")
    assert nvml.ask("nvmlDeviceGetCount()") == 1
    nvml.do("nvmlShutdown()")
    assert nvml.ask("nvmlDeviceGetCount()") == Refused(UNINITIALIZED)
    assert nvml.ask("nvmlShutdown()") == Refused(UNINITIALIZED)


def test_faults_hit_their_call_on_their_card(fake: FakeNvml, start: Start) -> None:
    """A fault answers its code for one call on one card; with stars for all; and its line gone, no more."""
    cards = equal_cards(2)
    fake.write(cards, lines=["fault nvmlDeviceGetName 1 17", "fault * 1 999"])
    nvml = start(fake)
    nvml.do("a = nvmlDeviceGetHandleByIndex(0)")
    assert nvml.ask("nvmlDeviceGetHandleByIndex(1)") == Refused(UNKNOWN)
    assert nvml.ask("[nvmlDeviceGetCount(), nvmlDeviceGetName(a)]") == [2, "NVIDIA L40S"]
    fake.write(cards, lines=["fault nvmlDeviceGetName 1 17"])
    nvml.do("b = nvmlDeviceGetHandleByIndex(1)")
    assert nvml.ask("nvmlDeviceGetName(b)") == Refused(17)
    assert nvml.ask("[nvmlDeviceGetName(a), nvmlDeviceGetIndex(b)]") == ["NVIDIA L40S", 1]
    fake.write(cards, lines=["fault * * 21"])
    assert nvml.ask("nvmlDeviceGetCount()") == Refused(21)
    assert nvml.ask("str(NVMLError(21))") == "the fake NVML's words for 21"
    fake.write(cards)
    assert nvml.ask("nvmlDeviceGetName(b)") == "NVIDIA L40S"


def test_hanging_call_blocks_its_thread_only(fake: FakeNvml, start: Start) -> None:
    """While a card hangs another answers; the hanging call returns when the line is gone, with what is true then."""
    cards = equal_cards(2)
    fake.write(cards)
    nvml = start(fake)
    nvml.do("a, b = (nvmlDeviceGetHandleByIndex(i) for i in range(2))")
    check_hang(
        nvml,
        "nvmlDeviceGetTemperature(a, 0)",
        hang=lambda: fake.write(cards, lines=["hang nvmlDeviceGetTemperature 0"]),
        others={"nvmlDeviceGetTemperature(b, 0)": 41, "nvmlDeviceGetIndex(a)": 0},
        free=lambda: fake.write([dataclasses.replace(cards[0], temp=77), cards[1]]),
        then=77,
    )


def test_process_can_end_while_a_daemon_thread_hangs(fake: FakeNvml, start: Start) -> None:
    """A call that hangs for ever does not keep the process from exiting with status 0."""
    fake.write(equal_cards(1))
    nvml = start(fake)
    fake.write(equal_cards(1), lines=["hang * *"])
    check_exit(nvml, "nvmlDeviceGetCount")


def test_slow_call_takes_its_time(fake: FakeNvml, start: Start) -> None:
    """A slow call answers after the milliseconds of its line, and only that call on that card is slow."""
    fake.write(equal_cards(2), lines=["slow nvmlDeviceGetIndex 1 400"])
    nvml = start(fake)
    nvml.do("a, b = (nvmlDeviceGetHandleByIndex(i) for i in range(2))")
    check_slow(nvml, quick="nvmlDeviceGetIndex(a)", slow="nvmlDeviceGetIndex(b)", seconds=0.4)


def test_crash_ends_the_process_by_sigsegv(fake: FakeNvml, start: Start) -> None:
    """The call in a crash line kills the process; the same call on another card does not."""
    fake.write(equal_cards(2), lines=["crash nvmlDeviceGetName 1"])
    nvml = start(fake)
    assert nvml.ask("nvmlDeviceGetName(nvmlDeviceGetHandleByIndex(0))") == "NVIDIA L40S"
    check_crash(nvml, "nvmlDeviceGetName(nvmlDeviceGetHandleByIndex(1))")


def test_lost_card_comes_back_under_its_old_handle(fake: FakeNvml, start: Start) -> None:
    """A lost card answers 15 to all that asks about it, parts included; once back, the old handles work."""
    cards = (A100, *equal_cards(1))
    fake.write(cards)
    nvml = start(fake)
    nvml.do("h = nvmlDeviceGetHandleByIndex(0); part = nvmlDeviceGetMigDeviceHandleByIndex(h, 3)")
    fake.write(cards, lines=["lost 0"])
    for call in (
        "nvmlDeviceGetHandleByIndex(0)",
        f"nvmlDeviceGetHandleByUUID('{A100.uuid}')",
        f"nvmlDeviceGetHandleByPciBusId('{A100.pci}')",
        "nvmlDeviceGetUUID(h)",
        "nvmlDeviceGetMemoryInfo(h)",
        "nvmlDeviceGetMigDeviceHandleByIndex(h, 3)",
        "nvmlDeviceGetMemoryInfo(part)",
        "nvmlDeviceGetComputeRunningProcesses(h)",
    ):
        assert nvml.ask(call) == Refused(IS_LOST), call
    assert nvml.ask("[nvmlDeviceGetCount(), nvmlDeviceGetTemperature(nvmlDeviceGetHandleByIndex(1), 0)]") == [2, 40]
    fake.write(cards)
    assert nvml.ask("[nvmlDeviceGetUUID(h), nvmlDeviceGetUUID(part)]") == [A100.uuid, "MIG-3"]


def test_handle_stays_with_its_card_when_indices_change(fake: FakeNvml, start: Start) -> None:
    """Handles name cards, not indices: with the order turned round each still answers for its own card."""
    cards = equal_cards(3)
    fake.write(cards)
    nvml = start(fake)
    nvml.do("hs = [nvmlDeviceGetHandleByIndex(i) for i in range(3)]")
    fake.write(cards[::-1])
    assert nvml.ask("[nvmlDeviceGetIndex(h) for h in hs]") == [2, 1, 0]
    assert nvml.ask("[nvmlDeviceGetUUID(h) for h in hs]") == [card.uuid for card in cards]
    assert nvml.ask("nvmlDeviceGetUUID(nvmlDeviceGetHandleByIndex(0))") == cards[2].uuid


def test_handle_of_a_removed_device_fails(fake: FakeNvml, start: Start) -> None:
    """The handle of a card that is gone is lost, the handle of a part that is gone is invalid, until it is back."""
    fake.write([A100])
    nvml = start(fake)
    nvml.do("h = nvmlDeviceGetHandleByIndex(0); part = nvmlDeviceGetMigDeviceHandleByIndex(h, 0)")
    fake.write([dataclasses.replace(A100, instances=())])
    assert nvml.ask("nvmlDeviceGetUUID(part)") == Refused(INVALID_ARGUMENT)
    fake.write([])
    assert nvml.ask("nvmlDeviceGetUUID(h)") == Refused(IS_LOST)
    fake.write([A100])
    assert nvml.ask("[nvmlDeviceGetUUID(h), nvmlDeviceGetUUID(part)]") == [A100.uuid, "MIG-0"]


def test_mig_indices_have_holes(fake: FakeNvml, start: Start) -> None:
    """A part that is not there is not found, one beyond the most there can be is invalid, as on a card without MIG."""
    fake.write([A100, *equal_cards(1)])
    nvml = start(fake)
    nvml.do("a, b = (nvmlDeviceGetHandleByIndex(i) for i in range(2))")
    assert nvml.ask("[nvmlDeviceGetMaxMigDeviceCount(h) for h in (a, b)]") == [7, 0]
    assert nvml.ask("nvmlDeviceGetMigMode(a)") == [1, 1]
    assert nvml.ask("nvmlDeviceGetMigMode(b)") == Refused(NOT_SUPPORTED)
    found = [nvml.ask(f"nvmlDeviceGetUUID(nvmlDeviceGetMigDeviceHandleByIndex(a, {i}))") for i in range(8)]
    hole = Refused(NOT_FOUND)
    assert found == ["MIG-0", hole, hole, "MIG-3", hole, hole, hole, Refused(INVALID_ARGUMENT)]
    assert nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex(b, 0)") == Refused(INVALID_ARGUMENT)


def test_parts_have_values_of_their_own(fake: FakeNvml, start: Start) -> None:
    """A part tells its index, instances, name and memory, and leads to its card; a card has no instances."""
    fake.write([*equal_cards(1), A100])
    nvml = start(fake)
    nvml.do("h = nvmlDeviceGetHandleByIndex(1); part = nvmlDeviceGetHandleByUUID('MIG-3')")
    assert nvml.ask("[nvmlDeviceIsMigDeviceHandle(x).value for x in (h, part)]") == [0, 1]
    assert nvml.ask("[nvmlDeviceGetIndex(part), nvmlDeviceGetName(part)]") == [3, "A100 MIG 2g.10gb"]
    assert nvml.ask("[nvmlDeviceGetGpuInstanceId(part), nvmlDeviceGetComputeInstanceId(part)]") == [11, 1]
    assert nvml.ask("all_fields(nvmlDeviceGetMemoryInfo(part))") == {"total": 10, "free": 8, "used": 2}
    assert nvml.ask("nvmlDeviceGetMemoryInfo(part, nvmlMemory_v2).reserved") == 0
    assert nvml.ask("nvmlDeviceGetUUID(nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part))") == A100.uuid
    for call in (
        "nvmlDeviceGetGpuInstanceId(h)",
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle(h)",
        "nvmlDeviceGetTemperature(part, 0)",
        "nvmlDeviceGetTemperatureV(part, 0)",
        "nvmlDeviceGetMigMode(part)",
    ):
        assert nvml.ask(call) == Refused(INVALID_ARGUMENT), call


def test_utilization_of_mig_is_not_supported(fake: FakeNvml, start: Start) -> None:
    """A card in MIG mode has no utilization although it has the key, and a part has one only where it has the key."""
    fake.write([A100, dataclasses.replace(equal_cards(1)[0], mig=0)])
    nvml = start(fake)
    nvml.do("a, b = (nvmlDeviceGetHandleByIndex(i) for i in range(2))")
    assert nvml.ask("nvmlDeviceGetUtilizationRates(a)") == Refused(NOT_SUPPORTED)
    part = "nvmlDeviceGetUtilizationRates(nvmlDeviceGetHandleByUUID('MIG-{}')).gpu"
    assert nvml.ask(part.format(0)) == Refused(NOT_SUPPORTED)
    assert nvml.ask(part.format(3)) == 33
    assert nvml.ask("[nvmlDeviceGetMigMode(b), nvmlDeviceGetUtilizationRates(b).gpu]") == [[0, 0], 10]


def test_processes_are_those_of_a_card_or_of_one_part(fake: FakeNvml, start: Start) -> None:
    """A card has also those of its parts, which tell the instance that they are on; memory and mode are not said."""
    lines = ["process 0 71 0", "process 0 72 3", "process 0 73", "process 1 71", "process 1 4294967295"]
    fake.write([A100, *equal_cards(2)], lines=lines)
    nvml = start(fake)
    nvml.do("a, b, c = (nvmlDeviceGetHandleByIndex(i) for i in range(3))")
    nvml.do(
        "def found(h): return [[p.pid, p.usedGpuMemory, p.gpuInstanceId, p.computeInstanceId]"
        " for p in nvmlDeviceGetComputeRunningProcesses(h)]"
    )
    none = 2**32 - 1
    assert nvml.ask("found(a)") == [[71, None, 7, 0], [72, None, 11, 1], [73, None, none, none]]
    assert nvml.ask("found(nvmlDeviceGetMigDeviceHandleByIndex(a, 3))") == [[72, None, 11, 1]]
    assert nvml.ask("found(b)") == [[71, None, none, none], [none, None, none, none]]
    assert nvml.ask("found(c)") == []


def test_processes_need_room_for_all_of_them(fake: FakeNvml, start: Start) -> None:
    """Too little room is an error that says how much is needed; room without an array is invalid."""
    fake.write(equal_cards(1), lines=[f"process 0 {pid}" for pid in range(71, 80)])
    nvml = start(fake)
    nvml.do("h = nvmlDeviceGetHandleByIndex(0); room = c_uint(0); array = (pynvml.c_nvmlProcessInfo_v3_t * 9)()")
    nvml.do("call = pynvml._nvmlGetFunctionPointer('nvmlDeviceGetComputeRunningProcesses_v3')")
    assert nvml.ask("[call(h, byref(room), None), room.value]") == [INSUFFICIENT_SIZE, 9]
    assert nvml.ask("call(h, byref(room), None)") == INVALID_ARGUMENT
    nvml.do("room.value = 8")
    assert nvml.ask("[call(h, byref(room), array), room.value]") == [INSUFFICIENT_SIZE, 9]
    assert nvml.ask("[call(h, byref(room), array), room.value, array[8].pid]") == [0, 9, 79]
    assert nvml.ask("call(h, None, array)") == INVALID_ARGUMENT


def test_log_holds_every_call_with_its_card(fake: FakeNvml, tmp_path: Path, start: Start) -> None:
    """Every call is a line of the log: its symbol and the index of its card, or a dash, also if it is refused."""
    log = tmp_path / "the log"
    fake.write([A100, *equal_cards(1)], lines=[f'log "{log}"', "fault nvmlDeviceGetName 1 999"])
    nvml = start(fake)
    nvml.do("nvmlDeviceGetCount(); h = nvmlDeviceGetHandleByIndex(1)")
    nvml.ask("nvmlDeviceGetName(h)")
    nvml.ask("nvmlDeviceGetHandleByIndex(5)")
    nvml.do("nvmlDeviceGetName(nvmlDeviceGetHandleByUUID('MIG-0')); nvmlShutdown()")
    assert log.read_text().splitlines() == [
        "nvmlInitWithFlags -",
        "nvmlDeviceGetCount_v2 -",
        "nvmlDeviceGetHandleByIndex_v2 1",
        "nvmlDeviceGetName 1",
        "nvmlDeviceGetHandleByIndex_v2 5",
        "nvmlDeviceGetHandleByUUID 0",
        "nvmlDeviceGetName 0",
        "nvmlShutdown -",
    ]


def test_each_write_is_seen_by_the_next_call(fake: FakeNvml, start: Start) -> None:
    """Files of the same size, written as fast as can be, are told apart."""
    fake.write([Gpu(temp=100)])
    nvml = start(fake)
    nvml.do("h = nvmlDeviceGetHandleByIndex(0)")
    check_writes(nvml, "nvmlDeviceGetTemperature(h, 0)", lambda temp: fake.write([Gpu(temp=temp)]), range(100, 200))


def test_many_threads_see_whole_states(fake: FakeNvml, start: Start) -> None:
    """Eight threads that read while the file changes never see half of a state or another card's values."""

    def write(values: Sequence[tuple[int, int]]) -> None:
        fake.write([Gpu(uuid=f"GPU-{i}", total=v, free=v, used=v, reserved=0) for i, v in values])

    write([(i, i) for i in range(8)])
    nvml = start(fake)
    nvml.do("hs = [nvmlDeviceGetHandleByUUID(f'GPU-{i}') for i in range(8)]")
    check_whole_states(nvml, "all_fields(nvmlDeviceGetMemoryInfo(hs[i])).values()", write)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("gpu 0 colour=red", "unknown word: colour"),
        ("gpu 0 temp=warm", "not a number: warm"),
        ("gpu 0 mig=2", "unknown word: 2"),
        ("lose 0", "unknown word: lose"),
        ("lost", "a word is missing"),
        ("lost 0 1", "one word too many: 1"),
        ("process 0", "a word is missing"),
        ("process 0 one", "not a number: one"),
        ("process 0 71 3 0", "one word too many: 0"),
    ],
)
def test_nonsense_in_the_state_aborts(fake: FakeNvml, start: Start, line: str, complaint: str) -> None:
    """A line that makes no sense ends the process with a message that names the line and what is wrong."""
    check_nonsense(fake, start, "nvmlInit()", line, complaint)


def test_writer_refuses_what_would_never_match(fake: FakeNvml) -> None:
    """A rule for a call that does not exist and text that cannot be quoted are errors, and nothing is written."""
    check_writer(fake, "nvmlDeviceGetMemory", Gpu(name='a "b"'))


@pytest.mark.parametrize("count", [0, 1, 7, 8, MOST_EQUAL_CARDS])
def test_equal_cards_tell_which_they_are(count: int) -> None:
    """No two cards share an identity or a number, addresses ascend, minors are not indices, and memory adds up."""
    cards = equal_cards(count)
    for key in ("uuid", "pci", "minor", "free", "used", "temp"):
        assert len({getattr(card, key) for card in cards}) == count, key
    addresses = [card.pci or "" for card in cards]
    assert addresses == sorted(addresses)
    assert [card.minor for card in cards] == list(range(count))[::-1]
    for card in cards:
        assert card.total == (card.free or 0) + (card.used or 0) + (card.reserved or 0)


def test_more_equal_cards_than_can_be_told_apart_are_refused() -> None:
    """Beyond what the memory can encode there are no equal cards."""
    with pytest.raises(ValueError, match="37"):
        equal_cards(MOST_EQUAL_CARDS + 1)


def test_missing_compiler_fails_in_ci_and_skips_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a C compiler CI fails with its name, and everywhere else the skip says it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    check_missing(monkeypatch, lambda: build_or_skip(tmp_path), "no C compiler 'cc'", CompilerMissingError)


def test_missing_header_names_its_package(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without NVIDIA's header the error names the package that has it."""
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    with pytest.raises(BuildError, match="pip install nvidia-nvml-dev"):
        build(tmp_path)
