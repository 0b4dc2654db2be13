"""The runbook against the alerts, the refusals and the program that it tells of."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from exporter import arguments, catalog, config
from exporter.config import FleetSettings
from exporter.facts import FACTS
from exporter.refusals import REFUSALS
from tests import runbook_page

ROOT = Path(__file__).parent.parent
RULES = ROOT / "prometheus/rules"
TEXT = runbook_page.PATH.read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PARAGRAPHS = ["Meaning", "Check", "Cure"]
PLACEHOLDERS = {"PID": "1", "FLEET": "chat"}
NO_SETTINGS = {"for", "found", "refused"}  # a key of Prometheus's rules, and what `explain` writes in front of lines
NO_SERIES = {"gpu_uuid", "gpu_id", "gpu_vram_bad_pages"}  # a column of nvidia-smi, and files of the KFD and amdgpu


def rules(name: str, kind: str) -> list[dict[str, Any]]:
    """The rules of a file, in order: ``alert`` or ``record``."""
    groups = yaml.safe_load((RULES / f"{name}.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


ALERTS = rules("alerts", "alert")
THRESHOLDS = rules("thresholds", "record")


def without_fences(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def fenced(text: str) -> list[str]:
    """The lines of all blocks of code."""
    return [line for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.M | re.DOTALL) for line in block.splitlines()]


def codes(text: str) -> list[str]:
    """What stands between backticks, each on one line."""
    return [" ".join(code.replace("\\|", "|").split()) for code in re.findall(r"`([^`]+)`", without_fences(text))]


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    _, found, rest = f"\n{text}".partition(f"\n{heading}\n")
    assert found, heading
    return re.split(rf"^#{{1,{level}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def headings(text: str, marks: str) -> list[str]:
    return re.findall(rf"^{marks} (.+)$", without_fences(text), re.MULTILINE)


def slug(heading: str) -> str:
    """The anchor that GitHub makes of a heading that comes once."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """All of a page's; a heading that comes again has a number behind it."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in headings(text, "#{1,6}"):
        name = slug(heading)
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def paragraphs(text: str) -> list[str]:
    """The words in front of the paragraphs that have some."""
    return re.findall(r"^\*\*(\w+)\.\*\* \S", text, re.MULTILINE)


def rows(text: str) -> list[list[str]]:
    """The cells of a table's rows, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def test_the_made_part_is_current() -> None:
    """The refusals of docs/runbook.md are those of exporter/refusals.py; `python -m tests.runbook_page` writes them."""
    assert runbook_page.page(TEXT) == TEXT
    assert runbook_page.page(TEXT.replace("**Cure.** ", "**Cure.** Not. ")) != TEXT.replace(
        "**Cure.** ", "**Cure.** Not. "
    )


def test_every_alert_has_its_heading_and_no_other_has() -> None:
    """Under Alerts are the alerts of alerts.yaml in their order, and each one's runbook_url names its heading."""
    names = [rule["alert"] for rule in ALERTS]
    assert headings(section(TEXT, "## Alerts"), "###") == names
    urls = {rule["alert"]: rule["annotations"]["runbook_url"].partition("#") for rule in ALERTS}
    assert {page for page, _, _ in urls.values()} == {"docs/runbook.md"}
    by_reason = [name for name, (_, _, anchor) in urls.items() if anchor == "{{ $labels.reason }}"]
    assert by_reason == ["GpuFleetMaskRefused"]
    assert {name: anchor for name, (_, _, anchor) in urls.items() if name not in by_reason} == {
        name: slug(name) for name in names if name not in by_reason
    }


@pytest.mark.parametrize("name", [rule["alert"] for rule in ALERTS])
def test_every_alert_is_told_in_three_paragraphs(name: str) -> None:
    """Each alert has its meaning, what to check and the cure, in this order and once."""
    assert paragraphs(section(TEXT, f"### {name}")) == PARAGRAPHS


def test_the_table_of_alerts_is_that_of_the_rules() -> None:
    """Its rows have the alerts' names, severities and durations, in the order of alerts.yaml."""
    shown = [(cells[0], cells[1], cells[3]) for cells in rows(section(TEXT, "## The alerts"))]
    assert shown == [
        (f"[{rule['alert']}](#{slug(rule['alert'])})", rule["labels"]["severity"], rule.get("for", "at once"))
        for rule in ALERTS
    ]


def test_the_table_of_alerts_has_every_threshold_with_its_value() -> None:
    """The last cell names the thresholds that the alert compares with, and the values that thresholds.yaml has."""
    cells = {rule["alert"]: cell[-1] for rule, cell in zip(ALERTS, rows(section(TEXT, "## The alerts")), strict=True)}
    assert cells.pop("GpuThresholdMissing") == "all of these"
    for rule in ALERTS:
        if rule["alert"] in cells:
            used = set(re.findall(r"gpu_threshold_\w+", rule["expr"]))
            values = {re.sub(r"vector\((.+)\)", r"\1", each["expr"]) for each in THRESHOLDS if each["record"] in used}
            assert set(codes(cells[rule["alert"]])) == used
            assert set(re.findall(r"(?<![\w.])[\d.]*\d", cells[rule["alert"]])) == values
    assert {each["record"] for each in THRESHOLDS} == {code for cell in cells.values() for code in codes(cell)}


def test_every_refusal_has_its_heading_and_no_other_has() -> None:
    """Under Refusals is each code, whose anchor is the code itself, with its meaning, what to check and the cure."""
    text = section(TEXT, "## Refusals")
    assert headings(text, "###") == list(REFUSALS)
    for code in REFUSALS:
        assert slug(code) == code
        assert paragraphs(section(text, f"### {code}")) == PARAGRAPHS


def test_no_anchor_of_the_page_comes_twice() -> None:
    """No two headings of the runbook have one anchor, so that a runbook_url leads to one place."""
    names = [slug(heading) for heading in headings(TEXT, "#{1,6}")]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_every_fault_reason_has_a_row() -> None:
    """The table under GpuBackendDown has each reason that docs/metrics.md lists, in its order."""
    listed = codes(section((ROOT / "docs/metrics.md").read_text(), "## Reasons of a backend's faults"))
    assert "driver-mismatch" in listed
    found = rows(section(TEXT, "### GpuBackendDown"))
    assert [cells[0].strip("`") for cells in found] == listed
    assert all(len(cells) == 3 and all(cells) for cells in found)


def test_refusals_without_an_alert_are_told() -> None:
    """What GpuFleetMaskRefused leaves out is among the refusals without an alert, and these are all codes."""
    (expr,) = [rule["expr"] for rule in ALERTS if rule["alert"] == "GpuFleetMaskRefused"]
    left_out = re.findall(r'reason!~"([^"]+)"', expr)[0].split("|")
    told = [code for cells in rows(section(TEXT, "## Refusals without an alert")) for code in codes(cells[0])]
    assert set(left_out) <= set(told) <= set(REFUSALS)


def test_each_check_is_of_its_own() -> None:
    """No two codes have the same check, and none repeats a sentence of its advice or its meaning."""
    assert [text for text, count in Counter(entry.check for entry in REFUSALS.values()).items() if count > 1] == []
    for code, entry in REFUSALS.items():
        sentences = re.split(r"(?<=[.;]) ", entry.check)
        assert entry.check.endswith("."), code
        assert not any(sentence in (entry.meaning, *re.split(r"(?<=[.;]) ", entry.advice)) for sentence in sentences)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    """Each link to a file of this repository names one that exists, and an anchor that is a heading of it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", without_fences(page.read_text(encoding="utf-8"))):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            other = (page.parent / path).resolve() if path else page
            assert other.exists(), target
            if anchor:
                assert anchor in anchors(other.read_text(encoding="utf-8")), target


def test_the_anchors_are_those_that_github_makes() -> None:
    """Punctuation and the marks of code go, blanks become hyphens, and a heading that comes again is counted."""
    text = "# What the service may do, and what it may not\n## `gpu_info`\n## Why?\n```sh\n# none\n```\n## Why?\n"
    assert anchors(text) == {"what-the-service-may-do-and-what-it-may-not", "gpu_info", "why", "why-1"}


def commands() -> list[list[str]]:
    """The arguments of each call of the program that the page names."""
    lines = [*codes(TEXT), *fenced(TEXT)]
    calls = [re.match(r"(?:sudo )?gpu-fleet-exporter ([a-z-]+\b.*)", line) for line in lines]
    return [[PLACEHOLDERS.get(word, word) for word in shlex.split(call[1])] for call in calls if call]


def test_every_command_is_one_of_the_program() -> None:
    """Each call of gpu-fleet-exporter on the page is what its parser takes."""
    found = commands()
    assert {call[0] for call in found} == {"explain", "inventory", "check-config"}
    for call in found:
        assert arguments.parser().parse_args(call).command == call[0]


def test_every_setting_is_one_of_the_example() -> None:
    """Each settings key in code, followed by a colon or with its section, is one that config.example.yaml shows."""
    example = (ROOT / "config.example.yaml").read_text()
    known = config.keys()
    sections = {key.partition(".")[0] for key in known if "[]" not in key} & set(re.findall(r"^(\w+):", example, re.M))
    dotted = {code for code in codes(TEXT) if re.fullmatch(rf"(?:{'|'.join(sections)})\.\w+", code)}
    assert {"mapping.max_fleets", "sampling.deadline_seconds"} <= dotted <= set(known)
    bare = {match[1] for code in codes(TEXT) if (match := re.fullmatch(r"(\w+):", code))} - NO_SETTINGS
    assert (
        {"backends", "env", "reach"}
        <= bare
        <= {key.split("[]")[0] for key in known} | set(FleetSettings.__struct_fields__)
    )
    for key in (*bare, *(name.partition(".")[2] for name in dotted)):
        assert re.search(rf"(?:^|[\s#{{,-]){key}\b", example), key


def test_every_fact_is_one_of_the_program() -> None:
    """What the page tells to state as `known:` is a fact with one of its values."""
    stated = re.findall(r"known: \{(\w+): (\w+)\}", " ".join(TEXT.split()))
    assert stated
    assert all(value in FACTS[fact] for fact, value in stated)


def test_every_series_is_one_of_the_program_or_of_the_rules() -> None:
    """Each name of a series on the page is a family of the catalog or is recorded by the rules."""
    named = set(re.findall(r"\b(?:\w+:)?gpu_\w+(?::\w+)?\b", " ".join((*codes(TEXT), *fenced(TEXT))))) - NO_SERIES
    recorded = {rule["record"] for name in ("recording", "thresholds") for rule in rules(name, "record")}
    known = {family.name for family in catalog.FAMILIES}
    known |= {f"{name}_total" for name in known} | recorded | {"gpu_threshold_"}
    assert {"gpu_fleet_device_info", "device:gpu_temperature_celsius:max"} <= named <= known
