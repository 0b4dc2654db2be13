"""What Vulkan enumerates under this environment: its loader ``libvulkan.so.1``, as ``vulkan_core.h`` has it.

An instance is made, as the enumeration needs one, but no device and no memory. It asks for what ggml's asks for, since
the loader and Mesa's layer order the devices by what an instance may ask of them.

An enumeration of nothing is no fault. Every code is: ``VK_ERROR_INCOMPATIBLE_DRIVER`` and
``VK_ERROR_INITIALIZATION_FAILED`` are the loader's answers to having no driver, and to drivers that do not start. So is
a device other than software whose PCI address is not told, as no one could say which card it is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import Structure, c_char, c_char_p, c_int32, c_ubyte, c_uint32, c_uint64, c_void_p
from typing import Any

from exporter import units
from exporter.drivers.calls import Library, Refused, Signatures, listed, text, uuid_text
from exporter.model import VulkanDevice
from exporter.wire import DriverAnswer

_NAMES = ("libvulkan.so.1",)
_CALLS: Signatures = {
    "vkEnumerateInstanceVersion": (c_int32, c_void_p),
    "vkCreateInstance": (c_int32, c_void_p, c_void_p, c_void_p),
    "vkEnumeratePhysicalDevices": (c_int32, c_void_p, c_void_p, c_void_p),
    "vkEnumerateDeviceExtensionProperties": (c_int32, c_void_p, c_char_p, c_void_p, c_void_p),
    "vkGetPhysicalDeviceProperties2": (None, c_void_p, c_void_p),
    "vkGetPhysicalDeviceFeatures2": (None, c_void_p, c_void_p),
}
_INCOMPLETE = 5
_RESULTS = {
    -1: "VK_ERROR_OUT_OF_HOST_MEMORY",
    -2: "VK_ERROR_OUT_OF_DEVICE_MEMORY",
    -3: "VK_ERROR_INITIALIZATION_FAILED",
    -4: "VK_ERROR_DEVICE_LOST",
    -6: "VK_ERROR_LAYER_NOT_PRESENT",
    -7: "VK_ERROR_EXTENSION_NOT_PRESENT",
    -9: "VK_ERROR_INCOMPATIBLE_DRIVER",
}
_VERSION_1_1, _VERSION_1_2 = 1 << 22 | 1 << 12, 1 << 22 | 2 << 12
_PCI_EXTENSION = b"VK_EXT_pci_bus_info"
_UNTOLD = 2  # what no VkBool32 is

# By VkPhysicalDeviceType.
_KINDS = ("other", "integrated", "discrete", "virtual", "cpu")
# Of PCI, but for Mesa's software, which has a number of Khronos's.
_VENDORS = {0x10DE: "nvidia", 0x1002: "amd", 0x8086: "intel", 0x5143: "qualcomm", 0x10005: "mesa"}
# By VkDriverId; 0 is none.
_DRIVERS = (
    *("", "amdgpu_pro", "amdvlk", "radv", "nvidia", "intel_windows", "anv", "imagination", "qualcomm", "arm"),
    *("swiftshader", "ggp", "broadcom", "llvmpipe", "moltenvk", "coreavi", "juice", "verisilicon", "turnip", "v3dv"),
    *("panvk", "samsung", "venus", "dozen", "nvk", "imagination_mesa", "honeykrisp"),
)


class _ApplicationInfo(Structure):
    _fields_ = (
        *(("sType", c_int32), ("pNext", c_void_p)),
        *(("pApplicationName", c_char_p), ("applicationVersion", c_uint32)),
        *(("pEngineName", c_char_p), ("engineVersion", c_uint32), ("apiVersion", c_uint32)),
    )
    STYPE = 0


class _InstanceCreateInfo(Structure):
    _fields_ = (
        *(("sType", c_int32), ("pNext", c_void_p), ("flags", c_uint32)),
        ("pApplicationInfo", c_void_p),
        *(("enabledLayerCount", c_uint32), ("ppEnabledLayerNames", c_void_p)),
        *(("enabledExtensionCount", c_uint32), ("ppEnabledExtensionNames", c_void_p)),
    )
    STYPE = 1


class _ExtensionProperties(Structure):
    _fields_ = (("extensionName", c_char * 256), ("specVersion", c_uint32))


class _IdProperties(Structure):
    _fields_ = (
        *(("sType", c_int32), ("pNext", c_void_p)),
        *(("deviceUUID", c_ubyte * 16), ("driverUUID", c_ubyte * 16), ("deviceLUID", c_ubyte * 8)),
        *(("deviceNodeMask", c_uint32), ("deviceLUIDValid", c_uint32)),
    )
    STYPE = 1000071004


class _DriverProperties(Structure):
    _fields_ = (
        *(("sType", c_int32), ("pNext", c_void_p)),
        *(("driverID", c_int32), ("driverName", c_char * 256), ("driverInfo", c_char * 256)),
        ("conformanceVersion", c_ubyte * 4),
    )
    STYPE = 1000196000


class _PciBusInfo(Structure):
    _fields_ = (
        *(("sType", c_int32), ("pNext", c_void_p)),
        *((name, c_uint32) for name in ("pciDomain", "pciBus", "pciDevice", "pciFunction")),
    )
    STYPE = 1000212000


class _Properties2(Structure):
    """With the whole ``VkPhysicalDeviceProperties`` in it, whose limits and sparse properties nobody reads."""

    _fields_ = (
        *(("sType", c_int32), ("pNext", c_void_p)),
        *((name, c_uint32) for name in ("apiVersion", "driverVersion", "vendorID", "deviceID", "deviceType")),
        *(("deviceName", c_char * 256), ("pipelineCacheUUID", c_ubyte * 16)),
        *(("limits", c_uint64 * 63), ("sparseProperties", c_uint32 * 5)),
    )
    STYPE = 1000059001


class _StorageFeatures(Structure):
    _fields_ = (
        *(("sType", c_int32), ("pNext", c_void_p)),
        *(("storageBuffer16BitAccess", c_uint32), ("uniformAndStorageBuffer16BitAccess", c_uint32)),
        *(("storagePushConstant16", c_uint32), ("storageInputOutput16", c_uint32)),
    )
    STYPE = 1000083000


class _Features2(Structure):
    _fields_ = (("sType", c_int32), ("pNext", c_void_p), ("features", c_uint32 * 55))
    STYPE = 1000059000


def ask() -> DriverAnswer:
    """The raw enumeration in its order; the version is the newest Vulkan that the loader knows (``1.3.250``)."""
    vulkan = Library(_NAMES, _CALLS, _named)
    found: tuple[VulkanDevice, ...] | None = None
    version = fault = ""
    try:
        version = _version(vulkan)
        found = tuple(_enumerated(vulkan))
    except Refused as refused:
        fault = str(refused)
    return DriverAnswer(file=vulkan.name, version=version, vulkan=found, fault=fault)


def _named(_: Library, code: int) -> str:
    return f"{_RESULTS[code]} ({code})" if code in _RESULTS else str(code)


def _version(vulkan: Library) -> str:
    """Raises :class:`Refused` for a loader of Vulkan 1.0, which has no such call, and none for the rest either."""
    number = vulkan.number("vkEnumerateInstanceVersion")
    version = f"{number >> 22 & 0x7F}.{number >> 12 & 0x3FF}.{number & 0xFFF}"
    if number < _VERSION_1_1:
        raise Refused(f"vkEnumerateInstanceVersion answered {version}, and 1.1 is needed")
    return version


def _enumerated(vulkan: Library) -> Iterator[VulkanDevice]:
    instance = _instance(vulkan)

    def ask_for(count: Any, array: Any) -> bool:
        return _complete(vulkan, "vkEnumeratePhysicalDevices", instance, count, array)

    for position, handle in enumerate(listed("vkEnumeratePhysicalDevices", c_void_p, ask_for)):
        try:
            yield _device(vulkan, position, handle)
        except Refused as refused:
            raise Refused(f"device {position}: {refused}") from refused


def _instance(vulkan: Library) -> c_void_p:
    application = _ApplicationInfo(sType=_ApplicationInfo.STYPE, apiVersion=_VERSION_1_2)  # as ggml's
    wanted = _InstanceCreateInfo(sType=_InstanceCreateInfo.STYPE, pApplicationInfo=ctypes.addressof(application))
    instance = c_void_p()
    vulkan.must("vkCreateInstance", ctypes.byref(wanted), None, ctypes.byref(instance))
    return instance


def _complete(vulkan: Library, symbol: str, *arguments: Any) -> bool:
    """Whether a list was not cut off. Raises :class:`Refused` if it was not given."""
    code = vulkan.call(symbol, *arguments)
    if code not in (0, _INCOMPLETE):
        raise vulkan.refused(symbol, code)
    return not code


def _device(vulkan: Library, position: int, handle: int) -> VulkanDevice:
    properties, of_id, of_driver, bus = _asked(vulkan, handle)
    kind = _KINDS[properties.deviceType] if properties.deviceType < len(_KINDS) else "other"
    if bus is None and kind != "cpu":
        raise Refused(f"{text(properties.deviceName)} has no VK_EXT_pci_bus_info, so which card it is is not told")
    return VulkanDevice(
        raw_position=position,
        kind=kind,
        driver=_driver(of_driver.driverID),
        vendor=_VENDORS.get(properties.vendorID) or f"0x{properties.vendorID:04x}",
        uuid=uuid_text(bytes(of_id.deviceUUID)),
        pci_bus_id="" if bus is None else _address(bus),
        name=text(properties.deviceName),
        fp16_storage=_fp16_storage(vulkan, handle),
    )


def _asked(vulkan: Library, handle: int) -> tuple[_Properties2, _IdProperties, _DriverProperties, _PciBusInfo | None]:
    """The properties, as one chain: the address is in it only for a device that has the extension."""
    bus = _PciBusInfo(sType=_PciBusInfo.STYPE) if _has_addresses(vulkan, handle) else None
    driver = _DriverProperties(sType=_DriverProperties.STYPE, pNext=ctypes.addressof(bus) if bus is not None else None)
    of_id = _IdProperties(sType=_IdProperties.STYPE, pNext=ctypes.addressof(driver))
    properties = _Properties2(sType=_Properties2.STYPE, pNext=ctypes.addressof(of_id))
    vulkan.call("vkGetPhysicalDeviceProperties2", handle, ctypes.byref(properties))
    if not properties.apiVersion:
        raise Refused("vkGetPhysicalDeviceProperties2 answered nothing")
    return properties, of_id, driver, bus


def _has_addresses(vulkan: Library, handle: int) -> bool:
    symbol = "vkEnumerateDeviceExtensionProperties"

    def ask_for(count: Any, array: Any) -> bool:
        return _complete(vulkan, symbol, handle, None, count, array)

    return any(entry.extensionName == _PCI_EXTENSION for entry in listed(symbol, _ExtensionProperties, ask_for))


def _driver(number: int) -> str:
    return _DRIVERS[number] if 0 <= number < len(_DRIVERS) else f"driver {number}"


def _address(bus: _PciBusInfo) -> str:
    written = f"{bus.pciDomain:04x}:{bus.pciBus:02x}:{bus.pciDevice:02x}.{bus.pciFunction:x}"
    address = units.pci_bus_id(written)
    if address is None:
        raise Refused(f"VK_EXT_pci_bus_info answered {written}, which is no PCI address")
    return address


def _fp16_storage(vulkan: Library, handle: int) -> bool:
    """16-bit values in storage buffers, without which ggml leaves a device out."""
    storage = _StorageFeatures(sType=_StorageFeatures.STYPE, storageBuffer16BitAccess=_UNTOLD)
    features = _Features2(sType=_Features2.STYPE, pNext=ctypes.addressof(storage))
    vulkan.call("vkGetPhysicalDeviceFeatures2", handle, ctypes.byref(features))
    if storage.storageBuffer16BitAccess == _UNTOLD:
        raise Refused("vkGetPhysicalDeviceFeatures2 answered nothing of 16-bit storage")
    return bool(storage.storageBuffer16BitAccess)
