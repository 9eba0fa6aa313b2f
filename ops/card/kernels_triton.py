"""The decode kernels in Triton: rows of weights as they lie, times a few float32 inputs.

`multiply` and `gate_up` serve packed blocks. `compute_experts` serves every chosen expert that is
on the card, found through a table in device memory: what is chosen, and what is here, may change
from step to step of a captured graph.

NOTE: tile sizes are a first guess; they have not been tuned on a card.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from shadowlane.ops.card.packed_torch import DIRECT
from shadowlane.ops.card.packed_triton import dot_rows
from shadowlane.ops.layouts import LAYOUTS

MAX_INPUTS = 8  # that one kernel takes together
LEAVE_COLS = 1024  # of a row that one program copies


@dataclass(frozen=True, slots=True)
class Tile:
    """How much of a matrix one program holds at a time."""

    num: int  # blocks of a row; 1 of direct layouts alone
    places: int  # of a block, at once


def _tile(layout: str) -> Tile:
    if layout in DIRECT:
        return Tile(1, 256)
    if LAYOUTS[layout].block_elements == 256:
        return Tile(4, 32)
    return Tile(8, 32) if layout == "q8_0" else Tile(16, 16)


def _rows_together(num_inputs: int) -> int:
    return 4 if num_inputs <= 2 else 2


@triton.jit
def _multiply_kernel(weights, x, y, bias, num_rows, row_nbytes, num_blocks, x_stride, y_stride,
                     num_inputs, LAYOUT: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr,
                     ROWS: tl.constexpr, M: tl.constexpr, NUM: tl.constexpr,
                     PLACES: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = tl.minimum(row, num_rows - 1)
    found = dot_rows(
        weights, inside, row_nbytes, num_blocks, x, x_stride, num_inputs,
        LAYOUT, ROWS, M, NUM, PLACES,
    )  # fmt: skip
    index = tl.arange(0, M)[None, :]
    mask = (row[:, None] < num_rows) & (index < num_inputs)
    at = y + index * y_stride + row[:, None]
    if HAS_BIAS:
        found = found + tl.load(bias + inside)[:, None]
    if ADDS:
        found = found + tl.load(at, mask=mask, other=0.0)
    tl.store(at, found, mask=mask)


def multiply(
    layout: str,
    packed: torch.Tensor,
    inputs: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    adds: bool = False,
) -> None:
    """out = inputs times rows of a layout (+ bias) (+ out, if `adds`).

    packed: uint8 [rows, row bytes], rows close together; inputs: float32 [inputs, cols]; out:
    float32 [inputs, rows], columns of something wider; bias: float32 [rows].
    """
    num_rows, row_nbytes = packed.shape
    num_blocks = row_nbytes // LAYOUTS[layout].block_nbytes
    inputs = inputs.contiguous()
    tile = _tile(layout)
    for first in range(0, len(inputs), MAX_INPUTS):
        part = inputs[first : first + MAX_INPUTS]
        rows = _rows_together(len(part))
        _multiply_kernel[(triton.cdiv(num_rows, rows),)](
            packed, part, out[first:], out if bias is None else bias, num_rows, row_nbytes,
            num_blocks, inputs.stride(0), out.stride(0), len(part),
            LAYOUT=layout, HAS_BIAS=bias is not None, ADDS=adds, ROWS=rows,
            M=triton.next_power_of_2(len(part)), NUM=tile.num, PLACES=tile.places,
        )  # fmt: skip


@triton.jit
def _activate(gate, up, limit, alpha, IS_CLAMPED: tl.constexpr):
    if IS_CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return (up + 1.0) * gate * tl.sigmoid(gate * alpha)
    else:
        return gate * tl.sigmoid(gate) * up


@triton.jit
def _gate_up_kernel(gates, ups, x, out, gate_bias, up_bias, num_rows, gate_nbytes, gate_blocks,
                    up_nbytes, up_blocks, x_stride, out_stride, num_inputs, limit, alpha,
                    GATE: tl.constexpr, UP: tl.constexpr, HAS_BIAS: tl.constexpr,
                    IS_CLAMPED: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr,
                    GATE_NUM: tl.constexpr, GATE_PLACES: tl.constexpr, UP_NUM: tl.constexpr,
                    UP_PLACES: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = tl.minimum(row, num_rows - 1)
    gate = dot_rows(gates, inside, gate_nbytes, gate_blocks, x, x_stride, num_inputs,
                    GATE, ROWS, M, GATE_NUM, GATE_PLACES)  # fmt: skip
    up = dot_rows(ups, inside, up_nbytes, up_blocks, x, x_stride, num_inputs,
                  UP, ROWS, M, UP_NUM, UP_PLACES)  # fmt: skip
    if HAS_BIAS:
        gate = gate + tl.load(gate_bias + inside)[:, None]
        up = up + tl.load(up_bias + inside)[:, None]
    found = _activate(gate, up, limit, alpha, IS_CLAMPED)
    index = tl.arange(0, M)[None, :]
    mask = (row[:, None] < num_rows) & (index < num_inputs)
    tl.store(out + index * out_stride + row[:, None], found, mask=mask)


def gate_up(
    layouts: tuple[str, str],
    packed: tuple[torch.Tensor, torch.Tensor],
    inputs: torch.Tensor,
    out: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None,
    clamp: tuple[float, float] | None,
) -> None:
    """out = the activation of gate, times up, for the same rows of both; see `multiply`.

    layouts, packed, biases: of gate and of up; clamp: limit and alpha of GPT-OSS's activation, None
    for silu.
    """
    num_rows, inputs = len(packed[0]), inputs.contiguous()
    nbytes = [each.shape[1] for each in packed]
    blocks = [
        each // LAYOUTS[name].block_nbytes for each, name in zip(nbytes, layouts, strict=True)
    ]
    tiles = [_tile(name) for name in layouts]
    limit, alpha = clamp or (0.0, 0.0)
    for first in range(0, len(inputs), MAX_INPUTS):
        part = inputs[first : first + MAX_INPUTS]
        rows = _rows_together(len(part))
        _gate_up_kernel[(triton.cdiv(num_rows, rows),)](
            *packed, part, out[first:], *(biases or (out, out)), num_rows, nbytes[0], blocks[0],
            nbytes[1], blocks[1], inputs.stride(0), out.stride(0), len(part), limit, alpha,
            GATE=layouts[0], UP=layouts[1], HAS_BIAS=biases is not None,
            IS_CLAMPED=clamp is not None, ROWS=rows, M=triton.next_power_of_2(len(part)),
            GATE_NUM=tiles[0].num, GATE_PLACES=tiles[0].places, UP_NUM=tiles[1].num,
            UP_PLACES=tiles[1].places,
        )  # fmt: skip


@triton.jit
def _add_bias(values, biases, expert, num_rows, row, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        values = values + tl.load(biases + expert * num_rows + row)
    return values


@triton.jit
def _expert_gate_up_kernel(memory, places, ids, x, out, gate_biases, up_biases, num_rows,
                           gate_nbytes, gate_blocks, up_nbytes, up_blocks, x_stride, limit, alpha,
                           TOP_K: tl.constexpr, GATE: tl.constexpr, UP: tl.constexpr,
                           HAS_BIAS: tl.constexpr, IS_CLAMPED: tl.constexpr, ROWS: tl.constexpr,
                           GATE_NUM: tl.constexpr, GATE_PLACES: tl.constexpr,
                           UP_NUM: tl.constexpr, UP_PLACES: tl.constexpr):  # fmt: skip
    """Some rows of gate and up of one pair's expert, if it is here."""
    pair = tl.program_id(1)
    expert = tl.load(ids + pair)
    gate_at, up_at = tl.load(places + 3 * expert), tl.load(places + 3 * expert + 1)
    if gate_at >= 0:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        inside = tl.minimum(row, num_rows - 1)
        inputs = x + (pair // TOP_K) * x_stride
        gate = dot_rows(memory + gate_at, inside, gate_nbytes, gate_blocks, inputs, 0, 1,
                        GATE, ROWS, 1, GATE_NUM, GATE_PLACES)  # fmt: skip
        up = dot_rows(memory + up_at, inside, up_nbytes, up_blocks, inputs, 0, 1,
                      UP, ROWS, 1, UP_NUM, UP_PLACES)  # fmt: skip
        gate, up = tl.sum(gate, axis=1), tl.sum(up, axis=1)
        gate = _add_bias(gate, gate_biases, expert, num_rows, inside, HAS_BIAS)
        up = _add_bias(up, up_biases, expert, num_rows, inside, HAS_BIAS)
        found = _activate(gate, up, limit, alpha, IS_CLAMPED)
        tl.store(out + pair * num_rows + row, found, mask=row < num_rows)


@triton.jit
def _expert_down_kernel(memory, places, ids, x, out, biases, num_rows, down_nbytes, down_blocks,
                        x_stride, DOWN: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
                        NUM: tl.constexpr, PLACES: tl.constexpr):  # fmt: skip
    """Some rows of down of one pair's expert, if it is here."""
    pair = tl.program_id(1)
    expert = tl.load(ids + pair)
    at = tl.load(places + 3 * expert + 2)
    if at >= 0:
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        inside = tl.minimum(row, num_rows - 1)
        found = dot_rows(memory + at, inside, down_nbytes, down_blocks, x + pair * x_stride, 0, 1,
                         DOWN, ROWS, 1, NUM, PLACES)  # fmt: skip
        found = tl.sum(found, axis=1)
        found = _add_bias(found, biases, expert, num_rows, inside, HAS_BIAS)
        tl.store(out + pair * num_rows + row, found, mask=row < num_rows)


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """Where the experts of one layer are: what the two expert kernels look things up in.

    memory: uint8, all of the device memory that experts may lie in; places: int64 [experts, 3] on
    the device, the offset in it of gate, up and down, or -1 for an expert that is not there.
    layouts: of gate, up and down. Experts of a direct layout must lie at multiples of their
    elements' size.
    """

    memory: torch.Tensor
    places: torch.Tensor
    layouts: tuple[str, str, str]


def compute_experts(
    table: ExpertTable,
    ids: torch.Tensor,
    inputs: torch.Tensor,
    activated: torch.Tensor,
    outputs: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    clamp: tuple[float, float] | None,
) -> None:
    """Every pair whose expert is in the table: its row of `outputs`; the others stay untouched.

    ids: int64 [rows, top_k]; inputs: float32 [rows, hidden]; activated: float32 [pairs, inner];
    outputs: float32 [pairs, hidden]. biases: stacked, of gate, up and down; clamp: limit and alpha
    of GPT-OSS's activation, None for silu.
    """
    gate, up, down = table.layouts
    inner, hidden = activated.shape[1], outputs.shape[1]
    nbytes = [LAYOUTS[name].row_nbytes(hidden) for name in (gate, up)]
    nbytes.append(LAYOUTS[down].row_nbytes(inner))
    blocks = [
        each // LAYOUTS[name].block_nbytes for each, name in zip(nbytes, table.layouts, strict=True)
    ]
    tiles = [_tile(name) for name in table.layouts]
    rows, pairs = _rows_together(1), ids.numel()
    gate_biases, up_biases, down_biases = biases or (inputs, inputs, inputs)
    limit, alpha = clamp or (0.0, 0.0)
    ids, inputs = ids.contiguous(), inputs.contiguous()
    _expert_gate_up_kernel[(triton.cdiv(inner, rows), pairs)](
        table.memory, table.places, ids, inputs, activated, gate_biases, up_biases, inner,
        nbytes[0], blocks[0], nbytes[1], blocks[1], inputs.stride(0), limit, alpha,
        TOP_K=ids.shape[-1], GATE=gate, UP=up, HAS_BIAS=biases is not None,
        IS_CLAMPED=clamp is not None, ROWS=rows, GATE_NUM=tiles[0].num,
        GATE_PLACES=tiles[0].places, UP_NUM=tiles[1].num, UP_PLACES=tiles[1].places,
    )  # fmt: skip
    _expert_down_kernel[(triton.cdiv(hidden, rows), pairs)](
        table.memory, table.places, ids, activated, outputs, down_biases, hidden, nbytes[2],
        blocks[2], activated.stride(0), DOWN=down, HAS_BIAS=biases is not None, ROWS=rows,
        NUM=tiles[2].num, PLACES=tiles[2].places,
    )  # fmt: skip


@triton.jit
def _leave_kernel(places, ids, source, target, width, COLS: tl.constexpr):
    """Some columns of one pair's row, if its expert is here."""
    pair = tl.program_id(1)
    if tl.load(places + 3 * tl.load(ids + pair)) >= 0:
        col = tl.program_id(0) * COLS + tl.arange(0, COLS)
        inside = col < width
        values = tl.load(source + pair * width + col, mask=inside, other=0.0)
        tl.store(target + pair * width + col, values, mask=inside)


def leave_experts(
    table: ExpertTable, ids: torch.Tensor, source: torch.Tensor, target: torch.Tensor
) -> None:
    """Copy the rows of pairs whose expert is in the table; the others stay untouched.

    ids: int64 [rows, top_k]; source, target: float32 [pairs, hidden], the latter perhaps in memory
    of the host, where others write the rows of theirs at the same time.
    """
    width = source.shape[1]
    grid = (triton.cdiv(width, LEAVE_COLS), ids.numel())
    _leave_kernel[grid](
        table.places, ids.contiguous(), source, target, width, COLS=LEAVE_COLS
    )  # fmt: skip
