"""Writes every dashboard's JSON beside the source: ``python -m grafana.source``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from grafana.source.cluster import cluster
from grafana.source.fleets import fleets
from grafana.source.hosts import hosts
from grafana.source.mapping import mapping

FOLDER = Path(__file__).parent.parent / "dashboards"
DASHBOARDS: dict[str, Callable[[], Dashboard]] = {
    "fleets": fleets,
    "hosts": hosts,
    "mapping": mapping,
    "cluster": cluster,
}


def made(name: str) -> str:
    """The JSON of a dashboard: ``id`` null, so that Grafana gives it one, and panels numbered from 1."""
    board = DASHBOARDS[name]().build()
    for number, panel in enumerate(board.panels or (), start=1):
        panel.id_val = number
    encoded = json.loads(JSONEncoder().encode(board))
    return json.dumps({"id": None, **encoded}, indent=1) + "\n"


if __name__ == "__main__":
    for name in DASHBOARDS:
        (FOLDER / f"{name}.json").write_text(made(name), encoding="utf-8")
