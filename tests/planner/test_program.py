"""What the proof of programs refuses: one mistake at a time, put into programs that were right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from shadowlane.planner.cost import CostModel
from shadowlane.planner.placement import DISK_LANE, LaneSpec, Placement, Request
from shadowlane.planner.program import (
    ComputeInstruction,
    Program,
    Read,
    Wait,
    build_programs,
    cut,
)
from shadowlane.planner.search import place, with_weights
from shadowlane.planner.synthetic import llama_catalog
from shadowlane.planner.validate import InconsistentPrograms, validate

CATALOG = llama_catalog(layers=2)
LANES = (LaneSpec("cpu:0", 1), LaneSpec("cpu:1", 1))
Programs = dict[str, Program]


def split_plan() -> Placement:
    request = Request(ram=6 << 20, lanes=LANES, num_slots=6)
    placement = place(CATALOG, request, CostModel(None))
    return with_weights(CATALOG, placement, CostModel(None), {})


def change(programs: Programs, lane: str, position: int, **fields: object) -> None:
    instructions = list(programs[lane].instructions)
    instructions[position] = replace(instructions[position], **fields)  # type: ignore[arg-type]
    programs[lane] = Program(lane, tuple(instructions))


def drop_disk_wait(programs: Programs) -> None:
    for position, each in enumerate(programs["cpu:0"].instructions):
        assert isinstance(each, ComputeInstruction)
        kept = tuple(wait for wait in each.waits if wait.lane != DISK_LANE)
        if kept != each.waits:
            change(programs, "cpu:0", position, waits=kept)


def drop_barrier(programs: Programs) -> None:
    for position, each in enumerate(programs["cpu:1"].instructions):
        assert isinstance(each, ComputeInstruction)
        kept = tuple(wait for wait in each.waits if wait.lane != "cpu:0")
        if each.group == "1.down" and kept != each.waits:
            change(programs, "cpu:1", position, waits=kept)


def wait_for_the_future(programs: Programs) -> None:
    length = len(programs["cpu:1"].instructions)
    change(programs, "cpu:0", 0, waits=(Wait("cpu:1", length),))


def wait_for_nobody(programs: Programs) -> None:
    change(programs, "cpu:0", 0, waits=(Wait("cpu:1", 10_000),))


def wait_for_a_gpu(programs: Programs) -> None:
    change(programs, "cpu:0", 0, waits=(Wait("gpu:0", 1),))


def skip_a_unit(programs: Programs) -> None:
    change(programs, "cpu:0", 1, first_unit=1)


def compute_twice(programs: Programs) -> None:
    programs["cpu:0"] = Program(
        "cpu:0", (*programs["cpu:0"].instructions, programs["cpu:0"].instructions[-1])
    )


def free_a_slot_early(programs: Programs) -> None:
    read = programs[DISK_LANE].instructions[3]
    assert isinstance(read, Read)
    change(programs, DISK_LANE, 3, consumers=())


def read_out_of_order(programs: Programs) -> None:
    first, second, *rest = programs[DISK_LANE].instructions
    programs[DISK_LANE] = Program(DISK_LANE, (second, first, *rest))


def forget_a_lane(programs: Programs) -> None:
    del programs["cpu:1"]


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (drop_disk_wait, "does not wait for block"),
        (drop_barrier, r"does not wait for cpu:0, which has part of 1\.gate_up"),
        (wait_for_the_future, "deadlock with 6 slots of disk:0: .*cpu:0 at "),
        (wait_for_nobody, "never produced: cpu:1 has"),
        (wait_for_a_gpu, "never produced: gpu:0 has 0"),
        (skip_a_unit, "computes units 1.*expected from 0"),
        (compute_twice, "lm_head: cpu:0 computes units"),
        (free_a_slot_early, "freed at the wrong time"),
        (read_out_of_order, "does not bring its sweep in its order"),
        (forget_a_lane, "programs for"),
    ],
)
def test_mistakes_are_found(mistake: Callable[[Programs], None], message: str) -> None:
    placement = split_plan()
    programs = build_programs(CATALOG, placement)
    validate(CATALOG, placement, programs)
    mistake(programs)
    with pytest.raises(InconsistentPrograms, match=message):
        validate(CATALOG, placement, programs)


def test_the_proof_sees_what_too_few_slots_would_do() -> None:
    """Programs cut for six slots deadlock in a ring of two: the ring is part of the proof."""
    placement = split_plan()
    programs = build_programs(CATALOG, placement)
    with pytest.raises(InconsistentPrograms, match="deadlock with 2 slots"):
        validate(CATALOG, replace(placement, num_slots=2), programs)


def test_more_blocks_for_one_unit_than_slots_is_refused() -> None:
    placement = split_plan()
    with pytest.raises(ValueError, match="streamed blocks at once; the ring has 1 slots"):
        cut(CATALOG, placement.shares, placement.sweep, 1)


def test_a_lane_without_rows_has_an_empty_program_and_nobody_waits_for_it() -> None:
    alone = with_weights(CATALOG, split_plan(), CostModel(None), {"cpu:0": 0.0})
    programs = build_programs(CATALOG, alone)
    assert programs["cpu:0"].instructions == ()
    validate(CATALOG, alone, programs)
    for each in programs["cpu:1"].instructions:
        assert isinstance(each, ComputeInstruction)
        assert all(wait.lane == DISK_LANE for wait in each.waits)


def test_embedding_comes_first_and_waits_for_nothing() -> None:
    programs = build_programs(CATALOG, split_plan())
    first = programs["cpu:0"].instructions[0]
    assert isinstance(first, ComputeInstruction)
    assert (first.group, first.waits) == ("embed", ())
