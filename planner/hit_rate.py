"""What part of a token's experts is in RAM when its routers choose them: expected, never known.

It decides how fast a mixture larger than RAM is, and three things can tell it, in this order:

measured    this run's own decode steps, as soon as there are some
remembered  how often earlier runs chose each expert of this model (`heat.py`)
assumed     nobody has run the model: halfway between routers that prefer nobody, for which a cache
            hits as often as it is large, and routers as uneven as recorded ones (`SKEW`). Models
            differ widely here, and the same model from text to text: expect the figure to be off
            by a quarter either way

Chunks of prompts choose nearly all experts of a layer, favourites or not: there a cache hits as
often as it is large.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from shadowlane.planner.catalog import Catalog, Experts, HitCurve

# Measured over 24,963 tokens of a model of 48 layers of 512 experts, top 10: this part of the
# experts of a layer, the hottest, takes that part of its choices.
SKEW = ((0.05, 0.19), (0.1, 0.32), (0.25, 0.59), (0.5, 0.85))


def hit_rate(experts: Experts, slots: int) -> float:
    """Part of the choices of decode steps that find their expert among `slots` in RAM.

    What the newest route reads has slots too, and is in nobody's way only where it was measured.
    """
    curve = curve_of(experts)
    if curve.source != "measured" and slots < experts.total:
        slots = max(0, slots - experts.top_k)
    return interpolate(curve.points, slots / experts.total)


def hit_rate_beside(experts: Experts, slots: int, on_cards: int) -> float:
    """The same of the choices that find their expert on no card, where the most used ones are."""
    if slots + on_cards >= experts.total:
        return 1.0
    if not on_cards:
        return hit_rate(experts, slots)
    there = interpolate(curve_of(experts).points, on_cards / experts.total)
    either = hit_rate(experts, slots + on_cards)
    return max(0.0, (either - there) / (1.0 - there)) if there < 1.0 else 1.0


def curve_of(experts: Experts) -> HitCurve:
    return experts.hits or assumed(experts.per_layer, experts.top_k)


@cache
def assumed(per_layer: int, top_k: int) -> HitCurve:
    """Halfway between even use and that of `SKEW`, where no token chooses an expert twice."""
    shares = ((0.0, 0.0), *SKEW, (1.0, 1.0))
    taken = [interpolate(shares, rank / per_layer) for rank in range(per_layer + 1)]
    points, before, over = [(0.0, 0.0)], 0.0, 0.0
    for rank in range(1, per_layer + 1):
        use = (taken[rank] - taken[rank - 1]) * top_k + over
        over = max(0.0, use - 1.0)  # goes to the next ones
        before += (use - over) / top_k
        part = rank / per_layer
        points.append((part, min(1.0, (part + before) / 2)))
    points[-1] = (1.0, 1.0)
    return HitCurve(tuple(points), "assumed")


def measured(experts: Experts, slots: int, rate: float, tokens: int) -> HitCurve:
    """From what decode steps found with so many slots."""
    part = slots / experts.total
    if part >= 1.0:
        return HitCurve(((0.0, 0.0), (1.0, 1.0)), "measured", tokens)
    return HitCurve(((0.0, 0.0), (part, rate), (1.0, 1.0)), "measured", tokens)


def with_measured(catalog: Catalog, slots: int, rate: float | None, tokens: int) -> Catalog:
    """The same model, with what this run tells of its experts' use; `rate` None: nothing yet."""
    if catalog.experts is None or rate is None:
        return catalog
    hits = measured(catalog.experts, slots, rate, tokens)
    return replace(catalog, experts=replace(catalog.experts, hits=hits))


def interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    """Between points by rising first value; outside, that of the nearest."""
    upper = bisect_left([point[0] for point in points], at)
    if upper == 0 or upper == len(points):
        return points[min(upper, len(points) - 1)][1]
    (low, low_value), (high, high_value) = points[upper - 1], points[upper]
    return low_value + (high_value - low_value) * (at - low) / (high - low)


def missing_nbytes(experts: Experts | None, slots: int) -> int:
    """Bytes that one token's experts are expected to cost in reads."""
    if experts is None:
        return 0
    missing = experts.num_layers * missing_of_layer(experts, slots, 1, is_decode=True)
    return round(missing * experts.held_nbytes)


def missing_of_layer(experts: Experts, slots: int, rows: int, *, is_decode: bool) -> float:
    """How many experts the rows of a step choose in one layer and RAM has not."""
    chosen = expected_distinct(experts.per_layer, experts.top_k, rows)
    rate = hit_rate(experts, slots) if is_decode else slots / experts.total
    return chosen * (1.0 - rate)


def expected_distinct(num_experts: int, top_k: int, rows: int) -> float:
    """Different experts that `rows` rows choose in one layer, if all are as likely."""
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** rows)


def upper_hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of points by rising first value, those of the least concave line above all of them."""
    hull: list[tuple[float, float]] = []
    for at, value in points:
        while len(hull) > 1:
            (low, low_value), (middle, middle_value) = hull[-2:]
            if (middle_value - low_value) * (at - low) > (value - low_value) * (middle - low):
                break
            hull.pop()
        hull.append((at, value))
    return hull
