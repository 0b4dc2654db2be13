"""Cards that are lost, leave, come, change places with others, and sleep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.faults.expectation import Expect
from tests.faults.matrix import Act, Row, Scene, mend
from tests.truth import Host
from tests.truth_cards import A0, A1, CARDS, I0, I1, MEMORY, N0, N1, N2, Pretend, amd, intel, nvidia

N3, A2, I2 = nvidia(4, 0x51), amd(23, 0x83, node=3), intel(43, 0x08)
N_FAR = Pretend(number=5, vendor="nvidia", pci="10000:01:00.0", uuid="GPU-00000005-0000-4000-8000-0000000000aa")
ZE_DEVICE_LOST, ENODEV = 0x70000001, 19


def _cards(*cards: Pretend) -> Act:
    """The host has these cards from now on."""
    return lambda scene: scene.truth.change(cards=cards)


def _all_but(*gone: Pretend) -> Act:
    return _cards(*(card for card in CARDS if card not in gone))


def _with(new: Pretend, before: Pretend) -> Act:
    at = CARDS.index(before)
    return _cards(*CARDS[:at], new, *CARDS[at:])


def _instead(old: Pretend, new: Pretend) -> Act:
    return _cards(*(new if card is old else card for card in CARDS))


AS_BEFORE = _cards(*CARDS)


def _rule(vendor: str, *lines: str) -> Act:
    return lambda scene: scene.truth.rules(vendor, *lines)


def _lost_amd(scene: Scene) -> None:
    scene.truth.break_file(A0, "gpu_busy_percent", scene.sick.link(f"error-{ENODEV}"))


def _lost(*cards: Pretend) -> Expect:
    return Expect(states=dict.fromkeys(cards, "lost"), counted=[(cards[0].vendor, "device-lost")])


def _gone(*cards: Pretend) -> Expect:
    return Expect(states=dict.fromkeys(cards, "gone"))


def _back_elsewhere(scene: Scene) -> None:
    """It has another index of NVML's now, and so have others."""
    scene.truth.mend()
    scene.truth.change(cards=(N1, N0, *CARDS[2:]))


LOST = [
    Row(name="a card is lost: nvidia", inflict=_rule("nvidia", "lost 1"), at_once=_lost(N1), later=_lost(N1)),
    Row(name="a card is lost: amd", inflict=_lost_amd, at_once=_lost(A0), later=_lost(A0)),
    Row(
        name="a card is lost: intel",
        inflict=_rule("intel", f"fault * 0 {ZE_DEVICE_LOST}"),
        at_once=_lost(I0),
        later=_lost(I0),
    ),
    Row(
        name="all cards are lost: nvidia",
        inflict=_rule("nvidia", "lost 0", "lost 1", "lost 2"),
        at_once=_lost(N0, N1, N2),
        later=_lost(N0, N1, N2),
    ),
    Row(
        name="all cards are lost from the start: nvidia",
        when="start",
        inflict=_rule("nvidia", "lost 0", "lost 1", "lost 2"),
        at_once=Expect(down={"nvidia": "device-lost"}),
        later=Expect(down={"nvidia": "device-lost"}),
    ),
    Row(
        name="a card is lost from the start, and its fleet by number cannot be told: nvidia",
        when="start",
        inflict=_rule("nvidia", "lost 1"),
        at_once=Expect(states={N1: "gone"}, refused={"chat": "inventory-incomplete"}),
        later=Expect(states={N1: "gone"}, refused={"chat": "inventory-incomplete"}),
    ),
    Row(
        name="a card is lost while a scrape waits: nvidia",
        when="waiting",
        hold={"nvidia": ("slow nvmlDeviceGetMemoryInfo_v2 * 1000",)},
        inflict=_rule("nvidia", "lost 1"),
        at_once=_lost(N1),
        later=_lost(N1),
    ),
    Row(
        name="a card is lost and comes back under another index: nvidia",
        inflict=_rule("nvidia", "lost 1"),
        heal=_back_elsewhere,
        at_once=_lost(N1),
        later=_lost(N1),
        touches=("nvidia",),
    ),
]

GOES = [
    Row(
        name=f"a card leaves the bus and comes back: {card.vendor}",
        inflict=_all_but(card),
        heal=AS_BEFORE,
        at_once=_gone(card),
        later=_gone(card),
        touches=touches,
    )
    for card, touches in ((N0, ()), (A0, ()), (I1, ("intel",)))  # Sysman has to be started anew for a card that came
]

COMES = [
    Row(name="a card comes: nvidia", inflict=_with(N3, before=N2), heal=AS_BEFORE),
    Row(name="a card comes: amd", inflict=_with(A2, before=A1), heal=AS_BEFORE),
    Row(
        name="a card comes: intel",
        inflict=_with(I2, before=I1),
        heal=AS_BEFORE,
        at_once=Expect(down={"intel": "driver-mismatch|up"}),
    ),
]

MOVES = [
    Row(
        name="a card is moved to another slot: nvidia",
        inflict=_cards(N0, N2, replace(N1, pci="0000:81:00.0"), *CARDS[3:]),
        heal=AS_BEFORE,
    ),
    Row(
        name="a card is moved to another slot: amd",
        inflict=_instead(A1, replace(A1, pci="0000:c6:00.0")),
        heal=AS_BEFORE,
    ),
    Row(
        name="a card is moved to another slot: intel",
        inflict=_instead(I0, replace(I0, pci="0000:06:00.0")),
        heal=AS_BEFORE,
        at_once=Expect(down={"intel": "driver-mismatch|up"}),
    ),
    Row(
        name="a fleet's card is replaced by another in its slot: nvidia",
        inflict=_instead(N2, replace(nvidia(6, 0), pci=N2.pci)),
        heal=AS_BEFORE,
    ),
    Row(
        name="a fleet's card is replaced by another in its slot: amd",
        inflict=_instead(A0, replace(amd(24, 0x99, node=2), pci=A0.pci)),
        heal=AS_BEFORE,
    ),
    Row(
        name="the driver counts a card that it no longer has: nvidia",
        inflict=lambda scene: scene.truth.change(cards=(N0, replace(N2, index=2), *CARDS[3:]), count=3),
        heal=lambda scene: scene.truth.change(cards=CARDS, count=None),
        at_once=Expect(states={N1: "lost"}),
        later=Expect(states={N1: "lost"}),
    ),
    Row(
        name="NVML prints addresses with a domain of four digits, and of eight: nvidia",
        when="start",
        inflict=lambda scene: scene.truth.change(answers={card.number: {"pci": card.pci} for card in (N0, N1, N2)}),
        heal=lambda scene: scene.truth.change(answers={N1.number: {"pci": N1.pci.upper().rjust(16, "0")}}),
    ),
    Row(
        name="a card's domain has more than four digits: nvidia",
        host=Host(cards=(*CARDS[:3], N_FAR, *CARDS[3:])),
        inflict=_rule("nvidia", "lost 3"),
        at_once=_lost(N_FAR),
        later=_lost(N_FAR),
    ),
]

FILES = ("gpu_busy_percent", "mem_info_vram_used", "hwmon/*/temp1_input")


def _asleep(card: Pretend) -> Act:
    """Whoever asks the card itself, which would wake it, hangs, or is in NVML's log."""

    def act(scene: Scene) -> None:
        scene.truth.alter(card, power="suspended")
        match card.vendor:
            case "nvidia":
                scene.notes["log"] = scene.truth.tick
                scene.truth.rules("nvidia", f'log "{_log(scene)}"')
            case "amd":
                for name in FILES:
                    scene.truth.break_file(card, name, "fifo")
            case "intel":
                scene.truth.rules("intel", "hang * 1")

    return act


def _log(scene: Scene) -> Path:
    return scene.directory / f"calls{scene.notes['log']}"


def _not_woken(scene: Scene) -> None:
    """NVML was not asked about the card while it slept."""
    calls = _log(scene).read_text().splitlines() if "log" in scene.notes and _log(scene).exists() else []
    woken = [call for call in calls if call.endswith(" 1")]
    if scene.stage in ("at once", "later") and (woken or not calls):
        scene.wrong(f"while the card slept NVML had {len(calls)} calls, of which on the card {woken[:3]}")


def _awake(card: Pretend) -> Act:
    def act(scene: Scene) -> None:
        mend(scene)
        scene.truth.alter(card, power="active")

    return act


def _sleeps(*cards: Pretend, without: Sequence[Pretend] = ()) -> Expect:
    return Expect(states=dict.fromkeys(cards, "asleep"), without=dict.fromkeys(without, MEMORY))


SLEEPS = [
    *(
        Row(
            name=f"a card falls asleep, and wakes: {card.vendor}",
            inflict=_asleep(card),
            heal=_awake(card),
            at_once=_sleeps(card),
            later=_sleeps(card),
            also=_not_woken if card is N1 else lambda _: None,
        )
        for card in (N1, A1, I1)
    ),
    *(
        Row(
            name=f"a card sleeps from the start, and wakes: {card.vendor}",
            when="start",
            inflict=_asleep(card),
            heal=_awake(card),
            at_once=_sleeps(card, without=lacking),
            later=_sleeps(card, without=lacking),
            also=_not_woken if card is N1 else lambda _: None,
        )
        for card, lacking in ((N1, ()), (A1, ()), (I1, (I0,)))  # Sysman's start would wake it
    ),
]

ROWS = [*LOST, *GOES, *COMES, *MOVES, *SLEEPS]
