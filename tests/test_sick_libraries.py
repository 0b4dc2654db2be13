"""What a vendor's library may do to its worker, and what of the vendor's cards, which the kernel tells, stays."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.fakes import amd_smi, ze_loader
from tests.fakes.sysfs import AmdCard, FakeSys, IntelCard, KfdNode
from tests.harness import Daemon, Scrape, Start, run

pytestmark = pytest.mark.e2e

RADEON, ARC = "0000:03:00.0", "0000:07:00.0"
CARDS = (
    AmdCard(
        pci=RADEON,
        minor=0,
        unique_id=0xA0,
        kfd_nodes=(KfdNode(node=1, unique_id=0xA0),),
        temperatures={"edge": 51},
    ),
    IntelCard(pci=ARC, minor=1, device_id="0xe20b", temperatures={"pkg": 61}),
)
CONFIG = "sampling: {reuse_seconds: 0, deadline_seconds: 3, hang_seconds: 2}\n"
TEMPERATURES = {RADEON: 51.0, ARC: 61.0}
HANGS = "#include <unistd.h>\n__attribute__((constructor)) static void begin(void) { for (;;) pause(); }\n"


@pytest.fixture
def tree(tmp_path: Path) -> FakeSys:
    """A host with an AMD and an Intel card."""
    fake = FakeSys(tmp_path / "root")
    fake.write(CARDS)
    return fake


def flags(tree: FakeSys) -> list[str]:
    return [f"--path.sysfs={tree.sys}", f"--path.procfs={tree.proc}"]


def temperatures(page: Scrape) -> dict[str, float]:
    return {sample.labels["pci_bus_id"]: sample.value for sample in page.of("gpu_temperature_celsius")}


def test_libraries_that_crash_are_left_out(tree: FakeSys, tmp_path: Path, start: Start) -> None:
    """After two deaths the workers serve what the kernel tells, and say what they do without; a reload tries again."""
    amd = amd_smi.FakeAmdSmi(tmp_path, amd_smi.build_or_skip(tmp_path / "amd"))
    amd.write([], lines=["crash amdsmi_init *"])
    ze = ze_loader.FakeZeLoader(tmp_path, ze_loader.build_or_skip(tmp_path / "ze"))
    ze.write([], lines=["crash zesInit *"])
    config = CONFIG + f"libraries: {{intel: {ze.shared_object}}}\n"
    daemon = start(amd.environment() | ze.environment(), config, flags(tree))
    daemon.scrape_until(lambda page: temperatures(page) == TEMPERATURES, within=20)
    for _ in range(5):
        assert temperatures(daemon.scrape()) == TEMPERATURES
    assert "the worker hung or died with it" in daemon.log
    ze.write([ze_loader.Gpu(bdf=ARC, name="Arc", device_id=0xE20B, engines=(ze_loader.Engine(rate=0.25),))])
    amd.write([])
    daemon.process.send_signal(signal.SIGHUP)
    page = daemon.scrape_until(lambda page: bool(page.of("gpu_utilization_percent", pci_bus_id=ARC)))
    assert page.value("gpu_utilization_percent", pci_bus_id=ARC) == pytest.approx(25, abs=3)


@pytest.fixture
def hanging(tmp_path: Path) -> Path:
    """A library whose loading never ends, during which no thread of the process that loads it runs."""
    compiler = shutil.which("cc")
    if compiler is None:
        assert os.environ.get("CI") != "true", "no C compiler"
        pytest.skip("no C compiler 'cc' on PATH (Debian: apt-get install gcc libc6-dev)")
    source, target = tmp_path / "hanging.c", tmp_path / "libhanging.so"
    source.write_text(HANGS)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(target), str(source)], check=True)
    return target


def test_a_library_whose_loading_hangs_is_left_out(tree: FakeSys, hanging: Path, start: Start) -> None:
    """The hang verdict ends the worker once, and the next serves without the library."""
    daemon = start({}, CONFIG + f"libraries: {{amd: {hanging}, intel: {hanging}}}\n", flags(tree))
    page = daemon.scrape_until(lambda page: temperatures(page) == TEMPERATURES, within=25)
    assert {sample.value for sample in page.of("gpu_exporter_backend_up")} == {1.0}
    assert daemon.log.count("worker ended") == 2


def test_a_late_answer_is_no_hang(tree: FakeSys, start: Start) -> None:
    """A worker that answered after its deadline is not ended when the next scrape comes late."""
    daemon = start({}, CONFIG.replace("hang_seconds: 2", "hang_seconds: 1"), flags(tree))
    daemon.scrape_until(lambda page: temperatures(page) == TEMPERATURES)
    (worker,) = daemon.workers("amd")
    os.kill(worker, signal.SIGSTOP)
    daemon.scrape(timeout=0.8)
    os.kill(worker, signal.SIGCONT)
    time.sleep(1.5)
    daemon.scrape_until(lambda page: temperatures(page) == TEMPERATURES)
    assert daemon.workers("amd") == [worker]
    assert "worker ended" not in daemon.log


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_worker_outlives_the_daemon(tree: FakeSys, hanging: Path, start: Start, number: int) -> None:
    """Though it hangs in a way in which it cannot notice that the daemon is gone."""
    daemon = start({}, CONFIG + f"libraries: {{amd: {hanging}, intel: {hanging}}}\n", flags(tree))
    daemon.scrape(timeout=1)
    workers = daemon.workers()
    assert workers
    daemon.process.send_signal(number)
    daemon.process.wait(10)
    until = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_file_of_the_bus_that_hangs_stops_no_page(tree: FakeSys, start: Start) -> None:
    """The parent looks for vendors on the bus, one file a device; here one of them never answers."""
    device = tree.sys / "bus/pci/devices/0000:55:00.0"
    device.mkdir()
    os.mkfifo(device / "vendor")
    daemon = start({}, CONFIG, flags(tree))
    assert daemon.request("/-/healthy").status == 200
    assert daemon.request("/metrics").status == 200
    assert daemon.stop()[0] == 0


def test_one_page_has_what_needs_two_readings(tree: FakeSys) -> None:
    """`once` reads twice where a counter needs it."""
    page = run("once", *flags(tree)).stdout
    assert f'gpu_utilization_percent{{fleet="host",fleet_index="0",pci_bus_id="{ARC}"' in page


def test_a_mask_for_one_vendor_makes_no_row_of_others_that_are_not_there(tmp_path: Path, start: Start) -> None:
    """The daemon's own mask is ROCm's, and the host has AMD's cards alone: there is no fleet `host` to be refused."""
    fake = FakeSys(tmp_path / "root")
    fake.write(CARDS[:1])
    page = start({"HIP_VISIBLE_DEVICES": "0"}, None, flags(fake)).scrape()
    rows = {sample.labels["fleet"]: sample.value for sample in page.of("gpu_fleet_mask_inverted")}
    assert rows == {"default": 1.0}


# --- what changes under a fleet

FLEETS = (
    CONFIG
    + """
fleets:
  - {name: by_index, runtime: rocm, env: {HIP_VISIBLE_DEVICES: "0"}}
  - {name: by_uuid, runtime: rocm, env: {ROCR_VISIBLE_DEVICES: GPU-00000000000000a0}}
"""
)


def bound(daemon: Daemon) -> dict[str, str]:
    """The card of each fleet."""
    rows = daemon.scrape().of("gpu_fleet_device_info")
    return {sample.labels["fleet"]: sample.labels["pci_bus_id"] for sample in rows}


def test_a_refusal_ends_when_what_was_not_known_is(tmp_path: Path, start: Start) -> None:
    """The KFD comes later than the cards: the same cards have their order then."""
    fake = FakeSys(tmp_path / "root")
    second = AmdCard(pci="0000:13:00.0", minor=1, unique_id=0xA1, kfd_nodes=(KfdNode(node=2, unique_id=0xA1),))
    cards = [CARDS[0], second]
    fake.write(cards, kfd=False)
    daemon = start({}, FLEETS, flags(fake))
    assert bound(daemon) == {"by_uuid": RADEON}
    fake.write(cards)
    daemon.scrape_until(lambda page: len(page.of("gpu_fleet_device_info")) == 2)
    assert bound(daemon) == {"by_index": RADEON, "by_uuid": RADEON}


def test_another_card_at_the_same_address_is_not_what_a_mask_named(tree: FakeSys, start: Start) -> None:
    """A card is replaced: until a reload neither fleet has it, since the cards that they counted are not there."""
    daemon = start({}, FLEETS, flags(tree))
    assert bound(daemon) == {"by_index": RADEON, "by_uuid": RADEON}
    tree.remove(RADEON)
    assert bound(daemon) == {}
    other = AmdCard(pci=RADEON, minor=0, kfd_nodes=(KfdNode(node=1, unique_id=0x99),), temperatures={"edge": 71})
    tree.write([other, *CARDS[1:]])
    daemon.scrape_until(lambda page: bool(page.of("gpu_info", pci_bus_id=RADEON, uuid="GPU-0000000000000099")))
    assert bound(daemon) == {}
    tree.write(CARDS)
    daemon.scrape_until(lambda page: bool(page.of("gpu_fleet_device_info")))
    assert bound(daemon) == {"by_index": RADEON, "by_uuid": RADEON}
