"""Fleets of live processes that cannot be told: for want of rights, with an environment that was written over, or of no
process at all; and what of a workload is never told.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from exporter.refusals import REFUSALS
from tests.fakes.nvml import FakeNvml
from tests.fakes.shared_object import fail_in_ci_else_skip
from tests.fleet_pages import CARDS, ORDERED, QUICK, cards, explain, fleets, masked, refusal
from tests.harness import Daemon, Start
from tests.process_host import ProcessHost, Program, control_group, nvidia_files, process_host, wait_for

pytestmark = pytest.mark.e2e

FIRST, SECOND, THIRD, FOURTH = CARDS
MINE = os.getpid()
NOBODY, OTHER = 65534, 54321


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ProcessHost]:
    """Four cards' files."""
    with process_host(tmp_path, nvidia_files(4)) as made:
        yield made


class Following(NamedTuple):
    """What it takes to have a daemon follow one program."""

    host: ProcessHost
    nvml: FakeNvml
    folder: Path
    start: Start

    @property
    def flag(self) -> str:
        """The path of a file that is not there yet."""
        return str(self.folder / "flag")

    def by_pid_file(self, program: Program) -> Daemon:
        """A daemon with one fleet, ``file``."""
        (self.folder / "serve.pid").write_text(str(program.pid))
        settings = f"{QUICK}fleets: [{{name: file, pid_file: {self.folder}/serve.pid}}]"
        return self.start(self.nvml.environment(), settings, [], self.host.within)


@pytest.fixture
def following(host: ProcessHost, nvml: FakeNvml, tmp_path: Path, start: Start) -> Following:
    return Following(host, nvml, tmp_path, start)


# --- rights


class Rights:
    """A daemon of another user's, and the two workloads that it follows: one of its own user's, one of a third's."""

    def __init__(self, host: ProcessHost, nvml: FakeNvml, folder: Path) -> None:
        self.host, self.folder = host, folder
        here = Path(__file__).parents[1]
        for path in (folder, nvml.folder):
            path.chmod(0o755)
        host.open_to_others(Path(sys.base_prefix), Path(sys.prefix), here, folder, nvml.folder)
        self.environment = nvml.environment()
        own, others = host.run(masked("0"), user=NOBODY), host.run(masked("1"), user=OTHER)
        for name, program in (("own", own), ("others", others)):
            (folder / f"{name}.pid").write_text(str(program.pid))
        entries = (f"{{name: {name}, pid_file: {folder}/{name}.pid}}" for name in ("own", "others"))
        self.settings = f"{QUICK}fleets: [{', '.join(entries)}]"
        self.others = others.pid

    def within(self, *flags: str) -> Callable[[Sequence[str]], list[str]]:
        """What starts a command as the daemon's user."""
        drop = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *flags)
        tried = subprocess.run(
            self.host.within([*drop, sys.executable, "-c", "import exporter, subprocess"]), check=False
        )
        if tried.returncode:
            fail_in_ci_else_skip("another user than root cannot run this Python here")
        return lambda command: self.host.within([*drop, *command])


@pytest.fixture
def rights(host: ProcessHost, nvml: FakeNvml, tmp_path: Path) -> Rights:
    return Rights(host, nvml, tmp_path)


def test_without_rights_the_own_users_workloads_are_told_and_no_others(rights: Rights, start: Start) -> None:
    """The page has the cards of the one and refuses the other, and `explain` says what to do."""
    within = rights.within()
    daemon = start(rights.environment, rights.settings, [], within)
    daemon.scrape_until(lambda scrape: cards(scrape, "own") == [FIRST])
    daemon.scrape_until(lambda scrape: refusal(scrape, "others") == "no-permission")
    shown = explain(rights.host, rights.environment, f"--config.file={daemon.config_path}", through=within)
    assert (shown.status, shown.cards()) == (1, {"own": [FIRST], "others": []}), shown
    assert f"to do: {REFUSALS['no-permission'].advice}" in shown.out
    assert f"/proc/{rights.others}/environ: permission denied" in shown.out
    alone = explain(rights.host, rights.environment, "--pid", str(rights.others), through=within)
    assert alone.status == 1
    assert "refused: no-permission" in alone.out


def test_with_two_capabilities_every_users_workloads_are_told(rights: Rights, start: Start) -> None:
    """CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH are enough, without root."""
    two = "+sys_ptrace,+dac_read_search"
    within = rights.within(f"--inh-caps={two}", f"--ambient-caps={two}")
    daemon = start(rights.environment, rights.settings, [], within)
    daemon.scrape_until(lambda scrape: (cards(scrape, "own"), cards(scrape, "others")) == ([FIRST], [SECOND]))
    everything = explain(rights.host, rights.environment, "--all", through=within)
    assert everything.cards()[f"pid-{rights.others}"] == [SECOND]


# --- secrets

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "sk-51e7a9c0ffee",
    "HF_TOKEN": "0,3",  # it looks like a mask, and is none of ours
    "MY_DEVICES": "GPU-5ec2e75e-0000-4000-8000-000000000000",
    "CUDA_VISIBLE_DEVICES_NOTE": "n0te-b3hind-a-mask",
    "DATABASE_URL": "postgres://reader:pa55phrase@db/x",
    "ODD\udcffNAME": "0dd-val\udcfeue",
    "LD_PRELOAD_NOT": "/opt/pr3load.so",
}
PLANTED = ("sk-51e7a9c0ffee", "GPU-5ec2e75e", "n0te-b3hind", "pa55phrase", "0dd-val", "pr3load", "hunter2-on-the-line")
NAMES = ("AWS_SECRET", "HF_TOKEN", "MY_DEVICES", "_NOTE", "DATABASE_URL", "ODD")
ON_THE_LINE = "hunter2-on-the-line"


def test_nothing_of_a_workload_but_its_masks_is_told_anywhere(
    host: ProcessHost, nvml: FakeNvml, tmp_path: Path, start: Start
) -> None:
    """Keys, tokens and odd names in environments, and passwords on command lines, are on no page in any form, in no log
    and in nothing that `explain` prints; also of a workload whose masks are refused.
    """
    line = ("sh", "-c", "while true; do sleep 1000; done", f"serve{MINE}", "model-7", "--password", ON_THE_LINE)
    told = host.run(masked("2") | SECRETS, line)
    host.run({"CUDA_VISIBLE_DEVICES": "GPU-"} | SECRETS, (*line[:4], "model-8", *line[5:]))
    entry = rf"{{name: 'serve-{{model}}', process: {{command: 'serve{MINE} (?P<model>model-\d) .*hunter2'}}}}"
    daemon = start(nvml.environment(), f"{QUICK}fleets:\n  - {entry}\n", ["--log.level=debug"], host.within)
    daemon.scrape_until(lambda scrape: fleets(scrape) == {"serve-model-7", "serve-model-8"})
    texts = [_page(daemon.request(path, headers=headers).body) for path, headers in _REQUESTS]
    for arguments in ((f"--config.file={daemon.config_path}",), ("--pid", str(told.pid)), ("--all",)):
        shown = explain(host, nvml.environment(), *arguments)
        assert str(told.pid) in shown.out
        texts.append(shown.out + shown.error)
    daemon.stop()
    for text in (*texts, daemon.log):
        assert [secret for secret in (*PLANTED, *NAMES) if secret in text] == []
    assert "refused: token-dialect" in texts[-1]
    assert sum("CUDA_VISIBLE_DEVICES='2'" in text for text in texts) == 3


_OPEN_METRICS = "application/openmetrics-text; version=1.0.0"
_REQUESTS: tuple[tuple[str, dict[str, str]], ...] = (
    ("/metrics", {}),
    ("/metrics", {"Accept": _OPEN_METRICS}),
    ("/metrics", {"Accept": "text/plain; version=1.0.0; escaping=allow-utf-8", "Accept-Encoding": "gzip"}),
    ("/metrics?name[]=gpu_fleet_mask_refusal_info", {}),
    ("/", {}),
    ("/-/healthy", {}),
)


def _page(body: bytes) -> str:
    return (gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body).decode()


# --- environments that are none any more

# Writes over the memory that the kernel put the environment in, as programs do that set their title.
_OVERWRITES = """
import ctypes, sys, time
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
begin, end = int(fields[47]), int(fields[48])
title = sys.argv[1].encode().decode("unicode_escape").encode("latin-1")
pad = sys.argv[2].encode().decode("unicode_escape").encode("latin-1")
keep = int(sys.argv[3])
text = (title + pad * (end - begin))[: end - begin - keep]
ctypes.memmove(begin, text, len(text))
time.sleep(100000)
"""


@pytest.mark.parametrize(
    ("title", "pad", "keep"),
    [
        ("serve: idle", "\\0", 0),
        ("", "\\0", 0),
        ("serve: idle", " ", 1),
        ("serve: idle --model", "\\xff", 0),
        ("serve --port=80", "\\0", 0),
        ("serve --port=80", " ", 0),
        ("serve --port=80", " ", 1),
    ],
)
def test_an_environment_that_was_written_over_is_refused(following: Following, title: str, pad: str, keep: int) -> None:
    """Whatever a program writes there, its masks are not told, and it does not pass for one without masks."""
    program = following.host.run(masked("2"), (sys.executable, "-c", _OVERWRITES, title, pad, str(keep)))
    environ = Path(f"/proc/{program.pid}/environ")
    wait_for(lambda: b"CUDA_VISIBLE_DEVICES" not in environ.read_bytes())
    scrape = following.by_pid_file(program).scrape_until(lambda scrape: "file" in fleets(scrape))
    assert (refusal(scrape, "file"), cards(scrape, "file")) == ("environment-overwritten", [])


@pytest.mark.parametrize("title", ["serve", "serve --port=80 "])
def test_a_perl_program_that_sets_its_title_is_refused(following: Following, title: str) -> None:
    """Perl writes titles over arguments and environment, and blanks behind them."""
    perl = shutil.which("perl")
    if perl is None:
        fail_in_ci_else_skip("perl is not installed")
    command = (perl, "-e", f'while (!-e $ARGV[0]) {{ sleep 1 }} $0 = "{title}" x 100; sleep 100000', following.flag)
    program = following.host.run(masked("2"), command)
    Path(following.flag).touch()
    environ = Path(f"/proc/{program.pid}/environ")
    wait_for(lambda: b"CUDA_VISIBLE_DEVICES" not in environ.read_bytes())
    scrape = following.by_pid_file(program).scrape_until(lambda scrape: "file" in fleets(scrape))
    assert (refusal(scrape, "file"), cards(scrape, "file")) == ("environment-overwritten", [])


def test_an_environment_without_anything_is_one_without_masks(following: Following) -> None:
    """``env -i``: the process sees every card."""
    program = following.host.run({}, ("env", "-i", "sleep", "100000"), becomes=("sleep", "100000"))
    following.by_pid_file(program).scrape_until(lambda scrape: cards(scrape, "file") == list(CARDS))


# --- no process


def test_explain_says_that_there_is_no_such_process(host: ProcessHost, nvml: FakeNvml) -> None:
    """A number that nobody has is named, with status 1; text that is no number, and what does not go together, with
    status 2.
    """
    gone = explain(host, nvml.environment(), "--pid", "4194304")
    assert (gone.status, gone.out) == (1, "")
    assert "explain: no process 4194304 is running" in gone.error
    for arguments in (("--pid", "x"), ("--pid", ""), ("--pid", "1", "--all"), ("unit", "--pid", "1")):
        wrong = explain(host, nvml.environment(), *arguments)
        assert (wrong.status, wrong.out) == (2, ""), arguments
        assert "Traceback" not in wrong.error
    for number in ("0", "-1", "99999999999999999999"):
        gone = explain(host, nvml.environment(), "--pid", number)
        assert (gone.status, gone.out) == (1, ""), number
        assert f"no process {number} is running" in gone.error


def test_explain_shows_no_cards_for_a_thread_of_the_kernel(host: ProcessHost, nvml: FakeNvml) -> None:
    """Process 2 has no environment, and is no workload without masks."""
    shown = explain(host, nvml.environment(), "--pid", "2")
    assert shown.status == 1
    assert FIRST not in shown.out
    assert "process 2" in shown.error + shown.out


def test_explain_tells_a_process_that_has_ended_and_was_not_reaped_from_one_that_runs(
    host: ProcessHost, nvml: FakeNvml
) -> None:
    """What is left of a process until its parent asks for it is none."""
    program = subprocess.Popen(["true"], stdin=subprocess.DEVNULL)
    os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
    shown = explain(host, nvml.environment(), "--pid", str(program.pid))
    program.wait()
    assert (shown.status, shown.out) == (1, "")
    assert f"no process {program.pid} is running" in shown.error


@pytest.mark.parametrize(
    "text", ["", "\n", "x", "-5", "0", "4194304", "1e3", "9" * 63, "9" * 5000, "\udcff\udcc2", "²"], ids=ascii
)
def test_a_pid_file_with_anything_else_in_it_names_no_process(
    host: ProcessHost, nvml: FakeNvml, tmp_path: Path, text: str
) -> None:
    """The fleet's process is gone, and `explain` names the file."""
    path = tmp_path / "serve.pid"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    (tmp_path / "c.yaml").write_text(f"fleets: [{{name: file, pid_file: {path}}}]")
    shown = explain(host, nvml.environment(), f"--config.file={tmp_path}/c.yaml")
    assert shown.status == 1
    assert "refused: process-gone" in shown.out
    assert f"found: {path}"[:80] in shown.out


def test_a_fleet_without_a_process_waits_for_one(
    host: ProcessHost, nvml: FakeNvml, tmp_path: Path, start: Start
) -> None:
    """A unit that is not running, and a pid file that is not there, are refused until they are."""
    settings = f"""{QUICK}fleets:
  - {{name: unit, systemd_unit: late{MINE}}}
  - {{name: file, pid_file: {tmp_path}/late.pid}}
  - {{name: 'any-{{unit}}', systemd_unit: 'late{MINE}*'}}
"""
    daemon = start(nvml.environment(), settings, [], host.within)
    scrape = daemon.scrape_until(lambda scrape: fleets(scrape) == {"unit", "file"})
    assert (refusal(scrape, "unit"), refusal(scrape, "file")) == ("process-gone", "process-gone")
    with control_group(f"system.slice/late{MINE}.service") as group:
        program = host.run(ORDERED | {"CUDA_VISIBLE_DEVICES": "3"}, cgroup=group)
        (tmp_path / "late.pid").write_text(str(program.pid))
        wanted = {"unit", "file", f"any-late{MINE}.service"}
        daemon.scrape_until(lambda scrape: fleets(scrape) == wanted and not refusal(scrape, "unit"))
        daemon.scrape_until(lambda scrape: all(cards(scrape, fleet) == [FOURTH] for fleet in wanted))
        program.end()
    daemon.scrape_until(lambda scrape: fleets(scrape) == {"unit", "file"})


def test_a_pid_file_that_is_a_pipe_is_not_waited_for(
    host: ProcessHost, nvml: FakeNvml, tmp_path: Path, start: Start
) -> None:
    """Its fleet is refused, and the others are as ever."""
    os.mkfifo(tmp_path / "pipe.pid")
    program = host.run(masked("1"))
    (tmp_path / "good.pid").write_text(str(program.pid))
    entries = (f"{{name: {name}, pid_file: {tmp_path}/{name}.pid}}" for name in ("pipe", "good"))
    daemon = start(nvml.environment(), f"{QUICK}fleets: [{', '.join(entries)}]", [], host.within)
    began = time.monotonic()
    scrape = daemon.scrape_until(lambda scrape: cards(scrape, "good") == [SECOND])
    assert refusal(scrape, "pipe") == "process-gone"
    assert time.monotonic() - began < 10


def test_processes_that_cannot_be_listed_refuse_the_fleets_and_nothing_else(
    nvml: FakeNvml, tmp_path: Path, start: Start
) -> None:
    """A folder that is no procfs, or none at all: said once in the log, and the cards are shown as ever."""
    entries = "{name: unit, systemd_unit: x}, {name: host, runtime: host}"
    daemon = start(nvml.environment(), f"{QUICK}fleets: [{entries}]", [f"--path.procfs={tmp_path}/none"])
    daemon.scrape_until(lambda scrape: cards(scrape, "host") == list(CARDS))
    daemon.scrape_until(lambda scrape: refusal(scrape, "unit") == "process-gone")
    time.sleep(0.8)
    assert daemon.log.count("processes cannot be listed") == 1
    with contextlib.suppress(FileNotFoundError):
        (tmp_path / "none").mkdir()
    time.sleep(0.5)
    assert refusal(daemon.scrape(), "unit") == "process-gone"
