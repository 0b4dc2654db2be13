"""Visible-device masks inverted: an environment and an inventory in, identities by fleet index out, or a refusal.

Pure: no environment, file or clock is read here, and any text at all ends in an answer or a refusal.
"""

from __future__ import annotations

from collections.abc import Mapping

from exporter.inventory import Inventory
from exporter.masks import cuda, host, level_zero, rocm, sycl, vulkan
from exporter.masks.base import Runtime
from exporter.model import Context, Inversion, Refusal

__all__ = ["DEFAULT_RUNTIMES", "RUNTIMES", "Runtime", "invert"]

_ALL = (cuda.RUNTIME, rocm.RUNTIME, level_zero.RUNTIME, sycl.RUNTIME, vulkan.RUNTIME, host.RUNTIME)

RUNTIMES: dict[str, Runtime] = {runtime.name: runtime for runtime in _ALL}

DEFAULT_RUNTIMES: tuple[str, ...] = tuple(name for name, runtime in RUNTIMES.items() if runtime.default)


def invert(runtime: str, env: Mapping[str, str], inventory: Inventory, context: Context) -> Inversion | Refusal:
    """Undo the masks of ``env`` as ``runtime`` reads them, over the devices of one vendor.

    Raises ``KeyError`` for a runtime that is not in :data:`RUNTIMES`; never anything else.
    """
    return RUNTIMES[runtime].invert(env, inventory, context)
