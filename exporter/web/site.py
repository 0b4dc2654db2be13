"""What the pages need of the daemon."""

from __future__ import annotations

from typing import Protocol

from exporter.collectors import ReloadStatus
from exporter.model import Snapshot


class Site(Protocol):
    """The daemon, as its pages see it."""

    telemetry_path: str
    lifecycle: bool
    reload_status: ReloadStatus
    ready: bool

    @property
    def metrics_prefix(self) -> str:
        """What the settings put in front of every family's name."""

    @property
    def deadline_seconds(self) -> float:
        """The settings' upper bound of a scrape's wait."""

    async def snapshot(self, within_seconds: float) -> Snapshot:
        """The host's state now, within that time."""

    async def reload(self) -> None:
        """Load the settings anew; raises :class:`ExporterError` and keeps the old ones when that fails."""
