"""What people who masked GPUs met, as cases: each environment on its host is answered rightly, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from exporter.inventory import Inventory, Row, from_rows
from exporter.masks import invert
from exporter.model import Context, DeviceKey, Inversion, Refusal
from tests.strategies import GIB

DOCUMENT = yaml.safe_load((Path(__file__).parent / "data" / "field_cases.yaml").read_text(encoding="utf-8"))
CASES = {case["id"]: case for case in DOCUMENT["cases"]}


def host(name: str) -> tuple[Inventory, dict[str, DeviceKey]]:
    """The inventory of that name, and its devices' keys by their short names."""
    rows, names = [], {}
    for entry in DOCUMENT["inventories"][name]:
        mig = [_bytes(part) for part in entry.get("mig", [])]
        rows.append(msgspec.convert(_bytes({**entry, "mig": mig}), Row))
        names[entry["key"]] = DeviceKey("nvidia", entry["uuid"])
        names |= {f"{entry['key']}.m{part['index']}": DeviceKey("nvidia", part["uuid"]) for part in mig}
    return from_rows(rows, "nvidia")[0], names


def _bytes(entry: dict[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in entry.items() if key not in ("gib", "key")}
    return rest | {"memory_total_bytes": entry["gib"] * GIB}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_field_case(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every environment of the case has the answer that the case calls right, with its grade of evidence."""
    for name, text in case.get("exporter_env", {}).items():
        monkeypatch.setenv(name, text)
    inventory, names = host(case["inventory"])
    for row in case["rows"]:
        reach = row.get("reach", [])
        keys = None if reach is None else frozenset(names[key] for key in reach or names)
        outcome = invert("cuda", row["env"], inventory, Context(reach=keys, frontend="none"))
        if "refuse" in row:
            assert isinstance(outcome, Refusal), row
            assert outcome.code == row["refuse"]
        else:
            assert isinstance(outcome, Inversion), row
            assert [device.key for device in outcome.devices] == [names[key] for key in row["visible"]], row
            assert {device.evidence for device in outcome.devices} == ({row["evidence"]} if row["visible"] else set())


def test_an_instance_has_its_own_memory() -> None:
    """F11: the instance's total is the slice's, and its address and index are the board's."""
    inventory, names = host("two_h100_mig")
    part, whole = inventory.by_key[names["A.m0"]], inventory.by_key[names["A"]]
    assert (part.memory_total_bytes, whole.memory_total_bytes) == (20 * GIB, 80 * GIB)
    assert (part.pci_bus_id, part.physical_index, part.parent) == (whole.pci_bus_id, whole.physical_index, whole.key)
