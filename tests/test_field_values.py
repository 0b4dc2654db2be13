"""What people met who watch GPUs, as cases of values and of failures: each through the daemon, on a pretend library."""

from __future__ import annotations

import ast
import gzip
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from exporter.catalog import READINGS
from tests.fakes.nvml import GIB, MIB, FakeNvml, Gpu, Mig, build_or_skip, equal_cards, watched_cards
from tests.fakes.sysfs import AmdCard, FakeSys, KfdNode
from tests.harness import Scrape, Start

TESTS = Path(__file__).parent
CASES: list[dict[str, Any]] = yaml.safe_load((TESTS / "data" / "field_values.yaml").read_text(encoding="utf-8"))
NVIDIA = "backends: [nvidia]\nsampling: {reuse_seconds: 0}\nfleets: [{name: host, runtime: host}]\n"


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_each_case_has_its_tests(case: Mapping[str, Any]) -> None:
    """Every test that is named for it is there."""
    assert case.keys() <= {"id", "title", "met", "tests"}
    assert case["tests"]
    for name in case["tests"]:
        path, _, function = name.partition("::")
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, name


def test_no_case_is_missing() -> None:
    """Those of failures and values, and of operations, each once."""
    numbers = (60, 63, 64, 66, 68, 69, 71, 73, 75, 77, 79, 80, 82, 84, 85, 86, 87, 89, 91, 92, 94, 95)
    assert [case["id"] for case in CASES] == [f"F{number}" for number in (*numbers, 97, 99, 100, 101, 102, 104, 105)]


def test_a_test_that_carries_a_cases_id_is_in_its_list() -> None:
    """So the list is where to look."""
    named = {test.partition("::")[2] for case in CASES for test in case["tests"]}
    own = [node.name for node in ast.parse(Path(__file__).read_text(encoding="utf-8")).body if hasattr(node, "name")]
    assert {name for name in own if re.match(r"test_f\d+_", name)} <= named


def values(scrape: Scrape, **labels: str) -> dict[str, float]:
    """The readings without labels of their own, of a device."""
    names = [family.name for family in READINGS.values() if not family.own]
    return {name: scrape.value(name, **labels) for name in names if scrape.of(name, **labels)}


def reason(scrape: Scrape, vendor: str = "nvidia") -> str:
    """Why a backend is down; empty where it is up."""
    return "".join(each.labels["reason"] for each in scrape.of("gpu_exporter_backend_fault_info", vendor=vendor))


@pytest.mark.e2e
def test_f63_every_call_fails_after_a_while(nvml: FakeNvml, start: Start) -> None:
    """No value is left, the page comes with the reason, the log does not fill, and it heals without a restart."""
    daemon = start(nvml.environment(), NVIDIA)
    for _ in range(3):
        assert values(daemon.scrape(), physical_index="0")
    nvml.write(equal_cards(4), lines=["fault * * 999"])
    for _ in range(20):
        scrape = daemon.scrape()
        assert values(scrape) == {}
        assert scrape.value("gpu_exporter_backend_up", vendor="nvidia") == 0
    assert reason(scrape) == "driver-error"
    assert daemon.request("/-/healthy").status == 200
    assert daemon.log.count("backend down") == 1
    nvml.write(equal_cards(4))
    daemon.scrape_until(lambda page: bool(values(page, physical_index="3")))


@pytest.mark.e2e
def test_f64_library_and_driver_of_different_versions(nvml: FakeNvml, start: Start, tmp_path: Path) -> None:
    """NVIDIA's cards have no row, another vendor's card is read, and a reboot of the module is all that it takes."""
    tree = FakeSys(tmp_path / "root")
    tree.write([AmdCard(pci="0000:03:00.0", busy=31, kfd_nodes=(KfdNode(node=1),))])
    nvml.write(equal_cards(2), lines=["fault nvmlInitWithFlags * 18"])
    daemon = start(nvml.environment(), NVIDIA.replace("[nvidia]", "[nvidia, amd]"), [f"--path.sysfs={tree.sys}"])
    scrape = daemon.scrape()
    assert reason(scrape) == "driver-mismatch"
    assert scrape.value("gpu_utilization_percent") == 31
    nvml.write(equal_cards(2))
    healed = daemon.scrape_until(lambda page: not reason(page))
    assert len(healed.of("gpu_utilization_percent", vendor="nvidia")) == 2


@pytest.mark.e2e
def test_f66_a_board_without_memory_of_its_own(nvml: FakeNvml, start: Start) -> None:
    """Its other values are there, under an address in a domain other than 0, and its memory is absent and no fault."""
    board = Gpu(
        uuid="GPU-a0000000-0000-4000-8000-00000000000a",
        pci="0000000f:01:00.0",
        name="NVIDIA GB10",
        util=0,
        temp=35,
        power=11_170,
        mig="none",
    )
    nvml.write([board])
    scrape = start(nvml.environment(), NVIDIA).scrape()
    found = values(scrape, pci_bus_id="000f:01:00.0")
    assert (found["gpu_utilization_percent"], found["gpu_temperature_celsius"], found["gpu_power_watts"]) == (
        0,
        35,
        11.17,
    )
    assert not [name for name in found if re.fullmatch(r"gpu_memory_\w+_bytes", name)]
    assert scrape.state(pci_bus_id="000f:01:00.0") == "ok"
    assert sum(each.value for each in scrape.of("gpu_exporter_backend_faults_total")) == 0


@pytest.mark.e2e
def test_f68_a_library_that_supports_nothing(nvml: FakeNvml, start: Start) -> None:
    """A card without identity, address and values is no card: the backend is down, and nothing is made up."""
    nvml.write([Gpu(name="Orin (nvgpu)")])
    scrape = start(nvml.environment(), NVIDIA).scrape()
    assert reason(scrape) == "unsupported"
    assert values(scrape) == {}
    assert scrape.of("gpu_info") == []


@pytest.mark.e2e
def test_f69_each_field_is_there_or_not_by_itself(nvml: FakeNvml, start: Start) -> None:
    """What one card lacks, in one way or another, costs neither its other values nor the other card's."""
    first, second = (replace(card, util=None, temp=None) for card in equal_cards(2))
    nvml.write(
        [replace(first, temp=43, fans=1), replace(second, util=7, power=27_000, fans=1, fan=30)],
        lines=["fault nvmlDeviceGetFanSpeed_v2 0 999"],
    )
    daemon = start(nvml.environment(), NVIDIA)
    scrape = daemon.scrape()
    names = {"gpu_utilization_percent": "util", "gpu_temperature_celsius": "temp", "gpu_power_watts": "power"}
    found = [
        {names[name]: value for name, value in values(scrape, physical_index=i).items() if name in names} for i in "01"
    ]
    assert found == [{"temp": 43}, {"util": 7, "power": 27}]
    assert [each.value for each in scrape.of("gpu_fan_speed_ratio")] == [0.3]
    assert not re.search(r"N/A|Not Supported|ERR|NaN", daemon.request("/metrics").body.decode())


@pytest.mark.e2e
def test_f71_what_is_no_temperature(nvml: FakeNvml, start: Start) -> None:
    """Of cards at 47, 255, 0, -1 and 510 degrees one has a temperature; all have their other values, and no fault."""
    nvml.write([replace(card, temp=temp) for card, temp in zip(equal_cards(5), (47, 255, 0, -1, 510), strict=True)])
    scrape = start(nvml.environment(), NVIDIA).scrape()
    assert [(each.labels["physical_index"], each.value) for each in scrape.of("gpu_temperature_celsius")] == [("0", 47)]
    assert len(scrape.of("gpu_utilization_percent")) == 5
    assert sum(each.value for each in scrape.of("gpu_exporter_backend_faults_total")) == 0


@pytest.mark.e2e
def test_f73_a_card_in_mig_mode_is_not_idle(nvml: FakeNvml, start: Start) -> None:
    """Its utilization is absent, which 0 would not be, and its memory is there."""
    nvml.write([replace(equal_cards(1)[0], mig=1, util=None, used=36_537 * MIB)])
    scrape = start(nvml.environment(), NVIDIA).scrape()
    assert scrape.of("gpu_utilization_percent") == []
    assert scrape.value("gpu_memory_used_bytes") == 36_537 * MIB


@pytest.mark.e2e
@pytest.mark.parametrize("version", [2, 1])
def test_f75_used_memory_is_without_the_reserve(tmp_path: Path, start: Start, version: int) -> None:
    """The reserve has a family of its own, and the three add up to all; the older call, which counts it as used, gives
    neither.
    """
    missing = ("nvmlDeviceGetMemoryInfo_v2",) if version == 1 else ()
    fake = FakeNvml(tmp_path, build_or_skip(tmp_path / "lib", missing))
    free, used, reserved = 84_900_000_000, 8_178_892, 991_167_028
    fake.write([replace(equal_cards(1)[0], total=80 * GIB, free=free, used=used, reserved=reserved)])
    found = values(start(fake.environment(), NVIDIA).scrape())
    memory = {re.sub("gpu_memory_|_bytes", "", name): value for name, value in found.items() if name.endswith("_bytes")}
    told = {"used": used, "reserved": reserved} if version == 2 else {}
    assert memory == {"total": 80 * GIB, "free": free} | told
    assert free + used + reserved == 80 * GIB


@pytest.mark.e2e
@pytest.mark.parametrize("headers", [{}, {"Accept": "*/*"}, {"Accept-Encoding": "gzip"}, {"Accept": "text/html"}])
def test_f87_every_answer_says_what_it_is(nvml: FakeNvml, start: Start, headers: Mapping[str, str]) -> None:
    """A type that Prometheus takes, also zipped and while the backend is down; what is no page has a type as well."""
    nvml.remove()
    daemon = start(nvml.environment(), NVIDIA)
    answer = daemon.request("/metrics", headers=headers)
    body = gzip.decompress(answer.body) if answer.headers.get("content-encoding") == "gzip" else answer.body
    assert answer.status == 200
    assert answer.headers["content-type"].replace(" ", "").startswith("text/plain;version=0.0.4")
    assert b"# TYPE gpu_exporter_backend_up gauge" in body
    assert daemon.request("/nowhere", headers=headers).headers["content-type"]


@pytest.mark.e2e
def test_f89_the_energy_counter_is_handed_on_as_it_is(nvml: FakeNvml, start: Start) -> None:
    """In joules; where it starts anew it is smaller, and power is the card's own at both times."""
    card = replace(watched_cards(1)[0], fields=("83 1004108", "186 75000"))
    nvml.write([card])
    daemon = start(nvml.environment(), NVIDIA)
    assert daemon.scrape().value("gpu_energy_joules_total") == 1004.108
    nvml.write([replace(card, fields=("83 10", "186 75000"))])
    scrape = daemon.scrape()
    assert scrape.value("gpu_energy_joules_total") == 0.01
    assert scrape.value("gpu_power_watts") == 75


@pytest.mark.e2e
def test_f92_a_mask_that_proves_nothing_costs_no_card_its_readings(nvml: FakeNvml, start: Start) -> None:
    """The masked fleet is refused, with the reason, and every card is there under its physical index."""
    *equal, other = equal_cards(4)
    nvml.write([*equal, replace(other, name="NVIDIA A100")])
    masked = "  - {name: chat, env: {CUDA_VISIBLE_DEVICES: '1'}}\nmapping: {probe: never}\n"
    settings = NVIDIA.replace("[{name: host, runtime: host}]\n", f"\n  - {{name: host, runtime: host}}\n{masked}")
    scrape = start(nvml.environment(), settings).scrape()
    assert scrape.value("gpu_fleet_mask_refusal_info", fleet="chat", reason="order-unknown") == 1
    assert len(scrape.of("gpu_temperature_celsius", fleet="host")) == 4
    assert not [
        each for name in scrape.samples for each in scrape.of(name, fleet="chat") if "fleet_index" in each.labels
    ]


@pytest.mark.e2e
def test_f94_an_instance_is_read_where_its_card_may_not_be(nvml: FakeNvml, start: Start) -> None:
    """The instance's memory is its own; the card's is absent, and its other calls lack the permission."""
    part = Mig(
        index=0,
        uuid="MIG-a0000000-2222-5000-8000-000000000001",
        gi=9,
        ci=0,
        name="NVIDIA H100 MIG 1g.10gb",
        total=10 * GIB,
        free=9 * GIB,
        used=GIB,
    )
    card = replace(equal_cards(1)[0], mig=1, instances=(part,), total=None, free=None, used=None, reserved=None)
    refused = ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetFieldValues", "nvmlDeviceGetClockInfo")
    nvml.write([card], lines=[f"fault {call} 0 4" for call in refused])
    scrape = start(nvml.environment(), NVIDIA).scrape()
    assert scrape.value("gpu_memory_total_bytes", uuid=str(part.uuid), gpu_partition="9/0") == 10 * GIB
    assert scrape.value("gpu_memory_used_bytes", uuid=str(part.uuid)) == GIB
    assert values(scrape, uuid=str(card.uuid)) == {}
    assert scrape.state(uuid=str(part.uuid)) == "ok"
    assert scrape.value("gpu_exporter_backend_faults_total", reason="no-permission") > 0


@pytest.mark.e2e
@pytest.mark.parametrize("closed", ["fault nvmlInitWithFlags * 4", "fault nvmlDeviceGetHandleByIndex_v2 * 4"])
def test_f100_a_card_that_is_closed_at_first(nvml: FakeNvml, start: Start, closed: str) -> None:
    """Neither the library nor a card can be opened yet: it is tried again, and is there without a restart."""
    nvml.write(equal_cards(2), lines=[closed])
    daemon = start(nvml.environment(), NVIDIA)
    assert reason(daemon.scrape()) == "no-permission"
    nvml.write(equal_cards(2))
    daemon.scrape_until(lambda page: len(page.of("gpu_temperature_celsius")) == 2)
