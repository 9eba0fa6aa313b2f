"""The search for a plan over cards, processor, RAM and disk.

First the layouts that people tune by hand, each with its best setting (`hybrid_layouts.py`). Then
ours: which kinds of groups go on the cards first, or the knapsack of ATSInfer; which groups are
divided between processor and cards, or between cards, so that all end together; how much of the
rest is brought over a link and computed on a card, in each phase its own part; and at last small
changes, tried one by one. Every candidate is played through and the fastest wins, so a plan is
never predicted slower than one made by hand.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import numpy.typing as npt

from shadowlane.planner.catalog import GroupKind
from shadowlane.planner.hybrid import Load, Model, Plan, Site, kv_nbytes, stage_nbytes
from shadowlane.planner.hybrid_layouts import (
    Answer,
    Question,
    Spread,
    best_of,
    brought_of,
    by_hand,
    free_nbytes,
    pack,
    settle,
    streamed,
)
from shadowlane.planner.profile import Phase

# What the search may use beside layouts made by hand. Each can be left out: what is it worth?
MECHANISMS = ("kinds", "kv", "knapsack", "experts", "split", "across", "bring", "refine")
TRIED = 4  # of the fastest starts, with parts brought over the link
MOST_TRIES = 1500  # of small changes
TRIES_OF_LOADS = 40_000  # and loads played through for them: a fraction of a second
KNAPSACK_STEPS = 512  # of one card's room
PARTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)  # of what is not on the card, brought to it

# What goes on the cards first. Experts fill what is left, all layers alike.
ATTENTION: tuple[GroupKind, ...] = ("attn", "qkv", "o", "router")
ORDERS: tuple[tuple[str, tuple[GroupKind, ...]], ...] = (
    ("attention first", (*ATTENTION, "gate_up", "down", "lm_head", "experts")),
    ("MLP first", ("gate_up", "down", "qkv", "o", "router", "lm_head", "attn", "experts")),
    ("weights first", ("lm_head", "qkv", "o", "router", "gate_up", "down", "attn", "experts")),
)


def search(
    question: Question,
    *,
    rivals: dict[str, Answer] | None = None,
    using: Collection[str] = MECHANISMS,
) -> Answer:
    """The best plan found. rivals: what `by_hand` gave for the same question, if it was asked.

    using: kinds: groups of one kind go on the cards before those of another; kv: keys and values
    may stay in RAM while weights fill the cards; knapsack: ATSInfer's placement; experts: one by
    one, by how hot they are, not by whole layers; split: groups divided between processor and
    cards; across: groups divided between cards; bring: over the link, ahead of their use; refine:
    small changes, tried one by one.

    Raises TooLarge.
    """
    hand = by_hand(question) if rivals is None else rivals
    best = best_of(question, (answer.plan for answer in hand.values()))
    if not question.machine.cards:
        return best
    starts = [best.plan, *_starts(question, using)]
    if "knapsack" in using:
        starts.append(knapsack(question))
    # Where all but experts fit, orders make no difference: what is the same is tried once.
    plans = {plan.sites: plan for plan in reversed(starts) if plan is not None}
    if "bring" in using and any(work.phase == "prefill" for work in question.works):
        # Of a prompt almost all is brought, and what is fastest without that says little.
        for plan in _streamed(question, list(plans.values())):
            plans.setdefault(plan.sites, plan)
    tried = [question.answer(plan) for plan in plans.values() if question.fits(plan)]
    tried.sort(key=lambda answer: answer.seconds)
    best = tried[0]
    if "bring" in using:
        for start in tried[:TRIED]:
            best = bring(question, start, best)
    if "refine" in using:
        tries = min(MOST_TRIES, TRIES_OF_LOADS // len(question.model.loads))
        best = refine(question, best, tries, using)
    return best


def _starts(question: Question, using: Collection[str]) -> Iterator[Plan | None]:
    """Ways to fill the cards."""
    loads = question.model.loads
    whole = [1.0] * len(loads)
    limits = [("", whole)]
    if "split" in using:
        divided = [
            1.0 if load.experts or load.kind == "attn" else part
            for load, part in zip(loads, balance(question), strict=True)
        ]
        limits.append((", split", divided))
    orders = {"layers": list(range(len(loads)))}
    for name, kinds in ORDERS:
        wanted = "kv" if kinds.index("attn") > 0 else "kinds"
        if wanted in using:
            rank = {kind: place for place, kind in enumerate(kinds)}
            orders[name] = sorted(range(len(loads)), key=lambda i: rank[loads[i].kind])
    ways = [("", False)]
    if "across" in using and len(question.machine.cards) > 1:
        ways.append((", across cards", True))
    for name, order in orders.items():
        for suffix, limit in limits:
            for way, across in ways:
                spread = pack(question, order, limit, by_one="experts" in using, across=across)
                yield settle(question, name + suffix + way, spread)


def knapsack(question: Question) -> Plan | None:
    """ATSInfer's static placement, exact over `KNAPSACK_STEPS` steps of the room of one card.

    Maximises what the card saves over the processor, less a crossing wherever neighbours differ.
    """
    model, work, machine = question.model, question.work, question.machine
    if len(machine.cards) != 1 or any(load.experts for load in model.loads):
        return None
    step = free_nbytes(question, Spread.nowhere(model, 1))[0] / KNAPSACK_STEPS
    if step <= 0:
        return None
    crossing = machine.cards[0].crossing_s
    nothing = np.full(KNAPSACK_STEPS + 1, np.inf)
    on_cpu, on_card = nothing.copy(), nothing.copy()
    on_cpu[0] = 0.0
    sizes: list[int] = []
    crossed: list[tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]] = []  # to cpu, to card
    for load in model.loads:
        cpu_s, gpu_s = _alone_s(question, load)
        size = int(np.ceil((load.nbytes + kv_nbytes(load, work)) / step))
        to_cpu = np.minimum(on_cpu, on_card + crossing)
        to_card = np.minimum(on_card, on_cpu + crossing)
        crossed.append((on_card + crossing < on_cpu, on_cpu + crossing < on_card))
        sizes.append(size)
        on_cpu = to_cpu + cpu_s
        on_card = nothing.copy()
        if size <= KNAPSACK_STEPS:
            on_card[size:] = to_card[: KNAPSACK_STEPS + 1 - size] + gpu_s
    used = int(np.argmin(np.minimum(on_cpu, on_card)))
    is_on_card = bool(on_card[used] < on_cpu[used])
    vram = [0.0] * len(model.loads)
    for index in range(len(model.loads) - 1, -1, -1):
        if is_on_card:
            vram[index] = 1.0
            used -= sizes[index]
        is_on_card ^= bool(crossed[index][int(is_on_card)][used])
    return settle(question, "knapsack", Spread(vram, [(1.0,)] * len(vram)))


def _alone_s(question: Question, load: Load) -> tuple[float, float]:
    """Seconds of one load on the processor and on the first card."""
    alone = replace(question, model=replace(question.model, loads=(load,)))
    over = (1.0, *(0.0 for _ in question.machine.cards[1:]))
    cpu = alone.times(Plan("", (Site(0.0, 1.0, 0.0, over),)))
    card = alone.times(Plan("", (Site(1.0, 0.0, 0.0, over),)))
    return cpu.busy_s["cpu:0"], card.busy_s["gpu:0"]


def balance(question: Question) -> list[float]:
    """Per load, the part on the first card at which it and the processor would end together."""
    known: dict[tuple[object, ...], float] = {}
    parts: list[float] = []
    for load in question.model.loads:
        key = (load.kind, load.nbytes, load.flops_per_row, load.window)
        if key not in known:
            cpu_s, gpu_s = _alone_s(question, load)
            known[key] = cpu_s / (cpu_s + gpu_s) if cpu_s + gpu_s else 1.0
        parts.append(known[key])
    return parts


# -- over the link


def _streamed(question: Question, plans: Sequence[Plan]) -> Iterator[Plan]:
    """The same with room for what is brought, and all that prompts can have brought."""
    for plan in plans:
        spread = shrunk(question, Spread.of(plan))
        smaller = settle(question, plan.name, spread)
        if smaller is not None:
            found = streamed(question, smaller, f"{plan.name}, prompts streamed", ["prefill"])
            if found is not None:
                yield found


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
    """The same parts less what has to go, from the end, for cards to have room.

    brings: room for a stage, too.
    """
    left = _beside_stages(question, spread) if brings else free_nbytes(question, spread)
    vram = list(spread.vram)
    for index in range(len(vram) - 1, -1, -1):
        load = question.model.loads[index]
        short = max(
            (-have / part for have, part in zip(left, spread.over[index], strict=True) if part),
            default=0.0,
        )
        if short <= 0 or not vram[index] or load.kind == "attn":
            continue
        given = min(vram[index], short / load.whole_nbytes)
        if load.experts:
            given = min(vram[index], -(-given * load.experts // 1) / load.experts)
        vram[index] -= given
        for card, part in enumerate(spread.over[index]):
            left[card] += load.whole_nbytes * given * part
    return Spread(vram, spread.over)


# -- by trying


def refine(question: Question, best: Answer, tries: int, using: Collection[str]) -> Answer:
    """Changes that make a plan faster, one by one: of single loads, and of all of one kind.

    tries: how many are played through. The same question gives the same answer.
    """
    random = Random(0)
    loads = question.model.loads
    movable = [i for i, load in enumerate(loads) if load.kind != "attn" and not load.experts]
    bringable = [i for i, load in enumerate(loads) if load.kind != "attn"]
    may_bring, may_split = "bring" in using, "split" in using
    if not movable:
        return best
    for _ in range(tries):
        spread = Spread.of(best.plan)
        brought = brought_of(best.plan)
        one, other = random.choice(movable), random.choice(movable)
        part = random.choice((0.0, 1.0, random.random()))
        what = random.randrange(5)
        if what < 2 and may_bring:
            lead = random.choice(bringable)
            phase: Phase = random.choice(question.works).phase
            for index in bringable if what else (lead,):
                if loads[index].kind == loads[lead].kind:
                    brought[phase][index] = part
        else:  # room on cards goes from one load to another, or is used where it is free
            freed = spread.vram[other] if what != 2 and one != other else 0.0
            spread.vram[other] -= freed
            free = _beside_stages if any(map(any, brought.values())) else free_nbytes
            for index in (one, other):
                room = _room_for(free(question, spread), spread, index)
                grown = min(1.0 - spread.vram[index], room / loads[index].nbytes)
                if not may_split and grown < 1.0 - spread.vram[index]:
                    grown = 0.0
                spread.vram[index] += grown * (part or 1.0 if may_split else 1.0)
        plan = settle(question, _refined(best.plan.name), spread, brought)
        best = best_of(question, [plan], best)
    return best


def _refined(name: str) -> str:
    return name if name.endswith(", refined") else f"{name}, refined"


def _room_for(free: Sequence[float], spread: Spread, index: int) -> float:
    """Bytes of one load that its cards still have room for."""
    over = spread.over[index]
    return max(0.0, min(have / part for have, part in zip(free, over, strict=True) if part))


def _beside_stages(question: Question, spread: Spread) -> list[float]:
    """`free_nbytes` less what is brought takes up on each card."""
    free = free_nbytes(question, spread)
    cards = question.machine.cards
    return [have - stage_nbytes(card) for have, card in zip(free, cards, strict=True)]
