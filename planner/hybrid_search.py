"""The search for a plan over cards, processor, RAM and disk.

First the layouts that people tune by hand, each with its best setting (`hybrid_hand.py`). Then
ours: which kinds of groups go on the cards first, or the knapsack of ATSInfer; which groups are
divided between processor and cards, or between cards, so that all end together; how much of the
rest is brought over a link and computed on a card, in each phase its own part; and at last small
changes, tried one by one. Every candidate is played through and the fastest wins, so a plan is
never predicted slower than one made by hand, but for what is alike: of plans within a thousandth
the one whose lanes have least to do wins, and one that brings nothing within half a percent, since
what is brought can come later than predicted, and what is computed beside it, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from shadowlane.planner.catalog import GroupKind
from shadowlane.planner.hybrid import Load, Plan, Site, kv_nbytes
from shadowlane.planner.hybrid_changes import (
    MECHANISMS,
    bring,
    bring_some,
    otherwise_brought,
    refine,
    shrunk,
)
from shadowlane.planner.hybrid_hand import by_hand
from shadowlane.planner.hybrid_layouts import (
    Answer,
    Question,
    Spread,
    best_of,
    free_nbytes,
    in_micro_batches,
    pack,
    settle,
    streamed,
)

TRIED = 4  # of the fastest starts, with parts brought over the link
MOST_TRIES = 1500  # of small changes
TRIES_OF_LOADS = 40_000  # and loads played through for them: a fraction of a second
ALIKE = 0.001  # seconds closer than this are the same
STILL = 0.005  # that bringing anything must win over plans that bring nothing
KNAPSACK_STEPS = 512  # of one card's room

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
    """The best plan found. rivals: to begin with, in place of what `by_hand` gives.

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
        best = bring_some(question, best)
    if "refine" in using:
        tries = min(MOST_TRIES, TRIES_OF_LOADS // len(question.model.loads))
        best = refine(question, best, tries, using)
    others = tried
    if "bring" in using:
        ways = (plan for plan in otherwise_brought(question, best) if question.fits(plan))
        others = [*tried, *(question.answer(plan, best.seconds * (1 + 2 * ALIKE)) for plan in ways)]
    best = _calmest(best, others)
    if len(question.machine.cards) < 2 or all(work.phase == "decode" for work in question.works):
        return best
    cut = (in_micro_batches(question, each.plan) for each in [*tried, best])
    return best_of(question, (plan for plan in cut if plan.micro_batches > 1), best)


def _calmest(best: Answer, others: Sequence[Answer]) -> Answer:
    """Of what is as fast as `best`, what has least to do for all lanes; of several the fastest.

    What is brought can come late, so where nothing need be brought it must win more than that.
    """
    still = [other for other in others if not _busy_s(other, "h2d")]
    first = min(still, key=lambda answer: answer.seconds, default=best)
    if _busy_s(best, "h2d") and first.seconds <= best.seconds * (1.0 + STILL):
        best = first
    alike = [other for other in others if other.seconds <= best.seconds * (1.0 + ALIKE)]
    return min([*alike, best], key=lambda answer: (_busy_s(answer), answer.seconds))


def _busy_s(answer: Answer, *kinds: str) -> float:
    """`Times.busy_of` in a step of each kind together."""
    both = (answer.times, answer.prompt_times)
    return sum(times.busy_of(*kinds) for times in both if times is not None)


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
    if len(question.machine.cards) > 1:
        spread = pack(question, orders["layers"], whole, evenly=True)
        yield settle(question, "layers, evenly", spread)


def knapsack(question: Question) -> Plan | None:
    """ATSInfer's static placement, exact over `KNAPSACK_STEPS` steps of the room of one card.

    Maximises what the card saves over the processor, less a crossing wherever neighbours differ.
    """
    model, work, machine = question.model, question.work, question.machine
    if len(machine.cards) != 1 or any(load.experts for load in model.loads) or model.has_pins:
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


def _streamed(question: Question, plans: Sequence[Plan]) -> Iterator[Plan]:
    """The same with room for what is brought, and all that prompts can have brought."""
    for plan in plans:
        spread = shrunk(question, Spread.of(plan))
        smaller = settle(question, plan.name, spread)
        if smaller is not None:
            found = streamed(question, smaller, f"{plan.name}, prompts streamed", ["prefill"])
            if found is not None:
                yield found
