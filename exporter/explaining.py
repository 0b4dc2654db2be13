"""The command ``explain``: which card is behind each index of a fleet, a process or an environment, or why none is."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from exporter import masks, one_cycle, reports
from exporter.arguments import PROGRAM
from exporter.binding import context_of
from exporter.config import FleetSettings
from exporter.daemon import load_settings
from exporter.errors import CouldNot, InputError
from exporter.facts import FACTS
from exporter.fleet_names import placeholders
from exporter.fleets.processes import hidden as is_hidden
from exporter.fleets.scanner import Scanner, runtimes_of
from exporter.inventory import Inventory
from exporter.model import Fleet, Inversion, Refusal, Snapshot
from exporter.saved_inventory import from_rows, read_rows

Tell = Callable[[str], None]
"""Takes a sentence on what is amiss beside the answer, which a person sees also where no answer follows."""


class Explained(NamedTuple):
    """The answer as it is printed, and whether a fleet in it is refused."""

    text: str
    refused: bool


def explain(options: argparse.Namespace, tell: Tell) -> Explained:
    """What the command line asks. Raises :class:`InputError`, and :class:`CouldNot` where there is no answer."""
    if options.pid is not None or options.all:
        return _of_processes(options, tell)
    if options.inventory or options.runtime or options.env:
        return _of_environment(options, tell)
    names = [entry.name for entry in load_settings(options.config_file).fleets]
    if options.fleet and names and not any(map(placeholders, names)) and options.fleet.partition("/")[0] not in names:
        raise _unknown_fleet(options.fleet, names)
    return _of_fleets(one_cycle.snapshot(options, complete=True), options.fleet, tell)


def _of_fleets(snapshot: Snapshot, name: str | None, tell: Tell) -> Explained:
    """Each fleet under each runtime, or those of one name; what one fleet was split into counts as its."""
    names = [entry.fleet for entry in snapshot.mappings]
    mappings = [entry for entry in snapshot.mappings if name in (None, entry.fleet, entry.fleet.rpartition("/")[0])]
    if not mappings:
        raise _unknown_fleet(name, sorted(set(names)))
    _tell_troubles(snapshot, tell)
    inventory, texts = Inventory(snapshot.devices), []
    seen = {fleet.name: reports.seen_of(fleet) for fleet in snapshot.fleets}
    for entry in mappings:
        told = seen.pop(entry.fleet, ())  # once, for all of its runtimes
        texts.append(reports.explain(entry.fleet, entry.runtime, entry.outcome, inventory, told))
    return Explained("".join(texts), any(isinstance(entry.outcome, Refusal) for entry in mappings))


def _tell_troubles(snapshot: Snapshot, tell: Tell) -> None:
    for line in reports.trouble_lines(snapshot):
        tell(line)


def _of_processes(options: argparse.Namespace, tell: Tell) -> Explained:
    """One process, or the settings' fleets and every other process that uses a GPU."""
    if options.fleet or options.inventory or options.env or (options.pid is not None and options.all):
        raise InputError("explain: --pid and --all go with --runtime and --known alone")
    if options.runtime == "host":
        raise InputError("--runtime: found 'host', which reads no process: expected a runtime that has masks")
    entry = FleetSettings(name="", runtime=None if options.runtime is None else _runtime(options.runtime))
    scanner = Scanner([], options.procfs, options.sysfs, 1)
    try:
        pids = list(scanner.at_work(runtimes_of(entry))) if options.all else [options.pid]
    except OSError as error:
        raise CouldNot(f"explain: {options.procfs}: {error.strerror}") from error
    hidden = f"{options.procfs} does not show you the processes of other users" if is_hidden(options.procfs) else ""
    found = [_fleet_of(scanner, pid, entry, options) for pid in pids]
    if found == [None] and options.pid is not None:
        why = f"seen: {hidden}" if hidden else "running, or it is the kernel's own"
        raise CouldNot(f"explain: no process {options.pid} is {why}")
    if options.pid is None and hidden:
        tell(f"{PROGRAM}: explain: {hidden}")
    snapshot = one_cycle.snapshot(options, complete=True, others=[fleet for fleet in found if fleet])
    return _of_fleets(snapshot, None if options.pid is None else f"pid-{options.pid}", tell)


def _fleet_of(scanner: Scanner, pid: int, entry: FleetSettings, options: argparse.Namespace) -> Fleet | None:
    fleet = scanner.of_process(msgspec.structs.replace(entry, name=f"pid-{pid}"), pid)
    return None if fleet is None else msgspec.structs.replace(fleet, known=_facts(options.known or []))


def _unknown_fleet(name: str | None, known: Sequence[str]) -> InputError:
    return InputError(f"explain: found fleet '{name}', expected one of {', '.join(known)}")


def _of_environment(options: argparse.Namespace, tell: Tell) -> Explained:
    """An environment given on the command line, over a saved inventory or this host's devices."""
    runtime, env = _runtime(options.runtime), _environment(options.env or [])
    vendors = masks.RUNTIMES[runtime].vendors
    reach, versions = None, dict.fromkeys(vendors, options.driver_version)
    if options.inventory:
        inventory, reach = from_rows(read_rows(options.inventory), (*vendors, "nvidia")[0])
    else:
        snapshot = one_cycle.snapshot(options)
        _tell_troubles(snapshot, tell)
        inventory = Inventory(snapshot.devices, whole=not snapshot.incomplete)
        versions = dict(snapshot.driver_versions)
    inventory = inventory.of(*vendors) if vendors else inventory
    if vendors and not inventory.devices:
        place = f"in {options.inventory}" if options.inventory else "on this host"
        raise CouldNot(f"no device of the runtime {runtime} was found {place}")
    if reach is None:
        reach = frozenset(device.key for device in inventory.devices)
    context = msgspec.structs.replace(context_of(reach, versions), **_facts(options.known or []))
    outcome: Inversion | Refusal = masks.invert(runtime, env, inventory, context)
    text = reports.explain(options.fleet or "command line", runtime, outcome, inventory)
    return Explained(text, isinstance(outcome, Refusal))


def _facts(facts: Sequence[str]) -> dict[str, str | bool]:
    known: dict[str, str | bool] = {}
    for fact in facts:
        name, _, value = fact.partition("=")
        if name not in FACTS:
            raise InputError(f"--known: found fact '{name}', expected one of {', '.join(FACTS)}")
        if value not in FACTS[name]:
            raise InputError(f"--known: {name}: found '{value}', expected one of {', '.join(FACTS[name])}")
        known[name] = FACTS[name][value]
    return known


def _runtime(name: str | None) -> str:
    if name not in masks.RUNTIMES:
        found = "none" if name is None else f"'{name}'"
        raise InputError(f"--runtime: found {found}, expected one of {', '.join(masks.RUNTIMES)}")
    return name


def _environment(assignments: Sequence[str]) -> dict[str, str]:
    env: dict[str, str] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InputError(f"--env: found '{text}', expected NAME=VALUE")
        if name in env:
            raise InputError(f"--env: found {name} twice, expected it once")
        env[name] = value
    return env
