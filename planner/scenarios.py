"""What changing plans while running could win: scenarios, and the best that any plan does in them.

Three are compared, all with foresight that no engine has: the plan that is best for how things
begin; the one plan that is best over all; and the best plan of each stretch, moves included. The
difference of the last two bounds what re-planning can be worth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from shadowlane.planner.hardware import CALM, Conditions, Hardware
from shadowlane.planner.hybrid import HitRate, Model, Plan, Work
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.hybrid_moves import moves
from shadowlane.planner.hybrid_search import search


@dataclass(frozen=True, slots=True)
class Stretch:
    """So many decode steps under the same conditions."""

    steps: int
    state: Conditions = CALM
    context: int = 512
    sequences: int = 1


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds of a whole scenario."""

    scenario: str
    first_s: float  # the plan that is best for the first stretch, kept
    kept_s: float  # the best plan that is kept
    changing_s: float  # the best plan of each stretch, moves included; never more than `kept_s`
    moved_nbytes: float  # over links and off the disk, by the last
    plans: tuple[str, ...]  # its plans

    @property
    def gain(self) -> float:
        """What changing wins over the best plan that is kept: 0.1 is ten per cent more tokens."""
        return self.kept_s / self.changing_s - 1.0


class _Setting:
    """One model on one machine; remembers what was planned, for stretches repeat."""

    def __init__(self, model: Model, machine: Hardware, hit_rate: HitRate) -> None:
        self._model, self._machine, self._hit_rate = model, machine, hit_rate
        self._plans: dict[tuple[Work, Conditions], Plan] = {}

    def question(self, stretch: Stretch, room: Stretch | None = None) -> Question:
        """For the work of one stretch. room: what there must be room for besides."""
        most = room or stretch
        work = Work(
            rows=stretch.sequences,
            sequences=stretch.sequences,
            context=stretch.context,
            max_context=most.context * most.sequences // stretch.sequences,
        )
        state = replace(
            stretch.state,
            vram_taken_nbytes=most.state.vram_taken_nbytes,
            ram_taken_nbytes=most.state.ram_taken_nbytes,
        )
        return Question(self._model, self._machine, work, state, self._hit_rate)

    def plan(self, question: Question) -> Plan:
        key = (question.work, question.state)
        if key not in self._plans:
            self._plans[key] = search(question).plan
        return self._plans[key]


def evaluate(
    model: Model,
    machine: Hardware,
    scenarios: Sequence[Scenario],
    hit_rate: HitRate = lambda part: part,
) -> Iterator[Outcome]:
    """One outcome per scenario. Raises TooLarge where no plan has room for all of one.

    A context that the model does not allow counts as the longest that it does.
    """
    setting = _Setting(model, machine, hit_rate)
    for scenario in scenarios:
        stretches = tuple(
            replace(each, context=min(each.context, model.max_context))
            for each in scenario.stretches
        )
        yield _evaluate(setting, scenario.name, stretches)


def _evaluate(setting: _Setting, name: str, stretches: Sequence[Stretch]) -> Outcome:
    most = _most(stretches)
    questions = [setting.question(stretch, most) for stretch in stretches]
    kept: list[tuple[float, Plan]] = []
    for plan in dict.fromkeys(setting.plan(question) for question in questions):
        seconds = sum(
            stretch.steps * question.times(plan).step_s
            for stretch, question in zip(stretches, questions, strict=True)
        )
        kept.append((seconds, plan))
    kept_s, best_kept = min(kept, key=lambda each: each[0])
    changing_s, moved, names = _change(setting, stretches)
    if changing_s > kept_s:
        changing_s, moved, names = kept_s, 0.0, (best_kept.name,)
    return Outcome(name, kept[0][0], kept_s, changing_s, moved, names)


def _most(stretches: Sequence[Stretch]) -> Stretch:
    """What a plan that is kept must have room for."""
    largest = max(stretches, key=lambda each: each.context * each.sequences)
    return replace(
        largest,
        state=replace(
            CALM,
            vram_taken_nbytes=max(each.state.vram_taken_nbytes for each in stretches),
            ram_taken_nbytes=max(each.state.ram_taken_nbytes for each in stretches),
        ),
    )


def _change(
    setting: _Setting, stretches: Sequence[Stretch]
) -> tuple[float, float, tuple[str, ...]]:
    """(seconds, bytes moved, plans): the best of each stretch, or the one before if that is better.

    While bytes move, steps go on under the old plan, and lanes are all theirs. If the old plan does
    not fit any more, steps wait.
    """
    total_s = moved = 0.0
    plan: Plan | None = None
    names: list[str] = []
    for stretch in stretches:
        question = setting.question(stretch)
        best = setting.plan(question)
        best_s = question.times(best).step_s
        seconds = stretch.steps * best_s
        if plan is not None and plan != best:
            stays = question.fits(plan)
            needed = moves(question, plan, best)
            if stays:
                old_s = question.times(plan).step_s
                meanwhile = min(float(stretch.steps), needed.seconds / old_s)
                seconds = meanwhile * old_s + (stretch.steps - meanwhile) * best_s
                if stretch.steps * old_s <= seconds:
                    total_s += stretch.steps * old_s
                    continue
            else:
                seconds += needed.seconds
            moved += needed.nbytes
        total_s += seconds
        plan = best
        names.append(plan.name)
    return total_s, moved, tuple(names)


# One disturbance each, half of the time, after a calm half; and what changes by itself.
HALF = 400
SCENARIOS = (
    Scenario("calm", (Stretch(2 * HALF),)),
    Scenario("cores: 60 % taken", (Stretch(HALF), Stretch(HALF, Conditions(cpu=0.4)))),
    Scenario("card: 60 % taken", (Stretch(HALF), Stretch(HALF, Conditions(gpu=0.4)))),
    Scenario("link: 60 % taken", (Stretch(HALF), Stretch(HALF, Conditions(link=0.4)))),
    Scenario(
        "card and link: 60 % taken", (Stretch(HALF), Stretch(HALF, Conditions(gpu=0.4, link=0.4)))
    ),
    Scenario("VRAM: 2 GB taken", (Stretch(HALF), Stretch(HALF, Conditions(vram_taken_nbytes=2e9)))),
    Scenario("RAM: 8 GB taken", (Stretch(HALF), Stretch(HALF, Conditions(ram_taken_nbytes=8e9)))),
    Scenario(
        "context grows to 16k", tuple(Stretch(HALF, context=size) for size in (512, 4096, 16384))
    ),
    Scenario("batch of 1, then 8", (Stretch(HALF), Stretch(HALF, sequences=8))),
)
