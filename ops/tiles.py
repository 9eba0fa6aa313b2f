"""A prefill step on one worker: whole blocks times a chunk of a prompt, by torch on one thread.

Walks the same program as `walker.walk`, in Python, because the matrix product is torch's (oneDNN:
AMX and AVX-512 where they exist). Blocks have one height whatever the plan, a chunk is cut the same
way whatever the budget, and each product runs on one thread, so its bits never depend on either.
Decode rows that share the step go through the compiled kernels exactly as they would alone.

The workers of a lane share one interpreter, so what Python does per tile is what they wait for each
other for: tables are turned into plain numbers and tensors once per program, and a tile costs a
handful of calls.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as functional

from shadowlane.ops import table as t
from shadowlane.ops.atomics import WAIT_OK
from shadowlane.ops.chunk_kernels import (
    activate_tile,
    decode_attention,
    embed_rows,
    expand_tile,
    finish_tile,
    finish_tile_item,
    gather_cache,
    normalise_rows,
    store_chunk,
    take_item,
)
from shadowlane.ops.layouts import LAYOUTS
from shadowlane.ops.table import LoweredProgram
from shadowlane.ops.walker import (
    block_address,
    gate_up_item,
    linear_item,
    note_span,
    prepare_input,
    wait_block,
    wait_inputs,
    worker_at,
)

EMBED_ROWS = 32  # rows of one item of EMBED
TORCH_TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
ABORTED = 1
KEPT_PROGRAMS = 2  # the one that runs, and one on its way
MAX_VIEWS = 4096  # of buffers; prompts of many lengths would otherwise pile them up


@dataclass(slots=True)
class Matrix:
    """A block of weights as the right side of a product."""

    block: np.ndarray  # its row of the table
    rows: int
    is_streamed: bool
    transposed: torch.Tensor | None  # [cols, rows] in place; None: made anew for each step


@dataclass(slots=True)
class Tile:
    item: np.ndarray  # its row of the table
    first_row: int  # of the group's output
    matrices: tuple[Matrix, ...]  # one, or gate and up


@dataclass(slots=True)
class Instruction:
    """A row of the table in plain numbers."""

    row: np.ndarray
    kind: int
    group: int
    ordinal: int
    cols: int
    total_rows: int
    bias: int  # address, 0: none
    adds: int
    output: int  # address of float32 [rows, total_rows]
    chunk_output: int  # address of compute type [chunk, total_rows]
    ticket: int  # address
    tiles: tuple[Tile, ...]


@dataclass(slots=True)
class Step:
    """What one prefill step is about."""

    number: int
    record: int  # address
    num_decode: int
    num_prefill: int
    num_logits: int
    lane_base: int
    position: int  # of the chunk's first row
    sequence: int
    masks: dict[tuple[int, int, int], torch.Tensor]


class PrefillWorker:
    """One worker's view of the arena as tensors, and the loop over its tables.

    memory: the arena, uint8 [arena bytes], mapped in this process; geometry: see `table.py`;
    scratch: offset of this worker's scratch.
    """

    def __init__(self, memory: np.ndarray, geometry: np.ndarray, worker: int, scratch: int) -> None:
        self.base = int(memory.ctypes.data)
        self.geometry = geometry
        self.worker = worker
        self.scratch = self.base + scratch
        self._memory = memory
        self._layout = int(geometry[t.COMPUTE_LAYOUT])
        name = next(each.name for each in LAYOUTS.values() if each.id == self._layout)
        self._type = TORCH_TYPES[name]
        self._item_nbytes = self._type.itemsize
        whole = len(memory) // self._item_nbytes * self._item_nbytes
        self._elements = torch.from_numpy(memory[:whole]).view(self._type)
        self._tile_offset = scratch + int(geometry[t.SCRATCH_TILE])
        self._head_dim = int(geometry[t.HEAD_DIM])
        self._grouped = int(geometry[t.NUM_HEADS]) // int(geometry[t.NUM_KV_HEADS])
        self._width = int(geometry[t.NUM_HEADS]) * self._head_dim
        self._counter = self.base + int(geometry[t.COUNTERS] + geometry[t.LANE] * t.COUNTER_NBYTES)
        self._buffers: dict[str, torch.Tensor] = {}
        self._views: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._outputs: dict[tuple[int, int, int], torch.Tensor] = {}
        self._prepared: dict[int, tuple[LoweredProgram, list[Instruction]]] = {}

    def _view(self, offset: int, *shape: int) -> torch.Tensor:
        """The arena at `offset` as the compute type; rows behind each other."""
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        return self._elements.as_strided(shape, strides, offset // self._item_nbytes)

    def _buffer(self, name: str, *shape: int) -> torch.Tensor:
        """Memory of our own that is kept from tile to tile, as the compute type.

        NOTE: views are kept too. Each call into torch gives back the GIL, and where the other
        workers want it, getting it again takes longer than the call.
        """
        key = (name, shape)
        view = self._views.get(key)
        if view is None:
            if len(self._views) > MAX_VIEWS:
                self._views.clear()
            size = 1
            for extent in shape:
                size *= extent
            held = self._buffers.get(name)
            if held is None or len(held) < size:
                held = self._buffers[name] = torch.empty(size, dtype=self._type)
                self._views = {each: kept for each, kept in self._views.items() if each[0] != name}
            view = self._views[key] = held[:size].view(shape)
        return view

    # -- programs

    def _prepare(self, program: LoweredProgram) -> list[Instruction]:
        kept = self._prepared.get(program.placement_id)
        if kept is None or kept[0] is not program:
            while len(self._prepared) >= KEPT_PROGRAMS:
                del self._prepared[next(iter(self._prepared))]
            kept = (program, [self._instruction(program, row) for row in program.instructions])
            self._prepared[program.placement_id] = kept
        return kept[1]

    def _instruction(self, program: LoweredProgram, row: np.ndarray) -> Instruction:
        values = [int(value) for value in row]
        kind, cols = values[t.KIND], values[t.COLS]
        tiles = []
        if kind in (t.LINEAR, t.GATE_UP, t.LM_HEAD):
            first = values[t.TILE_START]
            for item in program.items[first : first + values[t.TILE_COUNT]]:
                blocks = [item[t.BLOCK]]
                if kind == t.GATE_UP:
                    blocks.append(item[t.SECOND_BLOCK])
                matrices = tuple(self._matrix(program.blocks[each], cols) for each in blocks)
                tiles.append(Tile(item, int(item[t.FIRST_ROW]), matrices))
        return Instruction(
            row=row,
            kind=kind,
            group=values[t.GROUP],
            ordinal=values[t.ORDINAL],
            cols=cols,
            total_rows=values[t.ROWS],
            bias=self.base + values[t.BIAS] if values[t.BIAS] >= 0 else 0,
            adds=values[t.EPILOGUE],
            output=self.base + values[t.OUTPUT],
            chunk_output=self.base + values[t.PREFILL_OUTPUT],
            ticket=self.base + int(self.geometry[t.TICKETS]) + values[t.ORDINAL] * t.TICKET_NBYTES,
            tiles=tuple(tiles),
        )

    def _matrix(self, block: np.ndarray, cols: int) -> Matrix:
        rows = int(block[t.BLOCK_NUM_ROWS])
        offset = int(block[t.OFFSET])
        transposed = None
        if offset >= 0 and self._is_in_place(block, offset):
            transposed = self._view(offset, rows, cols).T
        return Matrix(block, rows, int(block[t.SWEEP_ORDINAL]) >= 0, transposed)

    def _is_in_place(self, block: np.ndarray, offset: int) -> bool:
        return int(block[t.LAYOUT]) == self._layout and offset % self._item_nbytes == 0

    # -- the loop

    @torch.inference_mode()
    def run(self, program: LoweredProgram, record_offset: int, step: int, spin_ns: int) -> int:
        """Do this worker's part of the step; returns 0, or a wait status other than WAIT_OK.

        Like `walker.walk`, it leaves a record alone that is no longer that of `step`.
        """
        instructions = self._prepare(program)
        now = self._read_step(record_offset)
        if now.number != step:
            return WAIT_OK
        base, geometry = self.base, self.geometry
        offset = int(worker_at(0, geometry, self.worker))
        statistics = self._memory[offset : offset + t.WORKER_HEADER_NBYTES].view(np.int64)
        num_rows = now.num_decode + now.num_prefill
        for instruction in instructions:
            kind = instruction.kind
            # NOTE: a share may hold no block's first row, and so no tile. Its instruction is
            # retired like the others, by who takes the one item in which there is nothing to do.
            num_items = max(1, len(instruction.tiles))
            if kind == t.EMBED:
                num_items = -(-num_rows // EMBED_ROWS)
            elif kind == t.ATTENTION:
                num_items = int(instruction.row[t.ITEM_COUNT])
            began = time.monotonic_ns()
            status = wait_inputs(base, geometry, instruction.row, now.record, spin_ns)
            if status != WAIT_OK:
                return int(status)
            start = time.monotonic_ns()
            statistics[t.WAIT_NS] += start - began
            retired = now.lane_base + instruction.ordinal + 1
            inputs: _Inputs | None = None
            waited, worked = 0, False
            while (taken := take_item(instruction.ticket, step, num_items)) >= 0:
                worked = True
                if kind == t.EMBED:
                    first = taken * EMBED_ROWS
                    last = min(first + EMBED_ROWS, num_rows)
                    embed_rows(
                        base, geometry, instruction.row, program.blocks, now.record, first, last
                    )
                elif kind == t.ATTENTION:
                    self._attention(instruction, now, taken)
                elif instruction.tiles:
                    if inputs is None:
                        inputs = self._inputs(instruction, now)
                    late = self._tile(instruction, instruction.tiles[taken], now, inputs, program)
                    if late < 0:
                        return ABORTED
                    waited += late
                finish_tile_item(instruction.ticket + 64, step, num_items, self._counter, retired)
            if worked:
                end = time.monotonic_ns()
                note_span(base, geometry, self.worker, step, instruction.group, start, end, waited)
        return WAIT_OK

    def _read_step(self, offset: int) -> Step:
        geometry = self.geometry
        header = self._memory[offset : offset + 8 * t.RECORD_HEADER_FIELDS].view(np.int64)
        values = [int(value) for value in header]
        first = offset + 4 * values[t.NUM_DECODE]
        position, sequence = (
            int(self._memory[at : at + 4].view(np.int32)[0])
            for at in (
                first + int(geometry[t.RECORD_POSITIONS]),
                first + int(geometry[t.RECORD_SEQUENCES]),
            )
        )
        return Step(
            number=values[t.STEP],
            record=self.base + offset,
            num_decode=values[t.NUM_DECODE],
            num_prefill=values[t.NUM_PREFILL],
            num_logits=values[t.NUM_LOGITS],
            lane_base=values[t.LANE_BASE + int(geometry[t.LANE])],
            position=position,
            sequence=sequence,
            masks={},
        )

    # -- products

    def _inputs(self, instruction: Instruction, now: Step) -> _Inputs:
        """What the tiles of an instruction are multiplied with, normalised where needed."""
        row = instruction.row
        count = now.num_logits if instruction.kind == t.LM_HEAD else now.num_decode
        decode = 0
        if count:
            decode = prepare_input(self.base, self.geometry, row, now.record, count, self.scratch)
        if instruction.kind == t.LM_HEAD:
            return _Inputs(count, decode, None)
        shape = (now.num_prefill, instruction.cols)
        if row[t.NORM_WEIGHT] < 0:
            return _Inputs(count, decode, self._view(int(row[t.PREFILL_INPUT]), *shape))
        chunk = self._buffer("normalised", *shape)
        normalise_rows(
            self.base,
            self.geometry,
            row,
            now.num_decode,
            now.num_prefill,
            self._layout,
            chunk.data_ptr(),
            self.scratch,
        )
        return _Inputs(count, decode, chunk)

    def _tile(
        self,
        instruction: Instruction,
        tile: Tile,
        now: Step,
        inputs: _Inputs,
        program: LoweredProgram,
    ) -> int:
        """One tile for all rows of the step. Returns the ns waited for the disk, -1 if aborted."""
        waited = 0
        for matrix in tile.matrices:
            if matrix.is_streamed:
                late = wait_block(self.base, self.geometry, matrix.block, now.record)
                if late < 0:
                    return -1
                waited += late
        if inputs.count:
            operator = gate_up_item if instruction.kind == t.GATE_UP else linear_item
            operator(
                self.base,
                self.geometry,
                instruction.row,
                tile.item,
                program.blocks,
                now.record,
                inputs.decode,
                inputs.count,
                self.scratch,
            )
        if inputs.chunk is not None:
            self._chunk(instruction, tile, now, inputs.chunk)
        return waited

    def _product(self, name: str, x: torch.Tensor, matrix: Matrix, now: Step) -> torch.Tensor:
        """x times the rows of a block, [count, rows] of the compute type, in a buffer of ours."""
        transposed = matrix.transposed
        if transposed is None:
            transposed = self._fetch(matrix, x.shape[1], now)
        out = self._buffer(name, x.shape[0], matrix.rows)
        return torch.mm(x, transposed, out=out)

    def _fetch(self, matrix: Matrix, cols: int, now: Step) -> torch.Tensor:
        """A block where it is in this step: in its ring slot, or expanded to scratch."""
        address = block_address(self.base, self.geometry, matrix.block, now.record)
        offset = int(address) - self.base
        if not self._is_in_place(matrix.block, offset):
            offset = self._tile_offset
            expand_tile(matrix.block, address, cols, self._layout, self.base + offset, self.scratch)
        return self._view(offset, matrix.rows, cols).T

    def _chunk(self, instruction: Instruction, tile: Tile, now: Step, x: torch.Tensor) -> None:
        """A tile times the chunk, into its columns of the output."""
        count, start, total = now.num_prefill, tile.first_row, instruction.total_rows
        rows = tile.matrices[0].rows
        bias = instruction.bias + 4 * start if instruction.bias else 0
        product = self._product("product", x, tile.matrices[0], now)
        if instruction.kind == t.GATE_UP:
            up = self._product("up", x, tile.matrices[1], now)
            activate_tile(
                product.data_ptr(),
                up.data_ptr(),
                self._layout,
                count,
                rows,
                bias,
                bias + 4 * total if bias else 0,
                instruction.chunk_output + start * self._item_nbytes,
                total * self._item_nbytes,
            )
            return
        finish_tile(
            product.data_ptr(),
            self._layout,
            count,
            rows,
            bias,
            instruction.adds,
            instruction.output + (now.num_decode * total + start) * 4,
            total * 4,
        )

    # -- attention

    def _attention(self, instruction: Instruction, now: Step, item: int) -> None:
        """One KV head: its decode rows one by one, then the chunk."""
        base, geometry, row = self.base, self.geometry, instruction.row
        head = int(row[t.ITEM_START]) + item
        if now.num_decode:
            decode_attention(base, geometry, row, now.record, head, now.num_decode, self.scratch)
        count, dim, grouped = now.num_prefill, self._head_dim, self._grouped
        queries = self._buffer("queries", 1, grouped, count, dim)
        store_chunk(
            base,
            geometry,
            row,
            now.record,
            now.num_decode,
            count,
            head,
            self._layout,
            queries.data_ptr(),
            self.scratch,
        )
        window = int(row[t.WINDOW])
        start = max(0, now.position - window + 1) if window else 0
        num_keys = now.position + count - start
        cached = []
        for value, name in enumerate(("keys", "values")):
            tokens = self._buffer(name, num_keys, dim)
            gather_cache(
                base,
                geometry,
                row[t.LAYER],
                now.record,
                now.sequence,
                start,
                num_keys,
                head,
                value,
                tokens.data_ptr(),
            )
            cached.append(tokens.expand(1, grouped, num_keys, dim))
        mask = None
        if start > 0 or now.position > 0 or (window and num_keys > window):
            mask = self._mask(now, start, num_keys, window)
        attended = functional.scaled_dot_product_attention(
            queries, cached[0], cached[1], attn_mask=mask, is_causal=mask is None
        )
        self._columns(instruction.chunk_output - base, count, head).copy_(attended[0])

    def _columns(self, offset: int, count: int, head: int) -> torch.Tensor:
        """Where a chunk's attention for one KV head goes: [grouped heads, count, head_dim]."""
        key = (offset, count, head)
        columns = self._outputs.get(key)
        if columns is None:
            if len(self._outputs) > MAX_VIEWS:
                self._outputs.clear()
            width = self._grouped * self._head_dim
            out = self._view(offset, count, self._width)[:, head * width : (head + 1) * width]
            columns = out.view(count, self._grouped, self._head_dim).transpose(0, 1)
            self._outputs[key] = columns
        return columns

    def _mask(self, now: Step, start: int, num_keys: int, window: int) -> torch.Tensor:
        """Added to the scores, [count, keys]: 0 where a row may look, -inf elsewhere."""
        key = (start, num_keys, window)
        if key not in now.masks:
            query_at = torch.arange(now.position, now.position + now.num_prefill)[:, None]
            key_at = torch.arange(start, start + num_keys)[None, :]
            is_hidden = key_at > query_at
            if window:
                is_hidden |= key_at <= query_at - window
            mask = torch.zeros(now.num_prefill, num_keys, dtype=self._type)
            now.masks[key] = mask.masked_fill_(is_hidden, float("-inf"))
        return now.masks[key]


@dataclass(slots=True)
class _Inputs:
    """Decode rows: how many, and their address in float32. Chunk: [rows, cols] or None."""

    count: int
    decode: int
    chunk: torch.Tensor | None
