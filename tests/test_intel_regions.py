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
