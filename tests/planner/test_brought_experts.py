"""Routed experts that come to cards for prompts: plans, placements and programs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shadowlane.planner.card_placement import place_on_cards
from shadowlane.planner.hardware import Card, Hardware
from shadowlane.planner.hybrid import Plan, Prompts, Site, Work, model_of
from shadowlane.planner.hybrid_hand import by_hand
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.hybrid_search import search
from shadowlane.planner.placement import LaneSpec, Placement, Request, Share
from shadowlane.planner.plan_of import plan_of
from shadowlane.planner.program import ComputeInstruction, Read, Wait, build_programs
from shadowlane.planner.search import most_kept
from shadowlane.planner.stages import first_stage, with_experts
from shadowlane.planner.synthetic import mixture_catalog
from shadowlane.planner.validate import InconsistentPrograms, validate

CARD = Card("card", 1e9, 0.0, 400e9, 40e12, 20e9, 20e9, launch_s=10e-6, crossing_s=20e-6)
MACHINE = Hardware("machine", (CARD,), 40e9, 1e12, 3e-6, 60e9, 16e9, 0.0, 5e9)
CATALOG = mixture_catalog(
    layers=2, num_experts=8, top_k=2, expert_inner=64, hidden=128, inner=128, vocab=256
)
EXPERTS = CATALOG.experts
assert EXPERTS is not None
MODEL = model_of(CATALOG, "synthetic", is_ours=True, brings_experts=True)
WORK = Work(context=64, max_context=64)
PROMPTS = Prompts(Work("prefill", rows=64, context=64, max_context=64), 0.1)
QUESTION = Question(MODEL, MACHINE, WORK, prompts=PROMPTS)
AMPLE = 10**9
LEAN = 2 * 10**6  # no room for four experts of 98 kB beside as many as are asked for


def placed(
    site: Site,
    cards: int = 1,
    slots: int | None = None,
    question: Question = QUESTION,
    ram: int = AMPLE,
) -> Placement:
    lanes = (LaneSpec("cpu:0", 4), *(LaneSpec(f"gpu:{card}", 1) for card in range(cards)))
    question = replace(question, machine=replace(MACHINE, cards=(CARD,) * cards))
    plan = Plan("", (site,) * len(MODEL.loads))
    request = Request(ram=ram, lanes=lanes)
    placement = place_on_cards(CATALOG, plan, request, question, expert_slots=slots)
    for phase in ("decode", "prefill"):
        validate(CATALOG, placement, build_programs(CATALOG, placement, phase), phase)
    return placement


def brought(placement: Placement) -> list[tuple[tuple[int, ...], ...]]:
    """[card][layer]"""
    return [CATALOG.experts_in(card.prefill_sweep) for card in placement.cards]


def test_prompts_have_all_others_brought_and_single_tokens_none() -> None:
    """As far as slots in RAM can be spared."""
    placement = placed(Site(0.25, 0.75, brought_prefill=1.0))
    assert placement.shares["1.experts"] == (Share("gpu:0", 0, 2), Share("cpu:0", 2, 9))
    assert placement.shares_of("prefill")["1.experts"] == (
        Share("gpu:0", 0, 2),
        Share("gpu:0", 2, 8),
        Share("cpu:0", 8, 9),
    )
    assert brought(placement) == [((2, 3, 4, 5, 6, 7),) * 2]
    assert not any(map(CATALOG.is_expert, placement.cards[0].decode_sweep))


def test_the_card_waits_for_what_comes_and_frees_its_slot() -> None:
    placement = placed(Site(0.25, 0.75, brought_prefill=1.0))
    (card,) = placement.cards
    card = replace(card, num_slots=4, slots_nbytes=4 * card.slot_nbytes)
    placement = replace(placement, cards=(card,))
    programs = build_programs(CATALOG, placement, "prefill")
    validate(CATALOG, placement, programs, "prefill")
    of_layer = [
        (place, each)
        for place, each in enumerate(programs["gpu:0"].instructions)
        if isinstance(each, ComputeInstruction) and each.group == "1.experts"
    ]
    # what lives there begins at once; the others come by half a ring
    assert [(each.first_unit, each.last_unit) for _, each in of_layer] == [
        (0, 2),
        (2, 4),
        (4, 6),
        (6, 8),
    ]
    assert not any(wait.lane == "h2d:0" for wait in of_layer[0][1].waits)
    first = CATALOG.expert_number(1, 2)
    ordinal = card.prefill_sweep.index(first)
    assert of_layer[1][1].waits == (Wait("h2d:0", ordinal + 2),)
    read = programs["h2d:0"].instructions[ordinal]
    assert read == Read(first, ordinal, (Wait("gpu:0", of_layer[1][0] + 1),))
    (adding,) = (each for each in programs["cpu:0"].instructions if each.group == "1.experts")
    assert isinstance(adding, ComputeInstruction)
    assert adding.joins == (Wait("gpu:0", of_layer[-1][0] + 1),)


@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("part", [0.3, 0.5, 1.0])
@pytest.mark.parametrize("vram", [0.0, 0.25, 0.5])
def test_a_plan_that_is_made_exact_again_is_the_same(vram: float, part: float, cards: int) -> None:
    over = (1.0,) if cards == 1 else (0.5, 0.5)
    placement = placed(Site(vram, 1.0 - vram, brought_prefill=part, over=over), cards)
    numbers = [number for card in placement.cards for number in card.prefill_sweep]
    on_cards = placement.experts_on_cards
    wanted = part * (EXPERTS.total - on_cards)
    assert sum(map(CATALOG.is_expert, numbers)) == pytest.approx(wanted, abs=2)
    exact = plan_of(CATALOG, placement, MODEL)
    question = replace(QUESTION, machine=replace(MACHINE, cards=(CARD,) * cards))
    request = Request(ram=AMPLE, lanes=placement.lanes)
    again = place_on_cards(CATALOG, exact, request, question)
    assert again.prefill_shares == placement.prefill_shares
    assert again.cards == placement.cards


@pytest.mark.parametrize("slots", [4, 6, 9, 16])
def test_so_many_keep_their_slots_that_the_others_can_be_read(slots: int) -> None:
    """Where RAM has no room for a ring, no more come; where it has, the disk reads the others."""
    most = most_kept(EXPERTS, slots)
    assert most == (16 if slots == 16 else slots - 4)
    lean = placed(Site(0.0, 1.0, brought_prefill=1.0), slots=slots, ram=LEAN)
    assert lean.num_slots == 0
    layers = list(map(len, brought(lean)[0]))
    assert most - 1 <= sum(layers) <= most
    assert max(layers) - min(layers) <= 1
    ample = placed(Site(0.0, 1.0, brought_prefill=1.0), slots=slots)
    assert list(map(len, brought(ample)[0])) == [8, 8]
    kept = ample.experts_out_of_ram(CATALOG)
    assert most - 1 <= len(kept) <= most
    assert len(ample.prefill_sweep) == 16 - len(kept)
    assert bool(ample.num_slots) == (slots < 16)


@pytest.mark.parametrize("cards", [1, 2])
@pytest.mark.parametrize("part", [0.25, 0.5, 0.75, 1.0])
def test_the_disk_reads_the_coldest_for_links_in_their_order(part: float, cards: int) -> None:
    """What is left to the processor is what RAM has room for, beside those that are brought."""
    over = (1.0,) if cards == 1 else (0.5, 0.5)
    placement = placed(Site(0.0, 1.0, brought_prefill=part, over=over), cards, slots=12)
    come = [{n for of_card in brought(placement) for n in of_card[layer]} for layer in range(2)]
    read = CATALOG.experts_in(placement.prefill_sweep)
    kept = [layer - set(cold) for layer, cold in zip(come, read, strict=True)]
    for hot, cold, of_layer in zip(kept, read, come, strict=True):
        assert len(of_layer) == 8 * part
        assert len(cold) == min(8 * part, 4)  # the others' slots: 4 of each layer
        assert sorted(cold) == list(range(8 - len(cold), 8))
        assert hot == set(range(len(hot)))
    for card in placement.cards:
        its = [n for n in card.prefill_sweep if n in placement.prefill_sweep]
        assert its == [n for n in placement.prefill_sweep if n in card.prefill_sweep]
    exact = plan_of(CATALOG, placement, MODEL)
    question = replace(QUESTION, machine=replace(MACHINE, cards=(CARD,) * cards))
    request = Request(ram=AMPLE, lanes=placement.lanes)
    again = place_on_cards(CATALOG, exact, request, question, expert_slots=12)
    assert again.cards == placement.cards
    assert again.prefill_sweep == placement.prefill_sweep


def test_a_link_waits_for_the_disk_which_waits_for_it() -> None:
    placement = placed(Site(0.0, 1.0, brought_prefill=1.0), slots=9)
    placement = replace(
        placement, num_slots=4, slots_nbytes=4 * placement.slot_nbytes
    )  # fewer than a layer needs
    programs = build_programs(CATALOG, placement, "prefill")
    validate(CATALOG, placement, programs, "prefill")
    (card,) = placement.cards
    for place, number in enumerate(placement.prefill_sweep):
        ordinal = card.prefill_sweep.index(number)
        assert programs["disk:0"].instructions[place] == Read(
            number, place, (Wait("h2d:0", ordinal + 1),)
        )
        read = programs["h2d:0"].instructions[ordinal]
        assert isinstance(read, Read)
        assert read.waits == (Wait("disk:0", place + 1),)
    assert not build_programs(CATALOG, placement)["disk:0"].instructions


def refused(placement: Placement, phase: str = "prefill") -> str:
    with pytest.raises(InconsistentPrograms) as caught:
        validate(CATALOG, placement, build_programs(CATALOG, placement, phase), phase)
    return str(caught.value)


def test_what_cannot_be_brought_is_refused() -> None:
    placement = placed(Site(0.25, 0.75, brought_prefill=1.0))
    (card,) = placement.cards
    first, second = card.experts
    both = replace(card, experts=((2, *first[1:]), second))
    assert "must be different ones" in refused(replace(placement, cards=(both,)))
    small = replace(card, slot_nbytes=4096)
    assert "a slot of gpu:0 has 4096" in refused(replace(placement, cards=(small,)))
    assert "room for 8 that stay" in refused(replace(placement, expert_slots=12))
    fewer = replace(card, prefill_sweep=card.prefill_sweep[:-1])
    assert "has a share of 8 in prefill; 2 experts live there and 5 come" in refused(
        replace(placement, cards=(replace(fewer, prefill_sweep=_without_last_expert(card)),))
    )


def _without_last_expert(card: object) -> tuple[int, ...]:
    numbers = [n for n in card.prefill_sweep if CATALOG.is_expert(n)]  # type: ignore[attr-defined]
    return tuple(n for n in card.prefill_sweep if n != numbers[5])  # type: ignore[attr-defined]


def test_experts_that_are_exchanged_are_brought_in_place_of_those_that_come_to_stay() -> None:
    placement = placed(Site(0.25, 0.75, brought_prefill=1.0))
    (card,) = placement.cards
    experts = tuple((layer[0], 3) for layer in card.experts)
    after = with_experts(CATALOG, placement, [experts])
    for phase in ("decode", "prefill"):
        validate(CATALOG, after, build_programs(CATALOG, after, phase), phase)
    left = [layer[1] for layer in card.experts]
    for layer, (was, now) in enumerate(zip(brought(placement)[0], brought(after)[0], strict=True)):
        assert now == tuple(left[layer] if expert == 3 else expert for expert in was)
    full = replace(after, cards=(replace(after.cards[0], budget=card.total_nbytes),))
    stage = first_stage(CATALOG, placement, full)
    assert stage is not None
    for phase in ("decode", "prefill"):
        validate(CATALOG, stage, build_programs(CATALOG, stage, phase), phase)


@pytest.mark.parametrize("ram", [LEAN, AMPLE])
@pytest.mark.parametrize("slots", [8, 9, 12])
def test_what_the_next_plan_brings_has_slots_beside_what_this_one_brings(
    slots: int, ram: int
) -> None:
    """Else it would be refused: other experts leave cards, or fewer live there."""
    placement = placed(Site(0.25, 0.75, brought_prefill=1.0), slots=slots, ram=ram)
    (card,) = placement.cards
    most = most_kept(EXPERTS, slots)
    exchanged = with_experts(CATALOG, placement, [((2, 3), (2, 3))])
    plan = Plan("", (Site(0.0, 1.0, brought_prefill=1.0),) * len(MODEL.loads))
    request = Request(ram=ram, lanes=placement.lanes)
    none_left = place_on_cards(
        CATALOG, plan, request, QUESTION, expert_slots=slots, before=placement
    )
    on_cards = {
        CATALOG.expert_number(layer, expert)
        for layer, of_layer in enumerate(card.experts)
        for expert in of_layer
    }
    kept = placement.experts_out_of_ram(CATALOG)
    for after in (exchanged, none_left):
        for phase in ("decode", "prefill"):
            validate(CATALOG, after, build_programs(CATALOG, after, phase), phase)
        of_it = after.experts_out_of_ram(CATALOG)
        assert of_it <= kept | on_cards
        assert len(of_it | kept) <= most
        assert len(of_it) >= len(kept) - 4
        assert after.num_slots == placement.num_slots
        if placement.num_slots:
            assert len(of_it) + len(after.prefill_sweep) == 16 - after.experts_on_cards


def test_prompts_wait_for_routers_only_where_the_processor_lacks_experts() -> None:
    """What links bring is read ahead, and what has a slot in RAM is nobody's read."""
    catalog = mixture_catalog(
        layers=4, num_experts=16, top_k=4, expert_inner=512, hidden=1024, inner=512, vocab=1024
    )
    model = model_of(catalog, "synthetic", is_ours=True, brings_experts=True)
    slow = replace(MACHINE, disk_bytes_per_s=1e9, cpu_flops=1e14)
    prompt = Work("prefill", rows=512, context=512, max_context=512)
    question = Question(model, slow, prompt)

    def seconds(part: float) -> tuple[float, float]:
        sites = tuple(
            Site(0.0, 0.5, brought_prefill=part) if load.experts else Site(0.0, 1.0)
            for load in model.loads
        )
        times = question.times(Plan("", sites))
        return times.step_s, times.busy_s["disk:0"]

    (late_s, read_s), (ahead_s, as_much_s) = seconds(0.0), seconds(0.5)
    assert read_s == pytest.approx(as_much_s)
    assert ahead_s == pytest.approx(read_s, rel=0.01)
    assert late_s > 1.02 * read_s


def test_without_such_lanes_nothing_is_brought() -> None:
    model = model_of(CATALOG, "synthetic", is_ours=True)
    for answer in by_hand(replace(QUESTION, model=model)).values():
        for load, site in zip(model.loads, answer.plan.sites, strict=True):
            if load.experts:
                assert site.brought == site.brought_prefill == 0.0


def test_prompts_of_a_mixture_larger_than_the_card_are_sooner_with_experts_brought() -> None:
    """The processor computes slowly, and a chunk chooses nearly all."""
    catalog = mixture_catalog(
        layers=4, num_experts=16, top_k=4, expert_inner=512, hidden=1024, inner=512, vocab=1024
    )
    found = {}
    for brings in (False, True):
        model = model_of(catalog, "synthetic", is_ours=True, brings_experts=brings)
        card = replace(CARD, vram_nbytes=0.4 * model.nbytes)
        slow = replace(MACHINE, cards=(card,), cpu_flops=0.1e12)
        work = Work("prefill", rows=512, context=512, max_context=512)
        decode = Work(context=64, max_context=512)
        question = Question(model, slow, decode, prompts=Prompts(work, 0.01))
        found[brings] = search(question)
        for load, site in zip(model.loads, found[brings].plan.sites, strict=True):
            if load.experts:
                assert site.brought == 0.0
    times = {brings: answer.prompt_times for brings, answer in found.items()}
    assert times[True] is not None
    assert times[False] is not None
    assert times[True].step_s < 0.5 * times[False].step_s
    assert found[True].times.step_s <= 1.1 * found[False].times.step_s
