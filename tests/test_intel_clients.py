"""How busy an Intel card is by its clients, and by ``intel_gpu_top`` where these cannot be seen."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.backends.intel import clients, gpu_top
from exporter.backends.intel.client_meter import ClientMeter
from exporter.backends.intel.clients import Scan
from exporter.backends.intel.gpu_top import GpuTop
from exporter.model import Hint, VendorSample
from tests.backend_host import hints, state, values
from tests.fakes.sysfs import Client, FakeSys, IntelCard, Process
from tests.harness import Start
from tests.test_intel_backend import ARC_A, ARC_B, IGPU, Host, daemon_on

MILLISECOND = 1_000_000
XE, I915 = ARC_B, ARC_A


@pytest.fixture
def no_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A search path with one folder, in which there is no program."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def cycles(client: int, *, pid: int = 70, card: IntelCard = XE, fds: tuple[int, ...] = (5,), **busy: int) -> Client:
    """A client of xe; ``total`` is the clock of all its classes."""
    total = busy.pop("total")
    spent = {name: (value, total) for name, value in busy.items()}
    return Client(pid=pid, pci=card.pci, client_id=client, fds=fds, cycles=spent)


def read_all(fake: FakeSys, card: IntelCard, *moments: Sequence[Client]) -> list[float | None]:
    """The card's utilization at each moment."""
    host = None
    found = []
    for each in moments:
        fake.write([card], each)
        host = host or Host(fake)
        found.append(values(host.read(), card.pci).get("utilization"))
    return found


# --- counters


def test_cycles_are_counted_over_all_cycles_f56(fake: FakeSys) -> None:
    """F56: from 100 of 1000 to 600 of 2000 is 50 %, and the first cycle has none."""
    assert read_all(fake, XE, [cycles(1, rcs=100, total=1000)], [cycles(1, rcs=600, total=2000)]) == [None, 50]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ([], [], 0),
        ([], [cycles(1, rcs=600, total=2000)], None),  # the clock has no earlier reading
        ([], [cycles(1, rcs=0, total=2000)], 0),
        ([cycles(1, rcs=5, total=1000)], [], None),  # what it did before it ended is not known
        ([cycles(1, rcs=5, total=1000)], [cycles(1, rcs=5, total=2000)], 0),
        # The busiest class counts.
        ([cycles(1, rcs=0, bcs=0, total=0)], [cycles(1, rcs=100, bcs=700, total=1000)], 70),
        # Several clients of one class, in one process or in two.
        ([cycles(1, rcs=0, total=0), cycles(2, pid=71, rcs=9, total=0)],
         [cycles(1, rcs=300, total=1000), cycles(2, pid=71, rcs=259, total=1000)], 55),
        ([cycles(1, rcs=0, total=0), cycles(2, fds=(6,), rcs=9, total=0)],
         [cycles(1, rcs=300, total=1000), cycles(2, fds=(6,), rcs=259, total=1000)], 55),
        # One client under several descriptors, and in a forked process.
        ([cycles(1, fds=(5, 6), rcs=0, total=0), cycles(1, pid=71, rcs=0, total=0)],
         [cycles(1, fds=(5, 6), rcs=300, total=1000), cycles(1, pid=71, rcs=300, total=1000)], 30),
        # A newer client did all that it did since; of an older one that was not seen it is not known.
        ([cycles(4, rcs=0, total=0)], [cycles(4, rcs=0, total=1000), cycles(9, pid=71, rcs=400, total=1000)], 40),
        ([cycles(4, rcs=0, total=0)], [cycles(4, rcs=0, total=1000), cycles(3, pid=71, rcs=400, total=1000)], None),
        # So it is with one of several.
        ([cycles(4, rcs=0, total=0), cycles(5, pid=71, rcs=800, total=0)], [cycles(4, rcs=100, total=1000)], None),
        # A counter that goes back is as it was, and so is the clock.
        ([cycles(4, rcs=500, total=1000)], [cycles(4, rcs=400, total=2000)], 0),
        ([cycles(4, rcs=500, total=1000)], [cycles(4, rcs=600, total=900)], None),
        ([cycles(4, rcs=500, total=1000)], [cycles(4, rcs=600, total=1000)], None),
        # Nothing done in no time is not idle.
        ([cycles(4, rcs=500, total=1000)], [cycles(4, rcs=500, total=1000)], None),
        ([cycles(4, rcs=500, total=1000)], [cycles(4, rcs=500, total=900)], None),
        # A little more than all is all; far more is no value.
        ([cycles(4, rcs=0, total=0)], [cycles(4, rcs=1010, total=1000)], 100),
        ([cycles(4, rcs=0, total=0)], [cycles(4, rcs=9000, total=1000)], None),
    ],
)  # fmt: skip
def test_what_two_moments_make(
    fake: FakeSys, before: list[Client], after: list[Client], expected: float | None
) -> None:
    """The share of the busiest class since the moment before, or nothing."""
    assert read_all(fake, XE, before, after)[1] == expected


def test_a_counter_that_went_back_is_not_counted_twice(fake: FakeSys) -> None:
    """500, 400, 500: nothing was done; the kernel asks that the larger value be kept."""
    moments = [
        [cycles(4, rcs=spent, total=total)] for spent, total in ((500, 0), (400, 1000), (500, 2000), (600, 3000))
    ]
    assert read_all(fake, XE, *moments) == [None, 0, 0, 10]


def test_a_class_of_several_engines_is_busy_when_all_are(fake: FakeSys) -> None:
    """Its capacity is in the same file."""

    def at(spent: int, total: int) -> list[Client]:
        return [replace(cycles(1, vcs=spent, rcs=0, total=total), capacities={"vcs": 4})]

    assert read_all(fake, XE, at(0, 0), at(2000, 1000)) == [None, 50]


def test_nanoseconds_are_counted_over_the_real_time(fake: FakeSys) -> None:
    """I915 has no clock of its own; one of two video engines busy for half of the time is a quarter."""

    def at(video: int) -> list[Client]:
        engines = {"video": 5_000 * MILLISECOND + video, "render": 7}
        return [Client(pid=70, pci=I915.pci, client_id=1, engines=engines, capacities={"video": 2})]

    fake.write([I915], at(0))
    host = Host(fake)
    started = time.monotonic_ns()
    host.read()
    time.sleep(0.2)
    fake.write([I915], at(100 * MILLISECOND))
    shown = values(host.read(), I915.pci)["utilization"]
    elapsed = time.monotonic_ns() - started
    assert 50 * MILLISECOND / elapsed * 100 <= shown <= 25


def test_cards_have_their_own_clients(fake: FakeSys) -> None:
    """One process that has three cards open, as their drivers say by PCI address, beside other files."""
    third = replace(XE, pci="0000:09:00.0", minor=6)
    cards = [XE, I915, third]

    def at(total: int, *busy: int) -> list[Client]:
        return [
            cycles(1, fds=(5,), rcs=busy[0], total=total),
            replace(cycles(1, fds=(6,), card=third, rcs=busy[1], total=total), node="card"),
            Client(pid=70, pci=I915.pci, client_id=1, fds=(7,), engines={"render": 0}),
        ]

    fake.write(cards, at(0, 0, 0), [Process(pid=80), Process(pid=81)])
    host = Host(fake)
    host.read()
    fake.write(cards, at(1000, 250, 800), [Process(pid=80), Process(pid=81)])
    sample = host.read()
    assert [values(sample, card.pci)["utilization"] for card in (XE, third, I915)] == [25, 80, 0]


def test_a_file_of_another_card_does_not_count(fake: FakeSys) -> None:
    """The driver's word goes before the node's name, which a container may choose."""
    fake.write([XE], [cycles(1, rcs=0, total=0)])
    host = Host(fake)
    host.read()
    fake.write([XE], [cycles(1, rcs=500, total=1000)])
    path = fake.proc / "70/fdinfo/5"
    text = path.read_text().replace(XE.pci, "0000:99:00.0")
    path.unlink()
    path.write_text(text)
    assert "utilization" not in values(host.read(), XE.pci)  # its client has ended
    assert values(host.read(), XE.pci)["utilization"] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make device files")
def test_a_node_is_known_by_its_number(fake: FakeSys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that calls the second card's node by the first's name does not hide the client."""
    node = tmp_path / "renderD130"
    try:
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(226, 128 + XE.minor))
    except PermissionError:
        pytest.skip("no device file may be made here")
    monkeypatch.setattr(clients, "_NODES", f"{tmp_path}/")
    fake.write([XE, I915], [cycles(1, rcs=0, total=0)])
    link = fake.proc / "70/fd/5"
    link.unlink()
    renamed = node.rename(tmp_path / f"renderD{128 + I915.minor}")
    link.symlink_to(renamed)
    found = clients.scan(
        1, str(fake.proc), {f"renderD{128 + XE.minor}": XE.pci, f"renderD{128 + I915.minor}": I915.pci}
    )
    assert found.files == {XE.pci: (f"{fake.proc}/70/fdinfo/5",), I915.pci: ()}


def test_a_scan_is_used_once() -> None:
    """Where the next count comes late, there is no reading; and a scan that did not look for the card is none."""
    meter = ClientMeter(XE.pci)
    empty = {XE.pci: ()}
    first = [meter.percent(Scan(number, empty, None)) for number in (1, 2, 2, 3)]
    assert first == [None, 0, None, 0]
    assert [meter.percent(Scan(number, {}, None)) for number in (4, 5)] == [None, None]
    assert [meter.percent(Scan(number, empty, None)) for number in (6, 7)] == [None, 0]


# --- what hides clients


@pytest.mark.usefixtures("no_tools")
@pytest.mark.parametrize("card", [XE, I915], ids=["xe", "i915"])
@pytest.mark.parametrize("case", ["namespace", "no-proc-1", "old-kernel"])
def test_what_cannot_be_seen_is_no_utilization_f54(fake: FakeSys, card: IntelCard, case: str) -> None:
    """F54: it is absent and not 0, the temperature is there, a hint says what would help, and it recovers."""
    plain = Client(pid=70, pci=card.pci, client_id=1, engines={"render": 1}, cycles={"rcs": (1, 9)})
    old = replace(plain, pid=71, client_id=2, keys=False)
    seen = [old] if case == "old-kernel" else [plain]
    fake.write([card], seen, initial_pid_namespace=case != "namespace")
    if case == "no-proc-1":
        (fake.proc / "1/ns/pid").unlink()
    host = Host(fake)
    expected = {"namespace": "host-pid-namespace", "no-proc-1": "grant-cap-sys-ptrace"}.get(case, "newer-kernel")
    for _ in range(3):
        sample = host.read()
        assert "utilization" not in values(sample, card.pci)
        assert expected in hints(sample)
        assert ("install-intel-gpu-tools" in hints(sample)) == (card is I915)
    fake.write([card], [plain])
    assert "utilization" not in values(host.read(), card.pci)
    fake.write([card], [replace(plain, cycles={"rcs": (1, 19)})])
    sample = host.read()
    assert values(sample, card.pci)["utilization"] == 0
    assert hints(sample) == {"install-level-zero"}


def test_a_client_that_a_scan_missed_is_not_taken_for_idle(fake: FakeSys) -> None:
    """It was busy all the time: before it is seen twice in a row there is no value, and never 0."""
    steady = [cycles(1, rcs=0, total=1000 * step) for step in range(5)]
    busy = [cycles(2, pid=71, rcs=1000 * step, total=1000 * step) for step in range(5)]
    moments = [[steady[step]] if step == 1 else [steady[step], busy[step]] for step in range(5)]
    assert read_all(fake, XE, *moments) == [None, None, None, 100, 100]


def test_a_client_without_counters_beside_others_counts_nothing(fake: FakeSys) -> None:
    """A driver counts for all of its clients or for none; a number that is none is no counter."""
    odd = replace(cycles(2, rcs=0, total=0), pid=71, keys=False)
    host = Host(fake)
    for spent in (0, 250):
        fake.write([XE], [cycles(1, rcs=spent, total=4 * spent), odd])
        for path in (fake.proc / "71/fdinfo").glob("*"):
            path.write_text(f"drm-client-id:\ndrm-pdev:\t{XE.pci}\ndrm-cycles-rcs:\t{'9' * 5000}\n")
        sample = host.read()
    assert values(sample, XE.pci)["utilization"] == 25
    assert sample.faults == ()


UNPRIVILEGED = """
import sys
from dataclasses import replace
from pathlib import Path
from tests.fakes.sysfs import Client, FakeSys, Process
from tests.backend_host import hints, values
from tests.test_intel_backend import ARC_B, Host

fake, case = FakeSys(Path(sys.argv[1])), sys.argv[2]
client = Client(pid=70, pci=ARC_B.pci, client_id=1, cycles={"rcs": (1, 9)})
fake.write([ARC_B], [client], [Process(pid=80, readable=case != "process")])
if case == "fdinfo":
    (fake.proc / "70/fdinfo/5").chmod(0)
if case == "namespace":
    (fake.proc / "1/ns").chmod(0)
host = Host(fake)
for _ in range(2):
    sample = host.read()
    print(sorted(values(sample, ARC_B.pci)), "grant-cap-sys-ptrace" in hints(sample))
for total in (19, 29):
    fake.write([ARC_B], [replace(client, cycles={"rcs": (1, total)})], [Process(pid=80)])
    sample = host.read()
    print(sorted(values(sample, ARC_B.pci)), "grant-cap-sys-ptrace" in hints(sample))
"""


@pytest.mark.parametrize("case", ["process", "fdinfo", "namespace"])
def test_what_may_not_be_read_is_no_utilization_f54(tmp_path: Path, case: str) -> None:
    """F54: without the right to see every process there is none, and not the sum of what can be seen."""
    plain = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    command = [*plain, sys.executable, "-c", UNPRIVILEGED, str(tmp_path), case]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    assert found == [
        "['temperature'] True",
        "['temperature'] True",
        "['temperature'] False",
        "['temperature', 'utilization'] False",
    ]


@pytest.mark.parametrize("how", ["gone", "closed"])
def test_a_process_that_ends_while_it_is_read_is_no_fault(fake: FakeSys, how: str) -> None:
    """Its files go at any moment."""
    seen = [cycles(1, rcs=0, total=0), cycles(2, pid=71, rcs=0, total=0)]
    fake.write([XE], seen)
    host = Host(fake)
    host.read()
    if how == "gone":
        (fake.proc / "71/fdinfo/5").unlink()
    else:
        shutil.rmtree(fake.proc / "71/fdinfo")
    sample = host.read()
    assert sample.faults == ()
    assert hints(sample) == {"install-level-zero"}


def test_a_client_that_cannot_be_read_is_a_fault(fake: FakeSys) -> None:
    """The card has its other readings, and no utilization that lacks a client."""
    fake.write([XE], [cycles(1, rcs=0, total=0), cycles(2, pid=71, rcs=0, total=0)])
    host = Host(fake)
    host.read()
    path = fake.proc / "71/fdinfo/5"
    path.unlink()
    path.symlink_to("/proc/self/mem")
    sample = host.read()
    assert values(sample, XE.pci) == {"temperature": 48}
    assert [fault.reason for fault in sample.faults] == ["driver-error"]


def test_a_client_whose_file_hangs_costs_its_card_alone(fake: FakeSys) -> None:
    """The driver answers for the file, and the card is `hung`."""
    other = replace(XE, pci="0000:09:00.0", minor=6)
    fake.write([XE, other], [cycles(1, rcs=0, total=0), cycles(1, pid=71, card=other, rcs=0, total=0)])
    host = Host(fake)
    host.read()
    path = fake.proc / "71/fdinfo/5"
    path.unlink()
    os.mkfifo(path)
    sample = host.read(0.3)
    assert [state(sample, card.pci) for card in (XE, other)] == ["ok", "hung"]
    assert values(sample, other.pci) == {}
    fake.write([XE, other], [cycles(1, rcs=0, total=0), cycles(1, pid=71, card=other, rcs=0, total=0)])


# --- any history


Busy = dict[int, dict[str, int]]
CAPACITIES = {"rcs": 1, "ccs": 4}
COUNTS = st.integers(0, 3000)
CLIENTS = st.dictionaries(st.integers(1, 6), st.fixed_dictionaries({"rcs": COUNTS, "ccs": COUNTS}), max_size=4)
HISTORIES = st.lists(st.tuples(COUNTS, CLIENTS), min_size=2, max_size=6)


def plainly(history: Sequence[tuple[int, Busy]]) -> Iterator[float | None]:
    """The utilization at each moment, by hand."""
    kept: Busy = {}
    newest, clock_before, first = 0, None, True
    for clock, seen in history:
        now = {
            client: {name: max(value, kept.get(client, {}).get(name, 0)) for name, value in busy.items()}
            for client, busy in seen.items()
        }
        shares: list[float | None] = [] if seen else [0.0]
        shares += [None for client in now if client not in kept and client <= newest]
        for name, engines in CAPACITIES.items():
            did = 0
            for client, busy in now.items():
                if client in kept:
                    did += busy[name] - kept[client][name]
                elif client > newest:
                    did += busy[name]
            passed = 0 if clock_before is None else (clock - clock_before) * engines
            if not did and (clock_before is None or passed > 0):
                shares.append(0.0)
            elif did:
                shares.append(min(100.0, 100.0 * did / passed) if passed > 0 and did <= 1.1 * passed else None)
        known = [share for share in shares if share is not None]
        told = not first and len(known) == len(shares) and not kept.keys() - now.keys()
        yield max(known, default=None) if told else None
        kept, newest, first = now, max([newest, *now]), False
        clock_before = clock if seen else None


@settings(deadline=None, max_examples=60)
@given(history=HISTORIES)
def test_any_history_is_a_share_or_nothing(history: list[tuple[int, Busy]]) -> None:
    """From 0 to 100, and what a plain count gives."""
    meter, found = ClientMeter(XE.pci), []
    with tempfile.TemporaryDirectory() as folder:
        for number, (clock, seen) in enumerate(history):
            paths = []
            for client, busy in seen.items():
                lines = [f"drm-client-id:\t{client}", f"drm-pdev:\t{XE.pci}"]
                for name, spent in busy.items():
                    lines += [f"drm-cycles-{name}:\t{spent}", f"drm-total-cycles-{name}:\t{clock}"]
                    lines += [f"drm-engine-capacity-{name}:\t{CAPACITIES[name]}"]
                paths.append(f"{folder}/{client}")
                Path(paths[-1]).write_text("\n".join(lines))
            found.append(meter.percent(Scan(number, {XE.pci: tuple(paths)}, None)))
    assert all(value is None or 0 <= value <= 100 for value in found)
    assert found == [value if value is None else pytest.approx(value) for value in plainly(history)]


# --- intel_gpu_top

TOOL = """#!{python}
import os, sys, time
with open({folder!r} + "/started", "a") as file:
    file.write(str(os.getpid()) + " " + " ".join(sys.argv[1:]) + "\\n")
{body}
"""
PRINT = """
for text in {texts!r}:
    sys.stdout.write(text)
    sys.stdout.flush()
    time.sleep({pause})
time.sleep(60)
"""
DENIED = """
sys.stderr.write("Failed to initialize PMU! ({reason})\\n")
sys.exit(1)
"""


def member(name: str, values: Mapping[str, object]) -> str:
    inner = ",\n".join(f'\t\t"{key}": {json.dumps(value)}' for key, value in values.items())
    return f'\t"{name}": {{\n{inner}\n\t}}'


def engine(busy: float) -> str:
    return f'{{\n\t\t\t"busy": {busy:f},\n\t\t\t"sema": 0.000000,\n\t\t\t"wait": 0.000000,\n\t\t\t"unit": "%"\n\t\t}}'


def sample_of(engines: Mapping[str, float], duration: float = 1000.2, clients: Sequence[str] = ()) -> str:
    """An object as the program prints it: no line's end after the last brace."""
    listed = ",\n".join(f'\t\t"{name}": {engine(busy)}' for name, busy in engines.items())
    known = ",\n".join(
        f'\t\t"{4000 + number}": {{\n\t\t\t"name": "{name}",\n\t\t\t"pid": "{number}",\n\t\t\t"engine-classes": {{\n'
        f'\t\t\t\t"Render/3D": {{\n\t\t\t\t\t"busy": "0.000000",\n\t\t\t\t\t"unit": "%"\n\t\t\t\t}}\n\t\t\t}}\n\t\t}}'
        for number, name in enumerate(clients)
    )
    parts = [
        member("period", {"duration": duration, "unit": "ms"}),
        member("frequency", {"requested": 300.0, "actual": 299.5, "unit": "MHz"}),
        member("rc6", {"value": 45.3, "unit": "%"}),
        f'\t"engines": {{\n{listed}\n\t}}',
        *([f'\t"clients": {{\n{known}\n\t}}'] if clients else []),
    ]
    return "\n{\n" + ",\n".join(parts) + "\n}"


FIRST = sample_of({"Render/3D": 99}, duration=0.295595)
BY_CLASS = sample_of({"Render/3D": 12.5, "Blitter": 0, "Video": 48.25, "VideoEnhance": 7})
BY_ENGINE = sample_of({"Render/3D/0": 30, "Blitter/0": 0, "Video/0": 39.5, "Video/1": 11.5, "VideoEnhance/0": 0})


class Tool:
    """A pretend ``intel_gpu_top``, the one program on the search path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, body: str) -> None:
        """Its Python code."""
        path = self.folder / "intel_gpu_top"
        path.write_text(TOOL.format(python=sys.executable, folder=str(self.folder), body=body))
        path.chmod(0o755)

    def prints(self, *texts: str, pause: float = 0.0) -> None:
        """It prints these, with a pause in seconds after each, and then nothing for a minute."""
        self.write(PRINT.format(texts=texts, pause=pause))

    def started(self) -> list[tuple[int, str]]:
        """Each process so far, with its arguments."""
        path = self.folder / "started"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(line.split()[0]), line.partition(" ")[2]) for line in lines]

    def ends(self, within: float = 5.0) -> bool:
        """Whether no process of it is left by then."""
        until = time.monotonic() + within
        while any(Path(f"/proc/{pid}").exists() for pid, _ in self.started()):
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True


@pytest.fixture
def tool(no_tools: Path) -> Iterator[Tool]:
    made = Tool(no_tools)
    yield made
    for pid, _ in made.started():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def shown(top: GpuTop, within: float = 3.0) -> float | None:
    """The first value that it has."""
    until = time.monotonic() + within
    while (value := top.percent()) is None and time.monotonic() < until:
        time.sleep(0.01)
    return value


def told(top: GpuTop, within: float = 3.0) -> Hint | None:
    """The first hint that it has."""
    until = time.monotonic() + within
    top.percent()
    while top.hint is None and time.monotonic() < until:
        time.sleep(0.01)
    return top.hint


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["[\n", FIRST, ",", BY_CLASS], 48.25),
        (["[\n", FIRST, ",", BY_ENGINE], 30),
        ([FIRST, ",", BY_ENGINE], 30),  # before 1.28 there is no bracket
        ([FIRST + ",\n", BY_CLASS + ",\n"], 48.25),
        (["[\n" + FIRST, ",", BY_CLASS[:200], BY_CLASS[200:]], 48.25),
        (["[\n", FIRST, ",", sample_of({"Video": 100.4})], 100),
        (["[\n", FIRST, ",", sample_of({"Video": 3}, clients=["x" * 900] * 200)], 3),
        (["[\n", FIRST, ",", sample_of({"Video": 99}, clients=['a"b']), ",", BY_CLASS], 48.25),
        (["Old kernel.\n[\n", FIRST, ",", BY_CLASS], 48.25),
    ],
)  # fmt: skip
def test_the_busiest_class_of_the_last_period_is_shown(tool: Tool, texts: list[str], expected: float) -> None:
    """In every version's shape, as soon as the sample is there, and not the first, which is of no time at all."""
    tool.prints(*texts)
    top = GpuTop(I915.pci)
    assert shown(top) == expected
    assert [arguments for _, arguments in tool.started()] == [f"-J -s 1000 -d pci:slot={I915.pci}"]
    top.stop()
    assert tool.ends()
    assert top.percent() is None


@pytest.mark.e2e
@pytest.mark.parametrize(
    "text",
    [
        FIRST,
        sample_of({}),
        sample_of({"Video": -1}),
        BY_CLASS.replace("48.250000", "nan"),
        BY_CLASS.replace("48.250000", "48,250000"),
        BY_CLASS.replace("48.250000", '"N/A"'),
        BY_CLASS[:-20],
    ],
)
def test_what_is_no_value_is_not_shown(tool: Tool, text: str) -> None:
    """The first sample, no engines, and what is no share."""
    tool.prints("[\n", text)
    top = GpuTop(I915.pci)
    assert shown(top, within=0.15) is None
    top.stop()


@pytest.mark.e2e
def test_a_value_is_dropped_when_it_is_old(tool: Tool) -> None:
    """Where the tool goes silent nothing is shown."""
    tool.prints("[\n", FIRST, ",", BY_CLASS)
    top = GpuTop(I915.pci)
    assert shown(top) == 48.25
    time.sleep(2.6)
    assert top.percent() is None
    top.stop()


@pytest.mark.e2e
@pytest.mark.parametrize("reason", ["Permission denied", "Operation not permitted"])
def test_the_right_that_the_tool_lacks_is_a_hint_f54(tool: Tool, reason: str) -> None:
    """F54: it ends at once and says so."""
    tool.write(DENIED.format(reason=reason))
    assert told(GpuTop(I915.pci)) == gpu_top.NO_RIGHT


@pytest.mark.e2e
def test_another_failure_of_the_tool_is_not_about_rights(tool: Tool) -> None:
    """And it is not started again at once."""
    tool.write(DENIED.format(reason="No such file or directory"))
    top = GpuTop(I915.pci)
    assert shown(top, within=0.2) is None
    assert top.hint is None
    assert len(tool.started()) == 1


@pytest.mark.e2e
@pytest.mark.usefixtures("no_tools")
@pytest.mark.parametrize("text", ["{", "{\n", '{\n"period": {"duration": 1000}, "engines": {}\n}\n', "[" * 100])
def test_a_tool_that_floods_is_stopped(tool: Tool, text: str) -> None:
    """What it writes is read in a time that grows with its length, and it is not read for ever."""
    tool.write(f"while True: sys.stdout.write({text!r} * 1000)")
    top = GpuTop(I915.pci)
    assert top.percent() is None
    assert tool.ends(within=10)
    assert top.percent() is None


def test_a_missing_tool_is_a_hint() -> None:
    assert told(GpuTop(I915.pci)) == gpu_top.NOT_INSTALLED


def until(host: Host, holds: Callable[[VendorSample], bool], within: float = 4.0) -> VendorSample:
    ends = time.monotonic() + within
    while not holds(sample := host.read()):
        assert time.monotonic() < ends, sample
        time.sleep(0.02)
    return sample


@pytest.mark.e2e
def test_the_tool_runs_while_the_clients_of_an_i915_card_cannot_be_seen_f54(fake: FakeSys, tool: Tool) -> None:
    """F54: not for xe, nor while they can be seen, nor for a card that sleeps or is given away."""
    tool.prints("[\n", *[f",{BY_CLASS}"] * 400, pause=0.02)
    clients = [Client(pid=70, pci=I915.pci, client_id=1, engines={"render": 1})]
    fake.write([I915, XE], clients)
    host = Host(fake)
    for _ in range(2):
        host.read()
    assert tool.started() == []
    fake.write([I915, XE], clients, initial_pid_namespace=False)
    sample = until(host, lambda sample: "utilization" in values(sample, I915.pci))
    assert values(sample, I915.pci)["utilization"] == 48.25
    assert "utilization" not in values(sample, XE.pci)
    assert [arguments for _, arguments in tool.started()] == [f"-J -s 1000 -d pci:slot={I915.pci}"]
    for cards, hidden in (
        ([I915, XE], False),
        ([replace(I915, runtime_status="suspended"), XE], True),
        ([replace(I915, driver="vfio-pci"), XE], True),
    ):
        fake.write(cards, clients if cards[0] == I915 else [], initial_pid_namespace=not hidden)
        host.read()
        assert tool.ends()
        fake.write([I915, XE], clients, initial_pid_namespace=False)
        until(host, lambda sample: "utilization" in values(sample, I915.pci))


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_tool_ends_with_the_daemon(fake: FakeSys, tool: Tool, start: Start, number: int) -> None:
    """It writes to nobody then; and nothing of it appears in the daemon's own output."""
    tool.prints("[\n", *[f",{BY_CLASS}"] * 600, pause=0.1)
    fake.write([IGPU], initial_pid_namespace=False)
    daemon = daemon_on(start, fake)
    page = daemon.scrape_until(lambda page: bool(page.of("gpu_utilization_percent")))
    assert page.value("gpu_utilization_percent", pci_bus_id=IGPU.pci) == 48.25
    assert page.of("gpu_exporter_hint_info") == []  # nothing is missing
    daemon.stop(number)
    assert tool.ends()
    assert "engines" not in daemon.log
