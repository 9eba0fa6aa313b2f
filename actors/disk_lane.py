"""The disk lane: loads what is resident, then reads the sweep round and round ahead of compute.

A few threads take the next block of the sweep in turn, wait until its slot is free, and read it
straight into the arena with O_DIRECT. Blocks retire in order. One more thread gathers the embedding
rows of each step where the embeddings are not in RAM. This process needs no torch.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from queue import SimpleQueue

import numpy as np

from shadowlane.actors.arena import (
    DISK_COUNTER,
    DISK_SPAN_FIELDS,
    DISK_SPAN_RING,
    DISK_STATISTICS,
    GATHER_COUNTER,
    STEP_COUNTER,
    Arena,
    ArenaHandle,
    ArenaLayout,
)
from shadowlane.actors.arranged_experts import Piece
from shadowlane.actors.blueprint import PAGE, Blueprint
from shadowlane.actors.disk_sweep import Sweep, is_over, wanted_counters
from shadowlane.actors.expert_reader import (
    ExpertReader,
    ExpertStatistics,
    all_extents,
    read_error,
)
from shadowlane.actors.expert_sources import Extent
from shadowlane.actors.file_range import FileRange
from shadowlane.actors.predecessor import take_over
from shadowlane.actors.records import record_header, record_offset
from shadowlane.actors.scratch import gather_stride
from shadowlane.actors.spec import READ_DEPTH
from shadowlane.ops import emulated as law
from shadowlane.ops import table as t
from shadowlane.ops.atomics import (
    WAIT_ABORTED,
    WAIT_OK,
    counter_value,
    now_ns,
    publish,
    wait_counter,
)
from shadowlane.ops.file_reads import read_range
from shadowlane.ops.warm import warm_arranging
from shadowlane.planner.heat import Heat

LOOK_UP_NS = 50_000_000

# fields of the lane's statistics, int64
(
    SWEEP_NBYTES,
    LOAD_NBYTES,
    GATHER_NBYTES,
    BUSY_NS,
    NUM_READS,
    NUM_SPANS,
    BUFFERED,
    EXPERT_NBYTES,
    OWNER,  # see `predecessor.py`; two fields
    _,
    EXPERT_STATISTICS,  # NUM_EXPERT_STATISTICS fields
) = range(11)

Span = Callable[[str], AbstractContextManager[object]]


class DiskLane:
    """The storage lane. `run` is its loop; `load` and `adopt` may be called beside it."""

    def __init__(
        self,
        blueprint: Blueprint,
        layout: ArenaLayout,
        handle: ArenaHandle,
        stamps: Sequence[object] = (),
        *,
        depth: int = READ_DEPTH,
        direct: bool = True,
        prefetch: bool = True,
        span: Span | None = None,
    ) -> None:
        """`direct`: use O_DIRECT where the file system allows it. `prefetch`: read ahead."""
        self._blueprint = blueprint
        self._layout = layout
        self._arena = Arena.attach(handle)
        self._stamps = tuple(stamps)
        self._depth = depth
        self._prefetch = prefetch
        self._span = span or (lambda name: nullcontext())
        paths = {source.path for source in blueprint.sources}
        if blueprint.experts is not None:
            paths |= {path for source in blueprint.experts.sources for path in source.paths}
        self._files = {path: ModelFile(path, direct) for path in sorted(paths)}
        self._statistics = self._arena.view(layout.disk, np.int64, DISK_STATISTICS)
        take_over(self._statistics[OWNER : OWNER + 2])
        self._statistics[BUFFERED] = int(any(not each.direct for each in self._files.values()))
        self._spans = self._arena.view(
            layout.disk + DISK_STATISTICS * 8, np.int64, DISK_SPAN_RING, DISK_SPAN_FIELDS
        )
        self._lock = threading.Condition()
        self._sweep: Sweep | None = None
        self._next = 0  # the next ordinal to be read
        self._retired = 0  # blocks before this one have arrived
        self._arrived: set[int] = set()
        self._reading = 0  # threads between taking an ordinal and its arrival
        self._busy_since = 0
        self._in_flight = 0
        self._emulated_until = 0  # when the disk that is emulated has done all that was asked
        self._paused = True
        self._stopping = False
        self._homes: Mapping[int, int] = {}
        # Steps after this one are gathered for, however late the thread comes up.
        self._last_step = counter_value(self._address(STEP_COUNTER))
        self.error: str | None = None
        self._experts: ExpertReader | None = None
        self._buffers: SimpleQueue[int] = SimpleQueue()  # arena offsets of free ones
        if blueprint.experts is not None and blueprint.experts.buffer_nbytes:
            for number in range(READ_DEPTH):
                at = layout.scratch["arranging"] + number * blueprint.experts.buffer_nbytes
                self._buffers.put(at)
            warm_arranging()
        if blueprint.experts is not None:
            self._experts = ExpertReader(
                blueprint,
                layout,
                self._arena,
                self._files,
                self._check_all_unchanged,
                self._statistics,
                (BUSY_NS, NUM_READS, NUM_SPANS, EXPERT_NBYTES),
                self._spans,
                ExpertStatistics(self._statistics[EXPERT_STATISTICS:]),
                self._read_arranged,
                looks_ahead=prefetch,
            )

    # -- calls from the engine

    def load(self, homes: Mapping[int, int]) -> None:
        """Read blocks to their homes (arena offset of the enclosing range), `depth` at a time.

        Numbers behind those of all blocks are of routed experts, which lie there as in a slot.
        They count as resident once a placement that keeps them is adopted. Raises OSError, or
        ValueError if a file ends early.
        """

        def load_block(block: int, home: int, lock: threading.Lock) -> None:
            nbytes = self._read_whole(block, home, 0)
            with lock:
                self._statistics[LOAD_NBYTES] += nbytes

        todo = sorted(homes.items(), key=lambda each: self._key(each[0]))
        self._load_all([partial(load_block, block, home) for block, home in todo])

    def keep_experts(self, heat: Heat | None, policy: str | None) -> None:
        """How the experts of a mixture are to be kept; before `run`.

        heat: what earlier runs chose; policy: the name of the one that stays in force, None: they
        compete. Raises ValueError for a name that no policy has.
        """
        assert self._experts is not None, "a dense model has no experts"
        self._experts.begin(heat, policy)

    def load_experts(self, first: Sequence[int] = ()) -> None:
        """Fill the free slots of a mixture's experts, before all others with `first`.

        Raises like `load`.
        """
        experts = self._experts
        assert experts is not None, "a dense model has no experts to load"
        first_span = len(self._blueprint.sources)

        def load_expert(
            key: int, home: int, reads: Sequence[tuple[Extent, int]], lock: threading.Lock
        ) -> None:
            nbytes = sum(self._read_extent(extent, at, 0, first_span + key) for extent, at in reads)
            with lock:
                experts.loaded(key, home)
                self._statistics[LOAD_NBYTES] += nbytes

        self._load_all(
            [partial(load_expert, *each) for each in all_extents(experts.first_reads(first))]
        )

    def leave_to_cards(self, keys: Sequence[int]) -> None:
        """These experts of a mixture live on cards from now on: they need no slot in RAM."""
        assert self._experts is not None, "a dense model has no experts"
        self._experts.leave_to_cards(keys)

    def hold_experts(self, keys: Sequence[int]) -> dict[int, int]:
        """See `ExpertReader.hold`."""
        assert self._experts is not None, "a dense model has no experts"
        return self._experts.hold(keys)

    def keep_experts_in_place(self, keys: Sequence[int]) -> dict[int, int]:
        """See `ExpertReader.keep_in_place`."""
        assert self._experts is not None, "a dense model has no experts"
        return self._experts.keep_in_place(keys)

    def make_room(self, keys: Sequence[int]) -> dict[int, int]:
        """See `ExpertReader.make_room`."""
        assert self._experts is not None, "a dense model has no experts"
        return self._experts.make_room(keys)

    def settle_experts(self, keys: Sequence[int], is_there: bool) -> None:
        """See `ExpertReader.settle`."""
        assert self._experts is not None, "a dense model has no experts"
        self._experts.settle(keys, is_there)

    def release_experts(self, keys: Sequence[int]) -> None:
        """See `ExpertReader.release`."""
        assert self._experts is not None, "a dense model has no experts"
        self._experts.release(keys)

    def expert_heat(self) -> Heat:
        """What this run has chosen of a mixture's experts."""
        assert self._experts is not None, "a dense model has no experts"
        return self._experts.heat()

    def _load_all(self, jobs: list[Callable[[threading.Lock], None]]) -> None:
        """Run jobs in their order, `depth` at a time; each gets a lock for what they share."""
        todo = jobs[::-1]
        lock = threading.Lock()
        failures: list[Exception] = []

        def work() -> None:
            while not failures:
                with lock:
                    if not todo:
                        return
                    job = todo.pop()
                try:
                    job(lock)
                except Exception as error:  # reported below, by the caller's thread
                    failures.append(error)
                    return

        threads = [threading.Thread(target=work, daemon=True) for _ in range(self._depth)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def adopt(self, sweep: Sweep | None, homes: Mapping[int, int], placement_id: int) -> int:
        """Go on with this sweep. Call it between steps only.

        Where the blocks are those of the sweep before, what was read ahead stays valid and
        `sweep.base` must be the ordinal at which the next step begins; otherwise read-ahead is
        dropped and `base` must be what `park` returned. Returns the placement's id.
        """
        self.park()
        with self._lock:
            same = (
                sweep is not None
                and self._sweep is not None
                and sweep.blocks == self._sweep.blocks
                and sweep.num_slots == self._sweep.num_slots
            )
            if not same and sweep is not None and sweep.base != self._retired:
                raise ValueError(f"a new sweep must begin at {self._retired}; got {sweep.base}")
            self._sweep = sweep if sweep is not None and sweep.blocks else None
            self._homes = dict(homes)
            self._paused = self._sweep is None
            self._lock.notify_all()
        return placement_id

    def park(self) -> int:
        """Stop reading; returns the number of blocks that have arrived."""
        with self._lock:
            self._paused = True
            while self._reading and not self._stopping:
                self._lock.wait(0.1)
            # NOTE: a block that arrived before an earlier one gave up is read again: under another
            # sweep its ordinal may be another block's.
            self._arrived.clear()
            self._next = self._retired
            return self._retired

    def stop(self) -> None:
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        if self._experts is not None:
            self._experts.stop()

    def run(self) -> str | None:
        """Read until `stop` or the abort word. Returns the error that ended it, if any."""
        threads = [
            threading.Thread(target=self._guarded, args=(self._read_sweeps,), daemon=True)
            for _ in range(self._depth)
        ]
        loops = [self._gather_steps]
        if self._experts is not None and not self._experts.holds_all:
            self._experts.start()
            loops += [self._experts.follow, self._experts.serve]
            loops += self._depth * [self._experts.work]
        threads += [
            threading.Thread(target=self._guarded, args=(loop,), daemon=True) for loop in loops
        ]
        for thread in threads:
            thread.start()
        self._guarded(self._follow_sweeps)
        for thread in threads:
            thread.join()
        return self.error

    # -- threads

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except Exception as error:  # the lane's only report: engine and peers must be told
            if self.error is None:
                self.error = f"disk:0: {error}"
            self._arena.view(self._layout.abort, np.int32, 1)[0] = 1
            self.stop()

    def _address(self, counter: int) -> int:
        return self._arena.base + self._layout.counter(counter)

    @property
    def _abort(self) -> int:
        return self._arena.base + self._layout.abort

    def _is_over(self) -> bool:
        return self._stopping or counter_value(self._abort) != 0

    def _read_sweeps(self) -> None:
        while True:
            with self._lock:
                while self._paused and not self._is_over():
                    self._lock.wait(0.1)
                if self._is_over():
                    return
                sweep, ordinal = self._sweep, self._next
                assert sweep is not None
                self._next += 1
                self._reading += 1
            try:
                arrived = self._wait_free(sweep, ordinal) and self._read_ordinal(sweep, ordinal)
            finally:
                with self._lock:
                    self._reading -= 1
                    self._lock.notify_all()
            if not arrived and self._is_over():
                return

    def _wait_free(self, sweep: Sweep, ordinal: int) -> bool:
        """Wait until the slot of an ordinal may be overwritten; False if parked meanwhile."""
        freed = ordinal - sweep.num_slots
        if freed >= sweep.base and not self._wait_used(sweep, freed):
            return False
        # Read when the instruction before the consumer has retired.
        if not self._prefetch and not self._wait_used(sweep, ordinal, early=1):
            return False
        # NOTE: consumers of a void step retire without their blocks: what they have not waited for
        # may still be on its way into the slot.
        return self._wait_for(DISK_COUNTER, freed + 1) and not self._paused

    def _wait_used(self, sweep: Sweep, ordinal: int, early: int = 0) -> bool:
        """Wait until nobody needs what was read any more, or so many instructions before that.

        Its step must have begun: before, nobody knows who will. When it is over, nobody does.
        """
        step = sweep.step_of(ordinal)
        if not self._wait_for(STEP_COUNTER, step):
            return False
        return all(
            self._wait_for(counter, wanted - early, in_step=step)
            for counter, wanted in wanted_counters(self._arena, self._layout, sweep, ordinal)
        )

    def _wait_for(self, counter: int, wanted: int, in_step: int | None = None) -> bool:
        """False if parked meanwhile. in_step: after this step it does not matter any more."""
        while True:
            status = wait_counter(self._address(counter), wanted, self._abort, 0, LOOK_UP_NS)
            if status == WAIT_OK:
                return True
            if status == WAIT_ABORTED or self._paused or self._stopping:
                return False
            if in_step is not None and is_over(self._arena, self._layout, in_step):
                return True

    def _read_ordinal(self, sweep: Sweep, ordinal: int) -> bool:
        block = sweep.blocks[(ordinal - sweep.base) % len(sweep.blocks)]
        slot = ordinal % sweep.num_slots
        step = (ordinal - sweep.base) // len(sweep.blocks)
        home = self._layout.ring + slot * self._layout.slot_nbytes
        started = now_ns()
        nbytes = self._read_whole(block, home, step)
        if self._layout.is_emulated:
            self._hold(self._blueprint.held_nbytes[block], started)
        with self._lock:
            self._statistics[SWEEP_NBYTES] += nbytes
            self._arrived.add(ordinal)
            while self._retired in self._arrived:
                self._arrived.remove(self._retired)
                self._retired += 1
            publish(self._address(DISK_COUNTER), self._retired)
        return True

    def _hold(self, nbytes: int, started: int) -> None:
        """Make a read last as long as on the disk that is emulated, which serves them in turn."""
        at = self._layout.laws[-1]
        fields = self._arena.view(at, np.float64, law.LAW_FIELDS)
        seconds = nbytes / float(fields[law.BYTES_PER_S]) * float(fields[law.SLOWED])
        with self._lock:
            self._emulated_until = max(self._emulated_until, started) + round(seconds * 1e9)
            until = self._emulated_until
        law.sleep_until(until, self._arena.base + at, self._abort)

    def _follow_sweeps(self) -> None:
        """One span per sweep in Ray's timeline, from this, the actor method's own thread."""
        while not self._is_over():
            with self._lock:
                sweep, retired = self._sweep, self._retired
                if sweep is None:
                    self._lock.wait(0.1)
                    continue
            number = max(0, retired - sweep.base) // len(sweep.blocks)
            end = sweep.base + (number + 1) * len(sweep.blocks)
            with self._span(f"sweep {number}"):
                while not self._is_over() and self._sweep is sweep and self._retired < end:
                    wait_counter(self._address(DISK_COUNTER), end, self._abort, 0, LOOK_UP_NS)

    def _gather_steps(self) -> None:
        """For each step: the embedding rows of its tokens that no resident block holds."""
        step = self._last_step
        while not self._is_over():
            status = wait_counter(self._address(STEP_COUNTER), step + 1, self._abort, 0, LOOK_UP_NS)
            if status != WAIT_OK:
                continue
            step = counter_value(self._address(STEP_COUNTER))
            if any(block not in self._homes for block in self._blueprint.embedding_blocks):
                self._gather(step)
            publish(self._address(GATHER_COUNTER), step)

    def _gather(self, step: int) -> None:
        layout, blueprint = self._layout, self._blueprint
        record = record_offset(layout, step)
        header = record_header(self._arena, layout, step)
        count = int(header[t.NUM_DECODE] + header[t.NUM_PREFILL])
        self._check_unchanged(blueprint.embedding.path)
        tokens = self._arena.view(record + layout.record_offsets["tokens"], np.int32, count)
        stride = gather_stride(blueprint.embedding)
        first_row: dict[int, int] = {}  # token -> row that already holds it
        for row, token in enumerate(tokens.tolist()):
            block = blueprint.embedding_blocks[token // blueprint.embedding_block_rows]
            if block in self._homes:
                continue
            target = layout.scratch["gather"] + row * stride
            source = blueprint.sources[block]
            nbytes = source.row_nbytes
            if token in first_row:
                copied = layout.scratch["gather"] + first_row[token] * stride
                self._arena.memory[target : target + nbytes] = self._arena.memory[
                    copied : copied + nbytes
                ]
                continue
            first_row[token] = row
            offset = source.offset + (token - source.first_row) * nbytes
            data = self._files[source.path].read_small(offset, nbytes)
            self._arena.memory[target : target + nbytes] = np.frombuffer(data, np.uint8)
            self._statistics[GATHER_NBYTES] += nbytes

    # -- files

    def _key(self, block: int) -> tuple[str, int]:
        first, _ = self._extents_of(block)[0]
        return first.path, first.offset

    def _extents_of(self, number: int) -> list[tuple[FileRange | Piece, int]]:
        """What is read for a block, or behind all blocks an expert, and where in its home."""
        key = number - len(self._blueprint.sources)
        if key < 0:
            return [(self._blueprint.sources[number], 0)]
        assert self._blueprint.experts is not None, "only mixtures have experts"
        return [(each, each.home) for each in self._blueprint.experts.sources[key].extents]

    def _check_unchanged(self, path: str) -> None:
        """Raise ModelError if a file is no longer the one that was opened."""
        for stamp in self._stamps:
            if stamp.path == path:
                stamp.check_unchanged()

    def _check_all_unchanged(self) -> None:
        for stamp in self._stamps:
            stamp.check_unchanged()

    def _read_arranged(self, extent: Extent, home: int, step: int, number: int) -> None:
        """For the expert reader, which reads all others itself."""
        nbytes = self._read_extent(extent, home, step, number)
        with self._lock:
            self._statistics[EXPERT_NBYTES] += nbytes

    def _read_whole(self, number: int, home: int, step: int) -> int:
        """A block, or behind all blocks an expert, to an arena offset. Returns the bytes."""
        extents = self._extents_of(number)
        return sum(self._read_extent(each, home + at, step, number) for each, at in extents)

    def _read_extent(self, extent: FileRange | Piece, home: int, step: int, number: int) -> int:
        """A block, or part of an expert, to an arena offset: as it lies, or through a buffer."""
        if not isinstance(extent, Piece):
            return self._read(extent, home, step, number)
        buffer = at = self._buffers.get()
        nbytes = 0
        try:
            for each in extent.ranges:
                nbytes += self._read(each, at, step, number)
                at += each.held_nbytes
            extent.arrange(self._arena.memory, buffer, home)
        finally:
            self._buffers.put(buffer)
        return nbytes

    def _read(self, source: FileRange, home: int, step: int, number: int) -> int:
        """Read an enclosing range to an arena offset. Returns the bytes wanted of it.

        number: in the span of this read; a block, or behind all blocks the key of an expert.
        """
        self._check_unchanged(source.path)
        started = now_ns()
        with self._lock:
            if self._in_flight == 0:
                self._busy_since = started
            self._in_flight += 1
        try:
            self._files[source.path].read_block(source, self._arena.memory, home)
        finally:
            ended = now_ns()
            with self._lock:
                self._in_flight -= 1
                self._statistics[BUSY_NS] += ended - self._busy_since
                self._busy_since = ended
                place = int(self._statistics[NUM_SPANS]) % DISK_SPAN_RING
                self._spans[place] = (step, number, started, ended, source.nbytes)
                self._statistics[NUM_SPANS] += 1
                self._statistics[NUM_READS] += 1
        return source.nbytes


class ModelFile:
    """One weight file, read with O_DIRECT where the file system allows it."""

    def __init__(self, path: str, direct: bool) -> None:
        self.path = path
        self.direct = direct
        self._closing: list[Callable[[], object]] = []
        self._buffered = self._open(os.O_RDONLY)
        self.descriptor = self._buffered
        if direct:
            try:
                self.descriptor = self._open(os.O_RDONLY | os.O_DIRECT)
                self._probe()
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self.direct = False
                self.descriptor = self._buffered

    def close(self) -> None:
        """Close the descriptors, as happens with the last reference; no read may be under way."""
        for closing in self._closing:
            closing()

    def _open(self, flags: int) -> int:
        descriptor = os.open(self.path, flags | os.O_CLOEXEC)
        self._closing.append(weakref.finalize(self, os.close, descriptor))
        return descriptor

    def _probe(self) -> None:
        """Some file systems accept the flag and refuse the read."""
        buffer = np.zeros(2 * PAGE, np.uint8)
        start = -int(buffer.ctypes.data) % PAGE
        os.preadv(self.descriptor, [memoryview(buffer)[start : start + PAGE]], 0)

    def read_block(self, source: FileRange, memory: np.ndarray, home: int) -> None:
        """Read a block's enclosing range to `memory[home:]`; the weights begin at its skew."""
        failed = read_range(
            self.descriptor,
            source.offset - source.skew,
            source.skew + source.nbytes,
            source.held_nbytes,
            int(memory.ctypes.data) + home,
            int(self.direct),
        )
        if failed != 0:
            raise read_error(failed, self.path, source.nbytes, source.offset)

    def read_small(self, offset: int, nbytes: int) -> bytes:
        """A few bytes through the page cache, which keeps the rows of common tokens."""
        try:
            data = os.pread(self._buffered, nbytes, offset)
        except OSError as error:
            raise named(error, self.path) from error
        if len(data) != nbytes:
            raise ValueError(f"{self.path}: must hold {nbytes} bytes at {offset}; it ends early")
        return data


def named(error: OSError, path: str) -> OSError:
    """The same error with the file it is about."""
    return OSError(error.errno, error.strerror, path)
