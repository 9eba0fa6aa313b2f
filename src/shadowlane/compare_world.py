"""One emulated world in which strategies are compared: pieces of work, times, and bounds.

The world (`actors/emulation.py`) is not the planner's model, and its rates are off from the
hardware file by factors that nobody tells the planner. It runs on a virtual clock, from shapes or
headers alone; everything here is emulated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shadowlane.actors.emulation import Hidden, Span, World, true_machine
from shadowlane.actors.spec import SMALL
from shadowlane.ops.emulated import FIRST_OF_LAYER, REST_OF_LAYER
from shadowlane.planner.hardware import Conditions, Hardware
from shadowlane.planner.hybrid import HitRate, Model, Plan, Work, assumed_hits, by_our_lanes
from shadowlane.planner.hybrid_bounds import hybrid_bounds
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.hybrid_path import Overheads, PathBound
from shadowlane.planner.profile import Phase
from shadowlane.planner.recorded_hits import RecordedHits

CHUNKS = (512, 1024, 2048, 4096)  # rows of a prompt at once: every strategy may choose
STEPS = 60  # of decode that are timed; of a recording, all of its tokens that were kept for this
OVERHEADS = Overheads(FIRST_OF_LAYER, REST_OF_LAYER, SMALL)  # as the world has them
PROMPT_STEPS = 24  # of prefill that are timed, at least


@dataclass(frozen=True, slots=True)
class Job:
    """What all strategies do: write after so many tokens, or read so many."""

    phase: Phase
    tokens: int
    room: int  # tokens whose keys and values must find room

    @property
    def label(self) -> str:
        return f"{'decode after' if self.phase == 'decode' else 'prompt of'} {self.tokens} tokens"

    def chunks(self) -> tuple[int, ...]:
        """Rows of a step, as they may be chosen."""
        if self.phase == "decode":
            return (1,)
        return tuple(dict.fromkeys(min(chunk, self.tokens) for chunk in CHUNKS))

    def work(self, rows: int) -> Work:
        """A step in the middle."""
        if self.phase == "decode":
            return Work(context=self.tokens, max_context=self.room)
        return Work("prefill", rows, 1, max(1, self.tokens // 2), self.room)

    def works(self, rows: int) -> list[Work]:
        """All steps that do it once; of decode, one."""
        if self.phase == "decode":
            return [self.work(rows)]
        starts = range(0, self.tokens, rows)
        sizes = [min(rows, self.tokens - start) for start in starts]
        return [
            Work("prefill", size, 1, max(1, start + size // 2), self.room)
            for start, size in zip(starts, sizes, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Setting:
    plan: Plan
    rows: int = 1  # of a step


@dataclass(frozen=True, slots=True)
class Timed:
    tok_per_s: float
    spread: float  # standard deviation of single runs, as a part of their mean


@dataclass(frozen=True, slots=True)
class Bounds:
    """Tokens per second that no plan reaches, whatever its chunks; chance apart."""

    resource: float
    path: float


def as_our_lanes_do(model: Model) -> Model:
    """The same model for plans that our engine can run on emulated cards, as `model_of` has it with
    `is_ours`."""
    return replace(model, loads=tuple(by_our_lanes(load) for load in model.loads))


class Arena:
    """A model on one machine with secrets. Everyone meets the same chance, on cards that are warm.

    recorded: routing; without, experts are drawn as often as planners assume.
    """

    def __init__(
        self,
        model: Model,
        machine: Hardware,
        hidden: Hidden,
        *,
        seed: int = 0,
        recorded: RecordedHits | None = None,
    ) -> None:
        self.model = model
        self.machine = machine  # as the file has it
        self.hit_rate: HitRate = assumed_hits(model) if recorded is None else recorded.promised
        self._hidden = hidden
        self._seed = seed
        self._recorded = recorded
        self._met: HitRate = self.hit_rate if recorded is None else recorded.met
        self._steps = STEPS if recorded is None else recorded.num_tokens

    def world(self) -> World:
        """The same each time, from its beginning."""
        return World(
            self.model,
            self.machine,
            self._hidden,
            hit_rate=self._met,
            routes=self._recorded,
            seed=self._seed,
            is_warm=True,
        )

    def stated(self, work: Work) -> Question:
        """As a planner knows it, who has the file."""
        return Question(self.model, self.machine, work, hit_rate=self.hit_rate)

    def predicted(self, setting: Setting, job: Job, machine: Hardware | None = None) -> float:
        """Tokens per second by the planner's model, on the file's machine or on another."""
        work = job.work(setting.rows)
        question = Question(self.model, machine or self.machine, work, hit_rate=self.hit_rate)
        return work.rows / question.times(setting.plan).step_s

    def time(self, setting: Setting, job: Job, least_steps: int | None = None) -> Timed:
        works = job.works(setting.rows)
        steps = least_steps or (self._steps if job.phase == "decode" else PROMPT_STEPS)
        runs = max(2, -(-steps // len(works)))
        world = self.world()
        took = [sum(world.step(setting.plan, work).seconds for work in works) for _ in range(runs)]
        mean_s = sum(took) / runs
        variance = sum((each - mean_s) ** 2 for each in took) / (runs - 1)
        tokens = sum(work.rows for work in works)
        return Timed(tokens / mean_s, variance**0.5 / mean_s)

    def glance_s(self, setting: Setting, job: Job) -> float:
        """Seconds per token of the first step or two: for putting many settings in order."""
        world, work = self.world(), job.work(setting.rows)
        count = 2 if job.phase == "decode" else 1
        seconds = sum(world.step(setting.plan, work).seconds for _ in range(count))
        return seconds / count / work.rows

    def bounds(self, job: Job) -> Bounds:
        """On the machine as it really is, which no planner here knows."""
        machine = true_machine(self.machine, self._hidden)
        state = Conditions(gpu=self.world().card_rate)
        resource, path = 0.0, 0.0
        for rows in job.chunks():
            works = job.works(rows)
            middle = Question(self.model, machine, job.work(rows), state, self._met)
            prices = PathBound(middle, OVERHEADS).best()[1]
            found = [hybrid_bounds(replace(middle, work=work), OVERHEADS, prices) for work in works]
            tokens = sum(work.rows for work in works)
            resource = max(resource, tokens / sum(each.resource_s for each in found))
            path = max(path, tokens / sum(each.path_s for each in found))
        return Bounds(resource, path)

    def spans(self, setting: Setting, job: Job) -> tuple[list[Span], float]:
        """What the lanes do in one step, and its seconds."""
        spans: list[Span] = []
        step = self.world().step(setting.plan, job.work(setting.rows), spans=spans)
        return spans, step.seconds
