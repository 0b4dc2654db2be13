"""Sockets with a path or an abstract name: who may connect, and what becomes of the file."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from exporter.errors import CouldNot, InputError
from exporter.web import doors, server
from tests.fakes.nvml import FakeNvml
from tests.harness import PROGRAM, Start, clean_environment, run, tool

e2e = pytest.mark.e2e
SIMULATED = "backends: [simulated]\n"
HEALTHY = "gpu-fleet-exporter is healthy.\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a socket is to be."""
    return tmp_path / "metrics.sock"


def curl(*arguments: str) -> str:
    """What curl prints of an answer with status 200."""
    command = [tool("curl", "curl"), "--silent", "--show-error", "--fail", "--max-time", "20", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def umasked(mask: str) -> Callable[[Sequence[str]], Sequence[str]]:
    """Puts a shell with that umask before a command."""
    return lambda command: ["sh", "-c", f'umask {mask}; exec "$@"', "sh", *command]


def leave_behind(path: Path) -> None:
    """The file of a socket that nobody listens on."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
        left.listen()


@contextlib.contextmanager
def connected(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(20)
        client.connect(str(path))
        yield client


@e2e
def test_addresses_of_all_kinds_are_served_at_once(nvml: FakeNvml, start: Start, path: Path) -> None:
    """A path, an abstract name, IPv4, IPv6, and a port of all addresses, which is both of these."""
    name = f"gpu-fleet-exporter-{os.getpid()}-{time.monotonic_ns()}"
    flags = [f"--web.listen-address={address}" for address in (f"unix:{path}", f"unix:@{name}", "[::1]:0", ":0")]
    daemon = start(nvml.environment(), flags=flags)
    daemon.wait_for_log(f"msg=listening address=unix:{path} version=")
    daemon.wait_for_log(f"msg=listening address=unix:@{name} version=")
    six = daemon.wait_for_log(r"address=\[::1\]:(\d+)")[1]
    both = daemon.wait_for_log(r"address=\[::\]:(\d+)")[1]
    assert "gpu_info{" in curl("--unix-socket", str(path), "http://localhost/metrics")
    assert curl("--abstract-unix-socket", name, "http://localhost/-/healthy") == HEALTHY
    for host in (f"[::1]:{six}", f"[::1]:{both}", f"127.0.0.1:{both}", f"127.0.0.1:{daemon.port}"):
        assert curl(f"http://{host}/-/healthy") == HEALTHY


@e2e
@pytest.mark.parametrize("mask", ["000", "022", "077"])
def test_owner_and_group_may_connect_whatever_the_umask(start: Start, path: Path, mask: str) -> None:
    """The file's mode is 0660: for connecting the right to write counts."""
    start({}, SIMULATED, [f"--web.listen-address=unix:{path}"], umasked(mask))
    assert stat.S_IMODE(path.stat().st_mode) == 0o660


_AT_BIRTH = """
import os, sys
from exporter.web import server
os.umask(0)
seen = []
def hook(event, arguments):
    if event == "os.chmod" and os.path.exists(sys.argv[1]):
        seen.append(oct(os.stat(sys.argv[1]).st_mode & 0o777))
sys.addaudithook(hook)
server.listen("unix:" + sys.argv[1])
print(*seen)
"""


def test_nobody_else_may_connect_from_the_moment_that_the_file_is_there(path: Path) -> None:
    """Also without a umask the file is never open to others, as it is seen before its mode is set the second time."""
    command = [sys.executable, "-c", _AT_BIRTH, str(path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0o660\n"


@e2e
def test_a_file_where_nobody_listens_is_replaced(start: Start, path: Path) -> None:
    """What a daemon that was killed has left does not keep the next one from starting."""
    first = start({}, SIMULATED, [f"--web.listen-address=unix:{path}"])
    first.stop(signal.SIGKILL)
    assert path.is_socket()
    start({}, SIMULATED, [f"--web.listen-address=unix:{path}"])
    assert curl("--unix-socket", str(path), "http://localhost/-/healthy") == HEALTHY


@e2e
def test_a_socket_that_somebody_listens_on_is_left_to_them(start: Start, path: Path, tmp_path: Path) -> None:
    """The second daemon does not start, names the socket, and the first goes on serving there."""
    start({}, SIMULATED, [f"--web.listen-address=unix:{path}"])
    settings = tmp_path / "second.yaml"
    settings.write_text(SIMULATED)
    second = run(f"--web.listen-address=unix:{path}", f"--config.file={settings}")
    assert (second.returncode, second.stderr) == (
        1,
        f"gpu-fleet-exporter: cannot listen on unix:{path}: another program listens there\n",
    )
    assert curl("--unix-socket", str(path), "http://localhost/-/healthy") == HEALTHY


def test_a_socket_of_another_kind_is_left_to_its_owner(path: Path) -> None:
    """A socket for datagrams answers no connection, and is in use all the same."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        with pytest.raises(CouldNot, match="another program listens there"):
            server.listen(f"unix:{path}")
    assert path.is_socket()


def test_a_full_queue_is_somebody_who_listens(path: Path) -> None:
    """Who has not accepted a connection for a while is busy, and not gone."""
    with socket.socket(socket.AF_UNIX) as busy, contextlib.ExitStack() as clients:
        busy.bind(str(path))
        busy.listen(0)
        for _ in range(4):
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                client.connect(str(path))
        with pytest.raises(CouldNot, match="another program listens there"):
            server.listen(f"unix:{path}")


@pytest.mark.parametrize("kind", ["file", "folder", "link", "pipe"])
def test_what_is_no_socket_is_not_removed(path: Path, kind: str) -> None:
    """A path that was mistyped costs nobody a file; a link is not followed, wherever it leads."""
    dead = path.with_name("dead.sock")
    leave_behind(dead)
    makers: dict[str, Callable[[], object]] = {
        "file": lambda: path.write_text("kept"),
        "folder": path.mkdir,
        "link": lambda: path.symlink_to(dead),
        "pipe": lambda: os.mkfifo(path),
    }
    makers[kind]()
    before = path.lstat()
    with pytest.raises(CouldNot, match="no socket, which is left as it is"):
        server.listen(f"unix:{path}")
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert dead.is_socket()


@e2e
def test_the_file_goes_with_the_daemon(start: Start, path: Path) -> None:
    """A stop removes it."""
    daemon = start({}, SIMULATED, [f"--web.listen-address=unix:{path}"])
    assert path.is_socket()
    assert daemon.stop()[0] == 0
    assert not path.exists()


@e2e
def test_a_file_that_another_has_put_there_meanwhile_stays(start: Start, path: Path) -> None:
    """Only its own file goes with the daemon."""
    daemon = start({}, SIMULATED, [f"--web.listen-address=unix:{path}"])
    path.unlink()
    leave_behind(path)
    assert daemon.stop()[0] == 0
    assert path.is_socket()


def test_the_file_goes_where_the_daemon_cannot_start(path: Path) -> None:
    """An address that is taken ends the start, and leaves no file of the addresses before it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        failed = run(f"--web.listen-address=unix:{path}", f"--web.listen-address=127.0.0.1:{port}")
    assert failed.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in failed.stderr
    assert not path.exists()


@e2e
def test_of_two_that_start_together_one_serves(tmp_path: Path, path: Path) -> None:
    """Neither takes the other's socket, which is bound before it listens, for one that was left behind."""
    leave_behind(path)
    settings = tmp_path / "both.yaml"
    settings.write_text(SIMULATED)
    command = [*PROGRAM, f"--web.listen-address=unix:{path}", f"--config.file={settings}"]
    both = [subprocess.Popen(command, env=clean_environment({}), stderr=subprocess.PIPE) for _ in range(2)]
    try:
        until = time.monotonic() + 20
        while all(each.poll() is None for each in both):
            assert time.monotonic() < until, "both go on"
            time.sleep(0.05)
        (ended,) = [each for each in both if each.poll() is not None]
        assert ended.stderr is not None
        assert b"another program listens there" in ended.stderr.read()
        assert curl("--retry", "5", "--retry-all-errors", "--unix-socket", str(path), "http://x/-/healthy") == HEALTHY
    finally:
        for each in both:
            each.kill()
            each.communicate(timeout=10)


def test_a_path_that_is_too_long_is_told_with_what_there_is_room_for() -> None:
    """The limit is in bytes; at the limit it serves."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        room = 107 - len(folder) - 1
        longest = f"{folder}/" + "\u00e4" * (room // 2) + "a" * (room % 2)
        (bound,) = server.listen(f"unix:{longest}")
        bound.close()
        with pytest.raises(InputError, match="has 108 bytes: expected 107 at most"):
            server.listen(f"unix:{longest}a")
        result = run(f"--web.listen-address=unix:{longest}a")
    assert result.returncode == 2
    assert "expected 107 at most" in result.stderr


@pytest.mark.parametrize("text", ["unix:", "unix:/", "unix:@", "unix:relative/path"])
def test_what_is_no_path_is_told_with_what_was_expected(text: str) -> None:
    """A path is absolute, and an abstract name has at least one character."""
    with pytest.raises(InputError, match="expected"):
        server.listen(text)


def test_a_host_may_be_called_unix() -> None:
    """A port behind the name makes it a host."""
    assert server.parse_address("unix:9100") == ("unix", 9100)
    server.check_address("unix:9100")


def test_a_folder_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    """It is not made: whom it should belong to is not known."""
    with pytest.raises(CouldNot, match="No such file or directory"):
        server.listen(f"unix:{tmp_path}/none/metrics.sock")


@e2e
def test_silent_clients_of_a_path_starve_nobody(start: Start, path: Path) -> None:
    """All of a path's clients count as one host: with all places taken by silent ones another is served there, and so
    is one that comes by the network.
    """
    daemon = start({}, SIMULATED, [f"--web.listen-address=unix:{path}"])
    with contextlib.ExitStack() as silent:
        for _ in range(doors.MAX_CONNECTIONS):
            silent.enter_context(connected(path))
        assert curl("--unix-socket", str(path), "http://localhost/-/healthy") == HEALTHY
        assert daemon.request("/-/healthy").status == 200


@e2e
def test_a_busy_client_of_a_path_starves_nobody(start: Start, path: Path) -> None:
    """One that asks again and again over as many connections as there are leaves places to others."""
    daemon = start({}, SIMULATED, [f"--web.listen-address=unix:{path}"])
    with contextlib.ExitStack() as busy:
        held = [busy.enter_context(connected(path)) for _ in range(doors.MAX_CONNECTIONS)]
        for _ in range(3):
            for each in held:
                with contextlib.suppress(OSError):
                    each.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
        assert curl("--unix-socket", str(path), "http://localhost/-/healthy") == HEALTHY
        assert daemon.request("/-/healthy").status == 200


@e2e
def test_a_connection_is_used_again(start: Start, path: Path) -> None:
    """A client that keeps its connection has several answers over it."""
    start({}, SIMULATED, [f"--web.listen-address=unix:{path}"])
    connection = http.client.HTTPConnection("localhost")
    with connected(path) as connection.sock:
        for _ in range(2):
            connection.request("GET", "/-/healthy")
            assert connection.getresponse().read().decode() == HEALTHY
