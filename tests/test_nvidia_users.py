"""Who computes on NVIDIA's cards and MIG devices, as the real worker tells the parent over the pretend NVML."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exporter.catalog import DEFAULT, SHARES, selection
from exporter.model import VendorSample
from exporter.wire import HEADER, Answer, Ask, decode_answer, frame
from tests.backend_host import state, values
from tests.fakes import shared_object
from tests.fakes.nvml import FakeNvml, Mig, build_or_skip, equal_cards
from tests.fakes.sysfs import FakeSys, OtherCard
from tests.harness import clean_environment

pytestmark = pytest.mark.e2e

CLOCK = Path(__file__).parent / "fakes/clock.c"
CALL = "nvmlDeviceGetComputeRunningProcesses_v3"
EVERYTHING = {"utilization", "memory_free", "memory_used", "memory_total", "temperature"}
FIRST, SECOND = (card.uuid or "" for card in equal_cards(2))
PARTS = tuple(
    Mig(index=index, uuid=f"MIG-0000000{index}-0000-5000-8000-000000000000", gi=7 + index, ci=0) for index in (0, 2)
)
DIVIDED = dataclasses.replace(equal_cards(1)[0], mig=1, util=None, instances=PARTS)


class AskedWorker:
    """The worker as a process of its own, which is asked over a socket as its parent asks."""

    def __init__(self, fake: FakeNvml, *flags: str, **more: str) -> None:
        """``more`` is of its environment."""
        self._ours, theirs = socket.socketpair()
        self._ours.settimeout(20)
        with theirs:
            command = [sys.executable, "-m", "exporter.worker", "nvidia", *flags]
            environment = clean_environment({**fake.environment(), **more})
            self.process = subprocess.Popen(command, env=environment, stdin=theirs.fileno())
        self._cycle = 0

    def end(self) -> None:
        """It leaves when its parent is gone."""
        self._ours.close()
        self.process.wait(20)

    def ask(self, *, users: bool = True, within: float = 10.0) -> Answer:
        """A cycle."""
        self._cycle += 1
        self._ours.sendall(frame(Ask(self._cycle, time.monotonic() + within, users)))
        (length,) = HEADER.unpack(self._receive(HEADER.size))
        return decode_answer(self._receive(length))

    def read(self, *, users: bool = True, within: float = 10.0) -> VendorSample:
        """A cycle's sample."""
        answer = self.ask(users=users, within=within)
        assert answer.sample is not None, answer.fault
        return answer.sample

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._ours.recv(size - len(data))
            assert piece, "the worker left"
            data += piece
        return data


Work = Callable[..., AskedWorker]


@pytest.fixture
def work() -> Iterator[Work]:
    with contextlib.ExitStack() as stack:

        def start(fake: FakeNvml, *flags: str, **more: str) -> AskedWorker:
            worker = AskedWorker(fake, *flags, **more)
            stack.callback(worker.end)
            return worker

        yield start


def users(sample: VendorSample) -> dict[str, set[int]]:
    """Processes by the identity of what they compute on."""
    found: dict[str, set[int]] = {}
    for user in sample.users:
        found.setdefault(user.key.identity, set()).add(user.pid)
    return found


def told(sample: VendorSample) -> set[str]:
    """The devices of which all processes were told."""
    return {key.identity for key in sample.users_of}


def test_each_card_has_its_own_processes(nvml: FakeNvml, work: Work) -> None:
    """A process may be on several cards, a card may have many processes, and the number 0 is no process."""
    many = [f"process 1 {pid}" for pid in range(1000, 1200)]
    nvml.write(equal_cards(4), lines=["process 0 4711", "process 1 4711", "process 2 0", *many])
    assert users(work(nvml).read()) == {FIRST: {4711}, SECOND: {4711, *range(1000, 1200)}}


def test_processes_that_come_and_go_are_seen(nvml: FakeNvml, work: Work) -> None:
    """Each cycle tells who computes now."""
    worker = work(nvml)
    assert users(worker.read()) == {}
    nvml.write(equal_cards(4), lines=["process 1 4711"])
    assert users(worker.read()) == {SECOND: {4711}}
    nvml.write(equal_cards(4), lines=["process 0 4711"])
    assert users(worker.read()) == {FIRST: {4711}}


def test_nobody_is_looked_for_unless_asked(nvml: FakeNvml, work: Work, tmp_path: Path) -> None:
    """Without the question the library is not called, though the worker was asked before."""
    log = tmp_path / "calls"
    nvml.write(equal_cards(2), lines=["process 0 4711", f"log {log}"])
    worker = work(nvml)
    assert users(worker.read(users=False)) == {}
    assert CALL not in log.read_text()
    assert users(worker.read()) == {FIRST: {4711}}
    unasked = worker.read(users=False)
    assert (users(unasked), told(unasked)) == ({}, set())


def test_processes_are_told_with_what_they_hold_and_do(nvml: FakeNvml, work: Work) -> None:
    """In each of NVML's three lists: what draws forbids no mask, and clients of MPS compute as others do."""
    lines = [
        "process 0 4711 memory=1000",
        "process 0 4712 memory=2000 draws",
        "process 0 4713 mps",
        "process 0 4711 draws",
    ]
    nvml.write(equal_cards(2), lines=lines)
    sample = work(nvml).read()
    assert [(user.pid, user.memory_bytes, user.does) for user in sample.users] == [
        (4711, 1000, "computes"),
        (4712, 2000, "draws"),
        (4713, None, "computes"),
    ]
    assert told(sample) == {FIRST, SECOND}


@pytest.mark.parametrize("name", ["Compute", "Graphics", "MPSCompute"])
def test_a_list_that_is_kept_from_this_user_is_not_an_empty_one(nvml: FakeNvml, work: Work, name: str) -> None:
    """Who is on the card is not known then, whichever of the three it is."""
    nvml.write(equal_cards(2), lines=[f"fault nvmlDeviceGet{name}RunningProcesses_v3 0 4"])
    assert told(work(nvml).read()) == {SECOND}


@pytest.mark.parametrize("name", ["Graphics", "MPSCompute"])
def test_a_card_without_such_a_list_has_none_in_it(nvml: FakeNvml, work: Work, name: str) -> None:
    """A card that cannot draw has no list of who does."""
    nvml.write(equal_cards(2), lines=["process 0 4711", f"fault nvmlDeviceGet{name}RunningProcesses_v3 0 3"])
    sample = work(nvml).read()
    assert (users(sample), told(sample)) == ({FIRST: {4711}}, {FIRST, SECOND})


def test_mig_devices_have_the_processes_and_their_board_has_none(nvml: FakeNvml, work: Work) -> None:
    """NVML would tell the board all of its parts' processes, and a process on one part does not use the board."""
    nvml.write([DIVIDED], lines=["process 0 4711 0", "process 0 4712 2", "process 0 4713 2"])
    sample = work(nvml).read()
    assert users(sample) == {PARTS[0].uuid: {4711}, PARTS[1].uuid: {4712, 4713}}
    assert told(sample) == {part.uuid for part in PARTS}


@pytest.mark.parametrize("code", [2, 3, 4, 7, 13, 999])
def test_a_list_that_is_not_given_costs_nothing_else(nvml: FakeNvml, work: Work, code: int) -> None:
    """Not supported, no permission, too many new processes or any other error: the card is read, and has no fault."""
    nvml.write(equal_cards(2), lines=["process 0 4711", "process 1 4712", f"fault {CALL} 0 {code}"])
    sample = work(nvml).read()
    assert (users(sample), told(sample)) == ({SECOND: {4712}}, {SECOND})
    assert values(sample, FIRST).keys() == EVERYTHING
    assert (sample.faults, state(sample, FIRST)) == ((), "ok")


def test_an_older_driver_has_no_such_list(tmp_path: Path, work: Work) -> None:
    """A driver without the call is read as before."""
    fake = FakeNvml(tmp_path, build_or_skip(tmp_path / "lib", [CALL]))
    fake.write(equal_cards(2), lines=["process 0 4711"])
    sample = work(fake).read()
    assert (users(sample), told(sample)) == ({}, set())
    assert sample.faults == ()
    assert values(sample, FIRST).keys() == EVERYTHING


def test_a_card_lost_in_that_call_is_lost(nvml: FakeNvml, work: Work) -> None:
    """As in any other call, and the other card keeps its readings and its processes."""
    worker = work(nvml)
    worker.read()
    nvml.write(equal_cards(2), lines=["process 0 4711", "process 1 4712", f"fault {CALL} 0 15"])
    sample = worker.read()
    assert [state(sample, uuid) for uuid in (FIRST, SECOND)] == ["lost", "ok"]
    assert users(sample) == {SECOND: {4712}}
    assert values(sample, SECOND).keys() == EVERYTHING


def test_a_library_lost_in_that_call_ends_the_worker(nvml: FakeNvml, work: Work) -> None:
    """A driver that is not loaded any more takes the backend down, to be started anew."""
    nvml.write(equal_cards(1), lines=[f"fault {CALL} 0 9"])
    answer = work(nvml).ask()
    assert answer.fault is not None
    assert (answer.fault.reason, answer.final) == ("driver-not-loaded", True)


def test_a_card_that_hangs_in_that_call_is_alone_in_it(nvml: FakeNvml, work: Work) -> None:
    """Its lane waits; the other card answers within the cycle, with its processes."""
    worker = work(nvml)
    worker.read()
    nvml.write(equal_cards(2), lines=["process 1 4712", f"hang {CALL} 0"])
    sample = worker.read(within=1.0)
    assert [state(sample, uuid) for uuid in (FIRST, SECOND)] == ["hung", "ok"]
    assert (users(sample), told(sample)) == ({SECOND: {4712}}, {SECOND})


# --- what they hold and do


DRAWING = "nvmlDeviceGetGraphicsRunningProcesses_v3"
DOING = "nvmlDeviceGetProcessUtilization"
NOT_AVAILABLE = 2**64 - 1


def uses(sample: VendorSample) -> dict[tuple[str, int], tuple[int | None, float | None]]:
    """What each process holds and does, by the card and the process."""
    return {(user.key.identity, user.pid): (user.memory_bytes, user.utilization) for user in sample.users}


def test_a_process_has_its_memory_and_its_share(nvml: FakeNvml, work: Work) -> None:
    """Those that draw are users too, one in both lists once; a share is of the time since the cycle before."""
    lines = (
        "process 0 4711 memory=1000 sm=25",
        "process 0 4711 memory=1000 draws",
        "process 0 4712 memory=2000 draws sm=50",
        f"process 0 4713 memory={NOT_AVAILABLE}",
        "process 1 4711 memory=3000 sm=75",
    )
    nvml.write(equal_cards(2), lines=lines)
    worker = work(nvml)
    first = uses(worker.read())
    assert first == {
        (FIRST, 4711): (1000, None),
        (FIRST, 4712): (2000, None),
        (FIRST, 4713): (None, None),
        (SECOND, 4711): (3000, None),
    }
    assert uses(worker.read()) == {
        (FIRST, 4711): (1000, 0.25),
        (FIRST, 4712): (2000, 0.5),
        (FIRST, 4713): (None, 0.0),
        (SECOND, 4711): (3000, 0.75),
    }


def test_who_does_nothing_has_a_share_of_nothing(nvml: FakeNvml, work: Work) -> None:
    """The driver has samples of the busy alone, and says "not found" where there is none; a driver that cannot tell
    says so too, from the start.
    """
    idle = ["process 0 4711 memory=1000", "process 1 4712 memory=2000"]
    nvml.write(equal_cards(2), lines=["process 0 4711 memory=1000 sm=25", idle[1]])
    worker = work(nvml)
    worker.read()
    assert uses(worker.read()) == {(FIRST, 4711): (1000, 0.25), (SECOND, 4712): (2000, None)}
    nvml.write(equal_cards(2), lines=idle)
    assert uses(worker.read()) == {(FIRST, 4711): (1000, None), (SECOND, 4712): (2000, None)}  # none is due yet
    time.sleep(2.1)
    assert uses(worker.read()) == {(FIRST, 4711): (1000, 0.0), (SECOND, 4712): (2000, None)}
    nvml.write(equal_cards(2), lines=[idle[0], "process 1 4712 memory=2000 sm=75"])
    assert uses(worker.read()) == {(FIRST, 4711): (1000, 0.0), (SECOND, 4712): (2000, 0.75)}


def test_what_processes_do_is_not_asked_where_nobody_wants_it(nvml: FakeNvml, work: Work, tmp_path: Path) -> None:
    """Who they are is, as evidence."""
    log = tmp_path / "calls"
    nvml.write(equal_cards(1), lines=["process 0 4711 memory=1000 sm=25", f"log {log}"])
    asked = selection(exclude=["gpu_fleet_utilization_ratio"]).asked
    worker = work(nvml, f"--metrics={','.join(sorted(asked))}")
    worker.read()
    assert uses(worker.read()) == {(FIRST, 4711): (1000, None)}
    assert DOING not in log.read_text(encoding="utf-8")
    assert selection().asked == DEFAULT == asked | {SHARES}


def test_memory_is_of_the_list_that_tells_it(nvml: FakeNvml, work: Work) -> None:
    """One of the two lists may not know what a process holds."""
    nvml.write(equal_cards(1), lines=["process 0 4711", "process 0 4711 memory=1000 draws"])
    assert uses(work(nvml).read()) == {(FIRST, 4711): (1000, None)}


def test_a_share_that_is_none_is_absent(nvml: FakeNvml, work: Work) -> None:
    """A sample of all ones is no share, and no other process gets it."""
    nvml.write(equal_cards(1), lines=["process 0 4711 sm=4294967295", "process 0 4712 sm=40"])
    worker = work(nvml)
    worker.read()
    assert uses(worker.read()) == {(FIRST, 4711): (None, None), (FIRST, 4712): (None, 0.4)}


def test_the_clock_is_set_back(nvml: FakeNvml, work: Work, tmp_path: Path) -> None:
    """Samples are timed by it: those of before are ahead then, and what is newer than they is not waited for."""
    clock = tmp_path / "clock.so"
    shared_object.compiled(shared_object.compiler(), CLOCK, clock, shared_object.shared(clock.name))
    nvml.write(equal_cards(1), lines=["process 0 4711 sm=90"])
    worker = work(nvml, LD_PRELOAD=str(clock), FAKE_CLOCK=str(tmp_path / "offset"))
    worker.read()
    assert uses(worker.read()) == {(FIRST, 4711): (None, 0.9)}
    (tmp_path / "offset").write_text("-3600", encoding="ascii")
    assert uses(worker.read()) == {(FIRST, 4711): (None, None)}
    assert uses(worker.read()) == {(FIRST, 4711): (None, 0.9)}


def test_a_sample_of_a_time_to_come_is_garbage(nvml: FakeNvml, work: Work) -> None:
    """It says nothing, and those that follow are told as ever."""
    nvml.write(equal_cards(1), lines=["process 0 4711 sm=90"])
    worker = work(nvml)
    worker.read()
    nvml.write(equal_cards(1), lines=[f"process 0 4711 sm=90 at={2**63}"])
    assert uses(worker.read()) == {(FIRST, 4711): (None, None)}
    nvml.write(equal_cards(1), lines=["process 0 4711 sm=80"])
    assert uses(worker.read()) == {(FIRST, 4711): (None, 0.8)}


def test_an_old_sample_is_not_told_again(nvml: FakeNvml, work: Work) -> None:
    """The driver gives those after the last one; that there is none yet is not that nobody does anything."""
    at = int(time.time() * 1e6) - 500_000
    nvml.write(equal_cards(1), lines=["process 0 4711 sm=90"])
    worker = work(nvml)
    worker.read()
    assert uses(worker.read()) == {(FIRST, 4711): (None, 0.9)}
    nvml.write(equal_cards(1), lines=[f"process 0 4711 sm=90 at={at}"])
    assert uses(worker.read()) == {(FIRST, 4711): (None, None)}


def test_a_card_that_came_back_may_have_another_device_file(nvml: FakeNvml, work: Work, tmp_path: Path) -> None:
    """The kernel gives each card that comes the first minor number that is free; also between two cycles."""
    cards = equal_cards(2)
    tree = FakeSys(tmp_path / "trees")
    listed = [OtherCard(pci=(card.pci or "")[4:]) for card in cards]
    tree.write(listed)
    nvml.write(cards)
    worker = work(nvml, f"--path.sysfs={tree.sys}")
    assert [device.minor_number for device in worker.read().devices] == [1, 0]
    for card in listed:
        folder = tree.device(card.pci)
        folder.resolve().rename(tmp_path / card.pci)  # keeps its number, which the next one has not then
    tree.write(listed)
    nvml.write([dataclasses.replace(card, minor=place) for place, card in enumerate(cards)])
    for _ in range(2):
        found = worker.read().devices
        assert [(device.minor_number, device.opened_by) for device in found] == [(0, ("nvidia0",)), (1, ("nvidia1",))]


def test_garbage_alone_says_nothing_of_anybody(nvml: FakeNvml, work: Work) -> None:
    """That others did nothing would be said by samples of somebody."""
    nvml.write(equal_cards(1), lines=["process 0 4711 sm=37100", "process 0 4712"])
    worker = work(nvml)
    worker.read()
    assert uses(worker.read()) == {(FIRST, 4711): (None, None), (FIRST, 4712): (None, None)}


def test_a_mig_device_tells_no_shares(nvml: FakeNvml, work: Work, tmp_path: Path) -> None:
    """They would be of the whole board."""
    log = tmp_path / "calls"
    nvml.write([DIVIDED], lines=["process 0 4711 0 memory=1000 sm=25", f"log {log}"])
    worker = work(nvml)
    worker.read()
    assert uses(worker.read()) == {(PARTS[0].uuid, 4711): (1000, None)}
    assert DOING not in log.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("call", "code"), [*((DRAWING, code) for code in (2, 3, 6, 13)), *((DOING, code) for code in (2, 3, 4, 6, 13, 999))]
)
def test_what_else_fails_costs_no_process(nvml: FakeNvml, work: Work, call: str, code: int) -> None:
    """Who computes is known by a call of its own, whatever those fail with that tell more."""
    lines = ("process 0 4711 memory=1000 sm=25", "process 1 4712 memory=2000 sm=50")
    nvml.write(equal_cards(2), lines=[*lines, f"fault {call} 0 {code}"])
    worker = work(nvml)
    worker.read()
    sample = worker.read()
    assert uses(sample) == {(FIRST, 4711): (1000, None if call == DOING else 0.25), (SECOND, 4712): (2000, 0.5)}
    assert sample.faults == ()


@pytest.mark.parametrize("call", [DRAWING, DOING])
def test_a_card_lost_in_those_calls_is_lost(nvml: FakeNvml, work: Work, call: str) -> None:
    """As in any other."""
    nvml.write(equal_cards(2), lines=["process 0 4711", "process 1 4712", f"fault {call} 0 15"])
    worker = work(nvml)
    sample = worker.read()
    assert users(sample) == {SECOND: {4712}}
