"""The walk of a decode step: one compiled function per token and worker, without the GIL.

Each worker of a lane walks the same program. An instruction's items are taken from a shared ticket,
so a worker that the system has put to sleep holds up nobody, except with the item in its hands;
whoever finishes the last item publishes the lane's counter. Waits look at other lanes' counters
(the previous group, the arrival of a streamed block).

`wait_inputs`, `finish_item` and `note_span` also serve the walk of a prefill step.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shadowlane.ops import table as t
from shadowlane.ops.atomics import (
    WAIT_OK,
    call_address,
    claim,
    complete,
    copy_bytes,
    load32,
    load64,
    now_ns,
    publish,
    reached,
    read_f32,
    read_i32,
    read_i64,
    wait_counter,
    write_f32,
    write_i64,
)
from shadowlane.ops.compiled import njit
from shadowlane.ops.kernels import (
    EXPAND_AT,
    LAYOUT_F16,
    LAYOUT_F32,
    LAYOUT_Q8_0,
    ONE,
    ZERO,
    _matvec_direct,
    multiply_q8_0,
    rms_norm,
    rope_angles,
    rotate,
    weighted_sum,
)
from shadowlane.ops.packed import quantise_row
from shadowlane.ops.rows import convert_row, divide_row, finish_row, silu_row, soften

_matvec = njit(_matvec_direct)


@njit
def counter_at(base: int, geometry: Any, number: int) -> int:
    """Address of a counter."""
    return base + geometry[t.COUNTERS] + number * t.COUNTER_NBYTES


@njit
def record_i64(record: int, field: int) -> int:
    return read_i64(record + 8 * field)


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
def block_address(base: int, geometry: Any, block: Any, record: int) -> int:
    """Where a block's weights are: at home, or in the ring slot of this step's sweep."""
    if block[t.OFFSET] >= 0:
        return base + block[t.OFFSET]
    ordinal = record_i64(record, t.DISK_BASE) + block[t.SWEEP_ORDINAL]
    slot = ordinal % geometry[t.NUM_SLOTS]
    return base + geometry[t.RING] + slot * geometry[t.SLOT_NBYTES] + block[t.SKEW]


@njit
def wait_block(base: int, geometry: Any, block: Any, record: int) -> int:
    """Wait until a streamed block has arrived. Returns the ns waited, -1 if aborted."""
    if block[t.SWEEP_ORDINAL] < 0:
        return 0
    counter = counter_at(base, geometry, geometry[t.DISK_COUNTER])
    wanted = record_i64(record, t.DISK_BASE) + block[t.SWEEP_ORDINAL] + 1
    if reached(load32(counter), np.int32(wanted)):
        return 0
    started = now_ns()
    if wait_counter(counter, wanted, base + geometry[t.ABORT], 0, 0) != WAIT_OK:
        return -1
    return now_ns() - started


@njit
def wait_blocks(base: int, geometry: Any, row: Any, item: Any, blocks: Any, record: int) -> int:
    """Wait for the one or two blocks of an item. Returns the ns waited, -1 if aborted."""
    late = wait_block(base, geometry, blocks[item[t.BLOCK]], record)
    if row[t.KIND] == t.GATE_UP and late >= 0:
        more = wait_block(base, geometry, blocks[item[t.SECOND_BLOCK]], record)
        late = more if more < 0 else late + more
    return late


@njit
def finish_item(base: int, geometry: Any, row: Any, record: int, num_items: int) -> None:
    """Count an item as done; the last one publishes the lane's counter."""
    ordinal = row[t.ORDINAL]
    done = ticket_at(base, geometry, ordinal) + 64
    if complete(done, record_i64(record, t.STEP), num_items):
        lane = geometry[t.LANE]
        retired = record_i64(record, t.LANE_BASE + lane) + ordinal + 1
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
def multiply_block(
    geometry: Any,
    block: Any,
    address: int,
    row_in_block: int,
    num_rows: int,
    cols: int,
    x: int,
    first_input: int,
    inputs: int,
    y: int,
    y_stride: int,
    scratch: int,
) -> None:
    """Rows of one block times prepared inputs from `first_input`, by the operator of its layout."""
    stride = cols * 4
    if block[t.IS_PACKED] != 0:
        x, stride = scratch + geometry[t.SCRATCH_QUANTISED], geometry[t.QUANTISED_NBYTES]
    call_address(
        block[t.OPERATOR],
        (
            block[t.LAYOUT],
            block[t.EXPAND],
            address + row_in_block * block[t.ROW_NBYTES],
            block[t.ROW_NBYTES],
            num_rows,
            cols,
            x + first_input * stride,
            stride,
            inputs,
            y,
            y_stride,
            scratch,
        ),
    )


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
        silu_row(
            LAYOUT_F32,
            gates + index * stride,
            ups + index * stride,
            gate_bias,
            up_bias,
            out,
            num_rows,
        )


@njit
def cache_page(base: int, geometry: Any, layer: int, page: int, value: int, head: int) -> int:
    """Address of one head's keys (value = 0) or values (1) of one page: [page tokens, head_dim]."""
    head_nbytes = geometry[t.PAGE_TOKENS] * geometry[t.KV_ROW_NBYTES]
    index = ((layer * geometry[t.NUM_PAGES] + page) * 2 + value) * geometry[t.NUM_KV_HEADS] + head
    return base + geometry[t.KV] + index * head_nbytes


@njit
def page_of(geometry: Any, record: int, sequence: int, position: int) -> int:
    entry = sequence * geometry[t.MAX_PAGES] + position // geometry[t.PAGE_TOKENS]
    return read_i32(record + geometry[t.RECORD_PAGES] + 4 * entry)


@njit
def rotate_head(
    base: int,
    geometry: Any,
    index: int,
    source: int,
    norm: int,
    factor: float,
    layout: int,
    out: int,
    scratch: int,
) -> None:
    """One head of a row: normalised where the family does so, rotated, scaled, stored."""
    dim = geometry[t.HEAD_DIM]
    if norm >= 0:
        normalised = scratch + EXPAND_AT
        eps = read_f32(base + geometry[t.NORM_EPS])
        rms_norm(source, base + norm, LAYOUT_F32, normalised, dim, eps, scratch)
        source = normalised
    half = dim // 2
    rotate(
        source,
        base + geometry[t.COS] + index * half * 4,
        base + geometry[t.SIN] + index * half * 4,
        dim,
        geometry[t.ROPE_INTERLEAVED],
        factor,
        layout,
        out,
    )


@njit
def store_key_value(
    base: int, geometry: Any, row: Any, record: int, index: int, head: int, scratch: int
) -> None:
    """Put a row's key (rotated) and value of one KV head into its cache page."""
    dim, layout = geometry[t.HEAD_DIM], geometry[t.KV_LAYOUT]
    heads, kv_heads = geometry[t.NUM_HEADS], geometry[t.NUM_KV_HEADS]
    qkv = base + geometry[t.QKV] + index * (heads + 2 * kv_heads) * dim * 4
    position = read_i32(record + geometry[t.RECORD_POSITIONS] + 4 * index)
    sequence = read_i32(record + geometry[t.RECORD_SEQUENCES] + 4 * index)
    page = page_of(geometry, record, sequence, position)
    offset = (position % geometry[t.PAGE_TOKENS]) * geometry[t.KV_ROW_NBYTES]
    key_at = cache_page(base, geometry, row[t.LAYER], page, 0, head) + offset
    value_at = cache_page(base, geometry, row[t.LAYER], page, 1, head) + offset
    key, value = qkv + (heads + head) * dim * 4, qkv + (heads + kv_heads + head) * dim * 4
    if layout == LAYOUT_Q8_0:
        rotated = scratch + EXPAND_AT + dim * 4  # rotate_head uses the first row there
        rotate_head(base, geometry, index, key, row[t.K_NORM], ONE, LAYOUT_F32, rotated, scratch)
        pack_q8_0(rotated, dim, key_at, rotated + dim * 4)
        pack_q8_0(value, dim, value_at, rotated + dim * 4)
    else:
        rotate_head(base, geometry, index, key, row[t.K_NORM], ONE, layout, key_at, scratch)
        convert_row(layout, value, value_at, dim)


@njit
def pack_q8_0(x: int, dim: int, out: int, scratch: int) -> None:
    """One float32 row in blocks of q8_0; scratch: room for the same row quantised."""
    quantise_row(x, dim, scratch)
    for group in range(dim // 32):
        block = out + group * 34
        convert_row(LAYOUT_F16, scratch + dim + 4 * group, block, 1)
        copy_bytes(scratch + 32 * group, block + 2, 32)


@njit
def attend(
    base: int,
    geometry: Any,
    row: Any,
    record: int,
    index: int,
    head: int,
    part: int,
    parts: int,
    scratch: int,
) -> None:
    """Attention of one decode row over its cached tokens, for the query heads of one KV head.

    Of these, the `part`-th of `parts` equal shares.
    """
    dim, layout = geometry[t.HEAD_DIM], geometry[t.KV_LAYOUT]
    heads, kv_heads = geometry[t.NUM_HEADS], geometry[t.NUM_KV_HEADS]
    grouped = heads // kv_heads
    position = read_i32(record + geometry[t.RECORD_POSITIONS] + 4 * index)
    sequence = read_i32(record + geometry[t.RECORD_SEQUENCES] + 4 * index)
    start = max(0, position - row[t.WINDOW] + 1) if row[t.WINDOW] > 0 else 0
    count = position + 1 - start
    nbytes = geometry[t.KV_ROW_NBYTES]
    queries = scratch + EXPAND_AT + dim * 4  # rotate_head uses the first row behind EXPAND_AT
    scores = scratch + geometry[t.SCRATCH_SCORES]
    stride = geometry[t.CONTEXT] * 4
    qkv = base + geometry[t.QKV] + index * (heads + 2 * kv_heads) * dim * 4
    factor = ONE / np.float32(math.sqrt(np.float32(dim)))
    queries_here = grouped // parts
    first = part * queries_here
    for g in range(queries_here):
        rotate_head(
            base,
            geometry,
            index,
            qkv + (head * grouped + first + g) * dim * 4,
            row[t.Q_NORM],
            factor,
            LAYOUT_F32,
            queries + g * dim * 4,
            scratch,
        )
    x, x_stride = queries, dim * 4
    if layout == LAYOUT_Q8_0:
        x = queries + queries_here * dim * 4
        for g in range(queries_here):
            quantise_row(queries + g * dim * 4, dim, x + g * x_stride)
    page_tokens = geometry[t.PAGE_TOKENS]
    at = start
    while at <= position:
        inside = at % page_tokens
        span = min(page_tokens - inside, position + 1 - at)
        keys = cache_page(
            base, geometry, row[t.LAYER], page_of(geometry, record, sequence, at), 0, head
        )
        keys += inside * nbytes
        out = scores + (at - start) * 4
        if layout == LAYOUT_Q8_0:
            multiply_q8_0(
                layout, 0, keys, nbytes, span, dim, x, x_stride, queries_here, out, stride, scratch
            )
        else:
            _matvec(
                layout, 0, keys, nbytes, span, dim, x, x_stride, queries_here, out, stride, scratch
            )
        at += span
    width = heads * dim
    out = base + row[t.OUTPUT] + (index * width + (head * grouped + first) * dim) * 4
    for i in range(queries_here * dim):
        write_f32(out + 4 * i, ZERO)
    at = start
    totals = scratch  # the dot products above are done with it
    for g in range(queries_here):
        write_f32(totals + 4 * g, soften(scores + g * stride, count))
    while at <= position:
        inside = at % page_tokens
        span = min(page_tokens - inside, position + 1 - at)
        values = cache_page(
            base, geometry, row[t.LAYER], page_of(geometry, record, sequence, at), 1, head
        )
        values += inside * nbytes
        value_layout, value_nbytes = layout, nbytes
        if layout == LAYOUT_Q8_0:
            expanded = scratch + geometry[t.SCRATCH_QUERIES]  # of a chunk; not used meanwhile
            call_address(geometry[t.KV_EXPAND], (values, expanded, span * dim))
            values, value_layout, value_nbytes = expanded, LAYOUT_F32, dim * 4
        weighted_sum(
            value_layout,
            values,
            value_nbytes,
            span,
            dim,
            scores + (at - start) * 4,
            stride,
            queries_here,
            out,
        )
        at += span
    for g in range(queries_here):
        divide_row(out + g * dim * 4, read_f32(totals + 4 * g), dim)


@njit
def attention_item(
    base: int, geometry: Any, row: Any, record: int, item: int, num_rows: int, scratch: int
) -> None:
    """Some query heads of one row; of all rows in turn where they are tokens of one sequence.

    NOTE: where a KV head is split over items, each stores the same key and value. They write the
    same bytes, and none reads them before it has written them itself.
    """
    splits = row[t.HEAD_SPLITS]
    part = item % splits
    item = item // splits
    heads = row[t.ITEM_COUNT]
    head = row[t.ITEM_START] + item % heads
    first, last = item // heads, item // heads + 1
    if record_i64(record, t.SAME_SEQUENCE) != 0:
        first, last = 0, num_rows
    for index in range(first, last):
        store_key_value(base, geometry, row, record, index, head, scratch)
        attend(base, geometry, row, record, index, head, part, splits, scratch)


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
        status = wait_inputs(base, geometry, row, record, spin_ns, statistics)
        if status != WAIT_OK:
            return status
        start = now_ns()
        ticket = ticket_at(base, geometry, row[t.ORDINAL])
        inputs = num_logits if kind == t.LM_HEAD else num_rows
        x = 0
        waited = 0
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
            else:
                item = items[row[t.ITEM_START] + taken]
                if x == 0:
                    x = prepare_input(base, geometry, row, record, inputs, scratch)
                late = wait_blocks(base, geometry, row, item, blocks, record)
                if late < 0:
                    return 1
                waited += late
                if kind == t.GATE_UP:
                    gate_up_item(base, geometry, row, item, blocks, record, x, inputs, scratch)
                else:
                    linear_item(base, geometry, row, item, blocks, record, x, inputs, scratch)
            finish_item(base, geometry, row, record, num_items)
        if worked:
            note_span(base, geometry, worker, step, row[t.GROUP], start, now_ns(), waited)
    return WAIT_OK
