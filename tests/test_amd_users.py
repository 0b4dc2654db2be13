"""Who computes on AMD's cards and partitions, as the files of the KFD's processes tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from exporter.backends.amd import AmdBackend
from exporter.backends.base import Places
from exporter.model import VendorSample
from tests.backend_host import BackendHost, devices, values
from tests.fakes.sysfs import GIB, KFD, NODES, AmdCard, FakeSys, KfdNode, Process

MIB = 1 << 20
PROCESSES = "class/kfd/kfd/proc"
A = AmdCard(pci="0000:03:00.0", minor=1, kfd_nodes=(KfdNode(node=2, unique_id=0xA1),))
B = AmdCard(pci="0000:83:00.0", minor=0, kfd_nodes=(KfdNode(node=3, unique_id=0xB2),))
DPX = AmdCard(
    pci="0000:c1:00.0",
    minor=4,
    pci_class="0x120000",
    compute_partition="DPX",
    kfd_nodes=tuple(KfdNode(node=4 + part, partition=part, unique_id=0xC0 + part) for part in range(2)),
)
EVERYTHING = {"utilization", "memory_free", "memory_used", "memory_total", "temperature"}


class Host(BackendHost):
    """The backend on the fake trees."""

    def __init__(self, fake: FakeSys) -> None:
        super().__init__(AmdBackend(Places(str(fake.sys), str(fake.proc), root="/nonexistent")))


def users(sample: VendorSample) -> dict[str, set[int]]:
    """Processes by the identity of what they compute on."""
    found: dict[str, set[int]] = {}
    for user in sample.users:
        if user.does == "computes":
            found.setdefault(user.key.identity, set()).add(user.pid)
    return found


def told(sample: VendorSample) -> dict[str, dict[int, int | None]]:
    """What each process holds, by the identity of each device of which all processes were told; None of one of which
    it cannot be told whether it holds any.
    """
    found: dict[str, dict[int, int | None]] = {key.identity: {} for key in sample.users_of}
    for user in sample.users:
        assert (user.does is None) == (user.memory_bytes is None)
        found[user.key.identity][user.pid] = user.memory_bytes
    return found


def write(fake: FakeSys, *processes: Process) -> None:
    fake.write([A, B, DPX], processes=processes)


def place(fake: FakeSys, path: str, text: bytes) -> None:
    """Another text for a file below ``/sys``, put there at once."""
    new = fake.sys / ".text"
    new.write_bytes(text)
    new.replace(fake.sys / path)


def vram(fake: FakeSys, pid: int, node: int) -> str:
    """The file with what a process holds there."""
    return f"{PROCESSES}/{pid}/vram_{(fake.sys / NODES / str(node) / 'gpu_id').read_text().strip()}"


def test_a_process_is_on_the_cards_whose_memory_it_holds(fake: FakeSys) -> None:
    """Each process that has the KFD open has a file for every node; 32 MiB there are its own, less is the driver's."""
    write(
        fake,
        Process(pid=71, vram={2: GIB, 3: 31 * MIB, 4: 0, 5: 0}),
        Process(pid=72, vram={2: 2 * MIB, 3: 32 * MIB, 4: 2 * MIB, 5: 2 * MIB}),
        Process(pid=73, vram={2: 40 * GIB, 3: 40 * GIB}),
        Process(pid=74),
    )
    sample = Host(fake).read(users=True)
    assert users(sample) == {A.pci: {71, 73}, B.pci: {72, 73}}
    assert told(sample) == {
        A.pci: {71: GIB, 72: 2 * MIB, 73: 40 * GIB},
        B.pci: {71: 31 * MIB, 72: 32 * MIB, 73: 40 * GIB},
        f"{DPX.pci}/xcp0": {72: 2 * MIB},
        f"{DPX.pci}/xcp1": {72: 2 * MIB},
    }


def test_partitions_have_the_processes_and_their_card_has_none(fake: FakeSys) -> None:
    """Each partition is a node of its own, and no node is all of the card."""
    write(fake, Process(pid=71, vram={4: GIB, 5: MIB}), Process(pid=72, vram={4: GIB, 5: GIB}))
    assert users(Host(fake).read(users=True)) == {f"{DPX.pci}/xcp0": {71, 72}, f"{DPX.pci}/xcp1": {72}}


def test_processes_that_come_and_go_are_seen(fake: FakeSys) -> None:
    """Each cycle tells who computes now; no process changes the KFD's nodes."""
    write(fake)
    host = Host(fake)
    assert users(host.read(users=True)) == {}
    generation = (fake.sys / KFD / "topology/generation_id").read_text()
    write(fake, Process(pid=71, vram={2: GIB, 3: MIB}))
    assert users(host.read(users=True)) == {A.pci: {71}}
    write(fake, Process(pid=71, vram={2: MIB, 3: GIB}))
    assert users(host.read(users=True)) == {B.pci: {71}}
    assert (fake.sys / KFD / "topology/generation_id").read_text() == generation


def test_nobody_is_looked_for_unless_asked(fake: FakeSys) -> None:
    """Without the question a sample tells no process, though it was asked before."""
    write(fake, Process(pid=71, vram={2: GIB}))
    host = Host(fake)
    assert (host.read().users, host.read().users_of) == ((), ())
    assert users(host.read(users=True)) == {A.pci: {71}}
    assert (host.read().users, host.read().users_of) == ((), ())


def test_a_card_that_the_kfd_does_not_have_has_no_process(fake: FakeSys) -> None:
    """Nor does any card of a host without the KFD, or of another driver."""
    fake.write(
        [A, replace(B, kfd_nodes=()), replace(DPX, driver="radeon", kfd_nodes=())],
        processes=[Process(pid=71, vram={2: GIB})],
    )
    assert told(Host(fake).read(users=True)) == {A.pci: {71: GIB}}
    fake.write([A, B], kfd=False)
    assert told(Host(fake).read(users=True)) == {}


def test_a_card_without_processes_is_told_from_one_that_is_not_told(fake: FakeSys) -> None:
    """Of a kernel without the list, or whose list is closed, nobody knows; a divided card has none of its own."""
    write(fake)
    parts: dict[str, dict[int, int | None]] = {f"{DPX.pci}/xcp0": {}, f"{DPX.pci}/xcp1": {}}
    assert told(Host(fake).read(users=True)) == {A.pci: {}, B.pci: {}} | parts
    (fake.sys / PROCESSES).rmdir()
    assert told(Host(fake).read(users=True)) == {}
    (fake.sys / PROCESSES).write_text("")
    assert told(Host(fake).read(users=True)) == {}


def test_a_kernel_that_counts_no_memory(fake: FakeSys) -> None:
    """Before Linux 5.9 a process is there with its queues alone: where it has memory nobody knows."""
    write(fake, Process(pid=71, vram={2: GIB}), Process(pid=72, vram={2: GIB}))
    for path in (fake.sys / PROCESSES / "71").glob("vram_*"):
        path.unlink()
    sample = Host(fake).read(users=True)
    assert users(sample) == {A.pci: {72}}
    assert told(sample)[A.pci] == {71: None, 72: GIB}
    assert told(sample)[B.pci] == {71: None}


@pytest.mark.parametrize(
    "text", [b"", b"\xff\xfe\x00", b"many\n", b"-9000000000\n", b"1" * 21, b"9" * 5000, "٤٢٠٠٠٠٠٠٠٠٠\n".encode()]
)
def test_a_count_that_is_none_costs_that_process_alone(fake: FakeSys, text: bytes) -> None:
    """Whatever the file holds, the card has its readings and the other process."""
    write(fake, Process(pid=71, vram={2: GIB, 3: GIB}), Process(pid=72, vram={2: GIB, 3: GIB}))
    place(fake, vram(fake, 71, 2), text)
    sample = Host(fake).read(users=True)
    assert users(sample) == {A.pci: {72}, B.pci: {71, 72}}
    assert told(sample)[A.pci] == {71: None, 72: GIB}
    assert sample.faults == ()
    assert values(sample, A.pci).keys() == EVERYTHING


def test_a_count_that_cannot_be_read_costs_that_process_alone(fake: FakeSys) -> None:
    """One file answers an error, another's process has just ended, and one more is a folder."""
    write(fake, *(Process(pid=pid, vram={2: GIB}) for pid in (71, 72, 73, 74)))
    for pid, target in ((71, "/proc/self/mem"), (72, "/nonexistent"), (73, "/proc")):
        path = fake.sys / vram(fake, pid, 2)
        path.unlink()
        path.symlink_to(target)
    sample = Host(fake).read(users=True)
    assert users(sample) == {A.pci: {74}}
    assert told(sample)[A.pci] == {71: None, 73: None, 74: GIB}
    assert sample.faults == ()


def test_what_is_no_process_among_them_is_passed_over(fake: FakeSys) -> None:
    """Names that are no number of a process, in any bytes, and a file with such a name."""
    write(fake, Process(pid=71, vram={2: GIB}))
    name = Path(vram(fake, 71, 2)).name
    folder = fake.sys / PROCESSES
    for other in ("0", "071", "context_0", "-7", "٧٢", "9" * 30, "7\udcff"):
        (folder / other).mkdir()
        (folder / other / name).write_text(f"{GIB}\n")
    (folder / "75").write_text("")
    assert users(Host(fake).read(users=True)) == {A.pci: {71}}


@pytest.mark.parametrize("text", [b"", b"card\n", b"0" * 30, b"\xff\n"])
def test_a_node_without_its_id_costs_its_processes_alone(fake: FakeSys, text: bytes) -> None:
    """The card is who it is, with its node and its readings, and the other card has its processes."""
    write(fake, Process(pid=71, vram={2: GIB, 3: GIB}))
    place(fake, f"{NODES}/2/gpu_id", text)
    sample = Host(fake).read(users=True)
    assert users(sample) == {B.pci: {71}}
    assert A.pci not in told(sample)
    assert (sample.whole, devices(sample)[A.pci].kfd_node) == (True, 2)
    assert values(sample, A.pci).keys() == EVERYTHING


def test_a_sleeping_card_has_nobody(fake: FakeSys) -> None:
    """A card that sleeps is not read, and nobody is looked for on it."""
    asleep = replace(A, runtime_status="suspended")
    fake.write([asleep, B], processes=[Process(pid=71, vram={2: GIB, 3: GIB})])
    assert users(Host(fake).read(users=True)) == {B.pci: {71}}
