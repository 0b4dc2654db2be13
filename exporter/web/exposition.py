"""A snapshot as bytes: rendered once for each format, however many scrapers ask."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from prometheus_client.metrics_core import Metric

from exporter.catalog import Family
from exporter.collectors import (
    PROCESS,
    Encoder,
    LabelSets,
    ReloadStatus,
    collectors_of,
    empty,
    encoder_for,
    end_of_page,
    head_of,
    registry_of,
    render,
)
from exporter.lines import Labels, lines
from exporter.model import Snapshot

# Enough for text of this shape; the highest level costs twice the time for a per cent of size.
_GZIP_LEVEL = 4
_NONE = Labels({})


class Page(NamedTuple):
    """A response body, its content type, and whether it is gzipped."""

    body: bytes
    content_type: str
    gzipped: bool


class Part(NamedTuple):
    """A family, as ours or as the client library's, and its samples as lines."""

    family: Family | Metric
    lines: str


def parts_of(snapshot: Snapshot, reload: ReloadStatus, sets: LabelSets, prefix: str) -> Iterator[Part]:
    """The families of a snapshot, in the order of a page."""
    for collector in collectors_of(snapshot, reload, sets, prefix=prefix):
        for family, rows in collector.named_rows():
            yield Part(family, lines(family.name, rows))


def _parts_of_process() -> Iterator[Part]:
    for metric in PROCESS.collect():
        rows = ((each.name, Labels(each.labels) if each.labels else _NONE, each.value) for each in metric.samples)
        yield Part(metric, "".join(lines(name, [(labels, value)]) for name, labels, value in rows))


class Exposition:
    """Renders pages, and keeps those of the latest snapshot. ``prefix`` is put in front of the names of our families.

    A snapshot's samples are put into lines once for all formats, which differ in the heads of families alone.
    """

    def __init__(self) -> None:
        self.prefix = ""
        self._of: tuple[Snapshot, ReloadStatus, str] | None = None
        self._parts: tuple[Part, ...] = ()
        self._pages: dict[tuple[str, bool], Page] = {}
        self._sets = LabelSets()
        self._heads: dict[tuple[str, str], str] = {}

    def page(
        self, snapshot: Snapshot, reload: ReloadStatus, accept: str, encodings: str, names: Sequence[str] = ()
    ) -> Page:
        """The page in the format and encoding that the request's headers ask for; ``names`` narrows it."""
        zipped = accepts_gzip(encodings)
        encoder, content_type = encoder_for(accept)
        if names:
            return _page(
                render(registry_of(snapshot, reload, prefix=self.prefix), encoder, names), content_type, zipped
            )
        if self._of is None or self._of[0] is not snapshot or self._of[1:] != (reload, self.prefix):
            self._of, self._pages = (snapshot, reload, self.prefix), {}
            self._parts = (*parts_of(snapshot, reload, self._sets, self.prefix), *_parts_of_process())
        page = self._pages.get((content_type, zipped))
        if page is None:
            page = self._pages[content_type, zipped] = _page(self._text(encoder, content_type), content_type, zipped)
        return page

    def _text(self, encoder: Encoder, content_type: str) -> bytes:
        texts = [self._head(part.family, encoder, content_type) + part.lines for part in self._parts]
        return "".join([*texts, end_of_page(encoder)]).encode()

    def _head(self, family: Family | Metric, encoder: Encoder, content_type: str) -> str:
        head = self._heads.get((content_type, family.name))
        if head is None:
            bare = empty(family) if isinstance(family, Family) else _without_samples(family)
            head = self._heads[content_type, family.name] = head_of(bare, encoder)
        return head


def _without_samples(metric: Metric) -> Metric:
    return Metric(metric.name, metric.documentation, metric.type)


def _page(body: bytes, content_type: str, zipped: bool) -> Page:
    return Page(compressed(body) if zipped else body, content_type, zipped)


def compressed(body: bytes) -> bytes:
    """The body, gzipped."""
    return gzip.compress(body, _GZIP_LEVEL, mtime=0)


def accepts_gzip(encodings: str) -> bool:
    """Whether an ``Accept-Encoding`` header allows gzip; ``gzip;q=0`` does not."""
    for item in encodings.lower().split(","):
        name, _, parameters = item.partition(";")
        if name.strip() == "gzip":
            return parameters.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
