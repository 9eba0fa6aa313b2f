"""`shadowlane plan`: where everything would live and how fast that would be, before any of it."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from shadowlane.cli import options
from shadowlane.cli.naming import typed_note
from shadowlane.cli.stages import Stages
from shadowlane.models import DEFAULT_MODEL, resolve_model

EPILOG = options.epilog(
    "shadowlane plan smollm2 --ram 64MiB",
    "shadowlane plan ./llama-3b --ram 4 --ctx-size 8192",
    "shadowlane plan ./llama-3b --ram 4 --cpu-workers 2 --groups",
    "shadowlane plan ./llama-3b --ram 4 --json | jq .tiers",
)


def plan(
    model: options.ModelArgument = DEFAULT_MODEL,
    json_output: options.JsonOutput = False,
    by_group: Annotated[
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
) -> None:
    """Show where each part of a model would go and why. Reads file headers, no weights.

    With --weights, the packed copy is written to the cache first, if it is
    not there yet. Ends with exit code 2, naming what is short and by how much, if nothing fits.
    """
    engine = options.EngineOptions(
        ram, gpu_memory, cpu_threads, cpu_workers, dtype, ctx_size, weights, kv, expand
    )
    with Stages() as stages:
        path = resolve_model(model, stages)
        stages("planning")
        from shadowlane.llm import plan_model

        planned = plan_model(path, progress=stages, **engine.arguments())
    if json_output:
        print(json.dumps(planned))
        return
    from rich.console import Console

    from shadowlane import report

    for note in planned.get("notes", ()):
        typer.echo(f"note: {typed_note(note)}", err=True)
    Console(highlight=False).print(report.plan_report(planned, by_group))
