"""What plans over cards take up, and layouts that are tuned by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shadowlane.planner.hardware import Conditions
from shadowlane.planner.hybrid import (
    DISK_RING_NBYTES,
    STAGE_NBYTES,
    Load,
    Plan,
    Site,
    Work,
    demand,
    fits,
)
from shadowlane.planner.hybrid_hand import by_hand, cpu_moe, layer_split, split_moe
from shadowlane.planner.hybrid_layouts import Question, TooLarge, pack
from shadowlane.planner.hybrid_search import search
from shadowlane.planner.hybrid_synthetic import CARD, MACHINE, dense
from shadowlane.planner.hybrid_synthetic import small_model as model


def test_demand_counts_keys_and_values_where_they_are() -> None:
    attn = Load("0.attn", "attn", 0, 0.0, 100.0, kv_nbytes_per_token=1000.0)
    whole = model(attn, dense("0.gate_up", 1e9))
    work = Work(max_context=10_000, sequences=2)
    both = demand(whole, Plan("", (Site(0.25, 0.75), Site(0.5, 0.5, 0.5))), work, MACHINE)
    assert both.vram[0] == pytest.approx(0.25 * 2e7 + 0.5e9 + STAGE_NBYTES)
    assert both.ram == pytest.approx(1e8 + 0.75 * 2e7 + 0.5e9)


def test_what_is_read_ahead_has_room_in_ram() -> None:
    whole = model(dense("a", 1e9))
    assert demand(whole, Plan("", (Site(0.0, 0.6),)), Work(), MACHINE).ram == pytest.approx(
        1e8 + 0.6e9 + DISK_RING_NBYTES
    )
    large = model(dense("a", 8e9))
    machine = replace(MACHINE, cards=(), ram_nbytes=4e9 + 1e8 + 4e9)
    plan = search(Question(large, machine)).plan
    assert plan.sites[0].ram == pytest.approx((4.0 - DISK_RING_NBYTES / 1e9) / 8)


def test_what_is_read_ahead_takes_an_eighth_of_little_ram() -> None:
    small = replace(MACHINE, cards=(), ram_nbytes=4e9 + 1e8 + 0.8e9)
    plan = search(Question(model(dense("a", 1e9)), small)).plan
    assert plan.sites[0].ram == pytest.approx(0.7)


def test_taken_memory_is_not_there_to_plan_with() -> None:
    whole = model(dense("a", 6.5e9))
    plan = Plan("", (Site(1.0, 0.0),))
    assert fits(whole, plan, Work(), MACHINE)
    assert not fits(whole, plan, Work(), MACHINE, Conditions(vram_taken_nbytes=1e9))


def test_a_context_that_fits_nowhere_is_said() -> None:
    attn = Load("0.attn", "attn", 0, 0.0, 100.0, kv_nbytes_per_token=1e6)
    question = Question(model(attn, dense("a", 1e9)), MACHINE, Work(max_context=100_000))
    with pytest.raises(TooLarge, match="100000 tokens"):
        search(question)


def test_layers_go_to_the_fastest_card_first_and_then_to_the_next() -> None:
    slow = replace(CARD, name="slow", vram_bytes_per_s=200e9)
    two = replace(MACHINE, cards=(slow, CARD))
    loads = tuple(dense(f"{layer}.gate_up", 2e9, layer) for layer in range(6))
    plan = layer_split(Question(model(*loads), two), 6)
    assert plan is not None
    assert [site.over for site in plan.sites] == [(0.0, 1.0)] * 3 + [(1.0, 0.0)] * 3


def test_rows_between_cards_are_tuned_by_hand_too() -> None:
    two = replace(MACHINE, cards=(CARD, replace(CARD, vram_bytes_per_s=200e9)))
    loads = tuple(dense(f"{layer}.gate_up", 1e9, layer) for layer in range(4))
    hand = by_hand(Question(model(*loads), two))
    assert {site.over for site in hand["row-split"].plan.sites} == {(2 / 3, 1 / 3)}
    # 4 GB at 600 GB/s; one card after the other takes longer.
    assert hand["row-split"].times.step_s == pytest.approx(4e9 / 600e9, rel=0.1)
    assert hand["row-split"].times.step_s < hand["layer-split"].times.step_s
    assert "row-split" not in by_hand(Question(model(*loads), MACHINE))


def test_cpu_moe_leaves_only_experts() -> None:
    experts = tuple(
        Load(f"{layer}.experts", "experts", layer, 1e7, 1e7, experts=16, top_k=2)
        for layer in range(3)
    )
    plan = cpu_moe(Question(model(dense("0.gate_up", 1e8), *experts), MACHINE), 2)
    assert plan is not None
    assert [site.vram for site in plan.sites] == [1.0, 0.0, 0.0, 1.0]


def test_layers_and_experts_are_tuned_together() -> None:
    """Of so many layers on the card, as few leave their experts in RAM as there is room for."""
    loads: list[Load] = []
    for layer in range(4):
        loads.append(Load(f"{layer}.qkv", "qkv", layer, 1e9, 1e9))
        loads.append(Load(f"{layer}.attn", "attn", layer, 0.0, 1e6, kv_nbytes_per_token=1e4))
        loads.append(Load(f"{layer}.experts", "experts", layer, 1e8, 1e8, experts=16, top_k=2))
    question = Question(model(*loads), MACHINE, Work())
    plan = split_moe(question, 3)  # 3 GB, and room for the experts of two layers of 1.6
    assert plan is not None
    assert plan.name == "layer-split 3 + cpu-moe 1"
    on_cards = [load.name for load, s in zip(loads, plan.sites, strict=True) if s.vram]
    assert on_cards == [load.name for load in loads[:9] if load.name != "0.experts"]
    tiny = replace(MACHINE, cards=(replace(CARD, vram_nbytes=1e9),))
    assert split_moe(replace(question, machine=tiny), 3) is None
    found = by_hand(question)
    assert found["layer-split + cpu-moe"].times.step_s <= found["cpu-moe"].times.step_s
    in_ram = cpu_moe(question, 3, kv=False)
    assert in_ram is not None
    sites = zip(loads, in_ram.sites, strict=True)
    assert all(site.vram == 0.0 for load, site in sites if load.kind == "attn")


def test_what_layouts_by_hand_leave_in_ram_is_brought_for_prompts() -> None:
    loads: list[Load] = []
    for layer in range(16):
        loads.append(Load(f"{layer}.qkv", "qkv", layer, 5e7, 2e8))
        loads.append(Load(f"{layer}.experts", "experts", layer, 5e7, 4e8, experts=16, top_k=2))
    prompt = Question(model(*loads), MACHINE, Work("prefill", rows=512))
    found = by_hand(prompt)["cpu-moe"]
    assert found.plan.name.endswith(", streamed")
    # Experts that are not on the card come over the link: the cores would take ten times as long.
    off = sum(
        load.nbytes * 16 * (1 - site.vram)
        for load, site in zip(loads, found.plan.sites, strict=True)
    )
    assert off / 20e9 <= found.times.step_s < 1.3 * off / 20e9
    assert not by_hand(replace(prompt, work=Work()))["cpu-moe"].plan.name.endswith("streamed")


def test_experts_fill_the_room_that_equal_shares_leave() -> None:
    """Eleven of sixteen fit: two in each of four layers, and one more in three of them."""
    experts = tuple(
        Load(f"{layer}.experts", "experts", layer, 5e8, 1e7, experts=4, top_k=2)
        for layer in range(4)
    )
    question = Question(
        model(*experts), replace(MACHINE, cards=(replace(CARD, vram_nbytes=6.7e9),))
    )
    spread = pack(question, range(4), [1.0] * 4, by_one=True)
    assert spread.vram == [0.75, 0.75, 0.75, 0.5]
