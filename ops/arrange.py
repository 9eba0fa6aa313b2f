"""Rows of weights out of tensors that have them scattered; see `scattered_experts.py`.

A few rows of the file's tensor are in one buffer, as they were read; what they are part of is
written to where the matrices are to lie. Rows of gate and up, which come in turn, part here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from shadowlane.ops.compiled import njit
from shadowlane.ops.dots import I8, I16, I32, I64
from shadowlane.ops.formats import BYTES16, load
from shadowlane.ops.layouts import LAYOUTS
from shadowlane.ops.scattered_experts import PACKED, ScatteredTensor

_TILE = 8  # rows and columns that are transposed together
_BLOCK_NBYTES = LAYOUTS[PACKED].block_nbytes
_HALF = ir.VectorType(I8, 8)


def arrange(
    tensor: ScatteredTensor,
    first: int,
    count: int,
    memory: np.ndarray,
    values: int,
    scales: int,
    out: int,
) -> None:
    """Write what `count` rows of the file, from `first`, are part of.

    memory: uint8; values, scales: where in it the rows and their scales are; out: where the first
    of the tensor's matrices is to begin.
    """
    values, scales, out = (int(memory.ctypes.data) + each for each in (values, scales, out))
    if tensor.is_transposed:
        nbytes = LAYOUTS[tensor.layout].block_nbytes
        out += first * nbytes
        transpose(values, nbytes, count, tensor.num_matrices, tensor.rows, tensor.cols, out)
        return
    groups = tensor.scales_row_nbytes
    join_blocks(values, scales, first, count, groups, tensor.num_matrices, tensor.rows, out)


@njit
def join_blocks(
    values: int,
    scales: int,
    first: int,
    count: int,
    groups: int,
    num_matrices: int,
    rows: int,
    out: int,
) -> None:
    """Blocks of a scale and 16 bytes, as GGUF has them, from rows of both; all are addresses."""
    for row in range(first, first + count):
        place = row % num_matrices * rows + row // num_matrices
        block = out + place * groups * _BLOCK_NBYTES
        for _ in range(groups):
            copy_byte(scales, block)
            halve_apart(values, block + 1)
            scales += 1
            values += 16
            block += _BLOCK_NBYTES


@njit
def transpose(
    values: int, nbytes: int, count: int, num_matrices: int, rows: int, cols: int, out: int
) -> None:
    """Columns of each matrix out of rows with one element (2 or 4 bytes) for each of its rows.

    values: address of [count, rows, num_matrices]; out: address of the first column to be written,
    of [num_matrices, rows, cols].
    """
    width = rows * num_matrices
    row_nbytes, matrix_nbytes = cols * nbytes, rows * cols * nbytes
    shift = num_matrices - 1
    across, down = width - width % _TILE, count - count % _TILE
    for column in range(0, across, _TILE):
        target = out + (column >> shift) * row_nbytes
        for row in range(0, down, _TILE):
            source = values + (row * width + column) * nbytes
            place = target + row * nbytes
            if nbytes == 2:
                transpose_pairs(source, width * 2, place, row_nbytes, matrix_nbytes, shift)
            else:
                transpose_fours(source, width * 4, place, row_nbytes, matrix_nbytes, shift)
    for column in range(width):
        target = out + column % num_matrices * matrix_nbytes + column // num_matrices * row_nbytes
        for row in range(down if column < across else 0, count):
            source, place = values + (row * width + column) * nbytes, target + row * nbytes
            for byte in range(nbytes):
                copy_byte(source + byte, place + byte)


def _make_transpose(element: ir.IntType) -> Any:
    """An intrinsic for 8 rows, `stride` bytes apart, of 8 elements.

    Column k becomes 8 elements in a row at `out`, k rows on; where `shift` is 1, columns go to two
    matrices in turn.
    """
    kind = ir.VectorType(element, _TILE)

    @intrinsic
    def transpose_tile(
        typingctx: Any, source: Any, stride: Any, out: Any, row: Any, matrix: Any, shift: Any
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, stride, out, row, matrix, shift = args
            lines = [
                load(builder, builder.add(source, builder.mul(stride, I64(k))), kind)
                for k in range(_TILE)
            ]

            def mixed(one: ir.Value, other: ir.Value, start: int) -> ir.Value:
                order = [k + side * _TILE for k in range(start, start + 4) for side in range(2)]
                indices = ir.Constant(ir.VectorType(I32, _TILE), order)
                return builder.shuffle_vector(one, other, indices)

            for _ in range(3):  # line k with line k + 4, element by element: three times transposes
                lines = [mixed(lines[k], lines[k + 4], start) for k in range(4) for start in (0, 4)]
            for k, line in enumerate(lines):
                place = builder.add(out, builder.mul(row, builder.lshr(I64(k), shift)))
                place = builder.add(place, builder.mul(matrix, builder.and_(I64(k), shift)))
                builder.store(line, builder.inttoptr(place, kind.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return transpose_tile


transpose_pairs, transpose_fours = _make_transpose(I16), _make_transpose(I32)


@intrinsic
def copy_byte(typingctx: Any, source: Any, target: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(load(builder, args[0], I8), builder.inttoptr(args[1], I8.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def halve_apart(typingctx: Any, source: Any, target: Any) -> Any:
    """16 bytes with neighbours in their halves -> with elements i and i + 16 in those of byte i.

    Elements 2 k and 2 k + 1 are in byte k, so 2 k + 16 and 2 k + 17 are in byte k + 8.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, target = args

        def each(value: int) -> ir.Constant:
            return ir.Constant(_HALF, [value] * 8)

        front, back = load(builder, source, _HALF), load(builder, source, _HALF, 8)
        even = builder.or_(builder.and_(front, each(15)), builder.shl(back, each(4)))
        odd = builder.or_(builder.lshr(front, each(4)), builder.and_(back, each(0xF0)))
        order = [half * 8 + k for k in range(8) for half in range(2)]
        mixed = builder.shuffle_vector(even, odd, ir.Constant(ir.VectorType(I32, 16), order))
        builder.store(mixed, builder.inttoptr(target, BYTES16.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen
