"""What was measured of each configuration, and what was predicted for it, kept for comparison."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from shadowlane.planner.catalog import Catalog
from shadowlane.planner.cost import CostModel, Workload
from shadowlane.planner.placement import Placement
from shadowlane.planner.simulate import Simulation, simulate

CONTEXT_STEP = 256  # contexts within one such step are predicted alike
WINDOW = 8  # newest steps that a configuration's pace is the mean of
MOST_KEPT = 512  # simulations; a placement has one per batch size and step of context
DRIFT_STEPS = 5  # a lane's drift is the median of at least so many steps
MEMORY_STEPS = 200  # a rival measured longer ago than this may have become slower since
HITS_HALF = 64  # steps after which a step's hits count half
HITS_STEPS = 8  # before a hit rate is believed
LEAST_STEPS = 3  # and how many it takes to be compared at all

Conditions = tuple[str, ...]  # lanes whose core is shared, sorted


@dataclass(slots=True)
class _Measured:
    label: str
    step: int = 0  # the newest it was measured in
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def pace(self) -> float:
        return sum(self.paces) / len(self.paces)


class Window:
    """The newest values of steps: the fewest that are `steps` and took `seconds` together."""

    def __init__(self, steps: int, seconds: float) -> None:
        self._steps, self._seconds = steps, seconds
        self._values: deque[tuple[float, float]] = deque()
        self._total_s = 0.0

    def add(self, value: float, seconds: float) -> None:
        self._values.append((value, seconds))
        self._total_s += seconds
        while len(self._values) > self._steps:
            oldest_s = self._values[0][1]
            if self._total_s - oldest_s < self._seconds:
                break
            self._values.popleft()
            self._total_s -= oldest_s

    def spans(self, steps: int, seconds: float) -> bool:
        return len(self._values) >= steps and self._total_s >= seconds

    @property
    def mean(self) -> float:
        return sum(value for value, _ in self._values) / len(self._values)

    @property
    def median(self) -> float:
        return median(value for value, _ in self._values)

    def __len__(self) -> int:
        return len(self._values)

    def clear(self) -> None:
        self._values.clear()
        self._total_s = 0.0


class MeasuredHits:
    """How often decode steps find in RAM what they choose; what is long past counts less."""

    def __init__(self) -> None:
        self._resident = self._chosen = 0.0
        self.steps = 0

    def add(self, resident: int, chosen: int) -> None:
        """Of one step: experts that were in RAM, and all."""
        keep = 0.5 ** (1 / HITS_HALF)
        self._resident = keep * self._resident + resident
        self._chosen = keep * self._chosen + chosen
        self.steps += 1

    @property
    def rate(self) -> float | None:
        """None while it would rest on a handful of steps."""
        if self.steps < HITS_STEPS or not self._chosen:
            return None
        return min(1.0, max(0.0, self._resident / self._chosen))


@dataclass(slots=True)
class LaneState:
    """What the planner knows of one lane of the running engine."""

    spin_us: int
    drift_s: float  # drift is measured over at least so long
    ratios: Window = field(init=False)
    is_alive: bool = True
    folded: float = 1.0  # the part of `ratio` that the cost model already knows
    delayed: float = 0.0  # fraction in the run queue while the core counts as shared, else 0
    asked_at: float = 0.0  # the fraction for which splits were compared last
    calm_windows: int = 0  # in a row, since
    probe_in: int | None = None  # steps until a lane that was set back is tried again
    probe_interval: int = 0

    def __post_init__(self) -> None:
        self.ratios = Window(DRIFT_STEPS, self.drift_s)

    @property
    def ratio(self) -> float | None:
        """Busy time measured / predicted without any drift: the median of the newest steps.

        A median follows a lasting change at once and in full, and a single odd step not at all.
        """
        if not self.ratios.spans(DRIFT_STEPS // 2 + 1, self.drift_s / 2):
            return None
        return self.ratios.median

    @property
    def drift(self) -> float:
        return 0.0 if self.ratio is None else self.ratio / self.folded - 1.0


class MeasuredPaces:
    """Pace = seconds of a step / those predicted for the era's first plan; less is better."""

    def __init__(self) -> None:
        self._measured: dict[tuple[Conditions, int], _Measured] = {}
        self._contents: dict[tuple[object, ...], int] = {}

    def content(self, placement: Placement) -> int:
        """A small number that placements with the same effect share, whatever their ids."""
        key = (tuple(placement.shares.items()), placement.sweep, placement.num_slots)
        return self._contents.setdefault(key, len(self._contents))

    def add(self, step: int, conditions: Conditions, content: int, label: str, pace: float) -> None:
        """`step` counts decode steps."""
        measured = self._measured.setdefault((conditions, content), _Measured(label))
        if step - measured.step > MEMORY_STEPS:
            measured.paces.clear()
        measured.step = step
        measured.paces.append(pace)

    def best(self, step: int, conditions: Conditions) -> tuple[str, float] | None:
        """(label, pace) of the fastest configuration measured lately under these conditions."""
        known = [
            (each.label, each.pace)
            for (under, _), each in self._measured.items()
            if under == conditions
            and len(each.paces) >= LEAST_STEPS
            and step - each.step <= MEMORY_STEPS
        ]
        return min(known, key=lambda each: each[1], default=None)

    def regret(self, step: int, conditions: Conditions, content: int) -> float | None:
        """pace / best pace - 1; None while too little is measured."""
        best = self.best(step, conditions)
        mine = self._measured.get((conditions, content))
        if best is None or mine is None or len(mine.paces) < LEAST_STEPS:
            return None
        return mine.pace / best[1] - 1

    def forget(self) -> None:
        """A new era: budget, lanes or profile changed, nothing measured before compares."""
        self._measured.clear()


class Predictions:
    """Simulations by placement and workload, made when first asked for."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._simulations: dict[tuple[int, int, int], Simulation] = {}
        self._reference: Placement | None = None
        self._reference_s: dict[tuple[int, int], float] = {}

    def of(self, placement: Placement, cost: CostModel, workload: Workload) -> Simulation:
        rows, context = _rounded(workload)
        key = (placement.placement_id, rows, context)
        if len(self._simulations) > MOST_KEPT:
            self._simulations.clear()
        if key not in self._simulations:
            workload = Workload("decode", rows, context)
            self._simulations[key] = simulate(self._catalog, placement, cost, workload=workload)
        return self._simulations[key]

    def reference_s(self, placement: Placement, cost: CostModel, workload: Workload) -> float:
        """Seconds predicted for the first placement that was asked about in this era."""
        if self._reference is None:
            self._reference = placement
        key = _rounded(workload)
        if key not in self._reference_s:
            workload = Workload("decode", *key)
            simulation = simulate(self._catalog, self._reference, cost, workload=workload)
            self._reference_s[key] = simulation.step_s
        return self._reference_s[key]

    def forget(self) -> None:
        self._simulations.clear()
        self._reference = None
        self._reference_s.clear()


def _rounded(workload: Workload) -> tuple[int, int]:
    context = -(-max(1, workload.context) // CONTEXT_STEP) * CONTEXT_STEP
    return workload.rows, context
