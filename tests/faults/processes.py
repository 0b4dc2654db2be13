"""What befalls the daemon as a process: its clock is set, its descriptors or its disk run out, its settings go."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from tests.fakes import shared_object
from tests.faults.expectation import Expect
from tests.faults.matrix import Act, Row, Scene
from tests.harness import PROGRAM, clean_environment

HOURS = 3600
CLOCK = Path(__file__).parents[1] / "fakes/clock.c"
SUCCESSFUL = "gpu_exporter_config_last_reload_successful"
LOADED = "gpu_exporter_config_last_reload_success_timestamp_seconds"

# --- the wall clock


def _clock(scene: Scene) -> Mapping[str, str]:
    """Built anew for each row, which takes a tenth of a second."""
    library = scene.directory / "clock.so"
    shared_object.compiled(shared_object.compiler(), CLOCK, library, shared_object.shared(library.name))
    return {"LD_PRELOAD": str(library), "FAKE_CLOCK": str(scene.directory / "clock")}


def _set_clock(seconds: int) -> Act:
    def act(scene: Scene) -> None:
        scene.notes["offset"] = seconds
        (scene.directory / "clock").write_text(f"{seconds}\n")

    return act


def _is_off(scene: Scene) -> None:
    """The daemon has that clock: it says when its settings were loaded."""
    if scene.stage != "at once":
        return
    _hang_up(scene)
    now, offset = time.time(), scene.notes["offset"]
    until = time.monotonic() + 10
    while abs(scene.look().scrape.value(LOADED) - now - offset) > HOURS / 2:
        if time.monotonic() > until:
            scene.wrong("the daemon's clock has not been set: this row tests nothing")
            return
        time.sleep(0.1)


def _back_and_forward(scene: Scene) -> None:
    for hours in (-5, 7, -9):
        _set_clock(hours * HOURS)(scene)
        scene.look()


CLOCKS = [
    Row(
        name=f"the wall clock is set back and forward{mode}",
        environment=_clock,
        inflict=_back_and_forward,
        heal=_set_clock(0),
        also=_is_off,
        sampling=sampling,
        lag=lag,
    )
    for mode, sampling, lag in (
        ("", "reuse_seconds: 0.9, deadline_seconds: 4", 1.5),
        (", with background sampling", "interval_seconds: 0.5, deadline_seconds: 4", 3.0),
    )
]

# --- file descriptors


def _limit(pid: int, most: int | None = None) -> None:
    """So many more descriptors may be opened; None: as many as before."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    used = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    free = [number for number in range(len(used) + 64) if number not in used]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard if most is None else free[most], hard))


def _none_left(scene: Scene) -> None:
    """Whoever connects meanwhile waits, and has a page as soon as a descriptor is free; waiting costs no processor."""
    pid = scene.daemon.process.pid
    time.sleep(0.5)  # the last page's connection is closed a moment after it
    _limit(pid, 0)
    answers: list[str] = []
    first = scene.truth.tick

    def scrape() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # at the end there may be none
            page = scene.truth.look(scene.daemon, first=first)
            answers.extend(["a page", *page.complaints])

    thread = threading.Thread(target=scrape, daemon=True)
    before = _processor_seconds(pid)
    thread.start()
    thread.join(3)
    if answers or _processor_seconds(pid) - before > 1.5:
        scene.wrong(f"without a descriptor: {answers}, {_processor_seconds(pid) - before} s of a processor in 3 s")
    if scene.stage == "at the end":
        return
    _limit(pid)
    thread.join(10)
    scene.wrong(*(answers[1:] if answers else ["who waited has no page"]))


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _no_new_worker(scene: Scene) -> None:
    """A worker dies, and there are descriptors for a page and for no other worker."""
    pid, worker = scene.daemon.process.pid, scene.worker("nvidia")
    os.kill(worker, signal.SIGKILL)
    until = time.monotonic() + 5
    while worker in scene.daemon.workers() and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.5)
    _limit(pid, 1)


def _enough(scene: Scene) -> None:
    _limit(scene.daemon.process.pid)


def _starved(vendor: str) -> Act:
    return lambda scene: _limit(scene.worker(vendor), 0)


def _fed(vendor: str) -> Act:
    def act(scene: Scene) -> None:
        for pid in scene.daemon.workers(vendor):
            _limit(pid)

    return act


DESCRIPTORS = [
    Row(name="the daemon has no descriptor left, and again some", inflict=_none_left),
    Row(
        name="the daemon has no descriptors for a new worker",
        inflict=_no_new_worker,
        heal=_enough,
        at_once=Expect(down={"nvidia": "crashed"}),
        later=Expect(down={"nvidia": "crashed"}, counted=[("nvidia", "crashed")]),
    ),
    *(
        Row(
            name=f"a worker has no descriptors left: {vendor}",
            inflict=_starved(vendor),
            heal=_fed(vendor),
            at_once=Expect(down={vendor: "driver-error"}),
            later=Expect(down={vendor: "driver-error|up"}),
            heals_within=40,
        )
        for vendor in ("amd", "intel")
    ),
]

# --- settings

JOINS = 4.5  # a reload begins a cycle, which may take so long, and pages join it
LIFECYCLE = ("--web.enable-lifecycle",)
BROKEN = "fleets: [{name: x, runtme: cuda}]\n"


def _hang_up(scene: Scene) -> None:
    scene.daemon.process.send_signal(signal.SIGHUP)


def _write_settings(scene: Scene, text: str | None) -> None:
    path = scene.daemon.config_path
    if text is None:
        path.unlink(missing_ok=True)
        return
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def _good(scene: Scene) -> str:
    return scene.truth.config(scene.row.sampling, scene.row.settings)


def _reload_with(text: str | None) -> Act:
    def act(scene: Scene) -> None:
        refused = scene.daemon.log.count("settings not loaded")
        _write_settings(scene, text)
        _hang_up(scene)
        until = time.monotonic() + 10
        while scene.daemon.log.count("settings not loaded") == refused and time.monotonic() < until:
            time.sleep(0.02)

    return act


def _reload_badly(scene: Scene) -> None:
    for text in (None, BROKEN, "fleets: {}\n", "\x00\n"):
        _reload_with(text)(scene)
        scene.look()


def _reload_well(scene: Scene) -> None:
    _write_settings(scene, _good(scene))
    answer = scene.daemon.request("/-/reload", "POST")
    if answer.status != 200:
        scene.wrong(f"the good settings are answered {answer.status}: {answer.body.decode()}")


def _says_so(scene: Scene) -> None:
    wanted = 1.0 if scene.stage == "healed" else 0.0
    if (found := scene.look().scrape.value(SUCCESSFUL)) != wanted:
        scene.wrong(f"the settings' last load counts as {found}")


def _many_reloads(scene: Scene) -> None:
    """Good files and broken ones, signals and calls, all at once; the last is a good one."""

    def call() -> None:
        for _ in range(5):
            with contextlib.suppress(OSError, http.client.HTTPException):
                scene.daemon.request("/-/reload", "POST")

    callers = [threading.Thread(target=call, daemon=True) for _ in range(4)]
    for caller in callers:
        caller.start()
    for turn in range(20):
        _write_settings(scene, (BROKEN, None, _good(scene))[turn % 3])
        _hang_up(scene)
        time.sleep(0.02)
    for caller in callers:
        caller.join(30)
    _reload_well(scene)


def _many_reloads_and_mend(scene: Scene) -> None:
    _many_reloads(scene)
    scene.truth.mend()


RELOADS = [
    Row(
        name="a reload finds no file, and broken ones",
        flags=LIFECYCLE,
        lag=JOINS,
        inflict=_reload_badly,
        heal=_reload_well,
        also=_says_so,
    ),
    Row(name="many reloads at once, of good files and broken ones", flags=LIFECYCLE, lag=JOINS, inflict=_many_reloads),
    Row(
        name="many reloads at once while a scrape waits",
        when="waiting",
        hold={"nvidia": ("slow nvmlDeviceGetMemoryInfo_v2 * 1000",)},
        flags=LIFECYCLE,
        lag=JOINS,
        inflict=_many_reloads_and_mend,
    ),
]

# --- a full disk

_FULL = """
mount -t tmpfs -o size=8k,nr_inodes=8 none "$1" && cd "$1" && echo "the page before" > page && shift
head -c 4096 /dev/zero > filler
"$@"; echo "status $?"
cat page; ls -A
"""


def _full_disk(scene: Scene) -> None:
    """``once --output`` on a full disk leaves the page before as it was, and nothing beside it."""
    folder = scene.directory / f"full{scene.truth.tick}"
    folder.mkdir()
    config = scene.daemon.config_path
    command = [*PROGRAM, "once", f"--config.file={config}", *scene.truth.flags(), "--output=page"]
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", _FULL, "sh", folder, *command],
        env=clean_environment(scene.truth.environment() | {"PYTHONPATH": str(Path(__file__).parents[2])}),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if done.stdout.splitlines() != ["status 1", "the page before", "filler", "page"]:
        scene.wrong(f"on a full disk: {done.stdout!r} {done.stderr!r}")
    if done.stderr.splitlines() != [f"gpu-fleet-exporter: {folder}/page: cannot be written: No space left on device"]:
        scene.wrong(f"on a full disk it says {done.stderr!r}")


def _full_output(scene: Scene) -> None:
    """Standard output that takes nothing is told as that."""
    command = [*PROGRAM, "once", f"--config.file={scene.daemon.config_path}", *scene.truth.flags()]
    with Path("/dev/full").open("wb") as full:
        environment = clean_environment(scene.truth.environment())
        done = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, check=False, timeout=60)
    if (done.returncode, done.stderr) != (1, b"gpu-fleet-exporter: cannot write: No space left on device\n"):
        scene.wrong(f"a full standard output: {done.returncode}, {done.stderr!r}")


def _full(scene: Scene) -> None:
    _full_disk(scene)
    _full_output(scene)


OUTPUTS = [Row(name="the disk is full: once", inflict=_full)]

ROWS = [*CLOCKS, *DESCRIPTORS, *RELOADS, *OUTPUTS]
