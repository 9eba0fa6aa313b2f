"""Decode items of an EXPERTS instruction: gate and up, then down, of one chosen expert at a time.

The items of a route stand in the order in which its experts become ready: those in RAM first, then
the others as they arrive. Items that no expert stands behind (rows may choose the same one) have
nothing to do, so the number of items does not depend on the choice. Each expert writes rows of its
own, one for each pair of row and rank; whoever finishes the instruction adds them up by rank, so a
result does not depend on what arrived when. Experts that live on cards are computed there at the
same time, by instructions of the cards' lanes; one lane, a processor's or a card's, adds up when
those of the others have retired.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shadowlane.ops import table as t
from shadowlane.ops.activation import activate_row
from shadowlane.ops.atomics import (
    WAIT_OK,
    add32,
    load32,
    load64,
    now_ns,
    publish,
    reached,
    read_f32,
    read_i32,
    read_i64,
    wait_counter,
    wake_bed,
    write_i32,
    write_i64,
)
from shadowlane.ops.blocks import counter_at, multiply_rows, record_i64
from shadowlane.ops.compiled import njit
from shadowlane.ops.kernels import LAYOUT_F32, rms_norm, weighted_sum
from shadowlane.ops.packed import quantise_row
from shadowlane.ops.routes import (
    SLOT_MASK,
    call_disk_lane,
    choose,
    route_at,
    spin,
    word_at,
)
from shadowlane.ops.rows import finish_row

GATE, UP, DOWN = 0, 1, 2


@njit
def most_chosen(geometry: Any, num_rows: int) -> int:
    """The most experts that so many rows can choose."""
    return min(geometry[t.NUM_EXPERTS], num_rows * geometry[t.TOP_K])


@njit
def count_expert_items(geometry: Any, row: Any, num_rows: int) -> int:
    """Items of an EXPERTS instruction in a decode step; the first looks ahead."""
    return 1 + most_chosen(geometry, num_rows) * 2 * row[t.EXPERT_CHUNKS]


@njit
def expert_home(base: int, geometry: Any, row: Any, items: Any, expert: int) -> int:
    """Where an expert lies: in its slot of RAM, or on the card that this lane is."""
    if geometry[t.THIS_CARD] >= 0:
        return base + items[row[t.CARD_EXPERTS] + expert, t.CARD_HOME]
    slot = (load64(word_at(base, geometry, row[t.SPARSE_LAYER], expert)) & SLOT_MASK) - 1
    return base + geometry[t.EXPERT_SLOTS] + slot * geometry[t.EXPERT_NBYTES]


@njit
def matrix_at(base: int, geometry: Any, row: Any, home: int, expert: int, matrix: int) -> int:
    """Where GATE, UP or DOWN of an expert lies. home: `expert_home`."""
    key = row[t.SPARSE_LAYER] * geometry[t.NUM_EXPERTS] + expert
    return home + read_i32(base + geometry[t.EXPERT_PLACES] + 4 * (3 * key + matrix))


@njit
def listed_places(geometry: Any, row: Any, route: int) -> tuple[int, int]:
    """Places in a route's order of what this lane computes."""
    card = geometry[t.THIS_CARD]
    if card < 0:
        return 0, read_i64(route + 8 * t.NUM_CHOSEN)
    at = route + 8 * (t.CARD_PLACES + card)
    return read_i64(at), read_i64(at + 8)


@njit
def wait_joined(base: int, geometry: Any, row: Any, record: int) -> int:
    """Wait for the lanes that compute other experts of the layer: ns waited, -1 if aborted."""
    began = now_ns()
    for lane in range(t.MAX_LANES):
        needed = row[t.JOIN_WAIT + lane]
        if needed < 0:
            continue
        wanted = record_i64(record, t.LANE_BASE + lane) + needed
        counter = counter_at(base, geometry, lane)
        if wait_counter(counter, wanted, base + geometry[t.ABORT], 0, 0) != WAIT_OK:
            return -1
    return now_ns() - began


@njit
def expert_bias(base: int, row: Any, expert: int, matrix: int, rows: int, first: int) -> int:
    """Address of the bias of an expert's matrix of `rows`, from row `first`; 0: it has none."""
    offset = row[t.EXPERT_BIASES + matrix]
    return base + offset + (expert * rows + first) * 4 if offset >= 0 else 0


@njit
def wait_ready(base: int, geometry: Any, route: int, place: int) -> int:
    """Wait until the expert at `place` of a route's order has arrived: ns waited, -1 if aborted."""
    if place < read_i64(route + 8 * t.NUM_RESIDENT) or geometry[t.THIS_CARD] >= 0:
        return 0
    counter = base + geometry[t.COUNTERS] + geometry[t.READY_COUNTER] * t.COUNTER_NBYTES
    wanted = read_i64(route + 8 * t.READY_BASE) + place + 1
    if reached(load32(counter), np.int32(wanted)):
        return 0
    started = now_ns()
    if wait_counter(counter, wanted, base + geometry[t.ABORT], 0, 0) != WAIT_OK:
        return -1
    return now_ns() - started


@njit
def wait_halves(base: int, geometry: Any, halves: int, wanted: int) -> bool:
    """Wait until peers have done their part of gate and up. False: aborted."""
    spins = 0
    while load32(halves) < wanted:
        spins = spin(base, geometry, spins)
        if spins < 0:
            return False
    return True


@njit
def finish_expert(base: int, geometry: Any, route: int, layer: int, expert: int) -> None:
    """An expert is computed for all rows: its slot may be used for another."""
    if geometry[t.THIS_CARD] >= 0:
        return
    word = word_at(base, geometry, layer, expert)
    older = read_i64(route + 8 * t.ROUTE_SEQUENCE) - 1
    write_i64(word, (older << t.SLOT_BITS) | (load64(word) & SLOT_MASK))
    finished = add32(route + 8 * t.NUM_FINISHED, np.int32(1)) + 1
    # NOTE: behind an atomic operation: whoever goes to bed looks at the word after saying so.
    wake_bed(base + geometry[t.ROUTE_NUMBER] + 8 * t.STARVED)
    if finished == read_i64(route + 8 * t.NUM_CHOSEN):
        counter = base + geometry[t.COUNTERS] + geometry[t.SUMMED_COUNTER] * t.COUNTER_NBYTES
        publish(counter, np.int32(older + 1))


@njit
def half_item(
    base: int, geometry: Any, row: Any, blocks: Any, route: int, chunk: int, expert: int,
    home: int, begin: int, end: int, x: int, scratch: int,
) -> None:  # fmt: skip
    """silu(gate) * up for some rows of an expert at `home` and its pairs at begin..end."""
    inner, hidden, top_k = geometry[t.EXPERT_INNER], geometry[t.HIDDEN], geometry[t.TOP_K]
    height = -(-inner // row[t.EXPERT_CHUNKS])
    first = chunk * height
    num_rows = min(height, inner - first)
    if num_rows <= 0:
        return
    gates = scratch + geometry[t.SCRATCH_OUTPUT]
    ups = gates + t.MAX_BLOCK_ROWS * 4
    gate, up = blocks[row[t.EXPERT_BLOCKS] + GATE], blocks[row[t.EXPERT_BLOCKS] + UP]
    gate_at = matrix_at(base, geometry, row, home, expert, GATE) + first * gate[t.ROW_NBYTES]
    up_at = matrix_at(base, geometry, row, home, expert, UP) + first * up[t.ROW_NBYTES]
    quantised = scratch + geometry[t.SCRATCH_QUANTISED]
    gate_bias = expert_bias(base, row, expert, GATE, inner, first)
    up_bias = expert_bias(base, row, expert, UP, inner, first)
    for place in range(begin, end):
        pair = read_i32(route + geometry[t.ROUTE_PAIRS] + 4 * place)
        index = pair // top_k
        source = x + index * hidden * 4
        packed = quantised + index * geometry[t.QUANTISED_NBYTES]
        multiply_rows(gate, gate_at, num_rows, hidden, source, packed, gates, scratch)
        multiply_rows(up, up_at, num_rows, hidden, source, packed, ups, scratch)
        out = base + geometry[t.EXPERT_ACTIVATED] + (pair * inner + first) * 4
        activate_row(base, geometry, LAYOUT_F32, gates, ups, gate_bias, up_bias, out, num_rows)


@njit
def whole_item(
    base: int, geometry: Any, row: Any, blocks: Any, route: int, chunk: int, expert: int,
    home: int, begin: int, end: int, scratch: int,
) -> None:  # fmt: skip
    """down for some output rows of an expert at `home` and its pairs at begin..end."""
    inner, hidden = geometry[t.EXPERT_INNER], geometry[t.HIDDEN]
    height = -(-hidden // row[t.EXPERT_CHUNKS])
    first = chunk * height
    num_rows = min(height, hidden - first)
    if num_rows <= 0:
        return
    down = blocks[row[t.EXPERT_BLOCKS] + DOWN]
    down_at = matrix_at(base, geometry, row, home, expert, DOWN)
    down_at += first * down[t.ROW_NBYTES]
    quantised = scratch + geometry[t.SCRATCH_SPARE]
    bias = expert_bias(base, row, expert, DOWN, hidden, first)
    for place in range(begin, end):
        pair = read_i32(route + geometry[t.ROUTE_PAIRS] + 4 * place)
        source = base + geometry[t.EXPERT_ACTIVATED] + pair * inner * 4
        if down[t.IS_PACKED] != 0:
            quantise_row(source, inner, quantised)
        out = base + geometry[t.EXPERT_OUTPUT] + (pair * hidden + first) * 4
        multiply_rows(down, down_at, num_rows, inner, source, quantised, out, scratch)
        if bias != 0:
            finish_row(LAYOUT_F32, out, bias, 0, out, num_rows)


@njit
def look_ahead(
    base: int, geometry: Any, row: Any, router: Any, items: Any, blocks: Any, scratch: int
) -> None:
    """Guess what the next layer will choose for the only row, from what this one starts with.

    router: the instruction of the next layer's router, all of whose weights are in RAM.
    """
    hidden, experts, top_k = geometry[t.HIDDEN], geometry[t.NUM_EXPERTS], geometry[t.TOP_K]
    x = scratch + geometry[t.SCRATCH_NORMALISED]  # these two are of chunks
    logits = scratch + geometry[t.SCRATCH_GATHERED]
    quantised = scratch + geometry[t.SCRATCH_SPARE]
    eps = read_f32(base + geometry[t.NORM_EPS])
    weight = base + router[t.NORM_WEIGHT]
    rms_norm(base + row[t.INPUT], weight, LAYOUT_F32, x, hidden, eps, scratch)
    if router[t.QUANTISES] != 0:
        quantise_row(x, hidden, quantised)
    for number in range(router[t.ITEM_COUNT]):
        item = items[router[t.ITEM_START] + number]
        block = blocks[item[t.BLOCK]]
        address = base + block[t.OFFSET] + item[t.ROW_IN_BLOCK] * block[t.ROW_NBYTES]
        out = logits + 4 * item[t.FIRST_ROW]
        multiply_rows(block, address, item[t.NUM_ROWS], hidden, x, quantised, out, scratch)
    if router[t.BIAS] >= 0:
        finish_row(LAYOUT_F32, logits, base + router[t.BIAS], 0, logits, experts)
    layer = router[t.SPARSE_LAYER]
    route = route_at(base, geometry, layer)
    weights = logits + 4 * geometry[t.ROUTER_STRIDE]
    guesses = route + geometry[t.ROUTE_GUESSES]
    choose(logits, experts, top_k, 1, guesses, weights)
    if router[t.CARD_EXPERTS] >= 0:
        for rank in range(top_k):
            expert = read_i32(guesses + 4 * rank)
            if items[router[t.CARD_EXPERTS] + expert, t.CARD] >= 0:
                write_i32(guesses + 4 * rank, np.int32(-1))  # nothing to be read
    number = read_i64(route_at(base, geometry, row[t.SPARSE_LAYER]) + 8 * t.ROUTE_SEQUENCE)
    write_i64(route + 8 * t.GUESS_FOR, number + 1)
    write_i64(base + geometry[t.ROUTE_NUMBER] + 8 * t.NEWEST_GUESS, layer + 1)
    call_disk_lane(base, geometry)


@njit
def expert_item(
    base: int,
    geometry: Any,
    instructions: Any,
    row: Any,
    items: Any,
    blocks: Any,
    item: int,
    num_rows: int,
    x: int,
    scratch: int,
) -> int:
    """One item of a decode step. Returns the ns waited for the disk lane, -1 if aborted.

    x: address of the normalised inputs, float32 [rows, HIDDEN], which are quantised in scratch
    where the experts are packed.
    """
    if item == 0:
        wanted = read_i64(base + geometry[t.ROUTE_NUMBER] + 8 * t.LOOKS_AHEAD)
        if wanted != 0 and num_rows == 1 and row[t.NEXT_ROUTER] >= 0:
            router = instructions[row[t.NEXT_ROUTER]]
            look_ahead(base, geometry, row, router, items, blocks, scratch)
        return 0
    item -= 1
    layer = row[t.SPARSE_LAYER]
    route = route_at(base, geometry, layer)
    chunks = row[t.EXPERT_CHUNKS]
    first, last = listed_places(geometry, row, route)
    resident = last - first
    if geometry[t.THIS_CARD] < 0:
        resident = read_i64(route + 8 * t.NUM_RESIDENT)
    if item < resident * 2 * chunks:  # of all that are here first gate and up, then down
        is_down = item >= resident * chunks
        item -= resident * chunks if is_down else 0
        place, chunk = item // chunks, item % chunks
    else:
        place, chunk = item // (2 * chunks), item % (2 * chunks)
        is_down = chunk >= chunks
        chunk -= chunks if is_down else 0
    place += first
    if place >= last:
        return 0
    waited = wait_ready(base, geometry, route, place)
    if waited < 0:
        return -1
    expert = read_i32(route + geometry[t.ROUTE_ORDER] + 4 * place)
    halves = route + geometry[t.ROUTE_HALVES] + 4 * place
    starts = route + geometry[t.ROUTE_STARTS] + 4 * expert
    begin, end = read_i32(starts), read_i32(starts + 4)
    home = expert_home(base, geometry, row, items, expert)
    if not is_down:
        half_item(base, geometry, row, blocks, route, chunk, expert, home, begin, end, x, scratch)
        add32(halves, np.int32(1))
        return waited
    if not wait_halves(base, geometry, halves, chunks):
        return -1
    whole_item(base, geometry, row, blocks, route, chunk, expert, home, begin, end, scratch)
    if add32(route + geometry[t.ROUTE_WHOLES] + 4 * place, np.int32(1)) + 1 == chunks:
        finish_expert(base, geometry, route, layer, expert)
    return waited


@njit
def add_experts(
    base: int,
    geometry: Any,
    row: Any,
    layout: int,
    outputs: int,
    first: int,
    last: int,
    skipped: int,
) -> None:
    """Add the experts' outputs of rows first..last to the residual stream, by rank.

    outputs: address of [pairs, HIDDEN] of a direct layout; its first row is that of pair `skipped`.
    """
    hidden, top_k = geometry[t.HIDDEN], geometry[t.TOP_K]
    nbytes = hidden * (4 if layout == LAYOUT_F32 else 2)
    weights = route_at(base, geometry, row[t.SPARSE_LAYER]) + geometry[t.ROUTE_WEIGHTS]
    for index in range(first, last):
        pair = index * top_k
        weighted_sum(
            layout,
            outputs + (pair - skipped) * nbytes,
            nbytes,
            top_k,
            hidden,
            weights + 4 * pair,
            0,
            1,
            base + row[t.OUTPUT] + index * hidden * 4,
        )
