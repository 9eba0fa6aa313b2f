"""How far the search over cards is from the best: exact on small instances, annealed on whole ones.

For each model and machine, regret in per cent of our plan's seconds, decode of one sequence:

    exact      the first layers of the model, 12 to 20 groups, on a machine with memory in the same
               proportion, against the best of all plans of whole groups (one card only); 0: none of
               them is faster by a per cent; ~: as far as can be told in a few seconds
    annealed   the same instance and the whole model, against so many changes one after the other
               that begin with our plan
    both       the whole model, prompts included, annealed

    python benchmarks/regret.py                         all pairs, some minutes on one core

All figures are emulated: ratios of predictions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from asked_pairs import pairs_parser

from shadowlane.planner.hybrid import Prompts, Work, assumed_hits
from shadowlane.planner.hybrid_layouts import Question, TooLarge
from shadowlane.planner.hybrid_regret import TooManyPlans, annealed, exact, shortened
from shadowlane.planner.hybrid_search import search
from shadowlane.shapes import load_hardware, shape_model

LAYERS = 3  # of an instance that is solved exactly: 16 groups
PROMPTS = Prompts(Work("prefill", 2048, 1, 1024, 4096), 1 / 128)
COLUMNS = ("exact", "annealed, 16 groups", "annealed", "both")


def regrets(question: Question, tries: int) -> dict[str, float | None]:
    """Parts of our seconds that were lost; None: not known."""
    short = shortened(question, LAYERS)
    ours = search(short)
    row: dict[str, float | None] = dict.fromkeys(COLUMNS)
    if len(question.machine.cards) == 1:
        for is_strict in (True, False):
            try:
                nodes = 100_000 if is_strict else 500_000
                best_s = exact(short, ours, most_nodes=nodes, is_strict=is_strict)
            except TooManyPlans:
                continue
            row["exact"], row["is_strict"] = ours.seconds / best_s - 1.0, float(is_strict)
            break
    row["annealed, 16 groups"] = ours.seconds / annealed(short, ours, tries).seconds - 1.0
    for name, prompts in (("annealed", None), ("both", PROMPTS)):
        whole = replace(question, prompts=prompts)
        found = search(whole)
        row[name] = found.seconds / annealed(whole, found, tries).seconds - 1.0
    return row


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"| model | machine | {' | '.join(COLUMNS)} |", "|---" * (2 + len(COLUMNS)) + "|"]
    for row in rows:
        cells = ["-" if row[name] is None else f"{100 * row[name]:.1f}" for name in COLUMNS]
        if row["exact"] is not None and not row["is_strict"]:
            cells[0] = f"~{cells[0]}"
        lines.append(f"| {row['model']} | {row['machine']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = pairs_parser(__doc__)
    parser.add_argument("--tries", type=int, default=2000, help="evaluations of annealing")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in asked.models:
        model = shape_model(name)
        for path in asked.machines:
            question = Question(model, load_hardware(path), hit_rate=assumed_hits(model))
            try:
                found = regrets(question, asked.tries)
            except TooLarge as error:
                print(f"\n{error}", file=sys.stderr)
                continue
            rows.append({"model": name, "machine": path.stem, "emulated": True, **found})
            print(f"\r{len(rows)} pairs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    print(json.dumps(rows, indent=1) if asked.output == "json" else markdown(rows))


if __name__ == "__main__":
    main()
