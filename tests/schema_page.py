"""Prints ``docs/fleets.schema.json`` from the answer's structs: ``python -m tests.schema_page``."""

from __future__ import annotations

import json

from exporter.web.report import schema


def page() -> str:
    """The JSON Schema of ``/api/v1/fleets``."""
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    print(page(), end="")
