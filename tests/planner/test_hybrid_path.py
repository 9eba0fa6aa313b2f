"""The critical path: no plan is shorter, and chains that can be told by hand come out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowlane.planner.hybrid import Load, Model, Plan, Site, Work, assumed_hits
from shadowlane.planner.hybrid_hand import by_hand
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.hybrid_path import EXACT, Overheads, PathBound
from shadowlane.planner.hybrid_search import search
from shadowlane.planner.hybrid_synthetic import CARD, MACHINE, dense
from shadowlane.planner.hybrid_synthetic import small_model as model


def bound_s(question: Question, overheads: Overheads = EXACT) -> float:
    return PathBound(question, overheads).best()[0]


def test_all_on_the_card_is_a_chain_of_launches() -> None:
    card = replace(CARD, launch_s=1e-4, crossing_s=1e-3)
    loads = [dense(f"{layer}.qkv", 1e8, layer) for layer in range(10)]
    question = Question(model(*loads), replace(MACHINE, cards=(card,)))
    plan = Plan("", (Site(1.0, 0.0),) * 10)
    assert question.fits(plan)
    assert bound_s(question) <= question.times(plan).step_s
    assert bound_s(question) >= 0.99 * (10 * (1e8 / card.vram_bytes_per_s + 1e-4))


def test_dear_crossings_keep_groups_from_being_divided() -> None:
    """Cores and card as fast as each other: half the time, were it not for the way between them."""
    card = replace(CARD, vram_bytes_per_s=40e9, launch_s=0.0)
    loads = [dense(f"{layer}.qkv", 4e7, layer) for layer in range(10)]
    cheap, dear = (
        Question(
            model(*loads),
            replace(
                MACHINE,
                cpu_bytes_per_s=40e9,
                cpu_launch_s=0.0,
                cards=(replace(card, crossing_s=s),),
            ),
        )
        for s in (0.0, 1e-2)
    )
    assert bound_s(cheap) == pytest.approx(5e-3, rel=0.05)
    assert bound_s(dear) == pytest.approx(1e-2, rel=0.05)


def test_a_world_with_small_matrices_has_a_longer_path() -> None:
    loads = [dense(f"{layer}.qkv", 1e6, layer) for layer in range(10)]
    question = Question(model(*loads), replace(MACHINE, cards=(), cpu_launch_s=0.0))
    more_s = bound_s(question, Overheads(small_nbytes=1e6)) - bound_s(question)
    assert more_s == pytest.approx(10 * 1e6 / MACHINE.cpu_bytes_per_s, rel=1e-3)


def mixture(layers: int) -> Model:
    loads: list[Load] = []
    for layer in range(layers):
        loads.append(dense(f"{layer}.qkv", 2e7, layer))
        loads.append(Load(f"{layer}.attn", "attn", layer, 0.0, 4096.0, kv_nbytes_per_token=4096.0))
        loads.append(Load(f"{layer}.experts", "experts", layer, 4e6, 3e7, experts=32, top_k=4))
    return model(*loads)


@pytest.mark.parametrize("work", [Work(), Work("prefill", rows=256, context=256)])
@pytest.mark.parametrize("cards", [1, 2])
def test_no_layout_is_shorter(work: Work, cards: int) -> None:
    small = replace(CARD, vram_nbytes=CARD.reserved_nbytes + 1e9)
    machine = replace(MACHINE, cards=(small,) * cards, dram_bytes_per_s=45e9)
    for it in (mixture(6), model(*(dense(f"{i}.{i % 2}", 2e8, i // 2) for i in range(12)))):
        question = Question(it, machine, work, hit_rate=assumed_hits(it))
        least = bound_s(question)
        for answer in [*by_hand(question).values(), search(question)]:
            assert least <= answer.times.step_s * (1.0 + 1e-6), answer.plan.name


parts = st.floats(0.0, 1.0)


@settings(max_examples=60, deadline=None)
@given(
    vram=st.lists(parts, min_size=9, max_size=9),
    brought=st.lists(parts, min_size=9, max_size=9),
    room=st.floats(3e8, 2e9),
    crossing_s=st.sampled_from([0.0, 2e-5, 1e-3]),
    rows=st.sampled_from([1, 128]),
)
def test_no_plan_is_shorter(
    vram: list[float], brought: list[float], room: float, crossing_s: float, rows: int
) -> None:
    card = replace(CARD, vram_nbytes=CARD.reserved_nbytes + room, crossing_s=crossing_s)
    it = mixture(3)
    work = Work("decode" if rows == 1 else "prefill", rows=rows)
    question = Question(it, replace(MACHINE, cards=(card,)), work, hit_rate=assumed_hits(it))
    sites = tuple(
        Site(v, 1.0 - v, *(b, (1.0,), b) if load.kind != "attn" else (0.0, (1.0,), 0.0))
        for load, v, b in zip(it.loads, vram, brought, strict=True)
    )
    plan = Plan("", sites)
    if question.fits(plan):
        assert bound_s(question) <= question.times(plan).step_s * (1.0 + 1e-6)
