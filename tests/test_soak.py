"""The soak as the tests run it: a minute of random faults, and what it has to find."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from tests import soak
from tests.harness import Daemon
from tests.soak_clients import NOISE_SECONDS, WAYS, Answer, Asked, Judge, Run, SparseTruth, Touched
from tests.soak_faults import DEADLINE_SECONDS, FLEETS, HOST, SETTINGS
from tests.truth import built
from tests.truth_cards import FREE, N0, N1, N2

pytestmark = pytest.mark.e2e


def test_a_minute_of_faults(capfd: pytest.CaptureFixture[str]) -> None:
    """Twenty scrapes a second in every way, while everything fails: nothing is wrong on a page, and nothing is kept."""
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


# --- the judge


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> SparseTruth:
    """The soak's host, at a tick that stands."""
    directory = tmp_path_factory.mktemp("soak")
    return SparseTruth(directory, built(directory / "libraries"), HOST, FLEETS)


@pytest.fixture(scope="module")
def page(truth: SparseTruth, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of that host, on which all is well."""
    sampling, fleets, _ = SETTINGS[0]
    directory = tmp_path_factory.mktemp("daemon")
    with Daemon(directory, truth.environment(), truth.config(sampling, fleets), truth.flags()) as daemon:
        daemon.scrape_until(lambda page: len(page.of(FREE, fleet="host")) == len(HOST.cards) + 2)
        return daemon.request("/metrics").body.decode()


def judged(truth: SparseTruth, text: str, *, status: int = 200, seconds: float = 0.1, older: int = 0) -> list[str]:
    """The complaints about a page that was asked for ``older`` ticks later than it is."""
    run, began, tick = Run(truth), time.monotonic(), truth.tick + older
    asked = Asked(began, tick, began + seconds)
    Judge(run, Touched()).judge(Answer(WAYS[0], asked, status, {}, text.encode(), tick, tick, began))
    return run.complaints


def test_a_page_on_which_all_is_well_has_no_complaint(truth: SparseTruth, page: str) -> None:
    """The judge is content with it."""
    assert judged(truth, page) == []


WRONG: dict[str, tuple[Callable[[str], str], str]] = {
    "two cards have changed UUIDs": (
        lambda page: page.replace(N0.uuid, "?").replace(N1.uuid, N0.uuid).replace("?", N1.uuid),
        "no such card",
    ),
    "another card's value": (
        lambda page: re.sub(rf'(?m)^({FREE}{{[^\n]*"{N0.uuid}"[^\n]*}}) .*', rf"\1 {N1.value(FREE, 1)}", page),
        "that was card 2 at tick 1",
    ),
    "a fleet's other card": (
        lambda page: re.sub(rf'(?m)^([^\n]*fleet="chat",fleet_index=")0("[^\n]*{N2.uuid})', r"\g<1>1\2", page),
        "the fleet's mask says another card",
    ),
    "a card without readings": (
        lambda page: re.sub(rf'(?m)^gpu_(?:memory|temp)[^\n]*fleet="host"[^\n]*"{N1.uuid}"[^\n]*\n', "", page),
        "card 2 has no gpu_temperature_celsius",
    ),
    "a page that ends within a line": (lambda page: page[: len(page) // 2], "no page"),
    "a number for unknown": (
        lambda page: re.sub(rf'(?m)^(gpu_temp[^\n]*"{N0.uuid}"[^\n]*) .*', r"\1 NaN", page),
        "is nan",
    ),
}


@pytest.mark.parametrize("how", WRONG)
def test_what_is_wrong_on_a_page_is_found(truth: SparseTruth, page: str, how: str) -> None:
    """Each kind of wrong page is told from a right one."""
    change, complaint = WRONG[how]
    changed = change(page)
    assert changed != page
    assert any(complaint in each for each in judged(truth, changed)), judged(truth, changed)


def test_a_page_that_is_late_refused_or_old_is_found(truth: SparseTruth, page: str) -> None:
    """What is right on it does not help."""
    assert "took" in judged(truth, page, seconds=DEADLINE_SECONDS + NOISE_SECONDS + 0.1)[0]
    assert "status 503" in judged(truth, page, status=503)[0]
    assert "at tick" in judged(truth, page, older=1)[0]


def test_what_a_process_holds_may_not_grow() -> None:
    """Memory, descriptors and threads beyond the allowance, and a worker more than before, are told."""
    before = {"daemon": soak.Figures(30 << 20, 10, 3)}
    assert list(soak.grown(before, {"daemon": soak.Figures(31 << 20, 11, 3)})) == []
    assert len(list(soak.grown(before, {"daemon": soak.Figures(60 << 20, 30, 30)}))) == 3
    assert len(list(soak.grown(before, {**before, "amd worker": before["daemon"]}))) == 1
