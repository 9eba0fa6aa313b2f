"""`shadowlane simulate`: a table, an object, and one line for what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import Result

from shadowlane.planner.routing import synthesize
from shadowlane.planner.routing_files import read_trace, write_trace


@pytest.fixture
def routing(tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl.gz"
    write_trace(path, synthesize(num_tokens=40, num_layers=4, num_experts=16, top_k=2))
    return path


def test_it_ranks_the_policies(shadowlane_command: Callable[..., Result], routing: Path) -> None:
    result = shadowlane_command("simulate", "--routing", routing, "--slots", 16)
    assert result.exit_code == 0, result.output
    for name in ("mixture/global", "lru/layer", "chosen on line", "on demand", "optimum"):
        assert name in result.stdout
    assert "16 of 64 experts in RAM" in " ".join(result.stdout.split())
    assert "(disk assumed, DRAM assumed)" in " ".join(result.stdout.split())
    assert result.stdout.startswith("synthetic routing: 4 layers of 16 experts")


def test_what_is_not_counted_and_what_is_too_little_is_said(
    shadowlane_command: Callable[..., Result], routing: Path, tmp_path: Path
) -> None:
    result = shadowlane_command("simulate", "--routing", routing, "--ram", "64MiB")
    counted, thin = [each for each in result.stderr.splitlines() if each.startswith("note: ")]
    assert "does not say what KV cache and scratch take" in counted
    assert "20 tokens are scored and 20 chose what is hot" in thin
    long = tmp_path / "long.jsonl"
    write_trace(long, synthesize(num_tokens=128, num_layers=2, num_experts=8, top_k=2))
    assert "note: " not in shadowlane_command("simulate", "--routing", long, "--slots", 8).stderr


def test_a_trace_is_called_by_its_title(
    shadowlane_command: Callable[..., Result], routing: Path
) -> None:
    trace = read_trace(routing)
    for name, title, label in (
        ("f0" * 32, "tiny", "tiny: "),
        ("f0" * 32, "", "unnamed model f0f0f0f0: "),
        ("qwen.gguf", "", "qwen.gguf: "),
    ):
        write_trace(routing, replace(trace, model=replace(trace.model, name=name, title=title)))
        result = shadowlane_command("simulate", "--routing", routing, "--slots", 16)
        assert result.stdout.startswith(label)


def test_it_prints_one_object(shadowlane_command: Callable[..., Result], routing: Path) -> None:
    arguments = ("simulate", "--routing", routing, "--ram", "64MiB", "--json")
    said = json.loads(shadowlane_command(*arguments).stdout)
    # 48 MiB are dense; slots hold 3 MiB
    assert (said["slots"], said["dense_nbytes"]) == (5, 48 << 20)
    assert said["routing"] == str(routing)
    assert said["policies"][0]["tok_per_s"] <= said["bound_tok_per_s"]
    more = json.loads(shadowlane_command(*arguments, "--dense", "34MiB").stdout)
    assert (more["slots"], more["dense_nbytes"]) == (10, 34 << 20)
    faster = json.loads(shadowlane_command(*arguments, "--disk-speed", "3GB").stdout)
    assert faster["on_demand"]["tok_per_s"] > 2 * said["on_demand"]["tok_per_s"]
    ahead = json.loads(shadowlane_command(*arguments, "--look-ahead", "0.5").stdout)
    assert ahead["policies"][0]["wasted_nbytes_per_token"] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "one of --ram and --slots must be given; got neither"),
        (("--ram", "1", "--slots", "16"), "only one of --ram and --slots may be given; got both"),
        (("--slots", "65"), "--slots must be between 2, one route, and 64, all experts; got 65"),
        (("--slots", "1"), "--slots must be between 2"),
        (("--ram", "1", "--ctx-size", "64"), "--ctx-size needs MODEL and --ram"),
        (("--ram", "1", "--cpu-workers", "2"), "--cpu-workers needs MODEL and --ram"),
        (("--ram", "1MiB"), "--ram must be at least"),
        (("--ram", "lots"), "--ram must be a size"),
        (("--slots", "9", "--look-ahead", "2"), "--look-ahead must be between 0 and 1; got 2"),
        (("--slots", "9", "--disk-speed", "0"), "--disk-speed must be at least one byte"),
    ],
)
def test_what_is_wrong_is_one_line(
    fails: Callable[..., str], routing: Path, arguments: tuple[str, ...], says: str
) -> None:
    assert says in fails("simulate", "--routing", routing, *arguments)


def test_files_that_are_no_routing_are_refused(
    fails: Callable[..., str], routing: Path, tmp_path: Path
) -> None:
    missing = tmp_path / "none.jsonl"
    assert f"No such file or directory: {missing}" in fails(
        "simulate", "--routing", missing, "--slots", 9
    )
    other = tmp_path / "routes.txt"
    routing.rename(other)
    assert f"--routing must end in .jsonl, .jsonl.gz, .csv or .csv.gz; got {other}" in fails(
        "simulate", "--routing", other, "--slots", 9
    )
    other.rename(routing)
    routing.write_bytes(routing.read_bytes()[:-20])
    assert "is cut off" in fails("simulate", "--routing", routing, "--slots", 9)
