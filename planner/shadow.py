"""The planner's state: the prediction that runs beside the engine, and what it does about it.

`PlannerState.handle(event)` is the only thing that changes it; time and measurements come inside
events, so the same events give the same commands. Drift of a lane from its prediction leads to a
new plan where one would win enough; a core that is shared with another process leads to a trial of
other splits. Either way the measurement has the last word.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from shadowlane.planner import events as ev
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.cost import CostModel, Workload
from shadowlane.planner.hit_rate import with_measured
from shadowlane.planner.lifecycle import Placements, PlannerError, Record
from shadowlane.planner.measured import LaneState, MeasuredHits, MeasuredPaces, Predictions
from shadowlane.planner.placement import (
    DISK_LANE,
    InfeasiblePlan,
    LaneSpec,
    Placement,
    Request,
    show_nbytes,
)
from shadowlane.planner.profile import Profile
from shadowlane.planner.replan import moved_nbytes, plan_again
from shadowlane.planner.search import place, with_weights
from shadowlane.planner.simulate import simulate
from shadowlane.planner.trial import (
    Option,
    Settings,
    Trial,
    choices_for_shared_core,
    probe_interval,
)

STORY_ENTRIES = 12
MOST_PATIENCE = 64


class PlannerState:
    """Plans for one engine. `profile` None: speeds are assumed until one is measured."""

    def __init__(
        self,
        catalog: Catalog,
        request: Request,
        profile: Profile | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.catalog = catalog
        self.request = request
        self.settings = settings or Settings()
        self.cost = CostModel(profile)  # without drift
        self.placements = Placements(self.settings, self.story)
        self.trial: Trial | None = None  # the comparison under way
        names = [*(lane.name for lane in request.lanes), DISK_LANE]
        self.lanes = {name: self._new_lane() for name in names}
        self.num_steps = 0  # decode steps retired
        self.decode_s = 0.0  # what they took
        self.last_thought = (0, 0.0)  # of both, when a re-plan was last considered
        self.patience = 1  # how many times the least pause passes from one thought to the next
        self.refused: set[int] = set()  # contents that measured slower than what they replaced
        self.paces = MeasuredPaces()
        self.hits = MeasuredHits()
        self.predictions = Predictions(catalog)
        self.history: deque[str] = deque(maxlen=100)  # what the story of an error is told from

    # -- what may be asked

    @property
    def active_placement(self) -> Placement | None:
        active = self.placements.active
        return None if active is None else self.placements.records[active].placement

    def drift(self) -> dict[str, float]:
        """Per lane, measured / predicted - 1 beyond what has been taken into account."""
        return {name: lane.drift for name, lane in self.lanes.items()}

    def predicted_step_s(self, workload: Workload) -> float | None:
        """Of the active placement, with all drift seen so far."""
        placement = self.active_placement
        if placement is None:
            return None
        ratios = {name: lane.ratio or lane.folded for name, lane in self.lanes.items()}
        cost = self.cost.with_drift(ratios)
        return simulate(self.catalog, placement, cost, workload=workload).step_s

    def regret(self) -> float | None:
        """How much slower we run than the best configuration measured under these conditions."""
        active = self.placements.active
        if active is None:
            return None
        content = self._content(self.placements.records[active])
        return self.paces.regret(self.num_steps, self._conditions(), content)

    def story(self, about: str = "") -> str:
        """The newest entries of the history that mention `about`."""
        return " | ".join([entry for entry in self.history if about in entry][-STORY_ENTRIES:])

    # -- events

    def handle(self, event: ev.Event) -> list[ev.Command]:
        self.history.append(ev.brief(event))
        if isinstance(event, ev.EngineStarted):
            commands = self._engine_started()
        elif isinstance(event, ev.EngineResumed):
            commands = self._engine_resumed(event)
        elif isinstance(event, ev.StepRetired):
            commands = self._step_retired(event)
        elif isinstance(event, ev.RunQueueDelayed):
            commands = self._run_queue_delayed(event)
        elif isinstance(event, ev.LaneDied):
            commands = self._lane_died(event.lane)
        elif isinstance(event, ev.LaneRestored):
            commands = self._lane_restored(event.lane)
        elif isinstance(event, ev.BudgetChanged):
            commands = self._budget_changed(event.ram)
        elif isinstance(event, ev.PlacementAcknowledged):
            self._lane(event.lane)
            commands = self.placements.acknowledge(event)
        elif isinstance(event, ev.PlacementAnnounced):
            commands = self.placements.announce(event)
        elif isinstance(event, ev.PlacementRefused):
            commands = self._placement_refused(event)
        elif isinstance(event, ev.MemoryLeft | ev.ExpertsChosen):
            commands = []  # of cards: see `card_planner.py`
        else:
            commands = self._profile_measured(event.profile)
        self.history.extend(f"-> {ev.brief(command)}" for command in commands)
        return commands

    def _engine_started(self) -> list[ev.Command]:
        if self.placements.num_published:
            raise PlannerError(f"an engine starts only once; story: {self.story()}")
        option = Option.as_placed("first plan", place(self.catalog, self.request, self.cost))
        self._plan_probes(option)  # a lane left out by prediction alone gets its measurement
        return self.placements.publish(option, "first plan")

    def _engine_resumed(self, event: ev.EngineResumed) -> list[ev.Command]:
        if self.placements.num_published:
            raise PlannerError(f"an engine is taken over only at first; story: {self.story()}")
        option = Option.as_placed("plan taken over", event.placement)
        self._plan_probes(option)
        self.placements.take_over(option, event.newest_id)
        return []

    def _lane_died(self, name: str) -> list[ev.Command]:
        self._lane(name).is_alive = False
        if name == DISK_LANE:
            return [ev.Note(f"{name} died: no weights stream until it is restored")]
        if not self._alive_lanes():
            self._new_era()
            return [ev.Note(f"{name} died and no compute lane is left: waiting for one")]
        return self._replan(f"{name} died: its rows go to the others")

    def _lane_restored(self, name: str) -> list[ev.Command]:
        old = self._lane(name)
        self.lanes[name] = self._new_lane(folded=old.folded)
        if not self._alive_lanes():
            return [ev.Note(f"{name} is back; no compute lane is alive yet")]
        return [
            ev.SetSpin(name, self.settings.spin_us),
            *self._replan(f"{name} is back and has lost its programs"),
        ]

    def _budget_changed(self, ram: int) -> list[ev.Command]:
        before, self.request = self.request, replace(self.request, ram=ram)
        if not self._alive_lanes():
            return [ev.Note("the new budget counts once a compute lane is alive")]
        try:
            return self._replan(f"the RAM budget is now {show_nbytes(ram)}")
        except InfeasiblePlan as error:
            self.request = before
            return [ev.Note(f"the budget cannot change: {error}; the plan stays as it is")]

    def _profile_measured(self, profile: Profile) -> list[ev.Command]:
        self.cost = CostModel(profile)
        for lane in self.lanes.values():
            lane.ratios.clear()
            lane.folded = 1.0
        self._new_era()
        if self.placements.active is None or self.placements.is_switching:
            return []
        if not self._alive_lanes():  # it counts from the next plan on
            return []
        return self._consider("a new profile was measured")

    def _placement_refused(self, event: ev.PlacementRefused) -> list[ev.Command]:
        record = self.placements.record(event.placement_id)
        if record is None:
            return []
        self.refused.add(self._content(record))
        if self.trial is not None and self.trial.current is record.option:
            self.trial = None
        commands = self.placements.refuse(event.placement_id)
        note = f"placement {event.placement_id} ({record.reason}) was refused: {event.why}"
        return [*commands, ev.Note(note)]

    # -- steps

    def _step_retired(self, event: ev.StepRetired) -> list[ev.Command]:
        record = self.placements.record(event.placement_id)
        if record is None:
            return []  # told late, in a batch: the switch has been seen already
        commands: list[ev.Command] = []
        if record.stage != "active":
            commands += self.placements.activate(event.placement_id)
        if event.phase != "decode":
            return commands
        self.num_steps += 1
        self.decode_s += event.seconds
        if record.settling:
            record.settling -= 1
            return commands
        self._measure(event, record)
        if self.placements.is_switching or not self._alive_lanes():
            return commands
        if self.trial is None:
            commands += self._probe(record) or self._think(record)
        else:
            commands += self._advance_trial(self.trial, record)
        return commands

    def _measure(self, event: ev.StepRetired, record: Record) -> None:
        self._learn_hits(event, record.placement.expert_slots)
        workload = Workload("decode", event.rows, event.context)
        predicted = self.predictions.of(record.placement, self.cost, workload)
        for name, busy_s in event.busy_s.items():
            lane = self._lane(name)
            expected_s = predicted.busy_s.get(name, 0.0)
            if name == DISK_LANE and self.catalog.experts is not None:
                # How often a cache hits is no property of the disk: what was read is what counts.
                nbytes = event.experts_read_nbytes
                expected_s = self.cost.experts_read_s(self.catalog.experts, nbytes)
            # A core that is off at times is no slower lane: its ratio would say nothing about it.
            if expected_s > 0 and not lane.delayed:
                lane.ratios.add(busy_s / expected_s, event.seconds)
        # One reference per era, so that paces of other plans, rows and contexts compare.
        pace = event.seconds / self.predictions.reference_s(record.placement, self.cost, workload)
        record.paces.add(pace, event.seconds)
        label = record.option.label
        self.paces.add(self.num_steps, self._conditions(), self._content(record), label, pace)

    def _learn_hits(self, event: ev.StepRetired, slots: int) -> None:
        """From the first steps on, plans rest on the hits of this run and on nothing assumed."""
        if event.experts_chosen:
            self.hits.add(event.experts_resident, event.experts_chosen)
            self.catalog = with_measured(self.catalog, slots, self.hits.rate, self.hits.steps)

    # -- drift

    def _think(self, record: Record) -> list[ev.Command]:
        steps, seconds = self.last_thought
        if (
            self.num_steps - steps < self.patience * self.settings.min_steps_between
            or self.decode_s - seconds < self.patience * self.settings.min_s_between
            or not self._is_measured(record)
        ):
            return []
        drifted = [
            f"{name} takes {1 + lane.drift:.2f} times what was expected"
            for name, lane in self.lanes.items()
            if abs(lane.drift) >= self.settings.drift_threshold
        ]
        return self._consider("; ".join(drifted)) if drifted else []

    def _consider(self, why: str) -> list[ev.Command]:
        """What could be won? The best plan for the machine as it is now, against staying."""
        assert self.placements.active is not None
        record = self.placements.records[self.placements.active]
        running = record.placement
        self.last_thought = (self.num_steps, self.decode_s)
        for lane in self.lanes.values():
            lane.folded = lane.ratio or lane.folded
        cost = self._drifted_cost()
        staying_s = simulate(self.catalog, running, cost).step_s
        # Blocks can move only into what is free beside those that are there.
        free = running.ram - running.total_nbytes
        plans = [
            (option, moved)
            for option in (
                self._plan_again(record.option, anew=False),
                self._plan_again(record.option, anew=True),
            )
            if (moved := moved_nbytes(self.catalog, running, option.placement)) <= free
            and self.paces.content(option.placement) not in self.refused
        ]
        self.patience = min(2 * self.patience, MOST_PATIENCE)  # until a thought leads to something
        if not plans:
            return [ev.Note(f"{why}: staying, what is predicted best was slower or cannot be had")]
        option, moved = min(plans, key=lambda plan: plan[0].placement.predicted_step_s)
        best_s = option.placement.predicted_step_s
        gain = 1 - best_s / staying_s
        move_s = moved / cost.disk_bytes_per_s(self.catalog.slot_nbytes, contended=True)
        won_s = (staying_s - best_s) * self.settings.horizon_steps
        if gain < self.settings.gain_threshold or won_s <= move_s:
            return [ev.Note(f"{why}: staying, the best plan would win {max(0.0, gain):.1%}")]
        self.patience //= 2
        if len(record.paces):
            results = [(record.option, record.paces.mean)]
            self.trial = Trial("re-plan", -self.settings.tolerance, option, results=results)
        return self.placements.publish(option, f"{why}: predicted {gain:.1%} faster")

    # -- shared cores: a lane that is off for milliseconds at a time is not a slower lane

    def _run_queue_delayed(self, event: ev.RunQueueDelayed) -> list[ev.Command]:
        lane = self._lane(event.lane)
        if not 0.0 <= event.fraction <= 1.0:
            raise ValueError(f"fraction must be within 0..1; got {event.fraction}")
        if event.lane == DISK_LANE:
            return []  # it never spins, and has no rows to give away
        if event.fraction >= self.settings.delay_high:
            is_worse = event.fraction >= lane.asked_at + self.settings.delay_step
            is_news = not lane.delayed or is_worse
            lane.calm_windows, lane.delayed = 0, event.fraction
            return self._core_shared(event.lane) if is_news else []
        if event.fraction > self.settings.delay_low or not lane.delayed:
            lane.calm_windows = 0
            return []
        weight = 1.0
        if self.placements.records:
            weight = self.placements.newest.weights.get(event.lane, 1.0)
        if weight == 0.0 or self.trial is not None:
            # Without rows it never wants to run, and while splits are tried it has fewer: its calm
            # says nothing, probes will.
            return []
        lane.calm_windows += 1
        if lane.calm_windows < 2:
            return []
        lane.delayed, lane.asked_at, lane.spin_us = 0.0, 0.0, self.settings.spin_us
        lane.probe_in = None if weight >= 1.0 else 0
        self.placements.unsettle()
        return [ev.SetSpin(event.lane, lane.spin_us)]

    def _core_shared(self, name: str) -> list[ev.Command]:
        """Sleep at barriers at once, then measure: keep the split, drop the lane, give it less."""
        lane = self.lanes[name]
        lane.asked_at = lane.delayed
        commands: list[ev.Command] = [ev.SetSpin(name, 0)] if lane.spin_us else []
        lane.spin_us = 0
        if not self.placements.records or not lane.is_alive:
            return commands
        self.placements.unsettle()
        now = self.placements.newest
        if len(now.placement.lanes) == 1:
            return [*commands, ev.Note(f"the core of {name} is shared, and it is the only lane")]
        why = f"the core of {name} is shared {lane.delayed:.0%} of the time"
        self.trial = Trial(why, self.settings.gain_threshold, now, lane=name)
        choices = choices_for_shared_core(now.weights, name, self.settings, self._delays())
        for label, weights in choices:
            self.trial.queue.append(self._weighted(label, now, weights))
        return [*commands, ev.Note(f"{why}: sleeping at barriers, then comparing other splits")]

    def _advance_trial(self, trial: Trial, record: Record) -> list[ev.Command]:
        if record.option is not trial.current or not self._is_measured(record):
            return []
        trial.results.append((trial.current, record.paces.mean))
        if trial.results[-1][1] <= trial.results[0][1] * (1 - self.settings.clear_win):
            trial.queue.clear()
        if trial.queue:
            trial.current = trial.queue.popleft()
            why = f"{trial.why}: trying {trial.current.label}"
            return self.placements.publish(trial.current, why)
        return self._finish_trial(trial)

    def _finish_trial(self, trial: Trial) -> list[ev.Command]:
        self.trial = None
        self.last_thought = (self.num_steps, self.decode_s)
        winner, _ = trial.winner()
        if trial.lane is not None:
            lane = self.lanes[trial.lane]
            step_s = self.decode_s / max(1, self.num_steps)
            lane.probe_in = probe_interval(trial, lane.probe_interval, self.settings, step_s)
            lane.probe_interval = lane.probe_in
            self._plan_probes(winner)
        elif winner is trial.current:
            self.patience = 1
        else:
            self.refused.add(self.paces.content(trial.current.placement))
            self.patience = min(2 * self.patience, MOST_PATIENCE)
        reason = f"{trial.why}: measured {trial.summary()}; {winner.label} stays"
        if winner is trial.current:
            return [ev.Note(reason)]
        return self.placements.publish(winner, reason)

    def _plan_probes(self, option: Option) -> None:
        """A lane that is set back, or whose core is shared, will be asked again; no other."""
        for name, weight in option.weights.items():
            lane = self.lanes[name]
            if weight >= 1.0 and not lane.delayed:
                lane.probe_in, lane.probe_interval = None, 0
            elif lane.probe_in is None:
                lane.probe_in = lane.probe_interval = self.settings.probe_min_steps

    def _probe(self, record: Record) -> list[ev.Command]:
        """Ask again, when its time has come: a lane set back gets its rows, another loses them."""
        if not self._is_measured(record) or len(record.option.weights) == 1:
            return []
        for name, lane in self.lanes.items():
            if lane.probe_in is None or not lane.is_alive:
                continue
            lane.probe_in -= 1
            if lane.probe_in > 0:
                continue
            now = record.option
            label, weights = f"{name} back", {**now.weights, name: 1.0}
            if now.weights.get(name, 1.0) >= 1.0:
                choices = choices_for_shared_core(now.weights, name, self.settings, self._delays())
                if not choices:
                    lane.probe_in = lane.probe_interval
                    continue
                label, weights = choices[0]
            rival = self._weighted(label, now, weights)
            before = record.paces.mean
            why = f"asking again: {label}"
            gain = self.settings.gain_threshold
            self.trial = Trial(why, gain, rival, results=[(now, before)], lane=name)
            return self.placements.publish(rival, why)
        return []

    # -- helpers

    def _new_lane(self, folded: float = 1.0) -> LaneState:
        return LaneState(self.settings.spin_us, self.settings.drift_s, folded=folded)

    def _is_measured(self, record: Record) -> bool:
        return record.paces.spans(self.settings.trial_steps, self.settings.trial_s)

    def _plan_again(self, now: Option, *, anew: bool) -> Option:
        """The best plan for lanes alive and drift known; see `replan.plan_again`."""
        alive = self._alive_lanes()
        # A lane that was set back because its core is shared stays so until it is asked again.
        held = {
            lane.name: now.weights.get(lane.name, 1.0)
            for lane in alive
            if self.lanes[lane.name].probe_in is not None
        }
        request = replace(self.request, lanes=alive)
        return plan_again(self.catalog, request, self._drifted_cost(), now, held, anew=anew)

    def _replan(self, why: str) -> list[ev.Command]:
        """A plan for other lanes or another budget: what was measured before compares no more."""
        if not self.placements.records:
            return []
        option = self._plan_again(self.placements.newest, anew=False)
        self._new_era()
        self._plan_probes(option)
        return self.placements.publish(option, why)

    def _new_era(self) -> None:
        self.paces.forget()
        self.predictions.forget()
        self.refused.clear()
        self.patience = 1
        self.trial = None
        self.placements.unsettle()

    def _weighted(self, label: str, now: Option, weights: dict[str, float]) -> Option:
        placement = with_weights(self.catalog, now.placement, self._drifted_cost(), weights)
        return Option(label, placement, weights)

    def _drifted_cost(self) -> CostModel:
        return self.cost.with_drift({name: lane.folded for name, lane in self.lanes.items()})

    def _delays(self) -> dict[str, float]:
        return {name: lane.delayed for name, lane in self.lanes.items()}

    def _alive_lanes(self) -> tuple[LaneSpec, ...]:
        return tuple(lane for lane in self.request.lanes if self.lanes[lane.name].is_alive)

    def _content(self, record: Record) -> int:
        if record.content is None:
            record.content = self.paces.content(record.placement)
        return record.content

    def _conditions(self) -> tuple[str, ...]:
        return tuple(sorted(name for name, lane in self.lanes.items() if lane.delayed))

    def _lane(self, name: str) -> LaneState:
        lane = self.lanes.get(name)
        if lane is None:
            raise PlannerError(f"no lane {name!r}, only {sorted(self.lanes)}; {self.story(name)}")
        return lane

    def validate(self) -> None:
        """Invariants that hold between any two events; for tests and after a crash."""
        self.placements.validate()
        if self.trial is not None:
            assert all(option is not self.trial.current for option in self.trial.queue)
        for name, lane in self.lanes.items():
            assert lane.folded > 0, name
            assert lane.probe_in is None or lane.probe_interval > 0, name
            assert not lane.delayed or lane.spin_us == 0 or not lane.is_alive, name
