"""AMD's library beside the kernel's files: what it adds, and that its failures cost nothing else."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.amd_smi import SONAME, FakeAmdSmi, Gpu, Version, build
from tests.fakes.nvml import FakeNvml
from tests.fakes.sysfs import GIB, AmdCard, FakeSys, KfdNode
from tests.harness import Daemon, Scrape, Start

pytestmark = pytest.mark.e2e

HOST = "sampling: {reuse_seconds: 0}\nfleets: [{name: host, runtime: host}]\n"
CONFIG = "backends: [amd]\n" + HOST
UTILIZATION, ENERGY = "gpu_utilization_percent", "gpu_energy_joules_total"
READINGS = (
    UTILIZATION,
    "gpu_memory_free_bytes",
    "gpu_memory_used_bytes",
    "gpu_memory_total_bytes",
    "gpu_temperature_celsius",
)
CALLS = {
    *("amdsmi_init", "amdsmi_get_socket_handles", "amdsmi_get_processor_handles", "amdsmi_get_processor_type"),
    *("amdsmi_get_lib_version", "amdsmi_get_gpu_device_bdf", "amdsmi_get_gpu_kfd_info", "amdsmi_get_gpu_asic_info"),
    *("amdsmi_get_gpu_activity", "amdsmi_get_gpu_memory_total", "amdsmi_get_gpu_memory_usage"),
    *("amdsmi_get_temp_metric", "amdsmi_get_energy_count", "amdsmi_status_code_to_string"),
}
NEWER = Version(26, 9, 0, "26.9.0")

PLAIN = AmdCard(pci="0000:03:00.0", minor=0, busy=11, kfd_nodes=(KfdNode(node=1, unique_id=0xA1),))
VF = AmdCard(
    pci="0000:05:02.0",
    minor=1,
    device_id="0x74b5",
    pci_class="0x120000",
    busy=None,
    vram_total=None,
    vram_used=None,
    temperatures={},
    kfd_nodes=(KfdNode(node=2),),
)
VF_GPU = Gpu(
    bdf=VF.pci,
    uuid="00000000-0000-0000-0000-000000000000",
    name="AMD Instinct MI300X VF",
    vendor_id=0x1002,
    device_id=0x74B5,
    kfd_id=77,
    node_id=2,
    partition_id=4294967295,
    gfx=31,
    umc=65535,
    mm=65535,
    vram_total=192 * GIB,
    vram_used=7 * GIB,
    edge=29,
)
DPX = AmdCard(
    pci="0000:c1:00.0",
    minor=2,
    busy=55,
    pci_class="0x120000",
    vram_total=192 * GIB,
    compute_partition="DPX",
    temperatures={"junction": 66},
    kfd_nodes=tuple(KfdNode(node=3 + n, partition=n, unique_id=0xC0 + n, memory=96 * GIB) for n in range(2)),
)
PARTS = tuple(
    Gpu(
        bdf=f"0000:c1:00.{n}",
        kfd_id=90 + n,
        node_id=3 + n,
        partition_id=n,
        gfx=7 + n,
        umc=0,
        mm=65535,
        vram_total=192 * GIB,
        vram_used=9 * GIB,
    )
    for n in range(2)
)


@pytest.fixture
def smi(tmp_path: Path, amd_library: Path) -> FakeAmdSmi:
    return FakeAmdSmi(tmp_path, amd_library)


class Hosts:
    """Starts daemons on the trees and the library; every page is taken once the library has had its say."""

    def __init__(self, start: Start, fake: FakeSys, smi: FakeAmdSmi) -> None:
        self._start, self._fake, self._smi = start, fake, smi

    def start(self, config: str = CONFIG, environment: Mapping[str, str] | None = None) -> Daemon:
        """A daemon; ``environment`` replaces the library's."""
        flags = [f"--path.sysfs={self._fake.sys}", f"--path.procfs={self._fake.proc}"]
        return self._start(self._smi.environment() if environment is None else environment, config, flags)

    def page(self, config: str = CONFIG, environment: Mapping[str, str] | None = None) -> Scrape:
        """The first page of a daemon, whose log has no traceback and nothing that a package prints."""
        daemon = self.start(config, environment)
        scrape = daemon.scrape()
        assert "Traceback" not in daemon.log
        assert all(line.startswith(("ts=", "time=", "{", "level=")) for line in daemon.log.splitlines()), daemon.log
        return scrape


@pytest.fixture
def hosts(start: Start, fake: FakeSys, smi: FakeAmdSmi) -> Hosts:
    return Hosts(start, fake, smi)


def found(scrape: Scrape, **labels: str) -> dict[str, float]:
    """The readings of one device by family."""
    samples = {name: scrape.of(name, **labels) for name in READINGS}
    assert all(len(each) < 2 for each in samples.values()), samples
    return {name: each[0].value for name, each in samples.items() if each}


def part(scrape: Scrape, number: int) -> dict[str, float]:
    return found(scrape, pci_bus_id=DPX.pci, gpu_partition=str(number))


def fault(scrape: Scrape) -> str:
    """Why the backend is down; empty while it is up."""
    return "".join(sample.labels["reason"] for sample in scrape.of("gpu_exporter_backend_fault_info", vendor="amd"))


# --- what it adds


def test_a_card_without_the_kernels_files_is_read_by_the_library(fake: FakeSys, smi: FakeAmdSmi, hosts: Hosts) -> None:
    """A virtual function: each value is the library's, and the other card's are the kernel's."""
    fake.write([PLAIN, VF], cpus=1)
    smi.write([replace(VF_GPU, bdf=PLAIN.pci, node_id=1, gfx=99, edge=99), VF_GPU])
    scrape = hosts.page()
    assert found(scrape, pci_bus_id=VF.pci) == {
        "gpu_utilization_percent": 31,
        "gpu_memory_free_bytes": 185 * GIB,
        "gpu_memory_used_bytes": 7 * GIB,
        "gpu_memory_total_bytes": 192 * GIB,
        "gpu_temperature_celsius": 29,
    }
    assert found(scrape, pci_bus_id=PLAIN.pci)[UTILIZATION] == 11
    assert found(scrape, pci_bus_id=PLAIN.pci)["gpu_temperature_celsius"] == 51
    (info,) = scrape.of("gpu_info", pci_bus_id=VF.pci)
    assert (info.labels["temperature_sensor"], info.labels["name"]) == ("edge", "AMD Instinct MI300X VF")


def test_a_partition_without_data_has_no_series_f40(fake: FakeSys, smi: FakeAmdSmi, hosts: Hosts) -> None:
    """F40: 'N/A' for partition 1 costs partition 0 nothing; the board has the kernel's value of the whole card."""
    fake.write([DPX], cpus=3)
    smi.write([PARTS[0], replace(PARTS[1], gfx=65535)])
    scrape = hosts.page()
    assert part(scrape, 0)[UTILIZATION] == 7
    assert UTILIZATION not in part(scrape, 1)
    (board,) = [s for s in scrape.of(UTILIZATION, pci_bus_id=DPX.pci) if "gpu_partition" not in s.labels]
    assert board.value == 55
    assert {s.labels.get("gpu_partition") for s in scrape.of("gpu_temperature_celsius")} == {None}


def test_a_board_of_partitions_has_no_value_of_one_of_them(fake: FakeSys, smi: FakeAmdSmi, hosts: Hosts) -> None:
    """The library tells no node here: its first processor is at the board's address, and is no board."""
    fake.write([replace(DPX, busy=None)], cpus=3)
    smi.write([replace(gpu, kfd_id=None) for gpu in PARTS])
    assert hosts.page().of(UTILIZATION) == []


@pytest.mark.parametrize("kfd_id", [77, None])
def test_a_whole_card_is_found_by_its_address_alone(
    fake: FakeSys, smi: FakeAmdSmi, hosts: Hosts, kfd_id: int | None
) -> None:
    """Older libraries tell no KFD node: one processor at exactly the card's address is the card."""
    fake.write([VF], cpus=2)
    smi.write([replace(VF_GPU, kfd_id=kfd_id)])
    assert found(hosts.page(), pci_bus_id=VF.pci)[UTILIZATION] == 31


def test_identities_of_zeros_and_ones_are_none_f42(fake: FakeSys, smi: FakeAmdSmi, hosts: Hosts) -> None:
    """F42: two virtual functions with a zero UUID and partition 4294967295 are two cards, by their addresses."""
    other = replace(VF, pci="0000:06:02.0", minor=3, kfd_nodes=(KfdNode(node=3),))
    fake.write([VF, other], cpus=2)
    smi.write([VF_GPU, replace(VF_GPU, bdf=other.pci, node_id=3, gfx=64)])
    scrape = hosts.page()
    assert {s.labels["pci_bus_id"]: s.value for s in scrape.of(UTILIZATION)} == {VF.pci: 31, other.pci: 64}
    labels = [value for samples in scrape.samples.values() for sample in samples for value in sample.labels.values()]
    assert not [value for value in labels if "4294967295" in value or "00000000-" in value]
    assert all("uuid" not in s.labels and "gpu_partition" not in s.labels for s in scrape.of("gpu_info"))


def test_a_partitions_memory_is_what_the_kfd_gives_it(fake: FakeSys, smi: FakeAmdSmi, hosts: Hosts) -> None:
    """What the library says is in use repeats the whole card's, whatever size it says."""
    fake.write([DPX], cpus=3)
    smi.write([PARTS[0], replace(PARTS[1], vram_total=96 * GIB, vram_used=5 * GIB)])
    scrape = hosts.page()
    assert part(scrape, 0) == {UTILIZATION: 7, "gpu_memory_total_bytes": 96 * GIB}
    assert part(scrape, 1) == {UTILIZATION: 8, "gpu_memory_total_bytes": 96 * GIB}


def test_undivided_memory_is_no_partitions(fake: FakeSys, smi: FakeAmdSmi, hosts: Hosts) -> None:
    """Each node shows all of the card's memory."""
    nodes = tuple(replace(node, memory=192 * GIB) for node in DPX.kfd_nodes)
    fake.write([replace(DPX, kfd_nodes=nodes)], cpus=3)
    smi.write(PARTS)
    assert part(hosts.page(), 0) == {UTILIZATION: 7}


def test_without_the_library_partitions_are_known_and_a_hint_says_what_is_missing(fake: FakeSys, hosts: Hosts) -> None:
    fake.write([DPX], cpus=3)
    scrape = hosts.page(environment={"ROCM_PATH": "/nonexistent"})
    assert part(scrape, 0) == {"gpu_memory_total_bytes": 96 * GIB}
    assert scrape.value("gpu_exporter_hint_info", vendor="amd", hint="install-amd-smi") == 1
    assert fault(scrape) == ""


# --- sentinels and lies


def functions(fake: FakeSys, smi: FakeAmdSmi, gpus: Sequence[Gpu]) -> list[str]:
    """A virtual function for each of these; their addresses."""
    cards = [
        replace(VF, pci=f"0000:05:{place:02x}.0", minor=place, kfd_nodes=(KfdNode(node=1 + place),))
        for place in range(len(gpus))
    ]
    fake.write(cards, cpus=1)
    smi.write([replace(gpu, bdf=cards[place].pci, node_id=1 + place) for place, gpu in enumerate(gpus)])
    return [card.pci for card in cards]


def test_activity_that_is_not_known_is_absent_f79_f80(fake: FakeSys, smi: FakeAmdSmi, hosts: Hosts) -> None:
    """F79, F80: no value is not 0, which is one, and what else is known is shown."""
    values = [0, 65535, 4294967295, 101, None]
    addresses = functions(fake, smi, [replace(VF_GPU, gfx=gfx) for gfx in values])
    scrape = hosts.page()
    assert found(scrape, pci_bus_id=addresses[0])[UTILIZATION] == 0
    for address in addresses[1:]:
        assert found(scrape, pci_bus_id=address).keys() == set(READINGS) - {UTILIZATION}


def test_no_chip_has_that_temperature_f71(fake: FakeSys, smi: FakeAmdSmi, hosts: Hosts) -> None:
    """F71: the library's sentinels are the sensor's."""
    gpus = [replace(VF_GPU, edge=edge) for edge in (0, 255, 510, 2**64 - 1, None)]
    addresses = functions(fake, smi, gpus)
    scrape = hosts.page()
    for address in addresses:
        assert found(scrape, pci_bus_id=address).keys() == set(READINGS) - {"gpu_temperature_celsius"}


def test_activity_that_the_library_repeats_is_not_shown(fake: FakeSys, smi: FakeAmdSmi, hosts: Hosts) -> None:
    """Where the driver's table fails, the library says once more what it said last; the reading is gone at once."""
    fake.write([VF, DPX], cpus=2)
    smi.write([VF_GPU, *PARTS])
    daemon = hosts.start()
    assert len(daemon.scrape().of(UTILIZATION)) == 4
    smi.write([VF_GPU, *PARTS], lines=["lie amdsmi_get_gpu_activity *"])
    for how in ("eio", "empty", "missing"):
        for card in (VF, DPX):
            fake.fault(card.pci, "gpu_metrics", how)
        scrape = daemon.scrape()
        assert [s.labels["pci_bus_id"] for s in scrape.of(UTILIZATION)] == [DPX.pci]  # the kernel's, of the whole card
        assert len(scrape.of("gpu_memory_used_bytes", pci_bus_id=VF.pci)) == 1
        assert {
            s.labels["pci_bus_id"]: s.labels["state"] for s in scrape.of("gpu_exporter_device_state") if s.value
        } == {
            VF.pci: "ok",
            DPX.pci: "ok",
        }
    assert scrape.value("gpu_exporter_backend_faults_total", vendor="amd", reason="driver-error") >= 4


@pytest.mark.parametrize("call", ["amdsmi_get_gpu_memory_total", "amdsmi_get_gpu_memory_usage"])
def test_memory_of_0_is_not_shown(fake: FakeSys, smi: FakeAmdSmi, hosts: Hosts, call: str) -> None:
    """That is what the library says, with success, of a file that it cannot read."""
    fake.write([VF], cpus=2)
    smi.write([VF_GPU], lines=[f"lie {call} *"])
    names = found(hosts.page(), pci_bus_id=VF.pci).keys()
    assert {name for name in names if "memory" in name} == (
        set() if call.endswith("total") else {"gpu_memory_total_bytes"}
    )


@pytest.mark.parametrize(("status", "reason"), [(2, ""), (40, ""), (10, "no-permission"), (999, "driver-error")])
def test_a_call_that_fails_costs_its_reading(
    fake: FakeSys, smi: FakeAmdSmi, hosts: Hosts, status: int, reason: str
) -> None:
    """What a card does not offer is no fault; a partition's failure costs neither its board nor the next one."""
    fake.write([VF, DPX], cpus=2)
    smi.write([VF_GPU, *PARTS], lines=[f"fault amdsmi_get_gpu_activity {n} {status}" for n in (0, 1)])
    scrape = hosts.page()
    assert found(scrape, pci_bus_id=VF.pci).keys() == set(READINGS) - {UTILIZATION}
    assert UTILIZATION not in part(scrape, 0)
    assert part(scrape, 1)[UTILIZATION] == 8
    counts = {
        s.labels["reason"]: s.value for s in scrape.of("gpu_exporter_backend_faults_total", vendor="amd") if s.value
    }
    assert counts == ({reason: 2} if reason else {})


def test_a_processor_that_does_not_say_where_it_is_costs_no_other(fake: FakeSys, smi: FakeAmdSmi, hosts: Hosts) -> None:
    fake.write([VF, DPX], cpus=2)
    smi.write([VF_GPU, *PARTS], lines=["fault amdsmi_get_gpu_device_bdf 0 999"])
    scrape = hosts.page()
    assert found(scrape, pci_bus_id=VF.pci) == {}
    assert (part(scrape, 0)[UTILIZATION], part(scrape, 1)[UTILIZATION]) == (7, 8)


# --- loading it


def shadowed(folder: Path, source: str) -> dict[str, str]:
    """An environment in which ``import amdsmi`` runs this instead."""
    package = folder / "shadow/amdsmi"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    return {"PYTHONPATH": str(package.parent)}


@pytest.mark.parametrize(
    ("raised", "cards"),
    [
        ("KeyError('libamd_smi.so')", [PLAIN]),
        ("OSError('libamd_smi.so: cannot open')", [PLAIN]),
        ("AttributeError('undefined symbol')", [PLAIN]),
        ("ImportError('no such name')", [PLAIN]),
        ("ModuleNotFoundError('no amdsmi')", [PLAIN]),
        ("KeyError('libamd_smi.so')", []),
        ("ModuleNotFoundError('no amdsmi')", []),
    ],
)
def test_an_import_that_fails_costs_nothing_else_f77(
    fake: FakeSys, hosts: Hosts, tmp_path: Path, raised: str, cards: list[AmdCard]
) -> None:
    """F77: the kernel's readings go on, nothing is printed. Without any card it is that which is the reason: the case
    would have `library-missing`, from an exporter that has no other source.
    """
    fake.write(cards)
    scrape = hosts.page(environment=shadowed(tmp_path, f"print('said on import')\nraise {raised}"))
    assert fault(scrape) == ("" if cards else "no-devices")
    assert len(scrape.of(UTILIZATION)) == len(cards)


@pytest.mark.parametrize("what", ["no file", "no library", "an older library"])
def test_a_library_that_does_not_load_costs_nothing_else_f77(
    fake: FakeSys, smi: FakeAmdSmi, hosts: Hosts, tmp_path: Path, what: str
) -> None:
    """F77: with the real binding: it is not there, is no shared object, or lacks a symbol."""
    (tmp_path / "rocm/lib").mkdir(parents=True)
    if what == "no library":
        (tmp_path / "rocm/lib" / SONAME).write_bytes(b"not a shared object")
    elif what == "an older library":
        build(tmp_path / "rocm", without=["amdsmi_get_gpu_kfd_info"])
    fake.write([PLAIN, VF], cpus=1)
    smi.write([VF_GPU])
    rocm = {"ROCM_HOME": str(tmp_path / "rocm"), "ROCM_PATH": str(tmp_path / "rocm")}
    scrape = hosts.page(environment=smi.environment() | rocm)
    assert found(scrape, pci_bus_id=PLAIN.pci).keys() == set(READINGS)
    assert found(scrape, pci_bus_id=VF.pci) == {}
    assert fault(scrape) == ""


def test_a_binding_without_a_call_that_is_needed_is_not_used(fake: FakeSys, hosts: Hosts, tmp_path: Path) -> None:
    fake.write([PLAIN])
    scrape = hosts.page(environment=shadowed(tmp_path, "def amdsmi_init(): raise SystemError"))
    assert found(scrape, pci_bus_id=PLAIN.pci).keys() == set(READINGS)


def test_a_library_that_does_not_start_costs_nothing_else(fake: FakeSys, smi: FakeAmdSmi, hosts: Hosts) -> None:
    fake.write([PLAIN, VF], cpus=1)
    smi.write([VF_GPU], lines=["fault amdsmi_init * 34"])
    scrape = hosts.page()
    assert found(scrape, pci_bus_id=PLAIN.pci).keys() == set(READINGS)
    assert found(scrape, pci_bus_id=VF.pci) == {}


@pytest.mark.parametrize("version", [None, NEWER])
def test_only_calls_that_read_and_whose_structs_fit_are_made(
    fake: FakeSys, smi: FakeAmdSmi, hosts: Hosts, version: Version | None
) -> None:
    """No setter, no `gpu_metrics_info`, and the name's struct only where library and binding are of one release."""
    fake.write([VF, DPX], cpus=2)
    smi.write([VF_GPU, *PARTS], version=version)
    scrape = hosts.page()
    assert found(scrape, pci_bus_id=VF.pci)[UTILIZATION] == 31
    assert set(smi.record()) <= CALLS
    assert ("amdsmi_get_gpu_asic_info" in smi.record()) == (version is None)
    (info,) = scrape.of("gpu_info", pci_bus_id=VF.pci)
    assert (info.labels["name"] == "AMD Instinct MI300X VF") == (version is None)


def rocm(folder: Path, library: Path) -> Path:
    """An installed ROCm: the library, and the binding that it ships, which says so when it is imported."""
    spec = importlib.util.find_spec("amdsmi")
    assert spec is not None
    assert spec.origin is not None
    shipped = folder / "rocm/share/amd_smi/amdsmi"
    shutil.copytree(Path(spec.origin).parent, shipped, ignore=shutil.ignore_patterns("__pycache__"))
    with (shipped / "__init__.py").open("a") as file:
        file.write("\nimport os, pathlib\npathlib.Path(os.environ['SHIPPED']).write_text('imported')\n")
    (folder / "rocm/lib").mkdir()
    os.link(library, folder / "rocm/lib" / SONAME)
    return folder / "rocm"


@pytest.mark.parametrize("by", ["ROCM_PATH", "ROCM_HOME", "settings"])
def test_the_binding_that_rocm_ships_goes_first(
    fake: FakeSys, smi: FakeAmdSmi, hosts: Hosts, tmp_path: Path, by: str
) -> None:
    """It fits its own library, of whatever version that is."""
    root, mark = rocm(tmp_path, smi.root / "lib" / SONAME), tmp_path / "mark"
    fake.write([VF], cpus=2)
    smi.write([VF_GPU], version=NEWER)
    environment = {name: value for name, value in smi.environment().items() if "ROCM" not in name}
    environment |= {"SHIPPED": str(mark)} | ({by: str(root)} if by != "settings" else {})
    config = CONFIG + (f"libraries: {{amd: {root}/lib/{SONAME}}}\n" if by == "settings" else "")
    scrape = hosts.page(config, environment)
    assert mark.read_text() == "imported"
    assert found(scrape, pci_bus_id=VF.pci)[UTILIZATION] == 31
    assert scrape.of("gpu_info", pci_bus_id=VF.pci)[0].labels["name"] == "AMD Instinct MI300X VF"


def test_the_settings_name_a_library_anywhere(fake: FakeSys, smi: FakeAmdSmi, hosts: Hosts, tmp_path: Path) -> None:
    """PyPI's binding looks in places of its own, and is given this file."""
    named = tmp_path / "somewhere/else" / SONAME
    named.parent.mkdir(parents=True)
    os.link(smi.root / "lib" / SONAME, named)
    fake.write([VF], cpus=2)
    smi.write([VF_GPU])
    environment = {name: value for name, value in smi.environment().items() if "ROCM" not in name}
    assert found(hosts.page(CONFIG, environment), pci_bus_id=VF.pci) == {}
    scrape = hosts.page(f"{CONFIG}libraries: {{amd: {named}}}\n", environment)
    assert found(scrape, pci_bus_id=VF.pci).keys() == set(READINGS)


# --- hangs, crashes, sleep, cards that come and go


def test_a_library_that_hangs_while_it_starts_costs_nothing_else(fake: FakeSys, smi: FakeAmdSmi, hosts: Hosts) -> None:
    """The kernel's readings are on the first page, and the library's come once it has started."""
    fake.write([PLAIN, VF], cpus=1)
    smi.write([VF_GPU], lines=["hang amdsmi_init *"])
    daemon = hosts.start()
    first, again = daemon.scrape(timeout=5), daemon.scrape(timeout=5)
    assert first.seconds < 5
    assert again.seconds < 0.5
    for scrape in (first, again):
        assert found(scrape, pci_bus_id=PLAIN.pci).keys() == set(READINGS)
        assert found(scrape, pci_bus_id=VF.pci) == {}
    smi.write([VF_GPU])
    daemon.scrape_until(lambda scrape: found(scrape, pci_bus_id=VF.pci).keys() == set(READINGS))


def test_a_call_that_hangs_costs_one_card_f60(fake: FakeSys, smi: FakeAmdSmi, hosts: Hosts) -> None:
    """F60: the others are on the page, and the card is `hung` until the call returns."""
    fake.write([PLAIN, VF, DPX], cpus=1)
    gpus = [VF_GPU, *PARTS]
    smi.write(gpus)
    daemon = hosts.start()
    daemon.scrape()
    smi.write(gpus, lines=["hang amdsmi_get_gpu_activity 0"])
    scrape = daemon.scrape(timeout=2)
    assert scrape.state(pci_bus_id=VF.pci) == "hung"
    assert found(scrape, pci_bus_id=VF.pci) == {}
    assert found(scrape, pci_bus_id=PLAIN.pci).keys() == set(READINGS)
    assert part(scrape, 1)[UTILIZATION] == 8
    smi.write(gpus)
    daemon.scrape_until(lambda scrape: scrape.state(pci_bus_id=VF.pci) == "ok")


def test_a_crash_costs_one_cycle_of_amd_alone(fake: FakeSys, smi: FakeAmdSmi, nvml: FakeNvml, start: Start) -> None:
    """The worker is gone and another takes over; the other vendor's rows are never touched."""
    fake.write([PLAIN, VF], cpus=1)
    smi.write([VF_GPU])
    flags = [f"--path.sysfs={fake.sys}", f"--path.procfs={fake.proc}"]
    daemon = start(smi.environment() | nvml.environment(), "backends: [amd, nvidia]\n" + HOST, flags)
    assert len(daemon.scrape().of(UTILIZATION)) == 6
    smi.write([VF_GPU], lines=["crash amdsmi_get_gpu_activity 0"])
    crashed = daemon.scrape()
    assert fault(crashed) == "crashed"
    assert {s.labels["vendor"] for s in crashed.of(UTILIZATION)} == {"nvidia"}
    smi.write([VF_GPU])
    healed = daemon.scrape_until(lambda scrape: not fault(scrape))
    assert len(healed.of(UTILIZATION)) == 6


def test_the_library_is_not_started_while_a_card_sleeps_f91(fake: FakeSys, smi: FakeAmdSmi, hosts: Hosts) -> None:
    """F91: it opens every card. Once none sleeps it starts, and later sleep does not end its values of others."""
    asleep = replace(PLAIN, runtime_status="suspended")
    fake.write([asleep, VF], cpus=1)
    smi.write([VF_GPU])
    daemon = hosts.start()
    scrape = daemon.scrape()
    assert smi.record() == []
    assert scrape.state(pci_bus_id=PLAIN.pci) == "asleep"
    assert found(scrape, pci_bus_id=VF.pci) == {}
    fake.write([PLAIN, VF], cpus=1)
    awake = daemon.scrape()
    assert found(awake, pci_bus_id=VF.pci)[UTILIZATION] == 31
    assert found(awake, pci_bus_id=PLAIN.pci)[UTILIZATION] == 11
    fake.write([asleep, VF], cpus=1)
    assert found(daemon.scrape(), pci_bus_id=VF.pci)[UTILIZATION] == 31


def test_cards_that_come_are_read_by_a_library_that_knows_them(fake: FakeSys, smi: FakeAmdSmi, hosts: Hosts) -> None:
    """A library that was started before they came may take one for another: another process asks a fresh one."""
    fake.write([PLAIN], cpus=3)
    smi.write([replace(VF_GPU, bdf=PLAIN.pci, node_id=1)])
    daemon = hosts.start()
    daemon.scrape()
    (worker,) = daemon.workers()
    fake.write([PLAIN, DPX], cpus=2)
    smi.write([*PARTS, replace(VF_GPU, bdf=PLAIN.pci, node_id=1)])
    changed = daemon.scrape()
    assert changed.of(UTILIZATION, gpu_partition="0") == []
    scrape = daemon.scrape_until(lambda scrape: scrape.of(UTILIZATION, gpu_partition="0") != [])
    assert (part(scrape, 0)[UTILIZATION], part(scrape, 1)[UTILIZATION]) == (7, 8)
    assert daemon.workers() != [worker]


def test_a_card_that_leaves_costs_no_restart_where_the_library_is_not_asked(
    fake: FakeSys, smi: FakeAmdSmi, hosts: Hosts
) -> None:
    """The kernel says all there is to know but for the energy, so the worker goes on."""
    other = replace(PLAIN, pci="0000:83:00.0", minor=5, kfd_nodes=(KfdNode(node=2),))
    fake.write([PLAIN, other], cpus=1)
    cards = enumerate((PLAIN, other))
    smi.write([Gpu(bdf=card.pci, kfd_id=1, node_id=1 + place, partition_id=0, energy=7) for place, card in cards])
    daemon = hosts.start()
    assert len(daemon.scrape_until(lambda page: len(page.of(ENERGY)) == 2).of(UTILIZATION)) == 2
    before = daemon.workers()
    fake.write([PLAIN], cpus=1)
    scrape = daemon.scrape()
    assert [s.labels["pci_bus_id"] for s in scrape.of(UTILIZATION)] == [PLAIN.pci]
    assert scrape.of(ENERGY) == []  # the library may take one card for another
    assert daemon.workers() == before
