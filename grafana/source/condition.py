"""How cards are: their power, clocks, sensors and fans, what holds them back, their links, and what fails in them."""

from __future__ import annotations

from grafana_foundation_sdk.builders import statetimeline, table, timeseries

from exporter import catalog
from grafana.source import parts
from grafana.source.fleets import host_column
from grafana.source.parts import Column
from grafana.source.queries import (
    DEVICE,
    HOST,
    OF_VENDOR,
    POWER,
    SAME_DEVICE,
    UTILIZATION,
    by,
    counted,
    each,
    of,
    own_labels,
    per_second,
    summed,
)

LEGEND = "{{instance}} {{vendor}} GPU {{physical_index}} {{gpu_partition}}"
LINE = (*HOST, "vendor", "physical_index", "gpu_partition", "pci_bus_id")
CARD_COLUMNS = (
    host_column(),
    Column("GPU", "physical_index", parts.wide(50)),
    Column("Vendor", "vendor", parts.wide(80)),
    Column("PCI bus id", "pci_bus_id", parts.wide(115)),
    Column("Part", "gpu_partition", parts.wide(50)),
)
_UNTOLD = "No card here tells it"
# It stands also beside a card that tells it, and not now.
_UNMEASURED = "Not measured"


def _name(metric: str) -> str:
    return catalog.READINGS[metric].name


def _each(metric: str) -> str:
    return each(_name(metric), LINE, OF_VENDOR)


def _over_time(unit: str, title: str, description: str, **expressions: str) -> timeseries.Panel:
    """Lines of cards; the name of each expression is what is in front of the card's, where there are several."""
    panel = parts.named(parts.lines(unit), title, f"{description} A gap was not measured.", _UNMEASURED, (8, 8))
    several = len(expressions) > 1
    asked = [
        parts.over_time(expression, f"{name.replace('_', ' ')}, {LEGEND}" if several else LEGEND)
        for name, expression in expressions.items()
    ]
    return parts.asked(panel, *asked)


def sensors() -> list[timeseries.Panel]:
    """What each card draws, how fast it runs, how hot it is beside its core, and how it is cooled."""
    clocks = _over_time(
        "hertz",
        "Clocks",
        "Of the compute units, and of media engines that have a clock of their own. Not the memory's.",
    )
    fans = _over_time("percentunit", "Fans", "Speed that each fan is told to have, as a share of its highest.")
    rotation = _over_time("rotrpm", "Revolutions of fans", "As measured, a minute. A fan at rest may be meant to be.")
    return [
        _over_time("watt", "Power", "What each card draws.", power=each(POWER, LINE, OF_VENDOR)),
        _over_time(
            "percent",
            "Power against its limit",
            "Share that a card draws of what it is held to now. At its limit it lowers its clocks, as it is meant to.",
            power=f"100 * {each(POWER, LINE, OF_VENDOR)} / {_each('power_limit')}",
        ),
        parts.asked(
            clocks,
            parts.over_time(own_labels("clock", LINE, OF_VENDOR, 'clock!="memory"'), f"{{{{clock}}}}, {LEGEND}"),
        ),
        _over_time(
            "celsius",
            "Memory and hottest spot",
            "Temperature of the memory, and of the hottest spot of the chip.",
            memory=_each("memory_temperature"),
            hottest_spot=_each("junction_temperature"),
        ),
        parts.asked(fans, parts.over_time(own_labels("fan_speed", LINE, OF_VENDOR), f"fan {{{{fan}}}}, {LEGEND}")),
        parts.asked(
            rotation, parts.over_time(own_labels("fan_rotation", LINE, OF_VENDOR), f"fan {{{{fan}}}}, {LEGEND}")
        ),
    ]


def held_back() -> statetimeline.Panel:
    """Which reasons held which cards down, and when."""
    panel = parts.named(
        parts.timeline(parts.HELD_TEXTS),
        "Clocks that were held down",
        "Only reasons that held a card down at some time of the chosen range. Left out are idleness and clocks that "
        "somebody has set. power-cap is the power limit: a card at full work meets it.",
        "No clock was held down, or no card here tells it",
        (12, 9),
    )
    labels = (*LINE, "reason")
    reasons = of(_name("throttled"), OF_VENDOR, 'reason!~"idle|application-clocks"')
    ever = by("max", labels, f"max_over_time({reasons}[$__range] @ end())")
    expression = f"{by('max', labels, reasons)} and on ({', '.join(labels)}) ({ever} > 0)"
    return parts.asked(panel, parts.over_time(expression, f"{{{{reason}}}}, {LEGEND}"))


def narrow_links() -> table.Panel:
    """Cards whose PCIe link is below what the card could do."""
    columns = (
        *CARD_COLUMNS,
        Column("Lanes", "Value #A", parts.wide(70, **_told())),
        Column("of", "Value #B", parts.wide(60, **_told())),
        Column("Generation", "Value #C", parts.wide(90, **_told())),
        Column("up to", "Value #D", parts.wide(70, **_told())),
    )
    panel = parts.named(
        parts.listed(columns, order=[("Lanes", False)]),
        "PCIe links below their best",
        "Cards that use fewer lanes than they have, or a lower generation although they are busy: many lower it while "
        "they have nothing to do. A slot may have no more than that.",
        "Every link is at its best, or no card here tells it",
        (12, 9),
    )
    matched = f"on ({', '.join(SAME_DEVICE)})"
    busy = f"{each(UTILIZATION, DEVICE, OF_VENDOR)} >= 50"
    below = f"(({_below('pcie_width')}) or (({_below('pcie_generation')}) and {matched} ({busy})))"
    shown = ("pcie_width", "pcie_width_maximum", "pcie_generation", "pcie_generation_maximum")
    return parts.asked(
        panel,
        *parts.beside(*(f"{each(_name(metric), DEVICE, OF_VENDOR)} and {matched} {below}" for metric in shown)),
    )


def _below(metric: str) -> str:
    """Devices of which this is less than its maximum."""
    return f"{each(_name(metric), DEVICE, OF_VENDOR)} < {each(_name(f'{metric}_maximum'), DEVICE, OF_VENDOR)}"


def _told(**properties: object) -> dict[str, object]:
    return {"noValue": "not told", "decimals": 0, **properties}


def failures() -> table.Panel:
    """What went wrong in each card in the chosen time, and what it needs."""
    some, any_at_all = (parts.over(1, colour) for colour in (parts.BAD, parts.WORST))
    columns = (
        *CARD_COLUMNS,
        Column("Needs", "action", parts.wide(110)),
        Column("XID errors", "Value #A", parts.wide(95, **{**some, **_told()})),
        Column("Last XID", "Value #B", parts.wide(80, **_told(noValue="none"))),
        Column("Memory, lost", "Value #C", parts.wide(115, **{**any_at_all, **_told()})),
        Column("Memory, corrected", "Value #D", parts.wide(150, **_told())),
        Column("Rows or pages replaced", "Value #E", parts.wide(180, **_told())),
        Column("Memory's repair", "Value #F", parts.wide(120, **parts.coloured(parts.REPAIR_TEXTS))),
        Column("PCIe replays", "Value #G", parts.wide(110, **_told())),
        Column("PCIe errors", "Value #H", parts.wide(105, **{**some, **_told()})),
        Column("Links up", "Value #I", parts.wide(85, **_told())),
        Column("Link errors", "Value #J", parts.wide(95, **{**some, **_told()})),
    )
    panel = parts.named(
        parts.listed(columns, order=[("Memory, lost", True), ("XID errors", True)]),
        "Errors",
        "Counted within the chosen time, where a fleet had the card; replaced rows and pages, the repair that waits, "
        "and links as they are now. XID errors are those that NVIDIA's driver numbers; links are those to other cards.",
        _UNTOLD,
        (24, 10),
    )
    failed, pending, retiring = (
        each(_name(metric), DEVICE, OF_VENDOR)
        for metric in ("row_remapping_failed", "row_remapping_pending", "retired_pages_pending")
    )
    return parts.asked(
        panel,
        *parts.beside(
            counted("xid_errors", OF_VENDOR),
            each(_name("xid_last_code"), DEVICE, OF_VENDOR),
            counted("ecc_errors", OF_VENDOR, 'error="uncorrected"'),
            counted("ecc_errors", OF_VENDOR, 'error="corrected"'),
            f"({summed('remapped_rows', OF_VENDOR)} or {summed('retired_pages', OF_VENDOR)})",
            f"(2 * ({failed} > 0) or {pending} or {retiring})",
            counted("pcie_replays", OF_VENDOR),
            counted("pcie_errors", OF_VENDOR),
            summed("link_up", OF_VENDOR),
            counted("link_errors", OF_VENDOR),
            f"{own_labels('recovery_needed', DEVICE, OF_VENDOR)} == 1",
        ),
    )


def traffic() -> timeseries.Panel:
    """What each card sends and receives."""
    panel = _over_time(
        "Bps",
        "Traffic",
        "What each card sends and receives over PCIe and over its links to other cards (NVLink, XGMI).",
        sent_over_PCIe=per_second("pcie_transmitted", OF_VENDOR),
        received_over_PCIe=per_second("pcie_received", OF_VENDOR),
        sent_to_cards=per_second("link_transmitted", OF_VENDOR),
        received_from_cards=per_second("link_received", OF_VENDOR),
    )
    return panel.span(24)
