"""The key `libraries`: a vendor's library where the host keeps it elsewhere than its package looks."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.fakes.nvml import FakeNvml, equal_cards
from tests.harness import Start

pytestmark = pytest.mark.e2e


def only_by_path(nvml: FakeNvml) -> dict[str, str]:
    """The fake's environment without the place where the dynamic loader would find it."""
    return {name: value for name, value in nvml.environment().items() if name != "LD_LIBRARY_PATH"}


def config_of(library: Path | str) -> str:
    return f"backends: [nvidia]\nlibraries: {{nvidia: {library}}}\nsampling: {{reuse_seconds: 0}}\n"


def test_nvml_is_loaded_from_the_path_of_the_settings(nvml: FakeNvml, start: Start) -> None:
    """The loader does not find the library by its name, and the settings' path serves."""
    scrape = start(only_by_path(nvml), config_of(nvml.folder / "libnvidia-ml.so.1")).scrape_until(
        lambda page: bool(page.of("gpu_utilization_percent"))
    )
    assert len(scrape.of("gpu_info", vendor="nvidia")) == len(equal_cards(4))


def test_a_path_without_a_library_is_a_reason(nvml: FakeNvml, start: Start) -> None:
    """A file that cannot be loaded leaves the backend down with the path in the log."""
    daemon = start(only_by_path(nvml), config_of("/nonexistent/libnvidia-ml.so.1"))
    scrape = daemon.scrape_until(lambda page: bool(page.of("gpu_exporter_backend_fault_info")))
    assert scrape.value("gpu_exporter_backend_fault_info", vendor="nvidia", reason="library-missing") == 1
    assert daemon.wait_for_log(r"libraries\.nvidia: /nonexistent/libnvidia-ml\.so\.1")


def test_a_reload_with_another_path_starts_another_worker(nvml: FakeNvml, start: Start) -> None:
    """A process never loads a library twice, so a new path is a new worker."""
    daemon = start(only_by_path(nvml), config_of("/nonexistent/libnvidia-ml.so.1"))
    daemon.scrape_until(lambda page: page.of("gpu_exporter_backend_fault_info") != [])
    daemon.config_path.write_text(config_of(nvml.folder / "libnvidia-ml.so.1"))
    daemon.process.send_signal(signal.SIGHUP)
    assert daemon.scrape_until(lambda page: page.of("gpu_exporter_backend_up", vendor="nvidia")[0].value == 1)
    before = daemon.workers("nvidia")
    daemon.process.send_signal(signal.SIGHUP)
    daemon.scrape()
    assert daemon.workers("nvidia") == before
