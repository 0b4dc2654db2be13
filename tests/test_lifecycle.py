"""Starting, reloading and stopping, with bad files and hanging cards in the way."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import pytest

from tests.fakes.nvml import FakeNvml, equal_cards
from tests.harness import Daemon, Start, run

pytestmark = pytest.mark.e2e

ONE = 'fleets: [{name: one, env: {CUDA_VISIBLE_DEVICES: "1", CUDA_DEVICE_ORDER: PCI_BUS_ID}}]\n'
TWO = 'fleets: [{name: two, env: {CUDA_VISIBLE_DEVICES: "2", CUDA_DEVICE_ORDER: PCI_BUS_ID}}]\n'


def fleets(daemon: Daemon) -> set[tuple[str, str]]:
    """Which fleet watches which card."""
    found = daemon.scrape().of("gpu_utilization_percent")
    return {(sample.labels["fleet"], sample.labels["physical_index"]) for sample in found}


def test_hangup_loads_the_settings_and_keeps_the_worker(nvml: FakeNvml, start: Start) -> None:
    """After SIGHUP the new fleets are served, from the same worker, and the reload series say so."""
    daemon = start(nvml.environment(), ONE)
    assert fleets(daemon) == {("one", "1")}
    workers = daemon.workers("nvidia")
    before = daemon.scrape().value("gpu_exporter_config_last_reload_success_timestamp_seconds")
    daemon.config_path.write_text(TWO)
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for_log(r"(?s)settings loaded.*settings loaded")
    assert fleets(daemon) == {("two", "2")}
    assert daemon.workers("nvidia") == workers
    scrape = daemon.scrape()
    assert scrape.value("gpu_exporter_config_last_reload_successful") == 1
    assert scrape.value("gpu_exporter_config_last_reload_success_timestamp_seconds") > before


@pytest.mark.parametrize("bad", ["fleets: [{name: x, runtme: cuda}]\n", "\x00\x01", None])
def test_a_bad_file_keeps_the_old_settings(nvml: FakeNvml, start: Start, bad: str | None) -> None:
    """A file that is bad, or gone, changes nothing but the reload series and one line with file, line and key."""
    daemon = start(nvml.environment(), ONE)
    if bad is None:
        daemon.config_path.unlink()
    else:
        daemon.config_path.write_text(bad)
    daemon.process.send_signal(signal.SIGHUP)
    line = daemon.wait_for_log(r".*settings not loaded.*")[0]
    assert str(daemon.config_path) in line
    assert "Traceback" not in daemon.log
    if bad is not None and "runtme" in bad:
        assert f"{daemon.config_path}:1: fleets[0].runtme" in line
    assert fleets(daemon) == {("one", "1")}
    assert daemon.scrape().value("gpu_exporter_config_last_reload_successful") == 0
    daemon.config_path.write_text(TWO)
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for_log(r"(?s)settings loaded.*settings loaded")
    assert fleets(daemon) == {("two", "2")}
    assert daemon.scrape().value("gpu_exporter_config_last_reload_successful") == 1


def test_the_reload_call_answers_with_the_complaint(nvml: FakeNvml, start: Start) -> None:
    """POST /-/reload, where enabled, is 200 when the settings were loaded and 500 with the complaint when not."""
    daemon = start(nvml.environment(), ONE, ["--web.enable-lifecycle"])
    assert daemon.request("/-/reload", "POST").status == 200
    daemon.config_path.write_text("fleets: {}")
    answer = daemon.request("/-/reload", "POST")
    assert answer.status == 500
    assert b"config.yaml:1: fleets: expected a list" in answer.body


def test_a_reload_can_drop_and_add_backends(nvml: FakeNvml, start: Start) -> None:
    """A backend that the new settings do not name is ended, its rows go, and another's come."""
    daemon = start(nvml.environment(), "backends: [nvidia]\n")
    daemon.scrape()
    (worker,) = daemon.workers("nvidia")
    daemon.config_path.write_text("backends: [simulated]\n")
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for_log(r"(?s)settings loaded.*settings loaded")
    scrape = daemon.scrape_until(lambda scrape: bool(scrape.of("gpu_info")))
    assert {sample.labels["vendor"] for sample in scrape.of("gpu_info")} == {"simulated"}
    assert [sample.labels["vendor"] for sample in scrape.of("gpu_exporter_backend_up")] == ["simulated"]
    until = time.monotonic() + 5
    while worker in daemon.workers("nvidia"):
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopping_takes_less_than_two_seconds(nvml: FakeNvml, start: Start, number: int) -> None:
    """A stop is clean: status 0, no child left, in under two seconds."""
    daemon = start(nvml.environment())
    daemon.scrape()
    workers = daemon.workers("nvidia")
    status, seconds = daemon.stop(number)
    assert status == 0
    assert seconds < 2
    assert workers
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_stopping_while_a_card_hangs_and_a_scrape_waits(nvml: FakeNvml, start: Start) -> None:
    """A hanging vendor call and a scrape that waits for it do not hold up the stop."""
    daemon = start(nvml.environment(), "sampling: {reuse_seconds: 0}")
    daemon.scrape()
    (worker,) = daemon.workers("nvidia")
    nvml.write(equal_cards(4), lines=["hang * *"])
    with socket.create_connection(("127.0.0.1", daemon.port)) as waiting:
        waiting.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(0.3)
        status, seconds = daemon.stop()
    assert status == 0
    assert seconds < 3  # it waits a second and a half for pages
    assert not Path(f"/proc/{worker}").exists()


def test_stopping_while_the_worker_is_stopped(nvml: FakeNvml, start: Start) -> None:
    """A worker that does not run is ended all the same."""
    daemon = start(nvml.environment())
    daemon.scrape()
    (worker,) = daemon.workers("nvidia")
    import os

    os.kill(worker, signal.SIGSTOP)
    status, seconds = daemon.stop()
    assert (status, Path(f"/proc/{worker}").exists()) == (0, False)
    assert seconds < 2


def test_a_second_signal_stops_at_once(nvml: FakeNvml, start: Start) -> None:
    """While a stop is under way, another signal ends everything."""
    daemon = start(nvml.environment())
    daemon.scrape()
    (worker,) = daemon.workers("nvidia")
    import os

    os.kill(worker, signal.SIGSTOP)
    daemon.process.send_signal(signal.SIGTERM)
    daemon.wait_for_log("msg=stopping")
    status, seconds = daemon.stop(signal.SIGTERM)
    assert status == 1
    assert seconds < 0.3


def test_a_killed_daemon_leaves_no_worker(nvml: FakeNvml, start: Start) -> None:
    """A worker ends when its daemon is gone, whatever ended it."""
    daemon = start(nvml.environment())
    daemon.scrape()
    (worker,) = daemon.workers("nvidia")
    daemon.stop(signal.SIGKILL)
    until = time.monotonic() + 3
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_the_parent_maps_no_vendor_library(nvml: FakeNvml, start: Start) -> None:
    """The vendor's library is loaded in the worker and never in the parent."""
    daemon = start(nvml.environment())
    daemon.scrape()
    (worker,) = daemon.workers("nvidia")
    assert "libnvidia-ml" in Path(f"/proc/{worker}/maps").read_text()
    assert "libnvidia-ml" not in Path(f"/proc/{daemon.process.pid}/maps").read_text()


def test_nothing_leaks_over_many_scrapes(nvml: FakeNvml, start: Start) -> None:
    """After 300 fresh cycles the daemon and its worker hold no more descriptors and threads than before."""
    daemon = start(nvml.environment(), "sampling: {reuse_seconds: 0}")
    for _ in range(20):
        daemon.scrape()
    pids = [daemon.process.pid, *daemon.workers("nvidia")]

    def held() -> list[tuple[int, int]]:
        return [
            (len(list(Path(f"/proc/{pid}/fd").iterdir())), len(list(Path(f"/proc/{pid}/task").iterdir())))
            for pid in pids
        ]

    before = held()
    for _ in range(300):
        daemon.scrape()
    until = time.monotonic() + 5
    # The last connection is closed a moment after its page, and that of the scrape before may have been open above.
    while any(now > was for pair in zip(held(), before, strict=True) for now, was in zip(*pair, strict=True)):
        assert time.monotonic() < until, (before, held())
        time.sleep(0.1)


def test_a_port_that_is_taken_is_a_sentence(nvml: FakeNvml, start: Start) -> None:
    """A second daemon on one port says so and exits 1."""
    daemon = start(nvml.environment())
    second = run(f"--web.listen-address=127.0.0.1:{daemon.port}", environment=nvml.environment())
    assert second.returncode == 1
    assert second.stderr == (f"gpu-fleet-exporter: cannot listen on 127.0.0.1:{daemon.port}: Address already in use\n")
