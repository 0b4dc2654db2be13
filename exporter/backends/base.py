"""What a vendor backend is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from exporter.catalog import DEFAULT
from exporter.model import Device, Does, Fault, Hint, Reading


class Sampled(NamedTuple):
    """What one device gave: its readings, the calls that failed, and what would bring the readings that it lacks.

    ``pending``: a counter was read that gives a value from the next cycle on, so the device answers, whatever failed.
    """

    readings: tuple[Reading, ...]
    faults: tuple[Fault, ...] = ()
    hints: tuple[Hint, ...] = ()
    pending: bool = False


Note = Callable[[Device], None]


class Places(NamedTuple):
    """Where sysfs and procfs are mounted, the vendor's library where the settings name one, and the root folder.

    Device files are below the root; they are those of the sysfs only where that is below the root too. ``cautious``:
    the worker before died or hung, so a library that a backend can do without is not loaded. ``wanted`` are the metrics
    that the settings leave: no call is made for another.
    """

    sysfs: str = "/sys"
    procfs: str = "/proc"
    shared_object: str | None = None
    root: str = "/"
    cautious: bool = False
    wanted: frozenset[str] = DEFAULT


class Use(NamedTuple):
    """A process on a device, as :class:`exporter.model.User` has it."""

    pid: int
    memory_bytes: int | None = None
    utilization: float | None = None
    does: Does | None = "computes"


class Backend(Protocol):
    """Reads one vendor's devices, inside that vendor's worker process and nowhere else.

    1. ``__init__``, which is given :class:`Places`, does nothing; the vendor package is imported inside :meth:`open`,
       and whatever that raises becomes ``BackendAbsent`` with a reason.
    2. No reading instead of a sentinel: the vendor's all-ones, -1, 255 degrees and "N/A" are absence, decided here.
    3. No identity, no device. A UUID, a path or an index is never built from another number.
    4. Base units only, through :mod:`exporter.units`. Counters raw and monotonic.
    5. A failing call costs one reading (a fault in the report); a lost card costs its own rows (``DeviceLost``); only
       a lost library costs the backend (``BackendAbsent``).
    6. A table of (metrics, call, conversion) and one loop; a hand-written branch carries the reason.
    7. Read-only, and nothing is woken: a card asleep raises ``DeviceAsleep`` before any call on it.
    8. No re-initialisation in place: a fresh start is a fresh process.

    Every method but ``__init__`` may hang in the driver, so the worker calls them in lanes: ``open`` and ``slots`` in
    one; for each slot, in a lane of its own, ``identify`` and then ``sample`` for each device. Lanes run one after the
    other, and beside each other while one of them takes its time, so any two of them may be at work at once.
    """

    vendor: str
    driver_version: str

    def open(self) -> None:
        """Load and start the library. Raises ``BackendAbsent``."""

    def slots(self) -> Sequence[str]:
        """Names of the places where the library has a card now, at least one. Raises ``BackendAbsent``."""

    def identify(self, slot: str, note: Note) -> tuple[Device, ...]:
        """The card in a slot and its parts, as they are now; empty when the slot has no card of ours.

        ``note`` is told of a card as soon as its identity is known, so that it has a name should the next call hang.
        Raises ``DeviceLost``, ``DeviceAsleep`` (both: the card keeps its place), ``DeviceFault`` (who is there is not
        known) and ``BackendAbsent``.
        """

    def sample(self, device: Device) -> Sampled:
        """Read a device that :meth:`identify` has just found.

        Raises ``DeviceLost``, ``DeviceAsleep`` (the card fell asleep meanwhile) and ``BackendAbsent``.
        """

    def users(self, device: Device) -> Collection[Use] | None:
        """All processes on a device that :meth:`sample` has just read, by the host's numbers for them.

        None where they cannot be told: that there are none is a statement. Raises as :meth:`sample` does.
        """

    def asleep(self, slot: str) -> tuple[Device, ...]:
        """What is known of a sleeping card and its parts without waking it: as last read, else a placeholder."""

    def close(self) -> None:
        """Let the library go."""
