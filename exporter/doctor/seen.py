"""What the checks judge: one complete look at this host, and what may be asked besides."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping

import msgspec

from exporter import backends, one_cycle, pci
from exporter.config import Settings
from exporter.daemon import load_settings
from exporter.errors import ConfigError
from exporter.model import BackendStatus, Device, DeviceKey, Snapshot, State

# A library that is starting counts as hung after ten seconds.
_PATIENCE = one_cycle.Patience(cycle_seconds=4.0, start_seconds=11.0, answers_seconds=3.0, more_cycles=0)


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """``settings`` are the file's, or the defaults where there is no file or ``complaint`` says what is wrong with it.
    ``listen`` are the addresses of the command line.
    """

    config_file: str | None
    settings: Settings
    complaint: ConfigError | None
    sysfs: str
    procfs: str
    listen: tuple[str, ...]
    systemd_socket: bool
    web_config_file: str | None
    snapshot: Snapshot

    @property
    def vendors(self) -> tuple[str, ...]:
        """Those that the settings name, else all that a host may have."""
        every = (name for name in backends.BACKENDS if name not in backends.ON_REQUEST)
        return self.settings.backends or tuple(every)

    @property
    def whole_cards(self) -> tuple[Device, ...]:
        """The devices that are no part of another."""
        return tuple(device for device in self.snapshot.devices if device.parent is None)

    def is_named(self, vendor: str) -> bool:
        """Whether the settings ask for the vendor."""
        return self.settings.names(vendor)

    def backend(self, vendor: str) -> BackendStatus | None:
        """The vendor's row; None where this host has nothing of it."""
        return next((each for each in self.snapshot.backends if each.vendor == vendor), None)

    def state(self, key: DeviceKey) -> State:
        """Of a device of the snapshot."""
        return self.snapshot.states.get(key, "lost")

    def on_bus(self, vendor: str) -> Mapping[str, str | None]:
        """The driver of each of the vendor's cards on the PCI bus, by address: None without one, empty where the card
        is handed to a virtual machine.
        """
        found = sorted(pci.cards(self.sysfs, vendor))
        return {address: pci.driver_of(self.sysfs, address) for address in found}


def look(options: argparse.Namespace) -> Seen:
    """One complete cycle by workers of its own; a card that hangs makes it last some ten seconds."""
    settings, complaint = Settings(), None
    try:
        settings = load_settings(options.config_file)
    except ConfigError as error:
        complaint = error
    return Seen(
        config_file=options.config_file,
        settings=settings,
        complaint=complaint,
        sysfs=options.sysfs,
        procfs=options.procfs,
        listen=tuple(options.listen or ()),
        systemd_socket=bool(options.systemd_socket),
        web_config_file=options.web_config_file,
        snapshot=one_cycle.snapshot(options, complete=True, settings=settings, patience=_PATIENCE),
    )


def in_seconds(seconds: float) -> float:
    """A moment on the monotonic clock."""
    return time.monotonic() + seconds
