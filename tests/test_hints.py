"""What would bring readings that are missing: a row, one line in the log, and a sentence in `explain`."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from msgspec.structs import replace

from exporter import pci
from exporter.collectors import ReloadStatus, encoder_for, registry_of, render
from exporter.model import BackendStatus, Hint, Snapshot
from exporter.reports import trouble_lines
from exporter.telemetry import Transitions
from tests import pages

RIGHT = Hint("grant-a-right", "utilization: the daemon lacks a right")
KERNEL = Hint("newer-kernel", "temperature: since Linux 6.15")


def snapshot(*hints: Hint) -> Snapshot:
    """A host with one Intel backend that gives these hints."""
    status = BackendStatus(vendor="intel", up=True, duration_seconds=0.1, fault=None, faults_total={}, hints=hints)
    return Snapshot(
        backends=(status,), devices=(), states={}, readings={}, driver_versions={}, mappings=(), bindings=()
    )


def page(*hints: Hint) -> bytes:
    registry = registry_of(snapshot(*hints), ReloadStatus(True, 0.0), process=False)
    return render(registry, encoder_for("")[0])


def test_each_hint_is_a_row_and_no_row_comes_twice() -> None:
    """Two cards may give one hint in other words; the sentence is not a label."""
    text = page(KERNEL, RIGHT, replace(RIGHT, text="utilization: of the other card too"))
    pages.check(text)
    rows = pages.samples_of(text, "gpu_exporter_hint_info")
    assert [(row.labels, row.value) for row in rows] == [
        ({"vendor": "intel", "hint": "grant-a-right"}, 1.0),
        ({"vendor": "intel", "hint": "newer-kernel"}, 1.0),
    ]
    assert not pages.samples_of(page(), "gpu_exporter_hint_info")


def test_a_hint_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Also when it goes and comes again, as with a card that hangs for a moment."""
    caplog.set_level(logging.INFO, "exporter")
    transitions = Transitions()
    for hints in ((RIGHT,), (RIGHT,), (), (RIGHT, KERNEL)):
        transitions.see(snapshot(*hints), ())
    said = [record.fields for record in caplog.records if record.message == "hint"]  # type: ignore[attr-defined]
    assert said == [
        {"vendor": "intel", "hint": "grant-a-right", "detail": RIGHT.text},
        {"vendor": "intel", "hint": "newer-kernel", "detail": KERNEL.text},
    ]


def test_explain_has_the_sentence() -> None:
    """The commands print it beside what is down."""
    assert list(trouble_lines(snapshot(RIGHT))) == [f"intel: hint: {RIGHT.text} (grant-a-right)"]


@pytest.mark.parametrize(
    ("vendor", "identifier", "kind", "counts"),
    [
        ("intel", "0x8086", "0x030000", True),
        ("intel", "0x8086", "0x038000", True),
        ("intel", "0x8086", "0x120000", False),  # a neural processing unit
        ("amd", "0x1002", "0x120000", True),  # an Instinct card
        ("amd", "0x1002", "0x040300", False),  # its sound device
        ("nvidia", "0x10de", "0x030200", True),
    ],
)
def test_which_devices_of_the_bus_are_gpus(
    tmp_path: Path, vendor: str, identifier: str, kind: str, counts: bool
) -> None:
    """Display controllers, and processing accelerators but Intel's."""
    device = tmp_path / "bus/pci/devices/0000:03:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(identifier + "\n")
    (device / "class").write_text(kind + "\n")
    assert list(pci.cards(str(tmp_path), vendor)) == ["0000:03:00.0"] * counts
