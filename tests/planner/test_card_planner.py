"""The planner of an engine with cards, driven by events as an engine would send them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from card_engine import MACHINE, CardEngine

from shadowlane.planner import events as ev
from shadowlane.planner.card_planner import CardPlanner, first_over_cards
from shadowlane.planner.catalog import Catalog, HitCurve
from shadowlane.planner.heat import Heat
from shadowlane.planner.hybrid_layouts import TooLarge
from shadowlane.planner.placement import LaneSpec, Request
from shadowlane.planner.stages import first_stage
from shadowlane.planner.synthetic import llama_catalog, mixture_catalog

MIB = 1 << 20


@pytest.fixture
def catalog() -> Catalog:
    return llama_catalog(layers=4, hidden=2048, inner=8192, vocab=32000)


def request(catalog: Catalog, part: float = 0.5, **more: object) -> Request:
    """A card with room for `part` of the weights."""
    weights = sum(block.held_nbytes for block in catalog.blocks)
    asked = Request(
        ram=4 << 30,
        lanes=(LaneSpec("cpu:0", 4), LaneSpec("gpu:0", 1)),
        context=1024,
        machine=MACHINE,
        cards=(round(part * weights),),
    )
    return replace(asked, **more)  # type: ignore[arg-type]


def test_a_card_is_filled_within_its_budget(catalog: Catalog) -> None:
    asked = request(catalog)
    placement = first_over_cards(catalog, asked)
    (card,) = placement.cards
    assert 0.8 * asked.cards[0] < card.total_nbytes <= asked.cards[0]
    assert (
        placement.predicted_step_s
        < first_over_cards(catalog, replace(asked, strategy="cpu")).predicted_step_s
    )


def test_what_is_short_is_said_without_the_fingerprint_of_the_model(catalog: Catalog) -> None:
    with pytest.raises(
        TooLarge, match=r"^the model and 1024 tokens .*; there are 1.00 MiB of RAM, 1 B"
    ):
        first_over_cards(catalog, request(catalog, ram=1 << 20, cards=(1,)))


def test_memory_that_is_taken_is_given_back_and_filled_again(catalog: Catalog) -> None:
    asked = request(catalog)
    engine = CardEngine(CardPlanner(catalog, asked))
    engine.steps(10)
    taken = asked.cards[0] // 2
    engine.obey(engine.planner.handle(ev.MemoryLeft(taken)))
    engine.steps(10)
    assert engine.running.cards[0].total_nbytes <= asked.cards[0] - taken
    engine.obey(engine.planner.handle(ev.MemoryLeft(0.0)))
    engine.steps(30)
    assert engine.running.cards[0].total_nbytes > 0.8 * asked.cards[0]
    assert any("measured" in note for note in engine.notes), "what came of a change is told"


def test_what_is_taken_while_a_stage_is_on_its_way_withdraws_the_stage(catalog: Catalog) -> None:
    asked = request(catalog)
    planner = CardPlanner(catalog, asked)
    engine = CardEngine(planner)
    engine.steps(10)
    taken = asked.cards[0] // 2
    for nbytes in (taken, 0.0, taken):
        engine.obey(planner.handle(ev.MemoryLeft(nbytes)))
    engine.steps(20)
    assert engine.running.cards[0].total_nbytes <= asked.cards[0] - taken


def test_a_layout_by_hand_stays_whatever_is_measured(catalog: Catalog) -> None:
    engine = CardEngine(CardPlanner(catalog, request(catalog, strategy="layer-split")))
    engine.steps(60, slower=3.0)
    assert len(engine.placements) == 1
    assert engine.running.strategy.startswith("layer-split")


def test_a_refused_placement_leaves_the_one_in_force(catalog: Catalog) -> None:
    asked = request(catalog)
    planner = CardPlanner(catalog, asked)
    engine = CardEngine(planner)
    engine.steps(10)
    before = engine.active
    commands = planner.handle(ev.MemoryLeft(asked.cards[0] / 2))
    (published,) = [each for each in commands if isinstance(each, ev.PublishPlacement)]
    refused = ev.PlacementRefused(published.placement.placement_id, "no room")
    engine.obey(planner.handle(refused))
    assert engine.active == before
    assert any("no room" in note for note in engine.notes)
    engine.steps(10)


def test_a_full_card_changes_in_two_stages(catalog: Catalog) -> None:
    asked = request(catalog, strategy="layer-split", strategy_layers=2)
    old = first_over_cards(catalog, asked)
    (card,) = old.cards
    tight = replace(card, budget=card.total_nbytes)
    away = [block for block in catalog.blocks if block.index not in card.resident]
    others = tuple(block.index for block in away if block.group.endswith(".down"))[:8]
    assert others
    dropped = card.resident[: len(others)]
    kept = tuple(sorted({*card.resident[len(others) :], *others}))
    new = replace(old, cards=(replace(tight, resident=kept),))
    stage = first_stage(catalog, replace(old, cards=(tight,)), new)
    assert stage is not None
    assert set(stage.cards[0].resident) == set(kept) - set(others)
    assert not set(stage.cards[0].resident) & set(dropped)
    assert all(stage.resident[index] for index in others), "the processor computes them meanwhile"
    roomy = replace(tight, budget=4 * card.total_nbytes)
    both = replace(new, cards=(replace(new.cards[0], budget=roomy.budget),))
    assert first_stage(catalog, replace(old, cards=(roomy,)), both) is None


def mixture(hits: float) -> tuple[Catalog, list[list[int]]]:
    """A mixture whose hottest quarter took so much of the choices, and who that is, by layer."""
    catalog = mixture_catalog(num_experts=32, expert_inner=4096, hidden=2048, layers=4)
    assert catalog.experts is not None
    ranks = [list(range(32))] * 4
    curve = HitCurve(((0.0, 0.0), (0.25, hits), (1.0, 1.0)), "remembered", 1000)
    experts = replace(catalog.experts, ranks=tuple(map(tuple, ranks)), hits=curve)
    return replace(catalog, experts=experts), ranks


def chosen(favourites: range, part: float, visits: int = 16) -> ev.ExpertsChosen:
    """In each layer `part` of 4 choices a visit are these experts, the rest others."""
    counts = np.full((4, 32), (1 - part) * 4 * visits / (32 - len(favourites)))
    counts[:, favourites] = part * 4 * visits / len(favourites)
    return ev.ExpertsChosen(Heat("a mixture", visits, np.minimum(counts, visits)))


def over_a_mixture(catalog: Catalog) -> CardEngine:
    asked = request(catalog)
    experts = catalog.experts
    assert experts is not None
    dense = sum(block.held_nbytes for block in catalog.blocks)
    memory = 2 * dense + experts.total * experts.slot_nbytes // 4
    return CardEngine(CardPlanner(catalog, replace(asked, cards=(memory,))))


def test_experts_on_a_card_follow_choices_that_have_shifted() -> None:
    catalog, _ = mixture(0.8)
    engine = over_a_mixture(catalog)
    before = engine.running.cards[0]
    assert 20 <= before.num_experts < 64
    for _ in range(12):
        engine.steps(2)
        engine.obey(engine.planner.handle(chosen(range(20, 28), 0.8)))
    after = engine.running.cards[0]
    assert any("routers choose other experts" in reason for reason in engine.reasons)
    counts = [len(set(after.experts_of(layer)) & set(range(20, 28))) for layer in range(4)]
    assert min(counts) >= 4
    assert after.total_nbytes <= after.budget
    number = len(engine.placements)
    for _ in range(12):
        engine.steps(2)
        engine.obey(engine.planner.handle(chosen(range(20, 28), 0.8)))
    assert len(engine.placements) == number, "there is nothing more to be won"


def test_experts_stay_where_choices_are_as_they_were() -> None:
    catalog, _ = mixture(0.8)
    engine = over_a_mixture(catalog)
    number = len(engine.placements)
    for _ in range(12):
        engine.obey(engine.planner.handle(chosen(range(8), 0.8)))
    assert len(engine.placements) == number


def test_choices_that_would_win_little_move_nothing() -> None:
    """Nobody is much hotter than another: less than three per cent of a step."""
    catalog, _ = mixture(0.27)
    engine = over_a_mixture(catalog)
    number = len(engine.placements)
    for _ in range(12):
        engine.obey(engine.planner.handle(chosen(range(20, 28), 0.27)))
    assert len(engine.placements) == number
