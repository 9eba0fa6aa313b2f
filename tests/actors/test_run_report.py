"""What is told of a request: each plan with its own steps, and how far emulation was overrun."""

from __future__ import annotations

import pytest

from shadowlane.actors.run_report import by_plan, decode_overrun, predicted_step_s
from shadowlane.actors.sequence import DecodeStep, LaneUse, Sequence
from shadowlane.ops.sampling import SamplingParams

STEPS = [DecodeStep(1, 0.010, 0.024)] * 3 + [DecodeStep(4, 0.005, 0.012)] * 8


def test_each_plan_has_its_own_prediction_beside_its_own_steps() -> None:
    first, second = by_plan(STEPS, 2.0)
    assert first == {
        "plan_id": 1,
        "steps": 3,
        "predicted_step_s": 0.010,
        "measured_step_s": pytest.approx(0.012),
    }
    assert (second["plan_id"], second["steps"]) == (4, 8)
    assert (second["predicted_step_s"], second["measured_step_s"]) == (0.005, 0.006)
    assert predicted_step_s(STEPS) == 0.005, "the median, as of what was measured"
    assert by_plan([], 2.0) == []


def test_where_a_plan_promised_nothing_all_promise_nothing() -> None:
    assert predicted_step_s([*STEPS, DecodeStep(5, None, 0.012)]) is None
    assert predicted_step_s([]) is None


def test_overruns_of_prompts_are_not_those_of_the_answer() -> None:
    sequence = Sequence(1, [1], SamplingParams(), frozenset(), None)
    sequence.use_at_first = LaneUse({}, overrun_s={"gpu:0": 5.0, "cpu:0": 0.0})
    sequence.use_after = LaneUse({}, overrun_s={"gpu:0": 5.5, "cpu:0": 0.25})
    assert decode_overrun(sequence) == {"gpu:0": 0.5, "cpu:0": 0.25}
