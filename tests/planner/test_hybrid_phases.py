"""One placement for prompts and answers: where things live once, what is brought by phase."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shadowlane.planner.hardware import Card, Hardware
from shadowlane.planner.hybrid import STAGE_NBYTES, Load, Model, Plan, Prompts, Site, Work, demand
from shadowlane.planner.hybrid_hand import by_hand, layer_stream
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.hybrid_search import search
from shadowlane.planner.hybrid_shadow import HybridShadow, MemoryTaken

CARD = Card("card", 4e9, 1e9, 400e9, 40e12, 12e9, 12e9, launch_s=5e-6, crossing_s=20e-6)
MACHINE = Hardware("machine", (CARD,), 40e9, 1e12, 2e-6, 60e9, 64e9, 4e9, 5e9)
MODEL = Model(
    "model",
    tuple(
        Load(f"{layer}.{kind}", kind, layer, nbytes, 4 * nbytes, kv)
        for layer in range(10)
        for kind, nbytes, kv in (("qkv", 1e8, 0.0), ("attn", 0.0, 1e4), ("gate_up", 4e8, 0.0))
    ),
    10_000.0,
    1e8,
    65536,
)
PROMPT = Work("prefill", rows=512, context=256)
BOTH = Question(MODEL, MACHINE, prompts=Prompts(PROMPT, per_step=1 / 100))
DECODE_ONLY = replace(BOTH, prompts=None)


def everywhere(site: Site) -> Plan:
    none = replace(site, brought=0.0, brought_prefill=0.0)
    return Plan("", tuple(none if load.kind == "attn" else site for load in MODEL.loads))


def test_each_phase_brings_its_own_part() -> None:
    plan = everywhere(Site(0.0, 1.0, 0.25, brought_prefill=1.0))
    nbytes = MODEL.nbytes
    assert BOTH.times(plan).busy_s["h2d:0"] == pytest.approx(nbytes * 0.25 / 12e9)
    assert BOTH.times(plan, work=PROMPT).busy_s["h2d:0"] == pytest.approx(nbytes / 12e9)


def test_a_plan_is_as_good_as_a_step_and_its_share_of_prefill() -> None:
    answer = BOTH.answer(everywhere(Site(0.0, 1.0, 0.25, brought_prefill=1.0)))
    assert answer.prompt_times is not None
    assert answer.seconds == pytest.approx(answer.times.step_s + answer.prompt_times.step_s / 100)
    for part in (0.3, 0.9, 0.999):
        assert BOTH.answer(answer.plan, answer.seconds * part).seconds >= answer.seconds * part


def test_the_stage_is_counted_once_for_whatever_phase_needs_it() -> None:
    held = 0.2 * MODEL.nbytes
    for brought, brought_prefill, stages in ((0, 0, 0), (0.5, 0, 1), (0, 1.0, 1), (0.5, 1.0, 1)):
        plan = everywhere(Site(0.2, 0.8, brought, brought_prefill=brought_prefill))
        room = demand(MODEL, plan, Work(max_context=0), MACHINE).vram[0]
        assert room == pytest.approx(held + stages * STAGE_NBYTES)


def test_one_placement_is_nearly_as_good_as_one_for_each_phase() -> None:
    both = search(BOTH)
    assert both.prompt_times is not None
    decode = search(DECODE_ONLY).times.step_s
    prefill = search(replace(DECODE_ONLY, work=PROMPT)).times.step_s
    assert both.times.step_s <= decode * 1.1  # the stage takes a part of the card
    assert both.prompt_times.step_s <= prefill * 1.2  # rare, so it gives way
    assert BOTH.fits(both.plan)
    # The answer's plan without prompts leaves all of them to the cores.
    alone = BOTH.answer(search(DECODE_ONLY).plan)
    assert alone.seconds > both.seconds


def test_layouts_by_hand_have_one_placement_too() -> None:
    for answer in by_hand(BOTH).values():
        assert answer.prompt_times is not None
        assert answer.times == BOTH.times(answer.plan)
        assert answer.prompt_times == BOTH.times(answer.plan, work=PROMPT)
    split = by_hand(BOTH)["layer-split"].plan
    assert split.name.endswith(", streamed")
    assert not any(site.brought for site in split.sites)
    assert any(site.brought_prefill for site in split.sites)
    stream = layer_stream(BOTH, 3)
    assert stream is not None
    assert all(site.brought == site.brought_prefill for site in stream.sites)
    assert search(BOTH).seconds <= min(answer.seconds for answer in by_hand(BOTH).values())


def test_rare_prompts_leave_the_answers_their_plan() -> None:
    never = replace(BOTH, prompts=Prompts(PROMPT, per_step=1e-9))
    assert search(never).times.step_s == pytest.approx(search(DECODE_ONLY).times.step_s, rel=0.01)


def test_a_plan_that_is_changed_while_running_still_serves_prompts() -> None:
    shadow = HybridShadow(MODEL, MACHINE, Work(), prompts=BOTH.prompts)
    assert shadow.plan == search(BOTH).plan
    shadow.handle(MemoryTaken(1.5e9))
    assert shadow.question.prompts == BOTH.prompts
    assert any(site.brought_prefill > 0.5 for site in shadow.plan.sites)


def test_keys_and_values_make_room_for_what_prompts_bring() -> None:
    """Those of all layers fill the card: with some fewer there, all weights can come to it."""
    loads: list[Load] = []
    for layer in range(20):
        loads.append(Load(f"{layer}.qkv", "qkv", layer, 4e8, 1.6e9))
        loads.append(
            Load(f"{layer}.attn", "attn", layer, 0.0, 32768.0, kv_nbytes_per_token=16384.0)
        )
    card = replace(CARD, vram_nbytes=1e9 + 20 * 16384.0 * 16384)
    work = Work("prefill", rows=2048, context=8192, max_context=16384)
    model = replace(MODEL, loads=tuple(loads))
    question = Question(model, replace(MACHINE, cards=(card,)), work)
    plan = search(question).plan
    on_card = [site.vram for load, site in zip(loads, plan.sites, strict=True) if not load.nbytes]
    assert 0.8 <= sum(on_card) / 20 < 1.0
    assert question.fits(plan)
