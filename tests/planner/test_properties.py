"""What holds for any model, any budget and any lanes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shadowlane.planner.bounds import bounds
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.cost import CostModel, Workload
from shadowlane.planner.placement import InfeasiblePlan, LaneSpec, Placement, Request, whole_pages
from shadowlane.planner.program import build_programs
from shadowlane.planner.replan import moved_nbytes, plan_again
from shadowlane.planner.search import TIE, place, with_weights
from shadowlane.planner.simulate import simulate
from shadowlane.planner.spread import spread
from shadowlane.planner.synthetic import llama_catalog
from shadowlane.planner.trial import Option
from shadowlane.planner.validate import is_reached, validate

few = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def catalogs(draw: st.DrawFn) -> Catalog:
    tile_rows = draw(st.sampled_from([16, 48, 64, 128, 512]))
    return llama_catalog(
        layers=draw(st.integers(1, 4)),
        hidden=draw(st.sampled_from([64, 128, 256])),
        inner=draw(st.sampled_from([128, 336, 512])),
        heads_kv=draw(st.integers(1, 3)),
        vocab=draw(st.sampled_from([64, 512, 1008])),
        tile_rows=tile_rows,
        up_tile_rows=draw(st.sampled_from([None, 32])) if tile_rows in (16, 48, 64) else None,
        tied=draw(st.booleans()),
        max_context=draw(st.sampled_from([48, 512, 4096])),
        page_tokens=draw(st.sampled_from([16, 64])),
        constants_nbytes=draw(st.integers(0, 20_000)),
        scratch_nbytes=draw(st.integers(0, 200_000)),
        expanded=draw(st.sampled_from([0, 4])),
        subchunk_rows=draw(st.sampled_from([16, 512])),
        subchunk_nbytes=draw(st.sampled_from([None, 1000, 100_000])),
    )


def least_nbytes(catalog: Catalog, request: Request) -> int:
    """The sum below which nothing fits, put together from the rule as users know it."""
    pages = -(-(request.context or 1) // catalog.page_tokens) * request.max_batch
    pinned = sum(
        block.held_nbytes
        for block in catalog.blocks
        if any(re.search(each, block.group) for each, home in request.pins.items() if home == "cpu")
    )
    weights = pinned + (request.num_slots or 4) * catalog.slot_nbytes
    if not request.pins.get("down"):
        streamed = sum(b.held_nbytes for b in catalog.blocks if b.group != "embed")
        weights = min(weights, streamed)
    parts = (catalog.constants_nbytes, catalog.scratch_nbytes, pages * catalog.page_nbytes)
    return weights + sum(whole_pages(part) for part in parts)


@st.composite
def asked(draw: st.DrawFn) -> tuple[Catalog, Request]:
    """Any feasible request, from the smallest budget on."""
    catalog = draw(catalogs())
    request = Request(
        ram=1,
        lanes=tuple(LaneSpec(f"cpu:{i}", i + 1) for i in range(draw(st.integers(1, 3)))),
        context=draw(st.sampled_from([None, None, 1, 32, catalog.max_context])),
        max_batch=draw(st.integers(1, 3)),
        num_slots=draw(st.sampled_from([None, None, 4, 5, 7, 16])),
        pins=draw(st.sampled_from([{}, {}, {r"^0\.": "cpu"}, {"down": "disk"}])),
        expand=draw(st.sampled_from(["never", "always"])),
    )
    whole = sum(block.held_nbytes for block in catalog.blocks)
    spare = draw(st.one_of(st.just(0), st.integers(0, whole), st.integers(whole, 3 * whole)))
    return catalog, replace(request, ram=least_nbytes(catalog, request) + spare)


@st.composite
def planned(draw: st.DrawFn) -> tuple[Catalog, Request, Placement]:
    catalog, request = draw(asked())
    return catalog, request, place(catalog, request, CostModel(None))


@few
@given(asked(), st.integers(1, 2**40))
def test_one_byte_less_than_the_least_names_the_sum(
    question: tuple[Catalog, Request], missing: int
) -> None:
    catalog, request = question
    least = least_nbytes(catalog, request)
    assume(missing < least)
    request = replace(request, ram=least - missing)
    with pytest.raises(InfeasiblePlan) as caught:
        place(catalog, request, CostModel(None))
    error = caught.value
    assert sum(error.parts.values()) == error.needed == least
    assert error.deficit == missing
    assert all(name in str(error) for name in error.parts)


@few
@given(planned())
def test_budget_is_a_ceiling_and_every_block_has_a_place(
    plan: tuple[Catalog, Request, Placement],
) -> None:
    catalog, request, placement = plan
    assert placement.total_nbytes <= request.ram
    held = sum(b.held_nbytes for b in catalog.blocks if placement.resident[b.index])
    assert placement.weights_nbytes == held
    assert len(set(placement.sweep)) == len(placement.sweep)
    for block in catalog.blocks:
        streams = block.index in set(placement.sweep)
        if block.group == "embed":
            assert not streams
        else:
            assert streams != placement.resident[block.index]
    assert list(placement.sweep) == sorted(placement.sweep)  # consumption order
    assert placement.read_nbytes_per_step == sum(
        catalog.blocks[index].held_nbytes for index in placement.sweep
    )
    if placement.sweep:
        assert placement.num_slots >= 4
        assert request.num_slots in (None, placement.num_slots)
    elif "down" not in request.pins:
        assert placement.num_slots == 0
    assert placement.kv_pages >= request.max_batch
    if request.context is not None:
        assert placement.context_tokens == request.context


@few
@given(planned(), st.integers(0, 2**32 - 1))
def test_programs_are_consistent_and_never_wait_for_ever(
    plan: tuple[Catalog, Request, Placement], first_counter: int
) -> None:
    catalog, _, placement = plan
    programs = build_programs(catalog, placement)
    validate(catalog, placement, programs, first_counter=first_counter)
    validate(catalog, placement, programs)  # counters just below the wrap


@few
@given(planned(), st.data())
def test_any_split_of_rows_is_exact_and_moves_nothing(
    plan: tuple[Catalog, Request, Placement], data: st.DataObject
) -> None:
    catalog, _, placement = plan
    weights = {
        lane.name: data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])) for lane in placement.lanes
    }
    assume(any(weights.values()))
    changed = with_weights(catalog, placement, CostModel(None), weights)
    assert (changed.resident, changed.sweep) == (placement.resident, placement.sweep)
    used = {share.lane for shares in changed.shares.values() for share in shares}
    assert used <= {name for name, weight in weights.items() if weight}
    first_active = next(lane.name for lane in placement.lanes if weights[lane.name])
    assert {share.lane for share in changed.shares["embed"]} == {first_active}
    validate(catalog, changed, build_programs(catalog, changed))


@few
@given(planned(), st.data())
def test_a_running_plan_moves_one_way_only(
    plan: tuple[Catalog, Request, Placement], data: st.DataObject
) -> None:
    catalog, request, placement = plan
    now = Option.as_placed("now", placement)
    changed = replace(request, ram=data.draw(st.integers(request.ram // 4, 2 * request.ram)))
    try:
        option = plan_again(catalog, changed, CostModel(None), now, {}, anew=False)
    except InfeasiblePlan:
        assume(False)
        raise
    after = option.placement
    assert after.total_nbytes <= changed.ram
    assert after.context_tokens == placement.context_tokens
    pairs = list(zip(placement.resident, after.resident, strict=True))
    assert not ((True, False) in pairs and (False, True) in pairs)
    assert moved_nbytes(catalog, placement, after) <= max(0, changed.ram - placement.ram) + sum(
        (placement.ram - placement.total_nbytes, placement.slots_nbytes)
    )
    validate(catalog, after, build_programs(catalog, after))


@few
@given(planned())
def test_no_prediction_beats_the_bounds(plan: tuple[Catalog, Request, Placement]) -> None:
    catalog, _, placement = plan
    for workload in (Workload(), Workload("decode", 4, 1024), Workload("prefill", 256, 128)):
        predicted = simulate(catalog, placement, CostModel(None), workload=workload)
        least = bounds(catalog, placement, CostModel(None), workload=workload)
        assert least.resource_s <= predicted.step_s * (1 + 1e-9)
        assert least.critical_path_s <= predicted.step_s * (1 + 1e-9)
        for busy_s in predicted.busy_s.values():
            assert busy_s <= predicted.step_s * (1 + 1e-9)


@few
@given(planned())
def test_a_plan_is_never_predicted_slower_than_the_simple_ones(
    plan: tuple[Catalog, Request, Placement],
) -> None:
    catalog, _, placement = plan
    cost = CostModel(None)
    chosen = simulate(catalog, placement, cost).step_s
    assert chosen == pytest.approx(placement.predicted_step_s)
    for lane in placement.lanes:
        alone = {other.name: float(other == lane) for other in placement.lanes}
        other = simulate(catalog, with_weights(catalog, placement, cost, alone), cost)
        assert chosen * (1 - TIE) <= other.step_s * (1 + 1e-9)


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=60),
    st.floats(0, 1),
)
def test_spread_keeps_to_the_even_line(sizes: list[int], part: float) -> None:
    budget = int(sum(sizes) * part)
    keep = spread(sizes, [float(size) for size in sizes], budget)
    assert sum(size for size, is_kept in zip(sizes, keep, strict=True) if is_kept) <= budget
    rest = budget - sum(size for size, is_kept in zip(sizes, keep, strict=True) if is_kept)
    left = [size for size, is_kept in zip(sizes, keep, strict=True) if not is_kept]
    assert all(size > rest for size in left), "what was left over would have held another"


@given(st.integers(1, 400), st.integers(0, 400))
def test_equal_blocks_are_spread_without_gaps(num_blocks: int, num_kept: int) -> None:
    num_kept = min(num_kept, num_blocks)
    keep = spread([100] * num_blocks, [1.0] * num_blocks, 100 * num_kept)
    assert sum(keep) == num_kept
    longest = max(len(run) for run in "".join("#" if k else "." for k in keep).split("#"))
    assert longest <= -(-num_blocks // max(1, num_kept))
    count = 0
    for index, is_kept in enumerate(keep):
        count += is_kept
        assert abs(count - num_kept * (index + 1) / num_blocks) <= 0.5 + 1e-6


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1))
def test_counters_compare_across_the_wrap(base: int, ahead: int) -> None:
    assert is_reached((base + ahead) & 0xFFFFFFFF, base)
    assert not is_reached(base, base + ahead + 1)
