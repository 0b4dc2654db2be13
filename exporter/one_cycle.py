"""This host as it is now, for a command that looks once: by workers of its own, which end with it."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from exporter import logs
from exporter.config import Settings
from exporter.daemon import Host, Options, load_settings
from exporter.model import Fleet, Snapshot

_STOP_SECONDS = 0.5
_BETWEEN_CYCLES_SECONDS = 1.0


class Patience(NamedTuple):
    """How long each cycle may take at most, a backend that is starting, and drivers that are asked; and how many cycles
    more counters may have.
    """

    cycle_seconds: float = math.inf
    start_seconds: float = 0.0
    answers_seconds: float = 10.0
    more_cycles: int = 2


_PATIENT = Patience()


def snapshot(
    options: argparse.Namespace,
    *,
    complete: bool = False,
    others: Sequence[Fleet] = (),
    settings: Settings | None = None,
    patience: Patience = _PATIENT,
) -> Snapshot:
    """One of the settings of the command line, unless others are given, and ``others`` are fleets beside theirs.

    Where it is to be ``complete`` it is one after the drivers were asked what they have to be, and after another cycle
    or two if there are counters that need them. Raises :class:`ConfigError`. Errors alone are logged from now on.
    """
    logs.configure("error", options.log_format)
    known = load_settings(options.config_file) if settings is None else settings
    sampling = msgspec.structs.replace(
        known.sampling,
        interval_seconds=None,
        reuse_seconds=0.0,
        deadline_seconds=min(known.sampling.deadline_seconds, patience.cycle_seconds),
    )
    known = msgspec.structs.replace(known, sampling=sampling)
    host = Host(Options(sysfs=options.sysfs, procfs=options.procfs), os.environ, lambda snapshot, outcomes: None)
    return asyncio.run(_taken(host, known, others, patience if complete else None))


async def _taken(host: Host, settings: Settings, others: Sequence[Fleet], complete: Patience | None) -> Snapshot:
    await host.take(settings, others)
    try:
        return await host.snapshot() if complete is None else await _complete(host, complete)
    finally:
        await host.stop(_STOP_SECONDS)


async def _started(host: Host, within_seconds: float) -> None:
    """The first cycle, and more while a backend is starting, which is then up or known to hang."""
    until = time.monotonic() + within_seconds
    found = await host.snapshot()
    while _is_starting(found) and time.monotonic() < until:
        await asyncio.sleep(_BETWEEN_CYCLES_SECONDS)
        found = await host.snapshot()


def _is_starting(found: Snapshot) -> bool:
    return any(each.fault is not None and each.fault.reason == "starting" for each in found.backends)


async def _complete(host: Host, patience: Patience) -> Snapshot:
    await _started(host, patience.start_seconds)
    await host.answered(patience.answers_seconds)
    found = await host.snapshot()
    for _ in range(patience.more_cycles):
        if not found.pending:
            break
        await asyncio.sleep(_BETWEEN_CYCLES_SECONDS)
        found = await host.snapshot()
    return found
