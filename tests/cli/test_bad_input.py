"""Whatever goes wrong: exit code 2, one line, no traceback, nothing left open."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from shadowlane.cli import errors
from shadowlane.engine_arguments import EngineArguments
from shadowlane.llm import _prepare
from shadowlane.models import is_dense
from shadowlane.ops.errors import ModelError

from .conftest import FakeEngine

Fails = Callable[..., str]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ram", "lots"], "--ram must be a size such as 6GiB, 512MiB or 1.5GB; got 'lots'"),
        (["--ram", "-1"], "--ram must be a size"),
        (["--ram", "0"], "--ram must be at least one byte"),
        (
            ["--gpu-memory", "6"],
            "--gpu-memory must be 0 without hardware: this machine has no card; got 6.00 GiB",
        ),
        (["--gpu-memory", "x"], "--gpu-memory must be a size"),
        (["--cpu-threads", "0"], "--cpu-threads must be at least 1; got 0 (see"),
        (["--cpu-workers", "-2"], "--cpu-workers must be at least 1; got -2"),
        (["--cpu-workers", "5"], "--cpu-workers must not be more than the 4 threads they share"),
        (["--kv", "q4_0"], "--kv must be q8_0; got 'q4_0'"),
        (["--ctx-size", "many"], "--ctx-size must be a whole number; got 'many'"),
        (["-n", "0"], "--max-tokens must be at least 1; got 0"),
        (["--dtype", "int3"], "--dtype must be one of float32, bfloat16, float16; got 'int3'"),
        (["--temp", "-1"], "error: --temp must not be negative; got -1.0"),
        (["--temp", "hot"], "--temp must be a number; got 'hot'"),
        (["--temp", "1", "--top-p", "2"], "--top-p must be above 0 and at most 1; got 2.0"),
        (["--stop", ""], "--stop must not hold an empty text"),
        (["--nonsense"], "No such option: --nonsense"),
        (["--prompt"], "Option '--prompt' requires an argument"),
        (["-p", "x", "-f", "y"], "a prompt must come from one place; got both"),
        (["-p", " "], "a prompt must hold some text"),
        (["-f", "/no/such/prompt"], "No such file or directory: /no/such/prompt"),
        (["-f", "/"], "Is a directory: /"),
    ],
)
def test_bad_arguments_of_run(
    fails: Fails, engine: FakeEngine, model_dir: Path, arguments: list[str], message: str
) -> None:
    assert message in fails("run", model_dir, *arguments, input="hello")
    assert engine.arguments == {}


def test_a_prompt_must_be_text(
    fails: Fails, engine: FakeEngine, model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompt").write_bytes(b"\xff\xfe\x00")
    assert "text must be UTF-8" in fails("run", model_dir, "-f", tmp_path / "prompt")
    assert "a prompt is needed: -p TEXT, -f FILE" in fails("run", model_dir, input="")


def test_files_of_routing_are_looked_at_first(
    fails: Fails,
    engine: FakeEngine,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, message in (
        ("routes.txt", "--trace-routing must end in .jsonl or .jsonl.gz; got "),
        ("routes.csv", "--trace-routing must end in .jsonl or .jsonl.gz; got "),
        ("none/routes.jsonl", "--trace-routing must be a file in a directory that exists; got "),
    ):
        path = tmp_path / name
        assert message + str(path) in fails("run", model_dir, "-p", "x", "--trace-routing", path)
        assert not path.exists()
    (tmp_path / "folder.jsonl").mkdir()
    message = "--trace-routing must be a file in a directory that exists"
    assert message in fails("run", model_dir, "--trace-routing", tmp_path / "folder.jsonl")
    monkeypatch.setattr(os, "access", lambda *_: False)  # as root, everything may be written
    message = "--trace-routing must be a file that may be written; got "
    assert message in fails("run", model_dir, "--trace-routing", tmp_path / "routes.jsonl.gz")
    message = "--replay-routing must end in .jsonl, .jsonl.gz, .csv or .csv.gz; got "
    assert message in fails("bench", model_dir, "--replay-routing", tmp_path / "routes.parquet")
    missing = tmp_path / "missing.csv.gz"
    message = f"No such file or directory: {missing}"
    assert message in fails("bench", model_dir, "--replay-routing", missing)
    assert engine.arguments == {}


def test_a_model_that_is_known_to_have_no_experts_is_not_fetched(
    fails: Fails,
    engine: FakeEngine,
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fetch(*_: object) -> Path:
        raise AssertionError("nothing must be fetched")

    monkeypatch.setattr("shadowlane.models._fetch_known", fetch)
    path = tmp_path / "routes.jsonl"
    message = "routing is of mixtures of experts; smollm2 has none"
    assert message in fails("run", "-p", "x", "--trace-routing", path)
    path.touch()
    message = f"routing is of mixtures of experts; {model_dir} has none"
    assert message in fails("run", model_dir, "-p", "x", "--trace-routing", path)
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    monkeypatch.setattr("shadowlane.models._hub_config", lambda name: config)
    message = "routing is of mixtures of experts; org/dense has none"
    assert message in fails("bench", "org/dense", "--replay-routing", path)
    config.write_text('{"model_type": "qwen3_moe"}')
    assert not is_dense("org/mixture")
    message = "routing is of mixtures of experts; smollm2 has none"
    assert message in fails("bench", "smollm2", "--replay-routing", path)
    with pytest.raises(ValueError, match=message):
        _prepare("smollm2", None, lambda *_: None, EngineArguments(trace_routing=path))


@pytest.mark.parametrize("command", ["run", "chat", "plan", "profile", "bench", "show"])
@pytest.mark.parametrize("model", ["no-such", "./no-such", "no-such.gguf", "a/b/c", "~nobody-x/m"])
def test_a_model_that_is_not_there(
    fails: Fails, engine: FakeEngine, command: str, model: str
) -> None:
    assert model in fails(command, model, input="hello\n")
    assert engine.arguments == {}


@pytest.mark.parametrize("command", ["run", "chat", "plan", "bench"])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModelError("model-2.safetensors must hold 10 bytes; 3 missing"), "3 missing"),
        (ValueError("ram must be at least 80 MiB; got 64 MiB"), "must be at least 80 MiB"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), "No space left on device: /x"),
        (PermissionError(errno.EACCES, "Permission denied", "/m"), "Permission denied: /m"),
        (ConnectionError("Ray did not start:\n  port 6379 is taken"), "start: port 6379 is taken"),
        (TimeoutError(), "TimeoutError"),
        (MemoryError(), "out of memory"),
        (ModuleNotFoundError("No module named 'ray'"), "No module named 'ray'"),
    ],
)
def test_an_engine_that_does_not_start(
    fails: Fails,
    engine: FakeEngine,
    model_dir: Path,
    command: str,
    error: Exception,
    message: str,
) -> None:
    engine.start_error = error
    assert message in fails(command, model_dir, input="hello\n")
    assert engine.num_open == 0


def test_an_error_while_streaming_closes_the_engine(
    fails: Fails, engine: FakeEngine, model_dir: Path
) -> None:
    engine.stream_error = ValueError("prompt must fit the context of 64 tokens; got 80")
    for command in ("run", "chat"):
        assert "context of 64 tokens; got 80" in fails(command, model_dir, input="hello\n")
    assert engine.num_open == 0


def test_a_fault_of_our_own_is_told_apart(
    shadowlane_command: Callable[..., Result],
    engine: FakeEngine,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine.start_error = KeyError("0.qkv")
    result = shadowlane_command("run", model_dir, "-p", "x")
    assert result.exit_code == 1
    assert "error: a fault in shadowlane, KeyError: '0.qkv' (SHADOWLANE_DEBUG=1" in result.stderr
    assert "Traceback" not in result.stderr
    monkeypatch.setenv("SHADOWLANE_DEBUG", "1")
    assert "Traceback" in shadowlane_command("run", model_dir, "-p", "x").stderr


def test_an_error_from_a_remote_function_is_the_one_that_was_raised_there() -> None:
    class RayTaskError(Exception):
        def __init__(self, cause: Exception) -> None:
            super().__init__("\x1b[36mray::Engine.start()\x1b[39m\n  File ...\n  a page of it")
            self.cause = cause

    RayTaskError.__module__ = "ray.exceptions"
    error = RayTaskError(RayTaskError(ModelError("the shard is missing")))
    assert errors._cause(error) is error.cause.cause  # type: ignore[attr-defined]

    class ActorDiedError(Exception):
        __module__ = "ray.exceptions"

    died = ActorDiedError("The actor died unexpectedly.\n\tclass_name: Engine\n\tactor_id: 00")
    assert errors.one_line(died) == "The actor died unexpectedly."
    assert errors.exit_code(died) == 2


def test_a_lane_that_died_is_told_apart_from_a_fault_in_the_planner() -> None:
    from shadowlane.actors.hosts import LaneDied
    from shadowlane.planner.validate import InconsistentPrograms

    assert errors.exit_code(LaneDied("disk:0 died")) == 2
    assert errors.exit_code(InconsistentPrograms("12.down waits for itself")) == 1


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_model_without_tokenizer_starts_no_engine(
    fails: Fails, engine: FakeEngine, model_dir: Path, command: str
) -> None:
    (model_dir / "tokenizer.json").unlink()
    said = fails(command, model_dir, input="hi\n")
    assert f"{command} needs a model with a tokenizer; {model_dir} has none" in said
    assert engine.arguments == {}


def test_chat_without_a_template_starts_no_engine(
    fails: Fails, engine: FakeEngine, model_dir: Path
) -> None:
    (model_dir / "chat_template.jinja").unlink()
    said = fails("chat", model_dir, input="hi\n")
    assert f"chat needs a model with a chat template; {model_dir} has none" in said
    assert engine.arguments == {}
    (model_dir / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    engine.start_error = ValueError("the engine was asked")
    assert "the engine was asked" in fails("chat", model_dir, input="hi\n")


def test_chat_needs_a_template(fails: Fails, engine: FakeEngine, model_dir: Path) -> None:
    engine.has_chat_template = False
    assert "chat needs a model with a chat template" in fails("chat", model_dir, input="hi\n")
    assert engine.num_open == 0


def test_bench_needs_something_to_measure(
    fails: Fails, engine: FakeEngine, model_dir: Path
) -> None:
    assert "one of -pp and -tg must be above 0" in fails("bench", model_dir, "-pp", 0, "-tg", 0)
    assert "--output must be one of md, json" in fails("bench", model_dir, "--output", "xml")
    assert "--repetitions must be at least 1" in fails("bench", model_dir, "-r", 0)
    said = fails("bench", model_dir, "-pp", 9000)
    assert "must fit the model's context of 8192 tokens; they need 9001" in said
    assert engine.arguments == {}
    said = fails("bench", model_dir, "-pp", 512, "-tg", 4, "--ctx-size", 512)
    assert "--ctx-size must be at least 513 for -pp 512 and -tg 4; got 512" in said


@pytest.mark.parametrize("arguments", [["-p", "a\udcffb"], ["--stop", "\udcff", "-p", "x"]])
def test_arguments_that_are_no_text(
    fails: Fails, engine: FakeEngine, model_dir: Path, arguments: list[str]
) -> None:
    assert "arguments must be UTF-8; got b'" in fails("run", model_dir, *arguments)
    assert engine.arguments == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no last run"),
        ("{", "must be a timeline"),
        ("[1]", "must be a timeline"),
        (json.dumps({"traceEvents": [{"ph": "X", "pid": "a", "tid": 1}]}), "whole numbers"),
        (json.dumps([{"ph": "M", "pid": "a"}]), "whole numbers"),
        (json.dumps([{"ph": "X", "pid": 1, "tid": 1, "dur": -1}]), "dur must not be negative"),
        (json.dumps([{"ph": "X", "pid": 1, "tid": 1}]), "'dur'"),
    ],
)
def test_a_timeline_that_perfetto_would_refuse(
    fails: Fails, engine: FakeEngine, tmp_path: Path, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache" / "last-timeline.json").write_text(content)
    assert message in fails("timeline", tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()


def test_a_timeline_needs_a_place(fails: Fails, engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "last-timeline.json").write_text('{"traceEvents": []}')
    assert "is a directory" in fails("timeline", tmp_path)
    assert "No such file or directory" in fails("timeline", tmp_path / "no" / "out.json")
    assert "Missing argument 'OUT.json'" in fails("timeline")


def test_a_reader_that_goes_away_is_no_message() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = "from shadowlane.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("rest", ["", "    except SystemExit: sys.exit(1)  # as Ray does\n"])
def test_termination_unwinds_the_stack(rest: str) -> None:
    code = f"""
import os, signal, sys
from shadowlane.cli.errors import _termination_unwinds
with _termination_unwinds():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
{rest}    finally:
        print("closed", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "closed\n"
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stderr == ""


def test_help_starts_without_the_heavy_libraries() -> None:
    code = """
import sys
from shadowlane.cli import app
try:
    app(["run", "--help"])
except SystemExit as end:
    assert end.code == 0
heavy = {"ray", "torch", "transformers", "numba", "numpy", "huggingface_hub", "tokenizers"}
print(sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "[]\n"
