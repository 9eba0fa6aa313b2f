"""`benchmarks/to_win.py`: what it reads off a routing, and its tables."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shadowlane.planner.routing import Trace, synthesize

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def trace_of(choices: np.ndarray) -> Trace:
    """choices: [tokens, 2 layers, 2] of 10 experts."""
    trace = synthesize(num_tokens=len(choices), num_layers=2, num_experts=10, top_k=2)
    return replace(trace, choices=choices.astype(np.int16))


def test_a_hot_half_is_scored_by_the_other() -> None:
    from to_win import following, hot_half

    always = trace_of(np.full((256, 2, 2), (3, 7)))
    assert hot_half(always, 0.2) == 1.0
    assert hot_half(always, 0.1) == 0.5
    assert following(always, 0.2) == (1.0, 0.0)  # it has formed before anything is counted
    halves = np.concatenate([np.full((128, 2, 2), (3, 7)), np.full((128, 2, 2), (4, 8))])
    changing = trace_of(halves)
    assert hot_half(changing, 0.2) == 0.0
    rate, moved = following(changing, 0.2)
    assert 0.5 < rate < 1.0
    assert moved * 192 == pytest.approx(2)  # two experts of each layer, once


def test_rates_between_points_lie_on_a_line() -> None:
    from to_win import curve

    rate = curve([(0.0, 0.0), (0.5, 0.8), (1.0, 1.0)])
    assert [rate(part) for part in (0.0, 0.25, 0.5, 0.75, 1.0)] == pytest.approx(
        [0.0, 0.4, 0.8, 0.9, 1.0]
    )


def test_earlier_runs_become_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import to_win

    nothing = dict.fromkeys(to_win.MECHANISMS, 0.0)
    outcome = {"gain": 0.0, "first_loses": 0.004}
    row = {
        "model": "m",
        "machine": "pc",
        "by_hand": "layer-split 3",
        "gain": 0.123,
        "alone": nothing | {"split": 0.05},
        "without": nothing | {"split": -0.02, "bring": 0.009},
        "scenarios": {scenario.name: outcome for scenario in to_win.SCENARIOS}
        | {"link: 60 % taken": {"gain": 0.002, "first_loses": 0.75}},
    }
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row, {"model": "m", "machine": "toy", "too_large": "too large"}]))
    monkeypatch.setattr(sys, "argv", ["to_win.py", "--read", str(path)])
    to_win.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| m | pc | layer-split 3 | 12 | . | . | . | . | 5 / -2 | . | . | . |"
    assert lines[6] == "| m | pc | . | . | . / 75 | . | . | . | . | . |"
    assert lines[-1] == "m on toy: too large"


def test_contexts_are_as_long_as_scenarios_ask_and_models_allow() -> None:
    from to_win import model_named

    assert model_named("llama-3.1-8b").max_context == 16384
    assert model_named("llama-2-7b").max_context == 4096


def test_a_machine_can_be_taken_to_be_otherwise() -> None:
    from to_win import otherwise

    from shadowlane.shapes import load_hardware

    machine = load_hardware(BENCHMARKS.parent / "examples" / "hardware" / "two-rtx-3090.yaml")
    assert otherwise(machine, None, 1.0) == machine
    slow = otherwise(machine, 130.0, 0.5)
    assert [card.crossing_s for card in slow.cards] == pytest.approx([130e-6] * 2)
    assert slow.cpu_bytes_per_s == machine.cpu_bytes_per_s / 2
    assert slow.dram_bytes_per_s == machine.dram_bytes_per_s


def test_more_mechanisms_never_give_a_slower_plan() -> None:
    """Orders of filling that come to the same must not crowd out a start that is another."""
    from to_win import curve

    from shadowlane.planner.hybrid_changes import MECHANISMS
    from shadowlane.planner.hybrid_hand import by_hand
    from shadowlane.planner.hybrid_layouts import Question
    from shadowlane.planner.hybrid_search import search
    from shadowlane.shapes import load_hardware, shape_model

    machine = load_hardware(BENCHMARKS.parent / "examples" / "hardware" / "rtx-4090-24gb.yaml")
    model = shape_model("gpt-oss-120b")
    recorded = [(0.0, 0.0), (0.02, 0.185), (0.05, 0.3), (0.1, 0.471), (0.2, 0.665), (0.3, 0.788)]
    hits = curve([*recorded, (0.4, 0.874), (0.5, 0.919), (0.7, 0.957), (1.0, 1.0)])
    question = Question(model, machine, hit_rate=hits)
    hand = by_hand(question)
    best_s = search(question, rivals=hand).times.step_s
    for name in MECHANISMS:
        others = [each for each in MECHANISMS if each != name]
        assert best_s <= search(question, rivals=hand, using=others).times.step_s, name
