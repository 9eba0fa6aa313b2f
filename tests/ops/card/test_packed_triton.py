"""The Triton kernels, run by Triton's interpreter, against the compiled expansion."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from card_layouts import needs_interpreter, sane_rows

from shadowlane.ops.card.packed_torch import expand
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
    found = torch.full((num_inputs, num_rows), torch.nan)
    triton_kernels.multiply(layout, torch.from_numpy(packed), torch.from_numpy(inputs), found)
    weights = expand_rows(layout, packed.reshape(-1), num_rows, cols).astype(np.float64)
    expected = inputs @ weights.T
    scale = np.abs(inputs) @ np.abs(weights).T
    assert found.shape == (num_inputs, num_rows)
    assert np.abs(expected).max() > 0.1
    assert (np.abs(found.numpy() - expected) <= 1e-6 * scale).all()


def test_a_product_goes_into_columns_with_bias_and_what_is_there() -> None:
    packed = torch.from_numpy(sane_rows("q4_1", 5, 64))
    inputs, there, bias = torch.randn(3, 64), torch.randn(3, 9), torch.randn(5)
    alone = torch.empty(3, 5)
    triton_kernels.multiply("q4_1", packed, inputs, alone)
    out = there.clone()
    triton_kernels.multiply("q4_1", packed, inputs, out[:, 2:7], bias, adds=True)
    torch.testing.assert_close(out[:, 2:7], there[:, 2:7] + alone + bias)
    assert torch.equal(out[:, :2], there[:, :2])
    assert torch.equal(out[:, 7:], there[:, 7:])


@pytest.mark.parametrize("clamp", [None, (0.4, 1.7)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gate_and_up_of_unlike_layouts(clamp: tuple[float, float] | None, has_bias: bool) -> None:
    layouts = ("q4_K", "q6_K")
    packed = tuple(torch.from_numpy(sane_rows(layout, 6, 512)) for layout in layouts)
    inputs, out = 0.05 * torch.randn(2, 512), torch.zeros(2, 8)
    biases = (torch.randn(6), torch.randn(6)) if has_bias else None
    triton_kernels.gate_up(layouts, packed, inputs, out[:, 1:7], biases, clamp)
    gate, up = (
        inputs @ expand(layout, rows, 512).t() + (biases[part] if biases else 0)
        for part, (layout, rows) in enumerate(zip(layouts, packed, strict=True))
    )
    if clamp is None:
        expected = torch.nn.functional.silu(gate) * up
    else:
        gate, up = gate.clamp(max=clamp[0]), up.clamp(-clamp[0], clamp[0])
        expected = (up + 1) * gate * torch.sigmoid(clamp[1] * gate)
    torch.testing.assert_close(out[:, 1:7], expected, rtol=1e-4, atol=1e-4)
    assert not out[:, ::7].any()
