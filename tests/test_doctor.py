"""``doctor``: each condition that it speaks of, made for real, and what it says then."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import bcrypt
import pytest
import trustme

from exporter.faults import FAULTS
from exporter.model import FAULT_REASONS
from tests.doctor_host import HOST, NO_ADDRESS, NULL, Within, as_user, doctor, open_everything, printed, settings
from tests.fakes import nvml as fake_nvml
from tests.fakes.nvml import FakeNvml, equal_cards
from tests.fakes.shared_object import fail_in_ci_else_skip
from tests.fakes.sysfs import AmdCard, FakeSys, IntelCard, OtherCard, mounted, needs_root
from tests.harness import PROGRAM, Start, clean_environment, free_port, run
from tests.process_host import NVIDIA, ProcessHost, process_host

pytestmark = pytest.mark.e2e

NOBODY = 65534
SIMULATED = "backends: [simulated]\n"
CARDS = {**{f"nvidia{minor}": NULL for minor in range(4)}, "nvidiactl": NULL}
ADDRESS = "0000:03:00.0"


@pytest.fixture
def simulated(tmp_path: Path) -> str:
    """The flag for settings with simulated cards, and no fleet but the one that watches all."""
    return settings(tmp_path, SIMULATED + HOST)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ProcessHost]:
    """Where each card of NVIDIA's has a device file that can be opened."""
    with process_host(tmp_path, CARDS) as found:
        yield found


# --- as a whole


def test_a_healthy_host_is_0_and_every_line_a_pass(nvml: FakeNvml, host: ProcessHost, tmp_path: Path) -> None:
    """Cards that answer, files that can be opened, a fleet that has them all, an address that is free."""
    found = doctor(settings(tmp_path, HOST), environment=nvml.environment(), within=host.within)
    assert (found.status, found.bad()) == (0, [])
    assert found.one("backend", "nvidia").found == "up, with 4 cards"
    assert found.one("driver", "nvidia").found == "it answers, as version 580.95.05"
    assert found.one("library", "nvidia").found.startswith(f"loaded from {nvml.folder}/libnvidia-ml.so.1")
    assert len(list(found.of("card", "nvidia", "PASS"))) == 4
    assert len(list(found.of("device-file", "nvidia", "PASS"))) == 5
    assert found.one("fleet", "host (host)").found == "4 devices, proven"
    assert found.one("address").found == "free"


def test_a_vendor_that_the_host_has_nothing_of_is_one_quiet_line(nvml: FakeNvml, tmp_path: Path) -> None:
    """No card of AMD's or Intel's is no failure, and nothing more is said of them."""
    fake = FakeSys(tmp_path)
    fake.write([])
    flags = (settings(tmp_path, HOST), f"--path.sysfs={fake.sys}")
    found = doctor(*flags, environment=nvml.environment())
    for vendor in ("amd", "intel"):
        (line,) = [each for each in found.findings if vendor in each.subject]
        assert (line.level, line.found) == ("PASS", "no card on this host")


def test_text_and_json_say_the_same(nvml: FakeNvml, tmp_path: Path) -> None:
    """Each finding is a line in both, with the same words, and what to do is below it."""
    flag = settings(tmp_path, 'fleets: [{name: x, env: {CUDA_VISIBLE_DEVICES: "0"}}, {name: y, pid_file: /none}]\n')
    found = doctor(flag, environment=nvml.environment())
    status, text, _ = printed(flag, NO_ADDRESS, environment=nvml.environment())
    lines = []
    for each in found.findings:
        lines.append(f"{each.level}  {each.check:<12}  {each.subject}: {each.found}")
        lines += [f"{'fix: ':>25}{each.fix}"] if each.fix else []
    assert text.splitlines()[:-2] == lines
    assert status == found.status == 1
    counts = [sum(each.level == level for each in found.findings) for level in ("FAIL", "WARN", "PASS")]
    assert text.splitlines()[-1] == "{} FAIL, {} WARN, {} PASS".format(*counts)
    assert all(counts)


def test_what_is_not_as_it_should_be_comes_with_what_to_do(tmp_path: Path) -> None:
    """No WARN and no FAIL is without a sentence on that, and no PASS has one."""
    found = doctor(settings(tmp_path, "backends: [nvidia]\n"), environment={"LD_LIBRARY_PATH": ""})
    assert found.bad()
    assert all(bool(each.fix) == (each.level != "PASS") for each in found.findings)


def test_colours_are_for_terminals_and_can_be_declined(simulated: str) -> None:
    """Nothing else than the level is coloured, and only where the output is a terminal."""

    def shown(**environment: str) -> str:
        ours, theirs = pty.openpty()
        command = [*PROGRAM, "doctor", simulated, NO_ADDRESS]
        with subprocess.Popen(command, env=clean_environment(environment), stdout=theirs) as process:
            os.close(theirs)
            said = b""
            with contextlib.suppress(OSError):  # which is how a terminal says that nobody writes any more
                while piece := os.read(ours, 65536):
                    said += piece
            os.close(ours)
            assert process.wait(30) == 0
        return said.decode()

    coloured, plain = shown(NO_COLOR=""), shown(NO_COLOR="1")
    assert coloured.startswith("\x1b[32mPASS\x1b[0m  settings")
    assert "\x1b" not in plain
    assert "\x1b" not in printed(simulated, NO_ADDRESS)[1]


@pytest.mark.parametrize("flag", ["--nonsense", "--format=yaml", "--web.listen-address=nonsense"])
def test_bad_flags_are_2(flag: str) -> None:
    """What was asked for makes no sense, so nothing is looked at."""
    status, out, errors = printed(flag)
    assert (status, out) == (2, "")
    assert errors


def test_every_reason_of_a_fault_has_something_to_do_about_it() -> None:
    """The table has each of the reasons that a backend can give, and no other."""
    assert tuple(FAULTS) == FAULT_REASONS
    assert all(entry.meaning and entry.advice.endswith(".") for entry in FAULTS.values())


# --- settings


@pytest.mark.parametrize("text", ["fleets: 3\n", "flets: []\n", "fleets: [{name: x, runtme: cuda}]\n"])
def test_settings_that_are_not_valid_are_a_fail_and_all_else_is_looked_at(
    nvml: FakeNvml, tmp_path: Path, text: str
) -> None:
    """As `check-config` says it, and the cards are there by the default settings, which is said."""
    flag = settings(tmp_path, text)
    found = doctor(flag, environment=nvml.environment())
    complaint = run("check-config", flag.partition("=")[2]).stderr
    line = found.one("settings", "not valid")
    assert (line.level, found.status) == ("FAIL", 1)
    assert f"gpu-fleet-exporter: {line.found}\n" == complaint
    assert "default settings" in line.fix
    assert len(list(found.of("card", "nvidia"))) == 4
    assert found.one("fleet", "host (host)").level == "PASS"


def test_without_settings_there_is_one_fleet_and_no_complaint(nvml: FakeNvml) -> None:
    """No file is no mistake: each setting has its default, and every card is watched."""
    found = doctor(environment=nvml.environment())
    assert found.one("settings", "none").level == "PASS"
    assert found.one("fleet").subject == "host (host)"


# --- drivers, libraries, backends


def test_a_library_that_is_missing(tmp_path: Path) -> None:
    """The loader's words, and the backend's reason with what the runbook says of it."""
    found = doctor(settings(tmp_path, "backends: [nvidia]\n"), environment={"LD_LIBRARY_PATH": ""})
    assert found.status == 1
    library, backend = found.one("library", "nvidia"), found.one("backend", "nvidia")
    assert (library.level, backend.level) == ("FAIL", "FAIL")
    assert "libnvidia-ml.so.1: cannot open shared object file" in library.found
    assert backend.found.startswith("down: library-missing: ")
    assert backend.fix == FAULTS["library-missing"].advice
    assert found.one("driver", "nvidia").level == "FAIL"


def test_a_library_that_the_settings_name_and_that_is_none(tmp_path: Path) -> None:
    """For AMD and Intel it is a WARN, since their cards are read without; for NVIDIA a FAIL."""
    fake = FakeSys(tmp_path)
    fake.write([AmdCard(pci=ADDRESS), IntelCard(pci="0000:04:00.0", minor=1), OtherCard(pci="0000:05:00.0")])
    bad = tmp_path / "none.so"
    bad.write_text("no library")
    named = ", ".join(f"{vendor}: {bad}" for vendor in ("nvidia", "amd", "intel"))
    found = doctor(settings(tmp_path, f"libraries: {{{named}}}\n"), f"--path.sysfs={fake.sys}")
    levels = {each.subject: each.level for each in found.of("library")}
    assert levels == {"nvidia": "FAIL", "amd": "WARN", "intel": "WARN"}
    assert all(str(bad) in each.found for each in found.of("library"))


def test_a_library_and_a_module_of_different_versions(nvml: FakeNvml, tmp_path: Path) -> None:
    """As after an upgrade without a reboot: which version each has, and what to do."""
    fake = FakeSys(tmp_path)
    fake.write([OtherCard(pci=ADDRESS)])
    place = fake.proc / "driver/nvidia"
    place.mkdir(parents=True)
    (place / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder)\n"
    )
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    shutil.copy(nvml.folder / "libnvidia-ml.so.1", libraries / "libnvidia-ml.so.560.35.03")
    (libraries / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.560.35.03")
    nvml.write(equal_cards(4), lines=["fault nvmlInitWithFlags * 18"])
    found = doctor(
        f"--path.sysfs={fake.sys}",
        f"--path.procfs={fake.proc}",
        environment={**nvml.environment(), "LD_LIBRARY_PATH": str(libraries)},
    )
    assert found.one("driver", "nvidia").found == "nvidia 580.95.05 is loaded"
    loaded, mismatch = found.of("library", "nvidia")
    assert loaded.found == f"loaded from {libraries}/libnvidia-ml.so.560.35.03, version 560.35.03"
    assert (mismatch.level, found.status) == ("FAIL", 1)
    assert mismatch.found == "driver-mismatch: the kernel's module is 580.95.05, and the library 560.35.03"
    backend = found.one("backend", "nvidia")
    assert backend.found.startswith("down: driver-mismatch: ")
    assert "Reboot" in backend.fix


@pytest.mark.parametrize(
    ("card", "module"),
    [(AmdCard(pci=ADDRESS, driver=""), "amdgpu"), (IntelCard(pci=ADDRESS, driver=""), "xe")],
    ids=["amd", "intel"],
)
def test_a_card_that_no_driver_serves(tmp_path: Path, card: AmdCard | IntelCard, module: str) -> None:
    """Its address, and the module to load."""
    fake = FakeSys(tmp_path)
    fake.write([card])
    found = doctor(f"--path.sysfs={fake.sys}")
    line = found.one("driver", ADDRESS)
    assert (line.level, found.status) == ("FAIL", 1)
    assert f"`sudo modprobe {module}`" in line.fix


def test_a_card_of_another_kind_of_driver_is_a_warn(tmp_path: Path) -> None:
    """It is served, and not by a driver that gives readings."""
    fake = FakeSys(tmp_path)
    fake.write([AmdCard(pci=ADDRESS, driver="radeon")])
    line = doctor(f"--path.sysfs={fake.sys}").one("driver", ADDRESS)
    assert (line.level, line.found) == ("WARN", "the driver radeon serves it, which gives no readings")


def test_cards_of_virtual_machines_are_no_failure(tmp_path: Path) -> None:
    """Nothing is wrong where all of a vendor's cards are handed away."""
    fake = FakeSys(tmp_path)
    fake.write([AmdCard(pci=ADDRESS, driver="vfio-pci")])
    found = doctor(f"--path.sysfs={fake.sys}")
    assert [each for each in found.bad() if each.check in ("driver", "backend")] == []


# --- cards


def test_a_card_that_hangs_is_a_fail_and_the_end_comes_all_the_same(nvml: FakeNvml, tmp_path: Path) -> None:
    """The others are read, its files are left alone, and nobody waits for the call."""
    nvml.write(equal_cards(4), lines=["hang nvmlDeviceGetUtilizationRates 1"])
    began = time.monotonic()
    found = doctor(settings(tmp_path, HOST), environment=nvml.environment())
    assert time.monotonic() - began < 40
    hung = [each for each in found.of("card") if "hung" in each.found]
    assert [(each.level, each.subject) for each in hung] == [("FAIL", "nvidia 1 (0000:41:00.0)")]
    assert found.status == 1
    assert len(list(found.of("card", "nvidia", "PASS"))) == 3
    assert "left alone: the card is hung" in found.one("device-file", "nvidia 1").found


def test_a_driver_that_hangs_as_its_library_starts_is_a_fail(nvml: FakeNvml, tmp_path: Path) -> None:
    """It is waited for until it is known not to be slowness alone."""
    nvml.write(equal_cards(4), lines=["hang nvmlInitWithFlags *"])
    found = doctor(settings(tmp_path, "backends: [nvidia]\n"), environment=nvml.environment())
    line = found.one("backend", "nvidia")
    assert (line.level, found.status) == ("FAIL", 1)
    assert line.found.startswith("down: hung: ")
    assert line.fix == FAULTS["hung"].advice


def test_a_card_that_cannot_be_identified_is_a_fail(nvml: FakeNvml, tmp_path: Path) -> None:
    """Who it is cannot be told, so it has no line of its own."""
    nvml.write(equal_cards(4), lines=["hang * 1"])
    found = doctor(settings(tmp_path, HOST), environment=nvml.environment())
    assert [each.found for each in found.of("backend", "nvidia", "FAIL")] == [
        "a card that the library counts could not be identified"
    ]


def test_a_file_of_the_kernels_that_hangs_costs_its_checks_alone(nvml: FakeNvml, tmp_path: Path) -> None:
    """What cannot be looked at is said, and all else is there."""
    fake = FakeSys(tmp_path)
    fake.write([OtherCard(pci=ADDRESS)])
    fake.fault(ADDRESS, "class", "fifo")
    began = time.monotonic()
    found = doctor(settings(tmp_path, HOST), f"--path.sysfs={fake.sys}", environment=nvml.environment())
    assert time.monotonic() - began < 60
    line = found.one("doctor", "check_drivers")
    assert (line.level, found.status) == ("FAIL", 1)
    assert found.one("fleet", "host (host)").level == "PASS"
    assert len(list(found.of("card", "nvidia", "PASS"))) == 4


def test_a_card_that_only_the_bus_has_is_a_warn(nvml: FakeNvml, tmp_path: Path) -> None:
    """The driver serves two, and the library lists one of them: the other one is named."""
    fake = FakeSys(tmp_path)
    listed = "0000:21:00.0"
    fake.write([OtherCard(pci=listed), OtherCard(pci=ADDRESS)])
    nvml.write(equal_cards(1))
    found = doctor(settings(tmp_path, HOST), f"--path.sysfs={fake.sys}", environment=nvml.environment())
    line = found.one("card", ADDRESS)
    assert (line.level, line.found) == ("WARN", "the driver nvidia has this card, and its library does not list it")
    assert found.one("card", listed).level == "PASS"


def test_a_card_that_is_lost_is_a_fail(nvml: FakeNvml, tmp_path: Path) -> None:
    """It has told who it is, and every reading says that it has left the bus."""
    nvml.write(equal_cards(4), lines=["fault nvmlDeviceGetUtilizationRates 2 15"])
    found = doctor(settings(tmp_path, HOST), environment=nvml.environment())
    line = found.one("card", "nvidia 2 (")
    assert (line.level, found.status) == ("FAIL", 1)
    assert "lost" in line.found
    assert "left alone: the card is lost" in found.one("device-file", "nvidia 2 (").found


def test_a_card_that_sleeps_is_a_pass_and_is_left_asleep(tmp_path: Path) -> None:
    """Opening its device file, which in this host ends with an error, would wake it: it is not opened."""
    needs_root()
    fake = FakeSys(tmp_path)
    awake = "0000:04:00.0"
    fake.write([AmdCard(pci=ADDRESS, runtime_status="suspended", minor=0), AmdCard(pci=awake, minor=1)])
    files = {f"dri/renderD{minor}": (NVIDIA, minor) for minor in (128, 129)}
    with process_host(tmp_path, {**files, "kfd": (NVIDIA, 7)}) as host:
        within: Within = lambda command: host.within(mounted(fake.sys, command))  # noqa: E731
        found = doctor(settings(tmp_path, HOST), within=within)
    assert "asleep" in found.one("card", ADDRESS).found
    assert found.one("card", ADDRESS).level == "PASS"
    line = found.one("device-file", ADDRESS)
    assert (line.level, line.found.partition(":")[0]) == ("PASS", "left alone")
    (render,) = [each for each in found.of("device-file", awake) if "renderD129" in each.found]
    assert render.level == "WARN"


def test_a_card_outside_of_every_fleet_is_a_warn(nvml: FakeNvml, host: ProcessHost, tmp_path: Path) -> None:
    """Two of four cards are in a fleet: the others are named, and how to have their readings."""
    one = 'fleets: [{name: one, env: {CUDA_VISIBLE_DEVICES: "2,3", CUDA_DEVICE_ORDER: PCI_BUS_ID}, runtime: cuda}]\n'
    found = doctor(settings(tmp_path, one), environment=nvml.environment(), within=host.within)
    assert found.status == 0
    assert [each.subject for each in found.bad()] == ["nvidia 0 (0000:21:00.0)", "nvidia 1 (0000:41:00.0)"]
    assert all("{name: host, runtime: host}" in each.fix for each in found.bad())


# --- device files


def test_a_file_that_its_mode_closes(tmp_path: Path) -> None:
    """The group that owns it and the command that lets a user in are told; of mode 000 that no group will do."""
    with process_host(tmp_path, CARDS) as host:
        place = tmp_path / "fake"
        place.mkdir()
        nvml = FakeNvml(place, fake_nvml.build_or_skip(place))
        nvml.write(equal_cards(4))
        nvml.state_path.chmod(0o644)
        open_everything(host, place)
        modes = "chgrp video /dev/nvidia0 && chmod 660 /dev/nvidia0; chmod 000 /dev/nvidia1"
        subprocess.run(host.within(["sh", "-ec", modes]), check=True)
        found = doctor(settings(place, HOST), environment=nvml.environment(), within=as_user(host, NOBODY))
    assert found.one("user").subject == str(NOBODY)
    closed, grouped = found.of("device-file", level="FAIL")  # the cards are in the order of their indices
    assert (found.status, grouped.found, closed.found) == (
        1,
        "/dev/nvidia0: Permission denied",
        "/dev/nvidia1: Permission denied",
    )
    assert "`sudo usermod -aG video nobody`" in grouped.fix
    assert "`SupplementaryGroups=video`" in grouped.fix
    assert "mode 0000" in closed.fix
    assert "usermod" not in closed.fix


def test_files_that_are_not_there_or_have_no_driver(nvml: FakeNvml, tmp_path: Path) -> None:
    """One that nobody has made and one whose driver is gone are told apart."""
    files = {name: NULL for name in CARDS if name != "nvidia0"} | {"nvidia1": (NVIDIA, 1)}
    with process_host(tmp_path, files) as host:
        found = doctor(settings(tmp_path, HOST), environment=nvml.environment(), within=host.within)
    failed = {each.found.partition(":")[0]: each for each in found.of("device-file", level="FAIL")}
    assert set(failed) == {"/dev/nvidia0", "/dev/nvidia1"}
    assert "No such file" in failed["/dev/nvidia0"].found
    assert "nvidia-smi" in failed["/dev/nvidia0"].fix
    assert "No such device" in failed["/dev/nvidia1"].found
    assert "journalctl -k" in failed["/dev/nvidia1"].fix


# A file system that answers nothing, in the place of a device file: whoever looks at it waits.
_SILENT = """
import ctypes, os, sys
silent = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={silent},rootmode=100666,user_id=0,group_id=0".encode()
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"silent", sys.argv[1].encode(), b"fuse", 0, options):
    sys.exit(os.strerror(ctypes.get_errno()))
os.write(1, b"ready\\n")
os.read(0, 1)
"""


def test_an_open_that_hangs_is_told_and_not_waited_for(nvml: FakeNvml, tmp_path: Path) -> None:
    """The other files are opened, and the one that gives no answer is named."""
    if not Path("/dev/fuse").exists():
        fail_in_ci_else_skip("an open that hangs needs /dev/fuse")
    with process_host(tmp_path, {**CARDS, "fuse": (10, 229)}) as host:
        command = host.within(["python3", "-c", _SILENT, "/dev/nvidia2"])
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as silent:
            assert silent.stdin is not None
            assert silent.stdout is not None
            assert silent.stdout.readline() == b"ready\n"
            found = doctor(settings(tmp_path, HOST), environment=nvml.environment(), within=host.within)
            silent.stdin.close()  # whoever waits there is told that nobody answers any more
    (line,) = found.bad()
    assert (line.check, line.level, found.status) == ("device-file", "FAIL", 1)
    assert line.found.startswith("/dev/nvidia2: opening it has not come to an end")
    assert len(list(found.of("device-file", level="PASS"))) == 4


# --- rights and limits


def test_process_fleets_without_the_rights_for_them(tmp_path: Path) -> None:
    """A user without capabilities may look into its own processes alone; which drop-in grants more is told."""
    with process_host(tmp_path, {}) as host:
        place = tmp_path / "place"
        place.mkdir()
        open_everything(host, place)
        flag = settings(place, SIMULATED + "fleets: [{name: x, runtime: cuda, cgroup: nothing-like-it}]\n")
        found = doctor(flag, within=as_user(host, NOBODY))
        hiding = "mount -t proc -o hidepid=invisible proc /proc"
        hidden = doctor(flag, within=as_user(host, NOBODY, before=hiding))
    line = found.one("rights")
    assert (line.level, line.subject) == ("WARN", "fleets of processes (x)")
    assert "CAP_SYS_PTRACE" in line.found
    assert "process-fleets.conf" in line.fix
    line = hidden.one("rights")
    assert (line.level, hidden.one("fleet", "x (cuda)").level, hidden.status) == ("WARN", "FAIL", 1)
    assert "hidepid" in line.found
    assert "process-fleets.conf" in line.fix


def test_rights_are_nobodys_concern_without_what_needs_them(simulated: str) -> None:
    """Where no fleet is of processes and no card is Intel's, nothing is said of rights."""
    assert list(doctor(simulated).of("rights")) == []


def test_performance_counters_are_told_where_an_intel_card_is(tmp_path: Path) -> None:
    """Root may read them; who may not, and lacks a reading for it, is told the drop-in."""
    fake = FakeSys(tmp_path / "trees")
    fake.write([IntelCard(pci=ADDRESS)])
    assert doctor(f"--path.sysfs={fake.sys}").one("rights").level == "PASS"
    with process_host(tmp_path, {}) as host:
        open_everything(host, tmp_path / "trees")
        found = doctor(f"--path.sysfs={fake.sys}", within=as_user(host, NOBODY))
    if int(Path("/proc/sys/kernel/perf_event_paranoid").read_text()) <= 0:
        assert "everybody may read them" in found.one("rights").found
    else:
        line = found.one("rights")
        assert line.level == "WARN"
        assert "intel-pmu.conf" in line.fix


def test_readings_that_something_would_bring_are_hints(tmp_path: Path) -> None:
    """What the page has as a hint is a WARN with how to have it."""
    fake = FakeSys(tmp_path)
    fake.write([IntelCard(pci=ADDRESS)])
    hints = list(doctor(f"--path.sysfs={fake.sys}").of("hint", "intel"))
    assert hints
    assert {each.level for each in hints} == {"WARN"}
    assert all("a reading is missing: " in each.found and each.fix for each in hints)


def test_a_limit_of_open_files_that_costs_connections(simulated: str) -> None:
    """How many there can be, and how to raise it."""
    low: Within = lambda command: ["sh", "-c", 'ulimit -n 200; exec "$@"', "sh", *command]  # noqa: E731
    line = doctor(simulated, within=low).one("limits")
    assert (line.level, line.found) == ("WARN", "so 100 connections at once, instead of 512")
    assert "`LimitNOFILE=1024`" in line.fix
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 1024:
        enough: Within = lambda command: ["sh", "-c", 'ulimit -n 1024; exec "$@"', "sh", *command]  # noqa: E731
        assert doctor(simulated, within=enough).one("limits").level == "PASS"


# --- addresses


@pytest.mark.parametrize("host", ["127.0.0.1", "", "[::1]"])
def test_a_port_that_another_program_has(simulated: str, host: str) -> None:
    """The program is named, and by its name alone: this very one."""
    family = socket.AF_INET6 if host == "[::1]" else socket.AF_INET
    with socket.create_server((host.strip("[]"), 0), family=family) as taken:
        address = f"{host}:{taken.getsockname()[1]}"
        found = doctor(simulated, f"--web.listen-address={address}")
    line = found.one("address", address)
    assert (line.level, found.status) == ("FAIL", 1)
    assert f"(process {os.getpid()})" in line.found


def test_an_exporter_that_serves_already_is_a_pass(start: Start, simulated: str, tmp_path: Path) -> None:
    """On ports and on paths, abstract ones too."""
    path, name = tmp_path / "metrics.sock", f"unix:@gpu-fleet-exporter-{os.getpid()}-{time.monotonic_ns()}"
    daemon = start({}, SIMULATED, [f"--web.listen-address=unix:{path}", f"--web.listen-address={name}"])
    addresses = (f"127.0.0.1:{daemon.port}", f"unix:{path}", name)
    found = doctor(simulated, *(f"--web.listen-address={each}" for each in addresses))
    assert [(each.subject, each.level, each.found) for each in found.of("address")] == [
        (each, "PASS", "gpu-fleet-exporter is serving there") for each in addresses
    ]
    assert daemon.request("/-/healthy").status == 200


def test_a_web_configuration(start: Start, simulated: str, tmp_path: Path) -> None:
    """Whether it is valid, and whom it asks for; an exporter behind it lets doctor in no more than others."""
    for name, text in (
        ("tls", "tls_server_config: {cert_file: server.pem, key_file: server.key}\n"),
        ("accounts", f"basic_auth_users: {{alice: {bcrypt.hashpw(b'right', bcrypt.gensalt(4)).decode()}}}\n"),
    ):
        (tmp_path / f"{name}.yaml").write_text(text)
    issued = trustme.CA().issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    issued.private_key_pem.write_to_path(tmp_path / "server.key")
    for name, said in (("tls", "valid: TLS, NoClientCert, no accounts"), ("accounts", "valid: plain HTTP, 1 account")):
        flag = f"--web.config.file={tmp_path / name}.yaml"
        daemon = start({}, SIMULATED, [flag])
        address = f"--web.listen-address=127.0.0.1:{daemon.port}"
        found = doctor(simulated, flag, address)
        assert (found.one("web config").found, found.one("web config").level) == (said, "PASS")
        assert (found.one("address").level, found.one("address").found) == (
            "PASS",
            "gpu-fleet-exporter is serving there",
        )
    (tmp_path / "server.key").unlink()
    found = doctor(simulated, f"--web.config.file={tmp_path}/tls.yaml", NO_ADDRESS)
    assert (found.one("web config").level, found.status) == ("FAIL", 1)
    assert f"{tmp_path}/server.key: cannot be read: No such file or directory" in found.one("web config").found


def test_the_address_without_any_flag_is_the_daemons(simulated: str) -> None:
    """What would be served is looked at."""
    status, out, _ = printed(simulated, "--format=text")
    assert ":10420: " in out
    assert status in (0, 1)  # by who has the port on this machine


def test_a_port_below_1024_is_for_root(tmp_path: Path) -> None:
    """And so is how else to have it."""
    with process_host(tmp_path, {}) as host:
        place = tmp_path / "place"
        place.mkdir()
        open_everything(host, place)
        flag = settings(place, SIMULATED)
        within = as_user(host, NOBODY)
        alone: Within = lambda command: ["unshare", "--net", *within(command)]  # noqa: E731
        line = doctor(flag, "--web.listen-address=0.0.0.0:80", within=alone).one("address")
    assert line.level == "FAIL"
    assert "below 1024" in line.found
    assert "CAP_NET_BIND_SERVICE" in line.fix


def test_addresses_that_this_host_does_not_have(simulated: str) -> None:
    """An address of another host, and a name of none."""
    flags = ("--web.listen-address=192.0.2.1:9400", "--web.listen-address=no-such-host.invalid:9400")
    found = doctor(simulated, *flags)
    assert [each.level for each in found.of("address")] == ["FAIL", "FAIL"]
    assert "no interface" in found.one("address", "192.0.2.1").found
    assert "getent ahosts no-such-host.invalid" in found.one("address", "no-such-host").fix


def test_paths_that_cannot_be_listened_on_and_those_that_can(simulated: str, tmp_path: Path) -> None:
    """A file that is no socket, a folder that is not there, another program's socket; a socket left behind is fine."""
    file, other, left = (tmp_path / name for name in ("file", "other.sock", "left.sock"))
    file.write_text("kept")
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(left))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(other))
        listening.listen()
        paths = (file, tmp_path / "none/x.sock", other, left, tmp_path / "new.sock")
        found = doctor(simulated, *(f"--web.listen-address=unix:{path}" for path in paths))
    lines = list(found.of("address"))
    assert [each.level for each in lines] == ["FAIL", "FAIL", "FAIL", "PASS", "PASS"]
    assert "no socket" in lines[0].found
    assert f"install -d -m 750 -o gpu-fleet-exporter -g gpu-fleet-exporter {tmp_path}/none`" in lines[1].fix
    assert f"(process {os.getpid()})" in lines[2].found
    assert "left behind" in lines[3].found
    assert lines[4].found == "free"
    assert file.read_text() == "kept"
    assert left.is_socket()
    assert not paths[4].exists()


def test_systemds_socket_is_systemds(simulated: str) -> None:
    """With the flag no address of the program's own is looked for."""
    line = doctor(simulated, "--web.systemd-socket").one("address")
    assert (line.subject, line.level) == ("systemd's socket", "PASS")


# --- fleets


def test_a_refused_fleet_is_a_fail_with_its_advice(tmp_path: Path) -> None:
    """The code, what it means, what was found, and what to do."""
    text = (
        SIMULATED
        + 'fleets: [{name: rerank, runtime: cuda, env: {CUDA_VISIBLE_DEVICES: "1,2"}}]\nmapping: {probe: never}\n'
    )
    found = doctor(settings(tmp_path, text))
    line = found.one("fleet", "rerank (cuda)")
    assert (line.level, found.status) == ("FAIL", 1)
    assert re.match(r"order-unknown: CUDA numbers unequal cards .*; found: CUDA_DEVICE_ORDER is not set", line.found)
    assert "Set CUDA_DEVICE_ORDER=PCI_BUS_ID" in line.fix


def test_a_fleet_whose_process_is_gone_is_a_warn(tmp_path: Path) -> None:
    """It may be meant to be stopped."""
    flag = settings(tmp_path, SIMULATED + f"fleets: [{{name: x, runtime: cuda, pid_file: {tmp_path}/none.pid}}]\n")
    found = doctor(flag)
    line = found.one("fleet", "x (cuda)")
    assert (line.level, found.status) == ("WARN", 0)
    assert line.found.startswith("process-gone: ")


def test_no_fleet_at_all_is_a_warn(tmp_path: Path) -> None:
    """Where no process fills in a name there is no reading, which is said."""
    flag = settings(tmp_path, SIMULATED + 'fleets: [{name: "job-{job}", cgroup: "/no-such-job_(?P<job>[0-9]+)"}]\n')
    found = doctor(flag)
    assert found.one("fleet", "none").level == "WARN"
    assert found.status == 0


def test_fleets_beyond_the_most_are_a_warn(tmp_path: Path, host: ProcessHost) -> None:
    """How many are not shown, and the setting that has to be raised."""
    text = f"{SIMULATED}mapping: {{max_fleets: 1}}\nfleets:\n"
    text += '  - {name: "w-{pid}", runtime: cuda, process: {command: "^sleep 1234567"}}\n'
    for _ in range(3):
        host.run({"CUDA_VISIBLE_DEVICES": "0"}, ("sleep", "1234567"))
    found = doctor(settings(tmp_path, text))
    line = found.one("fleet", "max_fleets 1")
    assert (line.level, line.found) == ("WARN", "2 fleets of live processes not shown")
    assert "`mapping.max_fleets`" in line.fix


@pytest.mark.parametrize("form", ["text", "json"])
def test_of_an_environment_only_what_chooses_devices_is_ever_shown(
    tmp_path: Path, host: ProcessHost, form: str
) -> None:
    """A secret in a workload's environment, in its arguments or in doctor's own appears nowhere."""
    secret = "-".join(("hunter2", "correct", "horse"))
    environment = {"SECRET": secret, "CUDA_VISIBLE_DEVICES": "0x9, 1", "API_TOKEN": f"token-{secret}"}
    command = ("sh", "-c", f"sleep 7654321 # --password={secret}; :")
    program = host.run(environment, command)
    text = SIMULATED + f"fleets: [{{name: w, runtime: cuda, process: {{command: 'password={secret[:7]}'}}}}]\n"
    port = free_port()
    status, out, errors = printed(
        settings(tmp_path, text), f"--web.listen-address=127.0.0.1:{port}", f"--format={form}", environment=environment
    )
    assert program.process.poll() is None
    assert re.search(r"w \(cuda\)", out)
    assert "process-gone" not in out
    assert secret not in out + errors
    assert status in (0, 1)
