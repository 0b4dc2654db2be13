"""A simulated cluster under a real Prometheus: ``python -m tests.cluster [--hosts 250 500] [--minutes 4]``.

One process serves the pages of all hosts, each made by the exporter's own code from simulated cards: settings, masks,
binding, attribution, collectors and text are the real ones; no worker and no driver is asked. A Prometheus with the
rules of this repository scrapes them, and itself, over 127.0.0.1. Everything that is printed is measured; with several
numbers of hosts there is a column for :data:`FAR` hosts too, on the straight line through what was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from exporter import config, fleets
from exporter.attribution import attribute
from exporter.binding import Bound, Known, bind
from exporter.collectors import ReloadStatus
from exporter.masks import RUNTIMES
from exporter.model import Device, DeviceKey, DeviceState, Fault, Reading, State, VendorOutcome, VendorSample
from exporter.sampler import FaultCounts, status_of
from exporter.web.exposition import Exposition, Page
from exporter.web.server import listen
from tests.harness import Prometheus, free_port, tool

ROOT = Path(__file__).parent.parent
VENDOR, FAR = "simulated", 10_000
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Every so many hosts have cards of two models and a fleet whose mask is therefore refused; a lost, or a hung, card.
UNEQUAL_EVERY, LOST_EVERY, HUNG_EVERY, LEAST_CARDS = 10, 25, 40, 4
_FAULTS: dict[State, str] = {"lost": "device-lost", "hung": "hung"}
_MODELS = (("Simulated L40S", 48 * 2**30), ("Simulated RTX 6000", 96 * 2**30))
_ONCE = "max by (instance, pci_bus_id, gpu_partition)"
# What a dashboard asks: over the raw series, and over the recorded ones.
QUERIES = (
    ("utilization", f"avg({_ONCE} (gpu_utilization_percent))", "cluster:gpu_utilization_percent:avg"),
    ("memory in use", f"sum({_ONCE} (gpu_memory_used_bytes))", "cluster:gpu_memory_used_bytes:sum"),
    ("by fleet", "avg by (fleet) (gpu_utilization_percent)", "cluster_fleet:gpu_utilization_percent:avg"),
)


def name_of(number: int) -> str:
    """The host's name, which is its ``instance``; hosts count from 1."""
    return f"host-{number:05d}"


def uuid_of(host: str, card: int) -> str:
    """The card's UUID, which no other card of the cluster has."""
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{card}.{host}.invalid')}"


def settings_of(host: str, unequal: bool) -> str:
    """The host's settings: all cards, two masked fleets that share card 3, and one that unequal cards have refused."""
    shared = f"{uuid_of(host, 0)},{uuid_of(host, 3)}"
    refused = '  - {name: rerank, runtime: cuda, env: {CUDA_VISIBLE_DEVICES: "0"}}\n' if unequal else ""
    return f"""\
backends: [{VENDOR}]
fleets:
  - {{name: host, runtime: host}}
  - {{name: chat, runtime: cuda, env: {{CUDA_VISIBLE_DEVICES: "2,3", CUDA_DEVICE_ORDER: PCI_BUS_ID}}}}
  - {{name: embed, runtime: cuda, env: {{CUDA_VISIBLE_DEVICES: "{shared}"}}}}
{refused}"""


class Card:
    """A device with a state, and a level and a phase of its own that its host's name and its index give."""

    def __init__(self, host: str, index: int, model: tuple[str, int], state: State) -> None:
        chance = random.Random(f"{host}/{index}")
        self._level, self._phase = chance.uniform(0.2, 0.8), chance.uniform(0.0, math.tau)
        self.key, self.state, self.fault = DeviceKey(VENDOR, uuid_of(host, index)), state, _FAULTS.get(state)
        self.device = Device(
            key=self.key,
            physical_index=index,
            pci_bus_id=f"{index // 8:04x}:{0x11 + 0x20 * (index % 8):02x}:00.0",
            uuid=self.key.identity,
            name=model[0],
            memory_total_bytes=model[1],
            temperature_sensor="gpu",
        )

    def readings(self, now: float) -> Iterator[Reading]:
        """The values at a Unix time, on a sine of two minutes around the level; none of a card that is not ok."""
        if self.fault:
            return
        share = self._level + 0.15 * math.sin(self._phase + now / 120 * math.tau)
        total = self.device.memory_total_bytes or 0
        used = int(total * share)
        memory = {"memory_free": total - used, "memory_used": used, "memory_total": total}
        others = {"utilization": float(round(100 * share)), "temperature": float(round(35 + 45 * share))}
        yield from (Reading(metric, self.key, value) for metric, value in (memory | others).items())


class Host:
    """One host's exporter, without its worker: a cycle happens in :meth:`page`."""

    def __init__(self, number: int, cards: int) -> None:
        self.name, unequal = name_of(number), number % UNEQUAL_EVERY == 0
        states: list[State] = ["ok"] * cards
        if number % LOST_EVERY == 3:
            states[1] = "lost"
        if number % HUNG_EVERY == 7:
            states[-1] = "hung"
        models = (_MODELS[unequal and index % 2] for index in range(cards))
        self.cards = [Card(self.name, *each) for each in zip(range(cards), models, states, strict=True)]
        settings = config.parse(settings_of(self.name, unequal), "", runtimes=RUNTIMES, backends=[VENDOR])
        self._known = Known(settings.mapping.accept)
        self._fleets = fleets.from_settings(settings, {}, (VENDOR,))
        self._reload = ReloadStatus(True, time.time())
        self._bound, self._counts, self._exposition = Bound(), FaultCounts(), Exposition()

    def page(self, accept: str, encodings: str) -> Page:
        """A page of values of now."""
        outcome = self._outcome(time.time())
        self._counts.add(outcome)
        # As exporter.sampler.Sampler puts a cycle together.
        mappings, self._bound, _ = bind(self._fleets, [outcome], self._bound, self._known)
        snapshot = attribute([outcome], mappings, (status_of(outcome, self._counts, {}),))
        return self._exposition.page(snapshot, self._reload, accept, encodings)

    def _outcome(self, now: float) -> VendorOutcome:
        started = time.perf_counter()
        sample = VendorSample(
            vendor=VENDOR,
            driver_version=VENDOR,
            whole=True,
            devices=tuple(card.device for card in self.cards),
            states=tuple(DeviceState(card.key, card.state) for card in self.cards),
            readings=tuple(reading for card in self.cards for reading in card.readings(now)),
            faults=tuple(Fault(card.fault, VENDOR, card.key) for card in self.cards if card.fault),
        )
        return VendorOutcome(vendor=VENDOR, sample=sample, duration_seconds=time.perf_counter() - started)


def serve(hosts: int, cards: int) -> None:
    """Serve every host's page on a port that the system chose and that is printed, until SIGTERM."""
    known = {host.name: host for host in (Host(number, cards) for number in range(1, hosts + 1))}

    async def metrics(request: Request) -> Response:
        host = known[request.path_params["host"]]
        page = host.page(request.headers.get("accept", ""), request.headers.get("accept-encoding", ""))
        zipped = {"content-encoding": "gzip"} if page.gzipped else {}
        return Response(page.body, headers={"content-type": page.content_type} | zipped)

    app = Starlette(routes=[Route("/{host}/metrics", metrics)])
    bound = listen("127.0.0.1:0")
    print(bound[0].getsockname()[1], flush=True)
    # Not the exporter's own server: Prometheus keeps more connections open to this one address than that allows.
    settings = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", http="h11")
    asyncio.run(uvicorn.Server(settings).serve(sockets=bound))


class Simulator:
    """The process that serves the pages."""

    def __init__(self, hosts: int, cards: int) -> None:
        command = [sys.executable, "-m", "tests.cluster", "--serve", f"--hosts={hosts}", f"--cards={cards}"]
        # A session of its own: Control-C reaches the measuring process alone, which ends the others.
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
        if not self.process.stdout or not (said := self.process.stdout.readline()):
            raise RuntimeError("the simulator ended before it listened")
        self.port = int(said)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def get(self, host: str) -> bytes:
        """A host's page as plain text."""
        return _ask(self.port, f"/{host}/metrics")


class Engine(Prometheus):
    """The real Prometheus, over the targets of a file and itself, with the rules of this repository."""

    def __init__(self, targets: Path, seconds: int) -> None:
        folder, self.port = targets.parent, free_port()
        self.log_path, self.data, address = folder / "prometheus.log", folder / "tsdb", f"127.0.0.1:{self.port}"
        path = folder / "prometheus.json"
        path.write_text(json.dumps(_engine_settings(targets, address, seconds)), encoding="utf-8")
        flags = [f"--config.file={path}", f"--storage.tsdb.path={self.data}", f"--web.listen-address={address}"]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [tool("prometheus"), *flags, "--web.enable-admin-api"], stdout=log, stderr=log, start_new_session=True
            )

    def call(self, path: str, method: str = "GET", **parameters: str) -> Any:
        """The data of an answer of its API."""
        return json.loads(_ask(self.port, f"/api/v1/{path}?{urllib.parse.urlencode(parameters)}", method))["data"]


def _engine_settings(targets: Path, address: str, seconds: int) -> dict[str, object]:
    every = {"scrape_interval": f"{seconds}s", "evaluation_interval": f"{seconds}s"}
    gpu = {"job_name": "gpu", "file_sd_configs": [{"files": [str(targets)]}]}
    return {
        "global": every | {"scrape_timeout": f"{min(seconds, 10)}s", "external_labels": {"cluster": "simulated"}},
        "rule_files": [str(ROOT / "prometheus/rules/*.yaml")],
        "scrape_configs": [gpu, {"job_name": "prometheus", "static_configs": [{"targets": [address]}]}],
    }


class Cluster(NamedTuple):
    """The simulator, and the Prometheus that scrapes it every so many seconds."""

    simulator: Simulator
    engine: Engine
    hosts: int
    seconds: int


@contextlib.contextmanager
def running(hosts: int, cards: int, seconds: int) -> Iterator[Cluster]:
    """A cluster of which every host has been scraped once, for as long as it is entered."""
    labels = [{"__metrics_path__": f"/{name_of(n)}/metrics", "instance": name_of(n)} for n in range(1, hosts + 1)]
    with tempfile.TemporaryDirectory() as folder, Simulator(hosts, cards) as simulator:
        targets = [{"targets": [f"127.0.0.1:{simulator.port}"], "labels": each} for each in labels]
        path = Path(folder, "targets.json")
        path.write_text(json.dumps(targets), encoding="utf-8")
        with Engine(path, seconds) as engine:
            engine.wait_for(f'count(up{{job="gpu"}} == 1) == {hosts}', 30.0 + 3 * seconds)
            yield Cluster(simulator, engine, hosts, seconds)


def _ask(port: int, path: str, method: str = "GET") -> bytes:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{path}: {answer.status} {body[:300]!r}")
    return body


# What is measured, and how; W is the time measured. The process_* families of every page are the simulator's.
FIGURES = {
    "cards": "count(gpu_info)",
    "series in the head": "prometheus_tsdb_head_series",
    "samples a second": "sum(rate(prometheus_tsdb_head_samples_appended_total[W]))",
    "Prometheus: CPU seconds a second": 'rate(process_cpu_seconds_total{job="prometheus"}[W])',
    "Prometheus: memory, most, MiB": 'max_over_time(process_resident_memory_bytes{job="prometheus"}[W]) / 2^20',
    "simulator: CPU seconds a second": 'rate(process_cpu_seconds_total{instance="host-00001"}[W])',
    "rules, mean ms:": "1000 * avg_over_time(prometheus_rule_group_last_duration_seconds[W])",
    "rules, longest ms:": "1000 * max_over_time(prometheus_rule_group_last_duration_seconds[W])",
}
# What does not grow with the number of hosts.
STEADY = {
    "series a host, mean": 'avg(scrape_samples_scraped{job="gpu"})',
    "series a host, most": 'max(scrape_samples_scraped{job="gpu"})',
    "scrapes that succeeded, %": '100 * avg(avg_over_time(up{job="gpu"}[W]))',
    "rules: evaluations missed": "sum(prometheus_rule_group_iterations_missed_total)",
}
_GROWS = {"hosts", *FIGURES, "query of raw series, ms"}
Figures = dict[tuple[str, str], float]
"""What was measured, by the name of a figure and, of those with a row for each group of rules, the group's."""


def measure(cluster: Cluster, minutes: float) -> Figures:
    """What the next minutes show."""
    time.sleep(60 * minutes)
    window = f"[{60 * minutes:.0f}s]"
    found: Figures = {("hosts", ""): cluster.hosts}
    for name, expression in (FIGURES | STEADY).items():
        for row in cluster.engine.query(expression.replace("[W]", window)):
            found[name, row["metric"].get("rule_group", "").rpartition(";")[2]] = float(row["value"][1])
    return found | _of_scrapes(cluster, window) | _of_disk(cluster) | _of_queries(cluster, minutes)


def _of_scrapes(cluster: Cluster, window: str) -> Figures:
    rows = cluster.engine.query(f'scrape_duration_seconds{{job="gpu"}}{window}')
    took = statistics.quantiles([1000 * float(value) for row in rows for _, value in row["values"]], n=100)
    return {("scrape duration, ms", f"p{percent}"): took[percent - 1] for percent in (50, 99)}


def _of_disk(cluster: Cluster) -> Figures:
    """The log so far; and a block of all there is, as one comes every two hours, made now for its size."""
    appended = cluster.engine.query("sum(prometheus_tsdb_head_samples_appended_total)")[0]["value"][1]
    name = cluster.engine.call("admin/tsdb/snapshot", "POST")["name"]
    block = next((cluster.engine.data / "snapshots" / name).glob("*/meta.json")).parent
    stats = json.loads((block / "meta.json").read_text(encoding="utf-8"))["stats"]
    return {
        ("disk: write-ahead log, bytes a sample", ""): _bytes(cluster.engine.data / "wal") / float(appended),
        ("disk: chunks of a block, bytes a sample", ""): _bytes(block / "chunks") / stats["numSamples"],
        ("disk: index of a block, bytes a series", ""): (block / "index").stat().st_size / stats["numSeries"],
    }


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*"))


def _of_queries(cluster: Cluster, minutes: float) -> Figures:
    """The median time of each range query; nothing where the answer is empty, as it is without the rules."""
    now, found = time.time(), Figures()
    span = {"start": f"{now - 60 * minutes:.0f}", "end": f"{now:.0f}", "step": str(cluster.seconds)}
    for name, *expressions in QUERIES:
        for kind, expression in zip(("raw", "recorded"), expressions, strict=True):
            took = []
            for _ in range(7):
                started = time.perf_counter()
                answer = cluster.engine.call("query_range", query=expression, **span)
                took.append(1000 * (time.perf_counter() - started))
            if answer["result"]:
                found[f"query of {kind} series, ms", name] = statistics.median(took)
    return found


def table(runs: Sequence[Figures]) -> str:
    """The runs side by side in Markdown, and, with several, what lies at :data:`FAR` hosts on the line through them."""
    keys = dict.fromkeys(key for run in runs for key in run)
    rows = [(" ".join(key).strip(), *map(_number, [*(run.get(key) for run in runs), _far(runs, key)])) for key in keys]
    heading = ("measured", *(f"{run['hosts', '']:,.0f} hosts" for run in runs), f"{FAR:,} hosts, extrapolated")
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heading, ["---"] * len(heading), *rows))


def _far(runs: Sequence[Figures], key: tuple[str, str]) -> float | None:
    """On the straight line through the runs, of what grows so and was measured at two numbers of hosts or more."""
    known = {run["hosts", ""]: run[key] for run in runs if key in run}
    if len(known) < 2 or key[0] not in _GROWS:
        return None
    slope, intercept = statistics.linear_regression(list(known), list(known.values()))
    return slope * FAR + intercept if slope > 0 else None


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"


def _conditions(options: argparse.Namespace) -> str:
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return (
        f"Measured {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC by `python -m tests.cluster "
        f"--hosts {' '.join(map(str, options.hosts))} --cards {options.cards} --minutes {options.minutes:g} --interval "
        f"{options.interval}` on {cpu[1] if cpu else '?'}, {os.cpu_count()} cores, load {os.getloadavg()[1]:.1f}."
    )


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.cluster", description="A simulated cluster under a real Prometheus.")
    parser.add_argument("--hosts", type=int, nargs="+", default=[500], help="several are measured in turn (500)")
    parser.add_argument("--cards", type=int, default=8, help=f"of each host, at least {LEAST_CARDS} (8)")
    parser.add_argument("--minutes", type=float, default=4.0, help="of measuring, once every host was scraped (4)")
    parser.add_argument("--interval", type=int, default=15, help="seconds between scrapes, and evaluations (15)")
    parser.add_argument("--serve", action="store_true", help="serve the pages and do nothing else")
    options = parser.parse_args(arguments)
    if options.cards < LEAST_CARDS or min(options.hosts) < 1 or options.interval < 1:
        parser.error(f"expected at least one host, {LEAST_CARDS} cards and a second")
    return options


def _stop(*_: object) -> None:
    """What was started is ended on the way out, which a second Control-C would cut short."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(130)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = _options(arguments)
    if options.serve:
        serve(options.hosts[0], options.cards)
        return
    for number in SIGNALS:
        signal.signal(number, _stop)
    runs = []
    for hosts in options.hosts:
        with running(hosts, options.cards, options.interval) as cluster:
            runs.append(measure(cluster, options.minutes))
    print(f"{_conditions(options)}\n\n{table(runs)}", end="")


if __name__ == "__main__":
    main()
