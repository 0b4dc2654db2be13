"""The rules of Prometheus: accepted, and tested by promtool for when they fire and when they do not."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from exporter.backends import BACKENDS
from tests import queries
from tests.harness import tool

DATA = Path(__file__).parent / "data" / "rules"
TESTS = sorted(DATA.glob("*_test.yaml"))
ALERTS = [rule for path in queries.RULES for rule in queries.rules(path) if "alert" in rule]
SEVERITIES = {"critical", "warning", "info"}


def promtool(*arguments: str | Path) -> str:
    """What promtool prints, which has to be content."""
    done = subprocess.run([tool("promtool"), *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.e2e
def test_promtool_accepts_them() -> None:
    """`promtool check rules` with every lint has nothing to say of any file."""
    said = promtool("check", "rules", "--lint=all", *queries.RULES)
    assert said.count("SUCCESS") == len(queries.RULES)


@pytest.mark.e2e
@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_promtool_finds_them_right(path: Path) -> None:
    """Series over hours give the alerts, their texts and the recorded values that are expected."""
    assert "SUCCESS" in promtool("test", "rules", path)


def asked() -> list[dict[str, Any]]:
    """Every question after alerts in the tests above."""
    loaded = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in TESTS]
    return [one for file in loaded for test in file["tests"] for one in test.get("alert_rule_test", ())]


@pytest.mark.parametrize("alert", [rule["alert"] for rule in ALERTS])
def test_every_alert_is_asked_when_it_fires_and_when_not(alert: str) -> None:
    """For each alert some test expects it, and some test expects nothing."""
    fires = {bool(one["exp_alerts"]) for one in asked() if one["alertname"] == alert}
    assert fires == {True, False}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_every_alert_says_what_is_needed(rule: dict[str, Any]) -> None:
    """A severity, a summary that names the host where it is about one, a description, and where the runbook has it."""
    assert rule["labels"].keys() == {"severity"}
    assert rule["labels"]["severity"] in SEVERITIES
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert rule["alert"] == "GpuThresholdMissing" or rule["annotations"]["summary"].startswith("{{ $labels.instance }}")
    assert rule["annotations"]["runbook_url"].startswith("docs/runbook.md#")


def test_no_rule_depends_on_what_a_job_is_called() -> None:
    """No selector of a rule has a job, an instance, or a vendor."""
    for path in queries.RULES:
        for one in queries.of_rules(path):
            for _, matchers in queries.names(one.expression).selected:
                assert not matchers.keys() & {"job", "instance", "vendor"}, one


def test_every_vendor_has_its_limit() -> None:
    """Each backend there is has one threshold of temperature, and nobody else has."""
    rows = [rule for path in queries.RULES for rule in queries.rules(path) if "labels" in rule and "record" in rule]
    vendors = [rule["labels"]["vendor"] for rule in rows if rule["record"] == "gpu_threshold_temperature_celsius"]
    assert sorted(vendors) == sorted(BACKENDS)


def test_what_is_compared_with_is_a_threshold_of_its_file() -> None:
    """Alerts compare with series of thresholds.yaml and with 0, 1 and -1: no other number hides in an expression."""
    for rule in ALERTS:
        words = rule["expr"].replace("(", " ").replace(")", " ").split()
        numbers = {word for word in words if word.lstrip("-").replace(".", "").isdigit()}
        assert numbers <= {"0", "1"}, rule["alert"]
