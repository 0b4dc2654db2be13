"""Clients that misbehave by the hundred, and what a client that behaves has of it: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import re
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse
from uvicorn.server import ServerState

from exporter.web import connections, doors
from exporter.web.front import Front
from tests.crowds import (
    ASK,
    ATTACKS,
    Crowd,
    bodies_that_never_come,
    connect_and_reset,
    insatiable,
    many_slow_readers,
    more_silent,
    silent,
    slow_readers,
)
from tests.fakes.nvml import FakeNvml, build_or_skip, equal_cards
from tests.harness import Daemon, tool

pytestmark = pytest.mark.e2e

MIB = 1 << 20
MOST_RESIDENT = 80 * MIB
MEDIAN_SECONDS = 0.25
# Beside clients that come back at once, however often they are sent away, whoever comes waits in one queue with them.
QUEUED_SECONDS = 1.5
# Of one page among hundreds, on two cores that have other things to do as well.
WORST_SECONDS = 5.0
CARDS, FLEETS = 12, 8
CONFIG = "backends: [nvidia]\nfleets:\n  - {name: host, runtime: host}\n" + "".join(
    f'  - {{name: fleet-{n}, env: {{CUDA_VISIBLE_DEVICES: "{n},{n + 1},{n + 2},{n + 3}", '
    "CUDA_DEVICE_ORDER: PCI_BUS_ID}}\n"
    for n in range(FLEETS)
)


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> FakeNvml:
    """Twelve cards behind the fake library."""
    directory = tmp_path_factory.mktemp("load")
    made = FakeNvml(directory, build_or_skip(directory / "lib"))
    made.write(equal_cards(CARDS))
    return made


@pytest.fixture(scope="module")
def daemon(fake: FakeNvml, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all tests here, whose highest memory is that of all of them; nine fleets on twelve cards."""
    with Daemon(tmp_path_factory.mktemp("daemon"), fake.environment(), CONFIG, []) as running:
        running.scrape_until(lambda page: len(page.of("gpu_fleet_mask_inverted")) == FLEETS + 1)
        assert len(running.request("/metrics").body) > 20_000
        yield running


def descriptors(daemon: Daemon) -> int:
    """How many the parent has open."""
    return len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir()))


def most_resident(daemon: Daemon) -> int:
    """The parent's highest resident memory so far, in bytes."""
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


class Scraper:
    """A client that behaves, in a thread of its own: a page every tenth of a second, over one connection or many.
    It asks again where a kept connection was closed before it asked, as all do that keep theirs (RFC 9112, 9.3).
    """

    def __init__(self, daemon: Daemon, *, kept: bool) -> None:
        self.seconds: list[float] = []
        self.failures: list[str] = []
        self._daemon, self._kept = daemon, kept
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Scraper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(60)

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._daemon.port, timeout=30)
        while True:
            started = time.monotonic()
            try:
                self._scrape_again(connection)
                self.seconds.append(time.monotonic() - started)
            except (OSError, http.client.HTTPException, AssertionError) as error:
                self.failures.append(repr(error))
                connection.close()
            if not self._kept:
                connection.close()
            if self._ended.wait(0.1):
                connection.close()
                return

    def _scrape_again(self, connection: http.client.HTTPConnection) -> None:
        was_kept = connection.sock is not None
        try:
            self._scrape(connection)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            connection.close()
            if not was_kept:
                raise
            self._scrape(connection)

    def _scrape(self, connection: http.client.HTTPConnection) -> None:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, answer.status
        assert body.count(b"\ngpu_utilization_percent{") == CARDS + 4 * FLEETS


@contextlib.contextmanager
def unharmed(daemon: Daemon, label: str, median_seconds: float = MEDIAN_SECONDS) -> Iterator[None]:
    """What happens within costs clients that behave no page and little time, and the daemon nothing that lasts."""
    daemon.scrape()
    before, logged = descriptors(daemon), len(daemon.log)
    with Scraper(daemon, kept=True) as kept, Scraper(daemon, kept=False) as new:
        time.sleep(0.3)
        yield
        time.sleep(0.3)
    peak = most_resident(daemon)
    for scraper in (kept, new):
        print(
            f"{label:28} {len(scraper.seconds):4} pages, p50 {1000 * statistics.median(scraper.seconds):6.1f} ms,"
            f" max {1000 * max(scraper.seconds):7.1f} ms, {len(scraper.failures)} failures, peak {peak / MIB:.1f} MiB"
        )
    for scraper in (kept, new):
        assert scraper.failures == []
        assert statistics.median(scraper.seconds) < median_seconds
        assert max(scraper.seconds) < WORST_SECONDS
    assert peak < MOST_RESIDENT
    until = time.monotonic() + 20
    while (now := descriptors(daemon)) > before:
        assert time.monotonic() < until, f"{now} descriptors, and {before} before"
        time.sleep(0.1)
    logged_since = daemon.log[logged:]
    assert "Traceback" not in logged_since
    assert "level=error" not in logged_since
    assert logged_since.count("\n") < 5, logged_since


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_clients_that_behave_have_nothing_of_those_that_do_not(daemon: Daemon, attack: Callable[[Crowd], None]) -> None:
    """Every page comes, in good time; memory, descriptors and the log stay as they are."""
    queued = attack in (more_silent, many_slow_readers, insatiable)
    seconds = QUEUED_SECONDS if queued else MEDIAN_SECONDS
    with unharmed(daemon, attack.__name__, seconds), Crowd(daemon.port) as crowd:
        attack(crowd)
        time.sleep(3)
        assert descriptors(daemon) < doors.MAX_CONNECTIONS + 50


# --- what each limit does


def read_answers(connection: socket.socket, count: int) -> list[bytes]:
    """The bodies of so many answers, in their order."""
    reader, bodies = connection.makefile("rb"), []
    for _ in range(count):
        assert reader.readline().startswith(b"HTTP/1.1 200")
        headers = dict(line.split(b": ", 1) for line in iter(lambda: reader.readline().strip(), b""))
        bodies.append(reader.read(int(headers[b"content-length"])))
    return bodies


@pytest.mark.parametrize("count", [10, 1000])
def test_pipelined_requests_are_answered_in_their_order(daemon: Daemon, count: int) -> None:
    """All of them, also where the client reads none before it has asked them all."""
    paths = [b"/-/healthy" if number % 2 else b"/metrics" for number in range(count)]
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=20) as connection:
        connection.sendall(b"".join(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n" for path in paths))
        bodies = read_answers(connection, count)
    assert [len(body) > 1000 for body in bodies] == [path == b"/metrics" for path in paths]


def test_a_hundred_scrapers_at_once_are_all_served(daemon: Daemon) -> None:
    """New connections and kept ones, several times; nobody is refused, and nobody waits long."""
    together = threading.Barrier(100)

    def scrape(number: int) -> float:
        connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=30)
        together.wait(30)
        started = time.monotonic()
        for _ in range(5):
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            assert answer.status == 200
            assert answer.read().endswith(b"\n")
            if number % 2:
                connection.close()
        connection.close()
        return time.monotonic() - started

    with ThreadPoolExecutor(100) as pool:
        seconds = list(pool.map(scrape, range(100)))
    print(f"a hundred scrapers: {max(seconds):.2f} s for five pages each")
    assert max(seconds) < 5 * WORST_SECONDS


def test_more_scrapers_than_places_are_all_served(daemon: Daemon) -> None:
    """Who has had its page and keeps the connection makes room for who has not; nobody is refused one."""
    held = []
    for _ in range(doors.MAX_CONNECTIONS + 200):
        connection = socket.create_connection(("127.0.0.1", daemon.port), timeout=20)
        connection.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
        held.append(connection)
    try:
        assert all(connection.recv(12) == b"HTTP/1.1 200" for connection in held)
        assert descriptors(daemon) < doors.MAX_CONNECTIONS + 50
    finally:
        for connection in held:
            connection.close()


def test_nobody_waits_for_a_client_that_does_not_read(daemon: Daemon) -> None:
    """The rest of an answer that is not read in time is thrown away with its connection, and the place is free."""
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=10) as connection:
        connection.sendall(ASK * 200)
        started = time.monotonic()
        time.sleep(0.5)
        with_it = descriptors(daemon)
        while descriptors(daemon) >= with_it:
            assert time.monotonic() - started < connections.ANSWER_SECONDS + 5
            time.sleep(0.1)
        assert time.monotonic() - started > connections.ANSWER_SECONDS - 1


def test_a_stop_does_not_wait_for_those_who_do_not_read(fake: FakeNvml, tmp_path: Path) -> None:
    """Nor for idle ones, silent ones, or bodies; it is over in as short a time as ever, and no error is logged."""
    with Daemon(tmp_path, fake.environment(), CONFIG, []) as stopping, Crowd(stopping.port) as crowd:
        stopping.scrape()
        for misbehave in (slow_readers, silent, bodies_that_never_come):
            misbehave(crowd)
        time.sleep(0.5)
        status, seconds = stopping.stop()
        assert status == 0
        assert seconds < 4
        assert "level=error" not in stopping.log
        assert "Traceback" not in stopping.log


@pytest.mark.parametrize("start", [b"GET /metrics", b"POST /-/healthy", b"POST /-/reload"])
@pytest.mark.parametrize("expect", [b"", b"Expect: 100-continue\r\n"])
def test_a_body_is_not_waited_for(daemon: Daemon, start: bytes, expect: bytes) -> None:
    """A request that announces one is answered without it, and its connection is closed then."""
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=10) as connection:
        connection.sendall(start + b" HTTP/1.1\r\nHost: x\r\n" + expect + b"Content-Length: 1000\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.split(b" ")[1] in (b"200", b"403", b"405")


def test_pages_that_take_long_do_not_pile_up(fake: FakeNvml, tmp_path: Path) -> None:
    """While a card is slow, clients that ask and go are bounded in number, and all others have their page."""
    with Daemon(tmp_path, fake.environment(), CONFIG + "sampling: {reuse_seconds: 0}\n", []) as slow:
        slow.scrape()
        fake.write(equal_cards(CARDS), lines=["slow nvmlDeviceGetTemperatureV 0 1500"])
        try:
            with Scraper(slow, kept=False) as scraper, Crowd(slow.port) as crowd:
                for _ in range(3):
                    crowd.keep(lambda: connect_and_reset(slow.port, ASK), 0.0005)
                time.sleep(6)
        finally:
            fake.write(equal_cards(CARDS))
        assert scraper.failures == []
        assert max(scraper.seconds) < 3 * WORST_SECONDS
        assert most_resident(slow) < MOST_RESIDENT
        assert "level=error" not in slow.log


def test_a_host_that_allows_few_descriptors(fake: FakeNvml, tmp_path: Path) -> None:
    """Half of them are for connections at most; so no client keeps the daemon from its workers and files."""
    few = [tool("prlimit", "util-linux"), "--nofile=64"]
    with Daemon(tmp_path, fake.environment(), CONFIG, [], lambda command: [*few, *command]) as limited:
        limited.scrape()
        with unharmed(limited, "few descriptors"), Crowd(limited.port) as crowd:
            crowd.connect(100)
            time.sleep(1)
            (worker,) = limited.workers("nvidia")
            os.kill(worker, signal.SIGKILL)
            time.sleep(1)
            assert limited.workers("nvidia") not in ([worker], [])


def test_who_has_asked_already_is_not_sent_away() -> None:
    """Of two connections that nothing was read from for a while, the one whose request waits in the kernel stays."""

    async def sent_away() -> list[bool]:
        config, state = connections.Configuration(PlainTextResponse(), Front(), PlainTextResponse()), ServerState()
        pairs = [socket.socketpair() for _ in range(2)]
        pairs[1][1].sendall(ASK)
        for ours, _ in pairs:
            connections.GuardedProtocol(config, state, ours, "host")
        found = doors.least_claims(state.connections, asyncio.get_running_loop().time() + 1)
        silent_ones = [each.is_silent() for each in found]
        for pair in pairs:
            for end in pair:
                end.close()
        return silent_ones

    assert asyncio.run(sent_away()) == [True]


def test_one_address_does_not_take_all_places(daemon: Daemon) -> None:
    """Who has few connections keeps an idle one, while another host opens more of these than there are places."""
    quiet = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=10)
    quiet.request("GET", "/-/healthy")
    quiet.getresponse().read()
    crowd = []
    try:
        for _ in range(doors.MAX_CONNECTIONS + 50):
            greedy = socket.create_connection(("127.0.0.1", daemon.port), timeout=10, source_address=("127.0.0.2", 0))
            crowd.append(greedy)
            greedy.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
            assert greedy.recv(4096)
        quiet.request("GET", "/-/healthy")
        assert quiet.getresponse().status == 200
    finally:
        for connection in crowd:
            connection.close()
        quiet.close()
