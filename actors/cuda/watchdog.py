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

from shadowlane.actors.cuda.streams import CardStreams
from shadowlane.ops.atomics import counter_value

LOOK_S = 5e-3


class Watchdog:
    """Releases the waits of `streams` while the abort word is set or a limit has passed."""

    def __init__(self, streams: CardStreams) -> None:
        self._streams = streams
        self._until: float | None = None  # monotonic; None: no limit now
        self._fired = False
        self._on_fire: Callable[[], None] | None = None
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    @contextmanager
    def limit(self, seconds: float, on_fire: Callable[[], None] | None = None) -> Iterator[None]:
        """Raise TimeoutError at the end if this took longer, all waits having been released.

        on_fire: called when the time is up, to end what waits on the host.
        """
        self._fired, self._on_fire = False, on_fire
        self._until = time.monotonic() + seconds
        try:
            yield
        finally:
            self._until = None
        if self._fired:
            raise TimeoutError(f"it must end within {seconds:g} s; its waits were released")

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_closing.wait(LOOK_S):
            until = self._until
            if until is not None and time.monotonic() >= until:
                if not self._fired and self._on_fire is not None:
                    self._on_fire()
                self._fired = True
                self._streams.release_waits()
            elif counter_value(self._streams.abort) != 0:
                self._streams.release_waits()
