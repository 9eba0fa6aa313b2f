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
from shadowlane.ops.atomics import counter_value, publish, wait_counter
from shadowlane.ops.routes import SLOT_MASK, compare_swap
from shadowlane.planner.chooser import Chooser
from shadowlane.planner.experts import MIXTURE, POLICIES, ExpertCache, policy_named
from shadowlane.planner.heat import Heat
from shadowlane.planner.look_ahead import LookAhead, LookAheadSettings

LOOK_UP_NS = 50_000_000
STARVED_S = 200e-6  # all slots are in use: look again after this

# fields of ExpertStatistics
(
    POLICY,  # index in POLICIES
    POLICY_SWITCHES,
    EARLY_READS,  # experts read before they were known to be needed
    USED_EARLY,  # of these, chosen then
    GUESSED,  # chosen experts that a guess had named, of GUESSED_OF
    GUESSED_OF,
    WITHDRAWN,
    IS_LOOKING,
    EARLY_HITS,  # chosen experts that were in RAM only because a guess had just brought them
    NUM_EXPERT_STATISTICS,
) = range(10)

Read = Callable[[Extent, int, int, int], object]  # (what, arena offset, step, number for the span)


class ExpertStatistics:
    """What the reader tells about itself: int64 [NUM_EXPERT_STATISTICS]."""

    def __init__(self, fields: np.ndarray) -> None:
        self.fields = fields
        # the arena outlives this process, and others take differences of it
        self._early_hits = int(fields[EARLY_HITS])

    def tell(self, look: LookAhead, chooser: Chooser) -> None:
        self.fields[POLICY] = POLICIES.index(chooser.policy)
        self.fields[POLICY_SWITCHES] = chooser.num_switches
        self.fields[EARLY_READS], self.fields[USED_EARLY] = look.early_reads, look.used_reads
        self.fields[GUESSED], self.fields[GUESSED_OF] = look.named, look.chosen
        self.fields[WITHDRAWN], self.fields[IS_LOOKING] = look.withdrawn, int(look.is_on)
        self.fields[EARLY_HITS] = self._early_hits + look.early_hits


@dataclass(slots=True)
class Route:
    """What has to be known of a route with missing experts while they are read."""

    number: int
    layer: int  # among the sparse ones
    base: int  # READY_COUNTER before its first expert
    ready: int  # experts in its order so far


@dataclass(slots=True)
class _Fetch:
    """An expert on its way. `route` None: a guess."""

    key: int
    slot: int
    step: int
    mark: int  # number of the route up to which it must not be evicted
    route: Route | None
    left: int  # extents
    is_submitted: bool = False
    is_withdrawn: bool = False


@dataclass(frozen=True, slots=True)
class _Guess:
    """What the route `number` was expected to choose."""

    number: int
    experts: frozenset[int]
    fetches: tuple[_Fetch, ...]  # of those that were missing


class ExpertReader:
    """See the module. `begin`, fill the slots, then `follow` and some `work`, each in a thread."""

    def __init__(
        self,
        blueprint: Blueprint,
        layout: ArenaLayout,
        arena: Arena,
        read: Read,
        is_over: Callable[[], bool],
        statistics: ExpertStatistics,
        looks_ahead: bool,
    ) -> None:
        assert blueprint.experts is not None, "only mixtures have experts"
        self._sources = blueprint.experts.sources
        self._per_layer = blueprint.experts.catalog.per_layer
        self._slot_nbytes = blueprint.experts.catalog.slot_nbytes
        self._num_slots = layout.num_expert_slots
        self._span_base = len(blueprint.sources)  # spans name experts behind the blocks
        self._layout, self._arena = layout, arena
        self._read, self._is_over, self._statistics = read, is_over, statistics
        self._model = blueprint.fingerprint
        self._top_k = blueprint.experts.catalog.top_k
        num_layers = self._num_layers = blueprint.experts.catalog.num_layers
        self._words = arena.view(layout.scratch["expert_words"], np.int64, len(self._sources))
        self._words_at = arena.base + layout.scratch["expert_words"]
        self._numbers = arena.view(layout.route_numbers, np.int64, t.ROUTE_WORDS)
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
        self._guesses = [fields(layer, "guesses", self._top_k) for layer in layers]
        self._changed = threading.Condition()
        self._certain: deque[tuple[_Fetch, Extent]] = deque()
        self._likely: deque[tuple[_Fetch, Extent]] = deque()  # read where nothing is certain
        self._early: dict[int, _Fetch] = {}  # guessed and on their way, by key
        self._guessed: dict[int, _Guess] = {}  # by layer, until its route comes
        self._look_ahead = LookAhead(LookAheadSettings(), is_on=looks_ahead and not self.holds_all)
        self._never_looks = not self._look_ahead.is_on
        self._numbers[t.LOOKS_AHEAD] = int(self._look_ahead.is_on)
        self._served = int(self._numbers[t.NEWEST_REQUEST])
        self._seen = int(self._numbers[0])  # the newest route that the cache knows of
        self._asked = counter_value(self._address(REQUEST_COUNTER))

    @property
    def holds_all(self) -> bool:
        """Whether every expert has a slot, so that nothing is ever missing."""
        return self._num_slots == len(self._sources)

    @property
    def cache(self) -> ExpertCache:
        return self._cache

    # -- from run to run

    def begin(self, heat: Heat | None, policy: str | None) -> None:
        """What earlier runs chose, and the policy that stays, if one is to. Before all reads."""
        if heat is not None:
            heat.check(self._model, self._num_layers, self._per_layer)
        rivals = POLICIES if policy is None else (policy_named(policy),)
        current = MIXTURE if policy is None else rivals[0]
        shape = (self._num_layers, self._per_layer)
        self._cache = ExpertCache(*shape, self._num_slots, current, heat=heat)
        self._chooser = Chooser(
            *shape,
            self._top_k,
            self._num_slots,
            policies=rivals,
            current=current,
            heat=heat,
        )
        # What is in RAM is what the words say: they outlive this process.
        held = {int(word) & SLOT_MASK: key for key, word in enumerate(self._words.tolist()) if word}
        for key in held.values():
            self._cache.insert(key)
        self._free = [slot for slot in range(self._num_slots) if slot + 1 not in held]

    def heat(self) -> Heat:
        """What this run has chosen."""
        with self._changed:
            return self._cache.heat(self._model)

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
        """Serve requests and guesses until the lane is over."""
        request, abort = self._address(REQUEST_COUNTER), self._arena.base + self._layout.abort
        while not self._is_over():
            wait_counter(request, self._asked + 1, abort, 0, LOOK_UP_NS)
            self._asked = counter_value(request)
            with self._changed:
                learnt = self._learn()
            newest = int(self._numbers[t.NEWEST_REQUEST])
            if newest > self._served:
                self._served = newest
                self._serve(newest)
            if self._look_ahead.is_on:
                self._guess()
            self._compare(learnt)  # while the disk works
        with self._changed:
            self._changed.notify_all()

    def work(self) -> None:
        """Read extents until the lane is over; what is certain goes first."""
        while True:
            with self._changed:
                while not (self._certain or self._likely) and not self._is_over():
                    self._changed.wait(0.1)
                if self._is_over():
                    return
                fetch, extent = (self._certain or self._likely).popleft()
                if fetch.is_withdrawn:
                    continue
                fetch.is_submitted = True
            home = self._home(fetch.slot) + extent.home
            self._read(extent, home, fetch.step, self._span_base + fetch.key)
            with self._changed:
                fetch.left -= 1
                if fetch.left == 0:
                    self._arrived(fetch)

    def _learn(self) -> list[tuple[int, np.ndarray, bool]]:
        """Tell the cache of all routes since the last look; some may have been overwritten.

        Returns (layer, experts, of a decode step?) of each.
        """
        newest, learnt = int(self._numbers[0]), []
        for number in range(max(self._seen, newest - t.ROUTE_RING) + 1, newest + 1):
            layer = int(self._numbers[1 + number % t.ROUTE_RING])
            header = self._headers[layer]
            written = int(header[t.ROUTE_SEQUENCE])
            if written < number:  # it has its number, and is still being written
                newest = number - 1
                break
            if written > number:
                continue
            chosen = np.flatnonzero(np.diff(self._starts[layer]))
            is_decode = bool(header[t.IS_DECODE])
            self._cache.touch(layer, chosen)
            learnt.append((layer, chosen, is_decode))
            if is_decode:
                num_missing = int(header[t.NUM_CHOSEN]) - int(header[t.NUM_RESIDENT])
                missing = set(self._missing[layer][:num_missing].tolist())
                self._judge_guess(layer, number, set(chosen.tolist()), missing)
        self._seen = newest
        return learnt

    def _compare(self, learnt: list[tuple[int, np.ndarray, bool]]) -> None:
        """Let the policies compete on what has been learnt."""
        for layer, chosen, is_decode in learnt:
            self._chooser.touch(layer, chosen, is_decode=is_decode)
        if self._chooser.policy != self._cache.policy:
            with self._changed:
                self._cache.use(self._chooser.policy)
        self._statistics.tell(self._look_ahead, self._chooser)

    def _judge_guess(self, layer: int, number: int, chosen: set[int], missing: set[int]) -> None:
        """A route has come: what was its guess worth? What is wrong and not begun is withdrawn.

        missing: of the chosen, what was not in RAM when the route came.
        """
        guess = self._guessed.pop(layer, None)
        look = self._look_ahead
        if guess is None:
            if not self._never_looks:
                look.pass_route()
                self._numbers[t.LOOKS_AHEAD] = int(look.is_on)
            return
        right = wrong = withdrawn = early_hits = 0
        for fetch in guess.fetches:
            expert = fetch.key % self._per_layer
            if expert in chosen and guess.number == number:
                right += fetch.is_submitted
                early_hits += expert not in missing
            elif fetch.is_submitted:
                wrong += 1
            else:
                fetch.is_withdrawn = True
                withdrawn += 1
                del self._early[fetch.key]
                self._cache.remove(fetch.key)
                self._free.append(fetch.slot)
        if guess.number == number:
            named = len(guess.experts & chosen)
            look.early_hits += early_hits
            look.note(
                right=right, wrong=wrong, named=named, chosen=len(chosen), withdrawn=withdrawn
            )
            self._numbers[t.LOOKS_AHEAD] = int(look.is_on)

    def _serve(self, number: int) -> None:
        """Find slots for what a route misses, and queue the reads."""
        layer = int(self._numbers[1 + number % t.ROUTE_RING])
        header = self._headers[layer]
        num_resident, num_chosen = int(header[t.NUM_RESIDENT]), int(header[t.NUM_CHOSEN])
        step = int(header[t.ROUTE_STEP])
        route = Route(number, layer, int(header[t.READY_BASE]), num_resident)
        missing = self._missing[layer][: num_chosen - num_resident].tolist()
        keys = [layer * self._per_layer + expert for expert in missing]
        with self._changed:  # first, so that none of them gives up its slot to another
            keys = [key for key in keys if not self._promote(key, route)]
        for key in keys:
            slot = self._take_slot(layer, number)
            if slot is None:
                return  # the lane is over
            self._queue(self._certain, _Fetch(key, slot, step, number, route, 0))

    def _promote(self, key: int, route: Route) -> bool:
        """A missing expert that was guessed: it has arrived meanwhile, or is on its way."""
        fetch = self._early.pop(key, None)
        if fetch is not None:
            fetch.route, fetch.mark = route, route.number
            waiting = [job for job in self._likely if job[0] is fetch]
            for job in waiting:
                self._likely.remove(job)
                self._certain.append(job)
            return True
        word = int(self._words[key])
        if not word & SLOT_MASK:
            return False
        self._words[key] = (route.number << t.SLOT_BITS) | (word & SLOT_MASK)
        self._tell_ready(key, route)
        return True

    def _guess(self) -> None:
        """Queue what the next layer is likely to choose and RAM has not, where there is room."""
        layer = int(self._numbers[t.NEWEST_GUESS]) - 1
        if layer < 0:
            return
        number = int(self._headers[layer][t.GUESS_FOR])
        if layer in self._guessed or number != int(self._numbers[0]) + 1:
            return  # it has been seen, or its route has come
        experts = self._guesses[layer].tolist()
        fetches: list[_Fetch] = []
        for expert in experts:
            key = layer * self._per_layer + expert
            if self._words[key] & SLOT_MASK or key in self._cache:
                continue
            slot = self._find_slot(layer, number - 1)
            if slot is None:
                break
            fetch = _Fetch(key, slot, int(self._headers[layer][t.ROUTE_STEP]), number - 1, None, 0)
            fetches.append(fetch)
            self._early[key] = fetch
            self._queue(self._likely, fetch)
        self._guessed[layer] = _Guess(number, frozenset(experts), tuple(fetches))

    def _queue(self, jobs: deque[tuple[_Fetch, Extent]], fetch: _Fetch) -> None:
        extents = self._sources[fetch.key].extents
        with self._changed:
            self._cache.insert(fetch.key)
            fetch.left = len(extents)
            jobs.extend((fetch, extent) for extent in extents)
            self._changed.notify(len(extents))

    def _take_slot(self, layer: int, number: int) -> int | None:
        """A slot for an expert of `layer`, as soon as there is one; None: the lane is over."""
        while not self._is_over():
            slot = self._find_slot(layer, number)
            if slot is not None:
                return slot
            threading.Event().wait(STARVED_S)
        return None

    def _find_slot(self, layer: int, number: int) -> int | None:
        """A free slot, or that of the least useful expert that nobody needs; None: there is none.

        number: the newest route; what it uses stays.
        """
        while True:
            with self._changed:
                if self._free:
                    return self._free.pop()
                words = self._words.copy()
                is_evictable = (words & SLOT_MASK != 0) & (words >> t.SLOT_BITS < number)
                key = self._cache.victim(layer, is_evictable)
                if key is None:
                    return None
                if compare_swap(self._words_at + 8 * key, int(words[key]), 0):
                    self._cache.remove(key)
                    return int(words[key] & SLOT_MASK) - 1

    def _arrived(self, fetch: _Fetch) -> None:
        """Make an expert known that is in its slot now. One thread at a time."""
        self._words[fetch.key] = (fetch.mark << t.SLOT_BITS) | (fetch.slot + 1)
        if fetch.route is None:
            del self._early[fetch.key]
        else:
            self._tell_ready(fetch.key, fetch.route)

    def _tell_ready(self, key: int, route: Route) -> None:
        self._orders[route.layer][route.ready] = key % self._per_layer
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
