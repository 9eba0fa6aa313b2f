"""The choice of experts for one row, compiled, against torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shadowlane.ops.routes import choose


def chosen(logits: np.ndarray, top_k: int, normalises: bool) -> tuple[list[int], np.ndarray]:
    values = logits.astype(np.float32).copy()
    ids, weights = np.full(top_k, -1, np.int32), np.zeros(top_k, np.float32)
    choose(
        values.ctypes.data,
        len(values),
        top_k,
        int(normalises),
        ids.ctypes.data,
        weights.ctypes.data,
    )
    return ids.tolist(), weights


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize(("count", "top_k"), [(5, 2), (8, 8), (60, 4), (128, 8)])
def test_the_largest_by_rank_with_the_weights_of_a_softmax(
    count: int, top_k: int, normalises: bool
) -> None:
    for seed in range(20):
        logits = 4 * np.random.default_rng(seed).standard_normal(count).astype(np.float32)
        ids, weights = chosen(logits, top_k, normalises)
        best, places = torch.softmax(torch.from_numpy(logits), 0).topk(top_k)
        assert ids == places.tolist()
        expected = best / best.sum() if normalises else best
        assert np.allclose(weights, expected.numpy(), rtol=1e-5)


def test_of_equals_the_first() -> None:
    assert chosen(np.array([1.0, 3.0, 3.0, 3.0]), 2, True)[0] == [1, 2]


@pytest.mark.parametrize("broken", [np.nan, -np.inf, np.inf])
def test_a_broken_row_still_chooses_different_experts(broken: float) -> None:
    """Buffers have room for that many rows of each expert, and no more."""
    for where in (slice(None), slice(2, 5)):
        logits = np.arange(9, dtype=np.float32)
        logits[where] = broken
        ids, _ = chosen(logits, 6, False)
        assert len(set(ids)) == 6
        assert min(ids) >= 0
