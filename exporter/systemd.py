"""The service manager's side of the daemon: the sockets that it hands over, and what it wants to be told.

Source: sd_listen_fds(3), sd_notify(3), sd_watchdog_enabled(3). Started by anything else, there is none of this.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import MutableMapping, Sequence

from exporter.errors import InputError

log = logging.getLogger("exporter.systemd")

_FIRST_DESCRIPTOR = 3
# Three times within the time that systemd waits: one late call of a busy host is no hang.
_FEEDS = 3
_AGAIN_SECONDS = 0.1
_MOST_DIGITS = 18
_FAMILIES = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
_VARIABLES = (
    "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID", "NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"
)  # fmt: skip


class ServiceManager:
    """What systemd gave this process. ``watchdog_seconds`` is None where it does not watch."""

    def __init__(
        self, sockets: Sequence[socket.socket] = (), address: str = "", watchdog_seconds: float | None = None
    ) -> None:
        """``address`` is that of the notification socket, empty where there is none."""
        self.sockets, self.watchdog_seconds = tuple(sockets), watchdog_seconds
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._status = ""
        self._unsent: dict[str, str] = {}
        self._stopping = False

    def ready(self) -> None:
        """The start, or a reload, is over."""
        self._tell("READY=1")

    def reloading(self) -> None:
        """Settings are loaded anew from now until :meth:`ready`."""
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        """The stop has begun. What would be said later than this would be untrue."""
        self._tell("STOPPING=1")
        self._stopping = True

    def status(self, text: str) -> None:
        """The line that ``systemctl status`` shows; told where it is another than before."""
        if text != self._status:
            self._status = text
            self._tell(f"STATUS={text}")

    async def feed_watchdog(self) -> None:
        """For as long as the loop that runs this gets on; returns at once where nobody watches."""
        while self.watchdog_seconds is not None:
            self._tell("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_seconds / _FEEDS)

    def _tell(self, message: str) -> None:
        """Never waits, and never fails: a service manager that does not listen is no reason to serve no pages."""
        if not self._address or self._stopping:
            return
        kind, waits = message.partition("=")[0], bool(self._unsent)
        self._unsent.pop(kind, None)  # what is overtaken, nobody has seen
        self._unsent[kind] = message
        if not waits:
            self._send()

    def _send(self) -> None:
        """What has not been sent, in its order; where the manager's queue is full the rest a moment later."""
        while self._unsent:
            kind, message = next(iter(self._unsent.items()))
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
                    out.setblocking(False)
                    out.sendto(message.encode(), self._address)
            except BlockingIOError:
                asyncio.get_running_loop().call_later(_AGAIN_SECONDS, self._send)
                return
            except OSError as error:
                fields = {"message": message.partition("\n")[0], "error": error.strerror or error}
                log.warning("the service manager cannot be told", extra={"fields": fields})
            del self._unsent[kind]


def adopt(environ: MutableMapping[str, str]) -> ServiceManager:
    """What the environment says that systemd gave this process; taken out of it, for the children it is not meant.

    Raises :class:`InputError` for a socket that no pages can be served on.
    """
    given = {name: environ.pop(name, "") for name in _VARIABLES}
    watched = given["WATCHDOG_PID"] in ("", str(os.getpid()))
    seconds = _number(given["WATCHDOG_USEC"]) / 1e6 if watched else 0.0
    address = given["NOTIFY_SOCKET"] if given["NOTIFY_SOCKET"].startswith(("/", "@")) else ""
    return ServiceManager(_sockets(given), address, seconds or None)


def _number(text: str) -> int:
    """0 for what is none, or none that systemd would say."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else 0


def _sockets(given: MutableMapping[str, str]) -> tuple[socket.socket, ...]:
    """Those from descriptor 3 on, if they are meant for this process and not for one that started it."""
    if given["LISTEN_PID"] != str(os.getpid()):
        return ()
    return tuple(_socket(_FIRST_DESCRIPTOR + place) for place in range(_number(given["LISTEN_FDS"])))


def _socket(descriptor: int) -> socket.socket:
    try:
        os.set_inheritable(descriptor, False)
        found = socket.socket(fileno=descriptor)
        listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise InputError(f"descriptor {descriptor} from systemd: expected a socket: {error.strerror}") from error
    if found.family not in _FAMILIES or found.type != socket.SOCK_STREAM or not listens:
        expected = "a socket of ListenStream= with Accept=no, on a port or a path"
        raise InputError(f"descriptor {descriptor} from systemd: expected {expected}")
    found.setblocking(False)
    return found
