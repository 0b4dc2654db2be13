"""YAML text -> nodes that know their lines, within bounds, and what a plain scalar says.

A plain scalar means what YAML 1.2 says, not what PyYAML makes of it: ``no`` is text and ``010`` is ten, where YAML 1.1
has false and eight. Tags are refused. Aliases work, within :data:`MAX_NODES`. Any bytes at all end in nodes or a
:class:`ConfigError`.
"""

from __future__ import annotations

import re

import yaml

from exporter.errors import ConfigError
from exporter.files import read_regular

MAX_BYTES = 1 << 20  # of a settings file
MAX_NODES = 100_000  # YAML nodes composed, and visited: an alias is visited anew at each use
MAX_DEPTH = 50  # levels; the settings need 4, and PyYAML's recursion would use up Python's stack at some hundreds


def read(path: str, what: str = "settings file") -> str:
    """The text of a file of at most :data:`MAX_BYTES`, in UTF-8; raises :class:`ConfigError` on a ``what``."""
    return _decoded(_bytes_of(path, what), path, what)


def _bytes_of(path: str, what: str) -> bytes:
    try:
        return read_regular(path, MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL or a lone surrogate in the path itself
        raise ConfigError(path, f"cannot read the {what}: {getattr(error, 'strerror', error)}") from error


def _decoded(data: bytes, path: str, what: str) -> str:
    if len(data) > MAX_BYTES:
        raise ConfigError(path, f"expected a {what} of at most {MAX_BYTES} bytes, found a larger one")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        message = f"expected text in UTF-8, found the byte 0x{data[error.start]:02x}"
        raise ConfigError(path, message, data.count(b"\n", 0, error.start) + 1) from error


CONTROL = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What YAML 1.1 calls not printable, lone surrogates among it."""


def _refuse_control_characters(text: str, path: str) -> None:
    if bad := CONTROL.search(text):
        line = len((text[: bad.start()] + "x").splitlines())
        raise ConfigError(path, f"expected printable text, found the character U+{ord(bad[0]):04X}", line)


def compose(text: str, path: str) -> yaml.Node | None:
    """The root node; None without a document. ``path`` is only named in complaints. Raises :class:`ConfigError`."""
    _refuse_control_characters(text, path)
    loader = _Loader(text, path)
    try:
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, path) from error
    except (ValueError, OverflowError) as error:  # from chr() and int() inside of PyYAML: "\UFFFFFFFF", %YAML 999...
        raise ConfigError(path, "not valid YAML: an escape or a version is out of range", loader.line + 1) from error
    finally:
        loader.dispose()


def _syntax_error(error: yaml.MarkedYAMLError, path: str) -> ConfigError:
    words = ", ".join(part for part in (error.context, error.problem) if part)
    line = error.problem_mark.line + 1 if error.problem_mark else None
    return ConfigError(path, f"not valid YAML: {words[:300]}", line)


class _Loader(yaml.SafeLoader):
    """PyYAML's composer with bounds, since it recurses once a level and has none of its own."""

    def __init__(self, text: str, path: str) -> None:
        super().__init__(text)
        self._path = path
        self._nodes = 0
        self._open: list[str | None] = []  # the anchor, or None, of each node that is being composed now

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._nodes += 1
        event: yaml.NodeEvent = self.peek_event()  # type: ignore[no-untyped-call]
        if problem := self._problem(event):
            raise ConfigError(self._path, problem, line_of(event))
        self._open.append(event.anchor)
        node = super().compose_node(parent, index)
        self._open.pop()
        return node

    def _problem(self, event: yaml.NodeEvent) -> str:
        if self._nodes > MAX_NODES:
            return f"expected at most {MAX_NODES} values, found more"
        if len(self._open) >= MAX_DEPTH:
            return f"expected at most {MAX_DEPTH} levels of nesting, found more"
        if isinstance(event, yaml.AliasEvent) and event.anchor in self._open:
            return f"found the alias *{short(event.anchor or '')} inside of what it refers to, which has no end"
        if tag := getattr(event, "tag", None):  # set only where the text spells it out
            name = quoted(re.sub(r"\Atag:yaml\.org,2002:", "!!", tag))
            return f"expected no YAML tags, found {name}: quote a value to make it text"
        return ""


_NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_TRUTH = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


def meaning(node: yaml.ScalarNode) -> str | float | bool | None:
    """A scalar's value by YAML 1.2; ``.inf`` and ``.nan`` stay text, so that every number has an order."""
    text: str = node.value
    if node.style is not None:  # quoted, or a block of text
        return text
    if text in _NULL:
        return None
    if _NUMBER.fullmatch(text):
        return float(text)  # never int(), which raises ValueError above 4300 digits
    return _TRUTH.get(text, text)


def is_null(node: yaml.Node) -> bool:
    """Written as null, or left empty."""
    return isinstance(node, yaml.ScalarNode) and meaning(node) is None


def found(node: yaml.Node) -> str:
    """What a complaint calls the node."""
    if not isinstance(node, yaml.ScalarNode):
        return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
    value = meaning(node)
    if value is None:
        return "nothing (null)"
    if isinstance(value, str):
        return f"the text {quoted(value)}"
    return f"the {'truth value' if isinstance(value, bool) else 'number'} {short(node.value)}"


def short(text: str) -> str:
    """At most 60 characters of it."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def quoted(text: str) -> str:
    """As :func:`short`, in quotes, with what is not printable escaped."""
    return repr(short(text))


def line_of(place: yaml.Node | yaml.Event) -> int:
    """Counts from 1. An alias has the line of what it refers to: PyYAML keeps no other."""
    return place.start_mark.line + 1 if place.start_mark else 1


def join(key: str, name: str) -> str:
    """The dotted path of a name under a key."""
    name = name if re.fullmatch(r"[A-Za-z0-9_-]{1,60}", name) else quoted(name)
    return f"{key}.{name}" if key else name
