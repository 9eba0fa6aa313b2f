"""What is told of a plan that has begun: expected, measured, and before; once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shadowlane.planner import events as ev
from shadowlane.planner.cost import CostModel
from shadowlane.planner.placement import Placement, Request
from shadowlane.planner.promise import Promise
from shadowlane.planner.search import place
from shadowlane.planner.synthetic import llama_catalog

CATALOG = llama_catalog(layers=2)


def placement(number: int, seconds: float) -> Placement:
    made = place(CATALOG, Request(ram=1 << 30, context=64), CostModel(None))
    return replace(made, placement_id=number, predicted_step_s=seconds)


def step(number: int, seconds: float) -> ev.StepRetired:
    return ev.StepRetired(1, number, "decode", 1, 64, seconds, {})


def told(commands: list[ev.Command]) -> list[str]:
    return [command.text for command in commands if isinstance(command, ev.Note)]


def test_a_plan_is_told_once_after_so_many_steps() -> None:
    promise = Promise(3)
    assert promise.of(placement(1, 0.010)) == []
    assert [promise.took(step(1, 0.012)) for _ in range(9)] == [[]] * 9, "nothing was changed"
    assert promise.of(placement(2, 0.008)) == []
    assert promise.took(step(2, 0.009)) == promise.took(step(2, 0.009)) == []
    text = "plan 2: 8 ms a step expected, 9 ms measured; 12 ms before"
    assert told(promise.took(step(2, 0.009))) == [text]
    assert promise.took(step(2, 0.009)) == []
    assert promise.of(placement(3, 0.007)) == [], "it has been told"


@pytest.mark.parametrize(("steps", "got"), [(0, "not measured"), (2, "9 ms measured")])
def test_a_plan_that_gives_way_early_is_told_as_far_as_it_is_known(steps: int, got: str) -> None:
    promise = Promise(3)
    promise.of(placement(1, 0.010))
    promise.took(step(1, 0.012))
    promise.of(placement(2, 0.008))
    for _ in range(steps):
        assert promise.took(step(2, 0.009)) == []
    text = f"plan 2: 8 ms a step expected, {got}; 12 ms before"
    assert told(promise.of(placement(3, 0.007))) == [text]
