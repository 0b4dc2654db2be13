"""SYCL: ``ONEAPI_DEVICE_SELECTOR`` over the devices that the backend's own masks leave.

The selector filters and never reorders: devices stand as the backend enumerates them, tiles in the order of the terms
that ask for them. Read as libsycl does, which decides in a SYCL program; ``urDeviceGetSelected`` of Unified Runtime
refuses more. Source: intel/llvm, ``device_filter.cpp`` and ``platform_impl.cpp``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from exporter.inventory import Inventory
from exporter.masks import cuda, level_zero, rocm
from exporter.masks.affinity_mask import Visible
from exporter.masks.base import MISSING_AT_MOST, MOST_DEVICES, RefusedError, Runtime
from exporter.model import Context, DeviceKey, Evidence, Inversion, Layer, Refusal, Resolved

SELECTOR = "ONEAPI_DEVICE_SELECTOR"
_LEGACY = ("SYCL_DEVICE_FILTER", "SYCL_DEVICE_ALLOWLIST", "SYCL_CONFIG_FILE_NAME")
_LLAMA_CPP = "GGML_SYCL_"

_BACKENDS = ("level_zero", "opencl", "cuda", "hip", "native_cpu", "offload")
_KINDS = ("cpu", "gpu", "fpga", "host")
_NUMBER = re.compile(r"[ \t\n\v\f\r]*([+-]?)([0-9]+)")
_LOWER = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz")

# libsycl sorts the terms, and its sort keeps equal ones in order only up to this many.
_SORTED_STABLY = 16

_Number = int | Literal["*"]


class _Target(NamedTuple):
    """One device of a term: its backend (``*`` for all), a kind or a path of numbers and wildcards."""

    discards: bool
    backend: str
    kind: str
    path: tuple[_Number, ...]

    def among(self, backend: str) -> _Number | None:
        """The number of the GPU that the target means, or a part of which; ``*`` for any, None for none."""
        if self.backend not in ("*", backend) or self.kind not in ("", "gpu"):
            return None
        return self.path[0] if self.path else "*"


_ANYTHING = _Target(False, "*", "", ("*",))


class _Device(NamedTuple):
    """A device of the backend, with the keys of the tiles that it can be split into."""

    key: DeviceKey
    evidence: Evidence
    parts: tuple[DeviceKey, ...]


class _Process(NamedTuple):
    """What is asked about."""

    env: Mapping[str, str]
    inventory: Inventory
    context: Context


def invert(env: Mapping[str, str], inventory: Inventory, context: Context) -> Inversion | Refusal:
    """The devices that a SYCL process with this environment numbers 0..n-1 under one backend, Level Zero if unknown."""
    layers: list[Layer] = []
    try:
        chosen = _chosen(_Process(env, inventory, context), layers)
    except RefusedError as refusal:
        return Refusal(refusal.code, refusal.detail, tuple(layers))
    resolved = (Resolved(device.key, device.evidence, index) for index, device in enumerate(chosen))
    return Inversion(tuple(resolved), tuple(layers))


def _chosen(process: _Process, layers: list[Layer]) -> Sequence[_Device]:
    env, context = process.env, process.context
    legacy = next((name for name in _LEGACY if name in env), None)
    if legacy:
        raise RefusedError("legacy-selector", f"{legacy} is set, whose effect depends on the release")
    text, backend = env.get(SELECTOR), context.backend or "level_zero"
    try:
        targets = [_ANYTHING] if text is None else _targets(text)
    except RefusedError:
        layers.append(Layer(SELECTOR, text, None))
        raise
    accepted = any(not target.discards and target.backend in ("*", backend) for target in targets)
    in_parts = any(len(target.path) > 1 for target in targets)
    devices = _devices(backend, process, layers, in_parts) if accepted else []
    chosen = _selected(targets, backend, devices)
    ignored = _ignored(targets, backend, devices) if accepted else f"no term accepts devices of {backend}"
    layers.append(Layer(SELECTOR, text, len(chosen), ignored))
    if not chosen and backend == "level_zero" and context.opencl is not False:
        _check_opencl(targets, process)
    front_end = context.frontend or ("llama.cpp" if any(name.startswith(_LLAMA_CPP) for name in env) else None)
    if len(chosen) > 1 and front_end == "llama.cpp":
        raise RefusedError("frontend-order", "llama.cpp sorts its SYCL devices, and equal ones have no order")
    return chosen


def _devices(backend: str, process: _Process, layers: list[Layer], in_parts: bool) -> Sequence[_Device]:
    """What the backend enumerates, which its own masks have narrowed already."""
    if backend == "level_zero":
        return [_of_level_zero(device) for device in level_zero.visible(*process, layers, in_parts)]
    if backend not in ("cuda", "hip"):
        raise RefusedError("opencl-order-unknown", f"the order of the devices of {backend} is not established")
    outcome = (cuda if backend == "cuda" else rocm).invert(*process)
    layers += outcome.layers
    if isinstance(outcome, Refusal):
        raise RefusedError(outcome.code, outcome.detail)
    return [_Device(device.key, device.evidence, ()) for device in outcome.devices]


def _of_level_zero(device: Visible) -> _Device:
    tiles = (Visible(device.card, (tile,), False).key for tile in device.tiles)
    return _Device(device.key, "proven", tuple(tiles) if device.parts else ())


# --- the selector


def _targets(text: str) -> list[_Target]:
    """The selector parsed; where it only discards, everything else is accepted. Raises :class:`RefusedError`."""
    if not text:
        raise RefusedError(
            "selector-invalid", f"{SELECTOR} is set but empty: older releases select nothing, newer throw"
        )
    targets: list[_Target] = []
    for term in filter(None, text.translate(_LOWER).split(";")):
        backend, colon, devices = term.partition(":")
        if not colon or not backend or not devices or ":" in devices:
            raise _invalid(term, "expected BACKEND:DEVICE[,DEVICE...]")
        discards = backend.startswith("!")
        name = backend.removeprefix("!")
        if name not in ("*", *_BACKENDS):
            raise _invalid(term, f"expected a backend of *, {', '.join(_BACKENDS)}")
        entries = [device for device in devices.split(",") if device]
        read = {device: _target(discards, name, device, term) for device in dict.fromkeys(entries)}
        found = [read[device] for device in entries]
        if found and not discards and targets and targets[-1].discards:
            raise _invalid(term, "terms that accept must stand before those that discard")
        targets += found
    if targets and all(target.discards for target in targets):
        targets.append(_ANYTHING)
    return targets


def _invalid(term: str, why: str) -> RefusedError:
    return RefusedError("selector-invalid", f"{SELECTOR}: `{term}`: {why}")


def _target(discards: bool, backend: str, device: str, term: str) -> _Target:
    """A kind such as ``gpu``, or a path: a number or ``*``, then perhaps two more. A number may not follow a ``*``."""
    if device.isascii() and device.isdigit() and len(device) < 10:  # what nearly every selector has
        return _Target(discards, backend, "", (int(device),))
    parts = device.split(".")
    if len(parts) > 3 or not all(parts) or (parts[0] in _KINDS and len(parts) > 1):
        raise _invalid(term, f"`{device}` is not a device, or more than three numbers")
    if parts[0] in _KINDS:
        return _Target(discards, backend, parts[0], ())
    path: list[_Number] = ["*" if parts[0] == "*" else _number(parts[0], term)]
    for part in parts[1:]:
        path.append("*" if part[0] == "*" else _number(part, term))
        if path[-2] == "*" and path[-1] != "*":
            raise _invalid(term, f"`{device}` has a number behind a *")
    return _Target(discards, backend, "", tuple(path))


def _number(part: str, term: str) -> int:
    """As C++'s stoi: what follows the digits does not matter."""
    match = _NUMBER.match(part)
    digits = match[2].lstrip("0") if match else ""
    number = int(digits or "0") if len(digits) <= 10 else 1 << 40
    number = -number if match and match[1] == "-" else number
    if match is None or not -(1 << 31) <= number < 1 << 31:
        raise _invalid(term, f"`{part}` is not a number")
    return number


# --- what it selects


def _selected(targets: Sequence[_Target], backend: str, devices: Sequence[_Device]) -> list[_Device]:
    """A term that discards wins, and takes the whole card. A card is there once, a tile as often as it is asked for."""
    found: list[_Device] = []
    every, whole = _meant_by(targets, backend), _meant_by([each for each in targets if len(each.path) < 2], backend)
    discards = [target for target in targets if target.discards]
    discarded = _meant_by(discards, backend)
    for number, device in enumerate(devices):
        if not discarded(number):
            meant = every(number) if device.parts else whole(number)
            found += _parts(meant, device, len(targets))
        if len(found) > MOST_DEVICES:
            raise RefusedError(
                "over-the-cap", f"the selector names more than {MOST_DEVICES} devices, the most of a fleet"
            )
    return found


def _ignored(targets: Sequence[_Target], backend: str, devices: Sequence[_Device]) -> str:
    """The first number of a term that matches nothing, in words."""
    for target in targets:
        number = target.among(backend)
        if isinstance(number, int) and not 0 <= number < len(devices):
            return f"there is no device {number} among {len(devices)}: ignored"
        in_parts = isinstance(number, int) and len(target.path) > 1 and not target.discards
        if isinstance(number, int) and in_parts and not _tiles_of(target, devices[number]):
            return f"device {number} has no such tile as asked for: ignored"
    return ""


def _meant_by(targets: Sequence[_Target], backend: str) -> Callable[[int], list[_Target]]:
    """The targets that mean the GPU of a number, in their order, found without a look at each."""
    places: dict[_Number, list[int]] = {}
    whole: set[_Target] = set()
    for place, target in enumerate(targets):
        number = target.among(backend)
        if number is None or target in whole:  # repeats change nothing but for tiles
            continue
        places.setdefault(number, []).append(place)
        if len(target.path) < 2:
            whole.add(target)
    anyway = places.get("*", [])
    return lambda number: [targets[place] for place in sorted((*places.get(number, ()), *anyway))]


def _parts(meant: Sequence[_Target], device: _Device, count: int) -> list[_Device]:
    """What the targets ask of one device, which they all mean. Raises where their order is not known."""
    found: list[_Device] = []
    whole = False
    for target in meant:
        if len(target.path) < 2 and not whole:
            found.append(device)
            whole = True
        found += [_Device(tile, device.evidence, ()) for tile in _tiles_of(target, device)]
        if len(found) > MOST_DEVICES:
            return found
    if count > _SORTED_STABLY and len(meant) > 1 and len(set(found)) > 1:
        raise RefusedError(
            "token-dialect", f"{SELECTOR}: more than {_SORTED_STABLY} terms, whose order libsycl may change"
        )
    return found


def _tiles_of(target: _Target, device: _Device) -> Sequence[DeviceKey]:
    """The tiles that the target asks of the device; a tile has no parts of its own."""
    if len(target.path) != 2:
        return ()
    tile = target.path[1]
    if tile == "*":
        return device.parts
    return device.parts[tile : tile + 1] if tile >= 0 else ()


def _check_opencl(targets: Sequence[_Target], process: _Process) -> None:
    """Raises where a term may show cards through OpenCL, which reads Level Zero's mask as well."""
    missing = 0 if process.inventory.whole else MISSING_AT_MOST
    if not _shows_by_opencl(targets, len(process.inventory.boards()) + missing):
        return
    try:
        if not level_zero.visible(*process, []):
            return
    except RefusedError:
        pass  # so it is not known that the mask leaves none
    raise RefusedError("opencl-order-unknown", "the cards are visible through OpenCL only, whose order is not known")


def _shows_by_opencl(targets: Sequence[_Target], cards: int) -> bool:
    meant_by = _meant_by(targets, "opencl")
    for meant in map(meant_by, range(cards)):
        named = any(target.backend == "opencl" and len(target.path) < 2 for target in meant)
        if named and not any(target.discards for target in meant):
            return True
    return False


RUNTIME = Runtime(
    name="sycl",
    vendors=("intel",),
    masks=(SELECTOR, *level_zero.RUNTIME.masks),
    variables=(SELECTOR, *_LEGACY, *level_zero.RUNTIME.variables),
    default=False,
    moving=False,
    invert=invert,
    choosing=(SELECTOR, *level_zero.RUNTIME.choosing),
    prefixes=(_LLAMA_CPP,),
)
