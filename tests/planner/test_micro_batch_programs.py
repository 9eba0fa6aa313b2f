"""Programs of several micro-batches: consistent, never stuck, and lanes work at the same time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shadowlane.planner.card_placement import place_on_cards
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.cost import CostModel
from shadowlane.planner.hardware import Card, Hardware
from shadowlane.planner.hybrid import Plan, Site, Work, model_of
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.placement import LaneSpec, Placement, Request
from shadowlane.planner.program import ComputeInstruction, Program, Wait, build_programs
from shadowlane.planner.search import place
from shadowlane.planner.synthetic import llama_catalog, mixture_catalog
from shadowlane.planner.validate import InconsistentPrograms, compute_instructions, validate

CARD = Card("card", 64e6, 0.0, 400e9, 40e12, 20e9, 20e9, launch_s=5e-6, crossing_s=20e-6)
SUBCHUNKS = 8
MIXTURE = mixture_catalog(
    layers=2, num_experts=8, top_k=2, expert_inner=64, hidden=128, inner=128, vocab=256
)
LLAMA = llama_catalog(layers=4, hidden=128, inner=256, tile_rows=64, subchunk_nbytes=100_000)


def placed(catalog: Catalog, *sites: Site, micro_batches: int = 1, cards: int = 2) -> Placement:
    """sites: one for all loads, or one for each."""
    machine = Hardware("machine", (CARD,) * cards, 40e9, 1e12, 2e-6, 60e9, 64e9, 0.0, 5e9)
    model = model_of(catalog, "synthetic", is_ours=True)
    question = Question(model, machine, Work(context=64, max_context=64))
    lanes = ("cpu:0", *(f"gpu:{number}" for number in range(cards)))
    request = Request(
        ram=1 << 30,
        lanes=tuple(LaneSpec(name, 1) for name in lanes),
        subchunks=SUBCHUNKS if catalog.chunk_scratch else None,
        micro_batches=micro_batches,
    )
    even = (1 / cards,) * cards
    sites = tuple(replace(site, over=even) if site.over == (1.0,) else site for site in sites)
    loads = sites * len(model.loads) if len(sites) == 1 else sites
    return place_on_cards(catalog, Plan("by a test", loads), request, question)


def by_layers(catalog: Catalog, ends: tuple[int, ...], micro_batches: int) -> Placement:
    """Each card has the layers up to its end; the processor those behind, and the head."""
    loads = model_of(catalog, "synthetic").loads
    sites = []
    for load in loads:
        number = re.match(r"\d+", load.name)
        card = sum(int(number.group()) >= end for end in ends) if number else len(ends)
        over = tuple(float(each == card) for each in range(len(ends)))
        sites.append(Site(1.0, 0.0, over=over) if card < len(ends) else Site(0.0, 1.0))
    return placed(catalog, *sites, micro_batches=micro_batches, cards=len(ends))


parts = st.one_of(st.sampled_from([0.0, 1.0, 0.5]), st.floats(0.01, 0.99))


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Catalog, Placement]:
    catalog = llama_catalog(
        layers=draw(st.integers(1, 4)),
        hidden=draw(st.sampled_from([64, 128])),
        inner=draw(st.sampled_from([128, 336])),
        heads_kv=draw(st.integers(1, 3)),
        vocab=512,
        tile_rows=draw(st.sampled_from([16, 48, 64, 512])),
        tied=draw(st.booleans()),
        subchunk_nbytes=1000,
    )
    cards = draw(st.integers(1, 3))
    sites = []
    for _ in model_of(catalog, "synthetic").loads:
        vram, shares = draw(parts), [draw(parts) + 1e-3 for _ in range(cards)]
        over = tuple(each / sum(shares) for each in shares)
        sites.append(Site(vram, 1.0 - vram, over=over))
    count = draw(st.integers(1, SUBCHUNKS))
    return catalog, placed(catalog, *sites, micro_batches=count, cards=cards)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(drawn(), st.integers(0, 2**32 - 1))
def test_programs_are_consistent_and_never_wait_for_ever(
    question: tuple[Catalog, Placement], first_counter: int
) -> None:
    catalog, placement = question
    programs = build_programs(catalog, placement, "prefill")
    validate(catalog, placement, programs, "prefill", first_counter=first_counter)
    validate(catalog, placement, programs, "prefill")  # counters just below the wrap
    once = build_programs(catalog, placement)
    assert once == build_programs(catalog, replace(placement, micro_batches=1), "prefill")
    count = placement.micro_batches
    heads = {each.lane for each in placement.shares["lm_head"]}
    for lane, program in programs.items():
        of_head = len(once[lane].instructions) - _without_head(once[lane])
        assert bool(of_head) == (lane in heads)
        assert len(program.instructions) == count * _without_head(once[lane]) + of_head


def _without_head(program: Program) -> int:
    return sum(each.group != "lm_head" for each in compute_instructions(program))


def seconds(catalog: Catalog, placement: Placement, subchunks: int) -> float:
    """Of a chunk, where each instruction takes a second for each sub-chunk of its micro-batch."""
    programs = build_programs(catalog, placement, "prefill")
    rows = {lane: compute_instructions(program) for lane, program in programs.items()}
    ended: dict[str, list[float]] = {lane: [] for lane in rows}
    bounds = [
        -(-number * subchunks // placement.micro_batches)
        for number in range(placement.micro_batches + 1)
    ]
    sizes = [last - first for first, last in pairwise(bounds)]
    while any(len(ended[lane]) < len(each) for lane, each in rows.items()):
        for lane, each in rows.items():
            while len(ended[lane]) < len(each) and is_ready(each[len(ended[lane])], ended):
                now = each[len(ended[lane])]
                waited = [ended[wait.lane][wait.rel - 1] for wait in now.waits]
                took = sizes[now.micro_batch] * (now.group not in ("embed", "lm_head"))
                ended[lane].append(max([0.0, *ended[lane][-1:], *waited]) + took)
    return max(each[-1] for each in ended.values() if each)


def is_ready(each: ComputeInstruction, ended: Mapping[str, list[float]]) -> bool:
    return all(len(ended[wait.lane]) >= wait.rel for wait in each.waits)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_cards_that_share_layers_evenly_work_at_the_same_time(count: int) -> None:
    whole = seconds(LLAMA, by_layers(LLAMA, (2, 4), 1), 8)
    for cards, ends in ((2, (2, 4)), (4, (1, 2, 3, 4))):
        placement = by_layers(LLAMA, ends, count)
        expected = (count + cards - 1) / (cards * count)
        assert seconds(LLAMA, placement, 8) == pytest.approx(expected * whole)


def test_a_wait_for_another_micro_batch_is_found() -> None:
    placement = by_layers(LLAMA, (2, 4), 4)
    programs = build_programs(LLAMA, placement, "prefill")
    validate(LLAMA, placement, programs, "prefill")
    at, each = next(
        (at, each)
        for at, each in enumerate(compute_instructions(programs["gpu:1"]))
        if each.micro_batch == 2 and each.waits
    )
    early = replace(each, waits=(Wait("gpu:0", each.waits[0].rel - 1),))
    instructions = list(programs["gpu:1"].instructions)
    instructions[at] = early
    programs["gpu:1"] = Program("gpu:1", tuple(instructions))
    with pytest.raises(InconsistentPrograms, match=r"does not wait for gpu:0, which has part of"):
        validate(LLAMA, placement, programs, "prefill")


def test_a_micro_batch_that_is_left_out_is_found() -> None:
    placement = by_layers(LLAMA, (2, 4), 2)
    fewer = replace(placement, micro_batches=3)
    programs = build_programs(LLAMA, placement, "prefill")
    with pytest.raises(InconsistentPrograms, match="are computed by nobody"):
        validate(LLAMA, fewer, programs, "prefill")
    *others, head = compute_instructions(programs["cpu:0"])
    early = replace(head, micro_batch=0)
    programs["cpu:0"] = Program("cpu:0", (*others, early, head))
    with pytest.raises(InconsistentPrograms, match=r"nobody wants \[\('lm_head', 0\)\]"):
        validate(LLAMA, placement, programs, "prefill")


def refused(catalog: Catalog, placement: Placement) -> str:
    with pytest.raises(ValueError, match="micro_batches must be") as caught:
        build_programs(catalog, placement, "prefill")
    with pytest.raises(ValueError, match="micro_batches must be"):
        validate(catalog, placement, build_programs(catalog, replace(placement, micro_batches=1)))
    return str(caught.value)


def test_what_is_there_once_in_each_step_cannot_be_wanted_more_often() -> None:
    half = Site(0.5, 0.5, brought_prefill=0.5)
    brings = replace(placed(LLAMA, half), micro_batches=2)
    count = len(brings.cards[0].prefill_sweep)
    assert refused(LLAMA, brings) == (
        f"micro_batches must be 1 where h2d:0 brings {count} blocks for each step of a prompt; "
        "got 2"
    )
    reads = replace(placed(LLAMA, Site(0.5, 0.25)), micro_batches=2)
    assert f"{len(reads.sweep)} blocks are read off the disk in each step" in refused(LLAMA, reads)
    routed = replace(placed(MIXTURE, Site(0.5, 0.5)), micro_batches=2, subchunks=2)
    assert "no card has the router and all experts of layer 0" in refused(MIXTURE, routed)
    lanes = (LaneSpec("cpu:0", 1), LaneSpec("cpu:1", 1))
    request = Request(ram=1 << 30, lanes=lanes, context=64, subchunks=4)
    processors = place(LLAMA, request, CostModel(None))
    assert "there are no cards" in refused(LLAMA, replace(processors, micro_batches=2))
    short = by_layers(LLAMA, (2, 4), 8)
    assert refused(LLAMA, replace(short, micro_batches=9)) == (
        "micro_batches must be between 1 and the 8 sub-chunks of a chunk; got 9"
    )
    with pytest.raises(ValueError, match="micro_batches must be at least 1; got 0"):
        replace(request, micro_batches=0)


@pytest.mark.parametrize("part", ["0.router", "1.experts"])
def test_a_mixture_may_have_several_where_a_card_has_all_of_a_layer(part: str) -> None:
    """The first layer is one card's, the next the other's; then a `part` is not where it was."""
    first, second = (Site(1.0, 0.0, over=over) for over in ((1.0, 0.0), (0.0, 1.0)))
    loads = model_of(MIXTURE, "synthetic").loads
    sites = [first if load.layer == 0 else second for load in loads]
    whole = replace(placed(MIXTURE, *sites), subchunks=2, micro_batches=2)
    validate(MIXTURE, whole, build_programs(MIXTURE, whole, "prefill"), "prefill")
    at = next(number for number, load in enumerate(loads) if load.name == part)
    for other in (Site(0.0, 1.0), second if sites[at] is first else first):
        moved = placed(MIXTURE, *sites[:at], other, *sites[at + 1 :])
        layer = part.split(".")[0]
        expected = f"no card has the router and all experts of layer {layer}"
        assert expected in refused(MIXTURE, replace(moved, subchunks=2, micro_batches=2))


def test_what_is_asked_for_is_given_where_it_can_be() -> None:
    assert by_layers(LLAMA, (2, 4), 4).micro_batches == 4
    assert by_layers(LLAMA, (2, 4), 100).micro_batches == SUBCHUNKS
    whole = placed(LLAMA, Site(0.5, 0.5, brought_prefill=0.5), micro_batches=4)
    assert whole.micro_batches == 1
    assert any("prompts go through in one piece" in note for note in whole.notes)
