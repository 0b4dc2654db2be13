"""The pretend NVML's other half: builds ``libnvidia-ml.so.1`` from ``nvml.c`` and writes the file that drives it.

``nvml.c`` says what a line of that file means. A program sees the pretend cards when it is started with
:meth:`FakeNvml.environment` in its environment; the dynamic loader reads ``LD_LIBRARY_PATH`` only then, so setting it
inside a running process does nothing.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tests.fakes import shared_object
from tests.fakes.shared_object import BuildError, CompilerMissingError

__all__ = [
    "CALLS",
    "FIELDS",
    "GIB",
    "LINK_FIELDS",
    "MIB",
    "MOST_EQUAL_CARDS",
    "SONAME",
    "SOURCE",
    "BuildError",
    "CompilerMissingError",
    "FakeNvml",
    "Gpu",
    "Mig",
    "build",
    "build_or_skip",
    "equal_cards",
    "watched_cards",
]

NAME = "pretend NVML"
SONAME = "libnvidia-ml.so.1"
SOURCE = Path(__file__).with_name("nvml.c")
_TEXTS = (SOURCE.read_text(), SOURCE.with_name("nvml_watched.h").read_text())
CALLS = frozenset(re.findall(r"^(?:[A-Z]+_)?(?:CALL|EXPORTED)\((nvml\w+)", "\n".join(_TEXTS), re.MULTILINE))
"""Every symbol that the library exports, and so every CALL that a rule may name beside ``*``."""

GIB = 1 << 30
MIB = 1 << 20
MOST_EQUAL_CARDS = 37


def build(directory: Path, without: Sequence[str] = ()) -> Path:
    """``directory``, which now holds the library without the symbols ``without``: what an older driver lacks."""
    shared_object.check_known(NAME, without, CALLS)
    cc = shared_object.compiler()
    switches = [
        *shared_object.shared(SONAME),
        f"-I{_header_directory()}",
        *(f"-DWITHOUT_{symbol}" for symbol in without),
    ]
    return shared_object.compiled(cc, SOURCE, directory / SONAME, switches).parent


def build_or_skip(directory: Path, without: Sequence[str] = ()) -> Path:
    """As :func:`build`; where there is no C compiler the test is skipped with the reason, but fails if ``CI=true``."""
    return shared_object.built_or_skipped(NAME, lambda: build(directory, without))


def _header_directory() -> Path:
    """Where NVIDIA's ``nvml.h`` is: the folder has the CUDA version in its name, so the newest of them."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec is not None else None
    headers = sorted(header for root in roots or () for header in Path(root).glob("*/include/nvml.h"))
    if not headers:
        raise BuildError("no nvml.h: pip install nvidia-nvml-dev")
    return headers[-1].parent


@dataclass(frozen=True, kw_only=True)
class Mig:
    """A part of a card in MIG mode. What is None is left out, and the call that needs it answers NOT_SUPPORTED."""

    index: int
    uuid: str | None = None
    gi: int | None = None
    ci: int | None = None
    name: str | None = None
    total: int | None = None
    free: int | None = None
    used: int | None = None
    util: int | None = None
    mps: int | None = None
    gpm: int | None = None
    gpm_sm: int | None = None
    gpm_tensor: int | None = None
    gpm_memory: int | None = None


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A card; its ``index`` is its position in the list unless given. What is None is left out, as in :class:`Mig`.

    ``used`` is without ``reserved``, as NVML's second version counts; the first version's answer is their sum.
    """

    index: int | None = None
    uuid: str | None = None
    pci: str | None = None
    name: str | None = None
    minor: int | None = None
    total: int | None = None
    free: int | None = None
    used: int | None = None
    reserved: int | None = None
    util: int | None = None
    temp: int | None = None
    mig: Literal[0, 1, "none"] | None = None
    encoder: int | None = None
    decoder: int | None = None
    sm_clock: int | None = None
    memory_clock: int | None = None
    max_sm_clock: int | None = None
    max_memory_clock: int | None = None
    power: int | None = None
    limit: int | None = None
    default_limit: int | None = None
    max_limit: int | None = None
    fans: int | None = None
    fan: int | None = None
    pstate: int | None = None
    reasons: int | None = None
    supported: int | None = None
    shutdown: int | None = None
    slowdown: int | None = None
    memory_max: int | None = None
    gpu_max: int | None = None
    sent: int | None = None
    received: int | None = None
    gpm: int | None = None
    gpm_sm: int | None = None
    gpm_tensor: int | None = None
    gpm_memory: int | None = None
    xids: Literal[1] | None = None
    fields: tuple[str, ...] = ()
    instances: tuple[Mig, ...] = ()


DRIVER = "580.95.05"


class FakeNvml(shared_object.StateFile):
    """The state file in ``directory``, for the library that :func:`build` put there, or else in ``library``.

    Once it is removed every call but ``nvmlShutdown`` answers DRIVER_NOT_LOADED.
    """

    def __init__(self, directory: Path, library: Path | None = None) -> None:
        super().__init__(directory / "nvml.state")
        self.folder = library or directory

    def environment(self) -> dict[str, str]:
        """What a program's environment needs at its start, to be laid over ``os.environ``."""
        return {"LD_LIBRARY_PATH": shared_object.search_path(self.folder), "FAKE_NVML_STATE": str(self.state_path)}

    def write(
        self,
        gpus: Sequence[Gpu],
        *,
        driver: str | None = DRIVER,
        count: int | None = None,
        lines: Sequence[str] = (),
    ) -> None:
        """Makes this the state, all at once: running programs see it at their next call, and in a hanging one."""
        self.put([*_head(driver, count), *_cards(gpus), *shared_object.checked(NAME, lines, CALLS)])


def equal_cards(count: int) -> tuple[Gpu, ...]:
    """L40S cards that differ only in what tells which one they are: every number of a card encodes its index."""
    if count > MOST_EQUAL_CARDS:
        raise ValueError(f"free memory can tell {MOST_EQUAL_CARDS} cards apart, not {count}")
    return tuple(_equal_card(index, count) for index in range(count))


def _equal_card(index: int, count: int) -> Gpu:
    total, free, reserved = 48 * GIB, (10 + index) * GIB, 512 * MIB
    return Gpu(
        uuid=f"GPU-{'abcdef0123456789'[index % 16] * 8}-0000-4000-8000-{index:012x}",
        pci=f"{index // 7:08x}:{0x21 + 0x20 * (index % 7):02x}:00.0",
        name="NVIDIA L40S",
        minor=count - 1 - index,
        total=total,
        free=free,
        used=total - free - reserved,
        reserved=reserved,
        util=10 * (index % 10 + 1),
        temp=40 + index,
        mig="none",
    )


def watched_cards(count: int) -> tuple[Gpu, ...]:
    """Equal cards that tell all that NVML can of a card without MIG: every number of a card encodes its index."""
    return tuple(_watched(gpu, index) for index, gpu in enumerate(equal_cards(count)))


FIELDS = {
    186: 71_250,
    190: 300_000,
    189: 350_000,
    188: 400_000,
    83: 5_000_500,
    82: 60,
    94: 3,
    197: 1 << 40,
    198: 1 << 41,
    1: 1,
    3: 11,
    4: 21,
    5: 31,
    6: 41,
    29: 51,
    30: 61,
    31: 0,
    142: 71,
    143: 81,
    144: 1,
    145: 0,
    230: 1,
    91: 2,
    74: 1_000_000_000,
    76: 2_000_000_000,
    77: 6_000_000_000,
    79: 7_000_000_000,
    269: 3_000_000_000,
    270: 4_000_000_000,
    271: 5_000_000_000,
}
"""What the first of :func:`watched_cards` says in each field; others say more by their index, but of switches."""

LINK_FIELDS = {165: 1, 138: 1000, 139: 2000, 161: 5, 162: 6, 163: 7}
"""The same, of its first link; the other says 100 more."""

_SWITCHES = (1, 31, 91, 144, 145, 165, 230)


def _watched(gpu: Gpu, index: int) -> Gpu:
    board = [f"{number} {value + (0 if number in _SWITCHES else index)}" for number, value in FIELDS.items()]
    links = [
        f"{number} {value + (0 if number in _SWITCHES else 100 * link + index)} link={link}"
        for number, value in LINK_FIELDS.items()
        for link in range(2)
    ]
    return replace(
        gpu,
        encoder=1 + index,
        decoder=11 + index,
        sm_clock=1500 + index,
        memory_clock=9000 + index,
        max_sm_clock=2500 + index,
        max_memory_clock=9500 + index,
        fans=1,
        fan=30 + index,
        pstate=index,
        reasons=0x4 | 0x20,
        supported=0x1FF,
        shutdown=100,
        slowdown=95,
        memory_max=93,
        gpu_max=90,
        sent=1000 + index,
        received=2000 + index,
        xids=1,
        fields=(*board, *links),
    )


def _head(driver: str | None, count: int | None) -> Iterator[str]:
    if driver is not None:
        yield f"driver {shared_object.quoted(driver)}"
    if count is not None:
        yield f"count {count}"


def _cards(gpus: Sequence[Gpu]) -> Iterator[str]:
    for position, gpu in enumerate(gpus):
        index = position if gpu.index is None else gpu.index
        yield shared_object.device_line("gpu", index, device=gpu, without={"index", "instances", "fields"})
        yield from (f"field {index} {field}" for field in gpu.fields)
        for part in gpu.instances:
            yield shared_object.device_line("mig", index, part.index, device=part, without={"index"})
