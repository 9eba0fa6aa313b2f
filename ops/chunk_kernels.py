"""Compiled kernels on a chunk of prompt rows: everything of a prefill step but the products.

They do row by row what `kernels.py` and `walker.py` do for decode rows, with results in the compute
type that torch multiplies.
"""

from __future__ import annotations

from typing import Any

from shadowlane.ops import table as t
from shadowlane.ops.activation import activate_row
from shadowlane.ops.atomics import call_address, copy_bytes, read_f32
from shadowlane.ops.attention import attend, cache_page, page_of, rotate_head, store_key_value
from shadowlane.ops.compiled import njit
from shadowlane.ops.kernels import (
    EXPAND_AT,
    LAYOUT_F32,
    ONE,
    element_nbytes,
    rms_norm,
    weighted_sum,
)
from shadowlane.ops.rows import convert_row, finish_row
from shadowlane.ops.walker import embed_row


@njit
def embed_rows(
    base: int, geometry: Any, row: Any, blocks: Any, record: int, first: int, last: int
) -> None:
    for index in range(first, last):
        embed_row(base, geometry, row, blocks, record, index)


@njit
def normalise_rows(
    base: int, geometry: Any, row: Any, first: int, count: int, layout: int, out: int, scratch: int
) -> None:
    """RMS norm of `count` rows of the residual stream from `first`, into a direct layout."""
    cols = row[t.COLS]
    eps = read_f32(base + geometry[t.NORM_EPS])
    nbytes = element_nbytes(layout) * cols
    for index in range(count):
        source = base + row[t.INPUT] + (first + index) * cols * 4
        rms_norm(
            source, base + row[t.NORM_WEIGHT], layout, out + index * nbytes, cols, eps, scratch
        )


@njit
def expand_tile(
    block: Any, source: int, num_rows: int, cols: int, layout: int, out: int, scratch: int
) -> None:
    """Rows of a block from address `source` in a direct layout, one behind the other."""
    nbytes = element_nbytes(layout) * cols
    for index in range(num_rows):
        address = source + index * block[t.ROW_NBYTES]
        if layout == LAYOUT_F32:
            call_address(block[t.EXPAND], (address, out + index * nbytes, cols))
        else:
            call_address(block[t.EXPAND], (address, scratch + EXPAND_AT, cols))
            convert_row(layout, scratch + EXPAND_AT, out + index * nbytes, cols)


@njit
def decode_attention(
    base: int,
    geometry: Any,
    row: Any,
    record: int,
    head: int,
    num_rows: int,
    scratch: int,
) -> None:
    """The decode rows of a step that also has a chunk, one by one."""
    for index in range(num_rows):
        store_key_value(base, geometry, row, record, index, head, scratch)
        attend(base, geometry, row, record, index, head, 0, 1, scratch)


@njit
def store_chunk(
    base: int,
    geometry: Any,
    row: Any,
    record: int,
    num_decode: int,
    stored: int,
    first: int,
    last: int,
    head: int,
    layout: int,
    queries: int,
    scratch: int,
) -> None:
    """Cache keys and values of one KV head for rows stored..last of a chunk.

    queries: of the rows from `first`, rotated; [grouped heads, last - first, head_dim] of the
    direct `layout`.
    """
    dim, heads, kv_heads = geometry[t.HEAD_DIM], geometry[t.NUM_HEADS], geometry[t.NUM_KV_HEADS]
    grouped = heads // kv_heads
    nbytes = element_nbytes(layout) * dim
    for index in range(stored, last):
        at = num_decode + index
        store_key_value(base, geometry, row, record, at, head, scratch)
        if index < first:
            continue
        qkv = base + geometry[t.QKV] + at * (heads + 2 * kv_heads) * dim * 4
        for g in range(grouped):
            rotate_head(
                base,
                geometry,
                at,
                qkv,
                head * grouped + g,
                heads,
                row[t.Q_NORM],
                ONE,
                layout,
                queries + (g * (last - first) + index - first) * nbytes,
                scratch,
            )


@njit
def gather_cache(
    base: int,
    geometry: Any,
    layer: int,
    record: int,
    sequence: int,
    start: int,
    count: int,
    head: int,
    value: int,
    out: int,
    scratch: int,
) -> None:
    """Cached tokens [start, start + count) of one head to `out`, [count, head_dim].

    In the compute type, whatever the cache holds.
    """
    page_tokens, dim = geometry[t.PAGE_TOKENS], geometry[t.HEAD_DIM]
    layout, nbytes = geometry[t.COMPUTE_LAYOUT], geometry[t.KV_ROW_NBYTES]
    out_nbytes = element_nbytes(layout) * dim
    is_packed = geometry[t.KV_LAYOUT] != layout
    done = 0
    while done < count:
        inside = (start + done) % page_tokens
        span = min(page_tokens - inside, count - done)
        page = page_of(geometry, record, sequence, start + done)
        source = cache_page(base, geometry, layer, page, value, head) + inside * nbytes
        if is_packed:
            for token in range(span):
                place = source + token * nbytes
                call_address(geometry[t.KV_EXPAND], (place, scratch + EXPAND_AT, dim))
                convert_row(layout, scratch + EXPAND_AT, out + (done + token) * out_nbytes, dim)
        else:
            copy_bytes(source, out + done * nbytes, span * nbytes)
        done += span


@njit
def finish_tile(
    product: int, layout: int, count: int, rows: int, bias: int, adds: int, out: int, stride: int
) -> None:
    """A product [count, rows] of a direct layout into columns of a float32 output.

    bias: address of float32 [rows], or 0; adds: whether the output keeps what it has; stride: bytes
    between the output's rows.
    """
    nbytes = element_nbytes(layout) * rows
    for index in range(count):
        finish_row(layout, product + index * nbytes, bias, adds, out + index * stride, rows)


@njit
def activate_tile(
    base: int,
    geometry: Any,
    gate: int,
    up: int,
    layout: int,
    count: int,
    rows: int,
    gate_bias: int,
    up_bias: int,
    out: int,
    stride: int,
) -> None:
    """silu(gate) * up of two products [count, rows], into columns of an output of their layout."""
    nbytes = element_nbytes(layout) * rows
    for index in range(count):
        activate_row(
            base,
            geometry,
            layout,
            gate + index * nbytes,
            up + index * nbytes,
            gate_bias,
            up_bias,
            out + index * stride,
            rows,
        )


@njit
def add_scaled(
    product: int,
    layout: int,
    count: int,
    rows: int,
    factors: int,
    factor_stride: int,
    out: int,
    stride: int,
) -> None:
    """A product [count, rows] of a direct layout, row by row times a factor, added to an output.

    factors: address of the first float32, `factor_stride` bytes apart; otherwise as `finish_tile`.
    """
    nbytes = element_nbytes(layout) * rows
    for index in range(count):
        weighted_sum(
            layout,
            product + index * nbytes,
            0,
            1,
            rows,
            factors + index * factor_stride,
            0,
            1,
            out + index * stride,
        )
