"""What has never been told is asked for rarely, and never given up: an answer of "not supported" may pass."""

from __future__ import annotations

import time

_ASKED_AT_FIRST, AGAIN_AFTER_SECONDS = 3, 30.0


class Missed:
    """How often a call has found nothing in a row, and when last; ``given``: it has found something before.

    What a card has never given it is asked for so many times in a row, and then so much more rarely. What it has given
    once it is asked for in every cycle.
    """

    def __init__(self) -> None:
        self.times, self.last, self.given = 0, 0.0, False

    def rests(self) -> bool:
        """It need not be tried now."""
        tried = self.times >= _ASKED_AT_FIRST and not self.given
        return tried and time.monotonic() - self.last < AGAIN_AFTER_SECONDS

    def note(self, found: bool) -> None:
        """It was tried."""
        self.given = self.given or found
        self.times, self.last = (0 if found else self.times + 1), time.monotonic()
