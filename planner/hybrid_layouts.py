"""Layouts over cards and RAM that people tune by hand, and what any layout is made with.

What llama.cpp, accelerate and others offer as settings: whole layers on cards, one card after the
other or each matrix divided between all, with or without their keys and values; everything but the
experts of some layers; attention alone; the rest brought over the link layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from shadowlane.planner.hardware import CALM, Conditions, Hardware
from shadowlane.planner.hybrid import (
    DECODE,
    NOTHING,
    HitRate,
    Load,
    Model,
    Plan,
    Prompts,
    Site,
    Work,
    all_kv_nbytes,
    disk_ring_nbytes,
    fits,
    kv_nbytes,
    ram_room,
    rows_of,
    vram_room,
    whole_on,
)
from shadowlane.planner.hybrid_play import Times, play
from shadowlane.planner.profile import Phase

MOST_SETTINGS = 12  # of one kind of layout that are played through
MICRO_BATCH_ROWS = 512  # at least: what our lanes multiply together
PIPELINED = "layer-split, pipelined"

PHASES: tuple[Phase, ...] = ("decode", "prefill")

Brought = Mapping[Phase, Sequence[float]]  # per load; a phase that is left out brings nothing


class TooLarge(ValueError):
    """Nothing fits: the keys and values, or what must be in RAM, are larger than the memory."""


@dataclass(frozen=True, slots=True)
class Question:
    """A model, a machine and the work, for which a plan is looked for.

    prompts: prefill that the same placement serves. A plan is then as good as the seconds of a step
    of `work` and its share of prefill.
    """

    model: Model
    machine: Hardware
    work: Work = DECODE
    state: Conditions = CALM
    hit_rate: HitRate = lambda part: part
    prompts: Prompts | None = None

    @property
    def works(self) -> tuple[Work, ...]:
        return (self.work,) if self.prompts is None else (self.work, self.prompts.work)

    def times(
        self, plan: Plan, worth_s: float = float("inf"), *, work: Work | None = None
    ) -> Times:
        """See `play`; exact for plans faster than `worth_s`. work: another than the question's."""
        work = work or self.work
        return play(self.model, plan, work, self.machine, self.state, self.hit_rate, worth_s)

    def answer(self, plan: Plan, worth_s: float = float("inf")) -> Answer:
        """`plan` played through in all phases; exact if its `seconds` are below `worth_s`."""
        times = self.times(plan, worth_s)
        if self.prompts is None:
            return Answer(plan, times, times.step_s)
        left_s = max(0.0, worth_s - times.step_s) / self.prompts.per_step
        prompt = self.times(plan, left_s, work=self.prompts.work)
        return Answer(plan, times, times.step_s + prompt.step_s * self.prompts.per_step, prompt)

    def fits(self, plan: Plan) -> bool:
        return fits(self.model, plan, self.work, self.machine, self.state)


@dataclass(frozen=True, slots=True)
class Answer:
    plan: Plan
    times: Times  # of a step of the question's work
    seconds: float  # of such a step and its share of prefill: what plans are compared by
    prompt_times: Times | None = None  # of a step of prefill, where the question asks for it


@dataclass(slots=True)
class Spread:
    """What is on cards, load by load: which part, and how cards share it."""

    vram: list[float]
    over: list[tuple[float, ...]]

    @staticmethod
    def of(plan: Plan) -> Spread:
        return Spread([site.vram for site in plan.sites], [site.over for site in plan.sites])

    @staticmethod
    def nowhere(model: Model, cards: int) -> Spread:
        """But for what is pinned to a card."""
        overs = [
            tuple(float(card == one) for card in range(max(1, cards)))
            for one in range(max(1, cards))
        ]
        return Spread(
            [float(load.card is not None) for load in model.loads],
            [overs[load.card or 0] for load in model.loads],
        )


def best_of(question: Question, plans: Iterable[Plan | None], best: Answer | None = None) -> Answer:
    """The fastest of `best` and of `plans` that fit. Raises TooLarge where there is none."""
    for plan in plans:
        if plan is None:
            continue
        answer = question.answer(plan, float("inf") if best is None else best.seconds)
        if (best is None or answer.seconds < best.seconds) and question.fits(plan):
            best = answer
    if best is None:
        raise TooLarge(
            f"{question.model.name} and {question.work.max_context} tokens of context must fit "
            f"{question.machine.name}; nothing does"
        )
    return best


def settle(
    question: Question, name: str, spread: Spread, brought: Brought | None = None
) -> Plan | None:
    """A plan with these parts on cards; RAM holds what it can of the rest. None: too large.

    What every token reads comes before experts; of what does not fit, all groups leave the same
    part on disk, so that the disk reads steadily. What is pinned is at home,
    whatever `spread` says.
    """
    model, work = question.model, question.work
    if model.has_pins:
        spread, brought = _at_home(question, spread, brought)
    nothing = [0.0] * len(model.loads)
    decode, prefill = ((brought or {}).get(phase, nothing) for phase in PHASES)
    spread = _with_routers(model, spread, prefill)
    room = ram_room(question.machine, question.state) - model.fixed_ram_nbytes
    dense = experts = 0.0
    reads = False
    kvs = all_kv_nbytes(model, work)
    for load, whole, kv, vram in zip(model.loads, model.wholes, kvs, spread.vram, strict=True):
        if load.experts:
            experts += whole * (1.0 - vram)
        elif load.home == "disk":
            reads = True
        elif load.home == "cpu":
            room -= whole + kv
        else:
            dense += whole * (1.0 - vram)
            room -= kv * (1.0 - vram)
    slots = question.machine.experts_nbytes
    if reads or room < dense + (experts if slots is None else 0.0):
        room -= disk_ring_nbytes(model, question.machine, question.state)
    if room < 0:
        return None
    dense_kept = min(1.0, room / dense) if dense else 1.0
    if slots is not None and dense_kept < 1.0 - NOTHING:
        return None  # lanes of a mixture read experts alone
    room = max(0.0, room - dense)
    room = room if slots is None else slots
    experts_kept = min(1.0, room / experts) if experts else 1.0
    closed = [card for card, each in enumerate(question.machine.cards) if each.ring_nbytes == 0.0]
    known: dict[tuple[object, ...], Site] = {}  # layers repeat, and plans with few sites play fast
    sites: list[Site] = []
    for load, vram, over, in_decode, in_prefill in zip(
        model.loads, spread.vram, spread.over, decode, prefill, strict=True
    ):
        if load.stays:
            vram = 0.0
        kept = experts_kept if load.experts else _KEPT.get(load.home, dense_kept)
        if load.is_undivided or load.is_joined:  # any experts may come, whatever is chosen
            in_decode, in_prefill = 0.0, in_prefill if load.comes else 0.0
        if any(over[card] for card in closed):  # there is no ring, and there will be none
            in_decode = in_prefill = 0.0
        key = (vram, kept, in_decode, over, in_prefill)
        if key not in known:
            is_off = vram < 1.0
            known[key] = Site(
                vram,
                (1.0 - vram) * kept,
                in_decode if is_off else 0.0,
                over,
                in_prefill if is_off else 0.0,
            )
        sites.append(known[key])
    return Plan(name, tuple(sites))


def _with_routers(model: Model, spread: Spread, prefill: Sequence[float]) -> Spread:
    """The same, with routers on a card only where that saves crossings, or where they are pinned.

    What comes before a router is all on its card then, and so is what comes between it and its
    experts; of these all, or some of them and all of the next group. Where prompts have all of them
    brought there, none need live there. prefill: what prompts have brought.
    """
    vram, over = spread.vram, spread.over
    for experts, router in enumerate(model.routers):
        if router is None or not vram[router] or model.loads[router].home is not None:
            continue
        whole = [whole_on(vram[at], over[at]) for at in range(router - 1, experts + 2)]
        before, card, *between, of_experts, after = whole
        if (
            card is None
            or {before, *between} != {card}
            or not over[experts][card] * (vram[experts] or _all_come(model, prefill, experts))
            or card not in (of_experts, after)
        ):
            vram = list(vram) if vram is spread.vram else vram
            vram[router] = 0.0
    return Spread(vram, over)


def _all_come(model: Model, prefill: Sequence[float], experts: int) -> bool:
    return model.loads[experts].comes and prefill[experts] >= 1.0 - NOTHING


_KEPT: Mapping[str | None, float] = {"cpu": 1.0, "disk": 0.0}  # of what is pinned, in RAM


def _at_home(
    question: Question, spread: Spread, brought: Brought | None
) -> tuple[Spread, Brought | None]:
    """What is pinned is there and nowhere else; what is pinned to the disk may be brought."""
    loads = question.model.loads
    pinned = Spread.nowhere(question.model, len(question.machine.cards))
    here = [load.home is not None for load in loads]
    spread = Spread(
        [a if at else b for a, b, at in zip(pinned.vram, spread.vram, here, strict=True)],
        [a if at else b for a, b, at in zip(pinned.over, spread.over, here, strict=True)],
    )
    if brought is None:
        return spread, None
    still = [load.home not in (None, "disk") for load in loads]
    return spread, {
        phase: [0.0 if at else part for part, at in zip(parts, still, strict=True)]
        for phase, parts in brought.items()
    }


def brought_of(plan: Plan) -> dict[Phase, list[float]]:
    """What a plan brings in each phase, load by load."""
    return {phase: [site.brought_in(phase) for site in plan.sites] for phase in PHASES}


def free_nbytes(question: Question, spread: Spread) -> list[float]:
    """What is left of each card's room; below 0: more than it has."""
    rooms = [vram_room(card, question.state) for card in question.machine.cards]
    kvs = all_kv_nbytes(question.model, question.work)
    for whole, kv, vram, over in zip(
        question.model.wholes, kvs, spread.vram, spread.over, strict=True
    ):
        if vram:
            held = (whole + kv) * vram
            for card, part in enumerate(over):
                rooms[card] -= held * part
    return rooms


def pack(
    question: Question,
    order: Sequence[int],
    limit: Sequence[float],
    *,
    by_one: bool = False,
    across: bool = False,
    evenly: bool = False,
) -> Spread:
    """Loads on cards by `order`, each up to its `limit`, the last as far as it fits.

    The fastest card is filled first, then the next; or, evenly, each with what it takes as long for
    as the others, of many rows. across: each load is divided between all cards, by how fast they
    read. by_one: experts share evenly what is left on all cards; else they go by
    whole layers.
    """
    model, work, cards = question.model, question.work, question.machine.cards
    spread = Spread.nowhere(model, len(cards))
    rooms = free_nbytes(question, spread)
    fastest = sorted(range(len(cards)), key=lambda card: -cards[card].vram_bytes_per_s)
    speed = sum(card.vram_bytes_per_s for card in cards)
    shared = tuple(card.vram_bytes_per_s / speed for card in cards)
    current = 0  # of `fastest`
    left: list[int] = []
    kvs = all_kv_nbytes(model, work)
    quotas = [float("inf")] * len(cards)
    worth = [0.0] * len(model.loads)
    if evenly:
        worth, quotas = _even_quotas(question, rooms, order)
    for index in order:
        load = model.loads[index]
        if load.stays or load.home is not None:
            continue
        if load.experts and by_one:
            left.append(index)
            continue
        need = (model.wholes[index] + kvs[index]) * limit[index]
        if across:
            over = shared
        else:
            while current + 1 < len(fastest) and (
                need > rooms[fastest[current]] or worth[index] / 2 > quotas[fastest[current]]
            ):
                current += 1
            over = tuple(float(card == fastest[current]) for card in range(len(cards)))
        fitting = min(room / part for room, part in zip(rooms, over, strict=True) if part)
        part = 1.0 if need <= fitting else max(0.0, fitting) / need
        if part < 1.0 and (load.experts or load.kind == "attn"):
            continue  # these go whole or not at all
        spread.vram[index], spread.over[index] = limit[index] * part, over
        for card, its in enumerate(over):
            rooms[card] -= need * part * its
            quotas[card] -= worth[index] * its
    whole = sum(model.loads[index].whole_nbytes for index in left)
    room = sum(max(0.0, each) for each in rooms)
    for index in left:
        count = model.loads[index].experts
        spread.vram[index] = int(min(1.0, room / whole) * count) / count
        if room:
            spread.over[index] = tuple(max(0.0, each) / room for each in rooms)
    one_more(model, spread, left, room)
    return spread


def _even_quotas(
    question: Question, rooms: Sequence[float], order: Sequence[int]
) -> tuple[list[float], list[float]]:
    """(operations of each load for prompts; of each card, its part of those of `order`).

    A card has as much as it is fast; what it has no room for goes to the others.
    """
    model, cards = question.model, question.machine.cards
    work = next((work for work in question.works if work.phase == "prefill"), question.work)
    worth = [
        load.flops_per_row
        * rows_of(load, work)
        * (load.attended(work.context) if load.kind == "attn" else 1.0)
        for load in model.loads
    ]
    wanted = sum(worth[index] for index in order)
    nbytes = sum(model.wholes[index] + kv_nbytes(model.loads[index], work) for index in order)
    most = [max(0.0, room) * wanted / max(1.0, nbytes) for room in rooms]
    quotas = [0.0] * len(cards)
    left = [card for card, each in enumerate(most) if each > 0.0]
    while left:
        speed = sum(cards[card].flops for card in left)
        full = [card for card in left if wanted * cards[card].flops / speed >= most[card]]
        for card in full or left:
            quotas[card] = most[card] if full else wanted * cards[card].flops / speed
        wanted -= sum(quotas[card] for card in full)
        left = [card for card in left if full and card not in full]
    return worth, quotas


def one_more(model: Model, spread: Spread, routed: Sequence[int], room: float) -> None:
    """Where experts of all layers alike leave some of `room`, the first layers have one more."""
    room -= sum(model.wholes[index] * spread.vram[index] for index in routed)
    for index in routed:
        load = model.loads[index]
        if room >= load.nbytes and spread.vram[index] < 1.0 - NOTHING:
            spread.vram[index] += 1.0 / load.experts
            room -= load.nbytes


# -- what people tune


def layer_split(
    question: Question,
    layers: int,
    *,
    kv: bool = True,
    across: bool = False,
    pipelined: bool = False,
) -> Plan | None:
    """The first `layers` layers on cards, the head as one layer more. None: they do not fit.

    kv: whether keys, values and attention go with them. across: all cards share every group.
    pipelined: cards have as many layers as take each as long, and prompts go through them in
    micro-batches.
    """
    loads = question.model.loads
    wanted = [
        index
        for index, is_within in enumerate(_within(question.model, layers))
        if is_within and (kv or loads[index].kind != "attn")
    ]
    name = f"{'row' if across else 'layer'}-split {layers}{'' if kv else ', KV in RAM'}"
    if not pipelined:
        return _whole(question, name, wanted, across=across)
    plan = _whole(question, f"{name}, pipelined", wanted, evenly=True)
    return None if plan is None else in_micro_batches(question, plan)


def in_micro_batches(question: Question, plan: Plan) -> Plan:
    """With as many as prompts have sub-chunks in a step; one where they bring or read anything.

    Nor has a mixture several, where our lanes are to run it: a route is of a whole step.
    """
    loads = question.model.loads
    if any(load.is_joined for load in loads) or not all(map(_is_in_memory, loads, plan.sites)):
        return plan
    rows = max((work.rows for work in question.works if work.phase == "prefill"), default=1)
    return replace(plan, micro_batches=max(1, rows // MICRO_BATCH_ROWS))


def _is_in_memory(load: Load, site: Site) -> bool:
    """Whether prompts have all of it where it is computed."""
    is_read = load.nbytes > 0.0 and site.vram + site.ram < 1.0 - NOTHING
    return not is_read and not (site.brought_prefill > 0.0 and site.vram < 1.0 - NOTHING)


def cpu_moe(question: Question, layers: int, *, kv: bool = True) -> Plan | None:
    """Everything on cards but the experts of the first `layers` layers. None: it does not fit.

    kv: whether keys, values and attention are there, too.
    """
    name = f"cpu-moe {layers}{'' if kv else ', KV in RAM'}"
    return _whole(
        question, name, _but_experts(question.model, num_layers(question.model), layers, kv)
    )


def split_moe(question: Question, layers: int) -> Plan | None:
    """As `layer_split`, but for the experts of as many of these layers as have to stay in RAM.

    None: the rest does not fit either.
    """
    model = question.model

    def plan_of(off: int) -> Plan | None:
        name = f"layer-split {layers} + cpu-moe {off}"
        return _whole(question, name, _but_experts(model, layers, off))

    if plan_of(layers) is None:
        return None
    return plan_of(_end(cache(plan_of), layers, -1))


def _but_experts(model: Model, layers: int, off: int, kv: bool = True) -> list[int]:
    """The loads of the first `layers` layers without the experts of the first `off`."""
    return [
        index
        for index, (load, is_within) in enumerate(
            zip(model.loads, _within(model, layers), strict=True)
        )
        if is_within
        and (not load.experts or (load.layer or 0) >= off)
        and (kv or load.kind != "attn")
    ]


def attention_gpu(question: Question) -> Plan | None:
    """All but MLPs and experts on cards. None: it does not fit."""
    others = ("gate_up", "down", "experts")
    wanted = [i for i, load in enumerate(question.model.loads) if load.kind not in others]
    return _whole(question, "attention-gpu", wanted)


def layer_stream(question: Question, layers: int, *, all_kv: bool = False) -> Plan | None:
    """As `layer_split`; the others are brought over the link, group by group.

    all_kv: keys and values of all layers are on cards, so that attention is computed there.
    """
    loads = question.model.loads
    wanted = [
        index
        for index, is_within in enumerate(_within(question.model, layers))
        if is_within or (all_kv and loads[index].kind == "attn")
    ]
    name = f"layer-stream {layers}{', all KV' if all_kv else ''}"
    plan = _whole(question, name, wanted)
    return None if plan is None else streamed(question, plan, name, PHASES)


def num_layers(model: Model) -> int:
    """Layers of `model`, its head counted as one more."""
    return 2 + max((load.layer or 0) for load in model.loads)


def _within(model: Model, layers: int) -> list[bool]:
    """Whether each load is in the first `layers` layers."""
    total = num_layers(model)
    return [(total - 1 if load.layer is None else load.layer) < layers for load in model.loads]


def _whole(
    question: Question,
    name: str,
    wanted: Sequence[int],
    *,
    across: bool = False,
    evenly: bool = False,
) -> Plan | None:
    """These loads on cards, all of each."""
    limit = [1.0] * len(question.model.loads)
    spread = pack(question, wanted, limit, across=across, evenly=evenly)
    loads = question.model.loads
    if any(
        spread.vram[index] < 1.0 and not loads[index].stays and loads[index].home is None
        for index in wanted
    ):
        return None
    return _fitting(question, settle(question, name, spread))


def streamed(question: Question, plan: Plan, name: str, phases: Iterable[Phase]) -> Plan | None:
    """The same on cards; in these phases all else that has weights is brought to them."""
    everything = [0.0 if load.kind == "attn" else 1.0 for load in question.model.loads]
    brought = dict.fromkeys(phases, everything)
    return _fitting(question, settle(question, name, Spread.of(plan), brought))


def _fitting(question: Question, plan: Plan | None) -> Plan | None:
    return plan if plan is not None and question.fits(plan) else None


def by_hand(question: Question) -> dict[str, Answer]:
    """The best of each kind of layout that people tune by hand: name -> its best setting.

    Of a prompt, what a layout leaves in RAM may be brought too, as llama.cpp does unasked: the
    layout is then the same in both phases, and what is brought is not.
    """
    model, cards = question.model, len(question.machine.cards)
    layers = num_layers(model)
    kinds: dict[str, tuple[Callable[[int], Plan | None], int]] = {
        "cpu": (
            lambda _: _fitting(question, settle(question, "cpu", Spread.nowhere(model, cards))),
            0,
        )
    }
    if cards:
        kinds["layer-split"] = (lambda n: layer_split(question, n), layers)
        kinds["layer-split, KV in RAM"] = (lambda n: layer_split(question, n, kv=False), layers)
        if cards > 1:
            kinds["row-split"] = (lambda n: layer_split(question, n, across=True), layers)
            kinds[PIPELINED] = (lambda n: layer_split(question, n, pipelined=True), layers)
        kinds["layer-stream"] = (lambda n: layer_stream(question, n), layers)
        kinds["attention-gpu"] = (lambda _: attention_gpu(question), 0)
        if any(load.experts for load in model.loads):
            without_head = layers - 1  # which has no experts
            kinds["cpu-moe"] = (lambda n: cpu_moe(question, n), without_head)
            kinds["cpu-moe, KV in RAM"] = (lambda n: cpu_moe(question, n, kv=False), without_head)
            kinds["layer-split + cpu-moe"] = (lambda n: split_moe(question, n), layers)
    has_prompts = any(work.phase == "prefill" for work in question.works)
    found: dict[str, Answer] = {}
    for name, (plan_of, most) in kinds.items():
        tried = _thinned(plan_of, most)
        if has_prompts and name not in ("cpu", "layer-stream", PIPELINED):
            tried += _thinned(_for_prompts(question, plan_of), most)
        if tried:
            found[name] = best_of(question, tried)
    return found


def _for_prompts(
    question: Question, plan_of: Callable[[int], Plan | None]
) -> Callable[[int], Plan | None]:
    def streamed_of(setting: int) -> Plan | None:
        plan = plan_of(setting)
        if plan is None:
            return None
        return streamed(question, plan, f"{plan.name}, streamed", ["prefill"])

    return streamed_of


def _thinned(plan_of: Callable[[int], Plan | None], most: int) -> list[Plan]:
    """Of the settings from 0 to `most` that fit, the ends and an even choice between.

    Times change smoothly from layer to layer. What fits are neighbours: their ends are searched for
    between settings that are tried first.
    """
    plan_at = cache(plan_of)
    steps = min(most, MOST_SETTINGS - 1)
    first = [round(i * most / steps) for i in range(steps + 1)] if most else [0]
    fitting = [n for n in first if plan_at(n)] or [n for n in range(most + 1) if plan_at(n)]
    if not fitting:
        return []
    low, high = min(fitting), max(fitting)
    low = _end(plan_at, low, max((n for n in first if n < low), default=-1))
    high = _end(plan_at, high, min((n for n in first if n > high), default=most + 1))
    count = min(MOST_SETTINGS, high - low + 1)
    chosen = {low + round(i * (high - low) / max(1, count - 1)) for i in range(count)}
    return [plan for plan in map(plan_at, sorted(chosen)) if plan is not None]


def _end(plan_at: Callable[[int], Plan | None], fits_at: int, not_at: int) -> int:
    """The last setting that fits on the way from one that does to one that does not."""
    while abs(fits_at - not_at) > 1:
        middle = (fits_at + not_at) // 2
        if plan_at(middle):
            fits_at = middle
        else:
            not_at = middle
    return fits_at
