"""What tables say of routed experts: where routes are, who has which expert, and who chooses."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shadowlane.actors.arena import READY_COUNTER, REQUEST_COUNTER, SUMMED_COUNTER, ArenaLayout
from shadowlane.actors.blueprint import Blueprint
from shadowlane.actors.scratch import route_layout, router_stride
from shadowlane.ops import table as t
from shadowlane.planner.catalog import router_of
from shadowlane.planner.placement import Placement
from shadowlane.planner.profile import Phase
from shadowlane.planner.program import ComputeInstruction


def expert_geometry(blueprint: Blueprint, layout: ArenaLayout) -> np.ndarray:
    """The fields of a geometry that tell of experts, all others 0: for the disk lane."""
    geometry = np.zeros(t.GEOMETRY_FIELDS, np.int64)
    geometry[t.ABORT], geometry[t.COUNTERS] = layout.abort, layout.counters
    geometry[t.THIS_CARD] = -1
    for field, value in expert_fields(blueprint, layout).items():
        geometry[field] = value
    return geometry


def expert_fields(blueprint: Blueprint, layout: ArenaLayout) -> dict[int, int]:
    """The part of the geometry that describes the experts of a mixture; 0 in a dense model."""
    moe, scratch = blueprint.config.moe, layout.scratch
    fields = {
        t.ROUTES: scratch["routes"],
        t.ROUTE_NUMBER: layout.route_numbers,
        t.EXPERT_WORDS: scratch["expert_words"],
        t.EXPERT_PLACES: scratch["expert_places"],
        t.EXPERT_SLOTS: layout.expert_slots,
        t.READY_COUNTER: READY_COUNTER,
        t.REQUEST_COUNTER: REQUEST_COUNTER,
        t.SUMMED_COUNTER: SUMMED_COUNTER,
        t.EXPERT_ACTIVATED: scratch["expert_activated"],
        t.EXPERT_OUTPUT: scratch["expert_output"],
        t.EXPERT_OUTPUT_CHUNK: scratch["expert_output_chunk"],
        t.ROUTER_STRIDE: router_stride(blueprint.config),
        t.SWIGLU: -1,
    }
    offsets: dict[str, int] = {}
    if moe is not None and blueprint.experts is not None:
        offsets = route_layout(blueprint.config, layout.step_rows)
        fields |= {
            t.NUM_EXPERTS: moe.num_experts,
            t.TOP_K: moe.top_k,
            t.EXPERT_INNER: moe.inner,
            t.NORMALISES_TOP_K: int(moe.norm_topk or moe.softmax_chosen),
            t.EXPERT_NBYTES: blueprint.experts.catalog.slot_nbytes,
        }
        if moe.swiglu_limit > 0:
            fields[t.SWIGLU] = layout.swiglu
    else:
        for field in (t.NUM_EXPERTS, t.TOP_K, t.EXPERT_INNER, t.NORMALISES_TOP_K, t.EXPERT_NBYTES):
            fields[field] = 0
    for field, name in (
        (t.ROUTE_NBYTES, "nbytes"),
        (t.ROUTE_IDS, "ids"),
        (t.ROUTE_WEIGHTS, "weights"),
        (t.ROUTE_STARTS, "starts"),
        (t.ROUTE_PAIRS, "pairs"),
        (t.ROUTE_ORDER, "order"),
        (t.ROUTE_MISSING, "missing"),
        (t.ROUTE_HALVES, "halves"),
        (t.ROUTE_WHOLES, "wholes"),
        (t.ROUTE_GUESSES, "guesses"),
    ):
        fields[field] = offsets.get(name, 0)
    return fields


def expert_tables(
    blueprint: Blueprint,
    placement: Placement,
    homes: Mapping[int, int],
    items: list[tuple[int, ...]],
    phase: Phase,
) -> dict[int, int]:
    """Append, for each sparse layer of which cards compute experts, an item for each expert.

    Returns where each layer's begin.
    """
    experts = blueprint.catalog.experts
    found: dict[int, int] = {}
    if experts is None:
        return found
    brought = [blueprint.catalog.experts_in(part.stream(phase).sweep) for part in placement.cards]
    for layer in range(experts.num_layers):
        card_of = {
            expert: card
            for card, part in enumerate(placement.cards)
            for expert in (*part.experts_of(layer), *brought[card][layer])
        }
        if not card_of:
            continue
        found[layer] = len(items)
        for expert in range(experts.per_layer):
            number = blueprint.expert_number(layer, expert)
            columns = {t.CARD: card_of.get(expert, -1), t.CARD_HOME: homes.get(number, -1)}
            items.append(tuple(columns.get(column, -1) for column in range(t.ITEM_COLUMNS)))
    return found


def expert_tiles(
    blueprint: Blueprint,
    layer: int,
    instruction: ComputeInstruction,
    units: Mapping[int, int],
    homes: Mapping[int, int],
    ordinals: Mapping[int, int],
) -> list[tuple[int, ...]]:
    """Prefill items of a card: the experts of an instruction. units: of all that the card has."""
    tiles = []
    for number, unit in units.items():
        if instruction.first_unit <= unit < instruction.last_unit:
            columns = {
                t.EXPERT: number - blueprint.expert_number(layer, 0),
                t.EXPERT_HOME: homes.get(number, -1),
                t.EXPERT_ORDINAL: ordinals.get(number, -1),
            }
            tiles.append(tuple(columns.get(column, -1) for column in range(t.ITEM_COLUMNS)))
    return tiles


def routing_card(layout: ArenaLayout, placement: Placement, phase: Phase, experts: str) -> bool:
    """Whether a card chooses the experts of a layer and leaves the rest of the route to others.

    One that is here does; an emulated one's lane is a processor's, which does so of micro-batches
    alone. experts: name of their group.
    """
    if layout.is_emulated and placement.micro_batches_in(phase) == 1:
        return False
    chooser = placement.shares_of(phase)[router_of(experts)][0].lane
    return layout.card_of(placement.number_of(chooser)) is not None


def routes_of_cards(
    blueprint: Blueprint, layout: ArenaLayout, placement: Placement, phase: Phase
) -> tuple[np.ndarray, np.ndarray]:
    """Layers that a card routes and of which no processor computes an expert, for `mark_all`.

    Returns (int64 [layers, INSTRUCTION_COLUMNS], int64 [items, ITEM_COLUMNS]).
    """
    layers = []
    for layer, group in enumerate(blueprint.catalog.sparse_groups):
        lanes = {share.lane for share in placement.shares_of(phase)[group.name]}
        numbers = {placement.number_of(lane) for lane in lanes}
        if not routing_card(layout, placement, phase, group.name):
            continue
        if all(layout.card_of(number) is not None for number in numbers):
            layers.append(layer)
    items: list[tuple[int, ...]] = []
    tables = expert_tables(blueprint, placement, {}, items, phase) if layers else {}
    rows = np.full((len(layers), t.INSTRUCTION_COLUMNS), -1, np.int64)
    for row, layer in zip(rows, layers, strict=True):
        row[t.SPARSE_LAYER], row[t.CARD_EXPERTS] = layer, tables[layer]
    return rows, np.array(items, np.int64).reshape(len(items), t.ITEM_COLUMNS)
