"""Measures, prints, and with ``--output`` writes the page of figures. Exit status 1 when a target is missed."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from tests.bench import instructions, parts, scrapes
from tests.bench.scenes import Cards
from tests.bench.servers import ANEW, BARE, bare, ours, serving
from tests.bench.tables import Row, Table
from tests.harness import free_port


def _tables(folder: Path, count: int) -> Iterator[Table]:
    yield from scrapes.page_tables(folder / "pages", count)
    yield scrapes.client_table(folder / "clients", count)
    yield scrapes.nvitop_table(folder / "nvitop")
    yield scrapes.hang_table(folder / "hang", count)
    yield scrapes.growth_table(folder / "growth", count)
    yield _instruction_table(folder / "instructions")
    yield from parts.parts_tables(folder / "parts", count)


def _instruction_table(folder: Path) -> Table:
    heading = ("page", "million instructions a scrape", "ratio")
    if not instructions.available():
        return Table("Instructions", "Not counted: valgrind is not installed.", heading, [])
    cards, port = Cards(scrapes.EIGHT, folder), free_port()
    anew = instructions.counted(ANEW, lambda port: ours(cards, port, 0), cards.move)
    with serving(ANEW, ours(cards, port, 0), port) as page:
        plain = instructions.counted(BARE, lambda port: bare(page, port), cards.move)
    rows = [
        Row((BARE, f"{sum(plain):.2f}", "1.00")),
        Row((f"{ANEW}: parent", f"{anew[0]:.2f}", f"{anew[0] / sum(plain):.2f}")),
        Row((f"{ANEW}: worker", f"{sum(anew[1:]):.2f}", f"{sum(anew[1:]) / sum(plain):.2f}")),
    ]
    text = (
        f"{scrapes.EIGHT.name}, {instructions.SCRAPES} scrapes, counted by callgrind outside the kernel: the same "
        f"in every run to a per cent or two, whatever else the machine does."
    )
    return Table("Instructions", text, heading, rows)


def _conditions() -> str:
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    packages = (f"{name} {version(name)}" for name in ("prometheus-client", "nvitop-exporter"))
    return (
        f"Measured {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC by `make bench` on "
        f"{cpu[1] if cpu else platform.machine()}, {os.cpu_count()} cores, Linux "
        f"{platform.release().split('-')[0]}, Python {platform.python_version()}, {', '.join(packages)}."
    )


_ABOUT = """Exporters over the same pretend NVML, whose calls take a microsecond: their own costs, not a driver's.
All was measured in one run, in turns; compare within it. CPU time is that of a program and its workers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tests.bench", description="What a scrape costs beside others' pages.")
    parser.add_argument("--scrapes", type=int, default=300, help="of each page by each client (300)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the tables there too, as Markdown")
    options = parser.parse_args(arguments)
    if options.scrapes < 2:
        parser.error("--scrapes: expected at least 2")
    print(head := f"# Performance\n\n{_conditions()}\n\n{_ABOUT}\n")
    texts, missed = [head], False
    with tempfile.TemporaryDirectory() as folder:
        for table in _tables(Path(folder), options.scrapes):
            print(table.markdown(), flush=True)
            texts.append(table.markdown())
            if options.output:
                options.output.write_text("\n".join(texts), encoding="utf-8")
            missed = missed or table.missed
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
