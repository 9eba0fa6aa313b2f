"""What is there to win? The planner's model of five machines and seven models, nothing measured.

Two tables. The first: when nothing changes, how much faster the best plan is than the best layout
tuned by hand, and what each mechanism adds alone or takes away by its absence. The second: when
something changes, how much the best plan of each stretch wins over the one best plan that is kept,
both with foresight, moves included. A mechanism that wins nothing here is not worth building.

    python benchmarks/to_win.py                          all pairs, about ten minutes
    python benchmarks/to_win.py --models mixtral-8x7b    one model on all machines
    python benchmarks/to_win.py --routing trace.csv.gz   experts as hot as a recorded trace has them

All figures are ratios of predictions: emulated, and good for rankings at most.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from bisect import bisect_left
from pathlib import Path
from typing import Any

import numpy as np

from shadowlane.planner.hit_rate import assumed_hit_rate
from shadowlane.planner.hybrid import HitRate, Model, Work, model_of
from shadowlane.planner.hybrid_layouts import Question, TooLarge, by_hand
from shadowlane.planner.hybrid_search import MECHANISMS, search
from shadowlane.planner.routing import Trace
from shadowlane.planner.routing_files import read_trace
from shadowlane.planner.scenarios import SCENARIOS, evaluate
from shadowlane.shapes import load_hardware, shape_catalog

ROOT = Path(__file__).resolve().parent.parent
MODELS = (
    "llama-2-13b",
    "llama-2-70b",
    "llama-3.1-70b",
    "qwen2.5-32b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "gpt-oss-120b",
)
FEW_EXPERTS = 16  # of models with so few none is much hotter than another
PARTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
ADAPTS_EVERY = 16  # tokens between two looks at what is hot
FORGETS = 0.5 ** (1 / 64)


def hot_half(trace: Trace, part: float) -> float:
    """Choices of one half of a trace that hit the experts that were hottest in the other half."""
    rates = []
    for known, scored in (trace.halves(), trace.halves()[::-1]):
        counts = _counts(known.choices, trace.num_experts)
        keep = round(part * trace.num_experts)
        hot = np.argsort(-counts, axis=1, kind="stable")[:, :keep]
        hits = _counts(scored.choices, trace.num_experts)
        rates.append(np.take_along_axis(hits, hot, 1).sum() / hits.sum())
    return float(np.mean(rates))


def following(trace: Trace, part: float) -> tuple[float, float]:
    """(hit rate, experts moved per token and layer) if the hot set follows what was chosen."""
    keep = round(part * trace.num_experts)
    if keep in (0, trace.num_experts):
        return float(keep > 0), 0.0
    heat = np.zeros((trace.num_layers, trace.num_experts))
    held = np.zeros_like(heat, dtype=bool)
    hits = moved = total = 0
    warm = trace.num_tokens // 4  # not counted: the set has to form
    for token, chosen in enumerate(trace.choices):
        if token % ADAPTS_EVERY == 0:
            want = np.zeros_like(held)
            np.put_along_axis(want, np.argsort(-heat, axis=1, kind="stable")[:, :keep], True, 1)
            moved += int((want & ~held).sum()) if token >= warm else 0
            held = want
        if token >= warm:
            hits += int(np.take_along_axis(held, chosen.astype(int), 1).sum())
            total += chosen.size
        heat *= FORGETS
        np.put_along_axis(
            heat,
            chosen.astype(int),
            np.take_along_axis(heat, chosen.astype(int), 1) + 1,
            1,
        )
    return hits / total, moved / (trace.num_tokens - warm) / trace.num_layers


def _counts(choices: np.ndarray[Any, Any], num_experts: int) -> np.ndarray[Any, Any]:
    """[layers, experts] how often each was chosen, of [tokens, layers, top_k]."""
    layers = choices.shape[1]
    keys = np.arange(layers)[None, :, None] * num_experts + choices
    return np.bincount(keys.ravel(), minlength=layers * num_experts).reshape(layers, -1)


def curve(points: list[tuple[float, float]]) -> HitRate:
    """A hit rate by straight lines between points of rising part."""

    def rate(part: float) -> float:
        upper = min(len(points) - 1, max(1, bisect_left([x for x, _ in points], part)))
        (low, low_rate), (high, high_rate) = points[upper - 1], points[upper]
        return low_rate + (high_rate - low_rate) * (min(part, high) - low) / (high - low)

    return rate


def recorded_hit_rate(part: float) -> float:
    return assumed_hit_rate(round(part * 1_000_000), 1_000_000)


def even_hit_rate(part: float) -> float:
    return part


def hit_rate_of(model: Model, recorded: HitRate) -> HitRate:
    experts = max((load.experts for load in model.loads), default=0)
    return recorded if experts > FEW_EXPERTS else even_hit_rate


def mechanisms(question: Question) -> dict[str, Any]:
    """Ratios of seconds per token: by hand over ours, and with one mechanism more or less."""
    hand = by_hand(question)
    best = min(hand.values(), key=lambda answer: answer.times.step_s)
    ours = search(question, rivals=hand)
    alone, without = {}, {}
    for name in MECHANISMS:
        only = search(question, rivals=hand, using=(name,))
        rest = search(question, rivals=hand, using=[each for each in MECHANISMS if each != name])
        alone[name] = best.times.step_s / only.times.step_s - 1
        without[name] = rest.times.step_s / ours.times.step_s - 1
    return {
        "by_hand": best.plan.name,
        "ours": ours.plan.name,
        "bottleneck": ours.times.bottleneck,
        "gain": best.times.step_s / ours.times.step_s - 1,
        "alone": alone,
        "without": without,
    }


def pair(model: Model, hardware: Path, recorded: HitRate) -> dict[str, Any]:
    machine = load_hardware(hardware)
    hit_rate = hit_rate_of(model, recorded)
    row: dict[str, Any] = {"model": model.name, "machine": hardware.stem, "emulated": True}
    work = Work(max_context=min(4096, model.max_context))
    try:
        row |= mechanisms(Question(model, machine, work, hit_rate=hit_rate))
        row["scenarios"] = {
            outcome.scenario: {
                "gain": outcome.gain,
                "first_loses": outcome.first_s / outcome.changing_s - 1,
                "moved_gb": outcome.moved_nbytes / 1e9,
                "plans": outcome.plans,
            }
            for outcome in evaluate(model, machine, SCENARIOS, hit_rate)
        }
    except TooLarge as error:
        row["too_large"] = str(error)
    return row


def percent(value: float) -> str:
    return "." if abs(value) < 0.005 else f"{value:+.0%}"


def markdown(rows: list[dict[str, Any]]) -> str:
    fitting = [row for row in rows if "too_large" not in row]
    lines = [
        "| model | machine | best by hand | ours | busiest | gain | "
        + " | ".join(f"{name} alone / without" for name in MECHANISMS)
        + " |",
        "|" + "---|" * (6 + len(MECHANISMS)),
    ]
    for row in fitting:
        cells = [
            f"{percent(row['alone'][name])} / {percent(row['without'][name])}"
            for name in MECHANISMS
        ]
        head = (row["model"], row["machine"], row["by_hand"], row["ours"], row["bottleneck"])
        lines.append(f"| {' | '.join((*head, percent(row['gain']), *cells))} |")
    names = [scenario.name for scenario in SCENARIOS if scenario.name != "calm"]
    lines += ["", "| model | machine | " + " | ".join(names) + " |"]
    lines.append("|" + "---|" * (2 + len(names)))
    for row in fitting:
        cells = []
        for name in names:
            outcome = row["scenarios"][name]
            cells.append(f"{percent(outcome['gain'])} ({percent(outcome['first_loses'])})")
        lines.append(f"| {row['model']} | {row['machine']} | {' | '.join(cells)} |")
    lines += [
        f"\n{row['model']} on {row['machine']}: {row['too_large']}"
        for row in rows
        if "too_large" in row
    ]
    return "\n".join(lines)


def routing_table(trace: Trace) -> str:
    lines = [
        "| part of the experts held | hottest of the other half | following | moved per token |",
        "|---|---|---|---|",
    ]
    for part in PARTS[1:-1]:
        rate, moved = following(trace, part)
        lines.append(
            f"| {part:.0%} | {hot_half(trace, part):.1%} | {rate:.1%} | "
            f"{moved * trace.num_layers:.2f} experts |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME")
    parser.add_argument(
        "--machines",
        nargs="+",
        type=Path,
        default=sorted((ROOT / "examples" / "hardware").glob("*.yaml")),
        metavar="FILE",
    )
    parser.add_argument("--routing", type=Path, help="a recorded trace, for how hot experts are")
    parser.add_argument("--output", choices=("md", "json"), default="md")
    asked = parser.parse_args()
    recorded: HitRate = recorded_hit_rate
    trace = None
    if asked.routing is not None:
        trace = read_trace(asked.routing)
        recorded = curve([(part, hot_half(trace, part)) for part in PARTS])
    rows = []
    began = time.monotonic()
    total = len(asked.models) * len(asked.machines)
    for name in asked.models:
        model = model_of(shape_catalog(name), name)
        for hardware in asked.machines:
            rows.append(pair(model, hardware, recorded))
            done = f"{len(rows)} of {total}, {time.monotonic() - began:.0f} s"
            print(f"\r{done}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if asked.output == "json":
        print(json.dumps(rows, indent=1))
        return
    print(markdown(rows))
    if trace is not None:
        print("\n" + routing_table(trace))


if __name__ == "__main__":
    main()
