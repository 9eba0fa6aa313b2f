"""Tables and objects from what the engine and the planner say."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from shadowlane import report
from shadowlane.planner.cost import CostModel
from shadowlane.planner.explain import plan_report
from shadowlane.planner.placement import LaneSpec, Request
from shadowlane.planner.search import place
from shadowlane.planner.synthetic import llama_catalog

from .conftest import FakeEngine


def text_of(renderable: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def planned(part: float, expanded: int = 0, **request: Any) -> dict[str, Any]:
    catalog, cost = llama_catalog(layers=6, tied=False, expanded=expanded), CostModel(None)
    ram = int(part * sum(block.held_nbytes for block in catalog.blocks))
    return plan_report(catalog, place(catalog, Request(ram=ram, context=64, **request), cost), cost)


def test_a_plan_where_everything_fits_is_three_rows() -> None:
    text = text_of(report.plan_report(planned(2.0)))
    assert "all resident: everything fits the budget" in text
    assert "ring of" not in text
    assert [line.split()[0] for line in text.splitlines()[-3:]] == ["embed", "layers", "lm_head"]
    assert text.count("stays in RAM") == 3


@pytest.mark.parametrize("part", [0.4, 0.6, 0.9, 2.0])
def test_the_rows_of_a_plan_cover_each_byte_once(part: float) -> None:
    plan = planned(part)
    parts = report._parts(plan["groups"])
    assert sum(row.ram_nbytes for row in parts) == plan["tiers"]["ram"]
    assert sum(row.disk_nbytes for row in parts) == plan["tiers"]["disk"]
    assert len(parts) <= 8
    for row in parts:
        if row.name.startswith("layer"):
            assert ("streams" in row.why) == (row.disk_nbytes > 0)


def test_expanded_copies_are_shown_with_their_bytes_and_their_use() -> None:
    plan = planned(6.0, expanded=2, expand="always")
    text = text_of(report.plan_report(plan))
    assert f"expanded copies {report.size(plan['bytes']['expanded'])}, " in text
    assert "copies of packed weights in the compute type, which only prompts read" in text
    assert "copies" not in text_of(report.plan_report(planned(6.0, expanded=2)))


def test_split_rows_are_shown_per_group() -> None:
    lanes = (LaneSpec("cpu:0", 1), LaneSpec("cpu:1", 1))
    text = text_of(report.plan_report(planned(2.0, lanes=lanes), by_group=True))
    row = next(line for line in text.splitlines() if line.startswith("3.down "))
    assert "cpu:0 0-16, cpu:1 16-32" in row


def test_a_summary_says_where_figures_are_emulated() -> None:
    stats = FakeEngine().stats()
    assert "emulated" not in text_of(report.summary(stats))
    assert text_of(report.summary({**stats, "emulated": True})).count("(emulated)") == 3
    rows = [report.BenchRow("tg8", (1.0, 2.0))]
    assert "tok/s (emulated)" in report.bench_markdown("m", rows, {**stats, "emulated": True})


def test_a_missing_figure_is_a_dash() -> None:
    stats = {**FakeEngine().stats(), "decode_tok_per_s": None, "predicted_step_s": None}
    text = text_of(report.summary(stats))
    assert "4 tokens, - (stop)" in text
    assert "- predicted, 50.0 ms measured" in text


def test_hits_are_told_apart_from_what_was_read_ahead() -> None:
    look = {"is_on": True, "recall": 0.9, "early_reads": 50, "used": 0.8, "withdrawn": 3}
    experts = {
        "slots": 4, "of": 16, "on_cards": 0, "card_rate": 0.0, "hit_rate": 0.5,
        "early_hit_rate": 0.25, "look_ahead": look,
        "expected_hit_rate": 0.4, "expected_from": "remembered",
        "read_nbytes_per_token": 1 << 20, "policy": "mixture/global",
        "kept": "the most used lately and for long, over all layers", "policy_switches": 1,
    }  # fmt: skip
    stats = {**FakeEngine().stats(), "experts": experts, "predicted_at_hits_step_s": 0.048}
    text = text_of(report.summary(stats))
    assert "46.0 ms predicted (48.0 ms for the hits below), 50.0 ms measured" in text
    assert (
        "4 of 16 in RAM; 50.0 % of the chosen were there (40 % expected, from what earlier runs "
        "chose), 25.0 % more were read ahead in time"
    ) in text
    kept = "the most used lately and for long, over all layers (mixture/global), changed 1 time"
    assert kept in text
    cards = {**experts, "slots": 12, "on_cards": 6, "card_rate": 0.6, "hit_rate": 1.0}
    text = text_of(report.summary({**stats, "experts": cards}))
    assert (
        "10 of 16 in RAM, 6 on cards with 60.0 % of the chosen; 100.0 % of the others were in RAM"
    ) in text
    none = {**experts, "early_hit_rate": 0.0}
    assert "read ahead" not in text_of(report.summary({**FakeEngine().stats(), "experts": none}))


def test_a_bottleneck_that_is_no_lane_is_still_named() -> None:
    text = text_of(report.summary({**FakeEngine().stats(), "bottleneck": "critical path"}))
    assert "bottleneck: critical path" in text


def test_one_repetition_has_no_deviation() -> None:
    row = report.BenchRow("tg8", (3.0,))
    assert (row.mean, row.deviation) == (3.0, 0.0)


def test_a_profile_is_one_row_per_figure() -> None:
    profile = {"disk": [{"read_bytes_per_s": 2e9, "nbytes": 1 << 20}], "step_s": 0.5, "gpu": None}
    lines = text_of(report.tree(profile)).splitlines()
    shown = [" ".join(line.split()) for line in lines]
    for row in ("disk.0.read_bytes_per_s 2.00 GB/s", "disk.0.nbytes 1.00 MiB", "step_s 500.0 ms",
                "gpu unmeasured"):  # fmt: skip
        assert row in shown
