"""Logging as exporters do it: one line an event, logfmt or JSON, to standard error."""

from __future__ import annotations

import datetime
import json
import logging
import os
import re
import sys
from typing import Any

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}
FORMATS = ("logfmt", "json")

_PRIORITIES = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}
_NAMES = {logging.WARNING: "warn", logging.CRITICAL: "error"}
_BARE = re.compile(r"[^\s\"=\\\x00-\x1f\x7f]+")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    at = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
    fields = {
        "time": at.replace("+00:00", "Z"),
        "level": _NAMES.get(record.levelno, record.levelname.lower()),
        "msg": record.getMessage(),
        **getattr(record, "fields", {}),
    }
    if record.exc_info and record.exc_info[0] is not None:
        fields["error"] = f"{record.exc_info[0].__name__}: {record.exc_info[1]}"
    return fields


class LogfmtFormatter(logging.Formatter):
    """``time=... level=info msg="..." key=value``; values with blanks or quotes are quoted as JSON strings."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the values hold."""
        return " ".join(f"{name}={_quoted(value)}" for name, value in _fields(record).items() if value is not None)


def _quoted(value: object) -> str:
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the values hold."""
        return json.dumps(_fields(record), default=str)


class JournalFormatter(logging.Formatter):
    """Another's lines, with the level in front as the journal takes it from a service's output: ``<4>`` for a warning.
    Source: sd-daemon(3).
    """

    def __init__(self, lines: logging.Formatter) -> None:
        super().__init__()
        self._lines = lines

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the values hold."""
        return f"<{_PRIORITIES.get(record.levelno, 6)}>{self._lines.format(record)}"


def _goes_to_journal() -> bool:
    """Whether standard error is the stream that systemd connected with the journal. Source: systemd.exec(5)."""
    try:
        seen = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):  # it is closed, or there is none
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{seen.st_dev}:{seen.st_ino}"


def mark(level: int) -> str:
    """What stands in front of a line of this level where standard error is the journal's; nothing else."""
    return f"<{_PRIORITIES.get(level, 6)}>" if _goes_to_journal() else ""


def configure(level: str, form: str) -> None:
    """Send this package's log to standard error; the HTTP server's own is kept to its errors."""
    handler = logging.StreamHandler(sys.stderr)
    lines = JsonFormatter() if form == "json" else LogfmtFormatter()
    handler.setFormatter(JournalFormatter(lines) if _goes_to_journal() else lines)
    logging.basicConfig(level=logging.ERROR, handlers=[handler], force=True)
    logging.getLogger("exporter").setLevel(LEVELS[level])
