"""Fills the made part of ``docs/runbook.md``: ``python -m tests.runbook_page``."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from exporter.refusals import REFUSALS, RefusalCode

PATH = Path(__file__).parent.parent / "docs" / "runbook.md"

_CODE = re.compile(r"`[^`]+`")
_NO_BREAK = "\N{NO-BREAK SPACE}"
_PART = re.compile(r"(<!-- refusals -->\n).*(<!-- /refusals -->)", re.DOTALL)


def page(text: str) -> str:
    """The page's text with its made part as the code has it now."""
    part = "\n\n".join(_section(code, entry) for code, entry in REFUSALS.items())
    return _PART.sub(lambda match: f"{match[1]}\n{part}\n\n{match[2]}", text)


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
