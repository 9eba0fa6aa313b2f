"""Choices of experts by processors and by cards, for comparison."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shadowlane.ops import routes
from shadowlane.ops.card import choices
from shadowlane.ops.exponential import sigmoid

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


def by_torch(logits: np.ndarray, top_k: int, normalises: bool, device: str = "cpu") -> Chosen:
    router = torch.from_numpy(logits.copy()).to(device)
    ids = torch.zeros((len(logits), top_k), dtype=torch.int64, device=device)
    weights = torch.zeros((len(logits), top_k), device=device)
    choices.choose(router[:, :-1], ids, weights, normalises=normalises)
    gates = choices.sigmoid(router[:, -1])
    return ids.cpu().numpy(), weights.cpu().numpy(), gates.cpu().numpy()


def by_triton(logits: np.ndarray, top_k: int, normalises: bool, device: str = "cpu") -> Chosen:
    triton_kernels = pytest.importorskip("shadowlane.ops.card.choices_triton")
    router = torch.from_numpy(logits.copy()).to(device)
    ids = torch.zeros((len(logits), top_k), dtype=torch.int64, device=device)
    left_ids, weights = ids.int(), torch.zeros((len(logits), top_k), device=device)
    left_weights = weights.clone()
    numbers = torch.tensor(choices.NUMBERS, dtype=torch.float64, device=device)
    triton_kernels.choose_experts(
        router, router.shape[1] - 1, ids, weights, (left_ids, left_weights), numbers,
        normalises=normalises,
    )  # fmt: skip
    assert torch.equal(ids, left_ids.long())
    assert torch.equal(weights, left_weights)
    return ids.cpu().numpy(), weights.cpu().numpy(), router[:, -1].cpu().numpy()
