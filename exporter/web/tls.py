"""TLS: from settings to what OpenSSL serves by, and what a client is told when it cannot be served."""

from __future__ import annotations

import contextlib
import os
import re
import ssl
from collections.abc import Iterator

from exporter.errors import ConfigError
from exporter.web.settings import CIPHER_SUITES, TlsSettings

_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_CURVES = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}
_VERIFY = {
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}


def context(settings: TlsSettings, path: str) -> ssl.SSLContext:
    """What connections are encrypted by. ``path`` is the file to name in a :class:`ConfigError`."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.sslobject_class = _Telling
    made.minimum_version, made.maximum_version = _VERSIONS[settings.min_version], _VERSIONS[settings.max_version]
    made.set_alpn_protocols(["http/1.1"])
    if not settings.prefer_server_cipher_suites:
        made.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    _set_ciphers(made, settings)
    for name in ("cert_file", "key_file", "client_ca_file"):
        _check_readable(path, f"tls_server_config.{name}", getattr(settings, name))
    with (
        _complaints(path, "tls_server_config", settings.cert_file or "cert", settings.key_file or "key"),
        _as_file(settings.cert_file, settings.cert) as cert,
        _as_file(settings.key_file, settings.key) as key,
    ):
        made.load_cert_chain(cert, key, password=lambda: b"")  # or the password would be asked for at the terminal
    if settings.client_auth_type in _VERIFY:
        made.verify_mode = _VERIFY[settings.client_auth_type]
        with _complaints(path, "tls_server_config", settings.client_ca_file or "client_ca"):
            made.load_verify_locations(settings.client_ca_file or None, cadata=settings.client_ca or None)
    return made


def _set_ciphers(made: ssl.SSLContext, settings: TlsSettings) -> None:
    if settings.cipher_suites:
        older = [CIPHER_SUITES[suite] for suite in settings.cipher_suites if CIPHER_SUITES[suite]]
        if older:
            made.set_ciphers(":".join(older))
        else:
            made.minimum_version = ssl.TLSVersion.TLSv1_3
    for curve in settings.curve_preferences:
        made.set_ecdh_curve(_CURVES[curve])


def _check_readable(path: str, key: str, file: str) -> None:
    try:
        if file:
            with open(file, "rb") as opened:  # noqa: PTH123
                opened.read(1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ConfigError(path, f"{file}: cannot be read: {getattr(error, 'strerror', error)}", None, key) from error


@contextlib.contextmanager
def _complaints(path: str, key: str, *places: str) -> Iterator[None]:
    """OpenSSL's errors in words that name the files, or the keys with text in place."""
    try:
        yield
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "library", None) or error.strerror or "no PEM"
        words = re.sub(r"\(.*", "", str(reason)).replace("_", " ").strip().lower()
        raise ConfigError(
            path, f"{' and '.join(places)}: expected PEM that goes together, found: {words}", None, key
        ) from error


@contextlib.contextmanager
def _as_file(path: str, text: str) -> Iterator[str]:
    """A file's path, or that of a file in memory with the text, since OpenSSL's loaders take files alone."""
    if path:
        yield path
        return
    descriptor = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


class _Telling(ssl.SSLObject):
    """An encryption that says why it fails. asyncio ends a connection whose handshake fails without sending the alert
    that OpenSSL has written; it sends what is written whenever more of the client is wanted. So a failure says that
    first, and ends the connection when the client answers, or its time for the handshake is over.
    """

    _failure: ssl.SSLError | None = None

    def do_handshake(self) -> None:
        """As ever, but for the alert."""
        if self._failure is not None:
            raise self._failure
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            self._failure = error
            raise ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, "the alert is to be sent") from error
