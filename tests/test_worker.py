"""A worker over a backend whose calls return when they are told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from exporter.backends.base import Note, Sampled, Use
from exporter.model import Device, DeviceKey, Reading
from tests.backend_host import BackendHost, devices, state, values


class Cards:
    """A backend: a card in each slot, by name. ``held`` are those whose identification waits until they are let go."""

    vendor, driver_version = "nvidia", "1"

    def __init__(self, *names: str) -> None:
        self.names, self.value = names, 1.0
        self.held: dict[str, threading.Event] = {}

    def hold(self, name: str) -> threading.Event:
        """Identifying this card does not return any more."""
        return self.held.setdefault(name, threading.Event())

    def open(self) -> None:
        """There is nothing to start."""

    def slots(self) -> list[str]:
        """A number each."""
        return [str(place) for place in range(len(self.names))]

    def identify(self, slot: str, note: Note) -> tuple[Device, ...]:
        """The card that is there now, however long it takes to say so."""
        name = self.names[int(slot)]
        if name in self.held:
            self.held[name].wait(30)
        device = Device(key=DeviceKey("nvidia", name), physical_index=int(slot), pci_bus_id=f"0000:0{slot}:00.0")
        note(device)
        return (device,)

    def sample(self, device: Device) -> Sampled:
        """One reading."""
        return Sampled((Reading("utilization", device.key, self.value),))

    def users(self, _: Device) -> tuple[Use, ...]:
        """Nobody computes."""
        return ()

    def asleep(self, _: str) -> tuple[Device, ...]:
        """No card sleeps."""
        return ()

    def close(self) -> None:
        """There is nothing to let go."""


@pytest.fixture
def cards() -> Iterator[Cards]:
    """Two cards, all of whose calls return in the end."""
    made = Cards("A", "B")
    yield made
    for held in made.held.values():
        held.set()


def test_a_late_call_says_nothing_of_slots_that_have_changed(cards: Cards) -> None:
    """A card that left, and whose call returns at last, is not taken for the one that hangs in its slot now."""
    host = BackendHost(cards)
    assert devices(host.read()).keys() == {"A", "B"}
    left = cards.hold("A")
    assert state(host.read(0.2), "A") == "hung"
    cards.names = ("C", "B", "D")
    cards.hold("C")
    threading.Timer(0.2, left.set).start()
    sample = host.read(1.5)
    assert devices(sample).keys() == {"B", "D"}
    assert not sample.whole
    cards.held["C"].set()
    time.sleep(0.1)
    assert devices(host.read()).keys() == {"C", "B", "D"}


def test_a_young_call_is_waited_for_and_made_again(cards: Cards) -> None:
    """Its own result is of an earlier cycle; a call that has been running for longer is not waited for."""
    host = BackendHost(cards)
    held = cards.hold("A")
    host.read(0.2)
    cards.value = 2.0
    threading.Timer(0.3, held.set).start()
    started = time.monotonic()
    assert values(host.read(5), "A") == {"utilization": 2.0}
    assert 0.2 < time.monotonic() - started < 1
    del cards.held["A"]
    cards.hold("A")
    host.read(0.5)
    started = time.monotonic()
    assert state(host.read(0.8), "A") == "hung"
    assert time.monotonic() - started < 0.2
