"""`shadowlane perplexity`: one figure for how well a model predicts a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from shadowlane.cli import options
from shadowlane.cli.engine_options import EngineOptions
from shadowlane.cli.stages import Stages
from shadowlane.models import DEFAULT_MODEL, resolve_model

if TYPE_CHECKING:
    from shadowlane.quality import Perplexity

EPILOG = options.epilog(
    "shadowlane perplexity smollm2 -f text.txt",
    "shadowlane perplexity ./my-model -f text.txt --weights q4_0",
)


def perplexity(
    model: options.ModelArgument = DEFAULT_MODEL,
    file: Annotated[
        Path | None,
        options.option("--file", "-f", metavar="FILE", help="The text to read, a file in UTF-8."),
    ] = None,
    json_output: options.JsonOutput = False,
    ram: options.Ram = None,
    gpu_memory: options.GpuMemory = None,
    ctx_size: options.CtxSize = None,
    no_prefetch: options.NoPrefetch = False,
    cpu_threads: options.CpuThreads = None,
    cpu_workers: options.CpuWorkers = 1,
    dtype: options.DtypeOption = None,
    kv: options.Kv = None,
    expand: options.Expand = None,
    weights: options.Weights = None,
) -> None:
    """Measure how well a model predicts a text; lower is better, 1 is perfect.

    The text is cut into windows of --ctx-size tokens (default 512); the second
    half of each is scored, as llama.cpp's tool does. Compare figures of the
    same text, window and tokenizer only.
    """
    from shadowlane.quality import WINDOW_TOKENS, check_text, check_window

    window = WINDOW_TOKENS if ctx_size is None else ctx_size
    check_window(window)
    engine = EngineOptions.of(locals(), ctx_size=window)
    if file is None:
        raise ValueError("a text is needed: -f FILE")
    text = read_text(file)
    with Stages() as stages:
        path = resolve_model(model, stages)
        check_text(path, text, window)
        found = of_model(path, text, window, engine, stages)
    print(json.dumps(found.as_object()) if json_output else found)


def of_model(
    path: Path,
    text: str,
    window: int,
    engine: EngineOptions,
    stages: Stages,
) -> Perplexity:
    """Start an engine on the model at `path` and have it read `text`."""
    from shadowlane.quality import logit_rows_for, measure_perplexity

    rows = logit_rows_for(path, window)
    with engine.open(path, stages, logit_rows=rows) as llm:
        return measure_perplexity(llm, text, window, stages)


def read_text(path: Path) -> str:
    """A text file whole. Raises OSError, ValueError for one that is empty or not UTF-8."""
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be a text in UTF-8; {error.reason}") from error
    if not text.strip():
        raise ValueError(f"{path} must hold some text; it is empty")
    return text
