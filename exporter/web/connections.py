"""Who is let in, for how long, and who has to go when there are more than there are places.

A connection has its place from the moment that it is accepted. While all places are taken, whoever comes waits in the
kernel's queue, where that costs this process nothing, until somebody leaves, or is made to leave: of those that nobody
would miss, the one with the least claim; and where there is none of these, somebody's next answer is the last. Nobody
who waits for a page is ever made to leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import resource
import socket
from collections import Counter
from collections.abc import Collection
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

log = logging.getLogger("exporter.web")

# A connection costs some 10 KiB, and at most 50 KiB more when its client misbehaves; with TLS 300 KiB.
MAX_CONNECTIONS, MAX_TLS_CONNECTIONS = 512, 64
MAX_HEAD_BYTES = 16 * 1024
HEAD_SECONDS = 10.0
ANSWER_SECONDS = 20.0
GRACEFUL_SECONDS = 2.0
_LAST_HEAD_SECONDS = 0.5
_LAST_ANSWER_SECONDS = GRACEFUL_SECONDS - 0.1
_LOOK_AGAIN_SECONDS = 0.005
_ACCEPT_AGAIN_SECONDS = 0.1

# What a connection does that may have to go, the least claim first, and for how long it may do so undisturbed: clients
# that behave send all of a request with their first words, and the kernel keeps a page for those who read it slowly.
_ASKING, _READING, _IDLE = range(3)
_UNDISTURBED_SECONDS = {_ASKING: 0.1, _READING: 0.5, _IDLE: 0.0}
# Of those who have not finished asking one in so many goes at a time.
_SHARE = 16
_CLOSE = (b"connection", b"close")
# How many are let in before those who are inside are heard again.
_TOGETHER = 16


class GuardedProtocol(H11Protocol):
    """HTTP/1.1 with what uvicorn lacks: a time for a request's head to arrive in, and one for its answer to be read in.

    The parser's own limit answers 400 to a head that is still incomplete at :data:`MAX_HEAD_BYTES`. Bodies are not
    waited for: a request that has announced one is answered, and its connection closed.
    """

    def __init__(self, config: uvicorn.Config, state: ServerState, connection: socket.socket, peer: str) -> None:
        """``connection`` has been accepted from the host ``peer``, and is one of the server's from now on."""
        super().__init__(config, state, {})
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
            return _ASKING
        if self.flow.write_paused:
            return _READING
        if self._answering or self.transport.is_closing():
            return None
        return _ASKING if self._head_timer is not None else _IDLE

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


def served_last(connections: Collection[Any]) -> None:
    """Where nobody has to go, since all ask again as soon as they are answered: the next answer is the last that one
    gets, of the host that has most connections, and who has been there for longest.
    """
    places = Counter(each.peer for each in connections)
    found = [each for each in connections if not each.is_last]
    if found:
        max(found, key=lambda each: (places[each.peer], -each.came)).is_last = True


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


def least_claims(connections: Collection[Any], now: float) -> list[GuardedProtocol]:
    """The connections that have to go, at least one; none where each may still be undisturbed for a moment.

    First some of those that have not finished asking, since more of these will come; where there are none a slow
    reader, and then an idle one. Of each, that of the host which has most connections, and which has been at it for
    longest.
    """
    places = Counter(each.peer for each in connections)
    for claim, undisturbed in _UNDISTURBED_SECONDS.items():
        found = [each for each in connections if each.claim == claim]
        if found:
            found.sort(key=lambda each: (-places[each.peer], each.since))
            over = (each for each in found if now - each.since >= undisturbed)
            go = (each for each in over if claim == _READING or each.is_silent())
            return list(itertools.islice(go, 1 + len(found) // _SHARE if claim == _ASKING else 1))
    return []


class Door:
    """Lets in whoever comes to one listening socket, while there is a place."""

    def __init__(self, config: uvicorn.Config, state: ServerState, listening: socket.socket) -> None:
        """Places are counted over all doors with the same ``state``."""
        self._config, self._state, self._socket = config, state, listening
        self._loop = asyncio.get_running_loop()
        self._places = _places(tls=config.ssl is not None)
        self._opening: set[asyncio.Task[None]] = set()
        self._again: asyncio.TimerHandle | None = None
        self._refused = False
        self._listen()

    def close(self) -> None:
        """Lets nobody in any more, but for those who are at the door."""
        self._let_in()
        self._loop.remove_reader(self._socket)
        if self._again is not None:
            self._again.cancel()

    async def wait_closed(self) -> None:
        """Returns when nobody comes in any more."""
        if self._opening:
            await asyncio.wait(self._opening)

    def _listen(self) -> None:
        self._again = None
        self._loop.add_reader(self._socket, self._let_in)

    def _pause(self, seconds: float) -> None:
        """Whoever comes meanwhile waits in the kernel's queue."""
        if self._again is None:
            self._loop.remove_reader(self._socket)
            self._again = self._loop.call_later(seconds, self._listen)

    def _let_in(self) -> None:
        """Some of those who have come: the others have their turn when those who are inside have been heard."""
        for _ in range(_TOGETHER):
            if not self._has_place():
                return
            try:
                connection, address = self._socket.accept()
            except BlockingIOError:
                return  # there is nobody
            except ConnectionError:
                continue  # it has left the queue already
            except OSError as error:
                if not self._refused:
                    log.warning("no connection can be accepted", extra={"fields": {"error": error.strerror}})
                self._refused = True
                self._pause(_ACCEPT_AGAIN_SECONDS)
                return
            self._refused = False
            self._take(connection, address[0] if isinstance(address, tuple) else "")

    def _take(self, connection: socket.socket, peer: str) -> None:
        connection.setblocking(False)
        protocol = GuardedProtocol(self._config, self._state, connection, peer)
        protocol.opening = opening = self._loop.create_task(self._open(protocol, connection))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    def _has_place(self) -> bool:
        """Whether there is one; else room is made, and looked for again. Also those who have left are counted until
        what was made for them is: nothing else would bound that.
        """
        inside = len(self._state.connections)
        if inside < self._places and len(self._state.tasks) < self._places:
            return True
        go = least_claims(self._state.connections, self._loop.time()) if inside >= self._places else []
        for each in go:
            each.leave()
        if inside >= self._places and not go:
            served_last(self._state.connections)
        self._pause(0 if go else _LOOK_AGAIN_SECONDS)
        return False

    async def _open(self, protocol: GuardedProtocol, connection: socket.socket) -> None:
        """With TLS this lasts until the handshake is over, which has as long as a request's head."""
        tls = self._config.ssl
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol, connection, ssl=tls, ssl_handshake_timeout=HEAD_SECONDS if tls else None
            )
        except (OSError, asyncio.CancelledError):
            with contextlib.suppress(OSError):
                connection.close()
        if not protocol.is_open:
            self._state.connections.discard(protocol)


def _places(*, tls: bool) -> int:
    """How many connections there may be at once: half of the descriptors are for everything else."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = MAX_TLS_CONNECTIONS if tls else MAX_CONNECTIONS
    return most if descriptors == resource.RLIM_INFINITY else max(1, min(most, descriptors // 2))
