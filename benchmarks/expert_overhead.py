"""What it costs that experts could be missing, in a mixture whose experts are all in RAM.

    python benchmarks/expert_overhead.py --model /data/moe.gguf --rounds 3

The real code for one decode row, on one thread, in an arena of this model without its weights: the
choice with its marks and requests; the items of the chosen experts, all but their products; the
sum by rank. Beside it, in turns, whole decode steps of an engine: what share of a step is that, if
one worker did all of it while the others wait?
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from compare import PEERS, last_json_line
from machine import hardware_line, run_limited, versions
from measure import as_json, markdown_table, spread

from shadowlane.actors.arena import Arena, plan_layout
from shadowlane.actors.blueprint import Blueprint, read_blueprint
from shadowlane.actors.lowering import make_geometry
from shadowlane.actors.spec import Options
from shadowlane.ops import table as t
from shadowlane.planner.cost import CostModel
from shadowlane.planner.placement import LaneSpec, Request
from shadowlane.planner.search import place

PARTS = ("choose, mark, ask", "items without products", "add by rank")
CHUNKS = 2  # items of each half of an expert, as two workers have them
WARM_STEPS = 20


def bookkeeping_ms(blueprint: Blueprint, steps: int) -> list[float]:
    """ms per step of each of PARTS."""
    from routing_loops import time_bookkeeping

    assert blueprint.experts is not None, "checked by the caller"
    catalog = blueprint.experts.catalog
    lanes = (LaneSpec("cpu:0", blueprint.workers),)
    request = Request(ram=1 << 42, lanes=lanes, context=64, max_batch=1)
    layout = plan_layout(blueprint, place(blueprint.catalog, request, CostModel(None)))
    arena = Arena.create(layout.nbytes)  # pages that nobody touches are not there
    geometry = make_geometry(blueprint, layout, 0, blueprint.workers)
    words = arena.view(layout.scratch["expert_words"], np.int64, catalog.total)
    words[:] = np.arange(1, catalog.total + 1)
    idle = geometry.copy()
    idle[t.EXPERT_INNER] = idle[t.HIDDEN] = 0
    row = np.full(t.INSTRUCTION_COLUMNS, -1, np.int64)
    row[t.OUTPUT] = layout.scratch["router"]
    row[t.EXPERT_CHUNKS], row[t.EXPERT_BLOCKS] = CHUNKS, 0
    stride = int(geometry[t.ROUTER_STRIDE])
    logits = np.random.default_rng(0).standard_normal((catalog.num_layers, stride), np.float32)
    blocks = np.zeros((3, t.BLOCK_COLUMNS), np.int64)
    none = np.zeros((1, t.INSTRUCTION_COLUMNS), np.int64)
    spent = np.zeros(3, np.int64)
    for count in (WARM_STEPS, steps):
        spent[:] = 0
        # tickets go by the number of a step: another pair for each call
        tickets = np.zeros(t.TICKET_NBYTES // 8, np.int64)
        time_bookkeeping(
            arena.base, geometry, idle, none, np.zeros((1, t.ITEM_COLUMNS), np.int64), blocks,
            row, logits.ctypes.data, tickets.ctypes.data,
            arena.base + layout.worker_scratch[0], count, catalog.num_layers, spent,
        )  # fmt: skip
    return (spent / steps / 1e6).tolist()


def step_ms(given: argparse.Namespace) -> float:
    """A decode step of the engine, everything in RAM."""
    done, _, _ = run_limited(
        [sys.executable, str(PEERS / "shadowlane_run.py"), f"--model={given.model}",
         f"--threads={given.threads}", "--vocab=1000", "--prompt-tokens=4",
         f"--new-tokens={given.tokens}", "--warmup=8", "--set=ctx_size=512"],
        None,
        given.timeout,
    )  # fmt: skip
    result = last_json_line(done.stdout)
    if done.returncode != 0 or result is None:
        said = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        raise ValueError(f"the engine must finish; {said[-1]}")
    if result["experts"]["slots"] != result["experts"]["of"]:
        raise ValueError(f"all experts of {given.model} must fit RAM; they do not")
    return 1000 / result["decode_tok_per_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a mixture that fits RAM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400, help="of bookkeeping alone")
    parser.add_argument("--tokens", type=int, default=64, help="of the engine")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=900.0)
    parser.add_argument("--output", choices=["md", "json"], default="md")
    given = parser.parse_args()
    blueprint, _ = read_blueprint(given.model, Options(context=64), given.threads)
    if blueprint.experts is None:
        parser.error(f"{given.model} must be a mixture of experts; it is not")
    steps, parts = [], []
    try:
        for _ in range(given.rounds):
            parts.append(bookkeeping_ms(blueprint, given.steps))
            steps.append(step_ms(given))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    shares = spread(100 * sum(each) / step for each, step in zip(parts, steps, strict=True))
    whole = spread(steps)
    if shares is None or whole is None:
        parser.error("rounds must be positive")
    if given.output == "json":
        print(as_json({"hardware": hardware_line(given.model), "parts_ms": parts,
                       "step_ms": steps, "share_pct": shares}))  # fmt: skip
        return
    print(f"{hardware_line(given.model)}  \n{versions('shadowlane', 'numba')}\n")
    rows = []
    for name, column in zip(PARTS, zip(*parts, strict=True), strict=True):
        value = spread(column)
        assert value is not None, "there is at least one round"
        rows.append((name, value.text(3)))
    rows.append(("a decode step", whole.text(1)))
    print(markdown_table(("what", "ms per step"), rows))
    print(f"\n{shares.text(1)} % of a step")


if __name__ == "__main__":
    main()
