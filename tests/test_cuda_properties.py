"""What holds for every CUDA mask on every host, beside an oracle: PyTorch's parser as the specification tells it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.inventory import Inventory
from exporter.masks import invert
from exporter.model import Context, DeviceKey, Inversion, Refusal
from exporter.refusals import REFUSALS
from tests.strategies import PCI_ORDER, TRICKY, Case, Rack, cards, cases, shortest_prefix

MASK = "CUDA_VISIBLE_DEVICES"


def keys_of(outcome: Inversion) -> list[DeviceKey]:
    """Keys by fleet index, which counts from 0 without holes."""
    assert [device.fleet_index for device in outcome.devices] == list(range(len(outcome.devices)))
    return [device.key for device in outcome.devices]


def answer(rack: Rack, mask: str, **context: Any) -> list[DeviceKey]:
    """The answer to a mask in PCI order over whole reach; it must be one."""
    outcome = invert("cuda", {MASK: mask} | PCI_ORDER, rack.inventory, Context(reach=rack.everything, **context))
    assert isinstance(outcome, Inversion), outcome
    return keys_of(outcome)


# --- the oracle


def pytorch(mask: str, uuids: Sequence[str]) -> list[int] | None:
    """Positions that PyTorch's parser selects among whole cards in PCI order; None where it throws.

    Made from the words of the specification: unstripped UUID prefixes, numbers by their leading digits, and a repeat
    that empties the list even behind an entry out of range or a name of no card, both of which are looked at last.
    """
    tokens = mask.split(",")
    if mask.startswith("GPU-"):
        names = list(takewhile(lambda name: name.startswith("GPU-"), tokens))
        if len(set(names)) < len(names):
            return []
        return _distinct([_only([at for at, uuid in enumerate(uuids) if uuid.startswith(name)]) for name in names])
    try:
        numbers = _distinct(_leading_number(token.strip()) for token in tokens)
    except ValueError:
        return None
    return list(takewhile(lambda number: number < len(uuids), numbers))


def _distinct(numbers: Iterable[int]) -> list[int]:
    """The numbers before the first negative one, which ends the reading; none when one of them comes twice."""
    valid: list[int] = []
    for number in takewhile(lambda number: number >= 0, numbers):
        if number in valid:
            return []
        valid.append(number)
    return valid


def _only(found: Sequence[int]) -> int:
    return found[0] if len(found) == 1 else -1


def _leading_number(text: str) -> int:
    sign = text[:1] if text[:1] in ("+", "-") else ""
    digits = "".join(takewhile(str.isdigit, text[len(sign) :]))
    return int(sign + digits) if sign + digits else -1


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("1gpu2,2ampere", [1, 2]),
        ("0, 1, 2, -1, 3", [0, 1, 2]),
        ("0, 1, 2, 1", []),
        ("2, +3, -0, 5", [2, 3, 0]),
        ("-1,2,2", []),
        ("0,9,0", []),
        ("GPU-a,GPU-b,0", [0, 1]),
        ("GPU-a, GPU-b", [0]),
        ("GPU-,GPU-b", []),
        ("GPU-a,GPU-aa", []),
        ("GPU-a,GPU-9,GPU-a", []),
        ("\u00b2", None),
        ("+", None),
    ],
)
def test_the_oracle_gives_the_examples_of_the_specification(mask: str, expected: list[int] | None) -> None:
    """The oracle answers what the specification's examples say of PyTorch."""
    assert pytorch(mask, [device.uuid for device in cards("abcd")]) == expected


# --- masks made from an inventory


@given(cases())
def test_indices_of_cards_invert_to_those_cards(case: Case) -> None:
    """A mask of positions in PCI order gives back the cards that it was made from, in its order."""
    mask = ",".join(str(case.rack.cards.index(device)) for device in case.chosen)
    assert answer(case.rack, mask) == [device.key for device in case.chosen]


@given(cases(), st.sampled_from(({}, PCI_ORDER, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})))
def test_uuids_of_cards_invert_to_those_cards(case: Case, order: dict[str, str]) -> None:
    """A mask of UUIDs gives back its cards in its order, whatever the order variable, without knowing the reach or
    the other cards, and this is proven.
    """
    env = {MASK: ",".join(device.uuid for device in case.chosen)} | order
    for inventory in (case.rack.inventory, case.rack.keep(case.chosen, whole=False)):
        outcome = invert("cuda", env, inventory, Context())
        assert isinstance(outcome, Inversion)
        assert keys_of(outcome) == [device.key for device in case.chosen]
        assert all(device.evidence == "proven" for device in outcome.devices)


@given(cases(), st.lists(st.integers(0, 40), min_size=16, max_size=16))
def test_unique_prefixes_invert_to_their_cards(case: Case, longer: list[int]) -> None:
    """A mask of starts of UUIDs that each name one card gives back those cards in its order."""
    lengths = (shortest_prefix(case.rack, device) + more for device, more in zip(case.chosen, longer, strict=False))
    mask = ",".join(device.uuid[:length] for device, length in zip(case.chosen, lengths, strict=True))
    assert answer(case.rack, mask) == [device.key for device in case.chosen]


@given(cases(mig=True))
def test_uuids_of_instances_invert_to_those_instances(case: Case) -> None:
    """From branch 570 a mask of MIG UUIDs, one of each GPU instance, gives back those instances in its order."""
    parts = [part for device in case.chosen for part in case.rack.inventory.parts(device.key)]
    chosen = list({(part.parent, part.gpu_instance): part for part in parts}.values())
    mask = ",".join(part.uuid for part in chosen)
    assert answer(case.rack, mask, driver_branch=570) == [part.key for part in chosen]


@given(cases(mig=True), st.randoms(use_true_random=False))
def test_the_order_of_discovery_changes_nothing(case: Case, chance: Random) -> None:
    """Two inventories with the same devices in another order give the same outcome."""
    devices = list(case.rack.inventory.devices)
    before = invert("cuda", case.env, Inventory(tuple(devices)), case.context)
    chance.shuffle(devices)
    assert invert("cuda", case.env, Inventory(tuple(devices)), case.context) == before


# --- any text at all


@given(cases(mig=True), st.booleans())
def test_any_text_ends_in_an_answer_or_a_refusal(case: Case, whole: bool) -> None:
    """No environment raises; a refusal's code is in the closed list, and the layer shows the text as it was set."""
    outcome = invert("cuda", case.env, Inventory(case.rack.inventory.devices, whole), case.context)
    if isinstance(outcome, Refusal):
        assert outcome.code in REFUSALS
        assert outcome.detail
    else:
        keys_of(outcome)
    (layer,) = outcome.layers
    assert (layer.variable, layer.text) == (MASK, case.env.get(MASK))


@given(cases(mig=True), st.booleans())
def test_an_answer_names_no_device_twice(case: Case, whole: bool) -> None:
    """Without virtual devices, two fleet indices never share a device."""
    env = {name: text for name, text in case.env.items() if name != "GGML_CUDA_DEVICES"}
    outcome = invert("cuda", env, Inventory(case.rack.inventory.devices, whole), case.context)
    if isinstance(outcome, Inversion):
        assert len(set(keys_of(outcome))) == len(outcome.devices)


@given(cases(mig=True), st.booleans())
def test_an_answer_stays_within_reach(case: Case, whole: bool) -> None:
    """A device that the workload cannot open, itself or as a part of its board, is in no answer."""
    outcome = invert("cuda", case.env, Inventory(case.rack.inventory.devices, whole), case.context)
    if isinstance(outcome, Inversion) and case.context.reach is not None:
        found = [case.rack.inventory.by_key[key] for key in keys_of(outcome)]
        assert all({device.key, device.parent} & case.context.reach for device in found)


@given(cases(alike=True))
def test_only_equal_cards_are_assumed(case: Case) -> None:
    """Numbers over several cards without PCI_BUS_ID are at most assumed, and only where all cards are of one model."""
    outcome = invert("cuda", case.env, case.rack.inventory, Context(reach=case.rack.everything, frontend="none"))
    by_name = case.env.get(MASK, "0").lstrip().startswith("GPU-")
    if isinstance(outcome, Inversion) and outcome.devices and len(case.rack.cards) > 1 and not by_name:
        bus_order = case.env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
        assert {device.evidence for device in outcome.devices} == {"proven" if bus_order else "assumed"}
        assert bus_order or (case.rack.cards[0].name and not case.env.get("CUDA_DEVICE_ORDER"))


# --- beside the oracle


@given(cases())
def test_an_answer_is_the_oracles(case: Case) -> None:
    """Over whole cards in PCI order an answer is what PyTorch's parser gives, and empty where that throws."""
    rack, mask = case.rack, case.env.get(MASK, "0")
    outcome = invert("cuda", {MASK: mask} | PCI_ORDER, rack.inventory, Context(reach=rack.everything))
    if isinstance(outcome, Inversion):
        positions = pytorch(mask, [device.uuid for device in rack.cards]) or []
        assert keys_of(outcome) == [rack.cards[position].key for position in positions]


@pytest.mark.parametrize("before", ["", "0,", "4294967296,"])
@pytest.mark.parametrize("entry", TRICKY, ids=lambda text: ascii(text[:12])[1:-1])
def test_a_tricky_entry_is_the_oracles_or_refused(entry: str, before: str) -> None:
    """A tricky entry alone and behind another, also one past 32 bits, is answered as the oracle does, or refused."""
    for count in (1, 4, 9):
        devices = cards("abcdefghi"[:count])
        reach = frozenset(device.key for device in devices)
        outcome = invert("cuda", {MASK: before + entry} | PCI_ORDER, Inventory(devices), Context(reach=reach))
        if isinstance(outcome, Inversion):
            positions = pytorch(before + entry, [device.uuid for device in devices]) or []
            assert keys_of(outcome) == [devices[position].key for position in positions]


# --- knowing less


def assert_the_same_once_known(before: Inversion | Refusal, after: Inversion | Refusal, inventory: Inventory) -> None:
    """An answer stays the answer when more is known; a refusal may become one."""
    if isinstance(before, Inversion):
        assert isinstance(after, Inversion)
        found = [inventory.find(key) for key in keys_of(before)]
        assert [device and device.key for device in found] == keys_of(after)


@given(cases(mig=True))
def test_an_answer_without_some_cards_stays_the_answer(case: Case) -> None:
    """What is answered over an inventory that is not whole is the answer once the other cards are known."""
    env, rack = case.env | PCI_ORDER, case.rack
    before = invert("cuda", env, rack.keep(case.chosen, whole=False), Context(reach=rack.everything, driver_branch=570))
    after = invert("cuda", env, rack.inventory, Context(reach=rack.everything, driver_branch=570))
    assert_the_same_once_known(before, after, rack.inventory)


@given(cases())
def test_an_answer_while_cards_sleep_stays_the_answer(case: Case) -> None:
    """What is answered over placeholders names the same cards as once these have told their UUIDs."""
    env, rack, drowsy = case.env | PCI_ORDER, case.rack, case.rack.put_to_sleep(case.chosen)
    before = invert("cuda", env, drowsy, Context(reach=frozenset(device.key for device in drowsy.devices)))
    after = invert("cuda", env, rack.inventory, Context(reach=rack.everything))
    assert_the_same_once_known(before, after, rack.inventory)


@given(cases(mig=True))
def test_an_answer_without_the_reach_stays_the_answer(case: Case) -> None:
    """What is answered without knowing the reach is the answer of a workload that can open every device."""
    inventory, branch = case.rack.inventory, case.context.driver_branch
    before = invert("cuda", case.env, inventory, Context(driver_branch=branch))
    after = invert("cuda", case.env, inventory, Context(reach=case.rack.everything, driver_branch=branch))
    assert_the_same_once_known(before, after, inventory)
