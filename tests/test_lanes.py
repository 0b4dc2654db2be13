"""Jobs that may never return: how many threads they take, and what is seen of them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from exporter.lanes import Batch, Job, Lanes

Run = Callable[..., dict[str, Any]]


class Gate:
    """A job that returns once it may."""

    def __init__(self) -> None:
        self.entered, self._may = threading.Event(), threading.Event()

    def __call__(self) -> str:
        """Wait for :meth:`open`."""
        self.entered.set()
        self._may.wait(30)
        return "late"

    def open(self) -> None:
        """It may."""
        self._may.set()


class Bench:
    """Lanes, and a thread that waits for their batches as a worker does."""

    def __init__(self) -> None:
        self.lanes = Lanes(spare_seconds=0.2)
        self.ended: queue.SimpleQueue[Batch] = queue.SimpleQueue()
        self.gates: list[Gate] = []

    def gate(self) -> Gate:
        """A job that is let go at the end."""
        self.gates.append(Gate())
        return self.gates[-1]

    def run(self, jobs: Mapping[str, Job], *, hasten: int = 0) -> dict[str, Any]:
        """What the jobs bring, once all have ended or nothing ended between so many calls to hasten."""
        batch = Batch(jobs, self.ended.put)
        self.lanes.start(batch)
        for _ in range(hasten + 1):
            try:
                assert self.ended.get(timeout=0.05 if hasten else 10) is batch
            except queue.Empty:
                self.lanes.hasten(batch)
            else:
                break
        return batch.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Lanes whose stuck jobs are let go at the end."""
    made = Bench()
    yield made
    for gate in made.gates:
        gate.open()


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "lane"}


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_quick_jobs_share_one_thread_over_all_batches(bench: Bench) -> None:
    """Jobs that end at once run one after the other in one thread, which the next batches use too."""
    before = threads()
    idents: set[int] = set()
    for _ in range(50):
        jobs = {str(number): threading.get_ident for number in range(8)}
        results = bench.run(jobs)
        assert results.keys() == jobs.keys()
        idents.update(results.values())
    assert len(idents) == 1
    assert len(threads() - before) == 1


def test_a_job_that_raises_costs_its_own_result(bench: Bench) -> None:
    """What a job raises is its result."""
    results = bench.run({"bad": lambda: 1 // 0, "good": lambda: 7})
    assert isinstance(results["bad"], ZeroDivisionError)
    assert results["good"] == 7


@pytest.mark.parametrize("stuck", [1, 3, 8])
def test_jobs_that_do_not_return_hold_up_nobody(bench: Bench, stuck: int) -> None:
    """With some of eight jobs stuck the others end; the stuck ones stay busy, and their late results are never seen."""
    gates = {f"stuck{number}": bench.gate() for number in range(stuck)}
    jobs = gates | {f"quick{number}": lambda: 7 for number in range(8 - stuck)}
    results = bench.run(jobs, hasten=5)
    assert results == {f"quick{number}": 7 for number in range(8 - stuck)}
    assert all(bench.lanes.busy(name) for name in gates)
    for gate in gates.values():
        gate.open()
    until(lambda: not any(bench.lanes.busy(name) for name in gates))
    assert bench.run({"next": lambda: 8}) == {"next": 8}


def test_a_job_waits_for_the_one_that_has_its_name(bench: Bench) -> None:
    """It begins when that has ended, in its own batch; the others do not wait for it."""
    gate = bench.gate()
    assert bench.run({"slow": gate}, hasten=1) == {}
    assert bench.lanes.busy_seconds("slow") > 0.05
    assert bench.lanes.busy_seconds("other") == 0
    batch = Batch({"slow": lambda: "new", "other": lambda: 7}, bench.ended.put)
    bench.lanes.start(batch)
    until(lambda: batch.waiting == 1)
    bench.lanes.hasten(batch)
    time.sleep(0.05)
    assert batch.waiting == 1
    gate.open()
    until(lambda: not bench.lanes.busy("slow"))
    for _ in range(2):
        bench.lanes.hasten(batch)
    assert bench.ended.get(timeout=10) is batch
    assert batch.close() == {"slow": "new", "other": 7}


def test_threads_double_while_nothing_ends(bench: Bench) -> None:
    """Of sixteen stuck jobs all have begun after four calls to hasten."""
    gates = {str(number): bench.gate() for number in range(16)}
    bench.run(gates, hasten=4)
    until(lambda: all(gate.entered.is_set() for gate in gates.values()))


def test_a_job_that_had_no_turn_is_not_begun_later(bench: Bench) -> None:
    """What has not begun when its batch is closed never runs, and is not busy."""
    stuck, ran = bench.gate(), threading.Event()
    batch = Batch({"stuck": stuck, "behind": ran.set}, bench.ended.put)
    bench.lanes.start(batch)
    assert stuck.entered.wait(10)
    assert batch.close() == {}
    stuck.open()
    until(lambda: not bench.lanes.busy("stuck"))
    assert bench.run({"next": lambda: 8}) == {"next": 8}
    assert not ran.is_set()
    assert not bench.lanes.busy("behind")


def test_a_closed_batch_takes_no_more_jobs(bench: Bench) -> None:
    """What is added after the end runs never: another batch may have a job of that name by then."""
    ran = threading.Event()
    batch = Batch({"first": lambda: 1}, bench.ended.put)
    bench.lanes.start(batch)
    assert bench.ended.get(timeout=10) is batch
    assert batch.close() == {"first": 1}
    batch.add({"late": ran.set})
    bench.lanes.start(batch)
    assert bench.run({"next": lambda: 8}) == {"next": 8}
    assert batch.waiting == 0
    assert not ran.is_set()


def test_a_job_may_add_others(bench: Bench) -> None:
    """A batch has ended when what was added while it ran has, too."""
    batch = Batch({}, bench.ended.put)
    batch.add({"first": lambda: batch.add({"second": lambda: 2, "third": lambda: 3})})
    bench.lanes.start(batch)
    assert bench.ended.get(timeout=10) is batch
    assert batch.close() == {"first": None, "second": 2, "third": 3}


def test_threads_that_are_not_needed_any_more_end(bench: Bench) -> None:
    """After stuck jobs have returned one thread is left."""
    before = threads()
    gates = {str(number): bench.gate() for number in range(4)}
    bench.run(gates, hasten=4)
    until(lambda: len(threads() - before) == 4)
    for gate in gates.values():
        gate.open()
    until(lambda: len(threads() - before) == 1)
