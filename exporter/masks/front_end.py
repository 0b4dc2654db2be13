"""llama.cpp's virtual devices, which its CUDA and HIP builds make alike, over the runtime's own list."""

from __future__ import annotations

import re
from collections.abc import Mapping

from exporter.masks.base import RefusedError
from exporter.model import DeviceKey

VIRTUAL = "GGML_CUDA_DEVICES"

_COUNT = re.compile(r"[ \t\n\v\f\r]*\+?([0-9]{1,9})")
_MOST_VIRTUAL_DEVICES = 16


def virtual(env: Mapping[str, str], keys: list[DeviceKey], frontend: str | None) -> list[DeviceKey]:
    """Virtual device i is on card i mod n; where llama.cpp is not the front end, the variable means nothing.

    Raises :class:`RefusedError` where it is not known whether llama.cpp is, and that makes a difference.
    """
    text = env.get(VIRTUAL)
    match = None if text is None else _COUNT.match(text)
    if not keys or match is None or int(match[1]) == 0 or frontend not in (None, "llama.cpp"):
        return keys
    wanted = min(int(match[1]), _MOST_VIRTUAL_DEVICES)
    devices = [keys[index % len(keys)] for index in range(wanted)]
    if frontend is None and devices != keys:
        raise RefusedError("frontend-order", f"{VIRTUAL}={text}: llama.cpp would number {wanted} virtual devices")
    return devices
