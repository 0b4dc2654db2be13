"""What Level Zero shows under this environment: its loader ``libze_loader.so.1``, as ``ze_api.h`` has it.

No context is made and no memory taken. Ordinals count the drivers' GPUs, the first driver's first.

No code says that there is no device: ``ZE_RESULT_ERROR_UNINITIALIZED`` is the answer to a mask that leaves none, and as
well to a driver that does not start, so it is a fault. Drivers without a GPU, should there be any, are no fault.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from ctypes import Structure, c_char, c_int, c_int32, c_int64, c_ubyte, c_uint32, c_uint64, c_void_p
from typing import Any

from exporter import units
from exporter.drivers.apart import apart
from exporter.drivers.calls import Library, Refused, Signatures, listed, text
from exporter.wire import DriverAnswer, DriverDevice

_NAMES = ("libze_loader.so.1",)
_LIST = (c_int, c_void_p, c_void_p, c_void_p)
_CALLS: Signatures = {
    "zeInit": (c_int, c_uint32),
    "zeInitDrivers": _LIST,
    "zeDriverGet": (c_int, c_void_p, c_void_p),
    "zeDriverGetApiVersion": (c_int, c_void_p, c_void_p),
    "zeDeviceGet": _LIST,
    "zeDeviceGetSubDevices": _LIST,
    "zeDeviceGetRootDevice": (c_int, c_void_p, c_void_p),
    "zeDeviceGetProperties": (c_int, c_void_p, c_void_p),
    "zeDevicePciGetPropertiesExt": (c_int, c_void_p, c_void_p),
}
_UNINITIALIZED, _UNSUPPORTED_FEATURE = 0x78000001, 0x78000003
_RESULTS = {
    0x70000001: "DEVICE_LOST",
    0x70010000: "INSUFFICIENT_PERMISSIONS",
    0x70010001: "NOT_AVAILABLE",
    0x70020000: "DEPENDENCY_UNAVAILABLE",
    _UNINITIALIZED: "UNINITIALIZED",
    0x78000002: "UNSUPPORTED_VERSION",
    _UNSUPPORTED_FEATURE: "UNSUPPORTED_FEATURE",
    0x78000004: "INVALID_ARGUMENT",
    0x7FFFFFFE: "UNKNOWN",
}
_INIT_GPU = 1  # ZE_INIT_FLAG_GPU_ONLY, and ZE_INIT_DRIVER_TYPE_FLAG_GPU
_TYPE_GPU, _FLAG_SUBDEVICE = 1, 1 << 1


class _InitDriverTypeDesc(Structure):
    _fields_ = (("stype", c_int32), ("pNext", c_void_p), ("flags", c_uint32))
    STYPE = 0x20021


class _DeviceProperties(Structure):
    _fields_ = (
        ("stype", c_int32),
        ("pNext", c_void_p),
        ("type", c_int32),
        *((name, c_uint32) for name in ("vendorId", "deviceId", "flags", "subdeviceId", "coreClockRate")),
        ("maxMemAllocSize", c_uint64),
        *((name, c_uint32) for name in ("maxHardwareContexts", "maxCommandQueuePriority", "numThreadsPerEU")),
        *((name, c_uint32) for name in ("physicalEUSimdWidth", "numEUsPerSubslice", "numSubslicesPerSlice")),
        ("numSlices", c_uint32),
        ("timerResolution", c_uint64),
        *((name, c_uint32) for name in ("timestampValidBits", "kernelTimestampValidBits")),
        ("uuid", c_ubyte * 16),
        ("name", c_char * 256),
    )
    STYPE = 0x3


class _PciProperties(Structure):
    _fields_ = (
        ("stype", c_int32),
        ("pNext", c_void_p),
        *((name, c_uint32) for name in ("domain", "bus", "device", "function")),
        *((name, c_int32) for name in ("genVersion", "width")),
        ("maxBandwidth", c_int64),
    )
    STYPE = 0x10008


def ask() -> DriverAnswer:
    """The devices in the order of Level Zero's ordinals; the version is the API's that the first driver serves (1.13).

    Programs start with ``zeInit`` or, from API 1.10 on, with ``zeInitDrivers``. The loader sorts its drivers once in a
    process, by what the first of the two calls finds, so the older way is asked in another one. Where the two differ
    the ordinals depend on the program, which is a fault. ``zeInitDrivers`` answering ``UNINITIALIZED`` where ``zeInit``
    succeeds says that the drivers are older than it, and then the older way's answer holds.
    """
    ze = Library(_NAMES, _CALLS, _named)
    if not ze.has("zeInitDrivers"):
        return _answer(ze, _by_init)
    if not ze.has("zeInit"):
        return _answer(ze, _by_init_drivers)
    older = apart(lambda: _answer(ze, _by_init))
    if _unsigned(_init_drivers(ze, ctypes.byref(c_uint32(0)), None)) == _UNINITIALIZED:
        return older
    newer = _answer(ze, _by_init_drivers)
    fault = newer.fault or older.fault
    if not fault and newer.devices != older.devices:
        fault = "zeInit and zeInitDrivers answered with different devices, or with the same in another order"
    return DriverAnswer(file=ze.name, version=newer.version, devices=() if fault else newer.devices, fault=fault)


def _named(_: Library, code: int) -> str:
    number = _unsigned(code)
    return f"{_RESULTS[number]} ({number:#x})" if number in _RESULTS else hex(number)


def _unsigned(code: int) -> int:
    return code & 0xFFFFFFFF


def _answer(ze: Library, drivers: Callable[[Library], Sequence[int]]) -> DriverAnswer:
    found: tuple[DriverDevice, ...] = ()
    version = fault = ""
    try:
        handles = drivers(ze)
        version = _version(ze, handles)
        found = tuple(device for handle in handles for device in _devices(ze, handle))
    except Refused as refused:
        fault = str(refused)
    return DriverAnswer(file=ze.name, version=version, devices=found, fault=fault)


def _by_init(ze: Library) -> list[int]:
    ze.must("zeInit", _INIT_GPU)
    return _handles(ze, "zeDriverGet")


def _by_init_drivers(ze: Library) -> list[int]:
    def ask_for(count: Any, array: Any) -> bool:
        if code := _init_drivers(ze, count, array):
            raise ze.refused("zeInitDrivers", code)
        return True

    return listed("zeInitDrivers", c_void_p, ask_for)


def _init_drivers(ze: Library, count: Any, array: Any) -> int:
    wanted = _InitDriverTypeDesc(stype=_InitDriverTypeDesc.STYPE, flags=_INIT_GPU)
    code: int = ze.call("zeInitDrivers", count, array, ctypes.byref(wanted))
    return code


def _handles(ze: Library, symbol: str, *owner: int) -> list[int]:
    """What a call with a count and an array lists. Raises :class:`Refused` if it does not succeed."""

    def ask_for(count: Any, array: Any) -> bool:
        ze.must(symbol, *owner, count, array)
        return True

    return listed(symbol, c_void_p, ask_for)


def _version(ze: Library, drivers: Sequence[int]) -> str:
    number = c_uint32()
    asked = drivers and ze.has("zeDriverGetApiVersion")
    if not asked or ze.call("zeDriverGetApiVersion", drivers[0], ctypes.byref(number)):
        return ""
    return f"{number.value >> 16}.{number.value & 0xFFFF}"


def _devices(ze: Library, driver: int) -> Iterator[DriverDevice]:
    """A driver's GPUs. Several at one address are tiles of one card, whatever their flags say: so it is under FLAT."""
    gpus = [(handle, properties) for handle in _handles(ze, "zeDeviceGet", driver) if (properties := _gpu(ze, handle))]
    addresses = [_address(ze, handle) for handle, _ in gpus]
    shared = Counter(addresses)
    seen = set()
    for (handle, properties), address in zip(gpus, addresses, strict=True):
        tiles = tuple(_properties(ze, part).subdeviceId for part in _handles(ze, "zeDeviceGetSubDevices", handle))
        alone = shared[address] == 1 and not _is_part(ze, handle, properties)
        tile = None if alone and (tiles or not properties.subdeviceId) else properties.subdeviceId
        if (address, tile) in seen:
            raise Refused(f"zeDeviceGet answered with tile {tile} of {address} twice")
        seen.add((address, tile))
        yield DriverDevice(pci_bus_id=address, name=text(properties.name), tile=tile, tiles=tiles)


def _properties(ze: Library, handle: int) -> _DeviceProperties:
    properties = _DeviceProperties(stype=_DeviceProperties.STYPE)
    ze.must("zeDeviceGetProperties", handle, ctypes.byref(properties))
    return properties


def _gpu(ze: Library, handle: int) -> _DeviceProperties | None:
    """None for what is no GPU: a driver for NPUs may have got past the init."""
    properties = _properties(ze, handle)
    return properties if properties.type == _TYPE_GPU else None


def _is_part(ze: Library, handle: int, properties: _DeviceProperties) -> bool:
    """Whether it is a sub-device: its flag says so, or it has a root device, where the loader is new enough to say."""
    root = c_void_p()
    if ze.has("zeDeviceGetRootDevice"):
        code = ze.call("zeDeviceGetRootDevice", handle, ctypes.byref(root))
        if code and _unsigned(code) != _UNSUPPORTED_FEATURE:
            raise ze.refused("zeDeviceGetRootDevice", code)
    return bool(properties.flags & _FLAG_SUBDEVICE or root.value)


def _address(ze: Library, handle: int) -> str:
    found = _PciProperties(stype=_PciProperties.STYPE)
    ze.must("zeDevicePciGetPropertiesExt", handle, ctypes.byref(found))
    written = f"{found.domain:04x}:{found.bus:02x}:{found.device:02x}.{found.function:x}"
    address = units.pci_bus_id(written)
    if address is None:
        raise Refused(f"zeDevicePciGetPropertiesExt answered {written}, which is no PCI address")
    return address
