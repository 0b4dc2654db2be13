"""Fixtures: the fake library, and daemons that run on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.fakes.nvml import FakeNvml, build_or_skip, equal_cards
from tests.harness import Daemon, Start


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
