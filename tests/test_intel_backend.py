"""Intel's cards as the kernel's files show them: who each is, how hot, what fails, and that none is woken."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from exporter.backends.base import Places
from exporter.backends.intel import IntelBackend
from exporter.errors import DeviceAsleep
from exporter.model import Device, DeviceKey
from tests.backend_host import BackendHost, devices, hints, state, values
from tests.fakes.sysfs import AmdCard, Client, FakeSys, IntelCard, OtherCard
from tests.harness import Daemon, Start

FRESH = "backends: [intel]\nlibraries: {intel: /nonexistent/libze_loader.so.1}\nsampling: {reuse_seconds: 0}\n"

IGPU = IntelCard(pci="0000:00:02.0", device_id="0x4680", driver="i915", minor=1)
ARC_B = IntelCard(pci="0000:03:00.0", device_id="0xe20b", driver="xe", minor=2)
ARC_A = IntelCard(pci="0000:07:00.0", device_id="0x56a0", driver="i915", minor=0)
MAX_XE = IntelCard(pci="0000:29:00.0", device_id="0x0bd5", driver="xe", minor=3, tiles=2)
MAX_I915 = replace(MAX_XE, driver="i915")
UNPLUGGED = OtherCard(pci="0000:41:00.0")


class Host(BackendHost):
    """The backend on the fake trees."""

    def __init__(self, fake: FakeSys, *, library: str = "/nonexistent/libze_loader.so.1", root: str = "/x") -> None:
        self.backend = IntelBackend(Places(str(fake.sys), str(fake.proc), library, root))
        super().__init__(self.backend)


def facts(device: Device) -> Mapping[str, object]:
    """What a card's product family says."""
    names = ("tiles", "hpc", "integrated", "product_family_rank", "driver_library", "driver_sorts")
    return {name: getattr(device, name) for name in names}


def daemon_on(start: Start, fake: FakeSys, config: str = FRESH) -> Daemon:
    return start({}, config, [f"--path.sysfs={fake.sys}", f"--path.procfs={fake.proc}"])


# --- who a card is


def test_numbers_are_in_pci_order_over_both_drivers_f53(fake: FakeSys) -> None:
    """F53: whatever DRM calls the cards, and beside other vendors' cards, which are not counted."""
    others = (OtherCard(pci="0000:01:00.0"), AmdCard(pci="0000:05:00.0", minor=5), OtherCard(pci="0000:81:00.0"))
    far = IntelCard(pci="10000:01:00.0", device_id="0x56a0", minor=9)
    for cards in itertools.permutations((ARC_A, IGPU, ARC_B)):
        fake.write([*others, far, *cards])
        found = Host(fake).read().devices
        assert [(device.pci_bus_id, device.physical_index) for device in found] == [
            ("0000:00:02.0", 0),
            ("0000:03:00.0", 1),
            ("0000:07:00.0", 2),
            ("10000:01:00.0", 3),
        ]
        assert [device.minor_number for device in found] == [129, 130, 128, 137]
        assert [device.opened_by for device in found] == [(f"renderD{n}",) for n in (129, 130, 128, 137)]
        assert all(device.key == DeviceKey("intel", device.pci_bus_id) for device in found)


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        (IGPU, (1, False, True, 31, "current", False)),
        (ARC_B, (1, False, False, 1274, "current", True)),
        (ARC_A, (1, False, False, 1270, "current", False)),
        (MAX_XE, (2, True, False, 1271, "current", False)),
        (MAX_I915, (2, True, False, 1271, "current", False)),
        (replace(MAX_I915, tiles=1), (1, True, False, 1271, "current", False)),
        (replace(MAX_XE, tiles=4, device_id="0x0201"), (4, False, False, 1250, "current", False)),
        # A media engine of its own is a second GT of i915, and no second tile.
        (replace(IGPU, device_id="0x7d55", tiles=2), (1, False, True, 1272, "current", False)),
        (replace(IGPU, device_id="0x5912"), (1, False, True, 19, "legacy1", False)),
        # Of no family that is known: the address says whether it is integrated, where it can.
        (replace(IGPU, device_id="0xffff"), (None, None, True, None, None, None)),
        (replace(ARC_A, device_id="0xffff"), (None, None, False, None, None, None)),
        (replace(ARC_A, device_id="0xffff", pci="0000:00:03.0"), (None, None, None, None, None, None)),
        (replace(ARC_B, device_id="0xffff", tiles=2), (2, None, False, None, None, None)),
    ],
)
def test_the_device_id_tells_the_family(fake: FakeSys, card: IntelCard, expected: tuple[object, ...]) -> None:
    """Tiles, whether it is a Max, integrated, the family's rank, the driver's library, and whether that sorts."""
    fake.write([card])
    board, *tiles = Host(fake).read().devices
    assert tuple(facts(board).values()) == expected
    assert len(tiles) == (board.tiles if board.tiles and board.tiles > 1 else 0)


@pytest.mark.parametrize("card", [MAX_XE, MAX_I915], ids=["xe", "i915"])
def test_each_tile_is_a_device_of_its_card(fake: FakeSys, card: IntelCard) -> None:
    """Tiles have the card's number and address, and its kernel files are the card's alone."""
    fake.write([ARC_A, card])
    sample = Host(fake).read()
    tiles = [device for device in sample.devices if device.parent]
    assert [(tile.key.identity, tile.partition) for tile in tiles] == [(f"{card.pci}/t{n}", str(n)) for n in (0, 1)]
    assert {(tile.physical_index, tile.parent) for tile in tiles} == {(1, DeviceKey("intel", card.pci))}
    assert {(tile.minor_number, tile.opened_by) for tile in tiles} == {(None, (f"renderD{128 + card.minor}",))}
    assert all(values(sample, tile.key.identity) == {} for tile in tiles)
    assert all(tile.temperature_sensor == "" for tile in tiles)


def test_names_come_from_the_pci_database_else_the_ids(fake: FakeSys, tmp_path: Path) -> None:
    """Cards of different models never share a name."""
    database = tmp_path / "root/usr/share/misc/pci.ids"
    database.parent.mkdir(parents=True)
    database.write_text("8086  Intel Corporation\n\te20b  Battlemage G21 [Arc B580]\n\t\t1 2  A board\n")
    fake.write([IGPU, ARC_B])
    found = devices(Host(fake, root=str(tmp_path / "root")).read())
    assert found[ARC_B.pci].name == "Battlemage G21 [Arc B580]"
    assert found[IGPU.pci].name == "8086:4680"


def test_a_neural_processing_unit_is_no_card(fake: FakeSys) -> None:
    """It is a processing accelerator of Intel's, and numbers nothing."""
    unit = IntelCard(pci="0000:00:0b.0", device_id="0x7d1d", pci_class="0x120000", driver="intel_vpu")
    fake.write([unit, ARC_B])
    assert [(device.pci_bus_id, device.physical_index) for device in Host(fake).read().devices] == [(ARC_B.pci, 0)]
    fake.write([unit])
    assert Host(fake).fault() == "no-devices"


@pytest.mark.parametrize(
    ("cards", "reason"),
    [
        ([], "no-devices"),
        ([UNPLUGGED], "no-devices"),
        ([replace(ARC_B, driver="")], "driver-not-loaded"),
        ([replace(ARC_B, driver="vfio-pci")], "driver-not-loaded"),
    ],
)
def test_a_host_without_a_card_that_can_be_read_says_why(fake: FakeSys, cards: list[IntelCard], reason: str) -> None:
    fake.write(cards)
    assert Host(fake).fault() == reason


def test_another_driver_is_an_info_row_and_a_reason_f56(fake: FakeSys) -> None:
    """F56: it has its number and its name, no reading, and a hint that names the driver, alone or beside others."""
    fake.write([replace(ARC_A, driver="gma500")])
    assert "unsupported-driver" in hints(Host(fake).read())
    fake.write([replace(ARC_A, driver="gma500"), ARC_B])
    sample = Host(fake).read()
    assert devices(sample)[ARC_A.pci].physical_index == 1
    assert devices(sample)[ARC_A.pci].name == "8086:56a0"
    assert values(sample, ARC_A.pci) == {}
    assert sample.faults == ()  # a host with such a card is healthy
    (hint,) = [hint for hint in sample.hints if hint.code == "unsupported-driver"]
    assert f"{ARC_A.pci}: the driver gma500" in hint.text
    assert values(sample, ARC_B.pci)["temperature"] == 48


def test_a_card_that_waits_for_its_driver_is_missed_though_it_sleeps(fake: FakeSys) -> None:
    """The bus suspends what no driver has taken; its place in the order is not known by that."""
    fake.write([replace(ARC_B, driver="", runtime_status="suspended"), ARC_A])
    (fake.proc / "uptime").write_text("20.00 12.00\n")
    host = Host(fake)
    assert not host.read().whole
    assert list(devices(host.read())) == [ARC_A.pci]
    (fake.proc / "uptime").write_text("900.00 12.00\n")
    assert Host(fake).read().whole


@pytest.mark.e2e
def test_a_lone_card_whose_temperature_fails_is_served(fake: FakeSys, start: Start) -> None:
    """Its first cycle has a fault and no value yet, since a share of the time needs two readings."""
    fake.write([ARC_B])
    fake.fault(ARC_B.pci, "hwmon/*/temp2_input", "eio")
    flags = [f"--path.sysfs={fake.sys}", f"--path.procfs={fake.proc}"]
    daemon = start({}, "sampling: {reuse_seconds: 0}", flags)
    page = daemon.scrape_until(lambda page: bool(page.of("gpu_utilization_percent")))
    assert page.value("gpu_exporter_backend_up", vendor="intel") == 1
    assert page.state(pci_bus_id=ARC_B.pci) == "ok"
    assert page.value("gpu_exporter_backend_faults_total", vendor="intel", reason="driver-error") >= 2


def test_a_card_given_away_and_back_has_equal_labels_f95(fake: FakeSys) -> None:
    """F95: A and B, then A, then both as before."""
    fake.write([ARC_B, ARC_A])
    host = Host(fake)
    before = host.read()
    fake.write([ARC_B, replace(ARC_A, driver="vfio-pci")])
    away = host.read()
    assert list(devices(away)) == [ARC_B.pci]
    assert {reading.key.identity for reading in away.readings} == {ARC_B.pci}
    fake.write([ARC_B, ARC_A])
    assert host.read().devices == before.devices


def test_a_card_that_comes_back_with_another_driver_is_read_anew(fake: FakeSys) -> None:
    """Its sensors are other files then."""
    fake.write([ARC_B])
    host = Host(fake)
    assert devices(host.read())[ARC_B.pci].temperature_sensor == "pkg"
    fake.write([replace(ARC_B, driver="i915")])
    sample = host.read()
    assert devices(sample)[ARC_B.pci].temperature_sensor == ""
    assert values(sample, ARC_B.pci) == {}
    fake.write([ARC_B])
    assert values(host.read(), ARC_B.pci)["temperature"] == 48


def test_a_sensor_that_comes_after_the_card_is_found(fake: FakeSys) -> None:
    """A driver makes its sensors when it has already made its device."""
    fake.write([replace(ARC_B, temperatures={})])
    host = Host(fake)
    assert values(host.read(), ARC_B.pci) == {}
    (monitor,) = fake.device(ARC_B.pci).glob("hwmon/*")
    (monitor / "temp2_input").write_text("51000\n")
    (monitor / "temp2_label").write_text("pkg\n")
    sample = host.read()
    assert values(sample, ARC_B.pci)["temperature"] == 51
    assert devices(sample)[ARC_B.pci].temperature_sensor == "pkg"


def test_a_card_that_left_has_no_row_f85(fake: FakeSys) -> None:
    """F85: its rows are gone, and the others stay, also when it leaves between counting and reading."""
    fake.write([ARC_B, ARC_A])
    host = Host(fake)
    host.read()
    fake.remove(ARC_A.pci)
    sample = host.read()
    assert list(devices(sample)) == [ARC_B.pci]
    assert values(sample, ARC_B.pci)["temperature"] == 48


# --- how hot


def test_i915_has_the_temperature_that_it_publishes_or_none(fake: FakeSys) -> None:
    """Without a sensor of its own there is no reading, and never the processor's."""
    fake.write([IGPU, ARC_A])
    (fake.sys / "class/hwmon/hwmon0").mkdir(parents=True)
    (fake.sys / "class/hwmon/hwmon0/temp1_input").write_text("61000\n")
    (monitor,) = fake.device(ARC_A.pci).glob("hwmon/*")
    (monitor / "temp1_input").write_text("44000\n")
    sample = Host(fake).read()
    assert "temperature" not in values(sample, IGPU.pci)
    assert devices(sample)[IGPU.pci].temperature_sensor == ""
    assert values(sample, ARC_A.pci)["temperature"] == 44
    assert devices(sample)[ARC_A.pci].temperature_sensor == "pkg"


@pytest.mark.parametrize("text", ["255000", "0", "-1000", "-1", "510000", "127999999"])
def test_a_sentinel_is_no_temperature_f71(fake: FakeSys, text: str) -> None:
    """F71: and the other card's is there."""
    fake.write([ARC_B, replace(ARC_B, pci="0000:04:00.0", minor=4)])
    fake.set(ARC_B.pci, "hwmon/*/temp2_input", f"{text}\n")
    sample = Host(fake).read()
    assert "temperature" not in values(sample, ARC_B.pci)
    assert values(sample, "0000:04:00.0")["temperature"] == 48
    assert sample.faults == ()


@pytest.mark.parametrize(
    ("how", "reasons"),
    [("eio", ["driver-error"]), ("empty", ["driver-error"]), ("missing", []), ("text", ["driver-error"])],
)
def test_a_file_that_cannot_be_read_costs_its_reading(fake: FakeSys, how: str, reasons: list[str]) -> None:
    """A fault says so where the file is there, and the reading comes back with the file."""
    cards = [ARC_B, replace(ARC_B, pci="0000:04:00.0", minor=4)]
    fake.write(cards)
    host = Host(fake)
    host.read()
    if how == "text":
        fake.set(ARC_B.pci, "hwmon/*/temp2_input", "N/A\n")
    else:
        fake.fault(ARC_B.pci, "hwmon/*/temp2_input", how)  # type: ignore[arg-type]
    sample = host.read()
    assert "temperature" not in values(sample, ARC_B.pci)
    assert values(sample, ARC_B.pci)["utilization"] == 0
    assert [fault.reason for fault in sample.faults] == reasons
    assert state(sample, ARC_B.pci) == "ok"
    fake.write(cards)
    assert values(host.read(), ARC_B.pci)["temperature"] == 48


def test_a_label_that_cannot_be_read_costs_the_temperature_alone(fake: FakeSys) -> None:
    """Which of the sensors is the package's is not guessed, and the card has its other readings."""
    fake.write([ARC_B, replace(ARC_B, pci="0000:04:00.0", minor=4)])
    fake.fault(ARC_B.pci, "hwmon/*/temp2_label", "eio")
    host = Host(fake)
    host.read()
    sample = host.read()
    assert values(sample, ARC_B.pci) == {"utilization": 0}
    assert [(fault.reason, "temp2_label" in fault.detail) for fault in sample.faults] == [("driver-error", True)]
    fake.write([ARC_B])
    assert values(host.read(), ARC_B.pci)["temperature"] == 48


def test_the_device_id_must_be_there(fake: FakeSys) -> None:
    """A card that does not say what it is is lost, and keeps its place."""
    fake.write([ARC_B, ARC_A])
    fake.fault(ARC_B.pci, "device", "missing")
    sample = Host(fake).read()
    assert not sample.whole
    assert devices(sample)[ARC_A.pci].physical_index == 1


@pytest.mark.e2e
def test_a_card_whose_files_hang_is_alone_in_it(fake: FakeSys, start: Start) -> None:
    """It is `hung`, the others are read within the deadline, and it heals."""
    fake.write([ARC_B, ARC_A, IGPU])
    daemon = daemon_on(start, fake)
    daemon.scrape()
    fake.fault(ARC_B.pci, "hwmon/*/temp2_input", "fifo")
    page = daemon.scrape(timeout=1.5)
    assert page.seconds < 1.2
    assert [page.state(physical_index=index) for index in "012"] == ["ok", "hung", "ok"]
    assert page.of("gpu_temperature_celsius") == []
    assert {each.labels["physical_index"] for each in page.of("gpu_utilization_percent")} == {"0", "2"}
    fake.write([ARC_B, ARC_A, IGPU])
    healed = daemon.scrape_until(lambda page: page.state(physical_index="1") == "ok")
    assert healed.value("gpu_temperature_celsius", pci_bus_id=ARC_B.pci) == 48


# --- asleep

CORE = {"vendor", "device", "class", "revision", "power", "driver", "drm", "subsystem"}


def forbid(fake: FakeSys, pci: str) -> None:
    """Every file of the card but those of the PCI core hangs whoever opens it."""
    top = fake.device(pci)
    for path in sorted(top.rglob("*")):
        parts = path.relative_to(top).parts
        if path.is_file() and not path.is_symlink() and (parts[0] not in CORE or parts[0] == "drm"):
            fake.fault(pci, str(path.relative_to(top)), "fifo")


def busy(card: IntelCard, pid: int, client: int, spent: int) -> Client:
    kind = {"engines": {"render": spent}} if card.driver == "i915" else {"cycles": {"rcs": (spent, 2 * spent)}}
    return Client(pid=pid, pci=card.pci, client_id=client, **kind)


@pytest.mark.parametrize("card", [ARC_A, ARC_B, MAX_XE, MAX_I915, replace(ARC_B, device_id="0xffff")])
@pytest.mark.parametrize("status", ["suspended", "suspending"])
def test_a_card_asleep_at_start_is_not_touched_f91(fake: FakeSys, card: IntelCard, status: str) -> None:
    """F91: its row, number and name are from the PCI core's files; nothing else of it is opened, nor its clients'."""
    other = replace(ARC_A, pci="0000:01:00.0", minor=7, driver="xe", device_id="0x56a0")
    asleep = replace(card, runtime_status=status)
    fake.write([other, asleep], [busy(card, 70, 3, 10)])
    forbid(fake, card.pci)
    fdinfo = fake.proc / "70/fdinfo/5"
    fdinfo.unlink()
    os.mkfifo(fdinfo)
    host = Host(fake)
    for sample in (host.read(1.0), host.read(1.0)):
        assert state(sample, card.pci) == "asleep"
        assert state(sample, other.pci) == "ok"
        assert values(sample, card.pci) == {}
        assert values(sample, other.pci)["temperature"] == 48
        assert devices(sample)[card.pci].name == f"8086:{card.device_id[2:]}"
        assert devices(sample)[card.pci].physical_index == 1
        assert devices(sample)[card.pci].minor_number == 128 + card.minor
        assert sample.whole


def test_a_card_that_falls_asleep_and_wakes_f91(fake: FakeSys) -> None:
    """F91: asleep it is as last read and not touched; awake its counters start anew, and its labels are the same."""
    fake.write([ARC_A, ARC_B], [busy(ARC_B, 70, 3, 10)])
    host = Host(fake)
    before = host.read()
    fake.write([ARC_A, ARC_B], [busy(ARC_B, 70, 3, 11)])
    assert "utilization" in values(host.read(), ARC_B.pci)
    fake.write([ARC_A, replace(ARC_B, runtime_status="suspended")], [busy(ARC_B, 70, 3, 11)])
    forbid(fake, ARC_B.pci)
    for _ in range(2):
        sample = host.read(1.0)
        assert state(sample, ARC_B.pci) == "asleep"
        assert values(sample, ARC_B.pci) == {}
        assert sample.devices == before.devices
    fake.write([ARC_A, ARC_B], [busy(ARC_B, 70, 3, 20)])
    awake = host.read()
    assert awake.devices == before.devices
    assert values(awake, ARC_B.pci) == {"temperature": 48}
    fake.write([ARC_A, ARC_B], [busy(ARC_B, 70, 3, 21)])
    assert "utilization" in values(host.read(), ARC_B.pci)


def test_a_card_that_wakes_after_the_clients_were_counted_is_not_idle(fake: FakeSys) -> None:
    """Its clients were not looked for in that cycle, so it has no utilization; 0 would be invented."""
    fake.write([ARC_B], [busy(ARC_B, 70, 3, 10)])
    backend = Host(fake).backend
    for spent in (10, 11):
        fake.write([ARC_B], [busy(ARC_B, 70, 3, spent)])
        backend.slots()
        (device,) = backend.identify(ARC_B.pci, lambda _: None)
        sampled = backend.sample(device)
    assert {"utilization", "engine", "temperature"} <= {reading.metric for reading in sampled.readings}
    fake.set(ARC_B.pci, "power/runtime_status", "suspended\n")
    backend.slots()
    fake.set(ARC_B.pci, "power/runtime_status", "active\n")
    (device,) = backend.identify(ARC_B.pci, lambda _: None)
    assert {"utilization", "engine"}.isdisjoint(reading.metric for reading in backend.sample(device).readings)


def test_a_card_that_falls_asleep_while_it_is_read_is_asleep(fake: FakeSys) -> None:
    """What failed meanwhile is no fault of a card that sleeps."""
    fake.write([ARC_B])
    backend = Host(fake).backend
    backend.slots()
    (device,) = backend.identify(ARC_B.pci, lambda _: None)
    fake.fault(ARC_B.pci, "hwmon/*/temp2_input", "eio")
    fake.set(ARC_B.pci, "power/runtime_status", "suspended\n")
    with pytest.raises(DeviceAsleep):
        backend.sample(device)


def test_a_status_that_cannot_be_read_is_awake(fake: FakeSys) -> None:
    """Cards without runtime power management have no such file."""
    fake.write([replace(ARC_B, runtime_status=None)])
    assert state(Host(fake).read(), ARC_B.pci) == "ok"
