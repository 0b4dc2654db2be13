"""The vendor backends: a registry of where each one's class is. Backends are imported only inside a worker."""

from __future__ import annotations

from importlib import import_module

from exporter.backends.base import Backend

BACKENDS: dict[str, str] = {
    "nvidia": "exporter.backends.nvidia:NvidiaBackend",
    "simulated": "exporter.backends.simulated:SimulatedBackend",
}

ON_REQUEST: tuple[str, ...] = ("simulated",)
"""Backends that serve only when the settings name them."""


def create(vendor: str, sysfs: str, procfs: str) -> Backend:
    """The vendor's backend, not opened yet; ``sysfs`` and ``procfs`` are where those file systems are mounted."""
    module, _, name = BACKENDS[vendor].partition(":")
    backend: Backend = getattr(import_module(module), name)(sysfs, procfs)
    return backend
