"""How far the planner's model is from published speeds of llama.cpp, and which figures fit them.

    python benchmarks/calibration.py                 # errors on points that were not fitted
    python benchmarks/calibration.py --points        # and every point, the worst first
    python benchmarks/calibration.py --output json
    python benchmarks/calibration.py --seeds 2       # faster, rougher: fewer ways to halve

Figures are shares of nominal rates and costs of a group, a crossing, a row: see `FIGURES`. They are
fitted on one half of `benchmarks/data/llama_bench.yaml` and tried on the other, then the other way
round, so that each point is predicted by figures that never saw it. Halves are drawn by points and
by whole machines, each in several ways (`--seeds`). A machine whose memory speed or link its source
does not tell has a figure of its own where points of it were fitted; where none were, it is taken
for an average machine.

What is printed: median and 90th percentile of |predicted / published - 1| over all halvings, the
least and the greatest median of one halving, and the figures fitted on everything. Nothing is run
but arithmetic: about a minute, no model, no card.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations

import numpy as np
from measure import markdown_table
from published import Law, Point, data, law_of, read_points, speed

SEEDS = 10  # ways to halve: seeds 0, 1, ...
ROUNDS = 4  # of the fit; more change no figure by more than 3 %
NUDGE = 0.02  # of a figure's logarithm, for its derivative
SCATTER = 0.1  # of the logarithm of a speed: errors beyond it count as absolute, not squared
LONGEST = 0.7  # of a step in a figure's logarithm


@dataclass(frozen=True, slots=True)
class Figure:
    start: float
    loose: float  # standard deviation of its logarithm, before any point is seen
    unit: str
    means: str


FIGURES = {
    "vram_packed": Figure(0.85, 0.3, "share", "VRAM bandwidth reached in decode, packed weights"),
    "vram_f16": Figure(0.9, 0.3, "share", "the same, 16-bit weights"),
    "vram_kv": Figure(0.5, 0.5, "share", "the same, keys and values"),
    "launch_s": Figure(8e-6, 1.0, "s", "each group on a card, decode, CUDA graphs"),
    "launch_eager_s": Figure(16e-6, 1.0, "s", "the same before CUDA graphs (May 2024)"),
    "crossing_s": Figure(1.5e-4, 1.0, "s", "each change between card and processor"),
    "dram": Figure(
        0.65, 0.3, "share", "nominal RAM bandwidth that the processor reaches in decode"
    ),
    "dram_q8": Figure(0.75, 0.3, "share", "the same, weights of 8 bits"),
    "dram_untold": Figure(70.0, 1.0, "GB/s", "nominal RAM bandwidth where it is not told"),
    "cpu_launch_s": Figure(1e-5, 1.0, "s", "each group on the processor, decode"),
    "tensor_packed": Figure(1.0, 0.5, "share", "fp16 tensor rate reached in prefill, packed"),
    "tensor_f16": Figure(0.8, 0.5, "share", "the same, 16-bit weights, or unpacked to 16 bits"),
    "tensor_attn_fused": Figure(0.3, 1.0, "share", "the same, fused attention"),
    "tensor_attn_plain": Figure(0.2, 1.0, "share", "the same, attention that is not fused"),
    "overlap": Figure(0.5, 0.5, "share", "of what two cards could compute at once in prefill"),
    "expert_padding": Figure(32.0, 1.0, "rows", "of waste in each expert on a card, prefill"),
    "link": Figure(0.6, 0.5, "share", "nominal PCIe rate reached by weights copied in prefill"),
    "routing_spread": Figure(0.8, 0.3, "power", "rows choose experts like rows**this at random"),
    "core_flops_ik": Figure(140e9, 0.5, "1/s", "operations of a core in prefill, ik_llama.cpp"),
    "core_flops": Figure(80e9, 0.5, "1/s", "the same, llama.cpp"),
}
OWN_LOOSE = 0.5  # of a machine's own figure


@dataclass(frozen=True, slots=True)
class Prediction:
    point: Point
    tok_s: float

    @property
    def error(self) -> float:
        return self.tok_s / self.point.tok_s - 1.0


class Player:
    """Speeds of points under figures. A law that a point has met before is not played again."""

    def __init__(self) -> None:
        self._known: dict[tuple[Point, Law], float] = {}

    def speed(self, point: Point, figures: Mapping[str, float]) -> float:
        key = (point, law_of(point, figures))
        if key not in self._known:
            self._known[key] = speed(*key)
        return self._known[key]


def own_figures() -> list[str]:
    """Names of what only a machine knows: memory speed where it is not told; the copying rate."""
    machines = data()["machines"]
    ram = [f"dram:{name}" for name, entry in machines.items() if entry["dram_gb_s"] is None]
    return ram + [f"link:{name}" for name, entry in machines.items() if entry["cards"]]


def start_figures() -> dict[str, float]:
    own = {f"dram:{name}": 1.0 for name in data()["machines"]} | dict.fromkeys(own_figures(), 1.0)
    return {name: figure.start for name, figure in FIGURES.items()} | own


def fit(points: Sequence[Point], player: Player | None = None) -> dict[str, float]:
    """Figures under which the points are likeliest: Gauss-Newton on logarithms, robust to outliers.

    Machines, phases and degrees of offload count alike, however many points each has.
    """
    player = player or Player()
    names = [*FIGURES, *own_figures()]
    start = start_figures()
    loose = np.array([FIGURES[name].loose if name in FIGURES else OWN_LOOSE for name in names])
    origin = np.log([start[name] for name in names])
    groups = [(point.machine, point.phase, point.offload) for point in points]
    even = np.array([1.0 / groups.count(group) ** 0.5 for group in groups])
    at = origin.copy()

    def figures_at(where: np.ndarray) -> dict[str, float]:
        return start | dict(zip(names, np.exp(where).tolist(), strict=True))

    def misses(where: np.ndarray, among: Sequence[Point] = points) -> np.ndarray:
        figures = figures_at(where)
        return np.array([np.log(player.speed(point, figures) / point.tok_s) for point in among])

    for _ in range(ROUNDS):
        here = misses(at)
        slopes = np.zeros((len(points), len(names)))
        for column, name in enumerate(names):
            owner = name.partition(":")[2]
            touched = [i for i, point in enumerate(points) if owner in ("", point.machine)]
            moved = at.copy()
            moved[column] += NUDGE
            nudged = misses(moved, [points[i] for i in touched])
            slopes[touched, column] = (nudged - here[touched]) / NUDGE
        weight = even / np.maximum(1.0, np.abs(here) / SCATTER) / SCATTER**2
        normal = slopes.T @ (weight[:, None] * slopes) + np.diag(loose**-2)
        pull = slopes.T @ (weight * here) + (at - origin) / loose**2
        at -= np.clip(np.linalg.solve(normal, pull), -LONGEST, LONGEST)
    return figures_at(at)


# -- halves


def halves(
    points: Sequence[Point], key: Callable[[Point], object], seed: int = 0
) -> list[list[Point]]:
    """Two lists; what has the same key is in the same one. Even and random, same by `seed`."""
    keys = list(dict.fromkeys(key(point) for point in points))
    random.Random(seed).shuffle(keys)
    first = set(keys[::2])
    return [[point for point in points if (key(point) in first) is side] for side in (True, False)]


def by_point(point: Point) -> object:
    return point


def by_machine(point: Point) -> object:
    return point.machine


def held_out(
    points: Sequence[Point],
    key: Callable[[Point], object],
    seed: int = 0,
    player: Player | None = None,
) -> list[Prediction]:
    """Every point, predicted by figures of the half it is not in."""
    player = player or Player()
    one, two = halves(points, key, seed)
    found: list[Prediction] = []
    for fitted, tried in ((one, two), (two, one)):
        figures = fit(fitted, player)
        found += [Prediction(point, player.speed(point, figures)) for point in tried]
    return found


# -- tables


@dataclass(frozen=True, slots=True)
class Row:
    """Errors of one kind of point, in percent."""

    split: str
    phase: str
    kind: str
    points: int
    machines: int
    median: float
    least: float  # median of one halving
    greatest: float
    p90: float


def is_told(point: Point) -> bool:
    """Whether nothing about the machine had to be guessed: its memory speed is known or not met."""
    is_idle = point.offload == "full" or (point.phase == "prefill" and not point.on_cpu)
    return is_idle or data()["machines"][point.machine]["dram_gb_s"] is not None


KINDS: dict[str, Callable[[Point], bool]] = {
    "all": lambda point: True,
    "full offload": lambda point: point.offload == "full",
    "partial": lambda point: point.offload == "partial",
    "partial, memory told": lambda point: point.offload == "partial" and is_told(point),
    "none": lambda point: point.offload == "none",
    "dense": lambda point: not point.is_mixture,
    "mixtures": lambda point: point.is_mixture,
    "memory told": is_told,
}


def rows_of(split: str, halvings: Sequence[Sequence[Prediction]]) -> list[Row]:
    rows: list[Row] = []
    for phase in ("decode", "prefill"):
        for kind, belongs in KINDS.items():
            mine = [
                [p for p in found if p.point.phase == phase and belongs(p.point)]
                for found in halvings
            ]
            errors = [[abs(each.error) * 100 for each in found] for found in mine]
            medians = [float(np.median(found)) for found in errors]
            low, high = np.percentile(np.concatenate(errors), [50, 90]).tolist()
            machines = len({each.point.machine for each in mine[0]})
            rows.append(
                Row(
                    split,
                    phase,
                    kind,
                    len(mine[0]),
                    machines,
                    low,
                    min(medians),
                    max(medians),
                    high,
                )
            )
    return rows


@dataclass(frozen=True, slots=True)
class Order:
    """Pairs of layouts of one model on one machine, of published speeds 5 % or more apart."""

    phase: str
    pairs: int  # over all halvings
    right: int  # of them predicted in the published order


def order_of(phase: str, halvings: Sequence[Sequence[Prediction]]) -> Order:
    pairs = right = 0
    for found in halvings:
        mine = [each for each in found if each.point.phase == phase]
        for one, other in combinations(mine, 2):
            alike = all(
                getattr(one.point, name) == getattr(other.point, name)
                for name in ("machine", "model", "length", "depth", "rows", "on_cpu", "date")
            )
            ratio = one.point.tok_s / other.point.tok_s
            if alike and not 1 / 1.05 < ratio < 1.05:
                pairs += 1
                right += (ratio > 1.0) is (one.tok_s > other.tok_s)
    return Order(phase, pairs, right)


def describe(point: Point) -> str:
    layers = "all" if point.ngl is None else point.ngl
    experts = f", experts of {point.cpu_moe} layers in RAM" if point.cpu_moe else ""
    rows = f", {point.rows} rows" if point.phase == "prefill" else ""
    where = ", on the processor" if point.on_cpu else ""
    kv = ", KV in RAM" if point.kv_in_ram else ""
    return f"{point.phase} {point.length} at {point.depth}{rows}, ngl {layers}{experts}{kv}{where}"


def typical(halvings: Sequence[Sequence[Prediction]]) -> list[Prediction]:
    """Per point the median of its predictions, the worst first."""
    found: dict[Point, list[float]] = {}
    for predictions in halvings:
        for each in predictions:
            found.setdefault(each.point, []).append(each.tok_s)
    middle = [Prediction(point, float(np.median(speeds))) for point, speeds in found.items()]
    return sorted(middle, key=lambda each: -abs(each.error))


def as_json(
    rows: Sequence[Row],
    figures: Mapping[str, float],
    splits: Mapping[str, Sequence[Sequence[Prediction]]],
) -> str:
    points = {
        split: [
            {
                "machine": each.point.machine,
                "model": each.point.model,
                "what": describe(each.point),
                "tok_s": each.point.tok_s,
                "predicted_tok_s": each.tok_s,
                "source": each.point.source,
            }
            for each in typical(halvings)
        ]
        for split, halvings in splits.items()
    }
    phases = ("decode", "prefill")
    report = {
        "errors": [asdict(row) for row in rows],
        "orders": [asdict(order_of(phase, splits["by machines"])) for phase in phases],
        "figures": figures,
        "points": points,
    }
    return json.dumps(report, indent=1)


def errors_table(rows: Sequence[Row]) -> str:
    header = ["halves", "phase", "points of", "points", "machines", "median", "range", "p90"]
    cells = [
        [
            row.split,
            row.phase,
            row.kind,
            row.points,
            row.machines,
            f"{row.median:.1f} %",
            f"{row.least:.1f}-{row.greatest:.1f}",
            f"{row.p90:.0f} %",
        ]
        for row in rows
    ]
    return markdown_table(header, cells)


def figures_table(figures: Mapping[str, float]) -> str:
    shown = [
        [name, f"{figures[name]:.3g}", figure.unit, figure.means]
        for name, figure in FIGURES.items()
    ]
    return markdown_table(["figure", "value", "unit", "what it is"], shown)


def own_table(figures: Mapping[str, float]) -> str:
    """What was fitted of single machines, as far as points said anything about it."""
    own = [
        [name, f"{figures[name]:.2f}"]
        for name in own_figures()
        if abs(np.log(figures[name])) > 1e-3
    ]
    return markdown_table(["figure", "factor"], own)


def points_table(predictions: Sequence[Prediction]) -> str:
    header = ["machine", "model", "what", "published", "predicted", "error"]
    cells = [
        [
            each.point.machine,
            each.point.model,
            describe(each.point),
            f"{each.point.tok_s:.1f}",
            f"{each.tok_s:.1f}",
            f"{each.error:+.0%}",
        ]
        for each in predictions
    ]
    return markdown_table(header, cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", choices=("md", "json"), default="md", help="default: md")
    parser.add_argument("--points", action="store_true", help="every point, the worst first")
    parser.add_argument(
        "--seeds", type=int, default=SEEDS, metavar="N", help=f"ways to halve; default: {SEEDS}"
    )
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error(f"--seeds must be 1 or more; got {arguments.seeds}")
    points, player = read_points(), Player()
    splits = {
        name: [held_out(points, key, seed, player) for seed in range(arguments.seeds)]
        for name, key in (("by points", by_point), ("by machines", by_machine))
    }
    figures = fit(points, player)
    rows = [row for name, halvings in splits.items() for row in rows_of(name, halvings)]
    if arguments.output == "json":
        print(as_json(rows, figures, splits))
        return
    print(f"{len(points)} points; errors on the half that was not fitted\n")
    print(errors_table(rows))
    for phase in ("decode", "prefill"):
        order = order_of(phase, splits["by machines"])
        print(
            f"\n{phase}, halves by machines: {order.right} of {order.pairs} pairs of layouts of "
            "one model on one machine are predicted in the published order"
        )
    print(f"\nfitted on all points\n\n{figures_table(figures)}")
    print(f"\na machine's own, times the figure above\n\n{own_table(figures)}")
    if arguments.points:
        for name, halvings in splits.items():
            print(f"\nhalves {name}\n\n{points_table(typical(halvings))}")


if __name__ == "__main__":
    main()
