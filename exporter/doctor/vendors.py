"""Each vendor's driver, library and backend. A vendor that this host has nothing of is one line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from exporter.doctor import libraries
from exporter.doctor.findings import Finding, failed, passed, warned
from exporter.doctor.seen import Seen
from exporter.faults import FAULTS
from exporter.files import read_regular
from exporter.model import BackendStatus
from exporter.vendors import VENDORS

_MOST_BYTES = 4096
# "NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue ...", or "... Open Kernel Module for x86_64  550.54.15  ..."
_NVIDIA_VERSION = re.compile(r"Kernel Module[^\n]*?\s([0-9]+\.[0-9][0-9.]*)\s")
_LOG = "`journalctl -k -b` says why."
_MISMATCH = "driver-mismatch"


def here(seen: Seen) -> Iterator[tuple[str, BackendStatus]]:
    """The vendors that this host has cards of, or that the settings name, with the backend's row."""
    for vendor in seen.vendors:
        status = seen.backend(vendor)
        if status is not None:
            yield vendor, status


def check_present(seen: Seen) -> Iterator[Finding]:
    """The vendors that there is nothing of."""
    for vendor in seen.vendors:
        if seen.backend(vendor) is None:
            yield passed("backend", vendor, "no card on this host")


def check_drivers(seen: Seen) -> Iterator[Finding]:
    """The kernel's module, and what serves each card."""
    for vendor, status in here(seen):
        if VENDORS[vendor].modules:
            on_bus = seen.on_bus(vendor)
            yield _driver(seen, vendor, status, on_bus)
            yield from _cards(vendor, on_bus)


def _driver(seen: Seen, vendor: str, status: BackendStatus, on_bus: Mapping[str, str | None]) -> Finding:
    modules = VENDORS[vendor].modules
    loaded = [name for name in modules if name in on_bus.values() or Path(seen.sysfs, "module", name).is_dir()]
    version = nvidia_version(seen) if vendor == "nvidia" else ""
    if version:
        return passed("driver", vendor, f"nvidia {version} is loaded")
    if loaded:
        versions = (f"{name} {_module_version(seen, name)}".rstrip() for name in loaded)
        return passed("driver", vendor, f"{', '.join(versions)} is loaded")
    if status.up:
        return passed("driver", vendor, f"it answers, as version {status.driver_version or 'unknown'}")
    if on_bus and set(on_bus.values()) == {""}:
        return passed("driver", vendor, "all cards are handed to virtual machines, or held for them")
    names = " or ".join(modules)
    if not on_bus:
        fix = f"Leave {vendor} out of `backends:` where it is not meant; `lspci -nn` shows the cards that there are."
        return failed("driver", vendor, f"no card is on the PCI bus, and no module {names} is loaded", fix)
    fix = f"Install the driver, and load it: `sudo modprobe {modules[0]}`; {_LOG}"
    return failed("driver", vendor, f"the kernel's module {names} is not loaded", fix)


def nvidia_version(seen: Seen) -> str:
    """Of the module that runs; empty where the kernel does not tell."""
    found = _NVIDIA_VERSION.search(_text(f"{seen.procfs}/driver/nvidia/version"))
    return found[1] if found else _module_version(seen, "nvidia")


def _module_version(seen: Seen, name: str) -> str:
    """Empty for a module of the kernel itself, which has its version."""
    return _text(f"{seen.sysfs}/module/{name}/version").strip()


def _text(path: str) -> str:
    try:
        return read_regular(path, _MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _cards(vendor: str, on_bus: Mapping[str, str | None]) -> Iterator[Finding]:
    modules = VENDORS[vendor].modules
    for address, driver in on_bus.items():
        if driver is None:
            fix = f"`lspci -nnk -s {address}` names the modules for it: `sudo modprobe {modules[0]}`; {_LOG}"
            yield failed("driver", address, f"no driver serves this card of {vendor}", fix)
        elif driver and driver not in modules:
            fix = f"Give the card to {' or '.join(modules)}, where these know it: `lspci -nnk -s {address}`."
            yield warned("driver", address, f"the driver {driver} serves it, which gives no readings", fix)


def check_libraries(seen: Seen) -> Iterator[Finding]:
    """Which file the vendor's library is loaded from, and of which version it is."""
    wanted = {vendor: seen.settings.libraries.get(vendor) for vendor, _ in here(seen) if VENDORS[vendor].shared_object}
    for vendor, found in libraries.look(wanted).items():
        if found.path:
            version = f", version {found.version}" if found.version else ""
            yield passed("library", vendor, f"loaded from {found.path}{version}")
            yield from _same_version(seen, vendor, found.version)
        else:
            yield _no_library(vendor, found.error, named=wanted[vendor] is not None)


def _same_version(seen: Seen, vendor: str, library: str) -> Iterator[Finding]:
    """NVIDIA's module and library are released together, and work together in no other way."""
    module = nvidia_version(seen) if vendor == "nvidia" else ""
    if module and library and module != library:
        found = f"the kernel's module is {module}, and the library {library}"
        yield failed("library", vendor, f"{_MISMATCH}: {found}", FAULTS[_MISMATCH].advice)


def _no_library(vendor: str, error: str, *, named: bool) -> Finding:
    if not VENDORS[vendor].files_suffice:
        return failed("library", vendor, f"it cannot be loaded: {error}", FAULTS["library-missing"].advice)
    if named:
        fix = f"Correct the file that `libraries:` names for {vendor}, or leave it out; a reload takes it."
        return warned("library", vendor, f"it cannot be loaded: {error}", fix)
    return passed("library", vendor, "not installed, and not needed: the kernel's files are read")


def check_backends(seen: Seen) -> Iterator[Finding]:
    """Whether each vendor's cards can be read at all."""
    for vendor, status in here(seen):
        if status.fault is None:
            count = sum(device.key.vendor == vendor for device in seen.whole_cards)
            yield passed("backend", vendor, f"up, with {count} card{'s' * (count != 1)}")
        elif not seen.is_named(vendor) and set(seen.on_bus(vendor).values()) == {""}:
            yield passed("backend", vendor, "no card of it is this host's own")
        else:
            found = f"down: {status.fault.reason}: {status.fault.detail}"
            judged = warned if status.fault.reason == "starting" else failed
            yield judged("backend", vendor, found, FAULTS[status.fault.reason].advice)
        if vendor in seen.snapshot.incomplete:
            fix = f"{_LOG} `gpu-fleet-exporter inventory` shows the cards that are known."
            yield failed("backend", vendor, "a card that the library counts could not be identified", fix)


def check_hints(seen: Seen) -> Iterator[Finding]:
    """Readings that are missing, and what would bring them."""
    for vendor, status in here(seen):
        for hint in status.hints:
            reading, _, how = hint.text.partition(": ")
            yield warned("hint", vendor, f"a reading is missing: {reading} ({hint.code})", how or hint.text)
