"""Clients that misbehave by the hundred: what :mod:`tests.test_load` and the soak let loose on a daemon."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Self

from exporter.web import doors

ASK = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


class Crowd:
    """Connections that one thread does something with, again and again; those that the daemon closes are left out."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.sockets: list[socket.socket] = []
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def connect(self, count: int, data: bytes = b"", received: int = 0) -> list[socket.socket]:
        """So many more connections, on each of which ``data`` is sent; ``received`` is the buffer for what comes."""
        return [self._connected(data, received) for _ in range(count)]

    def _connected(self, data: bytes, received: int) -> socket.socket:
        made = socket.socket()
        if received:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received)
        made.settimeout(10)
        made.connect(("127.0.0.1", self.port))
        made.sendall(data)
        made.setblocking(False)
        self.sockets.append(made)
        return made

    def keep(self, work: Callable[[], None], every: float) -> None:
        """Does the work so often until the end; an error of a connection is no reason to stop."""

        def run() -> None:
            while not self._ended.wait(every):
                with contextlib.suppress(OSError):
                    work()

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def each(self, work: Callable[[socket.socket], object]) -> Callable[[], None]:
        """Work on every connection, also where some have been closed."""

        def run() -> None:
            for connection in self.sockets:
                with contextlib.suppress(OSError):
                    work(connection)

        return run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(20)
        for connection in self.sockets:
            connection.close()


def reset(connection: socket.socket) -> None:
    """Closes it as a program does that is killed: with RST, not FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def slow_readers(crowd: Crowd) -> None:
    """Fifty clients that ask for two hundred pages each and read sixteen bytes at a time, without end."""
    crowd.connect(50, ASK * 200, received=1024)
    crowd.keep(crowd.each(lambda connection: connection.recv(16)), 0.05)


def many_slow_readers(crowd: Crowd) -> None:
    """As many as there are places, and more."""
    crowd.connect(doors.MAX_CONNECTIONS + 100, ASK * 200, received=1024)


def silent(crowd: Crowd) -> None:
    """Five hundred clients that never say a word."""
    crowd.connect(500)


def more_silent(crowd: Crowd) -> None:
    """More silent clients than there are places, and each that is turned away comes back."""
    crowd.connect(doors.MAX_CONNECTIONS + 300)

    def again() -> None:
        for connection in list(crowd.sockets):
            if _is_closed(connection):
                crowd.sockets.remove(connection)
                connection.close()
                crowd.connect(1)

    crowd.keep(again, 0.02)


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def a_byte_a_second(crowd: Crowd) -> None:
    """A request that comes a byte a second, on more connections than there are places."""
    rest = iter(ASK)
    crowd.connect(doors.MAX_CONNECTIONS + 100, bytes([next(rest)]))

    def say() -> None:
        byte = bytes([next(rest)])
        crowd.each(lambda connection: connection.send(byte))()

    crowd.keep(say, 1.0)


def idle(crowd: Crowd) -> None:
    """More clients than there are places, each of which has had a page and keeps its connection."""
    for _ in range(doors.MAX_CONNECTIONS + 100):
        (connection,) = crowd.connect(1, b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
        connection.setblocking(True)
        connection.settimeout(10)
        connection.recv(4096)


def large_heads(crowd: Crowd) -> None:
    """Headers of 64 KiB, at once and in pieces."""
    head = ASK[:-2] + b"X-Long: " + b"a" * 65536 + b"\r\n\r\n"

    def whole() -> None:
        crowd.connect(1, head)

    def in_pieces() -> None:
        (connection,) = crowd.connect(1)
        connection.settimeout(1)
        for start in range(0, len(head), 1000):
            connection.sendall(head[start : start + 1000])
            time.sleep(0.001)

    crowd.keep(whole, 0.01)
    crowd.keep(in_pieces, 0.01)


def pipelines(crowd: Crowd) -> None:
    """A thousand requests on one connection, by clients that read none of the answers."""
    crowd.connect(20, ASK * 1000)


def flood_of_resets(crowd: Crowd) -> None:
    """Connections that are reset at once, after a request, and in the middle of one."""
    for data in (b"", ASK, ASK[:20]):
        crowd.keep(lambda data=data: connect_and_reset(crowd.port, data), 0.001)  # type: ignore[misc]


def connect_and_reset(port: int, data: bytes) -> None:
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.sendall(data)
    reset(connection)


def half_closed(crowd: Crowd) -> None:
    """Clients that end what they send, before a request and after one, and stay."""
    crowd.connect(100)
    crowd.connect(100, ASK)
    crowd.connect(100, ASK[:30])
    crowd.each(lambda connection: connection.shutdown(socket.SHUT_WR))()


def bodies_that_never_come(crowd: Crowd) -> None:
    """Bodies that are announced and not sent, with and without ``Expect: 100-continue``, or sent a byte a second."""
    announced = b"Content-Length: 1000000\r\n"
    for start in (b"POST /-/reload", b"GET /metrics"):
        for more in (announced, announced + b"Expect: 100-continue\r\n", b"Transfer-Encoding: chunked\r\n"):
            crowd.connect(50, start + b" HTTP/1.1\r\nHost: x\r\n" + more + b"\r\n")
    crowd.keep(crowd.each(lambda connection: connection.send(b"1")), 1.0)


def bodies_without_end(crowd: Crowd) -> None:
    """Chunked bodies that go on and on, also where the answer has been given."""
    chunk = b"1000\r\n" + b"a" * 4096 + b"\r\n"

    def send() -> None:
        while len(crowd.sockets) > 20:
            crowd.sockets.pop(0).close()
        crowd.connect(1, ASK[:-2] + b"Transfer-Encoding: chunked\r\n\r\n")
        crowd.each(lambda connection: connection.send(chunk * 4))()

    crowd.keep(send, 0.01)


NONSENSE = (
    b"\x00" * 5000,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /metrics HTTP/9.9\r\n\r\n",
    ASK[:-2] + b"Content-Length: -1\r\n\r\n",
    ASK[:-2] + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    ASK[:-2] + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n",
    ASK[:-2] + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n\x81\x05hello",
    ASK[:-2] + b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\nnonsense",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://x/metrics HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%zz%00%ff?name[]=%ff&name[]= HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\r\n" * 2000,
    ASK + b"nonsense\r\n\r\n",
    ASK[:-2] + b"X-Prometheus-Scrape-Timeout-Seconds: \xff\r\n\r\n",
)


def nonsense(crowd: Crowd) -> None:
    """What is no HTTP, or HTTP that nobody needs."""

    def say() -> None:
        while len(crowd.sockets) > 200:
            crowd.sockets.pop(0).close()
        for data in NONSENSE:
            crowd.connect(1, data)

    crowd.keep(say, 0.05)


def hanging(crowd: Crowd) -> None:
    """Clients that stop in the middle: of the line, of a header, of the end."""
    for cut in (1, 10, 20, 30, len(ASK) - 1):
        crowd.connect(100, ASK[:cut])


def insatiable(crowd: Crowd) -> None:
    """More connections than there are places, each of which asks again as soon as it is answered."""
    ask = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n"

    def again(connection: socket.socket) -> None:
        if connection.recv(65536):
            connection.sendall(ask)

    crowd.connect(560, ask)
    crowd.keep(crowd.each(again), 0.01)


ATTACKS = (
    slow_readers,
    many_slow_readers,
    silent,
    more_silent,
    a_byte_a_second,
    idle,
    large_heads,
    pipelines,
    flood_of_resets,
    half_closed,
    bodies_that_never_come,
    bodies_without_end,
    nonsense,
    hanging,
    insatiable,
)
