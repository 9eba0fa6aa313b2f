"""The options that several commands share, declared once: flag, environment variable, help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shadowlane.arguments import DTYPES, KV_NAMES, PACK_NAMES
from shadowlane.emulate import STRATEGIES
from shadowlane.models import DEFAULT_MODEL

ENVIRONMENT_NOTE = (
    "Each option can also be set in the environment: [bold]--cpu-threads 4[/bold] is "
    "[bold]SHADOWLANE_CPU_THREADS=4[/bold]."
)


def option(*names: str, help: str, **settings: Any) -> Any:
    """A typer option whose environment variable follows from its long name."""
    long_name = max((name.split("/")[0] for name in names), key=len)  # --this/--no-this is one
    variable = "SHADOWLANE_" + long_name.lstrip("-").replace("-", "_").upper()
    return typer.Option(*names, help=help, envvar=variable, show_envvar=False, **settings)


def whole_number(least: int) -> dict[str, Any]:
    """Settings of an option that takes a whole number, whose error says what was given."""

    def parse(given: str | int) -> int:
        try:
            number = int(given)
        except ValueError:
            raise typer.BadParameter(f"must be a whole number; got {given!r}") from None
        if number < least:
            raise typer.BadParameter(f"must be at least {least}; got {number}")
        return number

    return {"parser": parse}


def number() -> dict[str, Any]:
    """Settings of an option that takes any number; the sampler knows the ranges."""

    def parse(given: str | float) -> float:
        try:
            return float(given)
        except ValueError:
            raise typer.BadParameter(f"must be a number; got {given!r}") from None

    return {"parser": parse}


def choice(*names: str) -> dict[str, Any]:
    """Settings of an option that takes one of `names`."""

    def parse(given: str) -> str:
        if given not in names:
            rule = "must be" if len(names) == 1 else "must be one of"
            raise typer.BadParameter(f"{rule} {', '.join(names)}; got {given!r}")
        return given

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return {"parser": parse, "metavar": "|".join(names), "autocompletion": complete}


def epilog(*examples: str) -> str:
    """The end of a command's help: examples that can be pasted, one per line."""
    lines = "\n\n".join(f"  [cyan]{example}[/cyan]" for example in examples)
    return f"[bold]Examples[/bold]\n\n{lines}\n\n{ENVIRONMENT_NOTE}"


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        envvar="SHADOWLANE_MODEL",
        show_envvar=False,
        help=f"{DEFAULT_MODEL}, a directory, a .gguf file, or a Hugging Face id such as org/name.",
    ),
]

_MEMORY = "Memory"
_COMPUTE = "Compute"
_SAMPLING = "Sampling"
_CARDS = "Cards"

Ram = Annotated[
    str | None,
    option(
        "--ram",
        metavar="SIZE",
        help="Most RAM for weights, KV cache and scratch: 6, 6GiB, 512MiB, 1.5GB (a bare number is "
        "GiB). The rest streams from disk. Default: what is free, less a headroom.",
        rich_help_panel=_MEMORY,
    ),
]
GpuMemory = Annotated[
    str | None,
    option(
        "--gpu-memory",
        metavar="SIZE",
        help="Most memory of each card for weights, KV cache and what is brought, or one size for "
        "each: 6GiB,4GiB; auto: what is free, less a headroom. Without --hardware these are the "
        "cards that are here, on which activations and the driver's context come beside it.",
        rich_help_panel=_MEMORY,
    ),
]
Hardware = Annotated[
    Path | None,
    option(
        "--hardware",
        metavar="FILE",
        help="Emulate the machine that this file describes, cards included (examples/hardware has "
        "some): the same tokens, in its time, told as its seconds.",
        rich_help_panel=_CARDS,
    ),
]
Strategy = Annotated[
    str | None,
    option(
        "--strategy",
        **{**choice(*STRATEGIES), "metavar": "LAYOUT"},
        help="Place groups over cards by this layout instead of the best that is found: "
        "layer-split, 'layer-split, pipelined', layer-stream, row-split, attention-gpu, cpu-moe or "
        "cpu, each with its best number of layers.",
        rich_help_panel=_CARDS,
    ),
]
GpuLayers = Annotated[
    int | None,
    option(
        "--gpu-layers",
        metavar="N",
        **whole_number(0),
        help="Keep the first N layers on cards, the head counted as one more, and compute "
        "the others in RAM. More than there are means all.",
        rich_help_panel=_CARDS,
    ),
]
CpuMoe = Annotated[
    bool,
    option(
        "--cpu-moe",
        help="Keep all but the experts of a mixture on cards.",
        rich_help_panel=_CARDS,
    ),
]
NCpuMoe = Annotated[
    int | None,
    option(
        "--n-cpu-moe",
        metavar="N",
        **whole_number(0),
        help="The same for the first N layers; the experts of others are on cards too. More than "
        "there are means all.",
        rich_help_panel=_CARDS,
    ),
]
Pins = Annotated[
    list[str] | None,
    option(
        "--pin",
        metavar="REGEX=HOME",
        help="Keep the groups whose names hold REGEX on a card and compute them there (gpu:0), in "
        "RAM (cpu) or only on disk (disk): 'experts=cpu', '^(0|1)\\.=gpu:0'. `plan --groups` has "
        "the names. May be given several times, and beside all other options about placement.",
        rich_help_panel=_MEMORY,
    ),
]
Slowed = Annotated[
    float | None,
    option(
        "--slowed",
        metavar="X",
        **number(),
        help="Run an emulated machine X times slower than it would be. Default: as slow as this "
        "machine needs to be through in time.",
        rich_help_panel=_CARDS,
    ),
]
EmulateSeed = Annotated[
    int | None,
    option(
        "--emulate-seed",
        metavar="N",
        **whole_number(0),
        help="Hide a factor between 0.7 and 1.3 on each rate of the emulated machine, drawn from "
        "this seed, for the planner to learn.",
        rich_help_panel=_CARDS,
    ),
]
Disturb = Annotated[
    list[str] | None,
    option(
        "--disturb",
        metavar="TOKENS:WHAT",
        help="Let other programs take of the emulated machine: 40:cpu=0.4,vram=1GiB leaves 0.4 of "
        "the cores and takes 1 GiB of each card from 40 tokens on; 80: gives all back. May be "
        "given several times. Names: cpu, gpu, link, disk, vram, ram.",
        rich_help_panel=_CARDS,
    ),
]
Explain = Annotated[
    bool,
    option(
        "--explain",
        help="Say of each change of plan what was measured, what moved, what was expected and what "
        "came of it.",
    ),
]
CtxSize = Annotated[
    int | None,
    option(
        "--ctx-size",
        metavar="TOKENS",
        **whole_number(1),
        help="Tokens of context to hold. Default: the model's, at most 4096, fewer if the budget "
        "is short.",
        rich_help_panel=_MEMORY,
    ),
]
Kv = Annotated[
    str | None,
    option(
        "--kv",
        **choice(*KV_NAMES),
        help="Cache keys and values in 8 bits: half the memory of bfloat16 and half the bytes "
        "that long contexts read. Default: the compute type.",
        rich_help_panel=_MEMORY,
    ),
]
Expand = Annotated[
    bool | None,
    option(
        "--expand/--no-expand",
        help="Copies of packed weights in the compute type, which make prompts faster, in RAM that "
        "is left over: as many as fit, or none. Default: if --ram leaves room and it pays.",
        rich_help_panel=_MEMORY,
    ),
]
NoPrefetch = Annotated[
    bool,
    option(
        "--no-prefetch",
        help="Read a block only when it is needed. Slower; the tokens are the same.",
        rich_help_panel=_MEMORY,
    ),
]
TraceRouting = Annotated[
    Path | None,
    option(
        "--trace-routing",
        metavar="FILE",
        help="Of a mixture of experts: write which ones its routers choose to FILE (.jsonl, or "
        ".jsonl.gz), for `shadowlane simulate`.",
        rich_help_panel=_COMPUTE,
    ),
]
ReplayRouting = Annotated[
    Path | None,
    option(
        "--replay-routing",
        metavar="FILE",
        help="Of a mixture of experts: let its routers choose what FILE says, to measure speed "
        "with recorded routing. What is written then means nothing.",
        rich_help_panel=_COMPUTE,
    ),
]
CpuThreads = Annotated[
    int | None,
    option(
        "--cpu-threads",
        metavar="N",
        **whole_number(1),
        help="Threads of all compute lanes together. Default: one per core that is ours to use.",
        rich_help_panel=_COMPUTE,
    ),
]
CpuWorkers = Annotated[
    int,
    option(
        "--cpu-workers",
        metavar="N",
        **whole_number(1),
        help="Compute lanes, each with its own cores, that share the rows of every group.",
        rich_help_panel=_COMPUTE,
    ),
]
DtypeOption = Annotated[
    str | None,
    option(
        "--dtype",
        **choice(*DTYPES),
        help="Number format of activations and KV cache. Default: the model's.",
        rich_help_panel=_COMPUTE,
    ),
]

Weights = Annotated[
    str | None,
    option(
        "--weights",
        **choice(*PACK_NAMES),
        help="Run a safetensors model from weights packed to 8 or 4 bits. The packed copy is "
        "written to the cache at the first use. Default: the weights as they are.",
        rich_help_panel=_MEMORY,
    ),
]

MaxTokens = Annotated[
    int,
    option("--max-tokens", "-n", metavar="N", help="Most tokens to write.", **whole_number(1)),
]
Temperature = Annotated[
    float | None,
    option(
        "--temp",
        metavar="T",
        **number(),
        help="Temperature; 0, the default, always takes the likeliest token.",
        rich_help_panel=_SAMPLING,
    ),
]
TopK = Annotated[
    int | None,
    option(
        "--top-k",
        metavar="K",
        **whole_number(0),
        help="Keep the K likeliest tokens; 0 keeps all.",
        rich_help_panel=_SAMPLING,
    ),
]
TopP = Annotated[
    float | None,
    option(
        "--top-p",
        metavar="P",
        **number(),
        help="Keep the likeliest tokens that together reach probability P.",
        rich_help_panel=_SAMPLING,
    ),
]
MinP = Annotated[
    float | None,
    option(
        "--min-p",
        metavar="P",
        **number(),
        help="Drop tokens less likely than P times the likeliest.",
        rich_help_panel=_SAMPLING,
    ),
]
RepeatPenalty = Annotated[
    float | None,
    option(
        "--repeat-penalty",
        metavar="X",
        **number(),
        help="Above 1 makes tokens that occurred before less likely.",
        rich_help_panel=_SAMPLING,
    ),
]
Seed = Annotated[
    int | None,
    option(
        "--seed",
        metavar="N",
        **whole_number(0),
        help="Makes sampling repeatable.",
        rich_help_panel=_SAMPLING,
    ),
]
Stop = Annotated[
    list[str] | None,
    # engine_options.py reads its environment variable: typer would split it at every space.
    typer.Option(
        "--stop",
        metavar="TEXT",
        help="End before this text; may be given several times (SHADOWLANE_STOP: one per line).",
        rich_help_panel=_SAMPLING,
    ),
]
JsonOutput = Annotated[
    bool, option("--json", help="Print one JSON object on standard output instead of text.")
]
