"""The command line; the only place that prints and that chooses an exit status. Commands of some size are files of
their own, which give it what is to be printed.

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

import yaml

from exporter import logs, one_cycle, reports, systemd
from exporter.arguments import PROGRAM, parser
from exporter.collectors import ReloadStatus, encoder_for, registry_of, render
from exporter.daemon import Daemon, Options, load_settings
from exporter.errors import CouldNot, ExporterError, InputError
from exporter.inventory import Inventory
from exporter.web import front
from exporter.web.server import check_address


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
        "doctor": _doctor,
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
        check_address(address)
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


def _once(options: argparse.Namespace) -> int:
    settings = load_settings(options.config_file)
    snapshot = one_cycle.snapshot(options, complete=True, settings=settings)
    reload, prefix = ReloadStatus(True, time.time()), settings.metrics.prefix
    page = render(registry_of(snapshot, reload, process=False, prefix=prefix), encoder_for("")[0])
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
    snapshot = one_cycle.snapshot(options)
    for line in reports.trouble_lines(snapshot):
        _tell(line)
    if not snapshot.devices:
        raise CouldNot("no GPU was found on this host")
    if options.format == "yaml" and snapshot.incomplete:
        raise CouldNot("an inventory that is not whole is not saved: it would explain index masks wrongly")
    if options.format == "yaml":
        from exporter.saved_inventory import to_rows

        rows = to_rows(Inventory(snapshot.devices))
        yaml.safe_dump(rows, sys.stdout, sort_keys=False, default_flow_style=False, width=1000)
    else:
        sys.stdout.write(reports.inventory_table(snapshot.devices, snapshot.states))
    return int(bool(snapshot.incomplete))


def _tell(line: str) -> None:
    print(line, file=sys.stderr)


def _explain(options: argparse.Namespace) -> int:
    from exporter import explaining  # a MiB, with doctor, that the daemon does not pay

    explained = explaining.explain(options, _tell)
    sys.stdout.write(explained.text)
    return int(explained.refused)


def _doctor(options: argparse.Namespace) -> int:
    from exporter import doctor

    _daemon_options(options)  # which are to be right for the daemon
    findings = doctor.examine(options)
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    as_json = options.format == "json"
    sys.stdout.write(doctor.as_json(findings) if as_json else doctor.as_text(findings, coloured=coloured))
    return int(doctor.worst(findings) == "FAIL")


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
