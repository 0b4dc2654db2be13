"""Hosts and cards: for whoever runs the machines. Every card once, and what is the matter with which."""

from __future__ import annotations

import functools

from grafana_foundation_sdk.builders import bargauge, stat, statetimeline, table
from grafana_foundation_sdk.builders import dashboard as build

from exporter import catalog
from grafana.source import condition, parts
from grafana.source.condition import CARD_COLUMNS, LEGEND, LINE
from grafana.source.fleets import fleet_column
from grafana.source.parts import Column
from grafana.source.queries import (
    CARD,
    DEVICE,
    FREE,
    HOST,
    OF_VENDOR,
    POWER,
    SAME_DEVICE,
    TEMPERATURE,
    TOTAL,
    UTILIZATION,
    WORKLOAD,
    by,
    each,
    exporters,
    in_use,
    known,
    of,
    of_device,
    once,
    sharing,
    state,
)
from grafana.source.readings import readings

_number = functools.partial(parts.figure, absent="Not measured", width=3)
_TROUBLED = 'state=~"lost|hung"'


def hosts() -> build.Dashboard:
    """The dashboard."""
    board = parts.dashboard(
        parts.UID.hosts,
        "GPU hosts and cards",
        "For the operator: every physical card once, hottest and fullest first, who sits on it, and which do not "
        "answer.",
        parts.chosen("vendor", catalog.GPU_INFO),
    )
    parts.place(board, *_numbers())
    parts.place(board, _hottest(), _fullest(), _troubled(), _cards(), _sitting())
    parts.place(board, *readings(LINE, LEGEND, 8, OF_VENDOR), row="Each card once")
    parts.place(board, *condition.sensors(), row="Power, clocks and cooling")
    parts.place(board, condition.held_back(), condition.narrow_links(), row="What holds cards back, and what fails")
    parts.place(board, condition.failures(), condition.traffic())
    return board


def _numbers() -> list[stat.Panel]:
    answering = f"sum(({of('up')} == bool 0) and on ({', '.join(HOST)}) {exporters()})"
    troubled = f"sum({of(catalog.DEVICE_STATE, OF_VENDOR, _TROUBLED)})"
    cards = by("group", CARD, of(catalog.GPU_INFO, OF_VENDOR))
    watched = f"{cards} and {by('group', CARD, of(catalog.FLEET_DEVICE_INFO, OF_VENDOR))}"
    total, free = once(TOTAL, OF_VENDOR), once(FREE, OF_VENDOR)
    return [
        _number("Hosts", f"count({by('group', HOST, of(catalog.BUILD_INFO))})", "Exporters that answer."),
        _number(
            "Silent hosts", answering, "Exporters that do not answer, of those seen within a day.", parts.NONE_WANTED
        ),
        _number(
            "All cards",
            f"count({cards})",
            "Physical cards, however divided.",
        ),
        _number(
            "Lost or hung",
            troubled,
            "Devices that the driver does not reach, or that do not answer.",
            parts.NONE_WANTED,
        ),
        _number(
            "Cards in no fleet",
            f"count({cards}) - (count({watched}) or vector(0))",
            "Cards that no fleet has, not even in part: without readings. A fleet of runtime host watches every card.",
            ((None, parts.GOOD), (1.0, parts.BAD)),
        ),
        _number(
            "Busy", f"avg({once(UTILIZATION, OF_VENDOR)})", "Mean utilization of the cards, each once.", unit="percent"
        ),
        _number(
            "All memory in use",
            f"100 * sum({total} - {free}) / sum({total} and {free})",
            "Share of all cards' memory that cannot be allocated, each card once.",
            parts.FULL,
            "percent",
        ),
        _number("Hottest", f"max({of(TEMPERATURE, OF_VENDOR)})", "The hottest card.", parts.HOT, "celsius"),
    ]


def _hottest() -> bargauge.Panel:
    panel = parts.named(
        parts.bars("celsius", 110, parts.HOT), "Hottest cards", "The five hottest.", "Not measured", (6, 8)
    )
    return parts.asked(panel, parts.now(f"topk(5, {each(TEMPERATURE, LINE, OF_VENDOR)})", LEGEND))


def _fullest() -> bargauge.Panel:
    panel = parts.named(
        parts.bars("percent", 100, parts.FULL),
        "Fullest cards",
        "The five with the least memory left, as the share in use.",
        "Not measured",
        (6, 8),
    )
    return parts.asked(panel, parts.now(f"topk(5, {in_use(LINE, OF_VENDOR)})", LEGEND))


def _troubled() -> statetimeline.Panel:
    panel = parts.named(
        parts.timeline(parts.STATE_TEXTS),
        "Cards that were lost, hung or asleep",
        "Only devices that were not ok at some time of the chosen range. What is asleep is not woken, and has no "
        "readings.",
        "Every card was ok",
        (12, 8),
    )
    labels = (*HOST, *catalog.DEVICE_LABELS)
    bad = of(catalog.DEVICE_STATE, OF_VENDOR, 'state!="ok"')
    ever = by("max", labels, f"max_over_time({bad}[$__range] @ end())")
    return parts.asked(
        panel,
        parts.over_time(f"{state(labels, OF_VENDOR)} and on ({', '.join(SAME_DEVICE)}) ({ever} > 0)", LEGEND),
    )


def _cards() -> table.Panel:
    columns = (
        *CARD_COLUMNS,
        Column("Card", "name", parts.wide(150)),
        Column("State", "Value #B", parts.wide(70, **parts.coloured(parts.STATE_TEXTS))),
        Column("Temperature", "Value #C", parts.share(parts.HOT, "celsius", 110)),
        Column("Memory in use", "Value #D", parts.share(parts.FULL)),
        Column("Utilization", "Value #E", parts.share(parts.PLAIN)),
        Column("Power", "Value #H", parts.wide(80, unit="watt", decimals=0, noValue=parts.UNMEASURED)),
        Column("Memory", "Value #F", parts.wide(105, unit="bytes", noValue=parts.UNMEASURED)),
        Column("Fleets on it", "Value #G", parts.wide(90, **parts.over(2, parts.BAD))),
        Column("UUID", "uuid", parts.wide(130)),
        Column("Driver", "driver_version", parts.wide(90)),
    )
    panel = parts.named(
        parts.listed(columns, order=[("Temperature", True)]),
        "Cards",
        "Every device of the hosts, hottest first; sort by another column for the fullest. An empty cell is not "
        "measured: no fleet "
        "has the device, it does not give that reading, or it did not answer. Fleets of runtime host do not count "
        "as sitting on it.",
        "No card: no exporter of the chosen ones answers, or their hosts have none",
        (24, 10),
    )
    info = by("max", (*DEVICE, "name", "driver_version"), of(catalog.GPU_INFO, OF_VENDOR))
    return parts.asked(
        panel,
        *parts.beside(
            info,
            state(DEVICE, OF_VENDOR),
            each(TEMPERATURE, DEVICE, OF_VENDOR),
            in_use(DEVICE, OF_VENDOR),
            each(UTILIZATION, DEVICE, OF_VENDOR),
            each(TOTAL, DEVICE, OF_VENDOR),
            of_device(known(OF_VENDOR), sharing()),
            each(POWER, DEVICE, OF_VENDOR),
        ),
    )


def _sitting() -> table.Panel:
    columns = (
        *CARD_COLUMNS,
        fleet_column(),
        Column("Its index", "fleet_index", parts.wide(80)),
        Column("Runtime", "runtime", parts.wide(90)),
        Column("Evidence", "evidence", parts.wide(90)),
        Column("Fleets on it", "Value", parts.over(2, parts.BAD)),
    )
    panel = parts.named(
        parts.listed(columns, order=[("Host", False), ("GPU", False)]),
        "Which fleets sit on which card",
        "A row for each device of each workload's fleet. A card that several have is shared: its load is that of "
        "all of them.",
        "No workload's fleet has a card",
        (24, 8),
    )
    rows = by("max", (*HOST, *catalog.FLEET_DEVICE_INFO.labels), of(catalog.FLEET_DEVICE_INFO, OF_VENDOR, WORKLOAD))
    return parts.asked(panel, parts.rows(of_device(rows, sharing())))
