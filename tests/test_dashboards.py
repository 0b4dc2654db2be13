"""The dashboards as they are committed: made by their source, valid for Grafana, and asking for what there is."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from exporter import catalog
from exporter.catalog.own_labels import OWN_LABELS
from exporter.model import STATES
from exporter.refusals import REFUSALS
from grafana.source.__main__ import DASHBOARDS, FOLDER, made
from grafana.source.queries import STATES as NUMBERED
from tests import queries

NAMES = sorted(DASHBOARDS)
RECORDED_ONLY = "cluster"
"""The dashboard of many hosts: it reads recorded series, which have no instance."""

every = pytest.mark.parametrize("name", NAMES)


def board(name: str) -> dict[str, Any]:
    return queries.board(FOLDER / f"{name}.json")


def panels(name: str) -> list[dict[str, Any]]:
    return queries.panels(board(name))


def variables(name: str) -> dict[str, dict[str, Any]]:
    return {variable["name"]: variable for variable in board(name)["templating"]["list"]}


@every
def test_the_json_is_what_the_source_makes(name: str) -> None:
    """`python -m grafana.source` writes what is committed, and there is no dashboard without a source."""
    assert (FOLDER / f"{name}.json").read_text(encoding="utf-8") == made(name)
    assert sorted(path.stem for path in FOLDER.iterdir()) == NAMES


def schemas() -> Path:
    folder = os.environ.get("GRAFANA_SCHEMAS")
    if not folder:
        pytest.skip("GRAFANA_SCHEMAS does not name the folder of Grafana's JSON Schemas")
    return Path(folder)


def schema(name: str) -> dict[str, Any]:
    """One of Grafana's JSON Schemas, without its mistake: they take "any value" for "any object" in overrides."""
    loaded: dict[str, Any] = json.loads((schemas() / f"{name}.jsonschema.json").read_text(encoding="utf-8"))
    for kind, field in (("MatcherConfig", "options"), ("DynamicConfigValue", "value")):
        if kind in loaded["definitions"]:
            loaded["definitions"][kind]["properties"][field] = {}
    return loaded


def complaints(given: object, name: str, definition: str = "") -> list[str]:
    """What the schema, or one definition of it, has against a value."""
    whole = schema(name)
    checked = {**whole, "$ref": f"#/definitions/{definition}"} if definition else whole
    errors = jsonschema.Draft7Validator(checked).iter_errors(given)
    return [f"{error.json_path}: {error.message}" for error in errors]


@every
def test_grafana_s_schemas_accept_it(name: str) -> None:
    """The dashboard, each panel, its options, what its fields have of their own, and each query."""
    assert complaints(board(name), "dashboard") == []
    assert complaints({**board(name), "editable": "no"}, "dashboard")
    for panel in panels(name):
        kind = panel["type"].replace("-", "")
        assert complaints(panel, "dashboard", "Panel") == []
        assert complaints(panel["options"], kind, "Options") == []
        custom = panel["fieldConfig"]["defaults"].get("custom")
        assert (
            custom is None
            or "FieldConfig" not in schema(kind)["definitions"]
            or complaints(custom, kind, "FieldConfig") == []
        )
        for target in panel["targets"]:
            assert complaints(target, "prometheus") == []


@every
def test_it_can_be_imported_anywhere(name: str) -> None:
    """A uid of its own, no id, nothing for an import dialog to fill in, everywhere the variable's data source."""
    dashboard = board(name)
    assert dashboard["id"] is None
    assert re.fullmatch(r"gpu-fleet-[a-z]+", dashboard["uid"])
    assert len({board(other)["uid"] for other in NAMES}) == len(NAMES)
    assert dashboard["editable"] is False
    assert dashboard["schemaVersion"] == 41
    text = json.dumps(dashboard)
    assert "__inputs" not in text
    assert "${DS_" not in text
    assert list(sources(dashboard)) == [{"type": "prometheus", "uid": "${datasource}"}] * len(list(sources(dashboard)))
    assert len(list(sources(dashboard))) > 2 * len(panels(name))


def sources(node: Any) -> Iterator[Any]:
    """Every data source that is named anywhere below."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if key == "datasource":
            yield value
        elif isinstance(value, dict | list):
            yield from sources(value)


@every
def test_grafana_s_linter_would_have_nothing_to_say(name: str) -> None:
    """Its rules for variables: which there are, their labels, that they take several values and are renewed."""
    found = variables(name)
    source = found["datasource"]
    assert (source["type"], source["query"], source["label"]) == ("datasource", "prometheus", "Data source")
    wanted = {"job"} if name == RECORDED_ONLY else {"job", "instance"}
    assert wanted <= set(found)
    for variable in (one for one in found.values() if one["type"] == "query"):
        assert variable["label"] == variable["name"].capitalize()
        assert variable["datasource"]["uid"] == "${datasource}"
        assert variable["multi"] is True
        assert variable["includeAll"] is True
        assert variable["allValue"] == (".*" if variable["name"] == "cluster" else ".+")
        assert variable["refresh"] == 2
        assert variable["current"]["value"] == ["$__all"]


@every
def test_the_order_of_the_variables_is_that_of_their_queries(name: str) -> None:
    """A variable's query uses none that comes after it, and each variable is used by some panel."""
    found = [variable["name"] for variable in board(name)["templating"]["list"]]
    assert len(set(found)) == len(found)
    before = {"datasource"}
    for variable in board(name)["templating"]["list"]:
        used = set(re.findall(r"\$(\w+)", variable["query"])) if variable["type"] == "query" else set()
        assert used <= before
        before.add(variable["name"])
    asked = " ".join(one.expression for one in queries.of_panels(FOLDER / f"{name}.json"))
    assert {one for one in before if f"${one}" in asked} == before - {"datasource"}


@every
def test_every_panel_says_what_it_shows(name: str) -> None:
    """A title, a description, a unit, a text for where there is nothing, and at least one query."""
    titles = Counter(panel["title"] for panel in panels(name))
    assert set(titles.values()) == {1}
    for panel in panels(name):
        defaults = panel["fieldConfig"]["defaults"]
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert defaults["unit"]
        assert len(defaults["noValue"]) > 3
        assert panel["targets"]
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGHIJKL"[: len(panel["targets"])])
        assert all(target["expr"] for target in panel["targets"])


@every
def test_the_panels_lie_side_by_side(name: str) -> None:
    """On the grid of 24 columns no panel lies over another, and their ids differ."""
    taken: Counter[tuple[int, int]] = Counter()
    for panel in board(name)["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        taken.update(
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        )
    assert set(taken.values()) == {1}
    assert len({panel["id"] for panel in board(name)["panels"]}) == len(board(name)["panels"])


@every
def test_every_selector_keeps_to_the_chosen_targets(name: str) -> None:
    """Each selector of a panel or annotation has the chosen jobs and instances, each rate Grafana's interval."""
    chosen = (
        {"job": "$job", "cluster": "$cluster"} if name == RECORDED_ONLY else {"job": "$job", "instance": "$instance"}
    )
    for asked in queries.of_dashboard(FOLDER / f"{name}.json"):
        named = queries.names(asked.expression)
        assert named.selected, asked
        for _, matchers in named.selected:
            assert asked.label or chosen.items() <= matchers.items(), asked
        assert set(named.rates) <= {str(queries.RATE_INTERVAL_SECONDS)}, asked


OF_PROMETHEUS = {"up": (), "scrape_duration_seconds": (), "scrape_samples_scraped": ()}
OF_THE_PROCESS = {"process_cpu_seconds_total": (), "process_resident_memory_bytes": ()}
TARGET_LABELS = {"job", "instance", "cluster"}
FAMILIES = {family.name: family.labels for family in catalog.FAMILIES}
RECORDED = {rule["record"]: rule for path in queries.RULES for rule in queries.rules(path) if "record" in rule}
KNOWN = {*OF_PROMETHEUS, *OF_THE_PROCESS, *FAMILIES, *RECORDED}
ALL_LABELS = TARGET_LABELS | {label for labels in FAMILIES.values() for label in labels} | {"threshold"}


@pytest.mark.parametrize("asked", queries.everything(), ids=lambda asked: asked.where)
def test_every_name_is_one_that_is_emitted_or_recorded(asked: queries.Asked) -> None:
    """A query selects families of the catalog by labels that they have, and joins and groups by labels that exist."""
    named = queries.names(asked.expression)
    assert named.selected or asked.expression.startswith("vector("), asked
    for name, matchers in named.selected:
        assert name in KNOWN, f"{name} is neither emitted nor recorded"
        labels = set(FAMILIES.get(name, ALL_LABELS)) | TARGET_LABELS
        assert set(matchers) <= labels, f"{name} has no such label: {set(matchers) - labels}"
    assert named.grouped <= ALL_LABELS | named.made, named.grouped


READINGS = {family.name: metric for metric, family in catalog.READINGS.items()}


@pytest.mark.parametrize("asked", queries.everything(), ids=lambda asked: asked.where)
def test_every_value_of_an_own_label_is_one_that_it_may_have(asked: queries.Asked) -> None:
    """What a query selects by, such as a reason or a sensor, or each way that its pattern allows, is in the catalog."""
    for name, matchers in queries.names(asked.expression).selected:
        own = OWN_LABELS.get(READINGS.get(name.split(":")[1] if ":" in name else name, ""), {})
        for label in own.keys() & matchers.keys():
            known = own[label]
            assert isinstance(known, tuple), asked
            for pattern in matchers[label].split("|"):
                assert any(re.fullmatch(pattern, value) for value in known), (asked, pattern)


@every
def test_legends_and_columns_are_labels_of_the_query(name: str) -> None:
    """A legend names labels that the answer keeps; a table's columns are those, or the value of one of its queries."""
    for panel in panels(name):
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")):
                assert re.search(rf"\b{label}\b", target["expr"]) or label == "instance", (panel["title"], label)
        if panel["type"] == "table":
            check_columns(panel)


def check_columns(panel: dict[str, Any]) -> None:
    organized = panel["transformations"][1]["options"]
    letters = [target["refId"] for target in panel["targets"]]
    values = ["Value"] if len(letters) == 1 else [f"Value #{letter}" for letter in letters]
    text = " ".join(target["expr"] for target in panel["targets"])
    for field in organized["renameByName"]:
        assert field in values if field.startswith("Value") else re.search(rf"\b{field}\b", text), (
            panel["title"],
            field,
        )
    titles = list(organized["renameByName"].values())
    assert len(set(titles)) == len(titles)
    overridden = [override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]]
    assert set(overridden) <= set(titles)
    assert {order["displayName"] for order in panel["options"]["sortBy"]} <= set(titles)


@every
def test_what_a_cell_leads_to_is_there(name: str) -> None:
    """A link names a dashboard of ours, a variable that it has, and a column of the table that it stands in."""
    uids = {board(other)["uid"]: variables(other) for other in NAMES}
    links = 0
    for panel in panels(name):
        titles = {
            title for step in panel.get("transformations", ())[1:] for title in step["options"]["renameByName"].values()
        }
        for override in panel["fieldConfig"]["overrides"]:
            for link in (one for prop in override["properties"] if prop["id"] == "links" for one in prop["value"]):
                uid, _, rest = link["url"].removeprefix("/d/").partition("?")
                assert set(re.findall(r"&var-(\w+)=", rest)) <= set(uids[uid])
                assert set(re.findall(r"\$\{__data\.fields\.([^}]+)\}", rest)) <= titles
                pairs = re.findall(r"&var-(\w+)=\$\{__data\.fields\.([^}]+)\}", rest)
                assert set(pairs) <= {("instance", "Host"), ("fleet", "Fleet")}
                assert pairs
                links += 1
    assert links
    (link,) = board(name)["links"]
    assert (link["type"], link["tags"], link["includeVars"], link["keepTime"]) == (
        "dashboards",
        ["gpu-fleet-exporter"],
        True,
        True,
    )
    assert "gpu-fleet-exporter" in board(name)["tags"]


UNITS = {
    "bytes": "bytes",
    "celsius": "celsius",
    "percent": "percent",
    "seconds": "s",
    "watts": "watt",
    "hertz": "hertz",
    "ratio": "percentunit",
    "rpm": "rotrpm",
}


def unit_of(expression: str) -> str:
    """The unit of what an expression gives: that of the one name that it selects, unless that is counted or divided."""
    if expression.startswith(("100 *", "label_replace(100 *", "topk(5, 100 *")):
        return "percent"
    found = {name.split(":")[1] if ":" in name else name for name, _ in queries.names(expression).selected}
    units = {UNITS.get(name.rpartition("_")[2], "") for name in found}
    return units.pop() if len(units) == 1 and not re.search(r"\b(count|rate|changes|time)\b", expression) else ""


@every
def test_units_are_those_of_the_metrics(name: str) -> None:
    """Bytes are shown as bytes, degrees as degrees; in a table by the column's own property."""
    seen = 0
    for panel in panels(name):
        own = {
            override["matcher"]["options"]: {prop["id"]: prop["value"] for prop in override["properties"]}
            for override in panel["fieldConfig"]["overrides"]
        }
        columns = panel["transformations"][1]["options"]["renameByName"] if panel["type"] == "table" else {}
        for target in panel["targets"]:
            wanted = unit_of(target["expr"])
            title = columns.get(f"Value #{target['refId']}", "")
            shown = own.get(title, {}).get("unit", panel["fieldConfig"]["defaults"]["unit"])
            assert not wanted or shown == wanted, (panel["title"], title)
            seen += bool(wanted)
    assert seen


@every
def test_absence_is_told_in_words(name: str) -> None:
    """No text for where there is nothing looks like a number, and every value column of several queries has one."""
    for panel in panels(name):
        told = [panel["fieldConfig"]["defaults"]["noValue"]]
        for override in panel["fieldConfig"]["overrides"]:
            properties = {prop["id"]: prop["value"] for prop in override["properties"]}
            told += [properties[key] for key in properties if key == "noValue"]
            assert "unit" not in properties or "noValue" in properties, (panel["title"], override["matcher"])
        assert not any(re.search(r"\d", text) for text in told), told


def test_the_first_are_the_greatest() -> None:
    """Where a panel has five of many, they are those with the greatest values."""
    firsts = [one.expression for one in queries.of_panels(FOLDER / "hosts.json") if "k(5, " in one.expression]
    assert len(firsts) == 2
    assert all(expression.startswith("topk(5, ") for expression in firsts)


def test_values_have_their_words() -> None:
    """0 and 1 of masks, backends and settings, and the number of each state, are shown as what they are."""
    words = {
        "Masks": {"0": "refused", "1": "inverted"},
        "Masks over time": {"0": "refused", "1": "inverted"},
        "Backends": {"0": "down", "1": "up"},
        "Exporters": {"0": "down", "1": "up"},
        "Clocks that were held down": {"0": "free", "1": "held down"},
        "Cards that were lost, hung or asleep": {"0": "ok", "1": "asleep", "2": "hung", "3": "lost"},
    }
    found = {}
    for name in NAMES:
        for panel in panels(name):
            for mapped in panel["fieldConfig"]["defaults"].get("mappings", ()):
                found[panel["title"]] = {value: shown["text"] for value, shown in mapped["options"].items()}
            for override in panel["fieldConfig"]["overrides"]:
                for prop in override["properties"]:
                    if prop["id"] == "mappings" and override["matcher"]["options"] in ("State", "Settings"):
                        texts = {value: shown["text"] for value, shown in prop["value"][0]["options"].items()}
                        state = override["matcher"]["options"] == "State"
                        wanted = (
                            words["Cards that were lost, hung or asleep"]
                            if state
                            else {"0": "reload failed", "1": "ok"}
                        )
                        assert texts == wanted
    assert found == words


def test_states_and_refusals_are_told_in_words() -> None:
    """Every state has its number, and the tables of refused masks have the meaning and the advice of every code."""
    assert sorted(NUMBERED) == sorted(STATES)
    for name in ("fleets", "mapping"):
        (panel,) = [panel for panel in panels(name) if panel["title"] == "Refused masks" and panel["type"] == "table"]
        texts = {
            override["matcher"]["options"]: {code: shown["text"] for code, shown in prop["value"][0]["options"].items()}
            for override in panel["fieldConfig"]["overrides"]
            for prop in override["properties"]
            if prop["id"] == "mappings"
        }
        assert texts == {
            "Because": {code: entry.meaning for code, entry in REFUSALS.items()},
            "What to do": {code: entry.advice for code, entry in REFUSALS.items()},
        }


def test_sums_count_a_card_once() -> None:
    """Where panels add up or average readings, the rows of the fleets that share a card were taken together before."""
    readings = {family.name for family in catalog.READINGS.values()}
    seen = 0
    for path in queries.DASHBOARDS:
        for asked in queries.of_panels(path):
            named = {name for name, _ in queries.names(asked.expression).selected}
            if named & readings and re.search(r"\b(sum|avg|count)\b", asked.expression):
                seen += 1
                for name in named & readings:
                    bare = re.sub(
                        rf"max by \([^)]*\) \(((label_replace|rate|increase)\()?{name}\{{", "", asked.expression
                    )
                    assert f"{name}{{" not in bare, asked
    assert seen > 3


def test_what_is_provisioned() -> None:
    """Grafana's files of data sources and dashboards: their version, and the data source that the variable finds."""
    folder = queries.ROOT / "grafana" / "provisioning"
    source = yaml.safe_load((folder / "datasources" / "prometheus.yaml").read_text(encoding="utf-8"))
    provider = yaml.safe_load((folder / "dashboards" / "gpu-fleet-exporter.yaml").read_text(encoding="utf-8"))
    assert source["apiVersion"] == provider["apiVersion"] == 1
    assert [one["type"] for one in source["datasources"]] == ["prometheus"]
    scrape = yaml.safe_load((queries.ROOT / "prometheus" / "scrape.yaml").read_text(encoding="utf-8"))
    assert source["datasources"][0]["jsonData"]["timeInterval"] == scrape["global"]["scrape_interval"]
    assert [(one["type"], one["allowUiUpdates"]) for one in provider["providers"]] == [("file", False)]
