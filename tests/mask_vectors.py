"""Runs files of worked masks against :func:`exporter.masks.invert`: ``python -m tests.mask_vectors FILE...``

Two formats: a YAML document with ``inventories`` and ``vectors`` (each with ``expect`` and perhaps ``also_ok``), and
JSON lines, the first with ``inventories``, the others with what a runtime's own parser answered (``real``). Each vector
that fails is printed; the closing lines count per runtime. Exit 1 if any was wrong, 2 if a file cannot be read.

The defaults that the formats imply (whole-host reach, no front end, ...) are assumed here and nowhere else.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from exporter.inventory import Inventory
from exporter.masks import RUNTIMES, invert
from exporter.model import Context, DeviceKey, Refusal
from exporter.saved_inventory import Row, from_rows

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same, and ten times as fast where it is there

COUNTS = ("right", "wrong", "refused")
VENDORS = {"cuda": "nvidia", "rocm": "amd", "level_zero": "intel", "sycl": "intel", "vulkan": "vulkan"}
BACKENDS = {"cuda": "nvidia", "hip": "amd"}


Answer = tuple[str, Any, Any]
"""``("visible", identities, raw positions)``, or ``("refuse", code, None)``. None: not asked for."""


class Vector(NamedTuple):
    """One worked mask. ``accepted`` lists every right answer."""

    name: str
    runtime: str
    rows: list[dict[str, Any]]
    env: Mapping[str, str]
    context: Mapping[str, Any]
    accepted: tuple[Answer, ...]
    from_parser: bool


def load(path: Path) -> Iterator[Vector]:
    """The vectors of a file of either format."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl" or text.startswith("{"):
        yield from _json_lines(text, path.name)
    else:
        yield from _yaml_vectors(yaml.load(text, Loader=_LOADER))  # noqa: S506  (a safe one)


def _yaml_vectors(document: Mapping[str, Any]) -> Iterator[Vector]:
    for item in document["vectors"]:
        answers = [item["expect"], *item.get("also_ok", [])]
        accepted = tuple(_answer(answer) for answer in answers)
        rows = document["inventories"][item["inventory"]]
        yield Vector(item["id"], item["runtime"], rows, item["env"], item.get("context") or {}, accepted, False)


def _answer(answer: Mapping[str, Any]) -> Answer:
    if "refuse" in answer:
        return "refuse", str(answer["refuse"]).split(":")[0].strip(), None
    return "visible", list(answer["visible"]), answer.get("raw")


def _json_lines(text: str, name: str) -> Iterator[Vector]:
    lines = text.split("\n")  # and at nothing else that may stand in a mask
    inventories = json.loads(lines[0])["inventories"]
    for number, line in enumerate(lines[1:], start=2):
        if line.strip():
            item = json.loads(line)
            rows = inventories[item["inventory"]]
            context = _NO_OPENCL | (item.get("context") or {})
            real = _real(item["runtime"], item["real"])
            yield Vector(f"{name}:{number}", item["runtime"], rows, item["env"], context, (real,), True)


_NO_OPENCL = {"opencl": False}  # the parsers ran over one backend's devices, without any OpenCL platform


def _real(runtime: str, real: Any) -> Answer:
    if real == "throws":
        return "throws", None, None
    return ("visible", None, real) if runtime == "vulkan" else ("visible", real, None)


def answer(vector: Vector) -> Answer:
    """What the exporter says."""
    rows = [msgspec.convert(row, Row) for row in vector.rows]
    vendor = BACKENDS.get(vector.context.get("backend", ""), VENDORS[vector.runtime])
    inventory, reach = from_rows(rows, vendor)
    outcome = invert(vector.runtime, vector.env, inventory, implied_context(vector.context, inventory, reach))
    if isinstance(outcome, Refusal):
        return "refuse", outcome.code, None
    identities = [resolved.key.identity for resolved in outcome.devices]
    return "visible", identities, [resolved.raw_position for resolved in outcome.devices]


def implied_context(given: Mapping[str, Any], inventory: Inventory, reach: frozenset[DeviceKey] | None) -> Context:
    """What a worked mask implies where it does not say otherwise; ``reach`` None is the whole host."""
    implied: dict[str, Any] = {
        "driver": "current",
        "frontend": "none",
        "api": "hip",
        "os": "linux",
        "backend": "level_zero",
        "space": "enumeration",
        "probe": "same_env",
        "container": False,
        "multi_driver_library": False,
    }
    known = {**implied, **{key: value for key, value in given.items() if key != "reach"}}
    everything = frozenset(device.key for device in inventory.devices)
    measured = None if given.get("reach") == "unknown" else everything if reach is None else reach
    return Context(reach=measured, **known)


def verdict(vector: Vector, got: Answer) -> str:
    """``right``, ``wrong``, or ``refused``: the runtime's parser answered and the exporter would not."""
    if any(_matches(accepted, got) for accepted in vector.accepted):
        return "right"
    if vector.from_parser and vector.accepted[0][0] == "throws":
        return "right" if got[0] == "refuse" or got[1] == [] else "wrong"
    return "refused" if vector.from_parser and got[0] == "refuse" else "wrong"


def _matches(accepted: Answer, got: Answer) -> bool:
    return accepted[0] == got[0] and all(
        wanted in (None, found) for wanted, found in zip(accepted[1:], got[1:], strict=True)
    )


def run(paths: list[Path]) -> int:
    """Prints failures and counts; 0 when nothing was wrong. Raises :class:`VectorFileError`."""
    counts: Counter[tuple[str, str]] = Counter()
    for vector in (vector for path in paths for vector in _loaded(path)):
        result, got = _judged(vector)
        counts[vector.runtime, result] += 1
        if result in COUNTS[1:]:
            print(f"{result}: {vector.name}: {dict(vector.env)}: got {got}, expected {vector.accepted}")
    for runtime in sorted({runtime for runtime, _ in counts}):
        if runtime in RUNTIMES:
            print(f"{runtime}: " + ", ".join(f"{counts[runtime, kind]} {kind}" for kind in COUNTS))
        else:
            print(f"{runtime}: {counts[runtime, 'not run']} not run, this version has no such runtime")
    return 1 if any(counts[key] for key in counts if key[1] == "wrong") else 0


def _judged(vector: Vector) -> tuple[str, Any]:
    """The verdict and what was got: one vector that cannot be asked is wrong, and costs no other."""
    if vector.runtime not in RUNTIMES:
        return "not run", None
    try:
        got = answer(vector)
    except (msgspec.ValidationError, TypeError) as error:
        return "wrong", f"{type(error).__name__}: {error}"
    return verdict(vector, got), got


class VectorFileError(Exception):
    """A file that is of neither format, with its name."""


def _loaded(path: Path) -> list[Vector]:
    try:
        return list(load(path))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, yaml.YAMLError) as error:
        words = " ".join(str(error).split())
        raise VectorFileError(f"{path}: {type(error).__name__}: {words}") from error


def main(arguments: list[str]) -> int:
    """The command line; prints a sentence and returns 2 when a file cannot be read."""
    if not arguments:
        print("usage: python -m tests.mask_vectors FILE...", file=sys.stderr)
        return 2
    try:
        return run([Path(argument) for argument in arguments])
    except VectorFileError as error:
        print(f"cannot read a vector file: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
