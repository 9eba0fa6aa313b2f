"""Which routed experts come to cards for prompts, from where, and in which order.

Those that have a slot in RAM come out of it. The others the disk reads into a ring, out of which
links take them: so the disk works ahead of routers as links do, and neither stops for long.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shadowlane.planner.catalog import Catalog


class Brought(NamedTuple):
    """Experts of one layer, in the order in which they come."""

    order: tuple[int, ...]
    read: frozenset[int]  # of these, those that come off the disk


@dataclass(frozen=True, slots=True)
class Sources:
    """What RAM keeps for links.

    most: experts that can keep their slots while others are read there; None: as many as there are.
    may_stay: those that have a slot, by their numbers; None: any may. reads: the disk reads those
    that have none for links; else they do not come.
    """

    catalog: Catalog
    most: int | None = None
    may_stay: Collection[int] | None = None
    reads: bool = False

    def may_come(self, layer: int, on_cards: int) -> list[int]:
        """Of the experts of a layer on no card those that may come to one, the hottest first."""
        others = self._others(layer, on_cards)
        return list(others) if self.reads else [each for each in others if self._stays(layer, each)]

    def come(self, layer: int, on_cards: int, count: int, off_cards: int) -> Brought:
        """So many of a layer.

        Where the disk reads, these are the coldest: what is left to the processor is in RAM as far
        as there is room. off_cards: experts of all layers on no card, who share the slots.
        """
        if not self.reads or self.most is None:
            return Brought(tuple(self.may_come(layer, on_cards)[:count]), frozenset())
        others = self._others(layer, on_cards)
        slots = self.most * len(others) // max(1, off_cards)
        read = max(0, min(count, len(others) - slots))
        hot = [each for each in others if self._stays(layer, each)][: count - read]
        kept = frozenset(hot)
        cold = [each for each in reversed(others) if each not in kept][: count - len(hot)]
        return Brought(mixed(hot, cold), frozenset(cold))

    def _others(self, layer: int, on_cards: int) -> Sequence[int]:
        assert self.catalog.experts is not None, "only mixtures have routed experts"
        return self.catalog.experts.ranked(layer)[on_cards:]

    def _stays(self, layer: int, expert: int) -> bool:
        if self.may_stay is None:
            return True
        return self.catalog.expert_number(layer, expert) in self.may_stay


def disk_order(
    catalog: Catalog, sweeps: Sequence[Sequence[int]], read: Collection[int]
) -> tuple[int, ...]:
    """What the disk reads for links, layer by layer, each link's in the order in which it comes.

    sweeps: of each link; read: the experts, all by their numbers.
    """
    of_links = [catalog.experts_in([n for n in sweep if n in read]) for sweep in sweeps]
    return tuple(
        catalog.expert_number(layer, expert)
        for layer, of_layer in enumerate(zip(*of_links, strict=True))
        for expert in mixed(*of_layer)
    )


def mixed(*lists: Sequence[int]) -> tuple[int, ...]:
    """All in their order, each spread evenly over the whole."""
    places = [((at + 0.5) / len(each), number) for each in lists for at, number in enumerate(each)]
    return tuple(number for _, number in sorted(places, key=lambda place: place[0]))


def dealt(ranked: Sequence[int], counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The first of `ranked` dealt out, so many to each card: all cards get hot ones and cold."""
    given: list[list[int]] = [[] for _ in counts]
    for expert in ranked[: sum(counts)]:
        card = min(
            (card for card, count in enumerate(counts) if len(given[card]) < count),
            key=lambda card: (len(given[card]) + 1) / counts[card],
        )
        given[card].append(expert)
    return tuple(map(tuple, given))
