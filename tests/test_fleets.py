"""Where fleets come from: the settings, else the daemon's own masks, else the host as it is."""

from __future__ import annotations

import pytest

from exporter.config import FleetSettings, Settings
from exporter.fleets import HOST, from_settings
from exporter.model import Fleet

VENDORS = ("nvidia", "amd", "intel")


@pytest.mark.parametrize(
    ("environ", "runtimes", "others"),
    [
        ({"CUDA_VISIBLE_DEVICES": "1"}, ("cuda", "rocm"), ("intel",)),
        ({"HIP_VISIBLE_DEVICES": ""}, ("rocm",), ("nvidia", "intel")),
        ({"ZE_AFFINITY_MASK": "0", "ROCR_VISIBLE_DEVICES": "1"}, ("rocm", "level_zero"), ("nvidia",)),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "ZE_FLAT_DEVICE_HIERARCHY": "FLAT"}, ("cuda", "level_zero"), ("amd",)),
        ({"CUDA_VISIBLE_DEVICES": "1", "ZE_AFFINITY_MASK": "0"}, ("cuda", "rocm", "level_zero"), ()),
    ],
)
def test_the_daemons_own_masks(environ: dict[str, str], runtimes: tuple[str, ...], others: tuple[str, ...]) -> None:
    """They make `default` for the vendors whose runtime reads them, and the other vendors' cards stay in `host`."""
    default, *host = from_settings(Settings(), {**environ, "HOME": "/root"}, VENDORS)
    assert default == Fleet(name="default", runtimes=runtimes, env=environ)
    assert host == ([Fleet(name="host", runtimes=("host",), vendors=others)] if others else [])


def test_no_mask_of_a_default_runtime_is_the_host() -> None:
    """The variables of SYCL, Vulkan and containers are no wish to see a part of the host."""
    environ = dict.fromkeys(("ONEAPI_DEVICE_SELECTOR", "GGML_VK_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"), "0")
    assert from_settings(Settings(), environ, VENDORS) == (HOST,)


def test_a_fleet_that_names_no_runtime_has_each_vendors_own() -> None:
    """A named one has that alone; the daemon's environment does not matter."""
    settings = Settings(
        fleets=(FleetSettings("a"), FleetSettings("b", "sycl", {"ZE_AFFINITY_MASK": "0"}, ("03:00.0",)))
    )
    assert from_settings(settings, {"CUDA_VISIBLE_DEVICES": "1"}, VENDORS) == (
        Fleet(name="a", runtimes=("cuda", "rocm", "level_zero")),
        Fleet(name="b", runtimes=("sycl",), env={"ZE_AFFINITY_MASK": "0"}, reach=("03:00.0",)),
    )
