"""Event in, commands out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shadowlane.planner import events as ev
from shadowlane.planner.cost import CostModel, Workload
from shadowlane.planner.hit_rate import curve_of, hit_rate
from shadowlane.planner.lifecycle import PlannerError
from shadowlane.planner.placement import DISK_LANE, LaneSpec, Placement, Request
from shadowlane.planner.profile import Profile
from shadowlane.planner.search import place
from shadowlane.planner.shadow import PlannerState
from shadowlane.planner.synthetic import llama_catalog, mixture_catalog
from shadowlane.planner.trial import Settings

MIB = 1 << 20


def published(commands: list[ev.Command]) -> list[ev.PublishPlacement]:
    return [each for each in commands if isinstance(each, ev.PublishPlacement)]


def notes(commands: list[ev.Command]) -> str:
    return "\n".join(each.text for each in commands if isinstance(each, ev.Note))


def shared_core(full: float, alone: float, half: float, spinning: float):
    """A machine of two lanes whose step time depends on the rows of cpu:1 alone."""

    def machine(placement: Placement, spins: Mapping[str, int]) -> tuple[float, dict[str, float]]:
        shares = {share.lane: share for share in placement.shares["0.down"]}
        if "cpu:1" not in shares or "cpu:0" not in shares:
            seconds = alone
        else:
            mine, other = shares["cpu:1"], shares["cpu:0"]
            rows = mine.last_unit - mine.first_unit
            is_half = rows * 1.5 < other.last_unit - other.first_unit
            seconds = half if is_half else full
            if spins["cpu:1"]:
                seconds = spinning
        return seconds, {}

    return machine


# -- the life of a placement


def start(num_lanes: int = 2) -> tuple[PlannerState, ev.PublishPlacement]:
    lanes = tuple(LaneSpec(f"cpu:{number}", 1) for number in range(num_lanes))
    state = PlannerState(llama_catalog(), Request(ram=1 << 30, lanes=lanes))
    [command] = state.handle(ev.EngineStarted())
    assert isinstance(command, ev.PublishPlacement)
    return state, command


def retire_step(state: PlannerState, placement_id: int, step: int = 1) -> list[ev.Command]:
    return state.handle(ev.StepRetired(step, placement_id, "decode", 1, 10, 0.01))


def test_a_placement_is_announced_when_every_lane_has_acknowledged() -> None:
    state, command = start()
    placement_id = command.placement.placement_id
    assert state.handle(ev.PlacementAcknowledged("cpu:0", placement_id)) == []
    assert state.handle(ev.PlacementAcknowledged("cpu:0", placement_id)) == []
    assert state.handle(ev.PlacementAcknowledged(DISK_LANE, placement_id)) == []
    assert state.handle(ev.PlacementAcknowledged("cpu:1", placement_id)) == [
        ev.AnnouncePlacement(placement_id)
    ]
    assert state.handle(ev.PlacementAnnounced(placement_id, 1)) == []
    assert state.active_placement is None
    assert retire_step(state, placement_id) == []
    assert state.active_placement == command.placement
    state.validate()


def test_one_that_nobody_was_promised_is_withdrawn_for_a_newer_one() -> None:
    state, first = start()
    commands = state.handle(ev.BudgetChanged(1 << 29))
    assert commands[0] == ev.RetirePlacement(first.placement.placement_id)
    [second] = published(commands)
    assert second.placement.ram == 1 << 29
    # An acknowledgement of the first that was under way changes nothing.
    assert state.handle(ev.PlacementAcknowledged("cpu:0", 1)) == []
    state.validate()


def test_between_our_word_and_the_engines_a_newer_one_waits() -> None:
    state, _ = start()
    for name in ("cpu:0", "cpu:1", DISK_LANE):
        state.handle(ev.PlacementAcknowledged(name, 1))
    assert state.handle(ev.BudgetChanged(1 << 29)) == []
    assert state.handle(ev.BudgetChanged(1 << 28)) == []
    state.validate()
    [second] = published(state.handle(ev.PlacementAnnounced(1, 1)))
    assert second.placement.ram == 1 << 28
    assert second.placement.placement_id == 2
    assert retire_step(state, 1) == []
    for name in ("cpu:0", "cpu:1", DISK_LANE):
        state.handle(ev.PlacementAcknowledged(name, 2))
    state.handle(ev.PlacementAnnounced(2, 2))
    assert retire_step(state, 2, 2) == [ev.RetirePlacement(1)]
    assert retire_step(state, 1, 3) == [], "told late"
    state.validate()


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (ev.EngineStarted(), "starts only once"),
        (ev.PlacementAcknowledged("cpu:0", 7), "no placement 7"),
        (ev.PlacementAcknowledged("cpu:9", 1), "no lane 'cpu:9'"),
        (ev.PlacementAnnounced(1, 1), "announced while published"),
        (ev.StepRetired(1, 1, "decode", 1, 10, 0.01), "while only published"),
        (ev.LaneDied("gpu:0"), "no lane 'gpu:0'"),
    ],
)
def test_events_that_cannot_be_raise_with_their_story(event: ev.Event, message: str) -> None:
    state, _ = start()
    with pytest.raises(PlannerError, match=message) as caught:
        state.handle(event)
    if "story: " in str(caught.value):
        assert "PublishPlacement placement 1 (first plan)" in str(caught.value)
    state.validate()


# -- drift


def test_as_predicted_means_not_a_word(make_engine) -> None:
    engine = make_engine()
    assert engine.run(50)[1:] == []
    assert engine.state.regret() == pytest.approx(0.0)
    assert all(abs(drift) < 1e-9 for drift in engine.state.drift().values())


def test_a_lane_that_became_slower_gives_rows_away(make_engine) -> None:
    engine = make_engine()
    engine.run(10)
    before = engine.rows_of("cpu:1")

    def slower(placement: Placement, spins: Mapping[str, int]) -> tuple[float, dict[str, float]]:
        _, busy_s = engine.as_predicted(placement, spins)
        busy_s["cpu:1"] *= 2
        return max(busy_s.values()), busy_s

    engine.machine = slower
    [command] = published(engine.run(30))
    assert "cpu:1 takes" in command.reason
    assert engine.rows_of("cpu:1") < before
    assert abs(engine.state.drift()["cpu:1"]) < 0.15
    assert engine.running.resident == command.placement.resident


@pytest.mark.parametrize("step_s", [0.01, 0.2])
def test_a_burst_of_short_steps_is_no_drift_but_of_long_ones_it_is(
    make_engine, step_s: float
) -> None:
    """Five steps on end of a lane take twice the time: 50 ms are noise, a second is not."""
    engine = make_engine(settings=Settings())
    steps = 0

    def bursts(placement: Placement, spins: Mapping[str, int]) -> tuple[float, dict[str, float]]:
        nonlocal steps
        steps += 1
        _, busy_s = engine.as_predicted(placement, spins)
        if 100 < steps <= 105:
            busy_s["cpu:1"] *= 2
        return step_s, busy_s

    engine.machine = bursts
    assert bool(published(engine.run(200))) == (step_s > 0.1)


def test_drift_that_no_plan_can_use_is_told_and_left(make_engine) -> None:
    engine = make_engine(num_lanes=1)
    engine.run(10)

    def slower(placement: Placement, spins: Mapping[str, int]) -> tuple[float, dict[str, float]]:
        seconds, busy_s = engine.as_predicted(placement, spins)
        return seconds * 1.5, {name: busy * 1.5 for name, busy in busy_s.items()}

    engine.machine = slower
    said = engine.run(60)
    assert published(said) == []
    assert "staying, the best plan would win 0.0%" in notes(said)
    assert len(said) <= 4, "it thinks again only while the smoothed drift still moves"


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_drift_below_the_threshold_is_nothing(make_engine, factor: float) -> None:
    engine = make_engine()
    engine.run(5)

    def a_little(placement: Placement, spins: Mapping[str, int]) -> tuple[float, dict[str, float]]:
        seconds, busy_s = engine.as_predicted(placement, spins)
        return seconds * factor, {name: busy * factor for name, busy in busy_s.items()}

    engine.machine = a_little
    assert engine.run(60) == []


def test_a_re_plan_that_measures_slower_is_undone_and_not_tried_again(make_engine) -> None:
    engine = make_engine()
    engine.run(10)
    first = engine.running

    def lying(placement: Placement, spins: Mapping[str, int]) -> tuple[float, dict[str, float]]:
        _, busy_s = engine.as_predicted(placement, spins)
        busy_s["cpu:1"] *= 2
        is_first = placement.shares == first.shares
        return (0.010 if is_first else 0.012), busy_s

    engine.machine = lying
    said = engine.run(100)
    tried, undone = published(said)
    assert "cpu:1 takes" in tried.reason
    assert undone.placement.shares == first.shares
    assert "first plan stays" in undone.reason
    assert engine.running.shares == first.shares


# -- a core that is shared with another process


def react(engine, fraction: float = 0.5, steps: int = 24) -> list[ev.Command]:
    before = len(engine.log)
    engine.tell(ev.RunQueueDelayed("cpu:1", fraction))
    engine.run(steps)
    return engine.log[before:]


@pytest.mark.parametrize(
    ("times", "lanes", "told"),
    [
        # full, alone, half, spinning
        pytest.param((0.030, 0.018, 0.025, 0.050), {"cpu:0"}, "cpu:1 dropped", id="drop"),
        pytest.param((0.012, 0.018, 0.015, 0.050), {"cpu:0", "cpu:1"}, "first plan", id="sleep"),
        pytest.param((0.020, 0.018, 0.014, 0.050), {"cpu:0", "cpu:1"}, "at a part", id="shift"),
        pytest.param((0.0180, 0.0178, 0.019, 0.05), {"cpu:0", "cpu:1"}, "first plan", id="tie"),
    ],
)
def test_what_measures_fastest_stays(
    make_engine, times: tuple[float, ...], lanes: set[str], told: str
) -> None:
    engine = make_engine(machine=shared_core(0.010, 0.018, 0.015, 0.010))
    engine.run(10)
    engine.machine = shared_core(*times)
    said = react(engine)
    assert said[0] == ev.SetSpin("cpu:1", 0)
    assert set(engine.running.active_lanes) == lanes
    endings = [command.reason for command in published(said)] + [notes(said)]
    assert any(f"{told} stays" in ending for ending in endings)
    seconds, _ = engine.machine(engine.running, engine.spins)
    assert seconds <= min(times[:3]) * 1.03
    assert engine.state.regret() <= 0.03


def test_the_reaction_takes_at_most_ten_steps(make_engine) -> None:
    engine = make_engine(machine=shared_core(0.010, 0.018, 0.015, 0.010))
    engine.run(10)
    engine.machine = shared_core(0.030, 0.018, 0.025, 0.050)
    react(engine, steps=10)
    assert engine.running.active_lanes == ("cpu:0",)
    assert engine.state.trial is None, "and it has been decided, not only tried"


def test_probes_that_lose_cost_less_than_two_percent(make_engine) -> None:
    engine = make_engine(machine=shared_core(0.010, 0.018, 0.015, 0.010))
    engine.run(10)
    engine.machine = shared_core(0.030, 0.018, 0.025, 0.050)
    react(engine, steps=20)
    spent_s, best_s, probes = 0.0, 0.0, 0
    for _ in range(2000):
        spent_s += engine.machine(engine.next or engine.running, engine.spins)[0]
        best_s += 0.018
        probes += len(published(engine.run(1)))
    assert probes >= 4, "it does ask again: there and back, twice at least"
    assert spent_s / best_s - 1 < 0.02


def test_the_lane_comes_back_when_the_other_process_has_gone(make_engine) -> None:
    engine = make_engine(machine=shared_core(0.010, 0.018, 0.015, 0.010))
    engine.run(10)
    rows = engine.rows_of("cpu:1")
    engine.machine = shared_core(0.030, 0.018, 0.025, 0.050)
    react(engine, steps=20)
    engine.machine = shared_core(0.010, 0.018, 0.015, 0.010)
    for _ in range(40):  # calm without rows means nothing
        engine.tell(ev.RunQueueDelayed("cpu:1", 0.0))
    assert engine.spins["cpu:1"] == 0
    engine.run(400)
    assert engine.rows_of("cpu:1") == rows
    engine.tell(ev.RunQueueDelayed("cpu:1", 0.0))
    engine.tell(ev.RunQueueDelayed("cpu:1", 0.0))
    assert engine.spins["cpu:1"] == engine.state.settings.spin_us
    assert engine.state.lanes["cpu:1"].probe_in is None


def test_a_shared_core_does_not_read_as_drift(make_engine) -> None:
    engine = make_engine()
    engine.run(10)

    def preempted(placement: Placement, spins: Mapping[str, int]) -> tuple[float, dict[str, float]]:
        seconds, busy_s = engine.as_predicted(placement, spins)
        busy_s["cpu:1"] *= 3
        return seconds, busy_s

    engine.machine = preempted
    said = react(engine, steps=100)
    assert "what was expected" not in notes(said)
    assert all("what was expected" not in command.reason for command in published(said))


def test_the_disturbance_moves_to_the_other_core(make_engine) -> None:
    engine = make_engine(machine=shared_core(0.010, 0.018, 0.015, 0.010))
    engine.run(10)
    engine.machine = shared_core(0.030, 0.018, 0.025, 0.050)
    react(engine, steps=20)
    assert engine.running.active_lanes == ("cpu:0",)

    def moved(placement: Placement, spins: Mapping[str, int]) -> tuple[float, dict[str, float]]:
        return (0.018 if placement.active_lanes == ("cpu:1",) else 0.03), {}

    engine.machine = moved
    engine.tell(ev.RunQueueDelayed("cpu:0", 0.6))
    engine.run(24)
    assert engine.running.active_lanes == ("cpu:1",)


def test_rows_do_not_move_to_a_core_that_is_shared_more(make_engine) -> None:
    """The neighbour has the core of cpu:1; our own processes want some of that of cpu:0."""
    engine = make_engine(machine=shared_core(0.030, 0.018, 0.025, 0.050))
    engine.run(5)
    engine.tell(ev.RunQueueDelayed("cpu:1", 0.5))
    engine.run(24)
    assert engine.running.active_lanes == ("cpu:0",)
    engine.tell(ev.RunQueueDelayed("cpu:0", 0.3))
    said = engine.run(24)
    assert all("cpu:0 dropped" not in command.reason for command in published(said))
    assert engine.running.active_lanes == ("cpu:0",)


@pytest.mark.parametrize(
    ("fractions", "spins", "trials"),
    [
        ([0.29, 0.25, 0.29], [], 0),
        ([0.3], [0], 1),
        ([0.3, 0.35, 0.45], [0], 1),
        ([0.3, 0.55], [0], 2),
        ([0.3, 0.0, 0.2, 0.0], [0], 1),
        ([0.3, 0.0, 0.0], [0, 50], 1),
        ([0.3, 0.0, 0.0, 0.0, 0.35], [0, 50, 0], 2),
    ],
)
def test_what_counts_as_a_shared_core(
    make_engine, fractions: list[float], spins: list[int], trials: int
) -> None:
    engine = make_engine(machine=shared_core(0.010, 0.018, 0.015, 0.010))
    engine.run(5)
    said = [each for fraction in fractions for each in react(engine, fraction)]
    assert [each.spin_us for each in said if isinstance(each, ev.SetSpin)] == spins
    assert notes(said).count("then comparing other splits") == trials


def test_a_split_that_won_is_asked_again(make_engine) -> None:
    """The fraction stays the same, but the other process has come to hurt more."""
    engine = make_engine(machine=shared_core(0.012, 0.018, 0.015, 0.05))
    engine.run(5)
    react(engine)
    assert engine.running.active_lanes == ("cpu:0", "cpu:1")
    engine.machine = shared_core(0.030, 0.018, 0.025, 0.050)
    engine.run(300)
    assert engine.running.active_lanes == ("cpu:0",)
    assert engine.state.regret() <= 0.03


def test_prefill_switches_placements_but_measures_nothing(make_engine) -> None:
    engine = make_engine()
    engine.run(5)
    engine.tell(ev.BudgetChanged(1 << 29))
    placement_id = engine.next.placement_id
    said = engine.tell(ev.StepRetired(6, placement_id, "prefill", 256, 256, 9.0, {"cpu:0": 9.0}))
    assert said == [ev.RetirePlacement(1)]
    assert engine.state.active_placement.placement_id == placement_id
    assert engine.state.drift()["cpu:0"] == pytest.approx(0.0)
    assert engine.run(20) == []


def test_the_only_lane_sleeps_and_that_is_all(make_engine) -> None:
    engine = make_engine(num_lanes=1)
    engine.run(5)
    said = engine.tell(ev.RunQueueDelayed("cpu:0", 0.4))
    assert said[0] == ev.SetSpin("cpu:0", 0)
    assert "only lane" in notes(said)
    assert published(engine.run(50)) == []


# -- lanes, budgets, profiles


def test_a_dead_lane_has_no_rows_and_a_restored_one_has(make_engine) -> None:
    engine = make_engine()
    engine.run(5)
    assert len(published(engine.tell(ev.LaneDied("cpu:0")))) == 1
    engine.run(2)
    assert engine.running.lanes == (LaneSpec("cpu:1", 1),)
    assert engine.running.shares["embed"][0].lane == "cpu:1"
    said = engine.tell(ev.LaneRestored("cpu:0"))
    assert said[0] == ev.SetSpin("cpu:0", engine.state.settings.spin_us)
    engine.run(2)
    assert engine.running.active_lanes == ("cpu:0", "cpu:1")


def test_no_lane_left_is_told_and_survived(make_engine) -> None:
    engine = make_engine(num_lanes=1)
    engine.run(5)
    said = engine.tell(ev.LaneDied("cpu:0"))
    assert published(said) == []
    assert "no compute lane is left" in notes(said)
    assert published(engine.tell(ev.BudgetChanged(1 << 29))) == []
    [command] = published(engine.tell(ev.LaneRestored("cpu:0")))
    assert command.placement.ram == 1 << 29
    engine.run(3)
    assert engine.running == command.placement


def test_a_disk_lane_that_comes_back_gets_its_program_again(make_engine) -> None:
    engine = make_engine(ram=20 * MIB)
    engine.run(5)
    assert engine.running.sweep
    assert published(engine.tell(ev.LaneDied(DISK_LANE))) == []
    [command] = published(engine.tell(ev.LaneRestored(DISK_LANE)))
    assert command.placement.sweep == engine.running.sweep


def test_budgets_shrink_and_grow_back_while_running(make_engine) -> None:
    engine = make_engine(ram=200 * MIB)
    engine.run(5)
    assert not engine.running.sweep
    context = engine.running.context_tokens
    engine.tell(ev.BudgetChanged(40 * MIB))
    engine.run(2)
    assert engine.running.sweep
    assert engine.running.total_nbytes <= 40 * MIB
    assert engine.running.context_tokens == context, "running sequences keep their KV"
    ring = engine.running.num_slots
    engine.tell(ev.BudgetChanged(44 * MIB))
    engine.run(2)
    assert engine.running.num_slots == ring, "the ring that is there stays"
    said = engine.tell(ev.BudgetChanged(2 * MIB))
    assert published(said) == []
    assert "the budget cannot change: the model does not fit" in notes(said)
    assert engine.state.request.ram == 44 * MIB
    engine.tell(ev.BudgetChanged(200 * MIB))
    engine.run(2)
    assert not engine.running.sweep


def test_a_shrunk_budget_only_drops_and_a_grown_one_only_adds(make_engine) -> None:
    engine = make_engine(ram=60 * MIB)
    engine.run(2)
    for ram in (50 * MIB, 30 * MIB, 45 * MIB, 80 * MIB, 40 * MIB):
        before = engine.running
        engine.tell(ev.BudgetChanged(ram))
        engine.run(2)
        after = engine.running
        assert after.ram == ram
        pairs = list(zip(before.resident, after.resident, strict=True))
        dropped, added = pairs.count((True, False)), pairs.count((False, True))
        assert dropped == 0 or added == 0
        assert (dropped if ram < before.ram else added) > 0


def test_other_lanes_move_nothing(make_engine) -> None:
    engine = make_engine(ram=30 * MIB)
    engine.run(2)
    before = engine.running
    engine.tell(ev.LaneDied("cpu:1"))
    engine.run(2)
    assert engine.running.shares != before.shares
    assert engine.running.resident == before.resident
    assert engine.running.sweep == before.sweep


def test_a_refused_placement_is_forgotten_and_not_wanted_again() -> None:
    state, first = start()
    placement_id = first.placement.placement_id
    for name in ("cpu:0", "cpu:1", DISK_LANE):
        state.handle(ev.PlacementAcknowledged(name, placement_id))
    state.handle(ev.PlacementAnnounced(placement_id, 1))
    retire_step(state, placement_id)
    [second] = published(state.handle(ev.BudgetChanged(1 << 29)))
    said = state.handle(ev.PlacementRefused(second.placement.placement_id, "no room"))
    assert said[0] == ev.RetirePlacement(second.placement.placement_id)
    assert "no room" in notes(said)
    assert state.placements.pending is None
    assert state.active_placement == first.placement
    state.validate()


def test_a_new_profile_counts_at_once(make_engine) -> None:
    engine = make_engine()
    engine.run(5)
    profile = Profile("this machine", "this model", dram_bytes_per_s=50e9, instruction_s=1e-3)
    said = engine.tell(ev.ProfileMeasured(profile))
    # Barriers at a millisecond each cost more than a second lane brings: one instruction fewer
    # would not help, for both lanes wait at the same time, so the plan stays.
    assert "a new profile was measured: staying" in notes(said)
    assert engine.state.cost.measured


# -- the same events give the same commands

some_events = st.lists(
    st.one_of(
        st.builds(
            ev.RunQueueDelayed,
            st.sampled_from(["cpu:0", "cpu:1", "cpu:2", DISK_LANE]),
            st.sampled_from([0.0, 0.01, 0.03, 0.2, 0.9]),
        ),
        st.builds(ev.LaneDied, st.sampled_from(["cpu:0", "cpu:1", "cpu:2", DISK_LANE])),
        st.builds(ev.LaneRestored, st.sampled_from(["cpu:0", "cpu:1", "cpu:2", DISK_LANE])),
        st.builds(ev.BudgetChanged, st.sampled_from([1 * MIB, 5 * MIB, 12 * MIB, 64 * MIB])),
        st.builds(
            ev.ProfileMeasured,
            st.builds(Profile, st.just("h"), st.just("m"), dram_bytes_per_s=st.just(3e9)),
        ),
        st.tuples(st.integers(1, 12), st.sampled_from([0.5, 1.0, 1.3, 3.0]), st.integers(1, 8)),
    ),
    max_size=20,
)


@settings(max_examples=30, deadline=None)
@example(
    script=[
        *(ev.LaneDied(f"cpu:{number}") for number in range(3)),
        (1, 1.0, 1),
        ev.ProfileMeasured(Profile("h", "m", dram_bytes_per_s=3e9)),
    ]
)
@given(script=some_events)
def test_the_same_events_give_the_same_commands_and_never_a_broken_state(
    engine_class, script: list
) -> None:
    logs = []
    for _ in range(2):
        lanes = tuple(LaneSpec(f"cpu:{number}", 1) for number in range(3))
        request = Request(ram=12 * MIB, lanes=lanes)
        state = PlannerState(llama_catalog(layers=1), request, settings=Settings())
        engine = engine_class(state)
        engine.tell(ev.EngineStarted())
        for each in script:
            if isinstance(each, tuple):
                steps, factor, rows = each

                def machine(placement, spins, factor=factor, engine=engine):
                    seconds, busy_s = engine.as_predicted(placement, spins)
                    return seconds * factor, {**busy_s, "cpu:1": busy_s.get("cpu:1", 0) * factor}

                engine.machine = machine
                engine.run(steps, rows=rows)
            else:
                engine.tell(each)
            ram = state.request.ram
            for placement in engine.published.values():
                assert placement.total_nbytes <= placement.ram
            newest = engine.published[max(engine.published)]
            assert newest.ram == ram or not any(
                state.lanes[lane.name].is_alive for lane in request.lanes
            )
        logs.append(engine.log)
    assert logs[0] == logs[1]
    assert replace(state.request, ram=request.ram) == request


# -- mixtures


def mixture_engine(make_engine):
    """A quarter of the experts are in RAM."""
    catalog = mixture_catalog(num_experts=64, top_k=4, layers=4)
    whole = place(catalog, Request(ram=1 << 40, context=64), CostModel(None))
    ram = whole.total_nbytes - 3 * whole.experts_nbytes // 4
    return make_engine(catalog=catalog, ram=ram, num_lanes=1)


def run_mixture(engine, steps: int, hits: float, disk_drift: float = 1.0) -> None:
    """Decode steps; `hits`: part of the chosen experts that they find in RAM."""
    experts = engine.state.catalog.experts
    assert experts is not None
    chosen = experts.num_layers * experts.top_k
    missed = round(chosen * (1 - hits))
    nbytes = missed * experts.held_nbytes
    for _ in range(steps):
        engine.running, engine.next = engine.next or engine.running, None
        assert engine.running is not None
        engine.step += 1
        seconds, busy_s = engine.as_predicted(engine.running, {})
        busy_s[DISK_LANE] = disk_drift * engine.state.cost.experts_read_s(experts, nbytes)
        retired = ev.StepRetired(
            engine.step, engine.running.placement_id, "decode", 1, 200, seconds, busy_s
        )
        engine.tell(
            replace(
                retired,
                experts_chosen=chosen,
                experts_resident=chosen - missed,
                experts_read_nbytes=nbytes,
            )
        )


@pytest.mark.parametrize("hits", [0.0, 0.25, 1.0])
def test_a_wrong_guess_of_hits_is_no_drift_of_the_disk(make_engine, hits: float) -> None:
    engine = mixture_engine(make_engine)
    run_mixture(engine, 1, hits)
    before = engine.state.predicted_step_s(Workload())
    run_mixture(engine, 29, hits)
    assert engine.state.drift()[DISK_LANE] == pytest.approx(0.0)
    assert not any(isinstance(each, ev.PublishPlacement) for each in engine.log[1:])
    experts = engine.state.catalog.experts
    assert experts is not None
    assert curve_of(experts).source == "measured"
    assert engine.running is not None
    assert hit_rate(experts, engine.running.expert_slots) == pytest.approx(hits)
    after = engine.state.predicted_step_s(Workload())
    assert before is not None
    assert after is not None
    assert (after < before) == (hits == 1.0)


def test_a_slow_disk_is_drift_whatever_hits(make_engine) -> None:
    engine = mixture_engine(make_engine)
    run_mixture(engine, 12, 0.25, disk_drift=1.5)
    assert engine.state.lanes[DISK_LANE].ratio == pytest.approx(1.5)
