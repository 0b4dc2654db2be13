"""Vendors' libraries and drivers: missing, broken, replaced under a running worker, unloaded and loaded."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

from tests.fakes import nvml
from tests.faults.expectation import WELL, Expect
from tests.faults.matrix import Act, Row, Scene, mend, signal_worker
from tests.truth import Libraries
from tests.truth_cards import I0, I1, MEMORY, VENDORS

_TEXT = b"This is no library.\n"


def _own_nvml(built: Libraries, directory: Path) -> Libraries:
    """NVML in a folder that this row alone uses."""
    folder = directory / "library"
    shutil.copytree(built.nvml, folder)
    return built._replace(nvml=folder)


def _own_ze(built: Libraries, directory: Path) -> Libraries:
    """The Level Zero loader, likewise."""
    assert built.ze is not None
    (directory / "library").mkdir()
    return built._replace(ze=Path(shutil.copy2(built.ze, directory / "library" / built.ze.name)))


def _nvml(scene: Scene) -> Path:
    return scene.libraries.nvml / nvml.SONAME


def _ze(scene: Scene) -> Path:
    assert scene.libraries.ze is not None
    return scene.libraries.ze


def _put_aside(path: Path) -> None:
    if not path.with_suffix(".aside").exists():
        shutil.copy2(path, path.with_suffix(".aside"))
    path.unlink(missing_ok=True)


def _put_back(path: Path) -> None:
    path.unlink(missing_ok=True)
    shutil.copy2(path.with_suffix(".aside"), path)


def _broken_nvml(content: bytes | None) -> Act:
    def act(scene: Scene) -> None:
        _put_aside(_nvml(scene))
        if content is not None:
            _nvml(scene).write_bytes(content)

    return act


def _broken_ze(content: bytes | None) -> Act:
    def act(scene: Scene) -> None:
        _put_aside(_ze(scene))
        if content is not None:
            _ze(scene).write_bytes(content)

    return act


def _ze_is_back(scene: Scene) -> None:
    """A worker looks for it once, when it is started."""
    _put_back(_ze(scene))
    signal_worker("intel", signal.SIGKILL)(scene)


def _another_nvml(scene: Scene) -> None:
    """As a package manager replaces it; the worker goes on with the file that it has opened."""
    _put_aside(_nvml(scene))
    nvml.build(scene.libraries.nvml, without=["nvmlDeviceGetMemoryInfo_v2"])


def _overwritten_nvml(scene: Scene) -> None:
    """As no package manager does: in place, under the worker, whose next call finds no code any more."""
    shutil.copy2(_nvml(scene), _nvml(scene).with_suffix(".aside"))
    _nvml(scene).write_bytes(b"")


def _unloaded(vendor: str) -> Act:
    """The driver leaves its cards; NVML's calls say so."""

    def act(scene: Scene) -> None:
        bound = scene.truth.host.bound - {vendor}
        scene.truth.change(bound=bound, loaded=scene.truth.host.loaded and vendor != "nvidia")

    return act


def _loaded(scene: Scene) -> None:
    scene.truth.change(bound=frozenset(VENDORS), loaded=True)


def _down(vendor: str, reason: str) -> Expect:
    return Expect(down={vendor: reason}, counted=[(vendor, reason.split("|", maxsplit=1)[0])])


WITHOUT_SYSMAN = Expect(without=dict.fromkeys((I0, I1), MEMORY))
CONTENTS = {"missing": None, "empty": b"", "a text": _TEXT}

ROWS = [
    *(
        Row(
            name=f"the library is {what} at the start: nvidia",
            when="start",
            libraries=_own_nvml,
            inflict=_broken_nvml(content),
            heal=lambda scene: _put_back(_nvml(scene)),
            at_once=_down("nvidia", "library-missing"),
            later=_down("nvidia", "library-missing"),
        )
        for what, content in CONTENTS.items()
    ),
    *(
        Row(
            name=f"the library is {what} at the start: intel",
            when="start",
            libraries=_own_ze,
            inflict=_broken_ze(content),
            heal=_ze_is_back,
            at_once=WITHOUT_SYSMAN,
            later=WITHOUT_SYSMAN,
            touches=("intel",),
        )
        for what, content in CONTENTS.items()
        if content != b""
    ),
    Row(
        name="the library is removed under a running worker: nvidia",
        libraries=_own_nvml,
        inflict=_broken_nvml(None),
        heal=lambda scene: _put_back(_nvml(scene)),
    ),
    Row(
        name="the library is replaced under a running worker: nvidia",
        libraries=_own_nvml,
        inflict=_another_nvml,
        heal=lambda scene: _put_back(_nvml(scene)),
    ),
    Row(
        name="the library is overwritten under a running worker: nvidia",
        libraries=_own_nvml,
        inflict=_overwritten_nvml,
        heal=lambda scene: _put_back(_nvml(scene)),
        at_once=Expect(down={"nvidia": "crashed"}),
        later=_down("nvidia", "library-missing"),
    ),
    *(
        Row(
            name=f"the driver is unloaded, and loaded: {vendor}",
            inflict=_unloaded(vendor),
            heal=_loaded,
            at_once=_down(vendor, "driver-not-loaded"),
            later=_down(vendor, "driver-not-loaded"),
        )
        for vendor in VENDORS
    ),
    *(
        Row(
            name=f"the driver is not loaded at the start: {vendor}",
            when="start",
            inflict=_unloaded(vendor),
            heal=_loaded,
            at_once=Expect(down={vendor: "driver-not-loaded"}),
            later=_down(vendor, "driver-not-loaded"),
            again=mend,
        )
        for vendor in VENDORS
    ),
    Row(
        name="the driver is of another version than its library: nvidia",
        inflict=lambda scene: scene.truth.rules("nvidia", "fault * * 18"),
        at_once=_down("nvidia", "driver-mismatch"),
        later=_down("nvidia", "driver-mismatch"),
    ),
    Row(
        name="the driver is unloaded while a scrape waits: nvidia",
        when="waiting",
        hold={"nvidia": ("slow nvmlDeviceGetMemoryInfo_v2 * 1000",)},
        inflict=_unloaded("nvidia"),
        heal=_loaded,
        at_once=_down("nvidia", "driver-not-loaded"),
        later=_down("nvidia", "driver-not-loaded"),
        healed=WELL,
    ),
]
