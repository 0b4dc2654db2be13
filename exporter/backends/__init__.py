"""The vendor backends: a registry of where each one's class is. Backends are imported only inside a worker."""

from __future__ import annotations

from importlib import import_module

from exporter.backends.base import Backend, Places

BACKENDS: dict[str, str] = {
    "nvidia": "exporter.backends.nvidia:NvidiaBackend",
    "amd": "exporter.backends.amd:AmdBackend",
    "intel": "exporter.backends.intel:IntelBackend",
    "simulated": "exporter.backends.simulated:SimulatedBackend",
}

ON_REQUEST: tuple[str, ...] = ("simulated",)
"""Backends that serve only when the settings name them."""


LENT_CAPABILITIES: tuple[str, ...] = ("intel",)
"""Backends that use the daemon's capabilities, where it has any: Intel's counts the time of every process's clients."""


def create(vendor: str, places: Places) -> Backend:
    """The vendor's backend, not opened yet."""
    module, _, name = BACKENDS[vendor].partition(":")
    backend: Backend = getattr(import_module(module), name)(places)
    return backend
