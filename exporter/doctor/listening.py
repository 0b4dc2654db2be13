"""Whether each address can be listened on, or is served by the exporter already."""

from __future__ import annotations

import contextlib
import errno
import http
import http.client
import os
import shlex
import socket
import stat
from collections.abc import Callable, Iterator

from exporter.daemon import PORT
from exporter.doctor import listeners
from exporter.doctor.findings import Finding, failed, passed
from exporter.doctor.seen import Seen
from exporter.web import doors, server, unix_socket

_SECONDS = 2.5  # enough for a service that its socket starts for this
_MOST_BYTES = 4096
_HEALTHY = b"gpu-fleet-exporter is healthy."
_ELSEWHERE = "or choose another address by --web.listen-address"
_SOCKET_UNIT = "`systemctl list-sockets` shows which unit holds it: see `systemctl status` of its service, {elsewhere}."


def check_addresses(seen: Seen) -> Iterator[Finding]:
    """Those of the command line, or the one that is served without any."""
    if seen.systemd_socket:
        found = "systemd hands it over: `systemctl status gpu-fleet-exporter.socket` says whether it listens"
        yield passed("address", "systemd's socket", found)
    for text in seen.listen or (() if seen.systemd_socket else (f":{PORT}",)):
        guarded = seen.web_config_file is not None
        yield _path(text, guarded) if unix_socket.is_unix(text) else _port(text, guarded)


# --- ports


def _port(text: str, guarded: bool) -> Finding:
    try:
        sockets = server.bound(text)
    except OSError as error:
        return _unbound(text, error, guarded)
    except UnicodeError:
        return failed("address", text, "no host can have this name", f"Correct it, {_ELSEWHERE}.")
    for each in sockets:
        each.close()
    return passed("address", text, "free")


def _unbound(text: str, error: OSError, guarded: bool) -> Finding:
    host, port = server.parse_address(text)
    if error.errno == errno.EADDRINUSE:
        served = _is_served(lambda: socket.create_connection((host or "localhost", port), _SECONDS), guarded)
        return _taken(text, served, port)
    if error.errno == errno.EACCES:
        fix = (
            "Take a port above 1023; or under systemd a drop-in with `AmbientCapabilities=CAP_NET_BIND_SERVICE` and "
            "`CapabilityBoundingSet=CAP_NET_BIND_SERVICE`."
        )
        return failed("address", text, "this user may not listen on a port below 1024", fix)
    if error.errno == errno.EADDRNOTAVAIL:
        fix = f"`ip address` shows the addresses of this host: take one of them, {_ELSEWHERE}."
        return failed("address", text, "no interface of this host has this address", fix)
    fix = f"`getent ahosts {host}` shows what the name stands for, where it is one; {_ELSEWHERE}."
    return failed("address", text, f"cannot be listened on: {error.strerror or error}", fix)


def _taken(text: str, served: bool, port: int) -> Finding:
    if served:
        return passed("address", text, "gpu-fleet-exporter is serving there")
    holders = listeners.of_port(port)
    if any(holder.endswith("(process 1)") for holder in holders):
        fix = _SOCKET_UNIT.format(elsewhere=_ELSEWHERE)
        return failed("address", text, "a socket unit of systemd has it, and no exporter answers there", fix)
    fix = f"Stop that program, {_ELSEWHERE}."
    if not holders:
        fix = f"`sudo ss -ltnp 'sport = :{port}'` names it. {fix}"
    return failed("address", text, f"taken by {_named(holders)}", fix)


def _named(holders: list[str]) -> str:
    return ", ".join(holders) or "a program that this user may not look into"


def _is_served(connect: Callable[[], socket.socket], guarded: bool) -> bool:
    """Whether an exporter answers there in time. Behind a web configuration it may only say that nobody gets in
    without an account, or without TLS.
    """
    connection = http.client.HTTPConnection("localhost", timeout=_SECONDS)
    try:
        with contextlib.closing(connect()) as connection.sock:
            connection.request("GET", "/-/healthy")
            answer = connection.getresponse()
            body = answer.read(_MOST_BYTES)
    except (OSError, http.client.HTTPException):
        return False
    kept_out = answer.status == http.HTTPStatus.UNAUTHORIZED or (body != b"" and doors.NOT_TLS.endswith(body))
    return body.startswith(_HEALTHY) or (guarded and kept_out)


# --- paths


def _path(text: str, guarded: bool) -> Finding:
    path = unix_socket.parse_path(text)
    try:
        if path.startswith(b"\0"):
            return _abstract(text, path, guarded)
        return _judged(text, path, os.lstat(path).st_mode, guarded)
    except FileNotFoundError:
        return _new(text, os.path.dirname(path))  # noqa: PTH120  (a name of bytes)
    except OSError as error:
        fix = f"`namei -l {shlex.quote(os.fsdecode(path))}` shows whom each folder and the file let in."
        return failed("address", text, f"it cannot be looked into: {error.strerror}", fix)


def _abstract(text: str, name: bytes, guarded: bool) -> Finding:
    return _answered(text, name, guarded) if unix_socket.is_answered(name) else passed("address", text, "free")


def _judged(text: str, path: bytes, mode: int, guarded: bool) -> Finding:
    if not stat.S_ISSOCK(mode):
        fix = f"Move it away, {_ELSEWHERE}: the exporter removes nothing but sockets where nobody listens."
        return failed("address", text, "there is something that is no socket", fix)
    if unix_socket.is_answered(path):
        return _answered(text, path, guarded)
    return _new(text, os.path.dirname(path), "left behind by a program that has ended, and replaced at the start")  # noqa: PTH120


def _new(text: str, folder: bytes, found: str = "free") -> Finding:
    shown = shlex.quote(os.fsdecode(folder))
    if not os.path.isdir(folder):  # noqa: PTH112  (a name of bytes)
        made = f"`sudo install -d -m 750 -o gpu-fleet-exporter -g gpu-fleet-exporter {shown}`"
        fix = f"{made}; where it is /run/gpu-fleet-exporter the service makes it at its start."
        return failed("address", text, "its folder is not there", fix)
    if not os.access(folder, os.W_OK | os.X_OK):
        fix = f"`ls -ld {shown}` shows whose it is: take a folder of this user's, or one that the service makes."
        return failed("address", text, "this user may make no file in its folder", fix)
    return passed("address", text, found)


def _answered(text: str, path: bytes, guarded: bool) -> Finding:
    def connect() -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(_SECONDS)
        try:
            client.connect(path)
        except OSError:
            client.close()
            raise
        return client

    if _is_served(connect, guarded):
        return passed("address", text, "gpu-fleet-exporter is serving there")
    holders = listeners.of_path(text.removeprefix("unix:"))
    return failed("address", text, f"taken by {_named(holders)}", f"Stop that program, {_ELSEWHERE}.")
