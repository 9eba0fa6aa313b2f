"""A mixture larger than RAM, with the routing of a real model: what does the cache of experts win?

    python benchmarks/synthesize.py --moe --gguf /data/moe.gguf --type Q4_K --top-k 6
    python benchmarks/routed.py --model /data/moe.gguf --traces DIR/qwen.route.csv.gz --rounds 3

The weights are random and so are their routers, so a recorded trace chooses in their place
(`--replay-routing`); what is measured is what routing costs, not text. The first half of the trace
gives the heat with which every cache starts, as an earlier run would have left it; the second half
is run and scored. In each round, in turn: the policies that compete, each static set alone, and
every chosen expert read on demand (as few slots as there can be). fio reads the same file in the
same run, and the same half is simulated at the speeds that were measured.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from bandwidth import best_disk_bytes_per_s, best_dram_bytes_per_s
from checkpoint import weight_files
from compare import PEERS, last_json_line
from machine import hardware_line, run_limited, versions
from measure import as_json, markdown_table, ratio_per_round, spread

from shadowlane.actors.blueprint import Blueprint, read_blueprint
from shadowlane.actors.routing import routed_model
from shadowlane.actors.service import heat_path
from shadowlane.actors.spec import Options
from shadowlane.planner.expert_sim import MEASURED_DELAYS, Ranking, Speeds, rank
from shadowlane.planner.heat import Heat, heat_of
from shadowlane.planner.routing_files import read_trace, write_trace
from shadowlane.planner.search import SPARE_EXPERTS

COMPETING, ON_DEMAND = "competing", "on demand"
STATIC = ("static/global", "static/layer")


@dataclass(frozen=True, slots=True)
class Reading:
    """One run over the second half."""

    tok_per_s: float
    hit_rate: float
    read_nbytes_per_token: int
    busy_s_per_token: float  # of the compute lane, waits apart
    policy: str


def budget_for(model: Path, slots: int, threads: int, context: int) -> int:
    """RAM under which the plan has so many slots for experts, exactly."""
    from shadowlane.llm import plan_model

    whole = plan_model(model, ram=1 << 42, cpu_threads=threads, ctx_size=context)
    slot = whole["bytes"]["experts"] // whole["expert_slots"]
    gathered = sum(each["ram_nbytes"] for each in whole["groups"] if each["kind"] == "embed")
    spare = gathered + whole["bytes"]["expanded"]
    return whole["bytes"]["total"] - spare - (whole["expert_slots"] - slots) * slot


def run_once(given: argparse.Namespace, ram: int, policy: str | None, trace: Path) -> Reading:
    settings = {
        "ctx_size": given.tokens + 2,
        "replay_routing": str(trace),
        "expert_policy": policy,
        "prefetch": False,  # random routers guess nothing
    }
    done, _, _ = run_limited(
        [sys.executable, str(PEERS / "shadowlane_run.py"), f"--model={given.model}",
         f"--ram={ram}B", f"--threads={given.threads}", "--vocab=1000", "--prompt-tokens=1",
         f"--new-tokens={given.tokens}", "--warmup=0",
         *(f"--set={name}={json.dumps(value)}" for name, value in settings.items())],
        None,
        given.timeout,
    )  # fmt: skip
    result = last_json_line(done.stdout)
    if done.returncode != 0 or result is None:
        said = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        raise ValueError(f"the engine must finish; {said[-1]}")
    experts = result["experts"]
    busy = sum(each["busy_s"] for name, each in result["lanes"].items() if name != "disk:0")
    return Reading(
        result["decode_tok_per_s"],
        experts["hit_rate"],
        experts["read_nbytes_per_token"],
        busy / given.tokens,
        experts["policy"],
    )


def keep_heat(blueprint: Blueprint, heat: Heat) -> None:
    """As an earlier run would have left it; each run adds what it sees, so it is written anew."""
    path = heat_path(blueprint)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(heat.to_json())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a mixture, directory or GGUF")
    parser.add_argument("--traces", type=Path, required=True, help="recorded routing of its shape")
    parser.add_argument("--part", type=float, default=25.0, help="percent of the experts in RAM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, help="to be written (default: the second half)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--depth", type=int, default=4, help="fio's depth: the engine's")
    parser.add_argument("--timeout", type=float, default=1800.0)
    parser.add_argument("--output", choices=["md", "json"], default="md")
    given = parser.parse_args()
    if shutil.which("fio") is None:
        parser.error("fio must be installed; it is not on the path")
    try:
        measure(given)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


def measure(given: argparse.Namespace) -> None:
    trace = read_trace(given.traces)
    first, second = trace.halves()
    given.tokens = min(given.tokens or len(second.choices), len(second.choices))
    blueprint, _ = read_blueprint(given.model, Options(), given.threads)
    experts = blueprint.experts
    if experts is None:
        raise ValueError(f"{given.model} must be a mixture of experts; it is not")
    trace = replace(trace, model=routed_model(blueprint))  # the sizes of this file, not of its own
    extent = experts.sources[0].extents[0].held_nbytes
    heat = heat_of(first)
    heat = Heat(blueprint.fingerprint, heat.visits, heat.counts)
    context = given.tokens + 2
    catalog = experts.catalog
    slots = round(catalog.total * given.part / 100)
    budgets = {
        name: budget_for(given.model, count, given.threads, context)
        for name, count in (
            *((name, slots) for name in (COMPETING, *STATIC)),
            (ON_DEMAND, catalog.top_k + SPARE_EXPERTS),
        )
    }
    readings: dict[str, list[Reading]] = {name: [] for name in budgets}
    disk: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        half = Path(folder) / "second.jsonl"
        write_trace(half, second)
        for number in range(given.rounds):
            disk.append(
                best_disk_bytes_per_s(weight_files(given.model), extent, given.depth, 5.0)["best"]
            )
            for name, ram in budgets.items():
                keep_heat(blueprint, heat)
                reading = run_once(given, ram, name if name in STATIC else None, half)
                readings[name].append(reading)
                print(f"round {number + 1} {name}: {reading.tok_per_s:.2f} tok/s, "
                      f"{reading.hit_rate:.1%} hits; fio {disk[-1] / 1e9:.2f} GB/s",
                      file=sys.stderr)  # fmt: skip
    dram = float(best_dram_bytes_per_s(range(given.threads))["best"])  # type: ignore[arg-type]
    report(given, blueprint, readings, disk, dram, simulate(given, trace, slots, readings, disk))


def simulate(
    given: argparse.Namespace,
    trace: object,
    slots: int,
    readings: dict[str, list[Reading]],
    disk: list[float],
) -> Ranking:
    """The same half replayed, with the compute lane as fast as it was."""
    model = trace.model  # type: ignore[attr-defined]
    busy = spread(each.busy_s_per_token for each in readings[COMPETING])
    fio = spread(disk)
    assert busy is not None, "there is at least one round"
    assert fio is not None, "there is at least one round"
    read = sum(model.expert_nbytes) * model.top_k + model.all_dense_nbytes
    return rank(trace, slots, Speeds(fio.median, read / busy.median, MEASURED_DELAYS))  # type: ignore[arg-type]


def report(
    given: argparse.Namespace,
    blueprint: Blueprint,
    readings: dict[str, list[Reading]],
    disk: list[float],
    dram: float,
    ranking: Ranking,
) -> None:
    best_miss = min(each.nbytes_per_token for each in ranking.policies)
    fio = spread(disk)
    assert fio is not None, "there is at least one round"
    dense = sum(
        block.nbytes
        for block in blueprint.catalog.blocks
        if blueprint.catalog.group(block.group).kind != "embed"
    )
    catalog = blueprint.catalog.experts
    assert catalog is not None, "checked before"
    resident = dense + catalog.num_layers * catalog.top_k * catalog.nbytes - best_miss
    least_s = max(best_miss / fio.median, resident / dram)
    if given.output == "json":
        print(as_json({
            "hardware": hardware_line(given.model), "readings": readings, "fio": disk,
            "dram_bytes_per_s": dram, "bound_tok_per_s": 1 / least_s,
            "simulated": {each.name: each for each in ranking.policies},
        }))  # fmt: skip
        return
    simulated = {each.name: each for each in (*ranking.policies, ranking.on_demand)}
    simulated[COMPETING] = simulated["chosen on line"]
    ours = [each.tok_per_s for each in readings[COMPETING]]
    rows = []
    for name, column in readings.items():
        rate = spread(each.tok_per_s for each in column)
        ratio = spread(ratio_per_round(ours, [each.tok_per_s for each in column]))
        hits = spread(100 * each.hit_rate for each in column)
        read = spread(each.read_nbytes_per_token / 1e6 for each in column)
        if rate is None or ratio is None or hits is None or read is None:
            continue  # no rounds
        predicted = simulated[name]
        rows.append(
            (name, rate.text(), ratio.text(), hits.text(), f"{100 * predicted.hit_rate:.1f}",
             f"{predicted.tok_per_s:.2f}", read.text())
        )  # fmt: skip
    print(f"{hardware_line(given.model)}  \n{versions('shadowlane', 'ray', 'torch', 'numba')}\n")
    print(
        markdown_table(
            ("experts kept", "tok/s", "competing is faster", "hits %", "simulated %",
             "simulated tok/s", "MB read per token"),
            rows,
        )
    )  # fmt: skip
    part = spread(each * least_s for each in ours)
    assert part is not None, "there is at least one round"
    print(
        f"\nfio {fio.median / 1e9:.2f} GB/s in reads of the size of a matrix, DRAM "
        f"{dram / 1e9:.1f} GB/s; bound {1 / least_s:.2f} tok/s (miss bytes of the best policy "
        f"from disk, or the rest from DRAM, whichever is longer): "
        f"{100 * part.median:.0f} % of it reached"
    )
    busy = spread(each.busy_s_per_token for each in readings[COMPETING])
    assert busy is not None, "there is at least one round"
    own_s = max(best_miss / fio.median, busy.median)
    own = spread(each * own_s for each in ours)
    assert own is not None, "there is at least one round"
    print(
        f"\nThe compute lane was busy for {1e3 * busy.median:.0f} ms of each token; with these in "
        f"place of DRAM the bound is {1 / own_s:.2f} tok/s: {100 * own.median:.0f} % of it reached"
    )


if __name__ == "__main__":
    main()
