"""The pretend AMD SMI does what it says, seen through the real ``amdsmi`` in a process of its own.

What the tests say of the binding's own ways holds for the ``amdsmi`` that is installed, and is what a reader of it has
to cope with.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fakes import amd_smi
from tests.fakes.amd_smi import CALLS, GIB, SONAME, FakeAmdSmi, Gpu, MissingError, Version, build, build_or_skip
from tests.fakes.checks import (
    DEADLINE_SECONDS,
    Child,
    check_abort,
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

pytestmark = pytest.mark.e2e

INVAL, NOT_SUPPORTED, TIMEOUT, RETRY, NOT_FOUND, NOT_INIT, DRIVER_NOT_LOADED = 1, 2, 8, 9, 31, 32, 34
INSUFFICIENT_SIZE = 41

CHILD = """
import ctypes
from amdsmi import *
from amdsmi import amdsmi_wrapper as wrapper
from amdsmi.amdsmi_exception import *

handles = amdsmi_get_processor_handles
init, shut_down = amdsmi_init, amdsmi_shut_down
VRAM = AmdSmiMemoryType.VRAM

def temperature(handle, sensor="EDGE", metric="CURRENT"):
    return amdsmi_get_temp_metric(handle, AmdSmiTemperatureType[sensor], AmdSmiTemperatureMetric[metric])

REFUSAL = AmdSmiLibraryException

def refusal(error):
    return [error.get_error_code(), type(error).__name__]

def plain(value):
    return value
"""

MI300X = Gpu(
    bdf="0000:c1:00.0",
    uuid="a1ff74a1-0000-1000-8012-3456789abcde",
    name="AMD Instinct MI300X",
    vendor_id=0x1002,
    device_id=0x74A1,
    kfd_id=51110,
    node_id=2,
    partition_id=0,
    hip_id=0,
    hsa_id=2,
    hip_uuid="GPU-123456789abcde01",
    drm_card=1,
    drm_render=128,
    gfx=71,
    umc=32,
    mm=65535,
    vram_total=192 * GIB,
    vram_used=5 * GIB,
    edge=45,
    hotspot=60,
    vram_temp=50,
    power=301,
    energy=65628,
)

READS = {
    "amdsmi_get_gpu_device_bdf(h)": "0000:c1:00.0",
    "amdsmi_get_gpu_device_uuid(h)": "a1ff74a1-0000-1000-8012-3456789abcde",
    "amdsmi_get_gpu_asic_info(h)": {
        "market_name": "AMD Instinct MI300X",
        "vendor_id": "0x1002",
        "vendor_name": "Advanced Micro Devices Inc. [AMD/ATI]",
        "subvendor_id": "N/A",
        "device_id": "0x74a1",
        "rev_id": "0x00",
        "asic_serial": "N/A",
        "oam_id": "N/A",
        "num_compute_units": "N/A",
        "target_graphics_version": "gfxffffffffffffffff",
        "subsystem_id": "N/A",
    },
    "amdsmi_get_gpu_kfd_info(h)": {"kfd_id": 51110, "node_id": 2, "current_partition_id": 0},
    "amdsmi_get_gpu_enumeration_info(h)": {
        "drm_render": 128,
        "drm_card": 1,
        "hsa_id": 2,
        "hip_id": 0,
        "hip_uuid": "GPU-123456789abcde01",
    },
    "amdsmi_get_gpu_activity(h)": {"gfx_activity": 71, "umc_activity": 32, "mm_activity": "N/A"},
    "amdsmi_get_gpu_memory_total(h, VRAM)": 192 * GIB,
    "amdsmi_get_gpu_memory_usage(h, VRAM)": 5 * GIB,
    "temperature(h, 'EDGE')": 45,
    "temperature(h, 'HOTSPOT')": 60,
    "temperature(h, 'VRAM')": 50,
    "amdsmi_get_power_info(h)": {
        "socket_power": 301,
        "current_socket_power": 301,
        "average_socket_power": "N/A",
        "gfx_voltage": "N/A",
        "soc_voltage": "N/A",
        "mem_voltage": "N/A",
        "power_limit": "N/A",
    },
    "amdsmi_get_energy_count(h)": {
        "energy_accumulator": 65628,
        "counter_resolution": ctypes.c_float(15.3).value,
        "timestamp": 1,
    },
    "amdsmi_get_gpu_driver_info(h)": {
        "driver_name": "amdgpu",
        "driver_version": "6.14.14",
        "driver_date": "2015/01/01 00:00",
    },
}
"""What each call that needs a key says of MI300X."""

LAYOUT_OF_BOTH = f"""
class Entry(ctypes.Structure):
    _fields_ = [("type", ctypes.c_char_p), ("field", ctypes.c_char_p), ("offset", ctypes.c_size_t),
                ("size", ctypes.c_size_t)]

ours, count = {{}}, 0
table = (Entry * 1000).in_dll(wrapper._libraries["{SONAME}"], "{amd_smi.LAYOUT}")
while table[count].type:
    entry = table[count]
    ours[entry.type.decode() + "." + entry.field.decode()] = [entry.offset, entry.size]
    count += 1

theirs = {{}}
for name in sorted({{key.partition(".")[0] for key in ours}}):
    struct = getattr(wrapper, name)
    theirs[name + "."] = [0, ctypes.sizeof(struct)]
    for field, *_ in struct._fields_:
        if not field.startswith("PADDING_"):
            theirs[name + "." + field] = [getattr(struct, field).offset, getattr(struct, field).size]
"""


class Refused(NamedTuple):
    """The status of an AmdSmiLibraryException, and its class where that is one of the two others."""

    status: int
    kind: str = "AmdSmiLibraryException"


Start = Callable[..., Child]


def child_on(fake: FakeAmdSmi) -> Child:
    """A process in which ``from amdsmi import *`` has been done."""
    return Child(CHILD, {**os.environ, **fake.environment()}, Refused)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_or_skip(tmp_path_factory.mktemp("amd_smi"))


@pytest.fixture
def fake(tmp_path: Path, library: Path) -> FakeAmdSmi:
    return FakeAmdSmi(tmp_path, library)


@pytest.fixture
def start() -> Iterator[Start]:
    with starting(child_on, "init()") as start_child:
        yield start_child


def started_importing(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A Python process that imports ``amdsmi`` and has ended."""
    ours = {name: value for name, value in os.environ.items() if name not in {"ROCM_HOME", "LD_LIBRARY_PATH"}}
    return subprocess.run(
        [sys.executable, "-c", "import amdsmi"],
        env={**ours, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_SECONDS,
    )


def test_structs_are_laid_out_as_the_binding_has_them(fake: FakeAmdSmi, start: Start) -> None:
    """Every struct has the size, and every field of it the offset and size, that the installed binding gives it."""
    fake.write([])
    smi = start(fake)
    smi.do(LAYOUT_OF_BOTH)
    ours = smi.ask("ours")
    assert isinstance(ours, dict)
    named = {f"amdsmi_bdf_t.{part}": [0, 8] for part in ("bdf", "struct_amdsmi_bdf_t")}  # the same 64 bits in parts
    assert smi.ask("theirs") == {**ours, **named}
    assert len([key for key in ours if key.endswith(".")]) == 8


@pytest.mark.parametrize("address", ["0000:c1:00.0", "0001:ff:1f.7", "10000:03:00.1"])
def test_address_comes_in_the_bindings_spelling(fake: FakeAmdSmi, start: Start, address: str) -> None:
    """Each part of an address reaches its own bits; the domain has four digits, or more where it needs them."""
    fake.write([Gpu(bdf=address)])
    assert start(fake).ask("[amdsmi_get_gpu_device_bdf(h) for h in handles()]") == [address]


def test_binding_reads_every_value(fake: FakeAmdSmi, start: Start) -> None:
    """What was written is what the binding's public functions say, each in the form that the binding gives it."""
    fake.write([MI300X])
    smi = start(fake)
    smi.do("h, = handles()")
    assert {call: smi.ask(call) for call in READS} == READS
    assert smi.ask("amdsmi_get_processor_type(h)") == {"processor_type": "AMDSMI_PROCESSOR_TYPE_AMD_GPU"}
    smi.do("shut_down()")
    assert set(fake.record()) == CALLS - {
        "amdsmi_get_gpu_metrics_info",
        "amdsmi_get_lib_version",
        "amdsmi_status_code_to_string",
    }


def test_left_out_keys_are_not_supported(fake: FakeAmdSmi, start: Start) -> None:
    """A GPU without keys has a handle and a type, and every call about it that needs a key is not supported."""
    fake.write([Gpu()], driver=None)
    smi = start(fake)
    smi.do("h, = handles()")
    for call in READS:
        assert smi.ask(call) == Refused(NOT_SUPPORTED), call
    assert smi.ask("amdsmi_get_processor_type(h)") == {"processor_type": "AMDSMI_PROCESSOR_TYPE_AMD_GPU"}


def test_unknown_is_not_applicable_for_some(fake: FakeAmdSmi, start: Start) -> None:
    """The binding turns the value that means unknown into N/A; where it has another meaning of it, it lets it through.

    Power is the trap: the library's header says that 32 bits of ones are unknown, and the binding looks for 16.
    """
    most = 2**32 - 1
    gpu = dataclasses.replace(MI300X, name="", vendor_id=0, device_id=0, gfx=65535, umc=101, power=most)
    gpu = dataclasses.replace(gpu, kfd_id=2**64 - 1, node_id=most, partition_id=most)
    fake.write([dataclasses.replace(gpu, hip_id=most, hsa_id=most, drm_card=most, drm_render=most)])
    smi = start(fake)
    smi.do("h, = handles()")
    assert smi.ask("set(amdsmi_get_gpu_kfd_info(h).values()) == {'N/A'}") is True
    assert smi.ask("list(amdsmi_get_gpu_enumeration_info(h).values())") == ["N/A"] * 4 + [MI300X.hip_uuid]
    assert smi.ask("[amdsmi_get_gpu_asic_info(h)[k] for k in ('market_name', 'vendor_id', 'device_id')]") == ["N/A"] * 3
    assert smi.ask("list(amdsmi_get_gpu_activity(h).values())") == ["N/A", 101, "N/A"]
    assert smi.ask("amdsmi_get_power_info(h)['socket_power']") == most
    fake.write([dataclasses.replace(MI300X, power=65535)])
    assert smi.ask("amdsmi_get_power_info(h)['socket_power']") == "N/A"


def test_temperatures_and_memory_may_be_any(fake: FakeAmdSmi, start: Start) -> None:
    """A negative and a huge temperature and 64 bits of memory pass through whole."""
    most = 2**64 - 1
    fake.write([Gpu(edge=-5, hotspot=2**62, vram_temp=0, vram_total=most, vram_used=most - 1)])
    smi = start(fake)
    smi.do("h, = handles()")
    assert smi.ask("[temperature(h, s) for s in ('EDGE', 'HOTSPOT', 'VRAM')]") == [-5, 2**62, 0]
    assert smi.ask("amdsmi_get_gpu_memory_total(h, VRAM)") == most
    assert smi.ask("amdsmi_get_gpu_memory_usage(h, VRAM)") == most - 1


def test_other_sensors_and_memories_are_not_supported(fake: FakeAmdSmi, start: Start) -> None:
    """Only three sensors have a temperature, only the current one, and only VRAM has a size."""
    fake.write([MI300X])
    smi = start(fake)
    smi.do("h, = handles()")
    for call in (
        "temperature(h, 'HBM_0')",
        "temperature(h, 'EDGE', 'MAX')",
        "amdsmi_get_gpu_memory_total(h, AmdSmiMemoryType.GTT)",
        "amdsmi_get_gpu_memory_usage(h, AmdSmiMemoryType.VIS_VRAM)",
        "amdsmi_get_gpu_vram_usage(h)",
    ):
        assert smi.ask(call) == Refused(NOT_SUPPORTED), call


def test_long_uuid_is_refused(fake: FakeAmdSmi, start: Start) -> None:
    """The binding has room for 37 characters."""
    fake.write([Gpu(uuid="x" * 37), Gpu(uuid="x" * 38)])
    smi = start(fake)
    smi.do("a, b = handles()")
    assert smi.ask("amdsmi_get_gpu_device_uuid(a)") == "x" * 37
    assert smi.ask("amdsmi_get_gpu_device_uuid(b)") == Refused(INSUFFICIENT_SIZE)


def test_version_needs_no_driver_and_its_build_is_cut_by_the_binding(fake: FakeAmdSmi, start: Start) -> None:
    """The library tells its version before init; of the build's text the binding gives the first character only."""
    smi = start(fake, init=False)
    assert smi.ask("amdsmi_get_lib_version()") == {"major": 26, "minor": 0, "release": 2, "build": "2"}
    smi.do("version = wrapper.amdsmi_version_t(); wrapper.amdsmi_get_lib_version(ctypes.byref(version))")
    assert smi.ask("wrapper.string_cast(version.build)") == "26.0.2"
    fake.write([], version=Version(25, 5, 1, "a build"))
    assert smi.ask("amdsmi_get_lib_version()") == {"major": 25, "minor": 5, "release": 1, "build": "a"}


def test_words_for_a_status_come_from_the_library_only(fake: FakeAmdSmi, start: Start) -> None:
    """The library has words for a status, but the binding's function for them cannot work."""
    smi = start(fake, init=False)
    smi.do("words = ctypes.POINTER(ctypes.c_char)()")
    assert smi.ask("wrapper.amdsmi_status_code_to_string(2, ctypes.byref(words))") == 0
    assert smi.ask("wrapper.string_cast(words)") == "the fake AMD SMI's words for 2"
    with pytest.raises(AssertionError, match="TypeError"):
        smi.ask("amdsmi_status_code_to_string(wrapper.amdsmi_status_t(2))")


def test_partitions_share_their_cards_socket(fake: FakeAmdSmi, start: Start) -> None:
    """The binding lists GPUs by socket, sockets in the order of their first line, so lines can change places."""
    fake.write(
        [
            Gpu(socket="one card", kfd_id=1, node_id=1, partition_id=0),
            Gpu(kfd_id=3, node_id=3, partition_id=0),
            Gpu(socket="one card", kfd_id=2, node_id=2, partition_id=1),
        ]
    )
    smi = start(fake)
    assert smi.ask("len(amdsmi_get_socket_handles())") == 2
    assert smi.ask("[amdsmi_get_gpu_kfd_info(h)['kfd_id'] for h in handles()]") == [1, 2, 3]
    assert smi.ask("[amdsmi_get_gpu_kfd_info(h)['current_partition_id'] for h in handles()]") == [0, 1, 0]


def test_lists_give_what_there_is_room_for(fake: FakeAmdSmi, start: Start) -> None:
    """A list that is too short is filled, and one that is too long gets its true length."""
    fake.write([Gpu(), Gpu(), Gpu()])
    smi = start(fake)
    smi.do("room = (ctypes.c_void_p * 9)(); count = ctypes.c_uint32()")
    for asked, given in ((2, 2), (9, 3)):
        smi.do(f"count.value = {asked}; wrapper.amdsmi_get_socket_handles(ctypes.byref(count), room)")
        assert smi.ask("count.value") == given
    assert smi.ask("[h.value for h in amdsmi_get_socket_handles()] == room[:3]") is True
    assert smi.ask("wrapper.amdsmi_get_processor_handles(None, ctypes.byref(count), room)") == INVAL


def test_no_state_file_is_no_driver(fake: FakeAmdSmi, start: Start) -> None:
    """Without the file init says that the driver is not loaded; a file that goes away takes the driver with it."""
    smi = start(fake, init=False)
    assert smi.ask("init()") == Refused(DRIVER_NOT_LOADED)
    fake.write([MI300X])
    smi.do("init(); h, = handles()")
    fake.remove()
    assert smi.ask("handles()") == Refused(DRIVER_NOT_LOADED)
    assert smi.ask("temperature(h)") == Refused(DRIVER_NOT_LOADED)
    fake.write([MI300X])
    assert smi.ask("temperature(h)") == 45
    fake.remove()
    smi.do("shut_down()")


def test_one_shutdown_ends_all_inits(fake: FakeAmdSmi, start: Start) -> None:
    """Inits are not counted, and calls before the first and after a shutdown are refused; init wants GPUs asked for."""
    fake.write([MI300X])
    smi = start(fake, init=False)
    assert smi.ask("handles()") == Refused(NOT_INIT)
    smi.do("shut_down(); init(); init(); shut_down()")
    assert smi.ask("handles()") == Refused(NOT_INIT)
    assert smi.ask("init(AmdSmiInitFlags.INIT_AMD_CPUS)") == Refused(NOT_SUPPORTED)


def test_handles_are_of_one_init(fake: FakeAmdSmi, start: Start) -> None:
    """GPUs that come later are seen after the next init only, and then no handle from before is good any more."""
    fake.write([MI300X])
    smi = start(fake)
    smi.do("old, = handles()")
    fake.write([MI300X, MI300X])
    assert smi.ask("len(handles())") == 1
    smi.do("init()")
    assert smi.ask("[len(handles()), temperature(old)]") == [1, 45]
    smi.do("shut_down(); init()")
    assert smi.ask("len(handles())") == 2
    assert smi.ask("temperature(old)") == Refused(NOT_FOUND)
    assert smi.ask("temperature(ctypes.c_void_p())") == Refused(INVAL)


def test_handle_stays_with_its_line(fake: FakeAmdSmi, start: Start) -> None:
    """With the lines turned round each handle answers for its own, and without its line it finds nothing."""
    gpus = [Gpu(index=7, edge=7), Gpu(index=9, edge=9)]
    fake.write(gpus)
    smi = start(fake)
    smi.do("a, b = handles()")
    fake.write(gpus[::-1])
    assert smi.ask("[temperature(a), temperature(b)]") == [7, 9]
    fake.write(gpus[1:])
    assert smi.ask("temperature(a)") == Refused(NOT_FOUND)
    assert smi.ask("temperature(b)") == 9
    fake.write(gpus)
    assert smi.ask("temperature(a)") == 7


def test_faults_hit_their_call_on_their_gpu(fake: FakeAmdSmi, start: Start) -> None:
    """A fault answers its status for one call on one GPU; with stars for all; and its line gone, no more."""
    gpus = [MI300X, MI300X]
    fake.write(gpus)
    smi = start(fake)
    smi.do("a, b = handles()")
    fake.write(gpus, lines=["fault amdsmi_get_temp_metric 1 12", "fault * 1 30"])
    assert smi.ask("temperature(b)") == Refused(12)
    assert smi.ask("amdsmi_get_gpu_activity(b)") == Refused(30)
    assert smi.ask("temperature(a)") == 45
    assert smi.ask("len(handles())") == 2
    fake.write(gpus, lines=["fault * * 4294967295"])
    assert smi.ask("handles()") == Refused(4294967295)
    fake.write(gpus, lines=["fault amdsmi_get_gpu_vram_info * 12"])
    assert smi.ask("amdsmi_get_gpu_vram_info(a)") == Refused(12)
    fake.write(gpus)
    assert smi.ask("temperature(b)") == 45


def test_two_statuses_have_classes_of_their_own(fake: FakeAmdSmi, start: Start) -> None:
    """The binding raises subclasses for retry and timeout; a wrong argument is no library exception and has no code."""
    fake.write([], lines=[f"fault amdsmi_get_socket_handles * {RETRY}"])
    smi = start(fake)
    assert smi.ask("handles()") == Refused(RETRY, "AmdSmiRetryException")
    fake.write([], lines=[f"fault amdsmi_get_socket_handles * {TIMEOUT}"])
    assert smi.ask("handles()") == Refused(TIMEOUT, "AmdSmiTimeoutException")
    smi.do("try: amdsmi_get_gpu_activity(3)\nexcept AmdSmiException as error: caught = error")
    assert smi.ask("[type(caught).__name__, caught.err_code, isinstance(caught, AmdSmiLibraryException)]") == [
        "AmdSmiParameterException",
        None,
        False,
    ]


def test_lies_hide_that_nothing_could_be_read(fake: FakeAmdSmi, start: Start) -> None:
    """A lying activity is the last that was told, and a lying memory is 0, with success; a fault goes before a lie."""
    lies = [f"lie {call} 0" for call in ("amdsmi_get_gpu_activity", "amdsmi_get_gpu_memory_total")]
    lies.append("lie amdsmi_get_gpu_memory_usage *")
    fake.write([MI300X, MI300X], lines=lies)
    smi = start(fake)
    smi.do("a, b = handles(); activity = lambda h: list(amdsmi_get_gpu_activity(h).values())")
    assert smi.ask("activity(a)") == [0, 0, 0]
    fake.write([MI300X, MI300X])
    assert smi.ask("activity(a)") == [71, 32, "N/A"]
    fake.write([Gpu(), dataclasses.replace(MI300X, gfx=1)], lines=lies)
    assert smi.ask("[activity(a), activity(b)]") == [[71, 32, "N/A"], [1, 32, "N/A"]]
    assert smi.ask("[amdsmi_get_gpu_memory_total(h, VRAM) for h in (a, b)]") == [0, 192 * GIB]
    assert smi.ask("[amdsmi_get_gpu_memory_usage(h, VRAM) for h in (a, b)]") == [0, 0]
    fake.write([MI300X, MI300X], lines=[*lies, "fault amdsmi_get_gpu_activity 0 12"])
    assert smi.ask("activity(a)") == Refused(12)


def test_hanging_call_blocks_its_thread_only(fake: FakeAmdSmi, start: Start) -> None:
    """While a GPU hangs another answers; the hanging call returns when the line is gone, with what is true then."""
    fake.write([Gpu(edge=40), Gpu(edge=41)])
    smi = start(fake)
    smi.do("a, b = handles()")
    check_hang(
        smi,
        "temperature(a)",
        hang=lambda: fake.write([Gpu(edge=40), Gpu(edge=41)], lines=["hang amdsmi_get_temp_metric 0"]),
        others={"temperature(b)": 41, "len(handles())": 2},
        free=lambda: fake.write([Gpu(edge=77), Gpu(edge=41)]),
        then=77,
    )


def test_process_can_end_while_a_daemon_thread_hangs(fake: FakeAmdSmi, start: Start) -> None:
    """A call that hangs for ever does not keep the process from exiting with status 0."""
    fake.write([MI300X])
    smi = start(fake)
    fake.write([MI300X], lines=["hang * *"])
    check_exit(smi, "handles")


def test_slow_call_takes_its_time(fake: FakeAmdSmi, start: Start) -> None:
    """A slow call answers after the milliseconds of its line, and only that call on that GPU is slow."""
    fake.write([Gpu(edge=40), Gpu(edge=41)], lines=["slow amdsmi_get_temp_metric 1 400"])
    smi = start(fake)
    smi.do("a, b = handles()")
    check_slow(smi, quick="temperature(a)", slow="temperature(b)", seconds=0.4)


def test_crash_ends_the_process_by_sigsegv(fake: FakeAmdSmi, start: Start) -> None:
    """The call in a crash line kills the process; the same call on another GPU does not."""
    fake.write([MI300X, MI300X], lines=["crash amdsmi_get_temp_metric 1"])
    smi = start(fake)
    assert smi.ask("temperature(handles()[0])") == 45
    check_crash(smi, "temperature(handles()[1])")


def test_metrics_of_the_gpu_are_a_trap(fake: FakeAmdSmi, start: Start) -> None:
    """The call that would overwrite memory is recorded, and then the process is aborted with its name."""
    fake.write([MI300X])
    smi = start(fake)
    words = "amdsmi_get_gpu_metrics_info would overwrite memory"
    check_abort(smi, "amdsmi_get_gpu_metrics_info(handles()[0])", words)
    assert fake.record()[-1] == "amdsmi_get_gpu_metrics_info"


def test_record_holds_every_call(fake: FakeAmdSmi, start: Start) -> None:
    """Every call is a line, in order, refused or not, setters among them: each list of handles takes two calls."""
    assert fake.record() == []
    fake.write([MI300X], lines=["fault amdsmi_get_temp_metric * 12"])
    smi = start(fake)
    smi.do("h, = handles()")
    assert smi.ask("temperature(h)") == Refused(12)
    assert smi.ask("amdsmi_set_gpu_fan_speed(h, 0, 255)") == Refused(NOT_SUPPORTED)
    assert smi.ask("amdsmi_reset_gpu(h)") == Refused(NOT_SUPPORTED)
    smi.do("shut_down()")
    assert smi.ask("amdsmi_get_gpu_vram_info(h)") == Refused(NOT_INIT)
    assert fake.record() == [
        "amdsmi_init",
        *["amdsmi_get_socket_handles"] * 2,
        *["amdsmi_get_processor_handles"] * 2,
        "amdsmi_get_temp_metric",
        "amdsmi_set_gpu_fan_speed",
        "amdsmi_reset_gpu",
        "amdsmi_shut_down",
        "amdsmi_get_gpu_vram_info",
    ]


def test_every_symbol_is_there(library: Path) -> None:
    """The library exports what the binding looks up and nothing else of its own, and 20 of them are not stubs."""
    loaded = ctypes.CDLL(str(library))
    assert len(CALLS) == 20
    assert len(amd_smi.symbols()) > 100
    assert all(hasattr(loaded, symbol) for symbol in amd_smi.symbols())
    assert not hasattr(loaded, "stub")


@pytest.mark.parametrize("symbol", ["amdsmi_get_gpu_enumeration_info", "amdsmi_get_gpu_cper_entries"])
def test_older_library_cannot_be_imported(tmp_path: Path, symbol: str) -> None:
    """Where one symbol is missing, of ours or a stub, the import ends with an AttributeError that names it."""
    fake = FakeAmdSmi(tmp_path, build_or_skip(tmp_path, [symbol]))
    ended = started_importing(fake.environment())
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("AttributeError: ")
    assert f"undefined symbol: {symbol}" in ended.stderr.splitlines()[-1]


def test_import_without_a_library_is_a_key_error(tmp_path: Path, library: Path) -> None:
    """Where there is no library the binding says so on stdout, and its import ends with a KeyError."""
    assert library.exists()  # or the binding is not there either
    if ctypes.util.find_library("amd_smi") is not None:
        pytest.skip("AMD's library is installed here")
    ended = started_importing({"ROCM_PATH": str(tmp_path)})
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == f"KeyError: '{SONAME}'"
    assert "cannot open shared object file" in ended.stdout
    assert "Unable to find libamd_smi.so" in ended.stdout


def test_unknown_symbol_cannot_be_left_out(library: Path, tmp_path: Path) -> None:
    """Leaving out what does not exist is an error, since the variant would be no variant."""
    assert library.exists()
    with pytest.raises(ValueError, match="amdsmi_get_nothing"):
        build(tmp_path, ["amdsmi_get_nothing"])


def test_each_write_is_seen_by_the_next_call(fake: FakeAmdSmi, start: Start) -> None:
    """Files of the same size, written as fast as can be, are told apart."""
    fake.write([Gpu(edge=100)])
    smi = start(fake)
    smi.do("h, = handles()")
    check_writes(smi, "temperature(h)", lambda edge: fake.write([Gpu(edge=edge)]), range(100, 200))


def test_many_threads_see_whole_states(fake: FakeAmdSmi, start: Start) -> None:
    """Eight threads that read while the file changes never see half of a state or another GPU's values."""

    def write(values: Sequence[tuple[int, int]]) -> None:
        fake.write([Gpu(index=i, gfx=v, umc=v, mm=v) for i, v in values])

    write([(i, i) for i in range(8)])
    smi = start(fake)
    smi.do("hs = handles()")
    check_whole_states(smi, "amdsmi_get_gpu_activity(hs[i]).values()", write)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("gpu 0 colour=red", "unknown word: colour"),
        ("gpu 0 edge=warm", "not a number: warm"),
        ("gpu 0 bdf=c1:00.0", "not a PCI address: c1:00.0"),
        ("gpu 0 bdf=0:c1:20.0", "not a PCI address: 0:c1:20.0"),
        ("lie amdsmi_get_temp_metric 0", "a call that does not lie: amdsmi_get_temp_metric"),
        ("lose 0", "unknown word: lose"),
        ("version 26 0", "a word is missing"),
        ("driver 6 14", "one word too many: 14"),
    ],
)
def test_nonsense_in_the_state_aborts(fake: FakeAmdSmi, start: Start, line: str, complaint: str) -> None:
    """A line that makes no sense ends the process with a message that names the line and what is wrong."""
    check_nonsense(fake, start, "init()", line, complaint)


def test_two_lines_of_one_gpu_abort(fake: FakeAmdSmi, start: Start) -> None:
    """Two GPUs cannot have the same number."""
    fake.write([Gpu(index=1), Gpu()])
    with pytest.raises(AssertionError, match="a second line for GPU: 1"):
        start(fake)


def test_writer_refuses_what_would_never_match(fake: FakeAmdSmi) -> None:
    """A rule for a call that does not exist and text that cannot be quoted are errors, and nothing is written."""
    check_writer(fake, "amdsmi_get_gpu_memory", Gpu(name='a "b"'))


def test_missing_compiler_fails_in_ci_and_skips_elsewhere(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a C compiler CI fails with its name, and everywhere else the skip says it."""
    assert library.exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    check_missing(monkeypatch, lambda: build_or_skip(tmp_path), "no C compiler 'cc'", MissingError)


def test_missing_binding_names_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the binding there is nothing to find the symbols in, and the error names the package that has it."""
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    monkeypatch.setenv("CI", "true")
    amd_smi.symbols.cache_clear()
    try:
        with pytest.raises(MissingError, match="pip install amdsmi"):
            build_or_skip(tmp_path)
    finally:
        amd_smi.symbols.cache_clear()
