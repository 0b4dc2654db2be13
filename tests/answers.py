"""What an outcome comes to, in words that a table of masks and answers can hold."""

from __future__ import annotations

from collections.abc import Callable

from exporter.model import Inversion, Refusal
from exporter.refusals import REFUSALS


def in_words(outcome: Inversion | Refusal, short: Callable[[str], str]) -> str:
    """The devices' identities, shortened, by fleet index from 0 on, all of them proven; or the refusal's code, which is
    a listed one and says why.
    """
    if isinstance(outcome, Refusal):
        assert outcome.code in REFUSALS
        assert outcome.detail
        return outcome.code
    assert [device.fleet_index for device in outcome.devices] == list(range(len(outcome.devices)))
    assert {device.evidence for device in outcome.devices} <= {"proven"}
    return " ".join(short(device.key.identity) for device in outcome.devices)
