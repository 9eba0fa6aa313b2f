"""Replays by hand: hit rates, the optimum, the time of a step, and the ranking."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shadowlane.planner.chooser import Chooser
from shadowlane.planner.expert_sim import (
    CHOSEN,
    Delays,
    Replay,
    Speeds,
    bound_s,
    fill,
    guess,
    on_demand,
    optimum,
    price,
    rank,
    replay,
    slot_nbytes,
    slots_in,
    time_step,
)
from shadowlane.planner.experts import MIXTURE, POLICIES, ExpertCache, Policy
from shadowlane.planner.routing import RoutedModel, Trace, synthesize

MODEL = RoutedModel("m", 4, 1, (10, 20), (100, 200), 50)
SPEEDS = Speeds(disk_bytes_per_s=1.0, dram_bytes_per_s=10.0)


def trace_of(*layers: list[int], model: RoutedModel = MODEL) -> Trace:
    """One expert per layer and token: [layer][token]."""
    choices = np.array(layers, np.int16).T[:, :, None]
    tokens = len(choices)
    return Trace(
        model, choices, np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.bool_), (0,)
    )


def test_a_replay_counts_hits_and_bytes() -> None:
    trace = trace_of([0, 1, 0, 1], [2, 2, 3, 2])
    cache = ExpertCache(2, 4, 2, Policy("lru", "layer"))
    fill(cache)  # expert 0 of each layer
    replayed = replay(trace, cache)
    assert replayed.hits.tolist() == [[1, 0], [0, 1], [0, 0], [0, 0]]
    assert replayed.misses.tolist() == [[0, 1], [1, 0], [1, 1], [1, 1]]
    assert replayed.hit_rate == 2 / 8
    assert replayed.miss_nbytes_per_token(MODEL) == (3 * 10 + 3 * 20) / 4


def test_prefill_passes_through_uncounted_and_rows_share_a_read() -> None:
    trace = replace(
        trace_of([0, 1, 2, 2, 3], [0, 0, 1, 1, 1]),
        steps=np.array([0, 0, 1, 1, 2], np.int32),
        is_prefill=np.array([True, True, False, False, False]),
    )
    replayed = replay(trace, ExpertCache(2, 4, 8))
    assert replayed.num_rows.tolist() == [2, 1]
    assert replayed.misses.tolist() == [[1, 1], [1, 0]]
    assert replayed.hits.tolist() == [[0, 0], [0, 1]]
    assert replayed.miss_nbytes_per_token(MODEL) == (10 + 20 + 10) / 3
    assert on_demand(trace).misses.tolist() == [[1, 1], [1, 1]]


def test_the_optimum_knows_the_future() -> None:
    model = RoutedModel("m", 4, 1, (10,), (0,))
    # Two slots: it starts with 0 and 1, never takes 2 or 3, which come once.
    assert optimum(trace_of([0, 1, 2, 0, 1, 3, 0], model=model), 2).hit_rate == 5 / 7
    # One slot: 0 stays for 1, which is needed sooner.
    assert optimum(trace_of([0, 1, 1, 0], model=model), 1).hits.ravel().tolist() == [1, 0, 1, 0]
    assert optimum(trace_of([3, 2, 1], model=model), 4).hit_rate == 1


@pytest.mark.parametrize("slots", [10, 30, 60])
def test_no_policy_beats_the_optimum(slots: int) -> None:
    trace = synthesize(num_tokens=60, num_layers=4, num_experts=16, top_k=3, locality=0.7)
    best = optimum(trace, slots).hit_rate
    for policy in POLICIES:
        cache = ExpertCache(4, 16, slots, policy)
        fill(cache)
        assert replay(trace, cache).hit_rate <= best


def test_a_step_is_timed_layer_by_layer() -> None:
    # Layer 0: 10 s dense, read 10..20, hit 10..11, what arrives 20..21.
    # Layer 1: 20 s dense until 41, reads until 61 and 81, computed until 63 and 83. Outside: 5 s.
    step = time_step(MODEL, [1, 0], [1, 2], SPEEDS)
    assert step.seconds == pytest.approx(21 + 20 + 20 + 20 + 2 + 5)
    assert step.disk_busy_s == pytest.approx(50)
    assert step.wasted_nbytes == 0
    # All resident: DRAM alone.
    assert time_step(MODEL, [1, 3], [0, 0], SPEEDS).seconds == pytest.approx(
        (100 + 200 + 50 + 10 + 3 * 20) / 10
    )


def test_delays_are_paid_where_they_arise() -> None:
    # Layer 0: 13 s until its router has chosen, read 15..25, and a worker is up at 26.
    # Layer 1: its router has chosen at 50, reads 52..72..92; computed by 75, and by 95.
    delays = Delays(start_s=2.0, arrive_s=1.0, layer_s=3.0, step_s=4.0)
    step = time_step(MODEL, [1, 0], [1, 2], replace(SPEEDS, delays=delays))
    assert step.seconds == pytest.approx(25 + 1 + 1 + 3 + 20 + 2 + 40 + 1 + 2 + 5 + 4)
    # Nothing is missing: nobody waits for a read.
    step = time_step(MODEL, [1, 3], [0, 0], replace(SPEEDS, delays=delays))
    assert step.seconds == pytest.approx((100 + 200 + 50 + 10 + 3 * 20) / 10 + 2 * 3 + 4)


def test_hits_are_computed_while_misses_are_read() -> None:
    model = RoutedModel("m", 9, 1, (10,), (0,))
    # Seven hits take 7 s, the reads are there after 10 and 20.
    assert time_step(model, [7], [2], SPEEDS).seconds == pytest.approx(21)
    fast = Speeds(disk_bytes_per_s=100.0, dram_bytes_per_s=10.0)
    assert time_step(model, [7], [2], fast).seconds == pytest.approx(9)


def test_look_ahead_reads_behind_what_is_certain() -> None:
    # Layer 0 has its miss at 20; the guess for layer 1 starts then, its router has chosen at 41.
    # Right: there at 40. The second guess starts at 40, is wrong and under way: it ends at 60.
    right = time_step(MODEL, [1, 0], [1, 1], SPEEDS, [[], [True]])
    assert right.seconds == pytest.approx(41 + 2 + 5)
    assert (right.disk_busy_s, right.wasted_nbytes) == (pytest.approx(30), 0)
    wrong = time_step(MODEL, [1, 1], [1, 1], SPEEDS, [[], [True, False, False]])
    assert wrong.seconds == pytest.approx(41 + 2 + 2 + 5)
    assert (wrong.disk_busy_s, wrong.wasted_nbytes) == (pytest.approx(50), 20)
    # A wrong guess under way makes a certain read wait for it.
    late = time_step(MODEL, [1, 0], [1, 1], SPEEDS, [[], [False, False, False]])
    assert late.seconds == pytest.approx(60 + 20 + 2 + 5)
    assert late.wasted_nbytes == 40


def test_guesses_find_the_misses_that_recall_says() -> None:
    ones = np.ones((400, 2), np.int64)
    replayed = Replay(np.ones(400, np.int64), ones, ones)
    for recall in (0.0, 0.6, 1.0):
        flat = [each for step in guess(replayed, recall) for layer in step for each in layer]
        assert sum(flat) / 800 == pytest.approx(recall, abs=0.06)
        # Half of what was chosen was missing, so half of the wrong ones are.
        assert (len(flat) - sum(flat)) / 1600 == pytest.approx((1 - recall) / 2, abs=0.06)
    with pytest.raises(ValueError, match="recall must be between 0 and 1; got 2"):
        guess(replayed, 2)


def test_prices_are_of_the_whole_trace() -> None:
    trace = trace_of([0, 0], [0, 0])
    replayed = on_demand(trace)
    priced = price("x", replayed, trace, SPEEDS)
    step = time_step(MODEL, [0, 0], [1, 1], SPEEDS)
    assert priced.tok_per_s == pytest.approx(1 / step.seconds)
    assert priced.nbytes_per_token == 30
    assert priced.disk_busy == pytest.approx(30 / step.seconds)
    ahead = price("x", replayed, trace, SPEEDS, recall=0.0)
    assert ahead.nbytes_per_token == 30 + ahead.wasted_nbytes_per_token


def test_the_bound_is_the_busier_of_disk_and_dram() -> None:
    assert bound_s(30, 100, SPEEDS) == 30
    assert bound_s(3, 100, SPEEDS) == 10


def test_dense_parts_come_before_experts() -> None:
    assert slot_nbytes(MODEL) == 4096
    assert slots_in(MODEL, 350 + 3 * 4096 + 7) == 3
    assert slots_in(MODEL, 1 << 30) == 8
    with pytest.raises(ValueError, match=r"ram must be at least 12\.3 KiB, the dense parts and 3 "):
        slots_in(MODEL, 350 + 3 * 4096 - 1)


def test_the_ranking_scores_what_did_not_choose() -> None:
    trace = synthesize(num_tokens=160, num_layers=6, num_experts=32, top_k=4, seed=5)
    parts: list[float] = []
    ranking = rank(trace, 60, Speeds(1e9, 20e9), progress=lambda _name, part: parts.append(part))
    assert parts == sorted(parts)
    assert 0 < parts[0] < parts[-1] <= 1
    names = [each.name for each in ranking.policies]
    assert set(names) == {policy.name for policy in POLICIES} | {CHOSEN}
    by_name = {each.name: each for each in ranking.policies}
    speeds = [each.tok_per_s for each in ranking.policies]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] <= ranking.bound_tok_per_s
    assert ranking.optimum.tok_per_s <= ranking.bound_tok_per_s
    assert ranking.on_demand.hit_rate == 0
    assert ranking.on_demand.tok_per_s < speeds[-1]
    assert ranking.optimum.hit_rate > max(each.hit_rate for each in ranking.policies)
    assert (ranking.heat_tokens, ranking.scored_tokens) == (80, 80)
    # The second half drawn anew: what the first half taught is worth nothing.
    other = synthesize(num_tokens=80, num_layers=6, num_experts=32, top_k=4, seed=6)
    mixed = replace(trace, choices=np.concatenate([trace.choices[:80], other.choices]))
    shifted = {each.name: each for each in rank(mixed, 60, Speeds(1e9, 20e9)).policies}
    assert shifted["static/layer"].hit_rate < by_name["static/layer"].hit_rate - 0.15
    assert shifted[MIXTURE.name].hit_rate > shifted["static/layer"].hit_rate + 0.05


@pytest.mark.parametrize("disk", [1e8, 1e9, 1e11])
@pytest.mark.parametrize("slots", [8, 60, 180])
@pytest.mark.parametrize("recall", [None, 0.9])
def test_nothing_beats_the_bound(disk: float, slots: int, recall: float | None) -> None:
    trace = synthesize(num_tokens=60, num_layers=6, num_experts=32, top_k=4, seed=7)
    ranking = rank(trace, slots, Speeds(disk, 20e9), recall=recall)
    for row in (*ranking.policies, ranking.on_demand, ranking.optimum):
        assert row.tok_per_s <= ranking.bound_tok_per_s * (1 + 1e-9), row.name


def test_a_cache_follows_its_chooser() -> None:
    before = synthesize(num_tokens=80, num_layers=6, num_experts=32, top_k=4, locality=0.9)
    lru = Policy("lru", "layer")
    chooser = Chooser(6, 32, 4, 40, policies=(Policy("static", "layer"), lru),
                      current=Policy("static", "layer"))  # fmt: skip
    cache = ExpertCache(6, 32, 40, chooser.policy)
    fill(cache)
    replay(before, cache, chooser)
    assert cache.policy == chooser.policy == lru


def test_what_cannot_be_ranked_is_refused() -> None:
    trace = synthesize(num_tokens=4, num_layers=1, num_experts=8, top_k=2)
    with pytest.raises(ValueError, match="second half of a trace must have decode steps"):
        rank(replace(trace, is_prefill=np.ones(4, np.bool_)), 4, SPEEDS)
    with pytest.raises(ValueError, match="speeds must be positive"):
        Speeds(0, 1)
