"""What a trace would cost: a cache of experts replayed, and the time that its misses take.

Honest use: one half of a trace gives the heat, as an earlier run would have, and the other is
scored (`rank`). A static set that is scored on the choices it was made from always looks good, and
a competition that replays them is won by it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shadowlane.planner.chooser import Chooser
from shadowlane.planner.experts import MIXTURE, POLICIES, ExpertCache, Policy, serve
from shadowlane.planner.heat import heat_of
from shadowlane.planner.placement import show_nbytes, whole_pages
from shadowlane.planner.routing import RoutedModel, Trace
from shadowlane.planner.search import SPARE_EXPERTS

Counts = npt.NDArray[np.int64]
Progress = Callable[[str, float], None]  # what is replayed, and the part of all work done

ON_DEMAND, CHOSEN, OPTIMUM = "on demand", "chosen on line", "optimum"


@dataclass(frozen=True, slots=True)
class Delays:
    """What neither disk nor memory takes, in seconds."""

    start_s: float = 0.0  # from a router's choice to the first read for it
    arrive_s: float = 0.0  # from the end of a read until a worker is up to compute what it brought
    layer_s: float = 0.0  # workers that wait for each other, over all instructions of a layer
    step_s: float = 0.0  # between two steps


# By `benchmarks/routed_timeline.py`, on two cores that both compute.
MEASURED_DELAYS = Delays(start_s=90e-6, arrive_s=100e-6, layer_s=80e-6, step_s=1.5e-3)


@dataclass(frozen=True, slots=True)
class Speeds:
    disk_bytes_per_s: float  # at reads of one expert
    dram_bytes_per_s: float  # of the compute lanes together, while the disk works
    delays: Delays = Delays()

    def __post_init__(self) -> None:
        if min(self.disk_bytes_per_s, self.dram_bytes_per_s) <= 0:
            raise ValueError(
                f"speeds must be positive; got {self.disk_bytes_per_s} and {self.dram_bytes_per_s}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """How the decode steps of a trace went; prefill steps pass through the cache uncounted."""

    num_rows: Counts  # [steps] tokens of each
    hits: Counts  # [steps, layers] distinct experts that were resident when chosen
    misses: Counts  # [steps, layers] distinct experts that were read

    @property
    def hit_rate(self) -> float:
        chosen = int(self.hits.sum() + self.misses.sum())
        return float(self.hits.sum() / chosen) if chosen else 0.0

    def miss_nbytes_per_token(self, model: RoutedModel) -> float:
        nbytes = (self.misses * np.array(model.expert_nbytes)).sum()
        return float(nbytes / max(1, self.num_rows.sum()))


def slot_nbytes(model: RoutedModel) -> int:
    """Every slot can hold the largest expert, in whole pages."""
    return whole_pages(max(model.expert_nbytes))


def slots_in(model: RoutedModel, ram: int) -> int:
    """Experts that fit beside all dense parts: an upper bound, as a trace does not say what KV
    cache and scratch take. Raises ValueError where no plan could have so few.
    """
    all_experts = model.num_layers * model.num_experts
    slots = (ram - model.all_dense_nbytes) // slot_nbytes(model)
    least = min(all_experts, model.top_k + SPARE_EXPERTS)
    if slots < least:
        needed = model.all_dense_nbytes + least * slot_nbytes(model)
        raise ValueError(
            f"ram must be at least {show_nbytes(needed)}, the dense parts and {least} experts; "
            f"got {show_nbytes(ram)}"
        )
    return min(slots, all_experts)


def fill(cache: ExpertCache) -> None:
    """What an engine reads at its start."""
    for key in cache.wanted().tolist():
        cache.insert(key)


def replay(
    trace: Trace,
    cache: ExpertCache,
    chooser: Chooser | None = None,
    progress: Callable[[float], None] | None = None,
) -> Replay:
    """Every step of `trace` through `cache`, which takes the policy that `chooser` says, if any."""
    rows: list[int] = []
    hits: list[Counts] = []
    misses: list[Counts] = []
    done = 0
    for step in trace.passes():
        counts = np.zeros((2, trace.num_layers), np.int64)
        for layer, ids in step.routes:
            if chooser is not None:
                chooser.touch(layer, ids, is_decode=not step.is_prefill)
            num_missing = int(np.count_nonzero(serve(cache, layer, ids)))
            counts[:, layer] = len(ids) - num_missing, num_missing
        if chooser is not None and chooser.policy != cache.policy:
            cache.use(chooser.policy)
        if not step.is_prefill:
            rows.append(step.num_rows)
            hits.append(counts[0])
            misses.append(counts[1])
        done += step.num_rows
        if progress is not None:
            progress(done / trace.num_tokens)
    return _replay(trace, rows, hits, misses)


def optimum(trace: Trace, slots: int) -> Replay:
    """An upper bound of the hit rate: the replacement that knows the future.

    Belady's rule with bypass: what is needed again last goes, or does not come in. It starts with
    what it likes best, as a cache that is warm does at most.
    """
    order = [
        (at, layer, layer * trace.num_experts + each)
        for at, step in enumerate(trace.passes())
        for layer, ids in step.routes
        for each in ids.tolist()
    ]
    following = [len(order)] * len(order)  # the next place of the same key; beyond the end: none
    first: dict[int, int] = {}
    for place in range(len(order) - 1, -1, -1):
        key = order[place][2]
        following[place] = first.get(key, len(order))
        first[key] = place
    start = sorted(first.items(), key=lambda item: item[1])[:slots]
    next_use = dict(start)
    heap = [(-place, key) for key, place in start]
    heapq.heapify(heap)
    steps = list(trace.passes())
    counts = np.zeros((len(steps), 2, trace.num_layers), np.int64)
    for place, (at, layer, key) in enumerate(order):
        is_hit = key in next_use
        counts[at, 0 if is_hit else 1, layer] += 1
        if not is_hit and len(next_use) == slots:
            while next_use.get(heap[0][1]) != -heap[0][0]:
                heapq.heappop(heap)  # an entry that a later use has replaced
            if -heap[0][0] <= following[place]:
                continue
            del next_use[heapq.heappop(heap)[1]]
        next_use[key] = following[place]
        heapq.heappush(heap, (-following[place], key))
    decode = [at for at, step in enumerate(steps) if not step.is_prefill]
    rows = [steps[at].num_rows for at in decode]
    hits, misses = ([counts[at, kind] for at in decode] for kind in (0, 1))
    return _replay(trace, rows, hits, misses)


def on_demand(trace: Trace) -> Replay:
    """No cache at all: every chosen expert is read."""
    steps = [step for step in trace.passes() if not step.is_prefill]
    chosen = []
    for step in steps:
        counts = np.zeros(trace.num_layers, np.int64)
        for layer, ids in step.routes:
            counts[layer] = len(ids)
        chosen.append(counts)
    none = [np.zeros_like(counts) for counts in chosen]
    return _replay(trace, [step.num_rows for step in steps], none, chosen)


def _replay(
    trace: Trace, rows: Sequence[int], hits: Sequence[Counts], misses: Sequence[Counts]
) -> Replay:
    shape = (len(rows), trace.num_layers)
    stacked = (np.array(each, np.int64).reshape(shape) for each in (hits, misses))
    return Replay(np.array(rows, np.int64), *stacked)


@dataclass(frozen=True, slots=True)
class Timing:
    seconds: float
    disk_busy_s: float
    wasted_nbytes: int  # read ahead for nothing


def time_step(
    model: RoutedModel,
    hits: Sequence[int],
    misses: Sequence[int],
    speeds: Speeds,
    guesses: Sequence[Sequence[bool]] | None = None,
) -> Timing:
    """One step, layer by layer: hits and misses are experts of each layer.

    A layer reads its dense weights, then its router chooses; a little later its misses are read,
    one after the other at full speed, while its hits are computed, and what arrives is computed at
    once, but for the time that it takes to wake up.

    guesses: per layer, what look-ahead believes it will miss, in order: True if it will. They are
    known when the router of the layer before has chosen, and read behind what is certain; when the
    layer's own router has chosen, the wrong ones that are not under way are withdrawn.
    """
    delays = speeds.delays
    now = disk_free = busy = 0.0
    wasted = 0
    queue: list[bool] = []  # guesses of the layer that comes
    for layer, nbytes in enumerate(model.expert_nbytes):
        read_s, compute_s = nbytes / speeds.disk_bytes_per_s, nbytes / speeds.dram_bytes_per_s
        router_s = now + delays.layer_s + model.dense_nbytes[layer] / speeds.dram_bytes_per_s
        arrivals: list[float] = []
        for is_right in queue:
            if disk_free >= router_s:
                break
            disk_free += read_s
            busy += read_s
            if is_right:
                arrivals.append(disk_free)
            else:
                wasted += nbytes
        now = router_s
        disk_free = max(disk_free, now + delays.start_s)
        for _ in range(misses[layer] - len(arrivals)):
            disk_free += read_s
            busy += read_s
            arrivals.append(disk_free)
        now += hits[layer] * compute_s
        for arrival in arrivals:
            is_late = arrival > now
            now = max(now, arrival) + compute_s + (delays.arrive_s if is_late else 0.0)
        if guesses is not None and layer + 1 < len(guesses):
            queue = list(guesses[layer + 1])
    now += model.outside_nbytes / speeds.dram_bytes_per_s + delays.step_s
    return Timing(now, busy, wasted)


def guess(replayed: Replay, recall: float, seed: int = 0) -> list[list[list[bool]]]:
    """Random guesses [steps][layers] that find each miss with probability `recall`.

    Look-ahead names as many experts as are chosen. The wrong ones are taken to be missing as often
    as chosen ones of that layer: a router that errs names experts that it likes.
    """
    if not 0 <= recall <= 1:
        raise ValueError(f"recall must be between 0 and 1; got {recall}")
    random = np.random.default_rng(seed)
    chosen = replayed.hits + replayed.misses
    miss_rates = replayed.misses.sum(0) / np.maximum(chosen.sum(0), 1)
    right = random.binomial(replayed.misses, recall)
    wrong = random.binomial(chosen, (1 - recall) * miss_rates)
    return [
        [
            random.permutation([True] * found + [False] * missed).tolist()
            for found, missed in zip(*pair, strict=True)
        ]
        for pair in zip(right.tolist(), wrong.tolist(), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Ranked:
    """A policy on the scored part of a trace."""

    name: str
    hit_rate: float
    nbytes_per_token: float  # read from disk, what was wasted included
    wasted_nbytes_per_token: float
    tok_per_s: float
    disk_busy: float  # part of the time


def price(
    name: str, replayed: Replay, trace: Trace, speeds: Speeds, recall: float | None = None
) -> Ranked:
    """What `replayed` predicts for decode; recall: with look-ahead that finds so many misses."""
    guesses = None if recall is None else guess(replayed, recall)
    seconds = busy = wasted = 0.0
    for at, (hits, misses) in enumerate(
        zip(replayed.hits.tolist(), replayed.misses.tolist(), strict=True)
    ):
        step = time_step(
            trace.model, hits, misses, speeds, None if guesses is None else guesses[at]
        )
        seconds += step.seconds
        busy += step.disk_busy_s
        wasted += step.wasted_nbytes
    num_rows = int(replayed.num_rows.sum())
    return Ranked(
        name=name,
        hit_rate=replayed.hit_rate,
        nbytes_per_token=replayed.miss_nbytes_per_token(trace.model) + wasted / num_rows,
        wasted_nbytes_per_token=wasted / num_rows,
        tok_per_s=num_rows / seconds if seconds else float("inf"),
        disk_busy=busy / seconds if seconds else 0.0,
    )


def bound_s(miss_nbytes: float, used_nbytes: float, speeds: Speeds) -> float:
    """Seconds per token that no schedule beats.

    miss_nbytes: what has to be read from disk; used_nbytes: all that is computed with, which
    comes from DRAM whether it was there or has just arrived.
    """
    return max(miss_nbytes / speeds.disk_bytes_per_s, used_nbytes / speeds.dram_bytes_per_s)


def _part_of(
    progress: Progress | None, name: str, done: int, number: int
) -> Callable[[float], None] | None:
    """What `replay` calls, as a part of `number` pieces of work of which `done` are done."""
    if progress is None:
        return None
    return lambda part: progress(name, (done + part) / number)


@dataclass(frozen=True, slots=True)
class Ranking:
    slots: int
    heat_tokens: int  # chose the hot set
    scored_tokens: int  # decoded in the part that is scored
    policies: tuple[Ranked, ...]  # and CHOSEN; best first
    on_demand: Ranked
    optimum: Ranked  # not to be had: it knows the future
    bound_tok_per_s: float  # of the fewest bytes that any row reads, at these speeds
    in_force: str  # what the chooser used in the end
    num_switches: int


def rank(
    trace: Trace,
    slots: int,
    speeds: Speeds,
    *,
    policies: Sequence[Policy] = POLICIES,
    recall: float | None = None,
    progress: Progress | None = None,
) -> Ranking:
    """The first half of `trace` gives the heat with which every cache starts, the second is scored.

    Raises ValueError if it has no decode step to score, or cannot be halved.
    """
    first, second = trace.halves()
    if second.is_prefill.all():
        raise ValueError("the second half of a trace must have decode steps; it is all prefill")
    heat = heat_of(first)
    runs: list[tuple[str, Policy, Chooser | None]] = [(each.name, each, None) for each in policies]
    if len(policies) > 1:
        start = MIXTURE if MIXTURE in policies else policies[0]
        shape = (trace.num_layers, trace.num_experts)
        chooser = Chooser(*shape, trace.top_k, slots, policies=policies, current=start, heat=heat)
        runs.append((CHOSEN, chooser.policy, chooser))
    ranked: list[Ranked] = []
    missed: list[float] = []  # bytes per token
    for at, (name, policy, judge) in enumerate(runs):
        cache = ExpertCache(trace.num_layers, trace.num_experts, slots, policy, heat)
        fill(cache)
        replayed = replay(second, cache, judge, _part_of(progress, name, at, len(runs) + 1))
        ranked.append(price(name, replayed, second, speeds, recall))
        missed.append(replayed.miss_nbytes_per_token(trace.model))
    if progress is not None:
        progress(OPTIMUM, len(runs) / (len(runs) + 1))
    model = trace.model
    all_read, known = on_demand(second), optimum(second, slots)
    missed.append(known.miss_nbytes_per_token(model))
    used_nbytes = all_read.miss_nbytes_per_token(model) + model.all_dense_nbytes
    # NOTE: the optimum is one of hits over all steps; where experts differ in size, or prompts lie
    # between, a policy may read a little less in decode.
    least_s = bound_s(min(missed), used_nbytes, speeds)
    return Ranking(
        slots=slots,
        heat_tokens=first.num_tokens,
        scored_tokens=int(known.num_rows.sum()),
        policies=tuple(sorted(ranked, key=lambda each: -each.tok_per_s)),
        on_demand=price(ON_DEMAND, all_read, second, speeds),
        optimum=price(OPTIMUM, known, second, speeds),
        bound_tok_per_s=1 / least_s,
        in_force=runs[-1][2].policy.name if runs[-1][2] is not None else policies[0].name,
        num_switches=runs[-1][2].num_switches if runs[-1][2] is not None else 0,
    )
