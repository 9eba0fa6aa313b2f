"""Streams of a card that wait for counters and write them, like every other lane.

A stream is given its work far ahead: waits, copies, kernels, writes. Where the driver supports
operations on memory (`MEMOPS`), the card itself looks at the counter in host memory. Where it does
not (`EVENTS`), a thread per stream holds the work back until the counter is reached, and one thread
per card looks at events and publishes. Who uses a stream sees no difference but in latency.

A counter that a card writes wakes nobody who sleeps: CPU threads that wait for one have to look
again from time to time (`wait_counter` does every 20 ms; spin, or poll, where that is too long).
With events the publishing thread wakes them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal, Protocol

from shadowlane.actors.cuda.driver import CudaError, Direction, Driver
from shadowlane.actors.cuda.pinned import PinnedMemory
from shadowlane.ops.atomics import counter_value, publish, reached
from shadowlane.ops.table import COUNTER_NBYTES

MAX_STREAMS = 8  # of one context: from there on, streams depend on each other by accident
SMALL_NBYTES = 64 << 10  # what goes by a kernel and never queues behind weights
PROBE_S = 1.0
PROBE_LOOK_S = 2e-3  # long enough for a stream that does not wait to show it
LOOK_S = 100e-6

Mode = Literal["memops", "events"]


class SmallCopy(Protocol):
    """A kernel that copies a few bytes; all addresses are the card's. Starts it on `stream`."""

    def __call__(self, stream: int, target: int, source: int, nbytes: int) -> None: ...


class Engine(Protocol):
    """What makes waits and writes of counters happen on streams: one of the two modes."""

    def submit(self, stream: int, work: Callable[[], None]) -> None:
        """Do `work`, which gives the driver something for `stream`, after what came before."""
        ...

    def wait(self, stream: int, counter: int, value: int) -> None: ...
    def write(self, stream: int, counter: int, value: int) -> None: ...
    def is_idle(self, stream: int) -> bool: ...
    def close(self) -> None: ...


class Memops:
    """The card waits and writes itself."""

    def __init__(self, driver: Driver, pinned: PinnedMemory) -> None:
        self._driver = driver
        self._pinned = pinned

    def submit(self, stream: int, work: Callable[[], None]) -> None:
        work()

    def wait(self, stream: int, counter: int, value: int) -> None:
        self._driver.wait_value(stream, self._pinned.mapped(counter), value)

    def write(self, stream: int, counter: int, value: int) -> None:
        self._driver.write_value(stream, self._pinned.mapped(counter), value)

    def is_idle(self, stream: int) -> bool:
        return self._driver.is_stream_idle(stream)

    def close(self) -> None:
        """Nothing is held here."""


class CardStreams:
    """All streams of this process on one card, and the way to get them loose.

    abort: address of the abort word. words: address of two counters in pinned memory that nobody
    else uses, for trying out whether the card can wait and write; None: it cannot.
    """

    def __init__(
        self,
        driver: Driver,
        ordinal: int,
        pinned: PinnedMemory,
        abort: int,
        words: int | None,
        small_copy: SmallCopy | None = None,
    ) -> None:
        from shadowlane.actors.cuda.events import Events

        self.driver = driver
        self.pinned = pinned
        self.small_copy = small_copy
        self.abort = abort
        self._streams: list[CardStream] = []
        self._lock = threading.Lock()
        self._waits: dict[int, int] = {}  # counter -> the newest value that a stream waits for
        driver.set_device(ordinal)
        self.reason = _why_no_memops(driver, pinned, words)  # "" where the card can
        self.mode: Mode = "events" if self.reason else "memops"
        self._engine: Engine = (
            Events(driver, ordinal, abort) if self.reason else Memops(driver, pinned)
        )

    def open(self) -> CardStream:
        """A new stream. Create all at start: the first use of one may hold up others."""
        if len(self._streams) >= MAX_STREAMS:
            raise ValueError(f"a card must have at most {MAX_STREAMS} streams; all are in use")
        stream = CardStream(self, self._engine, self.driver.create_stream())
        self._streams.append(stream)
        return stream

    def expect(self, counter: int, value: int) -> None:
        """Note that a stream is going to wait for this."""
        with self._lock:
            newest = self._waits.get(counter)
            if newest is None or reached(value, newest):
                self._waits[counter] = value

    def release_waits(self) -> dict[int, int]:
        """Advance every counter that a stream waits for; returns those that were not there yet.

        Only for an abort or the end: whoever owns the counters sets them anew afterwards.
        """
        with self._lock:
            waits = dict(self._waits)
        behind = {
            counter: value
            for counter, value in waits.items()
            if not reached(counter_value(counter), value)
        }
        for counter, value in behind.items():
            publish(counter, value)
        return behind

    def is_idle(self) -> bool:
        """Whether all that the streams were given is done."""
        return all(stream.is_idle() for stream in self._streams)

    def drain(self, timeout_s: float) -> bool:
        """Wait until all is done; False if it is not in that time."""
        return self._settle(timeout_s, lambda: None)

    def abandon(self, timeout_s: float) -> bool:
        """Release all waits until nothing is left to be done; False if it does not end in time.

        NOTE: again and again, since a write that comes late may set a counter back.
        """
        done = self._settle(timeout_s, self.release_waits)
        with self._lock:
            self._waits.clear()
        return done

    def _settle(self, timeout_s: float, meanwhile: Callable[[], object]) -> bool:
        until = time.monotonic() + timeout_s
        while True:
            meanwhile()
            if self.is_idle():
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(LOOK_S)

    def close(self, timeout_s: float = 5.0) -> None:
        """End all; waits that are left are released. Raises CudaError if a stream hangs."""
        if not self.abandon(timeout_s):
            raise CudaError("closing the streams", f"work is left after {timeout_s:g} s")
        self._engine.close()
        for stream in self._streams:
            self.driver.destroy_stream(stream.handle)
        self._streams = []


class CardStream:
    """One stream. Its work happens in the order of the calls; none of them waits for the card.

    `handle` is what torch wraps (`torch.cuda.ExternalStream`); kernels go in through `submit`.
    """

    def __init__(self, owner: CardStreams, engine: Engine, handle: int) -> None:
        self._owner = owner
        self._engine = engine
        self._driver = owner.driver
        self.handle = handle
        self.lock = threading.RLock()  # hold it to choose a value and write it in one go

    def submit(self, work: Callable[[int], None]) -> None:
        """Call `work(handle)`, now or when its turn comes; it starts kernels on that stream."""
        with self.lock:
            self._engine.submit(self.handle, lambda: work(self.handle))

    def wait_counter(self, counter: int, value: int) -> None:
        """What follows waits until the counter at this address has come to `value`."""
        with self.lock:
            self._owner.expect(counter, value)
            self._engine.wait(self.handle, counter, value)

    def write_counter(self, counter: int, value: int) -> None:
        """Set the counter at this address when all that came before is done and visible."""
        with self.lock:
            self._engine.write(self.handle, counter, value)

    def copy_h2d(self, target: int, source: int, nbytes: int) -> None:
        """From pinned host memory to the card. Raises ValueError if it is not pinned."""
        with self.lock:
            for address, part in self._owner.pinned.split(source, nbytes):
                self._copy(target + address - source, address, part, Direction.H2D)

    def copy_d2h(self, target: int, source: int, nbytes: int) -> None:
        """From the card to pinned host memory. Raises ValueError if it is not pinned."""
        with self.lock:
            for address, part in self._owner.pinned.split(target, nbytes):
                self._copy(address, source + address - target, part, Direction.D2H)

    def copy_d2d(self, target: int, source: int, nbytes: int) -> None:
        """Within the card."""
        with self.lock:
            self._copy(target, source, nbytes, Direction.D2D)

    def copy_staged(
        self, target: int, source: int, nbytes: int, way: Literal["h2d", "d2h"]
    ) -> None:
        """Between the card and a slot of a `StagingRing`."""
        with self.lock:
            self._copy(target, source, nbytes, Direction.H2D if way == "h2d" else Direction.D2H)

    def _copy(self, target: int, source: int, nbytes: int, direction: Direction) -> None:
        def start() -> None:
            self._driver.copy(target, source, nbytes, direction, self.handle)

        self._engine.submit(self.handle, start)

    def copy_small(self, target: int, source: int, nbytes: int) -> None:
        """Copy activations by a kernel, so that they never queue behind weights in a copy engine.

        Each of the two is an address on the card or one in pinned host memory, which the kernel
        reads or writes in place.
        """
        if nbytes > SMALL_NBYTES:
            raise ValueError(f"a small copy must have at most {SMALL_NBYTES} bytes; got {nbytes}")
        kernel = self._owner.small_copy
        if kernel is None:
            raise ValueError("small copies must have a kernel; these streams were given none")
        there, here = self._on_card(target, nbytes), self._on_card(source, nbytes)
        self.submit(lambda handle: kernel(handle, there, here, nbytes))

    def _on_card(self, address: int, nbytes: int) -> int:
        """The card's address of a range that is the card's, or pinned."""
        pinned = self._owner.pinned
        return pinned.mapped(address) if pinned.holds(address, nbytes) else address

    def capture(self, work: Callable[[int], None]) -> int:
        """A graph of what `work(handle)` starts. The stream must be idle; no memory operations.

        Addresses, shapes and values are frozen in it, so waits and writes stay between graphs.
        """
        with self.lock:
            self._driver.begin_capture(self.handle)
            try:
                work(self.handle)
            finally:
                graph = self._driver.end_capture(self.handle)
            return graph

    def replay(self, graph: int) -> None:
        self.submit(lambda handle: self._driver.launch_graph(graph, handle))

    def is_idle(self) -> bool:
        return self._engine.is_idle(self.handle)


def _why_no_memops(driver: Driver, pinned: PinnedMemory, words: int | None) -> str:
    """Try a real wait and a real write; "" if they work, else why not.

    The attribute that tells describes an older version of these calls.
    """
    if words is None or not pinned.holds(words, 2 * COUNTER_NBYTES):
        return "counters are not pinned"
    begun, ended = words, words + COUNTER_NBYTES
    publish(begun, 0)
    publish(ended, 0)
    stream = driver.create_stream()
    try:
        driver.wait_value(stream, pinned.mapped(begun), 1)
        driver.write_value(stream, pinned.mapped(ended), 1)
        time.sleep(PROBE_LOOK_S)
        if counter_value(ended) != 0:
            return "a stream does not wait for a counter"
        publish(begun, 1)
        until = time.monotonic() + PROBE_S
        while counter_value(ended) != 1:
            if time.monotonic() >= until:
                return f"a stream wrote no counter within {PROBE_S:g} s"
            time.sleep(LOOK_S)
    except CudaError as error:
        driver.clear_error()
        publish(begun, 1)
        return str(error)
    finally:
        driver.destroy_stream(stream)
    return ""
