"""Prints ``docs/metrics.md`` from the catalog: ``python -m tests.metrics_page``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from exporter.catalog import ATTRIBUTED_LABELS, FAMILIES, READINGS, USAGE, Family
from exporter.catalog.own_labels import OWN_LABELS, Shaped
from exporter.model import EVIDENCE, FAULT_REASONS, STATES
from exporter.refusals import REFUSALS
from exporter.vendors import VENDORS

GROUPS: dict[str, tuple[str, ...]] = {
    "A fleet's own use": ("gpu_fleet_memory_*", "gpu_fleet_utilization_*", "gpu_fleet_processes"),
    "Utilization": ("gpu_utilization_*", "gpu_*_utilization_ratio", "gpu_*_active_ratio"),
    "Memory": ("gpu_memory_*_bytes",),
    "Temperature": ("gpu_*_celsius",),
    "Power and energy": ("gpu_power_*", "gpu_energy_*", "gpu_voltage_*"),
    "Clocks": ("gpu_clock_*", "gpu_performance_state"),
    "Fans": ("gpu_fan_*",),
    "Throttling": ("gpu_throttled*",),
    "PCIe": ("gpu_pcie_*",),
    "Memory errors": ("gpu_ecc_*", "gpu_ras_*", "gpu_retired_*", "gpu_remapped_*", "gpu_row_*"),
    "Interconnect": ("gpu_interconnect_*",),
    "Events": ("gpu_xid_*", "gpu_recovery_*"),
    "Processes": ("gpu_processes",),
    "MIG and partitions": ("gpu_mig_*", "gpu_partition_*"),
    "Mapping": ("gpu_info", "gpu_fleet_device_info", "gpu_fleet_mask_*", "gpu_exporter_fleets_*"),
    "Health": ("gpu_exporter_*",),
}
"""Headings, and which names stand under them: the first that has a name has the family."""

_LAST = ("A fleet's own use", "Mapping", "Health")

UNITS: Mapping[str, str] = {
    "bytes_per_second": "bytes per second",
    "timestamp_seconds": "seconds since 1970 (Unix time)",
    "rpm": "revolutions per minute",
    "percent": "per cent, 0 to 100",
    "ratio": "a ratio, 0 to 1",
    "celsius": "degrees Celsius",
    **{unit: unit for unit in ("bytes", "watts", "joules", "volts", "hertz", "seconds", "lanes")},
    "info": "always 1: the labels say it",
}
"""What a name's ending says."""

_LABELS = {
    "fleet": "the workload's name in the settings, or as its processes filled it in",
    "fleet_index": "the number by which the workload uses the card",
    "physical_index": "the number by which the vendor's tool calls it now",
    "vendor": ", ".join(f"`{name}`" for name in VENDORS),
    "pci_bus_id": "the card's address, as sysfs spells it: `0000:61:00.0`",
    "uuid": "what the vendor's masks call it",
    "gpu_partition": "the MIG instance, AMD partition or Intel tile; left out for a whole card",
}
_LISTED = {
    "state": "[a state](#states-of-a-device)",
    "evidence": ", ".join(f"`{grade}`" for grade in EVIDENCE),
}


def page() -> str:
    """The whole page."""
    groups = grouped()
    costly = [family for family in READINGS.values() if family.costly]
    parts = [
        "# Metrics",
        "Made by `make docs` from `exporter/catalog/`; a test checks that it is current. Whoever knows the names of "
        "another exporter finds ours in [migration.md](migration.md).",
        "A label whose value would be empty is left out. A reading that a device does not give is absent, never 0. "
        "A card that two fleets share comes once for each: count it once with "
        "`max by (instance, pci_bus_id, gpu_partition) (...)`. `process_*` are the exporter's own process.",
        "\n".join(_contents(groups)),
        "## Labels of a reading",
        "A reading is shown for each device of each fleet, where the device gives it, with these labels and its "
        "family's own. The families of a fleet's own use have them too.",
        table(("label", "what it says"), ((f"`{label}`", _LABELS[label]) for label in ATTRIBUTED_LABELS)),
        "## What is read on request",
        "Nothing of these is read until the settings name them, as in "
        '`metrics: {include: ["*", gpu_processes]}`: a pattern of nothing but `*` means all the others. What is not '
        "included, or is excluded, is not asked of a driver either.",
        table(("family", "because"), ((_link(family), family.costly) for family in costly)),
        *(part for group in groups for part in (f"## {group}", *(_section(each) for each in groups[group]))),
        "## States of a device",
        ", ".join(f"`{state}`" for state in STATES),
        "## Reasons of a backend's faults",
        ", ".join(f"`{reason}`" for reason in FAULT_REASONS),
        "## Reasons of a mask's refusal",
        "\n".join(f"- `{code}`: {entry.meaning}. {entry.advice}" for code, entry in REFUSALS.items()),
    ]
    return "\n\n".join(parts) + "\n"


def grouped() -> dict[str, list[Family]]:
    """The families under their headings. Raises ``LookupError`` for one that has none: name it so, or add a pattern."""
    found: dict[str, list[Family]] = {group: [] for group in sorted(GROUPS, key=_LAST.__contains__)}
    for family in FAMILIES:
        found[_group_of(family)].append(family)
    return found


def _group_of(family: Family) -> str:
    for group, patterns in GROUPS.items():
        if any(fnmatchcase(family.name, pattern) for pattern in patterns):
            return group
    raise LookupError(f"{family.name} is in none of the groups of {__name__}")


def unit(name: str) -> str:
    """What the values of the family of this name count."""
    stem = name.removesuffix("_total")
    for ending, words in UNITS.items():
        if stem.endswith(f"_{ending}"):
            return words
    return "none"


def _contents(groups: Mapping[str, Iterable[Family]]) -> Iterator[str]:
    for group, families in groups.items():
        yield f"- [{group}](#{anchor(group)}): " + ", ".join(_link(family) for family in families)


def anchor(heading: str) -> str:
    """The heading's place in a link, as GitHub makes it."""
    return re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-")


def _link(family: Family) -> str:
    return f"[`{family.name}`](#{family.name})"


def _section(family: Family) -> str:
    rows = [("type", family.kind), ("unit", unit(family.name))]
    if family in (*READINGS.values(), *USAGE.values()):
        own = (f"`{label}`: {_values(family, label)}" for label in family.own)
        rows.append(("labels", "; ".join(("those of a reading", *own))))
        rows.append(("a card's parts", "add up to the card's" if family.adds_up else "do not add up"))
        rows.append(("read", f"on request: {family.costly}" if family.costly else "by default"))
    else:
        told = (f"`{each}`" + (f" ({_LISTED[each]})" if each in _LISTED else "") for each in family.labels)
        rows.append(("labels", ", ".join(told) or "none"))
    rows += [(VENDORS[vendor].title, source) for vendor, source in family.sources]
    return f"### `{family.name}`\n\n{family.meaning}\n\n{table(('', ''), rows)}"


def _values(family: Family, label: str) -> str:
    metric = next(key for key, known in READINGS.items() if known is family)
    known = OWN_LABELS[metric][label]
    return known.meaning if isinstance(known, Shaped) else ", ".join(f"`{value}`" for value in known)


def table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of a page."""
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (head, *rows)]
    return "\n".join(f"| {line} |" for line in (lines[0], " | ".join("---" for _ in head), *lines[1:]))


if __name__ == "__main__":
    print(page(), end="")
