"""The competition on line: it finds the better policy, and does not flap."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shadowlane.planner.chooser import Chooser, ChooserSettings
from shadowlane.planner.experts import MIXTURE, POLICIES, Policy
from shadowlane.planner.heat import heat_of
from shadowlane.planner.routing import Trace, synthesize

LRU, STATIC = Policy("lru", "global"), Policy("static", "layer")
SHAPE = {"num_layers": 6, "num_experts": 32, "top_k": 4}


def watch(chooser: Chooser, trace: Trace) -> list[Policy]:
    """The policy in force after each step."""
    seen = []
    for step in trace.passes():
        for layer, ids in step.routes:
            chooser.touch(layer, ids, is_decode=not step.is_prefill)
        seen.append(chooser.policy)
    return seen


def test_it_leaves_a_static_set_whose_time_is_over() -> None:
    before = synthesize(num_tokens=300, locality=0.1, seed=1, **SHAPE)
    after = synthesize(num_tokens=300, locality=0.1, seed=2, **SHAPE)
    settings = ChooserSettings()
    chooser = Chooser(6, 32, 4, 60, current=STATIC, heat=heat_of(before), settings=settings)
    # nothing beats hindsight
    assert {policy.score for policy in watch(chooser, before)} == {"static"}
    seen = watch(chooser, after)
    moved = next(at for at, policy in enumerate(seen) if policy.score != "static")
    assert moved < settings.window + settings.patience
    assert all(policy.score != "static" for policy in seen[moved:])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("slots", [40, 90])
def test_it_does_not_flap_on_a_stationary_trace(seed: int, slots: int) -> None:
    trace = synthesize(num_tokens=700, seed=seed, **SHAPE)
    chooser = Chooser(6, 32, 4, slots)
    seen = watch(chooser, trace)
    assert chooser.num_switches <= 2
    late = [seen[at] != seen[at - 1] for at in range(350, 700)]
    assert sum(late) <= 1
    assert max(chooser.hit_rates.values()) - chooser.hit_rates[chooser.policy.name] < 0.02


def test_it_never_sits_on_the_cliff() -> None:
    trace = synthesize(num_tokens=120, locality=0.8, **SHAPE)
    slots = 18  # of 24 that a step chooses
    chooser = Chooser(6, 32, 4, slots, current=LRU)
    assert chooser.policy == MIXTURE
    assert LRU not in watch(chooser, trace)
    assert chooser.hit_rates["lru/global"] < 0.001  # what it was filled with, once
    # More rows choose more experts: then the cliff is further up.
    rows = replace(trace, steps=(np.arange(120) // 4).astype(np.int32))
    chooser = Chooser(6, 32, 4, 40, current=LRU)
    assert chooser.policy == LRU
    seen = watch(chooser, rows)
    assert LRU not in seen[20:]


def test_prefill_is_not_scored() -> None:
    trace = synthesize(num_tokens=50, **SHAPE)
    chooser = Chooser(6, 32, 4, 40)
    watch(chooser, replace(trace, is_prefill=np.ones(50, np.bool_)))
    assert set(chooser.hit_rates.values()) == {0}


def test_a_sample_of_layers_stands_for_all() -> None:
    trace = synthesize(num_tokens=200, num_layers=24, num_experts=32, top_k=4)
    rates = []
    for sampled in (24, 6):
        chooser = Chooser(24, 32, 4, 240, settings=ChooserSettings(sampled_layers=sampled))
        watch(chooser, trace)
        rates.append(np.array(list(chooser.hit_rates.values())))
    assert np.abs(rates[0] - rates[1]).max() < 0.05


def test_what_is_in_force_must_take_part() -> None:
    with pytest.raises(ValueError, match="current must be one of the policies; got mixture/layer"):
        Chooser(6, 32, 4, 40, current=Policy("mixture", "layer"))
    assert list(Chooser(6, 32, 4, 40).hit_rates) == [policy.name for policy in POLICIES]
