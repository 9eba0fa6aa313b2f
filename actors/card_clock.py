"""When things happened on a card's streams, as the arena's spans and busy times tell it.

Events with times go between what a stream is given. They are read once they have passed, and never
waited for: by the lane's thread while a step runs or none does, so that a step costs the recording
of two events for each instruction. From event to event the card's clock counts; the host's says
when a stream that was idle began.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from shadowlane.actors.arena import (
    LINK_SPAN_FIELDS,
    LINK_SPAN_RING,
    LINK_STATISTICS,
    Arena,
    ArenaLayout,
)
from shadowlane.actors.cuda.driver import Driver
from shadowlane.actors.cuda.streams import CardStream
from shadowlane.actors.link_statistics import BUSY_NS, NUM_SPANS
from shadowlane.ops import table as t
from shadowlane.ops.atomics import now_ns

MOST_MARKS = 4096  # of copies under way; what goes beyond has no span
BEGIN, RESUME = -1, -2  # in place of a group: the step begins, and a wait is over


@dataclass(slots=True)
class Mark:
    """One event on its way. `about`: of whoever set it."""

    about: tuple[int, ...]
    event: int
    is_idle: bool  # the stream had nothing to do: the event passes as soon as it is recorded
    given_ns: int = 0
    is_recorded: bool = False  # an event that was never recorded counts as done


class StreamClock:
    """Marks on one stream, set and read by one thread."""

    def __init__(self, driver: Driver, stream: CardStream) -> None:
        self._driver, self._stream = driver, stream
        self._marks: deque[Mark] = deque()
        self._free: list[int] = []
        self._last: Mark | None = None  # the newest that was read; its event is still its own
        self._at = 0.0  # when that was, ns

    @property
    def num_pending(self) -> int:
        return len(self._marks)

    def mark(self, *about: int, is_idle: bool = False) -> None:
        """Note when the stream gets here. is_idle: it has nothing to do before this."""
        event = self._free.pop() if self._free else self._driver.create_event(timing=True)
        mark = Mark(about, event, is_idle)

        def record(handle: int) -> None:
            mark.given_ns = now_ns()
            self._driver.record_event(event, handle)
            mark.is_recorded = True

        self._marks.append(mark)
        self._stream.submit(record)

    def read(self) -> list[tuple[tuple[int, ...], int]]:
        """(about, ns) of the marks that have been passed since the last look, in order.

        NOTE: the two clocks drift apart, so no mark is told to be before it was given, nor after
        it has been seen.
        """
        found = []
        while self._marks and self._marks[0].is_recorded:
            if not self._driver.is_event_done(self._marks[0].event):
                break
            mark, last = self._marks.popleft(), self._last
            if last is None or mark.is_idle:
                at = float(mark.given_ns)
            else:
                at = self._at + 1e6 * self._driver.elapsed_ms(last.event, mark.event)
            self._at = max(self._at, min(max(at, float(mark.given_ns)), float(now_ns())))
            if last is not None:
                self._free.append(last.event)
            self._last = mark
            found.append((mark.about, round(self._at)))
        return found

    def close(self) -> None:
        """Give the events back; the stream must have ended."""
        marks = [*self._marks, *([self._last] if self._last is not None else [])]
        for event in [*self._free, *(each.event for each in marks)]:
            self._driver.destroy_event(event)
        self._marks.clear()
        self._free, self._last = [], None


class StepTimes:
    """What a card's lane was busy with, written where a worker of a processor writes it."""

    def __init__(
        self,
        arena: Arena,
        layout: ArenaLayout,
        number: int,
        groups: dict[str, int],
        clock: StreamClock,
    ) -> None:
        """number: of the lane; groups: their numbers by their names."""
        place = layout.workers[number]
        self._header = arena.view(place, np.int64, t.WORKER_HEADER_NBYTES // 8)
        self._spans = arena.view(
            place + t.WORKER_HEADER_NBYTES, np.int64, t.SPAN_RING, t.SPAN_FIELDS
        )
        self._groups, self._clock = groups, clock
        self._header[t.TIMED_STEP] = 0
        self._before_ns = 0

    @property
    def is_pending(self) -> bool:
        return self._clock.num_pending > 0

    def begin(self, step: int, *, is_last: bool) -> None:
        """A step is given to the stream, which has ended the one before. is_last: nothing of it
        is timed."""
        self._clock.mark(step, BEGIN, int(is_last), is_idle=True)

    def resume(self, step: int) -> None:
        """Waits of an instruction are over."""
        self._clock.mark(step, RESUME, 0)

    def end(self, step: int, group: str, *, is_last: bool) -> None:
        """An instruction is over."""
        self._clock.mark(step, self._groups[group], int(is_last))

    def read(self) -> None:
        """Write down what has happened since the last look."""
        header = self._header
        for (step, what, is_last), at in self._clock.read():
            if what == RESUME:
                header[t.WAIT_NS] += at - self._before_ns
            elif what != BEGIN:
                span = (step, what, self._before_ns, at, 0)
                self._spans[int(header[t.NUM_SPANS]) % t.SPAN_RING] = span
                header[t.NUM_SPANS] += 1
                header[t.BUSY_NS] += at - self._before_ns
            self._before_ns = at
            if is_last:
                header[t.TIMED_STEP] = step


class LinkTimes:
    """What a link was busy with; belongs to the thread that submits its copies."""

    def __init__(self, arena: Arena, layout: ArenaLayout, card: int, clock: StreamClock) -> None:
        place = layout.links[card]
        self._statistics = arena.view(place, np.int64, LINK_STATISTICS)
        self._spans = arena.view(
            place + LINK_STATISTICS * 8, np.int64, LINK_SPAN_RING, LINK_SPAN_FIELDS
        )
        self._clock = clock
        self._began_ns = 0
        self._is_timed = False  # the copy that is being given to the stream

    @property
    def is_pending(self) -> bool:
        return self._clock.num_pending > 0

    def wait(self) -> None:
        """The stream is about to be given a wait."""
        if not self.is_pending:  # the last moment at which it is known to be idle
            self._clock.mark(BEGIN, is_idle=True)

    def begin(self) -> None:
        """A copy is about to be given to the stream."""
        self._is_timed = self._clock.num_pending < MOST_MARKS
        if self._is_timed:
            self._clock.mark(BEGIN, is_idle=not self.is_pending)

    def end(self, step: int, block: int, nbytes: int) -> None:
        """All of the copy has been given."""
        if self._is_timed:
            self._clock.mark(step, block, nbytes)

    def read(self) -> None:
        """Write down what has happened since the last look."""
        for about, at in self._clock.read():
            if about != (BEGIN,):
                step, block, nbytes = about
                number = int(self._statistics[NUM_SPANS])
                span = (step, block, self._began_ns, at, nbytes)
                self._spans[number % LINK_SPAN_RING] = span
                self._statistics[NUM_SPANS] += 1
                self._statistics[BUSY_NS] += at - self._began_ns
            self._began_ns = at
