"""The shadow at work on emulated machines, on a virtual clock: what it recovers of a disturbance.

The world follows another law than the planner (`actors/emulation.py`), and its rates are off from
the hardware file by hidden factors drawn from a seed. Four run through the same steps: the best
layout by hand for the file's figures; our plan for them, kept; the same with the shadow; and a
clairvoyant who knows the hidden factors and goes over to the best plan of each stretch as it
begins, its moves included. "Recovered" is the part of the loss of the kept plan against the
clairvoyant that the shadow gets back.

    python benchmarks/emulated_shadow.py --models qwen2.5-32b --machines rtx-3080-laptop-8gb

All figures are emulated.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from shadowlane.actors.emulation import Hidden, World, true_machine
from shadowlane.planner.hardware import CALM, Conditions, Hardware
from shadowlane.planner.hybrid import HitRate, Model, Plan, Work, assumed_hits
from shadowlane.planner.hybrid_changes import MECHANISMS
from shadowlane.planner.hybrid_hand import by_hand
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.hybrid_moves import Migration, moves
from shadowlane.planner.hybrid_search import search
from shadowlane.planner.hybrid_shadow import (
    Explained,
    HybridShadow,
    MemoryTaken,
    Move,
)
from shadowlane.shapes import load_hardware, shape_model

ROOT = Path(__file__).resolve().parent.parent
STRETCH = 150  # steps
SETTLED = 60  # steps of a stretch after which its pace is measured
RECOVERED, LEAST = 0.8, 0.03  # of what could be won; of a step's time, that is worth winning
SCENARIOS: dict[str, Conditions] = {
    "calm": CALM,
    "cores: 60 % taken": Conditions(cpu=0.4),
    "card: 60 % taken": Conditions(gpu=0.4),
    "card and link: 60 % taken": Conditions(gpu=0.4, link=0.4),
    "link: 60 % taken": Conditions(link=0.4),
    "VRAM: 2 GB taken": Conditions(vram_taken_nbytes=2e9),
}


@dataclass(frozen=True, slots=True)
class Run:
    seconds: float
    pace: tuple[float, ...]  # median step of each stretch, settled
    replans: int
    moved_nbytes: float
    told: tuple[Explained, ...]
    disturbed: tuple[float, ...]  # seconds of each step while something is taken


def stretches(state: Conditions) -> tuple[Conditions, ...]:
    """Calm, disturbed, calm again."""
    return (CALM, state, CALM)


def run(
    world: World,
    work: Work,
    state: Conditions,
    plan_of: Callable[[int], Plan],
    shadow: HybridShadow | None = None,
) -> Run:
    """All stretches in `world`; `plan_of` says which plan is wanted in each."""
    total, replans, moved = 0.0, 0, 0.0
    pace: list[float] = []
    told: list[Explained] = []
    disturbed: tuple[float, ...] = ()
    mover = Mover(world, work, plan_of(0))
    for index, now in enumerate(stretches(state)):
        is_taken = now.vram_taken_nbytes != world.state.vram_taken_nbytes
        world.state = now
        if shadow is None:
            total += mover.want(plan_of(index))
        elif is_taken:
            for command in shadow.handle(MemoryTaken(now.vram_taken_nbytes)):
                if isinstance(command, Move) and command.is_urgent:
                    total += world.wait_for(command.moves)
                    moved += command.moves.nbytes
        steps: list[float] = []
        for _ in range(STRETCH):
            if shadow is None:
                steps.append(mover.step())
                continue
            measured = world.step(shadow.plan, work, shadow.moving)
            steps.append(measured.seconds)
            moved += measured.moved_nbytes
            explained = [each for each in shadow.handle(measured) if isinstance(each, Explained)]
            told += explained
            replans += len(explained)
        total += sum(steps)
        pace.append(median(steps[SETTLED:]))
        disturbed = tuple(steps) if index == 1 else disturbed
    return Run(total, tuple(pace), replans, moved, tuple(told), disturbed)


def steps_until_recovered(shadow: Run, kept: Run, known: Run) -> int | None:
    """Disturbed steps after which so much of what could be won is won; None: never, or nothing is.

    Of five steps the median counts.
    """
    lost_s = kept.pace[1] - known.pace[1]
    if lost_s < LEAST * kept.pace[1]:
        return None
    aim_s = kept.pace[1] - RECOVERED * lost_s
    steps = shadow.disturbed
    found = (i for i in range(len(steps) - 4) if median(steps[i : i + 5]) <= aim_s)
    return next(found, None)


class Mover:
    """Goes from plan to plan as a shadow would have to, told which."""

    def __init__(self, world: World, work: Work, plan: Plan) -> None:
        self._world, self._work = world, work
        self._plan = self._wanted = plan
        self._moving: Migration | None = None

    def want(self, plan: Plan) -> float:
        """From now on. Seconds that the next step waits, where the plan before has no room left."""
        world = self._world
        question = Question(world.model, world.machine, self._work, world.state, world.hit_rate)
        self._wanted = plan
        needed = moves(question, self._plan, plan)
        self._moving = needed if needed.nbytes else None
        if self._moving is None or question.fits(self._plan):
            return 0.0
        self._moving = None
        return world.wait_for(needed)

    def step(self) -> float:
        if self._moving is None:
            self._plan = self._wanted
        measured = self._world.step(self._plan, self._work, self._moving)
        if self._moving is not None:
            left = 1.0 - measured.moved_nbytes / self._moving.nbytes
            self._moving = self._moving.part(left) if left > 1e-9 else None
        return measured.seconds


def won_by_pace(shadow: Run, kept: Run, known: Run) -> float | None:
    """The same part as "recovered", of the settled steps while disturbed, moves apart."""
    lost_s = kept.pace[1] - known.pace[1]
    if lost_s < LEAST * kept.pace[1]:
        return None
    return (kept.pace[1] - shadow.pace[1]) / lost_s


def clairvoyant(world: World, question: Question) -> Plan:
    """The plan that is fastest in this world, of all that are good for true rates.

    The world's law is not the planner's: candidates are tried in it, for a few steps each.
    """
    world.state = question.state
    machine = question.machine
    plans = [answer.plan for answer in by_hand(question).values()]
    for port in (0.7, 0.85, 1.0, 1.2, 1.5):
        changed = replace(machine, dram_bytes_per_s=machine.dram_bytes_per_s * port)
        plans.append(search(replace(question, machine=changed)).plan)
    plans.append(search(question, using=[each for each in MECHANISMS if each != "bring"]).plan)
    return min(
        plans,
        key=lambda plan: median(world.step(plan, question.work).seconds for _ in range(5)),
    )


def compare(
    model: Model, machine: Hardware, hit_rate: HitRate, scenario: str, seed: int, spread: float
) -> dict[str, Any]:
    hidden = Hidden.drawn(seed, spread)
    state = SCENARIOS[scenario]
    work = Work(max_context=min(4096, model.max_context))

    def world() -> World:
        return World(model, machine, hidden, hit_rate=hit_rate, seed=seed)

    # A plan that is kept must have room in all stretches.
    memory = replace(CALM, vram_taken_nbytes=state.vram_taken_nbytes)
    stated = Question(model, machine, work, memory, hit_rate)
    hand = min(by_hand(stated).values(), key=lambda answer: answer.times.step_s).plan
    kept = search(stated).plan
    seen = {
        now: clairvoyant(
            world(), Question(model, true_machine(machine, hidden), work, now, hit_rate)
        )
        for now in dict.fromkeys(stretches(state))
    }
    known = [seen[now] for now in stretches(state)]
    runs = {
        "by hand": run(world(), work, state, lambda _: hand),
        "kept": run(world(), work, state, lambda _: kept),
        "shadow": run(
            world(),
            work,
            state,
            lambda _: kept,
            HybridShadow(
                model, machine, work, hit_rate, plan=search(replace(stated, state=CALM)).plan
            ),
        ),
        "clairvoyant": run(world(), work, state, lambda index: known[index]),
    }
    loss = runs["kept"].seconds - runs["clairvoyant"].seconds
    won = runs["kept"].seconds - runs["shadow"].seconds
    return {
        "model": model.name,
        "machine": machine.name,
        "scenario": scenario,
        "seed": seed,
        "emulated": True,
        "loss": loss / runs["clairvoyant"].seconds,
        "recovered": won / loss if loss > 0 else None,
        "over_hand": runs["by hand"].seconds / runs["shadow"].seconds - 1.0,
        "over_kept": runs["kept"].seconds / runs["shadow"].seconds - 1.0,
        "settled": won_by_pace(runs["shadow"], runs["kept"], runs["clairvoyant"]),
        "steps": steps_until_recovered(runs["shadow"], runs["kept"], runs["clairvoyant"]),
        "replans": runs["shadow"].replans,
        "moved_gb": runs["shadow"].moved_nbytes / 1e9,
        "pace": {name: each.pace for name, each in runs.items()},
        "told": [
            f"{each.why}: {each.staying_s * 1e3:.1f} -> {each.expected_s * 1e3:.1f} ms, "
            f"{each.moved_nbytes / 1e9:.2f} GB"
            for each in runs["shadow"].told
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["qwen2.5-32b"], metavar="NAME")
    parser.add_argument("--machines", nargs="+", default=["rtx-3080-laptop-8gb"], metavar="NAME")
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument("--seeds", type=int, default=3, help="worlds of hidden rates")
    parser.add_argument("--spread", type=float, default=0.3, help="how far rates may be off")
    parser.add_argument("--output", choices=("md", "json"), default="md")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    for name in asked.models:
        model = shape_model(name)
        hit_rate = assumed_hits(model)
        for file in asked.machines:
            machine = load_hardware(ROOT / "examples" / "hardware" / f"{file}.yaml")
            for scenario in asked.scenarios:
                for seed in range(asked.seeds):
                    rows.append(compare(model, machine, hit_rate, scenario, seed, asked.spread))
                    done = f"\r{len(rows)} runs, {time.monotonic() - began:.0f} s"
                    print(done, end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if asked.output == "json":
        print(json.dumps(rows, indent=1))
        return
    heads = ("model", "machine", "scenario", "world", "kept loses", "recovered", "once settled")
    heads += ("steps until 80 %", "over kept", "over by hand", "re-plans", "moved")
    print(f"| {' | '.join(heads)} |")
    print("|---" * len(heads) + "|")
    for row in rows:
        recovered, settled = (
            "-" if row[name] is None else f"{row[name]:.0%}" for name in ("recovered", "settled")
        )
        steps = "-" if row["steps"] is None else row["steps"]
        print(
            f"| {row['model']} | {row['machine']} | {row['scenario']} | {row['seed']} | "
            f"{row['loss']:.0%} | "
            f"{recovered} | {settled} | {steps} | "
            f"{row['over_kept']:+.0%} | {row['over_hand']:+.0%} | "
            f"{row['replans']} | {row['moved_gb']:.1f} GB |"
        )


if __name__ == "__main__":
    main()
