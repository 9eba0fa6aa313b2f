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
from shadowlane.ops.formats import BYTES16, I8, load
from shadowlane.ops.layouts import LAYOUTS
from shadowlane.ops.scattered_experts import PACKED, ScatteredTensor

_ELEMENT = {"f32": np.uint32, "f16": np.uint16, "bf16": np.uint16}
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
    if not tensor.is_transposed:
        base = int(memory.ctypes.data)
        groups = tensor.scales_row_nbytes
        join_blocks(
            base + values, base + scales, first, count, groups, tensor.num_matrices, tensor.rows,
            base + out,
        )  # fmt: skip
        return
    element = _ELEMENT[tensor.layout]
    source = memory[values : values + count * tensor.file_row_nbytes].view(element)
    target = memory[out : out + tensor.nbytes].view(element)
    # [file rows, matrix rows, matrices] -> [matrices, matrix rows, cols]
    source = source.reshape(count, tensor.rows, tensor.num_matrices)
    target = target.reshape(tensor.num_matrices, tensor.rows, tensor.cols)
    target[:, :, first : first + count] = source.transpose(2, 1, 0)


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
        mixed = builder.shuffle_vector(
            even, odd, ir.Constant(ir.VectorType(ir.IntType(32), 16), order)
        )
        builder.store(mixed, builder.inttoptr(target, BYTES16.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen
