"""What the settings say of metrics: which are read at all, what they are called, and how many cards there should be."""

from __future__ import annotations

import json
import logging
import re
import signal
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from exporter import catalog
from exporter.backends.amd import AmdBackend
from exporter.backends.base import Places
from exporter.backends.intel import IntelBackend
from exporter.model import BackendStatus, Fault, Snapshot
from exporter.telemetry import Transitions
from tests import pages
from tests.backend_host import BackendHost
from tests.doctor_host import doctor
from tests.doctor_host import settings as doctor_settings
from tests.fakes.nvml import FakeNvml, equal_cards, watched_cards
from tests.fakes.sysfs import AmdCard, FakeSys, IntelCard, KfdNode
from tests.harness import Prometheus, Scrape, Start, Target, tool

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


@pytest.mark.e2e
def test_a_call_that_fails_alone_says_nothing_of_its_card(nvml: FakeNvml, start: Start) -> None:
    """Where the settings leave one reading, its fault does not make a card lost that says who it is."""
    nvml.write(equal_cards(2), lines=["fault nvmlDeviceGetTemperatureV 1 999"])
    daemon = start(nvml.environment(), HOST + "metrics: {include: [gpu_temperature_celsius]}\n")
    scrape = daemon.scrape()
    assert [sample.labels["physical_index"] for sample in scrape.of("gpu_temperature_celsius")] == ["0"]
    assert {scrape.state(physical_index=index) for index in "01"} == {"ok"}
    assert scrape.value("gpu_exporter_devices_found", vendor="nvidia") == 2
    nvml.write(equal_cards(2), lines=["fault nvmlDeviceGetTemperatureV * 999"])
    assert daemon.scrape().value("gpu_exporter_backend_up", vendor="nvidia") == 1


@pytest.mark.e2e
def test_a_card_whose_calls_all_fail_is_lost_whatever_is_left_out(nvml: FakeNvml, start: Start) -> None:
    """Several calls that fail, and none that does not, are no chance."""
    faults = [f"fault {call} 1 999" for call in ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetUtilizationRates")]
    nvml.write(equal_cards(2), lines=faults)
    config = HOST + "metrics: {include: [gpu_temperature_celsius, gpu_utilization_percent]}\n"
    assert start(nvml.environment(), config).scrape().state(physical_index="1") == "lost"


@pytest.mark.e2e
def test_nothing_may_be_left(nvml: FakeNvml, start: Start, tmp_path: Path) -> None:
    """Without any reading cards are counted and mapped as ever, and no reading is asked of the driver."""
    log = tmp_path / "calls"
    nvml.write(watched_cards(2), lines=[f"log {log}"])
    scrape = start(nvml.environment(), HOST + "metrics: {exclude: ['*']}\n").scrape()
    assert names(scrape) == set()
    assert len(scrape.of("gpu_fleet_device_info")) == 2
    assert {scrape.state(physical_index=index) for index in "01"} == {"ok"}
    assert not {"nvmlDeviceGetFieldValues", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTemperatureV"} & called(log)


def test_intel_misses_nothing_that_is_left_out(tmp_path: Path) -> None:
    """No hint says what would bring it, and nobody waits for a second reading of a counter."""
    fake = FakeSys(tmp_path)
    fake.write([IntelCard(pci="0000:03:00.0")])
    places = Places(str(fake.sys), str(fake.proc), "/nonexistent/libze_loader.so.1", "/x")
    wanted = places.wanted - {"utilization", "power", "memory_free", "memory_used", "memory_total"}
    told, quiet = (
        BackendHost(IntelBackend(each), each.wanted).read() for each in (places, places._replace(wanted=wanted))
    )
    assert told.hints
    assert (quiet.hints, quiet.pending) == ((), False)


def test_amd_misses_nothing_that_is_left_out(tmp_path: Path) -> None:
    """The library that would tell a partition's utilization is no hint where that is not wanted."""
    fake = FakeSys(tmp_path)
    nodes = tuple(KfdNode(node=2 + part, partition=part, unique_id=0x200 + part) for part in range(2))
    fake.write([AmdCard(pci="0000:0c:00.0", minor=0, kfd_nodes=nodes)], cpus=1)
    places = Places(str(fake.sys), str(fake.proc), root="/nonexistent")
    for wanted, missed in ((places.wanted, True), (places.wanted - {"utilization"}, False)):
        sample = BackendHost(AmdBackend(places._replace(wanted=wanted)), wanted).read()
        assert any(device.parent for device in sample.devices)
        assert bool(sample.hints) == missed


FAMILIES = sorted(catalog.NAMES)


@given(st.lists(st.sampled_from(FAMILIES), min_size=1), st.lists(st.sampled_from(FAMILIES)))
def test_a_selection_is_what_is_included_and_not_excluded(include: list[str], exclude: list[str]) -> None:
    """Plain names choose just these families, costly or not."""
    chosen = catalog.selection(include, exclude)
    found = {catalog.READINGS[key].name for key in chosen.readings} | {catalog.USAGE[key].name for key in chosen.usage}
    assert found == set(include) - set(exclude)


def test_by_default_all_but_the_costly_are_read() -> None:
    """As the worker does that is told nothing."""
    assert catalog.selection().asked == catalog.DEFAULT
    assert catalog.selection().usage == frozenset(catalog.USAGE)
    assert catalog.selection(("*", "**"), ()).asked == catalog.DEFAULT


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


def backend_of(found: int, expected: int | None, reason: str = "") -> Snapshot:
    """A host with one backend, which is down for that reason or up."""
    fault = Fault(reason, "") if reason else None
    status = BackendStatus(
        vendor="nvidia",
        up=not reason,
        duration_seconds=0.1,
        fault=fault,
        faults_total={},
        cards_found=found,
        cards_expected=expected,
    )
    return Snapshot(
        backends=(status,), devices=(), states={}, readings={}, driver_versions={}, mappings=(), bindings=()
    )


def test_what_is_logged_of_missing_cards(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing while the backend starts, or where nothing is expected any more; else each change once."""
    caplog.set_level(logging.INFO, "exporter")
    transitions = Transitions()
    hosts = [
        *(backend_of(0, 4, "starting"), backend_of(4, 4), backend_of(3, 4), backend_of(3, 4), backend_of(4, 4)),
        *(backend_of(0, 4, "crashed"), backend_of(0, None, "crashed"), backend_of(3, 4), backend_of(5, 4)),
    ]
    for host in hosts:
        transitions.see(host, ())
    said = [
        (record.message, record.fields["found"])  # type: ignore[attr-defined]
        for record in caplog.records
        if record.message.startswith("cards")
    ]
    assert said == [
        *(("cards missing", 3), ("cards complete", 4), ("cards missing", 0), ("cards missing", 3)),
        ("cards complete", 5),
    ]


@pytest.mark.e2e
def test_no_card_is_expected_of_a_vendor_that_nobody_misses(start: Start, tmp_path: Path) -> None:
    """0 is no reason for a row where there is nothing."""
    (tmp_path / "sys").mkdir()
    daemon = start({}, "expected_devices: {nvidia: 0}\n", [f"--path.sysfs={tmp_path / 'sys'}"])
    assert not daemon.scrape().of("gpu_exporter_backend_up", vendor="nvidia")


@pytest.mark.e2e
def test_missing_cards_are_on_the_page_and_in_the_answer(nvml: FakeNvml, start: Start) -> None:
    """The number that is expected stands there only while it is not reached."""
    daemon = start(nvml.environment(), HOST + "expected_devices: {nvidia: 4}\n", ["--web.enable-lifecycle"])
    daemon.scrape()
    said = b"</b> expected cards answer or sleep"
    assert said not in daemon.request("/").body
    nvml.write(equal_cards(4), lines=["lost 1"])
    daemon.scrape_until(lambda page: page.value("gpu_exporter_devices_found", vendor="nvidia") == 3)
    assert b"3 of 4" + said in daemon.request("/").body
    (backend,) = json.loads(daemon.request("/api/v1/fleets").body)["backends"]
    assert (backend["cards_found"], backend["cards_expected"]) == (3, 4)


@pytest.mark.e2e
@pytest.mark.parametrize(("expected", "level"), [(4, "PASS"), (5, "FAIL")])
def test_doctor_counts_the_cards(nvml: FakeNvml, tmp_path: Path, expected: int, level: str) -> None:
    """Fewer than the settings expect are a FAIL, with what to do."""
    flag = doctor_settings(tmp_path, f"{HOST}expected_devices: {{nvidia: {expected}}}\n")
    found = [each for each in doctor(flag, environment=nvml.environment()).of("card") if each.subject == "nvidia"]
    assert [(each.level, each.found) for each in found] == [
        (level, f"4 of the {expected} cards answer that expected_devices has")
    ]


@pytest.mark.e2e
def test_doctor_misses_cards_that_are_expected_and_handed_away(tmp_path: Path) -> None:
    """With cards expected it is a failure that all of them are handed to virtual machines; else it is none."""
    fake = FakeSys(tmp_path)
    fake.write([AmdCard(pci="0000:03:00.0", driver="vfio-pci")])
    flag = doctor_settings(tmp_path, "expected_devices: {amd: 1}\n")
    assert doctor(flag, f"--path.sysfs={fake.sys}").one("backend", "amd").level == "FAIL"


# --- with a real Prometheus


@pytest.mark.e2e
def test_a_scrape_configuration_takes_the_prefix_off(nvml: FakeNvml, start: Start, tmp_path: Path) -> None:
    """As docs/dashboards.md and the example's explanation have it: then every name is that of the rules."""
    text = (EXAMPLE.parent / "docs" / "dashboards.md").read_text(encoding="utf-8")
    more = yaml.safe_load(text[text.index("metric_relabel_configs:") :].partition("```")[0])
    (said,) = re.findall(r"# +(metric_relabel_configs: .*)", EXAMPLE.read_text(encoding="utf-8"))
    assert yaml.safe_load(said) == more
    daemon = start(nvml.environment(), HOST + "metrics: {prefix: fleet_}\n")
    daemon.scrape()
    with Prometheus(tool("prometheus"), tmp_path, Target(f"127.0.0.1:{daemon.port}"), more=more) as prometheus:
        assert len(prometheus.wait_for("gpu_temperature_celsius")) == 4
        assert prometheus.wait_for("gpu_exporter_backend_faults_total")
        assert prometheus.query('{__name__=~"fleet_.+"}') == []


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
