"""The transfer lane of a card: copies the blocks that its steps are brought, ahead of their use.

In each step they come round in the same order, into a ring of slots in the card's memory, so the
lane may go on with what the next step will want as soon as slots are free. A step of another phase
or under another placement wants something else: what was copied ahead for nothing is dropped. What
the disk reads for this lane is taken out of its ring in RAM, whose slot is free again then.

How a copy is done, by a card or by the model of a link, is in `link_copies.py`. This process needs
no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shadowlane.actors.arena import (
    DISK_COUNTER,
    LINK_STATISTICS,
    STEP_COUNTER,
    TRY_COUNTER,
    Arena,
    ArenaHandle,
    ArenaLayout,
)
from shadowlane.actors.blueprint import Blueprint
from shadowlane.actors.copier import Copier, Way
from shadowlane.actors.copy_choice import CopyTimes, Course, time_copies
from shadowlane.actors.copy_ring import CopyRing, RingCopier
from shadowlane.actors.link_copies import LOOK_UP_NS, CardCopies, Copies, EmulatedCopies
from shadowlane.actors.link_statistics import (
    IS_OPEN,
    KEYS_AND_VALUES,
    MOVED_NBYTES,
    SWEEP_NBYTES,
)
from shadowlane.actors.records import record_header
from shadowlane.ops import table as t
from shadowlane.ops.atomics import WAIT_OK, counter_value, wait_counter
from shadowlane.planner.placement import DISK_LANE, Placement
from shadowlane.planner.profile import Phase
from shadowlane.planner.program import Program, Read

if TYPE_CHECKING:
    from shadowlane.actors.card_copier import CardCopier
    from shadowlane.actors.cuda.driver import Driver
    from shadowlane.actors.cuda.memory import CardMemoryHandle

SOON_NS = 10_000_000  # after which whoever waits for the disk looks whether another step has begun

Span = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Transfers:
    """What the lane copies in one step of one phase under one placement."""

    placement_id: int
    phase: Phase
    blocks: tuple[int, ...]
    sources: tuple[int, ...]  # arena offsets of their enclosing ranges; -1: see `read_at`
    # of those that the disk reads into its ring for this lane, by their place: that in its sweep
    read_at: Mapping[int, int]
    num_read: int  # by the disk in a step
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
        self._sizes = blueprint.held_nbytes
        self._layout = layout
        self._where = layout.cards[card]
        self._number = layout.lanes.index(self._where.lane)  # of the card's compute lane
        self._arena = Arena.attach(handle)
        self._span = span or (lambda name: nullcontext())
        self._statistics = self._arena.view(layout.links[card], np.int64, LINK_STATISTICS)
        self._stopping = threading.Event()
        self._copies: Copies
        self._own: CardCopier | None = None  # where this process copies itself
        self._is_running = False
        if layout.is_emulated:
            self._copies = EmulatedCopies(self._arena, layout, card)
        else:
            self._statistics[IS_OPEN] = 0
            ring = CopyRing(self._arena, layout.copy_rings[card], layout.abort)
            self._to_thread = RingCopier(ring)
            self._copy_by(self._to_thread)
        self._transfers: dict[tuple[int, Phase], Transfers] = {}
        self._last_step = counter_value(self._address(STEP_COUNTER))
        self.error: str | None = None

    # -- who copies to a card that is here; before `run`

    def time_thread(self, course: Course) -> CopyTimes:
        """How fast the thread in the card's lane copies. Raises RuntimeError, OSError."""
        try:
            return time_copies(self._to_thread, self._arena, course)
        finally:
            self._copy_by(self._to_thread)  # which counts on from here

    def time_process(self, course: Course, handle: CardMemoryHandle, driver: Driver) -> CopyTimes:
        """How fast this process does. Raises CudaError where it cannot get at the card."""
        own = self._open_card(handle, driver, (course.source, course.nbytes))
        try:
            return time_copies(own, self._arena, course)
        finally:
            own.close()
            self._statistics[IS_OPEN] = 0
            self._copy_by(self._to_thread)

    def use_process(self, handle: CardMemoryHandle, driver: Driver) -> None:
        """This process copies from now on. Raises CudaError where it cannot get at the card."""
        self._own = self._open_card(handle, driver, self._layout.pinned_weights)
        self._copy_by(self._own)

    def _open_card(
        self, handle: CardMemoryHandle, driver: Driver, weights: tuple[int, int]
    ) -> CardCopier:
        """weights: offset and bytes of what is to be copied."""
        from shadowlane.actors.card_clock import LinkTimes
        from shadowlane.actors.card_copier import CardCopier, Regions

        layout = self._layout
        # Those of the card's own lane are in use; nobody moves anything meanwhile.
        words = layout.counter(TRY_COUNTER + 2 * self.card)
        regions = Regions(layout.pinned, weights, layout.abort, words)
        self._statistics[IS_OPEN] = 1
        try:
            return CardCopier(
                driver,
                self._arena,
                regions,
                handle,
                times=lambda clock: LinkTimes(self._arena, layout, self.card, clock),
            )
        except BaseException:
            self._statistics[IS_OPEN] = 0
            raise

    def _copy_by(self, copier: Copier) -> None:
        is_stopping = self._stopping.is_set
        self._copies = CardCopies(self._arena, self._layout, self.card, copier, is_stopping)

    def _close_own(self) -> None:
        if self._own is not None:
            self._own.enter()
            self._own.close()
            self._own = None
            self._statistics[IS_OPEN] = 0

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
                tuple(-1 if read.waits else sources[read.block] for read in reads),
                {read.ordinal: wait.rel - 1 for read in reads for wait in read.waits},
                len(of_phase[DISK_LANE].instructions),
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

    def move(self, moves: Sequence[tuple[int, int, int]], way: Way = "h2d") -> int:
        """Copy blocks beside the sweep: (block, from, to), offsets. Returns the bytes."""
        moved = 0
        if self._own is not None:
            self._own.enter()
        for block, source, target in moves:
            if self._stopping.is_set() or counter_value(self._arena.base + self._layout.abort):
                raise ValueError(f"h2d:{self.card}: stopped while blocks were moved")
            nbytes = self._sizes[block]
            self._copies.move(block, nbytes, source, target, way)
            self._statistics[MOVED_NBYTES] += nbytes
            moved += nbytes
        return moved

    def move_cached(self, nbytes: int) -> None:
        """Take the time of keys and values that come to an emulated card, or leave it.

        Their bytes stay: such a card reads them where the processor does.
        """
        self._copies.move(KEYS_AND_VALUES, nbytes, 0, 0)
        self._statistics[MOVED_NBYTES] += nbytes

    def stop(self) -> None:
        self._stopping.set()
        if not self._is_running:
            self._close_own()

    def run(self) -> str | None:
        """Copy until `stop` or the abort word. Returns the error that ended it, if any."""
        self._is_running = True
        try:
            if self._own is not None:
                self._own.enter()
            _Sweeps(self).run()
        except Exception as error:  # the lane's only report: engine and peers must be told
            self.error = f"h2d:{self.card}: {type(error).__name__}: {error}"
            self._arena.view(self._layout.abort, np.int32, 1)[0] = 1
        finally:
            self._close_own()
        return self.error

    def _address(self, counter: int) -> int:
        return self._arena.base + self._layout.counter(counter)


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
        self._disk_base = 0  # blocks read before it
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
                lane._copies.look()
                wait_counter(lane._address(STEP_COUNTER), self._step + 1, abort, 0, LOOK_UP_NS)
                continue
            freed = self._free_at.get(self._next - lane._where.num_slots)
            card = lane._address(lane._number)
            if freed is not None and not lane._copies.wait_for(card, freed):
                continue
            if self._is_read(ahead):
                self._copy_next(ahead)

    def _begin_step(self) -> None:
        """Read the newest step's record; drop what was copied ahead for another kind of step."""
        lane = self._lane
        self._step = counter_value(lane._address(STEP_COUNTER))
        header = record_header(lane._arena, lane._layout, self._step)
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
        self._disk_base = int(header[t.DISK_BASE])

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

    def _read_ordinal(self, ahead: int) -> int | None:
        """Of the disk, if it has to read the next block first."""
        now = self._now
        assert now is not None
        at = now.read_at.get((self._next - self._base) % len(now.blocks))
        return None if at is None else self._disk_base + ahead * now.num_read + at

    def _is_read(self, ahead: int) -> bool:
        """Whether the next block is in RAM, now or a little later.

        NOTE: no card may wait for the disk, which leaves off where another kind of step begins.
        """
        lane, ordinal = self._lane, self._read_ordinal(ahead)
        if ordinal is None:
            return True
        abort = lane._arena.base + lane._layout.abort
        disk = lane._address(DISK_COUNTER)
        if wait_counter(disk, ordinal + 1, abort, 0, SOON_NS) == WAIT_OK:
            return True
        lane._copies.look()
        return False

    def _copy_next(self, ahead: int) -> None:
        lane, now, ordinal = self._lane, self._now, self._next
        assert now is not None
        place = (ordinal - self._base) % len(now.blocks)
        read = self._read_ordinal(ahead)
        source = now.sources[place]
        if read is not None:
            layout = lane._layout
            source = layout.ring + read % layout.num_slots * layout.slot_nbytes
        slot = ordinal % lane._where.num_slots
        target = lane._where.ring + slot * lane._where.slot_nbytes
        block = now.blocks[place]
        nbytes = lane._sizes[block]
        self._free_at[ordinal] = self._card_base + ahead * now.card_length + now.free_after[place]
        self._free_at.pop(ordinal - 2 * lane._where.num_slots, None)
        self._next = ordinal + 1
        step = self._step + ahead
        lane._copies.bring(block, nbytes, source, target, self._next, step)
        lane._statistics[SWEEP_NBYTES] += nbytes
