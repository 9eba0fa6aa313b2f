"""Where the time of a token goes in a mixture larger than RAM: spans of a run, taken apart.

    python benchmarks/routed_timeline.py --model /data/moe.gguf --traces DIR/qwen.route.csv.gz

The run is that of `routed.py`: recorded routing, its first half as heat, its second half run. The
lanes' spans say what each worker did; the CPU time of the lanes' processes comes from the kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from machine import hardware_line
from measure import as_json, markdown_table, percentile
from routed import budget_for, keep_heat

from shadowlane.actors.blueprint import read_blueprint
from shadowlane.actors.spec import Options
from shadowlane.planner.heat import Heat, heat_of
from shadowlane.planner.routing_files import read_trace, write_trace

US = 1e3  # in a ms; spans are in us
CPU = 1  # process number of the first compute lane in a timeline
DISK = 100


def cpu_ms(pid: int) -> float:
    """CPU time of a process so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * 1000 / os.sysconf("SC_CLK_TCK")


def run(given: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any], dict[str, float]]:
    """(timeline, statistics, CPU ms per token of each process) of one run."""
    from shadowlane import LLM, SamplingParams

    trace = read_trace(given.traces)
    first, second = trace.halves()
    blueprint, _ = read_blueprint(given.model, Options(), given.threads)
    if blueprint.experts is None:
        raise ValueError(f"{given.model} must be a mixture of experts; it is not")
    heat = heat_of(first)
    keep_heat(blueprint, Heat(blueprint.fingerprint, heat.visits, heat.counts))
    tokens = min(given.tokens, len(second.choices))
    total = blueprint.experts.catalog.total
    ram = budget_for(given.model, round(total * given.part / 100), given.threads, tokens + 2)
    with tempfile.TemporaryDirectory() as folder:
        half, timeline = Path(folder) / "second.jsonl", Path(folder) / "timeline.json"
        write_trace(half, second)
        with LLM(
            str(given.model), ram=f"{ram}B", cpu_threads=given.threads, dtype="bfloat16",
            ctx_size=tokens + 2, replay_routing=str(half), prefetch=given.prefetch,
        ) as llm:  # fmt: skip
            pids = llm._call("process_ids")
            before = {name: cpu_ms(pid) for name, pid in pids.items()}
            llm.generate(
                [[5]], SamplingParams(max_tokens=tokens + 1, ignore_eos=True, temperature=0.0)
            )
            used = {name: (cpu_ms(pid) - before[name]) / tokens for name, pid in pids.items()}
            statistics = llm.stats()
            llm.write_timeline(str(timeline))
        return json.loads(timeline.read_text()), statistics, used


def take_apart(timeline: dict[str, Any]) -> dict[str, Any]:
    """What a step's time consists of, in ms per step, and the course of each miss in us."""
    spans = [each for each in timeline["traceEvents"] if each["ph"] == "X"]
    workers = sorted({(each["pid"], each["tid"]) for each in spans if CPU <= each["pid"] < DISK})
    starts = _step_starts(spans, workers)
    steps = sorted(starts)[2:-1]  # whole ones, warm
    wall = {step: starts[step + 1] - starts[step] for step in steps if step + 1 in starts}
    parts: dict[str, float] = defaultdict(float)
    for each, following in zip(spans, [*spans[1:], None], strict=True):
        step = each["args"].get("step")
        if step not in wall or not CPU <= each["pid"] < DISK:
            continue
        if each["name"] == "wait":  # the span that follows is what the worker waited to begin
            assert following is not None, "a wait is between two spans"
            parts[f"wait for peers before {_kind(following['name'])}"] += each["dur"]
            continue
        waited = each["args"].get("waited_us", 0.0)
        parts[f"compute {_kind(each['name'])}"] += each["dur"] - waited
        parts["wait inside instructions"] += waited
    count = len(wall) * len(workers)
    per_step = {name: total / US / count for name, total in sorted(parts.items())}
    per_step["between steps"] = sum(wall.values()) / US / len(wall) - sum(per_step.values())
    return {
        "steps": len(wall),
        "step_ms": sum(wall.values()) / US / len(wall),
        "parts_ms": per_step,
        "misses": _misses(spans, wall),
    }


def _step_starts(spans: Iterable[dict[str, Any]], workers: object) -> dict[int, float]:
    """When the first worker began each step."""
    starts: dict[int, float] = {}
    for each in spans:
        if CPU <= each["pid"] < DISK:
            step = each["args"]["step"]
            starts[step] = min(starts.get(step, each["ts"]), each["ts"])
    return starts


def _kind(name: str) -> str:
    return name.split(".", 1)[-1]


def _misses(spans: Sequence[dict[str, Any]], wall: dict[int, float]) -> dict[str, Any]:
    """Layers of a step that missed experts: from the router's choice to the last of them."""
    chosen: dict[tuple[int, str], float] = {}
    done: dict[tuple[int, str], float] = {}
    reads: dict[tuple[int, str], list[tuple[float, float, int, str]]] = defaultdict(list)
    for each in spans:
        if each["pid"] >= DISK:
            layer, _, rest = each["name"].removeprefix("read ").partition(".")
            if rest.startswith("experts"):
                reads[each["args"]["sweep"], layer].append(
                    (each["ts"], each["ts"] + each["dur"], each["args"]["bytes"], rest)
                )
            continue
        layer, _, kind = each["name"].partition(".")
        if kind in ("router", "experts"):
            ends = chosen if kind == "router" else done
            key = (each["args"]["step"], layer)
            ends[key] = max(ends.get(key, 0.0), each["ts"] + each["dur"])
    courses = []
    for key, extents in reads.items():
        if key[0] not in wall or key not in chosen or key not in done:
            continue
        begin, end = min(each[0] for each in extents), max(each[1] for each in extents)
        experts = len({each[3] for each in extents})
        nbytes = sum(each[2] for each in extents)
        courses.append((experts, begin - chosen[key], end - begin, nbytes, done[key] - end))
    result: dict[str, Any] = {"layers_per_step": len(courses) / max(1, len(wall))}
    result["experts_per_step"] = sum(each[0] for each in courses) / max(1, len(wall))
    for name, at in (("choice to read", 1), ("read", 2), ("arrival to sum", 4)):
        values = [each[at] for each in courses]
        result[name] = _quartiles(values)
        result[f"{name}, one miss"] = _quartiles([each[at] for each in courses if each[0] == 1])
        result[f"{name}, ms per step"] = sum(values) / US / max(1, len(wall))
    rates = [each[3] / each[2] / 1e3 for each in courses]
    result["GB/s while reading"] = _quartiles(rates)
    result["GB/s, one miss"] = _quartiles([each[3] / each[2] / 1e3 for each in courses
                                           if each[0] == 1])  # fmt: skip
    return result


def _quartiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {f"p{at}": percentile(list(values), at) for at in (10, 50, 90)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a mixture, directory or GGUF")
    parser.add_argument("--traces", type=Path, required=True, help="recorded routing of its shape")
    parser.add_argument("--part", type=float, default=25.0, help="percent of the experts in RAM")
    parser.add_argument("--tokens", type=int, default=76)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prefetch", action="store_true", help="look ahead, too")
    parser.add_argument("--output", choices=["md", "json"], default="md")
    given = parser.parse_args()
    try:
        timeline, statistics, used = run(given)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    found = take_apart(timeline)
    found["cpu_ms_per_token"] = used
    found["decode_tok_per_s"] = statistics["decode_tok_per_s"]
    found["hit_rate"] = statistics["experts"]["hit_rate"]
    found["slots"] = statistics["experts"]["slots"]
    if given.output == "json":
        print(as_json(found))
        return
    print(f"{hardware_line(given.model)}\n")
    print(f"{found['decode_tok_per_s']:.2f} tok/s, {100 * found['hit_rate']:.1f} % hits in "
          f"{found['slots']} slots; "
          f"a step {found['step_ms']:.1f} ms (mean of {found['steps']})\n")  # fmt: skip
    rows = [(name, f"{value:.1f}") for name, value in found["parts_ms"].items()]
    rows += [(f"CPU time of {name}", f"{value:.1f}") for name, value in used.items()]
    print(markdown_table(("per worker", "ms per step"), rows))
    misses = found["misses"]
    print(f"\n{misses['experts_per_step']:.1f} experts in {misses['layers_per_step']:.1f} layers "
          "are read per step\n")  # fmt: skip
    table = []
    for name, value in misses.items():
        if isinstance(value, dict):
            table.append((name, *(f"{each:.3g}" for each in value.values())))
        elif name.endswith("per step"):
            table.append((name, "", f"{value:.1f}", ""))
    print(markdown_table(("of a layer with misses, us", "10 %", "median", "90 %"), table))


if __name__ == "__main__":
    sys.exit(main())
