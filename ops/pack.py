"""From float32 rows to packed blocks of 32: q8_0, q4_0 and q4_1, rounded as ggml's reference does.

The bytes equal those of the `gguf` package bit for bit. One compiled loop per format goes over the
blocks; scales come back as float32 and become halves in numpy, which rounds them to nearest even.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np

from shadowlane.ops.compiled import njit
from shadowlane.ops.layouts import LAYOUTS

PackLayout = Literal["q8_0", "q4_0", "q4_1"]
PACK_LAYOUTS: tuple[PackLayout, ...] = get_args(PackLayout)
_GROUP = 32


def pack_rows(layout: PackLayout, rows: np.ndarray) -> np.ndarray:
    """Pack float32 [n, cols] into uint8 [n, row bytes].

    Raises ValueError for a layout that is not made here, for columns that are no whole number of
    blocks, and for values or scales that are not finite.
    """
    if layout not in PACK_LAYOUTS:
        raise ValueError(f"weights must be one of {', '.join(PACK_LAYOUTS)}; got {layout!r}")
    if rows.dtype != np.float32 or rows.ndim != 2:
        raise ValueError(f"rows must be float32 [n, cols]; got {rows.dtype} {rows.shape}")
    kind = LAYOUTS[layout]
    num_rows, cols = rows.shape
    row_nbytes = kind.row_nbytes(cols)
    blocks = np.ascontiguousarray(rows).reshape(-1, _GROUP)
    packed = np.empty((len(blocks), kind.block_nbytes), np.uint8)
    # a scale, and for q4_1 the least value
    numbers = np.empty((len(blocks), 2 if layout == "q4_1" else 1), np.float32)
    _PACKERS[layout](blocks, packed, numbers)
    with np.errstate(over="ignore"):
        halves = numbers.astype(np.float16)
    if not np.isfinite(halves).all():
        raise ValueError(f"values must be finite and within the range of {layout}; some are not")
    packed[:, : 2 * halves.shape[1]] = halves.view(np.uint8)
    return packed.reshape(num_rows, row_nbytes)


@njit
def _pack_q8_0(blocks: Any, packed: Any, numbers: Any) -> None:
    for index in range(len(blocks)):
        largest = np.float32(0)
        for element in range(_GROUP):
            magnitude = abs(blocks[index, element])
            # the second comparison lets a NaN through to the scale, where it is refused
            if magnitude > largest or magnitude != magnitude:
                largest = magnitude
        scale = largest / np.float32(127)
        inverse = np.float32(0) if scale == 0 else np.float32(1) / scale
        numbers[index, 0] = scale
        for element in range(_GROUP):
            scaled = blocks[index, element] * inverse
            magnitude = abs(scaled)
            whole = np.floor(magnitude)
            whole += np.floor(np.float32(2) * (magnitude - whole))  # halves go away from zero
            code = np.int32(min(whole, np.float32(127)))
            packed[index, 2 + element] = np.uint8((-code if scaled < 0 else code) & 255)


@njit
def _nibble(scaled: Any) -> Any:
    """A number that is not negative, cut to a whole one of 0..15."""
    return np.uint8(np.int32(min(max(scaled, np.float32(0)), np.float32(15))))


@njit
def _pack_q4_0(blocks: Any, packed: Any, numbers: Any) -> None:
    for index in range(len(blocks)):
        # the value of the largest magnitude, the first of several, becomes code 0 exactly
        extreme = blocks[index, 0]
        for element in range(1, _GROUP):
            value = blocks[index, element]
            if abs(value) > abs(extreme) or value != value:
                extreme = value
        scale = extreme / np.float32(-8)
        inverse = np.float32(0) if scale == 0 else np.float32(1) / scale
        numbers[index, 0] = scale
        for element in range(16):
            low = _nibble(blocks[index, element] * inverse + np.float32(8.5))
            high = _nibble(blocks[index, element + 16] * inverse + np.float32(8.5))
            packed[index, 2 + element] = low | (high << 4)


@njit
def _pack_q4_1(blocks: Any, packed: Any, numbers: Any) -> None:
    for index in range(len(blocks)):
        least = blocks[index, 0]
        largest = least
        for element in range(1, _GROUP):
            value = blocks[index, element]
            if value < least or value != value:
                least = value
            if value > largest:
                largest = value
        scale = (largest - least) / np.float32(15)
        inverse = np.float32(0) if scale == 0 else np.float32(1) / scale
        numbers[index, 0] = scale
        numbers[index, 1] = least
        for element in range(16):
            low = _nibble((blocks[index, element] - least) * inverse + np.float32(0.5))
            high = _nibble((blocks[index, element + 16] - least) * inverse + np.float32(0.5))
            packed[index, 4 + element] = low | (high << 4)


_PACKERS: dict[str, Any] = {"q8_0": _pack_q8_0, "q4_0": _pack_q4_0, "q4_1": _pack_q4_1}
