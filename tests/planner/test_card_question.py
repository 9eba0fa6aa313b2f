"""How long chunks of prompts are over cards: as long as that is worth the room it takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shadowlane.planner import events as ev
from shadowlane.planner.card_placement import place_on_cards
from shadowlane.planner.card_planner import CardPlanner, first_over_cards
from shadowlane.planner.card_question import plan_over_cards, question_over_cards
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.chunks import HELD_UP_S
from shadowlane.planner.hardware import Card, Hardware
from shadowlane.planner.hybrid_layouts import TooLarge
from shadowlane.planner.placement import LaneSpec, Placement, Request
from shadowlane.planner.plan_of import plan_of
from shadowlane.planner.synthetic import llama_catalog

MIB = 1 << 20
CARD = Card("card", 64e9, 0.0, 400e9, 40e12, 12e9, 12e9, launch_s=5e-6, crossing_s=20e-6)
MACHINE = Hardware("machine", (CARD,), 40e9, 1e12, 2e-6, 60e9, 64e9, 0.0, 5e9)


def catalog_with(mib: int) -> Catalog:
    """A model whose chunks take so much more for each sub-chunk."""
    catalog = llama_catalog(layers=6, hidden=2048, inner=8192, vocab=32000)
    scratch = tuple((n, catalog.scratch_nbytes + (n - 1) * mib * MIB) for n in (2, 4, 8, 16))
    return replace(catalog, chunk_scratch=scratch, max_context=16384)


def asked(catalog: Catalog, part: float, **more: object) -> Request:
    """A card with room for `part` of the weights."""
    weights = sum(block.held_nbytes for block in catalog.blocks)
    request = Request(
        ram=8 << 30,
        lanes=(LaneSpec("cpu:0", 4), LaneSpec("gpu:0", 1)),
        context=8192,
        machine=MACHINE,
        cards=(round(part * weights),),
    )
    return replace(request, **more)  # type: ignore[arg-type]


def planned(catalog: Catalog, part: float, **more: object) -> Placement:
    return first_over_cards(catalog, asked(catalog, part, **more))


def test_what_is_brought_for_prompts_comes_for_long_chunks() -> None:
    catalog = catalog_with(4)
    placement = planned(catalog, 0.3)
    assert placement.cards[0].prefill_sweep
    assert placement.subchunks == 4
    assert planned(catalog, 0.3, subchunks=16).subchunks == 16
    assert planned(catalog, 0.3, context=1500).subchunks <= 2, "half of it fills no more"


def test_chunks_stay_short_where_all_is_on_the_card() -> None:
    slow = replace(MACHINE, cpu_bytes_per_s=1e9, cpu_flops=1e10)
    placement = planned(catalog_with(1), 4.0, machine=slow)
    assert not placement.cards[0].prefill_sweep
    assert placement.subchunks == 1


def test_what_activations_of_longer_chunks_take_is_taken_from_cards() -> None:
    catalog = catalog_with(16)
    whole = asked(catalog, 0.6)
    for count in (1, 4):
        request = replace(whole, subchunks=count)
        placement = first_over_cards(catalog, request)
        assert placement.cards[0].total_nbytes <= whole.cards[0] - (count - 1) * 16 * MIB
    assert planned(catalog_with(2000), 0.6).subchunks == 1, "they would take all there is"


def test_layouts_by_hand_get_their_best_chunk_too() -> None:
    catalog = catalog_with(4)
    assert planned(catalog, 0.6, strategy="layer-stream").subchunks == 8
    assert planned(catalog, 0.6, strategy="cpu").subchunks == 1


@pytest.mark.parametrize("strategy", ["auto", "layer-stream"])
def test_chunks_leave_room_for_what_is_pinned(strategy: str) -> None:
    more = {"strategy": strategy, "pins": {"down": "gpu:0"}}
    assert planned(catalog_with(4), 0.3, **more).subchunks == 4
    assert planned(catalog_with(2000), 0.3, **more).subchunks == 1
    with pytest.raises(ValueError, match="pins must fit gpu:0"):
        planned(catalog_with(2000), 0.3, subchunks=2, **more)


@pytest.mark.parametrize("strategy", ["cpu", "layer-split"])
@pytest.mark.parametrize("subchunks", [None, 1, 4])
def test_a_layout_by_hand_that_nothing_has_room_for_is_too_large(
    strategy: str, subchunks: int | None
) -> None:
    with pytest.raises(TooLarge, match="short by"):
        planned(catalog_with(4), 0.0, strategy=strategy, subchunks=subchunks, ram=1 << 20)


def test_others_wait_for_no_longer_than_is_said() -> None:
    catalog = catalog_with(4)
    slow = replace(MACHINE, cards=(replace(CARD, flops=1e12),), cpu_flops=2e11)
    assert planned(catalog, 0.3, machine=slow, subchunks=8).beside_subchunks == 8
    two = planned(catalog, 0.3, machine=slow, subchunks=8, max_batch=2)
    assert two.beside_subchunks < 8
    request = asked(catalog, 0.3, machine=slow, subchunks=two.beside_subchunks, max_batch=2)
    question = question_over_cards(catalog, request)
    assert question.prompts is not None
    plan, _ = plan_over_cards(catalog, request)
    assert question.times(plan, work=question.prompts.work).step_s <= HELD_UP_S


def test_a_planner_that_comes_later_plans_for_the_chunks_that_there_are() -> None:
    catalog = catalog_with(4)
    request = asked(catalog, 0.3)
    placement = replace(first_over_cards(catalog, request), placement_id=3)
    later = CardPlanner(catalog, request)
    later.handle(ev.EngineResumed(placement, 3))
    assert later.request.subchunks == placement.subchunks == 4
    question = question_over_cards(catalog, later.request)
    plan, _ = plan_over_cards(catalog, later.request)
    again = place_on_cards(catalog, plan, later.request, question)
    assert again.scratch_nbytes == placement.scratch_nbytes


@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("part", [0.3, 1.2])
def test_what_is_promised_of_prompts_is_what_is_placed(cards: int, part: float) -> None:
    catalog = catalog_with(1)
    machine = replace(MACHINE, cards=(CARD,) * cards, cpu_bytes_per_s=5e9, cpu_flops=1e11)
    lanes = (LaneSpec("cpu:0", 4), *(LaneSpec(f"gpu:{card}", 1) for card in range(cards)))
    memory = asked(catalog, part).cards * cards
    request = asked(catalog, part, machine=machine, lanes=lanes, cards=memory)
    plan, request = plan_over_cards(catalog, request)
    question = question_over_cards(catalog, request)
    placement = place_on_cards(catalog, plan, request, question)
    assert placement.micro_batches == plan.micro_batches
    assert (plan.micro_batches > 1) == (cards == 2 and part > 1.0)
    assert question.prompts is not None
    exact = plan_of(catalog, placement, question.model)
    promised, placed = (question.times(each, work=question.prompts.work) for each in (plan, exact))
    assert placed.step_s == pytest.approx(promised.step_s, rel=0.05)


def test_a_number_that_this_model_has_no_scratch_for_is_refused() -> None:
    with pytest.raises(ValueError, match="subchunks must be one of"):
        planned(catalog_with(4), 0.6, subchunks=3)
