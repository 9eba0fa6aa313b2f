"""The disk lane's part in a mixture: it reads the experts that a route misses, and makes room.

One thread follows the requests of the compute lane. It tells the cache what every route chose,
finds a slot for each missing expert and hands its extents to reader threads, many at a time.
Whoever ends the last extent of an expert makes it known: its word, then its place in the route's
order, then the counter that computing workers wait for. `ops/routes.py` says how words are shared.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shadowlane.actors.arena import READY_COUNTER, REQUEST_COUNTER, Arena, ArenaLayout
from shadowlane.actors.blueprint import Blueprint
from shadowlane.actors.expert_sources import ExpertSource, Extent
from shadowlane.actors.scratch import route_layout
from shadowlane.ops import table as t
from shadowlane.ops.atomics import WAIT_OK, counter_value, publish, wait_counter
from shadowlane.ops.routes import SLOT_MASK, compare_swap
from shadowlane.planner.experts import ExpertCache

LOOK_UP_NS = 50_000_000
STARVED_S = 200e-6  # all slots are in use: look again after this

Read = Callable[[Extent, int, int, int], object]  # (what, arena offset, step, number for the span)


@dataclass(slots=True)
class _Fetch:
    """An expert on its way."""

    key: int
    slot: int
    route: Route
    left: int  # extents


@dataclass(slots=True)
class Route:
    """What the disk lane needs to know of one route with missing experts."""

    number: int
    layer: int  # among the sparse ones
    step: int
    base: int  # READY_COUNTER before its first expert
    ready: int  # experts in its order so far


class ExpertReader:
    """See the module. `load`, then `follow` and any number of `work` in threads of their own."""

    def __init__(
        self,
        blueprint: Blueprint,
        layout: ArenaLayout,
        arena: Arena,
        read: Read,
        is_over: Callable[[], bool],
    ) -> None:
        assert blueprint.experts is not None, "only mixtures have experts"
        self._sources = blueprint.experts.sources
        self._per_layer = blueprint.experts.catalog.per_layer
        self._slot_nbytes = blueprint.experts.catalog.slot_nbytes
        self._num_slots = layout.num_expert_slots
        self._span_base = len(blueprint.sources)  # spans name experts behind the blocks
        self._layout, self._arena = layout, arena
        self._read, self._is_over = read, is_over
        num_layers = blueprint.experts.catalog.num_layers
        self._words = arena.view(layout.scratch["expert_words"], np.int64, len(self._sources))
        self._words_at = arena.base + layout.scratch["expert_words"]
        self._numbers = arena.view(layout.route_numbers, np.int64, 1 + t.ROUTE_RING)
        offsets = route_layout(blueprint.config, layout.step_rows)

        def fields(layer: int, name: str, count: int) -> np.ndarray:
            start = layout.scratch["routes"] + layer * offsets["nbytes"]
            return arena.view(start + offsets[name], np.int32, count)

        layers = range(num_layers)
        self._headers = [
            arena.view(
                layout.scratch["routes"] + layer * offsets["nbytes"],
                np.int64,
                t.ROUTE_HEADER_FIELDS,
            )
            for layer in layers
        ]
        self._starts = [fields(layer, "starts", self._per_layer + 1) for layer in layers]
        self._orders = [fields(layer, "order", self._per_layer) for layer in layers]
        self._missing = [fields(layer, "missing", self._per_layer) for layer in layers]
        self._cache = ExpertCache(num_layers, self._per_layer, self._num_slots)
        self._changed = threading.Condition()
        self._jobs: deque[tuple[_Fetch, Extent]] = deque()
        self._seen = int(self._numbers[0])  # the newest route that the cache knows of
        self._asked = counter_value(self._address(REQUEST_COUNTER))
        # What is in RAM is what the words say: they outlive this process.
        held = {int(word) & SLOT_MASK: key for key, word in enumerate(self._words.tolist()) if word}
        for key in held.values():
            self._cache.insert(key)
        self._free = [slot for slot in range(self._num_slots) if slot + 1 not in held]

    @property
    def holds_all(self) -> bool:
        """Whether every expert has a slot, so that nothing is ever missing."""
        return self._num_slots == len(self._sources)

    @property
    def cache(self) -> ExpertCache:
        return self._cache

    # -- the start

    def first_reads(self) -> Iterator[tuple[int, ExpertSource, int]]:
        """(key, source, arena offset) of what fills the free slots at the start."""
        wanted = [int(key) for key in self._cache.wanted() if not self._words[key]]
        for key, slot in zip(wanted, self._free, strict=False):
            yield key, self._sources[key], self._home(slot)

    def loaded(self, key: int, home: int) -> None:
        """An expert of `first_reads` has been read. Before steps run; from one thread at a time."""
        slot = (home - self._layout.expert_slots) // self._slot_nbytes
        self._free.remove(slot)
        self._cache.insert(key)
        self._words[key] = slot + 1

    # -- threads

    def follow(self) -> None:
        """Serve requests until the lane is over."""
        while not self._is_over():
            status = wait_counter(
                self._address(REQUEST_COUNTER),
                self._asked + 1,
                self._arena.base + self._layout.abort,
                0,
                LOOK_UP_NS,
            )
            self._learn()
            if status == WAIT_OK:
                self._asked = counter_value(self._address(REQUEST_COUNTER))
                self._serve()
        with self._changed:
            self._changed.notify_all()

    def work(self) -> None:
        """Read extents until the lane is over."""
        while True:
            with self._changed:
                while not self._jobs and not self._is_over():
                    self._changed.wait(0.1)
                if self._is_over():
                    return
                fetch, extent = self._jobs.popleft()
            self._read(
                extent,
                self._home(fetch.slot) + extent.home,
                fetch.route.step,
                self._span_base + fetch.key,
            )
            with self._changed:
                fetch.left -= 1
                if fetch.left == 0:
                    self._arrived(fetch)

    def _learn(self) -> None:
        """Tell the cache of all routes since the last look; some may have been overwritten."""
        newest = int(self._numbers[0])
        for number in range(max(self._seen, newest - t.ROUTE_RING) + 1, newest + 1):
            layer = int(self._numbers[1 + number % t.ROUTE_RING])
            if int(self._headers[layer][t.ROUTE_SEQUENCE]) == number:
                self._cache.touch(layer, np.flatnonzero(np.diff(self._starts[layer])))
        self._seen = newest

    def _serve(self) -> None:
        """Find slots for what the newest route misses, and queue the reads."""
        number = int(self._numbers[0])
        layer = int(self._numbers[1 + number % t.ROUTE_RING])
        header = self._headers[layer]
        num_resident, num_chosen = int(header[t.NUM_RESIDENT]), int(header[t.NUM_CHOSEN])
        base, step = int(header[t.READY_BASE]), int(header[t.ROUTE_STEP])
        route = Route(number, layer, step, base, num_resident)
        for expert in self._missing[layer][: num_chosen - num_resident].tolist():
            key = layer * self._per_layer + expert
            slot = self._take_slot(layer, number)
            if slot is None:
                return  # the lane is over
            source = self._sources[key]
            with self._changed:
                self._cache.insert(key)
                fetch = _Fetch(key, slot, route, len(source.extents))
                self._jobs.extend((fetch, extent) for extent in source.extents)
                self._changed.notify(len(source.extents))

    def _take_slot(self, layer: int, number: int) -> int | None:
        """A free slot, or that of the least useful expert that nobody needs; None: it is over."""
        while not self._is_over():
            if self._free:
                return self._free.pop()
            words = self._words.copy()
            is_evictable = (words & SLOT_MASK != 0) & (words >> t.SLOT_BITS < number)
            with self._changed:
                key = self._cache.victim(layer, is_evictable)
                if key is not None and compare_swap(self._words_at + 8 * key, int(words[key]), 0):
                    self._cache.remove(key)
                    return int(words[key] & SLOT_MASK) - 1
            if key is None:
                threading.Event().wait(STARVED_S)
        return None

    def _arrived(self, fetch: _Fetch) -> None:
        """Make an expert known that is in its slot now. One thread at a time."""
        route = fetch.route
        self._words[fetch.key] = (route.number << t.SLOT_BITS) | (fetch.slot + 1)
        self._orders[route.layer][route.ready] = fetch.key % self._per_layer
        route.ready += 1
        ready = np.int32(np.uint32((route.base + route.ready) & 0xFFFFFFFF))
        publish(self._address(READY_COUNTER), ready)

    def _home(self, slot: int) -> int:
        return self._layout.expert_slots + slot * self._slot_nbytes

    def _address(self, counter: int) -> int:
        return self._arena.base + self._layout.counter(counter)


def all_extents(
    reads: Iterator[tuple[int, ExpertSource, int]],
) -> Sequence[tuple[int, int, tuple[tuple[Extent, int], ...]]]:
    """(key, home, its (extent, arena offset)s) in the order in which they lie in the files."""
    planned = [
        (key, home, tuple((extent, home + extent.home) for extent in source.extents))
        for key, source, home in reads
    ]
    return sorted(planned, key=lambda each: (each[2][0][0].path, each[2][0][0].offset))
