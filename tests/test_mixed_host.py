"""A host that has all three vendors' cards: one page, each vendor's masks undone over its own cards, none taken down by
another.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests import pages
from tests.fakes.nvml import GIB, FakeNvml, Gpu
from tests.fakes.sysfs import AmdCard, Client, FakeSys, IntelCard, KfdNode, OtherCard, mounted, needs_root
from tests.harness import Daemon, Prometheus, Scrape, Start, Target, tool

pytestmark = pytest.mark.e2e

L40S, A2 = "0000:21:00.0", "0000:41:00.0"
RADEON, APU = "0000:03:00.0", "0000:c4:00.0"
UHD, ARC = "0000:00:02.0", "0000:07:00.0"
ADDRESSES = {"nvidia": (L40S, A2), "amd": (RADEON, APU), "intel": (UHD, ARC)}
CARDS = (
    OtherCard(pci=L40S),
    OtherCard(pci=A2),
    # The KFD has the APU first, amd-smi has it last.
    AmdCard(pci=RADEON, minor=1, kfd_nodes=(KfdNode(node=2, unique_id=0xA0),), busy=31),
    AmdCard(
        pci=APU,
        device_id="0x1681",
        minor=0,
        kfd_nodes=(KfdNode(node=1),),
        busy=32,
        vram_total=GIB // 2,
        vram_used=GIB // 4,
        temperatures={"edge": 39},
    ),
    IntelCard(pci=UHD, device_id="0x4680", driver="i915", minor=2),
    IntelCard(pci=ARC, device_id="0xe20b", driver="xe", minor=3, temperatures={"pkg": 61, "vram": 60}),
)
GPUS = tuple(
    Gpu(
        uuid=f"GPU-{letter * 8}-0000-4000-8000-000000000000",
        pci=f"0000{address}",
        name=name,
        total=48 * GIB,
        free=free * GIB,
        used=GIB,
        util=util,
        temp=util + 30,
    )
    for letter, address, name, free, util in (("a", L40S, "NVIDIA L40S", 40, 11), ("b", A2, "NVIDIA A2", 4, 12))
)

CONFIG = f"""
sampling: {{reuse_seconds: 0, deadline_seconds: 4}}
fleets:
  - {{name: host, runtime: host}}
  - name: both
    env:
      CUDA_DEVICE_ORDER: PCI_BUS_ID
      CUDA_VISIBLE_DEVICES: "1"
      HIP_VISIBLE_DEVICES: "0"
      ZE_AFFINITY_MASK: "1"
  - {{name: hidden, env: {{CUDA_VISIBLE_DEVICES: "-1"}}}}
  - {{name: radeon, runtime: rocm, env: {{ROCR_VISIBLE_DEVICES: GPU-00000000000000a0}}}}
  - {{name: arc, runtime: level_zero, reach: ["{ARC}"], env: {{ZE_AFFINITY_MASK: "0"}}}}
"""


def clients(step: int) -> tuple[Client, ...]:
    """Half of the discrete card's time is busy between two steps, and none of the integrated one's."""
    return (
        Client(pid=100, pci=ARC, client_id=5, cycles={"ccs": (500 * step, 1000 * step)}),
        Client(pid=101, pci=UHD, client_id=6, engines={"render": 77}),
    )


@pytest.fixture
def tree(tmp_path: Path) -> FakeSys:
    """The kernel's files of the host."""
    fake = FakeSys(tmp_path / "root")
    fake.write(CARDS, clients(1))
    return fake


@pytest.fixture
def daemon(tree: FakeSys, nvml: FakeNvml, start: Start) -> Daemon:
    """The daemon on that host, with every backend up."""
    nvml.write(GPUS)
    flags = [f"--path.sysfs={tree.sys}", f"--path.procfs={tree.proc}"]
    served = start(nvml.environment(), CONFIG, flags)
    served.scrape_until(lambda page: up(page) == {"nvidia": 1, "amd": 1, "intel": 1})
    return served


def up(page: Scrape) -> dict[str, float]:
    return {sample.labels["vendor"]: sample.value for sample in page.of("gpu_exporter_backend_up")}


def cards_of(page: Scrape, fleet: str, name: str = "gpu_fleet_device_info") -> dict[tuple[str, str], str]:
    """The PCI address by vendor and fleet index."""
    found = (sample.labels for sample in page.of(name, fleet=fleet))
    return {(labels["vendor"], labels["fleet_index"]): labels["pci_bus_id"] for labels in found}


def values(page: Scrape, name: str, fleet: str = "host") -> dict[str, float]:
    return {sample.labels["pci_bus_id"]: sample.value for sample in page.of(name, fleet=fleet)}


def test_one_page_has_every_vendors_cards_under_their_own_masks(daemon: Daemon, tree: FakeSys) -> None:
    """One environment is read by each runtime in its own way, over its own cards (field case F37)."""
    tree.write(CARDS, clients(2))
    page = daemon.scrape()
    assert cards_of(page, "both") == {("nvidia", "0"): A2, ("amd", "0"): APU, ("intel", "0"): UHD}
    assert cards_of(page, "hidden") == {("intel", "0"): ARC, ("intel", "1"): UHD}
    assert cards_of(page, "radeon") == {("amd", "0"): RADEON}
    assert cards_of(page, "arc") == {("intel", "0"): ARC}
    inverted = {
        (each.labels["fleet"], each.labels["runtime"]): each.value for each in page.of("gpu_fleet_mask_inverted")
    }
    assert set(inverted.values()) == {1}
    assert {runtime for fleet, runtime in inverted if fleet == "both"} == {"cuda", "rocm", "level_zero"}


def test_every_reading_is_its_cards_own(daemon: Daemon, tree: FakeSys) -> None:
    """The three names have one unit for all; what a card's driver does not give has no series."""
    tree.write(CARDS, clients(2))
    page = daemon.scrape()
    busy = {L40S: 11, A2: 12, RADEON: 31, APU: 32, UHD: 0, ARC: 50}
    assert values(page, "gpu_utilization_percent") == busy
    assert values(page, "gpu_temperature_celsius") == {L40S: 41, A2: 42, RADEON: 51, APU: 39, ARC: 61}
    free = {L40S: 40 * GIB, A2: 4 * GIB, RADEON: 22 * GIB, APU: GIB // 4}
    assert values(page, "gpu_memory_free_bytes") == free
    assert values(page, "gpu_utilization_percent", "both") == {A2: 12, APU: 32, UHD: 0}
    assert {each.labels["hint"] for each in page.of("gpu_exporter_hint_info")} == {"install-level-zero"}


def test_the_page_is_as_every_page_must_be(daemon: Daemon) -> None:
    """Each family once over all vendors, no series twice, both formats (field case F86)."""
    for accept in ("text/plain", "application/openmetrics-text;version=1.0.0"):
        pages.check(daemon.request("/metrics", headers={"Accept": accept}).body)
    pages.promtool(daemon.request("/metrics").body)


def worker(daemon: Daemon, vendor: str) -> int:
    """The process that reads the vendor's cards."""
    (pid,) = daemon.workers(vendor)
    return pid


def others_are_whole(page: Scrape, vendor: str) -> bool:
    """Every card of the other vendors has its readings, and the vendor's have none."""
    found = values(page, "gpu_utilization_percent")
    rest = {address for other, cards in ADDRESSES.items() if other not in (vendor, "intel") for address in cards}
    return rest <= found.keys() and not found.keys() & set(ADDRESSES[vendor])


@pytest.mark.parametrize("vendor", ADDRESSES)
def test_a_hanging_worker_costs_its_vendor_alone(daemon: Daemon, vendor: str) -> None:
    """Within the scrape's deadline the other two's series are there; afterwards so are the vendor's."""
    pid = worker(daemon, vendor)
    os.kill(pid, signal.SIGSTOP)
    try:
        page = daemon.scrape(timeout=1.5)
        assert page.seconds < 1.5
        assert others_are_whole(page, vendor)
        assert up(page) == {other: float(other != vendor) for other in ADDRESSES}
        for other in ADDRESSES.keys() - {vendor}:
            assert {address for (name, _), address in cards_of(page, "host").items() if name == other} == set(
                ADDRESSES[other]
            )
    finally:
        os.kill(pid, signal.SIGCONT)
    daemon.scrape_until(lambda page: up(page) == dict.fromkeys(ADDRESSES, 1.0))


@pytest.mark.parametrize("vendor", ADDRESSES)
def test_a_killed_worker_costs_its_vendor_at_most_a_moment(daemon: Daemon, vendor: str) -> None:
    """The other two's series are on every page, and the vendor's come back without a restart."""
    before = {fleet: cards_of(daemon.scrape(), fleet) for fleet in ("host", "both")}
    os.kill(worker(daemon, vendor), signal.SIGKILL)
    until = time.monotonic() + 15
    while True:
        page = daemon.scrape()
        for fleet, cards in before.items():
            rest = {place: address for place, address in cards.items() if place[0] != vendor}
            assert rest.items() <= cards_of(page, fleet).items()
        if up(page)[vendor] == 1:
            break
        assert time.monotonic() < until
        time.sleep(0.1)
    assert {fleet: cards_of(page, fleet) for fleet in before} == before


def test_a_card_that_hangs_costs_no_other(daemon: Daemon, tree: FakeSys) -> None:
    """A file of one AMD card that never answers: every other card of the host has its readings."""
    tree.fault(APU, "gpu_busy_percent", "fifo")
    page = daemon.scrape(timeout=1.5)
    assert page.state(pci_bus_id=APU) == "hung"
    assert values(page, "gpu_utilization_percent").keys() >= {L40S, A2, RADEON}
    assert APU not in values(page, "gpu_utilization_percent")


def test_the_daemon_without_flags_on_such_a_host(tree: FakeSys, nvml: FakeNvml, start: Start) -> None:
    """The trees are where the kernel has them: bound over /sys and /proc in a mount namespace."""
    needs_root()
    nvml.write(GPUS)
    served = start(nvml.environment(), CONFIG, within=lambda command: mounted(tree.sys, command, proc=tree.proc))
    page = served.scrape_until(lambda page: up(page) == {"nvidia": 1, "amd": 1, "intel": 1})
    assert cards_of(page, "both") == {("nvidia", "0"): A2, ("amd", "0"): APU, ("intel", "0"): UHD}
    assert values(page, "gpu_temperature_celsius") == {L40S: 41, A2: 42, RADEON: 51, APU: 39, ARC: 61}


def test_prometheus_has_both_numbers_of_every_vendor(daemon: Daemon, tmp_path: Path) -> None:
    """A real Prometheus scrapes it: the workload's number beside the tool's, which differ for each vendor."""
    with Prometheus(tool("prometheus"), tmp_path, Target(f"127.0.0.1:{daemon.port}")) as prometheus:
        result = prometheus.wait_for('gpu_fleet_device_info{fleet="both"} == 1 and on() count(up == 1)')
    found = {each["metric"]["vendor"]: each["metric"] for each in result}
    assert {vendor: (labels["fleet_index"], labels["physical_index"]) for vendor, labels in found.items()} == {
        "nvidia": ("0", "1"),
        "amd": ("0", "1"),
        "intel": ("0", "0"),
    }
