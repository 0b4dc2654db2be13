"""What pages and `explain` say of fleets, in words that a test can hold: the PCI addresses of their cards."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

from tests.harness import PROGRAM, Daemon, Scrape, clean_environment
from tests.process_host import ProcessHost

CARDS = ("0000:21:00.0", "0000:41:00.0", "0000:61:00.0", "0000:81:00.0")
"""The addresses of the pretend NVML's first four equal cards."""

ORDERED = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
QUICK = "sampling: {scan_seconds: 0.25}\n"

_ROW = re.compile(r"  ([0-9]+) +[0-9-]+ +([0-9a-f:.]{12}) ")


def masked(mask: str) -> dict[str, str]:
    """The environment of a workload whose answer is proven."""
    return ORDERED | {"CUDA_VISIBLE_DEVICES": mask}


def cards(scrape: Scrape, fleet: str) -> list[str]:
    """The fleet's cards by its own index."""
    rows = scrape.of("gpu_fleet_device_info", fleet=fleet)
    by_index = {int(row.labels["fleet_index"]): row.labels["pci_bus_id"] for row in rows}
    assert sorted(by_index) == list(range(len(rows))), rows
    return [address for _, address in sorted(by_index.items())]


def evidence(scrape: Scrape, fleet: str) -> set[str]:
    """The grades of evidence that the fleet's cards have."""
    return {row.labels["evidence"] for row in scrape.of("gpu_fleet_device_info", fleet=fleet)}


def fleets(scrape: Scrape) -> set[str]:
    """The names of all fleets, refused ones too."""
    return {row.labels["fleet"] for row in scrape.of("gpu_fleet_mask_inverted")}


def refusal(scrape: Scrape, fleet: str) -> str:
    """The reason for which the fleet's masks are refused; empty where they are not."""
    return " ".join(row.labels["reason"] for row in scrape.of("gpu_fleet_mask_refusal_info", fleet=fleet))


class Explained(NamedTuple):
    """What `explain` printed, and its exit status."""

    status: int
    out: str
    error: str

    def cards(self) -> dict[str, list[str]]:
        """The cards of each fleet by its own index."""
        found: dict[str, list[str]] = {}
        fleet = ""
        for line in self.out.splitlines():
            if not line.startswith(" "):
                fleet = line.partition(" (")[0]
                found[fleet] = []
            elif row := _ROW.match(line):
                assert int(row[1]) == len(found[fleet]), line
                found[fleet].append(row[2])
        return found


def explain(
    host: ProcessHost,
    environment: Mapping[str, str],
    *arguments: str,
    through: Callable[[Sequence[str]], Sequence[str]] | None = None,
) -> Explained:
    """The command, in the host's namespace, or started ``through`` something else."""
    command = (through or host.within)([*PROGRAM, "explain", *arguments])
    done = subprocess.run(command, env=clean_environment(environment), capture_output=True, check=False, timeout=60)
    return Explained(done.returncode, done.stdout.decode(), done.stderr.decode())


class Page(NamedTuple):
    """A page, and when it was asked for and there (monotonic)."""

    begun: float
    ended: float
    scrape: Scrape


class Poller:
    """Scrapes in a thread of its own, as fast as it gets pages, for as long as it is entered."""

    def __init__(self, daemon: Daemon) -> None:
        self.pages: list[Page] = []
        self._daemon, self._done = daemon, threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(30)
        assert self._failed is None, self._failed

    def begun_after(self, moment: float) -> list[Scrape]:
        """The pages that were asked for after a moment."""
        return [page.scrape for page in self.pages if page.begun > moment]

    def _run(self) -> None:
        try:
            while not self._done.is_set():
                begun = time.monotonic()
                scrape = self._daemon.scrape(5)
                self.pages.append(Page(begun, time.monotonic(), scrape))
        except (OSError, AssertionError) as error:
            self._failed = error
