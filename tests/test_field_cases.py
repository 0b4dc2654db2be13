"""What people who masked GPUs met, as cases: each environment on its host is answered rightly, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from exporter.inventory import Inventory
from exporter.masks import RUNTIMES, invert
from exporter.model import Context, DeviceKey, Inversion, Refusal
from exporter.saved_inventory import Row, from_rows
from tests.strategies import GIB

DOCUMENT = yaml.safe_load((Path(__file__).parent / "data" / "field_cases.yaml").read_text(encoding="utf-8"))
CASES = {case["id"]: case for case in DOCUMENT["cases"]}


def host(name: str) -> tuple[Inventory, dict[str, DeviceKey]]:
    """The inventory of that name, and its devices' keys by their short names."""
    entries = DOCUMENT["inventories"][name]
    names: dict[str, DeviceKey] = {}
    for entry in entries:
        alone = from_rows([_row(entry)], "nvidia")[0].devices
        named = (entry["key"], *(f"{entry['key']}.m{part['index']}" for part in entry.get("mig", [])))
        names |= dict(zip(named, (device.key for device in alone), strict=False))
    return from_rows([_row(entry) for entry in entries], "nvidia")[0], names


def _row(entry: dict[str, Any]) -> Row:
    return msgspec.convert(_bytes({**entry, "mig": [_bytes(part) for part in entry.get("mig", [])]}), Row)


def _bytes(entry: dict[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in entry.items() if key not in ("gib", "key")}
    return rest | ({"memory_total_bytes": entry["gib"] * GIB} if "gib" in entry else {})


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_field_case(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every environment of the case has the answer that the case calls right, with its grade of evidence."""
    for name, text in case.get("exporter_env", {}).items():
        monkeypatch.setenv(name, text)
    everything, names = host(case["inventory"])
    for row in case["rows"]:
        runtime = row.get("runtime", case.get("runtime", "cuda"))
        inventory, context = of_runtime(runtime, everything), context_of(case, row, names)
        outcome = invert(runtime, row["env"], inventory, context)
        if "refuse" in row:
            assert isinstance(outcome, Refusal), row
            assert outcome.code == row["refuse"]
        else:
            assert isinstance(outcome, Inversion), row
            assert [device.key for device in outcome.devices] == [names[key] for key in row["visible"]], row
            assert {device.evidence for device in outcome.devices} == ({row["evidence"]} if row["visible"] else set())


def of_runtime(runtime: str, inventory: Inventory) -> Inventory:
    """The devices that the runtime numbers."""
    vendors = RUNTIMES[runtime].vendors
    devices = tuple(device for device in inventory.devices if not vendors or device.key.vendor in vendors)
    return Inventory(devices, vulkan=inventory.vulkan)


def context_of(case: dict[str, Any], row: dict[str, Any], names: dict[str, DeviceKey]) -> Context:
    """What the case knows of the workload: a program of the runtime's own, and its facts."""
    reach = row.get("reach", [])
    keys = None if reach is None else frozenset(names[key] for key in reach or names)
    facts = case.get("known", {}) | row.get("known", {})
    return Context(reach=keys, frontend="none", api="hip", **facts)


def test_an_instance_has_its_own_memory() -> None:
    """F11: the instance's total is the slice's, and its address and index are the board's."""
    inventory, names = host("two_h100_mig")
    part, whole = inventory.by_key[names["A.m0"]], inventory.by_key[names["A"]]
    assert (part.memory_total_bytes, whole.memory_total_bytes) == (20 * GIB, 80 * GIB)
    assert (part.pci_bus_id, part.physical_index, part.parent) == (whole.pci_bus_id, whole.physical_index, whole.key)
