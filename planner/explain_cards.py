"""A plan over cards in rows, as plain data: where each group goes, predicted bytes and speeds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shadowlane.planner.card_question import question_over_cards
from shadowlane.planner.catalog import Catalog, Group
from shadowlane.planner.explain import busy_percent, experts_in_ram, ram_parts, weight_nbytes
from shadowlane.planner.hybrid_bounds import hybrid_bounds
from shadowlane.planner.pins import catalog_homes
from shadowlane.planner.placement import Placement, Request
from shadowlane.planner.plan_of import plan_of


def card_report(
    catalog: Catalog, placement: Placement, request: Request, *, is_emulated: bool
) -> dict[str, Any]:
    """As `plan_report`. All seconds are of the machine that the request describes.

    is_emulated: that machine is not here; otherwise its figures have been measured.
    """
    request = replace(request, subchunks=placement.subchunks)
    question = question_over_cards(catalog, request)
    homes = catalog_homes(catalog, request.pins, len(request.cards))
    plan = plan_of(catalog, placement, question.model)
    decode = question.times(plan)
    prompts = question.prompts
    assert prompts is not None
    prefill = question.times(plan, work=prompts.work)
    least = hybrid_bounds(replace(question, prompts=None))
    return {
        "placement_id": placement.placement_id,
        "strategy": placement.strategy,
        "why": "predicted fastest of all that were tried"
        if request.strategy == "auto"
        else "as it was asked for",
        "measured": not is_emulated,
        "unmeasured": [],
        "emulated": is_emulated,
        "hardware": question.machine.name,
        "budget": {"ram": placement.ram, **{each.lane: each.budget for each in placement.cards}},
        "bytes": {
            **ram_parts(placement),
            "cards": {
                card.lane: {
                    "weights": card.weights_nbytes,
                    "experts": card.experts_nbytes,
                    "slots": card.slots_nbytes,
                    "kv": card.kv_nbytes,
                    "total": card.total_nbytes,
                    "brought_per_token": _nbytes(catalog, card.decode_sweep),
                    "brought_per_chunk": _nbytes(catalog, card.prefill_sweep),
                }
                for card in placement.cards
            },
        },
        "weights": weight_nbytes(catalog),
        "copies_nbytes": copies_nbytes(catalog, placement),
        "tiers": card_tiers(catalog, placement),
        "read_nbytes_per_step": placement.read_nbytes_per_step,
        "num_slots": placement.num_slots,
        "expert_slots": placement.expert_slots,
        "context_tokens": placement.context_tokens,
        "chunk_rows": placement.subchunks * catalog.subchunk_rows,
        "micro_batches": placement.micro_batches,
        "kv_pages": placement.kv_pages,
        "expected_hits": None,
        "predicted": {
            "prefill_rows": prompts.work.rows,
            "decode_step_s": decode.step_s,
            "decode_tok_per_s": 1 / decode.step_s if decode.step_s else None,
            "first_step_s": decode.step_s,
            "prefill_tok_per_s": prompts.work.rows / prefill.step_s if prefill.step_s else None,
            "bottleneck": decode.bottleneck,
            "busy_pct": busy_percent(decode.busy_s, decode.step_s),
            "resource_bound_s": least.resource_s,
            "resource": "the busiest lane",
            "critical_path_bound_s": least.path_s,
        },
        "copies": "",
        "groups": [
            _row(catalog, placement, group, group.name in homes) for group in catalog.groups
        ],
        "notes": list(placement.notes),
    }


def card_tiers(catalog: Catalog, placement: Placement) -> dict[str, int]:
    """Bytes of weights in RAM, on each card, and of those that are on neither."""
    there = {
        f"vram:{card.lane[4:]}": _nbytes(catalog, card.resident) + card.experts_nbytes
        for card in placement.cards
    }
    on_cards = {index for card in placement.cards for index in card.resident}
    on_disk = sum(
        block.held_nbytes
        for block in catalog.blocks
        if not placement.resident[block.index] and block.index not in on_cards
    )
    if catalog.experts is not None:
        missing = catalog.experts.total - placement.expert_slots - placement.experts_on_cards
        on_disk += max(0, missing) * catalog.experts.held_nbytes
    ram = _nbytes(catalog, [b.index for b in catalog.blocks if placement.resident[b.index]])
    return {"ram": ram + placement.experts_nbytes, **there, "disk": on_disk}


def copies_nbytes(catalog: Catalog, placement: Placement) -> int:
    """Bytes in RAM of weights that are on cards too."""
    on_cards = {index for card in placement.cards for index in card.resident}
    twice = _nbytes(catalog, [index for index in on_cards if placement.resident[index]])
    if catalog.experts is not None:
        more = placement.expert_slots + placement.experts_on_cards - catalog.experts.total
        twice += max(0, more) * catalog.experts.slot_nbytes
    return twice


def _nbytes(catalog: Catalog, blocks: tuple[int, ...] | list[int]) -> int:
    return sum(catalog.held_nbytes(index) for index in blocks)


def _row(catalog: Catalog, placement: Placement, group: Group, is_pinned: bool) -> dict[str, Any]:
    in_ram = {index for index in group.blocks if placement.resident[index]}
    kept = _nbytes(catalog, list(in_ram))
    parts: dict[str, int] = {}
    brought, on_cards = 0, set[int]()
    for card in placement.cards:
        there = set(card.resident).intersection(group.blocks)
        on_cards |= there
        parts[card.lane] = _nbytes(catalog, list(there))
        brought += _nbytes(catalog, list(set(card.decode_sweep).intersection(group.blocks)))
    twice = _nbytes(catalog, list(in_ram & on_cards))
    on_disk = _nbytes(catalog, list(set(group.blocks) - in_ram - on_cards))
    if group.kind == "experts" and catalog.experts is not None:
        parts, kept, twice, on_disk = _experts(catalog, placement, group)
    held = kept + sum(parts.values()) - twice + on_disk
    why = _why(group, held, kept - twice, sum(parts.values()), brought, twice)
    return {
        "group": group.name,
        "kind": group.kind,
        "layout": group.layout,
        "nbytes": held,
        "ram_nbytes": kept,
        "vram_nbytes": parts,
        "disk_nbytes": on_disk,
        "copies_nbytes": twice,
        "lanes": {
            share.lane: [share.first_unit, share.last_unit]
            for share in placement.shares[group.name]
        },
        "units": group.units,
        "why": why + ", pinned" * is_pinned,
    }


def _experts(
    catalog: Catalog, placement: Placement, group: Group
) -> tuple[dict[str, int], int, int, int]:
    """Of a layer's experts: bytes on each card, in RAM, of these on a card too, only on disk."""
    experts, layers = catalog.experts, catalog.sparse_groups
    assert experts is not None, "the group has some"
    on_cards = [
        sum(len(card.experts_of(layer)) for card in placement.cards) for layer in range(len(layers))
    ]
    layer = layers.index(group)
    in_ram = experts_in_ram(experts, placement.expert_slots, on_cards)[layer]
    missing = experts.per_layer - on_cards[layer]
    parts = {
        card.lane: len(card.experts_of(layer)) * experts.slot_nbytes for card in placement.cards
    }
    twice, on_disk = max(0, in_ram - missing), max(0, missing - in_ram)
    slot = experts.slot_nbytes
    return parts, in_ram * slot, twice * slot, on_disk * experts.held_nbytes


_WITHOUT_WEIGHTS = {
    "attn": "keys and values are where they are computed",
    "embed": "rows of lm_head are gathered",
}


def _why(group: Group, held: int, in_ram: int, on_cards: int, brought: int, twice: int) -> str:
    """in_ram: bytes that are there alone; twice: that are on a card too."""
    if group.kind == "experts":
        return _why_experts(held, in_ram, on_cards) + ", copies of some in RAM" * (twice > 0)
    if not group.blocks:
        return _WITHOUT_WEIGHTS.get(group.kind, "in RAM")
    found = []
    if on_cards:
        found.append("lives on a card" if on_cards >= held else "part lives on a card")
    if brought:
        found.append("part comes over the link in each step")
    if in_ram and on_cards < held:
        found.append("computed in RAM" if not found else "the rest is computed in RAM")
    if held > in_ram + on_cards:
        found.append("the rest streams off the disk")
    if twice:
        found.append("a copy in RAM gives rows of the embedding")
    return ", ".join(found) or "in RAM"


def _why_experts(held: int, in_ram: int, on_cards: int) -> str:
    found = ["the most used live on cards"] if 0 < on_cards < held else []
    if on_cards >= held:
        found.append("all live on cards")
    if in_ram:
        found.append("the others are computed in RAM" if found else "computed in RAM")
    if held > in_ram + on_cards:
        found.append("what is missing is read when it is chosen")
    return ", ".join(found)
