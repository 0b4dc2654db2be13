"""Parts: masks, a worker's cycle, and looks at processes."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from exporter.supervisor import Supervisor
from tests.bench import masks, processes
from tests.bench.scenes import Cards, Scene
from tests.bench.scrapes import MOST_WORKER_MIB, WARM_UP
from tests.bench.servers import children, resident_mib
from tests.bench.tables import Row, Table, quantile
from tests.fakes import sysfs as trees

CARDS = 8
PROCESSES, OPEN_FILES = 600, 30  # of the pretend host whose Intel cards' clients are counted


def parts_tables(folder: Path, cycles: int) -> Iterator[Table]:
    """Every part's time, and each vendor's worker's memory."""
    cards = Cards(Scene(CARDS), folder / "nvidia")
    os.environ.update(cards.fake.environment())
    host = _write_trees(folder / "trees")
    places = {"nvidia": (cards.sysfs, Path("/proc")), **dict.fromkeys(("amd", "intel"), (host.sys, host.proc))}
    found = [asyncio.run(_cycle_rows(cycles, vendor, *where)) for vendor, where in places.items()]
    rows = [*_mask_rows(), *(row for row, _ in found), *_process_rows(folder)]
    yield Table("Parts", "Each by itself, without a page.", ("what", "p50 us", "p95 us"), rows)
    text = f"Each vendor's worker over {CARDS} cards after its cycles. Target: at most {MOST_WORKER_MIB:.0f} MiB."
    yield Table("Workers", text, ("worker", "RSS MiB"), [row for _, row in found])


def _mask_rows() -> Iterator[Row]:
    for name, took in masks.timings():
        yield _timing_row(f"{name}, {masks.DEVICES} cards", took)


async def _cycle_rows(cycles: int, vendor: str, sysfs: Path, procfs: Path) -> tuple[Row, Row]:
    """The time and the memory of a worker that this process asks, whose environment names the pretend NVML; the others
    read trees of files.
    """
    supervisor = Supervisor(vendor, (f"--path.sysfs={sysfs}", f"--path.procfs={procfs}"))
    took = []
    try:
        for _ in range(WARM_UP + cycles):
            started = time.perf_counter()
            outcome = await supervisor.ask(20.0)
            took.append(time.perf_counter() - started)
            if outcome.sample is None or len(outcome.sample.devices) != CARDS:
                raise RuntimeError(f"the worker's answer is {outcome.fault or outcome.sample}")
        mib = max(map(resident_mib, children(os.getpid())))
    finally:
        await supervisor.stop()
    what = f"{vendor} worker's cycle, {CARDS} cards"
    timing = _timing_row(what if vendor != "intel" else f"{what}, {PROCESSES} processes", took[WARM_UP:])
    return timing, Row((vendor, f"{mib:.1f}"), mib <= MOST_WORKER_MIB)


def _write_trees(root: Path) -> trees.FakeSys:
    """A host with as many cards of AMD and of Intel, and processes with open files, one of which uses a card."""
    fake = trees.FakeSys(root)
    amd = (
        trees.AmdCard(pci=f"0000:{0x40 + place:02x}:00.0", minor=place, kfd_nodes=(trees.KfdNode(node=2 + place),))
        for place in range(CARDS)
    )
    intel = [trees.IntelCard(pci=f"0000:{0x80 + place:02x}:00.0", minor=CARDS + place) for place in range(CARDS)]
    fake.write([*amd, *intel], [trees.Client(pid=100, pci=intel[0].pci, client_id=5, cycles={"ccs": (500, 1000)})])
    for pid in range(1000, 1000 + PROCESSES):
        files = fake.proc / str(pid) / "fd"
        files.mkdir(parents=True)
        for descriptor in range(OPEN_FILES):
            (files / str(descriptor)).symlink_to("socket:[4711]")
    return fake


def _process_rows(folder: Path) -> Iterator[Row]:
    """The median scan of processes that have been there for a while is the one that has a target."""
    for name, took in processes.timings(folder):
        row = _timing_row(name, took)
        steady = name == f"scan of {processes.CROWD} processes"
        yield Row(row.cells, quantile(took, 50) < processes.MOST_SCAN_SECONDS) if steady else row


def _timing_row(name: str, took: Sequence[float]) -> Row:
    return Row((name, *(f"{1e6 * quantile(took, percent):,.0f}" for percent in (50, 95))))
