"""Fills the made parts of ``docs/runbook.md``: ``python -m tests.runbook_page``."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from exporter.faults import FAULTS, FaultReason
from exporter.refusals import REFUSALS, RefusalCode

PATH = Path(__file__).parent.parent / "docs" / "runbook.md"

_CODE = re.compile(r"`[^`]+`")
_NO_BREAK = "\N{NO-BREAK SPACE}"
_PART = re.compile(r"(<!-- (refusals|faults) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
_ALERT = re.compile(r"\bGpu[A-Z]\w+")
_PLACES = {"docs/installation.md": "[installation.md](installation.md#by-vendor)"}


def page(text: str) -> str:
    """The page's text with its made parts as the code has them now."""
    refusals = "\n\n".join(_section(code, entry) for code, entry in REFUSALS.items())
    rows = (_row(reason, entry) for reason, entry in FAULTS.items())
    made = {"refusals": refusals, "faults": "\n".join(("| reason | meaning | what to do |", "|---|---|---|", *rows))}
    return _PART.sub(lambda match: f"{match[1]}\n{made[match[2]]}\n\n{match[3]}", text)


def _row(reason: str, entry: FaultReason) -> str:
    advice = _ALERT.sub(lambda match: f"[{match[0]}](#{match[0].lower()})", entry.advice)
    for place, link in _PLACES.items():
        advice = advice.replace(place, link)
    return " | ".join((f"| `{reason}`", *(text.replace("|", "\\|") for text in (entry.meaning, advice)))) + " |"


def _section(code: str, entry: RefusalCode) -> str:
    parts = (("Meaning", f"Refused because {entry.meaning}."), ("Check", entry.check), ("Cure", entry.advice))
    return "\n\n".join((f"### {code}", *(_filled(f"**{name}.** {said}") for name, said in parts)))


def _filled(text: str) -> str:
    """In lines, each command on one of them."""
    whole = _CODE.sub(lambda match: match[0].replace(" ", _NO_BREAK), text)
    lines = textwrap.fill(whole, 120, break_long_words=False, break_on_hyphens=False)
    return lines.replace(_NO_BREAK, " ")


if __name__ == "__main__":
    PATH.write_text(page(PATH.read_text(encoding="utf-8")), encoding="utf-8")
