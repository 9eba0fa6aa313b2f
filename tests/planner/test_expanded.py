"""Expanded copies: the last to get RAM, the first to give it back, and only where they pay."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shadowlane.planner import events as ev
from shadowlane.planner.catalog import Catalog, Experts
from shadowlane.planner.cost import CostModel, Workload
from shadowlane.planner.expanded import MIN_GAIN, predicted_gain
from shadowlane.planner.explain import plan_report
from shadowlane.planner.placement import LaneSpec, Placement, Request
from shadowlane.planner.profile import GroupFigure, Profile
from shadowlane.planner.replan import plan_again
from shadowlane.planner.search import place
from shadowlane.planner.shadow import PlannerState
from shadowlane.planner.simulate import simulate
from shadowlane.planner.synthetic import llama_catalog
from shadowlane.planner.trial import Option

MIB = 1 << 20
CHUNK = 256
TIMES = 4  # a copy to its packed weights

CATALOG = llama_catalog(expanded=TIMES)
COPIES = sum(block.expanded_nbytes for block in CATALOG.blocks)
ALL_RESIDENT = place(CATALOG, Request(ram=1 << 40), CostModel(None)).total_nbytes
AMPLE = ALL_RESIDENT + COPIES
UNMEASURED = CostModel(None)
TWO = (LaneSpec("cpu:0", 1), LaneSpec("cpu:1", 1))


def measured(gain: float, catalog: Catalog = CATALOG) -> CostModel:
    """A profile by which all copies take the part `gain` off a chunk, with one lane."""
    figure = GroupFigure("cpu", 1, "down", "bf16", 32, 1024, "prefill", CHUNK, 0, 1e-3)
    profile = Profile("machine", "model", groups=(figure,))
    plain = place(catalog, Request(ram=1 << 40), UNMEASURED)
    chunk = Workload("prefill", CHUNK, CHUNK // 2)
    chunk_s = simulate(catalog, plain, CostModel(profile), workload=chunk).step_s
    nbytes = sum(block.expanded_nbytes for block in catalog.blocks)
    return CostModel(replace(profile, copies_save_s_per_byte=gain * chunk_s / nbytes))


def spare(ram: int) -> Request:
    return Request(ram=ram, expand="spare")


def test_copies_are_bought_where_they_pay() -> None:
    cost = measured(2 * MIN_GAIN)
    placement = place(CATALOG, spare(AMPLE), cost)
    wanted = [block.index for block in CATALOG.blocks if block.expanded_nbytes]
    assert list(placement.expanded) == wanted
    assert placement.expanded_nbytes == COPIES
    assert placement.total_nbytes == AMPLE
    assert predicted_gain(CATALOG, placement, cost) == pytest.approx(2 * MIN_GAIN)
    assert any("10% off" in note for note in placement.notes)


@pytest.mark.parametrize(
    ("cost", "expand"),
    [
        pytest.param(measured(0.9 * MIN_GAIN), "spare", id="below the threshold"),
        pytest.param(measured(0.0), "spare", id="nothing is gained"),
        pytest.param(UNMEASURED, "spare", id="not measured"),
        pytest.param(measured(0.9), "never", id="not allowed"),
    ],
)
def test_copies_are_not_bought(cost: CostModel, expand: str) -> None:
    placement = place(CATALOG, Request(ram=1 << 40, expand=expand), cost)  # type: ignore[arg-type]
    assert placement == place(CATALOG, Request(ram=1 << 40), cost)
    assert (placement.expanded, placement.expanded_nbytes) == ((), 0)


def test_a_part_of_the_copies_has_to_pay_as_well() -> None:
    cost = measured(2 * MIN_GAIN)
    assert not place(CATALOG, spare(AMPLE - COPIES * 6 // 10), cost).expanded
    placement = place(CATALOG, spare(AMPLE - COPIES * 4 // 10), cost)
    assert COPIES // 2 < placement.expanded_nbytes < COPIES * 7 // 10


def test_what_is_asked_for_need_not_pay() -> None:
    for cost in (UNMEASURED, measured(0.0)):
        placement = place(CATALOG, Request(ram=AMPLE, expand="always"), cost)
        assert placement.expanded_nbytes == COPIES


def test_lanes_that_share_rows_share_the_gain() -> None:
    cost = measured(0.2)
    placement = place(CATALOG, Request(ram=AMPLE, lanes=TWO, expand="always"), cost)
    gain = predicted_gain(CATALOG, placement, cost)
    assert gain is not None
    assert gain == pytest.approx(0.2, rel=0.3)


@pytest.mark.parametrize("missing", [1, COPIES // 3, COPIES])
def test_the_budget_is_a_ceiling(missing: int) -> None:
    request = Request(ram=AMPLE - missing, expand="always")
    placement = place(CATALOG, request, UNMEASURED)
    assert placement.total_nbytes <= request.ram
    assert placement.expanded_nbytes <= COPIES - missing
    largest = max(block.expanded_nbytes for block in CATALOG.blocks)
    assert placement.expanded_nbytes > COPIES - missing - largest


@pytest.mark.parametrize("tied", [True, False])
def test_whatever_streams_or_is_gathered_comes_first(tied: bool) -> None:
    catalog = llama_catalog(tied=tied, expanded=TIMES)
    cost = measured(0.5, catalog)
    whole = place(catalog, Request(ram=1 << 40, context=256), cost)
    for ram in range(4 * MIB, whole.total_nbytes, MIB):
        plain = place(catalog, Request(ram=ram, context=256), cost)
        for expand in ("spare", "always"):
            request = Request(ram=ram, context=256, expand=expand)  # type: ignore[arg-type]
            placement = place(catalog, request, cost)
            assert not all(placement.resident)
            assert replace(placement, notes=()) == replace(plain, notes=())
    notes = place(catalog, Request(ram=8 * MIB, expand="always"), cost).notes
    assert "nothing is expanded: not all weights are in RAM" in notes


def test_experts_come_first() -> None:
    experts = Experts(2, 8, 2, 100_000, 102_400, 102_400)
    catalog = replace(CATALOG, experts=experts)
    whole = place(catalog, Request(ram=1 << 40, expand="always"), UNMEASURED)
    assert whole.expanded_nbytes == COPIES
    missing_one = whole.total_nbytes - COPIES - 1
    placement = place(
        catalog, Request(ram=missing_one, context=whole.context_tokens, expand="always"), UNMEASURED
    )
    assert placement.expert_slots == experts.total - 1
    assert not placement.expanded


def test_a_pin_to_disk_leaves_no_copies() -> None:
    request = Request(ram=1 << 40, pins={"^0.down": "disk"}, expand="always")
    assert not place(CATALOG, request, UNMEASURED).expanded


def test_weights_that_are_multiplied_as_they_are_need_none() -> None:
    placement = place(llama_catalog(), Request(ram=1 << 40, expand="always"), UNMEASURED)
    assert not placement.expanded
    assert "nothing to expand: all weights are in the compute type" in placement.notes


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(4 * MIB, 2 * AMPLE), st.integers(4 * MIB, 2 * AMPLE), st.booleans())
def test_plans_that_follow_make_no_copies(before: int, after: int, anew: bool) -> None:
    now = place(CATALOG, Request(ram=before, context=64, expand="always"), UNMEASURED)
    request = Request(ram=after, context=64, expand="always")
    then = plan_again(
        CATALOG, request, UNMEASURED, Option.as_placed("now", now), {}, anew=anew
    ).placement
    assert set(then.expanded) <= set(now.expanded)
    assert then.total_nbytes <= after
    assert then.expanded_nbytes == sum(CATALOG.blocks[i].expanded_nbytes for i in then.expanded)
    assert not then.expanded or all(then.resident)
    if after >= before:
        assert then.expanded == now.expanded


def test_a_budget_that_shrinks_takes_copies_before_weights() -> None:
    state = PlannerState(CATALOG, Request(ram=AMPLE, expand="always"), None)
    (started,) = state.handle(ev.EngineStarted())
    assert isinstance(started, ev.PublishPlacement)
    first = started.placement
    for name in ("cpu:0", "disk:0"):
        state.handle(ev.PlacementAcknowledged(name, first.placement_id))
    state.handle(ev.PlacementAnnounced(first.placement_id, 1))

    def after(ram: int) -> Placement:
        published = [
            each
            for each in state.handle(ev.BudgetChanged(ram))
            if isinstance(each, ev.PublishPlacement)
        ]
        return published[0].placement

    fewer = after(AMPLE - COPIES // 2)
    assert 0 < fewer.expanded_nbytes <= COPIES // 2
    assert all(fewer.resident)
    none = after(ALL_RESIDENT)
    assert not none.expanded
    assert all(none.resident)
    assert not after(AMPLE).expanded


def test_the_report_has_bytes_and_reason() -> None:
    cost = measured(0.15)
    placement = place(CATALOG, spare(AMPLE), cost)
    report = plan_report(CATALOG, placement, cost)
    assert report["bytes"]["expanded"] == COPIES
    assert sum(report["bytes"].values()) == 2 * report["bytes"]["total"]
    assert "15%" in report["copies"]
    plain = plan_report(CATALOG, place(CATALOG, Request(ram=AMPLE), cost), cost)
    speeds = [each["predicted"]["prefill_tok_per_s"] for each in (report, plain)]
    assert speeds[0] == pytest.approx(speeds[1] / 0.85)
    assert report["predicted"]["decode_step_s"] == plain["predicted"]["decode_step_s"]


def test_what_nobody_needs_is_not_called_unmeasured() -> None:
    cost = CostModel(Profile("machine", "model"))
    assert "copies_save_s_per_byte" in cost.unmeasured(CATALOG, TWO)
    assert "copies_save_s_per_byte" not in cost.unmeasured(llama_catalog(), TWO)
    found = CostModel(Profile("machine", "model", copies_save_s_per_byte=0.0))
    assert "copies_save_s_per_byte" not in found.unmeasured(CATALOG, TWO)


def test_a_request_names_what_may_be_expanded() -> None:
    with pytest.raises(ValueError, match="expand must be one of never, spare, always; got 'yes'"):
        Request(ram=1, expand="yes")  # type: ignore[arg-type]
