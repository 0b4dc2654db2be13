"""Fixtures: the fake library, and daemons that run on it."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.fakes import amd_smi, ze_loader
from tests.fakes.nvml import FakeNvml, build_or_skip, equal_cards
from tests.fakes.sysfs import FakeSys
from tests.fakes.ze_loader import FakeZeLoader
from tests.harness import Daemon, Start

SETTER = re.compile(r"Set(?!s$)|Reset|Control|Write|Format|Update|Run|Clear")


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the fake ``libnvidia-ml.so.1``, compiled once."""
    return build_or_skip(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml(tmp_path: Path, nvml_library: Path) -> FakeNvml:
    """Four equal cards behind the fake library."""
    fake = FakeNvml(tmp_path, nvml_library)
    fake.write(equal_cards(4))
    return fake


@pytest.fixture
def fake(tmp_path: Path) -> FakeSys:
    """Trees of ``/sys`` and ``/proc`` without a card."""
    return FakeSys(tmp_path / "trees")


@pytest.fixture(scope="session")
def amd_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake ``libamd_smi.so``, compiled once."""
    return amd_smi.build_or_skip(tmp_path_factory.mktemp("amd_smi"))


@pytest.fixture(scope="session")
def ze_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake loader of Level Zero, compiled once."""
    return ze_loader.build_or_skip(tmp_path_factory.mktemp("ze"))


@pytest.fixture
def ze(tmp_path: Path, ze_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeZeLoader]:
    """The loader, for this process too; nothing is ever changed by it."""
    loader = FakeZeLoader(tmp_path, ze_library)
    for name, value in loader.environment().items():
        monkeypatch.setenv(name, value)
    sys.modules.pop("pyzes", None)
    yield loader
    sys.modules.pop("pyzes", None)
    assert not [call for call in loader.record() if SETTER.search(call)]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts daemons and ends what is left of them."""
    with contextlib.ExitStack() as stack:

        def starter(
            environment: Mapping[str, str],
            config: str | None = None,
            flags: Sequence[str] = (),
            within: Callable[[Sequence[str]], Sequence[str]] = list,
        ) -> Daemon:
            directory = tmp_path / f"daemon{len(list(tmp_path.glob('daemon*')))}"
            directory.mkdir()
            return stack.enter_context(Daemon(directory, environment, config, flags, within))

        yield starter
