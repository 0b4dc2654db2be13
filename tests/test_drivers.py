"""A child asks the pretend driver libraries what they show, and says it in one line."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import pytest

from exporter.drivers import DRIVERS
from exporter.masks import RUNTIMES
from exporter.model import VulkanDevice
from exporter.wire import DriverAnswer, DriverDevice, decode_driver_line
from tests.fakes import amdhip64, cuda, shared_object, vulkan, ze_driver

pytestmark = pytest.mark.e2e

DEADLINE_SECONDS = 20
PROGRAM = (sys.executable, "-P", "-m", "exporter.asking")
TAIL = "-0000-4000-8000-00000000000"
UUIDS = tuple(f"{head * 8}{TAIL}{head}" for head in "0123456789abcdef")
L40S = "NVIDIA L40S"
CARDS = tuple(
    cuda.Gpu(uuid=f"GPU-{UUIDS[bus]}", pci=f"0000:{bus}{letter}:00.0", name=L40S)
    for bus, letter in ((4, "C"), (1, "7"))
)
HALVES = tuple(
    cuda.Mig(index=index, gi=7 + index, uuid=f"MIG-{UUIDS[10 + index]}", name=name)
    for index, name in enumerate(("NVIDIA A100 MIG 1g.5gb", None))
)
SPLIT = cuda.Gpu(uuid=f"GPU-{UUIDS[9]}", pci="00010000:9f:1f.0", mig=True, instances=HALVES)
RADEONS = tuple(
    amdhip64.Gpu(node=node, bdf=f"0000:{bus}:00.0", unique_id=unique, name=f"Radeon {node}")
    for node, bus, unique in ((1, "c3", 0xABCDEF0123456789), (2, "03", 0))
)
NVIDIA_VK = vulkan.Gpu(driver="nvidia", pci="0000:17:00.0", vendor_id=0x10DE, name=L40S)
RADV = vulkan.Gpu(driver="radv", pci="10000:03:00.1", vendor_id=0x1002, fp16=False, type="integrated", uuid="ab" * 16)
SOFTWARE = vulkan.Gpu(driver="llvmpipe", type="cpu", vendor_id=0x10005, name="llvmpipe")
ARC, MAX = "0000:03:00.0", "0000:4d:00.0"


class Fake(Protocol):
    """A pretend library's state."""

    def environment(self) -> dict[str, str]:
        """What leads a program to it."""


def run(runtime: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[bytes]:
    """The program to its end, with this environment alone."""
    command = [*PROGRAM, runtime]
    return subprocess.run(command, env=environment, capture_output=True, check=False, timeout=DEADLINE_SECONDS)


def asked(runtime: str, fake: Fake, **masks: str) -> DriverAnswer:
    """What the child says under the masks: one line, nothing on stderr, and status 0."""
    ended = run(runtime, {**fake.environment(), **masks})
    assert (ended.returncode, ended.stderr, ended.stdout.count(b"\n")) == (0, b"", 1), ended
    answer = decode_driver_line(ended.stdout)
    assert not answer.fault or not (answer.devices or answer.vulkan)
    return answer


def addresses(answer: DriverAnswer) -> list[str]:
    assert not answer.fault, answer.fault
    return [device.pci_bus_id for device in answer.devices]


def refused(answer: DriverAnswer) -> str:
    assert answer.fault
    assert not answer.devices
    assert answer.vulkan is None
    return answer.fault


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds a pretend library without some symbols, each once."""

    @functools.cache
    def build(build_or_skip: Callable[..., Path], *without: str) -> Path:
        return build_or_skip(tmp_path_factory.mktemp("driver"), without)

    return build


@pytest.fixture
def nvidia(tmp_path: Path, built: Callable[..., Path]) -> Callable[..., cuda.FakeCuda]:
    return lambda *without: cuda.FakeCuda(tmp_path, built(cuda.build_or_skip, *without))


@pytest.fixture
def amd(tmp_path: Path, built: Callable[..., Path]) -> Callable[..., amdhip64.FakeHip]:
    return lambda *without: amdhip64.FakeHip(tmp_path, built(amdhip64.build_or_skip, *without))


@pytest.fixture
def intel(tmp_path: Path, built: Callable[..., Path]) -> Callable[..., ze_driver.FakeZeDriver]:
    return lambda *without: ze_driver.FakeZeDriver(tmp_path, built(ze_driver.build_or_skip, *without))


@pytest.fixture
def khronos(tmp_path: Path, built: Callable[..., Path]) -> Callable[..., vulkan.FakeVulkan]:
    return lambda *without: vulkan.FakeVulkan(tmp_path, built(vulkan.build_or_skip, *without))


Nvidia = Callable[..., cuda.FakeCuda]
Amd = Callable[..., amdhip64.FakeHip]
Intel = Callable[..., ze_driver.FakeZeDriver]
Khronos = Callable[..., vulkan.FakeVulkan]


def test_every_driver_is_a_runtimes() -> None:
    """What can be asked are runtimes of the masks, but SYCL, whose drivers are the others'."""
    assert set(DRIVERS) == set(RUNTIMES) - {"sycl", "host"}


# ---- CUDA ----


def test_cuda_says_what_each_ordinal_is(nvidia: Nvidia) -> None:
    """Ordinals come in the driver's order behind the mask, each with its address, UUID and name; no context is made."""
    fake = nvidia()
    fake.write(CARDS, driver=12080)
    first, second = (
        DriverDevice(pci_bus_id="0000:4c:00.0", uuid=f"GPU-{UUIDS[4]}", name=L40S),
        DriverDevice(pci_bus_id="0000:17:00.0", uuid=f"GPU-{UUIDS[1]}", name=L40S),
    )
    answer = asked("cuda", fake)
    assert answer == DriverAnswer(file="libcuda.so.1", version="12.8", devices=(first, second))
    assert asked("cuda", fake, CUDA_VISIBLE_DEVICES="1,0").devices == (second, first)
    assert asked("cuda", fake, CUDA_DEVICE_ORDER="PCI_BUS_ID", CUDA_VISIBLE_DEVICES="0").devices == (second,)
    assert not cuda.FORBIDDEN & set(fake.record())


def test_cuda_tells_instances_from_cards(nvidia: Nvidia) -> None:
    """A device with a UUID of its own on a card with another one is a MIG instance, whatever it is called."""
    fake = nvidia()
    fake.write([CARDS[1], SPLIT])
    assert [device.uuid for device in asked("cuda", fake).devices] == [
        f"GPU-{UUIDS[1]}",
        *(f"MIG-{UUIDS[index]}" for index in (10, 11)),
    ]
    assert addresses(asked("cuda", fake)) == ["0000:17:00.0", "10000:9f:1f.0", "10000:9f:1f.0"]


def test_cuda_without_the_cards_uuid_goes_by_the_name(nvidia: Nvidia) -> None:
    """A driver that does not tell the card's UUID has MIG in an instance's name; without a name too nobody knows."""
    fake = nvidia("cuDeviceGetUuid")
    fake.write([CARDS[1], SPLIT])
    assert [device.uuid for device in asked("cuda", fake).devices] == [f"GPU-{UUIDS[1]}", f"MIG-{UUIDS[10]}", ""]


def test_an_older_cuda_tells_addresses_alone(nvidia: Nvidia) -> None:
    """Without cuDeviceGetUuid_v2 no UUID is told, as the older call's may be another device's."""
    fake = nvidia("cuDeviceGetUuid_v2")
    fake.write([CARDS[1], SPLIT])
    assert {device.uuid for device in asked("cuda", fake).devices} == {""}
    assert addresses(asked("cuda", fake))[0] == "0000:17:00.0"


def test_no_cuda_device_is_an_answer(nvidia: Nvidia) -> None:
    """A mask that leaves none, or a process that can open none, has no device, and that is no fault."""
    fake = nvidia()
    fake.write(CARDS)
    for mask in ("", "-1", "9"):
        assert asked("cuda", fake, CUDA_VISIBLE_DEVICES=mask) == DriverAnswer(file="libcuda.so.1")
    fake.remove()
    assert asked("cuda", fake).fault == ""


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("cuInit 999", "cuInit answered CUDA_ERROR_UNKNOWN (999)"),
        ("cuInit 803", "cuInit answered CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)"),
        ("cuInit 12345", "cuInit answered 12345"),
        ("cuDeviceGetCount 3", "cuDeviceGetCount answered CUDA_ERROR_NOT_INITIALIZED (3)"),
        ("cuDeviceGet 1 101", "device 1: cuDeviceGet answered CUDA_ERROR_INVALID_DEVICE (101)"),
        ("cuDeviceGetUuid_v2 1 999", "device 1: cuDeviceGetUuid_v2 answered CUDA_ERROR_UNKNOWN (999)"),
        ("cuDeviceGetUuid 0 999", "device 0: cuDeviceGetUuid answered CUDA_ERROR_UNKNOWN (999)"),
        ("cuDeviceGetPCIBusId 0 1", "device 0: cuDeviceGetPCIBusId answered CUDA_ERROR_INVALID_VALUE (1)"),
    ],
)
def test_a_cuda_call_that_fails_is_named(nvidia: Nvidia, rule: str, said: str) -> None:
    """A failing call costs the whole answer, since an ordinal without a device would shift the rest."""
    fake = nvidia()
    fake.write(CARDS, lines=[f"fault {rule}"])
    assert refused(asked("cuda", fake)) == said


def test_cuda_says_what_it_does_not_know(nvidia: Nvidia) -> None:
    """A name that is not supported is left out, the version too; a device with neither address nor UUID is a fault."""
    fake = nvidia()
    fake.write(CARDS, lines=["fault cuDeviceGetName 801", "fault cuDriverGetVersion 999"])
    answer = asked("cuda", fake)
    assert (answer.version, {device.name for device in answer.devices}) == ("", {""})
    assert addresses(answer) == ["0000:4c:00.0", "0000:17:00.0"]
    fake.write([CARDS[0], cuda.Gpu(name=L40S)])
    assert "device 1: libcuda.so.1 tells neither" in refused(asked("cuda", fake))


@pytest.mark.parametrize("symbol", ["cuInit", "cuDeviceGetCount", "cuDeviceGet"])
def test_cuda_without_a_symbol_is_a_fault(nvidia: Nvidia, symbol: str) -> None:
    """Without a call that is needed there is no answer, and the symbol is named."""
    fake = nvidia(symbol)
    fake.write(CARDS)
    assert refused(asked("cuda", fake)).endswith(f"libcuda.so.1 has no symbol {symbol}")


def test_cuda_without_what_may_be_missing_answers(nvidia: Nvidia) -> None:
    """The version, names, addresses and the words for codes may be missing where the rest is there."""
    missing = ("cuDriverGetVersion", "cuDeviceGetName", "cuDeviceGetPCIBusId", "cuGetErrorName")
    fake = nvidia(*missing)
    fake.write(CARDS[:1])
    uuid = f"GPU-{UUIDS[4]}"
    assert asked("cuda", fake) == DriverAnswer(file="libcuda.so.1", devices=(DriverDevice(uuid=uuid),))
    fake.write(CARDS, lines=["fault cuInit 999"])
    assert refused(asked("cuda", fake)) == "cuInit answered 999"


# ---- HIP ----


def with_rocr(fake: Fake, directory: Path, answer: int) -> dict[str, str]:
    """The fake's environment, with a ROCr beside it that has started, or not."""
    source = directory / "hsa.c"
    source.write_text(f"int hsa_init(void) {{ return {answer}; }}\n")
    made = directory / "rocr" / "libhsa-runtime64.so.1"
    shared_object.compiled(shared_object.compiler(), source, made, shared_object.shared(made.name))
    environment = fake.environment()
    return {**environment, "LD_LIBRARY_PATH": f"{environment['LD_LIBRARY_PATH']}:{made.parent}"}


def test_hip_says_what_each_ordinal_is(amd: Amd) -> None:
    """Ordinals come behind both masks, with addresses, and the KFD's unique ids where a card has one."""
    fake = amd()
    fake.write(RADEONS)
    first, second = (
        DriverDevice(pci_bus_id="0000:c3:00.0", uuid="GPU-abcdef0123456789", name="Radeon 1"),
        DriverDevice(pci_bus_id="0000:03:00.0", name="Radeon 2"),
    )
    assert asked("rocm", fake) == DriverAnswer(file="libamdhip64.so", version="6.3.42134", devices=(first, second))
    assert asked("rocm", fake, HIP_VISIBLE_DEVICES="1,0").devices == (second, first)
    assert asked("rocm", fake, ROCR_VISIBLE_DEVICES="1", HIP_VISIBLE_DEVICES="0").devices == (second,)
    assert not amdhip64.FORBIDDEN & set(fake.record())


def test_hip_is_found_by_its_numbered_names(tmp_path: Path) -> None:
    """Where there is no development package the library is loaded by its version's name."""
    fake = amdhip64.FakeHip(tmp_path, amdhip64.build_or_skip(tmp_path / "numbered"))
    fake.write(RADEONS)
    fake.shared_object.with_name(amdhip64.LINK).unlink()
    assert asked("rocm", fake).file == "libamdhip64.so.6"


def test_no_hip_device_is_an_answer_only_if_rocr_started(amd: Amd, tmp_path: Path) -> None:
    """HIP says that there is no device also where ROCr has failed, so ROCr is asked whether it has."""
    fake = amd()
    fake.write(RADEONS)
    hidden = {"HIP_VISIBLE_DEVICES": "-1"}
    alone = run("rocm", {**fake.environment(), **hidden})
    assert "hipErrorNoDevice (100), as it also does where ROCr" in refused(decode_driver_line(alone.stdout))
    started = run("rocm", {**with_rocr(fake, tmp_path, 0), **hidden})
    assert decode_driver_line(started.stdout) == DriverAnswer(file="libamdhip64.so", version="6.3.42134")
    failed = run("rocm", {**with_rocr(fake, tmp_path, 0x1008), **hidden})
    assert refused(decode_driver_line(failed.stdout)).endswith("ROCr has not started: hsa_init answered 0x1008")


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("hipInit 101", "hipInit answered hipErrorInvalidDevice (101)"),
        ("hipGetDeviceCount 3", "hipGetDeviceCount answered hipErrorNotInitialized (3)"),
        ("hipDeviceGet 1 101", "device 1: hipDeviceGet answered hipErrorInvalidDevice (101)"),
        ("hipDeviceGetPCIBusId 0 1", "device 0: hipDeviceGetPCIBusId answered hipErrorInvalidValue (1)"),
        ("hipDeviceGetUuid 1 3", "device 1: hipDeviceGetUuid answered hipErrorNotInitialized (3)"),
    ],
)
def test_a_hip_call_that_fails_is_named(amd: Amd, rule: str, said: str) -> None:
    """A failing call costs the whole answer, and its code is put into HIP's words."""
    fake = amd()
    fake.write(RADEONS, lines=[f"fault {rule}"])
    assert refused(asked("rocm", fake)) == said


def test_hip_without_symbols(amd: Amd) -> None:
    """Without UUIDs, names or the version there is an answer; without the count there is none."""
    fake = amd("hipDeviceGetUuid", "hipDeviceGetName", "hipRuntimeGetVersion", "hipGetErrorName")
    fake.write(RADEONS[:1])
    only = DriverDevice(pci_bus_id="0000:c3:00.0")
    assert asked("rocm", fake) == DriverAnswer(file="libamdhip64.so", devices=(only,))
    fake = amd("hipGetDeviceCount")
    fake.write(RADEONS)
    assert refused(asked("rocm", fake)) == "libamdhip64.so has no symbol hipGetDeviceCount"


# ---- Level Zero ----


def test_level_zero_says_what_each_ordinal_is(intel: Intel) -> None:
    """Ordinals count the newest family's driver first, as programs see them, and not as the mask counts."""
    fake = intel()
    fake.write([ze_driver.Gpu(bdf=ARC, name="Arc A770", rank=1), ze_driver.Gpu(bdf=MAX, name="Arc B580", rank=2)])
    devices = (DriverDevice(pci_bus_id=MAX, name="Arc B580"), DriverDevice(pci_bus_id=ARC, name="Arc A770"))
    answer = asked("level_zero", fake)
    assert answer == DriverAnswer(file="libze_loader.so.1", version="1.13", devices=devices)
    assert addresses(asked("level_zero", fake, ZE_AFFINITY_MASK="0")) == [ARC]
    assert {"zeInit", "zeInitDrivers"} <= set(fake.record())
    assert not ze_driver.REFUSED_CALLS & set(fake.record())


@pytest.mark.parametrize("without", ["zeDeviceGetProperties", "zeDeviceGetRootDevice"])
def test_level_zero_tells_tiles(intel: Intel, without: str) -> None:
    """A tile is told by its number in every hierarchy, a card by its tiles' numbers, also by an older loader."""
    fake = intel(*([] if without == "zeDeviceGetProperties" else [without]))
    fake.write([ze_driver.Gpu(bdf=ARC), ze_driver.Gpu(bdf=MAX, tiles=2)])

    def parts(hierarchy: str, mask: str = "") -> list[tuple[str, int | None, tuple[int, ...]]]:
        answer = asked("level_zero", fake, ZE_FLAT_DEVICE_HIERARCHY=hierarchy, ZE_AFFINITY_MASK=mask)
        assert not answer.fault
        return [(device.pci_bus_id, device.tile, device.tiles) for device in answer.devices]

    assert parts("COMPOSITE") == [(ARC, None, ()), (MAX, None, (0, 1))]
    assert parts("COMPOSITE", "1.1") == [(MAX, 1, ())]
    assert parts("FLAT") == [(ARC, None, ()), (MAX, 0, ()), (MAX, 1, ())]
    assert parts("FLAT", "2") == [(MAX, 1, ())]
    assert parts("COMBINED") == [(ARC, None, ()), (MAX, 0, ()), (MAX, 1, ())]
    assert parts("COMBINED", "1") == [(MAX, 0, ())]


def test_a_card_narrowed_to_one_tile_may_not_say_which(intel: Intel) -> None:
    """Where the driver gives the one tile that is left the number 0, no tile is told, be it the first or not."""
    fake = intel()
    fake.write([ze_driver.Gpu(bdf=MAX, tiles=2)], narrowed="zero")
    for mask in ("0.0", "0.1"):
        answer = asked("level_zero", fake, ZE_FLAT_DEVICE_HIERARCHY="COMPOSITE", ZE_AFFINITY_MASK=mask)
        assert answer.devices == (DriverDevice(pci_bus_id=MAX),)


def test_level_zero_of_every_age(intel: Intel) -> None:
    """A loader without zeInitDrivers, one without zeInit, and drivers that know no zeInitDrivers, all answer."""
    cards = [ze_driver.Gpu(bdf=ARC)]
    for without, api in ((("zeInitDrivers",), "1.5"), (("zeInit", "zeDriverGet"), "1.13"), ((), "1.5")):
        fake = intel(*without)
        fake.write(cards, api=api)
        answer = asked("level_zero", fake)
        assert (addresses(answer), answer.version) == ([ARC], api)


def test_the_two_ways_to_start_level_zero_may_disagree(intel: Intel, tmp_path: Path) -> None:
    """Where zeInitDrivers gives the drivers in another order than zeDriverGet, an ordinal depends on the program."""
    fake = intel()
    fake.write([ze_driver.Gpu(bdf=ARC, rank=1), ze_driver.Gpu(bdf=MAX, rank=2)])
    extra = tmp_path / "reversed.c"
    extra.write_text("""
        #include <stdint.h>
        int32_t zeInit(uint32_t flags);
        int32_t zeDriverGet(uint32_t *count, void **out);
        __attribute__((visibility("default"))) int32_t zeInitDrivers(uint32_t *count, void **out, const void *kinds) {
            uint32_t asked = *count;
            int32_t code = kinds == 0 ? 1 : zeInit(1);
            if (code != 0 || (code = zeDriverGet(count, out)) != 0 || asked != 2)
                return code;
            void *first = out[0];
            out[0] = out[1];
            out[1] = first;
            return 0;
        }""")
    switches = [*shared_object.shared(ze_driver.SONAME), "-Wl,--allow-multiple-definition", str(extra)]
    target = tmp_path / "reversed" / ze_driver.SONAME
    shared_object.compiled(shared_object.compiler(), ze_driver.SOURCE, target, switches)
    assert "another order" in refused(asked("level_zero", fake, LD_LIBRARY_PATH=str(target.parent)))


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("zeInit 1879113728", "zeInit answered INSUFFICIENT_PERMISSIONS (0x70010000)"),
        ("zeInitDrivers 1", "zeInitDrivers answered 0x1"),
        ("zeDriverGet 2013265924", "zeDriverGet answered INVALID_ARGUMENT (0x78000004)"),
        ("zeDeviceGetProperties 0 1879048193", "zeDeviceGetProperties answered DEVICE_LOST (0x70000001)"),
        ("zeDeviceGetSubDevices 2147483646", "zeDeviceGetSubDevices answered UNKNOWN (0x7ffffffe)"),
        ("zeDeviceGetRootDevice 2147483646", "zeDeviceGetRootDevice answered UNKNOWN (0x7ffffffe)"),
        ("zeDevicePciGetPropertiesExt 2013265923", "zeDevicePciGetPropertiesExt answered UNSUPPORTED_FEATURE"),
    ],
)
def test_a_level_zero_call_that_fails_is_named(intel: Intel, rule: str, said: str) -> None:
    """A failing call costs the whole answer, whichever of the two ways of starting it stands in."""
    fake = intel()
    fake.write([ze_driver.Gpu(bdf=ARC)], lines=[f"fault {rule}"])
    assert refused(asked("level_zero", fake)).startswith(said)


def test_no_level_zero_device_is_a_fault(intel: Intel) -> None:
    """UNINITIALIZED says the same of a mask that leaves nothing and of a driver that does not start."""
    fake = intel()
    fake.write([ze_driver.Gpu(bdf=ARC)])
    said = "zeInit answered UNINITIALIZED (0x78000001)"
    assert refused(asked("level_zero", fake, ZE_AFFINITY_MASK="7")) == said
    fake.remove()
    assert refused(asked("level_zero", fake)) == said


def test_a_level_zero_that_aborts_ends_the_child_so(intel: Intel) -> None:
    """A mask that the driver aborts on ends the child by that signal, without a line, though another process met it."""
    fake = intel()
    fake.write([ze_driver.Gpu(bdf=ARC)])
    ended = run("level_zero", {**fake.environment(), "ZE_AFFINITY_MASK": "no number"})
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGABRT, b"", b"")


# ---- Vulkan ----


def test_vulkan_says_what_it_enumerates(khronos: Khronos) -> None:
    """The raw list comes in its order, with what tells the drivers of one card apart, and no device is made."""
    fake = khronos()
    fake.write([SOFTWARE, RADV, NVIDIA_VK], layer=False)
    uuid = "17000000" + "0" * 24
    answer = asked("vulkan", fake)
    assert (answer.file, answer.version, answer.devices, answer.fault) == ("libvulkan.so.1", "1.3.0", (), "")
    assert answer.vulkan is not None
    assert [(entry.name, entry.pci_bus_id) for entry in answer.vulkan] == [
        (L40S, "0000:17:00.0"),
        ("", "10000:03:00.1"),
        ("llvmpipe", ""),
    ]
    assert answer.vulkan[1] == VulkanDevice(
        raw_position=1,
        kind="integrated",
        driver="radv",
        vendor="amd",
        uuid="abababab-abab-abab-abab-abababababab",
        pci_bus_id="10000:03:00.1",
        fp16_storage=False,
    )
    assert [(entry.kind, entry.driver, entry.vendor) for entry in answer.vulkan][::2] == [
        ("discrete", "nvidia", "nvidia"),
        ("cpu", "llvmpipe", "mesa"),
    ]
    assert sorted(answer.vulkan[0].uuid.replace("-", "")) == sorted(uuid)
    assert not vulkan.FORBIDDEN & set(fake.record())


def test_vulkan_follows_the_environment(khronos: Khronos) -> None:
    """What reorders or shortens the list does so in the child too."""
    fake = khronos()
    fake.write([RADV, NVIDIA_VK], layer=True)
    seen = asked("vulkan", fake, DRI_PRIME="pci-10000_03_00_1", NODEVICE_SELECT="1").vulkan
    assert [entry.vendor for entry in seen or ()] == ["nvidia", "amd"]
    seen = asked("vulkan", fake, VK_LOADER_VENDOR_ID_FILTER="0x1002").vulkan
    assert [(entry.raw_position, entry.vendor) for entry in seen or ()] == [(0, "amd")]
    assert asked("vulkan", fake, VK_LOADER_VENDOR_ID_FILTER="1").vulkan == ()


def test_every_vulkan_driver_has_its_word(khronos: Khronos) -> None:
    """Drivers have the words that the masks go by, and a vendor that is not known is its number."""
    words = ("amdgpu_pro", "amdvlk", "radv", "nvidia", "anv", "qualcomm", "moltenvk", "turnip", "dozen", "nvk")
    fake = khronos()
    fake.write([vulkan.Gpu(driver=word, pci="0000:01:00.0", vendor_id=0xABC) for word in words], layer=False)
    seen = asked("vulkan", fake).vulkan or ()
    assert tuple(entry.driver for entry in seen) == words
    assert {(entry.vendor, entry.uuid) for entry in seen} == {("0x0abc", seen[0].uuid)}


def test_a_vulkan_card_without_address_is_a_fault(khronos: Khronos) -> None:
    """No one could say which card a device is that does not tell its address; software is none."""
    fake = khronos()
    for untold in (vulkan.Gpu(driver="radv", pci="0000:03:00.0", pci_info=False), vulkan.Gpu(driver="turnip")):
        fake.write([NVIDIA_VK, untold], layer=False)
        assert "device 1:  has no VK_EXT_pci_bus_info" in refused(asked("vulkan", fake))


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("vkCreateInstance -3", "vkCreateInstance answered VK_ERROR_INITIALIZATION_FAILED (-3)"),
        ("vkEnumeratePhysicalDevices -77", "vkEnumeratePhysicalDevices answered -77"),
        ("vkEnumeratePhysicalDevices 5", "vkEnumeratePhysicalDevices answered that there are more entries, 8 times"),
        ("vkEnumerateInstanceVersion -1", "vkEnumerateInstanceVersion answered VK_ERROR_OUT_OF_HOST_MEMORY (-1)"),
        ("vkGetPhysicalDeviceProperties2 0 -4", "device 0: vkGetPhysicalDeviceProperties2 answered nothing"),
        ("vkGetPhysicalDeviceFeatures2 0 -4", "device 0: vkGetPhysicalDeviceFeatures2 answered nothing of 16-bit"),
        (
            "vkEnumerateDeviceExtensionProperties 0 -4",
            "device 0: vkEnumerateDeviceExtensionProperties answered VK_ERROR_DEVICE_LOST (-4)",
        ),
    ],
)
def test_a_vulkan_call_that_fails_is_named(khronos: Khronos, rule: str, said: str) -> None:
    """A failing call costs the whole answer, also one that answers by writing nothing."""
    fake = khronos()
    fake.write([NVIDIA_VK], lines=[f"fault {rule}"])
    assert refused(asked("vulkan", fake)).startswith(said)


def test_vulkan_without_drivers_or_too_old_is_a_fault(khronos: Khronos) -> None:
    """A loader without a driver, one of Vulkan 1.0, and one without a call that is needed, are told apart."""
    fake = khronos()
    fake.write([NVIDIA_VK], instance="1.0")
    assert refused(asked("vulkan", fake)) == "vkEnumerateInstanceVersion answered 1.0.0, and 1.1 is needed"
    fake.remove()
    assert refused(asked("vulkan", fake)) == "vkCreateInstance answered VK_ERROR_INCOMPATIBLE_DRIVER (-9)"
    fake = khronos("vkGetPhysicalDeviceProperties2")
    fake.write([NVIDIA_VK])
    said = "device 0: libvulkan.so.1 has no symbol vkGetPhysicalDeviceProperties2"
    assert refused(asked("vulkan", fake)) == said


# ---- the process ----


@pytest.mark.parametrize("runtime", sorted(DRIVERS))
def test_a_library_that_is_missing_is_named(runtime: str, tmp_path: Path) -> None:
    """Without its library the child says so, and which file it is."""
    (tmp_path / "libcuda.so.1").write_bytes(b"\x7fELF but no more\0\xff")
    ended = run(runtime, {"LD_LIBRARY_PATH": str(tmp_path)})
    fault = refused(decode_driver_line(ended.stdout))
    names = {"cuda": "libcuda.so.1", "rocm": "libamdhip64.so.7", "level_zero": "libze_loader", "vulkan": "libvulkan"}
    assert fault.startswith("the library cannot be loaded: ")
    assert names[runtime] in fault


def test_a_crash_is_the_childs(nvidia: Nvidia) -> None:
    """A library that crashes ends the child by its signal, without a line and without a core file."""
    fake = nvidia()
    fake.write(CARDS, lines=["crash cuDeviceGetName 1"])
    ended = run("cuda", fake.environment())
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGSEGV, b"", b"")


def made_up(directory: Path, body: str) -> dict[str, str]:
    """The environment for a libcuda.so.1 of this source."""
    source = directory / "made_up.c"
    source.write_text(f"#include <stdio.h>\n#include <stdlib.h>\n#include <unistd.h>\n{body}\n")
    made = directory / "made_up" / cuda.SONAME
    shared_object.compiled(shared_object.compiler(), source, made, shared_object.shared(cuda.SONAME))
    return {"LD_LIBRARY_PATH": str(made.parent)}


def test_what_a_library_prints_or_leaves_behind_is_no_ones(tmp_path: Path) -> None:
    """Text on stdout and stderr is not seen, and what is to run at the end is not run: it would hang."""
    environment = made_up(
        tmp_path,
        """
        static void forever(void) { for (;;) pause(); }
        __attribute__((destructor)) static void at_unload(void) { forever(); }
        __attribute__((constructor)) static void at_load(void) { puts("{}"); fflush(stdout); atexit(forever); }
        int cuInit(unsigned flags) { fprintf(stderr, "init\\n"); return write(1, "{\\n", 2) == 2 ? flags : 1; }
        int cuDeviceGetCount(int *count) { return *count = 0; }
        int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
        """,
    )
    ended = run("cuda", environment)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b'{"file":"libcuda.so.1","version":"13.0"}\n', b"")


@pytest.mark.parametrize("count", [-1, 2**31 - 1])
def test_a_count_that_no_host_has_is_a_fault(tmp_path: Path, count: int) -> None:
    """A count that is garbage is a fault, and nothing is asked that many times."""
    source = (
        f"int cuInit(unsigned flags) {{ return flags; }} int cuDeviceGetCount(int *out) {{ *out = {count}; return 0; }}"
    )
    answer = decode_driver_line(run("cuda", made_up(tmp_path, source)).stdout)
    assert refused(answer) == f"libcuda.so.1 answered that there are {count} devices"


def test_text_that_is_none_does_no_harm(tmp_path: Path) -> None:
    """A name of any bytes without an end is a name, and an address of any bytes is none."""
    source = """
        #include <string.h>
        int cuInit(unsigned flags) { return flags; }
        int cuDeviceGetCount(int *out) { *out = 1; return 0; }
        int cuDeviceGet(int *out, int ordinal) { *out = ordinal; return 0; }
        int cuDeviceGetName(char *out, int size, int device) { memset(out, 0xfe, size); return device; }
        int cuDeviceGetPCIBusId(char *out, int size, int device) { memset(out, '"', size); return device; }
        int cuDeviceGetUuid_v2(char *out, int device) { memset(out, 0xff, 16); return device; }
    """
    (device,) = decode_driver_line(run("cuda", made_up(tmp_path, source)).stdout).devices
    uuid = "GPU-ffffffff-ffff-ffff-ffff-ffffffffffff"
    assert device == DriverDevice(uuid=uuid, name="\N{REPLACEMENT CHARACTER}" * 256)


def test_a_library_that_exits_leaves_no_line(tmp_path: Path) -> None:
    """A library may end the process, as Mesa's layer does where it is to list devices: there is no line then."""
    ended = run("cuda", made_up(tmp_path, "int cuInit(unsigned flags) { exit((int)flags); }"))
    assert (ended.returncode, ended.stdout) == (0, b"")


def test_only_known_runtimes_are_asked() -> None:
    """Any other word is a usage error."""
    ended = run("sycl", {})
    assert (ended.returncode, ended.stdout) == (2, b"")
    assert b"invalid choice" in ended.stderr


def children(process: int) -> list[int]:
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(child) for child in found]


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def parent(request: pytest.FixtureRequest, intel: Intel) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has started the child on a library that hangs in zeInit, and waits for it."""
    fake = intel()
    fake.write([ze_driver.Gpu(bdf=ARC)], lines=["hang zeInit"])
    source = f"import subprocess; subprocess.run({[*PROGRAM, 'level_zero']!r})"
    with subprocess.Popen([sys.executable, "-c", source], env=fake.environment(), stdout=subprocess.PIPE) as process:
        try:
            until(lambda: "zeInit" in fake.record())
            yield process
        finally:
            process.kill()


def test_a_child_that_hangs_ends_with_its_parent(parent: subprocess.Popen[bytes]) -> None:
    """When the parent is gone nothing of the child is left, nor of the process that it asks in."""
    (child,) = children(parent.pid)
    (fork,) = children(child)
    limits = Path(f"/proc/{fork}/limits").read_text()
    assert [line.split()[4:6] for line in limits.splitlines() if line.startswith("Max core")] == [["0", "0"]]
    parent.kill()
    assert parent.wait() == -signal.SIGKILL
    for process in (child, fork):
        until(lambda process=process: not is_running(process))  # type: ignore[misc]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
