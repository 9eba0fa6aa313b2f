"""`benchmarks/emulated_table.py`: figures and tables of rows that were kept, and one small pair."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _benchmarks_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def kept(**more: Any) -> dict[str, Any]:
    """One pair: of decode after 512 tokens and of a prompt of 2048, speeds by strategy."""
    speeds = {"layer-split": 10.0, "layer-stream": 8.0, "cpu-moe": 5.0, "static": 9.0}
    rows = [
        {
            "strategy": name,
            "setting": "12",
            "phase": phase,
            "context": context,
            "tok_per_s": speed,
            "predicted_tok_per_s": speed,
            "path_bound": 20.0,
            "balance": 1.9 if phase == "prefill" else None,
        }
        for phase, context in (("decode", 512), ("prefill", 2048))
        for name, speed in {**speeds, "shadowlane": 9.6}.items()
    ]
    return {
        "model": "llama-2-7b",
        "machine": "two-rtx-3090",
        "seed": 4,
        "is_mixture": False,
        "recorded": False,
        "too_large": [],
        "rows": rows,
    } | more


def test_tables_of_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import emulated_table

    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(kept()) + "\n")
    monkeypatch.setattr(sys, "argv", ["emulated_table.py", "--read", str(path)])
    emulated_table.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == (
        "| llama-2-7b | two-rtx-3090 | 4 | layer-split 12 | 0.90 | 0.96 |  | 48% | - | - | - |"
    )
    assert lines[6] == "| llama-2-7b | two-rtx-3090 |  | 1.20~ 48% |  |  |"
    assert any(line.startswith("- decode, over the best by hand: 0 of 1") for line in lines)
    assert "  - 0.96: llama-2-7b on two-rtx-3090, decode 512" in lines
    assert any("prefill, over layer-stream: 1 of 1 are at least 0.995" in line for line in lines)
    assert any("streaming near computing: 0 of 1 are at least 1.3" in line for line in lines)
    assert not any("recorded routing" in line for line in lines)


def test_mixtures_are_held_against_what_is_tuned_for_them() -> None:
    from emulated_table import marks

    mixture = kept(is_mixture=True, recorded=True, machine="rtx-3080-laptop-8gb")
    first = marks([mixture])[0]
    assert first.startswith("- mixtures, recorded routing, 8 GB laptop")
    assert "0 of 1 are at least 1.3; median 0.96" in first


def test_worlds_are_those_of_the_machine_not_of_the_path_to_its_file() -> None:
    from emulated_table import FILES, world_of

    worlds = [world_of("mixtral-8x7b", Path("examples", "hardware", each.name)) for each in FILES]
    assert worlds == [world_of("mixtral-8x7b", each) for each in FILES]
    assert len(set(worlds)) == len(FILES)


def test_a_pair_is_a_world_of_its_own_and_goes_on_from_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import emulated_table

    monkeypatch.setattr("shadowlane.planner.hybrid_search.MOST_TRIES", 20)
    monkeypatch.setattr(emulated_table, "CONTEXTS", (512, 1000))
    monkeypatch.setattr(emulated_table, "PROMPTS", (512,))
    path = tmp_path / "rows.jsonl"
    laptop = ROOT / "examples" / "hardware" / "rtx-3060-laptop-6gb.yaml"
    arguments = ["emulated_table.py", "--models", "qwen2.5-1.5b", "--machines", str(laptop)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--keep", str(path)])
    emulated_table.main()
    first = capsys.readouterr().out
    assert "| qwen2.5-1.5b | rtx-3060-laptop-6gb |" in first
    (row,) = map(json.loads, path.read_text().splitlines())
    assert {each["context"] for each in row["rows"]} == {512, 1000}
    for each in row["rows"]:
        assert each["emulated"] is True
        assert (each["balance"] is None) == (each["phase"] == "decode" or each["strategy"] == "cpu")

    def never(*_: Any) -> None:
        raise AssertionError("it is there already")

    monkeypatch.setattr(emulated_table, "pair", never)
    emulated_table.main()
    assert capsys.readouterr().out == first
