"""Names of fleets: a name may have placeholders such as ``{job}``, which each workload that is found fills in."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")

LONGEST = 128
"""Characters of a name that was filled in; a longer one ends in ``~`` and eight digits of its SHA-256."""

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._:@/-]")


def placeholders(template: str) -> tuple[str, ...]:
    """The names of a template's placeholders, in order."""
    return tuple(PLACEHOLDER.findall(template))


def filled(template: str, values: Mapping[str, str]) -> str:
    """The name of one workload. A character that names do not have becomes ``_``; a value that is missing is empty."""
    text = PLACEHOLDER.sub(lambda match: _NOT_IN_NAMES.sub("_", values.get(match[1], "")), template)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 9]}~{digest(text)}"


def digest(text: str) -> str:
    """Eight hex digits that stand for a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:8]
