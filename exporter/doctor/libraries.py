"""From which file a vendor's library is loaded, as the dynamic loader of this user finds it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from exporter.doctor.apart import Script, Told
from exporter.doctor.seen import in_seconds
from exporter.vendors import VENDORS

_SECONDS = 3.0
_VERSION = re.compile(r"\.so\.([0-9]+\.[0-9.]*[0-9])$")
# It is loaded and not started, so no card is opened. The name by which it was found may be a link.
_LOAD = """
import ctypes, os, sys
def load(names):
    said = "it was not looked for"
    for name in names:
        before = set(open("/proc/self/maps"))
        try:
            ctypes.CDLL(name)
        except OSError as error:
            said = str(error)
            continue
        new = [line for line in open("/proc/self/maps") if line not in before and "/" in line]
        files = [line.split(maxsplit=5)[5].strip() for line in new]
        stem = name.rpartition("/")[2].partition(".")[0]
        return next((path for path in files if stem in path.rpartition("/")[2]), name)
    return "\\n" + said
os.write(1, os.fsencode(load(sys.argv[1:])))
"""


class Library(NamedTuple):
    """``path`` is empty where it cannot be loaded, for which ``error`` has the loader's words. ``version`` is what the
    file's name says, empty where it says none.
    """

    path: str = ""
    version: str = ""
    error: str = ""


def look(wanted: Mapping[str, str | None]) -> dict[str, Library]:
    """The library of each vendor, from the file that is given for it, or from where its package looks. A library that
    hangs or crashes while it is loaded does so in a process of its own.
    """
    scripts = {vendor: Script(_LOAD, list(_names(vendor, file))) for vendor, file in wanted.items()}
    until = in_seconds(_SECONDS)
    return {vendor: _library(script.told(until)) for vendor, script in scripts.items()}


def _names(vendor: str, file: str | None) -> Iterator[str]:
    if file is not None:
        yield file
        return
    library = VENDORS[vendor].shared_object or ""
    if vendor == "amd":
        roots = (os.environ.get("ROCM_HOME"), os.environ.get("ROCM_PATH"), "/opt/rocm")
        yield from (f"{root}/lib/{library}" for root in roots if root)
    yield library


def _library(told: Told) -> Library:
    if not told.ended:
        return Library(error=f"loading it has not come to an end in {_SECONDS:g} seconds")
    if not told.lines:
        return Library(error="the process that loads it died")
    path = told.lines[0]
    if not path:
        return Library(error=" ".join(told.lines[1:]))
    real = os.path.realpath(path)
    found = _VERSION.search(real)
    return Library(path=real, version=found[1] if found else "")
