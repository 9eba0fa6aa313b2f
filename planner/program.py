"""Programs: what each lane does in one step under one placement, in symbols.

A program is relative. `Wait(lane, rel)` means: wait until the counter of `lane` has reached its
base at this step's start plus `rel`; a lane's counter is the number of its retired instructions.
The same programs serve decode and prefill, unless a placement over cards has shares for each, or
prompts go through in several micro-batches. Then the program of each lane has its instructions once
for each micro-batch, in their order. A lane does one after the other, so its keys and values are
there for the rows behind them; it waits for others in the same micro-batch, and so lanes that have
other layers work on different ones at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shadowlane.planner.catalog import Catalog, Group
from shadowlane.planner.micro_batches import check_micro_batches
from shadowlane.planner.placement import DISK_LANE, Placement, Share, Stream
from shadowlane.planner.profile import Phase


@dataclass(frozen=True, slots=True)
class Wait:
    lane: str
    rel: int  # at least 1: retired instructions of that lane in this step


@dataclass(frozen=True, slots=True)
class ComputeInstruction:
    """The units [first_unit, last_unit) of a group.

    A lane has one instruction for its share in a group, or several over adjacent units where the
    share streams more blocks than half the ring can hold: slots are freed when an instruction
    retires, so one that needed more blocks than there are slots would wait for ever.
    """

    group: str
    first_unit: int
    last_unit: int
    # peers on the previous group (of routed experts: who adds them up), then at most one for what
    # is brought
    waits: tuple[Wait, ...]
    # of who adds up routed experts: peers that compute others of them, before it can end
    joins: tuple[Wait, ...] = ()
    micro_batch: int = (
        0  # of the chunk's, whose rows it is for; of `lm_head` the last, for all rows
    )


@dataclass(frozen=True, slots=True)
class Read:
    """A block goes to slot (reads since the sweep began) modulo num_slots: off the disk, or, on a
    link's lane, out of RAM, where the disk may have to have read it first."""

    block: int  # index into Catalog.blocks; behind them, a routed expert
    ordinal: int  # its place in the sweep
    consumers: tuple[Wait, ...]  # when all have passed, the slot of this read may be overwritten
    waits: tuple[Wait, ...] = ()  # on a link's lane: for the disk, where RAM has it in no slot


@dataclass(frozen=True, slots=True)
class Program:
    lane: str
    instructions: tuple[ComputeInstruction | Read, ...]  # all of one kind: a lane has one trade


class Streamed(NamedTuple):
    """A block, or a routed expert, that comes to a lane, and the units that it serves."""

    ordinal: int  # its place in the sweep
    first_unit: int
    last_unit: int


class Piece(NamedTuple):
    """One compute instruction before it is spelled out; cheap, for the simulator makes many."""

    group_index: int
    lane: str
    first_unit: int
    last_unit: int
    first_ordinal: int  # it needs streamed blocks of [first_ordinal, end_ordinal) of the sweep;
    end_ordinal: int  # equal: it needs none


def cut(
    catalog: Catalog,
    shares: Mapping[str, tuple[Share, ...]],
    sweep: Sequence[int],
    num_slots: int,
) -> list[Piece]:
    """`cut_over` for lanes that all take what comes off the disk."""
    disk = Stream(DISK_LANE, tuple(sweep), num_slots)
    return cut_over(catalog, shares, lambda lane: disk)


def cut_over(
    catalog: Catalog,
    shares: Mapping[str, tuple[Share, ...]],
    stream_of: Callable[[str], Stream],
) -> list[Piece]:
    """All compute instructions of a step, ordered by group, then by the last read they wait for.

    stream_of: what comes to each lane. Ordinals of a piece are places in its lane's sweep.

    Within a lane that is execution order. No piece spans more reads than the ring has slots, and
    none spans more than half where its blocks allow that, so that the lane that brings them fills
    one half while the other is consumed. Then no lane can wait for ever: the piece that waits for
    the earliest read is preceded only by pieces that wait for earlier ones or none.

    Raises ValueError where one unit needs more streamed blocks than there are slots.
    """
    lanes = {share.lane for each in shares.values() for share in each}
    streams = {lane: stream_of(lane) for lane in lanes}
    places: dict[str, dict[int, int]] = {}  # bringing lane -> block -> ordinal
    for stream in streams.values():
        if stream.lane not in places:
            places[stream.lane] = {block: place for place, block in enumerate(stream.sweep)}
    experts = {stream.lane: catalog.experts_in(stream.sweep) for stream in streams.values()}
    pieces: list[Piece] = []
    layer = -1  # counted among those that have experts
    for group_index, group in enumerate(catalog.groups):
        of_group: list[Piece] = []
        known: dict[str, list[Streamed]] = {}  # bringing lane -> what it brings of this group
        layer += group.kind == "experts"
        for lane, first, last in shares[group.name]:
            brings = streams[lane].lane
            ordinals = places[brings]
            if brings not in known:
                if group.kind == "experts" and ordinals:
                    numbers = [catalog.expert_number(layer, e) for e in experts[brings][layer]]
                    units = _units_of(group, shares[group.name], lane)
                    come = zip(numbers, units[len(units) - len(numbers) :], strict=True)
                    known[brings] = [Streamed(ordinals[n], unit, unit + 1) for n, unit in come]
                else:
                    blocks = [(index, catalog.blocks[index]) for index in group.blocks if ordinals]
                    known[brings] = [
                        Streamed(ordinals[index], block.first_unit, block.last_unit)
                        for index, block in blocks
                        if index in ordinals
                    ]
            if not known[brings]:
                of_group.append(Piece(group_index, lane, first, last, 0, 0))
                continue
            of_group += _pieces(
                group.name, group_index, streams[lane], known[brings], (lane, first, last)
            )
        if len(of_group) > 1:
            of_group.sort(key=lambda piece: piece.end_ordinal)
        pieces += of_group
    return pieces


def _units_of(group: Group, shares: Sequence[Share], lane: str) -> list[int]:
    """The routed experts that one lane computes, by rising unit; the sum is none."""
    units = [unit for share in shares if share.lane == lane for unit in range(*share[1:])]
    return [unit for unit in units if unit != group.units - 1]


def units_of_experts(
    catalog: Catalog, placement: Placement, phase: Phase, lane: str, layer: int
) -> dict[int, int]:
    """The routed experts of a layer that a card computes, by their numbers: the unit of each.

    First those that live there, then those that come, in the order in which they do.
    layer: counted among those that have experts. Raises ValueError where the card's share is of
    more units or fewer.
    """
    part = next(card for card in placement.cards if card.lane == lane)
    experts = list(part.experts_of(layer))
    brought = catalog.experts_in(part.stream(phase).sweep)
    experts += brought[layer] if brought else ()
    group = catalog.sparse_groups[layer]
    units = _units_of(group, placement.shares_of(phase)[group.name], lane)
    numbers = [catalog.expert_number(layer, expert) for expert in experts]
    return dict(zip(numbers, units, strict=True))


def _pieces(
    group: str,
    group_index: int,
    stream: Stream,
    blocks: Sequence[Streamed],
    share: tuple[str, int, int],
) -> Iterator[Piece]:
    """One lane's share of a group of which blocks are streamed."""
    lane, start, last = share
    half = max(1, stream.num_slots // 2)
    base = blocks[0].ordinal
    low = 0
    while start < last:
        while low < len(blocks) and blocks[low].last_unit <= start:
            low += 1
        high = low + half
        while high < len(blocks) and blocks[high].first_unit <= start:
            high += 1
        end = min(last, blocks[high].first_unit) if high < len(blocks) else last
        stop = min(high, len(blocks))
        while stop > low and blocks[stop - 1].first_unit >= end:
            stop -= 1
        if stop - low > stream.num_slots:
            raise ValueError(
                f"{group}: units {start}..{end} need {stop - low} "
                f"streamed blocks at once; the ring has {stream.num_slots} slots"
            )
        needed = (base + low, base + stop) if stop > low else (0, 0)
        yield Piece(group_index, lane, start, end, *needed)
        start = end


def build_programs(
    catalog: Catalog, placement: Placement, phase: Phase = "decode"
) -> dict[str, Program]:
    """One program per lane that exists: all compute lanes, also idle ones, links, and the disk.

    Raises ValueError for a placement with more micro-batches than it can have.
    """
    check_micro_batches(catalog, placement)
    shares = placement.shares_of(phase)
    streams = {each.name: placement.stream_of(each.name, phase) for each in placement.lanes}
    instructions: dict[str, list[ComputeInstruction]] = {lane.name: [] for lane in placement.lanes}
    links = {card.link: card.stream(phase).sweep for card in placement.cards}
    passed_on = _passed_on(placement.disk_stream(phase), links)
    sweeps = {DISK_LANE: placement.disk_stream(phase).sweep, **links}
    consumers: dict[str, list[dict[str, int]]] = {
        lane: [{} for _ in sweep] for lane, sweep in sweeps.items()
    }
    previous: dict[str, int] = {}  # lane -> retired instructions when its previous group is done
    current: dict[str, int] = {}  # the same for the group being built
    group_index = 0
    pieces = cut_over(catalog, shares, streams.__getitem__)
    for micro_batch, piece in _repeated(catalog, pieces, placement.micro_batches_in(phase)):
        if piece.group_index < group_index:  # the next micro-batch begins
            group_index, previous, current = 0, {}, {}
        elif piece.group_index != group_index:
            before = catalog.groups[group_index]
            if before.kind == "experts":  # who adds up has waited for all others
                adds_up = shares[before.name][-1].lane
                current = {adds_up: current[adds_up]}
            group_index, previous, current = piece.group_index, current, {}
        group = catalog.groups[group_index]
        brings = streams[piece.lane].lane
        waits: list[Wait] = []
        if piece.lane not in current:
            waits = [Wait(lane, rel) for lane, rel in previous.items() if lane != piece.lane]
        if piece.end_ordinal > piece.first_ordinal:
            waits.append(Wait(brings, piece.end_ordinal))
        program = instructions[piece.lane]
        program.append(
            ComputeInstruction(
                group.name,
                piece.first_unit,
                piece.last_unit,
                tuple(waits),
                micro_batch=micro_batch,
            )
        )
        current[piece.lane] = len(program)
        for ordinal in range(piece.first_ordinal, piece.end_ordinal):
            number = sweeps[brings][ordinal]
            block = None if catalog.is_expert(number) else catalog.blocks[number]
            if block is None or (
                block.first_unit < piece.last_unit and block.last_unit > piece.first_unit
            ):
                consumers[brings][ordinal][piece.lane] = len(program)
    _join_experts(catalog, instructions)
    programs = {lane: Program(lane, tuple(each)) for lane, each in instructions.items()}
    for link, ordinals in passed_on.items():
        for ordinal, place in ordinals.items():
            consumers[DISK_LANE][place][link] = ordinal + 1
    for lane, sweep in sweeps.items():
        programs[lane] = Program(
            lane,
            tuple(
                Read(
                    block,
                    ordinal,
                    tuple(Wait(*each) for each in consumers[lane][ordinal].items()),
                    _behind_disk(passed_on.get(lane, {}), ordinal),
                )
                for ordinal, block in enumerate(sweep)
            ),
        )
    return programs


def _repeated(catalog: Catalog, pieces: Sequence[Piece], count: int) -> Iterator[tuple[int, Piece]]:
    """(micro-batch, piece), all of one micro-batch after the other.

    The head has rows of any, and all of them are there at the end of the last.
    """
    for micro_batch in range(count):
        for piece in pieces:
            is_head = catalog.groups[piece.group_index].kind == "lm_head"
            if not is_head or micro_batch == count - 1:
                yield micro_batch, piece


def part_of(group: Group, instruction: ComputeInstruction, micro_batches: int) -> tuple[int, int]:
    """Whose rows an instruction computes: which micro-batch, and of how many."""
    return (0, 1) if group.kind == "lm_head" else (instruction.micro_batch, micro_batches)


def _passed_on(disk: Stream, sweeps: Mapping[str, Sequence[int]]) -> dict[str, dict[int, int]]:
    """By link, which of its ordinals are what the disk has read, at which place of its sweep."""
    places = {number: place for place, number in enumerate(disk.sweep)}
    return {
        link: {at: places[number] for at, number in enumerate(sweep) if number in places}
        for link, sweep in sweeps.items()
    }


def _behind_disk(places: Mapping[int, int], ordinal: int) -> tuple[Wait, ...]:
    return (Wait(DISK_LANE, places[ordinal] + 1),) if ordinal in places else ()


def _join_experts(catalog: Catalog, instructions: Mapping[str, list[ComputeInstruction]]) -> None:
    """Let who adds up the experts of a layer wait at its end for those who compute others."""
    units = {group.name: group.units for group in catalog.sparse_groups}
    if not units:
        return
    places: dict[str, dict[str, int]] = {}  # group -> lane -> place of its last instruction
    for lane, program in instructions.items():
        for place, each in enumerate(program):
            if each.group in units:
                places.setdefault(each.group, {})[lane] = place
    for group, of_group in places.items():
        for lane, place in of_group.items():
            each = instructions[lane][place]
            if each.last_unit == units[group] and len(of_group) > 1:
                joins = [Wait(peer, at + 1) for peer, at in of_group.items() if peer != lane]
                instructions[lane][place] = replace(each, joins=tuple(joins))
