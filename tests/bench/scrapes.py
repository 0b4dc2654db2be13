"""Tables about pages: what a scrape costs, how that grows, and what a crowd, a pause or a hung card does to it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.bench.scenes import Cards, Scene
from tests.bench.servers import (
    ANEW,
    BARE,
    KEPT,
    NVITOP,
    PLAIN,
    PROMETHEUS,
    REUSED,
    Client,
    Page,
    beside,
    ours,
    resident_mib,
    serving,
)
from tests.bench.tables import Row, Table, fitted, quantile
from tests.harness import free_port

EIGHT, FULL = Scene(8), Scene(8, watched=True)
MIG = Scene(16, instances=7, fleets=3)
SCENES = (Scene(1), EIGHT, FULL, Scene(16), Scene(8, fleets=3), Scene(8, fleets=50), MIG)
GROWTH = tuple(Scene(8, fleets=fleets) for fleets in (1, 10, 20, 35, 50))

MOST_RATIO, MOST_FULL_RATIO, MOST_MIG_RATIO, MOST_REUSED_RATIO, MOST_HUNG_RATIO = 1.3, 2.0, 0.6, 0.3, 1.2
MOST_SHARE_OF_NVITOP = 0.5
MOST_PARENT_MIB, MOST_WORKER_MIB, MOST_START_SECONDS = 40.0, 24.0, 1.0
MOST_FROM_LINE = 0.15

BLOCK = 25  # scrapes of one page, before it is the next one's turn
WARM_UP = 50  # scrapes of each page that do not count
INTERVAL_SECONDS = 15  # between two scrapes of one Prometheus, as is usual
_QUIET_SECONDS = 5.0
CROWD, _ROUNDS = 50, 2
_SCRAPE_TIMEOUT = 2.0
_DEADLINE = _SCRAPE_TIMEOUT - 0.5
_ACCEPTED_LATE = 0.25


class Scraped(NamedTuple):
    """What was measured of one scene: a row for each page, and how long and how much a read of ours takes."""

    costs: list[Row]
    processes: list[Row]


def measure(pages: Sequence[Page], scrapes: int, cards: Cards, clients: Sequence[Client] = (KEPT,)) -> None:
    """So many scrapes of each page by each client, in blocks that take turns; the cards move before each."""
    for page in pages:
        for client in clients:
            page.scrape(client, WARM_UP, cards.move)
        page.costs.clear()
    for done in range(0, scrapes, BLOCK):
        for client in clients:
            for page in pages:
                page.scrape(client, min(BLOCK, scrapes - done), cards.move)


def page_tables(folder: Path, scrapes: int) -> Iterator[Table]:
    """Each scene's pages, and the processes that serve them."""
    found = [_scraped(scene, folder / str(place), scrapes) for place, scene in enumerate(SCENES)]
    yield Table(
        "Scrapes",
        f"{scrapes} scrapes of each page in plain text, in turns, by a client that keeps its connection open where "
        f"the server lets it, as Prometheus does. Ours reads the cards anew for every scrape. The bare page has the "
        f"same series as constants. Targets: both ratios to the bare page of the run at most {MOST_RATIO} from "
        f"{EIGHT.cards} cards on, {MOST_FULL_RATIO} of full ones; with MIG, p50 at most {MOST_MIG_RATIO} times.",
        ("host", "page", "samples", "p50 ms", "p99 ms", "CPU ms", "CPU us a sample", "p50 ratio", "CPU ratio"),
        [row for scraped in found for row in scraped.costs],
    )
    yield Table(
        "Processes",
        f"Memory after the scrapes, the calls into NVML that a scrape makes, the time from a program's start to its "
        f"first whole page, and {CROWD} scrapers at once (ours reads once for all that wait). Targets: parent at "
        f"most {MOST_PARENT_MIB:.0f} MiB, each worker at most {MOST_WORKER_MIB:.0f} MiB, first page within "
        f"{MOST_START_SECONDS:.0f} s.",
        (
            "host",
            "page",
            "start s",
            "RSS MiB",
            "workers' RSS MiB",
            "calls a scrape",
            f"{CROWD} at once, p50 ms",
            "worst ms",
        ),
        [row for scraped in found for row in scraped.processes],
    )


def _scraped(scene: Scene, folder: Path, scrapes: int) -> Scraped:
    cards = Cards(scene, folder)
    with beside(cards) as pages:
        measure(pages, scrapes, cards)
        bare = pages[0].costs[KEPT.name]
        costs = [_cost_row(scene, page, bare.latency(50), bare.cpu()) for page in pages]
        return Scraped(costs, [_process_row(scene, page, cards) for page in pages])


def _cost_row(scene: Scene, page: Page, p50: float, cpu: float) -> Row:
    cost, samples = page.costs[KEPT.name], page.samples()
    ratios = cost.latency(50) / p50, cost.cpu() / cpu
    numbers = (cost.latency(50), cost.latency(99), cost.cpu())
    cells = (
        *(f"{value:.2f}" for value in numbers),
        f"{1000 * cost.cpu() / samples:.1f}",
        *(f"{ratio:.2f}" for ratio in ratios),
    )
    most = MOST_FULL_RATIO if scene.watched else MOST_RATIO
    holds = ratios[0] <= MOST_MIG_RATIO if scene.instances else max(ratios) <= most
    judged = page.name == ANEW and scene.cards >= EIGHT.cards
    return Row((scene.name, page.name, str(samples), *cells), holds if judged else None)


def _process_row(scene: Scene, page: Page, cards: Cards) -> Row:
    parent, *workers = (resident_mib(pid) for pid in page.pids())
    calls = "" if page.name == BARE else str(_calls(page, cards))
    p50, worst = _crowded(page)
    memory = f"{parent:.1f}", " ".join(f"{worker:.1f}" for worker in workers)
    cells = (scene.name, page.name, f"{page.start_seconds:.2f}", *memory, calls, f"{p50:.1f}", f"{worst:.1f}")
    fits = parent <= MOST_PARENT_MIB and max(workers, default=0.0) <= MOST_WORKER_MIB
    return Row(cells, fits and page.start_seconds <= MOST_START_SECONDS if page.name == ANEW else None)


def _calls(page: Page, cards: Cards) -> int:
    """Calls into the pretend NVML for one scrape, or for nvitop-exporter in one of its own rounds of a second."""
    log = cards.calls()
    if page.name == NVITOP:
        time.sleep(1)
    else:
        page.get()
    calls = len(log.read_bytes().splitlines())
    cards.move()
    return calls


def _crowded(page: Page) -> tuple[float, float]:
    """The median and the longest time of scrapers that all ask at once, over some rounds."""
    took: list[float] = []

    def scrape(barrier: threading.Barrier) -> None:
        barrier.wait()
        started = time.perf_counter()
        with contextlib.suppress(OSError):
            page.get()
            took.append(1000 * (time.perf_counter() - started))

    for _ in range(_ROUNDS):
        barrier = threading.Barrier(CROWD)
        threads = [threading.Thread(target=scrape, args=(barrier,)) for _ in range(CROWD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if len(took) != CROWD * _ROUNDS:
        raise RuntimeError(f"{page.name}: {len(took)} of {CROWD * _ROUNDS} scrapers were answered")
    return quantile(took, 50), max(took)


def client_table(folder: Path, scrapes: int) -> Table:
    """Ways to ask, and what a second scraper costs that is served the same reading."""
    cards = Cards(EIGHT, folder)
    clients = (PLAIN, KEPT, PROMETHEUS)
    with contextlib.ExitStack() as stack:
        bare, anew, _ = stack.enter_context(beside(cards))
        port = free_port()
        reused = stack.enter_context(serving(REUSED, ours(cards, port, None), port))
        measure((bare, anew, reused), scrapes, cards, clients)
        rows = [row for client in clients for row in _client_rows(client.name, bare, anew, reused)]
    text = (
        f"{EIGHT.name}, {scrapes} scrapes of each page by each client. Within `reuse_seconds` a second scraper gets "
        f"the first one's reading. Targets: both ratios at most {MOST_RATIO} for a page that is read anew to the "
        f"bare one, at most {MOST_REUSED_RATIO} for one that is served again to one that is read anew."
    )
    heading = ("client", "page", "p50 ms", "p99 ms", "CPU ms", "of", "p50 ratio", "CPU ratio")
    return Table("Clients, and a second scraper", text, heading, rows)


def _client_rows(client: str, bare: Page, anew: Page, reused: Page) -> Iterator[Row]:
    for page, base, most in ((bare, bare, None), (anew, bare, MOST_RATIO), (reused, anew, MOST_REUSED_RATIO)):
        cost, of = page.costs[client], base.costs[client]
        ratios = cost.latency(50) / of.latency(50), cost.cpu() / of.cpu()
        numbers = (f"{value:.2f}" for value in (cost.latency(50), cost.latency(99), cost.cpu()))
        cells = (
            client,
            page.name,
            *numbers,
            base.name if base is not page else "",
            *(f"{ratio:.2f}" for ratio in ratios),
        )
        yield Row(cells, None if most is None else max(ratios) <= most)


def nvitop_table(folder: Path) -> Table:
    """CPU time a sample beside nvitop-exporter, whose reading goes on between scrapes."""
    cards = Cards(EIGHT, folder)
    with beside(cards) as pages:
        found = {page.name: _paced(page, cards) for page in pages if page.name != BARE}
    most = MOST_SHARE_OF_NVITOP * found[NVITOP].a_sample
    rows = [
        Row(
            (name, str(paced.samples), f"{paced.quiet:.2f}", f"{paced.scrape:.2f}", f"{paced.a_sample:.1f}"),
            paced.a_sample <= most if name == ANEW else None,
        )
        for name, paced in found.items()
    ]
    text = (
        f"{EIGHT.name}, scraped once in {INTERVAL_SECONDS} s. nvitop-exporter reads the cards every second, whether "
        f"anybody asks or not, ours when asked. Target: CPU time a sample at most {MOST_SHARE_OF_NVITOP} times "
        f"nvitop-exporter's."
    )
    heading = ("page", "samples", "CPU ms a second without scrapes", "CPU ms a scrape", "CPU us a sample")
    return Table("Beside nvitop-exporter", text, heading, rows)


class _Paced(NamedTuple):
    samples: int
    quiet: float  # milliseconds of CPU time a second
    scrape: float  # the same a scrape, one a second, without what goes on anyway

    @property
    def a_sample(self) -> float:
        """Microseconds of CPU time."""
        return 1000 * (self.scrape + INTERVAL_SECONDS * self.quiet) / self.samples


def _paced(page: Page, cards: Cards) -> _Paced:
    samples = page.samples()
    time.sleep(1)
    before = page.cpu_seconds()
    time.sleep(_QUIET_SECONDS)
    quiet = (page.cpu_seconds() - before) / _QUIET_SECONDS
    before, count = page.cpu_seconds(), int(_QUIET_SECONDS)
    for _ in range(count):
        cards.move()
        page.get(PROMETHEUS)
        time.sleep(1)
    return _Paced(samples, 1000 * quiet, max(0.0, 1000 * ((page.cpu_seconds() - before) / count - quiet)))


def hang_table(folder: Path, scrapes: int) -> Table:
    """One card of eight hangs: the first page, and those after it."""
    cards = Cards(EIGHT, folder)
    port = free_port()
    headers = {"X-Prometheus-Scrape-Timeout-Seconds": str(_SCRAPE_TIMEOUT)}
    with serving(ANEW, ours(cards, port, 0), port) as page:
        measure([page], scrapes, cards)
        healthy = page.costs.pop(KEPT.name).latency(50)
        cards.move(["hang nvmlDeviceGetTemperatureV 1"])
        started = time.perf_counter()
        page.get(KEPT, headers)
        first = time.perf_counter() - started
        page.scrape(KEPT, scrapes, lambda: cards.move(["hang nvmlDeviceGetTemperatureV 1"]))
        later = page.costs[KEPT.name].latency(50)
    rows = [
        Row(("healthy, p50", f"{healthy:.2f}", "")),
        Row(("first page after the hang", f"{1000 * first:.0f}", ""), 0 <= first - _DEADLINE + 0.1 <= _ACCEPTED_LATE),
        Row(("later pages, p50", f"{later:.2f}", f"{later / healthy:.2f}"), later / healthy <= MOST_HUNG_RATIO),
    ]
    text = (
        f"{EIGHT.name}; a call on one of them does not return. Targets: the first page comes at its deadline, which "
        f"is {_DEADLINE} s for a scrape timeout of {_SCRAPE_TIMEOUT:.0f} s; later ones within {MOST_HUNG_RATIO} "
        f"times the healthy p50."
    )
    return Table("One hung card", text, ("page", "ms", "ratio"), rows)


def growth_table(folder: Path, scrapes: int) -> Table:
    """How the cost of our page grows with its samples."""
    points = []
    for scene in GROWTH:
        cards, port = Cards(scene, folder / str(scene.fleets)), free_port()
        with serving(ANEW, ours(cards, port, 0), port) as page:
            measure([page], scrapes, cards)
            cost = page.costs[KEPT.name]
            points.append((page.samples(), cost.latency(50), cost.cpu()))
    rows = []
    for place, what in ((1, "p50"), (2, "CPU time")):
        line = fitted([(point[0], point[place]) for point in points])
        cells = (what, f"{line.start:.2f}", f"{1000 * line.slope:.2f}", f"{100 * line.worst:.0f} %")
        rows.append(Row(cells, line.worst <= MOST_FROM_LINE))
    samples = ", ".join(f"{point[0]:,}" for point in points)
    text = (
        f"Eight cards in {', '.join(str(scene.fleets) for scene in GROWTH)} fleets ({samples} samples), a straight "
        f"line fitted. Target: no point further than {100 * MOST_FROM_LINE:.0f} % from it."
    )
    return Table("Growth", text, ("what", "ms without samples", "us a sample", "furthest from the line"), rows)
