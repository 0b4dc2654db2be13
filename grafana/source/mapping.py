"""Mapping and health: whether what the exporters say can be had, and why not where it cannot."""

from __future__ import annotations

import functools

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import stat, statetimeline, table, timeseries

from exporter import catalog
from grafana.source import parts
from grafana.source.fleets import fleet_column, host_column, refused
from grafana.source.parts import Column
from grafana.source.queries import FLEET, HOST, OF_FLEET, OF_VENDOR, by, exporters, of, own

_number = functools.partial(parts.figure, absent="No exporter answers", width=4)
_HOST_VENDOR = (*HOST, "vendor")


def mapping() -> build.Dashboard:
    """The dashboard."""
    board = parts.dashboard(
        parts.UID.mapping,
        "GPU mapping and exporter health",
        "Which masks are refused and why, how sure the others are, and how the exporters and their backends are.",
        parts.chosen("vendor", catalog.BACKEND_UP),
        parts.chosen("fleet", catalog.MASK_INVERTED),
    )
    parts.place(board, *_numbers())
    parts.place(board, refused(), _masks(), _evidence(), row="Mapping")
    parts.place(board, _backends(), _down(), _durations(), _faults(), _hints(), _found(), row="Backends")
    parts.place(board, _builds(), _up(), *_costs(), row="Exporters")
    return board


def _numbers() -> list[stat.Panel]:
    wanted, tolerated = parts.NONE_WANTED, ((None, parts.GOOD), (1.0, parts.BAD))
    silent = f"sum(({of('up')} == bool 0) and on ({', '.join(HOST)}) {exporters()})"
    return [
        _number(
            "Fleets", f"count({of(catalog.MASK_INVERTED, OF_FLEET)})", "Fleets, once for each runtime.", parts.PLAIN
        ),
        _number(
            "Masks refused", f"sum({of(catalog.MASK_INVERTED, OF_FLEET)} == bool 0)", "Fleets without readings.", wanted
        ),
        _number(
            "Fleets left out", f"sum({of(catalog.FLEETS_LEFT_OUT)})", "Found and not shown: see the log.", tolerated
        ),
        _number(
            "Backends down",
            f"sum({of(catalog.BACKEND_UP, OF_VENDOR)} == bool 0)",
            "Vendors that cannot be read.",
            wanted,
        ),
        _number(
            "Failed reloads",
            f"sum({of(catalog.RELOAD_SUCCESSFUL)} == bool 0)",
            "Exporters whose settings are bad.",
            wanted,
        ),
        _number("Silent exporters", silent, "Do not answer, of those seen within a day.", wanted),
    ]


def _masks() -> statetimeline.Panel:
    panel = parts.named(
        parts.timeline(parts.INVERTED_TEXTS),
        "Masks over time",
        "When the masks of each fleet could be inverted. A gap: the exporter did not answer, or the fleet was not "
        "there.",
        "No fleet",
        (14, 8),
    )
    return parts.asked(
        panel, parts.over_time(by("min", FLEET, of(catalog.MASK_INVERTED, OF_FLEET)), "{{fleet}} ({{instance}})")
    )


def _evidence() -> table.Panel:
    columns = (
        host_column(),
        fleet_column(),
        Column("Runtime", "runtime", parts.wide(90)),
        Column("Evidence", "evidence", parts.wide(90)),
        Column("Devices", "Value"),
    )
    panel = parts.named(
        parts.listed(columns, order=[("Fleet", False)]),
        "How sure the mapping is",
        "proven: it follows from the masks and the inventory. probed: the driver itself answered. assumed: numbers "
        "on equal cards "
        "without CUDA_DEVICE_ORDER, where every report agrees and nothing promises it.",
        "No fleet has a device",
        (10, 8),
    )
    return parts.asked(
        panel, parts.rows(by("count", (*FLEET, "runtime", "evidence"), of(catalog.FLEET_DEVICE_INFO, OF_FLEET)))
    )


def _backends() -> statetimeline.Panel:
    panel = parts.named(
        parts.timeline(parts.UP_TEXTS),
        "Backends",
        "When each vendor's backend answered. Vendors that a host does not have are not there.",
        "No backend",
        (14, 6),
    )
    return parts.asked(
        panel, parts.over_time(by("min", _HOST_VENDOR, of(catalog.BACKEND_UP, OF_VENDOR)), "{{vendor}} ({{instance}})")
    )


def _down() -> table.Panel:
    columns = (
        host_column(),
        Column("Vendor", "vendor"),
        Column("Reason", "reason", parts.wide(200)),
    )
    panel = parts.named(
        parts.listed(columns),
        "Backends that are down",
        "Why a vendor's cards cannot be read now. The exporter's log says it in a sentence.",
        "Every backend is up",
        (10, 6),
    )
    return parts.asked(
        panel, parts.rows(by("max", (*_HOST_VENDOR, "reason"), of(catalog.BACKEND_FAULT_INFO, OF_VENDOR)))
    )


def _durations() -> timeseries.Panel:
    panel = parts.named(
        parts.lines("s"),
        "Time to read the cards",
        "From asking a vendor's process to its answer, or to giving up on what hangs.",
        "No backend",
        (10, 8),
    )
    return parts.asked(
        panel,
        parts.over_time(by("max", _HOST_VENDOR, of(catalog.BACKEND_DURATION, OF_VENDOR)), "{{vendor}} ({{instance}})"),
    )


def _faults() -> timeseries.Panel:
    panel = parts.named(
        parts.lines("short"),
        "Faults",
        "Faults of backends and devices a minute, by reason. A card that hangs counts once for each scrape that met "
        "it.",
        "No fault in this time",
        (8, 8),
    )
    rate = f"60 * rate({of(catalog.BACKEND_FAULTS, OF_VENDOR)}[$__rate_interval]) > 0"
    return parts.asked(
        panel, parts.over_time(by("sum", (*_HOST_VENDOR, "reason"), rate), "{{reason}}, {{vendor}} ({{instance}})")
    )


def _hints() -> table.Panel:
    columns = (host_column(), Column("Vendor", "vendor", parts.wide(80)), Column("Hint", "hint"))
    panel = parts.named(
        parts.listed(columns),
        "What would bring more readings",
        "Devices lack readings that something would bring. The exporter's log and `explain` say it in a sentence.",
        "Nothing is lacking",
        (6, 8),
    )
    return parts.asked(panel, parts.rows(by("max", (*_HOST_VENDOR, "hint"), of(catalog.HINT_INFO, OF_VENDOR))))


def _found() -> table.Panel:
    columns = (
        host_column(),
        Column("Vendor", "vendor", parts.wide(90)),
        Column("Found", "Value #A", parts.wide(90)),
        Column("Expected", "Value #B", parts.wide(120, noValue="any number")),
        Column("Missing", "Value #C", parts.over(1, parts.WORST)),
    )
    panel = parts.named(
        parts.listed(columns, order=[("Missing", True), ("Host", False)]),
        "Cards found and expected",
        "Whole cards that can be read or are asleep, and how many the settings expect of the vendor "
        "(expected_devices).",
        "No exporter answers",
        (24, 6),
    )
    found, expected = (
        by("max", _HOST_VENDOR, of(family, OF_VENDOR)) for family in (catalog.DEVICES_FOUND, catalog.DEVICES_EXPECTED)
    )
    return parts.asked(
        panel, parts.rows(found), parts.rows(expected), parts.rows(f"clamp_min({expected} - {found}, 0)")
    )


def _builds() -> table.Panel:
    columns = (
        host_column(),
        Column("Version", "version", parts.wide(90)),
        Column("Python", "python_version", parts.wide(90)),
        Column(
            "Settings",
            "Value #B",
            parts.coloured(parts.texts(_0=("reload failed", parts.WORST), _1=("ok", parts.GOOD))),
        ),
        Column("In force for", "Value #C", {"unit": "dtdurations", "decimals": 0, "noValue": "not known"}),
    )
    panel = parts.named(
        parts.listed(columns, order=[("Host", False)]),
        "Versions and settings",
        "What runs where, whether the last attempt to load the settings succeeded, and how long those in force have "
        "been so.",
        "No exporter answers",
        (14, 8),
    )
    return parts.asked(
        panel,
        parts.rows(by("max", (*HOST, "version", "python_version"), of(catalog.BUILD_INFO))),
        parts.rows(by("min", HOST, of(catalog.RELOAD_SUCCESSFUL))),
        parts.rows(f"time() - {by('max', HOST, of(catalog.RELOAD_TIMESTAMP))}"),
    )


def _up() -> statetimeline.Panel:
    panel = parts.named(
        parts.timeline(parts.UP_TEXTS),
        "Exporters",
        "When Prometheus could scrape each of them.",
        "No exporter was seen within a day",
        (10, 8),
    )
    return parts.asked(panel, parts.over_time(own("up"), "{{instance}}"))


def _costs() -> list[timeseries.Panel]:
    none = "No exporter was seen within a day"
    duration, size, memory, processor = (
        parts.named(parts.lines(unit), title, description, none, (6, 7))
        for title, unit, description in (
            ("Scrape time", "s", "As Prometheus measures it."),
            ("Samples a scrape", "short", "Series that each exporter has."),
            (
                "Memory of the exporter",
                "bytes",
                "Resident, of the parent process; each vendor has a small one beside it.",
            ),
            ("Processor time", "percentunit", "Share of one core that the parent process takes."),
        )
    )
    rate = f"rate({of('process_cpu_seconds_total')}[$__rate_interval])"
    return [
        parts.asked(duration, parts.over_time(own("scrape_duration_seconds"), "{{instance}}")),
        parts.asked(size, parts.over_time(own("scrape_samples_scraped"), "{{instance}}")),
        parts.asked(memory, parts.over_time(own("process_resident_memory_bytes"), "{{instance}}")),
        parts.asked(processor, parts.over_time(f"{rate} and on ({', '.join(HOST)}) {exporters()}", "{{instance}}")),
    ]
