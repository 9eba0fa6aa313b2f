"""A plan for an engine that is running: what is promised is kept, and little moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shadowlane.planner.catalog import Catalog
from shadowlane.planner.cost import CostModel
from shadowlane.planner.placement import InfeasiblePlan, Placement, Request
from shadowlane.planner.search import later_slots, place
from shadowlane.planner.trial import Option


def plan_again(
    catalog: Catalog,
    request: Request,
    cost: CostModel,
    now: Option,
    held: Mapping[str, float],
    *,
    anew: bool,
) -> Option:
    """The best plan for `request` at the context of `now`, which running sequences rely on.

    held: weights of lanes that have been set back and stay so.
    anew: free to move what is resident; otherwise as little as possible moves.

    Raises InfeasiblePlan.
    """
    if len(held) == len(request.lanes) and not any(held.values()):
        held = {}  # those that carried the load are gone: no reason is left to spare the others
    asked = replace(
        request, context=now.placement.context_tokens, subchunks=now.placement.subchunks
    )
    copies = now.placement.expanded
    # The ring that is there, or that there is room for, stays as it is, where the budget allows it.
    slots = now.placement.num_slots or asked.num_slots or later_slots(catalog.slot_nbytes)
    same_ring = replace(asked, num_slots=slots)
    current = None if anew else now.placement
    weights = held or None
    try:
        best = place(catalog, same_ring, cost, weights=weights, current=current, copies=copies)
    except InfeasiblePlan:
        best = place(catalog, asked, cost, weights=weights, current=current, copies=copies)
    kept = tuple(note for note in now.placement.notes if note.startswith("context "))
    notes = tuple(dict.fromkeys(kept + best.notes))
    option = Option.as_placed(f"re-plan ({best.strategy})", replace(best, notes=notes))
    return replace(option, weights={**option.weights, **held})


def moved_nbytes(catalog: Catalog, old: Placement, new: Placement) -> int:
    """Bytes that `new` wants in RAM and `old` has not."""
    return sum(
        block.held_nbytes
        for block in catalog.blocks
        if new.resident[block.index] and not old.resident[block.index]
    )
