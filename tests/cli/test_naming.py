"""Names in errors are those that were typed; variables; help; Ctrl-C."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import Result

from shadowlane.cli import app, naming
from shadowlane.cli.environment import variables

from .conftest import FakeEngine

Fails = Callable[..., str]
Command = Callable[..., Result]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        (
            "ctx_size must be between 1 and the model's 64; got 99",
            "--ctx-size must be between 1 and the model's 64; got 99",
        ),
        ("context must be at most 64 tokens; got 99", "--ctx-size must be at most 64 tokens"),
        ("kv q8_0 needs heads of a multiple of 32", "--kv q8_0 needs heads of a multiple of 32"),
        ("prompt must leave room in the context", "--prompt must leave room in the context"),
        ("ask for less (cpu_threads or max_tokens)", "(--cpu-threads or --max-tokens)"),
        ("max_batch must be 1; got 2", "error: max_batch must be 1; got 2"),  # no such option
        ("dtype must be float32; got 3", "error: dtype must be float32"),  # was not typed
        ("/a/ctx_size.d/max_tokens must be a file", "error: /a/ctx_size.d/max_tokens must be"),
        ("'cpu_threads' is what 'ctx_size' is not", "error: 'cpu_threads' is what 'ctx_size' is"),
        ("weights of the model need 3 GiB", "error: weights of the model need 3 GiB"),
    ],
)
def test_flags_stand_for_arguments(
    fails: Fails, engine: FakeEngine, model_dir: Path, raised: str, shown: str
) -> None:
    engine.start_error = ValueError(raised)
    given = ("-p", "x", "--ctx-size", 99, "--kv", "q8_0")
    assert shown in fails("run", model_dir, *given)


def test_variables_stand_for_arguments(
    fails: Fails, engine: FakeEngine, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.start_error = ValueError("ctx_size must be between 1 and the model's 64; got 99")
    monkeypatch.setenv("SHADOWLANE_CTX_SIZE", "99")
    assert "error: SHADOWLANE_CTX_SIZE must be between" in fails("run", model_dir, "-p", "x")
    assert "error: --ctx-size must be" in fails("run", model_dir, "-p", "x", "--ctx-size", 99)


@pytest.mark.parametrize(
    ("given", "raised", "shown"),
    [
        (("--cpu-moe",), "cpu-moe needs a mixture of experts", "error: --cpu-moe needs a mixture"),
        (("--cpu-moe",), "cpu-moe 12 must fit a card", "error: --cpu-moe must fit a card"),
        (("--n-cpu-moe", 4), "cpu-moe 4 must fit a card", "error: --n-cpu-moe 4 must fit a card"),
        (("--gpu-layers", 4), "layer-split 4 must fit x", "error: --gpu-layers 4 must fit x"),
        (("--strategy", "cpu-moe"), "cpu-moe needs x", "error: --strategy cpu-moe needs x"),
        (("--strategy", "row-split"), "row-split needs x", "error: --strategy row-split needs x"),
        (("--pin", "a=cpu"), "pins must agree: 'a' is", "error: --pin must agree: 'a' is"),
        (("--pin", "a b=cpu"), "pin 'a b' must match x", "error: --pin 'a b' must match x"),
        (("--disturb", "3:"), "disturb cpu must be x", "error: --disturb cpu must be x"),
    ],
)
def test_layouts_pins_and_disturbances_have_their_flags(
    fails: Fails,
    engine: FakeEngine,
    model_dir: Path,
    given: tuple[str, ...],
    raised: str,
    shown: str,
) -> None:
    engine.start_error = ValueError(raised)
    assert shown in fails("run", model_dir, "-p", "x", *given)


def test_a_turn_that_fails_in_a_conversation_has_flags_too(
    fails: Fails, engine: FakeEngine, model_dir: Path
) -> None:
    engine.stream_error = ValueError("ctx_size must be more for this; got 64")
    assert "error: --ctx-size must be more" in fails("chat", model_dir, input="hello\n")


def test_notes_have_flags_and_keep_words(
    shadowlane_command: Command, engine: FakeEngine, model_dir: Path
) -> None:
    engine.notes = (
        "cpu_threads 9 is more than the 2 cores there are: using 2",
        "weights are q4_0, from /cache/packed/cpu_threads.gguf",
    )
    for command in (("run", model_dir, "-p", "x"), ("chat", model_dir)):
        said = shadowlane_command(*command, input="").stderr
        assert "note: --cpu-threads 9 is more than the 2 cores" in said
        assert "note: weights are q4_0, from /cache/packed/cpu_threads.gguf" in said


def test_the_library_names_no_flag() -> None:
    """Who calls it from Python has none; `naming` puts them in for who typed them."""
    root = Path(__file__).parents[2]
    folders = [root / name for name in ("actors", "ops", "planner")]
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    found = set()
    for path in [*paths, *(root / "src" / "shadowlane").glob("*.py")]:
        tree = ast.parse(path.read_text())
        documentation = {
            id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)
        }  # a text that stands for itself
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                flags = re.findall(r"(?<=[\s(])--[a-z][a-z-]+", node.value)
                found |= set(flags) if id(node) not in documentation else set()
    assert found == {"--merge"}  # of another tool


def test_names_of_one_command_do_not_last(engine: FakeEngine) -> None:
    naming.forget()
    assert naming.typed_error("ctx_size must be 3") == "ctx_size must be 3"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("JSON", "maybe", "SHADOWLANE_JSON must be 1 or 0 (or true, false, yes, no, on, off); got"),
        ("NO_PREFETCH", "2", "SHADOWLANE_NO_PREFETCH must be 1 or 0 (or true, false, yes, no, on"),
        ("CPU_THREADS", "lots", "SHADOWLANE_CPU_THREADS must be a whole number; got 'lots'"),
        ("CPU_WORKERS", "9", "SHADOWLANE_CPU_WORKERS must not be more than the 4 threads"),
        ("RAM", "lots", "SHADOWLANE_RAM must be a size such as 6GiB, 512MiB or 1.5GB; got 'lots'"),
        ("GPU_MEMORY", "1", "SHADOWLANE_GPU_MEMORY must be 0 without hardware: this machine"),
        ("DTYPE", "int3", "SHADOWLANE_DTYPE must be one of float32, bfloat16, float16; got 'int3'"),
        ("TEMP", "-1", "SHADOWLANE_TEMP must not be negative; got -1.0"),
        ("SEED", "x", "SHADOWLANE_SEED must be a whole number; got 'x'"),
        ("STOP", "\n\n", "SHADOWLANE_STOP must not hold an empty text; got ['', '']"),
        ("FILE", "/no/such", "No such file or directory: /no/such (from SHADOWLANE_FILE)"),
        ("MODEL", "nonsense", "or a Hugging Face id such as org/name (from SHADOWLANE_MODEL)"),
        ("DEBUG", "maybe", "SHADOWLANE_DEBUG must be 1 or 0 (or true, false, yes, no, on, off)"),
        ("DOT", "fast", "SHADOWLANE_DOT must be one of vnni, avx2, plain; got 'fast'"),
        ("CACHE", "~nobody-of-this-name/x", "SHADOWLANE_CACHE must be a folder; got '~nobody"),
    ],
)
def test_malformed_variables_are_named(
    fails: Fails,
    engine: FakeEngine,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
    message: str,
) -> None:
    monkeypatch.setenv("SHADOWLANE_MODEL", "smollm2" if name == "CACHE" else str(model_dir))
    monkeypatch.setenv(f"SHADOWLANE_{name}", value)
    prompt = () if name == "FILE" else ("-p", "x")
    assert message in fails("run", *prompt)
    assert engine.arguments == {}


def test_a_variable_that_is_empty_is_not_set(
    shadowlane_command: Command,
    engine: FakeEngine,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RAM", "JSON", "CPU_THREADS", "DTYPE", "DEBUG"):
        monkeypatch.setenv(f"SHADOWLANE_{name}", "")
    assert shadowlane_command("run", model_dir, "-p", "x").stdout == "The sky is blue.\n"
    assert engine.arguments["cpu_threads"] is None


def test_a_variable_that_is_none_of_ours_is_said(
    shadowlane_command: Command,
    engine: FakeEngine,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHADOWLANE_CPU_TREADS", "3")
    monkeypatch.setenv("SHADOWLANE_XYZZY", "3")
    result = shadowlane_command("run", model_dir, "-p", "x")
    assert result.exit_code == 0
    said = "note: SHADOWLANE_CPU_TREADS is no variable of shadowlane; did you mean "
    assert result.stderr.count(f"{said}SHADOWLANE_CPU_THREADS?\n") == 1
    assert "note: SHADOWLANE_XYZZY is no variable of shadowlane\n" in result.stderr


def test_every_variable_that_the_code_reads_is_known() -> None:
    from shadowlane.cli.environment import OTHERS

    root = Path(__file__).parents[2]
    read = {
        name
        for folder in ("src/shadowlane", "actors", "ops", "planner")
        for path in (root / folder).rglob("*.py")
        for name in re.findall(r"(?<!_)SHADOWLANE_[A-Z_]*[A-Z]", path.read_text())
    }
    assert read <= {*OTHERS, *variables(COMMANDS)}


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_has_one_style_for_what_an_option_takes(
    shadowlane_command: Command, command: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = shadowlane_command(*([command] if command else []), "--help").stdout
    assert "<" not in shown
    for parameter in COMMANDS[command].params if command else ():
        takes_value = parameter.param_type_name == "option" and not parameter.is_flag
        assert not takes_value or parameter.metavar in shown, parameter.name
    if command == "run":
        assert re.search(r"--dtype +float32\|bfloat16\|float16 +Number format", shown)
        assert re.search(r"--json +Print one JSON object", shown)


@pytest.mark.parametrize("module", ["shadowlane.cli.commands", "typer", "rich.table"])
def test_ctrl_c_while_the_program_loads_is_quiet(module: str) -> None:
    """The signal comes in the middle of an import, wherever the entry point has got to."""
    code = f"""
import os, signal, sys
from shadowlane.cli import main

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv = ["shadowlane", "run", "--help"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_before_the_entry_point_nearly_nothing_is_imported() -> None:
    code = """
import sys
before = set(sys.modules)
from shadowlane.cli import main
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "['__future__', 'shadowlane', 'shadowlane.cli']\n", done.stderr


def test_ctrl_c_in_a_command_unwinds_and_one_at_the_exit_is_quiet(tmp_path: Path) -> None:
    code = """
import atexit, os, signal, sys
from shadowlane.cli import commands, main, ps

def wait(*arguments):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        signal.pause()
    finally:
        print("closed", flush=True)

ps.engine_processes = wait
atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.argv = ["shadowlane", "ps"]
main()
"""
    environment = {**os.environ, "SHADOWLANE_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "closed\n", "")


def test_who_ignores_ctrl_c_goes_on_to(tmp_path: Path) -> None:
    code = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for what runs in the background
from shadowlane.cli import commands, main, ps
ps.engine_processes = lambda: os.kill(os.getpid(), signal.SIGINT) or []
sys.argv = ["shadowlane", "ps"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "no engine is running\n", "")
