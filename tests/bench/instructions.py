"""Instructions a scrape, counted by valgrind's callgrind, which noise does not touch."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.bench.servers import PLAIN, Command, Page, serving
from tests.harness import free_port

SCRAPES = 20
_WARM_UP = 5
# A scrape takes a second or two in there, and a worker's start half a minute: nobody shall give up on them.
_PATIENCE = {"X-Prometheus-Scrape-Timeout-Seconds": "60"}


def available() -> bool:
    """Whether valgrind is installed."""
    return shutil.which("valgrind") is not None and shutil.which("callgrind_control") is not None


def counted(name: str, command: Callable[[int], Command], move: Callable[[], None]) -> list[float]:
    """Millions of instructions a scrape, of the server's process and then of each of its workers'."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        within = ["valgrind", "--tool=callgrind", "--trace-children=yes", "--instr-atstart=no", "-q"]
        within += ["--cache-sim=no", f"--callgrind-out-file={folder}/%p"]
        with serving(name, command(port), port, within) as page:
            return _of(page, Path(folder), move)


def _of(page: Page, folder: Path, move: Callable[[], None]) -> list[float]:
    for _ in range(_WARM_UP):
        page.get(PLAIN, _PATIENCE)
    pids = page.pids()
    for pid in pids:
        _control("--instr=on", pid)
        _control("--zero", pid)
    for _ in range(SCRAPES):
        move()
        page.get(PLAIN, _PATIENCE)
    pids = [pid for pid in pids if pid in page.pids()]  # without those that only looked for another vendor's cards
    for pid in pids:
        _control("--dump", pid)
    return [_total(folder / f"{pid}.1") / SCRAPES / 1e6 for pid in pids]


def _control(order: str, pid: int) -> None:
    subprocess.run(["callgrind_control", order, str(pid)], check=True, capture_output=True)


def _total(dump: Path) -> int:
    found = re.search(
        r"^(?:totals|summary): ([0-9]+)", dump.read_text(encoding="utf-8", errors="replace"), re.MULTILINE
    )
    if found is None:
        raise RuntimeError(f"{dump.name} has no total")
    return int(found[1])
