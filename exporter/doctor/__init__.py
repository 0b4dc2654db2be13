"""The command ``doctor``: what keeps readings from the page on this host, and what to do about it.

A check is a function from what was :class:`Seen` to findings, and a line in :data:`CHECKS`.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from exporter.doctor import cards, front_door, listening, rights, vendors, workloads
from exporter.doctor.findings import Finding, as_json, as_text, failed, worst
from exporter.doctor.seen import Seen, look

__all__ = ["CHECKS", "Finding", "as_json", "as_text", "examine", "worst"]

Check = Callable[[Seen], Iterator[Finding]]

_SECONDS = 7.0

CHECKS: tuple[Check, ...] = (
    workloads.check_settings,
    front_door.check_web_configuration,
    rights.check_user,
    vendors.check_present,
    vendors.check_drivers,
    vendors.check_libraries,
    vendors.check_backends,
    vendors.check_hints,
    cards.check_states,
    cards.check_count,
    cards.check_missing,
    cards.check_device_files,
    rights.check_processes,
    rights.check_counters,
    rights.check_open_files,
    listening.check_addresses,
    workloads.check_fleets,
    workloads.check_cards_of_no_fleet,
)
"""In the order in which people read what they find."""


def examine(options: argparse.Namespace) -> tuple[Finding, ...]:
    """What all checks find; with a card that hangs in some fifteen seconds."""
    seen = look(options)
    running = [_begun(check, seen) for check in CHECKS]
    until = time.monotonic() + _SECONDS
    return tuple(finding for each in running for finding in _found(each, until))


class _Running(NamedTuple):
    """A check in a thread of its own: a file that hangs holds up nobody. ``found`` has its findings once it is done."""

    check: Check
    thread: threading.Thread
    found: list[tuple[Finding, ...]]


def _begun(check: Check, seen: Seen) -> _Running:
    found: list[tuple[Finding, ...]] = []
    thread = threading.Thread(target=lambda: found.append(tuple(check(seen))), name=check.__name__, daemon=True)
    thread.start()
    return _Running(check, thread, found)


def _found(running: _Running, until: float) -> tuple[Finding, ...]:
    running.thread.join(max(0.0, until - time.monotonic()))
    if running.found:
        return running.found[0]
    name = running.check.__name__
    if running.thread.is_alive():
        fix = "`journalctl -k -b` says whether a driver or a file system hangs: a file that it reads gives no answer."
        return (failed("doctor", name, "this check has not come to an end", fix),)
    return (failed("doctor", name, "this check failed", "A bug: report it with the lines on standard error."),)
