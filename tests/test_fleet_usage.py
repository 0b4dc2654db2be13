"""Fleets of live processes on shared AMD cards, through the whole daemon: each one's own memory, by the KFD's files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fake_proc import Proc
from tests.fakes.sysfs import GIB, KFD, AmdCard, FakeSys, KfdNode, Process
from tests.harness import Daemon, Scrape, Start

pytestmark = pytest.mark.e2e

A = AmdCard(pci="0000:03:00.0", minor=0, unique_id=0xA1, kfd_nodes=(KfdNode(node=2, unique_id=0xA1),))
B = AmdCard(pci="0000:83:00.0", minor=1, unique_id=0xB2, kfd_nodes=(KfdNode(node=3, unique_id=0xB2),))
MEMORY, PROCESSES = "gpu_fleet_memory_used_bytes", "gpu_fleet_processes"
SETTINGS = f"""
backends: [amd]
sampling: {{reuse_seconds: 0, scan_seconds: 0.25}}
mapping: {{probe: never}}
fleets:
  - {{name: "job-{{job}}", cgroup: "/job_(?P<job>[0-9]+)", runtime: rocm, reach: ["{A.pci}", "{B.pci}"]}}
  - {{name: stated, runtime: rocm, env: {{ROCR_VISIBLE_DEVICES: "0"}}}}
  - {{name: host, runtime: host}}
"""


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    """Two jobs that share the first card; the workers of one have their titles where their masks were."""
    made = Proc(tmp_path / "processes")
    made.add(70, "0,1", variable="ROCR_VISIBLE_DEVICES", group="/job_7")
    made.add(71, "0,1", variable="ROCR_VISIBLE_DEVICES", group="/job_7", parent=70, overwritten=True)
    made.add(72, "0,1", variable="ROCR_VISIBLE_DEVICES", group="/job_7", parent=70, overwritten=True)
    made.add(80, "0", variable="ROCR_VISIBLE_DEVICES", group="/job_8")
    made.add(90, None, group="/nobodys")
    return made


@pytest.fixture
def daemon(fake: FakeSys, proc: Proc, start: Start) -> Callable[[], Daemon]:
    """The daemon over both trees."""
    flags = [f"--path.sysfs={fake.sys}", f"--path.procfs={proc.root}"]
    return lambda: start({}, SETTINGS, flags)


def values(scrape: Scrape, name: str) -> dict[str, float]:
    """A family's values by fleet and index."""
    return {f"{each.labels['fleet']} {each.labels['fleet_index']}": each.value for each in scrape.of(name)}


def test_jobs_on_one_card_are_told_apart(fake: FakeSys, daemon: Callable[[], Daemon]) -> None:
    """All of a job's processes on the card that its index is, whoever else is there; and in the answer for tools."""
    workers = [
        Process(pid=71, vram={2: 20 * GIB, 3: 1 << 20}),
        Process(pid=72, vram={2: 1 << 20, 3: 4 * GIB}),
        Process(pid=80, vram={2: 3 * GIB, 3: 0}),
        Process(pid=90, vram={2: GIB, 3: GIB}),
    ]
    fake.write([A, B], processes=workers)
    running = daemon()
    scrape = running.scrape_until(lambda page: bool(page.of(MEMORY)))
    assert values(scrape, MEMORY) == {
        "job-7 0": 20 * GIB + (1 << 20),
        "job-7 1": 4 * GIB + (1 << 20),
        "job-8 0": 3 * GIB,
    }
    assert values(scrape, PROCESSES) == {"job-7 0": 1, "job-7 1": 1, "job-8 0": 1}
    assert {each.labels["pci_bus_id"] for each in scrape.of(MEMORY) if each.labels["fleet_index"] == "0"} == {A.pci}
    assert scrape.of("gpu_fleet_utilization_ratio") == []
    facts = json.loads(running.request("/api/v1/fleets").body)
    usage = {
        fleet["name"]: [card.get("usage") for card in fleet["runtimes"][0]["devices"]] for fleet in facts["fleets"]
    }
    assert usage["job-8"] == [{MEMORY: 3 * GIB, PROCESSES: 1}]
    assert usage["stated"] == [None]


def test_a_list_that_is_gone_is_not_an_empty_one(fake: FakeSys, daemon: Callable[[], Daemon]) -> None:
    """A job that uses no card holds nothing; where nobody can tell who uses it, nothing is shown."""
    fake.write([A, B], processes=[Process(pid=71, vram={2: GIB, 3: GIB})])
    running = daemon()
    scrape = running.scrape_until(lambda page: bool(page.of(MEMORY)))
    assert values(scrape, MEMORY) == {"job-7 0": GIB, "job-7 1": GIB, "job-8 0": 0}
    assert values(scrape, PROCESSES)["job-8 0"] == 0
    (fake.sys / KFD / "proc").rename(fake.sys / "away")
    scrape = running.scrape()
    assert (scrape.of(MEMORY), scrape.of(PROCESSES)) == ([], [])
    assert len(values(scrape, "gpu_memory_used_bytes")) == 6


def test_numbers_of_another_namespace_are_nobodys(fake: FakeSys, proc: Proc, daemon: Callable[[], Daemon]) -> None:
    """In a container without the host's process numbers the same number is another process: no 0, and no value."""
    (proc.root / "self/ns/pid").unlink()
    (proc.root / "self/ns/pid").symlink_to("pid:[4026532577]")
    fake.write([A, B], processes=[Process(pid=71, vram={2: GIB, 3: GIB})])
    scrape = daemon().scrape_until(lambda page: "job-7 1" in values(page, "gpu_memory_used_bytes"))
    assert (scrape.of(MEMORY), scrape.of(PROCESSES)) == ([], [])
