"""Tables of figures, and the targets that they are held against."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


def quantile(values: Sequence[float], percent: int) -> float:
    """Of at least two values; 50 is the median."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


class Row(NamedTuple):
    """``holds`` is None where there is no target."""

    cells: tuple[str, ...]
    holds: bool | None = None


class Table(NamedTuple):
    """A table whose last column says whether the target holds, where any row has one."""

    title: str
    text: str
    heading: tuple[str, ...]
    rows: Sequence[Row]

    @property
    def missed(self) -> bool:
        """Whether a target does not hold."""
        return any(row.holds is False for row in self.rows)

    def markdown(self) -> str:
        """The table in columns of equal width, so that it also reads well as plain text."""
        marks = {True: "yes", False: "**MISSED**", None: ""}
        lines = [self.heading, *(row.cells for row in self.rows)]
        if any(row.holds is not None for row in self.rows):
            last = ["target holds", *(marks[row.holds] for row in self.rows)]
            lines = [(*cells, mark) for cells, mark in zip(lines, last, strict=True)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, tuple("-" * width for width in widths))
        padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
        return f"## {self.title}\n\n{self.text}\n\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in padded)


class Line(NamedTuple):
    """The straight line that fits points best, and how far the worst point is from it, as a share of its value."""

    start: float
    slope: float
    worst: float


def fitted(points: Sequence[tuple[float, float]]) -> Line:
    """The line through at least three points, by least squares."""
    xs, ys = zip(*points, strict=True)
    slope, start = statistics.linear_regression(xs, ys)
    return Line(start, slope, max(abs(start + slope * x - y) / y for x, y in points))
