"""ROCm: ``ROCR_VISIBLE_DEVICES`` over the KFD's order, then ``HIP_VISIBLE_DEVICES`` over what that leaves.

Each filter renumbers. ROCr counts every card that the process can open; HIP counts ROCr's survivors and reads
``CUDA_VISIBLE_DEVICES`` where its own variable is unset; OpenCL reads ``GPU_DEVICE_ORDINAL`` with HIP's parser.
Source: ``rocdevice.cpp`` and ``flags.cpp`` of AMD's clr.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from exporter.inventory import Inventory
from exporter.masks import front_end, rocr
from exporter.masks.base import MISSING_AT_MOST, RefusedError, Runtime
from exporter.masks.rocr import Host, Target
from exporter.model import Context, Device, DeviceKey, Inversion, Layer, Refusal, Resolved

HIP, CUDA, OPENCL = "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"
ISA = "HSA_OVERRIDE_GFX_VERSION"

_PRINTED = re.compile(r"0|[1-9][0-9]{0,9}")


class _Reading(NamedTuple):
    """What the masks leave, and the layers that tell how."""

    targets: list[Target]
    layers: tuple[Layer, ...]


def invert(env: Mapping[str, str], inventory: Inventory, context: Context) -> Inversion | Refusal:
    """The devices that a ROCm process with this environment numbers 0..n-1."""
    layers: tuple[Layer, ...] = ()
    if context.os == "windows":
        return Refusal("windows-order", "on Windows another driver numbers the cards, in another order")
    try:
        host = rocr.reachable(inventory, context.reach)
        targets, layers = _whatever_the_count(env, host, context.api)
        keys = front_end.virtual(env, [_key(target, host) for target in targets], context.frontend)
    except RefusedError as refusal:
        return Refusal(refusal.code, refusal.detail, refusal.layers or layers)
    return Inversion(tuple(Resolved(key, "proven", index) for index, key in enumerate(keys)), layers)


def _key(target: Target, host: Host) -> DeviceKey:
    if isinstance(target, int):
        raise host.unordered("a mask of numbers, or none,")
    return target


def _whatever_the_count(env: Mapping[str, str], host: Host, api: str | None) -> _Reading:
    """What the masks leave; where the number of cards is not known, for every number that it may be. Cards that are
    named by UUID are taken to be among them.
    """
    reading = _agreed(env, host, api)
    if host.counted:
        return reading
    lists = (rocr.chosen_by(env.get(rocr.MASK), host)[0], reading.targets)
    least = max(sum(not isinstance(target, int) for target in targets) for targets in lists)
    most = host.size if host.whole else host.size + MISSING_AT_MOST
    for size in range(least, most + 1):
        if _agreed(env, host._replace(size=size), api).targets != reading.targets:
            raise host.unordered("")
    return reading


def _agreed(env: Mapping[str, str], host: Host, api: str | None) -> _Reading:
    """HIP as its source has it, which AMD's manual contradicts: there ``GPU_DEVICE_ORDINAL`` applies to HIP as well."""
    apis = ("hip", "hsa", "opencl") if api is None else (api,)
    reading = _stacked(env, host, apis[0])
    others = [_stacked(env, host, other) for other in apis[1:]]
    if apis[0] == "hip" and OPENCL in env:
        others.append(_filtered(reading, OPENCL, env[OPENCL], host))
    if any(other.targets != reading.targets for other in others):
        doubt = f"{OPENCL}={env.get(OPENCL)!r}: AMD's manual has HIP apply it, HIP's source has not"
        detail = doubt if api else "whether HIP, HSA or OpenCL is used is not known"
        raise RefusedError("doc-conflict", detail, reading.layers)
    if ISA in env:
        known = host._replace(named=_with_isa(host))
        if any(_stacked(env, known, each).targets != reading.targets for each in apis):
            detail = f"whether ROCr drops a card for its ISA depends on {ISA}={env[ISA]!r}"
            raise RefusedError("isa-drop", detail, reading.layers)
    return reading


def _with_isa(host: Host) -> dict[DeviceKey, Device]:
    return {key: replace(card, hsa_isa_ok=True) for key, card in host.named.items()}


def _stacked(env: Mapping[str, str], host: Host, api: str) -> _Reading:
    """ROCr's filter, then the filter of the runtime over it; cards that do not initialise are dropped behind each."""
    mask = env.get(rocr.MASK)
    try:
        chosen, stopped = rocr.chosen_by(mask, host)
    except RefusedError as refusal:
        raise refusal.behind(Layer(rocr.MASK, mask, None)) from None
    survivors = list(_without(lambda card: card.hsa_isa_ok is False, chosen, host))
    reading = _Reading(survivors, (Layer(rocr.MASK, mask, len(survivors), stopped),))
    if api == "hsa":
        return reading
    variable = OPENCL if api == "opencl" else _hip_variable(env)
    filtered = _filtered(reading, variable, env.get(variable), host)
    return filtered._replace(targets=list(_without(lambda card: card.hip_ok is False, filtered.targets, host)))


def _without(dropped: Callable[[Device], bool], targets: Sequence[Target], host: Host) -> Iterator[Target]:
    """The targets less the cards that do not initialise: later ones move up."""
    doubtful = any(map(dropped, host.named.values()))
    for target in targets:
        if doubtful and isinstance(target, int):
            raise host.unordered("which number a card that fails to initialise has")
        if isinstance(target, int) or not dropped(host.named[target]):
            yield target


def _hip_variable(env: Mapping[str, str]) -> str:
    return CUDA if _unquoted(env.get(HIP)) is None and _unquoted(env.get(CUDA)) is not None else HIP


def _unquoted(text: str | None) -> str | None:
    """The value between double quotes, where only blanks are around them. Nothing is left of ``""``: that is unset."""
    bare = (text or "").strip(" ")
    if len(bare) >= 2 and bare[0] == bare[-1] == '"':
        return bare[1:-1] or None
    return text


def _filtered(before: _Reading, variable: str, text: str | None, host: Host) -> _Reading:
    mask = _unquoted(text)
    targets, stopped = (list(before.targets), "") if mask is None else _scan(mask, before.targets, host)
    return _Reading(targets, (*before.layers, Layer(variable, text, len(targets), stopped)))


def _scan(mask: str, agents: Sequence[Target], host: Host) -> tuple[list[Target], str]:
    """Left to right: the first invalid entry ends the list, a repeat is skipped. Nothing is trimmed."""
    entries = mask.split(",")
    if len(entries) > 1 and not entries[-1]:
        del entries[-1]
    chosen: dict[Target, None] = {}
    first: dict[str, int] = {}
    named = _Named(agents, host)
    stopped = ""
    for position, entry in enumerate(entries, start=1):
        if first.setdefault(entry, position) != position:
            stopped = stopped or f"entry {position} is `{entry}`, a card named before: skipped"
            continue
        target = named.first(entry) if "GPU-" in entry else _by_number(entry, agents)
        if target is None:
            return list(chosen), f"entry {position} is `{entry}`, {_complaint(entry, agents)}, the list ends here"
        if host.named_before(target, chosen):
            stopped = stopped or f"entry {position} is `{entry}`, a card named before: skipped"
        chosen[target] = None
    return list(chosen), stopped


def _complaint(entry: str, agents: Sequence[Target]) -> str:
    if "GPU-" in entry:
        return "which names no device"
    if _PRINTED.fullmatch(entry):
        return f"and there are {len(agents)} devices to choose from"
    return "HIP does not trim" if _PRINTED.fullmatch(entry.strip()) else "HIP takes plain decimal numbers only"


def _by_number(entry: str, agents: Sequence[Target]) -> Target | None:
    """The agent of that number, which must be spelled as it is printed."""
    return agents[int(entry)] if _PRINTED.fullmatch(entry) and int(entry) < len(agents) else None


class _Named:
    """The agents by their texts: ``GPU-`` and 16 digits in lower case, or ``GPU-XX`` without a UUID."""

    def __init__(self, agents: Sequence[Target], host: Host) -> None:
        self._agents, self._host = agents, host
        self._places = any(isinstance(agent, int) for agent in agents)
        devices = list(host.named) if self._places else [agent for agent in agents if not isinstance(agent, int)]
        self._uuids = [(key, host.uuids[key]) for key in devices]

    def first(self, entry: str) -> Target | None:
        """The first agent whose text has the entry in it; None for none."""
        if self._places and len(self._agents) < self._host.size:
            raise self._host.unordered("whether ROCr's numbers leave the card of a UUID")
        found = list(self._having(entry))
        if self._places and len(found) > 1:
            raise self._host.unordered(f"which of {len(found)} cards `{entry}` names")
        if self._agents:
            self._host.check_named(entry, found)
        return found[0] if found else None

    def _having(self, entry: str) -> Iterator[DeviceKey]:
        digits = entry[4:]
        if entry.startswith("GPU-"):
            begins = entry.translate(rocr.UPPER) if digits == digits.lower() else ""
            for key, uuid in self._uuids:
                if (begins and uuid.startswith(begins)) if uuid else "XX".startswith(digits):
                    yield key


RUNTIME = Runtime(
    name="rocm",
    vendors=("amd",),
    masks=(rocr.MASK, HIP, CUDA, OPENCL),
    variables=(rocr.MASK, HIP, CUDA, OPENCL, ISA, front_end.VIRTUAL),
    default=True,
    moving=False,
    invert=invert,
    choosing=(rocr.MASK, HIP, CUDA, OPENCL),
    told_to_drivers=(rocr.MASK, HIP, CUDA, OPENCL, ISA),
)
