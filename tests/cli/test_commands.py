"""What each command prints where, with a fake engine behind it."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from shadowlane import report
from shadowlane.cli.ps import engine_processes
from shadowlane.report import RUN_KEYS
from shadowlane.sizes import format_size

from .conftest import PLAN, FakeEngine, a_real_plan

Command = Callable[..., Result]
LAPTOP = Path(__file__).parents[2] / "examples" / "hardware" / "rtx-3060-laptop-6gb.yaml"


def test_run_prints_text_on_stdout_and_the_rest_on_stderr(
    shadowlane_command: Command, engine: FakeEngine, model_dir: Path
) -> None:
    engine.notes = ("the context shrinks to 512 tokens: the budget holds no more",)
    result = shadowlane_command("run", model_dir, "-p", "Why?", "--ram", "64MiB")
    assert result.exit_code == 0, result.output
    assert result.stdout == "The sky is blue.\n"
    assert engine.requests[0][:2] == ("chat", [{"role": "user", "content": "Why?"}])
    assert engine.num_open == 0
    assert "starting Ray ...\nloading weights ...\n" in result.stderr
    assert result.stderr.count("loading weights") == 1
    assert "note: the context shrinks to 512 tokens" in result.stderr
    for shown in ("121 tok/s", "21.0 tok/s", "disk:0 (bottleneck)",
                  "48.0 MiB in RAM, 45.0 MiB only on disk; 44.0 MiB read for each token",
                  "62 %", "93 %", "46.0 ms predicted", "50.0 ms measured"):  # fmt: skip
        assert shown in result.stderr


def test_run_json_is_one_object(
    shadowlane_command: Command, engine: FakeEngine, model_dir: Path
) -> None:
    result = shadowlane_command("run", model_dir, "--json", input="Why?\n")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert tuple(found)[: len(RUN_KEYS)] == RUN_KEYS
    assert found["text"] == "The sky is blue."
    assert found["token_ids"] == [100, 101, 102, 103]
    assert found["plan"] == PLAN
    assert found["emulated"] is False
    assert result.stdout.count("\n") == 1


def test_run_without_template_or_raw_continues_the_text(
    shadowlane_command: Command, engine: FakeEngine, model_dir: Path
) -> None:
    assert shadowlane_command("run", model_dir, "--raw", "-p", "Once").exit_code == 0
    engine.has_chat_template = False
    assert shadowlane_command("run", model_dir, "-p", "Once").exit_code == 0
    assert [request[:2] for request in engine.requests] == [("stream", "Once")] * 2


def test_every_option_reaches_the_engine(
    shadowlane_command: Command, engine: FakeEngine, model_dir: Path
) -> None:
    result = shadowlane_command(
        *("run", model_dir, "-p", "x", "--ram", "1.5GB", "--gpu-memory", "0", "--ctx-size", 256),
        *("--cpu-threads", 3, "--cpu-workers", 2, "--dtype", "bfloat16", "--no-prefetch"),
        *("--kv", "q8_0"),
        "--no-expand",
        *("--weights", "q4_1"),
        *("-n", 3, "--temp", 0.5, "--top-k", 5, "--top-p", 0.9, "--min-p", 0.1),
        *("--repeat-penalty", 1.1, "--seed", 7, "--stop", "a b", "--stop", "c"),
        *("--hardware", LAPTOP, "--slowed", 9, "--emulate-seed", 4, "--n-cpu-moe", 3),
        *("--disturb", "40:cpu=0.4", "--disturb", "80:"),
        *("--pin", "down=cpu", "--pin", "^0\\.=gpu:0"),
    )
    assert result.exit_code == 0, result.output
    assert engine.arguments == {
        "model": model_dir,
        "ram": 1_500_000_000,
        "cpu_threads": 3,
        "cpu_workers": 2,
        "dtype": "bfloat16",
        "kv": "q8_0",
        "ctx_size": 256,
        "weights": "q4_1",
        "expand": False,
        "prefetch": False,
        "trace_routing": None,
        "pins": ("down=cpu", "^0\\.=gpu:0"),
        "hardware": LAPTOP,
        "gpu_memory": "0",
        "strategy": None,
        "gpu_layers": None,
        "cpu_moe": False,
        "n_cpu_moe": 3,
        "slowed": 9.0,
        "emulate_seed": 4,
        "disturb": ("40:cpu=0.4", "80:"),
    }
    params = engine.requests[0][2]
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 5, 0.9, 0.1)
    assert (params.repeat_penalty, params.seed, params.max_tokens) == (1.1, 7, 3)
    assert params.stop == ("a b", "c")


def test_options_that_change_nothing_are_named(
    shadowlane_command: Command, engine: FakeEngine, model_dir: Path
) -> None:
    greedy = shadowlane_command("run", model_dir, "-p", "x", "--top-p", 0.5, "--seed", 3)
    assert "note: --top-p, --seed have no effect at temperature 0" in greedy.stderr
    drawn = shadowlane_command("run", model_dir, "-p", "x", "--top-p", 0.5, "--temp", 0.5)
    assert "no effect" not in drawn.stderr


def test_options_come_from_the_environment_and_flags_win(
    shadowlane_command: Command,
    engine: FakeEngine,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables = {"RAM": "1GiB", "MODEL": str(model_dir), "MAX_TOKENS": "2", "TEMP": "0.25",
                 "STOP": "two words\nmore", "CPU_WORKERS": "2", "NO_PREFETCH": "1"}  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(f"SHADOWLANE_{name}", value)
    result = shadowlane_command("run", "-p", "x", "--ram", "2GiB")
    assert result.exit_code == 0, result.output
    assert result.stdout == "The sky\n"
    assert (engine.arguments["model"], engine.arguments["ram"]) == (model_dir, 2 << 30)
    assert (engine.arguments["cpu_workers"], engine.arguments["prefetch"]) == (2, False)
    assert engine.requests[0][2].temperature == 0.25
    assert engine.requests[0][2].stop == ("two words", "more")


def test_run_reads_a_file(
    shadowlane_command: Command, engine: FakeEngine, model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text("Grüße\nzwei")
    assert shadowlane_command("run", model_dir, "-f", tmp_path / "prompt.txt").exit_code == 0
    assert shadowlane_command("run", model_dir, "-f", "-", input="piped").exit_code == 0
    assert engine.requests[0][1][0]["content"] == "Grüße\nzwei"
    assert engine.requests[1][1][0]["content"] == "piped"


def test_interrupting_run_ends_quietly_with_130(
    shadowlane_command: Command, engine: FakeEngine, model_dir: Path
) -> None:
    engine.interrupt_after = 2
    result = shadowlane_command("run", model_dir, "-p", "x")
    assert result.exit_code == 130
    assert result.stdout == "The sky"
    assert "error" not in result.stderr
    assert "Traceback" not in result.stderr
    assert (engine.num_open, engine.num_cancelled) == (0, 1)


def test_chat_keeps_the_conversation(
    shadowlane_command: Command, engine: FakeEngine, model_dir: Path
) -> None:
    lines = "hello\n\n/help\n/nonsense\nagain\n/clear\nfresh\n/exit\nnever read\n"
    result = shadowlane_command("chat", model_dir, input=lines)
    assert result.exit_code == 0, result.output
    assert result.stdout == "The sky is blue.\n" * 3
    asked = [request[1] for request in engine.requests]
    assert asked[0] == [{"role": "user", "content": "hello"}]
    assert asked[1] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "The sky is blue."},
        {"role": "user", "content": "again"},
    ]
    assert asked[2] == [{"role": "user", "content": "fresh"}]
    assert "Ctrl-C   stop the answer" in result.stderr
    assert "There is no command /nonsense" in result.stderr
    assert engine.num_open == 0


def test_chat_says_what_the_lanes_did_and_what_was_decided(
    shadowlane_command: Command, engine: FakeEngine, model_dir: Path
) -> None:
    engine.decisions = ["first steps measured: moves 3 MiB"]
    lines = "/stats\nhello\n/stats\nagain\n"
    result = shadowlane_command("chat", model_dir, "--explain", input=lines)
    assert result.exit_code == 0, result.output
    assert "There has been no answer yet." in result.stderr
    assert result.stderr.count("disk:0 (bottleneck)") == 1
    assert result.stderr.count("1. first steps measured: moves 3 MiB") == 1, "told once"
    given = ("--hardware", LAPTOP, "--gpu-layers", 3, "--pin", "down=cpu", "--slowed", 3)
    result = shadowlane_command("chat", model_dir, *given, input="hello\n")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("disk:0 (bottleneck)") == 1, "at the end, of an emulated machine"
    arguments = engine.arguments
    assert (arguments["hardware"], arguments["gpu_layers"]) == (LAPTOP, 3)
    assert (arguments["pins"], arguments["slowed"]) == (("down=cpu",), 3.0)


def test_bench_on_an_emulated_machine_measures_decode_alone(
    shadowlane_command: Command, engine: FakeEngine, model_dir: Path
) -> None:
    given = ("bench", model_dir, "-r", 2, "--hardware", LAPTOP, "--cpu-moe", "--explain")
    result = shadowlane_command(*given)
    assert result.exit_code == 0, result.output
    assert "tg128" in result.stdout
    assert "pp512" not in result.stdout
    assert "disk:0 (bottleneck)" in result.stderr
    assert "the plan was never changed" in result.stderr
    assert engine.arguments["cpu_moe"] is True
    result = shadowlane_command(*given, "-pp", 512)
    assert result.exit_code == 2
    assert "-pp must be left out with --hardware" in result.stderr


def test_interrupting_an_answer_keeps_what_was_said(
    shadowlane_command: Command, engine: FakeEngine, model_dir: Path
) -> None:
    engine.interrupt_after = 2
    result = shadowlane_command("chat", model_dir, input="hello\nagain\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == "The sky\nThe sky is blue.\n"
    assert "(stopped)" in result.stderr
    assert engine.requests[1][1][1] == {"role": "assistant", "content": "The sky"}
    assert engine.num_cancelled == 1


def test_plan_as_table_and_json(
    shadowlane_command: Command, engine: FakeEngine, model_dir: Path
) -> None:
    result = shadowlane_command("plan", model_dir, "--ram", "64MiB", "--ctx-size", 128)
    assert result.exit_code == 0, result.output
    assert engine.arguments["ram"] == 64 << 20
    assert engine.arguments["ctx_size"] == 128
    planned = json.loads(shadowlane_command("plan", model_dir, "--json").stdout)
    assert planned == json.loads(json.dumps(a_real_plan()))
    speed = f"decode {report.rate(planned['predicted']['decode_tok_per_s'])}"
    weights = f"weights {format_size(planned['tiers']['disk'])};"
    budget = f"{format_size(planned['budget']['ram'])} of RAM"
    for shown in (speed, weights, budget, "nothing was measured yet", "layers 0-", "lm_head"):
        assert shown in " ".join(result.stdout.split())
    by_group = shadowlane_command("plan", model_dir, "--groups").stdout
    assert all(f"\n{group['group']} " in by_group for group in planned["groups"])


def test_profile_measures_again(
    shadowlane_command: Command, engine: FakeEngine, model_dir: Path
) -> None:
    result = shadowlane_command("profile", model_dir)
    assert result.exit_code == 0, result.output
    assert "measuring disk ..." in result.stderr
    assert "1.70 GB/s" in result.stdout
    given = ("--json", "--cpu-threads", 3, "--dtype", "bfloat16", "--weights", "q4_1")
    measured = json.loads(shadowlane_command("profile", model_dir, *given).stdout)
    assert measured["refreshed"] is True
    assert {**engine.arguments, "cpu_threads": 3, "dtype": "bfloat16", "weights": "q4_1"} == (
        engine.arguments
    )


def test_bench_leaves_out_the_first_repetition(
    shadowlane_command: Command, engine: FakeEngine, model_dir: Path
) -> None:
    arguments = ("bench", model_dir, "-pp", 7, "-tg", 3, "-r", 2, "--output", "json")
    result = shadowlane_command(*arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    # The fake's speeds count its requests: three of prefill, then three of decode.
    assert found["tests"][0]["test"] == "pp7"
    assert found["tests"][0]["tok_per_s"] == [122.0, 123.0]
    assert found["tests"][1]["tok_per_s"] == [25.0, 26.0]
    assert found["tests"][1]["mean_tok_per_s"] == 25.5
    assert found["tests"][1]["deviation_tok_per_s"] == pytest.approx(0.7071, abs=1e-4)
    prompts = [prompt for _, prompt, _ in engine.requests]
    assert [len(prompt) for prompt in prompts] == [7, 7, 7, 1, 1, 1]
    assert prompts[0] != prompts[1]
    assert {params.ignore_eos for _, _, params in engine.requests} == {True}
    assert [params.max_tokens for _, _, params in engine.requests] == [1, 1, 1, 4, 4, 4]
    assert engine.arguments["ctx_size"] == 8  # what the longer of the two needs
    table = shadowlane_command("bench", model_dir, "-pp", 0, "-tg", 3, "-r", 2).stdout
    assert engine.arguments["ctx_size"] == 5
    assert table.splitlines()[0] == (
        "| model | in RAM | only on disk | read per token | bottleneck | test | tok/s |"
    )
    assert table.splitlines()[2].endswith(
        "| 48.0 MiB | 45.0 MiB | 44.0 MiB | disk:0 | tg3 | 28.50 ± 0.71 |"
    )


def test_the_package_is_a_command() -> None:
    called = [sys.executable, "-m", "shadowlane", "--version"]
    done = subprocess.run(called, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("shadowlane 0.")


def test_fetch_list_and_version(
    shadowlane_command: Command,
    engine: FakeEngine,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert shadowlane_command("fetch", model_dir).stdout == f"{model_dir}\n"
    listed = shadowlane_command("list")
    assert listed.stdout.startswith("smollm2   93.8 MiB  not fetched yet")
    assert json.loads(shadowlane_command("list", "--json").stdout) == []
    assert shadowlane_command("--version").stdout.startswith("shadowlane 0.")


def test_show_reads_headers(
    shadowlane_command: Command, engine: FakeEngine, tmp_path: Path
) -> None:
    import numpy
    from safetensors.numpy import save_file

    config = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = {"model.embed_tokens.weight": numpy.zeros((4, 8), numpy.float32)}
    save_file(weights, tmp_path / "model.safetensors")
    facts = json.loads(shadowlane_command("show", tmp_path, "--json").stdout)
    assert facts["parameters"] == 32
    assert facts["nbytes"] == 128
    assert facts["layouts"] == {"f32": 128}
    assert facts["hidden_size"] == 8
    text = shadowlane_command("show", tmp_path).stdout
    assert "f32 128 B" in text
    assert "llama" in text


def test_timeline_copies_the_last_run(
    shadowlane_command: Command, engine: FakeEngine, tmp_path: Path
) -> None:
    events = [
        {"ph": "M", "pid": 1, "tid": 0, "name": "thread_name", "args": {"name": "cpu:0"}},
        {"ph": "X", "pid": 1, "tid": 0, "ts": 1.0, "dur": 2.0, "name": "0.qkv"},
    ]
    source = tmp_path / "cache" / "last-timeline.json"
    source.parent.mkdir()
    source.write_text(json.dumps({"traceEvents": events}))
    out = tmp_path / "out.json"
    result = shadowlane_command("timeline", out)
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["traceEvents"] == events
    assert "1 spans written" in result.stderr


def test_ps_finds_processes_by_their_arena(
    shadowlane_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    nbytes = 3 << 20
    arena = os.memfd_create("shadowlane /models/my own.gguf")
    os.ftruncate(arena, nbytes)
    code = (
        "import mmap, sys\nm = mmap.mmap(int(sys.argv[1]), 0)\n"
        "print('mapped', flush=True); sys.stdin.read()"
    )
    before = {process.pid for process in engine_processes()}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(arena)],
        pass_fds=[arena],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"mapped\n"
        listed = json.loads(shadowlane_command("ps", "--json").stdout)
        shown = shadowlane_command("ps").stdout
        child.communicate()
    os.close(arena)
    entry = next(entry for entry in listed if entry["pid"] == child.pid)
    assert child.pid not in before
    assert entry["arena_nbytes"] == nbytes
    assert entry["model"] == "/models/my own.gguf"
    assert "import mmap, sys m = " in entry["name"]  # in one line
    assert entry["own_nbytes"] > mmap.PAGESIZE
    assert "/models/my own.gguf" in shown
    assert "3.00 MiB" in shown
    assert child.pid not in {process.pid for process in engine_processes()}


@pytest.mark.parametrize(
    "command",
    [
        *("run", "chat", "plan", "profile", "bench", "pack", "perplexity"),
        *("fetch", "list", "show", "timeline", "ps"),
    ],
)
def test_each_command_teaches_by_example(shadowlane_command: Command, command: str) -> None:
    result = shadowlane_command(command, "--help")
    assert result.exit_code == 0
    assert "Examples" in result.stdout
    assert f"shadowlane {command}" in result.stdout


def test_without_arguments_it_says_what_there_is(shadowlane_command: Command) -> None:
    result = shadowlane_command()
    assert result.exit_code == 0
    assert "run" in result.stdout
    assert "Why is the sky blue?" in result.stdout
