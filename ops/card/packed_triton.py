"""Dot products of packed rows with a few float32 inputs, in Triton: what kernels are made of.

Each function adds up some blocks of a few rows, read byte by byte as they lie in their file, at any
address: a byte is loaded once and gives both its codes. Columns are taken in the order in which a
block holds them, so nothing is shuffled. Sums stay apart, one per place of a block, until a row is
done: `total` is float32 [ROWS, M inputs, NUM blocks, places].

Blocks and rows beyond the end are those at the end once more; their inputs are 0 and their results
are not stored. `kernels_triton.py` has the kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_half(at):
    """The half at a byte address, as float32."""
    low, high = tl.load(at).to(tl.uint16), tl.load(at + 1).to(tl.uint16)
    return (low | (high << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def add_products(total, values, x, x_stride, num_inputs, column, is_there, M: tl.constexpr):
    """total += values * inputs; values: [ROWS, NUM, places], column, is_there: [NUM, places]."""
    row = tl.arange(0, M)[:, None, None]
    mask = (row < num_inputs) & is_there[None]
    inputs = tl.load(x + row * x_stride + column[None], mask=mask, other=0.0)
    return total + values[:, None] * inputs[None]


# Direct layouts: a block is one element ----------------------------------------------------------


@triton.jit
def add_direct(total, weights, rows, row_nbytes, first, num_blocks, x, x_stride, num_inputs,
               SIZE: tl.constexpr, M: tl.constexpr, PLACES: tl.constexpr):  # fmt: skip
    column = first + tl.arange(0, PLACES)[None, :]
    is_there = column < num_blocks
    at = weights + rows.to(tl.int64) * row_nbytes
    place = tl.minimum(column, num_blocks - 1)[None]
    if SIZE == 4:
        values = tl.load(at.to(tl.pointer_type(tl.float32)) + place)
    elif SIZE == 2:
        values = tl.load(at.to(tl.pointer_type(tl.float16)) + place).to(tl.float32)
    else:  # bf16: the upper half of a float32
        bits = tl.load(at.to(tl.pointer_type(tl.uint16)) + place).to(tl.uint32)
        values = (bits << 16).to(tl.float32, bitcast=True)
    return add_products(total, values, x, x_stride, num_inputs, column, is_there, M)


# Blocks of 32: see `packed_torch.py` for what they hold -----------------------------------------


@triton.jit
def add_q8_0(total, weights, rows, row_nbytes, first, num_blocks, x, x_stride, num_inputs,
             M: tl.constexpr, NUM: tl.constexpr):  # fmt: skip
    block = first + tl.arange(0, NUM)[:, None]
    place = tl.arange(0, 32)[None, :]
    at = weights + rows.to(tl.int64) * row_nbytes + tl.minimum(block, num_blocks - 1)[None] * 34
    codes = tl.load(at + 2 + place[None]).to(tl.int8, bitcast=True)
    values = codes.to(tl.float32) * load_half(at)
    is_there = (block < num_blocks) & (place >= 0)
    return add_products(total, values, x, x_stride, num_inputs, block * 32 + place, is_there, M)


@triton.jit
def add_nibbles(total, weights, rows, row_nbytes, first, num_blocks, x, x_stride, num_inputs,
                NBYTES: tl.constexpr, CODES: tl.constexpr, FIFTHS: tl.constexpr,
                ZERO: tl.constexpr, HAS_MINIMUM: tl.constexpr, M: tl.constexpr,
                NUM: tl.constexpr):  # fmt: skip
    """q4_0, q4_1, q5_0, q5_1. Offsets in a block: nibbles CODES, fifth bits FIFTHS (0: none)."""
    block = first + tl.arange(0, NUM)[:, None]
    place = tl.arange(0, 16)[None, :]
    at = weights + rows.to(tl.int64) * row_nbytes
    at = at + tl.minimum(block, num_blocks - 1)[None] * NBYTES
    scale = load_half(at)
    packed = tl.load(at + CODES + place[None]).to(tl.int32)
    is_there = (block < num_blocks) & (place >= 0)
    for half in tl.static_range(2):
        codes = (packed >> (4 * half)) & 15
        if FIFTHS:
            bits = tl.load(at + FIFTHS + 2 * half + place[None] // 8).to(tl.int32)
            codes = codes | (((bits >> (place[None] % 8)) & 1) << 4)
        values = (codes - ZERO).to(tl.float32) * scale
        if HAS_MINIMUM:
            values = values + load_half(at + 2)
        column = block * 32 + 16 * half + place
        total = add_products(total, values, x, x_stride, num_inputs, column, is_there, M)
    return total


@triton.jit
def add_mxfp4(total, weights, rows, row_nbytes, first, num_blocks, x, x_stride, num_inputs,
              M: tl.constexpr, NUM: tl.constexpr):  # fmt: skip
    block = first + tl.arange(0, NUM)[:, None]
    place = tl.arange(0, 16)[None, :]
    at = weights + rows.to(tl.int64) * row_nbytes + tl.minimum(block, num_blocks - 1)[None] * 17
    exponent = tl.load(at).to(tl.int32)
    bits = tl.where(exponent < 2, 0x200000 << tl.minimum(exponent, 1), (exponent - 1) << 23)
    scale = bits.to(tl.float32, bitcast=True)
    packed = tl.load(at + 1 + place[None]).to(tl.int32)
    is_there = (block < num_blocks) & (place >= 0)
    for half in tl.static_range(2):
        codes = (packed >> (4 * half)) & 15
        size = codes & 7
        doubled = tl.where(size < 2, size, (2 + (size & 1)) << (tl.maximum(size >> 1, 1) - 1))
        values = tl.where(codes < 8, doubled, -doubled).to(tl.float32) * scale
        column = block * 32 + 16 * half + place
        total = add_products(total, values, x, x_stride, num_inputs, column, is_there, M)
    return total


# Blocks of 256 ----------------------------------------------------------------------------------


@triton.jit
def six_bits(at, PART: tl.constexpr):
    """Scale and minimum of a part, 0..63, from the 12 bytes at `at`."""
    if PART < 4:
        scale = tl.load(at + PART).to(tl.int32) & 63
        minimum = tl.load(at + PART + 4).to(tl.int32) & 63
    else:
        shared = tl.load(at + PART + 4).to(tl.int32)
        scale = (shared & 15) | ((tl.load(at + PART - 4).to(tl.int32) >> 6) << 4)
        minimum = (shared >> 4) | ((tl.load(at + PART).to(tl.int32) >> 6) << 4)
    return scale.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def add_q45_K(total, weights, rows, row_nbytes, first, num_blocks, x, x_stride, num_inputs,
              NBYTES: tl.constexpr, CODES: tl.constexpr, M: tl.constexpr,
              NUM: tl.constexpr):  # fmt: skip
    """q4_K (nibbles at byte 16) and q5_K (at 48, behind the fifth bits)."""
    block = first + tl.arange(0, NUM)[:, None]
    place = tl.arange(0, 32)[None, :]
    at = weights + rows.to(tl.int64) * row_nbytes
    at = at + tl.minimum(block, num_blocks - 1)[None] * NBYTES
    scale_of_scales, scale_of_minima = load_half(at), load_half(at + 2)
    is_there = (block < num_blocks) & (place >= 0)
    for pair in tl.static_range(4):
        packed = tl.load(at + CODES + 32 * pair + place[None]).to(tl.int32)
        for half in tl.static_range(2):
            codes = (packed >> (4 * half)) & 15
            if CODES == 48:
                fifth = tl.load(at + 16 + place[None]).to(tl.int32) >> (2 * pair + half)
                codes = codes | ((fifth & 1) << 4)
            scale, minimum = six_bits(at + 4, 2 * pair + half)
            values = codes.to(tl.float32) * (scale_of_scales * scale)
            values = values - scale_of_minima * minimum
            column = block * 256 + 32 * (2 * pair + half) + place
            total = add_products(total, values, x, x_stride, num_inputs, column, is_there, M)
    return total


@triton.jit
def add_q6_K(total, weights, rows, row_nbytes, first, num_blocks, x, x_stride, num_inputs,
             M: tl.constexpr, NUM: tl.constexpr):  # fmt: skip
    block = first + tl.arange(0, NUM)[:, None]
    place = tl.arange(0, 32)[None, :]
    at = weights + rows.to(tl.int64) * row_nbytes + tl.minimum(block, num_blocks - 1)[None] * 210
    scale_of_scales = load_half(at + 208)
    is_there = (block < num_blocks) & (place >= 0)
    for side in tl.static_range(2):  # 128 elements, four parts of 32
        upper = tl.load(at + 128 + 32 * side + place[None]).to(tl.int32)
        for which in tl.static_range(2):  # 32 bytes of low nibbles serve two parts
            low = tl.load(at + 64 * side + 32 * which + place[None]).to(tl.int32)
            for half in tl.static_range(2):
                part = 2 * half + which
                codes = ((low >> (4 * half)) & 15) | (((upper >> (2 * part)) & 3) << 4)
                scales = tl.load(at + 192 + 8 * side + 2 * part + place[None] // 16)
                scale = scale_of_scales * scales.to(tl.int8, bitcast=True).to(tl.float32)
                values = (codes - 32).to(tl.float32) * scale
                column = block * 256 + 128 * side + 32 * part + place
                total = add_products(total, values, x, x_stride, num_inputs, column, is_there, M)
    return total


@triton.jit
def dot_rows(weights, rows, row_nbytes, num_blocks, x, x_stride, num_inputs,
             LAYOUT: tl.constexpr, ROWS: tl.constexpr, M: tl.constexpr, NUM: tl.constexpr,
             PLACES: tl.constexpr):  # fmt: skip
    """Rows times inputs, float32 [ROWS, M].

    weights: pointer to bytes; rows: int [ROWS], all inside; num_blocks: of a row; x: pointer to
    float32 [num_inputs, cols], `x_stride` elements apart.
    """
    total = tl.zeros((ROWS, M, NUM, PLACES), tl.float32)
    at = rows[:, None, None]
    step: tl.constexpr = NUM if NUM > 1 else PLACES  # a block of a direct layout is one element
    for first in range(0, num_blocks, step):
        if LAYOUT == "q8_0":
            total = add_q8_0(
                total, weights, at, row_nbytes, first, num_blocks, x, x_stride, num_inputs, M, NUM
            )
        elif LAYOUT == "q4_0":
            total = add_nibbles(total, weights, at, row_nbytes, first, num_blocks, x, x_stride,
                                num_inputs, 18, 2, 0, 8, False, M, NUM)  # fmt: skip
        elif LAYOUT == "q4_1":
            total = add_nibbles(total, weights, at, row_nbytes, first, num_blocks, x, x_stride,
                                num_inputs, 20, 4, 0, 0, True, M, NUM)  # fmt: skip
        elif LAYOUT == "q5_0":
            total = add_nibbles(total, weights, at, row_nbytes, first, num_blocks, x, x_stride,
                                num_inputs, 22, 6, 2, 16, False, M, NUM)  # fmt: skip
        elif LAYOUT == "q5_1":
            total = add_nibbles(total, weights, at, row_nbytes, first, num_blocks, x, x_stride,
                                num_inputs, 24, 8, 4, 0, True, M, NUM)  # fmt: skip
        elif LAYOUT == "mxfp4":
            total = add_mxfp4(
                total, weights, at, row_nbytes, first, num_blocks, x, x_stride, num_inputs, M, NUM
            )
        elif LAYOUT == "q4_K":
            total = add_q45_K(total, weights, at, row_nbytes, first, num_blocks, x, x_stride,
                              num_inputs, 144, 16, M, NUM)  # fmt: skip
        elif LAYOUT == "q5_K":
            total = add_q45_K(total, weights, at, row_nbytes, first, num_blocks, x, x_stride,
                              num_inputs, 176, 48, M, NUM)  # fmt: skip
        elif LAYOUT == "q6_K":
            total = add_q6_K(
                total, weights, at, row_nbytes, first, num_blocks, x, x_stride, num_inputs, M, NUM
            )
        elif LAYOUT == "f32":
            total = add_direct(total, weights, at, row_nbytes, first, num_blocks, x, x_stride,
                               num_inputs, 4, M, PLACES)  # fmt: skip
        elif LAYOUT == "f16":
            total = add_direct(total, weights, at, row_nbytes, first, num_blocks, x, x_stride,
                               num_inputs, 2, M, PLACES)  # fmt: skip
        else:
            tl.static_assert(LAYOUT == "bf16")
            total = add_direct(total, weights, at, row_nbytes, first, num_blocks, x, x_stride,
                               num_inputs, 3, M, PLACES)  # fmt: skip
    return tl.sum(tl.sum(total, axis=3), axis=2)
