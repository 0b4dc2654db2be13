"""What the settings say of metrics: which are read at all, what they are called, and how many cards there should be."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter import catalog
from tests import pages
from tests.fakes.nvml import FakeNvml, equal_cards, watched_cards
from tests.harness import Scrape, Start

HOST = "sampling: {reuse_seconds: 0}\nfleets: [{name: host, runtime: host}]\nbackends: [nvidia]\n"
EXAMPLE = Path(__file__).parent.parent / "config.example.yaml"


def called(log: Path) -> set[str]:
    return {line.split()[0] for line in log.read_text(encoding="utf-8").splitlines()}


def names(scrape: Scrape) -> set[str]:
    """Of the readings that a page has."""
    return {family.name for family in catalog.READINGS.values() if scrape.of(family.name)}


@pytest.mark.e2e
def test_what_is_excluded_is_not_asked_of_the_driver(nvml: FakeNvml, start: Start, tmp_path: Path) -> None:
    """A family that is left out has no series, its call is not made, and others have theirs; a reload changes it."""
    log = tmp_path / "calls"
    nvml.write(watched_cards(2), lines=[f"log {log}"])
    config = HOST + "metrics: {exclude: [gpu_temperature_celsius, gpu_clock*, gpu_xid_*, gpu_interconnect_*]}\n"
    daemon = start(nvml.environment(), config)
    scrape = daemon.scrape()
    unread = {"nvmlDeviceGetTemperatureV", "nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo", "nvmlEventSetCreate"}
    assert not unread & called(log)
    assert "gpu_power_watts" in names(scrape)
    excluded = {
        name for name in names(scrape) if re.match("gpu_temperature_celsius|gpu_clock|gpu_xid|gpu_intercon", name)
    }
    assert not excluded
    daemon.config_path.write_text(HOST)
    daemon.process.send_signal(signal.SIGHUP)
    daemon.scrape_until(lambda page: {"gpu_temperature_celsius", "gpu_clock_hertz"} <= names(page))
    assert unread <= called(log)


@pytest.mark.e2e
def test_one_family_alone(nvml: FakeNvml, start: Start, tmp_path: Path) -> None:
    """With a single family no other is read, and mapping and health are there as ever."""
    log = tmp_path / "calls"
    nvml.write(watched_cards(2), lines=[f"log {log}"])
    scrape = start(nvml.environment(), HOST + "metrics: {include: [gpu_temperature_celsius]}\n").scrape()
    assert names(scrape) == {"gpu_temperature_celsius"}
    assert len(scrape.of("gpu_info")) == len(scrape.of("gpu_fleet_device_info")) == 2
    assert not {"nvmlDeviceGetFieldValues", "nvmlDeviceGetUtilizationRates"} & called(log)


@pytest.mark.e2e
def test_costly_readings_are_read_on_request(nvml: FakeNvml, start: Start, tmp_path: Path) -> None:
    """They are off with a star, and read where a pattern means them."""
    log = tmp_path / "calls"
    nvml.write(watched_cards(2), lines=[f"log {log}"])
    assert not names(start(nvml.environment(), HOST).scrape()) & {
        family.name for family in catalog.READINGS.values() if family.costly
    }
    assert "nvmlDeviceGetPcieThroughput" not in called(log)
    wanted = "metrics: {include: ['*', gpu_pcie_*_per_second, gpu_performance_state, gpu_processes]}\n"
    scrape = start(nvml.environment(), HOST + wanted).scrape()
    assert scrape.value("gpu_pcie_transmit_bytes_per_second", physical_index="1") == 1_001_000
    assert scrape.value("gpu_pcie_receive_bytes_per_second", physical_index="1") == 2_001_000
    assert scrape.value("gpu_performance_state", physical_index="1") == 1
    assert scrape.value("gpu_processes", physical_index="1") == 0


def test_the_example_names_every_costly_family() -> None:
    """The explanation in the example has them all, and no other."""
    text = EXAMPLE.read_text(encoding="utf-8")
    listed = text[text.index("# Costly ones") : text.index("#include:")]
    assert set(re.findall(r"gpu_\w+", listed)) == {family.name for family in catalog.READINGS.values() if family.costly}


FAMILIES = sorted(catalog.NAMES)


@given(st.lists(st.sampled_from(FAMILIES), min_size=1), st.lists(st.sampled_from(FAMILIES)))
def test_a_selection_is_what_is_included_and_not_excluded(include: list[str], exclude: list[str]) -> None:
    """Plain names choose just these families, costly or not."""
    chosen = catalog.selection(include, exclude)
    found = {catalog.READINGS[key].name for key in chosen.readings} | {catalog.USAGE[key].name for key in chosen.usage}
    assert found == set(include) - set(exclude)


def test_by_default_all_but_the_costly_are_read() -> None:
    """As the worker does that is told nothing."""
    assert catalog.selection() == (catalog.DEFAULT, frozenset(catalog.USAGE))
    assert catalog.selection(("*", "**"), ()).readings == catalog.DEFAULT


# --- the prefix


@pytest.mark.e2e
def test_a_prefix_is_put_before_every_name(nvml: FakeNvml, start: Start) -> None:
    """Each family of ours has it, in each format and with ``name[]``, and the client library's own have not; a page
    with it is the page without it but for the names.
    """
    daemon = start(nvml.environment(), HOST + "metrics: {prefix: fleet_}\n", ["--web.enable-lifecycle"])
    plain = daemon.request("/metrics").body.decode()
    assert not [line for line in plain.splitlines() if re.match(r"(# \w+ )?gpu_", line)]
    assert "process_cpu_seconds_total" in plain
    assert "\nfleet_gpu_exporter_backend_faults_total{" in plain
    openmetrics = daemon.request("/metrics", headers={"Accept": "application/openmetrics-text"}).body.decode()
    assert "# TYPE fleet_gpu_exporter_backend_faults counter" in openmetrics
    narrowed = daemon.request("/metrics?name[]=fleet_gpu_info").body.decode()
    assert {line.split("{")[0] for line in narrowed.splitlines() if not line.startswith("#")} == {"fleet_gpu_info"}
    taken_off = re.sub(r"(?m)^((?:# \w+ )?)fleet_", r"\1", plain)
    pages.check(taken_off.encode())
    daemon.config_path.write_text(HOST)
    assert daemon.request("/-/reload", "POST").status == 200
    assert "\ngpu_info{" in daemon.request("/metrics").body.decode()


# --- how many cards there should be


@pytest.mark.e2e
def test_f60_expected_and_found_cards_are_counted(nvml: FakeNvml, start: Start) -> None:
    """Four cards are expected and found; one that is lost or hangs is not found, and the log says so once."""
    settings = "sampling: {reuse_seconds: 0, deadline_seconds: 1}\nexpected_devices: {nvidia: 4}\n"
    daemon = start(nvml.environment(), settings)
    scrape = daemon.scrape()
    assert scrape.value("gpu_exporter_devices_expected", vendor="nvidia") == 4
    assert scrape.value("gpu_exporter_devices_found", vendor="nvidia") == 4
    nvml.write(equal_cards(4), lines=["lost 1", "hang nvmlDeviceGetTemperatureV 2"])
    for _ in range(2):
        scrape = daemon.scrape()
        assert scrape.value("gpu_exporter_devices_found", vendor="nvidia") == 2
    assert len(scrape.of("gpu_temperature_celsius")) == 2
    assert daemon.log.count("cards missing") == 1
    nvml.write(equal_cards(4))
    daemon.scrape_until(lambda page: page.value("gpu_exporter_devices_found", vendor="nvidia") == 4)
    assert "cards complete" in daemon.log


@pytest.mark.e2e
def test_a_vendor_that_is_expected_has_its_rows(start: Start, tmp_path: Path) -> None:
    """Where none of its cards is found, its backend is down and nothing is found; nothing is expected of another."""
    (tmp_path / "sys").mkdir()
    daemon = start({}, "expected_devices: {nvidia: 8}\n", [f"--path.sysfs={tmp_path / 'sys'}"])
    scrape = daemon.scrape()
    assert scrape.value("gpu_exporter_backend_up", vendor="nvidia") == 0
    assert scrape.value("gpu_exporter_devices_expected", vendor="nvidia") == 8
    assert scrape.value("gpu_exporter_devices_found", vendor="nvidia") == 0
    assert not scrape.of("gpu_exporter_devices_expected", vendor="amd")
