"""What the soak does to the made-up host, its workers and its daemon, and in what time all is to be well again."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests import crowds
from tests.crowds import Crowd
from tests.fakes.mirror import Fault as Damage
from tests.harness import Daemon
from tests.truth import Host, Truth
from tests.truth_cards import A0, A1, CARDS, I0, I1, N0, N1, N2, VENDORS, Pretend, amd, intel, mig, nvidia
from tests.truth_judge import Fleets

DEADLINE_SECONDS, HANG_SECONDS = 2.0, 3.0
# How long a vendor's readings may take to be back: at once but for a slow machine; after the longest back-off; after a
# worker that does not even take SIGTERM, or whose library is only tried again when the settings are loaded anew.
SOON, BACKED_OFF, REPLACED = 8.0, 24.0, 40.0

BOARD = nvidia(9, 0x81, mig=True)
ONE, TWO, THREE = (mig(number, BOARD, f"{instance}/0") for number, instance in ((61, 1), (62, 2), (63, 13)))
N3, A2, I2 = nvidia(4, 0xA1), amd(23, 0xC8, node=3), intel(43, 0x0B)
HOST = Host(cards=(*CARDS, replace(BOARD, parts=(ONE, TWO))))
OF = {vendor: tuple(card for card in HOST.cards if card.vendor == vendor) for vendor in VENDORS}

_FLEETS = f"""
  - {{name: host, runtime: host}}
  - {{name: chat, runtime: cuda, env: {{CUDA_VISIBLE_DEVICES: "{N2.uuid},{N0.uuid}"}}}}
  - {{name: tenant, runtime: cuda, env: {{CUDA_VISIBLE_DEVICES: {TWO.uuid}}}}}
  - {{name: train, runtime: rocm, env: {{HIP_VISIBLE_DEVICES: "1"}}}}
  - {{name: infer, runtime: level_zero, env: {{ZE_AFFINITY_MASK: "1"}}}}
  - {{name: numbers, runtime: cuda, env: {{CUDA_VISIBLE_DEVICES: "1"}}}}
  - {{name: ended, pid_file: /nonexistent/soak.pid}}
"""
_MORE_FLEETS = """
  - {name: hidden, runtime: cuda, env: {CUDA_VISIBLE_DEVICES: ""}}
  - {name: both, env: {HIP_VISIBLE_DEVICES: "0", ZE_AFFINITY_MASK: "0", CUDA_VISIBLE_DEVICES: "-1"}}
"""
FLEETS: Fleets = {
    "chat": {"nvidia": (N2, N0)},
    "tenant": {"nvidia": (TWO,)},
    "train": {"amd": (A0,)},
    "infer": {"intel": (I1,)},
    "both": {"amd": (A1,), "intel": (I0,)},
    "numbers": {},
    "ended": {},
    "hidden": {},
}
SAMPLING = f"deadline_seconds: {DEADLINE_SECONDS}, hang_seconds: {HANG_SECONDS}"
# The settings that are loaded in turn, and how much older than without reuse their pages' readings may be.
SETTINGS = (
    (f"reuse_seconds: 0, {SAMPLING}", _FLEETS, 0.0),
    (f"reuse_seconds: 0.5, {SAMPLING}", _FLEETS + _MORE_FLEETS, 0.5),
    (f"interval_seconds: 0.4, {SAMPLING}", _FLEETS, 2.0),
    (f"reuse_seconds: 0, {SAMPLING}", _FLEETS + _MORE_FLEETS, 0.0),
)


class Scene:
    """The host and the daemon of a soak, and what was wrong with what was done to them."""

    def __init__(self, truth: Truth, daemon: Daemon, rng: random.Random) -> None:
        self.truth, self.daemon, self.rng = truth, daemon, rng
        self.problems: list[str] = []
        self.died = False  # a worker has, since the settings were loaded; after two of them libraries are left alone
        self.loose: list[tuple[float, float, float]] = []

    def loosen(self, before: float, seconds: float) -> None:
        """For so long pages may join cycles that nobody of the soak's clients began, or that are ``before`` old."""
        self.loose.append((time.monotonic(), time.monotonic() + seconds, before))

    def load(self, text: str, outcome: str) -> None:
        """Loads these settings by SIGHUP, and waits for the ``outcome`` in the log."""
        seen = len(re.findall(outcome, self.daemon.log))
        self.daemon.config_path.write_text(text, encoding="utf-8")
        self.loosen(DEADLINE_SECONDS, 2 * DEADLINE_SECONDS)
        self.daemon.process.send_signal(signal.SIGHUP)
        until = time.monotonic() + 15
        while len(re.findall(outcome, self.daemon.log)) <= seen:
            if time.monotonic() > until:
                self.problems.append(f"no {outcome!r} in the log")
                return
            time.sleep(0.05)

    def load_again(self, number: int) -> None:
        """Loads the settings of that number."""
        sampling, fleets, _ = SETTINGS[number]
        self.died = False
        self.load(self.truth.config(sampling, fleets), 'msg="settings loaded"')

    def stop_and_go(self, vendor: str, seconds: float) -> None:
        """The worker does not run for that long."""
        for pid in self.daemon.workers(vendor):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(seconds)
                os.kill(pid, signal.SIGCONT)

    def kill(self, vendor: str) -> None:
        """Ends the vendor's worker at once."""
        for pid in self.daemon.workers(vendor):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


During = Callable[[Scene], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True)
class Ill:
    """Something that goes wrong, which the ``with`` of ``during`` makes so and heals.

    ``touches`` are the cards whose readings may be missing, of which all are back ``within`` so many seconds of the
    healing. Of those with a place in common in ``needs`` only one is so at a time.
    """

    name: str
    during: During
    touches: Sequence[Pretend] = ()
    needs: frozenset[str]
    within: float = SOON
    kind: str = ""


def _rules(vendor: str, *lines: str) -> During:
    @contextlib.contextmanager
    def during(scene: Scene) -> Iterator[None]:
        scene.truth.rules(vendor, *lines)
        yield
        scene.truth.rules(vendor)
        scene.died |= any(line.startswith("crash") for line in lines)

    return during


def _file(card: Pretend, name: str, how: Damage) -> During:
    @contextlib.contextmanager
    def during(scene: Scene) -> Iterator[None]:
        scene.truth.break_file(card, name, how)
        yield
        broken = scene.truth.host.broken
        scene.truth.change(broken={key: value for key, value in broken.items() if key != (card.pci, name)})

    return during


def _cards(change: Callable[[list[Pretend]], Sequence[Pretend]]) -> During:
    @contextlib.contextmanager
    def during(scene: Scene) -> Iterator[None]:
        scene.truth.change(cards=tuple(change(list(HOST.cards))))
        yield
        scene.truth.change(cards=HOST.cards)

    return during


def _without(gone: Pretend) -> During:
    return _cards(lambda cards: [card for card in cards if card.number != gone.number])


def _with(new: Pretend) -> During:
    return _cards(lambda cards: [*cards, new])


def _altered(number: int, **fields: Any) -> During:
    return _cards(lambda cards: [replace(card, **fields) if card.number == number else card for card in cards])


def _unloaded(vendor: str) -> During:
    @contextlib.contextmanager
    def during(scene: Scene) -> Iterator[None]:
        scene.truth.change(bound=scene.truth.host.bound - {vendor}, loaded=vendor != "nvidia")
        yield
        scene.truth.change(bound=scene.truth.host.bound | {vendor}, loaded=True)

    return during


def _killed(vendor: str) -> During:
    @contextlib.contextmanager
    def during(scene: Scene) -> Iterator[None]:
        scene.kill(vendor)
        yield
        scene.died = True

    return during


def _stopped(vendor: str, seconds: float) -> During:
    @contextlib.contextmanager
    def during(scene: Scene) -> Iterator[None]:
        scene.stop_and_go(vendor, seconds)
        yield
        scene.died |= seconds > HANG_SECONDS

    return during


@contextlib.contextmanager
def _reloaded(scene: Scene) -> Iterator[None]:
    number = scene.rng.randrange(1, len(SETTINGS))
    scene.load_again(number)
    yield
    scene.loosen(DEADLINE_SECONDS + SETTINGS[number][2], 3 * DEADLINE_SECONDS)
    scene.load_again(0)


@contextlib.contextmanager
def _badly_reloaded(scene: Scene) -> Iterator[None]:
    bad = scene.rng.choice(("fleets: [{name: x, runtme: cuda}]\n", "\x00\x01", "fleets: {}", "sampling: 3\n"))
    scene.load(bad, "settings not loaded")
    yield
    scene.load_again(0)


def _flood(attack: Callable[[Crowd], None]) -> During:
    @contextlib.contextmanager
    def during(scene: Scene) -> Iterator[None]:
        with Crowd(scene.daemon.port) as crowd:
            attack(crowd)
            yield
        scene.loosen(DEADLINE_SECONDS, DEADLINE_SECONDS)

    return during


def _of_nvidia() -> Iterator[Ill]:
    needs, cards = frozenset({"nvidia rules"}), OF["nvidia"]
    for place, card in enumerate(cards):
        touched = (card, *card.parts)
        for kind, line in (
            ("card lost", f"lost {place}"),
            ("card hung", f"hang nvmlDeviceGetMemoryInfo_v2 {place}"),
            ("card slow", f"slow nvmlDeviceGetTemperatureV {place} 200"),
            ("card slow", f"slow nvmlDeviceGetTemperatureV {place} 2500"),
            ("call fails", f"fault nvmlDeviceGetTemperatureV {place} 999"),
        ):
            yield Ill(name=f"nvidia: {line}", during=_rules("nvidia", line), touches=touched, needs=needs, kind=kind)
    for kind, line, within in (
        ("all cards hung", "hang * *", BACKED_OFF),
        ("library crashes", "crash nvmlDeviceGetTemperatureV 1", BACKED_OFF),
        ("driver fails", "fault * * 999", BACKED_OFF),
    ):
        during = _rules("nvidia", line)
        yield Ill(name=f"nvidia: {line}", during=during, touches=cards, needs=needs, within=within, kind=kind)


def _of_amd() -> Iterator[Ill]:
    for card in OF["amd"]:
        for file in ("gpu_busy_percent", "mem_info_vram_used", "hwmon/*/temp1_input"):
            for how in ("fifo", "eio", "empty"):
                kind = "file hangs" if how == "fifo" else "file fails"
                needs = frozenset({f"{card.pci} file"})
                name = f"amd: {file} {how}"
                yield Ill(name=name, during=_file(card, file, how), touches=(card,), needs=needs, kind=kind)


def _of_intel() -> Iterator[Ill]:
    needs = frozenset({"intel rules"})
    for place, card in enumerate(OF["intel"]):
        for kind, line in (
            ("card lost", f"fault * {place} 0x70000001"),
            ("card hung", f"hang zesMemoryGetState {place}"),
            ("card slow", f"slow zesMemoryGetState {place} 200"),
            ("call fails", f"fault zesMemoryGetState {place} 0x70000001"),
        ):
            yield Ill(name=f"intel: {line}", during=_rules("intel", line), touches=(card,), needs=needs, kind=kind)
        during = _file(card, "hwmon/*/temp2_input", "fifo")
        at = frozenset({f"{card.pci} file"})
        yield Ill(name="intel: temp2_input fifo", during=during, touches=(card,), needs=at, kind="file hangs")
    during = _rules("intel", "crash zesMemoryGetState 0")
    all_ = OF["intel"]
    yield Ill(name="intel: crash", during=during, touches=all_, needs=needs, within=REPLACED, kind="library crashes")


def _of_all() -> Iterator[Ill]:
    for vendor, cards in OF.items():
        at = frozenset({f"{vendor} worker"})
        for kind, during, within in (
            ("worker killed", _killed(vendor), BACKED_OFF),
            ("worker stopped", _stopped(vendor, 1.0), SOON),
            ("worker stopped for good", _stopped(vendor, 5.0), REPLACED),
        ):
            yield Ill(name=f"{vendor}: {kind}", during=during, touches=cards, needs=at, within=within, kind=kind)
        files = (f"{card.pci} file" for card in cards)
        topology = frozenset({"cards", f"{vendor} rules", f"{vendor} worker", *files})
        yield Ill(
            name=f"{vendor}: driver unloaded",
            during=_unloaded(vendor),
            touches=cards,
            needs=topology,
            within=BACKED_OFF,
            kind="driver unloaded",
        )
    for card, new in ((N1, N3), (A1, A2), (I0, I2)):
        cards = OF[card.vendor]
        needs = frozenset({"cards", "settings", f"{card.vendor} rules", *(f"{each.pci} file" for each in cards)})
        for kind, during, touched in (
            ("card leaves", _without(card), cards if card.vendor == "intel" else (card,)),
            ("card comes", _with(new), cards if card.vendor == "intel" else (new,)),
            ("card sleeps", _altered(card.number, power="suspended"), cards),
        ):
            within = BACKED_OFF if len(touched) > 1 else SOON
            name = f"{card.vendor}: {kind}"
            yield Ill(name=name, during=during, touches=touched, needs=needs, within=within, kind=kind)
    needs = frozenset({"cards", "settings"})
    for parts in ((ONE,), (ONE, TWO, THREE), (ONE, replace(THREE, partition="2/0")), (TWO, ONE), ()):
        touched = (BOARD, ONE, TWO, THREE)
        during = _altered(BOARD.number, parts=parts)
        yield Ill(name="nvidia: MIG", during=during, touches=touched, needs=needs, kind="MIG reconfigured")
    at = frozenset({"settings", "cards"})
    yield Ill(name="settings", during=_reloaded, needs=at, kind="reload")
    yield Ill(name="bad settings", during=_badly_reloaded, needs=at, kind="bad reload")


FLOODS = (
    crowds.silent,
    crowds.hanging,
    crowds.slow_readers,
    crowds.flood_of_resets,
    crowds.half_closed,
    crowds.bodies_without_end,
    crowds.nonsense,
)


def _of_clients() -> Iterator[Ill]:
    for attack in FLOODS:
        name = f"clients: {attack.__name__}"
        yield Ill(name=name, during=_flood(attack), needs=frozenset({"clients"}), kind="flood")


ILLS = (*_of_nvidia(), *_of_amd(), *_of_intel(), *_of_all(), *_of_clients())
KINDS = tuple(dict.fromkeys(each.kind for each in ILLS))


def drawn(rng: random.Random, most: int = 3) -> list[Ill]:
    """Some that can be so at the same time: kinds are as likely as each other, however many there are of one."""
    found: list[Ill] = []
    for kind in rng.sample(KINDS, most):
        each = rng.choice([ill for ill in ILLS if ill.kind == kind])
        if all(not each.needs & other.needs for other in found):
            found.append(each)
    return found
