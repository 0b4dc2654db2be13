"""The demonstration's made-up cards show what a dashboard of real ones does, and nothing that could not be."""

from __future__ import annotations

import time

import pytest

from exporter.backends.base import Places
from exporter.backends.simulated import SimulatedBackend
from exporter.catalog import READINGS
from tests.harness import Scrape, Start

CONFIG = "backends: [simulated]\nsampling: {reuse_seconds: 0}\nfleets: [{name: host, runtime: host}]\n"
SHOWN = (
    "memory_reserved",
    "memory_controller",
    "engine",
    "power",
    "power_limit",
    "power_limit_default",
    "power_limit_maximum",
    "energy",
    "clock",
    "clock_maximum",
    "throttled",
    "pcie_generation",
    "pcie_width",
    "pcie_replays",
    "ecc_errors",
    "xid_errors",
)


def of_card(scrape: Scrape, index: int, metric: str, **own: str) -> float:
    """A reading of a card; of the family's own labels' values it has those."""
    return scrape.value(READINGS[metric].name, physical_index=str(index), **own)


@pytest.mark.e2e
def test_every_card_has_what_dashboards_show(start: Start) -> None:
    """A page has each family for each card; what belongs together fits, and no number is beyond its limit."""
    scrape = start({}, CONFIG).scrape()
    for metric in SHOWN:
        cards = {sample.labels["physical_index"] for sample in scrape.of(READINGS[metric].name)}
        assert cards == {"0", "1", "2", "3"}, metric
    for index in range(4):
        parts = [of_card(scrape, index, f"memory_{part}") for part in ("used", "free", "reserved")]
        assert sum(parts) == of_card(scrape, index, "memory_total")
        assert 0 < of_card(scrape, index, "power") <= of_card(scrape, index, "power_limit")
        for clock in ("sm", "memory"):
            assert (
                0 < of_card(scrape, index, "clock", clock=clock) <= of_card(scrape, index, "clock_maximum", clock=clock)
            )
    assert [sample.labels["physical_index"] for sample in scrape.of("gpu_xid_last_code")] == ["2"]
    assert {sample.value for sample in scrape.of("gpu_xid_errors_total")} == {0, 1}
    assert not scrape.of("gpu_processes")  # costly, so on request alone


@pytest.mark.e2e
def test_energy_is_power_over_time(start: Start) -> None:
    """The counter rises by what the card draws meanwhile."""
    daemon = start({}, CONFIG)
    first, begun = daemon.scrape(), time.monotonic()
    time.sleep(0.5)
    waited = time.monotonic() - begun
    second = daemon.scrape()
    for index in range(4):
        risen = of_card(second, index, "energy") - of_card(first, index, "energy")
        assert risen > 0.9 * waited * min(of_card(page, index, "power") for page in (first, second))


def test_only_what_is_wanted_is_given() -> None:
    """The settings' choice holds for made-up values too."""
    backend = SimulatedBackend(Places(wanted=frozenset({"power", "processes"})))
    (device,) = backend.identify("3", lambda device: None)
    assert {reading.metric for reading in backend.sample(device).readings} == {"power", "processes"}
