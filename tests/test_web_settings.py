"""The web configuration: what is accepted, held against promtool, and the words of each complaint."""

from __future__ import annotations

import os
import shutil
import string
import subprocess
from pathlib import Path

import bcrypt
import pytest
import trustme

from exporter.errors import ConfigError
from exporter.web import front, settings
from tests.harness import PROGRAM, clean_environment, tool

HASH = bcrypt.hashpw(b"right", bcrypt.gensalt(4)).decode()
TLS = "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n"
MTLS = TLS + "  client_ca_file: ca.pem\n  client_auth_type: RequireAndVerifyClientCert\n"

GOOD = {
    "an empty file": "",
    "comments alone": "# nothing\n",
    "TLS": TLS,
    "an absolute path": "tls_server_config: {cert_file: @/server.pem, key_file: @/server.key}\n",
    "mutual TLS": MTLS,
    "a certificate if there is one": MTLS.replace("RequireAndVerify", "Verify").replace("Cert\n", "CertIfGiven\n"),
    "certificates asked for and not looked at": TLS + "  client_auth_type: RequestClientCert\n",
    "none asked for": TLS + "  client_auth_type: NoClientCert\n",
    "versions": TLS + "  min_version: TLS13\n  max_version: TLS13\n",
    "suites": TLS + "  cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, TLS_AES_128_GCM_SHA256]\n",
    "suites of TLS 1.3 alone": TLS + "  cipher_suites: [TLS_AES_128_GCM_SHA256]\n",
    "no suites": TLS + "  cipher_suites: []\n",
    "null": TLS + "  cipher_suites:\n  min_version:\n",
    "the client's order": TLS + "  prefer_server_cipher_suites: false\n",
    "a curve": TLS + "  curve_preferences: [CurveP384]\n",
    "headers": "http_server_config:\n  headers:\n    X-Frame-Options: deny\n    Strict-Transport-Security: max-age=9\n",
    "no HTTP/2": "http_server_config: {http2: false}\n",
    "accounts": f"basic_auth_users:\n  alice: {HASH}\n  'bob b': {HASH}\n  1001: {HASH}\n",
    "no accounts": "basic_auth_users:\n",
    "all": MTLS + f"basic_auth_users: {{alice: {HASH}}}\nhttp_server_config: {{http2: false}}\n",
}
BAD = {
    "no YAML": "tls_server_config: [",
    "an unknown key": "tls_server: {}\n",
    "an unknown key of TLS": TLS + "  cert: x\n  certificate: y\n",
    "a key twice": TLS + TLS,
    "no certificate": "tls_server_config: {key_file: server.key}\n",
    "no key": "tls_server_config: {cert_file: server.pem}\n",
    "a certificate that is not there": TLS.replace("server.pem", "absent.pem"),
    "a key that is not there": TLS.replace("server.key", "absent.key"),
    "another's key": TLS.replace("server.key", "other.key"),
    "text for a certificate": TLS.replace("server.pem", "text.pem"),
    "no authorities": TLS + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: absent.pem\n",
    "authorities for nothing": TLS + "  client_ca_file: ca.pem\n",
    "an unknown way of asking": TLS + "  client_auth_type: Please\n",
    "an unknown version": TLS + "  min_version: TLS14\n",
    "an unknown suite": TLS + "  cipher_suites: [TLS_NULL]\n",
    "an unsound suite": TLS + "  cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]\n",
    "an unknown curve": TLS + "  curve_preferences: [secp256k1]\n",
    "a header that may not be set": "http_server_config: {headers: {Server: x}}\n",
    "a header's wrong value": "http_server_config: {headers: {X-Frame-Options: allow}}\n",
    "a password that is not hashed": "basic_auth_users: {alice: secret}\n",
    "a hash of no kind": "basic_auth_users: {alice: $3y$10$" + 53 * "a" + "}\n",
    "a short hash": f"basic_auth_users: {{alice: {HASH[:40]}}}\n",
    "a list of accounts": f"basic_auth_users: [{HASH}]\n",
}
# What promtool takes, and this server refuses: why.
STRICTER = {
    "HTTP/2": ("http_server_config: {http2: true}\n", "HTTP/2 is not spoken here"),
    "any certificate": (TLS + "  client_auth_type: RequireAnyClientCert\n", "also one that anybody made"),
    "several curves": (TLS + "  curve_preferences: [X25519, CurveP256]\n", "cannot be put in order here"),
    "TLS 1.0": (TLS + "  min_version: TLS10\n", "is broken, and not spoken here"),
    "versions the wrong way round": (TLS + "  min_version: TLS13\n  max_version: TLS12\n", "expected at most the"),
    "no suite is left": (TLS + "  max_version: TLS12\n  cipher_suites: [TLS_AES_128_GCM_SHA256]\n", "one of TLS 1.2"),
    "keys alone in exchange": (
        TLS + "  cipher_suites: [TLS_RSA_WITH_AES_128_GCM_SHA256]\n",
        "unknown cipher suite",
    ),
    "no authorities to verify by": (TLS + "  client_auth_type: RequireAndVerifyClientCert\n", "needs client_ca_file"),
    "text for authorities": (MTLS.replace("ca.pem", "text.pem"), "text.pem: expected PEM that goes together"),
    "a costly hash": (f"basic_auth_users: {{alice: {HASH.replace('$04$', '$31$')}}}\n", "of a cost from 04 to 16"),
    "a hash with more behind it": (f"basic_auth_users: {{alice: {HASH}xyz}}\n", "a bcrypt hash"),
    "a name with a colon": (f"basic_auth_users: {{'a:b': {HASH}}}\n", "expected NAME: HASH, with a blank"),
    "a hash that no salt gives": (f"basic_auth_users: {{alice: {HASH[:28]}z{HASH[29:]}}}\n", "a bcrypt hash"),
    "YAML 1.1's truth": ("http_server_config: {http2: off}\n", "expected true or false"),
    "a merge key": ("http_server_config: {<<: {http2: false}}\n", "merge key"),
}
# What the exporter-toolkit has learned since Debian's promtool 2.42 was made.
NEWER = {
    "names of clients": MTLS + "  client_allowed_sans: [scraper.example]\n",
    "a rate": "rate_limit: {interval: 1m30.5s, burst: 20}\n",
}
NEWER_BAD = {
    "names for nothing": (TLS + "  client_allowed_sans: [a]\n", "goes with RequireAndVerifyClientCert alone"),
    "a rate without a unit": ("rate_limit: {interval: 5}\n", "expected a duration such as 100ms or 1m30s"),
    "a rate of nothing": ("rate_limit: {interval: 1s, burst: 0}\n", "from 1 to 1000000"),
    "a certificate twice": (TLS + "  cert: x\n", "expected cert_file or cert, found both"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates, keys, and a text that is neither."""
    made = tmp_path_factory.mktemp("web")
    authority = trustme.CA()
    for name in ("server", "other"):
        issued = authority.issue_cert("localhost")
        issued.cert_chain_pems[0].write_to_path(made / f"{name}.pem")
        issued.private_key_pem.write_to_path(made / f"{name}.key")
    authority.cert_pem.write_to_path(made / "ca.pem")
    (made / "text.pem").write_text("no certificate\n")
    return made


@pytest.fixture(scope="module")
def promtool() -> str:
    """The witness."""
    return tool("promtool", "prometheus")


def written(folder: Path, text: str) -> str:
    path = folder / "web.yaml"
    path.write_text(text.replace("@/", f"{folder}/"), encoding="utf-8")
    return str(path)


def refusal(path: str) -> str:
    with pytest.raises(ConfigError) as raised:
        front.check(path)
    return str(raised.value)


def accepts(promtool: str, path: str) -> bool:
    return subprocess.run([promtool, "check", "web-config", path], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
def test_what_is_accepted(folder: Path, promtool: str, text: str) -> None:
    path = written(folder, text)
    assert accepts(promtool, path)
    front.check(path)


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_what_is_refused(folder: Path, promtool: str, text: str) -> None:
    path = written(folder, text)
    assert not accepts(promtool, path)
    assert refusal(path).startswith(f"{path}:")


@pytest.mark.parametrize(("text", "words"), STRICTER.values(), ids=STRICTER)
def test_what_cannot_be_honoured_is_refused(folder: Path, promtool: str, text: str, words: str) -> None:
    path = written(folder, text)
    assert accepts(promtool, path)
    assert words in refusal(path)


@pytest.mark.parametrize("text", NEWER.values(), ids=NEWER)
def test_what_is_newer_than_promtool(folder: Path, promtool: str, text: str) -> None:
    path = written(folder, text)
    assert not accepts(promtool, path)
    front.check(path)


@pytest.mark.parametrize(("text", "words"), NEWER_BAD.values(), ids=NEWER_BAD)
def test_what_is_newer_and_wrong(folder: Path, text: str, words: str) -> None:
    assert words in refusal(written(folder, text))


@pytest.mark.parametrize("curve", settings.CURVES)
def test_every_curve(folder: Path, curve: str) -> None:
    front.check(written(folder, f"{TLS}  curve_preferences: [{curve}]\n"))


@pytest.mark.parametrize("suite", settings.CIPHER_SUITES)
def test_every_suite(folder: Path, promtool: str, suite: str) -> None:
    path = written(folder, f"{TLS}  cipher_suites: [{suite}]\n")
    assert accepts(promtool, path)
    front.check(path)


@pytest.mark.parametrize(
    ("interval", "seconds"), [("0", 0), ("100ms", 0.1), ("1m30.5s", 90.5), ("2h", 7200), (".5s", 0.5), ("7µs", 7e-6)]
)
def test_durations(folder: Path, interval: str, seconds: float) -> None:
    found = settings.load(written(folder, f"rate_limit: {{interval: {interval}}}\n"))
    assert found.rate_limit.interval_seconds == pytest.approx(seconds)


def test_certificates_in_place(folder: Path) -> None:
    """Certificate, key and authorities as text; the key is in no complaint."""
    pem = {name: (folder / name).read_text() for name in ("server.pem", "server.key", "ca.pem", "other.key")}
    block = {name: "|\n" + "".join(f"    {line}\n" for line in text.splitlines()) for name, text in pem.items()}
    text = f"tls_server_config:\n  cert: {block['server.pem']}  key: {block['server.key']}"
    clients = f"  client_ca: {block['ca.pem']}  client_auth_type: RequireAndVerifyClientCert\n"
    front.check(written(folder, text + clients))
    said = refusal(written(folder, text.replace(block["server.key"], block["other.key"])))
    assert "expected PEM that goes together, found: key values mismatch" in said
    assert not any(line in said for line in pem["other.key"].splitlines())


def test_no_complaint_repeats_a_secret(folder: Path) -> None:
    hidden = HASH.rpartition("$")[2][:10]
    for text in (
        "basic_auth_users: {a: hunter2-hunter2}",
        "basic_auth_users: {a: [hunter2]}",
        "basic_auth_users: hunter2",
        "basic_auth_users: [hunter2]",
        "basic_auth_users: {a:hunter2}",
        "basic_auth_users:\n  a: *hunter2",
        "basic_auth_users:\n  a: !hunter2 x",
        "hunter2",
        f"basic_auth_users: '{HASH}'",
        f"basic_auth_users: {{'{HASH}': a}}",
        f"basic_auth_users: {{a:{HASH}}}",
        f"basic_auth_users:\n  - a: {HASH}",
        HASH,
        f"'{HASH}': a",
        TLS.replace("key_file: server.key", "key: hunter2"),
    ):
        said = refusal(written(folder, text + "\n"))
        assert "hunter2" not in said, text
        assert hidden not in said, text


def test_every_hash_that_is_taken_can_be_checked(folder: Path) -> None:
    """Of the last character of a salt only four are a salt's."""
    for last in string.ascii_letters + string.digits + "./":
        hashed = f"{HASH[:28]}{last}{HASH[29:]}"
        try:
            settings.load(written(folder, f"basic_auth_users: {{a: {hashed}}}\n"))
            taken = True
        except ConfigError:
            taken = False
        try:
            bcrypt.checkpw(b"right", hashed.encode())
            checked = True
        except ValueError:
            checked = False
        assert taken == checked, last


def test_a_key_that_may_not_be_read(folder: Path) -> None:
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.fail("root reads every file, and there is no setpriv to be somebody else")
    (folder / "server.key").chmod(0o000)
    folder.chmod(0o755)
    path = written(folder, TLS)
    another = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    for above in folder.parents[:-1]:
        if not os.access(above, os.X_OK) or above.stat().st_mode & 0o001 == 0:
            above.chmod(above.stat().st_mode | 0o011)
    result = subprocess.run(
        [*another, *PROGRAM, "check-config", f"--web.config.file={path}"],
        env=clean_environment({"PYTHONDONTWRITEBYTECODE": "1"}),
        capture_output=True,
        text=True,
        check=False,
    )
    (folder / "server.key").chmod(0o600)
    assert (result.returncode, result.stdout) == (2, "")
    assert f"{folder}/server.key: cannot be read: Permission denied" in result.stderr


def test_check_config(folder: Path) -> None:
    """The command takes either file, or both, and says which is wrong."""
    web, empty = written(folder, MTLS), folder / "config.yaml"
    empty.write_text("")

    def said(*arguments: str) -> tuple[int, str, str]:
        command = [*PROGRAM, "check-config", *arguments]
        result = subprocess.run(command, env=clean_environment({}), capture_output=True, text=True, check=False)
        return result.returncode, result.stdout, result.stderr

    assert said(f"--web.config.file={web}") == (0, f"{web}: valid web configuration\n", "")
    assert said(str(empty), f"--web.config.file={web}")[:2] == (
        0,
        f"{empty}: valid, 0 fleets\n{web}: valid web configuration\n",
    )
    assert said()[0] == 2
    status, _, complaint = said(f"--web.config.file={written(folder, 'tls_server_config: {}')}")
    assert (status, complaint.splitlines()[0].partition(": ")[2]) == (
        2,
        f"{web}:1: tls_server_config.cert_file: expected cert_file or cert, found neither",
    )
