"""Jobs that may never return, each under a name of its own, in as few threads as their pace allows.

One thread runs a batch's jobs one after the other. Threads that call into a library at the same time hand the
interpreter's lock to and fro at every call, which costs more than the calls do: 330 futex calls a cycle of eight cards.
Only while no job comes to its end are more threads put to what is left.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

PATIENCE_SECONDS = 0.005
"""How long no job may have ended before :meth:`Lanes.hasten` is worth a call."""

Job = Callable[[], Any]


class Batch:
    """Jobs that are waited for together: who started them is told once, when the last of them has ended. A job may add
    others while it runs.

    What a job brings after its batch was closed is never seen, nor is that end told.
    """

    def __init__(self, jobs: Mapping[str, Job], ended: Callable[[Batch], None]) -> None:
        self.threads = 0
        self._waiting = deque(jobs.items())
        self._size: float = len(jobs)
        self._results: dict[str, Any] = {}
        self._ended = ended
        self._seen = 0
        self._lock = threading.Lock()

    def add(self, jobs: Mapping[str, Job]) -> None:
        """More jobs, from within one that runs; a closed batch takes none."""
        with self._lock:
            if not math.isinf(self._size):
                self._waiting.extend(jobs.items())
                self._size += len(jobs)

    def take(self, running: dict[str, float]) -> tuple[str, Job] | None:
        """The next job whose name is not among those that are running, as it is from now on; None where there is none
        that could begin.
        """
        with self._lock:
            for _ in range(len(self._waiting)):
                name, job = self._waiting.popleft()
                if name not in running:
                    running[name] = time.monotonic()
                    return name, job
                self._waiting.append((name, job))
        return None

    def finish(self, name: str, result: Any) -> None:
        """A job's end."""
        with self._lock:
            self._results[name] = result
            done = self.done
        if done:
            self._ended(self)

    @property
    def done(self) -> bool:
        """Whether all jobs have ended."""
        return len(self._results) >= self._size

    @property
    def waiting(self) -> int:
        """How many jobs have not begun."""
        return len(self._waiting)

    def ready(self, running: Mapping[str, float]) -> int:
        """How many jobs have not begun, and could."""
        with self._lock:
            return sum(name not in running for name, _ in self._waiting)

    def stalled(self) -> bool:
        """Whether no job has ended since this was last asked."""
        seen, self._seen = self._seen, len(self._results)
        return seen == self._seen

    def close(self) -> dict[str, Any]:
        """What the jobs have brought so far; those that have not begun never will."""
        with self._lock:
            self._waiting.clear()
            self._size = math.inf
            return dict(self._results)


class Lanes:
    """Threads for batches of jobs. A job whose name is :meth:`busy` begins when the one that has the name has ended."""

    def __init__(self, spare_seconds: float = 5.0) -> None:
        """A thread beyond the first ends when it had no work for ``spare_seconds``."""
        self._spare_seconds = spare_seconds
        self._running: dict[str, float] = {}
        self._idle: list[_Thread] = []
        self._lock = threading.Lock()

    def busy(self, name: str) -> bool:
        """Whether a job of this name has begun and not ended."""
        return name in self._running

    def busy_seconds(self, name: str) -> float:
        """For how long a job of this name has been running; 0 where there is none."""
        now = time.monotonic()
        return now - self._running.get(name, now)

    def start(self, batch: Batch) -> None:
        """Run the batch's jobs in one thread."""
        self._engage(batch, 1)

    def hasten(self, batch: Batch) -> None:
        """Twice as many threads for what is left, if none of the jobs has ended since the last call."""
        if batch.stalled():
            with contextlib.suppress(RuntimeError):  # as many threads as this process may have: those there are go on
                self._engage(batch, min(batch.ready(self._running), batch.threads))

    def _engage(self, batch: Batch, threads: int) -> None:
        for _ in range(threads):
            with self._lock:
                (self._idle.pop() if self._idle else _Thread(self._run)).work.put(batch)
            batch.threads += 1

    def _run(self, thread: _Thread) -> None:
        while (batch := self._next(thread)) is not None:
            taken = batch.take(self._running)
            while taken is not None:
                name, job = taken
                result = _outcome(job)
                self._running.pop(name)
                taken = batch.take(self._running)
                if taken is None:  # before its end is told, or the next batch would find no thread
                    self._rest(thread)
                batch.finish(name, result)
            self._rest(thread)

    def _rest(self, thread: _Thread) -> None:
        with self._lock:
            if thread not in self._idle and thread.work.empty():
                self._idle.append(thread)

    def _next(self, thread: _Thread) -> Batch | None:
        """The batch that this thread is put to; None when it is not needed any more."""
        while True:
            try:
                return thread.work.get(timeout=self._spare_seconds)
            except queue.Empty:
                with self._lock:
                    if len(self._idle) > 1 and thread in self._idle:
                        self._idle.remove(thread)
                        return None


def _outcome(job: Job) -> Any:
    try:
        return job()
    except Exception as error:  # noqa: BLE001  (whatever a vendor's library raises costs this job alone)
        return error


class _Thread:
    """A daemon thread, and the batches that it is put to."""

    def __init__(self, run: Callable[[_Thread], None]) -> None:
        self.work: queue.SimpleQueue[Batch] = queue.SimpleQueue()
        threading.Thread(target=run, args=(self,), name="lane", daemon=True).start()
