"""Counters of a stream without the driver's memory operations: threads and events.

Each stream has a thread that gives the driver its work in order and stops where a counter has to
be reached first. A write becomes an event; one more thread looks at the oldest event of each
stream, publishes the counter when it has passed, and so wakes who sleeps there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from shadowlane.actors.cuda.driver import CudaError, Driver
from shadowlane.ops.atomics import publish, wait_counter

LOOK_S = 20e-6  # between two looks at events that have not passed


@dataclass(slots=True)
class Line:
    """One stream's work on its way to the driver."""

    todo: SimpleQueue[Callable[[], None] | None] = field(default_factory=SimpleQueue)
    thread: threading.Thread | None = None
    submitted: int = 0  # pieces of work given in, and given to the driver
    begun: int = 0
    pending: deque[tuple[int, int, int]] = field(default_factory=deque)  # event, counter, value


class Events:
    """The mode of `CardStreams` that needs nothing but events."""

    def __init__(self, driver: Driver, ordinal: int, abort: int) -> None:
        self._driver = driver
        self._ordinal = ordinal
        self._abort = abort
        self._lines: dict[int, Line] = {}
        self._free_events: list[int] = []
        self._changed = threading.Condition()
        self._is_closing = False
        self._failure: CudaError | None = None
        self._publisher = threading.Thread(target=self._guarded, args=(self._publish,), daemon=True)
        self._publisher.start()

    def submit(self, stream: int, work: Callable[[], None]) -> None:
        if self._failure is not None:
            raise self._failure
        line = self._line(stream)
        line.submitted += 1
        line.todo.put(work)

    def wait(self, stream: int, counter: int, value: int) -> None:
        # NOTE: it sleeps, and an abort ends it: what follows is then done, as on a card whose
        # counters were advanced.
        self.submit(stream, lambda: wait_counter(counter, value, self._abort, 0, 0) and None)

    def write(self, stream: int, counter: int, value: int) -> None:
        def record() -> None:
            with self._changed:
                event = self._free_events.pop() if self._free_events else None
            if event is None:
                event = self._driver.create_event()
            self._driver.record_event(event, stream)
            with self._changed:
                self._lines[stream].pending.append((event, counter, value))
                self._changed.notify_all()

        self.submit(stream, record)

    def is_idle(self, stream: int) -> bool:
        """Whether nothing is waiting here or running there. Raises what a thread failed with."""
        if self._failure is not None:
            raise self._failure
        line = self._lines.get(stream)
        if line is not None:
            with self._changed:
                if line.begun != line.submitted or line.pending:
                    return False
        return self._driver.is_stream_idle(stream)

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        for line in self._lines.values():
            line.todo.put(None)
        for line in self._lines.values():
            assert line.thread is not None
            line.thread.join()
        self._publisher.join()
        for event in self._free_events:
            self._driver.destroy_event(event)
        self._free_events = []

    # -- threads

    def _line(self, stream: int) -> Line:
        line = self._lines.get(stream)
        if line is None:
            line = Line()
            with self._changed:
                self._lines[stream] = line
            line.thread = threading.Thread(
                target=self._guarded, args=(lambda: self._feed(line),), daemon=True
            )
            line.thread.start()
        return line

    def _guarded(self, loop: Callable[[], None]) -> None:
        try:
            self._driver.set_device(self._ordinal)
            loop()
        except CudaError as error:  # the next call on a stream raises it
            self._failure = self._failure or error

    def _feed(self, line: Line) -> None:
        while (work := line.todo.get()) is not None:
            work()
            with self._changed:
                line.begun += 1

    def _publish(self) -> None:
        while True:
            with self._changed:
                while not any(line.pending for line in self._lines.values()):
                    if self._is_closing:
                        return
                    self._changed.wait()
                heads = [(line, line.pending[0]) for line in self._lines.values() if line.pending]
            passed = [head for head in heads if self._driver.is_event_done(head[1][0])]
            for line, (event, counter, value) in passed:
                publish(counter, value)
                with self._changed:
                    line.pending.popleft()
                    self._free_events.append(event)
            if not passed:
                time.sleep(LOOK_S)
