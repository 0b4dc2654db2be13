"""A Vulkan fleet's cards are read through their vendors' backends, joined by PCI address; software is never a card."""

from __future__ import annotations

import pytest

from exporter.attribution import attribute
from exporter.backends.amd import AmdBackend
from exporter.backends.base import Backend, Places
from exporter.backends.intel import IntelBackend
from exporter.inventory import Inventory
from exporter.masks import invert
from exporter.model import (
    Context,
    Device,
    DeviceState,
    FleetMapping,
    Inversion,
    Reading,
    Snapshot,
    VendorOutcome,
    VendorSample,
    VulkanDevice,
)
from tests.fakes.sysfs import AmdCard, FakeSys, IntelCard, KfdNode
from tests.strategies import card

ARC, RADEON = "0000:03:00.0", "0000:c3:00.0"
NVIDIA = card("a")
RAW = (
    VulkanDevice(raw_position=0, kind="cpu", driver="llvmpipe", vendor="mesa", uuid="sw", name="llvmpipe"),
    VulkanDevice(raw_position=1, kind="discrete", driver="radv", vendor="amd", uuid="r", pci_bus_id=RADEON),
    VulkanDevice(raw_position=2, kind="discrete", driver="anv", vendor="intel", uuid="i", pci_bus_id=ARC),
    VulkanDevice(
        raw_position=3, kind="discrete", driver="nvidia", vendor="nvidia", uuid="n", pci_bus_id=NVIDIA.pci_bus_id
    ),
)


def read(backend: Backend) -> VendorSample:
    """One cycle of a backend."""
    devices: list[Device] = []
    readings: list[Reading] = []
    backend.open()
    for slot in backend.slots():
        found = backend.identify(slot, lambda _: None)
        devices += found
        readings += (reading for device in found for reading in backend.sample(device).readings)
    return sample_of(backend.vendor, devices, readings)


def sample_of(vendor: str, devices: list[Device], readings: list[Reading]) -> VendorSample:
    return VendorSample(
        vendor=vendor,
        driver_version="",
        whole=True,
        devices=tuple(devices),
        states=tuple(DeviceState(device.key, "ok") for device in devices),
        readings=tuple(readings),
    )


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> tuple[VendorSample, ...]:
    """A host with a card of each vendor; AMD's and Intel's are read by their backends."""
    fake = FakeSys(tmp_path_factory.mktemp("vulkan"))
    fake.write(
        [
            AmdCard(pci=RADEON, minor=0, kfd_nodes=(KfdNode(node=1),), temperatures={"edge": 52}),
            IntelCard(pci=ARC, minor=1, device_id="0xe20b", temperatures={"pkg": 63}),
        ]
    )
    places = Places(str(fake.sys), str(fake.proc), shared_object="/nonexistent/library")
    nvidia = sample_of("nvidia", [NVIDIA], [Reading("temperature", NVIDIA.key, 71.0)])
    return nvidia, read(AmdBackend(places)), read(IntelBackend(places))


def seen(samples: tuple[VendorSample, ...], mask: str | None) -> Snapshot:
    """The host under that mask, with the Vulkan devices enumerated in the workload's environment."""
    inventory = Inventory(tuple(device for sample in samples for device in sample.devices), vulkan=RAW)
    reach = frozenset(device.key for device in inventory.devices)
    env = {} if mask is None else {"GGML_VK_VISIBLE_DEVICES": mask}
    outcome = invert("vulkan", env, inventory, Context(reach=reach, os="linux", probe="same_env"))
    assert isinstance(outcome, Inversion)
    outcomes = [VendorOutcome(vendor=sample.vendor, sample=sample, duration_seconds=0.0) for sample in samples]
    return attribute(outcomes, (FleetMapping("chat", "vulkan", outcome),), ())


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (None, {0: 52.0, 1: 63.0, 2: 71.0}),
        ("3,1", {0: 71.0, 1: 52.0}),
        ("2", {0: 63.0}),
        ("0,2", {1: 63.0}),
        ("0", {}),
    ],
)
def test_each_card_is_read_through_its_vendor(
    samples: tuple[VendorSample, ...], mask: str | None, expected: dict[int, float]
) -> None:
    """An index that the mask gives to software stands for no card: it has no series, and moves no other."""
    snapshot = seen(samples, mask)
    temperatures = {
        binding.fleet_index: snapshot.readings[binding.device.key]["temperature"][()] for binding in snapshot.bindings
    }
    assert temperatures == expected


def test_the_card_behind_a_vulkan_device_is_the_one_at_its_address(samples: tuple[VendorSample, ...]) -> None:
    """The vendor's own device: with its number, its UUID and its name."""
    found = {binding.fleet_index: binding.device for binding in seen(samples, None).bindings}
    assert [(found[index].key.vendor, found[index].pci_bus_id) for index in range(3)] == [
        ("amd", RADEON),
        ("intel", ARC),
        ("nvidia", NVIDIA.pci_bus_id),
    ]
    assert all(device.physical_index == 0 for device in found.values())
