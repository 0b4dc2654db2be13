"""The catalog: what each family is called, and what its labels may say."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from exporter.backends import BACKENDS
from exporter.catalog import FAMILIES, READINGS, USAGE, Family
from exporter.catalog.own_labels import OWN_LABELS, Shaped, is_known
from exporter.vendors import VENDORS
from tests import metrics_page
from tests.harness import METRICS, parse

SOURCES = sorted((Path(__file__).parent.parent / "exporter" / "backends").rglob("*.py"))
WORD = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
# What scrape configurations, service discovery and Prometheus itself put on every series.
TAKEN = {"cluster", "container", "endpoint", "host", "hostname", "instance", "job", "le", "namespace", "node", "pod"}
TAKEN |= {"quantile", "region", "service", "type", "zone"}


def test_every_own_label_has_its_values() -> None:
    """Each reading's own labels, and no others, are told of."""
    told = {(metric, label) for metric, labels in OWN_LABELS.items() for label in labels}
    assert told == {(metric, label) for metric, family in READINGS.items() for label in family.own}


@pytest.mark.parametrize("metric", OWN_LABELS)
def test_listed_values_are_words_in_order_that_a_backend_has(metric: str) -> None:
    """Hyphenated lower case words, each once, and each stands in a backend."""
    constants = {
        node.value
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
    }
    for listed in OWN_LABELS[metric].values():
        if not isinstance(listed, Shaped):
            assert list(listed) == sorted(set(listed))
            assert all(WORD.fullmatch(value) for value in listed)
            assert set(listed) <= constants


@pytest.mark.parametrize(
    ("metric", "label", "value", "known"),
    [
        ("throttled", "reason", "power-cap", True),
        ("throttled", "reason", "power_cap", False),
        ("fan_speed", "fan", "0", True),
        ("fan_speed", "fan", "-1", False),
        ("mig_instance", "profile", "1g.10gb", True),
        ("mig_instance", "profile", "1c.3g.40gb+me", True),
        ("mig_instance", "profile", "N/A", False),
        ("ras_errors", "block", "pcie-bif", True),
        ("ras_errors", "block", "PCIE_BIF", False),
    ],
)
def test_values_that_are_known_and_not(metric: str, label: str, value: str, known: bool) -> None:
    """A list has its words alone, a shape what matches whole."""
    assert is_known(metric, label, value) == known


def test_a_page_with_an_unlisted_value_fails() -> None:
    """So every test that starts a daemon holds the lists."""
    assert METRICS["gpu_throttled"] == "throttled"
    assert parse('gpu_throttled{reason="idle"} 1\n').value("gpu_throttled") == 1
    with pytest.raises(AssertionError, match="own_labels"):
        parse('gpu_throttled{reason="Idle"} 1\n')


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_f104_no_label_is_one_that_scrape_configurations_set(family: Family) -> None:
    """F104: so nothing of ours is renamed to ``exported_...``, and no label of a target is hidden."""
    assert not TAKEN & set(family.labels)
    assert not [label for label in family.labels if label.startswith(("exported_", "__"))]


def test_f86_names_are_unique_in_every_format() -> None:
    """F86: also without the endings that formats put on or take off; counters alone end in ``_total``."""
    names = [re.sub(r"_(total|created|bucket|count|sum)$", "", family.name) for family in FAMILIES]
    assert len(names) == len(set(names))
    assert all((family.kind == "counter") == family.name.endswith("_total") for family in FAMILIES)


@pytest.mark.parametrize("family", [*READINGS.values(), *USAGE.values()], ids=lambda family: family.name)
def test_sources_are_of_vendors_that_can_be_read(family: Family) -> None:
    """Each reading is some vendor's, and its help has the meaning, what it costs, and the vendor's name."""
    assert family.sources
    for vendor, source in family.sources:
        assert vendor in BACKENDS
        assert f" {VENDORS[vendor].title}: {source}." in family.help
    assert family.help.startswith(family.meaning)
    assert (f"Read on request: {family.costly}." in family.help) == bool(family.costly)
    assert family.meaning.endswith(".")


def test_every_family_stands_once_under_a_heading() -> None:
    """And no heading is empty; the tests of the page itself compare it with the file."""
    groups = metrics_page.grouped()
    assert sorted(family.name for group in groups.values() for family in group) == sorted(
        family.name for family in FAMILIES
    )
    assert all(groups.values())


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("gpu_memory_free_bytes", "bytes"),
        ("gpu_pcie_transmit_bytes_per_second", "bytes per second"),
        ("gpu_interconnect_transmit_bytes_total", "bytes"),
        ("gpu_xid_last_timestamp_seconds", "seconds since 1970 (Unix time)"),
        ("gpu_throttled_seconds_total", "seconds"),
        ("gpu_pcie_link_width_max_lanes", "lanes"),
        ("gpu_xid_errors_total", "none"),
    ],
)
def test_the_unit_is_the_names_ending(name: str, unit: str) -> None:
    """Without the ending that counters have."""
    assert metrics_page.unit(name) == unit


def test_the_links_of_the_metrics_page_lead_somewhere() -> None:
    """Every link within it is a heading of it."""
    text = metrics_page.page()
    headings = {metrics_page.anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings
