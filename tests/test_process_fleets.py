"""Fleets that follow live processes, on the real daemon: units, pid files, containers and jobs of one host, and what
becomes of each as its processes go and come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.fakes.nvml import FakeNvml, equal_cards
from tests.fleet_pages import CARDS, QUICK, Poller, cards, explain, fleets, masked, refusal
from tests.harness import Scrape, Start
from tests.process_host import NVIDIA, ProcessHost, Program, control_group, nvidia_files, process_host

pytestmark = pytest.mark.e2e

FIRST, SECOND, THIRD, FOURTH = CARDS
# Other runs of these tests may be on this machine.
MINE = os.getpid()
JOB = f"slurm-{MINE}"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ProcessHost]:
    """Four cards' files."""
    with process_host(tmp_path, nvidia_files(4)) as made:
        yield made


class Workload:
    """A workload of one process, its fleet's name, and the cards that its first and second mask leave."""

    name = ""
    first: Sequence[str] = ()
    second: Sequence[str] = ()

    def __init__(self, host: ProcessHost, folder: Path, stack: contextlib.ExitStack) -> None:
        self.host, self.folder, self.stack = host, folder, stack

    def settings(self) -> str:
        """The fleet's entry in the settings."""
        raise NotImplementedError

    def start(self, *, again: bool) -> Program:
        """The workload; ``again`` with the second mask."""
        raise NotImplementedError


class Unit(Workload):
    """One in a unit of systemd's."""

    name, first, second = "unit", [SECOND], [FIRST, THIRD]

    def __init__(self, host: ProcessHost, folder: Path, stack: contextlib.ExitStack) -> None:
        super().__init__(host, folder, stack)
        self.group = stack.enter_context(control_group(f"system.slice/embed{MINE}.service"))

    def settings(self) -> str:
        """As above."""
        return f"{{name: unit, systemd_unit: embed{MINE}}}"

    def start(self, *, again: bool) -> Program:
        """As above."""
        return self.host.run(masked("0,2" if again else "1"), cgroup=self.group)


class PidFile(Workload):
    """One that a pid file names."""

    name, first, second = "file", [FOURTH, FIRST], [SECOND]

    def settings(self) -> str:
        """As above."""
        return f"{{name: file, pid_file: {self.folder}/serve.pid}}"

    def start(self, *, again: bool) -> Program:
        """As above."""
        program = self.host.run(masked("1" if again else "3,0"))
        (self.folder / "serve.pid").write_text(f"{program.pid}\n")
        return program


class Container(Workload):
    """One that has two of the cards in a /dev of its own."""

    name, first, second = "boxed", [SECOND], [FOURTH]
    command = ("sleep", f"77{MINE}")

    def settings(self) -> str:
        """As above."""
        return f"{{name: boxed, process: {{command: '^sleep 77{MINE}$'}}}}"

    def start(self, *, again: bool) -> Program:
        """As above."""
        files = nvidia_files(4)
        del files["nvidia0"], files["nvidia2"]
        return self.host.contained(files, masked("1" if again else "0"), self.command)


class SlurmJob(Workload):
    """One that Slurm gave two of the cards, which it numbers from 0 as it does where it constrains devices."""

    name, first, second = JOB, [THIRD, FOURTH], [FOURTH]

    def __init__(self, host: ProcessHost, folder: Path, stack: contextlib.ExitStack) -> None:
        super().__init__(host, folder, stack)
        self.group = stack.enter_context(control_group(f"slurm/uid_0/job_{MINE}/step_0", "devices"))
        for minor in (0, 1):
            (self.group / "devices.deny").write_text(f"c {NVIDIA}:{minor} rwm")

    def settings(self) -> str:
        """As above."""
        return r"{name: 'slurm-{job}', cgroup: 'slurm/uid_0/job_(?P<job>\d+)/'}"

    def start(self, *, again: bool) -> Program:
        """As above."""
        if again:
            (self.group / "devices.deny").write_text(f"c {NVIDIA}:2 rwm")
        given = {"SLURM_JOB_GPUS": "3" if again else "2,3"}
        return self.host.run(masked("0" if again else "0,1") | given, cgroup=self.group)


@contextlib.contextmanager
def workloads(host: ProcessHost, folder: Path) -> Iterator[list[Workload]]:
    """One of each kind."""
    with contextlib.ExitStack() as stack:
        yield [kind(host, folder, stack) for kind in (Unit, PidFile, Container, SlurmJob)]


def config(*entries: str, head: str = QUICK) -> str:
    return head + "fleets:\n" + "".join(f"  - {entry}\n" for entry in entries)


@pytest.fixture
def sorted_nvml(nvml: FakeNvml) -> FakeNvml:
    """Cards whose device files' numbers rise with their indices: otherwise what Slurm's numbers mean is not known."""
    nvml.write([dataclasses.replace(card, minor=index) for index, card in enumerate(equal_cards(4))])
    return nvml


def all_cards(scrape: Scrape) -> dict[str, list[str]]:
    return {fleet: cards(scrape, fleet) for fleet in fleets(scrape)}


def test_every_kind_of_workload_shows_its_cards(
    host: ProcessHost, sorted_nvml: FakeNvml, tmp_path: Path, start: Start
) -> None:
    """A unit, a pid file, a container and a job on one host: the page has their cards, by UUID too, and so has
    `explain`.
    """
    with workloads(host, tmp_path) as kinds:
        for kind in kinds:
            kind.start(again=False)
        daemon = start(sorted_nvml.environment(), config(*(kind.settings() for kind in kinds)), [], host.within)
        scrape = daemon.scrape_until(lambda scrape: all_cards(scrape) == {kind.name: kind.first for kind in kinds})
        uuids = {card.uuid for card in equal_cards(4)[2:]}
        assert {row.labels["uuid"] for row in scrape.of("gpu_memory_free_bytes", fleet=JOB)} == uuids
        shown = explain(host, sorted_nvml.environment(), f"--config.file={daemon.config_path}")
    assert (shown.status, shown.cards()) == (0, {kind.name: kind.first for kind in kinds}), shown
    assert "Slurm gave it the cards 2,3" in shown.out
    assert "root has nvidia1, nvidia3\n" in shown.out


def test_the_kernel_holds_the_job_to_its_cards(host: ProcessHost, tmp_path: Path) -> None:
    """What the job's control group denies it cannot open, though it sees the files: so its numbers start at its own."""
    with contextlib.ExitStack() as stack:
        job = SlurmJob(host, tmp_path, stack)
        script = f"echo $$ > {job.group}/cgroup.procs; for n in 0 1 2 3; do : < /dev/nvidia$n; done"
        done = subprocess.run(
            host.within(["bash", "-c", script]), env=os.environ | {"LC_ALL": "C"}, capture_output=True, check=False
        )
    said = re.findall(rb"nvidia(\d): ([\w ]+)", done.stderr)
    assert [number for number, words in said if words == b"Operation not permitted"] == [b"0", b"1"]
    assert [number for number, _ in said] == [b"0", b"1", b"2", b"3"]


def test_where_slurms_numbers_may_mean_either_the_job_is_refused(
    host: ProcessHost, nvml: FakeNvml, tmp_path: Path, start: Start
) -> None:
    """Where files and indices count the cards in other orders, nobody guesses which of the two Slurm means."""
    with contextlib.ExitStack() as stack:
        job = SlurmJob(host, tmp_path, stack)
        job.start(again=False)
        daemon = start(nvml.environment(), config(job.settings()), [], host.within)
        daemon.scrape_until(lambda scrape: (refusal(scrape, JOB), cards(scrape, JOB)) == ("reach-unknown", []))


def test_a_mask_that_a_constrained_job_narrowed(
    host: ProcessHost, sorted_nvml: FakeNvml, tmp_path: Path, start: Start
) -> None:
    """Slurm has control groups for devices where it holds jobs to their cards: its numbers count those."""
    with contextlib.ExitStack() as stack:
        job = SlurmJob(host, tmp_path, stack)
        host.run(masked("1") | {"SLURM_JOB_GPUS": "2,3"}, cgroup=job.group)
        daemon = start(sorted_nvml.environment(), config(job.settings()), [], host.within)
        daemon.scrape_until(lambda scrape: cards(scrape, JOB) == [CARDS[3]])


@pytest.mark.parametrize("place", range(4), ids=["unit", "pid file", "container", "slurm job"])
def test_a_restart_shows_the_new_cards_and_never_again_the_old(
    host: ProcessHost, sorted_nvml: FakeNvml, tmp_path: Path, start: Start, place: int
) -> None:
    """While pages are asked for without pause: none that was begun after the old process ended has its cards, and the
    new one's are there soon and stay.
    """
    with workloads(host, tmp_path) as kinds:
        kind = kinds[place]
        old = kind.start(again=False)
        daemon = start(sorted_nvml.environment(), config(kind.settings()), [], host.within)
        daemon.scrape_until(lambda scrape: cards(scrape, kind.name) == kind.first)
        with Poller(daemon) as poller:
            time.sleep(0.3)
            old.end()
            ended = time.monotonic()
            time.sleep(0.4)
            kind.start(again=True)
            daemon.scrape_until(lambda scrape: cards(scrape, kind.name) == kind.second)
            seen = time.monotonic()
            time.sleep(0.6)
    after = [cards(scrape, kind.name) for scrape in poller.begun_after(ended)]
    assert all(found in ([], kind.second) for found in after)
    assert after[0] == []
    assert all(cards(scrape, kind.name) == kind.second for scrape in poller.begun_after(seen))
    assert cards(poller.pages[0].scrape, kind.name) == kind.first


def test_a_restart_without_a_pause_never_shows_the_old_cards(
    host: ProcessHost, sorted_nvml: FakeNvml, tmp_path: Path, start: Start
) -> None:
    """One process after the other, as a supervisor restarts them: no page shows what had ended when it was begun."""
    with contextlib.ExitStack() as stack:
        unit = Unit(host, tmp_path, stack)
        program = unit.start(again=False)
        daemon = start(sorted_nvml.environment(), config(unit.settings()), [], host.within)
        daemon.scrape_until(lambda scrape: cards(scrape, "unit") == unit.first)
        with Poller(daemon) as poller:
            for again in (True, False, True, False, True):
                old, new = (unit.first, unit.second) if again else (unit.second, unit.first)
                program.end()
                ended = time.monotonic()
                program = unit.start(again=again)
                daemon.scrape_until(partial(_shows, "unit", new))
                assert old not in [cards(scrape, "unit") for scrape in poller.begun_after(ended)]


def test_pages_that_are_made_at_an_interval_show_no_fleet_that_has_ended(
    host: ProcessHost, sorted_nvml: FakeNvml, tmp_path: Path, start: Start
) -> None:
    """Readings may be some seconds old; which fleets there are is not."""
    with contextlib.ExitStack() as stack:
        unit = Unit(host, tmp_path, stack)
        program = unit.start(again=False)
        head = "sampling: {scan_seconds: 0.25, interval_seconds: 10}\n"
        daemon = start(sorted_nvml.environment(), config(unit.settings(), head=head), [], host.within)
        daemon.scrape_until(lambda scrape: cards(scrape, "unit") == unit.first)
        program.end()
        assert cards(daemon.scrape(), "unit") == []
        unit.start(again=True)
        daemon.scrape_until(lambda scrape: cards(scrape, "unit") == unit.second, within=5)


def _shows(fleet: str, wanted: Sequence[str], scrape: Scrape) -> bool:
    return cards(scrape, fleet) == wanted


# --- several processes of one workload


def test_processes_with_other_masks_are_fleets_whose_names_last(
    host: ProcessHost, nvml: FakeNvml, start: Start
) -> None:
    """Two masks are two fleets whose endings are the same after the daemon is started anew; the same mask again is no
    third.
    """
    with control_group(f"system.slice/pair{MINE}.service") as group:
        for mask in ("0", "1,3", "0"):
            host.run(masked(mask), cgroup=group)
        settings = config(f"{{name: pair, systemd_unit: pair{MINE}}}")
        pages = []
        for _ in range(2):
            daemon = start(nvml.environment(), settings, [], host.within)
            pages.append(all_cards(daemon.scrape_until(lambda scrape: bool(fleets(scrape)))))
            daemon.stop()
        shown = explain(host, nvml.environment(), "pair", f"--config.file={daemon.config_path}")
    assert pages[0] == pages[1] == shown.cards()
    assert sorted(pages[0].values()) == [[FIRST], [SECOND, FOURTH]]
    assert all(re.fullmatch(r"pair/[0-9a-f]{8}", name) for name in pages[0])


def test_a_shell_that_started_the_workload_does_not_count(host: ProcessHost, nvml: FakeNvml, start: Start) -> None:
    """A launcher without masks is no fleet beside its masked child: there is one, under the name alone."""
    with control_group(f"system.slice/shell{MINE}.service") as group:
        host.run(
            {}, ("sh", "-c", "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=2 sleep 100000; true"), cgroup=group
        )
        daemon = start(nvml.environment(), config(f"{{name: shell, systemd_unit: shell{MINE}}}"), [], host.within)
        daemon.scrape_until(lambda scrape: all_cards(scrape) == {"shell": [THIRD]})


def test_a_process_with_a_gpu_open_counts_alone(host: ProcessHost, nvml: FakeNvml, start: Start) -> None:
    """Beside one that has a card's file open the others do not count, whatever their masks; when it ends they do."""
    with control_group(f"system.slice/open{MINE}.service") as group:
        host.run(masked("0"), cgroup=group)
        holding = host.run(masked("3"), holding=["nvidia3"], cgroup=group)
        daemon = start(nvml.environment(), config(f"{{name: open, systemd_unit: open{MINE}}}"), [], host.within)
        daemon.scrape_until(lambda scrape: all_cards(scrape) == {"open": [FOURTH]})
        holding.end()
        daemon.scrape_until(lambda scrape: all_cards(scrape) == {"open": [FIRST]})


# --- names that workloads fill in


def test_a_glob_of_units_is_a_fleet_each(host: ProcessHost, nvml: FakeNvml, start: Start) -> None:
    """``{unit}`` is the unit's own name; other units are none of the fleets, nor is one without masks."""
    with contextlib.ExitStack() as stack:
        for unit, mask in (("glob{}-a", "0"), ("glob{}-b", "1"), ("other{}", "2")):
            group = stack.enter_context(control_group(f"system.slice/{unit.format(MINE)}.service"))
            host.run(masked(mask), cgroup=group)
        group = stack.enter_context(control_group(f"system.slice/glob{MINE}-c.service"))
        host.run({}, cgroup=group)
        daemon = start(
            nvml.environment(), config(f"{{name: '{{unit}}', systemd_unit: 'glob{MINE}-*'}}"), [], host.within
        )
        wanted = {f"glob{MINE}-a.service": [FIRST], f"glob{MINE}-b.service": [SECOND]}
        daemon.scrape_until(lambda scrape: all_cards(scrape) == wanted)


def test_users_and_process_numbers_make_names(host: ProcessHost, nvml: FakeNvml, start: Start) -> None:
    """``{user}-{pid}``: the user's name, or the number of one that has none."""
    command = ("sleep", f"66{MINE}")
    root, stranger = host.run(masked("0"), command), host.run(masked("1"), command, user=54321)
    entry = f"{{name: '{{user}}-{{pid}}', process: {{command: '^sleep 66{MINE}$'}}}}"
    daemon = start(nvml.environment(), config(entry), [], host.within)
    wanted = {f"root-{root.pid}": [FIRST], f"54321-{stranger.pid}": [SECOND]}
    daemon.scrape_until(lambda scrape: all_cards(scrape) == wanted)


def test_no_more_fleets_than_may_be_and_always_the_same(host: ProcessHost, nvml: FakeNvml, start: Start) -> None:
    """Of five workloads the three that were started first are shown, the others are counted and said once; while
    others come and go it stays at these three.
    """
    with contextlib.ExitStack() as stack:
        units = [f"many{MINE}-{letter}.service" for letter in "edcba"]
        groups = [stack.enter_context(control_group(f"system.slice/{unit}")) for unit in units]
        programs = [_a_tick_later(partial(host.run, masked("0"), cgroup=group)) for group in groups]
        settings = config(
            f"{{name: '{{unit}}', systemd_unit: 'many{MINE}-*'}}", head=QUICK + "mapping: {max_fleets: 3}\n"
        )
        daemon = start(nvml.environment(), settings, [], host.within)
        scrape = daemon.scrape_until(lambda scrape: bool(fleets(scrape)))
        assert (fleets(scrape), scrape.value("gpu_exporter_fleets_left_out")) == (set(units[:3]), 2)
        assert daemon.log.count("fleets left out") == 1
        assert re.search(r"level=warn msg=\"fleets left out\" count=2", daemon.log)
        with Poller(daemon) as poller:
            programs[4].end()
            daemon.scrape_until(lambda scrape: scrape.value("gpu_exporter_fleets_left_out") == 1)
            host.run(masked("1"), cgroup=groups[4])
            daemon.scrape_until(lambda scrape: scrape.value("gpu_exporter_fleets_left_out") == 2)
        assert all(fleets(page.scrape) == set(units[:3]) for page in poller.pages)
        programs[0].end()
        daemon.scrape_until(lambda scrape: fleets(scrape) == set(units[1:4]))


def _a_tick_later(run: Callable[[], Program]) -> Program:
    """In another tick of the clock by which the kernel dates processes."""
    time.sleep(0.02)
    return run()
