"""The disk lane's part in a mixture: it reads the experts that a route misses, and makes room.

What a route waits for is compiled (`ops/missing_experts.py`): one thread follows the requests of
the compute lane, finds a slot for each missing expert and hands its extents to reader threads; who
ends the last extent of an expert makes it known. Here is what decides, and has time for it: a
thread that tells the cache what every route chose, and hands over which experts may go next before
anybody needs their slots.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from shadowlane.actors.arena import REQUEST_COUNTER, Arena, ArenaLayout
from shadowlane.actors.arranged_experts import Piece
from shadowlane.actors.blueprint import Blueprint
from shadowlane.actors.expert_sources import ExpertSource, Extent, PlainExtent
from shadowlane.actors.lowered_experts import expert_geometry
from shadowlane.actors.scratch import route_layout
from shadowlane.ops import expert_board as boards
from shadowlane.ops import missing_experts as reads
from shadowlane.ops import table as t
from shadowlane.ops.atomics import counter_value
from shadowlane.ops.routes import SLOT_MASK
from shadowlane.ops.warm import warm_experts
from shadowlane.planner.chooser import Chooser
from shadowlane.planner.experts import MIXTURE, POLICIES, ExpertCache, policy_named
from shadowlane.planner.heat import Heat
from shadowlane.planner.look_ahead import LookAhead, LookAheadSettings
from shadowlane.planner.search import most_kept

if TYPE_CHECKING:
    from shadowlane.actors.disk_lane import ModelFile

NUM_VICTIMS = 256  # made ready at a time: what a chunk of a prompt misses in two layers at most
POLICY_PERIOD_NS = 50_000_000  # without requests

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


class ExpertReader:
    """See the module. `begin`, fill the slots, `start`; then `follow`, `serve` and some `work`,
    each in a thread, until `stop`."""

    def __init__(
        self,
        blueprint: Blueprint,
        layout: ArenaLayout,
        arena: Arena,
        files: Mapping[str, ModelFile],
        check_files: Callable[[], None],
        statistics: np.ndarray,
        statistics_at: Sequence[int],
        spans: np.ndarray,
        told: ExpertStatistics,
        read_arranged: Callable[[Extent, int, int, int], object],
        looks_ahead: bool,
    ) -> None:
        """check_files raises where a file is no longer the one that was opened.

        read_arranged reads and counts what cannot be read in place: (what, arena offset, step,
        number for the span).

        statistics, spans: the lane's; statistics_at: its fields, as `STATISTICS_FIELDS` names them.
        """
        assert blueprint.experts is not None, "only mixtures have experts"
        warm_experts()
        catalog = blueprint.experts.catalog
        self._sources = blueprint.experts.sources
        self._slot_nbytes = catalog.slot_nbytes
        self._num_slots = layout.num_expert_slots
        self._layout, self._arena, self._base = layout, arena, arena.base
        self._check_files, self._told = check_files, told
        self._read_arranged = read_arranged
        self._is_arranged = blueprint.experts.buffer_nbytes > 0
        self._model = blueprint.fingerprint
        self._most_pinned = most_kept(catalog, self._num_slots)
        self._top_k, self._shape = catalog.top_k, (catalog.num_layers, catalog.per_layer)
        self._words = arena.view(layout.scratch["expert_words"], np.int64, len(self._sources))
        self._numbers = arena.view(layout.route_numbers, np.int64, t.ROUTE_WORDS)
        self._geometry = expert_geometry(blueprint, layout)
        offsets = route_layout(blueprint.config, layout.step_rows)
        at = [layout.scratch["routes"] + n * offsets["nbytes"] for n in range(catalog.num_layers)]
        self._headers = [arena.view(each, np.int64, t.ROUTE_HEADER_FIELDS) for each in at]
        self._starts = [
            arena.view(each + offsets["starts"], np.int32, catalog.per_layer + 1) for each in at
        ]
        self._extents = [extent for source in self._sources for extent in source.extents]
        self._look = LookAhead(LookAheadSettings(), is_on=looks_ahead and not self.holds_all)
        self._never_looks = not self._look.is_on
        self._numbers[t.LOOKS_AHEAD] = int(self._look.is_on)
        self._numbers[t.STARVED] = 0  # who slept there is gone
        self._is_elsewhere = np.zeros(len(self._sources), np.bool_)  # on cards
        self._seen = int(self._numbers[0])  # the newest route that the cache knows of
        self._lock = threading.Lock()  # of the cache
        self._board = self._make_board(files, statistics, statistics_at, spans)
        self._board.span_base[0] = len(blueprint.sources)  # spans name experts behind the blocks

    @property
    def holds_all(self) -> bool:
        """Whether every expert has a slot, so that nothing is ever missing.

        Beside cards it is not so: what leaves a card may have to be read.
        """
        return self._num_slots == len(self._sources) and not self._layout.cards

    def _make_board(
        self,
        files: Mapping[str, ModelFile],
        statistics: np.ndarray,
        statistics_at: Sequence[int],
        spans: np.ndarray,
    ) -> boards.Board:
        layers, keys = self._shape[0], len(self._sources)
        counts = [len(source.extents) for source in self._sources]
        # Each slot may have one expert on its way, and what is taken back leaves a hole.
        jobs = 2 * max(counts) * self._num_slots
        zeros = np.zeros
        board = boards.Board(
            state=zeros(boards.STATE_FIELDS, np.int64),
            extents=np.array([_row(each, files[each.path]) for each in self._extents], np.int64),
            first_extent=np.cumsum([0, *counts], dtype=np.int64),
            free=zeros(self._num_slots, np.int64),
            flights=zeros(keys, np.int64),
            holds=zeros(keys, np.int64),
            reserved=zeros(keys, np.int64),
            fetches=zeros((self._num_slots, boards.FETCH_COLUMNS), np.int64),
            certain=zeros((jobs, 2), np.int64),
            likely=zeros((jobs, 2), np.int64),
            victims=np.full((layers, min(NUM_VICTIMS, keys)), -1, np.int64),
            victim_words=zeros((layers, min(NUM_VICTIMS, keys)), np.int64),
            victim_list=zeros(layers, np.int64),
            victim_next=zeros(layers, np.int64),
            ready=zeros(layers, np.int64),
            guess_number=zeros(layers, np.int64),
            guess_ids=zeros((layers, self._top_k), np.int64),
            guess_slots=zeros((layers, self._top_k), np.int64),
            statistics=statistics,
            statistics_at=np.array(statistics_at, np.int64),
            spans=spans,
            span_base=zeros(1, np.int64),
        )
        board.state[boards.ASKED] = counter_value(
            self._base + self._layout.counter(REQUEST_COUNTER)
        )
        board.state[boards.SERVED] = self._numbers[t.NEWEST_REQUEST]
        board.state[boards.SEEN] = board.state[boards.TOLD] = self._numbers[0]
        board.state[boards.TELL_EVERY] = max(1, layers // 2)
        return board

    # -- from run to run

    def begin(self, heat: Heat | None, policy: str | None) -> None:
        """What earlier runs chose, and the policy that stays, if one is to. Before all reads."""
        if heat is not None:
            heat.check(self._model, *self._shape)
        rivals = POLICIES if policy is None else (policy_named(policy),)
        current = MIXTURE if policy is None else rivals[0]
        self._cache = ExpertCache(*self._shape, self._num_slots, current, heat=heat)
        self._chooser = Chooser(
            *self._shape,
            self._top_k,
            self._num_slots,
            policies=rivals,
            current=current,
            heat=heat,
        )

    def heat(self) -> Heat:
        """What this run has chosen."""
        with self._lock:
            return self._cache.heat(self._model)

    def leave_to_cards(self, keys: Sequence[int]) -> None:
        """From now on these live on cards: what RAM has of them goes first."""
        is_elsewhere = np.zeros(len(self._sources), np.bool_)
        is_elsewhere[list(keys)] = True
        self._is_elsewhere = is_elsewhere

    # -- moves to and from cards

    def hold(self, keys: Sequence[int]) -> dict[int, int]:
        """Let experts that are in RAM stay until `release`: key -> arena offset.

        No more than half of the slots: what routes miss needs some, too.
        """
        return self._hold(keys, self._num_slots // 2)

    def keep_in_place(self, keys: Sequence[int]) -> dict[int, int]:
        """As `hold`, of what a placement has brought to cards out of these slots.

        They may be all but so many as any step needs, and all where each has a slot. {}, and
        nothing held: some have no slot, or there would be too few others.
        """
        held = self._hold(keys, self._most_pinned)
        if len(held) == len(keys):
            return held
        self.release(list(held))
        return {}

    def _hold(self, keys: Sequence[int], most: int) -> dict[int, int]:
        slots = np.zeros(len(keys), np.int64)
        boards.hold_slots(self._base, self._geometry, self._board, _keys(keys), most, slots)
        return self._homes_of(keys, slots)

    def make_room(self, keys: Sequence[int]) -> dict[int, int]:
        """Slots for experts that are on cards and will leave them: key -> arena offset.

        Free ones, or of what is on cards itself. Not for those that have one. `settle` has to
        follow.
        """
        slots = np.zeros(len(keys), np.int64)
        is_useless = self._is_elsewhere.copy()
        is_useless[list(keys)] = False
        useless = np.flatnonzero(is_useless)
        place = self._base, self._geometry, self._board
        boards.reserve_slots(*place, _keys(keys), useless, self._most_pinned, slots)
        return self._homes_of(keys, slots)

    def settle(self, keys: Sequence[int], is_there: bool) -> None:
        """What was copied to the slots of `make_room` is in RAM and held, or will not come."""
        boards.settle_slots(self._base, self._geometry, self._board, _keys(keys), is_there)

    def release(self, keys: Sequence[int]) -> None:
        boards.release_slots(self._base, self._geometry, self._board, _keys(keys))

    def _homes_of(self, keys: Sequence[int], slots: np.ndarray) -> dict[int, int]:
        found = zip(keys, slots.tolist(), strict=True)
        return {key: self._home(slot) for key, slot in found if slot >= 0}

    # -- the start

    def first_reads(self, first: Sequence[int] = ()) -> Iterator[tuple[int, ExpertSource, int]]:
        """(key, source, arena offset) of what fills the free slots at the start: first `first`."""
        order = dict.fromkeys((*first, *map(int, self._cache.wanted(self._is_elsewhere))))
        wanted = [key for key in order if not self._words[key] & SLOT_MASK]
        for key, slot in zip(wanted, self._free_slots(), strict=False):
            yield key, self._sources[key], self._home(slot)

    def loaded(self, key: int, home: int) -> None:
        """An expert of `first_reads` has been read. Before steps run; from one thread at a time."""
        self._words[key] = (home - self._layout.expert_slots) // self._slot_nbytes + 1

    def start(self) -> None:
        """Before the threads: what is in RAM is what the words say, which outlive this process."""
        free = self._free_slots()
        self._board.free[: len(free)] = free
        self._board.state[boards.NUM_FREE] = len(free)
        self._prepare_victims()

    def _free_slots(self) -> list[int]:
        held = set((self._words & SLOT_MASK).tolist())
        return [slot for slot in range(self._num_slots) if slot + 1 not in held]

    # -- threads

    def serve(self) -> None:
        """Serve requests and guesses until the lane is over."""
        reads.follow_requests(self._base, self._geometry, self._board)

    def work(self) -> None:
        """Read extents until the lane is over. Raises OSError, or ValueError if a file ends."""
        place = self._base, self._geometry, self._board
        if self._is_arranged:
            while (job := reads.begin_job(*place)) >= 0:
                slot, number = job >> 32, job & 0xFFFFFFFF
                extent = self._extents[number]
                key, step = self._board.fetches[slot, [boards.KEY, boards.STEP]].tolist()
                home = self._home(slot) + extent.home
                self._read_arranged(extent, home, step, int(self._board.span_base[0]) + key)
                reads.end_job(*place, job, 0, 0)
            return
        failed = reads.read_missing(*place)
        if failed == 0:
            return
        extent = self._extents[int(self._board.state[boards.FAILED])]
        assert isinstance(extent, PlainExtent), "others are read elsewhere"
        raise read_error(failed, extent.path, extent.nbytes, extent.offset)

    def follow(self) -> None:
        """Learn from routes, and say what may go next, until the lane is over."""
        while not self._board.state[boards.IS_OVER]:
            boards.sleep_until_told(self._board, POLICY_PERIOD_NS)
            self._check_files()
            learnt = self._learn()
            self._prepare_victims()  # first: the disk lane may need them
            self._judge_guesses()
            self._compare(learnt)

    def stop(self) -> None:
        """Let all threads return."""
        boards.end_reads(self._base, self._geometry, self._board)

    def _learn(self) -> list[tuple[int, np.ndarray, bool]]:
        """Tell the cache of all routes since the last look; some may have been overwritten.

        Returns (layer, experts that are not on cards, of a decode step?) of each.
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
            learnt.append((layer, chosen, bool(header[t.IS_DECODE])))
        self._seen = newest
        with self._lock:
            for layer, chosen, _ in learnt:
                self._cache.touch(layer, chosen)
        here = ~self._is_elsewhere.reshape(self._shape)
        return [(layer, ids[here[layer, ids]], is_decode) for layer, ids, is_decode in learnt]

    def _prepare_victims(self) -> None:
        """Lists of what goes next, as of the slots that there are now."""
        words = np.zeros(len(self._sources), np.int64)
        is_held = np.zeros(len(self._sources), np.bool_)
        boards.look_at_slots(self._base, self._geometry, self._board, words, is_held)
        with self._lock:
            self._cache.hold(is_held)
            may_go = (words & SLOT_MASK != 0) & (self._board.holds == 0)
            keys, lists = self._cache.victims(NUM_VICTIMS, may_go, self._is_elsewhere)
        boards.set_victims(self._board, keys, words, lists)

    def _judge_guesses(self) -> None:
        """What came of guesses decides whether to go on guessing."""
        if self._never_looks:
            return
        counts = np.zeros(boards.PASSED + 1 - boards.RIGHT, np.int64)
        boards.take_counts(self._board, counts)
        right, wrong, named, chosen, withdrawn, early_hits, passed = counts.tolist()
        self._look.early_hits += early_hits
        if chosen:
            self._look.note(
                right=right, wrong=wrong, named=named, chosen=chosen, withdrawn=withdrawn
            )
        for _ in range(passed):
            self._look.pass_route()
        self._numbers[t.LOOKS_AHEAD] = int(self._look.is_on)

    def _compare(self, learnt: list[tuple[int, np.ndarray, bool]]) -> None:
        """Let the policies compete on what has been learnt."""
        for layer, chosen, is_decode in learnt:
            self._chooser.touch(layer, chosen, is_decode=is_decode)
        if self._chooser.policy != self._cache.policy:
            with self._lock:
                self._cache.use(self._chooser.policy)
        self._told.tell(self._look, self._chooser)

    def _home(self, slot: int) -> int:
        return self._layout.expert_slots + slot * self._slot_nbytes


def _keys(keys: Sequence[int]) -> np.ndarray:
    return np.array(list(keys), np.int64)


def _row(extent: Extent, file: ModelFile) -> tuple[int, ...]:
    """A row of the table of extents; of what is arranged only its number matters."""
    if isinstance(extent, Piece):
        return (0,) * boards.EXTENT_COLUMNS
    return (
        file.descriptor,
        extent.offset - extent.skew,
        extent.skew + extent.nbytes,
        extent.held_nbytes,
        extent.home,
        extent.nbytes,
        int(file.direct),
    )


def read_error(failed: int, path: str, nbytes: int, offset: int) -> OSError | ValueError:
    """What `read_range` has returned, as an error that names the file."""
    if failed < 0:
        return OSError(-failed, os.strerror(-failed), path)
    return ValueError(f"{path}: must hold {nbytes} bytes at {offset}; it ends {failed} bytes early")


def all_extents(
    reads: Iterator[tuple[int, ExpertSource, int]],
) -> Sequence[tuple[int, int, tuple[tuple[Extent, int], ...]]]:
    """(key, home, its (extent, arena offset)s) in the order in which they lie in the files."""
    planned = [
        (key, home, tuple((extent, home + extent.home) for extent in source.extents))
        for key, source, home in reads
    ]
    return sorted(planned, key=lambda each: (each[2][0][0].path, each[2][0][0].offset))
