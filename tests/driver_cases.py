"""Masked processes to ask drivers about: the worked masks that a pretend driver can play, and random ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, TypeVar

import msgspec
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from exporter.inventory import Inventory
from exporter.model import Context, DeviceKey
from exporter.saved_inventory import Row, from_rows
from tests.driver_hosts import AS_GIVEN, Host
from tests.mask_hosts import amd_cases, intel_cases, usual, vulkan_cases
from tests.mask_vectors import VENDORS, Vector, implied_context, load
from tests.strategies import TRICKY, cases

DATA = Path(__file__).parent / "data"
HOSTS, MASKS_EACH = 130, 4

_Drawn = TypeVar("_Drawn")


class Case(NamedTuple):
    """A host, what is known of it, and the environment of a process there. ``hidden`` are variables of its driver that
    only make it play the host, and of which the arithmetic does not know.
    """

    name: str
    runtime: str
    host: Host
    known: Inventory
    env: Mapping[str, str]
    context: Context
    hidden: Mapping[str, str] = {}


# --- worked masks


def worked(runtime: str) -> tuple[list[tuple[Vector, Case]], Counter[str]]:
    """A runtime's vectors that a driver can be asked about; of the others how many there are, by reason."""
    files = (DATA / "mask_vectors.yaml", DATA / "real_parsers.jsonl")
    vectors = [vector for path in files for vector in load(path) if vector.runtime == runtime]
    reasons = [_not_played(vector) for vector in vectors]
    played = [(vector, _worked(vector)) for vector, why in zip(vectors, reasons, strict=True) if not why]
    return played, Counter(filter(None, reasons))


_UNPLAYED = (
    ("os", ("windows",), "no Linux"),
    ("reach", ("unknown",), "reach not known"),
    ("api", ("hsa", "opencl"), "not HIP"),
    ("space", ("mask_index",), "no enumeration"),
    ("frontend", ("llama.cpp",), "a front end over the driver"),
    ("probe", ("clean_env", "pci_only"), "no enumeration under its environment"),
    ("driver", ("old",), "an old driver, of no certain order"),
)


def _not_played(vector: Vector) -> str:
    said = (why for fact, values, why in _UNPLAYED if vector.context.get(fact) in values)
    return next(said, "" if _can_be_set(vector.env) else "text that no environment can hold")


def _can_be_set(env: Mapping[str, str]) -> bool:
    return not any("\0" in text or "\ud800" in text for text in env.values())


def _worked(vector: Vector) -> Case:
    """Every card of a worked mask can be opened unless its row says otherwise."""
    rows = [msgspec.convert(row, Row) for row in vector.rows]
    inventory, reach = from_rows(rows, VENDORS[vector.runtime])
    context = implied_context(vector.context, inventory, reach)
    opened = context.reach or frozenset()
    host = Host(inventory, opened, vector.context.get("driver_branch"), raw_order=vector.runtime == "vulkan")
    hidden = AS_GIVEN if vector.runtime == "vulkan" else {}
    return Case(vector.name, vector.runtime, host, inventory, vector.env, context, hidden)


# --- random masks


def drawn(runtime: str) -> list[Case]:
    """The same random hosts with each run, and some masks on each of which most name devices."""
    found = []
    for number, (host, known, env, context) in enumerate(_HOSTS[runtime]()):
        chance = Random(number)
        masks = [env, *(_MASKS[runtime](chance, host.truth) for _ in range(MASKS_EACH - 1))]
        texts = (mask for mask in masks if _can_be_set(mask))
        found += [Case(f"host {number}", runtime, host, known, mask, context) for mask in texts]
    return found


_Known = tuple[Host, Inventory, Mapping[str, str], Context]


def _examples(strategy: st.SearchStrategy[_Drawn]) -> list[_Drawn]:
    found: list[_Drawn] = []

    @settings(max_examples=HOSTS, derandomize=True, database=None, phases=[Phase.generate])
    @given(strategy)
    def collect(example: _Drawn) -> None:
        found.append(example)

    collect()
    return found


def _racks() -> Iterator[_Known]:
    """Cards of one model, in every other host MIG boards and of several models."""
    racks = zip(_examples(cases(alike=True)), _examples(cases(mig=True)), strict=False)
    for number, example in enumerate([each for pair in racks for each in pair][:HOSTS]):
        inventory, branch = example.rack.inventory, example.context.driver_branch
        reach = _reach(inventory, example.context.reach, number)
        context = usual(inventory, reach, driver_branch=branch)
        yield Host(inventory, reach, branch or (535, 570)[number % 2]), inventory, example.env, context


def _others(strategy: Any) -> Callable[[], Iterator[_Known]]:
    """Hosts of which not everything is known, every other one."""

    def found() -> Iterator[_Known]:
        for number, example in enumerate(_examples(strategy)):
            truth = example.host.inventory
            reach = _reach(truth, example.context.reach, number)
            known = example.known if number % 2 else truth
            yield Host(truth, reach), known, example.env, usual(known, reach)

    return found


def _reach(inventory: Inventory, reach: frozenset[DeviceKey] | None, number: int) -> frozenset[DeviceKey]:
    """All, but on every fourth host the whole cards of which something can be opened, where that is known."""
    known = None if number % 4 else reach
    addresses = {each.pci_bus_id for each in inventory.devices if known is None or each.key in known}
    return frozenset(each.key for each in inventory.devices if each.pci_bus_id in addresses)


_HOSTS: dict[str, Callable[[], Iterator[_Known]]] = {
    "cuda": _racks,
    "rocm": _others(amd_cases),
    "level_zero": _others(intel_cases),
    "vulkan": _others(vulkan_cases),
}


def _list(chance: Random, plain: Sequence[str], odd: Sequence[str]) -> str:
    """Some of what is plain, at times a repeat or something odd among it, and a comma at the end."""
    wanted = chance.sample(plain, chance.randint(min(len(plain), 1), min(len(plain), 5)))
    if chance.random() < 0.35:
        wanted.insert(chance.randint(0, len(wanted)), chance.choice((*odd, *plain, *plain)))
    return ",".join(wanted) + chance.choice(("", "", "", ","))


def _some(chance: Random, **choices: Sequence[str | None]) -> dict[str, str]:
    """A variable each, unset where None is chosen."""
    chosen = {name: chance.choice(values) for name, values in choices.items()}
    return {name: value for name, value in chosen.items() if value is not None}


def _numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def _prefixes(chance: Random, uuids: Sequence[str]) -> list[str]:
    return [uuid[: chance.choice((5, 6, 8, 12, 14, 20))] for uuid in uuids]


def _cuda(chance: Random, truth: Inventory) -> dict[str, str]:
    uuids = [device.uuid for device in truth.devices]
    boards = {device.key: device.uuid for device in truth.boards()}
    legacy = [f"MIG-{boards[part.parent]}/{part.partition}" for part in truth.devices if part.parent]
    numbers = _numbers(len(boards))
    plain = chance.choice((numbers, numbers, numbers, uuids, _prefixes(chance, uuids), [*uuids, *legacy]))
    mask = _list(chance, plain, (*TRICKY, str(len(boards)), f" {numbers[-1]}"))
    order = ("PCI_BUS_ID", "PCI_BUS_ID", "PCI_BUS_ID", "PCI_BUS_ID", None, None, "FASTEST_FIRST")
    return _some(chance, CUDA_VISIBLE_DEVICES=(mask,) * 9 + (None,), CUDA_DEVICE_ORDER=order)


def _rocm(chance: Random, truth: Inventory) -> dict[str, str]:
    """HIP's numbers are few, since they count what ROCr's left."""
    uuids = [device.uuid for device in truth.devices if device.uuid]
    odd = (*TRICKY, "GPU-XX", " 1", "1 ", "0b1", *(uuid.upper() for uuid in uuids))
    numbers = _numbers(len(truth.devices))

    def mask(count: int) -> str:
        named = chance.choice((numbers[:count], numbers[:count], uuids, _prefixes(chance, uuids)))
        text = _list(chance, named, odd)
        return chance.choice((text,) * 9 + (f'"{text}"',))

    rocr, inner = mask(len(numbers)), mask(2)
    return _some(
        chance,
        ROCR_VISIBLE_DEVICES=(rocr, rocr, None),
        HIP_VISIBLE_DEVICES=(inner, None, None),
        CUDA_VISIBLE_DEVICES=(mask(2), None, None),
        GPU_DEVICE_ORDINAL=(None,) * 9 + (inner,),
    )


def _level_zero(chance: Random, truth: Inventory) -> dict[str, str]:
    tiles = [f"{card}.{tile}" for card in range(4) for tile in range(3)]
    mask = _list(chance, chance.choice((_numbers(9), _numbers(9), tiles)), (*TRICKY, "0.0.0", "1.9", "0,-1", " 1"))
    seldom = (None,) * 12
    return _some(
        chance,
        ZE_AFFINITY_MASK=(mask,) * 7 + (None, "default"),
        ZE_FLAT_DEVICE_HIERARCHY=(None, "COMPOSITE", "FLAT", "COMBINED", "flat"),
        ZE_ENABLE_PCI_ID_DEVICE_ORDER=(None, None, "1", "0", "true"),
        NEO_ZE_AFFINITY_MASK=(*seldom, mask),
        NEO_L0_ZE_AFFINITY_MASK=(*seldom, "0"),
        NEO_ZE_ENABLE_PCI_ID_DEVICE_ORDER=(*seldom, "1"),
    )


def _vulkan(chance: Random, truth: Inventory) -> dict[str, str]:
    count = len(truth.vulkan or ())
    mask = _list(chance, _numbers(count), (*TRICKY, str(count), "-1", "+0", " 1", "0 1"))
    ids = [
        f"{vendor}:100{place}{end}" for vendor in ("10de", "1002", "8086") for place in range(4) for end in ("", "!")
    ]
    tags = [f"pci-{card.pci_bus_id.replace(':', '_').replace('.', '_')}" for card in truth.boards()]
    seldom = (None,) * 5
    return _some(
        chance,
        GGML_VK_VISIBLE_DEVICES=(mask, mask, None),
        VK_LOADER_DEVICE_SELECT=(*seldom, chance.choice(ids)),
        VK_LOADER_DISABLE_SELECT=(*seldom, "1"),
        MESA_VK_DEVICE_SELECT=(*seldom, chance.choice((*ids, "list"))),
        DRI_PRIME=(*seldom, "1", "2!", chance.choice(ids), chance.choice(tags)),
        NODEVICE_SELECT=(*seldom, "1"),
        VK_LOADER_VENDOR_ID_FILTER=(*seldom, "0x10de", "0x1000:0x1fff"),
    )


_MASKS: dict[str, Callable[[Random, Inventory], dict[str, str]]] = {
    "cuda": _cuda,
    "rocm": _rocm,
    "level_zero": _level_zero,
    "vulkan": _vulkan,
}
