"""Prints ``docs/migration.md`` from ``tests/data/peers.yaml``: ``python -m tests.migration_page``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import yaml

from tests.metrics_page import table

PATH = Path(__file__).parent / "data" / "peers.yaml"


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metrics of theirs, and selectors of ours that tell the same with what has changed; or why there are none."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...] = ()
    change: str = ""
    why_not: str = ""


class Peer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another exporter: what was read of it, and how all its metrics begin."""

    name: str
    repository: str
    read: str
    prefix: str
    metrics: tuple[Row, ...]


def peers() -> tuple[Peer, ...]:
    """All of the file."""
    return msgspec.convert(yaml.safe_load(PATH.read_text(encoding="utf-8")), tuple[Peer, ...])


def page() -> str:
    """The whole page."""
    parts = [
        "# Coming from another exporter",
        "Made by `make docs` from `tests/data/peers.yaml`; a test checks that it is current, and that every family of "
        "ours is in [the catalog](metrics.md).",
        "Whose a value is stands in other labels: the index by which the workload uses the card is `fleet_index`, the "
        "one by which the vendor's tool calls it `physical_index`, and `pci_bus_id` and `uuid` join with both. For "
        'every card under its physical index alone, ask for `{fleet="host"}` with a fleet of runtime `host`. Units are '
        "base units, and counters are raw, so a rate is `rate(...)`.",
        *(part for peer in peers() for part in _section(peer)),
    ]
    return "\n\n".join(parts) + "\n"


def _section(peer: Peer) -> Iterator[str]:
    yield f"## {peer.name}"
    yield f"From {peer.repository}: {peer.read}. All names begin with `{peer.prefix}`."
    yield table(("theirs", "ours", "what differs"), (_cells(row) for row in peer.metrics if row.ours))
    yield "What there is none of here, and why:"
    yield table(("theirs", "why"), ((_names(row.theirs), row.why_not) for row in peer.metrics if row.why_not))


def _cells(row: Row) -> tuple[str, str, str]:
    ours = ", ".join(f"[`{selector}`](metrics.md#{selector.partition('{')[0]})" for selector in row.ours)
    return _names(row.theirs), ours, row.change


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(page(), end="")
