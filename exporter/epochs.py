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
    bare = msgspec.structs.replace(sample, readings=(), faults=(), hints=(), users=())
    if epochs and _devices(epochs[-1].sample) == _devices(sample):
        return (*epochs[:-1], Epoch(epochs[-1].first, now, bare))
    return (*epochs[-_MOST + 1 :], Epoch(now, now, bare))


def _devices(sample: VendorSample) -> tuple[bool, frozenset[object]]:
    return sample.whole, frozenset(device.key for device in sample.devices)


def as_of(earliest: float, latest: float, now: VendorSample, epochs: Epochs) -> VendorSample:
    """The vendor's devices when a program was started, which was between these times. What was before the first cycle
    counts as what that saw. Where they changed meanwhile, or while nobody looked, the inventory is not known to be
    whole.
    """
    known = epochs.get(now.vendor, ())
    last = len(known) - 1
    first_at = next((place for place, epoch in enumerate(known) if earliest <= epoch.last), last)
    at = next((place for place, epoch in enumerate(known) if latest <= epoch.last), last)
    sample = now if at == last else known[at].sample
    if at <= 0 or (first_at == at and earliest >= known[at].first and len(known) < _MOST):
        return sample
    return msgspec.structs.replace(sample, whole=False)
