"""Every worked mask and every answer of a real parser, over all runtimes, through the command that runs such files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from exporter.masks import RUNTIMES
from tests.mask_vectors import Vector, answer, load, verdict

DATA = Path(__file__).parent / "data"
VECTORS = {vector.name: vector for vector in load(DATA / "mask_vectors.yaml")}
PARSED = list(load(DATA / "real_parsers.jsonl"))
MOST_REFUSED = 0.03


@pytest.mark.parametrize("vector", VECTORS.values(), ids=list(VECTORS))
def test_vector(vector: Vector) -> None:
    """The worked example of that id is answered as the specification answers it."""
    got = answer(vector)
    assert verdict(vector, got) == "right", f"got {got}, expected {vector.accepted}"


def test_every_vector_is_run() -> None:
    """The file's 319 vectors are among the tests above, and every one's runtime is there."""
    counts = Counter(vector.runtime for vector in VECTORS.values())
    assert counts == {"cuda": 86, "rocm": 88, "level_zero": 50, "sycl": 56, "vulkan": 39}
    assert counts.keys() == RUNTIMES.keys() - {"host"}


@pytest.mark.parametrize("runtime", ["cuda", "rocm", "level_zero", "sycl", "vulkan"])
def test_no_parser_is_contradicted(runtime: str) -> None:
    """Never another list than the runtime's own parser gave, none or a refusal where it throws, and hardly a refusal
    where it answered.
    """
    cases = [vector for vector in PARSED if vector.runtime == runtime]
    verdicts = Counter(verdict(vector, answer(vector)) for vector in cases)
    answered = sum(vector.accepted[0][0] == "visible" for vector in cases)
    assert verdicts["wrong"] == 0
    assert answered > 150
    assert verdicts["refused"] <= MOST_REFUSED * answered


def run(*paths: Path) -> subprocess.CompletedProcess[str]:
    """``python -m tests.mask_vectors`` with these files."""
    command = [sys.executable, "-m", "tests.mask_vectors", *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=DATA.parent.parent)


def test_the_command_counts_per_runtime() -> None:
    """Status 0, and a line a runtime with what was right, wrong and refused."""
    result = run(DATA / "mask_vectors.yaml", DATA / "real_parsers.jsonl")
    assert (result.returncode, result.stderr) == (0, "")
    assert "vulkan: 339 right, 0 wrong, 0 refused\n" in result.stdout
    assert "rocm: 676 right, 0 wrong, 12 refused\n" in result.stdout


def test_the_command_names_what_failed(tmp_path: Path) -> None:
    """A vector with another answer is printed by its id, a parser's by its line; status 1."""
    head = {"inventories": {"one": [{"index": 0, "uuid": None, "pci": "0000:03:00.0", "kfd_node": 1}]}}
    line = {"runtime": "rocm", "inventory": "one", "env": {"HIP_VISIBLE_DEVICES": "0"}, "real": []}
    parsed = tmp_path / "parsed.jsonl"
    parsed.write_text(f"{json.dumps(head)}\n{json.dumps(line)}\n")
    vectors = tmp_path / "vectors.yaml"
    vector = line | {"id": "rocm-x", "expect": {"refuse": "kfd-order-unknown"}}
    vectors.write_text(yaml.safe_dump(head | {"vectors": [vector]}))
    result = run(parsed, vectors)
    assert result.returncode == 1
    assert "wrong: parsed.jsonl:2: {'HIP_VISIBLE_DEVICES': '0'}" in result.stdout
    assert "wrong: rocm-x: " in result.stdout
    assert result.stdout.endswith("rocm: 0 right, 2 wrong, 0 refused\n")


def test_a_vector_that_cannot_be_asked_costs_no_other(tmp_path: Path) -> None:
    """It is wrong, by its name; one of another runtime is not run."""
    head = {
        "inventories": {"one": [{"index": 0, "uuid": None, "pci": "0000:03:00.0", "kfd_node": 1}], "odd": [{"x": 1}]}
    }
    line = {"runtime": "rocm", "inventory": "one", "env": {}, "real": ["0000:03:00.0"]}
    path = tmp_path / "parsed.jsonl"
    lines = (
        head,
        line | {"inventory": "odd"},
        line | {"context": {"weather": "fine"}},
        line | {"runtime": "metal"},
        line,
    )
    path.write_text("\n".join(map(json.dumps, lines)))
    result = run(path)
    assert result.returncode == 1
    assert "wrong: parsed.jsonl:2: " in result.stdout
    assert "wrong: parsed.jsonl:3: " in result.stdout
    assert "metal: 1 not run, " in result.stdout
    assert "rocm: 1 right, 2 wrong, 0 refused\n" in result.stdout


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", "vectors: [{id: x}]\ninventories: {}\n"])
def test_the_command_on_what_is_no_vector_file(text: str, tmp_path: Path) -> None:
    """A file of neither format is one sentence on the error output; status 2."""
    path = tmp_path / "file.yaml"
    path.write_text(text)
    result = run(path)
    assert result.returncode == 2
    assert result.stderr.startswith(f"cannot read a vector file: {path}: ")
    assert result.stderr.count("\n") == 1
