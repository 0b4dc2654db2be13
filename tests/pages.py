"""What every page must be, whoever made it: parsed by both of the client's parsers, no series twice, nothing unknown as
a number, no label that belongs to Prometheus, and names with their unit.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from prometheus_client import parser
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.samples import Sample

from exporter import catalog
from exporter.model import STATES

PROMETHEUS_LABELS = frozenset(("instance", "job", "hostname", "pod", "namespace", "container", "node"))
UNITS = ("bytes", "celsius", "hertz", "joules", "ratio", "seconds", "volts", "watts")
# What is counted or numbered, and has no unit. Prometheus has none for revolutions; the word is node_exporter's.
COUNTED = (
    *("gpu_exporter_devices_expected", "gpu_exporter_devices_found", "gpu_fleet_processes"),
    *("gpu_fan_speed_rpm", "gpu_mig_instance_multiprocessors", "gpu_pcie_link_generation", "gpu_performance_state"),
    *("gpu_pcie_link_generation_max", "gpu_pcie_link_width_lanes", "gpu_pcie_link_width_max_lanes", "gpu_processes"),
    *("gpu_remapped_rows", "gpu_retired_pages", "gpu_xid_last_code"),
)
# Prometheus would rather have a ratio; this name is the one that people ask for.
NOT_A_BASE_UNIT = "gpu_utilization_percent"
# The client library's own families of the process.
FOREIGN = ("process_", "python_")
# Newer versions of promtool say what its maintainers would rather have; this one name is wanted as it is.
ACCEPTED_LINT = (f'{NOT_A_BASE_UNIT} use base unit "ratio" instead of "percent"',)

Series = tuple[str, tuple[tuple[str, str], ...]]


def families_of(page: bytes) -> list[Metric]:
    """The page's families; one that ends in ``# EOF`` is read as OpenMetrics."""
    text = page.decode("utf-8")
    if text.endswith("# EOF\n"):
        return list(openmetrics_parser.text_string_to_metric_families(text))  # type: ignore[no-untyped-call]
    return list(parser.text_string_to_metric_families(text))


def samples_of(page: bytes, name: str = "") -> list[Sample]:
    """The samples of that name, or all."""
    samples = (sample for family in families_of(page) for sample in family.samples)
    return [sample for sample in samples if name in ("", sample.name)]


def series_of(sample: Sample) -> Series:
    """What tells one series from another."""
    return sample.name, tuple(sorted(sample.labels.items()))


def check(page: bytes) -> list[Metric]:
    """Asserts all that holds for every page, and returns its families."""
    families = families_of(page)
    own = [family for family in families if not family.name.startswith(FOREIGN)]
    _no_repeats([family.name for family in families])
    _no_repeats([series_of(sample) for family in families for sample in family.samples])
    for family in own:
        _check_name(family)
        for sample in family.samples:
            _check_sample(sample)
    _check_states([sample for family in own if family.name == catalog.DEVICE_STATE.name for sample in family.samples])
    return families


def _no_repeats(names: Sequence[str] | Sequence[Series]) -> None:
    repeated = [name for name, count in Counter(names).items() if count > 1]
    assert not repeated, f"more than once on the page: {repeated}"


_KNOWN = {family.name: family for family in catalog.FAMILIES}


def _check_name(family: Metric) -> None:
    """A counter ends in ``_total``, a value has its unit, and what has none is 1 of an ``_info``, or 0 or 1."""
    name = f"{family.name}_total" if family.type == "counter" else family.name
    known = _KNOWN[name]
    assert (family.type, family.documentation) == (known.kind, known.help)
    assert name.endswith("_total") == (family.type == "counter"), name
    unit = name.removesuffix("_total").removesuffix("_per_second").rpartition("_")[2]
    values = {sample.value for sample in family.samples}
    if name.endswith("_info"):
        assert values <= {1.0}, name
    elif unit == "ratio":
        assert all(0 <= value <= 1 for value in values), name
    elif unit not in UNITS and name not in (NOT_A_BASE_UNIT, *COUNTED) and family.type != "counter":
        assert values <= {0.0, 1.0}, f"{name} has values and no unit"


def _check_sample(sample: Sample) -> None:
    known = _KNOWN[sample.name]
    assert math.isfinite(sample.value), sample
    assert sample.value >= 0, sample
    assert sample.timestamp is None, sample
    assert set(sample.labels) <= set(known.labels), sample
    assert not PROMETHEUS_LABELS & set(sample.labels), sample
    assert all(sample.labels.values()), f"a label without a value: {sample}"


def _check_states(samples: Iterable[Sample]) -> None:
    """Each device has a row for each state, and one of them holds."""
    held: dict[Series, list[str]] = {}
    for sample in samples:
        device = {name: value for name, value in sample.labels.items() if name != "state"}
        states = held.setdefault(("", tuple(sorted(device.items()))), [])
        states += [sample.labels["state"]] * (2 if sample.value else 1)
    for device_labels, states in held.items():
        assert sorted(set(states)) == sorted(STATES), device_labels
        assert len(states) == len(STATES) + 1, device_labels


def promtool(page: bytes) -> None:
    """Asserts that ``promtool check metrics`` has nothing to say of a plain page."""
    program = shutil.which("promtool")
    if program is None:
        message = "promtool is not installed (Debian: apt-get install prometheus)"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    done = subprocess.run([program, "check", "metrics"], input=page, capture_output=True, check=False, timeout=30)
    said = (done.stdout + done.stderr).decode().splitlines()
    assert [line for line in said if line not in ACCEPTED_LINT] == []
    assert done.returncode == (3 if said else 0)
