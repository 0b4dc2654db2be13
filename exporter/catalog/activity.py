"""What a device does, with which of its parts, and for whom."""

from __future__ import annotations

from exporter.catalog.family import Family, reading

ACTIVITY: dict[str, Family] = {
    "utilization": reading(
        "gpu_utilization_percent",
        "Share of the last sample period in which the device was busy, 0 to 100. A percentage and not a ratio because "
        "every vendor's tool prints it so and the name is established.",
        nvidia="nvmlDeviceGetUtilizationRates, for a MIG device GPM's graphics utilization (since Hopper)",
        amd="amdgpu's gpu_busy_percent, for a partition amdsmi_get_gpu_activity",
        intel="since the scrape before: zesEngineGetActivity of all engines, else the busiest class of engines by the "
        "DRM clients' fdinfo (without what clients did that came and ended in between), else by intel_gpu_top",
    ),
    "memory_free": reading(
        "gpu_memory_free_bytes",
        "Device memory that can still be allocated.",
        adds_up=True,
        nvidia="nvmlDeviceGetMemoryInfo",
        amd="VRAM, amdgpu's mem_info_vram_total less mem_info_vram_used",
        intel="the memory regions of i915 and xe, else zesMemoryGetState, of discrete cards",
    ),
    "memory_used": reading(
        "gpu_memory_used_bytes",
        "Device memory in use, without what the driver reserves.",
        adds_up=True,
        nvidia="nvmlDeviceGetMemoryInfo_v2; absent where only version 1 exists, which counts the reserved part as used",
        amd="amdgpu's mem_info_vram_used",
        intel="as free",
    ),
    "memory_total": reading(
        "gpu_memory_total_bytes",
        "Device memory installed, the driver's reserve included.",
        adds_up=True,
        nvidia="nvmlDeviceGetMemoryInfo",
        amd="amdgpu's mem_info_vram_total",
        intel="the memory regions of i915 and xe, else zesMemoryGetProperties where that tells the physical size, of "
        "discrete cards",
    ),
    "memory_reserved": reading(
        "gpu_memory_reserved_bytes",
        "Device memory that the driver keeps for itself: neither used nor free.",
        nvidia="nvmlDeviceGetMemoryInfo_v2, since driver 510",
    ),
    "memory_controller": reading(
        "gpu_memory_controller_utilization_ratio",
        "Share of the last sample period in which device memory was read or written, 0 to 1.",
        nvidia="nvmlDeviceGetUtilizationRates",
        amd="amdgpu's mem_busy_percent",
    ),
    "engine": reading(
        "gpu_engine_utilization_ratio",
        "Share of the time in which an engine, or the busiest of its class, was busy, 0 to 1.",
        own=("engine",),
        nvidia="encoder and decoder: nvmlDeviceGetEncoderUtilization, nvmlDeviceGetDecoderUtilization",
        amd="video: amdgpu's vcn_busy_percent, of chips whose driver tells it",
        intel="each class, since the scrape before, also of tiles: zesEngineGetActivity, else of the card the DRM "
        "clients' fdinfo, else intel_gpu_top",
    ),
    "processes": reading(
        "gpu_processes",
        "Processes that compute on the device.",
        costly="one call more a card",
        nvidia="nvmlDeviceGetComputeRunningProcesses",
        amd="the KFD's list of processes",
        intel="DRM clients' fdinfo: who has done something or holds memory; absent where not every process is seen",
    ),
    "mig_instance": reading(
        "gpu_mig_instance_info",
        "1 for each MIG device, with the profile that it was made from.",
        own=("profile",),
        nvidia="nvmlDeviceGetName",
    ),
    "multiprocessors": reading(
        "gpu_mig_instance_multiprocessors",
        "Streaming multiprocessors that a MIG device has.",
        nvidia="nvmlDeviceGetAttributes",
    ),
    "partition_mode": reading(
        "gpu_partition_mode_info",
        "1 for each card that can be partitioned, with the modes that it is in.",
        own=("compute", "memory"),
        amd="amdgpu's current_compute_partition and current_memory_partition",
    ),
    "sm_active": reading(
        "gpu_sm_active_ratio",
        "Share of time and of streaming multiprocessors with at least one warp, since the scrape before, 0 to 1.",
        costly="two calls more a device",
        nvidia="GPM, since Hopper",
    ),
    "tensor_active": reading(
        "gpu_tensor_active_ratio",
        "Share of cycles in which any tensor core was active, since the scrape before, 0 to 1.",
        costly="two calls more a device",
        nvidia="GPM, since Hopper",
    ),
    "memory_active": reading(
        "gpu_memory_bandwidth_utilization_ratio",
        "Share of the memory's highest bandwidth in use, since the scrape before, 0 to 1.",
        costly="two calls more a device",
        nvidia="GPM, since Hopper",
        intel="zesMemoryGetBandwidth over its own maximum",
    ),
}
