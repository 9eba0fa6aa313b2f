"""The cache of experts: what holds for every policy, and what each is known for."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shadowlane.planner.experts import (
    MIXTURE,
    POLICIES,
    ExpertCache,
    Policy,
    Scores,
    is_on_cliff,
    serve,
)
from shadowlane.planner.heat import Heat, heat_of
from shadowlane.planner.routing import Trace, synthesize

few = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
every = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)

LAYERS, EXPERTS = 3, 8
Route = tuple[int, list[int]]


@st.composite
def routes(draw: st.DrawFn) -> list[Route]:
    """Layers in turn, as in steps; each chooses some experts."""
    number = draw(st.integers(1, 40))
    ids = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=4, unique=True)
    return [(at % LAYERS, draw(ids)) for at in range(number)]


def filled(slots: int, policy: Policy, heat: Heat | None = None) -> ExpertCache:
    cache = ExpertCache(LAYERS, EXPERTS, slots, policy, heat)
    for key in cache.wanted().tolist():
        cache.insert(key)
    return cache


@every
@few
@given(routes(), st.integers(1, LAYERS * EXPERTS), st.randoms())
def test_it_keeps_to_its_slots_and_evicts_only_what_may_go(
    policy: Policy, given_routes: list[Route], slots: int, random: np.random.Generator
) -> None:
    cache = filled(slots, policy)
    assert len(cache) == slots
    for layer, ids in given_routes:
        before = set(cache.resident().tolist())
        keys = [layer * EXPERTS + each for each in ids]
        assert cache.touch(layer, ids).tolist() == [key in before for key in keys]
        is_evictable = np.array([random.random() < 0.7 for _ in range(LAYERS * EXPERTS)])
        for key in keys:
            if key in cache:
                continue
            victim = cache.victim(layer, is_evictable)
            may_go = [each for each in cache.resident().tolist() if is_evictable[each]]
            if victim is None:
                assert not may_go
                continue
            assert victim in may_go
            if victim in keys:  # the newest route gives only when no other can
                assert set(may_go) <= set(keys)
            cache.remove(victim)
            cache.insert(key)
        assert len(cache) == len(cache.resident()) == slots
    assert cache.hits + cache.misses == sum(len(ids) for _, ids in given_routes)
    assert cache.heat("m").counts.sum() == sum(len(ids) for _, ids in given_routes)


@few
@given(routes(), st.integers(4, 20))
def test_lru_is_the_textbook_lru(given_routes: list[Route], slots: int) -> None:
    cache = ExpertCache(LAYERS, EXPERTS, slots, Policy("lru", "global"))
    reference: OrderedDict[int, None] = OrderedDict()
    for layer, ids in given_routes:
        keys = sorted(layer * EXPERTS + each for each in ids)
        missing = [key for key in keys if key not in reference]
        assert serve(cache, layer, sorted(ids)).tolist() == [key in missing for key in keys]
        for key in keys:
            if key in reference:
                reference.move_to_end(key)
        for key in missing:
            if len(reference) == slots:
                reference.popitem(last=False)
            reference[key] = None
        for key in keys:  # in a route none is older than another: the lowest goes first
            reference.move_to_end(key)
        assert set(cache.resident().tolist()) == set(reference)


@few
@given(st.integers(1, LAYERS * EXPERTS), st.integers(0, 10_000))
def test_what_static_wants_is_the_best_set_in_hindsight(slots: int, seed: int) -> None:
    counts = np.random.default_rng(seed).integers(0, 9, (LAYERS, EXPERTS)).astype(float)
    heat = Heat("m", 9, counts)
    best = np.sort(counts.ravel())[::-1][:slots].sum()
    wanted = ExpertCache(LAYERS, EXPERTS, slots, Policy("static", "global"), heat).wanted()
    assert len(set(wanted.tolist())) == slots
    assert counts.ravel()[wanted].sum() == best
    wanted = ExpertCache(LAYERS, EXPERTS, slots, Policy("static", "layer"), heat).wanted()
    per_layer = np.bincount(wanted // EXPERTS, minlength=LAYERS)
    assert per_layer.max() - per_layer.min() <= 1
    for layer, number in enumerate(per_layer):
        mine = wanted[wanted // EXPERTS == layer]
        assert counts.ravel()[mine].sum() == np.sort(counts[layer])[::-1][:number].sum()


def test_a_static_set_stays_but_for_the_slots_of_one_route() -> None:
    trace = synthesize(num_tokens=60, num_layers=4, num_experts=16, top_k=3)
    heat = heat_of(trace)
    slots, top_k = 24, trace.top_k
    cache = ExpertCache(4, 16, slots, Policy("static", "global"), heat)
    by_heat = cache.wanted().tolist()
    for key in by_heat:
        cache.insert(key)
    for step in trace.passes():
        for layer, ids in step.routes:
            serve(cache, layer, ids)
            assert set(by_heat[: slots - top_k]) <= set(cache.resident().tolist())
    hottest = np.sort(heat.counts.ravel())[::-1]
    assert hottest[: slots - top_k].sum() <= cache.hits


def replayed(trace: Trace, slots: int, policy: Policy) -> ExpertCache:
    cache = ExpertCache(trace.num_layers, trace.num_experts, slots, policy)
    for step in trace.passes():
        for layer, ids in step.routes:
            serve(cache, layer, ids)
    return cache


def test_a_global_lru_below_one_step_hits_nothing_and_the_others_do() -> None:
    trace = synthesize(num_tokens=60, num_layers=12, num_experts=32, top_k=4, locality=0.8)
    one_step = trace.num_layers * trace.top_k
    lru = Policy("lru", "global")
    assert is_on_cliff(lru, one_step - 1, one_step)
    assert not is_on_cliff(lru, one_step, one_step)
    # NOTE: within one route of the edge some hit: experts of the same route are equally old.
    assert replayed(trace, one_step * 3 // 4, lru).hits == 0
    assert replayed(trace, 2 * one_step, lru).hits > 0
    for policy in POLICIES:
        if policy not in (lru, Policy("static", "global"), Policy("static", "layer")):
            assert not is_on_cliff(policy, one_step - 1, one_step)
            cache = replayed(trace, one_step * 3 // 4, policy)
            assert cache.hits > 0.15 * (cache.hits + cache.misses), policy.name


def test_frequency_forgets_by_its_half_life() -> None:
    scores = Scores(1, 4, (Policy("frequency", "global", half_life=10),))
    rows = scores.rows(Policy("frequency", "global", half_life=10))
    for _ in range(200):
        scores.touch(0, np.array([2]))
    assert rows[0, 2] == pytest.approx(1, abs=1e-3)
    for _ in range(10):
        scores.touch(0, np.array([1]))
    assert rows[0, 2] == pytest.approx(0.5, abs=1e-3)
    assert rows[0, 1] == pytest.approx(0.5, abs=1e-3)


def test_the_mixture_keeps_what_is_used_often_and_what_was_used_just_now() -> None:
    cache = ExpertCache(1, 8, 3, MIXTURE)
    for step in range(50):
        serve(cache, 0, [0, 1] if step % 2 else [0, 2 + step % 5])
    serve(cache, 0, [7])
    assert 0 in cache  # often
    assert 7 in cache  # just now
    serve(cache, 0, [0])
    assert 1 in cache


def test_layers_keep_their_shares() -> None:
    cache = filled(12, Policy("lru", "layer"))
    for _ in range(20):
        for layer in range(LAYERS):
            serve(cache, layer, [0, 5, 7])
            held = np.bincount(cache.resident() // EXPERTS, minlength=LAYERS)
            assert held.tolist() == [4, 4, 4]


def test_what_comes_in_waves_takes_the_place_of_what_is_done() -> None:
    cache = filled(4, MIXTURE)
    cache.touch(1, range(EXPERTS))
    is_done = np.zeros(LAYERS * EXPERTS, np.bool_)
    for key in cache.resident().tolist():
        cache.remove(key)
    for key in range(EXPERTS, EXPERTS + 4):
        cache.insert(key)
    assert cache.victim(1) is None
    assert cache.victim(1, is_done) is None
    is_done[EXPERTS + 2] = True
    assert cache.victim(1, is_done) == EXPERTS + 2


def test_a_policy_can_change_while_it_runs() -> None:
    cache = filled(6, Policy("lru", "global"))
    twin = filled(6, MIXTURE)
    random = np.random.default_rng(3)
    routes = [(at % LAYERS, random.permutation(EXPERTS)[:2]) for at in range(120)]
    for layer, ids in routes[:60]:
        serve(cache, layer, ids)
        serve(twin, layer, ids)
    cache.use(MIXTURE)
    hits = cache.hits, twin.hits
    for layer, ids in routes[60:]:
        serve(cache, layer, ids)
        serve(twin, layer, ids)
    # Its scores have been kept all the while: soon it holds what its twin does.
    assert cache.resident().tolist() == twin.resident().tolist()
    assert cache.hits - hits[0] >= twin.hits - hits[1] - 3


def test_everything_resident_never_evicts() -> None:
    cache = filled(LAYERS * EXPERTS, MIXTURE)
    for at in range(50):
        assert not serve(cache, at % LAYERS, [at % EXPERTS]).any()
    assert (cache.hits, cache.misses) == (50, 0)


def test_mistakes_are_refused() -> None:
    cache = ExpertCache(LAYERS, EXPERTS, 1)
    cache.insert(3)
    for call, says in (
        (lambda: cache.insert(3), "key must not be resident; got 3"),
        (lambda: cache.insert(4), "one of 1 slots must be free for key 4; none is"),
        (lambda: cache.remove(4), "key must be resident; got 4"),
        (lambda: ExpertCache(LAYERS, EXPERTS, 0), "slots must be between 1 and 24"),
        (lambda: ExpertCache(LAYERS, EXPERTS, 25), "slots must be between 1 and 24"),
        (lambda: Policy("lru", "layer", half_life=0), "half_life must be positive; got 0"),
        (
            lambda: ExpertCache(1, 2, 1, heat=Heat("m", 1, np.ones((1, 3)))),
            r"heat must be \(1, 2\); got \(1, 3\)",
        ),
    ):
        with pytest.raises(ValueError, match=says):
            call()


@every
@few
@given(routes(), st.integers(1, LAYERS * EXPERTS), st.randoms())
def test_victims_beforehand_are_those_that_would_be_asked_for(
    policy: Policy, given_routes: list[Route], slots: int, random: np.random.Generator
) -> None:
    cache = filled(slots, policy)
    for layer, ids in given_routes:
        serve(cache, layer, ids)
    may_go = np.array([random.random() < 0.7 for _ in range(LAYERS * EXPERTS)])
    may_go &= np.isin(np.arange(LAYERS * EXPERTS), cache.resident())
    keys, lists = cache.victims(LAYERS * EXPERTS, may_go)
    for layer in range(LAYERS):
        listed = [key for key in keys[lists[layer]].tolist() if key >= 0]
        assert all(may_go[key] for key in listed)
        assert len(set(listed)) == len(listed)
        asked = cache.victim(layer, may_go)
        if listed:
            assert asked == listed[0]


def test_what_is_held_can_be_told_anew() -> None:
    cache = filled(6, MIXTURE)
    cache.touch(1, [3])
    resident = np.zeros(LAYERS * EXPERTS, np.bool_)
    resident[[1, EXPERTS + 3, 2 * EXPERTS]] = True
    cache.hold(resident)
    assert cache.resident().tolist() == [1, EXPERTS + 3, 2 * EXPERTS]
    assert len(cache) == 3
    keys, _ = cache.victims(6, resident)
    assert EXPERTS + 3 not in keys  # the newest route chose it
    with pytest.raises(ValueError, match="6 slots must hold what is resident; got 7"):
        cache.hold(np.arange(LAYERS * EXPERTS) < 7)
