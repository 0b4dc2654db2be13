"""The pretend Level Zero driver does what it says, seen through plain ``ctypes`` in a process of its own."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.fakes import ze_loader
from tests.fakes.checks import Child, check_crash, check_nonsense, check_slow, check_writer, starting
from tests.fakes.ze_driver import CALLS, REFUSED_CALLS, FakeZeDriver, Gpu, build, build_or_skip

pytestmark = pytest.mark.e2e

UNINITIALIZED, UNSUPPORTED, INVALID_ARGUMENT = 0x78000001, 0x78000003, 0x78000004
NULL_HANDLE, NULL_POINTER, INVALID_ENUMERATION = 0x78000005, 0x78000007, 0x7800000C

CHILD = """
import os
from ctypes import *
lib = CDLL("libze_loader.so.1")
refusal, plain = (lambda refused: refused.args), (lambda value: value)
class REFUSAL(Exception): pass
def ask(call, *arguments):
    if code := getattr(lib, call)(*arguments): raise REFUSAL(code)
def listed(call, *owner):
    count = c_uint32(0)
    ask(call, *owner, byref(count), None)
    found = (c_void_p * count.value)()
    ask(call, *owner, byref(count), found)
    return [c_void_p(handle) for handle in found]
def filled(call, handle, struct, stype):
    out = struct(stype)
    ask(call, handle, byref(out))
    return out
def struct(*fields):
    return type("Struct", (Structure,), {"_fields_": [("stype", c_int32), ("pNext", c_void_p), *fields]})
u32, uuid, place = c_uint32, ("uuid", c_ubyte * 16), ("domain", "bus", "device", "function")
Kinds, Driver = struct(("flags", u32)), struct(uuid, ("version", u32))
Pci = struct(*((name, u32) for name in place), ("gen", c_int32), ("width", c_int32), ("bandwidth", c_int64))
Device = struct(*((n, u32) for n in ("type", "vendor", "id", "flags", "sub", "clock")), ("most", c_uint64),
    *((f"n{i}", u32) for i in range(7)), ("timer", c_uint64), ("b1", u32), ("b2", u32), uuid, ("name", c_char * 256))
properties = lambda device: filled("zeDeviceGetProperties", device, Device, 3)
address = lambda device: filled("zeDevicePciGetPropertiesExt", device, Pci, 0x10008)
def about(device):
    found, below, root = properties(device), listed("zeDeviceGetSubDevices", device), c_void_p()
    ask("zeDeviceGetRootDevice", device, byref(root))
    return [f"{address(device).bus:x}", found.flags, found.sub, len(below), root.value is not None]
def tree():
    ask("zeInit", 0)
    return [[about(device) for device in listed("zeDeviceGet", driver)] for driver in listed("zeDriverGet")]
def under(environment):
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.environ.update(environment)
        try:
            os.write(writer, json.dumps(lib.zeInit(0) or tree()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    text = open(reader).read()
    return f"signal {died & 0x7F}" if (died := os.wait()[1]) else json.loads(text)
def buses(environment):
    found = under(environment)
    return found if not isinstance(found, list) else " | ".join(" ".join(
        bus + (f".{sub}" if sub or flags & 2 else "") for bus, flags, sub, *_ in driver) for driver in found)
"""
UHD = Gpu(bdf="0000:00:02.0", name="Intel(R) UHD Graphics 770", device_id=0x4680, integrated=True, rank=1)
A770 = Gpu(bdf="0000:03:00.0", name="Intel(R) Arc(TM) A770 Graphics", device_id=0x56A0, rank=2)
B580 = Gpu(bdf="0000:0a:00.0", name="Intel(R) Arc(TM) B580 Graphics", device_id=0xE20B, rank=3)
HIDDEN = Gpu(bdf="0000:02:00.0", accessible=False, rank=9, hpc=True)
MAX = Gpu(bdf="0001:2a:00.0", name="Intel(R) Data Center GPU Max 1550", device_id=0x0BD5, tiles=2, hpc=True)
MAX_2 = Gpu(bdf="0001:3b:00.0", tiles=2, hpc=True, uuid="86" * 15 + "00")
DESKTOP, NODE = (UHD, B580, A770), (MAX, MAX_2)
FLAT, COMPOSITE, COMBINED = ({"ZE_FLAT_DEVICE_HIERARCHY": word} for word in ("FLAT", "COMPOSITE", "COMBINED"))
ORDER = "ZE_ENABLE_PCI_ID_DEVICE_ORDER"
NONE, ABORT = UNINITIALIZED, "signal 6"
Start = Callable[..., Child]
Check = Callable[..., None]


def child_on(fake: FakeZeDriver) -> Child:
    """A process that has loaded the library by its name, under no mask."""
    inherited = {name: value for name, value in os.environ.items() if "ZE_" not in name}
    return Child(CHILD, {**inherited, **fake.environment()}, int)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_or_skip(tmp_path_factory.mktemp("ze_driver"))


@pytest.fixture
def fake(tmp_path: Path, library: Path) -> FakeZeDriver:
    return FakeZeDriver(tmp_path, library)


@pytest.fixture
def start() -> Iterator[Start]:
    with starting(child_on, "ask('zeInit', 0); drivers = listed('zeDriverGet')") as start_child:
        yield start_child


@pytest.fixture
def check(fake: FakeZeDriver, start: Start) -> Check:
    """Asserts what is seen of the cards under each mask: buses, tiles, and bars between drivers."""
    ze = start(fake, init=False)

    def check_all(gpus: Sequence[Gpu], masks: dict[str, str | int], **others: str) -> None:
        fake.write(gpus)
        assert {mask: ze.ask(f"buses({others | {'ZE_AFFINITY_MASK': mask}})") for mask in masks} == masks

    return check_all


def test_a_device_is_what_its_line_says(fake: FakeZeDriver, start: Start) -> None:
    """Name, ids, flags, UUID and whole address come through, and the driver has a version and its extension."""
    fake.write([*DESKTOP, MAX_2], api="1.9")
    ze = start(fake)
    ze.do("b580, a770, maxes, uhd = (d for driver in drivers for d in listed('zeDeviceGet', driver))")
    ze.do("p, a, version, n, name = properties(uhd), address(maxes), u32(), u32(1), (c_char * 260)()")
    assert ze.ask("[p.type, p.vendor, p.id, p.flags, p.sub, p.name.decode()]") == [1, 0x8086, 0x4680, 1, 0, UHD.name]
    assert ze.ask("[a.domain, a.bus, a.device, a.function, a.gen, a.bandwidth]") == [1, 0x3B, 0, 0, -1, -1]
    ids = ze.ask("[bytes(properties(d).uuid).hex() for d in (b580, maxes, *listed('zeDeviceGetSubDevices', maxes))]")
    assert ids == ["86800be2000000000a00000000000000", *("86" * 15 + last for last in ("00", "01", "02"))]
    ze.do("ask('zeDriverGetApiVersion', drivers[0], byref(version))")
    ze.do("ask('zeDriverGetExtensionProperties', drivers[0], byref(n), byref(name))")
    assert ze.ask("[version.value, n.value, name.value.decode()]") == [0x10009, 1, "ZE_extension_pci_properties"]
    assert ze.ask("len({bytes(filled('zeDriverGetProperties', d, Driver, 1).uuid) for d in drivers})") == 4


def test_order_and_drivers(check: Check) -> None:
    """Numbers count discrete cards first or all by PCI; drivers are families, newest first, integrated ones last."""
    check(DESKTOP, {"": "a | 3 | 0", "0": "3", "1": "a", "2": "0", "1,0": "a | 3"})
    check(DESKTOP, {"": "a | 3 | 0", "0": "0", "1": "3"}, **{ORDER: "1"})
    for value, seen in {"true": "3", "0x1": "3", "0": "3", "": "3", " 2x": "0"}.items():
        check(DESKTOP, {"0": seen}, **{ORDER: value})
    check((MAX, Gpu(bdf="0:3:0.0"), Gpu(bdf="0:2:1.0")), {"": "2 3 2a 2a.1"})
    check((HIDDEN, *DESKTOP), {"": "a | 3 | 0", "0": "3"})
    check((HIDDEN,), {"": NONE, "x": NONE})
    cards = (*DESKTOP, Gpu(bdf="0:1:0.0", library=1), Gpu(bdf="0:0:3.0", integrated=True, library=2))
    check(cards, {"": "1 | a | 3 | 0 | 0", "0": "3 | 1 | 0", "2": "0", "1": "a"})
    check(cards, {"": "0 | a | 3 | 0 | 1"}, **{ORDER: "1"})
    check(cards, {"": "1 | a | 3 | 0 | 0"}, **{ORDER: "2"})


def test_mask_grammar(check: Check) -> None:
    """Numbers are C's, out of range is skipped, order means nothing, no number aborts, and a prefixed spelling wins."""
    cards, every = [Gpu(bdf=f"0:{bus}:0.0") for bus in range(1, 10)], "1 2 3 4 5 6 7 8 9"
    check(cards, {"": every, "default": every, "0" * 4096: every, "0" * 4095: "1", "Default": ABORT})
    check(cards, {"0,-1,1": "1 2", "9,0": "1", "3,1,3": "2 4", "1,": "2", "9": NONE, "-1": NONE})
    check(cards, {"0x2": "3", "010": "9", "08": "1", "0b1": "1", "0xg": "1", " +2x,\t1 ": "2 3", "-0": "1"})
    check(cards, {"4294967297": "2", "18446744073709551616": ABORT, "0,,1": ABORT, ",": ABORT, "x": ABORT, " ": ABORT})
    check(cards, {"1.": "2", "0.0": "1", "0.1": NONE, ".1": ABORT, "0.x": ABORT, "9.x,3": "4", "0.0.0,1": "2"})
    check(cards, {"0.0.0.1": ABORT, "9.0.0.1,0.9.0.1,1": "2"})
    check(DESKTOP, {"0": "0"}, NEO_ZE_AFFINITY_MASK="1", NEO_L0_ZE_AFFINITY_MASK="2")
    for value, seen in {"1": "a", "": "a | 3 | 0", "1" * 4096: "3"}.items():
        check(DESKTOP, {"0": seen}, NEO_ZE_AFFINITY_MASK=value)
    check(DESKTOP, {"0": "0"}, NEO_ZE_ENABLE_PCI_ID_DEVICE_ORDER="1")


def test_tiles_and_hierarchies(check: Check) -> None:
    """The same mask means cards or tiles; the product's default holds unless the hierarchy is spelled exactly."""
    tiles = "2a 2a.1 3b 3b.1"  # a bus alone is a card, or tile 0 without the flag
    check(NODE, {"": tiles, "1": "2a.1", "1,2": "2a.1 3b", "0,1.0": "2a", "0.": "2a", "4": NONE})
    check(NODE, {"": tiles, "3": "3b.1", "1.x": NONE}, **FLAT)
    check(NODE, {"": "2a 3b", "1": "3b", "0.1,1": "2a.1 3b", "0.0,0.1": "2a", "0.2": NONE}, **COMPOSITE)
    check(NODE, {"": "2a.0 2a.1 3b.0 3b.1", "1": "2a.1"}, **COMBINED)
    check(NODE, {"": tiles}, ZE_FLAT_DEVICE_HIERARCHY="flat", NEO_ZE_FLAT_DEVICE_HIERARCHY="COMPOSITE")
    check((B580, MAX), {"": "a | 2a", "1.1": "2a.1"})
    check((MAX, B580), {"": "a | 2a 2a.1", "2": "2a.1"})


def test_what_tiles_and_cards_say_of_each_other(fake: FakeZeDriver, start: Start) -> None:
    """In each hierarchy: bus, flags, tile, how many sub-devices, whether there is a root device; read at the init."""
    fake.write(NODE)
    ze = start(fake, init=False)
    for hierarchy, mask, devices in (
        (COMPOSITE, "0,1.1", [["2a", 0, 0, 2, False], ["3b", 0, 1, 0, False]]),
        (FLAT, "0,1,3", [["2a", 0, 0, 0, False], ["2a", 0, 1, 0, False], ["3b", 0, 1, 0, False]]),
        (COMBINED, "0,1,3", [["2a", 2, 0, 0, True], ["2a", 2, 1, 0, True], ["3b", 2, 1, 0, True]]),
    ):
        assert ze.ask(f"under({hierarchy | {'ZE_AFFINITY_MASK': mask}})") == [devices]
    fake.write(NODE, narrowed="zero")
    assert ze.ask(f"buses({COMPOSITE | {'ZE_AFFINITY_MASK': '0.1,1'}})") == "2a 3b"
    fake.write(DESKTOP, unsorted=[1, 0, 2])
    assert ze.ask(f"buses({ {ORDER: '1'} })") == "a 0 3"
    fake.write([Gpu(bdf="0:1:0.0", tiles=4)])
    ze.do("os.environ['ZE_AFFINITY_MASK'] = '0.1,0.3'; ask('zeInit', 0); os.environ['ZE_AFFINITY_MASK'] = '0'")
    ze.do("ask('zeInit', 0); tiles = listed('zeDeviceGetSubDevices', *listed('zeDeviceGet', *listed('zeDriverGet')))")
    assert ze.ask("[about(tile) for tile in tiles]") == [["1", 2, 1, 0, True], ["1", 2, 3, 0, True]]


def test_init_and_wrong_arguments(fake: FakeZeDriver, start: Start) -> None:
    """Nothing answers before init or without a state; arguments, struct types and the drivers' version are checked."""
    ze = start(fake, init=False)
    assert ze.ask("tree()") == UNINITIALIZED
    fake.write(DESKTOP, api="1.9")
    ze.do("n, gpus, found = u32(0), Kinds(0x20021, None, 1), (c_void_p * 3)()")
    assert ze.ask("lib.zeInitDrivers(byref(n), None, byref(gpus))") == UNINITIALIZED
    fake.write(DESKTOP)
    assert ze.ask("[lib.zeDriverGet(byref(n), None), lib.zeInit(2)]") == [UNINITIALIZED] * 2
    assert ze.ask("lib.zeInitDrivers(byref(n), None, byref(Kinds(3, None, 1)))") == INVALID_ARGUMENT
    assert ze.ask("[lib.zeInitDrivers(None, None, byref(gpus)), lib.zeInit(4)]") == [NULL_POINTER, INVALID_ENUMERATION]
    ze.do("ask('zeInitDrivers', byref(n), None, byref(gpus)); ask('zeInitDrivers', byref(n), found, byref(gpus))")
    assert ze.ask("list(found) == [d.value for d in listed('zeDriverGet')]") is True
    fake.write(NODE)
    assert ze.ask("[device[0] for driver in tree() for device in driver]") == ["a", "3", "0"]
    ze.do("driver = c_void_p(found[0]); (d,) = listed('zeDeviceGet', driver)")
    pci = ze.ask("filled('zeDevicePciGetPropertiesExt', d, Pci, 2)")
    assert [pci, ze.ask("filled('zeDeviceGetProperties', d, Device, 1)")] == [INVALID_ARGUMENT] * 2
    assert ze.ask("[lib.zeDeviceGet(handle, byref(n), None) for handle in (driver, d)]") == [INVALID_ARGUMENT] * 2
    assert ze.ask("lib.zeDeviceGet(None, byref(n), None)") == NULL_HANDLE
    fake.remove()
    assert ze.ask("properties(d)") == UNINITIALIZED


def test_rules_and_record(fake: FakeZeDriver, start: Start) -> None:
    """WHERE is the place in the file; a refused call is a line of the record too, as calls that make things are."""
    rules = ["fault zeDeviceGetProperties 1 999", "slow zeDeviceGetProperties 2 300"]
    fake.write(DESKTOP, lines=[*rules, "crash zeDevicePciGetPropertiesExt 0"])
    ze = start(fake)
    assert ze.ask(f"[getattr(lib, call)(*[None] * 6) for call in {sorted(REFUSED_CALLS)}]") == [UNSUPPORTED] * 3
    assert fake.record() == ["zeInit", "zeDriverGet", "zeDriverGet", *sorted(REFUSED_CALLS)]
    ze.do("b580, a770, uhd = (listed('zeDeviceGet', driver)[0] for driver in drivers)")
    assert [ze.ask("properties(b580)"), fake.record()[-1]] == [999, "zeDeviceGetProperties"]
    check_slow(ze, quick="properties(uhd).id", slow="properties(a770).id", seconds=0.3)
    check_crash(ze, "address(uhd).bus")


def test_one_library_of_both_halves(tmp_path: Path) -> None:
    """Built with Sysman it has the calls of both halves, and what is left out of either is not there."""
    assert [len(CALLS), len(CALLS & ze_loader.CALLS)] == [14, 0]
    both = ctypes.CDLL(str(build_or_skip(tmp_path, ["zeInitDrivers", "zesInit"], sysman=True)))
    assert {call for call in CALLS | ze_loader.CALLS if not hasattr(both, call)} == {"zeInitDrivers", "zesInit"}
    with pytest.raises(ValueError, match="zesInit"):
        build(tmp_path, ["zesInit"])


def test_nonsense_is_refused(fake: FakeZeDriver, start: Start) -> None:
    """A line that makes no sense ends the process, and a rule that would never match is not written."""
    check_writer(fake, "zeDeviceGetName", Gpu(bdf="0:1:0.0", name='a "b"'))
    for line, complaint in {
        "gpu 1 bdf=0:1:0.0": "not the next card's index: 1",
        "gpu 0 bdf=0:1:0.0 tiles=5": "out of range: 5",
        "gpu 0 bdf=0:1:0.0 uuid=8680": "not a UUID: 8680",
    }.items():
        check_nonsense(fake, start, "lib.zeInit(0)", line, complaint)
