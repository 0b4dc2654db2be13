"""Fills the made parts of ``docs/masks.md``: ``python -m tests.masks_page``."""

from __future__ import annotations

import re
from pathlib import Path

from exporter.inventory import Inventory
from exporter.masks import invert
from exporter.model import Context, Device, DeviceKey, Refusal
from exporter.refusals import REFUSALS
from tests.bench.masks import as_vulkan

PATH = Path(__file__).parent.parent / "docs" / "masks.md"

COLUMNS = {
    "CUDA": ("cuda", "CUDA_VISIBLE_DEVICES"),
    "ROCr": ("rocm", "ROCR_VISIBLE_DEVICES"),
    "HIP": ("rocm", "HIP_VISIBLE_DEVICES"),
    "Level Zero": ("level_zero", "ZE_AFFINITY_MASK"),
    "SYCL": ("sycl", "ONEAPI_DEVICE_SELECTOR"),
    "Vulkan": ("vulkan", "GGML_VK_VISIBLE_DEVICES"),
}
MASKS = (None, "", "3,1", "1,1,0", "0,9,1", "0, 1", "01", "0x1", "+1", "-1", "0,,1", "0,", "1.5", "0,x,1", "4294967297")


def page(text: str) -> str:
    """The page's text with its made parts as the code has them now."""
    for name, part in (("examples", _examples()), ("refusals", _refusals())):
        between = re.compile(rf"(<!-- {name} -->\n).*(<!-- /{name} -->)", re.DOTALL)
        text = between.sub(lambda match, part=part: f"{match[1]}\n{part}\n\n{match[2]}", text)  # type: ignore[misc]
    return text


def _refusals() -> str:
    rows = [f"| `{code}` | {entry.meaning} | {entry.advice} |" for code, entry in REFUSALS.items()]
    return "\n".join(("| reason | meaning | what to do |", "|---|---|---|", *rows))


def _examples() -> str:
    head = " | ".join(("mask", *COLUMNS))
    rows = [" | ".join((_spelled(mask), *(_left(*column, mask) for column in COLUMNS.values()))) for mask in MASKS]
    return "\n".join((f"| {head} |", "|" + "---|" * (len(COLUMNS) + 1), *(f"| {row} |" for row in rows)))


def _spelled(mask: str | None) -> str:
    return "unset" if mask is None else f"`{mask}`" if mask else "set, but empty"


def _left(runtime: str, variable: str, mask: str | None) -> str:
    text = f"level_zero:{mask}" if runtime == "sycl" and mask else mask
    env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} | ({} if text is None else {variable: text})
    cards = tuple(_card(number) for number in range(4))
    inventory = Inventory(cards, vulkan=tuple(as_vulkan(card) for card in cards))
    context = Context(
        reach=frozenset(card.key for card in cards),
        driver="current",
        api="hip",
        probe="same_env",
        multi_driver_library=False,
    )
    outcome = invert(runtime, env, inventory, context)
    if isinstance(outcome, Refusal):
        return f"`{outcome.code}`"
    return " ".join(str(inventory.by_key[device.key].physical_index) for device in outcome.devices) or "none"


def _card(number: int) -> Device:
    address = f"0000:{number + 1}0:00.0"
    return Device(
        key=DeviceKey("any", address),
        physical_index=number,
        pci_bus_id=address,
        uuid=f"GPU-{number:016x}",
        name="card",
        kfd_node=number,
        tiles=1,
        hpc=False,
        integrated=False,
    )


if __name__ == "__main__":
    PATH.write_text(page(PATH.read_text(encoding="utf-8")), encoding="utf-8")
