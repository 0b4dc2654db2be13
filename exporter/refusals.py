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
        "See gpu_exporter_backend_fault_info and the log for the reason; the mask is inverted as soon as it is back.",
    ),
    "evidence-not-accepted": RefusalCode(
        "the answer's grade of evidence is not in mapping.accept",
        "Set CUDA_DEVICE_ORDER=PCI_BUS_ID for the workload, or add the grade to mapping.accept.",
    ),
    "frontend-order": RefusalCode(
        "a front end may number its own virtual devices over the runtime's",
        "Unset GGML_CUDA_DEVICES for the workload, or watch its cards through a fleet of runtime host.",
    ),
    "integer-wrap": RefusalCode(
        "a number in the mask overflows the runtime's integer type",
        "Correct the number in the mask.",
    ),
    "inventory-incomplete": RefusalCode(
        "the host's cards were not all known when the workload's index space was fixed",
        "Bring back or wake the missing card, or name the cards by full UUID in the mask.",
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
    "order-unknown": RefusalCode(
        "CUDA numbers unequal cards in an order that cannot be known from outside",
        "Set CUDA_DEVICE_ORDER=PCI_BUS_ID for the workload (and in the fleet's env), or name the cards by UUID.",
    ),
    "reach-unknown": RefusalCode(
        "which cards the process can open is not known, so neither is its numbering",
        "State reach: in the fleet's settings, or name the cards by UUID in the mask.",
    ),
    "token-dialect": RefusalCode(
        "the known readings of this mask disagree",
        "Write plain decimal numbers, or UUIDs exactly as nvidia-smi -L prints them, separated by commas only.",
    ),
}
