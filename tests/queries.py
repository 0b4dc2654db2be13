"""Every expression that is asked of Prometheus, by panels, variables, annotations and rules, and what it names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser as promql
import yaml

ROOT = Path(__file__).parent.parent
DASHBOARDS = sorted((ROOT / "grafana" / "dashboards").glob("*.json"))
RULES = sorted((ROOT / "prometheus" / "rules").glob("*.yaml"))

_LABEL_VALUES = re.compile(r"label_values\((.+), (\w+)\)")
_VARIABLE = re.compile(r"\$(?:\{([a-z_]+)\}|([a-z_]+))")


class Asked(NamedTuple):
    """An expression and where it stands. ``instant`` is whether it is asked of one moment; ``label`` of a variable."""

    where: str
    expression: str
    instant: bool = True
    label: str = ""


def board(path: Path) -> dict[str, Any]:
    """A dashboard's JSON."""
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def panels(dashboard: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The panels that show something, those in rows too."""
    found: list[dict[str, Any]] = []
    for panel in dashboard["panels"]:
        found += panel["panels"] if panel["type"] == "row" else [panel]
    return found


def of_panels(path: Path) -> Iterator[Asked]:
    """The queries of a dashboard's panels."""
    for panel in panels(board(path)):
        for target in panel["targets"]:
            where = f"{path.stem}: {panel['title']} {target['refId']}"
            yield Asked(where, target["expr"], bool(target.get("instant")))


def of_dashboard(path: Path) -> Iterator[Asked]:
    """All queries of a dashboard: its panels', its variables' and its annotations'."""
    yield from of_panels(path)
    dashboard = board(path)
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            matched = _LABEL_VALUES.fullmatch(variable["query"])
            assert matched, variable
            yield Asked(f"{path.stem}: variable {variable['name']}", matched[1], label=matched[2])
    for annotation in dashboard["annotations"]["list"]:
        yield Asked(f"{path.stem}: annotation {annotation['name']}", annotation["expr"], False)


def rules(path: Path) -> list[dict[str, Any]]:
    """The rules of a file, in the order in which they are evaluated."""
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def of_rules(path: Path) -> Iterator[Asked]:
    """The expressions of a file of rules."""
    for rule in rules(path):
        yield Asked(f"{path.stem}: {rule.get('record') or rule['alert']}", rule["expr"])


def everything() -> list[Asked]:
    """All of them."""
    dashboards = [asked for path in DASHBOARDS for asked in of_dashboard(path)]
    return dashboards + [asked for path in RULES for asked in of_rules(path)]


def substituted(expression: str, rate_interval: str = "1m", span: str = "1h", **chosen: str) -> str:
    """An expression as Grafana sends it: its own variables, then the dashboard's, which are everything unless given."""
    own = {"__rate_interval": rate_interval, "__range": span}

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return own.get(name) or chosen.get(name) or (".*" if name == "cluster" else ".+")

    return _VARIABLE.sub(value, expression)


class Names(NamedTuple):
    """What an expression names: each series with the labels that it is selected by, the labels that it is grouped,
    joined or relabelled by, and the ranges of its rates.
    """

    selected: tuple[tuple[str, Mapping[str, str]], ...]
    grouped: frozenset[str]
    made: frozenset[str]
    rates: tuple[str, ...]


def names(expression: str) -> Names:
    """What an expression (with Grafana's variables left in its strings) names; raises where it is not PromQL."""
    nodes = list(_walk(promql.parse(substituted_ranges(expression))))
    selectors = [node for node in nodes if isinstance(node, promql.VectorSelector)]
    calls = [node for node in nodes if isinstance(node, promql.Call)]
    labels = [label for node in nodes for label in _modified(node)]
    made = [node.args[1].val for node in calls if node.func.name == "label_replace"]
    read = [node.args[3].val for node in calls if node.func.name == "label_replace" and node.args[3].val]
    rates = [str(node.args[0].range.total_seconds()) for node in calls if node.func.name in ("rate", "irate")]
    return Names(
        tuple((str(node.name), {m.name: m.value for m in node.matchers.matchers}) for node in selectors),
        frozenset(labels) | frozenset(read),
        frozenset(made),
        tuple(rates),
    )


RATE_INTERVAL_SECONDS = 4321.0
"""What ``$__rate_interval`` becomes where only the shape of an expression matters: no literal window is as long."""


def substituted_ranges(expression: str) -> str:
    """An expression that parses, with the dashboard's variables as they are."""
    ranges = {"$__rate_interval": f"{RATE_INTERVAL_SECONDS:.0f}s", "$__range": "1h"}
    for name, value in ranges.items():
        expression = expression.replace(f"[{name}]", f"[{value}]")
    return expression


def _walk(node: Any) -> Iterator[Any]:
    yield node
    below = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "vector_selector", "param")]
    for child in (*below, *getattr(node, "args", ())):
        if child is not None:
            yield from _walk(child)


def _modified(node: Any) -> list[str]:
    modifier = getattr(node, "modifier", None)
    if modifier is None:
        return []
    if isinstance(modifier, promql.AggModifier):
        return list(modifier.labels)
    return [*(modifier.matching.labels if modifier.matching else ()), *(modifier.group_labels or ())]
