"""Every metric family's name, type, help and labels: the only place where a metric name exists.

A reading that a backend can take is one row of :data:`READINGS`; its key is what backends put in
:attr:`exporter.model.Reading.metric`.
"""

from __future__ import annotations

from exporter.catalog.family import ATTRIBUTED_LABELS, DEVICE_LABELS, Family
from exporter.catalog.readings import READINGS
from exporter.catalog.selection import NAMES, SHARES, Selection, matches, meant, selection
from exporter.catalog.usage import USAGE

__all__ = [
    "ADDS_UP",
    "ATTRIBUTED_LABELS",
    "DEFAULT",
    "DEVICE_LABELS",
    "FAMILIES",
    "NAMES",
    "READINGS",
    "SHARES",
    "USAGE",
    "Family",
    "Selection",
    "matches",
    "meant",
    "selection",
]

ADDS_UP = tuple(metric for metric, family in READINGS.items() if family.adds_up)
"""Readings of which several parts of a card have the sum."""

DEFAULT = frozenset((*(metric for metric, family in READINGS.items() if not family.costly), SHARES))
"""What is asked for unless the settings say otherwise."""

GPU_INFO = Family(
    "gpu_info",
    "gauge",
    "1 for every device of the host, mapped or not.",
    (*DEVICE_LABELS, "name", "driver_version", "temperature_sensor"),
)
FLEET_DEVICE_INFO = Family(
    "gpu_fleet_device_info",
    "gauge",
    "1 for every device of every fleet: the inverted mask itself, for joins.",
    (*ATTRIBUTED_LABELS, "runtime", "evidence"),
)
MASK_INVERTED = Family(
    "gpu_fleet_mask_inverted",
    "gauge",
    "1 when the fleet's masks were inverted (an empty mask inverts to no device), 0 when they were refused.",
    ("fleet", "runtime"),
)
MASK_REFUSAL_INFO = Family(
    "gpu_fleet_mask_refusal_info",
    "gauge",
    "1 while the fleet's masks are refused, with the reason.",
    ("fleet", "runtime", "reason"),
)
BACKEND_UP = Family(
    "gpu_exporter_backend_up",
    "gauge",
    "1 when the vendor's backend answered in this cycle, 0 when it did not.",
    ("vendor",),
)
BACKEND_DURATION = Family(
    "gpu_exporter_backend_sample_duration_seconds",
    "gauge",
    "Time from asking the vendor's worker to its answer, or to giving up, in this cycle.",
    ("vendor",),
)
BACKEND_FAULTS = Family(
    "gpu_exporter_backend_faults_total",
    "counter",
    "Faults of the vendor's backend and of its devices, one for each cycle that met one.",
    ("vendor", "reason"),
)
BACKEND_FAULT_INFO = Family(
    "gpu_exporter_backend_fault_info",
    "gauge",
    "1 while the vendor's backend is down, with the reason.",
    ("vendor", "reason"),
)
HINT_INFO = Family(
    "gpu_exporter_hint_info",
    "gauge",
    "1 while the vendor's devices lack readings that something would bring: the hint names it, and the log and "
    "`explain` say it in a sentence.",
    ("vendor", "hint"),
)
DEVICES_EXPECTED = Family(
    "gpu_exporter_devices_expected",
    "gauge",
    "Cards that the settings expect of a vendor (expected_devices); absent where they expect none.",
    ("vendor",),
)
DEVICES_FOUND = Family(
    "gpu_exporter_devices_found",
    "gauge",
    "Whole cards of a vendor that answered in this cycle, or sleep; 0 while its backend is down.",
    ("vendor",),
)
FLEETS_LEFT_OUT = Family(
    "gpu_exporter_fleets_left_out",
    "gauge",
    "Fleets of live processes that were found and are not shown: beyond mapping.max_fleets, or under another's name.",
    (),
)
DEVICE_STATE = Family(
    "gpu_exporter_device_state",
    "gauge",
    "A row for each state a device can be in: 1 for the one that holds, 0 for the others.",
    (*DEVICE_LABELS, "state"),
)
BUILD_INFO = Family(
    "gpu_exporter_build_info",
    "gauge",
    "1, with the version of the exporter and of the Python it runs on.",
    ("version", "python_version"),
)
RELOAD_SUCCESSFUL = Family(
    "gpu_exporter_config_last_reload_successful",
    "gauge",
    "1 when the last attempt to load the settings succeeded, 0 when it failed and the earlier ones still hold.",
    (),
)
RELOAD_TIMESTAMP = Family(
    "gpu_exporter_config_last_reload_success_timestamp_seconds",
    "gauge",
    "Unix time at which the settings in force were loaded.",
    (),
)

FAMILIES: tuple[Family, ...] = (
    *READINGS.values(),
    *USAGE.values(),
    GPU_INFO,
    FLEET_DEVICE_INFO,
    MASK_INVERTED,
    MASK_REFUSAL_INFO,
    BACKEND_UP,
    BACKEND_DURATION,
    BACKEND_FAULTS,
    BACKEND_FAULT_INFO,
    HINT_INFO,
    DEVICES_EXPECTED,
    DEVICES_FOUND,
    FLEETS_LEFT_OUT,
    DEVICE_STATE,
    BUILD_INFO,
    RELOAD_SUCCESSFUL,
    RELOAD_TIMESTAMP,
)
