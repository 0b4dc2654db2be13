"""Two hundred processes in fifty units, of which some end and others start all the time: every page is true of the
moment when it was asked for, and the daemon grows no larger.

``CHURN_SECONDS`` says for how long; a minute gives figures worth to be written down.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fakes.nvml import FakeNvml
from tests.fleet_pages import CARDS, QUICK, cards, fleets, masked
from tests.harness import Daemon, Scrape, Start
from tests.process_host import ProcessHost, control_group, nvidia_files, process_host

pytestmark = pytest.mark.e2e

MINE = os.getpid()
SECONDS = float(os.environ.get("CHURN_SECONDS", "20"))
UNITS, LIVING, EACH = 60, 50, 4
EVERY_SECONDS = EACH / 10
"""Between two swaps of a unit for another: ten starts and ten exits a second."""

# Starts and ends programs in its own namespace, and moves each to its control group before it runs: one line for each
# start, `GROUP NAME=VALUE...`, answered by the number, and one for each end, `end PID`, answered when it has ended.
_SPAWNER = """
import os, signal, sys
for line in sys.stdin:
    first, *rest = line.split()
    if first == "end":
        os.kill(int(rest[0]), signal.SIGKILL)
        os.waitpid(int(rest[0]), 0)
        print("ended", flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        open(first + "/cgroup.procs", "w").write(str(os.getpid()))
        os.execve("/bin/sleep", ["sleep", "100000"], dict(each.split("=", 1) for each in rest))
    print(pid, flush=True)
"""


class Spawner:
    """The program above."""

    def __init__(self, host: ProcessHost) -> None:
        command = host.within([sys.executable, "-c", _SPAWNER])
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._living: set[int] = set()

    def start(self, group: Path, mask: str) -> int:
        """A program in a control group, once it is asked for; its number."""
        words = " ".join(f"{name}={value}" for name, value in masked(mask).items())
        pid = int(self._asked(f"{group} {words}"))
        self._living.add(pid)
        return pid

    def end(self, pid: int) -> None:
        """Ends one, and waits until it has gone."""
        self._asked(f"end {pid}")
        self._living.remove(pid)

    def _asked(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(line, file=self._process.stdin, flush=True)
        return self._process.stdout.readline()

    def close(self) -> None:
        """Ends all."""
        for pid in list(self._living):
            self.end(pid)
        self._process.communicate()


class Life(NamedTuple):
    """A time in which a unit had processes with one mask (monotonic); ``ended`` is infinite while it has."""

    mask: str
    started: float
    ended: float


class Churn:
    """The units, in a thread that swaps one for another as long as it is entered."""

    def __init__(self, spawner: Spawner, groups: Sequence[Path]) -> None:
        self.lives: dict[str, list[Life]] = {group.name: [] for group in groups}
        self.swaps = 0
        self._spawner, self._random = spawner, random.Random(4)
        self._running: deque[tuple[Path, list[int]]] = deque()
        self._waiting = deque(groups)
        self._done = threading.Event()
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        for _ in range(LIVING):
            self._start_one()

    def __enter__(self) -> Churn:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(30)
        assert self._failed is None, self._failed

    def _run(self) -> None:
        try:
            while not self._done.wait(EVERY_SECONDS):
                self._end_one()
                self._start_one()
                self.swaps += 1
        except (OSError, ValueError) as error:
            self._failed = error

    def _start_one(self) -> None:
        group = self._waiting.popleft()
        mask = self._random.choice("0123")
        self.lives[group.name].append(Life(mask, time.monotonic(), float("inf")))
        self._running.append((group, [self._spawner.start(group, mask) for _ in range(EACH)]))

    def _end_one(self) -> None:
        group, pids = self._running.popleft()
        for pid in pids:
            self._spawner.end(pid)
        self.lives[group.name][-1] = self.lives[group.name][-1]._replace(ended=time.monotonic())
        self._waiting.append(group)


class Figures(NamedTuple):
    """What a process costs: kB of memory, threads, and open files."""

    memory: int
    threads: int
    files: int


def figures(pid: int) -> Figures:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    open_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Figures(int(status["VmRSS"].split()[0]), int(status["Threads"]), open_files)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ProcessHost]:
    """Four cards' files."""
    with process_host(tmp_path, nvidia_files(4)) as made:
        yield made


@pytest.fixture
def churn(host: ProcessHost) -> Iterator[Churn]:
    """Fifty units of sixty, each of four processes."""
    with contextlib.ExitStack() as stack:
        names = [f"system.slice/churn{MINE}-{number:02}.service" for number in range(UNITS)]
        groups = [stack.enter_context(control_group(name)) for name in names]
        spawner = Spawner(host)
        stack.callback(spawner.close)
        yield Churn(spawner, groups)


def check(scrape: Scrape, begun: float, ended: float, churn: Churn) -> None:
    """Every fleet on the page had a process at some time while the page was made, and the cards of its mask."""
    for name in fleets(scrape):
        lives = [life for life in churn.lives[name] if life.ended > begun and life.started < ended]
        assert lives, f"{name} had ended before the page was asked for"
        assert cards(scrape, name) in [[CARDS[int(life.mask)]] for life in lives], name
    readings = {sample.labels["fleet"] for sample in scrape.of("gpu_utilization_percent")}
    assert readings <= fleets(scrape)


def scraped(daemon: Daemon, churn: Churn, seconds: float) -> tuple[list[float], list[Figures]]:
    """How long each page took, and what the daemon cost after it."""
    took: list[float] = []
    cost: list[Figures] = []
    chance, until = random.Random(5), time.monotonic() + seconds
    while time.monotonic() < until:
        begun = time.monotonic()
        scrape = daemon.scrape(5)
        ended = time.monotonic()
        check(scrape, begun, ended, churn)
        took.append(scrape.seconds)
        cost.append(figures(daemon.process.pid))
        time.sleep(chance.uniform(0.2, 1.0))
    return took, cost


def test_pages_are_true_and_the_daemon_stays_small_while_processes_come_and_go(
    nvml: FakeNvml, churn: Churn, host: ProcessHost, start: Start
) -> None:
    """No page has a fleet all of whose processes had ended before it was asked for, or another's card; memory, threads
    and open files do not grow; and at the end all fleets that live are there.
    """
    settings = f"{QUICK}fleets: [{{name: '{{unit}}', systemd_unit: 'churn{MINE}-*'}}]"
    daemon = start(nvml.environment(), settings, [], host.within)
    daemon.scrape_until(lambda scrape: len(fleets(scrape)) == LIVING)
    with churn:
        took, cost = scraped(daemon, churn, SECONDS)
    living = {name for name, lives in churn.lives.items() if lives and lives[-1].ended == float("inf")}
    daemon.scrape_until(lambda scrape: fleets(scrape) == living)
    _say(took, cost, churn.swaps)
    settled, last = cost[len(cost) // 3 :], cost[-1]
    assert churn.swaps > SECONDS
    assert max(took) < 5.0
    assert last.memory - settled[0].memory < 8 * 1024, "it grows by the kB"
    assert max(each.threads for each in settled) - min(each.threads for each in settled) <= 2
    assert max(each.files for each in settled) - min(each.files for each in settled) <= 8


def _say(took: Sequence[float], cost: Sequence[Figures], swaps: int) -> None:
    ordered = sorted(took)
    middle, late = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    print(f"\n{len(took)} pages over {swaps * EACH} starts and ends: {middle * 1e3:.1f} ms, p99 {late * 1e3:.1f} ms;")
    print(f"memory, threads, files: {cost[len(cost) // 3]} after a third, {cost[-1]} at the end")
