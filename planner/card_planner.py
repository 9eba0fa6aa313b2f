"""The planner of an engine with cards: the shadow of `hybrid_shadow.py`, with exact placements.

The shadow thinks in parts of groups; here they become blocks and units, which the engine moves and
switches to. What it hears of a step is what the lanes measured; what it is told of a plan is what
rounding made of it, so that predictions are about what really runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from shadowlane.planner import events as ev
from shadowlane.planner.card_placement import place_on_cards
from shadowlane.planner.card_question import (
    OURS,
    beside_rings,
    beside_subchunks,
    plan_over_cards,
    question_over_cards,
)
from shadowlane.planner.catalog import Catalog
from shadowlane.planner.following import Following
from shadowlane.planner.hand_placement import OF_ONE, layers_note
from shadowlane.planner.hardware import Hardware
from shadowlane.planner.hybrid import HitRate, Model, Plan, known_hits
from shadowlane.planner.hybrid_layouts import Question, TooLarge
from shadowlane.planner.hybrid_learning import StepMeasured
from shadowlane.planner.hybrid_moves import moves
from shadowlane.planner.hybrid_shadow import (
    Arrived,
    Command,
    Explained,
    HybridShadow,
    MemoryTaken,
    Move,
    Refused,
    Switch,
    WorkChanged,
)
from shadowlane.planner.lifecycle import Placements, Record
from shadowlane.planner.placement import InfeasiblePlan, Placement, Request, show_nbytes
from shadowlane.planner.plan_of import plan_of
from shadowlane.planner.promise import Promise, show_ms
from shadowlane.planner.ram_watch import RamWatch
from shadowlane.planner.rings import laid_out
from shadowlane.planner.search import later_slots
from shadowlane.planner.stages import first_stage, with_experts
from shadowlane.planner.trial import Option, Settings

STORY_ENTRIES = 12
GROWTH = 1.5  # of a context, that makes the shadow think of longer ones


class CardPlanner:
    """Plans for one engine with cards; `handle` as of `PlannerState`."""

    def __init__(
        self, catalog: Catalog, request: Request, settings: Settings | None = None
    ) -> None:
        self.catalog = catalog
        self.settings = settings or Settings()
        self.placements = Placements(self.settings, self.story)
        self.history: deque[str] = deque(maxlen=100)
        self._ask(request)
        self._shadow: HybridShadow | None = None
        self._following: Following | None = None  # of a mixture
        self._promise = Promise(self.settings.min_steps_between)
        self._after: Placement | None = None  # what a first stage makes room for
        self._left = MemoryTaken(0.0)  # as the shadow has it
        self._taken = MemoryTaken(0.0)  # by other programs, beside what the budget gave way to
        self.watch = None if request.headroom is None else RamWatch(request.ram, request.headroom)

    def _ask(self, request: Request) -> Question:
        """request: with the sub-chunks of a chunk, once they have been chosen."""
        asked = question_over_cards(self.catalog, request)
        self.request = request
        self.model: Model = asked.model
        self._machine: Hardware = asked.machine
        self._work = asked.work
        self._prompts = asked.prompts
        return asked

    # -- what may be asked

    @property
    def active_placement(self) -> Placement | None:
        active = self.placements.active
        return None if active is None else self.placements.records[active].placement

    def regret(self) -> float | None:
        """Not known: every plan but one runs elsewhere only in predictions."""
        return None

    def story(self, about: str = "") -> str:
        """The newest entries of the history that mention `about`."""
        return " | ".join([entry for entry in self.history if about in entry][-STORY_ENTRIES:])

    def validate(self) -> None:
        """Invariants that hold between any two events."""
        self.placements.validate()

    # -- events

    def handle(self, event: ev.Event) -> list[ev.Command]:
        self.history.append(ev.brief(event))
        commands: list[ev.Command] = []
        if isinstance(event, ev.EngineStarted):
            commands = self._begin()
        elif isinstance(event, ev.EngineResumed):
            self.placements.take_over(
                Option.as_placed("taken over", event.placement), event.newest_id
            )
            self._ask(replace(self.request, subchunks=event.placement.subchunks))
            self._machine = laid_out(self.catalog, self._machine, event.placement)
            self._open_shadow(event.placement)
        elif isinstance(event, ev.StepRetired):
            commands = self._step_retired(event)
        elif isinstance(event, ev.ExpertsChosen):
            commands = self._experts_chosen(event)
        elif isinstance(event, ev.MemoryLeft):
            self._taken = MemoryTaken(event.vram_taken_nbytes, event.ram_taken_nbytes)
            commands = self._refit()
        elif isinstance(event, ev.RamLooked):
            commands = self._ram_looked(event)
        elif isinstance(event, ev.PlacementAcknowledged):
            commands = self.placements.acknowledge(event)
        elif isinstance(event, ev.PlacementAnnounced):
            commands = self.placements.announce(event)
        elif isinstance(event, ev.PlacementRefused):
            commands = self._refused(event)
        self.history.extend(f"-> {ev.brief(command)}" for command in commands)
        return commands

    def _begin(self) -> list[ev.Command]:
        plan, request = plan_over_cards(self.catalog, self.request)
        question = self._ask(request)
        if request.strategy == OURS and request.replan:
            question, plan = beside_rings(self.catalog, question, plan)
        placement = self._exact(plan, question)
        notes = layers_note(self.model, request.strategy, request.strategy_layers)
        placement = replace(placement, notes=(*notes, *placement.notes))
        self._machine = laid_out(self.catalog, self._machine, placement)
        self._open_shadow(placement)
        return self.placements.publish(
            Option.as_placed(placement.strategy, placement), f"first plan: {placement.strategy}"
        )

    def _open_shadow(self, placement: Placement) -> None:
        """Layouts by hand stay as they are: they are what a shadow is measured against."""
        if self.request.strategy != OURS or not self.request.replan:
            return
        self._shadow = HybridShadow(
            self.model,
            self._machine,
            self._work,
            known_hits(self.catalog, self.model),
            plan=plan_of(self.catalog, placement, self.model),
            prompts=self._prompts,
        )
        if self.catalog.experts is not None:
            held = [part.experts for part in placement.cards]
            self._following = Following(self.catalog.experts, held)

    def _exact(self, plan: Plan, question: Question) -> Placement:
        """A running engine keeps its ring and its slots for experts. Raises InfeasiblePlan."""
        active = self.active_placement
        if active is None:
            return self._for_others(
                place_on_cards(self.catalog, plan, self.request, question), plan
            )
        ring = active.num_slots or later_slots(self.catalog.slot_nbytes)
        request = replace(self.request, num_slots=self.request.num_slots or ring)
        slots, catalog = active.expert_slots, self.catalog
        if self._following is not None:
            catalog = self._following.ranked(catalog)
        placement = place_on_cards(
            catalog, plan, request, question, expert_slots=slots, before=active
        )
        return self._for_others(placement, plan)

    def _for_others(self, placement: Placement, plan: Plan) -> Placement:
        """With the chunks that other sequences' tokens may have to wait for."""
        count = beside_subchunks(self.catalog, self.request, plan)
        return replace(placement, beside_subchunks=count)

    # -- steps

    def _step_retired(self, event: ev.StepRetired) -> list[ev.Command]:
        record = self.placements.record(event.placement_id)
        if record is None:
            return []  # told late, in a batch: the switch has been seen already
        commands: list[ev.Command] = []
        if record.stage != "active":
            commands += self.placements.activate(event.placement_id)
            commands += self._promise.of(record.placement)
            commands += self._activated(record)
        if event.phase != "decode" or event.rows != 1 or self._shadow is None:
            return commands
        if record.settling:
            record.settling -= 1
            return commands
        commands += self._promise.took(event)
        if self.placements.is_switching:
            return commands
        chosen = event.experts_chosen + event.experts_on_cards
        hits = event.experts_on_cards / chosen if chosen else None
        busy_s, kinds_s = _by_lane(event)
        measured = StepMeasured(
            event.seconds, busy_s, kinds_s=kinds_s, hits=hits, crossings_s=event.crossings_s
        )
        if event.context > GROWTH * self._work.context:
            context = min(2 * self._work.context, self._work.max_context)
            if context > self._work.context:
                self._work = replace(self._work, context=context)
                return commands + self._obey(self._shadow.handle(WorkChanged(self._work)))
        return commands + self._obey(self._shadow.handle(measured))

    def _experts_chosen(self, event: ev.ExpertsChosen) -> list[ev.Command]:
        """Let other experts live on the cards, as many of each layer, where that is worth it."""
        if self._following is None or self._shadow is None:
            return []
        self._following.note(event.lately.visits, event.lately.counts)
        active, proposal = self.active_placement, self._following.proposal()
        is_busy = self.placements.is_switching or not self._shadow.is_settled
        if proposal is None or active is None or is_busy or self._after is not None:
            return []
        assert self.catalog.experts is not None
        question, plan = self._shadow.question, self._shadow.plan
        staying_s, seconds = (
            replace(question, hit_rate=_always(rate)).times(plan).step_s
            for rate in (proposal.hits_now, proposal.hits)
        )
        # what comes and what leaves take turns on the link
        nbytes = 2 * proposal.num_moved * self.catalog.experts.slot_nbytes
        slowest = min(card.h2d_bytes_per_s for card in question.machine.cards)
        steps = self._shadow.settings.horizon_steps
        meanwhile = min(float(steps), nbytes / slowest / staying_s)
        gain = (1.0 - meanwhile / steps) * (1.0 - seconds / staying_s)
        if gain < self._shadow.settings.gain:
            return []
        placement = with_experts(self.catalog, active, proposal.cards)
        stage = first_stage(self.catalog, active, placement)
        self._after = None if stage is None else placement
        self._following.is_exchanged = True
        reason = (
            f"routers choose other experts: {100 * proposal.hits_now:.0f} % of the chosen are on "
            f"cards, {100 * proposal.hits:.0f} % would be; {show_ms(staying_s)} a step if nothing "
            f"changes, {show_ms(seconds)} with {proposal.num_moved} experts exchanged"
        )
        return self.placements.publish(
            Option.as_placed(active.strategy, stage or placement), reason
        )

    def _activated(self, record: Record) -> list[ev.Command]:
        """What runs now is what the shadow moved for, as rounding made it, or a stage before it."""
        if self._shadow is None:
            return []
        if self._following is not None:
            self._following.held([part.experts for part in record.placement.cards])
        if self._after is not None:
            after, self._after = self._after, None
            return self.placements.publish(
                Option.as_placed(after.strategy, after),
                f"second stage of {after.strategy}, {show_ms(after.predicted_step_s)}",
            )
        self._shadow.handle(Arrived())
        self._shadow.plan = plan_of(self.catalog, record.placement, self.model)
        return []

    def _ram_looked(self, event: ev.RamLooked) -> list[ev.Command]:
        active = self.active_placement
        if self.watch is None or self._shadow is None or active is None:
            return []
        if self.placements.is_switching:
            return []
        why = self.watch.read(event.found, active.total_nbytes)
        if why is None:
            return []
        before, self.request = self.request, replace(self.request, ram=self.watch.budget)
        commands = self._refit()
        if self._left.ram_nbytes != self._taken.ram_nbytes + self.watch.taken:  # nothing fits
            self.watch.refuse()
            self.request = before
        return [ev.Note(why), *commands]

    def _refit(self) -> list[ev.Command]:
        """The best plan for what other programs leave."""
        if self._shadow is None:
            return []
        given = 0 if self.watch is None else self.watch.taken
        taken = replace(self._taken, ram_nbytes=self._taken.ram_nbytes + given)
        try:
            commands = self._shadow.handle(taken)
        except TooLarge as error:  # a shadow that knew would find nothing in any later thought
            self._shadow.handle(self._left)
            return [ev.Note(f"memory that is left holds no plan: {error}; the plan stays as it is")]
        self._left = taken
        is_on_its_way = self.placements.is_switching or self._after is not None
        self._after = None
        return self._obey(commands) or (self._withdraw() if is_on_its_way else [])

    def _withdraw(self) -> list[ev.Command]:
        """What runs, in place of a placement on its way that was made for other memory."""
        assert self._shadow is not None
        try:
            placement = self._exact(self._shadow.plan, self._shadow.question)
        except InfeasiblePlan:
            return []
        return self.placements.publish(
            Option.as_placed(placement.strategy, placement),
            "memory has changed while a plan was on its way: back to what runs, "
            f"{show_ms(placement.predicted_step_s)} as {placement.strategy}",
        )

    def _refused(self, event: ev.PlacementRefused) -> list[ev.Command]:
        if self.placements.record(event.placement_id) is None:
            return []
        self._after = None
        if self._shadow is not None:
            self._shadow.handle(Refused())
            active = self.active_placement
            if active is not None:
                self._shadow.plan = plan_of(self.catalog, active, self.model)
        commands = self.placements.refuse(event.placement_id)
        return [*commands, ev.Note(f"plan {event.placement_id} cannot be: {event.why}")]

    def _obey(self, commands: Sequence[Command]) -> list[ev.Command]:
        """The newest plan that is moved for or switched to, as a placement on its way."""
        assert self._shadow is not None
        wanted: Plan | None = None
        explained: Explained | None = None
        for command in commands:
            if isinstance(command, Explained):
                explained = command
            elif isinstance(command, Move | Switch):
                wanted = command.plan
        if wanted is None:
            return []
        active = self.active_placement
        assert active is not None, "steps retire under it"
        question = self._shadow.question
        try:
            placement = self._exact(wanted, question)
        except InfeasiblePlan:
            placement = active
        staying = plan_of(self.catalog, active, self.model)
        staying_s = question.times(staying).step_s
        is_forced = explained is None or not question.fits(staying)
        worth_s = staying_s * (1.0 - self._shadow.settings.gain)
        if _is_same(placement, active) or not (is_forced or placement.predicted_step_s < worth_s):
            # What was promised was lost in rounding.
            self._shadow.handle(Refused())
            self._shadow.plan = plan_of(self.catalog, active, self.model)
            return []
        stage = first_stage(self.catalog, active, placement)
        self._after = None if stage is None else placement
        placement_now = stage or placement
        why = "what runs does not fit any more"
        if explained is not None:
            why = f"{explained.why}: {show_ms(staying_s)} a step if nothing changes"
        moved = show_nbytes(round(moves(question, staying, wanted).nbytes))
        return self.placements.publish(
            Option.as_placed(placement.strategy, placement_now),
            f"{why}, {show_ms(placement.predicted_step_s)} as {placement.strategy}; moves {moved}",
        )


def first_over_cards(catalog: Catalog, request: Request) -> Placement:
    """What an engine would start with. Raises InfeasiblePlan, TooLarge, ValueError."""
    (command,) = CardPlanner(catalog, request).handle(ev.EngineStarted())
    assert isinstance(command, ev.PublishPlacement)
    return command.placement


def check_over_cards(catalog: Catalog, request: Request) -> None:
    """Raises what `first_over_cards` would; searches only where nothing simple fits."""
    question = question_over_cards(catalog, request)
    plan = OF_ONE["cpu"](question)
    if request.strategy == OURS and plan is not None and question.fits(plan):
        with suppress(ValueError):
            place_on_cards(catalog, plan, request, question)
            return
    first_over_cards(catalog, request)


def _always(rate: float) -> HitRate:
    """However many experts cards hold: of those that they hold it has been measured."""
    return lambda part: rate


def _by_lane(
    event: ev.StepRetired,
) -> tuple[dict[str, float], dict[str, Mapping[str, float]]]:
    """(busy seconds; of these, by kind of group) of the lanes that the shadow knows.

    Of several lanes of the processor the busiest stands for all.
    """
    cores = [lane for lane in event.busy_s if lane.startswith("cpu:")]
    busiest = max(cores, key=lambda lane: event.busy_s[lane], default="cpu:0")
    names = {lane: lane for lane in event.busy_s if lane not in cores} | {busiest: "cpu:0"}
    busy_s = {name: event.busy_s.get(lane, 0.0) for lane, name in names.items()}
    kinds_s = {name: event.kinds_s[lane] for lane, name in names.items() if lane in event.kinds_s}
    return busy_s, kinds_s


def _is_same(one: Placement, other: Placement) -> bool:
    return replace(one, placement_id=0, strategy="", notes=(), predicted_step_s=0.0) == replace(
        other, placement_id=0, strategy="", notes=(), predicted_step_s=0.0
    )
