"""What each fleet's own processes hold and do on each of its devices, so that fleets on one card are told apart. Pure.

A value is there only where it is all of it: a device of which not all users were told, a process that may be the
fleet's or not, and one whose share is not told leave none. That nobody uses a device is a value as any other, but for
the share of it, of which nobody says then whether it would be told.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from exporter.catalog import USAGE
from exporter.inventory import Inventory
from exporter.masks import RUNTIMES
from exporter.model import Binding, Device, DeviceKey, Fleet, Live, Snapshot, UsageKey, User, VendorSample

# The KFD knows of processes that compute, and nothing of what Vulkan does.
_COMPUTING_ALONE = ("amd",)
# Shares of several processes are rounded, and measured over times that are not quite the same.
_MOST = 1.1


def usage_of(
    snapshot: Snapshot,
    samples: Iterable[VendorSample],
    fleets: Iterable[Fleet],
    wanted: Collection[str] = frozenset(USAGE),
) -> Mapping[UsageKey, Mapping[str, float]]:
    """The values by the keys of :data:`exporter.catalog.USAGE`, for each binding of which there are any; ``wanted`` are
    those that the settings leave.
    """
    live = {fleet.name: fleet.live for fleet in fleets if wanted and fleet.live and fleet.live.own is not None}
    bindings = [binding for binding in snapshot.bindings if binding.fleet in live]
    users = _by_device(samples, snapshot) if bindings else {}
    inventory = Inventory(snapshot.devices)
    found = ((_key(each), _told(each, live[each.fleet], users, inventory)) for each in bindings)
    chosen = ((key, {metric: values[metric] for metric in wanted if metric in values}) for key, values in found)
    return {key: values for key, values in chosen if values}


def _key(binding: Binding) -> UsageKey:
    return binding.fleet, binding.runtime, binding.device.key


def _by_device(samples: Iterable[VendorSample], snapshot: Snapshot) -> dict[DeviceKey, list[User]]:
    """The users of each device that answered and of which all were told."""
    users: dict[DeviceKey, list[User]] = {}
    for sample in samples:
        users |= {key: [] for key in sample.users_of if snapshot.states.get(key) == "ok"}
        for user in sample.users:
            if user.key in users:
                users[user.key].append(user)
    return users


def _told(
    binding: Binding, live: Live, users: Mapping[DeviceKey, Sequence[User]], inventory: Inventory
) -> Mapping[str, float]:
    rules = RUNTIMES[binding.runtime]
    if rules.moving or (rules.joint and binding.device.key.vendor in _COMPUTING_ALONE):
        return {}
    of_device = users.get(_of_users(binding.device, inventory))
    if of_device is None or any(user.pid in live.unclear for user in of_device):
        return {}
    own = [user for user in of_device if live.own is not None and user.pid in live.own]
    if not own and any(user.utilization is not None for user in of_device):
        return {**_sums(own), "utilization": 0.0}
    return _sums(own)


def _of_users(device: Device, inventory: Inventory) -> DeviceKey:
    """What its users are told of: a card of which a program sees every tile is that card."""
    card = inventory.all_of(device)
    return device.key if card is None else card.key


def _sums(own: Sequence[User]) -> Mapping[str, float]:
    if any(user.does is None for user in own):
        return {}
    values: dict[str, float] = {"processes": len({user.pid for user in own if user.does != "nothing"})}
    memory = [user.memory_bytes for user in own if user.memory_bytes is not None]
    if len(memory) == len(own):
        values["memory"] = sum(memory)
    shares = [user.utilization for user in own if user.utilization is not None]
    if own and len(shares) == len(own) and sum(shares) <= _MOST:
        values["utilization"] = min(1.0, sum(shares))
    return values
