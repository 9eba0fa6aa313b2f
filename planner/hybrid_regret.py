"""How far a plan over cards is from the best: an exact solution of small instances, and annealing.

`exact` knows whole groups only: on the card, in RAM and computed there, or in RAM and brought; of
experts quarters. Plans that divide groups can be faster than it. `annealed` begins with a plan and
may first make it worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import exp
from random import Random

from shadowlane.planner.hybrid import Model, Site, all_kv_nbytes, ram_room, stage_nbytes
from shadowlane.planner.hybrid_layouts import (
    Answer,
    Question,
    Spread,
    brought_of,
    free_nbytes,
    settle,
)
from shadowlane.planner.hybrid_play import hops_between, rates_of
from shadowlane.planner.hybrid_price import price_of

QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)
# Of room and of the link, times what their bytes cost where they are; the best are kept.
PRICES = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1, 1.3, 1.6, 2.0)
KEPT_PRICES = 6
GRAINS = 2000
CLOSE = 0.01  # plans that win less are not looked for
HOT = 0.02  # of a step's time that annealing may lose at first


class TooManyPlans(ValueError):
    """The exact solution was not found within the nodes that were allowed."""


@dataclass(frozen=True, slots=True)
class _Option:
    vram: float
    brought: float
    sides_s: tuple[float, ...]
    held_nbytes: float
    link_s: float


def exact(
    question: Question, start: Answer, *, most_nodes: int = 100_000, is_strict: bool = True
) -> float:
    """Seconds of the best of all plans of whole groups on one card, or of `start`.

    `start` is said where none is faster by `CLOSE`. Branch and bound, group after group: what is
    decided is played without waiting for links, what is not costs its cheapest option once room and
    link have a price. Of partial plans that bring the same and leave the same room, to a part in
    `GRAINS`, only the fastest is followed. Leaves are played in full. Not strict: also of those
    that bring as much, wherever in the model; much sooner, and a few per cent may be missed.

    Raises TooManyPlans.
    """
    if len(question.machine.cards) != 1 or question.prompts is not None:
        raise ValueError("question must have one card and no prompts; got another")
    return _Search(question, start.seconds, most_nodes, is_strict).best_s()


class _Search:
    def __init__(
        self, question: Question, worth_s: float, most_nodes: int, is_strict: bool
    ) -> None:
        self._is_strict = is_strict
        self._question, self._worth_s, self._nodes = question, worth_s, most_nodes
        self._options = _options(question)
        model, machine, state = question.model, question.machine, question.state
        self._hops = hops_between(model, question.work, rates_of(machine, state))
        nowhere = Spread.nowhere(question.model, 1)
        self._room = free_nbytes(question, nowhere)[0]
        self._stage = stage_nbytes(question.machine.cards[0])
        # What neither RAM nor card has room for is read in each step, if all is read in each.
        kept = ram_room(machine, state) - model.fixed_ram_nbytes + self._room
        is_dense = not any(load.experts for load in model.loads)
        read = max(0.0, model.nbytes - kept) if is_dense else 0.0
        self._disk_s = read / (machine.disk_bytes_per_s * state.disk)
        self._prices, self._rest_s = self._bounds()
        self._grain_s = worth_s / GRAINS
        self._grain = max(1.0, self._room / GRAINS)
        self._fastest: dict[tuple[int, int, tuple[float, ...]], list[float]] = {}

    def best_s(self) -> float:
        self._branch(0, list(self._hops[0]), self._room, 0.0, [])
        return self._worth_s

    def _bounds(self) -> tuple[list[tuple[float, float]], list[list[float]]]:
        """(prices of a byte of room and of a second of the link; what the rest costs at each)."""
        slowest = sum(max(max(each.sides_s) for each in options) for options in self._options)
        held = sum(max(each.held_nbytes for each in options) for options in self._options)
        linked = sum(max(each.link_s for each in options) for options in self._options)
        found: list[tuple[float, tuple[float, float], list[float]]] = []
        for a, b in product(PRICES, PRICES):
            room, link = a * slowest / held, b * slowest / (linked or 1.0)
            suffix = [0.0]
            for options in reversed(self._options):
                least = min(
                    max(each.sides_s) + room * each.held_nbytes + link * each.link_s
                    for each in options
                )
                suffix.append(suffix[-1] + least)
            least_s = suffix[-1] - room * self._room - link * self._worth_s
            found.append((least_s, (room, link), suffix[::-1]))
        found.sort(key=lambda each: -each[0])
        best = found[:KEPT_PRICES]
        return [prices for _, prices, _ in best], [rest for _, _, rest in best]

    def _branch(
        self, index: int, ready: list[float], room: float, link_s: float, chosen: list[_Option]
    ) -> None:
        brought: tuple[float, ...] = (float(round(link_s / self._grain_s)),)
        if self._is_strict:
            brought = tuple(option.vram if option.brought else 1.0 for option in chosen)
        where = (index, round(room / self._grain), brought)
        known = self._fastest.get(where)
        if known is not None and all(old <= new for old, new in zip(known, ready, strict=True)):
            return
        if known is None or min(ready) < min(known):
            self._fastest[where] = ready
        self._nodes -= 1
        if self._nodes < 0:
            raise TooManyPlans(f"{self._question.model.name}: too many plans to try them all")
        if index == len(self._options):
            self._leaf(chosen)
            return
        ways: list[tuple[float, list[float], float, float, _Option]] = []
        for option in self._options[index]:
            left, used_s = room - option.held_nbytes, link_s + option.link_s
            if left < (self._stage if used_s else 0.0):
                continue
            after = self._after(ready, option)
            least_s = self._least_s(index + 1, min(after), left, used_s)
            ways.append((least_s, after, left, used_s, option))
        for least_s, after, left, used_s, option in sorted(ways, key=lambda way: way[0]):
            if least_s < self._worth_s * (1.0 - CLOSE):
                self._branch(index + 1, after, left, used_s, [*chosen, option])

    def _least_s(self, index: int, begin_s: float, room: float, link_s: float) -> float:
        left_s = self._worth_s - link_s
        return max(
            link_s,
            self._disk_s,
            begin_s
            + max(
                rest[index] - price * room - per_link * left_s
                for (price, per_link), rest in zip(self._prices, self._rest_s, strict=True)
            ),
        )

    def _after(self, ready: Sequence[float], option: _Option) -> list[float]:
        ends = [
            (side, ready[side] + took) for side, took in enumerate(option.sides_s) if took
        ] or list(enumerate(ready))
        return [
            max(end_s + self._hops[side][there] for side, end_s in ends)
            for there in range(len(ready))
        ]

    def _leaf(self, chosen: Sequence[_Option]) -> None:
        question = self._question
        spread = Spread.nowhere(question.model, 1)
        spread.vram[:] = [option.vram for option in chosen]
        brought = {question.work.phase: [option.brought for option in chosen]}
        plan = settle(question, "exact", spread, brought)
        if plan is not None and question.fits(plan):
            self._worth_s = min(self._worth_s, question.times(plan, self._worth_s).step_s)


def _options(question: Question) -> list[list[_Option]]:
    model, work, rates = question.model, question.work, rates_of(question.machine, question.state)
    found: list[list[_Option]] = []
    for load, whole, kv in zip(model.loads, model.wholes, all_kv_nbytes(model, work), strict=True):
        parts = QUARTERS if load.experts else (0.0, 1.0)
        options: list[_Option] = []
        for vram in parts:
            for brought in (0.0,) if vram == 1.0 or load.kind == "attn" else (0.0, 1.0):
                site = Site(vram, 1.0 - vram, brought, (1.0,), brought)
                price = price_of(load, site, work, rates, question.hit_rate)
                link_s = price.brought_nbytes[0] / rates.h2d_bytes_per_s[0]
                held = (whole + kv) * vram
                options.append(_Option(vram, brought, price.sides_s, held, link_s))
        found.append(options)
    return found


def annealed(question: Question, start: Answer, tries: int, seed: int = 1) -> Answer:
    """The best of `start` and of `tries` plans near it, near those, and so on."""
    random = Random(seed)
    model = question.model
    spread, brought = Spread.of(start.plan), brought_of(start.plan)
    now_s, best = start.seconds, start
    for turn in range(tries):
        vram = list(spread.vram)
        moved = {phase: list(parts) for phase, parts in brought.items()}
        for _ in range(random.choice((1, 2, 3))):
            _change(model, random, vram, moved[random.choice(question.works).phase])
        plan = settle(question, "annealed", Spread(vram, spread.over), moved)
        if plan is None or not question.fits(plan):
            continue
        hot = HOT * exp(-4.0 * turn / tries) * random.random()
        answer = question.answer(plan, now_s * (1.0 + hot))
        if answer.seconds < now_s * (1.0 + hot):
            spread, brought, now_s = Spread(vram, spread.over), moved, answer.seconds
            if now_s < best.seconds:
                best = answer
    return best


def _change(model: Model, random: Random, vram: list[float], brought: list[float]) -> None:
    """One load, or all that are like it, or two that change places."""
    index = random.randrange(len(vram))
    load = model.loads[index]
    alike = [i for i, kind in enumerate(model.alike) if kind == model.alike[index]]
    which = alike if random.random() < 0.2 else [index]
    part = random.choice((0.0, 1.0, random.random()))
    what = random.random()
    if what < 0.3:
        other = random.randrange(len(vram))
        whole_only = any(each.experts or each.kind == "attn" for each in (load, model.loads[other]))
        if not whole_only or model.alike[index] == model.alike[other]:
            vram[index], vram[other] = vram[other], vram[index]
    elif load.kind == "attn" or what < 0.7:
        if load.experts:
            part = round(part * load.experts) / load.experts
        elif load.kind == "attn":
            part = round(part)
        for i in which:
            vram[i] = part
    else:
        for i in which:
            brought[i] = part


def shortened(question: Question, layers: int) -> Question:
    """The first layers of a model, on a machine whose memory is smaller in the same proportion."""
    model, machine = question.model, question.machine
    loads = tuple(load for load in model.loads if load.layer is None or load.layer < layers)
    short = replace(model, loads=loads, fixed_ram_nbytes=0.0)
    part = short.nbytes / model.nbytes
    cards = tuple(
        replace(
            card,
            vram_nbytes=(card.vram_nbytes - card.reserved_nbytes) * part,
            reserved_nbytes=0.0,
        )
        for card in machine.cards
    )
    room = machine.ram_nbytes - machine.reserved_nbytes - model.fixed_ram_nbytes
    smaller = replace(machine, cards=cards, ram_nbytes=room * part, reserved_nbytes=0.0)
    return replace(question, model=short, machine=smaller)
