"""Prefill items of an EXPERTS instruction: one expert with all rows of the chunk that chose it.

A chunk of hundreds of rows goes to nearly all experts of a layer, so each is one item, by one
worker, and is read at most once, however long the chunk. The rows of each sub-chunk are multiplied
for themselves, so that no bit depends on how many there are. Of the lane that adds up, the last
items do so row by row, when the others have computed theirs.
"""

from __future__ import annotations

from typing import Any

from shadowlane.ops import aten as torch
from shadowlane.ops import table as t
from shadowlane.ops.activation import activate_row
from shadowlane.ops.atomics import (
    WAIT_OK,
    copy_bytes,
    load64,
    now_ns,
    read_i32,
    read_i64,
    wait_counter,
)
from shadowlane.ops.blocks import call_operator, slot_address, wait_brought
from shadowlane.ops.chunk_kernels import activate_tile, expand_tile
from shadowlane.ops.compiled import njit
from shadowlane.ops.expert_walk import (
    DOWN,
    GATE,
    UP,
    add_experts,
    expert_bias,
    expert_home,
    finish_expert,
    half_item,
    matrix_at,
    wait_joined,
    wait_ready,
    whole_item,
)
from shadowlane.ops.kernels import EXPAND_AT, LAYOUT_F32, element_nbytes
from shadowlane.ops.packed import quantise_row
from shadowlane.ops.routes import route_at
from shadowlane.ops.rows import convert_row, finish_row

SUM_ROWS = 32  # rows that one item adds up
DONE, ABORTED, REFUSED = 0, 1, 2


@njit
def is_in_place(geometry: Any, block: Any, address: int) -> bool:
    """Whether torch can multiply with weights as they are."""
    layout = geometry[t.COMPUTE_LAYOUT]
    return block[t.LAYOUT] == layout and address % element_nbytes(layout) == 0


@njit
def ready_rows(
    geometry: Any,
    block: Any,
    weights: int,
    rows: int,
    cols: int,
    tile: int,
    expanded: int,
    scratch: int,
) -> int:
    """Address of rows of a block from address `weights` as torch multiplies with them.

    Where they cannot stay where they are, they are expanded to `tile`. expanded: address of the
    same rows as `expand_tile` makes them, 0 where there is no such copy.
    """
    if expanded != 0:
        return expanded
    if is_in_place(geometry, block, weights):
        return weights
    expand_tile(block, weights, rows, cols, geometry[t.COMPUTE_LAYOUT], tile, scratch)
    return tile


@njit
def count_chunk_items(geometry: Any, row: Any, num_rows: int) -> int:
    """Items of an EXPERTS instruction in a prefill step: experts first, then sums, if they are
    this lane's."""
    count = expert_items(geometry, row)
    if row[t.JOINS] >= 0:
        count -= -num_rows // SUM_ROWS
    return max(1, count)


@njit
def expert_items(geometry: Any, row: Any) -> int:
    """Of those, the items of experts: a card has its own, a processor any."""
    return row[t.TILE_COUNT] if geometry[t.THIS_CARD] >= 0 else geometry[t.NUM_EXPERTS]


@njit
def goes_packed(row: Any, blocks: Any, count: int) -> bool:
    """Whether so few rows of a chunk go to an expert that expanding it would cost more."""
    first = row[t.EXPERT_BLOCKS]
    is_packed = blocks[first + GATE][t.IS_PACKED] != 0 and blocks[first + UP][t.IS_PACKED] != 0
    return is_packed and blocks[first + DOWN][t.IS_PACKED] != 0 and count <= t.MAX_DECODE_ROWS


@njit
def subchunk_end(
    geometry: Any, route: int, at: int, end: int, num_decode: int, together: int
) -> int:
    """Behind the last of the pairs at..end that is of the same sub-chunk as the first."""
    pairs, top_k = route + geometry[t.ROUTE_PAIRS], geometry[t.TOP_K]
    first = read_i32(pairs + 4 * at) // top_k - num_decode
    beyond = (num_decode + (first // together + 1) * together) * top_k
    while at < end and read_i32(pairs + 4 * at) < beyond:
        at += 1
    return at


@njit
def batch_end(geometry: Any, route: int, at: int, end: int, num_decode: int, together: int) -> int:
    """As `subchunk_end`, of as many sub-chunks as there is room for: `together` pairs."""
    stop = at
    while stop < end:
        further = subchunk_end(geometry, route, stop, end, num_decode, together)
        if further - at > together:
            break
        stop = further
    return stop


@njit
def multiply_chunk(
    base: int,
    geometry: Any,
    aten: Any,
    row: Any,
    blocks: Any,
    route: int,
    expert: int,
    home: int,
    begin: int,
    end: int,
    num_decode: int,
    together: int,
    x: int,
    scratch: int,
) -> bool:
    """An expert at `home` times the chunk's rows of its pairs at begin..end. False: torch refused.

    The rows of each sub-chunk are multiplied for themselves, while the same panel is there; those
    that are few go through `multiply_few` and are left out. x: the chunk's normalised inputs in the
    compute type.
    """
    layout, inner, hidden = (
        geometry[t.COMPUTE_LAYOUT],
        geometry[t.EXPERT_INNER],
        geometry[t.HIDDEN],
    )
    nbytes, top_k = element_nbytes(layout), geometry[t.TOP_K]
    pairs = route + geometry[t.ROUTE_PAIRS]
    words = scratch + geometry[t.SCRATCH_WORDS]
    tile = scratch + geometry[t.SCRATCH_TILE]
    second_tile = scratch + geometry[t.SCRATCH_SECOND_TILE]
    gathered = scratch + geometry[t.SCRATCH_GATHERED]
    activated = scratch + geometry[t.SCRATCH_ACTIVATED]
    products = scratch + geometry[t.SCRATCH_PRODUCTS]
    for index in range(end - begin):
        source = read_i32(pairs + 4 * (begin + index)) // top_k - num_decode
        copy_bytes(
            x + source * hidden * nbytes, gathered + index * hidden * nbytes, hidden * nbytes
        )
    gate, up = blocks[row[t.EXPERT_BLOCKS] + GATE], blocks[row[t.EXPERT_BLOCKS] + UP]
    gate_at = matrix_at(base, geometry, row, home, expert, GATE)
    up_at = matrix_at(base, geometry, row, home, expert, UP)
    for first in range(0, inner, t.PANEL_ROWS):
        rows = min(t.PANEL_ROWS, inner - first)
        gate_bias = expert_bias(base, row, expert, GATE, inner, first)
        up_bias = expert_bias(base, row, expert, UP, inner, first)
        ready, other, at = 0, 0, begin
        while at < end:
            stop = subchunk_end(geometry, route, at, end, num_decode, together)
            count, index = stop - at, at - begin
            at = stop
            if goes_packed(row, blocks, count):
                continue
            source = gathered + index * hidden * nbytes
            if ready == 0:
                place = gate_at + first * gate[t.ROW_NBYTES]
                ready = ready_rows(geometry, gate, place, rows, hidden, tile, 0, scratch)
            if not torch.multiply(
                aten, words, source, count, hidden, ready, rows, products, layout
            ):
                return False
            others = products + count * rows * nbytes
            if other == 0:
                place = up_at + first * up[t.ROW_NBYTES]
                other = ready_rows(geometry, up, place, rows, hidden, second_tile, 0, scratch)
            if not torch.multiply(aten, words, source, count, hidden, other, rows, others, layout):
                return False
            activate_tile(
                base,
                geometry,
                products,
                others,
                layout,
                count,
                rows,
                gate_bias,
                up_bias,
                activated + (index * inner + first) * nbytes,
                inner * nbytes,
            )
    down = blocks[row[t.EXPERT_BLOCKS] + DOWN]
    down_at = matrix_at(base, geometry, row, home, expert, DOWN)
    outputs = base + geometry[t.EXPERT_OUTPUT_CHUNK]
    for first in range(0, hidden, t.PANEL_ROWS):
        rows = min(t.PANEL_ROWS, hidden - first)
        bias = expert_bias(base, row, expert, DOWN, hidden, first)
        ready, at = 0, begin
        while at < end:
            stop = subchunk_end(geometry, route, at, end, num_decode, together)
            count, start = stop - at, at
            at = stop
            if goes_packed(row, blocks, count):
                continue
            if ready == 0:
                place = down_at + first * down[t.ROW_NBYTES]
                ready = ready_rows(geometry, down, place, rows, inner, tile, 0, scratch)
            source = activated + (start - begin) * inner * nbytes
            if not torch.multiply(aten, words, source, count, inner, ready, rows, products, layout):
                return False
            for index in range(count):
                pair = read_i32(pairs + 4 * (start + index)) - num_decode * top_k
                out = outputs + (pair * hidden + first) * nbytes
                result = products + index * rows * nbytes
                if bias != 0:
                    finish_row(layout, result, bias, 0, scratch + EXPAND_AT, rows)
                    convert_row(layout, scratch + EXPAND_AT, out, rows)
                else:
                    copy_bytes(result, out, rows * nbytes)
    return True


@njit
def multiply_few(
    base: int,
    geometry: Any,
    row: Any,
    blocks: Any,
    route: int,
    expert: int,
    home: int,
    begin: int,
    end: int,
    num_decode: int,
    x: int,
    scratch: int,
) -> None:
    """As `multiply_chunk`, straight from packed blocks: inputs rounded to bytes, no expansion."""
    layout, inner, hidden = (
        geometry[t.COMPUTE_LAYOUT],
        geometry[t.EXPERT_INNER],
        geometry[t.HIDDEN],
    )
    nbytes, top_k = element_nbytes(layout), geometry[t.TOP_K]
    pairs = route + geometry[t.ROUTE_PAIRS]
    count = end - begin
    stride = geometry[t.QUANTISED_NBYTES]
    # NOTE: not where the decode rows of the step are: other experts still need those.
    quantised = scratch + geometry[t.SCRATCH_SPARE] + stride
    line = scratch + EXPAND_AT
    activated = scratch + geometry[t.SCRATCH_ACTIVATED]
    gates = scratch + geometry[t.SCRATCH_OUTPUT]
    ups = gates + t.MAX_DECODE_ROWS * t.MAX_BLOCK_ROWS * 4
    for index in range(count):
        source = read_i32(pairs + 4 * (begin + index)) // top_k - num_decode
        finish_row(layout, x + source * hidden * nbytes, 0, 0, line, hidden)
        quantise_row(line, hidden, quantised + index * stride)
    gate, up = blocks[row[t.EXPERT_BLOCKS] + GATE], blocks[row[t.EXPERT_BLOCKS] + UP]
    gate_at = matrix_at(base, geometry, row, home, expert, GATE)
    up_at = matrix_at(base, geometry, row, home, expert, UP)
    for first in range(0, inner, t.MAX_BLOCK_ROWS):
        rows = min(t.MAX_BLOCK_ROWS, inner - first)
        place = gate_at + first * gate[t.ROW_NBYTES]
        call_operator(gate, place, rows, hidden, quantised, stride, count, gates, rows * 4, scratch)
        place = up_at + first * up[t.ROW_NBYTES]
        call_operator(up, place, rows, hidden, quantised, stride, count, ups, rows * 4, scratch)
        gate_bias = expert_bias(base, row, expert, GATE, inner, first)
        up_bias = expert_bias(base, row, expert, UP, inner, first)
        for index in range(count):
            at = index * rows * 4
            out = activated + (index * inner + first) * 4
            activate_row(
                base,
                geometry,
                LAYOUT_F32,
                gates + at,
                ups + at,
                gate_bias,
                up_bias,
                out,
                rows,
            )
    for index in range(count):
        quantise_row(activated + index * inner * 4, inner, quantised + index * stride)
    down = blocks[row[t.EXPERT_BLOCKS] + DOWN]
    down_at = matrix_at(base, geometry, row, home, expert, DOWN)
    outputs = base + geometry[t.EXPERT_OUTPUT_CHUNK]
    for first in range(0, hidden, t.MAX_BLOCK_ROWS):
        rows = min(t.MAX_BLOCK_ROWS, hidden - first)
        place = down_at + first * down[t.ROW_NBYTES]
        call_operator(down, place, rows, inner, quantised, stride, count, gates, rows * 4, scratch)
        bias = expert_bias(base, row, expert, DOWN, hidden, first)
        for index in range(count):
            result = gates + index * rows * 4
            if bias != 0:
                finish_row(LAYOUT_F32, result, bias, 0, result, rows)
            pair = read_i32(pairs + 4 * (begin + index)) - num_decode * top_k
            convert_row(layout, result, outputs + (pair * hidden + first) * nbytes, rows)


@njit
def expert_chunk_item(
    base: int,
    geometry: Any,
    aten: Any,
    row: Any,
    blocks: Any,
    items: Any,
    record: int,
    step: int,
    item: int,
    begin_row: int,
    end_row: int,
    decode_x: int,
    chunk_x: int,
    is_void: bool,
    scratch: int,
) -> tuple[int, int]:
    """One item of a prefill step: (DONE, ABORTED or REFUSED, ns waited for others).

    begin_row, end_row: of all rows of the step, those that the instruction computes.
    decode_x, chunk_x: inputs of the decode rows and of the chunk, as `walk_chunk` prepares them.
    is_void: nothing is multiplied any more; what is being read is still waited for, and let go.
    """
    num_decode = load64(record + 8 * t.NUM_DECODE)
    together = load64(record + 8 * t.SUBCHUNK_ROWS)
    route = route_at(base, geometry, row[t.SPARSE_LAYER])
    place = item - expert_items(geometry, row)
    if is_void and (place >= 0 or read_i64(route + 8 * t.ROUTE_STEP) != step):
        return DONE, 0  # a sum, or of a layer that has chosen nothing for this step
    if place >= 0:
        began = now_ns()
        counter = base + geometry[t.COUNTERS] + geometry[t.SUMMED_COUNTER] * t.COUNTER_NBYTES
        wanted = read_i64(route + 8 * t.ROUTE_SEQUENCE)
        if wait_counter(counter, wanted, base + geometry[t.ABORT], 0, 0) != WAIT_OK:
            return ABORTED, 0
        # NOTE: a card's own experts are not among those: a card has one worker, which comes to the
        # sums last.
        if row[t.JOINS] > 0 and wait_joined(base, geometry, row, record) < 0:
            return ABORTED, 0
        waited = now_ns() - began
        first = begin_row + place * SUM_ROWS
        last = min(first + SUM_ROWS, end_row)
        middle = min(max(first, num_decode), last)
        outputs = base + geometry[t.EXPERT_OUTPUT]
        add_experts(base, geometry, row, LAYOUT_F32, outputs, first, middle, 0)
        outputs = base + geometry[t.EXPERT_OUTPUT_CHUNK]
        skipped = num_decode * geometry[t.TOP_K]
        layout = geometry[t.COMPUTE_LAYOUT]
        add_experts(base, geometry, row, layout, outputs, middle, last, skipped)
        return DONE, waited
    is_card = geometry[t.THIS_CARD] >= 0
    if item >= (row[t.TILE_COUNT] if is_card else read_i64(route + 8 * t.NUM_CHOSEN)):
        return DONE, 0
    tile = row[t.TILE_START] + item  # of a card
    if is_card:
        expert = items[tile, t.EXPERT]
        waited = 0
    else:  # which it is may only be known once it has arrived
        waited = wait_ready(base, geometry, route, item)
        if waited < 0:
            return ABORTED, 0
        expert = int(read_i32(route + geometry[t.ROUTE_ORDER] + 4 * item))
    starts = route + geometry[t.ROUTE_STARTS] + 4 * expert
    begin, end = read_i32(starts), read_i32(starts + 4)
    if is_card:
        if is_void or begin == end:
            return DONE, 0
        waited = wait_brought(base, geometry, items[tile, t.EXPERT_ORDINAL], record)
        if waited < 0:
            return ABORTED, 0
    if is_void:
        finish_expert(base, geometry, route, row[t.SPARSE_LAYER], expert)
        return DONE, waited
    if not is_card:
        home = expert_home(base, geometry, row, items, expert)
    elif items[tile, t.EXPERT_ORDINAL] >= 0:
        home = slot_address(base, geometry, items[tile, t.EXPERT_ORDINAL], record)
    else:
        home = base + items[tile, t.EXPERT_HOME]
    middle = begin
    while middle < end:
        pair = read_i32(route + geometry[t.ROUTE_PAIRS] + 4 * middle)
        if pair >= num_decode * geometry[t.TOP_K]:
            break
        middle += 1
    if middle > begin:
        for chunk in range(row[t.EXPERT_CHUNKS]):
            half_item(
                base, geometry, row, blocks, route, chunk, expert, home, begin, middle, decode_x,
                scratch,
            )  # fmt: skip
        for chunk in range(row[t.EXPERT_CHUNKS]):
            whole_item(
                base, geometry, row, blocks, route, chunk, expert, home, begin, middle, scratch
            )
    at = middle
    while at < end:
        stop = subchunk_end(geometry, route, at, end, num_decode, together)
        if goes_packed(row, blocks, stop - at):
            multiply_few(
                base,
                geometry,
                row,
                blocks,
                route,
                expert,
                home,
                at,
                stop,
                num_decode,
                chunk_x,
                scratch,
            )
        at = stop
    at = middle
    while at < end:
        stop = batch_end(geometry, route, at, end, num_decode, together)
        if not multiply_chunk(
            base, geometry, aten, row, blocks, route, expert, home, at, stop, num_decode, together,
            chunk_x, scratch,
        ):  # fmt: skip
            return REFUSED, 0
        at = stop
    finish_expert(base, geometry, route, row[t.SPARSE_LAYER], expert)
    return DONE, waited
