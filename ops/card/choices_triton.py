"""The choice of experts of each row by one Triton kernel: `choose` of `choices.py`, bit by bit.

NOTE: products and sums must not be contracted, so the kernel is compiled without fusion.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shadowlane.ops.card.choices import FLOOR, NUMBERS
from shadowlane.ops.exponential import LEAST, ONE, POLYNOMIAL

HEAD = len(NUMBERS) - len(POLYNOMIAL)
WARPS = 1  # of a row: experts are few


@triton.jit
def _exponential(x, numbers, LEAST: tl.constexpr, HEAD: tl.constexpr, TERMS: tl.constexpr):
    inside = tl.where((x < 0.0) & (x >= LEAST), x, 0.0)
    twos = tl.floor(inside * tl.load(numbers) + 0.5)
    rest = (inside - twos * tl.load(numbers + 1)) - twos * tl.load(numbers + 2)
    found = rest * 0.0
    for term in tl.static_range(TERMS):
        found = found * rest + tl.load(numbers + HEAD + term)
    power = ((twos.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    found = tl.where(x < LEAST, 0.0, found * power)
    return tl.where(x < 0.0, found, 1.0)


@triton.jit
def _choose_kernel(logits, ids, weights, left_ids, left_weights, numbers, stride, num_experts,
                   top_k, NORMALISES: tl.constexpr, HAS_GATE: tl.constexpr, EXPERTS: tl.constexpr,
                   FLOOR: tl.constexpr, LEAST: tl.constexpr, ONE: tl.constexpr,
                   HEAD: tl.constexpr, TERMS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    index = tl.arange(0, EXPERTS)
    inside = index < num_experts
    found = tl.load(logits + row * stride + index, mask=inside, other=0.0)
    found = tl.where(found > -float("inf"), found, FLOOR)
    left = tl.where(inside, found, -float("inf"))
    largest = tl.max(left, axis=0)
    is_largest = found == largest  # infinite ones leave nothing that is a number
    below = tl.where(is_largest, 0.0, found) - tl.where(is_largest, 0.0, largest)
    parts = _exponential(below.to(tl.float64), numbers, LEAST, HEAD, TERMS)
    ranks = index * 0 - 1
    for rank in range(top_k):
        best = tl.max(left, axis=0)
        place = tl.min(tl.where(left == best, index, EXPERTS), axis=0)
        ranks = tl.where(index == place, rank, ranks)
        left = tl.where(index == place, -float("inf"), left)
    is_chosen = ranks >= 0
    counted = is_chosen if NORMALISES else inside
    units = tl.sum(tl.where(counted, tl.floor(parts * ONE + 0.5).to(tl.int64), 0), axis=0)
    weight = (parts * ONE / units.to(tl.float64)).to(tl.float32)
    at = row * top_k + ranks
    tl.store(ids + at, index.to(tl.int64), mask=is_chosen)
    tl.store(weights + at, weight, mask=is_chosen)
    tl.store(left_ids + at, index, mask=is_chosen)
    tl.store(left_weights + at, weight, mask=is_chosen)
    if HAS_GATE:
        gate = tl.load(logits + row * stride + num_experts)
        small = _exponential((-tl.abs(gate)).to(tl.float64), numbers, LEAST, HEAD, TERMS)
        factor = tl.where(gate >= 0.0, 1.0, small) / (small + 1.0)
        tl.store(logits + row * stride + num_experts, factor.to(tl.float32))


def choose_experts(
    router: torch.Tensor,
    num_experts: int,
    ids: torch.Tensor,
    weights: torch.Tensor,
    left: tuple[torch.Tensor, torch.Tensor],
    numbers: torch.Tensor,
    *,
    normalises: bool,
) -> None:
    """router: float32 [rows, num_experts], or one more, the logit of a shared expert's gate, which
    becomes its factor; ids: int64 [rows, top_k], weights: float32; left: where both go as well, the
    ids as int32, perhaps in memory of the host. numbers: NUMBERS, float64.
    """
    rows, top_k = ids.shape
    if rows:
        _choose_kernel[(rows,)](
            router, ids, weights, *left, numbers, router.stride(0), num_experts,
            top_k, NORMALISES=normalises, HAS_GATE=router.shape[1] > num_experts,
            EXPERTS=triton.next_power_of_2(num_experts), FLOOR=FLOOR, LEAST=LEAST, ONE=ONE,
            HEAD=HEAD, TERMS=len(POLYNOMIAL), num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
