"""What filters a process's devices, of real control groups of both versions, with real programs on them.

Of systemd only what ``systemctl`` prints is made up; the control groups that it is asked about are there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from exporter.fleets.device_filter import _BPF_CALL, Filters
from tests.fakes.shared_object import fail_in_ci_else_skip
from tests.fakes.sysfs import needs_root
from tests.test_access import MEMORY_IS_NVIDIA, NULL_IS_NVIDIA3, Host, as_nobody, sleeper, told, with_dev

pytestmark = pytest.mark.e2e

GROUPS = Path("/sys/fs/cgroup")
UNIFIED = GROUPS / "unified" if (GROUPS / "unified").is_dir() else GROUPS


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@contextlib.contextmanager
def group(folder: Path) -> Iterator[Path]:
    """A new control group and what it takes above it; processes in it are ended."""
    made = [path for path in reversed([folder, *folder.parents]) if not path.exists()]
    for path in made:
        path.mkdir()
    try:
        yield folder
    finally:
        for path in reversed(made):
            _remove(path)


def _remove(path: Path) -> None:
    for pid in (path / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    until = time.monotonic() + 10
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            path.rmdir()
            return
        time.sleep(0.01)


def put(folder: Path, pid: int) -> None:
    (folder / "cgroup.procs").write_text(str(pid))


@pytest.fixture
def listed() -> Path:
    """The first version's hierarchy of device filters."""
    needs_root()
    if not (GROUPS / "devices/devices.list").exists():
        fail_in_ci_else_skip("no control groups of the first version filter devices here")
    return GROUPS / "devices"


@pytest.fixture
def unified() -> Path:
    """The second version's hierarchy."""
    needs_root()
    if not (UNIFIED / "cgroup.controllers").exists():
        fail_in_ci_else_skip("no control groups of the second version here")
    return UNIFIED


CARDS = "mknod -m 666 a c 195 0; mknod -m 666 b c 195 1; mkdir dri; mknod -m 666 dri/r c 226 128"


def test_without_a_filter_there_is_none(host: Host) -> None:
    """A process where all start, in the root's control groups."""
    needs_root()
    if set(Path("/proc/self/cgroup").read_text().split(":")[2::2]) - {"/"} and os.path.lexists(GROUPS / "system.slice"):
        fail_in_ci_else_skip("the tests run in a control group that somebody may filter")
    with with_dev(CARDS) as pid:
        opens = host.of(pid)
    assert opens.filtered is False
    assert opens.may == frozenset({"nvidia0", "nvidia1", "renderD128"})


def test_a_list_of_devices_is_applied(host: Host, listed: Path) -> None:
    """What a control group of the first version lets through, to read and to write, is known to the last device."""
    with with_dev(CARDS) as pid, group(listed / f"exporter-test-{pid}") as folder:
        (folder / "devices.deny").write_text("a")
        (folder / "devices.allow").write_text("c 195:1 rw")
        (folder / "devices.allow").write_text("c 226:* r")
        (folder / "devices.allow").write_text("b *:* rwm")
        put(folder, pid)
        opens = host.of(pid)
        assert (opens.may, opens.filtered) == (frozenset({"nvidia1"}), False)
        assert f"device filter: devices.list of /{folder.name}" in opens.told
        (folder / "devices.allow").write_text("c 195:* rwm")
        assert host.of(pid).may == frozenset({"nvidia0", "nvidia1"})
        (folder / "devices.deny").write_text("a")
        assert host.of(pid).may == frozenset()


def test_a_list_that_lets_all_through_does_not_show_what_was_taken_from_it(tmp_path: Path, listed: Path) -> None:
    """The kernel still writes ``a *:* rwm``, so nothing is known of the filter; but that there is one where Slurm has
    control groups of this controller, which it makes to take a job's other cards.
    """
    host = Host(tmp_path, MEMORY_IS_NVIDIA)
    for name, filtered in [("slurm-{}/uid_0/job_7", True), ("other-{}/job_7", None)]:
        with sleeper() as pid, group(listed / name.format(pid)) as folder:
            (folder / "devices.deny").write_text("c 1:5 rwm")
            put(folder, pid)
            assert (folder / "devices.list").read_text() == "a *:* rwm\n"
            opens = host.of(pid)
            assert opens.here
            assert opens.filtered is filtered


class Query(NamedTuple):
    """The kernel's ``bpf`` call, as the tests need it."""

    call: int

    def __call__(self, command: int, attributes: bytes) -> int:
        """Its result; raises ``OSError``."""
        given = ctypes.create_string_buffer(attributes, 128)
        result: int = ctypes.CDLL(None, use_errno=True).syscall(self.call, command, given, 128)
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result


@contextlib.contextmanager
def program_on(folder: Path, verdict: int = 1) -> Iterator[None]:
    """A program that filters a control group's devices: it answers ``verdict`` for all."""
    bpf = Query(_BPF_CALL.get(platform.machine(), -1))
    code = ctypes.create_string_buffer(struct.pack("=BBhiBBhi", 0xB7, 0, 0, verdict, 0x95, 0, 0, 0))
    license_text = ctypes.create_string_buffer(b"GPL")
    loaded = struct.pack("=IIQQ", 15, 2, ctypes.addressof(code), ctypes.addressof(license_text))
    try:
        program = bpf(5, loaded)
    except OSError as error:
        fail_in_ci_else_skip(f"this kernel loads no program that filters devices: {error}")
    target = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    attached = struct.pack("=IIII", target, program, 6, 0)
    try:
        bpf(8, attached)
        yield
        bpf(9, attached)
    finally:
        os.close(target)
        os.close(program)


def test_programs_on_a_control_group_or_above_are_a_filter(tmp_path: Path, unified: Path) -> None:
    """That there is one is known, and not what it denies; without any it is known that there is none."""
    host = Host(tmp_path, MEMORY_IS_NVIDIA)
    with sleeper() as pid, group(unified / f"exporter-test-{pid}/below") as folder:
        put(folder, pid)
        opens = host.of(pid)
        assert (opens.filtered, opens.here) == (False, True)
        assert "no device filter (bpf)" in opens.told
        for place in (folder, folder.parent):
            with program_on(place):
                opens = host.of(pid)
                assert opens.filtered is True
                assert opens.may is not None
                assert opens.may >= NULL_IS_NVIDIA3
                assert f"a device filter (bpf, 1 programs) on /exporter-test-{pid}/below" in opens.told


def test_a_containers_dev_has_what_its_filter_lets_through(host: Host, unified: Path) -> None:
    """A known runtime makes both; a batch system's filter comes on top, and others may combine them as they like."""
    with with_dev(CARDS) as pid, group(unified / f"docker-{pid:012x}.scope") as folder, program_on(folder):
        put(folder, pid)
        opens = host.of(pid)
        assert opens.filtered is False
        assert "is a container's own" in told(opens)
    for name in ("slurm-test", "lxc-test", "docker-gc"):
        with with_dev(CARDS) as pid, group(unified / f"{name}-{pid}") as folder, program_on(folder):
            put(folder, pid)
            assert host.of(pid).filtered is True


def test_both_versions_filter_where_both_are_mounted(host: Host, listed: Path, unified: Path) -> None:
    """A list that is known does not outweigh a program that is not."""
    with contextlib.ExitStack() as stack:
        pid = stack.enter_context(with_dev(CARDS))
        old = stack.enter_context(group(listed / f"slurm-test-{pid}"))
        new = stack.enter_context(group(unified / f"slurm-test-{pid}"))
        (old / "devices.deny").write_text("a")
        (old / "devices.allow").write_text("c 195:0 rw")
        put(old, pid)
        put(new, pid)
        assert (host.of(pid).may, host.of(pid).filtered) == (frozenset({"nvidia0"}), False)
        with program_on(new):
            assert (host.of(pid).may, host.of(pid).filtered) == (frozenset({"nvidia0"}), True)


# --- what systemd says, where the kernel does not


@pytest.fixture
def systemctl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Puts a program in systemctl's place that runs a script, and records what it is asked; for all users."""
    with tempfile.TemporaryDirectory(prefix="systemctl-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

        def write(script: str) -> Path:
            program, record = folder / "systemctl", folder / "asked"
            record.touch()
            record.chmod(0o666)
            program.write_text(f'#!/bin/sh\necho "$*" >> {record}\n{script}\n')
            program.chmod(0o755)
            return record

        yield write


def unit_of(name: str, group_path: str, policy: str = "auto", allow: Sequence[str] = (), load: str = "loaded") -> str:
    lines = [f"Id={name}", f"ControlGroup={group_path}", f"DevicePolicy={policy}", f"LoadState={load}"]
    return "\n".join([*lines, *(f"DeviceAllow={each}" for each in allow)])


def shows(*blocks: str) -> str:
    return "cat <<'END'\n" + "\n\n".join(blocks) + "\nEND"


def asked_without_rights(pid: int) -> bool | None:
    """The kernel does not answer who has no right to ask it for programs."""
    with as_nobody():
        filters = Filters("/proc", "/sys")
        filters.refresh()
        return filters.of(pid).filtered


@pytest.mark.parametrize(
    ("unit", "slice_of", "expected"),
    [
        ({}, {}, False),
        ({"policy": "closed"}, {}, True),
        ({"allow": ("/dev/rtc r", "char-drm rw")}, {}, True),
        ({}, {"policy": "strict"}, True),
        ({"load": "not-found"}, {}, None),
        ({"group_path": "/somewhere/else.service"}, {}, None),
    ],
    ids=str,
)
def test_systemd_tells_of_its_units(
    systemctl: Callable[[str], Path],
    unified: Path,
    unit: dict[str, Any],
    slice_of: dict[str, Any],
    expected: bool | None,
) -> None:
    """No filter only where neither the unit nor a slice above it has one, and it is this systemd's unit."""
    with sleeper() as pid, group(unified / f"exporter{pid}.slice/exporter{pid}.service") as folder:
        put(folder, pid)
        path = f"/{folder.parent.name}/{folder.name}"
        record = systemctl(
            shows(
                unit_of("-.slice", "/"),
                unit_of(folder.parent.name, f"/{folder.parent.name}", **slice_of),
                unit_of(folder.name, **{"group_path": path, **unit}),
            )
        )
        assert asked_without_rights(pid) is expected
        assert record.read_text().endswith(f"-- -.slice {folder.parent.name} {folder.name}\n")


def test_a_unit_of_the_first_version_is_told_by_systemd(
    tmp_path: Path, systemctl: Callable[[str], Path], listed: Path
) -> None:
    """Where the list lets all through; asked once, and again only after a minute or for another control group."""
    host = Host(tmp_path, MEMORY_IS_NVIDIA)
    with sleeper() as pid, group(listed / f"exporter{pid}.service") as folder:
        put(folder, pid)
        record = systemctl(shows(unit_of("-.slice", "/"), unit_of(folder.name, f"/{folder.name}")))
        access = host.access(pid)
        for _ in range(3):
            access.refresh()
            opens = access.of(pid)
            assert opens.filtered is False
            assert f"no device filter (systemd) on /{folder.name}" in opens.told
        assert len(record.read_text().splitlines()) == 1


@pytest.mark.parametrize("script", ["exit 1", "echo Id=", "printf '\\377\\n\\n\\n=\\n'", "exec sleep 1000"])
def test_a_systemd_that_says_nothing_of_use_leaves_it_open(
    systemctl: Callable[[str], Path], unified: Path, script: str
) -> None:
    """It is not waited for, and where it fails not asked for each further process."""
    with sleeper() as pid, group(unified / f"exporter{pid}.service") as folder:
        put(folder, pid)
        systemctl(script)
        started = time.monotonic()
        assert asked_without_rights(pid) is None
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("path", ["{}.scope/job_7", "slurm{}.scope", "{}", "{}.slice/x*.service", "plain/{}.service"])
def test_what_is_not_systemds_alone_is_not_asked_of_it(
    systemctl: Callable[[str], Path], unified: Path, path: str
) -> None:
    """Below a unit, or in a control group of another's making, somebody else may have put a filter; Slurm does so."""
    with sleeper() as pid, group(unified / path.format(f"exporter{pid}")) as folder:
        put(folder, pid)
        record = systemctl("exit 1")
        assert asked_without_rights(pid) is None
        assert record.read_text() == ""


def test_below_a_users_manager_its_own_unit_counts(systemctl: Callable[[str], Path], unified: Path) -> None:
    """It may put no filter on what it starts."""
    with sleeper() as pid, group(unified / f"e{pid}.slice/user@7.service/app.slice/x-{pid}") as folder:
        put(folder, pid)
        top = f"e{pid}.slice"
        blocks = [unit_of("-.slice", "/"), unit_of(top, f"/{top}")]
        systemctl(shows(*blocks, unit_of("user@7.service", f"/{top}/user@7.service")))
        assert asked_without_rights(pid) is False
