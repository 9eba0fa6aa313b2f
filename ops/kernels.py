"""Compiled kernels on float32 activations: everything a decode row passes through.

Each takes addresses, so that the same machine code serves every process that maps the arena, and
none changes its order of additions with the batch, the thread or the cut of the rows.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from shadowlane.ops.atomics import call_address, read_f32, write_f32
from shadowlane.ops.compiled import cfunc, njit
from shadowlane.ops.dots import DIRECT_LAYOUTS, make_dot
from shadowlane.ops.layouts import LAYOUTS

_dot_1x1 = make_dot(1, 1)
_dot_4x1 = make_dot(4, 1)
_dot_4x2 = make_dot(4, 2)
_dot_4x4 = make_dot(4, 4)

LAYOUT_F32 = LAYOUTS["f32"].id
LAYOUT_F16 = LAYOUTS["f16"].id
LAYOUT_BF16 = LAYOUTS["bf16"].id
EXPAND_AT = 256  # bytes of scratch before the expanded rows
MATVEC_SIGNATURE = types.void(*[types.int64] * 12)

ZERO, ONE, HALF = np.float32(0), np.float32(1), np.float32(0.5)
LOG2_E = np.float32(1.44269504088896341)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
EXP_LOWEST = np.float32(-87.3)
EXP_TERMS = tuple(np.float32(1 / math.factorial(n)) for n in range(2, 8))
E2, E3, E4, E5, E6, E7 = EXP_TERMS


@intrinsic
def _float_of_bits(typingctx: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def write_element(typingctx: Any, layout: Any, address: Any, value: Any) -> Any:
    """Store a float32 as one element of a direct layout, rounded to nearest even."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        layout, address, value = args
        i16, i32 = ir.IntType(16), ir.IntType(32)

        def when(name: str) -> Any:
            return builder.if_then(
                builder.icmp_signed("==", layout, ir.IntType(64)(LAYOUTS[name].id))
            )

        with when("f32"):
            builder.store(value, builder.inttoptr(address, ir.FloatType().as_pointer()), align=1)
        with when("f16"):
            half = builder.fptrunc(value, ir.HalfType())
            builder.store(half, builder.inttoptr(address, ir.HalfType().as_pointer()), align=1)
        with when("bf16"):
            bits = builder.bitcast(value, i32)
            odd = builder.and_(builder.lshr(bits, i32(16)), i32(1))
            rounded = builder.add(bits, builder.add(odd, i32(0x7FFF)))
            quiet = builder.or_(bits, i32(0x400000))
            is_nan = builder.fcmp_unordered("uno", value, value)
            bits = builder.lshr(builder.select(is_nan, quiet, rounded), i32(16))
            place = builder.inttoptr(address, i16.as_pointer())
            builder.store(builder.trunc(bits, i16), place, align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32), codegen


@njit
def element_nbytes(layout: int) -> int:
    return 4 if layout == LAYOUT_F32 else 2


@njit
def exp_f32(x: float) -> float:
    """e**x for x <= 88, within 2 units in the last place; plain operations that vectorise."""
    x = max(x, EXP_LOWEST)
    power = np.float32(math.floor(x * LOG2_E + HALF))
    rest = x - power * LN2_HIGH - power * LN2_LOW
    tail = E2 + rest * (E3 + rest * (E4 + rest * (E5 + rest * (E6 + rest * E7))))
    result = ONE + rest + rest * rest * tail
    return result * _float_of_bits(np.int32((np.int32(power) + np.int32(127)) << np.int32(23)))


@njit
def silu(x: float) -> float:
    """x * sigmoid(x)."""
    if x >= ZERO:
        return x / (ONE + exp_f32(-x))
    grown = exp_f32(x)
    return x * (grown / (ONE + grown))


@njit
def _multiply_rows(
    layout: int,
    weights: int,
    row_nbytes: int,
    num_rows: int,
    cols: int,
    x: int,
    x_stride: int,
    num_inputs: int,
    y: int,
    y_stride: int,
    scratch: int,
) -> None:
    """`num_rows` is 4 or 1; see `matvec_direct`."""
    first = 0
    while first < num_inputs:
        left = num_inputs - first
        start = x + first * x_stride
        if num_rows == 1:
            together = 1
            _dot_1x1(layout, weights, row_nbytes, start, x_stride, cols, scratch)
        elif left >= 4:
            together = 4
            _dot_4x4(layout, weights, row_nbytes, start, x_stride, cols, scratch)
        elif left >= 2:
            together = 2
            _dot_4x2(layout, weights, row_nbytes, start, x_stride, cols, scratch)
        else:
            together = 1
            _dot_4x1(layout, weights, row_nbytes, start, x_stride, cols, scratch)
        for row in range(num_rows):
            for index in range(together):
                write_f32(
                    y + (first + index) * y_stride + 4 * row,
                    read_f32(scratch + 4 * (row * together + index)),
                )
        first += together


def _matvec_direct(
    layout,
    expand,
    weights,
    row_nbytes,
    num_rows,
    cols,
    x,
    x_stride,
    num_inputs,
    y,
    y_stride,
    scratch,
):
    """y[b, r] = weights[r] . x[b] for rows that need no expansion.

    weights [num_rows, cols] of `layout`, `row_nbytes` apart; x float32 [num_inputs, cols] and
    y float32 [num_inputs, num_rows], strides in bytes; scratch: 64 float32 and, for packed layouts,
    four rows of float32 behind EXPAND_AT.
    """
    row = 0
    while row < num_rows:
        together = 4 if num_rows - row >= 4 else 1
        _multiply_rows(
            layout,
            weights + row * row_nbytes,
            row_nbytes,
            together,
            cols,
            x,
            x_stride,
            num_inputs,
            y + 4 * row,
            y_stride,
            scratch,
        )
        row += together


def _matvec_expanded(
    layout,
    expand,
    weights,
    row_nbytes,
    num_rows,
    cols,
    x,
    x_stride,
    num_inputs,
    y,
    y_stride,
    scratch,
):
    """The same for packed rows: up to four at a time are expanded to float32, then multiplied."""
    row = 0
    rows = scratch + EXPAND_AT
    while row < num_rows:
        together = 4 if num_rows - row >= 4 else 1
        for index in range(together):
            call_address(
                expand, (weights + (row + index) * row_nbytes, rows + index * cols * 4, cols)
            )
        _multiply_rows(
            LAYOUT_F32,
            rows,
            cols * 4,
            together,
            cols,
            x,
            x_stride,
            num_inputs,
            y + 4 * row,
            y_stride,
            scratch,
        )
        row += together


@cache
def matvec_address(layout: str) -> int:
    """Code address of the decode operator of a layout (compiled on first use, then cached)."""
    function = _matvec_direct if layout in DIRECT_LAYOUTS else _matvec_expanded
    return int(_compiled_matvec(function).address)


@cache
def _compiled_matvec(function: Any) -> Any:
    return cfunc(MATVEC_SIGNATURE)(function)


@njit
def rms_norm(
    x: int, weight: int, out_layout: int, out: int, cols: int, eps: float, scratch: int
) -> None:
    """out = x / sqrt(mean(x**2) + eps) * weight for one row; out in a direct layout.

    x, weight: float32 [cols]; scratch: one float32.
    """
    _dot_1x1(LAYOUT_F32, x, 0, x, 0, cols, scratch)
    scale = ONE / np.float32(math.sqrt(read_f32(scratch) / np.float32(cols) + eps))
    # NOTE: the layout is looked at outside the loops, so that each of them vectorises.
    if out_layout == LAYOUT_F32:
        for i in range(cols):
            write_f32(out + 4 * i, read_f32(x + 4 * i) * scale * read_f32(weight + 4 * i))
    elif out_layout == LAYOUT_F16:
        for i in range(cols):
            value = read_f32(x + 4 * i) * scale * read_f32(weight + 4 * i)
            write_element(LAYOUT_F16, out + 2 * i, value)
    else:
        for i in range(cols):
            value = read_f32(x + 4 * i) * scale * read_f32(weight + 4 * i)
            write_element(LAYOUT_BF16, out + 2 * i, value)


@njit
def rotate(
    x: int, cos: int, sin: int, dim: int, interleaved: int, factor: float, layout: int, out: int
):
    """Rotary embedding of one head, times `factor`, stored in a direct layout.

    x: float32 [dim]; cos, sin: float32 [dim / 2]. Pairs are (i, i + dim / 2), or neighbours where
    the file holds its rows that way (`interleaved`).
    """
    half = dim // 2
    nbytes = element_nbytes(layout)
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        a, b = read_f32(x + 4 * first), read_f32(x + 4 * second)
        c, s = read_f32(cos + 4 * i), read_f32(sin + 4 * i)
        write_element(layout, out + nbytes * first, (a * c - b * s) * factor)
        write_element(layout, out + nbytes * second, (b * c + a * s) * factor)


@njit
def convert_row(x: int, layout: int, out: int, cols: int) -> None:
    """One row of float32 stored in a direct layout."""
    nbytes = element_nbytes(layout)
    for i in range(cols):
        write_element(layout, out + nbytes * i, read_f32(x + 4 * i))


@njit
def soften(scores: int, count: int) -> float:
    """Replace scores by exp(score - largest); returns their sum. float32 [count]."""
    largest = read_f32(scores)
    for i in range(1, count):
        largest = max(largest, read_f32(scores + 4 * i))
    for i in range(count):
        write_f32(scores + 4 * i, exp_f32(read_f32(scores + 4 * i) - largest))
    total = ZERO
    for i in range(count):
        total += read_f32(scores + 4 * i)
    return total


@njit
def rope_angles(
    position: int, inv_freq: int, scaling: float, cos: int, sin: int, half: int
) -> None:
    """cos and sin of one position, float32 [half], times the attention scaling of the rope type."""
    for i in range(half):
        angle = np.float32(position) * read_f32(inv_freq + 4 * i)
        write_f32(cos + 4 * i, np.float32(math.cos(angle)) * scaling)
        write_f32(sin + 4 * i, np.float32(math.sin(angle)) * scaling)
