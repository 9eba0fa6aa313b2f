"""What the lanes have done so far, from the counters and span rings they write in the arena."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from shadowlane.actors import disk_lane as disk
from shadowlane.actors import expert_reader as readers
from shadowlane.actors import link_statistics as links
from shadowlane.actors.arena import (
    DISK_SPAN_FIELDS,
    DISK_SPAN_RING,
    DISK_STATISTICS,
    LINK_SPAN_FIELDS,
    LINK_SPAN_RING,
    LINK_STATISTICS,
    Arena,
    ArenaLayout,
)
from shadowlane.actors.sequence import ExpertUse
from shadowlane.ops import emulated as law
from shadowlane.ops import table as t
from shadowlane.planner.catalog import Catalog, GroupKind
from shadowlane.planner.events import RunQueueDelayed
from shadowlane.planner.experts import POLICIES
from shadowlane.planner.placement import DISK_LANE, LaneSpec

DELAY_PERIOD_S = 0.2  # how far apart looks at the run queue are
NEWEST_SPANS = 4096  # among which those of a step that has just ended are sure to be
NEWEST_STEPS = 2  # ... and when the next one runs already
KINDS = get_args(GroupKind)
STALE_PERIODS = 5  # a look longer ago than so many periods says nothing of now

Crossed = Mapping[str, tuple[float, float]]  # by lane: seconds, crossings of a link


class Gauges:
    """Reads; writes nothing."""

    def __init__(
        self, arena: Arena, layout: ArenaLayout, lanes: Sequence[LaneSpec], catalog: Catalog
    ) -> None:
        self._arena = arena
        self._layout = layout
        self._lanes = tuple(lanes)
        self._disk = arena.view(layout.disk, np.int64, DISK_STATISTICS)
        self._workers = [
            [
                arena.view(
                    layout.workers[number] + worker * t.WORKER_NBYTES,
                    np.int64,
                    t.WORKER_HEADER_NBYTES // 8,
                )
                for worker in range(spec.threads)
            ]
            for number, spec in enumerate(self._lanes)
        ]
        self._rings = [
            [
                arena.view(
                    layout.workers[number] + worker * t.WORKER_NBYTES + t.WORKER_HEADER_NBYTES,
                    np.int64,
                    t.SPAN_RING,
                    t.SPAN_FIELDS,
                )
                for worker in range(spec.threads)
            ]
            for number, spec in enumerate(self._lanes)
        ]
        self._cards = (
            [] if layout.is_emulated else [layout.lanes.index(c.lane) for c in layout.cards]
        )
        self._num_cards = len(layout.cards)
        self._routes = [
            arena.view(
                layout.scratch["routes"] + number * layout.route_nbytes,
                np.int64,
                t.ROUTE_HEADER_FIELDS,
            )
            for number in range(len(catalog.sparse_groups))
        ]
        self._laws = [
            arena.view(at, np.float64, law.LAW_FIELDS)
            for at in (layout.laws if layout.is_emulated else ())
        ]
        self._links = {
            f"h2d:{card}": arena.view(at, np.int64, LINK_STATISTICS)
            for card, at in enumerate(layout.links)
        }
        self._kinds = np.array([KINDS.index(group.kind) for group in catalog.groups])  # by group
        self._delays: tuple[float, list[list[int]]] | None = None

    def disk_statistics(self) -> np.ndarray:
        """The disk lane's fields, int64; see `disk_lane.py`."""
        return self._disk

    def busy_ns(self) -> dict[str, tuple[int, int]]:
        """(busy, waiting) ns of each lane since the start; of a compute lane, its workers' mean."""
        result = {}
        for number, (spec, rows) in enumerate(zip(self._lanes, self._workers, strict=True)):
            busy = sum(int(row[t.BUSY_NS]) for row in rows) // spec.threads
            if self._laws:  # one worker holds an instruction while the others are through
                busy = round(float(self._laws[number][law.BUSY_S]) * 1e9)
            waiting = sum(int(row[t.WAIT_NS]) + int(row[t.DISK_WAIT_NS]) for row in rows)
            result[spec.name] = (busy, waiting // spec.threads)
        for name, fields in self._links.items():
            result[name] = (int(fields[links.BUSY_NS]), 0)
        result[DISK_LANE] = (int(self._disk[disk.BUSY_NS]), 0)
        return result

    def crossed(self) -> Crossed:
        """(seconds, links) that inputs of emulated lanes have crossed since the start."""
        # Links and the disk have laws, too, behind those of lanes.
        of_lanes = zip(self._lanes, self._laws, strict=False)
        return {
            spec.name: (float(its[law.CROSSED_S]), float(its[law.CROSSED]))
            for spec, its in of_lanes
        }

    def is_timed(self, step: int) -> bool:
        """Whether all cards that are here have told what they were busy with in this step."""
        return all(int(self._workers[number][0][t.TIMED_STEP]) >= step for number in self._cards)

    def card_times(self, step: int) -> dict[str, tuple[int, int]]:
        """(busy, waiting) ns of cards that are here, in one of the newest steps."""
        found = {}
        for number in self._cards:
            spans = self.worker_spans(number, 0, NEWEST_SPANS)
            spans = spans[spans[:, 0] == step]
            busy = int((spans[:, 3] - spans[:, 2]).sum())
            whole = int(spans[-1, 3] - spans[0, 2]) if len(spans) else 0
            found[self._lanes[number].name] = (busy, whole - busy)
        return found

    def kinds_s(
        self, step: int, lengths: Sequence[int], slowed: float
    ) -> dict[str, dict[str, float]]:
        """By lane and kind of group, seconds at work in one of the newest steps; waits apart.

        lengths: instructions of each lane in such a step. A lane whose spans are not of all of
        them is left out: a card that replays several at once tells of them as one. Of a lane of
        this machine's processor it is the mean of its workers, as in `busy_ns`; on one that is
        emulated, one worker tells of each instruction. slowed: seconds here for one that is told.
        """
        found = {}
        for number, (spec, length) in enumerate(zip(self._lanes, lengths, strict=True)):
            by_kind, count = np.zeros(len(KINDS)), 0
            for worker in range(spec.threads):
                spans = self.worker_spans(number, worker, NEWEST_STEPS * length).T
                of_step = spans[0] == step
                worked = (spans[3] - spans[2] - spans[4]) * of_step
                by_kind += np.bincount(self._kinds[spans[1]], worked, len(KINDS))
                count += int(np.count_nonzero(of_step))
            if count >= length > 0:
                by_kind /= 1e9 * slowed * (1 if self._laws else spec.threads)
                kinds = zip(KINDS, by_kind.tolist(), strict=True)
                found[spec.name] = {kind: seconds for kind, seconds in kinds if seconds}
        return found

    def lane_use(self, multiplied: Sequence[int]) -> dict[str, tuple[int, int]]:
        """(busy ns, bytes) of each lane since the start. `multiplied`: bytes per compute lane."""
        busy = self.busy_ns()
        use = {
            spec.name: (busy[spec.name][0], multiplied[number])
            for number, spec in enumerate(self._lanes)
        }
        moved_by_disk = (  # of loading, too: so come blocks that a change of plan brings to RAM
            disk.LOAD_NBYTES,
            disk.SWEEP_NBYTES,
            disk.GATHER_NBYTES,
            disk.EXPERT_NBYTES,
        )
        read = sum(int(self._disk[field]) for field in moved_by_disk)
        for name, fields in self._links.items():
            moved = int(fields[links.SWEEP_NBYTES]) + int(fields[links.MOVED_NBYTES])
            use[name] = (busy[name][0], moved)
        use[DISK_LANE] = (busy[DISK_LANE][0], read)
        return use

    def expert_use(self) -> ExpertUse:
        """Of the experts that decode steps have chosen since the start; bytes read by all steps."""
        early = int(self._disk[disk.EXPERT_STATISTICS + readers.EARLY_HITS])
        resident = sum(int(route[t.ALL_RESIDENT]) for route in self._routes)
        return ExpertUse(
            resident=resident - early,
            early=early,
            chosen=sum(int(route[t.ALL_CHOSEN]) for route in self._routes),
            read_nbytes=int(self._disk[disk.EXPERT_NBYTES]),
            on_cards=sum(int(route[t.ALL_ON_CARDS]) for route in self._routes),
        )

    def newest_use(self) -> tuple[int, int]:
        """(in RAM, all) of the different experts that the newest step chose, over all layers."""
        resident = sum(int(route[t.NUM_RESIDENT]) for route in self._routes)
        return resident, sum(int(route[t.NUM_CHOSEN]) for route in self._routes)

    def newest_on_cards(self) -> list[int]:
        """Of each card, the different experts that it computed in the newest step, over all layers:
        those that live there, and in steps with rows of a prompt those that were brought, too."""
        places = [route[t.CARD_PLACES : t.CARD_PLACES + t.MAX_CARDS + 1] for route in self._routes]
        return [
            sum(int(each[card + 1] - each[card]) for each in places)
            for card in range(self._num_cards)
        ]

    def expert_report(self) -> dict[str, Any]:
        """How experts are kept, and what guesses were worth, since the start."""
        told = self._disk[disk.EXPERT_STATISTICS :]
        early, guessed_of = int(told[readers.EARLY_READS]), int(told[readers.GUESSED_OF])
        policy = POLICIES[int(told[readers.POLICY])]
        return {
            "policy": policy.name,
            "kept": policy.words,
            "policy_switches": int(told[readers.POLICY_SWITCHES]),
            "look_ahead": {
                "is_on": bool(told[readers.IS_LOOKING]),
                "recall": int(told[readers.GUESSED]) / guessed_of if guessed_of else None,
                "early_reads": early,
                "used": int(told[readers.USED_EARLY]) / early if early else None,
                "withdrawn": int(told[readers.WITHDRAWN]),
            },
        }

    def worker_spans(self, lane: int, worker: int, most: int = t.SPAN_RING) -> np.ndarray:
        """The newest spans of a worker, those its ring still holds, oldest first.

        int64 [n, SPAN_FIELDS]; most: of n.
        """
        ring = self._rings[lane][worker]
        written = int(self._workers[lane][worker][t.NUM_SPANS])
        first = max(0, written - min(most, t.SPAN_RING))
        start = first % t.SPAN_RING
        if start + written - first <= t.SPAN_RING:
            return ring[start : start + written - first].copy()
        return ring[np.arange(first, written) % t.SPAN_RING]

    def disk_spans(self) -> np.ndarray:
        """The same of the disk lane: int64 [n, DISK_SPAN_FIELDS]."""
        place = self._layout.disk + DISK_STATISTICS * 8
        ring = self._arena.view(place, np.int64, DISK_SPAN_RING, DISK_SPAN_FIELDS)
        return ordered(ring, int(self._disk[disk.NUM_SPANS]))

    def link_spans(self, card: int) -> np.ndarray:
        """The same of a card's link: int64 [n, LINK_SPAN_FIELDS]."""
        place = self._layout.links[card] + LINK_STATISTICS * 8
        ring = self._arena.view(place, np.int64, LINK_SPAN_RING, LINK_SPAN_FIELDS)
        return ordered(ring, int(self._links[f"h2d:{card}"][links.NUM_SPANS]))

    def run_queue_delays(self) -> list[RunQueueDelayed]:
        """How much each lane's unluckiest thread waited for its core since the last look.

        Nothing until a period has passed, or where the last look is too long ago to compare with.
        """
        now = time.monotonic()
        if self._delays is not None and now - self._delays[0] < DELAY_PERIOD_S:
            return []
        current = [[int(row[t.RUN_DELAY_NS]) for row in rows] for rows in self._workers]
        seen, self._delays = self._delays, (now, current)
        if seen is None or now - seen[0] > STALE_PERIODS * DELAY_PERIOD_S:
            return []
        events = []
        for spec, old, new in zip(self._lanes, seen[1], current, strict=True):
            # NOTE: a lane that was started again has new threads, which count from 0.
            worst = max(
                after - before if after >= before else after
                for before, after in zip(old, new, strict=True)
            )
            fraction = min(1.0, worst / 1e9 / (now - seen[0]))
            events.append(RunQueueDelayed(spec.name, fraction))
        return events


def mean_crossings_s(before: Crossed, after: Crossed) -> dict[str, float]:
    """By lane, the mean seconds of a link's crossing between two looks at `Gauges.crossed`."""
    return {
        lane: (seconds - before[lane][0]) / (links - before[lane][1])
        for lane, (seconds, links) in after.items()
        if links > before[lane][1]
    }


def ordered(ring: np.ndarray, written: int) -> np.ndarray:
    """A copy of a ring's rows, oldest first, when `written` have been written in all."""
    if written <= len(ring):
        return ring[:written].copy()
    return np.roll(ring, -(written % len(ring)), axis=0)
