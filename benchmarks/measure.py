"""Numbers of a run to numbers of a report: medians with spread, ratios per round, tables.

Every claim is a ratio between two things measured in turns within one run. A ratio of medians
would mix the machine's moods; so the ratio is taken per round, and its median and range shown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of a few measurements."""

    median: float
    low: float
    high: float
    count: int

    def text(self, digits: int = 2) -> str:
        if self.count == 1:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def spread(values: Iterable[float | None]) -> Spread | None:
    """Spread of the values that exist; nothing if none does."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    return Spread(median(known), known[0], known[-1], len(known))


def ratio_per_round(
    ours: Sequence[float | None], theirs: Sequence[float | None]
) -> list[float | None]:
    """ours / theirs for each round in which both were measured."""
    return [
        mine / other if mine is not None and other else None
        for mine, other in zip(ours, theirs, strict=True)
    ]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of all values do not exceed."""
    if not values:
        raise ValueError("percentile needs at least one value; got none")
    ordered = sorted(values)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank) - 1, 0)]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table for a README; columns are padded so that it also reads well as plain text."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
             for row in cells]  # fmt: skip
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def find_budget(
    resident_share: Callable[[int], float | None], target: float, low: int, high: int, step: int
) -> int:
    """The smallest budget in bytes, to within `step`, whose plan keeps `target` of the weights.

    `resident_share(budget)` is 0 to 1 and grows with the budget; None means that no plan fits.
    A target of 0 gives the smallest budget that works at all.
    """

    def is_enough(budget: int) -> bool:
        share = resident_share(budget)
        return share is not None and share >= target

    if not is_enough(high):
        raise ValueError(f"a budget of {high} must hold {target:.0%} of the weights; it does not")
    while high - low > step:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


def as_json(value: object) -> str:
    """JSON of results; spreads and other dataclasses become objects."""
    return json.dumps(value, indent=1, default=asdict)
