"""What the checks find, and how that is shown to people and to programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from exporter import __version__
from exporter.reports import visible

Level = Literal["PASS", "WARN", "FAIL"]

LEVELS: tuple[Level, ...] = ("PASS", "WARN", "FAIL")
"""The mildest first."""

# Of a terminal: green, yellow, red; the words alone say the same.
_COLOURS: dict[Level, str] = {"PASS": "\x1b[32m", "WARN": "\x1b[33m", "FAIL": "\x1b[31m"}
_PLAIN = "\x1b[0m"
_CHECK_WIDTH = 12


class Finding(msgspec.Struct, frozen=True):
    """One line: ``check`` found this of ``subject``. ``fix`` are sentences on what to do, empty for a PASS."""

    check: str
    subject: str
    level: Level
    found: str
    fix: str = ""


def passed(check: str, subject: str, found: str) -> Finding:
    """As it should be."""
    return Finding(check, subject, "PASS", found)


def warned(check: str, subject: str, found: str, fix: str) -> Finding:
    """Something is missing, or may be meant so."""
    return Finding(check, subject, "WARN", found, fix)


def failed(check: str, subject: str, found: str, fix: str) -> Finding:
    """Something that is asked for does not work."""
    return Finding(check, subject, "FAIL", found, fix)


def worst(findings: Iterable[Finding]) -> Level:
    """The worst level that there is; PASS of none."""
    return max((each.level for each in findings), key=LEVELS.index, default="PASS")


def as_text(findings: Sequence[Finding], *, coloured: bool) -> str:
    """A line a finding, what to do below it, and a line with the numbers of each level at the end."""
    lines = [line for each in findings for line in _lines(each, coloured)]
    return "\n".join([*lines, "", _summary(findings), ""])


def _lines(finding: Finding, coloured: bool) -> Iterator[str]:
    colour, plain = (_COLOURS[finding.level], _PLAIN) if coloured else ("", "")
    check, subject, found = finding.check.ljust(_CHECK_WIDTH), visible(finding.subject), visible(finding.found)
    yield f"{colour}{finding.level}{plain}  {check}  {subject}: {found}"
    if finding.fix:
        yield f"{' ' * (len(finding.level) + _CHECK_WIDTH + 4)}fix: {visible(finding.fix)}"


def _summary(findings: Sequence[Finding]) -> str:
    counts = Counter(each.level for each in findings)
    return ", ".join(f"{counts[level]} {level}" for level in reversed(LEVELS))


def as_json(findings: Sequence[Finding]) -> str:
    """An object: ``version`` of the program, the ``worst`` level, and ``findings``, each with all of its fields."""
    document: dict[str, Any] = {
        "version": __version__,
        "worst": worst(findings),
        "findings": [{name: visible(text) for name, text in msgspec.structs.asdict(each).items()} for each in findings],
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"
