"""Calls into a driver library through ctypes: each is declared as its header has it, and no answer passes unseen."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from exporter.wire import DriverAnswer, DriverDevice

Signatures = Mapping[str, tuple[Any, ...]]
"""Of each call the type of its result (None: it has none), then those of its arguments."""

# More than any host has. A larger number is garbage, and is not to become an array.
MOST_ENTRIES = 4096
# A list that grew between the question how long it is and the question what is in it is asked for again.
_ATTEMPTS = 8


class Refused(Exception):
    """The library cannot answer; ``str()`` is the sentence that says which call, or which file, and how."""


class Library:
    """A driver library of this process, loaded by the first of ``names`` that there is.

    ``named`` puts a result other than success, which is 0, into words. Raises :class:`Refused` if no name is loaded.
    """

    def __init__(self, names: Sequence[str], signatures: Signatures, named: Callable[[Library, int], str]) -> None:
        self._signatures, self._named = signatures, named
        self.name, self._loaded = _first(names)

    def has(self, symbol: str) -> bool:
        """Whether the library exports the symbol: an older one may not."""
        return hasattr(self._loaded, symbol)

    def call(self, symbol: str, *arguments: Any) -> Any:
        """What the call returns. Raises :class:`Refused` if the library has no such symbol."""
        if not self.has(symbol):
            raise Refused(f"{self.name} has no symbol {symbol}")
        function = getattr(self._loaded, symbol)
        function.restype, *function.argtypes = self._signatures[symbol]
        return function(*arguments)

    def must(self, symbol: str, *arguments: Any) -> None:
        """A call that has to succeed. Raises :class:`Refused` with what else it answered."""
        if code := self.call(symbol, *arguments):
            raise self.refused(symbol, code)

    def refused(self, symbol: str, code: int) -> Refused:
        """That a call answered this, to be raised."""
        return Refused(f"{symbol} answered {self._named(self, code)}")

    def number(self, symbol: str, *arguments: Any) -> int:
        """The ``int`` that a call writes to its first argument. Raises as :meth:`must`."""
        out = ctypes.c_int()
        self.must(symbol, ctypes.byref(out), *arguments)
        return out.value

    def answer(
        self, version: Callable[[Library], str], devices: Callable[[Library], Iterable[DriverDevice]]
    ) -> DriverAnswer:
        """The devices, or without any the fault that they end in; the version is read after them, as init is theirs."""
        found: tuple[DriverDevice, ...] = ()
        fault = ""
        try:
            found = tuple(devices(self))
        except Refused as refused:
            fault = str(refused)
        return DriverAnswer(file=self.name, version=version(self), devices=found, fault=fault)


def _first(names: Sequence[str]) -> tuple[str, ctypes.CDLL]:
    said: dict[str, list[str]] = {}
    for name in names:
        try:
            return name, ctypes.CDLL(name)
        except OSError as error:
            file, _, reason = str(error).partition(": ")  # the file may be one that the library needs
            said.setdefault(reason, []).append(file)
    reasons = "; ".join(f"{', '.join(files)}: {reason}" for reason, files in said.items())
    raise Refused(f"the library cannot be loaded: {reasons}")


def listed(what: str, kind: Any, ask: Callable[[Any, Any], bool]) -> list[Any]:
    """A list that a library first tells the length of, then the entries; an entry is a value of ``kind``.

    ``ask(count, array)`` asks for the length where ``array`` is None, and says whether it got everything. Raises
    :class:`Refused` if the length is absurd, or never holds still.
    """
    for _ in range(_ATTEMPTS):
        count = ctypes.c_uint32(0)
        if not ask(ctypes.byref(count), None):
            continue
        if count.value > MOST_ENTRIES:
            raise Refused(f"{what} answered that there are {count.value} entries")
        entries = (kind * count.value)()
        if not count.value or ask(ctypes.byref(count), entries):
            return list(entries[: count.value])
    raise Refused(f"{what} answered that there are more entries, {_ATTEMPTS} times")


def text(raw: bytes) -> str:
    """A name up to its NUL; what is no UTF-8 is replaced."""
    return raw.partition(b"\0")[0].decode("utf-8", "replace").strip()


def uuid_text(raw: bytes) -> str:
    """16 bytes as UUIDs are written, in lower case; empty for zeros alone, which are nobody's."""
    digits = raw.hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])) if any(raw) else ""
