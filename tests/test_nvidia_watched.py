"""What NVIDIA's backend reads beside utilization, memory and temperature: each value is its card's own and in its unit,
what a card does not tell is absent, and a page costs a bounded number of calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from exporter import catalog
from tests.fakes.nvml import CALLS, FIELDS, FakeNvml, Gpu, Mig, build_or_skip, equal_cards, watched_cards
from tests.fakes.sysfs import FakeSys, OtherCard
from tests.harness import Scrape, Start

HOST = "sampling: {reuse_seconds: 0}\nfleets: [{name: host, runtime: host}]\nbackends: [nvidia]\n"


def expected(index: int) -> dict[str, float]:
    """Every default reading of one of :func:`watched_cards`, but its memory's, temperature and utilization, which other
    tests have.
    """
    field = {number: value + index for number, value in FIELDS.items()}
    reasons = {"power-cap": 1.0, "software-thermal": 1.0}
    others = ("idle", "application-clocks", "hardware-slowdown", "sync-boost", "hardware-thermal", "power-brake")
    actions = ("node-reboot", "drain-peers", "drain-and-reset", "bus-reset")
    reasons_of_time = ("power-cap", "sync-boost", "software-thermal", "hardware-thermal", "power-brake")
    seconds = dict(zip((*reasons_of_time, "board-limit", "reliability"), range(1, 8), strict=True))
    return {
        "gpu_memory_reserved_bytes": 512 * 2**20,
        "gpu_memory_controller_utilization_ratio": (10 * (index % 10 + 1) + 1) / 100,
        'gpu_engine_utilization_ratio{engine="encoder"}': (1 + index) / 100,
        'gpu_engine_utilization_ratio{engine="decoder"}': (11 + index) / 100,
        "gpu_memory_temperature_celsius": 60 + index,
        'gpu_temperature_threshold_celsius{sensor="gpu",threshold="shutdown"}': 100,
        'gpu_temperature_threshold_celsius{sensor="gpu",threshold="slowdown"}': 95,
        'gpu_temperature_threshold_celsius{sensor="gpu",threshold="maximum"}': 90,
        'gpu_temperature_threshold_celsius{sensor="memory",threshold="maximum"}': 93,
        "gpu_power_watts": field[186] / 1000,
        "gpu_power_limit_watts": field[190] / 1000,
        "gpu_power_limit_default_watts": field[189] / 1000,
        "gpu_power_limit_max_watts": field[188] / 1000,
        "gpu_energy_joules_total": field[83] / 1000,
        'gpu_clock_hertz{clock="sm"}': (1500 + index) * 1e6,
        'gpu_clock_hertz{clock="memory"}': (9000 + index) * 1e6,
        'gpu_clock_max_hertz{clock="sm"}': (2500 + index) * 1e6,
        'gpu_clock_max_hertz{clock="memory"}': (9500 + index) * 1e6,
        'gpu_fan_speed_ratio{fan="0"}': (30 + index) / 100,
        **{f'gpu_throttled{{reason="{reason}"}}': value for reason, value in reasons.items()},
        **{f'gpu_throttled{{reason="{r}"}}': 0.0 for r in (*others, "display-clocks")},
        **{
            f'gpu_throttled_seconds_total{{reason="{reason}"}}': value + index / 1e9
            for reason, value in seconds.items()
        },
        "gpu_pcie_replays_total": field[94],
        "gpu_pcie_transmit_bytes_total": field[197],
        "gpu_pcie_receive_bytes_total": field[198],
        "gpu_ecc_enabled": 1,
        'gpu_ecc_errors_total{error="corrected"}': field[3],
        'gpu_ecc_errors_total{error="uncorrected"}': field[4],
        'gpu_ecc_lifetime_errors_total{error="corrected"}': field[5],
        'gpu_ecc_lifetime_errors_total{error="uncorrected"}': field[6],
        'gpu_retired_pages{error="corrected"}': field[29],
        'gpu_retired_pages{error="uncorrected"}': field[30],
        "gpu_retired_pages_pending": 0,
        'gpu_remapped_rows{error="corrected"}': field[142],
        'gpu_remapped_rows{error="uncorrected"}': field[143],
        "gpu_row_remapping_pending": 1,
        "gpu_row_remapping_failed": 0,
        'gpu_recovery_needed{action="gpu-reset"}': 1,
        **{f'gpu_recovery_needed{{action="{action}"}}': 0.0 for action in actions},
        **{f'gpu_interconnect_link_up{{link="{link}"}}': 1.0 for link in range(2)},
        **{
            f'gpu_interconnect_{way}_bytes_total{{link="{link}"}}': 1024.0 * (kib + 100 * link + index)
            for way, kib in (("transmit", 1000), ("receive", 2000))
            for link in range(2)
        },
        **{
            f'gpu_interconnect_errors_total{{error="{error}",link="{link}"}}': count + 100 * link + index
            for error, count in (("replay", 5), ("recovery", 6), ("crc", 7))
            for link in range(2)
        },
        "gpu_xid_errors_total": 0,
    }


ELSEWHERE = ("gpu_utilization_percent", "gpu_memory_free_bytes", "gpu_memory_used_bytes", "gpu_memory_total_bytes")
OWN = {family.name: family.own for family in catalog.READINGS.values()}


def found(scrape: Scrape, **labels: str) -> dict[str, float]:
    """Every reading of the device with these labels, by its name and its family's own labels."""
    return {
        f"{name}{_own(name, sample.labels)}": sample.value
        for name in OWN
        if name not in (*ELSEWHERE, "gpu_temperature_celsius")
        for sample in scrape.of(name, **labels)
    }


def _own(name: str, labels: Mapping[str, str]) -> str:
    own = ",".join(f'{label}="{labels[label]}"' for label in sorted(OWN[name]))
    return f"{{{own}}}" if own else ""


@pytest.fixture
def watched(nvml: FakeNvml) -> FakeNvml:
    """Four cards that tell everything."""
    nvml.write(watched_cards(4))
    return nvml


@pytest.mark.e2e
def test_every_reading_is_its_cards_own(watched: FakeNvml, start: Start) -> None:
    """Each of four cards has all its values, in base units, under its own index, also for a fleet that numbers them
    otherwise.
    """
    chat = '  - {name: chat, runtime: cuda, env: {CUDA_VISIBLE_DEVICES: "3,1", CUDA_DEVICE_ORDER: PCI_BUS_ID}}\n'
    config = HOST.replace(
        "fleets: [{name: host, runtime: host}]\n", f"fleets:\n  - {{name: host, runtime: host}}\n{chat}"
    )
    scrape = start(watched.environment(), config).scrape()
    for index in range(4):
        shown = found(scrape, fleet="host", physical_index=str(index))
        assert shown.keys() == expected(index).keys()
        assert shown == pytest.approx(expected(index))
    for fleet_index, index in enumerate((3, 1)):
        assert found(scrape, fleet="chat", fleet_index=str(fleet_index)) == pytest.approx(expected(index))


@pytest.mark.e2e
def test_a_page_makes_at_most_twelve_calls_a_card(nvml: FakeNvml, start: Start, tmp_path: Path) -> None:
    """Eight cards with every default family, whose bus stands still: the calls of one page, counted."""
    cards = watched_cards(8)
    tree = FakeSys(tmp_path / "tree")
    tree.write([OtherCard(pci=card.pci[4:]) for card in cards if card.pci])
    nvml.write(cards)
    daemon = start(nvml.environment(), HOST, [f"--path.sysfs={tree.sys}"])
    for _ in range(4):  # until it is known what the cards do not offer, their MIG mode
        daemon.scrape()
    log = tmp_path / "calls"
    nvml.write(cards, lines=[f"log {log}"])
    scrape = daemon.scrape()
    assert expected(7).keys() <= found(scrape, physical_index="7").keys()
    calls = Counter(line.split()[1] for line in log.read_text(encoding="utf-8").splitlines())
    per_card = [calls[str(index)] for index in range(8)]
    assert max(per_card) <= 12, calls
    assert calls["-"] <= 4  # the count, and one look at the events


def _calls(log: Path) -> set[str]:
    return {line.split()[0] for line in log.read_text(encoding="utf-8").splitlines()}


@pytest.mark.e2e
def test_nothing_is_set(watched: FakeNvml, start: Start, tmp_path: Path) -> None:
    """The pretend library has every call that is made, and none of them changes a card."""
    log = tmp_path / "calls"
    watched.write(watched_cards(4), lines=[f"log {log}"])
    daemon = start(watched.environment(), HOST)
    daemon.scrape()
    called = _calls(log)
    assert called <= CALLS
    changing = ("DeviceSet", "DeviceReset", "DeviceClear", "SystemSet", "Freeze", "Create", "Destroy")
    assert not [name for name in called if any(word in name for word in changing) and name != "nvmlEventSetCreate"]


SENTINELS: dict[str, tuple[Gpu, set[str]]] = {
    "a removed sensor": (Gpu(fields=("82 255 type=uint",)), {"gpu_memory_temperature_celsius"}),
    "all ones": (
        Gpu(power=2**32 - 1, limit=2**32 - 1, fans=1, fan=2**32 - 1, sm_clock=2**32 - 1, memory_clock=2**32 - 1),
        {"gpu_power_watts", "gpu_power_limit_watts", "gpu_fan_speed_ratio", "gpu_clock_hertz"},
    ),
    "not available": (
        Gpu(fields=tuple(f"{number} {2**64 - 1}" for number in (83, 3, 4, 94, 197, 198, 269))),
        {"gpu_energy_joules_total", "gpu_ecc_errors_total", "gpu_pcie_replays_total", "gpu_pcie_transmit_bytes_total"},
    ),
    "negative": (
        Gpu(fields=("186 -1 type=si", "83 -5 type=sll", "94 -1 type=sll")),
        {"gpu_power_watts", "gpu_energy_joules_total", "gpu_pcie_replays_total"},
    ),
    "no switch": (Gpu(fields=("1 7", "144 2", "31 9")), {"gpu_ecc_enabled", "gpu_row_remapping_pending"}),
    "shares above all": (Gpu(encoder=255, decoder=101), {"gpu_engine_utilization_ratio"}),
    "an unknown state": (Gpu(pstate=32, reasons=2**64 - 1), {"gpu_performance_state", "gpu_throttled"}),
    "a field's own error": (
        Gpu(fields=("83 error 3", "3 error 4", "4 error 999", "94 error 6")),
        {"gpu_energy_joules_total", "gpu_ecc_errors_total", "gpu_pcie_replays_total"},
    ),
    "not a number": (Gpu(fields=("186 nan type=double", "83 inf type=double")), {"gpu_power_watts"}),
}


@pytest.mark.e2e
@pytest.mark.parametrize("name", SENTINELS)
def test_what_is_no_value_is_absent(nvml: FakeNvml, start: Start, name: str) -> None:
    """A vendor's way to say that there is none gives no series, and no fault; the card's other values are there."""
    odd, lacking = SENTINELS[name]
    plain = equal_cards(2)
    given = {field: value for field in odd.__dataclass_fields__ if (value := getattr(odd, field)) not in (None, ())}
    nvml.write([replace(plain[0], **given), plain[1]])
    scrape = start(nvml.environment(), HOST).scrape()
    assert not [sample for family in lacking for sample in scrape.of(family)]
    assert scrape.value("gpu_temperature_celsius", physical_index="0") == 40
    assert {sample.value for sample in scrape.of("gpu_exporter_backend_faults_total")} == {0}


@pytest.mark.e2e
def test_fields_of_every_type_are_read(nvml: FakeNvml, start: Start) -> None:
    """A field says in which type its value is."""
    types = ("double", "uint", "ulong", "ull", "sll", "si", "usi")
    cards = [replace(card, fields=(f"186 6400 type={kind}",)) for card, kind in zip(equal_cards(7), types, strict=True)]
    nvml.write(cards)
    scrape = start(nvml.environment(), HOST).scrape()
    assert [sample.value for sample in scrape.of("gpu_power_watts")] == [6.4] * 7


@pytest.mark.e2e
def test_an_average_and_the_calls_stand_in_for_what_fields_do_not_tell(nvml: FakeNvml, start: Start) -> None:
    """Power now comes before its average, and the driver's calls of before there were such fields after them."""
    now, average, called = equal_cards(3)
    nvml.write(
        [
            replace(now, fields=("186 1000", "185 2000"), power=3000),
            replace(average, fields=("185 2000", "190 9000"), power=3000, limit=8000),
            replace(called, power=3000, limit=8000),
        ]
    )
    scrape = start(nvml.environment(), HOST).scrape()
    assert [sample.value for sample in scrape.of("gpu_power_watts")] == [1, 2, 3]
    assert [sample.value for sample in scrape.of("gpu_power_limit_watts")] == [9, 8]


@pytest.mark.e2e
def test_only_reasons_that_a_card_can_tell_are_told(nvml: FakeNvml, start: Start) -> None:
    """By its mask of them; where it has none, those that every driver knows. One that holds is told all the same."""
    some, newer, silent, odd = equal_cards(4)
    nvml.write(
        [
            replace(some, reasons=0x4, supported=0x5),
            replace(newer, reasons=0x200, supported=0x7FF),
            replace(silent, reasons=0x400),
            replace(odd, reasons=0x8, supported=0x5),
        ]
    )
    scrape = start(nvml.environment(), HOST).scrape()

    def told(index: int) -> dict[str, float]:
        found = scrape.of("gpu_throttled", physical_index=str(index))
        return {sample.labels["reason"]: sample.value for sample in found}

    assert told(0) == {"idle": 0, "power-cap": 1}
    assert len(told(1)) == 11
    assert (told(1)["board-limit"], told(1)["reliability"]) == (1, 0)
    assert (len(told(2)), told(2)["reliability"], "board-limit" in told(2)) == (10, 1, False)
    assert told(3) == {"idle": 0, "power-cap": 0, "hardware-slowdown": 1}


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        ("550.54.15", {"software-thermal": 75}),
        ("575.51.03", {"software-thermal": 251, "hardware-thermal": 252, "power-brake": 253}),
        ("580.65.06", {"software-thermal": 251, "hardware-thermal": 252, "power-brake": 253}),
        ("580.82.07", {"software-thermal": 269, "hardware-thermal": 270, "power-brake": 271}),
        ("610.43.02", {"software-thermal": 269, "hardware-thermal": 270, "power-brake": 271}),
        ("of somebody", {"software-thermal": 75}),
    ],
)
def test_fields_are_what_the_driver_calls_so(
    nvml: FakeNvml, start: Start, driver: str, expected: dict[str, int]
) -> None:
    """Numbers of the time that clocks were held down have moved, and others stand in their place."""
    (card,) = equal_cards(1)
    fields = tuple(f"{number} {number}000000000" for number in (75, 251, 252, 253, 269, 270, 271))
    nvml.write([replace(card, fields=fields)], driver=driver)
    scrape = start(nvml.environment(), HOST).scrape()
    seconds = {sample.labels["reason"]: sample.value for sample in scrape.of("gpu_throttled_seconds_total")}
    assert seconds == expected


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("driver", "number", "expected"),
    [
        ("575.51.03", 4, "drain-and-reset"),
        ("575.51.03", 5, None),
        ("580.95.05", 5, "bus-reset"),
        ("595.45.04", 5, None),
        ("610.43.02", 5, "recover-imex-domain"),
        ("610.43.02", 7, "system-reboot"),
        ("610.43.02", 8, None),
    ],
)
def test_an_action_is_what_the_driver_calls_so(
    nvml: FakeNvml, start: Start, driver: str, number: int, expected: str | None
) -> None:
    """Of a number that the driver's own header has no name for nothing is told."""
    nvml.write([replace(equal_cards(1)[0], fields=(f"230 {number}",))], driver=driver)
    found = start(nvml.environment(), HOST).scrape().of("gpu_recovery_needed")
    assert [sample.labels["action"] for sample in found if sample.value == 1] == ([expected] if expected else [])
    assert bool(found) == (expected is not None)


@pytest.mark.e2e
def test_a_counter_keeps_its_source(nvml: FakeNvml, start: Start) -> None:
    """Another field that counts from elsewhere is no stand-in once the first has answered."""
    (card,) = equal_cards(1)
    both = replace(card, fields=("269 1000000000", "75 9000000000000"))
    nvml.write([both])
    daemon = start(nvml.environment(), HOST)
    assert daemon.scrape().value("gpu_throttled_seconds_total", reason="software-thermal") == 1
    for code in (3, 10, 999):
        nvml.write([replace(both, fields=(f"269 error {code}", both.fields[1]))])
        assert not daemon.scrape().of("gpu_throttled_seconds_total", reason="software-thermal")
    nvml.write([both])
    assert daemon.scrape().value("gpu_throttled_seconds_total", reason="software-thermal") == 1


@pytest.mark.e2e
def test_an_older_driver_has_what_it_has(tmp_path: Path, start: Start) -> None:
    """Without the newer symbols the older ones are asked, and what has none is absent without a fault."""
    newer = ("nvmlDeviceGetFieldValues", "nvmlDeviceGetCurrentClocksEventReasons", "nvmlEventSetCreate")
    older = FakeNvml(tmp_path, build_or_skip(tmp_path / "lib", newer))
    older.write([replace(card, power=71_250, limit=300_000) for card in watched_cards(2)])
    scrape = start(older.environment(), HOST).scrape()
    shown = found(scrape, physical_index="1")
    assert shown['gpu_throttled{reason="power-cap"}'] == 1
    assert shown["gpu_power_watts"] == 71.25
    assert not [name for name in shown if name.startswith(("gpu_energy", "gpu_ecc", "gpu_xid", "gpu_interconnect"))]
    assert {sample.value for sample in scrape.of("gpu_exporter_backend_faults_total")} == {0}


@pytest.mark.e2e
def test_what_passes_is_asked_for_again(nvml: FakeNvml, start: Start) -> None:
    """A reading that a card has given once comes back as soon as the card gives it again."""
    cards = watched_cards(1)
    nvml.write(cards)
    daemon = start(nvml.environment(), HOST)
    assert daemon.scrape().value("gpu_clock_hertz", clock="sm") == 1.5e9
    nvml.write([replace(cards[0], sm_clock=None)])
    for _ in range(6):
        assert not daemon.scrape().of("gpu_clock_hertz", clock="sm")
    nvml.write(cards)
    assert daemon.scrape().value("gpu_clock_hertz", clock="sm") == 1.5e9


# --- XID errors


@pytest.mark.e2e
def test_an_xid_is_counted_on_its_card(watched: FakeNvml, start: Start) -> None:
    """Errors are counted from the start on, the last has its number and time, and no other card has either."""
    daemon = start(watched.environment(), HOST)
    before = daemon.scrape()
    assert [sample.value for sample in before.of("gpu_xid_errors_total")] == [0] * 4
    assert not before.of("gpu_xid_last_code")
    watched.write(watched_cards(4), lines=["xid 2 31", "xid 2 79", "xid 0 13"])
    scrape = daemon.scrape()
    assert [sample.value for sample in scrape.of("gpu_xid_errors_total")] == [1, 0, 2, 0]
    assert {sample.labels["physical_index"]: sample.value for sample in scrape.of("gpu_xid_last_code")} == {
        "0": 13,
        "2": 79,
    }
    times = [sample.value for sample in scrape.of("gpu_xid_last_timestamp_seconds")]
    assert len(times) == 2
    assert times[0] == times[1] or abs(times[0] - times[1]) < 60
    assert daemon.scrape().value("gpu_xid_errors_total", physical_index="2") == 2


@pytest.mark.e2e
def test_a_card_without_events_has_no_count(nvml: FakeNvml, start: Start) -> None:
    """Where errors are not told, none is counted: not even zero."""
    tells, silent = watched_cards(2)
    nvml.write([tells, replace(silent, xids=None)])
    daemon = start(nvml.environment(), HOST)
    daemon.scrape()
    nvml.write([tells, replace(silent, xids=None)], lines=["xid 1 79", "xid 0 31"])
    scrape = daemon.scrape()
    assert [sample.labels["physical_index"] for sample in scrape.of("gpu_xid_errors_total")] == ["0"]
    assert scrape.value("gpu_xid_errors_total", physical_index="0") == 1


# --- MIG


def instances(board: Gpu) -> Gpu:
    """The board in MIG mode with two instances and a compute instance that is less than its GPU instance."""
    names = (("1g.10gb", 7, 0), ("2g.20gb", 3, 0), ("1c.3g.40gb", 5, 1))
    parts = tuple(
        Mig(
            index=place,
            uuid=f"MIG-{place}",
            gi=gpu_instance,
            ci=compute_instance,
            name=f"NVIDIA H100 MIG {profile}",
            total=2**34,
            free=2**33,
            used=2**33,
            mps=14 * (place + 1),
            gpm=30 + place,
            gpm_sm=40 + place,
        )
        for place, (profile, gpu_instance, compute_instance) in enumerate(names)
    )
    return replace(board, mig=1, util=None, gpm=1, instances=parts)


@pytest.mark.e2e
def test_an_instance_that_is_made_anew_is_read_anew(nvml: FakeNvml, start: Start) -> None:
    """Also under the UUID of one before: what was constant of that says nothing of this, nor does its last sample."""
    (board,) = equal_cards(1)
    small = instances(board)
    nvml.write([small])
    daemon = start(nvml.environment(), HOST)
    daemon.scrape()
    assert len(daemon.scrape().of("gpu_utilization_percent")) == 2
    nvml.write([replace(small, instances=())])
    daemon.scrape()
    nvml.write([replace(small, instances=(replace(small.instances[0], mps=99, name="NVIDIA H100 MIG 7g.80gb"),))])
    scrape = daemon.scrape()
    assert [sample.value for sample in scrape.of("gpu_mig_instance_multiprocessors")] == [99]
    assert not scrape.of("gpu_utilization_percent")
    assert daemon.scrape().value("gpu_utilization_percent") == 30


@pytest.mark.e2e
@pytest.mark.parametrize("call", ["nvmlGpmMigSampleGet", "nvmlGpmMetricsGet"])
def test_monitoring_that_fails_is_a_fault(nvml: FakeNvml, start: Start, call: str) -> None:
    """It costs the instances' utilization, which nothing else tells of."""
    nvml.write([instances(equal_cards(1)[0])], lines=[f"fault {call} * 999"])
    daemon = start(nvml.environment(), HOST)
    daemon.scrape()
    scrape = daemon.scrape()
    assert not scrape.of("gpu_utilization_percent")
    assert scrape.value("gpu_exporter_backend_faults_total", vendor="nvidia", reason="driver-error") > 0
    assert len(scrape.of("gpu_mig_instance_info")) == 3


@pytest.mark.e2e
def test_an_instance_has_its_profile_and_its_own_utilization(nvml: FakeNvml, start: Start) -> None:
    """GPM tells an instance's share from the second page on; a compute instance has none of its GPU instance's."""
    nvml.write([instances(equal_cards(1)[0])])
    daemon = start(nvml.environment(), HOST)
    daemon.scrape()
    scrape = daemon.scrape()
    shares = {sample.labels["gpu_partition"]: sample.value for sample in scrape.of("gpu_utilization_percent")}
    assert shares == {"7/0": 30, "3/0": 31}
    profiles = {
        sample.labels["gpu_partition"]: sample.labels["profile"] for sample in scrape.of("gpu_mig_instance_info")
    }
    assert profiles == {"7/0": "1g.10gb", "3/0": "2g.20gb", "5/1": "1c.3g.40gb"}
    sizes = {sample.labels["gpu_partition"]: sample.value for sample in scrape.of("gpu_mig_instance_multiprocessors")}
    assert sizes == {"7/0": 14, "3/0": 28, "5/1": 42}
    assert not scrape.of("gpu_sm_active_ratio")
