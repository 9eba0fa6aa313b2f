"""The lane of a CUDA card: gives whole steps to a stream ahead of time, and lets the card wait.

Between two steps this lane's thread reads the record. Then it submits the step: for each
instruction waits for other lanes' counters, kernels that fetch activations, compute, and leave
behind what others read, and the write of its own counter. What lies between two waits of a decode
step is a graph (`card_graphs.py`). Nothing of it waits, but for a layer's router where experts are
computed for a chunk (`card_compute.py`).

A thread beside it serves the copies of this card's transfer lane (`copy_ring.py`), so that one
context and one set of pinned pages is enough.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

import numpy as np
import torch

from shadowlane.actors.arena import (
    LINK_COUNTER,
    LINK_STATISTICS,
    MOVE_COUNTER,
    PROBE_COUNTER,
    STEP_COUNTER,
    Arena,
    ArenaHandle,
    ArenaLayout,
)
from shadowlane.actors.blueprint import Blueprint
from shadowlane.actors.card_activations import Activations
from shadowlane.actors.card_clock import LinkTimes, StepTimes, StreamClock
from shadowlane.actors.card_compute import CardComputer, make_operators
from shadowlane.actors.card_copier import Regions
from shadowlane.actors.card_full import CardFull
from shadowlane.actors.card_graphs import Graph, Kind, StepGraphs, cut_segments
from shadowlane.actors.card_heads import CardHeads
from shadowlane.actors.card_program import (
    CardInstruction,
    CardProgram,
    Weights,
    compile_program,
    expert_places,
)
from shadowlane.actors.card_record import CardStep, read_step
from shadowlane.actors.card_slots import CardSlots
from shadowlane.actors.copier import StreamCopier
from shadowlane.actors.copy_ring import CopyRing, CopyThread
from shadowlane.actors.cuda.bells import Bells
from shadowlane.actors.cuda.devices import uuid_text
from shadowlane.actors.cuda.driver import CudaError
from shadowlane.actors.cuda.memory import CardMemory, CardMemoryHandle
from shadowlane.actors.cuda.runtime import CardRuntime
from shadowlane.actors.cuda.streams import CardStreams
from shadowlane.actors.cuda.watchdog import Watchdog
from shadowlane.actors.held_heads import Heads
from shadowlane.actors.link_statistics import IS_OPEN
from shadowlane.ops import table as t
from shadowlane.ops.atomics import WAIT_OK, WAIT_TIMED_OUT, counter_value, wait_counter
from shadowlane.ops.card.buffers import StepRows
from shadowlane.planner.placement import Placement, show_nbytes
from shadowlane.planner.profile import Phase
from shadowlane.planner.program import Program

LOOK_UP_NS = 100_000_000
SOON_NS = 1_000_000  # while a step runs, whose times are to be noted
LOOK_S = 50e-6  # at a stream whose end is waited for, between two steps
LEAVE_S = 2.0  # what the transfer lane's process may take to close the card's memory
JOIN_S = 5.0  # what the copy thread may take to see that all ends
WARM_UP_S = 300.0  # with kernels to be compiled
MOST_FEW = (1, 2, 4, 8, 16)  # rows of decode steps: for numbers between, kernels are the same
Records = Callable[[str], AbstractContextManager[object]]


class CardLane:
    """One card. `run` is the lane's loop; `adopt` and `retire` may be called beside it."""

    def __init__(
        self,
        number: int,
        card: int,
        runtime: CardRuntime,
        blueprint: Blueprint,
        layout: ArenaLayout,
        handle: ArenaHandle,
        span: Records | None = None,
        ordinal: int = 0,
    ) -> None:
        """number: among all compute lanes; card: among cards; ordinal: the driver's, here.

        Raises CardFull where the card has not what the budget promises, MemoryError where too
        little can be pinned, CudaError where its streams cannot reach the arena.
        """
        self.number, self.card = number, card
        self.name = layout.lanes[number]
        self._runtime, self._blueprint, self._layout = runtime, blueprint, layout
        self._where = layout.cards[card]
        self._span = span or (lambda name: nullcontext())
        self._arena = Arena.attach(handle)
        self._programs: dict[tuple[int, Phase], CardProgram] = {}
        # Libraries keep handles, and memory for them, by thread: all kernels are this one's.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"kernels of {self.name}")
        self._computer: CardComputer | None = None
        self._graphs: StepGraphs | None = None
        self._slots: CardSlots | None = None
        self._adopting = threading.Lock()
        self._stopping = threading.Event()
        self._last_step = counter_value(self._address(STEP_COUNTER))
        # Of the counter: the newest choice that this thread asked for.
        self._told: int | None = None
        self.error: str | None = None
        self._ordinal = ordinal
        self._clocks: list[StreamClock] = []
        with ExitStack() as closing:
            closing.callback(self._thread.shutdown, wait=False)
            self._open(closing)
            self._closing = closing.pop_all()

    def _open(self, closing: ExitStack) -> None:
        driver, layout, arena = self._runtime.driver, self._layout, self._arena
        ordinal = self._ordinal
        driver.set_device(ordinal)
        nbytes = self._where.weights + self._where.weights_nbytes
        try:
            memory = CardMemory.allocate(driver, max(nbytes, 1))
        except CudaError as error:
            if not error.is_out_of_memory:
                raise
            reason = f"{self.name}: {show_nbytes(nbytes)} of its budget: {error}"
            raise CardFull(reason, self.card, driver.memory_info()[0]) from None
        closing.callback(memory.close)
        closing.callback(self._wait_for_others)
        words = layout.counter(PROBE_COUNTER + 2 * self.card)
        regions = Regions(layout.pinned, layout.pinned_weights, layout.abort, words)
        try:
            access = regions.pin(driver, arena)
        except CudaError as error:
            raise MemoryError(f"{self.name}: RAM cannot be pinned: {error}") from None
        closing.callback(access.close)
        if not access.pinned.holds(arena.base + layout.pinned[0], layout.pinned[1]):
            raise MemoryError(f"{self.name}: activations cannot be pinned: {access.reason}")
        abort = arena.base + layout.abort
        self.access = access
        closing.callback(self._close_clocks)  # after the streams that they are about
        self.streams = CardStreams(driver, ordinal, access.pinned, abort, arena.base + words)
        closing.callback(self._close_graphs)  # when no stream runs them any more
        closing.callback(self.streams.close)
        self._stream = self.streams.open()
        self._graphs = StepGraphs(driver, self._stream)
        copying = self.streams.open()
        watchdog = Watchdog(self.streams)
        closing.callback(watchdog.close)
        if self.streams.mode == "memops":
            rung = (self.number, LINK_COUNTER + self.card, MOVE_COUNTER + self.card)
            closing.callback(Bells(self._address(each) for each in rung).close)
        self._card_memory = memory
        self._memory = self._runtime.view(memory.address, memory.nbytes, memory)
        self._slots = CardSlots(self._blueprint, self._where, self._memory)
        pinned = access.pinned
        self._activations = Activations(self._runtime, self._blueprint, layout, arena, pinned)
        self._clocks = [StreamClock(driver, each) for each in (self._stream, copying)]
        groups = {group.name: place for place, group in enumerate(self._blueprint.catalog.groups)}
        self._times = StepTimes(arena, layout, self.number, groups, self._clocks[0])
        times = LinkTimes(arena, layout, self.card, self._clocks[1])
        copier = StreamCopier(
            copying, arena, memory, layout.abort, staging=access.staging, times=times
        )
        ring = CopyRing(arena, layout.copy_rings[self.card], layout.abort)
        self._copies = CopyThread(ring, copier, lambda: driver.set_device(ordinal))
        closing.callback(self._end_copies)

    def export(self) -> tuple[CardMemoryHandle, int]:
        """What the transfer lane's process needs to copy by itself, and the bytes of the card.

        Raises CudaError where the system does not share memory of cards.
        """
        driver, ordinal = self._runtime.driver, self._ordinal
        driver.set_device(ordinal)  # of this thread
        handle = self._card_memory.export(uuid_text(driver.device_uuid(ordinal)))
        return handle, driver.device_nbytes(ordinal)

    def _wait_for_others(self) -> None:
        """Memory that another process has open must not be freed; one that died has it no more."""
        is_open = self._arena.view(self._layout.links[self.card], np.int64, LINK_STATISTICS)
        until = time.monotonic() + LEAVE_S
        while is_open[IS_OPEN] and time.monotonic() < until:
            time.sleep(LOOK_S)

    def _close_clocks(self) -> None:
        for clock in self._clocks:
            clock.close()

    def _address(self, counter: int) -> int:
        return self._arena.base + self._layout.counter(counter)

    # -- calls from the engine

    def adopt(
        self,
        placement: Placement,
        programs: Mapping[Phase, Mapping[str, Program]],
        homes: Mapping[int, int],
        heads: Mapping[Heads, int | None],
    ) -> int:
        """Make a placement ready. Returns its id, as acknowledgement.

        programs: of all lanes, by phase; homes: where on the card the blocks lie that live there;
        heads: where the KV heads of the placement in force do, None: beside the budget.
        """
        compiled: dict[Phase, CardProgram] = {}
        for phase in ("decode", "prefill"):
            compiled[phase] = compile_program(
                self._blueprint,
                self._layout,
                placement,
                programs.get(phase, programs["decode"]),
                self.name,
                phase,
                homes,
                self._memory,
            )
        with self._adopting:
            is_first = self._computer is None
            if self._computer is None:
                where = (self._blueprint, self._layout, self._arena, self._runtime)
                try:
                    operators = make_operators(*where)
                except torch.OutOfMemoryError:
                    raise self._full("of activations") from None
                self._computer = CardComputer(operators, self._activations, self._memory)
                self._heads.hold(heads)
            places = expert_places(self._blueprint, placement.cards[self.card], homes)
            both = [compiled["decode"], compiled["prefill"]]
            self._computer.tables.hold(placement.placement_id, places, both)
            if is_first:
                work = (self._computer, placement.placement_id, compiled)
                self._thread.submit(self._warm_up, *work).result()
        new = {(placement.placement_id, phase): each for phase, each in compiled.items()}
        self._programs = {**self._programs, **new}
        return placement.placement_id

    def retire(self, placement_id: int) -> None:
        """Forget a placement that no step will use again."""
        self._programs = {
            key: value for key, value in self._programs.items() if key[0] != placement_id
        }
        with self._adopting:
            if self._computer is not None:
                self._computer.tables.drop(placement_id)

    # -- keys and values, between two steps

    def leave_cached(self, layers: Sequence[int], pages: Sequence[int]) -> None:
        """See `CardHeads`."""
        self._do_between_steps(partial(self._heads.leave, layers, pages))

    def take_cached(
        self, dropped: Sequence[int], heads: Mapping[Heads, int | None], pages: Sequence[int]
    ) -> None:
        """See `CardHeads`."""
        self._do_between_steps(partial(self._heads.take, dropped, heads, pages))

    @property
    def _heads(self) -> CardHeads:
        assert self._computer is not None, "made with the first program"
        cache = self._computer.operators.cache
        return CardHeads(self._blueprint, self._layout, self._arena, cache, self._memory)

    def _do_between_steps(self, work: Callable[[], None]) -> None:
        """Do something on the stream of the steps, and wait until it is done."""
        self._runtime.driver.set_device(self._ordinal)  # of this thread
        self._start(work)
        while not self._stream.is_idle():
            time.sleep(LOOK_S)

    def _warm_up(
        self, computer: CardComputer, placement_id: int, programs: Mapping[Phase, CardProgram]
    ) -> None:
        """Start all kernels once, with as many rows as steps may have, while nothing waits.

        Raises CardFull where the card has not enough beside weights and ring.
        """
        geometry = computer.operators.geometry
        tokens = geometry.pages_per_sequence * geometry.page_tokens
        few = [
            ("decode", StepRows(count, num_logits=min(count, geometry.logit_rows), context=tokens))
            for count in MOST_FEW
            if count <= geometry.decode_rows
        ]
        chunk = StepRows(
            geometry.decode_rows,
            geometry.chunk_rows,
            geometry.logit_rows,
            context=tokens,
            chunk_start=max(0, tokens - geometry.chunk_rows),
            subchunk_rows=self._blueprint.options.prefill_chunk,
        )
        self._runtime.driver.set_device(self._ordinal)  # of this thread
        try:
            for phase, rows in (*few, ("prefill", chunk)):
                work = (placement_id, programs[phase], rows, self._weights_of)
                self._start(partial(computer.warm_up, *work))
        except torch.OutOfMemoryError:
            raise self._full("of a step") from None
        if not self.streams.drain(WARM_UP_S):  # no copies are under way before the first step
            raise CudaError("warming up", f"work is left after {WARM_UP_S:g} s")

    def stop(self) -> None:
        self._stopping.set()

    def close(self) -> None:
        """Give back all that was taken of the card. Only once `run` has ended, or never began."""
        self._runtime.driver.set_device(self._ordinal)
        self._closing.close()  # first: what the stream still has to do needs all of this
        self._computer, self._programs, self._slots = None, {}, None
        self._activations.close()
        self._memory = torch.empty(0)
        self._runtime.close()

    def _close_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.close()

    def _end_copies(self) -> None:
        """The copy thread ends at the abort word; a lane that is closed without one sets it."""
        if not self._copies.join(0.0):
            self._arena.view(self._layout.abort, np.int32, 1)[0] = 1
            if not self._copies.join(JOIN_S):
                raise CudaError("closing the lane", "its copies do not end")

    # -- steps

    def run(self) -> str | None:
        """Work until `stop` or the abort word. Returns the error that ended it, if any.

        Raises CardFull where the card's memory is what was wanting, CudaError where the driver has
        failed: this process has no use of its card any more.
        """
        raised: CardFull | CudaError | None = None
        try:
            self._thread.submit(self._work).result()
        except Exception as error:  # the lane's only report: engine and peers must be told
            if _is_out_of_memory(error):
                raised = self._full("of a step")
                self._fail(str(raised))
            else:
                raised = error if isinstance(error, CudaError) else None
                self._fail(f"{type(error).__name__}: {error}")
        finally:
            try:
                self.close()
            except CudaError as error:
                raised = raised or error
                self._fail(str(error))
        if raised is not None:
            raise raised
        return self.error

    def _full(self, what: str) -> CardFull:
        free, total = self._runtime.driver.memory_info()
        return CardFull(
            f"{self.name}: out of memory {what} beside {show_nbytes(self._memory.nbytes)} of "
            f"weights and ring; {show_nbytes(free)} of {show_nbytes(total)} are free",
            self.card,
        )

    def _fail(self, reason: str) -> None:
        self.error = self.error or f"{self.name}: {reason.removeprefix(f'{self.name}: ')}"
        self._arena.view(self._layout.abort, np.int32, 1)[0] = 1

    def _work(self) -> None:
        abort, steps = self._arena.base + self._layout.abort, self._address(STEP_COUNTER)
        step = self._last_step
        self._runtime.driver.set_device(self._ordinal)  # of this thread
        while not self._stopping.is_set():
            self._times.read()
            look_up_ns = SOON_NS if self._times.is_pending else LOOK_UP_NS
            status = wait_counter(steps, step + 1, abort, 0, look_up_ns)
            if counter_value(abort):
                return  # which ends the copies as well
            if self._copies.error is not None and status == WAIT_TIMED_OUT:
                raise CudaError("copying", self._copies.error)
            self._stream.is_idle()  # raises what a thread of its has failed with
            if status == WAIT_TIMED_OUT:
                continue
            if status != WAIT_OK:
                return
            step = counter_value(steps)
            with self._span(f"step {step}"):
                self._submit_step(step)

    def _submit_step(self, number: int) -> None:
        """Give the stream a step. It ends early at an abort."""
        step = read_step(self._arena, self._layout, number)
        program = self._programs.get((step.placement_id, step.phase))
        if program is None:
            raise RuntimeError(f"no program for placement {step.placement_id}")
        if not program.instructions:
            self._times.begin(number, is_last=True)
            return
        computer = self._computer
        assert computer is not None, "made with the first program"
        graphs = self._captured(computer, program, step)
        self._times.begin(number, is_last=False)
        self._start(partial(computer.begin, number, step.rows))
        base = int(step.header[t.LANE_BASE + self.number])
        self._told = None  # a step that failed may have begun at the same
        at = 0
        while at < len(program.instructions):
            each = program.instructions[at]
            for wait in each.waits:
                value = int(step.header[wait.base]) + wait.rel
                self._stream.wait_counter(self._address(wait.number), value)
            if each.waits:
                self._times.resume(number)
            if at in graphs:
                self._stream.replay(graphs[at].handle)
                at = graphs[at].end
            else:
                if not step.is_void and not self._start_one(computer, each, step):
                    return  # of a void step the rest only retires
                at += 1
            last = program.instructions[at - 1]
            self._times.end(number, last.group, is_last=at == len(program.instructions))
            if last.is_awaited:
                self._stream.write_counter(self._address(self.number), base + last.retired)

    def _start_one(self, computer: CardComputer, each: CardInstruction, step: CardStep) -> bool:
        """Start the kernels of an instruction. False: aborted."""
        choice, rows = None, step.rows.micro_batch(*each.part)
        if not rows.num_rows:
            return True
        if (needed := computer.needs_choice(each, rows)) is not None:
            layer, made = needed
            wanted = int(step.header[made.base]) + made.rel
            if made.number == self.number and wanted != self._told:  # nobody else may ask for it
                base = int(step.header[made.base])
                self._stream.write_counter(self._address(self.number), base + each.retired - 1)
                self._told = wanted
            if not self._wait_here(made.number, wanted):
                return False
            choice = self._activations.choice(layer, rows)
        weights = self._weights_of(each, int(step.header[t.LINK_BASE + self.card]))
        work = (step.placement_id, each, weights, rows, choice)
        self._start(partial(computer.compute, *work))
        return True

    def _wait_here(self, number: int, value: int) -> bool:
        """Wait in this thread until a lane's counter comes to `value`. False: aborted."""
        abort = self._arena.base + self._layout.abort
        while not self._stopping.is_set():
            status = wait_counter(self._address(number), value, abort, 0, LOOK_UP_NS)
            if status != WAIT_TIMED_OUT:
                return bool(status == WAIT_OK)
        return False

    def _captured(
        self, computer: CardComputer, program: CardProgram, step: CardStep
    ) -> Mapping[int, Graph]:
        """Graphs of pieces of this step, by their first instruction; captured now if it is time."""
        graphs = self._graphs
        assert graphs is not None, "made with the stream"
        graphs.keep({placement_id for placement_id, _ in self._programs})
        if step.rows.num_prefill:
            return {}
        kind = Kind(step.placement_id, step.rows.num_decode, step.rows.num_logits)
        if graphs.is_wanted(kind):

            def start(handle: int, first: int, end: int) -> None:
                for each in program.instructions[first:end]:
                    work = (step.placement_id, each, self._weights_of(each), step.rows)
                    self._runtime.launch(handle, partial(computer.compute, *work))

            segments = cut_segments(program.instructions, computer.may_capture)
            graphs.capture(kind, segments, start)
        return graphs.of(kind)

    def _start(self, work: Callable[[], None]) -> None:
        self._stream.submit(lambda handle: self._runtime.launch(handle, work))

    def _weights_of(self, each: CardInstruction, base: int = 0) -> Weights:
        assert self._slots is not None, "made with the card's memory"
        return self._slots.weights(each, base)


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, CudaError) and error.is_out_of_memory
    )
