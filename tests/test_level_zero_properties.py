"""What holds for every Level Zero mask on every Intel host."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.inventory import Inventory, narrowed, pci_sort_key
from exporter.masks import invert
from exporter.model import Context, Device, DeviceKey, Inversion
from tests.mask_hosts import Case, assert_sound, card_of, intel_cases, intel_hosts, is_subsequence, told, usual
from tests.test_cuda_properties import assert_the_same_once_known, keys_of

MASK, HIERARCHY, PCI_ORDER = "ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY", "ZE_ENABLE_PCI_ID_DEVICE_ORDER"

hierarchies = st.sampled_from(("COMPOSITE", "FLAT", "COMBINED"))


def tiles_of(card: Device) -> list[DeviceKey]:
    """The keys of a card's tiles; a card of one tile is that tile."""
    count = card.tiles or 1
    return [card.key if count == 1 else narrowed(card, [tile]).key for tile in range(count)]


# --- masks made from an inventory


@given(intel_hosts, hierarchies, st.booleans())
def test_positions_select_what_stands_there(case: Case, hierarchy: str, by_address: bool) -> None:
    """A mask of positions in any order leaves what stands there in the driver's list, in the order of that."""
    cards, chance = list(case.host.cards), Random(case.seed)
    if by_address:
        cards.sort(key=lambda card: pci_sort_key(card.pci_bus_id))
    listed = [key for card in cards for key in ([card.key] if hierarchy == "COMPOSITE" else tiles_of(card))]
    chosen = chance.sample(range(len(listed)), chance.randint(1, len(listed)))
    env = {MASK: ",".join(map(str, chosen)), HIERARCHY: hierarchy, PCI_ORDER: str(int(by_address))}
    outcome = invert("level_zero", env, case.host.inventory, usual(case.host.inventory, space="mask_index"))
    assert told(outcome) == [listed[position] for position in sorted(chosen)]


@given(intel_hosts, st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), min_size=1, max_size=6))
def test_tiles_of_one_card_become_one_device(case: Case, places: list[tuple[int, int]]) -> None:
    """Under COMPOSITE a card with some tiles selected is one device: these tiles, or the card if they are all."""
    env = {MASK: ",".join(f"{card}.{tile}" for card, tile in places), HIERARCHY: "COMPOSITE"}
    outcome = invert("level_zero", env, case.host.inventory, usual(case.host.inventory, space="mask_index"))
    expected = []
    for place, card in enumerate(case.host.cards):
        tiles = sorted({tile for number, tile in places if number == place and tile < (card.tiles or 1)})
        if tiles:
            expected.append(card.key if len(tiles) == card.tiles else narrowed(card, tiles).key)
    assert told(outcome) == expected


# --- the mask selects and never reorders


@given(intel_cases)
def test_a_mask_never_reorders(case: Case) -> None:
    """What a mask leaves stands as without it: whole cards or tiles of them, and single tiles under FLAT."""
    masks = [name for name in case.env if name.endswith(MASK)]
    without = {name: text for name, text in case.env.items() if name not in masks}
    masked = invert("level_zero", case.env, case.known, case.context)
    unmasked = invert("level_zero", without, case.known, case.context)
    if isinstance(masked, Inversion) and isinstance(unmasked, Inversion):
        some, everything = keys_of(masked), keys_of(unmasked)
        assert is_subsequence([*map(card_of, some)], [*map(card_of, everything)])
        if case.env.get(HIERARCHY) in ("FLAT", "COMBINED") and not any(name.startswith("NEO_") for name in case.env):
            assert is_subsequence(some, everything)


_entry = st.one_of(st.integers(0, 9).map(str), st.builds("{}.{}".format, st.integers(0, 3), st.integers(0, 3)))


@given(intel_hosts, st.lists(_entry, min_size=1, max_size=5), hierarchies)
def test_order_and_repeats_of_entries_do_not_matter(case: Case, entries: list[str], hierarchy: str) -> None:
    """A mask shuffled, and with entries twice, leaves the same devices."""
    chance = Random(case.seed)
    other = entries + chance.choices(entries, k=chance.randint(0, 3))
    chance.shuffle(other)
    outcomes = [
        told(invert("level_zero", case.env | {MASK: mask, HIERARCHY: hierarchy}, case.known, case.context))
        for mask in (",".join(entries), ",".join(other))
    ]
    assert outcomes[0] == outcomes[1]


# --- any text at all


@given(intel_cases, st.booleans())
def test_any_text_ends_in_an_answer_or_a_refusal(case: Case, whole: bool) -> None:
    """No environment raises; a refusal says why, and an answer names devices of the inventory within reach, none twice
    and none beside a part of it.
    """
    inventory = replace(case.known, whole=whole)
    outcome = invert("level_zero", case.env, inventory, case.context)
    assert_sound(outcome, inventory, case.context.reach)
    if isinstance(outcome, Inversion):
        found = [device for device in map(inventory.find, keys_of(outcome)) if device]
        tiles = [(card_of(device.key), tile) for device in found for tile in device.partition.split("+")]
        assert len(set(tiles)) == len(tiles)
        assert not {(card, "") for card, tile in tiles if tile} & set(tiles)


@given(intel_cases)
def test_the_order_of_discovery_changes_nothing(case: Case) -> None:
    """Two inventories with the same devices in another order give the same outcome."""
    before = invert("level_zero", case.env, case.known, case.context)
    assert invert("level_zero", case.env, case.shuffled(), case.context) == before


# --- knowing less


def assert_known_enough(case: Case, known: Inventory, less: Context, full: Context) -> None:
    """What is answered from less is the answer once all is known."""
    before = invert("level_zero", case.env, known, less)
    after = invert("level_zero", case.env, case.host.inventory, full)
    assert_the_same_once_known(before, after, case.host.inventory)


@given(intel_cases)
def test_an_answer_without_some_cards_stays_the_answer(case: Case) -> None:
    """What is answered over an inventory that is not whole is the answer once the other cards are known."""
    context = usual(case.host.inventory)
    assert_known_enough(case, case.host.keep(case.chosen), context, context)


@given(intel_cases)
def test_an_answer_without_some_facts_stays_the_answer(case: Case) -> None:
    """What is answered while tiles, models, families or kinds of cards are not known is the answer once they are."""
    context = usual(case.host.inventory)
    assert_known_enough(case, case.known, context, context)


@given(intel_cases)
def test_an_answer_without_the_reach_stays_the_answer(case: Case) -> None:
    """What is answered without knowing the reach is the answer of a workload that can open every device."""
    context = usual(case.host.inventory)
    assert_known_enough(case, case.known, replace(context, reach=None), context)


def assert_known_whichever(case: Case, **fact: Any) -> None:
    """What is answered without knowing a fact is the answer once it is this."""
    full = usual(case.host.inventory, **fact)
    assert_known_enough(case, case.host.inventory, replace(full, **dict.fromkeys(fact)), full)


@given(intel_cases, st.sampled_from(("0", "1")))
def test_an_answer_without_the_driver_is_the_current_drivers(case: Case, by_address: str) -> None:
    """What is answered without knowing the driver is its answer if it is current; an old one's is refused."""
    case = case._replace(env=case.env | {PCI_ORDER: by_address})
    assert_known_whichever(case, driver="current")


@given(intel_cases, st.booleans())
def test_an_answer_without_the_libraries_stays_the_answer_or_is_refused(case: Case, several: bool) -> None:
    """What is answered without knowing whether several driver libraries are installed is never another list then."""
    full = usual(case.host.inventory, multi_driver_library=several)
    before = invert("level_zero", case.env, case.host.inventory, replace(full, multi_driver_library=None))
    after = invert("level_zero", case.env, case.host.inventory, full)
    if isinstance(before, Inversion) and isinstance(after, Inversion):
        assert before.devices == after.devices
