"""The settings file: what is accepted, and the exact words of each complaint."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter import config, masks, yaml_nodes
from exporter.catalog import READINGS, USAGE, selection
from exporter.config import FleetSettings, Mapping, ProcessPattern, Sampling, Settings
from exporter.errors import ConfigError

RUNTIMES = ("cuda", "rocm", "level_zero", "sycl", "vulkan", "host")
BACKENDS = ("nvidia", "amd", "intel", "simulated")
EXAMPLE = Path(__file__).parent.parent / "config.example.yaml"


def parse(text: str) -> Settings:
    return config.parse(text, "f.yml", runtimes=RUNTIMES, backends=BACKENDS)


def load(path: object) -> Settings:
    return config.load(str(path), runtimes=RUNTIMES, backends=BACKENDS)


def complaint(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    return str(caught.value)


def uncommented(text: str) -> str:
    """A settings file by its own rule: a mark without a blank behind it hides a setting."""
    return re.sub(r"(?m)^( *)#(?=[^ #\n])", r"\1", text)


def short(text: str) -> str:
    """A test's name; some of the texts are of 400 kB."""
    return ascii(text[:30])[1:-1]


# --- what is accepted


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "# only a comment\n",
        "---\n",
        "--- ~\n...\n",
        "\ufeff",
        "{}",
        "sampling:\nmapping:\nfleets:\nbackends:\n",
    ],
)
def test_nothing_is_the_defaults(text: str) -> None:
    """A file without settings, and one whose sections are empty, is valid and gives the defaults."""
    assert parse(text) == Settings()


def test_the_defaults() -> None:
    """The defaults are those of the design."""
    assert Settings() == Settings(
        backends=None,
        libraries={},
        sampling=Sampling(reuse_seconds=0.9, deadline_seconds=8.0, interval_seconds=None, hang_seconds=30.0),
        mapping=Mapping(accept=("proven", "probed", "assumed")),
        fleets=(),
    )


def test_everything_at_once() -> None:
    """Each key arrives in the field of its name."""
    text = """
backends: [nvidia, amd]
libraries: {nvidia: /opt/x/libnvidia-ml.so.1}
sampling: {reuse_seconds: 0, deadline_seconds: 4.5, interval_seconds: 15, hang_seconds: 6e1}
mapping:
  accept: [probed, proven]
fleets:
  - {name: host, runtime: host}
  - name: team-a/chat@prod:1
    runtime: cuda
    env: {CUDA_VISIBLE_DEVICES: "2,3"}
    reach: [GPU-1f, "0000:21:00.0"]
"""
    chat = FleetSettings("team-a/chat@prod:1", "cuda", {"CUDA_VISIBLE_DEVICES": "2,3"}, ("GPU-1f", "0000:21:00.0"))
    assert parse(text) == Settings(
        backends=("nvidia", "amd"),
        libraries={"nvidia": "/opt/x/libnvidia-ml.so.1"},
        sampling=Sampling(0.0, 4.5, 15.0, 60.0),
        mapping=Mapping(("probed", "proven")),
        fleets=(FleetSettings("host", "host"), chat),
    )


def test_settings_are_frozen() -> None:
    """Settings cannot change after they are read."""
    with pytest.raises(AttributeError):
        parse("").sampling.reuse_seconds = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("010", "010"),
        ("1.0", "1.0"),
        ("2,3", "2,3"),
        ("true", "true"),
        ("no", "no"),
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2026-01-02", "2026-01-02"),
        ("-1", "-1"),
        (".inf", ".inf"),
        ("9" * 5000, "9" * 5000),
        ('""', ""),
        ('"~"', "~"),
        ("'null'", "null"),
        ('" 2, 3 "', " 2, 3 "),
        ("|\n        2,3", "2,3"),
        ("level_zero:*;!opencl:gpu", "level_zero:*;!opencl:gpu"),
    ],
    ids=short,
)
def test_a_variable_has_the_scalars_own_text(written: str, text: str) -> None:
    """A variable's value is what stands in the file, whatever YAML would make of it."""
    settings = parse(f"fleets:\n  - name: a\n    env:\n      MASK: {written}")
    assert settings.fleets[0].env == {"MASK": text}


@pytest.mark.parametrize(
    "address",
    ["0000:21:00.0", "21:00.0", "10000:e1:1F.7", "0000A1B2:c1:00.1", "GPU-ab", "MIG-GPU-8d2c-11/1/0", "MIG-8d"],
)
def test_reach_takes_identities(address: str) -> None:
    """UUIDs and PCI addresses are taken unquoted and keep their spelling, though YAML 1.1 has 21:00.0 as 1260."""
    assert parse(f"fleets: [{{name: a, reach: [{address}]}}]").fleets[0].reach == (address,)


@pytest.mark.parametrize("name", ["a", "0a", "no", "a" * 63, "A-Z.a_z:0@9/x"])
def test_fleet_names(name: str) -> None:
    """A fleet's name may be anything that a unit, a container or a path-like team name is."""
    assert parse(f"fleets: [{{name: {name}}}]").fleets[0].name == name


def test_aliases_are_followed() -> None:
    """One block may serve two fleets."""
    first, second = parse("fleets: [{name: a, env: &e {A: 1}}, {name: b, env: *e}]").fleets
    assert first.env == second.env == {"A": "1"}


# --- complaints: (settings, what is said after the file's name)

NAME = (
    "a name of 1 to 63 of the characters A-Z a-z 0-9 . _ : @ / - that starts with a letter or a digit, or has"
    " placeholders such as {unit}"
)
REACH = "a UUID (GPU-... or MIG-...) or a PCI address such as 0000:21:00.0 or 21:00.0"
SAMPLING_KEYS = "reuse_seconds, deadline_seconds, interval_seconds, hang_seconds, scan_seconds"
FLEET_KEYS = "name, runtime, env, reach, known, pid_file, systemd_unit, process, cgroup"
TOP_KEYS = "backends, libraries, sampling, mapping, metrics, expected_devices, fleets"
ALL_BACKENDS = "amd, intel, nvidia, simulated"
ALL_RUNTIMES = "cuda, host, level_zero, rocm, sycl, vulkan"
COMMA = 'a value with a comma in it needs quotes, such as "2,3"'

TOP_KEYS = "backends, libraries, sampling, mapping, metrics, expected_devices, fleets"

KEYS = [
    ("a: 1", f"1: a: unknown key 'a', expected one of {TOP_KEYS}"),
    ("\nfleet: []", "2: fleet: unknown key 'fleet' (did you mean fleets?), "
     f"expected one of {TOP_KEYS}"),
    ("sampling:\n  reuse_second: 1", "2: sampling.reuse_second: unknown key 'reuse_second' "
     f"(did you mean reuse_seconds?), expected one of {SAMPLING_KEYS}"),
    ("fleets:\n- name: a\n  pid: 7", f"3: fleets[0].pid: unknown key 'pid', expected one of {FLEET_KEYS}"),
    ('"a b\\n": 1', f"1: 'a b\\n': unknown key 'a b\\n', expected one of {TOP_KEYS}"),
    ("fleets: []\n\nfleets: []", "3: fleets: found this key twice, the first time on line 1"),
    ("sampling:\n  hang_seconds: 9\n  hang_seconds: 9",
     "3: sampling.hang_seconds: found this key twice, the first time on line 2"),
    ("fleets:\n- name: a\n  env:\n    A: 1\n    A: 1",
     "5: fleets[0].env.A: found this key twice, the first time on line 4"),
    ('fleets:\n- name: a\n  env:\n    A: 1\n    "A": 1',
     "5: fleets[0].env.A: found this key twice, the first time on line 4"),
    ("1: a", "1: expected text as a key, found the number 1"),
    ("~: a", "1: expected text as a key, found nothing (null)"),
    ("sampling:\n  true: a", "2: sampling: expected text as a key, found the truth value true"),
    ("[a]: b", "1: expected text as a key, found a list"),
    ("? {a: b}\n: c", "1: expected text as a key, found a mapping"),
    ("x: &x {hang_seconds: 9}", f"1: x: unknown key 'x', expected one of {TOP_KEYS}"),
    ("sampling:\n  <<: {hang_seconds: 9}", "2: sampling: found the merge key <<, which is not read here: "
     "write its keys out"),
]  # fmt: skip

TYPES = [
    ("sampling: [1]", f"1: sampling: expected a mapping with keys of {SAMPLING_KEYS}, found a list"),
    ("- a", f"1: expected a mapping with keys of {TOP_KEYS}, found a list"),
    ("a", f"1: expected a mapping with keys of {TOP_KEYS}, found the text 'a'"),
    ("fleets: {name: a}", "1: fleets: expected a list, found a mapping"),
    ("fleets: [a]", f"1: fleets[0]: expected a mapping with keys of {FLEET_KEYS}, found the text 'a'"),
    ("fleets:\n-", f"2: fleets[0]: expected a mapping with keys of {FLEET_KEYS}, found nothing (null)"),
    ("backends: nvidia", "1: backends: expected a list, found the text 'nvidia'"),
    ("mapping: {accept: proven}", "1: mapping.accept: expected a list, found the text 'proven'"),
    ("mapping: {accept: }", "1: mapping.accept: expected a list, found nothing (null)"),
    ("fleets: [{name: a, env: [A, 1]}]", "1: fleets[0].env: expected a mapping of variables to texts, found a list"),
    ("fleets: [{name: a, env: }]", "1: fleets[0].env: expected a mapping of variables to texts, found nothing (null)"),
    ("fleets: [{name: a, reach: }]", "1: fleets[0].reach: expected a list, found nothing (null)"),
    ("fleets: [{name: a, known: {driver: new}}]", "1: fleets[0].known.driver: unknown value 'new', "
     "expected one of current, old"),
    ("fleets: [{name: a, known: {drive: old}}]", "1: fleets[0].known: unknown fact 'drive' (did you mean driver?), "
     "expected one of api, backend, driver, frontend, multi_driver_library, opencl, probe, space"),
    ("fleets: [{name: a, known: old}]", "1: fleets[0].known: expected a mapping, found the text 'old'"),
    ("fleets: [{name: a, runtime: host, known: {driver: old}}]", "1: fleets[0].known: expected no known: "
     "the runtime host has every device and no mask"),
    ("libraries: /lib", "1: libraries: expected a mapping, found the text '/lib'"),
    ("libraries:\n  nvidia: lib/x.so", "2: libraries.nvidia: expected an absolute path, found the text 'lib/x.so'"),
    ("libraries: {nvidia: 1}", "1: libraries.nvidia: expected an absolute path, found the number 1: "
     "quote it to make it text"),
    ("libraries: {nvidia: }", "1: libraries.nvidia: expected an absolute path, found nothing (null)"),
    ("libraries: {nvidja: /x}", "1: libraries: unknown backend 'nvidja' (did you mean nvidia?), "
     f"expected one of {ALL_BACKENDS}"),
    ("libraries: {nvidia: /x, nvidia: /y}", "1: libraries.nvidia: found this key twice, the first time on line 1"),
    ("fleets: [{name: [a]}]", f"1: fleets[0].name: expected {NAME}, found a list"),
    ("fleets: [{name: 12}]", f"1: fleets[0].name: expected {NAME}, found the number 12: quote it to make it text"),
    ("fleets: [{name: true}]", f"1: fleets[0].name: expected {NAME}, found the truth value true: "
     "quote it to make it text"),
]  # fmt: skip

UNIT = "the name of a systemd unit, in which * and ? and [...] stand for others as in a shell"

SOURCES = [
    ("fleets:\n- name: a\n  env: {A: b}\n  pid_file: /x",
     "4: fleets[0].pid_file: expected one source of the environment, found env too"),
    ("fleets:\n- name: a\n  pid_file: /x\n  cgroup: x",
     "4: fleets[0].cgroup: expected one source of the environment, found pid_file too"),
    ("fleets: [{name: a, pid_file: x}]", "1: fleets[0].pid_file: expected an absolute path, found the text 'x'"),
    ("fleets: [{name: a, runtime: host, systemd_unit: x}]", "1: fleets[0].systemd_unit: expected no systemd_unit: "
     "the runtime host has every device and no mask"),
    ("fleets: [{name: a, systemd_unit: a/b}]", f"1: fleets[0].systemd_unit: expected {UNIT}, found the text 'a/b'"),
    ("fleets: [{name: a, process: {}}]", "1: fleets[0].process: expected a command or a user, found neither"),
    ("fleets: [{name: a, process: {command: (}}]", "1: fleets[0].process.command: expected a regular "
     "expression of RE2, found '(': missing ): ("),
    ("fleets: [{name: a, process: {user: '(?=a)'}}]", "1: fleets[0].process.user: expected a regular "
     "expression of RE2, found '(?=a)': invalid perl operator: (?="),
    ("fleets: [{name: a, cgroup: '['}]", "1: fleets[0].cgroup: expected a regular expression of RE2, "
     "found '[': missing ]: ["),
    ("fleets: [{name: a, cgroup: ''}]", "1: fleets[0].cgroup: expected a regular expression, found the text ''"),
    ("fleets: [{name: 'a-{job}', cgroup: '(?P<jobs>x)'}]",
     "1: fleets[0].name: found the placeholder 'job', expected jobs or user or pid"),
    ("fleets: [{name: 'a-{unit}', pid_file: /x}]",
     "1: fleets[0].name: found the placeholder 'unit', expected none: it stands for one workload"),
    ("fleets: [{name: 'a-{unit}', env: {A: b}}]",
     "1: fleets[0].name: found the placeholder 'unit', expected none: it stands for one workload"),
    ("fleets: [{name: 'a-{unit', systemd_unit: x}]", f"1: fleets[0].name: expected {NAME}, found the text 'a-{{unit'"),
    ("mapping: {probe: always}", "1: mapping.probe: unknown mode 'always', expected one of auto, never"),
    ("mapping: {max_fleets: 2.5}", "1: mapping.max_fleets: expected a whole number from 1 to 100000, "
     "found the number 2.5"),
]  # fmt: skip

GLOB = "the name of a family, in which * and ? and [...] stand for others as in a shell"
PREFIX = 'what a metric\'s name may begin with, of the characters a-z 0-9 _, such as fleet_, or ""'

METRICS = [
    ("metrics:\n  include: [gpu_*]\n  exclude:\n  - gpu_clock_*\n  - gpu_powr_watts",
     "5: metrics.exclude[1]: found 'gpu_powr_watts', which no family of readings matches "
     "(did you mean gpu_power_watts?)"),
    ("metrics: {exclude: [gpu_exporter_*]}",
     "1: metrics.exclude[0]: expected readings, found 'gpu_exporter_*', which are always there"),
    ("metrics: {include: [gpu_info]}",
     "1: metrics.include[0]: expected readings, found 'gpu_info', which are always there"),
    ("metrics: {include: []}", "1: metrics.include: expected at least one, found an empty list"),
    ("metrics: {exclude: ['gpu_pci_*']}",
     "1: metrics.exclude[0]: found 'gpu_pci_*', which no family of readings matches (did you mean gpu_pcie_*?)"),
    ("metrics: {exclude: ['*_percnt']}",
     "1: metrics.exclude[0]: found '*_percnt', which no family of readings matches (did you mean *_percent?)"),
    ("metrics: {exclude: ['[!']}", "1: metrics.exclude[0]: found '[!', which no family of readings matches"),
    ("metrics: {include: ['GPU_*']}", f"1: metrics.include[0]: expected {GLOB}, found the text 'GPU_*'"),
    ("metrics: {include: ['*', '*']}", "1: metrics.include[1]: found * twice, the first time on line 1"),
    ("metrics: {include: '*'}", "1: metrics.include: expected a list, found the text '*'"),
    ("metrics: {prefix: 1a}", f"1: metrics.prefix: expected {PREFIX}, found the text '1a'"),
    ("metrics: {prefix: a-b_}", f"1: metrics.prefix: expected {PREFIX}, found the text 'a-b_'"),
    ("metrics: {prefixes: a}", "1: metrics.prefixes: unknown key 'prefixes' (did you mean prefix?), "
     "expected one of include, exclude, prefix"),
    ("expected_devices: {nvidia: -1}", "1: expected_devices.nvidia: expected a whole number from 0 to 256, "
     "found the number -1"),
    ("expected_devices: {nvidja: 8}", "1: expected_devices: unknown backend 'nvidja' (did you mean nvidia?), "
     f"expected one of {ALL_BACKENDS}"),
    ("backends: [amd]\nexpected_devices: {nvidia: 8}",
     "2: expected_devices.nvidia: expected one of backends, which does not name it"),
    ("expected_devices:\n  amd: 1\n  nvidia: 8\nbackends: [amd]",
     "3: expected_devices.nvidia: expected one of backends, which does not name it"),
    ("expected_devices: {simulated: 4}",
     "1: expected_devices.simulated: expected one of backends, which does not name it"),
]  # fmt: skip

NUMBERS = [
    ("fast", "0 to 60, found the text 'fast'"),
    ('"1"', "0 to 60, found the text '1'"),
    ("5s", "0 to 60, found the text '5s'"),
    ("0x10", "0 to 60, found the text '0x10'"),
    ("1:30", "0 to 60, found the text '1:30'"),
    (".nan", "0 to 60, found the text '.nan'"),
    (".inf", "0 to 60, found the text '.inf'"),
    ("-.inf", "0 to 60, found the text '-.inf'"),
    ("1e999", "0 to 60, found the number 1e999"),
    ("9" * 5000, f"0 to 60, found the number {'9' * 57}..."),
    ("-0.1", "0 to 60, found the number -0.1"),
    ("60.1", "0 to 60, found the number 60.1"),
    ("true", "0 to 60, found the truth value true"),
    ("null", "0 to 60, found nothing (null)"),
    ("", "0 to 60, found nothing (null)"),
    ("[1]", "0 to 60, found a list"),
    ("{a: 1}", "0 to 60, found a mapping"),
]

RANGES = [
    ("deadline_seconds", "0.09", "a number from 0.1 to 300"),
    ("deadline_seconds", "301", "a number from 0.1 to 300"),
    ("interval_seconds", "0", "null or a number from 0.25 to 3600"),
    ("interval_seconds", "3601", "null or a number from 0.25 to 3600"),
    ("hang_seconds", "0.9", "a number from 1 to 3600"),
    ("hang_seconds", "3601", "a number from 1 to 3600"),
]

NAMES = [
    ("backends: []", "1: backends: expected at least one, found an empty list"),
    ("backends:\n- nvidia\n- nvida", "3: backends[1]: unknown backend 'nvida' (did you mean nvidia?), "
     "expected one of amd, intel, nvidia, simulated"),
    ("backends: [7]", "1: backends[0]: expected one of amd, intel, nvidia, simulated, found the number 7"),
    ("backends:\n- amd\n- amd", "3: backends[1]: found amd twice, the first time on line 2"),
    ("backends: [nvidia, simulated]", "1: backends: expected simulated alone: "
     "beside others its cards would be taken for real ones"),
    ("backends: [simulated, amd]", "1: backends: expected simulated alone: "
     "beside others its cards would be taken for real ones"),
    ("mapping: {accept: []}", "1: mapping.accept: expected at least one, found an empty list"),
    ("mapping: {accept: [prove]}", "1: mapping.accept[0]: unknown grade of evidence 'prove' (did you mean proven?), "
     "expected one of proven, probed, assumed"),
    ("mapping: {accept: [~]}", "1: mapping.accept[0]: expected one of proven, probed, assumed, found nothing (null)"),
    ("mapping: {accept: [proven, proven]}", "1: mapping.accept[1]: found proven twice, the first time on line 1"),
]  # fmt: skip

FLEETS = [
    ("fleets:\n- runtime: cuda", f"2: fleets[0].name: expected {NAME}, found no such key"),
    ("fleets: [{name: ''}]", f"1: fleets[0].name: expected {NAME}, found the text ''"),
    ("fleets: [{name: -a}]", f"1: fleets[0].name: expected {NAME}, found the text '-a'"),
    ("fleets: [{name: a b}]", f"1: fleets[0].name: expected {NAME}, found the text 'a b'"),
    ('fleets: [{name: "a\\n"}]', f"1: fleets[0].name: expected {NAME}, found the text 'a\\n'"),
    (f"fleets: [{{name: {'a' * 64}}}]", f"1: fleets[0].name: expected {NAME}, found the text '{'a' * 57}...'"),
    ("fleets:\n- name: a\n- name: b\n- name: a", "4: fleets[2].name: found the fleet a twice, "
     "the first time on line 2"),
    ("fleets: [{name: a, runtime: cudaa}]", "1: fleets[0].runtime: unknown runtime 'cudaa' (did you mean cuda?), "
     f"expected one of {ALL_RUNTIMES}"),
    ("fleets: [{name: a, runtime: }]", f"1: fleets[0].runtime: expected one of {ALL_RUNTIMES}, found nothing (null)"),
    ("fleets:\n- name: a\n  runtime: host\n  env: {A: 1}",
     "4: fleets[0].env: expected no env: the runtime host has every device and no mask"),
    ("fleets:\n- name: a\n  reach: [GPU-1]\n  runtime: host",
     "3: fleets[0].reach: expected no reach: the runtime host has every device and no mask"),
    ("fleets: [{name: a, reach: []}]", "1: fleets[0].reach: expected at least one, found an empty list"),
    ("fleets: [{name: a, reach: [0]}]", f"1: fleets[0].reach[0]: expected {REACH}, found the number 0: "
     "quote it to make it text"),
    ("fleets: [{name: a, reach: [GPU-]}]", f"1: fleets[0].reach[0]: expected {REACH}, found the text 'GPU-'"),
    ("fleets: [{name: a, reach: [021:00.0]}]", f"1: fleets[0].reach[0]: expected {REACH}, found the text '021:00.0'"),
    ("fleets: [{name: a, reach: [21:00.8]}]", f"1: fleets[0].reach[0]: expected {REACH}, found the text '21:00.8'"),
    ("fleets: [{name: a, reach: [21:20.0]}]", f"1: fleets[0].reach[0]: expected {REACH}, found the text '21:20.0'"),
    ("fleets: [{name: a, reach: [GPU-1, GPU-1]}]", "1: fleets[0].reach[1]: found GPU-1 twice, "
     "the first time on line 1"),
]  # fmt: skip

ENV = [
    ("A:", 'env.A: expected text, found nothing (null): leave the key out for an unset variable, or write "" for an '
     "empty one"),
    ("A: ~", 'env.A: expected text, found nothing (null): leave the key out for an unset variable, or write "" for an '
     "empty one"),
    ("A: [2,3]", 'env.A: expected text, found a list: quote it, such as "2,3"'),
    ("A: {b: c}", 'env.A: expected text, found a mapping: quote it, such as "2,3"'),
    ("1A: x", f"env: expected a variable's name of letters, digits and _, found the text '1A'; {COMMA}"),
    ("A-B: x", f"env: expected a variable's name of letters, digits and _, found the text 'A-B'; {COMMA}"),
    ("ÄB: x", f"env: expected a variable's name of letters, digits and _, found the text 'ÄB'; {COMMA}"),
    ("{A: 2,3}", f"env: expected text as a key, found the number 3; {COMMA}"),
    ("{A: GPU-1,GPU-2}", f"env: expected a variable's name of letters, digits and _, found the text 'GPU-2'; {COMMA}"),
    ('A: "2\\0"', "env.A: expected printable text, found an escape for the character U+0000"),
    ('A: "\\ud800"', "env.A: expected printable text, found an escape for the character U+D800"),
]  # fmt: skip

YAML = [
    ("sampling:\n\t a: b", "2: not valid YAML: while scanning for the next token, "
     "found character '\\t' that cannot start any token"),
    ("\na: [", "2: not valid YAML: while parsing a flow node, expected the node content, but found '<stream end>'"),
    ("a: b: c", "1: not valid YAML: mapping values are not allowed here"),
    ("a: *b", "1: not valid YAML: found undefined alias 'b'"),
    ("a: b\n---\nc: d", "2: not valid YAML: expected a single document in the stream, but found another document"),
    ('a: "\\UFFFFFFFF"', "1: not valid YAML: an escape or a version is out of range"),
    ('a: "\\U7FFFFFFF"', "1: not valid YAML: an escape or a version is out of range"),
    (f"%YAML {'9' * 5000}.1\n--- a", "1: not valid YAML: an escape or a version is out of range"),
    ("%YAML 3.0\n--- a", "1: not valid YAML: found incompatible YAML document (version 1.* is required)"),
    ("a:\n  !!python/object:os.system b", "2: expected no YAML tags, found '!!python/object:os.system': "
     "quote a value to make it text"),
    ("a: !!str 1", "1: expected no YAML tags, found '!!str': quote a value to make it text"),
    ("a: !<%0A> 1", "1: expected no YAML tags, found '\\n': quote a value to make it text"),
    ("fleets: &a\n- *a", "2: found the alias *a inside of what it refers to, which has no end"),
    ("fleets:\n- &a {name: a, env: *a}", "2: found the alias *a inside of what it refers to, which has no end"),
    ("a\0", "1: expected printable text, found the character U+0000"),
    ("a: 1\r\n\r\n\x1b", "3: expected printable text, found the character U+001B"),
    ("\ud800", "1: expected printable text, found the character U+D800"),
    ("[" * 10_000, "1: expected at most 50 levels of nesting, found more"),
    ("- " * 10_000, "1: expected at most 50 levels of nesting, found more"),
    ("{a: " * 10_000, "1: expected at most 50 levels of nesting, found more"),
    ("? " * 10_000, "1: expected at most 50 levels of nesting, found more"),
    ("- a\n" * 100_001, "100000: expected at most 100000 values, found more"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), KEYS + TYPES + NAMES + FLEETS + SOURCES + METRICS + YAML, ids=short)
def test_complaint(text: str, said: str) -> None:
    """A mistake is named in one sentence: the line, the key, what was found and what was expected."""
    assert complaint(text) == f"f.yml:{said}"


@pytest.mark.parametrize(("written", "said"), NUMBERS, ids=short)
def test_not_a_number_in_range(written: str, said: str) -> None:
    """A number is a finite decimal number within its range, and nothing else."""
    assert complaint(f"sampling:\n  reuse_seconds: {written}") == (
        f"f.yml:2: sampling.reuse_seconds: expected a number from {said}"
    )


@pytest.mark.parametrize(("key", "written", "expected"), RANGES)
def test_out_of_range(key: str, written: str, expected: str) -> None:
    """Each number's range is enforced and told."""
    assert complaint(f"sampling: {{{key}: {written}}}") == (
        f"f.yml:1: sampling.{key}: expected {expected}, found the number {written}"
    )


@pytest.mark.parametrize(
    ("key", "low", "high"),
    [
        ("reuse_seconds", 0, 60),
        ("deadline_seconds", 0.1, 300),
        ("interval_seconds", 0.25, 3600),
        ("hang_seconds", 1, 3600),
    ],
)
def test_the_ends_of_a_range_are_in_it(key: str, low: float, high: float) -> None:
    """A range has its two ends."""
    for value in (low, high):
        assert getattr(parse(f"sampling: {{{key}: {value}}}").sampling, key) == value


@pytest.mark.parametrize(("written", "said"), ENV)
def test_environment(written: str, said: str) -> None:
    """An environment that cannot be meant as written is refused with the way to write it."""
    text = f"fleets:\n- name: a\n  env:\n    {written}"
    assert complaint(text) == f"f.yml:4: fleets[0].{said}"


def test_the_first_problem_is_told() -> None:
    """Of several mistakes, the one furthest up is told, whatever their kinds."""
    text = "sampling:\n  reuse_seconds: 99\n  hang: 1\nfleets:\n- {name: a, env: {A: }}\nmapping: []\nmapping: []"
    assert complaint(text).startswith("f.yml:2: sampling.reuse_seconds: ")


def test_aliases_cannot_multiply() -> None:
    """A small file that aliases would blow up is refused within the bound on values."""
    variables = "".join(f"    A{number}: x\n" for number in range(2000))
    fleets = "".join(f"- {{name: b{number}, env: *e}}\n" for number in range(200))
    said = complaint(f"fleets:\n- name: a\n  env: &e\n{variables}{fleets}")
    assert said.endswith("expected at most 100000 values, found more through aliases")


def test_parts_of_a_complaint() -> None:
    """A program finds the file, the line, the key and the message apart."""
    with pytest.raises(ConfigError) as caught:
        parse("fleets:\n- {name: a}\n- {name: b, env: {CUDA_VISIBLE_DEVICES: }}")
    error = caught.value
    assert (error.path, error.line, error.key) == ("f.yml", 3, "fleets[1].env.CUDA_VISIBLE_DEVICES")
    assert error.message.startswith("expected text, found nothing (null)")


# --- files


def failed_load(path: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path)
    return str(caught.value)


def test_load(tmp_path: Path) -> None:
    """A file is read as UTF-8, with or without the mark that Windows editors put in front."""
    path = tmp_path / "f.yml"
    path.write_bytes(b"\xef\xbb\xbf# \xc3\xa4\r\nbackends: [amd]\r\n")
    assert load(path).backends == ("amd",)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"backends:\n- \xff", ":2: expected text in UTF-8, found the byte 0xff"),
        ("a: b".encode("utf-16"), ":1: expected text in UTF-8, found the byte 0xff"),
        (b"\x7fELF\x02\x01\x01\0", ":1: expected printable text, found the character U+007F"),
        (b"a: \0", ":1: expected printable text, found the character U+0000"),
        (b"#" * (yaml_nodes.MAX_BYTES + 1), ": expected a settings file of at most 1048576 bytes, found a larger one"),
    ],
)
def test_not_text(tmp_path: Path, data: bytes, said: str) -> None:
    """A file that is not text, or too large, is refused without a look at what it says."""
    path = tmp_path / "f.yml"
    path.write_bytes(data)
    assert failed_load(path) == f"{path}{said}"


def test_the_largest_file(tmp_path: Path) -> None:
    """A file of exactly the largest size is read."""
    path = tmp_path / "f.yml"
    path.write_bytes(b"#" * yaml_nodes.MAX_BYTES)
    assert load(path) == Settings()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing.yml", "No such file or directory"),
        (".", "Is a directory"),
        ("file/f.yml", "Not a directory"),
        ("loop", "Too many levels of symbolic links"),
        ("x" * 300, "File name too long"),
    ],
)
def test_no_file(tmp_path: Path, name: str, said: str) -> None:
    """A file that cannot be read is named with the system's reason, and no line."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    path = tmp_path / name
    assert failed_load(path) == f"{path}: cannot read the settings file: {said}"


def test_a_read_that_fails() -> None:
    """A file that opens and then cannot be read is a complaint as well."""
    assert failed_load("/proc/self/mem") == "/proc/self/mem: cannot read the settings file: Input/output error"


@pytest.mark.parametrize("path", ["a\0b", "\ud800"])
def test_not_a_path(path: str) -> None:
    """A path that no file can have is a complaint as well."""
    assert failed_load(path).startswith(f"{path}: cannot read the settings file: ")


@pytest.fixture
def nobody() -> Iterator[None]:
    """Root may read everything, so whoever runs the tests is somebody else for a while."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    yield
    os.seteuid(before)


@pytest.fixture
def unreadable(tmp_path: Path) -> Path:
    path = tmp_path / "f.yml"
    path.write_text("{}")
    path.chmod(0)
    return path


def test_permission(unreadable: Path, nobody: None) -> None:
    """A file that the daemon's user may not read is named with that reason."""
    assert failed_load(unreadable) == f"{unreadable}: cannot read the settings file: Permission denied"


# --- any text at all

WORDS = """backends sampling mapping fleets name runtime env reach accept host cuda nvidia reuse_seconds proven a:
: ; - [ ] { } , & * &a *a ! !!str !!python/object:x | > ' " % @ ` # ? << ~ null true 1 010 1e999 .nan --- ... %YAML %TAG
\\x \\U -1 2,3 21:00.0 GPU-1"""
BLANKS = [" ", "\n", "\n  ", "\n    ", "\n- ", "\t", "\r", ": ", ", ", "\ufeff", "\0", "\x85", "\u2028", "\ud800"]
FRAGMENTS = st.sampled_from(WORDS.split()) | st.sampled_from(BLANKS)


def outcome(text: str) -> Settings | ConfigError:
    try:
        return parse(text)
    except ConfigError as error:
        return error


def survives(text: str) -> None:
    result = outcome(text)
    if isinstance(result, ConfigError):
        assert re.fullmatch(r"f\.yml:\d+: .+", str(result))
    else:
        assert msgspec.convert(msgspec.to_builtins(result), Settings) == result


@given(st.text() | st.text(st.characters(max_codepoint=0x7F)))
def test_any_text(text: str) -> None:
    """Any text is settings or one sentence, never another exception."""
    survives(text)


@given(st.lists(FRAGMENTS, max_size=30).map("".join))
def test_any_yaml(text: str) -> None:
    """Any text made of YAML's own marks and our keys is settings or one sentence."""
    survives(text)


@given(st.binary())
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """Any file is settings or one sentence."""
    path = tmp_path_factory.getbasetemp() / "any.yml"
    path.write_bytes(data)
    try:
        load(path)
    except ConfigError as error:
        said = str(error)
    else:
        said = str(path)
    assert said.startswith(str(path))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.sampled_from([*config.keys(), "sampling", "mapping", "metrics", "expected_devices", "fleets", "fleets[]"]),
    VALUES,
)
def test_any_value_at_any_key(key: str, value: Any) -> None:
    """Any value at a key that exists is settings or one sentence; JSON is YAML."""
    for name in reversed(key.split(".")):
        value = {name.removesuffix("[]"): [value] if name.endswith("[]") else value}
    survives(msgspec.json.encode(value).decode())


GLOBS = st.lists(st.sampled_from([*"gpu_*?[]!-az09", "gpu_", "power", "_total", "**"]), max_size=12).map("".join)


@given(st.lists(GLOBS | st.text(max_size=20), max_size=4), st.lists(GLOBS, max_size=4))
def test_any_choice_of_families(include: list[str], exclude: list[str]) -> None:
    """Any patterns are settings, which choose some families or none, or one sentence."""
    text = msgspec.json.encode({"metrics": {"include": include, "exclude": exclude}}).decode()
    survives(text)
    if isinstance(found := outcome(text), Settings):
        chosen = selection(found.metrics.include, found.metrics.exclude)
        assert chosen.readings <= READINGS.keys()
        assert chosen.usage <= USAGE.keys()


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="\u2028\u2029\ufffe\uffff")))
def test_any_value_of_a_variable(text: str) -> None:
    """A quoted value of one printable line is the variable's value, to the character."""
    quoted = text.replace("'", "''")
    assert parse(f"fleets: [{{name: a, env: {{A: '{quoted}'}}}}]").fleets[0].env == {"A": text}


@given(st.floats(0, 60))
def test_any_number_in_range(value: float) -> None:
    """Python's own way to write a number is read back to the bit."""
    assert parse(f"sampling: {{reuse_seconds: {value}}}").sampling.reuse_seconds == value


# --- the example


def test_keys() -> None:
    """The keys come from the structs, so that a key cannot be added without its lines in the example."""
    assert config.keys() == [
        "backends",
        "libraries",
        "sampling.reuse_seconds",
        "sampling.deadline_seconds",
        "sampling.interval_seconds",
        "sampling.hang_seconds",
        "sampling.scan_seconds",
        "mapping.accept",
        "mapping.probe",
        "mapping.max_fleets",
        "metrics.include",
        "metrics.exclude",
        "metrics.prefix",
        "expected_devices",
        "fleets[].name",
        "fleets[].runtime",
        "fleets[].env",
        "fleets[].reach",
        "fleets[].known",
        "fleets[].pid_file",
        "fleets[].systemd_unit",
        "fleets[].process.command",
        "fleets[].process.user",
        "fleets[].cgroup",
    ]


def test_where_processes_are_found() -> None:
    """Each source is read as it is written; placeholders are those of the source."""
    text = """
mapping: {probe: never, max_fleets: 3}
fleets:
- {name: a, pid_file: /run/a.pid}
- {name: "{unit}-{pid}", systemd_unit: 'llama@*.service'}
- {name: "{user}.{job}", runtime: cuda, cgroup: 'job_(?P<job>\\d+)', reach: ["21:00.0"]}
- {name: "{model}", process: {command: '--model (?P<model>\\S+)', user: svc}}
"""
    settings = parse(text)
    assert settings.mapping == Mapping(probe="never", max_fleets=3)
    job = r"job_(?P<job>\d+)"
    assert settings.fleets == (
        FleetSettings("a", pid_file="/run/a.pid"),
        FleetSettings("{unit}-{pid}", systemd_unit="llama@*.service"),
        FleetSettings("{user}.{job}", "cuda", cgroup=job, reach=("21:00.0",)),
        FleetSettings("{model}", process=ProcessPattern(r"--model (?P<model>\S+)", "svc")),
    )
    assert [config.values_of(entry) for entry in settings.fleets] == [
        (),
        ("unit", "user", "pid"),
        ("job", "user", "pid"),
        ("model", "user", "pid"),
    ]


def test_the_example_as_it_is() -> None:
    """A plain copy of the example is the defaults and one fleet that watches every card."""
    assert load(EXAMPLE) == Settings(fleets=(FleetSettings("host", "host"),))


def test_the_example_with_every_setting() -> None:
    """With its marks taken away, the example has the defaults and the fleet of the design."""
    settings = parse(uncommented(EXAMPLE.read_text()))
    assert (settings.sampling, settings.mapping) == (Sampling(), Mapping())
    assert settings.backends == ("nvidia",)
    env = {"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert settings.fleets[:2] == (FleetSettings("host", "host"), FleetSettings("chat", "cuda", env))
    named = {fleet.name: fleet for fleet in settings.fleets}
    assert named["embed"].reach == ("GPU-8d2cd1a6-9f5b-4c0e-8d40-4b2a9c9f3e11",)
    assert named["rerank"].env == {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert {fleet.runtime for fleet in settings.fleets} == {None, "host", "cuda", "rocm", "sycl", "level_zero"}


@pytest.mark.parametrize("fleet", parse(uncommented(EXAMPLE.read_text())).fleets, ids=lambda fleet: fleet.name)
def test_the_example_sets_variables_that_its_runtimes_read(fleet: FleetSettings) -> None:
    """No variable of an example is without effect, and every runtime of the program is one of the settings."""
    assert fleet.env.keys() <= set(masks.RUNTIMES[fleet.runtime or "cuda"].variables)
    assert set(masks.RUNTIMES) == set(RUNTIMES)


@pytest.mark.parametrize("key", config.keys())
def test_the_example_has_every_key(key: str) -> None:
    """Every key stands in the example as a setting, in its section."""
    places: list[Any] = [msgspec.yaml.decode(uncommented(EXAMPLE.read_text()))]
    for name in key.split("."):
        found = [place[name.removesuffix("[]")] for place in places if name.removesuffix("[]") in place]
        places = [each for value in found for each in value] if name.endswith("[]") else found
    assert places


@pytest.mark.parametrize("field", msgspec.structs.fields(Sampling), ids=lambda field: field.name)
def test_the_example_tells_ranges_and_defaults(field: msgspec.structs.FieldInfo) -> None:
    """The explanation above a number names the range and the default that hold."""
    before, _ = EXAMPLE.read_text().split(f"  #{field.name}: ")
    words = " ".join(before.rsplit("\n\n", 1)[-1].replace("#", "").split())
    expected = re.search(r"from \S+ to \d+", complaint(f"sampling: {{{field.name}: -1}}"))
    assert expected
    assert expected[0] in words.replace("From", "from")
    default = "null" if field.default is None else f"{field.default:g}"
    assert f"default {default}" in words.replace("Default", "default")
