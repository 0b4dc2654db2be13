"""AMD's library is asked for one card at a time, and a call that hangs holds up no other for long."""

from __future__ import annotations

import threading

import pytest

from exporter.backends.amd.turns import Turns
from exporter.errors import DeviceFault


class Call(threading.Thread):
    """A call of the library that returns once ``allowed``."""

    def __init__(self, turns: Turns) -> None:
        super().__init__(daemon=True)
        self.turns = turns
        self.begun, self.allowed = threading.Event(), threading.Event()
        self.fault: DeviceFault | None = None
        self.start()

    def run(self) -> None:
        """The call."""
        try:
            with self.turns.alone():
                self.begun.set()
                self.allowed.wait(60)
        except DeviceFault as fault:
            self.fault = fault

    def ended(self) -> DeviceFault | None:
        """Let it return; its fault."""
        self.allowed.set()
        self.join(60)
        return self.fault


def test_calls_wait_for_each_other() -> None:
    turns = Turns()
    first = Call(turns)
    assert first.begun.wait(60)
    second = Call(turns)
    assert not second.begun.wait(0.1)
    assert first.ended() is None
    assert second.begun.wait(60)
    assert second.ended() is None


def test_one_that_hangs_holds_up_no_other_for_ever() -> None:
    turns = Turns()
    hung = Call(turns)
    assert hung.begun.wait(60)
    for _ in range(3):
        other = Call(turns)
        assert other.begun.wait(60)
        assert other.ended() is None


def test_what_was_asked_beside_a_call_that_came_back_counts_for_neither() -> None:
    turns = Turns()
    hung = Call(turns)
    assert hung.begun.wait(60)
    other = Call(turns)
    assert other.begun.wait(60)
    late, beside = hung.ended(), other.ended()
    assert late is not None
    assert beside is not None
    assert {late.reason, beside.reason} == {"hung"}
    with turns.alone():  # and then all is well
        pass


def test_an_error_of_the_call_is_its_own() -> None:
    turns = Turns()
    with pytest.raises(KeyError), turns.alone():
        raise KeyError
    with turns.alone():
        pass
