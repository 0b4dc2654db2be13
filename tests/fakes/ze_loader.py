"""The pretend Level Zero loader's other half: builds ``libze_loader.so.1`` and writes the file that drives it.

``ze_loader.c`` says what a line of that file means. The real ``pyzes`` looks for the loader at one path of the system,
:data:`PYZES_PATH`, whatever ``LD_LIBRARY_PATH`` says. So a program sees the pretend GPUs when it is started with
:meth:`FakeZeLoader.environment` in its environment by the command line that :meth:`FakeZeLoader.placed` makes, which
needs root; or when it loads :attr:`FakeZeLoader.shared_object` itself before it imports ``pyzes``, by :data:`REDIRECT`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fakes import shared_object
from tests.fakes.shared_object import BuildError, CompilerMissingError, fail_in_ci_else_skip

__all__ = [
    "CALLS",
    "OLD_LOADER_LACKS",
    "PYZES_PATH",
    "REDIRECT",
    "SONAME",
    "SOURCE",
    "BuildError",
    "CompilerMissingError",
    "Engine",
    "Errors",
    "FakeZeLoader",
    "Fan",
    "Frequency",
    "Gpu",
    "Memory",
    "Power",
    "Temperature",
    "build",
    "build_or_skip",
    "fail_in_ci_else_skip",
    "layouts",
    "place_or_skip",
]

NAME = "pretend loader"
SONAME = "libze_loader.so.1"
PYZES_PATH = Path("/usr/lib/x86_64-linux-gnu") / SONAME
SOURCE = Path(__file__).with_name("ze_loader.c")
CALLS = frozenset(re.findall(r"^(?:[A-Z]+_)?CALL\((zes\w+)", SOURCE.read_text(), re.MULTILINE))
"""Every symbol that the library exports, and so every CALL that a rule may name beside ``*``."""

OLD_LOADER_LACKS = ("zesDeviceGet", "zesDeviceGetSubDevicePropertiesExp", "zesDriverGet", "zesInit")
"""What a loader of before ``zesInit`` lacks, such as Debian 12's: for ``without``."""

REDIRECT = """
import ctypes
def _redirected(name, *rest, _real=ctypes.CDLL, **named):
    return _real({library!r} if "ze_loader" in str(name) else name, *rest, **named)
ctypes.CDLL = _redirected
"""
"""Python code, to be formatted with ``library``: after it ``import pyzes`` loads that file, without root."""

_PLACE = 'mount -t overlay overlay -o "lowerdir=$1:$2" "$2" && shift 2 && exec "$@"'


def build(directory: Path, without: Sequence[str] = ()) -> Path:
    """The library, now in ``directory``, without the symbols ``without``: what an older loader lacks."""
    shared_object.check_known(NAME, without, CALLS)
    switches = [*shared_object.shared(SONAME), *(f"-DWITHOUT_{symbol}" for symbol in without)]
    return shared_object.compiled(shared_object.compiler(), SOURCE, directory / SONAME, switches)


def build_or_skip(directory: Path, without: Sequence[str] = ()) -> Path:
    """As :func:`build`; without a C compiler or pyzes the test is skipped with the reason, but fails if ``CI=true``."""
    if importlib.util.find_spec("pyzes") is None:
        fail_in_ci_else_skip("no pretend Level Zero loader: no pyzes to load it (pip install pyzes)")
    return shared_object.built_or_skipped("pretend Level Zero loader", lambda: build(directory, without))


def layouts(directory: Path) -> dict[str, dict[str, tuple[int, int]]]:
    """For each struct of the C side its members' offsets and sizes; its own size stands under ``-``."""
    program = shared_object.compiled(shared_object.compiler(), SOURCE, directory / "layouts", ["-DLAYOUTS"])
    output = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for struct, member, offset, size in map(str.split, output.splitlines()):
        found.setdefault(struct, {})[member] = (int(offset), int(size))
    return found


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine group. What is None is left out, and the call that needs it answers UNSUPPORTED_FEATURE.

    ``active`` and ``timestamp`` are microseconds; with a ``rate`` they move, ``active`` at that share of the clock.
    """

    group: str | None = "ALL"
    sub: int = -1
    active: int | None = 0
    timestamp: int | None = 0
    rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """A memory module, in bytes. ``physical=0`` is Sysman's "not known"; None is left out, as in :class:`Engine`.

    Of the bandwidth ``most`` is bytes a second, and ``timestamp`` microseconds.
    """

    location: str | None = "DEVICE"
    sub: int = -1
    physical: int | None = 0
    size: int | None = None
    free: int | None = None
    read: int | None = None
    written: int | None = None
    most: int | None = None
    timestamp: int | None = None


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """A temperature sensor. What is None is left out, as in :class:`Engine`."""

    sensor: str | None = "GPU"
    sub: int = -1
    celsius: float | None = None


@dataclass(frozen=True, kw_only=True)
class Frequency:
    """A frequency domain, in MHz. Without ``request`` or ``highest`` the answer is -1, and without ``actual`` none."""

    domain: str = "GPU"
    sub: int = -1
    actual: float | None = None
    request: float | None = None
    highest: float | None = None


@dataclass(frozen=True, kw_only=True)
class Power:
    """A power domain: microjoules and microseconds; with a ``rate`` in watts they move, as in :class:`Engine`.

    The limits are milliwatts; without a ``default_limit`` the answer is -1.
    """

    domain: str = "UNKNOWN"
    sub: int = -1
    energy: int | None = None
    timestamp: int | None = 0
    rate: float | None = None
    limit: int | None = None
    default_limit: int | None = None
    limited: int | None = None


@dataclass(frozen=True, kw_only=True)
class Fan:
    """A fan, in revolutions per minute."""

    sub: int = -1
    rpm: int | None = None


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Hardware errors of a type, by category; ``unfilled`` categories are counted and not told."""

    type: str = "CORRECTABLE"
    sub: int = -1
    unfilled: int | None = None
    reset: int | None = None
    programming: int | None = None
    driver: int | None = None
    compute: int | None = None
    non_compute: int | None = None
    cache: int | None = None
    display: int | None = None
    memory: int | None = None
    scale: int | None = None
    l3_fabric: int | None = None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A device; its ``index`` is its position in the list unless given, and a part's is its position in its tuple.

    What is None is left out, as in :class:`Engine`. A device is the same one as before while its ``bdf`` is, so handles
    stay with their device when the order changes.
    """

    index: int | None = None
    driver: int | None = None
    bdf: str | None = None
    name: str | None = None
    device_id: int | None = None
    integrated: bool | None = None
    subdevices: int | None = None
    type: str | None = None
    uuid: str | None = None
    engines: tuple[Engine, ...] = ()
    memory: tuple[Memory, ...] = ()
    temperatures: tuple[Temperature, ...] = ()
    frequencies: tuple[Frequency, ...] = ()
    powers: tuple[Power, ...] = ()
    fans: tuple[Fan, ...] = ()
    errors: tuple[Errors, ...] = ()


_PARTS = {
    "engine": "engines",
    "memory": "memory",
    "temperature": "temperatures",
    "frequency": "frequencies",
    "power": "powers",
    "fan": "fans",
    "ras": "errors",
}


class FakeZeLoader(shared_object.RecordedState):
    """The state file and the record in ``directory``, for the file ``library`` that :func:`build` made.

    Once the file is removed every call answers UNINITIALIZED.
    """

    def __init__(self, directory: Path, library: Path) -> None:
        super().__init__(directory / "ze_loader.state")
        self.shared_object = library
        self._overlay = directory / "ze_loader.overlay"

    def environment(self) -> dict[str, str]:
        """What a program's environment needs, to be laid over ``os.environ``."""
        return {"FAKE_ZE_STATE": str(self.state_path), "FAKE_ZE_RECORD": str(self.record_path)}

    def placed(self, command: Sequence[str]) -> list[str]:
        """The command line that runs ``command`` where the library is at pyzes's path, for itself and its children.

        It needs root. The system's folder is overlaid in a mount namespace that ends with the program, so that nothing
        else sees it and nothing remains; the process keeps its id, and signals reach the program itself.
        """
        self._overlay.mkdir(exist_ok=True)
        shutil.copy2(self.shared_object, self._overlay / SONAME)
        namespace = ["unshare", "--mount", "--propagation", "private"]
        return [*namespace, "sh", "-c", _PLACE, "sh", str(self._overlay), str(PYZES_PATH.parent), *command]

    def write(self, gpus: Sequence[Gpu], *, drivers: int = 1, lines: Sequence[str] = ()) -> None:
        """Makes this the state, all at once: running programs see it at their next call, and in a hanging one."""
        self.put([f"drivers {drivers}", *_devices(gpus), *shared_object.checked(NAME, lines, CALLS)])


def place_or_skip(fake: FakeZeLoader) -> None:
    """Where :meth:`FakeZeLoader.placed` cannot work the test is skipped with the reason, but fails if ``CI=true``."""
    if os.geteuid() != 0:
        fail_in_ci_else_skip(f"only root can place a library at {PYZES_PATH}")
    if shutil.which("unshare") is None or not PYZES_PATH.parent.is_dir():
        fail_in_ci_else_skip(f"no unshare (util-linux), or no {PYZES_PATH.parent} to place a library in")
    result = subprocess.run(fake.placed(["true"]), capture_output=True, text=True, check=False)
    if result.returncode:
        fail_in_ci_else_skip(f"no private overlay over {PYZES_PATH.parent}: {result.stderr.strip()}")


def _devices(gpus: Sequence[Gpu]) -> Iterator[str]:
    for position, gpu in enumerate(gpus):
        index = position if gpu.index is None else gpu.index
        yield shared_object.device_line("gpu", index, device=gpu, without={"index", *_PARTS.values()})
        for word, parts in _PARTS.items():
            for number, part in enumerate(getattr(gpu, parts)):
                yield shared_object.device_line(word, index, number, device=part, without=())
