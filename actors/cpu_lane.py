"""The CPU lane: a team of pinned threads that walk one program together.

Steps run in compiled code from end to end, products of prefill steps in torch's library. Python
runs between steps only; the lane talks to the others through counters alone.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shadowlane.actors.arena import RECORD_RING, STEP_COUNTER, Arena, ArenaHandle, ArenaLayout
from shadowlane.actors.blueprint import Blueprint
from shadowlane.actors.lowering import lower, make_geometry
from shadowlane.actors.scratch import LAYOUT_OF
from shadowlane.ops import aten
from shadowlane.ops import table as t
from shadowlane.ops.atomics import WAIT_OK, WAIT_TIMED_OUT, counter_value, now_ns, wait_counter
from shadowlane.ops.chunk_kernels import expand_tile
from shadowlane.ops.chunk_walker import FAILED, walk_chunk
from shadowlane.ops.layouts import LAYOUTS
from shadowlane.ops.table import LoweredProgram
from shadowlane.ops.walker import walk
from shadowlane.planner.placement import Placement
from shadowlane.planner.profile import Phase
from shadowlane.planner.program import Program

LOOK_UP_NS = 200_000_000  # an idle worker looks around this often
DELAY_PERIOD_NS = 50_000_000  # how often a worker reads how long it was kept off its core
Span = Callable[[str], AbstractContextManager[object]]


class CpuLane:
    """One compute lane. `run` is the lane's loop; everything else may be called beside it."""

    def __init__(
        self,
        number: int,
        cores: Sequence[int],
        blueprint: Blueprint,
        layout: ArenaLayout,
        handle: ArenaHandle,
        span: Span | None = None,
    ) -> None:
        """`cores`: one core per worker, to which it is pinned; they are this lane's alone."""
        self.number = number
        self._cores = tuple(cores)
        self._blueprint = blueprint
        self._layout = layout
        self._arena = Arena.attach(handle)
        self._geometry = make_geometry(
            blueprint,
            layout,
            number,
            len(self._cores),
            layout.card_of(number),
            is_emulated=layout.is_emulated,
        )
        self._programs: dict[int, dict[Phase, LoweredProgram]] = {}
        self._span = span or (lambda name: nullcontext())
        self._stopping = threading.Event()
        # Steps after this one are for the workers, however late their threads come up.
        self._last_step = counter_value(self._arena.base + layout.counter(STEP_COUNTER))
        self.error: str | None = None

    def adopt(
        self,
        placement: Placement,
        programs: Mapping[Phase, Program],
        homes: Mapping[int, int],
        copies: Collection[int] = (),
    ) -> int:
        """Lower programs and keep them ready. Returns the placement's id, as acknowledgement.

        programs: that of decode, and that of steps with rows of a prompt if it is another.
        """
        lowered: dict[Phase, LoweredProgram] = {
            phase: lower(
                self._blueprint,
                self._layout,
                placement,
                program,
                homes,
                len(self._cores),
                copies,
                phase,
            )
            for phase, program in programs.items()
        }
        lowered.setdefault("prefill", lowered["decode"])
        self._programs = {**self._programs, placement.placement_id: lowered}
        return placement.placement_id

    def retire(self, placement_id: int) -> None:
        """Forget a program that no step will use again."""
        self._programs = {
            key: value for key, value in self._programs.items() if key != placement_id
        }

    def expand(self, placement_id: int, blocks: Sequence[int]) -> None:
        """Fill the expanded copies of these blocks, which are in RAM; while `run` does not run.

        By the function that expands panels in a prefill step: the same bytes, and so the same bits
        of every product.
        """
        table = self._programs[placement_id]["prefill"].blocks
        panels = [
            (block, first)
            for block in blocks
            for first in range(0, self._blueprint.sources[block].num_rows, t.PANEL_ROWS)
        ]
        taken = itertools.count()  # the next panel; taken by one worker each, as the GIL has it
        failures: list[Exception] = []

        def work(worker: int) -> None:
            pin_thread(self._cores[worker])
            try:
                while (number := next(taken)) < len(panels) and not failures:
                    block, first = panels[number]
                    self._expand_panel(table[block], block, first, worker)
            except Exception as error:  # raised below, by the caller's thread
                failures.append(error)

        threads = [
            threading.Thread(target=work, args=(worker,)) for worker in range(len(self._cores))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def _expand_panel(self, row: np.ndarray, block: int, first: int, worker: int) -> None:
        """Fill the copy of a block's rows from `first`, a panel of them. row: the block's."""
        source, base = self._blueprint.sources[block], self._arena.base
        layout = LAYOUT_OF[self._blueprint.dtype]
        expand_tile(
            row,
            base + int(row[t.OFFSET]) + first * source.row_nbytes,
            min(t.PANEL_ROWS, source.num_rows - first),
            source.cols,
            LAYOUTS[layout].id,
            base + int(row[t.EXPANDED]) + first * LAYOUTS[layout].row_nbytes(source.cols),
            base + self._seat(worker).scratch,
        )

    def run(self) -> str | None:
        """Work until `stop`, or until the abort word is set. Returns the error that ended it."""
        others = [
            threading.Thread(target=self._guarded, args=(worker,), daemon=True)
            for worker in range(1, len(self._cores))
        ]
        for thread in others:
            thread.start()
        self._guarded(0)
        for thread in others:
            thread.join()
        return self.error

    def stop(self) -> None:
        self._stopping.set()

    def _guarded(self, worker: int) -> None:
        try:
            self._work(worker)
        except Exception as error:  # the lane's only report: engine and peers must be told
            if self.error is None:
                self.error = f"{self._layout.lanes[self.number]}: {type(error).__name__}: {error}"
            self._arena.view(self._layout.abort, np.int32, 1)[0] = 1

    def _work(self, worker: int) -> None:
        pin_thread(self._cores[worker])
        layout, base = self._layout, self._arena.base
        abort, steps = base + layout.abort, base + layout.counter(STEP_COUNTER)
        seat = self._seat(worker)
        delay = DelayReader(
            self._arena.view(layout.workers[self.number] + worker * t.WORKER_NBYTES, np.int64, 16)
        )
        step = self._last_step
        while not self._stopping.is_set():
            delay.update()
            status = wait_counter(steps, step + 1, abort, 0, LOOK_UP_NS)
            if status == WAIT_TIMED_OUT:
                continue
            if status != WAIT_OK:
                return
            # NOTE: a worker that overslept a whole step finds it done by its peers, and joins the
            # newest. The engine fills a step only after the one before it has retired.
            step = counter_value(steps)
            record = layout.records + (step % RECORD_RING) * layout.record_nbytes
            header = self._arena.view(record, np.int64, t.RECORD_HEADER_FIELDS)
            programs = self._programs.get(int(header[t.PLACEMENT]))
            if programs is None:
                if counter_value(steps) != step:
                    continue  # so late that even the placement is gone
                raise RuntimeError(f"no program for placement {int(header[t.PLACEMENT])}")
            is_decode = header[t.PHASE] == t.DECODE
            program = programs["decode" if is_decode else "prefill"]
            if not len(program.instructions):
                continue
            if worker == 0:
                with self._span(f"step {step} {'decode' if is_decode else 'prefill'}"):
                    status = self._step(program, seat, record, step, is_decode)
            else:
                status = self._step(program, seat, record, step, is_decode)
            if status != WAIT_OK:
                return

    def _seat(self, worker: int) -> Seat:
        scratch = self._layout.worker_scratch[self.number]
        plan = self._blueprint.scratch[self._layout.subchunks]
        return Seat(worker, scratch + worker * plan.worker_nbytes)

    def _step(
        self,
        program: LoweredProgram,
        seat: Seat,
        record: int,
        step: int,
        is_decode: bool,
    ) -> int:
        base = self._arena.base
        tables = (program.instructions, program.items, program.blocks)
        place = (base + record, step, seat.worker, base + seat.scratch)
        if is_decode:
            return int(walk(base, self._geometry, *tables, *place))
        if not seat.calls_torch:
            aten.use_one_thread()
            seat.calls_torch = True
        status = int(walk_chunk(base, self._geometry, aten.load(), *tables, *place))
        if status == FAILED:
            raise RuntimeError(f"torch refused an operation; {aten.last_error()}")
        return status


@dataclass(slots=True)
class Seat:
    """What one worker keeps from step to step."""

    worker: int
    scratch: int  # offset of its scratch in the arena
    calls_torch: bool = False  # since its first prefill step


class DelayReader:
    """Publishes how long this thread was runnable without running, from the kernel's schedstat."""

    def __init__(self, statistics: np.ndarray) -> None:
        self._statistics = statistics
        self._path = Path("/proc/thread-self/schedstat")
        self._due = 0

    def update(self) -> None:
        now = now_ns()
        if now < self._due:
            return
        self._due = now + DELAY_PERIOD_NS
        try:
            self._statistics[t.RUN_DELAY_NS] = int(self._path.read_text().split()[1])
        except (OSError, IndexError, ValueError):
            self._due = now + 3600 * 10**9  # a kernel without it: nothing to report


def pin_thread(core: int) -> None:
    """Pin the calling thread to a core; a core that was taken from us is no reason to fail.

    core: less than 0 for a thread that stands in for a card: it may run anywhere.
    """
    if core < 0:
        return
    try:
        os.sched_setaffinity(0, {core})
    except OSError:
        return
