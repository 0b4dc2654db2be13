"""What the dashboards ask of Prometheus. Every selector keeps to the chosen jobs and instances.

The exporter has a row of a card for each fleet that has it, so whatever shows or adds up cards takes the maximum over
these equal rows first. ``job`` and ``instance`` stay beside the card: two hosts have the same PCI addresses.
"""

from __future__ import annotations

from exporter import catalog

CHOSEN = 'job=~"$job", instance=~"$instance"'
OF_VENDOR = 'vendor=~"$vendor"'
OF_FLEET = 'fleet=~"$fleet"'
WORKLOAD = 'runtime!="host"'
"""Fleets of runtime ``host`` watch every card: they share with everybody."""

HOST = ("cluster", "job", "instance")
"""What tells hosts apart; `cluster` where targets, agents or federation give one."""
CARD = (*HOST, "pci_bus_id")
DEVICE = (*HOST, *catalog.DEVICE_LABELS)
FLEET = (*HOST, "fleet")
FLEET_DEVICE = (*HOST, *catalog.ATTRIBUTED_LABELS)
SAME_DEVICE = (*HOST, "vendor", "pci_bus_id", "gpu_partition")

UTILIZATION = catalog.READINGS["utilization"].name
FREE = catalog.READINGS["memory_free"].name
TOTAL = catalog.READINGS["memory_total"].name
TEMPERATURE = catalog.READINGS["temperature"].name
POWER = catalog.READINGS["power"].name
OWN_MEMORY = catalog.USAGE["memory"].name
OWN_UTILIZATION = catalog.USAGE["utilization"].name


def of(family: catalog.Family | str, *matchers: str) -> str:
    """A selector of a family within the chosen jobs and instances."""
    name = family if isinstance(family, str) else family.name
    return f"{name}{{{', '.join((CHOSEN, *matchers))}}}"


def by(operator: str, labels: tuple[str, ...], expression: str) -> str:
    """An aggregation that keeps these labels."""
    return f"{operator} by ({', '.join(labels)}) ({expression})"


def each(name: str, labels: tuple[str, ...], *matchers: str) -> str:
    """A reading by these labels, rows that only other labels tell apart taken together."""
    return by("max", labels, of(name, *matchers))


def in_use(labels: tuple[str, ...], *matchers: str) -> str:
    """The share of memory that cannot be allocated, in per cent."""
    return f"100 * (1 - {each(FREE, labels, *matchers)} / {each(TOTAL, labels, *matchers)})"


_PART = 'gpu_partition!=""'
_OF_GPU_INSTANCE = '"gpu_partition", "$1", "gpu_partition", "([0-9]+)/[0-9]+"'


def once(name: str, *matchers: str, of_each: tuple[str, ...] = ()) -> str:
    """A reading of each card once: as a whole where that is read, else by the parts of it that are; ``of_each`` value
    of these labels, such as the fleet.

    Compute instances of one MIG GPU instance (1/0, 1/1) have its memory together, and count as one.
    """
    whole = each(name, (*of_each, *DEVICE), *matchers, 'gpu_partition=""')
    part = f"label_replace({of(name, *matchers, _PART)}, {_OF_GPU_INSTANCE})"
    parts = by("max", (*of_each, *(label for label in DEVICE if label != "uuid")), part)
    return f"({whole} or ({parts} unless on ({', '.join((*of_each, *CARD))}) {whole}))"


def own_labels(metric: str, labels: tuple[str, ...], *matchers: str) -> str:
    """A reading by these labels and those that its family has of its own."""
    family = catalog.READINGS[metric]
    return each(family.name, (*labels, *family.own), *matchers)


def summed(metric: str, *matchers: str) -> str:
    """Of each device the sum over the labels that a reading's family has of its own."""
    return by("sum", DEVICE, own_labels(metric, DEVICE, *matchers))


def counted(metric: str, *matchers: str) -> str:
    """How much a counter of each device has risen in the dashboard's time, over all labels of its own."""
    return _rising(metric, "increase", "$__range", *matchers)


def per_second(metric: str, *matchers: str) -> str:
    """How fast a counter of each device rises, over all labels of its own."""
    return _rising(metric, "rate", "$__rate_interval", *matchers)


def _rising(metric: str, function: str, window: str, *matchers: str) -> str:
    """Of fleets that share a device the one whose series saw the most of it holds."""
    family = catalog.READINGS[metric]
    rise = f"{function}({of(family.name, *matchers)}[{window}])"
    return by("sum", DEVICE, by("max", (*DEVICE, *family.own), rise))


def known(*matchers: str) -> str:
    """A row for each device of the host."""
    return by("max", DEVICE, of(catalog.GPU_INFO, *matchers))


def members(*matchers: str) -> str:
    """A row for each device of each fleet, under both numbers."""
    return by("max", FLEET_DEVICE, of(catalog.FLEET_DEVICE_INFO, *matchers))


STATES = ("ok", "asleep", "hung", "lost")
"""From good to bad: the number of a state in a panel is its place here."""


def state(labels: tuple[str, ...], *matchers: str) -> str:
    """Each device's state as its place in :data:`STATES`."""
    rows = (f"{STATES.index(name)} * {of(catalog.DEVICE_STATE, *matchers, _is(name))}" for name in STATES[1:])
    return by("sum", labels, " or ".join(rows))


def _is(name: str) -> str:
    return f'state="{name}"'


def of_device(left: str, right: str, *extra: str) -> str:
    """Rows of fleets' devices with what is known of the device itself."""
    return f"{left} * on ({', '.join(SAME_DEVICE)}) group_left ({', '.join(extra)}) {right}"


def sharing() -> str:
    """How many workloads' fleets have each device."""
    fleets = by("group", (*SAME_DEVICE, "fleet"), of(catalog.FLEET_DEVICE_INFO, WORKLOAD))
    return by("count", SAME_DEVICE, fleets)


def exporters() -> str:
    """Which of the chosen targets are exporters of this kind, also those that do not answer now."""
    return f"last_over_time({of(catalog.BUILD_INFO)}[1d])"


def own(name: str) -> str:
    """A series that every target has, of the exporters alone."""
    return f"{of(name)} and on ({', '.join(HOST)}) {exporters()}"
