"""Process numbers that come back, and programs that come after another in the same process: the fleet's masks are those
of what runs now, on the real daemon.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.nvml import FakeNvml, equal_cards
from tests.fleet_pages import CARDS, QUICK, Poller, cards, explain, masked, refusal
from tests.harness import Daemon, Start
from tests.process_host import ProcessHost, control_group, nvidia_files, process_host, wait_for

pytestmark = pytest.mark.e2e

FIRST, SECOND, THIRD, FOURTH = CARDS


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ProcessHost]:
    """Four cards' files."""
    with process_host(tmp_path, nvidia_files(4)) as made:
        yield made


@pytest.fixture
def pid_file(tmp_path: Path) -> Path:
    return tmp_path / "serve.pid"


def following(start: Start, nvml: FakeNvml, host: ProcessHost, pid_file: Path) -> Daemon:
    """A daemon with one fleet, ``file``."""
    settings = f"{QUICK}fleets: [{{name: file, pid_file: {pid_file}}}]"
    return start(nvml.environment(), settings, [], host.within)


def until_shown(daemon: Daemon, *wanted: str, within: float = 20.0) -> None:
    """Until the fleet has these cards."""
    daemon.scrape_until(lambda scrape: cards(scrape, "file") == list(wanted), within)


def test_a_number_that_came_back_is_not_the_pid_files_process(
    host: ProcessHost, nvml: FakeNvml, pid_file: Path, start: Start
) -> None:
    """Another program got the number that an old pid file has: its mask is not shown, nor is the old one, and the
    fleet's process is gone.
    """
    program = host.run(masked("0"))
    pid_file.write_text(f"{program.pid}\n")
    daemon = following(start, nvml, host, pid_file)
    until_shown(daemon, FIRST)
    time.sleep(2.5)  # within two seconds of its writing the file may be the new process's
    with Poller(daemon) as poller:
        program.end()
        ended = time.monotonic()
        host.run_as(program.pid, masked("1"))
        time.sleep(1.5)
    found = {(refusal(scrape, "file"), *cards(scrape, "file")) for scrape in poller.begun_after(ended)}
    assert found <= {("process-gone",), ("",)}
    assert refusal(poller.pages[-1].scrape, "file") == "process-gone"
    assert (
        "was started after the file was written"
        in explain(host, nvml.environment(), f"--config.file={daemon.config_path}").out
    )


def test_a_number_that_comes_back_at_once_never_has_the_mask_of_before(
    host: ProcessHost, nvml: FakeNvml, start: Start, pid_file: Path
) -> None:
    """Twelve programs with one number, one right after the other and each with the file written anew: no page that was
    begun after one has ended has its card.
    """
    program = host.run(masked("3"))
    pid_file.write_text(str(program.pid))
    daemon = following(start, nvml, host, pid_file)
    until_shown(daemon, FOURTH)
    pid = program.pid
    with Poller(daemon) as poller:
        program.end()
        lives = [(FOURTH, 0.0, time.monotonic())]
        for number in range(12):
            started = time.monotonic()
            host.run_as(pid, masked(str(number % 3)))
            pid_file.write_text(str(pid))
            if number % 4 == 3:
                until_shown(daemon, CARDS[number % 3])
            time.sleep(0.1 + 0.02 * number)
            end(pid)
            lives.append((CARDS[number % 3], started, time.monotonic()))
    assert len(poller.pages) > 20
    for page in poller.pages:
        then = {card for card, started, ended in lives if started < page.ended and ended > page.begun}
        assert set(cards(page.scrape, "file")) <= then


def end(pid: int) -> None:
    """Ends a process of :meth:`ProcessHost.run_as`, and waits until its number is free."""
    os.kill(pid, 9)
    wait_for(lambda: not Path(f"/proc/{pid}").exists())


def test_a_number_that_another_fleets_process_got_is_no_longer_this_ones(
    host: ProcessHost, nvml: FakeNvml, start: Start
) -> None:
    """One of a unit's two processes has ended, and a stranger that got its number computes elsewhere: that contradicts
    nothing, though nobody has looked at the processes anew.
    """
    with control_group(f"system.slice/two{os.getpid()}.service") as group:
        pids = [host.run(masked("0"), cgroup=group) for _ in range(2)]
        settings = f"sampling: {{scan_seconds: 60}}\nfleets: [{{name: file, systemd_unit: two{os.getpid()}}}]"
        daemon = start(nvml.environment(), settings, [], host.within)
        until_shown(daemon, FIRST)
        pids[1].end()
        host.run_as(pids[1].pid, masked("2"))
        nvml.write(equal_cards(4), lines=[f"process 2 {pids[1].pid}"])
        time.sleep(1.0)  # what a cycle found is used again for that long
        scrape = daemon.scrape()
        assert (refusal(scrape, "file"), cards(scrape, "file")) == ("", [FIRST])


# sh waits for a file and then becomes another program with another mask; it is one process all along.
_TURNS = "until test -e {flag}; do sleep 0.02; done; exec env CUDA_VISIBLE_DEVICES=1,2 sleep 100000"


def turns_into_another(host: ProcessHost, flag: Path) -> int:
    """A process that runs one program with mask 0, and another with mask 1,2 once there is the file."""
    command = ("sh", "-c", _TURNS.format(flag=flag))
    return host.run(masked("0"), command).pid


def test_a_program_that_follows_in_the_same_process_has_its_own_mask(
    host: ProcessHost, nvml: FakeNvml, pid_file: Path, tmp_path: Path, start: Start
) -> None:
    """A process that runs another program keeps number and start, and yet no page that was begun after that has the
    mask of before.
    """
    pid = turns_into_another(host, tmp_path / "flag")
    pid_file.write_text(str(pid))
    daemon = following(start, nvml, host, pid_file)
    until_shown(daemon, FIRST)
    with Poller(daemon) as poller:
        time.sleep(0.3)
        (tmp_path / "flag").touch()
        wait_for(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n")
        turned = time.monotonic()
        until_shown(daemon, SECOND, THIRD)
        seen = time.monotonic()
        time.sleep(0.5)
    after = [cards(scrape, "file") for scrape in poller.begun_after(turned)]
    assert all(found in ([], [SECOND, THIRD]) for found in after)
    assert all(cards(scrape, "file") == [SECOND, THIRD] for scrape in poller.begun_after(seen))


# Runs itself again with another mask of the same length, so that all addresses are the same where the kernel does not
# draw them by lot.
_AGAIN = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
if os.environ["CUDA_VISIBLE_DEVICES"] == "0":
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    os.execv(sys.executable, [sys.executable, "-c", *sys.argv[2:], sys.argv[1], *sys.argv[2:]])
time.sleep(100000)
"""


def test_the_same_program_again_has_its_own_mask_where_addresses_are_not_random(
    host: ProcessHost, nvml: FakeNvml, pid_file: Path, tmp_path: Path, start: Start
) -> None:
    """A process that starts its own program anew with another mask: the new mask is shown, also without the kernel's
    randomisation of addresses.
    """
    program = (sys.executable, "-c", _AGAIN, str(tmp_path / "flag"), _AGAIN)
    pid = host.run(masked("0"), ("setarch", "--addr-no-randomize", *program), becomes=program).pid
    pid_file.write_text(str(pid))
    daemon = following(start, nvml, host, pid_file)
    until_shown(daemon, FIRST)
    (tmp_path / "flag").touch()
    wait_for(lambda: b"CUDA_VISIBLE_DEVICES=1" in Path(f"/proc/{pid}/environ").read_bytes())
    until_shown(daemon, SECOND, within=5.0)
