"""A discrete card's memory as its kernel driver counts it: the memory regions that i915 and xe tell by an ioctl.

Source: ``DRM_IOCTL_I915_QUERY`` with ``DRM_I915_QUERY_MEMORY_REGIONS``, ``DRM_IOCTL_XE_DEVICE_QUERY`` with
``DRM_XE_DEVICE_QUERY_MEM_REGIONS``. Both only ask. The device file is open for that moment alone, so that the driver
can be unloaded and the card be handed to a virtual machine while the daemon runs.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from exporter.errors import DeviceFault, DeviceLost

_DEVICE_MEMORY = 1
_MOST_BYTES = 1 << 16
_NOT_OFFERED = (
    *(errno.ENOENT, errno.ENXIO, errno.EACCES, errno.EPERM),
    *(errno.EINVAL, errno.ENOTTY, errno.EOPNOTSUPP),
)


class _I915Item(ctypes.Structure):
    _fields_ = (
        ("query_id", ctypes.c_uint64),
        ("length", ctypes.c_int32),
        ("flags", ctypes.c_uint32),
        ("data_ptr", ctypes.c_uint64),
    )


class _I915Query(ctypes.Structure):
    _fields_ = (("num_items", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("items_ptr", ctypes.c_uint64))


class _XeQuery(ctypes.Structure):
    _fields_ = (
        ("extensions", ctypes.c_uint64),
        ("query", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("data", ctypes.c_uint64),
        ("reserved", ctypes.c_uint64 * 2),
    )


class _I915Region(ctypes.Structure):
    _fields_ = (
        ("memory_class", ctypes.c_uint16),
        ("instance", ctypes.c_uint16),
        ("rsvd0", ctypes.c_uint32),
        ("probed_size", ctypes.c_uint64),
        ("unallocated_size", ctypes.c_uint64),
        ("rsvd1", ctypes.c_uint64 * 8),
    )


class _XeRegion(ctypes.Structure):
    _fields_ = (
        ("memory_class", ctypes.c_uint16),
        ("instance", ctypes.c_uint16),
        ("min_page_size", ctypes.c_uint32),
        ("total_size", ctypes.c_uint64),
        ("used", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 8),
    )


_Region = TypeVar("_Region", _I915Region, _XeRegion)

_I915_QUERY, _I915_MEMORY_REGIONS, _I915_HEAD_BYTES = 0xC0106479, 4, 16
_XE_QUERY, _XE_MEMORY_REGIONS, _XE_HEAD_BYTES = 0xC0286440, 1, 8


class Memory(NamedTuple):
    """Bytes; ``used`` is None where the driver does not count for this process."""

    total: int
    used: int | None


def of_card(node: str, driver: str) -> Memory | None:
    """What the card has of its own, over all its tiles. None for a card without memory of its own, and where the driver
    has no such query or this process may not open the device. Raises ``DeviceLost`` and ``DeviceFault``.
    """
    try:
        regions = _regions(node, driver)
    except OSError as error:
        if error.errno == errno.ENODEV:
            raise DeviceLost(f"{node}: {error.strerror}") from error
        if error.errno not in _NOT_OFFERED:
            raise DeviceFault("driver-error", f"{node}: {error.strerror}") from error
        return None
    if not regions:
        return None
    total, used = sum(region[0] for region in regions), sum(region[1] for region in regions)
    # To a process without CAP_PERFMON both drivers say that nothing is in use, which is so on no card.
    return Memory(total, used if 0 < used <= total else None)


def _regions(node: str, driver: str) -> list[tuple[int, int]]:
    descriptor = os.open(node, os.O_RDWR | os.O_CLOEXEC)
    try:
        return list(_QUERIES[driver](descriptor))
    finally:
        os.close(descriptor)


def _i915(descriptor: int) -> Iterator[tuple[int, int]]:
    item = _I915Item(query_id=_I915_MEMORY_REGIONS)
    query = _I915Query(num_items=1, items_ptr=ctypes.addressof(item))
    fcntl.ioctl(descriptor, _I915_QUERY, query)
    answer = ctypes.create_string_buffer(_length(item.length))
    item.data_ptr = ctypes.addressof(answer)
    fcntl.ioctl(descriptor, _I915_QUERY, query)
    _length(item.length)
    count = int.from_bytes(answer.raw[:4], "little")
    for region in _rows(_I915Region, answer, _I915_HEAD_BYTES, count):
        if region.memory_class == _DEVICE_MEMORY:
            yield region.probed_size, region.probed_size - region.unallocated_size


def _xe(descriptor: int) -> Iterator[tuple[int, int]]:
    query = _XeQuery(query=_XE_MEMORY_REGIONS)
    fcntl.ioctl(descriptor, _XE_QUERY, query)
    answer = ctypes.create_string_buffer(_length(query.size))
    query.data = ctypes.addressof(answer)
    fcntl.ioctl(descriptor, _XE_QUERY, query)
    count = int.from_bytes(answer.raw[:4], "little")
    for region in _rows(_XeRegion, answer, _XE_HEAD_BYTES, count):
        if region.memory_class == _DEVICE_MEMORY:
            yield region.total_size, region.used


_QUERIES: dict[str, Callable[[int], Iterator[tuple[int, int]]]] = {"i915": _i915, "xe": _xe}


def _length(length: int) -> int:
    """How long the kernel says the answer is; for an item that it refuses, i915 puts an error there."""
    if length < 0:
        raise OSError(-length, os.strerror(-length))
    if not 0 < length <= _MOST_BYTES:
        raise OSError(errno.EINVAL, f"an answer of {length} bytes")
    return length


def _rows(kind: type[_Region], answer: ctypes.Array[ctypes.c_char], head: int, count: int) -> Iterator[_Region]:
    size = ctypes.sizeof(kind)
    for place in range(min(count, (len(answer) - head) // size)):
        yield kind.from_buffer_copy(answer.raw, head + place * size)
