"""The daemon's main job: under a mask, the right card, under both numbers, or no card and the reason."""

from __future__ import annotations

import dataclasses

import pytest

from tests.fakes.nvml import FakeNvml, equal_cards
from tests.harness import Prometheus, Start, Target, run, tool

pytestmark = pytest.mark.e2e

CHAT = """
fleets:
  - name: chat
    runtime: cuda
    env: {CUDA_VISIBLE_DEVICES: "2,3", CUDA_DEVICE_ORDER: PCI_BUS_ID}
"""
ATTRIBUTED = (
    "gpu_utilization_percent",
    "gpu_memory_free_bytes",
    "gpu_memory_used_bytes",
    "gpu_memory_total_bytes",
    "gpu_temperature_celsius",
    "gpu_fleet_device_info",
)


def mixed_cards() -> list[object]:
    """Four cards of two models."""
    return [
        dataclasses.replace(card, name=name)
        for card, name in zip(equal_cards(4), ["NVIDIA L40S", "NVIDIA L40S", "NVIDIA A100", "NVIDIA A100"], strict=True)
    ]


def test_prometheus_reads_the_masked_cards(nvml: FakeNvml, start: Start, tmp_path: object) -> None:
    """Under CUDA_VISIBLE_DEVICES=2,3 a real Prometheus has card 2 as index 0, card 3 as 1, and nothing of 0 and 1."""
    from pathlib import Path

    assert isinstance(tmp_path, Path)
    program = tool("prometheus")
    daemon = start(nvml.environment(), CHAT)
    with Prometheus(program, tmp_path, Target(f"127.0.0.1:{daemon.port}")) as prometheus:
        found = prometheus.wait_for("gpu_utilization_percent")
        read = {
            (entry["metric"]["fleet_index"], entry["metric"]["physical_index"]): entry["value"][1] for entry in found
        }
        assert read == {("0", "2"): "30", ("1", "3"): "40"}
        assert prometheus.query("up")[0]["value"][1] == "1"
        for name in ATTRIBUTED:
            indices = {entry["metric"]["physical_index"] for entry in prometheus.query(name)}
            assert indices == {"2", "3"}, name
        assert len(prometheus.query("gpu_info")) == 4
        joined = prometheus.query("max by (instance, pci_bus_id, gpu_partition) (gpu_memory_free_bytes)")
        assert len(joined) == 2


def test_every_reading_is_the_masked_cards_own(nvml: FakeNvml, start: Start) -> None:
    """Each reading of index 0 is card 2's, in base units; each value of a fake card encodes which card it is."""
    scrape = start(nvml.environment(), CHAT).scrape()
    card = equal_cards(4)[2]
    labels = {"fleet": "chat", "fleet_index": "0", "physical_index": "2", "uuid": str(card.uuid)}
    assert scrape.value("gpu_utilization_percent", **labels) == card.util == 30
    assert scrape.value("gpu_memory_free_bytes", **labels) == card.free
    assert scrape.value("gpu_memory_used_bytes", **labels) == card.used
    assert scrape.value("gpu_memory_total_bytes", **labels) == card.total
    assert scrape.value("gpu_temperature_celsius", **labels) == card.temp
    assert scrape.value("gpu_fleet_device_info", evidence="proven", **labels) == 1
    assert scrape.value("gpu_fleet_mask_inverted", fleet="chat", runtime="cuda") == 1
    assert scrape.of("gpu_info", pci_bus_id="0000:61:00.0")[0].labels["driver_version"] == "580.95.05"


def test_mixed_cards_without_an_order_are_refused(nvml: FakeNvml, start: Start) -> None:
    """On unequal cards with CUDA_DEVICE_ORDER unset there is no series, a reason, and `explain` says what to set."""
    nvml.write(mixed_cards())  # type: ignore[arg-type]
    daemon = start(nvml.environment(), 'fleets: [{name: chat, runtime: cuda, env: {CUDA_VISIBLE_DEVICES: "2,3"}}]')
    scrape = daemon.scrape()
    assert scrape.value("gpu_fleet_mask_refusal_info", fleet="chat", reason="order-unknown") == 1
    assert scrape.value("gpu_fleet_mask_inverted", fleet="chat") == 0
    for name in ATTRIBUTED:
        assert scrape.of(name) == []
    assert len(scrape.of("gpu_info")) == 4
    explained = run("explain", "chat", f"--config.file={daemon.config_path}", environment=nvml.environment())
    assert explained.returncode == 1
    assert "order-unknown" in explained.stdout
    assert "Set CUDA_DEVICE_ORDER=PCI_BUS_ID" in explained.stdout


def test_equal_cards_without_an_order_are_assumed_unless_not_accepted(nvml: FakeNvml, start: Start) -> None:
    """On equal cards the answer is `assumed`, and `accept: [proven, probed]` turns it into a reason."""
    fleet = 'fleets: [{name: chat, runtime: cuda, env: {CUDA_VISIBLE_DEVICES: "2,3"}}]\n'
    scrape = start(nvml.environment(), fleet).scrape()
    assert {sample.labels["evidence"] for sample in scrape.of("gpu_fleet_device_info")} == {"assumed"}
    assert scrape.value("gpu_utilization_percent", fleet_index="1") == 40
    strict = start(nvml.environment(), fleet + "mapping: {accept: [proven, probed]}").scrape()
    assert strict.of("gpu_utilization_percent") == []
    assert strict.value("gpu_fleet_mask_refusal_info", reason="evidence-not-accepted") == 1


def test_without_settings_every_card_is_in_the_host_fleet(nvml: FakeNvml, start: Start) -> None:
    """With no fleet named and no mask set, `host` shows every card under its physical index."""
    scrape = start(nvml.environment()).scrape()
    found = {(s.labels["fleet"], s.labels["fleet_index"], s.value) for s in scrape.of("gpu_utilization_percent")}
    assert found == {("host", "0", 10), ("host", "1", 20), ("host", "2", 30), ("host", "3", 40)}


def test_without_settings_the_daemons_own_mask_makes_a_default_fleet(nvml: FakeNvml, start: Start) -> None:
    """A mask in the daemon's own environment is inverted as the fleet `default`, and no card is in `host`."""
    environment = {**nvml.environment(), "CUDA_VISIBLE_DEVICES": "3,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    scrape = start(environment).scrape()
    found = {(s.labels["fleet"], s.labels["fleet_index"], s.value) for s in scrape.of("gpu_utilization_percent")}
    assert found == {("default", "0", 40), ("default", "1", 10)}


def test_the_daemons_own_mask_is_not_applied_to_named_fleets(nvml: FakeNvml, start: Start) -> None:
    """A fleet of the settings is inverted from its own environment alone."""
    scrape = start({**nvml.environment(), "CUDA_VISIBLE_DEVICES": "0"}, CHAT).scrape()
    assert {sample.labels["physical_index"] for sample in scrape.of("gpu_utilization_percent")} == {"2", "3"}


def test_an_empty_mask_is_inverted_to_no_device(nvml: FakeNvml, start: Start) -> None:
    """An empty mask is an answer: inverted, without devices and without a refusal."""
    scrape = start(nvml.environment(), 'fleets: [{name: none, env: {CUDA_VISIBLE_DEVICES: ""}}]').scrape()
    assert scrape.value("gpu_fleet_mask_inverted", fleet="none", runtime="cuda") == 1
    assert scrape.of("gpu_fleet_mask_refusal_info") == []
    assert scrape.of("gpu_fleet_device_info") == []


def test_reach_narrows_what_is_counted(nvml: FakeNvml, start: Start) -> None:
    """With a stated reach, index 0 counts from the first card that the workload can open."""
    cards = equal_cards(4)
    config = f"""
fleets:
  - name: boxed
    runtime: cuda
    reach: ["{cards[3].uuid}", "61:00.0"]
    env: {{CUDA_VISIBLE_DEVICES: 1, CUDA_DEVICE_ORDER: PCI_BUS_ID}}
  - name: nowhere
    reach: ["0000:99:00.0"]
"""
    scrape = start(nvml.environment(), config).scrape()
    assert scrape.value("gpu_utilization_percent", fleet="boxed", fleet_index="0", physical_index="3") == 40
    assert scrape.value("gpu_fleet_mask_refusal_info", fleet="nowhere", reason="reach-unknown") == 1
