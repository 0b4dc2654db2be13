"""The settings, what became of each fleet, and the cards that no fleet has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set

from exporter.doctor.cards import name_of
from exporter.doctor.findings import Finding, failed, passed, warned
from exporter.doctor.seen import Seen
from exporter.model import Device, DeviceKey, FleetMapping, Inversion, Refusal
from exporter.refusals import REFUSALS
from exporter.reports import shown

_GONE = "process-gone"


def check_settings(seen: Seen) -> Iterator[Finding]:
    """As ``check-config`` does. All else is looked at by the default settings where they are not valid."""
    if seen.complaint is not None:
        fix = (
            "Correct it there; `gpu-fleet-exporter check-config FILE` checks the file alone. What follows is by the "
            "default settings."
        )
        yield failed("settings", "not valid", str(seen.complaint), fix)
    elif seen.config_file is None:
        yield passed("settings", "none", "each setting has its default; --config.file names a file")
    else:
        yield passed("settings", seen.config_file, f"valid, {_count(len(seen.settings.fleets), 'fleet')}")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def check_fleets(seen: Seen) -> Iterator[Finding]:
    """Each fleet under each runtime: its devices and how they are known, or why it is refused."""
    for mapping in seen.snapshot.mappings:
        yield _mapped(mapping, mapping.outcome)
    if not seen.snapshot.mappings:
        fix = "Start the workloads, or correct what the fleets look for; a fleet of runtime host has every card."
        yield warned("fleet", "none", "no fleet has a process or an environment now, so there is no reading", fix)
    if seen.snapshot.left_out:
        fix = "Raise `mapping.max_fleets` in the settings, or narrow what the fleets of processes look for."
        found = f"{_count(seen.snapshot.left_out, 'fleet')} of live processes not shown"
        yield warned("fleet", f"max_fleets {seen.settings.mapping.max_fleets}", found, fix)


def _mapped(mapping: FleetMapping, outcome: Inversion | Refusal) -> Finding:
    subject = f"{mapping.fleet} ({mapping.runtime})"
    if isinstance(outcome, Inversion):
        evidence = Counter(device.evidence for device in outcome.devices)
        grades = ", ".join(f"{grade} {count}" if len(evidence) > 1 else grade for grade, count in evidence.items())
        left = f"{_count(len(outcome.devices), 'device')}, {grades}" if evidence else "its masks leave no device"
        return passed("fleet", subject, left)
    code = REFUSALS[outcome.code]
    judged = warned if outcome.code == _GONE else failed
    return judged("fleet", subject, f"{outcome.code}: {code.meaning}; found: {shown(outcome.detail)}", code.advice)


def check_cards_of_no_fleet(seen: Seen) -> Iterator[Finding]:
    """A card that no fleet has, nor any part of it, has no readings on the page."""
    outcomes = [mapping.outcome for mapping in seen.snapshot.mappings]
    taken = {device.key for outcome in outcomes if isinstance(outcome, Inversion) for device in outcome.devices}
    parents = {device.parent for device in seen.snapshot.devices if device.key in taken}
    for device in seen.whole_cards:
        if device.key not in taken | parents and not _is_narrowed(device, taken):
            fix = "Where they are wanted add a fleet that has every card: {name: host, runtime: host}."
            yield warned("fleet", name_of(device), "no fleet has this card, so its readings are not on the page", fix)


def _is_narrowed(card: Device, taken: Set[DeviceKey]) -> bool:
    """Whether a fleet has some tiles of it, which together are no device of the snapshot."""
    return any(key.identity.startswith(f"{card.key.identity}/") for key in taken)
