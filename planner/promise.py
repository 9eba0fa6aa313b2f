"""What was promised of a plan that runs, and what came of it, told once."""

from __future__ import annotations

from collections import deque
from statistics import median

from shadowlane.planner import events as ev
from shadowlane.planner.placement import Placement


class Promise:
    """Of the placement in force; the first is told of nobody, since nothing was changed for it."""

    def __init__(self, steps: int) -> None:
        """steps: after so many a placement is known."""
        self._steps = steps
        self._placement: Placement | None = None
        self._lately: deque[float] = deque(maxlen=steps)  # seconds of its newest steps
        self._before_s: float | None = None  # what steps took, before it began
        self._is_told = True

    def of(self, placement: Placement) -> list[ev.Command]:
        """It begins. What ran before may have been measured for some steps only: that is told."""
        told = [] if self._is_told else [self._told()]
        self._before_s = median(self._lately) if self._lately else None
        self._is_told = self._placement is None
        self._placement = placement
        self._lately.clear()
        return [*told]

    def took(self, step: ev.StepRetired) -> list[ev.Command]:
        self._lately.append(step.seconds)
        if self._is_told or len(self._lately) < self._steps:
            return []
        self._is_told = True
        return [self._told()]

    def _told(self) -> ev.Note:
        assert self._placement is not None, "it was promised something"
        got = f"{show_ms(median(self._lately))} measured" if self._lately else "not measured"
        before = "" if self._before_s is None else f"; {show_ms(self._before_s)} before"
        expected = show_ms(self._placement.predicted_step_s)
        return ev.Note(
            f"plan {self._placement.placement_id}: {expected} a step expected, {got}{before}"
        )


def show_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
