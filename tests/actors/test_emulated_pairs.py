"""`benchmarks/emulated_engine.py`: tables of what was kept, and what a person would set by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def once(step_s: float, **more: Any) -> dict[str, Any]:
    busy = {"cpu:0": 80.0, "gpu:0": 10.0}
    return {"step_s": step_s, "replans": 1, "overrun": 0.004, "busy_pct": busy, **more}


def pair(**more: Any) -> dict[str, Any]:
    return {"model": "small", "machine": "two-cards", "part": 0.5, "emulated": True, **more}


def cells(text: str) -> list[list[str]]:
    rows = [line for line in text.splitlines() if line.startswith("| small")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_best_by_hand_is_what_ours_is_held_against() -> None:
    from emulated_engine import report

    found = {
        "shadowlane": [once(0.010), once(0.008)],
        "static": [once(0.012), once(0.012)],
        "layer-split 12": [once(0.012), once(0.012)],
        "attention-gpu": [once(0.020), once(0.020)],
    }
    ((_, _, part, best, ours, kept, replans, _, over),) = cells(report([pair(found=found)]))
    assert (part, best, ours, kept, replans) == (
        "50 %",
        "layer-split 12",
        "1.35 (1.20-1.50)",
        "1.00",
        "1",
    )
    assert over == "0.4 %"


def test_what_is_recovered_is_a_part_of_what_a_plan_for_the_disturbed_machine_wins() -> None:
    from emulated_engine import report

    calm = [0.010] * 20
    strategies = {
        "shadowlane": calm + [0.020] * 10 + [0.012] * 30 + calm,
        "static": calm + [0.020] * 40 + calm,
        "layer-split 12": calm + [0.018] * 40 + calm,
        "foreseen": [0.020] * 20 + [0.012] * 40,
    }
    found = {name: {"step_s": steps, "replans": 2} for name, steps in strategies.items()}
    row = pair(found=found, disturb="cpu=0.4", steps=[20, 40, 20])
    ((_, _, _, what, loss, recovered, after, over, back, _),) = cells(report([row]))
    assert (what, loss, recovered) == ("cpu=0.4", "67 %", "75 %")
    assert after == "8"  # most of the five steps from there on are as fast as ever
    assert over == "+29 %"
    assert back == "1.00"


def test_nothing_is_recovered_where_nothing_is_lost() -> None:
    from emulated_engine import report

    steps = [0.010] * 80
    names = ("shadowlane", "static", "cpu-moe 3", "foreseen")
    found = {name: {"step_s": steps, "replans": 0} for name in names}
    row = pair(found=found, disturb="gpu=0.4", steps=[20, 40, 20])
    assert cells(report([row]))[0][4:6] == ["0 %", "-"]


def test_prompts_are_held_against_streaming() -> None:
    from emulated_engine import report

    names = {"shadowlane": 0.02, "layer-stream": 0.03, "layer-split": 0.02}
    found = {name: [{"prefill_s": taken, "overrun": 0.0}] for name, taken in names.items()}
    assert cells(report([pair(found=found, prompt=512)]))[0][3:6] == ["512", "1.50", "1.00"]


def test_layouts_by_hand_have_the_number_that_is_best_on_the_machine_as_it_is(
    tiny_model: Callable[..., Path],
) -> None:
    from emulated_pair import Pair, by_hand, sized

    model = tiny_model("qwen3-moe-norm")
    few, many = (
        by_hand(sized(Pair(model, "rtx-3080-laptop-8gb", part, 1)), within=100.0)
        for part in (0.6, 0.95)
    )

    def layers(found: dict[str, float]) -> int:
        return max(int(name.split()[1]) for name in found if name.startswith("layer-split"))

    assert layers(few) < layers(many)
    assert list(few.values()) == sorted(few.values())
    assert any(name.startswith("cpu-moe") for name in many)


def test_a_trace_is_made_up_for_mixtures_only(tiny_model: Callable[..., Path]) -> None:
    from emulated_pair import Pair, sized

    mixture = sized(Pair(tiny_model("mixtral"), "two-rtx-3090", 0.5, 1))
    dense = sized(Pair(tiny_model("llama-biases"), "two-rtx-3090", 0.5, 1))
    assert mixture.trace is not None
    assert dense.trace is None
    assert mixture.settings("cpu-moe 3")["n_cpu_moe"] == 3
    assert dense.settings("static")["replan"] is False
    assert dense.memory.count(",") == 1
