"""What a backend's fault means, and what to do about it: one entry for each of :data:`exporter.model.FAULT_REASONS`."""

from __future__ import annotations

from typing import NamedTuple


class FaultReason(NamedTuple):
    """``meaning`` says what is so; ``advice`` are sentences on what to do, with commands between backticks and the
    names of alerts for what the runbook says of them.
    """

    meaning: str
    advice: str


FAULTS: dict[str, FaultReason] = {
    "crashed": FaultReason(
        "the process that reads the vendor's cards died or could not be started",
        "The log's detail has the signal or the status; `journalctl -k` has a segmentation fault or a kill for memory. "
        '"Of another version": the exporter was upgraded, `systemctl restart gpu-fleet-exporter`. "Cannot be '
        "started\": the host, or the service's limit, has no more memory or processes.",
    ),
    "device-lost": FaultReason(
        "no card has told who it is since the worker was started, and the first of them is gone from the bus",
        "`journalctl -k -b` says what became of it: see GpuDeviceLost.",
    ),
    "driver-error": FaultReason(
        "each card fails with an error that has no name of its own here",
        "The detail has the driver's words or the file; `journalctl -k` has the driver's side.",
    ),
    "driver-mismatch": FaultReason(
        "NVIDIA: the library and the kernel's module are of different versions, as after an upgrade of the driver",
        "`cat /proc/driver/nvidia/version` is the module that runs. Reboot, or load the module anew, once the "
        "workloads are stopped; new ones cannot start until then. AMD, Intel: cards came or changed after the vendor's "
        "library had been started; a new worker mends it at once.",
    ),
    "driver-not-loaded": FaultReason(
        "cards are on the bus, and no driver of the host serves them",
        "`lspci -k` shows which driver each has; load it (`modprobe nvidia`, `amdgpu`, `xe`, `i915`), and see "
        "`journalctl -k` for why it was not. Cards that are handed to virtual machines are none of the host's.",
    ),
    "driver-too-old": FaultReason(
        "NVIDIA's library lacks a call that cannot be done without",
        "Upgrade the driver.",
    ),
    "hung": FaultReason(
        "the worker did not answer by the deadline, or the vendor's library does not get started",
        "As for GpuDeviceHung, for the whole driver. After `sampling.hang_seconds` (30) the worker is ended and "
        "started anew; one that hangs in the kernel cannot be ended until its call returns, and there is no second one "
        "beside it. On a scrape whose timeout is very short it may be slowness alone.",
    ),
    "internal-error": FaultReason(
        "the exporter, or a vendor's package, did what was not expected",
        "A bug: report it with the log's detail and the driver's version.",
    ),
    "library-missing": FaultReason(
        "NVIDIA: `libnvidia-ml.so.1`, or the Python package for it, cannot be loaded",
        "`ldconfig -p | grep nvidia-ml`; install the driver's library, or name the file in `libraries:`. AMD's and "
        "Intel's libraries are never needed for a backend to be up.",
    ),
    "no-devices": FaultReason(
        "the driver serves no card, or none is on the bus",
        "If the cards were taken out for good: leave the vendor out of `backends:`, and restart the exporter, since a "
        "vendor that served once is expected until then. Else see `lspci` and `journalctl -k`: a card that the bus "
        "does not have is for the hardware's owner.",
    ),
    "no-permission": FaultReason(
        "the driver lets this user read none of its cards",
        "`ls -l /dev/nvidia* /dev/dri` and `id gpu-fleet-exporter`: docs/installation.md says which groups and files.",
    ),
    "stale": FaultReason(
        "with `sampling.interval_seconds`: the last reading is older than two and a half intervals",
        "The host is overloaded, or was suspended; the exporter's own loop did not get on. It ends with the next "
        "cycle.",
    ),
    "starting": FaultReason(
        "the vendor's library, or the driver on its cards, is still starting",
        "Wait. After ten seconds of the library's start it counts as `hung`. A driver without persistence takes "
        "seconds for each start: `nvidia-persistenced` keeps it loaded.",
    ),
    "unsupported": FaultReason(
        "the cards tell no UUID or no PCI address, or of partitions not which is which",
        "Such a card is not shown, since nobody could say which one it is. Nothing is broken: name the other vendors "
        "alone in `backends:`.",
    ),
}
