"""The predicted timeline against sums that can be done by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from shadowlane.planner.cost import (
    ASSUMED_DISK_BYTES_PER_S,
    ASSUMED_STEP_S,
    CostModel,
    Workload,
)
from shadowlane.planner.placement import DISK_LANE, LaneSpec, Placement, Request
from shadowlane.planner.profile import Profile
from shadowlane.planner.search import place, with_weights
from shadowlane.planner.simulate import simulate
from shadowlane.planner.synthetic import llama_catalog

MIB = 1 << 20
CATALOG = llama_catalog(layers=8)
COST = CostModel(None)


def plan(ram: int = 20 * MIB, **wishes: object) -> Placement:
    return place(CATALOG, Request(ram=ram, **wishes), COST)  # type: ignore[arg-type]


def test_in_ram_a_step_is_the_sum_of_its_groups() -> None:
    placement = plan(1 << 30)
    simulation = simulate(CATALOG, placement, COST)
    assert simulation.bottleneck == "cpu:0"
    assert simulation.step_s == pytest.approx(simulation.busy_s["cpu:0"] + ASSUMED_STEP_S)
    assert simulation.busy_s[DISK_LANE] == 0


def test_a_steady_disk_never_pauses_when_it_is_the_bottleneck() -> None:
    placement = plan()
    simulation = simulate(CATALOG, placement, COST)
    assert simulation.bottleneck == DISK_LANE
    read_s = placement.read_nbytes_per_step / ASSUMED_DISK_BYTES_PER_S
    assert simulation.busy_s[DISK_LANE] == pytest.approx(read_s)
    assert simulation.step_s == pytest.approx(read_s, rel=0.01)


def test_reads_go_on_across_the_step_boundary() -> None:
    """While a step ends and the next is filled, the head of the next sweep is on its way."""
    cost = CostModel(Profile("h", "m", step_s=2e-3))
    placement = plan(num_slots=16)
    simulation = simulate(CATALOG, placement, cost, steps=6, record=True)
    read_s = placement.read_nbytes_per_step / ASSUMED_DISK_BYTES_PER_S
    assert simulation.step_s < read_s + 2e-3
    disk = [span for span in simulation.spans if span.lane == DISK_LANE]
    ends = {
        step: max(s.end_s for s in simulation.spans if s.step == step and s.lane != DISK_LANE)
        for step in range(6)
    }
    assert any(span.step == 3 and span.start_s < ends[2] for span in disk)


def test_a_layout_without_spreading_makes_the_disk_wait() -> None:
    """What the first layers keep, the disk cannot read meanwhile: its ring is full."""
    fast_disk = CostModel(None, {DISK_LANE: 0.3})  # about as fast as the processor
    placement = plan(num_slots=4)
    kept = placement.resident.count(True)
    order = list(range(len(CATALOG.blocks)))
    prefix = replace(
        placement,
        resident=tuple(index < kept for index in order),
        sweep=tuple(index for index in order if index >= kept),
    )
    spread_s = simulate(CATALOG, placement, fast_disk).step_s
    prefix_s = simulate(CATALOG, prefix, fast_disk).step_s
    assert prefix_s > spread_s * 1.05


def test_spans_of_a_lane_never_overlap_and_slots_are_never_shared() -> None:
    placement = plan(lanes=(LaneSpec("cpu:0", 1), LaneSpec("cpu:1", 1)))
    placement = with_weights(CATALOG, placement, COST, {})
    simulation = simulate(CATALOG, placement, COST, steps=3, record=True)
    by_lane: dict[str, list[tuple[float, float]]] = {}
    for span in simulation.spans:
        assert span.end_s >= span.start_s
        by_lane.setdefault(span.lane, []).append((span.start_s, span.end_s))
    assert set(by_lane) == {"cpu:0", "cpu:1", DISK_LANE}
    for times in by_lane.values():
        for (_, end), (start, _) in pairwise(times):
            assert start >= end - 1e-12
    # A slot is read into only after its old block's group has been computed, at least in part.
    reads = [span for span in simulation.spans if span.lane == DISK_LANE]
    for old, new in zip(reads, reads[placement.num_slots :], strict=False):
        group = CATALOG.blocks[int(old.what.split()[1])].group
        uses = [
            span.end_s for span in simulation.spans if (span.step, span.what) == (old.step, group)
        ]
        assert new.start_s >= min(uses) - 1e-12


def test_drift_of_a_lane_scales_its_time() -> None:
    placement = plan(1 << 30)
    plain = simulate(CATALOG, placement, COST)
    slower = simulate(CATALOG, placement, COST.with_drift({"cpu:0": 2.0}))
    instructions = len(CATALOG.groups) * 2e-6
    assert slower.busy_s["cpu:0"] - instructions == pytest.approx(
        2 * (plain.busy_s["cpu:0"] - instructions)
    )


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_more_rows_and_more_context_never_cost_less(phase: str) -> None:
    placement = plan(1 << 30)
    last = 0.0
    for rows, context in ((1, 64), (4, 64), (4, 2048), (64, 2048)):
        workload = Workload(phase, rows, context)  # type: ignore[arg-type]
        step_s = simulate(CATALOG, placement, COST, workload=workload).step_s
        assert step_s >= last
        last = step_s
