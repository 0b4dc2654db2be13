"""What Level Zero Sysman adds to the kernel's files, and what it costs where it fails."""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.backend_host import devices, hints, state, values
from tests.fakes.sysfs import Client, FakeSys, IntelCard
from tests.fakes.ze_loader import (
    OLD_LOADER_LACKS,
    SONAME,
    Engine,
    FakeZeLoader,
    Gpu,
    Memory,
    Temperature,
    build,
)
from tests.harness import Daemon, Scrape, Start
from tests.test_intel_backend import ARC_A, ARC_B, IGPU, MAX_XE, Host

pytestmark = pytest.mark.e2e

GIB = 1 << 30
LOST, LOW_POWER, RESET, NO_RIGHT, UNSUPPORTED, UNKNOWN = (
    0x70000001,
    0x70000007,
    0x70000006,
    0x70010000,
    0x78000003,
    0x7FFFFFFE,
)

TOTAL = {"memory_total": 12 * GIB}
HOT = {"pkg": 48}
B60 = tuple(
    IntelCard(pci=pci, device_id="0xe211", minor=minor, temperatures=HOT)
    for minor, pci in enumerate(("0000:18:00.0", "0000:2c:00.0", "0000:98:00.0", "0000:ac:00.0"))
)


def gpu(card: IntelCard, free: float = 6, *, busy: float = 0.5, physical: float = 12, celsius: float = 55) -> Gpu:
    """The card as Sysman has it, with one of everything."""
    return Gpu(
        bdf=card.pci,
        device_id=int(card.device_id, 16),
        engines=(Engine(rate=busy), Engine(group="COMPUTE_ALL", rate=0.9)),
        memory=(Memory(physical=int(physical * GIB), size=11 * GIB, free=int(free * GIB)),),
        temperatures=(Temperature(sensor="GLOBAL", celsius=99), Temperature(celsius=celsius)),
    )


def host_of(fake: FakeSys, ze: FakeZeLoader) -> Host:
    return Host(fake, library=str(ze.shared_object))


def of_memory(free: float, used: float, total: float | None) -> Mapping[str, float]:
    known = {"memory_free": free * GIB, "memory_used": used * GIB, "memory_total": total and total * GIB}
    return {name: value for name, value in known.items() if value is not None}


def memory(found: Mapping[str, float]) -> Mapping[str, float]:
    return {name: value for name, value in found.items() if name.startswith("memory")}


# --- values


def test_each_card_has_its_own_values_by_address_f46(fake: FakeSys, ze: FakeZeLoader) -> None:
    """F46: Sysman lists the cards in another order, and each has its own memory and share."""
    fake.write(B60)
    order = [3, 1, 0, 2]
    ze.write([gpu(B60[place], 1 + place, busy=0.2 * (place + 1)) for place in order])
    host = host_of(fake, ze)
    sample = host.read()
    assert all("utilization" not in values(sample, card.pci) for card in B60)
    time.sleep(0.05)
    sample = host.read()
    for place, card in enumerate(B60):
        found = values(sample, card.pci)
        assert memory(found) == of_memory(1 + place, 10 - place, 12)
        assert found["utilization"] == pytest.approx(20 * (place + 1), abs=1)
        assert found["temperature"] == 48
        assert devices(sample)[card.pci].memory_total_bytes == 12 * GIB
    assert sample.hints == ()
    assert sample.faults == ()


def test_the_share_is_of_the_drivers_own_clock(fake: FakeSys, ze: FakeZeLoader) -> None:
    """Busy over the time stamps; none at first, while the clock stands, and where a counter went back."""
    fake.write([ARC_B])
    moments = [(100, 1000), (600, 2000), (600, 2000), (700, 4000), (10, 5000), (20, 4000), (30, 4010), (99, 4020)]
    host, found = host_of(fake, ze), []
    for active, stamp in moments:
        ze.write([replace(gpu(ARC_B), engines=(Engine(active=active, timestamp=stamp),))])
        found.append(values(host.read(), ARC_B.pci).get("utilization"))
    assert found == [None, 50, None, 5, None, None, 100, None]


def tiles(busy: Sequence[float], free: Sequence[float], celsius: Sequence[float]) -> Gpu:
    """A card of two tiles."""
    return Gpu(
        bdf=MAX_XE.pci,
        subdevices=2,
        engines=tuple(Engine(sub=tile, rate=share) for tile, share in enumerate(busy)),
        memory=tuple(
            Memory(sub=tile, physical=64 * GIB, size=62 * GIB, free=int(each * GIB)) for tile, each in enumerate(free)
        ),
        temperatures=tuple(Temperature(sub=tile, celsius=each) for tile, each in enumerate(celsius)),
    )


def test_a_tile_has_its_own_values_and_the_card_those_of_both_f50(fake: FakeSys, ze: FakeZeLoader) -> None:
    """F50: the mean of the shares, the sum of the memory; the kernel's temperature, else the hottest."""
    fake.write([MAX_XE])
    ze.write([tiles([0.2, 0.6], [60, 30], [50, 61])])
    host = host_of(fake, ze)
    host.read()
    time.sleep(0.05)
    sample = host.read()
    parts = [f"{MAX_XE.pci}/t0", f"{MAX_XE.pci}/t1"]
    for part, share, free, degrees in zip(parts, (20, 60), (60, 30), (50, 61), strict=True):
        found = values(sample, part)
        assert memory(found) == of_memory(free, 62 - free, 64)
        assert found["utilization"] == pytest.approx(share, abs=1)
        assert found["temperature"] == degrees
        assert devices(sample)[part].temperature_sensor == "gpu"
    board = values(sample, MAX_XE.pci)
    assert memory(board) == of_memory(90, 34, 128)
    assert board["utilization"] == pytest.approx(40, abs=1)
    assert board["temperature"] == 48
    fake.write([replace(MAX_XE, temperatures={})])
    sample = host_of(fake, ze).read()
    assert values(sample, MAX_XE.pci)["temperature"] == 61
    assert devices(sample)[MAX_XE.pci].temperature_sensor == "gpu"


def test_what_the_card_itself_has_is_not_added_to_its_tiles(fake: FakeSys, ze: FakeZeLoader) -> None:
    """A driver may list a part for the whole card beside those of its tiles."""
    fake.write([MAX_XE])
    both = tiles([0.2, 0.6], [60, 30], [50, 61])
    own = Memory(physical=128 * GIB, size=124 * GIB, free=90 * GIB)
    ze.write([replace(both, memory=(own, *both.memory), engines=(Engine(rate=0.9), *both.engines))])
    host = host_of(fake, ze)
    host.read()
    time.sleep(0.05)
    found = values(host.read(), MAX_XE.pci)
    assert memory(found) == of_memory(90, 34, 128)
    assert found["utilization"] == pytest.approx(90, abs=1)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Memory(physical=0, size=16 * GIB, free=15 * GIB), of_memory(15, 1, None)),
        (Memory(physical=0, size=0, free=0), {}),
        (Memory(physical=12 * GIB, size=11 * GIB, free=12 * GIB), TOTAL),
        (Memory(physical=12 * GIB, size=11 * GIB, free=2**64 - 1), TOTAL),
        (Memory(physical=12 * GIB, size=2**64 - 1, free=3), TOTAL),
        (Memory(physical=2**64 - 1, size=11 * GIB, free=0), of_memory(0, 11, None)),
        (Memory(physical=12 * GIB), TOTAL),
        (Memory(location="SYSTEM", physical=12 * GIB, size=11 * GIB, free=1), {}),
        (Memory(physical=None, size=11 * GIB, free=1), {}),
    ],
)
def test_what_is_no_size_is_absent_f59(
    fake: FakeSys, ze: FakeZeLoader, module: Memory, expected: Mapping[str, float]
) -> None:
    """F59: a physical size of 0 gives no total; and sentinels, or more free than there is, give nothing."""
    fake.write([ARC_B])
    ze.write([replace(gpu(ARC_B), memory=(module,))])
    sample = host_of(fake, ze).read()
    assert memory(values(sample, ARC_B.pci)) == expected
    assert devices(sample)[ARC_B.pci].memory_total_bytes == expected.get("memory_total")
    assert sample.faults == ()


def test_all_free_is_not_known(fake: FakeSys, ze: FakeZeLoader) -> None:
    """A driver that may not count says so of every card; the total is known, and a hint says what would help."""
    fake.write([ARC_B, MAX_XE])
    ze.write([gpu(ARC_B, 11), tiles([0.2, 0.6], [60, 62], [50, 61])])
    sample = host_of(fake, ze).read()
    assert memory(values(sample, ARC_B.pci)) == {"memory_total": 12 * GIB}
    assert memory(values(sample, MAX_XE.pci)) == {"memory_total": 128 * GIB}
    assert memory(values(sample, f"{MAX_XE.pci}/t0")) == of_memory(60, 2, 64)
    assert hints(sample) == {"grant-cap-perfmon"}


@pytest.mark.parametrize("celsius", [255, 0, -1, 510])
def test_a_sentinel_of_sysman_is_no_temperature_f71(fake: FakeSys, ze: FakeZeLoader, celsius: float) -> None:
    """F71: nor is the other sensor's taken in its place."""
    fake.write([replace(ARC_B, temperatures={})])
    ze.write([gpu(ARC_B, celsius=celsius)])
    assert "temperature" not in values(host_of(fake, ze).read(), ARC_B.pci)


def test_an_integrated_card_has_no_memory_of_its_own(fake: FakeSys, ze: FakeZeLoader) -> None:
    """And nothing is missing of it."""
    fake.write([IGPU])
    ze.write([replace(gpu(IGPU), memory=(Memory(location="SYSTEM", physical=0, size=9, free=3),))])
    sample = host_of(fake, ze).read()
    assert values(sample, IGPU.pci) == {"temperature": 55}
    assert sample.hints == ()


# --- codes


@pytest.mark.parametrize("code", [UNSUPPORTED, 0x78000002, 0x70010001, 0x70020000, NO_RIGHT])
def test_what_is_not_offered_is_absent_and_the_next_source_is_asked(fake: FakeSys, ze: FakeZeLoader, code: int) -> None:
    """No fault; and the clients tell the utilization that Sysman does not."""
    calls = ("zesEngineGetActivity", "zesMemoryGetState", "zesTemperatureGetState")
    ze.write([gpu(ARC_B)], lines=[f"fault {call} {code}" for call in calls])
    host = host_of(fake, ze)
    for spent, total in ((0, 0), (300, 1000), (300, 2000), (500, 3000)):
        fake.write([ARC_B], [Client(pid=70, pci=ARC_B.pci, client_id=1, cycles={"rcs": (spent, total)})])
        sample = host.read()
    assert values(sample, ARC_B.pci) == {"utilization": 20, "temperature": 48, **TOTAL}
    assert sample.faults == ()
    ze.write([gpu(ARC_B)])
    for _ in range(3):
        time.sleep(0.02)
        sample = host.read()
    assert values(sample, ARC_B.pci)["utilization"] == pytest.approx(50, abs=2)


@pytest.mark.parametrize(
    "call", ["zesDeviceEnumEngineGroups", "zesDeviceEnumMemoryModules", "zesMemoryGetProperties", "zesMemoryGetState"]
)
def test_a_failing_call_costs_its_readings(fake: FakeSys, ze: FakeZeLoader, call: str) -> None:
    """The card keeps the others and its state, a fault says which call it was, and they come back."""
    fake.write([ARC_B, ARC_A])
    ze.write([gpu(ARC_B), gpu(ARC_A)], lines=[f"fault {call} 0 {UNKNOWN}"])
    host = host_of(fake, ze)
    for _ in range(2):
        time.sleep(0.02)
        sample = host.read()
    lost = {"utilization"} if "Engine" in call else {"memory_free", "memory_used", "memory_total"}
    everything = {"utilization", "memory_free", "memory_used", "memory_total", "temperature"}
    assert set(values(sample, ARC_B.pci)) == everything - lost
    assert set(values(sample, ARC_A.pci)) == everything
    assert {(fault.reason, call in fault.detail) for fault in sample.faults} == {("driver-error", True)}
    assert state(sample, ARC_B.pci) == "ok"
    ze.write([gpu(ARC_B), gpu(ARC_A)])
    for _ in range(2):
        time.sleep(0.02)
        sample = host.read()
    assert set(values(sample, ARC_B.pci)) == everything


@pytest.mark.parametrize(("code", "expected"), [(LOST, "lost"), (RESET, "lost"), (LOW_POWER, "asleep")])
def test_a_card_that_says_that_it_is_gone(fake: FakeSys, ze: FakeZeLoader, code: int, expected: str) -> None:
    """It alone has that state and no reading, and comes back."""
    fake.write([ARC_B, ARC_A])
    ze.write([gpu(ARC_B), gpu(ARC_A)])
    host = host_of(fake, ze)
    host.read()
    ze.write([gpu(ARC_B), gpu(ARC_A)], lines=[f"fault * 0 {code}"])
    sample = host.read()
    assert [state(sample, card.pci) for card in (ARC_B, ARC_A)] == [expected, "ok"]
    assert values(sample, ARC_B.pci) == {}
    assert values(sample, ARC_A.pci)["memory_free"] == 6 * GIB
    ze.write([gpu(ARC_B), gpu(ARC_A)])
    assert values(host.read(), ARC_B.pci)["memory_free"] == 6 * GIB


@pytest.mark.parametrize("code", [LOST, UNKNOWN, UNSUPPORTED])
def test_a_card_that_does_not_say_where_it_is_costs_no_other(fake: FakeSys, ze: FakeZeLoader, code: int) -> None:
    """Sysman starts without it, and it has the kernel's readings."""
    fake.write([ARC_B, ARC_A])
    ze.write([gpu(ARC_B), gpu(ARC_A)], lines=[f"fault zesDevicePciGetProperties 0 {code}"])
    sample = host_of(fake, ze).read()
    assert values(sample, ARC_B.pci) == {"temperature": 48}
    assert values(sample, ARC_A.pci)["memory_free"] == 6 * GIB
    assert [hint.text for hint in sample.hints if ARC_B.pci in hint.text]


def test_a_card_that_failed_as_sysman_started_is_known_once_it_is_well(fake: FakeSys, ze: FakeZeLoader) -> None:
    """No new worker is needed for its memory; while it hangs in telling where it is, no card waits for it."""
    fake.write([ARC_B, ARC_A])
    ze.write([gpu(ARC_B), gpu(ARC_A)], lines=[f"fault * 0 {LOST}"])
    host = host_of(fake, ze)
    assert "memory_free" not in values(host.read(), ARC_B.pci)
    ze.write([gpu(ARC_B), gpu(ARC_A)], lines=["hang zesDevicePciGetProperties 0"])
    for _ in range(3):
        assert values(host.read(), ARC_A.pci)["memory_free"] == 6 * GIB
    ze.write([gpu(ARC_B), gpu(ARC_A)])
    until = time.monotonic() + 5
    while "memory_free" not in values(host.read(), ARC_B.pci):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_two_drivers_are_one_host(fake: FakeSys, ze: FakeZeLoader) -> None:
    """Each card is found with the driver that has it."""
    fake.write([ARC_B, ARC_A])
    ze.write([replace(gpu(ARC_A, 3), driver=1), gpu(ARC_B, 4)], drivers=2)
    sample = host_of(fake, ze).read()
    assert [values(sample, card.pci)["memory_free"] / GIB for card in (ARC_A, ARC_B)] == [3, 4]


@pytest.mark.parametrize("lines", [["fault zesInit 0x78000001"], ["fault zesDriverGet 0x78000001"]])
def test_a_start_that_fails_is_a_sentence(fake: FakeSys, ze: FakeZeLoader, lines: list[str]) -> None:
    """The kernel's readings go on."""
    fake.write([ARC_B])
    ze.write([gpu(ARC_B)], lines=lines)
    sample = host_of(fake, ze).read()
    assert values(sample, ARC_B.pci) == {"temperature": 48}
    (hint,) = sample.hints
    assert "does not start" in hint.text
    assert "0x78000001" in hint.text


# --- sleep, and cards that come and go


def test_it_is_not_started_while_a_card_sleeps_f91(fake: FakeSys, ze: FakeZeLoader) -> None:
    """F91: its start opens every card. Once all are awake it starts, and the cards' labels are complete."""
    fake.write([ARC_B, replace(ARC_A, runtime_status="suspended")])
    ze.write([gpu(ARC_B), gpu(ARC_A)])
    host = host_of(fake, ze)
    for _ in range(2):
        sample = host.read()
    assert ze.record() == []
    assert set(values(sample, ARC_B.pci)) == {"temperature", "utilization"}
    (hint,) = sample.hints
    assert "sleeps" in hint.text
    fake.write([ARC_B, ARC_A])
    sample = host.read()
    assert values(sample, ARC_A.pci)["memory_free"] == 6 * GIB
    assert devices(sample)[ARC_B.pci].memory_total_bytes == 12 * GIB


def test_a_card_that_sleeps_later_is_asked_nothing_f91(fake: FakeSys, ze: FakeZeLoader) -> None:
    """F91: and after it has slept its counters start anew."""
    fake.write([ARC_B])
    ze.write([gpu(ARC_B)])
    host = host_of(fake, ze)
    host.read()
    fake.write([replace(ARC_B, runtime_status="suspended")])
    before = len(ze.record())
    sample = host.read()
    assert state(sample, ARC_B.pci) == "asleep"
    assert devices(sample)[ARC_B.pci].memory_total_bytes == 12 * GIB
    assert len(ze.record()) == before
    fake.write([ARC_B])
    assert "utilization" not in values(host.read(), ARC_B.pci)
    time.sleep(0.02)
    assert "utilization" in values(host.read(), ARC_B.pci)


def test_other_cards_than_it_was_started_with_need_another_process(fake: FakeSys, ze: FakeZeLoader) -> None:
    """It does not find a card that came, nor one that came back under another driver."""
    fake.write([ARC_B, ARC_A])
    ze.write([gpu(ARC_B), gpu(ARC_A)])
    for change in ([ARC_B, ARC_A, IGPU], [ARC_B, replace(ARC_A, driver="xe")]):
        fake.write([ARC_B, ARC_A])
        host = host_of(fake, ze)
        host.read()
        fake.write(change)
        assert host.fault() == "driver-mismatch"
        host = host_of(fake, ze)
        assert set(devices(host.read())) == {card.pci for card in change}


def test_a_card_that_leaves_costs_no_other_f85(fake: FakeSys, ze: FakeZeLoader) -> None:
    """F85: the others are read on with the handles that they have, under their new numbers; it is never asked again."""
    fake.write([ARC_B, ARC_A])
    ze.write([gpu(ARC_B, 4), gpu(ARC_A, 5)])
    host = host_of(fake, ze)
    host.read()
    fake.remove(ARC_B.pci)
    sample = host.read()
    assert list(devices(sample)) == [ARC_A.pci]
    assert devices(sample)[ARC_A.pci].physical_index == 0
    assert {"utilization", "memory_free"} < set(values(sample, ARC_A.pci))
    assert values(sample, ARC_A.pci)["memory_free"] == 5 * GIB
    fake.write([ARC_B, ARC_A])
    assert host.fault() == "driver-mismatch"


def test_a_level_zero_without_cards_needs_none(fake: FakeSys, ze: FakeZeLoader) -> None:
    """Where it lists no card of this host, cards may come and go."""
    fake.write([ARC_B])
    ze.write([])
    host = host_of(fake, ze)
    host.read()
    fake.write([ARC_B, ARC_A])
    assert set(devices(host.read())) == {ARC_A.pci, ARC_B.pci}


# --- the whole daemon


def config_of(library: Path | None) -> str:
    named = f"libraries: {{intel: {library}}}\n" if library else ""
    return f"backends: [intel]\n{named}sampling: {{reuse_seconds: 0, hang_seconds: 2}}\n"


def daemon_on(
    start: Start, fake: FakeSys, ze: FakeZeLoader, library: Path | None, environment: Mapping[str, str] | None = None
) -> Daemon:
    flags = [f"--path.sysfs={fake.sys}", f"--path.procfs={fake.proc}"]
    return start({**ze.environment(), **(environment or {})}, config_of(library), flags)


def free_of(page: Scrape) -> dict[str, float]:
    return {each.labels["pci_bus_id"]: each.value / GIB for each in page.of("gpu_memory_free_bytes")}


def degrees(page: Scrape) -> dict[str, float]:
    return {each.labels["pci_bus_id"]: each.value for each in page.of("gpu_temperature_celsius")}


@pytest.mark.parametrize("how", ["settings", "by-name"])
def test_the_loader_is_found(fake: FakeSys, ze: FakeZeLoader, start: Start, how: str) -> None:
    """At the path of the settings, or by its name; pyzes alone looks at one path of one distribution."""
    fake.write([ARC_B])
    ze.write([gpu(ARC_B)])
    environment = {"LD_LIBRARY_PATH": str(ze.shared_object.parent)} if how == "by-name" else {}
    daemon = daemon_on(start, fake, ze, ze.shared_object if how == "settings" else None, environment)
    assert free_of(daemon.scrape()) == {ARC_B.pci: 6}


def test_a_slow_call_on_eight_cards_is_waited_for_once_f59(fake: FakeSys, ze: FakeZeLoader, start: Start) -> None:
    """F59: 150 ms on each of eight cards is less than a second for all."""
    cards = [replace(ARC_B, pci=f"0000:{bus:02x}:00.0", minor=bus) for bus in range(3, 11)]
    fake.write(cards)
    ze.write([gpu(card) for card in cards], lines=["slow zesMemoryGetState 150"])
    daemon = daemon_on(start, fake, ze, ze.shared_object)
    daemon.scrape()
    page = daemon.scrape()
    assert len(free_of(page)) == 8
    assert 0.15 <= page.seconds < 1


def test_a_card_that_hangs_in_it_is_alone_in_that(fake: FakeSys, ze: FakeZeLoader, start: Start) -> None:
    """The others are read within the deadline, and it heals."""
    fake.write([ARC_B, ARC_A])
    ze.write([gpu(ARC_B), gpu(ARC_A)])
    daemon = daemon_on(start, fake, ze, ze.shared_object)
    daemon.scrape()
    ze.write([gpu(ARC_B), gpu(ARC_A, 4)], lines=["hang zesMemoryGetState 0"])
    page = daemon.scrape(timeout=1.5)
    assert page.seconds < 1.2
    assert free_of(page) == {ARC_A.pci: 4}
    assert [page.state(pci_bus_id=card.pci) for card in (ARC_B, ARC_A)] == ["hung", "ok"]
    ze.write([gpu(ARC_B), gpu(ARC_A)])
    daemon.scrape_until(lambda page: len(free_of(page)) == 2)


def test_a_start_that_hangs_costs_its_own_readings(fake: FakeSys, ze: FakeZeLoader, start: Start) -> None:
    """The kernel's are served within the deadline from the first page on, and Sysman's come once it has started."""
    fake.write([ARC_B])
    ze.write([gpu(ARC_B)], lines=["hang zesInit"])
    daemon = daemon_on(start, fake, ze, ze.shared_object)
    page = daemon.scrape(timeout=4)
    assert degrees(page) == {ARC_B.pci: 48}
    page = daemon.scrape(timeout=1)
    assert degrees(page) == {ARC_B.pci: 48}
    assert page.seconds < 0.5
    assert page.value("gpu_exporter_hint_info", hint="install-level-zero") == 1
    time.sleep(2.5)  # longer than the verdict on a worker that hangs
    assert degrees(daemon.scrape(timeout=1)) == {ARC_B.pci: 48}
    ze.write([gpu(ARC_B)])
    assert free_of(daemon.scrape_until(lambda page: bool(free_of(page)))) == {ARC_B.pci: 6}


def test_a_crash_costs_a_cycle(fake: FakeSys, ze: FakeZeLoader, start: Start) -> None:
    """The worker starts anew."""
    fake.write([ARC_B])
    ze.write([gpu(ARC_B)])
    daemon = daemon_on(start, fake, ze, ze.shared_object)
    daemon.scrape()
    ze.write([gpu(ARC_B)], lines=["crash zesMemoryGetState"])
    assert free_of(daemon.scrape()) == {}
    ze.write([gpu(ARC_B)])
    assert daemon.scrape_until(lambda page: free_of(page) == {ARC_B.pci: 6})


def test_a_card_that_goes_and_comes_f95(fake: FakeSys, ze: FakeZeLoader, start: Start) -> None:
    """F95: A and B, A, A and B, with equal labels, though Level Zero must be started anew for a card that comes."""
    fake.write([ARC_B, ARC_A])
    ze.write([gpu(ARC_B, 4), gpu(ARC_A, 5)])
    daemon = daemon_on(start, fake, ze, ze.shared_object)
    before = daemon.scrape()
    assert free_of(before) == {ARC_B.pci: 4, ARC_A.pci: 5}
    fake.write([ARC_B, replace(ARC_A, driver="vfio-pci")])
    ze.write([gpu(ARC_B, 4)])
    away = daemon.scrape()
    assert free_of(away) == {ARC_B.pci: 4}
    assert away.of("gpu_info", pci_bus_id=ARC_A.pci) == []
    fake.write([ARC_B, ARC_A])
    ze.write([gpu(ARC_B, 4), gpu(ARC_A, 5)])
    after = daemon.scrape_until(lambda page: len(free_of(page)) == 2)
    assert after.of("gpu_info") == before.of("gpu_info")
    assert after.of("gpu_memory_free_bytes") == before.of("gpu_memory_free_bytes")


BROKEN = {
    "none": "raise ModuleNotFoundError(\"No module named 'pyzes'\", name='pyzes')",
    "talking": "print('Loading...')\nraise OSError('it is broken')",
    "key": "print('Loading...')\nraise KeyError('ze')",
    "attribute": "import os\nos.no_such_thing",
    "syntax": "def (",
    "its-own": "import no_such_module",
}


@pytest.mark.parametrize("how", [*BROKEN, "old-loader", "no-loader", "no-file"])
def test_without_it_the_kernels_readings_go_on(
    fake: FakeSys, ze: FakeZeLoader, start: Start, tmp_path: Path, how: str
) -> None:
    """A hint says why in a sentence, and nothing is printed."""
    fake.write([ARC_B])
    ze.write([gpu(ARC_B)])
    library: Path | None = ze.shared_object
    environment: dict[str, str] = {}
    if how == "old-loader":
        library = build(tmp_path / "old", OLD_LOADER_LACKS)
    elif how == "no-file":
        library = tmp_path / "nothing" / SONAME
    elif how == "no-loader":
        library = None
    else:
        (tmp_path / "shadow").mkdir()
        (tmp_path / "shadow/pyzes.py").write_text(BROKEN[how])
        environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path / "shadow"), os.environ.get("PYTHONPATH", "")])}
    daemon = daemon_on(start, fake, ze, library, environment)
    page = daemon.scrape()
    assert degrees(page) == {ARC_B.pci: 48}
    assert free_of(page) == {}
    assert page.value("gpu_exporter_hint_info", vendor="intel", hint="install-level-zero") == 1
    said = daemon.wait_for_log(r'msg=hint .*detail="?(.*)')[1]
    expected = {
        "none": r"pyzes is not installed: pip install",
        "talking": r"pyzes cannot be loaded: Loading",
        "key": r"pyzes cannot be loaded: Loading",
        "attribute": r"pyzes cannot be loaded: AttributeError",
        "syntax": r"pyzes cannot be loaded: SyntaxError",
        "its-own": r"pyzes cannot be loaded: ModuleNotFoundError: .*no_such_module",
        "old-loader": r"loader is older|cannot be loaded: AttributeError",
        "no-loader": r"libze_loader\.so\.1: cannot open",
        "no-file": r"nothing/libze_loader\.so\.1: cannot open",
    }
    assert re.search(expected[how], said), said
    assert "Traceback" not in daemon.log
    assert not re.search(r"^Loading", daemon.log, re.MULTILINE)


def test_pyzes_is_there() -> None:
    """Else what stands above tests less than it says."""
    assert importlib.util.find_spec("pyzes") is not None
