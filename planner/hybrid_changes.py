"""Changes to a plan over cards: what it brings, how much it holds, single loads; and re-planning.

The search makes whole plans and improves the best of them with these; a re-plan begins with the
plan that runs, and has no time for more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from random import Random

from shadowlane.planner.hybrid import (
    Model,
    Plan,
    all_kv_nbytes,
    more_for_stage,
    whole_on,
)
from shadowlane.planner.hybrid_layouts import (
    Answer,
    Question,
    Spread,
    best_of,
    brought_of,
    free_nbytes,
    one_more,
    settle,
)
from shadowlane.planner.profile import Phase

# What the search may use beside layouts made by hand. Each can be left out: what is it worth?
MECHANISMS = ("kinds", "kv", "knapsack", "experts", "split", "across", "bring", "refine")
PARTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)  # of what is not on the card, brought to it
FEW_PARTS = (0.25, 0.5, 0.75)
TIMES = (0.0, 0.5, 0.75, 1.25, 1.5)  # as much brought as before, in a re-plan
REPLAN_LOADS = 2_000  # that small changes of a re-plan may play through: some 15 ms


def bring(question: Question, start: Answer, best: Answer) -> Answer:
    """`best`, or `start` with a part of all rows, or every so many whole groups, brought.

    Where things live is the same in all phases, so that each chooses for itself what it brings.
    """
    spread = shrunk(question, Spread.of(start.plan))
    brought = brought_of(start.plan)
    name = start.plan.name.removesuffix(", prompts streamed")
    plan: Plan | None = None
    for work in question.works:
        kept = brought[work.phase]
        plan, least_s, its_name = None, float("inf"), ""
        for what, each in _ways_to_bring(question.model, spread.vram, kept):
            tried = settle(question, start.plan.name, spread, {**brought, work.phase: each})
            if tried is None:
                return best
            seconds = question.times(tried, least_s, work=work).step_s
            if seconds < least_s:
                plan, least_s, its_name = tried, seconds, what
                brought[work.phase] = each
        if its_name:
            name += f", {its_name} brought{' for prompts' if work is not question.work else ''}"
    return best_of(question, [start.plan, plan and replace(plan, name=name)], best)


def otherwise_brought(question: Question, best: Answer) -> Iterator[Plan]:
    """The plan of `best` with more or less brought in one phase."""
    spread, brought = Spread.of(best.plan), brought_of(best.plan)
    for work in question.works:
        for _, each in _ways_to_bring(question.model, spread.vram, brought[work.phase]):
            name = _refined(best.plan.name)
            plan = settle(question, name, spread, {**brought, work.phase: each})
            if plan is not None:
                yield plan


def bring_some(question: Question, best: Answer) -> Answer:
    """`best`, with a part of all groups of one kind, or of those of one card, brought in decode."""
    loads = question.model.loads
    phase = question.work.phase
    cards = range(len(question.machine.cards))
    sets = [[load.kind == kind for load in loads] for kind in sorted({x.kind for x in loads})]
    if len(cards) > 1:
        sets += [[site.over[card] > 0.5 for site in best.plan.sites] for card in cards]
    for chosen in sets:
        spread = shrunk(question, Spread.of(best.plan))
        brought = brought_of(best.plan)
        now = brought[phase]
        plans: list[Plan | None] = []
        for part in FEW_PARTS:
            rows = _rows_brought(question.model, spread.vram, part)
            mixed = [
                a if is_chosen else b for a, b, is_chosen in zip(rows, now, chosen, strict=True)
            ]
            name = _refined(best.plan.name)
            plans.append(settle(question, name, spread, {**brought, phase: mixed}))
        best = best_of(question, plans, best)
    return best


def _ways_to_bring(
    model: Model, vram: Sequence[float], kept: list[float]
) -> Iterator[tuple[str, list[float]]]:
    """(what, what is brought of each load): as it is, nothing, parts of all, some as a whole."""
    yield "", kept
    if any(kept):
        yield "nothing", [0.0] * len(vram)
    for part in PARTS:
        yield f"{part:.0%} of rows", _rows_brought(model, vram, part)
        yield f"{part:.0%} of groups", _groups_brought(model, vram, part)


def _rows_brought(model: Model, vram: Sequence[float], part: float) -> list[float]:
    return [
        part if v < 1.0 and load.kind != "attn" else 0.0
        for load, v in zip(model.loads, vram, strict=True)
    ]


def _groups_brought(model: Model, vram: Sequence[float], part: float) -> list[float]:
    """Whole groups, spread evenly, until they are `part` of the bytes that are not on a card."""
    brought: list[float] = []
    owed = 0.0
    for load, v in zip(model.loads, vram, strict=True):
        take = 0.0
        if v < 1.0 and load.kind != "attn":
            owed += part * load.nbytes
            if owed >= load.nbytes / 2:
                take = 1.0
                owed -= load.nbytes
        brought.append(take)
    return brought


def shrunk(question: Question, spread: Spread, *, brings: bool = True) -> Spread:
    """The same parts less what has to go for cards to have room.

    Experts first, of all layers alike, since not every token reads them; then weights from the end,
    and last keys and values. brings: room for a stage, too.
    """
    loads, wholes = question.model.loads, question.model.wholes
    vram = _without_experts(question, spread, brings)
    spread = Spread(vram, spread.over)
    left = beside_stages(question, spread) if brings else free_nbytes(question, spread)
    for index in range(len(vram) - 1, -1, -1):
        load = loads[index]
        if not vram[index] or load.kind == "attn" or load.experts or load.home is not None:
            continue
        if load.is_undivided:
            continue
        short = max(
            (-have / part for have, part in zip(left, spread.over[index], strict=True) if part),
            default=0.0,
        )
        if short <= 0:
            continue
        given = min(vram[index], short / wholes[index])
        vram[index] -= given
        for card, part in enumerate(spread.over[index]):
            left[card] += load.whole_nbytes * given * part
    kvs = all_kv_nbytes(question.model, question.work)
    for index in range(len(vram) - 1, -1, -1):
        over = spread.over[index]
        is_short = any(part and have < 0.0 for have, part in zip(left, over, strict=True))
        if loads[index].kind == "attn" and vram[index] and is_short:
            for card, part in enumerate(over):
                left[card] += kvs[index] * vram[index] * part
            vram[index] = 0.0
    return spread


def _without_experts(question: Question, spread: Spread, brings: bool) -> list[float]:
    """What is on cards of each load when experts have made what room they can."""
    loads, wholes = question.model.loads, question.model.wholes
    left = beside_stages(question, spread) if brings else free_nbytes(question, spread)
    routed = [
        index
        for index, load in enumerate(loads)
        if load.experts and spread.vram[index] and load.home is None
    ]
    vram = list(spread.vram)
    given = 0.0
    for card, have in enumerate(left):
        held = sum(wholes[i] * vram[i] * spread.over[i][card] for i in routed)
        if have < 0.0 and held:
            given = max(given, min(1.0, -have / held))
    if given:
        room = (1.0 - given) * sum(wholes[i] * vram[i] for i in routed)
        for i in routed:
            vram[i] = int(vram[i] * (1.0 - given) * loads[i].experts) / loads[i].experts
        if len({spread.over[i] for i in routed}) == 1:  # what one layer needs another can have
            one_more(question.model, Spread(vram, spread.over), routed, room)
    return vram


def follow(question: Question, best: Answer) -> Answer:
    """`best`, or the same with routers on the cards of their layers, wherever they may be there."""
    loads = question.model.loads
    spread, brought = Spread.of(best.plan), brought_of(best.plan)
    for index, load in enumerate(loads):
        if not load.is_undivided or load.stays or load.home is not None:
            continue
        card = whole_on(spread.vram[index - 1], spread.over[index - 1])
        if card is not None:
            spread.vram[index], spread.over[index] = 1.0, spread.over[index - 1]
    name = _refined(best.plan.name)
    plan = settle(question, name, spread, brought)  # which takes back what saves nothing
    if plan is not None and not question.fits(plan):
        brings = any(map(any, brought.values()))
        plan = settle(question, name, shrunk(question, Spread.of(plan), brings=brings), brought)
    return best_of(question, [plan], best)


# -- by trying


def refine(question: Question, best: Answer, tries: int, using: Collection[str]) -> Answer:
    """Changes that make a plan faster, one by one: of single loads, and of all of one kind.

    tries: how many are played through. The same question gives the same answer.
    """
    random = Random(0)
    loads = question.model.loads
    bringable = [i for i, load in enumerate(loads) if load.kind != "attn" and load.home is None]
    movable = [
        index
        for index in bringable
        if loads[index].nbytes and not loads[index].experts and not loads[index].is_undivided
    ]
    may_bring, may_split = "bring" in using, "split" in using
    if not movable:
        return best
    for _ in range(tries):
        spread = Spread.of(best.plan)
        brought = brought_of(best.plan)
        brings = any(map(any, brought.values()))
        one, other = random.choice(movable), random.choice(movable)
        part = random.choice((0.0, 1.0, random.random()))
        what = random.randrange(5)
        if what < 2 and may_bring:
            lead = random.choice(bringable)
            phase: Phase = random.choice(question.works).phase
            for index in bringable if what else (lead,):
                if loads[index].kind == loads[lead].kind:
                    brought[phase][index] = part
            if not brings and any(brought[phase]):
                spread = shrunk(question, spread)  # what is brought needs a stage
        else:  # room on cards goes from one load to another, or is used where it is free
            freed = spread.vram[other] if what != 2 and one != other else 0.0
            spread.vram[other] -= freed
            free = beside_stages if brings else free_nbytes
            for index in (one, other):
                room = _room_for(free(question, spread), spread, index)
                grown = min(1.0 - spread.vram[index], room / loads[index].nbytes)
                if not may_split and grown < 1.0 - spread.vram[index]:
                    grown = 0.0
                spread.vram[index] += grown * (part or 1.0 if may_split else 1.0)
        plan = settle(question, _refined(best.plan.name), spread, brought)
        best = best_of(question, [plan], best)
    return follow(question, best) if any(load.is_undivided for load in loads) else best


def replan(question: Question, plan: Plan) -> Answer | None:
    """The best of what is near `plan`, at about a twentieth of a search. None: nothing near fits.

    If it does not fit any more it is made to; then more or less is brought in steps of decode, and
    a few small changes are tried. What needs a wholly other plan is for `search` to find.
    """
    if not question.machine.cards:
        return question.answer(plan) if question.fits(plan) else None
    brought = brought_of(plan)
    brings = any(map(any, brought.values()))
    spread = Spread.of(plan)
    if not question.fits(plan):
        spread = shrunk(question, spread, brings=brings)
        smaller = settle(question, plan.name, spread, brought)
        if smaller is None or not question.fits(smaller):
            return None
        plan = smaller
    phase = question.work.phase
    now = brought[phase]
    model = question.model
    ways = [_rows_brought(model, spread.vram, part) for part in PARTS]
    if any(now):
        ways += [[min(1.0, part * times) for part in now] for times in TIMES]
    roomy = spread if brings else shrunk(question, spread)
    fastest, least_s = plan, question.times(plan).step_s
    for way in ways:  # in other phases they are all the same
        tried = settle(question, _refined(plan.name), roomy, {**brought, phase: way})
        if tried is not None:
            seconds = question.times(tried, least_s).step_s
            if seconds < least_s:
                fastest, least_s = tried, seconds
    best = best_of(question, dict.fromkeys((plan, fastest)))
    return refine(question, best, REPLAN_LOADS // len(model.loads), MECHANISMS)


def _refined(name: str) -> str:
    return name if name.endswith(", refined") else f"{name}, refined"


def _room_for(free: Sequence[float], spread: Spread, index: int) -> float:
    """Bytes of one load that its cards still have room for."""
    over = spread.over[index]
    return max(0.0, min(have / part for have, part in zip(free, over, strict=True) if part))


def beside_stages(question: Question, spread: Spread) -> list[float]:
    """`free_nbytes` less what is brought takes up on each card."""
    free = free_nbytes(question, spread)
    cards = question.machine.cards
    return [have - more_for_stage(card) for have, card in zip(free, cards, strict=True)]
