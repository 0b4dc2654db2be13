"""The house: floors, sizes, and what may not be named anywhere."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.facts import FACTS
from exporter.masks import DEFAULT_RUNTIMES, RUNTIMES
from exporter.refusals import REFUSALS
from exporter.saved_inventory import MigRow, Row
from tests import masks_page, metrics_page

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "exporter"
SOURCES = sorted(PACKAGE.rglob("*.py"))
VENDOR_MODULES = ("pynvml", "amdsmi", "pyzes")


def floors() -> dict[str, int]:
    """Floor by file or folder, from the table of the architecture page."""
    text = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", text, re.MULTILINE)
    return {name.rstrip("/"): int(floor) for floor, names in rows for name in re.findall(r"`([^`]+)`", names)}


def room(path: Path) -> str:
    """The file or the top folder of the package that a source belongs to."""
    return path.relative_to(PACKAGE).parts[0]


def imports(path: Path) -> Iterator[str]:
    """Rooms of the package that a source imports from."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "exporter":
            yield from (_room_of([alias.name]) for alias in node.names if alias.name != "__version__")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("exporter."):
            yield _room_of((node.module or "").split(".")[1:])
        elif isinstance(node, ast.Import):
            yield from (_room_of(a.name.split(".")[1:]) for a in node.names if a.name.startswith("exporter."))


def _room_of(parts: list[str]) -> str:
    return parts[0] if (PACKAGE / parts[0]).is_dir() else f"{parts[0]}.py"


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and length in lines of each function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{path.name}:{node.lineno} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_from_lower_floors(path: Path) -> None:
    """Each source has a floor, and imports from lower floors or its own folder alone."""
    known = floors()
    if path.parent == PACKAGE and path.name in ("__init__.py", "__main__.py"):
        return  # the version, and one call of the command line
    for other in imports(path):
        assert other == room(path) or known[other] < known[room(path)], f"{path.name} imports {other}"


def test_the_parent_imports_no_vendor_package() -> None:
    """Importing everything that the daemon uses loads neither a vendor package nor a vendor's backend."""
    code = "import sys, exporter.cli; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "exporter.sampler" in loaded
    for name in (*VENDOR_MODULES, "exporter.backends.nvidia", "exporter.backends.simulated", "exporter.worker"):
        assert name not in loaded


def test_vendor_packages_are_imported_in_backends_alone() -> None:
    """A vendor's package is named in an import in its backend and nowhere else."""
    for path in SOURCES:
        if room(path) != "backends":
            assert not re.search(rf"import ({'|'.join(VENDOR_MODULES)})\b", path.read_text()), path


def test_no_call_that_changes_a_device_is_named() -> None:
    """No vendor call that sets, resets or clears a device's state is named; sets of events or errors are none."""
    named = re.compile(
        r"\b(nvml(?!EventSet)\w*(?:Set|Reset|Clear)[A-Z]\w*|amdsmi_(?:set|reset|clear)\w*|zes(?!DeviceEnumRasErrorSets)\w*(?:Set|Reset)\w*)"
    )
    for path in SOURCES:
        assert not named.findall(path.read_text()), path


def test_masks_are_pure() -> None:
    """No file of the masks imports anything that could read the environment, a file or a clock."""
    for path in (PACKAGE / "masks").glob("*.py"):
        assert not re.search(
            r"^(?:import|from) (os|sys|time|datetime|pathlib|io|subprocess)\b", path.read_text(), re.M
        ), path


def test_sizes() -> None:
    """Files stay under 400 lines, functions at most 50, the median function under 8."""
    sources = [*SOURCES, *(ROOT / "grafana" / "source").glob("*.py")]
    for path in sources:
        assert len(path.read_text().splitlines()) <= 400, path
    lengths = dict(entry for path in sources for entry in functions(path))
    assert max(lengths.values()) <= 50, max(lengths, key=lambda name: lengths[name])
    assert statistics.median(lengths.values()) < 8


def test_broad_handlers_are_the_workers_alone() -> None:
    """Only the worker may catch everything, and at most twice."""
    broad = [
        path.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException"))
    ]
    assert set(broad) <= {"worker.py", "lanes.py"}
    assert len(broad) <= 2


def test_only_the_command_line_prints_or_exits() -> None:
    """`print` and exits stand in the command line's files; the worker and the daemon leave with os._exit."""
    for path in SOURCES:
        if path.name not in ("cli.py", "__main__.py"):
            assert not re.search(r"(?<![\w.])(print|exit)\(|sys\.exit\(", path.read_text()), path


MASKS = sorted((PACKAGE / "masks").glob("*.py"))
# Beside the registry: which file uses which. Only SYCL stands on other runtimes, and on none of their text.
USES = {
    "cuda": {"cuda_readings", "front_end"},
    "rocm": {"rocr", "front_end"},
    "level_zero": {"affinity_mask"},
    "sycl": {"cuda", "rocm", "level_zero", "affinity_mask"},
}
PURE = {"__future__", "collections.abc", "itertools", "msgspec.structs", "re", "typing"}


@pytest.mark.parametrize("path", MASKS, ids=lambda path: path.stem)
def test_masks_are_pure_short_and_read_text_alone(path: Path) -> None:
    """Nothing that does input or output is imported, no runtime uses the tokenizer of another, each file is short."""
    found = {module for module, _ in imported(path)}
    assert {module for module in found if not module.startswith("exporter")} <= PURE
    assert found <= PURE | {f"exporter.{name}" for name in ("inventory", "model", "masks", "masks.base")} | {
        f"exporter.masks.{name}" for name in USES.get(path.stem, ())
    }
    others = {name for module, name in imported(path) if module == "exporter.masks"}
    assert path.stem == "__init__" or others <= USES.get(path.stem, set())
    assert {name for module, name in imported(path) if module == "exporter.masks.affinity_mask"} <= (
        {"Visible"} if path.stem == "sycl" else {"MASK", "Visible", "select"}
    )
    assert len(path.read_text().splitlines()) < 300


def imported(path: Path) -> set[tuple[str, str]]:
    """Module and name of everything that a source imports; each with ``from ... import``."""
    tree = ast.parse(path.read_text())
    plain = {(alias.name, "") for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return plain | {
        (node.module or "", alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_no_two_runtimes_number_one_vendors_cards_by_default() -> None:
    """So no fleet that names no runtime has a card twice."""
    vendors = [vendor for name in DEFAULT_RUNTIMES for vendor in RUNTIMES[name].vendors]
    assert len(vendors) == len(set(vendors))
    assert DEFAULT_RUNTIMES == ("cuda", "rocm", "level_zero")


def test_every_refusal_code_in_use_is_listed() -> None:
    """A code that an inversion or a binding refuses with has a meaning and an advice, and none is listed in vain."""
    trees = (ast.parse(path.read_text()) for path in SOURCES if room(path) in ("masks", "binding.py"))
    texts = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    codes = {text for text in texts if isinstance(text, str) and re.fullmatch(r"mps|[a-z0-9]+(-[a-z0-9]+)+", text)}
    assert codes | set(refused_with()) == set(REFUSALS)


def refused_with() -> Iterator[str]:
    """The codes of refusals that are written out anywhere."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Refusal" and node.args:
                code = node.args[0]
                if isinstance(code, ast.Constant) and isinstance(code.value, str):
                    yield code.value


def test_the_metrics_page_is_current() -> None:
    """docs/metrics.md is what the catalog says; `make docs` writes it."""
    assert (ROOT / "docs/metrics.md").read_text() == metrics_page.page()


def test_the_masks_page_is_current() -> None:
    """The made parts of docs/masks.md are what the code does, with every refusal's code; `make docs` writes them."""
    text = masks_page.PATH.read_text(encoding="utf-8")
    assert masks_page.page(text) == text
    assert set(
        re.findall(r"^\| `([a-z0-9-]+)` \|", text.partition("<!-- refusals -->")[2].partition("<!--")[0], re.MULTILINE)
    ) == set(REFUSALS)
    named = set(re.findall(r"`([a-z]+(?:-[a-z0-9]+)+)`", text)) - {"gpu-fleet-exporter"}
    assert named <= set(REFUSALS)


def test_the_masks_page_has_every_fact_and_every_row_key() -> None:
    """What `--known` takes, and what a saved inventory's rows may have, stands in docs/masks.md."""
    text = masks_page.PATH.read_text(encoding="utf-8")
    facts = dict(re.findall(r"^\| `(\w+)` \| (`[^|]+) \|", text.partition("FACT=VALUE")[2], re.MULTILINE))
    assert {name: set(re.findall(r"`([^`]+)`", values)) for name, values in facts.items() if name in FACTS} == {
        name: set(values) for name, values in FACTS.items()
    }
    rows = {field for struct in (Row, MigRow) for field in struct.__struct_fields__}
    assert rows <= set(re.findall(r"`(\w+)(?:: false)?`", text.partition("A saved inventory")[2]))
