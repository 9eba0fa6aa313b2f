"""What stands between the two halves of an MLP."""

from __future__ import annotations

from typing import Any

from shadowlane.ops import table as t
from shadowlane.ops.atomics import read_f32
from shadowlane.ops.compiled import njit
from shadowlane.ops.rows import clamped_row, silu_row


@njit
def activate_row(
    base: int,
    geometry: Any,
    layout: int,
    gate: int,
    up: int,
    gate_bias: int,
    up_bias: int,
    out: int,
    cols: int,
) -> None:
    """The activation of gate, times up, of one row: silu, or GPT-OSS's clamped form.

    Addresses; gate, up and out of a direct `layout`, the biases float32, or both 0 for none.
    """
    if geometry[t.SWIGLU] < 0:
        silu_row(layout, gate, up, gate_bias, up_bias, out, cols)
        return
    limit = read_f32(base + geometry[t.SWIGLU])
    alpha = read_f32(base + geometry[t.SWIGLU] + 4)
    clamped_row(layout, gate, up, gate_bias, up_bias, limit, alpha, out, cols)
