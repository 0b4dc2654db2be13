"""Drivers asked by the real daemon: Vulkan's enumeration, HIP's and Level Zero's lists, beside the pretend backends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes import amdhip64, sysfs, vulkan, ze_driver
from tests.fakes.nvml import FakeNvml, equal_cards
from tests.harness import Daemon, Start
from tests.process_host import wait_for

pytestmark = pytest.mark.e2e


def evidence(daemon: Daemon, fleet: str) -> list[tuple[str, str]]:
    """The address and the grade by fleet index."""
    rows = daemon.scrape().of("gpu_fleet_device_info", fleet=fleet)
    ordered = sorted(rows, key=lambda row: int(row.labels["fleet_index"]))
    return [(row.labels["pci_bus_id"], row.labels["evidence"]) for row in ordered]


def reasons(daemon: Daemon, fleet: str) -> set[str]:
    """Why the fleet is refused."""
    return {row.labels["reason"] for row in daemon.scrape().of("gpu_fleet_mask_refusal_info", fleet=fleet)}


def test_vulkan(nvml: FakeNvml, start: Start, tmp_path: Path) -> None:
    """Refused until the raw devices are enumerated; then ggml's mask counts these, in the loader's order."""
    cards = equal_cards(4)
    nvml.write(cards)
    driver = vulkan.FakeVulkan(tmp_path, vulkan.build_or_skip(tmp_path))
    order = (2, 0, 3, 1)
    driver.write(
        [
            vulkan.Gpu(driver="llvmpipe", type="cpu", name="llvmpipe"),
            *(vulkan.Gpu(driver="nvidia", pci=cards[place].pci, boot_vga=place == 2) for place in order),
        ]
    )
    environment = {**driver.environment(), **nvml.environment()}
    environment["LD_LIBRARY_PATH"] += f":{driver.folder}"
    config = """
sampling: {reuse_seconds: 0}
fleets:
- {name: ggml, runtime: vulkan, env: {GGML_VK_VISIBLE_DEVICES: "1,0"}}
- {name: layered, runtime: vulkan, env: {VK_INSTANCE_LAYERS: x}}
"""
    daemon = start(environment, config)
    wait_for(lambda: bool(evidence(daemon, "ggml")))
    found = evidence(daemon, "ggml")
    assert {grade for _, grade in found} == {"probed"}
    assert [address for address, _ in found] == [str(cards[place].pci)[-12:].lower() for place in (0, 2)]
    assert reasons(daemon, "layered") == {"raw-order-unknown"}
    assert not set(driver.record()) & set(vulkan.FORBIDDEN)


def test_hip_and_level_zero(start: Start, tmp_path: Path) -> None:
    """What the masks leave open is the driver's to say, for two vendors of one host: HIP reads no mask of OpenCL's, and
    this old Level Zero driver does not sort its cards.
    """
    host = sysfs.FakeSys(tmp_path / "host")
    nodes = [(sysfs.KfdNode(node=3),), (sysfs.KfdNode(node=2),)]
    amd = [sysfs.AmdCard(pci=f"0000:{4 + place}3:00.0", minor=place, kfd_nodes=nodes[place]) for place in (0, 1)]
    intel = [
        sysfs.IntelCard(pci="0000:03:00.0", minor=2),
        sysfs.IntelCard(pci="0000:00:02.0", minor=3, device_id="0x4680", driver="i915"),
    ]
    host.write([*amd, *intel])
    hip = amdhip64.FakeHip(tmp_path, amdhip64.build_or_skip(tmp_path))
    hip.write([amdhip64.Gpu(node=3 - place, bdf=card.pci) for place, card in enumerate(amd)])
    zero = ze_driver.FakeZeDriver(tmp_path, ze_driver.build_or_skip(tmp_path))
    boards = [ze_driver.Gpu(bdf=intel[1].pci, integrated=True, rank=1), ze_driver.Gpu(bdf=intel[0].pci, rank=2)]
    zero.write(boards, lines=["unsorted 0 1"])
    config = """
sampling: {reuse_seconds: 0}
fleets:
- {name: ordinal, runtime: rocm, env: {GPU_DEVICE_ORDINAL: "1"}}
- {name: zero, runtime: level_zero}
- {name: current, runtime: level_zero, known: {driver: current}}
"""
    flags = [f"--path.sysfs={host.sys}", f"--path.procfs={host.proc}"]
    daemon = start({**hip.environment(), **zero.environment()}, config, flags)
    wait_for(lambda: bool(evidence(daemon, "ordinal")) and bool(evidence(daemon, "zero")))
    assert evidence(daemon, "ordinal") == [(amd[1].pci, "probed"), (amd[0].pci, "probed")]
    assert evidence(daemon, "zero") == [(intel[1].pci, "probed"), (intel[0].pci, "probed")]
    # What was stated of the driver proves another order, which the driver itself contradicts.
    assert reasons(daemon, "current") == {"contradicted"}
    assert not set(hip.record()) & set(amdhip64.FORBIDDEN)
    assert not set(zero.record()) & set(ze_driver.REFUSED_CALLS)
