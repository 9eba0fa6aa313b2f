"""What one group costs where a plan has it: seconds of each side, bytes of links and disk."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import NamedTuple

from shadowlane.planner.hardware import Card
from shadowlane.planner.hit_rate import expected_distinct
from shadowlane.planner.hybrid import NOTHING, HitRate, Load, Site, Work, flops_of, read_kv_nbytes


class Price(NamedTuple):
    """One load under one site. Sides: the processor, then each card; 0 seconds: takes no part."""

    sides_s: tuple[float, ...]
    brought_nbytes: tuple[float, ...]  # over each link
    read_nbytes: float  # off the disk
    uneven_s: float = 0.0  # what the longest side takes beyond its mean, expected
    told_s: float = 0.0  # the choice on its way to the host, and work from it
    adds_up: int = 0  # the side that adds up what all sides give, where one does
    is_read_first: bool = False  # of what is brought, some comes off the disk
    # of what is read, what the processor computes of a prompt's experts: once they are chosen
    asked_nbytes: float = 0.0

    @property
    def more_s(self) -> float:
        """What all of it takes beyond the longest of its sides."""
        return self.uneven_s + self.told_s

    @property
    def is_carried(self) -> bool:
        """Whether anything of it comes over a link or off the disk."""
        return self.read_nbytes > 0.0 or any(self.brought_nbytes)


class Rates(NamedTuple):
    """A machine under its conditions."""

    cards: tuple[Card, ...]
    gpu: float  # part of each card's rate
    h2d_bytes_per_s: tuple[float, ...]
    d2h_bytes_per_s: tuple[float, ...]
    cpu_bytes_per_s: float
    cpu_flops: float
    cpu_launch_s: float
    disk_bytes_per_s: float


def price_of(
    load: Load, site: Site, work: Work, rates: Rates, hit_rate: HitRate, adds_up: int = 0
) -> Price:
    """adds_up: of experts, `chooser`."""
    if load.experts:
        return _price_experts(load, site, work, rates, hit_rate, adds_up)
    is_attn = load.kind == "attn"
    nbytes = read_kv_nbytes(load, work) if is_attn else load.nbytes
    flops = flops_of(load, work)
    brought = 0.0 if is_attn else (1.0 - site.vram) * site.brought_in(work.phase)
    on_cards = site.vram + brought
    on_disk = 1.0 - site.vram - site.ram if load.nbytes else 0.0
    return Price(
        _sides(nbytes, flops, on_cards, 1.0 - on_cards, site.over, rates),
        tuple(load.nbytes * brought * part for part in site.over) if rates.cards else (),
        load.nbytes * on_disk if on_disk > NOTHING else 0.0,
        is_read_first=brought > site.ram + NOTHING,
    )


def _price_experts(
    load: Load, site: Site, work: Work, rates: Rates, hit_rate: HitRate, adds_up: int
) -> Price:
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
    flops = flops_of(load, work) / chosen  # for the rows of one chosen expert
    part_brought = site.brought_in(work.phase)

    def branches(on_cards: float) -> tuple[float, ...]:
        missing = chosen - on_cards
        there, here = on_cards + missing * part_brought, missing * (1.0 - part_brought)
        sides_s = _sides(load.nbytes, flops, there, here, site.over, rates)
        if load.is_joined and (adds_up or site.vram + part_brought > 0.0):  # even if no more
            least_s = rates.cards[adds_up - 1].launch_s if adds_up else rates.cpu_launch_s
            least_s = max(sides_s[adds_up], least_s)
            sides_s = (*sides_s[:adds_up], least_s, *sides_s[adds_up + 1 :])
        return sides_s

    sides_s = branches(chosen * hits)
    uneven_s = told_s = 0.0
    if is_decode and work.rows == 1 and 0.0 < hits < 1.0:
        longest_s = sum(
            comb(load.top_k, count)
            * hits**count
            * (1.0 - hits) ** (load.top_k - count)
            * max(branches(count))
            for count in range(load.top_k + 1)
        )
        uneven_s = max(0.0, longest_s - max(sides_s))
    if load.is_told and not is_decode and adds_up and any(sides_s[1:]):
        told_s = 2.0 * rates.cards[adds_up - 1].crossing_s
    come = load.experts if load.comes else chosen  # some before anybody has chosen
    brought = load.nbytes * come * (1.0 - hits) * part_brought
    asked = 0.0
    if load.is_joined and not is_decode:  # links take what RAM has not, as far as they take any
        asked = load.nbytes * chosen * max(0.0, lost - (1.0 - hits) * part_brought)
    lost_nbytes = load.nbytes * chosen * max(0.0, lost)
    if load.comes and not is_decode:  # what is read to be brought is read before it is chosen
        ahead = min(max(0.0, lost), (1.0 - hits) * part_brought)
        lost_nbytes += load.nbytes * (come - chosen) * ahead
    is_read_first = (1.0 - site.vram) * part_brought > site.ram + NOTHING
    if load.is_joined and not is_decode:
        is_read_first = asked < lost_nbytes
    return Price(
        sides_s,
        tuple(brought * part for part in site.over) if rates.cards else (),
        lost_nbytes,
        uneven_s,
        told_s,
        adds_up,
        is_read_first,
        asked,
    )


def _sides(
    nbytes: float,
    flops: float,
    on_cards: float,
    on_cpu: float,
    over: Sequence[float],
    rates: Rates,
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


def _on_card(nbytes: float, flops: float, card: Card, rates: Rates) -> float:
    """No bytes and no operations: the card takes no part, and nothing is launched."""
    if nbytes <= 0.0 and flops <= 0.0:
        return 0.0
    return max(nbytes / card.vram_bytes_per_s, flops / card.flops) / rates.gpu + card.launch_s


def _on_cpu(nbytes: float, flops: float, rates: Rates) -> float:
    if nbytes <= 0.0 and flops <= 0.0:
        return 0.0
    return max(nbytes / rates.cpu_bytes_per_s, flops / rates.cpu_flops) + rates.cpu_launch_s
