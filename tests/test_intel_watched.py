"""What Intel's drivers publish for operators: power, clocks, fans and the like, each card's own and in its unit."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from exporter.backends.base import Places
from exporter.backends.intel import IntelBackend
from exporter.catalog import DEFAULT
from exporter.worker import Worker
from tests.backend_host import BackendHost, everything, state
from tests.fakes.intel_trees import REASONS
from tests.fakes.sysfs import FakeSys, IntelCard
from tests.harness import Start
from tests.test_intel_backend import ARC_A, ARC_B, FRESH, IGPU, MAX_I915, MAX_XE, daemon_on

XE = replace(ARC_B, watched=1, media=True)
I915 = replace(ARC_A, watched=3, media=True)
Own = Mapping[tuple[str, tuple[str, ...]], float]

WORDS = {
    "pl1": "power-cap",
    "pl2": "power-burst",
    "pl4": "power-peak",
    "thermal": "hardware-thermal",
    "prochot": "processor-hot",
    "ratl": "average-thermal",
    "vr_thermalert": "regulator-thermal",
    "vr_tdc": "regulator-current",
}


class Host(BackendHost):
    """The backend on the fake trees, without a library, with the metrics that are wanted."""

    def __init__(self, fake: FakeSys, wanted: frozenset[str] = DEFAULT) -> None:
        places = Places(str(fake.sys), str(fake.proc), "/nonexistent/libze_loader.so.1", "/x", wanted=wanted)
        backend = IntelBackend(places)
        super().__init__(backend)
        self.worker = Worker(backend, wanted)


def own(metric: str, found: Own) -> dict[str, float]:
    """A family's values, by their labels."""
    return {",".join(labels): value for (name, labels), value in found.items() if name == metric}


def one(fake: FakeSys, card: IntelCard, identity: str = "") -> Own:
    """What a single look at the host gives of a card, or of its tile."""
    return everything(Host(fake).read(), identity or card.pci)


def test_every_reading_is_its_cards_own(fake: FakeSys, start: Start) -> None:
    """Two cards of xe, one of i915 and an integrated one: all that each driver tells, in base units."""
    second = replace(XE, pci="0000:0c:00.0", minor=5, watched=2, media=False)
    integrated = replace(IGPU, watched=4, hwmon=False)
    fake.write([XE, second, I915, integrated])
    page = daemon_on(start, fake, FRESH + "fleets: [{name: host, runtime: host}]\n").scrape()

    def told(name: str, card: IntelCard) -> dict[str, float]:
        labels = [sample for sample in page.of(name) if sample.labels["pci_bus_id"] == card.pci]
        usual = {"fleet", "fleet_index", "physical_index", "vendor", "pci_bus_id", "uuid", "gpu_partition"}
        return {
            ",".join(value for key, value in sorted(each.labels.items()) if key not in usual): each.value
            for each in labels
        }

    for card, more in ((XE, 1), (second, 2), (I915, 3)):
        assert told("gpu_energy_joules_total", card) == {"": 5 + more}
        assert told("gpu_power_limit_watts", card) == {"": 190 + more}
        assert told("gpu_power_limit_default_watts", card) == {"": 200 + more}
        volts = 0.7 if card is I915 else 0.8
        assert told("gpu_voltage_volts", card) == {"": pytest.approx(volts + more / 1000)}
        media = {"media": (1100 + more) * 1e6} if card.media else {}
        assert told("gpu_clock_hertz", card) == {"graphics": (1500 + more) * 1e6, **media}
        media = {"media": (2000 + more) * 1e6} if card.media else {}
        assert told("gpu_clock_max_hertz", card) == {"graphics": (2400 + more) * 1e6, **media}
        assert told("gpu_throttled", card) == dict.fromkeys(WORDS.values(), 0)
        assert told("gpu_pcie_link_generation", card) == {"": 4}
        assert told("gpu_pcie_link_width_lanes", card) == {"": 16}
    for card, more in ((XE, 1), (second, 2)):
        assert told("gpu_fan_speed_rpm", card) == {"0": 1200 + more, "1": 1300 + more}
        assert told("gpu_memory_temperature_celsius", card) == {"": 52}
        assert told("gpu_temperature_threshold_celsius", card) == {
            "gpu,critical": 92 + more,
            "gpu,shutdown": 102 + more,
            "gpu,maximum": 80 + more,
            "memory,critical": 93 + more,
            "memory,shutdown": 103 + more,
        }
    assert told("gpu_fan_speed_rpm", I915) == {"0": 1103}
    assert told("gpu_memory_temperature_celsius", I915) == told("gpu_temperature_threshold_celsius", I915) == {}
    assert told("gpu_clock_hertz", integrated) == {"graphics": 1504e6}
    for name in ("gpu_energy_joules_total", "gpu_power_limit_watts", "gpu_voltage_volts", "gpu_fan_speed_rpm"):
        assert told(name, integrated) == {}


@pytest.mark.parametrize(
    ("file", "text", "metric", "expected"),
    [
        ("hwmon/*/energy1_input", "0", "energy", {}),
        ("hwmon/*/energy1_input", "18446744073709551615", "energy", {}),
        ("hwmon/*/power1_max", "0", "power_limit", {}),
        ("hwmon/*/power1_max", "18446744073709551615", "power_limit", {}),
        ("hwmon/*/power1_max", "-1", "power_limit", {}),
        ("hwmon/*/power1_rated_max", "0", "power_limit_default", {}),
        ("hwmon/*/in1_input", "0", "voltage", {}),
        ("hwmon/*/in1_input", "655350", "voltage", {}),
        ("hwmon/*/fan1_input", "-1", "fan_rotation", {"1": 1301}),
        ("hwmon/*/fan1_input", "65535", "fan_rotation", {"1": 1301}),
        ("hwmon/*/fan1_input", "0", "fan_rotation", {"0": 0, "1": 1301}),
        ("hwmon/*/temp3_input", "255000", "memory_temperature", {}),
        ("hwmon/*/temp3_input", "0", "memory_temperature", {}),
        # A GT that is powered down has no clock, and says so.
        ("tile0/gt1/freq0/act_freq", "0", "clock", {"graphics": 1501e6, "media": 0}),
        ("tile0/gt1/freq0/act_freq", "4294967295", "clock", {"graphics": 1501e6}),
        ("tile0/gt1/freq0/rp0_freq", "0", "clock_maximum", {"graphics": 2401e6}),
        # What is no number is a fault.
        ("hwmon/*/fan2_input", "N/A", "fan_rotation", {"0": 1201}),
    ],
)
def test_a_sentinel_is_no_value(fake: FakeSys, file: str, text: str, metric: str, expected: dict[str, float]) -> None:
    """What stands for *unknown*, *switched off* or *gone* is absent, and costs nothing else."""
    fake.write([XE])
    before = one(fake, XE)
    fake.set(XE.pci, file, f"{text}\n")
    sample = Host(fake).read()
    found = everything(sample, XE.pci)
    assert own(metric, found) == expected
    assert {key for key in before if key[0] != metric} == {key for key in found if key[0] != metric}
    assert [(fault.reason, metric in fault.detail) for fault in sample.faults] == (
        [("driver-error", True)] if text == "N/A" else []
    )


@pytest.mark.parametrize("card", [XE, I915], ids=["xe", "i915"])
def test_power_is_the_energy_over_the_time(fake: FakeSys, card: IntelCard) -> None:
    """None at first, which is pending; none where the counter went back or stands, as nothing draws no power."""
    fake.write([card])
    host = Host(fake)

    def read(joules: float) -> float | None:
        fake.set(card.pci, "hwmon/*/energy1_input", f"{int(joules * 1e6)}\n")
        sample = host.read()
        pending.append(sample.pending)
        return everything(sample, card.pci).get(("power", ()))

    pending: list[bool] = []
    earliest = time.monotonic()
    assert read(10) is None
    latest = time.monotonic()
    time.sleep(0.2)
    sooner = time.monotonic()
    watts = read(40)
    later = time.monotonic()
    assert watts is not None
    assert 30 / (later - earliest) <= watts <= 30 / (sooner - latest)
    assert pending == [True, False]
    assert [read(joules) for joules in (40, 7, 9)] == [None, None, None]
    assert read(11) is not None


def test_a_counter_that_dives_for_one_reading_is_not_followed(fake: FakeSys) -> None:
    """Some drivers' counters do, and their increase would be all that the card has ever used; else it starts anew."""
    fake.write([XE])
    host = Host(fake)

    def read(joules: int) -> float | None:
        fake.set(XE.pci, "hwmon/*/energy1_input", f"{joules * 1_000_000}\n")
        return everything(host.read(), XE.pci).get(("energy", ()))

    assert [read(joules) for joules in (22_543_283, 200, 22_543_290)] == [22_543_283, None, 22_543_290]
    assert [read(joules) for joules in (3, 4, 5, 2, 3)] == [None, 4, 5, None, 3]


def test_a_card_that_slept_starts_anew(fake: FakeSys) -> None:
    """What it used before says nothing of what it draws now."""
    fake.write([XE, I915])
    host = Host(fake)
    host.read()
    fake.set(XE.pci, "power/runtime_status", "suspended\n")
    assert state(host.read(), XE.pci) == "asleep"
    fake.set(XE.pci, "power/runtime_status", "active\n")
    time.sleep(0.05)
    for card in (XE, I915):
        fake.set(card.pci, "hwmon/*/energy1_input", "9000000\n")
    sample = host.read()
    assert [("power", ()) in everything(sample, card.pci) for card in (XE, I915)] == [False, True]


def test_limits_are_of_what_the_power_is_of(fake: FakeSys) -> None:
    """Where xe counts the package's energy alone, its limits are the package's too, whatever else has a number."""
    fake.write([XE])
    fake.fault(XE.pci, "hwmon/*/energy1_*", "missing")
    found = one(fake, XE)
    assert [own(metric, found)[""] for metric in ("energy", "power_limit", "power_limit_default")] == [4, 91, 101]
    fake.write([XE])
    fake.fault(XE.pci, "hwmon/*/power1_*", "missing")
    found = one(fake, XE)
    assert own("energy", found) == {"": 6}
    assert own("power_limit", found) == own("power_limit_default", found) == {}


@pytest.mark.parametrize("card", [XE, I915], ids=["xe", "i915"])
def test_what_holds_the_clocks_down_is_told_by_reason(fake: FakeSys, card: IntelCard) -> None:
    """1 for each that holds, 0 for the others; without the file that says whether any does all of them are read."""
    fake.write([replace(card, held=("pl1", "ratl"))])
    expected = {word: float(reason in ("pl1", "ratl")) for reason, word in WORDS.items()}
    assert own("throttled", one(fake, card)) == expected
    fake.fault(card.pci, "**/*status", "missing") if card is XE else fake.fault(
        card.pci, "drm/*/gt/*/throttle_reason_status", "missing"
    )
    assert own("throttled", one(fake, card)) == expected


def test_a_reason_of_any_engines_is_the_cards(fake: FakeSys) -> None:
    """The clock of media may be held down alone."""
    fake.write([XE])
    fake.set(XE.pci, "tile0/gt1/freq0/throttle/status", "1\n")
    fake.set(XE.pci, "tile0/gt1/freq0/throttle/reason_vr_tdc", "1\n")
    assert [word for word, value in own("throttled", one(fake, XE)).items() if value] == ["regulator-current"]


def test_while_nothing_holds_no_reason_is_read(fake: FakeSys) -> None:
    """One file of each GT says so: a reason that hangs costs nothing then."""
    fake.write([XE])
    fake.fault(XE.pci, "tile0/gt*/freq0/throttle/reason_*", "fifo")
    sample = Host(fake).read(3)
    assert own("throttled", everything(sample, XE.pci)) == dict.fromkeys(WORDS.values(), 0)


def test_nothing_but_ones_is_no_reason(fake: FakeSys) -> None:
    """A register of a card that does not answer reads so."""
    fake.write([replace(XE, held=REASONS, media=False)])
    assert own("throttled", one(fake, XE)) == {}


def test_a_flag_that_is_none_is_a_fault(fake: FakeSys) -> None:
    """It costs the reasons, and nothing else."""
    fake.write([replace(XE, held=("pl1",))])
    fake.set(XE.pci, "tile0/gt0/freq0/throttle/reason_pl2", "7\n")
    sample = Host(fake).read()
    found = everything(sample, XE.pci)
    assert own("throttled", found) == {}
    assert own("clock", found) == {"graphics": 1501e6, "media": 1101e6}
    assert ["throttled" in fault.detail and "reason_pl2" in fault.detail for fault in sample.faults] == [True]


# --- tiles, and GTs of which it is not known what they are for


@pytest.mark.parametrize("card", [MAX_XE, MAX_I915], ids=["xe", "i915"])
def test_a_tiles_clocks_are_its_own(fake: FakeSys, card: IntelCard) -> None:
    """The card has no clock then, and the reasons of both; what hwmon tells is the card's."""
    fake.write([replace(card, watched=5)])
    reason = "tile1/gt1/freq0/throttle/{}" if card is MAX_XE else "drm/card3/gt/gt1/throttle_reason_{}"
    fake.set(card.pci, reason.format("status"), "1\n")
    fake.set(card.pci, reason.format("reason_thermal" if card is MAX_XE else "thermal"), "1\n")
    sample = Host(fake).read()
    board, *tiles = (everything(sample, f"{card.pci}{tile}") for tile in ("", "/t0", "/t1"))
    assert own("clock", board) == own("clock_maximum", board) == {}
    assert [own("clock", tile) for tile in tiles] == [{"graphics": 1505e6}, {"graphics": 1515e6}]
    assert [own("clock_maximum", tile) for tile in tiles] == [{"graphics": 2405e6}, {"graphics": 2415e6}]
    assert [own("throttled", each)["hardware-thermal"] for each in (board, *tiles)] == [1, 0, 1]
    assert [own("energy", each) for each in (board, *tiles)] == [{"": 10}, {}, {}]
    assert [own("pcie_width", each) for each in (board, *tiles)] == [{"": 16}, {}, {}]


def test_a_tile_of_i915_has_an_energy_of_its_own(fake: FakeSys) -> None:
    """The driver has a folder of hwmon for each GT that counts, by name."""
    fake.write([replace(MAX_I915, watched=5)])
    for gt in range(2):
        folder = fake.device(MAX_I915.pci) / f"hwmon/hwmon{90 + gt}"
        folder.mkdir()
        (folder / "name").write_text(f"i915_gt{gt}\n")
        (folder / "energy1_input").write_text(f"{(gt + 3) * 1000000}\n")
    sample = Host(fake).read()
    found = [own("energy", everything(sample, f"{MAX_I915.pci}{tile}")) for tile in ("", "/t0", "/t1")]
    assert found == [{"": 10}, {"": 3}, {"": 4}]


def test_a_gt_that_is_not_known_has_no_clock(fake: FakeSys) -> None:
    """I915's second GT is for media or another tile's, as the family says; xe's have a name."""
    card = replace(I915, device_id="0xffff")
    fake.write([card])
    assert own("clock", one(fake, card)) == {"graphics": 1503e6}
    fake.write([XE])
    fake.set(XE.pci, "tile0/gt1/gtidle/name", "gt1-xx\n")
    assert own("clock", one(fake, XE)) == {"graphics": 1501e6}


# --- what fails, sleeps, or is not wanted


@pytest.mark.parametrize(
    ("file", "metric"),
    [
        ("hwmon/*/energy1_input", "energy"),
        ("hwmon/*/power1_max", "power_limit"),
        ("hwmon/*/fan2_input", "fan_rotation"),
        ("hwmon/*/temp3_input", "memory_temperature"),
        ("hwmon/*/temp2_crit", "temperature_threshold"),
        ("tile0/gt0/freq0/act_freq", "clock"),
        ("tile0/gt0/freq0/throttle/status", "throttled"),
        ("tile0/gt0/freq0/rp0_freq", "clock_maximum"),
    ],
)
def test_a_file_that_fails_costs_its_own_reading(fake: FakeSys, file: str, metric: str) -> None:
    """A fault names it, the card is well, and it comes back."""
    fake.write([XE])
    host = Host(fake)
    host.read()
    before = everything(host.read(), XE.pci)
    text = next(fake.device(XE.pci).glob(file)).read_text()
    fake.fault(XE.pci, file, "eio")
    sample = host.read()
    after = everything(sample, XE.pci)
    assert {name for name, _ in before.keys() - after.keys()} == {metric}
    assert [(fault.reason, metric in fault.detail) for fault in sample.faults] == [("driver-error", True)]
    assert state(sample, XE.pci) == "ok"
    fake.set(XE.pci, file, text)
    again = host.read()
    assert everything(again, XE.pci).keys() == before.keys()
    assert again.faults == ()


def test_a_label_that_cannot_be_read_is_looked_for_again(fake: FakeSys) -> None:
    """Until then it is not known what the number is of."""
    fake.write([XE])
    fake.fault(XE.pci, "hwmon/*/temp3_label", "eio")
    fake.fault(XE.pci, "hwmon/*/energy1_label", "eio")
    host = Host(fake)
    found = everything(host.read(), XE.pci)
    assert own("memory_temperature", found) == {}
    assert own("energy", found) == {"": 4}  # the package's
    fake.write([XE])
    found = everything(host.read(), XE.pci)
    assert own("memory_temperature", found) == {"": 52}
    assert own("energy", found) == {"": 6}


def all_files(fake: FakeSys, card: IntelCard) -> Iterator[str]:
    """What is below the card's folder and read for operators, but not its link."""
    device = fake.device(card.pci)
    for pattern in ("hwmon/*/*_*", "tile*/gt*/freq0/*_freq", "tile*/gt*/freq0/throttle/*"):
        yield from (str(path.relative_to(device)) for path in device.glob(pattern))


def test_a_card_that_sleeps_is_not_read(fake: FakeSys) -> None:
    """Any of the files would wake it; here each would hang."""
    fake.write([replace(XE, runtime_status="suspended")])
    for file in all_files(fake, XE):
        fake.fault(XE.pci, file, "fifo")
    sample = Host(fake).read(3)
    assert (state(sample, XE.pci), sample.readings) == ("asleep", ())


def test_what_is_not_wanted_is_not_read(fake: FakeSys) -> None:
    """Here each file would hang."""
    fake.write([XE])
    for file in all_files(fake, XE):
        if not file.endswith(("temp2_input", "label")):
            fake.fault(XE.pci, file, "fifo")
    sample = Host(fake, frozenset({"temperature", "pcie_width"})).read(3)
    assert {metric for metric, _ in everything(sample, XE.pci)} == {"temperature", "pcie_width"}


def test_a_card_whose_power_management_has_failed_says_so(fake: FakeSys) -> None:
    """Its files answer as those of a card that has no such values (EINVAL), which alone would be no fault."""
    fake.write([XE, I915])
    fake.set(XE.pci, "power/runtime_status", "error\n")
    (fault,) = Host(fake).read().faults
    assert (fault.reason, fault.key and fault.key.identity) == ("driver-error", XE.pci)
    assert "power/runtime_status" in fault.detail


def test_a_card_that_tells_nothing_of_itself_is_lost(fake: FakeSys) -> None:
    """What its driver noted when it took the card, and the bus's files, do not pass for an answer."""
    fake.write([XE, I915], initial_pid_namespace=False)  # else its clients would tell
    for file in all_files(fake, XE):
        if not file.endswith("rp0_freq"):
            fake.fault(XE.pci, file, "eio")
    sample = Host(fake).read()
    assert state(sample, XE.pci) == "lost"
    assert everything(sample, XE.pci) == {}
    assert state(sample, I915.pci) == "ok"
