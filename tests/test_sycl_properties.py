"""What holds for every SYCL selector over every Intel host, and over what HIP's masks leave of an AMD host."""

from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from exporter.inventory import Inventory
from exporter.masks import invert
from exporter.model import Context, DeviceKey, Inversion
from tests.mask_hosts import (
    Case,
    amd_cases,
    assert_sound,
    intel_cases,
    intel_hosts,
    is_subsequence,
    plain_selectors,
    selectors,
    sycl_cases,
    told,
    usual,
)
from tests.test_cuda_properties import assert_the_same_once_known, keys_of

SELECTOR, AFFINITY, HIERARCHY = "ONEAPI_DEVICE_SELECTOR", "ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY"

hierarchies = st.sampled_from(("COMPOSITE", "FLAT", "COMBINED")).map(lambda text: {HIERARCHY: text})


def listed(case: Case, env: dict[str, str]) -> list[DeviceKey]:
    """What Level Zero enumerates where all is known; it must be an answer."""
    outcome = invert("level_zero", env, case.host.inventory, usual(case.host.inventory))
    assert isinstance(outcome, Inversion), outcome
    return keys_of(outcome)


def selected(case: Case, selector: str, env: dict[str, str]) -> list[DeviceKey]:
    """What a selector leaves where all is known; it must be an answer."""
    context = usual(case.host.inventory, opencl=False)
    outcome = invert("sycl", env | {SELECTOR: selector}, case.host.inventory, context)
    assert isinstance(outcome, Inversion), outcome
    return keys_of(outcome)


# --- the selector filters and never reorders


@given(intel_hosts, plain_selectors, hierarchies)
def test_a_selector_never_reorders(case: Case, selector: str, env: dict[str, str]) -> None:
    """Without paths to sub-devices, what a selector leaves stands as Level Zero enumerates it."""
    assert is_subsequence(selected(case, selector, env), listed(case, env))


@given(intel_hosts, hierarchies)
def test_numbers_select_those_devices(case: Case, env: dict[str, str]) -> None:
    """Numbers in any order, and twice, leave these of Level Zero's devices, in its order."""
    everything, chance = listed(case, env), Random(case.seed)
    numbers = chance.choices(range(len(everything)), k=chance.randint(1, 8))
    selector = "level_zero:" + ",".join(map(str, numbers))
    assert selected(case, selector, env) == [everything[number] for number in sorted(set(numbers))]


@given(intel_hosts, plain_selectors, hierarchies)
def test_a_discard_removes_what_the_same_term_would_select(case: Case, terms: str, env: dict[str, str]) -> None:
    """Terms that discard leave exactly what is not left by the same terms accepting."""
    discards = ";".join(f"!{term}" for term in terms.split(";"))
    accepted, everything = selected(case, terms, env), listed(case, env)
    remaining = [key for key in everything if key not in accepted]
    assert selected(case, discards, env) == selected(case, f"*:*;{discards}", env) == remaining


@given(sycl_cases, st.sampled_from(("level_zero:*", "*:*", "level_zero:gpu", "Level_Zero:*;")))
def test_everything_is_as_unset(case: Case, selector: str) -> None:
    """A selector of all devices comes to what an unset one does."""
    unset = {name: text for name, text in case.env.items() if name != SELECTOR}
    context = replace(case.context, backend="level_zero")
    outcomes = [told(invert("sycl", env, case.known, context)) for env in (unset, unset | {SELECTOR: selector})]
    assert outcomes[0] == outcomes[1]


@given(intel_hosts, st.lists(st.integers(0, 9), min_size=1, max_size=4), hierarchies)
def test_the_selector_counts_what_the_affinity_mask_leaves(case: Case, numbers: list[int], env: dict[str, str]) -> None:
    """The numbers of a selector count the survivors of the affinity mask."""
    everything = listed(case, env)
    masked = env | {AFFINITY: ",".join(str(number % (len(everything) + 1)) for number in numbers)}
    survivors = listed(case, masked)
    for number in range(3):
        assert selected(case, f"level_zero:{number}", masked) == survivors[number : number + 1]


@given(amd_cases, st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_the_selector_counts_what_hips_masks_leave(case: Case, numbers: list[int]) -> None:
    """Over HIP a selector leaves these of the devices that HIP numbers, in its order; where HIP refuses, so it does."""
    context = usual(case.known, backend="hip")
    below = told(invert("rocm", case.env, case.known, context))
    env = case.env | {SELECTOR: "hip:" + ",".join(map(str, numbers))}
    expected = below if isinstance(below, str) else [below[number] for number in sorted(set(numbers)) if below[number:]]
    assert told(invert("sycl", env, case.known, context)) == expected


# --- any text at all


@given(sycl_cases, st.booleans())
def test_any_text_ends_in_an_answer_or_a_refusal(case: Case, whole: bool) -> None:
    """No environment raises; a refusal says why, and an answer names devices of the inventory within reach, none twice
    but a tile that the selector asks for twice.
    """
    inventory = replace(case.known, whole=whole)
    outcome = invert("sycl", case.env, inventory, case.context)
    assert_sound(outcome, inventory, case.context.reach)
    if isinstance(outcome, Inversion):
        keys = keys_of(outcome)
        asked = "." in case.env.get(SELECTOR, "")
        assert all("/t" in key.identity and asked for key in keys if keys.count(key) > 1)


@given(sycl_cases)
def test_the_order_of_discovery_changes_nothing(case: Case) -> None:
    """Two inventories with the same devices in another order give the same outcome."""
    before = invert("sycl", case.env, case.known, case.context)
    assert invert("sycl", case.env, case.shuffled(), case.context) == before


# --- knowing less


def assert_known_enough(case: Case, selector: str, known: Inventory, less: Context, full: Context) -> None:
    """What is answered from less is the answer once all is known."""
    env = case.env | {SELECTOR: selector}
    before = invert("sycl", env, known, less)
    after = invert("sycl", env, case.host.inventory, full)
    assert_the_same_once_known(before, after, case.host.inventory)


@given(intel_cases, selectors, st.sampled_from((None, False, True)))
def test_an_answer_without_some_cards_stays_the_answer(case: Case, selector: str, opencl: bool | None) -> None:
    """What is answered over an inventory that is not whole is the answer once the other cards are known."""
    context = usual(case.host.inventory, opencl=opencl)
    assert_known_enough(case, selector, case.host.keep(case.chosen), context, context)


@given(intel_hosts, selectors, st.one_of(st.just({}), hierarchies))
def test_an_answer_without_some_facts_stays_the_answer(case: Case, selector: str, env: dict[str, str]) -> None:
    """What is answered while tiles, models, families or kinds of cards are not known is the answer once they are."""
    context = usual(case.host.inventory, opencl=False)
    assert_known_enough(case._replace(env=env), selector, case.known, context, context)


@given(intel_cases, selectors, st.sampled_from((None, False, True)))
def test_an_answer_without_the_reach_stays_the_answer(case: Case, selector: str, opencl: bool | None) -> None:
    """What is answered without knowing the reach is the answer of a workload that can open every device."""
    context = usual(case.host.inventory, opencl=opencl)
    assert_known_enough(case, selector, case.known, replace(context, reach=None), context)


def assert_known_whichever(case: Case, selector: str, **fact: Any) -> None:
    """What is answered without knowing a fact is the answer once it is this."""
    full = usual(case.host.inventory, **fact)
    assert_known_enough(case, selector, case.host.inventory, replace(full, **dict.fromkeys(fact)), full)


@given(intel_cases, selectors, st.booleans())
def test_an_answer_without_opencl_stays_the_answer(case: Case, selector: str, opencl: bool) -> None:
    """What is answered without knowing whether OpenCL shows the cards is the answer either way."""
    assert_known_whichever(case, selector, opencl=opencl)


@given(intel_hosts, selectors)
def test_an_answer_without_the_front_end_is_sycls_own(case: Case, selector: str) -> None:
    """What is answered without knowing the front end is the numbers that SYCL gives."""
    assert_known_whichever(case, selector, frontend="none")
