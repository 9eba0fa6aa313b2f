"""`shadowlane bench --compare`: strategies in one emulated world, as rows, tables, a picture."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filemaking import write_gguf
from typer.testing import Result

from shadowlane.actors.emulation import JITTER, Hidden, true_machine
from shadowlane.compare import (
    BY_HAND,
    OURS,
    STATIC,
    STRATEGIES,
    Comparison,
    compare,
    rows_of,
    settle_down,
)
from shadowlane.compare_report import compare_markdown
from shadowlane.compare_world import Arena, Job, Setting
from shadowlane.planner.hardware import Card, Hardware
from shadowlane.planner.hybrid import Load, Model
from shadowlane.planner.hybrid_hand import layer_split
from shadowlane.planner.hybrid_layouts import TooLarge
from shadowlane.planner.hybrid_shadow import HybridShadow
from shadowlane.planner.recorded_hits import RecordedHits
from shadowlane.planner.routing import synthesize
from shadowlane.planner.routing_files import write_trace

EXAMPLES = Path(__file__).parents[2] / "examples" / "hardware"
LAPTOP = EXAMPLES / "rtx-3060-laptop-6gb.yaml"
LAYERS, EXPERTS, TOP_K = 8, 16, 2
KEYS = {
    "model",
    "hardware",
    "strategy",
    "phase",
    "context",
    "tok_per_s",
    "predicted_tok_per_s",
    "resource_bound",
    "path_bound",
    "emulated",
    "setting",
    "spread",
}

Command = Callable[..., Result]


def machine(cards: int = 1) -> Hardware:
    card = Card("card", 3e9, 0.5e9, 400e9, 40e12, 12e9, 12e9, launch_s=5e-6, crossing_s=20e-6)
    return Hardware("pc", (card,) * cards, 40e9, 1e12, 2e-6, 48e9, 32e9, 4e9, 5e9)


def model(experts: int = 0) -> Model:
    loads = []
    for layer in range(LAYERS):
        loads += [
            Load(f"{layer}.qkv", "qkv", layer, 5e7, 2e8),
            Load(f"{layer}.attn", "attn", layer, 0.0, 4e4, kv_nbytes_per_token=2e4),
            Load(f"{layer}.o", "o", layer, 3e7, 1.2e8),
        ]
        if experts:
            loads += [
                Load(f"{layer}.router", "router", layer, 1e6, 4e6),
                Load(
                    f"{layer}.experts", "experts", layer, 4e7, 3.2e8, experts=experts, top_k=TOP_K
                ),
            ]
        else:
            loads += [
                Load(f"{layer}.gate_up", "gate_up", layer, 4e8, 1.6e9),
                Load(f"{layer}.down", "down", layer, 2e8, 8e8),
            ]
    loads.append(Load("lm_head", "lm_head", None, 1e8, 4e8))
    return Model("toy mixture" if experts else "toy", tuple(loads), 8192.0, 1e8, 4096)


JOBS = (Job("decode", 512, 4096), Job("prefill", 1024, 4096))


def recorded() -> RecordedHits:
    trace = synthesize(num_tokens=160, num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K)
    return RecordedHits(trace, model(EXPERTS))


@pytest.fixture(scope="module", params=["dense", "mixture", "recorded mixture", "two cards"])
def compared(request: pytest.FixtureRequest) -> Comparison:
    toy = model(EXPERTS if "mixture" in request.param else 0)
    cards = 2 if request.param == "two cards" else 1
    routes = recorded() if request.param == "recorded mixture" else None
    return compare(toy, machine(cards), JOBS, seed=3, recorded=routes)


# -- in the world


def test_no_strategy_beats_its_bound(compared: Comparison) -> None:
    """On the true machine, chance apart: a mean of many steps hardly scatters."""
    for each in compared.rounds:
        assert each.bounds.path <= each.bounds.resource * (1 + 1e-9)
        for reached in each.reached:
            assert reached.timed.tok_per_s <= each.bounds.path * (1 + JITTER), reached.strategy
            assert reached.timed.spread < 0.25


def test_bounds_are_those_of_the_true_machine(compared: Comparison) -> None:
    arena, job = compared.arena, compared.rounds[0].job
    stated = Arena(arena.model, arena.machine, Hidden()).bounds(job)
    assert compared.rounds[0].bounds != stated
    true = true_machine(arena.machine, Hidden.drawn(3))
    assert true.cpu_bytes_per_s != arena.machine.cpu_bytes_per_s


def test_all_that_are_for_this_machine_are_there(compared: Comparison) -> None:
    arena = compared.arena
    for each in compared.rounds:
        missing = set(each.left_out)
        assert missing | {reached.strategy for reached in each.reached} == set(STRATEGIES)
        assert {OURS, STATIC, "cpu", "layer-split", "layer-stream"}.isdisjoint(missing)
        assert ("cpu-moe" in missing) == (arena.model.name == "toy")
        assert ("row-split" in missing) == (len(arena.machine.cards) == 1)


def test_ours_is_what_our_lanes_can_run(compared: Comparison) -> None:
    """No chosen expert comes over a link, and a router is one side's."""
    for each in (reached for round_ in compared.rounds for reached in round_.reached):
        if each.strategy in BY_HAND:
            continue
        for load, site in zip(compared.arena.model.loads, each.setting.plan.sites, strict=True):
            if load.experts:
                assert site.brought_in("decode") == 0.0
            if load.kind == "router":
                assert site.vram in (0.0, 1.0)
                assert site.vram == 0.0 or max(site.over) == 1.0
                assert site.brought_in("decode") == site.brought_in("prefill") == 0.0


def test_the_best_setting_is_the_one_that_measures_fastest() -> None:
    """Not the one that is predicted to be: of all numbers of layers, in this world."""
    hidden = Hidden(gpu=0.2, cpu=1.3)  # a card that is no faster than the cores
    arena = Arena(model(), machine(), hidden)
    job = JOBS[0]
    found = compare(
        model(), machine(), [job], hidden=hidden, strategies=["layer-split", "cpu"]
    ).rounds[0]
    best = found.of("layer-split")
    assert best is not None
    question = arena.stated(job.work(1))
    plans = [layer_split(question, layers) for layers in range(LAYERS + 2)]
    speeds = [arena.time(Setting(plan), job).tok_per_s for plan in plans if plan is not None]
    assert best.timed.tok_per_s >= max(speeds) * 0.995


def test_ours_is_at_least_as_fast_with_its_shadow_as_without(compared: Comparison) -> None:
    for each in compared.rounds:
        ours, static = each.of(OURS), each.of(STATIC)
        assert ours is not None
        assert static is not None
        assert ours.timed.tok_per_s >= static.timed.tok_per_s * 0.98


def test_what_has_been_learned_predicts_better(compared: Comparison) -> None:
    """Of all that were predicted by the file, and of ours after its shadow has measured."""
    for each in compared.rounds:
        errors = {
            reached.strategy: abs(reached.predicted_tok_per_s / reached.timed.tok_per_s - 1)
            for reached in each.reached
        }
        assert errors[OURS] <= max(errors[STATIC], 0.1)


def test_the_same_seed_is_the_same_table() -> None:
    one, other, third = (
        compare(model(), machine(), JOBS[:1], strategies=["layer-split", OURS], seed=seed)
        for seed in (1, 1, 2)
    )
    assert rows_of(one) == rows_of(other)
    assert rows_of(one) != rows_of(third)


def test_a_prompt_is_all_of_its_chunks() -> None:
    job = Job("prefill", 2500, 4096)
    assert job.chunks() == (512, 1024, 2048, 2500)
    for rows in job.chunks():
        works = job.works(rows)
        assert sum(work.rows for work in works) == 2500
        assert max(work.rows for work in works) == rows
        assert [work.context for work in works] == sorted(work.context for work in works)
        assert max(work.context for work in works) <= 2500


def test_a_shadow_is_left_alone_when_it_has_settled() -> None:
    arena = Arena(model(), machine(), Hidden.drawn(3))
    work = JOBS[0].work(1)
    world, shadow = arena.world(), HybridShadow(model(), machine(), work)
    settle_down(world, shadow, work)
    assert shadow.is_settled
    assert shadow.moving is None


def test_too_large_is_told() -> None:
    large = Job("decode", 512, 400_000_000)
    with pytest.raises(TooLarge, match="one of attention-gpu, cpu must fit pc; none does"):
        compare(model(), machine(), [large], strategies=["attention-gpu", "cpu"])


# -- what is printed


def test_rows_say_all_that_rows_of_comparisons_do(compared: Comparison) -> None:
    rows = rows_of(compared)
    assert json.loads(json.dumps(rows)) == rows
    for row in rows:
        assert set(row) >= KEYS
        assert row["emulated"] is True
        assert row["calibrated"] == (row["phase"] == "decode")
    for phase in ("decode", "prefill"):
        hand = [row for row in rows if row["phase"] == phase and row["strategy"] in BY_HAND]
        assert max(row["over_best_by_hand"] for row in hand) == 1.0


def test_prompts_have_ratios_alone(compared: Comparison) -> None:
    text = compare_markdown(compared)
    decode, prefill = text.split("prompt of 1024 tokens")
    assert "emulated tok/s" in decode
    assert "tok/s" not in prefill
    assert "Emulated: nothing was run." in decode
    for name in ("layer-split", STATIC, OURS):
        assert f"| {name} |" in decode
        assert f"| {name} |" in prefill
    lines = [line for line in text.splitlines() if line.startswith("|")]
    for line, below in pairwise(lines):
        if below.startswith("|---"):
            assert line.count("|") == below.count("|")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shadowlane.planner.hybrid_search.MOST_TRIES", 20)
    monkeypatch.setattr("shadowlane.compare_world.STEPS", 4)
    monkeypatch.setattr("shadowlane.compare_world.PROMPT_STEPS", 2)
    monkeypatch.setattr("shadowlane.compare.LEARNING", 10)


@pytest.mark.usefixtures("quick")
def test_a_shape_is_compared_by_its_name_and_drawn(
    shadowlane_command: Command, tmp_path: Path
) -> None:
    plot = tmp_path / "lanes.svg"
    result = shadowlane_command(
        "bench", "qwen2.5-1.5b", "--compare", "all", "--hardware", LAPTOP, "--contexts", "512",
        "--prompts", "512", "--plot", plot,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "decode after 512 tokens, room for 4096, emulated; resource bound" in result.stdout
    assert "prompt of 512 tokens, room for 4096, emulated\n" in result.stdout
    assert re.search(r"^\| shadowlane \|.*\| \d+% \| \d+% \|$", result.stdout, re.MULTILINE)
    drawn = plot.read_text()
    ElementTree.fromstring(drawn)
    assert "decode after 512 tokens, emulated" in drawn
    assert "shadowlane: " in drawn
    assert ">gpu:0<" in drawn


@pytest.mark.usefixtures("quick")
def test_names_and_budgets_are_kept_to(shadowlane_command: Command) -> None:
    result = shadowlane_command(
        "bench", "qwen2.5-1.5b", "--compare", "static, layer-split, KV in RAM,cpu", "--hardware",
        LAPTOP, "--contexts", "100", "--prompts", "0", "--gpu-memory", "1", "--seed", "4",
        "--ctx-size", "1024", "--output", "json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["strategy"] for row in rows] == ["cpu", "layer-split, KV in RAM", STATIC]
    assert {(row["context"], row["room"], row["seed"]) for row in rows} == {(100, 1024, 4)}


@pytest.mark.usefixtures("quick")
def test_a_model_that_is_here_is_compared_by_its_headers(
    shadowlane_command: Command, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    result = shadowlane_command(
        "bench", path, "--compare", "cpu,static", "--hardware", LAPTOP, "--prompts", "64",
        "--contexts", "0", "--output", "json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert {row["room"] for row in json.loads(result.stdout)} == {128}


@pytest.mark.usefixtures("quick")
def test_recorded_routing_is_met(shadowlane_command: Command, tmp_path: Path) -> None:
    """Experts that are always chosen are worth a card; those that change are not."""
    path = tmp_path / "routes.jsonl"
    trace = synthesize(num_tokens=120, num_layers=48, num_experts=128, top_k=8)
    trace.choices[:] = np.arange(8)
    write_trace(path, trace)

    def rows(*more: Any) -> list[dict[str, Any]]:
        result = shadowlane_command(
            "bench", "qwen3-30b-a3b", "--compare", "static", "--hardware", LAPTOP, "--contexts",
            "512", "--prompts", "0", "--output", "json", *more,
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        found: list[dict[str, Any]] = json.loads(result.stdout)
        return found

    assert rows("--routing", path)[0]["tok_per_s"] > rows()[0]["tok_per_s"] * 1.2


# -- what is wrong


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--compare", "fast"), "--compare must be all, or some of these with commas between: cpu"),
        (("--compare", "fast"), "got 'fast'"),
        (("--compare", "KV in RAM"), "got 'KV in RAM'"),
        (("--compare", ""), "got ''"),
        (("--compare", "cpu-moe"), "cpu-moe needs a mixture of experts; llama-2-7b is none"),
        (("--compare", "row-split"), "row-split needs several cards; RTX 3060"),
        (
            ("--compare", "static, layer-split, pipelined"),
            "pipelined needs several cards; RTX 3060",
        ),
        (("--compare", "cpu-moe", "--gpu-memory", "0"), "must name what there is"),
        (("--compare", "layer-split", "--gpu-memory", "0"), "layer-split needs a card"),
        (("--compare", "all", "-pp", "512"), "--pp must be left out with --compare"),
        (("--compare", "all", "-r", "2"), "--repetitions must be left out with --compare"),
        (("--compare", "all", "--no-prefetch"), "--no-prefetch must be left out"),
        (("--compare", "all", "--contexts", "4000"), "--contexts must fit the model's context"),
        (("--compare", "all", "--contexts", "x"), "--contexts must be numbers of tokens"),
        (("--compare", "all", "--prompts", "0,4"), "--prompts must be numbers of tokens"),
        (("--compare", "all", "--prompts", "-4"), "got '-4'"),
        (
            ("--compare", "all", "--prompts", "600", "--ctx-size", "512"),
            "--prompts must fit --ctx-size 512; got 600",
        ),
        (("--compare", "all", "--ctx-size", "5000"), "--ctx-size must be at most the model's 4096"),
        (("--compare", "all", "--contexts", "0", "--prompts", "0"), "one of --contexts and"),
        (("--compare", "all", "--plot", "lanes.png"), "--plot must end in .svg; got lanes.png"),
        (("--compare", "all", "--plot", "/no/lanes.svg"), "--plot must be a file in a directory"),
        (("--compare", "all", "--routing", "r.txt"), "--routing must end in .jsonl"),
        (("--compare", "all", "--routing", "r.csv"), "No such file or directory: r.csv"),
        (("--compare", "all", "--ram", "64GiB"), "--ram must be at most the 32.0 GiB"),
        (("--compare", "all", "--seed", "-1"), "--seed must be at least 0; got -1"),
        (("--compare", "all", "--output", "csv"), "--output must be one of md, json; got 'csv'"),
        ((), "MODEL must be one that is here to run; llama-2-7b is known by its shape alone"),
        (("--compare", "all", "--pin", "down=cpu"), "--pin must be left out with --compare"),
        (("--compare", "all", "--gpu-layers", "3"), "--gpu-layers must be left out with --comp"),
        (("--compare", "--hardware"), "--compare must be all, or names of layouts"),
        (("--contexts", "512"), "--contexts must stand with --compare all, say"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    fails: Callable[..., str], arguments: tuple[str, ...], says: str
) -> None:
    assert says in fails("bench", "llama-2-7b", "--hardware", LAPTOP, *arguments)


@pytest.mark.parametrize("command", [("run", "-p", "x"), ("chat",), ("bench",), ("plan",)])
def test_a_shape_is_not_called_unknown_without_a_machine(
    fails: Callable[..., str], command: tuple[str, ...]
) -> None:
    name, *arguments = command
    assert "llama-2-7b is known by its shape alone" in fails(name, "llama-2-7b", *arguments)


def test_comparing_needs_a_machine(fails: Callable[..., str]) -> None:
    assert "--compare needs --hardware, the machine to compare on" in fails(
        "bench", "llama-2-7b", "--compare", "all"
    )
    for option, value in (("--plot", "l.svg"), ("--seed", "1"), ("--contexts", "9")):
        assert f"{option} must stand with --compare all, say" in fails(
            "bench", "llama-2-7b", option, value
        )


def test_names_of_models_that_would_do_are_told(fails: Callable[..., str]) -> None:
    said = fails("bench", "llama-9", "--compare", "all", "--hardware", LAPTOP)
    assert "with --hardware also: llama-2-7b, " in said


def test_a_recording_of_another_model_is_refused(fails: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "routes.jsonl"
    write_trace(path, synthesize(num_tokens=20, num_layers=2, num_experts=8, top_k=2))
    said = fails(
        "bench", "qwen3-30b-a3b", "--compare", "all", "--hardware", LAPTOP, "--routing", path
    )
    assert "--routing must be of 48 layers of 128 experts, as qwen3-30b-a3b has" in said
