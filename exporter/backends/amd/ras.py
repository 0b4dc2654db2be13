"""What amdgpu's RAS tells: errors by the block of the chip that they were found in, and pages of memory that are bad.

Source: the kernel's documentation of the files in ``ras`` of a card's folder, which stand there where the card has RAS.
The driver adds up what the hardware has counted since the last look, so that its numbers only grow until it is loaded
anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from exporter import units
from exporter.backends.amd.given import Asked, Given
from exporter.backends.kernel_files import data, listed, text
from exporter.errors import DeviceFault

ERRORS = ("ras_errors", "ecc_errors", "link_errors")
PAGES = ("retired_pages", "retired_pages_pending")

_FEATURES = re.compile(r"^feature mask: (0x[0-9a-fA-F]{1,16})$", re.MULTILINE)
_MEMORY = 1 << 0  # the bit of the memory's controllers (UMC)
_BLOCK = re.compile(r"([a-z0-9]+(?:_[a-z0-9]+)*)_err_count", re.ASCII)
_COUNTS = re.compile(r"^(ue|ce): ([0-9]{1,20})$", re.MULTILINE | re.ASCII)
_ERRORS = {"ce": "corrected", "ue": "uncorrected"}
_NOT_NOW = "Query currently inaccessible"  # while the card is reset
_LINKS = "xgmi-wafl"
_OF_NO_MEMORY = {_LINKS, "pcie-bif"}
_PAGE = re.compile(r"0x[0-9a-f]{8,16} : 0x[0-9a-f]{8} : ([RPF])", re.ASCII)
_RETIRED, _PENDING = "R", "P"  # of the third, F, is only said that it could not be taken out of use
_MOST_PAGES = 256  # of text; the card's own list has room for a tenth of these lines


def enabled(asked: Asked) -> Iterable[Given] | None:
    """Whether errors of the memory are corrected and counted."""
    found = text(f"{asked.folder}/ras/features")
    if found is None:
        return None
    mask = _FEATURES.search(found)
    if mask is None:
        raise DeviceFault("driver-error", f"{asked.folder}/ras/features: found {found[:40]!r}, expected a feature mask")
    return (Given("ecc_enabled", float(bool(int(mask[1], 16) & _MEMORY))),)


def errors(asked: Asked) -> Iterable[Given] | None:
    """Each block's, and those of the memories: their sum over all blocks that are no link, where all have told it."""
    blocks = {match[1].replace("_", "-"): match[0] for name in _names(asked) if (match := _BLOCK.fullmatch(name))}
    told = {block: _counts(asked, file) for block, file in blocks.items()}
    known = {block: counts for block, counts in told.items() if counts is not None}
    given = [Given("ras_errors", counts[kind], (block, kind)) for block, counts in known.items() for kind in counts]
    given += [Given("link_errors", value, ("", kind)) for kind, value in known.get(_LINKS, {}).items()]
    memories = [counts for block, counts in told.items() if block not in _OF_NO_MEMORY]
    if memories and None not in memories:
        sums = {kind: sum(each[kind] for each in memories if each) for kind in _ERRORS.values()}
        given += [Given("ecc_errors", total, (kind,)) for kind, total in sums.items()]
    return given


def _names(asked: Asked) -> Iterator[str]:
    return iter(listed(f"{asked.folder}/ras"))


def _counts(asked: Asked, name: str) -> dict[str, float] | None:
    """A block's, by kind; None where the driver does not tell them now. What cannot be read costs no other block's."""
    path = f"{asked.folder}/ras/{name}"
    try:
        found = text(path)
    except DeviceFault as fault:
        asked.failed.append(fault)
        return None
    if found in (None, _NOT_NOW):
        return None
    counts = {_ERRORS[kind]: units.count(int(value)) for kind, value in _COUNTS.findall(found)}
    known = {kind: value for kind, value in counts.items() if value is not None}
    if len(known) < len(_ERRORS):
        asked.failed.append(DeviceFault("driver-error", f"{path}: found {found[:40]!r}, expected two counts"))
        return None
    return known


def pages(asked: Asked) -> Iterable[Given] | None:
    """How many are out of use, and whether some wait for it. Only uncorrected errors make a page bad."""
    path = f"{asked.folder}/ras/gpu_vram_bad_pages"
    found = data(path, _MOST_PAGES)
    if found is None:
        return None
    lines = found.decode("ascii", "replace").splitlines()
    flags = [match[1] for line in lines if (match := _PAGE.fullmatch(line))]
    if len(flags) < len(lines):
        raise DeviceFault("driver-error", f"{path}: found a line that is no page")
    retired = Given("retired_pages", float(flags.count(_RETIRED)), ("uncorrected",))
    return (retired, Given("retired_pages_pending", float(_PENDING in flags)))
