"""What a runtime's own driver was asked and what its answer means: answers -> devices. Pure.

A driver's answer holds for a workload only where both see the same cards: the workload can open all of the host's, and
the driver shows all of them to the exporter where no mask is set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from exporter.inventory import Inventory
from exporter.masks import RUNTIMES, invert
from exporter.model import Context, Device, DeviceKey, Inversion, Refusal, Resolved
from exporter.units import pci_bus_id
from exporter.wire import DriverAnswer, DriverDevice


class Question(NamedTuple):
    """Which devices a runtime's driver shows under these variables; asked anew where the host's devices or the kernel's
    drivers are others.
    """

    runtime: str
    env: tuple[tuple[str, str], ...]
    devices: frozenset[tuple[DeviceKey, str]]
    drivers: tuple[str, ...] = ()


Answers = Mapping[Question, DriverAnswer]


def questions(
    runtime: str,
    env: Mapping[str, str],
    inventory: Inventory,
    reach: frozenset[DeviceKey] | None,
    drivers: tuple[str, ...] = (),
) -> tuple[Question, ...]:
    """What to ask: under the workload's masks, and under none. Nothing where an answer would not be the workload's: it
    cannot open all cards, or a variable is set that would bring in its files, programs or servers.
    """
    told = RUNTIMES[runtime].told_to_drivers
    everything = {device.key for device in inventory.devices if device.kfd_listed is not False}
    boards = {board.key for board in inventory.boards() if board.kfd_listed is not False}
    if told is None or not inventory.whole or reach is None or not (reach >= boards or reach >= everything):
        return ()
    if any(name in env for name in RUNTIMES[runtime].variables if name not in told):
        return ()
    devices = frozenset((device.key, device.uuid) for device in inventory.devices)
    choosing = RUNTIMES[runtime].choosing
    under = {name: env[name] for name in told if name in env}
    unmasked = tuple(sorted((name, under[name]) for name in under if name not in choosing))
    masked = Question(runtime, tuple(sorted(under.items())), devices, drivers)
    free = Question(runtime, unmasked, devices, drivers)
    if RUNTIMES[runtime].joint:  # its driver reads no mask: the program does
        return (free,)
    return (masked,) if masked == free else (masked, free)


def unanswered(asked: Sequence[Question], answers: Answers, inventory: Inventory) -> Sequence[Question]:
    """What of it is to be asked: what was not, else what was answered to no use."""
    missing = [question for question in asked if question not in answers]
    if missing or not asked or RUNTIMES[asked[0].runtime].joint:
        return missing or asked
    free = _named(answers[asked[-1]].devices, inventory)
    return asked if free is None or not _covers(free, inventory) else asked[:1]


def answer_of(
    asked: Sequence[Question], answers: Answers, env: Mapping[str, str], inventory: Inventory, context: Context
) -> Inversion | None:
    """The devices that the driver names, by fleet index; None where it was not asked, or does not name them all."""
    known = [answers[question] for question in asked if question in answers]
    if not known or len(known) < len(asked) or any(answer.fault for answer in known):
        return None
    if RUNTIMES[asked[0].runtime].joint:
        return _enumerated(asked[0], known[0], env, inventory, context)
    masked, free = (_named(answer.devices, inventory) for answer in (known[0], known[-1]))
    if masked is None or free is None or not _covers(free, inventory):
        return None
    devices = tuple(Resolved(key, "probed", index) for index, key in enumerate(masked))
    return Inversion(devices, told=(_told(known[0], asked[0], len(masked)),))


def _told(answer: DriverAnswer, question: Question, count: int) -> str:
    under = ", ".join(f"{name}='{value}'" for name, value in question.env) or "no mask"
    return f"asked {answer.file} {answer.version} under {under}: it shows {count} devices"


def _covers(keys: Sequence[DeviceKey], inventory: Inventory) -> bool:
    """Every card is there, itself or by one of its parts: else the exporter cannot open what the workload can."""
    parents = {key: device.parent or device.key for key in keys if (device := inventory.find(key)) is not None}
    cards = {board.key for board in inventory.boards() if board.kfd_listed is not False}
    return cards <= set(parents.values())


def _named(devices: Sequence[DriverDevice], inventory: Inventory) -> list[DeviceKey] | None:
    found = [_device(device, inventory) for device in devices]
    return None if None in found else [device.key for device in found if device is not None]


def _device(told: DriverDevice, inventory: Inventory) -> Device | None:
    """The one device that has what the driver tells of it. Which tile of its card a device is is not believed: a card
    that a mask narrowed to one tile has the number 0 in some releases, whichever it is.
    """
    there = [device for device in inventory.devices if _at(told.pci_bus_id, device)]
    if told.uuid:
        there = [device for device in there if device.uuid in ("", told.uuid)]
    else:
        there = [device for device in there if device.parent is None] if len(there) > 1 else there
        there = [device for device in there if _is_whole(told, device, inventory)]
    return there[0] if len(there) == 1 else None


def _is_whole(told: DriverDevice, card: Device, inventory: Inventory) -> bool:
    """A card of several tiles shows all of them; how many an Intel card has must be known."""
    if card.key.vendor != "intel":
        return not inventory.parts(card.key)
    return told.tile is None and card.tiles == max(len(told.tiles), 1)


def _at(address: str, device: Device) -> bool:
    """The function of the address is left aside: AMD's partitions have one each that the bus does not have."""
    normal = pci_bus_id(address)
    return normal is not None and normal.rpartition(".")[0] == device.pci_bus_id.rpartition(".")[0]


def _enumerated(
    question: Question, answer: DriverAnswer, env: Mapping[str, str], inventory: Inventory, context: Context
) -> Inversion | None:
    """The program's mask over the raw enumeration, where that has every card."""
    raw = answer.vulkan or ()
    if not {board.pci_bus_id for board in inventory.boards()} <= {entry.pci_bus_id for entry in raw}:
        return None
    over = Inventory(inventory.devices, inventory.whole, raw)
    outcome = invert(question.runtime, env, over, msgspec.structs.replace(context, probe="same_env"))
    if isinstance(outcome, Refusal):
        return None
    devices = (msgspec.structs.replace(each, evidence="probed") for each in outcome.devices)
    return Inversion(tuple(devices), outcome.layers, (_told(answer, question, len(raw)),))
