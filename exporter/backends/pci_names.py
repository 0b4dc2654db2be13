"""What a card is called: by the PCI database that distributions ship, else by its PCI ids."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from exporter.backends import kernel_files
from exporter.backends.base import Places
from exporter.errors import DeviceFault, DeviceLost

_DATABASES = ("usr/share/misc/pci.ids", "usr/share/hwdata/pci.ids")


def name_of(places: Places, address: str) -> str:
    """The card's name, or ``1002:744c`` where no database has one: cards of different models never share it."""
    folder = kernel_files.device_folder(places.sysfs, address)
    try:
        vendor, device = (kernel_files.text(f"{folder}/{name}") for name in ("vendor", "device"))
    except (DeviceFault, DeviceLost):
        return ""
    if not vendor or not device:
        return ""
    vendor, device = vendor.removeprefix("0x"), device.removeprefix("0x")
    for database in _DATABASES:
        name = _looked_up(Path(places.root, database), vendor, device)
        if name:
            return name
    return f"{vendor}:{device}"


@functools.cache
def _looked_up(database: Path, vendor: str, device: str) -> str:
    """Lines of a vendor begin with its id, those of its devices with one tab; nothing else is of interest here."""
    try:
        text = database.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    block = re.search(rf"^{re.escape(vendor)}  .*\n((?:\t.*\n|#.*\n)*)", text, re.MULTILINE)
    line = block and re.search(rf"^\t{re.escape(device)}  (.*)$", block[1], re.MULTILINE)
    return line[1].strip() if line else ""
