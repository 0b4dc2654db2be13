"""What readings' own labels may say: a closed list, or, where the hardware decides, the shape of a text.

A backend that has another value adds it here; the tests hold every page that their daemons serve against it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

Listed = tuple[str, ...]


class Shaped(NamedTuple):
    """Texts that no list can have: what they are, and the regular expression that all of one match."""

    meaning: str
    pattern: str


_NUMBER = Shaped("a number, from 0 on", "[0-9]+")
_WORDS = "[a-z0-9]+(-[a-z0-9]+)*"
_CORRECTION: Listed = ("corrected", "uncorrected")
_CLOCKS: Listed = ("graphics", "media", "memory", "sm")
_THROTTLED: Listed = (
    "application-clocks",
    "average-thermal",
    "board-limit",
    "chip-average-thermal",
    "chip-thermal",
    "clock-maximum",
    "current",
    "current-peak",
    "display-clocks",
    "hardware-slowdown",
    "hardware-thermal",
    "idle",
    "memory-thermal",
    "other",
    "platform-power-burst",
    "platform-power-cap",
    "platform-power-critical",
    "power-brake",
    "power-burst",
    "power-cap",
    "power-peak",
    "processor-hot",
    "regulator-current",
    "regulator-thermal",
    "reliability",
    "software-thermal",
    "sync-boost",
    "thermal",
    "voltage-droop",
)

OWN_LABELS: Mapping[str, Mapping[str, Listed | Shaped]] = {
    "engine": {"engine": ("compute", "copy", "decoder", "encoder", "media", "render", "video", "video-enhance")},
    "temperature_threshold": {
        "sensor": ("gpu", "junction", "memory"),
        "threshold": ("critical", "maximum", "shutdown", "slowdown"),
    },
    "clock": {"clock": _CLOCKS},
    "clock_maximum": {"clock": _CLOCKS},
    "fan_speed": {"fan": _NUMBER},
    "fan_rotation": {"fan": _NUMBER},
    "throttled": {"reason": _THROTTLED},
    "throttled_seconds": {"reason": _THROTTLED},
    "pcie_errors": {"severity": ("correctable", "fatal", "nonfatal")},
    "ecc_errors": {"error": _CORRECTION},
    "ecc_lifetime_errors": {"error": _CORRECTION},
    "ras_errors": {"block": Shaped("the block, in the driver's word for it", _WORDS), "error": _CORRECTION},
    "retired_pages": {"error": _CORRECTION},
    "remapped_rows": {"error": _CORRECTION},
    "link_up": {"link": _NUMBER},
    "link_transmitted": {"link": _NUMBER},
    "link_received": {"link": _NUMBER},
    "link_errors": {"link": _NUMBER, "error": ("corrected", "crc", "recovery", "replay", "uncorrected")},
    "recovery_needed": {
        "action": (
            "bus-reset",
            "drain-and-reset",
            "drain-peers",
            "gpu-reset",
            "node-reboot",
            "recover-imex-domain",
            "system-reboot",
        )
    },
    "mig_instance": {"profile": Shaped("the profile's name, such as `1g.10gb`", r"[0-9]+[cg]\.[0-9a-z.+-]+")},
    "partition_mode": {
        "compute": Shaped("the driver's name of the mode, such as `spx`", _WORDS),
        "memory": Shaped("the driver's name of the mode, such as `nps1`", _WORDS),
    },
}
"""By the key of the reading and the name of the label."""


def is_known(metric: str, label: str, value: str) -> bool:
    """Whether the label of that reading may have the value."""
    known = OWN_LABELS[metric][label]
    return re.fullmatch(known.pattern, value) is not None if isinstance(known, Shaped) else value in known
