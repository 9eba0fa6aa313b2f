"""Programs over cards, and what is no placement over cards: `validate` tells the story."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shadowlane.planner.card_placement import place_on_cards
from shadowlane.planner.hardware import Card, Hardware
from shadowlane.planner.hybrid import Plan, Site, Work, model_of
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.placement import CardPart, LaneSpec, Placement, Request, Share
from shadowlane.planner.plan_of import plan_of
from shadowlane.planner.profile import Phase
from shadowlane.planner.program import ComputeInstruction, Read, Wait, build_programs
from shadowlane.planner.synthetic import llama_catalog, mixture_catalog
from shadowlane.planner.validate import InconsistentPrograms, validate

CARD = Card("card", 64e6, 0.0, 400e9, 40e12, 20e9, 20e9, launch_s=5e-6, crossing_s=20e-6)
MACHINE = Hardware("machine", (CARD,), 40e9, 1e12, 2e-6, 60e9, 64e9, 0.0, 5e9)
LLAMA = llama_catalog(layers=2, hidden=256, inner=512, heads_kv=4, vocab=512, tile_rows=64)
QUESTION = Question(model_of(LLAMA, "synthetic"), MACHINE, Work(context=64, max_context=64))
REQUEST = Request(ram=1 << 30, lanes=(LaneSpec("cpu:0", 1), LaneSpec("gpu:0", 1)))
HALF = Site(0.5, 0.5, 0.5, brought_prefill=1.0)  # on the card; and a quarter, or all, brought


def placed(site: Site = HALF) -> Placement:
    plan = Plan("", (site,) * len(QUESTION.model.loads))
    return place_on_cards(LLAMA, plan, REQUEST, QUESTION)


def refused(placement: Placement, phase: Phase = "decode") -> str:
    with pytest.raises(InconsistentPrograms) as caught:
        validate(LLAMA, placement, build_programs(LLAMA, placement, phase), phase)
    return str(caught.value)


def with_card(placement: Placement, **changes: object) -> Placement:
    card: CardPart = replace(placement.cards[0], **changes)  # type: ignore[arg-type]
    return replace(placement, cards=(card,))


def test_what_lives_on_a_card_waits_for_no_link() -> None:
    placement = placed()
    programs = build_programs(LLAMA, placement)
    mine = [
        each
        for each in programs["gpu:0"].instructions
        if isinstance(each, ComputeInstruction) and each.group == "1.gate_up"
    ]
    assert [(each.first_unit, each.last_unit) for each in mine] == [(0, 16), (16, 24)]
    resident, brought = mine
    assert [wait.lane for wait in resident.waits] == ["cpu:0"]
    assert [wait.lane for wait in brought.waits] == ["h2d:0"]
    assert set(programs) == {"cpu:0", "gpu:0", "h2d:0", "disk:0"}
    assert programs["disk:0"].instructions == ()


def test_a_link_waits_for_the_card_only_and_each_phase_has_its_programs() -> None:
    placement = placed()
    for phase in ("decode", "prefill"):
        link = build_programs(LLAMA, placement, phase)["h2d:0"]
        assert len(link.instructions) == len(placement.cards[0].stream(phase).sweep)
        for read in link.instructions:
            assert isinstance(read, Read)
            assert {wait.lane for wait in read.consumers} == {"gpu:0"}
    decode, prefill = (len(placement.cards[0].stream(each).sweep) for each in ("decode", "prefill"))
    assert decode < prefill


def test_a_card_must_not_hold_more_than_its_budget() -> None:
    placement = placed()
    held = placement.cards[0].total_nbytes
    full = with_card(placement, budget=held)
    validate(LLAMA, full, build_programs(LLAMA, full))
    assert f"holds {held} bytes; its budget is {held - 1}" in refused(
        with_card(placement, budget=held - 1)
    )


def test_room_for_weights_must_be_that_of_the_blocks() -> None:
    placement = placed()
    less = placement.cards[0].weights_nbytes - 4096
    assert f"in room for {less}" in refused(with_card(placement, weights_nbytes=less))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_what_is_brought_must_be_in_ram_or_come_there(phase: Phase) -> None:
    placement = placed()
    last = placement.cards[0].stream(phase).sweep[-1]
    resident = [kept and index != last for index, kept in enumerate(placement.resident)]
    text = refused(replace(placement, resident=tuple(resident)), phase)
    assert f"h2d:0 brings block {last} of lm_head, which is neither in RAM nor read" in text


def test_a_card_computes_only_with_what_it_has() -> None:
    placement = placed()
    resident = placement.cards[0].resident
    text = refused(with_card(placement, resident=resident[1:]))
    assert "gpu:0[0]" in text
    assert f"reads block {resident[0]}, not there" in text
    sweep = placement.cards[0].decode_sweep
    text = refused(with_card(placement, decode_sweep=sweep[:-1]))
    assert f"reads block {sweep[-1]}, not there" in text


def test_the_processor_computes_only_with_what_is_in_ram() -> None:
    placement = placed(Site(0.5, 0.5))
    group = LLAMA.group("0.qkv")
    only_on_card = next(index for index in group.blocks if index in placement.cards[0].resident)
    assert not placement.resident[only_on_card]
    shares = {**placement.shares, "0.qkv": (Share("cpu:0", 0, group.units),)}
    text = refused(replace(placement, shares=shares))
    assert "cpu:0" in text
    assert f"reads block {only_on_card}, not there" in text


def test_a_link_must_not_bring_ahead_of_its_card() -> None:
    """A slot that is overwritten too soon is found, whichever lane fills it."""
    placement = placed()
    programs = build_programs(LLAMA, placement)
    link = programs["h2d:0"]
    first, *others = link.instructions
    assert isinstance(first, Read)
    (wait,) = first.consumers
    early = replace(first, consumers=(Wait(wait.lane, wait.rel - 1),))
    programs["h2d:0"] = replace(link, instructions=(early, *others))
    with pytest.raises(InconsistentPrograms, match="slot would be freed at the wrong time"):
        validate(LLAMA, placement, programs)


def test_a_ring_that_is_too_small_is_a_deadlock_with_its_slots_named() -> None:
    placement = placed()
    programs = build_programs(LLAMA, placement)
    assert placement.cards[0].num_slots > 2
    with pytest.raises(InconsistentPrograms, match=r"deadlock with .*1 slots of h2d:0"):
        validate(LLAMA, with_card(placement, num_slots=1), programs)


# -- routed experts

MIXTURE = mixture_catalog(
    layers=2, num_experts=8, top_k=2, expert_inner=64, hidden=128, inner=128, vocab=256
)
ROUTED = Question(
    model_of(MIXTURE, "synthetic", is_ours=True), MACHINE, Work(context=64, max_context=64)
)


def routed(vram: float = 0.5, router: float | None = None) -> Placement:
    """router: the part of routers on the card, if it is another."""
    parts = (
        router if load.is_undivided and router is not None else vram for load in ROUTED.model.loads
    )
    plan = Plan("", tuple(Site(part, 1.0 - part) for part in parts))
    return place_on_cards(MIXTURE, plan, REQUEST, ROUTED)


def refused_mixture(placement: Placement) -> str:
    with pytest.raises(InconsistentPrograms) as caught:
        validate(MIXTURE, placement, build_programs(MIXTURE, placement))
    return str(caught.value)


def test_card_and_processor_compute_experts_at_the_same_time_and_the_processor_joins() -> None:
    placement = routed()
    programs = build_programs(MIXTURE, placement)
    validate(MIXTURE, placement, programs)
    of_group = {
        lane: (place, each)
        for lane in ("cpu:0", "gpu:0")
        for place, each in enumerate(programs[lane].instructions)
        if isinstance(each, ComputeInstruction) and each.group == "1.experts"
    }
    at_card, of_card = of_group["gpu:0"]
    at_processor, of_processor = of_group["cpu:0"]
    assert (of_card.first_unit, of_card.last_unit) == (0, 4)
    assert (of_processor.first_unit, of_processor.last_unit) == (4, 9)
    assert of_processor.joins == (Wait("gpu:0", at_card + 1),)
    assert of_card.joins == ()
    assert of_card.waits == (Wait("cpu:0", at_processor),), "the router is the instruction before"


@pytest.mark.parametrize(
    ("router", "shares"),
    [(0.0, (Share("gpu:0", 0, 8), Share("cpu:0", 8, 9))), (1.0, (Share("gpu:0", 0, 9),))],
)
def test_all_experts_may_live_on_a_card(router: float, shares: tuple[Share, ...]) -> None:
    """Who has the router adds up."""
    placement = routed(1.0, router)
    assert placement.experts_on_cards == 16
    assert placement.shares["0.experts"] == shares
    validate(MIXTURE, placement, build_programs(MIXTURE, placement))


def test_an_expert_on_a_card_needs_a_share() -> None:
    placement = routed()
    shares = {**placement.shares, "0.experts": (Share("cpu:0", 0, 9),)}
    text = refused_mixture(replace(placement, shares=shares))
    assert "0.experts: gpu:0 has a share of 0 in decode; 4 experts live there" in text


def test_a_share_needs_its_experts() -> None:
    placement = routed()
    first, second = placement.cards[0].experts
    text = refused_mixture(with_card(placement, experts=(first[1:], second)))
    assert "0.experts: gpu:0 has a share of 4 in decode; 3 experts live there" in text
    text = refused_mixture(with_card(placement, experts=((first[0], *first[:-1]), second)))
    assert "experts on cards must be different ones below 8" in text


def test_room_for_experts_must_be_theirs() -> None:
    placement = routed()
    less = placement.cards[0].experts_nbytes - 4096
    assert f"in room for {less}" in refused_mixture(with_card(placement, experts_nbytes=less))


def test_a_card_that_chooses_adds_up_and_only_who_adds_up_is_waited_for() -> None:
    model = model_of(MIXTURE, "synthetic", is_ours=True)
    question = replace(ROUTED, model=model)
    whole, half = Site(1.0, 0.0), Site(0.5, 0.5)
    plan = Plan("", tuple(half if load.experts else whole for load in model.loads))
    placement = place_on_cards(MIXTURE, plan, REQUEST, question)
    assert placement.shares["0.router"] == (Share("gpu:0", 0, 1),)
    assert placement.shares["0.experts"] == (Share("cpu:0", 0, 4), Share("gpu:0", 4, 9))
    programs = build_programs(MIXTURE, placement)
    validate(MIXTURE, placement, programs)
    of_card = {
        each.group: each
        for each in programs["gpu:0"].instructions
        if isinstance(each, ComputeInstruction)
    }
    assert of_card["0.experts"].joins == (Wait("cpu:0", 2),)
    assert of_card["0.experts"].waits == of_card["0.gate_up"].waits == ()
    assert [each.group for each in programs["cpu:0"].instructions] == [  # type: ignore[union-attr]
        "embed",
        "0.experts",
        "1.experts",
    ]
    exact = plan_of(MIXTURE, placement, model)
    assert place_on_cards(MIXTURE, exact, REQUEST, question).shares == placement.shares


def test_one_lane_chooses() -> None:
    placement = routed()
    shares = {**placement.shares, "0.router": (Share("gpu:0", 0, 1), Share("cpu:0", 1, 2))}
    text = refused_mixture(replace(placement, shares=shares))
    assert "0.experts: one lane must choose them; got gpu:0, cpu:0" in text


def test_who_adds_up_must_wait_for_all_cards() -> None:
    placement = routed()
    programs = build_programs(MIXTURE, placement)
    hasty = tuple(
        replace(each, joins=()) if isinstance(each, ComputeInstruction) else each
        for each in programs["cpu:0"].instructions
    )
    programs["cpu:0"] = replace(programs["cpu:0"], instructions=hasty)
    with pytest.raises(InconsistentPrograms, match=r"adds up experts of \['gpu:0'\]"):
        validate(MIXTURE, placement, programs)


def test_the_hottest_experts_are_dealt_out_to_cards() -> None:
    """So that each gets hot ones; a plan that is made exact again is the same."""
    experts = MIXTURE.experts
    assert experts is not None
    ranks = ((7, 6, 5, 4, 3, 2, 1, 0), (0, 2, 4, 6, 1, 3, 5, 7))
    known = replace(MIXTURE, experts=replace(experts, ranks=ranks))
    two = replace(ROUTED, machine=replace(MACHINE, cards=(CARD, CARD)))
    request = replace(REQUEST, lanes=(*REQUEST.lanes, LaneSpec("gpu:1", 1)))
    plan = Plan("", (Site(0.5, 0.5, over=(0.5, 0.5)),) * len(ROUTED.model.loads))
    placement = place_on_cards(known, plan, request, two)
    assert [card.experts for card in placement.cards] == [((7, 5), (0, 4)), ((6, 4), (2, 6))]
    exact = plan_of(known, placement, two.model)
    again = place_on_cards(known, exact, request, two)
    assert again.cards == placement.cards
    assert again.shares == placement.shares


def test_what_has_no_room_goes_before_all_else() -> None:
    """Experts first, the least used of each layer in turn."""
    experts = MIXTURE.experts
    assert experts is not None
    full = routed()
    room = full.cards[0].total_nbytes - 3 * experts.slot_nbytes
    plan = Plan("", (Site(0.5, 0.5),) * len(ROUTED.model.loads))
    placement = place_on_cards(MIXTURE, plan, REQUEST, ROUTED, budgets={"gpu:0": room})
    (card,) = placement.cards
    assert card.resident == full.cards[0].resident
    assert card.experts == ((0, 1, 2), (0, 1))
    assert any("do not fit" in note for note in placement.notes)
