"""The calls of Sysman that ``pyzes`` does not have, beside those that it has: fans and hardware errors.

A version of the package that has them is asked for them as for all others. Names, members and numbers are those of
Level Zero's specification.
"""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any


class _FanProperties(ctypes.Structure):
    _fields_ = (
        ("stype", ctypes.c_int32),
        ("pNext", ctypes.c_void_p),
        ("onSubdevice", ctypes.c_uint8),
        ("subdeviceId", ctypes.c_uint32),
        ("canControl", ctypes.c_uint8),
        ("supportedModes", ctypes.c_uint32),
        ("supportedUnits", ctypes.c_uint32),
        ("maxRPM", ctypes.c_int32),
        ("maxPoints", ctypes.c_int32),
    )


class _RasProperties(ctypes.Structure):
    _fields_ = (
        ("stype", ctypes.c_int32),
        ("pNext", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("onSubdevice", ctypes.c_uint8),
        ("subdeviceId", ctypes.c_uint32),
    )


class _RasState(ctypes.Structure):
    _fields_ = (("category", ctypes.c_int32), ("errorCounter", ctypes.c_uint64))


class _FanHandle(ctypes.c_void_p):
    pass


class _RasHandle(ctypes.c_void_p):
    pass


_DEFINED: dict[str, Any] = {
    "zes_fan_handle_t": _FanHandle,
    "zes_fan_properties_t": _FanProperties,
    "ZES_STRUCTURE_TYPE_FAN_PROPERTIES": 0x7,
    "zes_ras_handle_t": _RasHandle,
    "zes_ras_properties_t": _RasProperties,
    "ZES_STRUCTURE_TYPE_RAS_PROPERTIES": 0xF,
    "zes_ras_state_exp_t": _RasState,
}


class Calls:
    """A name of Level Zero: as the package has it, else as it is here, else the library's own function.

    Raises ``AttributeError`` for a function that the loader is too old for.
    """

    def __init__(self, package: ModuleType) -> None:
        self._package = package

    def __getattr__(self, name: str) -> Any:
        """The class, number or function of that name."""
        found = getattr(self._package, name, _DEFINED.get(name))
        return getattr(self._package.gpuLib, name) if found is None else found
