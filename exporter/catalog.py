"""Every metric family's name, type, help and labels: the only place where a metric name exists.

A reading that a backend can take is one row of :data:`READINGS`; its key is what backends put in
:attr:`exporter.model.Reading.metric`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

DEVICE_LABELS = ("vendor", "physical_index", "pci_bus_id", "uuid", "gpu_partition")
ATTRIBUTED_LABELS = ("fleet", "fleet_index", "physical_index", "vendor", "pci_bus_id", "uuid", "gpu_partition")


class Family(NamedTuple):
    """One metric family. A label whose value is empty is left out of the series."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...]


def _reading(name: str, text: str) -> Family:
    return Family(name, "gauge", text, ATTRIBUTED_LABELS)


READINGS: dict[str, Family] = {
    "utilization": _reading(
        "gpu_utilization_percent",
        "Share of the last sample period in which the device was busy, 0 to 100. A percentage and not a ratio because "
        "every vendor's tool prints it so and the name is established. NVIDIA: nvmlDeviceGetUtilizationRates. AMD: "
        "amdgpu's gpu_busy_percent, for a partition amdsmi_get_gpu_activity. Intel, since the scrape before: "
        "zesEngineGetActivity of all engines, else the busiest class of engines by the DRM clients' fdinfo (without "
        "what clients did that came and ended in between), else by intel_gpu_top.",
    ),
    "memory_free": _reading(
        "gpu_memory_free_bytes",
        "Device memory that can still be allocated. NVIDIA: nvmlDeviceGetMemoryInfo. AMD: VRAM, amdgpu's "
        "mem_info_vram_total less mem_info_vram_used. Intel: the memory regions of i915 and xe, else "
        "zesMemoryGetState, of discrete cards.",
    ),
    "memory_used": _reading(
        "gpu_memory_used_bytes",
        "Device memory in use, without what the driver reserves. NVIDIA: nvmlDeviceGetMemoryInfo_v2; absent where only "
        "version 1 exists, which counts the reserved part as used. AMD: amdgpu's mem_info_vram_used. Intel: as free.",
    ),
    "memory_total": _reading(
        "gpu_memory_total_bytes",
        "Device memory installed, the driver's reserve included. NVIDIA: nvmlDeviceGetMemoryInfo. AMD: amdgpu's "
        "mem_info_vram_total. Intel: the memory regions of i915 and xe, else zesMemoryGetProperties where that tells "
        "the physical size, of discrete cards.",
    ),
    "temperature": _reading(
        "gpu_temperature_celsius",
        "Temperature of the GPU core or edge sensor; gpu_info says which. NVIDIA: nvmlDeviceGetTemperatureV. AMD: "
        "hwmon's edge sensor, else junction. Intel: hwmon's package sensor (xe since Linux 6.15), else "
        "zesTemperatureGetState.",
    ),
}

ADDS_UP = ("memory_free", "memory_used", "memory_total")
"""Readings of which several parts of a card have the sum."""

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
    GPU_INFO,
    FLEET_DEVICE_INFO,
    MASK_INVERTED,
    MASK_REFUSAL_INFO,
    BACKEND_UP,
    BACKEND_DURATION,
    BACKEND_FAULTS,
    BACKEND_FAULT_INFO,
    HINT_INFO,
    FLEETS_LEFT_OUT,
    DEVICE_STATE,
    BUILD_INFO,
    RELOAD_SUCCESSFUL,
    RELOAD_TIMESTAMP,
)
