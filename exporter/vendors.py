"""The registry of vendors: one entry each. What else knows vendors by name asks here."""

from __future__ import annotations

from typing import NamedTuple

# Beginnings of PCI classes: display controllers, and processing accelerators such as AMD's Instinct cards.
_DISPLAY, _ACCELERATOR = "0x03", "0x12"


class Vendor(NamedTuple):
    """One vendor. ``backend`` is the ``module:Class`` of its :class:`exporter.backends.base.Backend`.

    ``pci_id`` is the vendor's id as sysfs has it, and ``classes`` are how the PCI classes of its GPUs begin: by these a
    host is seen to have such a card. Without an id only the settings can say so. ``modules`` are the kernel's modules
    that its cards can be read by, and ``shared_object`` is the library that its package loads: ``doctor`` looks for
    both. Where ``files_suffice``, the cards are read by the kernel's files, also without the library.
    ``keyed_by_uuid``: a card with a UUID has that for its identity, and not its PCI address.
    ``on_request``: it serves only where the settings name it.
    ``uses_capabilities``: its worker has the daemon's capabilities, where the daemon has any.
    """

    title: str
    backend: str
    pci_id: str | None = None
    classes: tuple[str, ...] = (_DISPLAY, _ACCELERATOR)
    modules: tuple[str, ...] = ()
    shared_object: str | None = None
    files_suffice: bool = False
    keyed_by_uuid: bool = False
    on_request: bool = False
    uses_capabilities: bool = False


VENDORS: dict[str, Vendor] = {
    "nvidia": Vendor(
        "NVIDIA",
        "exporter.backends.nvidia:NvidiaBackend",
        pci_id="0x10de",
        modules=("nvidia",),
        shared_object="libnvidia-ml.so.1",
        keyed_by_uuid=True,
    ),
    "amd": Vendor(
        "AMD",
        "exporter.backends.amd:AmdBackend",
        pci_id="0x1002",
        modules=("amdgpu",),
        shared_object="libamd_smi.so",
        files_suffice=True,
    ),
    # Intel's processing accelerators are neural processing units, which are no GPUs. Its backend counts the time of
    # every process's clients, which takes rights.
    "intel": Vendor(
        "Intel",
        "exporter.backends.intel:IntelBackend",
        pci_id="0x8086",
        classes=(_DISPLAY,),
        modules=("xe", "i915"),
        shared_object="libze_loader.so.1",
        files_suffice=True,
        uses_capabilities=True,
    ),
    "simulated": Vendor(
        "Simulated", "exporter.backends.simulated:SimulatedBackend", keyed_by_uuid=True, on_request=True
    ),
}
