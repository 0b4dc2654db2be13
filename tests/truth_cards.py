"""Pretend cards whose every reading encodes whose it is and when it was so, and what each vendor's fakes say of them.

The arithmetic is the tests' own; nothing here comes from the exporter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.fakes import amd_smi, nvml, ze_loader
from tests.fakes.sysfs import AmdCard, Card, Client, IntelCard, KfdNode, OtherCard

UTILIZATION, TEMPERATURE = "gpu_utilization_percent", "gpu_temperature_celsius"
FREE, USED, TOTAL = "gpu_memory_free_bytes", "gpu_memory_used_bytes", "gpu_memory_total_bytes"
MEMORY = (FREE, USED, TOTAL)
READINGS = (UTILIZATION, *MEMORY, TEMPERATURE)
VENDORS = ("nvidia", "amd", "intel")

RESERVED = 512 << 20
MOST_TICKS = 1 << 18
_PAGE = 4096


def free_of(number: int, tick: int) -> int:
    """Bytes: the card's number in units of 4 GiB, and the tick in pages."""
    return (number << 32) + tick * _PAGE


def total_of(number: int) -> int:
    """Bytes: more than is ever free or reserved; less what is free it is another number for each card, too."""
    return (2 * number + 1) << 32


def temperature_of(number: int, tick: int) -> int:
    """Degrees, 20 to 116, which is what a sensor may say."""
    return 20 + (11 * number + tick) % 97


def utilization_of(number: int, tick: int) -> int:
    """Percent, 1 to 100: 0 is never true here."""
    return 1 + (13 * number + tick) % 100


def busy_of(number: int) -> int:
    """Percent of an Intel card, whose share comes from counters that rise at one rate for ever: 3 to 92."""
    return 3 + number * 7 % 90


@dataclass(frozen=True, kw_only=True)
class Pretend:
    """A card, or a part of one: what it is called, and the ``number`` that is in all its readings.

    ``index`` is NVML's where it is not the place in the list. ``mig`` cards have MIG devices for ``parts``, AMD's have
    partitions. ``node`` is the KFD's; ``state`` the PCI power state.
    """

    number: int
    vendor: str
    pci: str
    uuid: str = ""
    partition: str = ""
    parts: tuple[Pretend, ...] = ()
    mig: bool = False
    index: int | None = None
    node: int = 0
    power: str = "active"

    @property
    def labels(self) -> tuple[str, str, str, str]:
        """Vendor, PCI address, UUID and partition: who it is on a page."""
        return self.vendor, self.pci, self.uuid, self.partition

    @property
    def given(self) -> frozenset[str]:
        """The readings that it has when all is well, a counter's from the second page on."""
        if self.partition:
            return frozenset(MEMORY) if self.vendor == "nvidia" else frozenset((UTILIZATION, TOTAL))
        return frozenset(READINGS) - ({UTILIZATION} if self.mig else frozenset())

    def value(self, name: str, tick: int) -> int:
        """The reading of that name at that tick."""
        match name:
            case "gpu_utilization_percent":
                return busy_of(self.number) if self.vendor == "intel" else utilization_of(self.number, tick)
            case "gpu_temperature_celsius":
                return temperature_of(self.number, tick)
            case "gpu_memory_total_bytes":
                return total_of(self.number)
            case "gpu_memory_free_bytes":
                return free_of(self.number, tick)
        reserved = RESERVED if self.vendor == "nvidia" else 0
        return total_of(self.number) - free_of(self.number, tick) - reserved


def nvidia(number: int, bus: int, **more: Any) -> Pretend:
    """An NVIDIA card on that bus."""
    uuid = f"GPU-{number:08x}-0000-4000-8000-{number * 7919:012x}"
    return Pretend(number=number, vendor="nvidia", pci=f"0000:{bus:02x}:00.0", uuid=uuid, **more)


def mig(number: int, board: Pretend, partition: str) -> Pretend:
    """A MIG device of the board, ``"<GPU instance>/<compute instance>"``."""
    uuid = f"MIG-{number:08x}-0000-5000-8000-{number * 7919:012x}"
    return Pretend(number=number, vendor="nvidia", pci=board.pci, uuid=uuid, partition=partition)


def amd(number: int, bus: int, node: int, **more: Any) -> Pretend:
    """An AMD card on that bus, and its node of the KFD."""
    uuid = f"GPU-{number << 32 | bus:016x}"
    return Pretend(number=number, vendor="amd", pci=f"0000:{bus:02x}:00.0", uuid=uuid, node=node, **more)


def partition(number: int, board: Pretend, place_: int) -> Pretend:
    """A partition of an AMD card; its number is smaller than the board's, and so is its memory."""
    uuid = f"GPU-{number << 32 | place_:016x}"
    node = board.node + place_
    return Pretend(number=number, vendor="amd", pci=board.pci, uuid=uuid, partition=str(place_), node=node)


def intel(number: int, bus: int, **more: Any) -> Pretend:
    """A discrete Intel card on that bus."""
    return Pretend(number=number, vendor="intel", pci=f"0000:{bus:02x}:00.0", **more)


N0, N1, N2 = nvidia(1, 0x21), nvidia(2, 0x41), nvidia(3, 0x61)
A0, A1 = amd(21, 0x03, node=2), amd(22, 0xC4, node=1)  # the KFD has them the other way round
I0, I1 = intel(41, 0x07), intel(42, 0x09)
CARDS = (N0, N1, N2, A0, A1, I0, I1)


# --- what the fakes say of them


def of_nvml(place: int, card: Pretend, tick: int, answers: Mapping[int, Mapping[str, Any]]) -> nvml.Gpu:
    """NVML's card; ``answers`` has what it says otherwise, by the card's number."""
    gpu = nvml.Gpu(
        index=place if card.index is None else card.index,
        uuid=card.uuid,
        pci=card.pci.rjust(len("00000000:17:00.0"), "0"),
        name=f"NVIDIA Pretend {card.number}",
        minor=card.number,
        util=None if card.mig else card.value(UTILIZATION, tick),
        temp=card.value(TEMPERATURE, tick),
        mig=1 if card.mig else 0 if card.parts else "none",
        instances=tuple(_of_mig(card.parts.index(part), part, tick, answers) for part in card.parts if card.mig),
        reserved=RESERVED,
        **_memory(card, tick),
    )
    return replace(gpu, **answers.get(card.number, {}))


def _of_mig(place: int, part: Pretend, tick: int, answers: Mapping[int, Mapping[str, Any]]) -> nvml.Mig:
    gpu_instance, compute_instance = map(int, part.partition.split("/"))
    found = nvml.Mig(
        index=place,
        uuid=part.uuid,
        gi=gpu_instance,
        ci=compute_instance,
        name=f"NVIDIA Pretend {part.number}",
        **_memory(part, tick),
    )
    return replace(found, **answers.get(part.number, {}))


def _memory(card: Pretend, tick: int) -> dict[str, Any]:
    return {"total": card.value(TOTAL, tick), "free": card.value(FREE, tick), "used": card.value(USED, tick)}


def of_sysman(place: int, card: Pretend, tick: int, answers: Mapping[int, Mapping[str, Any]]) -> ze_loader.Gpu:
    """Sysman's card: one engine group of all, one module of memory; the temperature is the kernel's to tell."""
    size = card.value(TOTAL, tick)
    known = ze_loader.Memory(physical=size, size=size, free=card.value(FREE, tick))
    memory = replace(known, **answers.get(card.number, {}))
    engine = ze_loader.Engine(rate=busy_of(card.number) / 100)
    name = f"Intel Pretend {card.number}"
    return ze_loader.Gpu(index=place, bdf=card.pci, name=name, device_id=0xE20B, engines=(engine,), memory=(memory,))


def of_smi(cards: Sequence[Pretend], tick: int) -> Iterator[amd_smi.Gpu]:
    """AMD SMI's processors: a card, or each of its partitions, which have the partition for a PCI function."""
    for card in cards:
        for part in card.parts or (card,):
            yield amd_smi.Gpu(
                bdf=f"{card.pci[:-1]}{part.partition or 0}",
                socket=card.pci,
                uuid=part.uuid,
                name=f"AMD Pretend {card.number}",
                vendor_id=0x1002,
                device_id=0x74A1,
                kfd_id=part.number,
                node_id=part.node,
                partition_id=int(part.partition or 0),
                gfx=part.value(UTILIZATION, tick),
                umc=65535,
                mm=65535,
                vram_total=part.value(TOTAL, tick),
                vram_used=part.value(USED, tick),
                edge=part.value(TEMPERATURE, tick),
            )


def of_sysfs(card: Pretend, minor: int, tick: int, *, bound: bool = True) -> Card:
    """The kernel's card; ``bound``: the vendor's driver has taken it."""
    match card.vendor:
        case "amd":
            return _amd_card(card, minor, tick, bound)
        case "intel":
            return IntelCard(
                pci=card.pci,
                device_id="0xe20b",
                driver="xe" if bound else "",
                minor=minor,
                temperatures={"pkg": card.value(TEMPERATURE, tick)},
                runtime_status=card.power,
            )
    return OtherCard(pci=card.pci, driver="nvidia" if bound else "", runtime_status=card.power)


def _amd_card(card: Pretend, minor: int, tick: int, bound: bool) -> AmdCard:
    nodes = tuple(
        KfdNode(
            node=part.node,
            unique_id=int(part.uuid[4:], 16),
            partition=int(part.partition) if part.partition else None,
            memory=total_of(part.number),
        )
        for part in card.parts or (card,)
    )
    return AmdCard(
        pci=card.pci,
        driver="amdgpu" if bound else "",
        minor=minor,
        unique_id=int(card.uuid[4:], 16),
        kfd_nodes=nodes,
        busy=card.value(UTILIZATION, tick),
        vram_total=card.value(TOTAL, tick),
        vram_used=card.value(USED, tick),
        temperatures={"edge": card.value(TEMPERATURE, tick)},
        product_name=f"AMD Pretend {card.number}",
        compute_partition={1: "SPX", 2: "DPX", 4: "QPX", 8: "CPX"}.get(len(card.parts), "SPX"),
        memory_partition="NPS1",
        runtime_status=card.power,
    )


def files(card: Pretend, tick: int) -> dict[str, str]:
    """Those of the card's files in sysfs that have another text at every tick."""
    degrees = f"{card.value(TEMPERATURE, tick) * 1000}\n"
    if card.vendor == "amd":
        busy, used = card.value(UTILIZATION, tick), card.value(USED, tick)
        files = {"gpu_busy_percent": f"{busy}\n", "mem_info_vram_used": f"{used}\n"}
        return {**files, "hwmon/*/temp1_input": degrees}
    return {"hwmon/*/temp2_input": degrees} if card.vendor == "intel" else {}


def client(card: Pretend, tick: int) -> Client:
    """The one program that uses an Intel card, for as large a share as Sysman tells."""
    cycles = {"ccs": (busy_of(card.number) * tick, 100 * tick)}
    return Client(pid=1000 + card.number, pci=card.pci, client_id=card.number, cycles=cycles)


def client_text(card: Pretend, tick: int) -> str:
    """The text of that program's file in ``fdinfo``."""
    (busy, total), *_ = client(card, tick).cycles.values()
    head = f"drm-driver:\txe\ndrm-client-id:\t{card.number}\ndrm-pdev:\t{card.pci}\n"
    return f"{head}drm-cycles-ccs:\t{busy}\ndrm-total-cycles-ccs:\t{total}\n"
