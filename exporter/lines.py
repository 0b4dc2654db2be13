"""Lines of a page, which the text formats have alike: a label set's text is made once, and joined with values.

Byte for byte what ``prometheus_client`` gives, whose encoders sort and escape the labels of every sample anew. Heads of
families, in which the formats differ, are left to them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

from prometheus_client.utils import floatToGoString

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Labels:
    """A sample's labels, as a mapping and as text: ``{name="value",...}`` by name, with values escaped. One whose value
    is empty is left out, which means the same to Prometheus.
    """

    __slots__ = ("pairs", "text")

    def __init__(self, pairs: Mapping[str, str]) -> None:
        self.pairs = {name: value for name, value in pairs.items() if value}
        inside = ",".join([f'{name}="{_escaped(value)}"' for name, value in sorted(self.pairs.items())])
        self.text = f"{{{inside}}}" if inside else ""

    def plus(self, **more: str) -> Labels:
        """These and some more."""
        return Labels(self.pairs | more)


Row = tuple[Labels, float]


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def lines(name: str, rows: Iterable[Row]) -> str:
    """A sample a line. A large value is that of several samples where several fleets have a card."""
    large: Memo[float, str] = Memo(floatToGoString)
    return "".join(
        [
            # Inside these bounds there are no exponents and no infinities, as repr() has them.
            f"{name}{labels.text} {repr(float(value)) if -1e6 < value < 1e6 else large(value)}\n"
            for labels, value in rows
        ]
    )


class Memo(Generic[Key, Value]):
    """What was made of each key that the page before, or this one, has asked for; others are forgotten."""

    def __init__(self, make: Callable[[Key], Value]) -> None:
        self._make = make
        self._before: dict[Key, Value] = {}
        self._now: dict[Key, Value] = {}

    def begin(self) -> None:
        """Another page."""
        self._before, self._now = self._now, {}

    def __call__(self, key: Key) -> Value:
        """What is made of a key."""
        value = self._now.get(key)
        if value is None:
            value = self._before.get(key)
            self._now[key] = value = self._make(key) if value is None else value
        return value
