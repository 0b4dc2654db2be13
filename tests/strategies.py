"""NVIDIA hosts to try masks on: hand-made cards, and random racks of them with the masks that could be set there."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from exporter.inventory import Inventory
from exporter.model import Context, Device, DeviceKey

settings.register_profile("normal", max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("normal"), max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "normal"))

GIB = 2**30
PCI_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

TRICKY = (
    *("", " ", "\t", "\n", "\x00", "\x001", "1\x00", "\ufeff1", "\u00a01", "1\u3000", "\x1c1", "\u200b1"),
    *("+", "-", "+0", "+1", "-0", "-1", "--1", "+-1", "- 1"),
    *("0x", "0x1", "0X1", "0x9", "010", "08", "01", "00", "1.5", "1e1", "1_0", "1;2", "1 2", "1gpu2", "1c20e77d"),
    *("\uff11", "\u0661", "\u00b2", "1\u00b2", "1\u0661", "\u4e00", "\u2460"),
    *("9" * 5000, "0" * 5000 + "1", "2147483648", "4294967295", "4294967296", "4294967297", "18446744073709551616"),
    *("\ud800", "1\udcff", "GPU-\ud800", "GPU-", "gpu-", "MIG-", "mig-", "MIG-GPU-", "MIG-GPU-/0/0", "GPU"),
    *("NoDevFiles", "none", "all", "void", "NaN", "inf", "True"),
)
"""Entries of a mask that some parser somewhere reads in its own way."""


def card(letter: str, **changes: Any) -> Device:
    """The card of that letter, from ``a``: its UUID begins with the letter, its PCI address rises with it."""
    number = ord(letter) - ord("a")
    uuid = f"GPU-{letter * 8}-0000-4000-8000-{number:012x}"
    facts: dict[str, Any] = {
        "key": DeviceKey("nvidia", uuid),
        "physical_index": number,
        "pci_bus_id": f"0000:{0x21 + 0x20 * number:02x}:00.0",
        "uuid": uuid,
        "name": "NVIDIA L40S",
        "memory_total_bytes": 48 * GIB,
    }
    return Device(**facts | changes)


def cards(letters: str, **changes: Any) -> tuple[Device, ...]:
    """Equal cards, one a letter."""
    return tuple(card(letter, **changes) for letter in letters)


def board(letter: str, *places: tuple[int, int]) -> tuple[Device, ...]:
    """A card in MIG mode, then its instances at these places (GPU instance, compute instance)."""
    whole = card(letter, name="NVIDIA H100", memory_total_bytes=80 * GIB, mig_mode=True)
    return whole, *(part(whole, index, place) for index, place in enumerate(places))


def part(whole: Device, index: int, place: tuple[int, int]) -> Device:
    """The MIG device of that index at a place (GPU instance, compute instance) of a board."""
    uuid = f"MIG-{whole.uuid[4:13]}{index + 1:04x}{whole.uuid[17:]}"
    return Device(
        key=DeviceKey("nvidia", uuid),
        physical_index=whole.physical_index,
        pci_bus_id=whole.pci_bus_id,
        uuid=uuid,
        name=f"{whole.name} MIG 1g.10gb",
        memory_total_bytes=10 * GIB,
        partition=f"{place[0]}/{place[1]}",
        parent=whole.key,
        mig_index=index,
        gpu_instance=place[0],
        compute_instance=place[1],
    )


def asleep(device: Device) -> Device:
    """What is known of a card that was asleep from the start: its address and its model."""
    return Device(
        key=DeviceKey(device.key.vendor, device.pci_bus_id),
        physical_index=None,
        pci_bus_id=device.pci_bus_id,
        name=device.name,
    )


class Rack(NamedTuple):
    """A host: its inventory in the order of discovery, and its cards by ascending PCI address."""

    inventory: Inventory
    cards: tuple[Device, ...]

    def __repr__(self) -> str:
        """Short: a failing example is read by people."""
        lines = (f"{each.pci_bus_id} {each.uuid} {each.partition} {each.mig_mode}" for each in self.inventory.devices)
        return "\n  ".join(("Rack:", *lines))

    @property
    def everything(self) -> frozenset[DeviceKey]:
        """The reach of a workload that can open every device."""
        return frozenset(device.key for device in self.inventory.devices)

    def keep(self, kept: Sequence[Device], *, whole: bool) -> Inventory:
        """The inventory narrowed to some cards and their parts."""
        keys = {device.key for device in kept}
        devices = (device for device in self.inventory.devices if device.key in keys or device.parent in keys)
        return Inventory(tuple(devices), whole)

    def put_to_sleep(self, sleepers: Sequence[Device]) -> Inventory:
        """The inventory with placeholders for some cards."""
        devices = (asleep(device) if device in sleepers else device for device in self.inventory.devices)
        return Inventory(tuple(devices))


class Case(NamedTuple):
    """A rack, an environment and what is known of it; and some of the cards, none twice, in any order."""

    rack: Rack
    env: dict[str, str]
    context: Context
    chosen: tuple[Device, ...]


@st.composite
def cases(draw: st.DrawFn, *, mig: bool = False, alike: bool = False) -> Case:
    """Anything at all on one to sixteen cards anywhere on the bus, discovered in any order.

    With ``mig``, some are boards with parts; with ``alike``, all are of one model. The hardware comes from one drawn
    seed, since only the number of cards and the texts are worth making smaller when a test fails.
    """
    chance = Random(draw(_seeds))
    rack = _rack(chance, draw(_counts), mig=mig, alike=alike)
    env = {name: _text(rack, value) for name, value in draw(_variables).items()}
    context = Context(
        reach=_reach(chance, rack, draw(_reaches)), driver_branch=draw(_branches), frontend=draw(_frontends)
    )
    chosen = chance.sample(rack.cards, chance.randint(0, len(rack.cards)))
    return Case(rack, env, context, tuple(chosen))


Places = tuple[tuple[int, int], ...]
"""Where a board's instances are: GPU instance and compute instance of each."""

_DOMAINS = (0, 0, 1, 0xF, 0x10000)
_MODELS = (("NVIDIA A100", 40), ("NVIDIA A100", 80), ("NVIDIA L40S", 48), ("", 0))
_MODES: tuple[tuple[bool | None, Places], ...] = (
    *((None, ()), (False, ()), (True, ()), (True, ((1, 0),)), (True, ((2, 0), (1, 0)))),
    *((True, ((1, 0), (1, 1))), (True, ((7, 0), (2, 0), (2, 1)))),
)
_PREFIX_LENGTHS = (4, 5, 6, 7, 12, 13, 35)
_SPELLINGS: tuple[Callable[[str], str], ...] = (str, str, str, str.upper, str.lower, " {}".format, "{} ".format)

Entry = str | tuple[str, int, int]
"""An entry of a mask: its text, or what to make it of."""

_entry: st.SearchStrategy[Entry] = st.one_of(
    st.tuples(st.just("index"), st.integers(0, 17), st.just(0)),
    st.tuples(st.just("name"), st.integers(0, 63), st.integers(0, len(_SPELLINGS) - 1)),
    st.tuples(st.just("prefix"), st.integers(0, 63), st.integers(0, len(_PREFIX_LENGTHS) - 1)),
    st.sampled_from(TRICKY),
    st.integers(-(2**33), 2**33).map(str),
    st.text(max_size=4),
)
_texts = st.one_of(st.sampled_from(("", "0", "1", "4", " 2", "99", "/run/mps", *TRICKY)), st.text())
_variables = st.fixed_dictionaries(
    {},
    optional={
        "CUDA_VISIBLE_DEVICES": st.one_of(st.lists(_entry, max_size=6), st.text()),
        "CUDA_DEVICE_ORDER": st.one_of(st.sampled_from(("PCI_BUS_ID", "PCI_BUS_ID", "FASTEST_FIRST")), _texts),
        "CUDA_MPS_PIPE_DIRECTORY": _texts,
        "GGML_CUDA_DEVICES": _texts,
    },
)
_seeds = st.integers(0, 2**32 - 1)
_counts = st.integers(1, 16)
_reaches = st.sampled_from(("unknown", "whole", "some"))
_branches = st.sampled_from((None, 470, 535, 570, 580))
_frontends = st.sampled_from((None, "none", "llama.cpp"))


def _reach(chance: Random, rack: Rack, kind: str) -> frozenset[DeviceKey] | None:
    keys = sorted(rack.everything)
    some = frozenset(chance.sample(keys, chance.randint(0, len(keys))))
    return {"unknown": None, "whole": rack.everything, "some": some}[kind]


def _rack(chance: Random, count: int, *, mig: bool, alike: bool) -> Rack:
    places = [(chance.choice(_DOMAINS), place >> 5, place & 31) for place in chance.sample(range(1 << 13), count)]
    identities = chance.sample(range(1 << 20), count)
    models = chance.choices(_MODELS, k=1) * count if alike else chance.choices(_MODELS, k=count)
    modes = chance.choices(_MODES, k=count) if mig else [_MODES[0]] * count
    groups = [
        _group(sorted(places).index(place), place, _uuid(identity), model, mode)
        for place, identity, model, mode in zip(places, identities, models, modes, strict=True)
    ]
    inventory = Inventory(tuple(device for group in groups for device in group))
    return Rack(inventory, tuple(sorted((group[0] for group in groups), key=_index)))


def _index(device: Device) -> int:
    return device.physical_index or 0


def _uuid(identity: int) -> str:
    """UUIDs have few beginnings, so that prefixes meet."""
    start = f"{'abe1'[identity & 3]}{'ab'[identity >> 2 & 1]}{identity >> 3 & 3:06x}"
    return f"GPU-{start}-4000-4000-8000-{identity >> 5:012x}"


def _group(
    index: int, place: tuple[int, int, int], uuid: str, model: tuple[str, int], mode: tuple[bool | None, Places]
) -> tuple[Device, ...]:
    """A card and its instances."""
    whole = Device(
        key=DeviceKey("nvidia", uuid),
        physical_index=index,
        pci_bus_id="{:04x}:{:02x}:{:02x}.0".format(*place),
        uuid=uuid,
        name=model[0],
        memory_total_bytes=model[1] * GIB or None,
        mig_mode=mode[0],
    )
    return whole, *(part(whole, number, at) for number, at in enumerate(mode[1]))


def _text(rack: Rack, value: str | list[Entry]) -> str:
    if isinstance(value, str):
        return value
    boards = {device.key: device.uuid for device in rack.cards}
    devices = rack.inventory.devices
    names = [each.uuid for each in devices]
    names += [f"MIG-{boards[each.parent]}/{each.partition}" for each in devices if each.parent]
    return ",".join(_spelled(entry, names) for entry in value)


def _spelled(entry: Entry, names: Sequence[str]) -> str:
    if isinstance(entry, str):
        return entry
    kind, number, choice = entry
    name = names[number % len(names)]
    if kind == "index":
        return str(number)
    return _SPELLINGS[choice](name) if kind == "name" else name[: _PREFIX_LENGTHS[choice]]


def shortest_prefix(rack: Rack, device: Device) -> int:
    """The least length at which the start of a card's UUID names no other card."""
    others = [other.uuid for other in rack.cards if other is not device]
    starts = (device.uuid[:length] for length in range(len("GPU-") + 1, len(device.uuid) + 1))
    return next(len(start) for start in starts if not any(other.startswith(start) for other in others))
