"""Cards, workers and drivers that fail: each costs its own series, and comes back by itself."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from exporter.parent import OTHER_VERSION
from tests.fakes.nvml import FakeNvml, Gpu, Mig, build_or_skip, equal_cards
from tests.harness import Scrape, Start, clean_environment, parse

pytestmark = pytest.mark.e2e

NAMED = "backends: [nvidia]\n"
FRESH = NAMED + "sampling: {reuse_seconds: 0}\n"
READINGS = (
    "gpu_utilization_percent",
    "gpu_memory_free_bytes",
    "gpu_memory_used_bytes",
    "gpu_memory_total_bytes",
    "gpu_temperature_celsius",
)


def readings(scrape: Scrape, index: str) -> int:
    """How many readings a page has of a card."""
    return sum(len(scrape.of(name, physical_index=index)) for name in READINGS)


def fault(scrape: Scrape) -> str:
    """Why the NVIDIA backend is down; empty while it is up."""
    found = [sample.labels["reason"] for sample in scrape.of("gpu_exporter_backend_fault_info", vendor="nvidia")]
    assert (scrape.value("gpu_exporter_backend_up", vendor="nvidia") == 0) == bool(found)
    return found[0] if found else ""


def test_a_hung_card_costs_only_its_own_readings(nvml: FakeNvml, start: Start) -> None:
    """One page waits up to its deadline and has the other card's live value; the next come at once; it heals."""
    daemon = start(nvml.environment(), FRESH)
    cards = equal_cards(2)
    nvml.write(cards)
    assert readings(daemon.scrape(), "0") == len(READINGS)
    moved = (dataclasses.replace(cards[0], util=77), cards[1])
    nvml.write(moved, lines=["hang nvmlDeviceGetTemperatureV 1"])
    first = daemon.scrape(timeout=2)
    assert first.seconds < 1.6
    again = [daemon.scrape(timeout=2) for _ in range(5)]
    assert max(scrape.seconds for scrape in again) < 0.1
    for scrape in (first, *again):
        assert scrape.value("gpu_utilization_percent", physical_index="0") == 77
        assert readings(scrape, "1") == 0
        assert scrape.state(physical_index="1") == "hung"
        assert scrape.state(physical_index="0") == "ok"
        assert len(scrape.of("gpu_info")) == 2
    assert again[-1].value("gpu_exporter_backend_faults_total", reason="hung") >= 5
    nvml.write(cards)
    healed = daemon.scrape_until(lambda scrape: scrape.state(physical_index="1") == "ok")
    assert readings(healed, "1") == len(READINGS)


@pytest.mark.parametrize("call", ["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMemoryInfo_v2"])
def test_a_card_that_hangs_from_the_start_is_known(nvml: FakeNvml, start: Start, call: str) -> None:
    """A card that can be identified and not be read is `hung` on the very first page, and keeps its place."""
    nvml.write(equal_cards(3), lines=[f"hang {call} 1"])
    config = FRESH + 'fleets: [{name: chat, env: {CUDA_VISIBLE_DEVICES: "1,2", CUDA_DEVICE_ORDER: PCI_BUS_ID}}]'
    scrape = start(nvml.environment(), config).scrape(timeout=2)
    assert scrape.state(physical_index="1") == "hung"
    assert readings(scrape, "1") == 0
    assert scrape.value("gpu_fleet_device_info", fleet_index="0", physical_index="1") == 1
    assert scrape.value("gpu_utilization_percent", fleet_index="1", physical_index="2") == 30


def test_a_card_that_fails_every_reading_is_lost(nvml: FakeNvml, start: Start) -> None:
    """A card that says who it is and gives no reading is told from an idle one by its state."""
    daemon = start(nvml.environment(), FRESH)
    daemon.scrape()
    calls = ("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetTemperatureV")
    nvml.write(equal_cards(2), lines=[f"fault {call} 0 16" for call in calls])
    scrape = daemon.scrape()
    assert scrape.state(physical_index="0") == "lost"
    assert scrape.state(physical_index="1") == "ok"
    nvml.write(equal_cards(2), lines=["fault * 0 999"])
    assert daemon.scrape().state(physical_index="0") == "lost"


def test_all_cards_hung_leave_the_page_up(nvml: FakeNvml, start: Start) -> None:
    """With every card hung the page still comes at once, with every card's state and no reading."""
    daemon = start(nvml.environment(), FRESH)
    nvml.write(equal_cards(2))
    daemon.scrape()
    nvml.write(equal_cards(2), lines=["hang * *"])
    daemon.scrape(timeout=1)
    scrape = daemon.scrape(timeout=1)
    assert scrape.seconds < 0.1
    assert [readings(scrape, index) for index in "01"] == [0, 0]
    assert [scrape.state(physical_index=index) for index in "01"] == ["hung", "hung"]


def test_a_hang_in_starting_the_library_is_told_and_ended(nvml: FakeNvml, start: Start) -> None:
    """A library that hangs while it starts leaves the page up with a reason; its worker is ended and replaced."""
    nvml.write(equal_cards(2), lines=["hang nvmlInitWithFlags *"])
    daemon = start(nvml.environment(), NAMED + "sampling: {hang_seconds: 1, deadline_seconds: 1, reuse_seconds: 0}")
    assert fault(daemon.scrape()) in ("starting", "hung")
    (first,) = daemon.workers("nvidia")
    daemon.scrape_until(lambda scrape: fault(scrape) == "hung")
    daemon.scrape_until(lambda _: daemon.workers("nvidia") not in ([first], []))
    nvml.write(equal_cards(2))
    assert readings(daemon.scrape_until(lambda scrape: not fault(scrape)), "1") == len(READINGS)


UNNAMED = "hang nvmlDeviceGetUUID 0"


def test_a_card_that_hangs_is_not_taken_for_one_that_left(nvml: FakeNvml, start: Start) -> None:
    """When cards have left, what was known of a place says nothing of who hangs there before it has a name."""
    cards = equal_cards(3)
    nvml.write(cards)
    daemon = start(nvml.environment(), FRESH)
    daemon.scrape()
    nvml.write(cards[1:], lines=[UNNAMED])
    scrape = daemon.scrape(timeout=2)
    assert [sample.labels["uuid"] for sample in scrape.of("gpu_info")] == [str(cards[2].uuid)]
    assert scrape.value("gpu_utilization_percent", physical_index="1") == cards[2].util


def test_a_card_that_moved_is_where_it_was_read(nvml: FakeNvml, start: Start) -> None:
    """Not where it was, also while another card hangs there."""
    cards = equal_cards(2)
    nvml.write(cards)
    daemon = start(nvml.environment(), FRESH)
    daemon.scrape()
    nvml.write(cards[::-1], lines=[UNNAMED])
    scrape = daemon.scrape(timeout=2)
    assert [sample.labels["physical_index"] for sample in scrape.of("gpu_info", uuid=str(cards[0].uuid))] == ["1"]
    assert scrape.state(uuid=str(cards[0].uuid)) == "ok"
    assert readings(scrape, "1") == len(READINGS)


def test_a_late_answer_is_never_served(nvml: FakeNvml, start: Start) -> None:
    """A value that was read after its cycle's deadline does not appear in a later page."""
    daemon = start(nvml.environment(), FRESH)
    cards = equal_cards(2)
    nvml.write(cards)
    daemon.scrape()
    nvml.write(cards, lines=["slow nvmlDeviceGetUtilizationRates 1 1500"])
    assert readings(daemon.scrape(timeout=1), "1") == 0
    nvml.write((cards[0], dataclasses.replace(cards[1], util=99)))
    time.sleep(1.5)
    assert daemon.scrape().value("gpu_utilization_percent", physical_index="1") == 99


def test_a_cycle_that_nobody_waited_for_is_not_served_later(nvml: FakeNvml, start: Start) -> None:
    """What a cycle found after its scrapers had gone is old when the next one comes, and is read anew."""
    daemon = start(nvml.environment(), NAMED)
    cards = equal_cards(2)
    for util in (51, 52, 53):
        daemon.scrape()
        (worker,) = daemon.workers("nvidia")
        time.sleep(1)
        os.kill(worker, signal.SIGSTOP)
        assert fault(daemon.scrape(timeout=0.5)) == "hung"
        os.kill(worker, signal.SIGCONT)
        time.sleep(1)
        nvml.write((dataclasses.replace(cards[0], util=util), cards[1]))
        assert daemon.scrape().value("gpu_utilization_percent", physical_index="0") == util


def test_two_slots_with_one_identity_have_no_reading(nvml: FakeNvml, start: Start) -> None:
    """When the driver gives one UUID for two cards, neither's values are shown under it, and the others' are."""
    cards = equal_cards(3)
    nvml.write([cards[0], dataclasses.replace(cards[1], uuid=cards[0].uuid), cards[2]])
    scrape = start(nvml.environment(), FRESH).scrape()
    assert scrape.of("gpu_utilization_percent", uuid=str(cards[0].uuid)) == []
    assert scrape.state(uuid=str(cards[0].uuid)) == "lost"
    assert readings(scrape, "2") == len(READINGS)
    numbers = FRESH + 'fleets: [{name: c, env: {CUDA_VISIBLE_DEVICES: "1", CUDA_DEVICE_ORDER: PCI_BUS_ID}}]'
    refused = start(nvml.environment(), numbers).scrape()
    assert refused.value("gpu_fleet_mask_refusal_info", fleet="c", reason="inventory-incomplete") == 1


def test_a_lost_card_keeps_its_place_and_comes_back(nvml: FakeNvml, start: Start) -> None:
    """A card off the bus has its state and no reading, the fleet's other indices stay, and it returns as it was."""
    config = FRESH + 'fleets: [{name: chat, env: {CUDA_VISIBLE_DEVICES: "1,2", CUDA_DEVICE_ORDER: PCI_BUS_ID}}]'
    daemon = start(nvml.environment(), config)
    before = daemon.scrape()
    nvml.write(equal_cards(4), lines=["lost 1"])
    lost = daemon.scrape()
    assert lost.state(physical_index="1") == "lost"
    assert readings(lost, "1") == 0
    assert lost.value("gpu_utilization_percent", fleet_index="1", physical_index="2") == 30
    assert lost.value("gpu_fleet_mask_inverted", fleet="chat") == 1
    assert lost.value("gpu_exporter_backend_faults_total", reason="device-lost") == 1
    nvml.write(equal_cards(4))
    after = daemon.scrape()
    for name in READINGS:
        assert after.of(name) == before.of(name)


def test_a_card_that_leaves_or_moves_changes_no_fleet(nvml: FakeNvml, start: Start) -> None:
    """After a card is unbound, the others' indices shift; a bound fleet keeps its cards under their new numbers."""
    config = FRESH + 'fleets: [{name: chat, env: {CUDA_VISIBLE_DEVICES: "1,2", CUDA_DEVICE_ORDER: PCI_BUS_ID}}]'
    daemon = start(nvml.environment(), config)
    daemon.scrape()
    cards = equal_cards(4)
    nvml.write(cards[1:])
    scrape = daemon.scrape()
    found = {
        (s.labels["fleet_index"], s.labels["physical_index"], s.value) for s in scrape.of("gpu_utilization_percent")
    }
    assert found == {("0", "0", 20), ("1", "1", 30)}
    assert len(scrape.of("gpu_info")) == 3
    assert scrape.of("gpu_info", uuid=str(cards[0].uuid)) == []
    nvml.write(cards)
    assert {s.labels["physical_index"] for s in daemon.scrape().of("gpu_utilization_percent")} == {"1", "2"}


def test_a_card_that_took_anothers_number_and_is_silent_refuses_numbers(nvml: FakeNvml, start: Start) -> None:
    """A card of a lower address has come in place of one: who has number 0 is not known while the new one does not say
    who it is, though as many cards are known as are counted. Once it does, its number is its own.
    """
    new, kept, gone = equal_cards(3)
    nvml.write([kept, gone])
    config = FRESH + 'fleets: [{name: chat, env: {CUDA_VISIBLE_DEVICES: "0", CUDA_DEVICE_ORDER: PCI_BUS_ID}}]'
    daemon = start(nvml.environment(), config)
    assert daemon.scrape().value("gpu_fleet_device_info", uuid=str(kept.uuid)) == 1
    nvml.write([new, kept], lines=["fault nvmlDeviceGetUUID 0 999"])
    daemon.scrape()
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for_log("(?s)settings loaded.*settings loaded")
    scrape = daemon.scrape()
    assert scrape.value("gpu_fleet_mask_refusal_info", fleet="chat", reason="inventory-incomplete") == 1
    assert scrape.of("gpu_fleet_device_info") == []
    nvml.write([new, kept])
    assert daemon.scrape().value("gpu_fleet_device_info", uuid=str(new.uuid), physical_index="0") == 1


def test_counting_that_hangs_costs_no_reading(nvml: FakeNvml, start: Start) -> None:
    """The cards that were there are read all the same, and named; how many there are is not known, so a mask of numbers
    that is read only now is refused.
    """
    config = FRESH + 'fleets: [{name: chat, env: {CUDA_VISIBLE_DEVICES: "1", CUDA_DEVICE_ORDER: PCI_BUS_ID}}]'
    daemon = start(nvml.environment(), config)
    daemon.scrape()
    cards = equal_cards(4)
    nvml.write((cards[0], dataclasses.replace(cards[1], util=77), *cards[2:]), lines=["hang nvmlDeviceGetCount_v2 *"])
    for _ in range(3):
        scrape = daemon.scrape(timeout=2)
        assert scrape.value("gpu_utilization_percent", fleet="chat") == 77
        assert [scrape.state(physical_index=index) for index in "0123"] == ["ok"] * 4
    assert scrape.seconds < 0.5
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for_log("(?s)settings loaded.*settings loaded")
    refused = daemon.scrape(timeout=2)
    assert refused.value("gpu_fleet_mask_refusal_info", fleet="chat", reason="inventory-incomplete") == 1
    nvml.write(cards)
    again = daemon.scrape_until(lambda page: bool(page.of("gpu_utilization_percent", fleet="chat")))
    assert again.value("gpu_utilization_percent", fleet="chat", physical_index="1") == 20


def test_a_card_missing_at_the_start_refuses_numbers_until_it_is_there(nvml: FakeNvml, start: Start) -> None:
    """While the library counts a card that cannot be identified, index masks are refused and UUID masks are not."""
    cards = equal_cards(4)
    nvml.write(cards, lines=["lost 0"])
    config = (
        FRESH
        + f"""
fleets:
  - {{name: numbers, env: {{CUDA_VISIBLE_DEVICES: "1", CUDA_DEVICE_ORDER: PCI_BUS_ID}}}}
  - {{name: uuid, env: {{CUDA_VISIBLE_DEVICES: "{cards[1].uuid}"}}}}
"""
    )
    daemon = start(nvml.environment(), config)
    scrape = daemon.scrape()
    assert scrape.value("gpu_fleet_mask_refusal_info", fleet="numbers", reason="inventory-incomplete") == 1
    assert scrape.value("gpu_utilization_percent", fleet="uuid", physical_index="1") == 20
    nvml.write(cards)
    assert daemon.scrape().value("gpu_utilization_percent", fleet="numbers", physical_index="1") == 20


def test_a_crash_costs_one_cycle(nvml: FakeNvml, start: Start) -> None:
    """A worker that dies of SIGSEGV is reported once, and the next scrape has a new worker and live values."""
    daemon = start(nvml.environment(), FRESH)
    daemon.scrape()
    nvml.write(equal_cards(4), lines=["crash nvmlDeviceGetTemperatureV 2"])
    crashed = daemon.scrape()
    assert fault(crashed) == "crashed"
    assert crashed.of("gpu_utilization_percent") == []
    assert "SIGSEGV" in daemon.log
    nvml.write(equal_cards(4))
    assert readings(daemon.scrape_until(lambda scrape: not fault(scrape), within=3), "2") == len(READINGS)


def test_a_crash_loop_backs_off(nvml: FakeNvml, start: Start) -> None:
    """A worker that dies at every start is not started at every scrape."""
    nvml.write(equal_cards(1), lines=["crash nvmlInitWithFlags *"])
    daemon = start(nvml.environment(), FRESH, ["--log.level=debug"])
    until = time.monotonic() + 3
    while time.monotonic() < until:
        assert fault(daemon.scrape(timeout=2)) == "crashed"
    assert 2 <= daemon.log.count("worker started") <= 4
    assert daemon.log.count("backend down") == 1


def test_a_stopped_worker_is_ended_by_the_hang_verdict(nvml: FakeNvml, start: Start) -> None:
    """A worker that does not run costs its vendor, never the page; after the hang verdict another takes over."""
    daemon = start(nvml.environment(), NAMED + "sampling: {hang_seconds: 2, reuse_seconds: 0}")
    daemon.scrape()
    (worker,) = daemon.workers("nvidia")
    os.kill(worker, signal.SIGSTOP)
    assert fault(daemon.scrape(timeout=1)) == "hung"
    stuck = daemon.scrape(timeout=1)
    assert stuck.seconds < 0.2
    assert fault(stuck) == "hung"
    healed = daemon.scrape_until(lambda scrape: not fault(scrape), within=25)
    assert readings(healed, "3") == len(READINGS)
    assert daemon.workers("nvidia") != [worker]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("fault nvmlInitWithFlags * 9", "driver-not-loaded"),
        ("fault nvmlInitWithFlags * 18", "driver-mismatch"),
        ("fault nvmlInitWithFlags * 4", "no-permission"),
        ("fault nvmlInitWithFlags * 999", "driver-error"),
        ("count 0", "no-devices"),
        ("fault nvmlDeviceGetUUID * 3", "unsupported"),
        ("fault * * 999", "driver-error"),
    ],
)
def test_a_driver_that_does_not_serve_is_told_and_recovered_from(
    nvml: FakeNvml, start: Start, line: str, reason: str
) -> None:
    """The daemon stays up with the reason on the page and once in the log, and recovers when the driver serves."""
    nvml.write(equal_cards(2) if line != "count 0" else [], lines=[] if line == "count 0" else [line])
    daemon = start(nvml.environment(), FRESH)
    for _ in range(3):
        scrape = daemon.scrape()
        assert fault(scrape) == reason
        assert scrape.of("gpu_info") == []
        assert scrape.value("gpu_fleet_mask_refusal_info", reason="backend-down") == 1
    assert daemon.log.count("backend down") == 1
    nvml.write(equal_cards(2))
    healed = daemon.scrape_until(lambda scrape: not fault(scrape))
    assert readings(healed, "1") == len(READINGS)
    assert healed.value("gpu_exporter_backend_faults_total", reason=reason) >= 3


def test_a_missing_library_is_told_and_found_when_it_is_installed(
    tmp_path: Path, nvml_library: Path, start: Start
) -> None:
    """Without libnvidia-ml.so.1 a named backend is down with `library-missing`; installing it is enough."""
    fake = FakeNvml(tmp_path, tmp_path / "lib")
    (tmp_path / "lib").mkdir()
    fake.write(equal_cards(1))
    daemon = start(fake.environment(), FRESH)
    assert fault(daemon.scrape()) == "library-missing"
    (tmp_path / "lib" / "libnvidia-ml.so.1").write_bytes(b"")
    assert fault(daemon.scrape()) == "library-missing"
    (tmp_path / "lib" / "libnvidia-ml.so.1").unlink()
    os.link(nvml_library / "libnvidia-ml.so.1", tmp_path / "lib" / "libnvidia-ml.so.1")
    assert readings(daemon.scrape_until(lambda scrape: not fault(scrape)), "0") == len(READINGS)


def test_a_host_without_nvidia_has_no_row_for_it(start: Start) -> None:
    """A vendor that is neither on the bus nor named nor found by its library has no series at all."""
    scrape = start({}, flags=["--path.sysfs=/nonexistent"]).scrape()
    assert [name for name in scrape.samples if "backend" in name] == []
    assert scrape.value("gpu_fleet_mask_refusal_info", fleet="host", reason="backend-down") == 1


def test_nvidia_hardware_on_the_bus_has_a_row(tmp_path: Path, start: Start) -> None:
    """A display device of NVIDIA's on the PCI bus makes the missing driver worth a row."""
    device = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    scrape = start({}, flags=[f"--path.sysfs={tmp_path / 'sys'}"]).scrape()
    assert fault(scrape) == "library-missing"


def test_a_driver_that_stops_serving_is_replaced_by_a_fresh_worker(nvml: FakeNvml, start: Start) -> None:
    """When every call fails, the backend is down, nothing stale is shown, and a fresh process takes over afterwards."""
    daemon = start(nvml.environment(), FRESH)
    daemon.scrape()
    (worker,) = daemon.workers("nvidia")
    nvml.write(equal_cards(4), lines=["fault * * 999"])
    down = daemon.scrape()
    assert fault(down) == "driver-error"
    assert sum(readings(down, index) for index in "0123") == 0
    nvml.write(equal_cards(4))
    daemon.scrape_until(lambda scrape: not fault(scrape))
    assert daemon.workers("nvidia") != [worker]


@pytest.mark.parametrize(
    "missing", [("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetTemperatureV"), ("nvmlInitWithFlags",)]
)
def test_old_drivers(tmp_path: Path, start: Start, missing: tuple[str, ...]) -> None:
    """Older calls serve where the newer are missing, `used` then being absent; a driver without the first is told."""
    fake = FakeNvml(tmp_path, build_or_skip(tmp_path / "lib", missing))
    fake.write(equal_cards(1), driver="470.256.02")
    scrape = start(fake.environment(), FRESH).scrape()
    if "nvmlInitWithFlags" in missing:
        assert fault(scrape) == "driver-too-old"
        return
    assert scrape.of("gpu_memory_used_bytes") == []
    assert scrape.value("gpu_memory_free_bytes") == equal_cards(1)[0].free
    assert scrape.value("gpu_temperature_celsius") == 40
    assert scrape.value("gpu_exporter_backend_faults_total", reason="driver-too-old") == 0


@pytest.mark.parametrize(
    ("change", "absent"),
    [
        ({"temp": 255}, {"gpu_temperature_celsius"}),
        ({"temp": 0}, {"gpu_temperature_celsius"}),
        ({"temp": -1}, {"gpu_temperature_celsius"}),
        ({"util": 4294967295}, {"gpu_utilization_percent"}),
        ({"util": None}, {"gpu_utilization_percent"}),
        ({"free": 2**64 - 1}, {"gpu_memory_free_bytes"}),
        ({"total": 0}, {"gpu_memory_free_bytes", "gpu_memory_used_bytes", "gpu_memory_total_bytes"}),
        (
            {"total": None, "free": None, "used": None, "reserved": None},
            {"gpu_memory_free_bytes", "gpu_memory_used_bytes", "gpu_memory_total_bytes"},
        ),
    ],
)
def test_sentinels_are_absence(nvml: FakeNvml, start: Start, change: dict[str, int | None], absent: set[str]) -> None:
    """A sentinel or an unsupported query is a missing series: never a number, never the whole card."""
    cards = equal_cards(2)
    nvml.write([dataclasses.replace(cards[0], **change), cards[1]])  # type: ignore[arg-type]
    scrape = start(nvml.environment(), FRESH).scrape()
    missing = {name for name in READINGS if not scrape.of(name, physical_index="0")}
    assert missing >= absent
    assert missing <= absent | {"gpu_memory_used_bytes"}
    assert readings(scrape, "1") == len(READINGS)
    assert scrape.state(physical_index="0") == "ok"


def test_one_failing_call_costs_one_reading(nvml: FakeNvml, start: Start) -> None:
    """A call that fails on one card is a fault with a reason and one missing series; it is logged once."""
    nvml.write(equal_cards(2), lines=["fault nvmlDeviceGetUtilizationRates 0 999"])
    daemon = start(nvml.environment(), FRESH)
    daemon.scrape()
    scrape = daemon.scrape()
    assert scrape.of("gpu_utilization_percent", physical_index="0") == []
    assert readings(scrape, "0") == len(READINGS) - 1
    assert readings(scrape, "1") == len(READINGS)
    assert scrape.value("gpu_exporter_backend_faults_total", reason="driver-error") >= 2
    assert daemon.log.count("reading failed") == 1


def mig_card(*parts: Mig) -> Gpu:
    """A card in MIG mode; the driver gives no utilization for it."""
    return dataclasses.replace(equal_cards(1)[0], mig=1, util=None, instances=parts)


def part(index: int, gi: int, ci: int = 0) -> Mig:
    """A MIG device whose memory encodes its index."""
    uuid = f"MIG-0000000{index}-0000-5000-8000-000000000000"
    return Mig(
        index=index, uuid=uuid, gi=gi, ci=ci, name="NVIDIA MIG 1g", total=8 << 30, free=(index + 1) << 20, used=1
    )


def test_mig_devices_have_their_own_memory_and_no_utilization(nvml: FakeNvml, start: Start) -> None:
    """Instances, found across the holes of their indices, have their own memory; temperature is the board's."""
    parts = (part(0, 3), part(2, 13, 1))
    nvml.write([mig_card(*parts)])
    config = (
        FRESH
        + f"""
fleets:
  - {{name: host, runtime: host}}
  - {{name: tenant, runtime: cuda, env: {{CUDA_VISIBLE_DEVICES: {parts[1].uuid}}}}}
"""
    )
    daemon = start(nvml.environment(), config)
    scrape = daemon.scrape()
    tenant = {"fleet": "tenant", "fleet_index": "0", "physical_index": "0", "gpu_partition": "13/1"}
    assert scrape.value("gpu_memory_free_bytes", **tenant) == 3 << 20
    assert scrape.of("gpu_utilization_percent") == []
    assert [sample.labels["fleet"] for sample in scrape.of("gpu_temperature_celsius")] == ["host"]
    assert {sample.labels.get("gpu_partition", "") for sample in scrape.of("gpu_info")} == {"", "3/0", "13/1"}
    nvml.write([mig_card(part(4, 7))])
    after = daemon.scrape()
    assert after.of("gpu_memory_free_bytes", fleet="tenant") == []
    assert after.value("gpu_memory_free_bytes", fleet="host", gpu_partition="7/0") == 5 << 20


def test_a_sleeping_card_is_not_touched(tmp_path: Path, nvml: FakeNvml, start: Start) -> None:
    """A card that PCI power management has suspended gets no call, has no reading, and keeps its place in fleets."""
    sysfs, procfs, calls = tmp_path / "sys", tmp_path / "proc", tmp_path / "calls"
    cards = equal_cards(2)
    addresses = [f"0000:{bus}:00.0" for bus in ("21", "41")]
    for address in addresses:
        device = sysfs / "bus/pci/devices" / address
        (device / "power").mkdir(parents=True)
        driver = sysfs / "bus/pci/drivers/nvidia"
        driver.mkdir(parents=True, exist_ok=True)
        (driver / address).symlink_to(device)
        (device / "power/runtime_status").write_text("active\n")
    asleep = sysfs / "bus/pci/devices" / addresses[0] / "power/runtime_status"
    asleep.write_text("suspended\n")
    information = procfs / "driver/nvidia/gpus" / addresses[0] / "information"
    information.parent.mkdir(parents=True)
    information.write_text("Model: \t\t NVIDIA L40S\nGPU UUID: \t GPU-????????-????-????-????-????????????\n")
    nvml.write(cards, lines=[f'log "{calls}"'])
    config = (
        FRESH
        + """
fleets:
  - {name: host, runtime: host}
  - {name: second, env: {CUDA_VISIBLE_DEVICES: "1", CUDA_DEVICE_ORDER: PCI_BUS_ID}}
  - {name: first, env: {CUDA_VISIBLE_DEVICES: "0", CUDA_DEVICE_ORDER: PCI_BUS_ID}}
"""
    )
    daemon = start(nvml.environment(), config, [f"--path.sysfs={sysfs}", f"--path.procfs={procfs}"])
    scrape = daemon.scrape()
    assert scrape.state(pci_bus_id=addresses[0]) == "asleep"
    assert scrape.value("gpu_utilization_percent", fleet="second", fleet_index="0", physical_index="1") == 20
    assert readings(scrape, "0") == 0
    assert {line.split()[1] for line in calls.read_text().splitlines()} <= {"-", "1"}
    asleep.write_text("active\n")
    awake = daemon.scrape()
    assert awake.value("gpu_utilization_percent", fleet="first", fleet_index="0", physical_index="0") == 10
    asleep.write_text("suspended\n")
    calls.unlink()
    again = daemon.scrape()
    assert again.state(uuid=str(cards[0].uuid)) == "asleep"
    assert {line.split()[1] for line in calls.read_text().splitlines()} <= {"-", "1"}
    information.write_text("Model: \t\t NVIDIA A2\nGPU UUID: \t GPU-00000000-0000-4000-8000-0000000000ff\n")
    another = daemon.scrape()
    assert another.of("gpu_info", uuid=str(cards[0].uuid)) == []
    assert another.state(uuid="GPU-00000000-0000-4000-8000-0000000000ff") == "asleep"


def test_concurrent_scrapes_share_one_reading(tmp_path: Path, nvml: FakeNvml, start: Start) -> None:
    """Twenty scrapers at once cost one reading of each card, and all get a whole page."""
    calls = tmp_path / "calls"
    daemon = start(nvml.environment(), NAMED)
    daemon.scrape()
    time.sleep(1)
    nvml.write(equal_cards(4), lines=[f'log "{calls}"', "slow nvmlDeviceGetTemperatureV 0 300"])
    with ThreadPoolExecutor(20) as pool:
        scrapes = list(pool.map(lambda _: daemon.scrape(), range(20)))
    assert calls.read_text().splitlines().count("nvmlDeviceGetUtilizationRates 2") == 1
    for scrape in scrapes:
        assert readings(scrape, "0") == len(READINGS)
        assert scrape.seconds < 1


def test_a_scrape_with_a_shorter_deadline_does_not_wait_for_another(nvml: FakeNvml, start: Start) -> None:
    """Who joins a running cycle waits for no longer than its own timeout, and gets what has answered by then."""
    daemon = start(nvml.environment(), FRESH)
    daemon.scrape()
    nvml.write(equal_cards(4), lines=["hang nvmlDeviceGetTemperatureV 0"])
    with ThreadPoolExecutor(2) as pool:
        patient = pool.submit(daemon.scrape, 4)
        time.sleep(0.2)
        hasty = daemon.scrape(timeout=1)
        assert hasty.seconds < 0.8
        for scrape in (hasty, patient.result()):
            assert readings(scrape, "1") == len(READINGS)
            assert scrape.state(physical_index="0") == "hung"


def test_background_sampling_serves_the_last_cycle(nvml: FakeNvml, start: Start) -> None:
    """With an interval, pages come from the last cycle; a hung card costs only itself, a stopped worker everything."""
    daemon = start(nvml.environment(), NAMED + "sampling: {interval_seconds: 0.25, deadline_seconds: 5}")
    assert readings(daemon.scrape(), "0") == len(READINGS)
    nvml.write(equal_cards(4), lines=["hang nvmlDeviceGetTemperatureV 0"])
    hung = daemon.scrape_until(lambda scrape: scrape.state(physical_index="0") == "hung", within=3)
    for _ in range(10):
        assert not fault(hung)
        assert readings(hung, "1") == len(READINGS)
        time.sleep(0.1)
        hung = daemon.scrape()
    nvml.write(equal_cards(4))
    daemon.scrape_until(lambda scrape: scrape.state(physical_index="0") == "ok", within=3)
    (worker,) = daemon.workers("nvidia")
    os.kill(worker, signal.SIGSTOP)
    stopped = daemon.scrape_until(lambda scrape: fault(scrape) == "hung", within=3)
    assert sum(readings(stopped, index) for index in "0123") == 0
    os.kill(worker, signal.SIGCONT)
    daemon.scrape_until(lambda scrape: not fault(scrape))


def test_a_worker_that_stops_leaves_others_in_the_background_alone(nvml: FakeNvml, start: Start) -> None:
    """The cycle that waits for it ends before the last one's page is too old: no page says that all is stale."""
    daemon = start(nvml.environment(), NAMED + "sampling: {interval_seconds: 1, deadline_seconds: 5}")
    assert not fault(daemon.scrape())
    (worker,) = daemon.workers("nvidia")
    os.kill(worker, signal.SIGSTOP)
    until, seen = time.monotonic() + 4.5, set()
    while time.monotonic() < until:
        seen.add(fault(daemon.scrape()))
        time.sleep(0.05)
    os.kill(worker, signal.SIGCONT)
    assert seen <= {"", "hung"}
    assert "hung" in seen


IDENTIFYING = ("nvmlDeviceGetName", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMigMode")


@pytest.mark.parametrize("call", IDENTIFYING)
def test_a_card_that_hangs_while_it_is_identified_has_a_state(nvml: FakeNvml, start: Start, call: str) -> None:
    """As soon as a card has told its UUID and address it has a row; numbers are not trusted before it told the rest."""
    nvml.write(equal_cards(3), lines=[f"hang {call} 1"])
    config = FRESH + 'fleets: [{name: c, env: {CUDA_VISIBLE_DEVICES: "2", CUDA_DEVICE_ORDER: PCI_BUS_ID}}]'
    daemon = start(nvml.environment(), config)
    scrape = daemon.scrape(timeout=2)
    assert scrape.state(uuid=str(equal_cards(3)[1].uuid)) == "hung"
    assert scrape.state(physical_index="0") == "ok"
    assert scrape.value("gpu_fleet_mask_refusal_info", fleet="c", reason="inventory-incomplete") == 1
    nvml.write(equal_cards(3))
    daemon.scrape_until(lambda scrape: scrape.of("gpu_utilization_percent", fleet="c", physical_index="2") != [])


def test_cards_that_hang_before_they_have_a_name_take_the_backend_down(nvml: FakeNvml, start: Start) -> None:
    """When no card can even be identified there is a reason, and not an empty page that says all is well."""
    nvml.write(equal_cards(2), lines=["hang nvmlDeviceGetUUID *"])
    assert fault(start(nvml.environment(), FRESH).scrape(timeout=2)) == "hung"


def test_a_passing_error_is_not_taken_for_a_fact(nvml: FakeNvml, start: Start) -> None:
    """An error in the first cycle, about MIG mode or the name, binds nothing and is forgotten when it passes."""
    board = mig_card(part(0, 3), part(1, 4))
    nvml.write([board], lines=["fault nvmlDeviceGetMigMode 0 999"])
    config = FRESH + 'fleets: [{name: c, env: {CUDA_VISIBLE_DEVICES: "0", CUDA_DEVICE_ORDER: PCI_BUS_ID}}]'
    daemon = start(nvml.environment(), config)
    assert daemon.scrape().of("gpu_fleet_device_info") == []
    nvml.write([board])
    daemon.scrape_until(lambda scrape: scrape.of("gpu_fleet_mask_refusal_info", reason="mig-multiplicity") != [])
    nvml.write(equal_cards(2), lines=["fault nvmlDeviceGetName 0 999"])
    daemon = start(nvml.environment(), FRESH + 'fleets: [{name: c, env: {CUDA_VISIBLE_DEVICES: "0"}}]')
    daemon.scrape()
    nvml.write(equal_cards(2))
    assert daemon.scrape_until(lambda scrape: scrape.of("gpu_fleet_device_info") != [])


def test_an_impatient_scraper_does_not_spoil_the_next_ones_page(nvml: FakeNvml, start: Start) -> None:
    """A page cut short for one with little time is not served again to one with more."""
    daemon = start(nvml.environment(), NAMED + "sampling: {reuse_seconds: 10}")
    nvml.write(equal_cards(2))
    daemon.scrape()
    nvml.write(equal_cards(2), lines=["slow nvmlDeviceGetTemperatureV 1 400"])
    daemon.config_path.write_text(NAMED + "sampling: {reuse_seconds: 9}")
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for_log(r"(?s)settings loaded.*settings loaded")
    assert daemon.scrape(timeout=0.01).state(physical_index="1") == "hung"
    time.sleep(0.5)
    assert daemon.scrape(timeout=5).state(physical_index="1") == "ok"


def test_a_call_that_a_shorter_cycle_left_running_is_waited_for(nvml: FakeNvml, start: Start) -> None:
    """A card that is slower than an impatient scraper is `hung` for that one, and not on the next page."""
    nvml.write(equal_cards(2), lines=["slow nvmlDeviceGetTemperatureV 1 400"])
    daemon = start(nvml.environment(), FRESH)
    daemon.scrape()
    for _ in range(5):
        assert daemon.scrape(timeout=0.01).state(physical_index="1") == "hung"
        patient = daemon.scrape(timeout=5)
        assert readings(patient, "1") == len(READINGS)
        assert patient.seconds < 2


def test_a_cycle_serves_from_its_start_on(nvml: FakeNvml, start: Start) -> None:
    """What was read at once is old when a card that hangs has been waited for, and is read anew."""
    cards = equal_cards(2)
    daemon = start(nvml.environment(), NAMED + "sampling: {reuse_seconds: 1}")
    nvml.write(cards)
    daemon.scrape()
    time.sleep(1.1)
    nvml.write(cards, lines=["hang nvmlDeviceGetTemperatureV 1"])
    assert daemon.scrape(timeout=2).seconds > 1.2
    nvml.write((dataclasses.replace(cards[0], util=99), cards[1]), lines=["hang nvmlDeviceGetTemperatureV 1"])
    assert daemon.scrape(timeout=2).value("gpu_utilization_percent", physical_index="0") == 99


def test_a_value_of_a_card_that_was_waited_for_is_of_its_own_cycle(nvml: FakeNvml, start: Start) -> None:
    """What a call brings that a shorter cycle had begun is thrown away, and the card is read again."""
    cards = equal_cards(2)
    nvml.write(cards)
    daemon = start(nvml.environment(), FRESH)
    daemon.scrape()
    nvml.write(cards, lines=["slow nvmlDeviceGetUtilizationRates 1 600"])
    assert daemon.scrape(timeout=0.01).state(physical_index="1") == "hung"
    nvml.write((cards[0], dataclasses.replace(cards[1], util=99)))
    assert daemon.scrape(timeout=5).value("gpu_utilization_percent", physical_index="1") == 99


def test_a_library_that_starts_slowly_is_waited_for_by_who_has_the_time(nvml: FakeNvml, start: Start) -> None:
    """Also where somebody without time asked first, who is told that it starts."""
    nvml.write(equal_cards(2), lines=["slow nvmlInitWithFlags * 1500"])
    daemon = start(nvml.environment(), FRESH)
    hasty = daemon.scrape(timeout=1)
    assert fault(hasty) == "starting"
    assert hasty.seconds < 0.8
    assert readings(daemon.scrape(timeout=8), "1") == len(READINGS)


def test_a_slow_count_still_makes_the_inventory_whole(nvml: FakeNvml, start: Start) -> None:
    """A count of the cards that takes longer than its share of a cycle serves the next one."""
    config = FRESH + 'fleets: [{name: c, env: {CUDA_VISIBLE_DEVICES: "1", CUDA_DEVICE_ORDER: PCI_BUS_ID}}]'
    daemon = start(nvml.environment(), config)
    daemon.scrape()
    nvml.write(equal_cards(4), lines=["slow nvmlDeviceGetCount_v2 * 600"])
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for_log(r"(?s)settings loaded.*settings loaded")
    wanted = {"fleet": "c", "physical_index": "1"}
    daemon.scrape_until(lambda scrape: scrape.of("gpu_utilization_percent", **wanted) != [], within=6, timeout=2)


def test_a_text_that_is_none_costs_that_text(nvml: FakeNvml, start: Start) -> None:
    """Bytes that are not UTF-8 in a name or the driver's version leave every reading."""
    card = dataclasses.replace(equal_cards(1)[0], name="L40S \udcff")
    nvml.write([card], driver="550 \udcfe")
    assert readings(start(nvml.environment(), FRESH).scrape(), "0") == len(READINGS)


def test_a_daemon_that_was_upgraded_starts_no_worker_of_the_new_version(
    nvml: FakeNvml, tmp_path: Path, start: Start
) -> None:
    """What it would tell could mean something else by now: the backend is down, and the log says what to do."""
    shutil.copytree(Path(__file__).parents[1] / "exporter", tmp_path / "installed/exporter")
    daemon = start(nvml.environment(), None, [], lambda command: ["env", "-C", str(tmp_path / "installed"), *command])
    assert daemon.scrape().value("gpu_exporter_backend_up", vendor="nvidia") == 1
    (tmp_path / "installed/exporter/__init__.py").write_text('__version__ = "99.0"\n')
    (worker,) = daemon.workers("nvidia")
    os.kill(worker, signal.SIGKILL)
    daemon.scrape_until(lambda scrape: scrape.value("gpu_exporter_backend_up", vendor="nvidia") == 0)
    daemon.wait_for_log("the worker is of another version: the exporter was upgraded, and has to be restarted")
    for name in ("worker nvidia", "asking cuda"):
        command = [sys.executable, "-m", *f"exporter.{name}".split(), "--daemon-version=0"]
        assert subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode == OTHER_VERSION


def test_the_worker_imports_nothing_from_the_current_directory(nvml: FakeNvml, tmp_path: Path) -> None:
    """Modules that lie where the program is started are neither run by the worker nor in its way."""
    trap = tmp_path / "trap"
    (trap / "exporter").mkdir(parents=True)
    (trap / "exporter" / "__init__.py").write_text("")
    result = subprocess.run(
        [sys.executable, "-P", "-m", "exporter", "once"],  # -P is not inherited: the worker needs its own
        cwd=trap,
        env=clean_environment(nvml.environment()),
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert readings(parse(result.stdout), "0") == len(READINGS)
