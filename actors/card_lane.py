"""The lane of a CUDA card: gives whole steps to a stream ahead of time, and lets the card wait.

Between two steps this lane's thread reads the record. Then it submits the step: for each
instruction waits for other lanes' counters, kernels that fetch activations, compute, and leave
behind what others read, and the write of its own counter. Nothing of it waits for the card. A
thread beside it serves the copies of this card's transfer lane (`copy_ring.py`), so that one
context and one set of pinned pages is enough.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

import numpy as np
import torch

from shadowlane.actors.arena import (
    LINK_COUNTER,
    LINK_STATISTICS,
    MOVE_COUNTER,
    PROBE_COUNTER,
    RECORD_RING,
    STEP_COUNTER,
    Arena,
    ArenaHandle,
    ArenaLayout,
)
from shadowlane.actors.blueprint import Blueprint
from shadowlane.actors.card_clock import LinkTimes, StepTimes, StreamClock
from shadowlane.actors.card_copier import Regions
from shadowlane.actors.card_full import CardFull
from shadowlane.actors.card_program import (
    CardInstruction,
    CardProgram,
    block_at,
    compile_program,
)
from shadowlane.actors.copier import StreamCopier
from shadowlane.actors.copy_ring import CopyRing, CopyThread
from shadowlane.actors.cuda.bells import Bells
from shadowlane.actors.cuda.devices import uuid_text
from shadowlane.actors.cuda.driver import CudaError
from shadowlane.actors.cuda.memory import CardMemory, CardMemoryHandle
from shadowlane.actors.cuda.runtime import CardRuntime
from shadowlane.actors.cuda.streams import CardStreams
from shadowlane.actors.cuda.watchdog import Watchdog
from shadowlane.actors.held_heads import Heads, page_nbytes
from shadowlane.actors.link_statistics import IS_OPEN
from shadowlane.ops import table as t
from shadowlane.ops.atomics import WAIT_OK, WAIT_TIMED_OUT, counter_value, wait_counter
from shadowlane.ops.card.buffers import CardGeometry, StepRows
from shadowlane.ops.card.cache import KvCache
from shadowlane.ops.card.operators import CardOperators
from shadowlane.ops.card.products import CardBlock
from shadowlane.ops.card.shares import Span, of_width
from shadowlane.planner.placement import Placement, show_nbytes
from shadowlane.planner.profile import Phase
from shadowlane.planner.program import Program

LOOK_UP_NS = 100_000_000
SOON_NS = 1_000_000  # while a step runs, whose times are to be noted
LOOK_S = 50e-6  # at a stream whose end is waited for, between two steps
LEAVE_S = 2.0  # what the transfer lane's process may take to close the card's memory
JOIN_S = 5.0  # what the copy thread may take to see that all ends
SHARED = (  # buffers that lanes exchange
    "residual",
    "qkv",
    "attended",
    "attended_chunk",
    "activated",
    "activated_chunk",
    "logits",
    "router",
)
WORDS = {4: torch.int32, 2: torch.int16}
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
        self._operators: CardOperators | None = None
        self._blocks: dict[tuple[int, int], CardBlock] = {}  # (block, slot) -> what is brought
        self._adopting = threading.Lock()
        self._stopping = threading.Event()
        self._last_step = counter_value(self._address(STEP_COUNTER))
        self.error: str | None = None
        self._ordinal = ordinal
        self._clocks: list[StreamClock] = []
        with ExitStack() as closing:
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
        closing.callback(self.streams.close)
        self._stream = self.streams.open()
        copying = self.streams.open()
        watchdog = Watchdog(self.streams)
        closing.callback(watchdog.close)
        if self.streams.mode == "memops":
            rung = (self.number, LINK_COUNTER + self.card, MOVE_COUNTER + self.card)
            closing.callback(Bells(self._address(each) for each in rung).close)
        self._card_memory = memory
        self._memory = self._runtime.view(memory.address, memory.nbytes, memory)
        self._shared = {name: self._shared_view(name) for name in SHARED}
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

    def _shared_view(self, name: str) -> torch.Tensor:
        """A buffer of the arena as the card sees it, uint8 and flat."""
        at, layout = self._layout.scratch[name], self._layout
        nbytes = getattr(self._blueprint.scratch[layout.subchunks], name)
        address = self.access.pinned.mapped(self._arena.base + at)
        return self._runtime.view(address, nbytes, None) if nbytes else torch.empty(0)

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
        heads: where its KV heads do, which are held from now on if it is the first; None as in
        `take_cached`.
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
            if self._operators is None:
                try:
                    self._operators = self._make_operators()
                except torch.OutOfMemoryError:
                    raise self._full("of activations") from None
                for each, home in heads.items():
                    self._operators.cache.hold_in(*each, self._home_of(each, home))
        new = {(placement.placement_id, phase): each for phase, each in compiled.items()}
        self._programs = {**self._programs, **new}
        return placement.placement_id

    def retire(self, placement_id: int) -> None:
        """Forget a placement that no step will use again."""
        self._programs = {
            key: value for key, value in self._programs.items() if key[0] != placement_id
        }

    # -- keys and values, between two steps

    def leave_cached(self, layers: Sequence[int], pages: Sequence[int]) -> None:
        """Copy what the card has cached of these layers, in these pages, to the arena."""
        cache, numbers = self._cache, np.array(pages, np.int64)
        if not len(numbers):
            return

        def work() -> None:
            places = torch.as_tensor(numbers, device=self._runtime.device)
            for layer in layers:
                held = cache.layers[layer]
                theirs = self._cached_in_ram(layer)[:, :, held.first : held.last]
                theirs[numbers] = cache.read_pages(layer, places).cpu().numpy()

        self._do_between_steps(work)

    def take_cached(
        self, dropped: Sequence[int], heads: Mapping[Heads, int | None], pages: Sequence[int]
    ) -> None:
        """Hold these heads from now on, with what the arena has cached of them in these pages.

        dropped: layers whose heads the card has no more; heads: where each lies on the card, None:
        in memory beside its budget, which has no piece that is large enough.
        """
        cache, numbers = self._cache, np.array(pages, np.int64)

        def work() -> None:
            places = torch.as_tensor(numbers, device=self._runtime.device)
            for layer in [*dropped, *(each.layer for each in heads)]:
                cache.layers.pop(layer, None)
            for each, home in heads.items():
                cache.hold_in(*each, self._home_of(each, home))
                if not len(numbers):
                    continue
                theirs = self._cached_in_ram(each.layer)[numbers, :, each.first : each.last]
                cached = torch.from_numpy(np.ascontiguousarray(theirs)).to(self._runtime.device)
                cache.write_pages(each.layer, places, cached)

        self._do_between_steps(work)

    @property
    def _cache(self) -> KvCache:
        assert self._operators is not None, "made with the first program"
        return self._operators.cache

    def _home_of(self, heads: Heads, home: int | None) -> torch.Tensor:
        nbytes = self._cache.nbytes(heads.last - heads.first)
        if home is None:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._runtime.device)
        return self._memory[home : home + nbytes]

    def _cached_in_ram(self, layer: int) -> np.ndarray:
        """A layer's pages in the arena: uint8 [pages, keys or values, heads, page bytes]."""
        blueprint, layout = self._blueprint, self._layout
        head_nbytes = page_nbytes(blueprint) // 2
        heads = blueprint.config.num_kv_heads
        shape = layout.num_pages, 2, heads, head_nbytes
        at = layout.kv + layer * layout.num_pages * 2 * heads * head_nbytes
        return self._arena.view(at, np.uint8, *shape)

    def _do_between_steps(self, work: Callable[[], None]) -> None:
        """Do something on the stream of the steps, and wait until it is done."""
        self._runtime.driver.set_device(self._ordinal)  # of this thread
        self._start(work)
        while not self._stream.is_idle():
            time.sleep(LOOK_S)

    def _make_operators(self) -> CardOperators:
        blueprint, layout = self._blueprint, self._layout
        options = blueprint.options
        constants = {
            source.name: self._arena.view(
                layout.constant_offsets[source.name], np.float32, math.prod(source.shape)
            ).reshape(source.shape)
            for source in blueprint.constants
        }
        return CardOperators(
            blueprint.config,
            blueprint.groups,
            constants,
            CardGeometry(
                decode_rows=t.MAX_DECODE_ROWS,
                chunk_rows=layout.subchunks * options.prefill_chunk,
                logit_rows=options.step_logits,
                sequences=options.max_batch,
                pages_per_sequence=layout.max_pages,
                num_pages=layout.num_pages,
                page_tokens=blueprint.catalog.page_tokens,
            ),
            dtype=blueprint.dtype,
            device=self._runtime.device,
            embedding_layout=blueprint.embedding.layout,
            kv_layout=blueprint.kv_layout,
            rope_interleaved=blueprint.rope_interleaved,
            uses_triton=self._runtime.uses_triton,
        )

    def stop(self) -> None:
        self._stopping.set()

    def close(self) -> None:
        """Give back all that was taken of the card. Only once `run` has ended, or never began."""
        self._runtime.driver.set_device(self._ordinal)
        self._closing.close()  # first: what the stream still has to do needs all of this
        self._operators, self._programs, self._blocks = None, {}, {}
        self._shared = {}
        self._memory = torch.empty(0)
        self._runtime.give_back()

    def _end_copies(self) -> None:
        """The copy thread ends at the abort word; a lane that is closed without one sets it."""
        if not self._copies.join(0.0):
            self._arena.view(self._layout.abort, np.int32, 1)[0] = 1
            if not self._copies.join(JOIN_S):
                raise CudaError("closing the lane", "its copies do not end")

    # -- steps

    def run(self) -> str | None:
        """Work until `stop` or the abort word. Returns the error that ended it, if any.

        Raises CardFull where the card's memory is what was wanting.
        """
        full: CardFull | None = None
        try:
            self._work()
        except Exception as error:  # the lane's only report: engine and peers must be told
            if _is_out_of_memory(error):
                full = self._full("of a step")
                self._fail(str(full))
            else:
                self._fail(f"{type(error).__name__}: {error}")
        finally:
            try:
                self.close()
            except CudaError as error:
                self._fail(str(error))
        if full is not None:
            raise full
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

    def _submit_step(self, step: int) -> None:
        layout = self._layout
        record = layout.records + (step % RECORD_RING) * layout.record_nbytes
        live = self._arena.view(record, np.int64, t.RECORD_HEADER_FIELDS)
        header = live.copy()
        phase: Phase = "decode" if header[t.PHASE] == t.DECODE else "prefill"
        program = self._programs.get((int(header[t.PLACEMENT]), phase))
        if program is None:
            raise RuntimeError(f"no program for placement {int(header[t.PLACEMENT])}")
        self._times.begin(step, is_last=not program.instructions)
        if not program.instructions:
            return
        operators = self._operators
        assert operators is not None, "made with the first program"
        rows, write = self._read_record(record, header, operators)
        self._start(partial(_begin, operators, rows, write))
        base = int(header[t.LANE_BASE + self.number])
        for ordinal, each in enumerate(program.instructions):
            for wait in each.waits:
                value = int(header[wait.base]) + wait.rel
                self._stream.wait_counter(self._address(wait.number), value)
            if each.waits:
                self._times.resume(step)
            if not live[t.IS_VOID]:  # of a void step the rest only retires
                blocks = (*each.resident, *self._brought(each, header))
                self._start(partial(self._compute, operators, each, blocks, rows))
            is_last = ordinal + 1 == len(program.instructions)
            self._times.end(step, each.group, is_last=is_last)
            self._stream.write_counter(self._address(self.number), base + ordinal + 1)

    def _start(self, work: Callable[[], None]) -> None:
        self._stream.submit(lambda handle: self._runtime.launch(handle, work))

    def _brought(self, each: CardInstruction, header: np.ndarray) -> list[CardBlock]:
        """The blocks of an instruction that lie in slots of the ring in this step."""
        found = []
        base = int(header[t.LINK_BASE + self.card])
        for block, place in each.brought:
            slot = (base + place) % self._where.num_slots
            key = (block, slot)
            if key not in self._blocks:
                at = self._where.ring + slot * self._where.slot_nbytes
                self._blocks[key] = block_at(self._blueprint, block, self._memory, at)
            found.append(self._blocks[key])
        return found

    def _read_record(
        self, record: int, header: np.ndarray, operators: CardOperators
    ) -> tuple[StepRows, Callable[[], None]]:
        """What the step's shapes are, and how its numbers get to the card."""
        layout, offsets = self._layout, self._layout.record_offsets
        decode, prefill = int(header[t.NUM_DECODE]), int(header[t.NUM_PREFILL])
        logits, count = int(header[t.NUM_LOGITS]), decode + prefill

        def ints(name: str, length: int) -> list[int]:
            found: list[int] = self._arena.view(record + offsets[name], np.int32, length).tolist()
            return found

        tokens, positions = ints("tokens", count), ints("positions", count)
        sequences, logit_rows = ints("sequences", count), ints("logit_rows", logits)
        rows = StepRows(
            num_decode=decode,
            num_prefill=prefill,
            num_logits=logits,
            context=max((position + 1 for position in positions[:decode]), default=0),
            chunk_sequence=sequences[decode] if prefill else 0,
            chunk_start=positions[decode] if prefill else 0,
            subchunk_rows=int(header[t.SUBCHUNK_ROWS]) if prefill else 0,
        )
        slots = self._blueprint.options.max_batch
        half = self._blueprint.config.head_dim // 2
        pages = ints("pages", slots * layout.max_pages)
        inv_freq = self._arena.view(record + offsets["inv_freq"], np.float32, slots, half).copy()
        scaling = self._arena.view(record + offsets["scaling"], np.float32, slots).tolist()
        used = sorted(set(sequences))
        write = partial(
            operators.inputs.write,
            tokens,
            positions,
            sequences,
            logit_rows,
            {n: pages[n * layout.max_pages : (n + 1) * layout.max_pages] for n in used},
            {n: (inv_freq[n], scaling[n]) for n in used},
        )
        return rows, write

    # -- on the stream

    def _compute(
        self,
        operators: CardOperators,
        each: CardInstruction,
        blocks: Sequence[CardBlock],
        rows: StepRows,
    ) -> None:
        for span in each.crossings.fetched:
            ours, theirs = self._places(operators, each.group, span, rows)
            _copy(ours, theirs)
        operators.compute(each.group, each.first_unit, each.last_unit, blocks, rows)
        for span in each.crossings.left:
            ours, theirs = self._places(operators, each.group, span, rows)
            _copy(theirs, ours)

    def _places(
        self, operators: CardOperators, group: str, span: Span, rows: StepRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of a buffer on the card, and in the arena, for the rows of a step; as ints."""
        buffer: torch.Tensor = getattr(operators.buffers, span.buffer)
        word = WORDS[buffer.element_size()]
        width = buffer.shape[1]
        if span.buffer.startswith("activated"):  # rows are as wide as the group has them
            parts = operators.groups[group]
            width = parts.parts[0].rows if parts.kind == "gate_up" else parts.parts[0].cols
        ours = of_width(buffer.view(word), width)
        theirs = self._shared[span.buffer].view(word)
        theirs = theirs[: ours.shape[0] * width].view(-1, width)
        count = _num_rows(span.buffer, rows)
        columns = slice(span.first, span.last)
        return ours[:count, columns], theirs[:count, columns]


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, CudaError) and error.is_out_of_memory
    )


def _begin(operators: CardOperators, rows: StepRows, write: Callable[[], None]) -> None:
    write()
    operators.begin(rows)


def _num_rows(buffer: str, rows: StepRows) -> int:
    if buffer.endswith("_chunk"):
        return rows.num_prefill
    if buffer in ("attended", "activated"):
        return rows.num_decode
    return rows.num_logits if buffer == "logits" else rows.num_rows


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """By a kernel, which reads and writes pinned memory in place: never by a copy engine, where
    it would queue behind weights."""
    if target.numel():
        torch.bitwise_or(source, 0, out=target)
