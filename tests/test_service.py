"""The installed service under a real systemd: supervised, sandboxed, reloaded, stopped, activated by its socket."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import bcrypt
import pytest
import trustme

from exporter.refusals import REFUSALS
from tests.fakes import amd_smi, cuda, nvml, ze_loader
from tests.fakes.nvml import FakeNvml, equal_cards
from tests.fakes.sysfs import FakeSys, IntelCard
from tests.harness import Scrape, tool
from tests.service_host import OFFLINE, OTHER_DEVICE, SOURCE, UNIT, ServiceHost, service_host, unpack_source
from tests.test_amd_library import DPX, PARTS
from tests.test_intel_sysman import gpu as sysman_gpu
from tests.test_probed_fleets import MIXED, ORDER, STATED, to_cuda

pytestmark = pytest.mark.e2e

SOCKET = "gpu-fleet-exporter.socket"
SETTINGS = "/etc/gpu-fleet-exporter/config.yaml"
SHIPPED = "/usr/local/share/gpu-fleet-exporter"
DROP_INS = f"/etc/systemd/system/{UNIT}.d"
FAKES = "/opt/fakes"
ARC = IntelCard(pci="0000:07:00.0", device_id="0xe20b", driver="xe", minor=3)
HOST = "sampling: {reuse_seconds: 0}\nfleets:\n  - {name: host, runtime: host}\n"
ONE = HOST + '  - {name: one, runtime: cuda, env: {CUDA_VISIBLE_DEVICES: "1", CUDA_DEVICE_ORDER: PCI_BUS_ID}}\n'


class Machine:
    """A booted machine on which the service is installed, and what drives its cards."""

    def __init__(self, host: ServiceHost) -> None:
        self.host = host
        place = host.root / FAKES.lstrip("/")
        place.mkdir(mode=0o755)
        libraries = host.root / "usr/lib/x86_64-linux-gnu"
        shutil.copy2(nvml.build_or_skip(place / "build") / "libnvidia-ml.so.1", libraries)
        shutil.copy2(cuda.build_or_skip(place / "build") / "libcuda.so.1", libraries)
        shutil.copy2(ze_loader.build_or_skip(place / "build"), libraries / ze_loader.SONAME)
        rocm = host.root / "opt/rocm/lib"
        rocm.mkdir(parents=True)
        shutil.copy2(amd_smi.build_or_skip(place / "build"), rocm / amd_smi.SONAME)
        self.nvml = FakeNvml(place)
        self.cuda = cuda.FakeCuda(place)
        amd_smi.FakeAmdSmi(place, rocm / amd_smi.SONAME).write(PARTS)
        ze_loader.FakeZeLoader(place, libraries / ze_loader.SONAME).write([sysman_gpu(ARC)])
        FakeSys(place).write([DPX, ARC])
        variables = {
            "FAKE_NVML_STATE": f"{FAKES}/nvml.state",
            "FAKE_CUDA_STATE": f"{FAKES}/cuda.state",
            "FAKE_AMD_SMI_STATE": f"{FAKES}/amd_smi.state",
            "FAKE_ZE_STATE": f"{FAKES}/ze_loader.state",
            "OPTIONS": f"--path.sysfs={FAKES}/sys",
        }
        host.write("/etc/default/gpu-fleet-exporter", "".join(f"{name}={text}\n" for name, text in variables.items()))

    def settle(self, settings: str = HOST) -> None:
        """These settings, no drop-in, four equal cards that answer, and a service that has just been started."""
        self.nvml.write(equal_cards(4))
        self.cuda.remove()
        self.host.write(SETTINGS, settings)
        shutil.rmtree(self.host.root / DROP_INS.lstrip("/"), ignore_errors=True)
        self.host.run("systemctl", "stop", SOCKET, UNIT)
        self.host.run("systemctl", "reset-failed")
        self.host.do("systemctl", "daemon-reload")
        self.host.do("systemctl", "start", UNIT)

    def drop_in(self, name: str) -> None:
        """A drop-in of those that are shipped, put in as docs/installation.md says, and the service started anew."""
        self.host.do("mkdir", "-p", DROP_INS)
        self.host.do("ln", "-s", f"{SHIPPED}/{name}", f"{DROP_INS}/{name}")
        self.host.do("systemctl", "daemon-reload")
        self.host.do("systemctl", "restart", UNIT)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """`sudo make install` on a booted machine, and the service enabled and started."""
    with service_host(tmp_path_factory.mktemp("machine")) as host:
        unpack_source(host)
        found = Machine(host)
        for name in ("group", "gshadow"):  # a host that has never had a GPU lacks these groups
            place = host.root / "etc" / name
            lines = place.read_text().splitlines(keepends=True)
            place.write_text("".join(line for line in lines if not line.startswith(("video:", "render:"))))
        host.boot()
        host.do("make", "-C", SOURCE, "install", **OFFLINE)
        host.do("systemctl", "enable", "--now", UNIT)
        yield found


def cards(page: Scrape, fleet: str = "host", vendor: str = "nvidia") -> list[str]:
    found = page.of("gpu_temperature_celsius", fleet=fleet, vendor=vendor)
    return sorted(sample.labels["physical_index"] for sample in found)


def refusal(page: Scrape, fleet: str) -> str:
    return "".join(sample.labels["reason"] for sample in page.of("gpu_fleet_mask_refusal_info", fleet=fleet))


def status_of(pid: int) -> dict[str, str]:
    """What the kernel says of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: text.strip() for name, _, text in (line.partition(":") for line in lines)}


def capabilities(host: ServiceHost) -> dict[str, str]:
    """The effective ones of the daemon, and of each vendor's worker."""
    found = {}
    for pid in host.members():
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        name = words[words.index("exporter.worker") + 1] if "exporter.worker" in words else "daemon"
        found[name] = status_of(pid)["CapEff"]
    return found


# --- installation


def test_prometheus_has_the_series_of_every_vendor(machine: Machine) -> None:
    """From make install to a real Prometheus with the scrape configuration that is shipped."""
    prometheus, promtool = tool("prometheus"), tool("promtool")
    machine.settle()
    shipped = machine.host.do("cat", "/usr/local/share/doc/gpu-fleet-exporter/prometheus/scrape.yaml")
    machine.host.write("/opt/prometheus.yaml", shipped.replace("scrape_interval: 15s", "scrape_interval: 1s"))
    flags = ["--config.file=/opt/prometheus.yaml", "--storage.tsdb.path=/tmp/tsdb"]
    machine.host.do("sed", "-i", "s/scrape_timeout: 10s/scrape_timeout: 1s/", "/opt/prometheus.yaml")
    machine.host.do("systemd-run", "--unit=prometheus-test", prometheus, *flags)
    query = [promtool, "query", "instant", "http://localhost:9090", "count by (vendor) (gpu_temperature_celsius)"]
    machine.host.wait_for(lambda: machine.host.run(*query).stdout.count("vendor=") == 3)
    machine.host.do("systemctl", "stop", "prometheus-test")
    shown = machine.host.run(*query[:-1], "x").stdout
    assert "nvidia" not in shown


def test_systemd_finds_nothing_to_say_about_the_units(machine: Machine) -> None:
    """An unknown key only warns, so any output would be a fault; exposure is at most 2.0 without drop-ins."""
    folder = "/usr/local/lib/systemd/system"
    for unit in (UNIT, SOCKET):
        verified = machine.host.run("systemd-analyze", "verify", f"{folder}/{unit}")
        assert (verified.returncode, verified.stdout + verified.stderr) == (0, "")
    machine.host.do("systemd-analyze", "security", "--offline=yes", "--threshold=20", f"{folder}/{UNIT}")


@pytest.mark.parametrize("name", ["process-fleets.conf", "intel-pmu.conf"])
def test_systemd_finds_nothing_to_say_about_the_drop_ins(machine: Machine, name: str) -> None:
    """Each is read without a word, and the service runs with it."""
    machine.settle()
    machine.drop_in(name)
    verified = machine.host.run("systemd-analyze", "verify", UNIT, SYSTEMD_UNIT_PATH="/usr/local/lib/systemd/system:")
    assert "drop" not in verified.stderr
    assert machine.host.show("DropInPaths", "NRestarts") == {"DropInPaths": f"{DROP_INS}/{name}", "NRestarts": "0"}
    assert cards(machine.host.scrape()) == ["0", "1", "2", "3"]


# --- the sandbox

# What a program in the service's place can do, as JSON. Each attempt is what the sandbox has to prevent, or to let.
PROBE = r"""
import ctypes, errno, json, mmap, os, socket, subprocess
libc = ctypes.CDLL(None, use_errno=True)
def tried(act):
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "")
def opened(path, flags=os.O_RDWR):
    return tried(lambda: os.close(os.open(path, flags)))
def written(folder):
    return tried(lambda: os.close(os.open(folder + "/probe", os.O_CREAT | os.O_RDWR)))
def owner(pid):
    try:
        return os.stat("/proc/" + pid).st_uid
    except OSError:
        return os.getuid()
found = {
    "user": os.getuid(), "groups": sorted(os.getgroups()),
    "write": {folder: written(folder) for folder in
              ("/", "/etc", "/usr", "/var", "/var/lib", "/opt", "/root", "/home", "/run", "/run/lock",
               "/run/gpu-fleet-exporter", "/dev", "/dev/mqueue", "/dev/shm", "/tmp", "/var/tmp", os.environ["HOME"])},
    "device": {path: opened(path) for path in DEVICES},
    "others": [pid for pid in os.listdir("/proc") if pid.isdigit() and owner(pid) != os.getuid()],
    "first": opened("/proc/1/stat", os.O_RDONLY), "meminfo": opened("/proc/meminfo", os.O_RDONLY),
    "write+execute": tried(lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_WRITE | mmap.PROT_EXEC | mmap.PROT_READ)),
    "netlink": tried(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)),
    "packet": tried(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)),
    "unshare": tried(lambda: call("unshare", 0x10000000)),
    "mount": tried(lambda: call("mount", b"none", b"/tmp", b"tmpfs", 0, None)),
    "ptrace": tried(lambda: call("ptrace", 0, 0, 0, 0)),
    "perf": tried(lambda: call("syscall", 298, 0, 0, -1, -1, 0)),
    "setuid": tried(lambda: os.setuid(0)),
    "tmp": [name for folder in ("/tmp", "/dev/shm") for name in os.listdir(folder) if name != "probe"],
    "systemctl": subprocess.run(["systemctl", "show", "--property=DevicePolicy", "--", "system.slice"],
                                capture_output=True, text=True).stdout,
}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def probed(machine: Machine) -> dict[str, object]:
    """The probe, run by the unit as it is installed but for what it runs."""
    host = machine.host
    host.write("/opt/probe.py", PROBE.replace("DEVICES", repr([f"/dev/{name}" for name in [*LET, OTHER_DEVICE[0]]])))
    unit = (host.root / f"usr/local/lib/systemd/system/{UNIT}").read_text()
    unit = re.sub(r"^(Type=).*$", r"\1oneshot", unit, flags=re.MULTILINE)
    unit = re.sub(r"^ExecStart=.*$", "ExecStart=/usr/bin/python3 /opt/probe.py", unit, flags=re.MULTILINE)
    unit = re.sub(r"^(Restart|WatchdogSec|ExecReload).*\n", "", unit, flags=re.MULTILINE)
    host.write("/etc/systemd/system/probe.service", unit)
    host.do("touch", "/tmp/of-the-host", "/dev/shm/of-the-host")  # noqa: S108
    host.do("chmod", "1777", "/run/lock")
    host.do("mkdir", "-p", "-m", "1777", "/dev/mqueue")
    host.do("systemctl", "daemon-reload")
    host.do("systemctl", "start", "probe.service")
    line = next(line for line in host.journal("probe.service").splitlines() if line.startswith("{"))
    found: dict[str, object] = json.loads(line)
    return found


LET = ["nvidia0", "nvidiactl", "dri/renderD128", "accel/accel0"]


def test_the_service_has_no_capability_and_no_way_to_one(machine: Machine) -> None:
    """Neither the daemon nor a worker has any, in any set; both are filtered and may gain nothing."""
    machine.settle()
    machine.host.scrape()
    members = machine.host.members()
    assert len(members) == 4  # the daemon, and a worker a vendor
    for pid in members:
        status = status_of(pid)
        assert {status[f"Cap{name}"] for name in ("Inh", "Prm", "Eff", "Bnd", "Amb")} == {"0" * 16}
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        assert set(status["Uid"].split()) != {"0"}


def test_it_is_in_the_groups_of_the_device_files(machine: Machine, probed: dict[str, object]) -> None:
    """They were made where they were missing: a service whose group does not exist is not started."""
    lines = [line.split(":") for line in machine.host.do("getent", "group", "video", "render").splitlines()]
    wanted = {int(number) for _, _, number, _ in lines}
    assert len(wanted) == 2
    groups = probed["groups"]
    assert isinstance(groups, list)
    assert wanted < set(groups)


def test_it_writes_in_its_own_folders_alone(machine: Machine, probed: dict[str, object]) -> None:
    """The system, the homes and other services' folders are read-only, or not there."""
    written = probed["write"]
    assert isinstance(written, dict)
    assert written.pop("/var/lib/gpu-fleet-exporter") == "done"
    assert written.pop("/run/gpu-fleet-exporter") == "done"
    for own in ("/tmp", "/var/tmp", "/dev/shm"):  # noqa: S108
        assert written.pop(own) == "done"
        assert machine.host.run("ls", f"{own}/probe").returncode != 0  # its own, and gone with it
    assert set(written.values()) <= {"EROFS", "EACCES", "EPERM"}
    assert probed["tmp"] == []


def test_it_opens_the_devices_of_gpus_alone(machine: Machine, probed: dict[str, object]) -> None:
    """The classes are let through to a driver that is not here; what is open to all by its mode is not."""
    opened = probed["device"]
    assert isinstance(opened, dict)
    assert opened.pop(f"/dev/{OTHER_DEVICE[0]}") == "EPERM"
    assert set(opened) == {f"/dev/{name}" for name in LET}
    assert set(opened.values()) == {"ENXIO"}
    outside = machine.host.run("sh", "-c", f": < /dev/{OTHER_DEVICE[0]}").stderr
    assert "not permitted" not in outside  # so it was the sandbox


def test_it_sees_no_other_users_processes_but_the_drivers_files(probed: dict[str, object]) -> None:
    """The first process is hidden, and so are all that are not its own; /proc has the rest."""
    assert probed["others"] == []
    assert probed["first"] == "ENOENT"
    assert probed["meminfo"] == "EPERM" or probed["meminfo"] == "done"


def test_calls_that_it_does_not_need_are_refused(probed: dict[str, object]) -> None:
    """New namespaces, mounts, tracing, performance counters, other families of sockets, memory to write and run."""
    for name in ("unshare", "mount", "ptrace", "perf", "setuid", "write+execute"):
        assert probed[name] in ("EPERM", "EACCES"), name
    assert {probed["netlink"], probed["packet"]} == {"EAFNOSUPPORT"}


def test_the_sandboxed_workers_use_the_real_bindings(machine: Machine) -> None:
    """All three vendors answer: pynvml, amdsmi and pyzes load and call without memory to write and run."""
    machine.settle()
    page = machine.host.scrape_until(lambda page: len(page.of("gpu_exporter_backend_up")) == 3)
    assert {sample.value for sample in page.of("gpu_exporter_backend_up")} == {1}
    assert cards(page) == ["0", "1", "2", "3"]
    for number, busy in (("0", 7), ("1", 8)):  # what of AMD's the library alone tells
        assert page.value("gpu_utilization_percent", fleet="host", vendor="amd", gpu_partition=number) == busy
    assert page.value("gpu_memory_free_bytes", fleet="host", vendor="intel") == 6 * 2**30


_FILTERS = """
import os
from exporter.fleets.unit_policy import UnitPolicies
policies = UnitPolicies()
for unit in ("dbus.service", "gpu-fleet-exporter.service"):
    group = "/system.slice/" + unit
    print(unit, policies.has_filter(group, os.stat("/sys/fs/cgroup" + group).st_ino))
"""


def test_systemd_is_asked_which_units_have_a_device_filter(machine: Machine, probed: dict[str, object]) -> None:
    """A real systemctl answers any user, also from within the sandbox; the exporter's own unit has a filter."""
    machine.settle()
    python = ["/usr/local/lib/gpu-fleet-exporter/bin/python3", "-I", "-c", _FILTERS]
    told = machine.host.do("runuser", "-u", "gpu-fleet-exporter", "--", *python)
    assert told == "dbus.service False\ngpu-fleet-exporter.service True\n"
    assert probed["systemctl"] == "DevicePolicy=auto\n"


def test_drivers_are_asked_within_the_sandbox(machine: Machine) -> None:
    """The process that asks libcuda has what it needs: unlike cards have the driver's order."""
    machine.settle(f"{HOST}  - {STATED}\n")
    machine.nvml.write(MIXED)
    machine.cuda.write([to_cuda(card) for card in MIXED], order=ORDER)
    machine.host.do("systemctl", "restart", UNIT)
    wanted = {"fleet": "stated", "vendor": "nvidia"}
    page = machine.host.scrape_until(lambda page: bool(page.of("gpu_fleet_device_info", **wanted)))
    found = page.of("gpu_fleet_device_info", **wanted)
    assert {each.labels["evidence"] for each in found} == {"probed"}
    shown = {each.labels["fleet_index"]: each.labels["physical_index"] for each in found}
    assert shown == {"0": str(ORDER[0]), "1": str(ORDER[1])}


# --- supervision


def test_the_status_line_says_what_there_is(machine: Machine) -> None:
    """It follows the cycles: devices, fleets, refusals, and backends that are down."""
    machine.settle(ONE + "  - {name: none, runtime: vulkan}\n")
    machine.host.scrape()
    text = machine.host.show("StatusText")["StatusText"]
    assert text == "8 devices; 3 fleets, 1 refused: none (raw-order-unknown)"
    machine.nvml.write(equal_cards(4), lines=["fault nvmlDeviceGetCount_v2 * 9"])
    machine.nvml.remove()
    machine.host.scrape_until(lambda page: page.value("gpu_exporter_backend_up", vendor="nvidia") == 0)
    assert "backends down: nvidia (" in machine.host.show("StatusText")["StatusText"]


def test_the_journal_has_the_levels(machine: Machine) -> None:
    """`journalctl --priority=warning` shows the warnings and leaves out the rest, and no line shows how."""
    machine.settle(f"{HOST}  - {{name: vulkan, runtime: vulkan}}\n")
    invocation = machine.host.show("InvocationID")["InvocationID"]
    shown = ["journalctl", "--output=cat", f"_SYSTEMD_INVOCATION_ID={invocation}"]
    everything = machine.host.do(*shown).splitlines()
    assert [line for line in everything if "msg=listening" in line]
    warnings = machine.host.do(*shown, "--priority=warning").splitlines()
    assert warnings == [line for line in everything if "level=warn" in line]
    assert [line for line in warnings if 'msg="masks refused" fleet=vulkan' in line]
    assert {line.partition("=")[0] for line in everything} == {"time"}


def test_a_reload_takes_new_settings_and_keeps_the_processes(machine: Machine) -> None:
    """`systemctl reload` is SIGHUP, and the daemon and its workers stay who they were."""
    machine.settle()
    machine.host.scrape()
    members = machine.host.members()
    machine.host.write(SETTINGS, ONE)
    machine.host.do("systemctl", "reload", UNIT)
    machine.host.scrape_until(lambda page: cards(page, "one") == ["1"])
    assert machine.host.members() == members
    assert machine.host.show("ActiveState", "NRestarts") == {"ActiveState": "active", "NRestarts": "0"}


def test_a_reload_of_a_bad_file_fails_and_leaves_the_daemon_alone(machine: Machine) -> None:
    """`systemctl reload` says so, the log has file, line and key, and the old settings serve on."""
    machine.settle(ONE)
    machine.host.write(SETTINGS, "fleets: [{name: x, runtme: cuda}]\n")
    assert machine.host.run("systemctl", "reload", UNIT).returncode != 0
    assert f"{SETTINGS}:1: fleets[0].runtme" in machine.host.journal()
    page = machine.host.scrape()
    assert cards(page, "one") == ["1"]
    assert page.value("gpu_exporter_config_last_reload_successful") == 0
    assert machine.host.show("StatusText")["StatusText"].startswith("settings not loaded, the earlier ones hold; ")
    assert machine.host.show("ActiveState")["ActiveState"] == "active"


def test_a_bad_file_at_the_start_is_not_tried_again_and_again(machine: Machine) -> None:
    """Status 2 ends it: the file is the same a moment later."""
    machine.settle()
    machine.host.write(SETTINGS, "fleets: 3\n")
    assert machine.host.run("systemctl", "restart", UNIT).returncode != 0
    assert f"{SETTINGS}:1: fleets: " in machine.host.do("journalctl", "--priority=err", f"--unit={UNIT}")
    shown = machine.host.show("ActiveState", "Result", "NRestarts", "ExecMainStatus")
    assert shown == {"ActiveState": "failed", "Result": "exit-code", "NRestarts": "0", "ExecMainStatus": "2"}


def test_a_daemon_that_stalls_is_ended_by_the_watchdog(machine: Machine) -> None:
    """A main loop that does not get on is started anew, and the log says where it was."""
    machine.settle()
    machine.host.write(f"{DROP_INS}/quick.conf", "[Service]\nWatchdogSec=2\nRestartSec=0\nTimeoutAbortSec=2\n")
    machine.host.do("systemctl", "daemon-reload")
    machine.host.do("systemctl", "restart", UNIT)
    time.sleep(3)
    before = machine.host.main_pid()
    assert machine.host.show("NRestarts")["NRestarts"] == "0"  # it is fed while the loop runs
    os.kill(before, signal.SIGSTOP)
    machine.host.wait_for(lambda: machine.host.show("NRestarts")["NRestarts"] == "1")
    machine.host.wait_for(lambda: machine.host.show("ActiveState")["ActiveState"] == "active")
    journal = machine.host.journal()
    assert "Watchdog timeout" in journal
    assert "Fatal Python error: Aborted" in journal  # and the stack of every thread
    assert cards(machine.host.scrape()) == ["0", "1", "2", "3"]
    assert not Path(f"/proc/{before}").exists()


def test_cards_that_hang_do_not_feed_the_watchdog_nor_starve_it(machine: Machine) -> None:
    """With every vendor's call hanging the daemon is as well as ever, for longer than the watchdog waits."""
    machine.settle(HOST.replace("reuse_seconds: 0", "reuse_seconds: 0, deadline_seconds: 0.5"))
    machine.host.write(f"{DROP_INS}/quick.conf", "[Service]\nWatchdogSec=2\n")
    machine.host.do("systemctl", "daemon-reload")
    machine.host.do("systemctl", "restart", UNIT)
    machine.nvml.write(equal_cards(4), lines=["hang * *"])
    until = time.monotonic() + 5
    while time.monotonic() < until:
        page = machine.host.scrape()
    assert cards(page) == []
    assert machine.host.show("NRestarts")["NRestarts"] == "0"


def test_a_daemon_that_crashes_is_started_anew(machine: Machine) -> None:
    """SIGKILL is no end; no process of the first is left, and the second serves."""
    machine.settle()
    machine.host.write(f"{DROP_INS}/quick.conf", "[Service]\nRestartSec=0\n")
    machine.host.do("systemctl", "daemon-reload")
    machine.host.scrape()
    before = machine.host.members()
    os.kill(machine.host.main_pid(), signal.SIGKILL)
    machine.host.wait_for(lambda: machine.host.show("NRestarts")["NRestarts"] == "1")
    machine.host.wait_for(lambda: machine.host.show("ActiveState")["ActiveState"] == "active")
    assert cards(machine.host.scrape()) == ["0", "1", "2", "3"]
    assert not set(before) & set(machine.host.members())


def test_a_stop_during_a_hung_vendor_call_takes_less_than_five_seconds(machine: Machine) -> None:
    """And it is a clean one: status 0, by itself, with no process left."""
    machine.settle()
    machine.host.scrape()
    machine.nvml.write(equal_cards(4), lines=["hang * *"])
    waiting = subprocess.Popen(machine.host.command("python3", "-c", _WAIT), stdout=subprocess.PIPE, text=True)
    time.sleep(0.5)
    began = time.monotonic()
    machine.host.do("systemctl", "stop", UNIT)
    assert time.monotonic() - began < 5
    assert machine.host.show("Result", "ExecMainStatus") == {"Result": "success", "ExecMainStatus": "0"}
    assert machine.host.members() == []
    answer, _ = waiting.communicate(timeout=10)
    assert answer == "200\n"  # the one who waited for a page got one, without those cards


_WAIT = """
import urllib.request
print(urllib.request.urlopen("http://localhost:10420/metrics", timeout=20).status)
"""


# --- the socket

# Scrapes without a pause until told to stop by a file; prints how many were answered, and what went wrong.
_SCRAPER = """
import http.client, os, sys
answered, wrong = 0, []
while not os.path.exists("/run/enough"):
    connection = http.client.HTTPConnection("localhost", 10420, timeout=20)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        text = answer.read().decode()
        values = text.count("\\ngpu_temperature_celsius{")
        down = [line for line in text.splitlines() if line.startswith("gpu_exporter_backend_up") and line[-3:] == "0.0"]
        if answer.status != 200 or down or not values:
            wrong.append(f"{answer.status} {values} {down}")
        answered += 1
    except OSError as error:
        wrong.append(repr(error))
    finally:
        connection.close()
print(answered, *wrong, sep="\\n")
"""


def test_with_the_socket_no_scrape_is_lost_over_restarts(machine: Machine) -> None:
    """Four scrapers without a pause, five restarts: every scrape is answered, with every vendor up."""
    machine.settle()
    machine.host.do("systemctl", "stop", UNIT)
    machine.host.do("systemctl", "start", SOCKET)
    assert cards(machine.host.scrape()) == ["0", "1", "2", "3"]  # the first scrape starts the service
    assert machine.host.show("ActiveState")["ActiveState"] == "active"
    machine.host.do("rm", "-f", "/run/enough")
    scrapers = [
        subprocess.Popen(machine.host.command("python3", "-c", _SCRAPER), stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for _ in range(5):
        time.sleep(0.7)
        machine.host.do("systemctl", "restart", UNIT)
    machine.host.do("touch", "/run/enough")
    results = [scraper.communicate(timeout=30)[0].splitlines() for scraper in scrapers]
    assert [wrong for _, *wrong in results] == [[], [], [], []]
    assert all(int(answered) > 10 for answered, *_ in results)


def test_with_the_socket_bad_settings_do_not_keep_the_host_busy(machine: Machine) -> None:
    """A scrape that waits starts the daemon again and again, which comes to an end; once they are mended it goes on."""
    host = machine.host
    machine.settle()
    host.do("systemctl", "stop", UNIT)
    host.write(SETTINGS, "fleets: 3\n")
    host.do("systemctl", "start", SOCKET)
    connect = "import socket; socket.create_connection(('localhost', 10420), 30).recv(1)"
    host.run("python3", "-c", connect)
    host.wait_for(lambda: host.show("ActiveState", unit=SOCKET)["ActiveState"] == "failed", within=60)
    host.write(SETTINGS, HOST)
    host.do("systemctl", "reset-failed", UNIT, SOCKET)
    host.do("systemctl", "start", SOCKET)
    assert cards(host.scrape()) == ["0", "1", "2", "3"]


def test_the_flag_wants_a_socket(machine: Machine) -> None:
    """With `--web.systemd-socket` and no socket the start fails with a sentence, once; with one it serves."""
    machine.settle()
    machine.host.write(f"{DROP_INS}/flag.conf", f"[Service]\nEnvironment=FLAG=--web.systemd-socket\n{_FLAGGED}")
    machine.host.do("systemctl", "daemon-reload")
    assert machine.host.run("systemctl", "restart", UNIT).returncode != 0
    assert "--web.systemd-socket: systemd handed over no socket" in machine.host.journal()
    machine.host.do("systemctl", "start", SOCKET)
    machine.host.do("systemctl", "restart", UNIT)
    assert cards(machine.host.scrape()) == ["0", "1", "2", "3"]


_FLAGGED = """ExecStart=
ExecStart=/usr/local/bin/gpu-fleet-exporter --config.file=${CONFIG} $OPTIONS $FLAG
"""


_GET_BY_PATH = """
import http.client, socket, sys
connection = http.client.HTTPConnection("localhost", timeout=20)
connection.sock = socket.socket(socket.AF_UNIX)
connection.sock.connect("/run/gpu-fleet-exporter/metrics.sock")
connection.request("GET", "/-/healthy")
sys.stdout.write(connection.getresponse().read().decode())
"""


def test_a_socket_in_its_folder_is_for_root_and_its_group(machine: Machine) -> None:
    """As docs/installation.md says: a proxy's user in the service's group may connect, others may not."""
    host = machine.host
    machine.settle()
    place = "/run/gpu-fleet-exporter/metrics.sock"
    host.write(f"{DROP_INS}/path.conf", f"[Service]\nEnvironment=FLAG=--web.listen-address=unix:{place}\n{_FLAGGED}")
    host.do("systemctl", "daemon-reload")
    host.do("systemctl", "restart", UNIT)
    owned = "gpu-fleet-exporter gpu-fleet-exporter"
    assert host.do("stat", "--format=%a %U %G", place, "/run/gpu-fleet-exporter") == f"660 {owned}\n750 {owned}\n"
    ask = ("python3", "-c", _GET_BY_PATH)
    assert host.do(*ask) == "gpu-fleet-exporter is healthy.\n"
    group = ("setpriv", "--reuid=www-data", "--regid=www-data")
    assert "Permission denied" in host.run(*group, "--clear-groups", *ask).stderr
    assert host.do(*group, "--groups=gpu-fleet-exporter", *ask) == "gpu-fleet-exporter is healthy.\n"
    host.do("systemctl", "stop", UNIT)
    assert host.run("test", "-e", "/run/gpu-fleet-exporter").returncode != 0


AS_THE_SERVICE = ("setpriv", "--reuid=gpu-fleet-exporter", "--regid=gpu-fleet-exporter", "--groups=video,render")

_GET_BY_TLS = """
import base64, ssl, sys, urllib.request
asked = urllib.request.Request("https://localhost:10420/metrics")
asked.add_header("Authorization", "Basic " + base64.b64encode(b"alice:" + sys.argv[2].encode()).decode())
trust = ssl.create_default_context(cafile=sys.argv[1])
sys.stdout.write(urllib.request.urlopen(asked, timeout=20, context=trust).read().decode())
"""


def test_tls_and_accounts_in_the_sandbox(machine: Machine) -> None:
    """As docs/installation.md says: the service's group reads the files, and a renewed certificate is taken up."""
    host, folder = machine.host, "/etc/gpu-fleet-exporter/tls"
    machine.settle()
    authority = trustme.CA()

    def issue() -> str:
        issued = authority.issue_cert("localhost")
        host.write(f"{folder}/server.pem", issued.cert_chain_pems[0].bytes().decode())
        host.write(f"{folder}/server.key", issued.private_key_pem.bytes().decode())
        host.do("chgrp", "-R", "gpu-fleet-exporter", folder)
        host.do("chmod", "-R", "u=rwX,g=rX,o=", folder)
        return issued.cert_chain_pems[0].bytes().decode()

    host.do("install", "-d", "-m", "0750", "-g", "gpu-fleet-exporter", folder)
    hashed = bcrypt.hashpw(b"right", bcrypt.gensalt(4)).decode()
    text = "tls_server_config: {cert_file: server.pem, key_file: server.key}\n"
    host.write(f"{folder}/web.yaml", f"{text}basic_auth_users: {{alice: {hashed}}}\n")
    host.write(f"{folder}/ca.pem", authority.cert_pem.bytes().decode())
    issue()
    flag = f"--web.config.file={folder}/web.yaml"
    said = host.do(*AS_THE_SERVICE, "gpu-fleet-exporter", "check-config", flag)
    assert said == f"{folder}/web.yaml: valid web configuration\n"
    host.write(f"{DROP_INS}/tls.conf", f"[Service]\nEnvironment=FLAG={flag}\n{_FLAGGED}")
    host.do("systemctl", "daemon-reload")
    host.do("systemctl", "restart", UNIT)
    ask = ("python3", "-c", _GET_BY_TLS, f"{folder}/ca.pem")
    assert "\ngpu_temperature_celsius{" in host.do(*ask, "right")
    assert "HTTP Error 401" in host.run(*ask, "wrong").stderr
    renewed = issue()
    shown = ("python3", "-c", 'import ssl; print(ssl.get_server_certificate(("localhost", 10420)), end="")')
    host.wait_for(lambda: host.do(*shown).split() == renewed.split())
    host.do("chmod", "0600", f"{folder}/server.key")
    host.do("chown", "root", f"{folder}/server.key")
    host.wait_for(lambda: "server.key: cannot be read: Permission denied" in host.journal())
    assert "\ngpu_temperature_celsius{" in host.do(*ask, "right")


def _diagnosis(machine: Machine, *before: str) -> dict[tuple[str, str], dict[str, str]]:
    """What `doctor` finds, by check and subject."""
    fake = {"FAKE_NVML_STATE": f"{FAKES}/nvml.state"}
    flags = (f"--config.file={SETTINGS}", f"--path.sysfs={FAKES}/sys", "--format=json")
    result = machine.host.run(*before, "gpu-fleet-exporter", "doctor", *flags, **fake)
    assert result.stdout, result.stderr
    found = json.loads(result.stdout)["findings"]
    return {(each["check"], each["subject"]): each for each in found}


def test_doctor_says_what_the_installation_is_like(machine: Machine) -> None:
    """Of root and of the service's user: the service serves, also where its socket starts it, and a file of a driver
    that is not here is told.
    """
    machine.settle()
    found = _diagnosis(machine)
    assert " ".join(AS_THE_SERVICE) in found["user", "root"]["found"]
    serving = "gpu-fleet-exporter is serving there"
    assert (found["address", ":10420"]["level"], found["address", ":10420"]["found"]) == ("PASS", serving)
    found = _diagnosis(machine, *AS_THE_SERVICE)
    assert ("user", "root") not in found
    assert found["settings", SETTINGS]["level"] == "PASS"
    assert found["device-file", "nvidia"]["found"] == "/dev/nvidiactl: No such device or address"
    machine.host.do("systemctl", "stop", UNIT)
    assert _diagnosis(machine)["address", ":10420"]["found"] == "free"
    machine.host.do("systemctl", "start", SOCKET)
    assert _diagnosis(machine)["address", ":10420"]["found"] == serving


def test_doctor_names_a_device_filter_for_what_it_is(machine: Machine) -> None:
    """A unit's device policy denies the file whatever its mode says, and no group would help."""
    machine.settle()
    closed = ("systemd-run", "--quiet", "--pipe", "--wait", "--property=DevicePolicy=closed")
    line = _diagnosis(machine, *closed, f"--setenv=FAKE_NVML_STATE={FAKES}/nvml.state", "--")["device-file", "nvidia"]
    assert (line["level"], line["found"]) == ("FAIL", "/dev/nvidiactl: Operation not permitted")
    assert "`DeviceAllow=`" in line["fix"]
    assert "usermod" not in line["fix"]


def test_doctor_names_a_socket_unit_that_no_exporter_answers_on(machine: Machine) -> None:
    """The port is systemd's, and the service does not start."""
    machine.settle()
    machine.host.do("systemctl", "stop", UNIT)
    machine.host.write(SETTINGS, "fleets: 3\n")
    machine.host.do("systemctl", "start", SOCKET)
    line = _diagnosis(machine)["address", ":10420"]
    assert line["level"] == "FAIL"
    assert "systemd" in line["found"]
    assert "`systemctl list-sockets`" in line["fix"]
    machine.host.do("systemctl", "stop", SOCKET)


# --- the drop-ins

_FLEETS = """
  - {name: chat, runtime: cuda, systemd_unit: workload}
  - {name: "every-{unit}", runtime: cuda, systemd_unit: "workload*"}
  - {name: search, runtime: cuda, pid_file: /opt/search.pid}
  - {name: none, runtime: cuda, pid_file: /opt/none.pid}
  - {name: closed, runtime: cuda, pid_file: /opt/closed/search.pid}
"""


@pytest.fixture
def workload(machine: Machine) -> Iterator[None]:
    """A program of another user's, under a mask of its own, in a unit of its own.

    The mask has UUIDs: this machine lies in another's control groups, which may have a filter that nobody sees from
    within, so numbers are refused here.
    """
    third, first = equal_cards(4)[2].uuid, equal_cards(4)[0].uuid
    start = ["systemd-run", "--unit=workload", "--uid=games", f"--setenv=CUDA_VISIBLE_DEVICES={third},{first}"]
    machine.host.do(*start, "sleep", "1000")
    for folder in ("/opt", "/opt/closed"):
        machine.host.write(f"{folder}/search.pid", machine.host.show("MainPID", unit="workload")["MainPID"])
    machine.host.do("chmod", "700", "/opt/closed")
    yield
    machine.host.do("systemctl", "stop", "workload")


@pytest.mark.usefixtures("workload")
def test_another_users_processes_need_the_drop_in_and_the_refusal_says_so(machine: Machine) -> None:
    """Without it each of their fleets is refused as hidden, and `explain` names the drop-in; with it they are told."""
    host = machine.host
    machine.settle(HOST + _FLEETS)
    page = host.scrape()
    assert {name: refusal(page, name) for name in ("chat", "every-{unit}", "search", "none", "closed")} == {
        "chat": "no-permission",
        "every-{unit}": "no-permission",
        "search": "no-permission",
        "none": "process-gone",
        "closed": "no-permission",
    }
    explain = ["gpu-fleet-exporter", "explain", f"--config.file={SETTINGS}", "chat"]
    explained = host.run("runuser", "-u", "gpu-fleet-exporter", "--", *explain, FAKE_NVML_STATE=f"{FAKES}/nvml.state")
    assert explained.returncode == 1
    assert "process-fleets.conf" in REFUSALS["no-permission"].advice
    assert f"to do: {REFUSALS['no-permission'].advice}" in explained.stdout
    machine.drop_in("process-fleets.conf")
    page = host.scrape()
    for fleet in ("chat", "every-workload.service", "search", "closed"):
        assert refusal(page, fleet) == ""
        found = page.of("gpu_fleet_device_info", fleet=fleet)
        assert {each.labels["fleet_index"]: each.labels["physical_index"] for each in found} == {"0": "2", "1": "0"}
    assert refusal(page, "none") == "process-gone"
    assert refusal(page, "every-{unit}") == ""
    two = f"{1 << 2 | 1 << 19:016x}"  # CAP_DAC_READ_SEARCH and CAP_SYS_PTRACE
    assert capabilities(host) == {"daemon": two, "nvidia": "0" * 16, "amd": "0" * 16, "intel": two}


@pytest.mark.usefixtures("workload")
def test_explain_says_that_processes_are_hidden(machine: Machine) -> None:
    """As whoever sees its own alone, it does not say that another's is not running."""
    host = machine.host
    machine.settle()
    hidden = [
        "systemd-run",
        "--quiet",
        "--pipe",
        "--wait",
        "--property=ProtectProc=invisible",
        "--uid=gpu-fleet-exporter",
    ]
    pid = host.show("MainPID", unit="workload")["MainPID"]
    told = host.run(*hidden, "gpu-fleet-exporter", "explain", "--pid", pid)
    words = "/proc does not show you the processes of other users"
    assert told.stderr == f"gpu-fleet-exporter: explain: no process {pid} is seen: {words}\n"
    assert words in host.run(*hidden, "gpu-fleet-exporter", "explain", "--all").stderr


def test_the_drop_in_for_intels_counters_grants_them_alone(machine: Machine) -> None:
    """CAP_PERFMON and the one system call."""
    machine.settle()
    machine.drop_in("intel-pmu.conf")
    machine.host.scrape()
    one = f"{1 << 38:016x}"
    assert capabilities(machine.host) == {"daemon": one, "nvidia": "0" * 16, "amd": "0" * 16, "intel": one}
    filters = machine.host.show("SystemCallFilter")["SystemCallFilter"].split()
    assert "perf_event_open" in filters
    assert not {"mount", "ptrace", "bpf"} & set(filters)


# --- upgrade and removal


def test_installing_again_keeps_the_settings_and_restarts_the_service(machine: Machine) -> None:
    """An upgrade: settings that were edited stay, and the program that runs is the new one."""
    machine.settle(ONE)
    before = machine.host.main_pid()
    machine.host.do("make", "-C", SOURCE, "install", **OFFLINE)
    assert machine.host.main_pid() != before
    assert machine.host.do("cat", SETTINGS) == ONE
    assert cards(machine.host.scrape(), "one") == ["1"]


# An interpreter in another place, and what has to be there to take it for its own.
_OWN = "/tmp/own"  # noqa: S108
_PYTHON = "/usr/bin/python3 /usr/bin/python3.[0-9][0-9] /usr/lib/python3.[0-9][0-9]"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"PREFIX": "/opt/my gpu"}, "PREFIX: found '/opt/my gpu', expected an absolute path"),
        ({"PREFIX": "/opt/a&b"}, "PREFIX: found '/opt/a&b', expected an absolute path"),
        ({"PREFIX": "relative"}, "PREFIX: found 'relative', expected an absolute path"),
        ({"PREFIX": "/home/x"}, "PREFIX: found '/home/x', where the service may not look"),
        ({"PREFIX": "/dev/shm/x"}, "PREFIX: found '/dev/shm/x', where the service may not look"),  # noqa: S108
        ({"PYTHON": "/opt/none"}, "PYTHON=/opt/none: there is no such program"),
        ({"PYTHON": f"{_OWN}/bin/python3"}, f"lies in {_OWN}, where the service may not look"),
    ],
)
def test_what_could_not_run_is_not_installed(machine: Machine, settings: dict[str, str], complaint: str) -> None:
    """A folder or an interpreter that the service may not see, or a name that means something to a shell: a sentence,
    and the installation that is there runs on.
    """
    machine.settle()
    before = machine.host.main_pid()
    machine.host.do("sh", "-c", f"mkdir -p {_OWN} && cp -r --parents {_PYTHON} {_OWN} && cp -r {_OWN}/usr/* {_OWN}")
    failed = machine.host.run("make", "-C", SOURCE, "install", *(f"{name}={text}" for name, text in settings.items()))
    assert failed.returncode != 0
    assert complaint in failed.stderr
    assert machine.host.main_pid() == before
    assert cards(machine.host.scrape()) == ["0", "1", "2", "3"]


def test_settings_behind_a_link_are_not_overwritten(machine: Machine) -> None:
    """Also where the link leads nowhere at the moment; and packages that PYTHONPATH names are not taken for its own."""
    machine.settle()
    machine.host.do("ln", "-sf", "/mnt/none/config.yaml", SETTINGS)
    polluted = {"PYTHONPATH": "/usr/local/lib/gpu-fleet-exporter/lib/python3.11/site-packages"}
    machine.host.run("make", "-C", SOURCE, "install", **OFFLINE, **polluted)
    assert machine.host.do("readlink", SETTINGS) == "/mnt/none/config.yaml\n"
    machine.host.do("rm", SETTINGS)
    machine.host.write(SETTINGS, HOST)
    machine.host.do("systemctl", "restart", UNIT)
    assert cards(machine.host.scrape()) == ["0", "1", "2", "3"]


def test_removing_another_installation_leaves_this_one(machine: Machine) -> None:
    """Its service has the same name, and is not its own."""
    machine.settle()
    before = machine.host.main_pid()
    machine.host.do("make", "-C", SOURCE, "uninstall", "PREFIX=/opt/other")
    assert machine.host.main_pid() == before
    assert machine.host.show("UnitFileState")["UnitFileState"] == "enabled"


def test_links_of_the_installed_documents_lead_somewhere(machine: Machine) -> None:
    """Pages link to each other, and to settings and configurations, by paths that are installed too."""
    folder = machine.host.root / "usr/local/share/doc/gpu-fleet-exporter"
    pages = [*folder.glob("*.md"), *folder.glob("docs/*.md")]
    assert len(pages) > 6
    for page in pages:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert "://" in link or (page.parent / link).exists(), (page, link)


def test_an_installation_that_fails_leaves_the_one_that_is_there(machine: Machine) -> None:
    """Without the packages that it needs it ends with an error, and what ran runs on and starts again."""
    machine.settle()
    failed = machine.host.run("make", "-C", SOURCE, "install", PIP_NO_INDEX="1", PIP_FIND_LINKS="/opt/none")
    assert failed.returncode != 0
    machine.host.do("systemctl", "restart", UNIT)
    assert cards(machine.host.scrape()) == ["0", "1", "2", "3"]
    left = machine.host.do("find", "/usr/local/lib", "-maxdepth", "1", "-name", "gpu-*")
    assert left == "/usr/local/lib/gpu-fleet-exporter\n"


def test_an_installation_that_was_killed_half_way_is_mended_by_the_next(machine: Machine) -> None:
    """Between moving the old one away and the new one in: even a next that fails puts the old one back."""
    machine.settle()
    library = "/usr/local/lib/gpu-fleet-exporter"
    machine.host.do("mv", library, f"{library}.old")
    failed = machine.host.run("make", "-C", SOURCE, "install", PIP_NO_INDEX="1", PIP_FIND_LINKS="/opt/none")
    assert failed.returncode != 0
    machine.host.do("systemctl", "restart", UNIT)
    assert cards(machine.host.scrape()) == ["0", "1", "2", "3"]


def test_uninstalling_leaves_settings_and_state(machine: Machine) -> None:
    """The last test of this machine: the service is stopped and gone, and nothing but what may be wanted is left."""
    machine.settle(ONE)
    machine.host.do("make", "-C", SOURCE, "uninstall")
    assert machine.host.show("LoadState", "ActiveState") == {"LoadState": "not-found", "ActiveState": "inactive"}
    left = machine.host.do("find", "/usr/local", "/etc", "/var/lib", "-name", "*gpu-fleet-exporter*")
    assert set(left.split()) == {
        "/etc/default/gpu-fleet-exporter",
        "/etc/gpu-fleet-exporter",
        "/var/lib/gpu-fleet-exporter",
    }
    assert machine.host.do("cat", SETTINGS) == ONE
