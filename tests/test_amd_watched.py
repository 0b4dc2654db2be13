"""What is read of AMD's cards beside utilization, memory and temperature: each value is its card's own and in its unit,
what a card does not tell is absent, and a file that fails costs its own readings.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from exporter.backends.amd import AmdBackend
from exporter.backends.base import Places
from exporter.catalog import DEFAULT, READINGS
from exporter.model import VendorSample
from tests.backend_host import CORE, BackendHost, everything, state
from tests.fakes.amd_smi import FakeAmdSmi, Gpu
from tests.fakes.sysfs import AMD_ANSWERS, GIB, AmdCard, FakeSys, KfdNode, Process
from tests.harness import Start

Own = tuple[str, tuple[str, ...]]
Values = Mapping[Own, float]

A = AmdCard(pci="0000:03:00.0", minor=1, number=2, throttled=1 << 35 | 1, ras=True, kfd_nodes=(KfdNode(node=2),))
B = AmdCard(pci="0000:83:00.0", minor=0, number=5, throttled=1 << 17, ras=True, kfd_nodes=(KfdNode(node=1),))
DPX = AmdCard(
    pci="0000:c1:00.0",
    minor=4,
    number=9,
    pci_class="0x120000",
    vram_total=192 * GIB,
    compute_partition="DPX",
    memory_partition="NPS1",
    temperatures={"junction": 66, "mem": 50},
    kfd_nodes=tuple(KfdNode(node=3 + part, partition=part, memory=96 * GIB) for part in range(2)),
)
THROTTLED = {"power-cap", "current", "thermal", "regulator-thermal", "processor-hot", "reliability", "other"}
MEMORIES = ("umc", "sdma", "gfx", "mmhub")
BLOCKS = (*MEMORIES, "pcie-bif", "xgmi-wafl")
ALL = frozenset(READINGS)


class Host(BackendHost):
    """The backend on the fake trees; ``wanted`` are the metrics that the settings leave."""

    def __init__(self, fake: FakeSys, wanted: frozenset[str] = DEFAULT) -> None:
        places = Places(str(fake.sys), str(fake.proc), root="/nonexistent", wanted=wanted)
        super().__init__(AmdBackend(places), wanted)


def watched(sample: VendorSample, identity: str) -> dict[Own, float]:
    """A device's readings but those that other tests have."""
    return {own: value for own, value in everything(sample, identity).items() if own[0] not in CORE}


def of(sample: VendorSample, identity: str, metric: str) -> dict[tuple[str, ...], float]:
    """A metric's values of a device, by the family's own labels."""
    return {labels: value for (name, labels), value in everything(sample, identity).items() if name == metric}


def expected(number: int, throttled: set[str]) -> Values:
    """What a card of that number tells by default, with edge, junction and memory sensors of 51, 60 and 64 degrees."""
    sensors = {"gpu": 1, "junction": 2, "memory": 3}
    corrected = {block: 10.0 * place + number for place, block in enumerate(BLOCKS)}
    uncorrected = {block: float(place + number) for place, block in enumerate(BLOCKS)}
    return {
        ("junction_temperature", ()): 60,
        ("memory_temperature", ()): 64,
        **{("temperature_threshold", (name, "slowdown")): 110 - place + number for name, place in sensors.items()},
        **{("temperature_threshold", (name, "shutdown")): 115 - place + number for name, place in sensors.items()},
        ("memory_controller", ()): (7 + number) / 100,
        ("engine", ("video",)): (17 + number) / 100,
        ("power", ()): 187 + number,
        ("power_limit", ()): 303 + number,
        ("power_limit_default", ()): 299 + number,
        ("power_limit_maximum", ()): 348 + number,
        ("clock", ("graphics",)): (2105 + number) * 1e6,
        ("clock", ("memory",)): (1249 + number) * 1e6,
        ("clock_maximum", ("graphics",)): (2482 + number) * 1e6,
        ("clock_maximum", ("memory",)): (1249 + number) * 1e6,
        ("fan_speed", ("0",)): (51 + number) / 255,
        ("fan_rotation", ("0",)): 1450 + number,
        ("voltage", ()): (850 + number) / 1000,
        **{("throttled", (reason,)): float(reason in throttled) for reason in THROTTLED},
        ("pcie_generation", ()): 4,
        ("pcie_generation_maximum", ()): 4,
        ("pcie_width", ()): 16,
        ("pcie_width_maximum", ()): 16,
        ("pcie_replays", ()): 3 + number,
        ("pcie_errors", ("correctable",)): 4 + number,
        ("pcie_errors", ("nonfatal",)): 1 + number,
        ("pcie_errors", ("fatal",)): number,
        ("ecc_enabled", ()): 1,
        **{("ras_errors", (block, "corrected")): count for block, count in corrected.items()},
        **{("ras_errors", (block, "uncorrected")): count for block, count in uncorrected.items()},
        ("ecc_errors", ("corrected",)): sum(corrected[block] for block in MEMORIES),
        ("ecc_errors", ("uncorrected",)): sum(uncorrected[block] for block in MEMORIES),
        ("link_errors", ("", "corrected")): corrected["xgmi-wafl"],
        ("link_errors", ("", "uncorrected")): uncorrected["xgmi-wafl"],
        ("retired_pages", ("uncorrected",)): number + 1,
        ("retired_pages_pending", ()): 1,
    }


def test_every_reading_is_its_cards_own(fake: FakeSys) -> None:
    """Two cards, each of whose files says another number; throttled by heat and power, and by current."""
    fake.write([A, B])
    sample = Host(fake).read()
    assert watched(sample, A.pci) == pytest.approx(expected(2, {"power-cap", "thermal"}))
    assert watched(sample, B.pci) == pytest.approx(expected(5, {"current"}))
    assert sample.faults == ()


@pytest.mark.e2e
def test_a_page_has_them_under_both_numbers(fake: FakeSys, start: Start) -> None:
    """A fleet that numbers the cards otherwise has each value of the card behind its index."""
    cards = [replace(card, kfd_nodes=(replace(card.kfd_nodes[0], unique_id=0xA0 + card.number),)) for card in (A, B)]
    fake.write(cards)
    config = (
        "backends: [amd]\nsampling: {reuse_seconds: 0}\nfleets:\n  - {name: host, runtime: host}\n"
        "  - {name: chat, runtime: rocm, env: {ROCR_VISIBLE_DEVICES: 'GPU-00000000000000a5,GPU-00000000000000a2'}}\n"
    )
    scrape = start({}, config, [f"--path.sysfs={fake.sys}", f"--path.procfs={fake.proc}"]).scrape()
    for fleet_index, (card, place) in enumerate(((B, "1"), (A, "0"))):
        where = {"fleet": "chat", "fleet_index": str(fleet_index), "physical_index": place}
        assert scrape.value("gpu_power_watts", **where) == 187 + card.number
        assert scrape.value("gpu_pcie_errors_total", severity="fatal", **where) == card.number
        errors = scrape.of("gpu_interconnect_errors_total", error="corrected", **where)
        assert [(sample.value, "link" in sample.labels) for sample in errors] == [(50 + card.number, False)]


def test_no_file_is_opened_for_what_is_not_wanted(fake: FakeSys) -> None:
    """A read of any other file would hang."""
    fake.write([A])
    for name in ("hwmon/*/power1_*", "hwmon/*/*_input", "hwmon/*/pwm*", "ras/*", "gpu_*", "mem_*", "pp_*", "aer_*"):
        fake.fault(A.pci, name, "fifo")
    for name in ("vcn_busy_percent", "pcie_bw", "current_link_*", "max_link_*"):
        fake.fault(A.pci, name, "fifo")
    fake.set(A.pci, "mem_info_vram_total", f"{24 * GIB}\n")  # who the card is
    sample = Host(fake, frozenset({"pcie_replays"})).read(2)
    assert everything(sample, A.pci) == {("pcie_replays", ()): 5}


# --- what costs


def test_rates_of_the_bus_are_messages_of_the_largest_size(fake: FakeSys) -> None:
    """Read on request alone, since the driver counts for a second; received comes first. Three numbers or none."""
    fake.write([A])
    assert of(Host(fake).read(), A.pci, "pcie_receive_rate") == {}
    host = Host(fake, ALL)
    sample = host.read()
    assert of(sample, A.pci, "pcie_receive_rate") == {(): 1002 * 256}
    assert of(sample, A.pci, "pcie_transmit_rate") == {(): 2002 * 256}
    fake.set(A.pci, "pcie_bw", "1 2\n")
    sample = host.read()
    assert of(sample, A.pci, "pcie_transmit_rate") == {}
    assert ["pcie_bw" in fault.detail for fault in sample.faults] == [True]


def test_processes_are_those_that_compute(fake: FakeSys) -> None:
    """A process that holds only what the driver puts on every card does not; nor is it told where one is not known."""
    processes = [Process(pid=71, vram={1: 1 << 20, 2: GIB}), Process(pid=72, vram={1: GIB, 2: GIB})]
    fake.write([A, B], processes=processes)
    host = Host(fake, ALL)
    sample = host.read()
    assert of(sample, A.pci, "processes") == {(): 2}
    assert of(sample, B.pci, "processes") == {(): 1}
    held = fake.sys / "class/kfd/kfd/proc/72/vram_40002"
    held.unlink()
    held.symlink_to("/proc/self/mem")
    assert of(host.read(), A.pci, "processes") == {}
    fake.write([A, B], kfd=False)
    assert of(Host(fake, ALL).read(), A.pci, "processes") == {}


# --- partitions


def test_a_partition_has_what_is_its_own(fake: FakeSys) -> None:
    """Sensors, clocks, errors and the link are the card's, and its modes."""
    fake.write([DPX])
    sample = Host(fake, ALL).read()
    board = watched(sample, DPX.pci)
    assert board["partition_mode", ("dpx", "nps1")] == 1
    assert board["power", ()] == 187 + 9
    for part in range(2):
        found = everything(sample, f"{DPX.pci}/xcp{part}")
        assert found == {("memory_total", ()): 96 * GIB, ("processes", ()): 0}


@pytest.mark.parametrize(
    ("compute", "memory", "modes"),
    [("SPX", None, ("spx", "")), (None, "NPS4", ("", "nps4")), ("UNKNOWN", "UNKNOWN", None), (None, None, None)],
)
def test_modes_that_a_card_does_not_know_are_left_out(
    fake: FakeSys, compute: str | None, memory: str | None, modes: tuple[str, str] | None
) -> None:
    fake.write([replace(A, compute_partition=compute, memory_partition=memory)])
    assert of(Host(fake).read(), A.pci, "partition_mode") == ({} if modes is None else {modes: 1})


# --- sentinels and units

SENTINELS = {
    "mem_busy_percent": ("memory_controller", ("101", "65535", "-1", "4294967295")),
    "vcn_busy_percent": ("engine", ("101", "65535", "-1")),
    "pcie_replay_count": ("pcie_replays", ("-1", "4294967295", "18446744073709551615")),
    "hwmon/*/temp2_input": ("junction_temperature", ("0", "-1000", "255000", "65535000")),
    "hwmon/*/temp3_input": ("memory_temperature", ("0", "-1000", "255000", "65535000")),
    "hwmon/*/power1_cap": ("power_limit", ("0", "4294967295", "-1")),
    "hwmon/*/power1_cap_default": ("power_limit_default", ("0", "4294967295")),
    "hwmon/*/power1_cap_max": ("power_limit_maximum", ("0", "4294967295")),
    "hwmon/*/pwm1": ("fan_speed", ("256", "-1", "65535")),
    "hwmon/*/pwm1_max": ("fan_speed", ("0",)),
    "hwmon/*/fan1_input": ("fan_rotation", ("65535", "-1")),
    "hwmon/*/in0_input": ("voltage", ("0", "65535")),
    "pp_dpm_sclk": ("", ("", "S: 19Mhz *", "0: 0Mhz *")),
}


@pytest.mark.parametrize("name", SENTINELS)
def test_what_is_no_value_is_absent(fake: FakeSys, name: str) -> None:
    """It gives no reading and no fault, and the card's other values are there."""
    fake.write([A])
    host = Host(fake)
    before = watched(host.read(), A.pci)
    metric, texts = SENTINELS[name]
    for text in texts:
        fake.set(A.pci, name, f"{text}\n")
        sample = host.read()
        lost = {own for own in before if own[0] == metric} or {("clock_maximum", ("graphics",))}
        assert watched(sample, A.pci) == {own: value for own, value in before.items() if own not in lost}, text
        assert sample.faults == ()


@pytest.mark.parametrize("text", ["20000000000", "14000000000", "4294967295", "0", "-1"])
def test_f79_power_in_another_unit_is_none(fake: FakeSys, text: str) -> None:
    """F79: firmware whose power is in milliwatts where the driver takes it for watts gives 20,000 W, which no card has.
    A chip of a board of two, whose power is counted at the other, says 0.
    """
    fake.write([A])
    fake.set(A.pci, "hwmon/*/power1_average", f"{text}\n")
    sample = Host(fake).read()
    assert of(sample, A.pci, "power") == {}
    assert sample.faults == ()


def test_f79_an_apu_has_what_it_tells(fake: FakeSys) -> None:
    """F79: the edge sensor alone, power of now in microwatts, no fan, no memory clock; nothing is made up."""
    fake.write([replace(A, temperatures={"edge": 29}, ras=False)])
    for name in ("power1_average", "power1_cap", "power1_cap_*", "pwm1", "pwm1_max", "fan1_input", "freq2_input"):
        fake.fault(A.pci, f"hwmon/*/{name}", "missing")
    for name in ("mem_busy_percent", "vcn_busy_percent", "pp_dpm_mclk", "gpu_metrics", "pcie_replay_count", "aer_*"):
        fake.fault(A.pci, name, "missing")
    fake.set(A.pci, "hwmon/*/power1_input", "14321000\n")
    sample = Host(fake).read()
    assert watched(sample, A.pci) == {
        ("power", ()): 14.321,
        ("clock", ("graphics",)): 2107e6,
        ("clock_maximum", ("graphics",)): 2484e6,
        ("voltage", ()): 0.852,
        ("temperature_threshold", ("gpu", "slowdown")): 111,
        ("temperature_threshold", ("gpu", "shutdown")): 116,
        ("pcie_generation", ()): 4,
        ("pcie_generation_maximum", ()): 4,
        ("pcie_width", ()): 16,
        ("pcie_width_maximum", ()): 16,
    }
    assert everything(sample, A.pci)["temperature", ()] == 29
    assert sample.faults == ()


def test_f80_no_value_is_not_0_and_0_is_a_value(fake: FakeSys) -> None:
    """F80: shares and counts of 0 are shown; where their files are not there, there is nothing."""
    fake.write([A])
    host = Host(fake)
    names = {"mem_busy_percent": "memory_controller", "vcn_busy_percent": "engine", "pcie_replay_count": "pcie_replays"}
    for name, metric in names.items():
        fake.set(A.pci, name, "0\n")
        assert list(of(host.read(), A.pci, metric).values()) == [0]
        fake.fault(A.pci, name, "missing")
        assert of(host.read(), A.pci, metric) == {}
    fake.fault(A.pci, "ras", "missing")
    found = watched(host.read(), A.pci)
    assert not {metric for metric, _ in found} & {"ecc_enabled", "ecc_errors", "ras_errors", "retired_pages"}


# --- throttling


def table(revision: tuple[int, int], size: int, status_at: int, status: int) -> bytes:
    """A table of the driver's with that status, and an edge sensor of 45 degrees."""
    found = bytearray(b"\x00" * size)
    struct.pack_into("<HBBH", found, 0, size, *revision, 45)
    struct.pack_into("<Q", found, status_at, status)
    return bytes(found)


def put(fake: FakeSys, content: bytes) -> None:
    new = fake.sys / ".table"
    new.write_bytes(content)
    new.replace(fake.device(A.pci) / "gpu_metrics")


@pytest.mark.parametrize(
    ("status", "reasons"),
    [
        (0, set()),
        (1 << 7, {"power-cap"}),
        (1 << 23, {"current"}),
        (1 << 35 | 1 << 43, {"thermal"}),
        (1 << 38 | 1 << 46, {"regulator-thermal", "processor-hot"}),
        (1 << 57, {"reliability"}),
        (1 << 56, {"other"}),
        (1 << 63 | 1 << 31, {"other"}),
    ],
)
@pytest.mark.parametrize("layout", [((1, 3), 120, 112), ((2, 2), 128, 120), ((2, 3), 152, 120), ((2, 4), 168, 120)])
def test_reasons_of_each_layout(
    fake: FakeSys, layout: tuple[tuple[int, int], int, int], status: int, reasons: set[str]
) -> None:
    """A bit that is newer than this is a reason too."""
    fake.write([A])
    put(fake, table(*layout, status))
    found = of(Host(fake).read(), A.pci, "throttled")
    assert found == {(reason,): float(reason in reasons) for reason in THROTTLED}


UNKNOWN = {
    "an older table": table((1, 1), 96, 88, 1),
    "one of the MI300 series": table((1, 4), 264, 120, 1),
    "a newer one": table((1, 9), 512, 112, 1),
    "a newer APU's": table((3, 0), 264, 120, 1),
    "a size that the version does not have": table((1, 3), 128, 112, 1),
    "one that is cut off": table((1, 3), 120, 112, 1)[:112],
    "a status of ones": table((1, 3), 120, 112, 2**64 - 1),
    "no edge sensor: the MI300 series by older drivers": table((1, 3), 120, 112, 0).replace(b"\x2d\x00", b"\xff\xff"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_table_that_does_not_tell_gives_no_reason(fake: FakeSys, name: str) -> None:
    """That nothing holds the clocks down would be a statement."""
    fake.write([A])
    put(fake, UNKNOWN[name])
    sample = Host(fake).read()
    assert of(sample, A.pci, "throttled") == {}
    assert sample.faults == ()


# --- RAS


def test_pages_beyond_one_read_are_counted(fake: FakeSys) -> None:
    """A read of the file gives a page of text at most, 151 lines."""
    fake.write([A])
    lines = [f"0x{page:08x} : 0x00001000 : {'P' if page == 999 else 'R'}\n" for page in range(1000)]
    fake.set(A.pci, "ras/gpu_vram_bad_pages", "".join(lines))
    sample = Host(fake).read()
    assert of(sample, A.pci, "retired_pages") == {("uncorrected",): 999}
    assert of(sample, A.pci, "retired_pages_pending") == {(): 1}


def test_no_bad_page_is_a_reading(fake: FakeSys) -> None:
    fake.write([A])
    fake.fault(A.pci, "ras/gpu_vram_bad_pages", "empty")
    sample = Host(fake).read()
    assert of(sample, A.pci, "retired_pages") == {("uncorrected",): 0}
    assert of(sample, A.pci, "retired_pages_pending") == {(): 0}
    assert sample.faults == ()


@pytest.mark.parametrize("mask", ["0x5fe", "0x0"])
def test_memory_whose_errors_are_not_watched(fake: FakeSys, mask: str) -> None:
    fake.write([A])
    fake.set(A.pci, "ras/features", f"feature mask: {mask}\n")
    assert of(Host(fake).read(), A.pci, "ecc_enabled") == {(): 0}


def test_a_block_that_tells_nothing_now_takes_the_sum_with_it(fake: FakeSys) -> None:
    """While a card is reset its files say so, which is no fault; a sum of the others would go down."""
    fake.write([A])
    host = Host(fake)
    fake.set(A.pci, "ras/gfx_err_count", "Query currently inaccessible\n")
    sample = host.read()
    assert {block for block, _ in of(sample, A.pci, "ras_errors")} == set(BLOCKS) - {"gfx"}
    assert of(sample, A.pci, "ecc_errors") == {}
    assert sample.faults == ()
    fake.write([A])
    assert of(host.read(), A.pci, "ecc_errors").keys() == {("corrected",), ("uncorrected",)}


def test_newer_drivers_tell_deferred_errors_too(fake: FakeSys) -> None:
    """A third line; a deferred error is neither corrected nor yet uncorrected."""
    fake.write([A])
    fake.set(A.pci, "ras/umc_err_count", "ue: 1\nce: 2\nde: 3\n")
    found = of(Host(fake).read(), A.pci, "ras_errors")
    assert (found["umc", "uncorrected"], found["umc", "corrected"]) == (1, 2)


@pytest.mark.parametrize(
    ("device_id", "status", "expected"),
    [
        ("0x744c", 1 << 36, None),  # Navi 31
        ("0x7480", 1 << 36 | 1, None),
        ("0x7551", 1 << 36, None),  # Navi 48
        ("0x744c", 1 << 36 | 1 << 34, 1),
        ("0x744c", 1, 0),
        ("0x73bf", 1 << 36, 1),  # Navi 21
        ("0x740f", 1 << 36, 1),  # MI210
        ("0x74a1", 1 << 36, 1),
    ],
)
def test_a_bit_that_is_always_set_is_no_heat(
    fake: FakeSys, device_id: str, status: int, expected: float | None
) -> None:
    """RDNA 3 and 4 say at any temperature that the hottest spot holds their clocks down."""
    fake.write([replace(A, device_id=device_id, throttled=status)])
    found = of(Host(fake).read(), A.pci, "throttled")
    assert found.get(("thermal",)) == expected
    assert found["power-cap",] == status & 1


# --- faults

COSTS = {
    "mem_busy_percent": {"memory_controller"},
    "vcn_busy_percent": {"engine"},
    "gpu_metrics": {"throttled"},
    "pcie_replay_count": {"pcie_replays"},
    "hwmon/*/temp2_input": {"junction_temperature"},
    "hwmon/*/power1_average": {"power"},
    "hwmon/*/pwm1": {"fan_speed"},
    "hwmon/*/in0_input": {"voltage"},
    "ras/features": {"ecc_enabled"},
    "ras/umc_err_count": {"ecc_errors"},
    "ras/gpu_vram_bad_pages": {"retired_pages", "retired_pages_pending"},
    "pp_dpm_sclk": set(),
}


@pytest.mark.parametrize("name", COSTS)
def test_a_file_that_fails_costs_its_own_readings_and_is_named(fake: FakeSys, name: str) -> None:
    """The card's others stand, and it heals."""
    fake.write([A, B])
    host = Host(fake)
    before = host.read()
    fake.fault(A.pci, name, "eio")
    sample = host.read()
    kept = {metric for metric, _ in watched(sample, A.pci)}
    assert {metric for metric, _ in watched(before, A.pci)} - kept == COSTS[name]
    (fault,) = sample.faults
    assert (fault.reason, fault.key and fault.key.identity) == ("driver-error", A.pci)
    assert name.rpartition("/")[2] in fault.detail
    assert watched(sample, B.pci) == watched(before, B.pci)
    fake.write([A, B])
    assert host.read() == before


@pytest.mark.parametrize("name", ["ras/umc_err_count", "ras/features", "ras/gpu_vram_bad_pages", "gpu_metrics"])
def test_text_that_is_none_of_the_kernels_is_a_fault(fake: FakeSys, name: str) -> None:
    fake.write([A])
    fake.set(A.pci, name, "no\n" if name.startswith("ras") else "")
    sample = Host(fake).read()
    assert [name.rpartition("/")[2] in fault.detail for fault in sample.faults] == [True]


def test_a_label_that_cannot_be_read_costs_that_sensor(fake: FakeSys) -> None:
    fake.write([A])
    fake.fault(A.pci, "hwmon/*/temp2_label", "eio")
    host = Host(fake)
    sample = host.read()
    assert of(sample, A.pci, "junction_temperature") == {}
    assert of(sample, A.pci, "memory_temperature") == {(): 64}
    assert everything(sample, A.pci)["temperature", ()] == 51
    (fault,) = sample.faults
    assert fault.detail.startswith("junction_temperature: ")
    fake.write([A])
    assert of(host.read(), A.pci, "junction_temperature") == {(): 60}


def test_a_card_that_answers_nothing_itself_is_lost(fake: FakeSys) -> None:
    """What the driver and the bus have kept of it, limits, errors and the link, would say that it is there."""
    fake.write([A, B])
    for name in AMD_ANSWERS:
        fake.fault(A.pci, name, "eio")
    sample = Host(fake).read()
    assert (state(sample, A.pci), everything(sample, A.pci)) == ("lost", {})
    assert state(sample, B.pci) == "ok"


def test_a_card_whose_power_management_has_failed_says_so(fake: FakeSys) -> None:
    """Its files answer as those of a card that has no such values (EINVAL), which alone would be no fault."""
    fake.write([A, B])
    host = Host(fake)
    assert host.read().faults == ()
    fake.set(A.pci, "power/runtime_status", "error\n")
    for name in ("gpu_busy_percent", "mem_busy_percent"):
        fake.fault(A.pci, name, "missing")
    sample = host.read()
    (fault,) = sample.faults
    assert (fault.reason, fault.key and fault.key.identity) == ("driver-error", A.pci)
    assert "power/runtime_status" in fault.detail
    for name in AMD_ANSWERS:
        fake.fault(A.pci, name, "missing")
    sample = host.read()
    assert (state(sample, A.pci), everything(sample, A.pci)) == ("lost", {})


def test_a_limit_without_an_emergency_is_not_said_to_slow_down(fake: FakeSys) -> None:
    """Before Vega 10 it is where the card is switched off; what is done there the driver does not say."""
    fake.write([A])
    sensors = {"gpu", "junction", "memory"}
    limits = {(sensor, threshold) for sensor in sensors for threshold in ("slowdown", "shutdown")}
    assert of(Host(fake).read(), A.pci, "temperature_threshold").keys() == limits
    fake.fault(A.pci, "hwmon/*/temp1_emergency", "missing")
    changed = limits - {("gpu", "slowdown"), ("gpu", "shutdown")} | {("gpu", "critical")}
    assert of(Host(fake).read(), A.pci, "temperature_threshold").keys() == changed


# --- the library's energy


GPUS = [Gpu(bdf=A.pci, kfd_id=1, node_id=2, partition_id=0), Gpu(bdf=B.pci, kfd_id=2, node_id=1, partition_id=0)]
ENERGY = "gpu_energy_joules_total"


@pytest.mark.e2e
def test_f89_energy_is_the_counter_as_it_is(fake: FakeSys, start: Start, tmp_path: Path, amd_library: Path) -> None:
    """F89: ticks of 15.3 microjoules as joules, and what they are after a reset: nothing is smoothed or added up."""
    smi = FakeAmdSmi(tmp_path, amd_library)
    fake.write([A, B], cpus=1)
    smi.write([replace(GPUS[0], energy=65628), replace(GPUS[1], energy=2**40)])
    config = "backends: [amd]\nsampling: {reuse_seconds: 0}\nfleets: [{name: host, runtime: host}]\n"
    daemon = start(smi.environment(), config, [f"--path.sysfs={fake.sys}", f"--path.procfs={fake.proc}"])
    scrape = daemon.scrape_until(lambda page: len(page.of(ENERGY)) == 2)
    assert scrape.value(ENERGY, pci_bus_id=A.pci) == pytest.approx(1.0041084)
    assert scrape.value(ENERGY, pci_bus_id=B.pci) == pytest.approx(2**40 * 15.3e-6)
    smi.write([replace(GPUS[0], energy=10), replace(GPUS[1], energy=2**40)])
    assert daemon.scrape().value(ENERGY, pci_bus_id=A.pci) == pytest.approx(0.000153)
    for energy in (2**64 - 1, 2**32 - 1, 0, None):
        smi.write([replace(GPUS[0], energy=energy), replace(GPUS[1], energy=7)])
        scrape = daemon.scrape()
        assert [sample.labels["pci_bus_id"] for sample in scrape.of(ENERGY)] == [B.pci], energy
    smi.write([replace(gpu, energy=20) for gpu in GPUS])
    fake.fault(A.pci, "gpu_metrics", "eio")  # the library would say once more what it said last
    scrape = daemon.scrape()
    assert [sample.labels["pci_bus_id"] for sample in scrape.of(ENERGY)] == [B.pci]


def test_f89_the_kernels_energy_goes_first(fake: FakeSys) -> None:
    """In microjoules."""
    fake.write([A])
    host = Host(fake)
    assert of(host.read(), A.pci, "energy") == {}
    fake.set(A.pci, "hwmon/*/energy1_input", "123456789\n")
    assert of(host.read(), A.pci, "energy") == {(): 123.456789}
    fake.set(A.pci, "hwmon/*/energy1_input", f"{2**64 - 1}\n")
    assert of(host.read(), A.pci, "energy") == {}
