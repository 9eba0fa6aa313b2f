"""Routers on cards: who chooses adds up, and a layer that is all on one card crosses nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shadowlane.planner.card_placement import place_on_cards
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.hardware import CALM, Card, Hardware
from shadowlane.planner.hybrid import Model, Plan, Site, Work, chooser, model_of
from shadowlane.planner.hybrid_changes import follow
from shadowlane.planner.hybrid_hand import layer_split, num_layers
from shadowlane.planner.hybrid_layouts import Question, Spread, settle
from shadowlane.planner.hybrid_play import rates_of
from shadowlane.planner.hybrid_price import price_of
from shadowlane.planner.hybrid_search import search
from shadowlane.planner.pins import pinned
from shadowlane.planner.placement import LaneSpec, Request
from shadowlane.planner.plan_of import plan_of
from shadowlane.planner.synthetic import mixture_catalog

CARD = Card("card", 4e9, 0.0, 400e9, 40e12, 20e9, 20e9, launch_s=5e-6, crossing_s=50e-6)
TWO = Hardware("machine", (CARD, CARD), 40e9, 1e12, 2e-6, 60e9, 64e9, 0.0, 5e9)
CATALOG = mixture_catalog(layers=4)
WORK = Work(context=64, max_context=128)
FIRST, SECOND = (1.0, 0.0), (0.0, 1.0)


def asked() -> Question:
    return Question(model_of(CATALOG, "mixture", is_ours=True), TWO, WORK)


def with_routers_in_ram() -> Question:
    """The same, where the processor has to choose."""
    model = asked().model
    homes = {load.name: "cpu" for load in model.loads if load.is_undivided}
    return replace(asked(), model=pinned(model, homes))


def as_files_have_it() -> Catalog:
    """Gate and up of the shared expert come between a router and its experts."""
    groups = list(CATALOG.groups)
    for place, group in enumerate(CATALOG.groups):
        if group.kind == "experts":
            groups[place : place + 2] = groups[place + 1], group
    return replace(CATALOG, groups=tuple(groups))


def spread_with(model: Model, **kinds: tuple[float, tuple[float, ...]]) -> Spread:
    """All on the first card but kinds that are named: (part on cards, how cards share it)."""
    found = [kinds.get(load.kind, (1.0, FIRST)) for load in model.loads]
    return Spread([vram for vram, _ in found], [over for _, over in found])


def routers(question: Question, **kinds: tuple[float, tuple[float, ...]]) -> set[int]:
    """Sides that compute routers: 0 for the processor."""
    plan = settle(question, "", spread_with(question.model, **kinds))
    assert plan is not None
    return {
        chooser(question.model, plan.sites, index)
        for index, load in enumerate(question.model.loads)
        if load.experts
    }


def test_a_router_is_on_the_card_of_its_layer() -> None:
    question = asked()
    assert routers(question) == {1}
    assert routers(question, experts=(0.5, FIRST)) == {1}
    assert routers(question, experts=(0.5, (0.5, 0.5))) == {1}
    assert routers(question, experts=(1.0, FIRST), gate_up=(0.0, FIRST)) == {1}


@pytest.mark.parametrize(
    "kinds",
    [
        {"experts": (0.0, FIRST)},
        {"experts": (0.5, SECOND)},
        {"o": (0.5, FIRST)},
        {"o": (1.0, SECOND)},
        {"experts": (0.5, FIRST), "gate_up": (0.5, FIRST)},
        {"router": (1.0, (0.5, 0.5))},
        {"router": (0.5, FIRST)},
    ],
)
def test_a_router_that_would_save_nothing_is_the_processors(
    kinds: dict[str, tuple[float, tuple[float, ...]]],
) -> None:
    assert routers(asked(), **kinds) == {0}


@pytest.mark.parametrize(("part", "side"), [(0.0, 0), (0.9, 0), (1.0, 1)])
def test_a_router_is_on_the_card_where_prompts_have_all_experts_brought(
    part: float, side: int
) -> None:
    """However none of them lives there."""
    model = model_of(CATALOG, "mixture", is_ours=True, brings_experts=True)
    question = replace(asked(), model=model)
    brought = {"prefill": [part] * len(model.loads)}
    plan = settle(question, "", spread_with(model, experts=(0.0, FIRST)), brought)
    assert plan is not None
    found = {chooser(model, plan.sites, n) for n, load in enumerate(model.loads) if load.experts}
    assert found == {side}


@pytest.mark.parametrize(
    ("kinds", "side"),
    [
        ({}, 1),
        ({"experts": (0.5, FIRST)}, 1),
        ({"experts": (0.5, FIRST), "down": (0.5, FIRST)}, 0),
        ({"experts": (0.0, FIRST)}, 0),
        ({"gate_up": (0.5, FIRST)}, 0),
    ],
)
def test_a_shared_expert_may_come_between(
    kinds: dict[str, tuple[float, tuple[float, ...]]], side: int
) -> None:
    """What is planned is what a placement has: the lane of the router adds up."""
    catalog = as_files_have_it()
    question = replace(asked(), model=model_of(catalog, "", is_ours=True))
    assert routers(question, **kinds) == {side}
    plan = settle(question, "", spread_with(question.model, **kinds))
    assert plan is not None
    lanes = tuple(LaneSpec(lane, 1) for lane in ("cpu:0", "gpu:0", "gpu:1"))
    placement = place_on_cards(catalog, plan, Request(ram=10**9, lanes=lanes), question)
    exact = plan_of(catalog, placement, question.model)
    for index, load in enumerate(question.model.loads):
        if load.experts:
            adds_up = placement.shares[load.name][-1].lane
            assert lanes[chooser(question.model, exact.sites, index)].name == adds_up


def test_a_layer_on_one_card_crosses_nothing() -> None:
    """The same step as of a layout that knows no processor between router and experts.

    Ours counts whole pages.
    """
    ours, theirs = asked(), Question(model_of(CATALOG, "mixture"), TWO, WORK)
    split = layer_split(ours, num_layers(ours.model))
    other = layer_split(theirs, num_layers(theirs.model))
    assert split is not None
    assert other is not None
    assert ours.times(split).step_s == pytest.approx(theirs.times(other).step_s, rel=0.01)
    before = with_routers_in_ram()
    assert routers(before) == {0}
    joined = layer_split(before, num_layers(before.model))
    assert joined is not None
    crossings = 2 * CATALOG.experts.num_layers if CATALOG.experts else 0
    more_s = before.times(joined).step_s - ours.times(split).step_s
    assert more_s > crossings * CARD.crossing_s


def test_what_others_give_crosses_to_the_card_that_adds_up() -> None:
    """Half of the experts with the processor: once to it and once back, as long as it computes."""
    question = asked()
    loads = question.model.loads
    plan = settle(question, "", spread_with(question.model, experts=(0.5, FIRST)))
    assert plan is not None
    moved = Plan(
        "",
        tuple(
            Site(0.0, 1.0, over=FIRST) if load.is_undivided else site
            for load, site in zip(loads, plan.sites, strict=True)
        ),
    )
    assert question.times(plan).step_s <= question.times(moved).step_s


def test_the_search_finds_it() -> None:
    ours, before = asked(), with_routers_in_ram()
    best = search(ours)
    split = layer_split(ours, num_layers(ours.model))
    assert split is not None
    assert best.times.step_s <= ours.times(split).step_s * 1.001
    assert best.times.step_s < 0.8 * search(before).times.step_s


def test_room_for_routers_is_kept() -> None:
    """Where cards are nearly full, what is planned still fits."""
    loads = asked().model.loads
    heavy = tuple(replace(load, nbytes=2e6) if load.is_undivided else load for load in loads)
    model = replace(asked().model, loads=heavy)
    card = replace(CARD, vram_nbytes=0.3 * model.nbytes)
    question = Question(model, replace(TWO, cards=(card, card)), WORK)
    assert question.fits(search(question).plan)


def test_routers_follow_to_cards_that_have_come_to_hold_their_layers() -> None:
    question = asked()
    spread = spread_with(question.model, router=(0.0, FIRST))
    plan = settle(question, "by hand", spread)
    assert plan is not None
    better = follow(question, question.answer(plan))
    assert {site.vram for site in better.plan.sites} == {1.0}
    assert better.seconds < question.times(plan).step_s


def test_a_card_that_adds_up_experts_of_others_takes_the_time_of_its_launch() -> None:
    """Its own experts have had to go, and its router is still there."""
    question = asked()
    experts = next(load for load in question.model.loads if load.experts)
    rates = rates_of(TWO, CALM)
    elsewhere = Site(0.0, 1.0, over=FIRST)
    price = price_of(experts, elsewhere, WORK, rates, question.hit_rate, adds_up=1)
    assert price.sides_s[1] == pytest.approx(CARD.launch_s)
    assert price.sides_s[2] == 0.0
    alone = price_of(experts, elsewhere, WORK, rates, question.hit_rate)
    assert alone.sides_s[1:] == (0.0, 0.0)


def test_of_prompts_a_card_that_is_here_tells_its_host_what_it_chose() -> None:
    """There and back for each layer, where a card chooses and has experts; of answers nothing."""
    emulated = asked()
    model = model_of(CATALOG, "", is_ours=True, cards_here=True)
    here = replace(emulated, model=model)
    layers = sum(1 for load in model.loads if load.experts)
    for router, crossings in ((1.0, 2 * layers), (0.0, 0)):
        plan = settle(here, "", spread_with(model, router=(router, FIRST)))
        assert plan is not None
        decode, prompt = emulated.work, replace(emulated.work, phase="prefill", rows=32)
        for work, more_s in ((decode, 0.0), (prompt, crossings * CARD.crossing_s)):
            took = [replace(each, work=work).times(plan).step_s for each in (emulated, here)]
            assert took[1] - took[0] == pytest.approx(more_s, abs=1e-9)
