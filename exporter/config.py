"""The settings file: YAML text -> checked, frozen settings, or a :class:`ConfigError` that names the line and the key.

PyYAML composes the text into nodes, which know their lines, and one walk reads the nodes against the types of
:class:`Settings`. msgspec judges every single value; its own messages know no lines and are written for programmers,
so the words are made here. The walk goes from top to bottom and stops at the first problem.

Tags and merge keys are refused. Aliases work, within :data:`exporter.yaml_nodes.MAX_NODES`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator
from typing import Annotated, Any, NoReturn, get_args, get_origin

import msgspec
import yaml
from msgspec import Meta

from exporter import patterns
from exporter.errors import ConfigError
from exporter.facts import FACTS
from exporter.fleet_names import PLACEHOLDER, placeholders
from exporter.model import EVIDENCE, Evidence
from exporter.yaml_nodes import CONTROL, MAX_NODES, compose, found, is_null, join, line_of, meaning, quoted, read, short

_UUID = r"(?:GPU|MIG)-[0-9A-Za-z/-]{1,100}"  # with the slashes of MIG-GPU-<uuid>/<gi>/<ci>, NVIDIA's form before R470
_PCI = r"(?:[0-9A-Fa-f]{4,8}:)?[0-9A-Fa-f]{2}:[01][0-9A-Fa-f]\.[0-7]"

_NAME_WORDS = (
    "a name of 1 to 63 of the characters A-Z a-z 0-9 . _ : @ / - that starts with a letter or a digit, or has"
    " placeholders such as {unit}"
)
_REACH_WORDS = "a UUID (GPU-... or MIG-...) or a PCI address such as 0000:21:00.0 or 21:00.0"

_Backend = Annotated[str, Meta(extra={"names": "backend"})]
_Runtime = Annotated[str, Meta(extra={"names": "runtime"})]
_Grade = Annotated[Evidence, Meta(extra={"names": "grade of evidence"})]
_IN_NAMES = rf"(?:[A-Za-z0-9._:@/-]|{PLACEHOLDER.pattern})"
_FleetName = Annotated[
    str, Meta(pattern=rf"\A(?:[A-Za-z0-9]|{PLACEHOLDER.pattern})(?=.{{0,62}}\Z){_IN_NAMES}*\Z", description=_NAME_WORDS)
]
_Reach = Annotated[str, Meta(pattern=rf"\A(?:{_UUID}|{_PCI})\Z", description=_REACH_WORDS)]
_Variable = Annotated[
    str, Meta(pattern=r"\A[A-Za-z_][A-Za-z0-9_]*\Z", description="a variable's name of letters, digits and _")
]
_Fact = Annotated[str, Meta(extra={"names": "fact"})]
_Path = Annotated[str, Meta(pattern=r"\A/[^\x00]{1,4095}\Z", description="an absolute path")]
_Unit = Annotated[
    str,
    Meta(
        pattern=r"\A[A-Za-z0-9:_.\\@*?\[\]-]{1,255}\Z",
        description="the name of a systemd unit, in which * and ? and [...] stand for others as in a shell",
    ),
]
_Pattern = Annotated[str, Meta(min_length=1, description="a regular expression", extra={"regular expression": True})]
_ProbeMode = Annotated[str, Meta(extra={"names": "mode"})]
_Interval = Annotated[float, Meta(ge=0.25, le=3600, extra={"null": True})]


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When devices are read, and processes looked for (``scan_seconds``); all in seconds.

    ``interval_seconds`` is None where only a scrape starts a cycle.
    """

    reuse_seconds: Annotated[float, Meta(ge=0, le=60)] = 0.9
    deadline_seconds: Annotated[float, Meta(ge=0.1, le=300)] = 8.0
    interval_seconds: _Interval | None = None
    hang_seconds: Annotated[float, Meta(ge=1, le=3600)] = 30.0
    scan_seconds: Annotated[float, Meta(ge=0.25, le=3600)] = 5.0


class Mapping(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which grades of evidence an inverted mask may rest on: at least one, none twice; whether drivers are asked; and
    how many fleets of live processes may be shown.
    """

    accept: tuple[_Grade, ...] = EVIDENCE
    probe: _ProbeMode = "auto"
    max_fleets: Annotated[int, Meta(ge=1, le=100_000)] = 256


class ProcessPattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Regular expressions (RE2's), at least one: ``command`` is searched for in the command line, its arguments joined
    by blanks; ``user`` is the whole name of the process's user (the number of one without a name).
    """

    command: _Pattern | None = None
    user: _Pattern | None = None


class FleetSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fleet. ``runtime`` None: each vendor's default; ``reach`` None: the workload can open every device.

    ``env`` has the variables that are set, with the scalars' own text. A fleet of runtime ``host`` has neither ``env``
    nor ``reach``. ``reach`` keeps the spelling of the file. ``known`` has the texts of :data:`exporter.facts.FACTS`.

    At most one of :data:`SOURCES` says where the workload's processes are found, and then its environment is theirs.
    Where such a fleet has no ``reach`` it is measured. A name with placeholders stands for a fleet each.
    """

    name: _FleetName
    runtime: _Runtime | None = None
    env: dict[_Variable, str] = msgspec.field(default_factory=dict)
    reach: tuple[_Reach, ...] | None = None
    known: dict[_Fact, str] = msgspec.field(default_factory=dict)
    pid_file: _Path | None = None
    systemd_unit: _Unit | None = None
    process: ProcessPattern | None = None
    cgroup: _Pattern | None = None


PROBE_MODES = ("auto", "never")

SOURCES = ("pid_file", "systemd_unit", "process", "cgroup")
"""The keys of a fleet that say where its processes are found."""


def values_of(entry: FleetSettings) -> tuple[str, ...]:
    """The placeholders that a fleet's name may have: what is known of each workload that its source finds."""
    if entry.systemd_unit is not None:
        return ("unit", "user", "pid")
    if entry.process is not None:
        return (*_groups(entry.process.command), "user", "pid")
    return (*_groups(entry.cgroup), "user", "pid") if entry.cgroup is not None else ()


def _groups(pattern: str | None) -> tuple[str, ...]:
    return () if pattern is None else patterns.pattern(pattern).names


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file. ``backends`` None: every vendor that this host has. Fleet names are unique.

    ``libraries`` has a vendor's library file by backend, where it is not where the vendor's package looks for it.
    """

    backends: tuple[_Backend, ...] | None = None
    libraries: dict[_Backend, _Path] = msgspec.field(default_factory=dict)
    sampling: Sampling = Sampling()
    mapping: Mapping = Mapping()
    fleets: tuple[FleetSettings, ...] = ()


def parse(text: str, path: str, *, runtimes: Collection[str], backends: Collection[str]) -> Settings:
    """Settings from YAML text; ``path`` is only named in complaints.

    Any text at all ends in settings or a :class:`ConfigError`. A text without a document gives the defaults.
    """
    root = compose(text, path)
    if root is None or is_null(root):
        return Settings()
    names: dict[str, list[str]] = {"runtime": sorted(runtimes), "backend": sorted(backends)}
    names |= {"grade of evidence": list(EVIDENCE), "fact": list(FACTS), "mode": list(PROBE_MODES)}
    return msgspec.convert(_Reader(path, names).value(root, Settings, ""), Settings)


def load(path: str, *, runtimes: Collection[str], backends: Collection[str]) -> Settings:
    """Settings from a file of at most :data:`MAX_BYTES`, in UTF-8; raises only :class:`ConfigError`."""
    return parse(read(path), path, runtimes=runtimes, backends=backends)


def keys() -> list[str]:
    """Every settings key that has a value, as a dotted path: ``sampling.reuse_seconds``, ``fleets[].env``."""
    return list(_keys_of(Settings, ""))


def _keys_of(struct: Any, prefix: str) -> Iterator[str]:
    for field in msgspec.structs.fields(struct):
        kind = _without_none(field.type)
        inner = _item(kind) or kind
        if _is_struct(inner):
            yield from _keys_of(inner, f"{prefix}{field.name}{'' if inner is kind else '[]'}.")
        else:
            yield prefix + field.name


def _without_none(kind: Any) -> Any:
    """``X`` of ``X | None``. None means *left out*: where null may be written, ``Meta.extra`` says so."""
    members = get_args(kind)
    return members[0] if type(None) in members else kind


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _item(kind: Any) -> Any:
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


def _unknown(what: str, name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(short(name), known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"unknown {what} {quoted(name)}{hint}, expected one of {', '.join(known)}"


_COMMA = '; a value with a comma in it needs quotes, such as "2,3"'
_UNSET = ': leave the key out for an unset variable, or write "" for an empty one'


class _Reader:
    """The walk. Each method returns plain data for ``msgspec.convert``, or raises the first complaint it meets."""

    def __init__(self, path: str, names: dict[str, list[str]]) -> None:
        self._path, self._names = path, names
        self._fleets: dict[str, int] = {}  # the line of each fleet's name
        self._visits = 0

    def value(self, node: yaml.Node, kind: Any, key: str) -> Any:
        self._visits += 1
        if self._visits > MAX_NODES:
            self._fail(node, key, f"expected at most {MAX_NODES} values, found more through aliases")
        kind = _without_none(kind)
        if _is_struct(kind):
            return self._struct(node, kind, key)
        if get_origin(kind) is tuple:
            return self._list(node, _item(kind), key)
        if get_origin(kind) is dict:
            return self._dict(node, get_args(kind), key)
        return self._own_text(node, key) if kind is str else self._leaf(node, kind, key)

    def _fail(self, node: yaml.Node, key: str, message: str) -> NoReturn:
        raise ConfigError(self._path, message, line_of(node), key)

    def _wrong(self, node: yaml.Node, key: str, expected: str, hint: str = "") -> NoReturn:
        self._fail(node, key, f"expected {expected}, found {found(node)}{hint}")

    def _once(self, seen: dict[str, int], name: str, what: str, node: yaml.Node, key: str) -> None:
        if name in seen:
            self._fail(node, key, f"found {what} twice, the first time on line {seen[name]}")
        seen[name] = line_of(node)

    def _struct(self, node: yaml.Node, struct: Any, key: str) -> dict[str, Any]:
        fields = {field.name: field for field in msgspec.structs.fields(struct)}
        if not isinstance(node, yaml.MappingNode):
            self._wrong(node, key, f"a mapping with keys of {', '.join(fields)}")
        data: dict[str, Any] = {}
        for name, key_node, value in self._pairs(node, key):
            if name not in fields:
                self._fail(key_node, join(key, name), _unknown("key", name, fields))
            if key or not is_null(value):  # a section whose keys are all commented out is as good as left out
                data[name] = self.value(value, fields[name].type, join(key, name))
        for name, field in fields.items():
            if field.required and name not in data:
                self._fail(node, join(key, name), f"expected {_expected(field.type)}, found no such key")
        if struct is FleetSettings:
            self._check_fleet(node, data, key)
        return data

    def _check_fleet(self, node: yaml.Node, data: dict[str, Any], key: str) -> None:
        nodes = {key_node.value: value for key_node, value in node.value}
        self._once(self._fleets, data["name"], f"the fleet {data['name']}", nodes["name"], f"{key}.name")
        for name, value in nodes.items():
            if data.get("runtime") == "host" and name in ("env", "reach", "known", *SOURCES):
                self._fail(value, f"{key}.{name}", f"expected no {name}: the runtime host has every device and no mask")
        self._check_source(nodes, data, key)
        for fact, text in data.get("known", {}).items():
            if text not in FACTS[fact]:
                self._fail(nodes["known"], f"{key}.known.{fact}", _unknown("value", text, FACTS[fact]))

    def _check_source(self, nodes: dict[str, yaml.Node], data: dict[str, Any], key: str) -> None:
        """One source of the environment, and a name that it can fill in."""
        sources = [name for name in nodes if name in ("env", *SOURCES)]
        for name in sources[1:]:
            self._fail(nodes[name], f"{key}.{name}", f"expected one source of the environment, found {sources[0]} too")
        if "process" in data and not data["process"]:
            self._fail(nodes["process"], f"{key}.process", "expected a command or a user, found neither")
        known = values_of(msgspec.convert(data, FleetSettings))
        for name in placeholders(data["name"]):
            if name not in known:
                expected = f"expected {' or '.join(known)}" if known else "expected none: it stands for one workload"
                self._fail(nodes["name"], f"{key}.name", f"found the placeholder {quoted(name)}, {expected}")

    def _pairs(self, node: yaml.Node, key: str, hint: str = "") -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        seen: dict[str, int] = {}
        for key_node, value in node.value:
            name = self._key(key_node, key, hint)
            self._once(seen, name, "this key", key_node, join(key, name))
            yield name, key_node, value

    def _key(self, node: yaml.Node, key: str, hint: str) -> str:
        name = meaning(node) if isinstance(node, yaml.ScalarNode) else None
        if not isinstance(name, str):
            self._wrong(node, key, "text as a key", hint)
        if name == "<<":
            self._fail(node, key, "found the merge key <<, which is not read here: write its keys out")
        return name

    def _list(self, node: yaml.Node, item: Any, key: str) -> list[Any]:
        if not isinstance(node, yaml.SequenceNode):
            self._wrong(node, key, "a list")
        values = [self.value(each, item, f"{key}[{index}]") for index, each in enumerate(node.value)]
        if not _is_struct(item):
            self._check_names(node, values, key)
        return values

    def _check_names(self, node: yaml.Node, names: list[str], key: str) -> None:
        if not names:
            self._fail(node, key, "expected at least one, found an empty list")
        seen: dict[str, int] = {}
        for index, name in enumerate(names):
            self._once(seen, name, name, node.value[index], f"{key}[{index}]")
        if key == "backends" and "simulated" in names[1:] + names[:-1]:
            self._fail(node, key, "expected simulated alone: beside others its cards would be taken for real ones")

    def _dict(self, node: yaml.Node, kinds: tuple[Any, Any], key: str) -> dict[str, Any]:
        name_kind, kind = kinds
        variables = name_kind is _Variable
        hint = _COMMA if variables else ""
        if not isinstance(node, yaml.MappingNode):
            self._wrong(node, key, "a mapping of variables to texts" if variables else "a mapping")
        return {
            self._leaf(key_node, name_kind, key, hint): self.value(value, kind, join(key, name))
            for name, key_node, value in self._pairs(node, key, hint)
        }

    def _own_text(self, node: yaml.Node, key: str) -> str:
        if not isinstance(node, yaml.ScalarNode):
            self._wrong(node, key, "text", ': quote it, such as "2,3"')
        if is_null(node):
            self._wrong(node, key, "text", _UNSET)
        if bad := CONTROL.search(node.value):  # an escape can make what the file itself cannot have
            self._fail(node, key, f"expected printable text, found an escape for the character U+{ord(bad[0]):04X}")
        return str(node.value)

    def _check_pattern(self, node: yaml.Node, value: str, key: str) -> None:
        try:
            patterns.pattern(value)
        except patterns.PatternError as error:
            self._fail(node, key, f"expected a regular expression of RE2, found {quoted(value)}: {error}")

    def _leaf(self, node: yaml.Node, kind: Any, key: str, hint: str = "") -> Any:
        extra = _meta(kind).extra or {}
        value = meaning(node) if isinstance(node, yaml.ScalarNode) else node
        if value is None and "null" in extra:
            return None
        names = self._names[extra["names"]] if "names" in extra else []
        if names and isinstance(value, str) and value not in names:
            self._fail(node, key, _unknown(extra["names"], value, names))
        if _is_whole(kind) and isinstance(value, float) and value.is_integer():
            value = int(value)
        if "regular expression" in extra and isinstance(value, str):
            self._check_pattern(node, value, key)
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError:
            hint = ": quote it to make it text" if _meta(kind).pattern and isinstance(value, bool | float) else hint
            self._wrong(node, key, f"one of {', '.join(names)}" if names else _expected(kind), hint)
