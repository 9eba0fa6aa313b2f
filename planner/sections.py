"""Where a group may be cut, and where its sections end: fractions of bytes rounded to whole blocks.

The units of a group are parted, by rising unit, into what lives on the first card, on the second,
and so on, what is in RAM, and what is only on disk; of what is on no card, the first part may be
brought to cards in a step. All ends are places at which no block is cut, given by their index.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from shadowlane.planner.catalog import Catalog, Group
from shadowlane.planner.hybrid import NOTHING

TIE_NBYTES = 1e-6  # a difference that is rounding of floats


@dataclass(frozen=True, slots=True)
class Cuts:
    """The places at which one group may be cut, first and last included; what is before each.

    Attention has no weights: it may be cut at each KV head, and these count in place of bytes.
    Routed experts have no blocks; behind the last of them is their sum, which takes up nothing.
    """

    units: tuple[int, ...]
    blocks: tuple[int, ...]  # how many
    nbytes: tuple[int, ...]  # weights, of which plans have parts
    held_nbytes: tuple[int, ...]  # what they take up

    @property
    def last(self) -> int:
        return len(self.units) - 1

    @property
    def total(self) -> int:
        return self.nbytes[-1]

    def nearest(self, nbytes: float, low: int, high: int) -> int:
        """The place in [low, high] with so many bytes before it; of two as near, the first."""
        above = bisect_left(self.nbytes, nbytes, low, high + 1)
        if above <= low:
            return low
        if above > high:
            return high
        middle = (self.nbytes[above - 1] + self.nbytes[above]) / 2
        return above if nbytes > middle + TIE_NBYTES else above - 1


def cuts_of(catalog: Catalog, group: Group) -> Cuts:
    if group.kind == "attn":
        heads = tuple(range(group.units + 1))
        nothing = (0,) * len(heads)
        return Cuts(heads, nothing, heads, nothing)
    if group.kind == "experts":
        experts = catalog.experts
        assert experts is not None, "only mixtures have routed experts"
        places = tuple(range(group.units + 1))
        numbers = [min(place, experts.per_layer) for place in places]
        return Cuts(
            places,
            (0,) * len(places),
            tuple(number * experts.nbytes for number in numbers),
            tuple(number * experts.slot_nbytes for number in numbers),
        )
    units, blocks, nbytes, held = [0], [0], [0], [0]
    sizes, held_sizes, end = 0, 0, 0
    for count, index in enumerate(group.blocks):
        block = catalog.blocks[index]
        if count and block.first_unit >= end:
            units.append(block.first_unit)
            blocks.append(count)
            nbytes.append(sizes)
            held.append(held_sizes)
        sizes += block.nbytes
        held_sizes += block.held_nbytes
        end = max(end, block.last_unit)
    units.append(group.units)
    blocks.append(len(group.blocks))
    return Cuts(tuple(units), tuple(blocks), (*nbytes, sizes), (*held, held_sizes))


class Carry:
    """Rounds parts of groups, and makes up for it in the next of the same kind.

    Layers are alike: rounded one by one they would all err the same way, and a card would be left
    with room that was meant for them, or be short of it.
    """

    def __init__(self) -> None:
        self._owed: dict[str, float] = {}

    def round(self, key: str, cuts: Cuts, wanted: float, low: int, high: int) -> int:
        """As `Cuts.nearest`; an end that is wanted exactly stays where it is."""
        base, most = cuts.nbytes[low], cuts.nbytes[high]
        slack = NOTHING * max(1, cuts.total)
        if wanted <= base + slack:
            return low
        if wanted >= most - slack:
            return high
        owed = self._owed.get(key, 0.0)
        place = cuts.nearest(wanted + owed, low, high)
        left = owed + wanted - cuts.nbytes[place]
        self._owed[key] = max(-cuts.total / 2, min(cuts.total / 2, left))
        return place


def parted(
    cuts: Cuts,
    low: int,
    high: int,
    until: Sequence[float],
    carry: Carry | None = None,
    key: str = "",
) -> list[int]:
    """The ends of the cards' sections of [low, high]. until: parts up to and with each card's.

    carry: groups of one `key` make up for each other's rounding, card by card; None: each alone.
    """
    carry = carry or Carry()
    base = cuts.nbytes[low]
    ends: list[int] = []
    before = 0.0
    for card, part in enumerate(until):
        start = ends[-1] if ends else low
        wanted = base + (cuts.nbytes[high] - base) * part
        is_any = part > before  # else it is not to have what rounding owes
        ends.append(carry.round(f"{key} {card}", cuts, wanted, start, high) if is_any else start)
        before = part
    return ends


def until_each(over: Sequence[float], able: Sequence[bool]) -> list[float]:
    """What cards that are able share by `over`, added up card by card; empty: there is none."""
    parts = [part if can else 0.0 for part, can in zip(over, able, strict=True)]
    total = sum(parts)
    if total <= 0.0:
        return []
    sums = [min(1.0, each / total) for each in accumulate(parts)]
    last = max(card for card, part in enumerate(parts) if part)
    return [1.0 if card >= last else each for card, each in enumerate(sums)]


@dataclass(slots=True)
class Sections:
    """Where the sections of one group end, as places of its cuts."""

    ends: list[int]  # of what lives on each card, up to it; of the last card: of all
    ram: int  # of what is in RAM; from there on: only on disk. Both may be brought

    @property
    def on_cards(self) -> int:
        return self.ends[-1] if self.ends else 0

    def start(self, card: int) -> int:
        return self.ends[card - 1] if card else 0


def shared_as(cuts: Cuts, own: Sections, over: Sequence[float]) -> list[float]:
    """`until_each` of what lives on cards and, after it, of what is brought to them.

    Where the sections came out otherwise than by `over`, as they are.
    """
    held = cuts.nbytes[own.on_cards]
    until = until_each(over, [True] * len(own.ends)) or [1.0] * len(own.ends)
    for card, end in enumerate(own.ends[:-1]):
        if held and cuts.nearest(held * until[card], own.start(card), own.on_cards) != end:
            until[card] = cuts.nbytes[end] / held
    return list(accumulate(until, max))
