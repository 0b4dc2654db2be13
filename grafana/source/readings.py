"""The three readings over time: of the devices of fleets, and of cards."""

from __future__ import annotations

from grafana_foundation_sdk.builders import timeseries

from grafana.source import parts
from grafana.source.queries import TEMPERATURE, UTILIZATION, each, in_use


def readings(labels: tuple[str, ...], legend: str, width: int, *matchers: str) -> list[timeseries.Panel]:
    """A panel each for utilization, memory and temperature, with a line for each of these labels' values."""
    return [
        _over_time(
            parts.lines("percent", 100),
            each(UTILIZATION, labels, *matchers),
            legend,
            ("Utilization", "Share of the time in which the card was busy, with whatever ran on it.", width),
        ),
        _over_time(
            parts.lines("percent", 100),
            in_use(labels, *matchers),
            legend,
            (
                "Memory in use",
                "Share of its memory that can no longer be allocated, the driver's reserve included.",
                width,
            ),
        ),
        _over_time(
            parts.lines("celsius"),
            each(TEMPERATURE, labels, *matchers),
            legend,
            ("Temperature", "The card's core or edge sensor.", width),
        ),
    ]


def _over_time(panel: timeseries.Panel, expression: str, legend: str, named: tuple[str, str, int]) -> timeseries.Panel:
    title, description, width = named
    parts.named(panel, title, f"{description} A gap was not measured.", "Not measured", (width, 9))
    return parts.asked(panel, parts.over_time(expression, legend))
