"""Tables and objects from what the engine and the planner say."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from shadowlane import report
from shadowlane.planner.card_planner import first_over_cards
from shadowlane.planner.cost import CostModel
from shadowlane.planner.explain import experts_in_ram, plan_report, weight_nbytes
from shadowlane.planner.explain_cards import card_report
from shadowlane.planner.hardware import Card, Hardware
from shadowlane.planner.placement import LaneSpec, Request
from shadowlane.planner.search import place
from shadowlane.planner.synthetic import llama_catalog, mixture_catalog
from shadowlane.report.plan import _group_part, _parts

from .conftest import FakeEngine


def text_of(renderable: RenderableType, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
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
    parts = _parts(plan["groups"])
    assert sum(row.nbytes["ram"] for row in parts) == plan["tiers"]["ram"]
    assert sum(row.nbytes["disk"] for row in parts) == plan["tiers"]["disk"]
    assert len(parts) <= 8
    for row in parts:
        if row.name.startswith("layer"):
            assert ("streams" in row.why) == (row.nbytes["disk"] > 0)


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


def test_a_plan_names_the_machine_that_its_seconds_are_of() -> None:
    assert "machine" not in text_of(report.plan_report(planned(2.0)))
    emulated = {**planned(2.0), "emulated": True, "hardware": "a laptop"}
    text = text_of(report.plan_report(emulated))
    assert text.startswith("machine    a laptop, emulated")


def test_a_summary_says_where_figures_are_emulated() -> None:
    stats = FakeEngine().stats()
    assert "emulated" not in text_of(report.summary(stats))
    text = text_of(report.summary({**stats, "emulated": True}))
    assert text.count("(emulated)") == 2
    assert "5 tokens, of which emulation says too little" in text
    rows = [report.BenchRow("tg8", (1.0, 2.0))]
    assert "tok/s (emulated)" in report.bench_markdown("m", rows, {**stats, "emulated": True})


def test_what_is_on_cards_is_told_beside_what_is_in_ram() -> None:
    stats = FakeEngine().stats()
    tiers = {"ram": 1 << 20, "vram:0": 3 << 20, "disk": 0}
    plan = {**stats["plan"], "tiers": tiers}
    row = report.BenchRow("tg8", (1.0, 2.0))
    head, _, first = report.bench_markdown("m", [row], {**stats, "plan": plan}).splitlines()
    assert head.startswith("| model | on gpu:0 | in RAM | only on disk |")
    assert first.startswith("| m | 3.00 MiB | 1.00 MiB | 0 B |")


@pytest.mark.parametrize("by_group", [False, True])
def test_the_rows_of_a_plan_over_cards_cover_each_byte_once(by_group: bool) -> None:
    catalog = llama_catalog(layers=6)
    weights = sum(block.held_nbytes for block in catalog.blocks)
    card = Card("a card", 8e9, 0.0, 400e9, 20e12, 12e9, 12e9, 5e-6, 2e-5)
    request = Request(
        ram=1 << 30,
        lanes=(LaneSpec("cpu:0", 1), LaneSpec("gpu:0", 1)),
        context=64,
        machine=Hardware("a machine", (card,), 40e9, 1e12, 2e-6, 50e9, 32e9, 0.0, 3e9),
        cards=(weights // 2,),
        pins={"^0.down": "cpu", "^1": "gpu:0"},
    )
    plan = card_report(catalog, first_over_cards(catalog, request), request, is_emulated=True)
    parts = list(map(_group_part, plan["groups"])) if by_group else None
    parts = parts or _parts(plan["groups"])
    shown = {place: sum(part.nbytes[place] for part in parts) for place in parts[0].nbytes}
    assert sum(shown.values()) == sum(group["nbytes"] for group in plan["groups"])
    assert shown["gpu:0"] == plan["tiers"]["vram:0"]
    text = text_of(report.plan_report(plan, by_group))
    assert "gpu:0" in text.splitlines()[3]
    assert "emulated" in text
    assert "prompt " not in text, "of which emulation says too little"
    if by_group:
        row = next(line for line in text.splitlines() if line.startswith("0.down "))
        assert "computed in RAM, pinned" in row
    else:
        assert any("down on cpu:0" in part.why for part in parts)


MIXTURE = mixture_catalog(layers=3)


@pytest.mark.parametrize(("in_ram", "on_card"), [(0.5, 0.2), (0.8, 0.5), (3.0, 0.5), (3.0, 1.5)])
@pytest.mark.parametrize("is_tied", [False, True])
def test_columns_of_a_plan_over_cards_add_up_to_what_stands_above_them(
    is_tied: bool, in_ram: float, on_card: float
) -> None:
    """Copies among it, which are told apart."""
    catalog = llama_catalog(layers=6, tied=True) if is_tied else MIXTURE
    weights = weight_nbytes(catalog)["held_nbytes"]
    card = Card("a card", 8e9, 0.0, 400e9, 20e12, 12e9, 12e9, 5e-6, 2e-5)
    request = Request(
        ram=round(in_ram * weights) + (8 << 20),
        lanes=(LaneSpec("cpu:0", 1), LaneSpec("gpu:0", 1)),
        context=64,
        machine=Hardware("a machine", (card,), 40e9, 1e12, 2e-6, 50e9, 32e9, 0.0, 3e9),
        cards=(round(on_card * weights),),
    )
    plan = card_report(catalog, first_over_cards(catalog, request), request, is_emulated=True)
    parts = _parts(plan["groups"])
    rows = list(map(_group_part, plan["groups"]))
    shown = {place: sum(part.nbytes[place] for part in parts) for place in parts[0].nbytes}
    assert shown == {place: sum(row.nbytes[place] for row in rows) for place in shown}
    told = plan["bytes"]
    assert shown["ram"] == told["weights"] + told["experts"] == plan["tiers"]["ram"]
    assert shown["gpu:0"] == told["cards"]["gpu:0"]["weights"] + told["cards"]["gpu:0"]["experts"]
    assert shown["disk"] == plan["tiers"]["disk"]
    twice = sum(part.twice for part in parts)
    assert twice == plan["copies_nbytes"]
    assert sum(shown.values()) - twice == sum(group["nbytes"] for group in plan["groups"])
    text = text_of(report.plan_report(plan))
    assert ("copies of what is on cards" in text) == (twice > 0)
    if on_card > 1.0 or (in_ram == 3.0 and not is_tied):  # a tied head may stay in RAM
        assert twice, "or the test shows nothing"


@pytest.mark.parametrize("slots", range(25))
def test_slots_of_experts_are_shared_out_to_the_last(slots: int) -> None:
    experts = MIXTURE.experts
    assert experts is not None
    on_cards = [experts.per_layer, 2, 0]
    in_ram = experts_in_ram(experts, slots, on_cards)
    assert sum(in_ram) == slots
    missing = [experts.per_layer - held for held in on_cards]
    if slots <= sum(missing):
        assert all(have <= need for have, need in zip(in_ram, missing, strict=True))


def test_reasons_stand_below_a_table_that_is_too_wide() -> None:
    wide, narrow = (text_of(report.plan_report(planned(0.6)), width) for width in (200, 70))
    assert "(1)" not in wide
    assert narrow.count("(2)") >= 2
    for text in (wide, narrow):
        assert "stays, part streams each step" in text
        assert all(
            len(line.rstrip()) <= (200 if text is wide else 70) for line in text.splitlines()
        )


def test_cards_that_are_here_are_not_called_emulated() -> None:
    """What was measured of them is; what comes beside their budget is said."""
    catalog = llama_catalog(layers=6)
    card = Card("a card", 8e9, 0.0, 400e9, 20e12, 12e9, 12e9, 5e-6, 2e-5)
    request = Request(
        ram=1 << 30,
        lanes=(LaneSpec("cpu:0", 1), LaneSpec("gpu:0", 1)),
        context=64,
        machine=Hardware("this machine", (card,), 40e9, 1e12, 2e-6, 50e9, 32e9, 0.0, 3e9),
        cards=(1 << 20,),
    )
    placement = first_over_cards(catalog, request)
    plan = card_report(catalog, placement, request, is_emulated=False)
    assert not plan["emulated"]
    assert plan["measured"]
    text = " ".join(text_of(report.plan_report(plan)).split())
    assert "emulated" not in text
    assert "assumed speeds" not in text
    assert "machine this machine strategy" in text
    assert "prompt " in text
    assert "beside it come activations and the driver's context" in text
    there = card_report(catalog, placement, request, is_emulated=True)
    assert "activations" not in text_of(report.plan_report(there))


def test_each_plan_that_made_an_answer_is_told_with_what_it_promised_and_took() -> None:
    plans = [
        {"plan_id": 1, "steps": 1, "predicted_step_s": None, "measured_step_s": 0.005},
        {"plan_id": 3, "steps": 20, "predicted_step_s": 0.004, "measured_step_s": 0.006},
    ]
    text = text_of(report.summary({**FakeEngine().stats(), "plans": plans}))
    assert "plan 1, 1 token: - predicted, 5.0 ms measured" in text
    assert "plan 3, 20 tokens: 4.0 ms predicted, 6.0 ms measured" in text
    assert "plan 3," not in text_of(report.summary({**FakeEngine().stats(), "plans": plans[1:]}))


@pytest.mark.parametrize(("over", "says"), [(5.0, None), (80.0, "--slowed 10 or"), (99.9, "40 or")])
def test_an_emulation_that_is_overrun_says_so(over: float, says: str | None) -> None:
    stats = {**FakeEngine().stats(), "emulated": True, "slowed": 2, "decode_overrun_pct": over}
    text = text_of(report.summary(stats))
    if says is None:
        assert "too slow" not in text
    else:
        assert f"for {over:.0f} % of the time this machine was not through" in text
        assert says in text


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
        "12 of 16 in RAM (2 of them copies of those on cards), 6 on cards with 60.0 % of the "
        "chosen; 100.0 % of the others were in RAM"
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
