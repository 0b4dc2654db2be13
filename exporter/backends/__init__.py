"""The vendor backends. The registry of vendors says where each one's class is; it is imported only inside a worker."""

from __future__ import annotations

from importlib import import_module

from exporter.backends.base import Backend, Places
from exporter.vendors import VENDORS

BACKENDS: dict[str, str] = {name: vendor.backend for name, vendor in VENDORS.items()}

ON_REQUEST: tuple[str, ...] = tuple(name for name, vendor in VENDORS.items() if vendor.on_request)
"""Backends that serve only when the settings name them."""

LENT_CAPABILITIES: tuple[str, ...] = tuple(name for name, vendor in VENDORS.items() if vendor.uses_capabilities)
"""Backends that use the daemon's capabilities, where it has any."""


def create(vendor: str, places: Places) -> Backend:
    """The vendor's backend, not opened yet."""
    module, _, name = BACKENDS[vendor].partition(":")
    backend: Backend = getattr(import_module(module), name)(places)
    return backend
