"""Compiled kernels on float32 activations: everything a decode row passes through.

Each takes addresses, so that the same machine code serves every process that maps the arena, and
none changes its order of additions with the batch, the thread or the cut of the rows.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numba import types

from shadowlane.ops.atomics import read_f32, write_f32
from shadowlane.ops.compiled import cfunc, njit
from shadowlane.ops.dots import make_dot, make_weighted_sum
from shadowlane.ops.layouts import LAYOUTS
from shadowlane.ops.packed import make_packed_rows
from shadowlane.ops.rows import rotate_halves, rotate_neighbours, scale_row

_dot_1x1 = make_dot(1, 1)
_dot_4x1 = make_dot(4, 1)
_dot_4x2 = make_dot(4, 2)
_dot_4x4 = make_dot(4, 4)
_rows_q8_0 = make_packed_rows("q8_0")
_rows_q4_0 = make_packed_rows("q4_0")
_rows_q4_1 = make_packed_rows("q4_1")
_rows_q5_0 = make_packed_rows("q5_0")
_rows_q5_1 = make_packed_rows("q5_1")
_rows_q4_K = make_packed_rows("q4_K")
_rows_q5_K = make_packed_rows("q5_K")
_rows_q6_K = make_packed_rows("q6_K")
_rows_mxfp4 = make_packed_rows("mxfp4")
_sum_1, _sum_2, _sum_4 = make_weighted_sum(1), make_weighted_sum(2), make_weighted_sum(4)

LAYOUT_F32 = LAYOUTS["f32"].id
LAYOUT_F16 = LAYOUTS["f16"].id
LAYOUT_Q8_0 = LAYOUTS["q8_0"].id
WIDE_ROW_NBYTES = 4096  # from here on, four rows ahead is far enough
EXPAND_AT = 256  # bytes of scratch before the expanded rows
MATVEC_SIGNATURE = types.void(*[types.int64] * 12)

ZERO, ONE = np.float32(0), np.float32(1)


@njit
def element_nbytes(layout: int) -> int:
    return 4 if layout == LAYOUT_F32 else 2


@njit
def _multiply_rows(
    layout: int,
    weights: int,
    row_nbytes: int,
    ahead: int,
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
            _dot_1x1(layout, weights, row_nbytes, ahead, start, x_stride, cols, scratch)
        elif left >= 4:
            together = 4
            _dot_4x4(layout, weights, row_nbytes, ahead, start, x_stride, cols, scratch)
        elif left >= 2:
            together = 2
            _dot_4x2(layout, weights, row_nbytes, ahead, start, x_stride, cols, scratch)
        else:
            together = 1
            _dot_4x1(layout, weights, row_nbytes, ahead, start, x_stride, cols, scratch)
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
    # Far enough ahead for memory to answer, near enough to be in the cache still when it is read.
    distance = (4 if row_nbytes >= WIDE_ROW_NBYTES else 8) * row_nbytes
    end = num_rows * row_nbytes
    row = 0
    while row < num_rows:
        together = 4 if num_rows - row >= 4 else 1
        _multiply_rows(
            layout,
            weights + row * row_nbytes,
            row_nbytes,
            distance if (row + 4) * row_nbytes + distance <= end else 0,
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


# NOTE: numba caches compiled code by the place of a function in its file, so each packed format has
# a function of its own, however alike they are.


def _matvec_q8_0(
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
    _rows_q8_0(weights, row_nbytes, num_rows, cols, x, x_stride, num_inputs, y, y_stride)


def _matvec_q4_0(
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
    _rows_q4_0(weights, row_nbytes, num_rows, cols, x, x_stride, num_inputs, y, y_stride)


def _matvec_q4_1(
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
    _rows_q4_1(weights, row_nbytes, num_rows, cols, x, x_stride, num_inputs, y, y_stride)


def _matvec_q5_0(
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
    _rows_q5_0(weights, row_nbytes, num_rows, cols, x, x_stride, num_inputs, y, y_stride)


def _matvec_q5_1(
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
    _rows_q5_1(weights, row_nbytes, num_rows, cols, x, x_stride, num_inputs, y, y_stride)


def _matvec_q4_K(
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
    _rows_q4_K(weights, row_nbytes, num_rows, cols, x, x_stride, num_inputs, y, y_stride)


def _matvec_q5_K(
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
    _rows_q5_K(weights, row_nbytes, num_rows, cols, x, x_stride, num_inputs, y, y_stride)


def _matvec_q6_K(
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
    _rows_q6_K(weights, row_nbytes, num_rows, cols, x, x_stride, num_inputs, y, y_stride)


def _matvec_mxfp4(
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
    _rows_mxfp4(weights, row_nbytes, num_rows, cols, x, x_stride, num_inputs, y, y_stride)


multiply_q8_0 = njit(_matvec_q8_0)  # for the walker, which caches keys so

_MATVECS = {
    "q8_0": _matvec_q8_0,
    "q4_0": _matvec_q4_0,
    "q4_1": _matvec_q4_1,
    "q5_0": _matvec_q5_0,
    "q5_1": _matvec_q5_1,
    "q4_K": _matvec_q4_K,
    "q5_K": _matvec_q5_K,
    "q6_K": _matvec_q6_K,
    "mxfp4": _matvec_mxfp4,
}


@cache
def matvec_address(layout: str) -> int:
    """Code address of the decode operator of a layout (compiled on first use, then cached)."""
    return int(_compiled_matvec(_MATVECS.get(layout, _matvec_direct)).address)


@cache
def _compiled_matvec(function: Any) -> Any:
    return cfunc(MATVEC_SIGNATURE)(function)


@njit
def rms_scale(x: int, cols: int, eps: float, scratch: int) -> float:
    """1 / sqrt(mean(x**2) + eps) of one row; x: float32 [cols]; scratch: one float32."""
    _dot_1x1(LAYOUT_F32, x, 0, 0, x, 0, cols, scratch)
    return ONE / np.float32(math.sqrt(read_f32(scratch) / np.float32(cols) + eps))


@njit
def rms_norm(
    x: int, weight: int, out_layout: int, out: int, cols: int, eps: float, scratch: int
) -> None:
    """out = x / sqrt(mean(x**2) + eps) * weight for one row; out in a direct layout.

    x, weight: float32 [cols]; scratch: one float32.
    """
    scale_row(out_layout, x, rms_scale(x, cols, eps, scratch), weight, out, cols)


@njit
def rotate(
    x: int, cos: int, sin: int, dim: int, interleaved: int, factor: float, layout: int, out: int
) -> None:
    """Rotary embedding of one head, times `factor`, stored in a direct layout.

    x: float32 [dim]; cos, sin: float32 [dim / 2]. Pairs are (i, i + dim / 2), or neighbours where
    the file holds its rows that way (`interleaved`).
    """
    if interleaved != 0:
        rotate_neighbours(layout, x, cos, sin, factor, out, dim // 2)
    else:
        rotate_halves(layout, x, cos, sin, factor, out, dim // 2)


@njit
def weighted_sum(
    layout: int,
    rows: int,
    row_nbytes: int,
    num_rows: int,
    cols: int,
    factors: int,
    stride: int,
    num_inputs: int,
    out: int,
) -> None:
    """out[b] += factors[b] . rows, for any number of inputs; see `make_weighted_sum`."""
    first = 0
    while first < num_inputs:
        left = num_inputs - first
        start, target = factors + first * stride, out + first * cols * 4
        if left >= 4:
            _sum_4(layout, rows, row_nbytes, num_rows, cols, start, stride, target)
            first += 4
        elif left >= 2:
            _sum_2(layout, rows, row_nbytes, num_rows, cols, start, stride, target)
            first += 2
        else:
            _sum_1(layout, rows, row_nbytes, num_rows, cols, start, stride, target)
            first += 1


@njit
def rope_angles(
    position: int, inv_freq: int, scaling: float, cos: int, sin: int, half: int
) -> None:
    """cos and sin of one position, float32 [half], times the attention scaling of the rope type."""
    for i in range(half):
        angle = np.float32(position) * read_f32(inv_freq + 4 * i)
        write_f32(cos + 4 * i, np.float32(math.cos(angle)) * scaling)
        write_f32(sin + 4 * i, np.float32(math.sin(angle)) * scaling)
