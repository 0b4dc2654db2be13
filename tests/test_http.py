"""HTTP: formats by negotiation, paths and methods, and limits that hold beside clients that misbehave."""

from __future__ import annotations

import gzip
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics import parser as openmetrics

from exporter.errors import CouldNot, InputError
from exporter.web import connections, doors, server
from exporter.web.app import deadline
from exporter.web.exposition import accepts_gzip
from exporter.web.server import parse_address
from tests.fakes.nvml import FakeNvml, build_or_skip, equal_cards
from tests.harness import Daemon, parse

pytestmark = pytest.mark.e2e

PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores"
PROMETHEUS_ACCEPT = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One daemon for all tests here: none of them changes it."""
    directory = tmp_path_factory.mktemp("http")
    fake = FakeNvml(directory, build_or_skip(directory / "lib"))
    fake.write(equal_cards(2))
    with Daemon(directory, fake.environment(), None, []) as running:
        yield running


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        (None, PLAIN),
        ("*/*", PLAIN),
        ("text/plain", PLAIN),
        ("text/html,application/xhtml+xml,*/*;q=0.8", PLAIN),
        (PROMETHEUS_ACCEPT, OPENMETRICS),
        ("application/openmetrics-text;version=1.0.0;q=0,text/plain", PLAIN),
        ("application/openmetrics-text;version=nonsense", PLAIN),
        ("application/openmetrics-text; q=x", PLAIN),
        ("\x7f;;;=,,q", PLAIN),
    ],
)
def test_the_format_is_negotiated(daemon: Daemon, accept: str | None, content_type: str) -> None:
    """The page comes in the format asked for, else as plain text, always with a content type that Prometheus takes."""
    answer = daemon.request("/metrics", headers={} if accept is None else {"Accept": accept})
    assert answer.status == 200
    assert answer.headers["content-type"] == content_type
    text = answer.body.decode()
    if content_type == OPENMETRICS:
        assert text.endswith("# EOF\n")
        names = [family.name for family in openmetrics.text_string_to_metric_families(text)]  # type: ignore[no-untyped-call]
        assert len(names) == len(set(names))
    else:
        assert parse(text).value("gpu_utilization_percent", physical_index="1") == 20


def test_gzip_is_offered_and_not_forced(daemon: Daemon) -> None:
    """A client that accepts gzip gets it, with the same page inside; one that refuses it does not."""
    zipped = daemon.request("/metrics", headers={"Accept-Encoding": "gzip, deflate"})
    assert zipped.headers["content-encoding"] == "gzip"
    assert zipped.headers["content-type"] == PLAIN
    assert parse(gzip.decompress(zipped.body).decode()).of("gpu_info")
    plain = daemon.request("/metrics", headers={"Accept-Encoding": "gzip;q=0"})
    assert "content-encoding" not in plain.headers


def test_names_narrow_the_page(daemon: Daemon) -> None:
    """`name[]` leaves only the families named, a counter by its sample's name, and nothing for an unknown one."""
    answer = daemon.request("/metrics?name[]=gpu_info&name[]=gpu_exporter_backend_faults_total")
    assert set(parse(answer.body.decode()).samples) == {"gpu_info", "gpu_exporter_backend_faults_total"}
    assert daemon.request("/metrics?name[]=nonsense").body == b""
    own = parse(daemon.request("/metrics?name[]=process_cpu_seconds_total").body.decode())
    assert set(own.samples) == {"process_cpu_seconds_total"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 200),
        ("HEAD", "/metrics", 200),
        ("GET", "/-/healthy", 200),
        ("GET", "/-/ready", 200),
        ("GET", "/nonsense", 404),
        ("GET", "/metrics/", 404),
        ("POST", "/metrics", 405),
        ("DELETE", "/", 405),
        ("GET", "/-/reload", 405),
        ("POST", "/-/reload", 403),
    ],
)
def test_paths_and_methods(daemon: Daemon, method: str, path: str, status: int) -> None:
    """Each path answers to its methods; others are 405, unknown paths 404, and reload is off unless enabled."""
    daemon.scrape()
    answer = daemon.request(path, method)
    assert answer.status == status
    assert answer.headers["content-type"]
    if status == 405:
        assert answer.headers["allow"]


def test_the_page_links_to_the_metrics(daemon: Daemon) -> None:
    """The page at / is HTML that leads to the metrics."""
    answer = daemon.request("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert b'href="./metrics"' in answer.body


def _talk(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(data)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
            if b"\r\n\r\n" in answer:
                break
        return answer


HEAD = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("data", "statuses"),
    [
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", (400, 414)),
        (b"GET /metrics?" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", (400, 414)),
        (b"GET /" + b"a" * 200_000, (400,)),
        (HEAD + b"X-Long: " + b"a" * 20_000 + b"\r\n\r\n", (400, 431)),
        (HEAD + b"X-A: bcdef\r\n" * 3_000 + b"\r\n", (400, 431)),
        (HEAD + b"X-A: bcdef\r\n" * 50_000, (400,)),
        (b"nonsense\r\n\r\n", (400,)),
        (b"GET /metrics HTTP/1.1\r\n\r\n", (400,)),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", (400,)),
    ],
)
def test_heads_past_the_limit_and_nonsense_are_refused(daemon: Daemon, data: bytes, statuses: tuple[int, ...]) -> None:
    """A request line or header past the limit, in one piece or in many, or no HTTP at all, is refused."""
    status = int(_talk(daemon.port, data).split(b" ")[1])
    assert status in statuses
    assert daemon.request("/-/healthy").status == 200


def test_a_client_that_closes_its_sending_side_gets_its_answer(daemon: Daemon) -> None:
    """A request followed by the end of what the client sends is answered."""
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=10) as connection:
        connection.sendall(HEAD + b"\r\n")
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(15) == b"HTTP/1.1 200 OK"


def test_silent_clients_cost_nobody_a_page(daemon: Daemon) -> None:
    """Beside forty silent connections a page still comes at once."""
    silent = [socket.create_connection(("127.0.0.1", daemon.port)) for _ in range(40)]
    try:
        assert daemon.scrape().seconds < 0.5
    finally:
        for connection in silent:
            connection.close()


def test_the_cap_on_connections_holds(daemon: Daemon) -> None:
    """Over the cap the clients that have been silent for longest are closed, and the newest is served."""
    held = [socket.create_connection(("127.0.0.1", daemon.port)) for _ in range(doors.MAX_CONNECTIONS)]
    try:
        time.sleep(0.5)
        assert daemon.request("/-/healthy").status == 200
        held[0].settimeout(5)
        assert held[0].recv(1) == b""
        held[-1].sendall(HEAD + b"\r\n")
        assert held[-1].recv(15) == b"HTTP/1.1 200 OK"
    finally:
        for connection in held:
            connection.close()


def test_a_head_that_never_ends_is_not_waited_for(daemon: Daemon) -> None:
    """A client that sends a byte now and then is cut off once its request's time is over."""
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=connections.HEAD_SECONDS + 5) as slow:
        started = time.monotonic()
        slow.sendall(b"GET /metrics HTTP/1.1\r\nX")
        time.sleep(connections.HEAD_SECONDS / 2)
        slow.sendall(b"-Y: ")
        assert slow.recv(1) == b""
        assert time.monotonic() - started < connections.HEAD_SECONDS + 2


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 8.0),
        ("10", 8.0),
        ("5", 4.5),
        ("1", 0.5),
        ("0.5", 0.25),
        ("0.01", 0.2),
        ("0", 8.0),
        ("-1", 8.0),
        ("nan", 8.0),
        ("inf", 8.0),
        ("soon", 8.0),
        ("", 8.0),
    ],
)
def test_the_deadline_is_the_scrapes_timeout_less_half_a_second(header: str | None, seconds: float) -> None:
    """A scrape's own timeout counts where it is shorter than the settings'; nonsense does not."""
    assert deadline(header, 8.0) == seconds


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":10420", ("", 10420)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:9", ("::1", 9)),
        ("gpu-host:1", ("gpu-host", 1)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    """An address is a host and a port; IPv6 stands in brackets."""
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "10420", "host:", "host:65536", "::1:80", "host:-1", "host:²"])
def test_bad_addresses(text: str) -> None:
    """What is no address is told with what was expected."""
    with pytest.raises(InputError, match="expected"):
        parse_address(text)


def test_listening_twice_on_one_port_is_told() -> None:
    """A port that is taken is a sentence, not a traceback."""
    (first,) = server.listen("127.0.0.1:0")
    with first, pytest.raises(CouldNot, match=r"cannot listen on 127\.0\.0\.1:"):
        server.listen(f"127.0.0.1:{first.getsockname()[1]}")


@pytest.mark.parametrize(
    ("header", "accepted"), [("", False), ("gzip", True), ("br, GZIP;q=0.5", True), ("gzip; q=0", False)]
)
def test_gzip_negotiation(header: str, accepted: bool) -> None:
    """Gzip is used only where the client allows it."""
    assert accepts_gzip(header) is accepted


def test_the_telemetry_path_can_be_moved(tmp_path: Path, nvml: FakeNvml) -> None:
    """The page is where the flag says, and no longer at /metrics; at / it takes the page's place."""
    with Daemon(tmp_path, nvml.environment(), None, ["--web.telemetry-path=/gpu"]) as moved:
        assert moved.request("/gpu").status == 200
        assert moved.request("/metrics").status == 404
        assert b'href="./gpu"' in moved.request("/").body
    with Daemon(tmp_path, nvml.environment(), None, ["--web.telemetry-path=/"]) as root:
        assert parse(root.request("/").body.decode()).of("gpu_info")
