"""A plan over cards, processor, RAM and disk played through: the seconds of one step.

The activation is wherever the last group left it; each side that takes part in a group waits until
it has arrived there, which costs a crossing. So boundaries, parallel branches and what is brought
ahead of its use all come out of one recurrence over the groups (ATSInfer prices boundaries one by
one; HeteGen splits one product between both sides).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import NamedTuple

from shadowlane.planner.hardware import CALM, Card, Conditions, Hardware
from shadowlane.planner.hit_rate import expected_distinct
from shadowlane.planner.hybrid import (
    DISK_RING_NBYTES,
    NOTHING,
    HitRate,
    Load,
    Model,
    Plan,
    Site,
    Work,
    rows_of,
    stage_nbytes,
)

LAST_PART = 0.25  # of a side's time that is left when the last of what was brought has come
LEAST_DRAM_PART = 0.1  # of the port that cores get, however much goes through it beside them


@dataclass(frozen=True, slots=True)
class Times:
    """One steady step. `busy_s` counts work only, never waiting."""

    step_s: float
    busy_s: dict[str, float]  # "gpu:0", "cpu:0", "h2d:0", "disk:0"

    @property
    def bottleneck(self) -> str:
        return max(self.busy_s, key=lambda lane: self.busy_s[lane])


class _Price(NamedTuple):
    """One load under one site. Sides: the processor, then each card; 0 seconds: takes no part."""

    sides_s: tuple[float, ...]
    brought_nbytes: tuple[float, ...]  # over each link
    read_nbytes: float  # off the disk
    more_s: float  # what the longest side takes beyond its mean, expected


class _Rates(NamedTuple):
    """A machine under its conditions."""

    cards: tuple[Card, ...]
    gpu: float  # part of each card's rate
    h2d_bytes_per_s: tuple[float, ...]
    d2h_bytes_per_s: tuple[float, ...]
    cpu_bytes_per_s: float
    cpu_flops: float
    cpu_launch_s: float
    disk_bytes_per_s: float


class _Ring:
    """What comes over a link ahead of its use, in order, into room for so many bytes."""

    def __init__(self, room_nbytes: float, total_nbytes: float, total_s: float) -> None:
        """total: of one step. At its start the ring is full, as the step before it left it."""
        self._room = room_nbytes
        self._free_s = -total_s * min(1.0, room_nbytes / total_nbytes) if total_nbytes else 0.0
        self._held: deque[tuple[float, float]] = deque()  # (bytes, when they were used)
        self._nbytes = 0.0

    def arrival_s(
        self, nbytes: float, seconds: float, begin_s: float, not_before_s: float
    ) -> float:
        """When the last of it is there. begin_s: when its use begins, which makes room for more."""
        ahead = min(nbytes, self._room)
        start_s = max(self._free_s, not_before_s)
        while self._held and self._nbytes + ahead > self._room:
            freed, used_s = self._held.popleft()
            self._nbytes -= freed
            start_s = max(start_s, used_s)
        self._free_s = start_s + seconds
        if ahead < nbytes:  # the rest comes while the first is used
            self._free_s = max(self._free_s, begin_s + seconds * (1.0 - ahead / nbytes))
        return self._free_s

    def used(self, nbytes: float, now_s: float) -> None:
        held = min(nbytes, self._room)
        self._held.append((held, now_s))
        self._nbytes += held


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
    or read, a second pass is played at the rate that the first one leaves.
    """
    rates = _Rates(
        cards=machine.cards,
        gpu=state.gpu,
        h2d_bytes_per_s=tuple(card.h2d_bytes_per_s * state.link for card in machine.cards),
        d2h_bytes_per_s=tuple(card.d2h_bytes_per_s * state.link for card in machine.cards),
        cpu_bytes_per_s=machine.cpu_bytes_per_s * state.cpu,
        cpu_flops=machine.cpu_flops * state.cpu,
        cpu_launch_s=machine.cpu_launch_s,
        disk_bytes_per_s=machine.disk_bytes_per_s * state.disk,
    )
    times, moved_nbytes = _pass(model, plan, work, rates, hit_rate, worth_s)
    if moved_nbytes and 0.0 < times.step_s < worth_s:
        left = port_left(machine.dram_bytes_per_s, moved_nbytes / times.step_s)
        if left < rates.cpu_bytes_per_s:
            rates = rates._replace(cpu_bytes_per_s=left)
            times, _ = _pass(model, plan, work, rates, hit_rate, worth_s)
    return times


def beside_cores(brought_nbytes: float, read_nbytes: float) -> float:
    """Bytes that go through the DRAM port beside what the cores read: each is counted once.

    Links read what they bring; the disk writes what it reads, and who computes that reads it then.
    """
    return brought_nbytes + read_nbytes


def port_left(port_bytes_per_s: float, beside_bytes_per_s: float) -> float:
    """What the DRAM port leaves to the cores."""
    return max(port_bytes_per_s - beside_bytes_per_s, port_bytes_per_s * LEAST_DRAM_PART)


def _pass(
    model: Model, plan: Plan, work: Work, rates: _Rates, hit_rate: HitRate, worth_s: float
) -> tuple[Times, float]:
    """(the step, bytes that went through the DRAM port beside what the cores read).

    It ends as soon as the step is sure to take `worth_s`: no group can be shorter than the longest
    of its sides.
    """
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
    # From side to side; from card to card through RAM, with both crossings.
    hops = [[0.0, *to_s]]
    hops += [[from_s[a], *(0.0 if a == b else from_s[a] + to_s[b] for b in cards)] for a in cards]
    known: dict[tuple[object, ...], _Price] = {}  # layers repeat
    prices: list[_Price] = []
    for load, site in zip(model.loads, plan.sites, strict=True):
        key = (
            load.kind,
            load.nbytes,
            load.flops_per_row,
            load.kv_nbytes_per_token,
            load.window,
            site,
        )
        if key not in known:
            known[key] = _price(load, site, work, rates, hit_rate)
        prices.append(known[key])
    brought = [sum(price.brought_nbytes[card] for price in prices) for card in cards]
    read_nbytes = sum(price.read_nbytes for price in prices)
    busy = {"cpu:0": sum(price.sides_s[0] for price in prices)}
    for card in cards:
        busy[f"gpu:{card}"] = sum(price.sides_s[1 + card] for price in prices)
        busy[f"h2d:{card}"] = brought[card] / rates.h2d_bytes_per_s[card]
    busy["disk:0"] = read_nbytes / rates.disk_bytes_per_s
    moved_nbytes = beside_cores(sum(brought), read_nbytes)
    left_s = [max(price.sides_s) for price in prices]
    rest_s = sum(left_s)
    # Steps follow each other: none is shorter than what has to come over a link for each.
    links_s = max([busy["disk:0"], *(busy[f"h2d:{card}"] for card in cards)])
    if max(rest_s, links_s) >= worth_s:
        return Times(max(rest_s, links_s), busy), moved_nbytes

    links = [
        _Ring(stage_nbytes(card), brought[index], busy[f"h2d:{index}"])
        for index, card in enumerate(rates.cards)
    ]
    disk = _Ring(DISK_RING_NBYTES, read_nbytes, busy["disk:0"])
    is_decode = work.phase == "decode"
    ready = list(hops[0])  # when the activation is at each side
    never = float("-inf")
    for load, price, least_s in zip(model.loads, prices, left_s, strict=True):
        begin_s = min(ready)
        if begin_s + rest_s >= worth_s:
            return Times(begin_s + rest_s, busy), moved_nbytes
        rest_s -= least_s
        # A router chooses last: what it chose cannot be on its way before.
        late_s = begin_s if load.experts and is_decode else never
        read_s = never
        if price.read_nbytes:
            seconds = price.read_nbytes / rates.disk_bytes_per_s
            read_s = disk.arrival_s(price.read_nbytes, seconds, begin_s, late_s)
        arrived_s = [never, *(never for _ in cards)]
        if any(price.brought_nbytes):
            for card, nbytes in enumerate(price.brought_nbytes):
                if nbytes:
                    seconds = nbytes / rates.h2d_bytes_per_s[card]
                    arrived_s[1 + card] = links[card].arrival_s(
                        nbytes, seconds, begin_s, max(late_s, read_s)
                    )
        else:
            arrived_s[0] = read_s
        ready = _after(price, ready, hops, arrived_s)
        end_s = min(ready)
        for card, nbytes in enumerate(price.brought_nbytes):
            if nbytes:
                links[card].used(nbytes, end_s)
        if price.read_nbytes:
            disk.used(price.read_nbytes, end_s)
    return Times(max(min(ready), links_s), busy), moved_nbytes


def _after(
    price: _Price,
    ready: list[float],
    hops: Sequence[Sequence[float]],
    arrived_s: Sequence[float],
) -> list[float]:
    """When the output of one load is at each side: where all parts of it have come.

    A side computes what lives there while the rest is on its way; then the last of it is left.
    """
    ends = [
        (side, max(ready[side] + seconds, arrived_s[side] + seconds * LAST_PART))
        for side, seconds in enumerate(price.sides_s)
        if seconds
    ]
    if not ends:
        return ready
    if len(ends) == 1:
        side, end_s = ends[0]
        return [end_s + hop for hop in hops[side]]
    return [
        max(end_s + hops[side][there] for side, end_s in ends) + price.more_s
        for there in range(len(ready))
    ]


def _price(load: Load, site: Site, work: Work, rates: _Rates, hit_rate: HitRate) -> _Price:
    is_decode = work.phase == "decode"
    if load.experts:
        return _price_experts(load, site, work, rates, hit_rate)
    flops = load.flops_per_row * rows_of(load, work)
    nbytes = load.nbytes
    if load.kind == "attn":
        tokens = load.attended(work.context)
        flops *= tokens
        nbytes = load.kv_nbytes_per_token * tokens * (work.sequences if is_decode else 1)
    brought = 0.0 if load.kind == "attn" else (1.0 - site.vram) * site.brought_in(work.phase)
    on_cards = site.vram + brought
    on_disk = 1.0 - site.vram - site.ram if load.nbytes else 0.0
    return _Price(
        _sides(nbytes, flops, on_cards, 1.0 - on_cards, site.over, rates),
        tuple(load.nbytes * brought * part for part in site.over) if rates.cards else (),
        load.nbytes * on_disk if on_disk > NOTHING else 0.0,
        0.0,
    )


def _price_experts(load: Load, site: Site, work: Work, rates: _Rates, hit_rate: HitRate) -> _Price:
    """Chosen experts that are on cards are computed there, the others where the site says.

    One row's experts hit cards in varying number, and the longer of two branches takes longer on
    average than the average branches do: its expectation is taken over the binomial distribution.
    Most rows of a chunk choose everything in the end, favourites or not.
    """
    is_decode = work.phase == "decode"
    chosen = expected_distinct(load.experts, load.top_k, work.rows)
    if is_decode:
        hits = hit_rate(site.vram)
        lost = 1.0 - hit_rate(min(1.0, site.vram + site.ram))
    else:
        hits, lost = site.vram, 1.0 - min(1.0, site.vram + site.ram)
    flops = load.flops_per_row * work.rows / chosen  # for the rows of one chosen expert
    part_brought = site.brought_in(work.phase)

    def branches(on_cards: float) -> tuple[float, ...]:
        missing = chosen - on_cards
        there, here = on_cards + missing * part_brought, missing * (1.0 - part_brought)
        return _sides(load.nbytes, flops, there, here, site.over, rates)

    sides_s = branches(chosen * hits)
    more_s = 0.0
    if is_decode and work.rows == 1 and 0.0 < hits < 1.0:
        more_s = -max(sides_s) + sum(
            comb(load.top_k, count)
            * hits**count
            * (1.0 - hits) ** (load.top_k - count)
            * max(branches(count))
            for count in range(load.top_k + 1)
        )
    brought = load.nbytes * chosen * (1.0 - hits) * part_brought
    return _Price(
        sides_s,
        tuple(brought * part for part in site.over) if rates.cards else (),
        load.nbytes * chosen * max(0.0, lost),
        max(0.0, more_s),
    )


def _sides(
    nbytes: float,
    flops: float,
    on_cards: float,
    on_cpu: float,
    over: Sequence[float],
    rates: _Rates,
) -> tuple[float, ...]:
    """Seconds of the processor and of each card for parts (or numbers) of one thing."""
    here_s = _on_cpu(nbytes * on_cpu, flops * on_cpu, rates) if on_cpu > NOTHING else 0.0
    return (
        here_s,
        *(
            _on_card(nbytes * on_cards * part, flops * on_cards * part, card, rates)
            for card, part in zip(rates.cards, over, strict=bool(rates.cards))
        ),
    )


def _on_card(nbytes: float, flops: float, card: Card, rates: _Rates) -> float:
    """No bytes and no operations: the card takes no part, and nothing is launched."""
    if nbytes <= 0.0 and flops <= 0.0:
        return 0.0
    return max(nbytes / card.vram_bytes_per_s, flops / card.flops) / rates.gpu + card.launch_s


def _on_cpu(nbytes: float, flops: float, rates: _Rates) -> float:
    if nbytes <= 0.0 and flops <= 0.0:
        return 0.0
    return max(nbytes / rates.cpu_bytes_per_s, flops / rates.cpu_flops) + rates.cpu_launch_s
