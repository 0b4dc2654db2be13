"""Every error code of every call, every error of every file, and answers that are no answers: one page for each."""

from __future__ import annotations

import errno
import importlib.util
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.fakes.mirror import Link
from tests.faults.expectation import WELL, Expect
from tests.faults.matrix import Act, Scene
from tests.faults.partitions import DPX
from tests.faults.sweep import Step, Sweep
from tests.truth import Broken, Host
from tests.truth_cards import (
    A0,
    A1,
    FREE,
    I0,
    I1,
    MEMORY,
    N0,
    N1,
    N2,
    READINGS,
    TEMPERATURE,
    TOTAL,
    USED,
    UTILIZATION,
    Pretend,
)


def _constants(package: str, pattern: str, file: str = "") -> dict[str, int]:
    """What a vendor's package calls its codes, read from its source: to import it would load a library."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).with_name(file or Path(spec.origin).name).read_text("utf-8")
    found = re.findall(rf"^\s*({pattern}\w+)\s*=\s*(?:\w+\()?(0x[0-9a-fA-F]+|[0-9]+)\)?", text, re.MULTILINE)
    assert len(found) > 10, package
    return {name: int(value, 0) for name, value in found}


def _one(card: Pretend, state: str = "ok", without: Collection[str] = (), maybe: Collection[str] = ()) -> Expect:
    return Expect(states={card: state}, without={card: without}, maybe={card: maybe})


# --- NVML

LOST, LIBRARY_LOST = 15, (1, 9, 18)  # uninitialised, driver not loaded, library and driver of different versions
OLDER_DRIVER = (3, 13, 25)  # not supported, no such function, no such version of its argument: there is another call
NONE_HERE = (2, 3, 4, 6, 13)
IDENTITY = ("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID")
ADDRESS = "nvmlDeviceGetPciInfo_v3"  # asked when a card is first seen, and when the bus has changed
FACTS = ("nvmlDeviceGetName", "nvmlDeviceGetMinorNumber", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMigMode")
VALUES = {
    "nvmlDeviceGetUtilizationRates": (UTILIZATION,),
    "nvmlDeviceGetMemoryInfo_v2": MEMORY,
    "nvmlDeviceGetTemperatureV": (TEMPERATURE,),
}


def _nvml_codes() -> list[int]:
    found = _constants("pynvml", "NVML_ERROR_").values()
    return sorted(set(found) - set(LIBRARY_LOST))


def _nvml(call: str, code: int, expect: Expect, first: Act | None = None) -> Step:
    def fault(scene: Scene) -> None:
        scene.truth.rules("nvidia", f"fault {call} 1 {code}")

    step = Step(f"{call} answers {code}", fault, expect)
    return step if first is None else step._replace(first=first)


def _nvml_values() -> Iterator[Step]:
    """A call that fails costs its readings; where an older driver has another call, that is asked."""
    for call, names in VALUES.items():
        for code in _nvml_codes():
            absent: Collection[str] = names
            if code in OLDER_DRIVER and call != "nvmlDeviceGetUtilizationRates":
                absent = (USED,) if call == "nvmlDeviceGetMemoryInfo_v2" else ()
            yield _nvml(call, code, _one(N1, "lost") if code == LOST else _one(N1, without=absent))


def _lose(scene: Scene) -> None:
    """What it is will be asked again once it is back."""
    scene.truth.rules("nvidia", "lost 1")


def _found_at(pci: str) -> Act:
    """It is back, and says to be there."""
    lines = {"nvidia": ()}
    return lambda scene: scene.truth.change(answers={N1.number: {"pci": pci}}, lines=lines)


def _nvml_identity() -> Iterator[Step]:
    """Without an identity there is no card."""
    for code in _nvml_codes():
        for call in IDENTITY:
            yield _nvml(call, code, _one(N1, "lost"))
        yield _nvml(ADDRESS, code, _one(N1, "lost"), first=_lose)


def _nvml_facts() -> Iterator[Step]:
    """What else is told of a card may be absent, and is not guessed."""
    for code in _nvml_codes():
        for call in FACTS:
            known = code in NONE_HERE
            yield _nvml(call, code, WELL if known else _one(N1, "lost|ok"), first=_lose)


def _answer(what: str, card: Pretend, expect: Expect, **values: Any) -> Step:
    return Step(what, lambda scene: scene.truth.change(answers={card.number: values}), expect)


ALL_ONES, ALL_ONES_32 = 2**64 - 1, 2**32 - 1


def _nvml_answers() -> Iterator[Step]:
    """Sentinels, absurd numbers and texts that are none are absent, and cost nothing else."""
    for value in (ALL_ONES_32, 4_000_000_000, 101, 65535):
        yield _answer(f"a utilization of {value}", N1, _one(N1, without=[UTILIZATION]), util=value)
    for value in (255, 510, 0, ALL_ONES_32, 2**31, 150):
        yield _answer(f"a temperature of {value}", N1, _one(N1, without=[TEMPERATURE]), temp=value)
    for value in (ALL_ONES, ALL_ONES_32, 2**63, 2**60):
        yield _answer(f"{value} bytes free", N1, _one(N1, without=[FREE], maybe=[USED]), free=value)
        yield _answer(f"{value} bytes used", N1, _one(N1, without=[USED]), used=value)
    for value in (ALL_ONES, 0, 2**62):
        yield _answer(f"{value} bytes in all", N1, _one(N1, without=MEMORY), total=value)
    yield _answer(
        "more free than there is", N1, _one(N1, without=[FREE], maybe=[USED, TOTAL]), free=N1.value(TOTAL, 0) + 1
    )
    yield _answer("a name that is no UTF-8", N1, WELL, name="L40S \udcff\udcfe")
    yield _answer("a name of nothing", N1, WELL, name="")
    for uuid in ("", "GPU", "nonsense", "\udcff\udcfe", "N/A"):
        yield _answer(f"a UUID {uuid!a}", N1, _one(N1, "lost"), uuid=uuid)
    twice = Expect(states={N0: "lost", N1: "lost|gone"})
    yield _answer("another card's UUID", N1, twice, uuid=N0.uuid)
    for pci in ("", "nonsense", "41", "\udcff", "00000000:zz:00.0"):
        yield Step(f"an address {pci!a}", _found_at(pci), _one(N1, "lost"), first=_lose)
    unknown = dict.fromkeys(("util", "temp", "free", "used", "total", "reserved", "name", "minor"))
    yield _answer("nothing is supported", N1, _one(N1, "ok|lost", without=READINGS), **unknown)


# --- Sysman


def _rule(vendor: str, rule: str) -> Act:
    return lambda scene: scene.truth.rules(vendor, rule)


ZE_LOST, ZE_ASLEEP = (0x70000001, 0x70000006), 0x70000007
ZE_VALUES: Mapping[str, Sequence[str]] = {"zesEngineGetActivity": (UTILIZATION,), "zesMemoryGetState": MEMORY}


def _ze_codes() -> list[int]:
    return sorted({value for value in _constants("pyzes", "ZE_RESULT_").values() if 0 < value < 2**31 - 1})


def _ze_values() -> Iterator[Step]:
    """As NVML's; the total may be known without the state, and the utilization by the card's clients."""
    for call, names in ZE_VALUES.items():
        for code in _ze_codes():
            absent, maybe = (names, ()) if call == "zesEngineGetActivity" else ((FREE, USED), (TOTAL,))
            state = "lost" if code in ZE_LOST else "asleep" if code == ZE_ASLEEP else "ok"
            expect = _one(I0, state, maybe=(*absent, *maybe)) if state == "ok" else _one(I0, state)
            if state == "ok" and call == "zesMemoryGetState":
                expect = _one(I0, without=absent, maybe=maybe)
            rule = f"fault {call} 0 {code}"
            yield Step(f"{call} answers {code:#x}", _rule("intel", rule), expect)


def _ze_answers() -> Iterator[Step]:
    some = _one(I0, without=[FREE, USED], maybe=[TOTAL])
    yield _answer("more free than there is", I0, some, free=I0.value(TOTAL, 0) + 1)
    yield _answer("all is free, which no card is", I0, some, free=I0.value(TOTAL, 0))
    for value in (ALL_ONES, ALL_ONES_32, 2**60, 2**63):
        yield _answer(f"{value} bytes free", I0, some, free=value)
        yield _answer(f"{value} bytes in all", I0, some, size=value)
    yield _answer("no bytes in all", I0, some, size=0)


# --- AMD SMI, which tells what partitions do

PART = DPX.parts[1]
PLACE = 2  # of AMD SMI's processors: behind the first card, and the first partition


def _smi_values() -> Iterator[Step]:
    """A partition's activity is absent; its board, its neighbour and all other cards are well."""
    codes = _constants("amdsmi", "AMDSMI_STATUS_", "amdsmi_wrapper.py")
    for code in sorted({value for value in codes.values() if value}):
        rule = f"fault amdsmi_get_gpu_activity {PLACE} {code}"
        expect = _one(PART, "ok|lost", without=[UTILIZATION])
        yield Step(f"the activity answers {code}", _rule("amd", rule), expect)


# --- files of the kernel

GARBAGE = (
    "N/A\n",
    "-1\n",
    "101\n",
    "4294967295\n",
    "99999999999999999999999\n",
    "0x1f\n",
    "42 %\n",
    "1e1\n",
    "\n",
    "4 2\n",
)
HOT = ("255000\n", "510000\n", "0\n", "-273150\n", "2147483647\n", "N/A\n", "50.5\n")
NUMBERS = (
    *(errno.EIO, errno.EINVAL, errno.ENODATA, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM, errno.ETIMEDOUT),
    *(errno.EBUSY, errno.ENOMEM, errno.EAGAIN, errno.EREMOTEIO, errno.ESTALE, errno.ERANGE),
)
NOT_OFFERED, GONE = (errno.EINVAL, errno.ENODATA, errno.EOPNOTSUPP), (errno.ENODEV, errno.ENXIO)


def _file(card: Pretend, name: str, how: Broken | int, expect: Expect) -> Step:
    """``how`` may be the number of an error that a read ends in."""

    def inflict(scene: Scene) -> None:
        broken: Broken = scene.sick.link(f"error-{how}") if isinstance(how, int) else how
        scene.truth.break_file(card, name, broken)

    assert not isinstance(how, Link)
    what = errno.errorcode[how] if isinstance(how, int) else repr(how)
    return Step(f"{name} of card {card.number}: {what}", inflict, expect)


def _files(
    card: Pretend, name: str, names: Sequence[str], texts: Sequence[str], maybe: Sequence[str] = ()
) -> Iterator[Step]:
    """Where the kernel does not offer a value a library may, which tells the truth too."""
    faults: tuple[Broken | int, ...] = ("eio", "empty", *texts, *NUMBERS)
    for how in faults:
        offered = how not in NOT_OFFERED
        lacks = _one(card, without=names, maybe=maybe) if offered else _one(card, maybe=(*names, *maybe))
        yield _file(card, name, how, lacks)
    yield _file(card, name, "missing", _one(card, maybe=(*names, *maybe)))
    for how in GONE:
        yield _file(card, name, how, _one(card, "lost"))


def _amd_files() -> Iterator[Step]:
    yield from _files(A0, "gpu_busy_percent", [UTILIZATION], GARBAGE)
    used = ("N/A\n", "-1\n", f"{ALL_ONES}\n", f"{2**60}\n", f"{A0.value(TOTAL, 0) + 1}\n", "1 2\n")
    yield from _files(A0, "mem_info_vram_used", [FREE, USED], used, maybe=[TOTAL])
    total = ("N/A\n", "-1\n", f"{ALL_ONES}\n", "0\n", f"{2**60}\n")
    yield from _files(A0, "mem_info_vram_total", MEMORY, total)
    yield from _files(A0, "hwmon/*/temp1_input", [TEMPERATURE], HOT)
    for name in ("unique_id", "product_name", "current_compute_partition", "vendor", "class", "power/runtime_status"):
        for how in ("eio", "empty", "missing", errno.EINVAL, errno.EACCES):
            yield _file(A0, name, how, WELL)  # what a card is was known before


def _intel_files() -> Iterator[Step]:
    yield from _files(I1, "hwmon/*/temp2_input", [TEMPERATURE], HOT)
    for name in ("vendor", "class", "power/runtime_status"):
        for how in ("eio", "empty", "missing", errno.EINVAL, errno.EACCES):
            yield _file(I1, name, how, WELL)
    for how in ("eio", "empty", "nonsense\n", errno.EACCES, "missing", errno.EINVAL):
        yield _file(I1, "device", how, _one(I1, "lost"))


ROWS = [
    Sweep(name="each code of each call for a value: nvidia", vendor="nvidia", steps=lambda: [*_nvml_values()]),
    Sweep(name="each code of each call for who a card is: nvidia", vendor="nvidia", steps=lambda: [*_nvml_identity()]),
    Sweep(name="each code of each call for what a card is: nvidia", vendor="nvidia", steps=lambda: [*_nvml_facts()]),
    Sweep(name="answers that are none: nvidia", vendor="nvidia", steps=lambda: [*_nvml_answers()]),
    Sweep(name="each code of each call for a value: intel", vendor="intel", steps=lambda: [*_ze_values()]),
    Sweep(name="answers that are none: intel", vendor="intel", steps=lambda: [*_ze_answers()]),
    Sweep(
        name="each code of a partition's activity: amd",
        vendor="amd",
        host=Host(cards=(N0, N1, N2, A0, DPX, A1, I0, I1)),
        steps=lambda: [*_smi_values()],
    ),
    Sweep(name="each error of each file: amd", vendor="amd", steps=lambda: [*_amd_files()]),
    Sweep(name="each error of each file: intel", vendor="intel", steps=lambda: [*_intel_files()]),
]
