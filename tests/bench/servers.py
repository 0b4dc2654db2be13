"""The programs that are measured, and the clients that ask them."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tests.bench.scenes import Cards
from tests.bench.tables import quantile
from tests.harness import free_port

BARE, ANEW, REUSED, NVITOP = "bare prometheus_client", "ours, read anew", "ours, default reuse", "nvitop-exporter"
# A server still has work after its answer, such as closing the connection, which counts too.
_SETTLE_SECONDS = 0.02
_START_SECONDS = 60.0
_ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"

# A whole exporter as people write it: its own program, so that nothing of ours is in its memory.
_BARE_PROGRAM = """
import json, sys
from prometheus_client import CollectorRegistry, Gauge, start_http_server

registry = CollectorRegistry()
for name, text, labels, rows in json.load(sys.stdin):
    gauge = Gauge(name, text, labels, registry=registry)
    for values, value in rows:
        (gauge.labels(*values) if labels else gauge).set(value)
server, thread = start_http_server(int(sys.argv[1]), "127.0.0.1", registry)
thread.join()
"""


class Client(NamedTuple):
    """A way to ask for a page."""

    name: str
    keep_alive: bool
    headers: dict[str, str]


PLAIN = Client("a new connection each", keep_alive=False, headers={})
KEPT = Client("one connection kept open", keep_alive=True, headers={})
PROMETHEUS = Client("kept open, headers of Prometheus", True, {"Accept": _ACCEPT, "Accept-Encoding": "gzip"})


@dataclass
class Cost:
    """What the scrapes of one page by one client cost: the latency of each, and the CPU time of all together."""

    milliseconds: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0

    def latency(self, percent: int) -> float:
        """Milliseconds; 50 is the median."""
        return quantile(self.milliseconds, percent)

    def cpu(self) -> float:
        """Milliseconds of user and system time a scrape, of the server and its workers."""
        return 1000 * self.cpu_seconds / len(self.milliseconds)


class Page:
    """A running server with a page, and what its scrapes have cost so far, by client."""

    def __init__(self, name: str, pid: int, port: int, start_seconds: float) -> None:
        """``start_seconds`` is from its start to its first whole page."""
        self.name, self.port, self.start_seconds = name, port, start_seconds
        self._pid = pid
        self.costs: defaultdict[str, Cost] = defaultdict(Cost)
        self._kept: dict[str, http.client.HTTPConnection] = {}

    def pids(self) -> list[int]:
        """The server's process, then its workers'."""
        return [self._pid, *children(self._pid)]

    def get(self, client: Client = PLAIN, headers: dict[str, str] | None = None) -> bytes:
        """The body of one scrape; raises ``RuntimeError`` unless the answer is 200."""
        connection = self._kept.get(client.name) or http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", "/metrics", headers=client.headers | (headers or {}))
        response = connection.getresponse()
        body = response.read()
        if client.keep_alive:
            self._kept[client.name] = connection
        else:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{self.name}: the answer is {response.status}")
        return body

    def scrape(self, client: Client, count: int, before_each: Callable[[], None]) -> None:
        """So many scrapes, one after the other, are added to the client's costs; ``before_each`` is not."""
        cost = self.costs[client.name]
        before = self.cpu_seconds()
        for _ in range(count):
            before_each()
            started = time.perf_counter()
            self.get(client)
            cost.milliseconds.append(1000 * (time.perf_counter() - started))
        time.sleep(_SETTLE_SECONDS)
        cost.cpu_seconds += self.cpu_seconds() - before

    def samples(self) -> int:
        """Sample lines on the page."""
        return sum(not line.startswith(b"#") for line in self.get().splitlines())

    def cpu_seconds(self) -> float:
        """User and system time of the server and its workers so far, ended threads included.

        Read from each process's own CPU clock: it is what ``/proc/PID/stat`` rounds down to hundredths of a second.
        The number is that of ``clock_getcpuclockid``, which Python does not have.
        """
        while True:
            pids = self.pids()
            with contextlib.suppress(OSError):  # one has just ended: a driver was asked in it
                return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def children(pid: int) -> list[int]:
    """A process's children."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def resident_mib(pid: int) -> float:
    """A process's resident memory."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(re.findall(r"^VmRSS:\s+([0-9]+) kB", text, re.MULTILINE)[0]) / 1024


class Command(NamedTuple):
    """A program to be served by: its arguments after the interpreter, its environment, and what it reads at its start.
    Its page is whole once it has this text.
    """

    arguments: Sequence[str]
    environment: dict[str, str]
    whole: bytes
    given: str = ""


@contextlib.contextmanager
def serving(name: str, command: Command, port: int, within: Sequence[str] = ()) -> Iterator[Page]:
    """A server on that port, once its page is whole; ``within`` is put before its command."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [*within, sys.executable, *command.arguments],
        env=os.environ | command.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:  # waits for its end
        try:
            if process.stdin:
                process.stdin.write(command.given)
                process.stdin.close()
            yield _once_whole(name, process, port, command.whole, started)
        finally:
            process.terminate()


def _once_whole(name: str, process: subprocess.Popen[str], port: int, whole: bytes, started: float) -> Page:
    page = Page(name, process.pid, port, 0.0)
    until = time.monotonic() + _START_SECONDS * 4
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError):
            if whole in page.get():
                page.start_seconds = time.perf_counter() - started
                return page
        time.sleep(0.005)
    raise RuntimeError(f"{name} serves no whole page (status {process.poll()})")


def ours(cards: Cards, port: int, reuse_seconds: float | None) -> Command:
    """The daemon over a scene; ``reuse_seconds`` None is the default."""
    file = cards.settings(reuse_seconds)
    flags = [f"--config.file={file}", f"--web.listen-address=127.0.0.1:{port}", f"--path.sysfs={cards.sysfs}"]
    last = f'gpu_temperature_celsius{{fleet="fleet-{cards.scene.fleets - 1}"'.encode()
    return Command(["-m", "exporter", "serve", *flags], cards.fake.environment(), last)


def bare(like: Page, port: int) -> Command:
    """The bare page with the series of another page: every name, help text, label and value."""
    given = []
    for family in text_string_to_metric_families(like.get().decode()):
        for name in dict.fromkeys(sample.name for sample in family.samples):
            labels = sorted({label for sample in family.samples for label in sample.labels})
            rows = [([sample.labels.get(label, "") for label in labels], sample.value) for sample in family.samples]
            given.append((name, family.documentation, labels, rows))
    return Command(["-c", _BARE_PROGRAM, str(port)], {}, b"process_start_time_seconds", json.dumps(given))


def nvitop(cards: Cards, port: int) -> Command:
    """nvitop-exporter as it comes, which reads the cards once a second whether anybody asks or not."""
    flags = ["--port", str(port), "--bind-address", "127.0.0.1"]
    return Command(["-m", "nvitop_exporter", *flags], cards.fake.environment(), b"gpu_utilization")


@contextlib.contextmanager
def beside(cards: Cards) -> Iterator[list[Page]]:
    """The bare page, ours, and where it can show the same nvitop-exporter's, of one scene."""
    with contextlib.ExitStack() as stack:

        def serve(name: str, command: Callable[[int], Command]) -> Page:
            port = free_port()
            return stack.enter_context(serving(name, command(port), port))

        anew = serve(ANEW, lambda port: ours(cards, port, 0))
        pages = [serve(BARE, lambda port: bare(anew, port)), anew]
        if pages[0].samples() != anew.samples():
            raise RuntimeError(f"the pages differ: {[page.samples() for page in pages]} samples")
        if cards.scene.fleets == 1 and not cards.scene.instances:
            pages.append(serve(NVITOP, lambda port: nvitop(cards, port)))
        yield pages
