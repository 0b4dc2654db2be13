"""A busy share from counters that only rise: over the time between two readings, by the counter's own clock."""

from __future__ import annotations

from exporter import units

_SLACK = 1.1


class Meter:
    """One pair of counters, of which a share needs two readings. Both count in the same unit."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None

    def percent(self, busy: int, clock: int) -> float | None:
        """The share since the reading before; None at first, where the clock stood, and where either went back."""
        before, self._last = self._last, (busy, clock)
        if before is None:
            return None
        return share(busy - before[0], clock - before[1])


def share(busy: int, elapsed: int) -> float | None:
    """Percent; the two are read one after the other, so a little more than all of the time is all of it."""
    if elapsed <= 0 or busy < 0 or busy > _SLACK * elapsed:
        return None
    return units.percent(min(100.0, 100.0 * busy / elapsed))
