"""Every row of the fault matrix is a test; they are played beside each other, since each mostly waits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.faults.table import ROWS, Scenario
from tests.truth import built

pytestmark = pytest.mark.e2e

AT_ONCE = 20


@pytest.fixture(scope="module")
def playing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Future[list[str]]]]:
    """What each chosen row will have found, by its name."""
    libraries = built(tmp_path_factory.mktemp("libraries"))
    chosen = {row.name: row for item in request.session.items if isinstance(row := _row_of(item), Scenario)}
    with ThreadPoolExecutor(AT_ONCE, "row") as pool:
        futures = {
            name: pool.submit(row.play, libraries, tmp_path_factory.mktemp(re.sub(r"\W", "-", name)))
            for name, row in chosen.items()
        }
        yield futures
        pool.shutdown(cancel_futures=True)


def _row_of(item: pytest.Item) -> object:
    return item.callspec.params.get("row") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_the_page_keeps_its_promises(row: Scenario, playing: Mapping[str, Future[list[str]]]) -> None:
    """What the page promises holds while this is so, and after it."""
    problems = playing[row.name].result()
    assert not problems, "\n".join([f"{len(problems)} problems", *problems[:20]])


def test_names_are_no_other_rows() -> None:
    """A row's name is its own, so that no row takes another's place."""
    assert len({row.name for row in ROWS}) == len(ROWS)
