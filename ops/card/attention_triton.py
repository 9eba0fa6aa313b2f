"""Attention of decode rows over cached pages, in Triton: as much as there is, read from the device.

The tokens of a row are shared out over `splits` programs (split-KV, Dao et al. 2023, "Flash-
Decoding"), each with a running softmax over its tokens; a second kernel puts the parts together.
Lengths, pages and positions are read from device memory, so a captured graph follows a text that
grows, and costs what the text has, not what it may have.

NOTE: tile sizes and splits are a first guess; they have not been tuned on a card.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS = 256  # about as many as keep a card busy
MAX_SPLITS = 16
TOKENS = 32  # that one program looks at together, of a cache in 16 bits


def tokens_together(pages: torch.dtype) -> int:
    """Tokens of a tile: half as many of float32, or registers run out at 128 dimensions."""
    return TOKENS if pages.itemsize == 2 else TOKENS // 2


@triton.jit
def _attend_kernel(
    queries, pages, table, sequences, positions, sums, tops, totals, window, scale,
    table_stride, page_stride, value_stride, head_stride,
    PAGE_TOKENS: tl.constexpr, GROUPED: tl.constexpr, DIM: tl.constexpr, GROUPED_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row)
    sequence = tl.load(sequences + row)
    start = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    share = tl.cdiv(tl.cdiv(position + 1 - start, SPLITS), TOKENS) * TOKENS
    begin = start + split * share
    end = tl.minimum(begin + share, position + 1)

    query = tl.arange(0, GROUPED_PAD)
    dim = tl.arange(0, DIM_PAD)
    heads = tl.num_programs(1)
    at = ((row * heads + head) * GROUPED + query[:, None]) * DIM + dim[None, :]
    is_query = (query[:, None] < GROUPED) & (dim[None, :] < DIM)
    q = tl.load(queries + at, mask=is_query, other=0.0) * scale
    q = q.to(pages.dtype.element_ty)

    top = tl.full((GROUPED_PAD,), -float("inf"), tl.float32)
    total = tl.zeros((GROUPED_PAD,), tl.float32)
    sum_ = tl.zeros((GROUPED_PAD, DIM_PAD), tl.float32)
    for first in range(begin, end, TOKENS):
        token = first + tl.arange(0, TOKENS)
        is_token = token < end
        page = tl.load(
            table + sequence * table_stride + token // PAGE_TOKENS, mask=is_token, other=0
        )
        place = page * page_stride + head * head_stride + (token % PAGE_TOKENS) * DIM
        mask = is_token[:, None] & (dim[None, :] < DIM)
        key = tl.load(pages + place[:, None] + dim[None, :], mask=mask, other=0.0)
        value = tl.load(pages + value_stride + place[:, None] + dim[None, :], mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee")
        scores = tl.where(is_token[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        shares = tl.exp(scores - higher[:, None])
        kept = tl.exp(top - higher)
        total = total * kept + tl.sum(shares, axis=1)
        added = tl.dot(shares.to(value.dtype), value, input_precision="ieee")
        sum_ = sum_ * kept[:, None] + added
        top = higher
    part = ((row * heads + head) * SPLITS + split) * GROUPED + query
    tl.store(tops + part, top, mask=query < GROUPED)
    tl.store(totals + part, total, mask=query < GROUPED)
    tl.store(sums + part[:, None] * DIM + dim[None, :], sum_, mask=is_query)


@triton.jit
def _join_kernel(
    sums, tops, totals, sinks, out,
    HAS_SINKS: tl.constexpr, GROUPED: tl.constexpr, DIM: tl.constexpr, GROUPED_PAD: tl.constexpr,
    DIM_PAD: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    query = tl.arange(0, GROUPED_PAD)
    dim = tl.arange(0, DIM_PAD)
    first = (row * tl.num_programs(1) + head) * SPLITS * GROUPED + query
    is_query = query < GROUPED
    highest = tl.full((GROUPED_PAD,), -float("inf"), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head * GROUPED + query, mask=is_query, other=0.0)
        highest = sink
    for split in range(SPLITS):
        top = tl.load(tops + first + split * GROUPED, mask=is_query, other=0.0)
        highest = tl.maximum(highest, top)
    total = tl.zeros((GROUPED_PAD,), tl.float32)
    if HAS_SINKS:
        total = tl.exp(sink - highest)
    sum_ = tl.zeros((GROUPED_PAD, DIM_PAD), tl.float32)
    mask = is_query[:, None] & (dim[None, :] < DIM)
    for split in range(SPLITS):
        part = first + split * GROUPED
        top = tl.load(tops + part, mask=is_query, other=0.0)
        weight = tl.exp(top - highest)  # 0 of a split that had no tokens
        total += weight * tl.load(totals + part, mask=is_query, other=1.0)
        values = tl.load(sums + part[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
        sum_ += weight[:, None] * values
    at = (row * tl.num_programs(1) + head) * GROUPED + query
    tl.store(out + at[:, None] * DIM + dim[None, :], sum_ / total[:, None], mask=mask)


def attend_pages(
    queries: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    sequences: torch.Tensor,
    positions: torch.Tensor,
    sinks: torch.Tensor | None,
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """Attention of each row over the tokens up to its position, those included.

    queries: float32 [rows, KV heads, grouped, dim]; pages: [pages, keys or values, KV heads, page
    tokens, dim] of a direct type, heads as they lie in the cache; table: int64 [sequences, pages];
    sequences, positions: int64 [rows]; sinks: float32 [KV heads, grouped]. Returns float32 of the
    queries' shape.
    """
    rows, heads, grouped, dim = queries.shape
    queries = queries.contiguous()
    splits = min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(PROGRAMS, rows * heads)))
    device = queries.device
    sums = torch.empty((rows, heads, splits, grouped, dim), device=device)
    tops, totals = torch.empty((2, rows, heads, splits, grouped), device=device)
    found = torch.empty_like(queries)
    sizes = {
        "GROUPED": grouped,
        "DIM": dim,
        "GROUPED_PAD": max(16, triton.next_power_of_2(grouped)),
        "DIM_PAD": max(16, triton.next_power_of_2(dim)),
        "SPLITS": splits,
    }
    _attend_kernel[(rows, heads, splits)](
        queries, pages, table, sequences, positions, sums, tops, totals, window or 0, scale,
        table.stride(0), pages.stride(0), pages.stride(1), pages.stride(2),
        PAGE_TOKENS=pages.shape[3], TOKENS=tokens_together(pages.dtype), **sizes,
    )  # fmt: skip
    has_sinks = sinks is not None
    sinks = sinks.contiguous() if sinks is not None else totals
    _join_kernel[(rows, heads)](
        sums, tops, totals, sinks, found, HAS_SINKS=has_sinks, **sizes
    )  # fmt: skip
    return found
