"""Anything at all over HTTP: the daemon answers, or ends the connection, and is as well as before."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import string
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import load_all_checks

from exporter.web import people, report
from tests.harness import Daemon

pytestmark = pytest.mark.e2e

SIMULATED = "backends: [simulated]\nfleets: [{name: host, runtime: host}]\n"
MIB = 1 << 20
MOST_GROWN = 16 * MIB
FUZZED = settings(
    max_examples=1000 if os.environ.get("CI") == "true" else 300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

load_all_checks()

# What the API is, for a client that knows no more than its schema.
(_REPORT,), _COMPONENTS = msgspec.json.schema_components([report.Report], ref_template="#/components/schemas/{name}")
OPENAPI: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "gpu-fleet-exporter", "version": "1"},
    "paths": {
        people.FLEETS_PATH: {
            "get": {
                "responses": {
                    "200": {"description": "the mapping", "content": {"application/json": {"schema": _REPORT}}}
                }
            }
        }
    },
    "components": {"schemas": _COMPONENTS},
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all; it has to be well at the end."""
    with Daemon(tmp_path_factory.mktemp("fuzz"), {}, SIMULATED, ["--web.enable-lifecycle"]) as serving:
        serving.scrape()
        serving.request("/")
        before = resident(serving)
        yield serving
        assert serving.request("/-/healthy").status == 200
        assert serving.scrape().of("gpu_utilization_percent")
        assert serving.request("/").status == 200
        until = time.monotonic() + 30
        while len(list(Path(f"/proc/{serving.process.pid}/fd").iterdir())) > 40:
            assert time.monotonic() < until
            time.sleep(0.2)
        assert resident(serving) - before < MOST_GROWN
        assert "Traceback" not in serving.log
        assert not re.search("level=error(?!.*settings not loaded)", serving.log), serving.log
        assert serving.stop()[0] == 0


def resident(daemon: Daemon) -> int:
    text = Path(f"/proc/{daemon.process.pid}/statm").read_text()
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")


def exchanged(daemon: Daemon, *pieces: bytes) -> bytes:
    """What comes back on a connection on which all of this is said, until the daemon or a moment ends it."""
    answer = b""
    with (
        contextlib.suppress(ConnectionError),
        socket.create_connection(("127.0.0.1", daemon.port), timeout=10) as client,
    ):
        for piece in pieces:
            client.sendall(piece)
        with contextlib.suppress(OSError):  # it may have been ended by then
            client.shutdown(socket.SHUT_WR)
        while more := client.recv(65536):
            answer += more
    return answer


schema = schemathesis.openapi.from_dict(OPENAPI)


@schema.parametrize()
@FUZZED
def test_the_api_is_what_its_schema_says(case: schemathesis.Case[Any], daemon: Daemon) -> None:
    """Whatever is sent along: queries, headers, cookies, bodies, other methods."""
    case.call_and_validate(base_url=f"http://127.0.0.1:{daemon.port}")


@FUZZED
@given(pieces=st.lists(st.binary(max_size=2000), max_size=4))
def test_bytes_that_are_no_http(pieces: list[bytes], daemon: Daemon) -> None:
    answer = exchanged(daemon, *pieces)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 ")


PRINTABLE = st.text(string.printable, max_size=60)
PATHS = st.one_of(
    st.sampled_from(
        ["/", "/metrics", people.FLEETS_PATH, "/-/healthy", "/-/ready", "/-/reload", "/assets/page.css", "*"]
    ),
    st.text(max_size=40).map(lambda text: "/" + text),
    st.sampled_from(["/assets/", "//", "/../", "/assets/..%2f..%2f", "/assets/%2e%2e/", "/metrics?name[]="]).flatmap(
        lambda start: st.text(max_size=20).map(lambda rest: start + rest)
    ),
)
HEADERS = st.lists(
    st.tuples(
        st.one_of(
            st.sampled_from(
                [
                    "Accept",
                    "Accept-Encoding",
                    "Authorization",
                    "Connection",
                    "Content-Length",
                    "Expect",
                    "Host",
                    "Transfer-Encoding",
                    "Upgrade",
                    "X-Prometheus-Scrape-Timeout-Seconds",
                ]
            ),
            st.text(string.ascii_letters + "-", min_size=1, max_size=20),
        ),
        st.one_of(st.sampled_from(["0", "-1", "gzip", "chunked", "nan", "1e999", "close", "*/*;q=0"]), PRINTABLE),
    ),
    max_size=6,
)


@FUZZED
@given(
    start=st.tuples(
        st.one_of(st.sampled_from(["GET", "HEAD", "POST", "PUT", "OPTIONS", "TRACE", "DELETE"]), PRINTABLE),
        PATHS,
        st.sampled_from(["HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9", ""]),
    ),
    headers=HEADERS,
    body=st.binary(max_size=100),
)
def test_requests_of_all_kinds(
    start: tuple[str, str, str], headers: list[tuple[str, str]], body: bytes, daemon: Daemon
) -> None:
    """Each gets an answer of HTTP, or none; none is the server's own failure."""
    lines = [" ".join(start), "Host: x", *(f"{name}: {value}" for name, value in headers)]
    answer = exchanged(daemon, "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogatepass") + body)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
    assert not answer.startswith(b"HTTP/1.1 500"), answer[:500]


@pytest.mark.parametrize(
    "path",
    [
        "/%0d%0ax-injected:%201",
        "/metrics/%0d%0ax-injected:%201",
        "//x-injected.example/%2e%2e",
        "/assets/..%2fpage.py",
        "/assets/../page.py",
        "/assets/%2e%2e%2f%2e%2e%2fcli.py",
        "/assets//etc/passwd",
        "/assets/page.css%00.js",
        "/metrics?name[]=%0d%0ax-injected:%201",
    ],
)
def test_paths_inject_nothing_and_lead_nowhere(daemon: Daemon, path: str) -> None:
    """No part of a path comes back in a head, and no file but the page's own is served."""
    answer = exchanged(daemon, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200" if "?" in path else b"HTTP/1.1 404")
    assert b"injected" not in head.lower()
    assert b"import" not in body
    assert b"root:" not in body


@pytest.mark.parametrize("path", ["/", "/metrics", people.FLEETS_PATH, "/-/healthy", "/assets/page.js"])
def test_a_head_is_that_of_the_page(daemon: Daemon, path: str) -> None:
    """HEAD has the answer's headers and nothing behind them."""
    answer = exchanged(daemon, f"HEAD {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert body == b""


def test_scrapes_go_on_beside_it(daemon: Daemon) -> None:
    """While nonsense comes over eight connections every page is whole."""
    ended = threading.Event()
    noise = [
        b"\x00" * 4096,
        b"GET",
        b"GET / HTTP/1.1\r\nContent-Length: 9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01",
    ]

    def disturb(place: int) -> None:
        while not ended.is_set():
            exchanged(daemon, noise[place % len(noise)])

    threads = [threading.Thread(target=disturb, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(30):
            assert daemon.scrape().of("gpu_utilization_percent")
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=10)) as kept:
        for path in ("/metrics", "/"):
            kept.request("GET", path)
            assert kept.getresponse().read()
