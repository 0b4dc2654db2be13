"""Which devices a workload can open, as keys: what the settings state, or what was seen of its processes. Pure.

Where two answers are possible both are given, and a mask counts as inverted where both lead to the same devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from exporter.inventory import Inventory
from exporter.model import Device, DeviceKey, Fleet, Opens, Refusal

Reach = frozenset[DeviceKey]

_LIST = re.compile(r"[0-9]{1,6}(?:,[0-9]{1,6})*")
# Slurm of some distributions numbers GPUs by their render nodes, the first of which has the minor number 128.
_FIRST_RENDER = 128
# In which Slurm writes a job's cards, unless it is told otherwise (gres.conf(5)).
_SLURMS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")


def reaches(fleet: Fleet, inventory: Inventory, everyone: Inventory) -> tuple[Reach | None, ...] | Refusal:
    """What the fleet may be able to open of one vendor's inventory: at least one reach, None where it is not known.

    ``everyone`` has other vendors' cards too, which a reach of the settings may name.
    """
    if fleet.reach is not None:
        return _stated(fleet.reach, inventory, everyone)
    opens = None if fleet.live is None else fleet.live.opens
    if fleet.live is None or inventory.devices == ():
        return (frozenset(device.key for device in inventory.devices),)
    seen = None if opens is None else _seen(opens, inventory)
    if opens is None or seen is None:
        return (None,)
    if opens.filtered is False or _holds_all(opens, seen, inventory):
        return (seen,)
    given = _given_by_slurm(fleet.live.slurm, inventory, everyone)
    if given is None:
        return (None,)
    return (given & seen,) if opens.filtered else _either(fleet, given & seen, seen)


def _stated(reach: Iterable[str], inventory: Inventory, everyone: Inventory) -> tuple[Reach, ...] | Refusal:
    found = {text: inventory.named(text) for text in reach}
    missing = [text for text, devices in found.items() if not devices and not everyone.named(text)]
    if missing:
        return Refusal("reach-unknown", f"reach names {', '.join(missing)}, which this host does not have")
    return (frozenset(device.key for devices in found.values() for device in devices),)


def _seen(opens: Opens, inventory: Inventory) -> Reach | None:
    """The devices whose files the process can open; None where that is not known of one. A card of which only some
    parts can be opened is reached through these.
    """
    can = {device.key: _can_open(device, opens) for device in inventory.devices}
    if None in can.values():
        return None
    reached = {key for key, yes in can.items() if yes}
    narrowed = {part.parent for part in inventory.devices if part.parent and part.key not in reached}
    return frozenset(reached - narrowed)


def _can_open(device: Device, opens: Opens) -> bool | None:
    """A device without files, as in WSL, can be opened from everywhere where the exporter's own files are seen; so can
    a MIG instance where no capability of any is a file, as with drivers before R450.
    """
    if opens.may is None:
        return None
    files = [_may(file, opens) for file in device.opened_by]
    return (True if opens.here else None) if not files else False if False in files else None if None in files else True


def _may(file: str, opens: Opens) -> bool | None:
    may = opens.may or frozenset()
    if file in may or file in opens.held:
        return True
    if "/" in file and not any("/" in other for other in may | opens.unsure):
        return True if opens.here else None
    return None if file in opens.unsure else False


def _holds_all(opens: Opens, seen: Reach, inventory: Inventory) -> bool:
    """Whatever a filter may deny: all that it sees is open already."""
    files = {file for device in inventory.devices if device.key in seen for file in device.opened_by}
    return bool(files) and files <= opens.held


def _given_by_slurm(numbers: str | None, inventory: Inventory, everyone: Inventory) -> Reach | None:
    """The cards that Slurm gave: it numbers those of the host from 0, some by the vendor's index and some by the number
    of the device file. None where that makes a difference, or they are of several vendors.
    """
    cards = sorted(inventory.boards(), key=lambda card: -1 if card.physical_index is None else card.physical_index)
    if numbers is None or not _LIST.fullmatch(numbers) or len(cards) != len(everyone.boards()):
        return None
    files = [card.minor_number for card in cards if card.minor_number is not None]
    known = len(files) == len(cards) and all(card.physical_index is not None for card in cards)
    if not known or files != sorted(files):
        return None
    wanted = [int(number) for number in numbers.split(",")]
    if min(wanted) >= _FIRST_RENDER:
        wanted = [number - _FIRST_RENDER for number in wanted]
    if max(wanted) >= len(cards):
        return None
    return frozenset(cards[number].key for number in wanted)


def _either(fleet: Fleet, given: Reach, seen: Reach) -> tuple[Reach, ...]:
    """Whether Slurm constrains the job to its cards, where that cannot be seen: then it numbers them from 0 in the
    mask, and else it writes the host's numbers there.
    """
    slurm = fleet.live.slurm if fleet.live else None
    count = len((slurm or "").split(","))
    local = ",".join(map(str, range(count)))
    # Slurm writes the same list into all of them; one that a job script has changed differs from the others.
    lists = [fleet.env[name] for name in _SLURMS if name in fleet.env]
    agreed = lists[0] if len(lists) > 1 and len(set(lists)) == 1 and slurm != local else None
    if agreed is not None and agreed == slurm:
        return (seen,)
    return (given,) if agreed is not None and agreed == local else (given, seen)
