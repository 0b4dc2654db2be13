"""The parent's handle on one vendor's worker: start, ask, hang verdict, reap, back off."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from exporter import __version__, capabilities, wire
from exporter.model import Fault, VendorOutcome
from exporter.parent import OTHER_VERSION

log = logging.getLogger("exporter.supervisor")

# The worker answers this long before the scrape's deadline, so that its partial answer still makes the page.
_ANSWER_MARGIN_SECONDS = 0.05
# How long a scrape waits for a worker that did not answer the one before.
_GRACE_SECONDS = 0.03
_KILL_AFTER_SECONDS = 5.0
_STEADY_AFTER_SECONDS = 30.0
_REAP_POLL_SECONDS = 0.01
_CAUTION = ("--cautious",)
_CAUTIOUS_AFTER, _DEATHS_WITHIN_SECONDS = 2, 600.0
# One arena for all lanes: glibc would give each thread its own, at a megabyte or more of resident memory.
_WORKER_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1"}


class Backoff(NamedTuple):
    """Seconds before the n-th start after a failure, doubling from ``first`` up to ``most``."""

    first: float = 1.0
    most: float = 15.0

    def delay(self, failures: int) -> float:
        """0 before the first failure."""
        return 0.0 if failures == 0 else float(min(self.first * 2 ** min(failures - 1, 16), self.most))


class _Child(asyncio.Protocol):
    """A running worker process, and the socket to it.

    ``pending`` is the answer to the last ask, until it has come, however late; ``waiting`` is done once nobody has to
    wait for it any more.
    """

    def __init__(self, process: subprocess.Popen[bytes], started: float, closed: Callable[[_Child], None]) -> None:
        """``closed`` is told when the worker has closed its socket."""
        self.process = process
        self.started = started
        self.transport: asyncio.Transport
        self.pending: asyncio.Future[wire.Answer] | None = None
        self.pending_cycle = 0
        self.pending_since = 0.0
        self.pending_until = 0.0
        self.waiting: asyncio.Future[None] | None = None
        self.sampled = False
        self.retired = False  # it said that it ends by itself
        self.terminated = False  # we ended it
        self.reaping: asyncio.Task[None] | None = None
        self._closed = closed
        self._received = bytearray()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Kept for the asks."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Hand an answer to the ask that waits for it; a worker that talks nonsense is let go."""
        self._received += data
        try:
            for body in wire.frames(self._received):
                answer = wire.decode_answer(body)
                if self.pending and not self.pending.done() and answer.cycle == self.pending_cycle:
                    self.pending.set_result(answer)
                    self.wait_no_longer()
        except msgspec.DecodeError:
            self.transport.abort()

    def connection_lost(self, _: Exception | None) -> None:
        """The worker has ended, or is about to."""
        self._closed(self)

    def ask(self, until: float, users: bool = False) -> None:
        """The transport buffers: an ask of thirty bytes never waits for a worker that does not read."""
        self.pending_until = until
        self.transport.write(wire.frame(wire.Ask(self.pending_cycle, until - _ANSWER_MARGIN_SECONDS, users)))

    def wait_no_longer(self) -> None:
        """Whoever waits for the answer goes on."""
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)

    def drop(self) -> None:
        """No answer will come any more."""
        if self.pending is not None and not self.pending.done():
            self.pending.cancel()
            self.wait_no_longer()


class Supervisor:
    """One vendor's worker. :meth:`ask` never raises and never waits past its deadline; call it from one task at a time.

    ``hang_seconds`` is the hang verdict: a worker that does not answer for so long, or whose library does not start in
    that time, is ended, and no second one is started before the first is reaped. With ``users`` set, samples tell which
    processes compute on the devices. The daemon's capabilities are ``lent`` to the worker, or it has none.
    """

    def __init__(
        self,
        vendor: str,
        arguments: Sequence[str] = (),
        *,
        hang_seconds: float = 30.0,
        lent: bool = False,
        backoff: Callable[[], Backoff] = Backoff,
    ) -> None:
        self.vendor = vendor
        self.hang_seconds = hang_seconds
        self.users = False
        # -P: the current directory is no place to import from; whoever may write there must not run as the daemon.
        start = (sys.executable, "-P", "-m", "exporter.worker", vendor)
        self._arguments = (*start, f"--daemon-version={__version__}", *arguments)
        self.served = False
        self._capabilities = capabilities.lent if lent else contextlib.nullcontext
        self._backoff = backoff
        self._child: _Child | None = None
        self._cycle = 0
        self._failures = 0
        self._not_before, self._no_later_than = 0.0, math.inf
        self._stopped = False
        self._fault = Fault("starting", "not asked yet")
        self._deaths: list[float] = []

    @property
    def cautious(self) -> bool:
        """Workers are started without what they can do without, since one hung as a whole, or died more than once."""
        now = time.monotonic()
        return sum(now - died < _DEATHS_WITHIN_SECONDS for died in self._deaths) >= _CAUTIOUS_AFTER

    @property
    def rests(self) -> bool:
        """There is no worker, and none is started yet: an ask would give the last fault again."""
        return self._child is None and time.monotonic() < self._not_before

    async def ask(self, within_seconds: float) -> VendorOutcome:
        """One cycle of the worker: its sample, or the fault that prevents one."""
        started, asked = time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
        until = started + within_seconds
        answer = await self._answer(until)
        sample, fault = (None, answer) if isinstance(answer, Fault) else (answer.sample, answer.fault)
        duration = time.monotonic() - started
        return VendorOutcome(vendor=self.vendor, sample=sample, fault=fault, duration_seconds=duration, asked=asked)

    def hurry(self, within_seconds: float) -> None:
        """Somebody with less time waits for the running ask too: shorten it for all."""
        child, until = self._child, time.monotonic() + within_seconds
        if child is not None and child.pending is not None and until < child.pending_until:
            child.ask(until)

    def cut_short(self, within_seconds: float) -> None:
        """The running ask ends within that time, whether the worker answers or not, and so does every later one."""
        self._no_later_than = time.monotonic() + within_seconds
        self.hurry(within_seconds)
        if self._child is not None and self._child.waiting is not None:
            asyncio.get_running_loop().call_later(within_seconds, self._child.wait_no_longer)

    async def _answer(self, until: float) -> wire.Answer | Fault:
        child = self._child
        if child is None:
            if self._stopped or self.rests:
                return self._fault
            child = await self._start()
        if child is None or child.retired or not await self._caught_up(child, until):
            return self._fault
        if self._child is not child or child.terminated:
            return self._fault
        return await self._exchange(child, until)

    async def _caught_up(self, child: _Child, until: float) -> bool:
        """Whether the worker has answered its earlier ask; that answer is too late to be served."""
        pending = child.pending
        if pending is None:
            return True
        now = time.monotonic()
        if not pending.done() and now - child.pending_since > self.hang_seconds:
            self._end(child, f"no answer for {now - child.pending_since:.0f} s")
        await asyncio.wait([pending], timeout=max(0.0, min(_GRACE_SECONDS, until - now)))
        if not pending.done():
            self._fault = Fault("hung", "the worker has not answered an earlier ask")
            return False
        child.pending = None
        return not pending.cancelled()

    async def _exchange(self, child: _Child, until: float) -> wire.Answer | Fault:
        loop = asyncio.get_running_loop()
        self._cycle += 1
        until = min(until, self._no_later_than)
        child.pending = pending = loop.create_future()
        child.waiting = waiting = loop.create_future()
        child.pending_cycle, child.pending_since = self._cycle, time.monotonic()
        child.ask(until, self.users)
        deadline = loop.call_at(until, child.wait_no_longer)  # the loop's clock is the monotonic one too
        try:
            await waiting
        finally:
            deadline.cancel()
            child.waiting = None
        if not pending.done():
            return self._note(
                Fault("hung" if child.sampled else "starting", "the worker did not answer by the deadline")
            )
        child.pending = None
        if pending.cancelled():
            return self._fault
        return self._judged(child, pending.result())

    def _judged(self, child: _Child, answer: wire.Answer) -> wire.Answer | Fault:
        lived = time.monotonic() - child.started
        if answer.fault is None:
            child.sampled = self.served = True
            if lived > _STEADY_AFTER_SECONDS:
                self._failures = 0
            return answer
        self._note(answer.fault)
        if answer.final:
            child.retired = True
            self._failed(self._fault, at_once=child.sampled and self._failures == 0)
        elif not child.sampled and lived > self.hang_seconds:
            self._end(child, answer.fault.detail)
        return self._fault

    def _note(self, fault: Fault) -> Fault:
        """Another worker that is only starting does not change why the one before failed."""
        if fault.reason != "starting" or not self._failures:
            self._fault = fault
        return self._fault

    async def _start(self) -> _Child | None:
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            self._failed(Fault("crashed", f"the worker cannot be started: {error.strerror}"))
            return None
        try:
            # Blocks for a few milliseconds, and only when a worker starts.
            with self._capabilities():
                process = subprocess.Popen(
                    (*self._arguments, *_CAUTION) if self.cautious else self._arguments,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env=_worker_environment(),
                )
        except OSError as error:
            ours.close()
            self._failed(Fault("crashed", f"the worker cannot be started: {error.strerror}"))
            return None
        finally:
            theirs.close()
        child = _Child(process, time.monotonic(), self._closed)
        await asyncio.get_running_loop().create_unix_connection(lambda: child, sock=ours)
        self._child = child
        log.debug("worker started", extra={"fields": {"vendor": self.vendor, "pid": process.pid}})
        return child

    def _closed(self, child: _Child) -> None:
        if not self._stopped:
            child.reaping = asyncio.create_task(self._reap(child))

    async def _reap(self, child: _Child) -> None:
        """Wait for a worker that closed its socket, killing it if it lingers, and note how it ended."""
        closed = time.monotonic()
        while child.process.poll() is None:
            if time.monotonic() - closed > _KILL_AFTER_SECONDS:
                child.process.kill()
            await asyncio.sleep(_REAP_POLL_SECONDS)
        if self._child is child:
            self._child = None
            if child.terminated:
                self._failed(self._fault)
            elif not child.retired:
                self._died()
                self._failed(Fault("crashed", _ending(child.process.returncode)), at_once=self._failures == 0)
        child.drop()

    def _end(self, child: _Child, why: str) -> None:
        """The hang verdict: SIGTERM, and later SIGKILL. The worker stays ours until it is reaped."""
        if not child.terminated:
            child.terminated = True
            self._fault = Fault("hung", f"ended after {why}")
            self._died(_CAUTIOUS_AFTER)  # one card that hangs holds up its lane alone: this is the library
            log.warning("worker ended", extra={"fields": {"vendor": self.vendor, "reason": why}})
            child.process.send_signal(signal.SIGTERM)
            asyncio.get_running_loop().call_later(_KILL_AFTER_SECONDS, self._kill, child)

    def _died(self, times: int = 1) -> None:
        self._deaths = [*self._deaths, *[time.monotonic()] * times][-_CAUTIOUS_AFTER:]

    @staticmethod
    def _kill(child: _Child) -> None:
        if child.process.poll() is None:
            child.process.kill()

    def _failed(self, fault: Fault, *, at_once: bool = False) -> None:
        self._fault = fault
        self._failures += 1
        # Said here too, since a vendor that nobody expects on this host has no row and no line of its own.
        fields = {"vendor": self.vendor, "reason": fault.reason, "detail": fault.detail}
        log.debug("worker failed", extra={"fields": fields})
        delay = 0.0 if at_once else self._backoff().delay(self._failures)
        self._not_before = time.monotonic() + delay

    def kill(self) -> None:
        """End the worker at once and do not wait for it."""
        if self._child is not None:
            self._child.process.kill()

    async def stop(self, within_seconds: float = 1.0) -> None:
        """End the worker, whatever its library does, and start no other; what SIGKILL cannot end is left behind."""
        self._stopped = True
        child, self._child = self._child, None
        if child is None:
            return
        child.process.terminate()
        for share, last in ((0.6, False), (0.4, True)):
            until = time.monotonic() + share * within_seconds
            while child.process.poll() is None and time.monotonic() < until:
                await asyncio.sleep(_REAP_POLL_SECONDS)
            if child.process.poll() is None and not last:
                child.process.kill()
        if child.reaping is not None:
            child.reaping.cancel()
        child.transport.abort()
        child.drop()


def _worker_environment() -> dict[str, str]:
    """This process's, and where to find this package also when it is not installed."""
    places = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    return os.environ | _WORKER_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(filter(None, places))}


def _ending(returncode: int) -> str:
    if returncode == OTHER_VERSION:
        return "the worker is of another version: the exporter was upgraded, and has to be restarted"
    if returncode >= 0:
        return f"the worker ended with status {returncode}"
    try:
        return f"the worker was ended by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"the worker was ended by signal {-returncode}"
