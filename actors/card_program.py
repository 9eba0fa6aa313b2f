"""A card's program for one phase of one placement, with everything decided that a step leaves open.

Blocks that live on the card are views of its memory; of those that are brought only the place in
the sweep is known, since the slot follows from the step. What crosses is in `exchange.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shadowlane.actors.arena import LINK_COUNTER, ArenaLayout
from shadowlane.actors.blueprint import Blueprint
from shadowlane.actors.exchange import Crossings, crossings
from shadowlane.ops import table as t
from shadowlane.ops.card.products import CardBlock
from shadowlane.planner.placement import Placement
from shadowlane.planner.profile import Phase
from shadowlane.planner.program import ComputeInstruction, Program

NOT_ON_CARDS = ("embed", "router", "experts")  # the planner leaves them to processors


@dataclass(frozen=True, slots=True)
class CounterWait:
    """Wait for counter `number` to come to field `base` of the step record, plus `rel`."""

    number: int
    base: int
    rel: int


@dataclass(frozen=True, slots=True)
class CardInstruction:
    group: str
    first_unit: int
    last_unit: int
    waits: tuple[CounterWait, ...]
    crossings: Crossings
    resident: tuple[CardBlock, ...]
    brought: tuple[tuple[int, int], ...]  # (block, its place in the sweep)


@dataclass(frozen=True, slots=True)
class CardProgram:
    instructions: tuple[CardInstruction, ...]
    kv_heads: Mapping[int, tuple[int, int]]  # by layer those it attends with, [first, last)


def compile_program(
    blueprint: Blueprint,
    layout: ArenaLayout,
    placement: Placement,
    programs: Mapping[str, Program],
    lane: str,
    phase: Phase,
    homes: Mapping[int, int],
    memory: torch.Tensor,
) -> CardProgram:
    """programs: of all lanes. homes: where on the card each block lies. memory: all of the card's.

    Raises ValueError for a block that is neither there nor brought, and for kinds of groups that
    cards do not compute.
    """
    card = layout.card_of(placement.number_of(lane))
    assert card is not None, "only cards have such programs"
    stream = placement.stream_of(lane, phase)
    places = {block: place for place, block in enumerate(stream.sweep)}
    crossing = crossings(blueprint.config, blueprint.groups, programs, lane)
    catalog = {group.name: group for group in blueprint.catalog.groups}
    groups = {group.name: group for group in blueprint.groups}
    found: list[CardInstruction] = []
    kv_heads: dict[int, tuple[int, int]] = {}
    for each, crosses in zip(programs[lane].instructions, crossing, strict=True):
        assert isinstance(each, ComputeInstruction)
        group = groups[each.group]
        if group.kind in NOT_ON_CARDS:
            raise ValueError(f"{each.group} must be a processor's; {lane} computes no {group.kind}")
        if group.kind == "attn":
            assert group.layer is not None
            first, last = kv_heads.get(group.layer, (each.first_unit, each.last_unit))
            heads = min(first, each.first_unit), max(last, each.last_unit)
            kv_heads[group.layer] = heads
        resident: list[CardBlock] = []
        brought: list[tuple[int, int]] = []
        for block in catalog[each.group].blocks:
            units = blueprint.catalog.blocks[block]
            if units.first_unit >= each.last_unit or units.last_unit <= each.first_unit:
                continue
            if block in homes:
                resident.append(block_at(blueprint, block, memory, homes[block]))
            elif block in places:
                brought.append((block, places[block]))
            else:
                raise ValueError(f"block {block} of {each.group} is neither on {lane} nor brought")
        waits = tuple(
            CounterWait(LINK_COUNTER + card, t.LINK_BASE + card, wait.rel)
            if wait.lane == stream.lane
            else CounterWait(
                placement.number_of(wait.lane),
                t.LANE_BASE + placement.number_of(wait.lane),
                wait.rel,
            )
            for wait in each.waits
        )
        found.append(
            CardInstruction(
                each.group,
                each.first_unit,
                each.last_unit,
                waits,
                crosses,
                tuple(resident),
                tuple(brought),
            )
        )
    return CardProgram(tuple(found), kv_heads)


def block_at(blueprint: Blueprint, block: int, memory: torch.Tensor, home: int) -> CardBlock:
    """A block whose enclosing range begins at `home` of the card's memory."""
    source = blueprint.sources[block]
    start = home + source.skew
    data = memory[start : start + source.num_rows * source.row_nbytes]
    return CardBlock(source.layout, data, source.num_rows, source.output_row, source.part)
