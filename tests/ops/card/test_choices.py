"""What cards choose, in torch's operators and in Triton's, has the bits of what processors do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from card_layouts import needs_interpreter

from shadowlane.ops import routes
from shadowlane.ops.card import choices
from shadowlane.ops.exponential import exponential, sigmoid

Chosen = tuple[np.ndarray, np.ndarray, np.ndarray]  # ids, weights, gates


def rows_of(count: int) -> np.ndarray:
    """Logits [rows, count + 1] of all kinds; the last of each is a gate's."""
    random = np.random.default_rng(count)
    kinds = [
        4.0 * random.standard_normal((200, count + 1)),
        0.01 * random.standard_normal((100, count + 1)),
        300.0 * random.standard_normal((50, count + 1)),
        np.round(random.standard_normal((100, count + 1))),  # equals, and zeros of both signs
    ]
    logits = np.concatenate(kinds).astype(np.float32)
    broken = random.random(logits[:60].shape) < 0.2
    logits[:60][broken] = random.choice([np.nan, np.inf, -np.inf, -3.4e38], broken.sum())
    logits[:2] = np.nan
    return logits


def by_processors(logits: np.ndarray, top_k: int, normalises: bool) -> Chosen:
    count = logits.shape[1] - 1
    ids = np.zeros((len(logits), top_k), np.int32)
    weights = np.zeros((len(logits), top_k), np.float32)
    for row, values in enumerate(logits.copy()):
        routes.choose(
            values.ctypes.data, count, top_k, int(normalises),
            ids[row].ctypes.data, weights[row].ctypes.data,
        )  # fmt: skip
    gates = np.array([sigmoid(each) for each in logits[:, -1]], np.float32)
    return ids, weights, gates


def by_torch(logits: np.ndarray, top_k: int, normalises: bool) -> Chosen:
    router = torch.from_numpy(logits.copy())
    ids = torch.zeros((len(logits), top_k), dtype=torch.int64)
    weights = torch.zeros((len(logits), top_k))
    choices.choose(router[:, :-1], ids, weights, normalises=normalises)
    return ids.numpy(), weights.numpy(), choices.sigmoid(router[:, -1]).numpy()


def by_triton(logits: np.ndarray, top_k: int, normalises: bool) -> Chosen:
    triton_kernels = pytest.importorskip("shadowlane.ops.card.choices_triton")
    router = torch.from_numpy(logits.copy())
    ids = torch.zeros((len(logits), top_k), dtype=torch.int64)
    left_ids, weights = ids.int(), torch.zeros((len(logits), top_k))
    left_weights = weights.clone()
    numbers = torch.tensor(choices.NUMBERS, dtype=torch.float64)
    triton_kernels.choose_experts(
        router, router.shape[1] - 1, ids, weights, (left_ids, left_weights), numbers,
        normalises=normalises,
    )  # fmt: skip
    assert torch.equal(ids, left_ids.long())
    assert torch.equal(weights, left_weights)
    return ids.numpy(), weights.numpy(), router[:, -1].numpy()


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize(("count", "top_k"), [(4, 2), (8, 8), (60, 4), (128, 8)])
@pytest.mark.parametrize("choose", [by_torch, pytest.param(by_triton, marks=needs_interpreter)])
def test_cards_choose_with_the_bits_of_processors(
    choose: Callable[[np.ndarray, int, bool], Chosen], count: int, top_k: int, normalises: bool
) -> None:
    logits = rows_of(count)[:: 15 if choose is by_triton else 1]  # interpreted, row by row
    ids, weights, gates = by_processors(logits, top_k, normalises)
    found = choose(logits, top_k, normalises)
    assert np.array_equal(found[0], ids)
    assert np.array_equal(found[1].view(np.int32), weights.view(np.int32))
    assert np.array_equal(found[2].view(np.int32), gates.view(np.int32))


def test_the_exponential_is_as_good_as_a_library_s() -> None:
    values = np.concatenate([-np.logspace(-12, 1.9, 3000), [-0.0, 0.0, -79.9]])
    found = np.array([exponential(each) for each in values])
    assert np.abs(found / np.exp(values) - 1.0).max() < 1e-15
    assert exponential(-81.0) == exponential(-np.inf) == 0.0
    assert exponential(np.nan) == exponential(3.0) == 1.0
    assert np.array_equal(choices.exponential(torch.from_numpy(values)).numpy(), found)
