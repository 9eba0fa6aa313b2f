"""What the disk lane reads round and round, and when a slot of its ring is free again.

The blocks and their order are those of a placement, the same in every phase; where routed experts
are among them, of one phase. Who uses a block depends on the phase of the step, which is known once
the step's record is filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shadowlane.actors.arena import LINK_COUNTER, STEP_COUNTER, Arena, ArenaLayout
from shadowlane.actors.records import record_header
from shadowlane.ops import table as t
from shadowlane.ops.atomics import counter_value
from shadowlane.planner.placement import DISK_LANE
from shadowlane.planner.profile import Phase
from shadowlane.planner.program import Program, Read

Consumers = tuple[tuple[tuple[int, int], ...], ...]  # per place of the sweep: (counter, rel)


@dataclass(frozen=True, slots=True)
class Sweep:
    """What the lane reads under one placement.

    The engine's step `first_step + k` begins at ordinal `base + k * len(blocks)`, whatever it
    carries.
    """

    blocks: tuple[int, ...]  # and, behind all of them, routed experts
    consumers: Mapping[Phase, Consumers]  # when all have come so far in a step, a slot is free
    num_slots: int
    base: int
    first_step: int

    @staticmethod
    def of(
        programs: Mapping[Phase, Mapping[str, Program]],
        num_slots: int,
        base: int,
        first_step: int,
        counters: Mapping[str, int],
    ) -> Sweep:
        """programs: of decode, and of prefill where they differ. counters: the number of each
        lane's."""
        of_phase = {phase: _reads(each[DISK_LANE]) for phase, each in programs.items()}
        consumers: dict[Phase, Consumers] = {
            phase: tuple(
                tuple((counters[wait.lane], wait.rel) for wait in read.consumers) for read in reads
            )
            for phase, reads in of_phase.items()
        }
        consumers.setdefault("prefill", consumers["decode"])
        blocks = tuple(read.block for read in of_phase["decode"])
        return Sweep(blocks, consumers, num_slots, base, first_step)

    def step_of(self, ordinal: int) -> int:
        """The number of the step that uses it."""
        return self.first_step + (ordinal - self.base) // len(self.blocks)


def _reads(program: Program) -> list[Read]:
    return [each for each in program.instructions if isinstance(each, Read)]


def wanted_counters(
    arena: Arena, layout: ArenaLayout, sweep: Sweep, ordinal: int
) -> list[tuple[int, int]]:
    """(counter, value) of all who use what was read, once its step is filled; none: it is over."""
    number = sweep.step_of(ordinal)
    header = record_header(arena, layout, number).copy()
    if is_over(arena, layout, number):  # and its record may be another step's
        return []
    phase: Phase = "decode" if header[t.PHASE] == t.DECODE else "prefill"
    place = (ordinal - sweep.base) % len(sweep.blocks)
    return [
        (counter, int(header[_base_field(counter)]) + rel)
        for counter, rel in sweep.consumers[phase][place]
    ]


def is_over(arena: Arena, layout: ArenaLayout, step: int) -> bool:
    """Whether the engine has filled a later one, which it does when all has retired."""
    filled = counter_value(arena.base + layout.counter(STEP_COUNTER))
    return filled > step


def _base_field(counter: int) -> int:
    """Of a step's record: where a compute lane's or a link's counter stood before it."""
    if counter < LINK_COUNTER:
        return t.LANE_BASE + counter
    return t.LINK_BASE + counter - LINK_COUNTER
