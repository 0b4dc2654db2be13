"""The pretend Vulkan does what it says, seen through plain ``ctypes`` in a process of its own."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fakes.checks import Child, check_abort, check_crash, check_nonsense, check_slow, check_writer, starting
from tests.fakes.vulkan import CALLS, FORBIDDEN, SONAME, FakeVulkan, Gpu, build, build_or_skip

pytestmark = pytest.mark.e2e

INCOMPLETE, NO_MEMORY, FAILED, LOST, NO_LAYER, NO_EXTENSION, NO_DRIVER = 5, -2, -3, -4, -6, -7, -9

CHILD = """
from ctypes import *
vk = CDLL("libvulkan.so.1")
vk.vkGetInstanceProcAddr.restype = c_void_p

class REFUSAL(Exception): pass

def refusal(refused): return refused.args

def plain(value): return value

def ask(call, *arguments):
    if code := call(*arguments):
        raise REFUSAL(code)

def struct(*fields):
    return type("S", (Structure,), {"_fields_": [("sType", c_int32), ("pNext", c_void_p), *fields]})

Application = struct(("name", c_char_p), ("v", c_uint32), ("engine", c_char_p), ("e", c_uint32), ("api", c_uint32))
Info = struct(("flags", c_uint32), ("application", POINTER(Application)), ("layer_count", c_uint32),
              ("layers", POINTER(c_char_p)), ("extension_count", c_uint32), ("extensions", POINTER(c_char_p)))
Properties = struct(("ids", c_uint32 * 4), ("type", c_uint32), ("name", c_char * 256), ("rest", c_uint8 * 548))
Ids = struct(("uuid", c_uint8 * 16), ("rest", c_uint8 * 32))
Driver = struct(("id", c_int32), ("name", c_char * 256), ("rest", c_uint8 * 260))
Pci = struct(("address", c_uint32 * 4))
Features = struct(("rest", c_uint32 * 56))
Storage = struct(("storage", c_uint32), ("rest", c_uint32 * 11))

def create(minor=3, *extensions, layers=0):
    application = None if minor is None else pointer(Application(0, api=1 << 22 | minor << 12))
    names = (c_char_p * len(extensions))(*extensions)
    info, instance = Info(1, None, 0, application, layers, None, len(names), names), c_void_p()
    ask(vk.vkCreateInstance, byref(info), None, byref(instance))
    return instance

def two_calls(call, handle, item, *before):
    count = c_uint32()
    ask(call, handle, *before, byref(count), None)
    found = (item * count.value)()
    ask(call, handle, *before, byref(count), found)
    return list(found)

def listed(instance): return list(map(c_void_p, two_calls(vk.vkEnumeratePhysicalDevices, instance, c_void_p)))

def chained(call, top, device, *chain):
    for before, behind in zip((top, *chain), chain):
        before.pNext = cast(pointer(behind), c_void_p)
    call(device, byref(top))
    return top

def properties(device, *chain):
    return chained(vk.vkGetPhysicalDeviceProperties2, Properties(1000059001), device, *chain)

def names(instance): return " ".join(properties(device).name.decode() for device in listed(instance))

def extensions(device):
    found = two_calls(vk.vkEnumerateDeviceExtensionProperties, device, c_char * 260, None)
    return " ".join(extension.value.decode() for extension in found)

def version():
    ask(vk.vkEnumerateInstanceVersion, byref(found := c_uint32()))
    return [found.value >> 22, found.value >> 12 & 1023]

def ggml(most=64):
    count = vk.fake_ggml_vk_devices(found := (c_uint32 * 64)(), most)
    return None if count < 0 else found[:count]
"""
XTX = Gpu(driver="radv", pci="0000:03:00.0", vendor_id=0x1002, device_id=0x744C, name="XTX")
APU = Gpu(driver="radv", pci="0000:00:02.0", vendor_id=0x1002, device_id=0x164E, name="APU", type="integrated")
L40 = Gpu(driver="nvidia", pci="0000:01:00.0", vendor_id=0x10DE, device_id=0x26B9, name="L40", uuid="4b" * 16)
L40B = dataclasses.replace(L40, pci="0001:01:00.0", name="L40B", uuid="4c" * 16)
PIPE = Gpu(driver="llvmpipe", vendor_id=0x10005, name="PIPE", type="cpu", uuid="6d" * 16)
HOST = [PIPE, APU, XTX, L40B, L40]


class Refused(NamedTuple):
    """The code of a call that was no success."""

    code: int


Start = Callable[..., Child]


def child_on(fake: FakeVulkan, variables: Mapping[str, str] | None = None) -> Child:
    """A process that has loaded the library, with these variables beside those of the fake."""
    leave = ("VK_", "MESA_", "DRI_", "GGML_", "NODEVICE_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(leave)}
    return Child(CHILD, {**inherited, **fake.environment(), **(variables or {})}, Refused)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_or_skip(tmp_path_factory.mktemp("vulkan"))


@pytest.fixture
def fake(tmp_path: Path, library: Path) -> FakeVulkan:
    return FakeVulkan(tmp_path, library)


@pytest.fixture
def start() -> Iterator[Start]:
    with starting(child_on, "instance = create()") as start_child:
        yield start_child


def test_device_tells_what_it_is(fake: FakeVulkan, start: Start) -> None:
    """Properties, and the structs chained behind them, hold what was written; without its extension no PCI address."""
    fake.write([dataclasses.replace(L40, fp16=False), PIPE], instance="1.2")
    vk = start(fake)
    vk.do("a, b = listed(instance); ids, pci, driver = Ids(1000071004), Pci(1000212000), Driver(1000196000)")
    vk.do("found = properties(a, ids, pci, driver)")
    assert vk.ask("[version(), found.ids[1:], found.type]") == [[1, 2], [1, 0x10DE, 0x26B9], 2]
    assert vk.ask("[ids.uuid[:], list(pci.address), driver.id]") == [[0x4B] * 16, [0, 1, 0, 0], 4]
    vk.do("ids, pci, driver = Ids(1000071004), Pci(1000212000, None, (7, 7, 7, 7)), Driver(1000196000)")
    assert vk.ask("properties(b, pci, driver, ids).type") == 4
    assert vk.ask("[list(pci.address), driver.id, driver.name.decode()]") == [[7] * 4, 13, "llvmpipe"]
    assert vk.ask("extensions(a)") == "VK_KHR_driver_properties VK_EXT_pci_bus_info"
    assert vk.ask("extensions(b)") == "VK_KHR_driver_properties VK_KHR_16bit_storage"
    vk.do("features = lambda d, kind: chained(vk.vkGetPhysicalDeviceFeatures2, Features(1000059000), d, kind)")
    vk.do("kinds = [Storage(stype, None, 7) for stype in (49, 1000083000)]")
    assert vk.ask("[[features(d, kind) and kind.storage for kind in kinds] for d in (a, b)]") == [[0, 0], [1, 1]]


LOADER, MESA, PRIME = "VK_LOADER_DEVICE_SELECT", "MESA_VK_DEVICE_SELECT", "DRI_PRIME"
ORDERS: tuple[tuple[dict[str, str], str], ...] = (
    ({}, "L40 XTX L40B APU PIPE"),
    ({LOADER: "10de:0x26b9"}, "L40B L40 XTX APU PIPE"),
    ({LOADER: "0x1002:0x164e"}, "APU L40 XTX L40B PIPE"),
    ({LOADER: "1002"}, "L40 XTX L40B APU PIPE"),
    ({"VK_LOADER_DISABLE_SELECT": "1", LOADER: "1002:744c"}, "APU PIPE XTX L40B L40"),
    ({MESA: "1002:744c"}, "XTX L40 L40B APU PIPE"),
    ({MESA: "1002:744c!"}, "XTX"),
    ({MESA: "10de:26b9", LOADER: "1002:744c"}, "L40B XTX L40 APU PIPE"),
    ({MESA: "1002:744c", "NODEVICE_SELECT": ""}, "L40 XTX L40B APU PIPE"),
    ({MESA: "1002:744c", PRIME: "1002:164e!"}, "XTX L40 L40B APU PIPE"),
    ({PRIME: "1002:164e"}, "APU L40 XTX L40B PIPE"),
    ({PRIME: "pci-0000_03_00_0!"}, "XTX"),
    ({PRIME: "pci-0001_01_00_0"}, "L40B L40 XTX APU PIPE"),
    ({PRIME: "1"}, "XTX L40 L40B APU PIPE"),
    ({PRIME: "3"}, "APU L40 XTX L40B PIPE"),
    ({PRIME: "1", MESA: "1002:744c"}, "L40 XTX L40B APU PIPE"),
    ({"MESA_VK_DEVICE_SELECT_FORCE_DEFAULT_DEVICE": "true"}, "L40"),
    ({"VK_LOADER_VENDOR_ID_FILTER": "0x1002,65541"}, "XTX APU PIPE"),
    ({"VK_LOADER_DEVICE_ID_FILTER": "0x1000:0x3000"}, "L40 L40B APU"),
    ({"VK_LOADER_DRIVER_ID_FILTER": "3", MESA: "10de:26b9!"}, ""),
)


@pytest.mark.parametrize(("variables", "names"), ORDERS)
def test_order_is_the_loaders_then_the_layers(
    fake: FakeVulkan, start: Start, variables: Mapping[str, str], names: str
) -> None:
    """The loader sorts, its variable and then the layer move one device to the front, and the filters come last."""
    fake.write(HOST)
    assert start(fake, variables=variables).ask("names(instance)") == names


def test_boot_vga_device_is_first_unless_the_layer_is_missing(fake: FakeVulkan, start: Start) -> None:
    """The boot VGA device is moved to the front, by its IDs if by no address, and a hidden one is not there at all."""
    boot = dataclasses.replace(L40B, boot_vga=True)
    rest = [PIPE, APU, dataclasses.replace(XTX, accessible=False), L40]
    fake.write([boot, *rest])
    vk = start(fake)
    assert vk.ask("names(instance)") == "L40B L40 APU PIPE"
    assert vk.ask("names(create(None, b'VK_KHR_get_physical_device_properties2'))") == "L40 L40B APU PIPE"
    assert vk.ask("names(create(None))") == "L40B PIPE APU L40"
    fake.write([dataclasses.replace(boot, pci_info=False), *rest])
    assert vk.ask("names(instance)") == "L40 L40B APU PIPE"
    fake.write([boot, *rest], layer=False)
    assert vk.ask("names(instance)") == "L40 L40B APU PIPE"
    fake.write([])
    assert vk.ask("names(instance)") == ""


def test_ggml_takes_the_positions_of_its_mask(fake: FakeVulkan, start: Start) -> None:
    """Exactly the numbers that can be read, a CPU and repeats too; one past the end loses the whole backend."""
    fake.write(HOST)
    masks = "|2,0| 1 , 4,,1,|+3 -0 004|+3-0|0x1|1gpu,2|1,99999999999999999999|0;9|1,5|-1"
    found: tuple[list[int] | None, ...] = ([], [2, 0], [1, 4, 1], [3, 0, 4], [3, 0], [0], [1], [1], [0], None, None)
    for mask, positions in zip(masks.split("|"), found, strict=True):
        with child_on(fake, {"GGML_VK_VISIBLE_DEVICES": mask}) as vk:
            assert vk.ask("ggml()") == positions, mask


def test_ggml_without_a_mask_takes_each_gpu_once(fake: FakeVulkan, start: Start) -> None:
    """Discrete and integrated ones with 16-bit storage, each under its best driver, which comes last if it replaces."""
    amdvlk, pro = (dataclasses.replace(XTX, driver=driver) for driver in ("amdvlk", "amdgpu_pro"))
    vk = start(fake, init=False)
    for gpus, found in (
        (HOST, [0, 1, 2, 3]),
        ([XTX, amdvlk, L40B], [0, 2]),
        ([pro, amdvlk, XTX, L40B], [2, 3]),
        ([pro, L40B, dataclasses.replace(XTX, fp16=False), amdvlk, APU], [2, 3, 4]),
        ([pro, L40B, dataclasses.replace(amdvlk, pci_info=False)], [1, 2]),
        ([dataclasses.replace(L40, driver="dozen"), dataclasses.replace(L40, driver="nvk")], [1]),
        ([dataclasses.replace(XTX, driver="moltenvk")] * 2, [0, 1]),
        ([PIPE, dataclasses.replace(APU, type="virtual"), dataclasses.replace(L40, fp16=False)], [0]),
        ([PIPE], []),
    ):
        fake.write(gpus)
        assert vk.ask("ggml()") == found, gpus
    fake.write(HOST, instance="1.1")
    assert vk.ask("ggml()") is None
    fake.write(HOST)
    assert vk.ask("ggml(1)") == [0, 0, 0, 0]  # their number, and only one of them told


def test_environment_is_read_once(fake: FakeVulkan, start: Start) -> None:
    """What is set or unset past the first instance changes nothing."""
    fake.write(HOST)
    vk = start(fake)
    vk.do(f"import os; os.environ.update(GGML_VK_VISIBLE_DEVICES='0', {MESA}='1002:744c')")
    assert vk.ask("[names(create()) == names(instance), ggml()]") == [True, [0, 1, 2, 3]]


def test_no_state_file_is_no_driver(fake: FakeVulkan, start: Start) -> None:
    """Without it there is no instance and no backend, and one that goes away takes the devices with it."""
    vk = start(fake, init=False)
    assert vk.ask("create()") == Refused(NO_DRIVER)
    assert vk.ask("[version(), ggml()]") == [[1, 3], None]
    fake.write([L40])
    vk.do("instance = create(); (d,) = listed(instance)")
    fake.remove()
    assert vk.ask("listed(instance)") == Refused(FAILED)
    fake.write([])
    assert vk.ask("extensions(d)") == Refused(LOST)
    assert vk.ask("properties(d).name.decode()") == ""


def test_rules_and_record(fake: FakeVulkan, start: Start) -> None:
    """Faults hit their device, what is forbidden fails, every call is a line, and only what is named is slow."""
    fake.write([PIPE, L40], lines=["fault vkEnumerateDeviceExtensionProperties 1 -4"])
    vk = start(fake)
    vk.do("a, b = listed(instance)")
    assert vk.ask("extensions(a)") == Refused(LOST)
    assert vk.ask("len(extensions(b).split())") == 2
    assert vk.ask("ask(vk.vkCreateDevice, a, None, None, None)") == Refused(FAILED)
    assert vk.ask("ask(vk.vkAllocateMemory, None, None, None, None)") == Refused(NO_MEMORY)
    vk.do("vk.vkDestroyInstance(instance, None)")
    two = ["vkEnumeratePhysicalDevices"] * 2
    of_devices = ["vkEnumerateDeviceExtensionProperties"] * 3
    forbidden = ["vkCreateDevice", "vkAllocateMemory"]
    assert fake.record() == ["vkCreateInstance", *two, *of_devices, *forbidden, "vkDestroyInstance"]
    assert set(forbidden) == FORBIDDEN
    fake.write([L40], lines=["slow vkGetPhysicalDeviceProperties2 0 300", "crash vkEnumerateInstanceVersion"])
    vk.do("(d,) = listed(create())")
    check_slow(vk, quick="extensions(d)", slow="properties(d).type", seconds=0.3)
    check_crash(vk, "version()")


def test_calls_are_refused_as_vulkan_does(fake: FakeVulkan, start: Start) -> None:
    """Unknown layers, extensions and structs make no instance, a short array is incomplete, no handle is the end."""
    fake.write([PIPE, L40])
    vk = start(fake)
    assert vk.ask("create(3, b'VK_KHR_surface')") == Refused(NO_EXTENSION)
    assert vk.ask("create(layers=1)") == Refused(NO_LAYER)
    assert vk.ask("ask(vk.vkCreateInstance, byref(Info(2)), None, byref(c_void_p()))") == Refused(FAILED)
    vk.do("count, short = c_uint32(1), (c_void_p * 1)()")
    assert vk.ask("ask(vk.vkEnumeratePhysicalDevices, instance, byref(count), short)") == Refused(INCOMPLETE)
    assert vk.ask("[count.value, properties(c_void_p(short[0])).name.decode()]") == [1, "L40"]
    assert vk.ask("chained(vk.vkGetPhysicalDeviceProperties2, Properties(1), c_void_p(short[0])).name.decode()") == ""
    vk.do("vk.vkDestroyInstance(instance, None)")
    check_abort(vk, "listed(instance)", "this is no VkInstance")


def test_library_has_its_calls_only_and_its_name(fake: FakeVulkan, start: Start, tmp_path: Path) -> None:
    """What gives the calls by name has them too, without an instance only four; an older loader lacks some."""
    fake.write([])
    vk = start(fake)
    vk.do(f"calls = {sorted(CALLS)}")
    assert vk.ask("[name for name in calls if hasattr(vk, name)]") == sorted(CALLS)
    vk.do("load = lambda i: [name for name in calls if vk.vkGetInstanceProcAddr(i, name.encode())]")
    assert vk.ask("load(instance)") == sorted(CALLS - {"fake_ggml_vk_devices"})
    assert vk.ask("len(load(None))") == 4
    assert vk.ask(f"PyDLL({SONAME!r})._name") == SONAME
    older = FakeVulkan(tmp_path, build(tmp_path, ["vkGetPhysicalDeviceProperties2"]))
    old = start(older, init=False)
    old.do("instance = create(0); name = 'vkGetPhysicalDeviceProperties2'")
    assert old.ask("[hasattr(vk, name), vk.vkGetInstanceProcAddr(instance, name.encode())]") == [False, None]
    with pytest.raises(ValueError, match="vkQueueSubmit"):
        build(tmp_path, ["vkQueueSubmit"])
    check_abort(vk, "properties(instance)", "this is no VkPhysicalDevice")


NONSENSE = {
    "gpu 0 driver=mesa": "unknown word: mesa",
    "gpu 0 pci=0000:03:00.0": "a device without a driver: 0",
    "gpu 1 driver=radv": "a device out of turn: 1",
    "gpu 0 driver=radv pci=03:00": "not a PCI address: 03:00",
    "gpu 0 driver=radv uuid=4b": "not a UUID: 4b",
    "gpu 0 driver=radv pci_info=1": "pci_info without a PCI address: 0",
    "instance 1": "not a version: 1",
}


@pytest.mark.parametrize(("line", "complaint"), NONSENSE.items())
def test_nonsense_in_the_state_aborts(fake: FakeVulkan, start: Start, line: str, complaint: str) -> None:
    """A line that makes no sense ends the process with a message that names the line and what is wrong."""
    check_nonsense(fake, start, "version()", line, complaint)


def test_writer_refuses_what_would_never_match(tmp_path: Path) -> None:
    """A rule for a call that does not exist and text that cannot be quoted are errors, and nothing is written."""
    check_writer(FakeVulkan(tmp_path), "vkQueueSubmit", Gpu(driver="radv", name='a "b"'))
