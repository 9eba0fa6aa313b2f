"""`shadowlane profile`: measure this machine with this model again."""

from __future__ import annotations

import json

from shadowlane.cli import options
from shadowlane.cli.engine_options import EngineOptions
from shadowlane.cli.stages import Stages
from shadowlane.models import DEFAULT_MODEL, resolve_model

EPILOG = options.epilog("shadowlane profile smollm2", "shadowlane profile ./llama-3b --json")


def profile(
    model: options.ModelArgument = DEFAULT_MODEL,
    json_output: options.JsonOutput = False,
    cpu_threads: options.CpuThreads = None,
    cpu_workers: options.CpuWorkers = 1,
    dtype: options.DtypeOption = None,
    kv: options.Kv = None,
    weights: options.Weights = None,
) -> None:
    """Measure operators, memory and disk, and keep the figures for later plans.

    Happens by itself before the first run of a model. Do it again after a
    change of hardware, or if something kept the machine busy the first time.
    Figures are kept for each choice of types and threads.
    """
    engine = EngineOptions.of(locals())
    with Stages() as stages:
        path = resolve_model(model, stages)
        stages("measuring")
        from shadowlane.llm import profile_model

        measured = profile_model(path, refresh=True, progress=stages, **engine.given)
    if json_output:
        print(json.dumps(measured))
        return
    from rich.console import Console

    from shadowlane import report

    console = Console(highlight=False, soft_wrap=True)
    figures = measured.pop("groups", ())
    console.print(report.tree(measured))
    if figures:
        console.print()
        console.print(report.group_figures(figures))
