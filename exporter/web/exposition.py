"""A snapshot as bytes: rendered once for each format, however many scrapers ask."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from exporter.collectors import (
    Encoder,
    ReloadStatus,
    collectors_of,
    encoder_for,
    end_of_page,
    family_text,
    registry_of,
    render,
)
from exporter.model import Snapshot

# Enough for text of this shape; the highest level costs twice the time for a per cent of size.
_GZIP_LEVEL = 4


class Page(NamedTuple):
    """A response body, its content type, and whether it is gzipped."""

    body: bytes
    content_type: str
    gzipped: bool


class Exposition:
    """Renders pages, and keeps those of the latest snapshot.

    Families are built anew for each snapshot. A family whose samples are those of the page before keeps its text, which
    holds for most: turning samples into text is most of a page's cost.
    """

    def __init__(self) -> None:
        self._of: tuple[Snapshot, ReloadStatus] | None = None
        self._pages: dict[tuple[str, bool], Page] = {}
        self._texts: dict[tuple[str, str], tuple[list[Sample], bytes]] = {}

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
            if names:
                body = render(registry_of(snapshot, reload), encoder, names)
            else:
                body = self._text(collectors_of(snapshot, reload), encoder, content_type)
            page = Page(gzip.compress(body, _GZIP_LEVEL, mtime=0) if zipped else body, content_type, zipped)
            if not names:
                self._pages[content_type, zipped] = page
        return page

    def _text(self, collectors: Iterable[Collector], encoder: Encoder, content_type: str) -> bytes:
        """The whole page; a registry is only asked where it has to find families by name."""
        parts = []
        for family in (family for collector in collectors for family in collector.collect()):
            samples, text = self._texts.get((content_type, family.name), (None, b""))
            if samples != family.samples:
                text = family_text(family, encoder)
                self._texts[content_type, family.name] = family.samples, text
            parts.append(text)
        return b"".join(parts) + end_of_page(encoder)


def accepts_gzip(encodings: str) -> bool:
    """Whether an ``Accept-Encoding`` header allows gzip; ``gzip;q=0`` does not."""
    for item in encodings.lower().split(","):
        name, _, parameters = item.partition(";")
        if name.strip() == "gzip":
            return parameters.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
