"""A soak: the real daemon on all three vendors' pretend libraries, scraped in every way while everything goes wrong.

Rounds of faults that overlap, drawn from a seed, are inflicted and healed. At all times each page that a client who
behaves asks for comes in time, shows nothing that is another card's or of another time, and lacks nothing that no fault
keeps from it; after each round all readings come back in a time that is known. At the end the daemon and its workers
hold what they held when they had just become warm.

    python -m tests.soak [--seconds 600] [--rate 20] [--seed N]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.harness import Daemon
from tests.soak_clients import WAYS, Client, Judge, Requests, Run, SparseTruth, Touched, missing, page_of
from tests.soak_faults import FLEETS, HOST, ILLS, REPLACED, SETTINGS, SOON, Ill, Scene, drawn
from tests.truth import built
from tests.truth_cards import FREE, N0, N1, VENDORS

_TICK_SECONDS = 0.1
_LOOK_SECONDS = 600.0  # how often the figures are kept on the way
_WARM_SECONDS = 15.0
_CALM_SECONDS = 1.0
_SETTLE_SECONDS = 5.0
_MOST_COMPLAINTS = 20
MIB = 1 << 20


class Figures(NamedTuple):
    """What a process holds."""

    resident: int
    descriptors: int
    threads: int

    def __str__(self) -> str:
        return f"{self.resident / MIB:.1f} MiB, {self.descriptors} descriptors, {self.threads} threads"


# What may be more at the end than when it was warm: allocators keep what they have had, and lanes stay for a while.
ALLOWANCE = Figures(12 * MIB, 4, 4)


def figures_of(pid: int) -> Figures:
    """Those of a process."""
    process = Path(f"/proc/{pid}")
    resident = int((process / "statm").read_text().split()[1]) * 4096
    return Figures(resident, len(list((process / "fd").iterdir())), len(list((process / "task").iterdir())))


def figures(daemon: Daemon) -> dict[str, Figures]:
    """The daemon's, and each worker's by its vendor."""
    found = {"daemon": figures_of(daemon.process.pid)}
    for vendor in VENDORS:
        for place, pid in enumerate(daemon.workers(vendor)):
            found[f"{vendor} worker{'' if place == 0 else f' {place + 1}'}"] = figures_of(pid)
    return found


def grown(before: dict[str, Figures], after: dict[str, Figures]) -> Iterator[str]:
    """What has become more than is allowed."""
    if before.keys() != after.keys():
        yield f"there were {sorted(before)}, and now there are {sorted(after)}"
    for name in before.keys() & after.keys():
        for what, old, new, more in zip(Figures._fields, before[name], after[name], ALLOWANCE, strict=True):
            if new > old + more:
                yield f"the {name}'s {what} were {old} and are {new}"


class Soak:
    """One run on one daemon."""

    def __init__(self, truth: SparseTruth, daemon: Daemon, seed: int, rate: float) -> None:
        self._daemon, self._rng = daemon, random.Random(seed)
        self.run = Run(truth)
        self.scene = Scene(truth, daemon, self._rng)
        self._touched = Touched()
        self._requests = Requests(truth, self.scene)
        self.judge = Judge(self.run, self._touched)
        every = len(WAYS) / rate
        self._clients = [
            Client(way, every, self._requests, self.run, port=daemon.port, seed=seed + place)
            for place, way in enumerate(WAYS)
        ]
        self.faults: Counter[str] = Counter()
        self.recoveries: dict[str, list[float]] = {}
        self.held: dict[str, dict[str, Figures]] = {}

    def play(self, seconds: float, *, lie: bool = False) -> None:
        """Rounds for that long, and some time for the last to be over. A daemon that is gone ends it."""
        try:
            self._play(seconds, lie=lie)
        except (OSError, http.client.HTTPException) as error:
            ended, last = self._daemon.process.poll(), self._daemon.log.splitlines()[-3:]
            self.run.ended.set()
            self.run.complain(f"{error!r}; the daemon's status is {ended}, and its last words {last}")

    def _play(self, seconds: float, *, lie: bool) -> None:
        self._whole_again([], REPLACED)
        for thread in (self.judge, *self._clients):
            thread.start()
        with self.run.truth.ticking(_TICK_SECONDS):
            time.sleep(3)
            self.held["start"] = figures(self._daemon)
            self._flood()
            began = time.monotonic()
            while (since := time.monotonic() - began) < seconds and self._daemon.process.poll() is None:
                self._round()
                if "warm" not in self.held and since > _WARM_SECONDS:
                    self.held["warm"] = figures(self._daemon)
                if since > (len(self.held) - 1) * _LOOK_SECONDS:
                    self.held[f"{since / 60:.0f} min"] = figures(self._daemon)
            if lie:
                self.run.truth.change(answers={N0.number: {"free": N1.value(FREE, self.run.truth.tick)}})
            time.sleep(_SETTLE_SECONDS)
            self._end()

    def _flood(self) -> None:
        """Every kind of client that misbehaves, once: what they make the daemon hold, it may hold from now on."""
        for ill in ILLS:
            if ill.kind == "flood":
                self._inflict(ill, 0.0, 0.5)
        self._whole_again([], SOON)

    def _round(self) -> None:
        """Some faults, each for its own time; then all is healed, and comes back."""
        ills = drawn(self._rng)
        touched = [card for ill in ills for each in ill.touches for card in (each, *each.parts)]
        self._touched.begin(touched)
        times = [(self._rng.uniform(0, 1.5), self._rng.uniform(0.5, 4)) for _ in ills]
        with ThreadPoolExecutor(len(ills) + 1) as pool:
            done = [pool.submit(self._inflict, ill, *each) for ill, each in zip(ills, times, strict=True)]
        for result in done:
            result.result()
        if self.scene.died:
            self._touched.begin(HOST.cards)
            self.scene.load_again(0)
        self._whole_again(ills, max(ill.within for ill in ills))
        time.sleep(_CALM_SECONDS)

    def _inflict(self, ill: Ill, after: float, lasting: float) -> None:
        time.sleep(after)
        self.faults[ill.kind] += 1
        with ill.during(self.scene):
            time.sleep(lasting)

    def _whole_again(self, ills: Sequence[Ill], within: float) -> None:
        """Waits until a page lacks nothing."""
        healed = time.monotonic()
        while True:
            asked = self._requests.begin()
            try:
                page = page_of(self._daemon.request("/metrics").body.decode())
            finally:
                self._requests.end(asked)
            lacking = missing(page, HOST.cards)
            took = time.monotonic() - healed
            if not lacking or took > within:
                break
            time.sleep(0.1)
        if lacking:
            self.run.complain(f"{took:.0f} s after {[ill.name for ill in ills]}: {lacking[:3]}")
        for ill in ills:
            self.recoveries.setdefault(ill.kind, []).append(took)
        self._touched.end(time.monotonic())

    def _end(self) -> None:
        """Everybody stops; the daemon, too, without leaving anything."""
        self.run.ended.set()
        for thread in (*self._clients, self.judge):
            thread.join(60)
        self._whole_again([], REPLACED)
        self.held["end"] = figures(self._daemon)
        self.run.complain(*grown(self.held.get("warm", self.held["start"]), self.held["end"]))
        self.run.complain(*self.scene.problems, *_errors(self._daemon.log))
        workers = self._daemon.workers()
        status, took = self._daemon.stop()
        if status != 0 or took > 5 or any(Path(f"/proc/{pid}").exists() for pid in workers):
            self.run.complain(f"the daemon ended with {status} after {took:.1f} s")

    def table(self) -> Iterator[str]:
        """What happened."""
        seconds = sorted(self.run.seconds)
        yield f"pages judged {self.judge.judged}, aborted {self.run.aborted}, asked again {self.run.retried}"
        if seconds:
            at = [1000 * seconds[min(len(seconds) - 1, int(len(seconds) * share))] for share in (0.5, 0.99, 1)]
            yield "seconds of a page: p50 {:.0f} ms, p99 {:.0f} ms, max {:.0f} ms".format(*at)
        for kind, count in sorted(self.faults.items()):
            took = self.recoveries.get(kind, [0.0])
            yield f"  {kind:24} {count:4} times, whole after {statistics.median(took):.1f} s, at most {max(took):.1f} s"
        for name in self.held.get("start", ()):
            for when, held in self.held.items():
                yield f"  {name:16} {when:6} {held.get(name, '-')}"
        yield f"complaints: {len(self.run.complaints)}"


def _errors(log: str) -> Iterator[str]:
    """What the daemon calls an error, other than that settings are bad."""
    lines = log.splitlines()
    yield from [line for line in lines if "level=error" in line and "settings not loaded" not in line][:3]
    if "Traceback" in log:
        yield log[log.index("Traceback") :][:1000]


@contextlib.contextmanager
def _daemon(directory: Path) -> Iterator[tuple[SparseTruth, Daemon]]:
    truth = SparseTruth(directory, built(directory / "libraries"), HOST, FLEETS)
    sampling, fleets, _ = SETTINGS[0]
    with Daemon(directory, truth.environment(), truth.config(sampling, fleets), truth.flags()) as daemon:
        yield truth, daemon


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="how long faults are inflicted")
    parser.add_argument("--rate", type=float, default=20, help="scrapes a second")
    parser.add_argument("--seed", type=int, default=None, help="which faults, when; printed where none is given")
    parser.add_argument("--lie", action="store_true", help="let a library lie in the end: this run has to fail")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1 << 30) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as directory, _daemon(Path(directory)) as (truth, daemon):
        soak = Soak(truth, daemon, seed, options.rate)
        soak.play(options.seconds, lie=options.lie)
        print("\n".join(soak.table()))
        if soak.run.complaints:
            print(f"wrong, with seed {seed}:", *soak.run.complaints[:_MOST_COMPLAINTS], sep="\n", file=sys.stderr)
            kept = Path(tempfile.gettempdir())
            (kept / f"soak-{seed}.log").write_text(daemon.log, encoding="utf-8")
            (kept / f"soak-{seed}.pages").write_text("".join(soak.run.wrong), encoding="utf-8")
    return 1 if soak.run.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
