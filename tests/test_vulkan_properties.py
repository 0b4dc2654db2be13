"""What holds for every mask of ggml's over every Vulkan enumeration."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.inventory import Inventory
from exporter.masks import RUNTIMES, invert
from exporter.model import DeviceKey, Inversion, Refusal, VulkanDevice
from tests.mask_hosts import Case, any_text, assert_sound, sorted_by_the_loader, told, usual, vulkan_cases
from tests.test_cuda_properties import keys_of

MASK = "GGML_VK_VISIBLE_DEVICES"
GPU_KINDS = ("discrete", "integrated")

OTHERS = sorted(
    {name for runtime in RUNTIMES.values() for name in runtime.variables} - set(RUNTIMES["vulkan"].variables)
)


def raw(case: Case) -> tuple[VulkanDevice, ...]:
    """The enumeration."""
    return case.host.inventory.vulkan or ()


def key_of(entry: VulkanDevice, case: Case) -> DeviceKey:
    """The card at the entry's address, or a key that says that it is none."""
    cards = {card.pci_bus_id: card.key for card in case.host.cards}
    return cards.get(entry.pci_bus_id) or DeviceKey("vulkan", f"raw:{entry.raw_position}")


def answer(case: Case, env: dict[str, str]) -> Inversion:
    """The answer with all known; it must be one."""
    outcome = invert("vulkan", env, case.host.inventory, usual(case.host.inventory))
    assert isinstance(outcome, Inversion), outcome
    return outcome


# --- masks made from an enumeration


@given(vulkan_cases, st.lists(st.integers(0, 30), max_size=6), st.sampled_from((",", " ", ", ", ",,", "\t+")))
def test_raw_numbers_give_exactly_those_entries(case: Case, numbers: list[int], between: str) -> None:
    """A mask of raw numbers gives these entries in its order, software and repeats among them."""
    entries = [raw(case)[number % len(raw(case))] for number in numbers]
    outcome = answer(case, {MASK: between.join(str(entry.raw_position) for entry in entries)})
    assert [device.raw_position for device in outcome.devices] == [entry.raw_position for entry in entries]
    assert keys_of(outcome) == [key_of(entry, case) for entry in entries]


@given(vulkan_cases, st.integers(0, 2**70), st.booleans())
def test_a_number_past_the_end_gives_none(case: Case, past: int, negative: bool) -> None:
    """One number past the end, or below 0, loses the whole list."""
    chance = Random(case.seed)
    numbers = [chance.randrange(len(raw(case))) for _ in range(chance.randint(0, 4))]
    wrong = -1 - past % 1000 if negative else (len(raw(case)) + past) % 2**64
    mask = [*numbers, max(wrong, len(raw(case))) if not negative else wrong]
    chance.shuffle(mask)
    assert answer(case, {MASK: ",".join(map(str, mask))}).devices == ()


@given(vulkan_cases, st.sampled_from(("same_env", "clean_env")))
def test_without_a_mask_every_gpu_stands_once(case: Case, probe: str) -> None:
    """Without a mask each discrete or integrated GPU with 16-bit storage is there once, whatever its drivers; and where
    there is none, one device at most.
    """
    outcome = invert("vulkan", {}, case.host.inventory, usual(case.host.inventory, probe=probe))
    gpus = {entry.uuid for entry in raw(case) if entry.kind in GPU_KINDS and entry.fp16_storage}
    if isinstance(outcome, Inversion):
        shown = [raw(case)[device.raw_position or 0] for device in outcome.devices]
        uuids = [entry.uuid for entry in shown if entry.uuid]
        assert len(set(uuids)) == len(uuids)
        assert {entry.uuid for entry in shown} == gpus or (not gpus and len(shown) <= 1)


@given(vulkan_cases, st.dictionaries(st.sampled_from(OTHERS), st.one_of(st.just("0"), any_text), max_size=3))
def test_other_runtimes_variables_change_nothing(case: Case, others: dict[str, str]) -> None:
    """Neither CUDA's variables nor HIP's, Level Zero's or SYCL's change the outcome."""
    before = invert("vulkan", case.env, case.known, case.context)
    assert invert("vulkan", others | case.env, case.known, case.context) == before


# --- any text at all


@given(vulkan_cases, st.booleans(), st.booleans())
def test_any_text_ends_in_an_answer_or_a_refusal(case: Case, whole: bool, enumerated: bool) -> None:
    """No environment raises; a refusal says why, and an answer names software or devices within reach."""
    inventory = Inventory(case.known.devices, whole, case.known.vulkan if enumerated else None)
    assert_sound(invert("vulkan", case.env, inventory, case.context), inventory, case.context.reach)


@given(vulkan_cases)
def test_the_order_of_discovery_changes_nothing(case: Case) -> None:
    """Two inventories with the same devices in another order give the same outcome."""
    before = invert("vulkan", case.env, case.known, case.context)
    assert invert("vulkan", case.env, case.shuffled(), case.context) == before


# --- knowing less


def assert_the_same(before: Inversion | Refusal, after: Inversion | Refusal) -> None:
    """An answer stays the answer; a refusal may become one."""
    if isinstance(before, Inversion):
        assert told(after) == keys_of(before)


@given(vulkan_cases)
def test_an_answer_without_some_cards_stays_the_answer(case: Case) -> None:
    """What is answered over an inventory that is not whole is the answer once the other cards are known."""
    context = usual(case.host.inventory)
    less = replace(case.host.keep(case.chosen), vulkan=case.known.vulkan)
    before = invert("vulkan", case.env, less, context)
    assert_the_same(before, invert("vulkan", case.env, case.host.inventory, context))


@given(vulkan_cases)
def test_an_answer_without_the_reach_stays_the_answer(case: Case) -> None:
    """What is answered without knowing the reach is the answer of a workload that can open every device."""
    context = usual(case.host.inventory)
    before = invert("vulkan", case.env, case.host.inventory, replace(context, reach=None))
    assert_the_same(before, invert("vulkan", case.env, case.host.inventory, context))


@given(vulkan_cases, st.sampled_from(("same_env", "clean_env")))
def test_an_answer_without_an_enumeration_stays_the_answer(case: Case, probe: str) -> None:
    """What is answered without an enumeration, or without knowing how one was made, is the answer once that is known;
    unless the loader does not sort it.
    """
    inventory = sorted_by_the_loader(case.host)
    context = usual(inventory, probe=probe)
    after = invert("vulkan", case.env, inventory, context)
    assert_the_same(invert("vulkan", case.env, inventory, replace(context, probe=None)), after)
    assert_the_same(invert("vulkan", case.env, replace(inventory, vulkan=None), context), after)
