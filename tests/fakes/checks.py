"""What the tests of the pretend libraries do alike: a process that uses one, and what rules and new states do to it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import pytest

DEADLINE_SECONDS = 20

_LOOP = """
import json, sys, threading, time

for line in sys.stdin:
    mode, source = json.loads(line)
    try:
        answer = [None, plain(eval(compile(source, "test", mode)))]
    except REFUSAL as error:
        answer = [refusal(error), None]
    print(json.dumps(answer), flush=True)
"""


class Child:
    """A Python process told what to do one line at a time; as a context it ends in time, by force if it must.

    ``source`` runs first. It defines ``REFUSAL``, the exception for a call that was refused, ``refusal``, which makes
    of one the arguments for ``refused`` here, and ``plain``, which makes JSON of a value.
    """

    def __init__(
        self,
        source: str,
        environment: Mapping[str, str],
        refused: Callable[..., object],
        within: Callable[[Sequence[str]], Sequence[str]] = list,
    ) -> None:
        self._refused = refused
        self.process = subprocess.Popen(
            within([sys.executable, "-c", source + _LOOP]),
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._killer = threading.Timer(DEADLINE_SECONDS, self.process.kill)

    def __enter__(self) -> Self:
        self._killer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._killer.cancel()
        self.process.kill()
        self.process.__exit__(None, None, None)

    def ask(self, expression: str, mode: str = "eval") -> object:
        """What ``expression`` is there, or what ``refused`` makes of a refusal."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([mode, expression]), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        assert line, f"the process ended in: {expression}\n{self.end()[1]}"
        refusal, value = json.loads(line)
        return value if refusal is None else self._refused(*refusal)

    def do(self, statement: str) -> None:
        """Runs a statement that must succeed."""
        assert self.ask(statement, "exec") is None

    def end(self) -> tuple[int, str]:
        """The exit status and what was written to stderr, once the process has ended by itself."""
        _, errors = self.process.communicate(timeout=DEADLINE_SECONDS)
        return self.process.returncode, errors


AChild = TypeVar("AChild", bound=Child)


@contextlib.contextmanager
def starting(make: Callable[..., AChild], first: str) -> Iterator[Callable[..., AChild]]:
    """Starts children that end with the test: ``start(fake)`` makes one and has it do ``first``, unless ``init=False``.

    What else ``start`` is told goes to ``make``.
    """
    with contextlib.ExitStack() as stack:

        def start(fake: object, *, init: bool = True, **how: object) -> AChild:
            child = make(fake, **how)
            stack.enter_context(child)
            if init:
                child.do(first)
            return child

        yield start


class Fake(Protocol):
    """The state file of any pretend library."""

    state_path: Path

    def write(self, gpus: Sequence[Any], *, lines: Sequence[str] = ()) -> None:
        """Makes this the state."""


def check_hang(
    child: Child,
    read: str,
    *,
    hang: Callable[[], None],
    others: Mapping[str, object],
    free: Callable[[], None],
    then: object,
) -> None:
    """Past ``hang`` a thread that calls ``read`` hangs and others answer; past ``free`` it gets what is true then."""
    hang()
    child.do(f"seen = []; thread = threading.Thread(target=lambda: seen.append({read}), daemon=True)")
    child.do("thread.start(); thread.join(0.1)")
    assert child.ask("[thread.is_alive(), seen]") == [True, []]
    assert {call: child.ask(call) for call in others} == others
    assert child.ask("[thread.is_alive(), seen]") == [True, []]
    free()
    child.do("thread.join(5)")
    assert child.ask("[thread.is_alive(), seen]") == [False, [then]]


def check_exit(child: Child, hanging: str) -> None:
    """A call that hangs for ever in a daemon thread does not keep the process from exiting with status 0."""
    child.do(f"thread = threading.Thread(target={hanging}, daemon=True); thread.start()")
    assert child.end() == (0, "")


def check_slow(child: Child, *, quick: str, slow: str, seconds: float) -> None:
    """One call takes at least so long, and the other does not."""
    for call, at_least, below in ((quick, 0.0, seconds), (slow, seconds, 5.0)):
        begin = time.monotonic()
        child.ask(call)
        assert at_least <= time.monotonic() - begin < below


def check_crash(child: Child, call: str) -> None:
    """The call ends the process by SIGSEGV."""
    with pytest.raises(AssertionError, match="the process ended"):
        child.ask(call)
    assert child.process.returncode == -signal.SIGSEGV


def check_abort(child: Child, call: str, words: str) -> None:
    """The call aborts the process with these words."""
    with pytest.raises(AssertionError, match=words):
        child.ask(call)
    assert child.process.returncode == -signal.SIGABRT


def check_nonsense(fake: Fake, start: Callable[..., Child], call: str, line: str, complaint: str) -> None:
    """The first call after a line that makes no sense aborts the process; the complaint names the line."""
    fake.write([], lines=["# a comment", "", line])  # behind one line that every state has
    check_abort(start(fake, init=False), call, f"state file, line 4: {complaint}")


def check_writes(child: Child, read: str, write: Callable[[int], None], values: Iterable[int]) -> None:
    """Each of the values, written as fast as can be, is what is read next."""
    for value in values:
        write(value)
        assert child.ask(read) == value


def check_whole_states(child: Child, read: str, write: Callable[[Sequence[tuple[int, int]]], None]) -> None:
    """Eight threads that read while the file changes never see half of a state or another card's values.

    ``read`` is all values of the card ``i``, which are the same; ``write`` writes cards and their values, in any order.
    """
    child.do("bad = []; reads = []; stop = False")
    child.do(
        "def read(i):\n"
        "    while not stop:\n"
        f"        seen = set({read}); reads.append(i)\n"
        "        if not (len(seen) == 1 and min(seen) % 8 == i): bad.append((i, sorted(seen)))\n"
    )
    child.do("threads = [threading.Thread(target=read, args=(i,), daemon=True) for i in range(8)]")
    child.do("for thread in threads: thread.start()")
    for step in range(50):
        write([(i, 8 * step + i) for i in range(8)][:: (-1) ** step])
        time.sleep(0.002)
    child.do("stop = True\nfor thread in threads: thread.join(5)")
    assert child.ask("[bad, sorted(set(reads))]") == [[], list(range(8))]


def check_writer(fake: Fake, unknown: str, unquotable: object) -> None:
    """A rule for a call that does not exist and text that cannot be quoted are errors, and nothing is written."""
    with pytest.raises(ValueError, match=f"'{unknown}'"):
        fake.write([], lines=[f"fault {unknown} 0 15"])
    with pytest.raises(ValueError, match="quote"):
        fake.write([unquotable])
    assert not fake.state_path.exists()


def check_missing(
    monkeypatch: pytest.MonkeyPatch, attempt: Callable[[], object], words: str, failure: type[BaseException]
) -> None:
    """What is missing fails in CI with these words, and everywhere else the skip says them."""
    monkeypatch.setenv("CI", "true")
    with pytest.raises((failure, pytest.skip.Exception), match=words) as caught:
        attempt()
    assert caught.errisinstance(failure)  # a skip that got through would only skip the test of it
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match=words):
        attempt()
