"""YAML nodes -> plain data for ``msgspec.convert``, by the types of a struct; or the first complaint, with its line.

msgspec judges every single value; its own messages know no lines and are written for programmers, so the words are made
here. ``Meta.extra`` of a type says what msgspec does not know:

* ``names``: the text is one of the reader's names of that kind;
* ``null``: null may be written, and means None;
* ``regular expression``: the text is one of RE2's;
* ``as written``: the scalar's own text is taken, whatever YAML makes of it, as for plain ``str``;
* ``secret``: so, too, and it is never repeated in a complaint;
* ``empty``: a list of these may be empty;
* ``hint``: what is said behind a complaint about a key or a value of this type;
* ``mapping``: what a mapping with keys of this type is called.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn, get_args, get_origin

import msgspec
import yaml
from msgspec import Meta

from exporter import patterns
from exporter.errors import ConfigError
from exporter.yaml_nodes import CONTROL, MAX_NODES, found, is_null, join, line_of, meaning, quoted, short


def without_none(kind: Any) -> Any:
    """``X`` of ``X | None``, where None means *left out*."""
    members = get_args(kind)
    return members[0] if type(None) in members else kind


def is_struct(kind: Any) -> bool:
    """Whether the type is a struct's."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def item_of(kind: Any) -> Any:
    """What the list has, where ``kind`` is the type of a list, else None."""
    return get_args(kind)[0] if get_origin(kind) is tuple else None


def _meta(kind: Any) -> Meta:
    return next((each for each in getattr(kind, "__metadata__", ()) if isinstance(each, Meta)), Meta())


def _expected(kind: Any) -> str:
    meta = _meta(kind)
    if meta.ge is None:
        return meta.description or "text"
    number = "a whole number" if _is_whole(kind) else "a number"
    return f"{'null or ' if meta.extra else ''}{number} from {meta.ge} to {meta.le}"


def _is_whole(kind: Any) -> bool:
    return getattr(kind, "__origin__", None) is int


def unknown(what: str, name: str, known: Collection[str]) -> str:
    """The complaint about a name that is none of the known ones."""
    close = difflib.get_close_matches(short(name), known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"unknown {what} {quoted(name)}{hint}, expected one of {', '.join(known)}"


class Reader:
    """The walk, from top to bottom. Each method returns plain data, or raises the first complaint, a
    :class:`ConfigError`.
    """

    unset = ""
    """What is said behind a complaint about null where text is expected."""

    def __init__(self, path: str, names: Mapping[str, list[str]]) -> None:
        """``path`` is only named in complaints; ``names`` are the names that there are of each kind."""
        self._path, self._names = path, names
        self._visits = 0

    # --- what a file's own rules are

    def check_struct(self, struct: Any, node: yaml.Node, data: dict[str, Any], key: str) -> None:
        """Called with the data of each struct."""

    def check_names(self, node: yaml.Node, names: list[str], key: str) -> None:
        """Called with each list of texts, which are all different."""

    def left_out(self, node: yaml.Node, key: str) -> bool:
        """Whether a key of the struct at ``key`` with this value is as good as left out."""
        return not key and is_null(node)  # a section whose keys are all commented out

    def key_text(self, node: yaml.ScalarNode) -> object:
        """The key that a scalar is; no text where it cannot be one."""
        return meaning(node)

    # --- the walk

    def value(self, node: yaml.Node, kind: Any, key: str) -> Any:
        """What the node says, as that type, at that dotted path."""
        self._visits += 1
        if self._visits > MAX_NODES:
            self.fail(node, key, f"expected at most {MAX_NODES} values, found more through aliases")
        kind = without_none(kind)
        if is_struct(kind):
            return self._struct(node, kind, key)
        if get_origin(kind) is tuple:
            return self._list(node, item_of(kind), key)
        if get_origin(kind) is dict:
            return self._dict(node, get_args(kind), key)
        as_written = kind is str or {"as written", "secret"} & (_meta(kind).extra or {}).keys()
        return self._own_text(node, kind, key) if as_written else self.leaf(node, kind, key)

    def fail(self, node: yaml.Node, key: str, message: str) -> NoReturn:
        """Raises the complaint."""
        raise ConfigError(self._path, message, line_of(node), key)

    def wrong(self, node: yaml.Node, key: str, expected: str, hint: str = "") -> NoReturn:
        """Raises the complaint that something else was expected than the node is."""
        self.fail(node, key, f"expected {expected}, found {found(node)}{hint}")

    def once(self, seen: dict[str, int], name: str, what: str, node: yaml.Node, key: str) -> None:
        """Fails where the name was ``seen``, with the line of the first time; else it is seen from now on."""
        if name in seen:
            self.fail(node, key, f"found {what} twice, the first time on line {seen[name]}")
        seen[name] = line_of(node)

    def _struct(self, node: yaml.Node, struct: Any, key: str) -> dict[str, Any]:
        fields = {field.name: field for field in msgspec.structs.fields(struct)}
        if not isinstance(node, yaml.MappingNode):
            self.wrong(node, key, f"a mapping with keys of {', '.join(fields)}")
        data: dict[str, Any] = {}
        for name, key_node, value in self._pairs(node, key):
            if name not in fields:
                self.fail(key_node, join(key, name), unknown("key", name, fields))
            if not self.left_out(value, key):
                data[name] = self.value(value, fields[name].type, join(key, name))
        for name, field in fields.items():
            if field.required and name not in data:
                self.fail(node, join(key, name), f"expected {_expected(field.type)}, found no such key")
        self.check_struct(struct, node, data, key)
        return data

    def _pairs(self, node: yaml.Node, key: str, hint: str = "") -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        seen: dict[str, int] = {}
        for key_node, value in node.value:
            name = self._key(key_node, key, hint)
            self.once(seen, name, "this key", key_node, join(key, name))
            yield name, key_node, value

    def _key(self, node: yaml.Node, key: str, hint: str) -> str:
        name = self.key_text(node) if isinstance(node, yaml.ScalarNode) else None
        if not isinstance(name, str):
            self.wrong(node, key, "text as a key", hint)
        if name == "<<":
            self.fail(node, key, "found the merge key <<, which is not read here: write its keys out")
        return name

    def _list(self, node: yaml.Node, item: Any, key: str) -> list[Any]:
        if not isinstance(node, yaml.SequenceNode):
            self.wrong(node, key, "a list")
        values = [self.value(each, item, f"{key}[{index}]") for index, each in enumerate(node.value)]
        if not is_struct(item):
            self._check_list(node, values, key, may_be_empty="empty" in (_meta(item).extra or {}))
        return values

    def _check_list(self, node: yaml.Node, names: list[str], key: str, *, may_be_empty: bool) -> None:
        if not names and not may_be_empty:
            self.fail(node, key, "expected at least one, found an empty list")
        seen: dict[str, int] = {}
        for index, name in enumerate(names):
            self.once(seen, name, name, node.value[index], f"{key}[{index}]")
        self.check_names(node, names, key)

    def _dict(self, node: yaml.Node, kinds: tuple[Any, Any], key: str) -> dict[str, Any]:
        name_kind, kind = kinds
        extra = _meta(name_kind).extra or {}
        hint = extra.get("hint", "")
        if not isinstance(node, yaml.MappingNode):
            self.wrong(node, key, extra.get("mapping", "a mapping"))
        return {
            name if name_kind is str else self.leaf(key_node, name_kind, key, hint): self.value(
                value, kind, join(key, name)
            )
            for name, key_node, value in self._pairs(node, key, hint)
        }

    def _own_text(self, node: yaml.Node, kind: Any, key: str) -> str:
        """The scalar's text as it is written, where ``kind`` takes it."""
        if not isinstance(node, yaml.ScalarNode):
            self.wrong(node, key, "text", ': quote it, such as "2,3"')
        if is_null(node):
            self.wrong(node, key, "text", self.unset)
        if bad := CONTROL.search(node.value):  # an escape can make what the file itself cannot have
            self.fail(node, key, f"expected printable text, found an escape for the character U+{ord(bad[0]):04X}")
        try:
            return str(msgspec.convert(str(node.value), kind))
        except msgspec.ValidationError:
            if "secret" in (_meta(kind).extra or {}):
                self.fail(node, key, f"expected {_expected(kind)}, found something else")
            self.wrong(node, key, _expected(kind))

    def _check_pattern(self, node: yaml.Node, value: str, key: str) -> None:
        try:
            patterns.pattern(value)
        except patterns.PatternError as error:
            self.fail(node, key, f"expected a regular expression of RE2, found {quoted(value)}: {error}")

    def leaf(self, node: yaml.Node, kind: Any, key: str, hint: str = "") -> Any:
        """A single value of that type; ``hint`` is said behind a complaint."""
        extra = _meta(kind).extra or {}
        value = meaning(node) if isinstance(node, yaml.ScalarNode) else node
        if value is None and "null" in extra:
            return None
        names = self._names[extra["names"]] if "names" in extra else []
        if names and isinstance(value, str) and value not in names:
            self.fail(node, key, unknown(extra["names"], value, names))
        if _is_whole(kind) and isinstance(value, float) and value.is_integer():
            value = int(value)
        if "regular expression" in extra and isinstance(value, str):
            self._check_pattern(node, value, key)
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError:
            hint = ": quote it to make it text" if _meta(kind).pattern and isinstance(value, bool | float) else hint
            self.wrong(node, key, f"one of {', '.join(names)}" if names else _expected(kind), hint)
