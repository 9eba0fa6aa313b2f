"""Packed blocks have the bytes of the reference."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from shadowlane.ops.expand import expand_rows
from shadowlane.ops.pack import PACK_LAYOUTS, pack_rows

random = np.random.default_rng(23)


def reference(layout: str, rows: np.ndarray) -> np.ndarray:
    return gguf.quantize(rows, gguf.GGMLQuantizationType[layout.upper()])


@pytest.mark.parametrize("layout", PACK_LAYOUTS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_random_rows_have_the_bytes_of_the_reference(layout: str, scale: float) -> None:
    rows = (random.standard_normal((33, 1024)) * scale).astype(np.float32)
    assert np.array_equal(pack_rows(layout, rows), reference(layout, rows))


@pytest.mark.parametrize("layout", PACK_LAYOUTS)
def test_coarse_values_have_the_bytes_of_the_reference(layout: str) -> None:
    """Few distinct values: ties of magnitude, halves that are to be rounded, blocks of zeros."""
    rows = (random.integers(-3, 4, (64, 256)) / 2).astype(np.float32)
    rows[3] = 0
    rows[4, :32] = 1.5
    rows[5, :32] = -1.5
    bfloats = random.standard_normal((64, 256)).astype(np.float32).view(np.uint32) & 0xFFFF0000
    for each in (rows, bfloats.view(np.float32)):
        assert np.array_equal(pack_rows(layout, each), reference(layout, each))


@pytest.mark.parametrize("layout", PACK_LAYOUTS)
def test_what_was_packed_expands_to_nearly_the_same(layout: str) -> None:
    rows = random.standard_normal((8, 96), np.float32)
    found = expand_rows(layout, pack_rows(layout, rows).reshape(-1), 8, 96)
    spread = np.abs(rows).reshape(-1, 32).max(axis=1).repeat(32).reshape(rows.shape)
    # q4_0 cuts the end opposite its extreme; a scale is a half, which adds a little
    steps = {"q8_0": 254, "q4_0": 8, "q4_1": 14}[layout]
    assert (np.abs(found - rows) <= 1.15 * spread / steps).all()


@pytest.mark.parametrize("layout", PACK_LAYOUTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38])
@pytest.mark.parametrize("place", [0, 17, 31])
def test_values_that_are_not_finite_are_refused(layout: str, bad: float, place: int) -> None:
    rows = random.standard_normal((2, 64), np.float32)
    rows[1, place] = bad
    with pytest.raises(ValueError, match="must be finite"):
        pack_rows(layout, rows)


def test_sizes_and_layouts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 32 elements; got 40"):
        pack_rows("q4_0", np.zeros((1, 40), np.float32))
    with pytest.raises(ValueError, match="weights must be one of q8_0, q4_0, q4_1; got 'q4_K'"):
        pack_rows("q4_K", np.zeros((1, 256), np.float32))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows must be float32"):
        pack_rows("q4_0", np.zeros((1, 32)))
