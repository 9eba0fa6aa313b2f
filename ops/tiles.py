"""A prefill step on one worker: whole blocks times a chunk of a prompt, by torch on one thread.

Walks the same program as `walker.walk`, in Python, because the matrix product is torch's (oneDNN:
AMX and AVX-512 where they exist). Blocks have one height whatever the plan, a chunk is cut the same
way whatever the budget, and each product runs on one thread, so its bits never depend on either.
Decode rows that share the step go through the compiled kernels exactly as they would alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional

from shadowlane.ops import table as t
from shadowlane.ops.atomics import WAIT_OK, call_address, claim, copy_bytes, now_ns, read_f32
from shadowlane.ops.compiled import njit
from shadowlane.ops.kernels import (
    EXPAND_AT,
    LAYOUT_F32,
    ONE,
    element_nbytes,
    rms_norm,
)
from shadowlane.ops.layouts import LAYOUTS
from shadowlane.ops.rows import convert_row, finish_row, silu_row
from shadowlane.ops.table import LoweredProgram
from shadowlane.ops.walker import (
    attend,
    block_address,
    cache_page,
    embed_row,
    finish_item,
    gate_up_item,
    linear_item,
    note_span,
    page_of,
    prepare_input,
    rotate_head,
    store_key_value,
    ticket_at,
    wait_block,
    wait_inputs,
    worker_at,
)

EMBED_ROWS = 32  # rows of one item of EMBED
TORCH_TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
ABORTED = 1


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
def expand_tile(block: Any, source: int, cols: int, layout: int, out: int, scratch: int) -> None:
    """A whole block in a direct layout, rows packed one behind the other."""
    nbytes = element_nbytes(layout) * cols
    for index in range(block[t.BLOCK_NUM_ROWS]):
        address = source + index * block[t.ROW_NBYTES]
        if layout == LAYOUT_F32:
            call_address(block[t.EXPAND], (address, out + index * nbytes, cols))
        else:
            call_address(block[t.EXPAND], (address, scratch + EXPAND_AT, cols))
            convert_row(layout, scratch + EXPAND_AT, out + index * nbytes, cols)


@njit
def decode_attention(
    base: int, geometry: Any, row: Any, record: int, head: int, num_rows: int, scratch: int
) -> None:
    for index in range(num_rows):
        store_key_value(base, geometry, row, record, index, head, scratch)
        attend(base, geometry, row, record, index, head, 0, 1, scratch)


@njit
def store_chunk(
    base: int,
    geometry: Any,
    row: Any,
    record: int,
    first: int,
    count: int,
    head: int,
    layout: int,
    queries: int,
    scratch: int,
) -> None:
    """Cache a chunk's keys and values of one KV head; rotate its queries.

    queries: [grouped heads, count, head_dim] of the direct `layout`.
    """
    dim, heads, kv_heads = geometry[t.HEAD_DIM], geometry[t.NUM_HEADS], geometry[t.NUM_KV_HEADS]
    grouped = heads // kv_heads
    nbytes = element_nbytes(layout) * dim
    for index in range(count):
        store_key_value(base, geometry, row, record, first + index, head, scratch)
        qkv = base + geometry[t.QKV] + (first + index) * (heads + 2 * kv_heads) * dim * 4
        for g in range(grouped):
            rotate_head(
                base,
                geometry,
                first + index,
                qkv + (head * grouped + g) * dim * 4,
                row[t.Q_NORM],
                ONE,
                layout,
                queries + (g * count + index) * nbytes,
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
) -> None:
    """Copy cached tokens [start, start + count) of one head to `out`, [count, head_dim]."""
    page_tokens = geometry[t.PAGE_TOKENS]
    nbytes = geometry[t.HEAD_DIM] * element_nbytes(geometry[t.KV_LAYOUT])
    done = 0
    while done < count:
        inside = (start + done) % page_tokens
        span = min(page_tokens - inside, count - done)
        page = page_of(geometry, record, sequence, start + done)
        source = cache_page(base, geometry, layer, page, value, head) + inside * nbytes
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
        silu_row(
            layout,
            gate + index * nbytes,
            up + index * nbytes,
            gate_bias,
            up_bias,
            out + index * stride,
            rows,
        )


class PrefillWorker:
    """One worker's view of the arena as tensors, and the loop over its tables.

    memory: the arena, uint8 [arena bytes], mapped in this process; geometry: see `table.py`;
    scratch: offset of this worker's scratch.
    """

    def __init__(self, memory: np.ndarray, geometry: np.ndarray, worker: int, scratch: int) -> None:
        self.base = memory.ctypes.data
        self.geometry = geometry
        self.worker = worker
        self.scratch = self.base + scratch
        self._scratch_offset = scratch
        self._bytes = torch.from_numpy(memory)
        self._layout = int(geometry[t.COMPUTE_LAYOUT])
        name = next(each.name for each in LAYOUTS.values() if each.id == self._layout)
        self._type = TORCH_TYPES[name]
        self._hidden = int(geometry[t.HIDDEN])
        self._head_dim = int(geometry[t.HEAD_DIM])
        self._num_heads = int(geometry[t.NUM_HEADS])
        self._num_kv_heads = int(geometry[t.NUM_KV_HEADS])
        self._memory = memory
        self._products = [torch.empty(0, dtype=self._type), torch.empty(0, dtype=self._type)]

    def _view(self, offset: int, kind: torch.dtype, *shape: int) -> torch.Tensor:
        nbytes = kind.itemsize
        for size in shape:
            nbytes *= size
        return self._bytes[offset : offset + nbytes].view(kind).view(shape)

    @torch.inference_mode()
    def run(self, program: LoweredProgram, record_offset: int, step: int, spin_ns: int) -> int:
        """Do this worker's part of the step; returns 0, or a wait status other than WAIT_OK.

        Like `walker.walk`, it leaves a record alone that is no longer that of `step`.
        """
        base, geometry, blocks = self.base, self.geometry, program.blocks
        record = base + record_offset
        header = self._memory[record_offset : record_offset + 8 * t.RECORD_HEADER_FIELDS]
        fields = header.view(np.int64)
        num_decode, num_prefill = int(fields[t.NUM_DECODE]), int(fields[t.NUM_PREFILL])
        num_logits = int(fields[t.NUM_LOGITS])
        if int(fields[t.STEP]) != step:
            return WAIT_OK
        num_rows = num_decode + num_prefill
        statistics = self._statistics()
        for row in program.instructions:
            kind = row[t.KIND]
            # NOTE: a share may hold no block's first row, and so no tile. Its instruction is
            # retired like the others, by who takes the one item in which there is nothing to do.
            num_tiles = int(row[t.TILE_COUNT])
            num_items = max(1, num_tiles)
            if kind == t.EMBED:
                num_items = -(-num_rows // EMBED_ROWS)
            elif kind == t.ATTENTION:
                num_items = int(row[t.ITEM_COUNT])
            began = now_ns()
            status = wait_inputs(base, geometry, row, record, spin_ns)
            if status != WAIT_OK:
                return int(status)
            start = now_ns()
            statistics[t.WAIT_NS] += start - began
            ticket = ticket_at(base, geometry, row[t.ORDINAL])
            inputs = num_logits if kind == t.LM_HEAD else num_decode
            decode_input, chunk_input = 0, None
            waited, worked = 0, False
            while (taken := claim(ticket, step, num_items)) >= 0:
                worked = True
                if kind == t.EMBED:
                    first = taken * EMBED_ROWS
                    last = min(first + EMBED_ROWS, num_rows)
                    embed_rows(base, geometry, row, blocks, record, first, last)
                elif kind == t.ATTENTION:
                    head = int(row[t.ITEM_START]) + taken
                    self._attention(row, record, head, num_decode, num_prefill, fields)
                elif num_tiles:
                    item = program.items[row[t.TILE_START] + taken]
                    if inputs and not decode_input:
                        decode_input = prepare_input(
                            base, geometry, row, record, inputs, self.scratch
                        )
                    late = wait_block(base, geometry, blocks[item[t.BLOCK]], record)
                    if kind == t.GATE_UP and late >= 0:
                        more = wait_block(base, geometry, blocks[item[t.SECOND_BLOCK]], record)
                        late = more if more < 0 else late + more
                    if late < 0:
                        return ABORTED
                    waited += late
                    if inputs:
                        self._decode_rows(row, item, blocks, record, decode_input, inputs)
                    if kind != t.LM_HEAD:
                        if chunk_input is None:
                            chunk_input = self._chunk_input(row, num_decode, num_prefill)
                        self._chunk(row, item, blocks, record, chunk_input, num_decode)
                finish_item(base, geometry, row, record, num_items)
            if worked:
                note_span(base, geometry, self.worker, step, row[t.GROUP], start, now_ns(), waited)
        return WAIT_OK

    def _statistics(self) -> np.ndarray:
        offset = worker_at(0, self.geometry, self.worker)
        return self._memory[offset : offset + t.WORKER_HEADER_NBYTES].view(np.int64)

    def _decode_rows(
        self, row: Any, item: Any, blocks: Any, record: int, x: int, inputs: int
    ) -> None:
        operator = gate_up_item if row[t.KIND] == t.GATE_UP else linear_item
        operator(self.base, self.geometry, row, item, blocks, record, x, inputs, self.scratch)

    def _chunk_input(self, row: Any, first: int, count: int) -> torch.Tensor:
        """The chunk's inputs in the compute type, [count, cols]; normalised where needed."""
        cols = int(row[t.COLS])
        if row[t.NORM_WEIGHT] < 0:
            return self._view(int(row[t.PREFILL_INPUT]), self._type, count, cols)
        normalised = torch.empty(count, cols, dtype=self._type)
        normalise_rows(
            self.base,
            self.geometry,
            row,
            first,
            count,
            self._layout,
            normalised.data_ptr(),
            self.scratch,
        )
        return normalised

    def _tile(self, block: Any, cols: int, record: int) -> torch.Tensor:
        """A block's weights in the compute type, [rows, cols]: in place, or expanded to scratch."""
        address = block_address(self.base, self.geometry, block, record)
        rows = int(block[t.BLOCK_NUM_ROWS])
        offset = address - self.base
        if block[t.LAYOUT] == self._layout and offset % self._type.itemsize == 0:
            return self._view(offset, self._type, rows, cols)
        tile = self._scratch_offset + int(self.geometry[t.SCRATCH_TILE])
        expand_tile(block, address, cols, self._layout, self.base + tile, self.scratch)
        return self._view(tile, self._type, rows, cols)

    def _product(self, place: int, x: torch.Tensor, block: Any, record: int) -> torch.Tensor:
        """x times the rows of a block, [count, rows] of the compute type, in a buffer of ours."""
        count, cols = x.shape
        tile = self._tile(block, cols, record)
        rows = tile.shape[0]
        if len(self._products[place]) < count * rows:
            self._products[place] = torch.empty(count * rows, dtype=self._type)
        product = self._products[place][: count * rows].view(count, rows)
        return torch.mm(x, tile.T, out=product)

    def _chunk(
        self, row: Any, item: Any, blocks: Any, record: int, x: torch.Tensor, first: int
    ) -> None:
        """A tile times the chunk, into its columns of the output."""
        count = len(x)
        start, rows, total = int(item[t.FIRST_ROW]), int(item[t.NUM_ROWS]), int(row[t.ROWS])
        bias = self.base + int(row[t.BIAS]) + 4 * start if row[t.BIAS] >= 0 else 0
        product = self._product(0, x, blocks[item[t.BLOCK]], record)
        if row[t.KIND] == t.GATE_UP:
            up = self._product(1, x, blocks[item[t.SECOND_BLOCK]], record)
            nbytes = self._type.itemsize
            activate_tile(
                product.data_ptr(),
                up.data_ptr(),
                self._layout,
                count,
                rows,
                bias,
                bias + 4 * total if bias else 0,
                self.base + int(row[t.PREFILL_OUTPUT]) + start * nbytes,
                total * nbytes,
            )
            return
        finish_tile(
            product.data_ptr(),
            self._layout,
            count,
            rows,
            bias,
            int(row[t.EPILOGUE]),
            self.base + int(row[t.OUTPUT]) + (first * total + start) * 4,
            total * 4,
        )

    def _attention(
        self, row: Any, record: int, head: int, num_decode: int, num_prefill: int, fields: Any
    ) -> None:
        base, geometry, dim = self.base, self.geometry, self._head_dim
        decode_attention(base, geometry, row, record, head, num_decode, self.scratch)
        grouped = self._num_heads // self._num_kv_heads
        queries = torch.empty(grouped, num_prefill, dim, dtype=self._type)
        store_chunk(
            base,
            geometry,
            row,
            record,
            num_decode,
            num_prefill,
            head,
            self._layout,
            queries.data_ptr(),
            self.scratch,
        )
        rows = self._record_rows(record, num_decode)
        position, sequence = rows
        window = int(row[t.WINDOW])
        start = max(0, position - window + 1) if window else 0
        count = position + num_prefill - start
        cached = []
        for value in (0, 1):
            tokens = torch.empty(count, dim, dtype=self._type)
            gather_cache(
                base,
                geometry,
                row[t.LAYER],
                record,
                sequence,
                start,
                count,
                head,
                value,
                tokens.data_ptr(),
            )
            cached.append(tokens.expand(1, grouped, count, dim))
        mask = None
        if start > 0 or position > 0 or (window and count > window):
            query_at = torch.arange(position, position + num_prefill)[:, None]
            key_at = torch.arange(start, start + count)[None, :]
            mask = key_at <= query_at
            if window:
                mask &= key_at > query_at - window
        attended = functional.scaled_dot_product_attention(
            queries[None], cached[0], cached[1], attn_mask=mask, is_causal=mask is None
        )
        width = self._num_heads * dim
        out = self._view(int(row[t.PREFILL_OUTPUT]), self._type, num_prefill, width)
        columns = out[:, head * grouped * dim : (head + 1) * grouped * dim]
        columns.view(num_prefill, grouped, dim).copy_(attended[0].transpose(0, 1))

    def _record_rows(self, record: int, index: int) -> tuple[int, int]:
        """Position and sequence of a row of the step."""
        offset = record - self.base
        found = []
        for field in (t.RECORD_POSITIONS, t.RECORD_SEQUENCES):
            at = offset + int(self.geometry[field]) + 4 * index
            found.append(int(self._memory[at : at + 4].view(np.int32)[0]))
        return found[0], found[1]
