"""What a fleet's own processes do on each of its devices, by the key under which it is in a snapshot."""

from __future__ import annotations

from exporter.catalog.family import Family, reading

USAGE: dict[str, Family] = {
    "memory": reading(
        "gpu_fleet_memory_used_bytes",
        "Device memory that the fleet's own processes hold, of fleets of live processes.",
        nvidia="nvmlDeviceGetComputeRunningProcesses and nvmlDeviceGetGraphicsRunningProcesses",
        amd="the KFD's vram_<gpu_id> of each process",
        intel="the DRM clients' fdinfo",
    ),
    "utilization": reading(
        "gpu_fleet_utilization_ratio",
        "Share of the device's time that the fleet's own processes took since the scrape before, 0 to 1.",
        nvidia="nvmlDeviceGetProcessUtilization",
        intel="the DRM clients' fdinfo",
    ),
    "processes": reading(
        "gpu_fleet_processes",
        "Processes of the fleet that use the device.",
        nvidia="as the memory",
        amd="as the memory",
        intel="as the memory",
    ),
}
