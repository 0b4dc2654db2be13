"""The settings file: YAML text -> checked, frozen settings, or a :class:`ConfigError` that names the line and the key.

PyYAML composes the text into nodes, which know their lines, and one walk (:mod:`exporter.yaml_structs`) reads the nodes
against the types of :class:`Settings`, from top to bottom until the first problem.

Tags and merge keys are refused. Aliases work, within :data:`exporter.yaml_nodes.MAX_NODES`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from exporter import patterns
from exporter.catalog import FAMILIES, NAMES, matches, meant
from exporter.facts import FACTS
from exporter.fleet_names import PLACEHOLDER, placeholders
from exporter.model import EVIDENCE, Evidence
from exporter.yaml_nodes import compose, is_null, quoted, read
from exporter.yaml_structs import Reader, is_struct, item_of, unknown, without_none

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
_COMMA = '; a value with a comma in it needs quotes, such as "2,3"'
_Variable = Annotated[
    str,
    Meta(
        pattern=r"\A[A-Za-z_][A-Za-z0-9_]*\Z",
        description="a variable's name of letters, digits and _",
        extra={"hint": _COMMA, "mapping": "a mapping of variables to texts"},
    ),
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
_GLOB = r"\A[a-z0-9_*?\[\]!-]{1,200}\Z"
_GLOB_WORDS = "the name of a family, in which * and ? and [...] stand for others as in a shell"
_Included = Annotated[str, Meta(pattern=_GLOB, description=_GLOB_WORDS)]
_Excluded = Annotated[str, Meta(pattern=_GLOB, description=_GLOB_WORDS, extra={"empty": True})]
_Prefix = Annotated[
    str,
    Meta(
        pattern=r"\A(?:[a-z_][a-z0-9_]{0,62})?\Z",
        description='what a metric\'s name may begin with, of the characters a-z 0-9 _, such as fleet_, or ""',
    ),
]
_CardCount = Annotated[int, Meta(ge=0, le=256)]
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


class Metrics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which families of readings there are, by globs over their names, and what is put in front of every name."""

    include: tuple[_Included, ...] = ("*",)
    exclude: tuple[_Excluded, ...] = ()
    prefix: _Prefix = ""


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

    ``expected_devices`` has how many whole cards of a backend there should be; where there should be any, it is one of
    ``backends`` then.
    ``libraries`` has a vendor's library file by backend, where it is not where the vendor's package looks for it.
    """

    backends: tuple[_Backend, ...] | None = None
    libraries: dict[_Backend, _Path] = msgspec.field(default_factory=dict)
    sampling: Sampling = Sampling()
    mapping: Mapping = Mapping()
    metrics: Metrics = Metrics()
    expected_devices: dict[_Backend, _CardCount] = msgspec.field(default_factory=dict)
    fleets: tuple[FleetSettings, ...] = ()

    def names(self, backend: str) -> bool:
        """Whether a backend is reported as down where there is nothing of its vendor's."""
        return backend in (self.backends or ()) or self.expected_devices.get(backend, 0) > 0


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
        kind = without_none(field.type)
        inner = item_of(kind) or kind
        if is_struct(inner):
            yield from _keys_of(inner, f"{prefix}{field.name}{'' if inner is kind else '[]'}.")
        else:
            yield prefix + field.name


class _Reader(Reader):
    """The rules of a settings file that types cannot say."""

    unset = ': leave the key out for an unset variable, or write "" for an empty one'

    def __init__(self, path: str, names: dict[str, list[str]]) -> None:
        super().__init__(path, names)
        self._fleets: dict[str, int] = {}  # the line of each fleet's name

    def check_struct(self, struct: Any, node: yaml.Node, data: dict[str, Any], key: str) -> None:
        """A fleet has rules."""
        if struct is FleetSettings:
            self._check_fleet(node, data, key)
        if struct is Settings:
            self._check_expected(node, data)

    def check_names(self, node: yaml.Node, names: list[str], key: str) -> None:
        """Made-up cards stand beside no real ones."""
        if key == "backends" and "simulated" in names[1:] + names[:-1]:
            self.fail(node, key, "expected simulated alone: beside others its cards would be taken for real ones")
        if key in ("metrics.include", "metrics.exclude"):
            self._check_globs(node, names, key)

    def _check_globs(self, node: yaml.Node, names: list[str], key: str) -> None:
        """A pattern without any family is a mistake; mapping and health are no readings, and always there."""
        always = [family.name for family in FAMILIES if family.name not in NAMES]
        for index, pattern in enumerate(names):
            if matches(pattern):
                continue
            place = f"{key}[{index}]"
            if matches(pattern, always):
                self.fail(
                    node.value[index], place, f"expected readings, found {quoted(pattern)}, which are always there"
                )
            close = meant(pattern)
            hint = f" (did you mean {close}?)" if close else ""
            self.fail(node.value[index], place, f"found {quoted(pattern)}, which no family of readings matches{hint}")

    def _check_expected(self, node: yaml.Node, data: dict[str, Any]) -> None:
        """Cards of a backend that is not there cannot be expected."""
        named = data.get("backends")
        for name in data.get("expected_devices", {}):
            if name not in (named or [name]) or (not named and name == "simulated"):
                (counts,) = (value for key_node, value in node.value if key_node.value == "expected_devices")
                (place,) = (key_node for key_node, _ in counts.value if key_node.value == name)
                self.fail(place, f"expected_devices.{name}", "expected one of backends, which does not name it")

    def _check_fleet(self, node: yaml.Node, data: dict[str, Any], key: str) -> None:
        nodes = {key_node.value: value for key_node, value in node.value}
        self.once(self._fleets, data["name"], f"the fleet {data['name']}", nodes["name"], f"{key}.name")
        for name, value in nodes.items():
            if data.get("runtime") == "host" and name in ("env", "reach", "known", *SOURCES):
                self.fail(value, f"{key}.{name}", f"expected no {name}: the runtime host has every device and no mask")
        self._check_source(nodes, data, key)
        for fact, text in data.get("known", {}).items():
            if text not in FACTS[fact]:
                self.fail(nodes["known"], f"{key}.known.{fact}", unknown("value", text, FACTS[fact]))

    def _check_source(self, nodes: dict[str, yaml.Node], data: dict[str, Any], key: str) -> None:
        """One source of the environment, and a name that it can fill in."""
        sources = [name for name in nodes if name in ("env", *SOURCES)]
        for name in sources[1:]:
            self.fail(nodes[name], f"{key}.{name}", f"expected one source of the environment, found {sources[0]} too")
        if "process" in data and not data["process"]:
            self.fail(nodes["process"], f"{key}.process", "expected a command or a user, found neither")
        known = values_of(msgspec.convert(data, FleetSettings))
        for name in placeholders(data["name"]):
            if name not in known:
                expected = f"expected {' or '.join(known)}" if known else "expected none: it stands for one workload"
                self.fail(nodes["name"], f"{key}.name", f"found the placeholder {quoted(name)}, {expected}")
