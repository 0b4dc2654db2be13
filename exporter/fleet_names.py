"""Names of fleets: a name may have placeholders such as ``{job}``, which each workload that is found fills in."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")

LONGEST = 128
"""Characters of a name that was filled in; a longer one ends in ``~`` and eight digits of its SHA-256."""

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._:@/\\-]")  # with the backslash of systemd's own escapes


def placeholders(template: str) -> tuple[str, ...]:
    """The names of a template's placeholders, in order."""
    return tuple(PLACEHOLDER.findall(template))


def filled(template: str, values: Mapping[str, str]) -> str:
    """The name of one workload: ``unnamed`` if nothing fills it. A character that names do not have becomes ``_``.

    Such a name, and one that is too long, ends in ``~`` and eight digits that stand for what it was made from.
    """
    raw = PLACEHOLDER.sub(lambda match: values.get(match[1], ""), template)
    text = _NOT_IN_NAMES.sub("_", raw) or "unnamed"
    return text if (text == raw and len(text) <= LONGEST) or not raw else f"{text[: LONGEST - 9]}~{digest(raw)}"


def digest(text: str) -> str:
    """Eight hex digits that stand for a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:8]
