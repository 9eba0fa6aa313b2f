"""The critical path that no plan over cards can shorten: crossings, launches and branches included.

Groups follow each other. Each may be divided between the sides in any way, and its output is at a
side when the last part has come there. Memory of cards, links and the DRAM port are shared by all
groups: instead of asking where they go, each byte is given a price, and what the rooms are worth is
taken off in the end. At any prices that is less than what any plan takes (Lagrange), so the best
prices found give the bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from shadowlane.planner.hit_rate import expected_distinct, interpolate, upper_hull
from shadowlane.planner.hybrid import Load, flops_of, kv_nbytes, read_kv_nbytes, vram_room
from shadowlane.planner.hybrid_layouts import Question
from shadowlane.planner.hybrid_play import hops_between, rates_of

FACTORS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0, 1.1)  # on what a byte of a card seems to be worth
LINKS = (0.0, 0.2, 0.5, 1.0, 2.0)  # prices of a second of all links
STEPS = (0.4, 0.2, 0.1, 0.05, 0.02)  # by which prices are changed, one by one
ROUNDS, ENOUGH = 8, 1e-3  # with each step, as long as so much is won
PERIODS = (1, 2)  # layers after which a model may repeat itself
HELD = 16  # parts of a layer's experts on cards that are told apart
SAME = 1e-9


@dataclass(frozen=True, slots=True)
class Overheads:
    """What a machine is known to take beside the planner's model, where the bound is of a world."""

    first_launches: float = 1.0  # that a card pays for with the first group of a layer
    other_launches: float = 1.0
    small_nbytes: float = 0.0  # a matrix of so many bytes reaches half of a rate


EXACT = Overheads()  # what `play` knows and no more


class Prices(NamedTuple):
    room: tuple[float, ...]  # seconds per byte of each card
    link: tuple[float, ...]  # per second of each link
    port: float  # per second of the DRAM port


class _Side(NamedTuple):
    """Someone who may take a part of a group."""

    number: int  # 0: the processor, then cards
    fixed_s: float
    whole_s: float  # what all of it would take
    price_s: float  # of all of it
    most: float = 1.0  # part that it can take


class _Group(NamedTuple):
    """What a group may cost: of experts, by the part of the choices that hit cards."""

    sides: tuple[tuple[float, tuple[_Side, ...]], ...]  # hits -> who may take part
    held: tuple[tuple[float, float], ...]  # (seconds that room is priced at, hits that it gives)


class PathBound:
    def __init__(self, question: Question, overheads: Overheads = EXACT) -> None:
        self._question, self._overheads = question, overheads
        machine, state = question.machine, question.state
        self._rates = rates_of(machine, state)
        self._rooms = [vram_room(card, state) for card in machine.cards]
        # Either way as fast as the faster of both ways.
        cards = [
            replace(card, h2d_bytes_per_s=rate, d2h_bytes_per_s=rate)
            for card in machine.cards
            for rate in [max(card.h2d_bytes_per_s, card.d2h_bytes_per_s)]
        ]
        self._hops = hops_between(
            question.model, question.work, rates_of(replace(machine, cards=tuple(cards)), state)
        )

    def best(self) -> tuple[float, Prices]:
        """(the bound, the prices at which it was found)."""
        cards = self._rates.cards
        worth = [self._worth(card) for card in range(len(cards))]
        tried = [
            Prices(tuple(each * factor for each in worth), (link,) * len(cards), 0.0)
            for factor in (FACTORS if cards else (0.0,))
            for link in (LINKS if cards else (0.0,))
        ]
        found, prices = max((self.at(each), each) for each in tried)
        for step in STEPS:
            for _ in range(ROUNDS):
                before = found
                for each in _near(prices, worth, step):
                    seconds = self.at(each)
                    if seconds > found:
                        found, prices = seconds, each
                if found < before * (1.0 + ENOUGH):
                    break
        return found, prices

    def _worth(self, card: int) -> float:
        """Seconds that a byte of a card may save: the most that weights do, or their way there."""
        rates, work = self._rates, self._question.work
        its = rates.cards[card]
        saved = [
            (max(1.0 / rates.cpu_bytes_per_s, flops / rates.cpu_flops))
            - max(1.0 / its.vram_bytes_per_s, flops / its.flops) / rates.gpu
            for load in self._question.model.loads
            if load.nbytes and not load.experts
            for flops in [flops_of(load, work) / load.nbytes]
        ]
        return max(0.0, min(max(saved, default=0.0), 1.0 / rates.h2d_bytes_per_s[card]))

    def at(self, prices: Prices) -> float:
        """What any plan takes at least, by these prices."""
        model = self._question.model
        groups = self._groups(prices)
        arrived = list(self._hops[0])
        layers = model.layers
        kinds = [model.alike[slice(*each)] for each in layers]
        history = [arrived]
        place = 0
        while place < len(layers):
            start, end = layers[place]
            for index in range(start, end):
                arrived = self._after(arrived, groups[model.alike[index], index == start])
            place += 1
            history.append(arrived)
            for period in PERIODS:
                # What comes round as before, only later, will do so again.
                like = kinds[place - period : place]
                gone = (
                    [now - then for now, then in zip(arrived, history[-1 - period], strict=True)]
                    if place >= 2 * period
                    else []
                )
                if not gone or like != kinds[place - 2 * period : place - period]:
                    continue
                if max(gone) - min(gone) > SAME * max(abs(each) for each in gone):
                    continue
                while kinds[place : place + period] == like:
                    arrived = [each + gone[0] for each in arrived]
                    place += period
                    history += [arrived] * period
        rooms = sum(price * room for price, room in zip(prices.room, self._rooms, strict=True))
        return (min(arrived) - rooms) / (1.0 + sum(prices.link) + prices.port)

    def _after(self, arrived: Sequence[float], group: _Group) -> list[float]:
        """When, prices included, the output of a group can be at each side."""
        found: list[float] = []
        for there in range(len(arrived)):
            ends = [
                (
                    hits,
                    _divided(
                        [
                            (
                                side.price_s,
                                arrived[side.number]
                                + side.fixed_s
                                + self._hops[side.number][there],
                                side.whole_s,
                                side.most,
                            )
                            for side in sides
                        ]
                    ),
                )
                for hits, sides in group.sides
            ]
            if len(ends) == 1:
                found.append(ends[0][1])
                continue
            # However hits are spread over tokens and layers, their mean costs no less than this.
            least = _lower_hull([each for each in ends if each[1] < float("inf")])
            found.append(min(price_s + interpolate(least, hits) for price_s, hits in group.held))
        return found

    def _groups(self, prices: Prices) -> dict[tuple[int, bool], _Group]:
        """For each kind of load, and whether it begins a layer."""
        model = self._question.model
        found: dict[tuple[int, bool], _Group] = {}
        for start, end in model.layers:
            for index in range(start, end):
                key = model.alike[index], index == start
                if key not in found:
                    load = model.loads[index]
                    made = self._of_experts if load.experts else self._of_dense
                    found[key] = made(load, prices, index == start)
        return found

    def _of_dense(self, load: Load, prices: Prices, is_first: bool) -> _Group:
        work = self._question.work
        flops = flops_of(load, work)
        nbytes = read_kv_nbytes(load, work) if load.kind == "attn" else load.nbytes
        room = load.nbytes + kv_nbytes(load, work)
        sides = [self._processor(nbytes, flops, prices)]
        for card in range(len(self._rates.cards)):
            price_s = prices.room[card] * room
            if load.kind != "attn":
                price_s = min(price_s, self._brought_s(card, nbytes, prices))
            sides.append(self._card(card, nbytes, flops, price_s, is_first))
        return _Group(((0.0, tuple(sides)),), ())

    def _of_experts(self, load: Load, prices: Prices, is_first: bool) -> _Group:
        """Cards may share those that they hold in any way."""
        question, work = self._question, self._question.work
        is_decode = work.phase == "decode"
        chosen = expected_distinct(load.experts, load.top_k, work.rows)
        nbytes, flops = load.nbytes * chosen, flops_of(load, work)
        processor = self._processor(nbytes, flops, prices)
        numbers = range(len(self._rates.cards))
        brought = []
        for card in numbers:
            price_s = self._brought_s(card, nbytes, prices)
            side = self._card(card, nbytes, flops, price_s, is_first)
            if is_decode:  # a router chooses last: nothing of it is on its way before
                link_s = nbytes / self._rates.h2d_bytes_per_s[card]
                side = side._replace(whole_s=max(side.whole_s, link_s))
            if not load.is_joined or (load.comes and not is_decode):
                brought.append(side)
        resident = [self._card(card, nbytes, flops, 0.0, is_first) for card in numbers]
        steps = HELD if resident else 0
        sides: list[tuple[float, tuple[_Side, ...]]] = []
        held: list[tuple[float, float]] = []
        for step in range(steps + 1):
            part = step / max(1, steps)
            here = [] if part >= 1.0 else [processor, *brought]
            there = [side._replace(most=part) for side in resident if part]
            sides.append((part, (*here, *there)))
            # Between two steps, as little room as the one and as many hits as the other.
            least = max(0, step - 1) / max(1, steps)
            room_s = least * load.whole_nbytes * min(prices.room, default=0.0)
            held.append((room_s, question.hit_rate(part) if is_decode else part))
        return _Group(tuple(sides), tuple(held))

    def _processor(self, nbytes: float, flops: float, prices: Prices) -> _Side:
        rates, small = self._rates, self._overheads.small_nbytes
        took_s = max(nbytes / rates.cpu_bytes_per_s, flops / rates.cpu_flops)
        fixed_s = rates.cpu_launch_s
        if took_s * rates.cpu_bytes_per_s <= nbytes * (1.0 + SAME):
            fixed_s += small / rates.cpu_bytes_per_s
        return _Side(0, fixed_s, took_s, prices.port * nbytes / self._port)

    def _card(
        self, card: int, nbytes: float, flops: float, price_s: float, is_first: bool
    ) -> _Side:
        its, over = self._rates.cards[card], self._overheads
        launches = over.first_launches if is_first else over.other_launches
        took_s = max(nbytes / its.vram_bytes_per_s, flops / its.flops)
        fixed_s = its.launch_s * launches
        if took_s * its.vram_bytes_per_s <= nbytes * (1.0 + SAME):
            fixed_s += over.small_nbytes / its.vram_bytes_per_s / self._rates.gpu
        return _Side(1 + card, fixed_s, took_s / self._rates.gpu, price_s)

    def _brought_s(self, card: int, nbytes: float, prices: Prices) -> float:
        link_s = nbytes / self._rates.h2d_bytes_per_s[card]
        return prices.link[card] * link_s + prices.port * nbytes / self._port

    @property
    def _port(self) -> float:
        return self._question.machine.dram_bytes_per_s


def _lower_hull(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of points by rising first value, those of the greatest convex line below all of them."""
    return [(at, -value) for at, value in upper_hull([(at, -value) for at, value in points])]


def _near(prices: Prices, worth: Sequence[float], step: float) -> Iterator[Prices]:
    """One price changed."""
    for sign in (-1.0, 1.0):
        if len(worth) > 1:
            room = [p + sign * step * w for p, w in zip(prices.room, worth, strict=True)]
            yield prices._replace(room=tuple(max(0.0, each) for each in room))
            link = [max(0.0, p + sign * step) for p in prices.link]
            yield prices._replace(link=tuple(link))
        for card, its in enumerate(worth):
            room = list(prices.room)
            room[card] = max(0.0, room[card] + sign * step * its)
            link = list(prices.link)
            link[card] = max(0.0, link[card] + sign * step)
            yield prices._replace(room=tuple(room))
            yield prices._replace(link=tuple(link))
        yield prices._replace(port=max(0.0, prices.port + sign * step))


def _divided(offers: Sequence[tuple[float, float, float, float]]) -> float:
    """The least end of a group, prices included. offers: (price, begin, seconds of all, most part).

    Until a given end everyone may do what there is time for, the cheapest first. The best end is
    one at which the cheapest few do all of it, each as much as there is time for.
    """
    if len(offers) == 1:
        price_s, begin_s, whole_s, most = offers[0]
        return price_s + begin_s + whole_s if most >= 1.0 else float("inf")
    ordered = sorted(offers)
    best = float("inf")
    for count in range(1, len(ordered) + 1):
        few = ordered[:count]
        end_s = _end_s(few)
        if end_s < best:
            price_s = sum(
                price * min(most, max(0.0, end_s - begin_s) / whole_s if whole_s else most)
                for price, begin_s, whole_s, most in few
            )
            best = min(best, end_s + price_s)
    return best


def _end_s(few: Sequence[tuple[float, float, float, float]]) -> float:
    """When these can have done all of it together; infinite where they may not."""
    if sum(most for _, _, _, most in few) < 1.0:
        return float("inf")
    events = sorted(
        {begin_s for _, begin_s, _, _ in few}
        | {begin_s + whole_s * most for _, begin_s, whole_s, most in few}
    )

    def done(now_s: float) -> float:
        return sum(
            min(most, (now_s - begin_s) / whole_s) if whole_s else most
            for _, begin_s, whole_s, most in few
            if now_s > begin_s or (now_s == begin_s and not whole_s)
        )

    before_s, before = events[0], done(events[0])
    if before >= 1.0 - SAME:
        return before_s
    for event_s in events[1:]:
        now = done(event_s)
        if now >= 1.0 - SAME:
            return before_s + (event_s - before_s) * min(1.0, (1.0 - before) / (now - before))
        before_s, before = event_s, now
    return before_s  # all but rounding
