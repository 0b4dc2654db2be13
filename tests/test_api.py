"""``/api/v1/fleets``: valid by its schema, the same as the metrics, and JSON whatever a name or a mask holds."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter import catalog
from exporter.collectors import ReloadStatus, encoder_for, registry_of, render
from exporter.model import (
    BackendStatus,
    Binding,
    Device,
    DeviceKey,
    Fault,
    Fleet,
    FleetMapping,
    Hint,
    Inversion,
    Layer,
    Refusal,
    Resolved,
    Snapshot,
)
from exporter.refusals import REFUSALS
from exporter.web.report import as_json, report
from tests import schema_page
from tests.fakes.nvml import FakeNvml, Gpu, build_or_skip, equal_cards
from tests.harness import Daemon, Scrape, Start, parse
from tests.test_collectors import SCENES

ROOT = Path(__file__).parent.parent
SCHEMA = json.loads((ROOT / "docs" / "fleets.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
FAMILIES = [family.name for family in (*catalog.READINGS.values(), *catalog.USAGE.values())]
IDENTITY = ("vendor", "physical_index", "pci_bus_id", "uuid", "gpu_partition")
HOSTILE = "<script>alert(1)</script>\"&amp; 'x"
SETTINGS = """
fleets:
  - {name: chat, runtime: cuda, env: {CUDA_VISIBLE_DEVICES: "2,3", CUDA_DEVICE_ORDER: PCI_BUS_ID}}
  - {name: batch, runtime: cuda, env: {CUDA_VISIBLE_DEVICES: "3", CUDA_DEVICE_ORDER: PCI_BUS_ID}}
  - {name: refused, runtime: cuda, env: {CUDA_VISIBLE_DEVICES: "0"}}
  - {name: nothing, runtime: cuda, env: {CUDA_VISIBLE_DEVICES: ""}}
  - {name: "host", runtime: host}
"""


def answer(daemon: Daemon) -> dict[str, Any]:
    """The answer, which is valid by the schema."""
    response = daemon.request("/api/v1/fleets")
    assert response.status == 200
    return valid(response.body)


def valid(body: bytes) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(body)
    VALIDATOR.validate(facts)
    assert None not in list(leaves(facts))
    return facts


def leaves(value: Any) -> Iterator[Any]:
    """Everything in it that holds nothing else."""
    if isinstance(value, Mapping | list):
        for inside in value.values() if isinstance(value, Mapping) else value:
            yield from leaves(inside)
    else:
        yield value


def labels(facts: Mapping[str, Any], **more: str) -> dict[str, str]:
    """An entry's identity as the metrics have it."""
    return {name: str(facts[name]) for name in IDENTITY if facts.get(name, "") != ""} | more


def same(facts: Mapping[str, Any], scrape: Scrape) -> None:
    """Asserts that an answer and a page show the same, nothing more and nothing less."""
    bound, values, inverted, refusals = [], [], [], []
    for fleet in facts["fleets"]:
        for runtime in fleet["runtimes"]:
            named = {"fleet": fleet["name"], "runtime": runtime["runtime"]}
            inverted.append((named, float(runtime["inverted"])))
            if "refusal" in runtime:
                refusals.append(named | {"reason": runtime["refusal"]["code"]})
            for card in runtime["devices"]:
                if card["state"] == "gone":
                    continue
                own = labels(card, fleet=fleet["name"], fleet_index=str(card["fleet_index"]))
                bound.append(own | {"runtime": runtime["runtime"], "evidence": card["evidence"]})
                given = card.get("readings", {}) | card.get("usage", {})
                values += [(family, own, value) for family, value in given.items()]
    assert_equal(bound, [each.labels for each in scrape.of("gpu_fleet_device_info")])
    assert_equal(values, [(name, each.labels, each.value) for name in FAMILIES for each in scrape.of(name)])
    assert_equal(inverted, [(each.labels, each.value) for each in scrape.of("gpu_fleet_mask_inverted")])
    assert_equal(refusals, [each.labels for each in scrape.of("gpu_fleet_mask_refusal_info")])
    states = [labels(card, state=card["state"]) for card in facts["devices"]]
    assert_equal(states, [each.labels for each in scrape.of("gpu_exporter_device_state") if each.value == 1])
    ups = [({"vendor": each["vendor"]}, float(each["up"])) for each in facts["backends"]]
    assert_equal(ups, [(each.labels, each.value) for each in scrape.of("gpu_exporter_backend_up")])
    assert facts["fleets_left_out"] == scrape.value("gpu_exporter_fleets_left_out")
    assert facts["settings"]["last_reload_successful"] == bool(
        scrape.value("gpu_exporter_config_last_reload_successful")
    )


def assert_equal(ours: list[Any], theirs: list[Any]) -> None:
    """Asserts that the two hold the same, in any order."""
    assert sorted(map(repr, map(ordered, ours))) == sorted(map(repr, map(ordered, theirs)))


def ordered(value: Any) -> Any:
    if isinstance(value, dict):
        return sorted(value.items())
    return [ordered(each) for each in value] if isinstance(value, tuple) else value


def test_the_schema_is_current() -> None:
    """docs/fleets.schema.json is what the structs say, and a schema; `make docs` writes it."""
    assert (ROOT / "docs" / "fleets.schema.json").read_text(encoding="utf-8") == schema_page.page()
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Four cards, the last of another model with a hostile name, the second lost, and fleets of every kind."""
    directory = tmp_path_factory.mktemp("api")
    fake = FakeNvml(directory, build_or_skip(directory / "lib"))
    *others, last = equal_cards(4)
    fake.write([*others, renamed(last, HOSTILE)])
    with Daemon(directory, fake.environment(), SETTINGS, ["--web.enable-lifecycle"]) as running:
        running.scrape_until(lambda page: len(page.of("gpu_fleet_device_info")) == 7)
        fake.write([*others, renamed(last, HOSTILE)], lines=["lost 1"])
        running.scrape_until(lambda page: bool(page.of("gpu_exporter_device_state", state="lost")))
        yield running


def renamed(gpu: Gpu, name: str) -> Gpu:
    return dataclasses.replace(gpu, name=name.replace('"', ""))


@pytest.mark.e2e
def test_the_answer_is_what_the_metrics_show(unequal: Daemon) -> None:
    """Bindings, readings, states, refusals and backends are the page's, and neither has more."""
    scrape = unequal.scrape_until(lambda page: page.state(physical_index="1") == "lost")
    facts = answer(unequal)
    same(facts, scrape)
    assert len(scrape.of("gpu_utilization_percent")) == 6
    lost = next(card for card in facts["devices"] if card["state"] == "lost")
    assert "readings" not in lost
    assert lost["used_by"] == [{"fleet": "host", "runtime": "host", "fleet_index": 1}]
    shared = next(card for card in facts["devices"] if card["physical_index"] == 3)
    assert [(use["fleet"], use["fleet_index"]) for use in shared["used_by"]] == [
        ("chat", 1),
        ("batch", 0),
        ("host", 3),
    ]
    assert shared["name"] == HOSTILE.replace('"', "")


@pytest.mark.e2e
def test_a_refusal_says_why_and_what_to_do_and_shows_no_card(unequal: Daemon) -> None:
    """A refused fleet has the reason, its meaning and the advice, the masks as they were read, and no device."""
    (refused,) = (fleet for fleet in answer(unequal)["fleets"] if fleet["name"] == "refused")
    (runtime,) = refused["runtimes"]
    code = REFUSALS["order-unknown"]
    assert runtime["inverted"] is False
    assert runtime["devices"] == []
    refusal = runtime["refusal"]
    assert (refusal["code"], refusal["meaning"]) == ("order-unknown", code.meaning)
    assert (refusal["advice"], refusal["check"]) == (code.advice, code.check)
    assert "CUDA_DEVICE_ORDER" in refusal["detail"]
    assert [(mask["variable"], mask["text"]) for mask in runtime["masks"]] == [("CUDA_VISIBLE_DEVICES", "0")]


@pytest.mark.e2e
def test_the_answer_is_kept_by_nobody(unequal: Daemon) -> None:
    """It is JSON, of now, and takes GET and HEAD alone."""
    headers = unequal.request("/api/v1/fleets").headers
    assert headers["content-type"] == "application/json"
    assert headers["cache-control"] == "no-store"
    assert unequal.request("/api/v1/fleets", "HEAD").status == 200
    assert unequal.request("/api/v1/fleets", "POST").status == 405


@pytest.mark.e2e
def test_settings_that_did_not_load_are_told(start: Start, nvml: FakeNvml) -> None:
    """After a reload that failed the answer says so, and the earlier settings' fleets are there."""
    daemon = start(nvml.environment(), "fleets: [{name: host, runtime: host}]", ["--web.enable-lifecycle"])
    before = answer(daemon)["settings"]
    assert before["last_reload_successful"] is True
    daemon.config_path.write_text("fleets: 7", encoding="utf-8")
    assert daemon.request("/-/reload", "POST").status == 500
    after = answer(daemon)
    assert after["settings"] == before | {"last_reload_successful": False}
    assert [fleet["name"] for fleet in after["fleets"]] == ["host"]


@pytest.mark.e2e
def test_masks_that_are_no_text_are_told_as_bytes(start: Start, nvml: FakeNvml, tmp_path: Path) -> None:
    """A live process's mask that is not UTF-8 comes with the byte's number in its place, and the answer is JSON."""
    environment = {b"CUDA_VISIBLE_DEVICES": b"0,\xff\xe9<i>"}
    with subprocess.Popen(["sleep", "60"], env={**os.environb, **environment}) as process:
        try:
            (tmp_path / "pid").write_text(str(process.pid), encoding="utf-8")
            daemon = start(nvml.environment(), f"fleets: [{{name: live, pid_file: {tmp_path}/pid, runtime: cuda}}]")
            (live,) = answer(daemon)["fleets"]
        finally:
            process.kill()
    masks = {mask["variable"]: mask.get("text") for mask in live["runtimes"][0]["masks"]}
    assert masks["CUDA_VISIBLE_DEVICES"] == "0,\\udcff\\udce9<i>"
    assert live["seen"]


@pytest.mark.parametrize("name", sorted(SCENES))
def test_every_scene_is_what_the_metrics_show(name: str) -> None:
    """Hosts with parts, sleeping cards, without a backend: each has an answer by the schema, and the same page."""
    snapshot, reload = SCENES[name](), ReloadStatus(False, 0.0)
    encoder, _ = encoder_for("text/plain")
    same(valid(as_json(report(snapshot, reload))), parse(render(registry_of(snapshot, reload), encoder).decode()))


def test_a_device_that_left_is_told_as_gone() -> None:
    """An index whose device is not on the host any more is there, without readings, with what it was bound to."""
    facts = valid(as_json(report(hostile("gone"), ReloadStatus(True, 1.0))))
    first, second = facts["fleets"][0]["runtimes"][0]["devices"]
    assert (first["fleet_index"], first["state"]) == (0, "ok")
    assert second == {
        "vendor": "nvidia",
        "fleet_index": 1,
        "evidence": "proven",
        "state": "gone",
        "identity": "GPU-gone",
    }


def hostile(text: str) -> Snapshot:
    """A snapshot that has the text wherever one comes from outside."""
    key, gone = DeviceKey("nvidia", f"GPU-{text}-0"), DeviceKey("nvidia", f"GPU-{text}")
    device = Device(key=key, physical_index=0, pci_bus_id=text, uuid=text, name=text, partition=text)
    layers = (Layer(text, text, 1, text), Layer(text, None, None))
    inverted = Inversion((Resolved(key, "proven", 0), Resolved(gone, "proven", 1)), layers, (text,))
    return Snapshot(
        backends=(
            BackendStatus(
                vendor="nvidia",
                up=False,
                duration_seconds=0.1,
                fault=Fault("hung", text),
                faults_total={"hung": 2},
                driver_version=text,
                hints=(Hint("code", text),),
            ),
        ),
        devices=(device,),
        states={key: "ok"},
        readings={key: {"utilization": {(): 3.0}}},
        driver_versions={"nvidia": text},
        mappings=(
            FleetMapping(text, "cuda", inverted),
            FleetMapping(f"{text}2", "cuda", Refusal("mps", text, layers)),
        ),
        bindings=(Binding(text, "cuda", 0, "proven", device),),
        fleets=(Fleet(name=text, runtimes=("cuda",)),),
        left_out=3,
    )


@given(st.text(st.characters(exclude_categories=())))
@settings(max_examples=300, deadline=None)
def test_no_text_breaks_the_answer(text: str) -> None:
    """Any text at all, with lone surrogates and controls, wherever one can come from outside, ends in valid JSON."""
    facts = valid(as_json(report(hostile(text), ReloadStatus(True, 1.0))))
    said = text.encode("utf-8", "backslashreplace").decode()
    assert [fleet["name"] for fleet in facts["fleets"]] == [said, f"{said}2"]
    assert facts["backends"][0]["fault"].get("detail", "") == said
