"""The pretend Vulkan's other half: builds ``libvulkan.so.1`` from ``vulkan.c`` and writes the file that drives it.

``vulkan.c`` says what a line of that file means. A program sees the pretend devices when it is started with
:meth:`FakeVulkan.environment` in its environment; the dynamic loader reads ``LD_LIBRARY_PATH`` only then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.fakes import shared_object

__all__ = ["CALLS", "FORBIDDEN", "SONAME", "SOURCE", "FakeVulkan", "Gpu", "build", "build_or_skip"]

NAME = "pretend Vulkan"
SONAME = "libvulkan.so.1"
SOURCE = Path(__file__).with_name("vulkan.c")
CALLS = frozenset(re.findall(r"^(?:VOID_)?(?:CALL|EXPORTED)\(((?:vk|fake)\w+)", SOURCE.read_text(), re.MULTILINE))
"""Every symbol that the library exports, and so every CALL that a rule may name beside ``*``."""

FORBIDDEN = frozenset({"vkCreateDevice", "vkAllocateMemory"})
"""The calls that would make a context or take memory: none of them may ever stand in the record."""


def build(directory: Path, without: Sequence[str] = ()) -> Path:
    """``directory``, which now holds the library without the symbols ``without``: what an older loader lacks."""
    shared_object.check_known(NAME, without, CALLS)
    switches = [*shared_object.shared(SONAME), *(f"-DWITHOUT_{symbol}" for symbol in without)]
    return shared_object.compiled(shared_object.compiler(), SOURCE, directory / SONAME, switches).parent


def build_or_skip(directory: Path, without: Sequence[str] = ()) -> Path:
    """As :func:`build`; where there is no C compiler the test is skipped with the reason, but fails if ``CI=true``."""
    return shared_object.built_or_skipped(NAME, lambda: build(directory, without))


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A device as one driver shows it; a card with two drivers is two of them. What is None is left out.

    Without ``pci`` it is on no bus, as llvmpipe is. ``pci_info`` is whether it has VK_EXT_pci_bus_info: with None it
    has where it is on a bus. Without ``uuid`` its UUID is its PCI address, so that it is the same under every driver.
    """

    driver: str
    pci: str | None = None
    vendor_id: int | None = None
    device_id: int | None = None
    type: Literal["discrete", "integrated", "virtual", "cpu", "other"] | None = None
    uuid: str | None = None
    name: str | None = None
    fp16: bool | None = None
    accessible: bool | None = None
    boot_vga: bool | None = None
    pci_info: bool | None = None


class FakeVulkan(shared_object.RecordedState):
    """The state file and the record in ``directory``, for the library that :func:`build` put there, or in ``library``.

    Once the file is removed there is no driver: ``vkCreateInstance`` answers VK_ERROR_INCOMPATIBLE_DRIVER.
    """

    def __init__(self, directory: Path, library: Path | None = None) -> None:
        super().__init__(directory / "vulkan.state")
        self.folder = library or directory

    def environment(self) -> dict[str, str]:
        """What a program's environment needs at its start, to be laid over ``os.environ``."""
        return {
            "LD_LIBRARY_PATH": shared_object.search_path(self.folder),
            "FAKE_VULKAN_STATE": str(self.state_path),
            "FAKE_VULKAN_RECORD": str(self.record_path),
        }

    def write(
        self, gpus: Sequence[Gpu], *, instance: str = "1.3", layer: bool = True, lines: Sequence[str] = ()
    ) -> None:
        """Makes this the state, all at once; ``gpus`` are in the order in which the drivers give them."""
        self.put([*_head(instance, layer=layer), *_devices(gpus), *shared_object.checked(NAME, lines, CALLS)])


def _head(instance: str, *, layer: bool) -> Iterator[str]:
    yield f"instance {instance}"
    if not layer:
        yield "layer 0"


def _devices(gpus: Sequence[Gpu]) -> Iterator[str]:
    for place, gpu in enumerate(gpus):
        yield shared_object.device_line("gpu", place, device=gpu, without=())
