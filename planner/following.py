"""Which experts live on cards, as what routers choose shifts: as many of each layer, but others.

Who is hot is known from earlier runs, and that changes with what is written about. So the choices
of this run are counted, and beside the set that is on cards a *ghost* is kept, which follows them.
Both are scored on choices that neither has seen: what the ghost would have won is then measured,
not promised by the counts that it was made of. Whether that is worth its moves is for others to
say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shadowlane.planner.brought_experts import dealt
from shadowlane.planner.catalog import Catalog, Experts
from shadowlane.planner.hit_rate import curve_of, interpolate

Layers = tuple[tuple[int, ...], ...]  # of one card: by layer, its experts
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FollowingSettings:
    half_life: float = 64.0  # visits of a layer after which a choice counts half
    believed: float = 32.0  # visits that what earlier runs chose counts as
    window: float = 64.0  # visits after which a hit counts half, of both sets
    least_visits: float = 48.0  # scored, before a set may be proposed
    margin: float = 0.25  # by how much hotter an expert must be to take another's place


@dataclass(frozen=True, slots=True)
class Proposal:
    """What cards would hold, and how often choices would have found their expert there."""

    cards: tuple[Layers, ...]
    hits: float  # lately, of that set
    hits_now: float  # of the one in force
    num_moved: int  # experts that are not on any card now, or on another


class Following:
    """See the module. `note` what was chosen; `held` once cards hold something else."""

    def __init__(
        self,
        experts: Experts,
        cards: Sequence[Layers],
        settings: FollowingSettings | None = None,
    ) -> None:
        """cards: for each, by layer, the experts that live there."""
        self.settings = settings or FollowingSettings()
        self._shape = (experts.num_layers, experts.per_layer)
        self._heat = self.settings.believed * _expected(experts)
        self.is_exchanged = False  # a proposal has been taken up
        self.held(cards)

    def held(self, cards: Sequence[Layers]) -> None:
        """From now on cards hold these: the ghost begins as they are."""
        self._cards = tuple(cards)
        self._counts = [
            [len(layers[layer]) if layers else 0 for layers in cards]
            for layer in range(self._shape[0])
        ]
        self._is_held = np.zeros(self._shape, np.bool_)
        for layers in cards:
            for layer, experts in enumerate(layers):
                self._is_held[layer, list(experts)] = True
        self._ghost = self._is_held.copy()
        self._hits = self._ghost_hits = self._choices = 0.0
        self._scored = 0.0

    def note(self, visits: float, counts: Floats) -> None:
        """What the newest steps chose. counts: [layers, experts], in `visits` visits of a layer."""
        if visits <= 0:
            return
        kept = 0.5 ** (visits / self.settings.window)
        self._choices = kept * self._choices + float(counts.sum())
        self._hits = kept * self._hits + float(counts[self._is_held].sum())
        self._ghost_hits = kept * self._ghost_hits + float(counts[self._ghost].sum())
        self._scored = kept * self._scored + visits
        forgets = 0.5 ** (visits / self.settings.half_life)
        self._heat = forgets * self._heat + counts
        self._follow()

    def _follow(self) -> None:
        """The coldest of the ghost give way to the hottest beside it, pair by pair."""
        rates = self._heat
        for layer in range(self._shape[0]):
            there = np.flatnonzero(self._ghost[layer])
            others = np.flatnonzero(~self._ghost[layer])
            cold = there[np.argsort(rates[layer, there], kind="stable")]
            hot = others[np.argsort(-rates[layer, others], kind="stable")]
            mean = rates[layer].mean()
            for old, new in zip(cold.tolist(), hot.tolist(), strict=False):
                more = rates[layer, new] - rates[layer, old]
                if more <= self.settings.margin * max(mean, rates[layer, old]):
                    break
                self._ghost[layer, old], self._ghost[layer, new] = False, True

    def proposal(self) -> Proposal | None:
        """None: too little was seen, or the ghost holds what cards hold, or hits no more often."""
        if self._scored < self.settings.least_visits or not self._choices:
            return None
        num_moved = int((self._ghost & ~self._is_held).sum())
        hits, now = self._ghost_hits / self._choices, self._hits / self._choices
        if not num_moved or hits <= now:
            return None
        return Proposal(self._dealt(), hits, now, num_moved)

    def ranked(self, catalog: Catalog) -> Catalog:
        """The same model for other plans: what cards hold first, then the hottest of this run.

        As it was as long as nothing has been exchanged. Where a plan wants as many of a layer as
        there are on the cards, `dealt` leaves each where it is.
        """
        if not self.is_exchanged or catalog.experts is None:
            return catalog
        ranks = []
        for layer in range(self._shape[0]):
            heat = self._heat[layer]
            own = [_by_heat(layers[layer] if layers else (), heat) for layers in self._cards]
            others = np.flatnonzero(~self._is_held[layer])
            ranks.append((*_in_turns(own), *_by_heat(others, heat)))
        return replace(catalog, experts=replace(catalog.experts, ranks=tuple(ranks)))

    def _dealt(self) -> tuple[Layers, ...]:
        """The ghost's experts to cards: who stays on a card, stays on that; hot ones and cold."""
        found: list[tuple[tuple[int, ...], ...]] = []
        for layer in range(self._shape[0]):
            own = [
                tuple(each for each in layers[layer] if self._ghost[layer, each]) if layers else ()
                for layers in self._cards
            ]
            come = np.flatnonzero(self._ghost[layer] & ~self._is_held[layer])
            missing = [
                count - len(each) for count, each in zip(self._counts[layer], own, strict=True)
            ]
            new = dealt(_by_heat(come, self._heat[layer]), missing)
            found.append(tuple(old + more for old, more in zip(own, new, strict=True)))
        by_card = list(zip(*found, strict=True))
        return tuple(tuple(layers) if any(layers) else () for layers in by_card)


def _by_heat(experts: Iterable[int], heat: Floats) -> list[int]:
    found = np.array(list(experts), np.intp)
    return [int(each) for each in found[np.argsort(-heat[found], kind="stable")]]


def _in_turns(own: Sequence[Sequence[int]]) -> list[int]:
    """The experts of all cards in the order in which `dealt` would deal them out to these."""
    counts = list(map(len, own))
    holders = dealt(range(sum(counts)), counts)
    order = [0] * sum(counts)
    for places, experts in zip(holders, own, strict=True):
        for place, expert in zip(places, experts, strict=True):
            order[place] = expert
    return order


def _expected(experts: Experts) -> Floats:
    """[layers, experts] how often a visit chooses each, from what is known of earlier runs."""
    shape = (experts.num_layers, experts.per_layer)
    if not experts.ranks:
        return np.full(shape, experts.top_k / experts.per_layer)
    points = curve_of(experts).points
    taken = [interpolate(points, rank / experts.per_layer) for rank in range(experts.per_layer + 1)]
    by_rank = np.diff(taken) * experts.top_k
    found = np.zeros(shape)
    for layer in range(experts.num_layers):
        found[layer, list(experts.ranked(layer))] = by_rank
    return found
