"""The pretend Level Zero loader does what it says, seen through the real ``pyzes`` in a process of its own."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator
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
    check_writer,
    check_writes,
    starting,
)
from tests.fakes.shared_object import CompilerMissingError
from tests.fakes.ze_loader import (
    CALLS,
    OLD_LOADER_LACKS,
    PYZES_PATH,
    REDIRECT,
    SONAME,
    Engine,
    FakeZeLoader,
    Frequency,
    Gpu,
    Memory,
    Power,
    Temperature,
    build,
    build_or_skip,
    layouts,
    place_or_skip,
)

pytestmark = pytest.mark.e2e

DEVICE_LOST, UNINITIALIZED, UNSUPPORTED = 0x70000001, 0x78000001, 0x78000003
INVALID_ARGUMENT, NULL_HANDLE, NULL_POINTER, INVALID_ENUMERATION = 0x78000004, 0x78000005, 0x78000007, 0x7800000C

CHILD = """
from pyzes import *
import pyzes
from pyzes import _PrintableStructure

class REFUSAL(Exception):
    pass

def refusal(refused):
    return refused.args

def ask(call, *arguments):
    code = call(*arguments)
    if code:
        raise REFUSAL(code)

def listed(call, kind, *owner):
    count = c_uint32(0)
    ask(call, *owner, byref(count), None)
    found = (kind * count.value)()
    ask(call, *owner, byref(count), found)
    return list(found)

def filled(call, handle, struct, stype=None, **given):
    out = struct(**({} if stype is None else {"stype": stype}), **given)
    ask(call, handle, byref(out))
    return out

def plain(value):
    if isinstance(value, Array):
        return bytes(value).hex()
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, Structure):
        return {name: plain(getattr(value, name)) for name, _ in value._fields_ if name not in {"stype", "pNext"}}
    return value

def devices(driver=0):
    return listed(zesDeviceGet, zes_device_handle_t, listed(zesDriverGet, zes_driver_handle_t)[driver])

def properties(device, **given):
    own = ZES_STRUCTURE_TYPE_DEVICE_PROPERTIES
    return filled(zesDeviceGetProperties, device, zes_device_properties_t, own, **given)

def address(device):
    return filled(zesDevicePciGetProperties, device, zes_pci_properties_t, ZES_STRUCTURE_TYPE_PCI_PROPERTIES).address

def engines(device):
    return listed(zesDeviceEnumEngineGroups, zes_engine_handle_t, device)

def engine(handle):
    return filled(zesEngineGetProperties, handle, zes_engine_properties_t, ZES_STRUCTURE_TYPE_ENGINE_PROPERTIES)

def activity(handle):
    return filled(zesEngineGetActivity, handle, zes_engine_stats_t)

def memories(device):
    return listed(zesDeviceEnumMemoryModules, zes_mem_handle_t, device)

def memory(handle):
    return filled(zesMemoryGetProperties, handle, zes_mem_properties_t, ZES_STRUCTURE_TYPE_MEM_PROPERTIES)

def memory_state(handle):
    return filled(zesMemoryGetState, handle, zes_mem_state_t, ZES_STRUCTURE_TYPE_MEM_STATE)

def sensors(device):
    return listed(zesDeviceEnumTemperatureSensors, zes_temp_handle_t, device)

def sensor(handle):
    return filled(zesTemperatureGetProperties, handle, zes_temp_properties_t, ZES_STRUCTURE_TYPE_TEMP_PROPERTIES)

def celsius(handle):
    return filled(zesTemperatureGetState, handle, c_double).value

def clocks(device):
    return listed(zesDeviceEnumFrequencyDomains, zes_freq_handle_t, device)

def clock(handle):
    return filled(zesFrequencyGetState, handle, zes_freq_state_t, ZES_STRUCTURE_TYPE_FREQ_STATE)

def powers(device):
    return listed(zesDeviceEnumPowerDomains, zes_pwr_handle_t, device)

def energy(handle):
    return filled(zesPowerGetEnergyCounter, handle, zes_power_energy_counter_t)
"""
MAX_1550 = Gpu(
    bdf="0000:3b:00.0",
    name="Intel(R) Data Center GPU Max 1550",
    device_id=0x0BD5,
    subdevices=2,
    uuid="8680d50b-2f00-0000-3b00-000000000000",
    engines=(
        Engine(group="ALL", active=1_000, timestamp=4_000),
        Engine(group="COMPUTE_ALL", sub=1, active=2**64 - 1, timestamp=2**63),
    ),
    memory=(
        Memory(sub=0, physical=64 << 30, size=60 << 30, free=50 << 30),
        Memory(location="SYSTEM", physical=0, size=7, free=3),
    ),
    temperatures=(Temperature(sub=1, celsius=41.5), Temperature(sensor="MEMORY", celsius=-3)),
    frequencies=(Frequency(actual=1_550.5, request=1_600), Frequency(actual=0)),
    powers=(Power(energy=5_000_000, timestamp=9),),
)
IRIS = Gpu(bdf="0000:00:02.0", name="Intel(R) Iris(R) Xe Graphics", device_id=0x46A6, integrated=True, subdevices=0)


class Refused(NamedTuple):
    """The result of a call that was no success."""

    code: int


class PyzesChild(Child):
    """A process in which ``from pyzes import *`` has been done."""

    def __init__(self, fake: FakeZeLoader, *, placed: bool = False) -> None:
        redirect, within = ("", fake.placed) if placed else (REDIRECT.format(library=str(fake.shared_object)), list)
        super().__init__(redirect + CHILD, {**os.environ, **fake.environment()}, Refused, within)

    def counter(self, expression: str) -> tuple[int, int]:
        """The two numbers of a counter: how far it is, and when."""
        value = self.ask(expression)
        assert isinstance(value, dict)
        count, stamp = value.values()
        return count, stamp


Start = Callable[..., PyzesChild]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_or_skip(tmp_path_factory.mktemp("ze_loader"))


@pytest.fixture
def fake(tmp_path: Path, library: Path) -> FakeZeLoader:
    return FakeZeLoader(tmp_path, library)


@pytest.fixture
def start() -> Iterator[Start]:
    with starting(PyzesChild, "ask(zesInit, 0)") as start_child:
        yield start_child


def test_pyzes_reads_what_a_device_is(fake: FakeZeLoader, start: Start) -> None:
    """Name, numbers, flags, UUID and PCI address of each device come through; what Sysman may not know is "unknown"."""
    fake.write([MAX_1550, IRIS])
    ze = start(fake)
    ze.do("big, small = devices()")
    big = ze.ask("properties(big)")
    assert isinstance(big, dict)
    assert big["core"]["name"] == "Intel(R) Data Center GPU Max 1550"
    assert [big["core"][key] for key in ("type", "vendorId", "deviceId", "flags")] == [1, 0x8086, 0x0BD5, 0]
    assert big["core"]["uuid"] == {"id": "8680d50b2f0000003b00000000000000"}
    assert [big["numSubdevices"], big["serialNumber"], big["driverVersion"]] == [2, "unknown", "unknown"]
    assert ze.ask("[properties(small).core.flags, properties(small).numSubdevices]") == [1, 0]
    assert ze.ask("address(big)") == {"domain": 0, "bus": 0x3B, "device": 0, "function": 0}
    assert ze.ask("address(small)") == {"domain": 0, "bus": 0, "device": 2, "function": 0}


def test_pyzes_reads_every_part_of_a_device(fake: FakeZeLoader, start: Start) -> None:
    """What was written for an engine, memory, sensor, clock and power domain is what pyzes says, 64 bits included."""
    fake.write([MAX_1550, IRIS])
    ze = start(fake)
    ze.do("big, small = devices()")
    assert ze.ask("[plain(engine(h)) for h in engines(big)]") == [
        {"type": 0, "onSubdevice": 0, "subdeviceId": 0},
        {"type": 1, "onSubdevice": 1, "subdeviceId": 1},
    ]
    assert ze.ask("[plain(activity(h)) for h in engines(big)]") == [
        {"activeTime": 1_000, "timestamp": 4_000},
        {"activeTime": 2**64 - 1, "timestamp": 2**63},
    ]
    unknown = {"type": 17, "busWidth": -1, "numChannels": -1}
    assert ze.ask("[plain(memory(h)) for h in memories(big)]") == [
        {"onSubdevice": 1, "subdeviceId": 0, "location": 1, "physicalSize": 64 << 30, **unknown},
        {"onSubdevice": 0, "subdeviceId": 0, "location": 0, "physicalSize": 0, **unknown},
    ]
    assert ze.ask("[plain(memory_state(h)) for h in memories(big)]") == [
        {"health": 0, "free": 50 << 30, "size": 60 << 30},
        {"health": 0, "free": 3, "size": 7},
    ]
    assert ze.ask("[[s.type, s.onSubdevice, s.subdeviceId] for s in map(sensor, sensors(big))]") == [
        [1, 1, 1],
        [2, 0, 0],
    ]
    assert ze.ask("[celsius(h) for h in sensors(big)]") == [41.5, -3]
    assert ze.ask("[[c.actual, c.request, c.tdp] for c in map(clock, clocks(big))]") == [
        [1550.5, 1600, -1],
        [0, -1, -1],
    ]
    assert ze.ask("[plain(energy(h)) for h in powers(big)]") == [{"energy": 5_000_000, "timestamp": 9}]
    assert ze.ask("[len(f(small)) for f in (engines, memories, sensors, clocks, powers)]") == [0] * 5


def test_extended_properties_come_through_the_chain(fake: FakeZeLoader, start: Start) -> None:
    """A chained struct is found behind one of another type; flags are added to what the caller left there."""
    fake.write([dataclasses.replace(MAX_1550, integrated=True, type="VPU"), Gpu(name="", device_id=1)])
    ze = start(fake)
    ze.do("device, bare = devices()")
    ze.do("ext = zes_device_ext_properties_t(stype=ZES_STRUCTURE_TYPE_DEVICE_EXT_PROPERTIES, flags=8)")
    ze.do("other = zes_device_ext_properties_t(stype=0x2E, pNext=cast(pointer(ext), c_void_p))")
    ze.do("found = properties(device, pNext=cast(pointer(other), c_void_p))")
    assert ze.ask("ext") == {"uuid": {"id": "8680d50b2f0000003b00000000000000"}, "type": 5, "flags": 9}
    assert ze.ask("[other.type, other.flags, found.core.type, found.core.flags]") == [0, 0, 5, 1]
    ze.do("found.core.flags = 8; ask(zesDeviceGetProperties, device, byref(found))")
    assert ze.ask("found.core.flags") == 9
    ze.do("found.core.flags = 0; ask(zesDeviceGetProperties, bare, byref(found))")
    assert ze.ask("[plain(found.core.uuid), found.core.type, found.core.flags]") == [
        {"id": "8680d50b2f0000003b00000000000000"},
        1,
        0,
    ]


def test_tiles_have_uuids_of_their_own(fake: FakeZeLoader, start: Start) -> None:
    """A tile's UUID differs from its card's in the last byte only, and a card without tiles lists none."""
    fake.write([MAX_1550, dataclasses.replace(MAX_1550, bdf="0000:3c:00.0", subdevices=0)])
    ze = start(fake)
    ze.do("big, small = devices(); n = c_uint32(0); ask(zesDeviceGetSubDevicePropertiesExp, big, byref(n), None)")
    ze.do("tiles = (zes_subdevice_exp_properties_t * 2)()")
    ze.do("for tile in tiles: tile.stype = ZES_STRUCTURE_TYPE_SUBDEVICE_EXP_PROPERTIES")
    ze.do("ask(zesDeviceGetSubDevicePropertiesExp, big, byref(n), tiles)")
    assert ze.ask("[n.value, *map(plain, tiles)]") == [
        2,
        {"subdeviceId": 0, "uuid": {"id": "8680d50b2f0000003b00000000000001"}},
        {"subdeviceId": 1, "uuid": {"id": "8680d50b2f0000003b00000000000002"}},
    ]
    ze.do("n.value = 0; ask(zesDeviceGetSubDevicePropertiesExp, small, byref(n), None)")
    assert ze.ask("n.value") == 0


def test_lists_are_filled_as_far_as_there_is_room(fake: FakeZeLoader, start: Start) -> None:
    """A count below the total is filled and stays, one above it shrinks, and a count without an array is refused."""
    fake.write([Gpu(bdf=f"0000:{bus:02x}:00.0") for bus in (1, 2, 3)])
    ze = start(fake)
    ze.do("(driver,) = listed(zesDriverGet, zes_driver_handle_t); all = devices()")
    for room, filled in ((2, 2), (3, 3), (5, 3)):
        ze.do(f"n = c_uint32({room}); some = (zes_device_handle_t * 5)()")
        ze.do("ask(zesDeviceGet, driver, byref(n), some)")
        assert ze.ask("[n.value, [h.value for h in some]]") == [
            filled,
            ze.ask(f"[h.value for h in all[:{filled}]] + [None] * {5 - filled}"),
        ]
    assert ze.ask("zesDeviceGet(driver, byref(n), None)") == INVALID_ARGUMENT
    assert ze.ask("zesDeviceGet(driver, None, None)") == NULL_POINTER
    assert ze.ask("zesDeviceGet(None, byref(n), None)") == NULL_HANDLE
    assert ze.ask("zesDeviceGet(zes_driver_handle_t(all[0].value), byref(n), None)") == INVALID_ARGUMENT


def test_each_driver_has_its_devices(fake: FakeZeLoader, start: Start) -> None:
    """Devices are listed by their own driver only, one may be no GPU, and without drivers nothing can be begun."""
    npu = Gpu(driver=1, bdf="0000:00:0b.0", name="Intel(R) AI Boost", device_id=0x7D1D, type="VPU")
    fake.write([npu, IRIS, MAX_1550], drivers=3)
    ze = start(fake)
    assert ze.ask("[[properties(h).core.deviceId for h in devices(driver)] for driver in range(3)]") == [
        [0x46A6, 0x0BD5],
        [0x7D1D],
        [],
    ]
    assert ze.ask("[properties(h).core.type for h in devices(1)]") == [5]
    fake.write([], drivers=0)
    assert ze.ask("zesInit(0)") == UNINITIALIZED
    assert ze.ask("zesInit(2)") == INVALID_ENUMERATION


def test_left_out_keys_are_unsupported(fake: FakeZeLoader, start: Start) -> None:
    """A device and parts without keys have handles, and every call about them that needs one is unsupported."""
    nothing = Engine(group=None, active=None, timestamp=None)
    fake.write(
        [
            Gpu(
                engines=(nothing,),
                memory=(Memory(location=None, physical=None),),
                temperatures=(Temperature(sensor=None),),
                frequencies=(Frequency(),),
                powers=(Power(),),
            )
        ]
    )
    ze = start(fake)
    ze.do("(d,) = devices(); n = c_uint32(0)")
    for call in (
        "properties(d)",
        "address(d)",
        "ask(zesDeviceGetSubDevicePropertiesExp, d, byref(n), None)",
        "engine(engines(d)[0])",
        "activity(engines(d)[0])",
        "memory(memories(d)[0])",
        "memory_state(memories(d)[0])",
        "sensor(sensors(d)[0])",
        "celsius(sensors(d)[0])",
        "clock(clocks(d)[0])",
        "energy(powers(d)[0])",
        "filled(zesMemoryGetBandwidth, memories(d)[0], zes_mem_bandwidth_t)",
        "ask(zesPowerGetLimitsExt, powers(d)[0], byref(n), None)",
    ):
        assert ze.ask(call) == Refused(UNSUPPORTED), call


def test_struct_of_another_type_is_refused(fake: FakeZeLoader, start: Start) -> None:
    """Each struct that has a type must say its own, or else the call is an invalid argument."""
    fake.write([MAX_1550])
    ze = start(fake)
    ze.do("(d,) = devices(); n = c_uint32(2)")
    for call in (
        "filled(zesDeviceGetProperties, d, zes_device_properties_t)",
        "filled(zesDevicePciGetProperties, d, zes_pci_properties_t)",
        "filled(zesEngineGetProperties, engines(d)[0], zes_engine_properties_t)",
        "filled(zesMemoryGetProperties, memories(d)[0], zes_mem_properties_t)",
        "filled(zesMemoryGetState, memories(d)[0], zes_mem_state_t)",
        "filled(zesTemperatureGetProperties, sensors(d)[0], zes_temp_properties_t)",
        "filled(zesFrequencyGetState, clocks(d)[0], zes_freq_state_t)",
        "filled(zesFrequencyGetProperties, clocks(d)[0], zes_freq_properties_t)",
        "filled(zesPowerGetProperties, powers(d)[0], zes_power_properties_t)",
        "ask(zesDeviceGetSubDevicePropertiesExp, d, byref(n), (zes_subdevice_exp_properties_t * 2)())",
    ):
        assert ze.ask(call) == Refused(INVALID_ARGUMENT), call


def test_nothing_answers_before_init_or_without_a_state(fake: FakeZeLoader, start: Start) -> None:
    """Without the file init fails, before it all calls do, and a file that goes away takes the drivers with it."""
    ze = start(fake, init=False)
    assert ze.ask("zesInit(0)") == UNINITIALIZED
    fake.write([IRIS])
    assert ze.ask("devices()") == Refused(UNINITIALIZED)
    ze.do("ask(zesInit, 0); (d,) = devices()")
    fake.remove()
    assert ze.ask("properties(d)") == Refused(UNINITIALIZED)
    fake.write([IRIS])
    assert ze.ask("properties(d).core.deviceId") == 0x46A6


def test_layouts_are_those_of_pyzes(fake: FakeZeLoader, tmp_path: Path, start: Start) -> None:
    """Every struct of the C side has the size and the members of pyzes's class of that name, at the same offsets.

    What pyzes lacks is as the backend has it.
    """
    ze = start(fake, init=False)
    ze.do("from exporter.backends.intel.sysman_calls import Calls; calls = Calls(pyzes)")
    ours = layouts(tmp_path)
    ze.do("def layout(c): return {n: [getattr(c, n).offset, getattr(c, n).size] for n, _ in c._fields_}")
    assert len(ours) == 24
    for struct, members in ours.items():
        theirs = ze.ask(f"{{'-': [0, sizeof(calls.{struct})], **layout(calls.{struct})}}")
        assert {name: list(place) for name, place in members.items()} == theirs, struct


def test_library_has_its_calls_only_and_its_name(fake: FakeZeLoader, start: Start) -> None:
    """Everything in CALLS is there, pyzes's other calls are not, setters among them, and the soname is the real one."""
    ze = start(fake, init=False)
    ze.do("known = [name for name in dir(pyzes) if name.startswith('zes') and type(getattr(pyzes, name)) is type(ask)]")
    assert len(CALLS) == 29
    beside = {name for name in CALLS if "Fan" in name or "Ras" in name}
    assert ze.ask("[name for name in known if hasattr(pyzes.gpuLib, name)]") == sorted(CALLS - beside)
    assert ze.ask("[name for name in dir(pyzes) if 'Fan' in name or 'Ras' in name]") == []
    assert ze.ask("sum('Set' in name for name in known)") == 3
    assert ze.ask(f"PyDLL({SONAME!r})._name") == SONAME  # found because it is loaded, and not where it lies
    with pytest.raises(AssertionError, match=r"AttributeError: .* undefined symbol: zesFrequencySetRange"):
        ze.ask("zesFrequencySetRange(None, None)")


def test_old_loader_lacks_what_was_left_out(tmp_path: Path, start: Start) -> None:
    """Symbols that were left out raise AttributeError in pyzes, all can be left out, and unknown ones cannot."""
    fake = FakeZeLoader(tmp_path, build_or_skip(tmp_path, OLD_LOADER_LACKS))
    fake.write([IRIS])
    ze = start(fake, init=False)
    assert ze.ask("zesDeviceEnumPowerDomains(None, None, None)") == UNINITIALIZED
    with pytest.raises(AssertionError, match=r"AttributeError: .* undefined symbol: zesInit"):
        ze.ask("zesInit(0)")
    empty = ctypes.CDLL(str(build_or_skip(tmp_path / "empty", sorted(CALLS))))
    assert not any(hasattr(empty, symbol) for symbol in CALLS)
    with pytest.raises(ValueError, match="zesPowerSetLimits"):
        build(tmp_path, ["zesPowerSetLimits"])


def test_faults_hit_their_call_on_their_gpu(fake: FakeZeLoader, start: Start) -> None:
    """A fault answers its status for one call on one GPU and its parts, or for all; with its line gone, no more."""
    gpus = [MAX_1550, dataclasses.replace(MAX_1550, bdf="0000:5e:00.0")]
    fake.write(gpus)
    ze = start(fake)
    ze.do("a, b = devices(); hot = [sensors(d)[0] for d in (a, b)]")
    fake.write(gpus, lines=["fault zesTemperatureGetState 1 0x70010000", "fault zesInit 17"])
    assert ze.ask("celsius(hot[1])") == Refused(0x70010000)
    assert ze.ask("[celsius(hot[0]), sensor(hot[1]).type, zesInit(0)]") == [41.5, 1, 17]
    fake.write(gpus, lines=[f"fault * 1 {DEVICE_LOST}"])
    for call in ("properties(b)", "engines(b)", "celsius(hot[1])"):
        assert ze.ask(call) == Refused(DEVICE_LOST), call
    assert ze.ask("[len(devices()), celsius(hot[0])]") == [2, 41.5]
    fake.write(gpus, lines=["fault * * 21"])
    assert ze.ask("devices()") == Refused(21)
    fake.write(gpus)
    assert ze.ask("celsius(hot[1])") == 41.5


def test_hanging_call_blocks_its_thread_only(fake: FakeZeLoader, start: Start) -> None:
    """While one GPU hangs another answers; the hanging call returns when the line is gone, with what is true then."""
    gpus = [MAX_1550, dataclasses.replace(MAX_1550, bdf="0000:5e:00.0")]
    fake.write(gpus)
    ze = start(fake)
    ze.do("a, b = (sensors(d)[0] for d in devices())")
    check_hang(
        ze,
        "celsius(a)",
        hang=lambda: fake.write(gpus, lines=["hang zesTemperatureGetState 0"]),
        others={"celsius(b)": 41.5, "sensor(a).type": 1},
        free=lambda: fake.write([dataclasses.replace(MAX_1550, temperatures=(Temperature(celsius=77),)), gpus[1]]),
        then=77,
    )
    fake.write(gpus, lines=["hang *"])
    check_exit(ze, "devices")


def test_slow_call_takes_its_time_and_a_crash_ends_the_process(fake: FakeZeLoader, start: Start) -> None:
    """Only the call in the rule is slow, for its milliseconds, and only the one in a crash rule ends by SIGSEGV."""
    rules = ["slow zesTemperatureGetState 300", "crash zesEngineGetActivity 0"]
    fake.write([MAX_1550], lines=rules)
    ze = start(fake)
    ze.do("(d,) = devices()")
    check_slow(ze, quick="sensor(sensors(d)[0])", slow="celsius(sensors(d)[0])", seconds=0.3)
    check_crash(ze, "activity(engines(d)[0])")


def test_handles_stay_with_their_device(fake: FakeZeLoader, start: Start) -> None:
    """With the order turned round each handle answers for its own device; one that is gone is lost until it is back."""
    fake.write([MAX_1550, IRIS])
    ze = start(fake)
    ze.do("big, small = devices(); hot = sensors(big)[0]; before = [h.value for h in devices()]")
    fake.write([IRIS, MAX_1550])
    assert ze.ask("[h.value for h in devices()] == before[::-1]") is True
    assert ze.ask("[properties(h).core.deviceId for h in (big, small)]") == [0x0BD5, 0x46A6]
    fake.write([IRIS])
    assert ze.ask("properties(big)") == Refused(DEVICE_LOST)
    assert ze.ask("celsius(hot)") == Refused(DEVICE_LOST)
    fake.write([IRIS, MAX_1550])
    assert ze.ask("celsius(hot)") == 41.5


def test_each_write_is_seen_by_the_next_call(fake: FakeZeLoader, start: Start) -> None:
    """Files of the same size, written as fast as can be, are told apart."""
    fake.write([MAX_1550])
    ze = start(fake)
    ze.do("hot = sensors(devices()[0])[0]")

    def write(celsius: int) -> None:
        fake.write([Gpu(bdf=MAX_1550.bdf, temperatures=(Temperature(celsius=celsius),))])

    check_writes(ze, "celsius(hot)", write, range(100, 150))


def test_counters_move_at_their_rate(fake: FakeZeLoader, start: Start) -> None:
    """With a rate the time moves with the clock and the activity, or the energy, at that share of it."""
    engine = Engine(active=5_000, timestamp=7_000, rate=0.25)
    fake.write([Gpu(engines=(engine, Engine(active=1, timestamp=2)), powers=(Power(energy=10, rate=150),))])
    ze = start(fake)
    ze.do("(d,) = devices(); moving, still = engines(d); (watts,) = powers(d)")
    begin = time.monotonic()
    first, power = ze.counter("activity(moving)"), ze.counter("energy(watts)")
    time.sleep(0.1)
    second, more = ze.counter("activity(moving)"), ze.counter("energy(watts)")
    elapsed = (time.monotonic() - begin) * 1e6
    assert first[0] >= 5_000
    assert first[1] >= 7_000
    assert 100_000 <= second[1] - first[1] <= elapsed
    assert second[0] - first[0] == pytest.approx(0.25 * (second[1] - first[1]), abs=2)
    assert more[0] - power[0] == pytest.approx(150 * (more[1] - power[1]), abs=200)
    assert ze.counter("activity(still)") == (1, 2)


def test_moving_counter_goes_on_until_its_values_change(fake: FakeZeLoader, start: Start) -> None:
    """Changes elsewhere leave a counter moving, a new rate holds from then on, and new values are where it restarts."""

    def write(name: str, engine: Engine) -> None:
        fake.write([Gpu(bdf="0000:00:02.0", name=name, engines=(engine,))])

    write("before", Engine(rate=1))
    ze = start(fake)
    ze.do("(e,) = engines(devices()[0])")
    time.sleep(0.05)
    write("after", Engine(rate=1))
    first = ze.counter("activity(e)")
    write("after", Engine(rate=0))
    stopped = ze.counter("activity(e)")
    time.sleep(0.02)
    later = ze.counter("activity(e)")
    assert first[1] >= 50_000
    assert first[0] == pytest.approx(first[1], abs=2)
    assert stopped[0] >= first[0]
    assert later[0] == stopped[0]
    assert later[1] - stopped[1] >= 20_000
    write("after", Engine(active=3, timestamp=1, rate=0))
    restarted = ze.counter("activity(e)")
    assert restarted[0] == 3
    assert restarted[1] < later[1]
    write("after", Engine(active=3, timestamp=1))
    assert ze.counter("activity(e)") == (3, 1)


def test_record_holds_every_call(fake: FakeZeLoader, start: Start) -> None:
    """Every call is one line of the record, also if it is refused, and there is none before the first."""
    fake.write([IRIS], lines=["fault zesDevicePciGetProperties 0 999"])
    assert fake.record() == []
    ze = start(fake)
    ze.ask("address(devices()[0])")
    lists = ["zesDriverGet", "zesDriverGet", "zesDeviceGet", "zesDeviceGet"]
    assert fake.record() == ["zesInit", *lists, "zesDevicePciGetProperties"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("gpu 0 celsius=3", "unknown word: celsius"),
        ("gpu 0 bdf=3b:00", "not a PCI address: 3b:00"),
        ("gpu 0 uuid=8680", "not a UUID: 8680"),
        ("gpu 0 integrated=2", "neither 0 nor 1: 2"),
        ("engine 0 0 group=NONE", "unknown word: NONE"),
        ("temperature 0 0 celsius=warm", "not a number: warm"),
        ("lose 0", "unknown word: lose"),
        ("fault zesInit", "a word is missing"),
        ("hang zesInit 0 1", "one word too many: 1"),
    ],
)
def test_nonsense_in_the_state_aborts(fake: FakeZeLoader, start: Start, line: str, complaint: str) -> None:
    """A line that makes no sense ends the process with a message that names the line and what is wrong."""
    check_nonsense(fake, start, "zesInit(0)", line, complaint)


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["engine 0 0"], "no such GPU for a part: 0"),
        (["gpu 0", "gpu 0"], "two lines about the same: index 0 0"),
    ],
)
def test_lines_that_do_not_fit_abort(fake: FakeZeLoader, start: Start, lines: list[str], complaint: str) -> None:
    """A part needs its GPU's line, and nothing has two."""
    fake.write([], lines=lines)
    with pytest.raises(AssertionError, match=complaint):
        start(fake, init=False).ask("zesInit(0)")


def test_writer_refuses_what_would_never_match(tmp_path: Path) -> None:
    """A rule for a call that does not exist and text that cannot be quoted are errors, and nothing is written."""
    check_writer(FakeZeLoader(tmp_path, tmp_path / SONAME), "zesDeviceGetName", Gpu(name='a "b"'))


def test_pyzes_finds_the_placed_library_by_itself(fake: FakeZeLoader, start: Start) -> None:
    """Started as placed, a program finds the library at pyzes's own path; outside it the system is as it was."""
    place_or_skip(fake)
    before = PYZES_PATH.exists(), sorted(PYZES_PATH.parent.iterdir())
    fake.write([IRIS])
    ze = start(fake, placed=True)
    assert ze.ask("[pyzes.gpuLib._name, properties(devices()[0]).core.deviceId]") == [str(PYZES_PATH), 0x46A6]
    assert (PYZES_PATH.exists(), sorted(PYZES_PATH.parent.iterdir())) == before
    assert str(fake.state_path.parent) not in Path("/proc/self/mounts").read_text()
    ze.process.terminate()
    assert ze.end()[0] == -signal.SIGTERM


@pytest.mark.parametrize("missing", ["compiler", "pyzes", "root"])
def test_what_is_missing_fails_in_ci_and_skips_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Without a C compiler, pyzes or root CI fails with its name, and everywhere else the skip says it."""
    attempts: dict[str, tuple[Callable[[], object], str]] = {
        "compiler": (lambda: build_or_skip(tmp_path), "no C compiler 'cc'"),
        "pyzes": (lambda: build_or_skip(tmp_path), "pip install pyzes"),
        "root": (lambda: place_or_skip(FakeZeLoader(tmp_path, tmp_path / SONAME)), "only root can place"),
    }
    attempt, words = attempts[missing]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    found = None if missing == "pyzes" else object()
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: found)
    failure = CompilerMissingError if missing == "compiler" else pytest.fail.Exception
    check_missing(monkeypatch, attempt, words, failure)
