"""`shadowlane plan`: where everything would live and how fast that would be, before any of it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from shadowlane.arguments import named_pins
from shadowlane.cli import options
from shadowlane.cli.engine_options import EngineOptions, refuse_shape
from shadowlane.cli.notes import say_notes
from shadowlane.cli.stages import Stages
from shadowlane.models import DEFAULT_MODEL, resolve_model
from shadowlane.ops.errors import ModelError

EPILOG = options.epilog(
    "shadowlane plan smollm2 --ram 64MiB",
    "shadowlane plan ./llama-3b --ram 4 --ctx-size 8192",
    "shadowlane plan ./llama-3b --ram 4 --cpu-workers 2 --groups",
    "shadowlane plan ./llama-3b --ram 4 --json | jq .tiers",
    "shadowlane plan llama-2-70b --hardware examples/hardware/rtx-4090-24gb.yaml",
    "shadowlane plan qwen3-30b-a3b --hardware my.yaml --export llama.cpp",
    "shadowlane plan smollm2 --hardware my.yaml --gpu-memory 100MiB --pin 'attn=gpu:0' --groups",
)


# Options about an engine, not about what a machine could do. In the environment they may stand, for
# other commands.
ONLY_OF_AN_ENGINE = (
    "cpu_threads",
    "cpu_workers",
    "dtype",
    "kv",
    "expand",
    "weights",
)


def plan(
    context: typer.Context,
    model: options.ModelArgument = DEFAULT_MODEL,
    json_output: options.JsonOutput = False,
    groups: Annotated[
        bool, options.option("--groups", help="One row per group instead of one per layer.")
    ] = False,
    ram: options.Ram = None,
    gpu_memory: options.GpuMemory = None,
    ctx_size: options.CtxSize = None,
    cpu_threads: options.CpuThreads = None,
    cpu_workers: options.CpuWorkers = 1,
    dtype: options.DtypeOption = None,
    kv: options.Kv = None,
    expand: options.Expand = None,
    weights: options.Weights = None,
    pins: options.Pins = None,
    strategy: options.Strategy = None,
    gpu_layers: options.GpuLayers = None,
    cpu_moe: options.CpuMoe = False,
    n_cpu_moe: options.NCpuMoe = None,
    hardware: Annotated[
        Path | None,
        options.option(
            "--hardware",
            metavar="FILE",
            help="Plan for the machine that this file describes, cards included, in place of this "
            "one (examples/hardware has some), beside layouts that people tune by hand. MODEL may "
            "then also be the name of a model that is not here, such as llama-2-70b. With --groups "
            "or a layout by hand (--strategy, --gpu-layers, --cpu-moe, --n-cpu-moe) the table is "
            "what `run` would start with there.",
            rich_help_panel="What if",
        ),
    ] = None,
    export: Annotated[
        str | None,
        options.option(
            "--export",
            **options.choice("llama.cpp"),
            help="With --hardware: print only the flags of llama.cpp that come closest to the "
            "plan, ready to paste after llama-server -m FILE.",
            rich_help_panel="What if",
        ),
    ] = None,
) -> None:
    """Show where each part of a model would go and why. Reads file headers, no weights.

    With --weights, the packed copy is written to the cache first, if it is
    not there yet. Ends with exit code 2, naming what is short and by how much, if nothing fits.

    With --hardware, all of it is predicted for another machine: what a card
    would bring, which layout would be fastest there and what would hold it up.
    Nothing runs: figures are emulated.
    """
    is_exact = groups or (strategy or "auto") != "auto" or gpu_layers is not None
    is_exact |= cpu_moe or n_cpu_moe is not None
    if hardware is not None and (export is not None or not is_exact):
        _refuse_engine_options(context)
        if export is not None and is_exact:
            raise ValueError("export needs to be without --groups or a layout by hand")
        if export is not None and json_output:
            raise ValueError("export needs to be without --json, which has the same flags in it")
        budgets = ram, gpu_memory, ctx_size
        _plan_for(model, hardware, named_pins(pins or ()), export, *budgets, json_output)
        return
    if export is not None:
        raise ValueError("export needs --hardware, the machine to plan for")
    when = "without --hardware" if hardware is None else "with --groups or a layout by hand"
    refuse_shape(model, when)
    engine = EngineOptions.of(locals())
    with Stages() as stages:
        path = resolve_model(model, stages)
        stages("reading the model")
        from shadowlane.llm import plan_model

        planned = plan_model(path, progress=stages, **engine.given)
    if json_output:
        print(json.dumps(planned))
        return
    from rich.console import Console

    from shadowlane import report

    say_notes(planned.get("notes", ()))
    Console(highlight=False).print(report.plan_report(planned, groups))


def _refuse_engine_options(context: typer.Context) -> None:
    for name in ONLY_OF_AN_ENGINE:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ValueError(
                f"{name} must be left out with --hardware, which takes --ram, --gpu-memory, "
                "--ctx-size, --pin, --json and --export; with --groups it may stand"
            )


def _plan_for(
    model: str,
    hardware: Path,
    pins: tuple[tuple[str, str], ...],
    export: str | None,
    ram: str | None,
    gpu_memory: str | None,
    context: int | None,
    json_output: bool,
) -> None:
    """For a machine that is described in a file."""
    from shadowlane.emulate import sizes_of_cards
    from shadowlane.shapes import known_shapes, load_hardware
    from shadowlane.sizes import parse_size
    from shadowlane.what_if import load_model, what_if

    machine = load_hardware(hardware)
    with Stages() as stages:
        path = None
        if model not in known_shapes():
            try:
                path = resolve_model(model, stages)
            except ModelError as error:
                known = ", ".join(known_shapes())
                raise ModelError(f"{error}; with --hardware also: {known}") from None
        stages("planning")
        planned = what_if(
            load_model(model, path, context),
            machine,
            context=context,
            ram=None if ram is None else parse_size(ram, "ram"),
            gpu_memory=sizes_of_cards(gpu_memory, machine),
            pins=dict(pins),
        )
    if export is not None:
        print(shlex.join(planned["llama_cpp"]))
    elif json_output:
        print(json.dumps(planned))
    else:
        from rich.console import Console

        from shadowlane.what_if_report import what_if_report

        Console(highlight=False).print(what_if_report(planned))
