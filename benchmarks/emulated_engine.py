"""Emulated machines in real time: the engine itself, with its lanes, rings and moves, against
layouts by hand inside the same engine.

    python benchmarks/emulated_engine.py --models DATA/smollm2-bf16 --keep rows.jsonl
    python benchmarks/emulated_engine.py --models DATA/smollm2-bf16 --disturb cpu=0.4 --parts 0.5
    python benchmarks/emulated_engine.py --models DATA/smollm2-bf16 --prompt 512
    python benchmarks/emulated_engine.py --report rows.jsonl

Real weights and real tokens of a small model; each lane holds every instruction as long as the
machine would take that is emulated. Cards get a part of the weights, and launches and crossings are
as cheap beside the small model's matrices as they are beside a large one's (`fixed_costs`), so that
proportions are those of a model that does not fit. Rates are off from the hardware file by hidden
factors which the planner has to learn; layouts by hand have the number of layers that is best with
the true ones. Routers of a mixture choose what a trace says, of which the planner knows the other
half. One row per pair; every text must be the same, and kernels must be through before an
instruction would end (`over`: by how much they were not, of the answer's time).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from emulated_pair import (
    OURS,
    Pair,
    Sized,
    by_hand,
    in_turns,
    kept_rows,
    run_disturbed,
    run_prompt,
    sized,
    step_of,
)
from machine import hardware_line
from measure import markdown_table, spread

WINDOW = 5  # steps whose median tells where a stretch has come to
SETTLED = 0.05  # of the last steps of a stretch: within that it has recovered


def main() -> None:
    given = arguments()
    rows = kept_rows(given.report) if given.report else measured(given)
    print(f"{hardware_line()}; everything below is emulated\n")
    print(report(rows))


def measured(given: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for model in given.models:
        for machine in given.hardware.split(","):
            for part in map(float, given.parts.split(",")):
                each = sized(Pair(model, machine, part, given.seed, given.slowed))
                row = {"model": model.stem, "machine": machine, "part": part, "emulated": True}
                if given.disturb:
                    row |= {"disturb": given.disturb, "steps": given.steps}
                    row["found"] = disturbed(each, given)
                elif given.prompt:
                    row |= {"prompt": given.prompt, "found": prompts(each, given)}
                else:
                    row |= {"found": decode(each, given)}
                rows.append(row)
                if given.keep:
                    with given.keep.open("a") as file:
                        file.write(json.dumps(row) + "\n")
    return rows


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def decode(each: Sized, given: argparse.Namespace) -> dict[str, Any]:
    names = [*OURS, *by_hand(each, within=given.within)]
    return in_turns(each, names, given.rounds, given.learn, given.tokens, say)


def disturbed(each: Sized, given: argparse.Namespace) -> dict[str, Any]:
    """Ours, the first plan kept, the best by hand, and ours where all of it is disturbed.

    Of the last the end is what a plan for the disturbed machine takes.
    """
    calm, taken, again = given.steps
    found: dict[str, Any] = {}
    expected: list[int] = []
    names = [*OURS, *list(by_hand(each, within=given.within))[:1], "foreseen"]
    for name in names:
        stretch = (0, calm + taken, 0) if name == "foreseen" else (calm, taken, again)
        run_as = "shadowlane" if name == "foreseen" else name
        result = run_disturbed(each, run_as, given.disturb, *stretch)
        ids = result.pop("token_ids")
        count = min(len(expected), len(ids))
        if ids[:count] != expected[:count]:
            raise AssertionError(f"{each.pair.label}, {name}: other tokens than before")
        expected = max(expected, ids, key=len)
        found[name] = result
        say(f"{each.pair.label}, {given.disturb}, {name}: done, {result['replans']} re-plans")
    return found


def prompts(each: Sized, given: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("shadowlane", "layer-stream", "layer-split"):
        found[name] = [run_prompt(each, name, given.prompt)]
        result = found[name][0]
        say(
            f"{each.pair.label}, {given.prompt} tokens, {name}: {result['prefill_s']:.4f} s, "
            f"over by {100 * result['overrun']:.2f} %"
        )
    texts = [result[0].pop("token_ids") for result in found.values()]
    if any(ids != texts[0] for ids in texts):
        raise AssertionError(f"{each.pair.label}: other tokens than before")
    return found


# -- reports


def report(rows: Sequence[dict[str, Any]]) -> str:
    kinds = {
        "decode": ([row for row in rows if "disturb" not in row and "prompt" not in row], _decode),
        "prompts": ([row for row in rows if "prompt" in row], _prompts),
        "disturbances": ([row for row in rows if "disturb" in row], _disturbed),
    }
    return "\n\n".join(made(those) for those, made in kinds.values() if those)


def _decode(rows: Sequence[dict[str, Any]]) -> str:
    """Ours over the best layout by hand; above 1 is faster."""
    lines, gains = [], []
    for row in rows:
        found = row["found"]
        hand = {name: step_of(each) for name, each in found.items() if name not in OURS}
        best = min(hand, key=lambda name: hand[name])
        ratios = [
            theirs["step_s"] / ours["step_s"]
            for ours, theirs in zip(found["shadowlane"], found[best], strict=True)
        ]
        gain = spread(ratios)
        assert gain is not None
        gains.append(gain.median)
        ours = found["shadowlane"][-1]
        over = max(each["overrun"] for results in found.values() for each in results)
        lines.append(
            [
                row["model"],
                row["machine"],
                f"{100 * row['part']:.0f} %",
                best,
                gain.text(2),
                f"{hand[best] / step_of(found['static']):.2f}",
                ours["replans"],
                ", ".join(f"{lane} {pct:.0f}" for lane, pct in ours["busy_pct"].items()),
                f"{100 * over:.1f} %",
            ]
        )
    header = (
        "model",
        "machine (emulated)",
        "on cards",
        "best by hand",
        "ours / it",
        "first plan kept / it",
        "re-plans",
        "busy lanes of ours, %",
        "over",
    )
    return f"{markdown_table(header, lines)}\n\nmedian of ours: {median(gains):.2f}"


def _prompts(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        found = row["found"]
        ours = found["shadowlane"][0]["prefill_s"]
        others = [
            f"{found[name][0]['prefill_s'] / ours:.2f}" for name in ("layer-stream", "layer-split")
        ]
        over = max(each["overrun"] for results in found.values() for each in results)
        lines.append(
            [
                row["model"],
                row["machine"],
                f"{100 * row['part']:.0f} %",
                row["prompt"],
                *others,
                f"{100 * over:.1f} %",
            ]
        )
    header = (
        "model",
        "machine (emulated)",
        "on cards",
        "tokens of the prompt",
        "ours / layer-stream",
        "ours / layer-split, streamed",
        "over",
    )
    return markdown_table(header, lines)


def _disturbed(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        found = row["found"]
        calm, taken, _ = row["steps"]
        within = slice(calm, calm + taken)
        foreseen = median(found["foreseen"]["step_s"][-taken // 2 :])
        hand = next(name for name in found if name not in (*OURS, "foreseen"))
        mine, kept, theirs = (
            sum(found[name]["step_s"][within]) for name in ("shadowlane", "static", hand)
        )
        best = min(foreseen * taken, mine, kept)
        loss = kept / best - 1.0
        recovered = (kept - mine) / (kept - best) if loss > 0.03 else None
        ours = found["shadowlane"]
        lines.append(
            [
                row["model"],
                row["machine"],
                f"{100 * row['part']:.0f} %",
                row["disturb"],
                f"{100 * loss:.0f} %",
                "-" if recovered is None else f"{100 * recovered:.0f} %",
                settled_after(ours["step_s"][within], min(foreseen, 1.0)),
                f"{100 * (theirs / mine - 1):+.0f} %",
                f"{sum(ours['step_s'][-WINDOW:]) / sum(ours['step_s'][calm - WINDOW : calm]):.2f}",
                ours["replans"],
            ]
        )
    header = (
        "model",
        "machine (emulated)",
        "on cards",
        "left of it",
        "kept loses",
        "recovered",
        "steps until recovered",
        "over the best by hand",
        "afterwards / before",
        "re-plans",
    )
    return markdown_table(header, lines)


def settled_after(steps: Sequence[float], foreseen: float) -> str:
    """Steps until they are as fast as where all was foreseen, or as they will ever be."""
    last = median(steps[-len(steps) // 4 :])
    wanted = max(last, foreseen) * (1.0 + SETTLED)
    for count in range(len(steps) - WINDOW):
        if median(steps[count : count + WINDOW]) <= wanted:
            return str(count)
    return "-"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, nargs="+", help="directories or GGUF files")
    parser.add_argument("--keep", type=Path, help="JSON lines to which every pair is added")
    parser.add_argument("--report", type=Path, help="measure nothing: tables of what was kept")
    parser.add_argument("--seed", type=int, default=1, help="of the hidden factors")
    parser.add_argument("--rounds", type=int, default=1, help="of all strategies, in turns")
    parser.add_argument("--learn", type=int, default=40, help="tokens before the answer")
    parser.add_argument("--tokens", type=int, default=33, help="of the answer")
    parser.add_argument("--within", type=float, default=1.3,
                        help="of layouts by hand, leave out what is predicted so much slower than "
                        "the best of them")  # fmt: skip
    parser.add_argument("--slowed", type=float, help="default: what the engine chooses")
    parser.add_argument("--parts", default="0.25,0.5,0.75", help="of the weights on cards")
    parser.add_argument("--disturb", help="what is left or taken for a while: cpu=0.4,vram=1GiB")
    parser.add_argument("--steps", type=int, nargs=3, default=[50, 80, 60],
                        help="calm, disturbed, calm again")  # fmt: skip
    parser.add_argument("--prompt", type=int, help="seconds of a prompt of so many tokens instead")
    parser.add_argument(
        "--hardware",
        default="rtx-3060-laptop-6gb,rtx-3080-laptop-8gb,rtx-4090-24gb,two-rtx-3090,"
        "rtx-4090-rtx-3060",
        help="names of files in examples/hardware",
    )
    given = parser.parse_args()
    if not given.models and not given.report:
        parser.error("--models or --report must be given")
    return given


if __name__ == "__main__":
    main()
