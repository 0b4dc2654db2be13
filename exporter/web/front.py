"""The front door: who is answered, by which certificate, how often, and what every answer carries.

What reads its file costs two thirds of a MiB, and is imported by those who have one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections.abc import Iterable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from exporter.errors import ConfigError
from exporter.web.accounts import Accounts, Busy, Hashing

if TYPE_CHECKING:
    from exporter.web.settings import TlsSettings, WebSettings

log = logging.getLogger("exporter.web")

_LOOK_SECONDS = 1.0
_REALM = {"www-authenticate": "Basic"}


class Rate:
    """A bucket of requests that fills with time. Without an interval it never is empty."""

    def __init__(self, interval_seconds: float = 0.0, burst: int = 1) -> None:
        self._interval, self._burst = interval_seconds, float(burst)
        self._left, self._at = self._burst, 0.0

    def take(self, now: float) -> bool:
        """Whether one more is allowed at this time, in seconds that never go back."""
        if not self._interval:
            return True
        self._left = min(self._burst, self._left + (now - self._at) / self._interval)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class _State(NamedTuple):
    """What a file says, built."""

    tls: ssl.SSLContext | None
    terms: object
    allowed_names: frozenset[str]
    accounts: Accounts
    rate: Rate
    headers: Sequence[tuple[bytes, bytes]]


def check(path: str) -> WebSettings:
    """The settings of a file whose certificates have been tried; raises :class:`ConfigError`."""
    from exporter.web import settings, tls

    found = settings.load(path)
    if found.tls_server_config is not None:
        tls.context(found.tls_server_config, path)
    return found


class Front:
    """Who is let in. It follows its file, and the files which that names; what is bad keeps the old, and is logged."""

    def __init__(self, path: str | None = None, *, telemetry_path: str = "/metrics", max_requests: int = 0) -> None:
        """Without a ``path`` everybody is answered, in plain HTTP. ``max_requests`` is how many requests for
        ``telemetry_path`` may be answered at once, 0 for any number. Raises :class:`ConfigError`.
        """
        self._path, self._telemetry_path, self._most = path, telemetry_path, max_requests
        self._answering = 0
        self._hashing = Hashing()
        self._watched: Sequence[str] = ()
        self._stamps: tuple[object, ...] = ()
        self._looking = asyncio.Lock()
        self._settings: WebSettings | None = None
        self._state = _State(None, None, frozenset(), Accounts({}, self._hashing), Rate(), ())
        if path is not None:
            self._take(path)

    def _built(self, found: WebSettings) -> _State:
        from exporter.web import tls

        encrypted = found.tls_server_config
        return _State(
            tls.context(encrypted, self._path or "") if encrypted is not None else None,
            _terms(encrypted),
            frozenset(encrypted.client_allowed_sans if encrypted is not None else ()),
            Accounts(found.basic_auth_users, self._hashing),
            Rate(found.rate_limit.interval_seconds, found.rate_limit.burst),
            [(name.lower().encode(), value.encode()) for name, value in found.http_server_config.headers.items()],
        )

    # --- for connections

    @property
    def tls(self) -> ssl.SSLContext | None:
        """What new connections are encrypted by; None: not at all."""
        return self._state.tls

    @property
    def terms(self) -> object:
        """Equal as long as the same is asked of new connections."""
        return self._state.terms

    def permits(self, certificate: Any) -> bool:
        """Whether a client with this certificate, which has been verified, is one of those that are listed."""
        allowed = self._state.allowed_names
        return not allowed or not allowed.isdisjoint(_names(certificate))

    # --- for requests

    def guard(self, app: ASGIApp) -> ASGIApp:
        """The application, for those who may ask."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            state = self._state

            async def with_headers(message: Message) -> None:
                if message["type"] == "http.response.start":
                    _add(message, state.headers)
                await send(message)

            refusal = await self._refusal(state, scope)
            if refusal is None and scope["path"] == self._telemetry_path:
                await self._counted(app, scope, receive, with_headers)
            else:
                await (refusal or app)(scope, receive, with_headers)

        return guarded

    async def _refusal(self, state: _State, scope: Scope) -> PlainTextResponse | None:
        if not state.rate.take(time.monotonic()):
            return PlainTextResponse("Too many requests.\n", 429)
        if not state.accounts:
            return None
        try:
            if await state.accounts.admit(_header(scope, b"authorization")):
                return None
        except Busy:
            return PlainTextResponse("Too many passwords are being checked.\n", 429)
        return PlainTextResponse("Unauthorized\n", 401, _REALM)

    async def _counted(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        if self._most and self._answering >= self._most:
            words = f"{self._most} requests are being answered already (--web.max-requests).\n"
            await PlainTextResponse(words, 503)(scope, receive, send)
            return
        self._answering += 1
        try:
            await app(scope, receive, send)
        finally:
            self._answering -= 1

    # --- its file

    def _take(self, path: str) -> None:
        """Serve by what the file says; raises :class:`ConfigError`, and is as before then, also where less would be
        asked of clients than before. What changes while it is read is seen at the next look.
        """
        from exporter.web import settings

        self._watched, self._stamps = (path,), stamps((path,))
        found = settings.load(path)
        self._watched, self._stamps = (path, *found.files), (*self._stamps, *stamps(found.files))
        if self._settings is not None and (lost := settings.weaker(self._settings, found)):
            words = f"expected {lost} as before, found none: restart the exporter where that is meant"
            raise ConfigError(path, words)
        self._state, self._settings = self._built(found), found

    async def follow(self) -> None:
        """Look at the files every second, for ever."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await self.refresh()

    async def refresh(self) -> None:
        """Take what the files say, if they are others than at the last look."""
        if self._path is not None:
            async with self._looking:
                await asyncio.to_thread(self._refresh, self._path)

    def _refresh(self, path: str) -> None:
        if stamps(self._watched) == self._stamps:
            return
        try:
            self._take(path)
            log.info("web configuration loaded", extra={"fields": {"file": path}})
        except ConfigError as error:
            fields = {"error": error}
            log.error("web configuration not loaded, the earlier one holds", extra={"fields": fields})  # noqa: TRY400


def _terms(encrypted: TlsSettings | None) -> object:
    """What decides who may connect; not the server's own certificate, which is renewed for new connections alone."""
    if encrypted is None:
        return None
    authorities = (encrypted.client_ca, encrypted.client_ca_file, stamps((encrypted.client_ca_file,)))
    return encrypted.client_auth_type, encrypted.client_allowed_sans, authorities


def _header(scope: Scope, name: bytes) -> str:
    found = [value for key, value in scope["headers"] if key == name]
    return found[0].decode("latin-1") if len(found) == 1 else ""


def _add(message: MutableMapping[str, Any], headers: Sequence[tuple[bytes, bytes]]) -> None:
    """The headers that the answer does not have by itself."""
    there = {name.lower() for name, _ in message["headers"]}
    message["headers"] = [*message["headers"], *(each for each in headers if each[0] not in there)]


def _names(certificate: Any) -> frozenset[str]:
    """The alternative names of a client's certificate, as ``getpeercert`` has it: hosts, addresses, e-mail and URIs."""
    return frozenset(value for kind, value in (certificate or {}).get("subjectAltName", ()) if isinstance(value, str))


def stamps(paths: Iterable[str]) -> tuple[object, ...]:
    """What changes when one of the files is another, or has another content; links are followed."""
    return tuple(map(_stamp, paths))


def _stamp(path: str) -> object:
    try:
        found = os.stat(path)  # noqa: PTH116
    except (OSError, ValueError) as error:
        return repr(error)
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
