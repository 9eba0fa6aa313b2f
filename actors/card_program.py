"""A card's program for one phase of one placement, with everything decided that a step leaves open.

Blocks and experts that live on the card are views of its memory; of those that are brought only the
place in the sweep is known, since the slot follows from the step (`card_slots.py`). What crosses is
in `exchange.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from shadowlane.actors.arena import GATHER_COUNTER, LINK_COUNTER, ArenaLayout
from shadowlane.actors.blueprint import Blueprint
from shadowlane.actors.exchange import Crossings, crossings
from shadowlane.ops import table as t
from shadowlane.ops.card.experts import CardExpert
from shadowlane.ops.card.products import CardBlock
from shadowlane.ops.card.shares import Span
from shadowlane.ops.dots import DIRECT_LAYOUTS
from shadowlane.ops.layouts import LAYOUTS
from shadowlane.planner.catalog import router_of
from shadowlane.planner.placement import CardPart, Placement
from shadowlane.planner.profile import Phase
from shadowlane.planner.program import (
    ComputeInstruction,
    Program,
    Read,
    part_of,
    units_of_experts,
)

ELEMENT_NBYTES = {name: LAYOUTS[name].block_nbytes for name in DIRECT_LAYOUTS}
NOT_HERE = -1  # in a table of experts


@dataclass(frozen=True, slots=True)
class CounterWait:
    """Wait for counter `number` to come to field `base` of the step record, plus `rel`."""

    number: int
    base: int
    rel: int


@dataclass(frozen=True, slots=True)
class Choice:
    """What a layer's router chooses."""

    made: CounterWait  # when it has
    is_here: bool  # by this card


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """Experts of one layer: those that live on the card, or some of those that come for prompts."""

    layer: int  # counted among those that have experts
    is_first: bool  # of the instructions that this card has for the layer's
    resident: Mapping[int, CardExpert]
    brought: tuple[tuple[int, int], ...]  # (expert, its place in the sweep)
    layouts: tuple[str, str, str]  # of gate, up and down
    is_aligned: bool  # direct layouts lie at multiples of their elements' size
    choice: Choice
    stays: bool  # this card adds up what the layer's give: its rows do not cross


@dataclass(frozen=True, slots=True)
class LayerSum:
    """What the experts of one layer have given, added up on the card."""

    layer: int  # counted among those that have experts
    here: np.ndarray  # bool [experts]: computed on this card
    choice: Choice

    @property
    def has_others(self) -> bool:
        """Whether other lanes compute some."""
        return not self.here.all()


@dataclass(frozen=True, slots=True)
class Weights:
    """What an instruction multiplies by in one step, wherever on the card it lies."""

    blocks: Sequence[CardBlock]
    experts: Mapping[int, CardExpert]


@dataclass(frozen=True, slots=True)
class CardInstruction:
    """One of a program; experts, and the sum of a layer's behind them, are two of one."""

    group: str
    first_unit: int
    last_unit: int
    waits: tuple[CounterWait, ...]
    crossings: Crossings
    resident: tuple[CardBlock, ...]
    brought: tuple[tuple[int, int], ...]  # (block, its place in the sweep)
    retired: int  # where the lane's counter is at its end, counted from the step's beginning
    is_awaited: bool  # whether anybody waits for that
    part: tuple[int, int] = (0, 1)  # whose rows: which micro-batch, and of how many
    experts: LayerExperts | None = None
    sum: LayerSum | None = None
    routes: int | None = None  # of a router: its layer, counted among those that have experts


@dataclass(frozen=True, slots=True)
class CardProgram:
    instructions: tuple[CardInstruction, ...]
    kv_heads: Mapping[int, tuple[int, int]]  # by layer those it attends with, [first, last)


@dataclass(frozen=True, slots=True)
class _Card:
    """What all instructions of a program are compiled from."""

    blueprint: Blueprint
    placement: Placement
    phase: Phase
    part: CardPart
    homes: Mapping[int, int]
    places: Mapping[int, int]  # in the sweep, of what comes
    memory: torch.Tensor

    def block(self, block: int) -> CardBlock:
        return block_at(self.blueprint, block, self.memory, self.homes[block])


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
    """programs: of all lanes. homes: where on the card each block lies, and behind all blocks each
    routed expert. memory: all of the card's.

    Raises ValueError for a block or an expert that is neither there nor brought, and for rows of an
    embedding that is in RAM.
    """
    number = layout.card_of(placement.number_of(lane))
    assert number is not None, "only cards have such programs"
    stream = placement.stream_of(lane, phase)
    places = {block: place for place, block in enumerate(stream.sweep)}
    part = placement.cards[number]
    card = _Card(blueprint, placement, phase, part, homes, places, memory)
    crossing = crossings(blueprint.config, blueprint.groups, programs, lane)
    awaited = _awaited(programs, lane)
    catalog = {group.name: group for group in blueprint.catalog.groups}
    groups = {group.name: group for group in blueprint.groups}
    sparse = {router_of(group.name): n for n, group in enumerate(blueprint.catalog.sparse_groups)}
    found: list[CardInstruction] = []
    kv_heads: dict[int, tuple[int, int]] = {}
    for place, each in enumerate(programs[lane].instructions):
        crosses, retired = crossing[place], place + 1
        assert isinstance(each, ComputeInstruction)
        group = groups[each.group]
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
                resident.append(card.block(block))
            elif block in places:
                brought.append((block, places[block]))
            else:
                raise ValueError(f"block {block} of {each.group} is neither on {lane} nor brought")
        waits = [
            CounterWait(LINK_COUNTER + number, t.LINK_BASE + number, wait.rel)
            if wait.lane == stream.lane
            else _wait_for(placement, wait.lane, wait.rel)
            for wait in each.waits
        ]
        if group.kind == "embed":
            resident = _embedding(card, lane)
            if not resident:
                waits.append(CounterWait(GATHER_COUNTER, t.STEP, 0))
                row_nbytes = blueprint.sources[blueprint.embedding_blocks[0]].row_nbytes
                gathered = Span("gather", 0, row_nbytes)
                crosses = Crossings((*crosses.fetched, gathered), crosses.left)
        whole = CardInstruction(
            each.group,
            each.first_unit,
            each.last_unit,
            tuple(waits),
            crosses,
            tuple(resident),
            tuple(brought),
            retired,
            retired in awaited,
            part_of(catalog[each.group], each, placement.micro_batches_in(phase)),
            routes=sparse.get(each.group),
        )
        if group.kind == "experts":
            joins = [_wait_for(placement, wait.lane, wait.rel) for wait in each.joins]
            is_first = not found or found[-1].group != each.group
            found += _of_experts(card, programs, whole, joins, is_first)
        else:
            found.append(whole)
    return CardProgram(tuple(found), kv_heads)


def block_at(blueprint: Blueprint, block: int, memory: torch.Tensor, home: int) -> CardBlock:
    """A block whose enclosing range begins at `home` of the card's memory."""
    source = blueprint.sources[block]
    start = home + source.skew
    data = memory[start : start + source.num_rows * source.row_nbytes]
    return CardBlock(source.layout, data, source.num_rows, source.output_row, source.part)


def expert_places(blueprint: Blueprint, part: CardPart, homes: Mapping[int, int]) -> np.ndarray:
    """Where gate, up and down of each expert lie on a card, or NOT_HERE, for kernels to look up.

    int64 [layers, experts, 3].
    """
    experts = blueprint.catalog.experts
    if experts is None:
        return np.zeros((0, 0, 3), np.int64)
    places = np.full((experts.num_layers, experts.per_layer, 3), NOT_HERE, np.int64)
    for layer in range(experts.num_layers):
        for expert in part.experts_of(layer):
            home = homes[blueprint.expert_number(layer, expert)]
            places[layer, expert] = _places_of(blueprint, layer, expert, home)
    return places


def summed(program: CardProgram, layers: int, experts: int) -> np.ndarray:
    """Of the layers that the card adds up, the experts that it computes: bool [layers, experts]."""
    found = np.zeros((layers, experts), np.bool_)
    for each in program.instructions:
        if each.sum is not None:
            found[each.sum.layer] = each.sum.here
    return found


def _wait_for(placement: Placement, lane: str, rel: int) -> CounterWait:
    number = placement.number_of(lane)
    return CounterWait(number, t.LANE_BASE + number, rel)


def _awaited(programs: Mapping[str, Program], lane: str) -> set[int]:
    """How far the lane's counter has to come for somebody to go on: counted instructions."""
    found = {len(programs[lane].instructions)}  # for the engine
    for program in programs.values():
        for each in program.instructions:
            waits = each.consumers if isinstance(each, Read) else (*each.waits, *each.joins)
            found.update(wait.rel for wait in waits if wait.lane == lane)
    return found


def expert_at(
    blueprint: Blueprint, layer: int, expert: int, memory: torch.Tensor, home: int
) -> CardExpert:
    """An expert that lies as in a slot of RAM, from `home` of the card's memory on."""
    assert blueprint.experts is not None
    formats = blueprint.experts.formats[layer]
    places = _places_of(blueprint, layer, expert, home)
    gate, up, down = (
        CardBlock(each.layout, memory[at : at + each.rows * each.row_nbytes], each.rows)
        for each, at in zip(formats, places, strict=True)
    )
    return CardExpert(gate, up, down)


def _places_of(blueprint: Blueprint, layer: int, expert: int, home: int) -> tuple[int, ...]:
    assert blueprint.experts is not None
    source = blueprint.experts.sources[layer * blueprint.experts.catalog.per_layer + expert]
    return tuple(home + place for place in source.places)


def _of_experts(
    card: _Card,
    programs: Mapping[str, Program],
    whole: CardInstruction,
    joins: Sequence[CounterWait],
    is_first: bool,
) -> list[CardInstruction]:
    """What an instruction computes of a layer's experts, and their sum, if that is its last unit.

    joins: of the sum, when others have computed theirs.
    """
    blueprint, catalog, lane = card.blueprint, card.blueprint.catalog, card.part.lane
    layer = [one.name for one in catalog.sparse_groups].index(whole.group)
    num_experts = catalog.sparse_groups[layer].units - 1
    units = units_of_experts(catalog, card.placement, card.phase, lane, layer)
    chooser, rel = next(
        (name, number + 1)
        for name, number, one in _instructions(programs)
        if one.group == router_of(whole.group) and one.micro_batch == whole.part[0]
    )
    choice = Choice(_wait_for(card.placement, chooser, rel), chooser == lane)
    numbers = [n for n, unit in units.items() if whole.first_unit <= unit < whole.last_unit]
    found: list[CardInstruction] = []
    if numbers:
        stays = card.placement.shares_of(card.phase)[whole.group][-1].lane == lane
        experts = _experts(card, layer, numbers, choice, is_first=is_first, stays=stays)
        found.append(replace(whole, experts=experts))
    if whole.last_unit <= num_experts:
        return found
    here = np.zeros(num_experts, np.bool_)
    here[[number - blueprint.expert_number(layer, 0) for number in units]] = True
    total = replace(whole, waits=(*whole.waits, *joins), sum=LayerSum(layer, here, choice))
    if not found:
        return [total]
    fetched, left = whole.crossings.fetched, whole.crossings.left
    return [
        replace(found[0], crossings=Crossings(fetched, ()), is_awaited=False),
        replace(total, waits=tuple(joins), crossings=Crossings((), left)),
    ]


def _experts(
    card: _Card,
    layer: int,
    numbers: Sequence[int],
    choice: Choice,
    *,
    is_first: bool,
    stays: bool,
) -> LayerExperts:
    """numbers: of the experts. Raises ValueError for one that is neither there nor brought."""
    blueprint = card.blueprint
    assert blueprint.experts is not None
    formats = blueprint.experts.formats[layer]
    resident: dict[int, CardExpert] = {}
    brought: list[tuple[int, int]] = []
    is_aligned = True
    for number in numbers:
        expert = number - blueprint.expert_number(layer, 0)
        if number in card.homes:
            home = card.homes[number]
            is_aligned &= all(
                at % ELEMENT_NBYTES.get(one.layout, 1) == 0
                for one, at in zip(formats, _places_of(blueprint, layer, expert, home), strict=True)
            )
            resident[expert] = expert_at(blueprint, layer, expert, card.memory, home)
        elif number in card.places:
            brought.append((expert, card.places[number]))
        else:
            name = blueprint.catalog.sparse_groups[layer].name
            raise ValueError(
                f"expert {expert} of {name} is neither on {card.part.lane} nor brought"
            )
    gate, up, down = (one.layout for one in formats)
    return LayerExperts(
        layer, is_first, resident, tuple(brought), (gate, up, down), is_aligned, choice, stays
    )


def _instructions(
    programs: Mapping[str, Program],
) -> Iterator[tuple[str, int, ComputeInstruction]]:
    for lane, program in programs.items():
        for number, each in enumerate(program.instructions):
            if isinstance(each, ComputeInstruction):
                yield lane, number, each


def _embedding(card: _Card, lane: str) -> list[CardBlock]:
    """The table of embeddings; none where the disk lane gathers its rows.

    Raises ValueError where it is neither on the card nor left on disk.
    """
    blocks = card.blueprint.embedding_blocks
    if all(block in card.homes for block in blocks):
        return [card.block(block) for block in blocks]
    if any(card.placement.resident[block] for block in blocks):
        raise ValueError(
            f"embed must be a processor's where rows of its table are in RAM; got {lane}"
        )
    return []
