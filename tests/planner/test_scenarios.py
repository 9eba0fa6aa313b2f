"""What changing plans while running could win."""

from __future__ import annotations

import pytest

from shadowlane.planner.hardware import Conditions
from shadowlane.planner.hybrid_synthetic import uneven as instance
from shadowlane.planner.scenarios import Scenario, Stretch, evaluate


def test_changing_is_never_worse_than_keeping_and_moves_cost() -> None:
    question = instance(4, layers=3)
    scenarios = (
        Scenario("calm", (Stretch(100), Stretch(100))),
        Scenario("load", (Stretch(400), Stretch(400, Conditions(cpu=0.2)))),
        Scenario("short", (Stretch(400), Stretch(1, Conditions(vram_taken_nbytes=2e8)))),
    )
    calm, load, short = evaluate(question.model, question.machine, scenarios)
    assert calm.gain == pytest.approx(0.0)
    assert calm.moved_nbytes == 0.0
    for outcome in (load, short):
        assert outcome.changing_s <= outcome.kept_s <= outcome.first_s * (1 + 1e-9)
    assert load.first_s > load.changing_s
