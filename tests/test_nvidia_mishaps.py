"""What goes wrong for a moment, or on one card, costs NVIDIA's cards that moment's readings, and no others'."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.nvml import FakeNvml, equal_cards, watched_cards
from tests.fakes.sysfs import FakeSys, OtherCard
from tests.harness import Start
from tests.test_nvidia_watched import HOST, expected, found, instances

pytestmark = pytest.mark.e2e

# Answers that may pass: of a card that is busy, or for which the driver's state is not ready yet.
UNKNOWN, NO_PERMISSION, NOT_SUPPORTED, TIMEOUT, GPU_IS_LOST = 999, 4, 3, 10, 15

ODD = {
    "a link's state that is none": ("91 1", "165 nan type=double link=0"),
    "a link's state beyond all": ("91 1", "165 inf type=double link=0"),
    "a count of links that is none": ("91 nan type=double", "165 1 link=0"),
    "a count of links of all ones": ("91 4294967295 type=uint", "165 1 link=0"),
}


@pytest.mark.parametrize("name", ODD)
def test_a_link_that_tells_nonsense_costs_the_links_alone(nvml: FakeNvml, start: Start, name: str) -> None:
    """The card's other values are there, and it is not said to have links that it has not told."""
    plain = equal_cards(2)
    nvml.write([replace(plain[0], fields=(*ODD[name], "186 5000")), plain[1]])
    scrape = start(nvml.environment(), HOST).scrape()
    assert not scrape.of("gpu_interconnect_link_up")
    assert scrape.value("gpu_power_watts", physical_index="0") == 5
    assert scrape.value("gpu_temperature_celsius", physical_index="0") == 40


def test_a_count_of_fans_of_all_ones_is_none(nvml: FakeNvml, start: Start) -> None:
    """A card is not asked for four billion fans."""
    (card,) = equal_cards(1)
    nvml.write([replace(card, fans=2**32 - 1, fan=30)])
    scrape = start(nvml.environment(), HOST).scrape()
    assert not scrape.of("gpu_fan_speed_ratio")
    assert scrape.value("gpu_temperature_celsius") == 40


@pytest.mark.parametrize("value", ["8", "4294967295 type=uint", "-1 type=si", "nan type=double"])
def test_an_action_that_is_not_known_is_not_no_action(nvml: FakeNvml, start: Start, value: str) -> None:
    """Where the card needs what nobody knows by number, zero for all that is known would say that it needs nothing."""
    none, odd = equal_cards(2)
    nvml.write([replace(none, fields=("230 0",)), replace(odd, fields=(f"230 {value}",))])
    scrape = start(nvml.environment(), HOST).scrape()
    assert {sample.labels["physical_index"] for sample in scrape.of("gpu_recovery_needed")} == {"0"}
    assert {sample.value for sample in scrape.of("gpu_recovery_needed")} == {0}


AT_FIRST = (
    f"fault nvmlDeviceGetNumFans * {UNKNOWN}",
    f"fault nvmlDeviceGetFieldValues * {UNKNOWN}",
    f"fault nvmlDeviceGetMaxClockInfo * {NOT_SUPPORTED}",
    f"fault nvmlDeviceGetTemperatureThreshold * {NO_PERMISSION}",
    f"fault nvmlDeviceRegisterEvents * {UNKNOWN}",
)


@pytest.mark.parametrize("fault", AT_FIRST)
def test_what_fails_when_a_card_is_first_seen_is_asked_for_again(nvml: FakeNvml, start: Start, fault: str) -> None:
    """Of what is asked for once a card, too, a moment's failure takes nothing away for good."""
    cards = watched_cards(2)
    nvml.write(cards, lines=[fault])
    daemon = start(nvml.environment(), HOST)
    assert len(found(daemon.scrape(), physical_index="1")) < len(expected(1))
    nvml.write(cards)
    scrape = daemon.scrape()
    assert found(scrape, physical_index="1") == pytest.approx(expected(1))


def test_a_board_that_may_not_be_asked_for_its_mode_is_asked_again(nvml: FakeNvml, start: Start) -> None:
    """Its instances are there as soon as it tells that it has any."""
    cards = [instances(equal_cards(1)[0])]
    nvml.write(cards, lines=[f"fault nvmlDeviceGetMigMode * {NO_PERMISSION}"])
    daemon = start(nvml.environment(), HOST)
    assert not daemon.scrape().of("gpu_mig_instance_info")
    nvml.write(cards)
    assert len(daemon.scrape().of("gpu_mig_instance_info")) == 3


def test_what_is_never_told_is_asked_for_rarely(nvml: FakeNvml, start: Start, tmp_path: Path) -> None:
    """Constants, fans and links that only ever fail do not cost a call in every cycle."""
    rests = ("nvmlDeviceGetNumFans", "nvmlDeviceGetMaxClockInfo", "nvmlDeviceGetTemperatureThreshold")
    faults = [f"fault {call} * {UNKNOWN}" for call in rests]
    cards = watched_cards(1)
    nvml.write(cards, lines=faults)
    daemon = start(nvml.environment(), HOST)
    for _ in range(3):
        daemon.scrape()
    log = tmp_path / "calls"
    nvml.write(cards, lines=[*faults, f"log {log}"])
    daemon.scrape()
    calls = Counter(line.split()[0] for line in log.read_text(encoding="utf-8").splitlines())
    assert not set(rests) & set(calls)
    assert calls["nvmlDeviceGetFieldValues"] == 1


def test_fields_that_a_card_has_not_are_asked_for_rarely(nvml: FakeNvml, start: Start, tmp_path: Path) -> None:
    """A card without any is not asked at all for a while; one that has some is asked for those."""
    without, some = equal_cards(2)
    cards = [without, replace(some, fields=("83 5000",))]
    nvml.write(cards)
    daemon = start(nvml.environment(), HOST)
    for _ in range(3):
        daemon.scrape()
    log = tmp_path / "calls"
    cards[1] = replace(some, fields=("83 6000",))
    nvml.write(cards, lines=[f"log {log}"])
    assert [sample.value for sample in daemon.scrape().of("gpu_energy_joules_total")] == [6]
    calls = Counter(log.read_text(encoding="utf-8").splitlines())
    assert (calls["nvmlDeviceGetFieldValues 0"], calls["nvmlDeviceGetFieldValues 1"]) == (0, 1)


# --- XID errors


@pytest.mark.parametrize("code", [GPU_IS_LOST, UNKNOWN])
def test_one_lost_card_does_not_end_the_others_counts(nvml: FakeNvml, start: Start, code: int) -> None:
    """The library may answer that a card is lost to whoever waits for all cards' errors: the others' are told on."""
    cards = watched_cards(3)
    nvml.write(cards)
    daemon = start(nvml.environment(), HOST)
    daemon.scrape()
    nvml.write(cards, lines=["lost 1", f"fault nvmlEventSetWait_v2 * {code}"])
    assert not daemon.scrape().of("gpu_xid_errors_total")  # what has happened meanwhile is not known
    nvml.write(cards, lines=["lost 1"])
    assert [sample.labels["physical_index"] for sample in daemon.scrape().of("gpu_xid_errors_total")] == ["0", "2"]
    nvml.write(cards, lines=["lost 1", "xid 2 79"])
    scrape = daemon.scrape()
    assert {sample.labels["physical_index"]: sample.value for sample in scrape.of("gpu_xid_errors_total")} == {
        "0": 0,
        "2": 1,
    }
    assert scrape.value("gpu_xid_last_code", physical_index="2") == 79


def test_no_count_is_told_while_nobody_can_read_the_events(nvml: FakeNvml, start: Start) -> None:
    """A count that stands still would say that nothing has happened."""
    cards = watched_cards(1)
    nvml.write(cards)
    daemon = start(nvml.environment(), HOST)
    assert daemon.scrape().value("gpu_xid_errors_total") == 0
    nvml.write(cards, lines=["hang nvmlEventSetWait_v2 *", "xid 0 79"])
    for _ in range(2):
        scrape = daemon.scrape(timeout=2)
        assert not scrape.of("gpu_xid_errors_total")
        assert scrape.value("gpu_temperature_celsius") == 40
    nvml.write(cards, lines=["xid 0 79"])
    assert daemon.scrape_until(lambda page: bool(page.of("gpu_xid_errors_total"))).value("gpu_xid_last_code") == 79


def test_events_that_only_fail_are_not_tried_in_every_cycle(nvml: FakeNvml, start: Start, tmp_path: Path) -> None:
    """A new set is made at once, then rarely, and an old one is let go."""
    cards, log = watched_cards(2), tmp_path / "calls"
    faults = [f"fault nvmlEventSetWait_v2 * {UNKNOWN}", f"log {log}"]
    nvml.write(cards, lines=faults)
    daemon = start(nvml.environment(), HOST)
    for _ in range(6):
        scrape = daemon.scrape()
    calls = Counter(line.split()[0] for line in log.read_text(encoding="utf-8").splitlines())
    assert not scrape.of("gpu_xid_errors_total")
    assert calls["nvmlEventSetCreate"] == calls["nvmlEventSetFree"] == 2


def test_a_card_that_was_away_is_registered_anew(nvml: FakeNvml, start: Start, tmp_path: Path) -> None:
    """Its registration ended when it left the bus, though the library has it under the same handle as before."""
    cards, log = watched_cards(2), tmp_path / "calls"
    tree = FakeSys(tmp_path / "tree")
    listed = [OtherCard(pci=card.pci[4:]) for card in cards if card.pci]
    tree.write(listed)
    nvml.write(cards, lines=[f"log {log}", "xid 1 13"])
    daemon = start(nvml.environment(), HOST, [f"--path.sysfs={tree.sys}"])
    for _ in range(2):
        daemon.scrape()
    nvml.write(cards, lines=[f"log {log}", "xid 1 13", "xid 1 31", "lost 1"])
    tree.write(listed[:1])
    daemon.scrape()
    tree.write(listed)
    nvml.write(cards, lines=[f"log {log}", "xid 1 13", "xid 1 31"])
    scrape = daemon.scrape()
    calls = Counter(log.read_text(encoding="utf-8").splitlines())
    assert calls["nvmlDeviceRegisterEvents 0"] == 1
    assert calls["nvmlDeviceRegisterEvents 1"] == 2
    assert scrape.value("gpu_xid_errors_total", physical_index="1") == 0


# --- What an older driver tells otherwise


def test_older_calls_tell_the_limits(nvml: FakeNvml, start: Start) -> None:
    """Before there were fields for them, the default and the highest limit had calls of their own."""
    fields, calls = equal_cards(2)
    nvml.write(
        [
            replace(fields, fields=("189 1000", "188 2000"), default_limit=7000, max_limit=8000),
            replace(calls, default_limit=7000, max_limit=8000),
        ]
    )
    scrape = start(nvml.environment(), HOST).scrape()
    assert [sample.value for sample in scrape.of("gpu_power_limit_default_watts")] == [1, 7]
    assert [sample.value for sample in scrape.of("gpu_power_limit_max_watts")] == [2, 8]


def test_the_thermal_policys_time_stands_in(nvml: FakeNvml, start: Start) -> None:
    """What nvml.h names as the same, of drivers that lack the newer field."""
    newer, older = equal_cards(2)
    nvml.write([replace(newer, fields=("269 1000000000", "75 9000000000")), replace(older, fields=("75 2000000000",))])
    scrape = start(nvml.environment(), HOST).scrape()
    assert [sample.value for sample in scrape.of("gpu_throttled_seconds_total", reason="software-thermal")] == [1, 2]
