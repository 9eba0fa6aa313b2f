"""How long a context is when nobody asked for one."""

from __future__ import annotations

import pytest

from shadowlane.planner.context import LEAST_DEFAULT, USEFUL_CONTEXT
from shadowlane.planner.cost import CostModel
from shadowlane.planner.placement import Placement, Request, show_nbytes, whole_pages
from shadowlane.planner.search import SPARE_EXPERTS, place
from shadowlane.planner.synthetic import llama_catalog, mixture_catalog

COST = CostModel(None)
CATALOG = mixture_catalog(num_experts=32, expert_inner=64, max_context=8192)
assert CATALOG.experts is not None
EXPERTS = CATALOG.experts
FIXED = (
    whole_pages(CATALOG.constants_nbytes)
    + whole_pages(CATALOG.scratch_nbytes)
    + sum(block.held_nbytes for block in CATALOG.blocks)
)
TOKEN_NBYTES = CATALOG.page_nbytes // CATALOG.page_tokens


def planned(left: int, context: int | None = None) -> Placement:
    """With so many bytes for KV and experts together."""
    return place(CATALOG, Request(ram=FIXED + left, context=context), COST)


def test_a_default_context_leaves_most_of_the_rest_to_experts() -> None:
    left = 4 * (USEFUL_CONTEXT + 512) * TOKEN_NBYTES
    placement = planned(left)
    assert placement.context_tokens == USEFUL_CONTEXT + 512  # a quarter
    assert placement.expert_slots == (left - placement.kv_nbytes) // EXPERTS.slot_nbytes
    assert placement.expert_slots < EXPERTS.total


def test_a_useful_context_may_take_half() -> None:
    placement = planned(3 * USEFUL_CONTEXT * TOKEN_NBYTES)
    assert placement.context_tokens == USEFUL_CONTEXT
    left = 2 * 1024 * TOKEN_NBYTES
    placement = planned(left)
    assert placement.context_tokens == 1024
    assert placement.experts_nbytes > left // 2 - EXPERTS.slot_nbytes


def test_what_a_short_context_would_hold_is_said_with_numbers() -> None:
    left = 3 * USEFUL_CONTEXT * TOKEN_NBYTES
    placement = planned(left)
    short = planned(left, LEAST_DEFAULT)
    (note,) = [each for each in placement.notes if "experts fit" in each]
    assert note.startswith(f"{placement.expert_slots} of {EXPERTS.total} experts fit ")
    assert f"ctx_size {LEAST_DEFAULT} would hold at least {short.expert_slots}," in note
    assert not any("experts fit" in each for each in short.notes)
    assert not any("experts fit" in each for each in planned(left, USEFUL_CONTEXT).notes)
    # a few experts more are not worth a line
    assert not any("experts fit" in each for each in planned(2 * 1024 * TOKEN_NBYTES).notes)


def test_all_experts_come_before_the_tail_of_a_default() -> None:
    whole = EXPERTS.total * EXPERTS.slot_nbytes
    placement = planned(whole + 1024 * TOKEN_NBYTES)
    assert (placement.expert_slots, placement.context_tokens) == (EXPERTS.total, 1024)
    placement = planned(whole + 4096 * TOKEN_NBYTES)
    assert (placement.context_tokens, len(placement.notes)) == (4096, 1)  # unmeasured speeds


@pytest.mark.parametrize("is_mixture", [True, False])
def test_a_tiny_context_is_not_given_in_silence(is_mixture: bool) -> None:
    catalog = CATALOG if is_mixture else llama_catalog(max_context=8192)
    least = whole_pages(catalog.constants_nbytes) + whole_pages(catalog.scratch_nbytes)
    least += 4 * catalog.slot_nbytes
    if is_mixture:
        least = FIXED + (EXPERTS.top_k + SPARE_EXPERTS) * EXPERTS.slot_nbytes
    token = catalog.page_nbytes // catalog.page_tokens
    placement = place(catalog, Request(ram=least + 32 * token), COST)
    assert placement.context_tokens == 32
    more = (LEAST_DEFAULT - 32) * token
    note = (
        "context is only 32 of the usual 4096 tokens, all that the RAM budget holds: "
        f"{show_nbytes(more)} more would hold {LEAST_DEFAULT}"
    )
    assert note in placement.notes
    useful = place(catalog, Request(ram=least + 32 * token + more), COST)
    assert useful.context_tokens == LEAST_DEFAULT
    assert not any("only" in each for each in useful.notes)
