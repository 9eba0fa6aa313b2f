"""How long planning takes: what `shadowlane plan` does for shipped shapes, and an engine's planner.

    python benchmarks/planning.py

An engine's planner is `planner/card_planner.py` itself, told of steps as an engine tells it, of two
made-up catalogs: a Llama of 80 layers and a mixture of 48 layers with 512 experts each. First it
plans; then the cores take twice as long as predicted, and half of each card is taken by another
program and given back. *First plan* is the answer to the engine's start; *longest answer* is the
longest to any other event, of which the engine's steps do not wait; *re-plan* is the longest of
those that gave a new placement. Medians of rounds, and least and most in brackets.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from machine import hardware_line
from measure import markdown_table, spread

from shadowlane.planner import events as ev
from shadowlane.planner.card_planner import CardPlanner
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.hardware import Hardware
from shadowlane.planner.placement import LaneSpec, Placement, Request
from shadowlane.planner.synthetic import llama_catalog, mixture_catalog
from shadowlane.shapes import known_shapes, load_hardware, shape_model
from shadowlane.what_if import what_if

HARDWARE = Path(__file__).resolve().parent.parent / "examples" / "hardware"
MACHINES = ("rtx-3080-laptop-8gb", "two-rtx-3090")
ON_CARDS = 0.3  # of the weights, over all cards
CALM, SLOWER, TAKEN = 10, 60, 30  # steps
CATALOGS: dict[str, Callable[[], Catalog]] = {
    "80 layers": lambda: llama_catalog(
        layers=80, hidden=8192, inner=28672, vocab=32000, tile_rows=640
    ),
    "48 layers, 512 experts each": lambda: mixture_catalog(
        layers=48, num_experts=512, top_k=10, expert_inner=512, hidden=2048, inner=512, vocab=151936
    ),
}


class Timed:
    """An engine that obeys at once, and notes how long its planner took to answer."""

    def __init__(self, catalog: Catalog, machine: Hardware) -> None:
        weights = sum(block.held_nbytes for block in catalog.blocks)
        if catalog.experts is not None:
            weights += catalog.experts.total * catalog.experts.slot_nbytes
        cards = len(machine.cards)
        self.budget = round(ON_CARDS * weights / cards)
        names = [f"gpu:{number}" for number in range(cards)]
        request = Request(
            ram=2 * weights,
            lanes=tuple(LaneSpec(name, 1) for name in ("cpu:0", *names)),
            context=4096,
            machine=machine,
            cards=(self.budget,) * cards,
        )
        self.planner = CardPlanner(catalog, request)
        self.answers_s: list[float] = []
        self.replans_s: list[float] = []
        self.step, self.running = 0, 0
        self.placements: dict[int, Placement] = {}
        self.tell(ev.EngineStarted())
        self.first_s = self.answers_s[0]
        self.answers_s, self.replans_s = [], []

    def tell(self, event: ev.Event) -> None:
        began = time.perf_counter()
        commands = self.planner.handle(event)
        took = time.perf_counter() - began
        self.answers_s.append(took)
        for command in commands:
            if isinstance(command, ev.PublishPlacement):
                self.replans_s.append(took)
                self._publish(command.placement)
            elif isinstance(command, ev.AnnouncePlacement):
                self.running = command.placement_id
                self.tell(ev.PlacementAnnounced(command.placement_id, self.step + 1))

    def _publish(self, placement: Placement) -> None:
        self.placements[placement.placement_id] = placement
        links = [card.link for card in placement.cards]
        for lane in [*(each.name for each in placement.lanes), *links, "disk:0"]:
            self.tell(ev.PlacementAcknowledged(lane, placement.placement_id))

    def steps(self, count: int, slower: float) -> None:
        """slower: the cores than predicted, with which the whole step gets longer."""
        for _ in range(count):
            self.step += 1
            placement = self.placements[self.running]
            seconds = placement.predicted_step_s * slower
            busy = {"cpu:0": 0.8 * seconds, "disk:0": 0.0}
            for card in placement.cards:
                busy |= {card.lane: 0.1 * seconds / slower, card.link: 0.0}
            self.tell(ev.StepRetired(self.step, self.running, "decode", 1, 100, seconds, busy))


def driven(catalog: Catalog, machine: Hardware) -> Timed:
    engine = Timed(catalog, machine)
    engine.steps(CALM, 1.0)
    engine.steps(SLOWER, 2.0)
    engine.tell(ev.MemoryLeft(engine.budget / 2))
    engine.steps(TAKEN, 2.0)
    engine.tell(ev.MemoryLeft(0.0))
    engine.steps(TAKEN, 2.0)
    return engine


def show(seconds: Sequence[float]) -> str:
    found = spread(seconds)
    if found is None:
        return "none"
    middle, least, most = (round(1000.0 * each) for each in (found.median, found.low, found.high))
    return f"{middle} ms ({least}-{most})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    print(hardware_line(), "\n")
    machines = {name: load_hardware(HARDWARE / f"{name}.yaml") for name in MACHINES}
    rows = []
    for name in known_shapes():
        cells = [name]
        for machine in machines.values():
            print(f"\r{name}, {machine.name}\x1b[K", end="", file=sys.stderr, flush=True)
            found = [
                what_if(shape_model(name, 4096), machine)["planning_s"] for _ in range(given.rounds)
            ]
            cells.append(show(found))
        rows.append(cells)
    print(markdown_table(["`shadowlane plan`", *MACHINES], rows), "\n")
    rows = []
    for name, make in CATALOGS.items():
        catalog = make()
        for label, machine in machines.items():
            print(f"\r{name}, {label}\x1b[K", end="", file=sys.stderr, flush=True)
            runs = [driven(catalog, machine) for _ in range(given.rounds)]
            rows.append(
                [
                    f"{name} ({len(catalog.groups)} groups)",
                    label,
                    show([each.first_s for each in runs]),
                    show([max(each.replans_s) for each in runs if each.replans_s]),
                    show([max(each.answers_s) for each in runs]),
                    str(len(runs[0].replans_s)),
                ]
            )
    print(file=sys.stderr)
    titles = [
        "an engine's planner",
        "machine",
        "first plan",
        "re-plan",
        "longest answer",
        "re-plans",
    ]
    print(markdown_table(titles, rows))


if __name__ == "__main__":
    main()
