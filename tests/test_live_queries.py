"""The dashboards and the rules on a real Prometheus, which scrapes three demonstrations until a card of each hangs.

Their jobs and instances have names of no pattern: nothing that is bundled may depend on one.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import pictures, queries
from tests.harness import Daemon, Prometheus, Target, tool
from tests.queries import Asked

pytestmark = pytest.mark.e2e

STEP = 1
HOSTS = (("rack 7/left", "gpu"), ("b.example:10420", "gpu"), ("third", "all my machines"))
CARDS = 4
SHARED = "0000:81:00.0"

QUIET = "nothing is the matter with the demonstration in this way"
NO_PROCESSES = "the demonstration's fleets are stated, and have no processes"
NO_NUMBER = "the demonstration expects no number of cards"
NO_SUCH = "the simulated cards have nothing of the kind"
EMPTY = {
    "mapping: Backends that are down A": QUIET,
    "cluster: variable cluster": "no target has such a label",
    "mapping: What would bring more readings A": "the simulated cards lack nothing",
    **{
        f"alerts: {name}": QUIET
        for name in (
            *("GpuExporterDown", "GpuExporterReloadFailed", "GpuBackendDown", "GpuBackendCrashing", "GpuBackendSlow"),
            *("GpuDeviceLost", "GpuHot", "GpuMemoryNearlyFull", "GpuFleetMappingContradicted", "GpuFleetsLeftOut"),
            *("GpuThresholdMissing", "GpuCardsMissing", "GpuMemoryHot", "GpuThrottledByHeat", "GpuThrottledByHardware"),
            *("GpuXid", "GpuRecoveryNeeded", "GpuUncorrectedMemoryErrors", "GpuRowRemappingFailed"),
            *("GpuRowRemappingPending", "GpuRetiredPagesPending", "GpuPcieLinkDegraded", "GpuInterconnectLinkDown"),
        )
    },
    **{f"hosts: PCIe links below their best {letter}": QUIET for letter in "ABCD"},
    **dict.fromkeys(
        (
            *("fleets: Cards shared with another fleet B", "fleets: Cards shared with another fleet C"),
            *("fleets: Memory of the fleets' own processes A", "fleets: Load by the fleets' own processes A"),
            "cluster: Fleets over all hosts G",
            *(
                "recording: fleet:gpu_fleet_memory_used_bytes:sum",
                "recording: cluster_fleet:gpu_fleet_memory_used_bytes:sum",
            ),
        ),
        NO_PROCESSES,
    ),
    **dict.fromkeys(
        (
            *("mapping: Cards found and expected B", "mapping: Cards found and expected C"),
            *("cluster: Cards missing A", "recording: cluster:gpu_cards_missing:sum"),
        ),
        NO_NUMBER,
    ),
    **dict.fromkeys(
        (
            *("hosts: Memory and hottest spot A", "hosts: Memory and hottest spot B", "hosts: Revolutions of fans A"),
            *(f"hosts: Errors {letter}" for letter in "EFIJK"),
            *(f"hosts: Traffic {letter}" for letter in "ABCD"),
            "recording: device:gpu_interconnect_links_up:sum",
        ),
        NO_SUCH,
    ),
    "alerts: GpuCardGone": QUIET,
    "alerts: GpuDeviceFlapping": "a card has to hang several times",
    "alerts: GpuFleetIdleHoldingMemory": "the simulated cards are busy",
}
"""The queries that may find nothing, and why."""
SOMETIMES = {"hosts: Clocks that were held down A"}
"""A simulated card meets its power limit for some of every two minutes."""


class Cluster(NamedTuple):
    """Three demonstrations that Prometheus has scraped since a time, until a card of each hangs."""

    prometheus: Prometheus
    span: pictures.Span

    def ask(self, asked: Asked, **chosen: str) -> list[dict[str, Any]]:
        """What Grafana would get, with these values of its variables."""
        expression = queries.substituted(asked.expression, rate_interval=f"{4 * STEP}s", span="5m", **chosen)
        if asked.label:
            parameters = {"match[]": expression, "start": str(self.span.start), "end": str(self.span.to)}
            return list(self.prometheus.ask(f"label/{asked.label}/values", **parameters))
        if asked.instant:
            data = self.prometheus.ask("query", query=expression, time=str(self.span.to))
        else:
            times = {"start": str(self.span.start), "end": str(self.span.to), "step": str(STEP)}
            data = self.prometheus.ask("query_range", query=expression, **times)
        return list(data["result"])

    def value(self, where: str, **chosen: str) -> float:
        """The one number that a panel shows."""
        (asked,) = (one for one in queries.everything() if one.where == where)
        (found,) = self.ask(asked, **chosen)
        return float(found["value"][1])

    def rows(self, where: str, **chosen: str) -> list[dict[str, str]]:
        """The labels of a panel's rows."""
        (asked,) = (one for one in queries.everything() if one.where == where)
        return [row["metric"] for row in self.ask(asked, **chosen)]


@pytest.fixture(scope="module", autouse=True)
def building(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[Path]]:
    """The page on which Grafana's components draw: built while the cluster is being watched, each takes a minute."""

    def build(folder: Path) -> Path:
        tool("chromium", "chromium")
        pictures.modules(folder)
        return pictures.built(folder)

    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(build, tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def page(building: Future[Path]) -> Path:
    return building.result()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    program = tool("prometheus")
    directory = tmp_path_factory.mktemp("cluster")
    with contextlib.ExitStack() as stack:
        targets = []
        started = int(time.time())
        for number, (instance, job) in enumerate(HOSTS):
            folder = directory / str(number)
            folder.mkdir()
            daemon = stack.enter_context(Daemon(folder, {}, pictures.DEMO, ()))
            targets.append(Target(f"127.0.0.1:{daemon.port}", job, instance))
        prometheus = stack.enter_context(Prometheus(program, directory, *targets, rules=queries.RULES, interval="1s"))
        prometheus.wait_for(f"count(count_over_time(gpu_exporter_build_info[1m]) >= 3) == {len(HOSTS)}")
        daemon.process.send_signal(signal.SIGHUP)
        prometheus.wait_for(f"count({pictures.HUNG}) == {len(HOSTS)}", within=90)
        time.sleep(6 * STEP)  # so that rates and the rules have seen it
        yield Cluster(prometheus, pictures.Span(started, int(time.time()), STEP))


def test_every_query_is_answered(cluster: Cluster) -> None:
    """No query of a panel, a variable, an annotation or a rule errs, and none finds nothing but those with a reason."""
    empty = {asked.where for asked in queries.everything() if not cluster.ask(asked)} - SOMETIMES
    assert sorted(empty - set(EMPTY)) == []
    assert {where for where in EMPTY if where not in empty} == set(), "these find something, and need no reason"


def test_the_rules_are_evaluated(cluster: Cluster) -> None:
    """Every rule was evaluated without an error, and two alerts wait: of a refused mask and of a card that hangs."""
    rules = [rule for group in cluster.prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == sum(len(queries.rules(path)) for path in queries.RULES)
    # Prometheus evaluates these every five minutes.
    seldom = {("GpuCardGone", "unknown"), ("GpuInterconnectLinkDown", "unknown")}
    assert {(rule["name"], rule["health"]) for rule in rules if rule["health"] != "ok"} <= seldom
    states = {
        rule["name"]: rule["state"] for rule in rules if rule["type"] == "alerting" and rule["state"] != "inactive"
    }
    assert states == {"GpuFleetMaskRefused": "pending", "GpuDeviceHung": "pending"}


def test_several_hosts_and_each_alone(cluster: Cluster) -> None:
    """Three hosts whose cards have the same addresses have twelve, and each alone four, in numbers and in rows."""
    everything = CARDS * len(HOSTS)
    assert cluster.value("hosts: All cards A") == everything
    assert len(cluster.rows("hosts: Cards B")) == everything
    assert cluster.value("hosts: Lost or hung A") == len(HOSTS)
    for instance, job in HOSTS:
        assert cluster.value("hosts: All cards A", instance=instance) == CARDS
        assert {row["instance"] for row in cluster.rows("hosts: Cards B", instance=instance)} == {instance}
        beside = sum(other == job for _, other in HOSTS)
        assert cluster.value("hosts: Hosts A", job=job) == beside
        assert cluster.value("cluster: Cards A", job=job) == CARDS * beside


def test_a_shared_card_counts_once(cluster: Cluster) -> None:
    """The memory of a host's cards is that of its fleet of everything, however many fleets share a card."""
    prometheus, at = cluster.prometheus, str(cluster.span.to)

    def sums(expression: str) -> dict[str, float]:
        found = prometheus.ask("query", query=expression, time=at)["result"]
        return {row["metric"]["instance"]: float(row["value"][1]) for row in found}

    each = sums('sum by (instance) (gpu_memory_total_bytes{fleet="host"})')
    assert len(each) == len(HOSTS)
    assert sums("sum by (instance) (gpu_memory_total_bytes)") != each
    assert sums("sum by (instance) (card:gpu_memory_total_bytes:max)") == each
    for instance, _ in HOSTS:
        (asked,) = (one for one in queries.everything() if one.where == "fleets: Memory of the chosen fleets' cards B")
        (line,) = cluster.ask(asked, instance=instance)
        assert float(line["values"][-1][1]) == each[instance]


def test_the_three_stories(cluster: Cluster) -> None:
    """On each host two fleets share a card under their own numbers, a mask is refused, a card hangs without reading."""
    shared = cluster.rows("fleets: Cards shared with another fleet A")
    told = Counter((row["instance"], row["pci_bus_id"], row["fleet"], row["fleet_index"]) for row in shared)
    assert told == Counter((host, SHARED, *fleet) for host, _ in HOSTS for fleet in (("chat", "1"), ("batch", "0")))
    refused = cluster.rows("fleets: Refused masks A")
    assert {(row["instance"], row["fleet"], row["reason"]) for row in refused} == {
        (host, "rerank", "order-unknown") for host, _ in HOSTS
    }
    hung = cluster.rows("hosts: Cards that were lost, hung or asleep A")
    assert sorted((row["instance"], row["physical_index"]) for row in hung) == sorted((host, "1") for host, _ in HOSTS)
    assert "1" not in {row["physical_index"] for row in cluster.rows("hosts: Cards E")}


# What a browser has to show of the three stories, as text of the page.
STORIES = {
    "fleets": ("refused", "CUDA numbers unequal cards", SHARED, ">hung<", "not measured"),
    "hosts": (">hung<", "not measured", "batch"),
    "mapping": ("refused", "order-unknown", "hung, simulated", "Every backend is up"),
    "cluster": ("order-unknown", "hung, simulated", "batch"),
}


@pytest.mark.parametrize("path", queries.DASHBOARDS, ids=lambda path: path.stem)
def test_grafana_s_components_draw_it(cluster: Cluster, page: Path, path: Path, tmp_path: Path) -> None:
    """In a browser each panel shows what was found or says that there is nothing, and the stories are on the page."""
    shown = pictures.given(cluster.prometheus, path, cluster.span)
    text = pictures.drawn(page, shown, tmp_path / "picture.png")
    wanted = queries.panels(shown["dashboard"])
    assert text.count('class="panel"') == len(wanted)
    bare = [p for p in wanted if not any(shown["results"][f"{p['id']}{target['refId']}"] for target in p["targets"])]
    assert text.count('class="absent"') == len(bare)
    for part in (*(panel["fieldConfig"]["defaults"]["noValue"] for panel in bare), *STORIES[path.stem]):
        assert part in text
    assert (tmp_path / "picture.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def _row(text: str, *parts: str) -> str:
    """The one row of the page's tables that has all these texts."""
    (found,) = (row for row in text.split('role="row"')[1:] if all(f">{part}<" in row for part in parts))
    return found


def test_a_reading_stays_beside_its_device(page: Path, tmp_path: Path) -> None:
    """Of a board with a utilization and a MIG instance without one, the board's row alone has the number."""
    dashboard = queries.board(queries.ROOT / "grafana" / "dashboards" / "hosts.json")
    (panel,) = [panel for panel in queries.panels(dashboard) if panel["title"] == "Cards"]
    results: dict[str, list[dict[str, Any]]] = {
        f"{one['id']}{target['refId']}": [] for one in queries.panels(dashboard) for target in one["targets"]
    }

    def answered(letter: str, value: float, *parts: str, **labels: str) -> None:
        """As Prometheus answers where no row of a query has a part, unless the query gives each its part."""
        expression = panel["targets"]["ABCDEFG".index(letter)]["expr"]
        whole = "whole" if expression.endswith('"gpu_partition", "whole", "gpu_partition", "")') else ""
        for part in parts:
            named = {"gpu_partition": part or whole} if part or whole else {}
            metric = {"instance": "a", "pci_bus_id": "0000:61:00.0", "physical_index": "0", **labels, **named}
            results[f"{panel['id']}{letter}"].append({"metric": metric, "value": [0, str(value)]})

    answered("A", 1, "", "1/0", name="H100")
    answered("B", 0, "", "1/0")
    answered("E", 77, "")
    span = {"from": 0, "to": 60, "step": 1}
    shown = {"dashboard": dashboard, "variables": {}, "span": span, "results": results}
    text = pictures.drawn(page, shown, tmp_path / "picture.png")
    assert ">77<" in _row(text, "whole", "H100")
    assert ">77<" not in _row(text, "1/0", "H100")
