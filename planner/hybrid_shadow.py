"""The shadow of a plan over cards: measured steps in, moves and switches out.

It holds what was predicted of each lane against what was measured, and learns how fast the machine
really is. When that drifts, it first asks what could be won: the best plan for the machine as it is
now, moves included, against staying. Below 3 % nothing is moved; what moves nothing, and changes
only what is brought, is worth it from 1 % on. What is to be moved goes over links and off the disk
in the background while the old plan runs; the new one takes over when all of it has arrived, is
measured against its predecessor, and undone if it is slower. Only memory that
another program takes is given back at once: the next step waits for what has to leave.

Pure: `handle(event)` is all there is; time and measurements come inside events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean, median

from shadowlane.planner.hardware import CALM, Hardware
from shadowlane.planner.hybrid import HitRate, Model, Plan, Prompts, Work
from shadowlane.planner.hybrid_changes import replan, shrunk
from shadowlane.planner.hybrid_layouts import Question, Spread, brought_of, settle
from shadowlane.planner.hybrid_learning import StepMeasured, bend_of, bent, learned
from shadowlane.planner.hybrid_moves import Migration, moves
from shadowlane.planner.hybrid_search import search

BENDS_WINDOW = 64  # steps over which hits of experts on cards are averaged
CHANCE_STEPS = 24  # that a plan is known and judged by where each step meets other experts
CHANCY_GAIN = 0.08  # that a plan must promise there, at least: predictions are as far off


@dataclass(frozen=True, slots=True)
class ShadowSettings:
    drift: float = 0.15  # of a step or of a busy lane, that makes us think again
    window: int = 5  # steps whose median counts
    min_steps_between: int = 5  # two thoughts
    gain: float = 0.03  # what a new plan must promise over the horizon, moves included
    idle_gain: float = 0.01  # ... for which nothing has to be moved
    tolerance: float = 0.02  # how much slower than its predecessor a new plan may measure
    horizon_steps: int = 200
    patience: float = 2.0  # after a thought without result the next one needs so many more steps
    max_steps_between: int = 80


@dataclass(frozen=True, slots=True)
class MemoryTaken:
    """What other programs hold of each card and of RAM, from now on."""

    vram_nbytes: float
    ram_nbytes: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkChanged:
    """From the next step on steps carry this."""

    work: Work


@dataclass(frozen=True, slots=True)
class Arrived:
    """All that was moved for is there, and the plan it was moved for in force."""


@dataclass(frozen=True, slots=True)
class Refused:
    """What was moved for will not come: the plan in force stays."""


@dataclass(frozen=True, slots=True)
class Move:
    """Begin to copy what `plan` needs and the plan in force has not."""

    plan: Plan
    moves: Migration
    is_urgent: bool = False  # the next step waits for it


@dataclass(frozen=True, slots=True)
class Switch:
    """From the next step on. All that it needs is there."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Explained:
    """What was decided and why: for people."""

    why: str
    staying_s: float  # per step and its share of prefill, predicted with what has been learned
    expected_s: float
    moved_nbytes: float  # by all lanes


Event = StepMeasured | MemoryTaken | WorkChanged | Arrived | Refused
Command = Move | Switch | Explained


class HybridShadow:
    """See the module. `plan` is what runs; `machine` what has been learned of the hardware."""

    def __init__(
        self,
        model: Model,
        machine: Hardware,
        work: Work,
        hit_rate: HitRate = lambda part: part,
        settings: ShadowSettings | None = None,
        plan: Plan | None = None,
        prompts: Prompts | None = None,
    ) -> None:
        """prompts: prefill that all plans have to serve too; only steps of `work` are measured."""
        self.settings = settings or ShadowSettings()
        self.machine = machine
        self._file = machine
        self._state = CALM  # memory only: rates are learned
        self._model, self._work, self._hit_rate = model, work, hit_rate
        self._bend = 1.0  # of `hit_rate`, by what has been measured
        self._bends: deque[float] = deque(maxlen=BENDS_WINDOW)  # of single steps
        self._prompts = prompts
        self.plan = plan or search(self.question).plan
        self._previous: Plan | None = None
        self._before: StepMeasured | None = None  # what a step of it took, last
        self._before_s: float | None = None  # ... on average, where steps meet other experts
        self._chancy: deque[StepMeasured] = deque(maxlen=CHANCE_STEPS)  # such, of the plan in force
        self._gain = self.settings.gain  # what must be promised; more after each disappointment
        self._settled: StepMeasured | None = None  # of the plan that is gone back to
        self._target: Plan | None = None  # what is being moved for
        self._moves: Migration | None = None  # what all of that is
        self._to_move = 0.0  # bytes of it that are still to come
        self._steps: deque[StepMeasured] = deque(maxlen=self.settings.window)
        self._since_thought = 0
        self._wait = self.settings.min_steps_between
        self._reference: StepMeasured | None = None
        self._doubt: Hardware | None = None  # what explains the same steps as well as `machine`
        self._believed: Hardware | None = None  # `machine`, while that is tried

    @property
    def question(self) -> Question:
        """For the work at hand, on the machine as it has been learned."""
        return Question(
            self._model,
            self.machine,
            self._work,
            self._state,
            bent(self._hit_rate, self._bend),
            self._prompts,
        )

    @property
    def moving(self) -> Migration | None:
        """What is still to be moved in the background."""
        if self._moves is None or not self._moves.nbytes:
            return None
        return self._moves.part(self._to_move / self._moves.nbytes)

    @property
    def is_settled(self) -> bool:
        """Nothing is moved for, and no plan is on trial."""
        return self._target is None and self._previous is None

    def handle(self, event: Event) -> list[Command]:
        if isinstance(event, MemoryTaken):
            self._state = replace(
                CALM, vram_taken_nbytes=event.vram_nbytes, ram_taken_nbytes=event.ram_nbytes
            )
            return self._refit("memory that is left has changed")
        if isinstance(event, WorkChanged):
            self._work = event.work
            return self._refit("the work has changed")
        if isinstance(event, Arrived):
            return [] if self._target is None else self._switch(self._target)
        if isinstance(event, Refused):
            self._believe_again()
            self._target, self._moves, self._to_move = None, None, 0.0
            self._wait = min(self.settings.max_steps_between, 2 * self._wait)
            return []
        return self._measured(event)

    # -- steps

    def _measured(self, step: StepMeasured) -> list[Command]:
        self._steps.append(step)
        if step.hits is not None:
            self._bends.append(bend_of(self._model, self.plan, self._hit_rate, step.hits))
            self._bend = fmean(self._bends)
            self._chancy.append(step)
        self._since_thought += 1
        if self._target is not None:
            self._to_move -= step.moved_nbytes
            return [] if self._to_move >= 1.0 else self._switch(self._target)  # less is rounding
        if len(self._steps) < self.settings.window:
            return []
        now = self._median()
        is_first = self._reference is None
        if (is_first or self._previous is not None) and 0 < len(self._chancy) < CHANCE_STEPS:
            return []
        if self._previous is not None:
            undo = self._judge(now)
            if undo:
                return undo
        if self._settled is not None:  # back again: nothing has been learned that was not known
            self._reference, self._settled = self._settled, None
        is_first = self._reference is None
        if is_first:
            self._learn(now, is_fresh=True)
            self._reference = self._usual(now)
        elif not self._has_drifted(now) or self._since_thought < self._wait:
            return []
        else:
            self._learn(now, is_fresh=False)
            self._reference = self._usual(now)
            self._gain, self._wait = self.settings.gain, self.settings.min_steps_between
        return self._think("first steps measured" if is_first else "measured steps have drifted")

    def _learn(self, now: StepMeasured, *, is_fresh: bool) -> None:
        """By these steps and the hits that they had."""
        question = self._as_hit(now)
        first, second = (
            learned(question, self._file, self.plan, now, is_fresh=is_fresh, blames_port=blames)
            for blames in (is_fresh, not is_fresh)
        )
        self.machine, self._doubt = first, second if second != first else None

    def _as_hit(self, now: StepMeasured) -> Question:
        """The question, if experts were always hit as in these steps."""
        if now.hits is None:
            return self.question
        bend = bend_of(self._model, self.plan, self._hit_rate, now.hits)
        return replace(self.question, hit_rate=bent(self._hit_rate, bend))

    def _usual(self, now: StepMeasured) -> StepMeasured:
        """What these steps would have shown, had they hit experts as often as all before them."""
        if now.hits is None:
            return now
        usual, as_hit = (each.times(self.plan) for each in (self.question, self._as_hit(now)))
        busy_s = {
            lane: busy * usual.busy_s[lane] / as_hit.busy_s[lane] if as_hit.busy_s[lane] else busy
            for lane, busy in now.busy_s.items()
        }
        return replace(now, seconds=now.seconds * usual.step_s / as_hit.step_s, busy_s=busy_s)

    def _average_s(self) -> float:
        """Of a step of the plan in force, had it hit experts as often as all before it."""
        seconds = fmean(step.seconds for step in self._chancy)
        hits = fmean(step.hits or 0.0 for step in self._chancy)
        return self._usual(replace(self._chancy[-1], seconds=seconds, hits=hits)).seconds

    def _median(self) -> StepMeasured:
        newest = self._steps[-1]
        hits = [step.hits for step in self._steps if step.hits is not None]
        return StepMeasured(
            median(step.seconds for step in self._steps),
            {lane: median(step.busy_s[lane] for step in self._steps) for lane in newest.busy_s},
            kinds_s=self._median_kinds(),
            hits=fmean(hits) if hits else None,
            crossings_s={
                lane: median(step.crossings_s.get(lane, seconds) for step in self._steps)
                for lane, seconds in newest.crossings_s.items()
            },
        )

    def _median_kinds(self) -> dict[str, dict[str, float]]:
        """By lane and kind, over the steps that tell them."""
        told: dict[str, list[Mapping[str, float]]] = {}
        for step in self._steps:
            for lane, kinds in step.kinds_s.items():
                told.setdefault(lane, []).append(kinds)
        return {
            lane: {kind: median(each.get(kind, 0.0) for each in steps) for kind in steps[-1]}
            for lane, steps in told.items()
        }

    def _has_drifted(self, now: StepMeasured) -> bool:
        assert self._reference is not None
        if not self._is_beyond(now):
            return False
        return now.hits is None or self._is_beyond(self._usual(now))

    def _is_beyond(self, now: StepMeasured) -> bool:
        assert self._reference is not None
        if abs(now.seconds / self._reference.seconds - 1.0) >= self.settings.drift:
            return True
        return any(
            abs(busy - self._reference.busy_s[lane]) >= self.settings.drift * now.seconds
            for lane, busy in now.busy_s.items()
        )

    def _judge(self, now: StepMeasured) -> list[Command]:
        """Whether the plan that took over is worse than the one before it."""
        previous, before = self._previous, self._before
        assert previous is not None
        assert before is not None
        self._previous = None
        took_s, before_s = now.seconds, before.seconds * (1.0 + self.settings.tolerance)
        if self._before_s is not None:
            took_s = self._average_s()
            before_s = self._before_s * (1.0 - self.settings.tolerance)
        if took_s <= before_s:
            self._believed = None
            return []
        self._believe_again()
        self._gain *= 2.0
        self._wait = min(self.settings.max_steps_between, 2 * self._wait)
        self._settled = before
        return self._go(previous, "the new plan measured slower", now.seconds, before.seconds)

    # -- thinking

    def _think(self, why: str) -> list[Command]:
        self._since_thought = 0
        question = self.question
        staying_s = question.answer(self.plan).seconds
        for is_near in (True, False):  # what is near is found in a twentieth of the time
            found = replan(question, self.plan) if is_near else search(question)
            if found is None:
                continue
            needed = moves(question, self.plan, found.plan)
            if self._gain_of(found.seconds, staying_s, needed) >= self._asked(needed):
                return self._go(found.plan, why, staying_s, found.seconds, needed)
        self._wait = min(
            self.settings.max_steps_between, round(self._wait * self.settings.patience)
        )
        return self._try_doubt(why)

    def _try_doubt(self, why: str) -> list[Command]:
        """What would be worth it if the other explanation of these steps were true, where nothing
        has to be moved to see: the next steps tell which is."""
        other, self._doubt = self._doubt, None
        if other is None:
            return []
        question = replace(self.question, machine=other)
        staying_s = question.answer(self.plan).seconds
        found = replan(question, self.plan)
        if found is None:
            return []
        needed = moves(question, self.plan, found.plan)
        least = max(self.settings.gain, self._asked(needed))
        if needed.nbytes or self._gain_of(found.seconds, staying_s, needed) < least:
            return []
        self._believed, self.machine = self.machine, other
        why = f"{why}, of cores or of the DRAM port"
        return self._go(found.plan, why, staying_s, found.seconds, needed)

    def _believe_again(self) -> None:
        if self._believed is not None:
            self.machine, self._believed = self._believed, None

    def _asked(self, needed: Migration) -> float:
        """What a plan must promise for which so much has to be moved."""
        if self._bends:
            return max(self._gain, CHANCY_GAIN)
        least = self.settings.gain if needed.nbytes else self.settings.idle_gain
        return self._gain * least / self.settings.gain

    def _gain_of(self, seconds: float, staying_s: float, needed: Migration) -> float:
        """What a plan wins over the horizon, its moves included."""
        steps = self.settings.horizon_steps
        meanwhile = min(float(steps), needed.seconds / staying_s)
        all_s = meanwhile * staying_s + (steps - meanwhile) * seconds
        return 1.0 - all_s / (steps * staying_s)

    def _refit(self, why: str) -> list[Command]:
        """What is running may not fit any more: first what has to go, then the best plan."""
        self._target, self._moves, self._to_move = None, None, 0.0
        self._doubt = self._believed = None
        self._reference = None
        self._previous = None
        self._settled = None
        self._gain = self.settings.gain
        self._wait = self.settings.min_steps_between
        self._steps.clear()
        self._chancy.clear()
        commands: list[Command] = []
        question = self.question
        if not question.fits(self.plan):
            brought = brought_of(self.plan)
            brings = any(map(any, brought.values()))
            spread = shrunk(question, Spread.of(self.plan), brings=brings)
            smaller = settle(question, self.plan.name, spread, brought)
            if smaller is None or not question.fits(smaller):
                smaller = search(question).plan
            needed = moves(question, self.plan, smaller)
            if needed.nbytes:
                commands.append(Move(smaller, needed, is_urgent=True))
            commands += self._switch(smaller)
            self._previous = None
        return commands + self._think(why)

    def _go(
        self,
        plan: Plan,
        why: str,
        staying_s: float,
        expected_s: float,
        needed: Migration | None = None,
    ) -> list[Command]:
        needed = needed or moves(self.question, self.plan, plan)
        explained = Explained(why, staying_s, expected_s, needed.nbytes)
        if not needed.nbytes:
            return [explained, *self._switch(plan)]
        self._target, self._moves, self._to_move = plan, needed, needed.nbytes
        return [explained, Move(plan, needed)]

    def _switch(self, plan: Plan) -> list[Command]:
        if self._steps:
            self._previous, self._before = self.plan, self._usual(self._median())
            self._before_s = self._average_s() if self._chancy else None
        self.plan = plan
        self._target, self._moves, self._to_move = None, None, 0.0
        self._steps.clear()
        self._chancy.clear()
        self._reference = None
        return [Switch(plan)]
