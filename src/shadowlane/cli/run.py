"""`shadowlane run`: one prompt, its continuation as it is written, and what each lane did."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated

from shadowlane.arguments import check_routing
from shadowlane.cli import options
from shadowlane.cli.bars import LaneBars
from shadowlane.cli.engine_options import EngineOptions, refuse_shape, sampling_params
from shadowlane.cli.stages import Stages
from shadowlane.cli.summary import show_decisions, show_summary
from shadowlane.models import DEFAULT_MODEL, resolve_model
from shadowlane.texts import check_reads_text

EPILOG = options.epilog(
    'shadowlane run -p "Why is the sky blue?"',
    'shadowlane run smollm2 --ram 128MiB -p "Why is the sky blue?"',
    "shadowlane run ./my-model --raw -f story.txt --max-tokens 200 --temp 0.8 --seed 7",
    'echo "Name three rivers." | shadowlane run --json | jq .decode_tok_per_s',
    "shadowlane run -p Hello --hardware examples/hardware/two-rtx-3090.yaml --pin attn=gpu:1",
)

_NO_PROMPT = "a prompt is needed: -p TEXT, -f FILE, or text on standard input"


def run(
    model: options.ModelArgument = DEFAULT_MODEL,
    prompt: Annotated[
        str | None, options.option("--prompt", "-p", metavar="TEXT", help="What to answer.")
    ] = None,
    file: Annotated[
        str | None,
        options.option(
            "--file", "-f", metavar="FILE", help="Read the prompt from a file, or - for stdin."
        ),
    ] = None,
    raw: Annotated[
        bool,
        options.option("--raw", help="Continue the text as it stands, without chat template."),
    ] = False,
    max_tokens: options.MaxTokens = 256,
    json_output: options.JsonOutput = False,
    ram: options.Ram = None,
    gpu_memory: options.GpuMemory = None,
    ctx_size: options.CtxSize = None,
    no_prefetch: options.NoPrefetch = False,
    cpu_threads: options.CpuThreads = None,
    cpu_workers: options.CpuWorkers = 1,
    trace_routing: options.TraceRouting = None,
    hardware: options.Hardware = None,
    strategy: options.Strategy = None,
    gpu_layers: options.GpuLayers = None,
    cpu_moe: options.CpuMoe = False,
    n_cpu_moe: options.NCpuMoe = None,
    slowed: options.Slowed = None,
    emulate_seed: options.EmulateSeed = None,
    disturb: options.Disturb = None,
    explain: options.Explain = False,
    dtype: options.DtypeOption = None,
    kv: options.Kv = None,
    expand: options.Expand = None,
    weights: options.Weights = None,
    pins: options.Pins = None,
    temp: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repeat_penalty: options.RepeatPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
) -> None:
    """Answer one prompt. Text goes to standard output, progress and a summary to standard error.

    The prompt is -p TEXT, -f FILE, or what is piped in. Models that come with
    a chat template get it as a user's message; --raw continues it as it is.
    """
    engine = EngineOptions.of(locals())
    refuse_shape(model, "to run")
    params = sampling_params(
        max_tokens,
        temperature=temp,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        seed=seed,
        stop=stop,
    )
    check_routing(model, trace_routing, None)
    text = read_prompt(prompt, file)
    written: list[str] = []
    token_ids: list[int] = []
    with Stages() as stages:
        path = resolve_model(model, stages)
        check_reads_text(path, "run")
        with engine.open(path, stages) as llm:
            if raw or not llm.has_chat_template:
                chunks = llm.stream(text, params)
            else:
                chunks = llm.stream_chat([{"role": "user", "content": text}], params)
            with closing(chunks), ExitStack() as shown:
                bars: LaneBars | None = None
                for chunk in chunks:
                    stages.stop()
                    written.append(chunk.text)
                    token_ids.extend(chunk.token_ids)
                    if not json_output:
                        bars = bars or shown.enter_context(
                            LaneBars(llm, is_emulated=engine.is_emulated)
                        )
                        bars.write(chunk.text)
            stats = llm.stats()
    from shadowlane import report

    if json_output:
        print(json.dumps(report.run_object("".join(written), token_ids, stats)))
        return
    if not "".join(written).endswith("\n"):
        print(flush=True)
    show_summary(stats)
    if explain:
        show_decisions(stats, is_by_hand=engine.is_by_hand)


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The prompt from whichever of the three places was used. Raises ValueError for none or two."""
    if prompt is not None and file is not None:
        raise ValueError("a prompt must come from one place; got both --prompt and --file")
    if prompt is None:
        if file is not None and file != "-":
            prompt = Path(file).read_bytes().decode()
        elif file == "-" or not sys.stdin.isatty():
            prompt = sys.stdin.buffer.read().decode()
        else:
            raise ValueError(_NO_PROMPT)
        if not prompt and file is None:
            raise ValueError(_NO_PROMPT)
    if not prompt.strip():
        raise ValueError(f"a prompt must hold some text; got {prompt!r}")
    return prompt
