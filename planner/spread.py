"""Which blocks stay in RAM: candidates that fill a given number of bytes, exactly never more.

The default spreads what stays evenly over the step by error diffusion, so that the disk lane reads
at one steady pace and never has to pause for a full ring. The others are the simple layouts that
people choose by hand; the simulator decides between them.
"""

from __future__ import annotations

from collections.abc import Sequence

from shadowlane.planner.catalog import Catalog


def spread(
    nbytes: Sequence[int], pace: Sequence[float], budget: int, kept: Sequence[bool] = ()
) -> list[bool]:
    """Keep items, in order, such that what is *not* kept grows in step with `pace`.

    nbytes, pace: per item, its size and its part of the step (bytes again, or seconds). An item is
    kept once the bytes that should have been kept by its end reach half of it. For equal items of
    equal pace the number kept stays within a half of the even line, so no run of streamed ones is
    longer than (items / kept), rounded up. The sum kept never exceeds `budget`; further rounds hand
    out what rounding left.
    `kept`: items that are kept in any case, not counted in the budget.
    """
    keep = list(kept) or [False] * len(nbytes)
    left = budget
    for _ in range(3):
        total = sum(size for size, is_kept in zip(nbytes, keep, strict=True) if not is_kept)
        whole_pace = sum(pace)
        streamed = total - left  # bytes that have to stream whatever we do
        if streamed <= 0:
            return [True] * len(keep)
        if whole_pace <= 0 or left <= 0:
            return keep
        used, seen, passed = 0, 0, 0.0
        for index, size in enumerate(nbytes):
            passed += pace[index]
            if keep[index]:
                continue
            seen += size
            wanted = seen - streamed * passed / whole_pace
            if used + size <= left and used + size / 2 <= wanted:
                keep[index] = True
                used += size
        left -= used
        if not used:
            break
    for index, size in enumerate(nbytes):  # what no even line can use: the first that fit
        if not keep[index] and size <= left:
            keep[index] = True
            left -= size
    return keep


def first_fit(nbytes: Sequence[int], order: Sequence[int], budget: int) -> list[bool]:
    """Keep items by `order` until one does not fit, then whatever smaller ones still do."""
    keep = [False] * len(nbytes)
    for index in order:
        if nbytes[index] <= budget:
            keep[index] = True
            budget -= nbytes[index]
    return keep


def candidates(
    catalog: Catalog, items: Sequence[int], pace_s: Sequence[float], budget: int
) -> list[tuple[str, list[bool]]]:
    """Ways to keep `budget` bytes of the blocks `items`, simplest to defend first.

    items: blocks in consumption order. pace_s: for each, the compute time that passes from the
    block before it to its own end. Yields (name, keep per item).
    """
    nbytes = [catalog.blocks[index].held_nbytes for index in items]
    found = [
        ("spread", spread(nbytes, [float(size) for size in nbytes], budget)),
        ("spread by time", spread(nbytes, pace_s, budget)),
        ("spread groups", _whole_groups(catalog, items, nbytes, budget)),
        ("first layers", first_fit(nbytes, range(len(items)), budget)),
        ("last layers", first_fit(nbytes, range(len(items) - 1, -1, -1), budget)),
    ]
    different: list[tuple[str, list[bool]]] = []
    for name, keep in found:
        if all(keep != other for _, other in different):
            different.append((name, keep))
    return different


def _whole_groups(
    catalog: Catalog, items: Sequence[int], nbytes: Sequence[int], budget: int
) -> list[bool]:
    """Spread whole groups; the remainder goes to single blocks."""
    sizes: list[int] = []
    member: list[int] = []  # per item, the position of its group in `sizes`
    last = ""
    for index, size in zip(items, nbytes, strict=True):
        group = catalog.blocks[index].group
        if group != last:
            sizes.append(0)
            last = group
        sizes[-1] += size
        member.append(len(sizes) - 1)
    keep_group = spread(sizes, [float(size) for size in sizes], budget)
    keep = [keep_group[position] for position in member]
    left = budget - sum(size for size, is_kept in zip(nbytes, keep, strict=True) if is_kept)
    return spread(nbytes, [float(size) for size in nbytes], left, keep)
