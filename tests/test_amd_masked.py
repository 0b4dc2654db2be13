"""AMD cards under masks, through the whole daemon: the right card by its address, under both numbers, or a reason."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.amd_smi import FakeAmdSmi, build_or_skip
from tests.fakes.amd_smi import Gpu as AmdGpu
from tests.fakes.nvml import FakeNvml, equal_cards
from tests.fakes.sysfs import AMD_ANSWERS, GIB, AmdCard, FakeSys, KfdNode
from tests.harness import Daemon, Scrape, Start

pytestmark = pytest.mark.e2e

DOCUMENT = yaml.safe_load((Path(__file__).parent / "data" / "field_cases.yaml").read_text(encoding="utf-8"))
INVENTORIES: dict[str, list[dict[str, Any]]] = DOCUMENT["inventories"]
CASES = {
    case["id"]: case
    for case in DOCUMENT["cases"]
    if all(card.get("vendor") == "amd" for card in INVENTORIES[case["inventory"]])
    and {row.get("runtime", case.get("runtime")) for row in case["rows"]} == {"rocm"}
    and not any("known" in row for row in case["rows"])
}
CASE_IDS = {"F27", "F28", "F30", "F33", "F34", "F35", "F38", "F42", "F44"}
HIDDEN = 70
NOBODYS = "/proc/sys/vm/compact_memory"  # a file that nobody may read, root neither
NVIDIA_OFF = {"CUDA_VISIBLE_DEVICES": "-1"}


def cards_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, AmdCard]:
    """Cards by their names in a field case: each value tells which card it is."""
    return {row["key"]: _card(place, row) for place, row in enumerate(rows)}


def _card(place: int, row: Mapping[str, Any]) -> AmdCard:
    unique_id = int(row["uuid"].removeprefix("GPU-"), 16) if row.get("uuid") else 0
    return AmdCard(
        pci=row["pci"],
        minor=place,
        busy=10 + place,
        vram_total=64 * GIB,
        vram_used=(1 + place) * GIB,
        temperatures={"edge": 40 + place, "junction": 90},
        product_name=row["name"],
        unique_id=unique_id,
        kfd_nodes=(KfdNode(node=row.get("kfd_node") or HIDDEN + place, unique_id=unique_id),),
    )


def hide_unknown_nodes(fake: FakeSys) -> None:
    """Whose node is not known is a card whose node may not be read."""
    for properties in (fake.sys / "class/kfd/kfd/topology/nodes").glob(f"{HIDDEN // 10}?/properties"):
        properties.unlink()
        properties.symlink_to(NOBODYS)


def cpus_of(cards: Sequence[AmdCard]) -> int:
    """As many CPU nodes as stand in front of the cards' nodes."""
    return min((node.node for card in cards for node in card.kfd_nodes), default=1)


def fleet(name: str, env: Mapping[str, str], **further: object) -> dict[str, object]:
    return {"name": name, "runtime": "rocm", "env": dict(env), **further}


def started(start: Start, fake: FakeSys, fleets: Sequence[object], **options: Any) -> Daemon:
    config = {"backends": ["amd"], "sampling": {"reuse_seconds": 0}, "fleets": fleets, **options.get("config", {})}
    flags = [f"--path.sysfs={fake.sys}", f"--path.procfs={fake.proc}"]
    return start(options.get("environment", {}), json.dumps(config), flags)


def bound(scrape: Scrape, name: str) -> list[str]:
    """The addresses of a fleet's devices, in the order of its own numbers."""
    samples = scrape.of("gpu_fleet_device_info", fleet=name)
    samples.sort(key=lambda sample: int(sample.labels["fleet_index"]))
    assert [sample.labels["fleet_index"] for sample in samples] == [str(place) for place in range(len(samples))]
    return [sample.labels["pci_bus_id"] for sample in samples]


def read(scrape: Scrape, name: str) -> dict[str, list[float]]:
    """Every reading of a fleet by address."""
    found: dict[str, list[float]] = {}
    for family in (
        *("gpu_utilization_percent", "gpu_temperature_celsius", "gpu_memory_total_bytes"),
        *("gpu_memory_used_bytes", "gpu_memory_free_bytes"),
    ):
        for sample in scrape.of(family, fleet=name):
            found.setdefault(sample.labels["pci_bus_id"], []).append(sample.value)
    return found


def own(card: AmdCard) -> list[float]:
    """The card's values, in the same order."""
    assert card.vram_total is not None
    assert card.vram_used is not None
    busy = float(card.busy or 0)
    return [busy, card.temperatures["edge"], card.vram_total, card.vram_used, card.vram_total - card.vram_used]


def shows(scrape: Scrape, name: str, cards: Sequence[AmdCard]) -> None:
    """The fleet is exactly these cards, each with all of its own values."""
    assert bound(scrape, name) == [card.pci for card in cards]
    assert read(scrape, name) == {card.pci: own(card) for card in cards}
    assert scrape.value("gpu_fleet_mask_inverted", fleet=name) == 1


def refusal(scrape: Scrape, name: str) -> str:
    """Why the fleet is refused; it has no device and no reading then."""
    (sample,) = scrape.of("gpu_fleet_mask_refusal_info", fleet=name)
    assert bound(scrape, name) == []
    assert read(scrape, name) == {}
    return sample.labels["reason"]


def test_every_field_case_of_amd_is_here() -> None:
    assert CASES.keys() >= CASE_IDS


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_masked_fleet_has_its_cards_by_address(fake: FakeSys, start: Start, case: dict[str, Any]) -> None:
    """Each environment of the case as a fleet: amd-smi's numbers go by address, the fleet's by KFD node."""
    cards = cards_of(INVENTORIES[case["inventory"]])
    fake.write(list(cards.values()), cpus=cpus_of(list(cards.values())))
    hide_unknown_nodes(fake)
    rows = {f"row{number}": row for number, row in enumerate(case["rows"])}
    reach = {
        name: {"reach": [cards[key].pci for key in row["reach"]]} if row.get("reach") else {}
        for name, row in rows.items()
    }
    fleets = [fleet(name, row["env"], **reach[name]) for name, row in rows.items() if row.get("reach", []) is not None]
    scrape = started(start, fake, fleets).scrape()
    for entry in fleets:
        name = str(entry["name"])
        if "refuse" in rows[name]:
            assert refusal(scrape, name) == rows[name]["refuse"]
        else:
            shows(scrape, name, [cards[key] for key in rows[name]["visible"]])
    expected = {row["pci"]: str(row["index"]) for row in INVENTORIES[case["inventory"]]}
    if all("kfd_node" in row for row in INVENTORIES[case["inventory"]]):
        assert {s.labels["pci_bus_id"]: s.labels["physical_index"] for s in scrape.of("gpu_info")} == expected


def permuted() -> dict[str, AmdCard]:
    """Four cards whose KFD order is B, D, A, C."""
    return cards_of(INVENTORIES["permuted_mi300x"])


def test_both_numbers_stand_on_every_reading_f27(fake: FakeSys, start: Start) -> None:
    """F27: HIP's card 0 is amd-smi's card 1, and the reading says so."""
    fake.write(list(permuted().values()))
    scrape = started(start, fake, [fleet("torch", {"HIP_VISIBLE_DEVICES": "0"})]).scrape()
    labels = {"fleet": "torch", "fleet_index": "0", "physical_index": "1", "pci_bus_id": permuted()["B"].pci}
    assert scrape.value("gpu_temperature_celsius", uuid="GPU-2222222222222222", vendor="amd", **labels) == 41
    assert scrape.value("gpu_fleet_device_info", runtime="rocm", evidence="proven", **labels) == 1
    assert len(scrape.of("gpu_temperature_celsius")) == 1


def test_a_node_that_cannot_be_read_refuses_numbers_and_freezes_nothing_f27(fake: FakeSys, start: Start) -> None:
    """F27: while one card's place in the KFD is not known no number is inverted; then all are, rightly."""
    fake.write(list(permuted().values()))
    properties = fake.sys / "class/kfd/kfd/topology/nodes/2/properties"
    text = properties.read_text()
    properties.unlink()
    properties.symlink_to("/proc/self/mem")
    uuid = {"ROCR_VISIBLE_DEVICES": "GPU-1111111111111111"}
    daemon = started(start, fake, [fleet("torch", {"HIP_VISIBLE_DEVICES": "0"}), fleet("uuid", uuid)])
    for _ in range(2):
        scrape = daemon.scrape()
        assert refusal(scrape, "torch") == "inventory-incomplete"
        assert read(scrape, "uuid") == {permuted()["A"].pci: own(permuted()["A"])}
    properties.unlink()
    properties.write_text(text)
    healed = daemon.scrape()
    shows(healed, "torch", [permuted()["B"]])
    shows(healed, "uuid", [permuted()["A"]])


def test_one_variable_and_two_vendors_f37(fake: FakeSys, nvml: FakeNvml, start: Start) -> None:
    """F37: -1 hides the cards of both vendors, unless HIP has a variable of its own."""
    card = replace(permuted()["A"], kfd_nodes=(KfdNode(node=1, unique_id=0x77),))
    fake.write([card], cpus=1)
    nvml.write(equal_cards(1))
    fleets = [
        {"name": "neither", "env": NVIDIA_OFF},
        {"name": "amd", "env": NVIDIA_OFF | {"HIP_VISIBLE_DEVICES": "0"}},
        {"name": "both", "env": {}},
    ]
    options: dict[str, Any] = {"config": {"backends": ["nvidia", "amd"]}, "environment": nvml.environment()}
    scrape = started(start, fake, fleets, **options).scrape()
    vendors = {
        name: {sample.labels["vendor"] for sample in scrape.of("gpu_utilization_percent", fleet=name)}
        for name in ("neither", "amd", "both")
    }
    assert vendors == {"neither": set(), "amd": {"amd"}, "both": {"amd", "nvidia"}}
    assert read(scrape, "amd") == {card.pci: own(card)}
    assert {s.labels["runtime"]: s.value for s in scrape.of("gpu_fleet_mask_inverted", fleet="neither")} == {
        "cuda": 1,
        "rocm": 1,
    }


def parts_of(first: int, count: int) -> tuple[KfdNode, ...]:
    return tuple(KfdNode(node=first + part, partition=part, unique_id=0x100 * first + part) for part in range(count))


def test_partitions_are_hips_devices(fake: FakeSys, start: Start, tmp_path: Path) -> None:
    """Eight partitions and a card behind them: HIP counts nine, each mask finds its partition, and amd-smi's number."""
    cpx = AmdCard(
        pci="0000:0c:00.0",
        minor=0,
        busy=50,
        vram_total=192 * GIB,
        compute_partition="CPX",
        temperatures={"junction": 66},
        kfd_nodes=parts_of(2, 8),
    )
    behind = replace(permuted()["B"], minor=20, kfd_nodes=(KfdNode(node=1),))
    fake.write([cpx, behind], cpus=1)
    smi = FakeAmdSmi(tmp_path, build_or_skip(tmp_path / "amd_smi"))
    smi.write(
        [
            AmdGpu(
                bdf=f"0000:0c:00.{part}", kfd_id=part, node_id=2 + part, partition_id=part, gfx=70 + part, umc=0, mm=0
            )
            for part in range(8)
        ]
    )
    fleets = [
        fleet("hip", {"HIP_VISIBLE_DEVICES": "8,0,3"}),
        fleet("both", {"ROCR_VISIBLE_DEVICES": "3,4,5", "HIP_VISIBLE_DEVICES": "1"}),
        fleet("uuid", {"ROCR_VISIBLE_DEVICES": f"GPU-{0x205:016x}"}),
    ]
    scrape = started(start, fake, fleets, environment=smi.environment()).scrape()
    assert bound(scrape, "hip") == [cpx.pci, behind.pci, cpx.pci]
    found = {
        (s.labels["fleet"], s.labels["fleet_index"]): (
            s.labels.get("gpu_partition"),
            s.labels["physical_index"],
            s.value,
        )
        for s in scrape.of("gpu_utilization_percent")
    }
    assert found == {
        ("hip", "0"): ("7", "7", 77),
        ("hip", "1"): (None, "8", behind.busy),
        ("hip", "2"): ("2", "2", 72),
        ("both", "0"): ("3", "3", 73),
        ("uuid", "0"): ("5", "5", 75),
    }
    assert {s.labels["pci_bus_id"] for s in scrape.of("gpu_temperature_celsius")} == {behind.pci}


def test_an_index_space_holds_still_f91_f95(fake: FakeSys, start: Start) -> None:
    """F91, F95: a card that leaves, sleeps or is lost moves nobody, and comes back to its place."""
    cards = permuted()
    fleets = [fleet("torch", {"HIP_VISIBLE_DEVICES": "0,1,3"}), {"name": "host", "runtime": "host"}]
    fake.write(list(cards.values()))
    daemon = started(start, fake, fleets)
    before = daemon.scrape()
    shows(before, "torch", [cards["B"], cards["D"], cards["C"]])
    others = {cards[key].pci: own(cards[key]) for key in "DC"}

    fake.write([*(cards[key] for key in "ACD"), replace(cards["B"], driver="vfio-pci")])
    gone = daemon.scrape()
    assert read(gone, "torch") == others
    assert {s.labels["fleet_index"] for s in gone.of("gpu_utilization_percent", fleet="torch")} == {"1", "2"}
    assert gone.value("gpu_fleet_device_info", fleet="torch", pci_bus_id=cards["C"].pci, physical_index="1") == 1

    fake.write([*(cards[key] for key in "ACD"), replace(cards["B"], runtime_status="suspended")])
    asleep = daemon.scrape()
    assert asleep.state(pci_bus_id=cards["B"].pci) == "asleep"
    assert bound(asleep, "torch") == bound(before, "torch")
    assert read(asleep, "torch") == others

    fake.write(list(cards.values()))
    for name in AMD_ANSWERS:
        fake.fault(cards["B"].pci, name, "eio")
    lost = daemon.scrape()
    assert lost.state(pci_bus_id=cards["B"].pci) == "lost"
    assert bound(lost, "torch") == bound(before, "torch")
    assert read(lost, "torch") == others

    fake.write(list(cards.values()))
    after = daemon.scrape()
    for name in ("gpu_fleet_device_info", "gpu_utilization_percent", "gpu_temperature_celsius", "gpu_info"):
        assert after.of(name) == before.of(name)


def test_a_card_asleep_at_the_start_has_its_place_f91(fake: FakeSys, start: Start) -> None:
    """F91: the KFD and the bus tell who it is, so masks are inverted without waking it."""
    cards = permuted()
    fake.write([*(cards[key] for key in "ACD"), replace(cards["B"], runtime_status="suspended")])
    daemon = started(start, fake, [fleet("torch", {"HIP_VISIBLE_DEVICES": "0,1"})])
    scrape = daemon.scrape()
    assert bound(scrape, "torch") == [cards["B"].pci, cards["D"].pci]
    assert read(scrape, "torch") == {cards["D"].pci: own(cards["D"])}
    fake.write(list(cards.values()))
    woken = daemon.scrape()
    shows(woken, "torch", [cards["B"], cards["D"]])
    assert woken.of("gpu_fleet_device_info") == scrape.of("gpu_fleet_device_info")


def test_a_card_that_comes_changes_no_fleet_until_a_reload(fake: FakeSys, start: Start) -> None:
    cards = permuted()
    fake.write([cards["A"], cards["C"]], cpus=2)
    daemon = started(start, fake, [fleet("torch", {"HIP_VISIBLE_DEVICES": "0"})])
    shows(daemon.scrape(), "torch", [cards["A"]])
    fake.write(list(cards.values()))
    shows(daemon.scrape(), "torch", [cards["A"]])
    daemon.process.send_signal(1)
    daemon.wait_for_log("reloaded|loaded")
    reloaded = daemon.scrape_until(lambda scrape: bound(scrape, "torch") != [cards["A"].pci])
    shows(reloaded, "torch", [cards["B"]])


@pytest.mark.parametrize("driver", ["radeon", "amdgpu"])
def test_a_card_that_hip_cannot_have_takes_no_number(fake: FakeSys, start: Start, driver: str) -> None:
    """A card without a compute node (an old one, or one whose slot lacks atomics) is amd-smi's last, and no fleet's."""
    cards = permuted()
    other = AmdCard(pci="0000:01:00.0", minor=9, driver=driver, unique_id=0x99)
    fake.write([*cards.values(), other])
    fleets = [fleet("torch", {"HIP_VISIBLE_DEVICES": "0"}), fleet("uuid", {"ROCR_VISIBLE_DEVICES": f"GPU-{0x99:016x}"})]
    scrape = started(start, fake, fleets).scrape()
    shows(scrape, "torch", [cards["B"]])
    shows(scrape, "uuid", [])
    assert scrape.of("gpu_info", pci_bus_id=other.pci)[0].labels["physical_index"] == "4"


def test_a_lone_card_that_hip_cannot_have_is_not_its_first(fake: FakeSys, start: Start) -> None:
    """There is a KFD, without this card: HIP has no device at all."""
    alone = AmdCard(pci="0000:01:00.0", minor=9)
    fake.write([alone])
    shows(started(start, fake, [fleet("torch", {"HIP_VISIBLE_DEVICES": "0"})]).scrape(), "torch", [])
