"""The fake ``/sys`` and ``/proc``: what plain reads find, what faults do, and what Debian's rocm-smi makes of it."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.sysfs import (
    AmdCard,
    Card,
    Client,
    FakeSys,
    IntelCard,
    KfdNode,
    OtherCard,
    Process,
    mounted,
    needs_root,
)

pytestmark = pytest.mark.e2e

AMD = AmdCard(pci="0000:03:00.0", minor=1, busy=11, kfd_nodes=(KfdNode(node=2),))
SECOND = AmdCard(
    pci="0000:83:00.0",
    minor=0,
    busy=77,
    vram_total=16 << 30,
    vram_used=5 << 30,
    temperatures={"edge": 40, "junction": 41, "mem": 43},
    kfd_nodes=(KfdNode(node=3),),
)
PARTITIONED = AmdCard(
    pci="0002:c3:00.0",
    minor=4,
    pci_class="0x120000",
    compute_partition="CPX",
    memory_partition="NPS1",
    kfd_nodes=tuple(KfdNode(node=2 + number, partition=number, gfx="gfx942") for number in range(3)),
)
AMD_BESIDE = replace(AMD, kfd_nodes=(KfdNode(node=9),))
PARTITIONED_LATE = replace(PARTITIONED, kfd_nodes=(KfdNode(node=4), KfdNode(node=5, partition=1)))
XE = IntelCard(pci="0000:4d:00.0", minor=2, tiles=2)
I915 = IntelCard(pci="0000:00:02.0", driver="i915", minor=3)
H100 = OtherCard(pci="0000:17:00.0")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def properties(fake: FakeSys, node: int) -> dict[str, str]:
    text = (fake.sys / f"class/kfd/kfd/topology/nodes/{node}/properties").read_text()
    return dict(line.split(" ") for line in text.splitlines())


def dangling(fake: FakeSys) -> list[Path]:
    return [path for path in fake.sys.rglob("*") if path.is_symlink() and not path.exists()]


def test_each_card_is_on_the_bus_with_its_files_and_links(fake: FakeSys) -> None:
    cards: list[Card] = [AMD, XE, I915, H100]
    fake.write(cards)
    bus = fake.sys / "bus/pci"
    assert names(bus / "devices") == sorted(card.pci for card in cards)
    for card in cards:
        device = bus / "devices" / card.pci
        assert device.resolve() == fake.device(card.pci).resolve()
        assert (device / "device").read_text() == f"{card.device_id}\n"
        assert (device / "class").read_text() == f"{card.pci_class}\n"
        assert (device / "power/runtime_status").read_text() == "active\n"
        assert (device / "driver").resolve().name == card.driver
        assert (bus / "drivers" / card.driver / card.pci).resolve() == device.resolve()
        assert f"DRIVER={card.driver}\n" in (device / "uevent").read_text()
        assert f"PCI_SLOT_NAME={card.pci}\n" in (device / "uevent").read_text()
    assert [(fake.device(card.pci) / "vendor").read_text() for card in cards] == [
        *("0x1002\n", "0x8086\n", "0x8086\n", "0x10de\n")
    ]
    assert (fake.sys / "module/amdgpu/initstate").read_text() == "live\n"
    assert (fake.sys / "module/amdgpu/version").exists()
    assert not dangling(fake)


def test_drm_devices_have_the_numbers_of_the_card(fake: FakeSys) -> None:
    fake.write([AMD, XE, H100])
    assert names(fake.sys / "class/drm") == [
        *("card1", "card1-DP-1", "card2", "card2-DP-1", "renderD129", "renderD130", "version")
    ]
    for name, number in (("card1", 1), ("renderD129", 129)):
        drm = fake.sys / "class/drm" / name
        assert (drm / "dev").read_text() == f"226:{number}\n"
        assert (drm / "device").resolve() == fake.device(AMD.pci).resolve()
        assert drm.resolve() == (fake.device(AMD.pci) / "drm" / name).resolve()
        assert drm.resolve() == (fake.sys / f"dev/char/226:{number}").resolve()


def test_an_amd_card_has_its_counters_and_sensors(fake: FakeSys) -> None:
    fake.write([SECOND])
    device = fake.device(SECOND.pci)
    (hwmon,) = (device / "hwmon").iterdir()
    assert (device / "gpu_busy_percent").read_text() == "77\n"
    assert (device / "mem_info_vram_used").read_text() == f"{5 << 30}\n"
    assert len((device / "unique_id").read_text()) == 17
    assert (device / "gpu_metrics").read_bytes()[:4] == bytes([120, 0, 1, 3])
    assert len((device / "gpu_metrics").read_bytes()) == 120
    assert (fake.sys / "class/hwmon" / hwmon.name / "name").read_text() == "amdgpu\n"
    assert (hwmon / "temp3_input").read_text() == "43000\n"
    assert (hwmon / "temp3_label").read_text() == "mem\n"


def test_two_cards_have_different_unique_ids_unless_given(fake: FakeSys) -> None:
    fake.write([AMD, SECOND])
    assert len({(fake.device(card.pci) / "unique_id").read_text() for card in (AMD, SECOND)}) == 2
    fake.write([replace(AMD, unique_id=0xABC)])
    assert (fake.device(AMD.pci) / "unique_id").read_text() == "0000000000000abc\n"


@pytest.mark.parametrize(
    ("card", "file"),
    [
        (replace(AMD, unique_id=None), "unique_id"),
        (replace(AMD, busy=None), "gpu_busy_percent"),
        (replace(AMD, vram_used=None), "mem_info_vram_used"),
        (replace(AMD, vram_total=None), "mem_info_vram_total"),
        (replace(AMD, metrics=False), "gpu_metrics"),
        (replace(AMD, runtime_status=None), "power"),
        (AMD, "product_name"),
        (AMD, "current_compute_partition"),
    ],
)
def test_what_is_none_is_no_file(fake: FakeSys, card: AmdCard, file: str) -> None:
    fake.write([card])
    assert fake.device(AMD.pci).is_dir()
    assert not (fake.device(AMD.pci) / file).exists()


def test_text_for_the_busy_counter_is_kept_byte_by_byte(fake: FakeSys) -> None:
    fake.write([replace(AMD, busy=" 101")])
    assert (fake.device(AMD.pci) / "gpu_busy_percent").read_bytes() == b" 101"


def test_without_temperatures_the_sensor_folder_stays(fake: FakeSys) -> None:
    fake.write([replace(AMD, temperatures={})])
    assert list(fake.device(AMD.pci).glob("hwmon/*/name"))
    assert not list(fake.device(AMD.pci).glob("hwmon/*/temp*"))


@pytest.mark.parametrize("driver", ["", "vfio-pci"])
@pytest.mark.parametrize("card", [AMD, XE, H100])
def test_a_card_without_its_driver_is_on_the_bus_alone(fake: FakeSys, card: Card, driver: str) -> None:
    fake.write([replace(card, driver=driver)])
    assert (fake.device(card.pci) / "driver").exists() == bool(driver)
    assert not {"drm", "hwmon", "tile0", "gpu_busy_percent"} & set(names(fake.device(card.pci)))
    assert names(fake.sys / "class/drm") == ["version"]
    assert not (fake.sys / "class/kfd").exists()


def test_the_radeon_driver_has_a_drm_device_but_no_counters(fake: FakeSys) -> None:
    fake.write([replace(AMD, driver="radeon")])
    assert (fake.sys / "class/drm/card1/device/hwmon/hwmon3/temp1_input").read_text() == "51000\n"
    assert not (fake.device(AMD.pci) / "gpu_busy_percent").exists()


def test_kfd_lists_processors_first(fake: FakeSys) -> None:
    fake.write([AMD, SECOND], cpus=2)
    topology = fake.sys / "class/kfd/kfd/topology"
    assert names(topology / "nodes") == ["0", "1", "2", "3"]
    assert [(topology / f"nodes/{node}/gpu_id").read_text() for node in (0, 1)] == ["0\n", "0\n"]
    assert properties(fake, 0)["simd_count"] == "0"
    assert int(properties(fake, 1)["cpu_cores_count"]) > 0
    assert (topology / "nodes/3/gpu_id").read_text() != "0\n"
    assert (topology / "nodes/3/name").read_text() == "gfx1100\n"
    assert "heap_type 1\nsize_in_bytes 25769803776\n" in (topology / "nodes/3/mem_banks/0/properties").read_text()
    expected = {"vendor_id": "4098", "simd_count": "192", "domain": "0", "drm_render_minor": "128"}
    assert expected.items() <= properties(fake, 3).items()


def test_processors_take_the_node_numbers_that_cards_leave(fake: FakeSys) -> None:
    fake.write([replace(AMD, kfd_nodes=(KfdNode(node=0),))], cpus=1)
    assert properties(fake, 0)["simd_count"] == "192"
    assert properties(fake, 1)["simd_count"] == "0"


def test_a_host_without_kfd_has_the_cards_alone(fake: FakeSys) -> None:
    fake.write([AMD], kfd=False)
    assert not (fake.sys / "class/kfd").exists()
    assert (fake.device(AMD.pci) / "drm").is_dir()


@pytest.mark.parametrize(("location", "shift"), [("high-bits", 28), ("function", 0)])
def test_partitions_tell_their_place_as_their_kernel_does(fake: FakeSys, location: Any, shift: int) -> None:
    nodes = tuple(replace(node, location=location) for node in PARTITIONED.kfd_nodes)
    fake.write([replace(PARTITIONED, kfd_nodes=nodes)])
    for number in range(3):
        assert properties(fake, 2 + number)["location_id"] == str(0xC3 << 8 | number << shift)
        assert properties(fake, 2 + number)["domain"] == "2"


def test_further_partitions_are_platform_devices_after_the_highest_minor(fake: FakeSys) -> None:
    fake.write([PARTITIONED, replace(AMD, minor=6, kfd_nodes=())])
    assert [properties(fake, node)["drm_render_minor"] for node in (2, 3, 4)] == ["132", "135", "136"]
    assert (fake.sys / "class/drm/renderD135/device").resolve().name == "amdgpu_xcp_0"
    assert (fake.sys / "devices/platform/amdgpu_xcp_1/drm/card8/dev").read_text() == "226:8\n"
    assert (fake.device(PARTITIONED.pci) / "current_compute_partition").read_text() == "CPX\n"
    assert not dangling(fake)


def test_a_node_may_name_its_render_device(fake: FakeSys) -> None:
    nodes = (KfdNode(node=2), KfdNode(node=3, partition=1, render_minor=140))
    fake.write([replace(AMD, kfd_nodes=nodes)])
    assert properties(fake, 3)["drm_render_minor"] == "140"
    assert (fake.sys / "class/drm/card12/dev").read_text() == "226:12\n"


def test_intel_drivers_differ_in_tiles_and_sensors(fake: FakeSys) -> None:
    fake.write([XE, I915])
    xe, i915 = fake.device(XE.pci), fake.device(I915.pci)
    assert names(xe / "tile1") == ["gt1"]
    assert (xe / "hwmon/hwmon4/temp2_label").read_text() == "pkg\n"
    assert (xe / "hwmon/hwmon4/temp3_input").read_text() == "52000\n"
    assert (i915 / "hwmon/hwmon5/name").read_text() == "i915\n"
    assert (i915 / "hwmon/hwmon5/energy1_input").exists()
    assert not list(i915.glob("hwmon/*/temp*"))
    assert names(i915 / "drm/card3/gt") == ["gt0"]
    assert not (i915 / "tile0").exists()


def test_a_client_is_told_in_the_words_of_the_kernel(fake: FakeSys) -> None:
    client = Client(
        pid=71,
        pci=XE.pci,
        client_id=9,
        fds=(5, 8),
        cycles={"rcs": (3, 40)},
        capacities={"vcs": 2},
        memory={"resident-vram0": 123 << 10, "total-system": 4 << 20, "shared-gtt": 0},
    )
    fake.write([XE], [client])
    info = fake.proc / "71/fdinfo"
    assert (info / "5").read_text() == (info / "8").read_text()
    assert (info / "5").read_text().splitlines() == [
        *("pos:\t0", "flags:\t02100002", "mnt_id:\t26", "ino:\t1043"),
        *("drm-driver:\txe", "drm-client-id:\t9", "drm-pdev:\t0000:4d:00.0"),
        *("drm-resident-vram0:\t123 KiB", "drm-total-system:\t4 MiB", "drm-shared-gtt:\t0"),
        *("drm-cycles-rcs:\t3", "drm-total-cycles-rcs:\t40", "drm-engine-capacity-vcs:\t2"),
    ]
    links = {path.name: str(path.readlink()) for path in (fake.proc / "71/fd").iterdir()}
    assert links == {"0": "/dev/null", "5": "/dev/dri/renderD130", "8": "/dev/dri/renderD130"}


def test_engine_times_and_old_kernels(fake: FakeSys) -> None:
    timed = Client(pid=71, pci=I915.pci, client_id=1, engines={"render": 123}, node="card")
    fake.write([I915], [timed, Client(pid=72, pci=I915.pci, client_id=2, keys=False)])
    assert "drm-driver:\ti915\n" in (fake.proc / "71/fdinfo/5").read_text()
    assert (fake.proc / "71/fdinfo/5").read_text().endswith("\ndrm-engine-render:\t123 ns\n")
    assert str((fake.proc / "71/fd/5").readlink()) == "/dev/dri/card3"
    assert "drm-" not in (fake.proc / "72/fdinfo/5").read_text()


def test_a_client_needs_a_card_with_drm(fake: FakeSys) -> None:
    with pytest.raises(ValueError, match="has no DRM file"):
        fake.write([H100], [Client(pid=71, pci=H100.pci, client_id=1)])


def test_processes_capabilities_and_namespaces(fake: FakeSys) -> None:
    fake.write([], processes=[Process(pid=80)], capabilities=1 << 19, initial_pid_namespace=False)
    assert (fake.proc / "80/comm").read_text() == "program\n"
    assert (fake.proc / "80/stat").read_text().startswith("80 (program) S 1 ")
    assert names(fake.proc / "80/fd") == ["0"]
    assert "\nCapEff:\t0000000000080000\n" in (fake.proc / "self/status").read_text()
    other = str((fake.proc / "self/ns/pid").readlink())
    assert other == str((fake.proc / "1/ns/pid").readlink())
    fake.write([])
    assert not (fake.proc / "80").exists()
    assert str((fake.proc / "1/ns/pid").readlink()) == "pid:[4026531836]" != other


def test_processes_of_the_kfd_have_a_file_for_each_node(fake: FakeSys) -> None:
    """It has the node's ``gpu_id`` in its name and bytes in it; processes are no part of the topology."""
    fake.write([AMD, SECOND])
    generation = fake.sys / "class/kfd/kfd/topology/generation_id"
    before = generation.read_text()
    processes = [Process(pid=71, vram={2: 5 << 30, 3: 0}), Process(pid=72)]
    fake.write([AMD, SECOND], processes=processes)
    folder = fake.sys / "class/kfd/kfd/proc"
    first, second = ((fake.sys / f"class/kfd/kfd/topology/nodes/{node}/gpu_id").read_text().strip() for node in (2, 3))
    assert names(folder) == ["71"]
    assert names(folder / "71") == [
        "pasid",
        "queues",
        *(f"{kind}_{number}" for kind in ("sdma", "vram") for number in sorted((first, second))),
    ]
    assert (folder / f"71/vram_{first}").read_text() == "5368709120\n"
    assert (folder / f"71/vram_{second}").read_text() == "0\n"
    assert generation.read_text() == before
    with pytest.raises(ValueError, match="no node 9"):
        fake.write([AMD], processes=[Process(pid=71, vram={9: 1})])


def test_two_cards_may_not_claim_one_place(fake: FakeSys) -> None:
    with pytest.raises(ValueError, match="claim"):
        fake.write([AMD, replace(SECOND, minor=AMD.minor)])


def test_reading_a_broken_file_answers_eio_until_it_is_written_again(fake: FakeSys) -> None:
    fake.write([AMD])
    fake.fault(AMD.pci, "gpu_busy_percent", "eio")
    with pytest.raises(OSError, match="Input/output error"):
        (fake.device(AMD.pci) / "gpu_busy_percent").read_text()
    fake.write([AMD])
    assert (fake.device(AMD.pci) / "gpu_busy_percent").read_text() == "11\n"


def test_a_file_may_be_empty_or_missing(fake: FakeSys) -> None:
    fake.write([AMD])
    fake.fault(AMD.pci, "hwmon/*/temp1_input", "empty")
    fake.fault(AMD.pci, "hwmon/*/temp2_*", "missing")
    hwmon = fake.device(AMD.pci) / "hwmon/hwmon3"
    assert (hwmon / "temp1_input").read_bytes() == b""
    assert not list(hwmon.glob("temp2_*"))
    fake.set(AMD.pci, "hwmon/*/temp2_input", "77000\n")
    assert (hwmon / "temp2_input").read_text() == "77000\n"


def test_a_name_that_leads_nowhere_is_an_error(fake: FakeSys) -> None:
    fake.write([H100])
    with pytest.raises(FileNotFoundError, match="temp1_input"):
        fake.set(H100.pci, "hwmon/*/temp1_input", "1")


@pytest.mark.parametrize("cure", ["set", "write", "remove"])
def test_opening_a_fifo_hangs_until_the_fault_is_gone(fake: FakeSys, cure: str) -> None:
    fake.write([AMD])
    fake.fault(AMD.pci, "gpu_busy_percent", "fifo")
    with subprocess.Popen(["cat", fake.device(AMD.pci) / "gpu_busy_percent"], stdout=subprocess.PIPE) as reader:
        with pytest.raises(subprocess.TimeoutExpired):
            reader.communicate(timeout=0.3)
        {
            "set": lambda: fake.set(AMD.pci, "gpu_busy_percent", "5\n"),
            "write": lambda: fake.write([AMD]),
            "remove": lambda: fake.remove(AMD.pci),
        }[cure]()
        assert reader.communicate(timeout=10)[0] == b""


def read_as_nobody(fake: FakeSys, path: str) -> str:
    """The name of the error that someone who is not root meets at ``path``, a file or folder; or nothing."""
    program = f"""
import os
os.setuid(65534)
try:
    os.close(os.open({path!r}, os.O_RDONLY))
except OSError as error:
    print(type(error).__name__, end="")
"""
    command = mounted(fake.sys, [sys.executable, "-c", program], fake.proc)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_denied_files_and_processes_stop_those_who_are_not_root(fake: FakeSys) -> None:
    needs_root()
    client = Client(pid=71, pci=AMD.pci, client_id=1)
    fake.write([AMD], [client, replace(client, pid=72)], [Process(pid=71, readable=False)])
    fake.fault(AMD.pci, "gpu_busy_percent", "denied")
    fake.fault(AMD.pci, "hwmon", "denied")
    device = f"/sys/bus/pci/devices/{AMD.pci}"
    assert read_as_nobody(fake, f"{device}/gpu_busy_percent") == "PermissionError"
    assert read_as_nobody(fake, f"{device}/hwmon") == "PermissionError"
    assert read_as_nobody(fake, "/proc/71/fdinfo") == "PermissionError"
    assert read_as_nobody(fake, "/proc/71/comm") == ""
    assert read_as_nobody(fake, "/proc/72/fdinfo/5") == ""
    fake.write([AMD])
    assert read_as_nobody(fake, f"{device}/gpu_busy_percent") == ""
    assert read_as_nobody(fake, f"{device}/hwmon/hwmon3/name") == ""


def test_a_denied_file_has_no_rights_and_keeps_its_text(fake: FakeSys) -> None:
    fake.write([AMD])
    path = fake.device(AMD.pci) / "gpu_busy_percent"
    fake.fault(AMD.pci, "gpu_busy_percent", "denied")
    assert stat.S_IMODE(path.stat().st_mode) == 0
    path.chmod(0o400)
    assert path.read_text() == "11\n"


def test_a_reader_finds_the_old_text_or_the_new_one(fake: FakeSys) -> None:
    """Never a missing, an empty or a half-written file, however often it is written."""
    fake.write([AMD])
    path = fake.device(AMD.pci) / "gpu_busy_percent"
    seen: set[str] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            try:
                seen.add(path.read_text())
            except OSError as error:
                seen.add(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(50):
        fake.write([replace(AMD, busy=(11, 97)[number % 2])])
        fake.set(AMD.pci, "gpu_busy_percent", "53\n")
    done.set()
    reader.join()
    assert seen <= {"11\n", "97\n", "53\n"}


def test_what_did_not_change_is_not_written_again(fake: FakeSys) -> None:
    fake.write([AMD, SECOND])
    before = {path: path.lstat().st_ino for path in fake.sys.rglob("*")}
    fake.write([replace(AMD, busy=12), SECOND])
    changed = [path for path, inode in before.items() if path.lstat().st_ino != inode]
    assert {path.name for path in changed} == {"gpu_busy_percent", "gpu_metrics"}


def test_a_card_leaves_and_returns(fake: FakeSys) -> None:
    fake.write([AMD, XE], [Client(pid=71, pci=XE.pci, client_id=1)])
    generation = fake.sys / "class/kfd/kfd/topology/generation_id"
    first = int(generation.read_text())
    fake.remove(AMD.pci)
    assert not fake.device(AMD.pci).exists()
    assert not dangling(fake)
    assert names(fake.sys / "bus/pci/devices") == [XE.pci]
    assert names(fake.sys / "bus/pci/drivers/amdgpu") == ["module"]
    assert names(fake.sys / "class/drm") == ["card2", "card2-DP-1", "renderD130", "version"]
    assert names(fake.sys / "class/kfd/kfd/topology/nodes") == ["0", "1"]
    second = int(generation.read_text())
    fake.write([AMD, XE])
    assert (fake.sys / "class/drm/card1/device/gpu_busy_percent").read_text() == "11\n"
    assert first < second < int(generation.read_text())


def test_all_partitions_leave_with_their_card(fake: FakeSys) -> None:
    fake.write([PARTITIONED, AMD_BESIDE])
    fake.remove(PARTITIONED.pci)
    assert names(fake.sys / "class/drm") == ["card1", "card1-DP-1", "renderD129", "version"]
    assert names(fake.sys / "class/kfd/kfd/topology/nodes") == ["0", "1", "9"]
    assert not list(fake.sys.glob("devices/platform/*"))
    assert not dangling(fake)


def test_a_tree_becomes_another_one(fake: FakeSys, tmp_path: Path) -> None:
    """Written over an old tree or into an empty folder, the result is the same."""
    fake.write([AMD, PARTITIONED_LATE, XE], [Client(pid=71, pci=XE.pci, client_id=1)])
    fake.write([H100, replace(XE, driver="i915"), SECOND], processes=[Process(pid=9)])
    fresh = FakeSys(tmp_path / "fresh")
    fresh.write([H100, replace(XE, driver="i915"), SECOND], processes=[Process(pid=9)])
    for old, new in ((fake.sys, fresh.sys), (fake.proc, fresh.proc)):
        assert {str(path.relative_to(old)) for path in old.rglob("*")} == {
            str(path.relative_to(new)) for path in new.rglob("*")
        }


def test_a_command_sees_both_trees_and_its_broken_files(fake: FakeSys) -> None:
    needs_root()
    fake.write([AMD])
    fake.fault(AMD.pci, "gpu_busy_percent", "eio")
    command = ["cat", "/proc/self/status", f"/sys/bus/pci/devices/{AMD.pci}/gpu_busy_percent"]
    result = subprocess.run(mounted(fake.sys, command, fake.proc), capture_output=True, text=True, check=False)
    assert "CapEff:\t000001ffffffffff" in result.stdout
    assert "Input/output error" in result.stderr
    result = subprocess.run(
        mounted(fake.sys, ["ls", "/proc/self/fd", "/sys"]), capture_output=True, text=True, check=True
    )
    assert "bus" in result.stdout.split()
    assert Path("/sys/kernel").exists()


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_without_root_a_test_is_skipped_but_fails_in_ci(
    monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="needs root"):
        needs_root()


def rocm_smi(fake: FakeSys) -> dict[str, dict[str, str]]:
    """What Debian's rocm-smi says with the tree as its ``/sys``; it opens no device file."""
    needs_root()
    if shutil.which("rocm-smi") is None:
        reason = "no rocm-smi (Debian: apt-get install --no-install-recommends rocm-smi)"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    command = ["rocm-smi", "--json", "--showuse", "--showtemp", "--showmeminfo", "vram", "--showbus"]
    result = subprocess.run(mounted(fake.sys, command), capture_output=True, text=True, check=True, timeout=60)
    answer: dict[str, dict[str, str]] = json.loads(result.stdout)
    return answer


def as_rocm_smi(card: AmdCard) -> dict[str, str]:
    return {
        "PCI Bus": card.pci,
        "GPU use (%)": str(card.busy),
        "Temperature (Sensor edge) (C)": f"{card.temperatures['edge']}.0",
        "Temperature (Sensor junction) (C)": f"{card.temperatures['junction']}.0",
        "Temperature (Sensor memory) (C)": f"{card.temperatures['mem']}.0",
        "VRAM Total Memory (B)": str(card.vram_total),
        "VRAM Total Used Memory (B)": str(card.vram_used),
    }


def test_rocm_smi_reads_the_values_of_each_card(fake: FakeSys) -> None:
    """It goes by DRM minors, which are in the reverse order of the PCI addresses here."""
    fake.write([AMD, SECOND])
    answer = rocm_smi(fake)
    assert answer.keys() == {"card0", "card1"}
    assert as_rocm_smi(SECOND).items() <= answer["card0"].items()
    assert as_rocm_smi(AMD).items() <= answer["card1"].items()


def test_rocm_smi_sees_a_card_leave(fake: FakeSys) -> None:
    fake.write([AMD, SECOND])
    fake.remove(AMD.pci)
    assert [card["PCI Bus"] for card in rocm_smi(fake).values()] == [SECOND.pci]
