"""What a scrape costs beside a bare ``prometheus_client`` page: ``python -m tests.bench [--output FILE]``.

Everything is measured in one run, in turns, so that whatever else the machine does hits all alike; a speed counts only
as the ratio to the bare page of the same run. The bare page has the same series with the same labels as ours, as
constant gauges, behind ``prometheus_client``'s own server. Ours reads eight pretend cards (:mod:`tests.fakes.nvml`)
whose values move, on a pretend PCI bus as long as a GPU server's: anew for every scrape, or with the default reuse.

Exit status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import http.client
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from exporter.supervisor import Supervisor
from exporter.units import pci_bus_id
from tests import bench_masks, bench_processes
from tests.fakes import sysfs as trees
from tests.fakes.nvml import FakeNvml, build, equal_cards

MOST_RATIO = 2.0
MOST_PARENT_MIB, MOST_WORKER_MIB = 40.0, 25.0

CARDS = 8
BUS_DEVICES = 300  # PCI functions of the pretend host, its cards among them
PROCESSES, OPEN_FILES = 600, 30  # of the pretend host whose Intel cards' clients are counted
BLOCK = 25  # scrapes of one page, before it is the next one's turn
WARM_UP = 50  # scrapes of each page that do not count
_SETTLE_SECONDS = 0.02  # what a server still does after its answer, such as closing the connection, counts too
_ACCEPT = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"

# A whole exporter as people write it: its own program, so that nothing of ours is in its memory.
_BARE = """
import json, sys
from prometheus_client import CollectorRegistry, Gauge, start_http_server

registry = CollectorRegistry()
for name, text, labels, rows in json.load(sys.stdin):
    gauge = Gauge(name, text, labels, registry=registry)
    for values, value in rows:
        (gauge.labels(*values) if labels else gauge).set(value)
server, thread = start_http_server(0, "127.0.0.1", registry)
print(f"url=http://127.0.0.1:{server.server_port}/", file=sys.stderr, flush=True)
thread.join()
"""


class Client(NamedTuple):
    """A way to ask for a page."""

    name: str
    keep_alive: bool
    headers: dict[str, str]


CLIENTS = (
    Client("a new connection each", keep_alive=False, headers={}),
    Client("one connection kept open", keep_alive=True, headers={}),
    Client("kept open, headers of Prometheus", True, {"Accept": _ACCEPT, "Accept-Encoding": "gzip"}),
)


def _quantile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


@dataclass
class Cost:
    """What the scrapes of one page by one client cost: the latency of each, and the CPU time of all together."""

    milliseconds: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0

    def latency(self, percent: int) -> float:
        """Milliseconds; 50 is the median."""
        return _quantile(self.milliseconds, percent)

    def cpu(self) -> float:
        """Milliseconds of user and system time a scrape, of the server and its worker."""
        return 1000 * self.cpu_seconds / len(self.milliseconds)


class Page:
    """A running server with a page, and what its scrapes have cost so far, by client."""

    def __init__(self, name: str, pid: int, port: int) -> None:
        self.name, self._pid, self._port = name, pid, port
        self.costs: defaultdict[str, Cost] = defaultdict(Cost)
        self._kept: dict[str, http.client.HTTPConnection] = {}

    def pids(self) -> list[int]:
        """The server's process, then its workers'."""
        children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text(encoding="ascii")
        return [self._pid, *map(int, children.split())]

    def get(self, client: Client) -> bytes:
        """The body of one scrape; raises ``RuntimeError`` unless the answer is 200."""
        connection = self._kept.get(client.name) or http.client.HTTPConnection("127.0.0.1", self._port, timeout=10)
        connection.request("GET", "/metrics", headers=client.headers)
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
        before = self._cpu_seconds()
        for _ in range(count):
            before_each()
            started = time.perf_counter()
            self.get(client)
            cost.milliseconds.append(1000 * (time.perf_counter() - started))
        time.sleep(_SETTLE_SECONDS)
        cost.cpu_seconds += self._cpu_seconds() - before

    def samples(self) -> int:
        """Sample lines on the page."""
        return sum(not line.startswith(b"#") for line in self.get(CLIENTS[0]).splitlines())

    def _cpu_seconds(self) -> float:
        """User and system time of the server and its workers so far, ended threads included.

        Read from each process's own CPU clock: it is what ``/proc/PID/stat`` rounds down to hundredths of a second.
        The number is that of ``clock_getcpuclockid``, which Python does not have.
        """
        return sum(time.clock_gettime((~pid << 3) | 2) for pid in self.pids())


@contextlib.contextmanager
def _serving(name: str, arguments: Sequence[str], environment: dict[str, str], given: str = "") -> Iterator[Page]:
    """A server that has said its URL on standard error; ``given`` is what it reads from standard input."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:  # waits for its end
        try:
            if process.stdin:
                process.stdin.write(given)
                process.stdin.close()
            yield Page(name, process.pid, _port_of(process))
        finally:
            process.terminate()


def _port_of(process: subprocess.Popen[str]) -> int:
    seen = ""
    for line in process.stderr or ():
        seen += line
        if match := re.search(r"url=http://127\.0\.0\.1:([0-9]+)/", line):
            return int(match[1])
    raise RuntimeError(f"the server ended before it listened:\n{seen}")


class Cards:
    """The pretend cards."""

    def __init__(self, folder: Path) -> None:
        self.fake = FakeNvml(build(folder))
        self._moves = 0
        self.move()

    def move(self) -> None:
        """Other values than before, as every reading of a real card gives."""
        moves = self._moves = self._moves + 1
        util, temp, free, used = moves % 101, 30 + moves % 50, (10 << 30) + moves, (30 << 30) - moves
        self.fake.write([replace(card, util=util, temp=temp, free=free, used=used) for card in equal_cards(CARDS)])


def _write_bus(sysfs: Path) -> None:
    """A sysfs with the PCI bus of a host that has the pretend cards, awake and bound to their driver."""
    devices, driver = sysfs / "bus/pci/devices", sysfs / "bus/pci/drivers/nvidia"
    cards = [pci_bus_id(card.pci or "") or "" for card in equal_cards(CARDS)]
    others = [f"0100:{index // 32:02x}:{index % 32:02x}.0" for index in range(BUS_DEVICES - CARDS)]
    rows = [(card, "0x10de", "0x030200") for card in cards] + [(other, "0x8086", "0x088000") for other in others]
    for address, vendor, kind in rows:
        (devices / address / "power").mkdir(parents=True)
        for name, value in {"vendor": vendor, "class": kind, "power/runtime_status": "active"}.items():
            (devices / address / name).write_text(f"{value}\n", encoding="ascii")
    driver.mkdir(parents=True)
    for card in cards:
        (driver / card).symlink_to(devices / card)
        (devices / card / "driver").symlink_to(driver)


def _ours(name: str, folder: Path, cards: Cards, reuse: float | None) -> contextlib.AbstractContextManager[Page]:
    """The daemon over one fleet that sees every pretend card; ``reuse`` None is the default."""
    environment = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(CARDS))), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    settings: dict[str, object] = {"fleets": [{"name": "bench", "runtime": "cuda", "env": environment}]}
    if reuse is not None:
        settings["sampling"] = {"reuse_seconds": reuse}
    file = folder / f"reuse-{reuse}.yaml"
    file.write_text(json.dumps(settings), encoding="utf-8")
    flags = [f"--config.file={file}", "--web.listen-address=127.0.0.1:0", f"--path.sysfs={folder / 'sys'}"]
    return _serving(name, ["-m", "exporter", "serve", *flags], cards.fake.environment())


def _bare(like: Page) -> contextlib.AbstractContextManager[Page]:
    """The bare page with the series of another page: every name, help text, label and value."""
    families: dict[str, tuple[str, list[str], list[tuple[list[str], float]]]] = {}
    for family in text_string_to_metric_families(like.get(CLIENTS[0]).decode()):
        for sample in family.samples:
            found = families.setdefault(sample.name, (family.documentation, sorted(sample.labels), []))
            found[2].append(([sample.labels[label] for label in found[1]], sample.value))
    given = json.dumps([(name, *found) for name, found in families.items()])
    return _serving("bare prometheus_client", ["-c", _BARE], {}, given)


class Row(NamedTuple):
    """``holds`` is None where there is no target."""

    cells: tuple[str, ...]
    holds: bool | None = None


class Table(NamedTuple):
    """A table whose last column says whether the target holds."""

    title: str
    heading: tuple[str, ...]
    rows: list[Row]

    def markdown(self) -> str:
        """The table in columns of equal width, so that it also reads well as plain text."""
        marks = {True: "yes", False: "**MISSED**", None: ""}
        lines = [(*self.heading, "target holds"), *((*row.cells, marks[row.holds]) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, tuple("-" * width for width in widths))
        padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
        return f"{self.title}\n\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in padded)


def _measure(pages: Sequence[Page], scrapes: int, cards: Cards) -> None:
    """So many scrapes of each page by each client, in blocks that take turns; the cards move before each."""
    for page in pages:
        for client in CLIENTS:
            page.scrape(client, WARM_UP, cards.move)
        page.costs.clear()
    for done in range(0, scrapes, BLOCK):
        for client in CLIENTS:
            for page in pages:
                page.scrape(client, min(BLOCK, scrapes - done), cards.move)


def _pages_table(pages: Sequence[Page], scrapes: int) -> Table:
    """Latency and CPU of each page by each client; the first page is the bare one."""
    bare = pages[0]
    rows = []
    for client in CLIENTS:
        base = bare.costs[client.name]
        for page in pages:
            cost = page.costs[client.name]
            ratios = cost.latency(50) / base.latency(50), cost.cpu() / base.cpu()
            numbers = (f"{value:.2f}" for value in (cost.latency(50), cost.latency(95), cost.cpu(), *ratios))
            holds = None if page is bare else max(ratios) <= MOST_RATIO
            rows.append(Row((client.name, page.name, str(page.samples()), *numbers), holds))
    title = f"{scrapes} scrapes of each page by each client. Target: both ratios to the bare page at most {MOST_RATIO}."
    return Table(title, ("client", "page", "samples", "p50 ms", "p95 ms", "CPU ms", "p50 ratio", "CPU ratio"), rows)


def _memory_table(pages: Sequence[Page]) -> Table:
    rows = []
    for page in pages:
        parent, *workers = page.pids()
        is_ours = page is not pages[0]
        rows.append(_memory_row(f"{page.name}: {'parent' if is_ours else 'process'}", parent, MOST_PARENT_MIB, is_ours))
        rows += [_memory_row(f"{page.name}: worker", pid, MOST_WORKER_MIB, is_ours) for pid in workers]
    title = f"Memory after the scrapes. Target: parent below {MOST_PARENT_MIB} MiB, worker below {MOST_WORKER_MIB} MiB."
    return Table(title, ("process", "Rss MiB", "Pss MiB"), rows)


def _memory_row(name: str, pid: int, most_mib: float, judged: bool) -> Row:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    sizes = {key: int(kib) / 1024 for key, kib in re.findall(r"^(Rss|Pss): +([0-9]+) kB", text, re.MULTILINE)}
    return Row((name, f"{sizes['Rss']:.1f}", f"{sizes['Pss']:.1f}"), sizes["Rss"] < most_mib if judged else None)


def _mask_rows() -> Iterator[Row]:
    for name, took in bench_masks.timings():
        yield _timing_row(f"{name}, {bench_masks.DEVICES} cards", took)


async def _cycle_row(cycles: int, vendor: str, sysfs: Path, procfs: Path) -> Row:
    """Asks of a worker, by this process, whose environment names the pretend NVML; the others read trees of files."""
    supervisor = Supervisor(vendor, (f"--path.sysfs={sysfs}", f"--path.procfs={procfs}"))
    took = []
    try:
        for _ in range(WARM_UP + cycles):
            started = time.perf_counter()
            outcome = await supervisor.ask(20.0)
            took.append(time.perf_counter() - started)
            if outcome.sample is None or len(outcome.sample.devices) != CARDS:
                raise RuntimeError(f"the worker's answer is {outcome.fault or outcome.sample}")
    finally:
        await supervisor.stop()
    what = f"{vendor} worker's cycle, {CARDS} cards"
    return _timing_row(what if vendor != "intel" else f"{what}, {PROCESSES} processes", took[WARM_UP:])


def _write_trees(root: Path) -> trees.FakeSys:
    """A host with as many cards of AMD and of Intel, and processes with open files, one of which uses a card."""
    fake = trees.FakeSys(root)
    amd = (
        trees.AmdCard(pci=f"0000:{0x40 + place:02x}:00.0", minor=place, kfd_nodes=(trees.KfdNode(node=2 + place),))
        for place in range(CARDS)
    )
    intel = [trees.IntelCard(pci=f"0000:{0x80 + place:02x}:00.0", minor=CARDS + place) for place in range(CARDS)]
    fake.write([*amd, *intel], [trees.Client(pid=100, pci=intel[0].pci, client_id=5, cycles={"ccs": (500, 1000)})])
    for pid in range(1000, 1000 + PROCESSES):
        files = fake.proc / str(pid) / "fd"
        files.mkdir(parents=True)
        for descriptor in range(OPEN_FILES):
            (files / str(descriptor)).symlink_to("socket:[4711]")
    return fake


def _process_rows(folder: Path) -> Iterator[Row]:
    """The median scan of processes that have been there for a while is the one that has a target."""
    for name, took in bench_processes.timings(folder):
        row = _timing_row(name, took)
        steady = name == f"scan of {bench_processes.CROWD} processes"
        yield Row(row.cells, _quantile(took, 50) < bench_processes.MOST_SCAN_SECONDS) if steady else row


def _timing_row(name: str, took: Sequence[float]) -> Row:
    return Row((name, *(f"{1e6 * _quantile(took, percent):,.0f}" for percent in (50, 95))))


def _tables(scrapes: int) -> Iterator[Table]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cards = Cards(folder / "nvml")
        _write_bus(folder / "sys")
        anew = stack.enter_context(_ours("ours, cards read anew", folder, cards, 0))
        reused = stack.enter_context(_ours("ours, default reuse", folder, cards, None))
        bare = stack.enter_context(_bare(like=anew))
        pages = (bare, reused, anew)
        if len({page.samples() for page in pages}) != 1:
            raise RuntimeError(f"the pages differ: {[(page.name, page.samples()) for page in pages]} samples")
        _measure(pages, scrapes, cards)
        yield _pages_table(pages, scrapes)
        yield _memory_table(pages)
        os.environ.update(cards.fake.environment())
        host = _write_trees(folder / "trees")
        places = {"nvidia": (folder / "sys", Path("/proc")), **dict.fromkeys(("amd", "intel"), (host.sys, host.proc))}
        cycles = [asyncio.run(_cycle_row(scrapes, vendor, *where)) for vendor, where in places.items()]
        rows = [*_mask_rows(), *cycles, *_process_rows(folder)]
        yield Table("Parts.", ("what", "p50 us", "p95 us"), rows)


def _conditions() -> str:
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    name = cpu[1] if cpu else platform.machine()
    return (
        f"Measured {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC by `python -m tests.bench` on {name}, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}, prometheus_client {version('prometheus_client')}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tests.bench", description="What a scrape costs beside a bare page.")
    parser.add_argument("--scrapes", type=int, default=300, help="of each page by each client (300)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the tables there too, as Markdown")
    options = parser.parse_args(arguments)
    if options.scrapes < 2:
        parser.error("--scrapes: expected at least 2")
    tables = list(_tables(options.scrapes))
    print(text := "\n".join([f"{_conditions()}\n", *(table.markdown() for table in tables)]))
    if options.output:
        options.output.write_text(f"# Benchmark\n\n{text}", encoding="utf-8")
    return int(any(row.holds is False for table in tables for row in table.rows))


if __name__ == "__main__":
    sys.exit(main())
