"""Micro-batches: the sub-chunks of a prompt's chunk in several groups, one behind the other.

Where layers are shared out over lanes, one lane works on a group while the next lane works on the
group before it. The programs of steps with rows of a prompt are the same instructions once for each
group (`program.py`); which sub-chunks a group has, every lane works out from the step's record, and
a short chunk leaves some without any (`ops/micro_batch.py`).
"""

from __future__ import annotations

from dataclasses import replace

from shadowlane.planner.catalog import Catalog, router_of
from shadowlane.planner.placement import Placement


def why_undivided(catalog: Catalog, placement: Placement) -> str | None:
    """Why chunks of prompts go through in one piece under a placement; None: they need not.

    What streams is there once in each step; halves of a layer share their memory where there are no
    cards (`actors/scratch.py`). What a router chose holds until it chooses for the next
    micro-batch, which only the lane knows that routes and computes all of the layer's experts.
    """
    if not placement.cards:
        return "there are no cards"
    for layer, group in enumerate(catalog.sparse_groups):
        if not _is_of_one_card(catalog, placement, layer):
            return f"no card has the router and all experts of layer {group.layer}"
    if placement.sweep:
        return f"{len(placement.sweep)} blocks are read off the disk in each step"
    for card in placement.cards:
        if card.prefill_sweep:
            return f"{card.link} brings {len(card.prefill_sweep)} blocks for each step of a prompt"
    return None


def _is_of_one_card(catalog: Catalog, placement: Placement, layer: int) -> bool:
    """Whether one card routes a layer of `sparse_groups`, has all of its experts, and adds up."""
    experts = catalog.experts
    assert experts is not None, "only mixtures have routed experts"
    shares, name = placement.shares_of("prefill"), catalog.sparse_groups[layer].name
    lanes = {share.lane for share in (*shares[name], *shares[router_of(name)])}
    return any(
        lanes == {card.lane} and len(card.experts_of(layer)) == experts.per_layer
        for card in placement.cards
    )


def check_micro_batches(catalog: Catalog, placement: Placement) -> None:
    """Raises ValueError for more micro-batches than a placement can have."""
    count = placement.micro_batches
    if not 1 <= count <= placement.subchunks:
        raise ValueError(
            f"micro_batches must be between 1 and the {placement.subchunks} sub-chunks of a chunk; "
            f"got {count}"
        )
    why = why_undivided(catalog, placement) if count > 1 else None
    if why is not None:
        raise ValueError(f"micro_batches must be 1 where {why}; got {count}")


def with_micro_batches(catalog: Catalog, placement: Placement, most: int) -> Placement:
    """`placement` with so many, or as many as a chunk has sub-chunks; with one, and a note that
    says why, where it cannot have more."""
    count = min(most, placement.subchunks)
    why = why_undivided(catalog, placement) if count > 1 else None
    if why is not None:
        note = f"prompts go through in one piece, not {count} micro-batches: {why}"
        return replace(placement, micro_batches=1, notes=(*placement.notes, note))
    return replace(placement, micro_batches=count)
