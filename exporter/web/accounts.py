"""Accounts: names and bcrypt hashes. Hashing costs tens of milliseconds, so it is done beside the event loop."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

MOST_WAITING = 16
"""How many passwords may wait to be hashed; who comes then is told to come again."""

_MOST_REMEMBERED = 100
_LONGEST = 72  # bytes that bcrypt takes


class Busy(Exception):
    """Too many passwords wait to be hashed."""


class Hashing:
    """One thread that hashes, of one process: passwords are hashed one after the other, whoever guesses."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._waiting = 0

    async def matches(self, password: bytes, hashed: bytes) -> bool:
        """Whether the hash is the password's; raises :class:`Busy`."""
        if self._waiting >= MOST_WAITING:
            raise Busy
        self._thread = self._thread or ThreadPoolExecutor(1, "bcrypt")
        self._waiting += 1
        work = asyncio.get_running_loop().run_in_executor(self._thread, _matches, password, hashed)
        work.add_done_callback(self._done)  # also where the client has left meanwhile
        return await asyncio.shield(work)

    def _done(self, _work: object) -> None:
        self._waiting -= 1


def _matches(password: bytes, hashed: bytes) -> bool:
    import bcrypt  # half a MiB, for those who have accounts

    return bcrypt.checkpw(password[:_LONGEST], hashed)


class Accounts:
    """Who may ask. Right answers are remembered, so that a scrape costs no hash; wrong ones never are."""

    def __init__(self, users: Mapping[str, str], hashing: Hashing) -> None:
        self._hashes = {name.encode(): hashed.encode() for name, hashed in users.items()}
        self._hashing = hashing
        # For names that are not known: as dear as the dearest, so that time does not tell which there are.
        rounds = max((int(hashed[4:6]) for hashed in users.values()), default=10)
        self._nobody = b"$2b$%02d$" % rounds + 53 * b"."
        self._secret = secrets.token_bytes(32)
        self._remembered: dict[bytes, None] = {}

    def __bool__(self) -> bool:
        return bool(self._hashes)

    async def admit(self, authorization: str) -> bool:
        """Whether the header's account is one of ours; raises :class:`Busy`."""
        given = _basic(authorization)
        if given is None:
            return False
        name, password = given
        hashed = self._hashes.get(name)
        seal = hmac.digest(self._secret, name + b":" + password, hashlib.sha256)
        if hashed is not None and seal in self._remembered:
            return True
        right = await self._hashing.matches(password, hashed or self._nobody)
        if hashed is None or not right:
            return False
        if len(self._remembered) >= _MOST_REMEMBERED:
            self._remembered.clear()
        self._remembered[seal] = None
        return True


def _basic(authorization: str) -> tuple[bytes, bytes] | None:
    """Name and password of a header ``Basic ...``; None where it is none. No password has a NUL, which ends it."""
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        name, colon, password = base64.b64decode(encoded.strip().encode(), validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return None
    return (name, password) if colon and b"\0" not in password else None
