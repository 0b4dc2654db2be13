"""Every reading that a backend can take, by the key that backends put in :attr:`exporter.model.Reading.metric`."""

from __future__ import annotations

from exporter.catalog.activity import ACTIVITY
from exporter.catalog.condition import CONDITION
from exporter.catalog.failures import FAILURES
from exporter.catalog.family import Family
from exporter.catalog.links import LINKS

READINGS: dict[str, Family] = {**ACTIVITY, **CONDITION, **LINKS, **FAILURES}
