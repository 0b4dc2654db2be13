"""Cluster: for many hosts. It reads recorded series alone, which are as many as there are vendors and fleet names."""

from __future__ import annotations

import functools

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import stat, table, timeseries

from grafana.source import parts
from grafana.source.parts import Column
from grafana.source.queries import by

_UNRECORDED = "Nothing recorded: are the rules loaded?"
_number = functools.partial(parts.figure, absent=_UNRECORDED, width=4)
_WITHIN = 'job=~"$job", cluster=~"$cluster"'
_PLACE = ("cluster", "job")


def cluster() -> build.Dashboard:
    """The dashboard."""
    board = parts.blank(
        parts.UID.cluster,
        "GPU cluster",
        "For many hosts: what prometheus/rules/recording.yaml records of them all, which Prometheus has to have "
        "loaded.",
    )
    board.with_variable(parts.chosen("job", "cluster:gpu_hosts:count", within=""))
    board.with_variable(parts.chosen("cluster", "cluster:gpu_hosts:count", within='job=~"$job"').all_value(".*"))
    board.annotations([])
    parts.place(board, *_numbers())
    parts.place(board, _fleets(), _refused(), _states(), *_lines(), *_condition())
    return board


def _recorded(name: str, *matchers: str) -> str:
    return f"{name}{{{', '.join((_WITHIN, *matchers))}}}"


def _mean(name: str, labels: tuple[str, ...]) -> str:
    """The mean over devices, also where several servers have recorded their shares of the hosts."""
    return f"{by('sum', labels, _recorded(f'{name}:sum'))} / {by('sum', labels, _recorded(f'{name}:count'))}"


def _numbers() -> list[stat.Panel]:
    used = f"sum({_recorded('cluster:gpu_memory_used_bytes:sum')})"
    total = f"sum({_recorded('cluster:gpu_memory_total_bytes:sum')})"
    states = _recorded("cluster:gpu_devices:count", 'state=~"lost|hung"')
    return [
        _number("Hosts", f"sum({_recorded('cluster:gpu_hosts:count')})", "Exporters that answer."),
        _number("Cards", f"sum({_recorded('cluster:gpu_cards:count')})", "Physical cards, however divided."),
        _number("Lost or hung", f"sum({states})", "Devices that do not answer.", parts.NONE_WANTED),
        _number("Memory used", used, "By workloads, each card once.", unit="bytes"),
        _number("Memory installed", total, "Of the cards that fleets have, each once.", unit="bytes"),
        _number(
            "Hottest", f"max({_recorded('cluster:gpu_temperature_celsius:max')})", "Card of all.", parts.HOT, "celsius"
        ),
    ]


def _fleets() -> table.Panel:
    columns = (
        Column("Fleet", "fleet", parts.wide(160, **parts.to(parts.UID.fleets, fleet="Fleet"))),
        Column("Cluster", "cluster", parts.wide(100)),
        Column("Job", "job", parts.wide(140)),
        Column("Hosts", "Value #A", parts.wide(70)),
        Column("Devices", "Value #B", parts.wide(80)),
        Column("Utilization", "Value #C", parts.share(parts.PLAIN)),
        Column("Memory used", "Value #D", {"unit": "bytes", "noValue": parts.UNMEASURED}),
        Column("Memory installed", "Value #E", {"unit": "bytes", "noValue": parts.UNMEASURED}),
        Column("Its processes' memory", "Value #G", {"unit": "bytes", "noValue": "not told"}),
        Column("Power", "Value #H", parts.wide(90, unit="watt", noValue=parts.UNMEASURED)),
        Column("Hottest", "Value #F", parts.share(parts.HOT, "celsius", 110)),
    )
    panel = parts.named(
        parts.listed(columns, order=[("Devices", True)]),
        "Fleets over all hosts",
        "Fleets of one name taken together. Devices are counted once a fleet and host, the mean utilization is over "
        "devices. Memory used and power are the devices', with whatever runs on them.",
        _UNRECORDED,
        (24, 9),
    )
    place = (*_PLACE, "fleet")
    return parts.asked(
        panel,
        parts.rows(by("sum", place, _recorded("cluster_fleet:gpu_hosts:count"))),
        parts.rows(by("sum", place, _recorded("cluster_fleet:gpu_devices:count"))),
        parts.rows(_mean("cluster_fleet:gpu_utilization_percent", place)),
        parts.rows(by("sum", place, _recorded("cluster_fleet:gpu_memory_used_bytes:sum"))),
        parts.rows(by("sum", place, _recorded("cluster_fleet:gpu_memory_total_bytes:sum"))),
        parts.rows(by("max", place, _recorded("cluster_fleet:gpu_temperature_celsius:max"))),
        parts.rows(by("sum", place, _recorded("cluster_fleet:gpu_fleet_memory_used_bytes:sum"))),
        parts.rows(by("sum", place, _recorded("cluster_fleet:gpu_power_watts:sum"))),
    )


def _refused() -> timeseries.Panel:
    panel = parts.named(
        parts.lines("short"), "Refused masks", "Fleets without readings, by reason.", "No mask is refused", (12, 8)
    )
    return parts.asked(
        panel, parts.over_time(f"sum by (reason) ({_recorded('cluster:gpu_fleet_masks_refused:count')})", "{{reason}}")
    )


def _states() -> timeseries.Panel:
    panel = parts.named(
        parts.lines("short"),
        "Devices that are not ok",
        "Lost, hung and asleep, over all hosts. The dashboard of hosts and cards says which.",
        _UNRECORDED,
        (12, 8),
    )
    states = _recorded("cluster:gpu_devices:count", 'state!="ok"')
    return parts.asked(panel, parts.over_time(f"sum by (state, vendor) ({states})", "{{state}}, {{vendor}}"))


def _lines() -> list[timeseries.Panel]:
    vendors, fleets, memory = (
        parts.named(parts.lines(unit, most), title, description, _UNRECORDED, (8, 9))
        for title, unit, most, description in (
            ("Utilization by vendor", "percent", 100.0, "Mean over the cards, each once."),
            (
                "Utilization by fleet",
                "percent",
                100.0,
                "Mean over the fleet's devices on all hosts, with whatever runs on them.",
            ),
            ("Memory used by vendor", "bytes", None, "By workloads, each card once."),
        )
    )
    used = by("sum", (*_PLACE, "vendor"), _recorded("cluster:gpu_memory_used_bytes:sum"))
    of_vendor = _mean("cluster:gpu_utilization_percent", (*_PLACE, "vendor"))
    of_fleet = _mean("cluster_fleet:gpu_utilization_percent", (*_PLACE, "fleet"))
    return [
        parts.asked(vendors, parts.over_time(of_vendor, "{{vendor}} {{cluster}} ({{job}})")),
        parts.asked(fleets, parts.over_time(of_fleet, "{{fleet}} {{cluster}} ({{job}})")),
        parts.asked(memory, parts.over_time(used, "{{vendor}} {{cluster}} ({{job}})")),
    ]


def _condition() -> list[timeseries.Panel]:
    """What all cards draw, how many are held back, and what went wrong."""
    untold = "No card here tells it, or nothing is recorded"
    power, held, errors, missing = (
        parts.named(parts.lines(unit), title, description, absent, (6, 8))
        for title, unit, description, absent in (
            ("Power by vendor", "watt", "What all cards draw, each once.", untold),
            (
                "Devices held back",
                "short",
                "Whose clocks something holds down, by reason: heat, hardware, the power limit, and whatever else the "
                "cards name but idleness and clocks that somebody has set.",
                untold,
            ),
            (
                "Errors in an hour",
                "short",
                "Of all cards, in the hour before: errors that NVIDIA's driver has numbered (XID), and of memory.",
                untold,
            ),
            ("Cards missing", "short", "Of those that hosts' settings expect.", "No host expects a number of cards"),
        )
    )
    reasons = _recorded("cluster:gpu_throttled:sum", 'reason!~"idle|application-clocks"')
    xids, memory = (_recorded(f"cluster:gpu_{name}_errors_total:increase1h") for name in ("xid", "ecc"))
    drawn = by("sum", (*_PLACE, "vendor"), _recorded("cluster:gpu_power_watts:sum"))
    absent = f"sum by (vendor) ({_recorded('cluster:gpu_cards_missing:sum')})"
    return [
        parts.asked(power, parts.over_time(drawn, "{{vendor}} {{cluster}} ({{job}})")),
        parts.asked(held, parts.over_time(f"sum by (reason) ({reasons})", "{{reason}}")),
        parts.asked(
            errors,
            parts.over_time(f"sum by (vendor) ({xids})", "XID, {{vendor}}"),
            parts.over_time(f"sum by (error, vendor) ({memory})", "memory, {{error}}, {{vendor}}"),
        ),
        parts.asked(missing, parts.over_time(absent, "{{vendor}}")),
    ]
