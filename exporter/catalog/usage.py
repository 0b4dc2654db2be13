"""What a fleet's own processes do on each of its devices, by the key under which it is in a snapshot."""

from __future__ import annotations

from exporter.catalog.family import Family, reading

USAGE: dict[str, Family] = {
    "memory": reading(
        "gpu_fleet_memory_used_bytes",
        "Device memory that a live fleet's own processes hold; absent where that is not known of all of them.",
        nvidia="nvmlDeviceGetComputeRunningProcesses, nvmlDeviceGetMPSComputeRunningProcesses and "
        "nvmlDeviceGetGraphicsRunningProcesses, not of a board in MIG mode",
        amd="the KFD's vram_<gpu_id> of each process, since Linux 5.9; without what Vulkan and OpenGL hold",
        intel="of the card's own memory what is resident by the DRM clients' fdinfo (i915 since Linux 6.8, xe); absent "
        "where not every process can be seen, or several share a client, and of single tiles",
    ),
    "utilization": reading(
        "gpu_fleet_utilization_ratio",
        "Share of the device's time that the fleet's own processes took since the scrape before, 0 to 1.",
        nvidia="nvmlDeviceGetProcessUtilization",
        intel="of the busiest class of engines, by the DRM clients' fdinfo, as the memory",
    ),
    "processes": reading(
        "gpu_fleet_processes",
        "Processes of the fleet that compute or draw on the device, without those that only have it open.",
        nvidia="as the memory",
        amd="as the memory",
        intel="as the memory",
    ),
}
