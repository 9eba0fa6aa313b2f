"""What is there to win? The planner's model of five machines and seven models, nothing measured.

Two tables, in per cent. The first: when nothing changes, how much faster the best plan is than the
best layout tuned by hand, and what each mechanism adds alone / loses by its absence. The second:
when something changes, how much the best plan of each stretch wins over the one best plan that is
kept / over the plan that was best at first, all with foresight, moves included. A mechanism that
wins nothing here is not worth building. With a recorded trace, two more: how often experts that are
hot are chosen, and what it would win if those on cards followed.

    python benchmarks/to_win.py                          all pairs, a quarter of an hour on one core
    python benchmarks/to_win.py --models mixtral-8x7b    one model on all machines
    python benchmarks/to_win.py --routing trace.csv.gz   experts as hot as a recorded trace has them
    python benchmarks/to_win.py --crossing-us 130 --cores-read 0.73    what if those were otherwise?

With --output json figures are kept, and --read makes the tables of such files. All are ratios of
predictions: emulated, and good for rankings at most. docs/what-to-win.md says what follows.
"""

from __future__ import annotations

import json
import sys
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from asked_pairs import pairs_parser

from shadowlane.planner.hardware import Hardware
from shadowlane.planner.hybrid import HitRate, Model, Work, assumed_hits
from shadowlane.planner.hybrid_changes import MECHANISMS
from shadowlane.planner.hybrid_hand import by_hand
from shadowlane.planner.hybrid_layouts import Question, TooLarge
from shadowlane.planner.hybrid_search import search
from shadowlane.planner.routing import Trace
from shadowlane.planner.routing_files import read_trace
from shadowlane.planner.scenarios import SCENARIOS, evaluate
from shadowlane.shapes import load_hardware, longest_context, shape_model

FEW_EXPERTS = 16  # of models with so few none is much hotter than another
PARTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
ADAPTS_EVERY = 16  # tokens between two looks at what is hot
FORGETS = 0.5 ** (1 / 64)
LEAST = 0.01  # that is worth a figure


def model_named(name: str) -> Model:
    """With as long a context as scenarios ask for, if the model allows it."""
    asked = max(stretch.context for scenario in SCENARIOS for stretch in scenario.stretches)
    return shape_model(name, min(asked, longest_context(name)))


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


def even_hit_rate(part: float) -> float:
    return part


def hit_rate_of(model: Model, recorded: HitRate | None) -> HitRate:
    """As recorded, if it was; of few experts none is much hotter than another."""
    if max((load.experts for load in model.loads), default=0) <= FEW_EXPERTS:
        return even_hit_rate
    return recorded or assumed_hits(model)


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


def otherwise(machine: Hardware, crossing_us: float | None, cores_read: float) -> Hardware:
    """The same machine with other crossings, and cores that read so many times as fast."""
    cards = machine.cards
    if crossing_us is not None:
        cards = tuple(replace(card, crossing_s=crossing_us * 1e-6) for card in cards)
    return replace(machine, cards=cards, cpu_bytes_per_s=machine.cpu_bytes_per_s * cores_read)


def pair(model: Model, name: str, machine: Hardware, recorded: HitRate | None) -> dict[str, Any]:
    hit_rate = hit_rate_of(model, recorded)
    row: dict[str, Any] = {"model": model.name, "machine": name, "emulated": True}
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
    return "." if abs(value) < LEAST else f"{100 * value:.0f}"


def both(first: float, second: float) -> str:
    """Two figures in one cell, or a dot where neither is worth a figure."""
    return "." if max(abs(first), abs(second)) < LEAST else f"{percent(first)} / {percent(second)}"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(titles)} |",
        "|" + "---|" * len(titles),
        *(f"| {' | '.join(cells)} |" for cells in rows),
    ]


def markdown(rows: list[dict[str, Any]]) -> str:
    """Per cent everywhere; a dot is less than one."""
    fitting = [row for row in rows if "too_large" not in row]
    scenarios = [scenario.name for scenario in SCENARIOS if scenario.name != "calm"]
    lines = table(
        ("model", "machine", "best by hand", "gain", *MECHANISMS),
        (
            (
                row["model"],
                row["machine"],
                row["by_hand"],
                percent(row["gain"]),
                *(both(row["alone"][name], row["without"][name]) for name in MECHANISMS),
            )
            for row in fitting
        ),
    )
    lines.append("")
    lines += table(
        ("model", "machine", *scenarios),
        (
            (
                row["model"],
                row["machine"],
                *(
                    both(row["scenarios"][name]["gain"], row["scenarios"][name]["first_loses"])
                    for name in scenarios
                ),
            )
            for row in fitting
        ),
    )
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


def following_table(trace: Trace, names: Iterable[str], paths: Sequence[Path]) -> str:
    """What a hot set on cards that follows the choices would win if its moves were free.

    moves: what they would take of a link, of a token's time.
    """
    kept = curve([(part, hot_half(trace, part)) for part in PARTS])
    points = [(part, *following(trace, part)) for part in PARTS]
    follows = curve([(part, rate) for part, rate, _ in points])
    moved = curve([(part, experts) for part, _, experts in points])
    cells = []
    for name in names:
        model = model_named(name)
        routed = [index for index, load in enumerate(model.loads) if load.experts]
        if hit_rate_of(model, kept) is not kept or not routed:
            continue
        for path in paths:
            machine = load_hardware(path)
            first, then = (
                search(Question(model, machine, Work(), hit_rate=rate)) for rate in (kept, follows)
            )
            part = sum(then.plan.sites[index].vram for index in routed) / len(routed)
            nbytes = moved(part) * sum(model.loads[index].nbytes for index in routed)
            link_s = nbytes / sum(card.h2d_bytes_per_s for card in machine.cards)
            gain = first.times.step_s / then.times.step_s - 1
            share = link_s / then.times.step_s
            cells.append((name, path.stem, f"{part:.0%}", percent(gain), percent(share)))
    return "\n".join(table(("model", "machine", "on cards", "gain", "moves"), cells))


def main() -> None:
    parser = pairs_parser(__doc__)
    parser.add_argument("--routing", type=Path, help="a recorded trace, for how hot experts are")
    parser.add_argument("--crossing-us", type=float, metavar="US", help="of every card's crossings")
    parser.add_argument(
        "--cores-read", type=float, default=1.0, metavar="TIMES", help="as fast as the file says"
    )
    parser.add_argument("--read", type=Path, nargs="+", metavar="FILE", help="JSON of earlier runs")
    asked = parser.parse_args()
    recorded: HitRate | None = None
    trace = None
    if asked.routing is not None:
        trace = read_trace(asked.routing)
        recorded = curve([(part, hot_half(trace, part)) for part in PARTS])
    rows: list[dict[str, Any]] = []
    if asked.read is not None:
        rows = [row for path in asked.read for row in json.loads(path.read_text())]
    began = time.monotonic()
    total = len(asked.models) * len(asked.machines)
    for name in asked.models if asked.read is None else ():
        model = model_named(name)
        for path in asked.machines:
            machine = otherwise(load_hardware(path), asked.crossing_us, asked.cores_read)
            rows.append(pair(model, path.stem, machine, recorded))
            done = f"{len(rows)} of {total}, {time.monotonic() - began:.0f} s"
            print(f"\r{done}", end="", file=sys.stderr, flush=True)
    if asked.read is None:
        print(file=sys.stderr)
    if asked.output == "json":
        print(json.dumps(rows, indent=1))
        return
    print(markdown(rows))
    if trace is not None:
        print("\n" + routing_table(trace))
        print("\n" + following_table(trace, asked.models, asked.machines))


if __name__ == "__main__":
    main()
