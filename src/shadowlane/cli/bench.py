"""`shadowlane bench`: prompt and decode speed over repetitions, in the form others publish."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shadowlane.arguments import check_routing
from shadowlane.cli import options
from shadowlane.cli.engine_options import EngineOptions, refuse_shape
from shadowlane.cli.stages import Stages
from shadowlane.cli.summary import show_decisions, show_summary
from shadowlane.models import DEFAULT_MODEL, resolve_model

if TYPE_CHECKING:
    from shadowlane import LLM
    from shadowlane.report import BenchRow

EPILOG = options.epilog(
    "shadowlane bench smollm2",
    "shadowlane bench ./llama-3b --ram 4 -pp 512 -tg 32 -r 3",
    "shadowlane bench smollm2 --output json > result.json",
    "shadowlane bench llama-2-70b --compare all --hardware examples/hardware/rtx-4090-24gb.yaml",
    "shadowlane bench qwen3-30b-a3b --compare cpu-moe,shadowlane --hardware my.yaml --plot l.svg",
)

# Options that measure this machine, and those that compare on another. In the environment both may
# stand, for other commands.
ONLY_HERE = (
    "prompt_tokens",
    "decode_tokens",
    "repetitions",
    "no_prefetch",
    "cpu_threads",
    "cpu_workers",
    "replay_routing",
    "dtype",
    "kv",
    "expand",
    "weights",
    "pins",
    "strategy",
    "gpu_layers",
    "cpu_moe",
    "n_cpu_moe",
    "slowed",
    "emulate_seed",
    "disturb",
    "explain",
)
ONLY_COMPARED = ("contexts", "prompts", "routing", "plot", "seed")
_COMPARE = "Compare, emulated"


def bench(
    context: typer.Context,
    model: options.ModelArgument = DEFAULT_MODEL,
    prompt_tokens: Annotated[
        int,
        options.option(
            "-pp",
            "--pp",
            metavar="N",
            **options.whole_number(0),
            help="Tokens to read; 0 skips it.",
        ),
    ] = 512,
    decode_tokens: Annotated[
        int,
        options.option(
            "-tg",
            "--tg",
            metavar="N",
            **options.whole_number(0),
            help="Tokens to write; 0 skips it.",
        ),
    ] = 128,
    repetitions: Annotated[
        int,
        options.option(
            "-r", "--repetitions", metavar="N", **options.whole_number(1), help="Times to measure."
        ),
    ] = 5,
    output: Annotated[
        str,
        options.option(
            "--output", "-o", **options.choice("md", "json"), help="Form of the result."
        ),
    ] = "md",
    ram: options.Ram = None,
    gpu_memory: options.GpuMemory = None,
    ctx_size: options.CtxSize = None,
    no_prefetch: options.NoPrefetch = False,
    cpu_threads: options.CpuThreads = None,
    cpu_workers: options.CpuWorkers = 1,
    replay_routing: options.ReplayRouting = None,
    dtype: options.DtypeOption = None,
    kv: options.Kv = None,
    expand: options.Expand = None,
    weights: options.Weights = None,
    pins: options.Pins = None,
    hardware: Annotated[
        Path | None,
        options.option(
            "--hardware",
            metavar="FILE",
            help="Measure on the machine that this file describes, emulated; with --compare: the "
            "machine to compare on. examples/hardware has some. --ram, --gpu-memory (of each "
            "card; 0: without cards), --ctx-size and --output go with both.",
            rich_help_panel="Cards",
        ),
    ] = None,
    strategy: options.Strategy = None,
    gpu_layers: options.GpuLayers = None,
    cpu_moe: options.CpuMoe = False,
    n_cpu_moe: options.NCpuMoe = None,
    slowed: options.Slowed = None,
    emulate_seed: options.EmulateSeed = None,
    disturb: options.Disturb = None,
    explain: options.Explain = False,
    compare: Annotated[
        str | None,
        options.option(
            "--compare",
            metavar="all|NAME,...",
            help="Compare layouts that people tune by hand with ours on the machine of --hardware, "
            "emulated: all of them, or some: cpu, attention-gpu, layer-split, 'layer-split, KV in "
            "RAM', 'layer-split, pipelined', row-split, layer-stream, cpu-moe, 'cpu-moe, KV in "
            "RAM', 'layer-split + cpu-moe', static (our plan, kept), shadowlane (our plan with its "
            "shadow). Nothing runs; MODEL may be a name such as llama-2-70b.",
            rich_help_panel=_COMPARE,
        ),
    ] = None,
    contexts: Annotated[
        str | None,
        options.option(
            "--contexts",
            metavar="N,...",
            help="Decode after so many tokens; 0: none. Default: 512 and 3968.",
            rich_help_panel=_COMPARE,
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        options.option(
            "--prompts",
            metavar="N,...",
            help="Read so many tokens; 0: none. Default: 512, 2048 and 8192, as far as the "
            "context allows.",
            rich_help_panel=_COMPARE,
        ),
    ] = None,
    routing: Annotated[
        Path | None,
        options.option(
            "--routing",
            metavar="FILE",
            help="Of a mixture of experts: recorded routing. Its first half says which experts are "
            "hot, its second half what is chosen.",
            rich_help_panel=_COMPARE,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        options.option(
            "--plot",
            metavar="FILE",
            help="Draw the lanes of one step of the best layout by hand and of ours: FILE.svg.",
            rich_help_panel=_COMPARE,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        options.option(
            "--seed",
            metavar="N",
            **options.whole_number(0),
            help="Which world: how far its rates are off from the hardware file, up to 30 % either "
            "way, which no planner is told. Default: 0.",
            rich_help_panel=_COMPARE,
        ),
    ] = None,
) -> None:
    """Measure tokens per second, mean ± standard deviation, after one uncounted repetition.

    "pp" is the reading of a prompt of random tokens, "tg" the writing of
    tokens after a prompt of one token, each measured for itself. The context
    is as long as the longer of the two needs, unless --ctx-size says more.

    With --hardware the lanes take the time of an emulated machine, cards
    included, and tg alone is measured: of prompts emulation says too little.

    With --compare and --hardware nothing is measured here: layouts by hand,
    each at its best setting, and ours do the same work on an emulated machine
    whose rates are off from its file. Every figure is emulated; for prompts,
    ratios alone are shown.
    """
    if compare is not None:
        if compare.startswith("-"):  # an option that was taken for the value
            raise ValueError(f"compare must be all, or names of layouts; got {compare}")
        if hardware is None:
            raise ValueError("compare needs --hardware, the machine to compare on")
        _refuse(context, ONLY_HERE, "be left out with --compare, which runs nothing on this one")
        from shadowlane.cli.compare import Asked, compare_on

        compare_on(
            model,
            Asked(
                compare,
                hardware,
                contexts,
                prompts,
                ctx_size,
                ram,
                gpu_memory,
                routing,
                plot,
                seed or 0,
                output,
            ),
        )
        return
    _refuse(context, ONLY_COMPARED, "stand with --compare all, say")
    if hardware is not None:
        if prompt_tokens and _is_typed(context, "prompt_tokens"):
            raise ValueError(
                "-pp must be left out with --hardware: of prompts emulation says too little"
            )
        prompt_tokens = 0
    engine = EngineOptions.of(locals())
    refuse_shape(model, "to run")
    if prompt_tokens == 0 and decode_tokens == 0:
        raise ValueError("one of -pp and -tg must be above 0; got 0 and 0")
    # The token after a prompt needs a place too; "tg" starts from a prompt of one token.
    needed = max(prompt_tokens + 1, decode_tokens + 2)
    if ctx_size is not None and ctx_size < needed:
        raise ValueError(
            f"ctx_size must be at least {needed} for -pp {prompt_tokens} and "
            f"-tg {decode_tokens}; got {ctx_size}"
        )
    check_routing(model, None, replay_routing)
    engine = EngineOptions.of(engine.given, ctx_size=ctx_size or needed)
    from shadowlane import report

    rows: list[BenchRow] = []
    with Stages() as stages:
        path = resolve_model(model, stages)
        if ctx_size is None:
            _check_needed(path, needed)
        with engine.open(path, stages) as llm:
            if prompt_tokens:
                speeds = _speeds(llm, prompt_tokens, 1, repetitions, stages)
                rows.append(report.BenchRow(f"pp{prompt_tokens}", speeds))
            if decode_tokens:
                # The first token comes from the prompt, so one more makes `decode_tokens` steps.
                speeds = _speeds(llm, 1, decode_tokens + 1, repetitions, stages)
                rows.append(report.BenchRow(f"tg{decode_tokens}", speeds))
            stats = llm.stats()
    if output == "json":
        print(json.dumps(report.bench_object(model, rows, stats)))
    else:
        print(report.bench_markdown(model, rows, stats))
    if engine.is_emulated:
        show_summary(stats)
    if explain:
        show_decisions(stats, is_by_hand=engine.is_by_hand)


def _refuse(context: typer.Context, names: Sequence[str], rule: str) -> None:
    for name in names:
        if _is_typed(context, name):
            raise ValueError(f"{name} must {rule}")


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _check_needed(path: Path, needed: int) -> None:
    """Raise ValueError where the context that the measurement takes is more than the model's."""
    from shadowlane.ops.files import open_model

    most = open_model(path).config.get("max_position_embeddings")
    if isinstance(most, int) and needed > most:
        raise ValueError(
            f"-pp and -tg must fit the model's context of {most} tokens; they need {needed}"
        )


def _speeds(
    llm: LLM, prompt_tokens: int, max_tokens: int, repetitions: int, stages: Stages
) -> tuple[float, ...]:
    """Tokens per second of each counted repetition: of the prompt if only one token is written."""
    from shadowlane import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    figure = "prefill_tok_per_s" if max_tokens == 1 else "decode_tok_per_s"
    name = f"pp{prompt_tokens}" if max_tokens == 1 else f"tg{max_tokens - 1}"
    chance = random.Random(prompt_tokens)
    speeds: list[float] = []
    for repetition in range(repetitions + 1):
        stages(f"measuring {name}", repetition / (repetitions + 1))
        # A new prompt each time: a kept KV cache would make the second reading free.
        prompt = [chance.randrange(llm.vocab_size) for _ in range(prompt_tokens)]
        with closing(llm.stream(prompt, params)) as chunks:
            for _ in chunks:
                pass
        if repetition:  # the first one warms caches and is not counted
            speeds.append(llm.stats()[figure])
    return tuple(speeds)
