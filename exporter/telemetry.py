"""What the exporter tells of itself in its log: one line for each change of state, none for a state that lasts."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from exporter.model import BackendStatus, Device, DeviceKey, Refusal, Snapshot, State, VendorOutcome

log = logging.getLogger("exporter")

_LOUD: Mapping[State, int] = {
    "ok": logging.INFO,
    "asleep": logging.INFO,
    "lost": logging.WARNING,
    "hung": logging.WARNING,
}


_MOST_NAMED = 3


def status(snapshot: Snapshot) -> str:
    """A snapshot in a line: how many devices and fleets there are, and what is not as it should be."""
    states = Counter(state for state in snapshot.states.values() if state != "ok")
    refused = {each.fleet: each.outcome.code for each in snapshot.mappings if isinstance(each.outcome, Refusal)}
    down = [f"{backend.vendor} ({backend.fault.reason})" for backend in snapshot.backends if backend.fault is not None]
    devices = [_count(len(snapshot.devices), "device"), *(f"{number} {state}" for state, number in states.items())]
    fleets = [_count(len({each.fleet for each in snapshot.mappings}), "fleet")]
    if refused:
        fleets.append(f"{len(refused)} refused: {_named([f'{fleet} ({code})' for fleet, code in refused.items()])}")
    parts = [", ".join(devices), ", ".join(fleets)]
    return "; ".join(parts + ([f"backends down: {_named(down)}"] if down else []))


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _named(items: Sequence[str]) -> str:
    return ", ".join(items[:_MOST_NAMED]) + (", ..." if len(items) > _MOST_NAMED else "")


class Transitions:
    """Logs what changed from one snapshot to the next; a state that lasts is said once."""

    def __init__(self) -> None:
        self._backends: dict[str, str] = {}
        self._devices: dict[DeviceKey, State] = {}
        self._fleets: dict[tuple[str, str], str] = {}
        self._hints: set[tuple[str, str]] = set()
        self._short: dict[str, int] = {}
        self._reading_faults: set[tuple[DeviceKey | None, str, str]] = set()

    def see(self, snapshot: Snapshot, outcomes: Iterable[VendorOutcome]) -> None:
        """Compare a finished cycle with the one before."""
        for backend in snapshot.backends:
            self._see_backend(backend)
            self._see_hints(backend)
            self._see_count(backend)
        for device in snapshot.devices:
            self._see_device(device, snapshot.states[device.key])
        for gone in self._devices.keys() - snapshot.states.keys():
            del self._devices[gone]
        for mapping in snapshot.mappings:
            self._see_fleet(mapping.fleet, mapping.runtime, mapping.outcome)
        self._see_ended({(mapping.fleet, mapping.runtime) for mapping in snapshot.mappings})
        self._see_faults(outcomes)

    def _see_backend(self, backend: BackendStatus) -> None:
        reason = "" if backend.fault is None else backend.fault.reason
        if self._backends.get(backend.vendor) == reason:
            return
        self._backends[backend.vendor] = reason
        if backend.fault is None:
            _say(logging.INFO, "backend up", vendor=backend.vendor, driver_version=backend.driver_version)
        else:
            level = logging.INFO if reason == "starting" else logging.WARNING
            _say(level, "backend down", vendor=backend.vendor, reason=reason, detail=backend.fault.detail)

    def _see_count(self, backend: BackendStatus) -> None:
        """Fewer cards than expected, another number of them, and then enough. While a backend starts nobody can say."""
        expected, found = backend.cards_expected, backend.cards_found
        if backend.fault is not None and backend.fault.reason == "starting":
            return
        short = expected is not None and found < expected
        before = self._short.get(backend.vendor)
        if expected is None:
            self._short.pop(backend.vendor, None)
        elif short and before != found:
            self._short[backend.vendor] = found
            _say(logging.WARNING, "cards missing", vendor=backend.vendor, expected=expected, found=found)
        elif not short and before is not None:
            del self._short[backend.vendor]
            _say(logging.INFO, "cards complete", vendor=backend.vendor, expected=expected, found=found)

    def _see_hints(self, backend: BackendStatus) -> None:
        """Each is said once in the life of the daemon: a card that hangs for a moment takes its hints along."""
        for hint in backend.hints:
            if (backend.vendor, hint.code) not in self._hints:
                self._hints.add((backend.vendor, hint.code))
                _say(logging.INFO, "hint", vendor=backend.vendor, hint=hint.code, detail=hint.text)

    def _see_device(self, device: Device, state: State) -> None:
        before = self._devices.get(device.key)
        if before == state:
            return
        self._devices[device.key] = state
        if before is not None or state != "ok":
            _say(
                _LOUD[state],
                f"device {state}",
                vendor=device.key.vendor,
                physical_index=device.physical_index,
                pci_bus_id=device.pci_bus_id,
                uuid=device.uuid,
            )

    def _see_fleet(self, fleet: str, runtime: str, outcome: object) -> None:
        code = outcome.code if isinstance(outcome, Refusal) else "inverted"
        if self._fleets.get((fleet, runtime)) == code:
            return
        self._fleets[fleet, runtime] = code
        if isinstance(outcome, Refusal):
            _say(logging.WARNING, "masks refused", fleet=fleet, runtime=runtime, reason=code, detail=outcome.detail)
        else:
            _say(logging.INFO, "masks inverted", fleet=fleet, runtime=runtime)

    def _see_ended(self, now: Set[tuple[str, str]]) -> None:
        for fleet, runtime in sorted(self._fleets.keys() - now):
            del self._fleets[fleet, runtime]
            _say(logging.INFO, "fleet ended", fleet=fleet, runtime=runtime)

    def _see_faults(self, outcomes: Iterable[VendorOutcome]) -> None:
        now = {
            (fault.key, fault.reason, fault.detail.partition(":")[0]): fault.detail
            for outcome in outcomes
            if outcome.sample is not None
            for fault in outcome.sample.faults
            if fault.reason not in ("hung", "device-lost")  # a change of the device's state says these
        }
        for key, reason, place in sorted(now.keys() - self._reading_faults, key=str):
            device, detail = key.identity if key else None, now[key, reason, place]
            _say(logging.WARNING, "reading failed", device=device, reason=reason, detail=detail)
        self._reading_faults = set(now)


def _say(level: int, message: str, **fields: Any) -> None:
    log.log(level, message, extra={"fields": fields})
