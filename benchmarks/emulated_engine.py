"""Emulated machines in real time: the engine itself, with its lanes, rings and moves, against
layouts by hand inside the same engine.

    python benchmarks/emulated_engine.py --model DIR --out FILE

Real weights and real tokens of a small model; each lane holds every instruction as long as the
machine would take that is emulated. Cards get a part of the weights, and launches and crossings are
as cheap beside the small model's matrices as they are beside a large one's (`fixed_costs`), so that
proportions are those of a model that does not fit. Rates are off from the hardware file by hidden
factors which the planner has to learn. One row per pair of machine and budget; ratios of decode
steps, ours over each layout, medians of the same tokens. Every text must be the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from machine import hardware_line
from measure import markdown_table

HARDWARE = Path(__file__).parents[1] / "examples" / "hardware"
PROMPT = "Why is the sky blue? Explain it to a child, slowly and at length."
OURS = ("shadowlane", "static")
LAYOUTS = ("layer-split", "layer-stream", "attention-gpu", "row-split", "cpu")
LARGE_LAYER_NBYTES = 400e6  # of the models that are stood in for: 13B in 8 bits, 30B in 4


def main() -> None:
    given = arguments()
    rows = [
        pair(given, machine, part)
        for machine in given.hardware.split(",")
        for part in (float(text) for text in given.parts.split(","))
    ]
    text = json.dumps(
        {"machine": hardware_line(), "model": str(given.model), "emulated": True, "rows": rows}
    )
    if given.out:
        given.out.write_text(text)
    print(report(rows))


def pair(given: argparse.Namespace, machine: str, part: float) -> dict[str, Any]:
    """One machine with cards that hold `part` of the weights together."""
    found: dict[str, Any] = {}
    tokens: list[int] | None = None
    for name in (*OURS, *LAYOUTS):
        try:
            found[name] = run(given, machine, part, name)
        except ValueError as error:  # a layout that does not fit, or needs several cards
            print(f"{machine} {part:g} {name}: {error}", file=sys.stderr)
            continue
        ids = found[name].pop("token_ids")
        tokens = tokens or ids
        if ids != tokens:
            raise AssertionError(f"{machine} {part:g} {name}: other tokens than before")
        step = found[name]["step_s"]
        print(f"{machine} {part:g} {name}: {1e3 * step:.2f} ms emulated", file=sys.stderr)
    return {"machine": machine, "part": part, "strategies": found}


def run(given: argparse.Namespace, machine: str, part: float, name: str) -> dict[str, Any]:
    from shadowlane import LLM, SamplingParams
    from shadowlane.llm import plan_model
    from shadowlane.shapes import load_hardware

    file = HARDWARE / f"{machine}.yaml"
    cards = len(load_hardware(file).cards)
    groups = plan_model(given.model, ctx_size=512)["groups"]
    weights = sum(group["nbytes"] for group in groups)
    layers = len({group["group"].split(".")[0] for group in groups if "." in group["group"]})
    settings: dict[str, Any] = {
        "hardware": file,
        "gpu_memory": ",".join([f"{int(part * weights / cards)}B"] * cards),
        "emulate_seed": given.seed,
        "fixed_costs": min(1.0, weights / layers / LARGE_LAYER_NBYTES),
        "slowed": given.slowed,
        "ctx_size": 512,
        "replan": name != "static",
    }
    if name not in OURS:
        settings["strategy"] = name
    with LLM(given.model, **settings) as llm:
        params = SamplingParams(max_tokens=given.tokens, ignore_eos=True)
        learnt = llm.generate(PROMPT, params)[0]  # the planner learns, and rings find their rhythm
        answer = llm.generate(PROMPT, params)[0]
        stats = llm.stats()
        plan = llm.plan
    assert learnt.token_ids == answer.token_ids
    overrun = max(stats["overrun_s"].values())
    return {
        "token_ids": list(answer.token_ids),
        "step_s": stats["measured_step_s"],
        "prefill_s": stats["prefill_s"],
        "predicted_step_s": plan["predicted"]["decode_step_s"],
        "strategy": plan["strategy"],
        "replans": stats["plan"]["replans"],
        "decisions": stats["decisions"],
        "slowed": stats["slowed"],
        "overrun_s": overrun,
        "busy_pct": {lane: use["busy_pct"] for lane, use in stats["lanes"].items()},
    }


def report(rows: list[dict[str, Any]]) -> str:
    """Ours over the best layout by hand; above 1 is faster."""
    lines, gains = [], []
    for row in rows:
        found = row["strategies"]
        by_hand = {name: found[name]["step_s"] for name in LAYOUTS if name in found}
        best = min(by_hand, key=lambda name: by_hand[name])
        ours, static = (found[name]["step_s"] for name in OURS)
        gains.append(by_hand[best] / ours)
        busy = found["shadowlane"]["busy_pct"]
        lines.append(
            [
                row["machine"],
                f"{100 * row['part']:.0f} %",
                f"{found[best]['strategy']}",
                f"{gains[-1]:.2f}",
                f"{by_hand[best] / static:.2f}",
                f"{found['shadowlane']['replans']}",
                ", ".join(f"{lane} {pct:.0f} %" for lane, pct in busy.items() if pct >= 1),
            ]
        )
    header = (
        "machine (emulated)",
        "on cards",
        "best by hand",
        "ours / it",
        "static / it",
        "re-plans",
        "busy lanes, ours",
    )
    return f"{markdown_table(header, lines)}\n\nmedian of ours: {median(gains):.2f}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="JSON with everything")
    parser.add_argument("--seed", type=int, default=1, help="of the hidden factors")
    parser.add_argument("--tokens", type=int, default=100, help="of each answer; there are two")
    parser.add_argument("--slowed", type=float, help="default: what the engine chooses")
    parser.add_argument("--parts", default="0.25,0.5,0.75", help="of the weights on cards")
    parser.add_argument(
        "--hardware",
        default="rtx-3060-laptop-6gb,rtx-3080-laptop-8gb,rtx-4090-24gb,rtx-4090-rtx-3060",
        help="names of files in examples/hardware",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
