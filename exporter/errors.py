"""What can go wrong, as one tree.

::

    ExporterError
    ├── InputError               bad input from a person: exit 2, one sentence
    │   ├── ConfigError          the settings file: names file, line and key
    │   └── InventoryFileError   a saved inventory: names file and row
    ├── CouldNot                 well asked, but not possible now: exit 1
    └── BackendError             a vendor backend's own words, inside its worker
        ├── BackendAbsent        the library or driver cannot serve: the worker ends
        ├── DeviceAsleep         the card is powered down and is not to be woken
        ├── DeviceLost           the card has fallen off the bus
        └── DeviceFault          the card cannot be read for another reason
"""

from __future__ import annotations


class ExporterError(Exception):
    """Root of every exception that this package raises on purpose."""


class InputError(ExporterError):
    """Bad input; ``str()`` is one sentence that names the place, what was found and what was expected."""


class ConfigError(InputError):
    """A complaint about a settings file: ``path:line: key: what was found and what was expected``.

    ``line`` counts from 1 and is None where no line applies (the file is missing); ``key`` is a dotted path such as
    ``fleets[1].env`` and empty where no key applies.
    """

    def __init__(self, path: str, message: str, line: int | None = None, key: str = "") -> None:
        self.path, self.line, self.key, self.message = path, line, key, message
        place = path if line is None else f"{path}:{line}"
        super().__init__(f"{place}: {key}: {message}" if key else f"{place}: {message}")


class InventoryFileError(InputError):
    """A complaint about a saved inventory file."""


class CouldNot(ExporterError):
    """What was asked is well formed and cannot be done now; ``str()`` says why."""


class BackendError(ExporterError):
    """Raised by a vendor backend; ``reason`` is one of :data:`exporter.model.FAULT_REASONS`."""

    def __init__(self, reason: str, detail: str) -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")


class BackendAbsent(BackendError):
    """The library cannot be loaded or the driver does not serve; only a fresh process may try again."""


class DeviceAsleep(BackendError):
    """The card is powered down (PCI runtime power management); asking its driver anything would wake it."""

    def __init__(self, pci_bus_id: str) -> None:
        super().__init__("asleep", pci_bus_id)


class DeviceLost(BackendError):
    """The card does not answer on the bus any more; it may come back."""

    def __init__(self, detail: str) -> None:
        super().__init__("device-lost", detail)


class DeviceFault(BackendError):
    """A card that is there cannot be identified or read."""
