"""What Sysman adds for operators: engines by class, hardware errors, bandwidth, and what a driver has no file for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from exporter.backends.base import Places
from exporter.backends.intel import IntelBackend
from exporter.catalog import READINGS
from exporter.model import VendorSample
from exporter.worker import Worker
from tests.backend_host import BackendHost, everything, state
from tests.fakes.sysfs import FakeSys, IntelCard
from tests.fakes.ze_loader import (
    Engine,
    Errors,
    FakeZeLoader,
    Fan,
    Frequency,
    Gpu,
    Memory,
    Power,
    Temperature,
    build,
)
from tests.harness import Start
from tests.test_intel_backend import ARC_A, ARC_B, MAX_XE, daemon_on
from tests.test_intel_watched import own

pytestmark = pytest.mark.e2e

GIB = 1 << 30
UNKNOWN, NO_RIGHT, NOT_NOW = 0x7FFFFFFE, 0x70010000, 0x70010001
BARE = replace(ARC_A, hwmon=False)
SECOND = replace(BARE, pci="0000:0a:00.0", minor=7)
IN_MEMORY = Temperature(sensor="MEMORY")


class Host(BackendHost):
    """The backend on the fake trees with the loader; every metric is wanted, also the costly ones, or those given."""

    def __init__(self, fake: FakeSys, library: Path, wanted: frozenset[str] = frozenset(READINGS)) -> None:
        backend = IntelBackend(Places(str(fake.sys), str(fake.proc), str(library), "/x", wanted=wanted))
        super().__init__(backend)
        self.worker = Worker(backend, wanted)

    def second(self) -> VendorSample:
        """What the cycle after the first has."""
        self.read()
        time.sleep(0.05)
        return self.read()


def classes(sub: int = -1, more: float = 0.0) -> tuple[Engine, ...]:
    """Engines of every kind, each busy for a share of its own."""
    shares = {
        "ALL": 0.9,
        "RENDER_ALL": 0.1,
        "RENDER_SINGLE": 0.99,
        "COMPUTE_ALL": 0.2,
        "COPY_SINGLE": 0.3,
        "MEDIA_ALL": 0.99,
        "MEDIA_DECODE_SINGLE": 0.4,
        "MEDIA_ENCODE_SINGLE": 0.99,
        "MEDIA_ENHANCEMENT_SINGLE": 0.5,
    }
    second = Engine(group="MEDIA_DECODE_SINGLE", sub=sub, rate=0.6 + more)
    return (*(Engine(group=group, sub=sub, rate=share + more) for group, share in shares.items()), second)


def watched(card: IntelCard, more: int) -> Gpu:
    """A card that tells everything, each number ``more`` than another's."""
    return Gpu(
        bdf=card.pci,
        engines=classes(more=more / 1000),
        memory=(Memory(physical=12 * GIB, size=11 * GIB, free=6 * GIB, read=0, written=0, most=1000, timestamp=1),),
        temperatures=(
            Temperature(celsius=50 + more),
            Temperature(sensor="MEMORY", celsius=60 + more),
            Temperature(sensor="MEMORY", celsius=58 + more),
        ),
        frequencies=(
            Frequency(actual=1500 + more, request=9999, highest=2400 + more),
            Frequency(domain="MEDIA", actual=0, highest=1200 + more),
            Frequency(domain="MEMORY", actual=8000 + more, highest=9000 + more),
        ),
        powers=(
            Power(domain="MEMORY", energy=1, rate=1, limit=1),
            Power(
                domain="CARD",
                energy=7_000_000 * (1 + more),
                rate=100 + more,
                limit=150_000 + more,
                default_limit=170_000 + more,
            ),
            Power(domain="PACKAGE", energy=1, rate=1, limit=1),
        ),
        fans=(Fan(rpm=1500 + more), Fan(rpm=0)),
        errors=(
            Errors(reset=1 + more, compute=2 + more, memory=3 + more),
            Errors(type="UNCORRECTABLE", memory=40 + more, l3_fabric=5 + more),
        ),
    )


def test_every_reading_is_its_cards_own(fake: FakeSys, ze: FakeZeLoader) -> None:
    """Of two cards without hwmon or GTs Sysman tells all, in base units, whatever order it lists them in."""
    cards = (BARE, SECOND)
    fake.write(cards)
    for card in cards:
        for gt in fake.device(card.pci).glob("drm/*/gt/gt*"):
            fake.fault(card.pci, str(gt.relative_to(fake.device(card.pci)) / "*"), "missing")
    ze.write([watched(SECOND, 2), watched(BARE, 1)])
    sample = Host(fake, ze.shared_object).second()
    for card, more in ((BARE, 1), (SECOND, 2)):
        found = everything(sample, card.pci)
        busy = {"render": 0.1, "compute": 0.2, "copy": 0.3, "video": 0.5, "video-enhance": 0.5}
        assert own("engine", found) == pytest.approx(
            {name: each + more / 1000 for name, each in busy.items()}, abs=0.02
        )
        assert own("memory_temperature", found) == {"": 60 + more}
        assert own("clock", found) == {"graphics": (1500 + more) * 1e6, "media": 0, "memory": (8000 + more) * 1e6}
        highest = {"graphics": 2400, "media": 1200, "memory": 9000}
        assert own("clock_maximum", found) == {name: (each + more) * 1e6 for name, each in highest.items()}
        joules = own("energy", found)[""]
        assert 7 * (1 + more) < joules < 7 * (1 + more) + 400
        assert own("power", found)[""] == pytest.approx(100 + more, abs=0.5)
        assert own("power_limit", found) == {"": 150 + more / 1000}
        assert own("power_limit_default", found) == {"": 170 + more / 1000}
        assert own("fan_rotation", found) == {"0": 1500 + more, "1": 0}
        assert own("ras_errors", found) == {
            "reset,corrected": 1 + more,
            "compute,corrected": 2 + more,
            "memory,corrected": 3 + more,
            "memory,uncorrected": 40 + more,
            "l3-fabric,uncorrected": 5 + more,
        }
        assert own("ecc_errors", found) == {"corrected": 3 + more, "uncorrected": 40 + more}
    assert sample.faults == ()


def test_the_drivers_files_come_first(fake: FakeSys, ze: FakeZeLoader) -> None:
    """Sysman is not asked for what a file told; neither for what is not wanted."""
    card = replace(ARC_B, watched=9)
    fake.write([card])
    ze.write([watched(card, 1)])
    found = everything(Host(fake, ze.shared_object).read(), card.pci)
    assert own("clock", found) == {"graphics": 1509e6}
    assert own("fan_rotation", found) == {"0": 1209, "1": 1309}
    assert own("energy", found) == {"": 14}
    asked = {"zesFrequencyGetState", "zesFanGetState", "zesPowerGetEnergyCounter", "zesPowerGetLimitsExt"}
    assert asked.isdisjoint(ze.record())
    before = len(ze.record())
    Host(fake, ze.shared_object, frozenset({"temperature"})).read()
    assert {"zesEngineGetActivity", "zesMemoryGetBandwidth", "zesRasGetStateExp"}.isdisjoint(ze.record()[before:])


def test_the_daemon_shows_them(fake: FakeSys, ze: FakeZeLoader, start: Start) -> None:
    """Also what is costly, where the settings name it."""
    fake.write([BARE])
    ze.write([watched(BARE, 1)])
    config = (
        "backends: [intel]\nsampling: {reuse_seconds: 0}\nfleets: [{name: host, runtime: host}]\n"
        f"libraries: {{intel: {ze.shared_object}}}\n"
        "metrics: {include: [gpu_engine_*, gpu_memory_bandwidth_*, gpu_ras_*]}\n"
    )
    daemon = daemon_on(start, fake, config)
    page = daemon.scrape_until(lambda page: bool(page.of("gpu_engine_utilization_ratio")))
    names = {sample.labels["engine"] for sample in page.of("gpu_engine_utilization_ratio")}
    assert names == {"render", "compute", "copy", "video", "video-enhance"}
    errors = {(each.labels["block"], each.labels["error"]): each.value for each in page.of("gpu_ras_errors_total")}
    assert errors[("memory", "uncorrected")] == 41
    assert not page.of("gpu_utilization_percent")


# --- tiles


def test_a_tile_has_its_own_and_the_card_those_of_both(fake: FakeSys, ze: FakeZeLoader) -> None:
    """Engines are averaged and errors summed; a clock, a limit or a power of one tile is never its card's."""
    fake.write([replace(MAX_XE, hwmon=False)])
    fake.fault(MAX_XE.pci, "tile*/gt*/freq0/*freq", "missing")
    gpu = Gpu(
        bdf=MAX_XE.pci,
        subdevices=2,
        engines=(*classes(0), *classes(1, 0.01)),
        temperatures=tuple(Temperature(sensor="MEMORY", sub=tile, celsius=60 + tile) for tile in range(2)),
        frequencies=tuple(Frequency(sub=tile, actual=1000 + tile, highest=1600 + tile) for tile in range(2)),
        powers=tuple(Power(sub=tile, energy=10**6 * (tile + 1), rate=10 * (tile + 1)) for tile in range(2)),
        errors=tuple(
            Errors(sub=tile, type=kind, memory=10 * tile + place, compute=7 if tile else None)
            for tile in range(2)
            for place, kind in enumerate(("CORRECTABLE", "UNCORRECTABLE"))
        ),
    )
    ze.write([gpu])
    sample = Host(fake, ze.shared_object).second()
    board, *tiles = (everything(sample, f"{MAX_XE.pci}{tile}") for tile in ("", "/t0", "/t1"))
    assert [own("engine", each)["copy"] for each in (board, *tiles)] == pytest.approx([0.305, 0.3, 0.31], abs=0.01)
    assert [own("memory_temperature", each) for each in (board, *tiles)] == [{"": 61}, {"": 60}, {"": 61}]
    assert [own("clock", each) for each in (board, *tiles)] == [{}, {"graphics": 1000e6}, {"graphics": 1001e6}]
    assert [own("clock_maximum", each) for each in (board, *tiles)] == [{}, {"graphics": 1600e6}, {"graphics": 1601e6}]
    assert own("power", board) == own("energy", board) == {}
    assert [own("power", each)[""] for each in tiles] == pytest.approx([10, 20], abs=0.2)
    # Compute is told of one tile alone.
    assert own("ras_errors", board) == {"memory,corrected": 10, "memory,uncorrected": 12}
    assert own("ecc_errors", board) == {"corrected": 10, "uncorrected": 12}
    assert own("ecc_errors", tiles[1]) == {"corrected": 10, "uncorrected": 11}


# --- sentinels


def lone(**parts: object) -> Gpu:
    """The card with these parts."""
    return replace(Gpu(bdf=BARE.pci), **parts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("parts", "metric", "expected"),
    [
        ({"frequencies": (Frequency(actual=-1),)}, "clock", {}),
        ({"frequencies": (Frequency(actual=float("nan")),)}, "clock", {}),
        ({"frequencies": (Frequency(actual=float("inf")),)}, "clock", {}),
        ({"frequencies": (Frequency(actual=0),)}, "clock", {"graphics": 0}),
        ({"frequencies": (Frequency(actual=5, highest=-1),)}, "clock_maximum", {}),
        ({"frequencies": (Frequency(actual=5, highest=0),)}, "clock_maximum", {}),
        ({"fans": (Fan(rpm=-1), Fan(rpm=900))}, "fan_rotation", {"1": 900}),
        ({"fans": (Fan(rpm=None),)}, "fan_rotation", {}),
        ({"powers": (Power(energy=0),)}, "energy", {}),
        ({"powers": (Power(energy=2**64 - 1),)}, "energy", {}),
        ({"powers": (Power(limit=-1),)}, "power_limit", {}),
        ({"powers": (Power(limit=0),)}, "power_limit", {}),
        ({"powers": (Power(limit=90_000, limited=0),)}, "power_limit", {}),
        ({"powers": (Power(limit=90_000, limited=1),)}, "power_limit", {"": 90}),
        ({"powers": (Power(default_limit=-1),)}, "power_limit_default", {}),
        ({"powers": (Power(default_limit=0),)}, "power_limit_default", {}),
        # Which of two is the card's nobody says; a package is, where there is nothing better.
        ({"powers": (Power(energy=1), Power(energy=2))}, "energy", {}),
        ({"powers": (Power(domain="PACKAGE", energy=10**6), Power(domain="GPU", energy=2))}, "energy", {"": 1}),
        ({"powers": (Power(domain="GPU", energy=2),)}, "energy", {}),
        ({"temperatures": (Temperature(sensor="MEMORY", celsius=255),)}, "memory_temperature", {}),
        ({"temperatures": (Temperature(sensor="MEMORY", celsius=-1),)}, "memory_temperature", {}),
        ({"temperatures": (Temperature(sensor="MEMORY", celsius=float("nan")),)}, "memory_temperature", {}),
        ({"temperatures": (replace(IN_MEMORY, celsius=5), IN_MEMORY)}, "memory_temperature", {}),
        ({"errors": (Errors(memory=2**64 - 1, cache=4),)}, "ras_errors", {"cache,corrected": 4}),
        # What the driver counted and did not fill in is not a first category without errors.
        ({"errors": (Errors(cache=4, unfilled=3),)}, "ras_errors", {"cache,corrected": 4}),
        ({"errors": (Errors(unfilled=2),)}, "ras_errors", {}),
        ({"errors": (Errors(),)}, "ras_errors", {}),
    ],
)  # fmt: skip
def test_what_is_not_known_is_absent(
    fake: FakeSys, ze: FakeZeLoader, parts: Mapping[str, object], metric: str, expected: dict[str, float]
) -> None:
    """Sysman says -1, nothing, all ones or no number; each is no value, and no fault."""
    fake.write([BARE])
    fake.fault(BARE.pci, "drm/*/gt/gt*/rps*", "missing")
    ze.write([lone(**parts)])
    sample = Host(fake, ze.shared_object).read()
    assert own(metric, everything(sample, BARE.pci)) == expected
    assert sample.faults == ()


def test_several_video_engines_that_are_known_together_alone(fake: FakeSys, ze: FakeZeLoader) -> None:
    """A group of all engines of media is neither video's nor that for enhancing it."""
    fake.write([BARE])
    ze.write([lone(engines=(Engine(group="MEDIA_ALL", rate=0.25), Engine(group="3D_ALL", rate=0.5)))])
    assert own("engine", everything(Host(fake, ze.shared_object).second(), BARE.pci)) == pytest.approx(
        {"media": 0.25}, abs=0.01
    )


@pytest.mark.parametrize(
    ("moments", "expected"),
    [
        # Half of 1000 bytes a second, in one second.
        ([(0, 0, 1000, 10**6), (300, 200, 1000, 2 * 10**6)], 0.5),
        ([(0, 0, 1000, 10**6), (0, 0, 1000, 2 * 10**6)], 0.0),
        # Far more than there can be, a counter that went back, a clock that stands, and no maximum.
        ([(0, 0, 1000, 10**6), (3000, 0, 1000, 2 * 10**6)], None),
        ([(500, 0, 1000, 10**6), (300, 0, 1000, 2 * 10**6)], None),
        ([(0, 0, 1000, 10**6), (300, 0, 1000, 10**6)], None),
        ([(0, 0, 1000, 10**6), (300, 0, 0, 2 * 10**6)], None),
        ([(0, 0, 1000, 10**6), (2**64 - 1, 0, 1000, 2 * 10**6)], None),
        ([(0, 0, 1000, 10**6)], None),
    ],
)
def test_bandwidth_is_of_the_most_that_could_have_been(
    fake: FakeSys, ze: FakeZeLoader, moments: Sequence[tuple[int, int, int, int]], expected: float | None
) -> None:
    """Bytes read and written since the reading before, by the driver's own clock and maximum."""
    fake.write([BARE])
    host = None
    for read, written, most, stamp in moments:
        module = Memory(size=9, free=5, read=read, written=written, most=most, timestamp=stamp)
        ze.write([lone(memory=(module,))])
        host = host or Host(fake, ze.shared_object)
        found = everything(host.read(), BARE.pci)
    assert found.get(("memory_active", ())) == expected


# --- what fails, and what is older


@pytest.mark.parametrize(
    ("call", "lost"),
    [
        ("zesRasGetStateExp", {"ras_errors", "ecc_errors"}),
        ("zesDeviceEnumRasErrorSets", {"ras_errors", "ecc_errors"}),
        ("zesFanGetState", {"fan_rotation"}),
        ("zesMemoryGetBandwidth", {"memory_active"}),
        ("zesPowerGetLimitsExt", {"power_limit"}),
        ("zesPowerGetEnergyCounter", {"energy", "power"}),
        ("zesFrequencyGetState", {"clock"}),
    ],
)
@pytest.mark.parametrize("code", [UNKNOWN, NO_RIGHT])
def test_a_call_that_fails_costs_its_own_readings(
    fake: FakeSys, ze: FakeZeLoader, call: str, lost: set[str], code: int
) -> None:
    """What this user may not ask is absent without a fault; any other error is one, and the card is well."""
    fake.write([BARE])
    fake.fault(BARE.pci, "drm/*/gt/gt*/rps*", "missing")
    gpu = watched(BARE, 1)
    memory = replace(gpu.memory[0], read=10, timestamp=10**6)
    ze.write([gpu])
    host = Host(fake, ze.shared_object)
    host.read()
    ze.write([replace(gpu, memory=(memory,))])
    time.sleep(0.05)
    well = {metric for metric, _ in everything(host.read(), BARE.pci)}
    assert lost <= well
    host = Host(fake, ze.shared_object)
    ze.write([gpu], lines=[f"fault {call} 0 {code}"])
    host.read()
    ze.write([replace(gpu, memory=(memory,))], lines=[f"fault {call} 0 {code}"])
    time.sleep(0.05)
    sample = host.read()
    assert {metric for metric, _ in everything(sample, BARE.pci)} == well - lost
    assert [call in fault.detail for fault in sample.faults] == ([True] if code == UNKNOWN else [])
    assert state(sample, BARE.pci) == "ok"


def test_a_loader_of_before_a_call_is_as_a_driver_without_it(fake: FakeSys, ze: FakeZeLoader, tmp_path: Path) -> None:
    """The card keeps everything else, and nothing fails."""
    missing = ["zesRasGetStateExp", "zesPowerGetLimitsExt", "zesDeviceEnumFans", "zesMemoryGetBandwidth"]
    (tmp_path / "old").mkdir()
    library = build(tmp_path / "old", missing)
    fake.write([BARE])
    ze.write([watched(BARE, 1)])
    sample = Host(fake, library).second()
    metrics = {metric for metric, _ in everything(sample, BARE.pci)}
    assert metrics.isdisjoint({"ras_errors", "power_limit", "fan_rotation", "memory_active"})
    assert {"engine", "energy", "power", "utilization"} <= metrics
    assert sample.faults == ()


def test_errors_of_two_cards_are_not_asked_for_at_once(fake: FakeSys, ze: FakeZeLoader) -> None:
    """While one card's call does not return, the other's errors are a fault, and all else of it is there."""
    fake.write([BARE, SECOND])
    ze.write([watched(BARE, 1), watched(SECOND, 2)], lines=["hang zesRasGetStateExp 0"])
    sample = Host(fake, ze.shared_object).read(8)
    assert (state(sample, BARE.pci), state(sample, SECOND.pci)) == ("hung", "ok")
    found = everything(sample, SECOND.pci)
    assert own("ras_errors", found) == {}
    assert own("fan_rotation", found)["0"] == 1502
    assert [fault.reason for fault in sample.faults if "zesRasGetStateExp" in fault.detail] == ["hung"]


@pytest.mark.parametrize("call", ["zesDeviceEnumEngineGroups", "zesEngineGetProperties", "zesDeviceEnumPowerDomains"])
def test_what_is_not_to_be_had_now_is_asked_for_again(fake: FakeSys, ze: FakeZeLoader, call: str) -> None:
    """Another program has it for itself; what a card has not stays so."""
    fake.write([BARE])
    ze.write([watched(BARE, 1)], lines=[f"fault {call} 0 {NOT_NOW}"])
    host = Host(fake, ze.shared_object)
    lacking = everything(host.read(), BARE.pci)
    ze.write([watched(BARE, 1)])
    host.read()
    time.sleep(0.05)
    assert lacking.keys() < everything(host.read(), BARE.pci).keys() >= {("energy", ()), ("engine", ("compute",))}


def test_a_card_that_sleeps_is_asked_nothing(fake: FakeSys, ze: FakeZeLoader) -> None:
    """Nor what it did before counted when it wakes."""
    fake.write([BARE])
    ze.write([watched(BARE, 1)])
    host = Host(fake, ze.shared_object)
    host.second()
    fake.set(BARE.pci, "power/runtime_status", "suspended\n")
    before = len(ze.record())
    assert state(host.read(), BARE.pci) == "asleep"
    assert len(ze.record()) == before
    fake.set(BARE.pci, "power/runtime_status", "active\n")
    found = everything(host.read(), BARE.pci)
    assert ("power", ()) not in found
    assert own("engine", found) == {}
