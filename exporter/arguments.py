"""The commands and flags."""

from __future__ import annotations

import argparse
from typing import Any

from exporter import __version__, logs, masks

PROGRAM = "gpu-fleet-exporter"


def _common(parser: argparse.ArgumentParser, **more: Any) -> None:
    """Flags that stand before or behind the command; ``more`` suppresses their defaults behind it."""
    parser.add_argument("--config.file", dest="config_file", metavar="FILE", help="settings (default: none)", **more)
    parser.add_argument("--log.level", dest="log_level", choices=list(logs.LEVELS), **more)
    parser.add_argument("--log.format", dest="log_format", choices=logs.FORMATS, **more)
    parser.add_argument("--path.sysfs", dest="sysfs", metavar="DIR", help="where sysfs is mounted (/sys)", **more)
    parser.add_argument("--path.procfs", dest="procfs", metavar="DIR", help="where procfs is mounted (/proc)", **more)


def _serving(parser: argparse.ArgumentParser, **more: Any) -> None:
    parser.add_argument(
        "--web.listen-address",
        dest="listen",
        metavar="ADDRESS",
        action="append",
        help="HOST:PORT, :PORT, unix:/PATH or unix:@NAME to serve on, repeatable (:10420, or the sockets of systemd)",
        **more,
    )
    parser.add_argument(
        "--web.systemd-socket",
        dest="systemd_socket",
        action="store_true",
        help="serve on the sockets that systemd hands over, and fail where it hands over none",
        **more,
    )
    parser.add_argument(
        "--web.telemetry-path", dest="telemetry_path", metavar="PATH", help="path of the metrics (/metrics)", **more
    )
    parser.add_argument(
        "--web.config.file",
        dest="web_config_file",
        metavar="FILE",
        help="TLS, accounts, headers and a rate, in the exporter-toolkit's format",
        **more,
    )
    parser.add_argument(
        "--web.max-requests",
        dest="max_requests",
        metavar="N",
        type=int,
        help="scrapes that may be answered at once, 503 beyond (0: any number)",
        **more,
    )
    parser.add_argument(
        "--web.enable-lifecycle", dest="lifecycle", action="store_true", help="allow POST /-/reload", **more
    )


_DEFAULTS = {
    "log_level": "info",
    "log_format": "logfmt",
    "sysfs": "/sys",
    "procfs": "/proc",
    "telemetry_path": "/metrics",
    "max_requests": 0,
}


def parser() -> argparse.ArgumentParser:
    """The command line's parser; the manual page is held to it."""
    top = argparse.ArgumentParser(prog=PROGRAM, description="Prometheus exporter for GPUs behind masks.")
    top.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    _common(top)
    _serving(top)
    top.set_defaults(**_DEFAULTS, command="serve")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", help="default: serve")
    behind = {"default": argparse.SUPPRESS}

    serve = commands.add_parser("serve", help="serve metrics until told to stop")
    _serving(serve, **behind)
    once = commands.add_parser("once", help="print one page and exit")
    once.add_argument("--output", metavar="FILE", help="write the page there, atomically, instead of printing it")
    inventory = commands.add_parser("inventory", help="print this host's devices")
    inventory.add_argument("--format", choices=("table", "yaml"), default="table")
    explain = commands.add_parser("explain", help="print which card is behind each index of a fleet, or why none is")
    explain.add_argument("fleet", nargs="?", metavar="FLEET", help="only this fleet of the settings")
    explain.add_argument("--inventory", metavar="FILE", help="a saved inventory, instead of this host's devices")
    explain.add_argument("--runtime", metavar="NAME", help=f"one of {', '.join(masks.RUNTIMES)}, with --env")
    explain.add_argument("--env", metavar="NAME=VALUE", nargs="+", action="extend", help="the workload's environment")
    explain.add_argument("--driver-version", metavar="VERSION", default="", help="of the saved inventory's host")
    explain.add_argument(
        "--known", metavar="FACT=VALUE", nargs="+", action="extend", help="of the workload: see docs/masks.md"
    )
    explain.add_argument("--pid", metavar="PID", type=int, help="a process, instead of the settings' fleets")
    explain.add_argument("--all", action="store_true", help="the settings' fleets, and every process that uses a GPU")
    doctor = commands.add_parser("doctor", help="look for what keeps readings from the page, and print what to do")
    _serving(doctor, **behind)
    doctor.add_argument("--format", choices=("text", "json"), default="text")
    for command in (serve, once, inventory, explain, doctor):
        _common(command, **behind)
    check = commands.add_parser("check-config", help="check a settings file, a web configuration or both, and exit")
    check.add_argument("file", metavar="FILE", nargs="?", help="a settings file")
    check.add_argument(
        "--web.config.file",
        dest="web_config_file",
        metavar="FILE",
        help="a web configuration",
        default=argparse.SUPPRESS,  # or one before the command would be forgotten
    )
    return top
