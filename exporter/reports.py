"""What the commands print for people: the inventory as a table, and where each fleet's index leads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from exporter.inventory import Inventory
from exporter.model import Device, DeviceKey, Fleet, Inversion, Layer, Refusal, Snapshot, State
from exporter.refusals import REFUSALS

_GIB = 2**30


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned by blanks; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "".join(line.rstrip() + "\n" for line in lines)


def inventory_table(devices: Iterable[Device], states: Mapping[DeviceKey, State]) -> str:
    """One line a device, under the vendor tool's own number."""
    rows = [("VENDOR", "INDEX", "PCI BUS ID", "PARTITION", "UUID", "NAME", "MEMORY", "STATE")]
    rows += [
        (
            device.key.vendor,
            _index(device),
            device.pci_bus_id,
            device.partition or "-",
            device.uuid or "-",
            shown(device.name or "-"),
            _memory(device),
            states.get(device.key, "-"),
        )
        for device in devices
    ]
    return table(rows)


def _index(device: Device) -> str:
    return "-" if device.physical_index is None else str(device.physical_index)


def _memory(device: Device) -> str:
    return "-" if device.memory_total_bytes is None else f"{device.memory_total_bytes / _GIB:.1f} GiB"


def explain(
    fleet: str, runtime: str, outcome: Inversion | Refusal, inventory: Inventory, seen: Sequence[str] = ()
) -> str:
    """A fleet's indices with the card behind each and the evidence; or the refusal and what to do about it. ``seen``
    are sentences on where what is known of it comes from.
    """
    told = outcome.told if isinstance(outcome, Inversion) else ()
    lines = (f"  {shown(line)}" for line in (*seen, *told))
    return "".join(line + "\n" for line in (f"{fleet} ({runtime})", *lines, *_explained(outcome, inventory)))


def seen_of(fleet: Fleet) -> tuple[str, ...]:
    """Where what is known of a fleet comes from."""
    if fleet.live is not None:
        stated = ("the reach is the settings'",) if fleet.reach is not None else ()
        return fleet.live.told + stated
    if fleet.runtimes == ("host",):
        return ()
    reach = "the settings state its reach" if fleet.reach is not None else "it can open every device, by the settings"
    return (f"the environment is the settings', or the exporter's own; {reach}",)


def _explained(outcome: Inversion | Refusal, inventory: Inventory) -> Iterator[str]:
    for layer in outcome.layers:
        yield f"  {_layer(layer)}"
    if isinstance(outcome, Refusal):
        code = REFUSALS[outcome.code]
        yield f"  refused: {outcome.code}: {code.meaning}"
        yield f"  found: {shown(outcome.detail)}"
        yield f"  to do: {code.advice}"
    elif not outcome.devices:
        yield "  no device is visible"
    else:
        yield from _device_lines(outcome, inventory)


def _layer(layer: Layer) -> str:
    left = "refused" if layer.left is None else f"{layer.left} left"
    stopped = f"; {shown(layer.stopped)}" if layer.stopped else ""
    if layer.text is None:
        return f"{layer.variable} is not set: {left}{stopped}"
    return f"{layer.variable}='{shown(layer.text)}': {left}{stopped}"


_LONGEST = 200


def shown(text: str) -> str:
    """A text from anywhere, on one line and without effect on a terminal; a long one without its middle."""
    return visible(shortened(text))


def shortened(text: str) -> str:
    """A text from anywhere; a long one without its middle."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}...{text[-_LONGEST // 2 :]}"


def visible(text: str) -> str:
    """The text, with what has no look of its own as a backslash and a number: controls, marks that turn the direction
    of writing, bytes that are no UTF-8.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode() for each in text
    )


def _device_lines(outcome: Inversion, inventory: Inventory) -> Iterator[str]:
    rows = [("INDEX", "PHYSICAL", "PCI BUS ID", "PARTITION", "UUID", "NAME", "EVIDENCE")]
    raw = {entry.raw_position: entry for entry in inventory.vulkan or ()}
    for resolved in outcome.devices:
        device = inventory.find(resolved.key)
        entry = None if resolved.raw_position is None else raw.get(resolved.raw_position)
        place = ("-", "-", "-", resolved.key.identity)
        name = "(gone from this host)"
        if device is not None:
            place = (_index(device), device.pci_bus_id, device.partition or "-", device.uuid or "-")
            name = device.name or "-"
        elif entry is not None:
            place = ("-", entry.pci_bus_id or "-", "-", "-")
        if entry is not None:
            name = f"{entry.name or '-'} (raw {entry.raw_position})"
        rows.append((str(resolved.fleet_index), *place, shown(name), str(resolved.evidence)))
    yield from (f"  {line}" for line in table(rows).splitlines())


def trouble_lines(snapshot: Snapshot) -> Iterator[str]:
    """A sentence for each backend that is down, for each whose inventory lacks a card, and for each hint."""
    for vendor in snapshot.incomplete:
        yield f"{vendor}: a card that the library counts could not be identified: this inventory is not whole"
    for backend in snapshot.backends:
        if backend.fault is not None:
            yield f"{backend.vendor}: backend down: {backend.fault.reason}: {backend.fault.detail}"
        yield from (f"{backend.vendor}: hint: {hint.text} ({hint.code})" for hint in backend.hints)
