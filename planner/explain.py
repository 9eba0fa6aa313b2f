"""A plan in rows, as plain data: where each group goes and why, predicted bytes and speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from shadowlane.planner.bounds import bounds
from shadowlane.planner.catalog import Catalog, Experts, Group
from shadowlane.planner.chunks import chunk_s
from shadowlane.planner.cost import CostModel, Workload
from shadowlane.planner.expanded import predicted_gain, why
from shadowlane.planner.hit_rate import curve_of, hit_rate
from shadowlane.planner.placement import Placement
from shadowlane.planner.simulate import simulate

PREFILL_ROWS = 256
WHY = {
    "all resident": "everything fits the budget",
    "pinned": "all that was not asked to stream fits the budget",
    "spread": "what stays is spread evenly over the step, by bytes, so the disk reads steadily",
    "spread by time": "what stays is spread over the step by compute time: reads stay steady",
    "spread groups": "whole groups stay, spread evenly over the step",
    "first layers": "the first layers stay; no spread was predicted faster",
    "cached experts": "what every token needs stays; experts share what RAM is left",
    "last layers": "the last layers stay; no spread was predicted faster",
}


def plan_report(
    catalog: Catalog, placement: Placement, cost: CostModel, *, emulated: str | None = None
) -> dict[str, Any]:
    """JSON-able. Bytes are exact; seconds are predicted, `measured` says from what.

    emulated: the name of the machine that `cost` describes, where it is not here.
    """
    decode = simulate(catalog, placement, cost)
    # A prompt's chunk, of the size that was measured; its mean row attends to half of it.
    chunk_rows = cost.measured_chunk or PREFILL_ROWS
    chunk = Workload("prefill", chunk_rows, max(1, chunk_rows // 2))
    gain = predicted_gain(catalog, placement, cost)
    prefill_s = simulate(catalog, placement, cost, workload=chunk).step_s * (1 - (gain or 0.0))
    if placement.subchunks > 1:
        chunk_rows = placement.subchunks * catalog.subchunk_rows
        prefill_s = chunk_s(catalog, placement, cost, chunk_rows)
    least = bounds(catalog, placement, cost)
    strategy = placement.strategy.split(",")[0]
    return {
        "placement_id": placement.placement_id,
        "strategy": placement.strategy,
        "why": WHY[strategy],
        "measured": cost.measured and emulated is None,
        "unmeasured": list(cost.unmeasured(catalog, placement.lanes)),
        "emulated": emulated is not None,
        "hardware": emulated,
        "budget": {"ram": placement.ram},
        "bytes": ram_parts(placement),
        "weights": weight_nbytes(catalog),
        "tiers": tiers(catalog, placement),
        "read_nbytes_per_step": placement.read_nbytes_per_step,
        "num_slots": placement.num_slots,
        "expert_slots": placement.expert_slots,
        "context_tokens": placement.context_tokens,
        "chunk_rows": placement.subchunks * catalog.subchunk_rows,
        "micro_batches": placement.micro_batches,
        "kv_pages": placement.kv_pages,
        "expected_hits": _expected_hits(catalog, placement),
        "predicted": {
            "prefill_rows": chunk_rows,
            "decode_step_s": decode.step_s,
            "decode_tok_per_s": 1 / decode.step_s if decode.step_s else None,
            "first_step_s": decode.first_step_s,
            "prefill_tok_per_s": chunk_rows / prefill_s if prefill_s else None,
            "bottleneck": decode.bottleneck,
            "busy_pct": busy_percent(decode.busy_s, decode.step_s),
            "resource_bound_s": least.resource_s,
            "resource": least.resource,
            "critical_path_bound_s": least.critical_path_s,
        },
        "copies": why(placement, gain),
        "groups": [_row(catalog, placement, group) for group in catalog.groups],
        "notes": list(placement.notes),
    }


def ram_parts(placement: Placement) -> dict[str, Any]:
    """What fills the RAM budget, in bytes."""
    return {
        "weights": placement.weights_nbytes,
        "experts": placement.experts_nbytes,
        "slots": placement.slots_nbytes,
        "kv": placement.kv_nbytes,
        "scratch": placement.scratch_nbytes,
        "constants": placement.constants_nbytes,
        "expanded": placement.expanded_nbytes,
        "total": placement.total_nbytes,
    }


def busy_percent(busy_s: Mapping[str, float], step_s: float) -> dict[str, float]:
    """How much of a step each lane works."""
    return {
        lane: round(100 * min(1.0, busy / step_s), 1) if step_s else 0.0
        for lane, busy in busy_s.items()
    }


def _expected_hits(catalog: Catalog, placement: Placement) -> dict[str, Any] | None:
    """What the prediction takes for granted of a mixture's cache; None where nothing is missing."""
    experts = catalog.experts
    if experts is None or placement.expert_slots >= experts.total:
        return None
    curve = curve_of(experts)
    return {
        "rate": hit_rate(experts, placement.expert_slots),
        "source": curve.source,
        "tokens": curve.tokens,
    }


def tiers(catalog: Catalog, placement: Placement) -> dict[str, int]:
    """Bytes of weights: what is in RAM, and what is only on disk. Not what a step reads of it."""
    on_disk = sum(b.held_nbytes for b in catalog.blocks if not placement.resident[b.index])
    if catalog.experts is not None:
        missing = catalog.experts.total - placement.expert_slots
        on_disk += missing * catalog.experts.held_nbytes
    return {"ram": placement.weights_nbytes + placement.experts_nbytes, "disk": on_disk}


def weight_nbytes(catalog: Catalog) -> dict[str, int]:
    """Bytes of the model's matrices, and of the whole pages that they take in a tier."""
    nbytes = sum(block.nbytes for block in catalog.blocks)
    held = sum(block.held_nbytes for block in catalog.blocks)
    if catalog.experts is not None:
        nbytes += catalog.experts.total * catalog.experts.nbytes
        held += catalog.experts.total * catalog.experts.held_nbytes
    return {"nbytes": nbytes, "held_nbytes": held}


def experts_in_ram(experts: Experts, slots: int, on_cards: Sequence[int]) -> list[int]:
    """Of each layer, how many of `slots` are its own on average; on_cards: what cards hold of it.

    What is on no card comes first, and layers share alike.
    """
    missing = [experts.per_layer - held for held in on_cards]
    left = max(0, slots - sum(missing))
    found = _shared(min(slots, sum(missing)), missing)
    return [own + more for own, more in zip(found, _shared(left, on_cards), strict=True)]


def _shared(count: int, weights: Sequence[int]) -> list[int]:
    """`count` in whole parts by `weights`, none above its weight where the sum is not."""
    total, ends = sum(weights), [0]
    for until in accumulate(weights):
        ends.append(count * until // total if total else 0)
    return [end - begin for begin, end in pairwise(ends)]


def _row(catalog: Catalog, placement: Placement, group: Group) -> dict[str, Any]:
    held = sum(catalog.blocks[i].held_nbytes for i in group.blocks)
    kept = sum(catalog.blocks[i].held_nbytes for i in group.blocks if placement.resident[i])
    if group.kind == "experts" and catalog.experts is not None:
        experts, layers = catalog.experts, catalog.sparse_groups
        slots = experts_in_ram(experts, placement.expert_slots, [0] * len(layers))
        own = slots[layers.index(group)]
        kept = own * experts.slot_nbytes
        held = kept + (experts.per_layer - own) * experts.held_nbytes
        is_whole = own == experts.per_layer
        why = "stay in RAM" if is_whole else "the most useful stay, the chosen are read"
    elif not group.blocks:
        tied = "rows of lm_head are gathered" if group.kind == "embed" else "keys and values in RAM"
        why = tied
    elif kept == held:
        why = "stays in RAM"
    elif group.kind == "embed":
        why = "rows are gathered from disk, a few KiB per token: it gets RAM last"
    elif kept:
        why = "part stays, part streams each step"
    else:
        why = "streams each step"
    return {
        "group": group.name,
        "kind": group.kind,
        "layout": group.layout,
        "nbytes": held,
        "ram_nbytes": kept,
        "disk_nbytes": held - kept,
        "lanes": {
            share.lane: [share.first_unit, share.last_unit]
            for share in placement.shares[group.name]
        },
        "units": group.units,
        "why": why,
    }
