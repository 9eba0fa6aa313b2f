"""Programs: what each lane does in one step under one placement, in symbols.

A program is relative. `Wait(lane, rel)` means: wait until the counter of `lane` has reached its
base at this step's start plus `rel`; a lane's counter is the number of its retired instructions.
The same programs serve decode and prefill.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    instructions: tuple[ComputeInstruction, ...] | tuple[Read, ...]
