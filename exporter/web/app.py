"""The pages: metrics, the page for people and the same as JSON, health, readiness, and the reload call."""

from __future__ import annotations

import math

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from exporter.errors import ExporterError
from exporter.web import people
from exporter.web.exposition import Exposition
from exporter.web.site import Site

# Kept for the way back to the scraper, out of the timeout that it announces.
_OFFSET_SECONDS = 0.5
_LEAST_SECONDS = 0.2
_TIMEOUT_HEADER = "x-prometheus-scrape-timeout-seconds"


def deadline(header: str | None, most: float) -> float:
    """Seconds that a scrape may take: its own timeout less half a second where that is shorter than ``most``.

    A timeout of a second or less is halved, but nobody gets less than a fifth of a second: cards that are well would
    be called hung. A header that is no positive number is as none.
    """
    try:
        announced = float(header or "")
    except ValueError:
        return most
    if not math.isfinite(announced) or announced <= 0:
        return most
    return min(most, max(announced - _OFFSET_SECONDS, announced / 2, _LEAST_SECONDS))


def create(site: Site) -> Starlette:
    """The application over a daemon."""
    exposition = Exposition()

    async def metrics(request: Request) -> Response:
        headers = request.headers
        snapshot = await site.snapshot(deadline(headers.get(_TIMEOUT_HEADER), site.deadline_seconds))
        names = request.query_params.getlist("name[]")
        accept, encodings = headers.get("accept", ""), headers.get("accept-encoding", "")
        exposition.prefix = site.metrics_prefix
        page = exposition.page(snapshot, site.reload_status, accept, encodings, names)
        kept = {"content-type": page.content_type, "vary": "Accept, Accept-Encoding"}
        return Response(page.body, headers=kept | ({"content-encoding": "gzip"} if page.gzipped else {}))

    async def healthy(_: Request) -> Response:
        return PlainTextResponse("gpu-fleet-exporter is healthy.\n")

    async def ready(_: Request) -> Response:
        if site.ready:
            return PlainTextResponse("gpu-fleet-exporter is ready.\n")
        return PlainTextResponse("gpu-fleet-exporter has not finished its first cycle.\n", status_code=503)

    async def reload(_: Request) -> Response:
        if not site.lifecycle:
            return PlainTextResponse("Lifecycle API is not enabled (--web.enable-lifecycle).\n", status_code=403)
        try:
            await site.reload()
        except ExporterError as error:
            return PlainTextResponse(f"failed to reload the settings: {error}\n", status_code=500)
        return PlainTextResponse("")

    routes = [
        Route(site.telemetry_path, metrics),
        Route("/-/healthy", healthy),
        Route("/-/ready", ready),
        Route("/-/reload", reload, methods=["POST", "PUT"]),
        *people.routes(site),
    ]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False
    return app
