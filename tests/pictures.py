"""Draws the dashboards from the live data of the demonstration: ``make pictures``, which takes six minutes.

The real daemon is scraped by a real Prometheus, whose answers Grafana's own components draw in Chromium.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.server
import json
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests import queries
from tests.harness import Daemon, Prometheus, Target, tool

SOURCE = queries.ROOT / "grafana" / "pictures"
DEMO = (queries.ROOT / "docs" / "demo.yaml").read_text(encoding="utf-8")
HUNG = 'gpu_exporter_device_state{state="hung"} == 1'
_WIDTH = 24 * 62


class Span(NamedTuple):
    """The dashboard's time, in Unix seconds, and the seconds between two points."""

    start: int
    to: int
    step: int


def modules(folder: Path) -> None:
    """Put Grafana's components into a folder beside the page's source. Needs npm and the npm registry."""
    shutil.copytree(SOURCE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("node_modules"))
    npm = [tool("npm", "npm"), "--prefix", str(folder)]
    subprocess.run([*npm, "install", "--ignore-scripts", "--legacy-peer-deps", "--no-audit", "--no-fund"], check=True)


def built(folder: Path) -> Path:
    """Check and build the page; the folder of what a browser loads."""
    npm = [tool("npm", "npm"), "--prefix", str(folder), "run", "--silent"]
    subprocess.run([*npm, "check"], check=True, cwd=folder)
    subprocess.run([*npm, "build"], check=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return folder / "dist"


def answers(prometheus: Prometheus, dashboard: Mapping[str, Any], span: Span) -> dict[str, Any]:
    """Prometheus's answer to each query of the panels, as Grafana would ask it."""
    found = {}
    for panel in queries.panels(dashboard):
        for target in panel["targets"]:
            expression = queries.substituted(
                target["expr"], rate_interval=f"{4 * span.step}s", span=f"{span.to - span.start}s"
            )
            if target.get("instant"):
                data = prometheus.ask("query", query=expression, time=str(span.to))
            else:
                data = prometheus.ask(
                    "query_range", query=expression, start=str(span.start), end=str(span.to), step=str(span.step)
                )
            found[f"{panel['id']}{target['refId']}"] = data["result"]
    return found


def given(prometheus: Prometheus, path: Path, span: Span) -> dict[str, Any]:
    """What the page draws of a dashboard."""
    dashboard = queries.board(path)
    names = [one["name"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    return {
        "dashboard": dashboard,
        "variables": dict.fromkeys(names, "All"),
        "span": {"from": span.start, "to": span.to, "step": span.step},
        "results": answers(prometheus, dashboard, span),
    }


def height(dashboard: Mapping[str, Any]) -> int:
    """The page's height in pixels, as the page lays out the panels."""
    bottom: int = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in dashboard["panels"])
    return 92 + 38 * bottom


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The folder under a loopback address, for as long as it is looked at."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing: a page's own requests are no news."""


def looked_at(url: str, tall: int, *flags: str) -> str:
    """What Chromium prints of a page of that height once it has settled."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            *(tool("chromium", "chromium"), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--hide-scrollbars", "--force-device-scale-factor=1", "--virtual-time-budget=10000"),
            *(f"--user-data-dir={profile}", f"--window-size={_WIDTH},{tall}", *flags, url),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout


def drawn(page: Path, shown: Mapping[str, Any], picture: Path) -> str:
    """Draws a dashboard into a PNG file; the page's text as a browser has it."""
    (page / "data.json").write_text(json.dumps(shown), encoding="utf-8")
    tall = height(shown["dashboard"])
    with served(page) as url:
        looked_at(url, tall, f"--screenshot={picture}")
        text = looked_at(url, tall, "--dump-dom")
    assert "FAILED" not in text, text[text.index("FAILED") :][:2000]
    return text


def _hung_twice(prometheus: Prometheus) -> None:
    """Waits until a card has hung a second time, so that a hang and its end are seen, and one that lasts."""
    prometheus.wait_for(HUNG, within=90)
    time.sleep(60)
    prometheus.wait_for(HUNG, within=240)
    time.sleep(15)


def main() -> None:
    """Draws all dashboards."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--folder", type=Path, default=queries.ROOT / "docs" / "pictures")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        modules(work / "page")
        page = built(work / "page")
        started = int(time.time())
        with (
            Daemon(work, {}, DEMO, ()) as daemon,
            Prometheus(
                tool("prometheus", "prometheus"),
                work,
                Target(f"127.0.0.1:{daemon.port}", "gpu-fleet-exporter", "gpu-host-1"),
                rules=queries.RULES,
                interval="3s",
            ) as prometheus,
        ):
            _hung_twice(prometheus)
            span = Span(started, int(time.time()), 3)
            for path in queries.DASHBOARDS:
                drawn(page, given(prometheus, path, span), folder / f"{path.stem}.png")


if __name__ == "__main__":
    main()
