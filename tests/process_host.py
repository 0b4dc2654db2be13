"""A host of processes for tests: a mount namespace whose /dev has GPU device files, and programs that run in it.

Programs are real ones with real environments. They see /dev as the host does, or, as in a container, a /dev of their
own with some of the files.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.fakes.shared_object import fail_in_ci_else_skip
from tests.fakes.sysfs import needs_root

NVIDIA, CAPS, DRM = 195, 240, 226
_COMMON = ("null", "zero", "full", "random", "urandom", "tty")

DeviceFiles = Mapping[str, tuple[int, int]]
"""Major and minor number by path below /dev."""


def nvidia_files(count: int) -> dict[str, tuple[int, int]]:
    """What NVIDIA's driver puts in /dev for so many cards."""
    return {f"nvidia{minor}": (NVIDIA, minor) for minor in range(count)} | {"nvidiactl": (NVIDIA, 255)}


def render_files(*minors: int) -> dict[str, tuple[int, int]]:
    """DRM render nodes."""
    return {f"dri/renderD{minor}": (DRM, minor) for minor in minors}


def _make_dev(files: DeviceFiles, mode: str = "666") -> str:
    """Shell commands that mount a new /dev with the usual files and these."""
    lines = ["cd /", "mkdir -p $SCRATCH", "mount -t tmpfs -o mode=755 dev $SCRATCH"]
    lines += [f"cp -a /dev/{name} $SCRATCH/" for name in _COMMON]
    lines += [f"mkdir -p $SCRATCH/{folder}" for folder in sorted({str(Path(name).parent) for name in files} - {"."})]
    lines += [f"mknod -m {mode} $SCRATCH/{name} c {major} {minor}" for name, (major, minor) in files.items()]
    return "\n".join([*lines, "mount --move $SCRATCH /dev"])


def _around(closed: Path, inside: Sequence[Path]) -> str:
    """Shell commands that put a folder that all may search in a closed one's place, with these in it as they are."""
    aside = {f"/mnt/{place}": shlex.quote(str(path)) for place, path in enumerate(inside)}
    lines = ["mount -t tmpfs -o mode=755 aside /mnt", "umask 022"]
    lines += [f"mkdir {place}; mount --bind {path} {place}" for place, path in aside.items()]
    lines += [f"mount -t tmpfs -o mode=755 open {shlex.quote(str(closed))}"]
    lines += [f"mkdir -p {path}; mount --move {place} {path}" for place, path in aside.items()]
    return "\n".join([*lines, "umount /mnt"])


class Program:
    """A program that runs until it is ended."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    @property
    def pid(self) -> int:
        """Its process number."""
        return self.process.pid

    def end(self) -> None:
        """Ends it and what it started, and waits until it has gone."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


class ProcessHost:
    """The namespace. Everything that was started in it ends with it."""

    def __init__(self, directory: Path, files: DeviceFiles, mode: str = "666") -> None:
        needs_root()
        self._directory = directory
        self._stack = contextlib.ExitStack()
        scratch = directory / "dev"
        scratch.mkdir()
        script = (
            f"set -e\nSCRATCH={shlex.quote(str(scratch))}\n{_make_dev(files, mode)}\necho ready\nexec sleep 1000000"
        )
        self._holder = self._started(["unshare", "--mount", "sh", "-c", script], {}, out=subprocess.PIPE)
        assert self._holder.process.stdout is not None
        assert self._holder.process.stdout.readline() == b"ready\n"

    def close(self) -> None:
        """Ends all programs."""
        self._stack.close()

    def _started(
        self, command: Sequence[str], environment: Mapping[str, str], out: int = subprocess.DEVNULL
    ) -> Program:
        own = {"PATH": os.environ["PATH"]}
        process = subprocess.Popen(
            command, env=own | dict(environment), stdout=out, stdin=subprocess.DEVNULL, start_new_session=True
        )
        program = Program(process)
        self._stack.callback(program.end)
        return program

    def open_to_others(self, *paths: Path) -> None:
        """Lets other users than root get to these folders in the namespace, whatever folders they are in. What is in
        them has the modes that it has.
        """
        closed: dict[Path, list[Path]] = {}
        for path in {path.resolve() for path in paths}:
            barred = [parent for parent in reversed(path.parents) if not parent.stat().st_mode & 0o001]
            if barred:
                closed.setdefault(barred[0], []).append(path)
        for parent, inside in closed.items():
            subprocess.run(self.within(["sh", "-ec", _around(parent, inside)]), check=True)

    def within(self, command: Sequence[str]) -> list[str]:
        """The command, as one that runs in the host's namespace."""
        return ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", "--", *command]

    def run(
        self,
        environment: Mapping[str, str],
        command: Sequence[str] = ("sleep", "100000"),
        *,
        holding: Sequence[str] = (),
        user: int | None = None,
        cgroup: Path | None = None,
        becomes: Sequence[str] | None = None,
    ) -> Program:
        """A program with that environment, which has the ``holding`` device files open: in this namespace. ``becomes``
        is the command line that it comes to have, where that is not the command.
        """
        return self._settled(self.within(_launch(command, holding, user, cgroup)), environment, becomes or command)

    def contained(
        self,
        files: DeviceFiles,
        environment: Mapping[str, str],
        command: Sequence[str] = ("sleep", "100000"),
        cgroup: Path | None = None,
    ) -> Program:
        """A program with a /dev of its own, as a container has."""
        scratch = self._directory / f"dev{time.monotonic_ns()}"
        scratch.mkdir()
        script = f"set -e\nSCRATCH={shlex.quote(str(scratch))}\n{_make_dev(files)}\nexec {shlex.join(command)}"
        launch = _launch(["unshare", "--mount", "sh", "-c", script], (), None, cgroup)
        return self._settled(self.within(launch), environment, command)

    def run_as(self, pid: int, environment: Mapping[str, str]) -> int:
        """The number of a process, ``pid``, which was free; what it runs is ``sleep``, and ends with the host or when
        it is killed. Nobody but its own parent has to reap it.
        """
        own = {"PATH": os.environ["PATH"]} | dict(environment)
        self._started(self.within([sys.executable, "-c", _TAKER, str(pid)]), own)
        wait_for(lambda: _command_line(pid) == b"sleep\x00100000")
        return pid

    def _settled(self, launch: Sequence[str], environment: Mapping[str, str], command: Sequence[str]) -> Program:
        """The program, once it is that program and no longer what started it."""
        program = self._started(launch, environment)
        wanted = "\0".join(command).encode()
        until = time.monotonic() + 10
        while _command_line(program.pid) != wanted:
            assert program.process.poll() is None, f"{command} ended with {program.process.returncode}"
            assert time.monotonic() < until, f"{command} was not started"
            time.sleep(0.005)
        return program


def _command_line(pid: int) -> bytes:
    """Empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return b""


# Asks the kernel for a process with a number of choice (clone3's set_tid), and reaps it.
_TAKER = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
wanted = (ctypes.c_int * 1)(int(sys.argv[1]))
arguments = (ctypes.c_uint64 * 11)(0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, ctypes.addressof(wanted), 1, 0)
pid = libc.syscall(435, arguments, ctypes.c_size_t(88))
if pid == 0:
    libc.prctl(1, signal.SIGKILL)
    os.execvp("sleep", ["sleep", "100000"])
sys.exit(os.strerror(ctypes.get_errno()) if pid < 0 else os.waitpid(pid, 0)[1])
"""


# Opening a device file of a driver that is not there fails: what a test can hold open is a path alone, and that is what
# a descriptor opened with O_PATH has, numbers and all.
_LAUNCHER = """
import os, shutil, sys
holding, user, cgroup, *command = sys.argv[1:]
program = shutil.which(command[0])
for path in filter(None, holding.split(":")):
    os.set_inheritable(os.open(path, os.O_PATH), True)
if cgroup:
    open(cgroup + "/cgroup.procs", "w").write(str(os.getpid()))
if user:
    os.setgroups([]); os.setgid(int(user)); os.setuid(int(user))
os.execv(program, command)
"""


def _launch(command: Sequence[str], holding: Sequence[str], user: int | None, cgroup: Path | None) -> list[str]:
    where = [":".join(f"/dev/{name}" for name in holding), "" if user is None else str(user), str(cgroup or "")]
    return [sys.executable, "-c", _LAUNCHER, *where, *command]


@contextlib.contextmanager
def process_host(directory: Path, files: DeviceFiles, mode: str = "666") -> Iterator[ProcessHost]:
    """A host with these device files."""
    host = ProcessHost(directory, files, mode)
    try:
        yield host
    finally:
        host.close()


@contextlib.contextmanager
def control_group(name: str, controller: str = "systemd") -> Iterator[Path]:
    """A control group of that name, as a path below the hierarchy's root, which is taken away with those above it. What
    runs in it then goes to the root.
    """
    root = Path("/sys/fs/cgroup") / controller
    if not (root / "cgroup.procs").exists():
        fail_in_ci_else_skip(f"no hierarchy of control groups with {controller} (version 1) is mounted")
    path = root / name
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield path
    finally:
        for pid in (path / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                (root / "cgroup.procs").write_text(pid)
        _remove(path, root)


def _remove(path: Path, root: Path) -> None:
    """As far up as nothing else is in them; a process that is ending may be in one for a moment."""
    until = time.monotonic() + 5
    while path != root and time.monotonic() < until:
        try:
            path.rmdir()
        except FileNotFoundError:
            path = path.parent
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                if any(child.is_dir() for child in path.iterdir()):
                    return
            time.sleep(0.02)


def wait_for(condition: Callable[[], bool], within: float = 10.0) -> None:
    """Until it holds; fails when it does not come to that."""
    until = time.monotonic() + within
    while not condition():
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.02)
