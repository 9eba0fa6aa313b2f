"""`shadowlane simulate`: what each cache policy would make of recorded routing, without a model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from shadowlane.cli import options
from shadowlane.cli.stages import Stages
from shadowlane.sizes import format_size, parse_size

if TYPE_CHECKING:
    from shadowlane.planner.expert_sim import Ranked, Ranking
    from shadowlane.planner.routing import RoutedModel, Trace

EPILOG = options.epilog(
    "shadowlane simulate --routing run.jsonl.gz --ram 6",
    "shadowlane simulate --routing run.jsonl.gz --slots 1536 --disk-speed 3GB --dram-speed 40GB",
    "shadowlane simulate --ram 6 --look-ahead 0.8 --json | jq .policies",
)

SYNTHETIC_TOKENS = 256


def simulate(
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
            help="RAM for weights: dense parts first, then experts (a bare number is GiB).",
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
            "--disk-speed", metavar="SIZE", help="Bytes per second of reads of one expert. 1GB."
        ),
    ] = None,
    dram_speed: Annotated[
        str | None,
        options.option(
            "--dram-speed", metavar="SIZE", help="Bytes per second of all compute lanes. 20GB."
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
    json_output: options.JsonOutput = False,
) -> None:
    """Replay recorded routing of a mixture of experts through every cache policy.

    The first half of the file chooses what is hot, the second half is scored. Nothing is read but
    the file; speeds are what the options say.
    """
    if ram is None and slots is None:
        raise ValueError("one of --ram and --slots must be given; got neither")
    if ram is not None and slots is not None:
        raise ValueError("only one of --ram and --slots may be given; got both")
    if look_ahead is not None and not 0 <= look_ahead <= 1:
        raise ValueError(f"look_ahead must be between 0 and 1; got {look_ahead:g}")
    ram_nbytes = None if ram is None else parse_size(ram, "--ram")
    disk_bytes_per_s = None if disk_speed is None else parse_size(disk_speed, "--disk-speed")
    dram_bytes_per_s = None if dram_speed is None else parse_size(dram_speed, "--dram-speed")
    dense_nbytes = None if dense is None else parse_size(dense, "--dense")

    from shadowlane.planner import cost, expert_sim

    speeds = expert_sim.Speeds(
        disk_bytes_per_s or cost.ASSUMED_DISK_BYTES_PER_S,
        dram_bytes_per_s or cost.ASSUMED_DRAM_BYTES_PER_S,
    )
    with Stages() as stages:
        stages("reading the routing")
        trace = _trace(routing)
        if dense_nbytes is not None:
            trace = dataclasses.replace(trace, model=_with_dense(trace.model, dense_nbytes))
        num_slots = _slots(trace.model, ram_nbytes, slots)
        ranking = expert_sim.rank(
            trace,
            num_slots,
            speeds,
            recall=look_ahead,
            progress=lambda _name, part: stages("replaying", part),
        )
    if json_output:
        print(json.dumps(_object(trace, ranking, speeds, routing)))
        return
    assumed = [
        name for name, given in (("disk", disk_speed), ("DRAM", dram_speed)) if given is None
    ]
    _show(trace, ranking, speeds, routing, assumed)


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
    trace: Trace, ranking: Ranking, speeds: object, routing: Path | None
) -> dict[str, object]:
    model = trace.model
    return {
        "routing": None if routing is None else str(routing),  # null: synthetic
        "model": model.name,
        "layers": model.num_layers,
        "experts": model.num_experts,
        "top_k": model.top_k,
        "dense_nbytes": model.all_dense_nbytes,
        **dataclasses.asdict(speeds),  # type: ignore[call-overload]
        **dataclasses.asdict(ranking),
    }


def _show(
    trace: Trace, ranking: Ranking, speeds: object, routing: Path | None, assumed: list[str]
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from shadowlane import report

    model = trace.model
    num_experts = model.num_layers * model.num_experts
    what = "synthetic routing" if routing is None else model.name
    console = Console(highlight=False)
    console.print(
        Text(
            f"{what}: {model.num_layers} layers of {model.num_experts} experts, top {model.top_k}; "
            f"{ranking.slots} of {num_experts} experts in RAM "
            f"({100 * ranking.slots / num_experts:.1f} %)"
        )
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("policy")
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
    disk, dram = dataclasses.astuple(speeds)  # type: ignore[call-overload]
    guess = f" ({' and '.join(assumed)} assumed)" if assumed else ""
    times = "once" if ranking.num_switches == 1 else f"{ranking.num_switches} times"
    console.print(
        Text(
            f"bound {report.rate(ranking.bound_tok_per_s)}, at disk {disk / 1e9:g} GB/s and DRAM "
            f"{dram / 1e9:g} GB/s{guess}; {ranking.scored_tokens} tokens scored, "
            f"{ranking.heat_tokens} before them chose what is hot.\n"
            f"Chosen on line: {ranking.in_force} in the end, switched {times}. "
            "The optimum knows the future.",
            style="dim",
        )
    )
