"""The Triton kernels, run by Triton's interpreter, against the compiled expansion."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from card_layouts import needs_interpreter, sane_rows

from shadowlane.ops.expand import expand_rows
from shadowlane.ops.layouts import LAYOUTS

pytestmark = needs_interpreter
triton_kernels = pytest.importorskip("shadowlane.ops.card.kernels_triton", reason="needs triton")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_inputs", [1, 3, 8, 11])
def test_a_product_is_that_of_the_expanded_rows(layout: str, num_inputs: int) -> None:
    """Odd numbers of rows and blocks, none of which fills a tile; packed rows at an odd address."""
    num_rows, cols = 7, 768
    skew = LAYOUTS[layout].block_nbytes if LAYOUTS[layout].block_elements == 1 else 3
    packed = sane_rows(layout, num_rows, cols, skew)
    random = np.random.default_rng(num_inputs)
    inputs = random.standard_normal((num_inputs, cols)).astype(np.float32)
    found = triton_kernels.multiply(layout, torch.from_numpy(packed), torch.from_numpy(inputs))
    weights = expand_rows(layout, packed.reshape(-1), num_rows, cols).astype(np.float64)
    expected = inputs @ weights.T
    scale = np.abs(inputs) @ np.abs(weights).T
    assert found.shape == (num_inputs, num_rows)
    assert np.abs(expected).max() > 0.1
    assert (np.abs(found.numpy() - expected) <= 1e-6 * scale).all()
