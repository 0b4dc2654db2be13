"""The soak's clients: many ways to ask for a page, how old a page may be, and who judges it."""

from __future__ import annotations

import bisect
import contextlib
import gzip
import http.client
import queue
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests import pages, truth_page
from tests.harness import Sample, Scrape
from tests.soak_faults import DEADLINE_SECONDS, HOST, Scene
from tests.truth import Truth
from tests.truth_cards import READINGS, UTILIZATION, Pretend
from tests.truth_judge import devices_of, who

# What a page may take longer than it is given, on a machine that has more to do.
NOISE_SECONDS = 2.5
_OFFSET_SECONDS = 0.5
_CHECK_EVERY = 10
_KEPT_PAGES = 5
OPENMETRICS = {"Accept": "application/openmetrics-text;version=1.0.0"}
GZIP = {"Accept-Encoding": "gzip"}
NARROWED = "/metrics?" + "&".join(
    f"name[]={name}"
    for name in (
        "gpu_info",
        "gpu_temperature_celsius",
        "gpu_exporter_device_state",
        "gpu_exporter_backend_up",
        "gpu_exporter_backend_fault_info",
        "gpu_exporter_backend_faults_total",
        "gpu_fleet_mask_inverted",
        "gpu_fleet_mask_refusal_info",
    )
)


class Way(NamedTuple):
    """How a client asks. ``timeout`` is what it says that its scrape may take; ``slow`` ones are not judged by it."""

    name: str
    kept: bool = False
    headers: dict[str, str] = {}  # noqa: RUF012
    path: str = "/metrics"
    timeout: float | None = None
    slow: bool = False
    aborts: bool = False


WAYS = (
    Way("new"),
    Way("kept", kept=True),
    Way("kept gzip OpenMetrics", kept=True, headers=GZIP | OPENMETRICS, timeout=10),
    Way("new OpenMetrics", headers=OPENMETRICS, timeout=2),
    Way("kept gzip, hasty", kept=True, headers=GZIP, timeout=1.5),
    Way("new name[]", path=NARROWED),
    Way("kept name[] gzip", kept=True, headers=GZIP, path=NARROWED, timeout=2.5),
    Way("new", timeout=5),
    Way("slow", slow=True),
    Way("aborting", aborts=True),
)


@dataclass
class Asked:
    """A request. ``ended`` is None while it lasts; ``tick`` was in force when it began."""

    began: float
    tick: int
    ended: float | None = None


@dataclass
class Answer:
    """A page, and the ticks of which its readings may be."""

    way: Way
    asked: Asked
    status: int
    headers: dict[str, str]
    body: bytes
    first: int
    last: int
    since: float = 0.0  # when the first of those ticks was in force

    @property
    def seconds(self) -> float:
        """From the request to the last byte."""
        return (self.asked.ended or self.asked.began) - self.asked.began

    @property
    def text(self) -> str:
        """The page."""
        zipped = self.headers.get("content-encoding") == "gzip"
        return (gzip.decompress(self.body) if zipped else self.body).decode()


class Requests:
    """All requests of the soak's clients, to know which ticks a page may be of.

    A request joins the cycle that is running, so a page may be as old as the oldest request that was not answered yet
    when it came; a cycle of one whose client has gone runs on for as long as a deadline.
    """

    def __init__(self, truth: SparseTruth, scene: Scene) -> None:
        self._truth, self._scene = truth, scene
        self._lock = threading.Lock()
        self._asked: list[Asked] = []

    def begin(self) -> Asked:
        """A request begins now."""
        with self._lock:
            asked = Asked(time.monotonic(), self._truth.tick)
            self._asked.append(asked)
            return asked

    def end(self, asked: Asked, *, aborted: bool = False) -> None:
        """It is answered, or its client has gone."""
        with self._lock:
            asked.ended = time.monotonic()
            if aborted:
                asked.ended = asked.began + DEADLINE_SECONDS + 1
            oldest = time.monotonic() - 30
            self._asked = [each for each in self._asked if each.ended is None or each.ended > oldest]

    def since(self, asked: Asked) -> float:
        """When the cycle that its page is of may have begun."""
        with self._lock:
            joined = [
                each.began
                for each in self._asked
                if each.began <= asked.began and (each.ended is None or each.ended > asked.began - 0.1)
            ]
        for begins, ends, before in list(self._scene.loose):
            if begins <= (asked.ended or asked.began) and asked.began <= ends:
                joined.append(asked.began - before - 0.5)
        return min(joined)


class SparseTruth(Truth):
    """The truth of a long run: it knows when each tick was, and keeps of its history only what changed."""

    def write(self, tick: int) -> None:
        """As ever; the moment is that at which all of the tick had been written."""
        super().write(tick)
        with self._lock:
            if len(self._history) > 1 and self._history[-1][1] == self._history[-2][1]:
                self._history.pop()
            self._when().append((time.monotonic(), tick))

    def _when(self) -> list[tuple[float, int]]:
        found: list[tuple[float, int]] = self.__dict__.setdefault("_moments", [])
        return found

    def judged(self, page: Scrape, first: int, last: int) -> list[str]:
        """As :meth:`complaints`, of a page that has been read."""
        return self._complaints(page, first, last)

    def tick_at(self, moment: float) -> int:
        """The newest tick that had been wholly written by then."""
        with self._lock:
            moments = self._when()
            place = bisect.bisect_right(moments, (moment, 1 << 60))
            return moments[max(0, place - 1)][1]


def page_of(text: str) -> Scrape:
    """The page in either format."""
    if not text.endswith("# EOF\n"):
        return truth_page.read(text)
    samples: dict[str, list[Sample]] = {}
    for family in pages.families_of(text.encode()):
        for sample in family.samples:
            seen = samples.setdefault(sample.name, [])
            assert all(sample.labels != other.labels for other in seen), f"{sample.name}{sample.labels} comes twice"
            seen.append(Sample(sample.labels, sample.value))
    return Scrape(samples, 0.0)


class Client(threading.Thread):
    """Asks at a pace until the end."""

    def __init__(self, way: Way, every: float, requests: Requests, run: Run, *, port: int, seed: int) -> None:
        super().__init__(daemon=True, name=way.name)
        self._way, self._every, self._requests, self._run, self._port = way, every, requests, run, port
        self._rng = random.Random(seed)
        self._connection: http.client.HTTPConnection | None = None

    def run(self) -> None:
        """Each request begins a random while after the one before, and on average so often."""
        while not self._run.ended.wait(self._rng.uniform(0.2, 1.8) * self._every):
            try:
                if self._way.aborts:
                    self._abort()
                else:
                    self._ask()
            except (OSError, http.client.HTTPException) as error:
                self._run.complain(f"{self._way.name}: {error!r}")
                self._close()
        self._close()

    def _ask(self) -> None:
        asked = self._requests.begin()
        answer, body = self._slowly() if self._way.slow else self._at_once()
        self._requests.end(asked)
        last = self._run.truth.begun
        since = self._requests.since(asked)
        headers = {name.lower(): value for name, value in answer.getheaders()}
        first = self._run.truth.tick_at(since)
        self._run.answers.put(Answer(self._way, asked, answer.status, headers, body, first, last, since))

    def _headers(self) -> dict[str, str]:
        timeout = self._way.timeout
        return self._way.headers | ({"X-Prometheus-Scrape-Timeout-Seconds": str(timeout)} if timeout else {})

    def _at_once(self) -> tuple[http.client.HTTPResponse, bytes]:
        """A connection that was kept may have been closed since: then, as Prometheus does, once more over a new one."""
        reused = self._connection is not None
        try:
            return self._exchange()
        except (http.client.RemoteDisconnected, ConnectionError):
            if not reused:
                raise
            self._run.retried += 1
            self._close()
            return self._exchange()

    def _exchange(self) -> tuple[http.client.HTTPResponse, bytes]:
        if self._connection is None:
            self._connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        self._connection.request("GET", self._way.path, headers=self._headers())
        answer = self._connection.getresponse()
        body = answer.read()
        if not self._way.kept:
            self._close()
        return answer, body

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _slowly(self) -> tuple[http.client.HTTPResponse, bytes]:
        with self._socket(received=4096) as connection:
            answer = http.client.HTTPResponse(connection)
            answer.begin()
            body = b""
            while piece := answer.read(4096):
                body += piece
                time.sleep(0.02)
            return answer, body

    @contextlib.contextmanager
    def _socket(self, received: int = 0) -> Iterator[socket.socket]:
        with socket.socket() as made:
            if received:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received)
            made.settimeout(30)
            made.connect(("127.0.0.1", self._port))
            made.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            yield made

    def _abort(self) -> None:
        """Goes at once, before its answer, or in the middle of it."""
        asked = self._requests.begin()
        try:
            with self._socket(received=4096) as connection:
                how = self._rng.randrange(3)
                time.sleep(0.01 * how * self._rng.random())
                if how == 2:
                    connection.recv(2000)
        finally:
            self._requests.end(asked, aborted=True)
            self._run.aborted += 1


@dataclass
class Run:
    """What the clients and the judge have seen; ``ended`` ends them."""

    truth: SparseTruth
    ended: threading.Event = field(default_factory=threading.Event)
    answers: queue.Queue[Answer] = field(default_factory=queue.Queue)
    complaints: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # the first pages that were
    seconds: list[float] = field(default_factory=list)
    aborted: int = 0
    retried: int = 0

    def complain(self, *complaints: str) -> None:
        """These are wrong."""
        at = time.strftime("%H:%M:%S")
        self.complaints += (f"{at} {complaint}" for complaint in complaints)


class Touched:
    """Which cards' readings may be missing, and when."""

    def __init__(self) -> None:
        self._times: dict[int, list[list[float]]] = {}
        self._lock = threading.Lock()

    def begin(self, cards: Sequence[Pretend]) -> None:
        """From now on they may."""
        with self._lock:
            for card in cards:
                self._times.setdefault(card.number, []).append([time.monotonic(), float("inf")])

    def end(self, moment: float) -> None:
        """Since that moment none may."""
        with self._lock:
            for each in (each for times in self._times.values() for each in times):
                each[1] = min(each[1], moment)

    def within(self, number: int, begin: float, end: float) -> bool:
        """Whether the card's might at any time between these."""
        with self._lock:
            return any(began <= end and begin <= ended for began, ended in self._times.get(number, ()))


def missing(page: Scrape, cards: Sequence[Pretend]) -> list[str]:
    """What ``host`` lacks of readings that these cards have when all is well; on a page of one name's, of these."""
    there = {(name, who(sample.labels)) for name in READINGS for sample in page.of(name, fleet="host")}
    narrowed = not any(page.of(name) for name in READINGS[1:4]) and not page.of(UTILIZATION)
    found = []
    for device, card in devices_of(cards):
        for name in sorted(device.given):
            if narrowed and name != READINGS[-1]:
                continue
            # A share of time needs two looks, and there may be a new process at any of them.
            if (name, device.labels) not in there and not (card.vendor == "intel" and name == UTILIZATION):
                found.append(f"card {device.number} has no {name}")
    return found


class Judge(threading.Thread):
    """Judges every answer: whole, in time, true, and with all that nothing keeps from it."""

    def __init__(self, run: Run, touched: Touched) -> None:
        super().__init__(daemon=True, name="judge")
        self._run, self._touched = run, touched
        self.judged = 0

    def run(self) -> None:
        """Until the end, and then what is left."""
        while not self._run.ended.is_set() or not self._run.answers.empty():
            with contextlib.suppress(queue.Empty):
                self.judge(self._run.answers.get(timeout=0.1))

    def judge(self, answer: Answer) -> None:
        """All that can be wrong with it becomes a complaint."""
        found: list[str] = []
        try:
            for each in self._wrong(answer):
                found.append(each)  # noqa: PERF402  (those before an error are kept)
        except (AssertionError, ValueError, KeyError, EOFError, gzip.BadGzipFile) as error:
            found.append(f"no page: {error!r}: {answer.body[:200]!r}")
        self.judged += 1
        if found and len(self._run.wrong) < _KEPT_PAGES:
            head = f"# {answer.way.name}, {answer.seconds:.2f} s, of a cycle since {answer.since:.2f}: {found}"
            self._run.wrong.append(f"{head}\n{answer.text}")
        self._run.complain(*(f"{answer.way.name}: {each}" for each in found))

    def _wrong(self, answer: Answer) -> Iterator[str]:
        if answer.status != 200:
            yield f"status {answer.status}: {answer.body[:200]!r}"
            return
        text = answer.text
        if not answer.way.slow:
            self._run.seconds.append(answer.seconds)
            allowed = _allowed(answer.way.timeout)
            if answer.seconds > allowed:
                yield f"took {answer.seconds:.2f} s, and might have taken {allowed:.2f}"
        page = page_of(text)
        yield from self._run.truth.judged(page, answer.first, answer.last)
        ended = answer.asked.ended or answer.asked.began
        well = [card for card in HOST.cards if not self._touched.within(card.number, answer.since, ended)]
        yield from missing(page, well)
        if self.judged % _CHECK_EVERY == 0:
            pages.check(text.encode())


def _allowed(timeout: float | None) -> float:
    given = DEADLINE_SECONDS if timeout is None else min(DEADLINE_SECONDS, max(timeout - _OFFSET_SECONDS, timeout / 2))
    return given + NOISE_SECONDS
