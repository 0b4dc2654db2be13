"""One call of AMD's library at a time, whichever card it is for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from exporter.errors import DeviceFault

_HUNG_AFTER_SECONDS = 0.5


class Turns:
    """Before ROCm 7.2 the library keeps the metrics of the card that was asked last in one place for all of them: cards
    that are asked at once get each other's, or crash it (openxla/xla#44992, ml-energy/zeus#256).

    A call that does not return costs its own card alone: after a while the others are made beside it. What was asked
    while such a call came back after all may be of either card, so it counts for neither.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: object | None = None
        self._entered = 0.0
        self._late = 0

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Raises ``DeviceFault`` at the end where the call was not alone."""
        mine = object()
        with self._changed:
            while self._inside is not None and (left := self._entered + _HUNG_AFTER_SECONDS - time.monotonic()) > 0:
                self._changed.wait(left)
            self._inside, self._entered, late = mine, time.monotonic(), self._late
        try:
            yield
        finally:
            with self._changed:
                if self._inside is mine:
                    self._inside = None
                    self._changed.notify()
                else:  # overtaken
                    self._late += 1
        if self._late != late:
            raise DeviceFault("hung", "a call of AMD's library came back late, beside one for another card")
