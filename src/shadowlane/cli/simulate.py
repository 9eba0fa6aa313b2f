"""`shadowlane simulate`: what each cache policy would make of recorded routing.

A trace knows the sizes of experts and dense parts. What else RAM holds (KV cache, scratch) only a
model's headers tell: with a model, as many experts are in RAM as `run` would hold.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shadowlane.cli import options
from shadowlane.cli.engine_options import EngineOptions
from shadowlane.cli.notes import say_notes
from shadowlane.cli.stages import Stages
from shadowlane.sizes import format_size, parse_size

if TYPE_CHECKING:
    from shadowlane.planner.expert_sim import Ranked, Ranking, Speeds
    from shadowlane.planner.placement import Placement
    from shadowlane.planner.routing import RoutedModel, Trace

EPILOG = options.epilog(
    "shadowlane simulate ./mixture --routing run.jsonl.gz --ram 6",
    "shadowlane simulate --routing run.jsonl.gz --slots 1536 --disk-speed 3GB --dram-speed 40GB",
    "shadowlane simulate --ram 6 --look-ahead 0.8 --json | jq .policies",
)

SYNTHETIC_TOKENS = 256
THIN_TOKENS = 64  # fewer scored, or fewer that choose what is hot, say little


def simulate(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="The mixture that would run: its headers say what else RAM has to hold.",
        ),
    ] = None,
    routing: Annotated[
        Path | None,
        options.option(
            "--routing",
            metavar="FILE",
            help="Recorded routing. Default: synthetic, 48 layers of 128 experts, top 8.",
        ),
    ] = None,
    ram: Annotated[
        str | None,
        options.option(
            "--ram",
            metavar="SIZE",
            help="RAM: with MODEL, shared out as `run` does; without, for dense parts and experts "
            "alone (a bare number is GiB).",
        ),
    ] = None,
    slots: Annotated[
        int | None,
        options.option(
            "--slots", metavar="N", **options.whole_number(1), help="Experts in RAM, not --ram."
        ),
    ] = None,
    disk_speed: Annotated[
        str | None,
        options.option(
            "--disk-speed",
            metavar="SIZE",
            help="Bytes per second of reads of one expert. Default: as measured of MODEL, or 1GB.",
        ),
    ] = None,
    dram_speed: Annotated[
        str | None,
        options.option(
            "--dram-speed",
            metavar="SIZE",
            help="Bytes per second of all compute lanes. Default: as measured of MODEL, or 20GB.",
        ),
    ] = None,
    dense: Annotated[
        str | None,
        options.option(
            "--dense",
            metavar="SIZE",
            help="What each token reads besides experts. Default: what the file says.",
        ),
    ] = None,
    look_ahead: Annotated[
        float | None,
        options.option(
            "--look-ahead",
            metavar="RECALL",
            **options.number(),
            help="Read ahead what the next router seems to want, and find this part (0 to 1) of "
            "it. Default: no look-ahead.",
        ),
    ] = None,
    ctx_size: options.CtxSize = None,
    kv: options.Kv = None,
    dtype: options.DtypeOption = None,
    cpu_threads: options.CpuThreads = None,
    cpu_workers: options.CpuWorkers = 1,
    json_output: options.JsonOutput = False,
) -> None:
    """Replay recorded routing of a mixture of experts through every cache policy.

    The first half of the file chooses what is hot, the second half is
    scored. No weights are read: of MODEL only headers, and what was measured
    of it. Options below "Memory" and "Compute" are those of run, and need MODEL.
    """
    if ram is None and slots is None:
        raise ValueError("one of --ram and --slots must be given; got neither")
    if ram is not None and slots is not None:
        raise ValueError("only one of --ram and --slots may be given; got both")
    if look_ahead is not None and not 0 <= look_ahead <= 1:
        raise ValueError(f"look_ahead must be between 0 and 1; got {look_ahead:g}")
    of_run = {
        "ctx_size": ctx_size,
        "kv": kv,
        "dtype": dtype,
        "cpu_threads": cpu_threads,
        "cpu_workers": None if cpu_workers == 1 else cpu_workers,
    }
    idle = [name for name, value in of_run.items() if value is not None]
    if idle and (model is None or ram is None):
        raise ValueError(f"{idle[0]} needs MODEL and --ram: it is about what RAM holds in a run")
    ram_nbytes = None if ram is None else parse_size(ram, "--ram")
    disk_bytes_per_s = None if disk_speed is None else parse_size(disk_speed, "--disk-speed")
    dram_bytes_per_s = None if dram_speed is None else parse_size(dram_speed, "--dram-speed")
    dense_nbytes = None if dense is None else parse_size(dense, "--dense")
    if routing is not None:
        from shadowlane.planner.routing_files import READ_ENDINGS, check_ending

        check_ending(routing, READ_ENDINGS, "routing")

    from shadowlane.planner import cost, expert_sim

    with Stages() as stages:
        run: Run | None = None
        if model is not None:
            engine = EngineOptions.of(locals())
            run = _run_of(model, engine, is_planned=ram is not None, tell=stages)
        stages("reading the routing")
        trace = _trace(routing)
        if run is not None:
            trace = _as_of(trace, run.routed)
        if dense_nbytes is not None:
            trace = dataclasses.replace(trace, model=_with_dense(trace.model, dense_nbytes))
        placement = None if run is None else run.placement
        measured = (None, None) if run is None else (run.disk_bytes_per_s, run.dram_bytes_per_s)
        speeds = expert_sim.Speeds(
            disk_bytes_per_s or measured[0] or cost.ASSUMED_DISK_BYTES_PER_S,
            dram_bytes_per_s or measured[1] or cost.ASSUMED_DRAM_BYTES_PER_S,
            expert_sim.MEASURED_DELAYS,
        )
        num_slots = (
            _slots(trace.model, ram_nbytes, slots) if placement is None else placement.expert_slots
        )
        ranking = expert_sim.rank(
            trace,
            num_slots,
            speeds,
            recall=look_ahead,
            progress=lambda _name, part: stages("replaying", part),
        )
    say_notes(_notes(trace, ranking, run, is_budget=ram is not None))
    if json_output:
        print(json.dumps(_object(trace, ranking, speeds, routing, placement)))
        return
    sources = [
        f"{name} {'assumed' if known is None else 'as measured'}"
        for name, given, known in zip(
            ("disk", "DRAM"), (disk_speed, dram_speed), measured, strict=True
        )
        if given is None
    ]
    _show(trace, ranking, speeds, sources, placement)


@dataclass(frozen=True, slots=True)
class Run:
    """What is known of a run of a model before it begins."""

    routed: RoutedModel
    placement: Placement | None  # what RAM would hold; None: slots were given
    disk_bytes_per_s: float | None  # of reads of an expert; None: unmeasured
    dram_bytes_per_s: float | None


def _run_of(
    name: str,
    engine: EngineOptions,
    *,
    is_planned: bool,
    tell: Callable[[str, float | None], None],
) -> Run:
    """From headers, and from what was measured of the model on this machine, if anything was."""
    from shadowlane.actors.preview import routed_plan
    from shadowlane.engine_arguments import make_spec
    from shadowlane.models import resolve_model

    path = resolve_model(name, tell)
    arguments = dict(engine.given)
    if not is_planned:  # everything in RAM: only sizes are asked for
        arguments["ram"] = 1 << 60
    routed, placement, cost = routed_plan(make_spec(path, **arguments))
    profile = cost.profile
    return Run(
        routed,
        placement if is_planned else None,
        cost.disk_bytes_per_s(max(routed.expert_nbytes), contended=False)
        if profile is not None and profile.disk
        else None,
        None if profile is None else profile.dram_bytes_per_s,
    )


def _as_of(trace: Trace, model: RoutedModel) -> Trace:
    """The same choices with the sizes of `model`, whose shape they must have."""
    shape = (model.num_layers, model.num_experts, model.top_k)
    if (trace.num_layers, trace.num_experts, trace.top_k) != shape:
        trace.check(model.name, *shape)
    return dataclasses.replace(trace, model=model)


def _notes(trace: Trace, ranking: Ranking, run: Run | None, *, is_budget: bool) -> list[str]:
    """What has to be known to read the figures rightly."""
    notes = []
    if is_budget and run is None:
        notes.append(
            "RAM is counted for dense parts and experts alone: a trace does not say what KV cache "
            "and scratch take, so `run` holds fewer experts; name the MODEL to count them"
        )
    thin = min(ranking.scored_tokens, ranking.heat_tokens)
    if thin < THIN_TOKENS:
        notes.append(
            f"{ranking.scored_tokens} tokens are scored and {ranking.heat_tokens} chose what is "
            f"hot: hit rates of fewer than {THIN_TOKENS} say little"
        )
    if run is not None and run.placement is not None:
        notes += [each for each in run.placement.notes if "context" in each]
    return notes


def _trace(path: Path | None) -> Trace:
    if path is None:
        from shadowlane.planner.routing import synthesize

        return synthesize(num_tokens=SYNTHETIC_TOKENS)
    from shadowlane.planner.routing_files import read_trace

    return read_trace(path)


def _with_dense(model: RoutedModel, nbytes: int) -> RoutedModel:
    """The same model, with `nbytes` spread evenly over the layers."""
    share, over = divmod(nbytes, model.num_layers)
    dense = tuple(share + (layer < over) for layer in range(model.num_layers))
    return dataclasses.replace(model, dense_nbytes=dense, outside_nbytes=0)


def _slots(model: RoutedModel, ram: int | None, slots: int | None) -> int:
    from shadowlane.planner.expert_sim import slots_in

    if slots is not None:
        num_experts = model.num_layers * model.num_experts
        if not model.top_k <= slots <= num_experts:
            raise ValueError(
                f"slots must be between {model.top_k}, one route, and {num_experts}, "
                f"all experts; got {slots}"
            )
        return slots
    assert ram is not None
    return slots_in(model, ram)


def _object(
    trace: Trace,
    ranking: Ranking,
    speeds: Speeds,
    routing: Path | None,
    placement: Placement | None,
) -> dict[str, object]:
    model = trace.model
    return {
        "routing": None if routing is None else str(routing),  # null: synthetic
        "model": model.name,
        "title": model.title,
        "layers": model.num_layers,
        "experts": model.num_experts,
        "top_k": model.top_k,
        "dense_nbytes": model.all_dense_nbytes,
        "run": None if placement is None else _parts(placement),  # null: RAM was not shared out
        **dataclasses.asdict(speeds),
        **dataclasses.asdict(ranking),
    }


def _parts(placement: Placement) -> dict[str, int]:
    """What a run's RAM would hold."""
    return {
        "ram": placement.ram,
        "dense_nbytes": placement.weights_nbytes,
        "experts_nbytes": placement.experts_nbytes,
        "kv_nbytes": placement.kv_nbytes,
        "context_tokens": placement.context_tokens,
        "scratch_nbytes": placement.scratch_nbytes + placement.constants_nbytes,
    }


def _show(
    trace: Trace,
    ranking: Ranking,
    speeds: Speeds,
    sources: list[str],
    placement: Placement | None,
) -> None:
    """sources: where speeds come from that nobody gave."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from shadowlane import report
    from shadowlane.planner.experts import policy_named

    model = trace.model
    num_experts = model.num_layers * model.num_experts
    console = Console(highlight=False)
    console.print(
        Text(
            f"{model.label}: {model.num_layers} layers of {model.num_experts} experts, "
            f"top {model.top_k}; {ranking.slots} of {num_experts} experts in RAM "
            f"({100 * ranking.slots / num_experts:.1f} %)"
        )
    )
    if placement is not None:
        parts = _parts(placement)
        sizes = {name: format_size(nbytes) for name, nbytes in parts.items()}
        console.print(
            Text(
                f"as `run` with {sizes['ram']}: dense parts {sizes['dense_nbytes']}, experts "
                f"{sizes['experts_nbytes']}, KV cache {sizes['kv_nbytes']} for "
                f"{parts['context_tokens']} tokens, scratch {sizes['scratch_nbytes']}"
            )
        )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("policy", no_wrap=True, min_width=len("frequency/global"))
    for title in ("hit rate", "read per token", "wasted", "predicted", "of the bound"):
        table.add_column(title, justify="right")

    def add(row: Ranked, style: str = "") -> None:
        table.add_row(
            row.name,
            f"{100 * row.hit_rate:.1f} %",
            format_size(round(row.nbytes_per_token)),
            format_size(round(row.wasted_nbytes_per_token)),
            report.rate(row.tok_per_s),
            f"{100 * row.tok_per_s / ranking.bound_tok_per_s:.0f} %",
            style=style,
        )

    for row in ranking.policies:
        add(row)
    add(ranking.on_demand, "dim")
    add(ranking.optimum, "dim")
    console.print(table)
    disk, dram = speeds.disk_bytes_per_s, speeds.dram_bytes_per_s
    guess = f" ({', '.join(sources)})" if sources else ""
    times = "once" if ranking.num_switches == 1 else f"{ranking.num_switches} times"
    console.print(
        Text(
            f"bound {report.rate(ranking.bound_tok_per_s)}, at disk {disk / 1e9:.3g} GB/s and DRAM "
            f"{dram / 1e9:.3g} GB/s{guess}; {ranking.scored_tokens} tokens scored, "
            f"{ranking.heat_tokens} before them chose what is hot.\n"
            f"Chosen on line: {policy_named(ranking.in_force).words} ({ranking.in_force}) in the "
            f"end, switched {times}. The optimum knows the future.",
            style="dim",
        )
    )
