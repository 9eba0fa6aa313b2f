"""The choice of experts on a card, with the same bits as `choose` of `ops/routes.py`.

In torch's operators, each of which rounds by itself; where Triton runs one kernel does all of it
(`choices_triton.py`).
"""

from __future__ import annotations

import torch

from shadowlane.ops.exponential import LEAST, LOG2_HIGH, LOG2_LOW, ONE, PER_LOG2, POLYNOMIAL

NUMBERS = (PER_LOG2, LOG2_HIGH, LOG2_LOW, *POLYNOMIAL)  # in a kernel's memory they are float64
FLOOR = -3.4e38  # in place of a logit that is no number, or below all others


def choose(
    logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *, normalises: bool
) -> None:
    """The largest of float32 logits [rows, experts], by falling value; the first of equals.

    ids: int64 [rows, top_k]; weights: float32 [rows, top_k], a softmax over all logits, or, where
    `normalises`, over the chosen ones.
    """
    top_k = ids.shape[1]
    values = torch.where(logits > -torch.inf, logits, FLOOR)
    chosen, places = values.sort(dim=-1, descending=True, stable=True)
    parts = exponential((chosen - chosen[:, :1]).double())
    counted = parts[:, :top_k] if normalises else parts
    units = in_units(counted).sum(-1, keepdim=True).double()
    ids.copy_(places[:, :top_k])
    weights.copy_(parts[:, :top_k] * ONE / units)


def exponential(x: torch.Tensor) -> torch.Tensor:
    """As in `ops/exponential.py`, of float64."""
    twos = (x.clamp(LEAST, 0.0) * PER_LOG2 + 0.5).floor().nan_to_num(0.0)
    rest = (x - twos * LOG2_HIGH) - twos * LOG2_LOW
    found = torch.zeros_like(x)
    for coefficient in POLYNOMIAL:
        found = found * rest + coefficient
    power = ((twos.long() + 1023) << 52).view(torch.float64)
    found = torch.where(x < LEAST, 0.0, found * power)
    return torch.where(x < 0.0, found, 1.0)


def in_units(parts: torch.Tensor) -> torch.Tensor:
    return (parts * ONE + 0.5).floor().long()


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Of float32, with the bits of `ops/exponential.py`."""
    small = exponential(-x.double().abs())
    return (torch.where(x >= 0.0, 1.0, small) / (small + 1.0)).float()
