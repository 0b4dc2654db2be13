"""Cards on which a fleet's processes are seen to compute, held against its masks: the pretend NVML says who computes on
what, as the driver does.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nvml import FakeNvml, equal_cards
from tests.fleet_pages import CARDS, QUICK, cards, evidence, masked, refusal
from tests.harness import Daemon, Start
from tests.process_host import ProcessHost, control_group, nvidia_files, process_host

pytestmark = pytest.mark.e2e

FIRST, SECOND, THIRD, FOURTH = CARDS
MINE = os.getpid()
EQUAL = equal_cards(4)
MIXED = (*EQUAL[:3], dataclasses.replace(EQUAL[3], name="NVIDIA A2"))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ProcessHost]:
    """Four cards' files."""
    with process_host(tmp_path, nvidia_files(4)) as made:
        yield made


class Following:
    """A daemon that follows one process, of which the driver says where it computes."""

    def __init__(self, host: ProcessHost, nvml: FakeNvml, folder: Path, start: Start) -> None:
        self._host, self._nvml, self._start = host, nvml, start
        self._pid_file = folder / "serve.pid"
        self.gpus = EQUAL

    def computes(self, *places: str) -> None:
        """From now on these are the places, ``INDEX PID``, where anything computes."""
        self._nvml.write(self.gpus, lines=[f"process {place}" for place in places])

    def follow(self, pid: int) -> None:
        """This is the process from now on."""
        self._pid_file.write_text(str(pid))

    def daemon(self, pid: int) -> Daemon:
        """With one fleet, ``file``."""
        self.follow(pid)
        settings = f"{QUICK}fleets: [{{name: file, pid_file: {self._pid_file}}}]"
        return self._start(self._nvml.environment(), settings, [], self._host.within)


@pytest.fixture
def following(host: ProcessHost, nvml: FakeNvml, tmp_path: Path, start: Start) -> Following:
    return Following(host, nvml, tmp_path, start)


def test_a_process_that_computes_on_a_card_of_its_mask_keeps_it(following: Following, host: ProcessHost) -> None:
    """What is seen and what the masks say agree, and others' processes on other cards are no matter."""
    pid = host.run(masked("2,1")).pid
    following.computes(f"2 {pid}", f"3 {os.getpid()}", "0 4194304")
    daemon = following.daemon(pid)
    scrape = daemon.scrape_until(lambda scrape: cards(scrape, "file") == [THIRD, SECOND])
    assert evidence(scrape, "file") == {"proven"}


def test_a_process_that_computes_on_a_card_outside_its_mask_is_refused_for_good(
    following: Following, host: ProcessHost
) -> None:
    """Its masks as it was started with them are not what it uses: neither is shown, also when it computes no more; a
    process that follows it starts afresh.
    """
    program = host.run(masked("0"))
    daemon = following.daemon(program.pid)
    daemon.scrape_until(lambda scrape: cards(scrape, "file") == [FIRST])
    following.computes(f"2 {program.pid}")
    scrape = daemon.scrape_until(lambda scrape: refusal(scrape, "file") == "contradicted")
    assert cards(scrape, "file") == []
    assert f"the process computes on {EQUAL[2].uuid}; its masks leave {EQUAL[0].uuid}" in daemon.log
    following.computes()
    daemon.scrape_until(lambda scrape: scrape.of("gpu_info") != [])
    for _ in range(3):
        assert refusal(daemon.scrape(), "file") == "contradicted"
    program.end()
    following.follow(host.run(masked("0")).pid)
    daemon.scrape_until(lambda scrape: cards(scrape, "file") == [FIRST])


def test_the_one_card_that_computes_proves_the_order(following: Following, host: ProcessHost) -> None:
    """On a host of two models a process with one visible card is shown on the card where it computes, as proven, and
    stays there when it computes no more.
    """
    following.gpus = MIXED
    pid = host.run({"CUDA_VISIBLE_DEVICES": "1"}).pid
    following.computes()
    daemon = following.daemon(pid)
    daemon.scrape_until(lambda scrape: refusal(scrape, "file") == "order-unknown")
    following.computes(f"3 {pid}")
    scrape = daemon.scrape_until(lambda scrape: cards(scrape, "file") == [FOURTH])
    assert evidence(scrape, "file") == {"proven"}
    following.computes()
    daemon.scrape_until(lambda scrape: cards(scrape, "file") == [FOURTH])


def test_one_of_two_visible_cards_proves_nothing(following: Following, host: ProcessHost) -> None:
    """Which of its numbers the card has that computes does not show, so the order remains unknown."""
    following.gpus = MIXED
    pid = host.run({"CUDA_VISIBLE_DEVICES": "1,0"}).pid
    following.computes(f"3 {pid}")
    daemon = following.daemon(pid)
    daemon.scrape_until(lambda scrape: refusal(scrape, "file") == "order-unknown")


def test_a_child_that_computes_counts_as_its_fleets(host: ProcessHost, nvml: FakeNvml, start: Start) -> None:
    """Every process of the unit with the same masks is the fleet's: one that computes elsewhere contradicts all."""
    with control_group(f"system.slice/unit{MINE}.service") as group:
        pids = [host.run(masked("1"), cgroup=group).pid for _ in range(3)]
        settings = f"{QUICK}fleets: [{{name: unit, systemd_unit: unit{MINE}}}]"
        nvml.write(EQUAL, lines=[f"process 1 {pids[0]}", f"process 1 {pids[2]}"])
        daemon = start(nvml.environment(), settings, [], host.within)
        daemon.scrape_until(lambda scrape: cards(scrape, "unit") == [SECOND])
        nvml.write(EQUAL, lines=[f"process 1 {pids[0]}", f"process 0 {pids[2]}"])
        daemon.scrape_until(lambda scrape: refusal(scrape, "unit") == "contradicted")


def test_a_fleet_of_the_settings_is_held_against_nothing(nvml: FakeNvml, tmp_path: Path, start: Start) -> None:
    """Nobody knows its processes, and the driver is not asked who computes."""
    nvml.write(EQUAL, lines=[f"process 2 {os.getpid()}", f'log "{tmp_path}/calls"'])
    daemon = start(nvml.environment(), "fleets: [{name: chat, env: {CUDA_VISIBLE_DEVICES: '0'}}]")
    scrape = daemon.scrape_until(lambda scrape: cards(scrape, "chat") == [FIRST])
    assert evidence(scrape, "chat") == {"assumed"}
    calls = (tmp_path / "calls").read_text()
    assert "nvmlDeviceGetUUID" in calls
    assert "RunningProcesses" not in calls
