"""A small simulated cluster under a real Prometheus, and what docs/scaling.md says of the number of series."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.model import FAULT_REASONS, STATES
from tests import pages
from tests.cluster import FAR, HUNG_EVERY, LOST_EVERY, UNEQUAL_EVERY, Cluster, Figures, name_of, running, table, uuid_of
from tests.harness import Scrape, parse

CARDS, HOSTS = 8, 12
NAMES = [name_of(number) for number in range(1, HOSTS + 1)]
SCALING = Path(__file__).parent.parent / "docs/scaling.md"
READINGS = 5  # that a simulated card has


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Twelve hosts, scraped every second: the third has a lost card, the seventh a hung one, the tenth a refusal."""
    with running(HOSTS, CARDS, 1) as made:
        yield made


def coefficients(name: str) -> dict[str, int]:
    """What the page on scaling says of a number of series: so many for each of these, and ``always`` so many."""
    pattern = rf"^{name} = (.*(?:\n +.*)*)"
    text = re.search(pattern, SCALING.read_text(encoding="utf-8"), re.MULTILINE)
    assert text
    terms = re.findall(r"([+-]?) *(\d+)(?: \* ([a-z ]*[a-z]))?", text[1])
    return {what or "always": int(f"{sign}{number}") for sign, number, what in terms}


def counted(page: Scrape) -> dict[str, int]:
    """Of what the page tells how many there are of each thing that the formula speaks of."""
    states = {row.labels["uuid"]: row.labels["state"] for row in page.of("gpu_exporter_device_state") if row.value == 1}
    bound = [row.labels["uuid"] for row in page.of("gpu_fleet_device_info")]
    silent = [identity for identity in bound if states[identity] != "ok"]
    answering = {identity for identity in bound if states[identity] == "ok"}
    return {
        "devices": len(page.of("gpu_info")),
        "devices of fleets": len(bound),
        "silent devices of fleets": len(silent),
        "fleets": len(page.of("gpu_fleet_mask_inverted")),
        "refused fleets": len(page.of("gpu_fleet_mask_refusal_info")),
        "vendors": len(page.of("gpu_exporter_backend_up")),
        "answering devices": len(answering),
        "always": 1,
    }


def expected(name: str, cluster: Cluster, host: str) -> int:
    """What a formula of the page on scaling gives for a host."""
    counts = counted(parse(cluster.simulator.get(host).decode()))
    return sum(factor * counts[what] for what, factor in coefficients(name).items())


@pytest.mark.e2e
def test_every_host_is_up(cluster: Cluster) -> None:
    """Prometheus has scraped each host under its own name, and every scrape succeeded."""
    rows = cluster.engine.query('min_over_time(up{job="gpu"}[1m])')
    assert {row["metric"]["instance"]: row["value"][1] for row in rows} == dict.fromkeys(NAMES, "1")


@pytest.mark.e2e
def test_no_hosts_page_is_anothers(cluster: Cluster) -> None:
    """Under each instance are the UUIDs of that host's cards and no others, in identities and readings alike."""
    for name in ("gpu_info", 'gpu_memory_total_bytes{fleet="host"}'):
        found: dict[str, set[str]] = {}
        for row in cluster.engine.query(name):
            found.setdefault(row["metric"]["instance"], set()).add(row["metric"]["uuid"])
        silent = {"host-00003": uuid_of("host-00003", 1), "host-00007": uuid_of("host-00007", CARDS - 1)}
        assert found == {
            host: {uuid_of(host, card) for card in range(CARDS)} - ({silent.get(host)} if "total" in name else set())
            for host in NAMES
        }


@pytest.mark.e2e
def test_the_number_of_series_is_as_the_page_on_scaling_says(cluster: Cluster) -> None:
    """The formula gives what Prometheus counted on each host, also where cards are silent or masks refused."""
    rows = cluster.engine.query('scrape_samples_scraped{job="gpu"}')
    scraped = {row["metric"]["instance"]: int(row["value"][1]) for row in rows}
    assert scraped == {host: expected("series of a page", cluster, host) for host in NAMES}
    assert len(set(scraped.values())) == 3, "hosts like most, with a silent card, with a refusal"


@pytest.mark.e2e
def test_the_number_of_recorded_series_is_as_the_page_on_scaling_says(cluster: Cluster) -> None:
    """The formula gives what the rules record of each host."""
    wanted = {host: expected("series recorded of a host", cluster, host) for host in NAMES}

    def found() -> dict[str, int]:
        rows = cluster.engine.query('count by (instance) ({__name__=~"[a-z]+:.+",job="gpu",instance!=""})')
        return {row["metric"]["instance"]: int(row["value"][1]) for row in rows}

    # Each group of rules is evaluated at its own time of a second, and each host is scraped at its own.
    until = time.monotonic() + 30
    while found() != wanted and time.monotonic() < until:
        time.sleep(0.5)
    assert found() == wanted


def test_the_formula_follows_the_catalog() -> None:
    """Its factors are how many series of each thing the catalog has, with the readings of simulated devices."""
    formula = coefficients("series of a page")
    assert formula["devices of fleets"] == READINGS + 1
    assert formula["silent devices of fleets"] == -READINGS
    assert formula["devices"] == 1 + len(STATES)
    assert formula["vendors"] == 3 + len(FAULT_REASONS)


@pytest.mark.e2e
def test_every_page_is_a_page(cluster: Cluster) -> None:
    """All that holds for every page holds for each host's."""
    for host in NAMES:
        pages.check(cluster.simulator.get(host))


@pytest.mark.e2e
def test_what_is_wrong_on_some_hosts_is_on_their_pages(cluster: Cluster) -> None:
    """The lost and the hung card, and the fleet that unequal cards have refused, are where they are to be."""
    states = cluster.engine.query('gpu_exporter_device_state{state!="ok"} == 1')
    assert {(row["metric"]["instance"], row["metric"]["physical_index"], row["metric"]["state"]) for row in states} == {
        ("host-00003", "1", "lost"),
        ("host-00007", str(CARDS - 1), "hung"),
    }
    refusals = cluster.engine.query("gpu_fleet_mask_refusal_info")
    found = [(row["metric"]["instance"], row["metric"]["fleet"], row["metric"]["reason"]) for row in refusals]
    assert found == [(name_of(UNEQUAL_EVERY), "rerank", "order-unknown")]
    assert min(LOST_EVERY, HUNG_EVERY) > HOSTS


@pytest.mark.e2e
def test_the_rules_run(cluster: Cluster) -> None:
    """A shared card is in two fleets, and the recorded sum over the cluster has it once."""
    once = "sum(max by (instance, pci_bus_id) (gpu_memory_total_bytes))"
    # What is recorded is a second behind what was scraped.
    cluster.engine.wait_for(f"sum(cluster:gpu_memory_total_bytes:sum) == {once}")
    assert cluster.engine.query(f"sum(gpu_memory_total_bytes) > {once}")


def test_the_table_extrapolates_on_a_straight_line() -> None:
    """What grows is continued on the line through two runs; what does not, and a single run, is not."""
    runs: list[Figures] = [
        {("hosts", ""): hosts, ("cards", ""): 8 * hosts, ("scrape duration, ms", "p50"): 5.0} for hosts in (250, 500)
    ]
    assert f"| cards | 2,000 | 4,000 | {8 * FAR:,} |\n" in table(runs)
    assert "| scrape duration, ms p50 | 5 | 5 |  |\n" in table(runs)
    assert "| cards | 2,000 |  |\n" in table(runs[:1])
