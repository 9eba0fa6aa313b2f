"""The walk of a decode step: one compiled function per token and worker, without the GIL.

Each worker of a lane walks the same program. An instruction's items are taken from a shared ticket,
so a worker that the system has put to sleep holds up nobody, except with the item in its hands;
whoever finishes the last item publishes the lane's counter. Waits look at other lanes' counters
(the previous group, the arrival of a streamed block).

`wait_inputs`, `is_last_item`, `retire` and `note_span` also serve the walk of a prefill step.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shadowlane.ops import table as t
from shadowlane.ops.activation import activate_row
from shadowlane.ops.atomics import (
    WAIT_OK,
    call_address,
    claim,
    complete,
    load64,
    now_ns,
    publish,
    read_f32,
    read_i32,
    read_i64,
    wait_counter,
    write_i64,
)
from shadowlane.ops.attention import attention_item
from shadowlane.ops.blocks import (
    block_address,
    counter_at,
    multiply_block,
    record_i64,
    wait_blocks,
)
from shadowlane.ops.compiled import njit
from shadowlane.ops.emulated import hold
from shadowlane.ops.expert_walk import (
    add_experts,
    count_expert_items,
    expert_item,
    wait_joined,
)
from shadowlane.ops.kernels import (
    LAYOUT_F32,
    rms_norm,
    rope_angles,
    weighted_sum,
)
from shadowlane.ops.packed import quantise_row
from shadowlane.ops.routes import call_disk_lane, route, take_route
from shadowlane.ops.rows import finish_row


@njit
def ticket_at(base: int, geometry: Any, ordinal: int) -> int:
    return base + geometry[t.TICKETS] + ordinal * t.TICKET_NBYTES


@njit
def wait_inputs(
    base: int, geometry: Any, row: Any, record: int, spin_ns: int, statistics: int
) -> int:
    """Wait until all lanes have retired what this instruction reads: own lane first, then peers.

    What the wait took is added to the worker's statistics.
    """
    began = now_ns()
    abort = base + geometry[t.ABORT]
    own = geometry[t.LANE]
    status = wait_counter(
        counter_at(base, geometry, own),
        record_i64(record, t.LANE_BASE + own) + row[t.ORDINAL],
        abort,
        spin_ns,
        0,
    )
    for lane in range(t.MAX_LANES):
        needed = row[t.PEER_WAIT + lane]
        if status == WAIT_OK and needed >= 0:
            wanted = record_i64(record, t.LANE_BASE + lane) + needed
            status = wait_counter(counter_at(base, geometry, lane), wanted, abort, spin_ns, 0)
    if status == WAIT_OK and row[t.KIND] == t.EMBED and row[t.GATHERED] != 0:
        gathered = counter_at(base, geometry, geometry[t.GATHER_COUNTER])
        status = wait_counter(gathered, record_i64(record, t.STEP), abort, 0, 0)
    if status == WAIT_OK:
        waits = read_i64(statistics + 8 * t.WAIT_NS)
        write_i64(statistics + 8 * t.WAIT_NS, waits + now_ns() - began)
    return status


@njit
def is_last_item(base: int, geometry: Any, row: Any, record: int, num_items: int) -> bool:
    """Count an item as done. True for the last one: who did it has to `retire` the instruction."""
    done = ticket_at(base, geometry, row[t.ORDINAL]) + 64
    return complete(done, record_i64(record, t.STEP), num_items)


@njit
def retire(base: int, geometry: Any, row: Any, record: int) -> None:
    """Publish the lane's counter: an instruction is done."""
    lane = geometry[t.LANE]
    retired = record_i64(record, t.LANE_BASE + lane) + row[t.ORDINAL] + 1
    publish(counter_at(base, geometry, lane), np.int32(retired))


@njit
def worker_at(base: int, geometry: Any, worker: int) -> int:
    return base + geometry[t.WORKERS] + worker * t.WORKER_NBYTES


@njit
def note_span(
    base: int, geometry: Any, worker: int, step: int, group: int, start: int, end: int, waited: int
) -> None:
    """Append one span to the worker's ring and add it to its statistics."""
    place = worker_at(base, geometry, worker)
    write_i64(place + 8 * t.BUSY_NS, read_i64(place + 8 * t.BUSY_NS) + end - start - waited)
    write_i64(place + 8 * t.DISK_WAIT_NS, read_i64(place + 8 * t.DISK_WAIT_NS) + waited)
    count = read_i64(place + 8 * t.NUM_SPANS)
    span = place + t.WORKER_HEADER_NBYTES + (count % t.SPAN_RING) * t.SPAN_FIELDS * 8
    write_i64(span, step)
    write_i64(span + 8, group)
    write_i64(span + 16, start)
    write_i64(span + 24, end)
    write_i64(span + 32, waited)
    write_i64(place + 8 * t.NUM_SPANS, count + 1)


@njit
def embed_row(base: int, geometry: Any, row: Any, blocks: Any, record: int, index: int) -> None:
    """x[index] = embedding of that row's token; also its rotary angles."""
    token = read_i32(record + geometry[t.RECORD_TOKENS] + 4 * index)
    block = blocks[row[t.TILE_START] + token // row[t.BLOCK_ROWS]]
    if block[t.OFFSET] >= 0:
        source = base + block[t.OFFSET] + (token - block[t.BLOCK_FIRST_ROW]) * block[t.ROW_NBYTES]
    else:
        source = base + geometry[t.GATHER] + index * geometry[t.GATHER_STRIDE]
    hidden = geometry[t.HIDDEN]
    call_address(block[t.EXPAND], (source, base + geometry[t.X] + index * hidden * 4, hidden))
    half = geometry[t.HEAD_DIM] // 2
    sequence = read_i32(record + geometry[t.RECORD_SEQUENCES] + 4 * index)
    rope_angles(
        read_i32(record + geometry[t.RECORD_POSITIONS] + 4 * index),
        record + geometry[t.RECORD_INV_FREQ] + sequence * half * 4,
        read_f32(record + geometry[t.RECORD_SCALING] + 4 * sequence),
        base + geometry[t.COS] + index * half * 4,
        base + geometry[t.SIN] + index * half * 4,
        half,
    )


@njit
def prepare_input(
    base: int, geometry: Any, row: Any, record: int, num_rows: int, scratch: int
) -> int:
    """Address of the float32 inputs of the decode rows: normalised into scratch where needed.

    Where blocks are packed, their quantised form is in scratch too.
    """
    prepared = base + row[t.INPUT]
    if row[t.NORM_WEIGHT] >= 0:
        prepared = normalise_input(base, geometry, row, record, num_rows, scratch)
    if row[t.QUANTISES] != 0:
        quantised = scratch + geometry[t.SCRATCH_QUANTISED]
        for index in range(num_rows):
            quantise_row(prepared + index * row[t.COLS] * 4, row[t.COLS], quantised)
            quantised += geometry[t.QUANTISED_NBYTES]
    return prepared


@njit
def normalise_input(
    base: int, geometry: Any, row: Any, record: int, num_rows: int, scratch: int
) -> int:
    """RMS norm of the decode rows (of LM_HEAD: of those whose logits are wanted) in scratch."""
    cols = row[t.COLS]
    eps = read_f32(base + geometry[t.NORM_EPS])
    prepared = scratch + geometry[t.SCRATCH_INPUT]
    for index in range(num_rows):
        source = index
        if row[t.KIND] == t.LM_HEAD:
            source = read_i32(record + geometry[t.RECORD_LOGIT_ROWS] + 4 * index)
        rms_norm(
            base + row[t.INPUT] + source * cols * 4,
            base + row[t.NORM_WEIGHT],
            LAYOUT_F32,
            prepared + index * cols * 4,
            cols,
            eps,
            scratch,
        )
    return prepared


@njit
def shared_factor(base: int, geometry: Any, row: Any, index: int) -> int:
    """Address of the factor with which a row takes in what its layer's shared expert gives."""
    return base + row[t.SHARED_GATE] + index * geometry[t.ROUTER_STRIDE] * 4


@njit
def linear_item(
    base: int,
    geometry: Any,
    row: Any,
    item: Any,
    blocks: Any,
    record: int,
    x: int,
    inputs: int,
    scratch: int,
) -> None:
    """A chunk of rows of a LINEAR or LM_HEAD for all decode rows."""
    block = blocks[item[t.BLOCK]]
    address = block_address(base, geometry, block, record)
    num_rows, first = item[t.NUM_ROWS], item[t.FIRST_ROW]
    result = scratch + geometry[t.SCRATCH_OUTPUT]
    stride = t.MAX_BLOCK_ROWS * 4
    cols = row[t.COLS]
    done = 0
    while done < inputs:  # LM_HEAD may have more rows than fit one pass
        together = min(inputs - done, t.MAX_DECODE_ROWS)
        multiply_block(
            geometry,
            block,
            address,
            item[t.ROW_IN_BLOCK],
            num_rows,
            cols,
            x,
            done,
            together,
            result,
            stride,
            scratch,
        )
        for index in range(together):
            out = base + row[t.OUTPUT] + ((done + index) * row[t.ROWS] + first) * 4
            source = result + index * stride
            if row[t.SHARED_GATE] >= 0:
                factor = shared_factor(base, geometry, row, done + index)
                weighted_sum(LAYOUT_F32, source, 0, 1, num_rows, factor, 0, 1, out)
                continue
            bias = base + row[t.BIAS] + 4 * first if row[t.BIAS] >= 0 else 0
            finish_row(LAYOUT_F32, source, bias, row[t.EPILOGUE], out, num_rows)
        done += together


@njit
def gate_up_item(
    base: int,
    geometry: Any,
    row: Any,
    item: Any,
    blocks: Any,
    record: int,
    x: int,
    inputs: int,
    scratch: int,
) -> None:
    """silu(gate) * up for a chunk of rows and all decode rows."""
    num_rows, first, cols = item[t.NUM_ROWS], item[t.FIRST_ROW], row[t.COLS]
    stride = t.MAX_BLOCK_ROWS * 4
    gates = scratch + geometry[t.SCRATCH_OUTPUT]
    ups = gates + t.MAX_DECODE_ROWS * stride
    gate_block, up_block = blocks[item[t.BLOCK]], blocks[item[t.SECOND_BLOCK]]
    multiply_block(
        geometry,
        gate_block,
        block_address(base, geometry, gate_block, record),
        item[t.ROW_IN_BLOCK],
        num_rows,
        cols,
        x,
        0,
        inputs,
        gates,
        stride,
        scratch,
    )
    multiply_block(
        geometry,
        up_block,
        block_address(base, geometry, up_block, record),
        item[t.ROW_IN_BLOCK],
        num_rows,
        cols,
        x,
        0,
        inputs,
        ups,
        stride,
        scratch,
    )
    gate_bias, up_bias = 0, 0
    if row[t.BIAS] >= 0:
        gate_bias = base + row[t.BIAS] + 4 * first
        up_bias = gate_bias + 4 * row[t.ROWS]
    for index in range(inputs):
        out = base + row[t.OUTPUT] + (index * row[t.ROWS] + first) * 4
        activate_row(
            base,
            geometry,
            LAYOUT_F32,
            gates + index * stride,
            ups + index * stride,
            gate_bias,
            up_bias,
            out,
            num_rows,
        )


@njit
def walk(
    base: int,
    geometry: Any,
    instructions: Any,
    items: Any,
    blocks: Any,
    record: int,
    step: int,
    worker: int,
    scratch: int,
) -> int:
    """Run a decode step on one worker. Returns 0, or the wait status that ended it early.

    base: address of the arena; geometry, instructions, items, blocks: see `table.py`; record,
    scratch: addresses. Where the record is no longer that of `step`, its peers are many steps on:
    there is nothing to do.
    """
    num_rows = load64(record + 8 * t.NUM_DECODE)
    num_logits = load64(record + 8 * t.NUM_LOGITS)
    same_sequence = load64(record + 8 * t.SAME_SEQUENCE) != 0
    # NOTE: the step is looked at last and written first. What was read before is of one step, and
    # stays so while this worker has an item in its hands; without one it reads nothing that counts.
    if load64(record + 8 * t.STEP) != step:
        return WAIT_OK
    spin_ns = read_i64(base + geometry[t.SPIN_NS])
    statistics = worker_at(base, geometry, worker)
    for number in range(instructions.shape[0]):
        row = instructions[number]
        kind = row[t.KIND]
        num_items = row[t.ITEM_COUNT]
        if kind == t.ATTENTION:
            num_items *= row[t.HEAD_SPLITS] * (1 if same_sequence else num_rows)
        elif kind == t.EMBED:
            num_items = 1
        elif kind == t.EXPERTS:
            num_items = count_expert_items(geometry, row, num_rows)
        status = wait_inputs(base, geometry, row, record, spin_ns, statistics)
        if status != WAIT_OK:
            return status
        start = now_ns()
        ticket = ticket_at(base, geometry, row[t.ORDINAL])
        inputs = num_logits if kind == t.LM_HEAD else num_rows
        x = 0
        waited, late_ns = 0, 0
        busy_ns = -1  # of an emulated instruction, by the one worker that holds it
        worked = False
        while True:
            taken = claim(ticket, step, num_items)
            if taken < 0:
                break
            worked = True
            if kind == t.EMBED:
                for index in range(num_rows):
                    embed_row(base, geometry, row, blocks, record, index)
            elif kind == t.ATTENTION:
                attention_item(base, geometry, row, record, taken, num_rows, scratch)
            elif kind == t.EXPERTS:
                is_decode = 0 if same_sequence else 1
                if row[t.CARD_CHOSE] > 0 and not take_route(
                    base, geometry, row, items, record, step, taken, num_rows, is_decode
                ):
                    return 1
                if x == 0:
                    x = prepare_input(base, geometry, row, record, inputs, scratch)
                late = expert_item(
                    base, geometry, instructions, row, items, blocks, taken, num_rows, x, scratch
                )
                if late < 0:
                    return 1
                waited += late
            else:
                item = items[row[t.ITEM_START] + taken]
                if x == 0:
                    x = prepare_input(base, geometry, row, record, inputs, scratch)
                late = wait_blocks(base, geometry, row, item, blocks, record)
                if late < 0:
                    return 1
                if late > 0:
                    waited, late_ns = waited + late, now_ns()
                if kind == t.GATE_UP:
                    gate_up_item(base, geometry, row, item, blocks, record, x, inputs, scratch)
                else:
                    linear_item(base, geometry, row, item, blocks, record, x, inputs, scratch)
            if is_last_item(base, geometry, row, record, num_items):
                misses = False
                if kind == t.ROUTER:
                    is_decode = 0 if same_sequence else 1
                    misses = route(base, geometry, row, items, step, num_rows, is_decode)
                elif kind == t.EXPERTS and row[t.JOINS] >= 0:
                    if row[t.JOINS] > 0:
                        late = wait_joined(base, geometry, row, record)
                        if late < 0:
                            return 1
                        waited += late
                    outputs = base + geometry[t.EXPERT_OUTPUT]
                    add_experts(base, geometry, row, LAYOUT_F32, outputs, 0, num_rows, 0)
                start, busy_ns = hold(base, geometry, row, items, record, start, late_ns)
                retire(base, geometry, row, record)
                if misses:
                    call_disk_lane(base, geometry)
        ended = now_ns()
        if busy_ns >= 0:
            waited = ended - start - busy_ns
        if worked and (busy_ns >= 0 or geometry[t.EMULATION] < 0):
            note_span(base, geometry, worker, step, row[t.GROUP], start, ended, waited)
    return WAIT_OK
