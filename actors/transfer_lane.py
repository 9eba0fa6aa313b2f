"""The transfer lane of a card: copies the blocks that its steps are brought, ahead of their use.

In each step they come round in the same order, into a ring of slots in the card's memory, so the
lane may go on with what the next step will want as soon as slots are free. A step of another phase
or under another placement wants something else: what was copied ahead for nothing is dropped.

Here cards are emulated: a copy goes from one part of the arena to another, and is held until the
modelled link would have it there. This process needs no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from random import Random

import numpy as np

from shadowlane.actors.arena import (
    LINK_COUNTER,
    LINK_SPAN_FIELDS,
    LINK_SPAN_RING,
    LINK_STATISTICS,
    RECORD_RING,
    STEP_COUNTER,
    Arena,
    ArenaHandle,
    ArenaLayout,
)
from shadowlane.actors.blueprint import Blueprint
from shadowlane.ops import emulated as law
from shadowlane.ops import table as t
from shadowlane.ops.atomics import (
    WAIT_OK,
    counter_value,
    now_ns,
    publish,
    wait_counter,
)
from shadowlane.planner.placement import Placement
from shadowlane.planner.profile import Phase
from shadowlane.planner.program import Program, Read

LOOK_UP_NS = 100_000_000

# fields of the lane's statistics, int64
SWEEP_NBYTES, MOVED_NBYTES, BUSY_NS, NUM_SPANS = range(4)

Span = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Transfers:
    """What the lane copies in one step of one phase under one placement."""

    placement_id: int
    phase: Phase
    blocks: tuple[int, ...]
    sources: tuple[int, ...]  # arena offsets of their enclosing ranges
    free_after: tuple[int, ...]  # instructions of the card in a step, after which a slot is free
    card_length: int  # instructions of the card in a step


class TransferLane:
    """See the module. `run` is its loop; `adopt`, `retire` and `move` may be called beside it."""

    def __init__(
        self,
        card: int,
        blueprint: Blueprint,
        layout: ArenaLayout,
        handle: ArenaHandle,
        span: Span | None = None,
    ) -> None:
        self.card = card
        self._blueprint = blueprint
        self._layout = layout
        self._where = layout.cards[card]
        self._number = layout.lanes.index(self._where.lane)  # of the card's compute lane
        self._arena = Arena.attach(handle)
        self._span = span or (lambda name: nullcontext())
        self._statistics = self._arena.view(layout.links[card], np.int64, LINK_STATISTICS)
        self._spans = self._arena.view(
            layout.links[card] + LINK_STATISTICS * 8, np.int64, LINK_SPAN_RING, LINK_SPAN_FIELDS
        )
        self._law = self._arena.view(
            layout.laws[len(layout.lanes) + card], np.float64, law.LAW_FIELDS
        )
        self._load = self._arena.view(layout.loads, np.float64, law.LOADS)
        self._random = Random(int(self._law[law.SEED]))
        self._link = threading.Lock()  # one copy at a time: a card's copy engine
        self._transfers: dict[tuple[int, Phase], Transfers] = {}
        self._stopping = threading.Event()
        self._last_step = counter_value(self._address(STEP_COUNTER))
        self.error: str | None = None

    # -- calls from the engine

    def adopt(
        self,
        placement: Placement,
        programs: Mapping[Phase, Mapping[str, Program]],
        sources: Mapping[int, int],
    ) -> int:
        """Keep what a placement wants brought. Returns its id, as acknowledgement.

        sources: arena offset of each block's enclosing range in RAM.
        """
        part = placement.cards[self.card]
        for phase in ("decode", "prefill"):
            of_phase = programs.get(phase, programs["decode"])
            reads = [each for each in of_phase[part.link].instructions if isinstance(each, Read)]
            transfers = Transfers(
                placement.placement_id,
                phase,
                tuple(read.block for read in reads),
                tuple(sources[read.block] for read in reads),
                tuple(max(wait.rel for wait in read.consumers) for read in reads),
                len(of_phase[part.lane].instructions),
            )
            self._transfers = {**self._transfers, (placement.placement_id, phase): transfers}
        return placement.placement_id

    def retire(self, placement_id: int) -> None:
        """Forget a placement that no step will use again."""
        self._transfers = {
            key: value for key, value in self._transfers.items() if key[0] != placement_id
        }

    def move(self, moves: Sequence[tuple[int, int, int]]) -> int:
        """Copy blocks beside the sweep: (block, from, to), arena offsets. Returns the bytes.

        One that is in its place already (from = to) takes the time of its copy alone: the disk
        lane has written it there, where on a machine with a card it would have gone through RAM.
        """
        moved = 0
        for block, source, target in moves:
            if self._stopping.is_set() or counter_value(self._arena.base + self._layout.abort):
                raise ValueError(f"h2d:{self.card}: stopped while blocks were moved")
            moved += self._copy(block, source, target, step=0)
            self._statistics[MOVED_NBYTES] += self._blueprint.sources[block].held_nbytes
        return moved

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> str | None:
        """Copy until `stop` or the abort word. Returns the error that ended it, if any."""
        try:
            _Sweeps(self).run()
        except Exception as error:  # the lane's only report: engine and peers must be told
            self.error = f"h2d:{self.card}: {type(error).__name__}: {error}"
            self._arena.view(self._layout.abort, np.int32, 1)[0] = 1
        return self.error

    # -- copies

    def _address(self, counter: int) -> int:
        return self._arena.base + self._layout.counter(counter)

    def _copy(self, block: int, source: int, target: int, step: int) -> int:
        """One block; lasts as long as its link would take."""
        nbytes = self._blueprint.sources[block].held_nbytes
        memory = self._arena.memory
        with self._link:
            started = now_ns()
            rate = float(self._law[law.BYTES_PER_S])
            self._load[self.card] = rate
            if source != target:
                memory[target : target + nbytes] = memory[source : source + nbytes]
            number = int(self._statistics[NUM_SPANS])
            factor = max(0.5, self._random.gauss(1.0, float(self._law[law.JITTER])))
            seconds = nbytes / rate * factor + float(self._law[law.LAUNCH_S])
            end_ns = started + int(seconds * self._law[law.SLOWED] * 1e9)
            address = self._arena.base + self._layout.laws[len(self._layout.lanes) + self.card]
            law.sleep_until(end_ns, address, self._arena.base + self._layout.abort)
            self._load[self.card] = 0.0
            ended = now_ns()
            self._spans[number % LINK_SPAN_RING] = (step, block, started, ended, nbytes)
            self._statistics[NUM_SPANS] += 1
            self._statistics[BUSY_NS] += ended - started
        return nbytes


class _Sweeps:
    """The loop: which block is next, where it goes, and when its slot is free."""

    def __init__(self, lane: TransferLane) -> None:
        self._lane = lane
        self._step = lane._last_step
        self._now: Transfers | None = (
            None  # what the current step wants, and the next if it is alike
        )
        self._base = 0  # ordinal of its first block
        self._card_base = 0  # instructions of the card before it
        self._next = 0  # ordinal that is copied next
        self._free_at: dict[int, int] = {}  # ordinal -> the card's counter when its slot is free

    def run(self) -> None:
        lane = self._lane
        abort = lane._arena.base + lane._layout.abort
        while not lane._stopping.is_set() and counter_value(abort) == 0:
            if counter_value(lane._address(STEP_COUNTER)) != self._step:
                self._begin_step()
            ahead = self._is_ahead()
            if ahead is None:  # nothing to do, and no room, before another step begins
                wait_counter(lane._address(STEP_COUNTER), self._step + 1, abort, 0, LOOK_UP_NS)
                continue
            freed = self._free_at.get(self._next - lane._where.num_slots)
            if freed is not None:
                status = wait_counter(lane._address(lane._number), freed, abort, 0, LOOK_UP_NS)
                if status != WAIT_OK:
                    continue
            self._copy_next(ahead)

    def _begin_step(self) -> None:
        """Read the newest step's record; drop what was copied ahead for another kind of step."""
        lane = self._lane
        self._step = counter_value(lane._address(STEP_COUNTER))
        record = lane._layout.records + (self._step % RECORD_RING) * lane._layout.record_nbytes
        header = lane._arena.view(record, np.int64, t.RECORD_HEADER_FIELDS)
        phase: Phase = "decode" if header[t.PHASE] == t.DECODE else "prefill"
        wanted = lane._transfers.get((int(header[t.PLACEMENT]), phase))
        base, card_base = (
            int(header[t.LINK_BASE + lane.card]),
            int(header[t.LANE_BASE + lane._number]),
        )
        if wanted is None:  # a step that is over: so late that even its placement is gone
            self._now = None
            return
        if wanted is not self._now or self._next < base:
            self._next = base
            self._free_at = {}
        self._now, self._base, self._card_base = wanted, base, card_base

    def _is_ahead(self) -> int | None:
        """Of which step the next block is: 0, the current one; 1, the one after it. None: of none.

        A slot that holds something for the next step is not free before that has begun.
        """
        if self._now is None or not self._now.blocks:
            return None
        ahead, _ = divmod(self._next - self._base, len(self._now.blocks))
        if ahead > 1:
            return None
        overwritten = self._next - self._lane._where.num_slots
        return None if overwritten >= self._base + len(self._now.blocks) else ahead

    def _copy_next(self, ahead: int) -> None:
        lane, now, ordinal = self._lane, self._now, self._next
        assert now is not None
        place = (ordinal - self._base) % len(now.blocks)
        slot = ordinal % lane._where.num_slots
        target = lane._where.ring + slot * lane._where.slot_nbytes
        block = now.blocks[place]
        nbytes = lane._copy(block, now.sources[place], target, self._step + ahead)
        lane._statistics[SWEEP_NBYTES] += nbytes
        self._free_at[ordinal] = self._card_base + ahead * now.card_length + now.free_after[place]
        self._free_at.pop(ordinal - 2 * lane._where.num_slots, None)
        self._next = ordinal + 1
        publish(lane._address(LINK_COUNTER + lane.card), self._next)
