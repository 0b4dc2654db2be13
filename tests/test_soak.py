"""The soak as the tests run it: a minute of random faults, and a run that has to fail."""

from __future__ import annotations

import pytest

from tests import soak

pytestmark = pytest.mark.e2e


def test_a_minute_of_faults(capfd: pytest.CaptureFixture[str]) -> None:
    """Twenty scrapes a second in every way, while everything goes wrong: no page is wrong, and nothing is kept."""
    status = soak.main(["--seconds", "60", "--rate", "20", "--seed", "8"])
    told = capfd.readouterr()
    assert status == 0, told.err
    assert "complaints: 0" in told.out


def test_a_library_that_lies_is_caught(capfd: pytest.CaptureFixture[str]) -> None:
    """When a library gives one card's memory for another's, the soak says which cards and fails."""
    status = soak.main(["--seconds", "1", "--rate", "20", "--seed", "8", "--lie"])
    told = capfd.readouterr()
    assert status == 1, told.out
    assert "gpu_memory_free_bytes" in told.err
