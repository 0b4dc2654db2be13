"""A snapshot as bytes: rendered once for each format, however many scrapers ask."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from typing import NamedTuple

from exporter.collectors import ReloadStatus, encoder_for, registry_of, render
from exporter.model import Snapshot

# Enough for text of this shape; the highest level costs twice the time for a per cent of size.
_GZIP_LEVEL = 4


class Page(NamedTuple):
    """A response body, its content type, and whether it is gzipped."""

    body: bytes
    content_type: str
    gzipped: bool


class Exposition:
    """Renders pages and keeps those of the latest snapshot."""

    def __init__(self) -> None:
        self._of: tuple[Snapshot, ReloadStatus] | None = None
        self._pages: dict[tuple[str, bool], Page] = {}

    def page(
        self, snapshot: Snapshot, reload: ReloadStatus, accept: str, encodings: str, names: Sequence[str] = ()
    ) -> Page:
        """The page in the format and encoding that the request's headers ask for; ``names`` narrows it."""
        zipped = accepts_gzip(encodings)
        encoder, content_type = encoder_for(accept)
        if self._of is None or self._of[0] is not snapshot or self._of[1] != reload:
            self._of, self._pages = (snapshot, reload), {}
        page = None if names else self._pages.get((content_type, zipped))
        if page is None:
            body = render(registry_of(snapshot, reload), encoder, names)
            page = Page(gzip.compress(body, _GZIP_LEVEL, mtime=0) if zipped else body, content_type, zipped)
            if not names:
                self._pages[content_type, zipped] = page
        return page


def accepts_gzip(encodings: str) -> bool:
    """Whether an ``Accept-Encoding`` header allows gzip; ``gzip;q=0`` does not."""
    for item in encodings.lower().split(","):
        name, _, parameters = item.partition(";")
        if name.strip() == "gzip":
            return parameters.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
