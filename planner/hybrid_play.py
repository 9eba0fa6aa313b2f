"""A plan over cards, processor, RAM and disk played through: the seconds of one step.

The activation is wherever the last group left it; each side that takes part in a group waits until
it has arrived there, which costs a crossing. So boundaries, parallel branches and what is brought
ahead of its use all come out of one recurrence over the groups (ATSInfer prices boundaries one by
one; HeteGen splits one product between both sides).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shadowlane.planner.hardware import CALM, Conditions, Hardware
from shadowlane.planner.hybrid import (
    HitRate,
    Load,
    Model,
    Plan,
    Site,
    Work,
    chooser,
    disk_ring_nbytes,
    rows_at_once,
    stage_nbytes,
)
from shadowlane.planner.hybrid_price import Price, Rates, price_of

LAST_PART = 0.25  # of a side's time that is left when the last of what was brought has come
SAME = 1e-9  # of a layer's time: less is rounding
GUESSES, PASSES = 4, 3  # at the rate that the DRAM port leaves to the cores
CLOSE = 0.005  # of a step's time, by which a guess may be off
LEAST_DRAM_PART = 0.1  # of the port that cores get, however much goes through it beside them


@dataclass(frozen=True, slots=True)
class Times:
    """One steady step. `busy_s` counts work only, never waiting."""

    step_s: float
    busy_s: dict[str, float]  # "gpu:0", "cpu:0", "h2d:0", "disk:0"

    @property
    def bottleneck(self) -> str:
        return max(self.busy_s, key=lambda lane: self.busy_s[lane])

    def busy_of(self, *kinds: str) -> float:
        """Seconds of work of all lanes, or of all of these kinds: "gpu", "cpu", "h2d", "disk"."""
        lanes = self.busy_s.items()
        return sum(s for lane, s in lanes if not kinds or lane.partition(":")[0] in kinds)


class _Ring:
    """What comes over a link ahead of its use, in order, into room for so many bytes."""

    def __init__(self, room_nbytes: float, total_nbytes: float, total_s: float) -> None:
        """total: of one step. At its start the ring is full, as the step before it left it."""
        self._room = room_nbytes
        self.free_s = -total_s * min(1.0, room_nbytes / total_nbytes) if total_nbytes else 0.0
        self.held: deque[tuple[float, float]] = deque()  # (bytes, when they were used)
        self._nbytes = 0.0

    def arrival_s(
        self, nbytes: float, seconds: float, begin_s: float, not_before_s: float
    ) -> float:
        """When the last of it is there. begin_s: when its use begins, which makes room for more."""
        ahead = min(nbytes, self._room)
        start_s = max(self.free_s, not_before_s)
        while self.held and self._nbytes + ahead > self._room:
            freed, used_s = self.held.popleft()
            self._nbytes -= freed
            start_s = max(start_s, used_s)
        self.free_s = start_s + seconds
        if ahead < nbytes:  # the rest comes while the first is used
            self.free_s = max(self.free_s, begin_s + seconds * (1.0 - ahead / nbytes))
        return self.free_s

    def used(self, nbytes: float, now_s: float) -> None:
        held = min(nbytes, self._room)
        self.held.append((held, now_s))
        self._nbytes += held

    def skip(self, seconds: float) -> None:
        """So much later, the same."""
        self.free_s += seconds
        self.held = deque((nbytes, used_s + seconds) for nbytes, used_s in self.held)


def play(
    model: Model,
    plan: Plan,
    work: Work,
    machine: Hardware,
    state: Conditions = CALM,
    hit_rate: HitRate = lambda part: part,
    worth_s: float = float("inf"),
) -> Times:
    """Seconds of one steady step of `plan`; at least that if it takes `worth_s` or more anyway.

    What the cores read competes with links and disk for the DRAM port: where anything is brought
    or read, another pass is played at the rate that is left to them.
    """
    rates = rates_of(machine, state)
    if plan.micro_batches > 1 and work.phase == "prefill":
        return _pipelined(model, plan, work, rates, hit_rate)
    ring_nbytes = disk_ring_nbytes(model, machine, state)
    times, moved_nbytes = _pass(model, plan, work, rates, hit_rate, worth_s, ring_nbytes)
    if not moved_nbytes:
        return times
    port, alone = machine.dram_bytes_per_s, rates.cpu_bytes_per_s
    if port_left(port, moved_nbytes / times.step_s) >= alone:
        return times
    # How much goes through the port in a second depends on how long the step takes in the end.
    expected_s, cores_s = times.step_s, times.busy_s["cpu:0"]
    for _ in range(GUESSES):
        left = port_left(port, moved_nbytes / expected_s)
        expected_s = times.step_s + cores_s * max(0.0, alone / left - 1.0)
    for _ in range(PASSES):
        if times.step_s >= worth_s:
            break
        left = min(alone, port_left(port, moved_nbytes / expected_s))
        slower = rates._replace(cpu_bytes_per_s=left)
        times, _ = _pass(model, plan, work, slower, hit_rate, worth_s, ring_nbytes)
        if abs(times.step_s / expected_s - 1.0) <= CLOSE:
            break
        expected_s = times.step_s
    return times


def rates_of(machine: Hardware, state: Conditions) -> Rates:
    return Rates(
        cards=machine.cards,
        gpu=state.gpu,
        h2d_bytes_per_s=tuple(card.h2d_bytes_per_s * state.link for card in machine.cards),
        d2h_bytes_per_s=tuple(card.d2h_bytes_per_s * state.link for card in machine.cards),
        cpu_bytes_per_s=machine.cpu_bytes_per_s * state.cpu,
        cpu_flops=machine.cpu_flops * state.cpu,
        cpu_launch_s=machine.cpu_launch_s,
        disk_bytes_per_s=machine.disk_bytes_per_s * state.disk,
    )


def hops_between(model: Model, work: Work, rates: Rates) -> list[list[float]]:
    """Seconds from side to side; from card to card through RAM, with both crossings."""
    cards = range(len(rates.cards))
    row_nbytes = model.row_nbytes * work.rows
    to_s = [
        card.crossing_s + row_nbytes / rate
        for card, rate in zip(rates.cards, rates.h2d_bytes_per_s, strict=True)
    ]
    from_s = [
        card.crossing_s + row_nbytes / rate
        for card, rate in zip(rates.cards, rates.d2h_bytes_per_s, strict=True)
    ]
    hops = [[0.0, *to_s]]
    hops += [[from_s[a], *(0.0 if a == b else from_s[a] + to_s[b] for b in cards)] for a in cards]
    return hops


def beside_cores(brought_nbytes: float, read_nbytes: float) -> float:
    """Bytes that go through the DRAM port beside what the cores read: each is counted once.

    Links read what they bring; the disk writes what it reads, and who computes that reads it then.
    """
    return brought_nbytes + read_nbytes


def port_left(port_bytes_per_s: float, beside_bytes_per_s: float) -> float:
    """What the DRAM port leaves to the cores."""
    return max(port_bytes_per_s - beside_bytes_per_s, port_bytes_per_s * LEAST_DRAM_PART)


def work_by_kind(
    model: Model,
    plan: Plan,
    work: Work,
    machine: Hardware,
    state: Conditions,
    hit_rate: HitRate,
) -> dict[str, dict[str, tuple[int, float]]]:
    """By lane and kind, the groups that a lane has a part in, and their seconds without launches.

    As if no link or disk took anything from the cores.
    """
    cards = tuple(replace(card, launch_s=0.0) for card in machine.cards)
    rates = rates_of(replace(machine, cards=cards, cpu_launch_s=0.0), state)
    order, prices = _priced(model, plan, work, rates, hit_rate)
    lanes = ["cpu:0", *(f"gpu:{card}" for card in range(len(cards)))]
    found: dict[str, dict[str, tuple[int, float]]] = {lane: {} for lane in lanes}
    for load, number in zip(model.loads, order, strict=True):
        for lane, took in zip(lanes, prices[number].sides_s, strict=True):
            if took:
                count, seconds = found[lane].get(load.kind, (0, 0.0))
                found[lane][load.kind] = count + 1, seconds + took
    return found


def _pipelined(model: Model, plan: Plan, work: Work, rates: Rates, hit_rate: HitRate) -> Times:
    """A step in micro-batches, which brings and reads nothing.

    A lane takes a micro-batch when it has done its last group of the one before: each is later than
    the one before it by as long as the slowest lane has to do with one, its waits included. Of the
    head only the last row of all is wanted.
    """
    count = plan.micro_batches
    one = replace(work, rows=rows_at_once(plan, work))
    order, prices = _priced(model, plan, one, rates, hit_rate)
    assert not any(price.is_carried for price in prices), "what is carried comes once for a step"
    hops = hops_between(model, one, rates)
    ready = list(hops[0])
    lanes = range(len(ready))
    begun_s, ended_s, busy_s = ([0.0] * len(ready) for _ in range(3))
    later_s = 0.0  # the last micro-batch than the first, once the head is reached
    for load, number in zip(model.loads, order, strict=True):
        if load.kind == "lm_head":
            later_s, busy_s = _all_of(count, begun_s, ended_s, busy_s)
            count = 1
        price = prices[number]
        ends = [(side, ready[side] + took) for side, took in enumerate(price.sides_s) if took]
        if not ends:
            continue
        for side, end_s in ends:
            begun_s[side] = begun_s[side] if busy_s[side] else ready[side]
            busy_s[side] += price.sides_s[side]
            ended_s[side] = end_s
        if load.is_joined:
            here = price.adds_up
            joined_s = max(end_s + hops[side][here] for side, end_s in ends) + price.more_s
            ended_s[here] = joined_s
            ends = [(here, joined_s)]
        ready = [max(end_s + hops[side][there] for side, end_s in ends) for there in lanes]
    if count > 1:
        later_s, busy_s = _all_of(count, begun_s, ended_s, busy_s)
    names = ["cpu:0", *(f"gpu:{card}" for card in lanes[:-1])]
    busy = dict(zip(names, busy_s, strict=True))
    busy |= {f"h2d:{card}": 0.0 for card in lanes[:-1]} | {"disk:0": 0.0}
    return Times(min(ready) + later_s, busy)


def _all_of(
    count: int, begun_s: Sequence[float], ended_s: Sequence[float], busy_s: Sequence[float]
) -> tuple[float, list[float]]:
    """(how much later the last of so many is than the first; seconds of work of all)."""
    apart_s = max(end - begin for begin, end in zip(begun_s, ended_s, strict=True))
    return (count - 1) * apart_s, [count * seconds for seconds in busy_s]


def _pass(
    model: Model,
    plan: Plan,
    work: Work,
    rates: Rates,
    hit_rate: HitRate,
    worth_s: float,
    ring_nbytes: float,
) -> tuple[Times, float]:
    """(the step, bytes that went through the DRAM port beside what the cores read).

    It ends as soon as the step is sure to take `worth_s`: no group can be shorter than the longest
    of its sides.
    """
    cards = range(len(rates.cards))
    order, prices = _priced(model, plan, work, rates, hit_rate)
    counts = [0] * len(prices)
    for number in order:
        counts[number] += 1
    counted = list(zip(counts, prices, strict=True))
    brought = [
        sum(count * price.brought_nbytes[card] for count, price in counted) for card in cards
    ]
    read_nbytes = sum(count * price.read_nbytes for count, price in counted)
    busy = {"cpu:0": sum(count * price.sides_s[0] for count, price in counted)}
    for card in cards:
        busy[f"gpu:{card}"] = sum(count * price.sides_s[1 + card] for count, price in counted)
        busy[f"h2d:{card}"] = brought[card] / rates.h2d_bytes_per_s[card]
    busy["disk:0"] = read_nbytes / rates.disk_bytes_per_s
    moved_nbytes = beside_cores(sum(brought), read_nbytes)
    rest_s = sum(count * max(price.sides_s) for count, price in counted)
    # Steps follow each other: none is shorter than what has to come over a link for each.
    links_s = max([busy["disk:0"], *(busy[f"h2d:{card}"] for card in cards)])
    if max(rest_s, links_s) >= worth_s:
        return Times(max(rest_s, links_s), busy), moved_nbytes
    step = _Step(model, work, rates)
    step.links = [
        _Ring(stage_nbytes(rates.cards[card]), brought[card], busy[f"h2d:{card}"]) for card in cards
    ]
    step.disk = _Ring(ring_nbytes, read_nbytes, busy["disk:0"])
    end_s = step.play(order, prices, rest_s, worth_s)
    return Times(max(end_s, links_s), busy), moved_nbytes


def _priced(
    model: Model, plan: Plan, work: Work, rates: Rates, hit_rate: HitRate
) -> tuple[list[int], list[Price]]:
    """(per load, the number of its price; prices): layers repeat."""
    by_identity: dict[tuple[int, int, int], int] = {}  # plans share sites, slow to compare
    by_value: dict[tuple[int, Site, int], int] = {}
    prices: list[Price] = []
    order: list[int] = []
    for load, kind, site in zip(model.loads, model.alike, plan.sites, strict=True):
        adds_up = chooser(model, plan.sites, len(order)) if load.is_joined else 0
        number = by_identity.get((kind, id(site), adds_up))
        if number is None:
            number = by_value.get((kind, site, adds_up))
            if number is None:
                number = by_value[kind, site, adds_up] = len(prices)
                prices.append(price_of(load, site, work, rates, hit_rate, adds_up))
            by_identity[kind, id(site), adds_up] = number
        order.append(number)
    return order, prices


class _Step:
    """One step, layer after layer.

    Where like layers follow each other and a layer leaves everything as the one before it did, only
    later, the rest of them are not played: they would do the same.
    """

    links: list[_Ring]
    disk: _Ring

    def __init__(self, model: Model, work: Work, rates: Rates) -> None:
        self._model, self._rates = model, rates
        self._is_decode = work.phase == "decode"
        self._hops = hops_between(model, work, rates)
        self._ready = list(self._hops[0])  # when the activation is at each side

    def play(
        self, order: Sequence[int], prices: Sequence[Price], rest_s: float, worth_s: float
    ) -> float:
        """When the last group ends; at least `worth_s` if that is sure. rest_s: of all groups."""
        layers = self._model.layers
        least_s = [max(price.sides_s) for price in prices]
        hops = self._hops
        # (side, seconds), where one side does all of it and nothing is carried: most groups
        alone = [_alone(price) for price in prices]
        place = like = 0  # like: layers in a row that are as the one before
        before: Sequence[int] = ()
        shifts: list[float] = []  # by how much like layers moved everything, one after the other
        while place < len(layers):
            start, end = layers[place]
            layer = order[start:end]
            like = like + 1 if layer == before else 0
            before = layer
            was = self._clocks(layer, prices) if like else []
            for index, number in enumerate(layer, start):
                begin_s = min(self._ready)
                if begin_s + rest_s >= worth_s:
                    return begin_s + rest_s
                rest_s -= least_s[number]
                one = alone[number]
                if one is None:
                    self._group(index, prices[number], begin_s)
                else:
                    end_s = self._ready[one[0]] + one[1]
                    self._ready = [end_s + hop for hop in hops[one[0]]]
            place += 1
            if not like:
                shifts = []
                continue
            shift = _shift(was, self._clocks(layer, prices))
            if shift is None or (shifts and abs(shift - shifts[-1]) > SAME * shift):
                shifts = []
            if shift is not None:
                shifts.append(shift)
            if shift and len(shifts) > self._layers_held(layer, prices):
                more = place
                while more < len(layers) and order[slice(*layers[more])] == layer:
                    more += 1
                if more > place:
                    self._skip((more - place) * shift, layer, prices)
                    rest_s -= (more - place) * sum(least_s[number] for number in layer)
                    place = more
        return min(self._ready)

    def _group(self, index: int, price: Price, begin_s: float) -> None:
        load = self._model.loads[index]
        ready, hops = self._ready, self._hops
        is_carried = price.is_carried
        if is_carried:
            ends = self._arriving(load, price, begin_s)
        else:
            ends = [(side, ready[side] + took) for side, took in enumerate(price.sides_s) if took]
        if not ends:
            return
        if load.is_joined:
            here = price.adds_up
            joined_s = max([end_s + hops[side][here] for side, end_s in ends]) + price.more_s
            self._ready = [joined_s + hop for hop in hops[here]]
        elif len(ends) == 1:
            side, end_s = ends[0]
            self._ready = [end_s + hop for hop in hops[side]]
        else:
            self._ready = [
                max([end_s + hops[side][there] for side, end_s in ends]) + price.more_s
                for there in range(len(ready))
            ]
        if is_carried:
            done_s = min(self._ready)
            for link, nbytes in zip(self.links, price.brought_nbytes, strict=True):
                if nbytes:
                    link.used(nbytes, done_s)
            if price.read_nbytes:
                self.disk.used(price.read_nbytes, done_s)

    def _arriving(self, load: Load, price: Price, begin_s: float) -> list[tuple[int, float]]:
        """(side, when its part ends) of a group that is brought or read, or a part of it.

        A side computes what lives there while the rest is on its way; then the last of it is left.
        """
        rates = self._rates
        never = float("-inf")
        # A router chooses last: what it chose cannot be on its way before.
        late_s = begin_s if load.experts and self._is_decode else never
        read_s, read_took = never, 0.0
        ahead_nbytes = price.read_nbytes - price.asked_nbytes
        if ahead_nbytes > 0.0:
            read_took = ahead_nbytes / rates.disk_bytes_per_s
            read_s = self.disk.arrival_s(ahead_nbytes, read_took, begin_s, late_s)
        here_s = never if load.is_joined and not self._is_decode else read_s
        arrived_s = [here_s, *(never for _ in price.brought_nbytes)]
        for card, nbytes in enumerate(price.brought_nbytes):
            if nbytes:
                took = nbytes / rates.h2d_bytes_per_s[card]
                # Piece by piece behind the disk: the link begins and ends no sooner than it. What
                # is in RAM is brought first, and where that is all there is nothing to wait for.
                behind_s = read_s - min(took, read_took) if price.is_read_first else never
                arrived_s[1 + card] = self.links[card].arrival_s(
                    nbytes, took, begin_s, max(late_s, behind_s)
                )
        if price.asked_nbytes:
            took = price.asked_nbytes / rates.disk_bytes_per_s
            arrived_s[0] = self.disk.arrival_s(price.asked_nbytes, took, begin_s, begin_s)
        return [
            (side, max(self._ready[side] + took, arrived_s[side] + took * LAST_PART))
            for side, took in enumerate(price.sides_s)
            if took
        ]

    # -- like layers

    def _rings(self, layer: Sequence[int], prices: Sequence[Price]) -> list[tuple[_Ring, int]]:
        """Links and disk that such a layer uses, and how often."""
        used = [
            (link, sum(prices[number].brought_nbytes[card] > 0.0 for number in layer))
            for card, link in enumerate(self.links)
        ]
        used.append((self.disk, sum(prices[number].read_nbytes > 0.0 for number in layer)))
        return [(ring, times) for ring, times in used if times]

    def _clocks(self, layer: Sequence[int], prices: Sequence[Price]) -> list[float]:
        return [*self._ready, *(ring.free_s for ring, _ in self._rings(layer, prices))]

    def _layers_held(self, layer: Sequence[int], prices: Sequence[Price]) -> int:
        """So many of the newest layers have something in the rings."""
        rings = self._rings(layer, prices)
        return max([1, *(1 + len(ring.held) // times for ring, times in rings)])

    def _skip(self, seconds: float, layer: Sequence[int], prices: Sequence[Price]) -> None:
        self._ready = [each + seconds for each in self._ready]
        for ring, _ in self._rings(layer, prices):
            ring.skip(seconds)


def _alone(price: Price) -> tuple[int, float] | None:
    """The one side that does all of a group, and its seconds; None: there is more to it."""
    sides = [(side, took) for side, took in enumerate(price.sides_s) if took]
    if len(sides) != 1 or price.is_carried or price.more_s:
        return None
    return sides[0]


def _shift(before: Sequence[float], after: Sequence[float]) -> float | None:
    """By how much all are later, if all are by the same."""
    changes = [new - old for old, new in zip(before, after, strict=True)]
    least, most = min(changes), max(changes)
    return most if most - least <= SAME * most else None
