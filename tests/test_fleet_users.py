"""Which processes' use of a device is a fleet's own: all that its entry finds, and what they have started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from exporter.config import FleetSettings, ProcessPattern
from exporter.fleets.watch import Watch
from exporter.model import Live
from tests.fake_proc import Proc, now
from tests.process_host import wait_for

pytestmark = pytest.mark.e2e

UNIT = FleetSettings(name="embed", runtime="cuda", systemd_unit="embed")
JOBS = FleetSettings(name="job-{job}", runtime="cuda", cgroup="/job_(?P<job>[0-9]+)")
SERVERS = FleetSettings(name="serve", runtime="cuda", process=ProcessPattern(command="^serve"))
IN_UNIT = "/system.slice/embed.service"

Follow = Callable[..., Watch]


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    """No process yet."""
    return Proc(tmp_path / "proc")


@pytest.fixture
def follow(proc: Proc) -> Iterator[Follow]:
    """Watches of entries, which look once and then when they have a reason to."""
    with ExitStack() as stack:

        def followed(*entries: FleetSettings, scan_seconds: float = 600.0) -> Watch:
            watch = Watch(entries, procfs=str(proc.root), sysfs="/sys", most=9, scan_seconds=scan_seconds)
            stack.callback(watch.stop)
            watch.start()
            return watch

        yield followed


def lives(watch: Watch, *pids: int, asked: float | None = None) -> dict[str, Live]:
    """What is seen of each fleet, while these processes use a device."""
    using = dict.fromkeys(pids, now() if asked is None else asked)
    return {fleet.name: fleet.live for fleet in watch.fleets(using) if fleet.live is not None}


def own(watch: Watch, *pids: int) -> dict[str, tuple[set[int] | None, set[int]]]:
    """Each fleet's own users, and those that may be its."""
    found = lives(watch, *pids)
    return {name: (None if live.own is None else set(live.own), set(live.unclear)) for name, live in found.items()}


def test_a_units_workers_are_its_own_whatever_their_environment(proc: Proc, follow: Follow) -> None:
    """A server has the mask, its workers hold the memory and have written their titles over their environments: they
    count for no mask, and their use is the unit's.
    """
    proc.add(10, "0,1", group=IN_UNIT)
    proc.add(11, "0,1", group=IN_UNIT, parent=10, overwritten=True)
    proc.add(12, None, group=IN_UNIT, parent=10)
    proc.add(13, "0", group="/system.slice/other.service")
    watch = follow(UNIT)
    assert own(watch, 11, 12, 13) == {"embed": ({11, 12}, set())}
    assert lives(watch, 11, 12, 13)["embed"].pids == frozenset()
    assert lives(watch, 10, 11)["embed"].pids == {10}
    assert own(watch) == {"embed": (set(), set())}


def test_parts_with_different_masks_have_their_own(proc: Proc, follow: Follow) -> None:
    """What does not count belongs to the part with its masks; of what has others, or none that can be told, nobody
    knows which part it is of.
    """
    for pid, mask in [(10, "0"), (11, "1"), (12, "1")]:
        proc.add(pid, mask, group=IN_UNIT)
    proc.add(13, "0", group=IN_UNIT, overwritten=True)
    proc.add(14, None, group=IN_UNIT)
    watch = follow(UNIT)
    found = lives(watch, 10, 11, 12, 13, 14)
    assert sorted(map(sorted, (live.own or () for live in found.values()))) == [[10], [11, 12]]
    assert {live.unclear for live in found.values()} == {frozenset({13, 14})}


def test_what_a_pid_files_process_has_started_is_its_own(proc: Proc, follow: Follow, tmp_path: Path) -> None:
    """Whatever masks it has; not what was left to the first process, nor a stranger, however new it is."""
    proc.add(10, "0")
    proc.add(11, "1", parent=10)
    proc.add(12, None, parent=11)
    proc.add(13, None, parent=1)
    (tmp_path / "pid").write_text("10\n")
    watch = follow(FleetSettings(name="file", runtime="cuda", pid_file=str(tmp_path / "pid")))
    proc.add(14, None, parent=12, started=now())
    proc.add(15, None, parent=1, started=now())
    assert own(watch, 11, 12, 13, 14, 15) == {"file": ({11, 12, 14}, set())}


def test_what_a_matching_process_has_started_is_of_the_fleet_of_the_nearest(proc: Proc, follow: Follow) -> None:
    """Workers have other command lines than their servers; one server may have started the other."""
    proc.add(10, "0", command="serve a")
    proc.add(11, "1", command="serve b", parent=10)
    proc.add(12, "0", command="worker", parent=10)
    proc.add(13, "1", command="worker", parent=11)
    watch = follow(SERVERS)
    found = {
        min(live.own or ()): (set(live.own or ()), set(live.unclear)) for live in lives(watch, 10, 11, 12, 13).values()
    }
    assert found == {10: ({10, 12}, set()), 11: ({11, 13}, set())}


def test_what_a_control_groups_process_has_started_elsewhere_is_not_its_own(proc: Proc, follow: Follow) -> None:
    """As a job of Slurm's daemon, which is put in a group of its own."""
    proc.add(10, "0", group=IN_UNIT)
    proc.add(11, "0", group="/job_7", parent=10)
    assert own(follow(UNIT, JOBS), 11) == {"embed": (set(), set()), "job-7": ({11}, set())}


def test_a_process_that_two_entries_find_is_both_ones(proc: Proc, follow: Follow) -> None:
    """Each fleet says what its own processes do."""
    proc.add(10, "0", group=IN_UNIT, command="serve")
    assert own(follow(UNIT, SERVERS), 10) == {"embed": ({10}, set()), "serve": ({10}, set())}


def test_a_process_that_no_look_has_seen_may_be_of_any_fleet(proc: Proc, follow: Follow) -> None:
    """Until the next look, which is at once: it is the job's then, and no longer of doubt for the other."""
    proc.add(10, "0", group=IN_UNIT)
    proc.add(20, "1", group="/job_7")
    watch = follow(UNIT, JOBS)
    proc.add(21, "1", group="/job_7", started=now())
    assert own(watch, 10, 21) == {"embed": ({10}, {21}), "job-7": (set(), {21})}
    wait_for(lambda: own(watch, 10, 21) == {"embed": ({10}, set()), "job-7": ({21}, set())})


def test_who_has_ended_uses_nothing(proc: Proc, follow: Follow) -> None:
    """Its memory is free again; and who has its number by now had it not yet when the device's users were told."""
    for pid in (10, 11, 12):
        proc.add(pid, "0", group=IN_UNIT)
    watch = follow(UNIT)
    asked = now()
    proc.end(11)
    proc.add(12, "0", group=IN_UNIT, started=now() + 1)
    live = lives(watch, 10, 11, 12, 99, asked=asked)["embed"]
    assert (live.own, live.unclear) == (frozenset({10}), frozenset())


def test_another_program_in_a_process_may_or_may_not_be_the_fleets(proc: Proc, follow: Follow) -> None:
    """Also when the use was told before the program was seen."""
    before = now()
    proc.add(10, "0", group=IN_UNIT)
    proc.add(11, "0", group=IN_UNIT)
    watch = follow(UNIT)
    early = lives(watch, 10, asked=before)["embed"]
    assert (early.own, early.unclear) == (frozenset(), frozenset({10}))
    proc.add(11, "1", group=IN_UNIT, stack=6)
    assert own(watch, 10, 11) == {"embed": ({10}, {11})}


def test_processes_that_are_not_shown_may_be_of_any_fleet(proc: Proc, follow: Follow) -> None:
    """Where other users' processes are hidden, a number without a process is no process that has ended."""
    proc.hide_others()
    proc.add(10, "0", group=IN_UNIT)
    assert own(follow(UNIT), 10, 4711) == {"embed": ({10}, {4711})}


def test_a_process_that_hangs_may_be_of_any_fleet(proc: Proc, follow: Follow) -> None:
    """What is asked of it is not answered, so nobody knows whose it is."""
    proc.add(10, "0", command="serve")
    proc.add(11, "0", command="serve")
    proc.hang(11, "cmdline")
    watch = follow(SERVERS, scan_seconds=0.05)
    wait_for(lambda: own(watch, 10, 11).get("serve") == ({10}, {11}), within=15.0)


@pytest.mark.parametrize("link", ["pid:[4026532577]", None])
def test_numbers_of_a_container_are_not_the_drivers(tmp_path: Path, link: str | None) -> None:
    """In a namespace of its own the exporter sees other numbers than drivers tell: nothing is known of any use."""
    proc = Proc(tmp_path)
    (tmp_path / "self/ns/pid").unlink()
    if link:
        (tmp_path / "self/ns/pid").symlink_to(link)
    proc.add(10, "0", group=IN_UNIT)
    watch = Watch([UNIT], procfs=str(tmp_path), sysfs="/sys", most=5, scan_seconds=600)
    watch.start()
    assert own(watch, 10) == {"embed": (None, set())}
    watch.stop()
