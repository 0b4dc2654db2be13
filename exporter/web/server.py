"""Sockets and the HTTP server, with limits that keep memory bounded beside silent, slow and large clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exporter.errors import CouldNot, InputError
from exporter.web import unix_socket
from exporter.web.connections import GRACEFUL_SECONDS, MAX_HEAD_BYTES, Configuration
from exporter.web.doors import Door
from exporter.web.front import Front

_KEEP_ALIVE_SECONDS = 30
# Who waits there to be accepted costs this process nothing.
_BACKLOG = 1024
# What the kernel keeps for a connection: enough for any request, and for a page to be read at a good pace from afar.
_RECEIVED_BYTES, _SENT_BYTES = 16 * 1024, 128 * 1024
_PIECE_BYTES = 16 * 1024
_EXPECTED = "HOST:PORT, [IPV6]:PORT, :PORT, unix:/PATH or unix:@NAME"


def check_address(text: str) -> None:
    """Raises :class:`InputError` for what :func:`listen` cannot take."""
    if unix_socket.is_unix(text):
        unix_socket.parse_path(text)
    else:
        parse_address(text)


def parse_address(text: str) -> tuple[str, int]:
    """``host:port``, ``[IPv6]:port`` or ``:port`` (every address); raises :class:`InputError`."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise InputError(f"--web.listen-address: found '{text}', expected {_EXPECTED}")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise InputError(f"--web.listen-address: found '{text}', expected an IPv6 address in brackets")
    return host, int(port)


def listen(text: str) -> list[socket.socket]:
    """Listening sockets for an address: one, or one for each address that a host name has.

    ``:port`` is one socket for IPv6 and IPv4 alike where the host has IPv6. Raises :class:`InputError` for what is no
    address, and :class:`CouldNot`.
    """
    check_address(text)
    try:
        if unix_socket.is_unix(text):
            return [unix_socket.listening(text, _BACKLOG)]
        sockets = bound(text)
        for each in sockets:
            each.listen(_BACKLOG)
    except OSError as error:
        raise CouldNot(f"cannot listen on {text}: {error.strerror or error}") from error
    except UnicodeError as error:
        raise InputError(f"--web.listen-address: found {text!r}, expected a host name") from error
    return sockets


def bound(text: str) -> list[socket.socket]:
    """The sockets of :func:`listen` for an address that is no path, which do not listen yet.

    Raises ``OSError`` where one cannot be had, and ``UnicodeError`` for what cannot be the name of a host.
    """
    host, port = parse_address(text)
    if not host and socket.has_dualstack_ipv6():
        return [_bound(socket.AF_INET6, ("::", port), dual=True)]
    found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)  # noqa: S104
    return [_bound(family, address) for family, _, _, _, address in dict.fromkeys(found)]


def _bound(family: int, address: Any, *, dual: bool = False) -> socket.socket:
    # The protocol is named, or asyncio would not turn off Nagle's delay on accepted connections: 40 ms a page.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if dual else 1)
        made.bind(address)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made


def limited(app: ASGIApp) -> ASGIApp:
    """The application, behind a limit on the size of a request's line (414) and of its headers (431). A head that comes
    whole, in one piece, gets past the parser's limit.
    """

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_pieces(message: Message) -> None:
            for piece in _pieces(message):
                await send(piece)

        refusal = _oversize(scope) if scope["type"] == "http" else None
        await (refusal or app)(scope, receive, send_in_pieces)

    return guard


def _pieces(message: Message) -> Iterator[Message]:
    """A body in pieces, each of which is sent when the kernel has the one before: so no client that does not read has a
    page kept for it alone.
    """
    body = message.get("body", b"")
    for start in range(0, len(body) - _PIECE_BYTES, _PIECE_BYTES):
        yield {**message, "body": body[start : start + _PIECE_BYTES], "more_body": True}
    sent = max(0, len(body) - 1) // _PIECE_BYTES * _PIECE_BYTES
    yield {**message, "body": body[sent:]} if sent else message


def _oversize(scope: Scope) -> PlainTextResponse | None:
    close = {"connection": "close"}
    if len(scope["raw_path"]) + len(scope["query_string"]) > MAX_HEAD_BYTES:
        return PlainTextResponse("The request line is too long.\n", 414, close)
    if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEAD_BYTES:
        return PlainTextResponse("The request's headers are too large.\n", 431, close)
    return None


_FORBIDDEN = PlainTextResponse("The certificate's names are none of those that are allowed.\n", 403)


class Server(uvicorn.Server):
    """uvicorn with our doors, and without its own signal handlers: the daemon decides when to stop."""

    def __init__(self, app: ASGIApp, front: Front) -> None:
        self._stopping = asyncio.Event()
        self._configuration = Configuration(
            limited(front.guard(app)),
            front,
            limited(front.guard(_FORBIDDEN)),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            backlog=_BACKLOG,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(GRACEFUL_SECONDS),
        )
        super().__init__(self._configuration)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Opens a door on each of the sockets, which listen already."""
        for each in sockets or ():
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVED_BYTES)  # which what it accepts inherits
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SENT_BYTES)
        doors = [Door(self._configuration, self.server_state, each) for each in sockets or ()]
        self.servers = doors  # type: ignore[assignment]
        self.started = True

    async def main_loop(self) -> None:
        """Until it is told to stop. uvicorn looks ten times a second, and keeps the date that answers carry."""
        while not self.should_exit:
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 1.0)

    def stop(self) -> None:
        """Serve who is here, and end."""
        self.should_exit = True
        self._stopping.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """No signal is captured."""
        yield


def addresses(sockets: Sequence[socket.socket]) -> list[str]:
    """The sockets' addresses as hosts and ports, those that the system chose included; a path as ``unix:PATH``."""
    return [_host_and_port(each.getsockname()) for each in sockets]


def _host_and_port(name: Any) -> str:
    if not isinstance(name, tuple):
        return f"unix:{name if isinstance(name, str) else '@' + name[1:].decode(errors='replace')}"
    host, port = name[0], name[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
