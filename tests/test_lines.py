"""A page made of lines is, byte for byte, what ``prometheus_client`` gives for the same snapshot."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter import catalog
from exporter.collectors import ReloadStatus, encoder_for, end_of_page, registry_of, render
from exporter.lines import Labels, Memo, lines
from exporter.model import (
    FAULT_REASONS,
    STATES,
    BackendStatus,
    Binding,
    Device,
    DeviceKey,
    Fault,
    FleetMapping,
    Hint,
    Inversion,
    Refusal,
    Snapshot,
)
from exporter.web.exposition import Exposition

FORMATS = (
    "",
    "text/plain;version=1.0.0;escaping=allow-utf-8",
    "application/openmetrics-text;version=1.0.0",
)
RELOADS = (ReloadStatus(True, 1767225600.25), ReloadStatus(False, 0.0))

texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.text('\\"\n{}=, aé', max_size=8),
    st.sampled_from(("nvidia", "0000:21:00.0", "GPU-a", "chat")),
)
numbers = st.one_of(
    st.floats(),
    st.integers(0, 2**60).map(float),
    st.sampled_from((0.0, -0.0, 1e6, math.nextafter(1e6, 0), -1e6, 1e15, 1e16, 1e17, 1e22, 5e-324, math.inf)),
)


@st.composite
def devices(draw: st.DrawFn) -> Device:
    """Any device, with any text anywhere."""
    return Device(
        key=DeviceKey(draw(texts), draw(texts)),
        physical_index=draw(st.one_of(st.none(), st.integers(0, 99))),
        pci_bus_id=draw(texts),
        uuid=draw(texts),
        name=draw(texts),
        partition=draw(texts),
        temperature_sensor=draw(texts),
    )


def _values(family: catalog.Family) -> st.SearchStrategy[Mapping[tuple[str, ...], float]]:
    """A value, or some by the family's own labels."""
    own = st.tuples(*(texts for _ in family.own))
    return st.dictionaries(own, numbers, min_size=1, max_size=3)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Any snapshot, also one that no host has."""
    found = draw(st.lists(devices(), max_size=4, unique_by=lambda device: device.key))
    keys = [device.key for device in found]
    metrics = st.lists(st.sampled_from(sorted(catalog.READINGS)), unique=True)
    readings = {key: {metric: draw(_values(catalog.READINGS[metric])) for metric in draw(metrics)} for key in keys}
    bindings = [
        Binding(draw(texts), draw(texts), draw(st.integers(0, 99)), "proven", device)
        for device in found
        for _ in range(draw(st.integers(0, 2)))
    ]
    outcomes = st.one_of(st.just(Inversion(())), st.builds(Refusal, texts, texts))
    backends = st.builds(
        BackendStatus,
        vendor=texts,
        up=st.booleans(),
        duration_seconds=numbers,
        fault=st.one_of(st.none(), st.builds(Fault, texts, texts)),
        faults_total=st.dictionaries(st.sampled_from(FAULT_REASONS), st.integers(0, 2**40)),
        hints=st.lists(st.builds(Hint, texts, texts), max_size=2).map(tuple),
    )
    return Snapshot(
        backends=tuple(draw(st.lists(backends, max_size=2))),
        devices=tuple(found),
        states={key: draw(st.sampled_from(STATES)) for key in keys if draw(st.booleans())},
        readings=readings,
        driver_versions={key.vendor: draw(texts) for key in keys},
        mappings=tuple(draw(st.lists(st.builds(FleetMapping, texts, texts, outcomes), max_size=3))),
        bindings=tuple(bindings),
        left_out=draw(st.integers(0, 9)),
    )


def without_process(body: bytes, accept: str) -> bytes:
    """A page without the ``process_*`` families, which stand last and move from one moment to the next."""
    encoder, _ = encoder_for(accept)
    return body[: body.index(b"# HELP process_")] + end_of_page(encoder).encode()


@given(st.lists(snapshots(), min_size=1, max_size=3))
def test_pages_are_what_the_client_library_gives(shown: list[Snapshot]) -> None:
    """One exposition over several snapshots gives in each format what a registry of the same collectors does."""
    exposition = Exposition()
    for snapshot in [*shown, shown[0]]:
        for reload in RELOADS:
            for accept in FORMATS:
                page = exposition.page(snapshot, reload, accept, "").body
                expected = render(registry_of(snapshot, reload, process=False), encoder_for(accept)[0])
                assert without_process(page, accept) == expected


@pytest.mark.parametrize("accept", FORMATS)
def test_the_families_of_the_process_are_there(accept: str) -> None:
    """The heads and names of ``process_*`` are the client library's too, one page after the other."""
    empty = Snapshot(
        backends=(), devices=(), states={}, readings={}, driver_versions={}, mappings=(), bindings=(), left_out=0
    )
    exposition, encoder = Exposition(), encoder_for(accept)[0]
    expected = _without_values(render(registry_of(empty, RELOADS[0]), encoder))
    for snapshot in (empty, msgspec.structs.replace(empty)):
        assert _without_values(exposition.page(snapshot, RELOADS[0], accept, "").body) == expected


def _without_values(page: bytes) -> list[str]:
    return [line if line.startswith("#") else line.split(" ")[0] for line in page.decode().splitlines()]


def test_a_line() -> None:
    """Names in order, empty values left out, others escaped; whole numbers have a fraction, large ones an exponent."""
    labels = Labels({"b": 'x"\\\n', "a": "", "c": "é"})
    assert lines("m", [(labels, 1), (Labels({}), 10737418240.0)]) == 'm{b="x\\"\\\\\\n",c="é"} 1.0\nm 1.073741824e+10\n'


def test_what_the_last_page_did_not_ask_for_is_forgotten() -> None:
    """A memo keeps what the page before or this one has asked for, and nothing else."""
    memo: Memo[str, Labels] = Memo(lambda key: Labels({"key": key}))
    kept, once = memo("kept"), memo("once")
    memo.begin()
    assert memo("kept") is kept
    memo.begin()
    assert memo("kept") is kept
    assert memo("once") is not once
