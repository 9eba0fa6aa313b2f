"""A driver without a card: records every call, and does what the calls mean in plain memory.

Streams are threads that work through what they were given: they hold at a wait until the counter in
host memory is reached, copy, write counters as a card does (waking nobody).

Tests set `delays` (seconds per call, spent in the stream), `failures` (call -> name of the error),
limits and abilities; `stuck` tells which streams hold and why; `hazards` collects what would stall
or deadlock a real card.
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from recording_memory import CARD, MAPPED, RecordingMemory

from shadowlane.actors.cuda.driver import CudaError, Direction

LOOK_S = 20e-6  # between two looks at a counter: more each time, since looking takes from others
MOST_LOOK_S = 500e-6
HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@dataclass(slots=True)
class Call:
    """One thing that a stream was given."""

    name: str
    arguments: tuple
    work: Callable[[], None]


@dataclass(slots=True)
class Stream:
    """One stream and its thread."""

    given: threading.Condition  # there is something to do, or it closes
    todo: deque[Call] = field(default_factory=deque)
    is_busy: bool = False
    holds: tuple[int, int] | None = None  # the counter and value that it waits for
    captured: list[Call] | None = None
    is_closing: bool = False
    thread: threading.Thread | None = None


@dataclass(slots=True)
class Event:
    num_recorded: int = 0
    num_passed: int = 0
    passed_s: float = 0.0


class RecordingDriver(RecordingMemory):
    """See the module. All of `Driver`, and what tests look at."""

    def __init__(
        self,
        *,
        has_memops: bool = True,
        num_copy_engines: int = 2,
        most_pending: int = 1024,
        **abilities: Any,
    ) -> None:
        """abilities: those of `RecordingMemory`."""
        super().__init__(num_copy_engines=num_copy_engines, **abilities)
        self.has_memops = has_memops
        self.most_pending = most_pending  # work of one stream; who gives more has to wait
        self.delays: dict[str, float] = {}
        self.done: list[tuple[int, str, tuple]] = []  # (stream, name, arguments) as they ended
        self.num_pageable = 0  # copies of host memory that was not pinned
        self._engines = [threading.Lock() for _ in range(num_copy_engines)]
        self._streams: dict[int, Stream] = {}
        self._events: dict[int, Event] = {}
        self._graphs: dict[int, list[Call]] = {}
        self._next = 1

    # -- what tests ask

    def names(self, stream: int | None = None) -> list[str]:
        """Names of what has been done, of one stream or of all, in order."""
        with self._lock:
            return [name for number, name, _ in self.done if stream in (None, number)]

    def stuck(self) -> dict[int, tuple[int, int]]:
        """The streams that hold, and the counter and value that each waits for."""
        with self._lock:
            return {
                number: stream.holds
                for number, stream in self._streams.items()
                if stream.holds is not None
            }

    def settle(self, timeout_s: float = 30.0) -> None:
        """Wait until every stream is idle. Fails with what they wait for if they do not."""
        until = time.monotonic() + timeout_s
        with self._lock:
            while any(each.todo or each.is_busy for each in self._streams.values()):
                assert self._lock.wait(until - time.monotonic()), f"streams hold: {self._story()}"

    def left(self) -> dict[str, int]:
        """What was taken from the driver and not given back."""
        with self._lock:
            return {
                "card": len(self._cards),
                "pinned": len(self._pinned),
                "host": len(self._allocated_host),
                "streams": len(self._streams),
                "events": len(self._events),
                "graphs": len(self._graphs),
            }

    def holding(self) -> list[int]:
        return list(self.stuck())

    def shut_down(self) -> None:
        """End all threads, whatever they wait for, so that the memory they look at may go."""
        with self._lock:
            streams = list(self._streams.values())
            for stream in streams:
                stream.is_closing = True
                stream.todo.clear()
                stream.given.notify_all()
            self._lock.notify_all()
        for stream in streams:
            assert stream.thread is not None
            stream.thread.join()

    def _story(self) -> str:
        return json.dumps(
            {n: [str(each.holds), len(each.todo)] for n, each in self._streams.items()}
        )

    def launch(
        self, stream: int, work: Callable[[], None], name: str = "kernel", *arguments: object
    ) -> None:
        """Start a kernel, which is `work`; not of the driver's interface, as with real kernels."""
        self._give(stream, Call(name, arguments, work))

    # -- streams

    def create_stream(self) -> int:
        self._record("create_stream")
        number = self._number()
        stream = self._streams[number] = Stream(threading.Condition(self._mutex))
        stream.thread = threading.Thread(target=self._work, args=(number, stream), daemon=True)
        stream.thread.start()
        return number

    def destroy_stream(self, stream: int) -> None:
        self._record("destroy_stream", stream)
        with self._lock:
            state = self._streams.pop(stream)
            state.is_closing = True
            state.given.notify_all()
            self._lock.notify_all()

    def is_stream_idle(self, stream: int) -> bool:
        with self._lock:
            return not (self._streams[stream].todo or self._streams[stream].is_busy)

    def copy(
        self, target: int, source: int, nbytes: int, direction: Direction, stream: int
    ) -> None:
        self._record("copy", target, source, nbytes, direction, stream)
        on_card = (direction != Direction.D2H, direction != Direction.H2D)
        for address, is_card in zip((target, source), on_card, strict=True):
            if is_card != bool(address & CARD) or address & MAPPED:
                raise self._error("copy", "cudaErrorInvalidMemcpyDirection")
        for address, is_card in zip((target, source), on_card, strict=True):
            if not is_card and self._registration(address, nbytes) is None:
                self._refuse_straddling(address, nbytes)
                self.num_pageable += 1

        def move() -> None:
            places = [
                self.host_address(address, nbytes) if is_card else address
                for address, is_card in zip((target, source), on_card, strict=True)
            ]
            engine = self._engines[int(direction == Direction.D2H) % len(self._engines)]
            with engine:
                ctypes.memmove(*places, nbytes)
                self._delay("copy")

        self._give(stream, Call("copy", (target, source, nbytes, direction), move))

    def _refuse_straddling(self, address: int, nbytes: int) -> None:
        ends = (self._registration(address, 1), self._registration(address + nbytes - 1, 1))
        if ends != (None, None):
            raise self._error("copy", "cudaErrorInvalidValue")

    def wait_value(self, stream: int, address: int, value: int) -> None:
        self._record("wait_value", stream, address, value)
        word = self._word("wait_value", stream, address)

        state = self._streams[stream]

        def hold() -> None:
            look_s = LOOK_S
            while not self._has_reached(word, value) and not state.is_closing:
                state.holds = (address & ~MAPPED, value)
                time.sleep(look_s)
                look_s = min(look_s + LOOK_S, MOST_LOOK_S)
            state.holds = None

        self._give(stream, Call("wait_value", (address, value), hold))

    def write_value(self, stream: int, address: int, value: int) -> None:
        self._record("write_value", stream, address, value)
        word = self._word("write_value", stream, address)

        def write() -> None:
            self._delay("write_value")
            word.value = value & 0xFFFFFFFF

        self._give(stream, Call("write_value", (address, value), write))

    def _word(self, call: str, stream: int, address: int) -> ctypes.c_uint32:
        if not self.has_memops:
            raise self._error(call, "CUDA_ERROR_NOT_SUPPORTED")
        if self._streams[stream].captured is not None:
            raise self._error(call, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
        if address % 4:
            raise self._error(call, "CUDA_ERROR_INVALID_VALUE")
        try:
            return ctypes.c_uint32.from_address(self.host_address(address, 4))
        except CudaError:
            raise self._error(call, "CUDA_ERROR_INVALID_VALUE") from None

    @staticmethod
    def _has_reached(word: ctypes.c_uint32, value: int) -> bool:
        return (word.value - value) & 0xFFFFFFFF < 1 << 31

    def call_host(self, stream: int, function: int, data: int) -> None:
        self._record("call_host", stream)
        self._give(stream, Call("call_host", (), lambda: HostFunction(function)(data)))

    # -- events

    def create_event(self, *, timing: bool = False) -> int:
        self._record("create_event")
        number = self._number()
        self._events[number] = Event()
        return number

    def destroy_event(self, event: int) -> None:
        self._record("destroy_event", event)
        del self._events[event]

    def record_event(self, event: int, stream: int) -> None:
        self._record("record_event", event, stream)
        state = self._events[event]
        with self._lock:
            state.num_recorded += 1
            number = state.num_recorded

        def pass_by() -> None:
            with self._lock:
                state.num_passed = number
                state.passed_s = time.monotonic()
                self._lock.notify_all()

        self._give(stream, Call("record_event", (event,), pass_by))

    def is_event_done(self, event: int) -> bool:
        self._fail("is_event_done")
        state = self._events[event]
        return state.num_passed == state.num_recorded

    def wait_event(self, stream: int, event: int) -> None:
        self._record("wait_event", stream, event)
        state = self._events[event]
        number = state.num_recorded

        def hold() -> None:
            with self._lock:
                closing = self._streams[stream]
                self._lock.wait_for(lambda: state.num_passed >= number or closing.is_closing)

        self._give(stream, Call("wait_event", (event,), hold))

    def elapsed_ms(self, start: int, end: int) -> float:
        if not (self.is_event_done(start) and self.is_event_done(end)):
            raise self._error("elapsed_ms", "cudaErrorNotReady")
        return (self._events[end].passed_s - self._events[start].passed_s) * 1e3

    # -- graphs

    def begin_capture(self, stream: int) -> None:
        self._record("begin_capture", stream)
        self._streams[stream].captured = []

    def end_capture(self, stream: int) -> int:
        calls = self._streams[stream].captured
        assert calls is not None
        self._streams[stream].captured = None  # also where what was captured is no graph
        self._record("end_capture", stream)
        number = self._number()
        self._graphs[number] = calls
        return number

    def launch_graph(self, graph: int, stream: int) -> None:
        self._record("launch_graph", graph, stream)
        if self.last_error is not None:  # what nobody cleared comes out at a launch
            raise CudaError("launch_graph", self.last_error)
        for call in self._graphs[graph]:
            self._give(stream, call)

    def destroy_graph(self, graph: int) -> None:
        self._record("destroy_graph", graph)
        del self._graphs[graph]

    # -- inside

    def _number(self) -> int:
        with self._lock:
            self._next += 1
            return self._next

    def _delay(self, name: str) -> None:
        if name in self.delays:
            time.sleep(self.delays[name])

    def _give(self, stream: int, call: Call) -> None:
        with self._lock:
            state = self._streams[stream]
            if state.captured is not None:
                state.captured.append(call)
                return
            self._lock.wait_for(lambda: len(state.todo) < self.most_pending)
            state.todo.append(call)
            state.given.notify_all()

    def _work(self, number: int, stream: Stream) -> None:
        while True:
            with self._lock:
                stream.is_busy = False
                self._lock.notify_all()
                stream.given.wait_for(lambda: stream.todo or stream.is_closing)
                if not stream.todo:
                    return
                call = stream.todo.popleft()
                stream.is_busy = True
                self._lock.notify_all()
            if call.name not in ("copy", "write_value"):
                self._delay(call.name)
            call.work()
            with self._lock:
                self.done.append((number, call.name, call.arguments))
