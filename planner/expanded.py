"""Expanded copies: RAM that is left over, given to packed weights in the compute type for prompts.

A prompt's chunk is multiplied by torch, for which packed weights are expanded, a panel at a time
and in every chunk. A copy spares that. It takes several times the bytes of the weights and
helps prompts alone: decode goes on reading the packed blocks. So copies come last, when everything
is in RAM, and no re-plan makes new ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shadowlane.planner.catalog import Catalog
from shadowlane.planner.cost import CostModel, Workload
from shadowlane.planner.placement import Placement, Request, Share, show_nbytes
from shadowlane.planner.simulate import simulate

# What a prompt must gain for copies to be made unasked. The page cache, and whatever else runs,
# could use the same gigabytes, and filling them takes seconds at the start.
MIN_GAIN = 0.05


def with_copies(
    catalog: Catalog,
    request: Request,
    placement: Placement,
    cost: CostModel,
    existing: Sequence[int] | None,
) -> Placement:
    """`placement` with expanded copies in what is left of the budget, as `request` wants them.

    existing: blocks that have copies, to be kept or dropped; None: any block may get one.
    """
    wanted = [block.index for block in catalog.blocks if block.expanded_nbytes]
    if existing is not None:
        wanted = [index for index in wanted if index in set(existing)]
    elif request.expand == "never":
        return placement
    asked = request.expand == "always" and existing is None
    if not wanted:
        reason = "all weights are in the compute type"
        return _noted(placement, f"nothing to expand: {reason}") if asked else placement
    if not _is_whole(catalog, placement):
        reason = "not all weights are in RAM"
        return _noted(placement, f"nothing is expanded: {reason}") if asked else placement
    left = placement.ram - placement.total_nbytes
    chosen = []
    for index in wanted:
        if catalog.blocks[index].expanded_nbytes <= left:
            chosen.append(index)
            left -= catalog.blocks[index].expanded_nbytes
    copied = replace(
        placement, expanded=tuple(chosen), expanded_nbytes=_copies_nbytes(catalog, chosen)
    )
    gain = predicted_gain(catalog, copied, cost)
    if existing is None and request.expand == "spare" and (gain is None or gain < MIN_GAIN):
        return placement
    if not chosen:
        room = show_nbytes(placement.ram - placement.total_nbytes)
        return _noted(placement, f"nothing is expanded: {room} are left") if asked else placement
    return _noted(copied, f"{show_nbytes(copied.expanded_nbytes)} of RAM hold {why(copied, gain)}")


def predicted_gain(catalog: Catalog, placement: Placement, cost: CostModel) -> float | None:
    """The part of a chunk's time that the copies of `placement` spare; None: not measured."""
    rows, rate = cost.measured_chunk, cost.copies_save_s_per_byte
    if rows is None or rate is None:
        return None
    chunk = Workload("prefill", rows, max(1, rows // 2))  # a row attends to half of it, on average
    chunk_s = simulate(catalog, placement, cost, workload=chunk).step_s
    return min(1.0, _saved_s(catalog, placement.shares, placement.expanded, rate) / chunk_s)


def why(placement: Placement, gain: float | None) -> str:
    """What the copies are good for, in words."""
    if not placement.expanded:
        return "no packed weights have a copy in the compute type"
    what = "copies of packed weights in the compute type, which only prompts read"
    return what if gain is None else f"{what}: predicted to take {gain:.0%} off their time"


def _saved_s(
    catalog: Catalog, shares: Mapping[str, tuple[Share, ...]], copies: Iterable[int], rate: float
) -> float:
    """Seconds that copies of these blocks spare a sub-chunk.

    Lanes expand side by side: of each group the largest share counts.
    """
    by_group: dict[str, int] = {}
    for index in copies:
        block = catalog.blocks[index]
        by_group[block.group] = by_group.get(block.group, 0) + block.expanded_nbytes
    saved_s = 0.0
    for group in catalog.groups:
        nbytes = by_group.get(group.name, 0)
        if nbytes:
            largest = max(share.last_unit - share.first_unit for share in shares[group.name])
            saved_s += nbytes * rate * largest / group.units
    return saved_s


def _copies_nbytes(catalog: Catalog, copies: Iterable[int]) -> int:
    return sum(catalog.blocks[index].expanded_nbytes for index in copies)


def _is_whole(catalog: Catalog, placement: Placement) -> bool:
    """Whether RAM has everything, so that nothing else could use more of it."""
    experts = catalog.experts
    return all(placement.resident) and (experts is None or placement.expert_slots == experts.total)


def _noted(placement: Placement, note: str) -> Placement:
    return replace(placement, notes=(*placement.notes, note))
