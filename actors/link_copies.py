"""How a transfer lane's copies happen: held for as long as a modelled link takes, or by a card.

The lane decides what is copied when and where to; these two only differ in who does it. Times and
places are the arena's words, see `transfer_lane.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from random import Random
from typing import Protocol

import numpy as np

from shadowlane.actors.arena import (
    LINK_COUNTER,
    LINK_SPAN_FIELDS,
    LINK_SPAN_RING,
    LINK_STATISTICS,
    MOVE_COUNTER,
    Arena,
    ArenaLayout,
)
from shadowlane.actors.copier import Copier, CopyError, Way
from shadowlane.actors.cuda.driver import CudaError
from shadowlane.actors.link_statistics import BUSY_NS, NUM_SPANS
from shadowlane.ops import emulated as law
from shadowlane.ops.atomics import WAIT_OK, counter_value, now_ns, publish, wait_counter

LOOK_UP_NS = 100_000_000


class Copies(Protocol):
    """What one link does. One side is an offset in the arena, the other in the memory of its card,
    as the layout has them."""

    def wait_for(self, counter: int, value: int) -> bool:
        """What is brought next waits for this counter (an address); False: look around first."""
        ...

    def bring(
        self, block: int, nbytes: int, source: int, target: int, count: int, step: int
    ) -> None:
        """Copy for the sweep, then count: the link's counter is `count` when it has arrived."""
        ...

    def move(self, block: int, nbytes: int, source: int, target: int, way: Way = "h2d") -> None:
        """Copy beside the sweep; returns when all is there. Raises ValueError at an abort, or where
        it cannot be done."""
        ...

    def look(self) -> None:
        """Write down what has been done since the last look; often enough to be up to date."""
        ...

    def close(self) -> None: ...


class EmulatedCopies:
    """From one part of the arena to another, each as long as its link would take."""

    def __init__(self, arena: Arena, layout: ArenaLayout, card: int) -> None:
        self._arena, self._layout, self._card = arena, layout, card
        self._statistics = arena.view(layout.links[card], np.int64, LINK_STATISTICS)
        self._spans = arena.view(
            layout.links[card] + LINK_STATISTICS * 8, np.int64, LINK_SPAN_RING, LINK_SPAN_FIELDS
        )
        self._law_at = layout.laws[len(layout.lanes) + card]
        self._law = arena.view(self._law_at, np.float64, law.LAW_FIELDS)
        self._load = arena.view(layout.loads, np.float64, law.LOADS)
        self._random = Random(int(self._law[law.SEED]))
        self._link = threading.Lock()  # one copy at a time: a card's copy engine

    def wait_for(self, counter: int, value: int) -> bool:
        abort = self._arena.base + self._layout.abort
        return bool(wait_counter(counter, value, abort, 0, LOOK_UP_NS) == WAIT_OK)

    def bring(
        self, block: int, nbytes: int, source: int, target: int, count: int, step: int
    ) -> None:
        self._copy(block, nbytes, source, target, step)
        counter = self._layout.counter(LINK_COUNTER + self._card)
        publish(self._arena.base + counter, count)

    def move(self, block: int, nbytes: int, source: int, target: int, way: Way = "h2d") -> None:
        """One that is in its place already (from = to) takes the time of its copy alone: the disk
        lane has written it there, where on a machine with a card it would have gone through RAM.
        """
        self._copy(block, nbytes, source, target, step=0)

    def look(self) -> None:
        """All is written down as it happens."""

    def close(self) -> None:
        """Nothing is held here."""

    def _copy(self, block: int, nbytes: int, source: int, target: int, step: int) -> None:
        memory, base = self._arena.memory, self._arena.base
        with self._link:
            started = now_ns()
            rate = float(self._law[law.BYTES_PER_S])
            self._load[self._card] = rate
            if source != target:
                memory[target : target + nbytes] = memory[source : source + nbytes]
            number = int(self._statistics[NUM_SPANS])
            factor = max(0.5, self._random.gauss(1.0, float(self._law[law.JITTER])))
            seconds = nbytes / rate * factor + float(self._law[law.LAUNCH_S])
            end_ns = started + int(seconds * self._law[law.SLOWED] * 1e9)
            law.sleep_until(end_ns, base + self._law_at, base + self._layout.abort)
            self._load[self._card] = 0.0
            ended = now_ns()
            self._spans[number % LINK_SPAN_RING] = (step, block, started, ended, nbytes)
            self._statistics[NUM_SPANS] += 1
            self._statistics[BUSY_NS] += ended - started


class CardCopies:
    """By a copier, which takes waits and copies ahead and has the card do them in order."""

    def __init__(
        self,
        arena: Arena,
        layout: ArenaLayout,
        card: int,
        copier: Copier,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._arena, self._layout, self._card = arena, layout, card
        self._copier = copier
        self._is_stopping = is_stopping
        self._giving = threading.Lock()  # the copier's calls come from one thread at a time
        self._num_moved = counter_value(arena.base + layout.counter(MOVE_COUNTER + card))

    def wait_for(self, counter: int, value: int) -> bool:
        # NOTE: the card waits, and so does all that follows. That ends: a slot is waited for only
        # if a step that has begun frees it.
        with self._giving:
            self._copier.wait(counter - self._arena.base, value)
        return True

    def bring(
        self, block: int, nbytes: int, source: int, target: int, count: int, step: int
    ) -> None:
        counter = self._layout.counter(LINK_COUNTER + self._card)
        with self._giving:
            self._copier.copy(source, target, nbytes, counter, count, about=(step, block))
            self._copier.look()

    def move(self, block: int, nbytes: int, source: int, target: int, way: Way = "h2d") -> None:
        try:
            self._move(block, nbytes, source, target, way)
        except (CopyError, CudaError) as error:
            raise ValueError(f"h2d:{self._card}: blocks cannot be moved: {error}") from None

    def _move(self, block: int, nbytes: int, source: int, target: int, way: Way) -> None:
        counter = self._layout.counter(MOVE_COUNTER + self._card)
        with self._giving:
            self._num_moved += 1
            count = self._num_moved
            self._copier.copy(source, target, nbytes, counter, count, way, about=(0, block))
        at, abort = self._arena.base + counter, self._arena.base + self._layout.abort
        while wait_counter(at, count, abort, 0, LOOK_UP_NS) != WAIT_OK:
            if self._is_stopping() or counter_value(abort):
                raise ValueError(f"h2d:{self._card}: stopped while blocks were moved")
            self.look()  # before the first step nobody else looks whether copies go on
        self.look()

    def look(self) -> None:
        with self._giving:
            self._copier.look()

    def close(self) -> None:
        """The ring belongs to the arena; the other end leaves it at an abort."""
