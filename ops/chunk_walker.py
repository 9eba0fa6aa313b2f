"""The walk of a prefill step: one compiled function per chunk of a prompt and worker.

The same program, tickets and counters as in `walker.walk`; but an item is a whole block of weights
(a *tile*), and the product with the chunk is torch's (oneDNN: AMX and AVX-512 where they exist).
A chunk is as long as the plan says, but multiplied *sub-chunk* by sub-chunk, of a height that no
plan changes: a tile meets all of them while it is there. Blocks have one height whatever the plan
too, and each product runs on one thread, so its bits never depend on either. Decode rows that share
the step go through the kernels of decode steps exactly as they would alone.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from shadowlane.ops import aten as torch
from shadowlane.ops import table as t
from shadowlane.ops.atomics import (
    WAIT_ABORTED,
    WAIT_OK,
    claim,
    load32,
    load64,
    now_ns,
    read_i32,
    read_i64,
    write_f32,
    write_i64,
)
from shadowlane.ops.blocks import block_address, wait_blocks
from shadowlane.ops.chunk_experts import (
    ABORTED,
    DONE,
    count_chunk_items,
    expert_chunk_item,
    expert_items,
    is_in_place,
    ready_rows,
)
from shadowlane.ops.chunk_kernels import (
    activate_tile,
    add_scaled,
    decode_attention,
    embed_rows,
    finish_tile,
    gather_cache,
    normalise_rows,
    store_chunk,
)
from shadowlane.ops.compiled import njit
from shadowlane.ops.emulated import hold
from shadowlane.ops.kernels import element_nbytes
from shadowlane.ops.micro_batch import chunk_part
from shadowlane.ops.routes import call_disk_lane, route, route_part, take_route
from shadowlane.ops.rows import convert_row
from shadowlane.ops.walker import (
    gate_up_item,
    is_last_item,
    linear_item,
    note_span,
    prepare_input,
    retire,
    shared_factor,
    ticket_at,
    wait_inputs,
    worker_at,
)

EMBED_ROWS: Final = 32  # rows of one item of EMBED
FAILED: Final = 4  # beside the wait statuses: torch refused an operation
MASK_KEY: Final = 1024  # byte offset in a worker's words: what its mask is about

MINUS_INFINITY, ZERO = np.float32(-np.inf), np.float32(0)


@njit
def _has_few_heads(geometry: Any, row: Any) -> bool:
    """Whether an instruction of ATTENTION has too few KV heads to keep all workers busy."""
    return row[t.ITEM_COUNT] < 2 * geometry[t.NUM_WORKERS]


@njit
def count_parts(num_prefill: int, together: int) -> int:
    """Calls of attention for one KV head: sub-chunks of `together` rows, cut by QUERY_ROWS.

    num_prefill: rows of the chunk from the beginning of a sub-chunk on.
    """
    each, rest = -(-together // t.QUERY_ROWS), num_prefill % together
    return num_prefill // together * each - (-rest // t.QUERY_ROWS)


@njit
def part_rows(part: int, num_prefill: int, together: int) -> tuple[int, int]:
    """First row of a part, and the end of it; see `count_parts`."""
    each = -(-together // t.QUERY_ROWS)
    begin = part // each * together
    first = begin + part % each * t.QUERY_ROWS
    return first, min(first + t.QUERY_ROWS, begin + together, num_prefill)


@njit
def count_items(geometry: Any, row: Any, num_rows: int, num_prefill: int, together: int) -> int:
    """Items of an instruction in a prefill step, which has so many rows in its micro-batch.

    NOTE: a share may hold no block's first row, and so no tile. Its instruction is retired like the
    others, by who takes the one item in which there is nothing to do.
    """
    if row[t.KIND] == t.EMBED:
        return -(-num_rows // EMBED_ROWS)
    if row[t.KIND] == t.ATTENTION:
        parts = count_parts(num_prefill, together) if _has_few_heads(geometry, row) else 1
        return row[t.ITEM_COUNT] * parts
    if row[t.KIND] == t.EXPERTS:
        return count_chunk_items(geometry, row, num_rows)
    return max(1, row[t.TILE_COUNT])


@njit
def chunk_input(
    base: int, geometry: Any, row: Any, record: int, first: int, last: int, scratch: int
) -> int:
    """Address of the chunk's inputs in the compute type: normalised into scratch where needed.

    Only the rows first..last are there.
    """
    if row[t.NORM_WEIGHT] < 0:
        return base + row[t.PREFILL_INPUT]
    out = scratch + geometry[t.SCRATCH_NORMALISED]
    layout = geometry[t.COMPUTE_LAYOUT]
    normalise_rows(
        base,
        geometry,
        row,
        load64(record + 8 * t.NUM_DECODE) + first,
        last - first,
        layout,
        out + first * row[t.COLS] * element_nbytes(layout),
        scratch,
    )
    return out


@njit
def expanded_rows(base: int, geometry: Any, block: Any, first: int, cols: int) -> int:
    """Address of a block's rows from `first` in its expanded copy; 0: it has none."""
    if block[t.EXPANDED] < 0:
        return 0
    nbytes = element_nbytes(geometry[t.COMPUTE_LAYOUT])
    return base + block[t.EXPANDED] + first * cols * nbytes


@njit
def tile_item(
    base: int,
    geometry: Any,
    aten: Any,
    row: Any,
    item: Any,
    blocks: Any,
    record: int,
    x: int,
    from_row: int,
    to_row: int,
    scratch: int,
) -> bool:
    """A tile times the sub-chunks of the chunk's rows from_row..to_row, into its columns of the
    output. False: torch refused.

    What has to be expanded first goes in panels of PANEL_ROWS, which stay in the cache from one to
    the other, and for all sub-chunks. What has been expanded, once for all chunks, goes in the same
    panels: a product cut otherwise may round otherwise.
    """
    layout = geometry[t.COMPUTE_LAYOUT]
    num_decode = load64(record + 8 * t.NUM_DECODE)
    together = load64(record + 8 * t.SUBCHUNK_ROWS)
    block, second = blocks[item[t.BLOCK]], blocks[item[t.BLOCK]]
    weights = block_address(base, geometry, block, record)
    others, in_place = 0, is_in_place(geometry, block, weights)
    if row[t.KIND] == t.GATE_UP:
        second = blocks[item[t.SECOND_BLOCK]]
        others = block_address(base, geometry, second, record)
        in_place = in_place and is_in_place(geometry, second, others)
    cols, total, num_rows = row[t.COLS], row[t.ROWS], block[t.BLOCK_NUM_ROWS]
    nbytes = element_nbytes(layout)
    words = scratch + geometry[t.SCRATCH_WORDS]
    tile = scratch + geometry[t.SCRATCH_TILE]
    second_tile = scratch + geometry[t.SCRATCH_SECOND_TILE]
    products = scratch + geometry[t.SCRATCH_PRODUCTS]
    panel = num_rows if in_place else min(num_rows, t.PANEL_ROWS)
    for at in range(0, num_rows, panel):
        rows, first = min(panel, num_rows - at), item[t.FIRST_ROW] + at
        bias = base + row[t.BIAS] + 4 * first if row[t.BIAS] >= 0 else 0
        ready, other = 0, 0
        for begin in range(from_row, to_row, together):
            count = min(together, to_row - begin)
            inputs = x + begin * cols * nbytes
            if begin == from_row:
                place = weights + at * block[t.ROW_NBYTES]
                copy = expanded_rows(base, geometry, block, at, cols)
                ready = ready_rows(geometry, block, place, rows, cols, tile, copy, scratch)
            if not torch.multiply(aten, words, inputs, count, cols, ready, rows, products, layout):
                return False
            if row[t.KIND] != t.GATE_UP:
                out = base + row[t.OUTPUT] + 4 * ((num_decode + begin) * total + first)
                if row[t.SHARED_GATE] >= 0:
                    factors = shared_factor(base, geometry, row, num_decode + begin)
                    stride = geometry[t.ROUTER_STRIDE] * 4
                    add_scaled(products, layout, count, rows, factors, stride, out, total * 4)
                else:
                    adds = row[t.EPILOGUE]
                    finish_tile(products, layout, count, rows, bias, adds, out, total * 4)
                continue
            up = products + count * panel * nbytes
            if begin == from_row:
                place = others + at * second[t.ROW_NBYTES]
                copy = expanded_rows(base, geometry, second, at, cols)
                other = ready_rows(geometry, second, place, rows, cols, second_tile, copy, scratch)
            if not torch.multiply(aten, words, inputs, count, cols, other, rows, up, layout):
                return False
            activate_tile(
                base,
                geometry,
                products,
                up,
                layout,
                count,
                rows,
                bias,
                bias + 4 * total if bias != 0 else 0,
                base + row[t.PREFILL_OUTPUT] + (begin * total + first) * nbytes,
                total * nbytes,
            )
    return True


@njit
def _mask(
    geometry: Any, step: int, query_at: int, rows: int, start: int, keys: int, window: int,
    sinks: int, scratch: int,
) -> None:  # fmt: skip
    """What is added to the scores, [rows, keys + sinks]: 0 where a row may look, else -inf.

    The rows are the tokens from `query_at`, the keys those from `start`. sinks: 1 where one more
    column will hold the sinks of a head.
    """
    layout = geometry[t.COMPUTE_LAYOUT]
    words = scratch + geometry[t.SCRATCH_WORDS]
    out = scratch + geometry[t.SCRATCH_MASK]
    key = (step, query_at, start, window)
    is_there = True
    for place in range(4):
        at = words + MASK_KEY + 8 * place
        is_there = is_there and read_i64(at) == key[place]
        write_i64(at, key[place])
    if is_there:
        return
    line = scratch + geometry[t.SCRATCH_SCORES]
    width = keys + sinks
    for index in range(width):
        write_f32(line + 4 * index, MINUS_INFINITY)
    shown, hidden = 0, 0  # keys before `shown` have been uncovered, before `hidden` covered
    for index in range(rows):
        last = query_at + index - start
        while shown <= last:
            write_f32(line + 4 * shown, ZERO)
            shown += 1
        while window > 0 and hidden <= last - window:
            write_f32(line + 4 * hidden, MINUS_INFINITY)
            hidden += 1
        convert_row(layout, line, out + index * width * element_nbytes(layout), width)


@njit
def _attend(
    geometry: Any, aten: Any, queries: int, heads: int, count: int, num_keys: int, is_masked: int,
    out: int, scratch: int,
) -> bool:  # fmt: skip
    """Torch's attention of `heads` query heads over the gathered keys. False: torch refused.

    queries: [heads, count, HEAD_DIM]; out: [count, NUM_HEADS * HEAD_DIM] from their first column.
    """
    layout, dim = geometry[t.COMPUTE_LAYOUT], geometry[t.HEAD_DIM]
    words = scratch + geometry[t.SCRATCH_WORDS]
    keys = scratch + geometry[t.SCRATCH_CACHED]
    values = keys + (geometry[t.CONTEXT] + 1) * dim * element_nbytes(layout)
    width = geometry[t.NUM_HEADS] * dim
    mask = 0
    if is_masked != 0:
        at = scratch + geometry[t.SCRATCH_MASK]
        mask = torch.matrix(aten, words, at, count, num_keys, num_keys, 1, layout)
        if mask == 0:
            return False
    one = torch.heads(aten, words, queries, heads, count, dim, count * dim, dim, layout)
    two = torch.heads(aten, words, keys, heads, num_keys, dim, 0, dim, layout)
    three = torch.heads(aten, words, values, heads, num_keys, dim, 0, dim, layout)
    four = torch.heads(aten, words, out, heads, count, dim, dim, width, layout)
    done = torch.attention(aten, words, one, two, three, mask, four)
    for handle in (one, two, three, four, mask):
        torch.delete(aten, handle)
    return done


@njit
def attend_rows(
    base: int,
    geometry: Any,
    aten: Any,
    row: Any,
    record: int,
    step: int,
    head: int,
    stored: int,
    first: int,
    last: int,
    scratch: int,
) -> bool:
    """Rows first..last of the chunk for the query heads of one KV head. False: torch refused.

    The keys and values of the rows before `stored` are in the cache already.
    """
    layout, dim = geometry[t.COMPUTE_LAYOUT], geometry[t.HEAD_DIM]
    nbytes = element_nbytes(layout)
    grouped = geometry[t.NUM_HEADS] // geometry[t.NUM_KV_HEADS]
    num_decode = load64(record + 8 * t.NUM_DECODE)
    position = read_i32(record + geometry[t.RECORD_POSITIONS] + 4 * num_decode)
    sequence = read_i32(record + geometry[t.RECORD_SEQUENCES] + 4 * num_decode)
    queries = scratch + geometry[t.SCRATCH_QUERIES]
    keys = scratch + geometry[t.SCRATCH_CACHED]
    values = keys + (geometry[t.CONTEXT] + 1) * dim * nbytes
    store_chunk(
        base, geometry, row, record, num_decode, stored, first, last, head, layout, queries, scratch
    )
    window = row[t.WINDOW]
    sinks = 1 if row[t.SINKS] >= 0 else 0
    query_at = position + first
    start = max(0, query_at - window + 1) if window > 0 else 0
    count, num_keys = last - first, position + last - start
    for value in range(2):
        target = values if value else keys
        gather_cache(
            base, geometry, row[t.LAYER], record, sequence, start, num_keys, head, value, target,
            scratch,
        )  # fmt: skip
    is_masked = 1 if query_at > 0 or 0 < window < num_keys or sinks != 0 else 0
    if is_masked != 0:
        _mask(geometry, step, query_at, count, start, num_keys, window, sinks, scratch)
    width = geometry[t.NUM_HEADS] * dim
    out = base + row[t.PREFILL_OUTPUT] + (first * width + head * grouped * dim) * nbytes
    if sinks == 0:
        return _attend(geometry, aten, queries, grouped, count, num_keys, is_masked, out, scratch)
    # A sink is one more key of nothing, whose score is the mask alone, with a value of nothing.
    for index in range(dim * nbytes // 4):
        write_f32(keys + num_keys * dim * nbytes + 4 * index, ZERO)
        write_f32(values + num_keys * dim * nbytes + 4 * index, ZERO)
    mask = scratch + geometry[t.SCRATCH_MASK]
    for g in range(grouped):
        sink = base + row[t.SINKS] + 4 * (head * grouped + g)
        for index in range(count):
            column = mask + (index * (num_keys + 1) + num_keys) * nbytes
            convert_row(layout, sink, column, 1)
        if not _attend(
            geometry, aten, queries + g * count * dim * nbytes, 1, count, num_keys + 1, 1,
            out + g * dim * nbytes, scratch,
        ):  # fmt: skip
            return False
    return True


@njit
def chunk_attention(
    base: int,
    geometry: Any,
    aten: Any,
    row: Any,
    record: int,
    step: int,
    item: int,
    num_decode: int,
    from_row: int,
    to_row: int,
    scratch: int,
) -> bool:
    """All parts of the rows from_row..to_row of the chunk, and of so many decode rows, for one KV
    head; or where heads are few one of them.

    NOTE: the parts are the same, whoever takes them. Each item stores the keys and values that it
    looks at, those of earlier rows too: the same bytes whoever stores them, and none reads them
    before it has written them itself. Those before from_row are there.
    """
    together = load64(record + 8 * t.SUBCHUNK_ROWS)
    parts = count_parts(to_row - from_row, together)
    begin, end = 0, parts
    if _has_few_heads(geometry, row):
        end = parts - item // row[t.ITEM_COUNT]  # the longest first
        begin = end - 1
        item = item % row[t.ITEM_COUNT]
    head = row[t.ITEM_START] + item
    if num_decode > 0 and begin == 0:
        decode_attention(base, geometry, row, record, head, num_decode, scratch)
    stored = from_row
    for part in range(begin, end):
        first, last = part_rows(part, to_row - from_row, together)
        first, last = from_row + first, from_row + last
        if not attend_rows(
            base, geometry, aten, row, record, step, head, stored, first, last, scratch
        ):
            return False
        stored = last
    return True


@njit
def walk_chunk(
    base: int,
    geometry: Any,
    aten: Any,
    instructions: Any,
    items: Any,
    blocks: Any,
    record: int,
    step: int,
    worker: int,
    scratch: int,
) -> int:
    """Run a prefill step on one worker. Returns 0, the wait status that ended it early, or FAILED.

    Arguments as of `walker.walk`, and `aten` of `aten.load`. Like `walk`, it leaves a record alone
    that is no longer that of `step`.

    Where the step is void, what is left of it is retired and not done. Only experts that are on
    their way are waited for: the next route counts on them.
    """
    num_decode = load64(record + 8 * t.NUM_DECODE)
    num_prefill = load64(record + 8 * t.NUM_PREFILL)
    together = load64(record + 8 * t.SUBCHUNK_ROWS)
    num_logits = load64(record + 8 * t.NUM_LOGITS)
    if load64(record + 8 * t.STEP) != step:
        return WAIT_OK
    spin_ns = read_i64(base + geometry[t.SPIN_NS])
    statistics = worker_at(base, geometry, worker)
    num_rows = num_decode + num_prefill
    for number in range(instructions.shape[0]):
        row = instructions[number]
        kind = row[t.KIND]
        micro_batch = row[t.MICRO_BATCH]
        decoding = num_decode if micro_batch == 0 else 0  # the rows of this instruction
        from_row, to_row = chunk_part(micro_batch, row[t.MICRO_BATCHES], num_prefill, together)
        begin, end = num_decode - decoding + from_row, num_decode + to_row  # of all rows
        is_empty = begin == end
        is_tiled = kind != t.EMBED and kind != t.ATTENTION and row[t.TILE_COUNT] > 0
        num_items = 1
        if not is_empty:
            num_items = count_items(geometry, row, end - begin, to_row - from_row, together)
        status = wait_inputs(base, geometry, row, record, spin_ns, statistics)
        if status != WAIT_OK:
            return status
        start = now_ns()
        ticket = ticket_at(base, geometry, row[t.ORDINAL])
        inputs = num_logits if kind == t.LM_HEAD else decoding
        decode_x, chunk_x = 0, 0
        waited, late_ns = 0, 0
        busy_ns = -1  # of an emulated instruction, by the one worker that holds it
        worked, prepared = False, False
        while True:
            taken = claim(ticket, step, num_items)
            if taken < 0:
                break
            worked = True
            if row[t.CARD_CHOSE] > 0 and not take_route(
                base, geometry, row, items, record, step, taken, num_rows, 0
            ):
                return WAIT_ABORTED
            is_void = load64(record + 8 * t.IS_VOID) != 0
            if load32(base + geometry[t.ABORT]) != 0:
                return WAIT_ABORTED
            if is_empty or (is_void and kind != t.EXPERTS):
                pass
            elif kind == t.EMBED:
                first = begin + taken * EMBED_ROWS
                last = min(first + EMBED_ROWS, end)
                embed_rows(base, geometry, row, blocks, record, first, last)
            elif kind == t.ATTENTION:
                if not chunk_attention(
                    base, geometry, aten, row, record, step, taken, decoding, from_row, to_row,
                    scratch,
                ):  # fmt: skip
                    return FAILED
            elif not prepared:
                prepared = True
                if inputs > 0:
                    decode_x = prepare_input(base, geometry, row, record, inputs, scratch)
                if kind != t.LM_HEAD:
                    chunk_x = chunk_input(base, geometry, row, record, from_row, to_row, scratch)
            if kind == t.EXPERTS and not is_empty:
                outcome, late = expert_chunk_item(
                    base, geometry, aten, row, blocks, items, record, step, taken, begin, end,
                    decode_x, chunk_x, is_void, scratch,
                )  # fmt: skip
                if outcome == ABORTED:
                    return WAIT_ABORTED
                if outcome != DONE:
                    return FAILED
                waited += late
                is_expert = taken < expert_items(geometry, row)  # not a sum
                if late > 0 and is_expert and geometry[t.THIS_CARD] >= 0:
                    late_ns = now_ns()
            elif is_tiled and not (is_void or is_empty):
                item = items[row[t.TILE_START] + taken]
                late = wait_blocks(base, geometry, row, item, blocks, record)
                if late < 0:
                    return WAIT_ABORTED
                if late > 0:
                    waited, late_ns = waited + late, now_ns()
                if inputs > 0:
                    if kind == t.GATE_UP:
                        gate_up_item(
                            base, geometry, row, item, blocks, record, decode_x, inputs, scratch
                        )
                    else:
                        linear_item(
                            base, geometry, row, item, blocks, record, decode_x, inputs, scratch
                        )
                if kind != t.LM_HEAD and not tile_item(
                    base, geometry, aten, row, item, blocks, record, chunk_x, from_row, to_row,
                    scratch,
                ):  # fmt: skip
                    return FAILED
            if is_last_item(base, geometry, row, record, num_items):
                misses = False
                if kind == t.ROUTER and load64(record + 8 * t.IS_VOID) == 0:
                    if row[t.MICRO_BATCHES] == 1:
                        misses = route(base, geometry, row, items, step, num_rows, 0)
                    elif not is_empty:
                        route_part(base, geometry, row, step, begin, end)
                if not is_empty:
                    start, busy_ns = hold(base, geometry, row, items, record, start, late_ns)
                retire(base, geometry, row, record)
                if misses:
                    call_disk_lane(base, geometry)
        ended = now_ns()
        if busy_ns >= 0:
            waited = ended - start - busy_ns
        if worked and not is_empty and (busy_ns >= 0 or geometry[t.EMULATION] < 0):
            note_span(base, geometry, worker, step, row[t.GROUP], start, ended, waited)
    return WAIT_OK
