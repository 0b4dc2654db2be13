"""What a look at many processes costs: a scan over a crowd of real ones, and whether 256 fleets still live."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from exporter.config import FleetSettings, ProcessPattern
from exporter.fleets import processes
from exporter.fleets.scanner import Scanner
from tests.fakes import shared_object

CROWD = 10_000
MOST_SCAN_SECONDS = 0.2
_YOUNG_SCANS, _OLD_SCANS = 13, 20

_SOURCE = r"""
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>
int main(int count, char **words) {
    for (int left = atoi(words[1]); left > 0; left--) {
        pid_t pid = fork();
        if (pid < 0)
            return 1;
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            pause();
            _exit(0);
        }
    }
    puts("ready");
    fflush(stdout);
    pause();
}
"""

ENTRIES = (
    FleetSettings(name="{unit}", systemd_unit="llama@*.service"),
    FleetSettings(name="slurm-{job}", cgroup="/job_(?P<job>[0-9]+)"),
    FleetSettings(name="vllm-{user}", process=ProcessPattern(command="vllm serve", user="svc-.*")),
)


@contextlib.contextmanager
def crowd(folder: Path, count: int) -> Iterator[None]:
    """So many processes that do nothing."""
    source = folder / "crowd.c"
    source.write_text(_SOURCE)
    program = shared_object.compiled(shared_object.compiler(), source, folder / "crowd", ["-static"])
    with subprocess.Popen([program, str(count)], stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is None or process.stdout.readline() != b"ready\n":
                raise RuntimeError(f"{count} processes cannot be started here")
            yield
        finally:
            process.kill()


def _timed(scanner: Scanner, count: int) -> list[float]:
    took = []
    for _ in range(count):
        started = time.perf_counter()
        scanner.scan()
        took.append(time.perf_counter() - started)
    return took


def timings(folder: Path) -> Iterator[tuple[str, Sequence[float]]]:
    """What was measured, and how long it took each time: the first look, those at young processes, and at old ones."""
    with crowd(folder, CROWD):
        scanners = [Scanner(ENTRIES, "/proc", "/sys", 256) for _ in range(3)]
        scanner = scanners[0]
        yield f"first scan of {CROWD} processes", [took for each in scanners for took in _timed(each, 1)]
        yield f"scan of {CROWD} young processes", _timed(scanner, _YOUNG_SCANS)
        yield f"scan of {CROWD} processes", _timed(scanner, _OLD_SCANS)
        programs = [found.incarnation for pid in processes.numbers("/proc")[-256:] if (found := _stat(pid))]
        yield f"whether {len(programs)} fleets live", [_lives(programs) for _ in range(_OLD_SCANS)]


def _stat(pid: int) -> processes.Stat | None:
    return processes.stat("/proc", pid)


def _lives(programs: Sequence[processes.Incarnation]) -> float:
    started = time.perf_counter()
    for program in programs:
        processes.runs("/proc", program)
    return time.perf_counter() - started
