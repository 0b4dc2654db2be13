"""The file of ``--web.config.file``: whether it is valid, and whom it keeps out."""

from __future__ import annotations

from collections.abc import Iterator

from exporter.doctor.findings import Finding, failed, passed
from exporter.doctor.seen import Seen
from exporter.errors import ConfigError
from exporter.web import front
from exporter.web.settings import WebSettings


def check_web_configuration(seen: Seen) -> Iterator[Finding]:
    """As ``check-config --web.config.file`` does."""
    path = seen.web_config_file
    if path is None:
        yield passed("web config", "none", "plain HTTP to whoever reaches the address; --web.config.file names a file")
        return
    try:
        yield passed("web config", path, _told(front.check(path)))
    except ConfigError as error:
        fix = (
            "Correct it there, or let the exporter's user read what it names: the daemon does not start with it, and "
            "one that runs goes on with what it had."
        )
        yield failed("web config", path, str(error).removeprefix(f"{path}: "), fix)


def encrypts(seen: Seen) -> bool:
    """Whether there is TLS, which leaves fewer places."""
    try:
        return seen.web_config_file is not None and front.check(seen.web_config_file).tls_server_config is not None
    except ConfigError:
        return False


def _told(found: WebSettings) -> str:
    tls, users = found.tls_server_config, len(found.basic_auth_users)
    said = "plain HTTP" if tls is None else f"TLS, {tls.client_auth_type}"
    return f"valid: {said}, {users or 'no'} account{'s' * (users != 1)}"
