"""The thread that follows processes: what hangs, dies or lies in /proc costs one process, and nobody waits for it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.config import FleetSettings, ProcessPattern
from exporter.fleets import Fleets
from exporter.fleets.sources import PidFileError, PidFiles
from exporter.fleets.watch import Watch
from exporter.model import Fleet
from exporter.probe import Prober
from exporter.probing import Question
from exporter.wire import DriverAnswer
from tests.fake_proc import Proc
from tests.process_host import wait_for

pytestmark = pytest.mark.e2e

ENTRY = FleetSettings(name="job-{pid}", runtime="cuda", process=ProcessPattern(command="work"))
ONE = FleetSettings(name="one", runtime="cuda", process=ProcessPattern(command="nobody"))


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    """No process yet."""
    return Proc(tmp_path)


@pytest.fixture
def watch(proc: Proc) -> Iterator[Watch]:
    """Follows both entries."""
    following = Watch([ENTRY, ONE], procfs=str(proc.root), sysfs="/sys", most=5, scan_seconds=0.05)
    yield following
    following.stop()


def masks(watch: Watch) -> dict[str, str]:
    """Each fleet's mask, or why it has none."""
    found = {}
    for fleet in watch.fleets():
        refusal = fleet.live.refusal if fleet.live else None
        found[fleet.name] = refusal.code if refusal else fleet.env["CUDA_VISIBLE_DEVICES"]
    return found


def test_a_process_that_hangs_costs_itself_alone(proc: Proc, watch: Watch) -> None:
    """Whoever asks of its memory waits for ever; the others are followed after seconds, and nobody waits meanwhile."""
    proc.add(10, "0")
    proc.hang(10, "environ")
    proc.add(11, "1")
    watch.start()

    def asked() -> dict[str, str]:
        started = time.monotonic()
        found = masks(watch)
        assert time.monotonic() - started < 0.2
        return found

    wait_for(lambda: asked() == {"one": "process-gone", "job-10": "process-hangs", "job-11": "1"})
    proc.add(12, "2")
    wait_for(lambda: asked().get("job-12") == "2")


def test_a_command_line_that_hangs(proc: Proc, watch: Watch) -> None:
    """Nothing is found in that process; the others are found."""
    proc.add(10, "0")
    proc.hang(10, "cmdline")
    proc.add(11, "1")
    watch.start()
    wait_for(lambda: masks(watch) == {"one": "process-gone", "job-11": "1"})


def test_a_program_that_ends_is_gone_at_once(proc: Proc, watch: Watch) -> None:
    """Also between two looks; another program in its process has nothing of it."""
    proc.add(10, "0")
    watch.start()
    assert masks(watch)["job-10"] == "0"
    proc.add(10, "3", stack=6)
    assert masks(watch).get("job-10") in (None, "3")
    wait_for(lambda: masks(watch).get("job-10") == "3")
    (proc.root / "10" / "stat").unlink()
    assert masks(watch) == {"one": "process-gone"}


def test_a_command_line_that_was_made_to_be_slow(proc: Proc) -> None:
    """Python's own regular expressions would take longer than the universe has lasted, and stop all threads."""
    proc.add(10, "0")
    (proc.root / "10" / "cmdline").write_bytes(b"work\0" + b"a\0" * 1500 + b"!")
    entry = FleetSettings(name="slow", runtime="cuda", process=ProcessPattern(command=r"^work (\S+ ?)+--model$"))
    watch = Watch([entry, ENTRY], procfs=str(proc.root), sysfs="/sys", most=5, scan_seconds=0.05)
    watch.start()
    assert masks(watch)["slow"] == "process-gone"
    watch.stop()


def test_no_list_of_processes(tmp_path: Path) -> None:
    """A fleet that stands for one workload is there with the reason, and comes back with the list."""
    root = tmp_path / "gone"
    watch = Watch([ENTRY, ONE], procfs=str(root), sysfs="/sys", most=5, scan_seconds=0.05)
    watch.start()
    (one,) = watch.fleets()
    assert one.live is not None
    assert one.live.refusal is not None
    assert str(root) in one.live.refusal.detail
    root.mkdir()
    Proc(root).add(10, "0")
    wait_for(lambda: "job-10" in masks(watch))
    watch.stop()


def test_more_fleets_than_may_be(proc: Proc, watch: Watch) -> None:
    """The older are shown, the rest is counted, and who leaves makes room; a row of which nothing runs takes none."""
    for pid in range(10, 20):
        proc.add(pid, str(pid))
    watch.start()
    assert set(masks(watch)) == {"one", "job-10", "job-11", "job-12", "job-13", "job-14"}
    assert watch.left_out == 5
    (proc.root / "12" / "stat").unlink()
    wait_for(lambda: set(masks(watch)) == {"one", "job-10", "job-11", "job-13", "job-14", "job-15"})


def written(path: Path, pid: int, age: float = 0.0) -> Path:
    """A pid file that was written so many seconds ago, by the wall clock."""
    path.write_text(f"{pid}\n")
    then = time.time() - age
    os.utime(path, (then, then))
    return path


def named(files: PidFiles, path: Path) -> str:
    """The process of a pid file, or why there is none."""
    try:
        return str(files.process(str(path)))
    except PidFileError as error:
        return str(error).rpartition("which ")[2] or str(error)


def test_a_pid_file_is_older_than_who_got_its_number_since(tmp_path: Path) -> None:
    """Where it was written before the first look the wall clock counts, with leeway; later no clock that can be set."""
    with subprocess.Popen(["sleep", "60"]) as process:
        pid, files = process.pid, PidFiles("/proc")
        assert named(files, written(tmp_path / "new", pid)) == str(pid)
        assert named(files, written(tmp_path / "leeway", pid, age=1.5)) == str(pid)
        assert named(files, written(tmp_path / "old", pid, age=60)) == "was started after the file was written"
        assert named(files, written(tmp_path / "old", pid)) == str(pid)  # written anew
        assert named(files, written(tmp_path / "old", pid, age=3600)) == str(pid)  # and the clock was set meanwhile
        process.kill()


def test_a_pid_file_that_names_who_came_later(tmp_path: Path) -> None:
    """Written between two looks, of which the second finds the number with a process that is younger than the file."""
    files, path = PidFiles("/proc"), tmp_path / "pid"
    with subprocess.Popen(["sleep", "60"]) as first:
        assert named(files, written(path, first.pid)) == str(first.pid)
        then = time.time()
        time.sleep(0.3)
        with subprocess.Popen(["sleep", "60"]) as second:
            path.write_text(str(second.pid))
            os.utime(path, (then, then))
            assert named(files, path) == "was started after the file was written"
            second.kill()
        first.kill()


def pids(watch: Watch, name: str, using: dict[int, float]) -> frozenset[int]:
    """Those of a fleet's processes that count as using devices."""
    (fleet,) = (fleet for fleet in watch.fleets(using) if fleet.name == name)
    assert fleet.live is not None
    return fleet.live.pids


def test_a_use_counts_if_it_was_asked_for_after_the_program_was_seen(proc: Proc, watch: Watch) -> None:
    """What used a device under that number before may have been another program, or another process."""
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    proc.add(10, "0")
    watch.start()
    after = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert pids(watch, "job-10", {10: after}) == {10}
    assert pids(watch, "job-10", {10: before, 11: after}) == frozenset()
    proc.add(10, "0", stack=6)
    wait_for(lambda: "job-10" in masks(watch))
    assert pids(watch, "job-10", {10: after}) == frozenset()
    assert pids(watch, "job-10", {10: time.clock_gettime(time.CLOCK_BOOTTIME)}) == {10}


def test_a_process_that_no_longer_matches_leaves_its_fleet(proc: Proc, watch: Watch) -> None:
    """However long it has been in it, and whatever it runs now."""
    proc.add(10, "0")
    watch.start()
    time.sleep(1.5)  # more looks than a young process has
    assert masks(watch)["job-10"] == "0"
    (proc.root / "10" / "cmdline").write_bytes(b"other\0")
    wait_for(lambda: "job-10" not in masks(watch), within=1.0)


def test_a_name_that_the_settings_have_is_theirs(proc: Proc, watch: Watch) -> None:
    """The fleet of processes that would have it is counted among those that are left out."""
    proc.add(10, "0")
    proc.add(11, "1")
    both = Fleets((Fleet(name="job-10", runtimes=("cuda",)),), watch)
    both.start()
    assert [(fleet.name, fleet.live is None) for fleet in both.now()] == [
        ("job-10", True),
        ("job-11", False),
        ("one", False),
    ]
    assert both.left_out == 1


def test_an_answer_of_no_use_is_asked_for_again_later() -> None:
    """Not at once: the driver may need a while, and each question is a process."""
    question = Question("cuda", (), frozenset())

    async def wanted() -> dict[Question, DriverAnswer]:
        prober = Prober({})
        prober.answers[question] = DriverAnswer(file="libcuda.so.1")
        prober.want([question])
        prober.want([question])
        await prober.answered(5.0)
        return prober.answers

    assert asyncio.run(wanted()) == {}
