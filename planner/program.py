"""Programs: what each lane does in one step under one placement, in symbols.

A program is relative. `Wait(lane, rel)` means: wait until the counter of `lane` has reached its
base at this step's start plus `rel`; a lane's counter is the number of its retired instructions.
The same programs serve decode and prefill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shadowlane.planner.catalog import Catalog
from shadowlane.planner.placement import DISK_LANE, Placement, Share


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
    waits: tuple[Wait, ...]  # peers on the previous group, then at most one for the disk lane


@dataclass(frozen=True, slots=True)
class Read:
    """The disk lane reads `block` into slot (reads since the sweep began) modulo num_slots."""

    block: int  # index into Catalog.blocks
    ordinal: int  # its place in the sweep
    consumers: tuple[Wait, ...]  # when all have passed, the slot of this read may be overwritten


@dataclass(frozen=True, slots=True)
class Program:
    lane: str
    instructions: tuple[ComputeInstruction | Read, ...]  # all of one kind: a lane has one trade


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
    """All compute instructions of a step, ordered by group, then by the last read they wait for.

    Within a lane that is execution order. No piece spans more reads than the ring has slots, and
    none spans more than half where its blocks allow that, so that the disk lane fills one half
    while the other is consumed. Then no lane can wait for ever: the piece that waits for the
    earliest read is preceded only by pieces that wait for earlier ones or none.

    Raises ValueError where one unit needs more streamed blocks than there are slots.
    """
    ordinals: dict[int, int] = {block: ordinal for ordinal, block in enumerate(sweep)}
    half = max(1, num_slots // 2)
    pieces: list[Piece] = []
    for group_index, group in enumerate(catalog.groups):
        streamed = [index for index in group.blocks if index in ordinals] if ordinals else []
        if not streamed:
            for lane, first, last in shares[group.name]:
                pieces.append(Piece(group_index, lane, first, last, 0, 0))
            continue
        blocks = [catalog.blocks[index] for index in streamed]
        base = ordinals[streamed[0]]
        of_group: list[Piece] = []
        for lane, first, last in shares[group.name]:
            start, low = first, 0
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
                if stop - low > num_slots:
                    raise ValueError(
                        f"{group.name}: units {start}..{end} need {stop - low} streamed blocks at "
                        f"once; the ring has {num_slots} slots"
                    )
                needed = (base + low, base + stop) if stop > low else (0, 0)
                of_group.append(Piece(group_index, lane, start, end, *needed))
                start = end
        of_group.sort(key=lambda piece: piece.end_ordinal)
        pieces.extend(of_group)
    return pieces


def build_programs(catalog: Catalog, placement: Placement) -> dict[str, Program]:
    """One program per lane that exists: all compute lanes, also idle ones, and the disk lane."""
    instructions: dict[str, list[ComputeInstruction]] = {lane.name: [] for lane in placement.lanes}
    consumers: list[dict[str, int]] = [{} for _ in placement.sweep]
    ordinals = {block: ordinal for ordinal, block in enumerate(placement.sweep)}
    previous: dict[str, int] = {}  # lane -> retired instructions when its previous group is done
    current: dict[str, int] = {}  # the same for the group being built
    group_index = 0
    for piece in cut(catalog, placement.shares, placement.sweep, placement.num_slots):
        if piece.group_index != group_index:
            group_index, previous, current = piece.group_index, current, {}
        group = catalog.groups[group_index]
        waits: list[Wait] = []
        if piece.lane not in current:
            waits = [Wait(lane, rel) for lane, rel in previous.items() if lane != piece.lane]
        if piece.end_ordinal > piece.first_ordinal:
            waits.append(Wait(DISK_LANE, piece.end_ordinal))
        program = instructions[piece.lane]
        program.append(
            ComputeInstruction(group.name, piece.first_unit, piece.last_unit, tuple(waits))
        )
        current[piece.lane] = len(program)
        for ordinal in range(piece.first_ordinal, piece.end_ordinal):
            block = catalog.blocks[placement.sweep[ordinal]]
            if block.first_unit < piece.last_unit and block.last_unit > piece.first_unit:
                consumers[ordinal][piece.lane] = len(program)
    programs = {lane: Program(lane, tuple(each)) for lane, each in instructions.items()}
    programs[DISK_LANE] = Program(
        DISK_LANE,
        tuple(
            Read(block, ordinal, tuple(Wait(*each) for each in consumers[ordinal].items()))
            for block, ordinal in ordinals.items()
        ),
    )
    return programs
