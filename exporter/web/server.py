"""Sockets and the HTTP server, with limits that keep memory bounded beside silent, slow and large clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import h11
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from exporter.errors import CouldNot, InputError

MAX_CONNECTIONS = 64
MAX_HEAD_BYTES = 16 * 1024
HEAD_SECONDS = 10.0
_LAST_HEAD_SECONDS = 0.5
_KEEP_ALIVE_SECONDS = 30
_GRACEFUL_SECONDS = 2
_BACKLOG = 128


def parse_address(text: str) -> tuple[str, int]:
    """``host:port``, ``[IPv6]:port`` or ``:port`` (every address); raises :class:`InputError`."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise InputError(f"--web.listen-address: found '{text}', expected HOST:PORT, [IPV6]:PORT or :PORT")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise InputError(f"--web.listen-address: found '{text}', expected an IPv6 address in brackets")
    return host, int(port)


def listen(text: str) -> list[socket.socket]:
    """Listening sockets for an address: one, or one for each address that a host name has.

    ``:port`` is one socket for IPv6 and IPv4 alike where the host has IPv6. Raises :class:`CouldNot`.
    """
    host, port = parse_address(text)
    try:
        if not host and socket.has_dualstack_ipv6():
            return [_bound(socket.AF_INET6, ("::", port), dual=True)]
        found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)  # noqa: S104
        return [_bound(family, address) for family, _, _, _, address in dict.fromkeys(found)]
    except OSError as error:
        raise CouldNot(f"cannot listen on {text}: {error.strerror or error}") from error
    except UnicodeError as error:
        raise InputError(f"--web.listen-address: found {text!r}, expected a host name") from error


def _bound(family: int, address: Any, *, dual: bool = False) -> socket.socket:
    # The protocol is named, or asyncio would not turn off Nagle's delay on accepted connections: 40 ms a page.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if dual else 1)
        bound.bind(address)
        bound.listen(_BACKLOG)
        bound.setblocking(False)
    except OSError:
        bound.close()
        raise
    return bound


class GuardedProtocol(H11Protocol):
    """HTTP/1.1 with what uvicorn lacks: a cap on open connections, and a time for a request's head to arrive in.

    The parser's own limit answers 400 to a head that is still incomplete at :data:`MAX_HEAD_BYTES`; one that comes
    whole in one piece gets past it, and is refused by :func:`limited`.
    """

    _timer: asyncio.TimerHandle | None = None
    _asked = False
    _is_last = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close what comes over the cap; else begin to wait for a request."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.close()
        else:
            self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """A head that is not complete yet goes on being waited for, from its first byte."""
        super().data_received(data)
        self._asked = self.cycle is not None
        if self._is_last and self._asked:
            self.cycle.keep_alive = False
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._wait_for_head()
        else:
            self._stop_waiting()

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that has said all it will say still gets the answer that it waits for."""
        return self.cycle is not None and not self.cycle.response_complete

    def shutdown(self) -> None:
        """The server stops. Who has just connected, and not yet said what for, still gets an answer: a scrape that
        begins as the daemon ends is not lost. A connection between two requests is closed.
        """
        if self._asked:
            super().shutdown()
        elif not self.transport.is_closing():
            self._is_last = True
            self._stop_waiting()
            self._wait_for_head(_LAST_HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self, seconds: float = HEAD_SECONDS) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(seconds, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def limited(app: ASGIApp) -> ASGIApp:
    """The application, behind a limit on the size of a request's line (414) and of its headers (431)."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        refusal = _oversize(scope) if scope["type"] == "http" else None
        await (refusal or app)(scope, receive, send)

    return guard


def _oversize(scope: Scope) -> PlainTextResponse | None:
    close = {"connection": "close"}
    if len(scope["raw_path"]) + len(scope["query_string"]) > MAX_HEAD_BYTES:
        return PlainTextResponse("The request line is too long.\n", 414, close)
    if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEAD_BYTES:
        return PlainTextResponse("The request's headers are too large.\n", 431, close)
    return None


class Server(uvicorn.Server):
    """uvicorn without its own signal handlers: the daemon decides when to stop."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                limited(app),
                http=GuardedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                backlog=_BACKLOG,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_GRACEFUL_SECONDS,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """No signal is captured."""
        yield


def addresses(sockets: Sequence[socket.socket]) -> list[str]:
    """The sockets' addresses as hosts and ports, those that the system chose included; a path as ``unix:PATH``."""
    return [_host_and_port(bound.getsockname()) for bound in sockets]


def _host_and_port(name: Any) -> str:
    if not isinstance(name, tuple):
        return f"unix:{name if isinstance(name, str) else '@' + name[1:].decode(errors='replace')}"
    host, port = name[0], name[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
