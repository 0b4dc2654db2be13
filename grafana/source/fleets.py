"""Fleets: for whoever owns a workload. Its devices as it numbers them, and the card behind each."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import stat, table, timeseries
from grafana_foundation_sdk.models.common import TableCellHeight

from exporter import catalog
from exporter.refusals import REFUSALS
from grafana.source import parts
from grafana.source.parts import Column
from grafana.source.queries import (
    DEVICE,
    FLEET,
    FLEET_DEVICE,
    FREE,
    HOST,
    OF_FLEET,
    OF_VENDOR,
    OWN_MEMORY,
    OWN_UTILIZATION,
    POWER,
    SAME_DEVICE,
    TEMPERATURE,
    TOTAL,
    UTILIZATION,
    WORKLOAD,
    by,
    each,
    in_use,
    members,
    of,
    of_device,
    once,
    sharing,
    state,
)
from grafana.source.readings import readings

_LEGEND = "{{fleet}} {{fleet_index}} = {{vendor}} GPU {{physical_index}} {{gpu_partition}} ({{instance}})"
_LINE = (*HOST, "fleet", "fleet_index", "vendor", "physical_index", "gpu_partition")
_ALL = (OF_FLEET, OF_VENDOR)
_UNTOLD = "not told"


def host_column(width: int = 150) -> Column:
    """The host's name, which leads to its cards."""
    return Column("Host", "instance", parts.wide(width, **parts.to(parts.UID.hosts, instance="Host")))


def fleet_column(width: int = 110) -> Column:
    """The fleet's name, which leads to its devices."""
    return Column("Fleet", "fleet", parts.wide(width, **parts.to(parts.UID.fleets, fleet="Fleet", instance="Host")))


def fleets() -> build.Dashboard:
    """The dashboard."""
    board = parts.dashboard(
        parts.UID.fleets,
        "GPU fleets",
        "For the owner of a workload: its devices by the numbers that it uses, the card behind each, and how that is.",
        parts.chosen("vendor", catalog.GPU_INFO),
        parts.chosen("fleet", catalog.MASK_INVERTED),
    )
    parts.place(board, _masks(), _shared(), refused(), _devices())
    parts.place(board, *readings(_LINE, _LEGEND, 12, *_ALL), _held(), row="Devices of the fleets")
    parts.place(board, *_own(), row="The fleets' own use, and their cards' power")
    return board


def _masks() -> stat.Panel:
    panel = parts.named(
        parts.number("none", parts.PLAIN).mappings(parts.INVERTED_TEXTS),
        "Masks",
        "Whether the masks of each fleet could be inverted. A refused fleet has no readings.",
        "No fleet here",
        (11, 6),
    )
    return parts.asked(
        panel, parts.now(by("min", FLEET, of(catalog.MASK_INVERTED, OF_FLEET)), "{{fleet}} ({{instance}})")
    )


def refused() -> table.Panel:
    """The refused fleets with the reason in words; also of the dashboard of mappings."""
    meanings = {code: (entry.meaning, None) for code, entry in REFUSALS.items()}
    advice = {code: (entry.advice, None) for code, entry in REFUSALS.items()}
    columns = (
        host_column(),
        fleet_column(),
        Column("Reason", "reason", parts.wide(160)),
        Column("Because", "meaning", {"mappings": [parts.mapping(meanings)], **_WRAPPED}),
        Column("What to do", "advice", {"mappings": [parts.mapping(advice)], **_WRAPPED}),
    )
    panel = parts.named(
        parts.listed(columns, order=[("Fleet", False)]).cell_height(TableCellHeight.LG),
        "Refused masks",
        "Why a fleet has no readings, and what to do. On its host `gpu-fleet-exporter explain` says what was found.",
        "No mask is refused",
        (24, 5),
    )
    rows = by("max", (*FLEET, "runtime", "reason"), of(catalog.MASK_REFUSAL_INFO, OF_FLEET))
    for label in ("meaning", "advice"):
        rows = f'label_replace({rows}, "{label}", "$1", "reason", "(.+)")'
    return parts.asked(panel, parts.rows(rows))


# The cell says it up to Grafana 12, the column from then on.
_WRAPPED = {"custom.cellOptions": {"type": "auto", "wrapText": True}, "custom.wrapText": True}


def _shared() -> table.Panel:
    columns = (
        Column("PCI bus id", "pci_bus_id", parts.wide(115)),
        Column("GPU", "physical_index", parts.wide(50)),
        fleet_column(),
        Column("Its index", "fleet_index", parts.wide(80)),
        Column("Its memory", "Value #B", parts.wide(95, unit="bytes", noValue=_UNTOLD)),
        Column("Its load", "Value #C", parts.share(parts.PLAIN, "percentunit", 1) | {"noValue": _UNTOLD}),
        host_column(),
    )
    panel = parts.named(
        parts.listed(columns, order=[("PCI bus id", False)]),
        "Cards shared with another fleet",
        "Devices of the chosen fleets that another workload's fleet has too, with every fleet that has them. Memory "
        "and load are what the fleet's own processes hold and do, of fleets of live processes. Everywhere else they "
        "are those of all of these together. Fleets of runtime host, which watch every card, do not count.",
        "No device is shared",
        (13, 6),
    )
    matched = f"on ({', '.join(SAME_DEVICE)})"
    shared = f"{members(WORKLOAD)} and {matched} ({sharing()} > 1) and {matched} {members(OF_FLEET, WORKLOAD)}"
    of_row = f"and on ({', '.join(FLEET_DEVICE)}) ({shared})"
    return parts.asked(
        panel,
        *parts.beside(
            f"({shared})", *(f"{each(name, FLEET_DEVICE)} {of_row}" for name in (OWN_MEMORY, OWN_UTILIZATION))
        ),
    )


def _devices() -> table.Panel:
    columns = (
        host_column(),
        fleet_column(),
        Column("Index", "fleet_index", parts.wide(60)),
        Column("GPU", "physical_index", parts.wide(50)),
        Column("Card", "name", parts.wide(150)),
        Column("PCI bus id", "pci_bus_id", parts.wide(115)),
        Column("Part", "gpu_partition", parts.wide(50)),
        Column("State", "Value #C", parts.wide(70, **parts.coloured(parts.STATE_TEXTS))),
        Column("Utilization", "Value #D", parts.share(parts.PLAIN)),
        Column("Memory in use", "Value #E", parts.share(parts.FULL)),
        Column("Temperature", "Value #F", parts.share(parts.HOT, "celsius", 110)),
        Column("Fleets on it", "Value #G", parts.wide(90, **parts.over(2, parts.BAD))),
        Column("Runtime", "runtime", parts.wide(80)),
        Column("Evidence", "evidence", parts.wide(80)),
    )
    panel = parts.named(
        parts.listed(columns, order=[("Fleet", False), ("Index", False)]),
        "Which card is behind which index",
        "Index is what the workload calls the device, GPU what the vendor's tool calls it. An empty cell is not "
        "measured: the "
        "device does not give that reading, or did not answer. Load, memory and temperature are the card's, whoever "
        "uses it.",
        "No device: the fleets' masks are refused, or leave none",
        (24, 10),
    )
    info = by("max", (*FLEET_DEVICE, "runtime", "evidence"), of(catalog.FLEET_DEVICE_INFO, *_ALL))
    name = by("max", (*SAME_DEVICE, "name"), of(catalog.GPU_INFO, OF_VENDOR))
    return parts.asked(
        panel,
        *parts.beside(
            info,
            of_device(members(*_ALL), name, "name"),
            of_device(members(*_ALL), by("max", SAME_DEVICE, state(DEVICE, OF_VENDOR))),
            each(UTILIZATION, FLEET_DEVICE, *_ALL),
            in_use(FLEET_DEVICE, *_ALL),
            each(TEMPERATURE, FLEET_DEVICE, *_ALL),
            of_device(members(*_ALL), sharing()),
        ),
    )


def _held() -> timeseries.Panel:
    panel = parts.named(
        parts.lines("bytes"),
        "Memory of the chosen fleets' cards",
        "All cards of the chosen fleets that answer, each counted once: installed, and in use by whomever.",
        "Not measured",
        (12, 9),
    )
    return parts.asked(
        panel,
        parts.over_time(f"sum({once(TOTAL, *_ALL)} - {once(FREE, *_ALL)})", "in use"),
        parts.over_time(f"sum({once(TOTAL, *_ALL)})", "installed"),
    )


def _own() -> list[timeseries.Panel]:
    """What the fleets' processes hold and do, and what their cards draw."""
    whose = "Of fleets of live processes, on cards whose driver tells it. A gap was not told."
    memory, load = (
        parts.named(parts.lines(unit), title, f"{description} {whose}", "Not told", (8, 9))
        for title, unit, description in (
            ("Memory of the fleets' own processes", "bytes", "What they hold on each card, whoever else is on it."),
            ("Load by the fleets' own processes", "percentunit", "Share of each card's time that they took."),
        )
    )
    power = parts.named(
        parts.lines("watt"),
        "Power of the fleets' cards",
        "What the cards of each fleet draw, each of them once, with whatever runs on them. A gap was not measured.",
        "Not measured",
        (8, 9),
    )
    drawn = by("sum", FLEET, once(POWER, *_ALL, of_each=("fleet",)))
    return [
        parts.asked(memory, parts.over_time(each(OWN_MEMORY, _LINE, *_ALL), _LEGEND)),
        parts.asked(load, parts.over_time(each(OWN_UTILIZATION, _LINE, *_ALL), _LEGEND)),
        parts.asked(power, parts.over_time(drawn, "{{fleet}} ({{instance}})")),
    ]
