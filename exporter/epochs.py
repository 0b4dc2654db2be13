"""Which devices a host had when: a process numbers those that there were when it was started. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from exporter.model import VendorOutcome, VendorSample

_MOST = 64


class Epoch(NamedTuple):
    """A time in which a vendor's devices were the same, as far as cycles have seen; seconds of CLOCK_BOOTTIME."""

    first: float
    last: float
    sample: VendorSample


Epochs = Mapping[str, tuple[Epoch, ...]]
"""By vendor, in the order of time; only the last may still go on. The oldest of very many are forgotten."""


def seen_at(now: float, outcomes: Iterable[VendorOutcome], before: Epochs) -> Epochs:
    """The epochs with this cycle's devices."""
    after = dict(before)
    for outcome in outcomes:
        if outcome.sample is not None:
            after[outcome.vendor] = _with(after.get(outcome.vendor, ()), now, outcome.sample)
    return after


def _with(epochs: tuple[Epoch, ...], now: float, sample: VendorSample) -> tuple[Epoch, ...]:
    bare = msgspec.structs.replace(sample, readings=(), faults=(), hints=(), users=(), users_of=())
    if epochs and _devices(epochs[-1].sample) == _devices(sample):
        return (*epochs[:-1], Epoch(epochs[-1].first, now, bare))
    return (*epochs[-_MOST + 1 :], Epoch(now, now, bare))


def _devices(sample: VendorSample) -> tuple[bool, frozenset[object]]:
    return sample.whole, frozenset(device.key for device in sample.devices)


def as_of(spans: Iterable[tuple[float, float]], now: VendorSample, epochs: Epochs) -> VendorSample:
    """The vendor's devices when programs were started, each of them somewhen in one of these spans. What was before the
    first cycle counts as what that saw. Where they were not the same for all, or changed in a span, or nobody looked,
    the inventory is not known to be whole.
    """
    known = epochs.get(now.vendor, ())
    if len(known) <= 1:
        return now
    last = len(known) - 1
    places = {_place(span, known) for span in spans}
    there = [place for place in places if place is not None]
    at = max(there, default=last)
    sample = now if at == last else known[at].sample
    same = len({_devices(known[place].sample) for place in there}) == 1
    return sample if same and None not in places else msgspec.structs.replace(sample, whole=False)


def _place(span: tuple[float, float], known: tuple[Epoch, ...]) -> int | None:
    """The epoch in which all of a span lies."""
    first, at = (next((n for n, epoch in enumerate(known) if time <= epoch.last), len(known) - 1) for time in span)
    if first != at:
        return None
    forgotten = len(known) >= _MOST  # then the oldest known is not the first
    begins = span[0] >= known[at].first or (at == 0 and not forgotten)
    return at if begins else None
