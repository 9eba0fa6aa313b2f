"""From the bytes of a weight file to float32: one compiled `expand_row` for each layout.

Packed blocks stay packed in every tier; decode, prefill tiles and embedding rows all expand them
here, through the address of a C function, so that a new format recompiles no caller. The arithmetic
is that of the formats' definition, product and sum rounded one after the other, and equals the
reference expansion of the `gguf` package bit for bit.

Sources may start at any byte address. Nothing is checked inside: the readers of the weight files
made sure that a row is there and holds whole blocks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import types

from shadowlane.ops.compiled import cfunc, njit
from shadowlane.ops.layouts import LAYOUTS
from shadowlane.ops.vectors import (
    LANES,
    bytes_of_bits,
    float_of_half,
    floats_of_bfloats,
    floats_of_halves,
    floats_of_signed,
    floats_of_unsigned,
    half_of_exponent,
    load_f32x16,
    load_half,
    load_i8,
    load_u8,
    load_u8x16,
    load_u16,
    load_u16x16,
    load_u32,
    signed_of_codes,
    store_f32,
    store_f32x16,
    store_u32,
)

EXPAND_ROW_SIGNATURE = types.void(types.int64, types.int64, types.int64)
"""(source address, destination address, number of elements): a whole number of packed blocks."""

_VECTOR_NBYTES = 4 * LANES  # of sixteen float32 in the destination


# Plain elements: sixteen at a time, then the rest -----------------------------------------------


def _expand_f32(source: int, destination: int, num_elements: int) -> None:
    whole = num_elements // LANES * LANES
    for start in range(0, whole, LANES):
        store_f32x16(destination + 4 * start, load_f32x16(source + 4 * start))
    for element in range(whole, num_elements):
        store_u32(destination + 4 * element, load_u32(source + 4 * element))


def _expand_f16(source: int, destination: int, num_elements: int) -> None:
    whole = num_elements // LANES * LANES
    for start in range(0, whole, LANES):
        halves = load_u16x16(source + 2 * start)
        store_f32x16(destination + 4 * start, floats_of_halves(halves))
    for element in range(whole, num_elements):
        store_f32(destination + 4 * element, float_of_half(load_u16(source + 2 * element)))


def _expand_bf16(source: int, destination: int, num_elements: int) -> None:
    whole = num_elements // LANES * LANES
    for start in range(0, whole, LANES):
        bfloats = load_u16x16(source + 2 * start)
        store_f32x16(destination + 4 * start, floats_of_bfloats(bfloats))
    for element in range(whole, num_elements):
        store_u32(
            destination + 4 * element, np.uint32(load_u16(source + 2 * element)) << np.uint32(16)
        )


# Blocks of 32: a scale (and a minimum), then codes. The low nibbles of the sixteen bytes are the
# first half of the block, the high nibbles the second ---------------------------------------------


def _expand_q8_0(source: int, destination: int, num_elements: int) -> None:
    for _ in range(num_elements // 32):
        scale = load_half(source)  # block: scale f16, codes i8[32]
        first, second = load_u8x16(source + 2), load_u8x16(source + 18)
        store_f32x16(destination, floats_of_signed(first) * scale)
        store_f32x16(destination + _VECTOR_NBYTES, floats_of_signed(second) * scale)
        source += 34
        destination += 2 * _VECTOR_NBYTES


def _expand_q4_0(source: int, destination: int, num_elements: int) -> None:
    for _ in range(num_elements // 32):
        scale = load_half(source)  # block: scale f16, nibbles u8[16]
        packed = load_u8x16(source + 2)
        store_f32x16(destination, floats_of_signed((packed & 15) - 8) * scale)
        store_f32x16(destination + _VECTOR_NBYTES, floats_of_signed((packed >> 4) - 8) * scale)
        source += 18
        destination += 2 * _VECTOR_NBYTES


def _expand_q4_1(source: int, destination: int, num_elements: int) -> None:
    for _ in range(num_elements // 32):
        scale, minimum = load_half(source), load_half(source + 2)  # then nibbles u8[16]
        packed = load_u8x16(source + 4)
        store_f32x16(destination, floats_of_unsigned(packed & 15) * scale + minimum)
        store_f32x16(
            destination + _VECTOR_NBYTES, floats_of_unsigned(packed >> 4) * scale + minimum
        )
        source += 20
        destination += 2 * _VECTOR_NBYTES


@njit(inline="always")
def _codes_of_five_bits(nibbles_address: int, high_bits_address: int) -> Any:
    """The two halves of a block of 5-bit codes: nibbles u8[16] and one fifth bit per element."""
    packed = load_u8x16(nibbles_address)
    low_fifth = bytes_of_bits(load_u16(high_bits_address))
    high_fifth = bytes_of_bits(load_u16(high_bits_address + 2))
    return (packed & 15) | (low_fifth << 4), (packed >> 4) | (high_fifth << 4)


def _expand_q5_0(source: int, destination: int, num_elements: int) -> None:
    for _ in range(num_elements // 32):
        scale = load_half(source)  # block: scale f16, fifth bits u32, nibbles u8[16]
        first, second = _codes_of_five_bits(source + 6, source + 2)
        store_f32x16(destination, floats_of_signed(first - 16) * scale)
        store_f32x16(destination + _VECTOR_NBYTES, floats_of_signed(second - 16) * scale)
        source += 22
        destination += 2 * _VECTOR_NBYTES


def _expand_q5_1(source: int, destination: int, num_elements: int) -> None:
    for _ in range(num_elements // 32):
        scale, minimum = load_half(source), load_half(source + 2)  # fifth bits u32, nibbles u8[16]
        first, second = _codes_of_five_bits(source + 8, source + 4)
        store_f32x16(destination, floats_of_unsigned(first) * scale + minimum)
        store_f32x16(destination + _VECTOR_NBYTES, floats_of_unsigned(second) * scale + minimum)
        source += 24
        destination += 2 * _VECTOR_NBYTES


def _expand_mxfp4(source: int, destination: int, num_elements: int) -> None:
    for _ in range(num_elements // 32):
        # block: scale u8, a power of two; nibbles u8[16], small floats that stand doubled here
        scale = half_of_exponent(load_u8(source))
        packed = load_u8x16(source + 1)
        first, second = signed_of_codes(packed & 15), signed_of_codes(packed >> 4)
        store_f32x16(destination, floats_of_signed(first) * scale)
        store_f32x16(destination + _VECTOR_NBYTES, floats_of_signed(second) * scale)
        source += 17
        destination += 2 * _VECTOR_NBYTES


# Blocks of 256: scales of the scales -------------------------------------------------------------


@njit(inline="always")
def _six_bit_scale_and_minimum(packed: int, part: int) -> tuple[Any, Any]:
    """Scale and minimum code (0..63 each) of `part` 0..7 from the 12 bytes at `packed`.

    Parts 0..3 lie whole in bytes 0..3 (scales) and 4..7 (minima). Parts 4..7 have their low four
    bits in bytes 8..11 and their upper two in the upper bits of the bytes of parts 0..3.
    """
    if part < 4:
        return load_u8(packed + part) & 63, load_u8(packed + part + 4) & 63
    shared = load_u8(packed + part + 4)
    scale = (shared & 15) | ((load_u8(packed + part - 4) >> 6) << 4)
    minimum = (shared >> 4) | ((load_u8(packed + part) >> 6) << 4)
    return scale, minimum


@njit(inline="always")
def _store_scaled(destination: int, first: Any, second: Any, scale: Any, minimum: Any) -> None:
    """Write 32 elements: codes * scale - minimum."""
    store_f32x16(destination, floats_of_unsigned(first) * scale + -minimum)
    store_f32x16(destination + _VECTOR_NBYTES, floats_of_unsigned(second) * scale + -minimum)


def _expand_q4_K(source: int, destination: int, num_elements: int) -> None:
    for _ in range(num_elements // 256):
        # block: scale f16, scale of the minima f16, 8 scales and minima u8[12], nibbles u8[128]
        scale, minimum = load_half(source), load_half(source + 2)
        for pair in range(4):  # 32 bytes: the low nibbles are one part, the high nibbles the next
            nibbles = source + 16 + 32 * pair
            first, second = load_u8x16(nibbles), load_u8x16(nibbles + 16)
            codes = _six_bit_scale_and_minimum(source + 4, 2 * pair)
            _store_scaled(
                destination,
                first & 15,
                second & 15,
                scale * np.float32(codes[0]),
                minimum * np.float32(codes[1]),
            )
            codes = _six_bit_scale_and_minimum(source + 4, 2 * pair + 1)
            _store_scaled(
                destination + 2 * _VECTOR_NBYTES,
                first >> 4,
                second >> 4,
                scale * np.float32(codes[0]),
                minimum * np.float32(codes[1]),
            )
            destination += 4 * _VECTOR_NBYTES
        source += 144


def _expand_q5_K(source: int, destination: int, num_elements: int) -> None:
    for _ in range(num_elements // 256):
        # block: as q4_K, with fifth bits u8[32] before the nibbles: bit p of byte i is element i
        # of part p
        scale, minimum = load_half(source), load_half(source + 2)
        first_fifth, second_fifth = load_u8x16(source + 16), load_u8x16(source + 32)
        for pair in range(4):
            nibbles = source + 48 + 32 * pair
            first, second = load_u8x16(nibbles), load_u8x16(nibbles + 16)
            codes = _six_bit_scale_and_minimum(source + 4, 2 * pair)
            _store_scaled(
                destination,
                (first & 15) | (((first_fifth >> (2 * pair)) & 1) << 4),
                (second & 15) | (((second_fifth >> (2 * pair)) & 1) << 4),
                scale * np.float32(codes[0]),
                minimum * np.float32(codes[1]),
            )
            codes = _six_bit_scale_and_minimum(source + 4, 2 * pair + 1)
            _store_scaled(
                destination + 2 * _VECTOR_NBYTES,
                (first >> 4) | (((first_fifth >> (2 * pair + 1)) & 1) << 4),
                (second >> 4) | (((second_fifth >> (2 * pair + 1)) & 1) << 4),
                scale * np.float32(codes[0]),
                minimum * np.float32(codes[1]),
            )
            destination += 4 * _VECTOR_NBYTES
        source += 176


def _expand_q6_K(source: int, destination: int, num_elements: int) -> None:
    for _ in range(num_elements // 256):
        # block: low nibbles u8[128], upper two bits u8[64], scales i8[16], scale f16. Each half of
        # 128 elements is four parts of 32: byte i of the upper bits serves element i of all four.
        scale = load_half(source + 208)
        for half in range(2):
            for group in range(2):  # sixteen elements of each part share one scale
                low = load_u8x16(source + 64 * half + 16 * group)
                low_next = load_u8x16(source + 64 * half + 32 + 16 * group)
                upper = load_u8x16(source + 128 + 32 * half + 16 * group)
                scales = source + 192 + 8 * half + group
                out = destination + _VECTOR_NBYTES * group
                store_f32x16(
                    out,
                    floats_of_signed(((low & 15) | ((upper & 3) << 4)) - 32)
                    * (scale * np.float32(load_i8(scales))),
                )
                store_f32x16(
                    out + 2 * _VECTOR_NBYTES,
                    floats_of_signed(((low_next & 15) | (((upper >> 2) & 3) << 4)) - 32)
                    * (scale * np.float32(load_i8(scales + 2))),
                )
                store_f32x16(
                    out + 4 * _VECTOR_NBYTES,
                    floats_of_signed(((low >> 4) | (((upper >> 4) & 3) << 4)) - 32)
                    * (scale * np.float32(load_i8(scales + 4))),
                )
                store_f32x16(
                    out + 6 * _VECTOR_NBYTES,
                    floats_of_signed(((low_next >> 4) | ((upper >> 6) << 4)) - 32)
                    * (scale * np.float32(load_i8(scales + 6))),
                )
            destination += 8 * _VECTOR_NBYTES
        source += 210


_EXPANSIONS: dict[str, Callable[[int, int, int], None]] = {
    "f32": _expand_f32,
    "f16": _expand_f16,
    "bf16": _expand_bf16,
    "q8_0": _expand_q8_0,
    "q4_0": _expand_q4_0,
    "q4_1": _expand_q4_1,
    "q5_0": _expand_q5_0,
    "q5_1": _expand_q5_1,
    "q4_K": _expand_q4_K,
    "q5_K": _expand_q5_K,
    "q6_K": _expand_q6_K,
    "mxfp4": _expand_mxfp4,
}


@cache
def _compiled(layout_name: str) -> Any:
    # kept for the life of the process: its address is held in tables that Python does not see
    return cfunc(EXPAND_ROW_SIGNATURE)(_EXPANSIONS[layout_name])


def expand_row_address(layout_name: str) -> int:
    """Entry of `void expand_row(int64 source, int64 destination, int64 num_elements)`.

    Compiled at the first call for a layout (or loaded from the cache), so a model pays for the
    layouts it uses. Valid in this process only. Raises KeyError for a layout that does not exist.
    """
    return int(_compiled(layout_name).address)


_EXPAND_ROW_PROTOTYPE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def expand_rows(
    layout_name: str, source: np.ndarray, num_rows: int, cols: int, out: np.ndarray | None = None
) -> np.ndarray:
    """Expand `num_rows` consecutive rows of packed bytes into float32 [num_rows, cols].

    `source` is a contiguous uint8 array that holds exactly these rows. For tests and for gathering
    embedding rows; the compiled code calls `expand_row_address` itself. The GIL is free meanwhile.
    Raises ValueError where sizes do not fit.
    """
    nbytes = num_rows * LAYOUTS[layout_name].row_nbytes(cols)
    if source.dtype != np.uint8 or not source.flags.c_contiguous or source.nbytes != nbytes:
        raise ValueError(
            f"source must be contiguous uint8 of {nbytes} bytes ({num_rows} rows of {cols} "
            f"{layout_name}); got {source.nbytes} bytes of {source.dtype}"
        )
    if out is None:
        out = np.empty((num_rows, cols), np.float32)
    elif out.dtype != np.float32 or out.shape != (num_rows, cols) or not out.flags.c_contiguous:
        raise ValueError(
            f"out must be contiguous float32 [{num_rows}, {cols}]; got {out.dtype} {out.shape}"
        )
    # rows hold whole blocks and follow one another: one call does them all
    expand = _EXPAND_ROW_PROTOTYPE(expand_row_address(layout_name))
    expand(source.ctypes.data, out.ctypes.data, num_rows * cols)
    return out
