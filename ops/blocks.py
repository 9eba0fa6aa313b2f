"""Blocks of weights as operators meet them: where they are, when they are there, and a product.

A resident block is at its home, a streamed one in the ring slot of this step's sweep.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shadowlane.ops import table as t
from shadowlane.ops.atomics import (
    WAIT_OK,
    call_address,
    load32,
    now_ns,
    reached,
    read_i64,
    wait_counter,
)
from shadowlane.ops.compiled import njit


@njit
def counter_at(base: int, geometry: Any, number: int) -> int:
    """Address of a counter."""
    return base + geometry[t.COUNTERS] + number * t.COUNTER_NBYTES


@njit
def record_i64(record: int, field: int) -> int:
    return read_i64(record + 8 * field)


@njit
def block_address(base: int, geometry: Any, block: Any, record: int) -> int:
    """Where a block's weights are: at home, or in the ring slot of this step's sweep."""
    if block[t.OFFSET] >= 0:
        return base + block[t.OFFSET]
    return slot_address(base, geometry, block[t.SWEEP_ORDINAL], record) + block[t.SKEW]


@njit
def slot_address(base: int, geometry: Any, place: int, record: int) -> int:
    """The ring slot of what comes at a place of this step's sweep."""
    slot = (record_i64(record, geometry[t.SWEEP_BASE]) + place) % geometry[t.NUM_SLOTS]
    return base + geometry[t.RING] + slot * geometry[t.SLOT_NBYTES]


@njit
def wait_block(base: int, geometry: Any, block: Any, record: int) -> int:
    """Wait until a streamed block has arrived. Returns the ns waited, -1 if aborted."""
    return wait_brought(base, geometry, block[t.SWEEP_ORDINAL], record)


@njit
def wait_brought(base: int, geometry: Any, place: int, record: int) -> int:
    """`wait_block` for a place of the sweep; less than 0: it is not brought."""
    if place < 0:
        return 0
    counter = counter_at(base, geometry, geometry[t.BRINGS_COUNTER])
    wanted = record_i64(record, geometry[t.SWEEP_BASE]) + place + 1
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
def call_operator(
    block: Any,
    address: int,
    num_rows: int,
    cols: int,
    x: int,
    x_stride: int,
    inputs: int,
    y: int,
    y_stride: int,
    scratch: int,
) -> None:
    """Rows of a block, the first at `address`, by the operator of its layout.

    x: inputs, float32 or quantised as the layout wants them; y: float32 [inputs, num_rows].
    """
    call_address(
        block[t.OPERATOR],
        (
            block[t.LAYOUT],
            block[t.EXPAND],
            address,
            block[t.ROW_NBYTES],
            num_rows,
            cols,
            x,
            x_stride,
            inputs,
            y,
            y_stride,
            scratch,
        ),
    )


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
    """Rows of one block times prepared inputs from `first_input`."""
    stride = cols * 4
    if block[t.IS_PACKED] != 0:
        x, stride = scratch + geometry[t.SCRATCH_QUANTISED], geometry[t.QUANTISED_NBYTES]
    address += row_in_block * block[t.ROW_NBYTES]
    x += first_input * stride
    call_operator(block, address, num_rows, cols, x, stride, inputs, y, y_stride, scratch)


@njit
def multiply_rows(
    block: Any, address: int, num_rows: int, cols: int, x: int, quantised: int, y: int, scratch: int
) -> None:
    """Rows of a block, the first at `address`, times one prepared input; y: float32 [num_rows]."""
    prepared = quantised if block[t.IS_PACKED] != 0 else x
    call_operator(block, address, num_rows, cols, prepared, 0, 1, y, 0, scratch)
