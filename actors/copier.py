"""What a transfer lane submits its copies through, and the two things that really copy.

A copier takes copies and waits in order and returns at once; that a copy is done shows as a counter
in the arena, like the work of every other lane. Where the work happens is a property of the copier:
`StreamCopier` gives it to a stream of a card (in the GPU actor, or in the transfer actor itself
when that has opened the card's memory); `MemoryCopier` has no card and copies within the arena,
for emulated lanes; `copy_ring.RingCopier` hands it to a copier in another process.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Literal, Protocol

from shadowlane.actors.arena import Arena
from shadowlane.ops.atomics import WAIT_OK, counter_value, publish, wait_counter

if TYPE_CHECKING:
    from shadowlane.actors.cuda.memory import CardMemory
    from shadowlane.actors.cuda.pinned import StagingRing
    from shadowlane.actors.cuda.streams import CardStream

CHUNK_NBYTES = 4 << 20  # of one operation of a copy engine, between which others get their turn

Way = Literal["h2d", "d2h"]
About = tuple[int, int]  # of which step a copy is (0: of none), and of which block
ABORTED = "an abort ended a copy that waited"


class CopyError(RuntimeError):
    """A copier that works no more: one line with what it failed with."""


class Copier(Protocol):
    """Copies between the arena and the memory of a card, in order, completion told by counters.

    Offsets are relative to the arena and to the lane's part of the card's memory; counters are
    arena offsets too. After a failure every call raises CopyError.
    """

    def wait(self, counter: int, value: int) -> None:
        """What follows begins when this counter has come to `value`."""
        ...

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
        """Copy, then set the counter to `value`. One writer per counter: this copier.

        h2d: `source` is in the arena, `target` on the card; d2h: the other way round.
        """
        ...

    def look(self) -> bool:
        """Write down what has been done; whether anything is under way that is not.

        Raises CopyError, or CudaError, if what was given will not be done.
        """
        ...

    def close(self) -> None: ...


def chunks(nbytes: int, chunk_nbytes: int) -> list[tuple[int, int]]:
    """(offset, nbytes) of each operation that a copy is made of."""
    return [(start, min(chunk_nbytes, nbytes - start)) for start in range(0, nbytes, chunk_nbytes)]


class CopyTimes(Protocol):
    """Notes when copies happen on a stream; see `card_clock.LinkTimes`."""

    @property
    def is_pending(self) -> bool: ...
    def wait(self) -> None: ...
    def begin(self) -> None: ...
    def end(self, step: int, block: int, nbytes: int) -> None: ...
    def read(self) -> None: ...


class StreamCopier:
    """Copies on a stream of a card.

    Where the arena is not pinned, weights pass through a staging ring: this thread then waits for
    counters itself and copies to the ring, and is busy as long as the copies last.
    """

    def __init__(
        self,
        stream: CardStream,
        arena: Arena,
        card: CardMemory,
        abort: int,
        *,
        staging: StagingRing | None = None,
        chunk_nbytes: int = CHUNK_NBYTES,
        times: CopyTimes | None = None,
    ) -> None:
        """abort: arena offset of the abort word, at which waits of this thread end."""
        if staging is not None:
            chunk_nbytes = min(chunk_nbytes, staging.slot_nbytes)
        self._stream = stream
        self._arena = arena
        self._card = card
        self._abort = arena.base + abort
        self._staging = staging
        self._chunk_nbytes = chunk_nbytes
        self._times = times

    def wait(self, counter: int, value: int) -> None:
        at = self._arena.base + counter
        if self._times is not None:
            self._times.wait()
        if self._staging is None:
            self._stream.wait_counter(at, value)
        elif wait_counter(at, value, self._abort, 0, 0) != WAIT_OK:
            raise CopyError(ABORTED)

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
        host = self._arena.base + (source if way == "h2d" else target)
        card = self._card.at(target if way == "h2d" else source, nbytes)
        if self._times is not None:
            self._times.begin()
        for start, part in chunks(nbytes, self._chunk_nbytes):
            if self._staging is not None:
                self._copy_staged(self._staging, card + start, host + start, part, way)
            elif way == "h2d":
                self._stream.copy_h2d(card + start, host + start, part)
            else:
                self._stream.copy_d2h(host + start, card + start, part)
        if self._times is not None:
            self._times.end(*about, nbytes)
        self._stream.write_counter(self._arena.base + counter, value)

    def look(self) -> bool:
        if self._times is None:
            return False
        self._times.read()
        return self._times.is_pending

    def _copy_staged(
        self, staging: StagingRing, card: int, host: int, nbytes: int, way: Way
    ) -> None:
        slot = staging.slot(self._is_aborted)
        if slot is None:
            raise CopyError(ABORTED)
        if way == "h2d":
            ctypes.memmove(slot, host, nbytes)  # lets other threads run meanwhile
            self._stream.copy_staged(card, slot, nbytes, way)
            staging.pass_on(self._stream)
            return
        self._stream.copy_staged(slot, card, nbytes, way)
        if not staging.wait_for(staging.pass_on(self._stream), self._is_aborted):
            raise CopyError(ABORTED)
        ctypes.memmove(host, slot, nbytes)

    def _is_aborted(self) -> bool:
        return counter_value(self._abort) != 0

    def close(self) -> None:
        """The stream is its owner's to close."""


@dataclass(frozen=True, slots=True)
class Job:
    """One thing for the thread of a `MemoryCopier`: a wait, or a copy that has a length."""

    source: int
    target: int
    nbytes: int | None
    counter: int
    value: int


Hold = Callable[[int, int], None]


class MemoryCopier:
    """Copies within the arena, for lanes of cards that are emulated or not there.

    card: arena offset at which the memory of the card that is not there begins. hold: called after
    each chunk as `hold(nbytes, began_ns)`, returns when the emulated link would be done with it.
    """

    def __init__(
        self,
        arena: Arena,
        card: int,
        abort: int,
        *,
        hold: Hold | None = None,
        chunk_nbytes: int = CHUNK_NBYTES,
    ) -> None:
        self._arena = arena
        self._card = card
        self._abort = arena.base + abort
        self._hold = hold
        self._chunk_nbytes = chunk_nbytes
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="copier", daemon=True)
        self._thread.start()

    def wait(self, counter: int, value: int) -> None:
        self._give(Job(0, 0, None, counter, value))

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
        if way == "h2d":
            target += self._card
        else:
            source += self._card
        for offset in (source, target):
            if offset < 0 or offset + nbytes > self._arena.handle.nbytes:
                raise ValueError(
                    f"a copy must stay within {self._arena.handle.nbytes} bytes; "
                    f"got {offset}+{nbytes}"
                )
        self._give(Job(source, target, nbytes, counter, value))

    def look(self) -> bool:
        return False

    def _give(self, job: Job) -> None:
        if self._failure is not None:
            raise CopyError(self._failure)
        self._jobs.put(job)

    def close(self) -> None:
        """Finish what was given, and end the thread; an abort ends it sooner."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                self._do(job)
        except Exception as error:  # the next call says so
            self._failure = f"{type(error).__name__}: {error}" if str(error) else repr(error)

    def _do(self, job: Job) -> None:
        if job.nbytes is None:
            at = self._arena.base + job.counter
            if wait_counter(at, job.value, self._abort, 0, 0) != WAIT_OK:
                raise CopyError(ABORTED)
            return
        base = self._arena.base
        for start, part in chunks(job.nbytes, self._chunk_nbytes):
            began_ns = time.monotonic_ns()
            ctypes.memmove(base + job.target + start, base + job.source + start, part)
            if self._hold is not None:
                self._hold(part, began_ns)
        publish(base + job.counter, job.value)
