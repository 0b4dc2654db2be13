"""What the panels show, as numbers: every query of every panel over series that are made up, evaluated by promtool.

``data/panels.yaml`` has the series of three hosts and what each panel makes of them. A table's query goes by the title
of the column that it fills.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import queries
from tests.harness import tool

DATA: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "data" / "panels.yaml").read_text(encoding="utf-8"))
AT = "10m"


def shown() -> Iterator[tuple[str, str]]:
    """The name and the expression of everything that a panel shows."""
    for path in queries.DASHBOARDS:
        for panel in queries.panels(queries.board(path)):
            columns = {
                field: title
                for step in panel.get("transformations", ())[1:]
                for field, title in step["options"]["renameByName"].items()
            }
            for target in panel["targets"]:
                title = columns.get(f"Value #{target['refId']}", target["refId"])
                yield f"{path.stem}: {panel['title']} / {title}", target["expr"]


def rows(wanted: dict[str, float]) -> list[dict[str, Any]]:
    return [{"labels": labels, "value": value} for labels, value in wanted.items()]


def test_every_query_of_a_panel_is_held() -> None:
    """For each there is what it shows, and for nothing else."""
    names = [name for name, _ in shown()]
    assert len(set(names)) == len(names)
    assert set(names) == set(DATA["shows"])


def test_every_recorded_series_is_held() -> None:
    """For each rule of recording.yaml there is what it records."""
    (path,) = (path for path in queries.RULES if path.stem == "recording")
    assert {rule["record"] for rule in queries.rules(path)} == set(DATA["records"])


@pytest.mark.e2e
def test_the_panels_show_and_the_rules_record_what_they_say(tmp_path: Path) -> None:
    """Cards once, hosts apart, nothing that was not measured; each panel the number that its title promises."""
    expressions = {name: queries.substituted(text, rate_interval="4m", span="10m") for name, text in shown()}
    asked = [
        {"expr": expressions[name], "eval_time": AT, "exp_samples": rows(wanted)}
        for name, wanted in DATA["shows"].items()
    ]
    asked += [{"expr": name, "eval_time": AT, "exp_samples": rows(wanted)} for name, wanted in DATA["records"].items()]
    series = [{"series": name, "values": str(values)} for name, values in DATA["series"].items()]
    tested = {"interval": "1m", "input_series": series, "promql_expr_test": asked}
    path = tmp_path / "panels_test.yaml"
    file = {"rule_files": [str(rule) for rule in queries.RULES], "evaluation_interval": "1m", "tests": [tested]}
    path.write_text(yaml.safe_dump(file, width=1000), encoding="utf-8")
    done = subprocess.run(
        [tool("promtool"), "test", "rules", path], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_shown_numbers_are_of_several_kinds() -> None:
    """What is held has rows of both hosts that answer, and values that differ: it could not be met by chance."""
    values = [value for wanted in DATA["shows"].values() for value in wanted.values()]
    assert len(set(values)) > 20
    hosts = {
        host
        for wanted in DATA["shows"].values()
        for labels in wanted
        for host in re.findall(r'instance="(\w+)"', labels)
    }
    assert hosts == {"a", "b", "c"}
