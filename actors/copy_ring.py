"""A ring in the arena through which one process has another one copy.

The transfer lane puts records in, the copy thread of the process that holds the card takes them
out: one producer, one consumer, two counters with sleepers. A record is a few numbers. The ring
outlives both processes: whoever comes back finds in the counters where it was. A record that was
taken and not counted is copied a second time, which does no harm.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from shadowlane.actors.arena import Arena
from shadowlane.actors.copier import About, Copier, CopyError, Way
from shadowlane.ops.atomics import (
    WAIT_ABORTED,
    WAIT_OK,
    WAIT_TIMED_OUT,
    counter_value,
    publish,
    wait_counter,
)
from shadowlane.ops.table import COUNTER_NBYTES

# fields of a record, int64
KIND, SOURCE, TARGET, NBYTES, COUNTER, VALUE, STEP, BLOCK = range(8)
RECORD_FIELDS = 8
WAIT, H2D, D2H, STOP = 1, 2, 3, 4
DEPTH = 256
MESSAGE_NBYTES = 512
LOOK_NS = 50_000_000
SOON_NS = 2_000_000  # while copies are under way, whose end is to be noted

# where things lie in a ring
PUT = 0  # counter: records put in; the producer's
TAKEN = COUNTER_NBYTES  # counter: records passed on; the consumer's
FAILED = 2 * COUNTER_NBYTES  # bytes of a message; 0: all is well
MESSAGE = FAILED + 64
RECORDS = MESSAGE + MESSAGE_NBYTES


@dataclass(frozen=True, slots=True)
class Record:
    """One thing to do, offsets as `Copier` has them."""

    kind: int
    source: int = 0
    target: int = 0
    nbytes: int = 0
    counter: int = 0
    value: int = 0
    step: int = 0
    block: int = 0


def ring_nbytes(depth: int = DEPTH) -> int:
    """What a ring takes of the arena."""
    return RECORDS + depth * RECORD_FIELDS * 8


class CopyRing:
    """One end of a ring at an arena offset. New memory must be zero.

    abort: arena offset of the abort word. `put` is the producer's, the rest the consumer's.
    """

    def __init__(self, arena: Arena, offset: int, abort: int, depth: int = DEPTH) -> None:
        if offset % 64:
            raise ValueError(f"a ring must begin at a multiple of 64; got {offset}")
        if depth < 1 or depth & (depth - 1):  # so that its slots go on when the counters wrap
            raise ValueError(f"a ring's depth must be a power of two; got {depth}")
        self._put = arena.base + offset + PUT
        self._taken = arena.base + offset + TAKEN
        self._abort = arena.base + abort
        self._failed = arena.view(offset + FAILED, np.int64, 1)
        self._message = arena.view(offset + MESSAGE, np.uint8, MESSAGE_NBYTES)
        self._records = arena.view(offset + RECORDS, np.int64, depth, RECORD_FIELDS)
        self._depth = depth
        self._num_put = counter_value(self._put)
        self._num_taken = counter_value(self._taken)

    def put(self, record: Record) -> None:
        """Add a record; waits while the ring is full. Raises CopyError if nobody takes it."""
        room = self._num_put + 1 - self._depth
        while True:
            self.check()
            state = wait_counter(self._taken, room, self._abort, 0, LOOK_NS)
            if state == WAIT_OK:
                break
            if state == WAIT_ABORTED:
                raise CopyError("the step was aborted while the copy ring was full")
        self._records[self._num_put % self._depth] = (
            record.kind,
            record.source,
            record.target,
            record.nbytes,
            record.counter,
            record.value,
            record.step,
            record.block,
        )
        self._num_put = (self._num_put + 1) & 0xFFFFFFFF
        publish(self._put, self._num_put)

    def check(self) -> None:
        """Raise CopyError if the consumer has failed."""
        if self._failed[0]:
            raise CopyError(bytes(self._message[: self._failed[0]]).decode(errors="replace"))

    def next(self, timeout_ns: int = 0) -> Record | None:
        """The oldest record, which stays until `passed_on`; None after a timeout (0: never).

        Raises CopyError on an abort.
        """
        state = wait_counter(self._put, self._num_taken + 1, self._abort, 0, timeout_ns)
        if state == WAIT_TIMED_OUT:
            return None
        if state == WAIT_ABORTED:
            raise CopyError("the step was aborted")
        row = self._records[self._num_taken % self._depth]
        return Record(*(int(each) for each in row))

    def passed_on(self) -> None:
        """The oldest record is in a copier's hands."""
        self._num_taken = (self._num_taken + 1) & 0xFFFFFFFF
        publish(self._taken, self._num_taken)

    def fail(self, message: str) -> None:
        """Have the producer know: each of its calls raises this from now on."""
        data = message.encode(errors="replace")[:MESSAGE_NBYTES]
        self._message[: len(data)] = np.frombuffer(data, np.uint8)
        self._failed[0] = len(data)


class RingCopier:
    """The producer's end as a copier: the copies are done by whoever serves the ring."""

    def __init__(self, ring: CopyRing) -> None:
        self._ring = ring
        self._is_open = True

    def wait(self, counter: int, value: int) -> None:
        self._ring.put(Record(WAIT, counter=counter, value=value))

    def copy(
        self,
        source: int,
        target: int,
        nbytes: int,
        counter: int,
        value: int,
        way: Way = "h2d",
        about: About = (0, 0),
    ) -> None:
        kind = H2D if way == "h2d" else D2H
        self._ring.put(Record(kind, source, target, nbytes, counter, value, *about))

    def look(self) -> bool:
        self._ring.check()  # what was given will not be done, if its copies have failed
        return False  # whoever serves the ring does

    def close(self) -> None:
        """Have the one who serves the ring end when all is passed on."""
        if self._is_open:
            self._is_open = False
            self._ring.put(Record(STOP))


def serve(ring: CopyRing, copier: Copier, begin: Callable[[], None] = lambda: None) -> str | None:
    """Pass records on until the ring is closed. Returns the error that ended it, if any.

    begin: called first, in the thread that serves (a CUDA driver wants to know the device there).
    """
    try:
        begin()
        while True:
            record = ring.next(SOON_NS if copier.look() else 0)
            if record is None:
                continue
            if record.kind == STOP:
                ring.passed_on()
                return None
            if record.kind == WAIT:
                copier.wait(record.counter, record.value)
            else:
                copier.copy(
                    record.source,
                    record.target,
                    record.nbytes,
                    record.counter,
                    record.value,
                    "h2d" if record.kind == H2D else "d2h",
                    (record.step, record.block),
                )
            ring.passed_on()
    except Exception as error:  # the producer's calls raise it
        ring.fail(str(error) or repr(error))
        return str(error) or repr(error)


class CopyThread:
    """Serves a ring beside whatever else its process does."""

    def __init__(
        self, ring: CopyRing, copier: Copier, begin: Callable[[], None] = lambda: None
    ) -> None:
        self.error: str | None = None
        self._thread = threading.Thread(
            target=self._run, args=(ring, copier, begin), name="copy ring", daemon=True
        )
        self._thread.start()

    def _run(self, ring: CopyRing, copier: Copier, begin: Callable[[], None]) -> None:
        self.error = serve(ring, copier, begin)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for its end: the producer closes the ring, or an abort ends it."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
