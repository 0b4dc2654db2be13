"""Regular expressions of the settings, matched in time that grows with the text alone.

Python's own engine can take years over a command line that somebody made for that, and holds up every thread meanwhile:
whoever may start a process could stop the exporter. RE2 has no expressions that need this: no look-around, and no
references back. It is loaded only where the settings have a regular expression.
"""

from __future__ import annotations

import functools
from typing import Any


class PatternError(ValueError):
    """A text is no regular expression of RE2; the message says why."""


class Pattern:
    """A regular expression; ``names`` are those of its groups."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self.names: tuple[str, ...] = tuple(compiled.groupindex)

    def search(self, text: str) -> dict[str, str] | None:
        """The named groups of the first match in a text, empty where a group took no part; None without a match."""
        return self._groups(self._compiled.search(text))

    def fullmatch(self, text: str) -> dict[str, str] | None:
        """The same, where the whole text matches."""
        return self._groups(self._compiled.fullmatch(text))

    def _groups(self, match: Any) -> dict[str, str] | None:
        return None if match is None else {name: match.group(name) or "" for name in self.names}


@functools.lru_cache(maxsize=256)
def pattern(text: str) -> Pattern:
    """The regular expression of a text; raises :class:`PatternError`."""
    import re2

    options = re2.Options()
    options.log_errors = False
    try:
        compiled = re2.compile(text, options=options)
    except re2.error as error:
        said = error.args[0] if error.args else "it cannot be read"
        raise PatternError(said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)) from error
    except UnicodeError as error:
        raise PatternError("it is no text") from error
    return Pattern(compiled)
