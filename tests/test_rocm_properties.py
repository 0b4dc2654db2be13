"""What holds for every ROCm mask on every AMD host, beside an oracle of HIP's selection by numbers."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.inventory import Inventory
from exporter.masks import invert
from exporter.model import Context, Device, DeviceKey, Inversion
from tests.mask_hosts import Case, Host, amd_cases, amd_hosts, assert_sound, told, usual
from tests.strategies import Rack, shortest_prefix
from tests.test_cuda_properties import assert_the_same_once_known, keys_of

ROCR, HIP, CUDA, VIRTUAL = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GGML_CUDA_DEVICES"

BLANKS = ("", "", " ", "\t", "\r\n", " \v\f")
SPELLINGS = ("{}", "+{}", "{:#x}", "{:#X}", "+{:#x}", "0{:o}", "+00{:o}")


def answer(env: dict[str, str], inventory: Inventory, **known: Any) -> list[DeviceKey]:
    """The answer with all known; it must be one."""
    outcome = invert("rocm", env, inventory, usual(inventory, **known))
    assert isinstance(outcome, Inversion), outcome
    return keys_of(outcome)


def initialised(devices: Sequence[Device]) -> list[DeviceKey]:
    """The devices less those that ROCr or HIP drops."""
    return [device.key for device in devices if device.hsa_isa_ok is not False and device.hip_ok is not False]


def survivors(host: Host) -> list[Device]:
    """What ROCr hands over to HIP without a mask."""
    return [device for device in host.cards if device.hsa_isa_ok is not False]


def number(place: int, chance: Random) -> str:
    """A place as C may spell it."""
    text = "-0" if not place and chance.random() < 0.2 else chance.choice(SPELLINGS).format(place)
    return chance.choice(BLANKS) + text + chance.choice(BLANKS)


def unique(case: Case) -> list[Device]:
    """The chosen devices that have a UUID of their own."""
    uuids = [device.uuid for device in case.host.cards]
    return [device for device in case.chosen if device.uuid and uuids.count(device.uuid) == 1]


def start(device: Device, case: Case, chance: Random) -> str:
    """The device's UUID, or a start of it that no other device has."""
    return device.uuid[: max(chance.randint(4, 20), shortest_prefix(Rack(*case.host), device))]


# --- masks made from an inventory


@given(amd_hosts)
def test_rocrs_numbers_invert_to_those_devices(case: Case) -> None:
    """A mask of places in KFD order, spelled in any way that C reads, gives back its devices in its order."""
    chance = Random(case.seed)
    mask = ",".join(number(case.host.cards.index(device), chance) for device in case.chosen)
    assert answer({ROCR: mask}, case.host.inventory) == initialised(case.chosen)


@given(amd_hosts)
def test_rocrs_uuids_invert_to_those_devices(case: Case) -> None:
    """A mask of UUIDs or unique starts of them, in any case, gives back its devices in its order."""
    chance = Random(case.seed)
    starts = (start(device, case, chance) for device in unique(case))
    mask = ",".join("".join(chance.choice((char, char.upper())) for char in text) for text in starts)
    assert answer({ROCR: mask}, case.host.inventory) == initialised(unique(case))


@given(amd_hosts, st.booleans(), st.booleans())
def test_rocrs_whole_uuids_need_neither_order_nor_reach(case: Case, whole: bool, reach_known: bool) -> None:
    """A mask of whole UUIDs of unpartitioned cards gives back its cards, whatever else the host has or the process can
    open, and although the KFD's order is not known.
    """
    chosen = [device for device in unique(case) if device.parent is None]
    devices = tuple(replace(device, kfd_node=None) for device in case.host.inventory.devices)
    some = frozenset({device.key for device in chosen} | (case.context.reach or frozenset()))
    context = replace(usual(case.host.inventory), reach=some if reach_known else None)
    outcome = invert("rocm", {ROCR: ",".join(device.uuid for device in chosen)}, Inventory(devices, whole), context)
    assert told(outcome) == initialised(chosen)


@given(amd_hosts)
def test_hips_entries_invert_to_those_devices(case: Case) -> None:
    """A mask of plain numbers, UUIDs and unique starts of UUIDs gives back its devices in its order."""
    chance, listed = Random(case.seed), survivors(case.host)
    chosen = [device for device in case.chosen if device in listed]
    starts = {device.key: start(device, case, chance) for device in unique(case) if chance.random() < 0.5}
    mask = ",".join(starts.get(device.key, str(listed.index(device))) for device in chosen)
    assert answer({HIP: mask}, case.host.inventory) == initialised(chosen)


# --- one filter over the other


def selected(mask: str, listed: Sequence[DeviceKey]) -> list[DeviceKey]:
    """What HIP's mask of numbers leaves of a list: numbers as they print, a repeat skipped, the rest ends it."""
    numbers = {str(place): key for place, key in enumerate(listed)}
    chosen: dict[DeviceKey, None] = {}
    for entry in mask.removesuffix(",").split(","):
        if entry not in numbers:
            break
        chosen[numbers[entry]] = None
    return list(chosen)


_hip_entry = st.one_of(st.integers(0, 9).map(str), st.integers(0, 2).map(str), st.sampled_from((" 1", "01", "+1", "")))
_hip_masks = st.lists(_hip_entry, max_size=6).map(",".join)


@given(amd_cases, _hip_masks)
def test_hip_counts_what_rocr_leaves(case: Case, mask: str) -> None:
    """HIP's numbers select among the devices that ROCr's mask alone leaves, in the order that it gives them."""
    env = {name: text for name, text in case.env.items() if name == ROCR}
    before = invert("rocm", env, case.host.inventory, usual(case.host.inventory, api="hsa"))
    if isinstance(before, Inversion):
        ready = initialised(case.host.cards)
        expected = [key for key in selected(mask, keys_of(before)) if key in ready]
        assert answer(env | {HIP: mask}, case.host.inventory) == expected


@given(amd_cases, st.sampled_from((None, '""', ' ""  ', "as drawn")))
def test_hip_reads_cudas_variable_where_its_own_is_unset(case: Case, text: str | None) -> None:
    """`CUDA_VISIBLE_DEVICES` counts exactly where `HIP_VISIBLE_DEVICES` is unset, or nothing between quotes."""
    both = {name: value for name, value in case.env.items() if name in (HIP, CUDA)}
    if text != "as drawn":
        both = {name: value for name, value in (both | {HIP: text}).items() if value is not None}
    counts = CUDA if both.get(HIP, '""').strip(" ") == '""' else HIP
    alone = {} if counts not in both else {HIP: both[counts]}
    context = usual(case.host.inventory)
    outcomes = [told(invert("rocm", env, case.host.inventory, context)) for env in (both, alone)]
    assert outcomes[0] == outcomes[1]


# --- any text at all


@given(amd_cases, st.booleans())
def test_any_text_ends_in_an_answer_or_a_refusal(case: Case, whole: bool) -> None:
    """No environment raises; a refusal says why, and an answer names devices of the inventory within reach, none twice
    without virtual devices.
    """
    inventory = replace(case.known, whole=whole)
    outcome = invert("rocm", case.env, inventory, case.context)
    assert_sound(outcome, inventory, case.context.reach)
    if isinstance(outcome, Inversion) and VIRTUAL not in case.env:
        assert len(set(keys_of(outcome))) == len(outcome.devices)


@given(amd_cases)
def test_the_order_of_discovery_changes_nothing(case: Case) -> None:
    """Two inventories with the same devices in another order give the same outcome."""
    before = invert("rocm", case.env, case.known, case.context)
    assert invert("rocm", case.env, case.shuffled(), case.context) == before


# --- knowing less


def assert_known_enough(case: Case, known: Inventory, less: Context, full: Context) -> None:
    """What is answered from less is the answer once all is known."""
    before = invert("rocm", case.env, known, less)
    after = invert("rocm", case.env, case.host.inventory, full)
    assert_the_same_once_known(before, after, case.host.inventory)


@given(amd_cases)
def test_an_answer_without_some_devices_stays_the_answer(case: Case) -> None:
    """What is answered over an inventory that is not whole is the answer once the other devices are known."""
    context = usual(case.host.inventory)
    assert_known_enough(case, case.host.keep(case.chosen), context, context)


@given(amd_cases)
def test_an_answer_without_nodes_or_uuids_stays_the_answer(case: Case) -> None:
    """What is answered while the nodes or the UUIDs of some devices are not known is the answer once they are."""
    context = usual(case.host.inventory)
    assert_known_enough(case, case.known, context, context)


@given(amd_cases)
def test_an_answer_without_the_reach_stays_the_answer(case: Case) -> None:
    """What is answered without knowing the reach is the answer of a workload that can open every device."""
    context = usual(case.host.inventory)
    assert_known_enough(case, case.known, replace(context, reach=None), context)


_programs = st.fixed_dictionaries(
    {"api": st.sampled_from(("hip", "hsa", "opencl")), "frontend": st.sampled_from(("none", "llama.cpp"))}
)


@given(amd_cases, _programs, st.sampled_from((("api",), ("frontend",), ("api", "frontend"))))
def test_an_answer_without_the_program_stays_the_answer(
    case: Case, program: dict[str, Any], unknown: tuple[str, ...]
) -> None:
    """What is answered without knowing the interface or the front end is the answer whichever they are."""
    full = usual(case.host.inventory, **program)
    assert_known_enough(case, case.host.inventory, replace(full, **dict.fromkeys(unknown)), full)
