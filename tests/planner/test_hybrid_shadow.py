"""The shadow of plans over cards, told by hand what was measured: events in, commands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from shadowlane.actors.emulation import Hidden, World
from shadowlane.planner.hardware import CALM, Card, Conditions, Hardware
from shadowlane.planner.hybrid import Load, Model, Plan, Work, fits
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.hybrid_learning import StepMeasured
from shadowlane.planner.hybrid_moves import moves
from shadowlane.planner.hybrid_search import search
from shadowlane.planner.hybrid_shadow import (
    Command,
    Explained,
    HybridShadow,
    MemoryTaken,
    Move,
    ShadowSettings,
    Switch,
    WorkChanged,
)
from shadowlane.shapes import load_hardware, shape_model

LAPTOP = Path(__file__).parents[2] / "examples" / "hardware" / "rtx-3080-laptop-8gb.yaml"
CARD = Card("card", 4e9, 1e9, 400e9, 40e12, 12e9, 12e9, launch_s=5e-6, crossing_s=20e-6)
MACHINE = Hardware("machine", (CARD,), 40e9, 1e12, 2e-6, 60e9, 64e9, 4e9, 5e9)
WORK = Work()
MODEL = Model(
    "model",
    tuple(
        Load(f"{layer}.{kind}", kind, layer, nbytes, 4 * nbytes)
        for layer in range(12)
        for kind, nbytes in (("qkv", 1e8), ("gate_up", 4e8), ("down", 2e8))
    ),
    10_000.0,
    1e8,
    65536,
)


def shadow(**settings: float) -> HybridShadow:
    return HybridShadow(MODEL, MACHINE, WORK, settings=ShadowSettings(**settings))  # type: ignore[arg-type]


def really(plan: Plan, state: Conditions = CALM) -> StepMeasured:
    """What a machine that is just as the planner thinks would measure."""
    times = Question(MODEL, MACHINE, WORK, state).times(plan)
    return StepMeasured(times.step_s, times.busy_s)


def feed(
    it: HybridShadow,
    steps: int,
    state: Conditions = CALM,
    moved: float = 1e12,
) -> list[Command]:
    """So many steps of whatever plan is in force, and what was said to them."""
    said: list[Command] = []
    for _ in range(steps):
        said += it.handle(replace(really(it.plan, state), moved_nbytes=moved))
    return said


def scaled(step: StepMeasured, factors: Mapping[str, float], seconds: float) -> StepMeasured:
    busy = {lane: busy * factors.get(lane, 1.0) for lane, busy in step.busy_s.items()}
    return StepMeasured(step.seconds * seconds, busy)


def test_as_predicted_nothing_happens() -> None:
    it = shadow()
    plan = it.plan
    assert feed(it, 60) == []
    assert it.plan == plan


def test_less_than_the_threshold_is_not_thought_about() -> None:
    it = shadow()
    feed(it, 10)
    step = scaled(really(it.plan), {"cpu:0": 1.1}, 1.1)
    assert [command for _ in range(30) for command in it.handle(step)] == []


def test_cores_that_are_taken_move_work_to_the_card_and_back_again() -> None:
    it = shadow()
    feed(it, 10)
    calm, plan = really(it.plan).seconds, it.plan
    taken = Conditions(cpu=0.3)
    kept = really(plan, taken).seconds
    said = feed(it, 60, taken)
    assert any(isinstance(command, Explained) for command in said)
    assert any(isinstance(command, Switch) for command in said)
    best = search(Question(MODEL, MACHINE, WORK, taken)).times.step_s
    assert really(it.plan, taken).seconds <= best + 0.2 * (kept - best)  # four fifths recovered
    feed(it, 120)
    assert really(it.plan).seconds <= calm * 1.03


def test_a_plan_takes_over_when_all_it_needs_has_arrived() -> None:
    it = shadow()
    feed(it, 10)
    plan = it.plan
    said: list[Command] = []
    for _ in range(60):
        if any(isinstance(command, Move) for command in said):
            break
        said += it.handle(really(it.plan, Conditions(cpu=0.1)))
    move = next(command for command in said if isinstance(command, Move))
    assert it.moving == move.moves
    part = replace(really(plan, Conditions(cpu=0.1)), moved_nbytes=move.moves.nbytes / 4)
    assert [it.handle(part) for _ in range(3)] == [[], [], []]
    assert it.plan == plan
    last = replace(part, moved_nbytes=part.moved_nbytes - 0.5)  # bytes: what is left is rounding
    assert it.handle(last) == [Switch(move.plan)]
    assert it.plan == move.plan


def test_a_plan_that_measures_slower_is_undone_and_more_is_asked_of_the_next() -> None:
    it = shadow()
    feed(it, 10)
    plan = it.plan
    taken = Conditions(cpu=0.3)
    while it.plan == plan:
        feed(it, 1, taken)
    before = really(plan, taken)
    said: list[Command] = []
    for _ in range(12):  # whatever was promised, it is a third slower than before
        if it.plan == plan:
            break
        step = scaled(
            really(it.plan, taken), {}, 1.33 * before.seconds / really(it.plan, taken).seconds
        )
        said += it.handle(replace(step, moved_nbytes=1e12))
    assert it.plan == plan
    assert any(isinstance(each, Explained) and "slower" in each.why for each in said)
    again = [it.handle(replace(before, moved_nbytes=1e12)) for _ in range(30)]
    assert not any(again)  # the same once more would disappoint again


def test_memory_that_is_taken_is_given_back_at_once_and_used_again_later() -> None:
    it = shadow()
    feed(it, 10)
    full = really(it.plan).seconds
    commands = it.handle(MemoryTaken(1.5e9))
    assert isinstance(commands[0], Switch)  # RAM holds a copy of all that is on the card
    less = Conditions(vram_taken_nbytes=1.5e9)
    assert fits(MODEL, it.plan, WORK, MACHINE, less)
    feed(it, 40)
    assert fits(MODEL, it.plan, WORK, MACHINE, less)
    it.handle(MemoryTaken(0.0))
    feed(it, 80)
    assert really(it.plan).seconds <= full * 1.03


def test_what_ram_has_no_copy_of_is_saved_before_memory_is_given_back() -> None:
    """The next step waits for it; the plan that follows has it in RAM."""
    need = MODEL.nbytes - 3e9 + MODEL.fixed_ram_nbytes  # RAM is full beside 3 GB on the card
    small = replace(MACHINE, ram_nbytes=4e9 + need + 1.2e9)
    it = HybridShadow(MODEL, small, WORK)
    before = it.plan
    commands = it.handle(MemoryTaken(1e9))
    move, switch = commands[:2]
    assert isinstance(move, Move)
    assert move.is_urgent
    assert switch == Switch(move.plan)
    assert it.moving is None or it.plan == move.plan
    assert move.moves == moves(it.question, before, move.plan)
    assert 0.0 < move.moves.d2h_nbytes[0] <= 1.1e9
    assert move.moves.h2d_nbytes == (0.0,)


def test_longer_contexts_are_planned_for_when_they_come() -> None:
    attn = Load("12.attn", "attn", 12, 0.0, 4096.0, kv_nbytes_per_token=2e5)
    model = replace(MODEL, loads=(*MODEL.loads, attn))
    it = HybridShadow(model, MACHINE, Work(max_context=512))
    grown = Work(context=8192, max_context=12_000)
    it.handle(WorkChanged(grown))
    assert fits(model, it.plan, grown, MACHINE)
    assert it.question.work == grown


def test_what_is_learned_of_the_port_predicts_what_was_measured() -> None:
    """The disk writes beside the cores: once, for who predicts as for who learns."""
    narrow = replace(MACHINE, cards=(), ram_nbytes=4e9 + 7.5e9)
    narrow = replace(narrow, cpu_bytes_per_s=30e9, dram_bytes_per_s=33e9)
    it = HybridShadow(MODEL, narrow, WORK)
    assert really_on(narrow, it.plan).busy_s["disk:0"] > 0.1
    true = replace(narrow, dram_bytes_per_s=31e9)
    for _ in range(6):
        it.handle(really_on(true, it.plan))
    assert it.machine.dram_bytes_per_s == pytest.approx(31e9, rel=0.02)
    learned = it.question.times(it.plan).busy_s["cpu:0"]
    assert learned == pytest.approx(really_on(true, it.plan).busy_s["cpu:0"], rel=0.01)


def really_on(machine: Hardware, plan: Plan) -> StepMeasured:
    times = Question(MODEL, machine, WORK).times(plan)
    return StepMeasured(times.step_s, times.busy_s)


def test_what_moves_nothing_has_to_promise_less() -> None:
    """A plan that brings too little of its rows is mended, where nothing would be moved for 2 %."""
    best = search(Question(MODEL, MACHINE, WORK)).plan
    best_s = Question(MODEL, MACHINE, WORK).times(best).step_s
    worse = next(
        plan
        for part in range(99, 0, -1)
        if really(plan := bringing(best, part / 100)).seconds >= 1.015 * best_s
    )
    assert really(worse).seconds < 1.03 * best_s
    for idle_gain, moved in ((0.01, True), (0.03, False)):
        it = HybridShadow(
            MODEL, MACHINE, WORK, settings=ShadowSettings(idle_gain=idle_gain), plan=worse
        )
        said = feed(it, 60)
        assert any(isinstance(each, Switch) for each in said) == moved
        assert not any(isinstance(each, Move) for each in said)
        assert (really(it.plan).seconds < really(worse).seconds) == moved


def bringing(plan: Plan, part: float) -> Plan:
    """The same with less brought."""
    sites = tuple(replace(site, brought=site.brought * part) for site in plan.sites)
    return replace(plan, sites=sites)


def test_cores_or_the_dram_port_the_next_steps_tell() -> None:
    """Steps are slower from the first on. Both would explain it, and one change tells."""
    model, machine = shape_model("qwen2.5-32b"), load_hardware(LAPTOP)
    world = World(model, machine, Hidden(cpu=0.78, gpu=1.2, link=1.16))
    work = Work(max_context=4096)
    it = HybridShadow(model, machine, work)
    steps = [world.step(it.plan, work) for _ in range(5)]
    said = [it.handle(step) for step in steps]
    assert any("cores or of the DRAM port" in each.why for each in told(said))
    for _ in range(20):
        step = world.step(it.plan, work)
        said.append(it.handle(step))
    assert step.seconds < 0.95 * steps[0].seconds
    assert it.machine.cpu_bytes_per_s < 0.85 * machine.cpu_bytes_per_s
    assert len(told(said)) == 1, "it is not undone"


def told(said: list[list[Command]]) -> list[Explained]:
    return [each for commands in said for each in commands if isinstance(each, Explained)]
