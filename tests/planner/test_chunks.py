"""How many sub-chunks of a prompt one step carries."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowlane.planner.catalog import Catalog, Experts, Group
from shadowlane.planner.chunks import HELD_UP_S, LEAST_GAIN, chunk_s, request_s
from shadowlane.planner.cost import CostModel
from shadowlane.planner.explain import plan_report
from shadowlane.planner.placement import InfeasiblePlan, Placement, Request
from shadowlane.planner.profile import DiskFigure, Profile
from shadowlane.planner.replan import plan_again
from shadowlane.planner.search import place
from shadowlane.planner.synthetic import llama_catalog
from shadowlane.planner.trial import Option

MIB = 1 << 20
ROWS = 64
CATALOG = llama_catalog(
    layers=8, max_context=1024, subchunk_rows=ROWS, subchunk_nbytes=4096, scratch_nbytes=MIB
)
HALF = 20 * MIB  # of the weights there are 37 MiB
AMPLE = 1 << 30


def disk(bytes_per_s: float) -> CostModel:
    return CostModel(Profile("h", "m", disk=(DiskFigure(MIB, 4, bytes_per_s),)))


SLOW, FAST = disk(20e6), disk(1e11)


def mixture() -> Catalog:
    """Eight layers with 32 experts of a quarter of a MiB beside what every token needs."""
    experts = Experts(8, 32, 4, MIB // 4, MIB // 4, MIB // 4)
    groups: list[Group] = []
    for group in CATALOG.groups:
        groups.append(group)
        if group.kind == "down":
            name = f"{group.layer}.experts"
            groups.append(Group(name, "experts", group.layer, "bf16", 1, 512, (), 6 * 4 * 131072))
    return replace(CATALOG, groups=tuple(groups), experts=experts)


def plan(ram: int, cost: CostModel, catalog: Catalog = CATALOG, **wishes: object) -> Placement:
    return place(catalog, Request(ram=ram, **wishes), cost)  # type: ignore[arg-type]


def test_what_is_all_in_ram_gives_none_of_it_to_longer_chunks() -> None:
    for cost in (SLOW, FAST):
        placement = plan(AMPLE, cost)
        assert (placement.subchunks, placement.beside_subchunks) == (1, 1)
        assert placement.scratch_nbytes == MIB


def test_a_slow_disk_is_read_once_for_a_whole_prompt() -> None:
    """Half of the context of 1024 tokens is eight sub-chunks."""
    placement = plan(HALF, SLOW)
    assert placement.sweep
    assert placement.subchunks == 8
    assert placement.scratch_nbytes == MIB + 7 * 4096
    assert placement.total_nbytes <= HALF
    short = plan(HALF, SLOW, subchunks=1)
    assert request_s(CATALOG, placement, SLOW) < request_s(CATALOG, short, SLOW)


def test_a_fast_disk_is_no_reason() -> None:
    placement = plan(HALF, FAST)
    assert placement.sweep
    assert placement.subchunks == 1


def test_ram_that_tokens_need_more_stays_with_weights() -> None:
    """Every token of the answer reads what a longer chunk takes the place of."""
    dear = replace(CATALOG, chunk_scratch=tuple((n, n * MIB) for n in (2, 4, 8)))
    assert plan(HALF, SLOW, dear).subchunks == 1


def test_a_mixture_that_misses_experts() -> None:
    catalog = mixture()
    dense = sum(block.held_nbytes for block in catalog.blocks)
    assert plan(dense + 30 * MIB, SLOW, catalog).subchunks == 8
    whole = plan(AMPLE, SLOW, catalog)
    assert whole.expert_slots == 8 * 32
    assert whole.subchunks == 1


def test_a_short_context_needs_no_long_chunks() -> None:
    assert plan(HALF, SLOW, context=2 * ROWS).subchunks == 1
    assert plan(HALF, SLOW, context=5 * ROWS).subchunks == 4


def test_a_context_that_may_shrink_does_not_for_a_longer_chunk() -> None:
    tight = replace(CATALOG, chunk_scratch=tuple((n, n * 8 * MIB) for n in (2, 4, 8)))
    for ram in range(8 * MIB, 40 * MIB, 4 * MIB):
        alone = plan(ram, SLOW, tight, subchunks=1)
        assert plan(ram, SLOW, tight).context_tokens == alone.context_tokens


def test_tokens_of_other_requests_do_not_wait_for_long() -> None:
    one = plan(HALF, SLOW)
    assert one.beside_subchunks == one.subchunks
    weak = SLOW.with_drift({"cpu:0": 8.0})
    two = plan(HALF, weak, max_batch=2, subchunks=8)
    assert 1 < two.beside_subchunks < two.subchunks
    assert chunk_s(CATALOG, two, weak, two.beside_subchunks * ROWS) <= HELD_UP_S
    assert chunk_s(CATALOG, two, weak, 2 * two.beside_subchunks * ROWS) > HELD_UP_S


def test_a_running_engine_keeps_its_chunks() -> None:
    request = Request(ram=HALF)
    now = place(CATALOG, request, SLOW)
    option = Option.as_placed("first plan", now)
    for cost in (SLOW, FAST):
        for anew in (True, False):
            again = plan_again(CATALOG, request, cost, option, {}, anew=anew).placement
            assert again.subchunks == now.subchunks
            assert again.scratch_nbytes == now.scratch_nbytes
    assert place(CATALOG, request, FAST, current=now).subchunks == now.subchunks


def test_what_was_asked_for_is_taken_or_refused() -> None:
    assert plan(AMPLE, FAST, subchunks=4).subchunks == 4
    with pytest.raises(ValueError, match="subchunks must be one of 1, 2, 4, 8 here; got 3"):
        plan(AMPLE, FAST, subchunks=3)
    with pytest.raises(ValueError, match="subchunks must be at least 1; got 0"):
        Request(ram=AMPLE, subchunks=0)


def test_the_report_names_the_rows() -> None:
    report = plan_report(CATALOG, plan(HALF, SLOW), SLOW)
    assert report["chunk_rows"] == 8 * ROWS
    assert report["predicted"]["prefill_tok_per_s"] == pytest.approx(
        8 * ROWS / chunk_s(CATALOG, plan(HALF, SLOW), SLOW, 8 * ROWS)
    )


@settings(max_examples=40, deadline=None)
@given(
    ram=st.integers(8 * MIB, 60 * MIB),
    bytes_per_s=st.sampled_from([20e6, 200e6, 2e9, 2e10]),
    each=st.integers(0, 2 * MIB),
    is_mixture=st.booleans(),
)
def test_a_longer_chunk_is_never_predicted_worse(
    ram: int, bytes_per_s: float, each: int, is_mixture: bool
) -> None:
    catalog = mixture() if is_mixture else CATALOG
    catalog = replace(catalog, chunk_scratch=tuple((n, MIB + n * each) for n in (2, 4, 8)))
    cost = disk(bytes_per_s)
    try:
        one = plan(ram, cost, catalog, subchunks=1)
    except InfeasiblePlan:
        return
    placement = plan(ram, cost, catalog)
    assert placement.total_nbytes <= ram
    assert placement.context_tokens == one.context_tokens
    if placement.subchunks > 1:
        least = request_s(catalog, one, cost) * (1 - LEAST_GAIN)
        assert request_s(catalog, placement, cost) < least
        assert placement.sweep or placement.expert_slots < catalog.experts.total
