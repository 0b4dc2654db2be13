"""A machine for tests, run by a real systemd as process 1, in namespaces, over an overlay of this machine's root.

It has this machine's programs and none of its running ones; its own /run, /tmp, /dev, network and control groups; and
what is written in it is gone with it. Memory limits do not hold in it where the kernel's controllers are elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.fakes.shared_object import fail_in_ci_else_skip
from tests.fakes.sysfs import needs_root
from tests.harness import Scrape, parse

SYSTEMD = "/lib/systemd/systemd"
UNIT = "gpu-fleet-exporter.service"
SOURCE = "/opt/gpu-fleet-exporter"
"""Where the project lies in the machine, as an administrator has unpacked it."""
_WHEELS = "/opt/wheels"
_ROOT = Path(__file__).parents[1]
_PARTS = ("exporter", "systemd", "prometheus", "grafana", "docs")
_FILES = ("Makefile", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "config.example.yaml")
# Of no vendor's class, and open to all by its mode: what a sandbox has to keep out.
OTHER_DEVICE = ("fuse", 10, 229)
DEVICES = (
    *((f"nvidia{minor}", 195, minor) for minor in range(4)),
    *(("nvidiactl", 195, 255), ("dri/renderD128", 226, 128), ("accel/accel0", 261, 0)),
)

# What happens in the new namespaces, before systemd is what runs in them.
_BOOT = """
set -e
mount --make-rprivate /
mount --bind $R $R
mount -t proc proc $R/proc
mount -t sysfs -o ro sysfs $R/sys
mount -t tmpfs tmpfs $R/sys/fs
mkdir -p $R/sys/fs/cgroup
mount -t cgroup2 cgroup2 $R/sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs $R/run
mount -t tmpfs -o mode=1777 tmpfs $R/tmp
mount -t tmpfs -o mode=755 tmpfs $R/dev
for name in null zero full random urandom tty; do : > $R/dev/$name; mount --bind /dev/$name $R/dev/$name; done
ln -s /proc/self/fd $R/dev/fd
mkdir $R/dev/shm $R/dev/pts $R/dev/dri $R/dev/accel
mount -t tmpfs -o mode=1777 tmpfs $R/dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts $R/dev/pts
ln -s pts/ptmx $R/dev/ptmx
$DEVICES
ip link set lo up
cd $R
exec env -i container=test PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot . $SYSTEMD --system systemd.mask=systemd-udevd
"""

Result = subprocess.CompletedProcess[str]


class ServiceHost:
    """The machine. ``root`` is its root folder, seen from this machine, without what is in its /run, /tmp and /dev."""

    def __init__(self, directory: Path) -> None:
        _needs()
        self._upper, self.root = directory / "upper", directory / "root"
        self._group = _unified() / f"gpu-fleet-exporter-test-{os.getpid()}-{time.monotonic_ns()}"
        for folder in (self._upper, self.root):
            folder.mkdir()
        _run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(self._upper))
        for name in ("changed", "scratch"):
            (self._upper / name).mkdir(mode=0o755)
        layers = f"lowerdir=/,upperdir={self._upper}/changed,workdir={self._upper}/scratch"
        _run("mount", "-t", "overlay", "overlay", "-o", layers, str(self.root))
        for wanted in (self.root / "etc/systemd/system").glob("*.wants"):
            shutil.rmtree(wanted)
        # A container's, by which packages start no service there.
        (self.root / "usr/sbin/policy-rc.d").unlink(missing_ok=True)
        self.write("/etc/fstab", "")
        self._process: subprocess.Popen[bytes] | None = None
        self._init = 0

    def boot(self) -> None:
        """Starts it, and waits until it has come up."""
        self._group.mkdir()
        devices = (f"mknod -m 666 $R/dev/{name} c {major} {minor}" for name, major, minor in (*DEVICES, OTHER_DEVICE))
        script = f"R={self.root}; SYSTEMD={SYSTEMD}\n{_BOOT.replace('$DEVICES', chr(10).join(devices))}"
        namespaces = "exec unshare --mount --pid --fork --uts --ipc --net --cgroup --kill-child sh -c"
        inside = f'echo $$ > {self._group}/cgroup.procs && {namespaces} "$0"'
        self._process = subprocess.Popen(
            ["sh", "-c", inside, script], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self.wait_for(self._has_come_up, 30)

    def _has_come_up(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, "systemd did not start"
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self._init = int(children[0]) if children else 0
        if not self._init or Path(f"/proc/{self._init}/comm").read_text() != "systemd\n":
            return False
        state = self.run("systemctl", "is-system-running").stdout.strip()
        return state in ("running", "degraded")

    def run(self, *command: str, **environment: str) -> Result:
        """A command of root's in it."""
        return subprocess.run(
            self.command(*command, **environment), capture_output=True, text=True, check=False, timeout=120
        )

    def command(self, *command: str, **environment: str) -> list[str]:
        """What runs a command in it."""
        plain = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C"}
        assignments = (f"{name}={value}" for name, value in {**plain, **environment}.items())
        return ["nsenter", f"--target={self._init}", "--all", "--wd=/", "--root", "env", "-i", *assignments, *command]

    def do(self, *command: str, **environment: str) -> str:
        """What a command prints that has to succeed; the journal is shown where it does not."""
        result = self.run(*command, **environment)
        assert result.returncode == 0, f"{command}: {result.stdout}{result.stderr}\n{self.journal()}"
        return result.stdout

    def write(self, path: str, text: str) -> None:
        """A file in it, read by all."""
        place = self.root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(0o644)

    def journal(self, unit: str = UNIT) -> str:
        """What the unit, and systemd about it, have logged."""
        return self.run("journalctl", "--no-pager", "--output=cat", f"--unit={unit}").stdout

    def show(self, *properties: str, unit: str = UNIT) -> dict[str, str]:
        """Properties of a unit."""
        shown = self.do("systemctl", "show", f"--property={','.join(properties)}", unit)
        return dict(line.split("=", 1) for line in shown.splitlines())

    def main_pid(self, unit: str = UNIT) -> int:
        """The service's main process, as this machine numbers it."""
        inner = self.show("MainPID", unit=unit)["MainPID"]
        return next(pid for pid in self.members(unit) if _numbers(pid)[-1] == inner)

    def members(self, unit: str = UNIT) -> list[int]:
        """The service's processes, as this machine numbers them."""
        group = self.show("ControlGroup", unit=unit)["ControlGroup"]
        listed = Path(f"{self._group}{group}/cgroup.procs")
        return [int(pid) for pid in listed.read_text().split()] if group and listed.exists() else []

    def scrape(self, address: str = "localhost:10420") -> Scrape:
        """A page, from inside."""
        return parse(self.do("python3", "-c", _GET, f"http://{address}/metrics"))

    def scrape_until(self, holds: Callable[[Scrape], bool], within: float = 20.0) -> Scrape:
        """Scrape until a page is as wanted."""
        until = time.monotonic() + within
        while not holds(page := self.scrape()):
            assert time.monotonic() < until, f"never so: {page.samples}\n{self.journal()}"
            time.sleep(0.2)
        return page

    def wait_for(self, condition: Callable[[], bool], within: float = 20.0) -> None:
        """Until it holds."""
        until = time.monotonic() + within
        while not condition():
            assert time.monotonic() < until, f"it did not come to that\n{self.journal() if self._init else ''}"
            time.sleep(0.05)

    def close(self) -> None:
        """Ends it, and takes away all that it was."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._init or self._process.pid, signal.SIGKILL)
            self._process.wait(20)
        for mounted in (self.root, self._upper):
            _run("umount", "--lazy", str(mounted))
        _remove_groups(self._group)


_GET = """
import sys, urllib.request
with urllib.request.urlopen(sys.argv[1], timeout=20) as answer:
    sys.stdout.write(answer.read().decode())
"""


def _numbers(pid: int) -> list[str]:
    """A process's numbers, from the outermost namespace to its own."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return line.split()[1:]
    return [""]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _needs() -> None:
    needs_root()
    missing = [name for name in ("unshare", "nsenter", "ip", "chroot", "make") if shutil.which(name) is None]
    missing += [] if Path(SYSTEMD).exists() else ["systemd"]
    if missing:
        fail_in_ci_else_skip(f"booting a machine needs {', '.join(missing)}")


def _unified() -> Path:
    """Where control groups of version 2 are mounted."""
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    found = next((place for _, place, kind, *_ in mounts if kind == "cgroup2"), None)
    return Path(found) if found else fail_in_ci_else_skip("booting a machine needs control groups of version 2")


def _remove_groups(top: Path) -> None:
    """Those that the machine made; its processes may take a moment to go."""
    until = time.monotonic() + 5
    while top.exists() and time.monotonic() < until:
        for folder in sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True):
            with contextlib.suppress(OSError):
                folder.rmdir()
        with contextlib.suppress(OSError):
            top.rmdir()
        time.sleep(0.02)


@contextlib.contextmanager
def service_host(directory: Path) -> Iterator[ServiceHost]:
    """A machine that has not been booted yet."""
    host = ServiceHost(directory)
    try:
        yield host
    finally:
        host.close()


def unpack_source(host: ServiceHost) -> None:
    """The project as it is in this folder, and the packages that its installation wants, which the machine has no
    network for.
    """
    place = host.root / SOURCE.lstrip("/")
    copy_source(place)
    _fetch(place, host.root / _WHEELS.lstrip("/"))


def copy_source(place: Path) -> None:
    """The project's files, as an archive of it has them."""
    for name in _PARTS:
        shutil.copytree(_ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
    for name in _FILES:
        shutil.copy2(_ROOT / name, place / name)


def _fetch(source: Path, wheels: Path) -> None:
    """By the Python that the installation takes, since some packages are compiled for one version."""
    tools = wheels.with_name("fetching")
    _run("/usr/bin/python3", "-m", "venv", str(tools))
    packages = [f"{source}[all]", "hatchling>=1.21"]
    fetched = subprocess.run(
        [f"{tools}/bin/pip", "download", "--quiet", "--disable-pip-version-check", f"--dest={wheels}", *packages],
        capture_output=True,
        text=True,
        check=False,
    )
    assert fetched.returncode == 0, fetched.stderr
    shutil.rmtree(tools)


OFFLINE: Mapping[str, str] = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": _WHEELS}
"""Variables by which pip takes what :func:`unpack_source` has fetched."""
