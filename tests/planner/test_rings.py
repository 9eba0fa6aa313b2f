"""What an engine lays out once: rings and slots, and no plan that wants others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from card_engine import CARD, MACHINE, CardEngine
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shadowlane.planner import card_planner
from shadowlane.planner import events as ev
from shadowlane.planner.card_placement import place_on_cards
from shadowlane.planner.card_planner import CardPlanner, first_over_cards, question_over_cards
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.hybrid import demand, stage_nbytes
from shadowlane.planner.hybrid_layouts import TooLarge
from shadowlane.planner.hybrid_search import search
from shadowlane.planner.placement import MIN_SLOTS, InfeasiblePlan, LaneSpec, Placement, Request
from shadowlane.planner.rings import UNUSED_RING_PART, laid_out
from shadowlane.planner.synthetic import llama_catalog, mixture_catalog

DENSE = llama_catalog(layers=2, hidden=1024, inner=4096, vocab=16000)
MIXTURE = mixture_catalog(num_experts=16, expert_inner=1024, hidden=1024, layers=2)
OTHER = replace(CARD, vram_bytes_per_s=250e9)
# In these cores, card and link are as far apart as on a laptop.
LAPTOP = replace(
    MACHINE,
    cpu_bytes_per_s=20e9,
    cpu_launch_s=40e-6,
    cards=(replace(CARD, vram_bytes_per_s=250e9, launch_s=15e-6, h2d_bytes_per_s=11e9),),
)


def weights_of(catalog: Catalog) -> int:
    experts = catalog.experts
    routed = experts.total * experts.slot_nbytes if experts else 0
    return sum(block.held_nbytes for block in catalog.blocks) + routed


def request(catalog: Catalog, *parts: float, ram: float = 2.0, **more: object) -> Request:
    """Cards with room for such parts of the weights, and RAM."""
    whole = weights_of(catalog)
    fixed = catalog.constants_nbytes + catalog.scratch_nbytes + (64 << 20)
    asked = Request(
        ram=round(fixed + ram * whole),
        lanes=(LaneSpec("cpu:0", 4), *(LaneSpec(f"gpu:{i}", 1) for i in range(len(parts)))),
        context=1024,
        machine=replace(MACHINE, cards=(CARD, OTHER)[: len(parts)]),
        cards=tuple(round(part * whole) for part in parts),
    )
    return replace(asked, **more)  # type: ignore[arg-type]


@pytest.fixture
def impossible(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why plans that were thought of could not be made exact."""
    whys: list[str] = []

    def recording(*arguments: object, **named: object) -> Placement:
        try:
            return place_on_cards(*arguments, **named)  # type: ignore[arg-type]
        except InfeasiblePlan as error:
            whys.append(str(error))
            raise

    monkeypatch.setattr(card_planner, "place_on_cards", recording)
    return whys


story = st.lists(
    st.one_of(
        st.tuples(st.just("slower"), st.sampled_from([0.7, 1.5, 3.0])),
        st.tuples(st.just("vram"), st.sampled_from([0.0, 0.3, 0.6, 0.95])),
        st.tuples(st.just("ram"), st.sampled_from([0.0, 0.2, 0.4])),
    ),
    max_size=2,
)


@given(
    catalog=st.sampled_from([DENSE, MIXTURE]),
    parts=st.lists(st.sampled_from([0.1, 0.3, 0.6, 0.97, 1.2]), min_size=1, max_size=2),
    ram=st.sampled_from([2.0, 1.0, 0.6]),
    story=story,
)
@example(DENSE, [0.97], 2.0, [("slower", 3.0), ("slower", 0.7)])
@example(DENSE, [0.3, 0.3], 2.0, [("slower", 3.0), ("vram", 0.6)])
@example(MIXTURE, [1.2], 2.0, [("vram", 0.95), ("slower", 1.5)])
@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_no_plan_is_proposed_that_what_is_laid_out_cannot_do(
    impossible: list[str],
    catalog: Catalog,
    parts: list[float],
    ram: float,
    story: list[tuple[str, float]],
) -> None:
    asked = request(catalog, *parts, ram=ram)
    try:
        engine = CardEngine(CardPlanner(catalog, asked))
    except (TooLarge, InfeasiblePlan):
        return
    impossible.clear()
    engine.steps(2)
    taken = {"vram": 0.0, "ram": 0.0}
    for what, much in story:
        if what != "slower":
            taken[what] = much
            left = ev.MemoryLeft(taken["vram"] * min(asked.cards), taken["ram"] * asked.ram)
            engine.obey(engine.planner.handle(left))
        engine.steps(12, slower=much if what == "slower" else 1.0)
    assert not engine.refused
    assert not impossible


@pytest.mark.parametrize("part", [0.3, 0.97, 1.3])
def test_every_card_begins_with_a_ring(part: float) -> None:
    placement = first_over_cards(DENSE, request(DENSE, part, machine=LAPTOP))
    (card,) = placement.cards
    assert card.num_slots >= max(MIN_SLOTS, card.budget // UNUSED_RING_PART // card.slot_nbytes)
    assert card.slots_nbytes == card.num_slots * card.slot_nbytes
    assert card.total_nbytes <= card.budget
    kept = first_over_cards(DENSE, request(DENSE, part, machine=LAPTOP, replan=False))
    assert placement.predicted_step_s <= 1.04 * kept.predicted_step_s, "a ring costs little"


def test_a_model_that_a_card_holds_leaves_the_ring_what_it_does_not_need() -> None:
    asked = request(DENSE, 2.0)
    (card,) = first_over_cards(DENSE, asked).cards
    assert not card.decode_sweep
    machine = question_over_cards(DENSE, asked).machine
    assert card.num_slots == int(stage_nbytes(machine.cards[0])) // card.slot_nbytes


def test_plans_that_stay_have_no_ring_that_nothing_comes_into() -> None:
    asked = request(DENSE, 2.0, strategy="layer-split", strategy_layers=3)
    (card,) = first_over_cards(DENSE, asked).cards
    assert not card.prefill_sweep
    assert card.num_slots == 0


def test_a_ring_that_would_cost_more_than_a_change_may_win_is_left_out() -> None:
    """With room for four of its experts it would be a quarter of the card."""
    large = mixture_catalog(num_experts=8, expert_inner=4096, hidden=1024, layers=4)
    asked = request(large, 0.6, machine=replace(LAPTOP, cpu_bytes_per_s=100e9))
    placement = first_over_cards(large, asked)
    kept = first_over_cards(large, replace(asked, replan=False))
    assert placement.predicted_step_s <= 1.04 * kept.predicted_step_s


def test_what_comes_later_finds_the_ring_that_there_is() -> None:
    """The plan of the start brings nothing; cores that are lost make it worth while."""
    asked = request(DENSE, 0.97, machine=LAPTOP)
    engine = CardEngine(CardPlanner(DENSE, asked))
    (first,) = engine.running.cards
    engine.steps(8)
    for slower in (2.0, 4.0, 1.0, 6.0):
        engine.steps(20, slower=slower)
    assert len(engine.placements) > 1
    assert not engine.refused
    for placement in engine.placements:
        (card,) = placement.cards
        assert (card.num_slots, card.slot_nbytes) == (first.num_slots, first.slot_nbytes)


def test_a_planner_that_takes_over_knows_the_rings() -> None:
    asked = request(DENSE, 0.97, machine=LAPTOP)
    running = CardEngine(CardPlanner(DENSE, asked)).running
    resumed = CardPlanner(DENSE, asked)
    resumed.handle(ev.EngineResumed(running, 1))
    machine = laid_out(DENSE, question_over_cards(DENSE, asked).machine, running)
    assert resumed._machine == machine
    assert machine.cards[0].ring_nbytes == running.cards[0].slots_nbytes


def test_what_is_laid_out_is_room_that_nothing_else_gets() -> None:
    asked = request(DENSE, 0.5)
    question = question_over_cards(DENSE, asked)
    free = demand(question.model, search(question).plan, question.work, question.machine)
    ring = replace(question.machine.cards[0], ring_nbytes=asked.cards[0] / 4)
    closed = replace(ring, ring_nbytes=0.0)
    for card in (ring, closed):
        narrow = replace(question, machine=replace(question.machine, cards=(card,)))
        plan = search(narrow).plan
        need = demand(narrow.model, plan, narrow.work, narrow.machine)
        assert need.stages == (0.0,)
        assert need.vram[0] <= asked.cards[0] - (card.ring_nbytes or 0.0)
    assert not any(site.brought or site.brought_prefill for site in plan.sites)
    assert free.stages[0] > 0.0


def test_weights_that_leave_a_card_find_room_beside_experts() -> None:
    """Slots for experts stay as they are: they leave room for what every token reads."""
    asked = request(MIXTURE, 1.3, ram=0.7)
    engine = CardEngine(CardPlanner(MIXTURE, asked))
    assert sum(card.weights_nbytes for card in engine.running.cards)
    engine.steps(2)
    engine.obey(engine.planner.handle(ev.MemoryLeft(asked.cards[0] * 0.95)))
    engine.steps(12)
    (card,) = engine.running.cards
    assert card.total_nbytes - card.slots_nbytes <= 0.05 * asked.cards[0]
    assert not any("holds no plan" in note for note in engine.notes)
