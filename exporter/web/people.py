"""What people and their tools look at: the page at ``/``, what it loads, and the same facts as JSON.

Report and page are imported when they are first asked for: a daemon that is only scraped does not pay for them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from exporter.collectors import ReloadStatus
from exporter.model import Snapshot
from exporter.web.exposition import accepts_gzip, compressed
from exporter.web.site import Site

FLEETS_PATH = "/api/v1/fleets"

_ASSETS = {
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_FOLDER = Path(__file__).with_name("assets")
_SAFE = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
_LIVE = _SAFE | {"cache-control": "no-store", "vary": "Accept-Encoding"}
# A browser asks whether what it has is current, so that a page and its script are of one version.
_CHECKED = _SAFE | {"cache-control": "no-cache"}
POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class _Latest:
    """What is made of a snapshot, and kept until there is another one: many may look at the same time."""

    def __init__(self, make: Callable[[Snapshot, ReloadStatus], bytes]) -> None:
        self._make = make
        self._of: tuple[Snapshot, ReloadStatus] | None = None
        self._plain, self._zipped = b"", b""

    def __call__(self, snapshot: Snapshot, reload: ReloadStatus, *, zipped: bool) -> bytes:
        if self._of is None or self._of[0] is not snapshot or self._of[1] != reload:
            self._plain, self._zipped, self._of = self._make(snapshot, reload), b"", (snapshot, reload)
        if zipped and not self._zipped:
            self._zipped = compressed(self._plain)
        return self._zipped if zipped else self._plain


def routes(site: Site) -> Iterator[Route]:
    """The routes; no page and nothing that it loads where the metrics are at ``/``."""
    yield Route(FLEETS_PATH, _live(site, _Latest(_json), {"content-type": "application/json"}))
    if site.telemetry_path == "/":
        return
    headers = {"content-type": "text/html; charset=utf-8", "content-security-policy": POLICY}
    yield Route("/", _live(site, _Latest(_html(site)), headers))
    yield Route("/assets/{name}", _asset)


def _live(site: Site, body: _Latest, headers: Mapping[str, str]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        zipped = accepts_gzip(request.headers.get("accept-encoding", ""))
        snapshot = await site.snapshot(site.deadline_seconds)
        content = body(snapshot, site.reload_status, zipped=zipped)
        return Response(content, headers={**_LIVE, **headers, **({"content-encoding": "gzip"} if zipped else {})})

    return answer


def _json(snapshot: Snapshot, reload: ReloadStatus) -> bytes:
    from exporter.web import report

    return report.as_json(report.report(snapshot, reload))


def _html(site: Site) -> Callable[[Snapshot, ReloadStatus], bytes]:
    def made(snapshot: Snapshot, reload: ReloadStatus) -> bytes:
        from exporter.web import page, report

        surroundings = page.Surroundings(site.telemetry_path, FLEETS_PATH, site.deadline_seconds)
        return page.page(report.report(snapshot, reload), surroundings)

    return made


async def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _ASSETS:
        return PlainTextResponse("Not Found", status_code=404)
    return Response((_FOLDER / name).read_bytes(), headers=_CHECKED | {"content-type": _ASSETS[name]})
