"""Which GPU files a process can open, of real processes with mounts, users and control groups of their own.

The kernel here needs no GPU's driver: device files are made by number, and where one must be open, a folder of links to
the real ``/proc`` has a list of drivers in which ``/dev/null``'s major number is NVIDIA's.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exporter.fleets.access import Access
from exporter.model import Opens
from tests.fakes.sysfs import needs_root

pytestmark = pytest.mark.e2e

DRIVERS = "Character devices:\n  1 mem\n195 nvidia\n226 drm\n234 nvidia-caps\n235 kfd\n\nBlock devices:\n195 sd\n"
MEMORY_IS_NVIDIA = "Character devices:\n  1 nvidia\n"
CAPABILITIES = "config 1\nmonitor 2\ngpu0/gi1/access 3\ngpu0/gi1/ci0/access 4\ngpu1/gi2/access 138\n"
NOBODY = 65534

SLEEP = ("sh", "-c", "echo ready; exec sleep 1000")
NULL_IS_NVIDIA3 = frozenset({"nvidia3"})


class Host:
    """A ``/proc`` with drivers of the test's choice, and the real processes."""

    def __init__(self, folder: Path, drivers: str = DRIVERS, capabilities: str = CAPABILITIES) -> None:
        self.proc = folder / "proc"
        (self.proc / "driver/nvidia-caps").mkdir(parents=True)
        (self.proc / "devices").write_text(drivers)
        (self.proc / "driver/nvidia-caps/mig-minors").write_text(capabilities)
        self.show("self")
        self.show("1")

    def show(self, name: int | str) -> None:
        """Let a process be seen."""
        with contextlib.suppress(FileExistsError):
            (self.proc / str(name)).symlink_to(f"/proc/{name}")

    def access(self, pid: int) -> Access:
        """An exporter's view of this host, from now on with that process."""
        self.show(pid)
        return Access(str(self.proc), "/sys")

    def of(self, pid: int) -> Opens:
        """What a process can open, looked up anew."""
        return self.access(pid).of(pid)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@contextlib.contextmanager
def running(command: Sequence[str], descriptors: Sequence[int] = ()) -> Iterator[int]:
    """A process that has said it is ready."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=descriptors)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def as_user(user: int) -> list[str]:
    """The start of a command that another user runs."""
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]


@contextlib.contextmanager
def sleeper(*descriptors: int, user: int | None = None) -> Iterator[int]:
    """A process that has these descriptors open."""
    with running([*(as_user(user) if user is not None else ()), *SLEEP], descriptors) as pid:
        yield pid


@contextlib.contextmanager
def with_dev(script: str, *, user: int | None = None, before: str = "") -> Iterator[int]:
    """A process with a ``/dev`` of its own, which ``script`` fills; ``before`` runs while the host's is still there."""
    needs_root()
    fill = f"set -e; umask 0; {before}\nmount -t tmpfs -o mode=755 tmpfs /dev; cd /dev; {script}\n"
    sleep = shlex.join([*as_user(user), *SLEEP]) if user is not None else shlex.join(SLEEP)
    with running(["unshare", "-m", "--propagation", "private", "sh", "-c", f"{fill} exec {sleep}"]) as pid:
        yield pid


def dev_of(pid: int) -> Path:
    """A process's own /dev, from outside."""
    return Path("/proc", str(pid), "root", "dev")


def told(opens: Opens) -> str:
    return "; ".join(opens.told)


# --- what is in a /dev


def test_files_go_by_their_numbers_wherever_they_lie(host: Host) -> None:
    """Names mean nothing: cards are found by number in /dev, dri and nvidia-caps, and what is no card is left out."""
    script = """mkdir dri nvidia-caps other
        mknod -m 666 first c 195 1; mknod -m 666 nvidia7 c 195 0; mknod -m 666 nvidiactl c 195 255
        mknod -m 666 nvidia-modeset c 195 254; mknod -m 666 kfd c 235 0; mknod -m 666 sda b 195 5
        mknod -m 666 dri/card0 c 226 0; mknod -m 666 dri/renderD128 c 226 129; mknod -m 666 other/nvidia9 c 195 9"""
    with with_dev(script) as pid:
        opens = host.of(pid)
    assert opens.may == frozenset({"nvidia0", "nvidia1", "renderD129", "kfd"})
    assert (opens.unsure, opens.held, opens.here) == (frozenset(), frozenset(), False)
    assert f"/dev under {host.proc}/{pid}/root has kfd, nvidia0, nvidia1, renderD129" in opens.told
    assert f"{host.proc}/{pid}/fd has no GPU file open" in opens.told


def test_later_render_nodes_go_by_the_name_that_the_kernel_has(host: Host, tmp_path: Path) -> None:
    """Above 191 a DRM number does not tell the kind of device, and sysfs does."""
    links = tmp_path / "sys/dev/char"
    links.mkdir(parents=True)
    (links / "226:200").symlink_to("../../devices/pci0000:00/0000:00:01.0/drm/renderD200")
    (links / "226:201").symlink_to("../../devices/pci0000:00/0000:00:01.0/drm/card201")
    script = "mkdir dri; for n in 191 200 201 202; do mknod -m 666 dri/n$n c 226 $n; done"
    with with_dev(script) as pid:
        host.show(pid)
        assert Access(str(host.proc), str(tmp_path / "sys")).of(pid).may == frozenset({"renderD191", "renderD200"})


def test_a_mig_instance_needs_both_of_its_capabilities(host: Host) -> None:
    """The capability of the GPU instance and that of the compute instance, each to be read; one alone is nothing."""
    both = "mkdir nvidia-caps; mknod -m 444 nvidia-caps/a c 234 3; mknod -m 444 nvidia-caps/b c 234 4"
    with with_dev(both, user=NOBODY) as pid:
        assert host.of(pid).may == frozenset({"nvidia0/gi1/ci0"})
    for one in ("mknod -m 444 nvidia-caps/a c 234 3", "mknod -m 444 nvidia-caps/b c 234 4"):
        with with_dev(f"mkdir nvidia-caps; {one}; mknod -m 444 nvidia-caps/c c 234 138", user=NOBODY) as pid:
            assert host.of(pid).may == frozenset()
    with with_dev(both.replace("-m 444 nvidia-caps/a", "-m 400 nvidia-caps/a"), user=NOBODY) as pid:
        assert host.of(pid).may == frozenset()


def test_a_device_that_is_mounted_on_a_plain_file_is_found(host: Host) -> None:
    """Rootless containers have their devices so."""
    before = "mount -t tmpfs -o dev tmpfs /mnt; mknod -m 666 /mnt/n c 195 2"
    with with_dev("touch nvidia2; mount --bind /mnt/n nvidia2", before=before) as pid:
        assert host.of(pid).may == frozenset({"nvidia2"})


def test_nobody_opens_devices_of_a_file_system_mounted_without(host: Host) -> None:
    """``nodev`` stops root too."""
    with with_dev("mknod -m 666 nvidia0 c 195 0; mount -o remount,nodev /dev") as pid:
        assert host.of(pid).may == frozenset()


@pytest.mark.parametrize(
    "script", ["mkdir /dev/real; ln -s /dev/real dri", "ln -s /sys/class/drm dri", "touch dri"], ids=str
)
def test_no_link_in_a_dev_is_followed(host: Host, script: str) -> None:
    """A folder that is something else may hide cards, or lead out: then it is not known what the process can open."""
    with with_dev(f"mknod -m 666 nvidia0 c 195 0; {script}") as pid:
        opens = host.of(pid)
    assert opens.may is None
    assert f"/dev under {host.proc}/{pid}/root: Not a directory" in opens.told


def test_a_root_without_dev_has_no_files_and_a_dev_that_is_a_link_is_not_known(host: Host, tmp_path: Path) -> None:
    """A changed root counts: what lies outside cannot be opened, and a link from it leads nowhere."""
    needs_root()
    program = "import os, sys, time; os.chroot(sys.argv[1]); print('ready', flush=True); time.sleep(1000)"
    root = tmp_path / "root"
    root.mkdir()
    with running([sys.executable, "-c", program, str(root)]) as pid:
        assert host.of(pid).may == frozenset()
        (root / "dev").symlink_to("/dev")
        assert host.of(pid).may is None


def test_the_own_dev_is_known(tmp_path: Path) -> None:
    """A process that shares the exporter's /dev is here, and what it may open is what lies there."""
    with sleeper() as pid:
        opens = Host(tmp_path, MEMORY_IS_NVIDIA).of(pid)
    assert opens.here
    assert opens.may is not None
    assert opens.may >= NULL_IS_NVIDIA3


def test_what_was_listed_holds_until_the_next_round(host: Host) -> None:
    """Processes that see the same share a listing, which is made anew after a refresh."""
    with with_dev("mknod -m 666 nvidia0 c 195 0") as pid:
        access = host.access(pid)
        assert access.of(pid).may == frozenset({"nvidia0"})
        subprocess.run(["mknod", "-m", "666", f"{dev_of(pid)}/nvidia1", "c", "195", "1"], check=True)
        assert access.of(pid).may == frozenset({"nvidia0"})
        access.refresh()
        assert access.of(pid).may == frozenset({"nvidia0", "nvidia1"})


# --- modes


def test_modes_let_users_open_or_not(host: Host) -> None:
    """A user needs to read and to write, as owner, in a group, or as anybody; root's capability overrides the mode."""
    script = f"""mknod -m 666 a c 195 0; mknod -m 444 b c 195 1; mknod -m 660 c c 195 2; mknod -m 660 d c 195 3
        chown 0:{NOBODY} d; mknod -m 606 e c 195 4; chown 0:{NOBODY} e; mknod -m 600 f c 195 5; chown {NOBODY} f"""
    with with_dev(script, user=NOBODY) as pid:
        opens = host.of(pid)
        assert opens.may == frozenset({"nvidia0", "nvidia3", "nvidia5"})
        assert any(line.endswith("deny it nvidia1, nvidia2, nvidia4") for line in opens.told)
    with with_dev(script) as pid:
        assert host.of(pid).may == frozenset({f"nvidia{number}" for number in range(6)})


def test_a_folder_that_may_not_be_searched_hides_its_files(host: Host) -> None:
    """A file's own mode is not all."""
    with with_dev("mkdir -m 700 dri; mknod -m 666 dri/a c 226 128; mknod -m 666 b c 195 0", user=NOBODY) as pid:
        assert host.of(pid).may == frozenset({"nvidia0"})


def test_root_of_another_user_namespace_overrides_nothing(host: Host) -> None:
    """All the capabilities there are of no use for the host's files."""
    script = "mknod -m 600 nvidia0 c 195 0; mknod -m 666 nvidia1 c 195 1"
    with with_dev(script) as outer:
        enter = ["nsenter", "-t", str(outer), "-m", *as_user(NOBODY), "unshare", "-U", "-r"]
        with running([*enter, *SLEEP]) as pid:
            assert "CapEff:\t0000000000000000" not in Path(f"/proc/{pid}/status").read_text()
            assert host.of(pid).may == frozenset({"nvidia1"})


def entry(tag: int, rights: int, who: int = 0xFFFFFFFF) -> bytes:
    return struct.pack("<HHI", tag, rights, who)


def access_list(*between: bytes, group: int = 0, mask: int = 6) -> bytes:
    """As logind's ``uaccess`` sets it: the owner may all, others nothing."""
    return struct.pack("<I", 2) + b"".join(
        [entry(1, 6), *between[:1], entry(4, group), *between[1:], entry(16, mask), entry(32, 0)]
    )


@pytest.mark.parametrize(
    ("acl", "may"),
    [
        (access_list(entry(2, 6, NOBODY)), True),
        (access_list(entry(2, 4, NOBODY)), False),
        (access_list(entry(2, 6, NOBODY), mask=4), False),
        (access_list(entry(2, 6, 1000)), False),
        (access_list(entry(2, 6, 1000), entry(8, 6, NOBODY)), True),
        (access_list(entry(2, 6, 1000), entry(8, 4, NOBODY)), False),
        (access_list(entry(2, 6, NOBODY), mask=0), False),
    ],
)
def test_an_access_list_decides_where_there_is_one(host: Host, acl: bytes, may: bool) -> None:
    """A named user, a named group and the mask count as they do for the kernel; the mode alone says nothing."""
    with with_dev("mknod -m 660 nvidia0 c 195 0; mknod -m 666 null c 1 3", user=NOBODY) as pid:
        os.setxattr(f"{dev_of(pid)}/nvidia0", "system.posix_acl_access", acl)
        assert host.of(pid).may == frozenset({"nvidia0"} if may else ())
        os.setxattr(f"{dev_of(pid)}/null", "system.posix_acl_access", acl)
        assert can_open(pid, "/dev/null") is may  # the kernel's own word


def can_open(pid: int, path: str) -> bool:
    """Whether a process of the same user and mounts opens a file to read and write."""
    enter = ["nsenter", "-t", str(pid), "-m", *as_user(NOBODY)]
    result = subprocess.run([*enter, "sh", "-c", f": <> {path}"], capture_output=True, check=False)
    return result.returncode == 0


# --- what is open


def test_what_is_open_is_held_under_any_name(tmp_path: Path) -> None:
    """By number, also once the file is gone or was of another name, and not what is no GPU's."""
    host = Host(tmp_path, MEMORY_IS_NVIDIA)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(Path(path).open("rb")) for path in ("/dev/null", "/dev/zero", "/proc/self/status")]
        pid = stack.enter_context(sleeper(*(file.fileno() for file in files)))
        access = host.access(pid)
        assert access.of(pid).held == frozenset({"nvidia3", "nvidia5"})
        assert access.of(pid).held == {"nvidia3", "nvidia5"}
        assert access.of(pid).holds
        assert f"{host.proc}/{pid}/fd has nvidia3, nvidia5 open" in access.of(pid).told


def test_the_control_device_is_a_gpus_and_no_card(tmp_path: Path) -> None:
    """/dev/nvidiactl alone: something uses the driver, and no card is held; without it nothing does."""
    host = Host(tmp_path, "Character devices:\n136 nvidia-frontend\n")  # terminals
    with contextlib.ExitStack() as stack:
        terminals: list[int] = []
        while not terminals or os.minor(os.fstat(terminals[-1]).st_rdev) < 255:
            assert len(terminals) < 600
            for descriptor in os.openpty():
                stack.callback(os.close, descriptor)
                terminals.append(descriptor)
        pid = stack.enter_context(sleeper(terminals[-1]))
        assert (host.of(pid).held, host.of(pid).holds) == (frozenset(), True)
        pid = stack.enter_context(sleeper())
        assert (host.of(pid).held, host.of(pid).holds) == (frozenset(), False)


# --- who may not be seen, and what ends


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Without any right, for as long as it lasts."""
    needs_root()
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def test_a_reader_without_rights_knows_that_it_does_not_know(tmp_path: Path) -> None:
    """Of another user's process neither its /dev nor its open files; of one's own both."""
    needs_root()
    with sleeper() as pid, as_nobody():
        access = Access("/proc", "/sys")
        opens = access.of(pid)
        assert (opens.may, opens.held, opens.holds) == (None, frozenset(), False)
        assert opens.told == (f"/dev under /proc/{pid}/root: Permission denied", f"/proc/{pid}/fd cannot be read")
    with sleeper(user=NOBODY) as pid, as_nobody():
        access = Access("/proc", "/sys")
        assert (access.of(pid).held, access.of(pid).here) == (frozenset(), True)
        assert access.of(pid).may is not None


def test_a_process_that_has_ended_can_open_nothing_that_is_known(host: Host) -> None:
    """Neither one that is gone nor one that nobody has reaped."""
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert host.of(process.pid).may is None
    process.wait()
    assert host.of(process.pid).may is None
    assert host.of(process.pid).held == frozenset()
    assert not host.of(process.pid).holds


# --- any bytes


def pretend(folder: Path) -> Path:
    """A process of files: root and open files of the test's own."""
    process = folder / "7"
    for name in ("root/dev/dri", "fd", "ns"):
        (process / name).mkdir(parents=True)
    (process / "fd/0").symlink_to("/dev/null")
    (folder / "self/ns").mkdir(parents=True)
    (folder / "self/ns/cgroup").symlink_to("cgroup:[4026531835]")
    return process


ODD = (
    b"Uid:\t0\t0\t0\t0",
    b"Uid:\t1",
    b"Gid:\t0\t0\t0",
    b"Gid:\t-1\t2\t3\t4",
    b"Groups:\tx",
    b"Groups:\t",
    b"CapEff:\tffffffffffffffff",
    b"0::/a\0b",
    b"0::/..",
    b"0::",
    b"0::/\xff.service",
    b"5:devices:/" + b"x" * 5000,
    b"9999 nvidia",
    b"1 kfd",
    b"gpu0/gi1/access 4294967296",
    b"gpu9/gi1/ci0/access 7",
    b"Character devices:",
    b"Block devices:",
)
ANY_LINE = st.binary(max_size=40).map(lambda data: data.replace(b"\n", b""))
LINES = st.lists(st.one_of(ANY_LINE, st.sampled_from(ODD)), max_size=12).map(b"\n".join)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(status=LINES, groups=LINES, devices=LINES, capabilities=LINES)
def test_any_bytes_end_in_an_answer(
    tmp_path_factory: pytest.TempPathFactory, status: bytes, groups: bytes, devices: bytes, capabilities: bytes
) -> None:
    """Whatever the files hold, there is an answer, and it can be written in UTF-8."""
    folder = tmp_path_factory.mktemp("proc")
    process = pretend(folder)
    (folder / "driver/nvidia-caps").mkdir(parents=True)
    (folder / "driver/nvidia-caps/mig-minors").write_bytes(capabilities)
    (folder / "devices").write_bytes(devices)
    (process / "status").write_bytes(status)
    (process / "cgroup").write_bytes(groups)
    opens = Access(str(folder), str(folder / "sys")).of(7)
    assert opens.may in (None, frozenset())
    "".join(opens.told).encode()


@pytest.mark.parametrize("name", ["7/status", "7/cgroup", "devices", "driver/nvidia-caps/mig-minors", "self/status"])
def test_a_pipe_in_a_files_place_is_not_waited_for(tmp_path: Path, name: str) -> None:
    """It is as if it were not there."""
    pretend(tmp_path)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(tmp_path / name)
    assert stat.S_ISFIFO((tmp_path / name).stat().st_mode)
    assert Access(str(tmp_path), str(tmp_path / "sys")).of(7).may is None


def test_a_gpus_file_that_is_a_link_is_not_known(host: Host) -> None:
    """What it leads to may be a card that the process can open; links of other names mean nothing."""
    script = "mkdir x; mknod -m 666 x/n c 195 2; mknod -m 666 nvidia1 c 195 1; ln -s"
    for link, may in [("x/n nvidia0", None), ("x/n other", frozenset({"nvidia1"}))]:
        with with_dev(f"{script} {link}") as pid:
            assert host.of(pid).may == may
