"""What the service manager gives the daemon and is told by it, over real sockets, without a systemd."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from exporter.model import BackendStatus, Device, DeviceKey, Fault, FleetMapping, Inversion, Refusal, Snapshot
from exporter.telemetry import status
from tests.fakes.nvml import FakeNvml, equal_cards
from tests.harness import Daemon, Scrape, Start, clean_environment, free_port, parse, run
from tests.process_host import wait_for

e2e = pytest.mark.e2e


class Listener:
    """The socket that a service manager listens on, and what was said to it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address.replace("@", "\0", 1))
        self._socket.settimeout(0.05)
        self.said: list[str] = []

    def close(self) -> None:
        """Listens no more."""
        self._socket.close()

    def hear(self) -> list[str]:
        """All that was said so far."""
        try:
            while True:
                self.said.append(self._socket.recv(4096).decode())
        except TimeoutError:
            return self.said

    def wait_for(self, pattern: str, within: float = 10.0) -> re.Match[str]:
        """The first message like that."""
        until = time.monotonic() + within
        while True:
            for message in self.hear():
                if found := re.fullmatch(pattern, message):
                    return found
            assert time.monotonic() < until, f"no {pattern!r} in {self.said}"


@pytest.fixture(params=["path", "abstract"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listener]:
    name = (
        tmp_path / "notify" if request.param == "path" else f"@gpu-fleet-exporter-{os.getpid()}-{time.monotonic_ns()}"
    )
    found = Listener(str(name))
    yield found
    found.close()


# --- what it is told


@e2e
def test_start_reload_and_stop_are_told_in_order(nvml: FakeNvml, start: Start, listener: Listener) -> None:
    """READY after the first cycle, RELOADING with the time and READY around a reload, STOPPING at the end."""
    daemon = start({**nvml.environment(), "NOTIFY_SOCKET": listener.address}, "fleets: [{name: x, runtime: host}]")
    listener.wait_for("READY=1")
    assert listener.said == ["STATUS=4 devices; 1 fleet", "READY=1"]
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    daemon.process.send_signal(signal.SIGHUP)
    told = listener.wait_for(r"RELOADING=1\nMONOTONIC_USEC=(\d+)")
    assert before <= int(told[1]) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    daemon.wait_for_log("(?s)settings loaded.*settings loaded")
    assert listener.hear()[2:] == [told[0], "READY=1"]
    daemon.stop()
    assert listener.hear()[4:] == ["STOPPING=1"]


@e2e
def test_a_reload_that_fails_ends_with_ready_and_says_so(nvml: FakeNvml, start: Start, listener: Listener) -> None:
    """The manager would wait for ever otherwise; the status line tells that the earlier settings hold."""
    daemon = start({**nvml.environment(), "NOTIFY_SOCKET": listener.address}, "{}")
    listener.wait_for("READY=1")
    daemon.config_path.write_text("fleets: 3")
    daemon.process.send_signal(signal.SIGHUP)
    listener.wait_for("STATUS=settings not loaded, the earlier ones hold; 4 devices; 1 fleet")
    reload = [message.partition("\n")[0] for message in listener.said[2:]]
    assert reload == ["RELOADING=1", "READY=1", listener.said[-1]]
    daemon.config_path.write_text("{}")
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for_log("(?s)settings loaded.*settings loaded")
    assert listener.hear()[-1] == "STATUS=4 devices; 1 fleet"


@e2e
def test_a_first_cycle_that_hangs_delays_ready_by_ten_seconds_at_most(
    nvml: FakeNvml, start: Start, tmp_path: Path
) -> None:
    """The manager must not end a daemon for a driver that hangs."""
    listener = Listener(str(tmp_path / "notify"))
    nvml.write(equal_cards(4), lines=["hang * *"])
    began = time.monotonic()
    start({**nvml.environment(), "NOTIFY_SOCKET": listener.address}, "sampling: {deadline_seconds: 100}")
    time.sleep(max(0.0, began + 9 - time.monotonic()))
    assert "READY=1" not in listener.hear()
    listener.wait_for("READY=1", within=4)
    listener.close()


@e2e
@pytest.mark.parametrize("ours", [True, False])
def test_the_watchdog_is_fed_where_it_is_meant_for_this_process(
    nvml: FakeNvml, start: Start, tmp_path: Path, ours: bool
) -> None:
    """Three times within what the manager waits; not where the variables were inherited from another service."""
    listener = Listener(str(tmp_path / "notify"))
    variables = {"NOTIFY_SOCKET": listener.address, "WATCHDOG_USEC": "300000"}
    start({**nvml.environment(), **variables}, None, [], _Launch(watched=ours))
    listener.wait_for("READY=1")
    time.sleep(1.0)
    fed = listener.hear().count("WATCHDOG=1")
    assert (fed >= 6) if ours else (fed == 0)
    listener.close()


@e2e
def test_nobody_to_tell_is_no_reason_to_serve_no_pages(nvml: FakeNvml, start: Start, tmp_path: Path) -> None:
    """A socket that is gone is said in the log, and the daemon serves."""
    daemon = start({**nvml.environment(), "NOTIFY_SOCKET": str(tmp_path / "gone")})
    daemon.wait_for_log('msg="the service manager cannot be told" message=READY=1|message="READY=1"')
    assert daemon.scrape().of("gpu_info")


@e2e
def test_a_manager_that_does_not_read_is_told_what_holds_at_last(nvml: FakeNvml, start: Start, tmp_path: Path) -> None:
    """What was overtaken meanwhile is left out, so that nothing piles up, and the watchdog's message is among it."""
    listener = Listener(str(tmp_path / "notify"))
    environment = {**nvml.environment(), "NOTIFY_SOCKET": listener.address, "WATCHDOG_USEC": "300000"}
    daemon = start(environment, "{}")

    def loaded(times: int) -> bool:
        return daemon.log.count("settings loaded") > times

    for times in range(1, 60):  # far more than a queue has room for
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(functools.partial(loaded, times))
    room = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text()) + 1
    listener.hear()
    time.sleep(0.5)
    late = [message.partition("=")[0] for message in listener.hear()[room:]]
    assert {"RELOADING", "READY", "WATCHDOG"} <= set(late)
    assert len(listener.said) < 40
    told = [message.partition("=")[0] for message in listener.said if message.startswith(("READY", "RELOADING"))]
    assert told[-1] == "READY"
    listener.close()


@e2e
def test_what_the_queue_has_no_room_for_is_told_later(nvml: FakeNvml, start: Start, tmp_path: Path) -> None:
    """A manager that is slow gets every message in the end, in its order; a start would time out without READY."""
    listener = Listener(str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as others:
        others.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                others.sendto(b"full", listener.address)
    daemon = start({**nvml.environment(), "NOTIFY_SOCKET": listener.address}, "{}")
    daemon.scrape_until(lambda scrape: bool(scrape.of("gpu_info")))
    time.sleep(0.3)
    listener.wait_for("READY=1")
    assert [message for message in listener.said if message != "full"] == ["STATUS=4 devices; 1 fleet", "READY=1"]
    assert "cannot be told" not in daemon.log
    listener.close()


# --- what it gives

_LAUNCHER = """
import fcntl, os, socket, sys
kinds, meant, watched, *command = sys.argv[1:]
kinds, aside = list(filter(None, kinds.split(","))), []
for kind in kinds:
    if kind.startswith("/"):
        made = socket.socket(socket.AF_UNIX); made.bind(kind)
    else:
        family = socket.AF_UNIX if kind == "packets" else socket.AF_INET
        type = {"datagram": socket.SOCK_DGRAM, "packets": socket.SOCK_SEQPACKET}.get(kind, socket.SOCK_STREAM)
        made = socket.socket(family, type)
        made.bind("" if kind == "packets" else ("127.0.0.1", 0))
    if kind not in ("datagram", "deaf"):
        made.listen()
    aside.append(None if kind == "closed" else fcntl.fcntl(made.fileno(), fcntl.F_DUPFD, 100))
    made.close()
for place, descriptor in enumerate(aside, start=3):
    if descriptor is not None:
        os.dup2(descriptor, place)
        os.close(descriptor)
if kinds:
    os.environ["LISTEN_FDS"] = str(len(kinds))
os.environ["LISTEN_PID"] = str(os.getpid() + (meant == "no"))
if watched:
    os.environ["WATCHDOG_PID"] = str(os.getpid() + (watched == "no"))
os.execvp(command[0], command)
"""


class _Launch:
    """Puts in front of a command what gives it sockets as systemd does: of these kinds, from descriptor 3 on."""

    def __init__(self, *kinds: str, meant: bool = True, watched: bool | None = None) -> None:
        words = {None: "", True: "yes", False: "no"}
        self._arguments = [",".join(kinds), words[meant], words[watched]]

    def __call__(self, command: Sequence[str]) -> list[str]:
        return [sys.executable, "-c", _LAUNCHER, *self._arguments, *command]


def _get(connection: socket.socket, path: str = "/metrics") -> bytes:
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    return b"".join(iter(lambda: connection.recv(65536), b""))


@e2e
def test_sockets_of_every_kind_are_served_on(nvml: FakeNvml, start: Start, tmp_path: Path) -> None:
    """A port and a path, beside an address of the command line; each gives the page."""
    path = f"{tmp_path}/pages"
    daemon = start(nvml.environment(), None, ["--web.systemd-socket"], _Launch("port", path))
    daemon.wait_for_log(f"msg=listening address=unix:{path}")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        page = _get(connection)
    assert parse(page.partition(b"\r\n\r\n")[2].decode()).of("gpu_info")
    ports = {int(port) for port in re.findall(r"msg=listening address=127\.0\.0\.1:(\d+)", daemon.log)}
    assert len(ports) == 2
    for port in ports:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            assert _get(connection).startswith(b"HTTP/1.1 200")


@e2e
def test_children_inherit_nothing_of_the_managers(nvml: FakeNvml, start: Start, tmp_path: Path) -> None:
    """No worker has the manager's variables or the sockets: it could speak for the daemon, or keep its port."""
    listener = Listener(str(tmp_path / "notify"))
    environment = {**nvml.environment(), "NOTIFY_SOCKET": listener.address, "WATCHDOG_USEC": "5000000"}
    daemon = start(environment, None, [], _Launch("port", watched=True))
    daemon.scrape()
    (worker,) = daemon.workers("nvidia")
    names = {line.partition(b"=")[0] for line in Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")}
    assert not [name for name in names if name.startswith((b"LISTEN_", b"NOTIFY_", b"WATCHDOG_"))]
    listening = {
        line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"
    }
    held = {os.readlink(path) for path in Path(f"/proc/{worker}/fd").iterdir()}  # noqa: PTH115
    assert not held & {f"socket:[{inode}]" for inode in listening}
    listener.close()


@e2e
def test_nonsense_of_the_managers_is_as_nothing(nvml: FakeNvml, start: Start) -> None:
    """Numbers that nobody would say, and addresses of other kinds: the daemon serves, and says nothing of it."""
    nonsense = {"WATCHDOG_USEC": "9" * 5000, "LISTEN_FDS": "9" * 5000, "NOTIFY_SOCKET": "vsock:2:1234"}
    daemon = start({**nvml.environment(), **nonsense}, None, [], _Launch())
    daemon.scrape()
    assert "service manager" not in daemon.log


@e2e
def test_sockets_that_are_meant_for_another_process_are_left_alone(nvml: FakeNvml, start: Start) -> None:
    """LISTEN_PID is somebody else's: the variables were inherited."""
    daemon = start(nvml.environment(), None, [], _Launch("port", meant=False))
    assert daemon.log.count("msg=listening") == 1
    refused = run("--web.systemd-socket", environment=nvml.environment())
    assert refused.returncode == 2
    assert refused.stderr.startswith("gpu-fleet-exporter: --web.systemd-socket: systemd handed over no socket")


@pytest.mark.parametrize("kind", ["datagram", "packets", "deaf", "closed"])
def test_a_descriptor_that_cannot_be_served_on_is_a_sentence(kind: str) -> None:
    """Status 2, naming the descriptor and what was expected."""
    command = _Launch(kind)([sys.executable, "-m", "exporter", "--web.listen-address=127.0.0.1:0"])
    failed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert failed.returncode == 2
    assert failed.stderr.startswith("gpu-fleet-exporter: descriptor 3 from systemd: expected a socket")
    assert "Traceback" not in failed.stderr


# --- the last pages


@e2e
def test_who_connects_as_the_daemon_stops_still_gets_a_page(nvml: FakeNvml, start: Start) -> None:
    """A connection that was accepted is answered, though it says what it wants only after the stop has begun."""
    daemon = start(nvml.environment())
    daemon.scrape()
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=10) as connection:
        time.sleep(0.1)
        daemon.process.send_signal(signal.SIGTERM)
        daemon.wait_for_log("msg=stopping")
        time.sleep(0.2)
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    page = parse(body.decode())
    assert page.value("gpu_exporter_backend_up", vendor="nvidia") == 1
    assert daemon.process.wait(5) == 0


@e2e
def test_silent_clients_do_not_hold_up_a_stop(nvml: FakeNvml, start: Start) -> None:
    """Whoever has connected and says nothing is waited for half a second."""
    daemon = start(nvml.environment())
    daemon.scrape()
    silent = [socket.create_connection(("127.0.0.1", daemon.port)) for _ in range(20)]
    status, seconds = daemon.stop()
    assert status == 0
    assert seconds < 2
    for connection in silent:
        connection.close()


@e2e
def test_a_scrape_that_waits_for_a_hung_card_gets_its_page_before_the_end(nvml: FakeNvml, start: Start) -> None:
    """With the other cards, and no backend down: a restart is nobody's fault."""
    daemon = start(nvml.environment(), "sampling: {reuse_seconds: 0, deadline_seconds: 60}")
    daemon.scrape()
    nvml.write(equal_cards(4), lines=["hang nvmlDeviceGetTemperatureV 2", "hang nvmlDeviceGetTemperature 2"])
    page = _page_across_the_stop(daemon)
    assert page.value("gpu_exporter_backend_up", vendor="nvidia") == 1
    shown = {sample.labels["physical_index"] for sample in page.of("gpu_temperature_celsius")}
    assert shown == {"0", "1", "3"}
    assert daemon.process.wait(5) == 0


@e2e
def test_cards_that_are_slow_are_not_called_hung_at_the_end(nvml: FakeNvml, start: Start) -> None:
    """A cycle that takes most of a second ends as ever, though the stop has begun."""
    daemon = start(nvml.environment(), "sampling: {reuse_seconds: 0}")
    daemon.scrape()
    nvml.write(equal_cards(4), lines=["slow nvmlDeviceGetTemperatureV * 800"])
    page = _page_across_the_stop(daemon)
    assert {page.state(physical_index=str(index)) for index in range(4)} == {"ok"}
    assert len(page.of("gpu_temperature_celsius", fleet="host")) == 4
    assert daemon.process.wait(5) == 0
    assert "hung" not in daemon.log


@e2e
def test_a_worker_that_does_not_run_costs_nobody_the_page(nvml: FakeNvml, start: Start) -> None:
    """Who waits for it has a page, with what else there is, when the daemon stops, and no error is logged."""
    daemon = start(nvml.environment(), "sampling: {reuse_seconds: 0, deadline_seconds: 60}")
    daemon.scrape()
    (worker,) = daemon.workers("nvidia")
    os.kill(worker, signal.SIGSTOP)
    page = _page_across_the_stop(daemon)
    assert page.value("gpu_exporter_backend_up", vendor="nvidia") == 0
    assert daemon.process.wait(5) == 0
    assert "level=error" not in daemon.log
    assert "backend down" not in daemon.log  # which nobody is to look into


@e2e
def test_a_reload_under_way_does_not_hold_up_a_stop(nvml: FakeNvml, start: Start, tmp_path: Path) -> None:
    """Processes that hang in the kernel hold up the first look at them, which the reload waits for."""
    listener = Listener(str(tmp_path / "notify"))
    procfs = tmp_path / "proc"
    for pid in range(1, 6):
        (procfs / str(pid)).mkdir(parents=True)
        os.mkfifo(procfs / str(pid) / "cmdline")
    environment = {**nvml.environment(), "NOTIFY_SOCKET": listener.address}
    daemon = start(environment, "{}", [f"--path.procfs={procfs}"])
    listener.wait_for("READY=1")
    daemon.config_path.write_text("fleets: [{name: x, process: {command: y}}]")
    daemon.process.send_signal(signal.SIGHUP)
    listener.wait_for(r"RELOADING=1\n.*")
    time.sleep(0.2)
    nvml.write(equal_cards(4), lines=["hang * *"])
    page = _page_across_the_stop(daemon)
    assert page.value("gpu_exporter_config_last_reload_successful") == 1  # it was not the settings that failed
    began = time.monotonic()
    assert daemon.process.wait(5) == 0
    assert time.monotonic() - began < 1
    assert listener.hear()[-1] == "STOPPING=1"
    listener.close()


@e2e
def test_it_serves_without_standard_error(nvml: FakeNvml, start: Start) -> None:
    """Whoever starts it may have closed that."""
    port = free_port()
    command = f"exec {sys.executable} -m exporter --web.listen-address=127.0.0.1:{port} 2>&-"
    process = subprocess.Popen(["sh", "-c", command], env=clean_environment(nvml.environment()))
    try:
        until = time.monotonic() + 10
        while _connects(port) is False:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        process.terminate()
        assert process.wait(10) == 0


def _connects(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            return _get(connection).startswith(b"HTTP/1.1 200")
    except ConnectionRefusedError:
        return False


def _page_across_the_stop(daemon: Daemon) -> Scrape:
    """The page of one who waits for it when the daemon is told to stop."""
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=10) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        time.sleep(0.15)
        daemon.process.send_signal(signal.SIGTERM)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    return parse(body.decode())


# --- the status line


def _snapshot(refused: Sequence[str] = (), down: Sequence[str] = (), states: Sequence[str] = ("ok",)) -> Snapshot:
    keys = [DeviceKey(vendor="nvidia", identity=f"GPU-{place}") for place in range(len(states))]
    inverted = FleetMapping(fleet="host", runtime="host", outcome=Inversion(devices=()))
    no = Refusal("order-unknown", "")
    return Snapshot(
        backends=tuple(
            BackendStatus(vendor=v, up=False, duration_seconds=0, fault=Fault("crashed", ""), faults_total={})
            for v in down
        ),
        devices=tuple(
            Device(key=key, physical_index=place, pci_bus_id=f"0000:0{place}:00.0") for place, key in enumerate(keys)
        ),
        states=dict(zip(keys, states, strict=True)),  # type: ignore[arg-type]
        readings={},
        driver_versions={},
        mappings=(inverted, *(FleetMapping(fleet=name, runtime="cuda", outcome=no) for name in refused)),
        bindings=(),
    )


@pytest.mark.parametrize(
    ("snapshot", "line"),
    [
        (_snapshot(), "1 device; 1 fleet"),
        (_snapshot(states=["ok", "hung", "lost", "hung"]), "4 devices, 2 hung, 1 lost; 1 fleet"),
        (_snapshot(["a"]), "1 device; 2 fleets, 1 refused: a (order-unknown)"),
        (
            _snapshot(["a", "b", "c", "d"], ["amd", "intel"]),
            "1 device; 5 fleets, 4 refused: a (order-unknown), b (order-unknown), c (order-unknown), ...; "
            "backends down: amd (crashed), intel (crashed)",
        ),
    ],
)
def test_the_status_line_is_short_and_says_what_is_wrong(snapshot: Snapshot, line: str) -> None:
    """Numbers of what there is, and names, three at most, of what is not as it should be."""
    assert status(snapshot) == line
