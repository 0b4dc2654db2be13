"""Which processes use an Intel card, what they hold and do there, and each class of engines, by the card's clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from exporter.backends.base import Places
from exporter.backends.intel import IntelBackend
from exporter.catalog import DEFAULT
from exporter.model import DeviceKey, User, VendorSample
from exporter.worker import Worker
from tests.backend_host import BackendHost, everything, values
from tests.fakes.sysfs import Client, FakeSys, IntelCard, Process
from tests.fakes.ze_loader import Engine, FakeZeLoader, Gpu
from tests.harness import Start
from tests.test_intel_backend import ARC_A, ARC_B, IGPU, MAX_XE, daemon_on
from tests.test_intel_watched import own

MIB = 1 << 20
XE, I915 = ARC_B, ARC_A
SECOND = replace(XE, pci="0000:09:00.0", minor=6)


class Host(BackendHost):
    """The backend on the fake trees; with the number of processes where they are ``counted``."""

    def __init__(self, fake: FakeSys, library: str = "/nonexistent", *, counted: bool = False) -> None:
        wanted = DEFAULT | {"processes"} if counted else DEFAULT
        backend = IntelBackend(Places(str(fake.sys), str(fake.proc), library, "/x", wanted=wanted))
        super().__init__(backend)
        self.worker = Worker(backend, wanted)


def client(
    number: int,
    pid: int = 70,
    card: IntelCard = XE,
    *,
    total: int = 1000,
    vram: int | None = 0,
    fd: int = 5,
    **busy: int,
) -> Client:
    """A client of xe, with what it holds in MiB; ``busy`` are cycles of ``total`` since the start."""
    spent = {name: (busy.get(name, 0), total) for name in ("rcs", "ccs", "bcs", "vcs", "vecs")}
    memory = {} if vram is None else {"total-vram0": 99 * MIB, "resident-vram0": vram * MIB, "resident-system": 5 * MIB}
    return Client(pid=pid, pci=card.pci, client_id=number, fds=(fd,), cycles=spent, memory=memory)


def users(sample: VendorSample, card: IntelCard = XE) -> dict[int, User] | None:
    """By process; None where they cannot be told."""
    key = DeviceKey("intel", card.pci)
    return {user.pid: user for user in sample.users if user.key == key} if key in sample.users_of else None


# --- engines


def engines(fake: FakeSys, card: IntelCard, *moments: Sequence[Client]) -> list[dict[str, float]]:
    """The shares at each moment."""
    host, found = None, []
    for each in moments:
        fake.write([card], each)
        host = host or Host(fake)
        found.append(own("engine", everything(host.read(), card.pci)))
    return found


def test_each_class_of_engines_has_its_share(fake: FakeSys) -> None:
    """In one vocabulary; a class of several engines is busy when all are, and nobody's card is idle."""
    after = replace(client(1, total=2000, rcs=100, ccs=200, bcs=300, vcs=1000, vecs=500), capacities={"vcs": 2})
    before = replace(client(1), capacities={"vcs": 2})
    shares = {"render": 0.1, "compute": 0.2, "copy": 0.3, "video": 0.5, "video-enhance": 0.5}
    assert engines(fake, XE, [before], [after]) == [{}, shares]
    # Its client has ended, so what it did last is not known; then nobody is there.
    assert engines(fake, XE, [before], [after], [], []) == [{}, shares, {}, dict.fromkeys(shares, 0)]


def test_i915s_classes_have_the_same_names(fake: FakeSys) -> None:
    """Nanoseconds over the real time; a class of which nothing is known has no name here."""
    names = ("render", "compute", "copy", "video", "video-enhance", "other")

    def at(spent: int) -> list[Client]:
        return [Client(pid=70, pci=I915.pci, client_id=1, engines=dict.fromkeys(names, spent))]

    first, second = engines(fake, I915, at(5), at(5))
    assert (first, second) == ({}, dict.fromkeys(names[:-1], 0))


def test_a_class_that_is_not_known_leaves_all_out(fake: FakeSys) -> None:
    """An older client that was not seen before may have done anything."""
    found = engines(fake, XE, [client(4)], [client(4, total=2000), client(3, 71, total=2000, rcs=9)])
    assert found == [{}, {}]


# --- who uses a card


def test_users_are_told_with_what_they_hold_and_do(fake: FakeSys) -> None:
    """Each process by its own clients: those that compute, draw, or only have the card open."""
    before = [
        client(1, 70),
        client(2, 71, vram=3),
        client(3, 72),
        client(4, 70, vram=7, fd=6, ccs=5),
        client(5, 73, SECOND, vram=50, ccs=1),
    ]
    after = [
        client(1, 70, total=2000, rcs=100, vram=1),
        client(2, 71, total=2000, vcs=400, vram=3),
        client(3, 72, total=2000),
        client(4, 70, total=2000, vram=7, fd=6, ccs=305),
        client(5, 73, SECOND, total=2000, vram=50, ccs=1),
    ]
    fake.write([XE, SECOND], before)
    host = Host(fake)
    first = users(host.read(users=True))
    assert first is not None
    assert {pid: (user.memory_bytes, user.utilization, user.does) for pid, user in first.items()} == {
        70: (7 * MIB, None, "computes"),
        71: (3 * MIB, None, "nothing"),
        72: (0, None, "nothing"),
    }
    fake.write([XE, SECOND], after)
    sample = host.read(users=True)
    second, other = users(sample), users(sample, SECOND)
    assert second is not None
    assert {pid: (user.memory_bytes, user.utilization, user.does) for pid, user in second.items()} == {
        70: (8 * MIB, 0.3, "computes"),
        71: (3 * MIB, 0.4, "draws"),
        72: (0, 0.0, "nothing"),
    }
    assert other is not None
    assert {pid: (user.memory_bytes, user.utilization) for pid, user in other.items()} == {73: (50 * MIB, 0.0)}


def test_memory_is_what_the_driver_calls_the_cards_own(fake: FakeSys) -> None:
    """I915 says local, with what the firmware took apart; of an integrated card nothing is its own."""
    local = {
        "resident-local0": 2 * MIB + 1,
        "resident-stolen-local0": MIB,
        "total-local0": 9 * MIB,
        "resident-system0": 7,
    }
    fake.write(
        [I915, IGPU],
        [
            Client(pid=70, pci=I915.pci, client_id=1, engines={"render": 1}, memory=local),
            Client(pid=71, pci=I915.pci, client_id=2, engines={"render": 1}),
            Client(pid=72, pci=IGPU.pci, client_id=1, engines={"render": 1}, memory={"resident-system0": 7 * MIB}),
        ],
    )
    sample = Host(fake).read(users=True)
    discrete, integrated = users(sample, I915), users(sample, IGPU)
    assert discrete is not None
    assert integrated is not None
    assert {pid: user.memory_bytes for pid, user in discrete.items()} == {70: 3 * MIB + 1, 71: None}
    assert {pid: user.memory_bytes for pid, user in integrated.items()} == {72: None}


@pytest.mark.parametrize("text", ["7 MB", "-1", "many KiB", "99999999999999999999999"])
def test_a_size_that_is_none_is_not_known(fake: FakeSys, text: str) -> None:
    """Of the process, not of the card: no part of it is shown."""
    fake.write([XE], [client(1, vram=5), client(2, 71, vram=6)])
    path = fake.proc / "70/fdinfo/5"
    said = path.read_text().replace("resident-vram0:\t5 MiB", f"resident-vram0:\t{text}\ndrm-resident-vram1:\t1 KiB")
    path.unlink()
    path.write_text(said)
    found = users(Host(fake).read(users=True))
    assert found is not None
    assert {pid: user.memory_bytes for pid, user in found.items()} == {70: None, 71: 6 * MIB}


def test_whose_a_shared_client_is_is_not_known(fake: FakeSys) -> None:
    """Of a descriptor that several processes have, each may be the one that uses it; an idle one is nobody's."""
    shared = [client(1, pid, vram=4, ccs=9) for pid in (70, 71)]
    idle = [client(2, pid) for pid in (72, 73)]
    fake.write([XE], [*shared, *idle, client(3, 74, vram=1)])
    sample = Host(fake, counted=True).read(users=True)
    found = users(sample)
    assert found is not None
    assert {pid: (user.memory_bytes, user.does) for pid, user in found.items()} == {
        70: (None, None),
        71: (None, None),
        72: (0, "nothing"),
        73: (0, "nothing"),
        74: (MIB, "nothing"),
    }
    assert own("processes", everything(sample, XE.pci)) == {"": 2}  # one of the first two, and the last


def test_a_share_needs_all_of_a_processs_clients(fake: FakeSys) -> None:
    """Where one of them ended, what it did last is not known; other processes have theirs."""
    fake.write([XE], [client(1), client(2, fd=6), client(3, 71)])
    host = Host(fake)
    host.read(users=True)
    fake.write([XE], [client(1, total=2000, ccs=100), client(3, 71, total=2000, ccs=200)])
    sample = host.read(users=True)
    found = users(sample)
    assert found is not None
    assert {pid: user.utilization for pid, user in found.items()} == {70: None, 71: 0.2}
    assert "utilization" not in values(sample, XE.pci)


@pytest.mark.parametrize("case", ["namespace", "gone", "unreadable"])
def test_where_some_are_hidden_none_are_told(fake: FakeSys, case: str) -> None:
    """A list that may lack some says nothing of who uses the card, and there is no number of them."""
    fake.write([XE], [client(1, vram=5)], initial_pid_namespace=case != "namespace")
    if case == "gone":
        (fake.proc / "1/ns/pid").unlink()
        (fake.proc / "self/ns/pid").unlink()
    if case == "unreadable":
        path = fake.proc / "70/fdinfo/5"
        path.unlink()
        path.mkdir()
    sample = Host(fake, counted=True).read(users=True)
    assert users(sample) is None
    assert own("processes", everything(sample, XE.pci)) == {}


def test_a_card_without_clients_is_used_by_nobody(fake: FakeSys) -> None:
    """Which is a statement, also the number; of its tiles nothing is told."""
    fake.write([MAX_XE], [], [Process(pid=80)])
    sample = Host(fake, counted=True).read(users=True)
    assert users(sample, MAX_XE) == {}
    assert sample.users_of == (DeviceKey("intel", MAX_XE.pci),)
    assert own("processes", everything(sample, MAX_XE.pci)) == {"": 0}


def test_a_late_count_tells_nobody(fake: FakeSys) -> None:
    """Who had the card open in the cycle before says nothing of now."""
    fake.write([XE], [client(1, vram=5)])
    backend = IntelBackend(Places(str(fake.sys), str(fake.proc), "/nonexistent", "/x"))
    backend.slots()
    (device,) = backend.identify(XE.pci, lambda _: None)
    backend.sample(device)
    assert backend.users(device)
    backend.sample(device)
    assert backend.users(device) is None


def test_a_card_that_sleeps_has_no_users(fake: FakeSys) -> None:
    """To ask what its clients did would wake it."""
    fake.write([XE], [client(1, vram=5)])
    fake.set(XE.pci, "power/runtime_status", "suspended\n")
    path = fake.proc / "70/fdinfo/5"
    path.unlink()
    path.symlink_to("/dev/zero")
    sample = Host(fake, counted=True).read(3, users=True)
    assert (sample.users, sample.users_of, sample.readings) == ((), (), ())


@pytest.mark.e2e
def test_where_sysman_counts_clients_are_read_for_users_alone(fake: FakeSys, ze: FakeZeLoader) -> None:
    """The names of all open files are looked through once a cycle, only for who asks; the engines are Sysman's."""
    cards = [XE, SECOND]
    fake.write(cards, [client(1, vram=5, ccs=9), client(2, 71, SECOND, vram=6)])
    ze.write([Gpu(bdf=card.pci, engines=(Engine(rate=0.5), Engine(group="COMPUTE_ALL", rate=0.25))) for card in cards])
    host = Host(fake, str(ze.shared_object))
    host.read()  # Sysman has counted from now on
    assert users(host.read()) is None
    fake.write(cards, [client(1, vram=5, ccs=9), client(2, 71, SECOND, vram=6)])
    sample = host.read(users=True)
    assert [(user.key.identity, user.pid, user.memory_bytes, user.utilization) for user in sample.users] == [
        (XE.pci, 70, 5 * MIB, None),
        (SECOND.pci, 71, 6 * MIB, None),
    ]
    fake.write(cards, [client(1, vram=5, ccs=109, total=2000), client(2, 71, SECOND, vram=6, total=2000)])
    sample = host.read(users=True)
    assert [user.utilization for user in sample.users] == [0.1, 0.0]
    assert own("engine", everything(sample, XE.pci)) == pytest.approx({"compute": 0.25}, abs=0.02)


@pytest.mark.e2e
def test_the_daemon_counts_processes_where_the_settings_name_them(fake: FakeSys, start: Start) -> None:
    """Those that hold memory or have done something."""
    fake.write([XE], [client(1, vram=5), client(2, 71, vram=1), client(3, 72), client(4, 73, ccs=1)])
    config = "metrics: {include: [gpu_processes, gpu_engine_*]}\nfleets: [{name: host, runtime: host}]\n"
    config += "backends: [intel]\nlibraries: {intel: /nonexistent/libze_loader.so.1}\nsampling: {reuse_seconds: 0}\n"
    daemon = daemon_on(start, fake, config)
    page = daemon.scrape_until(lambda page: bool(page.of("gpu_processes")))
    assert [sample.value for sample in page.of("gpu_processes")] == [3]
