"""docs/adding-a-vendor.md is enough: a copy of the project with the page's blocks in it reads that vendor's cards."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fakes import shared_object
from tests.fakes.sysfs import FakeSys, OtherCard
from tests.harness import Daemon, Scrape, Start, clean_environment

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "adding-a-vendor.md"
BLOCK = re.compile(r"<!-- (file|line in): ([^\s,]+)(?:, (before|after): (.+?))? -->\n```\w+\n(.*?)```\n", re.DOTALL)
PROJECT = ("docs", "exporter", "grafana", "prometheus", "systemd", "tests")
UNMADE = shutil.ignore_patterns(".*", "__pycache__", "node_modules")
NAMED = "backends: [acme]\nsampling: {reuse_seconds: 0, deadline_seconds: 2}\n"
FIRST, SECOND = "0000:41:00.0", "0000:61:00.0"
CARDS = (
    f"card {FIRST} busy=40 memory_total=2048 memory_used=1024 temperature=51 power=75000 coolant=31",
    f"card {SECOND} busy=50 memory_total=4096 memory_used=3072 temperature=61 power=150000 coolant=32",
)
FAMILIES = {
    "gpu_utilization_percent": (40, 50),
    "gpu_memory_total_bytes": (2048, 4096),
    "gpu_memory_used_bytes": (1024, 3072),
    "gpu_temperature_celsius": (51, 61),
    "gpu_power_watts": (75, 150),
    "gpu_coolant_temperature_celsius": (31, 32),
}


class Block(NamedTuple):
    """A block of the page: a whole file, or lines ``before`` or ``after`` the line that has ``place`` in it."""

    kind: str
    path: str
    side: str
    place: str
    text: str

    def put(self, root: Path) -> None:
        """Do as the page says."""
        path = root / self.path
        if self.kind == "file":
            assert not path.exists(), f"{self.path} is there already"
            path.write_text(self.text, encoding="utf-8")
            return
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        (found,) = (number for number, line in enumerate(lines) if self.place in line)
        lines.insert(found + (self.side == "after"), self.text)
        path.write_text("".join(lines), encoding="utf-8")


def blocks() -> list[Block]:
    """Those of the page, in its order."""
    return [Block(*match) for match in BLOCK.findall(PAGE.read_text(encoding="utf-8"))]


class Acme:
    """The copy, and the pretend library's state in a folder of its own."""

    def __init__(self, copy: Path, directory: Path) -> None:
        self.copy = copy
        self.record = directory / "acme.record"
        self._state = shared_object.StateFile(directory / "acme.state")
        self.write(*CARDS)

    def write(self, *lines: str) -> None:
        """The library's cards and rules from now on."""
        self._state.put(lines)

    @property
    def environment(self) -> dict[str, str]:
        """Of a program that runs the copy on the library."""
        return {
            "PYTHONPATH": str(self.copy),
            "LD_LIBRARY_PATH": shared_object.search_path(self.copy / "library"),
            "FAKE_ACME_STATE": str(self._state.state_path),
            "FAKE_ACME_RECORD": str(self.record),
        }


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project, as it is after the page; with the page's library built beside it."""
    root = tmp_path_factory.mktemp("page") / "project"
    for folder in PROJECT:
        shutil.copytree(ROOT / folder, root / folder, ignore=UNMADE)
    for path in ROOT.glob("[!.]*.*"):
        if path.is_file():
            shutil.copy(path, root)
    for block in blocks():
        block.put(root)

    def built() -> Path:
        switches = shared_object.shared("libacme.so.1")
        target = root / "library" / "libacme.so.1"
        return shared_object.compiled(shared_object.compiler(), root / "tests" / "fakes" / "acme.c", target, switches)

    shared_object.built_or_skipped("page's library", built)
    return root


@pytest.fixture
def acme(copy: Path, tmp_path: Path) -> Acme:
    """Two cards that tell everything."""
    return Acme(copy, tmp_path)


Serve = Callable[..., Daemon]


@pytest.fixture
def serve(acme: Acme, start: Start) -> Serve:
    """Starts the copy's daemon."""

    def server(config: str | None = NAMED, flags: Sequence[str] = ()) -> Daemon:
        return start(acme.environment, config, flags, lambda command: [command[0], "-P", *command[1:]])

    return server


def readings(scrape: Scrape, **labels: str) -> dict[str, float]:
    """Of a card: the families that have one series of it."""
    return {name: scrape.value(name, **labels) for name in FAMILIES if scrape.of(name, **labels)}


def whole(index: int, *without: str) -> dict[str, float]:
    """What a card tells that tells everything, but for some families."""
    return {name: values[index] for name, values in FAMILIES.items() if name not in without}


def run(acme: Acme, *command: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """A Python command in the copy, to its end."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=acme.copy,
        env=clean_environment(acme.environment),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def test_a_vendor_is_one_file_and_one_line() -> None:
    """Of the program's files the page makes one, and adds to the registry and to the catalog alone; the rest of what it
    says to write is tests, and a threshold of the rules.
    """
    program = [(block.kind, block.path) for block in blocks() if block.path.startswith("exporter/")]
    assert program == [
        ("file", "exporter/backends/acme.py"),
        ("line in", "exporter/vendors.py"),
        ("line in", "exporter/catalog/condition.py"),  # words for the help
        ("line in", "exporter/catalog/condition.py"),  # a metric is a row here,
        ("line in", "exporter/backends/acme.py"),  # and a line there
    ]
    entry = next(block for block in blocks() if block.path == "exporter/vendors.py")
    assert len(entry.text.splitlines()) == 1


def test_its_cards_are_read(serve: Serve) -> None:
    """Each with its own values and the added metric, under its physical index in the fleet of runtime ``host``."""
    daemon = serve()
    scrape = daemon.scrape()
    for index, address in enumerate((FIRST, SECOND)):
        assert readings(scrape, vendor="acme", pci_bus_id=address) == whole(index)
        assert readings(scrape, fleet="host", fleet_index=str(index), physical_index=str(index)) == whole(index)
        assert scrape.state(pci_bus_id=address) == "ok"
    assert scrape.value("gpu_fleet_device_info", fleet="host", fleet_index="1", evidence="proven") == 1
    assert scrape.value("gpu_exporter_backend_up") == 1
    assert len(daemon.workers()) == 1
    assert re.search(r"# HELP gpu_power_watts .* Acme: acme_power\.", daemon.request("/metrics").body.decode())


def test_a_named_fleet_of_runtime_host_has_it(serve: Serve) -> None:
    """Under the fleet's own name; a fleet of another vendor's runtime has none of its cards, and says so."""
    fleets = "fleets:\n- {name: all, runtime: host}\n- {name: other, runtime: cuda, env: {CUDA_VISIBLE_DEVICES: '0'}}\n"
    scrape = serve(NAMED + fleets).scrape()
    assert readings(scrape, fleet="all", fleet_index="1") == whole(1)
    assert not scrape.of("gpu_power_watts", fleet="other")
    assert scrape.value("gpu_fleet_mask_inverted", fleet="other") == 0


def test_a_card_that_hangs_costs_itself_alone(acme: Acme, serve: Serve) -> None:
    """It is `hung`, the other is read, and it comes back."""
    daemon = serve()
    daemon.scrape()
    acme.write(*CARDS, "hang acme_temperature 1")
    scrape = daemon.scrape()
    assert readings(scrape, pci_bus_id=FIRST) == whole(0)
    assert readings(scrape, pci_bus_id=SECOND) == {}
    assert scrape.state(pci_bus_id=SECOND) == "hung"
    acme.write(*CARDS)
    daemon.scrape_until(lambda page: readings(page, pci_bus_id=SECOND) == whole(1))


@pytest.mark.parametrize("call", ["acme_address", "acme_busy"])
def test_a_card_that_is_lost_costs_itself_alone(acme: Acme, serve: Serve, call: str) -> None:
    """Whether it is lost when it is identified or when it is read; its row stays."""
    daemon = serve()
    daemon.scrape()
    acme.write(*CARDS, f"fault {call} 1 3")
    scrape = daemon.scrape()
    assert readings(scrape, pci_bus_id=FIRST) == whole(0)
    assert readings(scrape, pci_bus_id=SECOND) == {}
    assert scrape.state(pci_bus_id=SECOND) == "lost"
    assert scrape.value("gpu_exporter_backend_faults_total", reason="device-lost") == 1


def test_what_is_no_value_is_absent(acme: Acme, serve: Serve) -> None:
    """A sentinel, a call that the card does not support, and one that fails: each costs its own reading, and only the
    last is a fault.
    """
    acme.write(
        f"card {FIRST} busy=-1 memory_total=2048 memory_used=1024 temperature=255 coolant=31",
        CARDS[1],
        "fault acme_coolant 1 2",
    )
    scrape = serve().scrape()
    lacking = ("gpu_utilization_percent", "gpu_temperature_celsius", "gpu_power_watts")
    assert readings(scrape, pci_bus_id=FIRST) == whole(0, *lacking)
    assert readings(scrape, pci_bus_id=SECOND) == whole(1, "gpu_coolant_temperature_celsius")
    assert scrape.value("gpu_exporter_backend_faults_total", reason="no-permission") == 1
    assert scrape.value("gpu_exporter_backend_faults_total", reason="unsupported") == 0


def test_what_is_excluded_is_not_asked(acme: Acme, serve: Serve) -> None:
    """The settings know the new family too, and the library's record lacks its call."""
    scrape = serve(NAMED + "metrics: {exclude: [gpu_coolant_*, gpu_power_watts]}\n").scrape()
    assert readings(scrape, pci_bus_id=FIRST) == whole(0, "gpu_coolant_temperature_celsius", "gpu_power_watts")
    called = set(acme.record.read_text(encoding="utf-8").split())
    assert "acme_busy" in called
    assert not {"acme_coolant", "acme_power"} & called


def test_a_host_with_such_a_card_shows_it_unnamed(serve: Serve, tmp_path: Path) -> None:
    """The PCI bus says that it is there: it has its rows without any settings, and one that sleeps is not asked."""
    tree = FakeSys(tmp_path / "tree")
    states = {FIRST: "active", SECOND: "suspended"}
    tree.write([OtherCard(pci=pci, vendor="0x1ac3", driver="acme", runtime_status=states[pci]) for pci in states])
    scrape = serve(None, [f"--path.sysfs={tree.sys}"]).scrape()
    assert [sample.labels["vendor"] for sample in scrape.of("gpu_exporter_backend_up")] == ["acme"]
    assert readings(scrape, pci_bus_id=FIRST) == whole(0)
    assert readings(scrape, pci_bus_id=SECOND) == {}
    assert scrape.state(pci_bus_id=SECOND) == "asleep"


@pytest.mark.parametrize(
    ("settings", "rules", "reason"),
    [
        ("libraries: {acme: /nowhere/libacme.so.1}\n", (), "library-missing"),
        ("", ("fault acme_init * 4",), "driver-not-loaded"),
        ("", ("crash acme_busy 0",), "crashed"),
    ],
)
def test_a_vendor_that_is_down_says_why(
    acme: Acme, serve: Serve, settings: str, rules: Sequence[str], reason: str
) -> None:
    """Without its library, without its driver, or with a library that crashes: the page is up, with the reason."""
    acme.write(*CARDS, *rules)
    daemon = serve(NAMED + settings)
    scrape = daemon.scrape_until(lambda page: bool(page.of("gpu_exporter_backend_fault_info", reason=reason)))
    assert scrape.value("gpu_exporter_backend_up", vendor="acme") == 0
    assert not scrape.of("gpu_power_watts")


def test_doctor_and_the_inventory_know_it(acme: Acme, tmp_path: Path) -> None:
    """The library's file is named, and the cards are listed."""
    settings = tmp_path / "settings.yaml"
    settings.write_text(NAMED, encoding="utf-8")
    listed = run(acme, "-m", "exporter", "inventory", f"--config.file={settings}")
    assert (FIRST in listed.stdout, SECOND in listed.stdout) == (True, True), listed
    told = run(acme, "-m", "exporter", "doctor", "--format=json", f"--config.file={settings}")
    findings: list[Mapping[str, str]] = json.loads(told.stdout)["findings"]
    (library,) = (each for each in findings if (each["check"], each["subject"]) == ("library", "acme"))
    assert library["level"] == "PASS"
    assert "libacme.so.1" in library["found"]


def test_the_pages_own_test_passes(acme: Acme) -> None:
    """The newcomer's test, as it stands there."""
    done = run(acme, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_acme.py")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_house_holds_the_new_vendor(acme: Acme) -> None:
    """What other tests say of every vendor is so of this one, unchanged; pages that are made are made anew first."""
    made = run(acme, "-m", "tests.metrics_page")
    assert "acme_coolant" in made.stdout
    (acme.copy / "docs" / "metrics.md").write_text(made.stdout, encoding="utf-8")
    files = [f"tests/test_{name}.py" for name in ("architecture", "catalog", "rules")]
    done = run(acme, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files)
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_types_and_style_are_the_houses(acme: Acme) -> None:
    """The page's code passes the linter and the type checker, as all code does."""
    written = [block.path for block in blocks() if block.kind == "file" and block.path.endswith(".py")]
    for command in (["ruff", "check"], ["ruff", "format", "--check"]):
        done = run(acme, "-m", *command, *written)
        assert done.returncode == 0, done.stdout + done.stderr
    done = run(acme, "-m", "mypy", f"--cache-dir={acme.copy / 'types'}", *written, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
