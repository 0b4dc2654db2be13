"""What a device file's numbers mean: which card it is, or which capability of a MIG instance.

Sources: ``PROCFS/devices`` has the major number of each driver, ``PROCFS/driver/nvidia-caps/mig-minors`` the minor
number of each capability that there can be, and ``SYSFS/dev/char`` the name of a DRM device by its numbers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from exporter.files import read_regular

# What the drivers have always had, for where PROCFS/devices does not tell. KFD's and the capabilities' are dynamic.
_USUAL = {"nvidia": 195, "drm": 226}
_NVIDIA_DRIVERS = ("nvidia", "nvidia-frontend")
_NVIDIA_CONTROL, _NVIDIA_MODESET = 255, 254  # minor numbers: /dev/nvidiactl, /dev/nvidia-modeset
# Up to 191 a DRM minor number tells the kind of the device; later ones are given out as cards come.
_FIRST_RENDER, _LAST_NUMBERED = 128, 191
_MOST_BYTES = 1 << 20  # mig-minors has some thousand lines, whatever cards there are
_MAJOR = re.compile(rb"^ *([0-9]{1,4}) ([\w-]+)$", re.MULTILINE)
_CAPABILITY = re.compile(
    rb"^gpu([0-9]{1,4})/gi([0-9]{1,4})(?:/ci([0-9]{1,4}))?/access ([0-9]{1,7})$", re.MULTILINE | re.ASCII
)


class Numbers:
    """The numbers as they are now; to be made anew once a driver may have been loaded."""

    def __init__(self, procfs: str, sysfs: str) -> None:
        self._procfs, self._sysfs = procfs, sysfs
        self._majors = _majors(procfs)
        self._capabilities: Mapping[int, str] | None = None

    def name(self, number: int) -> str:
        """``nvidia0``, ``renderD128``, ``kfd``, or a capability: ``nvidia0/gi1``, ``nvidia0/gi1/ci0``. Empty for what
        is no card of its own: control devices, DRM's ``card0``, and what is no GPU's.
        """
        driver, minor = self._majors.get(os.major(number), ""), os.minor(number)
        if driver in _NVIDIA_DRIVERS:
            return "" if minor in (_NVIDIA_CONTROL, _NVIDIA_MODESET) else f"nvidia{minor}"
        if driver == "drm":
            return self._render_node(minor)
        if driver == "nvidia-caps":
            return self._capability(minor)
        return driver  # kfd, or none

    def is_control(self, number: int) -> bool:
        """Whether it is /dev/nvidiactl, which every client of NVIDIA's driver has open."""
        return self._majors.get(os.major(number)) in _NVIDIA_DRIVERS and os.minor(number) == _NVIDIA_CONTROL

    def _render_node(self, minor: int) -> str:
        name = f"renderD{minor}"
        if minor <= _LAST_NUMBERED:
            return name if minor >= _FIRST_RENDER else ""
        major = next(number for number, driver in self._majors.items() if driver == "drm")
        try:
            target = Path(f"{self._sysfs}/dev/char/{major}:{minor}").readlink()
        except OSError:
            return ""
        return name if target.name == name else ""

    def _capability(self, minor: int) -> str:
        if self._capabilities is None:
            self._capabilities = _capabilities(self._procfs)
        return self._capabilities.get(minor, "")


def instances(names: Collection[str]) -> frozenset[str]:
    """The names, where of capabilities only the compute instances remain whose GPU instance's is among them too: a
    process needs both.
    """
    return frozenset(name for name in names if "/" not in name or ("/ci" in name and name.rpartition("/")[0] in names))


def _majors(procfs: str) -> dict[int, str]:
    """Drivers of GPUs by major number. The file's second half is for block devices, which have numbers of their own."""
    wanted = (*_NVIDIA_DRIVERS, "nvidia-caps", "drm", "kfd")
    text = _read(f"{procfs}/devices").partition(b"Block devices:")[0]
    found = {name.decode(): int(number) for number, name in _MAJOR.findall(text)}
    if not any(name in found for name in _NVIDIA_DRIVERS):
        found["nvidia"] = _USUAL["nvidia"]
    found.setdefault("drm", _USUAL["drm"])
    return {found[name]: name for name in wanted if name in found}


def _capabilities(procfs: str) -> dict[int, str]:
    """Names by minor number. The file counts GPUs by their minor number, as ``/proc/driver/nvidia/capabilities`` does:
    ``gpu0`` is /dev/nvidia0.
    """
    found = _CAPABILITY.findall(_read(f"{procfs}/driver/nvidia-caps/mig-minors"))
    return {int(minor): _capability_name(*map(bytes.decode, part)) for *part, minor in found}


def _capability_name(gpu: str, gpu_instance: str, compute_instance: str) -> str:
    name = f"nvidia{int(gpu)}/gi{int(gpu_instance)}"
    return f"{name}/ci{int(compute_instance)}" if compute_instance else name


def _read(path: str) -> bytes:
    try:
        return read_regular(path, _MOST_BYTES)
    except OSError:
        return b""
