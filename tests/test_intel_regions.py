"""The memory regions that i915 and xe tell: real ioctls of a real process, answered by a preloaded library."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fakes.sysfs import FakeSys, IntelCard

pytestmark = pytest.mark.e2e

SOURCE = Path(__file__).parent / "fakes" / "drm_query.c"
GIB = 1 << 30

ASK = """
import json, sys
from exporter.backends.intel import regions
from exporter.errors import BackendError
try:
    found = regions.of_card(sys.argv[1], sys.argv[2])
    print(json.dumps(None if found is None else [found.total, found.used]))
except BackendError as error:
    print(json.dumps([type(error).__name__, error.reason]))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library to preload; where there is no compiler the tests are skipped, and fail when ``CI=true``."""
    compiler = shutil.which("cc")
    if compiler is None:
        assert os.environ.get("CI") != "true", "no C compiler"
        pytest.skip("no C compiler 'cc' on PATH (Debian: apt-get install gcc libc6-dev)")
    target = tmp_path_factory.mktemp("drm") / "drm_query.so"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror"]
    subprocess.run([compiler, *flags, "-o", str(target), str(SOURCE), "-ldl"], check=True)
    return target


def ask(library: Path, folder: Path, driver: str, lines: Sequence[str], node: str = "renderD128") -> object:
    """What a process reads of the device, which is a plain file here."""
    (folder / node).touch()
    state = folder / "state"
    state.write_text("".join(f"{line}\n" for line in lines))
    environment = os.environ | {"LD_PRELOAD": str(library), "FAKE_DRM_STATE": str(state)}
    result = subprocess.run(
        [sys.executable, "-c", ASK, str(folder / node), driver],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return json.loads(result.stdout)


@pytest.mark.parametrize("driver", ["i915", "xe"])
def test_a_cards_own_memory(library: Path, tmp_path: Path, driver: str) -> None:
    """The card's regions, over all tiles, without the system's memory that it can use too."""
    lines = [f"region renderD128 0 {64 * GIB} {60 * GIB}", f"region renderD128 1 {12 * GIB} {9 * GIB}"]
    assert ask(library, tmp_path, driver, lines) == [12 * GIB, 3 * GIB]
    lines.append(f"region renderD128 1 {12 * GIB} {11 * GIB}")
    assert ask(library, tmp_path, driver, lines) == [24 * GIB, 4 * GIB]


@pytest.mark.parametrize("driver", ["i915", "xe"])
def test_nothing_in_use_is_not_known(library: Path, tmp_path: Path, driver: str) -> None:
    """Which is what both drivers say to a process without CAP_PERFMON."""
    lines = [f"region renderD128 1 {12 * GIB} {9 * GIB}", "blind renderD128"]
    assert ask(library, tmp_path, driver, lines) == [12 * GIB, None]


@pytest.mark.parametrize("driver", ["i915", "xe"])
def test_what_a_card_without_its_own_memory_has(library: Path, tmp_path: Path, driver: str) -> None:
    """An integrated card uses the system's, which is no reading of it."""
    assert ask(library, tmp_path, driver, [f"region renderD128 0 {64 * GIB} {60 * GIB}"]) is None


@pytest.mark.parametrize("driver", ["i915", "xe"])
@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], None),
        ([f"error renderD128 {errno.EACCES}"], None),
        ([f"error renderD128 {errno.EINVAL}"], None),
        ([f"error renderD128 {errno.ENODEV}"], ["DeviceLost", "device-lost"]),
        ([f"error renderD128 {errno.EIO}"], ["DeviceFault", "driver-error"]),
    ],
)
def test_errors(library: Path, tmp_path: Path, driver: str, lines: Sequence[str], expected: object) -> None:
    """A driver without the query, and a device that may not be asked, have no memory; a lost card is lost."""
    assert ask(library, tmp_path, driver, lines) == expected


def test_no_device_file_is_no_memory(library: Path, tmp_path: Path) -> None:
    """As in a container that was not given it."""
    assert ask(library, tmp_path, "xe", [], node="renderD9") is None
    (tmp_path / "renderD9").unlink()
    result = subprocess.run(
        [sys.executable, "-c", ASK, str(tmp_path / "renderD9"), "xe"], capture_output=True, text=True, check=True
    )
    assert json.loads(result.stdout) is None


BACKEND = """
import json, sys
from exporter.backends.base import Places
from exporter.backends.intel import IntelBackend

MEMORY = ("memory_free", "memory_used", "memory_total")
root = sys.argv[1]
backend = IntelBackend(Places(f"{root}/sys", f"{root}/proc", shared_object="/nonexistent/libze_loader.so.1", root=root))
backend.open()
found = {}
for slot in backend.slots():
    (board, *_) = backend.identify(slot, lambda _: None)
    sample = backend.sample(board)
    values = {reading.metric: reading.value for reading in sample.readings if reading.metric in MEMORY}
    found[slot] = [board.memory_total_bytes, values, sorted(hint.code for hint in sample.hints)]
print(json.dumps(found))
"""
ARC, UHD = "0000:03:00.0", "0000:00:02.0"


def backend(library: Path, fake: FakeSys, root: Path, lines: Sequence[str]) -> dict[str, list[object]]:
    """Total, readings and hints of each card, as the backend gives them on that host."""
    state = root / "state"
    state.write_text("".join(f"{line}\n" for line in lines))
    result = subprocess.run(
        [sys.executable, "-c", BACKEND, str(root)],
        env=os.environ | {"LD_PRELOAD": str(library), "FAKE_DRM_STATE": str(state)},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    found: dict[str, list[object]] = json.loads(result.stdout)
    return found


@pytest.fixture
def host(tmp_path: Path) -> FakeSys:
    """A host with an integrated card, and a discrete one that is renderD128, with their device files."""
    fake = FakeSys(tmp_path)
    fake.write(
        [
            IntelCard(pci=ARC, device_id="0xe20b", minor=0),
            IntelCard(pci=UHD, device_id="0x4680", driver="i915", minor=1),
        ]
    )
    (tmp_path / "dev/dri").mkdir(parents=True)
    for number in (128, 129):
        (tmp_path / f"dev/dri/renderD{number}").touch()
    return fake


def test_the_backend_gives_what_the_driver_counts(library: Path, host: FakeSys, tmp_path: Path) -> None:
    """A discrete card's memory needs no Level Zero; an integrated one has none of its own, whatever its driver says."""
    lines = [f"region renderD128 1 {12 * GIB} {9 * GIB}", f"region renderD129 1 {GIB} {GIB // 2}"]
    found = backend(library, host, tmp_path, lines)
    memory = {"memory_free": 9 * GIB, "memory_used": 3 * GIB, "memory_total": 12 * GIB}
    assert found == {UHD: [None, {}, []], ARC: [12 * GIB, memory, []]}


def test_the_backend_says_what_would_bring_the_memory(library: Path, host: FakeSys, tmp_path: Path) -> None:
    """A right where the driver tells the total alone, Level Zero where it tells nothing."""
    blind = [f"region renderD128 1 {12 * GIB} {9 * GIB}", "blind renderD128"]
    assert backend(library, host, tmp_path, blind)[ARC] == [
        12 * GIB,
        {"memory_total": 12 * GIB},
        ["grant-cap-perfmon"],
    ]
    assert backend(library, host, tmp_path, [])[ARC] == [None, {}, ["install-level-zero"]]


def test_device_files_are_asked_for_the_sysfs_of_their_own_system_alone(
    library: Path, host: FakeSys, tmp_path: Path
) -> None:
    """Where sysfs is mounted elsewhere, the device file of a number may be another card's."""
    host.sys.rename(tmp_path / "elsewhere")
    (tmp_path / "sys").mkdir()
    script = BACKEND.replace('f"{root}/sys"', 'f"{root}/elsewhere"')
    state = tmp_path / "state"
    state.write_text(f"region renderD128 1 {12 * GIB} {9 * GIB}\n")
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        env=os.environ | {"LD_PRELOAD": str(library), "FAKE_DRM_STATE": str(state)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(result.stdout)[ARC] == [None, {}, ["install-level-zero"]]
