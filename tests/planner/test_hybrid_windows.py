"""Layers that look back a limited way: what they keep, read and move."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shadowlane.planner.hardware import Card, Hardware
from shadowlane.planner.hybrid import Load, Model, Plan, Site, Work, demand, model_of
from shadowlane.planner.hybrid_bounds import hybrid_bounds
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.hybrid_moves import moves
from shadowlane.planner.synthetic import llama_catalog

CARD = Card("card", 8e9, 1e9, 400e9, 40e12, 20e9, 20e9, launch_s=0.0, crossing_s=0.0)
MACHINE = Hardware("machine", (CARD,), 40e9, 1e12, 0.0, 60e9, 64e9, 4e9, 5e9)
FULL = Load("0.attn", "attn", 0, 0.0, 1000.0, kv_nbytes_per_token=1e5)
SHORT = replace(FULL, name="1.attn", layer=1, window=100)
MODEL = Model("model", (FULL, SHORT), 0.0, 0.0, 65536)
IN_RAM, ON_CARD = (Plan("", (site, site)) for site in (Site(0.0, 1.0), Site(1.0, 0.0)))


def test_a_window_bounds_what_is_kept_and_read() -> None:
    work = Work(context=1000, max_context=4000)
    assert demand(MODEL, IN_RAM, work, MACHINE).ram == 1e5 * (4000 + 100)
    assert demand(MODEL, ON_CARD, work, MACHINE).vram == (1e5 * (4000 + 100),)
    question = Question(MODEL, MACHINE, work)
    assert question.times(IN_RAM).step_s == pytest.approx(1e5 * (1000 + 100) / 40e9)
    assert moves(question, IN_RAM, ON_CARD).h2d_nbytes == (1e5 * (1000 + 100),)
    assert hybrid_bounds(question).path_s <= question.times(ON_CARD).step_s


def test_a_short_context_is_shorter_than_the_window() -> None:
    work = Work(context=50, max_context=80)
    assert demand(MODEL, IN_RAM, work, MACHINE).ram == 1e5 * (80 + 80)
    assert Question(MODEL, MACHINE, work).times(IN_RAM).step_s == pytest.approx(1e5 * 100 / 40e9)


def test_of_a_prompt_each_row_attends_its_window() -> None:
    work = Work("prefill", rows=512, context=2000)
    slow = replace(MACHINE, cpu_flops=1e11)
    step_s = Question(MODEL, slow, work).times(IN_RAM).step_s
    assert step_s == pytest.approx(512 * 1000.0 * (2000 + 100) / 1e11)


def test_windows_are_told_by_layer() -> None:
    model = model_of(llama_catalog(layers=3), "model", (None, 64, None))
    attns = [load for load in model.loads if load.kind == "attn"]
    assert [load.window for load in attns] == [None, 64, None]
    assert all(load.window is None for load in model.loads if load.kind != "attn")


def test_shapes_know_their_windows() -> None:
    from shadowlane.shapes import shape_model

    def windows(name: str) -> list[int | None]:
        return [load.window for load in shape_model(name).loads if load.kind == "attn"]

    assert windows("gpt-oss-20b") == [128, None] * 12
    assert windows("mistral-7b-v0.1") == [4096] * 32
    assert windows("llama-2-7b") == [None] * 32
