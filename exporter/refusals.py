"""Why a mask may not be inverted: the closed list of codes, what each means, and what an operator can do about it."""

from __future__ import annotations

from typing import NamedTuple


class RefusalCode(NamedTuple):
    """``meaning`` completes "refused because ..."; ``advice`` is a sentence on what to do."""

    meaning: str
    advice: str


_USE_UUIDS = "Name the cards by UUID in the mask: a UUID mask needs neither order nor numbering."

REFUSALS: dict[str, RefusalCode] = {
    "backend-down": RefusalCode(
        "the vendor's backend gives no inventory now",
        "See gpu_exporter_backend_fault_info and the log for the reason; the mask is inverted as soon as the "
        "backend is up.",
    ),
    "contradicted": RefusalCode(
        "two ways of knowing name different cards",
        "The workload computes on a card that its masks, as it was started with them, hide; or the driver names other "
        "cards than the masks say. A framework that sets masks in its own process (Ray, launchers of torch) hides "
        "them from view: give each worker its mask before it starts, or state env: in the fleet's settings.",
    ),
    "doc-conflict": RefusalCode(
        "AMD's manual and its source disagree about GPU_DEVICE_ORDINAL, and that makes a difference",
        "Unset GPU_DEVICE_ORDINAL for the workload, and in the fleet's env: HIP_VISIBLE_DEVICES does all that it does.",
    ),
    "driver-order-unknown": RefusalCode(
        "the order in which Level Zero's drivers list these cards is not known",
        "Where the workload's driver is of 2024 or later state known: {driver: current} in the fleet's settings. Where "
        "all cards are of one model set ZE_ENABLE_PCI_ID_DEVICE_ORDER=1 for the workload, and in the fleet's env. "
        "Otherwise let it open one card, and state that as reach:.",
    ),
    "environment-overwritten": RefusalCode(
        "the process has written over the environment that it was started with",
        "Set SPT_NOENV=1 for a Python program that sets its title; or state env: in the fleet's settings.",
    ),
    "evidence-not-accepted": RefusalCode(
        "the answer's grade of evidence is not in mapping.accept",
        "Set CUDA_DEVICE_ORDER=PCI_BUS_ID for the workload, or add the grade to mapping.accept.",
    ),
    "frontend-order": RefusalCode(
        "llama.cpp numbers devices of its own over the runtime's",
        "Unset GGML_CUDA_DEVICES, or the GGML_SYCL_ variables of a workload that is not llama.cpp; for one that "
        "is, name a single device, or use a fleet of runtime host.",
    ),
    "hierarchy-unknown": RefusalCode(
        "whether Level Zero shows a card or each of its tiles as one device is not known",
        "Set ZE_FLAT_DEVICE_HIERARCHY=COMPOSITE, in capitals, for the workload and in the fleet's env, and name "
        "whole cards.",
    ),
    "integer-wrap": RefusalCode(
        "a number in the mask overflows the runtime's integer type",
        "Correct the number in the mask.",
    ),
    "inventory-incomplete": RefusalCode(
        "the host's cards were not all known when the workload's index space was fixed",
        "Bring back or wake the missing card; or name the cards by full UUID, which CUDA and ROCm can.",
    ),
    "isa-drop": RefusalCode(
        "ROCr may drop a card whose instruction set it does not know, and later cards would move up",
        "Unset HSA_OVERRIDE_GFX_VERSION, or leave that card out with ROCR_VISIBLE_DEVICES.",
    ),
    "kfd-order-unknown": RefusalCode(
        "ROCm numbers the cards in the order of KFD nodes, which is not known",
        "Let the exporter read /sys/class/kfd, or name the cards by UUID in ROCR_VISIBLE_DEVICES.",
    ),
    "layer-reorder": RefusalCode(
        "a variable makes the Vulkan loader or a layer order the devices otherwise than they were enumerated",
        "Unset that variable for the workload, or let the devices be enumerated under it.",
    ),
    "legacy-selector": RefusalCode(
        "a legacy SYCL variable is set whose effect depends on the release",
        "Select devices with ONEAPI_DEVICE_SELECTOR instead.",
    ),
    "mig-driver-unknown": RefusalCode(
        "the mask names several MIG instances and the driver branch, which decides how many are visible, is not known",
        "Name one MIG instance a process, or let the exporter read the driver version.",
    ),
    "mig-mixed": RefusalCode(
        "whole GPUs and MIG instances would be visible together, whose order is not established",
        "Name either whole GPUs or MIG instances in one mask.",
    ),
    "mig-multiplicity": RefusalCode(
        "a GPU in MIG mode stands for an instance that nothing specifies",
        "Name the MIG instance by its MIG- UUID in the mask.",
    ),
    "mps": RefusalCode(
        "an MPS server may number the cards differently for its clients",
        _USE_UUIDS,
    ),
    "multiple-driver-libraries": RefusalCode(
        "several Level Zero driver libraries may be installed, and each applies the mask to its own devices",
        "Where the workload has one library state known: {multi_driver_library: no} in the fleet's settings. Otherwise "
        "let it open cards of one model only, and state them as reach:.",
    ),
    "no-permission": RefusalCode(
        "the exporter may not see the workload's processes, or not read the environment of them",
        "Where systemd runs the exporter enable its drop-in process-fleets.conf: docs/installation.md says how. "
        "Otherwise run it as the workload's user, or give it CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH. Or state env: in "
        "the fleet's settings.",
    ),
    "opencl-order-unknown": RefusalCode(
        "the cards are visible through OpenCL only, whose order is not established",
        "Select them through Level Zero: ONEAPI_DEVICE_SELECTOR=level_zero:...",
    ),
    "order-unknown": RefusalCode(
        "CUDA numbers unequal cards in an order that cannot be known from outside",
        "Set CUDA_DEVICE_ORDER=PCI_BUS_ID for the workload (and in the fleet's env), or name the cards by UUID.",
    ),
    "over-the-cap": RefusalCode(
        "the mask repeats devices more often than a fleet may have them",
        "Name each device once.",
    ),
    "process-gone": RefusalCode(
        "no process of the workload is running",
        "Nothing, if it is meant to be stopped; else see that pid_file, systemd_unit, process or cgroup finds it. The "
        "installed service sees no homes and has a /tmp of its own: a pid file belongs elsewhere.",
    ),
    "process-hangs": RefusalCode(
        "the kernel does not answer what is asked of the process",
        "The process hangs in the kernel, often in a GPU driver: see the kernel's log.",
    ),
    "raw-order-unknown": RefusalCode(
        "the raw order of the Vulkan devices can only be enumerated, and was not",
        "Watch the workload's cards through its CUDA, ROCm or Level Zero runtime, or through a fleet of runtime host.",
    ),
    "reach-unknown": RefusalCode(
        "which cards the process can open is not known, so neither is its numbering",
        "State reach: in the fleet's settings with cards that this host has; or name the cards by UUID, which CUDA "
        "and ROCm can.",
    ),
    "runtime-init-fails": RefusalCode(
        "the runtime fails to initialise on this value",
        "Correct the mask: the workload does not start with it, or sees no device.",
    ),
    "selector-invalid": RefusalCode(
        "ONEAPI_DEVICE_SELECTOR does not parse, and the program ends with an exception",
        "Write BACKEND:DEVICE[,DEVICE...], several separated by semicolons, such as level_zero:0,2; unset it for all.",
    ),
    "token-dialect": RefusalCode(
        "the known readings of this mask disagree",
        "Write plain decimal numbers, or, for CUDA and ROCm, whole UUIDs as the vendor's tool prints them, and "
        "nothing else.",
    ),
    "windows-order": RefusalCode(
        "the numbering of devices on Windows is not modelled",
        "Run the exporter on the host that has the cards.",
    ),
}
