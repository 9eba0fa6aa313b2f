"""Prompts in micro-batches: what a lane waits for, and which plans are in how many."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shadowlane.actors.emulation import Hidden, World
from shadowlane.planner.hybrid import Load, Plan, Site, Work, model_of
from shadowlane.planner.hybrid_bounds import hybrid_bounds
from shadowlane.planner.hybrid_hand import PIPELINED, by_hand
from shadowlane.planner.hybrid_layouts import Question, in_micro_batches, pack
from shadowlane.planner.hybrid_learning import learned
from shadowlane.planner.hybrid_search import STILL, search
from shadowlane.planner.hybrid_synthetic import CARD, MACHINE, dense
from shadowlane.planner.hybrid_synthetic import small_model as model
from shadowlane.planner.synthetic import mixture_catalog

TWO = replace(MACHINE, cards=(CARD, CARD))
PROMPT = Work("prefill", rows=4096, context=2048, max_context=4096)
LAYERS = model(*(dense(f"{layer}.gate_up", 3e8, layer) for layer in range(8)))
FIRST, SECOND = Site(1.0, 0.0, over=(1.0, 0.0)), Site(1.0, 0.0, over=(0.0, 1.0))
HALVES = Plan("halves", (FIRST,) * 4 + (SECOND,) * 4)


def seconds(plan: Plan, count: int, question: Question) -> float:
    return question.times(replace(plan, micro_batches=count)).step_s


@pytest.mark.parametrize("count", [2, 4, 8])
def test_two_cards_with_half_of_the_layers_work_side_by_side(count: int) -> None:
    question = Question(LAYERS, TWO, PROMPT)
    whole_s = seconds(HALVES, 1, question)
    pipelined_s = seconds(HALVES, count, question)
    assert pipelined_s == pytest.approx(whole_s * (count + 1) / (2 * count), rel=0.03)
    busy = question.times(replace(HALVES, micro_batches=count)).busy_s
    assert busy["gpu:0"] == pytest.approx(question.times(HALVES).busy_s["gpu:0"], rel=0.03)


@pytest.mark.parametrize(
    "plan",
    [
        HALVES,
        Plan("uneven", (FIRST,) * 6 + (SECOND,) * 2),
        Plan("back and forth", (FIRST, SECOND) * 4),
        Plan(
            "with the processor", (Site(0.0, 1.0, over=(1.0, 0.0)), *(FIRST,) * 4, *(SECOND,) * 3)
        ),
        Plan("across", (Site(1.0, 0.0, over=(0.5, 0.5)),) * 8),
    ],
    ids=lambda plan: plan.name,
)
def test_the_planner_and_the_world_agree(plan: Plan) -> None:
    question = Question(LAYERS, TWO, PROMPT)
    for count in (1, 2, 8):
        split = replace(plan, micro_batches=count)
        world = World(LAYERS, TWO)
        assert world.step(split, PROMPT).seconds == pytest.approx(
            question.times(split).step_s, rel=0.1
        )
        decode = Work(context=512, max_context=4096)
        assert question.times(split, work=decode) == question.times(plan, work=decode)


def test_rows_of_one_micro_batch_tell_how_fast_the_link_is() -> None:
    wide = replace(LAYERS, row_nbytes=1e5)
    question = Question(wide, TWO, PROMPT)
    plan = replace(HALVES, micro_batches=8)
    for link in (0.5, 1.0, 1.5):
        world = World(wide, TWO, Hidden(link=link))
        found = learned(question, TWO, plan, world.step(plan, PROMPT), is_fresh=True)
        assert found.cards[0].h2d_bytes_per_s == pytest.approx(link * CARD.h2d_bytes_per_s, rel=0.1)


def test_the_head_is_asked_once() -> None:
    """It is as large as all layers, and only the last row of a prompt wants it."""
    head = Load("lm_head", "lm_head", None, 24e8, flops_per_row=96e8)
    question = Question(model(*LAYERS.loads, head), TWO, PROMPT)
    plan = Plan("halves", (*HALVES.sites, SECOND))
    more_s = seconds(plan, 8, question) - seconds(HALVES, 8, Question(LAYERS, TWO, PROMPT))
    assert more_s == pytest.approx(24e8 / CARD.vram_bytes_per_s, rel=0.1)


def test_layers_are_shared_so_that_cards_take_as_long() -> None:
    unlike = replace(MACHINE, cards=(CARD, replace(CARD, flops=CARD.flops / 3)))
    spread = pack(Question(LAYERS, unlike, PROMPT), range(8), [1.0] * 8, evenly=True)
    assert spread.over == [(1.0, 0.0)] * 6 + [(0.0, 1.0)] * 2
    # A card without room for its part leaves it to the other.
    tight = replace(unlike, cards=(replace(CARD, vram_nbytes=1e9 + 7e8), unlike.cards[1]))
    spread = pack(Question(LAYERS, tight, PROMPT), range(8), [1.0] * 8, evenly=True)
    assert spread.over == [(1.0, 0.0)] * 2 + [(0.0, 1.0)] * 6


def test_a_mixture_is_shared_in_whole_layers() -> None:
    loads = [
        load
        for layer in range(7)
        for load in (
            dense(f"{layer}.o", 2e8, layer),
            Load(f"{layer}.experts", "experts", layer, 1e8, 1e9, experts=4, top_k=2),
        )
    ]
    for flops in (CARD.flops / each for each in (1.0, 1.5, 2.0, 3.0)):
        cards = (CARD, replace(CARD, flops=flops))
        question = Question(model(*loads), replace(MACHINE, cards=cards), PROMPT)
        spread = pack(question, range(len(loads)), [1.0] * len(loads), evenly=True)
        assert spread.over[::2] == spread.over[1::2]
        assert {(1.0, 0.0), (0.0, 1.0)} == set(spread.over)


@pytest.mark.parametrize("layers", range(3, 8))
def test_no_layer_of_a_mixture_is_divided(layers: int) -> None:
    catalog = mixture_catalog(layers=layers)
    whole = model_of(catalog, "synthetic", is_ours=True)
    for first, second in ((1.0, 1.0), (1.0, 0.7), (1.0, 0.3), (0.4, 1.0)):
        cards = (replace(CARD, flops=first * CARD.flops), replace(CARD, flops=second * CARD.flops))
        question = Question(whole, replace(MACHINE, cards=cards), PROMPT)
        spread = pack(question, range(len(whole.loads)), [1.0] * len(whole.loads), evenly=True)
        for layer in range(layers):
            homes = {
                over
                for load, over in zip(whole.loads, spread.over, strict=True)
                if load.layer == layer
            }
            assert len(homes) == 1, layer


def test_what_is_pinned_elsewhere_is_nobodys_share() -> None:
    experts = Load("0.experts", "experts", 0, 4e8, 1e12, experts=4, top_k=2, home="cpu")
    loads = [dense(f"{layer}.o", 2e8, layer) for layer in range(8)]
    question = Question(model(experts, *loads), TWO, PROMPT)
    spread = pack(question, range(9), [1.0] * 9, evenly=True)
    assert spread.over[1:] == [(1.0, 0.0)] * 4 + [(0.0, 1.0)] * 4


def test_only_what_brings_and_reads_nothing_is_in_micro_batches() -> None:
    question = Question(LAYERS, TWO, PROMPT)
    assert in_micro_batches(question, HALVES).micro_batches == 8
    short = Question(LAYERS, TWO, replace(PROMPT, rows=700))
    assert in_micro_batches(short, HALVES).micro_batches == 1
    for site in (Site(0.5, 0.5, brought_prefill=1.0, over=(1.0, 0.0)), Site(0.5, 0.4)):
        plan = Plan("", (site, *HALVES.sites[1:]))
        assert in_micro_batches(question, plan).micro_batches == 1


def test_the_search_finds_what_is_tuned_by_hand_and_no_bound_is_beaten() -> None:
    wide = replace(
        LAYERS, row_nbytes=1e5
    )  # which dividing each group between cards sends to and fro
    question = Question(wide, TWO, PROMPT)
    hand = by_hand(question)
    assert hand[PIPELINED].seconds < 0.7 * hand["layer-split"].seconds
    found = search(question, rivals=hand)
    assert found.plan.micro_batches > 1
    assert found.seconds <= hand[PIPELINED].seconds * (1.0 + STILL)
    assert hybrid_bounds(question).path_s <= found.seconds
    assert PIPELINED not in by_hand(Question(LAYERS, MACHINE, PROMPT)), "it takes several cards"
