"""Prints ``docs/metrics.md`` from the catalog: ``python -m tests.metrics_page``."""

from __future__ import annotations

from exporter.catalog import FAMILIES, READINGS, Family
from exporter.model import FAULT_REASONS, STATES
from exporter.refusals import REFUSALS


def page() -> str:
    """The whole page."""
    others = [family for family in FAMILIES if family not in READINGS.values()]
    parts = [
        "# Metrics",
        "Made by `make docs` from `exporter/catalog/`; a test checks that it is current.",
        "A label whose value would be empty is left out. A reading that a device does not give is absent, never 0. "
        "A card that two fleets share comes once for each: count it once with "
        "`max by (instance, pci_bus_id, gpu_partition) (...)`.",
        "## Readings",
        *(_section(family) for family in READINGS.values()),
        "## Mapping, health and the exporter itself",
        *(_section(family) for family in others),
        "## States of a device",
        ", ".join(f"`{state}`" for state in STATES),
        "## Reasons of a backend's faults",
        ", ".join(f"`{reason}`" for reason in FAULT_REASONS),
        "## Reasons of a mask's refusal",
        "\n".join(f"- `{code}`: {entry.meaning}. {entry.advice}" for code, entry in REFUSALS.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _section(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels) or "none"
    return f"### `{family.name}`\n\n{family.kind.capitalize()}. {family.help}\n\nLabels: {labels}."


if __name__ == "__main__":
    print(page(), end="")
