"""The file of ``--web.config.file``: TLS, headers, accounts and a rate, in the format of Prometheus's exporter-toolkit.

What the format has and this server cannot do is refused with a sentence, never ignored. Paths are relative to the
file's folder. Hashes and keys are never repeated in a complaint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import yaml
from msgspec import Meta

from exporter.errors import ConfigError
from exporter.yaml_nodes import compose, is_null, quoted, read
from exporter.yaml_structs import Reader

# Go's names of the suites that it holds to be sound, and OpenSSL's. Those of TLS 1.3 are all on whatever is listed.
CIPHER_SUITES: dict[str, str] = {
    "TLS_AES_128_GCM_SHA256": "",
    "TLS_AES_256_GCM_SHA384": "",
    "TLS_CHACHA20_POLY1305_SHA256": "",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
}
CURVES = ("CurveP256", "CurveP384", "CurveP521", "X25519")
VERSIONS = ("TLS10", "TLS11", "TLS12", "TLS13")
VERIFYING = ("VerifyClientCertIfGiven", "RequireAndVerifyClientCert")
CLIENT_AUTH = ("NoClientCert", "RequestClientCert", "RequireAnyClientCert", "RequireClientCert", *VERIFYING)
# What may be set, and the values that each may have where there are only some.
HEADERS: dict[str, Sequence[str]] = {
    "Content-Security-Policy": (),
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
}
_NAMES = {
    "cipher suite": list(CIPHER_SUITES),
    "curve": list(CURVES),
    "TLS version": list(VERSIONS),
    "way of asking for certificates": list(CLIENT_AUTH),
    "header": list(HEADERS),
}
# More than 2^16 rounds keep whoever logs in, and all behind him, waiting for many seconds.
_MOST_ROUNDS = 16
_HASHED = re.compile(r"\$2[abxy]?\$[^\s]*")

_Suite = Annotated[str, Meta(extra={"names": "cipher suite"})]
_Curve = Annotated[str, Meta(extra={"names": "curve"})]
_Version = Annotated[str, Meta(extra={"names": "TLS version"})]
_ClientAuth = Annotated[str, Meta(extra={"names": "way of asking for certificates"})]
_Header = Annotated[str, Meta(extra={"names": "header", "mapping": "a mapping of headers to texts"})]
_Hash = Annotated[
    str,
    Meta(
        pattern=rf"\A\$2[abxy]\$(?:0[4-9]|1[0-{_MOST_ROUNDS % 10}])\$[./A-Za-z0-9]{{21}}[.Oeu][./A-Za-z0-9]{{31}}\Z",
        description=f"a bcrypt hash ($2y$10$...) of a cost from 04 to {_MOST_ROUNDS}",
        extra={"secret": True},
    ),
]
_Secret = Annotated[str, Meta(extra={"secret": True})]
_Switch = Annotated[bool, Meta(description="true or false")]
_DURATION = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:ns|us|µs|ms|s|m|h)"
_Duration = Annotated[
    str,
    Meta(
        pattern=rf"\A(?:0|(?:{_DURATION}){{1,8}})\Z",
        description="a duration such as 100ms or 1m30s",
        extra={"as written": True},
    ),
]
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class TlsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the server shows itself, and whom it asks for a certificate. Each of certificate, key and authorities is a
    file or text in place (PEM), not both.
    """

    cert_file: str = ""
    cert: str = ""
    key_file: str = ""
    key: _Secret = ""
    client_ca_file: str = ""
    client_ca: str = ""
    client_auth_type: _ClientAuth = "NoClientCert"
    client_allowed_sans: tuple[str, ...] = ()
    min_version: _Version = "TLS12"
    max_version: _Version = "TLS13"
    cipher_suites: tuple[_Suite, ...] = ()
    curve_preferences: tuple[_Curve, ...] = ()
    prefer_server_cipher_suites: _Switch = True


class HttpSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``headers`` are added to every answer. HTTP/2 is not spoken here: clients then use HTTP/1.1."""

    http2: _Switch = False
    headers: dict[_Header, str] = msgspec.field(default_factory=dict)


class RateSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request an ``interval``, and ``burst`` at once after a pause; an interval of 0 sets no limit."""

    interval: _Duration = "0"
    burst: Annotated[int, Meta(ge=1, le=1_000_000)] = 1

    @property
    def interval_seconds(self) -> float:
        """The interval as a number."""
        found = re.findall(r"([0-9.]+)([a-zµ]+)", self.interval)
        return sum(float(number) * _SECONDS[unit] for number, unit in found)


class WebSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file. ``tls_server_config`` None: plain HTTP; without ``basic_auth_users`` anybody is answered."""

    tls_server_config: TlsSettings | None = None
    http_server_config: HttpSettings = HttpSettings()
    basic_auth_users: dict[str, _Hash] = msgspec.field(default_factory=dict)
    rate_limit: RateSettings = RateSettings()

    @property
    def files(self) -> tuple[str, ...]:
        """The files that it names."""
        tls = self.tls_server_config
        named = (tls.cert_file, tls.key_file, tls.client_ca_file) if tls is not None else ()
        return tuple(path for path in named if path)


def load(path: str) -> WebSettings:
    """The settings of a file; raises :class:`ConfigError`. Whether its certificates are sound is not looked at here."""
    root = _composed(path)
    if root is None or is_null(root):
        return WebSettings()
    settings = msgspec.convert(_Reader(path, _NAMES).value(root, WebSettings, ""), WebSettings)
    tls = settings.tls_server_config
    if tls is None:
        return settings
    folder = Path(path).parent
    placed = {
        name: str(folder / value)
        for name in ("cert_file", "key_file", "client_ca_file")
        if (value := getattr(tls, name))
    }
    return msgspec.structs.replace(settings, tls_server_config=msgspec.structs.replace(tls, **placed))


def _composed(path: str) -> yaml.Node | None:
    """YAML's own complaints quote what they stop at, which may be a password that begins with ``*`` or ``!``."""
    try:
        return compose(read(path, "web configuration"), path)
    except ConfigError as error:
        raise ConfigError(path, re.sub(r"'[^\n]*'", "...", error.message), error.line, error.key) from None


def weaker(before: WebSettings, after: WebSettings) -> str:
    """What protects the first and not the second; empty where nothing is missing. A file that is being written, or was
    cut off by a full disk, says less than is meant.
    """
    kept = dict(_protections(after))
    return next((name for name, there in _protections(before) if there and not kept[name]), "")


def _protections(settings: WebSettings) -> Iterator[tuple[str, bool]]:
    tls = settings.tls_server_config
    yield "TLS", tls is not None
    yield "accounts", bool(settings.basic_auth_users)
    yield "certificates of clients", tls is not None and tls.client_auth_type == VERIFYING[1]
    yield "client_allowed_sans", tls is not None and bool(tls.client_allowed_sans)


class _Reader(Reader):
    """What the format allows beyond the settings file, and what its types cannot say."""

    def left_out(self, node: yaml.Node, key: str) -> bool:
        """Go reads null as the zero value everywhere, and an empty list as none."""
        return is_null(node) or (isinstance(node, yaml.SequenceNode) and not node.value)

    def fail(self, node: yaml.Node, key: str, message: str) -> NoReturn:
        """Of what stands where accounts do, or in place of the whole file, nothing is repeated but simple names."""
        if not key or key.startswith("basic_auth_users"):
            message = message.partition(", found ")[0]
            key = "basic_auth_users" if {"'", '"'} & set(key) else key
        super().fail(node, _HASHED.sub("...", key), _HASHED.sub("...", message))

    def key_text(self, node: yaml.ScalarNode) -> object:
        """An account may be a number."""
        return None if is_null(node) else node.value

    def check_struct(self, struct: Any, node: yaml.Node, data: dict[str, Any], key: str) -> None:
        """What goes together, and what this server cannot do."""
        nodes = {key_node.value: value for key_node, value in node.value}
        if struct is TlsSettings:
            self._check_certificates(node, data, key)
            self._check_clients(nodes, node, data, key)
            self._check_encryption(nodes, data, key)
        elif struct is HttpSettings:
            self._check_http(nodes, data, key)
        elif struct is WebSettings:
            self._check_accounts(nodes, data)

    def _check_certificates(self, node: yaml.Node, data: dict[str, Any], key: str) -> None:
        for what in ("cert", "key", "client_ca"):
            given = [name for name in (what, f"{what}_file") if data.get(name)]
            if len(given) > 1:
                self.fail(node, f"{key}.{what}_file", f"expected {what}_file or {what}, found both")
            if not given and what != "client_ca":
                self.fail(node, f"{key}.{what}_file", f"expected {what}_file or {what}, found neither")

    def _check_clients(self, nodes: dict[str, yaml.Node], node: yaml.Node, data: dict[str, Any], key: str) -> None:
        how = data.get("client_auth_type", "NoClientCert")
        place, at = nodes.get("client_auth_type", node), f"{key}.client_auth_type"
        if how in ("RequireAnyClientCert", "RequireClientCert"):
            self.fail(place, at, f"{how} takes any certificate, also one that anybody made: expected {VERIFYING[1]}")
        if how in VERIFYING and not (data.get("client_ca_file") or data.get("client_ca")):
            self.fail(place, at, f"{how} needs client_ca_file or client_ca, found neither")
        if how == "NoClientCert" and (data.get("client_ca_file") or data.get("client_ca")):
            self.fail(place, at, f"found authorities of clients, whom nothing asks: expected {VERIFYING[1]}")
        if data.get("client_allowed_sans") and how != VERIFYING[1]:
            self.fail(nodes["client_allowed_sans"], f"{key}.client_allowed_sans", f"goes with {VERIFYING[1]} alone")

    def _check_encryption(self, nodes: dict[str, yaml.Node], data: dict[str, Any], key: str) -> None:
        least, most = data.get("min_version", "TLS12"), data.get("max_version", "TLS13")
        for name, version in (("min_version", least), ("max_version", most)):
            if version in ("TLS10", "TLS11"):
                self.fail(
                    nodes[name], f"{key}.{name}", f"{version} is broken, and not spoken here: expected TLS12 or TLS13"
                )
        if least > most:
            self.fail(
                nodes["min_version"], f"{key}.min_version", f"expected at most the max_version {most}, found {least}"
            )
        suites = data.get("cipher_suites", ())
        if suites and most == "TLS12" and not any(CIPHER_SUITES[suite] for suite in suites):
            self.fail(
                nodes["cipher_suites"], f"{key}.cipher_suites", "expected one of TLS 1.2, which is the newest allowed"
            )
        if len(data.get("curve_preferences", ())) > 1:
            words = "several curves cannot be put in order here: name one, or leave the key out for OpenSSL's own"
            self.fail(nodes["curve_preferences"], f"{key}.curve_preferences", words)

    def _check_http(self, nodes: dict[str, yaml.Node], data: dict[str, Any], key: str) -> None:
        if data.get("http2"):
            self.fail(nodes["http2"], f"{key}.http2", "HTTP/2 is not spoken here: expected false, or no such key")
        for name, value in data.get("headers", {}).items():
            place, at = nodes["headers"], f"{key}.headers.{name}"
            if HEADERS[name] and value not in HEADERS[name]:
                self.fail(place, at, f"expected {' or '.join(HEADERS[name])}, found {quoted(value)}")
            if not value.isascii() or not value.isprintable():
                self.fail(place, at, f"expected printable ASCII on one line, found {quoted(value)}")

    def _check_accounts(self, nodes: dict[str, yaml.Node], data: dict[str, Any]) -> None:
        for name in data.get("basic_auth_users", {}):
            if not name or ":" in name:
                place = nodes["basic_auth_users"]
                self.fail(place, "basic_auth_users", "expected NAME: HASH, with a blank, and no colon in the name")
