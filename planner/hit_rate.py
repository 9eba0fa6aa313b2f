"""How many of a token's experts are in RAM, as long as nobody has measured it.

Routers favour some experts, so a cache hits more often than its size alone would say. The curve is
that of Qwen3-30B-A3B (48 layers of 128 experts, 8 chosen): how often the hottest experts of each
layer were chosen in recorded text. What a model really does is measured while it runs.
"""

from __future__ import annotations

from bisect import bisect_left

from shadowlane.planner.catalog import Experts

# (part of the experts that is in RAM, part of the choices that hit them)
RECORDED = ((0.0, 0.0), (0.05, 0.20), (0.10, 0.34), (0.25, 0.65), (0.50, 0.89), (1.0, 1.0))


def assumed_hit_rate(slots: int, num_experts: int) -> float:
    """Part of the choices that find their expert in RAM when `slots` of `num_experts` are there."""
    part = min(1.0, slots / max(1, num_experts))
    upper = max(1, bisect_left([point[0] for point in RECORDED], part))
    (low, low_rate), (high, high_rate) = RECORDED[upper - 1], RECORDED[upper]
    return low_rate + (high_rate - low_rate) * (part - low) / (high - low)


def missing_nbytes(experts: Experts | None, slots: int) -> int:
    """Bytes that one token's experts are expected to cost in reads."""
    if experts is None:
        return 0
    return round(experts.num_layers * missing_nbytes_of_layer(experts, slots, 1, is_decode=True))


def missing_nbytes_of_layer(experts: Experts, slots: int, rows: int, *, is_decode: bool) -> float:
    """Bytes of what the rows of a step choose in one layer and RAM has not."""
    chosen = expected_distinct(experts.per_layer, experts.top_k, rows)
    # what most rows of a chunk choose in the end is everything, whether it is a favourite or not
    part = slots / experts.total
    rate = assumed_hit_rate(slots, experts.total) if is_decode else part
    return chosen * (1.0 - rate) * experts.held_nbytes


def expected_distinct(num_experts: int, top_k: int, rows: int) -> float:
    """Different experts that `rows` rows choose in one layer, if all are as likely."""
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** rows)
