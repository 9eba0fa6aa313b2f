"""Every layout expands in torch to the bits that the compiled expansion gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shadowlane.ops.card.packed_torch import expand, pack_q8_0
from shadowlane.ops.expand import expand_rows
from shadowlane.ops.layouts import LAYOUTS


def random_rows(layout: str, num_rows: int, cols: int, skew: int = 0) -> np.ndarray:
    """Random bytes, [rows, row bytes], that begin `skew` bytes behind an aligned address."""
    nbytes = num_rows * LAYOUTS[layout].row_nbytes(cols)
    random = np.random.default_rng(LAYOUTS[layout].id)
    values = random.integers(0, 256, nbytes + 64, dtype=np.uint8)[skew : skew + nbytes]
    return values.reshape(num_rows, -1)


@pytest.mark.parametrize("skew", [0, 1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bits_as_the_compiled_expansion(layout: str, skew: int) -> None:
    packed = random_rows(layout, 24, 512, skew)
    found = expand(layout, torch.from_numpy(packed), 512).numpy()
    expected = expand_rows(layout, packed.reshape(-1), 24, 512)
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), is_nan)
    # the sign of a zero may differ: minus zero times a scale, and a minimum of zero
    np.testing.assert_array_equal(found[~is_nan], expected[~is_nan])


def test_every_power_of_two_times_every_code() -> None:
    blocks = np.zeros((256, 17), np.uint8)
    blocks[:, 0] = np.arange(256)
    blocks[:, 1:] = np.arange(16) | np.arange(16)[::-1] << 4
    found = expand("mxfp4", torch.from_numpy(blocks), 32).numpy()
    np.testing.assert_array_equal(found, expand_rows("mxfp4", blocks.reshape(-1), 256, 32))
    assert found[0, 1] == 2.0**-128


def test_eight_bits_hold_a_row_within_half_a_step() -> None:
    values = torch.from_numpy(np.random.default_rng(3).standard_normal((5, 64), np.float32))
    values[2, :32] = 0
    packed = pack_q8_0(values)
    assert packed.shape == (5, 68)
    error = (expand("q8_0", packed, 64) - values).abs()
    step = values.view(5, 2, 32).abs().amax(-1, keepdim=True) / 127
    assert (error.view(5, 2, 32) <= 0.51 * step + 4e-4 * values.abs().view(5, 2, 32)).all()
    assert not packed[2, :34].any()


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"packed must be uint8 \[rows, 68\] for 64 columns"):
        expand("q8_0", torch.zeros((2, 34), dtype=torch.uint8), 64)
    with pytest.raises(KeyError):
        expand("q2_K", torch.zeros((1, 84), dtype=torch.uint8), 256)
