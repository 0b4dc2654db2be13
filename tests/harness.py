"""Starts the real programs: the daemon on the fake library, and a Prometheus beside it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest
from prometheus_client.parser import text_string_to_metric_families

from exporter.catalog import READINGS
from exporter.catalog.own_labels import is_known
from exporter.masks import RUNTIMES

PROGRAM = (sys.executable, "-m", "exporter")
METRICS = {family.name: metric for metric, family in READINGS.items()}
MASK_VARIABLES = frozenset(variable for runtime in RUNTIMES.values() for variable in runtime.variables)


class Response(NamedTuple):
    """An answer over HTTP and how long it took."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float


class Sample(NamedTuple):
    """One line of a page."""

    labels: Mapping[str, str]
    value: float


class Scrape(NamedTuple):
    """A parsed page: samples by name."""

    samples: Mapping[str, list[Sample]]
    seconds: float

    def of(self, name: str, **labels: str) -> list[Sample]:
        """The samples of a name that carry these labels."""
        found = self.samples.get(name, [])
        return [sample for sample in found if all(sample.labels.get(key) == value for key, value in labels.items())]

    def value(self, name: str, **labels: str) -> float:
        """The one sample's value; fails when there is none, or more than one."""
        found = self.of(name, **labels)
        assert len(found) == 1, f"{name}{labels}: {found}"
        return found[0].value

    def state(self, **labels: str) -> str:
        """The state that holds for the one device with these labels."""
        held = [
            sample.labels["state"] for sample in self.of("gpu_exporter_device_state", **labels) if sample.value == 1
        ]
        assert len(held) == 1, held
        return held[0]


def parse(text: str, seconds: float = 0.0) -> Scrape:
    """The page's samples; fails when a series comes twice, or has a label that its family is not known to have."""
    samples: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            seen = samples.setdefault(sample.name, [])
            assert all(sample.labels != other.labels for other in seen), f"{sample.name}{sample.labels} comes twice"
            seen.append(Sample(sample.labels, sample.value))
            unknown = _unknown_labels(sample.name, sample.labels)
            assert not unknown, f"{sample.name}: not in exporter/catalog/own_labels.py: {unknown}"
    return Scrape(samples, seconds)


def _unknown_labels(name: str, labels: Mapping[str, str]) -> dict[str, str]:
    """Of a reading's own labels those with a value that the catalog does not list; one that is empty is left out."""
    metric = METRICS.get(name)
    own = READINGS[metric].own if metric is not None else ()
    told = {label: labels[label] for label in own if label in labels}
    return {label: value for label, value in told.items() if not is_known(str(metric), label, value)}


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without any mask, with ``extra`` laid over it."""
    kept = {name: value for name, value in os.environ.items() if name not in MASK_VARIABLES}
    return {**kept, **extra}


def run(*arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A command of the program, to its end."""
    return subprocess.run(
        [*PROGRAM, *arguments],
        env=clean_environment(environment or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


class Daemon:
    """The daemon as a process of its own, listening on a port that the system chose."""

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str],
        config: str | None,
        flags: Sequence[str],
        within: Callable[[Sequence[str]], Sequence[str]] = list,
    ) -> None:
        """``within`` puts what the daemon is to be started in before its command."""
        self.config_path = directory / "config.yaml"
        self.log_path = directory / "daemon.log"
        arguments = ["--web.listen-address=127.0.0.1:0", *flags]
        if config is not None:
            self.config_path.write_text(config, encoding="utf-8")
            arguments.append(f"--config.file={self.config_path}")
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                within([*PROGRAM, *arguments]), env=clean_environment(environment), stdout=log, stderr=log
            )
        self.port = int(self.wait_for_log(r"msg=listening address=127\.0\.0\.1:(\d+)")[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)

    @property
    def log(self) -> str:
        """What the daemon has logged."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def wait_for_log(self, pattern: str, within: float = 10.0) -> re.Match[str]:
        """The first match in the log; fails when it does not come, or the daemon ends before it."""
        until = time.monotonic() + within
        while True:
            ended = self.process.poll() is not None
            match = re.search(pattern, self.log)
            if match:
                return match
            assert not ended, f"the daemon ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < until, f"no {pattern!r} in the log:\n{self.log}"
            time.sleep(0.01)

    def request(self, path: str, method: str = "GET", headers: Mapping[str, str] | None = None) -> Response:
        """One request over a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        started = time.monotonic()
        try:
            connection.request(method, path, headers=dict(headers or {}))
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        names = {name.lower(): value for name, value in answer.getheaders()}
        return Response(answer.status, names, body, time.monotonic() - started)

    def scrape(self, timeout: float | None = None) -> Scrape:
        """A page, asked for as Prometheus does with this scrape timeout."""
        headers = {} if timeout is None else {"X-Prometheus-Scrape-Timeout-Seconds": str(timeout)}
        answer = self.request("/metrics", headers=headers)
        assert answer.status == 200
        return parse(answer.body.decode(), answer.seconds)

    def scrape_until(self, holds: Callable[[Scrape], bool], within: float = 20.0, timeout: float = 5.0) -> Scrape:
        """Scrape until a page is as wanted; fails with the last page otherwise."""
        until = time.monotonic() + within
        while True:
            scrape = self.scrape(timeout)
            if holds(scrape):
                return scrape
            assert time.monotonic() < until, f"never so: {scrape.samples}\n{self.log}"
            time.sleep(0.1)

    def workers(self, vendor: str = "") -> list[int]:
        """Process ids of the daemon's children, or of those that read a vendor's cards, which each have one."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split() if not vendor or vendor in _arguments(pid)]

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, float]:
        """Signal the daemon; its exit status and the seconds that it took."""
        started = time.monotonic()
        self.process.send_signal(number)
        return self.process.wait(15), time.monotonic() - started


class Target(NamedTuple):
    """What a Prometheus scrapes, under which job and instance."""

    address: str
    job: str = "gpu"
    instance: str = ""


class Prometheus:
    """A real Prometheus that scrapes its targets every second or as told, and evaluates rules as often."""

    def __init__(
        self,
        program: str,
        directory: Path,
        *targets: Target,
        rules: Sequence[Path] = (),
        interval: str = "1s",
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """``more`` stands in the configuration of each job."""
        jobs: dict[str, list[dict[str, Any]]] = {}
        for target in targets:
            labels = {"instance": target.instance} if target.instance else {}
            jobs.setdefault(target.job, []).append({"targets": [target.address], "labels": labels})
        config = {
            "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
            "rule_files": [str(path) for path in rules],
            "scrape_configs": [
                {"job_name": job, "static_configs": statics, **(more or {})} for job, statics in jobs.items()
            ],
        }
        path = directory / "prometheus.json"
        path.write_text(json.dumps(config), encoding="utf-8")
        self.port = free_port()
        self.log_path = directory / "prometheus.log"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    program,
                    f"--config.file={path}",
                    f"--storage.tsdb.path={directory / 'tsdb'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(10)

    def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer of the API; fails where it is an error, which names the parameters."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", f"/api/v1/{path}?" + urllib.parse.urlencode(parameters))
            answer = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        assert answer["status"] == "success", (answer, parameters)
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result of an instant query; empty while Prometheus is not up yet."""
        try:
            result: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        except (OSError, ValueError):
            return []
        return result

    def wait_for(self, expression: str, within: float = 30.0) -> list[dict[str, Any]]:
        """The first result that is not empty."""
        until = time.monotonic() + within
        while not (result := self.query(expression)):
            assert time.monotonic() < until, f"{expression} stays empty:\n{self.log_path.read_text()[-3000:]}"
            time.sleep(0.2)
        return result


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listened on a moment ago."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def tool(name: str, package: str = "prometheus") -> str:
    """The path of a program that tests need; where it is missing they are skipped loudly, and fail when ``CI=true``.

    ``package`` is Debian's package that has it.
    """
    import shutil

    path = shutil.which(name)
    if path is None:
        reason = f"{name} is not installed (Debian: apt-get install {package})"
        assert os.environ.get("CI") != "true", reason
        pytest.skip(reason)
    return path


def _arguments(pid: str) -> list[str]:
    """A process's command line; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
    except OSError:
        return []


Start = Callable[..., Daemon]
Starter = Iterator[Start]
