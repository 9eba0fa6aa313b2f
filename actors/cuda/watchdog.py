"""No stream is left waiting: not after an abort, and not where a step takes far too long.

A stream that waits looks at no abort word, and a card that waits for ever can be neither freed nor
left. So a thread looks at the abort word for all streams of a process, and at the clock for whoever
asks, and advances the counters that streams wait for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shadowlane.actors.cuda.streams import CardStreams
from shadowlane.ops.atomics import counter_value

LOOK_S = 5e-3


@dataclass(slots=True)
class Limit:
    """What somebody wants ended by when."""

    until: float  # monotonic
    on_fire: Callable[[], None] | None
    has_fired: bool = False


class Watchdog:
    """Releases the waits of `streams` while the abort word is set or a limit has passed."""

    def __init__(self, streams: CardStreams) -> None:
        self._streams = streams
        self._limit: Limit | None = None
        self._lock = threading.Lock()  # held while firing: nothing is fired at whoever comes next
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def limit(self, seconds: float, on_fire: Callable[[], None] | None = None) -> Iterator[None]:
        """Raise TimeoutError at the end if this took longer, all waits having been released.

        on_fire: called when the time is up, to end what waits on the host. One limit at a time.
        """
        limit = Limit(time.monotonic() + seconds, on_fire)
        with self._lock:
            self._limit = limit
        try:
            yield
        finally:
            with self._lock:
                self._limit = None
        if limit.has_fired:
            raise TimeoutError(f"it must end within {seconds:g} s; its waits were released")

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_closing.wait(LOOK_S):
            with self._lock:
                limit = self._limit
                if limit is not None and time.monotonic() >= limit.until:
                    if not limit.has_fired and limit.on_fire is not None:
                        limit.on_fire()
                    limit.has_fired = True
                    self._streams.release_waits()
                elif counter_value(self._streams.abort) != 0:
                    self._streams.release_waits()
