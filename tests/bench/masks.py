"""How long masks of a thousand entries take over 64 devices, for every variable: ``python -m tests.bench.masks``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

from exporter import masks
from exporter.inventory import Inventory
from exporter.model import Context, Device, DeviceKey, Inversion, VulkanDevice

DEVICES = 64
REPEATS = 50

_FLAT = {"ZE_FLAT_DEVICE_HIERARCHY": "FLAT"}
_COMPOSITE = {"ZE_FLAT_DEVICE_HIERARCHY": "COMPOSITE"}
_INDICES = ",".join(map(str, range(1000)))
_SOME_INDICES = ",".join(str(7 * place % DEVICES) for place in range(1000))
_UUIDS = ",".join(f"GPU-{place:016x}" for place in range(1000))


class Trial(NamedTuple):
    """A mask, and how many devices it leaves."""

    name: str
    runtime: str
    env: dict[str, str]
    left: int


TRIALS = (
    Trial("CUDA, 1,000 indices", "cuda", {"CUDA_VISIBLE_DEVICES": _INDICES, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 64),
    Trial("CUDA, 1,000 UUIDs", "cuda", {"CUDA_VISIBLE_DEVICES": _UUIDS}, 64),
    Trial("ROCr, 1,000 indices", "rocm", {"ROCR_VISIBLE_DEVICES": _INDICES}, 64),
    Trial("ROCr, 1,000 UUIDs", "rocm", {"ROCR_VISIBLE_DEVICES": _UUIDS}, 64),
    Trial("HIP, 1,000 indices", "rocm", {"HIP_VISIBLE_DEVICES": _SOME_INDICES}, 64),
    Trial("HIP, 1,000 UUIDs", "rocm", {"HIP_VISIBLE_DEVICES": _UUIDS}, 64),
    Trial("Level Zero, 1,000 cards", "level_zero", _COMPOSITE | {"ZE_AFFINITY_MASK": _INDICES}, 64),
    Trial("Level Zero, 1,000 tiles", "level_zero", _FLAT | {"ZE_AFFINITY_MASK": _INDICES}, 256),
    Trial("SYCL, 1,000 numbers", "sycl", _COMPOSITE | {"ONEAPI_DEVICE_SELECTOR": f"level_zero:{_INDICES}"}, 64),
    Trial("Vulkan, 1,000 numbers", "vulkan", {"GGML_VK_VISIBLE_DEVICES": _SOME_INDICES}, 1000),
)


def timings() -> Iterator[tuple[str, list[float]]]:
    """The seconds that each trial took, again and again; a wrong answer raises ``RuntimeError``."""
    for trial in TRIALS:
        devices = tuple(_device(index, trial.runtime) for index in range(DEVICES))
        yield trial.name, [_seconds(trial, devices) for _ in range(REPEATS)]


def _seconds(trial: Trial, devices: tuple[Device, ...]) -> float:
    reach = frozenset(device.key for device in devices)
    context = Context(reach=reach, driver="current", api="hip", probe="same_env", multi_driver_library=False)
    inventory = Inventory(devices, vulkan=tuple(map(as_vulkan, devices)))
    started = time.perf_counter()
    outcome = masks.invert(trial.runtime, trial.env, inventory, context)
    took = time.perf_counter() - started
    if not isinstance(outcome, Inversion) or len(outcome.devices) != trial.left:
        raise RuntimeError(f"{trial.name}: {outcome}")
    return took


def _device(index: int, runtime: str) -> Device:
    address, uuid = f"{index:04x}:21:00.0", f"GPU-{index:016x}"
    return Device(
        key=DeviceKey("any", uuid if runtime == "cuda" else address),
        physical_index=index,
        pci_bus_id=address,
        uuid=uuid,
        name="card",
        kfd_node=index,
        tiles=4,
        hpc=True,
        integrated=False,
    )


def as_vulkan(device: Device) -> VulkanDevice:
    """The card as its one driver shows it, at the raw position of its index."""
    return VulkanDevice(
        raw_position=device.physical_index or 0,
        kind="discrete",
        driver="driver",
        vendor="any",
        uuid=device.uuid,
        pci_bus_id=device.pci_bus_id,
    )


if __name__ == "__main__":
    for name, took in timings():
        print(f"{name}: {1e3 * statistics.median(took):.2f} ms")
