"""Layouts by hand, our plan, and our plan with its shadow: the same work in the same world.

Layouts that people tune are tuned here as people do: every setting is measured in that very world
and the fastest is kept, for each piece of work its own. `static` is what the planner finds for the
hardware file's figures. `shadowlane` begins with the same plan, measures, learns and changes it,
and is timed when it has settled. Both are plans that our lanes can run on emulated cards: a router
is one lane's, and what it chooses comes over no link. Bounds are those of the machine as it really
is, whoever runs it.

On a virtual clock: nothing runs, and everything here is emulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shadowlane.actors.emulation import Hidden, World
from shadowlane.compare_world import Arena, Bounds, Job, Setting, Timed, as_our_lanes_do
from shadowlane.planner.hand_placement import OF_LAYERS, OF_ONE, most_layers
from shadowlane.planner.hardware import Hardware
from shadowlane.planner.hybrid import Model, Plan, Work
from shadowlane.planner.hybrid_hand import PIPELINED, layer_stream
from shadowlane.planner.hybrid_layouts import Question, TooLarge, in_micro_batches, streamed
from shadowlane.planner.hybrid_search import search
from shadowlane.planner.hybrid_shadow import HybridShadow, WorkChanged
from shadowlane.planner.recorded_hits import RecordedHits
from shadowlane.planner.shortage import what_is_short

OURS, STATIC = "shadowlane", "static"
BY_HAND = (*OF_ONE, *OF_LAYERS)
STRATEGIES = (*BY_HAND, STATIC, OURS)

FINALISTS = 3  # settings of a layout that are measured again, longer
FINAL_STEPS = 12
LEARNING = 60  # steps of the shadow, at least; and at most, while it moves or tries
MOST_LEARNING = 400
CHUNK_GAIN = 0.03  # predicted, for which the shadow tries another chunk
CALIBRATED = "decode"  # the phase whose absolute figures may be shown, see docs/calibration.md

Progress = Callable[[str, float | None], None]


@dataclass(frozen=True, slots=True)
class Reached:
    """What one strategy came to at one job."""

    strategy: str
    setting: Setting
    timed: Timed
    predicted_tok_per_s: float  # by what its planner knew of the machine


@dataclass(frozen=True, slots=True)
class Round:
    """One job, done by all that can."""

    job: Job
    bounds: Bounds
    reached: tuple[Reached, ...]
    left_out: tuple[str, ...]  # strategies that do not fit, or are not for this model or machine

    @property
    def best_by_hand(self) -> Reached | None:
        """The fastest of the layouts that people tune."""
        hand = [each for each in self.reached if each.strategy in BY_HAND]
        return max(hand, key=lambda each: each.timed.tok_per_s, default=None)

    @property
    def reference(self) -> Reached:
        """What others are held against: the best by hand; where none is, the best."""
        return self.best_by_hand or max(self.reached, key=lambda each: each.timed.tok_per_s)

    def of(self, strategy: str) -> Reached | None:
        return next((each for each in self.reached if each.strategy == strategy), None)


@dataclass(frozen=True, slots=True)
class Comparison:
    arena: Arena
    seed: int
    rounds: tuple[Round, ...]


def compare(
    model: Model,
    machine: Hardware,
    jobs: Sequence[Job],
    *,
    strategies: Sequence[str] = STRATEGIES,
    seed: int = 0,
    hidden: Hidden | None = None,
    recorded: RecordedHits | None = None,
    progress: Progress = lambda stage, fraction: None,
) -> Comparison:
    """All of `strategies` at all of `jobs`.

    seed: of the world; hidden: its factors, in place of those drawn from the seed.

    Raises TooLarge where none fits.
    """
    hidden = Hidden.drawn(seed) if hidden is None else hidden
    arena = Arena(model, machine, hidden, seed=seed, recorded=recorded)
    ours = Arena(as_our_lanes_do(model), machine, hidden, seed=seed, recorded=recorded)
    rounds = []
    for number, job in enumerate(jobs):
        rounds.append(_round(arena, ours, job, strategies, number, len(jobs), progress))
    return Comparison(arena, seed, tuple(rounds))


def _round(
    arena: Arena,
    ours: Arena,
    job: Job,
    strategies: Sequence[str],
    number: int,
    jobs: int,
    progress: Progress,
) -> Round:
    """ours: the same for plans that our lanes can run."""
    reached: list[Reached] = []
    left_out: list[str] = []
    planned: tuple[Setting, float] | None = None
    for index, strategy in enumerate(strategies):
        progress("comparing", (number + index / len(strategies)) / jobs)
        if strategy in BY_HAND:
            found = tuned(arena, strategy, job)
        else:
            planned = planned or best_plan(ours, job)
            setting, predicted = planned
            if strategy == OURS:
                setting, predicted = learned(ours, job, setting)
            found = Reached(strategy, setting, ours.time(setting, job), predicted)
        if found is None:
            left_out.append(strategy)
        else:
            reached.append(found)
    if not reached:
        short = what_is_short(arena.stated(job.work(job.chunks()[-1])))
        raise TooLarge(
            f"one of {', '.join(strategies)} must fit {arena.machine.name}; none does: {short}"
        )
    return Round(job, arena.bounds(job), tuple(reached), tuple(left_out))


def why_not(strategy: str, model: Model, machine: Hardware) -> str | None:
    """What a layout by hand lacks to be one here, whether it fits or not."""
    if "cpu-moe" in strategy and not any(load.experts for load in model.loads):
        return f"a mixture of experts; {model.name} is none"
    if strategy in ("row-split", PIPELINED) and len(machine.cards) < 2:
        return f"several cards; {machine.name} has {len(machine.cards)}"
    if strategy in BY_HAND and strategy != "cpu" and not machine.cards:
        return f"a card; {machine.name} has none"
    return None


# -- layouts by hand


def tuned(arena: Arena, strategy: str, job: Job) -> Reached | None:
    """The setting that measures fastest of all there are. None: it is not for here, or too large.

    Of a prompt, what a layout leaves in RAM may be brought over the link or computed in place, as
    llama.cpp does unasked: both are tried, with each chunk.
    """
    if why_not(strategy, arena.model, arena.machine):
        return None
    if strategy == PIPELINED and job.phase == "decode":
        return None  # layers are shared evenly for the sake of prompts
    question = arena.stated(job.work(job.chunks()[-1]))
    plans = list(_settings(question, strategy))
    if not plans:
        return None
    if job.phase == "decode":
        found = _ranked(arena, job, [Setting(plan) for plan in plans])
    else:
        found = _ranked_prompts(arena, job, question, plans, strategy)
    best = max(found[:FINALISTS], key=lambda each: arena.time(each, job, FINAL_STEPS).tok_per_s)
    return Reached(strategy, best, arena.time(best, job), arena.predicted(best, job))


def _settings(question: Question, strategy: str) -> Iterator[Plan]:
    """All that fit, from no layer to all."""
    if strategy in OF_ONE:
        plans = [OF_ONE[strategy](question)]
    else:
        of = OF_LAYERS[strategy]
        counts = range(most_layers(question.model, strategy) + 1)
        plans = [of(question, layers) for layers in counts]
        if strategy == "layer-stream":
            plans += [layer_stream(question, layers, all_kv=True) for layers in counts]
    for plan in plans:
        if plan is not None and question.fits(plan):
            yield plan


def _ranked(arena: Arena, job: Job, settings: Sequence[Setting]) -> list[Setting]:
    return sorted(settings, key=lambda each: arena.glance_s(each, job))


def _ranked_prompts(
    arena: Arena, job: Job, question: Question, plans: Sequence[Plan], strategy: str
) -> list[Setting]:
    """Every number of layers with the longest chunk; then the best, and the most, with all."""

    def brought(plan: Plan) -> Plan | None:
        if strategy in ("cpu", "layer-stream", PIPELINED):  # one always, the others never
            return None
        return streamed(question, plan, f"{plan.name}, streamed", ["prefill"])

    rows = job.chunks()[-1]
    ways = {plan.name: [plan, brought(plan)] for plan in plans}
    seconds = {
        name: min(arena.glance_s(Setting(plan, rows), job) for plan in found if plan is not None)
        for name, found in ways.items()
    }
    names = sorted(seconds, key=lambda name: seconds[name])[:FINALISTS]
    chosen = dict.fromkeys([*names, plans[-1].name])
    return _ranked(
        arena,
        job,
        [
            Setting(_cut(arena, job, plan, chunk), chunk)
            for name in chosen
            for plan in ways[name]
            if plan is not None
            for chunk in job.chunks()
        ],
    )


def _cut(arena: Arena, job: Job, plan: Plan, chunk: int) -> Plan:
    """What is in micro-batches, in as many as suit a chunk."""
    if not plan.name.endswith(PIPELINED.rpartition(",")[2]):
        return plan
    return in_micro_batches(arena.stated(job.work(chunk)), replace(plan, micro_batches=1))


# -- ours


def best_plan(arena: Arena, job: Job) -> tuple[Setting, float]:
    """(what the planner finds for the file's machine, its chunk included; what it promises).

    It plans for the longest chunk, and for the one that this plan would be fastest with.
    """
    first = _plan_for(arena, job, job.chunks()[-1])
    rows = _best_chunk(arena, job, first[0].plan, arena.machine)
    if rows == first[0].rows:
        return first
    return max(first, _plan_for(arena, job, rows), key=lambda each: each[1])


def _plan_for(arena: Arena, job: Job, rows: int) -> tuple[Setting, float]:
    work = job.work(rows)
    answer = search(arena.stated(work))
    return Setting(answer.plan, rows), work.rows / answer.times.step_s


def _best_chunk(arena: Arena, job: Job, plan: Plan, machine: Hardware) -> int:
    """The one that the planner's model would have this plan run with on `machine`."""
    return max(job.chunks(), key=lambda rows: arena.predicted(Setting(plan, rows), job, machine))


def learned(arena: Arena, job: Job, start: Setting) -> tuple[Setting, float]:
    """(what the shadow has come to, what it promises by what it has learned).

    When it has settled it asks once whether another chunk would be faster on the machine as it
    knows it by then, and keeps it if it measures so.
    """
    world, work = arena.world(), job.work(start.rows)
    shadow = HybridShadow(arena.model, arena.machine, work, arena.hit_rate, plan=start.plan)
    settle_down(world, shadow, work)
    setting = Setting(shadow.plan, start.rows)
    promised = arena.predicted(setting, job, shadow.machine)
    rows = _best_chunk(arena, job, shadow.plan, shadow.machine)
    hoped = arena.predicted(Setting(shadow.plan, rows), job, shadow.machine)
    if rows != start.rows and hoped > promised * (1.0 + CHUNK_GAIN):
        work = job.work(rows)
        shadow.handle(WorkChanged(work))
        settle_down(world, shadow, work)
        tried = Setting(shadow.plan, rows)
        if arena.time(tried, job).tok_per_s > arena.time(setting, job).tok_per_s:
            return tried, arena.predicted(tried, job, shadow.machine)
    return setting, promised


def settle_down(world: World, shadow: HybridShadow, work: Work) -> None:
    """Steps until the shadow neither moves anything nor tries a plan."""
    for count in range(MOST_LEARNING):
        if count >= LEARNING and shadow.is_settled:
            return
        shadow.handle(world.step(shadow.plan, work, shadow.moving))


# -- as one object


def rows_of(comparison: Comparison) -> list[dict[str, Any]]:
    """One for each strategy and job, as JSON can hold it."""
    return [
        _row(comparison, round_, each) for round_ in comparison.rounds for each in round_.reached
    ]


def _row(comparison: Comparison, round_: Round, reached: Reached) -> dict[str, Any]:
    arena, job = comparison.arena, round_.job
    reference = round_.reference.timed.tok_per_s
    return {
        "model": arena.model.name,
        "hardware": arena.machine.name,
        "strategy": reached.strategy,
        "setting": told(reached),
        "phase": job.phase,
        "context": job.tokens,
        "room": job.room,
        "step_rows": reached.setting.rows,
        "tok_per_s": reached.timed.tok_per_s,
        "spread": reached.timed.spread,
        "predicted_tok_per_s": reached.predicted_tok_per_s,
        "over_best_by_hand": reached.timed.tok_per_s / reference if round_.best_by_hand else None,
        "resource_bound": round_.bounds.resource,
        "path_bound": round_.bounds.path,
        "seed": comparison.seed,
        "calibrated": job.phase == CALIBRATED,
        "emulated": True,
    }


def told(reached: Reached) -> str:
    """What is set, for people: a number of layers, a chunk; of ours, what the plan is made of."""
    name = reached.setting.plan.name
    if reached.strategy in BY_HAND:
        name = name.removeprefix(reached.strategy.partition(",")[0]).replace(", KV in RAM", "")
        name = name.removesuffix(", pipelined")
    chunk = f"chunk {reached.setting.rows}" if reached.setting.rows > 1 else ""
    return ", ".join(part for part in (name.strip(" ,"), chunk) if part)
