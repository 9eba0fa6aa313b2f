"""Tables: every row computed once, whoever computes it, and everything inside the arena."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inprocess import (
    AMPLE,
    ONE_THREAD,
    TWO_LANES,
    TWO_THREADS,
    cut,
    lanes_of,
    plan,
    small_blocks,
    smallest_ram,
    weights_nbytes,
    with_shares,
)

from shadowlane.actors.arena import ArenaLayout, plan_layout
from shadowlane.actors.blueprint import Blueprint, Options
from shadowlane.actors.homes import Homes
from shadowlane.actors.lowering import lower, make_geometry
from shadowlane.actors.scratch import SHARED_BUFFERS, TURN_BUFFERS
from shadowlane.ops import table as t
from shadowlane.ops.table import LoweredProgram
from shadowlane.planner.placement import Placement
from shadowlane.planner.program import build_programs

OPTIONS = Options(context=96)
SPLITS = [
    {"cpu:0": 0.5, "cpu:1": 0.5},
    {"cpu:0": 0.9, "cpu:1": 0.1},
    {"cpu:0": 0.02, "cpu:1": 0.98},
    {"cpu:1": 1.0},
]


def lower_all(
    blueprint: Blueprint, placement: Placement
) -> tuple[ArenaLayout, dict[str, LoweredProgram]]:
    layout = plan_layout(blueprint, placement)
    homes = Homes(layout.weights, layout.weights_nbytes, blueprint.held_nbytes)
    resident = [index for index, kept in enumerate(placement.resident) if kept]
    offsets = homes.take(resident)
    assert len(offsets) == len(resident)
    programs = build_programs(blueprint.catalog, placement)
    return layout, {
        lane.name: lower(blueprint, layout, placement, programs[lane.name], offsets, lane.threads)
        for lane in placement.lanes
    }


def placements(blueprint: Blueprint, cores: Any) -> list[Placement]:
    least = smallest_ram(blueprint)
    found = []
    for ram in (least, least + weights_nbytes(blueprint) // 2, AMPLE):
        base = plan(blueprint, ram, cores)
        found.append(base)
        if len(cores) == 2:
            found += [with_shares(blueprint.catalog, base, 1, split) for split in SPLITS]
    return found


@pytest.mark.parametrize("family", ["llama-biases", "qwen3-tied", "mistral-head-dim"])
@pytest.mark.parametrize("cores", [ONE_THREAD, TWO_THREADS, TWO_LANES])
@pytest.mark.parametrize("nbytes", [2048, 2 << 20])
def test_every_row_is_computed_once(
    tiny_model: Callable[..., Path], family: str, cores: Any, nbytes: int
) -> None:
    with small_blocks(nbytes):
        blueprint = cut(tiny_model(family, intermediate_size=328), OPTIONS, cores)
    for placement in placements(blueprint, cores):
        _, programs = lower_all(blueprint, placement)
        for number, group in enumerate(blueprint.groups):
            rows = [
                (row, program)
                for program in programs.values()
                for row in program.instructions
                if row[t.GROUP] == number
            ]
            assert rows
            if group.kind == "embed":
                assert len(rows) == 1
                continue
            if group.kind == "attn":
                heads = [
                    head
                    for row, _ in rows
                    for head in range(row[t.ITEM_START], row[t.ITEM_START] + row[t.ITEM_COUNT])
                ]
                assert sorted(heads) == list(range(blueprint.config.num_kv_heads))
                continue
            wanted = list(range(rows[0][0][t.ROWS]))
            assert sorted(rows_of(blueprint, rows, t.ITEM_START, t.ITEM_COUNT)) == wanted
            assert sorted(rows_of(blueprint, rows, t.TILE_START, t.TILE_COUNT)) == wanted


def rows_of(
    blueprint: Blueprint, rows: list[tuple[np.ndarray, LoweredProgram]], start: int, count: int
) -> list[int]:
    """Output rows of all items of some instructions; checks each item on the way."""
    found = []
    for row, program in rows:
        for item in program.items[row[start] : row[start] + row[count]]:
            source = blueprint.sources[item[t.BLOCK]]
            assert item[t.FIRST_ROW] == source.output_row + item[t.ROW_IN_BLOCK]
            assert 0 < item[t.NUM_ROWS] <= source.num_rows - item[t.ROW_IN_BLOCK]
            if start == t.TILE_START:
                assert item[t.ROW_IN_BLOCK] == 0
                assert item[t.NUM_ROWS] == source.num_rows
            if row[t.KIND] == t.GATE_UP:
                second = blueprint.sources[item[t.SECOND_BLOCK]]
                assert (second.part, second.first_row) == (1, source.first_row)
            else:
                assert item[t.SECOND_BLOCK] == -1
            found += range(item[t.FIRST_ROW], item[t.FIRST_ROW] + item[t.NUM_ROWS])
    return found


def test_decode_items_shrink_towards_the_end(tiny_model: Callable[..., Path]) -> None:
    """Whoever takes the last item keeps the others waiting for a short one."""
    blueprint = cut(tiny_model("llama2", vocab_size=4000), OPTIONS, TWO_THREADS)
    _, programs = lower_all(blueprint, placements(blueprint, TWO_THREADS)[0])
    (program,) = programs.values()
    for row in program.instructions:
        if row[t.KIND] != t.LM_HEAD:
            continue
        heights = program.items[row[t.ITEM_START] :][: row[t.ITEM_COUNT], t.NUM_ROWS]
        assert heights[0] > 4 * heights[-1]
        for number, height in enumerate(heights):
            left = heights[number:].sum()
            assert height <= max(left / 4, 128)


def test_blocks_are_at_home_or_in_the_sweep(tiny_model: Callable[..., Path]) -> None:
    with small_blocks(4096):
        blueprint = cut(tiny_model("llama2"), OPTIONS, TWO_LANES)
    for placement in placements(blueprint, TWO_LANES):
        layout, programs = lower_all(blueprint, placement)
        for program in programs.values():
            for index, block in enumerate(program.blocks):
                source = blueprint.sources[index]
                assert block[t.SKEW] == source.offset % 4096
                if placement.resident[index]:
                    assert (block[t.OFFSET] - source.offset) % 4096 == 0
                    assert layout.weights <= block[t.OFFSET]
                    assert block[t.OFFSET] + source.nbytes <= layout.nbytes
                    assert block[t.SWEEP_ORDINAL] == -1
                else:
                    assert block[t.OFFSET] == -1
                    in_sweep = blueprint.catalog.blocks[index].group != "embed"
                    expected = placement.sweep.index(index) if in_sweep else -1
                    assert block[t.SWEEP_ORDINAL] == expected
            embed = [row for row in program.instructions if row[t.KIND] == t.EMBED]
            for row in embed:
                gathered = any(not placement.resident[i] for i in blueprint.embedding_blocks)
                assert row[t.GATHERED] == gathered


def test_lanes_wait_for_all_peers_of_the_group_before(tiny_model: Callable[..., Path]) -> None:
    blueprint = cut(tiny_model("llama2"), OPTIONS, TWO_LANES)
    placement = with_shares(
        blueprint.catalog, plan(blueprint, AMPLE, TWO_LANES), 1, {"cpu:0": 0.5, "cpu:1": 0.5}
    )
    _, programs = lower_all(blueprint, placement)
    done = {0: {}, 1: {}}  # lane -> group -> instructions retired when it is done
    for lane, program in enumerate(programs.values()):
        for row in program.instructions:
            assert row[t.PEER_WAIT + lane] == -1  # its own order is implied
            done[lane][row[t.GROUP]] = row[t.ORDINAL] + 1
    for lane, program in enumerate(programs.values()):
        for row in program.instructions:
            before = done[1 - lane].get(row[t.GROUP] - 1, -1)
            assert row[t.PEER_WAIT + 1 - lane] == before


def test_what_a_group_is_made_of(tiny_model: Callable[..., Path]) -> None:
    for family in ("llama-biases", "qwen3-window", "qwen2"):
        blueprint = cut(tiny_model(family), OPTIONS, ONE_THREAD)
        layout, programs = lower_all(blueprint, plan(blueprint, AMPLE, ONE_THREAD))
        constants = layout.constant_offsets
        for row in programs["cpu:0"].instructions:
            group = blueprint.groups[row[t.GROUP]]
            assert row[t.NORM_WEIGHT] == (constants[group.norm] if group.norm else -1)
            assert row[t.Q_NORM] == (constants[group.q_norm] if group.q_norm else -1)
            assert row[t.K_NORM] == (constants[group.k_norm] if group.k_norm else -1)
            biases = [part.bias for part in group.parts if part.bias]
            assert row[t.BIAS] == (constants[biases[0]] if biases else -1)
            offset = row[t.BIAS]
            for part in group.parts if biases else ():
                assert part.bias is not None
                assert constants[part.bias] == offset  # one behind the other
                offset += 4 * part.rows
            window = None if group.layer is None else blueprint.config.windows[group.layer]
            assert row[t.WINDOW] == (window or 0)
            assert row[t.EPILOGUE] == (t.ADD if group.kind in ("o", "down") else t.STORE)


@pytest.mark.parametrize("cores", [ONE_THREAD, TWO_THREADS, TWO_LANES])
def test_regions_of_the_arena_do_not_overlap(tiny_model: Callable[..., Path], cores: Any) -> None:
    with small_blocks(4096):
        blueprint = cut(tiny_model("llama-biases"), Options(context=96, max_batch=3), cores)
    for ram in (smallest_ram(blueprint), AMPLE):
        placement = plan(blueprint, ram, cores)
        layout = plan_layout(blueprint, placement)
        scratch = blueprint.scratch[placement.subchunks]
        lanes = lanes_of(cores)
        # of the buffers that take turns, the larger half of a layer
        turn = max(TURN_BUFFERS, key=lambda names: sum(getattr(scratch, name) for name in names))
        regions = [
            (layout.constants, blueprint.catalog.constants_nbytes),
            (layout.kv, placement.kv_nbytes),
            (layout.ring, placement.slots_nbytes),
            (layout.weights, placement.weights_nbytes),
            *((layout.scratch[name], getattr(scratch, name)) for name in SHARED_BUFFERS),
            *((layout.scratch[name], getattr(scratch, name)) for name in turn),
            *(
                (start, lane.threads * scratch.worker_nbytes)
                for start, lane in zip(layout.worker_scratch, lanes, strict=True)
            ),
        ]
        ends = sorted((start, start + nbytes) for start, nbytes in regions)
        assert ends[0][0] == layout.budget_start
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(ends))
        assert ends[-1][1] <= layout.nbytes
        assert layout.nbytes - layout.budget_start == placement.total_nbytes <= ram
        first, last = min(layout.constant_offsets.values()), max(layout.constant_offsets.values())
        assert layout.constants < first
        assert last + 4 * 160 <= layout.constants + blueprint.catalog.constants_nbytes
        for number, lane in enumerate(lanes):
            geometry = make_geometry(blueprint, layout, number, lane.threads)
            parts = [geometry[at] for at in (t.SCRATCH_INPUT, t.SCRATCH_OUTPUT)]
            parts += [geometry[at] for at in (t.SCRATCH_SCORES, t.SCRATCH_TILE)]
            assert 0 < parts[0] < parts[1] < parts[2] <= parts[3] <= scratch.worker_nbytes
