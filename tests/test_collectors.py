"""Snapshots as pages: golden files byte for byte, and what every page must be.

``UPDATE_GOLDEN=1`` writes the golden files anew; look at each difference before accepting it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.samples import Sample

from exporter import catalog
from exporter.attribution import attribute
from exporter.binding import Bound, Known, bind
from exporter.collectors import ReloadStatus, encoder_for, registry_of, render
from exporter.model import (
    EVIDENCE,
    FAULT_REASONS,
    STATES,
    BackendStatus,
    Device,
    DeviceKey,
    DeviceState,
    Fault,
    Fleet,
    Reading,
    Snapshot,
    State,
    VendorOutcome,
    VendorSample,
)
from tests import pages
from tests.strategies import GIB, PCI_ORDER, Case, asleep, board, card, cards, cases

GOLDEN = Path(__file__).parent / "data" / "golden"
LOADED = ReloadStatus(True, 1767225600.0)
FORMATS = {"prom": "text/plain;version=0.0.4", "openmetrics": "application/openmetrics-text;version=1.0.0"}

CHAT = Fleet(name="chat", runtimes=("cuda",), env=PCI_ORDER | {"CUDA_VISIBLE_DEVICES": "2,3"})
HOST = Fleet(name="host", runtimes=("host",))


# --- the snapshots


def values_of(device: Device) -> Mapping[str, float]:
    """Readings in which each value tells which device it is of; an instance has memory alone."""
    number, total = device.physical_index or 0, device.memory_total_bytes or 0
    free = max(0, total - (number + 1) * GIB)
    memory = {"memory_free": free, "memory_used": (total - free) // 2, "memory_total": total}
    if device.parent:
        return memory
    return {"temperature": 40 + number} | memory | ({} if device.mig_mode else {"utilization": 10 * (number + 1)})


def cycle(devices: Sequence[Device], states: Mapping[str, State] | None = None) -> VendorOutcome:
    """A cycle of NVIDIA's backend; a device that is not ok gives no values, and one without an index is asleep."""
    held: dict[DeviceKey, State] = {each.key: "asleep" for each in devices if each.physical_index is None}
    held |= {card(letter).key: state for letter, state in (states or {}).items()}
    lost = [key for key, state in held.items() if state == "lost"]
    sample = VendorSample(
        vendor="nvidia",
        driver_version="575.57.08",
        whole=True,
        devices=tuple(devices),
        states=tuple(DeviceState(device.key, held.get(device.key, "ok")) for device in devices),
        readings=tuple(
            Reading(metric, device.key, value)
            for device in devices
            if device.key not in held
            for metric, value in values_of(device).items()
        ),
        faults=tuple(Fault("device-lost", "GPU is lost", key) for key in lost),
    )
    return VendorOutcome(vendor="nvidia", sample=sample, duration_seconds=0.0125)


def snapshot_of(fleets: Sequence[Fleet], *outcomes: VendorOutcome) -> Snapshot:
    """The snapshot of a first cycle: bound, attributed, and each fault counted once."""
    mappings, _, _ = bind(fleets, outcomes, Bound(), Known(EVIDENCE))
    return attribute(outcomes, mappings, tuple(map(status_of, outcomes)))


def status_of(outcome: VendorOutcome) -> BackendStatus:
    faults = [outcome.fault] if outcome.fault else outcome.sample.faults if outcome.sample else ()
    counts = dict.fromkeys(FAULT_REASONS, 0) | dict.fromkeys((fault.reason for fault in faults), 1)
    return BackendStatus(
        vendor=outcome.vendor,
        up=outcome.sample is not None,
        duration_seconds=outcome.duration_seconds,
        fault=outcome.fault,
        faults_total=counts,
    )


def device(plain: Device) -> Device:
    """The device as NVIDIA's backend reports it: a card has a temperature sensor, an instance has none."""
    return plain if plain.parent else msgspec.structs.replace(plain, temperature_sensor="gpu")


def equal_cards() -> Snapshot:
    """Four equal cards, of which a fleet has 2 and 3."""
    return snapshot_of([CHAT], cycle(list(map(device, cards("abcd")))))


def refused() -> Snapshot:
    """Two unequal cards in an unknown order: the fleet is refused; the host's own fleet shows both."""
    unordered = Fleet(name="chat", runtimes=("cuda",), env={"CUDA_VISIBLE_DEVICES": "1"})
    return snapshot_of([unordered, HOST], cycle([device(card("a")), device(card("b", name='NVIDIA "A100" \\ 40GB'))]))


def mig() -> Snapshot:
    """A board in MIG mode and a whole card: a fleet has one instance, the host's own fleet has everything."""
    devices = list(map(device, (*board("a", (1, 0), (9, 0)), card("b"))))
    instance = Fleet(name="batch", runtimes=("cuda",), env={"CUDA_VISIBLE_DEVICES": devices[2].uuid})
    return snapshot_of([instance, HOST], cycle(devices))


def lost() -> Snapshot:
    """Four cards of which the fleet's first is lost, and another was asleep from the start."""
    devices = list(map(device, (card("a"), asleep(card("b")), card("c"), card("d"))))
    return snapshot_of([CHAT], cycle(devices, {"c": "lost"}))


def down() -> Snapshot:
    """The backend is down: no device, and the fleets are refused."""
    fault = Fault("driver-mismatch", "the library is newer than the driver")
    return snapshot_of([CHAT, HOST], VendorOutcome(vendor="nvidia", fault=fault, duration_seconds=0.25))


SCENES: dict[str, Callable[[], Snapshot]] = {
    "equal_cards": equal_cards,
    "refused": refused,
    "mig": mig,
    "lost": lost,
    "down": down,
}


def page_of(snapshot: Snapshot, form: str = "prom", names: Sequence[str] = ()) -> bytes:
    """The page without the process's own families."""
    return render(registry_of(snapshot, LOADED, process=False), encoder_for(FORMATS[form])[0], names)


@pytest.fixture(params=SCENES.values(), ids=list(SCENES), scope="module")
def scene(request: pytest.FixtureRequest) -> Snapshot:
    snapshot = request.param()
    assert isinstance(snapshot, Snapshot)
    return snapshot


@pytest.fixture(params=list(FORMATS))
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- golden pages


@pytest.mark.parametrize("name", SCENES)
def test_golden_page(name: str, form: str) -> None:
    """The page of the scene is the golden file, byte for byte but for Python's version."""
    page = re.sub(
        rb'python_version="[^"]*",version="[^"]*"', b'python_version="X",version="X"', page_of(SCENES[name](), form)
    )
    path = GOLDEN / f"{name}.{form}"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_bytes(page)
    assert page == path.read_bytes()


def test_every_golden_page_has_a_scene() -> None:
    """No golden file is left behind."""
    assert {path.name for path in GOLDEN.iterdir()} == {f"{name}.{form}" for name in SCENES for form in FORMATS}


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.prom")), ids=lambda path: path.stem)
def test_promtool_accepts_the_page(path: Path) -> None:
    """``promtool check metrics`` has nothing to say."""
    pages.promtool(path.read_bytes())


# --- what every page must be


def test_a_page_is_as_every_page_must_be(scene: Snapshot, form: str) -> None:
    """Both parsers read the page; no series comes twice, no label is Prometheus's own, every value has its unit."""
    names = {family.name for family in pages.check(page_of(scene, form))}
    always = [
        family for family in catalog.FAMILIES if family not in (*catalog.READINGS.values(), *catalog.USAGE.values())
    ]
    assert {family.name.removesuffix("_total") for family in always} <= names


def test_both_formats_say_the_same(scene: Snapshot) -> None:
    """The plain page and the OpenMetrics page have the same series with the same values."""
    plain, openmetrics = (pages.samples_of(page_of(scene, form)) for form in FORMATS)
    assert {pages.series_of(each): each.value for each in plain} == {
        pages.series_of(each): each.value for each in openmetrics
    }


@settings(max_examples=settings().max_examples // 4)  # a page takes longer to parse than a mask
@given(cases(mig=True))
def test_any_pages_are_as_every_page_must_be(case: Case) -> None:
    """Whatever the host, the masks and who sleeps, the page is sound, and every reading has a row of its binding."""
    inventory = case.rack.put_to_sleep(case.chosen[:3])
    fleets = [Fleet(name="chat", runtimes=("cuda",), env=case.env), Fleet(name="all", runtimes=("cuda",)), HOST]
    snapshot = snapshot_of(fleets, cycle([device for device in inventory.devices if _has_its_board(device, case)]))
    page = page_of(snapshot)
    pages.check(page)
    rows = {_place(sample) for sample in pages.samples_of(page, "gpu_fleet_device_info")}
    assert {_place(sample) for sample in pages.samples_of(page, "gpu_memory_total_bytes")} <= rows


def _has_its_board(device: Device, case: Case) -> bool:
    return device.parent not in {each.key for each in case.chosen[:3]}


def _place(sample: Sample) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in pages.series_of(sample)[1] if name not in ("runtime", "evidence"))


@pytest.mark.parametrize(
    "page",
    [
        'gpu_fleet_mask_inverted{fleet="a"} 1\ngpu_fleet_mask_inverted{fleet="a"} 1\n',
        'gpu_fleet_mask_inverted{fleet="a",runtime="r"} 1\ngpu_fleet_mask_inverted{runtime="r",fleet="a"} 0\n',
        "gpu_memory_free_bytes NaN\n",
        "gpu_memory_free_bytes +Inf\n",
        "gpu_memory_free_bytes -1\n",
        'gpu_memory_free_bytes{instance="a"} 1\n',
        'gpu_memory_free_bytes{uuid=""} 1\n',
        'gpu_fleet_mask_inverted{fleet="a"} 7\n',
        'gpu_info{uuid="a"} 0\n',
        'gpu_exporter_device_state{uuid="a",state="ok"} 1\n',
        "gpu_unheard_of_bytes 1\n",
    ],
    ids=lambda page: page[:40],
)
def test_the_check_finds(page: str) -> None:
    """The check of pages fails on a page with a mistake."""
    known = {family.name: family for family in catalog.FAMILIES}
    name = re.split(r"[{ ]", page)[0]
    head = f"# HELP {name} {known[name].help}\n# TYPE {name} gauge\n" if name in known else ""
    with pytest.raises((AssertionError, KeyError)):
        pages.check((head + page).encode())


# --- what is on a page


def names_of(page: bytes) -> set[str]:
    return {sample.name for sample in pages.samples_of(page)}


def test_a_masked_fleet_has_both_numbers() -> None:
    """Under the mask 2,3 the fleet's index 0 is the host's 2 and 1 is 3, and nobody reads 0 and 1."""
    page = page_of(equal_cards())
    found = pages.samples_of(page, "gpu_utilization_percent")
    assert {(each.labels["fleet_index"], each.labels["physical_index"]): each.value for each in found} == {
        ("0", "2"): 30,
        ("1", "3"): 40,
    }
    assert len(pages.samples_of(page, "gpu_info")) == 4


def test_a_refused_fleet_has_no_readings() -> None:
    """A refusal takes the fleet's own series away, gives its reason, and leaves the host's fleet alone."""
    page = page_of(refused())
    fleets = {each.labels["fleet"] for each in pages.samples_of(page, "gpu_memory_free_bytes")}
    assert fleets == {"host"}
    (refusal,) = pages.samples_of(page, "gpu_fleet_mask_refusal_info")
    assert refusal.labels == {"fleet": "chat", "runtime": "cuda", "reason": "order-unknown"}
    inverted = {each.labels["fleet"]: each.value for each in pages.samples_of(page, "gpu_fleet_mask_inverted")}
    assert inverted == {"chat": 0, "host": 1}


def test_an_instance_carries_its_boards_index() -> None:
    """A MIG instance has its own UUID and partition, and its board's physical index and address."""
    page = page_of(mig())
    (total,) = [each for each in pages.samples_of(page, "gpu_memory_total_bytes") if each.labels["fleet"] == "batch"]
    assert (total.labels["gpu_partition"], total.labels["physical_index"], total.value) == ("9/0", "0", 10 * GIB)
    assert total.labels["uuid"].startswith("MIG-")
    assert total.labels["pci_bus_id"] == "0000:21:00.0"
    busy = {each.labels["physical_index"] for each in pages.samples_of(page, "gpu_utilization_percent")}
    assert busy == {"1"}


@pytest.mark.parametrize("state", [state for state in STATES if state != "ok"])
def test_a_card_that_is_not_ok(state: State) -> None:
    """A card that fails keeps its rows of identity, mapping and state, and has no value."""
    page = page_of(snapshot_of([CHAT], cycle(cards("abcd"), {"c": state})))
    assert {each.labels["fleet_index"] for each in pages.samples_of(page, "gpu_temperature_celsius")} == {"1"}
    assert {each.labels["fleet_index"] for each in pages.samples_of(page, "gpu_fleet_device_info")} == {"0", "1"}
    held = {
        each.labels["physical_index"]: each.labels["state"]
        for each in pages.samples_of(page, "gpu_exporter_device_state")
        if each.value
    }
    assert held == {"0": "ok", "1": "ok", "2": state, "3": "ok"}


def test_a_sleeping_card_has_no_made_up_number() -> None:
    """A card asleep from the start has its address, and neither an index nor a UUID nor a value."""
    page = page_of(snapshot_of([HOST], cycle((card("a"), asleep(card("b"))))))
    (info,) = [each for each in pages.samples_of(page, "gpu_info") if "uuid" not in each.labels]
    assert info.labels == {
        "vendor": "nvidia",
        "pci_bus_id": "0000:41:00.0",
        "name": "NVIDIA L40S",
        "driver_version": "575.57.08",
    }


def test_a_card_that_two_fleets_share() -> None:
    """A shared card comes once for each fleet, with the same values and labels that count it once."""
    other = Fleet(name="embed", runtimes=("cuda",), env={"CUDA_VISIBLE_DEVICES": card("c").uuid})
    found = pages.samples_of(page_of(snapshot_of([CHAT, other], cycle(cards("abcd")))), "gpu_utilization_percent")
    shared = [each for each in found if each.labels["pci_bus_id"] == card("c").pci_bus_id]
    assert {each.labels["fleet"] for each in shared} == {"chat", "embed"}
    assert len({each.value for each in shared}) == 1


def test_a_backend_that_is_down() -> None:
    """A page without a backend has its row, its reason and the count, and no device."""
    page = page_of(down())
    assert [each.value for each in pages.samples_of(page, "gpu_exporter_backend_up")] == [0]
    (fault,) = pages.samples_of(page, "gpu_exporter_backend_fault_info")
    assert fault.labels == {"vendor": "nvidia", "reason": "driver-mismatch"}
    counts = pages.samples_of(page, "gpu_exporter_backend_faults_total")
    assert {each.labels["reason"] for each in counts} == set(FAULT_REASONS)
    assert {each.labels["reason"] for each in counts if each.value} == {"driver-mismatch"}
    assert names_of(page) & {"gpu_info", "gpu_memory_free_bytes", "gpu_exporter_device_state"} == set()


def test_a_host_without_any_vendor() -> None:
    """Without a backend there is a page: the fleet as refused, and the exporter itself."""
    page = page_of(snapshot_of([CHAT]))
    pages.check(page)
    assert "gpu_exporter_backend_up" not in names_of(page)
    assert names_of(page) >= {"gpu_fleet_mask_refusal_info", "gpu_exporter_build_info"}


def test_settings_that_were_not_loaded() -> None:
    """A failed reload shows as 0 beside the time of the settings in force."""
    failed = ReloadStatus(False, 1.5)
    page = render(registry_of(equal_cards(), failed, process=False), encoder_for("")[0])
    (successful,) = pages.samples_of(page, "gpu_exporter_config_last_reload_successful")
    (loaded,) = pages.samples_of(page, "gpu_exporter_config_last_reload_success_timestamp_seconds")
    assert (successful.value, loaded.value) == (0, 1.5)


@pytest.mark.parametrize(
    "text", ['a"b', "a\\b", "a\nb", "\u00e4\u2122", "{}", "x" * 10_000], ids=lambda text: ascii(text)[1:9]
)
def test_odd_names_come_through(text: str, form: str) -> None:
    """Quotes, backslashes, line breaks and other scripts in a card's name are what a parser reads back."""
    page = page_of(snapshot_of([HOST], cycle([card("a", name=text)])), form)
    pages.check(page)
    assert [each.labels["name"] for each in pages.samples_of(page, "gpu_info")] == [text]


def test_values_of_every_size(form: str) -> None:
    """Large and small values are read back as they were."""
    devices = cards("abc")
    outcome = cycle(devices)
    assert outcome.sample
    values = dict(zip((each.key for each in devices), (0.0, 0.1, 2.0**53 - 1), strict=True))
    readings = tuple(Reading("memory_free", key, value) for key, value in values.items())
    changed = msgspec.structs.replace(outcome, sample=msgspec.structs.replace(outcome.sample, readings=readings))
    found = pages.samples_of(page_of(snapshot_of([HOST], changed), form), "gpu_memory_free_bytes")
    assert {DeviceKey("nvidia", each.labels["uuid"]): each.value for each in found} == values


def test_the_process_itself() -> None:
    """With the parent's own families the page is still sound; without them nothing tells of the process."""
    page = render(registry_of(equal_cards(), LOADED), encoder_for("")[0])
    pages.check(page)
    assert "process_resident_memory_bytes" in names_of(page)
    assert not any(name.startswith("process_") for name in names_of(page_of(equal_cards())))


# --- name[]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["gpu_info"], {"gpu_info"}),
        (["gpu_exporter_backend_faults_total"], {"gpu_exporter_backend_faults_total"}),
        (["gpu_info", "gpu_fleet_mask_inverted"], {"gpu_info", "gpu_fleet_mask_inverted"}),
        (["gpu_info", "gpu_info", "unheard_of"], {"gpu_info"}),
        (["unheard_of"], set()),
        (["gpu_fleet_mask_refusal_info"], set()),
        (["gpu_*", "", "\ud800", "x" * 100_000], set()),
        ([family.name for family in catalog.FAMILIES], names_of(page_of(equal_cards()))),
    ],
    ids=["one", "counter", "two", "unknown-beside", "unknown", "without-samples", "odd", "all"],
)
def test_names_narrow_the_page(names: list[str], expected: set[str], form: str) -> None:
    """``name[]`` leaves the samples of those names and nothing else."""
    page = page_of(equal_cards(), form, names)
    pages.check(page)
    assert names_of(page) == expected
    everything = {pages.series_of(each): each.value for each in pages.samples_of(page_of(equal_cards(), form))}
    narrowed = {pages.series_of(each): each.value for each in pages.samples_of(page)}
    assert narrowed == {series: value for series, value in everything.items() if series[0] in expected}


# --- formats

PLAIN = "text/plain; version=0.0.4; charset=utf-8"
PLAIN_1 = "text/plain; version=1.0.0; charset=utf-8; escaping=underscores"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores"


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        *(("", PLAIN), ("*/*", PLAIN), ("text/*", PLAIN), ("text/plain", PLAIN), ("text/plain;version=0.0.4", PLAIN)),
        *(("text/plain;version=1.0.0", PLAIN_1), ("application/openmetrics-text;version=1.0.0", OPENMETRICS)),
        *(("application/openmetrics-text", OPENMETRICS), ("Application/OpenMetrics-Text ; Version=1.0.0", OPENMETRICS)),
        # versions that are not spoken
        *((f"application/openmetrics-text;version={each}", PLAIN) for each in ("0.0.1", "2.0.0", "1", "x", "1.0.0.0")),
        *((f"text/plain;version={each}", PLAIN) for each in ("0.0.3", "2.0.0", "", "x", "9" * 5000)),
        ("application/openmetrics-text;version=2.0.0,text/plain;version=1.0.0;q=0.1", PLAIN_1),
        # preferences
        ("application/openmetrics-text;q=0.1,text/plain;q=0.2", PLAIN),
        ("text/plain;q=0.1,application/openmetrics-text;q=0.2", OPENMETRICS),
        ("application/openmetrics-text,text/plain", OPENMETRICS),
        ("text/plain,application/openmetrics-text", PLAIN),
        ("application/openmetrics-text;q=0", PLAIN),
        ("application/openmetrics-text;q=0.0,text/plain;version=1.0.0;q=0.001", PLAIN_1),
        # what clients send: Prometheus 2, Prometheus 3, the OpenTelemetry collector, a browser, curl
        (
            "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
            "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
            OPENMETRICS,
        ),
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
            "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
            "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
            OPENMETRICS,
        ),
        ("text/plain;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.5,*/*;q=0.2", PLAIN_1),
        ("application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited,*/*;q=0.1", PLAIN),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8", PLAIN),
        # what nobody should send
        *((each, PLAIN) for each in (",", ";", "=", ";;=;,", "q=1", "text/html", "application/json", "\x00", "\ud800")),
        *((f"application/openmetrics-text;q={each}", PLAIN) for each in ("x", "nan", "-1", "", "0x1", "1,5")[:3]),
        *((f"{each}/{each}", PLAIN) for each in ("x" * 100_000, "\uff11", "*")),
        ("," * 100_000, PLAIN),
    ],
    ids=lambda text: ascii(text[:48])[1:-1] or "empty",
)
def test_negotiation(accept: str, expected: str) -> None:
    """An Accept header has the most wanted format that is spoken here, and the plain one when in doubt."""
    encoder, content_type = encoder_for(accept)
    assert content_type == expected
    page = render(registry_of(equal_cards(), LOADED, process=False), encoder)
    assert page.endswith(b"# EOF\n") == content_type.startswith("application/openmetrics-text")


_parts = st.sampled_from(
    (
        "application/openmetrics-text",
        "text/plain",
        "*/*",
        ",",
        ";",
        "=",
        "q",
        "version",
        "1.0.0",
        "0.0.4",
        "q=nan",
        "q=1e999",
    )
)


@given(st.one_of(st.text(), st.lists(st.one_of(_parts, st.text(max_size=3)), max_size=12).map("".join)))
def test_any_header_has_a_format(accept: str) -> None:
    """No header raises, and what is answered is one of the three formats."""
    assert encoder_for(accept)[1] in (PLAIN, PLAIN_1, OPENMETRICS)


# --- the catalog


def test_the_registry_knows_the_names_beforehand(scene: Snapshot) -> None:
    """Each collector describes what it collects, in every scene, but for readings that nobody gave; and these families
    are the catalog's.
    """
    described: list[Any] = []
    readings = {family.name.removesuffix("_total") for family in (*catalog.READINGS.values(), *catalog.USAGE.values())}
    collectors: list[Any] = list(registry_of(scene, LOADED, process=False)._collector_to_names)
    for collector in collectors:
        names = [(family.name, family.type, family.documentation) for family in collector.describe()]
        collected = [(family.name, family.type, family.documentation) for family in collector.collect()]
        assert [each for each in names if each in collected or each[0] not in readings] == collected
        described += names
    kinds = {
        (family.name.removesuffix("_total") if family.kind == "counter" else family.name) for family in catalog.FAMILIES
    }
    assert {name for name, _, _ in described} == kinds
    assert len(described) == len(catalog.FAMILIES)
