"""Plans that the search finds, and the knapsack."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from shadowlane.planner.hardware import CALM, Conditions, Hardware
from shadowlane.planner.hybrid import (
    Load,
    Model,
    Prompts,
    Work,
    fits,
)
from shadowlane.planner.hybrid_bounds import hybrid_bounds
from shadowlane.planner.hybrid_changes import MECHANISMS
from shadowlane.planner.hybrid_hand import by_hand
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.hybrid_search import STILL, knapsack, search
from shadowlane.planner.hybrid_synthetic import CARD, MACHINE, dense
from shadowlane.planner.hybrid_synthetic import small_model as model
from shadowlane.planner.hybrid_synthetic import uneven as instance

NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # it would take minutes


machines = st.builds(
    lambda rates, vram, ram, crossing: replace(
        MACHINE,
        cards=tuple(
            replace(CARD, vram_nbytes=1e9 + vram, vram_bytes_per_s=rate, crossing_s=crossing)
            for rate in rates
        ),
        ram_nbytes=4e9 + 3e8 + ram,
    ),
    st.lists(st.sampled_from([200e9, 400e9, 900e9]), max_size=3),
    st.floats(0, 3e9),
    st.floats(0, 4e9),
    st.sampled_from([1e-6, 20e-6, 200e-6]),
)


@st.composite
def models(draw: st.DrawFn) -> Model:
    loads: list[Load] = []
    has_experts = draw(st.booleans())
    for layer in range(draw(st.integers(1, 3))):
        loads.append(Load(f"{layer}.qkv", "qkv", layer, 5e7, 2e8))
        loads.append(
            Load(f"{layer}.attn", "attn", layer, 0.0, 1e4, draw(st.sampled_from([1e3, 2e4])))
        )
        if has_experts:
            loads.append(Load(f"{layer}.router", "router", layer, 1e6, 2e6))
            loads.append(Load(f"{layer}.experts", "experts", layer, 1e7, 8e7, experts=16, top_k=2))
        else:
            loads.append(Load(f"{layer}.gate_up", "gate_up", layer, draw(st.floats(1e7, 8e8)), 1e9))
    loads.append(Load("lm_head", "lm_head", None, 1e8, 4e8))
    return model(*loads)


works = st.sampled_from(
    [Work(), Work(context=4096), Work(rows=4, sequences=4), Work("prefill", rows=512, context=256)]
)


states = st.sampled_from(
    [CALM, Conditions(cpu=0.4), Conditions(link=0.3, gpu=0.5), Conditions(vram_taken_nbytes=1e9)]
)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=NO_SHRINKING,
)
@given(whole=models(), machine=machines, work=works, state=states)
def test_any_plan_found_fits_and_beats_hands_but_no_bound(
    whole: Model, machine: Hardware, work: Work, state: Conditions
) -> None:
    question = Question(whole, machine, work, state, hit_rate=lambda part: part**0.5)
    hand = by_hand(question)
    assume(hand)
    answer = search(question, rivals=hand)
    assert fits(whole, answer.plan, work, machine, state)
    for rival in hand.values():
        assert answer.times.step_s <= rival.times.step_s * (1.0 + STILL)
    bound = hybrid_bounds(question)
    # The part of keys and values on cards is tried on a grid: a bound to a part in a thousand.
    assert bound.resource_s <= bound.path_s <= answer.times.step_s * 1.001
    for name, busy_s in answer.times.busy_s.items():
        assert busy_s <= answer.times.step_s * (1 + 1e-6), name
    for site in answer.plan.sites:
        assert sum(site.over) == pytest.approx(1.0)
        assert -1e-9 <= site.vram <= 1 + 1e-9
        assert site.vram + site.ram <= 1 + 1e-9


def test_more_mechanisms_never_make_a_plan_slower() -> None:
    question = instance(3, layers=3)
    hand = by_hand(question)
    plain = min(answer.times.step_s for answer in hand.values())
    for name in MECHANISMS:
        found = search(question, rivals=hand, using=(name,))
        assert found.times.step_s <= plain * (1.0 + STILL)


def test_what_is_as_fast_without_links_brings_nothing() -> None:
    """A small model fits one card; most of it there and the rest brought in time is as fast."""
    loads: list[Load] = []
    for layer in range(30):
        loads.append(dense(f"{layer}.gate_up", 4e5, layer))
        loads.append(Load(f"{layer}.attn", "attn", layer, 0.0, 1e4, 1e3))
        loads.append(dense(f"{layer}.down", 8e5, layer))
    machine = replace(MACHINE, cards=(CARD, CARD))
    prompts = Prompts(Work("prefill", rows=512, context=512), per_step=1 / 50)
    answer = search(Question(model(*loads), machine, prompts=prompts))
    assert answer.prompt_times is not None
    for times in (answer.times, answer.prompt_times):
        assert times.busy_s["h2d:0"] == times.busy_s["h2d:1"] == 0.0


def test_the_knapsack_is_exact_where_sizes_are_even() -> None:
    """Without crossings worth mention it keeps what saves most per byte."""
    card = replace(CARD, vram_nbytes=1e9 + 3.02e9, crossing_s=1e-9)
    loads = tuple(
        Load(f"{layer}.gate_up", "gate_up", layer, 1e9, flops)
        for layer, flops in enumerate((1e9, 9e11, 1e9, 9e11, 9e11, 1e9))
    )
    plan = knapsack(Question(model(*loads), replace(MACHINE, cards=(card,))))
    assert plan is not None
    assert [site.vram for site in plan.sites] == [0.0, 1.0, 0.0, 1.0, 1.0, 0.0]


def test_crossings_keep_the_knapsack_together() -> None:
    card = replace(CARD, vram_nbytes=1e9 + 2.01e9, crossing_s=5e-3)
    loads = tuple(dense(f"{layer}.gate_up", 1e9, layer) for layer in range(4))
    plan = knapsack(Question(model(*loads), replace(MACHINE, cards=(card,))))
    assert plan is not None
    assert [site.vram for site in plan.sites] in ([1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0])
