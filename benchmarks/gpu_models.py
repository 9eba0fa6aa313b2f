"""The last part of `gpu.py`: a model of which a quarter, half and three quarters fit the card.

Shadowlane against accelerate's `device_map="auto"` and llama.cpp, where these are installed. Each
measurement is a process of its own; a round runs every engine at every budget once, and ratios are
taken within a round. Where the time is over, what has been measured until then is told.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoint import vocab_size, weight_files
from gpu_rig import Row, note
from machine import run_limited
from measure import ratio_per_round, spread

PEERS = Path(__file__).resolve().parent / "peers"
PERCENTS = (25, 50, 75)
LEAST_S = 5.0  # of what is left, to begin one more process
PHASES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Course:
    """What is run: the same for every engine."""

    model: Path
    gguf: Path | None  # of the same weights, for llama.cpp
    peer_python: str
    rounds: int
    prompt_tokens: int = 128
    new_tokens: int = 32
    threads: int = 2

    @property
    def nbytes(self) -> int:
        return sum(each.stat().st_size for each in weight_files(self.model))


def shadowlane_command(course: Course, percent: int) -> list[str]:
    budget = course.nbytes * percent // 100
    script = PEERS / "shadowlane_run.py"
    return [sys.executable, str(script), "--model", str(course.model), f"--set=gpu_memory={budget}"]


def accelerate_command(course: Course, percent: int) -> list[str]:
    """The same budget for weights alone; what does not fit stays in RAM, which is never short."""
    budget = course.nbytes * percent // 100
    return [
        course.peer_python,
        str(PEERS / "accelerate_run.py"),
        "--model",
        str(course.model),
        f"--gpu={budget}",
        f"--ram={2 * course.nbytes}",
    ]


def llamacpp_command(course: Course, percent: int) -> list[str]:
    """So many of its layers as the budget holds; keys and values go with them."""
    assert course.gguf is not None
    layers = num_layers(course.gguf) * percent // 100
    return [
        course.peer_python,
        str(PEERS / "llamacpp_run.py"),
        "--model",
        str(course.gguf),
        f"--gpu-layers={layers}",
    ]


COMMANDS: dict[str, Callable[[Course, int], list[str]]] = {
    "shadowlane": shadowlane_command,
    "accelerate": accelerate_command,
    "llama.cpp": llamacpp_command,
}


def models(course: Course, until: float) -> Iterator[Row]:
    """Rows of all engines at all budgets, and why some have none. until: monotonic."""
    engines = []
    for engine in COMMANDS:
        why = why_not(engine, course)
        if why is None:
            engines.append(engine)
        else:
            yield note(f"model with {engine}", skipped=why)
    outcomes: dict[tuple[str, int], list[dict[str, Any]]] = {}
    is_over = False
    for _ in range(course.rounds):
        for percent in PERCENTS:
            for engine in engines:
                left = until - time.monotonic()
                if left < LEAST_S:
                    is_over = True
                    continue
                command = COMMANDS[engine](course, percent) + shared_options(course)
                outcomes.setdefault((engine, percent), []).append(run_once(command, left))
    for percent in PERCENTS:
        for engine in engines:
            ours = outcomes.get((engines[0], percent), [])
            yield from told(engine, percent, outcomes.get((engine, percent), []), ours)
    if is_over:
        yield note("models", skipped="no time is left for all rounds")


def why_not(engine: str, course: Course) -> str | None:
    """What an engine lacks to be run."""
    if engine == "shadowlane":
        return None
    if engine == "accelerate" and course.model.suffix == ".gguf":
        return "it needs a directory of safetensors; got a GGUF file"
    if engine == "llama.cpp" and course.gguf is None:
        return "it needs --gguf (gguf_twin.py writes one)"
    for package in {"accelerate": ("accelerate", "transformers"), "llama.cpp": ("llama_cpp",)}[
        engine
    ]:
        if not has_package(course.peer_python, package):
            return f"{package} is not installed"
    return None


def has_package(python: str, package: str) -> bool:
    code = f"import importlib.util as u; raise SystemExit(u.find_spec({package!r}) is None)"
    done = subprocess.run([python, "-c", code], capture_output=True, check=False, timeout=60)
    return done.returncode == 0


def num_layers(path: Path) -> int:
    """Of a GGUF file."""
    import gguf

    names = [each.name for each in gguf.GGUFReader(path).tensors]
    return 1 + max(int(name.split(".")[1]) for name in names if name.startswith("blk."))


def shared_options(course: Course) -> list[str]:
    return [
        f"--prompt-tokens={course.prompt_tokens}",
        f"--new-tokens={course.new_tokens}",
        f"--threads={course.threads}",
        f"--vocab={vocab_size(course.model)}",
    ]


def run_once(command: Sequence[str], timeout_s: float) -> dict[str, Any]:
    """The result line of a peer, or {"failure": ...}."""
    done, _, _ = run_limited(list(command), None, timeout_s)
    if done.returncode == 0:
        for line in reversed(done.stdout.splitlines()):
            if line.startswith("{"):
                result: dict[str, Any] = json.loads(line)
                return result
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return {"failure": f"exit {done.returncode}: {(said or [''])[-1]}"}


def told(
    engine: str,
    percent: int,
    outcomes: Sequence[dict[str, Any]],
    first: Sequence[dict[str, Any]],
) -> Iterator[Row]:
    """Medians of both phases with their spread; ratios are of the first engine to this one."""
    title = f"{engine} with {percent} % of the weights' bytes"
    failures = sorted({each["failure"] for each in outcomes if "failure" in each})
    results = [each for each in outcomes if "failure" not in each]
    if failures:
        yield note(title, error="; ".join(failures))
    if not results:
        return
    for phase in PHASES:
        key = f"{phase}_tok_per_s"
        found = spread(each[key] for each in results)
        if found is None:
            continue
        # a round that the clock has cut short has no partner
        pairs = list(zip(first, outcomes, strict=False))
        ratio = spread(
            ratio_per_round([mine.get(key) for mine, _ in pairs], [it.get(key) for _, it in pairs])
        )
        yield Row(
            f"{title}: {phase}",
            found.median,
            found.low,
            "tok/s",
            {
                "most": found.high,
                "rounds": found.count,
                "ratio_of_first": None if ratio is None else [ratio.median, ratio.low, ratio.high],
                "version": results[0]["version"],
                "settings": results[0]["settings"],
            },
        )
