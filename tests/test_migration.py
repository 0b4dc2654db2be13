"""What other exporters read, and where it is here: every family that is named exists, with these labels."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from exporter.catalog import FAMILIES, READINGS
from exporter.catalog.own_labels import is_known
from tests import migration_page
from tests.harness import METRICS
from tests.migration_page import Peer, Row

FAMILY = {family.name: family for family in FAMILIES}
ROWS = [
    pytest.param(peer, row, id=f"{peer.name}:{row.theirs[0]}")
    for peer in migration_page.peers()
    for row in peer.metrics
]
SELECTOR = re.compile(r'([a-z_]+)(?:\{([a-z]+="[a-z-]+"(?:,[a-z]+="[a-z-]+")*)\})?')
# The units in which a name may not end here: they are no base units.
NO_BASE_UNITS = re.compile(r"_(mhz|mib|mb|kib|mw|mj|milli\w+|micro\w+)(_total)?$")


def test_the_migration_page_is_current() -> None:
    """docs/migration.md is what tests/data/peers.yaml says; `make docs` writes it."""
    path = Path(__file__).parent.parent / "docs" / "migration.md"
    assert path.read_text(encoding="utf-8") == migration_page.page()


@pytest.mark.parametrize(("peer", "row"), ROWS)
def test_what_others_read_is_here_or_has_a_reason(peer: Peer, row: Row) -> None:
    """Either families of the catalog under base units, with label values that are known, or a reason."""
    assert bool(row.ours) != bool(row.why_not), peer.name
    assert not (row.why_not and row.change)
    for selector in row.ours:
        match = SELECTOR.fullmatch(selector)
        assert match, selector
        assert match[1] in FAMILY
        assert not NO_BASE_UNITS.search(match[1])
        for label, value in re.findall(r'([a-z]+)="([^"]+)"', match[2] or ""):
            assert label in READINGS[METRICS[match[1]]].own
            assert is_known(METRICS[match[1]], label, value)


@pytest.mark.parametrize("peer", migration_page.peers(), ids=lambda peer: peer.name)
def test_no_metric_of_theirs_is_told_twice(peer: Peer) -> None:
    """Each name stands in one row."""
    names = [name for row in peer.metrics for name in row.theirs]
    assert len(names) == len(set(names))


NEEDED = {
    "utilization", "memory", "temperature", "power", "energy", "clock", "throttled", "fan", "pcie", "ecc", "retired",
    "remapped", "interconnect", "xid", "mig", "processes", "fleet",
}  # fmt: skip


def test_every_group_that_others_read_is_here() -> None:
    """Of each group of readings that these exporters have, one of ours at least is named for it."""
    ours = " ".join(selector for peer in migration_page.peers() for row in peer.metrics for selector in row.ours)
    assert not [word for word in NEEDED if f"gpu_{word}" not in ours]
