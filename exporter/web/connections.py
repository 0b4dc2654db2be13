"""One connection: what it does, for how long it may, and what is answered on it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any, Protocol

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

MAX_HEAD_BYTES = 16 * 1024
HEAD_SECONDS = 10.0
ANSWER_SECONDS = 20.0
GRACEFUL_SECONDS = 2.0
_LAST_HEAD_SECONDS = 0.5
_LAST_ANSWER_SECONDS = GRACEFUL_SECONDS - 0.1
_CLOSE = (b"connection", b"close")

ASKING, READING, IDLE = range(3)
"""What a connection does that may have to go, the least claim first."""


class Front(Protocol):
    """Who is let in."""

    @property
    def tls(self) -> ssl.SSLContext | None:
        """What new connections are encrypted by; None: not at all."""

    @property
    def terms(self) -> object:
        """Equal as long as the same is asked of new connections."""

    def permits(self, certificate: Any) -> bool:
        """Whether a client with this certificate, which has been verified, may ask."""


class Configuration(uvicorn.Config):
    """uvicorn's, and who is let in."""

    def __init__(self, app: ASGIApp, front: Front, forbidden: ASGIApp, **more: Any) -> None:
        """``forbidden`` answers those whose certificate's names are not permitted."""
        super().__init__(app, **more)
        self.front, self.forbidden = front, forbidden


class GuardedProtocol(H11Protocol):
    """HTTP/1.1 with what uvicorn lacks: a time for a request's head to arrive in, and one for its answer to be read in.

    The parser's own limit answers 400 to a head that is still incomplete at :data:`MAX_HEAD_BYTES`. Bodies are not
    waited for: a request that has announced one is answered, and its connection closed.
    """

    def __init__(self, config: Configuration, state: ServerState, connection: socket.socket, peer: str) -> None:
        """``connection`` has been accepted from the host ``peer``, and is one of the server's from now on."""
        super().__init__(config, state, {})
        self._front, self._forbidden = config.front, config.forbidden
        self._terms = config.front.terms
        self.peer, self.came = peer, self.loop.time()
        self.since = self.came
        self.is_last = False  # the answer to the next request
        self.is_open = False
        self.opening: asyncio.Task[None] | None = None
        self._socket = connection
        self._head_timer: asyncio.TimerHandle | None = None
        self._answer_timer: asyncio.TimerHandle | None = None
        self._asked = self._ended = False
        self.connections.add(self)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # --- what asyncio tells

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request. No byte of an answer is kept here that the kernel takes, so that who reads is known."""
        super().connection_made(_Joining(transport))  # type: ignore[arg-type]
        self.is_open = True
        if not self._front.permits(transport.get_extra_info("peercert")):
            self.app = self._forbidden
        transport.set_write_buffer_limits(1)  # at 0, what is under TLS never goes on
        self._wait_for_head(_LAST_HEAD_SECONDS if self.is_last else HEAD_SECONDS)

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that has said all it will say still gets the answers that it waits for."""
        self._ended = True
        return self._answering

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered: from the first time on it has so long for all of it."""
        super().pause_writing()
        if self._answer_timer is None:
            self.since = self.loop.time()
            self._answer_timer = self.loop.call_later(ANSWER_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The kernel has all of the answer, or there is more to come."""
        super().resume_writing()
        if not self._answering:
            self._has_answer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._stop_waiting_for_head()
        self._stop_waiting_for_reader()
        super().connection_lost(exc)

    # --- what uvicorn does at each step

    def handle_events(self) -> None:
        """A head that is not complete yet goes on being waited for, from its first byte."""
        super().handle_events()
        if self._answering:
            self._asked = True
            self._stop_waiting_for_head()
            self._limit_request()
        elif self.conn.their_state is h11.IDLE and self.conn.trailing_data[0] and not self.transport.is_closing():
            self._wait_for_head(HEAD_SECONDS)

    def _limit_request(self) -> None:
        """What its client may still say while it is answered."""
        if self._terms != self._front.terms:  # it was let in by rules that hold no more
            self.is_last = True
        if self.is_last or self.conn.their_state is h11.SEND_BODY:
            self.cycle.keep_alive = False
            if _CLOSE not in self.cycle.default_headers:  # uvicorn does not say so
                self.cycle.default_headers = [*self.cycle.default_headers, _CLOSE]
        if len(self.cycle.body) > MAX_HEAD_BYTES:
            self.flow.pause_reading()

    def on_response_complete(self) -> None:
        """Answered; a client that has no more to say is not kept."""
        super().on_response_complete()
        if not self._answering:
            if self._ended:
                self.transport.close()
            if not self.flow.write_paused:
                self._has_answer()

    def _has_answer(self) -> None:
        self.since = self.loop.time()
        self._stop_waiting_for_reader()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is told so; in the middle of an answer the connection just ends."""
        if self._answering:
            self.cycle.disconnected = True
            self.transport.abort()
        else:
            super().send_400_response(msg)

    def shutdown(self) -> None:
        """The server stops. Who has just connected, and not yet said what for, still gets an answer: a scrape that
        begins as the daemon ends is not lost. A connection between two requests is closed.
        """
        self.is_last = True
        if not self.is_open:
            return
        self.loop.call_later(_LAST_ANSWER_SECONDS, self.transport.abort)
        if self._asked:
            super().shutdown()
        elif not self.transport.is_closing():
            self._stop_waiting_for_head()
            self._wait_for_head(_LAST_HEAD_SECONDS)

    # --- timers

    def _wait_for_head(self, seconds: float) -> None:
        if self._head_timer is None:
            self.since = self.loop.time()
            self._head_timer = self.loop.call_later(seconds, self.transport.close)

    def _stop_waiting_for_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_waiting_for_reader(self) -> None:
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None

    # --- who has to go

    @property
    def claim(self) -> int | None:
        """What it does, where that is no reason to keep it; None while it waits for an answer, or goes by itself."""
        if not self.is_open:
            return ASKING
        if self.flow.write_paused:
            return READING
        if self._answering or self.transport.is_closing():
            return None
        return ASKING if self._head_timer is not None else IDLE

    def is_silent(self) -> bool:
        """Whether the kernel has nothing from it that is yet to be read."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return True

    def leave(self) -> None:
        """Ends it at once."""
        if self.is_open:
            self.transport.abort()
        elif self.opening is not None:
            self.opening.cancel()


class _Joining:
    """A transport that sends an answer's head together with what follows it, which uvicorn writes next: each write by
    itself wakes the client.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""

    def write(self, data: bytes) -> None:
        """Send what was kept and this, unless this is another head."""
        if data.startswith(b"HTTP/1.1 "):
            self._head += data
        elif self._head or data:
            data, self._head = self._head + data, b""
            self._transport.write(data)

    def close(self) -> None:
        """Send what was kept, and end."""
        self.write(b"")
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
