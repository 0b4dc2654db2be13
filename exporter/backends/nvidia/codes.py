"""What NVML's codes mean for a reading, a card and the library."""

from __future__ import annotations

from typing import Any

from exporter.errors import BackendAbsent, DeviceFault, DeviceLost

_REASONS = {
    3: "unsupported",
    4: "no-permission",
    9: "driver-not-loaded",
    12: "library-missing",
    13: "driver-too-old",
    15: "device-lost",
    18: "driver-mismatch",
}
# After these nothing works until the library is loaded anew: uninitialised, driver not loaded, library and driver of
# different versions.
_LIBRARY_LOST = (1, 9, 18)
NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, INVALID_ARGUMENT, TIMEOUT, GPU_IS_LOST = 3, 4, 6, 2, 10, 15
# Not supported, and a symbol that an older driver lacks: the reading does not exist here, which is no fault.
NOT_OFFERED = (NOT_SUPPORTED, 13)
# The same, for what a card is: also what this user may not ask, or what makes no sense for it.
NONE_HERE = (INVALID_ARGUMENT, NOT_SUPPORTED, NO_PERMISSION, NOT_FOUND, 13)


def reason_of(code: int) -> str:
    """The fault's reason."""
    return _REASONS.get(code, "driver-error")


def card_error(error: Any, slot: str) -> BackendAbsent | DeviceFault | DeviceLost:
    """What an ``NVMLError`` of a call on a card means."""
    if error.value in _LIBRARY_LOST:
        return BackendAbsent(reason_of(error.value), str(error))
    if error.value == GPU_IS_LOST:
        return DeviceLost(f"{slot}: {error}")
    return DeviceFault(reason_of(error.value), f"{slot}: {error}")


def raise_if_lost(error: Any, slot: str) -> None:
    """Raises ``DeviceLost`` where the card is gone, and ``BackendAbsent`` where the library is."""
    if error.value == GPU_IS_LOST or error.value in _LIBRARY_LOST:
        raise card_error(error, slot) from error
