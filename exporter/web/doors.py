"""Who is let in, and who has to go when there are more than there are places.

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

from uvicorn.server import ServerState

from exporter.web.connections import ASKING, HEAD_SECONDS, IDLE, MAX_HEAD_BYTES, READING, Configuration, GuardedProtocol

log = logging.getLogger("exporter.web")

NOT_TLS = b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n"
"""The answer to who speaks HTTP where TLS is spoken."""

_HANDSHAKE = b"\x16"  # the first byte of TLS

# A connection costs some 10 KiB, and at most 50 KiB more when its client misbehaves; with TLS 300 KiB.
MAX_CONNECTIONS, MAX_TLS_CONNECTIONS = 512, 64
# For how long each may go on undisturbed: clients that behave send all of a request with their first words, and the
# kernel keeps a page for those who read it slowly.
_UNDISTURBED_SECONDS = {ASKING: 0.1, READING: 0.5, IDLE: 0.0}
# Of those who have not finished asking one in so many goes at a time.
_SHARE = 16
# How many are let in before those who are inside are heard again.
_TOGETHER = 16
_LOOK_AGAIN_SECONDS = 0.005
_ACCEPT_AGAIN_SECONDS = 0.1
# What a client is waited for that is to confirm the end of its encryption.
_LAST_WORD_SECONDS = 1.0


def served_last(connections: Collection[Any]) -> None:
    """Where nobody has to go, since all ask again as soon as they are answered: the next answer is the last that one
    gets, of the host that has most connections, and who has been there for longest.
    """
    places = Counter(each.peer for each in connections)
    found = [each for each in connections if not each.is_last]
    if found:
        max(found, key=lambda each: (places[each.peer], -each.came)).is_last = True


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
            go = (each for each in over if claim == READING or each.is_silent())
            return list(itertools.islice(go, 1 + len(found) // _SHARE if claim == ASKING else 1))
    return []


class Door:
    """Lets in whoever comes to one listening socket, while there is a place."""

    def __init__(self, config: Configuration, state: ServerState, listening: socket.socket) -> None:
        """Places are counted over all doors with the same ``state``."""
        self._config, self._state, self._socket = config, state, listening
        self._loop = asyncio.get_running_loop()
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
        inside, most = len(self._state.connections), places(tls=self._config.front.tls is not None)
        if inside < most and len(self._state.tasks) < most:
            return True
        go = least_claims(self._state.connections, self._loop.time()) if inside >= most else []
        for each in go:
            each.leave()
        if inside >= most and not go:
            served_last(self._state.connections)
        self._pause(0 if go else _LOOK_AGAIN_SECONDS)
        return False

    async def _open(self, protocol: GuardedProtocol, connection: socket.socket) -> None:
        """With TLS this lasts until the handshake is over. Its first byte and the rest have as long as a request's head
        each; who sends none costs no encryption.
        """
        context = self._config.front.tls
        limits = {"ssl_handshake_timeout": HEAD_SECONDS, "ssl_shutdown_timeout": _LAST_WORD_SECONDS} if context else {}
        try:
            if context is not None:
                await self._begins_tls(connection)
            await self._loop.connect_accepted_socket(lambda: protocol, connection, ssl=context, **limits)
        except (OSError, asyncio.CancelledError):
            with contextlib.suppress(OSError):
                connection.close()
        if not protocol.is_open:
            self._state.connections.discard(protocol)

    async def _begins_tls(self, connection: socket.socket) -> None:
        """Returns when the connection begins with a handshake, else raises ``OSError``; who speaks HTTP is told so."""
        heard = self._loop.create_future()
        self._loop.add_reader(connection, _hear, heard)
        try:
            await asyncio.wait_for(heard, HEAD_SECONDS)
        finally:
            self._loop.remove_reader(connection)
        if connection.recv(1, socket.MSG_PEEK) != _HANDSHAKE:
            if connection.recv(MAX_HEAD_BYTES):  # unread, it would turn the answer into a reset
                connection.send(NOT_TLS)
            raise ConnectionAbortedError


def _hear(heard: asyncio.Future[None]) -> None:
    if not heard.done():
        heard.set_result(None)


def places(*, tls: bool) -> int:
    """How many connections there may be at once: half of the descriptors are for everything else."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = MAX_TLS_CONNECTIONS if tls else MAX_CONNECTIONS
    return most if descriptors == resource.RLIM_INFINITY else max(1, min(most, descriptors // 2))
