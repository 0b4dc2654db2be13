"""The command line; the only place that prints and that chooses an exit status.

0: done. 1: could not (the host lacks what was asked for, a fleet is refused). 2: bad input.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import io
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import yaml

from exporter import logs, masks, reports, systemd
from exporter.arguments import PROGRAM, parser
from exporter.binding import context_of
from exporter.collectors import ReloadStatus, encoder_for, registry_of, render
from exporter.config import FleetSettings
from exporter.daemon import Daemon, Host, Options, load_settings
from exporter.errors import CouldNot, ExporterError, InputError
from exporter.facts import FACTS
from exporter.fleet_names import placeholders
from exporter.fleets.processes import hidden as is_hidden
from exporter.fleets.scanner import Scanner, runtimes_of
from exporter.inventory import Inventory
from exporter.model import Fleet, Inversion, Refusal, Snapshot
from exporter.saved_inventory import from_rows, read_rows, to_rows
from exporter.web import front
from exporter.web.server import parse_address

_ONCE_STOP_SECONDS = 0.5
_BETWEEN_CYCLES_SECONDS, _MOST_CYCLES_MORE = 1.0, 2
_ANSWERED_SECONDS = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    # Masks and names may hold bytes that are no text; they are shown escaped and never stop a command.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    options = parser().parse_args(arguments)
    commands = {
        "serve": _serve,
        "once": _once,
        "inventory": _inventory,
        "explain": _explain,
        "check-config": _check_config,
    }
    try:
        return _flushed(commands[options.command or "serve"](options))
    except InputError as error:
        print(f"{logs.mark(logging.ERROR)}{PROGRAM}: {error}", file=sys.stderr)
        return 2
    except ExporterError as error:
        print(f"{logs.mark(logging.ERROR)}{PROGRAM}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:  # the output: closed by its reader, as `head` does, or on a full disk
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"{PROGRAM}: cannot write: {error.strerror or error}", file=sys.stderr)
        return 1


def _flushed(status: int) -> int:
    """The status, once all output is out: left to the interpreter's end, a failure would be a traceback."""
    if sys.stdout is not None:
        sys.stdout.flush()
    return status


def _daemon_options(options: argparse.Namespace) -> Options:
    for address in options.listen or ():
        parse_address(address)
    if options.max_requests < 0:
        raise InputError(f"--web.max-requests: found {options.max_requests}, expected 0 or more")
    path: str = options.telemetry_path
    reserved = path.startswith("/-/") or any(mark in path for mark in "{}?# ")
    if not path.startswith("/") or reserved:
        raise InputError(f"--web.telemetry-path: found '{path}', expected a path such as /metrics")
    return Options(
        config_file=options.config_file,
        listen_addresses=options.listen or (),
        telemetry_path=path,
        lifecycle=options.lifecycle,
        sysfs=options.sysfs,
        procfs=options.procfs,
        web_config_file=options.web_config_file,
        max_requests=options.max_requests,
    )


def _serve(options: argparse.Namespace) -> int:
    daemon_options, manager = _daemon_options(options), systemd.adopt(os.environ)
    if options.systemd_socket and not manager.sockets:
        raise InputError("--web.systemd-socket: systemd handed over no socket: is gpu-fleet-exporter.socket enabled?")
    if sys.stderr is not None:
        faulthandler.enable()  # where the watchdog ends a daemon that hangs, the log says where it hung
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the daemon takes it for a reload
    load_settings(options.config_file)
    logs.configure(options.log_level, options.log_format)
    asyncio.run(_run(daemon_options, manager))
    return 0


async def _run(options: Options, manager: systemd.ServiceManager) -> None:
    await Daemon(options, os.environ, manager).run()


async def _one_cycle(options: argparse.Namespace, complete: bool, others: Sequence[Fleet]) -> Snapshot:
    """A snapshot of this host by fresh workers, which end afterwards. ``others`` are fleets beside the settings'.

    Where it is to be ``complete`` it is one after the drivers were asked what they have to be, and after another cycle
    or two if there are counters that need them.
    """
    settings = load_settings(options.config_file)
    host = Host(Options(sysfs=options.sysfs, procfs=options.procfs), os.environ, lambda snapshot, outcomes: None)
    on_request = msgspec.structs.replace(settings.sampling, interval_seconds=None, reuse_seconds=0.0)
    await host.take(msgspec.structs.replace(settings, sampling=on_request), others)
    try:
        snapshot = await host.snapshot()
        if complete:
            await host.answered(_ANSWERED_SECONDS)
            snapshot = await host.snapshot()
        for _ in range(_MOST_CYCLES_MORE if complete else 0):
            if not snapshot.pending:
                break
            await asyncio.sleep(_BETWEEN_CYCLES_SECONDS)
            snapshot = await host.snapshot()
        return snapshot
    finally:
        await host.stop(_ONCE_STOP_SECONDS)


def _snapshot(options: argparse.Namespace, *, complete: bool = False, others: Sequence[Fleet] = ()) -> Snapshot:
    logs.configure("error", options.log_format)
    return asyncio.run(_one_cycle(options, complete, others))


def _once(options: argparse.Namespace) -> int:
    snapshot = _snapshot(options, complete=True)
    page = render(registry_of(snapshot, ReloadStatus(True, time.time()), process=False), encoder_for("")[0])
    if options.output is not None:
        _write_atomically(Path(options.output), page)
    else:
        sys.stdout.buffer.write(page)
        sys.stdout.buffer.flush()
    return 0


def _write_atomically(path: Path, page: bytes) -> None:
    """A reader sees the old page or the new one, and an error leaves the old one."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise InputError(f"--output: {path} is not a file, and would be replaced by one")
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            file.write(page)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise CouldNot(f"{path}: cannot be written: {error.strerror}") from error


def _inventory(options: argparse.Namespace) -> int:
    snapshot = _snapshot(options)
    _print_troubles(snapshot)
    if not snapshot.devices:
        raise CouldNot("no GPU was found on this host")
    if options.format == "yaml" and snapshot.incomplete:
        raise CouldNot("an inventory that is not whole is not saved: it would explain index masks wrongly")
    if options.format == "yaml":
        rows = to_rows(Inventory(snapshot.devices))
        yaml.safe_dump(rows, sys.stdout, sort_keys=False, default_flow_style=False, width=1000)
    else:
        sys.stdout.write(reports.inventory_table(snapshot.devices, snapshot.states))
    return int(bool(snapshot.incomplete))


def _print_troubles(snapshot: Snapshot) -> None:
    for line in reports.trouble_lines(snapshot):
        print(line, file=sys.stderr)


def _explain(options: argparse.Namespace) -> int:
    if options.pid is not None or options.all:
        return _explain_processes(options)
    if options.inventory or options.runtime or options.env:
        return _explain_environment(options)
    names = [entry.name for entry in load_settings(options.config_file).fleets]
    if options.fleet and names and not any(map(placeholders, names)) and options.fleet.partition("/")[0] not in names:
        raise _unknown_fleet(options.fleet, names)
    snapshot = _snapshot(options, complete=True)
    return _explain_fleets(snapshot, options.fleet)


def _explain_fleets(snapshot: Snapshot, name: str | None) -> int:
    """Each fleet under each runtime, or those of one name; what one fleet was split into counts as its."""
    names = [entry.fleet for entry in snapshot.mappings]
    mappings = [entry for entry in snapshot.mappings if name in (None, entry.fleet, entry.fleet.rpartition("/")[0])]
    if not mappings:
        raise _unknown_fleet(name, sorted(set(names)))
    _print_troubles(snapshot)
    inventory = Inventory(snapshot.devices)
    seen = {fleet.name: reports.seen_of(fleet) for fleet in snapshot.fleets}
    for entry in mappings:
        told = seen.pop(entry.fleet, ())  # once, for all of its runtimes
        sys.stdout.write(reports.explain(entry.fleet, entry.runtime, entry.outcome, inventory, told))
    return int(any(isinstance(entry.outcome, Refusal) for entry in mappings))


def _explain_processes(options: argparse.Namespace) -> int:
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
    if options.pid is not None:
        if found == [None]:
            why = f"seen: {hidden}" if hidden else "running, or it is the kernel's own"
            raise CouldNot(f"explain: no process {options.pid} is {why}")
        snapshot = _snapshot(options, complete=True, others=[fleet for fleet in found if fleet])
        return _explain_fleets(snapshot, f"pid-{options.pid}")
    if hidden:
        print(f"{PROGRAM}: explain: {hidden}", file=sys.stderr)
    return _explain_fleets(_snapshot(options, complete=True, others=[fleet for fleet in found if fleet]), None)


def _fleet_of(scanner: Scanner, pid: int, entry: FleetSettings, options: argparse.Namespace) -> Fleet | None:
    fleet = scanner.of_process(msgspec.structs.replace(entry, name=f"pid-{pid}"), pid)
    return None if fleet is None else msgspec.structs.replace(fleet, known=_facts(options.known or []))


def _unknown_fleet(name: str | None, known: Sequence[str]) -> InputError:
    return InputError(f"explain: found fleet '{name}', expected one of {', '.join(known)}")


def _explain_environment(options: argparse.Namespace) -> int:
    """An environment given on the command line, over a saved inventory or this host's devices."""
    runtime, env = _runtime(options.runtime), _environment(options.env or [])
    vendors = masks.RUNTIMES[runtime].vendors
    reach, versions = None, dict.fromkeys(vendors, options.driver_version)
    if options.inventory:
        inventory, reach = from_rows(read_rows(options.inventory), (*vendors, "nvidia")[0])
    else:
        snapshot = _snapshot(options)
        _print_troubles(snapshot)
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
    sys.stdout.write(reports.explain(options.fleet or "command line", runtime, outcome, inventory))
    return int(isinstance(outcome, Refusal))


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


def _check_config(options: argparse.Namespace) -> int:
    if options.file is None and options.web_config_file is None:
        raise InputError("check-config: expected a settings file, or --web.config.file=FILE")
    if options.file is not None:
        settings = load_settings(options.file)
        fleets = f"{len(settings.fleets)} fleets" if len(settings.fleets) != 1 else "1 fleet"
        print(f"{options.file}: valid, {fleets}")
    if options.web_config_file is not None:
        front.check(options.web_config_file)
        print(f"{options.web_config_file}: valid web configuration")
    return 0
