"""Comparisons on line: options run in turn for a few steps each, and the fastest measured stays.

A prediction proposes, a measurement decides. The incumbent keeps its place unless another option
is faster by `needed_gain`; a negative one favours the newcomer, which then only has to keep up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from shadowlane.planner.placement import Placement


@dataclass(frozen=True, slots=True)
class Settings:
    """Every threshold of the shadow, with its reason."""

    drift_threshold: float = 0.15  # |measured / expected - 1| of a lane that makes us think again
    # NOTE: short steps are counted in seconds: what else runs on a machine comes in bursts of tens
    # of milliseconds, and three steps of 14 ms measure a burst.
    drift_s: float = 1.0  # what a lane's drift is measured over, at least
    min_steps_between: int = 5  # decode steps between two thoughts; doubled by each one undone
    min_s_between: float = 2.0  # ... and seconds of decoding, doubled likewise
    gain_threshold: float = 0.03  # what a new plan must promise, or measure, to be worth a switch
    tolerance: float = 0.02  # how much slower a new plan may measure before it is undone: noise
    trial_steps: int = 3  # measured steps per option, at least
    trial_s: float = 0.15  # ... and measured seconds
    settle_steps: int = 1  # steps after a switch that are not measured
    # NOTE: engine, driver and Ray take a tenth of two cores themselves, a quarter while a process
    # comes up; that is no neighbour, who would want half. Taken for one, it cost a third of the
    # speed: a team that sleeps at barriers wakes late.
    delay_high: float = 0.3  # fraction of time in the run queue from which a core counts as shared
    delay_step: float = 0.2  # how much worse it must get for splits to be compared anew
    delay_low: float = 0.15  # ... and below which, twice in a row, it counts as ours again
    spin_us: int = 50  # what a wait spins on a core of our own
    shifted_weight: float = 0.5  # a disturbed lane's part of its usual rows, as a third option
    clear_win: float = 0.15  # dropping a lane wins by so much that the third option is not tried
    probe_cost: float = 0.02  # part of all time that probes which lose may take
    probe_min_steps: int = 20
    probe_max_steps: int = 2000
    horizon_steps: int = 200  # moving blocks must pay for itself within these


@dataclass(frozen=True, slots=True)
class Option:
    label: str  # for people: "cpu:1 dropped"
    placement: Placement  # as a pattern: it gets a new id whenever it is published
    weights: Mapping[str, float]  # lane -> part of its usual rows

    @staticmethod
    def as_placed(label: str, placement: Placement) -> Option:
        """Lanes that got a share count in full, the others not at all."""
        active = placement.active_lanes
        weights = {lane.name: float(lane.name in active) for lane in placement.lanes}
        return Option(label, placement, weights)


@dataclass(slots=True)
class Trial:
    why: str
    needed_gain: float
    current: Option  # running, or on its way
    queue: deque[Option] = field(default_factory=deque)  # still to be run
    results: list[tuple[Option, float]] = field(default_factory=list)  # the incumbent's is first
    lane: str | None = None  # the disturbed lane, if that is what the trial is about

    def winner(self) -> tuple[Option, float]:
        """The fastest rival if it beats the incumbent by `needed_gain`, else the incumbent."""
        incumbent, *rivals = self.results
        best = min(rivals, key=lambda result: result[1], default=incumbent)
        return best if best[1] <= incumbent[1] * (1 - self.needed_gain) else incumbent

    def summary(self) -> str:
        return ", ".join(f"{option.label} {pace:.3f}" for option, pace in self.results)


def choices_for_shared_core(
    weights: Mapping[str, float], lane: str, settings: Settings, delays: Mapping[str, float]
) -> list[tuple[str, dict[str, float]]]:
    """(label, weights) of what may help while the core of `lane` is shared, best bet first.

    delays: how much each lane's core is shared, as far as it is known (of a lane without rows, how
    much it was). All rows are not moved to cores that are shared clearly more.
    """
    dropped = {**weights, lane: 0.0}
    if not any(dropped.values()):  # the others had been dropped before, for the same reason
        dropped = {other: float(other != lane) for other in weights}
    limit = delays.get(lane, 0.0) + settings.delay_step / 2
    if all(delays.get(other, 0.0) > limit for other, part in dropped.items() if part):
        dropped = {}
    found = [
        (f"{lane} dropped", dropped),
        (f"{lane} at a part", {**weights, lane: settings.shifted_weight}),
        ("all lanes", dict.fromkeys(weights, 1.0)),
    ]
    seen = [dict(weights)]
    choices: list[tuple[str, dict[str, float]]] = []
    for label, each in found:
        if each not in seen and any(each.values()):
            seen.append(each)
            choices.append((label, each))
    return choices


def probe_interval(trial: Trial, previous: int, settings: Settings, step_s: float) -> int:
    """Steps until the question of this trial is put again. step_s: what a step takes now.

    So many that asking takes less than `probe_cost` of the time even if the slowest option is what
    is tried; and twice as many as last time, for what has lasted will last.
    """
    _, pace = trial.winner()
    lost = max(each for _, each in trial.results) / pace - 1.0
    # Besides the measured steps, those that pass while lanes acknowledge and settle, twice.
    measured = max(settings.trial_steps, int(settings.trial_s / max(step_s, 1e-6)))
    num_steps = measured + 2 * settings.settle_steps + 2
    affordable = int(lost * num_steps / settings.probe_cost) + 1
    doubled = min(2 * previous, settings.probe_max_steps)
    return max(settings.probe_min_steps, doubled, affordable)
