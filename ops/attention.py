"""Attention of decode rows: keys and values into the cache, and a look at all that is there."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shadowlane.ops import table as t
from shadowlane.ops.atomics import call_address, copy_bytes, read_f32, read_i32, write_f32
from shadowlane.ops.blocks import record_i64
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
    rms_scale,
    rotate,
    weighted_sum,
)
from shadowlane.ops.packed import quantise_row
from shadowlane.ops.rows import convert_row, divide_row, scale_row, soften

_matvec = njit(_matvec_direct)


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
    heads_at: int,
    head: int,
    num_heads: int,
    norm: int,
    factor: float,
    layout: int,
    out: int,
    scratch: int,
) -> None:
    """One head of a row: normalised where the family does so, rotated, scaled, stored.

    heads_at: address of this row's `num_heads` heads of q, or of k.
    """
    dim = geometry[t.HEAD_DIM]
    source = heads_at + head * dim * 4
    if norm >= 0:
        normalised = scratch + EXPAND_AT
        eps = read_f32(base + geometry[t.NORM_EPS])
        weight, whole, width = base + norm, source, dim
        if geometry[t.WHOLE_HEAD_NORM] != 0:
            weight, whole, width = weight + head * dim * 4, heads_at, num_heads * dim
        scale = rms_scale(whole, width, eps, scratch)
        scale_row(LAYOUT_F32, source, scale, weight, normalised, dim)
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
    keys, value = qkv + heads * dim * 4, qkv + (heads + kv_heads + head) * dim * 4
    norm = row[t.K_NORM]
    if layout == LAYOUT_Q8_0:
        rotated = scratch + EXPAND_AT + dim * 4  # rotate_head uses the first row there
        rotate_head(
            base, geometry, index, keys, head, kv_heads, norm, ONE, LAYOUT_F32, rotated, scratch
        )
        pack_q8_0(rotated, dim, key_at, rotated + dim * 4)
        pack_q8_0(value, dim, value_at, rotated + dim * 4)
    else:
        rotate_head(base, geometry, index, keys, head, kv_heads, norm, ONE, layout, key_at, scratch)
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
    stride = (geometry[t.CONTEXT] + 1) * 4
    qkv = base + geometry[t.QKV] + index * (heads + 2 * kv_heads) * dim * 4
    factor = ONE / np.float32(math.sqrt(np.float32(dim)))
    queries_here = grouped // parts
    first = part * queries_here
    for g in range(queries_here):
        rotate_head(
            base,
            geometry,
            index,
            qkv,
            head * grouped + first + g,
            heads,
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
        weighed = count
        if row[t.SINKS] >= 0:  # one more score, for which there is no value
            sink = read_f32(base + row[t.SINKS] + 4 * (head * grouped + first + g))
            write_f32(scores + g * stride + 4 * count, sink)
            weighed += 1
        write_f32(totals + 4 * g, soften(scores + g * stride, weighed))
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
