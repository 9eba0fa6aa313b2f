"""The search for a plan over cards, processor, RAM and disk.

First the layouts that people tune by hand, each with its best setting; then ours: which kinds of
groups go on the card first, or the knapsack of ATSInfer; which groups are split between both sides
so that both end together; and how much of the rest is brought over the link and computed on the
card. Every candidate is played through and the fastest wins, so a plan is never predicted slower
than one made by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shadowlane.planner.catalog import GroupKind
from shadowlane.planner.hardware import CALM, Conditions, Hardware
from shadowlane.planner.hybrid import (
    DECODE,
    STAGE_NBYTES,
    HitRate,
    Load,
    Model,
    Plan,
    Site,
    Work,
    fits,
    kv_nbytes,
    ram_room,
    vram_room,
)
from shadowlane.planner.hybrid_play import Times, play

TRIED = 4  # of the fastest starts, with parts brought over the link
KNAPSACK_STEPS = 512  # of one card's room
PARTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)  # of what is not on the card, brought to it

ATTENTION: tuple[GroupKind, ...] = ("attn", "qkv", "o", "router")
MLP: tuple[GroupKind, ...] = ("gate_up", "down")
# What goes on the card first. Experts fill what is left, all layers alike.
ORDERS: tuple[tuple[str, tuple[GroupKind, ...]], ...] = (
    ("attention first", (*ATTENTION, "gate_up", "down", "lm_head", "experts")),
    ("MLP first", ("gate_up", "down", "qkv", "o", "router", "lm_head", "attn", "experts")),
    ("weights first", ("lm_head", "qkv", "o", "router", "gate_up", "down", "attn", "experts")),
)


# What the search may use beside layouts made by hand. Each can be left out: what is it worth?
MECHANISMS = ("kinds", "kv", "knapsack", "experts", "split", "bring")


class TooLarge(ValueError):
    """Nothing fits: the keys and values, or what must be in RAM, are larger than the memory."""


@dataclass(frozen=True, slots=True)
class Question:
    """A model, a machine and the work, for which a plan is looked for."""

    model: Model
    machine: Hardware
    work: Work = DECODE
    state: Conditions = CALM
    hit_rate: HitRate = lambda part: part

    def times(self, plan: Plan) -> Times:
        return play(self.model, plan, self.work, self.machine, self.state, self.hit_rate)


@dataclass(frozen=True, slots=True)
class Answer:
    plan: Plan
    times: Times


def _best(question: Question, plans: Iterable[Plan | None], best: Answer | None = None) -> Answer:
    for plan in plans:
        if plan is None:
            continue
        times = question.times(plan)
        if best is None or times.step_s < best.times.step_s:
            best = Answer(plan, times)
    if best is None:
        raise TooLarge(
            f"{question.model.name} and {question.work.max_context} tokens of context must fit "
            f"{question.machine.name}; nothing does"
        )
    return best


# -- where things live


def _card_of_layer(question: Question) -> Callable[[Load], int]:
    """Layers go to cards in order, in proportion to their room; the head goes to the last."""
    rooms = [vram_room(card, question.state) for card in question.machine.cards]
    layers = 1 + max((load.layer or 0) for load in question.model.loads)
    total = sum(rooms) or 1.0
    bounds = [sum(rooms[: index + 1]) / total * layers for index in range(len(rooms))]

    def card_of(load: Load) -> int:
        place = layers if load.layer is None else load.layer + 0.5
        return next((i for i, bound in enumerate(bounds) if place < bound), len(rooms) - 1)

    return card_of


def settle(
    question: Question,
    name: str,
    vram: Sequence[float],
    brought: Sequence[float] | None = None,
) -> Plan | None:
    """A plan with these parts on the cards; RAM holds what it can of the rest. None: too large.

    What every token reads comes before experts; of what does not fit, all groups leave the same
    part on disk, so that the disk reads steadily.
    """
    model, work = question.model, question.work
    card_of = _card_of_layer(question) if question.machine.cards else lambda _: 0
    room = ram_room(question.machine, question.state) - model.fixed_ram_nbytes
    room -= sum(kv_nbytes(load, work) * (1 - v) for load, v in zip(model.loads, vram, strict=True))
    if room < 0:
        return None
    kept: dict[bool, float] = {}
    for experts in (False, True):
        off = sum(
            load.whole_nbytes * (1 - v)
            for load, v in zip(model.loads, vram, strict=True)
            if bool(load.experts) is experts
        )
        kept[experts] = min(1.0, room / off) if off else 1.0
        room = max(0.0, room - off)
    moved = brought or [0.0] * len(model.loads)
    sites = tuple(
        Site(v, (1.0 - v) * kept[bool(load.experts)], card_of(load), part if v < 1.0 else 0.0)
        for load, v, part in zip(model.loads, vram, moved, strict=True)
    )
    return Plan(name, sites)


def _fill(
    question: Question, order: Sequence[int], limit: Sequence[float], *, by_one: bool
) -> list[float]:
    """Parts on the cards: loads by `order`, each up to its `limit`, while they fit whole.

    by_one: experts share what is left evenly; else they go by whole layers like other loads.
    """
    model, work = question.model, question.work
    card_of = _card_of_layer(question)
    rooms = [vram_room(card, question.state) for card in question.machine.cards]
    vram = [0.0] * len(model.loads)
    experts: dict[int, list[int]] = {}
    for index in order:
        load = model.loads[index]
        card = card_of(load)
        if load.experts and by_one:
            experts.setdefault(card, []).append(index)
            continue
        need = (load.whole_nbytes + kv_nbytes(load, work)) * limit[index]
        if need <= rooms[card]:
            rooms[card] -= need
            vram[index] = limit[index]
    for card, indices in experts.items():
        whole = sum(model.loads[index].whole_nbytes * limit[index] for index in indices)
        part = min(1.0, max(0.0, rooms[card]) / whole) if whole else 0.0
        for index in indices:
            count = model.loads[index].experts
            vram[index] = int(part * limit[index] * count) / count
    return vram


# -- by hand


def layer_split(question: Question, layers: int, *, kv: bool = True) -> Plan | None:
    """The first `layers` layers on the cards, all of each; the head where all layers are.

    kv: whether keys, values and attention go with them.
    """
    vram = [
        1.0 if is_within and (kv or load.kind != "attn") else 0.0
        for load, is_within in zip(
            question.model.loads, _within(question.model, layers), strict=True
        )
    ]
    name = f"layer-split {layers}" if kv else f"layer-split {layers}, KV in RAM"
    return _if_fits(question, name, vram)


def _within(model: Model, layers: int) -> list[bool]:
    """Whether each load is in the first `layers` layers; the head counts as one more."""
    total = num_layers(model)
    return [(total - 1 if load.layer is None else load.layer) < layers for load in model.loads]


def num_layers(model: Model) -> int:
    """Layers of `model`, its head counted as one more."""
    return 2 + max((load.layer or 0) for load in model.loads)


def cpu_moe(question: Question, layers: int) -> Plan | None:
    """Everything on the cards but the experts of the first `layers` layers."""
    vram = [
        0.0 if load.experts and (load.layer or 0) < layers else 1.0 for load in question.model.loads
    ]
    return _if_fits(question, f"cpu-moe {layers}", vram)


def attention_gpu(question: Question) -> Plan | None:
    """Attention, its projections, routers and the head on the cards; MLPs and experts not."""
    kinds = (*ATTENTION, "lm_head")
    vram = [1.0 if load.kind in kinds else 0.0 for load in question.model.loads]
    return _if_fits(question, "attention-gpu", vram)


def layer_stream(question: Question, layers: int) -> Plan | None:
    """As `layer_split`; the others are brought over the link, group by group."""
    plan = layer_split(question, layers)
    if plan is None:
        return None
    vram = [site.vram for site in plan.sites]
    brought = [1.0 if load.kind != "attn" else 0.0 for load in question.model.loads]
    return _if_fits(question, f"layer-stream {layers}", vram, brought)


def _if_fits(
    question: Question,
    name: str,
    vram: Sequence[float],
    brought: Sequence[float] | None = None,
) -> Plan | None:
    plan = settle(question, name, vram, brought)
    if plan is None:
        return None
    is_fitting = fits(question.model, plan, question.work, question.machine, question.state)
    return plan if is_fitting else None


def by_hand(question: Question) -> dict[str, Answer]:
    """The best of each kind of layout that people tune by hand: name -> its best setting."""
    model = question.model
    total = num_layers(model)
    families: dict[str, list[Plan | None]] = {
        "cpu": [settle(question, "cpu", [0.0] * len(model.loads))]
    }
    if question.machine.cards:
        families["layer-split"] = [layer_split(question, n) for n in range(total + 1)]
        families["layer-split, KV in RAM"] = [
            layer_split(question, n, kv=False) for n in range(total + 1)
        ]
        families["layer-stream"] = [layer_stream(question, n) for n in range(total + 1)]
        families["attention-gpu"] = [attention_gpu(question)]
        if any(load.experts for load in model.loads):
            families["cpu-moe"] = [cpu_moe(question, n) for n in range(total + 1)]
    found: dict[str, Answer] = {}
    for name, plans in families.items():
        fitting = _thinned([plan for plan in plans if plan is not None])
        if fitting:
            found[name] = _best(question, fitting)
    return found


def _thinned(plans: list[Plan], most: int = 12) -> list[Plan]:
    """The ends and an even choice between: times change smoothly from layer to layer."""
    if len(plans) <= most:
        return plans
    return [plans[round(i * (len(plans) - 1) / (most - 1))] for i in range(most)]


# -- ours


def knapsack(question: Question) -> Plan | None:
    """ATSInfer's static placement, exact over `KNAPSACK_STEPS` steps of the room of one card.

    Maximises what the card saves over the processor, less a crossing wherever neighbours differ.
    """
    model, work, machine = question.model, question.work, question.machine
    if len(machine.cards) != 1 or any(load.experts for load in model.loads):
        return None
    room = vram_room(machine.cards[0], question.state)
    step = room / KNAPSACK_STEPS
    crossing = machine.cards[0].crossing_s
    least = np.full(KNAPSACK_STEPS + 1, np.inf)
    on_cpu, on_card = least.copy(), least.copy()
    on_cpu[0] = 0.0
    came: list[tuple[np.ndarray, np.ndarray]] = []  # whether the cheaper way came from the other
    for load in model.loads:
        cpu_s, gpu_s = _alone_s(question, load)
        size = int(np.ceil((load.nbytes + kv_nbytes(load, work)) / step))
        to_cpu = np.minimum(on_cpu, on_card + crossing)
        to_card = np.minimum(on_card, on_cpu + crossing)
        came.append((on_card + crossing < on_cpu, on_cpu + crossing < on_card))
        on_cpu = to_cpu + cpu_s
        on_card = np.full_like(to_card, np.inf)
        if size <= KNAPSACK_STEPS:
            on_card[size:] = to_card[: KNAPSACK_STEPS + 1 - size] + gpu_s
    used = int(np.argmin(np.minimum(on_cpu, on_card)))
    is_on_card = bool(on_card[used] < on_cpu[used])
    vram = [0.0] * len(model.loads)
    for index in range(len(model.loads) - 1, -1, -1):
        load = model.loads[index]
        if is_on_card:
            vram[index] = 1.0
            used -= int(np.ceil((load.nbytes + kv_nbytes(load, work)) / step))
            is_on_card = not came[index][1][used]
        else:
            is_on_card = bool(came[index][0][used])
    return settle(question, "knapsack", vram)


def _alone_s(question: Question, load: Load) -> tuple[float, float]:
    """Seconds of one load on the processor and on the card."""
    alone = replace(question.model, loads=(load,))
    seconds = []
    for vram, lane in ((0.0, "cpu:0"), (1.0, "gpu:0")):
        plan = Plan("", (Site(vram, 1.0 - vram),))
        seconds.append(replace(question, model=alone).times(plan).busy_s[lane])
    return seconds[0], seconds[1]


def balance(question: Question) -> list[float]:
    """Per load, the part on the card at which both sides would end together."""
    known: dict[tuple[object, ...], float] = {}
    parts: list[float] = []
    for load in question.model.loads:
        key = (load.kind, load.nbytes, load.flops_per_row)
        if key not in known:
            cpu_s, gpu_s = _alone_s(question, load)
            known[key] = cpu_s / (cpu_s + gpu_s) if cpu_s + gpu_s else 1.0
        parts.append(known[key])
    return parts


def search(
    question: Question,
    *,
    rivals: dict[str, Answer] | None = None,
    using: Collection[str] = MECHANISMS,
) -> Answer:
    """The best plan found. rivals: what `by_hand` gave for the same question, if it was asked.

    using: kinds: groups of one kind go on the card before those of another; kv: keys and values may
    stay in RAM while weights fill the card; knapsack: ATSInfer's placement; experts: one by one, by
    how hot they are, not by whole layers; split: groups divided between both sides; bring: over the
    link ahead of their use.

    Raises TooLarge.
    """
    hand = by_hand(question) if rivals is None else rivals
    best = _best(question, (answer.plan for answer in hand.values()))
    if not question.machine.cards:
        return best
    tried = [best]
    plans = [settle(question, name, vram) for name, vram in _starts(question, using)]
    if "knapsack" in using:
        plans.append(knapsack(question))
    tried += [Answer(plan, question.times(plan)) for plan in plans if plan is not None]
    tried.sort(key=lambda answer: answer.times.step_s)
    best = tried[0]
    if "bring" in using:
        # In prefill almost all is brought, and what is fastest without that says little.
        is_decode = question.work.phase == "decode"
        for start in tried[: TRIED if is_decode else len(tried)]:
            best = bring(question, start, best)
    return best


def _starts(question: Question, using: Collection[str]) -> list[tuple[str, list[float]]]:
    """Ways to fill the cards: (name, part of each load)."""
    loads = question.model.loads
    whole = [1.0] * len(loads)
    limits = [("", whole)]
    if "split" in using:
        split = [
            1.0 if load.experts or load.kind == "attn" else part
            for load, part in zip(loads, balance(question), strict=True)
        ]
        limits.append((", split", split))
    orders = {"layers": list(range(len(loads)))}
    for name, kinds in ORDERS:
        wanted = "kv" if kinds.index("attn") > 0 else "kinds"
        if wanted in using:
            rank = {kind: place for place, kind in enumerate(kinds)}
            orders[name] = sorted(range(len(loads)), key=lambda i: rank[loads[i].kind])
    by_one = "experts" in using
    return [
        (name + suffix, _fill(question, order, limit, by_one=by_one))
        for name, order in orders.items()
        for suffix, limit in limits
    ]


def bring(question: Question, start: Answer, best: Answer) -> Answer:
    """`best`, or `start` with a part of all rows, or every so many whole groups, brought."""
    model = question.model
    vram = _shrunk(question, [site.vram for site in start.plan.sites], STAGE_NBYTES)
    plans: list[Plan | None] = [start.plan]
    for part in PARTS:
        rows = settle(
            question,
            f"{start.plan.name}, {part:.0%} of rows brought",
            vram,
            _rows_brought(model, vram, part),
        )
        groups = settle(
            question,
            f"{start.plan.name}, {part:.0%} of groups brought",
            vram,
            _groups_brought(model, vram, part),
        )
        plans += [rows, groups]
    return _best(question, plans, best)


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


def _shrunk(question: Question, vram: Sequence[float], spare_nbytes: float) -> list[float]:
    """The same parts less the last that have to go so that `spare_nbytes` are free on each card."""
    model, work = question.model, question.work
    card_of = _card_of_layer(question)
    left = [vram_room(card, question.state) - spare_nbytes for card in question.machine.cards]
    for load, v in zip(model.loads, vram, strict=True):
        left[card_of(load)] -= (load.whole_nbytes + kv_nbytes(load, work)) * v
    parts = list(vram)
    for index in range(len(parts) - 1, -1, -1):
        load = model.loads[index]
        card = card_of(load)
        if left[card] < 0 and parts[index] > 0 and load.kind != "attn":
            if load.experts:
                give = min(parts[index], -left[card] / load.whole_nbytes)
                count = -(-give * load.experts // 1) / load.experts
                count = min(parts[index], count)
            else:
                count = parts[index]
            parts[index] -= count
            left[card] += load.whole_nbytes * count
    return parts
