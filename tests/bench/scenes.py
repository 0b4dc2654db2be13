"""The pretend hosts: cards behind the pretend NVML whose values move, and the fleets that watch them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from exporter.units import pci_bus_id
from tests.fakes.nvml import GIB, FakeNvml, Gpu, Mig, build, equal_cards, watched_cards

LINK = {
    "current_link_speed": "16.0 GT/s PCIe",
    "max_link_speed": "32.0 GT/s PCIe",
    "current_link_width": "16",
    "max_link_width": "16",
    "aer_dev_correctable": "RxErr 3\nTOTAL_ERR_COR 3",
    "aer_dev_nonfatal": "Undefined 0\nTOTAL_ERR_NONFATAL 0",
    "aer_dev_fatal": "Undefined 0\nTOTAL_ERR_FATAL 0",
}
BUS_DEVICES = 300  # PCI functions of a pretend host, its cards among them


class Scene(NamedTuple):
    """A host of cards, each with so many MIG instances, and fleets that see all; ``watched`` cards tell all that
    is read by default, the others the few that a card of old tells.
    """

    cards: int
    instances: int = 0
    fleets: int = 1
    watched: bool = False

    @property
    def name(self) -> str:
        """What the tables call it."""
        cards = (
            f"{self.cards} x {self.instances} MIG"
            if self.instances
            else _several(self.cards, "full card" if self.watched else "card")
        )
        return f"{cards}, {_several(self.fleets, 'fleet')}"

    def fleet_settings(self) -> list[dict[str, object]]:
        """Fleets by a mask of indices; in MIG mode, where CUDA shows one instance, fleets that watch everything."""
        mask = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(self.cards))), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        reads = {"runtime": "host"} if self.instances else {"runtime": "cuda", "env": mask}
        return [{"name": f"fleet-{number}", **reads} for number in range(self.fleets)]


def _several(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


class Cards:
    """A scene's pretend cards, in a folder of their own, with the PCI bus of their host."""

    def __init__(self, scene: Scene, folder: Path) -> None:
        self.scene, self._folder = scene, folder
        self.fake = FakeNvml(build(folder / "nvml"))
        self.sysfs = folder / "sys"
        made = watched_cards if scene.watched else equal_cards
        self._still = [_in_mig_mode(card, scene.instances) for card in made(scene.cards)]
        self._moves = 0
        _write_bus(self.sysfs, self._still, LINK if scene.watched else {})
        self.move()

    def move(self, lines: Sequence[str] = ()) -> None:
        """Other values than before, as every reading of a real card gives; ``lines`` are rules of the pretend NVML."""
        self._moves += 1
        self.fake.write([_moved(card, self._moves) for card in self._still], lines=lines)

    def settings(self, reuse_seconds: float | None) -> Path:
        """A settings file of the scene's fleets; None is the default reuse."""
        sampling = {} if reuse_seconds is None else {"sampling": {"reuse_seconds": reuse_seconds}}
        file = self._folder / f"reuse-{reuse_seconds}.yaml"
        file.write_text(json.dumps({"fleets": self.scene.fleet_settings(), **sampling}), encoding="utf-8")
        return file

    def calls(self) -> Path:
        """A file that gets a line for each call from now on, until the next move."""
        log = self._folder / "calls"
        log.write_bytes(b"")
        self.move([f"log {log}"])
        return log


def _in_mig_mode(card: Gpu, instances: int) -> Gpu:
    if not instances:
        return card
    parts = (
        Mig(
            index=number,
            uuid=f"MIG-{(card.minor or 0):08x}-0000-4000-8000-{number:012x}",
            gi=7 + number,
            ci=0,
            name="NVIDIA L40S MIG 1g.6gb",
            total=6 * GIB,
            free=GIB + number,
            used=4 * GIB - number,
        )
        for number in range(instances)
    )
    return replace(card, mig=1, util=None, instances=tuple(parts))


def _moved(card: Gpu, moves: int) -> Gpu:
    parts = tuple(
        replace(part, free=(part.free or 0) + moves, used=(part.used or 0) - moves) for part in card.instances
    )
    util = None if parts else moves % 101
    free, used = (10 * GIB) + moves, (30 * GIB) - moves
    return replace(card, util=util, temp=30 + moves % 50, free=free, used=used, instances=parts)


def _write_bus(sysfs: Path, gpus: Sequence[Gpu], more: Mapping[str, str]) -> None:
    """A sysfs with the PCI bus of a host that has these cards, awake and bound to their driver; ``more`` are files of
    each card.
    """
    devices, driver = sysfs / "bus/pci/devices", sysfs / "bus/pci/drivers/nvidia"
    cards = [pci_bus_id(gpu.pci or "") or "" for gpu in gpus]
    others = [f"0100:{index // 32:02x}:{index % 32:02x}.0" for index in range(BUS_DEVICES - len(cards))]
    rows = [(card, "0x10de", "0x030200") for card in cards] + [(other, "0x8086", "0x088000") for other in others]
    for address, vendor, kind in rows:
        (devices / address / "power").mkdir(parents=True)
        files = {"vendor": vendor, "class": kind, "power/runtime_status": "active"}
        for name, value in ({**files, **more} if address in cards else files).items():
            (devices / address / name).write_text(f"{value}\n", encoding="ascii")
    driver.mkdir(parents=True)
    for card in cards:
        (driver / card).symlink_to(devices / card)
        (devices / card / "driver").symlink_to(driver)
