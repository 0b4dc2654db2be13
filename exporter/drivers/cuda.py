"""What CUDA's driver library shows under this environment: ``libcuda.so.1``, as ``cuda.h`` has it.

No context is made and no memory taken: devices are initialised, counted and named, which is all that ordinals need.

``cuInit`` answering ``CUDA_ERROR_NO_DEVICE`` (100) is no fault: the mask, or what the process may open, leaves none,
and the driver has other codes for its own failures (999, 802, 803, 804, ...). Every other code is a fault.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from ctypes import c_char_p, c_int, c_uint, c_void_p

from exporter.drivers.calls import Library, Signatures, uuid_text
from exporter.drivers.ordinals import NO_DEVICE, counted, told_address, told_bytes, told_number, told_text
from exporter.wire import DriverAnswer, DriverDevice

_NAMES = ("libcuda.so.1",)
_CALLS: Signatures = {
    "cuInit": (c_int, c_uint),
    "cuDriverGetVersion": (c_int, c_void_p),
    "cuGetErrorName": (c_int, c_int, c_void_p),
    "cuDeviceGetCount": (c_int, c_void_p),
    "cuDeviceGet": (c_int, c_void_p, c_int),
    "cuDeviceGetName": (c_int, c_char_p, c_int, c_int),
    "cuDeviceGetPCIBusId": (c_int, c_char_p, c_int, c_int),
    "cuDeviceGetUuid": (c_int, c_void_p, c_int),
    "cuDeviceGetUuid_v2": (c_int, c_void_p, c_int),
}
# As in "NVIDIA A100-SXM4-40GB MIG 1g.5gb".
_INSTANCE = re.compile(r"\bMIG\b")


def ask() -> DriverAnswer:
    """The devices in the order of CUDA's ordinals; the version is the newest CUDA that the driver serves (``12.8``).

    The version is empty where the driver does not say it, as an older one without a device may not.
    """
    return Library(_NAMES, _CALLS, _named).answer(_version, _devices)


def _named(cuda: Library, code: int) -> str:
    name = c_char_p()
    if cuda.has("cuGetErrorName") and not cuda.call("cuGetErrorName", code, ctypes.byref(name)) and name.value:
        return f"{name.value.decode('utf-8', 'replace')} ({code})"
    return str(code)


def _version(cuda: Library) -> str:
    """From 1000 * major + 10 * minor."""
    number = told_number(cuda, "cuDriverGetVersion")
    return "" if number is None else f"{number // 1000}.{number % 1000 // 10}"


def _devices(cuda: Library) -> Iterator[DriverDevice]:
    code = cuda.call("cuInit", 0)
    if code == NO_DEVICE:
        return
    if code:
        raise cuda.refused("cuInit", code)
    yield from counted(cuda, cuda.number("cuDeviceGetCount"), _device)


def _device(cuda: Library, ordinal: int) -> DriverDevice:
    handle = cuda.number("cuDeviceGet", ordinal)
    name = told_text(cuda, "cuDeviceGetName", handle)
    address = told_address(cuda, "cuDeviceGetPCIBusId", handle)
    return DriverDevice(pci_bus_id=address, uuid=_uuid(cuda, handle, name), name=name)


def _uuid(cuda: Library, handle: int, name: str) -> str:
    """``GPU-`` or ``MIG-`` and the UUID; empty where the driver does not say which of the two a device is.

    ``cuDeviceGetUuid_v2`` (CUDA 11.4) gives a MIG instance its own UUID; ``cuDeviceGetUuid`` gives it its card's, so
    where the two differ it is an instance. A driver without the former tells no UUID: it may be another device's.
    """
    own = told_bytes(cuda, "cuDeviceGetUuid_v2", handle)
    if own is None:
        return ""
    of_card = told_bytes(cuda, "cuDeviceGetUuid", handle)
    if of_card is None and not name:
        return ""
    instance = of_card not in (None, own) or _INSTANCE.search(name)
    return f"{'MIG' if instance else 'GPU'}-{uuid_text(own)}"
