"""Packed rows whose numbers are of a usual size, so that sums of them say something."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shadowlane.ops.card.products import has_triton
from shadowlane.ops.layouts import LAYOUTS

needs_interpreter = pytest.mark.skipif(
    not has_triton(torch.device("cpu")),
    reason="Triton is absent, or compiles for the card here, where tests/gpu runs its kernels",
)


def interpret_few_programs(patch: pytest.MonkeyPatch) -> None:
    """Share attention out over few programs, which the interpreter runs one after the other."""
    if has_triton(torch.device("cpu")):
        patch.setattr("shadowlane.ops.card.attention_triton.PROGRAMS", 8)


# Where the halves that scale a block lie in it.
_SCALES = {
    "q8_0": (0,),
    "q4_0": (0,),
    "q4_1": (0, 2),
    "q5_0": (0,),
    "q5_1": (0, 2),
    "q4_K": (0, 2),
    "q5_K": (0, 2),
    "q6_K": (208,),
}


def sane_rows(layout: str, num_rows: int, cols: int, skew: int = 0) -> np.ndarray:
    """uint8 [rows, row bytes], `skew` bytes behind an aligned address: random codes and scales."""
    random = np.random.default_rng(LAYOUTS[layout].id)
    shape = LAYOUTS[layout]
    blocks = random.integers(0, 256, (num_rows * cols // shape.block_elements, shape.block_nbytes))
    blocks = blocks.astype(np.uint8)
    values = (0.02 * random.standard_normal((len(blocks), 2))).astype(np.float32)
    if layout == "mxfp4":
        blocks[:, 0] = random.integers(120, 126, len(blocks))
    elif layout == "f32":
        blocks = values[:, :1].view(np.uint8)
    elif layout == "bf16":
        blocks = values[:, :1].view(np.uint8)[:, 2:]
    elif layout == "f16":
        blocks = values[:, :1].astype(np.float16).view(np.uint8)
    else:
        for number, at in enumerate(_SCALES[layout]):
            blocks[:, at : at + 2] = (
                values[:, number : number + 1].astype(np.float16).view(np.uint8)
            )
    memory = np.zeros(blocks.size + skew, np.uint8)
    memory[skew:] = blocks.reshape(-1)
    return memory[skew:].reshape(num_rows, -1)
