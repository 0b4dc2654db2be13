"""Reads a page in the plain text format, strictly: what is no line of it, or comes twice or in two places, is an error.

The client library's own parser takes ten times as long, and lets more pass.
"""

from __future__ import annotations

import functools
import re
from types import MappingProxyType

from tests.harness import Sample, Scrape

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{([^\n]*)\})? ([^\s{}]+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\[\\"n])*)"(,|$)')
_ESCAPED = re.compile(r'\\([\\"n])')


class PageError(AssertionError):
    """The text is no page."""


def read(text: str, seconds: float = 0.0) -> Scrape:
    """The page's samples by name, as :func:`tests.harness.parse` gives them; raises :class:`PageError`."""
    if text and not text.endswith("\n"):
        raise PageError(f"the page ends within a line: {text[-100:]!r}")
    samples: dict[str, list[Sample]] = {}
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    families: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            _enter(line, families)
            continue
        match = _SAMPLE.fullmatch(line)
        if match is None or not families or families[-1] != match[1]:
            raise PageError(f"no sample of the family {families[-1:]}: {line!r}")
        labels = _labels(match[2] or "")
        if (match[1], frozenset(labels.items())) in seen:
            raise PageError(f"{line!r} comes twice")
        seen.add((match[1], frozenset(labels.items())))
        samples.setdefault(match[1], []).append(Sample(labels, float(match[3])))
    return Scrape(samples, seconds)


def _enter(line: str, families: list[str]) -> None:
    """A family is told of twice, by HELP and TYPE, and then has its samples."""
    _, kind, name, *_ = [*line.split(" ", 3), "", ""]
    if kind not in ("HELP", "TYPE") or (kind == "HELP" and name in families):
        raise PageError(f"no beginning of a family, or its second: {line!r}")
    if kind == "HELP":
        families.append(name)
    elif families[-1:] != [name]:
        raise PageError(f"a type of another family than {families[-1:]}: {line!r}")


@functools.lru_cache(4096)
def _labels(text: str) -> MappingProxyType[str, str]:
    found = list(_LABEL.finditer(text))
    if "".join(match[0] for match in found) != text:
        raise PageError(f"no labels: {text!r}")
    labels = {match[1]: _ESCAPED.sub(lambda escaped: escaped[1].replace("n", "\n"), match[2]) for match in found}
    if len(labels) != len(found):
        raise PageError(f"a label comes twice: {text!r}")
    return MappingProxyType(labels)
