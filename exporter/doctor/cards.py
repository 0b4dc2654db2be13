"""Each card: its state, and whether the device files that it is used by can be opened."""

from __future__ import annotations

import errno
import os
import pwd
from collections.abc import Iterator

from exporter import pci
from exporter.doctor import opening
from exporter.doctor.findings import Finding, failed, passed, warned
from exporter.doctor.opening import Opened
from exporter.doctor.seen import Seen
from exporter.model import Device

_CONTROL = "/dev/nvidiactl"
_LOST = (
    "`journalctl -k -b` says what became of the card. Stop what runs on it, and reset it or reboot the host: see "
    "GpuDeviceLost in docs/runbook.md."
)
_HUNG = (
    "`journalctl -k -b` shows whether the driver resets it. A card that stays so needs a reset or a reboot, once "
    "nothing runs on it: see GpuDeviceHung in docs/runbook.md."
)
_FEWER = (
    "`lspci` says which are on the bus, and the other findings what is wrong with those. Where cards were taken out "
    "correct expected_devices in the settings: see GpuCardsMissing in docs/runbook.md."
)
_GONE = (
    "`journalctl -k -b` says whether it has fallen off the bus. In a container it may just not be this container's: "
    "then its fleets' reach does not have it either."
)


def name_of(device: Device) -> str:
    """How people know it."""
    number = "" if device.physical_index is None else f" {device.physical_index}"
    part = f" part {device.partition}" if device.partition else ""
    return f"{device.key.vendor}{number}{part} ({device.pci_bus_id})"


def check_states(seen: Seen) -> Iterator[Finding]:
    """Every card, and of parts those that do not answer."""
    for device in seen.snapshot.devices:
        state = seen.state(device.key)
        if state == "lost":
            yield failed("card", name_of(device), "lost: it does not answer any more, or fails every reading", _LOST)
        elif state == "hung":
            yield failed("card", name_of(device), "hung: a call into its driver has not returned", _HUNG)
        elif state == "asleep":
            yield passed("card", name_of(device), "asleep, and left so: it is read once something wakes it")
        elif device.parent is None:
            yield passed("card", name_of(device), f"answers: {device.name or 'of no name'}")


def check_count(seen: Seen) -> Iterator[Finding]:
    """As many whole cards as the settings expect answer, or sleep."""
    for backend in seen.snapshot.backends:
        expected, found = backend.cards_expected, backend.cards_found
        if expected is None:
            continue
        told = f"{found} of the {expected} cards answer that expected_devices has"
        yield (
            passed("card", backend.vendor, told) if found >= expected else failed("card", backend.vendor, told, _FEWER)
        )


def check_missing(seen: Seen) -> Iterator[Finding]:
    """NVIDIA's cards that the driver has and its library does not list, as those that have fallen off the bus. Other
    vendors' cards are those that the bus has.
    """
    status = seen.backend("nvidia")
    if status is None or not status.up or "nvidia" in seen.snapshot.incomplete:
        return
    known = {device.pci_bus_id for device in seen.snapshot.devices}
    for address, driver in seen.on_bus("nvidia").items():
        if driver == "nvidia" and address not in known:
            yield warned("card", address, "the driver nvidia has this card, and its library does not list it", _GONE)


def check_device_files(seen: Seen) -> Iterator[Finding]:
    """By opening them. A card that sleeps would wake, and one that is hung or lost may keep whoever opens it."""
    lists: dict[str, list[str]] = {}
    for device in seen.whole_cards:
        paths = [path for name in device.opened_by if (path := _path(name))]
        why = _left_alone(seen, device)
        if why:
            yield passed("device-file", name_of(device), why)
        elif paths:
            lists[name_of(device)] = paths
    if any(path.startswith("/dev/nvidia") for paths in lists.values() for path in paths):
        lists["nvidia"] = [_CONTROL]
    for subject, found in opening.look(lists).items():
        yield from (_judged(subject, path, opened) for path, opened in found.items())


def _path(name: str) -> str:
    """Of what :class:`Device` calls a file; empty for a MIG instance's capability, which only its users open."""
    if "/" in name:
        return ""
    return f"/dev/dri/{name}" if name.startswith("renderD") else f"/dev/{name}"


def _left_alone(seen: Seen, device: Device) -> str:
    """Why its files are not opened; empty where they are."""
    state = seen.state(device.key)
    if state == "asleep" or pci.is_asleep(seen.sysfs, device.pci_bus_id):
        return "left alone: the card is asleep, and opening its files would wake it"
    if state != "ok":
        return f"left alone: the card is {state}, and whoever opens its files may hang as well"
    if device.key.vendor != "nvidia" and device.opened_by and os.path.realpath(seen.sysfs) != "/sys":
        return "left alone: --path.sysfs is not this system's, so a file of that number may be another card's"
    return ""


def _judged(subject: str, path: str, opened: Opened) -> Finding:
    if opened.error == 0:
        return passed("device-file", subject, f"{path} can be opened")
    # What the kernel's files tell of AMD's and Intel's cards needs no device file.
    judged = failed if subject.startswith("nvidia") else warned
    return judged("device-file", subject, f"{path}: {opened.said}", _fix(path, opened))


def _fix(path: str, opened: Opened) -> str:
    if opened.error == errno.EACCES:
        return _access(path, opened)
    if opened.error == errno.EPERM:
        return (
            "A device filter keeps it from this program: a unit needs `DeviceAllow=` for it, as the shipped one has "
            "(restart it where the driver was loaded later), a container `--device` or the vendor's runtime."
        )
    if opened.error == errno.ENOENT and path.startswith("/dev/nvidia"):
        return "`sudo nvidia-smi` makes it, the service nvidia-persistenced at each start; a container needs `--gpus`."
    if opened.error == errno.ENOENT:
        return f"`sudo udevadm trigger` makes it where the driver serves the card; a container needs `--device={path}`."
    if opened.hangs:
        return f"The driver does not answer. {_HUNG}"
    return f"`journalctl -k -b` has the driver's side; `ls -l {path}` shows the file."


def _access(path: str, opened: Opened) -> str:
    """The group is the one that the file's mode speaks of, where it lets a group in at all."""
    if not opened.group:
        return f"A folder on the way to it may not be searched: `namei -l {path}` shows which."
    if opened.mode & 0o060 != 0o060 or opened.group == "root":
        return (
            f"No users' group is let in (group {opened.group}, mode {opened.mode:04o}): a udev rule, or for NVIDIA the "
            "options NVreg_DeviceFileGID and NVreg_DeviceFileMode of its module, give it to one that you choose."
        )
    return (
        f"It is the group {opened.group}'s: `sudo usermod -aG {opened.group} {_user()}`, and log in or start anew; a "
        f"unit takes `SupplementaryGroups={opened.group}` in a drop-in, and a restart."
    )


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
