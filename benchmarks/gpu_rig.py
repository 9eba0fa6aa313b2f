"""What the measurements of `gpu.py` share: a card with its memory, streams and helpers.

A `Rig` is one process on one card, with an arena like the engine's, pinned, and a watchdog. A
`Peer` is a second process on the same card, which runs `gpu_peer.py`. Kernels come from outside
(`gpu_kernels.py`), so that all but them also runs where there is no card.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import median
from typing import Any, Protocol

import numpy as np
from hops import ABORT, PING, PONG, time_hops
from measure import percentile

from shadowlane.actors.arena import Arena
from shadowlane.actors.cuda.devices import Device, find_devices
from shadowlane.actors.cuda.driver import CudaError, Driver
from shadowlane.actors.cuda.memory import CardMemory
from shadowlane.actors.cuda.pinned import PinnedMemory
from shadowlane.actors.cuda.streams import CardStream, CardStreams, SmallCopy
from shadowlane.actors.cuda.watchdog import Watchdog
from shadowlane.ops.atomics import counter_value, publish, wake_all

PAGE = 4096
CONTROL_NBYTES = 1 << 20
# in the control region
ABORT_WORD, WORDS, OUR_HOPS, PEER_HOPS, COUNTERS, SMALL = (
    page * PAGE for page in (0, 1, 2, 3, 4, 64)
)
SMALL_NBYTES = 16 << 10  # activations of a crossing
LEAST_NBYTES = 2 << 20
WATCHDOG_S = 3.0
PEER_S = 60.0  # a process that loads torch takes its time
SPIN_NS = 100_000_000


class Kernels(Protocol):
    """What only a card with a kernel library can do. All of it works on the stream it is given."""

    @property
    def copy_small(self) -> SmallCopy: ...

    def matvec(self, layout: str, rows: int, cols: int) -> tuple[Callable[[int], None], int]:
        """A matrix-vector product `run(stream)` and the bytes of weights that it reads."""
        ...

    def busy(self, stream: int, seconds: float) -> None:
        """One kernel that keeps the card busy for about so long."""
        ...


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result."""

    name: str
    median: float | None
    p99: float | None
    unit: str
    extras: dict[str, Any]

    def json(self) -> str:
        line = {"name": self.name, "median": self.median, "p99": self.p99, "unit": self.unit}
        return json.dumps({**line, **self.extras})


def row(name: str, samples: Sequence[float], unit: str, **extras: Any) -> Row:
    """A row of samples. p99 is the bad end: the least of a rate, the greatest of a time."""
    is_rate = unit.endswith("/s")
    ordered = [-each for each in samples] if is_rate else list(samples)
    worst = percentile(ordered, 99)
    return Row(name, median(samples), -worst if is_rate else worst, unit, extras)


def note(name: str, **extras: Any) -> Row:
    """A row that is no measurement: attributes, a reason, an error."""
    return Row(name, None, None, "", extras)


def load(name: str) -> Any:
    """`module:attribute`."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


class Rig:
    """One process on one card. `nbytes`: of weights in the arena and of memory on the card."""

    def __init__(
        self,
        driver_name: str,
        kernels_name: str,
        ordinal: int = 0,
        nbytes: int = 1 << 30,
        repeats: int = 200,
    ) -> None:
        self.driver_name = driver_name
        self.driver: Driver = load(driver_name)()
        self.device: Device = find_devices(self.driver)[ordinal]
        self.driver.set_device(ordinal)
        self.repeats = repeats
        self.arena = Arena.create(CONTROL_NBYTES + nbytes, "gpu benchmark")
        self.weights = self.arena.base + CONTROL_NBYTES
        self.pinned = PinnedMemory(self.driver)
        self.pinned.register(self.arena.base, CONTROL_NBYTES)
        self.pin_error = ""  # the last one, where less could be pinned than was asked for
        self.nbytes = self._pin_weights(nbytes)
        self.card = CardMemory.allocate(self.driver, self.nbytes)
        self.kernels: Kernels = load(kernels_name)(self.driver)
        self.streams = CardStreams(
            self.driver,
            ordinal,
            self.pinned,
            self.arena.base + ABORT_WORD,
            self.arena.base + WORDS,
            self.kernels.copy_small,
        )
        self.main = self.streams.open()
        self.second = self.streams.open()
        self.watchdog = Watchdog(self.streams)

    def _pin_weights(self, nbytes: int) -> int:
        """Pin as much as the system allows, by halves; returns how much that was."""
        while True:
            try:
                self.pinned.register(self.weights, nbytes)
                return nbytes
            except CudaError as error:
                self.pin_error = str(error)
                if nbytes // 2 < LEAST_NBYTES:
                    raise
                nbytes = nbytes // 2 // PAGE * PAGE

    def limit(self, seconds: float = WATCHDOG_S) -> AbstractContextManager[None]:
        """End whatever waits after so long, on the card or here."""
        for page in (OUR_HOPS, PEER_HOPS):
            self._set_abort(page, 0)
        return self.watchdog.limit(seconds, self._abort_hops)

    def _abort_hops(self) -> None:
        for page in (OUR_HOPS, PEER_HOPS):
            self._set_abort(page, 1)
            for counter in (PING, PONG):
                wake_all(self.arena.base + page + counter)

    def _set_abort(self, page: int, value: int) -> None:
        self.arena.view(page + ABORT, np.int32, 1)[0] = value

    def counter(self, number: int) -> int:
        return self.arena.base + COUNTERS + number * 1024

    def finish(self, stream: CardStream) -> None:
        """Wait until a stream is idle; the watchdog bounds it."""
        while not stream.is_idle():
            time.sleep(0)

    def timed(self, stream: CardStream, work: Callable[[], None]) -> float:
        """Seconds that the card needs for what `work` gives the stream, by its own clock."""
        start, end = (self.driver.create_event(timing=True) for _ in range(2))
        try:
            stream.submit(lambda handle: self.driver.record_event(start, handle))
            work()
            stream.submit(lambda handle: self.driver.record_event(end, handle))
            self.finish(stream)
            return self.driver.elapsed_ms(start, end) / 1e3
        finally:
            for event in (start, end):
                self.driver.destroy_event(event)

    def reset_hops(self, page: int) -> int:
        """Both counters of a page at 0; returns its address."""
        base = self.arena.base + page
        for counter in (PING, PONG):
            publish(base + counter, 0)
        return base

    def hop_us(self, page: int, count: int) -> list[float]:
        """Microseconds of `count` round trips with whoever answers the hops of this page."""
        base = self.arena.base + page
        taken = np.zeros(count, np.int64)
        failed = time_hops(base, count, SPIN_NS, 0, taken)
        if failed:
            raise TimeoutError(f"hop {failed} of {count} was not answered")
        return [each / 1e3 for each in taken]

    def close(self) -> None:
        self.watchdog.close()
        self.streams.close()
        self.card.close()
        self.pinned.close()
        self.arena.close()


class Feeder:
    """Keeps a stream busy with copies of weights until it is stopped; few are in flight."""

    def __init__(self, rig: Rig, stream: CardStream, chunk_nbytes: int, in_flight: int = 4) -> None:
        self._rig = rig
        self._stream = stream
        self._chunk_nbytes = chunk_nbytes
        self._in_flight = in_flight
        self._is_stopping = False
        self._num_copied = 0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._feed, daemon=True)
        self._began = time.perf_counter()
        self._thread.start()

    def _feed(self) -> None:
        rig = self._rig
        rig.driver.set_device(rig.device.ordinal)
        counter = rig.counter(0)
        number = counter_value(counter)
        num_places = max(1, rig.nbytes // self._chunk_nbytes)
        first = number
        try:
            while not self._is_stopping:
                if number - counter_value(counter) >= self._in_flight:
                    time.sleep(0)
                    continue
                at = number % num_places * self._chunk_nbytes
                self._stream.copy_h2d(
                    rig.card.at(at, self._chunk_nbytes), rig.weights + at, self._chunk_nbytes
                )
                number += 1
                self._stream.write_counter(counter, number)
        except (CudaError, ValueError) as error:
            self._error = error
        self._num_copied = number - first

    def stop(self) -> float:
        """End it; returns bytes per second."""
        self._is_stopping = True
        self._thread.join()
        if self._error is not None:
            raise self._error
        self._rig.finish(self._stream)
        return self._num_copied * self._chunk_nbytes / (time.perf_counter() - self._began)


class Peer:
    """A second process on the card, told what to do by `command`; it answers in JSON lines."""

    def __init__(self, rig: Rig, command: str, **given: Any) -> None:
        request = {
            "driver": rig.driver_name,
            "uuid": rig.device.uuid,
            "ordinal": rig.device.ordinal,
            "arena": asdict(rig.arena.handle),
            "nbytes": rig.nbytes,
            **given,
        }
        script = str(Path(__file__).with_name("gpu_peer.py"))
        self._process = subprocess.Popen(
            [sys.executable, script, command, json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)},
        )
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def answer(self, timeout_s: float = PEER_S) -> dict[str, Any]:
        """The next answer. Raises RuntimeError with what went wrong there."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except Empty:
            raise RuntimeError(f"the second process gave no answer in {timeout_s:g} s") from None
        if line is None:
            raise RuntimeError("the second process ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the second process: {answer['error']}")
        return answer

    def end(self) -> None:
        """Have it stop what it does."""
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            self._process.stdin.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


Section = Callable[[Rig], Iterator[Row]]
