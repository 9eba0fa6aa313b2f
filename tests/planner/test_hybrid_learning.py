"""What is learned of a machine from the steps of one plan: told by a machine that is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shadowlane.planner.hardware import CALM, Card, Hardware
from shadowlane.planner.hybrid import Load, Model, Plan, Site, Work
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.hybrid_learning import StepMeasured, bend_of, bent, learned
from shadowlane.planner.hybrid_play import work_by_kind

CARD = Card("card", 4e9, 1e9, 400e9, 40e12, 12e9, 12e9, launch_s=5e-6, crossing_s=20e-6)
MACHINE = Hardware("machine", (CARD,), 40e9, 1e12, 2e-6, 60e9, 64e9, 4e9, 5e9)
MODEL = Model(
    "model",
    tuple(
        Load(f"{layer}.{kind}", kind, layer, nbytes, 4 * nbytes)
        for layer in range(12)
        for kind, nbytes in (("qkv", 1e6), ("gate_up", 8e6), ("down", 4e6))
    ),
    10_000.0,
    1e8,
    65536,
)
HALF = Plan("", tuple(Site(0.5, 0.5) for _ in MODEL.loads))
ON_CPU = Plan("", tuple(Site(0.0, 1.0) for _ in MODEL.loads))
ROW_S = MODEL.row_nbytes / CARD.h2d_bytes_per_s


def measured(machine: Hardware, plan: Plan) -> StepMeasured:
    """A step of a machine that is just as the planner thinks, with spans."""
    times = Question(MODEL, machine, Work()).times(plan)
    work = work_by_kind(MODEL, plan, Work(), machine, CALM, lambda part: part)
    launches = {"cpu:0": machine.cpu_launch_s, "gpu:0": machine.cards[0].launch_s}
    kinds = {
        lane: {kind: count * launches[lane] + s for kind, (count, s) in of_lane.items()}
        for lane, of_lane in work.items()
    }
    return StepMeasured(times.step_s, times.busy_s, kinds_s=kinds)


@pytest.mark.parametrize("plan", [HALF, ON_CPU])
def test_launches_and_rates_are_told_apart(plan: Plan) -> None:
    """Small groups cost 20 us more each, and the cores are a tenth slower."""
    true = replace(MACHINE, cpu_launch_s=22e-6, cpu_bytes_per_s=36e9)
    found = learned(Question(MODEL, MACHINE), MACHINE, plan, measured(true, plan), is_fresh=True)
    assert found.cpu_launch_s == pytest.approx(22e-6, rel=0.1)
    assert found.cpu_bytes_per_s == pytest.approx(36e9, rel=0.02)


def test_a_layout_of_other_groups_is_then_predicted_well() -> None:
    true = replace(MACHINE, cpu_launch_s=30e-6)
    other = Plan("", tuple(Site(float(load.kind != "qkv"), 1.0) for load in MODEL.loads))
    found = learned(
        Question(MODEL, MACHINE), MACHINE, ON_CPU, measured(true, ON_CPU), is_fresh=True
    )
    predicted = Question(MODEL, found).times(other).step_s
    real = Question(MODEL, true).times(other).step_s
    assert predicted == pytest.approx(real, rel=0.02)
    assert abs(Question(MODEL, MACHINE).times(other).step_s / real - 1.0) > 0.05  # unlearned


def test_one_kind_alone_is_put_down_to_both() -> None:
    only = replace(MODEL, loads=tuple(each for each in MODEL.loads if each.kind == "down"))
    plan = Plan("", tuple(Site(0.0, 1.0) for _ in only.loads))
    took_s = 12 * (4e6 / 40e9 + 40e-6)
    step = StepMeasured(
        took_s,
        {"cpu:0": took_s, "gpu:0": 0.0, "h2d:0": 0.0, "disk:0": 0.0},
        0.0,
        {"cpu:0": {"down": took_s}},
    )
    found = learned(Question(only, MACHINE), MACHINE, plan, step, is_fresh=True)
    assert 2e-6 < found.cpu_launch_s < 40e-6
    assert 30e9 < found.cpu_bytes_per_s < 40e9
    assert Question(only, found).times(plan).step_s == pytest.approx(took_s, rel=0.01)


def test_what_changes_later_is_a_rate() -> None:
    """A neighbour on the cores makes no launch dearer."""
    true = replace(MACHINE, cpu_bytes_per_s=20e9)
    found = learned(Question(MODEL, MACHINE), MACHINE, HALF, measured(true, HALF), is_fresh=False)
    assert found.cpu_launch_s == MACHINE.cpu_launch_s
    assert found.cpu_bytes_per_s == pytest.approx(20e9, rel=0.02)


def test_what_no_lane_explains_is_put_down_to_crossings() -> None:
    true = replace(MACHINE, cards=(replace(CARD, crossing_s=50e-6),))
    found = learned(Question(MODEL, MACHINE), MACHINE, HALF, measured(true, HALF), is_fresh=True)
    assert found.cards[0].crossing_s == pytest.approx(50e-6, rel=0.02)


def test_told_crossings_are_learned_from_one() -> None:
    """All is on the card: next to nothing of a step, and yet known for plans of many crossings."""
    true = replace(MACHINE, cards=(replace(CARD, crossing_s=50e-6),))
    on_card = Plan("", tuple(Site(1.0, 0.0) for _ in MODEL.loads))
    told = replace(measured(true, on_card), crossings_s={"gpu:0": 50e-6 + ROW_S})
    found = learned(Question(MODEL, MACHINE), MACHINE, on_card, told, is_fresh=True)
    assert found.cards[0].crossing_s == pytest.approx(50e-6, rel=0.01)
    assert found.cards[0].h2d_bytes_per_s == CARD.h2d_bytes_per_s


def test_each_card_tells_of_its_own_link() -> None:
    far = replace(CARD, crossing_s=100e-6)
    two = replace(MACHINE, cards=(CARD, far))
    plan = Plan("", tuple(Site(0.5, 0.5, over=(1.0, 0.0)) for _ in MODEL.loads))
    question = Question(MODEL, two)
    times = question.times(plan)
    for crossings_s in (
        {"gpu:0": 20e-6 + ROW_S},  # a machine as it is stated
        {"gpu:0": 20e-6 + ROW_S, "gpu:1": 100e-6 + ROW_S, "cpu:0": 100e-6 + ROW_S},
        {"cpu:0": 100e-6 + ROW_S},
    ):
        told = StepMeasured(times.step_s, times.busy_s, crossings_s=crossings_s)
        found = learned(question, two, plan, told, is_fresh=True)
        assert [card.crossing_s for card in found.cards] == pytest.approx([20e-6, 100e-6])


def test_many_rows_cross_at_the_rate_of_the_link() -> None:
    work = Work("prefill", rows=2048, context=2048, max_context=4096)
    on_card = Plan("", tuple(Site(1.0, 0.0) for _ in MODEL.loads))
    question = Question(MODEL, MACHINE, work)
    times = question.times(on_card)
    crossing_s = CARD.crossing_s + 2048 * ROW_S * 2
    told = StepMeasured(times.step_s, times.busy_s, crossings_s={"gpu:0": crossing_s})
    found = learned(question, MACHINE, on_card, told, is_fresh=True)
    assert found.cards[0].h2d_bytes_per_s == pytest.approx(CARD.h2d_bytes_per_s / 2, rel=0.01)
    assert found.cards[0].crossing_s == CARD.crossing_s


def test_hits_bend_what_was_promised() -> None:
    loads = tuple(
        Load(f"{layer}.experts", "experts", layer, 1e6, 1e6, experts=16, top_k=2)
        for layer in range(4)
    )
    model = Model("mixture", loads, 1e4, 1e8, 4096)
    plan = Plan("", tuple(Site(0.25, 0.75) for _ in loads))

    def promised(part: float) -> float:
        return part**0.5

    for hits in (0.3, 0.5, 0.8):
        assert bent(promised, bend_of(model, plan, promised, hits))(0.25) == pytest.approx(
            hits, abs=1e-3
        )
    assert bent(promised, 2.0)(0.0) == 0.0
    assert bent(promised, 2.0)(1.0) == 1.0
