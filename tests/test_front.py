"""The front door of the real daemon: TLS, certificates of clients, accounts, headers, and limits."""

from __future__ import annotations

import contextlib
import datetime
import http.client
import socket
import ssl
import statistics
import subprocess
import threading
import time
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bcrypt
import pytest
import trustme

from exporter.web import accounts, doors
from tests.fakes.nvml import FakeNvml, equal_cards
from tests.harness import Daemon, Prometheus, Start, Target, run, tool

pytestmark = pytest.mark.e2e

SIMULATED = "backends: [simulated]\nfleets: [{name: host, runtime: host}]\n"
SERVER = "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n"
CLIENTS = SERVER + "  client_ca_file: clients.pem\n  client_auth_type: RequireAndVerifyClientCert\n"
NAMED = "  client_allowed_sans: [scraper.example]\n"
HEADERS = "http_server_config: {headers: {X-Frame-Options: deny, Strict-Transport-Security: max-age=60}}\n"
MEDIAN_SECONDS = 0.25


def account(name: str, password: str) -> str:
    return f"basic_auth_users: {{{name}: {bcrypt.hashpw(password.encode(), bcrypt.gensalt(4)).decode()}}}\n"


ALICE = account("alice", "right")


class Papers:
    """A folder with the certificates of a server and of clients, and web configurations that name them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.servers, self.clients, self.strangers = trustme.CA(), trustme.CA(), trustme.CA()
        self.servers.cert_pem.write_to_path(folder / "servers.pem")
        self.clients.cert_pem.write_to_path(folder / "clients.pem")
        self.issue("server")
        self.write("client", self.clients.issue_cert("scraper.example"))
        self.write("other", self.clients.issue_cert("other.example"))
        self.write("stranger", self.strangers.issue_cert("scraper.example"))
        yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
        self.write("expired", self.clients.issue_cert("scraper.example", not_after=yesterday))

    def write(self, name: str, issued: trustme.LeafCert) -> None:
        """Writes a certificate and its key."""
        issued.cert_chain_pems[0].write_to_path(self.folder / f"{name}.pem")
        issued.private_key_pem.write_to_path(self.folder / f"{name}.key")

    def issue(self, name: str) -> None:
        """Writes a new certificate of a server."""
        self.write(name, self.servers.issue_cert("localhost", "127.0.0.1"))

    def config(self, text: str) -> str:
        """The flag that names a web configuration of this text."""
        path = self.folder / "web.yaml"
        path.write_text(text, encoding="utf-8")
        return f"--web.config.file={path}"

    def trust(self, name: str = "") -> ssl.SSLContext:
        """What a client goes by that shows this certificate."""
        context = ssl.create_default_context(cafile=str(self.folder / "servers.pem"))
        if name:
            context.load_cert_chain(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        return context

    def curl(self, daemon: Daemon, *arguments: str, path: str = "/metrics") -> subprocess.CompletedProcess[str]:
        """The answer with its head."""
        url = f"https://127.0.0.1:{daemon.port}{path}"
        command = [tool("curl", "curl"), "-sSi", "--max-time", "20", "--cacert", str(self.folder / "servers.pem")]
        command += [*arguments, url]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def shown(self, name: str) -> tuple[str, ...]:
        """Arguments of curl to show this certificate."""
        return "--cert", str(self.folder / f"{name}.pem"), "--key", str(self.folder / f"{name}.key")


@pytest.fixture
def papers(tmp_path: Path) -> Papers:
    folder = tmp_path / "web"
    folder.mkdir()
    return Papers(folder)


def ask(
    daemon: Daemon, trust: ssl.SSLContext | None, path: str = "/metrics", basic: str = ""
) -> tuple[int, dict[str, str], str]:
    """One request over a connection of its own."""
    connection: http.client.HTTPConnection
    if trust is None:
        connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=20)
    else:
        connection = http.client.HTTPSConnection("127.0.0.1", daemon.port, timeout=20, context=trust)
    with contextlib.closing(connection):
        return answered(connection, path, basic)


def answered(
    connection: http.client.HTTPConnection, path: str = "/metrics", basic: str = ""
) -> tuple[int, dict[str, str], str]:
    headers = {"Authorization": "Basic " + b64encode(basic.encode()).decode()} if basic else {}
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()


def until_true(holds: Callable[[], bool], within: float = 10.0) -> None:
    until = time.monotonic() + within
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_curl_over_tls(papers: Papers, start: Start) -> None:
    """The page comes over TLS, with the headers that were asked for; the log names the scheme."""
    daemon = start({}, SIMULATED, [papers.config(SERVER + HEADERS)])
    answer = papers.curl(daemon)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("HTTP/1.1 200 OK")
    assert "x-frame-options: deny" in answer.stdout.lower()
    assert "strict-transport-security: max-age=60" in answer.stdout.lower()
    assert "\ngpu_utilization_percent{" in answer.stdout
    assert f"url=https://127.0.0.1:{daemon.port}/" in daemon.log


def test_plain_http_on_the_tls_port(papers: Papers, start: Start) -> None:
    daemon = start({}, SIMULATED, [papers.config(SERVER)])
    status, _, body = ask(daemon, None)
    assert (status, body) == (400, "Client sent an HTTP request to an HTTPS server.\n")
    assert papers.curl(daemon).returncode == 0


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        ("", "certificate required"),
        ("stranger", "unknown ca"),
        ("expired", "certificate expired"),
    ],
)
def test_clients_whose_certificate_is_wrong(papers: Papers, start: Start, shown: str, said: str) -> None:
    """They get the alert that says why, and no answer; the daemon serves on."""
    daemon = start({}, SIMULATED, [papers.config(CLIENTS)])
    refused = papers.curl(daemon, *(papers.shown(shown) if shown else ()))
    assert (refused.returncode != 0, refused.stdout) == (True, "")
    assert said in refused.stderr.lower()
    answer = papers.curl(daemon, *papers.shown("client"))
    assert answer.stdout.startswith("HTTP/1.1 200 OK"), answer.stderr


def test_names_of_clients(papers: Papers, start: Start) -> None:
    """Of those whose certificate is right only the listed ones are answered."""
    daemon = start({}, SIMULATED, [papers.config(CLIENTS + NAMED + HEADERS)])
    assert papers.curl(daemon, *papers.shown("client")).stdout.startswith("HTTP/1.1 200 OK")
    refused = papers.curl(daemon, *papers.shown("other"))
    assert refused.stdout.startswith("HTTP/1.1 403 Forbidden")
    assert "x-frame-options: deny" in refused.stdout.lower()
    assert "gpu_" not in refused.stdout


def test_a_certificate_that_need_not_be(papers: Papers, start: Start) -> None:
    """With VerifyClientCertIfGiven none is well, a wrong one is not."""
    text = CLIENTS.replace("RequireAndVerifyClientCert", "VerifyClientCertIfGiven")
    daemon = start({}, SIMULATED, [papers.config(text)])
    assert papers.curl(daemon).stdout.startswith("HTTP/1.1 200 OK")
    assert papers.curl(daemon, *papers.shown("stranger")).returncode != 0


def test_versions_of_tls(papers: Papers, start: Start) -> None:
    daemon = start({}, SIMULATED, [papers.config(SERVER + "  min_version: TLS13\n")])
    old = papers.trust()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        ask(daemon, old)
    assert ask(daemon, papers.trust())[0] == 200


@pytest.mark.parametrize("path", ["/metrics", "/", "/-/healthy", "/-/ready", "/nothing"])
def test_accounts(papers: Papers, start: Start, path: str) -> None:
    """Every path asks for an account; a refusal says how, and has nothing of the page."""
    daemon = start({}, SIMULATED, [papers.config(ALICE + HEADERS)])
    for basic in ("", "alice:wrong", "bob:right", "alice:", ":right", "alice", "alice:right\0", "Alice:right"):
        status, headers, body = ask(daemon, None, path, basic)
        assert (status, body) == (401, "Unauthorized\n")
        assert headers["www-authenticate"].startswith("Basic")
        assert headers["x-frame-options"] == "deny"
    until_true(lambda: ask(daemon, None, "/-/ready", "alice:right")[0] == 200)
    assert ask(daemon, None, path, "alice:right")[0] == (404 if path == "/nothing" else 200)


@pytest.mark.parametrize(
    "header", ["Basic", "Basic !", "Bearer x", "Basic YWxpY2U6cmlnaHQ=, Basic x", "basic\tx", "Basic " + "A" * 9000]
)
def test_authorizations_that_are_none(papers: Papers, start: Start, header: str) -> None:
    daemon = start({}, SIMULATED, [papers.config(ALICE)])
    assert daemon.request("/metrics", headers={"Authorization": header}).status == 401


def test_prometheus_with_a_certificate_and_an_account(papers: Papers, start: Start, tmp_path: Path) -> None:
    """The real one scrapes with both, and says why it is refused with the wrong password."""
    program = tool("prometheus")
    daemon = start({}, SIMULATED, [papers.config(CLIENTS + ALICE)])
    folder = papers.folder
    more = {
        "scheme": "https",
        "tls_config": {
            "ca_file": str(folder / "servers.pem"),
            "cert_file": str(folder / "client.pem"),
            "key_file": str(folder / "client.key"),
        },
    }
    for known, up in ((True, "1"), (False, "0")):
        place = tmp_path / up
        place.mkdir()
        job = {**more, "basic_auth": {"username": "alice", "password": "right" if known else "wrong"}}
        with Prometheus(program, place, Target(f"127.0.0.1:{daemon.port}"), more=job) as prometheus:
            (result,) = prometheus.wait_for("up")
            assert result["value"][1] == up
            if known:
                assert len(prometheus.wait_for("gpu_utilization_percent")) > 0
            else:
                (target,) = prometheus.ask("targets")["activeTargets"]
                assert "401" in target["lastError"]


def certificate_of(daemon: Daemon, papers: Papers) -> bytes:
    """The one that a new connection is shown."""
    with (
        socket.create_connection(("127.0.0.1", daemon.port), timeout=10) as plain,
        papers.trust().wrap_socket(plain, server_hostname="127.0.0.1") as encrypted,
    ):
        return encrypted.getpeercert(binary_form=True) or b""


def test_a_certificate_is_renewed(papers: Papers, start: Start) -> None:
    """As certbot and Kubernetes do it, by another link. Kept connections go on; what is bad changes nothing."""
    folder = papers.folder
    for name in ("first", "second"):
        (folder / name).mkdir()
        papers.write(f"{name}/server", papers.servers.issue_cert("localhost", "127.0.0.1"))
    (folder / "live").symlink_to("first")
    text = "tls_server_config: {cert_file: live/server.pem, key_file: live/server.key}\n"
    daemon = start({}, SIMULATED, [papers.config(text)])
    kept = http.client.HTTPSConnection("127.0.0.1", daemon.port, timeout=20, context=papers.trust())
    assert answered(kept)[0] == 200
    held, before = kept.sock, certificate_of(daemon, papers)

    def link(name: str) -> None:
        (folder / "new").symlink_to(name)
        (folder / "new").replace(folder / "live")

    link("second")
    until_true(lambda: certificate_of(daemon, papers) != before)
    after = certificate_of(daemon, papers)
    link("nowhere")
    daemon.wait_for_log('msg="web configuration not loaded, the earlier one holds"')
    assert certificate_of(daemon, papers) == after
    time.sleep(2.5)
    assert daemon.log.count("web configuration not loaded") == 1
    link("first")
    until_true(lambda: certificate_of(daemon, papers) == before)
    assert answered(kept)[0] == 200
    assert kept.sock is held
    kept.close()


def test_accounts_are_followed(papers: Papers, start: Start) -> None:
    """Whoever is taken off is refused within moments, on a kept connection too; a bad file changes nothing."""
    daemon = start({}, SIMULATED, [papers.config(ALICE)])
    kept = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=20)
    assert answered(kept, basic="alice:right")[0] == 200
    held = kept.sock
    papers.config("basic_auth_users: {alice: right}\n")
    daemon.wait_for_log("web configuration not loaded.*basic_auth_users.alice: expected a bcrypt hash")
    assert answered(kept, basic="alice:right")[0] == 200
    papers.config(account("bob", "builder"))
    until_true(lambda: answered(kept, basic="alice:right")[0] == 401)
    assert answered(kept, basic="bob:builder")[0] == 200
    assert kept.sock is held
    kept.close()


@pytest.mark.parametrize("text", ["", "# nothing\n", "basic_auth_users:\n", SERVER, CLIENTS, CLIENTS + NAMED])
def test_no_file_takes_protection_away_while_running(papers: Papers, start: Start, text: str) -> None:
    """Emptied, cut off or changed: who had to show something has to show it still, until the daemon is restarted."""
    flag = papers.config(CLIENTS + NAMED + ALICE)
    daemon = start({}, SIMULATED, [flag])
    papers.config(text)
    daemon.wait_for_log("web configuration not loaded.*expected .* as before, found none")
    shown = papers.shown("client")
    assert papers.curl(daemon).returncode != 0
    assert papers.curl(daemon, *shown).stdout.startswith("HTTP/1.1 401")
    assert papers.curl(daemon, *shown, "-u", "alice:right").stdout.startswith("HTTP/1.1 200")
    assert papers.curl(daemon, *papers.shown("other"), "-u", "alice:right").stdout.startswith("HTTP/1.1 403")
    daemon.stop()
    start({}, SIMULATED, [flag])


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (CLIENTS + ALICE, "client_allowed_sans"),
        (SERVER + ALICE, "certificates of clients"),
        (ALICE, "TLS"),
        (CLIENTS + NAMED, "accounts"),
    ],
    ids=["names", "certificates", "tls", "accounts"],
)
def test_what_is_missing_is_named(papers: Papers, start: Start, text: str, lost: str) -> None:
    daemon = start({}, SIMULATED, [papers.config(CLIENTS + NAMED + ALICE)])
    papers.config(text)
    daemon.wait_for_log(f"web configuration not loaded.*expected {lost} as before, found none")


def test_tls_begins_while_running(papers: Papers, start: Start) -> None:
    daemon = start({}, SIMULATED, [papers.config("")])
    kept = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=20)
    assert "connection" not in answered(kept)[1]
    papers.config(SERVER)
    until_true(lambda: ask(daemon, None)[0] == 400)
    assert ask(daemon, papers.trust())[0] == 200
    assert answered(kept)[1]["connection"] == "close"
    assert answered(kept)[0] == 400
    kept.close()


def test_authorities_are_followed(papers: Papers, start: Start) -> None:
    """Whom new authorities do not know gets one more answer on a connection that was kept, and no other."""
    daemon = start({}, SIMULATED, [papers.config(CLIENTS)])
    kept = http.client.HTTPSConnection("127.0.0.1", daemon.port, timeout=20, context=papers.trust("client"))
    assert "connection" not in answered(kept)[1]
    papers.strangers.cert_pem.write_to_path(papers.folder / "clients.pem")
    until_true(lambda: papers.curl(daemon, *papers.shown("stranger")).returncode == 0)
    assert answered(kept)[1]["connection"] == "close"
    with pytest.raises(ssl.SSLError):
        answered(kept)
    kept.close()


def test_a_bad_file_at_the_start(papers: Papers) -> None:
    """The daemon does not start open where it was to be closed."""
    flag = papers.config(SERVER.replace("server.pem", "absent.pem"))
    result = run("serve", "--web.listen-address=127.0.0.1:0", flag)
    assert result.returncode == 2
    assert f"{papers.folder}/absent.pem: cannot be read: No such file or directory" in result.stderr
    assert run("serve", "--web.config.file=/nonexistent/web.yaml").returncode == 2


def test_a_rate(papers: Papers, start: Start) -> None:
    """As many at once as the burst, then one an interval."""
    daemon = start({}, SIMULATED, [papers.config("rate_limit: {interval: 1h, burst: 3}\n")])
    found = [ask(daemon, None, "/-/healthy")[0] for _ in range(5)]
    assert found == [200, 200, 200, 429, 429]
    papers.config("rate_limit: {interval: 100ms, burst: 1}\n")
    until_true(lambda: ask(daemon, None, "/-/healthy")[0] == 200)


def test_requests_at_once(nvml: FakeNvml, start: Start) -> None:
    """More scrapes than allowed are refused, and only scrapes."""
    nvml.write(equal_cards(2), lines=["hang nvmlDeviceGetTemperatureV 0"])
    config = (
        "backends: [nvidia]\nsampling: {reuse_seconds: 0, deadline_seconds: 3}\nfleets: [{name: h, runtime: host}]\n"
    )
    daemon = start(nvml.environment(), config, ["--web.max-requests=2"])
    nvml.write(equal_cards(2))
    daemon.scrape_until(lambda scrape: scrape.state(physical_index="0") == "ok")
    nvml.write(equal_cards(2), lines=["hang nvmlDeviceGetTemperatureV 0"])
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(daemon.request, "/metrics") for _ in range(6)]
        time.sleep(0.5)
        assert daemon.request("/-/healthy").status == 200
        found = sorted(each.result().status for each in waiting)
    assert found == [200, 200, 503, 503, 503, 503]
    assert daemon.request("/metrics").status == 200
    assert run("--web.max-requests=-1").returncode == 2


def test_guessing_holds_up_nobody(papers: Papers, start: Start) -> None:
    """Passwords are hashed one after the other beside the pages; who is known is not hashed for again."""
    dear = bcrypt.hashpw(b"right", bcrypt.gensalt(10)).decode()
    daemon = start({}, SIMULATED, [papers.config(f"basic_auth_users: {{alice: {dear}}}\n")])
    assert ask(daemon, None, basic="alice:right")[0] == 200
    ended, found = threading.Event(), []

    def guess(name: str) -> None:
        while not ended.is_set():
            found.append(ask(daemon, None, basic=f"{name}:guess")[0])

    with ThreadPoolExecutor(accounts.MOST_WAITING + 8) as pool:
        for place in range(accounts.MOST_WAITING + 8):
            pool.submit(guess, "alice" if place % 2 else f"user{place}")
        time.sleep(0.5)
        seconds = []
        for _ in range(20):
            began = time.monotonic()
            assert ask(daemon, None, basic="alice:right")[0] == 200
            seconds.append(time.monotonic() - began)
        ended.set()
    assert set(found) == {401, 429}
    assert statistics.median(seconds) < MEDIAN_SECONDS


def test_silent_clients_of_tls(papers: Papers, start: Start) -> None:
    """500 that never begin their handshake, and as many that stop within it, cost those that scrape nothing."""
    daemon = start({}, SIMULATED, [papers.config(SERVER)])
    trust = papers.trust()
    hello = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        trust.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="127.0.0.1").do_handshake()
    begun = hello.read()
    assert ask(daemon, trust)[0] == 200
    for said in (b"", begun[:20], begun):
        with contextlib.ExitStack() as stack:
            for _ in range(500):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", daemon.port), timeout=20))
                with contextlib.suppress(OSError):
                    client.sendall(said)
            seconds = []
            for _ in range(20):
                began = time.monotonic()
                assert ask(daemon, trust)[0] == 200
                seconds.append(time.monotonic() - began)
            status = Path(f"/proc/{daemon.process.pid}/status").read_text()
            resident = int(status.partition("VmHWM:")[2].split()[0]) / 1024
            print(f"{len(said)} bytes: p50 {1000 * statistics.median(seconds):.1f} ms, peak {resident:.1f} MiB")
            assert statistics.median(seconds) < MEDIAN_SECONDS
            assert resident < 80
    assert "Traceback" not in daemon.log


def test_no_more_connections_than_places(papers: Papers, start: Start) -> None:
    """With TLS there are fewer places, since each costs more."""
    daemon = start({}, SIMULATED, [papers.config(SERVER)])
    trust = papers.trust()
    with contextlib.ExitStack() as stack:
        for _ in range(doors.MAX_TLS_CONNECTIONS + 20):
            kept = http.client.HTTPSConnection("127.0.0.1", daemon.port, timeout=20, context=trust)
            stack.enter_context(contextlib.closing(kept))
            assert answered(kept, "/-/healthy")[0] == 200
        inside = len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir()))
        assert inside < doors.MAX_TLS_CONNECTIONS + 30
        assert ask(daemon, trust)[0] == 200
