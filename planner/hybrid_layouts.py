"""What any layout over cards and RAM is made with: which part of a group is where, and brought.

A question is what a plan is looked for, an answer a plan played through. `settle` and `pack` make
plans of parts; which parts is for people to tune (`hybrid_hand.py`) or a search to find.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

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
    chooser,
    disk_ring_nbytes,
    fits,
    flops_of,
    kv_nbytes,
    ram_room,
    vram_room,
    whole_on,
)
from shadowlane.planner.hybrid_play import Times, play
from shadowlane.planner.profile import Phase

MICRO_BATCH_ROWS = 512  # at least: what our lanes multiply together

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
    if slots is None and (reads or room < dense + experts):
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
    as the others, of many rows; a mixture in whole layers, which are one card's to route. across:
    each load is divided between all cards, by how fast they read. by_one: experts share evenly what
    is left on all cards; else they go by whole layers.
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
    free = [index for index in order if model.loads[index].home is None]
    if evenly:
        worth, quotas = _even_quotas(question, rooms, free)
    if by_one:
        left = [index for index in free if model.loads[index].experts]
        free = [index for index in free if index not in left]
    needs = [(whole + kv) * most for whole, kv, most in zip(model.wholes, kvs, limit, strict=True)]
    over = shared
    for run in _runs(model, free, needs, max(rooms, default=0.0), by_layers=evenly):
        nbytes, asked = sum(needs[index] for index in run), sum(worth[index] for index in run)
        if not across:
            while current + 1 < len(fastest) and (
                nbytes > rooms[fastest[current]] or asked / 2 > quotas[fastest[current]]
            ):
                current += 1
            over = tuple(float(card == fastest[current]) for card in range(len(cards)))
        for index in run:
            load, need = model.loads[index], needs[index]
            fitting = min(room / part for room, part in zip(rooms, over, strict=True) if part)
            part = 1.0 if need <= max(0.0, fitting) else max(0.0, fitting) / need
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


def _runs(
    model: Model, order: Sequence[int], needs: Sequence[float], room: float, *, by_layers: bool
) -> list[list[int]]:
    """Loads that go on one card together, those of a mixture by layers, which one card routes.

    needs: bytes of each; a layer of more than `room` goes load by load.
    """
    if not by_layers or not any(load.experts for load in model.loads):
        return [[index] for index in order]
    layers: dict[object, list[int]] = {}
    for index in order:
        layer = model.loads[index].layer
        layers.setdefault((index, None) if layer is None else layer, []).append(index)
    runs: list[list[int]] = []
    for run in layers.values():
        fits = sum(needs[index] for index in run) <= room
        runs += [run] if fits else [[index] for index in run]
    return runs


def _even_quotas(
    question: Question, rooms: Sequence[float], order: Sequence[int]
) -> tuple[list[float], list[float]]:
    """(operations of each load for prompts; of each card, its part of those of `order`).

    A card has as much as it is fast; what it has no room for goes to the others.
    """
    model, cards = question.model, question.machine.cards
    work = next((work for work in question.works if work.phase == "prefill"), question.work)
    worth = [flops_of(load, work) for load in model.loads]
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


def in_micro_batches(question: Question, plan: Plan) -> Plan:
    """With as many as prompts have sub-chunks in a step; one where they bring or read anything.

    Nor has a mixture several, where our lanes are to run it, unless one card routes and computes
    all experts of a layer.
    """
    loads = question.model.loads
    if not all(map(_is_in_memory, loads, plan.sites)):
        return plan
    for index, load in enumerate(loads):
        if load.is_joined:
            card = whole_on(plan.sites[index].vram, plan.sites[index].over)
            if card is None or chooser(question.model, plan.sites, index) != 1 + card:
                return plan
    rows = max((work.rows for work in question.works if work.phase == "prefill"), default=1)
    return replace(plan, micro_batches=max(1, rows // MICRO_BATCH_ROWS))


def _is_in_memory(load: Load, site: Site) -> bool:
    """Whether prompts have all of it where it is computed."""
    is_read = load.nbytes > 0.0 and site.vram + site.ram < 1.0 - NOTHING
    return not is_read and not (site.brought_prefill > 0.0 and site.vram < 1.0 - NOTHING)


def streamed(question: Question, plan: Plan, name: str, phases: Iterable[Phase]) -> Plan | None:
    """The same on cards; in these phases all else that has weights is brought to them."""
    everything = [0.0 if load.kind == "attn" else 1.0 for load in question.model.loads]
    brought = dict.fromkeys(phases, everything)
    return fitting(question, settle(question, name, Spread.of(plan), brought))


def fitting(question: Question, plan: Plan | None) -> Plan | None:
    return plan if plan is not None and question.fits(plan) else None
