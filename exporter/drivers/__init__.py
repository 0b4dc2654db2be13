"""Asking a runtime's own driver library which devices it shows: a registry of where each runtime's question is.

The modules load libraries that may hang or crash, so they are imported in a process made for it alone
(:mod:`exporter.asking`) and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from exporter.wire import DriverAnswer

DRIVERS: dict[str, str] = {
    "cuda": "exporter.drivers.cuda:ask",
    "rocm": "exporter.drivers.hip:ask",
    "level_zero": "exporter.drivers.level_zero:ask",
    "vulkan": "exporter.drivers.vulkan:ask",
}
"""By runtime, ``"module:function"``: a function without arguments that asks under this process's environment."""


def ask(runtime: str) -> DriverAnswer:
    """What the runtime's library answers here and now, or the fault that says why it does not."""
    module, _, name = DRIVERS[runtime].partition(":")
    question: Callable[[], DriverAnswer] = getattr(import_module(module), name)
    return question()
