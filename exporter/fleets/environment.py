"""The environment that a process was started with, of which only what chooses devices is kept.

Source: ``/proc/PID/environ``, which shows the memory in which the kernel put the environment at exec: a program that
sets its title may have written over it, and what a program changes for itself later is not in it.
"""

from __future__ import annotations

import re
from pathlib import Path

from exporter.fleets.processes import Stat
from exporter.masks import RUNTIMES

SLURM = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS")
"""The cards of a job step and of a job, by their numbers on the host; the step's count where both are set."""

MASKS = frozenset(variable for runtime in RUNTIMES.values() for variable in runtime.masks)
KEPT = frozenset(variable for runtime in RUNTIMES.values() for variable in runtime.variables)
"""All that is ever taken from an environment, beside :data:`SLURM` and what begins with a runtime's prefix."""

_NAMES = {name.encode(): name for name in (*KEPT, *SLURM)}
_PREFIXES = tuple(prefix.encode() for runtime in RUNTIMES.values() for prefix in runtime.prefixes)
_ENTRY = re.compile(rb"[^=\0\x01-\x20\x7f]+=")  # a blank is in a title, and in no name of a variable
_MOST_BYTES = 8 << 20  # Linux gives the arguments and the environment together 6 MiB at most by default


class OverwrittenError(Exception):
    """What is there is no environment any more."""


def read(procfs: str, process: Stat) -> dict[str, str]:
    """The variables of :data:`KEPT`, :data:`SLURM` and the prefixes that are set; what is no UTF-8 is surrogates.

    Raises ``OSError`` where it cannot be read, and :class:`OverwrittenError`, also where a part of it is missing: the
    kernel ends without a word where a part of the process's memory cannot be read.
    """
    folder = f"{procfs}/{process.incarnation.pid}"
    with Path(f"{folder}/environ").open("rb") as file:
        data = file.read(_MOST_BYTES)
    if len(data) != process.environment_bytes:
        raise OverwrittenError(f"{len(data)} bytes of {process.environment_bytes} can be read")
    _check_title(folder, process.argument_bytes)
    return parse(data)


def _check_title(folder: str, size: int) -> None:
    """Where the last argument does not end where it ended at the start, the kernel reads on into the environment."""
    with Path(f"{folder}/cmdline").open("rb") as file:
        arguments = file.read(size + 1)
    if size and (len(arguments) != size or not arguments.endswith(b"\0")):
        raise OverwrittenError("the process's title reaches into it")


def parse(data: bytes) -> dict[str, str]:
    """As :func:`read`, from the bytes. Of a variable that is set twice the first counts, as for ``getenv``."""
    if not data:
        return {}
    if not data.endswith(b"\0"):
        raise OverwrittenError("its last entry has no end")
    entries = data.removesuffix(b"\0").split(b"\0")
    if not all(map(_ENTRY.match, entries)):
        raise OverwrittenError("an entry of it is no NAME=VALUE")
    found: dict[str, str] = {}
    for entry in entries:
        name, _, value = entry.partition(b"=")
        known = _NAMES.get(name) or _begins_as(name)
        if known is not None and known not in found:
            found[known] = value.decode("utf-8", "surrogateescape")
    return found


def _begins_as(name: bytes) -> str | None:
    return name.decode("utf-8", "surrogateescape") if name.startswith(_PREFIXES) else None
