"""How far the search is from the best: all plans tried, branch and bound, annealing."""

from __future__ import annotations

import itertools

import pytest

from shadowlane.planner.hybrid import (
    fits,
    vram_room,
)
from shadowlane.planner.hybrid_hand import by_hand
from shadowlane.planner.hybrid_layouts import Spread, settle
from shadowlane.planner.hybrid_regret import TooManyPlans, annealed, exact, shortened
from shadowlane.planner.hybrid_search import search
from shadowlane.planner.hybrid_synthetic import uneven as instance


@pytest.mark.parametrize("seed", range(6))
def test_the_search_is_close_to_the_best_of_all_whole_placements(seed: int) -> None:
    """Exact on nine loads: every one on the card, in RAM, or brought."""
    question = instance(seed, layers=2)
    found = search(question).times.step_s
    ways = []
    for load in question.model.loads:
        ways.append(
            ((0.0, 0.0), (1.0, 0.0))
            if load.kind == "attn"
            else ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))
        )
    best = float("inf")
    nowhere = Spread.nowhere(question.model, 1)
    for choice in itertools.product(*ways):
        spread = Spread([vram for vram, _ in choice], nowhere.over)
        plan = settle(question, "", spread, {"decode": [brought for _, brought in choice]})
        if plan is None:
            continue
        if fits(question.model, plan, question.work, question.machine):
            best = min(best, question.times(plan).step_s)
    assert found <= best * 1.03
    # Branch and bound finds the same from a start that is far from it, to a per cent.
    assert best * 0.999 <= exact(question, by_hand(question)["cpu"]) <= best * 1.0102


@pytest.mark.parametrize("seed", range(4))
def test_the_search_is_close_to_the_exact_solution_of_thirteen_groups(seed: int) -> None:
    question = instance(seed, layers=3)
    answer = search(question)
    assert answer.seconds <= exact(question, answer) * 1.03


def test_an_exact_solution_that_would_take_too_long_is_none() -> None:
    question = instance(1, layers=2)
    cpu = by_hand(question)["cpu"]
    with pytest.raises(TooManyPlans):
        exact(question, cpu, most_nodes=3)


@pytest.mark.parametrize("seed", range(6))
def test_annealing_from_the_plan_finds_little(seed: int) -> None:
    question = instance(seed, layers=3)
    answer = search(question)
    better = annealed(question, answer, 1500)
    assert better.seconds <= answer.seconds <= better.seconds * 1.03
    assert question.fits(better.plan)
    assert question.answer(better.plan).seconds == pytest.approx(better.seconds)


def test_a_shortened_model_has_its_part_of_the_memory() -> None:
    question = instance(0, layers=4)
    short = shortened(question, 2)
    assert {load.layer for load in short.model.loads} == {0, 1, None}
    part = short.model.nbytes / question.model.nbytes
    assert vram_room(short.machine.cards[0]) == pytest.approx(
        vram_room(question.machine.cards[0]) * part
    )
