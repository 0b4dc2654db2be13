"""What AMD's HIP runtime shows under this environment: ``libamdhip64.so``, as ``hip_runtime_api.h`` has it.

No context is made and no memory taken. Older releases say function 0 for every partition of a card; the address is told
as the runtime tells it.

``hipErrorNoDevice`` (100) of ``hipInit`` or ``hipGetDeviceCount``, and a count of 0, say the same for a mask that
leaves nothing as for ROCr, the layer below, not starting: HIP passes over that failure. So it is no fault only where
ROCr then says that it has started (``hsa_init`` answers 0; it counts its users, and HIP is one already).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from ctypes import c_char_p, c_int, c_uint, c_void_p

from exporter.drivers.calls import Library, Refused, Signatures
from exporter.drivers.ordinals import NO_DEVICE, counted, told_address, told_bytes, told_number, told_text
from exporter.wire import DriverAnswer, DriverDevice

# The plain name is a development package's, the numbered ones are of ROCm 7, 6 and 5; no loader path need have ROCm.
_NAMES = (
    *("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5"),
    "/opt/rocm/lib/libamdhip64.so",
)
_CALLS: Signatures = {
    "hipInit": (c_int, c_uint),
    "hipRuntimeGetVersion": (c_int, c_void_p),
    "hipGetErrorName": (c_char_p, c_int),
    "hipGetDeviceCount": (c_int, c_void_p),
    "hipDeviceGet": (c_int, c_void_p, c_int),
    "hipDeviceGetName": (c_int, c_char_p, c_int, c_int),
    "hipDeviceGetPCIBusId": (c_int, c_char_p, c_int, c_int),
    "hipDeviceGetUuid": (c_int, c_void_p, c_int),
}
_ROCR_NAMES = ("libhsa-runtime64.so.1", "/opt/rocm/lib/libhsa-runtime64.so.1")
_ROCR_CALLS: Signatures = {"hsa_init": (c_int,)}
_UNIQUE_ID = re.compile(rb"[0-9a-fA-F]{16}")


def ask() -> DriverAnswer:
    """The devices in the order of HIP's ordinals; the version is the runtime's (``6.3.42134``), empty if not told."""
    return Library(_NAMES, _CALLS, _named).answer(_version, _devices)


def _named(hip: Library, code: int) -> str:
    name = hip.call("hipGetErrorName", code) if hip.has("hipGetErrorName") else None
    return f"{name.decode('utf-8', 'replace')} ({code})" if name else str(code)


def _version(hip: Library) -> str:
    """From 10000000 * major + 100000 * minor + patch."""
    number = told_number(hip, "hipRuntimeGetVersion")
    return "" if number is None else f"{number // 10000000}.{number // 100000 % 100}.{number % 100000}"


def _devices(hip: Library) -> Iterator[DriverDevice]:
    count = ctypes.c_int()
    for symbol, argument in (("hipInit", 0), ("hipGetDeviceCount", ctypes.byref(count))):
        code = hip.call(symbol, argument)
        if code == NO_DEVICE:
            _rocr_must_have_started(hip.refused(symbol, code))
            return
        if code:
            raise hip.refused(symbol, code)
    if not count.value:
        _rocr_must_have_started(Refused("hipGetDeviceCount answered that there is no device"))
    yield from counted(hip, count.value, _device)


def _rocr_must_have_started(said: Refused) -> None:
    """Raises what HIP said, and why that is no answer, unless ROCr has started."""
    try:
        Library(_ROCR_NAMES, _ROCR_CALLS, lambda _, code: hex(code)).must("hsa_init")
    except Refused as refused:
        raise Refused(f"{said}, as it also does where ROCr has not started: {refused}") from refused


def _device(hip: Library, ordinal: int) -> DriverDevice:
    handle = hip.number("hipDeviceGet", ordinal)
    address = told_address(hip, "hipDeviceGetPCIBusId", ordinal)
    return DriverDevice(pci_bus_id=address, uuid=_uuid(hip, handle), name=told_text(hip, "hipDeviceGetName", handle))


def _uuid(hip: Library, handle: int) -> str:
    """``GPU-`` and the KFD's unique id; empty for a card without one, for which HIP writes ``XX``.

    The 16 bytes are 16 hexadecimal digits as text, not a UUID's own bytes.
    """
    digits = told_bytes(hip, "hipDeviceGetUuid", handle)
    if digits is None or not _UNIQUE_ID.fullmatch(digits) or not int(digits, 16):
        return ""
    return f"GPU-{digits.decode('ascii').lower()}"
