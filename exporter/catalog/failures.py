"""What has gone wrong in a card: errors of its memories and blocks, and what they left behind."""

from __future__ import annotations

from exporter.catalog.family import Family, reading

FAILURES: dict[str, Family] = {
    "ecc_enabled": reading(
        "gpu_ecc_enabled",
        "1 while the memory's errors are corrected (ECC), 0 while that is switched off.",
        nvidia="nvmlDeviceGetFieldValues",
        amd="amdgpu's ras/features, the bit of the memory's controllers",
    ),
    "ecc_errors": reading(
        "gpu_ecc_errors_total",
        "Errors of the card's memories, those on the chip included, since the driver was loaded: corrected or "
        "uncorrected.",
        own=("error",),
        nvidia="nvmlDeviceGetFieldValues, volatile counts",
        amd="amdgpu's ras/*_err_count, added up over all blocks but the links (pcie_bif, xgmi_wafl)",
        intel="zesRasGetStateExp's category of memory, of Data Center GPUs, for root",
    ),
    "ecc_lifetime_errors": reading(
        "gpu_ecc_lifetime_errors_total",
        "Memory errors that the card has kept count of over its life: corrected or uncorrected.",
        own=("error",),
        nvidia="nvmlDeviceGetFieldValues, aggregate counts",
    ),
    "ras_errors": reading(
        "gpu_ras_errors_total",
        "Hardware errors by the block that they were found in, since the driver was loaded: corrected or uncorrected.",
        own=("block", "error"),
        amd="amdgpu's ras/*_err_count",
        intel="zesRasGetStateExp, by category, of Data Center GPUs, for root",
    ),
    "retired_pages": reading(
        "gpu_retired_pages",
        "Pages of memory that are no longer used, by the errors that caused it: corrected or uncorrected.",
        own=("error",),
        nvidia="nvmlDeviceGetFieldValues, until Volta and Turing",
        amd="amdgpu's ras/gpu_vram_bad_pages: those that are reserved, which uncorrected errors alone lead to",
    ),
    "retired_pages_pending": reading(
        "gpu_retired_pages_pending",
        "1 while pages wait to be retired: NVIDIA's for the next reset.",
        nvidia="nvmlDeviceGetFieldValues, until Volta and Turing",
        amd="amdgpu's ras/gpu_vram_bad_pages",
    ),
    "remapped_rows": reading(
        "gpu_remapped_rows",
        "Rows of memory that spare ones stand in for, by the errors that caused it: corrected or uncorrected.",
        own=("error",),
        nvidia="nvmlDeviceGetFieldValues, since Ampere",
    ),
    "row_remapping_pending": reading(
        "gpu_row_remapping_pending",
        "1 while a row waits for the next reset to be remapped.",
        nvidia="nvmlDeviceGetFieldValues, since Ampere",
    ),
    "row_remapping_failed": reading(
        "gpu_row_remapping_failed",
        "1 once a row could not be remapped: the card is to be replaced.",
        nvidia="nvmlDeviceGetFieldValues, since Ampere",
    ),
    "xid_errors": reading(
        "gpu_xid_errors_total",
        "Errors that NVIDIA's driver has numbered (XID) since it was last asked to tell of them: anew with a worker, a "
        "card that comes back, and events that failed.",
        nvidia="nvmlEventSetWait, without waiting",
    ),
    "xid_last_code": reading(
        "gpu_xid_last_code",
        "Number of the last XID error; absent until there was one.",
        nvidia="nvmlEventSetWait, without waiting",
    ),
    "xid_last_time": reading(
        "gpu_xid_last_timestamp_seconds",
        "Unix time at which the last XID error was found; absent until there was one.",
        nvidia="nvmlEventSetWait, without waiting",
    ),
    "recovery_needed": reading(
        "gpu_recovery_needed",
        "1 for what the card needs before it is used on, 0 for the others.",
        own=("action",),
        nvidia="nvmlDeviceGetFieldValues, since driver 565",
    ),
}
