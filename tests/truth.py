"""A made-up host whose every reading tells whose it is and when it was so, and a judge of pages by that arithmetic.

A *tick* is a state of the host. Whoever changes anything of it writes the next tick, so that a page that was asked for
after tick 7 was written may show no reading of tick 6: that would be a stale one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

from tests.fakes import amd_smi, nvml, ze_loader
from tests.fakes.mirror import Fault, Link, place
from tests.fakes.sysfs import Card, FakeSys
from tests.harness import Daemon, Scrape
from tests.truth_cards import (
    A0,
    CARDS,
    I1,
    MOST_TICKS,
    N0,
    N2,
    VENDORS,
    Pretend,
    client,
    client_text,
    files,
    of_nvml,
    of_smi,
    of_sysfs,
    of_sysman,
)
from tests.truth_judge import Fleets, History, Judge
from tests.truth_page import read

FLEETS: Fleets = {"chat": {"nvidia": (N2, N0)}, "train": {"amd": (A0,)}, "infer": {"intel": (I1,)}}
SETTINGS = """
  - {name: host, runtime: host}
  - {name: chat, runtime: cuda, env: {CUDA_VISIBLE_DEVICES: "2,0", CUDA_DEVICE_ORDER: PCI_BUS_ID}}
  - {name: train, runtime: rocm, env: {HIP_VISIBLE_DEVICES: "1"}}
  - {name: infer, runtime: level_zero, env: {ZE_AFFINITY_MASK: "1"}}
"""
"""The settings' fleets, of which :data:`FLEETS` says, by hand, which cards they are; ``host`` has all."""


Broken = Fault | str | Link
"""What is the matter with a file of sysfs: as :class:`FakeSys` breaks it, another text, or a link to another file."""


class Libraries(NamedTuple):
    """The pretend libraries, built: NVML's folder, and the files of the others; None where the host has none."""

    nvml: Path
    ze: Path | None = None
    amd_smi: Path | None = None


def built(directory: Path) -> Libraries:
    """All of them; where one cannot be built the test is skipped, loudly, or fails if ``CI=true``."""
    return Libraries(
        nvml.build_or_skip(directory / "nvml"),
        ze_loader.build_or_skip(directory / "ze"),
        amd_smi.build_or_skip(directory / "amd"),
    )


@dataclass(frozen=True, kw_only=True)
class Host:
    """What the host is now. ``lines`` are rules of a vendor's pretend library, ``broken`` files of cards in sysfs.

    ``answers`` changes what NVML says of a card, or Sysman of its memory, by the card's number; ``count`` is how many
    cards NVML counts. ``bound`` are the vendors whose driver has taken their cards. Without ``loaded`` NVML's is not.
    """

    cards: tuple[Pretend, ...] = CARDS
    lines: dict[str, tuple[str, ...]] = field(default_factory=dict)
    broken: dict[tuple[str, str], Broken] = field(default_factory=dict)
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    count: int | None = None
    kfd: bool = True
    bound: frozenset[str] = frozenset(VENDORS)
    loaded: bool = True

    def of(self, vendor: str) -> list[Pretend]:
        """The vendor's cards, in the order of the list."""
        return [card for card in self.cards if card.vendor == vendor]


class Page(NamedTuple):
    """A page, what is wrong with it, and the ticks that were in force while it was asked for."""

    scrape: Scrape
    complaints: list[str]
    first: int
    last: int
    text: str


class Truth:
    """Writes what the pretend libraries and the kernel's files say, and judges pages by it.

    ``begun`` is the newest tick of which something may have been written, ``tick`` the newest that has been wholly.
    Threads may change the host at once; each change is one tick.
    """

    def __init__(
        self, directory: Path, libraries: Libraries, host: Host | None = None, fleets: Fleets = FLEETS
    ) -> None:
        self.host, self.fleets, self.libraries = host or Host(), fleets, libraries
        self.tick = self.begun = 0
        self.nvml = nvml.FakeNvml(directory, libraries.nvml)
        self.ze = None if libraries.ze is None else ze_loader.FakeZeLoader(directory, libraries.ze)
        self.smi = None if libraries.amd_smi is None else amd_smi.FakeAmdSmi(directory, libraries.amd_smi)
        self.sysfs = FakeSys(directory / "root")
        self._standing: object = None
        self._damaged: dict[tuple[str, str], Broken] = {}
        self._before: dict[tuple[str, str], dict[Path, bytes]] = {}
        self._lock = threading.RLock()
        self._history: History = []
        self.write(1)

    # --- for the daemon

    def environment(self) -> dict[str, str]:
        """What the daemon's environment needs."""
        found = self.nvml.environment()
        for fake in (self.ze, self.smi):
            found |= fake.environment() if fake is not None else {}
        return found

    def flags(self) -> list[str]:
        """The daemon's flags."""
        return [f"--path.sysfs={self.sysfs.sys}", f"--path.procfs={self.sysfs.proc}"]

    def config(self, sampling: str = "reuse_seconds: 0, deadline_seconds: 4", fleets: str = SETTINGS) -> str:
        """The daemon's settings. Where a finished cycle serves again, ``first`` of :meth:`look` is its beginning."""
        library = "" if self.ze is None else f"libraries: {{intel: {self.ze.shared_object}}}\n"
        return f"backends: [nvidia, amd, intel]\nsampling: {{{sampling}}}\n{library}fleets:{fleets}"

    # --- writing

    def change(self, **fields: Any) -> int:
        """Makes these fields of :class:`Host` so, with the next tick, which comes back."""
        with self._lock:
            self.host = replace(self.host, **fields)
            return self.step()

    def alter(self, card: Pretend, **fields: Any) -> Pretend:
        """Makes these the fields of the card of that number, which comes back."""
        with self._lock:
            (now,) = (each for each in self.host.cards if each.number == card.number)
            new = replace(now, **fields)
            self.change(cards=tuple(new if each is now else each for each in self.host.cards))
            return new

    def rules(self, vendor: str, *lines: str) -> int:
        """Makes these the rules of the vendor's pretend library."""
        return self.change(lines={**self.host.lines, vendor: lines})

    def break_file(self, card: Pretend, name: str, how: Broken) -> int:
        """Breaks a file of a card in sysfs, or those that a glob finds."""
        return self.change(broken={**self.host.broken, (card.pci, name): how})

    def mend(self) -> int:
        """Nothing is broken, slow or hanging any more, and all libraries say what is so."""
        return self.change(broken={}, lines={}, answers={}, count=None)

    def step(self) -> int:
        """The next tick, written, which comes back."""
        with self._lock:
            self.write(self.begun + 1)
            return self.tick

    @contextlib.contextmanager
    def ticking(self, every_seconds: float) -> Iterator[None]:
        """Meanwhile ticks go on by themselves."""
        ended = threading.Event()

        def tick() -> None:
            while not ended.wait(every_seconds):
                self.step()

        thread = threading.Thread(target=tick, name="ticks", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def write(self, tick: int) -> None:
        """Writes the host as it is at that tick, which is later than any before; each file all at once."""
        with self._lock:
            assert self.begun < tick < MOST_TICKS, (self.begun, tick)
            if not self._history or self._history[-1][1] != self.host.cards:
                self._history.append((tick, self.host.cards))
            self.begun = tick
            self._write_libraries(self.host, tick)
            self._write_sysfs(self.host, tick)
            self.tick = tick

    def _write_libraries(self, host: Host, tick: int) -> None:
        rules = {vendor: host.lines.get(vendor, ()) for vendor in VENDORS}
        gpus = [of_nvml(place_, card, tick, host.answers) for place_, card in enumerate(host.of("nvidia"))]
        if host.loaded:
            self.nvml.write(gpus, count=host.count, lines=rules["nvidia"])
        else:
            self.nvml.remove()
        if self.ze is not None:
            cards = [of_sysman(place_, card, tick, host.answers) for place_, card in enumerate(host.of("intel"))]
            self.ze.write(cards, lines=rules["intel"])
        if self.smi is not None:
            self.smi.write(list(of_smi(host.of("amd"), tick)), lines=rules["amd"])

    def _write_sysfs(self, host: Host, tick: int) -> None:
        """All of the tree only where more than readings has changed: it has hundreds of files."""
        standing = (self._cards(host, 0), host.kfd)
        now = {card.pci: files(card, tick) for card in host.cards}
        for pci, name in [each for each, how in self._damaged.items() if host.broken.get(each) != how]:
            self._restore(pci, name, now.get(pci, {}).get(name))
        if standing != self._standing:
            clients = [client(card, tick) for card in host.of("intel") if "intel" in host.bound]
            self.sysfs.write(self._cards(host, tick), clients, kfd=host.kfd)
            self._standing, self._damaged, self._before = standing, {}, {}
        for card in host.cards:
            if card.vendor in host.bound:
                self._write_files(card, tick)
        for (pci, name), how in host.broken.items():
            if (pci, name) not in self._damaged and any(card.pci == pci for card in host.cards):
                self._damage(pci, name, how)
        self._damaged = dict(host.broken)

    @staticmethod
    def _cards(host: Host, tick: int) -> list[Card]:
        """A card's DRM minor is its number, so that it keeps it."""
        return [of_sysfs(card, card.number, tick, bound=card.vendor in host.bound) for card in host.cards]

    def _write_files(self, card: Pretend, tick: int) -> None:
        for name, text in files(card, tick).items():
            if (card.pci, name) not in self.host.broken:
                self.sysfs.set(card.pci, name, text)
        if card.vendor == "intel":
            path = self.sysfs.proc / str(1000 + card.number) / "fdinfo/5"
            place(self.sysfs.proc, path, client_text(card, tick).encode())

    def _damage(self, pci: str, name: str, how: Broken) -> None:
        found = list(self.sysfs.device(pci).glob(name))
        self._before[pci, name] = {path: path.read_bytes() for path in found}
        if isinstance(how, Link):
            (path,) = found
            place(self.sysfs.sys, path, how)
        elif how in get_args(Fault):
            self.sysfs.fault(pci, name, cast("Fault", how))
        else:
            self.sysfs.set(pci, name, how)

    def _restore(self, pci: str, name: str, now: str | None) -> None:
        """As it was before it broke, or with its text of ``now``: who reads it at once is not to find an old one."""
        for path, content in self._before.pop((pci, name), {}).items():
            if path.parent.is_dir():
                place(self.sysfs.sys, path, content if now is None else now.encode())
        del self._damaged[pci, name]

    # --- judging

    def look(self, daemon: Daemon, timeout: float | None = None, first: int | None = None) -> Page:
        """A page of the daemon's, judged. ``first`` is the tick from which on its readings may be, where it joins a
        cycle that began earlier; without it they may be from now on.
        """
        headers = {} if timeout is None else {"X-Prometheus-Scrape-Timeout-Seconds": str(timeout)}
        first = self.tick if first is None else first
        answer = daemon.request("/metrics", headers=headers)
        last, text = self.begun, answer.body.decode()
        assert answer.status == 200, (answer.status, text)
        scrape = read(text, answer.seconds)
        return Page(scrape, self._complaints(scrape, first, last), first, last, text)

    def complaints(self, page_text: str, first_tick: int, last_tick: int) -> list[str]:
        """What is wrong with a page of which the ticks from ``first_tick`` to ``last_tick`` were in force."""
        return self._complaints(read(page_text), first_tick, last_tick)

    def _complaints(self, page: Scrape, first: int, last: int) -> list[str]:
        with self._lock:
            history = list(self._history)
        return Judge(page, history, self.fleets, range(first, last + 1)).complaints()
